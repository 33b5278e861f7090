"""Proofs on real sockets: floods, crowds, crashes, signals and rival starts.

    T3   three users, each with secrets
    T7   no descriptor is left while many more want to connect
    T8   many publishers flood many stuck subscribers: memory has a bound
    T9   clients that die at any moment, that pass descriptors, that crowd in
    T10  hostile bytes never reach the log, and nobody fills it
    T11  signals at random moments
    T12  rival starts, crashes, and who looks at the socket meanwhile
    T13  as many clients as the machine lets in

"make test" runs each for a few seconds.  SBUS_SOAK=4 in the environment, as
"make soak" sets it, runs them at full size.  As root, those who attack and
those who must not notice are different users.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import random
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, TypeVar

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publications, publish
from programs import ROOT, SECONDS_MAX, child_process
from real_bus import Peer, RealBus, connect, read_to_end, seqpacket, wait_for

IS_SOAK = int(os.environ.get("SBUS_SOAK", "1")) > 1
IS_ROOT = os.getuid() == 0
ATTACKER = 1000 if IS_ROOT else os.getuid()
INNOCENT = 1001 if IS_ROOT else None  # for RealBus.connect
MEBIBYTE = 1 << 20

pytestmark = pytest.mark.timeout(900 if IS_SOAK else 120)
needs_root = pytest.mark.skipif(
    not IS_ROOT, reason="only root can connect as other users"
)

T = TypeVar("T")


def either(soak: T, test: T) -> T:
    """Return the one size in "make soak" and the other in "make test"."""
    return soak if IS_SOAK else test


# =============================================================================
# What a server uses, and who attacks it
# =============================================================================


def kibibytes(pid: int, what: str) -> int:
    """Return a number that the kernel keeps on a process, such as VmRSS."""
    text = Path(f"/proc/{pid}/status").read_text("ascii")
    match = re.search(rf"^{what}:\s+(\d+) kB$", text, re.M)
    assert match
    return int(match[1])


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(bus: RealBus) -> int:
    """Return how many descriptors a server has open."""
    return len(os.listdir(f"/proc/{bus.process.pid}/fd"))


@contextlib.contextmanager
def attack(work: Callable[[], object]) -> Iterator[int]:
    """Have a process of the attacker do some work; kill it in the end."""

    def drop_and_work() -> None:
        if IS_ROOT:
            os.setgroups([])
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
        work()

    with child_process(drop_and_work) as child:
        yield child


@contextlib.contextmanager
def descriptors_allowed(count: int) -> Iterator[None]:
    """Have more descriptors than usual for a while."""
    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (max(soft, min(count, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


class Pair:
    """A publisher and a subscriber who must not notice an attack."""

    def __init__(self, bus: RealBus, key: bytes = b"calm") -> None:
        self.publisher = bus.connect(INNOCENT, INNOCENT or 0)
        self.subscriber = bus.connect(INNOCENT, INNOCENT or 0)
        self.subscriber.send(b"SUB " + key)
        self.subscriber.fence()
        self.key = key
        self.seconds: list[float] = []  # that each message took
        self.numbers = itertools.count()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.wire.close()
        self.subscriber.wire.close()

    def talk(self, count: int) -> None:
        """Say something, and check that it is heard."""
        for number in itertools.islice(self.numbers, count):
            packet = publish(self.key, b"%d" % number)
            start = time.monotonic()
            self.publisher.send(packet)
            assert self.subscriber.receive() == packet
            self.seconds.append(time.monotonic() - start)

    def milliseconds(self, part: float) -> float:
        """Return within how long such a part of the messages arrived."""
        times = sorted(self.seconds)
        return times[int(part * (len(times) - 1))] * 1000


# =============================================================================
# T3: secrets
# =============================================================================


class TestUsers:
    """T3: the kernel says who a client is, whatever became of the process."""

    @needs_root
    def test_each_hears_its_own(self, directory: Path) -> None:
        """[CRED-1] [CRED-2] [CRED-4] [CRED-10] Three users, passed sockets.

        Each socket was connected by a process that has ended since.
        """
        users = [(70, 7), (80, 8), (80, 7)]
        with RealBus(directory, "-go") as bus, contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(bus.connect(uid, gid))
                for gid, uid in users
            ]
            for (gid, uid), peer in zip(users, peers):
                assert peer.path.startswith(b"!/cred/%d/%d/" % (gid, uid))
                peer.send(b"SUB ", b"SUB */", b"SUB !/cred////", b"SUB !x/")
                peer.fence()
            for owner in peers:
                packet = publish(owner.path + b"/x", b"secret")
                heard = Counter[Peer]()
                for peer in peers:
                    peer.send(packet)
                    heard[peer] += len(peer.fence())
                for peer in peers:
                    heard[peer] += len(peer.fence())
                assert +heard == {owner: len(peers)}
            paths = [peer.path for peer in peers]
            for peer, path in zip(peers, paths[1:] + paths[:1]):
                peer.send(b"SUB " + path + b"/")
                assert peer.is_disconnected()


# =============================================================================
# T7: no descriptor is left
# =============================================================================


def allow_descriptors(bus: RealBus, count: int) -> None:
    """Let a server have fewer descriptors than it was started with."""
    resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, (count, count))


class TestNoDescriptors:
    """T7: clients go on while many more wait; some of these get in later."""

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
            assert f" max-clients={most} memory<=" in bus.log()
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
                start = time.monotonic()
                assert bus.log().count("[CONN-3]") <= 10
            with bus.connect() as late:
                assert late.fence() == []
            assert time.monotonic() - start < 5


# =============================================================================
# T8: memory has a bound
# =============================================================================

DISCARDING = [  # so that publishers are never paused
    [b"CMSG blocking/hard/discard"],
    [b"CMSG blocking/hard/discard", b"CMSG order/random"],
    [b"CMSG blocking/soft/discard"],
]
MIXED = [*DISCARDING, [], [b"CMSG blocking/soft/block"]]
# How many, and of how many bytes: as many as a client may have, and more
SUBSCRIPTIONS = [(1_000, 10), (500, 500), (60, 4_000), (1, 200_000)]
FLOOD_BYTES = [0, 0, 0, 0, 100, 1_000, 4_000, 16_000, 100_000, 400_000]


class Flood:
    """Publishers and stuck subscribers of one process, who all come back."""

    def __init__(
        self, path: str, count: int, modes: list[list[bytes]] = MIXED
    ) -> None:
        self.path = path
        self.modes = modes
        self.random = random.Random(8)
        self.publishers = [self.connect() for _ in range(count)]
        self.stuck: dict[int, Peer] = {}
        self.poll = select.poll()
        for _ in range(count):
            self.add_subscriber()

    def connect(self) -> Peer:
        """Connect a client that can send large packets."""
        peer = connect(self.path)
        peer.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MEBIBYTE)
        return peer

    def add_subscriber(self) -> None:
        """Connect a subscriber that never reads."""
        peer = self.connect()
        peer.send(*self.random.choice(self.modes), b"SUB flood")
        self.stuck[peer.wire.fileno()] = peer
        self.poll.register(peer.wire, select.POLLRDHUP)

    def run(self) -> None:
        """Publish until killed."""
        while True:
            for index, peer in enumerate(self.publishers):
                size = self.random.choice(FLOOD_BYTES)
                try:
                    peer.wire.send(
                        publish(b"flood", bytes(size)), socket.MSG_DONTWAIT
                    )
                except BlockingIOError:
                    pass
                except OSError:
                    peer.wire.close()
                    self.publishers[index] = self.connect()
            for number, _ in self.poll.poll(0):
                self.poll.unregister(number)
                self.stuck.pop(number).wire.close()
                self.add_subscriber()


def flood_of_large_packets(path: str) -> None:
    """Have many publish what many do not read, each one packet and more."""
    flood = Flood(path, 0)
    for _ in range(40):
        flood.add_subscriber()
    for _ in range(40):
        peer = flood.connect()
        with contextlib.suppress(BlockingIOError):
            for _ in range(3):
                packet = publish(b"flood", bytes(400_000))
                peer.wire.send(packet, socket.MSG_DONTWAIT)
        flood.publishers.append(peer)
    flood.run()


class Exhaustion:
    """Deep patterns, and messages that nobody reads, until memory is full."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.packets = size // 400_000 + 10  # large ones that fill it
        self.random = random.Random(8)
        self.stack = contextlib.ExitStack()

    def run(self) -> None:
        """Fill the memory up to any point, and ask for some more."""
        for number in range(either(20, 3)):
            with self.stack:
                packets = self.packets
                if number:
                    packets = self.random.randrange(packets)
                self.fill(packets)

    def connect(self) -> Peer:
        """Connect a client that can send large packets."""
        peer = self.stack.enter_context(connect(self.path))
        peer.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MEBIBYTE)
        return peer

    def send(self, peer: Peer, packet: bytes) -> None:
        """Send a packet, unless the server has disconnected the client."""
        with contextlib.suppress(OSError):
            peer.send(packet)

    def fill(self, packets: int) -> None:
        """Have four clients not read, and four subscribe meanwhile."""
        stuck, deep = ([self.connect() for _ in range(4)] for _ in range(2))
        publisher = self.connect()
        for peer in stuck:
            self.send(peer, b"SUB flood")
        for _ in range(packets):
            self.send(publisher, publish(b"flood", bytes(400_000)))
        for index in range(63):
            for number, peer in enumerate(deep):
                segments = [b"x" * 60] * 64
                segments[index] = b"x" * number + b"*"
                self.send(peer, b"SUB " + b"/".join(segments))
            for size in self.random.choices(FLOOD_BYTES, k=8):
                self.send(publisher, publish(b"flood", bytes(size)))
        key = b"/".join([b"x" * 60] * 63)
        for number in range(300):
            self.send(publisher, publish(key + b"/%d" % number))


