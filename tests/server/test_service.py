"""Tests of how a server starts and ends: daemon, pid file, signals."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publications, publish
from processes import ROOT, SECONDS_MAX, child_process, run
from real_bus import (
    RealBus,
    connect,
    freeze,
    needs_root,
    read_to_end,
    thaw,
    wait_for,
)
from servers import (
    ABSTRACT,
    DATAGRAM,
    daemon,
    is_served,
    mode_of,
    new_unix_socket,
    notifying,
    occupied,
    refusal,
    stand_still,
    started,
    told_of,
    wait_for_end,
)
from sizes import IS_SOAK


class TestReadiness:
    def test_end_of_output(self, directory: Path) -> None:
        """[RUN-4] It comes once the server listens, after nothing."""
        path = directory / "bus"
        with started("-a", str(path), stderr=subprocess.DEVNULL) as output:
            assert read_to_end(output) == b""
            connect(str(path)).wire.close()

    def test_output_is_closed_before(self, directory: Path) -> None:
        """[RUN-3] [RUN-4] Nobody reads the address, the server serves."""
        reader, writer = os.pipe()
        os.close(reader)
        streams = {"stdout": writer, "stderr": subprocess.DEVNULL}
        with notifying(directory, "-a", ABSTRACT, **streams) as pid:
            os.close(writer)
            assert os.readlink(f"/proc/{pid}/fd/1") == os.devnull

    def test_useless_option(self, directory: Path) -> None:
        """[ADDR-6] [CONN-2] Whom -u names cannot open a private socket."""
        options = {"-u5": True, "-gu5": False, "-ou5": False, "-g": False}
        for option, is_useless in options.items():
            with RealBus(directory, option) as bus:
                bus.wait_for_log("start")
            says = "-u lets nobody in" in bus.log().splitlines()[-2]
            assert says is is_useless

    @pytest.mark.parametrize("is_abstract", [False, True])
    def test_notification(self, directory: Path, is_abstract: bool) -> None:
        """[RUN-5] READY=1, to a path or an abstract name."""
        name = secrets.token_hex(8)
        where = "@" + name if is_abstract else str(directory / name)
        address = where.replace("@", "\0").encode("ascii")
        with (
            new_unix_socket(address, DATAGRAM) as notified,
            RealBus(
                directory, env={**os.environ, "NOTIFY_SOCKET": where}
            ) as bus,
        ):
            notified.settimeout(SECONDS_MAX)
            lines = notified.recv(100).decode("ascii").splitlines()
            assert lines == ["READY=1", f"MAINPID={bus.process.pid}"]
            assert is_served(directory / "bus")

    def test_notification_of_a_daemon(self, directory: Path) -> None:
        """[RUN-5] [RUN-8] It names the process that serves."""
        where = str(directory / "notify")
        environment = {**os.environ, "NOTIFY_SOCKET": where}
        with (
            new_unix_socket(directory / "notify", DATAGRAM) as notified,
            daemon(directory, env=environment) as server,
        ):
            notified.setblocking(False)
            assert notified.recv(100).endswith(b"=%d\n" % server.pid)

    @pytest.mark.parametrize("where", ["/no/such", "@no-such", "x" * 200])
    def test_nobody_to_notify(self, directory: Path, where: str) -> None:
        """[RUN-5] The server serves all the same."""
        environment = {**os.environ, "NOTIFY_SOCKET": where}
        with RealBus(directory, env=environment):
            assert is_served(directory / "bus")

    def test_full_queue_of_notifications(self, directory: Path) -> None:
        """[RUN-5] The server does not wait for who does not read."""
        where = str(directory / "notify")
        environment = {**os.environ, "NOTIFY_SOCKET": where}
        with (
            new_unix_socket(directory / "notify", DATAGRAM),
            new_unix_socket(directory / "filler", DATAGRAM) as filler,
        ):
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    filler.sendto(b"x", where)
            with RealBus(directory, env=environment):
                assert is_served(directory / "bus")


class TestUnits:
    @pytest.mark.skipif(
        not shutil.which("systemd-analyze"), reason="needs systemd-analyze"
    )
    def test_units_are_valid(self, directory: Path) -> None:
        """[ADDR-2] [RUN-5] As far as systemd can tell without running them."""
        units = []
        for unit in (ROOT / "contrib/systemd").iterdir():
            text = unit.read_text().replace("/usr/local/bin/sbusd", "/bin/sh")
            units.append(str(directory / unit.name))
            Path(units[-1]).write_text(text)
        result = subprocess.run(
            ["systemd-analyze", "verify", *units],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
        )
        newer = "'AcceptFileDescriptors'"  # unknown before systemd 258
        lines = result.stdout.splitlines()
        ours = [line for line in lines if "sbus" in line and newer not in line]
        assert ours == []


class TestDaemon:
    def test_return(self, directory: Path) -> None:
        """[RUN-8] The socket serves and the pid file is written by then."""
        with daemon(directory) as server:
            assert is_served(directory / "bus")
            assert (directory / "pid").read_text() == f"{server.pid}\n"
            assert server.output == ""
            start = f"sbusd: start {directory}/bus pid={server.pid}"
            assert server.errors == f"{start}{told_of()}\n"
        assert os.listdir(directory) == []

    def test_without_pid_file(self, directory: Path) -> None:
        """[RUN-8] -d alone detaches as well."""
        path = f"{directory}/bus"
        result = run("sbus.py", "-cda", path)
        assert result.status == 0
        pid = int(result.errors.partition("pid=")[2].split()[0])
        descriptor = os.pidfd_open(pid)
        assert is_served(directory / "bus")  # and ends with its only client
        wait_for_end(descriptor)
        assert os.listdir(directory) == []

    def test_it_is_detached(self, directory: Path) -> None:
        """[RUN-8] Session, directory and streams are its own."""
        with daemon(directory) as server:
            process = f"/proc/{server.pid}"
            assert os.getsid(server.pid) not in (server.pid, os.getsid(0))
            assert os.readlink(f"{process}/cwd") == "/"
            for number in range(3):
                there = os.readlink(f"{process}/fd/{number}")
                assert there == os.devnull

    def test_log_in_a_file(self, directory: Path) -> None:
        """[RUN-14] Standard error stays open if it is a regular file."""
        with (
            (directory / "log").open("wb") as log,
            daemon(directory, stderr=log),
            connect(f"{directory}/bus") as peer,
        ):
            peer.send(b"malformed")
            assert peer.receive_all() == []
        first, fault, last = (directory / "log").read_text().splitlines()
        assert first.startswith("sbusd: start ")
        assert "[PKT-2]" in fault
        assert last == "sbusd: stop"

    def test_hang_up(self, directory: Path) -> None:
        """[RUN-10] A daemon has no terminal to lose."""
        with daemon(directory) as server:
            os.kill(server.pid, signal.SIGHUP)
            for _ in range(3):  # the first may be in the same round
                assert is_served(directory / "bus")

    def test_start_that_cannot_work(self, directory: Path) -> None:
        """[RUN-2] [RUN-8] The command says so and leaves no daemon."""
        with RealBus(directory) as bus:
            line = refusal(1, "-da", bus.path)
            assert "a server listens there already" in line

    def test_start_that_fails_late(self, directory: Path) -> None:
        """[RUN-2] [RUN-8] [RUN-13] Also of what goes wrong in the daemon."""

        def lower() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

        arguments = ("-a", "bus", "-p", "pid")
        options = {"cwd": directory, "preexec_fn": lower, "env": {}}
        line = refusal(1, *arguments, **options)
        assert line == "sbusd: cannot go on: File too large\n"
        wait_for(lambda: not os.listdir(directory))


class TestPidFile:
    @pytest.mark.parametrize("text", ["", "dead", "000dead\n"])
    def test_what_is_overwritten(self, directory: Path, text: str) -> None:
        """[RUN-9] [RUN-13] An empty file, or the number of no process."""
        path = directory / "pid"
        path.write_text(text.replace("dead", str(dead_process())))
        with daemon(directory) as server:
            assert path.read_text() == f"{server.pid}\n"
        assert not path.exists()

    @pytest.mark.parametrize(
        "text", [f"{os.getpid()}", f"{os.getpid()}\n", "garbage", "1\n2\n"]
    )
    def test_text_that_is_kept(self, directory: Path, text: str) -> None:
        """[RUN-9] [RUN-2] The number of a process, or anything else."""
        path = directory / "pid"
        path.write_text(text)
        line = refusal(1, "-a", "bus", "-p", "pid", cwd=directory)
        is_number = text.strip().isdigit()
        assert ("is alive" if is_number else "not a pid file") in line
        assert path.read_text() == text
        assert os.listdir(directory) == ["pid"]

    def test_file_with_a_lease(self, directory: Path) -> None:
        """[RUN-9] [RUN-2] Nobody waits for whoever has it to let go."""
        former = signal.signal(signal.SIGIO, signal.SIG_IGN)
        with (directory / "pid").open("w") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            line = refusal(1, "-a", "bus", "-p", "pid", cwd=directory)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        signal.signal(signal.SIGIO, former)
        assert "temporarily unavailable" in line

    @pytest.mark.parametrize("what", ["directory", "FIFO", "link to nothing"])
    def test_what_is_kept(self, directory: Path, what: str) -> None:
        """[RUN-9] [RUN-2] What is not a regular file."""
        with occupied(directory / "pid", what):
            line = refusal(1, "-a", "bus", "-p", "pid", cwd=directory)
        reasons = ("Is a directory", "not a regular", "link is not followed")
        assert any(reason in line for reason in reasons)
        assert os.listdir(directory) == ["pid"]

    def test_link_to_a_file(self, directory: Path) -> None:
        """[RUN-9] [RUN-2] A link could lead to anybody's file."""
        (directory / "there").touch()
        (directory / "pid").symlink_to("there")
        line = refusal(1, "-a", "bus", "-p", "pid", cwd=directory)
        assert line == "sbusd: pid: a symbolic link is not followed\n"
        assert (directory / "there").read_text() == ""

    def test_held_file(self, directory: Path) -> None:
        """[RUN-9] A running server's, even when somebody has emptied it."""
        with daemon(directory) as server:
            path = directory / "pid"
            path.write_text("")
            line = refusal(1, "-a", "other", "-p", "pid", cwd=directory)
            assert line == "sbusd: pid: a server holds this file\n"
            assert is_served(directory / "bus")
            path.write_text(f"{server.pid}")

    def test_killed_daemon(self, directory: Path) -> None:
        """[RUN-9] [ADDR-8] What it leaves behind does not stop the next."""
        with daemon(directory) as server:
            os.kill(server.pid, signal.SIGKILL)
        with daemon(directory, "-r") as server:
            assert is_served(directory / "bus")
        assert os.listdir(directory) == []

    def test_file_of_another(self, directory: Path) -> None:
        """[RUN-13] What replaced our pid file meanwhile is left alone."""
        path = directory / "pid"
        with daemon(directory):
            path.unlink()
            path.write_text("theirs")
        assert path.read_text() == "theirs"
        path.unlink()
        with daemon(directory):
            path.unlink()
        assert os.listdir(directory) == []

    def test_start_that_fails_otherwise(self, directory: Path) -> None:
        """[RUN-13] A file that was not written is not removed."""
        path = directory / "pid"
        path.touch()
        (directory / "trace").mkdir()
        options = ("-a", "bus", "-p", "pid", "--trace", "trace")
        refusal(1, *options, cwd=directory)
        assert sorted(os.listdir(directory)) == ["pid", "trace"]

    def test_file_removed_while_it_was_opened(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[RUN-9] A lock on a file that has no name protects nothing."""
        path = directory / "pid"
        monkeypatch.setattr(fcntl, "flock", lambda *_: path.unlink())
        with pytest.raises(sbus.StartError, match="has just removed"):
            sbus.open_pid_file(str(path))

    def test_mode(self, directory: Path) -> None:
        """[RUN-9] Nobody else can open it, nor so keep its lock."""
        with daemon(directory, umask=0):
            assert mode_of(directory / "pid") == 0o600

    @needs_root
    def test_file_of_another_user(self, directory: Path) -> None:
        """[RUN-9] [RUN-2] It could be written by somebody else."""
        path = directory / "pid"
        path.touch()
        os.chown(path, 1234, -1)
        line = refusal(1, "-a", f"{directory}/bus", "-p", str(path))
        assert line == f"sbusd: {path}: another user's file\n"
        assert os.listdir(directory) == ["pid"]


def dead_process() -> int:
    """Return the process id of a process that has ended."""
    with child_process(lambda: None) as child:
        return child


class TestSignals:
    def test_stats(self, directory: Path) -> None:
        """[RUN-17] A line for each user, and one for all; nothing stops."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"))
            peer.fence()
            bus.process.send_signal(signal.SIGUSR1)
            bus.wait_for_log("stats users=1 clients=1 backlog_bytes=0\n")
            uid = os.getuid()
            what = f"stats uid={uid} clients=1 patterns=1 backlog_bytes=0"
            assert f"{what} published=1 delivered=2 " in bus.log()
            assert peer.fence() == []

    def test_stats_of_many_users(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[RUN-17] Of the first; the others are counted."""
        caplog.set_level(logging.INFO, "sbus")
        kernel = FakeKernel()
        for uid in range(sbus.STATS_LINES_MAX + 3):
            kernel.connect(uid=uid)
        sbus.log_stats(kernel.server)
        assert len(caplog.messages) == sbus.STATS_LINES_MAX + 1
        assert caplog.messages[-1].endswith(" (3 users left out)")

    def test_stats_of_all(self, caplog: pytest.LogCaptureFixture) -> None:
        """[RUN-17] What was lost by reason, and who was put out by rule."""
        caplog.set_level(logging.INFO, "sbus")
        kernel = FakeKernel()
        for mode in ("discard", "error"):
            reader = kernel.connect()
            reader.send(b"SUB k", b"CMSG blocking/soft/%s" % mode.encode())
            reader.wire.room = 0
        kernel.connect().send(publish(b"k", b"1"), publish(b"k", b"2"))
        kernel.connect().send(b"HELLO")
        kernel.run()
        sbus.log_stats(kernel.server)
        totals = "stats users=1 clients=2 backlog_bytes=0"
        lost, out = "soft/discard=2 deaf=2", "BLOCK-8=1 PKT-2=1"
        assert caplog.messages[-1] == f"{totals} {lost} {out}"

    def test_stop_among_questions(self, directory: Path) -> None:
        """[RUN-10] [RUN-17] However many of them come, none hides it."""
        for _ in range(4):
            with RealBus(directory) as bus:
                server = os.pidfd_open(bus.process.pid)

                def ask_all_the_time(server: int = server) -> None:
                    with contextlib.suppress(ProcessLookupError):
                        while True:
                            question = signal.SIGUSR1
                            signal.pidfd_send_signal(server, question)

                with child_process(ask_all_the_time):
                    bus.wait_for_log("stats")
                    assert bus.stop() == 0
                os.close(server)
            assert os.listdir(directory) == ["log"]

    def test_no_hang_up(self, directory: Path) -> None:
        """[RUN-10] SIGHUP stays ignored, as nohup wants it."""
        command = ["nohup", sys.executable, str(ROOT / "sbus.py"), "-a"]
        path = f"{directory}/bus"
        with subprocess.Popen(
            [*command, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as server:
            assert server.stdout
            read_to_end(server.stdout)
            server.send_signal(signal.SIGHUP)
            with connect(path) as peer:
                assert peer.fence() == []
            server.terminate()

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
    def test_signal(self, directory: Path, name: str) -> None:
        """[RUN-10] [ADDR-10] An idle server stops, with status 0."""
        with RealBus(directory) as bus:
            assert bus.stop(signal.Signals[name]) == 0
        assert os.listdir(directory) == ["log"]
        assert bus.log().endswith("\nsbusd: stop\n")

    def test_many_at_once(self, directory: Path) -> None:
        """[RUN-10] The second signal changes nothing."""
        with RealBus(directory) as bus:
            stand_still(bus.process.pid)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                bus.process.send_signal(number)
            assert bus.stop(signal.SIGCONT) == 0
        assert os.listdir(directory) == ["log"]

    def test_impatience(self, directory: Path) -> None:
        """[RUN-10] Signals until the very end do not change the status."""
        with RealBus(directory) as bus:
            while bus.is_alive():
                bus.process.send_signal(signal.SIGTERM)
            assert bus.process.returncode == 0
        assert os.listdir(directory) == ["log"]

    def test_busy_server(self, directory: Path) -> None:
        """[RUN-10] [RUN-12] Publishers that never cease do not hold it."""

        def publish_for_ever() -> None:
            with connect(f"{directory}/bus") as peer:
                peer.send(b"SUB busy")
                while True:
                    peer.send(publish(b"busy"))
                    peer.receive()

        with RealBus(directory) as bus, child_process(publish_for_ever):
            with bus.connect() as peer:
                peer.send(b"SUB busy")
                assert peer.receive() == publish(b"busy")
            assert bus.stop() == 0

    if IS_SOAK:  # it takes seconds, and fails where others take them

        def test_pause_of_a_holder(self, directory: Path) -> None:
            """[BLOCK-16] Time in which the server stood still is none."""
            packets = publications(2_000)
            with (
                RealBus(
                    directory,
                    *("-v", "--block-timeout", "4", "--max-backlog", "20000"),
                ) as bus,
                bus.clients(3) as (reader, sender, other),
            ):
                reader.send(b"SUB k", b"CMSG blocking/soft/block")
                reader.fence()
                with child_process(lambda: sender.send(*packets)):
                    bus.wait_for_log("paused for client=1 ")
                    freeze(bus)  # while we, the reader, stand still as well
                    time.sleep(5.2)
                    thaw(bus)
                    assert other.fence() == []
                    assert [reader.receive() for _ in packets] == packets
                assert reader.fence() == []

    def test_signals_at_the_end(self, directory: Path) -> None:
        """[RUN-2] None ends a server that ends by itself."""
        program = (
            "import signal, sys, sbus\n"
            "def announce(*_): raise MemoryError\n"
            "sbus.announce = announce\n"
            "status = sbus.main(['-a', sys.argv[1]])\n"
            "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
            "print(status, set(sbus.SIGNALS) <= blocked)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(directory / "bus")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert done.stdout == "1 True\n"
        assert os.listdir(directory) == []

    def test_other_signals(self, directory: Path) -> None:
        """[RUN-10] A pause, and signals that are none of its business."""
        with RealBus(directory) as bus:
            stand_still(bus.process.pid)
            bus.process.send_signal(signal.SIGCONT)
            bus.process.send_signal(signal.SIGWINCH)
            assert is_served(directory / "bus")


class TestLastClient:
    def test_end(self, directory: Path) -> None:
        """[RUN-11] With -c, after the last has gone, not the first."""
        with RealBus(directory, "-c") as bus:
            with bus.connect() as one:
                with bus.connect() as two:
                    assert two.fence() == []
                assert one.fence() == []
                assert is_served(directory / "bus")
                assert bus.is_alive()
            assert bus.process.wait(SECONDS_MAX) == 0
        assert os.listdir(directory) == ["log"]

    def test_without_the_option(self, directory: Path) -> None:
        """[RUN-11] A server waits for more."""
        with RealBus(directory):
            assert is_served(directory / "bus")
            assert is_served(directory / "bus")


class TestLastDelivery:
    def test_backlog(self, directory: Path) -> None:
        """[RUN-12] What was read is delivered after the signal."""
        packets = publications(3_000)
        with RealBus(directory) as bus, bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            with bus.connect() as sender:
                sender.send(*packets)
                sender.fence()
            bus.process.send_signal(signal.SIGTERM)
            assert reader.receive_all() == packets
            assert bus.process.wait(SECONDS_MAX) == 0

    def test_reader_that_does_not_read(self, directory: Path) -> None:
        """[RUN-12] The server waits for about a second, and ends well."""
        with RealBus(directory) as bus, bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            with bus.connect() as sender:
                sender.send(*publications(3_000))
                sender.fence()
            start = time.monotonic()
            assert bus.stop() == 0
            assert time.monotonic() - start > 0.9
