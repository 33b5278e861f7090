"""Tests of the loop: whose turn it is and for how long, who comes and goes.

Each call takes as long as its test says, by a clock that stands still
otherwise.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import WHOAMI, publications, publish

TURN = 0.001  # seconds [CONN-5]


# ---- [CONN-5] No client has the loop for long, and each has it in turn


def test_a_flood_after_single_packets(kernel: FakeKernel) -> None:
    """[CONN-5] After a few short turns, the server reads it in runs."""
    peer = kernel.connect()
    for _ in range(3):
        peer.send(WHOAMI)
    peer.post(*publications(640))
    for _ in range(20):
        kernel.server.round(0)
    assert not peer.wire.incoming


def test_a_turn_ends_after_a_millisecond(kernel: FakeKernel) -> None:
    """[CONN-5] The clock ends it, if packets take so long."""
    peer = kernel.connect()
    peer.wire.recv_seconds = 0.3 * TURN
    peer.post(*publications(64))
    kernel.server.round(0)
    assert len(peer.wire.incoming) == 64 - 4


@pytest.mark.parametrize("receivers, packets", [(4, 3), (5, 3), (16, 1)])
def test_a_turn_with_much_to_send_is_shorter(
    kernel: FakeKernel,
    monkeypatch: pytest.MonkeyPatch,
    receivers: int,
    packets: int,
) -> None:
    """[CONN-5] A turn ends before it sends more than 15 packets.

    A packet for more receivers is a turn of its own.
    """
    monkeypatch.setattr(sbus, "SENDS_PER_TURN", 15)
    for _ in range(receivers):
        kernel.subscriber()
    flooder = kernel.connect()
    flooder.post(*publications(64))
    kernel.server.round(0)
    assert 64 - len(flooder.wire.incoming) == packets


def test_large_packets_wait_for_a_paused_publisher(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[BLOCK-7] A turn of many bytes ends, so that a flood is paused."""
    monkeypatch.setattr(sbus, "BYTES_PER_TURN", 250)
    reader = kernel.subscriber(b"blocking/soft/block", room=1)
    sender = kernel.connect()
    packets = [publish(b"k", bytes(100 + n)) for n in range(9)]
    sender.send(*packets)
    assert len(sender.wire.incoming) >= 6
    assert reader.read_all() == packets


def test_clients_of_a_user_share_a_slice(kernel: FakeKernel) -> None:
    """[CONN-5] Those that were left out go first in the next round."""
    flooders = [kernel.connect(uid=1) for _ in range(20)]
    other = kernel.connect(uid=2)
    for peer in flooders:
        peer.wire.recv_seconds = 0.6 * TURN
        peer.post(*publications(64))
    for rounds in range(1, 21):
        other.post(WHOAMI)
        start = kernel.now
        kernel.server.round(0)
        assert len(other.wire.taken) == rounds
        assert kernel.now - start < 3 * TURN
    read = [64 - len(peer.wire.incoming) for peer in flooders]
    assert set(read) == {2}


def test_long_backlogs_are_sent_in_turns(kernel: FakeKernel) -> None:
    """[CONN-5] Readers read again, and one of them leaves."""
    readers = [kernel.subscriber(room=0, uid=1) for _ in range(20)]
    sender, other = kernel.connect(uid=1), kernel.connect(uid=2)
    sender.send(*publications(600))
    for reader in readers:
        reader.wire.room = None
        reader.wire.send_seconds = TURN / 100
    readers[0].wire.ended = True
    other.post(WHOAMI)
    kernel.server.round(0)
    assert len(other.wire.taken) == 1
    assert 0 < sum(len(reader.wire.taken) for reader in readers) < 310
    kernel.run()
    for reader in readers:
        assert list(reader.wire.taken) == publications(600)
    assert readers[0].wire.closed


def test_slow_readers_cost_their_user_no_turn(kernel: FakeKernel) -> None:
    """[CONN-5] Packets of strangers for them have a slice of their own."""
    readers = [kernel.subscriber(room=0, uid=1) for _ in range(50)]
    asker, stranger = kernel.connect(uid=1), kernel.connect(uid=2)
    stranger.send(*publications(100))
    for reader in readers:
        reader.wire.room = None
        reader.wire.send_seconds = 0.3 * TURN
    for rounds in range(1, 21):
        asker.post(WHOAMI)
        kernel.server.round(0)
        assert len(asker.wire.taken) == rounds
    assert any(reader.waiting for reader in readers)


