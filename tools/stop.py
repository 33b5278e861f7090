"""How a command that would go on for ever ends: by a signal, and cleanly.

It asks the bus for no more, and receives what was sent before that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from threading import Semaphore, Thread

from sbus_client import WHOAMI, Client

Work = Callable[[], object]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Job(Thread):
    """A function in a thread of its own, which has begun."""

    def __init__(self, work: Work, ended: Semaphore | None = None) -> None:
        super().__init__(target=work)
        self.error: BaseException | None = None
        self.ended = ended or Semaphore()  # released at the end
        self.start()

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self.error = error
        self.ended.release()

    def wait(self) -> None:
        """Wait for the end.  Raises: the error of the function."""
        self.join()
        if self.error:
            raise self.error


def run_until_signal(works: Sequence[Work], leave: Work) -> None:
    """Run functions in threads until one fails, or all end.

    The first SIGINT or SIGTERM calls *leave*, which is to have them end; a
    second one acts as usual.
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
    ended = Semaphore(0)
    # Not in the threads: a signal there would not end the wait of this one
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    jobs = [Job(work, ended) for work in works]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        for _ in jobs:
            ended.acquire()
            for job in jobs:
                if job.error:
                    raise job.error
    finally:
        restore()


def leave(bus: Client, patterns: Sequence[str]) -> None:
    """Ask for no more messages, and for an answer behind the last [CRED-3].

    The answer is the only control message that the client then receives.
    """
    for pattern in patterns or [""]:
        bus.unsubscribe(os.fsencode(pattern))
    bus.control(WHOAMI)
