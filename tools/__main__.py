"""Runs the command line: python3 tools COMMAND."""

import sys
from pathlib import Path

if not __package__:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
