"""A kernel that does as it is told.

FakeKernel runs the server's own loop on fake sockets, so that a test can say
how many packets a receiver has room for and what the clock shows.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sbus
from packets import publish

if TYPE_CHECKING:  # broken servers are started without it, and faster
    import pytest

OWNER = 500  # the bus owner of a FakeKernel, unless told otherwise
ROUNDS_MAX = 60  # with something to do, before a test calls it spinning


class FakeWire:
    """A client's socket as the server sees it, and the client behind it."""

    def __init__(self, number: int, credentials: sbus.Credentials) -> None:
        self.credentials = credentials
        self.incoming: deque[bytes] = deque()  # sent, not read by the server
        self.taken: deque[bytes] = deque()  # for the client, not read by it
        self.room: int | None = None  # packets that may wait in taken
        self.failures: deque[Exception] = deque()  # of the next sends
        self.ended = False  # the client has closed, or will send no more
        self.reset = False  # the next call fails with ECONNRESET
        self.is_silent = False  # no event tells of room
        self.deaf = False  # the client has shut down its reading side
        self.closed = False  # by the server
        self.options: dict[int, int] = {}
        self._number = number

    # What the server calls

    def fileno(self) -> int:
        return self._number

    def recv_into(self, buffer: Any, size: int, flags: int, /) -> int:
        assert flags == socket.MSG_TRUNC and not self.closed
        if self.reset:
            self.reset = False
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if self.incoming:
            packet = self.incoming.popleft()
            count = min(len(packet), len(buffer))
            buffer[:count] = packet[:count]
            return len(packet)
        if self.ended:
            return 0
        raise BlockingIOError(errno.EAGAIN, "nothing to read")

    def recvmsg(self, size: int, room: int, /) -> tuple[bytes, list[str]]:
        had = len(self.incoming)
        self.recv_into(bytearray(size), 0, socket.MSG_TRUNC)
        return b"", ["credentials"] if len(self.incoming) < had else []

    def send(self, packet: Any, /) -> int:
        assert not self.closed
        if self.failures:
            raise self.failures.popleft()
        if self.deaf:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        if self.room is not None and len(self.taken) >= self.room:
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.taken.append(bytes(packet))
        return len(packet)

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert option == socket.SO_PEERCRED
        gid, uid, pid = self.credentials
        return struct.pack("iII", pid, uid, gid)

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        self.options[option] = value

    def setblocking(self, flag: bool, /) -> None:
        assert flag is False

    def shutdown(self, how: int, /) -> None:
        assert how == socket.SHUT_RDWR
        self.ended = self.deaf = True

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    # What the selector asks

    def events(self) -> int:
        """Return what the socket is ready for."""
        events = 0
        if self.incoming or self.ended or self.reset:
            events |= sbus.READ
        # The kernel reports room only when three quarters are free
        waiting = len(self.taken)
        has_room = self.room is None or waiting * 4 <= self.room > waiting
        if has_room and not self.is_silent:
            events |= sbus.WRITE
        return events


class FakeListener:
    """The listening socket."""

    def __init__(self) -> None:
        self.waiting: deque[FakeWire] = deque()
        self.failures: deque[Exception] = deque()  # of the next accepts
        self.closed = False

    def fileno(self) -> int:
        return 3

    def accept(self) -> tuple[FakeWire, None]:
        if self.failures:
            raise self.failures.popleft()
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "nobody waits")
        return self.waiting.popleft(), None

    def close(self) -> None:
        self.closed = True

    def events(self) -> int:
        """Return what the socket is ready for."""
        return sbus.READ if self.waiting or self.failures else 0


