"""Tests of what all commands share when server, Python or user are unusual."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from client_ends import beside
from commands import ready, sbus, subscribed
from packets import publish
from processes import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    Result,
    outcome,
    run,
    started,
)
from real_bus import Listener, RealBus, seqpacket
from small_pythons import SMALL_PYTHONS
from tools import command_line, shared

COMMANDS = [
    *("sub", "sub --last", "pub k v", "request k v", "reply k cat", "whoami"),
    *("stats", "clients", "top", "record DIR", "keep", "bridge BUS BUS"),
    *("load", "sbus_client.py sub", "sbus_client.py pub k v"),
    *("sbus_client.py request k", "sbus_client.py whoami"),
]
LACKING = {word for text in SMALL_PYTHONS.values() for word in text.split()}
NO_JSON = """sbus: this Python has no module json: install python3 (Debian), \
python3-json (OpenWrt, Yocto)
"""


def small_python(directory: Path) -> dict[str, str]:
    """Return the environment of a Python that lacks what small ones lack."""
    modules = sorted(name for name in LACKING if "." not in name)
    lines = ["import socket, sys"]
    lines += [f"del {name}" for name in sorted(LACKING) if "." in name]
    lines += [f"sys.modules.update(dict.fromkeys({modules}))"]
    (directory / "sitecustomize.py").write_text("\n".join(lines))
    return {**ENVIRONMENT, "PYTHONPATH": str(directory)}


@contextlib.contextmanager
def answering(listener: Listener, packet: bytes) -> Iterator[None]:
    """Greet each client with a packet."""
    peers = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            peers.append(listener.accept())
            with contextlib.suppress(OSError):  # it may have gone
                peers[-1].send(packet)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield
    finally:
        is_over.set()
        with seqpacket() as last:
            last.connect(listener.path)
            server.join()
        for peer in peers:
            peer.wire.close()


def assert_printable(text: str) -> None:
    """Check that a terminal obeys nothing of an output."""
    assert all(line.isprintable() for line in text.splitlines()), text


@pytest.mark.parametrize("is_small", [False, True])
def test_malformed_packet(
    listener: Listener, directory: Path, is_small: bool
) -> None:
    """[CLIENT-2] A malformed packet ends each command with one line and the
    status 1, also in a Python without all that small ones lack.  A command
    that needs more says which package has it.
    """
    env = small_python(directory) if is_small else ENVIRONMENT
    for words in COMMANDS:
        words = words.replace("DIR", f"{directory}/capture")
        words = words.replace("BUS", listener.path)
        with answering(listener, b"\x1b[31m\xc2\x9b junk"):
            is_full = not words.startswith("sbus_client.py")
            command = ["tools"] * is_full + words.split()
            env["SBUS_ADDRESS"] = listener.path
            done = run(*command, env=env, stdin=subprocess.DEVNULL)
        assert (done.status, done.output) == (1, ""), words
        assert done.errors.count("\n") == 1
        assert_printable(done.errors)
        if is_small and words.startswith(("record", "stats", "clients")):
            assert done.errors == NO_JSON
        else:
            assert "the server sent a malformed packet" in done.errors


COUNTS = [
    (b"", 1),
    (b"[]", 1),
    (b"[" * 100_000, 1),
    (b"\xff", 1),
    (b'{"client": 1, "clients": 5, "users": [7]}', 1),
    (b'{"client": 1, "clients": {"1": []}, "users": {"1": 0}}', 1),
    (
        b'{"client": "\\u001b[m", "patterns": "\\u202e\\ud800",'
        b'"clients": {"\\u009b[m": {"modes": ["\\u001b[m"], "uid": "\\n"}},'
        b'"users": {"1": {"clients": 1, "patterns": 2}}}',
        0,
    ),
]


@pytest.mark.parametrize("counts, status", COUNTS)
def test_malformed_counts(
    listener: Listener, counts: bytes, status: int
) -> None:
    """[CTL-5] One line says that the counts are malformed; what is printed is
    escaped.
    """
    for words in "stats", "stats --openmetrics", "clients":
        with answering(listener, b"CMSG stats\0" + counts):
            done = sbus(listener.path, *words.split())
        assert (done.status, bool(done.output)) == (status, not status)
        assert done.errors.count("\n") == status
        assert_printable(done.output + done.errors)


def test_small_python(bus: RealBus, directory: Path) -> None:
    """Commands that need no JSON work, with messages of any size.  The others
    say which package has it.
    """
    env = small_python(directory)
    done = run("tools", "--help", env=env)
    assert done.status == 0
    assert all(f"    {name} " in done.output for name in command_line.COMMANDS)
    with ready(bus.path, "reply", "k", "cat", env=env) as process:
        asked = ("request", "k", "x", "-t99")
        assert sbus(bus.path, *asked, env=env) == (0, "x\n", "")
        process.terminate()
    with ready(bus.path, "sub", "-n2", "l", env=env) as process:
        text = "x" * 300_000
        for payload in text, "v":
            done = sbus(bus.path, "pub", "l", "-", input=payload, env=env)
            assert done == (0, "", "")
        assert outcome(process) == (0, f"l\t{text}\nl\tv\n", "")
    for words in "load --count 9", "top -n1 --interval 0.1":
        done = sbus(bus.path, *words.split(), env=env)
        assert (done.status, done.errors) == (0, "")
    for words in "stats", "clients", "load --count 9 --json":
        assert sbus(bus.path, *words.split(), env=env) == (1, "", NO_JSON)


@pytest.mark.parametrize("words", ["sub --help", "keep --help", "--help"])
def test_help_of_an_optimized_python(words: str) -> None:
    """`python -OO`, which drops docstrings, prints the same."""
    for file in "tools", "sbus_client.py":
        command = [sys.executable, "-OO", str(ROOT / file), *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert Result(done.returncode, done.stdout, done.stderr) == run(
            file, *words.split()
        )


@pytest.mark.parametrize(
    "words",
    ["tools whoami", "tools pub k v", "tools request k v", "tools stats"]
    + ["sbus_client.py whoami", "sbus_client.py pub k v"]
    + ["sbus_client.py request k v"],
)
@pytest.mark.filterwarnings("default")
def test_one_time_for_all(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout is for connecting and all that follows, and not for each."""
    now, waits = [1_000.0], []

    class SlowBus:
        """Each wait for it takes two seconds."""

        address = "/bus"
        closed = False
        subscribe = control = retry_in = lambda *_, **__: None

        def __init__(self, *_: object, timeout: Any = None, **__: object):
            waits.append(timeout)
            now[0] += 2

        def wait(self, *given: Any) -> Any:
            SlowBus.__init__(self, timeout=given[-1])
            return b""

        publish = sync = request = wait

        def whoami(self, timeout: Any) -> Any:
            self.wait(timeout)
            return sbus_client.Credentials(1, 2, 3, b"!/cred/1/2/3")

        def stats(self, timeout: Any) -> Any:
            self.wait(timeout)
            return {"client": 1}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(sbus_client, "time", clock)
    monkeypatch.setattr(sbus_client, "Client", SlowBus)
    monkeypatch.setattr(shared, "LenientClient", SlowBus)
    file, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [file, *arguments, "-t3"])
    if file == "tools":
        assert command_line.run(signal.getsignal(signal.SIGINT)) == 0
    else:
        assert sbus_client.main() == 0
    assert len(waits) > 1 and waits == [3, 1, 0][: len(waits)]


