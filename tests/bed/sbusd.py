"""Starts sbus.py as the installed command does: compiled once for all."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import sbus  # noqa: E402

sys.exit(sbus.main())
