"""Tests of chapter 8: addresses, command line, start, end, log and trace.

Nearly all of them start sbus.py as its users do: a server that must refuse
is run to its end, one that must serve is stopped with its test.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import pwd
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Callable, NamedTuple

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import WHOAMI, publications, publish
from programs import ROOT, SECONDS_MAX, child_process, run
from real_bus import (
    RealBus,
    connect,
    freeze,
    other_user,
    read_to_end,
    thaw,
    wait_for,
)

COMMAND = (sys.executable, str(ROOT / "sbus.py"))
ABSTRACT = "/dev/unix/abstract"
DATAGRAM = socket.SOCK_DGRAM

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can connect as other users"
)


def refusal(status: int, *arguments: str, **options: Any) -> str:
    """Start a server that must refuse; return the one line that it says."""
    result = run("sbus.py", *arguments, **options)
    assert (result.status, result.output) == (status, ""), result
    assert re.fullmatch("sbusd: [ -~]{1,292}\n", result.errors), result
    return result.errors


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[IO[bytes]]:
    """Start a server with streams that RealBus does not have; give stdout."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, **options
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
            [*COMMAND, *arguments],
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
        [*COMMAND, "-a", address, "-p", "pid", *options],
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
    limits = limits._replace(max_clients=max_clients)
    told = ""
    for name, value in limits._asdict().items():
        if value != getattr(sbus.Limits(), name):
            told += f" {sbus.option_of(name)[2:]}={value}"
    told += f" memory<={sbus.describe_bytes(limits.memory_bytes_max())}"
    with new_unix_socket() as wire:
        if not sbus.refuse_descriptors(wire):
            told += "; a client may make the bus wait for its descriptors"
    return told


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(os.lstat(path).st_mode)


# =============================================================================
# Addresses
# =============================================================================


class TestDefaultAddress:
    def test_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """[ADDR-1] Root's is in /run, whatever the environment says."""
        monkeypatch.setattr(os, "getuid", lambda: 0)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere")
        assert sbus.default_address() == "/run/sbus.socket"

    def test_ordinary_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """[ADDR-1] Another user's is in the user's own directory."""
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
        assert sbus.default_address() == "/run/user/1000/sbus.socket"

    @pytest.mark.parametrize("environment", [{}, {"XDG_RUNTIME_DIR": ""}])
    def test_no_runtime_directory(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
    ) -> None:
        """[ADDR-1] [RUN-2] Without that directory there is no default."""
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(sbus.StartError, match="use -a ADDRESS"):
            sbus.default_address()

    def test_server_takes_it(self, directory: Path) -> None:
        """[ADDR-1] A server without an address listens there."""

        def serve() -> None:
            if os.getuid() == 0:  # whose default is not for tests
                os.chown(directory, 1234, -1)
                os.setuid(1234)
            os.environ["XDG_RUNTIME_DIR"] = str(directory)
            sbus.main([])

        path = directory / "sbus.socket"
        with child_process(serve):
            wait_for(path.is_socket)
            assert is_served(path)


class TestPath:
    @pytest.mark.parametrize("size", [1, 107])
    def test_size_at_the_ends_of_the_range(
        self, directory: Path, size: int
    ) -> None:
        """[ADDR-10] 1 and 107 bytes; the socket goes with the server."""
        path = "b" if size == 1 else str(directory / "b").ljust(size, "b")
        with RealBus(directory, address=path, cwd=directory):
            assert is_served(directory / path)
        assert os.listdir(directory) == ["log"]

    def test_short_path_in_a_deep_directory(self, directory: Path) -> None:
        """[ADDR-10] A relative path may be longer from the root."""
        deep = directory / ("d" * 120)
        deep.mkdir()
        with RealBus(directory, address="bus", cwd=deep):
            assert (deep / "bus").is_socket()
        assert os.listdir(deep) == []

    def test_dots_behind_a_link(self, directory: Path) -> None:
        """[ADDR-10] The kernel says what `..` is, not the text."""
        (directory / "a" / "b").mkdir(parents=True)
        (directory / "link").symlink_to("a/b")
        path = f"{directory}/link/../bus"
        with RealBus(directory, address=path):
            assert is_served(directory / "a" / "bus")
        assert os.listdir(directory / "a") == ["b"]

    def test_relative_paths_of_a_daemon(self, directory: Path) -> None:
        """[ADDR-10] [RUN-13] They mean what they meant to the caller."""
        with daemon(directory, "--trace", "trace"):
            assert is_served(directory / "bus")
        assert os.listdir(directory) == ["trace"]
        assert len((directory / "trace").read_text("ascii").splitlines()) > 2

    @pytest.mark.parametrize("path", ["", "b" * 108, "é" * 54, "b" * 100_000])
    def test_size_out_of_range(self, directory: Path, path: str) -> None:
        """[RUN-2] No bytes, or more than 107."""
        line = refusal(1, "-a", path, cwd=directory)
        assert line.startswith("sbusd: a path has 1 to 107 bytes")
        assert os.listdir(directory) == []

    def test_nul_byte(self, directory: Path) -> None:
        """[RUN-2] The kernel would cut the path there."""
        with pytest.raises(sbus.StartError, match="none NUL"):
            sbus.Endpoint.open(f"{directory}/a\0b", 0o700, False)
        assert os.listdir(directory) == []

    def test_missing_directory(self, directory: Path) -> None:
        """[RUN-2] The line names it."""
        line = refusal(1, "-a", f"{directory}/no/bus")
        what = "No such file or directory"
        assert line == f"sbusd: directory {directory}/no: {what}\n"

    def test_directory_that_takes_no_sockets(self) -> None:
        """[RUN-2] What the kernel says is passed on."""
        line = refusal(1, "-a", "/proc/sbus")
        assert line.startswith("sbusd: /proc/sbus: ")

    def test_removed_working_directory(self, directory: Path) -> None:
        """[RUN-2] A relative path leads nowhere then."""
        gone = directory / "gone"
        gone.mkdir()
        line = refusal(1, "-a", "bus", cwd=gone, preexec_fn=gone.rmdir)
        assert "No such file or directory" in line

    def test_line_feed(self, directory: Path) -> None:
        """[RUN-2] What is said of such a path is one line all the same."""
        assert "a?b" in refusal(1, "-a", f"{directory}/a\nb/bus")


