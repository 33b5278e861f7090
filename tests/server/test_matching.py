"""Tests of what patterns select: three implementations of it agree.

These are the definition in sbus.py, its table, and the model of the
specification.
"""

from __future__ import annotations

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publish
from patterns import OWN, Listener, texts, wide_bus
from sizes import PROOF, either
from spec_model import selects

pytestmark = PROOF


def test_every_short_pair() -> None:
    """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-6] Three ways agree."""
    keys = list(texts(b"a/*", either(5, 4)))
    bus = wide_bus()
    listeners = {pattern: Listener(bus, OWN) for pattern in keys}
    for pattern, listener in listeners.items():
        listener.send(b"SUB " + pattern)
    publisher = Listener(bus, OWN)
    for key in keys:
        publisher.send(publish(key))
        for pattern, listener in listeners.items():
            expected = selects(pattern, key)
            assert sbus.pattern_matches(pattern, key) == expected
            assert len(listener.take()) == expected, (pattern, key)


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> list[sbus.Shape]:
    """Note the shapes for which tables are searched from now on."""
    shapes = []
    pattern_for = sbus.pattern_for

    def look_up(segments: list[bytes], shape: sbus.Shape) -> bytes | None:
        shapes.append(shape)
        return pattern_for(segments, shape)

    monkeypatch.setattr(sbus, "pattern_for", look_up)
    return shapes


def test_cost_of_a_key_beside_many_users(look_ups: list[sbus.Shape]) -> None:
    """[LIMIT-5] [LIMIT-16] The shapes of all users have a bound."""
    kernel = FakeKernel(max_shapes=64, max_bus_shapes=512)
    for first in range(0, 512, 64):
        peer = kernel.connect(uid=1_000 + first)
        lengths = range(first, first + 64)
        peer.send(*[b"SUB " + b"x" * length + b"*" for length in lengths])
        assert peer.wire.closed == (first >= 384)
    kernel.connect(uid=0).send(publish(b"new"))
    assert len(look_ups) == 384


@pytest.mark.parametrize("pattern", [b"inbox/1", b"!/cred////1", b"a*b"])
def test_changes_that_concern_one_key(
    look_ups: list[sbus.Shape], pattern: bytes
) -> None:
    """[LIMIT-5] The server looks up no other key again."""
    listener = Listener(wide_bus(), OWN)
    listener.send(b"SUB k")
    listener.send(publish(b"k"))
    assert len(look_ups) == 1
    listener.send(b"SUB " + pattern)
    listener.send(b"UNSUB " + pattern)
    listener.send(publish(b"k"))
    assert listener.take() == [publish(b"k")] * 2
    assert len(look_ups) == 1


def test_cost_of_a_key(look_ups: list[sbus.Shape]) -> None:
    """[LIMIT-5] A key costs a look-up for each shape, not each pattern."""
    listener = Listener(wide_bus(), OWN)
    starts = [b"a" * size for size in range(50)]
    for start in starts:
        listener.send(b"SUB " + start + b"*")
    for start in starts[3:]:
        listener.send(b"SUB " + start.replace(b"a", b"b", 1))
        listener.send(b"UNSUB " + start + b"*")
    listener.send(publish(b"aaaa"))
    assert len(listener.take()) == 1
    assert len(look_ups) == 3 + 1  # those that are left, and of plain texts


def test_long_keys_are_not_remembered(look_ups: list[sbus.Shape]) -> None:
    """[LIMIT-4] A high limit of keys costs no memory for each."""
    kernel = FakeKernel(max_key="unlimited")
    peer = kernel.connect()
    peer.send(b"SUB k/*")
    longest = sbus.RECENT_BYTES_MAX - 8  # for a pointer to the receiver
    for size, count in ((10, 1), (longest, 1), (longest + 1, 3)):
        look_ups.clear()
        packet = publish(b"k/".ljust(size, b"x"))
        peer.send(packet, packet, packet)
        assert peer.read_all() == [packet] * 3
        assert len(look_ups) == count
