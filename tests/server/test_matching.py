"""Tests of what patterns select: three implementations of it agree.

They are the definition in sbus.py, its table, and the model of the
specification.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publish
from patterns import OWN, Listener, mutate, texts, wide_bus
from sizes import PROOF, either
from spec_model import selects

pytestmark = PROOF


def test_every_short_pair() -> None:
    """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-6] 132,496 pairs."""
    every = list(texts(b"a/*", 5))
    bus = wide_bus()
    listeners = {pattern: Listener(bus, OWN) for pattern in every}
    for pattern, listener in listeners.items():
        listener.send(b"SUB " + pattern)
    publisher = Listener(bus, OWN)
    for key in every:
        publisher.send(publish(key))
        for pattern, listener in listeners.items():
            expected = selects(pattern, key)
            assert sbus.pattern_matches(pattern, key) == expected
            assert len(listener.take()) == expected, (pattern, key)


def test_long_pairs() -> None:
    """[MATCH-2] [MATCH-3] Random pairs, most of them alike."""
    chance = random.Random(6)
    listener = Listener(wide_bus(), OWN)
    for _ in range(either(200_000, 20_000)):
        key = bytes(chance.choices(b"ab/x*", k=chance.randrange(6, 30)))
        pattern = key
        for _ in range(chance.randrange(3)):
            pattern = mutate(chance, pattern).translate(None, b"\0!")
        expected = selects(pattern, key)
        assert sbus.pattern_matches(pattern, key) == expected, (pattern, key)
        listener.send(b"SUB " + pattern)
        listener.send(publish(key))
        listener.send(b"UNSUB " + pattern)
        assert len(listener.take()) == expected, (pattern, key)


def test_cost_of_a_key_beside_many_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[LIMIT-5] [LIMIT-16] It has a bound, whatever all users store."""
    kernel = FakeKernel(max_pattern_bytes="unlimited")
    for first in range(0, 15 * 256, 256):
        peer = kernel.connect(uid=1_000 + first)
        lengths = range(first, first + 256)
        peer.send(*[b"SUB " + b"x" * length + b"*" for length in lengths])
        assert peer.wire.closed == (first >= 3_072)

    look_ups = Counter[int]()
    pattern_for = sbus.pattern_for

    def look_up(segments: list[bytes], shape: sbus.Shape) -> bytes | None:
        look_ups[len(segments)] += 1
        return pattern_for(segments, shape)

    monkeypatch.setattr(sbus, "pattern_for", look_up)
    kernel.connect(uid=0).send(publish(b"new"))
    assert look_ups[1] <= 4_096


@pytest.mark.parametrize("pattern", [b"inbox/1", b"!/cred////1", b"a*b"])
def test_changes_that_concern_one_key(
    monkeypatch: pytest.MonkeyPatch, pattern: bytes
) -> None:
    """[LIMIT-5] They have no other key looked up again."""
    listener = Listener(wide_bus(), OWN)
    listener.send(b"SUB k")
    listener.send(publish(b"k"))
    monkeypatch.setattr(sbus, "pattern_for", lambda *_: None)
    listener.send(b"SUB " + pattern)
    listener.send(b"UNSUB " + pattern)
    listener.send(publish(b"k"))
    assert listener.take() == [publish(b"k")] * 2


def test_cost_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """[LIMIT-5] One look-up for each shape in use, however many patterns."""
    listener = Listener(wide_bus(), OWN)
    starts = [b"a" * size for size in range(50)]
    for start in starts:
        listener.send(b"SUB " + start + b"*")
    for start in starts[3:]:
        listener.send(b"SUB " + start.replace(b"a", b"b", 1))
        listener.send(b"UNSUB " + start + b"*")
    shapes = []
    pattern_for = sbus.pattern_for

    def look_up(segments: list[bytes], shape: sbus.Shape) -> bytes | None:
        shapes.append(shape)
        return pattern_for(segments, shape)

    monkeypatch.setattr(sbus, "pattern_for", look_up)
    listener.send(publish(b"aaaa"))
    assert len(listener.take()) == 1
    assert len(shapes) == 3 + 1  # what is left, and that of plain texts