class TestAbstractAddress:
    def test_name_is_filled_up(self, directory: Path) -> None:
        """[ADDR-4] With NUL bytes to 108, which clients use as well."""
        name = b"\0" + secrets.token_bytes(8)
        address = f"{ABSTRACT}/{name.hex().upper()}"
        with RealBus(directory, address=address) as bus:
            assert is_served(name.ljust(108, b"\0"))
            assert not is_served(name)
            assert bus.output == ""
        assert not is_served(name.ljust(108, b"\0"))

    def test_full_name(self, directory: Path) -> None:
        """[ADDR-4] 216 digits leave nothing to fill."""
        name = b"\0" + secrets.token_bytes(107)
        with RealBus(directory, address=f"{ABSTRACT}/{name.hex()}"):
            assert is_served(name)

    @pytest.mark.parametrize(
        "digits", ["", "0", "000", "0161", "6100", "00 61", "00zz", "00" * 109]
    )
    def test_wrong_digits(self, directory: Path, digits: str) -> None:
        """[RUN-2] Not hexadecimal, odd, too many, or not after 00."""
        line = refusal(1, "-a", f"{ABSTRACT}/{digits}", cwd=directory)
        assert "2 to 216 hexadecimal digits" in line

    def test_taken_name(self, directory: Path) -> None:
        """[RUN-2] [ADDR-9] Two servers cannot have one name."""
        address = f"{ABSTRACT}/00{secrets.token_hex(8)}"
        with RealBus(directory, address=address):
            line = refusal(1, "-ra", address)
            assert "a server listens there already" in line

    def test_random_name(self, directory: Path) -> None:
        """[RUN-3] Its address, a line feed, and nothing else is printed."""
        addresses = set()
        for _ in range(2):
            with RealBus(directory, address=ABSTRACT) as bus:
                line = re.fullmatch(
                    f"{ABSTRACT}/(00[0-9a-f]{{214}})\n", bus.output
                )
                assert line
                assert is_served(bytes.fromhex(line[1]))
                addresses.add(line[1])
        assert len(addresses) == 2

    def test_random_name_of_a_daemon(self, directory: Path) -> None:
        """[RUN-3] [RUN-8] It is printed before the command returns."""
        with daemon(directory, address=ABSTRACT) as server:
            digits = server.output[len(ABSTRACT) + 1 : -1]
            assert is_served(bytes.fromhex(digits))

    def test_source_of_random_names(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-5] The operating system, for all 107 bytes."""
        monkeypatch.setattr(os, "urandom", lambda count: b"r" * count)
        monkeypatch.setattr(
            secrets, "token_bytes", lambda count: os.urandom(count)
        )
        assert sbus.abstract_name(ABSTRACT) == b"\0" + b"r" * 107

    def test_warning(self, directory: Path) -> None:
        """[RUN-14] The start line says that the name is no protection."""
        with RealBus(directory, address=ABSTRACT) as bus:
            assert bus.log().endswith(f"{told_of()}; any user may connect\n")
        user = str(os.getuid())
        with RealBus(directory, "-u", user, address=ABSTRACT) as bus:
            assert bus.log().endswith(f"{told_of()}\n")


class TestInheritedSocket:
    @pytest.mark.parametrize("is_listening", [True, False])
    def test_descriptor(self, directory: Path, is_listening: bool) -> None:
        """[ADDR-10] Listening or not yet; its path is left alone."""
        with new_unix_socket(directory / "theirs") as listener:
            if is_listening:
                listener.listen()
            number = listener.fileno()
            address = f"/dev/fd/{number}"
            with RealBus(directory, address=address, pass_fds=[number]):
                assert is_served(directory / "theirs")
        assert sorted(os.listdir(directory)) == ["log", "theirs"]

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_standard_stream(self, directory: Path, number: int) -> None:
        """[RUN-7] As a socket it is moved: 0, 1 and 2 have other uses."""
        names = ("stdin", "stdout", "stderr")
        streams = dict.fromkeys(names, subprocess.DEVNULL)
        with new_unix_socket(directory / "theirs") as listener:
            listener.listen()
            streams[names[number]] = listener.fileno()
            with notifying(directory, "-a", f"/dev/fd/{number}", **streams):
                assert is_served(directory / "theirs")

    @pytest.mark.parametrize("kind", ["stream", "datagram", "internet"])
    def test_socket_of_another_kind(self, kind: str) -> None:
        """[ADDR-3] [RUN-2] Only a Unix-domain SEQPACKET socket will do."""
        kinds = {
            "stream": (socket.AF_UNIX, socket.SOCK_STREAM),
            "datagram": (socket.AF_UNIX, socket.SOCK_DGRAM),
            "internet": (socket.AF_INET, socket.SOCK_STREAM),
        }
        with socket.socket(*kinds[kind]) as wrong:
            number = wrong.fileno()
            line = refusal(1, "-a", f"/dev/fd/{number}", pass_fds=[number])
        what = "not a Unix-domain SEQPACKET socket"
        assert line == f"sbusd: /dev/fd/{number}: {what}\n"

    def test_regular_file(self, directory: Path) -> None:
        """[ADDR-3] [RUN-2] A file is no socket."""
        with (directory / "file").open("wb") as file:
            number = file.fileno()
            line = refusal(1, "-a", f"/dev/fd/{number}", pass_fds=[number])
        assert line.endswith(": Socket operation on non-socket\n")

    def test_connected_socket(self) -> None:
        """[ADDR-3] [RUN-2] Nobody can connect to a connection."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with ours, theirs:
            number = ours.fileno()
            line = refusal(1, "-a", f"/dev/fd/{number}", pass_fds=[number])
        assert line.endswith(": Invalid argument\n")

    @pytest.mark.parametrize("number", ["999", "99999999999", "-1", "x", ""])
    def test_wrong_number(self, number: str) -> None:
        """[ADDR-3] [RUN-2] A descriptor that is closed, or none at all."""
        line = refusal(1, "-a", f"/dev/fd/{number}")
        assert line.startswith(f"sbusd: /dev/fd/{number}: ")

    def test_socket_of_systemd(self, directory: Path) -> None:
        """[ADDR-2] Descriptor 3, where no address is given."""
        with new_unix_socket(directory / "theirs") as listener:
            listener.listen()

            def hand_over() -> None:
                os.dup2(listener.fileno(), 3)
                os.environ["LISTEN_PID"] = str(os.getpid())
                os.environ["LISTEN_FDS"] = "1"

            with started(
                preexec_fn=hand_over, pass_fds=[3], stderr=subprocess.DEVNULL
            ) as output:
                assert read_to_end(output) == b""
                assert is_served(directory / "theirs")

    def test_address_goes_before_the_socket_of_systemd(
        self, directory: Path
    ) -> None:
        """[ADDR-2] A server that is given an address does not look."""

        def hand_over() -> None:
            os.environ["LISTEN_PID"] = str(os.getpid())
            os.environ["LISTEN_FDS"] = "2"

        with RealBus(directory, preexec_fn=hand_over):
            assert is_served(directory / "bus")

    @pytest.mark.parametrize("pid", ["1", "", None])
    def test_socket_for_another_process(
        self, monkeypatch: pytest.MonkeyPatch, pid: str | None
    ) -> None:
        """[ADDR-2] What was handed to a parent is not ours."""
        environment = {"LISTEN_FDS": "1"}
        if pid is not None:
            environment["LISTEN_PID"] = pid
        monkeypatch.setattr(os, "environ", environment)
        assert sbus.inherited_address() is None

    @pytest.mark.parametrize("count", ["0", "2", "x"])
    def test_several_sockets(
        self, monkeypatch: pytest.MonkeyPatch, count: str
    ) -> None:
        """[ADDR-2] [RUN-2] A server needs exactly one."""
        environment = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())}
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(sbus.StartError, match=f"LISTEN_FDS is {count}"):
            sbus.inherited_address()

    def test_two_servers(self, directory: Path) -> None:
        """[ADDR-3] [CONN-3] On one socket they both serve."""
        path = directory / "theirs"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(new_unix_socket(path))
            address = f"/dev/fd/{listener.fileno()}"
            handed = [listener.fileno()]
            buses = []
            for _ in range(2):
                bus = RealBus(directory, address=address, pass_fds=handed)
                buses.append(stack.enter_context(bus))
            peers = []
            for bus in buses:  # while one stands still, the other accepts
                stand_still(bus.process.pid)
                peers.append(stack.enter_context(connect(str(path))))
                assert peers[-1].fence() == []
                bus.process.send_signal(signal.SIGCONT)
            for _ in range(20):
                peers.append(stack.enter_context(connect(str(path))))
            assert [peer.fence() for peer in peers] == [[]] * 22


