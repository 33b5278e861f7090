"""Real buses: RealBus runs sbus.py as a process, Peer is a client of it, and
Listener a server that does what the test says.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Callable

import pytest

from packets import WHOAMI
from processes import FOLDERS, SBUSD, SECONDS_MAX

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can connect as other users"
)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Give a directory with a short name that every user can search."""
    with tempfile.TemporaryDirectory(prefix="sbus-") as name:
        FOLDERS.append(name)
        os.chmod(name, 0o755)
        yield Path(name)


class RealBus:
    """A running sbus.py with its socket and its log in a directory.

    An empty address stands for none: the server is to find its own.
    """

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
        command = [*SBUSD, *(["-a", where] if where else []), *options]
        with self.log_path.open("ab") as log:
            streams = {"stdout": subprocess.PIPE, "stderr": log}
            self.process = subprocess.Popen(
                command, **{**streams, **popen_options}
            )
        self.output = ""
        try:
            if self.process.stdout:
                with self.process.stdout as ready:
                    self.output = read_to_end(ready).decode("ascii")
            assert self.is_alive(), f"no server: {self.log()}"
        except BaseException:  # an interrupt as well
            self.process.kill()
            self.process.wait()
            raise

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
        if self.is_alive():
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(SECONDS_MAX)
        finally:
            self.process.kill()


def read_to_end(file: IO[bytes]) -> bytes:
    """Return what comes out of a pipe until it is closed."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    text = b""
    while poll.poll(SECONDS_MAX * 1000):
        more = os.read(file.fileno(), 4096)
        if not more:
            return text
        text += more
    raise AssertionError("the server is not ready in time")


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

    def stats(self) -> dict[str, Any]:
        """Return what the server tells of its work."""
        self.send(b"CMSG stats")
        stats = json.loads(self.receive().partition(b"\0")[2])
        assert isinstance(stats, dict)
        return stats

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
    wire = seqpacket()
    try:
        with contextlib.nullcontext() if uid is None else other_user(uid, gid):
            wire.connect(path)
    except OSError:
        wire.close()
        raise
    return Peer(wire)


def freeze(bus: RealBus) -> None:
    """Stop a server's process for a while, and return once it stands."""
    bus.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, bus.process.pid, os.WSTOPPED)


def thaw(bus: RealBus) -> None:
    """Let a server's process go on."""
    bus.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def other_user(uid: int = 65534, gid: int = 65534) -> Iterator[None]:
    """Be a user without privileges for a while, if we are root."""
    if os.geteuid():
        yield
        return
    group = os.getegid()
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


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
