"""Tests of flood control: orders, hard modes, overshoot, block time-outs."""

from __future__ import annotations

import gc
import heapq
import random
import sys
import tracemalloc
from typing import Any

import pytest

import sbus
from fake_kernel import (
    OWNER,
    FakeKernel,
    FakePeer,
    choices,
    small,
)
from packets import WHOAMI, publications, publish
from sizes import either
from slowness import slow_down


class TestBacklog:
    def backlog(self, order: str, *packets: bytes) -> sbus.Backlog:
        """Return a backlog in an order, with packets."""
        backlog = sbus.Backlog()
        backlog.reorder(order)
        for packet in packets:
            backlog.push(packet)
        return backlog

    def drain(self, backlog: sbus.Backlog) -> list[bytes]:
        """Return the packets in the order in which they would be sent."""
        packets = []
        while len(backlog):
            packets.append(backlog.first())
            backlog.pop()
        return packets

    def test_oldest_first(self) -> None:
        """[ORDER-1] In order/queue."""
        packets = [b"1", b"333", b"22"]
        assert self.drain(self.backlog("queue", *packets)) == packets

    def test_memory_of_what_is_left_over(self) -> None:
        """[BLOCK-19] No more than the start line says, all the way down."""
        backlog = sbus.Backlog()
        backlog.reorder("random")
        tracemalloc.start()
        try:
            for number in range(either(20_000, 5_000)):
                backlog.push(b"%d" % number)
            while len(backlog) > 1_000:
                backlog.first()
                backlog.pop()
                backlog.trim()
                used, _ = tracemalloc.get_traced_memory()
                assert used < 4 * sbus.PACKET_OVERHEAD_BYTES * len(backlog)
        finally:
            tracemalloc.stop()

    def test_garbage_is_looked_for_elsewhere(self, kernel: FakeKernel) -> None:
        """[CONN-19] A long backlog would take as long as all who are served.

        The server has the collector look at what is young only.
        """
        reader = kernel.connect()
        reader.send(b"SUB k")
        reader.wire.room = 0
        kernel.connect().send(*publications(100))
        waiting = reader.client.backlog._packets
        assert len(waiting) == 100
        assert any(one is waiting for one in gc.get_objects(generation=2))

    def test_newest_first(self) -> None:
        """[ORDER-2] In order/stack."""
        packets = [b"1", b"333", b"22"]
        assert self.drain(self.backlog("stack", *packets)) == packets[::-1]

    def test_largest_first(self) -> None:
        """[ORDER-3] In order/random."""
        packets = [b"1", b"333", b"22", b""]
        expected = [b"333", b"22", b"1", b""]
        assert self.drain(self.backlog("random", *packets)) == expected

    @pytest.mark.parametrize(
        ("orders", "expected"),
        [
            (["random"], b"abc"),
            (["stack", "random"], b"cba"),
            (["stack", "queue", "random"], b"abc"),
            (["random", "stack", "random"], b"cba"),
        ],
    )
    def test_ties(self, orders: list[str], expected: bytes) -> None:
        """[ORDER-4] Among packets of one size the last order decides."""
        for changed_first in (True, False):
            backlog = sbus.Backlog()
            if changed_first:
                for order in orders:
                    backlog.reorder(order)
            for packet in (b"a", b"b", b"c"):
                backlog.push(packet)
            if not changed_first:
                for order in orders:
                    backlog.reorder(order)
            assert b"".join(self.drain(backlog)) == expected

    def test_new_order_applies_to_what_waits(self) -> None:
        """[ORDER-5] And arrivals are not forgotten by order/random."""
        backlog = self.backlog("queue", b"a", b"ccc", b"bb")
        backlog.reorder("random")
        backlog.push(b"dddd")
        assert backlog.first() == b"dddd"
        backlog.pop()
        backlog.reorder("stack")
        backlog.reorder("random")
        backlog.reorder("queue")
        assert self.drain(backlog) == [b"a", b"ccc", b"bb"]

    def test_cost_of_another_order(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ORDER-5] [CONN-19] However often it changes while packets wait."""
        sizes: list[int] = []

        def sort(heap: list[tuple[int, int]]) -> None:
            sizes.append(len(heap))
            heap.sort()

        monkeypatch.setattr("heapq.heapify", sort)
        backlog = self.backlog("queue", *[bytes(n % 50) for n in range(999)])
        for order in ["random", "stack", "random", "queue"] * 100:
            backlog.reorder(order)
            backlog.first()
            backlog.pop()
        assert len(backlog) == 999 - 400
        assert sizes == [999, 997]  # one for each order of ties

    @pytest.mark.parametrize("order", ["queue", "stack", "random"])
    def test_backlog_that_is_never_empty(self, order: str) -> None:
        """[CONN-19] [ORDER-5] It keeps no place of what has been sent."""
        backlog = self.backlog("random", b"x", b"yy")
        backlog.first()
        backlog.reorder(order)
        for number in range(10_000):
            backlog.push(bytes(number % 7))
            backlog.first()
            backlog.pop()
            backlog.trim()
        assert len(backlog) == 2
        assert all(len(heap) <= 2 for heap in backlog._heaps.values())

    def test_order_that_comes_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-19] [ORDER-5] Few places are left of what was sent since."""
        backlog = self.backlog("random", *[b"xx"] * 20_000)
        backlog.first()
        backlog.reorder("queue")
        for _ in range(9_000):
            backlog.first()
            backlog.pop()
            backlog.push(b"x")
            backlog.trim()
        pops: list[list[int]] = []

        def pop(heap: list[int]) -> None:
            pops.append(heap)
            sort_out(heap)

        sort_out = heapq.heappop
        monkeypatch.setattr("heapq.heappop", pop)
        backlog.reorder("random")
        assert backlog.first() == b"xx"
        assert len(pops) <= 20_000 // 8

    @pytest.mark.parametrize("left", [0, 1])
    def test_backlog_that_was_large(
        self, kernel: FakeKernel, left: int
    ) -> None:
        """[BLOCK-19] Its memory is given back when its packets are gone."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        reader.wire.room = 0
        sender.send(*publications(10_000))
        assert sys.getsizeof(reader.client.backlog._packets) > 500_000
        reader.wire.room = 10_000 - left
        kernel.wait(1)
        assert len(reader.client.backlog) == left
        assert sys.getsizeof(reader.client.backlog._packets) < 5_000

    def test_large_packet_that_many_are_to_have(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-4] It is copied once, and the next one anew."""
        first, second, sender = (kernel.connect() for _ in range(3))
        for reader in (first, second):
            reader.send(b"SUB k")
            reader.wire.room = 0
        packets = [publish(b"k", byte * 50_000) for byte in (b"a", b"b")]
        sender.send(*packets)
        assert [*first.client.backlog] == packets
        pairs = zip(first.client.backlog, second.client.backlog)
        assert all(one is other for one, other in pairs)

    @pytest.mark.parametrize("seed", range(20))
    def test_orders_that_change(self, seed: int) -> None:
        """[ORDER-1] [ORDER-2] [ORDER-3] [ORDER-4] [ORDER-5] At any time."""
        chance = random.Random(seed)
        backlog = sbus.Backlog()
        waiting: list[tuple[int, bytes]] = []  # (arrival, packet)
        order = ties = "queue"
        for arrival in range(2_000):
            if chance.random() < 0.1:
                order = chance.choice(["queue", "stack", "random"])
                ties = ties if order == "random" else order
                backlog.reorder(order)
            if chance.random() < 0.5 or not waiting:
                waiting.append((arrival, bytes(chance.randrange(9))))
                backlog.push(waiting[-1][1])
                continue
            sign = 1 if ties == "queue" else -1
            is_random = order == "random"
            first = min(
                waiting,
                key=lambda one: (-len(one[1]) * is_random, sign * one[0]),
            )
            assert backlog.first() is first[1]
            waiting.remove(first)
            backlog.pop()

    @pytest.mark.parametrize("seed", range(10))
    def test_bytes_are_those_of_the_packets(self, seed: int) -> None:
        """[BLOCK-19] Each counts as its size and 128 bytes."""
        chance = random.Random(seed)
        backlog = sbus.Backlog()
        waiting: list[bytes] = []
        for _ in range(500):
            action = chance.randrange(4)
            if action == 0 and waiting:
                waiting.remove(backlog.first())
                backlog.pop()
            elif action == 1 and not chance.randrange(5):
                backlog.reorder(chance.choice(["queue", "stack", "random"]))
            else:
                packet = bytes(chance.randrange(50))
                waiting.append(packet)
                backlog.push(packet)
            assert len(backlog) == len(waiting)
        backlog.clear()
        assert not backlog


