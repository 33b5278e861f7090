"""Runs the command line: python3 spec/conformance --server COMMAND."""

import sys
from pathlib import Path

if not __package__:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
