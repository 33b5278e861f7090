"""A kernel that does as it is told.

FakeKernel runs the server's own loop on fake sockets, so that a test can say
how many packets a receiver has room for, what the clock shows, and how long
each call takes.
"""

from __future__ import annotations

import argparse
import errno
import json
import socket
import struct
from collections import deque
from pathlib import Path
from selectors import SelectorKey
from typing import Any

import sbus
from packets import publish

OWNER = 500  # the bus owner of a FakeKernel
ROUNDS_MAX = 10_000  # with something to do, before a test calls it spinning


class FakeWire:
    """A client's socket as the server sees it, and the client behind it."""

    def __init__(
        self, kernel: Any, number: int, credentials: sbus.Credentials
    ) -> None:
        self.kernel = kernel  # whose clock goes on
        self.credentials = credentials
        self.incoming: deque[bytes] = deque()  # sent, not read by the server
        self.taken: deque[bytes] = deque()  # for the client, not read by it
        self.room: int | None = None  # packets that may wait in taken
        self.failures: deque[OSError] = deque()  # of the next sends
        self.ended = False  # the client has closed, or will send no more
        self.reset = False  # the next call fails with ECONNRESET
        self.is_silent = False  # no event tells of room
        self.deaf = False  # the client has shut down its reading side
        self.closed = False  # by the server
        self.send_buffer_bytes = 212_992
        self.passes_rights = True  # clients may send descriptors
        self.is_passing_credentials = False
        self.recv_seconds = 0.0  # that it takes to receive a packet
        self.send_seconds = 0.0
        self.number = number

    # What the server calls

    def fileno(self) -> int:
        return self.number

    def recv_into(self, buffer: Any, size: int, flags: int, /) -> int:
        assert flags == socket.MSG_TRUNC
        if not self._wait_for_input():
            return 0
        packet = self.incoming.popleft()
        self.kernel.now += self.recv_seconds
        count = min(len(packet), len(buffer))
        buffer[:count] = packet[:count]
        return len(packet)

    def recvmsg(
        self, size: int, space: int, flags: int, /
    ) -> tuple[bytes, list[str], int, None]:
        assert (size, flags) == (0, socket.MSG_PEEK)
        assert space == socket.CMSG_SPACE(12) and self.is_passing_credentials
        is_packet = self._wait_for_input()
        return b"", ["credentials"] if is_packet else [], 0, None

    def send(self, packet: Any, /) -> int:
        self.kernel.now += self.send_seconds
        if self.failures:
            raise self.failures.popleft()
        self._check()
        if self.deaf:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        if len(packet) + 32 > self.send_buffer_bytes:
            raise OSError(errno.EMSGSIZE, "message too long")
        if not self.has_room():
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.taken.append(bytes(packet))
        return len(packet)

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        if option == sbus.SO_MEMINFO:
            used = sum(len(packet) + 768 for packet in self.taken)
            return struct.pack("9I", 0, 0, used, 0, 0, 0, 0, 0, 0)
        assert option == socket.SO_PEERCRED
        gid, uid, pid = self.credentials
        return struct.pack("iII", pid, uid, gid)

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        if option == socket.SO_SNDBUF:
            self.send_buffer_bytes = 2 * value
        elif option == socket.SO_PASSCRED:
            self.is_passing_credentials = bool(value)
        else:
            assert (option, value) == (sbus.SO_PASSRIGHTS, 0)
            self.passes_rights = False

    def setblocking(self, flag: bool, /) -> None:
        assert flag is False

    def shutdown(self, how: int, /) -> None:
        assert how == socket.SHUT_RDWR
        self.ended = self.deaf = True

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    def _check(self) -> None:
        assert not self.closed, "a call after close"
        if self.reset:
            self.reset = False
            raise ConnectionResetError(errno.ECONNRESET, "reset")

    def _wait_for_input(self) -> bool:
        self._check()
        if not self.incoming and not self.ended:
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        return bool(self.incoming)

    # What the selector asks

    def events(self) -> int:
        """Return what the socket is ready for."""
        events = 0
        if self.incoming or self.ended or self.reset:
            events |= sbus.READ
        if self.has_much_room() or (self.ended and self.deaf):
            events |= sbus.WRITE
        return events

    # What the kernel thinks

    def has_room(self) -> bool:
        """Return whether another packet may wait."""
        return self.room is None or len(self.taken) < self.room

    def has_much_room(self) -> bool:
        """Return whether the kernel reports it: three quarters are free."""
        is_free = self.room is None or len(self.taken) * 4 <= self.room
        return is_free and self.has_room() and not self.is_silent


class FakeListener:
    """The listening socket."""

    def __init__(self) -> None:
        self.waiting: deque[FakeWire] = deque()
        self.failures: deque[OSError] = deque()  # of the next accepts
        self.closed = False

    def fileno(self) -> int:
        return 3

    def accept(self) -> tuple[FakeWire, None]:
        if self.failures:
            raise self.failures.popleft()
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "nobody waits")
        return self.waiting.popleft(), None

    def events(self) -> int:
        """Return what the socket is ready for."""
        return sbus.READ if self.waiting or self.failures else 0


