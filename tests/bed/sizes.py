"""How much a test does: a first size, or with SBUS_SOAK=4 the full one."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

FACTOR = max(1, int(os.environ.get("SBUS_SOAK", "1")))
IS_SOAK = FACTOR > 1
SOAK = pytest.mark.timeout(3 * 3_600 if IS_SOAK else 400)
# A proof takes a core for long, and logs what nobody reads
PROOF = [
    pytest.mark.timeout(400 * FACTOR**2),
    pytest.mark.usefixtures("undisturbed"),
]


def either(soak: T, test: T) -> T:
    """Return the one size in "make soak" and the other in "make test"."""
    return soak if IS_SOAK else test
