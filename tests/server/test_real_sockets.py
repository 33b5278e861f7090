"""Tests of what depends on the kernel, on real sockets."""

from __future__ import annotations

import contextlib
import functools
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

import sbus
from attackers import Pair, attack, descriptors, descriptors_allowed
from packets import WHOAMI, publications, publish
from processes import child_process
from real_bus import (
    Peer,
    RealBus,
    connect,
    freeze,
    needs_root,
    thaw,
    wait_for,
)
from sizes import SOAK, either

LARGE_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)


class TestRealSockets:
    @pytest.fixture
    def bus(self, directory: Path) -> Iterator[RealBus]:
        with RealBus(directory, "-go") as bus:
            yield bus

    def test_messages_travel(self, bus: RealBus) -> None:
        """[CONN-1] [PUB-1] [PKT-1] One packet is one message."""
        with bus.clients(2) as (one, two):
            one.send(b"SUB a/*")
            one.fence()
            two.send(publish(b"a/b", b"1"), publish(b"a/b", b"2"))
            two.fence()
            expected = [publish(b"a/b", b"1"), publish(b"a/b", b"2")]
            assert one.fence() == expected

    def test_credentials_are_those_of_connect(self, bus: RealBus) -> None:
        """[CRED-1] [CRED-2] As the kernel says."""
        with bus.connect() as peer:
            own = f"!/cred/{os.getegid()}/{os.geteuid()}/{os.getpid()}"
            assert peer.path == own.encode()

    @pytest.mark.parametrize("unread", [False, True])
    def test_one_shot_publishers_lose_nothing(
        self, bus: RealBus, unread: bool
    ) -> None:
        """[CONN-6] 200 of 200, also when they leave input unread."""
        with bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            for packet in publications(200):
                with bus.connect() as sender:
                    if unread:
                        sender.send(b"SUB ", WHOAMI, publish(b"other"))
                    sender.send(packet)
            heard: set[bytes] = set()
            while len(heard) < 200:
                heard.add(reader.receive())
            assert heard == set(publications(200))

    def test_killed_publisher_loses_nothing(self, bus: RealBus) -> None:
        """[CONN-6] What the kernel took before a kill -9 is delivered."""
        with bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            bus.process.send_signal(signal.SIGSTOP)

            def publish_and_die() -> None:
                bus.connect().send(*publications(100))
                os.kill(os.getpid(), signal.SIGKILL)

            with child_process(publish_and_die) as child:
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            bus.process.send_signal(signal.SIGCONT)
            assert [reader.receive() for _ in range(100)] == publications(100)

    def test_publishers_killed_while_they_publish(self, bus: RealBus) -> None:
        """[CONN-6] No message of theirs is missing before the last."""
        descriptors = Path(f"/proc/{bus.process.pid}/fd")
        before = len(list(descriptors.iterdir()))

        def publish_on(key: bytes) -> None:
            peer = bus.connect()
            for number in itertools.count():
                peer.send(publish(key, b"%d" % number))

        for length in range(0, 400, 20):
            key = b"k%d" % length
            with bus.connect() as reader:
                reader.send(b"SUB " + key, b"CMSG blocking/soft/block")
                reader.fence()
                with child_process(functools.partial(publish_on, key)):
                    heard = [reader.receive() for _ in range(length)]
                assert heard == publications(length, key)
                rest = reader.fence()
                assert rest == publications(length + len(rest), key)[length:]
        wait_for(lambda: len(list(descriptors.iterdir())) <= before)

    def test_full_size_packet(self, bus: RealBus) -> None:
        """[LIMIT-3] [CONN-4] Exactly 409,600 bytes pass, one more does not."""
        packet = publish(b"k", os.urandom(409_594))
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.wire.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18
            )
            sender.send(packet)
            assert reader.receive() == packet
            sender.send(packet + b"x")
            assert sender.is_disconnected()
            assert reader.fence() == []
        bus.wait_for_log("[LIMIT-1] 409601 bytes of a packet")

    @pytest.mark.parametrize("size", [1 << 12, 1 << 17, 212_960, 1 << 18])
    def test_sizes_at_which_the_kernel_behaves_otherwise(
        self, bus: RealBus, size: int
    ) -> None:
        """[PUB-4] [CONN-4] One less, and one more."""
        with bus.clients(3) as (one, two, sender):
            for reader in (one, two):
                reader.send(b"SUB k")
                reader.fence()
            sender.wire.setsockopt(*LARGE_BUFFER)
            for difference in (-1, 0, 1):
                payload = os.urandom(size + difference - 6)
                packet = publish(b"k", payload)
                sender.send(packet)
                assert one.receive() == two.receive() == packet

    def test_full_size_packet_to_a_stalled_reader(self, bus: RealBus) -> None:
        """[LIMIT-3] [BLOCK-4] A queued packet is whole as well."""
        packets = [publish(b"k", os.urandom(400_000)) for _ in range(10)]
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.wire.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18
            )
            sender.send(*packets)
            sender.fence()
            assert [reader.receive() for _ in packets] == packets

    def test_stopped_reader_delays_nobody(self, bus: RealBus) -> None:
        """[BLOCK-4] [BLOCK-12] Others hear all while one hears nothing."""
        with bus.clients(3) as (deaf, reader, sender):
            deaf.send(b"SUB k")
            deaf.fence()
            reader.send(b"SUB ")
            reader.fence()
            for packet in publications(5000):
                sender.send(packet)
                assert reader.receive() == packet
            assert deaf.fence() == publications(5000)

    def test_soft_block_pauses_one_publisher(self, bus: RealBus) -> None:
        """[BLOCK-7] [BLOCK-12] [PUB-6] Nothing is lost, others go on."""
        with bus.clients(3) as (slow, sender, other):
            slow.send(b"SUB k", b"CMSG blocking/soft/block")
            slow.fence()
            sent = fill(sender)
            assert other.fence() == []
            heard = [slow.receive() for _ in range(sent)]
            assert heard == publications(sent)
            assert sender.fence() == []

    def test_soft_discard_hears_again_after_one_read(
        self, bus: RealBus
    ) -> None:
        """[BLOCK-6] The kernel takes one for each that is read."""
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k", b"CMSG blocking/soft/discard")
            reader.fence()
            for packet in publications(3000):
                sender.send(packet)
            sender.fence()
            assert reader.receive() == publish(b"k", b"0")
            sender.send(publish(b"k", b"new"))
            sender.fence()
            reader.send(WHOAMI)
            heard = list(iter(reader.receive, publish(b"k", b"new")))
            assert heard == publications(len(heard) + 1)[1:]
        bus.wait_for_log("[BLOCK-20]")

    def test_half_closed_client(self, bus: RealBus) -> None:
        """[CONN-10] The end of input is a departure."""
        with bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"))
            peer.wire.shutdown(socket.SHUT_WR)
            assert peer.receive_all() == [publish(b"k")]

    def test_deaf_client_still_speaks(self, bus: RealBus) -> None:
        """[CONN-8] Its packets are handled to the last."""
        with bus.clients(2) as (reader, deaf):
            reader.send(b"SUB k")
            reader.fence()
            deaf.send(b"SUB ")
            deaf.fence()
            deaf.wire.shutdown(socket.SHUT_RD)
            deaf.send(*publications(3))
            assert [reader.receive() for _ in range(3)] == publications(3)

    @pytest.mark.parametrize("more", [[], [publish(b"k", b"more")]])
    def test_empty_packet(self, bus: RealBus, more: list[bytes]) -> None:
        """[PKT-4] Its sender is disconnected for cause."""
        with bus.clients(2) as (peer, witness):
            witness.send(b"SUB ")
            witness.fence()
            freeze(bus)  # or it may be gone before it has sent the rest
            peer.send(publish(b"k"), b"", *more)
            thaw(bus)
            assert peer.is_disconnected()
            assert witness.fence() == [publish(b"k")]
        bus.wait_for_log("[PKT-4] empty packet")

    def test_descriptors_are_not_received(self, bus: RealBus) -> None:
        """[CONN-7] Where the kernel passes them, it closes them as well."""
        descriptors = Path(f"/proc/{bus.process.pid}/fd")
        with bus.connect() as peer, open(os.devnull) as file:
            peer.send(b"SUB k")
            peer.fence()
            before = len(list(descriptors.iterdir()))
            for _ in range(10):
                right = struct.pack("i", file.fileno())
                ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, right)
                try:
                    peer.wire.sendmsg([publish(b"k")], [ancillary])
                except PermissionError:  # since Linux 6.16
                    peer.send(publish(b"k"))
            assert peer.fence() == [publish(b"k")] * 10
            assert len(list(descriptors.iterdir())) == before

    def test_closing_clients_in_one_batch(self, bus: RealBus) -> None:
        """[CONN-12] Clients that die while a message is on its way."""
        with bus.connect() as witness:
            for _ in range(20):
                peers = [bus.connect() for _ in range(10)]
                for peer in peers:
                    peer.send(b"SUB ")
                    peer.fence()
                bus.process.send_signal(signal.SIGSTOP)
                for peer in peers:
                    peer.send(publish(b"k"))
                    peer.wire.shutdown(socket.SHUT_RD)
                    peer.wire.close()
                bus.process.send_signal(signal.SIGCONT)
            assert witness.fence() == []

    def test_polite_client_beside_flooders(self, bus: RealBus) -> None:
        """[CONN-5] [CONN-12] It is answered while others send all the time."""
        with contextlib.ExitStack() as flooders, bus.connect() as polite:
            for _ in range(3):
                flooders.enter_context(child_process(lambda: flood(bus)))
            for _ in range(50):
                assert polite.fence() == []

    def test_no_descriptor_is_left(self, directory: Path) -> None:
        """[CONN-3] No spinning; established clients go on; others later."""
        with RealBus(directory) as bus:
            few = (40, 40)  # fewer than at the start
            resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, few)
            with bus.connect() as first:
                first.send(b"SUB k")
                peers = [bus.connect() for _ in range(80)]
                bus.wait_for_log("[CONN-3]")
                before = cpu_seconds(bus.process.pid)
                for packet in publications(200):
                    first.send(packet)
                    assert first.receive() == packet
                for peer in peers[:60]:
                    peer.wire.close()
                assert peers[-1].fence() == []
                assert cpu_seconds(bus.process.pid) - before < 1
                for peer in peers:
                    peer.wire.close()
            assert bus.log().count("[CONN-3]") < 10

    def test_thousands_of_clients(self, directory: Path) -> None:
        """[LIMIT-7] As many as the descriptors of this machine allow."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = min(either(10_000, 2_000), hard - 200)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            with RealBus(directory) as bus:
                peers = [bus.connect() for _ in range(count)]
                for peer in peers:
                    peer.send(b"SUB all")
                for peer in peers:
                    peer.fence()
                peers[0].send(publish(b"all", b"hello"))
                for peer in peers:
                    assert peer.receive() == publish(b"all", b"hello")
                for peer in peers:
                    peer.wire.close()
                with bus.connect() as late:
                    late.send(b"SUB all", publish(b"all"))
                    assert late.fence() == [publish(b"all")]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_limit_of_clients(self, directory: Path) -> None:
        """[LIMIT-7] [CONN-12] One too many is closed at once."""
        with (
            RealBus(directory, "--max-clients", "1") as bus,
            bus.clients(2) as (one, two),
        ):
            assert two.is_disconnected()
            assert one.fence() == []

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
            sender.fence()
            for peer in users:
                expected = [packet] if peer is owner else []
                if peer is not sender:
                    assert peer.fence() == expected
        for peer in users[:-1]:
            peer.send(b"SUB " + users[-1].path + b"/")
        for peer in users:
            peer.wire.close()

    @needs_root
    def test_foreign_secret_disconnects(self, bus: RealBus) -> None:
        """[CRED-4] Root may not either."""
        with bus.connect(7, 7) as user, bus.connect() as root:
            secret_pattern = user.path + b"/x"
            root.send(b"SUB " + secret_pattern)
            assert root.is_disconnected()
        bus.wait_for_log("[CRED-4]")

    @needs_root
    def test_no_user_holds_up_another(self, bus: RealBus) -> None:
        """[BLOCK-13] [BLOCK-14] Soft block of a stranger is queue."""
        with bus.connect(7, 7) as slow, bus.connect(8, 8) as sender:
            slow.send(b"SUB k", b"CMSG blocking/soft/block")
            slow.fence()
            sender.send(*publications(3000))
            assert sender.fence() == []
            assert slow.fence() == publications(3000)


def fill(sender: Peer) -> int:
    """Publish until the kernel refuses; return how often.

    While the server reads, it takes one after a while; once it has paused
    the sender, it takes none.
    """
    timeout = struct.pack("ll", 0, 300_000)
    sender.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    for count, packet in enumerate(publications(100_000)):
        try:
            sender.send(packet)
        except BlockingIOError:
            return count
    raise AssertionError("the sender was never paused")


def flood(bus: RealBus) -> None:
    """Publish until killed."""
    peer = bus.connect()
    while True:
        peer.send(publish(b"flood", bytes(100)))


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def allow_descriptors(bus: RealBus, count: int) -> None:
    """Let a server have fewer descriptors than it was started with."""
    resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, (count, count))


class TestNoDescriptors:
    """Clients go on while many more wait; some of these get in later."""

    pytestmark = SOAK

    @needs_root
    @pytest.mark.parametrize("count", [64, 300])
    def test_one_user(self, directory: Path, count: int) -> None:
        """[RUN-6] [LIMIT-16] Who takes all there are leaves some for root."""
        ready, done = os.pipe()

        def allow() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))

        def crowd_in() -> None:
            peers = [connect(bus.path) for _ in range(500)]
            os.write(done, b"1")
            signal.pause()
            del peers

        with (
            descriptors_allowed(1_000),
            RealBus(directory, "-go", preexec_fn=allow) as bus,
            attack(crowd_in),
        ):
            os.close(done)
            most = count - sbus.DESCRIPTORS_KEPT
            named = f" max-clients={most} max-user-clients={most // 2} "
            assert named in bus.log()
            assert os.read(ready, 1)
            for _ in range(10):
                with bus.connect() as root:
                    assert root.fence() == []
        os.close(ready)

    def test_stop(self, directory: Path) -> None:
        """[CONN-3] [RUN-12] A stop finds the listening socket at rest."""
        with (
            RealBus(directory) as bus,
            bus.connect() as reader,
            bus.connect() as sender,
        ):
            allow_descriptors(bus, 64)
            reader.send(b"SUB k")
            reader.fence()
            sender.send(*publications(1_000))
            sender.fence()
            with bus.clients(80):
                bus.wait_for_log("[CONN-3]")
                assert bus.stop() == 0
        assert bus.log().endswith("sbusd: stop\n")
        assert "Traceback" not in bus.log()

    def test_crowd(self, directory: Path) -> None:
        """[CONN-3] [CONN-13] No spinning, no flood of lines, no loss."""
        count = 500
        with (
            descriptors_allowed(1_000),
            RealBus(directory, "-go") as bus,
            bus.clients(48) as peers,
            Pair(bus) as pair,
        ):
            allow_descriptors(bus, 64)
            for peer in peers:
                peer.send(b"SUB all")
                peer.fence()
            with bus.clients(count):
                bus.wait_for_log("[CONN-3]")
                before = cpu_seconds(bus.process.pid)
                time.sleep(1)  # in which it is to do nothing
                assert cpu_seconds(bus.process.pid) - before <= 0.1
                pair.talk(1_000)
                for packet in publications(1_000 // 50, b"all"):
                    pair.publisher.send(packet)
                    for peer in peers:
                        assert peer.receive() == packet
                assert bus.log().count("[CONN-3]") <= 10
            with bus.connect() as late:
                assert late.fence() == []


class TestCrowd:
    """Ten thousand clients hear one message, and die at once."""

    pytestmark = SOAK

    def test_broadcast_and_massacre(
        self, directory: Path, record_property: Any
    ) -> None:
        """[LIMIT-7] [PUB-1] [CONN-10] Each hears it; none leaves a trace."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        count = min(either(10_000, 2_000), hard - 200)
        ready, done = os.pipe()

        def listen() -> None:
            with descriptors_allowed(hard):
                peers = [connect(bus.path) for _ in range(count)]
                for peer in reversed(peers):
                    peer.send(b"SUB all")
                for peer in peers:
                    peer.fence()
                os.write(done, b"1")
                for peer in peers:
                    assert peer.receive() == publish(b"all")
                os.write(done, b"2")
                signal.pause()

        with RealBus(directory, "-go") as bus, bus.connect() as publisher:
            publisher.fence()
            before = descriptors(bus)
            times = [time.monotonic()]
            with child_process(listen):
                os.close(done)
                assert os.read(ready, 1) == b"1"
                times.append(time.monotonic())
                publisher.send(publish(b"all"))
                assert os.read(ready, 1) == b"2"
                times.append(time.monotonic())
            assert publisher.fence() == []
            wait_for(lambda: descriptors(bus) <= before)
            times.append(time.monotonic())
        os.close(ready)
        steps = [b - a for a, b in zip(times, times[1:])]
        for what, seconds in zip(("connect", "broadcast", "death"), steps):
            record_property(f"seconds to {what}", round(seconds, 2))
