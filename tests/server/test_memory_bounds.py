"""Tests of memory: the bound of the start line, floods, no memory left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import resource
import select
import signal
import socket
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

import sbus
from attackers import IS_ROOT, Pair, attack, descriptors
from fake_kernel import OWNER, FakeKernel, but, choices
from packets import publications, publish
from processes import SECONDS_MAX, child_process
from real_bus import Peer, RealBus, connect, needs_root, wait_for
from sizes import SOAK, either


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Have garbage collections look at what a test makes, and no more."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
class TestMemoryBound:
    """What Limits.memory_bytes_max says, term by term, for the worst case."""

    NOTHING = sbus.Limits(
        max_packet=1,
        max_segments=1,
        max_patterns=0,
        max_pattern_bytes=0,
        max_backlog=0,
        max_clients=0,
        max_user_clients=0,
        max_bus_backlog=0,
    )

    def term(self, **limits: int) -> int:
        """Return what some limits add to the bound."""
        least = but(self.NOTHING, max_clients="max_clients" in limits)
        bound = but(least, **limits).memory_bytes_max()
        return bound - but(least, max_clients=0).memory_bytes_max()

    def used(self, work: Callable[[], object]) -> int:
        """Return how much memory is used after some work."""
        gc.collect()
        tracemalloc.start()
        kept = work()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
        return size

    def bus(self) -> tuple[sbus.Bus, sbus.Client]:
        """Return a bus without limits, and a client."""
        huge = dict.fromkeys(sbus.LIMITS, 1 << 60)
        bus = sbus.Bus(sbus.Limits(**huge), OWNER)
        return bus, bus.open(sbus.Credentials(100, 1000, 4242), None)

    def test_clients(self) -> None:
        """[LIMIT-7] Each of a user of its own."""
        bus, _ = self.bus()

        def work() -> None:
            for uid in range(2_000, 3_000):
                bus.open(sbus.Credentials(100, uid, 100_000 + uid), None)

        assert self.used(work) <= self.term(max_clients=1_000)

    @pytest.mark.parametrize("count", [86, 171, 342])
    def test_clients_that_hold_each_other(self, count: int) -> None:
        """[BLOCK-7] All of a user; a dictionary has just grown."""
        bus, first = self.bus()

        def work() -> None:
            for _ in range(count):
                client = bus.open(first.credentials, None)
                client.soft_mode, client.put_off = "block", False
            clients = [*first.user.clients]
            for receiver in clients[1:]:
                for publisher in clients:
                    bus.flood.refuse(receiver, b"MSG k\0", publisher)
                bus.flood.deafen(receiver)

        limits = {"max_clients": count, "max_user_clients": count}
        assert self.used(work) <= self.term(**limits)

    @pytest.mark.parametrize(
        "form",
        [
            "{:04}",
            "{:04}/*/",
            "!/cred////{:04}",
            "{:04}*b",
            "!/cred////" + "x" * 4_000 + "{:04}",
        ],
    )
    def test_patterns(self, form: str) -> None:
        """[LIMIT-5] [LIMIT-6] Of one shape, with their bytes."""
        bus, client = self.bus()
        texts = [form.format(number).encode() for number in range(1_000)]

        def work() -> None:
            for text in texts:
                bus.subscribe(client, bytes(bytearray(text)))

        size = sum(map(len, texts))
        limits = {"max_patterns": 1_000, "max_pattern_bytes": size}
        assert self.used(work) <= self.term(max_clients=1, **limits)

    @pytest.mark.parametrize("keepers", [1, 2])
    def test_patterns_that_many_held(self, keepers: int) -> None:
        """[LIMIT-5] [LIMIT-19] What they took is given up with them."""
        bus, client = self.bus()
        others = [bus.open(client.credentials, None) for _ in range(100)]
        texts = [b"!/cred////%d" % number for number in range(20)]

        def work() -> None:
            for text in texts:
                for one in (client, *others):
                    bus.subscribe(one, bytes(bytearray(text)))
                for one in others[keepers - 1 :]:
                    bus.unsubscribe(one, text)

        size, count = sum(map(len, texts)), len(texts) * keepers
        limits = {"max_patterns": count, "max_pattern_bytes": size * keepers}
        assert self.used(work) <= self.term(max_clients=1, **limits)

    def test_shapes(self) -> None:
        """[LIMIT-10] [LIMIT-17] Each pattern of the largest shape."""
        bus, client = self.bus()
        texts = [
            b"x" * (n % 16) + b"*/" + b"x" * (n // 16) for n in range(256)
        ]

        def work() -> None:
            for text in texts:
                bus.subscribe(client, text + b"*/" * 63)

        size = sum(map(len, texts)) + 256 * 126
        limits = {"max_patterns": 256, "max_pattern_bytes": size}
        limits |= {"max_segments": 64, "max_shapes": 256}
        assert self.used(work) <= self.term(max_clients=1, **limits)

    @pytest.mark.parametrize("size", [7, 300, 5_000])
    @pytest.mark.parametrize("orders", [["queue"], ["random", "stack"]])
    def test_backlogs(self, size: int, orders: list[str]) -> None:
        """[BLOCK-19] [LIMIT-15] Also when they were in every order."""
        backlog = sbus.Backlog()

        def work() -> None:
            for number in range(5_000):
                backlog.push(bytes(size + number % 2))
            for order in [*orders, "random", "queue"]:
                backlog.reorder(order)
                backlog.first()
            for _ in range(len(backlog)):
                backlog.first()
                backlog.pop()  # and the heaps still name them
                backlog.push(bytes(size))

        used = self.used(work)
        counted = sum(map(sbus.cost, backlog))
        assert used <= self.term(max_bus_backlog=counted)

    def test_recent_keys(self) -> None:
        """[LIMIT-4] Long ones, with many receivers."""
        bus, client = self.bus()
        for uid in range(sbus.RECENT_RECEIVERS_MAX):
            holder = bus.open(sbus.Credentials(100, uid, 1), None)
            bus.subscribe(holder, b"")

        def work() -> None:
            for number in range(sbus.RECENT_KEYS_MAX):
                key = b"%09d/" % number * 25
                bus.handle(client, b"", publish(key))
                for receiver in bus.touched:
                    receiver.outbox = []
                bus.touched.clear()

        assert self.used(work) <= self.NOTHING.memory_bytes_max()


MEBIBYTE = 1 << 20


def kibibytes(pid: int, what: str) -> int:
    """Return a number that the kernel keeps on a process, such as VmRSS."""
    text = Path(f"/proc/{pid}/status").read_text("ascii")
    match = re.search(rf"^{what}:\s+(\d+) kB$", text, re.M)
    assert match
    return int(match[1])


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
        for number in range(either(20, 2)):
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
    """What the clients of a user make grow has a bound, and is freed.

    The process keeps for the next flood what it has had for the last one.
    """

    pytestmark = SOAK

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
                    self.watch(bus, either(30, 0.4), record_property)
                wait_for(lambda: descriptors(bus) <= before)
            assert kibibytes(pid, "VmHWM") << 10 <= bound
            wait_for(lambda: self.is_empty(bus))

    def is_empty(self, bus: RealBus) -> bool:
        """Return whether a bus has said that it has no clients."""
        bus.process.send_signal(signal.SIGUSR1)
        return "stats users=0 clients=0 backlog_bytes=0 " in bus.log()

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
                self.watch(bus, either(30, 0.4), lambda *_: None)
            most = kibibytes(bus.process.pid, "VmHWM") << 10
            assert most <= base + self.SPARE + self.QUOTA * 12 // 10

    def test_no_memory_is_left(self, directory: Path) -> None:
        """[CONN-12] [RUN-12] Of as much as it can start with, or of more."""
        started = 0
        for mebibytes in [*range(16, 64, either(1, 12)), 80, 104, 128]:
            size = mebibytes * MEBIBYTE
            try:
                started += is_served_in(directory, size)
            except AssertionError as error:
                what = f"in {mebibytes} MiB: {error}"
                raise AssertionError(what) from error
        assert started > 3

    @pytest.mark.usefixtures("small_heap")
    @pytest.mark.parametrize("mode", choices(b"blocking/"))
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
            assert kernel.bus.accounts.used[sbus.BACKLOG_BYTES] <= size
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
                end = time.monotonic() + either(60, 1)
                while time.monotonic() < end:
                    pair.talk(1)
            assert kibibytes(bus.process.pid, "VmHWM") <= base + (24 << 10)
