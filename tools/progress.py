"""A line on a terminal that says how far a command is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from . import options

CLEAR_LINE = "\x1b[K"  # from the cursor to the end of the line
PROGRESS_SECONDS = 0.2


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a standard stream is there and is a terminal."""
    return stream is not None and stream.isatty()


class Progress:
    """A line that is written over, if standard error is a terminal."""

    def __init__(self) -> None:
        is_wanted = options.remarks_are_wanted
        self.is_seen = is_wanted and is_terminal(sys.stderr)
        self._due = time.monotonic() + PROGRESS_SECONDS
        self._describe: Callable[[], str] = str
        self._is_shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._print("\n")

    def show(self, describe: Callable[[], str]) -> None:
        """Show how far we are, a few times a second and at the end."""
        self._describe = describe
        now = time.monotonic()
        if self.is_seen and now >= self._due:
            self._due = now + PROGRESS_SECONDS
            self._is_shown = True
            self._print()

    def _print(self, end: str = "") -> None:
        line = f"\r{self._describe()}{CLEAR_LINE}{end}"
        print(line, end="", file=sys.stderr, flush=True)