def test_a_slow_reader_that_publishes(kernel: FakeKernel) -> None:
    """[CONN-5] Such a reader has turns, and its share of sends."""
    readers = [kernel.subscriber(room=0, uid=1) for _ in range(20)]
    kernel.connect(uid=2).send(*publications(100))
    for reader in readers:
        reader.wire.room = None
        reader.wire.send_seconds = 0.6 * TURN
    busy = readers[-1]
    for _ in range(100):
        if not busy.wire.incoming:
            busy.post(publish(b"x"))
        kernel.server.round(0)
    taken = [len(reader.wire.taken) for reader in readers]
    assert max(taken) - min(taken) <= 2
    assert busy.stats["published"] >= 90


def test_newcomers_have_a_slice(kernel: FakeKernel) -> None:
    """[CONN-5] A round lets in no more than this slice has time for."""
    other = kernel.connect(uid=2)
    newcomers = [kernel.knock(uid=1) for _ in range(20)]
    for peer in newcomers:
        peer.wire.recv_seconds = 0.6 * TURN
        peer.post(publish(b"k"))
    other.post(WHOAMI)
    kernel.server.round(0)
    assert len(kernel.listener.waiting) == 20 - 2
    assert len(other.wire.taken) == 1
    kernel.run()
    assert not any(peer.wire.incoming for peer in newcomers)


def test_far_above_a_limit() -> None:
    """[LIMIT-23] An eighth and a mebibyte above it, the reader has to go."""
    kernel = FakeKernel(max_backlog=80_000)
    reader = kernel.subscriber(room=0)
    counts = []
    for number in range(300):
        if not reader.wire.closed:
            counts.append(number * 4_000)
            kernel.connect().send(publish(b"k").ljust(4_000 - 128))
    assert 0 < counts[-1] - 90_000 - (1 << 20) <= 4_000


@pytest.mark.parametrize("seconds, longest", [(5, 5), (10**9, 3600)])
def test_the_loop_wakes_up_in_time(seconds: int, longest: int) -> None:
    """[BLOCK-16] It waits for a reader no longer than epoll can."""
    kernel = FakeKernel(block_timeout=seconds)
    kernel.subscriber(b"blocking/soft/block", room=0)
    kernel.connect().send(publish(b"k"))
    select, timeouts = kernel.selector.select, kernel.selector.timeouts
    timeouts.clear()

    def stop(timeout: float) -> Any:
        kernel.server.stopping = True
        return select(timeout)

    kernel.selector.select = stop  # type: ignore[method-assign]
    kernel.server.run()
    assert timeouts[0] == longest


@pytest.mark.parametrize("room", [None, 2])
def test_stop(kernel: FakeKernel, room: int | None) -> None:
    """[RUN-12] The server delivers for a second, and reads no more."""
    reader, sender = kernel.subscriber(room=2), kernel.connect()
    sender.send(*publications(4))
    reader.wire.room = room
    sender.post(publish(b"k", b"not read"))
    kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
    kernel.now += 100
    kernel.server.stopping = True
    kernel.server.run()
    assert list(reader.wire.taken) == publications(room or 4)
    assert reader.wire.closed and sender.wire.closed
    assert sender.wire.incoming and not kernel.selector.keys
    assert (0.9 if room else 0) <= kernel.now - 100 < 2


def refuse(*_: object) -> None:
    """Fail as epoll does when it has no room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- [CONN-12] An error costs at most the client that it concerns


def test_a_chain_of_holders_without_room_in_epoll(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[CONN-12] No freed client can be watched; the bus goes on."""
    witness = kernel.connect(uid=2)
    peers = [kernel.connect() for _ in range(500)]
    for number, peer in enumerate(peers):
        peer.send(b"CMSG blocking/soft/block", b"SUB %d" % number)
        peer.wire.room = 0
    for number, peer in enumerate(peers[1:]):
        peer.send(publish(b"%d" % number))

    monkeypatch.setattr(kernel.selector, "register", refuse)
    peers[0].close()
    assert all(peer.wire.closed for peer in peers)
    witness.send(WHOAMI)
    assert len(witness.read()) == 1


def test_a_listener_without_room_in_epoll(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[CONN-12] [LIMIT-7] The server rests before it tries again."""
    kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
    kernel.run()
    monkeypatch.setattr(kernel.selector, "register", refuse)
    for _ in range(3):
        kernel.server.round(1)
        assert kernel.selector.timeouts[-1] > sbus.REST_SECONDS / 2


def test_kernel_without_memory_for_a_busy_reader(kernel: FakeKernel) -> None:
    """[PUB-6] Packets of a reader delay none that wait for memory."""
    reader = kernel.subscriber(b"blocking/soft/block")
    sender = kernel.connect()
    reader.wire.failures.append(OSError(errno.ENOBUFS, "none"))
    sender.send(*publications(2))
    for _ in range(3):
        assert not reader.wire.taken
        kernel.wait(0.02)
        reader.send(b"CMSG of no effect")
    assert reader.read() == publications(2)
