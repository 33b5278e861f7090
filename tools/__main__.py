"""Runs the command line: python3 tools COMMAND, python3 -m sbus_tools."""

import signal
import sys
from pathlib import Path

# Until a command begins, Ctrl-C ends the process without a traceback
interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

if __package__:
    from .command_line import run
else:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from tools.command_line import run


def main() -> int:
    """Run the command line; return the exit status."""
    return run(interrupt)


if __name__ == "__main__":
    sys.exit(main())
