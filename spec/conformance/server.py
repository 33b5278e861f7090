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
from collections.abc import Sequence
from typing import Any, Callable

from .conversation import Failure
from .examples import escape
from .processes import descendants, held_signals, is_stopped, limit
from .wire import Wire, connect_in_child, connect_socket

START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed
LOG_BYTES_SHOWN = 400
FREEZE_SECONDS_MAX = 0.2  # for what the server has started
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
SANITIZER = " (built with -fsanitize=address it says where)"


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
        self.name: str | bytes = ""  # what clients connect to
        self._process: subprocess.Popen[bytes] | None = None
        self._is_frozen = False
        self._was_frozen = False
        self._room: int | None = None  # how many fillers the kernel takes

    @property
    def path(self) -> str:
        """Where the server listens."""
        return self._path

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
        self,
        options: Sequence[str] = (),
        path: str = "",
        begin: Callable[[], object] = int,
        **more: Any,
    ) -> None:
        """Start a server, after the end of any other, and wait for it.

        Raises: Failure if it does not serve.
        """
        self.launch(options, path, begin, **more)
        self._await(time.monotonic() + self.start_seconds_max)

    def launch(
        self,
        options: Sequence[str] = (),
        path: str = "",
        begin: Callable[[], object] = int,
        **more: Any,
    ) -> None:
        """Start a server, after the end of any other.

        Its process first does what it is to begin with.
        """
        self.stop()
        self._was_frozen = False
        self._path = path or self.new_path()
        self.name = self._path
        words = [*self._words, *options]
        words = [word.replace("{address}", self._path) for word in words]
        if "cwd" in more:  # where the files of its command have other names
            exists, full = os.path.exists, os.path.abspath
            words = [full(word) if exists(word) else word for word in words]
        with open(self._log, "wb") as log, held_signals() as release:
            try:
                self._process = subprocess.Popen(
                    words,
                    **{
                        "stdin": subprocess.DEVNULL,
                        "stdout": log,
                        "stderr": log,
                        "start_new_session": True,
                        "preexec_fn": lambda: (release(), begin()),
                        **more,
                    },
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        limit(self._process.pid, resource.RLIMIT_FSIZE, LOG_BYTES_MAX)

    def new_path(self) -> str:
        """Return a path at which nothing is."""
        self._count += 1
        return f"{self._directory.name}/{self._count}"

    @property
    def _log(self) -> str:
        """The file that the server's output goes to."""
        return f"{self._directory.name}/log"

    def open_to_all(self) -> None:
        """Let other users connect, as clients of examples do."""
        with contextlib.suppress(OSError):
            os.chmod(self._path, 0o777)

    def status(self) -> int | None:
        """Return the server's exit status if it has ended."""
        assert self._process
        with held_signals():
            return self._process.poll()

    def await_status(self, seconds_max: float) -> int:
        """Wait for the server's end; return its exit status.

        Raises: Failure if it does not end in time.
        """
        end = time.monotonic() + seconds_max
        while (status := self.status()) is None:
            if time.monotonic() > end:
                raise Failure("the server does not end")
            time.sleep(0.002)  # as subprocess does
        return status

    def _await(self, end: float) -> None:
        """Return once the server serves."""
        what = ""
        while time.monotonic() < end and self.status() is None:
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
                    self.name, self.seconds_max, gid, uid
                )
            else:
                wire = connect_socket(self.name, self.seconds_max)
                client = Wire(wire, self.seconds_max, gid, uid, os.getpid())
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        client.make_way = self.thaw
        return client

    @property
    def room(self) -> int:
        """How many fillers the kernel takes for a client."""
        assert self._room is not None
        return self._room

    def learn_room(self) -> None:
        """Learn, once, how many fillers the kernel takes for a client.

        The server has no options, and its clients have the default modes.
        Raises: Failure if that cannot be learned.
        """
        if self._room is None:
            closing = contextlib.closing
            with (
                closing(self.connect(False, {})) as reader,
                closing(self.connect(False, {})) as helper,
            ):
                self._room = reader.learn_room(helper)

    def fill(self, client: Wire) -> None:
        """Have fillers wait for a client until the kernel takes no more."""
        client.fill(self.connect(False, {}), self.room)

    def freeze(self) -> None:
        """Stop the server and all that it started, until it is thawed."""
        if self._process is None or self._is_frozen:
            return
        self.send_signal(signal.SIGSTOP)
        self._is_frozen = True
        process = self._process.pid
        os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        end = time.monotonic() + FREEZE_SECONDS_MAX
        for child in descendants(process):
            while not is_stopped(child) and time.monotonic() < end:
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
            with contextlib.closing(self.connect(False, {})) as client:
                client.settle()
                client.settle()
                if client.pending() is None:
                    return
            time.sleep(4**number / 1000)  # no event tells of a departure
        raise Failure("it closes each connection")

    def _end(self) -> str:
        """Return how the server ended, if it did."""
        status = self.status()
        if status is not None and status < 0:
            hint = SANITIZER if -status in FAULTS else ""
            return f"was killed: {signal.strsignal(-status) or -status}{hint}"
        when = ", having been stopped (SIGSTOP)" if self._was_frozen else ""
        return "" if status is None else f"ended with status {status}{when}"

    def log(self) -> str:
        """Return the last lines that the server wrote, made printable."""
        with open(self._log, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES_SHOWN)
            file.seek(start)
            text = file.read()
        whole = text.partition(b"\n")[2] if start else text
        lines = (whole or text).splitlines()[-5:]
        return ": " + " / ".join(map(escape, lines)) if lines else ""

    def log_lines(self) -> list[bytes]:
        """Return the lines that the server wrote."""
        with open(self._log, "rb") as file:
            return file.readlines()

    def stop(self) -> None:
        """Stop the server and all that it started, and forget its log."""
        process = self._process
        if process is None:
            return
        self.thaw()
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(Failure):
            self.await_status(self.seconds_max)
        self.send_signal(signal.SIGKILL)
        process.wait()
        self._process = None
        os.unlink(self._log)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()
