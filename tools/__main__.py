"""Runs the command line: python3 tools COMMAND, python3 -m sbus_tools."""

import signal
import sys
from pathlib import Path

# Until all is loaded, Ctrl-C ends the process without a traceback
interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

if __package__:
    from .command_line import main
else:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from tools.command_line import main

signal.signal(signal.SIGINT, interrupt)

if __name__ == "__main__":
    sys.exit(main())
