"""How a command that would go on for ever ends: by a signal, and cleanly.

It asks the bus for no more, and reads what was sent before that.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence

from sbus_client import WHOAMI, Client, Received

PACKETS_A_TURN = 64  # read before anything else is looked at


class Stop:
    """SIGINT and SIGTERM as something that poll(2) can wait for.

    The first of them asks for a clean end; a second one acts as usual.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Stop:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # A handler in Python runs when poll is over, which may be never
        self._former_end = signal.set_wakeup_fd(self._write_end)
        self._former = [signal.signal(n, self._restore) for n in self.SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        signal.set_wakeup_fd(self._former_end)
        os.close(self._read_end)
        os.close(self._write_end)

    def _restore(self, *_: object) -> None:
        for number, handler in zip(self.SIGNALS, self._former):
            signal.signal(number, handler)

    def wait(
        self, events: Mapping[Client, int], seconds: float | None = None
    ) -> bool:
        """Wait for events of poll(2), for so long; return True, but once,
        if the end is asked for.
        """
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        for bus, event in events.items():
            poll.register(bus, event)
        ready = poll.poll(None if seconds is None else 1000 * max(0, seconds))
        is_asked = self._read_end in dict(ready)
        return is_asked and bool(os.read(self._read_end, 1))


def arrived(bus: Client) -> Iterator[Received]:
    """Yield what there is without waiting, up to the packets of a turn."""
    for _ in range(PACKETS_A_TURN):
        try:
            yield bus.receive(flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return


def leave(bus: Client, patterns: Sequence[str]) -> None:
    """Ask for no more messages, and for an answer behind the last [CRED-3].

    The answer is the only control message that the client then gets.
    """
    for pattern in patterns or [""]:
        bus.unsubscribe(os.fsencode(pattern))
    bus.control(WHOAMI)
