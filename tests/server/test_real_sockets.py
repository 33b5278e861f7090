"""Tests of clients on real sockets: those that die, flood and attack."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packets import WHOAMI, publications, publish
from processes import child_process
from real_bus import (
    Peer,
    RealBus,
    freeze,
    needs_root,
    thaw,
    wait_for,
)

# Those who attack a bus, and those who must not notice
IS_ROOT = os.getuid() == 0
ATTACKER = 1000 if IS_ROOT else os.getuid()
INNOCENT = 1001 if IS_ROOT else os.getuid()
LARGE_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)


def descriptors(bus: RealBus) -> int:
    """Return how many descriptors a server has open."""
    return len(os.listdir(f"/proc/{bus.process.pid}/fd"))


@pytest.fixture(name="bus")
def bus_for_all(directory: Path) -> Iterator[RealBus]:
    with RealBus(directory, "-go") as running:
        yield running


@pytest.fixture
def reader(bus: RealBus) -> Iterator[Peer]:
    with bus.connect() as peer:
        peer.send(b"SUB k")
        peer.fence()
        yield peer


class TestPackets:
    @pytest.mark.parametrize("size", [1 << 12, 1 << 17, 212_960, 409_599])
    def test_sizes(self, bus: RealBus, reader: Peer, size: int) -> None:
        """[CONN-1] [PUB-4] [LIMIT-1] Also where the kernel changes."""
        with bus.connect() as sender:
            sender.wire.setsockopt(*LARGE_BUFFER)
            for more in (-1, 0, 1):
                packet = publish(b"k", os.urandom(size + more - 6))
                sender.send(packet)
                assert reader.receive() == packet
            sender.send(publish(b"k", bytes(409_595)))
            assert sender.is_disconnected()
            assert reader.fence() == []

    @pytest.mark.parametrize("more", [[], [publish(b"k", b"more")]])
    def test_empty_packet(
        self, bus: RealBus, reader: Peer, more: list[bytes]
    ) -> None:
        """[PKT-2] It is not the end of input; its sender is disconnected."""
        with bus.connect() as peer:
            freeze(bus)  # or it may be gone before it has sent the rest
            peer.send(publish(b"k"), b"", *more)
            thaw(bus)
            assert peer.is_disconnected()
            assert reader.fence() == [publish(b"k")]
        bus.wait_for_log("[PKT-2]")


class TestDepartures:
    @pytest.mark.parametrize("unread", [False, True])
    def test_one_shot_publishers(
        self, bus: RealBus, reader: Peer, unread: bool
    ) -> None:
        """[CONN-6] Nothing is lost, also when they leave input unread."""
        packets = publications(200)
        for packet in packets:
            with bus.connect() as sender:
                if unread:
                    sender.send(b"SUB ", WHOAMI, publish(b"other"))
                sender.send(packet)
        assert {reader.receive() for _ in packets} == {*packets}

    def test_visitors_that_do_not_wait(
        self, bus: RealBus, reader: Peer
    ) -> None:
        """[CONN-6] They have left before they are let in."""
        before = descriptors(bus)
        packets = publications(700)  # more than a user may have of clients
        freeze(bus)
        for packet in packets:
            with bus.connect(ATTACKER) as visitor:
                visitor.send(packet)
        thaw(bus)
        heard = {reader.receive() for _ in packets}
        assert heard == set(packets)
        wait_for(lambda: descriptors(bus) == before)
        assert "disconnect" not in bus.log()

    def test_killed_publishers(self, bus: RealBus, reader: Peer) -> None:
        """[CONN-6] What the kernel took before a kill -9 is delivered."""
        before = descriptors(bus)
        for count in (10, 100, 250):
            packets = publications(count)
            with bus.connect() as sender:
                sender.send(WHOAMI)
                sender.wire.recv(1, socket.MSG_PEEK)  # it is left unread
                freeze(bus)

                def publish_and_die(
                    sender: Peer = sender, packets: Any = packets
                ) -> None:
                    sender.send(*packets)
                    os.kill(os.getpid(), signal.SIGKILL)

                with child_process(publish_and_die) as child:
                    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            thaw(bus)
            assert [reader.receive() for _ in packets] == packets
        wait_for(lambda: descriptors(bus) == before)

    def test_clients_that_die_while_they_receive(self, bus: RealBus) -> None:
        """[CONN-12] With a message on its way to them, and unread ones."""
        with bus.connect() as witness:
            witness.fence()
            before = descriptors(bus)
            with bus.clients(20) as peers:
                for peer in peers:
                    peer.send(b"SUB ")
                    peer.fence()
                freeze(bus)
                for peer in peers:
                    peer.send(publish(b"k"))
                    peer.wire.shutdown(socket.SHUT_RD)
                    peer.wire.close()
                thaw(bus)
                assert witness.fence() == []
            wait_for(lambda: descriptors(bus) == before)

    def test_half_closed_clients(self, bus: RealBus, reader: Peer) -> None:
        """[CONN-10] [CONN-6] One that only listens has gone; deaf ones not."""
        with bus.clients(2) as (peer, deaf):
            peer.send(b"SUB k")
            peer.fence()
            deaf.send(b"SUB ")
            deaf.fence()
            deaf.wire.shutdown(socket.SHUT_RD)
            deaf.send(*publications(3))
            assert [peer.receive() for _ in range(3)] == publications(3)
            peer.send(publish(b"k"))
            peer.wire.shutdown(socket.SHUT_WR)
            assert peer.receive_all() == [publish(b"k")]
            expected = [*publications(3), publish(b"k")]
            assert [reader.receive() for _ in expected] == expected


class TestFloods:
    @pytest.mark.parametrize("is_stranger", [False, True])
    def test_publisher_that_is_paused(
        self, bus: RealBus, is_stranger: bool
    ) -> None:
        """[BLOCK-7] [BLOCK-13] Only one's own; nothing is lost."""
        if is_stranger and not IS_ROOT:
            pytest.skip("only root can connect as other users")
        packets = publications(3_000)
        with (
            bus.connect(ATTACKER) as slow,
            bus.connect(INNOCENT if is_stranger else ATTACKER) as sender,
            bus.connect() as other,
        ):
            slow.send(b"SUB k", b"CMSG blocking/soft/block")
            slow.fence()
            with child_process(lambda: sender.send(*packets)) as child:
                if is_stranger:
                    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                    assert sender.fence() == []
                else:
                    own = str(ATTACKER)
                    wait_for(lambda: other.stats()["users"][own]["paused"])
                assert other.fence() == []
                assert [slow.receive() for _ in packets] == packets
                assert sender.fence() == []

    @pytest.mark.parametrize("what", ["publish", "subscribe"])
    @pytest.mark.parametrize("is_stranger", [False, True])
    def test_storm(self, bus: RealBus, what: str, is_stranger: bool) -> None:
        """[CONN-5] A client waits for a turn of each, a user for less."""
        if is_stranger and not IS_ROOT:
            pytest.skip("only root can connect as other users")
        count = 60  # of attackers, with 200 packets each
        uids = [ATTACKER] * count + [INNOCENT if is_stranger else ATTACKER]
        with contextlib.ExitStack() as stack, bus.connect() as witness:
            *attackers, patient = (
                stack.enter_context(bus.connect(uid)) for uid in uids
            )
            witness.send(b"SUB done", b"SUB calm")
            wait_for(lambda: client_count(witness) == count + 2)
            freeze(bus)
            for number, peer in enumerate(attackers):
                for index in range(100):
                    if what == "publish":
                        peer.send(publish(b"none"))
                    else:
                        peer.send(b"SUB %d/%d" % (number, index))
                    peer.send(publish(b"done"))
            patient.send(publish(b"calm"))
            thaw(bus)
            before = [*iter(witness.receive, publish(b"calm"))]
            turns = count // 4 if is_stranger else count
            assert len(before) <= turns * 64 / 2

    @needs_root
    def test_visitors_without_end(self, bus: RealBus) -> None:
        """[CONN-5] [CONN-12] Another user's messages go on."""

        def rage() -> None:
            os.setuid(ATTACKER)
            while True:
                bus.connect().send(b"SUB storm", publish(b"storm"), b"BAD")

        with bus.connect(INNOCENT) as one, bus.connect(INNOCENT) as other:
            other.send(b"SUB calm")
            other.fence()
            with child_process(rage), child_process(rage):
                for packet in publications(300, b"calm"):
                    one.send(packet)
                    assert other.receive() == packet


