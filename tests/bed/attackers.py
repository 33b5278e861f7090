"""Those who attack a bus, and those who must not notice.

As root, they are different users.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Callable

from packets import publish
from processes import child_process
from real_bus import RealBus

IS_ROOT = os.getuid() == 0
ATTACKER = 1000 if IS_ROOT else os.getuid()
INNOCENT = 1001 if IS_ROOT else os.getuid()


def descriptors(bus: RealBus) -> int:
    """Return how many descriptors a server has open."""
    return len(os.listdir(f"/proc/{bus.process.pid}/fd"))


@contextlib.contextmanager
def attack(work: Callable[[], object]) -> Iterator[int]:
    """Have a process of the attacker do some work; kill it in the end."""

    def drop_and_work() -> None:
        if IS_ROOT:
            os.setuid(ATTACKER)
        work()

    with child_process(drop_and_work) as child:
        yield child


class Pair:
    """A publisher and a subscriber who must not notice an attack."""

    def __init__(self, bus: RealBus) -> None:
        self.publisher = bus.connect(INNOCENT)
        self.subscriber = bus.connect(INNOCENT)
        self.subscriber.send(b"SUB calm")
        self.subscriber.fence()
        self.numbers = itertools.count()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.wire.close()
        self.subscriber.wire.close()

    def talk(self, count: int) -> None:
        """Say something, and check that it is heard."""
        for number in itertools.islice(self.numbers, count):
            packet = publish(b"calm", b"%d" % number)
            self.publisher.send(packet)
            assert self.subscriber.receive() == packet
