"""Tests of what patterns select: the table against two other matchers."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel, FakePeer
from packets import publish
from patterns import OWN, WIDE_LIMITS, mutate, texts
from sizes import PROOF, either
from spec_model import selects


class TestSubscriptionTable:
    TOKENS = (b"", b"", b"a", b"b", b"ab", b"*", b"a*", b"ab*", b"**", b"a*b")

    def random_text(self, chance: random.Random) -> bytes:
        """Return a pattern or key with adversarial segments."""
        count = chance.randrange(1, 5)
        return b"/".join(chance.choice(self.TOKENS) for _ in range(count))

    def test_giving_up_a_pattern_of_many(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[UNSUB-1] It looks at no other holder, however it is spelled."""
        peers = [kernel.connect() for _ in range(50)]
        for peer in peers:
            peer.send(b"SUB k*", b"SUB k**", b"SUB k***")
        compared = []

        def compare(one: object, other: object) -> bool:
            compared.append(other)
            return one is other

        monkeypatch.setattr(sbus.Client, "__eq__", compare)
        peers[-1].send(b"UNSUB k**", b"UNSUB k*")
        peers[-2].send(b"UNSUB k***", b"UNSUB k**", b"UNSUB k*")
        peers[0].close()
        monkeypatch.undo()
        assert not compared
        peers[1].send(publish(b"k1"))
        assert peers[-1].read() == [publish(b"k1")]
        assert peers[-2].read() == []

    @pytest.mark.parametrize("seed", range(20))
    def test_agrees_with_the_definition(self, seed: int) -> None:
        """[PUB-1] [PUB-3] The table finds what pattern_matches selects."""
        chance = random.Random(seed)
        kernel = FakeKernel()
        clients = [kernel.connect().client for _ in range(6)]
        table = sbus.SubscriptionTable(sbus.Limits(max_shapes=1000))
        held: set[tuple[bytes, sbus.Client]] = set()
        for _ in range(400):
            pair = self.random_text(chance), chance.choice(clients)
            if pair in held:
                held.remove(pair)
                table.remove(*pair)
            else:
                held.add(pair)
                table.add(*pair)
            key = self.random_text(chance)
            found = set(table.find(key))
            assert found == {
                client
                for pattern, client in held
                if sbus.pattern_matches(pattern, key)
            }
        for pair in held:
            table.remove(*pair)
        assert not table._holders and not table._shapes and not table._users

    def test_recent_keys_do_not_outlive_a_change(
        self, kernel: FakeKernel
    ) -> None:
        """[PUB-1] [PUB-3] Each change of the table counts at once."""
        chance = random.Random(1)
        peers = [kernel.connect() for _ in range(3)]
        held: list[tuple[bytes, FakePeer]] = []
        keys = (b"a", b"ab/b", b"a/", b"", b"ab", b"a/b", b"a/b/a")
        for _ in range(2_000):
            if len(held) > 4:
                pattern, peer = held.pop(chance.randrange(len(held)))
                peer.send(b"UNSUB " + pattern)
            else:
                pattern, peer = self.random_text(chance), chance.choice(peers)
                held.append((pattern, peer))
                peer.send(b"SUB " + pattern)
            peers[0].send(*map(publish, keys))
            for peer in peers:
                patterns = [text for text, holder in held if holder is peer]
                assert peer.read() == [
                    publish(key)
                    for key in keys
                    if any(sbus.pattern_matches(p, key) for p in patterns)
                ]

    def test_the_memory_of_recent_keys_is_bounded(
        self, kernel: FakeKernel
    ) -> None:
        """[LIMIT-4] A publisher of many keys uses no memory for them."""
        peer = kernel.connect()
        for number in range(2 * sbus.RECENT_KEYS_MAX):
            kernel.bus.handle(peer.client, b"", publish(b"%d" % number))
            assert len(kernel.bus._recent) <= sbus.RECENT_KEYS_MAX
        assert len(kernel.bus._recent_heads) <= sbus.RECENT_KEYS_MAX

    def test_what_is_too_large_to_remember(self, kernel: FakeKernel) -> None:
        """[LIMIT-4] Long keys, and keys of many receivers."""
        for _ in range(sbus.RECENT_RECEIVERS_MAX):
            kernel.connect(uid=0).send(b"SUB k")
        peer, more = kernel.connect(), kernel.connect()
        longest = b"l" * sbus.RECENT_KEY_BYTES_MAX
        peer.send(publish(b"k"), publish(longest), publish(longest + b"l"))
        assert set(kernel.bus._recent) == {b"MSG k", b"MSG " + longest}
        more.send(b"SUB k", publish(b"k"), publish(b"k"))
        assert len(more.read()) == 2
        assert set(kernel.bus._recent) == {b"MSG " + longest}

    @pytest.mark.parametrize("pattern", [b"k%d", b"k%d/", b"k%d/*", b"k*%d"])
    def test_recent_keys_are_forgotten_for_good(
        self, kernel: FakeKernel, pattern: bytes
    ) -> None:
        """[LIMIT-4] Whoever makes the bus forget them leaves nothing."""
        peer = kernel.connect()
        for number in range(100):
            key = pattern % number
            peer.send(publish(key), b"SUB " + key, b"UNSUB " + key)
        assert not kernel.bus._recent
        assert not kernel.bus._recent_heads


class TestMatching:
    """Two implementations of matching agree."""

    pytestmark = PROOF

    def test_every_short_pair(self) -> None:
        """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-5] [MATCH-6] 132,496 pairs."""
        every = list(texts(b"a/*", 5))
        assert len(every) ** 2 == 132_496
        table = sbus.SubscriptionTable(WIDE_LIMITS)
        bus = sbus.Bus(WIDE_LIMITS, OWNER)
        wire: Any = None
        clients = {text: bus.open(OWN, wire) for text in every}
        for pattern, client in clients.items():
            table.add(pattern, client)
        for key in every:
            found = table.find(key)
            for pattern, client in clients.items():
                expected = selects(pattern, key)
                assert sbus.pattern_matches(pattern, key) == expected
                assert (client in found) == expected, (pattern, key)

    def test_long_pairs(self) -> None:
        """[MATCH-2] [MATCH-3] Random pairs, most of them alike."""
        random_ = random.Random(6)
        for _ in range(either(200_000, 20_000)):
            key = bytes(random_.choices(b"ab/!*", k=random_.randrange(6, 30)))
            pattern = key
            for _ in range(random_.randrange(3)):
                pattern = mutate(random_, pattern)
            matches = sbus.pattern_matches(pattern, key)
            assert matches == selects(pattern, key), (pattern, key)

    def test_very_long_pairs(self, record_property: Any) -> None:
        """[MATCH-2] 400,000 bytes take 50 ms or so, not the square of it."""
        longest = 0.0
        for part in (b"a/", b"*/", b"/", b"a", b"*"):
            pattern = part * (400_000 // len(part))
            for key in (pattern, pattern + b"a", b"a/" * 200_000):
                start = time.thread_time()
                sbus.pattern_matches(pattern, key)
                longest = max(longest, time.thread_time() - start)
        record_property("milliseconds", longest * 1000)
        assert longest < 1.0