class TestHardModes:
    def full(
        self, mode: bytes = b"", uid: int = 1000
    ) -> tuple[FakeKernel, FakePeer, FakePeer]:
        """Fill a subscriber's backlog; return it and its publisher."""
        kernel = FakeKernel(small(backlog_packets=4))
        reader, sender = kernel.connect(uid=uid), kernel.connect(uid=1000)
        reader.wire.room = 1
        reader.send(b"SUB k", *([b"CMSG " + mode] if mode else []))
        sender.send(*publications(5))
        assert len(reader.client.backlog) == 4
        return kernel, reader, sender

    def test_discard(self) -> None:
        """[BLOCK-9] [BLOCK-20] The new packet, not an old one."""
        kernel, reader, sender = self.full(b"blocking/hard/discard")
        sender.send(publish(b"k", b"x"))
        assert kernel.bus.flood.discarded == {"hard/discard": 1}
        assert reader.stats["discarded"] == 1
        assert not sender.paused
        assert reader.read_all() == publications(5)

    def test_block(self) -> None:
        """[BLOCK-10] It is queued; half the limit lets its sender go on."""
        _, reader, sender = self.full()
        assert not sender.paused
        sender.send(publish(b"k", b"5"))
        assert sender.paused
        read = []
        for waiting in (4, 3):
            read += reader.read(1)
            assert sender.paused and len(reader.client.backlog) == waiting
        read += reader.read(1)
        assert not sender.paused and len(reader.client.backlog) == 2
        assert read + reader.read_all() == publications(6)

    def test_backlog_of_a_user(self) -> None:
        """[LIMIT-14] All its clients share it; others have their own."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_user_backlog=3 * size))
        peers = [kernel.connect(uid=uid) for uid in (1, 1, 2)]
        for peer in peers:
            peer.wire.room = 0
            peer.send(b"SUB k", b"CMSG blocking/hard/discard")
        kernel.connect().send(*publications(4))
        waiting = [len(peer.client.backlog) for peer in peers]
        assert waiting[0] + waiting[1] == waiting[2] == 3
        assert kernel.bus.users[1].stats()["backlog_bytes"] == 3 * size
        peers[0].close()
        peers[1].wire.room = None
        kernel.run()
        assert kernel.bus.users[1].stats()["backlog_bytes"] == 0
        assert kernel.bus.accounts.used[sbus.BACKLOG_BYTES] == 3 * size

    @pytest.mark.parametrize("uid, count", [(1, 6), (0, 8), (OWNER, 8)])
    def test_backlog_of_the_bus(self, uid: int, count: int) -> None:
        """[LIMIT-15] [LIMIT-16] A quarter is kept for the privileged."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_bus_backlog=8 * size))
        peer = kernel.connect(uid=uid)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/discard")
        kernel.connect().send(*publications(9))
        assert len(peer.client.backlog) == count

    def test_block_at_the_limit_of_a_user(self) -> None:
        """[LIMIT-14] [BLOCK-10] Half of what waits has to go."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_user_backlog=4 * size))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(6))
        assert sender.paused
        reader.read(2 - 1)
        reader.read(1)
        assert sender.paused and len(reader.client.backlog) == 3
        reader.read(1)
        assert not sender.paused
        assert len(reader.read_all()) == 3

    def test_error(self) -> None:
        """[BLOCK-11] The stalled client is disconnected."""
        _, reader, sender = self.full(b"blocking/hard/error")
        sender.send(publish(b"k", b"5"))
        assert reader.wire.closed and not sender.wire.closed

    def test_block_of_another_user_is_error(self) -> None:
        """[BLOCK-15] No user can hold up another, nor use memory for it."""
        _, reader, sender = self.full(uid=1001)
        sender.send(publish(b"k", b"5"))
        assert reader.wire.closed and not sender.paused

    def test_discard_of_another_user(self) -> None:
        """[BLOCK-9] Nobody needs to wait for that."""
        _, reader, sender = self.full(b"blocking/hard/discard", uid=1001)
        sender.send(publish(b"k", b"5"))
        assert not reader.wire.closed
        assert reader.stats["discarded"] == 1

    def test_packet_that_just_fits(self) -> None:
        """[BLOCK-19] The limit itself is no excess."""
        _, reader, sender = self.full(b"blocking/hard/error")
        assert not reader.wire.closed

    def test_soft_and_hard_block(self) -> None:
        """[BLOCK-7] [BLOCK-10] The backlog has to be empty then."""
        kernel = FakeKernel(small(backlog_packets=4))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(8))
        assert sender.paused
        for _ in range(6):
            reader.read(1)
            assert sender.paused
        reader.read(1)
        assert not sender.paused

    def test_answers_are_queued_in_every_mode(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-17] [CRED-3] They are neither discarded nor refused."""
        for mode in choices(b"blocking/soft"):
            peer = kernel.connect()
            peer.wire.room = 1
            peer.send(b"CMSG " + mode, WHOAMI, WHOAMI)
            assert not peer.wire.closed
            assert len(peer.read_all()) == 2

    @pytest.mark.parametrize("mode", choices(b"blocking/"))
    def test_answer_above_the_limit_disconnects(self, mode: bytes) -> None:
        """[BLOCK-18] Who asks and never reads uses no more memory."""
        kernel = FakeKernel(small(backlog_packets=4))
        peer = kernel.connect()
        peer.wire.room = 1
        peer.send(b"CMSG " + mode, *[WHOAMI] * 10)
        assert peer.wire.closed

    @pytest.mark.parametrize("soft", choices(b"blocking/soft"))
    @pytest.mark.parametrize("hard", choices(b"blocking/hard"))
    @pytest.mark.parametrize("order", choices(b"order"))
    @pytest.mark.parametrize("echo", choices(b"echo"))
    def test_every_combination(
        self, soft: bytes, hard: bytes, order: bytes, echo: bytes
    ) -> None:
        """[BLOCK-4] [BLOCK-12] [BLOCK-20] Nothing vanishes, others go on."""
        kernel = FakeKernel(small(backlog_packets=10, payload_bytes=2))
        peer, witness, sender = (kernel.connect() for _ in range(3))
        witness.send(b"SUB k")
        modes = [b"CMSG " + mode for mode in (soft, hard, order, echo)]
        peer.wire.room = 3
        peer.send(b"SUB k", *modes, publish(b"k", b"-"))
        sender.send(*publications(40)[10:])  # of one size
        assert len(peer.wire.taken) == 3
        rest = 30 + sbus.CHOICES[echo][1] - 3
        soft_mode, hard_mode = sbus.CHOICES[soft][1], sbus.CHOICES[hard][1]
        queues = soft_mode in ("queue", "block")
        is_error = soft_mode == "error" or (queues and hard_mode == "error")
        assert peer.wire.closed is is_error
        if not is_error:
            kept = rest if hard_mode == "block" else 10
            waiting = kept if queues else 0
            assert len(peer.client.backlog) == waiting
            assert peer.stats["discarded"] == rest - waiting
            is_paused = queues and "block" in (soft_mode, hard_mode)
            assert sender.paused is is_paused
        peer.read_all()
        assert not sender.paused
        assert len(witness.read_all()) == 31


