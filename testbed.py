"""What the tests stand on: a kernel that does as it is told, and real buses.

FakeKernel runs the server's own loop on fake sockets, so that a test can say
how many packets a receiver has room for and what the clock shows.
RealBus runs sbus.py as a process; Peer is a client of either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Callable, NamedTuple

import sbus

HERE = Path(__file__).parent
SECONDS_MAX = 20.0  # nothing that a test waits for takes nearly as long
WHOAMI = b"CMSG !/cred/whoami"


# =============================================================================
# A fake kernel
# =============================================================================


class FakeWire:
    """A client's socket as the server sees it, and the client behind it."""

    def __init__(self, number: int, credentials: sbus.Credentials) -> None:
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
        assert fileobj not in self.keys and events
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
    def paused(self) -> bool:
        """Whether the server does not read from this client."""
        key = self.kernel.selector.keys.get(self.wire)
        return not self.wire.closed and not (key and key.events & sbus.READ)


class FakeKernel:
    """A server on fake sockets and a fake clock."""

    def __init__(
        self,
        limits: sbus.Limits | None = None,
        owner_uid: int = 500,
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
        """Let the server work until nothing is left to do."""
        for _ in range(10_000):
            self.server.round(0)
            if not self.selector.select():
                return
        raise AssertionError("the server spins")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.run()


# =============================================================================
# Real buses
# =============================================================================


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Give a directory with a short name that every user can search."""
    with tempfile.TemporaryDirectory(prefix="sbus-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


class Result(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    output: str
    errors: str


def run(*command: str, **options: Any) -> Result:
    """Run one of our files to its end, with Python."""
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        **options,
    )
    return Result(done.returncode, done.stdout, done.stderr)


class RealBus:
    """A running sbus.py with its socket and its log in a directory."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        address: str | None = None,
        **popen_options: Any,
    ) -> None:
        self.path = str(directory / "bus")
        self.log_path = directory / "log"
        where = self.path if address is None else address
        command = [sys.executable, str(HERE / "sbus.py"), "-a", where]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                **popen_options,
            )
        assert self.process.stdout
        with self.process.stdout as ready:
            self.output = read_to_end(ready).decode("ascii")
        if not self.is_alive():
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"no server: {self.log()}")

    def is_alive(self) -> bool:
        """Return whether the server is alive."""
        return self.process.poll() is None

    def log(self) -> str:
        """Return what the server has logged."""
        return self.log_path.read_text("ascii")

    def wait_for_log(self, text: str) -> None:
        """Return once the log holds *text*."""
        wait_for(lambda: text in self.log())

    def connect(self, uid: int | None = None, gid: int = 0) -> Peer:
        """Connect a client, as another user if *uid* is given."""
        return connect(self.path, uid, gid)

    @contextlib.contextmanager
    def clients(self, count: int) -> Iterator[list[Peer]]:
        """Connect several clients for a while."""
        with contextlib.ExitStack() as peers:
            yield [peers.enter_context(self.connect()) for _ in range(count)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server; return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS_MAX)

    def __enter__(self) -> RealBus:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def read_to_end(file: IO[bytes]) -> bytes:
    """Return what comes out of a pipe until it is closed."""
    end = time.monotonic() + SECONDS_MAX
    text = b""
    while True:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        if not poll.poll(max(0, (end - time.monotonic()) * 1000)):
            raise AssertionError("the server is not ready in time")
        more = os.read(file.fileno(), 4096)
        if not more:
            return text
        text += more


def wait_for(condition: Callable[[], object]) -> None:
    """Return once a condition is true.

    For what no event can be waited for: a file, a process's state.
    """
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class Peer:
    """A client that speaks in raw packets."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        wire.setblocking(True)
        timeout = struct.pack("ll", int(SECONDS_MAX), 0)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def send(self, *packets: bytes) -> None:
        """Send packets."""
        for packet in packets:
            self.wire.send(packet)

    def receive(self) -> bytes:
        """Return the next packet, or nothing at the end."""
        try:
            return self.wire.recv(1 << 20)
        except ConnectionResetError:  # what was sent comes after it
            return self.wire.recv(1 << 20)

    def receive_all(self) -> list[bytes]:
        """Return all packets up to the end."""
        return list(iter(self.receive, b""))

    def fence(self) -> list[bytes]:
        """Return what comes before the answer to a question asked now."""
        return self._ask()[:-1]

    @property
    def path(self) -> bytes:
        """The client's credentials, as in b"!/cred/100/1000/4242"."""
        return self._ask()[-1].partition(b"\0")[2]

    def _ask(self) -> list[bytes]:
        """Ask who we are; return all up to the answer."""
        self.send(WHOAMI)
        packets = [self.receive()]
        while not packets[-1].startswith(WHOAMI + b"\0"):
            assert packets[-1], f"the server closed after {packets}"
            packets.append(self.receive())
        return packets

    def is_disconnected(self) -> bool:
        """Return whether the server closes without another packet."""
        return self.receive() == b""


