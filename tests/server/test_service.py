"""Tests of how a server starts and ends: daemon, pid file, signals."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packets import publish
from processes import SBUSD, SECONDS_MAX, child_process
from real_bus import RealBus, connect, freeze, needs_root, thaw, wait_for
from servers import (
    ABSTRACT,
    Forked,
    bound,
    daemon,
    drop_privileges,
    is_served,
    mode_of,
    occupied,
    refusal,
    refused_start,
    serve_as_daemon,
)


def stream(pid: int, number: int) -> str:
    """Return where a standard stream of a process leads to."""
    return os.readlink(f"/proc/{pid}/fd/{number}")


# ---- When a server is ready


def test_nobody_reads_the_output(directory: Path) -> None:
    """[RUN-8] The server serves all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    options: Any = {"address": ABSTRACT, "stdout": writer}
    with RealBus(directory, **options) as bus:
        os.close(writer)
        bus.wait_for_log("start ")
        assert bus.stop() == 0


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notification(directory: Path, is_abstract: bool) -> None:
    """[RUN-8] READY=1, to a path or an abstract name."""
    name = secrets.token_hex(8)
    target = "@" + name if is_abstract else str(directory / name)
    environment = {**os.environ, "NOTIFY_SOCKET": target}
    address = target.replace("@", "\0").encode("ascii")
    with bound(address, socket.SOCK_DGRAM) as notified:
        notified.settimeout(SECONDS_MAX)
        with RealBus(directory, env=environment) as bus:
            pid = b"MAINPID=%d" % bus.process.pid
            assert notified.recv(100).splitlines() == [b"READY=1", pid]
        with daemon(directory, env=environment) as server:
            assert notified.recv(100).endswith(b"=%d\n" % server.pid)


@pytest.mark.parametrize("target", ["none", "@none", "x" * 200, "full"])
def test_nobody_to_notify(directory: Path, target: str) -> None:
    """[RUN-8] The server serves all the same, and waits for nobody."""
    full = str(directory / "full")
    with bound(Path(full), socket.SOCK_DGRAM) as deaf:
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.sendto(b"x", socket.MSG_DONTWAIT, full)
        target = target.replace("full", full)
        environment = {**os.environ, "NOTIFY_SOCKET": target}
        with RealBus(directory, env=environment):
            assert is_served(directory / "bus")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(
    directory: Path, closed: Sequence[int]
) -> None:
    """[RUN-8] [RUN-16] No socket takes the place of a stream."""

    def close_them() -> None:
        for descriptor in closed:
            os.close(descriptor)

    with RealBus(directory, "-v", preexec_fn=close_them) as bus:
        wait_for(lambda: is_served(directory / "bus"))
        with bus.connect() as peer:
            peer.send(b"malformed")
            assert peer.receive_all() == []
        for descriptor in closed:
            assert stream(bus.process.pid, descriptor) == os.devnull
    done = subprocess.run(
        [*SBUSD, "-x"], preexec_fn=close_them, timeout=SECONDS_MAX
    )
    assert done.returncode == 2


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_no_dev_null(directory: Path, number: int) -> None:
    """[RUN-8] Streams that lead nowhere need none, closed or not."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and arguments[0] == os.devnull:
            raise OSError(number, os.strerror(number), os.devnull)

    def prepare() -> None:
        sys.addaudithook(refuse)

    def prepare_closed() -> None:
        prepare()
        os.close(0)
        os.close(2)

    path = directory / "bus"
    for first in (prepare, prepare_closed):
        with Forked(first, "-a", str(path)) as server:
            assert server.wait() == b""
            with connect(str(path)) as peer:
                peer.send(b"malformed")
                assert peer.is_disconnected()
            assert server.end() == 0
        serve_as_daemon(directory, first)


# ---- A daemon


@pytest.mark.parametrize("mode", [None, 0o644, 0o660])
def test_return(directory: Path, mode: int | None) -> None:
    """[RUN-8] [RUN-10] The daemon serves by then, detached from all.

    [TRACE-1] [ADDR-10] No other user can read or lock its files.
    """
    files = directory / "pid", directory / "trace"
    for file in files if mode else ():
        file.touch()
        file.chmod(mode or 0)
    with daemon(directory, "--trace", "trace", umask=0) as server:
        assert is_served(directory / "bus")
        assert [*map(mode_of, files)] == [0o600, 0o600]
        assert files[0].read_text() == f"{server.pid}\n"
        start = f"sbusd: start {directory}/bus pid={server.pid}"
        assert server.output == "" and server.errors.startswith(start)
        for number in range(3):
            assert stream(server.pid, number) == os.devnull
        assert os.readlink(f"/proc/{server.pid}/cwd") == "/"


def test_full_disk(directory: Path) -> None:
    """[RUN-1] [RUN-8] [ADDR-10] The daemon says so, and leaves no file."""

    def allow_nothing() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    # In an empty environment nobody writes the coverage of the process
    options: Any = {"cwd": directory, "preexec_fn": allow_nothing, "env": {}}
    line = refusal(1, "-a", "bus", "-p", "pid", **options)
    assert line.startswith("sbusd: pid: ")
    wait_for(lambda: os.listdir(directory) == [])


# ---- The pid file


@pytest.mark.parametrize(
    "words", ["-fa", "-ra", "-a bus -p", "-a bus --trace"]
)
@pytest.mark.parametrize(
    "kind", ["directory", "FIFO", "link", "stream", "another user's", "text"]
)
def test_place_that_is_taken(directory: Path, words: str, kind: str) -> None:
    """[ADDR-8] [ADDR-10] [RUN-1] A line says so, and the file is kept."""
    if kind == "another user's" and (os.getuid() or "bus" not in words):
        pytest.skip("only root has one, and -r replaces a regular file")
    if kind == "text" and "--trace" in words:
        pytest.skip("what was there is kept, and the trace comes after it")
    with occupied(directory / "file", kind):
        line = refusal(1, *words.split(), "file", cwd=directory)
    assert line.startswith("sbusd: file: ")
    assert os.listdir(directory) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF])
def test_no_locks(
    directory: Path, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """[ADDR-8] [ADDR-10] Where files have no locks, the log says so."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def prepare() -> None:
        fcntl.flock = refuse

    serve_as_daemon(directory, prepare)
    errors = capfd.readouterr().err
    for path in (directory, directory / "pid"):
        assert f"{path}: no lock: {os.strerror(number)}\n" in errors


