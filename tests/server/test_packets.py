"""Tests of packets: malformed ones, large ones, thousands of broken ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import WHOAMI, publish
from patterns import TOKENS, mutate
from sizes import PROOF, either
from spec_model import MODES

pytestmark = PROOF


@pytest.mark.parametrize("size", [18_000, 22_000])
def test_old_bytes_of_the_buffer(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """[PUB-4] [LIMIT-4] A shorter packet has none of them."""
    monkeypatch.setattr(sbus, "BYTES_PER_TURN", 20_000)
    kernel = FakeKernel(max_key=40_000)
    peer, other = kernel.connect(), kernel.connect()
    peer.send(b"SUB k/", publish(b"k/" + b"x" * 30_000, b"secret"))
    assert len(peer.read()) == 1

    # A packet of either side of the limit, without a NUL byte
    key = b"k/" + b"x" * size
    other.send(b"SUB " + key, b"CMSG " + key, publish(key, b"y"))
    assert peer.read() == other.read() == [publish(key, b"y")]
    other.send(b"UNSUB " + key, b"CMSG stats")
    assert b'"pattern_bytes": 0' in other.read()[0]
    other.send(b"MSG " + key)
    assert other.wire.closed and peer.read() == []


# Inputs that have crashed a server, this one or the original, and that stay in
# this list for ever.  Each line is what a client sends.
KEPT: list[list[bytes]] = [
    [b"SUB x", b"UNSUB x"],
    [b"SUB x", b"UNSUB x", b"SUB y"],
    [b"SUB aaaa", b"SUB bbbb", b"SUB cccc", b"UNSUB aaaa"],
    [b"SUB !/cred////"],
    [b"SUB !/cred///"],
    [b"MSG x"],
    [b""],
    [b"", b""],
    [b"SUB a\0b", b"UNSUB a"],
    [b"SUB " + b"/" * 4_096],
    [b"MSG " + b"/" * 4_096 + b"\0"],
    [b"SUB " + b"*/" * 2_048, b"MSG " + b"a/" * 2_048 + b"\0"],
]


RUNS = either(8_000, 500)  # of packets through the loop
SIZES = (409_599, 409_600, 409_601, 425_952, 3, 4, 5, 6, 7, 1, 0)
WORDS = [b"SUB ", b"UNSUB ", b"MSG ", b"CMSG ", b"SUB", b"sub ", b"X "]
WEIGHTS = [20, 20, 30, 15, 1, 1, 1]
PARTS = [*TOKENS, *map(str.encode, MODES), WHOAMI[5:], b"stats", b"a", b"b"]
PARTS += [b"!/cred////x", b"!/cred/1/2/3/", b"**", b"!!", b"\n\x1b", b"\xff"]
ENDS = [b"\0", b"\0", b"\0payload", b"\0\0", b""]


def random_packet(chance: random.Random) -> bytes:
    """Return a packet that is nearly right."""
    (word,) = chance.choices(WORDS, WEIGHTS)
    key = b"/".join(chance.choices(PARTS, k=chance.randrange(1, 6)))
    return mutate(chance, word + key + chance.choice(ENDS))


def runs_of_packets(chance: random.Random) -> Iterator[list[bytes]]:
    """Yield what clients send: what is kept, and random packets."""
    yield from KEPT
    for number in range(RUNS):
        run = [random_packet(chance) for _ in range(20)]
        if number % 10 == 0:
            size = SIZES[number // 10 % len(SIZES)]
            start = chance.choice([b"MSG calm/1\0", b"MSG k\0", b"SUB "])
            run.insert(0, (start + bytes(size))[:size])
        yield run


# ---- No packet of a client shows to other clients, but messages


def test_packets_through_the_loop() -> None:
    """[LIMIT-1] [PKT-2] [CONN-6] [CONN-12] The server serves others."""
    kernel = FakeKernel()
    reader, publisher = (kernel.connect(uid=5) for _ in range(2))
    reader.send(b"SUB calm/1")
    for run in runs_of_packets(random.Random(5)):
        wild = kernel.connect()
        wild.send(*run)
        wild.close()
        assert wild.wire.closed
        publisher.send(publish(b"calm/1", b"hello"))
        *others, last = reader.read_all()
        assert last == publish(b"calm/1", b"hello")
        assert all(packet in run for packet in others), "was changed"
        assert max(map(len, others), default=0) <= 409_600
    assert len(kernel.bus.clients) == 2


def test_packets_above_the_default() -> None:
    """[LIMIT-1] The send buffer has room for the largest packet."""
    kernel = FakeKernel(max_packet=1_000_000)
    peer = kernel.connect()
    packet = publish(b"k").ljust(1_000_000)
    peer.send(b"SUB k", packet)
    assert peer.read() == [packet]


def test_each_connection_refuses_descriptors(kernel: FakeKernel) -> None:
    """[CONN-7] A client may have connected before there was a server."""
    assert not kernel.connect().wire.passes_rights
