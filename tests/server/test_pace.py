"""Tests of the pace to which the readers of others keep a flood."""

from __future__ import annotations

import pytest

import sbus
from fake_kernel import FakeKernel, FakePeer, FakeWire, small
from packets import publish

FLOODER, READER = 1, 2  # user ids
LARGE = publish(b"k", bytes(300_000))


@pytest.fixture
def kernel() -> FakeKernel:
    """Return a server on which 100 packets of a kB may wait for a client."""
    return FakeKernel(small(100, 1_000))


def messages(count: int) -> list[bytes]:
    """Return such packets."""
    return [publish(b"k", bytes(1_000))] * count


def make_lag(
    kernel: FakeKernel, waiting: int, count: int = 1
) -> list[FakePeer]:
    """Return readers that have just taken packets, and have some wait."""
    readers = [kernel.connect(READER) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
        reader.wire.room = 8
    kernel.connect(READER).send(*messages(8 + 8 + waiting))
    for reader in readers:
        reader.read(8)
    assert {len(reader.client.backlog) for reader in readers} == {waiting}
    return readers


def stuck_readers(kernel: FakeKernel, count: int) -> list[FakePeer]:
    """Return readers that have begun to lag by ten large packets."""
    readers = [kernel.connect(READER) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
        reader.wire.room = 0
    kernel.connect(READER).send(*[LARGE] * 10)
    return readers


def wait_outside(kernel: FakeKernel, count: int) -> None:
    """Have clients of the flooder connect, each with a large packet."""
    for number in range(1_000, 1_000 + count):
        wire = FakeWire(number, sbus.Credentials(1, FLOODER, 1))
        wire.incoming.append(LARGE)
        wire.ended = True
        kernel.listener.waiting.append(wire)


def rounds_until_served(kernel: FakeKernel, peer: FakePeer) -> int:
    """Have a client send a packet, and return when that is read."""
    peer.wire.incoming.append(publish(b"x"))
    for count in range(1_000):
        kernel.server.round(0)
        if not peer.wire.incoming:
            return count
        kernel.now += 0.0001
    raise AssertionError("it is never served")


class TestPace:
    """[CONN-19] A flood does not outrun readers that take all they get."""

    @pytest.mark.parametrize("uid, is_paced", [(FLOODER, 1), (READER, 0)])
    def test_readers_of_others(
        self, kernel: FakeKernel, uid: int, is_paced: bool
    ) -> None:
        """[CONN-19] Whoever has packets wait for others waits, too."""
        make_lag(kernel, waiting=50)
        flooder, sibling = kernel.connect(uid), kernel.connect(uid)
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        assert (rounds_until_served(kernel, sibling) > 0) == is_paced

    def test_little_that_waits(self, kernel: FakeKernel) -> None:
        """[CONN-19] There is room enough."""
        make_lag(kernel, waiting=20)
        flooder = kernel.connect(FLOODER)
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        assert rounds_until_served(kernel, flooder) == 0

    @pytest.mark.parametrize("reads", [True, False])
    def test_reader_that_does_not_read(
        self, kernel: FakeKernel, reads: bool
    ) -> None:
        """[BLOCK-12] Nobody waits for it."""
        (reader,) = make_lag(kernel, waiting=60)
        flooder = kernel.connect(FLOODER)
        kernel.now += 0.6 * sbus.READING_SECONDS
        if reads:
            reader.read()
        kernel.now += 0.6 * sbus.READING_SECONDS
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        assert (rounds_until_served(kernel, flooder) > 0) == reads

    def test_reader_that_has_just_begun_to_lag(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-19] It may be about to read."""
        reader, flooder = kernel.connect(READER), kernel.connect(FLOODER)
        reader.send(b"SUB k")
        reader.wire.room = 0
        kernel.now += sbus.READING_SECONDS
        flooder.wire.incoming.extend(messages(50))
        kernel.server.round(0)
        assert rounds_until_served(kernel, flooder) > 0

    def test_the_less_room_the_later(self) -> None:
        """[CONN-19] But it is never as late as 10 ms."""
        rounds = []
        for waiting in (30, 90):
            kernel = FakeKernel(small(100, 1_000))
            make_lag(kernel, waiting)
            flooder = kernel.connect(FLOODER)
            flooder.wire.incoming.extend(messages(5))
            kernel.server.round(0)
            rounds.append(rounds_until_served(kernel, flooder))
        assert rounds[0] < rounds[1] < 100

    def test_backlog_of_other_clients(self) -> None:
        """[CONN-20] It is no reason to wait for one that lags a little."""
        kernel = FakeKernel(sbus.Limits(max_user_backlog=100_000))
        make_lag(kernel, waiting=10)
        stuck, own = kernel.connect(READER), kernel.connect(READER)
        stuck.send(b"SUB own")
        stuck.wire.room = 0
        own.send(publish(b"own", bytes(80_000)))
        flooder = kernel.connect(FLOODER)
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        assert rounds_until_served(kernel, flooder) == 0

    def test_backlogs_of_a_user(self) -> None:
        """[LIMIT-14] They are all that there is room for."""
        kernel = FakeKernel(sbus.Limits(max_user_backlog=100_000))
        make_lag(kernel, waiting=20, count=4)
        flooder = kernel.connect(FLOODER)
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        assert rounds_until_served(kernel, flooder) > 0

    def test_longest_wait(self, kernel: FakeKernel) -> None:
        """[CONN-19] It is not as late as all the readers would take."""
        make_lag(kernel, waiting=40, count=100)
        flooder = kernel.connect(FLOODER)
        flooder.wire.incoming.extend(messages(20))
        kernel.server.round(0)
        assert rounds_until_served(kernel, flooder) < 100
        kernel.wait(1)
        assert not kernel.server._has_debts

    def test_what_waits_for_it(self, kernel: FakeKernel) -> None:
        """[CONN-19] It waits before it sends more, not before it receives."""
        make_lag(kernel, waiting=50)
        flooder, other = kernel.connect(FLOODER), kernel.connect(READER)
        flooder.send(b"SUB news")
        flooder.wire.room = 0
        other.send(publish(b"news"))
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        flooder.wire.incoming.append(publish(b"x"))
        flooder.wire.room = 1
        kernel.server.round(0)
        assert flooder.wire.taken and flooder.wire.incoming

    def test_what_others_send_to_it(self, kernel: FakeKernel) -> None:
        """[CONN-20] Whoever has to wait is not slow."""
        make_lag(kernel, waiting=50)
        flooder, other = kernel.connect(FLOODER), kernel.connect(READER)
        flooder.send(b"SUB news")
        flooder.wire.incoming.extend(messages(1))
        kernel.server.round(0)
        other.wire.incoming.append(publish(b"news"))
        kernel.server.round(0)
        assert list(flooder.wire.taken) == [publish(b"news")]

    def test_large_packets(self) -> None:
        """[CONN-19] They are let in one by one, or two would be too many."""
        kernel = FakeKernel(sbus.Limits(max_backlog=1_000_000))
        reader, flooder = kernel.connect(READER), kernel.connect(FLOODER)
        reader.send(b"SUB k")
        reader.wire.room = 0
        flooder.wire.incoming.extend([LARGE] * 3)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) == 2

    def test_newcomers(self) -> None:
        """[CONN-19] They wait before they are let in, as nobody is lost."""
        kernel = FakeKernel(sbus.Limits(max_backlog=10_000_000))
        (reader,) = stuck_readers(kernel, 1)
        wait_outside(kernel, 20)
        left = []
        for _ in range(10):
            kernel.server.round(0)
            left.append(len(kernel.listener.waiting))
            kernel.now += 0.001
        assert 10 < left[0] == left[1] > left[9]
        reader.wire.room = None
        kernel.wait(1)
        assert len(reader.wire.taken) == 30

    def test_newcomers_beside_many_readers(self) -> None:
        """[CONN-19] They wait no longer than others."""
        kernel = FakeKernel(sbus.Limits(max_backlog=10_000_000))
        stuck_readers(kernel, 20)
        wait_outside(kernel, 2)
        for _ in range(3):
            kernel.server.round(0)
            kernel.now += 0.004
        assert not kernel.listener.waiting