class FakeSelector:
    """A level-triggered selector over fake sockets."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel  # whose clock goes on while nothing is ready
        self.keys: dict[Any, SelectorKey] = {}
        self.timeouts: list[float] = []  # for which it was asked

    def register(self, fileobj: Any, events: int, data: Any) -> None:
        assert events and not fileobj.closed and fileobj not in self.keys
        self.keys[fileobj] = SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> None:
        del self.keys[fileobj]

    def ready(self) -> list[tuple[SelectorKey, int]]:
        """Return what would be reported now."""
        assert not any(wire.closed for wire in self.keys), "closed and watched"
        events = {w: w.events() & key[2] for w, key in self.keys.items()}
        return [(self.keys[w], e) for w, e in events.items() if e]

    def select(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        self.timeouts.append(timeout)
        ready = self.ready()
        self.kernel.now += 0.0 if ready else timeout
        return ready


class FakePeer:
    """A client on a fake kernel."""

    def __init__(self, kernel: FakeKernel, wire: FakeWire) -> None:
        self.kernel = kernel
        self.wire = wire

    def post(self, *packets: bytes) -> None:
        """Send packets; the server handles them later."""
        self.wire.incoming.extend(packets)

    def send(self, *packets: bytes) -> None:
        """Send packets, and let the server handle them."""
        self.post(*packets)
        self.kernel.run()

    def read(self, count: int | None = None) -> list[bytes]:
        """Take packets, all if not said how many; let the server go on."""
        taken = self.wire.taken
        size = len(taken) if count is None else count
        packets = [taken.popleft() for _ in range(size)]
        self.kernel.run()
        return packets

    def read_all(self) -> list[bytes]:
        """Take packets until no more come."""
        packets: list[bytes] = []
        while self.wire.taken:
            packets += self.read()
        return packets

    def close(self) -> None:
        """Close the socket, as a client does."""
        self.wire.ended = True
        self.kernel.run()

    @property
    def client(self) -> sbus.Client:
        """What the bus knows of this client."""
        clients = self.kernel.bus.clients
        return next(client for client in clients if client.wire is self.wire)

    @property
    def stats(self) -> dict[str, Any]:
        """What the bus would answer if this client asked for `stats`."""
        return stats_of(self.client)

    @property
    def waiting(self) -> int:
        """How many bytes wait in this client's backlog."""
        return int(self.stats["backlog_bytes"])

    @property
    def paused(self) -> bool:
        """Whether the server does not read from this client."""
        key = self.kernel.selector.keys.get(self.wire)
        return not self.wire.closed and not (key and key.events & sbus.READ)


class FakeKernel:
    """A server on fake sockets and a fake clock."""

    wire_kind = FakeWire
    listener_kind = FakeListener
    selector_kind = FakeSelector

    def __init__(self, *arguments: str, **options: Any) -> None:
        """Start a server with options, also by name as in max_backlog=1."""
        self.now = 0.0
        self.numbers = iter(range(10, 1 << 30))
        self.listener = self.listener_kind()
        self.selector = self.selector_kind(self)
        self.bus = sbus.Bus(options_of(*arguments, **options), OWNER)
        self.server = sbus.Server(
            self.bus, self.listener, self.selector, self.clock
        )

    def clock(self) -> float:
        """Return the time, in seconds."""
        return self.now

    def knock(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Have a client wait for being accepted."""
        number = next(self.numbers)
        pid = 4000 + number if pid is None else pid
        credentials = sbus.Credentials(gid, uid, pid)
        peer = FakePeer(self, self.wire_kind(self, number, credentials))
        self.listener.waiting.append(peer.wire)
        return peer

    def connect(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Connect a client."""
        peer = self.knock(uid, gid, pid)
        self.run()
        return peer

    def subscriber(
        self, *modes: bytes, room: int | None = None, uid: int = 1000
    ) -> FakePeer:
        """Connect a subscriber to `k`, with room for so many packets."""
        peer = self.connect(uid=uid)
        peer.send(b"SUB k", *[b"CMSG " + mode for mode in modes])
        peer.wire.room = room
        return peer

    def run(self) -> None:
        """Let the server work until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            self.server.round(0)
            if not self.selector.ready():
                return
        raise AssertionError("the server spins")

    def wait(self, seconds: float) -> None:
        """Let time pass in steps of a second."""
        rounds = int(seconds) + 1
        for _ in range(rounds):
            self.now += seconds / rounds
            self.run()


def stats_of(client: sbus.Client) -> dict[str, Any]:
    """Return what the bus would answer if a client asked for `stats`."""
    stats = json.loads(sbus.stats_of(client))
    assert isinstance(stats, dict)
    return stats


def start_journal(
    kernel: FakeKernel, path: Path, payloads: bool = False
) -> sbus.Journal:
    """Have a server write a trace; return what is to be closed in the end."""
    changes = {"trace": str(path), "trace_payload": payloads}
    options = but(kernel.bus.options, **changes)
    kernel.bus.journal = sbus.Journal(options, "/run/bus")
    return kernel.bus.journal


def options_of(*arguments: str, **options: Any) -> argparse.Namespace:
    """Return what the server makes of options, some of them by name."""
    more = list(arguments)
    for name, value in options.items():
        for word in value if isinstance(value, list) else [value]:
            more.append("--" + name.replace("_", "-"))
            more += [] if word is True else [str(word)]
    return sbus.parse_options(more)


def but(options: argparse.Namespace, **others: Any) -> argparse.Namespace:
    """Return options of which some are others."""
    return argparse.Namespace(**{**vars(options), **others})


def cost(packets: int = 1, payload_bytes: int = 1) -> int:
    """Return what packets with the key `k` count for in a backlog."""
    size = len(publish(b"k")) + payload_bytes + sbus.PACKET_OVERHEAD_BYTES
    return packets * size
