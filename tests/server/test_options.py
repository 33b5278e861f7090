"""Tests of the options of the server: what is wrong, and what they do."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pwd
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

import sbus
from packets import publish
from processes import SECONDS_MAX
from real_bus import RealBus, connect, needs_root
from servers import Forked, is_served, mode_of, refusal, refused_start
from small_pythons import SMALL_PYTHONS

WRONG = ["a\nb\x1b[m\x80", "x" * 1000, "--group=1"]  # beside those of the kit
WRONG += ["-u ", "-u -1", "-u \udcff", "--cred-prefix ", "--max-packet 1.5"]
WRONG += [
    "--block-timeout 0.0",
    "--max-key 15m",
    "--cred-prefix !/cred/01/2/3",
]
WRONG += ["--cred-prefix !/cred/1/2/3/!/cred/1/2/x"]
WRONG_LIMITS = ["0", "-1", "", "x", "0x10", "1e3", "1_0", " 1", "٣", "nan"]
WRONG_LIMITS += ["5w"]
DEFAULTS = {name: default for name, (default, *_) in sbus.LIMITS.items()}
SHORT = {"-c": "--close", "-d": "--daemon", "-f": "--foreground"}
SHORT.update({"-g": "--group", "-o": "--others", "-r": "--replace"})
SHORT.update({"-v": "--verbose", "-aA": "--address=A"})
SHORT.update({"-pP": "--pid-file=P", "-u5": "--user=5"})


# ---- What an option means


@pytest.mark.parametrize("words", WRONG, ids=ascii)
def test_wrong_option(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """[RUN-1] [CRED-9] The server says so in a line, with status 2."""
    with pytest.raises(SystemExit) as exited:
        sbus.parse_options(["-a", "bus", *words.split(" ")])
    output, errors = capfd.readouterr()
    assert (exited.value.code, output) == (2, "")
    assert errors.startswith("sbusd: ") and errors.count("\n") == 1
    assert errors.isascii() and len(errors) <= 300


def test_command_of_a_client(capfd: pytest.CaptureFixture[str]) -> None:
    """[RUN-1] The line says that this is the server."""
    with pytest.raises(SystemExit):
        sbus.parse_options(["sub", "a"])
    errors = capfd.readouterr().err
    assert "sub a (this is the server: -a ADDRESS; see sbus_cl" in errors


@pytest.mark.parametrize("name", sbus.LIMITS)
def test_limit(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """[RUN-1] A number above zero; `unlimited` is more than any."""
    option = "--" + name.replace("_", "-")
    options = sbus.parse_options([option, "007"])
    limits = {limit: getattr(options, limit) for limit in DEFAULTS}
    assert limits == {**DEFAULTS, name: 7}
    if name != "max_packet":
        options = sbus.parse_options([option, "unlimited"])
        assert getattr(options, name) >= sys.maxsize
    for value in WRONG_LIMITS:
        with pytest.raises(SystemExit):
            sbus.parse_options([f"{option}={value}"])
        assert option in capfd.readouterr().err


def test_bundle(directory: Path) -> None:
    """[RUN-10] [ADDR-6] [ADDR-8] -cgor is -c -g -o -r."""
    (directory / "bus").touch()
    with RealBus(directory, "-cgor") as bus:
        assert mode_of(directory / "bus") == 0o777
        assert is_served(directory / "bus")
        assert bus.process.wait(SECONDS_MAX) == 0


def test_long_options() -> None:
    """[RUN-1] A short option and its long name do the same."""
    for short, long in SHORT.items():
        assert sbus.parse_options([short]) == sbus.parse_options([long])


def allow(count: int) -> Callable[[], None]:
    """Return what lets a server have so many descriptors."""
    limit = (count, count)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)


WMEM_MAX = 163_840  # of 32-bit Linux: packets have half of twice as much


def have_small_buffers() -> None:
    """Have the kernel give this process no larger send buffer."""
    give = socket.socket.setsockopt

    def give_less(wire: Any, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_SNDBUF):
            value = min(value, WMEM_MAX)
        give(wire, level, option, value)

    socket.socket.setsockopt = give_less  # type: ignore


def failing(owner: Any, name: str, number: int) -> Callable[[], None]:
    """Return what has a function fail with an error of the kernel."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return lambda: setattr(owner, name, fail)


def lack(names: list[str]) -> None:
    """Have a Python without modules or constants import the server anew."""
    for name in names:
        module, _, constant = name.rpartition(".")
        if module:
            delattr(sys.modules[module], constant)
        else:
            sys.modules[name] = None  # type: ignore
    importlib.reload(sbus)


