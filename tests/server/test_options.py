"""Tests of the options of the server."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

import sbus
from fake_kernel import but
from packets import publish
from processes import SBUSD, SECONDS_MAX, run
from real_bus import RealBus, connect, needs_root, read_to_end
from servers import (
    is_served,
    mode_of,
    notifying,
    refusal,
    started,
    told_of,
)


class TestOptions:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["word"],
            ["a\nb\x1b[m\x80"],
            ["x" * 1000],
            ["-x"],
            ["--no-such-option"],
            ["--addr", "bus"],
            ["--group=1"],
            ["-a"],
            ["-p"],
            ["-u"],
            ["-fd"],
            ["-f", "-p", "pid"],
            ["-u", ""],
            ["-u", "no such user"],
            ["-u", "-1"],
            ["-u", "4294967295"],
            ["-u", "99999999999"],
            ["-u", "\udcff"],
            ["--trace-payload"],
            ["--cred-prefix", ""],
            ["--cred-prefix", "!/cred/1/2"],
            ["--cred-prefix", "!/cred/1/2/3/"],
            ["--cred-prefix", "!/cred/1/2/3/4"],
            ["--cred-prefix", "!/cred/1/2/3/!/cred/1/2/x"],
        ],
        ids=repr,
    )
    def test_wrong_option(self, directory: Path, arguments: list[str]) -> None:
        """[RUN-1] One line and status 2; nothing is created."""
        line = refusal(2, "-a", "bus", *arguments, cwd=directory)
        assert line.endswith("; --help lists the options\n") or (
            len(line) == 300
        )
        assert os.listdir(directory) == []

    @pytest.mark.parametrize(
        "value", ["0", "-1", "", "x", "0x10", "1e3", "1_0", " 1", "٣", "nan"]
    )
    @pytest.mark.parametrize("name", sbus.LIMITS)
    def test_wrong_limit(
        self, caplog: pytest.LogCaptureFixture, name: str, value: str
    ) -> None:
        """[LIMIT-8] [RUN-1] Zero, less than zero, or no number."""
        option = sbus.option_of(name)
        with pytest.raises(SystemExit) as exited:
            sbus.parse_options([f"{option}={value}"])
        assert exited.value.code == 2
        (line,) = caplog.messages
        assert line.startswith(f"argument {option}: {value!r} is neither a ")

    @pytest.mark.parametrize(
        "argument", ["--max-packet=1.5", "--block-timeout=0.0"]
    )
    def test_limit_of_the_other_kind(self, argument: str) -> None:
        """[LIMIT-8] [RUN-1] Only seconds have fractions, but not 0.0."""
        assert "is neither a" in refusal(2, "-a", "bus", argument)

    @pytest.mark.parametrize("name", sbus.LIMITS)
    def test_no_limit(self, name: str) -> None:
        """[LIMIT-8] `unlimited` is a word for what no client can reach."""
        options = sbus.parse_options([sbus.option_of(name), "unlimited"])
        assert getattr(options, name) >= sys.maxsize

    def test_packets_without_a_limit(self, directory: Path) -> None:
        """[LIMIT-9] [RUN-1] That no kernel could hold: one line."""
        options = ("-a", "bus", "--max-packet", "unlimited")
        line = refusal(1, *options, cwd=directory)
        what = "the kernel takes no packet of that size"
        assert line == f"sbusd: --max-packet: {what}\n"
        assert os.listdir(directory) == []

    def test_bound_of_memory(self, directory: Path) -> None:
        """[RUN-14] The start line says what follows from the limits."""
        options = ("--max-clients=10", "--max-bus-backlog=1000000")
        with RealBus(directory, *options) as bus:
            told = told_of(max_clients=10, max_bus_backlog=1_000_000)
            assert bus.log().endswith(f"{told}\n")
        with RealBus(directory, "--max-bus-backlog", "unlimited") as bus:
            assert " memory<=unlimited" in bus.log()

    @pytest.mark.parametrize(
        "mode, directory_mode, option, is_told",
        [
            (0o644, 0o711, "-o", True),
            (0o640, 0o711, "-g", True),
            (0o600, 0o755, "-o", True),
            (0o600, 0o750, "-g", True),
            (0o600, 0o711, "-go", False),
            (0o644, 0o755, "-f", False),
        ],
    )
    def test_log_that_others_can_watch(
        self,
        directory: Path,
        mode: int,
        directory_mode: int,
        option: str,
        is_told: bool,
    ) -> None:
        """[RUN-14] [RUN-16] Or keep locked, as who can read it can."""
        (directory / "log").touch()
        (directory / "log").chmod(mode)
        directory.chmod(directory_mode)
        with RealBus(directory, option) as bus:
            told = "; who can read its log or its directory may make it wait"
            assert bus.log().endswith(f"{told}\n") == is_told

    def test_log_whose_directory_has_gone(self, directory: Path) -> None:
        """[RUN-14] [RUN-16] That keeps nobody from starting."""
        (directory / "gone").mkdir()
        with (directory / "gone" / "log").open("wb+") as log:
            os.fchmod(log.fileno(), 0o600)
            shutil.rmtree(directory / "gone")
            address = str(directory / "bus")
            with started("-o", "-a", address, stderr=log) as output:
                read_to_end(output)
                assert is_served(directory / "bus")
                line = os.pread(log.fileno(), 1000, 0)
                assert line.startswith(b"sbusd: start")
                assert b"its log" not in line

    @pytest.mark.parametrize("name", sbus.LIMITS)
    def test_limit(self, name: str) -> None:
        """[LIMIT-8] Above zero it is taken."""
        options = sbus.parse_options([sbus.option_of(name), "007"])
        limits = {each: getattr(options, each) for each in vars(LIMITS)}
        assert limits == {**vars(LIMITS), name: 7}

    def test_limits_are_used(self, directory: Path) -> None:
        """[LIMIT-1] [LIMIT-8] [RUN-14] By the bus; the log names them."""
        options = ("--max-packet=20", "--block-timeout=2.5")
        with RealBus(directory, *options, "--max-segments=2") as bus:
            assert " max-packet=20 max-segments=2 " in bus.log()
            assert " block-timeout=2.5 memory<=" in bus.log()
            with bus.connect() as peer:
                peer.send(b"SUB k", publish(b"k", b"x" * 14))
                assert peer.receive() == publish(b"k", b"x" * 14)
                peer.send(publish(b"k", b"x" * 15))
                assert peer.is_disconnected()

    @pytest.mark.parametrize(
        "size", ["5000000", "100000000", "4000000000", "999999999999999"]
    )
    def test_packet_size_above_the_kernel(self, size: str) -> None:
        """[LIMIT-9] [RUN-2] The kernel is asked at start."""
        line = refusal(1, "-a", "bus", "--max-packet", size)
        what = "the kernel takes no packet of that size"
        assert line == f"sbusd: --max-packet: {what}\n"

    def test_bundle_with_value(self, directory: Path) -> None:
        """[RUN-1] -fa ADDRESS is -f -a ADDRESS."""
        path = str(directory / "bus")
        with started("-fa", path, stderr=subprocess.DEVNULL) as output:
            read_to_end(output)
            assert is_served(directory / "bus")

    def test_bundle(self, directory: Path) -> None:
        """[RUN-11] [ADDR-6] [ADDR-8] -cgor is -c -g -o -r."""
        (directory / "bus").touch()
        with RealBus(directory, "-cgor") as bus:
            assert mode_of(directory / "bus") == 0o777
            assert is_served(directory / "bus")
            assert bus.process.wait(SECONDS_MAX) == 0

    def test_long_options(self) -> None:
        """[RUN-1] Each short option has a long name."""
        pairs = {
            "-c": "--close",
            "-d": "--daemon",
            "-f": "--foreground",
            "-g": "--group",
            "-o": "--others",
            "-r": "--replace",
            "-v": "--verbose",
            "-aA": "--address=A",
            "-pP": "--pid-file=P",
            "-u5": "--user=5",
        }
        for short, long in pairs.items():
            assert sbus.parse_options([short]) == sbus.parse_options([long])

    @pytest.mark.parametrize("option", ["--help", "--version"])
    def test_question(self, option: str) -> None:
        """[RUN-1] It is answered on standard output, with status 0."""
        result = run("sbus.py", option)
        assert result.status == 0
        assert "sbusd" in result.output
        assert result.errors == ""

    def test_strict(self, directory: Path) -> None:
        """[UNSUB-2] --strict disconnects where the bus would not."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"UNSUB k")
            assert peer.fence() == []
        with RealBus(directory, "--strict") as bus, bus.connect() as peer:
            peer.send(b"UNSUB k")
            assert peer.is_disconnected()

    def test_credential_prefix(self, directory: Path) -> None:
        """[CRED-9] --cred-prefix stands before a client's own."""
        prefix = "!/cred/1/2/3/!/cred/4/5/6"
        with (
            RealBus(directory, "--cred-prefix", prefix) as bus,
            bus.connect() as peer,
        ):
            own = f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}"
            assert peer.path == f"{prefix}/{own}".encode("ascii")


