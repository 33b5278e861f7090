"""How a command that would go on for ever ends: by a signal, and cleanly.

It asks the bus for no more, and receives what was sent before that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from sbus_client import WHOAMI, Client

Job = Callable[[], Any]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_signal(jobs: Sequence[Job], leave: Job) -> list[Any]:
    """Run jobs in threads until one fails or all end; return their results.

    The first SIGINT or SIGTERM calls *leave*, which is to have the jobs end;
    a second one acts as usual.
    """

    def restore(*_: object) -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def handle(*_: object) -> None:
        restore()
        leave()

    former = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, handle)
    pool = ThreadPoolExecutor(len(jobs))
    # Not in the threads: a signal there would not end the wait of this one
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    running = [pool.submit(job) for job in jobs]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        return [job.result() for job in done]
    finally:
        restore()


def leave(bus: Client, patterns: Sequence[str]) -> None:
    """Ask for no more messages, and for an answer behind the last [CRED-3].

    The answer is the only control message that the client then receives.
    """
    for pattern in patterns or [""]:
        bus.unsubscribe(os.fsencode(pattern))
    bus.control(WHOAMI)
