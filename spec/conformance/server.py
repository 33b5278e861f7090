"""A server that runs as a process."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .conversation import Failure
from .examples import escape
from .wire import Wire, connect

START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed
LOG_BYTES_SHOWN = 400
FREEZE_SECONDS_MAX = 0.2  # a process may not be ours to see
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
SANITIZER = " (built with -fsanitize=address it says where)"


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process has started, and so on."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


def is_stopped(process: int) -> bool:
    """Return whether a process has ended, or waits to be told to go on."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text("latin-1")
        return stat.rpartition(")")[2].split()[0] not in ("R", "S", "D")
    return True


def limit(process: int, what: int, most: int) -> None:
    """Set a limit of a process that runs, unless it has ended."""
    with contextlib.suppress(OSError):
        resource.prlimit(process, what, (most, most))


def describe_end(status: int) -> str:
    """Return how a process has ended."""
    if status >= 0:
        return f"ended with status {status}"
    hint = SANITIZER if -status in FAULTS else ""
    return f"was killed: {signal.strsignal(-status) or -status}{hint}"


class ServerProcess:
    """A server that a command starts, as often as it takes."""

    def __init__(self, command: str, seconds_max: float) -> None:
        self._words = shlex.split(command)
        self.seconds_max = seconds_max
        self.start_seconds_max = START_SECONDS_MAX
        self._directory = tempfile.TemporaryDirectory(prefix="sbus-")
        os.chmod(self._directory.name, 0o755)  # for other users
        self._log = f"{self._directory.name}/log"
        self._count = 0
        self.path = ""  # where the server listens
        self.name: str | bytes = ""  # what clients connect to
        self._process: subprocess.Popen[bytes] | None = None
        self._is_frozen = False
        self._was_frozen = False
        self.room = 0  # how many fillers the kernel takes; see learn_room

    @property
    def processes(self) -> list[int]:
        """The server, and all that it has started."""
        assert self._process
        return [self._process.pid, *descendants(self._process.pid)]

    def another(self, *left_out: str) -> ServerProcess:
        """Return what can start a server like this beside it.

        Its command lacks some words.
        """
        words = [word for word in self._words if word not in left_out]
        other = ServerProcess(shlex.join(words), self.seconds_max)
        other.start_seconds_max = self.start_seconds_max
        return other

    def has_word(self, *words: str) -> bool:
        """Return whether one of some words is in the command."""
        return not {*words}.isdisjoint(self._words)

    def start(
        self, options: Sequence[str] = (), path: str = "", **more: Any
    ) -> None:
        """Start a server, after the end of any other, and wait for it.

        Raises: Failure if it does not serve.
        """
        self.launch(options, path, **more)
        end, what = time.monotonic() + self.start_seconds_max, ""
        while time.monotonic() < end and self.status() is None:
            try:
                return self._probe()
            except Failure as failure:
                what = f"does not serve: {failure}"
            time.sleep(0.005)  # no event tells of a foreign server
        raise Failure(f"the server {self._end() or what}{self.log()}")

    def launch(
        self, options: Sequence[str] = (), path: str = "", **more: Any
    ) -> None:
        """Start a server, after the end of any other.

        Further arguments are of subprocess.Popen.
        """
        self.stop()
        self._was_frozen = False
        self.name = self.path = path or self.new_path()
        words = [*self._words, *options]
        words = [word.replace("{address}", self.path) for word in words]
        if "cwd" in more:  # where the files of its command have other names
            exists, full = os.path.exists, os.path.abspath
            words = [full(word) if exists(word) else word for word in words]
        with open(self._log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log}
            more = {**streams, "stderr": log, **more}
            try:
                self._process = subprocess.Popen(
                    words, start_new_session=True, **more
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        limit(self._process.pid, resource.RLIMIT_FSIZE, LOG_BYTES_MAX)

    def new_path(self) -> str:
        """Return a path at which nothing is."""
        self._count += 1
        return f"{self._directory.name}/{self._count}"

    def status(self) -> int | None:
        """Return the server's exit status if it has ended."""
        assert self._process
        return self._process.poll()

    def await_status(self, seconds_max: float) -> int:
        """Wait for the server's end; return its exit status.

        Raises: Failure if it does not end in time.
        """
        assert self._process
        try:
            return self._process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise Failure("the server does not end") from None

    def connect(self, credentials: Mapping[str, int] | None = None) -> Wire:
        """Return a new client, a process of its own if it has credentials."""
        try:
            client = connect(self.name, self.seconds_max, credentials)
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        client.make_way = self.thaw
        return client

    def learn_room(self) -> None:
        """Learn, once, how many fillers the kernel takes for a client.

        The server has no options, and its clients have the default modes.
        Raises: Failure if that cannot be learned.
        """
        with contextlib.ExitStack() as cleanup:
            pair = self.connect(), self.connect()
            for client in pair:
                cleanup.enter_context(contextlib.closing(client))
            self.room = self.room or pair[0].learn_room(pair[1])

    def fill(self, client: Wire) -> None:
        """Have fillers wait for a client until the kernel takes no more."""
        client.fill(self.connect(), self.room)

    def freeze(self) -> None:
        """Stop the server and all that it started, until it is thawed."""
        self._is_frozen = True
        self.send_signal(signal.SIGSTOP)
        end = time.monotonic() + FREEZE_SECONDS_MAX
        while not all(map(is_stopped, self.processes)):
            if time.monotonic() > end:
                break
            time.sleep(0.0001)  # no event tells of another's child

    def thaw(self) -> None:
        """Let the server go on."""
        if self._is_frozen:
            self.send_signal(signal.SIGCONT)
            self._is_frozen = False
            self._was_frozen = True

    def send_signal(self, number: int) -> None:
        """Send a signal to the server and all that it started."""
        assert self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def fault(self) -> str:
        """Return what is wrong with the server if it serves no more."""
        self.thaw()
        try:
            self._probe()
        except Failure as failure:
            with contextlib.suppress(Failure):
                self.await_status(0.2)
            what = self._end() or f"does not serve a new client: {failure}"
            return f"the server {what}{self.log()}"
        return ""

    def _probe(self) -> None:
        """Connect until a client has had two answers.

        The first may come before the departure of others is handled, and
        a client more may be too many until then.
        Raises: Failure if none has.
        """
        for number in range(5):
            with contextlib.closing(self.connect()) as client:
                client.settle()
                client.settle()
                if client.pending() is None:
                    return
            time.sleep(4**number / 1000)  # no event tells of a departure
        raise Failure("it closes each connection")

    def _end(self) -> str:
        """Return how the server ended, if it did."""
        status = self.status()
        when = ", having been stopped (SIGSTOP)" if self._was_frozen else ""
        return "" if status is None else describe_end(status) + when

    def log(self) -> str:
        """Return the last lines that the server wrote, made printable."""
        with contextlib.suppress(FileNotFoundError):  # it was not started
            with open(self._log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOG_BYTES_SHOWN))
                lines = file.read().splitlines()[-5:]
            return ": " + " / ".join(map(escape, lines)) if lines else ""
        return ""

    def log_lines(self) -> list[bytes]:
        """Return the lines that the server wrote."""
        return Path(self._log).read_bytes().splitlines(keepends=True)

    def stop(self) -> None:
        """Stop the server and all that it started, and forget its log."""
        if self._process is None:
            return
        self.thaw()
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(Failure):
            self.await_status(self.seconds_max)
        self.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        os.unlink(self._log)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()