LIMITS = sbus.Limits()


class TestUsers:
    @needs_root
    def test_named_users(self, directory: Path) -> None:
        """[CONN-2] By name or number; the bus owner always; no others."""
        named = next(user for user in pwd.getpwall() if user.pw_uid)
        options = ("-go", "-u", named.pw_name, "-u", "54321")
        with RealBus(directory, *options) as bus:
            for uid in (named.pw_uid, 54321, 0):
                with bus.connect(uid) as peer:
                    assert peer.fence() == []
            with bus.connect(54322) as peer:
                assert peer.is_disconnected()
            bus.wait_for_log("refuse uid=54322")

    def test_owner_is_not_named(self, directory: Path) -> None:
        """[CONN-2] The bus owner need not be."""
        with RealBus(directory, "-u", "54321"):
            assert is_served(directory / "bus")

    @needs_root
    def test_refused_client_was_none(self, directory: Path) -> None:
        """[RUN-11] [CONN-2] With -c its end is not the last client's."""
        with RealBus(directory, "-cgo", "-u", "54321") as bus:
            with bus.connect(54322) as peer:
                assert peer.is_disconnected()
            assert is_served(directory / "bus")
            assert bus.process.wait(SECONDS_MAX) == 0


class TestDescriptors:
    def test_limit_is_raised(self, directory: Path) -> None:
        """[RUN-6] The soft limit becomes the hard one."""
        kind = resource.RLIMIT_NOFILE
        hard = resource.getrlimit(kind)[1]

        def lower() -> None:
            resource.setrlimit(kind, (64, hard))

        with RealBus(directory, preexec_fn=lower) as bus:
            assert resource.prlimit(bus.process.pid, kind) == (hard, hard)

    def test_limit_that_cannot_be_raised(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[RUN-6] The server goes on with what it has."""

        def refuse(kind: int, limits: tuple[int, int]) -> None:
            raise ValueError("not allowed to raise maximum limit")

        monkeypatch.setattr(resource, "setrlimit", refuse)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 100))
        limits = sbus.limits_of(sbus.parse_options([]))
        most = 64 - sbus.DESCRIPTORS_KEPT
        expected = but(LIMITS, max_clients=most, max_user_clients=most // 2)
        assert limits == expected

    @pytest.mark.parametrize(
        "options, max_clients, named",
        [((), 48, "max-clients=48 max-user-clients=24"), ((3,), 3, "")],
    )
    def test_limit_of_clients(
        self,
        directory: Path,
        options: tuple[int, ...],
        max_clients: int,
        named: str,
    ) -> None:
        """[RUN-6] It is lowered, never raised; the start line names it."""
        arguments = [f"--max-clients={option}" for option in options]
        named = named or f"max-clients={max_clients}"
        with (
            RealBus(directory, *arguments, preexec_fn=allow(64)) as bus,
            bus.clients(max_clients) as peers,
        ):
            assert f" {named} memory<=" in bus.log()
            for peer in peers:
                assert peer.fence() == []
            with bus.connect() as late:
                assert late.is_disconnected()

    @pytest.mark.parametrize("count", [16, 12])
    def test_too_few(self, directory: Path, count: int) -> None:
        """[RUN-6] [RUN-2] There must be some for clients."""
        options: Any = {"cwd": directory, "preexec_fn": allow(count)}
        line = refusal(1, "-a", "bus", **options)
        what = "more than 16 are needed"
        assert line == f"sbusd: ulimit -n is {count}; {what}\n"
        assert os.listdir(directory) == []

    def test_fewest(self, directory: Path) -> None:
        """[RUN-6] One client is served with each option that takes some."""
        options = ("--trace", f"{directory}/trace", "-v")
        with (
            RealBus(directory, *options, preexec_fn=allow(17)) as bus,
            bus.connect() as peer,
        ):
            assert peer.fence() == []
            with bus.connect() as late:
                assert late.is_disconnected()
            assert peer.fence() == []
        assert "[CONN-3]" not in bus.log()

    @pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
    def test_closed_standard_streams(
        self, directory: Path, closed: Sequence[int]
    ) -> None:
        """[RUN-7] No socket takes the place of a stream."""

        def close_them() -> None:
            for descriptor in closed:
                os.close(descriptor)

        path = str(directory / "bus")
        with (
            notifying(directory, "-va", path, preexec_fn=close_them) as pid,
            connect(path) as peer,
        ):
            assert peer.fence() == []
            peer.send(b"malformed")
            assert peer.receive_all() == []
            for descriptor in closed:
                there = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                assert there == os.devnull

    def test_refusal_without_standard_streams(self) -> None:
        """[RUN-1] [RUN-7] The exit status is right all the same."""
        done = subprocess.run(
            [*SBUSD, "-x"],
            preexec_fn=lambda: os.closerange(0, 3),
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 2


def allow(count: int) -> Callable[[], None]:
    """Return what lets a server have so many descriptors."""
    limit = (count, count)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
