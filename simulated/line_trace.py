"""Notes which lines of a program run."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

EVENTS_MAX = 20_000  # of a step, as noting them takes time
LINES_MAX = 200  # of a step that are shown


class LineTrace:
    """The lines of a file that have run, each once, in the order of time."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._lines: dict[int, None] = {}
        self._events = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._note)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def take(self) -> list[int]:
        """Return the numbers of the lines since the last call."""
        lines = [*self._lines][:LINES_MAX]
        self._lines.clear()
        self._events = 0
        return lines

    def _note(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        self._events += 1
        if self._events > EVENTS_MAX:
            return None
        if event == "line":
            self._lines[frame.f_lineno] = None
        return self._note