def connect(path: str | bytes, uid: int | None = None, gid: int = 0) -> Peer:
    """Connect a client, as another user if *uid* is given (root only)."""
    if uid is not None:
        return Peer(connected_by(path, uid, gid))
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        wire.connect(path)
    except OSError:
        wire.close()
        raise
    return Peer(wire)


def connected_by(path: str | bytes, uid: int, gid: int) -> socket.socket:
    """Return a socket that a process of another user connected.

    The kernel keeps that process's credentials although it has ended.
    Raises: PermissionError if the user may not connect.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            number = wire.connect_ex(path)
            socket.send_fds(
                theirs, [struct.pack("i", number)], [wire.fileno()]
            )
            os._exit(0)
        packed, descriptors, _, _ = socket.recv_fds(ours, 4, 1)
        os.waitpid(child, 0)
    wire = socket.socket(fileno=descriptors[0])
    number = struct.unpack("i", packed)[0]
    if number:
        wire.close()
        raise OSError(number, os.strerror(number))
    return wire


@contextlib.contextmanager
def child_process(work: Callable[[], object]) -> Iterator[int]:
    """Have a child process do some work; kill it in the end."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def publish(key: bytes, payload: bytes = b"") -> bytes:
    """Return a publish packet."""
    return b"MSG " + key + b"\0" + payload


def publications(count: int, key: bytes = b"k") -> Sequence[bytes]:
    """Return publish packets with the payloads 0, 1, 2 and so on."""
    return [publish(key, b"%d" % number) for number in range(count)]


ANSWER = WHOAMI + b"\0!/cred/100/1000/4242"
HEAD_BYTES = len(publish(b"k"))  # of a packet with the key `k`


def freeze(bus: RealBus) -> None:
    """Stop a server's process for a while, and return once it stands."""
    bus.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, bus.process.pid, os.WSTOPPED)


def thaw(bus: RealBus) -> None:
    """Let a server's process go on."""
    bus.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def other_user() -> Iterator[None]:
    """Be a user without privileges for a while, if we are root."""
    own = os.geteuid()
    os.seteuid(own or 65534)
    try:
        yield
    finally:
        os.seteuid(own)


# =============================================================================
# Servers that do as the test says
# =============================================================================


def seqpacket() -> socket.socket:
    """Return a new socket of the bus's kind."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two sockets of the bus's kind that are connected."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Listener:
    """A server that does what the test says."""

    def __init__(self, path: str, backlog: int) -> None:
        self.path = path
        self.wire = seqpacket()
        self.wire.settimeout(SECONDS_MAX)
        self.wire.bind(path)
        self.wire.listen(backlog)

    def accept(self) -> Peer:
        """Return the other end of the next client's socket."""
        return Peer(self.wire.accept()[0])


# =============================================================================
# Commands
# =============================================================================

# What a user has: output into a pipe is kept back unless it is flushed
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": ""}


@contextlib.contextmanager
def started(
    address: str, *arguments: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run sbus_client.py beside the test, up to its own end."""
    file = str(HERE / "sbus_client.py")
    with subprocess.Popen(
        [sys.executable, file, "-a", address, *arguments],
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": ENVIRONMENT,
            **options,
        },
    ) as process:
        try:
            yield process
            process.wait(SECONDS_MAX)
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> Result:
    """Return how a command ends that runs beside the test."""
    output, errors = process.communicate(timeout=SECONDS_MAX)
    return Result(process.returncode, output or "", errors)


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Return whether a command has ended."""
    return process.poll() is not None


def gone(address: str) -> str:
    """Return the line of a command that the server has disconnected."""
    what = "has closed the connection: it stopped, or it refused what was"
    what += " sent or this user; its log says why"
    return f"sbus: the server at {address} {what}\n"
