"""Has signals wait until it is known what they are to end."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator, Sequence
from subprocess import Popen
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held() -> Iterator[set[int]]:
    """Have signals that end a service wait.  Yields: those held before.

    A thread that starts meanwhile never takes one: the wait of the main
    thread would go on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:  # a handler may raise as the mask is set
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def starting(words: Sequence[str], **options: Any) -> Iterator[Popen[bytes]]:
    """Start a process; no signal comes before the block has noted it.

    A handler that ran earlier would leave the process behind.  The process
    has a session of its own, as Ctrl-C is for the service alone.
    """
    with held() as before:
        # Signals do not wait in the process, which has the mask of this one
        release = functools.partial(
            signal.pthread_sigmask, signal.SIG_SETMASK, before
        )
        yield Popen(
            words, start_new_session=True, preexec_fn=release, **options
        )
