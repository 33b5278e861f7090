"""Tests of how clients are parted with: in turns, and at whose expense."""

from __future__ import annotations

from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import WHOAMI, publications, publish
from slowness import slow_down_shutdown


class TestParting:
    def test_who_accounts_for_an_expulsion(self, kernel: FakeKernel) -> None:
        """[CONN-18] [CONN-19] Who is expelled, and its backlog goes later."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        other = kernel.connect(uid=1)
        reader.wire.room = 0
        reader.send(b"SUB k")
        sender.send(*publications(9))
        reader.send(b"CMSG blocking/soft/error")
        client = reader.client
        slow_down_shutdown(kernel, reader, 0.060)
        sender.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert client.fault and len(client.backlog) == 9
        for wire in (sender.wire, other.wire):
            wire.incoming.append(publish(b"x"))
        kernel.server.round(0)
        assert other.wire.incoming and not sender.wire.incoming
        kernel.run()
        assert reader.wire.closed and not client.backlog

    def test_expulsion_of_many(self, kernel: FakeKernel) -> None:
        """[CONN-18] [CONN-19] To shut a socket down may take long as well."""
        readers = [kernel.connect(uid=1) for _ in range(20)]
        other, sender = kernel.connect(uid=2), kernel.connect(uid=3)
        for reader in readers:
            reader.send(b"SUB k", b"CMSG blocking/soft/error")
            reader.wire.room = 0
            slow_down_shutdown(kernel, reader, 0.0011)
        clients, start = [reader.client for reader in readers], kernel.now
        sender.wire.incoming.append(publish(b"k"))
        for _ in range(3):
            other.wire.incoming.append(publish(b"x"))
            kernel.server.round(0)
            assert not other.wire.incoming
        assert all(client.deaf for client in clients)
        assert kernel.now - start < 0.010
        kernel.run()
        assert all(reader.wire.closed for reader in readers)

    def test_room_at_the_moment_of_an_expulsion(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-18] What is said to be lost is not sent in the same round."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 0
        reader.send(b"SUB k")
        sender.send(publish(b"k"))
        reader.send(b"CMSG blocking/soft/error")
        reader.wire.room = 1
        sender.wire.incoming.append(publish(b"k"))
        kernel.server._turn_kinds = [sbus.WRITE, sbus.READ]  # READ is next
        kernel.server.round(0)
        assert reader.client.fault
        assert not reader.wire.taken

    def test_expulsion_without_memory(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-12] [CONN-18] It is not forgotten."""
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.wire.room = 0
        reader.send(b"SUB k", b"CMSG blocking/soft/error")
        set_alarm, errors = kernel.server._set_alarm, [MemoryError()]

        def fail_once(*arguments: Any) -> None:
            if errors:
                raise errors.pop()
            set_alarm(*arguments)

        monkeypatch.setattr(kernel.server, "_set_alarm", fail_once)
        sender.send(publish(b"k"))
        kernel.run()
        assert reader.wire.closed and not errors

    def test_who_resumes_those_that_one_held(self, kernel: FakeKernel) -> None:
        """[CONN-19] [BLOCK-12] Its own user, as there may be many."""
        reader, other = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.wire.room = 0
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        held = [kernel.connect(uid=1) for _ in range(9)]
        for peer in held:
            peer.send(publish(b"k"))
        reader.send(b"CMSG blocking/soft/error")
        other.wire.incoming.append(publish(b"k"))
        kernel.server.round(0)
        assert reader.client.deaf and all(peer.paused for peer in held)
        kernel.run()
        assert reader.wire.closed and not any(peer.paused for peer in held)

    def test_mistake_of_one_that_is_held(self, kernel: FakeKernel) -> None:
        """[CONN-18] [BLOCK-12] Nobody holds up whom nobody hears."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 0
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(publish(b"k"), b"a mistake", publish(b"k"))
        assert sender.wire.closed and not reader.wire.closed

    def test_departure_with_many_patterns(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-5] [CONN-10] Their places are given up in turns."""
        peer, other = kernel.connect(), kernel.connect(uid=2)
        peer.send(*(b"SUB %d/*" % number for number in range(100)))
        client, drop = peer.client, kernel.bus.drop

        def slow(client: sbus.Client, pattern: bytes) -> None:
            kernel.now += 0.0003
            drop(client, pattern)

        monkeypatch.setattr(kernel.bus, "drop", slow)
        peer.wire.ended = True
        left = 100
        while not peer.wire.closed:
            kernel.server.round(0)
            assert left - len(client.patterns) <= 4
            left = len(client.patterns)
            kernel.now += 0.01
        other.send(WHOAMI)
        assert len(other.read()) == 1

    def test_stop_does_not_wait_for_who_is_expelled(
        self, kernel: FakeKernel
    ) -> None:
        """[RUN-12] [CONN-18] Its backlog is for nobody."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 0
        reader.send(b"SUB k")
        sender.send(publish(b"k"))
        kernel.server.expel(reader.client, sbus.ProtocolError("PKT-2", "x"))
        assert reader.client.backlog
        kernel.server.stop()
        before = len(kernel.selector.timeouts)
        kernel.server.run()
        assert len(kernel.selector.timeouts) == before

    def test_memory_runs_out_at_the_stop(self, kernel: FakeKernel) -> None:
        """[RUN-12] [CONN-12] Others have what was read for them."""
        sender, *readers = (kernel.connect() for _ in range(3))
        for reader in readers:
            reader.send(b"SUB k")
            reader.wire.room = 0
        sender.send(publish(b"k"))
        for reader in readers:
            reader.wire.room = None
        readers[0].wire.failures.append(MemoryError())
        kernel.server.stop()
        kernel.server.run()
        assert list(readers[1].wire.taken) == [publish(b"k")]
        assert not readers[0].wire.taken and not kernel.bus.clients

    @pytest.mark.parametrize("name", ["parse_pattern", "resolve"])
    def test_parting_that_wants_for_memory_is_done_again(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """[CONN-12] With what was kept in reserve for it."""
        peer, other = kernel.connect(), kernel.connect()
        peer.send(b"SUB a/*/b/", b"SUB !/cred////x", b"SUB a*b", b"SUB k")
        function, failures = getattr(sbus, name), [MemoryError()]

        def fail_once(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return function(*arguments)

        monkeypatch.setattr(sbus, name, fail_once)
        peer.close()
        assert not failures
        assert peer.wire.closed and len(kernel.bus.clients) == 1
        other.send(b"SUB k", publish(b"k"))
        assert other.read() == [publish(b"k")]
