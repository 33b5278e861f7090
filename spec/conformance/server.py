"""A server that runs as a process, and connections to it."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence

from .conversation import END, WHOAMI, Failure, describe
from .examples import escape

SEND_BUFFER_BYTES = 1 << 19
READ_BYTES_MAX = 1 << 20
UNREAD_PACKETS_MAX = 10_000  # no example leaves nearly as many to a client
START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed


class Wire:
    """A client of a real server."""

    def __init__(self, wire: socket.socket, gid: int, uid: int, pid: int):
        self.wire = wire
        self.gid, self.uid, self.pid = gid, uid, pid
        self._inbox: deque[bytes] = deque()  # read on the way to an answer
        self._unanswered = 0
        self._is_deaf = False

    def send(self, packet: bytes) -> None:
        """Send a packet."""
        self._unanswered += packet.partition(b"\0")[0] == WHOAMI
        try:
            self.wire.send(packet)
        except BlockingIOError:
            raise Failure("the server does not read in time") from None
        except OSError as error:
            raise Failure(f"cannot send: {error.strerror}") from None

    def settle(self) -> None:
        """Ask, and read up to the answer; it answers all that came before."""
        if self._is_deaf or END in self._inbox:
            return
        with contextlib.suppress(Failure):  # closed: the end is to be read
            self.send(WHOAMI)
        while self._unanswered:
            try:
                packet = self._read()
            except Failure:
                raise Failure(
                    "!/cred/whoami is not answered in time"
                ) from None
            if self._unanswered or packet == END:
                self._inbox.append(packet)
            if packet == END:
                return
            if len(self._inbox) > UNREAD_PACKETS_MAX:
                raise Failure(f"receives {describe(packet)} without end")

    def receive(self) -> bytes:
        """Return the next packet, or END."""
        return self._inbox.popleft() if self._inbox else self._read()

    def _read(self) -> bytes:
        """Read the next packet."""
        for _ in range(2):
            try:
                packet = self.wire.recv(READ_BYTES_MAX)
            except ConnectionResetError:
                continue  # [CONN-14] what was sent comes after it
            except BlockingIOError:
                raise Failure("received nothing in time") from None
            except OSError as error:
                raise Failure(f"cannot receive: {error.strerror}") from None
            self._unanswered -= packet.startswith(WHOAMI + b"\0")
            return packet
        return END

    def pending(self) -> bytes | None:
        """Return what a settled client has received and not read, if any."""
        return self._inbox[0] if self._inbox else None

    def shut(self) -> None:
        """Say that nothing more will be sent."""
        self.wire.shutdown(socket.SHUT_WR)

    def deafen(self) -> None:
        """Say that nothing more will be received."""
        self.wire.shutdown(socket.SHUT_RD)
        self._is_deaf = True

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def set_room(self, count: int) -> None:
        raise NotImplementedError


def connect_socket(path: str, seconds_max: float) -> socket.socket:
    """Return a socket that is connected to a server."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole, part = divmod(seconds_max, 1)
    timeout = struct.pack("ll", int(whole), int(part * 1e6))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        wire.connect(path)
    except OSError:
        wire.close()
        raise
    return wire


def connect_in_child(
    path: str, seconds_max: float, gid: int, uid: int
) -> Wire:
    """Return a client that another process connected.

    It has that process's credentials, although the process has ended.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            hand_over(theirs, path, seconds_max, gid, uid)
        os.waitpid(child, 0)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise ConnectionError(0, f"user {uid} cannot")
    return Wire(socket.socket(fileno=descriptors[0]), gid, uid, child)


def hand_over(
    to: socket.socket, path: str, seconds_max: float, gid: int, uid: int
) -> None:
    """Become another user, connect, pass the socket on, and exit."""
    try:
        if (gid, uid) != (os.getegid(), os.geteuid()):
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        wire = connect_socket(path, seconds_max)
        socket.send_fds(to, [b"x"], [wire.fileno()])
    finally:
        os._exit(0)


class ServerProcess:
    """A server that a command starts, as often as it takes."""

    def __init__(self, command: str, seconds_max: float) -> None:
        self._words = shlex.split(command)
        self.seconds_max = seconds_max
        self.start_seconds_max = START_SECONDS_MAX
        self._directory = tempfile.TemporaryDirectory(prefix="sbus-")
        os.chmod(self._directory.name, 0o755)  # for other users
        self._count = 0
        self._path = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, options: Sequence[str] = ()) -> None:
        """Start a server, after the end of any other.

        Raises: Failure if it does not serve.
        """
        self.stop()
        self._count += 1
        self._path = f"{self._directory.name}/{self._count}"
        words = [word.replace("{address}", self._path) for word in self._words]
        with open(self._path + ".log", "wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*words, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        with contextlib.suppress(OSError):  # it may have ended
            limits = (LOG_BYTES_MAX, LOG_BYTES_MAX)
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, limits)
        self._await(time.monotonic() + self.start_seconds_max)

    def _await(self, end: float) -> None:
        """Return once the server serves."""
        assert self._process
        what = ""
        while time.monotonic() < end and self._process.poll() is None:
            try:
                return self._probe()
            except Failure as failure:
                what = f"does not serve: {failure}"
            time.sleep(0.005)  # no event tells of a foreign server
        raise Failure(f"the server {self._end() or what}{self.log()}")

    def connect(self, is_process: bool, credentials: dict[str, int]) -> Wire:
        """Return a new client, in a process of its own if so asked."""
        gid = credentials.get("gid", os.getegid())
        uid = credentials.get("uid", os.geteuid())
        try:
            if is_process:
                return connect_in_child(self._path, self.seconds_max, gid, uid)
            wire = connect_socket(self._path, self.seconds_max)
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        return Wire(wire, gid, uid, os.getpid())

    def wait(self, seconds: float) -> None:
        raise NotImplementedError

    def fault(self) -> str:
        """Return what is wrong with the server if it serves no more."""
        assert self._process
        try:
            self._probe()
        except Failure as failure:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            what = self._end() or f"does not serve a new client: {failure}"
            return f"the server {what}{self.log()}"
        return ""

    def _probe(self) -> None:
        """Connect until a client has had two answers.

        The first may come before the departure of others is handled, and
        a client more may be too many until then.
        Raises: Failure if none has.
        """
        for _ in range(5):
            with contextlib.closing(self.connect(False, {})) as client:
                client.settle()
                client.settle()
                if client.pending() is None:
                    return
        raise Failure("it closes each connection")

    def _end(self) -> str:
        """Return how the server ended, if it did."""
        assert self._process
        status = self._process.poll()
        if status is not None and status < 0:
            return f"was killed: {signal.strsignal(-status) or -status}"
        return "" if status is None else f"ended with status {status}"

    def log(self) -> str:
        """Return the last lines that the server wrote, made printable."""
        with open(self._path + ".log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            lines = file.read().splitlines()[-5:]
        return ": " + " / ".join(map(escape, lines)) if lines else ""

    def stop(self) -> None:
        """Stop the server and all that it started, and forget its log."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.seconds_max)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.unlink(self._path + ".log")
        self._process = None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()
