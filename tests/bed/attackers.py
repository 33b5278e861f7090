"""Those who attack a bus, and those who must not notice.

As root, they are different users.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator
from typing import Callable

from packets import publish
from processes import child_process
from real_bus import RealBus

IS_ROOT = os.getuid() == 0
ATTACKER = 1000 if IS_ROOT else os.getuid()
INNOCENT = 1001 if IS_ROOT else None  # for RealBus.connect


def descriptors(bus: RealBus) -> int:
    """Return how many descriptors a server has open."""
    return len(os.listdir(f"/proc/{bus.process.pid}/fd"))


@contextlib.contextmanager
def attack(work: Callable[[], object]) -> Iterator[int]:
    """Have a process of the attacker do some work; kill it in the end."""

    def drop_and_work() -> None:
        if IS_ROOT:
            os.setgroups([])
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
        work()

    with child_process(drop_and_work) as child:
        yield child


@contextlib.contextmanager
def descriptors_allowed(count: int) -> Iterator[None]:
    """Have more descriptors than usual for a while."""
    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (max(soft, min(count, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


class Pair:
    """A publisher and a subscriber who must not notice an attack."""

    def __init__(self, bus: RealBus, key: bytes = b"calm") -> None:
        self.publisher = bus.connect(INNOCENT, INNOCENT or 0)
        self.subscriber = bus.connect(INNOCENT, INNOCENT or 0)
        self.subscriber.send(b"SUB " + key)
        self.subscriber.fence()
        self.key = key
        self.seconds: list[float] = []  # that each message took
        self.numbers = itertools.count()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.wire.close()
        self.subscriber.wire.close()

    def talk(self, count: int) -> None:
        """Say something, and check that it is heard."""
        for number in itertools.islice(self.numbers, count):
            packet = publish(self.key, b"%d" % number)
            start = time.monotonic()
            self.publisher.send(packet)
            assert self.subscriber.receive() == packet
            self.seconds.append(time.monotonic() - start)

    def milliseconds(self, part: float) -> float:
        """Return within how long such a part of the messages arrived."""
        times = sorted(self.seconds)
        return times[int(part * (len(times) - 1))] * 1000
