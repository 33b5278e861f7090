"""Tests of memory: what is freed is freed, and what waits takes what counts.

They count what Python has allocated, as tracemalloc tells.
"""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbus
from fake_kernel import FakeKernel, FakePeer, start_journal
from packets import publications, publish

MIB = 1 << 20
COUNT = 5_000  # packets of a backlog


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    """Have Python count what it allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def used_bytes() -> int:
    """Return what is allocated now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def stalled(kernel: FakeKernel) -> FakePeer:
    """Return a reader for which small packets wait."""
    reader = kernel.subscriber(b"blocking/hard/discard", room=0)
    kernel.connect().send(*publications(COUNT))
    assert reader.waiting
    return reader


@pytest.mark.parametrize("orders", [["queue"], ["random", "stack", "queue"]])
def test_an_emptied_backlog_is_small(
    kernel: FakeKernel, orders: list[str]
) -> None:
    """[LIMIT-12] A backlog gives memory back, though a packet is left."""
    before = used_bytes()
    reader = stalled(kernel)
    turns = itertools.cycle(orders)
    for left in range(COUNT - 1, 0, -250):  # a packet stays
        reader.send(b"CMSG order/" + next(turns).encode())
        reader.wire.room = min(250, left)
        kernel.run()
        reader.wire.room = 0
        reader.wire.taken.clear()
    assert 0 < reader.waiting < 200
    assert used_bytes() - before < MIB / 16


def share_of_memory(kernel: FakeKernel) -> float:
    """Return the memory of a backlog, by the bytes that it counts for."""
    before = used_bytes()
    reader = stalled(kernel)
    return (used_bytes() - before) / reader.waiting


def test_a_traced_packet_waits_as_cheaply(directory: Path) -> None:
    """[LIMIT-12] A trace adds little to what a waiting packet takes."""
    plain = share_of_memory(FakeKernel())
    kernel = FakeKernel()
    start_journal(kernel, directory / "trace")
    traced = share_of_memory(kernel)
    assert 0.9 * plain < traced < 1.1 * plain < 1.5


def test_the_trace_of_a_lost_backlog_is_not_held(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[TRACE-1] The server writes that trace while it grows."""
    monkeypatch.setattr(sbus, "TRACE_LINES_MAX", 100)
    kernel = FakeKernel()
    journal = start_journal(kernel, directory / "trace")
    reader = stalled(kernel)
    before = used_bytes()
    tracemalloc.reset_peak()
    reader.wire.deaf = True
    reader.wire.room = None
    reader.close()
    peak = tracemalloc.get_traced_memory()[1]
    assert reader.wire.closed and peak - before < MIB / 8
    journal.close(kernel.bus.clients)
    lines = (directory / "trace").read_bytes().splitlines()
    assert sum(b'"reason":"deaf"' in line for line in lines) == COUNT


def test_equal_shapes_are_one(kernel: FakeKernel) -> None:
    """[LIMIT-5] Patterns of the same shape share what is known of it."""
    ends = b"*/" * 62
    peer = kernel.connect()
    peer.send(b"SUB a/" + ends)
    before = used_bytes()
    peer.send(*[b"SUB %d/" % number + ends for number in range(125)])
    assert not peer.wire.closed
    assert used_bytes() - before < 125 * 2_000


def test_many_subscribers_of_a_pattern_leave(kernel: FakeKernel) -> None:
    """[LIMIT-5] The room that they took is free again, while some stay."""
    peers = [kernel.connect() for _ in range(100)]
    patterns = [b"%d" % number for number in range(30)]
    peers[0].send(*[b"SUB " + pattern for pattern in patterns])
    before = used_bytes()
    for word in (b"SUB ", b"UNSUB "):
        for peer in peers[1:]:
            peer.send(*[word + pattern for pattern in patterns])
    assert used_bytes() - before < 30 * 2_500


def test_mistakes_leave_nothing(kernel: FakeKernel) -> None:
    """[CONN-12] A mistake leaves the garbage collector no work."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(25):
            kernel.connect().send(b"HELLO")
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_many_sizes_take_little(kernel: FakeKernel) -> None:
    """[ORDER-3] A queue of each size would take more than the packets."""
    reader = kernel.subscriber(b"order/random", room=0)
    sender = kernel.connect()
    empty = used_bytes()
    sender.send(*[publish(b"k", bytes(size)) for size in range(250)])
    before = used_bytes()
    reader.wire.room = 1
    kernel.run()
    assert used_bytes() - before < 250 * 300
    reader.wire.room = None
    reader.read_all()
    assert used_bytes() - empty < 8_000
