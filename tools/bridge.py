"""bridge: join two buses, so that each hears what the other does.

No message goes round: a bus sends no echo [ECHO-2], so that a bridge never
hears what it has published itself.  It would hear what another bridge has,
between the same buses or in a ring of them.  So each bridge publishes a
probe on its left bus, under a key that all bridges forward; if it hears
that on its right bus there is another way, and it ends.  Of two bridges
the one that subscribed later finds the other.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence

from sbus_client import (
    AddressError,
    Client,
    Command,
    ControlMessage,
    Disconnected,
    LenientClient,
    Message,
    Options,
    Received,
    SbusError,
    UsageError,
    argument,
    random_text,
    subscribe,
)

from .patterns import PATTERN_OPTION
from .stop import PACKETS_A_TURN, Stop, leave

PROBES = "sbus/bridge/"


class Lane:
    """One direction of a bridge, which must not hear its own probe."""

    def __init__(self, source: Client, target: Client, probe: bytes) -> None:
        self.source = source
        self.target = target
        self.probe = probe
        self.has_ended = False
        self._held: Received | None = None  # received, and not yet published

    def wanted(self) -> tuple[Client, int]:
        """Return the event of poll(2) without which nothing goes on."""
        if self._held is None:
            return self.source, select.POLLIN
        return self.target, select.POLLOUT

    def forward(self) -> bool:
        """Publish what is received, up to the packets of a turn.

        Return whether neither side has us wait for more.
        Raises: Disconnected; SbusError if there is another way.
        """
        try:
            for _ in range(PACKETS_A_TURN):
                self._step(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def finish(self) -> None:
        """Publish what a bus that has ended has left, however long it takes.

        There is nothing to do if it is the other bus that has ended.
        """
        with contextlib.suppress(BlockingIOError, Disconnected):
            while True:
                self._step(0)

    def _step(self, flags: int) -> None:
        """Publish a message.  Raises: BlockingIOError; SbusError."""
        if self._held is None:
            self._held = self.source.receive(flags=socket.MSG_DONTWAIT)
        if self._held.key == self.probe:
            raise SbusError(
                f"{self.target.address} and {self.source.address} are joined"
                " already: messages would go round for ever"
            )
        if isinstance(self._held, Message):
            self.target.publish(*self._held, flags=flags)
        self.has_ended |= isinstance(self._held, ControlMessage)
        self._held = None


def join(bus: Client, patterns: Sequence[str]) -> None:
    """Ask a bus for what is to be forwarded, and to wait for us."""
    bus.control("echo/off")
    bus.control("blocking/soft/block")
    subscribe(bus, patterns)


def forward_all(lanes: Sequence[Lane], patterns: Sequence[str]) -> None:
    """Forward in both directions until a signal comes.

    Neither direction waits for the other one.
    Raises: Disconnected when a bus ends; SbusError if there is another way.
    """
    with Stop() as stop:
        while True:
            are_busy = [lane.forward() for lane in lanes]
            if all(lane.has_ended for lane in lanes):
                return
            wanted: dict[Client, int] = {}
            for lane in lanes:
                bus, event = lane.wanted()
                wanted[bus] = wanted.get(bus, 0) | event
            if stop.wait(wanted, 0 if any(are_busy) else None):
                for lane in lanes:
                    leave(lane.source, patterns)


def bridge(options: Options) -> None:
    """Join two buses: what is published on one is heard on both."""
    if hasattr(options, "address"):
        raise UsageError("bridge takes two addresses and no -a")
    one, other = options.addresses
    with LenientClient(one) as left, LenientClient(other) as right:
        name = left.socket.getpeername()
        if name and name == right.socket.getpeername():
            raise AddressError(f"{one} and {other} are the same bus")
        patterns = [*(options.pattern or [""]), PROBES]
        for bus in (left, right):
            join(bus, patterns)
        right.sync()  # the probe cannot come before
        probe = PROBES.encode("ascii") + random_text()
        left.publish(probe)
        left.sync()
        lanes = [Lane(left, right, probe), Lane(right, left, probe)]
        try:
            forward_all(lanes, patterns)
        except Disconnected:
            for lane in lanes:
                lane.finish()
            raise


BRIDGE_HELP = """
Join two buses: publish on each what is published on the other, until one of
them ends, or SIGINT or SIGTERM comes; then the exit status is 0.  Publishers
wait for the slower bus: the bridge asks for blocking/soft/block.  Secret keys
stay on their own bus.  Between any two buses there must be only one way over
bridges, whatever their patterns, or messages would go round for ever: a
bridge that finds another way, by a message under sbus/bridge/, ends with the
exit status 1.
"""

COMMAND = Command(
    bridge,
    "join two buses",
    BRIDGE_HELP,
    "bridge /tmp/one.bus /tmp/other.bus --pattern 'shared/'",
    (
        argument("addresses", metavar="ADDRESS", nargs=2, help="a bus"),
        PATTERN_OPTION,
    ),
    has_address=False,
)
