"""A client that runs as a process: it is told what to do, line by line.

A command and its answer are a word and its texts, parted by single spaces.
A text is hexadecimal digits, two for each byte, or '-' if it is empty.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from .conversation import Failure
from .examples import escape
from .processes import held_signals

COMMANDS = {  # and how many texts each has
    "subscribe": 1,
    "unsubscribe": 1,
    "publish": 2,
    "receive": 0,
    "whoami": 0,
    "close": 0,
}
ANSWERS = {"ok": 0, "message": 2, "control": 2, "credentials": 1, "closed": 0}
LINE_BYTES_MAX = 1 << 22
READ_BYTES_MAX = 1 << 16


class Line(NamedTuple):
    """A command, or an answer; the one text of 'error' says why."""

    word: str
    texts: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.word, *map(escape, self.texts)])

    def encode(self) -> bytes:
        """Return the line as it is sent."""
        words = [self.word, *(text.hex() or "-" for text in self.texts)]
        return " ".join(words).encode("ascii") + b"\n"


def parse_answer(line: bytes) -> Line:
    """Return what an adapter has answered.

    Raises: Failure if it is no answer.
    """
    word, *texts = line.decode("latin-1").rstrip("\r\n").split(" ")
    if word == "error":
        return Line(word, (" ".join(texts).encode("latin-1"),))
    with contextlib.suppress(ValueError):
        if len(texts) == ANSWERS.get(word):
            parts = ("" if text == "-" else text for text in texts)
            return Line(word, tuple(map(bytes.fromhex, parts)))
    raise Failure(f"the client answered {escape(line)}, which is no answer")


class Process(Protocol):
    """As much of subprocess.Popen as is needed."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit status, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended."""


class Adapter:
    """A client that runs; commands are written while anything is awaited."""

    def __init__(self, process: Process, log: Path) -> None:
        assert process.stdin and process.stdout
        self._process = process
        self._log = log
        self._input, self._output = process.stdin, process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._unwritten = b""
        self._unread = bytearray()
        self._is_over = False

    def tell(self, command: Line) -> None:
        """Have the client do something; its answer comes later."""
        self._unwritten += command.encode()
        self._write()

    def answer(self, seconds_max: float) -> Line | None:
        """Return the next answer, or None if there is none in time.

        Raises: Failure if it is malformed, or the client has ended.
        """
        end = time.monotonic() + seconds_max
        while b"\n" not in self._unread:
            left = max(0.0, end - time.monotonic())
            self._check()
            if not self._take_turn([], left) and not left:
                return None
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        return parse_answer(line)

    def wait_for(self, other: int, seconds_max: float) -> bool:
        """Return whether another descriptor can be read in time.

        Raises: Failure if the client has ended before.
        """
        end = time.monotonic() + seconds_max
        while True:
            left = max(0.0, end - time.monotonic())
            ready = self._take_turn([other], 0 if self._is_over else left)
            if other in ready:
                return True
            self._check()
            if not ready and not left:
                return False

    def _take_turn(self, others: list[int], seconds_max: float) -> list[int]:
        """Write and read what can be; return what was ready."""
        readers = [*others, *[self._output.fileno()] * (not self._is_over)]
        writers = [self._input.fileno()] * bool(self._unwritten)
        readable, writable, _ = select.select(
            readers, writers, [], seconds_max
        )
        if writable:
            self._write()
        if self._output.fileno() in readable:
            got = os.read(self._output.fileno(), READ_BYTES_MAX)
            self._unread += got
            self._is_over = not got
        return [*readable, *writable]

    def _check(self) -> None:
        """Raise Failure if the client has ended, or says too much."""
        if self._is_over:
            raise Failure(f"the client {self._end()}")
        if len(self._unread) > LINE_BYTES_MAX:
            raise Failure("the client answers without end")

    def _write(self) -> None:
        """Write what the client takes of its commands."""
        try:
            size = os.write(self._input.fileno(), self._unwritten)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has ended, as its output tells
            size = len(self._unwritten)
        self._unwritten = self._unwritten[size:]

    def _end(self) -> str:
        """Return how a client that has closed its output has ended."""
        with held_signals():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            status = self._process.poll()
        if status is None:
            return "has closed its standard output"
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed: {signal.strsignal(-status) or -status}"
        lines = self._log.read_bytes()[-400:].splitlines()[-2:]
        return ": ".join([how, " / ".join(map(escape, lines))]).rstrip(": ")

    def close(self) -> None:
        """End the client and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()


class ClientProcess:
    """A client that a command starts, once for each example."""

    def __init__(self, command: str) -> None:
        self._words = shlex.split(command)

    def start(
        self, address: str, environment: Mapping[str, str], log: Path
    ) -> Adapter:
        """Return a client that connects to an address, or finds it.

        Raises: Failure if it cannot be run.
        """
        words = [word.replace("{address}", address) for word in self._words]
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    words,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        return Adapter(process, log)
