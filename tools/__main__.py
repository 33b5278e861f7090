"""Runs the command line: python3 tools COMMAND, python3 -m sbus_tools."""

# Before all else, as the module signal takes milliseconds to load
import _signal as signal  # type: ignore

# Until a command begins, Ctrl-C ends the process without a traceback
interrupt = signal.getsignal(signal.SIGINT)
if interrupt is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os  # noqa: E402
import sys  # noqa: E402

if __package__:
    from .command_line import run
else:  # run by its path, which Python has put first
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    from tools.command_line import run


def main() -> int:
    """Run the command line; return the exit status."""
    return run(interrupt)


if __name__ == "__main__":
    sys.exit(main())
