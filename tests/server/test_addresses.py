"""Tests of addresses: paths, modes, occupied places, inherited sockets."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import sys
from pathlib import Path

import pytest

import sbus_client
from processes import child_process
from real_bus import (
    RealBus,
    freeze,
    needs_root,
    seqpacket_pair,
    thaw,
    wait_for,
)
from servers import (
    ABSTRACT,
    USER,
    Forked,
    bound,
    daemon,
    drop_privileges,
    give_to_user,
    is_served,
    mode_of,
    refusal,
    refused_start,
    serve_as_daemon,
)

# ---- Where a server listens by default


class Root:
    """A root directory, in which a user looks for the default."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        for name in ("dev", "tmp", "run/user"):
            (directory / name).mkdir(parents=True)
        (directory / "dev" / "null").touch(0o666)
        (directory / "tmp").chmod(0o1777)
        self.environment: dict[str, str] = {}
        self.umask = 0
        self.become_user = drop_privileges

    def enter(self) -> None:
        """Be that user there, with no other environment."""
        os.chroot(self.path)
        os.chdir("/")
        os.umask(self.umask)
        os.environ.clear()
        os.environ.update(self.environment)
        self.become_user()

    def clients_address(self) -> str:
        """Return where a client looks for the server, or why it does not."""
        reader, writer = os.pipe()

        def look() -> None:
            self.enter()
            try:
                address = sbus_client.default_address()
            except sbus_client.AddressError as error:
                address = str(error)
            os.write(writer, address.encode("ascii"))

        with child_process(look), os.fdopen(reader) as answer:
            os.close(writer)
            return answer.read()


RUN, TMP = f"/run/user/{USER}", f"/tmp/sbus-{USER}"
SQUATTERS = ["other user", "mode 0777", "mode 0710", "link", "file", "nothing"]


@needs_root
def test_root(directory: Path) -> None:
    """[ADDR-1] Root's is in /run, whatever the user's directory is."""
    root = Root(directory)
    root.become_user = lambda: None
    root.environment["XDG_RUNTIME_DIR"] = "/dev"
    with Forked(root.enter) as server:
        server.wait()
        assert is_served(directory / "run" / "sbus.socket")


# ---- The default of a user, in a directory that is that user's alone


@needs_root
@pytest.mark.parametrize("variable", ["", "/none", "/tmp", "/dev/null"])
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("umask", [0, 0o777])
def test_default(
    directory: Path, variable: str, has_run: bool, umask: int
) -> None:
    """[ADDR-1] Server and client agree, in whatever environment."""
    root = Root(directory)
    root.umask = umask
    if variable:
        root.environment["XDG_RUNTIME_DIR"] = variable
    folder = RUN if has_run else TMP
    if has_run:
        (directory / RUN[1:]).mkdir()
        give_to_user(directory / RUN[1:])
    for _ in range(2):  # the second finds what the first has made
        assert root.clients_address() == f"{folder}/sbus.socket"
        with Forked(root.enter) as server:
            assert server.wait() == b""
            assert is_served(directory / folder[1:] / "sbus.socket")
            assert server.end() == 0
    assert (directory / TMP[1:]).exists() != has_run
    assert has_run or mode_of(directory / TMP[1:]) == 0o700


