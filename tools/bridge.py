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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sbus_client import (
    AddressError,
    Client,
    ControlMessage,
    Disconnected,
    SbusError,
)

from . import options as shared
from .options import Options
from .stop import Stop, arrived, leave

NOBODY = 65_534  # and the process 0: they have no secrets [CRED-8]
Lane = Iterator[tuple[Any, int]]  # forwards; says what poll(2) is to wait for


class Side(NamedTuple):
    """A bus that is joined."""

    bus: Client
    probes: bytes  # what their keys begin with there, if there can be any
    patterns: Sequence[str]


def join(bus: Client, patterns: Sequence[str]) -> Side:
    """Ask a bus for what is to be forwarded, and to wait for us.

    Raises: TimeoutError; Disconnected.
    """
    gid, uid, pid, path = bus.whoami(shared.ANSWER_SECONDS)
    probes, wanted = b"", [*(patterns or [""])]
    if pid and NOBODY not in (gid, uid):
        outer = path[: path.rindex(b"!/cred/")]
        probes = b"%b!/cred//%d//sbus/bridge/" % (outer, uid)
        wanted.append(os.fsdecode(probes))
    bus.control("echo/off")
    bus.control("blocking/soft/block")
    shared.subscribe(bus, wanted)
    return Side(bus, probes, wanted)


def lane(source: Side, target: Side, own_probe: bytes) -> Lane:
    """Forward from one bus to the other until a control message comes.

    Raises: Disconnected; SbusError if there is another way.
    """
    one, other = source.bus, target.bus
    while True:
        for received in arrived(one):
            if isinstance(received, ControlMessage):
                return
            key, payload = received
            if source.probes and key.startswith(source.probes):
                probe = key[len(source.probes) :]
                if probe == own_probe:
                    raise SbusError(
                        f"{other.address} and {one.address} are joined"
                        " already: messages would go round for ever"
                    )
                key = target.probes + probe
            while True:
                try:
                    other.publish(key, payload, 0)
                    break
                except TimeoutError:
                    yield other.socket, select.POLLOUT
        yield one, select.POLLIN


def forward(lanes: Sequence[Lane], sides: Sequence[Side]) -> None:
    """Forward in both directions until a signal comes.

    Neither direction waits for the other one.
    Raises: Disconnected when a bus ends; SbusError if there is another way.
    """
    with Stop() as stop:
        while events := [e for each in lanes if (e := next(each, None))]:
            if stop.wait(dict(events)):
                for side in sides:
                    leave(side.bus, side.patterns)


def finish(lane: Lane) -> None:
    """Publish what a bus that has ended has left, however long it takes.

    There is nothing to do if it is the other bus that has ended.
    """
    with contextlib.suppress(Disconnected):
        for file, event in lane:
            poll = select.poll()
            poll.register(file, event)
            if not poll.poll(0 if event == select.POLLIN else None):
                return


@shared.command(
    "bridge /tmp/one.bus /tmp/other.bus --pattern 'shared/'",
    shared.argument("addresses", metavar="ADDRESS", nargs=2, help="a bus"),
    shared.PATTERN_OPTION,
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
        raise shared.UsageError("bridge takes two addresses and no -a")
    one, other = options.addresses
    wait = shared.ANSWER_SECONDS
    with (
        shared.open_bus(Options(address=one), wait) as one_bus,
        shared.open_bus(Options(address=other), wait) as other_bus,
    ):
        name = one_bus.socket.getpeername()
        if name and name == other_bus.socket.getpeername():
            raise AddressError(f"{one} and {other} are the same bus")
        left, right = sides = [
            join(bus, options.pattern) for bus in (one_bus, other_bus)
        ]
        right.bus.sync(wait)  # the probe cannot come before
        probe = os.urandom(16).hex().encode("ascii")
        if left.probes and right.probes:
            left.bus.publish(left.probes + probe)
        left.bus.sync(wait)
        lanes = [lane(left, right, probe), lane(right, left, probe)]
        try:
            forward(lanes, sides)
        except Disconnected:
            for each in lanes:
                finish(each)
            raise