def stand_still(pid: int) -> None:
    """Stop a process, and return once it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


MODES = {"-f": 0o700, "-g": 0o770, "-o": 0o707, "-go": 0o777}


class TestMode:
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    @pytest.mark.parametrize("option", MODES)
    def test_mode(self, directory: Path, option: str, umask: int) -> None:
        """[ADDR-6] 0700, and 0070 and 0007 by -g and -o, for any umask."""
        with RealBus(directory, option, umask=umask):
            assert mode_of(directory / "bus") == MODES[option]

    @pytest.mark.parametrize("mode", MODES.values())
    def test_first_moment(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, mode: int
    ) -> None:
        """[ADDR-6] The mode is right before anybody could connect."""
        bind, modes = sbus.bind, []

        def watched(wire: socket.socket, name: bytes, address: str) -> None:
            bind(wire, name, address)
            modes.append(mode_of(directory / "bus"))

        monkeypatch.setattr(sbus, "bind", watched)
        before = os.umask(0o027)
        try:
            path = str(directory / "bus")
            sbus.Endpoint.open(path, mode, False).close()
            assert os.umask(0o027) == 0o027
        finally:
            os.umask(before)
        assert modes == [mode]

    @needs_root
    @pytest.mark.parametrize("option", MODES)
    def test_who_may_connect(self, directory: Path, option: str) -> None:
        """[ADDR-6] The owner; with -g the group; with -o the others."""
        with RealBus(directory, option) as bus:
            allowed = ""
            for letter, gid in (("g", os.getgid()), ("o", 4321)):
                with contextlib.suppress(PermissionError):
                    bus.connect(4321, gid).wire.close()
                    allowed += letter
            assert allowed == option[1:].strip("f")
            assert is_served(directory / "bus")


# =============================================================================
# Addresses that are taken
# =============================================================================

REPLACED = ["stale socket", "empty file"]
KEPT = {
    "file": "what is there is no socket",
    "directory": "what is there is no socket",
    "FIFO": "what is there is no socket",
    "link to nothing": "what is there is no socket",
    "link to a stale socket": "what is there is no socket",
    "silent socket": "a server listens there already",
    "stream server": "a server listens there already",
    "datagram server": "a server listens there already",
}


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


class TestOccupiedPath:
    @pytest.mark.parametrize("what", KEPT)
    @pytest.mark.parametrize("option", ["-f", "-r"])
    def test_what_is_kept(
        self, directory: Path, what: str, option: str
    ) -> None:
        """[ADDR-7] [ADDR-8] [RUN-2] One line says what is in the way."""
        path = directory / "bus"
        with occupied(path, what):
            assert KEPT[what] in refusal(1, option, "-a", str(path))

    @pytest.mark.parametrize("what", REPLACED)
    def test_what_is_replaced(self, directory: Path, what: str) -> None:
        """[ADDR-7] [ADDR-8] Only with -r."""
        path = directory / "bus"
        if what == "stale socket":
            new_unix_socket(path).close()
        else:
            path.touch()
        before = os.lstat(path)
        line = refusal(1, "-a", str(path))
        assert ("a stale socket is there; -r" in line) == ("stale" in what)
        assert os.path.samestat(before, os.lstat(path))
        with RealBus(directory, "-r"):
            assert is_served(path)
        assert os.listdir(directory) == ["log"]

    @pytest.mark.parametrize("option", ["-f", "-r"])
    def test_live_server(self, directory: Path, option: str) -> None:
        """[ADDR-8] It is not replaced, and sees no client come and go."""
        with RealBus(directory, "-c") as bus:
            line = refusal(1, option, "-a", bus.path)
            assert "a server listens there already" in line
            assert is_served(directory / "bus")
            assert bus.process.wait(SECONDS_MAX) == 0
        assert bus.log().count("\n") == 2

    def test_nothing_to_replace(self, directory: Path) -> None:
        """[ADDR-8] With -r there may also be nothing."""
        with RealBus(directory, "-r"):
            assert is_served(directory / "bus")

    def test_protected_directory(self, directory: Path) -> None:
        """[RUN-2] What may not be removed is not replaced."""
        if os.getuid() == 0:
            path = Path("/proc/self/environ")  # looks like an empty file
        else:
            path = directory / "bus"
            path.touch()
            directory.chmod(0o555)
        line = refusal(1, "-ra", str(path))
        assert line in (
            f"sbusd: {path}: Operation not permitted\n",
            f"sbusd: {path}: Permission denied\n",
        )

    def test_killed_server(self, directory: Path) -> None:
        """[ADDR-7] [ADDR-8] After a kill -9 a start needs -r, no more."""
        for _ in range(3):
            with RealBus(directory, "-r") as bus:
                assert is_served(directory / "bus")
                bus.process.kill()
                bus.process.wait()
            line = refusal(1, "-a", bus.path)
            assert "a stale socket is there; -r replaces it" in line

    def test_rivals(self, directory: Path) -> None:
        """[ADDR-9] Of three that start at once on a stale path one serves."""
        path = directory / "bus"
        for _ in range(25):
            new_unix_socket(path).close()
            assert statuses_of_rivals(path) == [0, 1, 1]
            assert os.listdir(directory) == []

    def test_directory_that_cannot_be_read(self, directory: Path) -> None:
        """[ADDR-9] [ADDR-10] It can do without a lock."""
        directory.chmod(0o333)
        with other_user():
            with pytest.raises(PermissionError):
                os.listdir(directory)
            endpoint = sbus.Endpoint.open(f"{directory}/bus", 0o700, False)
            connect(endpoint.address).wire.close()
            endpoint.close()
        directory.chmod(0o755)
        assert os.listdir(directory) == []

    def test_lock_is_awaited(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-9] A start waits while another one is under way."""
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        naps = []

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            assert os.listdir(directory) == []
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        sbus.Endpoint.open(f"{directory}/bus", 0o700, False).close()
        os.close(lock)
        assert len(naps) == 1

    def test_lock_is_not_awaited_for_ever(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-9] Who may read a directory can keep its lock."""
        monkeypatch.setattr(sbus, "LOCK_SECONDS_MAX", 0.0)
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        endpoint = sbus.Endpoint.open(f"{directory}/bus", 0o700, False)
        endpoint.close()
        os.close(lock)
        assert os.listdir(directory) == []

    def test_occupant_has_gone(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[RUN-2] Before it could be said what it was."""
        text = sbus.describe_occupant(f"{directory}/bus")
        assert text == "something was there; try again"

    def test_path_of_another(self, directory: Path) -> None:
        """[ADDR-10] What replaced our socket meanwhile is left alone."""
        path = directory / "bus"
        with RealBus(directory):
            path.unlink()
            path.write_text("theirs")
        assert path.read_text() == "theirs"

    def test_path_of_the_next_server(self, directory: Path) -> None:
        """[ADDR-10] Nor is the socket of a server that came after ours."""
        with RealBus(directory) as bus:
            (directory / "bus").unlink()
            with RealBus(directory):
                assert bus.stop() == 0
                assert is_served(directory / "bus")
        assert os.listdir(directory) == ["log"]

    def test_path_of_the_next_server_without_a_lock(
        self, directory: Path
    ) -> None:
        """[ADDR-9] [ADDR-10] Nor if somebody keeps both from the lock.

        The number of a file that is removed is given to the next one.
        """
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with RealBus(directory) as bus:
            bus.process.terminate()
            wait_for(lambda: sbus.is_stale(bus.path))
            freeze(bus)  # while it waits for the lock
            with RealBus(directory, "-r"):
                thaw(bus)
                assert bus.process.wait(SECONDS_MAX) == 0
                assert is_served(directory / "bus")
        os.close(lock)
        assert os.listdir(directory) == ["log"]

    def test_path_is_gone(self, directory: Path) -> None:
        """[ADDR-10] There is nothing to remove then."""
        with RealBus(directory) as bus:
            (directory / "bus").unlink()
            assert bus.stop() == 0
        assert "Traceback" not in bus.log()


