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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .conversation import Failure
from .counts import require_counts
from .examples import escape
from .wire import Unanswered, Wire, connect

START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed
LOG_SHOWN_MAX = 55  # characters of a line, as a screen has 80


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process has started, and so on."""
    threads = f"/proc/{process}/task"
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(threads):
            with open(f"{threads}/{thread}/children") as file:
                children = map(int, file.read().split())
            for child in children:
                yield child
                yield from descendants(child)


def states(process: int) -> set[str]:
    """Return the states of a process's threads, as letters; none if ended."""
    codes = set()
    for file in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            codes.add(file.read_text("latin-1").rpartition(")")[2].split()[0])
    return codes


def is_stopped(process: int) -> bool:
    """Return whether a process has ended or is stopped."""
    return not states(process) & {"R", "S", "D"}


def limit(process: int, kind: int, maximum: int) -> None:
    """Set a limit of a process that runs, unless it has ended."""
    with contextlib.suppress(OSError):
        resource.prlimit(process, kind, (maximum, maximum))


def delayed_seconds() -> float:
    """Return how long this process could have run, and had no processor."""
    with contextlib.suppress(OSError):  # not each kernel tells
        words = Path("/proc/self/schedstat").read_text().split()
        return int(words[1]) / 1e9
    return 0.0


def busy_time() -> float:
    """Return the time, without that in which we had no processor."""
    return time.monotonic() - delayed_seconds()


