"""Servers that are started as their users do, and what is in their way."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import sbus
from fake_kernel import but
from processes import SBUSD, SECONDS_MAX, run
from real_bus import connect, wait_for

ABSTRACT = "/dev/unix/abstract"
DATAGRAM = socket.SOCK_DGRAM


def refusal(status: int, *arguments: str, **options: Any) -> str:
    """Start a server that must refuse; return the one line that it says."""
    result = run("tests/bed/sbusd.py", *arguments, **options)
    assert (result.status, result.output) == (status, ""), result
    assert re.fullmatch("sbusd: [ -~]{1,292}\n", result.errors), result
    return result.errors


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[IO[bytes]]:
    """Start a server with streams that RealBus does not have; give stdout."""
    process = subprocess.Popen(
        [*SBUSD, *arguments], stdout=subprocess.PIPE, **options
    )
    assert process.stdout
    with process.stdout as output:
        try:
            yield output
        finally:
            end(process)


@contextlib.contextmanager
def notifying(
    directory: Path, *arguments: str, **options: Any
) -> Iterator[int]:
    """Start a server whose output tells nothing; give its process id."""
    with new_unix_socket(directory / "notify", DATAGRAM) as notified:
        notified.settimeout(SECONDS_MAX)
        process = subprocess.Popen(
            [*SBUSD, *arguments],
            env={**os.environ, "NOTIFY_SOCKET": f"{directory}/notify"},
            **options,
        )
        try:
            assert notified.recv(100)
            yield process.pid
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server; it must end well."""
    process.terminate()
    try:
        assert process.wait(SECONDS_MAX) == 0
    finally:
        process.kill()


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
    popen_options.setdefault("stderr", subprocess.PIPE)
    result = subprocess.run(
        [*SBUSD, "-a", address, "-p", "pid", *options],
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        **popen_options,
    )
    assert result.returncode == 0, result
    pid = int((directory / "pid").read_text("ascii"))
    descriptor = os.pidfd_open(pid)
    try:
        yield Daemon(pid, result.stdout, result.stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        wait_for_end(descriptor)


def wait_for_end(descriptor: int) -> None:
    """Return once a process, given by its descriptor, has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(SECONDS_MAX * 1000), "the daemon does not stop"
    os.close(descriptor)


def is_served(path: Path | bytes) -> bool:
    """Return whether a server answers at an address."""
    try:
        peer = connect(path if isinstance(path, bytes) else str(path))
    except OSError:
        return False
    with peer:
        return peer.fence() == []


def new_unix_socket(
    path: Path | bytes | None = None, kind: int = socket.SOCK_SEQPACKET
) -> socket.socket:
    """Return a socket, bound if a path is given."""
    wire = socket.socket(socket.AF_UNIX, kind)
    if path is not None:
        wire.bind(path if isinstance(path, bytes) else str(path))
    return wire


def told_of(**changes: int) -> str:
    """Return what a start line tells of limits, memory, and the kernel."""
    limits = sbus.Limits(**changes)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    max_clients = min(limits.max_clients, hard - sbus.DESCRIPTORS_KEPT)
    limits = but(limits, max_clients=max_clients)
    told = ""
    for name, value in vars(limits).items():
        if value != getattr(sbus.Limits(), name):
            told += f" {sbus.option_of(name)[2:]}={value}"
    told += f" memory<={limits.memory_bytes_max() >> 20}MiB"
    with new_unix_socket() as wire:
        if not sbus.refuse_descriptors(wire):
            told += "; a client may make the bus wait for its descriptors"
    return told


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(os.lstat(path).st_mode)


def stand_still(pid: int) -> None:
    """Stop a process, and return once it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


@contextlib.contextmanager
def occupied(path: Path, what: str) -> Iterator[None]:
    """Put something at a path, and see that nobody visits or changes it."""
    kinds = {
        "stream server": socket.SOCK_STREAM,
        "datagram server": DATAGRAM,
        "silent socket": socket.SOCK_SEQPACKET,
    }
    wire = None
    if what == "file":
        path.write_text("content")
    elif what == "directory":
        path.mkdir()
    elif what == "FIFO":
        os.mkfifo(path)
    elif what.startswith("link"):
        path.symlink_to("there")
        if "stale" in what:
            new_unix_socket(path.parent / "there").close()
    else:
        wire = new_unix_socket(path, kinds[what])
        wire.setblocking(False)
        if what == "stream server":
            wire.listen()
    before = os.lstat(path)
    yield
    after = os.lstat(path)
    assert os.path.samestat(before, after)
    assert before.st_mode == after.st_mode
    assert before.st_mtime_ns == after.st_mtime_ns
    if wire:
        with wire:
            visited = select.select([wire], [], [], 0)[0]
            assert what == "silent socket" or not visited
