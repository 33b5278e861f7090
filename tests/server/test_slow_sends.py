"""Tests of sends that take long: who waits, and who accounts for them."""

from __future__ import annotations

import errno
import gc
import tracemalloc
from collections import deque
from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel, FakePeer, choices
from packets import publications, publish
from slowness import (
    slow_down,
    slow_down_shutdown,
    spend_on_sends,
    spend_ticks,
    tick,
    wait_for_processor,
)


def slow_readers(
    kernel: FakeKernel, count: int, seconds: float
) -> list[FakePeer]:
    """Connect readers of user 1, each packet to whom takes some time."""
    readers = [kernel.connect(uid=1) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
        spend_ticks(kernel, reader, 1, seconds)
    return readers


def count_errors() -> int:
    """Return how many errors of the system are alive."""
    return sum(isinstance(one, OSError) for one in gc.get_objects())


class TestSlowSends:
    """A client can make each packet for it take long."""

    def test_sends_that_take_long(self, kernel: FakeKernel) -> None:
        """[CONN-20] The other clients of that user wait for their turns."""
        slow = [kernel.connect(uid=1) for _ in range(5)]
        quick, sender = kernel.connect(uid=2), kernel.connect(uid=3)
        for peer in [*slow, quick]:
            peer.send(b"SUB k")
        for peer in slow:
            spend_ticks(kernel, peer)
        sender.wire.incoming.extend(publications(9))
        kernel.server.round(0)
        assert [len(peer.wire.taken) for peer in slow] == [1, 0, 0, 0, 0]
        assert quick.wire.taken == deque(publications(9))
        kernel.run()
        for peer in slow:
            assert peer.read_all() == publications(9)

    def test_ticks_do_not_add_up(self, kernel: FakeKernel) -> None:
        """[CONN-20] Without a turn, as while newcomers are refused."""
        tracemalloc.start()
        try:
            for _ in range(10_000):
                kernel.server.tick()
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < 10_000

    @pytest.mark.parametrize("ticks, seconds", [([0.1], 0.004), ([0.01], 0.1)])
    def test_sends_beside_much_else(
        self, kernel: FakeKernel, ticks: list[float], seconds: float
    ) -> None:
        """[CONN-20] A late tick, or a wait for the processor, is no sign."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        send = reader.wire.send

        def slow(packet: Any) -> int:
            for each in ticks:
                tick(kernel, each)
            wait_for_processor(kernel, seconds)
            return send(packet)

        reader.wire.send = slow  # type: ignore[method-assign]
        sender.send(publish(b"k"), publish(b"k"))
        assert not reader.stats["refused"] and len(reader.read()) == 2

    @pytest.mark.parametrize("ticks, seconds", [(2, 0.02), (1, 0.1)])
    def test_sends_that_took_long(
        self, kernel: FakeKernel, ticks: int, seconds: float
    ) -> None:
        """[CONN-20] For a second; also if the kernel took no interrupts."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        send = reader.wire.send
        spend_ticks(kernel, reader, ticks, seconds)
        sender.send(publish(b"k"))
        reader.wire.send = send  # type: ignore[method-assign]
        for passed, refused in ((0.5, 1), (0.6, 1), (0.5, 1)):
            kernel.now += passed
            sender.send(publish(b"k"))
            assert reader.stats["refused"] == refused
        assert len(reader.read()) == 4

    def test_send_that_took_very_long(self, kernel: FakeKernel) -> None:
        """[CONN-20] [CONN-19] It is made up for in four times as long."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        spend_ticks(kernel, reader, seconds=5.0)
        for taken in (1, 2, 3):
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)  # all but the first wait for its turn
            kernel.server.round(0)
            for passed in (1.1, 18.0):
                kernel.now += passed
                sender.wire.incoming.append(publish(b"k"))
                kernel.server.round(0)
                assert len(reader.wire.taken) == taken
            kernel.now += 1.0

    def test_long_refusals_beside_a_quick_reader(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-20] What is for others is not taken for its sends."""
        stuck, quick = kernel.connect(uid=1), kernel.connect(uid=2)
        sender = kernel.connect(uid=3)
        for peer in (stuck, quick):
            peer.send(b"SUB k")
        stuck.wire.room = 0
        refuse = kernel.bus.flood.refuse

        def slow(*arguments: Any) -> None:
            tick(kernel, 0.1)
            kernel.now += 0.1
            refuse(*arguments)

        kernel.bus.flood.refuse = slow  # type: ignore
        sender.send(*publications(3))
        assert quick.read() == publications(3)
        assert not quick.stats["refused"]

    def test_many_slow_readers_of_another(self, kernel: FakeKernel) -> None:
        """[CONN-20] Their user accounts for them, and not who writes."""
        readers = slow_readers(kernel, 10, 0.003)
        sender = kernel.connect(uid=2)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert not sender.wire.incoming
        refused = [reader.stats["refused"] for reader in readers]
        assert refused == [1] * 4 + [2] * 6
        kernel.run()
        assert all(len(reader.wire.taken) == 2 for reader in readers)

    def test_readers_that_are_slow_together(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-20] Their own user's turn ends in time, too."""
        readers = slow_readers(kernel, 50, 0.012)
        sender = kernel.connect(uid=1)
        start = kernel.now
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert kernel.now - start < 0.03
        kernel.run()
        assert all(reader.read_all() == [publish(b"k")] for reader in readers)

    def test_three_slow_readers(self, kernel: FakeKernel) -> None:
        """[CONN-20] It is what a user's clients take together that counts."""
        readers = slow_readers(kernel, 3, 0.007)
        sender = kernel.connect(uid=2)
        for refused in ([0, 0, 1], [1, 1, 2]):
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)
            found = [reader.stats["refused"] for reader in readers]
            assert found == refused

    def test_sends_to_oneself(self, kernel: FakeKernel) -> None:
        """[CONN-20] They are left to turns for as long as the flush lasts."""
        readers = slow_readers(kernel, 9, 0.012)
        sender = kernel.connect(uid=1)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert readers[-1].stats["refused"] == 1
        kernel.run()
        sender.send(publish(b"k"))
        assert readers[0].stats["refused"] == 0
        assert readers[-1].stats["refused"] == 2

    def test_quick_readers_before_a_slow_one(self, kernel: FakeKernel) -> None:
        """[CONN-20] They do not account for it, if they are another user's."""
        quick = [kernel.connect(uid=2) for _ in range(10)]
        slow, sender = kernel.connect(uid=1), kernel.connect(uid=1)
        for peer in [*quick, slow]:
            peer.send(b"SUB k")
        spend_ticks(kernel, slow, 1, 0.013)
        for _ in range(3):
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)
            assert kernel.server._spent.get(2, 0.0) < 0.001
        assert not any(peer.stats["refused"] for peer in quick)

    def test_large_packets_to_many(self, kernel: FakeKernel) -> None:
        """[CONN-20] What it takes to copy them is no sign."""
        readers = slow_readers(kernel, 100, 0.0004)
        sender = kernel.connect(uid=2)
        sender.send(publish(b"k", bytes(400_000)))
        assert not any(reader.stats["refused"] for reader in readers)
        sender.send(publish(b"k", bytes(10_000)))
        assert any(reader.stats["refused"] for reader in readers)

    def test_packets_to_many_that_each_take_a_little(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-20] Of 16 kB, each send four times as long as it may take."""
        readers = slow_readers(kernel, 300, 0.00004)
        sender = kernel.connect(uid=2)
        sender.send(publish(b"k", bytes(16_000)))
        assert any(reader.stats["refused"] for reader in readers)

    def test_readers_that_are_expelled(self, kernel: FakeKernel) -> None:
        """[CONN-19] [CONN-20] No time is accounted for that is to come."""
        sender = kernel.connect(uid=2)
        for _ in range(10):
            reader = kernel.connect(uid=1)
            reader.send(b"SUB k", b"CMSG blocking/soft/error")
            reader.wire.room = 0
            slow_down_shutdown(kernel, reader, 0.005)
        slow_down(kernel, 0.020)
        tick(kernel, 0.020)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert min(kernel.server._spent.values()) >= 0

    def test_errors_leave_no_garbage(self, kernel: FakeKernel) -> None:
        """[BLOCK-19] Cycles would keep packets that are sent long since."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        gc.collect()
        gc.disable()
        try:
            before = count_errors()
            sender.send(*publications(5))
            kernel.server.drain(reader.client)
            reader.wire.failures.append(OSError(errno.ENOBUFS, "no buffers"))
            kernel.server.drain(reader.client)
            assert count_errors() == before
        finally:
            gc.enable()

    def test_delivery_to_one_that_cannot_be_watched(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-9] [CONN-12] It is disconnected, and nothing is left of it."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        reader.wire.failures.append(OSError(errno.ENOBUFS, "no buffers"))
        reader.client.events = 0  # so that it is to be watched anew

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        kernel.selector.register = fail  # type: ignore
        sender.send(*publications(2))
        assert reader.wire.closed
        assert kernel.bus.accounts.used == [1, 0, 0, 0]

    @pytest.mark.parametrize("mode", choices(b"blocking/"))
    def test_what_is_put_off_waits(
        self, kernel: FakeKernel, mode: bytes
    ) -> None:
        """[CONN-20] No mode is asked: it was not the kernel that refused."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k", b"CMSG " + mode)
        spend_ticks(kernel, reader)
        sender.send(*publications(3))
        sender.send(*publications(3))
        assert reader.read_all() == [*publications(3), *publications(3)]
        assert reader.stats["refused"] and not reader.stats["discarded"]
        kernel.wait(1.1)
        reader.wire.room = 0
        sender.send(publish(b"k"))
        kernel.wait(4.0)  # its user has had enough for so long
        is_disconnected = mode == b"blocking/soft/error"
        assert reader.wire.closed == is_disconnected

    def test_who_accounts_for_a_long_send(self, kernel: FakeKernel) -> None:
        """[CONN-19] [CONN-20] Its receiver, and not its publisher."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        spend_ticks(kernel, reader, seconds=0.060)
        for is_late in (False, False):
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)
            assert bool(sender.wire.incoming) == is_late
        reader.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert reader.wire.incoming

    def test_slow_sends_before_those_of_another(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-20] A tick at one's own sends says nothing of theirs."""
        first, slow, quick = (kernel.connect(uid=uid) for uid in (1, 2, 3))
        sender = kernel.connect(uid=4)
        for peer in (first, slow, quick):
            peer.send(b"SUB k")
        spend_ticks(kernel, first, 1, 0.016)
        spend_on_sends(kernel, slow, 0.009)
        spend_ticks(kernel, quick, 1, 0.0)
        for _ in range(2):
            sender.send(publish(b"k"))
        assert not quick.stats["refused"] and slow.stats["refused"]

    def test_newcomer_of_a_slow_user(self, kernel: FakeKernel) -> None:
        """[CONN-20] It is left to turns as those are who were there."""
        slow, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        slow.send(b"SUB k")
        spend_ticks(kernel, slow)
        sender.send(publish(b"k"))
        newcomer = kernel.connect(uid=1)
        newcomer.send(b"SUB k")
        sender.send(publish(b"k"))
        assert newcomer.stats["refused"] == 1

    def test_tick_among_large_packets(self, kernel: FakeKernel) -> None:
        """[CONN-20] Those before it took no longer than is normal, either."""
        readers = [kernel.connect(uid=1) for _ in range(100)]
        sender = kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
            spend_on_sends(kernel, reader, 0.0004)
        send = readers[50].wire.send

        def ticking(packet: Any) -> int:
            tick(kernel, 0.1)
            return send(packet)

        readers[50].wire.send = ticking  # type: ignore[method-assign]
        sender.send(publish(b"k", bytes(400_000)))
        assert not any(reader.stats["refused"] for reader in readers)

    def test_quick_sends_before_slow_ones(self, kernel: FakeKernel) -> None:
        """[CONN-20] They are no credit."""
        readers = [kernel.connect(uid=1) for _ in range(102)]
        sender = kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
        for reader in readers[99:]:
            spend_ticks(kernel, reader, 1, 0.012)
        sender.send(publish(b"k", bytes(400_000)))
        assert readers[-1].stats["refused"] == 1

    def test_work_of_an_earlier_turn(self, kernel: FakeKernel) -> None:
        """[CONN-20] It says nothing of sends in the next one."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        handle = slow_down(kernel, 0.1)
        kernel.connect(uid=3).send(b"UNSUB k")
        kernel.bus.handle = handle  # type: ignore[method-assign]
        send = reader.wire.send

        def slow(packet: Any) -> int:
            wait_for_processor(kernel, 0.1)
            return send(packet)

        reader.wire.send = slow  # type: ignore[method-assign]
        for _ in range(2):
            sender.send(publish(b"k"))
        assert not reader.stats["refused"]

    def test_backlog_of_what_was_put_off(self, kernel: FakeKernel) -> None:
        """[CONN-20] No mode is asked before it is empty."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k", b"CMSG blocking/soft/discard")
        spend_ticks(kernel, reader)
        sender.send(publish(b"k"))
        reader.wire.room = 0
        for _ in range(2):
            sender.send(publish(b"k"))
            kernel.wait(1.1)
        assert not reader.stats["discarded"]

    def test_slow_reader_beside_a_full_backlog(self) -> None:
        """[CONN-20] A user's own backlog is no reason to wait for it."""
        kernel = FakeKernel(sbus.Limits(max_user_backlog=1_000_000))
        slow, stuck, own = (kernel.connect(uid=1) for _ in "123")
        sender = kernel.connect(uid=2)
        for reader, pattern in ((slow, b"SUB k"), (stuck, b"SUB own")):
            reader.send(pattern)
        stuck.wire.room = 0
        own.send(*[publish(b"own", bytes(300_000))] * 2)
        spend_ticks(kernel, slow, 2, 0.060)
        for _ in range(10):
            start = kernel.now
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)
            taken = kernel.now - start
            assert not sender.wire.incoming
        assert taken < 0.010

    def test_who_pays_for_what_is_put_off(self, kernel: FakeKernel) -> None:
        """[CONN-19] [CONN-20] Not who published it."""
        slow_readers(kernel, 1, 0.020)
        readers = [kernel.connect(uid=1) for _ in range(300)]
        sender = kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
        sender.send(publish(b"k"))
        for _ in range(3):
            sender.wire.incoming.append(publish(b"k"))
            kernel.server.round(0)
            assert kernel.server._spent.get(2, 0.0) < 0.001
        assert readers[-1].stats["refused"]

    def test_limit_of_what_is_put_off(self) -> None:
        """[CONN-20] [BLOCK-9] Above it the hard mode decides."""
        kernel = FakeKernel(sbus.Limits(max_backlog=1_000))
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k", b"CMSG blocking/hard/discard")
        spend_ticks(kernel, reader)
        sender.send(publish(b"k"))
        reader.wire.room = 0
        for packet in publications(20):
            sender.send(packet)
        assert reader.stats["discarded"] and not reader.wire.closed

    def test_expulsion_that_takes_long(self, kernel: FakeKernel) -> None:
        """[CONN-19] [CONN-20] It is accounted for once."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k", b"CMSG blocking/soft/error")
        reader.wire.room = 0
        slow_down_shutdown(kernel, reader, 0.030)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert min(kernel.server._spent.values()) >= 0

    @pytest.mark.parametrize("order", [1, -1])
    def test_slow_sends_without_a_tick(
        self, kernel: FakeKernel, order: int
    ) -> None:
        """[CONN-20] The kernel takes no interrupts while it wakes many."""
        slow, quick = kernel.connect(uid=1), kernel.connect(uid=2)
        sender = kernel.connect(uid=2)
        for peer in (slow, quick)[::order]:
            peer.send(b"SUB k")
        spend_on_sends(kernel, slow, 0.050)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert not sender.wire.incoming  # who sent it is not late
        assert slow.stats["refused"] and not quick.stats["refused"]

    def test_recv_between_two_flushes(self, kernel: FakeKernel) -> None:
        """[CONN-20] What a packet takes to come is not for its receivers."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        receive = sender.wire.recv_into

        def slow(*arguments: Any) -> int:
            kernel.now += 0.050
            kernel.server.tick()
            return receive(*arguments)

        sender.wire.recv_into = slow  # type: ignore[method-assign]
        sender.send(*[publish(b"k", bytes(400_000))] * 3)
        assert len(reader.read()) == 3 and not reader.stats["refused"]
        assert kernel.server._spent.get(1, 0.0) < 0.001

    def test_packets_for_nobody_before(self, kernel: FakeKernel) -> None:
        """[CONN-20] They are no reason for sends to take long."""
        readers = slow_readers(kernel, 100, 0.0004)
        sender = kernel.connect(uid=1)
        sender.send(*publications(3, b"nobody"))
        nothing = publish(b"nobody", bytes(16_300))
        packets = [*[nothing] * 10, publish(b"k", bytes(16_000))]
        start = kernel.now
        sender.wire.incoming.extend(packets)
        kernel.server.round(0)
        assert not sender.wire.incoming
        assert readers[-1].stats["refused"]
        assert kernel.now - start < 0.030

    def test_many_users_by_turns(self, kernel: FakeKernel) -> None:
        """[CONN-20] What each takes is added up, however little it is."""
        readers = [kernel.connect(uid=1 + n % 2) for n in range(100)]
        sender = kernel.connect(uid=3)
        for n, reader in enumerate(readers):
            reader.send(b"SUB k")
            spend_on_sends(kernel, reader, 0.001 if n % 2 else 0.00001)
        sender.send(publish(b"k"), publish(b"k"))
        refused = [reader.stats["refused"] for reader in readers]
        assert not any(refused[::2]) and refused[-1]

    def test_sends_that_take_a_while(self, kernel: FakeKernel) -> None:
        """[CONN-20] What is bearable in each flush is not added up."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.send(b"SUB k")
        slow_down(kernel, 0.008)
        spend_ticks(kernel, reader, 1, 0.0045)
        for _ in range(10):
            sender.send(publish(b"k"))
            kernel.wait(0.2)
        assert not reader.stats["refused"]

    def test_slow_user_beside_a_bearable_one(self, kernel: FakeKernel) -> None:
        """[CONN-20] What one has worked says nothing of another's share."""
        slow, other = kernel.connect(uid=1), kernel.connect(uid=2)
        sender = kernel.connect(uid=3)
        for peer in (other, slow):
            peer.send(b"SUB k")
        spend_on_sends(kernel, other, 0.0045)
        spend_on_sends(kernel, slow, 0.050)
        for _ in range(2):
            sender.send(publish(b"k"))
        assert slow.stats["refused"] and not other.stats["refused"]

    def test_what_was_accounted_for(self, kernel: FakeKernel) -> None:
        """[CONN-20] It is not once more, when there is more for that user."""
        peers = [kernel.connect(uid=uid) for uid in (1, 2, 1)]
        sender = kernel.connect(uid=3)
        for peer in peers:
            peer.send(b"SUB k")
        spend_on_sends(kernel, peers[0], 0.050)
        refuse = kernel.bus.flood.refuse

        def slow(*arguments: Any) -> None:
            kernel.now += 0.010
            refuse(*arguments)

        kernel.bus.flood.refuse = slow  # type: ignore
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert peers[2].stats["refused"]
        assert 0.05 <= kernel.server._spent[1] < 0.061

    def test_run_that_ends_with_a_small_packet(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-20] What is normal for the others is more than for that."""
        readers = [kernel.connect(uid=1) for _ in range(300)]
        last, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
            spend_on_sends(kernel, reader, 0.0002)
        last.send(b"SUB last")
        large = publish(b"k", bytes(400_000))
        sender.wire.incoming.extend([publish(b"k"), publish(b"last"), large])
        kernel.run()
        sender.send(publish(b"k"))
        assert not any(reader.stats["refused"] for reader in readers)

    def test_what_is_put_off_has_a_limit(self) -> None:
        """[CONN-20] [BLOCK-15] No quick reader is expelled for it.

        But while its user has not made up for the slow one.
        """
        kernel = FakeKernel(sbus.Limits(max_user_backlog=4_000_000))
        readers = [kernel.connect(uid=1) for _ in range(50)]
        slow, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
        slow.send(b"SUB slow")
        spend_ticks(kernel, slow)
        sender.send(publish(b"slow"))
        kernel.wait(0.5)
        sender.wire.incoming.append(publish(b"k", bytes(400_000)))
        kernel.server.round(0)
        assert readers[0].stats["refused"]
        kernel.run()
        assert all(len(reader.read()) == 1 for reader in readers)