def slowly(ask: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return a question whose answer may be out of date when it comes."""

    def ask_slowly(path: str) -> bool:
        answer = ask(path)
        time.sleep(0.002)
        return answer

    return ask_slowly


def statuses_of_rivals(path: Path) -> list[int]:
    """Start three servers with -r at once; return their exit statuses."""
    gate, opener = os.pipe()
    reader, writer = os.pipe()
    rivals = []
    for _ in range(3):
        rival = os.fork()
        if not rival:
            status = 70
            try:
                os.dup2(writer, 1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                for descriptor in (opener, reader, writer):
                    os.close(descriptor)
                slow = slowly(sbus.is_stale)
                pytest.MonkeyPatch().setattr(sbus, "is_stale", slow)
                os.read(gate, 1)  # returns when the parent closes opener
                status = sbus.main(["-a", str(path), "-r"])
            finally:
                os._exit(status)
        rivals.append(rival)
    for descriptor in (gate, opener, writer):
        os.close(descriptor)
    with os.fdopen(reader, "rb") as output:
        read_to_end(output)  # all listen or have ended
    assert is_served(path)
    for rival in rivals:
        os.kill(rival, signal.SIGTERM)
    ends = [os.waitpid(rival, 0)[1] for rival in rivals]
    return sorted(os.waitstatus_to_exitcode(end) for end in ends)


# =============================================================================
# The command line
# =============================================================================


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

    @pytest.mark.parametrize("name", sbus.LIMITS)
    def test_limit(self, name: str) -> None:
        """[LIMIT-8] Above zero it is taken."""
        options = sbus.parse_options([sbus.option_of(name), "007"])
        limits = {each: getattr(options, each) for each in LIMITS._fields}
        assert limits == {**LIMITS._asdict(), name: 7}

    def test_all_limits_have_options(self) -> None:
        """[LIMIT-8] Each of them, once."""
        assert sorted(sbus.LIMITS) == sorted(LIMITS._fields)

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


# =============================================================================
# Start
# =============================================================================


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
        max_clients = 64 - sbus.DESCRIPTORS_KEPT
        limits = LIMITS._replace(max_clients=max_clients)
        assert sbus.within_descriptors(LIMITS) == limits

    @pytest.mark.parametrize("options, max_clients", [((), 48), ((3,), 3)])
    def test_limit_of_clients(
        self, directory: Path, options: tuple[int, ...], max_clients: int
    ) -> None:
        """[RUN-6] It is lowered, never raised; the start line names it."""
        arguments = [f"--max-clients={option}" for option in options]
        with (
            RealBus(directory, *arguments, preexec_fn=allow(64)) as bus,
            bus.clients(max_clients) as peers,
        ):
            assert f" max-clients={max_clients} memory<=" in bus.log()
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
            [*COMMAND, "-x"],
            preexec_fn=lambda: os.closerange(0, 3),
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 2


def allow(count: int) -> Callable[[], None]:
    """Return what lets a server have so many descriptors."""
    limit = (count, count)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)


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


# =============================================================================
# End
# =============================================================================


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
        for _ in range(8):
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

    def test_pause_of_a_holder(self, directory: Path) -> None:
        """[BLOCK-16] Time in which the server stood still does not count."""
        packets = publications(2_000)
        with (
            RealBus(directory, "-v", "--block-timeout", "1") as bus,
            bus.clients(3) as (reader, sender, other),
        ):
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
            reader.fence()
            with child_process(lambda: sender.send(*packets)):
                bus.wait_for_log("paused for client=1 ")
                freeze(bus)  # while we, the reader, stand still as well
                time.sleep(2.2)
                thaw(bus)
                assert other.fence() == []
                assert [reader.receive() for _ in packets] == packets
            assert reader.fence() == []

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


# =============================================================================
# Log
# =============================================================================

HOSTILE = (
    b"",
    b"\n",
    b"BAD\r\nsbusd: stop\n\x1b[2J",
    b"BAD" + bytes(range(256)),
    b"\xff" * 400,
    b"x" * 100_000,
    b"SUB !/" + b"\xff" * 90,
    b"SUB " + b"\x80" * 5_000,
    b"MSG no NUL \xff\n",
)


class TestLog:
    def test_healthy_bus_is_quiet(self, directory: Path) -> None:
        """[RUN-14] One line at the start, one at the end."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"), b"UNSUB k", b"UNSUB k")
            peer.send(b"CMSG unknown", b"CMSG echo/off")
            peer.fence()
        start = f"sbusd: start {bus.path} pid={bus.process.pid}"
        assert bus.log() == f"{start}{told_of()}\nsbusd: stop\n"

    @pytest.mark.parametrize("option", ["-f", "-v"])
    def test_hostile_bytes(self, directory: Path, option: str) -> None:
        """[RUN-15] Lines are printable ASCII of at most 300 bytes."""
        with RealBus(directory, option) as bus:
            for packet in HOSTILE:
                with bus.connect() as peer:
                    peer.send(b"SUB \xff\n", b"CMSG \xff\n", packet)
                    assert peer.receive_all() == []
        lines = bus.log_path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        for line in lines:
            assert re.fullmatch(b"sbusd: [ -~]{1,292}", line), line
        assert lines.count(b"sbusd: stop") == 1
        assert sum(b"disconnect client=" in line for line in lines) > 3

    def test_keys_are_cut(self, directory: Path) -> None:
        """[RUN-15] Of a client's text at most 80 bytes are shown."""
        with RealBus(directory, "-v") as bus, bus.connect() as peer:
            peer.send(b"SUB " + b"k" * 81)
            peer.fence()
            assert "k" * 70 in bus.log()
            assert "k" * 81 not in bus.log()

    def test_payloads_are_not_shown(self, directory: Path) -> None:
        """[RUN-15] Not even to whoever asks for every decision."""
        with RealBus(directory, "-v") as bus, bus.connect() as peer:
            peer.send(b"SUB k\0hidden", publish(b"k", b"hidden"))
            peer.send(b"CMSG unknown\0hidden", b"CMSG echo/off\0hidden")
            peer.send(b"UNSUB k\0hidden", b"BAD\0hidden")
            assert len(peer.receive_all()) == 1
        assert bus.log().count("[") > 6
        assert "hidden" not in bus.log()

    def test_every_decision(self, directory: Path) -> None:
        """[RUN-14] With -v the log names the rule of each packet."""
        own = f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}"
        steps = {
            b"SUB k": "SUB b'k': its count is 1 [SUB-1]",
            b"SUB k\0": "SUB b'k': its count is 2 [SUB-2]",
            b"UNSUB k": "UNSUB b'k': its count is 1 [UNSUB-1]",
            b"UNSUB l": "UNSUB b'l': ignored [UNSUB-2]",
            publish(b"k", b"123"): "MSG b'k' 3 bytes, message 1: for client 1"
            " [PUB-1]",
            publish(own.encode() + b"/x"): f"MSG b'{own}/x' 0 bytes, message 2"
            ": for client none [CRED-10]",
            b"CMSG echo/off": "CMSG b'echo/off': done [ECHO-2]",
            b"CMSG echo/on": "CMSG b'echo/on': done [ECHO-3]",
            b"CMSG order/stack": "CMSG b'order/stack': done [BLOCK-2]",
            b"CMSG what": "CMSG b'what': ignored [CTL-2]",
            WHOAMI: "CMSG b'!/cred/whoami': done [CRED-2]",
        }
        with RealBus(directory, "-v") as bus:
            with bus.connect() as peer:
                peer.send(*steps)
                peer.fence()
            bus.wait_for_log(" end of input\n")
            with bus.connect() as peer:
                peer.send(b"BAD")
                assert peer.is_disconnected()
        who = f"client=1 uid={os.getuid()} pid={os.getpid()}"
        log = bus.log()
        assert f"sbusd: open {who} [CRED-1]\n" in log
        for line in steps.values():
            assert f"sbusd: {who} {line}\n" in log
        assert f"sbusd: {who}: sent message 1\n" in log
        assert f"sbusd: {who}: sent a control packet\n" in log
        assert f"sbusd: close {who} end of input\n" in log
        assert "sbusd: close client=2" in log
        positions = [log.index(line) for line in steps.values()]
        assert positions == sorted(positions)

    def test_every_decision_on_a_stalled_client(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[RUN-14] With -v those of flood control are named, too."""
        caplog.set_level(logging.DEBUG, "sbus")
        kernel = FakeKernel(sbus.Limits(max_backlog=200))
        kernel.bus.observers.append(sbus.Narrator())
        reader = kernel.connect(pid=1)
        sender = kernel.connect(pid=2)
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/hard/discard")
        sender.send(*publications(3))  # taken, queued, discarded
        reader.read()
        reader.send(b"CMSG blocking/soft/discard")
        sender.send(publish(b"k"))  # discarded
        reader.send(b"CMSG blocking/soft/block")
        sender.send(publish(b"k"))  # queued
        reader.read()
        reader.send(WHOAMI)
        reader.read()
        reader.wire.deaf = True
        sender.send(publish(b"k"))
        to, by = "client=1 uid=1000 pid=1:", "client=2 uid=1000 pid=2:"
        size = len(publish(b"k")) + sbus.PACKET_OVERHEAD_BYTES
        answer = len(WHOAMI + b"\0!/cred/100/1000/1") + 128
        decisions = [
            line for line in caplog.messages if line.startswith((to, by))
        ]
        assert decisions == [
            f"{to} sent message 1",
            f"{to} stalled, queued message 2, backlog {size + 1} bytes"
            " [BLOCK-4]",
            f"{to} discarded message 3 [BLOCK-9]",
            f"{to} sent message 2",
            f"{to} discarded message 4 [BLOCK-5]",
            f"{by} paused for client=1 [BLOCK-7]",
            f"{to} stalled, queued message 5, backlog {size} bytes [BLOCK-4]",
            f"{to} sent message 5",
            f"{by} resumed [BLOCK-12]",
            f"{to} stalled, queued a control packet, backlog {answer} bytes"
            " [BLOCK-17]",
            f"{to} sent a control packet",
            f"{to} discarded message 6 [CONN-8]",
        ]

    def test_wide_fan_out(self, caplog: pytest.LogCaptureFixture) -> None:
        """[RUN-15] A line names the first receivers, and counts all."""
        caplog.set_level(logging.DEBUG, "sbus")
        kernel = FakeKernel()
        kernel.bus.observers.append(sbus.Narrator())
        for _ in range(21):
            kernel.connect().send(b"SUB k")
        kernel.connect().send(publish(b"k"))
        numbers = " ".join(str(number) for number in range(1, 21))
        assert f": for client {numbers} and 1 more [PUB-1]\n" in caplog.text


class TestBlockedLog:
    def test_pipe_that_nobody_reads(self, directory: Path) -> None:
        """[RUN-16] The bus goes on; lines are left out, none is cut."""
        reader, writer = os.pipe()
        path = str(directory / "bus")
        with started("-va", path, stderr=writer) as output:
            os.close(writer)
            read_to_end(output)
            with connect(path) as peer:
                for number in range(2_000):
                    peer.send(b"SUB %d" % number, b"UNSUB %d" % number)
                assert peer.fence() == []
            for _ in range(20):
                with connect(path) as peer:
                    peer.send(b"malformed")
                    assert peer.is_disconnected()
            assert is_served(directory / "bus")
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read()
        assert 0 < text.count(b"\n") < 4_000
        assert re.fullmatch(b"(sbusd: [ -~]+\n)+", text)

    def test_terminal_that_nobody_reads(self, directory: Path) -> None:
        """[RUN-16] The bus goes on; it says that it has room, and waits."""
        reader, terminal = os.openpty()
        path = f"{directory}/bus"
        with started("-va", path, stderr=terminal) as output:
            os.close(terminal)
            read_to_end(output)
            with connect(path) as peer:
                peer.send(*publications(2_000))
                assert peer.fence() == []
        with os.fdopen(reader, "rb", 0) as screen:
            assert screen.read(13) == b"sbusd: start "

    @pytest.mark.parametrize("status, argument", [(1, "--trace=/"), (2, "-x")])
    def test_full_pipe_at_the_start(
        self, directory: Path, status: int, argument: str
    ) -> None:
        """[RUN-16] [RUN-1] [RUN-2] A refusal does not wait either."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        done = subprocess.run(
            [*COMMAND, "-a", f"{directory}/bus", argument],
            stderr=writer,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == status
        os.close(reader)
        os.close(writer)

    @pytest.mark.parametrize("what", ["full disk", "closed pipe"])
    def test_log_that_fails(self, directory: Path, what: str) -> None:
        """[RUN-16] The bus goes on."""
        if what == "full disk":
            log = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, log = os.pipe()
            os.close(reader)
        path = str(directory / "bus")
        with started("-va", path, stderr=log) as output:
            os.close(log)
            assert read_to_end(output) == b""
            with connect(path) as peer:
                peer.send(b"malformed")
                assert peer.is_disconnected()
            assert is_served(directory / "bus")


# =============================================================================
# Trace
# =============================================================================


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace without their time."""
    events = []
    for line in path.read_bytes().splitlines():
        event = json.loads(line.decode("ascii"))
        assert list(event)[:3] == ["n", "t", "ev"]
        assert isinstance(event.pop("t"), int)
        events.append(event)
    return events


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """Return events with their numbers from 1."""
    return [{"n": n, **event} for n, event in enumerate(events, 1)]


class Traced(NamedTuple):
    """A bus on a fake kernel with a trace."""

    kernel: FakeKernel
    path: Path

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events so far, of some kinds."""
        events = events_of(self.path)
        return [event for event in events if event["ev"] in kinds]


@contextlib.contextmanager
def traced(
    path: Path, payloads: bool = False, **options: Any
) -> Iterator[Traced]:
    """Give a bus on a fake kernel with a trace, and end it."""
    kernel = FakeKernel(**options)
    trace = sbus.Trace(str(path), payloads, {"version": "7"})
    kernel.bus.observers.append(trace)
    yield Traced(kernel, path)
    trace.close()


class TestTraceEvents:
    def test_every_kind(self, directory: Path) -> None:
        """[TRACE-1] [TRACE-2] All events, their fields and their order."""
        path = directory / "trace"
        limits = sbus.Limits(max_backlog=200)
        with traced(path, limits=limits) as (kernel, _):
            reader = kernel.connect(uid=1000, gid=100, pid=11)
            sender = kernel.connect(uid=1001, gid=101, pid=12)
            reader.wire.room = 1
            reader.send(b"SUB k\0x", b"CMSG blocking/hard/discard\0x")
            sender.send(*publications(3))  # taken, queued, discarded
            reader.read()
            reader.send(b"CMSG blocking/soft/discard")
            sender.send(publish(b"k"))  # discarded
            reader.send(b"UNSUB k")
            sender.send(publish(b"k"))  # for nobody
            reader.close()
            sender.send(b"BAD")
        assert events_of(path) == numbered(
            {"ev": "start", "version": "7"},
            {"ev": "open", "c": 1, "gid": 100, "uid": 1000, "pid": 11},
            {"ev": "open", "c": 2, "gid": 101, "uid": 1001, "pid": 12},
            {"ev": "sub", "c": 1, "pattern": "k"},
            {"ev": "ctl", "c": 1, "key": "blocking/hard/discard"},
            {"ev": "msg", "c": 2, "m": 1, "key": "k", "size": 1},
            {"ev": "msg", "c": 2, "m": 2, "key": "k", "size": 1},
            {"ev": "msg", "c": 2, "m": 3, "key": "k", "size": 1},
            {"ev": "send", "m": 1, "c": 1},
            {"ev": "drop", "m": 3, "c": 1, "reason": "hard/discard"},
            {"ev": "send", "m": 2, "c": 1},
            {"ev": "ctl", "c": 1, "key": "blocking/soft/discard"},
            {"ev": "msg", "c": 2, "m": 4, "key": "k", "size": 0},
            {"ev": "drop", "m": 4, "c": 1, "reason": "soft/discard"},
            {"ev": "unsub", "c": 1, "pattern": "k"},
            {"ev": "msg", "c": 2, "m": 5, "key": "k", "size": 0},
            {"ev": "close", "c": 1, "reason": "end of input"},
            {
                "ev": "close",
                "c": 2,
                "reason": "[PKT-2] unknown packet kind b'BAD'",
            },
            {"ev": "stop", "version": "7"},
        )

    def test_client_that_no_longer_receives(self, directory: Path) -> None:
        """[TRACE-1] [CONN-8] What is for it is dropped, answers unseen."""
        with traced(directory / "trace") as (kernel, path):
            deaf = kernel.connect()
            deaf.wire.deaf = True
            deaf.send(b"SUB k", publish(b"k"), WHOAMI, publish(b"k"))
        drops = [event for event in events_of(path) if event["ev"] == "drop"]
        assert [drop["m"] for drop in drops] == [1, 2]
        assert {drop["reason"] for drop in drops} == {"deaf"}

    def test_what_has_no_effect(self, directory: Path) -> None:
        """[TRACE-1] Refused packets and control answers are no events."""
        with traced(directory / "trace") as (kernel, path):
            kernel.connect().send(b"UNSUB k", WHOAMI)
            kernel.connect().send(b"SUB !/x")
            kernel.connect().send(b"SUB !/cred/1/2/3/x")
            kernel.connect().send(b"MSG !\0")
            kernel.connect().send(b"MSG k")
        kinds = [event["ev"] for event in events_of(path)]
        assert kinds == ["start", "open", "ctl", *["open", "close"] * 4] + [
            "stop"
        ]

    def test_bytes_of_keys(self, directory: Path) -> None:
        """[TRACE-1] Each is the code point of its value; lines are ASCII."""
        key = bytes(range(1, 256)).replace(b"!", b"")
        with traced(directory / "trace") as trace:
            peer = trace.kernel.connect()
            peer.send(b"SUB " + key, publish(key), b"CMSG " + key)
            peer.send(b"UNSUB " + key)
            events = trace.events("sub", "msg", "ctl", "unsub")
        texts = [event.get("key", event.get("pattern")) for event in events]
        assert texts == [key.decode("latin-1")] * 4

    def test_payload(self, directory: Path) -> None:
        """[TRACE-3] Only where it is asked for, in base64."""
        payload = bytes(range(256))
        for is_wanted in (False, True):
            path = directory / f"trace-{is_wanted}"
            with traced(path, is_wanted) as trace:
                trace.kernel.connect().send(publish(b"k", payload))
                (event,) = trace.events("msg")
                data = base64.b64encode(payload).decode("ascii")
                assert event.get("data") == (data if is_wanted else None)
                assert event["size"] == 256

    @pytest.mark.parametrize("prefix", ["", "!/cred/1/2/3"])
    def test_payload_of_a_secret(self, directory: Path, prefix: str) -> None:
        """[TRACE-4] Never; the key and the size are written."""
        options = {"cred_prefix": prefix.encode("ascii")}
        key = (prefix and prefix + "/") + "!/cred/100/1000/11/x"
        with traced(directory / "trace", True, **options) as trace:
            reader = trace.kernel.connect(pid=11)
            reader.send(b"SUB " + key.encode("ascii"))
            packet = publish(key.encode("ascii"), b"hidden")
            trace.kernel.connect().send(packet)
            assert reader.read() == [packet]
            (event,) = trace.events("msg")
        assert event == {
            "n": 5, "ev": "msg", "c": 2, "m": 1, "key": key, "size": 6,
        }  # fmt: skip
        assert b"hidden" not in trace.path.read_bytes()
        assert b"aGlkZGVu" not in trace.path.read_bytes()

    def test_events_of_a_real_bus(self, directory: Path) -> None:
        """[TRACE-1] [TRACE-2] Numbers have no gaps, sends follow messages."""
        path = directory / "trace"
        with (
            RealBus(directory, "--trace", str(path)) as bus,
            bus.clients(2) as (reader, sender),
        ):
            reader.send(b"SUB k")
            reader.fence()
            sender.send(*publications(500))
            for _ in range(500):
                reader.receive()
        events = events_of(path)
        about = {
            "version": sbus.__version__,
            "address": bus.path,
            "host": socket.gethostname(),
            "cred_prefix": "",
        }
        assert events[0] == {"n": 1, "ev": "start", **about}
        assert events[-1] == {"n": len(events), "ev": "stop", **about}
        assert [event["n"] for event in events] == [*range(1, len(events) + 1)]
        order = [e["m"] for e in events if e["ev"] == "msg"]
        assert order == [*range(1, 501)]
        assert order == [e["m"] for e in events if e["ev"] == "send"]
        assert {e["reason"] for e in events if e["ev"] == "close"} <= {
            "end of input", "stop",
        }  # fmt: skip

    def test_time(self, directory: Path) -> None:
        """[TRACE-1] Nanoseconds since 1970."""
        before = time.time_ns()
        with traced(directory / "trace"):
            pass
        for line in (directory / "trace").read_text().splitlines():
            assert before <= json.loads(line)["t"] <= time.time_ns()


class TestTraceFile:
    def test_mode(self, directory: Path) -> None:
        """[TRACE-5] 0600, whatever the umask allows."""
        path = directory / "trace"
        with RealBus(directory, "--trace", str(path), umask=0):
            assert mode_of(path) == 0o600

    def test_start_is_written_at_once(self, directory: Path) -> None:
        """[TRACE-1] A bus without clients has a trace as well."""
        path = directory / "trace"
        with RealBus(directory, "--trace", str(path)):
            assert [event["ev"] for event in events_of(path)] == ["start"]

    def test_two_runs(self, directory: Path) -> None:
        """[TRACE-5] [TRACE-2] The second is appended, numbered from 1."""
        path = directory / "trace"
        path.write_text('{"n":1,"t":1,"ev":"x"}\n')
        for _ in range(2):
            with traced(path):
                pass
        numbers = [(event["n"], event["ev"]) for event in events_of(path)]
        runs = [(1, "start"), (2, "stop")] * 2
        assert numbers == [(1, "x"), *runs]

    def test_unfinished_line(self, directory: Path) -> None:
        """[TRACE-5] What a crash cut off stays a line of its own."""
        path = directory / "trace"
        path.write_text('{"n":1,"t":1,"ev"')
        with traced(path):
            pass
        first, *others = path.read_text().splitlines()
        assert first == '{"n":1,"t":1,"ev"'
        assert [json.loads(line)["n"] for line in others] == [1, 2]

    def test_killed_server(self, directory: Path) -> None:
        """[TRACE-5] What happened before the last round is in the file."""
        path = directory / "trace"
        for _ in range(2):
            with (
                RealBus(directory, "-r", "--trace", str(path)) as bus,
                bus.connect() as peer,
            ):
                peer.send(b"SUB k")
                peer.fence()
                peer.fence()  # answered in a later round than the first
                bus.process.kill()
                bus.process.wait()
        kinds = [event["ev"] for event in events_of(path)]
        assert kinds[:4] == ["start", "open", "sub", "ctl"]
        assert kinds.count("start") == 2
        assert "stop" not in kinds

    @pytest.mark.parametrize(
        "what, reason",
        [
            ("directory", "Is a directory"),
            ("FIFO", "not a regular file"),
            ("link to nothing", "a symbolic link is not followed"),
            ("stream server", "No such device or address"),
        ],
    )
    def test_wrong_file(self, directory: Path, what: str, reason: str) -> None:
        """[TRACE-5] [RUN-2] One line; nothing is left behind."""
        options = ("-a", "bus", "--trace", "trace")
        with occupied(directory / "trace", what):
            line = refusal(1, *options, cwd=directory)
        assert line == f"sbusd: trace: {reason}\n"
        assert os.listdir(directory) == ["trace"]

    @needs_root
    def test_file_of_another_user(self, directory: Path) -> None:
        """[TRACE-5] [RUN-2] Who could read what is written to it."""
        path = directory / "trace"
        path.touch()
        os.chown(path, 1234, -1)
        line = refusal(1, "-a", "bus", "--trace", str(path), cwd=directory)
        assert line == f"sbusd: {path}: another user's file\n"

    def test_device(self, directory: Path) -> None:
        """[TRACE-5] [RUN-2] A device is no file."""
        options = ("-a", "bus", "--trace", "/dev/full")
        line = refusal(1, *options, cwd=directory)
        assert line == "sbusd: /dev/full: not a regular file\n"

    def test_full_disk(self, directory: Path) -> None:
        """[TRACE-6] [TRACE-2] One line in the log, and the bus goes on."""
        path = directory / "trace"
        with (
            RealBus(directory, "--trace", str(path)) as bus,
            file_size_limit(2_000, bus.process.pid),
            bus.connect() as peer,
        ):
            for number in range(50):
                peer.send(b"SUB %d" % number)
            assert peer.fence() == []
            bus.wait_for_log("[TRACE-6] no trace from now on: ")
            assert is_served(directory / "bus")
        assert bus.log().count("TRACE-6") == 1
        assert path.stat().st_size == 2_000
        *lines, _ = path.read_text("ascii").splitlines()
        numbers = [json.loads(line)["n"] for line in lines]
        assert numbers == [*range(1, len(numbers) + 1)]

    def test_full_disk_at_the_start(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[TRACE-6] A server starts without its trace, too."""
        path = directory / "trace"
        with file_size_limit(0), traced(path) as trace:
            peer = trace.kernel.connect()
            peer.send(WHOAMI)
            assert len(peer.read()) == 1
        assert path.read_bytes() == b""
        assert "[TRACE-6] no trace from now on: " in caplog.text


@contextlib.contextmanager
def file_size_limit(bytes_max: int, pid: int = 0) -> Iterator[None]:
    """Let files grow no larger for a while, as if the disk were full."""
    kind = resource.RLIMIT_FSIZE
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (bytes_max, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, (soft, hard))