def is_served_in(directory: Path, size: int) -> bool:
    """Return whether a server can start with so many bytes; let it run out.

    It must be alive afterwards.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    (directory / "log").unlink(missing_ok=True)
    options = ("-r", "--max-backlog", "unlimited")
    try:
        bus = RealBus(directory, *options, preexec_fn=limit)
    except AssertionError:
        return False
    with bus:
        try:
            bus.connect().wire.close()
        except OSError:
            assert bus.process.wait(SECONDS_MAX) == 1
            return False
        with child_process(Exhaustion(bus.path, size).run) as child:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with bus.connect() as peer:
            assert peer.fence() == []
        assert bus.stop() == 0
    assert "[CONN-12] there is no memory" in bus.log()
    assert "Traceback" not in bus.log()
    return True


class TestMemory:
    """T8: what the clients of a user make grow has a bound, and is freed.

    The process keeps for the next flood what it has had for the last one.
    """

    QUOTA = either(64, 8) * MEBIBYTE
    SPARE = 12 * MEBIBYTE  # what a server needs when it begins to work

    def quota(self) -> list[str]:
        """Return the options that limit the attacker."""
        what = "--max-user-backlog" if IS_ROOT else "--max-bus-backlog"
        return ["-go", what, str(self.QUOTA)]

    def watch(
        self, bus: RealBus, seconds: float, record: Callable[..., None]
    ) -> None:
        """Check the memory of a server, and that others are served."""
        pid = bus.process.pid
        with Pair(bus) as pair:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pair.talk(1)
            record("messages", len(pair.seconds))
            record("p99 milliseconds", round(pair.milliseconds(0.99), 1))
        record("MiB at most", kibibytes(pid, "VmHWM") >> 10)

    @pytest.mark.parametrize("work", ["mixed", "unpaused", "large"])
    def test_flood(
        self, directory: Path, work: str, record_property: Any
    ) -> None:
        """[LIMIT-14] [BLOCK-13] [BLOCK-19] [BLOCK-21] [CONN-12] Bounded."""

        def run_flood() -> None:
            if work == "large":
                flood_of_large_packets(bus.path)
            modes = MIXED if work == "mixed" else DISCARDING
            Flood(bus.path, either(100, 20), modes).run()

        with RealBus(directory, *self.quota()) as bus:
            pid = bus.process.pid
            before = descriptors(bus)
            with Pair(bus) as pair:
                pair.talk(100)
            base = kibibytes(pid, "VmRSS") << 10
            bound = base + self.SPARE + self.QUOTA * 12 // 10
            for _ in range(2):  # what was freed is used again
                with attack(run_flood):
                    self.watch(bus, either(60, 2) / 2, record_property)
                wait_for(lambda: descriptors(bus) <= before)
            assert kibibytes(pid, "VmHWM") << 10 <= bound
            bus.process.send_signal(signal.SIGUSR1)
            bus.wait_for_log("stats users=0 clients=0 backlog_bytes=0 ")

    def test_one_shot_publishers(self, directory: Path) -> None:
        """[BLOCK-21] Nor can those add to it who leave at once."""

        def run_publishers() -> None:
            with connect(bus.path) as reader:
                reader.send(b"SUB flood")
                reader.fence()
                while True:
                    with connect(bus.path) as peer:
                        for _ in range(60):
                            peer.send(publish(b"flood", bytes(3_000)))

        with RealBus(directory, *self.quota()) as bus:
            base = kibibytes(bus.process.pid, "VmRSS") << 10
            with attack(run_publishers):
                self.watch(bus, either(30, 2), lambda *_: None)
            most = kibibytes(bus.process.pid, "VmHWM") << 10
            assert most <= base + self.SPARE + self.QUOTA * 12 // 10

    def test_no_memory_is_left(self, directory: Path) -> None:
        """[CONN-12] [RUN-12] Of as much as it can start with, or of more."""
        started = 0
        for mebibytes in [*range(16, 64, either(1, 2)), 80, 96, 128]:
            size = mebibytes * MEBIBYTE
            try:
                started += is_served_in(directory, size)
            except AssertionError as error:
                what = f"in {mebibytes} MiB: {error}"
                raise AssertionError(what) from error
        assert started > 5

    @pytest.mark.parametrize("mode", [*sbus.SOFT_MODES, *sbus.HARD_MODES])
    def test_nothing_is_kept(self, mode: bytes) -> None:
        """[CONN-10] Of clients that have gone, in whatever mode they were."""
        kernel = FakeKernel(sbus.Limits(max_backlog=1_000))
        sender = kernel.connect()
        before = self.kept()
        for order in (b"queue", b"stack", b"random"):
            peer = kernel.connect()
            peer.wire.room = 0
            peer.send(b"SUB k", b"CMSG " + mode, b"CMSG order/" + order)
            sender.send(*publications(3))
            peer.close()
        assert self.kept() == before

    def kept(self) -> Counter[str]:
        """Return how many objects there are of what a client consists of."""
        gc.collect()
        kinds = (sbus.Client, sbus.Backlog, sbus.User)
        objects = gc.get_objects()
        return Counter(
            type(one).__name__ for one in objects if isinstance(one, kinds)
        )

    @pytest.mark.parametrize("uid", [1_000, 0])
    def test_publishers_that_leave_at_once(self, uid: int) -> None:
        """[BLOCK-21] They are not paused, and still limited."""
        most = 100_000
        limits = sbus.Limits(max_user_backlog=most, max_bus_backlog=most)
        kernel = FakeKernel(limits)
        reader = kernel.connect(uid=uid)
        reader.wire.room = 0
        reader.send(b"SUB k")
        packet = publish(b"k", bytes(3_000))
        for _ in range(100):
            sender = kernel.connect(uid=uid)
            sender.wire.incoming.extend([packet] * 20)
            sender.close()
            size = most * 9 // 8 + MEBIBYTE + len(packet) + 128
            assert kernel.bus.flood.backlog_bytes <= size
        assert reader.wire.closed
        assert kernel.server.disconnected == {"BLOCK-21": 1}

    @needs_root  # who starts a bus has no limits of a user
    def test_patterns(self, directory: Path) -> None:
        """[LIMIT-4] [LIMIT-5] [LIMIT-6] [LIMIT-13] A million attempts."""

        def subscribe_all_the_time() -> None:
            peers: deque[Peer] = deque(maxlen=400)  # which all stay connected
            for number in itertools.count():
                peers.append(connect(bus.path))
                count, size = SUBSCRIPTIONS[number % len(SUBSCRIPTIONS)]
                with contextlib.suppress(OSError):
                    for one in range(count):
                        text = b"SUB %d/%d/" % (number, one)
                        peers[-1].send(text.ljust(size, b"p"))

        with RealBus(directory, "-go") as bus, Pair(bus) as pair:
            pair.talk(100)
            base = kibibytes(bus.process.pid, "VmRSS")
            with attack(subscribe_all_the_time):
                end = time.monotonic() + either(60, 2)
                while time.monotonic() < end:
                    pair.talk(1)
            assert kibibytes(bus.process.pid, "VmHWM") <= base + (24 << 10)


# =============================================================================
# T9: clients that die, and crowds
# =============================================================================


with seqpacket() as _wire:
    CAN_REFUSE = sbus.refuse_descriptors(_wire)


def pass_descriptors(peer: Peer, packet: bytes, passed: list[int]) -> bool:
    """Send a packet with descriptors; return whether the kernel took it.

    One that can refuse it must do so.
    """
    rights = struct.pack(f"{len(passed)}i", *passed)
    ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)
    try:
        peer.wire.sendmsg([packet], [ancillary])
    except PermissionError:
        assert CAN_REFUSE
        return False
    return True


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """Give a socket that keeps whoever closes it last for an hour.

    Only the end of the other side, here in the end, is sooner.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    with wire, peer:
        with contextlib.suppress(BlockingIOError):
            while True:
                wire.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        linger = struct.pack("ii", 1, 3_600)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        yield wire


