"""Servers that are started as their users do, and what is in their way."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import sbus
from processes import SBUSD, SECONDS_MAX, run
from real_bus import connect, read_to_end, wait_for

ABSTRACT = "/dev/unix/abstract"
USER = 1234  # one without privileges, where we are root


def refusal(status: int, *arguments: str, **options: Any) -> str:
    """Start a server that must refuse; return the one line that it says."""
    result = run("tests/bed/sbusd.py", *arguments, **options)
    assert (result.status, result.output) == (status, ""), result
    assert re.fullmatch("sbusd: [ -~]{1,292}\n", result.errors), result
    return result.errors


class Forked:
    """A server in a fork of this process, which first prepares itself."""

    def __init__(self, prepare: Callable[[], object], *arguments: str) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                os.dup2(writer, 1)
                os.close(reader)
                os.close(writer)
                prepare()
                status = sbus.main([*arguments])
            finally:
                os._exit(status)
        os.close(writer)
        self._output = os.fdopen(reader, "rb")
        self._status: int | None = None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self.end(signal.SIGKILL)

    def wait(self) -> bytes:
        """Return what it prints, once it serves or has refused to."""
        return read_to_end(self._output)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, unless it has ended; return the exit status."""
        if self._status is None:
            os.kill(self.pid, number)
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        return self._status


def refused_start(prepare: Callable[[], object], *arguments: str) -> None:
    """Start a server that must refuse, once it has prepared itself."""
    with Forked(prepare, *arguments) as server:
        assert server.wait() == b""
        assert server.end() == 1


def drop_privileges() -> None:
    """Become an ordinary user for ever, where we are root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)


def give_to_user(path: Path) -> None:
    """Give a file to the user that drop_privileges makes of us."""
    if os.getuid() == 0:
        os.chown(path, USER, USER)


class Daemon(NamedTuple):
    """A daemon, and what its start has printed."""

    pid: int
    output: str
    errors: str


@contextlib.contextmanager
def daemon(
    directory: Path, *options: str, address: str = "bus", **popen_options: Any
) -> Iterator[Daemon]:
    """Start a daemon with relative paths, and stop it."""
    result = subprocess.run(
        [*SBUSD, "-a", address, "-p", "pid", *options],
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        **{"stderr": subprocess.PIPE, **popen_options},
    )
    assert result.returncode == 0, result
    pid = int((directory / "pid").read_text("ascii"))
    descriptor = os.pidfd_open(pid)
    try:
        yield Daemon(pid, result.stdout, result.stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        has_ended = poll.poll(SECONDS_MAX * 1000)
        assert has_ended, "the daemon does not stop"
        os.close(descriptor)


def serve_as_daemon(directory: Path, prepare: Callable[[], object]) -> None:
    """Have a daemon that prepares itself serve, end, and leave nothing."""
    path, pid_file = directory / "bus", directory / "pid"
    with Forked(prepare, "-a", str(path), "-p", str(pid_file)) as server:
        output = server.wait()
        assert output == b""
        pid = int(pid_file.read_text())
        assert is_served(path)
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: os.listdir(directory) == [])


def is_served(path: Path | bytes) -> bool:
    """Return whether a server answers at an address."""
    try:
        peer = connect(path if isinstance(path, bytes) else str(path))
    except OSError:
        return False
    with peer:
        return peer.fence() == []


def bound(
    path: Path | bytes, kind: int = socket.SOCK_SEQPACKET
) -> socket.socket:
    """Return a Unix-domain socket at an address."""
    wire = socket.socket(socket.AF_UNIX, kind)
    wire.bind(path if isinstance(path, bytes) else str(path))
    return wire


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(os.lstat(path).st_mode)


@contextlib.contextmanager
def occupied(path: Path, kind: str) -> Iterator[None]:
    """Have something at a path, and check that nobody changes it."""
    with contextlib.ExitStack() as stack:
        if kind == "directory":
            path.mkdir()
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("there")
        elif kind == "text":
            path.write_text("1" * 11)  # which is no process's number
        elif kind == "another user's":
            path.touch()
            os.chown(path, 1234, -1)
        else:
            stack.enter_context(bound(path, socket.SOCK_STREAM))
        before = os.lstat(path)
        yield
        assert kind != "text" or path.read_text() == "1" * 11
        after = os.lstat(path)
        assert os.path.samestat(before, after)
        assert before.st_mode == after.st_mode
