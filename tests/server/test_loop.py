"""Tests of the loop: whose turn it is, for how long, and what goes wrong."""

from __future__ import annotations

import errno
import gc
import itertools
import socket
from typing import Any

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel, FakePeer, FakeWire
from packets import WHOAMI, publications, publish
from slowness import slow_down, spend_on_sends, tick

NUMBERS = itertools.count()


def new_keys(count: int) -> list[bytes]:
    """Return publish packets with keys that were never used before."""
    return [publish(b"%d" % next(NUMBERS)) for _ in range(count)]


def newcomers(
    kernel: FakeKernel, count: int, *packets: bytes, uid: int = 1
) -> list[FakeWire]:
    """Have clients of a user wait to be let in, with what they have sent."""
    wires = []
    for number in range(count):
        own = sbus.Credentials(1, uid, 1_000 + number)
        wire = FakeWire(next(kernel.numbers), own)
        wire.incoming.extend(packets)
        wires.append(wire)
    kernel.listener.waiting.extend(wires)
    return wires


class TestLoop:
    def test_old_bytes_of_the_buffer(self) -> None:
        """[PUB-4] [LIMIT-4] They are no part of a shorter packet."""
        kernel = FakeKernel(sbus.Limits(max_key=40_000))
        peer, other = kernel.connect(), kernel.connect()
        peer.send(b"SUB k/", publish(b"k/" + b"x" * 30_000, b"secret"))
        other.send(b"SUB k/" + b"x" * 18_000)
        other.send(publish(b"k/" + b"x" * 18_000, b"y"))
        assert [len(packet) for packet in peer.read()] == [30_013, 18_008]
        assert [len(packet) for packet in other.read()] == [18_008]

    def test_send_buffer_is_raised(self, kernel: FakeKernel) -> None:
        """[CONN-4] Twice the option, less 32, is the largest packet."""
        wire = kernel.connect().wire
        assert wire.options[socket.SO_SNDBUF] * 2 - 32 >= 409_600

    def test_turns_are_short(self, kernel: FakeKernel) -> None:
        """[CONN-5] Others come after at most 64 packets."""
        flooder, polite = kernel.connect(), kernel.connect()
        flooder.wire.incoming.extend(publications(1000))
        polite.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) >= 1000 - 64
        assert len(polite.wire.taken) == 1

    def test_turns_begin_anew(self, kernel: FakeKernel) -> None:
        """[CONN-5] What was done in earlier turns does not count."""
        peer = kernel.connect()
        peer.send(b"SUB k", *publications(5000))
        peer.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert not peer.wire.incoming

    def test_turns_end_by_the_clock(self, kernel: FakeKernel) -> None:
        """[CONN-5] After a millisecond, if packets take so long."""
        peer = kernel.connect()
        slow_down(kernel, 0.0003)
        peer.wire.incoming.extend(publish(b"%d" % n) for n in range(64))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 64 - 4

    def test_turns_in_which_to_read_takes_long(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] [CONN-19] As it does of a client that many watch."""
        kernel.connect().send(*publications(1))  # so that its key is known
        peer = kernel.connect()
        recv_into = peer.wire.recv_into

        def slow(*arguments: Any) -> int:
            kernel.now += 0.010
            kernel.server.tick()
            return recv_into(*arguments)

        peer.wire.recv_into = slow  # type: ignore[method-assign]
        peer.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 63

    def test_turns_with_large_packets_end_by_the_clock(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] Although their key is known."""
        peer = kernel.connect()
        slow_down(kernel, 0.0006)
        peer.wire.incoming.extend([publish(b"k", bytes(20_000))] * 64)
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 64 - 2

    def test_debts_outlive_the_last_client(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever leaves and comes again has the same to pay."""
        other = kernel.connect(uid=2)
        other.send(b"SUB k")
        peer = kernel.connect(uid=1)
        peer.wire.incoming.append(b"SUB x")
        peer.wire.ended = True
        close = peer.wire.close

        def slow() -> None:
            kernel.now += 0.060
            close()

        peer.wire.close = slow  # type: ignore[method-assign]
        kernel.server.round(0)
        kernel.server.round(0)
        assert peer.wire.closed
        (wire,) = newcomers(kernel, 1, uid=1)
        kernel.server.round(0)
        wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert wire.incoming
        kernel.run()
        assert not wire.incoming and other.read() == [publish(b"k")]

    def test_holders_that_are_due_together(self, kernel: FakeKernel) -> None:
        """[CONN-19] [BLOCK-16] They take turns like others of that user."""
        readers = [kernel.connect(uid=1) for _ in range(9)]
        sender, witness = kernel.connect(uid=1), kernel.connect(uid=2)
        witness.send(b"SUB w")
        for reader in readers:
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
            reader.wire.room = 0
            reader.wire.is_silent = True
        sender.send(publish(b"k"))
        for reader in readers:
            reader.wire.room = 1
            spend_on_sends(kernel, reader, 0.003)
        kernel.wait(4.9)
        kernel.now += 0.2
        witness.wire.incoming.append(publish(b"w"))
        kernel.server.round(0)
        assert witness.wire.taken
        assert sum(len(reader.wire.taken) for reader in readers) == 1
        for _ in range(50):
            kernel.wait(0.1)
        assert all(reader.wire.taken for reader in readers)

    def test_long_turns_are_made_up_for_in_time(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-19] Rounds in which nobody has a turn are short."""
        busy, _ = kernel.connect(uid=1), kernel.connect(uid=2)
        busy.send(b"SUB k")
        spend_on_sends(kernel, busy, 0.060)
        busy.wire.incoming.extend(publications(2))
        for _ in range(90):
            kernel.server.round(0)
        assert len(busy.wire.taken) == 1
        for _ in range(30):
            kernel.now += 0.008
            kernel.server.round(0)
        assert len(busy.wire.taken) == 2

    def test_costly_newcomers_wait(self, kernel: FakeKernel) -> None:
        """[CONN-19] The listener, too, makes up for the time it took."""
        reader = kernel.connect(uid=2)
        reader.send(b"SUB k")
        spend_on_sends(kernel, reader, 0.005)
        wires = newcomers(kernel, 2, publish(b"k"))
        kernel.server.round(0)
        assert [bool(wire.incoming) for wire in wires] == [False, True]
        kernel.now += 0.014
        kernel.server.round(0)
        assert wires[1].incoming
        kernel.now += 0.002
        kernel.server.round(0)
        assert not wires[1].incoming

    def test_mistakes_leave_no_cycles(self, kernel: FakeKernel) -> None:
        """[CONN-12] They would stay, as old objects are not looked at."""
        kernel.connect().send(b"BAD")
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                kernel.connect().send(b"BAD" + bytes(1_000))
            found = gc.collect()
        finally:
            gc.enable()
        assert found < 50

    def test_reading_that_takes_long(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-20] A turn ends although its keys are known."""
        peer = kernel.connect()
        peer.send(publish(b"k"))
        recv_into = peer.wire.recv_into

        def slow(*arguments: Any) -> int:
            tick(kernel, 0.01)
            kernel.now += 0.005
            return recv_into(*arguments)

        peer.wire.recv_into = slow  # type: ignore[method-assign]
        peer.wire.incoming.extend(publications(9))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 8

    def test_single_packets_are_read_one_a_turn(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] For a while; then runs of them are read again."""
        peer, reads = kernel.connect(), 0
        recv_into = peer.wire.recv_into

        def count_reads(*arguments: Any) -> int:
            nonlocal reads
            reads += 1
            return recv_into(*arguments)

        peer.wire.recv_into = count_reads  # type: ignore[method-assign]
        for _ in range(1 + sbus.SINGLE_TURNS):
            peer.send(WHOAMI)
        assert reads == 2 + sbus.SINGLE_TURNS
        peer.wire.incoming.extend([WHOAMI] * 50)
        kernel.server.round(0)
        assert not peer.wire.incoming

    def test_turns_with_many_deliveries_are_shorter(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] A turn has a bound on what it sends as well."""
        for _ in range(400):
            kernel.connect().send(b"SUB k")
        flooder = kernel.connect()
        flooder.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert len(flooder.wire.incoming) > 64 - 20
        assert not kernel.bus.touched

    def test_turns_with_wide_deliveries_are_shorter(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] The more so, the larger the packets are."""
        for _ in range(100):
            kernel.connect().send(b"SUB k")
        flooder = kernel.connect()
        flooder.wire.incoming.extend([publish(b"k", bytes(16_000))] * 64)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) == 64 - 4

    def test_debts_have_a_limit(self, kernel: FakeKernel) -> None:
        """[CONN-19] A mistake in accounting keeps nobody waiting for long."""
        flooder, _ = kernel.connect(uid=1), kernel.connect(uid=2)
        slow_down(kernel, 60.0)
        flooder.wire.incoming.extend(new_keys(1))
        kernel.server.round(0)
        assert kernel.server._spent == {1: sbus.DEBT_MAX}

    def test_users_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-19] However many busy clients one of them has."""
        flooders = [kernel.connect(uid=1) for _ in range(20)]
        other = kernel.connect(uid=2)
        slow_down(kernel, 0.0006)
        for flooder in flooders:
            flooder.wire.incoming.extend(new_keys(64))
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(other.wire.taken) == 1
        left = [len(flooder.wire.incoming) for flooder in flooders]
        assert left == [62, 62] + [64] * 18

    def test_clients_of_a_user_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever was put off is served before those who were not.

        And is not served once it has gone, or the server stops.
        """
        stuck = kernel.connect(uid=2)
        stuck.wire.room = 0
        stuck.send(b"SUB x", publish(b"x"))
        flooders = [kernel.connect(uid=1) for _ in range(6)]
        slow_down(kernel, 0.0006)
        for flooder in flooders:
            flooder.wire.incoming.extend(new_keys(64))
        for _ in range(2):
            kernel.server.round(0)
        kernel.server.disconnect(flooders[5].client, "test")
        for _ in range(2):
            kernel.server.round(0)
        left = [len(flooder.wire.incoming) for flooder in flooders]
        assert left == [60, 60, 62, 62, 62, 64]
        kernel.server.stop()
        stuck.wire.room = None
        kernel.server.run()
        assert [len(flooder.wire.incoming) for flooder in flooders] == left

    def test_turns_to_read_beside_drains(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever has much to receive keeps no other waiting.

        Nor those who read the ones who receive.
        """
        readers = [kernel.connect(uid=1) for _ in range(40)]
        senders = [kernel.connect(uid=1) for _ in range(3)]
        for reader in readers:
            reader.send(b"SUB k")
            reader.wire.room = 0
        senders[0].send(*publications(20))
        slow_down(kernel, 0.0011)
        for reader in readers:
            reader.wire.room = None
            spend_on_sends(kernel, reader, 0.0011)
        for sender in senders:
            sender.wire.incoming.extend(new_keys(20))
        for _ in range(20):
            kernel.server.round(0)
        read = [20 - len(sender.wire.incoming) for sender in senders]
        assert min(read) >= 5
        drained = [len(reader.wire.taken) for reader in readers]
        assert sum(drained) >= 15

    def test_burst_to_readers_that_do_not_read(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-19] It is made up for in rounds, not in time."""
        readers = [kernel.connect(uid=1) for _ in range(300)]
        sender = kernel.connect(uid=2)
        for reader in readers:
            reader.send(b"SUB k")
            reader.wire.room = 0
        sender.wire.incoming.extend(publications(40))
        for _ in range(60):
            kernel.server.round(0)
        assert not sender.wire.incoming

    def test_debts_of_long_ago(self, kernel: FakeKernel) -> None:
        """[CONN-19] Nobody waits for what a quiet hour has made good."""
        peer, other = kernel.connect(uid=1), kernel.connect(uid=2)
        handle = slow_down(kernel, 0.100)
        peer.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        kernel.bus.handle = handle  # type: ignore[method-assign]
        peer.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert peer.wire.incoming and not other.wire.incoming
        kernel.now += 1
        kernel.server.round(0)
        assert not peer.wire.incoming

    def test_alarms_of_a_busy_user(self, kernel: FakeKernel) -> None:
        """[BLOCK-16] [CONN-18] They ring, although it has always more."""
        holder, held, error = (kernel.connect(uid=1) for _ in "123")
        flooders = [kernel.connect(uid=1) for _ in range(6)]
        other = kernel.connect(uid=2)
        for reader, mode in ((holder, b"block"), (error, b"error")):
            reader.send(b"SUB k", b"CMSG blocking/soft/" + mode)
            reader.wire.room = 0
        slow_down(kernel, 0.0006)
        held.wire.incoming.append(publish(b"k"))
        other.wire.incoming.append(publish(b"k"))
        while kernel.now < 6:
            for flooder in flooders:
                flooder.wire.incoming.extend(new_keys(1))
            kernel.server.round(0)
        assert holder.wire.ended and error.wire.ended

    def test_packets_for_nobody(self, kernel: FakeKernel) -> None:
        """[CONN-5] To read one may take long if others watch its sender."""
        peer = kernel.connect(uid=1)
        receive = peer.wire.recv_into
        peer.send(*publications(3))

        def slow(buffer: Any, size: int, flags: int) -> int:
            kernel.now += 0.001
            return receive(buffer, size, flags)

        peer.wire.recv_into = slow  # type: ignore[method-assign]
        peer.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 56

    def test_one_turn_in_a_round(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-19] Also for whom was put off in the one before."""
        flooder, late = (kernel.connect(uid=1) for _ in "12")
        handle = slow_down(kernel, 0.002)
        flooder.wire.incoming.extend(new_keys(1))
        late.wire.incoming.extend(publications(200, b"x"))
        kernel.server.round(0)
        assert len(late.wire.incoming) == 200
        kernel.bus.handle = handle  # type: ignore[method-assign]
        kernel.server.round(0)
        assert len(late.wire.incoming) == 200 - 64

    def test_waiting_for_the_processor(self, kernel: FakeKernel) -> None:
        """[CONN-19] It is nobody's fault that others have it, too."""
        user, _ = kernel.connect(uid=1), kernel.connect(uid=2)
        handle = slow_down(kernel, 0.1)
        kernel.server.processor_clock = lambda: 0.0
        user.wire.incoming.append(WHOAMI)
        wires = newcomers(kernel, 2, WHOAMI, uid=3)
        kernel.server.round(0)
        kernel.bus.handle = handle  # type: ignore[method-assign]
        user.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(user.wire.taken) == 2
        assert all(wire.taken for wire in wires)

    def test_time_is_made_up_for(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever took longer than a share has fewer turns."""
        greedy, other = kernel.connect(uid=1), kernel.connect(uid=2)
        handle = slow_down(kernel, 0.0105)  # five shares of 2 ms, and a half
        greedy.wire.incoming.extend(new_keys(1))
        kernel.server.round(0)
        kernel.bus.handle = handle  # type: ignore[method-assign]
        greedy.wire.incoming.append(WHOAMI)
        for count in range(1, 5):
            other.wire.incoming.append(WHOAMI)
            kernel.server.round(0)
            assert len(other.wire.taken) == count and not greedy.wire.taken
        kernel.server.round(0)
        assert len(greedy.wire.taken) == 1

    def test_resumed_readers_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-19] What waited for many takes time as well."""
        readers = [kernel.connect(uid=1) for _ in range(20)]
        for reader in readers:
            reader.wire.room = 0
            reader.send(b"SUB k")
        kernel.connect(uid=1).send(*publications(1000))
        for reader in readers:
            reader.wire.room = None
            spend_on_sends(kernel, reader, 0.00001)
        kernel.server.round(0)
        taken = [len(reader.wire.taken) for reader in readers]
        assert 99 <= taken[0] <= 101 and 99 <= taken[1] <= 101
        assert sum(taken[3:]) == 0

    def test_newcomers_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-3] [CONN-19] No more are let in than can be served."""
        other = kernel.connect(uid=2)
        slow_down(kernel, 0.0006)
        wires = newcomers(kernel, 20, publish(b"k"))
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(kernel.listener.waiting) == 20 - 4
        assert len(other.wire.taken) == 1
        kernel.run()
        assert not any(wire.incoming for wire in wires)

    def test_one_shot_above_the_limit(self) -> None:
        """[LIMIT-7] [LIMIT-11] [CONN-6] It never was beside the others."""
        for name in ("max_user_clients", "max_clients"):
            kernel = FakeKernel(sbus.Limits(**{name: 3}))
            reader = kernel.connect(uid=0)
            reader.send(b"SUB k")
            uid = 1 if name == "max_user_clients" else 0
            peers = [kernel.connect(uid=uid) for _ in range(2)]
            wires = newcomers(kernel, 50, *publications(50), uid=uid)
            for wire in wires:
                wire.ended = True
            kernel.run()
            assert reader.read() == [*publications(50)] * 50
            assert not any(peer.wire.closed for peer in peers)
            assert not kernel.server.disconnected

    def test_newcomer_above_the_limit_is_heard_out(self) -> None:
        """[LIMIT-11] What the kernel took from it is handled."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=1))
        reader = kernel.connect(uid=1)
        reader.send(b"SUB k")
        wires = newcomers(kernel, 2, *publications(100))
        kernel.run()
        assert sorted(reader.read()) == sorted([*publications(100)] * 2)
        assert all(wire.closed for wire in wires) and not reader.wire.closed
        assert kernel.server.disconnected == {"LIMIT-11": 2}

    def test_newcomer_beside_those_who_have_left(self) -> None:
        """[LIMIT-11] [LIMIT-18] It is not to blame that they wait."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=5))
        peers = [kernel.connect(uid=1) for _ in range(5)]
        handle = slow_down(kernel, 0.003)
        for peer in peers:
            peer.wire.incoming.extend(new_keys(1))
            peer.wire.ended = True
        wires = newcomers(kernel, 4)
        kernel.server.round(0)
        assert len(kernel.bus.clients) == 9
        kernel.bus.handle = handle  # type: ignore[method-assign]
        kernel.run()
        assert all(peer.wire.closed for peer in peers)
        assert not any(wire.closed for wire in wires)

    def test_crowd_above_the_limit(self) -> None:
        """[LIMIT-11] [LIMIT-16] [LIMIT-18] It is not heard out without end."""
        for is_held in (False, True):
            kernel = FakeKernel(sbus.Limits(max_user_clients=3))
            reader, sender = (kernel.connect(uid=1) for _ in "12")
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
            reader.wire.room = 0 if is_held else None
            newcomers(kernel, 500, *publications(200))
            kernel.server.round(0)
            assert len(kernel.bus.clients) == 3 + sbus.CROWD_MAX
            root = kernel.connect(uid=0)
            root.send(WHOAMI)
            assert len(root.read()) == 1 and not sender.wire.closed

    def test_crowd_that_waits(self) -> None:
        """[LIMIT-18] Not all who wait for their turns make room for more."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=3))
        slow_down(kernel, 0.0011)
        for _ in range(6):
            newcomers(kernel, 500)
            for client in kernel.bus.clients.values():
                client.wire.incoming.extend(new_keys(2))
            kernel.server.round(0)
        assert 3 < len(kernel.bus.clients) <= 3 + 2 * sbus.CROWD_MAX

    def test_large_packets_wait_for_a_paused_publisher(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-7] A turn ends as soon as its publisher is paused."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        packets = [publish(b"k", bytes(100_000 + n)) for n in range(9)]
        sender.send(*packets)
        assert len(sender.wire.incoming) == 7
        assert reader.read_all() == packets

    @pytest.mark.parametrize("size", [1, 100_000])
    @pytest.mark.parametrize("uid", [1000, 1001])
    def test_receiver_that_is_disconnected_is_heard_out(
        self, size: int, uid: int
    ) -> None:
        """[CONN-18] Nobody else can make its messages vanish."""
        kernel = FakeKernel(sbus.Limits(max_backlog=size + 200))
        peer, sender = kernel.connect(uid=1000), kernel.connect(uid=uid)
        witness = kernel.connect()
        witness.send(b"SUB late")
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/error")
        peer.wire.incoming.extend(publications(200, b"late"))
        sender.wire.incoming.extend([publish(b"k", bytes(size))] * 2)
        kernel.run()
        assert peer.wire.closed and not sender.wire.closed
        assert witness.read() == publications(200, b"late")

    def test_receiver_that_disconnects_itself(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-18] By what it publishes to itself."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB late")
        peer.wire.room = 0
        large = publish(b"k", bytes(100_000))
        peer.send(b"SUB k", b"CMSG blocking/soft/error")
        peer.send(large, publish(b"late"), large, publish(b"late", b"2"))
        assert peer.wire.closed
        assert witness.read() == [publish(b"late"), publish(b"late", b"2")]

    def test_disconnected_receiver_holds_nobody(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-18] [BLOCK-12] Although it is paused itself."""
        peer, sender, holder = (kernel.connect() for _ in range(3))
        holder.wire.room = 1
        holder.send(b"SUB x", b"CMSG blocking/soft/block")
        peer.wire.room = 1
        peer.send(b"SUB k", b"CMSG blocking/soft/block")
        peer.send(*publications(3, b"x"), publish(b"x", b"3"))
        sender.send(*publications(3))
        assert peer.paused and sender.paused
        peer.wire.failures.append(OSError(errno.EIO, "odd"))
        peer.wire.taken.clear()
        kernel.run()
        assert not sender.paused and not peer.wire.closed
        assert len(holder.read_all()) == 4
        assert peer.wire.closed

    def test_departure_after_the_last_packet(self, kernel: FakeKernel) -> None:
        """[CONN-6] [CONN-10] All that was sent is handled."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        sender.wire.incoming.extend(publications(200))
        sender.close()
        assert sender.wire.closed
        assert reader.read() == publications(200)

    def test_reset_before_the_last_packets(self, kernel: FakeKernel) -> None:
        """[CONN-6] ECONNRESET is not the end of input."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        sender.wire.incoming.extend(publications(200))
        sender.wire.reset = True
        sender.close()
        assert reader.read() == publications(200)

    def test_reset_after_the_end_is_no_mistake(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-10] [CONN-13] [PKT-4] It closed after it had shut down."""
        wire = kernel.connect().wire
        closings = iter([True])

        def set_option_and_close(*_: int) -> None:
            wire.reset = next(closings, False)

        wire.setsockopt = set_option_and_close  # type: ignore
        wire.ended = True
        kernel.run()
        assert wire.closed
        assert not next(closings, False) and not caplog.messages

    def test_backlog_of_one_that_leaves(self, kernel: FakeKernel) -> None:
        """[CONN-10] The kernel gets what it takes of it."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(10))
        reader.wire.room = 5
        reader.close()
        assert list(reader.wire.taken) == publications(5)

    def test_long_backlog_of_one_that_leaves(self, kernel: FakeKernel) -> None:
        """[CONN-10] All that the kernel takes, in several turns if need be."""
        reader, sender, other = (kernel.connect() for _ in range(3))
        reader.wire.room = 0
        reader.send(b"SUB k")
        sender.send(*publications(600))
        reader.wire.room = None
        spend_on_sends(kernel, reader, 0.00001)
        reader.wire.ended = True
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(other.wire.taken) == 1 and not reader.wire.closed
        assert len(reader.wire.taken) <= 200
        kernel.run()
        assert reader.wire.closed
        assert list(reader.wire.taken) == publications(600)

    @pytest.mark.parametrize("stalled", [False, True])
    def test_client_that_no_longer_receives(
        self, kernel: FakeKernel, stalled: bool
    ) -> None:
        """[CONN-8] Its own packets are still handled, to the last."""
        deaf, other = kernel.connect(), kernel.connect()
        other.send(b"SUB k")
        deaf.send(b"SUB ", b"CMSG blocking/soft/block")
        if stalled:
            deaf.wire.room = 1
            other.send(*publications(3, b"x"))
            assert other.paused
        deaf.wire.deaf = True
        kernel.wait(5.1)  # no event tells of it
        other.send(publish(b"x"), publish(b"x"))
        assert not deaf.wire.closed and not other.paused
        lost = 4 if stalled else 2  # [BLOCK-20]
        assert kernel.bus.flood.discarded == {"deaf": lost}
        deaf.send(publish(b"k"))
        assert other.read() == [publish(b"k")]
        deaf.close()
        assert deaf.wire.closed

    @pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
    def test_kernel_without_memory(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-9] The packet waits, and is tried again soon."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        reader.wire.failures.extend([OSError(number, "none")] * 3)
        reader.wire.is_silent = True  # no event tells of room
        sender.send(*publications(3))
        for _ in range(3):
            assert reader.read() == [] and not reader.wire.closed
            kernel.wait(0.06)
        assert reader.read() == publications(3)

    def test_kernel_with_room_but_without_memory(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-9] The loop does not spin on a socket that seems ready."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        failures = [OSError(errno.ENOBUFS, "none")] * 3
        reader.wire.failures.extend(failures)
        sender.send(*publications(3))
        assert len(reader.wire.failures) == 2
        kernel.wait(0.06)
        assert len(reader.wire.failures) == 1
        reader.wire.failures[0] = OSError(errno.EIO, "odd")
        kernel.wait(0.06)
        assert reader.wire.closed and not sender.wire.closed

    def test_unheard_of_error(self, kernel: FakeKernel) -> None:
        """[CONN-12] It costs the client that it concerns."""
        reader, other = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        other.send(b"SUB k")
        reader.wire.failures.append(OSError(errno.EIO, "odd"))
        other.send(publish(b"k"))
        assert reader.wire.closed and not other.wire.closed
        assert other.read() == [publish(b"k")]

    def test_unheard_of_error_of_a_stalled_client(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] The same."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(3))
        reader.wire.failures.append(OSError(errno.EIO, "odd"))
        reader.read()
        assert reader.wire.closed and not sender.wire.closed

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN])
    def test_unheard_of_error_when_reading(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-12] The same."""
        peer, other = kernel.connect(), kernel.connect()

        def recv_into(*_: object) -> int:
            raise OSError(number, "odd")

        peer.wire.recv_into = recv_into  # type: ignore[method-assign]
        peer.send(publish(b"k"))
        assert peer.wire.closed and not other.wire.closed

    def test_memory_runs_out(self, kernel: FakeKernel) -> None:
        """[CONN-12] It costs the client whose packet needed it."""
        peer, other = kernel.connect(), kernel.connect()

        def recv_into(*_: object) -> int:
            raise MemoryError

        peer.wire.recv_into = recv_into  # type: ignore[method-assign]
        peer.send(publish(b"k"))
        assert peer.wire.closed and not other.wire.closed

    @pytest.mark.parametrize(
        "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS]
    )
    def test_no_descriptor_is_left(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-3] The listener rests, then tries again; others go on."""
        peer = kernel.connect()
        kernel.listener.failures.append(OSError(number, "none"))
        late = kernel.connect()
        assert late.wire in kernel.listener.waiting
        assert kernel.listener not in kernel.selector.keys
        peer.send(WHOAMI)
        assert len(peer.read()) == 1
        kernel.wait(0.11)
        assert late.wire not in kernel.listener.waiting
        late.send(WHOAMI)
        assert len(late.read()) == 1

    def test_connection_that_is_gone_before_accept(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-3] It is nobody's fault."""
        kernel.listener.failures.append(ConnectionAbortedError())
        peer = kernel.connect()
        peer.send(WHOAMI)
        assert len(peer.read()) == 1

    def test_time_that_refusals_take(self) -> None:
        """[CONN-19] They, too, end when a round has lasted long enough."""
        kernel = FakeKernel(allowed_uids={1})
        peer = kernel.connect(uid=1)
        for number in range(100, 200):
            wire = type(peer.wire)(number, peer.wire.credentials)
            wire.credentials = wire.credentials._replace(uid=2)
            kernel.listener.waiting.append(wire)
        accept = kernel.listener.accept

        def slow() -> Any:
            kernel.now += 0.0005
            return accept()

        kernel.listener.accept = slow
        kernel.server.round(0)
        assert len(kernel.listener.waiting) > 90

    def test_error_while_a_client_is_let_in(self, kernel: FakeKernel) -> None:
        """[CONN-3] [CONN-12] It costs that client alone."""
        other = kernel.connect()
        peer = FakePeer(kernel, kernel.connect().wire)

        def getsockopt(*_: object) -> bytes:
            raise OSError(errno.ENOBUFS, "none")

        wire = type(peer.wire)(99, peer.wire.credentials)
        wire.getsockopt = getsockopt  # type: ignore[method-assign]
        kernel.listener.waiting.append(wire)
        kernel.run()
        assert wire.closed and not other.wire.closed

    def test_error_while_a_client_is_watched(self, kernel: FakeKernel) -> None:
        """[CONN-3] The bus forgets a client that it cannot serve."""
        register = kernel.selector.register

        kernel.selector.register = no_room  # type: ignore
        peer = kernel.connect()
        kernel.selector.register = register  # type: ignore[method-assign]
        assert peer.wire.closed
        assert not kernel.bus.clients

    def test_error_while_a_publisher_is_resumed(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] It costs the publisher, not its reader."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(3))
        register = kernel.selector.register

        def fail(fileobj: object, *arguments: Any) -> object:
            is_sender = fileobj is sender.wire
            return (no_room if is_sender else register)(fileobj, *arguments)

        kernel.selector.register = fail  # type: ignore
        assert reader.read_all() == publications(3)
        assert sender.wire.closed and not reader.wire.closed

    def test_error_while_a_client_is_watched_for_more(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] Although the selector has forgotten it by then."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")

        def fail(fileobj: object, *_: object) -> object:
            kernel.selector.unregister(fileobj)
            return no_room()

        kernel.selector.modify = fail  # type: ignore
        sender.send(*publications(3))
        assert reader.wire.closed and not sender.wire.closed

    def test_error_while_the_listener_is_watched(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-3] It rests once more."""
        register = kernel.selector.register
        kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
        kernel.run()
        kernel.selector.register = no_room  # type: ignore
        kernel.wait(0.11)
        kernel.selector.register = register  # type: ignore[method-assign]
        kernel.wait(0.11)
        assert kernel.listener in kernel.selector.keys

    def test_limit_of_clients(self) -> None:
        """[LIMIT-7] There is room again when one leaves."""
        kernel = FakeKernel(sbus.Limits(max_clients=2))
        one, two, three = (kernel.connect() for _ in range(3))
        assert three.wire.closed and not two.wire.closed
        one.close()
        assert not kernel.connect().wire.closed

    def test_limit_of_the_clients_of_a_user(self) -> None:
        """[LIMIT-11] There is room again when one leaves."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=2))
        one, two, three = (kernel.connect(uid=1) for _ in range(3))
        assert three.wire.closed and not two.wire.closed
        assert not kernel.connect(uid=2).wire.closed
        one.close()
        assert not kernel.connect(uid=1).wire.closed

    def test_clients_are_kept_for_the_privileged(self) -> None:
        """[LIMIT-16] A quarter of them."""
        kernel = FakeKernel(sbus.Limits(max_clients=8))
        others = [kernel.connect(uid=uid) for uid in range(1, 8)]
        assert [peer.wire.closed for peer in others] == [False] * 6 + [True]
        assert not kernel.connect(uid=0).wire.closed
        assert not kernel.connect(uid=OWNER).wire.closed
        assert kernel.connect(uid=0).wire.closed

    def test_only_allowed_users(self) -> None:
        """[CONN-2] Others are closed at once."""
        kernel = FakeKernel(allowed_uids={OWNER, 7})
        assert kernel.connect(uid=8).wire.closed
        assert kernel.connect(uid=0).wire.closed
        assert not kernel.connect(uid=7).wire.closed
        assert not kernel.connect(uid=OWNER).wire.closed

    def test_close_after_last(self) -> None:
        """[RUN-11] When the last client has gone, not before the first."""
        kernel = FakeKernel(close_after_last=True)
        kernel.wait(10)
        assert not kernel.server.stopping
        one, two = kernel.connect(), kernel.connect()
        one.close()
        assert not kernel.server.stopping
        two.close()
        assert kernel.server.stopping

    def test_client_that_is_closed_in_its_own_batch(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] Events of a closed client are of no effect."""
        sender, reader, witness = (kernel.connect() for _ in range(3))
        witness.send(b"SUB late")
        reader.wire.incoming.append(publish(b"late"))
        sender.wire.incoming.append(publish(b"k"))
        handle = kernel.bus.handle

        def close_reader(*arguments: Any) -> int:
            kernel.bus.handle = handle  # type: ignore[method-assign]
            work = handle(*arguments)
            kernel.server.disconnect(reader.client, "test")
            return work

        kernel.bus.handle = close_reader  # type: ignore
        kernel.run()
        assert reader.wire.closed
        assert witness.read() == []

    def test_idle_loop_sleeps(self, kernel: FakeKernel) -> None:
        """[CONN-3] Nothing to do means no timeout at all."""
        kernel.connect()
        kernel.server.round()
        assert kernel.selector.timeouts[-1] is None

    def test_stop_delivers_what_was_read(self, kernel: FakeKernel) -> None:
        """[RUN-12] And reads nothing more."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(4))
        reader.wire.room = None
        kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
        sender.wire.incoming.append(publish(b"k", b"not read"))
        kernel.server.stop()
        kernel.server.run()
        assert list(reader.wire.taken) == publications(4)
        assert reader.wire.closed and sender.wire.closed
        assert kernel.listener.closed
        assert not kernel.selector.keys

    def test_stop_does_not_wait_for_ever(self, kernel: FakeKernel) -> None:
        """[RUN-12] For up to a second."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(4))
        select = kernel.selector.select

        def passing(timeout: float | None = None) -> object:
            assert timeout is not None and timeout <= 1
            kernel.now += 0.3
            return select(timeout)

        kernel.selector.select = passing  # type: ignore
        kernel.server.stop()
        kernel.server.run()
        assert reader.wire.closed
        assert 1 <= kernel.now < 2


def no_room(*_: object) -> object:
    """Fail as a selector does that can watch no more."""
    raise OSError(errno.ENOSPC, "no room to watch")