class TestHostileClients:
    """T9: whatever a client does to its own sockets, the others go on."""

    def test_crashes_while_publishing(self, directory: Path) -> None:
        """[CONN-6] What the kernel took arrives, in order, without a gap."""
        count = 20
        shared = mmap.mmap(-1, 8 * count)
        taken = memoryview(shared).cast("q")  # of each, by the kernel

        def publish_all_the_time() -> None:
            peers = [connect(bus.path) for _ in range(count)]
            for number in itertools.count(1):
                for index, peer in enumerate(peers):
                    peer.send(publish(b"crash", b"%d %d" % (index, number)))
                    taken[index] = number

        with (
            RealBus(directory, "-go") as bus,
            Pair(bus) as pair,
            bus.connect() as reader,
        ):
            reader.send(b"SUB crash", b"CMSG blocking/soft/block")
            reader.fence()
            pair.talk(1)
            before = descriptors(bus)
            for _ in range(either(200, 10)):
                shared[:] = bytes(8 * count)
                heard: Counter[int] = Counter()
                with attack(publish_all_the_time):
                    packets = [reader.receive() for _ in range(200)]
                end = time.monotonic() + SECONDS_MAX
                while descriptors(bus) > before:  # some are still paused
                    packets += reader.fence()
                    assert time.monotonic() < end
                for packet in packets + reader.fence():
                    index, number = map(int, packet[10:].split())
                    heard[index] += 1
                    assert number == heard[index], "out of order, or a gap"
                for index in range(count):
                    assert taken[index] <= heard[index] <= taken[index] + 1
                pair.talk(1)

    def test_descriptors_are_passed(self, directory: Path) -> None:
        """[CONN-7] Hundreds in a packet: the server has none of them."""
        with (
            RealBus(directory, "-go") as bus,
            bus.connect() as peer,
            open(os.devnull) as file,
        ):
            peer.send(b"SUB k")
            peer.fence()
            before = descriptors(bus)
            for packet in publications(100):
                if not pass_descriptors(peer, packet, [file.fileno()] * 253):
                    peer.send(packet)
                assert peer.receive() == packet
            assert descriptors(bus) == before

    @pytest.mark.parametrize("is_inherited", [False, True])
    def test_descriptor_that_takes_an_hour_to_close(
        self, directory: Path, is_inherited: bool
    ) -> None:
        """[CONN-7] The server never has it, or its start line warns of it."""
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            if is_inherited:
                listener = stack.enter_context(seqpacket())
                listener.bind(str(directory / "bus"))
                listener.listen()
                number = listener.fileno()
                options["address"] = f"/dev/fd/{number}"
                options["pass_fds"] = [number]
            bus = stack.enter_context(RealBus(directory, **options))
            if not CAN_REFUSE:
                assert "this kernel wait [CONN-7]" in bus.log()
                return
            peer, other = stack.enter_context(bus.clients(2))
            wire = stack.enter_context(lingering())
            peer.send(b"SUB k")
            peer.fence()
            if pass_descriptors(peer, publish(b"k"), [wire.fileno()]):
                wire.close()  # so that the server has the last one
            assert other.fence() == []
            assert peer.fence() == []

    def test_one_shots(self, directory: Path) -> None:
        """[CONN-6] [LIMIT-11] Who connects, speaks and leaves is heard."""
        count, readers = either((10_000, 300), (2_000, 100))
        packets = publications(count)
        ready, done = os.pipe()

        def speak() -> None:
            for packet in packets:
                with connect(bus.path) as peer:
                    peer.send(packet)

        def listen() -> None:
            peers = [connect(bus.path) for _ in range(readers)]
            for peer in peers:
                peer.send(b"SUB k")
                peer.fence()
            with child_process(speak):
                for packet in packets:
                    for peer in peers:
                        assert peer.receive() == packet
            os.write(done, b"1")

        with RealBus(directory, "-go") as bus, attack(listen):
            os.close(done)
            assert os.read(ready, 1)
        os.close(ready)

    def test_visitors_that_do_not_wait(self, directory: Path) -> None:
        """[CONN-3] [CONN-6] They leave before they are let in."""
        with RealBus(directory) as bus, bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            before = descriptors(bus)
            bus.process.send_signal(signal.SIGSTOP)
            for packet in publications(200):
                with bus.connect() as visitor:
                    visitor.send(packet)
            bus.process.send_signal(signal.SIGCONT)
            heard = [reader.receive() for _ in range(200)]
            assert sorted(heard) == sorted(publications(200))
            wait_for(lambda: descriptors(bus) <= before)

    @needs_root
    def test_silent_crowd(self, directory: Path) -> None:
        """[LIMIT-11] [LIMIT-16] One user gets its share of places only."""
        count = either(5_000, 700)
        ready, done = os.pipe()

        def crowd_in() -> None:
            with descriptors_allowed(count + 100):
                peers = [connect(bus.path) for _ in range(count)]
                os.write(done, b"1")
                signal.pause()
                del peers

        with RealBus(directory, "-go") as bus, Pair(bus) as pair:
            before = descriptors(bus)
            with attack(crowd_in):
                os.close(done)
                assert os.read(ready, 1)
                pair.talk(100)
                most = before + sbus.Limits().max_user_clients
                wait_for(lambda: descriptors(bus) == most)
                pair.talk(100)
                assert descriptors(bus) == most
        assert bus.log().count("[LIMIT-11]") <= 2 + either(10, 3)
        os.close(ready)


