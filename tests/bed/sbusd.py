"""Starts sbus.py as the installed command does: compiled once for all."""

import sys

sys.path[0] += "/../.."

import sbus  # noqa: E402

sys.exit(sbus.main())
