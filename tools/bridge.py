"""bridge: join two buses, so that each carries what the other does.

No message goes round: a bus sends no echo [ECHO-2], so a bridge never hears
what it has published itself.  It would hear the messages of another bridge,
between the same buses or in a ring of them.  So each bridge publishes a
probe on its left bus, under a key that all bridges of its user forward.  If
it hears the probe on its right bus, there is another path, and it ends.  Of
two bridges, the one that subscribed later finds the other.  The keys of
probes are secret to the user [CRED-11], so nobody else can end a bridge.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from sbus_client import Client, ControlMessage, Disconnected, SbusError

from . import shared
from .shared import Options
from .stop import leave, run_until_signal

ROUND = "messages would go round for ever"
RING = "does another user's bridge join the same buses?"
WINDOW = 10_000  # messages: if a tenth is the same, it may go round
NOBODY = 65_534  # and the process 0: they have no secrets [CRED-8]


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


def forward(source: Side, target: Side, own: bytes) -> Disconnected | None:
    """Forward from one bus to the other until a control message comes.

    *own* is this bridge's probe.  Returns an error if the target has ended:
    that may have left more to forward from it.
    Raises: Disconnected if the source has; SbusError if there is a ring.
    """
    one, other = source.bus, target.bus
    for number, received in enumerate(one):
        if number % WINDOW == 0:
            sample, repeats = received, 0
        repeats += received == sample
        if repeats == WINDOW // 10:
            shared.note(f"one message comes again and again: {RING}")
        if isinstance(received, ControlMessage):
            break
        key, payload = received
        if source.probes and key.startswith(source.probes):
            probe = key[len(source.probes) :]
            if probe == own:
                ends = f"{other.address} and {one.address}"
                raise SbusError(f"{ends} are joined already: {ROUND}")
            key = target.probes + probe
        try:
            other.publish(key, payload)
        except Disconnected as error:
            return error
    return None


@shared.command(
    "bridge /tmp/one.bus /tmp/other.bus --pattern 'shared/'",
    shared.argument("addresses", "a bus", metavar="ADDRESS", nargs=2),
    shared.PATTERN_OPTION,
    has_address=False,
)
def bridge(options: Options) -> None:
    """Join two buses: publish on each what is published on the other.

    It runs until one of them ends, or SIGINT or SIGTERM comes; then the exit
    status is 0.  Publishers wait for the slower bus (blocking/soft/block).
    Secret keys stay on their own bus.  Bridges must not form a ring, whatever
    their patterns, or messages would go round for ever.  A bridge that finds
    another path between its buses, over bridges of its own user, ends with
    the exit status 1; over those of another user, it can only remark that a
    message comes again and again.  Nobody answers a request across a bridge,
    as private keys stay at home.
    """
    one, other = options.addresses
    wait = shared.ANSWER_SECONDS
    with (
        shared.open_bus(Options(address=one), wait) as one_bus,
        shared.open_bus(Options(address=other), wait) as other_bus,
    ):
        left = join(one_bus, options.pattern)
        right = join(other_bus, options.pattern)
        right.bus.sync(wait)  # the probe cannot come before
        probe = os.urandom(16).hex().encode("ascii")
        if left.probes and right.probes:
            left.bus.publish(left.probes + probe)
        left.bus.sync(wait)
        ways = (left, right), (right, left)
        lanes = [partial(forward, *way, probe) for way in ways]

        def end() -> None:
            for side in (left, right):
                leave(side.bus, side.patterns)

        for error in run_until_signal(lanes, end):
            if error:
                raise error
