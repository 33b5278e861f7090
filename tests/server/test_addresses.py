"""Tests of addresses: paths, modes, occupied places, inherited sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Callable

import pytest

import sbus
from processes import SECONDS_MAX, child_process
from real_bus import (
    RealBus,
    connect,
    freeze,
    needs_root,
    other_user,
    read_to_end,
    thaw,
    wait_for,
)
from servers import (
    ABSTRACT,
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
)


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
            wait_for(lambda: path.is_socket() and is_served(path))


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
            sbus.open_endpoint(f"{directory}/a\0b", 0o700, False)
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

    def test_standard_error_of_a_daemon(self, directory: Path) -> None:
        """[RUN-7] It is silenced, and the socket is not."""
        with new_unix_socket(directory / "bus") as listener:
            listener.listen()
            with daemon(directory, address="/dev/fd/2", stderr=listener):
                assert is_served(directory / "bus")

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
        monkeypatch.setattr(os, "getuid", lambda: 0)
        assert sbus.default_address() == "/run/sbus.socket"

    @pytest.mark.parametrize("count", ["0", "2", "x"])
    def test_several_sockets(
        self, monkeypatch: pytest.MonkeyPatch, count: str
    ) -> None:
        """[ADDR-2] [RUN-2] A server needs exactly one."""
        environment = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())}
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(sbus.StartError, match=f"LISTEN_FDS is {count}"):
            sbus.default_address()

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
        listen, modes = socket.socket.listen, []

        def watched(listener: socket.socket, backlog: int) -> None:
            modes.append(mode_of(directory / "bus"))
            listen(listener, backlog)
            modes.append(mode_of(directory / "bus"))

        monkeypatch.setattr(socket.socket, "listen", watched)
        before = os.umask(0o027)
        try:
            path = str(directory / "bus")
            sbus.open_endpoint(path, mode, False).close()
            assert os.umask(0o027) == 0o027
        finally:
            os.umask(before)
        assert modes == [mode, mode]

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
            endpoint = sbus.open_endpoint(f"{directory}/bus", 0o700, False)
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
        sbus.open_endpoint(f"{directory}/bus", 0o700, False).close()
        os.close(lock)
        assert len(naps) == 1

    def test_lock_is_not_awaited_for_ever(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-9] Who may read a directory can keep its lock."""
        monkeypatch.setattr(sbus, "LOCK_SECONDS_MAX", 0.0)
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        endpoint = sbus.open_endpoint(f"{directory}/bus", 0o700, False)
        endpoint.close()
        os.close(lock)
        assert os.listdir(directory) == []

    def test_path_that_is_taken_meanwhile(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-7] [RUN-2] After it was seen that nothing is there."""
        path = directory / "bus"
        monkeypatch.setattr(sbus, "make_way", lambda *_: path.touch())
        with pytest.raises(sbus.StartError, match="there already"):
            sbus.open_endpoint(str(path), 0o700, True)
        assert path.is_file()

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
