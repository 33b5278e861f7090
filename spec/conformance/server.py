"""A server that runs as a process, and connections to it."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .conversation import Failure
from .examples import escape
from .wire import Wire, connect_in_child, connect_socket

START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed
FREEZE_SECONDS_MAX = 0.2  # for what the server has started


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process has started, and so on."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


def state_of(process: int) -> str:
    """Return the letter of a process's state, Z if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text("latin-1")
    except OSError:
        return "Z"
    return stat.rpartition(")")[2].split()[0]


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
        self._is_frozen = False
        self._room: int | None = None  # how many fillers the kernel takes

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
        with contextlib.suppress(OSError):  # no clients of other users, then
            os.chmod(self._path, 0o777)

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
                client = connect_in_child(
                    self._path, self.seconds_max, gid, uid
                )
            else:
                wire = connect_socket(self._path, self.seconds_max)
                client = Wire(wire, self.seconds_max, gid, uid, os.getpid())
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        client.make_way = self.thaw
        return client

    def learn_room(self) -> None:
        """Learn, once, how many fillers the kernel takes for a client.

        The server has no options, and its clients have the default modes.
        Raises: Failure if that cannot be learned.
        """
        if self._room is None:
            with contextlib.closing(self.connect(False, {})) as reader:
                with contextlib.closing(self.connect(False, {})) as helper:
                    self._room = reader.learn_room(helper)

    def fill(self, client: Wire) -> None:
        """Have fillers wait for a client until the kernel takes no more."""
        assert self._room is not None
        client.fill(self.connect(False, {}), self._room)

    def freeze(self) -> None:
        """Stop the server and all that it started, until it is thawed."""
        if self._process is None or self._is_frozen:
            return
        self._signal_group(signal.SIGSTOP)
        self._is_frozen = True
        process = self._process.pid
        os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        end = time.monotonic() + FREEZE_SECONDS_MAX
        for child in descendants(process):
            while state_of(child) in "RSD" and time.monotonic() < end:
                time.sleep(0.0001)  # no event tells of another's child

    def thaw(self) -> None:
        """Let the server go on."""
        if self._is_frozen:
            self._signal_group(signal.SIGCONT)
            self._is_frozen = False

    def _signal_group(self, number: int) -> None:
        """Send a signal to the server and all that it started."""
        assert self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def fault(self) -> str:
        """Return what is wrong with the server if it serves no more."""
        assert self._process
        self.thaw()
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
        self.thaw()
        self._signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.seconds_max)
        self._signal_group(signal.SIGKILL)
        process.wait()
        os.unlink(self._path + ".log")
        self._process = None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()