def converse(path: str) -> None:
    """Have clients ask, receive, and make a mistake."""
    with connect(path) as reader, connect(path) as publisher:
        reader.send(b"SUB k", b"SUB !/cred////secret")
        large = publish(b"k", bytes(300_000))
        secret = publish(reader.path + b"/secret")
        room = (socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(large))
        publisher.wire.setsockopt(*room)
        publisher.send(large, secret)
        assert [reader.receive(), reader.receive()] == [large, secret]
        assert reader.stats()["published"] == 0
        publisher.send(b"")
        assert publisher.is_disconnected()
        assert reader.fence() == []


# ---- Systems that lack something


def test_small_buffers(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """[LIMIT-1] The default is lowered, and a packet of it delivered."""
    path, room = str(directory / "bus"), 2 * WMEM_MAX - 32
    with Forked(have_small_buffers, "-a", path) as server:
        server.wait()
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 2 and "[LIMIT-1]" in lines[1]
        assert f" {room} " in lines[1] and "wmem_max" in lines[1]
        with connect(path) as peer:
            option = (socket.SOL_SOCKET, socket.SO_SNDBUF, room)
            peer.wire.setsockopt(*option)
            peer.send(b"SUB k", packet := publish(b"k").ljust(room))
            assert peer.receive() == packet
            peer.send(packet + b".")
            assert peer.is_disconnected()
    assert f"[LIMIT-1] more than {room} b" in capfd.readouterr().err


def test_packets_that_are_asked_for(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """[RUN-1] [LIMIT-1] The line says how many bytes it may have."""
    room = 2 * WMEM_MAX - 32
    for size in (room, room + 1, 500_000):
        options = ("-a", f"{directory}/bus", "--max-packet", str(size))
        with Forked(have_small_buffers, *options) as server:
            assert server.wait() == b""
            assert server.end() == (size > room)
        errors = capfd.readouterr().err
        says_why = f" {room} bytes" in errors and "wmem_max" in errors
        assert says_why == (size > room)


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_memory_that_lacks_for_a_moment(directory: Path, number: int) -> None:
    """[RUN-1] A packet that the kernel cannot take now ends no start."""

    prepare = failing(socket.socket, "send", number)
    with Forked(prepare, "-a", f"{directory}/bus") as server:
        server.wait()
        with connect(f"{directory}/bus"):
            pass


@pytest.mark.parametrize(
    "module, name",
    [(signal, "pthread_sigmask"), (os, "umask"), (socket, "socket")],
)
def test_calls_that_are_refused(
    capfd: pytest.CaptureFixture[str], module: Any, name: str
) -> None:
    """[RUN-1] A line says so, even of the first call, and what lacks."""
    refused_start(failing(module, name, errno.EPERM), "-a", "/nowhere/bus")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("sbusd: ")
    assert module is not socket or "SEQPACKET" in line


def refuse_more() -> None:
    """Let a server have few descriptors, and refuse it more."""

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    resource.setrlimit = refuse


@pytest.mark.parametrize("prepare", [allow(64), refuse_more])
def test_few_descriptors(
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    prepare: Callable[[], None],
) -> None:
    """[LIMIT-7] [RUN-1] The log says how many clients it may have.

    With sixteen, which it keeps for itself, it does not start.
    """
    with Forked(prepare, "-a", f"{directory}/bus") as server:
        server.wait()
        assert is_served(directory / "bus")
    note = "[LIMIT-7] only 48 clients: ulimit -n\n"
    assert note in capfd.readouterr().err
    for count in (16, 12):
        options: Any = {"cwd": directory, "preexec_fn": allow(count)}
        refusal(1, "-a", "other", **options)


@pytest.mark.parametrize("system", SMALL_PYTHONS)
def test_small_python(
    system: str, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """[RUN-1] The server does all that needs no missing module.

    Without json, a line says that -v or --trace needs it.
    """
    names, path = SMALL_PYTHONS[system].split(), f"{directory}/bus"
    for option in ("-f", "-v", f"--trace={directory}/trace"):
        if option != "-f" and "json" in names:
            refused_start(lambda: lack(names), "-a", path, option)
            (line,) = capfd.readouterr().err.splitlines()
            assert "json" in line and os.listdir(directory) == []
            continue
        with Forked(lambda: lack(names), "-a", path, option) as server:
            server.wait()
            converse(path)
            assert server.end() == 0
        capfd.readouterr()


# ---- Who gets in


@needs_root
def test_named_users(directory: Path) -> None:
    """[CONN-2] Users that -u names get in, and the bus owner."""
    named = next(user for user in pwd.getpwall() if user.pw_uid)
    options = ("-cgo", "-u", named.pw_name, "-u", "54321")
    with RealBus(directory, *options) as bus:
        with bus.connect(54322) as peer:
            assert peer.is_disconnected()
        bus.wait_for_log("refuse uid=54322")  # but -c does not end it
        uids = (54321, named.pw_uid, None)
        with contextlib.ExitStack() as stack:
            for uid in uids:
                peer = stack.enter_context(bus.connect(uid))
                assert peer.fence() == []
        assert bus.process.wait(SECONDS_MAX) == 0