@needs_root
@pytest.mark.parametrize("squatter", SQUATTERS)
def test_squatter(
    directory: Path, squatter: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """[ADDR-1] [RUN-1] A directory of this user alone, or none."""
    root, path = Root(directory), directory / TMP[1:]
    target = directory / "theirs" if squatter == "link" else path
    target.touch() if squatter == "file" else target.mkdir()
    target.chmod(int(squatter[5:], 8) if "mode" in squatter else 0o700)
    if squatter != "other user":
        give_to_user(target)
    if squatter == "link":
        path.symlink_to("/theirs")
    if squatter == "nothing":  # not even the folder, so there is no server
        path.rmdir()
        path.parent.rmdir()
    else:
        assert f"{TMP}: not yours alone" in root.clients_address()
    refused_start(root.enter)
    errors = capfd.readouterr().err
    assert "-a ADDRESS" in errors and TMP in errors
    assert errors.count("\n") == 1
    assert list(directory.rglob("*.socket")) == []


# Beside those that the kit tries
WRONG = [
    "",
    os.fsdecode("é".encode() * 54),
    "no/bus",
    "a\nb/bus",
    "/proc/sbus",
]
WRONG += [
    f"{ABSTRACT}/{digits}" for digits in ("", "0", "000", "0161", "6100")
]
WRONG += ["@name", "abstract:name", "fd:3", "unix:/bus"]
WRONG += [f"/dev/fd/{n}" for n in ("99999999999", "-1", "x")]


# ---- An address that is given


@pytest.mark.parametrize("address", WRONG)
def test_wrong(directory: Path, address: str) -> None:
    """[RUN-1] A line says what is wrong, and no file is left."""
    environment = {**os.environ, "SBUS_ADDRESS": f"{directory}/other"}
    refusal(1, "-a", address, cwd=directory, env=environment)
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    "path", ["b", "./@b", "/".ljust(107, "b"), "d" * 105 + "/b", "link/../b"]
)
def test_path(
    directory: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[ADDR-10] It has 1 to 107 bytes; the server removes its socket."""
    cwd = directory / ("e" * 90)  # from the root it may be longer
    for name in ("a/c", "d" * 105):
        (cwd / name).mkdir(parents=True)
    (cwd / "link").symlink_to("a/c")  # whose parent the kernel knows
    if path[0] == "/":
        path = str(directory) + path[: -len(str(directory))]
    file = Path("a/b" if ".." in path else path)
    monkeypatch.chdir(cwd)
    with RealBus(directory, address=path):
        assert file.is_socket()
        assert len(str(file)) > 107 or is_served(file)
    assert not (cwd / file).exists()


def test_abstract_name(directory: Path) -> None:
    """[ADDR-4] [RUN-1] It has one server, which logs who may connect."""
    address = f"{ABSTRACT}/00{secrets.token_hex(8)}"
    for options in ([], ["-u", str(os.getuid())]):
        with RealBus(directory, *options, address=address) as bus:
            start = bus.log().split("start ")[-1]
            assert ("any user may connect" in start) == (not options)
            assert "Address already in use" in refusal(1, "-ra", address)


def test_random_name_of_a_daemon(directory: Path) -> None:
    """[ADDR-4] [RUN-8] The command that starts it prints the name."""
    with daemon(directory, address=ABSTRACT) as server:
        digits = server.output.rpartition("/")[2]
        assert is_served(bytes.fromhex(digits))


# ---- A socket that a server inherits


@pytest.mark.parametrize("number", [0, 1, 2])
def test_standard_stream(directory: Path, number: int) -> None:
    """[ADDR-1] The server listens there, and redirects a copy."""
    name = ("stdin", "stdout", "stderr")[number]
    address = f"/dev/fd/{number}"
    with bound(directory / "bus") as listener:
        listener.listen()
        with RealBus(directory, address=address, **{name: listener}):
            wait_for(lambda: is_served(directory / "bus"))
        if number == 2:
            with daemon(directory, address=address, stderr=listener):
                assert is_served(directory / "bus")


def test_other_descriptors(directory: Path) -> None:
    """[RUN-1] Only a Unix-domain SEQPACKET socket will do."""
    pair = seqpacket_pair()
    with pair[0], pair[1], socket.socket() as tcp, open(__file__) as file:
        for number in (pair[0].fileno(), tcp.fileno(), file.fileno()):
            address = f"/dev/fd/{number}"
            line = refusal(1, "-a", address, pass_fds=[number])
            assert line.startswith(f"sbusd: {address}: ")


# ---- A place that is taken


def test_live_server(directory: Path) -> None:
    """[ADDR-8] A start does not replace it, and is no client of it."""
    with RealBus(directory) as bus:
        freeze(bus)
        assert "server" in refusal(1, "-r", "-a", bus.path)
        thaw(bus)
        with bus.connect() as peer:
            assert peer.stats()["client"] == 1  # the first that came


def test_rivals(directory: Path) -> None:
    """[ADDR-8] A start waits for another one that replaces the socket."""
    path = directory / "bus"
    bound(path).close()
    gate, opener = os.pipe()
    events, note = os.pipe()

    def hold(event: str, _: object) -> None:
        if event == "os.remove":  # it knows that the socket is stale
            os.write(note, b"removes ")
            os.read(gate, 1)

    def tell(event: str, _: object) -> None:
        if event in ("fcntl.flock", "socket.connect"):
            os.write(note, event.encode())

    arguments = ("-ra", str(path))
    with Forked(lambda: sys.addaudithook(hold), *arguments) as first:
        assert os.read(events, 8) == b"removes "
        with Forked(lambda: sys.addaudithook(tell), *arguments) as second:
            assert os.read(events, 11) == b"fcntl.flock"
            os.write(opener, bytes(9))  # for all that it removes, to its end
            first.wait()
            second.wait()
            assert is_served(path)
            assert (first.end(), second.end()) == (0, 1)
    for descriptor in (gate, opener, events, note):
        os.close(descriptor)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("mode", [0o333, 0o777])
def test_directory_that_cannot_be_locked(directory: Path, mode: int) -> None:
    """[ADDR-8] A server starts and ends without the lock."""
    lock = os.open(directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory.chmod(mode)
    with Forked(drop_privileges, "-oa", f"{directory}/bus") as server:
        server.wait()
        assert is_served(directory / "bus")
        assert server.end() == 0
    directory.chmod(0o755)
    os.close(lock)
    assert os.listdir(directory) == []


def test_directory_that_was_removed(directory: Path) -> None:
    """[RUN-1] [ADDR-10] An absolute path needs no current directory."""

    def enter() -> None:
        gone = directory / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()

    serve_as_daemon(directory, enter)
    line = refusal(1, "-a", "bus", preexec_fn=enter)
    assert line.startswith("sbusd: bus: ")
