"""Tests of how a server starts and ends: daemon, pid file, signals."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from packets import publications, publish
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
)


def stream(pid: int, number: int) -> str:
    """Return where a standard stream of a process leads to."""
    return os.readlink(f"/proc/{pid}/fd/{number}")


class TestReadiness:
    def test_output_ends(self, directory: Path) -> None:
        """[RUN-8] Once the server listens, whether somebody reads or not."""
        with RealBus(directory) as bus:
            connect(bus.path).wire.close()
            assert bus.output == ""
            assert stream(bus.process.pid, 1) == os.devnull
        reader, writer = os.pipe()
        os.close(reader)
        options: Any = {"address": ABSTRACT, "stdout": writer}
        with RealBus(directory, **options) as bus:
            os.close(writer)
            wait_for(lambda: bus.log().count("start ") == 2)
            assert bus.stop() == 0

    @pytest.mark.parametrize("is_abstract", [False, True])
    def test_notification(self, directory: Path, is_abstract: bool) -> None:
        """[RUN-8] READY=1, to a path or an abstract name."""
        name = secrets.token_hex(8)
        where = "@" + name if is_abstract else str(directory / name)
        environment = {**os.environ, "NOTIFY_SOCKET": where}
        address = where.replace("@", "\0").encode("ascii")
        with bound(address, socket.SOCK_DGRAM) as notified:
            notified.settimeout(SECONDS_MAX)
            with RealBus(directory, env=environment) as bus:
                pid = b"MAINPID=%d" % bus.process.pid
                assert notified.recv(100).splitlines() == [b"READY=1", pid]
            with daemon(directory, env=environment) as server:
                assert notified.recv(100).endswith(b"=%d\n" % server.pid)

    @pytest.mark.parametrize("where", ["none", "@none", "x" * 200, "full"])
    def test_nobody_to_notify(self, directory: Path, where: str) -> None:
        """[RUN-8] The server serves all the same, and waits for nobody."""
        full = str(directory / "full")
        with bound(Path(full), socket.SOCK_DGRAM) as deaf:
            with contextlib.suppress(BlockingIOError):
                while True:
                    deaf.sendto(b"x", socket.MSG_DONTWAIT, full)
            where = where.replace("full", full)
            environment = {**os.environ, "NOTIFY_SOCKET": where}
            with RealBus(directory, env=environment):
                assert is_served(directory / "bus")

    @pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
    def test_closed_standard_streams(
        self, directory: Path, closed: Sequence[int]
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
    def test_no_dev_null(self, directory: Path, number: int) -> None:
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

        path, pid_file = directory / "bus", directory / "pid"
        for first in (prepare, prepare_closed):
            with Forked(first, "-a", str(path)) as server:
                assert server.wait() == b""
                with connect(str(path)) as peer:
                    peer.send(b"malformed")
                    assert peer.is_disconnected()
                assert server.end() == 0
            options = ("-a", str(path), "-p", str(pid_file))
            with Forked(first, *options) as server:
                assert server.wait() == b""
                pid = int(pid_file.read_text())
                assert is_served(path)
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda: os.listdir(directory) == [])


class TestDaemon:
    def test_return(self, directory: Path) -> None:
        """[RUN-8] [RUN-10] It serves by then, detached from everything."""
        with daemon(directory, "--trace", "trace", umask=0) as server:
            assert is_served(directory / "bus")
            assert (directory / "pid").read_text() == f"{server.pid}\n"
            for name in ("pid", "trace"):
                assert mode_of(directory / name) == 0o600
            start = f"sbusd: start {directory}/bus pid={server.pid}"
            assert server.output == "" and server.errors.startswith(start)
            for number in range(3):
                assert stream(server.pid, number) == os.devnull
            assert os.readlink(f"/proc/{server.pid}/cwd") == "/"
            assert os.getsid(server.pid) != os.getsid(0)
            os.kill(server.pid, signal.SIGHUP)
            for _ in range(3):  # the first may be in the same round
                assert is_served(directory / "bus")
        assert os.listdir(directory) == ["trace"]

    def test_log_in_a_file(self, directory: Path) -> None:
        """[RUN-8] [RUN-15] It stays open; without a pid file, with -d."""
        path = directory / "log"
        with path.open("wb") as log:
            command = [*SBUSD, "-cda", f"{directory}/bus"]
            assert subprocess.run(command, stderr=log).returncode == 0
        assert is_served(directory / "bus")  # and ends with its only client
        wait_for(lambda: "sbusd: stop\n" in path.read_text())
        assert os.listdir(directory) == ["log"]

    @pytest.mark.parametrize("what", ["live bus", "trace", "full disk"])
    def test_start_that_cannot_work(self, directory: Path, what: str) -> None:
        """[RUN-1] [RUN-8] [ADDR-10] It says so, and leaves nothing."""
        options: dict[str, Any] = {"cwd": directory}
        arguments = ["-a", "bus", "-p", "pid"]
        with ExitStack() as stack:
            if what == "live bus":
                stack.enter_context(RealBus(directory))
            elif what == "trace":
                (directory / "trace").mkdir()
                arguments += ["--trace", "trace"]
            else:
                options["preexec_fn"] = lambda: resource.setrlimit(
                    resource.RLIMIT_FSIZE, (0, 0)
                )
            before = os.listdir(directory)
            line = refusal(1, *arguments, **options)
            names = {"live bus": "bus", "trace": "trace", "full disk": "pid"}
            assert line.startswith(f"sbusd: {names[what]}: ")
            wait_for(lambda: os.listdir(directory) == before)


def dead_process() -> int:
    """Return the process id of a process that has ended."""
    with child_process(lambda: None) as child:
        return child


class TestPidFile:
    @pytest.mark.parametrize(
        "text", ["", "dead", "000dead\n", "1", f"{os.getpid()}\n"]
    )
    def test_what_is_overwritten(self, directory: Path, text: str) -> None:
        """[ADDR-10] An empty file, or a number, whosever it is by now."""
        path = directory / "pid"
        path.write_text(text.replace("dead", str(dead_process())))
        with daemon(directory) as server:
            assert path.read_text() == f"{server.pid}\n"
            path.write_text("")  # it is locked all the same
            refusal(1, "-a", "other", "-p", "pid", cwd=directory)
            assert path.read_text() == ""
            assert is_served(directory / "bus")
        assert not path.exists()

    @pytest.mark.parametrize("text", ["garbage", "1\n2\n", "\n", "1" * 11])
    def test_text_that_is_kept(self, directory: Path, text: str) -> None:
        """[ADDR-10] [RUN-1] Whatever is not the number of a process."""
        path = directory / "pid"
        path.write_text(text)
        refusal(1, "-a", "bus", "-p", "pid", cwd=directory)
        assert path.read_text() == text
        assert os.listdir(directory) == ["pid"]

    @pytest.mark.parametrize("option", ["-p", "--trace"])
    @pytest.mark.parametrize("what", ["directory", "FIFO", "link", "stream"])
    def test_what_is_no_file(
        self, directory: Path, option: str, what: str
    ) -> None:
        """[ADDR-10] [RUN-1] Only a regular file is written to; no link."""
        with occupied(directory / "file", what):
            line = refusal(1, "-a", "bus", option, "file", cwd=directory)
        assert line.startswith("sbusd: file: ")
        assert os.listdir(directory) == ["file"]

    @needs_root
    @pytest.mark.parametrize("option", ["-p", "--trace"])
    def test_file_of_another_user(self, directory: Path, option: str) -> None:
        """[ADDR-10] [RUN-1] It could be read and written by another."""
        path = directory / "file"
        path.touch()
        os.chown(path, 1234, -1)
        line = refusal(1, "-a", "bus", option, str(path), cwd=directory)
        assert line.startswith(f"sbusd: {path}: ")
        assert os.listdir(directory) == ["file"]

    def test_no_locks(
        self, directory: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """[ADDR-10] As on network file systems: it serves, and says so."""

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        def prepare() -> None:
            fcntl.flock = refuse

        path, pid_file = directory / "bus", directory / "pid"
        with Forked(prepare, "-a", str(path), "-p", str(pid_file)) as server:
            assert server.wait() == b""
            pid = int(pid_file.read_text())
            assert is_served(path)
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: os.listdir(directory) == [])
        assert f"{pid_file}: no lock: " in capfd.readouterr().err


class TestFiles:
    @pytest.mark.parametrize("mode", [0o644, 0o660, 0o600])
    def test_mode_of_files_that_were_there(
        self, directory: Path, mode: int
    ) -> None:
        """[TRACE-1] Others can neither read nor write the trace."""
        for name in ("pid", "trace"):
            (directory / name).touch()
            (directory / name).chmod(mode)
        with daemon(directory, "--trace", "trace"):
            assert mode_of(directory / "trace") == 0o600
            assert mode_of(directory / "pid") == mode

    def test_a_refused_start_changes_no_mode(self, directory: Path) -> None:
        """[ADDR-10] The file may be anybody's, as it is not ours."""
        path = directory / "passwd"
        path.write_text("root:x:0:0::/root:/bin/sh\n")
        path.chmod(0o644)
        refusal(1, "-a", "bus", "-p", "passwd", cwd=directory)
        assert mode_of(path) == 0o644

    @needs_root
    def test_mode_that_cannot_be_changed(
        self, directory: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """[TRACE-1] [RUN-1] The line names the file, which stays as it is."""
        directory.chmod(0o777)
        file = directory / "file"
        file.touch()
        file.chmod(0o666)  # root's, which is another than the server's user
        arguments = ("-a", f"{directory}/bus", "--trace", str(file))
        with Forked(drop_privileges, *arguments) as server:
            assert server.wait() == b""
            assert server.end() == 1
        errors = capfd.readouterr().err
        assert errors.startswith(f"sbusd: {file}: ")
        assert errors.count("\n") == 1
        assert os.listdir(directory) == ["file"]
        assert mode_of(file) == 0o666 and file.read_text() == ""

    def test_trace_on_a_full_disk(self, directory: Path) -> None:
        """[RUN-16] The bus goes on; the log says which file is full."""
        trace, size = directory / "trace", 1 << 16  # more than the log has
        trace.write_text(" " * (size - 1) + "\n")

        def prepare() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        options: Any = {"preexec_fn": prepare}
        with RealBus(directory, "--trace", str(trace), **options) as bus:
            assert is_served(directory / "bus")
            assert f" no trace from now on: {trace}: File" in bus.log()
        assert trace.stat().st_size == size


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


class TestSignals:
    def test_at_each_step_of_a_start(self, directory: Path) -> None:
        """[RUN-10] [ADDR-10] A start that is broken off leaves nothing."""
        moments = itertools.count()
        early = itertools.takewhile(
            lambda moment: is_broken_off(directory, moment), moments
        )
        assert len([*early]) > 10

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
    def test_stop(self, directory: Path, name: str) -> None:
        """[RUN-10] [ADDR-10] Status 0, however impatient somebody is."""
        number = signal.Signals[name]

        def heed() -> None:
            signal.signal(number, signal.SIG_DFL)

        with RealBus(directory, preexec_fn=heed) as bus:
            while bus.is_alive():
                bus.process.send_signal(number)
            assert bus.process.returncode == 0
        assert os.listdir(directory) == ["log"]
        assert bus.log().endswith("\nsbusd: stop\n")

    def test_busy_server(self, directory: Path) -> None:
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

    def test_statistics(self, directory: Path) -> None:
        """[CTL-5] A line for each user, and one for all; nothing stops."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"), publish(b"k"))
            peer.fence()
            bus.process.send_signal(signal.SIGUSR1)
            bus.wait_for_log("stats clients=1 ")
            who = f"stats uid={os.getuid()}"
            assert f"{who} clients=1 patterns=1 pattern_bytes=1" in bus.log()
            assert " published=2 delivered=3 " in bus.log()
            assert peer.fence() == []

    def test_other_signals(self, directory: Path) -> None:
        """[RUN-10] What is ignored stays so, as nohup and shells want it."""
        ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

        def ignore() -> None:
            for number in (*ignored, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)

        with RealBus(directory, preexec_fn=ignore) as bus:
            for number in (*ignored, signal.SIGUSR1, signal.SIGWINCH):
                bus.process.send_signal(number)
            freeze(bus)
            thaw(bus)
            assert is_served(directory / "bus")
            assert "stats" not in bus.log()
            bus.process.kill()  # RealBus would end it by SIGTERM
        (directory / "bus").unlink()


class TestEnd:
    def test_backlog(self, directory: Path) -> None:
        """[RUN-12] What was read is delivered after the signal."""
        packets = publications(3_000)
        with RealBus(directory) as bus, bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.send(*packets)
            sender.fence()
            bus.process.send_signal(signal.SIGTERM)
            assert reader.receive_all() == packets
            assert bus.process.wait(SECONDS_MAX) == 0

    def test_reader_that_does_not_read(self, directory: Path) -> None:
        """[RUN-12] It keeps no server, nor one that accepts nobody."""
        with RealBus(directory) as bus, bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.send(*publications(3_000))
            sender.fence()
            few = (40, 40)
            resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, few)
            with bus.clients(80):
                bus.wait_for_log("Too many open files")
                assert bus.stop() == 0
        assert bus.log().endswith("sbusd: stop\n")

    def test_memory_runs_out(self, directory: Path) -> None:
        """[RUN-1] [ADDR-10] One line and exit status 1; nothing is left."""
        limits = ("max-backlog", "max-user-backlog", "max-bus-backlog")
        options = [f"--{limit}=unlimited" for limit in limits]
        with (
            RealBus(directory, *options) as bus,
            bus.clients(2) as (reader, sender),
        ):
            reader.send(b"SUB k")
            reader.fence()
            pages = Path(f"/proc/{bus.process.pid}/statm").read_text().split()
            most = int(pages[0]) * resource.getpagesize() + (64 << 20)
            resource.prlimit(bus.process.pid, resource.RLIMIT_AS, (most, most))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    sender.send(publish(b"k", bytes(200_000)))
            assert bus.process.wait(SECONDS_MAX) == 1
        assert os.listdir(directory) == ["log"]
        start, line = bus.log().splitlines()
        assert "memory" in line

    def test_epoll_has_no_room(self, directory: Path) -> None:
        """[CONN-12] A client that cannot be watched goes alone."""
        path, own = str(directory / "bus"), str(os.getuid())

        class Small(selectors.DefaultSelector):
            def register(self, *arguments: Any) -> selectors.SelectorKey:
                if len(self.get_map()) == 5:  # listener, signals, clients
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().register(*arguments)

        def prepare() -> None:
            selectors.DefaultSelector = Small  # type: ignore[misc]

        packets = publications(2_000)
        with Forked(prepare, "-a", path) as server, ExitStack() as stack:
            server.wait()
            peers = [stack.enter_context(connect(path)) for _ in range(4)]
            reader, sender, third, late = peers
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
            for peer in (reader, sender, third):
                assert peer.fence() == []
            assert late.is_disconnected()
            os.kill(server.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)
            with connect(path) as visitor:
                visitor.send(publish(b"k"))
            os.kill(server.pid, signal.SIGCONT)
            assert reader.receive() == publish(b"k")
            with child_process(lambda: sender.send(*packets)) as child:
                wait_for(lambda: third.stats()["users"][own]["paused"])
                heir = stack.enter_context(connect(path))  # of its place
                assert heir.fence() == []
                heard = reader.fence()
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                assert heard == packets[: len(heard)]
                assert third.fence() == heir.fence() == []
            assert server.end() == 0
