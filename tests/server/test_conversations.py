"""Random conversations on a fake kernel: the model says what happens.

The kit holds such conversations with any server.  Here two thousand take some
seconds, the events of a round come in any order, and the end is seen.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from selectors import SelectorKey
from typing import Any, cast

import pytest

import sbus
from conformance.conversation import perform
from conformance.examples import Conversation, parse_step
from conformance.random_walk import OPTIONS, Maker, block, words_of
from conformance.random_writer import NUMBER, write
from fake_bus import FakeBus, FakeConnection
from fake_kernel import FakeKernel, FakeSelector
from sizes import PROOF, either

GROUPS = 20
CONVERSATIONS = either(40_000, 2_000)

pytestmark = PROOF


class ShuffledSelector(FakeSelector):
    """Reports events in any order."""

    chance = random.Random()

    def select(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        ready = super().select(timeout)
        self.chance.shuffle(ready)
        return ready


class ShuffledKernel(FakeKernel):
    """A server that learns of events in any order."""

    selector_kind = ShuffledSelector


class Ledger:
    """A journal that counts what is owed to clients, and its ends."""

    def __init__(self) -> None:
        self.owed = 0
        # By the numbers of a message and its receiver
        self.ends: Counter[tuple[int, int]] = Counter()

    def note(
        self, event: str, rule: str, who: sbus.Client, **facts: Any
    ) -> None:
        if event == "msg":
            self.owed += facts["receivers"]
        if event in ("send", "drop"):
            number = getattr(facts["packet"], "number", 0)
            self.ends[number, who.number] += number > 0  # else an answer

    def flush(self) -> None:
        pass

    def check(self) -> None:
        """Check that each copy of a message was sent or lost, and once."""
        assert sum(self.ends.values()) == self.owed
        assert max(self.ends.values(), default=1) <= 1


class RandomBus(FakeBus):
    """A server for random conversations: its clients are who they say."""

    kernel_kind = ShuffledKernel

    def __init__(self, options: Sequence[str]) -> None:
        super().__init__(options)
        self.kernel.bus.owner_uid = os.geteuid()
        self.pids = itertools.count(NUMBER // 2)  # each has as many digits

    def connect(
        self, credentials: Mapping[str, int] | None = None
    ) -> FakeConnection:
        own = {"gid": os.getegid(), "uid": os.geteuid()}
        ids = {**own, **(credentials or {}), "pid": next(self.pids)}
        return super().connect(ids)

    def stop(self) -> None:
        """Stop the server; nothing may be left of its clients."""
        self.kernel.server.stopping = True
        self.kernel.server.run()
        bus = self.kernel.bus
        assert not (bus.clients or bus.users or self.kernel.selector.keys)
        assert not any(bus.counts[use] for use in sbus.USES)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_conversations(group: int) -> None:
    """[PUB-1] [PUB-3] [PUB-6] [CRED-11] [BLOCK-7] [BLOCK-10] [BLOCK-12]
    [BLOCK-22] [CONN-6] [CTL-5] [TRACE-1] Also while each step is noted.
    """
    for number in range(group, CONVERSATIONS, GROUPS):
        seed = f"fake/{number}"
        ShuffledSelector.chance.seed(seed)
        options = random.Random(seed).choice(OPTIONS)
        writer = write(Maker(seed, options).operations(), options)
        bus, ledger = RandomBus(words_of(options)), Ledger()
        if number // GROUPS % 2:
            bus.kernel.bus.journal = cast(sbus.Journal, ledger)
        steps = tuple(map(parse_step, writer.lines))
        outcome = perform(bus, Conversation("random", (), steps))
        if outcome.wrong:
            pytest.fail(block(seed, writer, outcome), pytrace=False)
        bus.stop()
        ledger.check()