class TestOvershoot:
    """[BLOCK-21] How far publishers take a backlog before they are paused."""

    def readers(self, uid: int, **limits: int) -> tuple[FakeKernel, FakePeer]:
        """Connect a reader that takes nothing, with some limits."""
        kernel = FakeKernel(sbus.Limits(**limits))
        reader = kernel.connect(uid=uid)
        reader.wire.room = 0
        reader.send(b"SUB k")
        return kernel, reader

    def fill(self, kernel: FakeKernel, uid: int, size: int) -> None:
        """Queue that many bytes, with a publisher for each large packet."""
        most = 400_000 + sbus.PACKET_OVERHEAD_BYTES
        while size:
            part = size if size <= most else min(most, size - 1_000)
            packet = publish(b"k").ljust(part - sbus.PACKET_OVERHEAD_BYTES)
            kernel.connect(uid=uid).send(packet)
            size -= part

    @pytest.mark.parametrize(
        ("limit", "uid"),
        [
            ("max_backlog", 1000),
            ("max_backlog", 0),
            ("max_backlog", OWNER),
            ("max_user_backlog", 1000),
            ("max_bus_backlog", 0),
        ],
    )
    def test_bound(self, limit: str, uid: int) -> None:
        """[BLOCK-21] An eighth and a mebibyte: what is above ends it."""
        kernel, reader = self.readers(uid, **{limit: 80_000})
        self.fill(kernel, 1000, 80_000 + 10_000 + (1 << 20))
        assert not reader.wire.closed
        self.fill(kernel, 1000, 200)  # the bound itself is not above it
        assert not reader.wire.closed
        self.fill(kernel, 1000, 200)
        assert reader.wire.closed

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_limit_of_a_user_is_not_for_the_privileged(self, uid: int) -> None:
        """[BLOCK-21] [LIMIT-14] As ever."""
        kernel, reader = self.readers(uid, max_user_backlog=80_000)
        self.fill(kernel, 1000, 2_000_000)
        assert not reader.wire.closed


