"""The command line of the client, beside a test and on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from processes import ENVIRONMENT, ROOT, SECONDS_MAX, Result, run, started
from real_bus import Listener, Peer, RealBus, wait_for
from sbus_client import Client
from tools import command_line, shared

# Of a program that imports our files, wherever it runs
IMPORTING = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}


def sbus(address: str, *arguments: str, **options: Any) -> Result:
    """Run the command line to its end."""
    options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, **options}
    if "input" in options:
        del options["stdin"]
    return run("tools", "-a", address, *arguments, **options)


def with_file(words: str) -> list[str]:
    """Return a command line with its file: tools, unless it names another."""
    is_full = not words.startswith("sbus_client.py ")
    return ["tools"] * is_full + words.split()


def run_here(*command: str) -> Result:
    """Run a command line in this process; it is not to read its input."""
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    status: Any
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(sys, "argv", [*command])
        patch.setattr(shared, "remarks_are_wanted", True)  # till -q is read
        # Else an error would end the output of this process
        patch.setattr(sbus_client, "discard_output", bool)
        try:
            if command[0] == "sbus_client.py":
                status = sbus_client.main()
            else:
                handler = signal.getsignal(signal.SIGINT)
                status = command_line.run(handler)
        except SystemExit as end:
            status = end.code
    output.seek(0)
    return Result(status, output.read(), errors.getvalue())


def python(*words: str, cwd: Path, path: str = "") -> Result:
    """Run Python in a folder, from which it imports, to its end."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**ENVIRONMENT, "PYTHONPATH": f"{cwd}:{path}"},
        capture_output=True,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def patterns_of(bus: RealBus) -> int:
    """Return how many patterns a server has stored since its start."""
    trace = Path(bus.path).with_name("trace")
    return trace.read_text().count('"ev":"sub"')


def wait_for_patterns(bus: RealBus, count: int) -> None:
    """Return once a server has stored so many patterns."""
    wait_for(lambda: patterns_of(bus) >= count)


def publish_all(address: str, *messages: tuple[str | bytes, bytes]) -> None:
    """Publish messages, and return once they are routed."""
    with Client(address) as client:
        for message in messages:
            client.publish(*message)
        client.sync(SECONDS_MAX)


@contextlib.contextmanager
def subscribed(bus: RealBus) -> Iterator[Peer]:
    """Give a peer that hears what is published."""
    with bus.connect() as peer:
        peer.send(b"SUB ")
        peer.fence()
        yield peer


@contextlib.contextmanager
def served(listener: Listener, *words: str, **options: Any) -> Iterator[Any]:
    """Run a command whose server is the test; give both."""
    with (
        started(listener.path, *words, **options) as process,
        listener.accept() as server,
    ):
        yield process, server


@contextlib.contextmanager
def ready(
    address: str, *words: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that has told by --ready-fd that it is ready."""
    reader, writer = os.pipe()
    words = (words[0], f"--ready-fd={writer}", *words[1:])
    with started(address, *words, pass_fds=[writer], **options) as process:
        os.close(writer)
        with open(reader) as lines:
            text = lines.read()
        assert text == "ready\n"
        yield process


@contextlib.contextmanager
def keeping(bus: RealBus, *words: str) -> Iterator[None]:
    """Run a keeper."""
    with started(bus.path, "keep", *words) as process:
        assert process.stderr
        with Client(bus.path) as client:

            def is_there() -> bool:
                with contextlib.suppress(TimeoutError):
                    return bool(client.request("keep/last", b"", 0.1))
                return False

            wait_for(is_there)
        yield
        process.terminate()


def is_gone(done: Result, address: str) -> bool:
    """Return whether a command ended because the server disconnected it."""
    text = f"sbus: the server at {address} closed the connection: it stopped,"
    text += " or refused this client; its log names pid "
    form = re.escape(text) + "[0-9]+, or counts it among others\n"
    return done.status == 1 and bool(re.fullmatch(form, done.errors))


def handles(pid: int, number: int) -> bool:
    """Return whether a process catches a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\t(\w+)", status)
    assert caught
    return bool(int(caught[1], 16) >> (number - 1) & 1)


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(
        self, *arguments: str, columns: int = 60, rows: int = 8
    ) -> None:
        self.master, slave = pty.openpty()
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(slave)
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools"), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave = slave

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.master, self.slave):
            os.close(file)

    def read(self) -> bool:
        """Add what is printed to the output; return whether there is any."""
        if not select.select([self.master], [], [], 0.01)[0]:
            return False
        self.output += os.read(self.master, 65_536).decode("utf-8")
        return True

    def end(self) -> int:
        """Return the exit status; all that was printed is in the output."""
        wait_for(lambda: not self.read() and self.process.poll() is not None)
        while self.read():
            pass
        return self.process.returncode
