"""How a command that would go on for ever ends: by a signal, and cleanly.

It asks the bus for no more, and reads what was sent before that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbus_client import WHOAMI, Client, Received

PACKETS_A_TURN = 64  # read before anything else is looked at
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """SIGINT and SIGTERM as something that poll(2) can wait for.

    The first of them asks for a clean end; a second one acts as usual.
    """

    def __enter__(self) -> Stop:
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        # A handler in Python runs when poll is over, which may be never
        self._former_end = signal.set_wakeup_fd(self._ends[1])
        self._former = {n: signal.signal(n, self._restore) for n in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        signal.set_wakeup_fd(self._former_end)
        for end in self._ends:
            os.close(end)

    def _restore(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def wait(
        self, events: Mapping[Any, int], seconds: float | None = None
    ) -> bool:
        """Wait for events of poll(2), by file, or for so long; return True,
        but once, if the end is asked for.
        """
        poll = select.poll()
        for file, event in {**events, self._ends[0]: select.POLLIN}.items():
            poll.register(file, event)
        ready = dict(poll.poll(None if seconds is None else 1000 * seconds))
        return self._ends[0] in ready and bool(os.read(self._ends[0], 1))


def arrived(bus: Client) -> Iterator[Received]:
    """Yield what there is without waiting, up to the packets of a turn."""
    with contextlib.suppress(TimeoutError):
        for _ in range(PACKETS_A_TURN):
            yield bus.receive(0)


def leave(bus: Client, patterns: Sequence[str]) -> None:
    """Ask for no more messages, and for an answer behind the last [CRED-3].

    The answer is the only control message that the client then receives.
    """
    for pattern in patterns or [""]:
        bus.unsubscribe(os.fsencode(pattern))
    bus.control(WHOAMI)