def test_ctrl_c_between_the_forks_of_load(
    bus: RealBus, directory: Path
) -> None:
    """No process is left, whenever Ctrl-C comes."""
    (directory / "sitecustomize.py").write_text(
        "import os, signal\n"
        "fork = os.fork\n"
        "def interrupted():\n"
        "    child = fork()\n"
        "    if child:\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "    return child\n"
        "os.fork = interrupted\n"
    )
    env = {**ENVIRONMENT, "PYTHONPATH": str(directory)}
    options = {"env": env, "start_new_session": True}
    words = ("load", "--subscribers=2", "--seconds=1000")
    with started(bus.path, *words, **options) as process:
        output, errors = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, output, errors) == (130, "", "")
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_load_beside_another(bus: RealBus) -> None:
    """Messages of others under the keys of load do not count."""
    options = ("--rate=200", "--count=100", "--subscribers=2", "--json")
    with (
        subscribed(bus) as peer,
        beside(lambda: sbus(bus.path, "load", *options)) as done,
    ):
        key = peer.receive()[4:].partition(b"\0")[0]
        forged = [b"", b"short", bytes(64), b"\xff" * 64]
        packets = [publish(key, payload) for payload in forged]
        peer.send(*packets, publish(key + b"/1", bytes(64)))
        peer.wire.close()
    status, output, errors = done.result()
    assert (status, errors) == (0, "")
    assert '"sent":100,' in output and '"lost":0,' in output


@pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
@pytest.mark.parametrize("pattern", ["a*b", "a/#"])
def test_remark_where_warnings_are_errors(
    bus: RealBus, file: str, pattern: str
) -> None:
    """[MATCH-6] A remark is one line, without a line of Python."""
    env = {**ENVIRONMENT, "PYTHONWARNINGS": "error"}
    done = run(file, "-a", bus.path, "sub", pattern, "-t0.1", env=env)
    assert (done.status, done.output) == (0, "")
    program = "sbus" if file == "tools" else file
    assert done.errors.startswith(f"{program}: '{pattern}' ")
    assert done.errors.count("\n") == 1
