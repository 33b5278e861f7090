"""Tests of packets: malformed ones, large ones, thousands of broken ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publish
from patterns import OWN, TOKENS, Listener, mutate, wide_bus
from sizes import PROOF, either
from spec_model import MODES, is_reserved, may_use, read_form

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


PACKETS = either(4_000_000, 50_000)
RUNS = either(8_000, 500)  # of packets through the loop
BATCH = 2_000  # packets between two looks at the others
SIZES = (409_599, 409_600, 409_601, 425_952, 3, 4, 5, 6, 7, 1, 0)


def grammar(chance: random.Random, count: int) -> list[bytes]:
    """Return packets that are nearly right."""
    words = [b"SUB ", b"UNSUB ", b"MSG ", b"CMSG ", b"SUB", b"sub ", b"X "]
    weights = [4, 4, 6, 3, 0.2, 0.2, 0.2]
    pieces = [*TOKENS, b"a", b"b", b"**", b"!!", b"\n", b"\x1b", b"\xff"]
    keys = [mode.encode() for mode in MODES] + [b"!/cred/whoami", b"stats"]
    keys += [b"!/cred/100/1000/4242/x", b"!/cred////x", b"!/cred/1/2/3/"]
    packets = []
    for word in chance.choices(words, weights, k=count):
        parts = chance.choices(pieces, k=chance.randrange(1, 6))
        is_known = chance.random() < 0.3
        key = chance.choice(keys) if is_known else b"/".join(parts)
        end = chance.choice([b"\0", b"\0", b"\0payload", b"\0\0", b""])
        packets.append(word + key + end)
    return packets


def runs_of_packets(chance: random.Random) -> Iterator[list[bytes]]:
    """Yield what clients send: what is kept, and random packets."""
    yield from KEPT
    packets = grammar(chance, 4_000)
    for number in range(RUNS):
        run = [mutate(chance, chance.choice(packets)) for _ in range(20)]
        if number % 10 == 0:
            size = SIZES[number // 10 % len(SIZES)]
            start = chance.choice([b"MSG calm/1\0", b"MSG k\0", b"SUB "])
            run.insert(0, (start + bytes(size))[:size])
        yield run


def is_right(packet: bytes) -> bool:
    """Return whether a packet of OWN breaks no rule, as the model says."""
    kind, key = read_form(packet)
    if kind in ("subscribe", "unsubscribe"):
        return may_use(key, OWN)
    return not is_reserved(key) if kind == "publish" else kind != ""


# ---- No packet of a client shows to other clients, but messages


def test_random_packets() -> None:
    """[PKT-2] [KEY-4] [CRED-4] [CONN-12] The bus agrees with the model."""
    chance = random.Random(4)
    bus = wide_bus()
    calm = [Listener(bus, sbus.Credentials(5, 5, n)) for n in (1, 2)]
    calm[0].send(b"SUB calm/1")
    packets = grammar(chance, 4_000)
    wild = Listener(bus, OWN)
    for number in range(1, PACKETS):
        packet = chance.choice(packets)
        if number % 4:
            packet = mutate(chance, packet)
        is_good = wild.send(packet)
        assert is_good == is_right(packet), packet
        wild.take()
        if not is_good or not number % BATCH:
            bus.close(wild.client, "")
            wild = Listener(bus, OWN)
        if not number % BATCH:
            assert calm[1].send(publish(b"calm/1", b"hello"))
            assert calm[0].take()[-1] == publish(b"calm/1", b"hello")
            packets[: BATCH // 2] = grammar(chance, BATCH // 2)
    assert len(bus.clients) == 3


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