class TestBlockTimeout:
    def held(self) -> tuple[FakeKernel, FakePeer, FakePeer]:
        """Have a reader hold a publisher."""
        kernel = FakeKernel()
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 8
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(20))
        assert sender.paused
        return kernel, reader, sender

    def test_holder_that_takes_nothing(self) -> None:
        """[BLOCK-16] It is disconnected, and its publishers go on."""
        kernel, reader, sender = self.held()
        kernel.wait(4.9)
        assert sender.paused
        kernel.wait(0.2)
        assert reader.wire.closed and not sender.paused
        kernel.server.round()
        assert kernel.selector.timeouts[-1] is None

    def test_holder_that_takes_a_packet(self) -> None:
        """[BLOCK-16] Its time begins anew, without an event to tell."""
        kernel, reader, sender = self.held()
        for _ in range(5):
            kernel.wait(4.9)
            reader.read(1)  # too little for the kernel to report
            kernel.wait(0.2)
            assert not reader.wire.closed and sender.paused
        kernel.wait(5.1)
        assert reader.wire.closed

    def test_time_counts_from_the_last_packet(self) -> None:
        """[BLOCK-16] Not from the first one that was refused."""
        kernel, reader, sender = self.held()
        kernel.wait(4)
        reader.read(7)  # enough for the kernel to report
        kernel.wait(4.9)
        assert not reader.wire.closed and sender.paused
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_holder_that_lets_go(self) -> None:
        """[BLOCK-16] Who holds nobody has all the time."""
        kernel, reader, sender = self.held()
        reader.read_all()
        reader.send(b"CMSG blocking/soft/queue")
        sender.send(*publications(20))
        kernel.wait(100)
        assert not reader.wire.closed

    def test_time_after_a_quiet_hour(self) -> None:
        """[BLOCK-16] In which it waited for nothing, and was not stopped."""
        kernel, reader, sender = self.held()
        reader.read_all()
        kernel.server.round()
        kernel.now += 3600
        sender.send(*publications(20))
        assert sender.paused
        kernel.wait(5.1)
        assert reader.wire.closed

    def test_stalled_client_that_holds_nobody(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-16] A slow reader as such is no offence."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(5))
        kernel.wait(100)
        assert reader.read_all() == publications(5)

    def test_two_that_wait_for_each_other(self, kernel: FakeKernel) -> None:
        """[BLOCK-16] The bus does not let them wait for ever."""
        one, two = kernel.connect(), kernel.connect()
        for peer in (one, two):
            peer.wire.room = 1
            peer.send(b"SUB k", b"CMSG blocking/soft/block")
        one.send(*publications(3))
        two.send(*publications(3))
        assert one.paused and two.paused
        kernel.wait(5.1)
        assert one.wire.closed and two.wire.closed

    def test_stop_of_the_server(self) -> None:
        """[BLOCK-16] The time that it was stopped does not count."""
        kernel, reader, sender = self.held()
        select = kernel.selector.select

        def stopped(timeout: float | None = None) -> Any:
            kernel.now += 7
            kernel.selector.select = select  # type: ignore[method-assign]
            return select(timeout)

        kernel.wait(4)
        kernel.selector.select = stopped  # type: ignore[method-assign]
        kernel.server.round()
        assert not reader.wire.closed and sender.paused
        kernel.wait(0.9)
        reader.read(1)
        kernel.wait(0.2)
        kernel.wait(4.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_stop_of_a_busy_server(self) -> None:
        """[BLOCK-16] Nor does it where it hit the server in a turn."""
        kernel, reader, _ = self.held()
        other = kernel.connect(uid=2)
        kernel.wait(4)
        slow_down(kernel, 7)
        other.send(publish(b"other"))
        kernel.wait(0.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_the_loop_wakes_up_in_time(self) -> None:
        """[BLOCK-16] [CONN-9] It waits for no longer than a timer says."""
        kernel, _, _ = self.held()
        kernel.server.round()
        timeout = kernel.selector.timeouts[-1]
        assert timeout is not None and 4 < timeout <= 5

    def test_time_ends_with_the_last_held_publisher(self) -> None:
        """[BLOCK-16] The next one that is held has all of it."""
        kernel, reader, sender = self.held()
        kernel.wait(1)
        kernel.server.disconnect(sender.client, "test")
        kernel.wait(3.9)
        kernel.connect().send(publish(b"k"))
        kernel.wait(4.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_publisher_that_was_disconnected_is_not_held(self) -> None:
        """[BLOCK-16] Nobody is made responsible for it."""
        kernel, reader, sender = self.held()
        client = sender.client
        reader.read_all()
        kernel.server.disconnect(client, "test")
        assert not kernel.bus.flood.may_pause(client, reader.client)

    def test_long_block_time(self) -> None:
        """[BLOCK-16] [LIMIT-8] Longer than epoll can wait."""
        kernel = FakeKernel(sbus.Limits(block_timeout=1e9))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(3))
        kernel.server.round()
        timeout = kernel.selector.timeouts[-1]
        assert timeout is not None and timeout <= 3600

    def test_publisher_that_leaves_while_paused(self) -> None:
        """[CONN-6] [BLOCK-12] What it sent is handled once it may go on."""
        kernel, reader, sender = self.held()
        sender.wire.incoming.append(publish(b"k", b"last"))
        sender.close()
        assert reader.read_all()[-1] == publish(b"k", b"last")
        assert sender.wire.closed

    def test_holder_that_leaves(self) -> None:
        """[BLOCK-12] Its publishers go on."""
        _, reader, sender = self.held()
        reader.close()
        assert reader.wire.closed and not sender.paused

    def test_paused_publisher_that_is_disconnected(self) -> None:
        """[CONN-12] Nobody holds it any longer."""
        kernel, reader, sender = self.held()
        client = sender.client
        kernel.server.disconnect(client, "test")
        assert reader.client.holding == {} and not client.held_by
        reader.read_all()