def client_count(peer: Peer) -> int:
    """Return how many clients a bus has, as its owner sees it."""
    users = peer.stats()["users"].values()
    return sum(user["clients"] for user in users)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class TestDescriptors:
    def test_passed_ones(self, bus: RealBus) -> None:
        """[CONN-7] The sender is refused, or the kernel closes them."""
        with bus.connect() as peer, open(os.devnull) as file:
            peer.send(b"SUB k")
            peer.fence()
            before = descriptors(bus)
            rights = struct.pack("253i", *[file.fileno()] * 253)
            ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)
            for packet in publications(20):
                try:
                    peer.wire.sendmsg([packet], [ancillary])
                    is_refused = False
                except PermissionError:  # since Linux 6.16
                    peer.send(packet)
                    is_refused = True
                assert peer.receive() == packet
            assert descriptors(bus) == before
            assert is_refused != ("descriptors" in bus.log())

    def test_none_is_left(self, bus: RealBus) -> None:
        """[CONN-12] [CONN-13] No spinning; clients go on; more come later."""
        with bus.clients(20) as peers:
            for peer in peers:
                peer.send(b"SUB k")
                peer.fence()
            few = (descriptors(bus) + 3,) * 2
            resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, few)
            with bus.clients(100):
                bus.wait_for_log("Too many open files")
                before = cpu_seconds(bus.process.pid)
                time.sleep(0.5)  # in which it is to do nothing
                assert cpu_seconds(bus.process.pid) - before <= 0.25
                for packet in publications(100):
                    peers[0].send(packet)
                    for peer in peers:
                        assert peer.receive() == packet
            with bus.connect() as late:
                assert late.fence() == []
        assert bus.log().count("Too many open files") < 10

    def test_crowd(self, bus: RealBus) -> None:
        """[PUB-1] [CONN-10] Each hears it; none leaves a trace."""
        with bus.connect() as publisher:
            publisher.fence()
            before = descriptors(bus)
            with bus.clients(400) as peers:
                for peer in reversed(peers):
                    peer.send(b"SUB all")
                    peer.fence()
                publisher.send(publish(b"all"))
                for peer in peers:
                    assert peer.receive() == publish(b"all")
            wait_for(lambda: descriptors(bus) == before)


class TestUsers:
    @needs_root
    def test_secrets_of_three_users(self, bus: RealBus) -> None:
        """[CRED-1] [CRED-4] [CRED-10] Each reads its own and no other's."""
        users = [bus.connect(uid, gid) for uid, gid in ((7, 70), (8, 80))]
        users.append(bus.connect())
        for peer in users:
            peer.send(b"SUB ", b"SUB */", b"SUB " + peer.path + b"/")
        for sender, owner in itertools.product(users, users):
            packet = publish(owner.path + b"/x", b"secret")
            sender.send(packet)
            own = [packet] * (sender is owner)
            assert sender.fence() == own  # so that it is routed
            for peer in {*users} - {sender}:
                assert peer.fence() == [packet] * (peer is owner)
        user, _, root = users
        root.send(b"SUB " + user.path + b"/x")  # root may not either
        assert root.is_disconnected()
        bus.wait_for_log("[CRED-4]")
        for peer in users:
            peer.wire.close()