# =============================================================================
# T10: the log
# =============================================================================

LOG_LINE = re.compile(rb"sbusd: [ -~]{1,292}")
HOSTILE_WORDS = [b"SUB ", b"MSG ", b"CMSG ", b"UNSUB ", b"BAD", b"", b"\xff"]
HOSTILE_BYTES = [b"\n", b"\r", b"\x1b[2J", b"\0", b"\xff", b"%s%d", b"!/"]
HOSTILE_BYTES += [b"\nsbusd: stop\n", b"x" * 300, bytes(range(256)), b"\\"]
SECRET_PAYLOAD = b"\0payload-payload"


def hostile(random_: random.Random) -> bytes:
    """Return a malformed packet whose text would spoil a log."""
    pieces = random_.choices(HOSTILE_BYTES, k=random_.randrange(5))
    if random_.random() < 0.01:
        pieces.append(b"\n" * 100_000)
    text = b"".join(pieces).replace(b"\0", b"")
    return random_.choice(HOSTILE_WORDS) + text + b"/!" + SECRET_PAYLOAD


class TestLogSafety:
    """T10: clients can neither forge lines, nor flood or stop the log."""

    @pytest.mark.parametrize("option", ["-f", "-v"])
    def test_hostile_bytes(self, directory: Path, option: str) -> None:
        """[RUN-15] [CONN-13] Lines are short, printable, and few."""
        count = either(200_000, 50_000)
        random_ = random.Random(10)
        with RealBus(directory, "-go", option) as bus:
            start = time.monotonic()
            for _ in range(count):
                with bus.connect() as peer:
                    peer.send(hostile(random_))
            with Pair(bus) as pair:
                pair.talk(1)
            seconds = time.monotonic() - start
        lines = bus.log_path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        for line in lines:
            assert LOG_LINE.fullmatch(line), line
            assert b"payload-payload" not in line
        assert lines.count(b"sbusd: stop") == 1
        causes = [line for line in lines if b"sbusd: disconnect" in line]
        rules = Counter(re.findall(rb"\[([A-Z]+-\d+)\]", b"".join(causes)))
        assert len(rules) >= 2
        assert max(rules.values()) <= 1 + 10 * (1 + seconds)
        if option == "-v":
            assert len(lines) > count

    @needs_root
    def test_many_users(self, directory: Path) -> None:
        """[CONN-13] Together they get ten lines a second for a rule."""
        count = either(1_000, 100)
        with RealBus(directory, "-go") as bus:
            start = time.monotonic()
            for uid in range(2_000, 2_000 + count):
                with bus.connect(uid, uid) as peer:
                    peer.send(b"BAD")
            with Pair(bus) as pair:
                pair.talk(1)
            seconds = time.monotonic() - start
            written = bus.log().count("sbusd: disconnect")
        assert written <= 10 * (1 + seconds)
        left_out = re.findall(r"\((\d+) more\)", bus.log())
        assert written + sum(map(int, left_out)) == count

    def test_no_count_is_lost(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """[CONN-13] Of however many users, without remembering them all."""
        monkeypatch.setattr(sbus, "CAUSES_MAX", 40)
        kernel = FakeKernel()
        for uid in range(100):
            kernel.connect(uid=uid).send(b"BAD")
            assert len(kernel.server._causes._causes) <= 40
        kernel.server.stop()
        kernel.server.run()
        written = caplog.text.count("disconnect client=")
        left_out = re.findall(r"\((\d+) more\)", caplog.text)
        assert written == 10
        assert written + sum(map(int, left_out)) == 100
        assert len(left_out) <= 3 * (10 + 1)

    @pytest.mark.parametrize("what", ["full pipe", "full disk", "closed"])
    def test_log_that_takes_nothing(
        self, directory: Path, what: str, record_property: Any
    ) -> None:
        """[RUN-16] The bus is about as fast as with a log that works."""
        rates = [self.rate(directory, log) for log in ["file", what] * 3]
        shares = [bad / good for good, bad in zip(rates[::2], rates[1::2])]
        record_property("share of the speed", round(max(shares), 2))
        assert max(shares) > 0.5  # of three: other processes are busy, too

    def rate(self, directory: Path, what: str) -> float:
        """Return how many packets a second are handled, each with a line."""
        rounds = either(500, 50)
        reader, writer = os.pipe()
        options: dict[str, Any] = {"stderr": writer}
        if what == "full pipe":
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(4096))
            os.set_blocking(writer, True)
        elif what == "closed":
            options = {"preexec_fn": lambda: os.close(2)}
        else:
            name = "/dev/full" if what == "full disk" else directory / "text"
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), writer)
        path = f"{directory}/bus"
        command = [sys.executable, str(ROOT / "sbus.py"), "-va", path]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, **options
        ) as process:
            try:
                assert process.stdout
                read_to_end(process.stdout)
                with connect(path) as peer:
                    start = time.monotonic()
                    for _ in range(rounds):
                        peer.send(*[b"SUB k", b"UNSUB k"] * 50)
                        assert peer.fence() == []
                    seconds = time.monotonic() - start
                process.terminate()
                assert process.wait(SECONDS_MAX) == 0
            finally:
                process.kill()
        os.close(reader)
        os.close(writer)
        return rounds * 101 / seconds


