"""bridge: join two buses, so that each hears what the other does.

No message goes round: a bus sends no echo [ECHO-2], so that a bridge never
hears what it has published itself.  It would hear what another bridge has,
between the same buses or in a ring of them.  So each bridge publishes a
probe on its left bus, under a key that all bridges of its user forward; if
it hears that on its right bus there is another way, and it ends.  Of two
bridges the one that subscribed later finds the other.  The keys of probes
are secret to the user [CRED-11], so that nobody else can end a bridge.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from sbus_client import (
    ANSWER_SECONDS,
    AddressError,
    Client,
    ControlMessage,
    Disconnected,
    Message,
    Options,
    Received,
    SbusError,
    UsageError,
    argument,
    command,
    random_text,
    subscribe,
)

from .lenient import open_bus
from .options import PATTERN_OPTION
from .stop import PACKETS_A_TURN, Stop, leave

NOBODY = 65_534  # and the process 0: they have no secrets [CRED-8]


class Side(NamedTuple):
    """A bus that is joined, and how the keys of probes begin there."""

    bus: Client
    probes: bytes

    def patterns(self, chosen: Sequence[str]) -> list[str]:
        """Return what the bridge subscribes to."""
        probes = [os.fsdecode(self.probes)] if self.probes else []
        return [*(chosen or [""]), *probes]


def side_of(bus: Client) -> Side:
    """Ask a bus who we are there.  Raises: TimeoutError; Disconnected."""
    gid, uid, pid, path = bus.whoami(ANSWER_SECONDS)
    if pid == 0 or NOBODY in (gid, uid):
        return Side(bus, b"")
    own = path.rindex(b"!/cred/")
    return Side(bus, path[:own] + b"!/cred//%d//sbus/bridge/" % uid)


class Lane:
    """One direction of a bridge, which must not hear its own probe."""

    def __init__(self, source: Side, target: Side, probe: bytes) -> None:
        self.source, self._probes = source
        self.target, self._probes_there = target
        self._probe = probe
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
        if isinstance(self._held, Message):
            self.target.publish(*self._translated(self._held), flags=flags)
        self.has_ended |= isinstance(self._held, ControlMessage)
        self._held = None

    def _translated(self, message: Message) -> Message:
        """Return what to publish: of a probe, with the key of that bus.

        Raises: SbusError if it is our own.
        """
        if not self._probes or not message.key.startswith(self._probes):
            return message
        probe = message.key[len(self._probes) :]
        if probe == self._probe:
            raise SbusError(
                f"{self.target.address} and {self.source.address} are joined"
                " already: messages would go round for ever"
            )
        return Message(self._probes_there + probe, message.payload)


def join(side: Side, patterns: Sequence[str]) -> None:
    """Ask a bus for what is to be forwarded, and to wait for us."""
    side.bus.control("echo/off")
    side.bus.control("blocking/soft/block")
    subscribe(side.bus, side.patterns(patterns))


def forward_all(
    lanes: Sequence[Lane], sides: Sequence[Side], patterns: Sequence[str]
) -> None:
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
                for side in sides:
                    leave(side.bus, side.patterns(patterns))


@command(
    "bridge /tmp/one.bus /tmp/other.bus --pattern 'shared/'",
    argument("addresses", metavar="ADDRESS", nargs=2, help="a bus"),
    PATTERN_OPTION,
    has_address=False,
)
def bridge(options: Options) -> None:
    """Join two buses: publish on each what is published on the other.

    This goes on until one of them ends, or SIGINT or SIGTERM comes; then the
    exit status is 0.  Publishers wait for the slower bus: the bridge asks for
    blocking/soft/block.  Secret keys stay on their own bus.  Between any two
    buses there must be only one way over bridges, whatever their patterns, or
    messages would go round for ever: a bridge that finds another way, over
    bridges of its own user, ends with the exit status 1.
    """
    if hasattr(options, "address"):
        raise UsageError("bridge takes two addresses and no -a")
    one, other = options.addresses
    with (
        open_bus(Options(address=one), ANSWER_SECONDS) as one_bus,
        open_bus(Options(address=other), ANSWER_SECONDS) as other_bus,
    ):
        name = one_bus.socket.getpeername()
        if name and name == other_bus.socket.getpeername():
            raise AddressError(f"{one} and {other} are the same bus")
        left, right = sides = [side_of(bus) for bus in (one_bus, other_bus)]
        for side in sides:
            join(side, options.pattern)
        right.bus.sync(ANSWER_SECONDS)  # the probe cannot come before
        probe = random_text()
        if left.probes and right.probes:
            left.bus.publish(left.probes + probe)
        left.bus.sync(ANSWER_SECONDS)
        lanes = [Lane(left, right, probe), Lane(right, left, probe)]
        try:
            forward_all(lanes, sides, options.pattern)
        except Disconnected:
            for lane in lanes:
                lane.finish()
            raise
