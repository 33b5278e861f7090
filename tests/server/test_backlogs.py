"""Tests of flood control: limits of backlogs, orders, block time-outs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fake_kernel import FakeKernel, FakePeer, choices, cost
from packets import publications, publish


@pytest.mark.parametrize("seed", range(10))
def test_orders_that_change(kernel: FakeKernel, seed: int) -> None:
    """[BLOCK-2] [ORDER-1] [ORDER-2] [ORDER-3] Of a backlog, at any time."""
    chance = random.Random(seed)
    reader, sender = kernel.subscriber(room=0), kernel.connect()
    waiting: list[bytes] = []  # by arrival
    order = b"queue"
    for arrival in range(1_000):
        if chance.random() < 0.1:
            order = chance.choice([b"queue", b"stack", b"random"])
            reader.send(b"CMSG order/" + order)
        if chance.random() < 0.6 or not waiting:
            size = chance.randrange(9)
            waiting.append(publish(b"k", b"%3d" % arrival + bytes(size)))
            sender.send(waiting[-1])
            continue
        index = {b"queue": 0, b"stack": -1}.get(order)
        if index is None:
            index = waiting.index(max(waiting, key=len))
        reader.wire.room = 1
        kernel.run()
        reader.wire.room = 0
        assert reader.read() == [waiting.pop(index)]
    assert reader.waiting == sum(len(one) + 128 for one in waiting)


def test_block_at_the_limit_of_a_user() -> None:
    """[BLOCK-10] [LIMIT-12] Half of what waited has to go."""
    kernel = FakeKernel(max_user_backlog=cost(4))
    reader, sender = kernel.subscriber(room=0), kernel.connect()
    sender.send(*publications(5))
    reader.wire.room = 1
    for packets in (4, 3):
        kernel.run()
        assert sender.paused and reader.waiting == cost(packets)
        reader.read(1)
    assert not sender.paused and reader.waiting == cost(2)


def test_block_by_several_packets_of_a_turn() -> None:
    """[BLOCK-10] What waited before the first of them counts."""
    kernel = FakeKernel(max_backlog=1_000)
    reader = kernel.subscriber(b"order/random", room=1)
    sender = kernel.connect()
    sender.send(*publications(4))
    assert reader.waiting == cost(3)
    sender.send(publish(b"k", bytes(500)), publish(b"k", b"-"))
    for packets in (4, 3, 2):  # the large one goes first
        reader.read(1)
        assert sender.paused and reader.waiting == cost(packets)
    reader.read(1)
    assert not sender.paused and reader.waiting == cost(1)


def test_block_above_the_limit_of_a_client() -> None:
    """[BLOCK-10] Half of the limit has to be free, however much waited."""
    kernel = FakeKernel(max_backlog=cost(4))
    reader = kernel.subscriber(room=0)
    kernel.connect().send(*publications(4))
    senders = [kernel.connect() for _ in "123"]
    for sender in senders:
        sender.send(publish(b"k", b"-"))
    reader.wire.room = 1
    for packets in (6, 5, 4, 3):
        kernel.run()
        assert reader.waiting == cost(packets)
        assert all(sender.paused for sender in senders)
        reader.read(1)
    assert not any(sender.paused for sender in senders)


@pytest.mark.parametrize(
    "limit", ["max_backlog", "max_user_backlog", "max_bus_backlog"]
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_far_above_a_limit(limit: str, uid: int) -> None:
    """[LIMIT-12] An eighth and a mebibyte; what is above ends it."""
    kernel = FakeKernel(**{limit: 80_000})
    reader = kernel.subscriber(room=0, uid=uid)
    used = 0
    most = 80_000 - 20_000 * (limit == "max_bus_backlog" and uid != 0)
    most += most // 8 + (1 << 20)
    while not reader.wire.closed and used < 5_000_000:
        packet = publish(b"k").ljust(30_000 - 128)
        kernel.connect().send(packet)  # which is paused from now on
        used += 30_000
    is_limited = uid != 0 or limit != "max_user_backlog"
    assert reader.wire.closed == is_limited
    assert not is_limited or most < used - 30_000 <= most + 30_000


@pytest.mark.parametrize("soft", choices(b"blocking/soft"))
@pytest.mark.parametrize("hard", choices(b"blocking/hard"))
@pytest.mark.parametrize("order", choices(b"order"))
@pytest.mark.parametrize("echo", choices(b"echo"))
def test_every_combination(
    soft: bytes, hard: bytes, order: bytes, echo: bytes
) -> None:
    """[BLOCK-2] [BLOCK-12] [CTL-5] Nothing vanishes, others go on."""
    kernel = FakeKernel(max_backlog=cost(10, payload_bytes=2))
    peer = kernel.subscriber(soft, hard, order, echo, room=3)
    witness, sender = kernel.subscriber(), kernel.connect()
    peer.send(publish(b"k", b"-"))
    sender.send(*publications(40)[10:])  # of one size
    assert len(peer.wire.taken) == 3
    rest = 30 + (echo == b"echo/on") - 3
    queues = soft.endswith((b"queue", b"block"))
    is_error = soft.endswith(b"error") or (queues and hard.endswith(b"error"))
    assert peer.wire.closed is is_error
    if not is_error:
        kept = rest if hard.endswith(b"block") else 10
        waiting = kept if queues else 0
        assert peer.waiting == cost(waiting, payload_bytes=2)
        assert peer.stats["discarded"] == rest - waiting
        is_paused = queues and (soft + hard).count(b"/block") > 0
        assert sender.paused is is_paused
    peer.read_all()
    assert not sender.paused
    assert len(witness.read_all()) == 31


class TestHolders:
    def held(self, **limits: float) -> tuple[FakeKernel, FakePeer, FakePeer]:
        """Have a reader with little room hold a publisher."""
        kernel = FakeKernel(**limits)
        reader = kernel.subscriber(b"blocking/soft/block", room=8)
        sender = kernel.connect()
        sender.send(*publications(20))
        assert sender.paused
        return kernel, reader, sender

    def test_packet_that_is_taken(self) -> None:
        """[BLOCK-16] A holder's time begins anew, also without an event."""
        kernel, reader, sender = self.held()
        for count in (1, 7):  # too little for the kernel to report, or enough
            kernel.wait(4.9)
            reader.read(count)
            kernel.wait(0.2)
            assert not reader.wire.closed and sender.paused
        kernel.wait(5)
        assert reader.wire.closed and not sender.paused

    def test_hold_after_another(self) -> None:
        """[BLOCK-16] The next one has all of the time again."""
        kernel, reader, sender = self.held()
        kernel.wait(4)
        sender.close()  # which is not read before it may go on
        assert sender.paused
        reader.read_all()
        assert sender.wire.closed
        kernel.wait(4)
        other = kernel.connect()
        other.send(*publications(20))
        kernel.wait(4.9)
        assert other.paused and not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_time_is_given_once(self) -> None:
        """[BLOCK-16] However many that hold the holder come and go."""
        kernel, reader, sender = self.held()
        reader.send(b"SUB x")
        for _ in range(2):  # the first gives it time, from then on
            other = kernel.connect()
            other.send(b"SUB other", b"CMSG blocking/soft/block")
            other.wire.room = 0
            reader.send(publish(b"other"))
            assert reader.paused
            kernel.wait(3)
            assert sender.paused
            other.close()
        kernel.wait(1.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed and not sender.paused

    @pytest.mark.parametrize("seconds, most", [(5, 5), (10**9, 3600)])
    def test_the_loop_wakes_up_in_time(self, seconds: int, most: int) -> None:
        """[BLOCK-16] Also where that is more than epoll can wait."""
        kernel, _, _ = self.held(block_timeout=seconds)
        select, timeouts = kernel.selector.select, kernel.selector.timeouts
        timeouts.clear()

        def stop(timeout: float) -> Any:
            kernel.server.stopping = True
            return select(timeout)

        kernel.selector.select = stop  # type: ignore[method-assign]
        kernel.server.run()
        assert timeouts[0] == most

    def test_holder_that_changes_its_mode(self) -> None:
        """[BLOCK-2] [BLOCK-7] Another mode lets go, and nothing else."""
        _, reader, sender = self.held()
        for key in choices(b"order") + choices(b"echo"):
            reader.send(b"CMSG " + key, b"CMSG blocking/soft/block")
            assert sender.paused
        reader.send(b"CMSG blocking/soft/queue")
        assert not sender.paused
        assert len(reader.read_all()) == 20


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("left", ["soft", "hard"])
def test_only_the_mode_that_paused_lets_go(left: str, ends: bool) -> None:
    """[BLOCK-10] [BLOCK-7] A mode that is left frees whom it paused."""
    other = {"soft": b"blocking/hard", "hard": b"blocking/soft"}[left]
    kernel = FakeKernel(max_backlog=cost(4) if left == "hard" else cost(99))
    if left == "hard":
        reader = kernel.subscriber(room=0)
    else:
        reader = kernel.subscriber(b"blocking/soft/block", room=0)
    sender = kernel.connect()
    sender.send(*publications(5))
    assert sender.paused
    if ends:
        reader.send(b"CMSG blocking/" + left.encode() + b"/discard")
    elif left == "hard":  # soft mode block comes and goes: it paused nobody
        reader.send(b"CMSG " + other + b"/block")
        reader.send(b"CMSG " + other + b"/queue")
    else:
        reader.send(b"CMSG " + other + b"/discard")
        reader.send(b"CMSG " + other + b"/block")
    assert sender.paused != ends


def test_hard_hold_ends_though_soft_mode_is_block() -> None:
    """[BLOCK-10] A hold of hard mode ends with hard mode block."""
    kernel = FakeKernel(max_backlog=cost(4))
    reader, sender = kernel.subscriber(room=0), kernel.connect()
    sender.send(*publications(5))
    reader.send(b"CMSG blocking/soft/block", b"CMSG blocking/hard/discard")
    assert not sender.paused


def test_a_mode_that_is_left_for_a_moment(kernel: FakeKernel) -> None:
    """[BLOCK-7] It lets go as well, if both packets are read in one turn."""
    reader = kernel.subscriber(b"blocking/soft/block", room=0)
    sender = kernel.connect()
    sender.send(*publications(2))
    assert sender.paused
    reader.send(b"CMSG blocking/soft/queue", b"CMSG blocking/soft/block")
    assert not sender.paused