class Program:
    """A program that a command starts, as often as it takes."""

    def __init__(self, command: str, seconds_max: float) -> None:
        self._words = shlex.split(command)
        self.seconds_max = seconds_max
        self._directory = tempfile.TemporaryDirectory(prefix="sbus-")
        self.directory = self._directory.name
        os.chmod(self.directory, 0o755)  # for other users
        self._log = f"{self.directory}/log"
        Path(self._log).touch()
        self._log_start = 0  # where the part begins that is told
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, address: str, *options: str, **more: Any) -> None:
        """Start it again, as Popen does; raise Failure if that fails.

        An argument that is an empty address is left out.
        """
        self.stop()
        left_out = () if address else ("{address}",)
        words = [word for word in self._words if word not in left_out]
        words += options
        words = [word.replace("{address}", address) for word in words]
        if "cwd" in more:  # where the files of its command have other names
            exists, full = os.path.exists, os.path.abspath
            words = [full(word) if exists(word) else word for word in words]
        self._log_start = 0
        with open(self._log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log}
            more = {**streams, "stderr": log, **more}
            try:
                self.process = subprocess.Popen(
                    words, start_new_session=True, **more
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        limit(self.process.pid, resource.RLIMIT_FSIZE, LOG_BYTES_MAX)

    def status(self) -> int | None:
        """Return the exit status if it has ended."""
        return self.process.poll() if self.process else None

    def await_status(self, seconds_max: float) -> int:
        """Return the exit status; raise Failure if there is none in time."""
        assert self.process
        try:
            return self.process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise Failure("the server does not end") from None

    def end(self) -> str:
        """Return how it ended, and its last words, if it did."""
        status = self.status()
        if status is None:
            return ""
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed: {signal.strsignal(-status) or -status}"
        return how + self.log()

    def log(self) -> str:
        """Return what last_words() has, as the end of a line."""
        words = " / ".join(self.last_words())
        return f": {words}" if words else ""

    def last_words(self) -> list[str]:
        """Return what it wrote since forget_words(), printable and short.

        Of many lines the first two and the last two are told: a sanitizer
        gives the cause first, Python gives it last.
        """
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().splitlines()
        if len(lines) > 4:
            lines[2:-2] = [b"..."]
        return [escape(line.strip())[:LOG_SHOWN_MAX] for line in lines]

    def forget_words(self) -> None:
        """Have last_words() leave out what it has written until now."""
        self._log_start = os.path.getsize(self._log)

    def log_lines(self) -> list[bytes]:
        """Return the lines that it wrote."""
        return Path(self._log).read_bytes().splitlines(keepends=True)

    def send_signal(self, number: int) -> None:
        """Send a signal to it and all that it started."""
        assert self.process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Stop it and all that it started, and forget its log."""
        if self.process is None:
            return
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.send_signal(number)
        with contextlib.suppress(Failure):
            self.await_status(self.seconds_max)
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None
        os.truncate(self._log, 0)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()


class ServerProcess(Program):
    """A server that a command starts, as often as it takes."""

    def __init__(self, command: str, seconds_max: float) -> None:
        super().__init__(command, seconds_max)
        self.start_seconds_max = START_SECONDS_MAX
        self._count = 0
        self.path = ""  # where the server listens
        self.name: str | bytes = ""  # what clients connect to
        self._is_frozen = False
        self.wire_kind = Wire
        self.room = 0  # how many fillers the kernel takes; see learn_room

    @property
    def processes(self) -> list[int]:
        """The server, and all that it has started, if the kit did."""
        if self.process is None:
            return []
        return [self.process.pid, *descendants(self.process.pid)]

    @property
    def is_instrumented(self) -> bool:
        """Whether --timeout-scale says so; its memory then tells little."""
        return self.start_seconds_max > START_SECONDS_MAX

    def is_busy(self) -> bool:
        """Return whether one of its threads has a processor, or lacks one."""
        return any("R" in states(process) for process in self.processes)

    def another(self, *left_out: str) -> ServerProcess:
        """Return what starts such a server, without some words."""
        words = [word for word in self._words if word not in left_out]
        other = ServerProcess(shlex.join(words), self.seconds_max)
        other.start_seconds_max = self.start_seconds_max
        return other

    def has_word(self, *words: str) -> bool:
        """Return whether one of some words is in the command."""
        return not {*words}.isdisjoint(self._words)

    def start(self, path: str = "", *options: str, **more: Any) -> None:
        """Start a server anew; raise Failure if it does not serve."""
        self.launch(path, *options, **more)
        end, wrong = time.monotonic() + self.start_seconds_max, ""
        while time.monotonic() < end and self.status() is None:
            try:
                return self._probe()
            except Failure as failure:
                wrong = f"does not serve: {failure}"
                if isinstance(failure, Unanswered):
                    wrong += " (for a server that grows there is --stage)"
            time.sleep(0.005)  # no event tells of a foreign server
        raise Failure(f"the server {self.end() or wrong + self.log()}")

    def launch(self, path: str = "", *options: str, **more: Any) -> None:
        """Start a server, after the end of any other."""
        self._is_frozen = False
        self.name = self.path = path or self.new_path()
        self.run(self.path, *options, **more)

    def new_path(self) -> str:
        """Return a path at which nothing is."""
        self._count += 1
        return f"{self.directory}/{self._count}"

    def connect(self, credentials: Mapping[str, int] | None = None) -> Wire:
        """Return a new client, a process of its own if it has credentials."""
        how = self.seconds_max, credentials, self.wire_kind
        try:
            client = connect(self.name, *how)
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        client.make_way = self.thaw
        return client

    @contextlib.contextmanager
    def patience(self, factor: float) -> Iterator[None]:
        """Give the server so many times as long to answer new clients."""
        self.seconds_max *= factor
        try:
            yield
        finally:
            self.seconds_max /= factor

    def learn_room(self) -> None:
        """Learn what the kernel takes for a client in the first modes."""
        closing = contextlib.closing
        with closing(self.connect()) as one, closing(self.connect()) as other:
            self.room = one.learn_room(other)

    def fill(self, client: Wire) -> None:
        """Have fillers wait for a client until the kernel takes no more."""
        client.fill(self.connect(), self.room)

    def freeze(self) -> None:
        """Stop the server and all that it started, until it is thawed."""
        if self.process is None:
            return
        self._is_frozen = True
        self.send_signal(signal.SIGSTOP)
        kinds = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # it has ended
            os.waitid(os.P_PID, self.process.pid, kinds)
        end = time.monotonic() + self.seconds_max
        while not all(map(is_stopped, self.processes)):
            if time.monotonic() > end:
                break
            time.sleep(0.0001)  # no event tells of another's child

    def thaw(self) -> None:
        """Let the server go on."""
        if self._is_frozen:
            self.send_signal(signal.SIGCONT)
            self._is_frozen = False

    def wait(self, seconds: float) -> None:
        """Let time pass, and then until the server rests.

        Raises: Failure if it never does [CONN-21]
        """
        time.sleep(seconds)
        end = time.monotonic() + self.seconds_max
        while self.is_busy():
            if time.monotonic() > end:
                why = "it never rests, though every client waits"
                raise Failure(why, "CONN-21")
            time.sleep(0.005)  # no event tells of it

    def fault(self) -> str:
        """Return what is wrong with the server if it no longer serves."""
        self.thaw()
        try:
            self._probe()
        except Failure as failure:
            if self.process:
                with contextlib.suppress(Failure):
                    self.await_status(0.2)
            wrong = f"does not serve a new client: {failure}{self.log()}"
            return f"the server {self.end() or wrong}"
        return ""

    def audit(self, clients: Iterable[Wire]) -> None:
        """Raise Failure unless its counts are those of its clients."""
        if self.wire_kind is Wire:  # it answers
            with contextlib.closing(self.connect()) as observer:
                require_counts([*clients], observer)

    def _probe(self) -> None:
        """Connect until a client has had two answers.

        The first may come before the departure of others is handled, and
        a client more may be too many until then.
        Raises: Failure if none has.
        """
        for number in range(5):
            with contextlib.closing(self.connect()) as client:
                client.settle()
                if client.pending() is None:
                    return
            time.sleep(4**number / 1000)  # no event tells of a departure
        raise Failure("it closes every connection")
