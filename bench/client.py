"""How fast sbus_client.py is, beside bare loops around send and recv.

    python3 -m bench.client
    python3 -m bench.client --rounds 1

Both move the same packets over a pair of sockets in one process, so that
nothing hides the difference.  A ratio of 1.00 is as fast as the bare loop,
which looks at nothing.

Where a system call is quick, Python cannot reach some of the bounds.  A bare
loop that also joins key and payload reaches 0.90 at 64 bytes, and one that
cuts a packet and makes a Message of it reaches 0.52.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable
from typing import Any, Callable, NamedTuple

from sbus_client import AsyncClient, Client

from . import harness
from .harness import Sample, Sides

SEND_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)  # if allowed
TOGETHER_BYTES = 100_000  # that are sent before any are received
FIGURE = "messages/s"
MESSAGES, BYTES = 20_000, 80_000_000  # at most, of a round


class Ends:
    """A pair of sockets: a client at the near end, nothing at the other."""

    def __init__(self, kind: type[Any], size: int) -> None:
        kinds = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, self.far = socket.socketpair(*kinds)
        for end in (near, self.far):
            end.setsockopt(*SEND_BUFFER)
        self.client = kind(f"/dev/fd/{near.detach()}")
        self.payload = b"x" * size
        self.packet = b"MSG k\0" + self.payload
        self.together = max(1, min(100, TOGETHER_BYTES // size))


# ==== Ways to send and to receive as many messages as go together ============

Way = Callable[[Ends], Awaitable[None]]


async def send(ends: Ends) -> None:
    send, packet = ends.client.socket.send, ends.packet
    for _ in range(ends.together):
        send(packet)


async def publish(ends: Ends) -> None:
    publish, payload = ends.client.publish, ends.payload
    for _ in range(ends.together):
        publish("k", payload)


async def async_publish(ends: Ends) -> None:
    publish, payload = ends.client.publish, ends.payload
    for _ in range(ends.together):
        await publish("k", payload)


async def recv(ends: Ends) -> None:
    recv, size = ends.client.socket.recv, len(ends.packet)
    for _ in range(ends.together):
        recv(size)


async def iterate(ends: Ends) -> None:
    for _ in zip(range(ends.together), ends.client):
        pass


async def async_iterate(ends: Ends) -> None:
    left = ends.together
    async for _ in ends.client:
        left -= 1
        if not left:
            return


# ==== The table ==============================================================


class Case(NamedTuple):
    """A call of the library, and a bare one."""

    at_least: float  # the ratio that is promised
    size: int  # of a payload
    kind: type[Any]  # of the client
    way: Way
    bare: Way


CASES = {
    "publish-64": Case(0.9, 64, Client, publish, send),
    "publish-4k": Case(0.9, 4_096, Client, publish, send),
    "iterate-64": Case(0.9, 64, Client, iterate, recv),
    "iterate-4k": Case(0.9, 4_096, Client, iterate, recv),
    "iterate-400k": Case(0.8, 400_000, Client, iterate, recv),
    "async-publish-64": Case(0.6, 64, AsyncClient, async_publish, send),
    "async-for-64": Case(0.6, 64, AsyncClient, async_iterate, recv),
}


async def move(case: Case, way: Way) -> Sample:
    """Return how many messages a second a way moves."""
    ends, seconds, moved = Ends(case.kind, case.size), 0.0, 0
    if case.kind is AsyncClient:
        await ends.client.connect()
    while moved * case.size < BYTES and moved < MESSAGES:
        for _ in range(ends.together if case.bare is recv else 0):
            ends.far.send(ends.packet)
        start = time.perf_counter()
        await way(ends)
        seconds += time.perf_counter() - start
        for _ in range(ends.together if case.bare is send else 0):
            ends.far.recv(len(ends.packet))
        moved += ends.together
    ends.client.close()
    ends.far.close()
    return {FIGURE: moved / seconds}


def sides_of(name: str) -> Sides:
    """Return what is compared in a case."""
    case = CASES[name]
    return {
        "library": lambda: asyncio.run(move(case, case.way)),
        "bare loop": lambda: asyncio.run(move(case, case.bare)),
    }


def main() -> int:
    """Print the table."""
    parser = harness.OptionParser("bench.client", __doc__, rounds=15)
    bounds = {name: f"{case.at_least} or more" for name, case in CASES.items()}
    return harness.print_table(parser.parse(bounds), [FIGURE], sides_of)


if __name__ == "__main__":
    harness.run(main)