# ---- Modes of files


@needs_root
@pytest.mark.parametrize("option", ["--trace", "-p"])
def test_mode_that_cannot_be_changed(
    directory: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    """[TRACE-1] [ADDR-10] The line names the mode; the file stays."""
    directory.chmod(0o777)
    file = directory / "file"
    file.touch()
    file.chmod(0o666)  # root's, which is another than the server's user
    arguments = ("-a", f"{directory}/bus", option, str(file))
    refused_start(drop_privileges, *arguments)
    errors = capfd.readouterr().err
    assert errors.startswith(f"sbusd: {file}: mode 0666 ")
    assert errors.count("\n") == 1
    assert os.listdir(directory) == ["file"]
    assert mode_of(file) == 0o666 and file.read_text() == ""


def is_broken_off(directory: Path, moment: int) -> bool:
    """Stop a server at a moment; return False if it serves by then."""
    steps = itertools.count()

    def strike(*_: object) -> None:
        if next(steps) == moment:
            os.write(1, b"x")
            os.kill(os.getpid(), signal.SIGTERM)

    arguments = ("-a", f"{directory}/bus", "--trace", f"{directory}/trace")
    with Forked(lambda: sys.addaudithook(strike), *arguments) as server:
        is_early = server.wait() == b"x"
        assert server.end() in (0, -signal.SIGTERM)
    (directory / "trace").unlink(missing_ok=True)
    assert os.listdir(directory) == []
    return is_early


# ---- Signals, and the end


def test_at_each_step_of_a_start(directory: Path) -> None:
    """[RUN-10] [ADDR-10] A start that is broken off leaves nothing."""
    moments = itertools.count()
    early = itertools.takewhile(
        lambda moment: is_broken_off(directory, moment), moments
    )
    assert len([*early]) > 10


def test_busy_server(directory: Path) -> None:
    """[RUN-10] Publishers and questions that never cease hide it not."""
    with RealBus(directory) as bus, bus.connect() as peer:
        server = os.pidfd_open(bus.process.pid)

        def publish_for_ever() -> None:
            with connect(bus.path) as publisher:
                while True:
                    publisher.send(publish(b"busy"))

        def ask_for_ever() -> None:
            with contextlib.suppress(ProcessLookupError):
                while True:
                    signal.pidfd_send_signal(server, signal.SIGUSR1)

        with child_process(publish_for_ever), child_process(ask_for_ever):
            bus.wait_for_log("stats")
            peer.send(b"SUB busy")
            assert peer.receive() == publish(b"busy")
            assert bus.stop() == 0
        os.close(server)
    assert os.listdir(directory) == ["log"]


def test_a_question_that_is_ignored(directory: Path) -> None:
    """[CTL-5] SIGUSR1 asks nothing of a server that is to ignore it."""

    def ignore() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    with RealBus(directory, preexec_fn=ignore) as bus:
        bus.process.send_signal(signal.SIGUSR1)
        freeze(bus)
        thaw(bus)
        assert is_served(directory / "bus")
        assert "stats" not in bus.log()


def test_memory_runs_out(directory: Path) -> None:
    """[RUN-1] [ADDR-10] The server says so, and leaves no socket.

    [TRACE-7] Its backlogs are lost, so its trace has no stop.
    """
    limits = ("max-backlog", "max-user-backlog", "max-bus-backlog")
    options = [f"--{limit}=unlimited" for limit in limits]
    options.append(f"--trace={directory}/trace")
    with (
        RealBus(directory, *options) as bus,
        bus.clients(2) as (reader, sender),
    ):
        reader.send(b"SUB k")
        reader.fence()
        pages = Path(f"/proc/{bus.process.pid}/statm").read_text().split()
        size = int(pages[0]) * resource.getpagesize() + (64 << 20)
        resource.prlimit(bus.process.pid, resource.RLIMIT_AS, (size, size))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                sender.send(publish(b"k", bytes(200_000)))
        assert bus.process.wait(SECONDS_MAX) == 1
    assert sorted(os.listdir(directory)) == ["log", "trace"]
    start, line = bus.log().splitlines()
    assert "memory" in line
    trace = (directory / "trace").read_text()
    assert '"ev":"msg"' in trace and '"ev":"stop"' not in trace
