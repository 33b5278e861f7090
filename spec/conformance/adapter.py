"""A client that runs as a process: it is told what to do, line by line.

A command and its answer are a word and its texts, parted by single spaces.
A text is hexadecimal digits, two for each byte, or '-' if it is empty.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .conversation import Failure
from .examples import escape
from .server import describe_end

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


class Adapter:
    """A client that runs; commands are written while anything is awaited."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        with log.open("wb") as file:
            try:
                self._process = subprocess.Popen(
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
        assert self._process.stdin and self._process.stdout
        self._log = log
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._unwritten = b""
        self._unread = b""
        self._is_over = False

    def tell(self, command: Line) -> None:
        """Have the client do something; its answer comes later."""
        self._unwritten += command.encode()

    def answer(self, seconds_max: float) -> Line | None:
        """Return the next answer, or None if there is none in time.

        Raises: Failure if it is malformed, or the client has ended.
        """
        if not self.wait(seconds_max):
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return parse_answer(line)

    def wait(self, seconds_max: float, other: int = -1) -> bool:
        """Return whether there is an answer in time.

        If another descriptor is given, that is waited for instead.
        Raises: Failure if the client has ended before.
        """
        end = time.monotonic() + seconds_max
        while other >= 0 or b"\n" not in self._unread:
            left = max(0.0, end - time.monotonic())
            ready = self._take_turn(other, 0 if self._is_over else left)
            if other in ready:
                break
            if self._is_over:
                raise Failure(f"the client {self._end()}")
            if len(self._unread) > LINE_BYTES_MAX:
                raise Failure("the client answers without end")
            if not ready and not left:
                return False
        return True

    def _take_turn(self, other: int, seconds_max: float) -> list[int]:
        """Write and read what can be; return what was ready."""
        output, commands = self._output.fileno(), self._input.fileno()
        readers = [other] * (other >= 0) + [output] * (not self._is_over)
        writers = [commands] * bool(self._unwritten)
        readable, writable, _ = select.select(
            readers, writers, [], seconds_max
        )
        if writable:
            try:
                size = os.write(commands, self._unwritten)
            except BrokenPipeError:  # it has ended, as its output tells
                size = len(self._unwritten)
            self._unwritten = self._unwritten[size:]
        if output in readable:
            got = os.read(output, READ_BYTES_MAX)
            self._unread += got
            self._is_over = not got
        return [*readable, *writable]

    def _end(self) -> str:
        """Return how a client that has closed its output has ended."""
        try:
            how = describe_end(self._process.wait(0.2))
        except subprocess.TimeoutExpired:
            return "has closed its standard output"
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