class FakeSelector(selectors.BaseSelector):
    """A level-triggered selector over fake sockets."""

    def __init__(self) -> None:
        self.keys: dict[Any, selectors.SelectorKey] = {}
        self.timeouts: list[float | None] = []

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        assert events
        if fileobj.closed:
            raise ValueError("it has no descriptor")
        if fileobj in self.keys:
            raise KeyError(fileobj)
        key = selectors.SelectorKey(fileobj, fileobj.fileno(), events, data)
        self.keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self.keys.pop(fileobj)

    def modify(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        self.timeouts.append(timeout)
        ready = []
        for key in self.keys.values():
            events = key.events & key.fileobj.events()  # type: ignore
            if events:
                ready.append((key, events))
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self.keys


class FakePeer:
    """A client on a fake kernel."""

    def __init__(self, kernel: FakeKernel, wire: FakeWire) -> None:
        self.kernel = kernel
        self.wire = wire

    def send(self, *packets: bytes) -> None:
        """Send packets, and let the server handle them."""
        self.wire.incoming.extend(packets)
        self.kernel.run()

    def read(self, count: int | None = None) -> list[bytes]:
        """Take packets, all if not said how many; let the server go on."""
        taken = self.wire.taken
        packets = [
            taken.popleft()
            for _ in range(len(taken) if count is None else count)
        ]
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
        clients = self.kernel.bus.clients.values()
        return next(client for client in clients if client.wire is self.wire)

    @property
    def stats(self) -> Any:
        """What the bus would answer if this client asked for `stats`."""
        return json.loads(self.kernel.bus.stats(self.client))

    @property
    def paused(self) -> bool:
        """Whether the server does not read from this client."""
        key = self.kernel.selector.keys.get(self.wire)
        return not self.wire.closed and not (key and key.events & sbus.READ)


class FakeKernel:
    """A server on fake sockets and a fake clock."""

    def __init__(
        self,
        limits: sbus.Limits | None = None,
        owner_uid: int = OWNER,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.listener: Any
        self.numbers = iter(range(10, 1 << 30))
        self.listener = FakeListener()
        self.selector = FakeSelector()
        self.bus = sbus.Bus(
            limits or sbus.Limits(),
            owner_uid,
            options.pop("cred_prefix", b""),
            options.pop("strict", False),
        )
        self.server = sbus.Server(
            self.bus,
            self.listener,
            self.selector,
            lambda: self.now,
            processor_clock=lambda: self.now,
            **options,
        )

    def connect(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Connect a client."""
        number = next(self.numbers)
        pid = 4000 + number if pid is None else pid
        credentials = sbus.Credentials(gid, uid, pid)
        peer = FakePeer(self, FakeWire(number, credentials))
        self.listener.waiting.append(peer.wire)
        self.run()
        return peer

    def run(self) -> None:
        """Let the server work until nothing is left to do.

        If it goes on for long, it may be waiting for a user's debts to end.
        """
        for count in range(10_000):
            self.server.round(0)
            is_due = min(self.server._alarms.values(), default=1e9) <= self.now
            is_idle = not self.selector.select() and not is_due
            if is_idle and not self.server._want:
                return
            if count > 100:
                self.now += 0.001
        raise AssertionError("the server spins")

    def wait(self, seconds: float) -> None:
        """Let time pass in rounds that do not look like a stop."""
        rounds = int(seconds) + 1
        for _ in range(rounds):
            self.now += seconds / rounds
            self.run()


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that grows with each call of a function of sbus.py."""
    function, calls = getattr(sbus, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return function(*arguments)

    monkeypatch.setattr(sbus, name, counted)
    return calls


def start_journal(
    kernel: FakeKernel,
    path: Path,
    about: dict[str, str],
    payloads: bool = False,
) -> sbus.Journal:
    """Have a server write a trace; return what is to be closed in the end."""
    trace = sbus.open_regular(str(path), os.O_APPEND)
    kernel.bus.journal = sbus.Journal(trace, about, payloads, False)
    return kernel.bus.journal


def but(limits: sbus.Limits, **other: float) -> sbus.Limits:
    """Return limits of which some are others."""
    return sbus.Limits(**{**vars(limits), **other})


def small(backlog_packets: int, payload_bytes: int = 1) -> sbus.Limits:
    """Return limits with room for so many packets with the key `k`."""
    size = len(publish(b"k")) + payload_bytes + sbus.PACKET_OVERHEAD_BYTES
    return sbus.Limits(max_backlog=backlog_packets * size)


def choices(start: bytes) -> list[bytes]:
    """Return the control packets that begin with a text."""
    return [key for key in sbus.CHOICES if key.startswith(start)]
