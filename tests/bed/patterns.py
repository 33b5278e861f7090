"""Clients of a bus without a server, and patterns by the thousand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import sbus
from fake_kernel import OWNER, options_of

OWN = sbus.Credentials(100, 1000, 4242)
TOKENS = [b"", b"!", b"cred", b"100", b"1000", b"4242", b"*", b"c*", b"x"]


def wide_bus() -> sbus.Bus:
    """Return a bus on which a client may have any number of patterns."""
    names = "patterns pattern_bytes user_patterns user_pattern_bytes shapes"
    options = {f"max_{name}": "unlimited" for name in names.split()}
    return sbus.Bus(options_of(**options), OWNER)


class Listener:
    """A client of a bus without sockets."""

    def __init__(self, bus: sbus.Bus, own: sbus.Credentials) -> None:
        self.bus = bus
        self.own = own
        self.client = bus.open(own)

    def send(self, packet: bytes) -> bool:
        """Have the bus handle a packet; return whether it is no mistake."""
        try:
            self.bus.handle(self.client, packet, packet)
        except sbus.ProtocolError:
            return False
        return True

    def take(self) -> list[sbus.Packet]:
        """Return what was routed to the client since the last time."""
        packets, self.client.outbox = self.client.outbox, []
        self.bus.pending.clear()
        return packets


def texts(alphabet: bytes, length_max: int) -> Iterator[bytes]:
    """Return every text of these bytes up to a length."""
    for length in range(length_max + 1):
        for values in itertools.product(alphabet, repeat=length):
            yield bytes(values)


def mutate(random_: random.Random, packet: bytes) -> bytes:
    """Return a packet with a few bytes changed, taken out or put in."""
    place = random_.randrange(len(packet) + 1)
    more = random_.choice([b"", b"\0", b"!", b"/", b"*", b"\xff", b"0", b"//"])
    skipped = random_.choice([0, 1, 1, 3])
    return packet[:place] + more + packet[place + skipped :]