# =============================================================================
# T11: signals
# =============================================================================


class TestSignalsUnderLoad:
    """T11: a signal at any moment ends a server well, or only asks it."""

    def test_random_moments(self, directory: Path) -> None:
        """[RUN-10] [RUN-12] [RUN-17] [ADDR-10] Status 0, nothing is left."""
        random_ = random.Random(11)
        path = str(directory / "bus")

        def talk_all_the_time() -> None:
            key = b"busy/%d" % os.getpid()  # its own, so that it keeps up
            while True:
                time.sleep(0.001)  # leave the processor to the next server
                with contextlib.suppress(OSError), connect(path) as peer:
                    peer.send(b"SUB " + key)
                    while True:
                        peer.send(publish(key, bytes(1_000)))
                        peer.receive()

        stops = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        with attack(talk_all_the_time), attack(talk_all_the_time):
            for number in range(either(500, 40)):
                with RealBus(directory, "-go") as bus:
                    time.sleep(random_.random() / 20)
                    first = random_.choice([*stops, signal.SIGUSR1])
                    bus.process.send_signal(first)
                    if number % 2:
                        time.sleep(0.001)
                    start = time.monotonic()
                    assert bus.stop(random_.choice(stops)) == 0
                    assert time.monotonic() - start < 5
                assert os.listdir(directory) == ["log"]
        assert bus.log().count("sbusd: stop\n") == either(500, 40)
        assert "Traceback" not in bus.log()

    def test_idle_server_wakes_up(self, directory: Path) -> None:
        """[RUN-10] [RUN-17] A signal is not left until the next event."""
        with RealBus(directory) as bus:
            waits = []
            for count in range(1, 6):
                start = time.monotonic()
                bus.process.send_signal(signal.SIGUSR1)
                wait_for(lambda: bus.log().count("stats users=0") == count)  # noqa: B023
                waits.append(time.monotonic() - start)
            assert min(waits) < 0.05


