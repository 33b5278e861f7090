"""All checks of a server's process, in the order in which they are made."""

from __future__ import annotations

from . import logs, running, traffic
from .trial import CHECKS

__all__ = ["CHECKS", "logs", "running", "traffic"]
