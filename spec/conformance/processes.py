"""Processes: their children, states, limits; signals to the kit."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Callable


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], object]]:
    """Hold up signals that end the kit; return what releases them.

    Where one arrives, what was begun is not finished: a process that is
    started would be unknown, a lock within subprocess locked for ever.
    """
    hold, restore = signal.SIG_BLOCK, signal.SIG_SETMASK
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = signal.pthread_sigmask(hold, ending)
    try:
        yield lambda: signal.pthread_sigmask(restore, before)
    finally:
        signal.pthread_sigmask(restore, before)


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process has started, and so on."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


def state_of(process: int) -> str:
    """Return the letter that Linux has for a process's state, if it lives."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text("latin-1")
        return stat.rpartition(")")[2].split()[0]
    return ""


def is_stopped(process: int) -> bool:
    """Return whether a process does nothing until it is told to go on."""
    return state_of(process) not in ("R", "S", "D")


def is_running(process: int) -> bool:
    """Return whether a process has the processor, or waits for it."""
    return state_of(process) == "R"


def limit(process: int, what: int, most: int) -> None:
    """Set a limit of a process that runs, unless it has ended."""
    with contextlib.suppress(OSError):
        resource.prlimit(process, what, (most, most))
