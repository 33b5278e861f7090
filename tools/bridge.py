"""bridge: join two buses, so that each carries what the other does.

No message goes round: a bus sends no echo [ECHO-2], so a bridge never hears
what it has published itself.  It would hear the messages of another bridge,
between the same buses or in a ring of them.  So each bridge publishes a
probe on its left bus, under a key that all bridges forward, whatever their
patterns.  If it hears its probe on its right bus, there is another path, and
it ends.  A bridge that starts while another one runs finds it; but bridges
that start at the same time may find each other, and all end.  A user of both
buses can end a bridge so; but that user could pass on all messages as well.
"""

from __future__ import annotations

import os
from functools import partial

from sbus_client import Client, Disconnected, Message, PacketError, SbusError

from . import shared
from .shared import Options
from .stop import leave, run_until_signal

PROBES = "sbus/bridge/"  # the pattern of all probes


def forward(source: Client, target: Client, probe: str) -> None:
    """Forward from one bus to the other until a control message comes.

    If the target has ended, it may have left more to forward from it.  So the
    other direction reads on there to the end, and raises the error.
    Raises: Disconnected if the source has ended; SbusError if there is a ring.
    """
    for received in source:
        if not isinstance(received, Message):
            break
        key, payload = received
        if key == probe.encode():
            problem = "are joined already: messages would go round for ever"
            raise SbusError(f"{target.address} and {source.address} {problem}")
        try:
            target.publish(key, payload)
        except PacketError as error:  # above the limits of our client
            shared.note(f"{target.address} does not get a message: {error}")
        except Disconnected:
            return


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
    Secret keys stay on their own bus; so nobody answers a request across a
    bridge.  Both servers need the same --max-key, --max-packet and
    --max-segments, as a message above those of the other bus ends the bridge.
    Bridges must not form a ring, whatever their patterns, or messages
    would go round for ever.  So a bridge publishes one message at its start,
    under sbus/bridge/.  If that comes back over other bridges, whosever they
    are, it ends with the exit status 1.  Do not start two bridges of the same
    buses at once: all of them may end.
    """
    wait = shared.ANSWER_SECONDS
    sides = [Options(address=a, timeout=wait) for a in options.addresses]
    patterns = [*(options.pattern or [""]), PROBES]
    with (
        shared.open_bus(sides[0]) as left,
        shared.open_bus(sides[1]) as right,
    ):
        for bus in left, right:
            bus.control("echo/off")
            bus.control("blocking/soft/block")
            shared.subscribe(bus, patterns)
        right.sync(wait)  # the probe cannot come before
        probe = PROBES + os.urandom(16).hex()
        left.publish(probe)
        left.sync(wait)

        def leave_both() -> None:
            for bus in left, right:
                leave(bus, patterns)

        # On the left bus any user could send the probe again.  So no message
        # from there counts as the probe: no key is a NUL
        lanes = [
            partial(forward, left, right, "\0"),
            partial(forward, right, left, probe),
        ]
        run_until_signal(lanes, leave_both)