# =============================================================================
# T12: start and restart
# =============================================================================


def start_rival(path: str, gate: int, done: int, others: list[int]) -> int:
    """Fork a server that starts when all who hold the gate have closed it.

    What it learns of the socket that is there is out of date a little later.
    It closes *done* when it serves, or has refused to.
    """
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.dup2(done, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for descriptor in (done, *others):
            os.close(descriptor)
        ask = sbus.is_stale

        def ask_slowly(path: str) -> bool:
            answer = ask(path)
            time.sleep(random.random() / 500)
            return answer

        setattr(sbus, "is_stale", ask_slowly)  # noqa: B010
        os.read(gate, 1)
        status = sbus.main(["-ra", path])
    finally:
        os._exit(status)


class TestStarts:
    """T12: of those who start at once one serves, after whatever crash."""

    def test_races(self, directory: Path) -> None:
        """[ADDR-8] [ADDR-9] Two to five that find a stale socket."""
        path = str(directory / "bus")
        random_ = random.Random(12)
        for _ in range(either(200, 12)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
                stale.bind(path)
            gate, opener = os.pipe()
            ready, done = os.pipe()
            rivals = [
                start_rival(path, gate, done, [opener, ready])
                for _ in range(random_.randint(2, 5))
            ]
            for descriptor in (opener, gate, done):
                os.close(descriptor)
            with os.fdopen(ready, "rb") as output:
                read_to_end(output)  # each serves, or has refused to
            with connect(path) as peer:
                assert peer.fence() == []
            for rival in rivals:
                os.kill(rival, signal.SIGTERM)
            ends = [os.waitpid(rival, 0)[1] for rival in rivals]
            statuses = sorted(map(os.waitstatus_to_exitcode, ends))
            assert statuses == [0] + [1] * (len(rivals) - 1)
            assert os.listdir(directory) == []

    def test_crashes(self, directory: Path, record_property: Any) -> None:
        """[ADDR-8] After each kill -9 a start with -r is enough."""
        longest = 0.0
        for _ in range(either(100, 8)):
            start = time.monotonic()
            with RealBus(directory, "-r") as bus:
                longest = max(longest, time.monotonic() - start)
                with bus.connect() as peer:
                    peer.send(b"SUB k", publish(b"k"))
                    assert peer.fence() == [publish(b"k")]
                    bus.process.kill()
                    bus.process.wait()
                    assert peer.receive_all() == []
        record_property("longest start in milliseconds", round(longest * 1000))

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_mode_under_observation(self, directory: Path, umask: int) -> None:
        """[ADDR-6] Whoever looks all the time sees only what was asked for."""
        path = str(directory / "bus")
        count = either(10_000, 1_000)

        def start_again_and_again() -> None:
            os.umask(umask)
            for _ in range(count):
                sbus.Endpoint.open(path, 0o770, False).close()
            os.rename(directory / "there", directory / "done")

        (directory / "there").touch()
        modes = Counter[int]()
        with child_process(start_again_and_again):
            while not (directory / "done").exists():
                for _ in range(100):
                    with contextlib.suppress(FileNotFoundError):
                        modes[stat.S_IMODE(os.lstat(path).st_mode)] += 1
        assert set(modes) == {0o770}


# =============================================================================
# T13: crowds
# =============================================================================


class TestCrowd:
    """T13: ten thousand clients hear one message, and die at once."""

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
            assert seconds < 10
