"""Tests of record: what it hears is in files, whatever happens."""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import handles, publish_all, sbus, served, wait_for_patterns
from packets import ANSWER, WHOAMI, publish
from processes import ENVIRONMENT, SECONDS_MAX, child_process, outcome, started
from real_bus import Listener, RealBus, freeze, thaw, wait_for
from sbus_client import Client, Message, SbusError
from sizes import either
from tools.record import Recorder


def segments(directory: Path, hidden: bool = False) -> list[Path]:
    """Return the segments of a capture, in order."""
    return sorted(directory.glob(f"*/{'.' if hidden else '[!.]'}*.jsonl"))


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of all segments that have their names."""
    text = b"".join(path.read_bytes() for path in segments(directory))
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def payloads_of(directory: Path) -> list[bytes]:
    """Return the payloads of a capture."""
    return [base64.b64decode(line["data"]) for line in lines_of(directory)]


def check_numbers(directory: Path) -> Counter[str]:
    """Return how many lines each run has; they are numbered without gaps."""
    counts: Counter[str] = Counter()
    for line in lines_of(directory):
        counts[line["rec"]] += 1
        assert line["n"] == counts[line["rec"]]
    return counts


@pytest.fixture
def capture(directory: Path) -> Path:
    return directory / "new" / "capture"


@contextlib.contextmanager
def recorder(
    bus: RealBus, capture: Path, *options: str, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a recorder; it has subscribed."""
    words = ("record", str(capture), *options)
    with started(bus.path, *words, **more) as process:
        wait_for_patterns(bus, 1)
        yield process


def stop(process: subprocess.Popen[str]) -> None:
    """Have a recorder end, without a word."""
    process.terminate()
    assert outcome(process) == (0, "", "")


def recorder_at(capture: Path) -> Recorder:
    """Return a recorder that ends a segment with each message."""
    limits = {"segment_mib": 1e-6, "segment_seconds": 10.0}
    options = {"directory": capture, "no_payload": False, **limits}
    return Recorder(argparse.Namespace(**options))


# ---- record: a capture


def test_line(bus: RealBus, capture: Path) -> None:
    """A line has the fields that the pipeline expects."""
    before = time.time_ns()
    with recorder(bus, capture) as process:
        publish_all(bus.path, ("k", b"v\0\xff"), (b"a/\xff", b""))
        stop(process)
    (segment,) = segments(capture)
    first, second = lines_of(capture)
    run, now = first["rec"], first["t"]
    assert first == {
        **{"rec": run, "n": 1, "t": now, "host": os.uname().nodename},
        **{"key": "k", "size": 3, "data": "dgD/"},
    }
    assert second == {
        **{**first, "n": 2, "t": second["t"]},
        **{"key": "a/\xff", "size": 0, "data": ""},
    }
    assert before < now < second["t"] < time.time_ns()
    assert segment.name == f"{run}-000001.jsonl"
    assert segment.parent.name >= time.strftime(
        "%Y-%m-%d", time.gmtime(before // 10**9)
    )
    assert segment.stat().st_mode & 0o137 == 0


def test_modes_and_patterns(listener: Listener, capture: Path) -> None:
    """A recorder asks for soft mode block before it subscribes.  A line
    without a payload has its size.
    """
    words = ("record", str(capture), "--pattern=a/", "--pattern", "b")
    with served(listener, *words, "--no-payload") as (process, server):
        packets = [server.receive() for _ in range(4)]
        mode = b"CMSG blocking/soft/block"
        assert packets == [mode, b"SUB a/", b"SUB b", WHOAMI]
        server.send(ANSWER)
        process.terminate()
        packets = [server.receive() for _ in range(3)]
        assert packets == [b"UNSUB a/", b"UNSUB b", WHOAMI]
        server.send(publish(b"a/1", b"late"), ANSWER)
        assert outcome(process) == (0, "", "")
    (line,) = lines_of(capture)
    assert line["size"] == 4 and "data" not in line


def test_segment_is_hidden_until_it_is_old(
    bus: RealBus, capture: Path
) -> None:
    """The age of a segment counts from its first message."""
    with recorder(bus, capture, "--segment-seconds=0.3") as process:
        start = time.monotonic()
        while not segments(capture):
            publish_all(bus.path, ("k", b"v"))
        assert time.monotonic() - start >= 0.3
        publish_all(bus.path, ("k", b"last"))
        wait_for(lambda: b"last" in payloads_of(capture))
        stop(process)
    check_numbers(capture)


def test_segment_ends_when_it_is_large(bus: RealBus, capture: Path) -> None:
    """Large messages fill several segments."""
    payloads = [os.urandom(400_000) for _ in range(10)]
    with recorder(bus, capture, "--segment-mib=2") as process:
        publish_all(bus.path, *(("k", payload) for payload in payloads))
        stop(process)
    assert payloads_of(capture) == payloads
    sizes = [path.stat().st_size for path in segments(capture)]
    assert len(sizes) > 1
    assert all(2**21 <= size < 2**22 for size in sizes[:-1])
    check_numbers(capture)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_loses_nothing(
    bus: RealBus, capture: Path, number: int
) -> None:
    """A recorder that ends records all that waits, here and in the server."""
    messages = [("k", b"%d" % n) for n in range(3000)]
    with recorder(bus, capture) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with child_process(lambda: publish_all(bus.path, *messages)):
            trace = Path(bus.path).with_name("trace")
            wait_for(lambda: '"m":200' in trace.read_text())
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            assert outcome(process) == (0, "", "")
    payloads = payloads_of(capture)
    count = len(payloads)
    assert count >= 200 and payloads == [text for _, text in messages[:count]]


def test_second_signal(bus: RealBus, capture: Path) -> None:
    """A server that hangs does not keep a recorder, and the lines are kept."""
    with recorder(bus, capture) as process:
        publish_all(bus.path, ("k", b"v"))
        wait_for(lambda: segments(capture, hidden=True))
        freeze(bus)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: not handles(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGINT)
        assert outcome(process) == (130, "", "")
        thaw(bus)
    assert payloads_of(capture) == [b"v"]


def test_bus_that_ends(bus: RealBus, capture: Path) -> None:
    """One line says that the bus has ended, and what it sent is recorded."""
    with recorder(bus, capture) as process:
        publish_all(bus.path, *[("k", b"v")] * 1000)
        bus.stop()
        done = outcome(process)
    assert done.status == 1
    error = f"sbus: the server at {bus.path} closed the connection: .*\n"
    assert re.fullmatch(error, done.errors)
    assert payloads_of(capture) == [b"v"] * 1000


def test_full_disk(bus: RealBus, capture: Path) -> None:
    """One line says that the disk is full; the next recorder recovers what
    could be written.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with recorder(bus, capture, preexec_fn=limit) as process:
        publish_all(bus.path, *[("k", bytes(20_000))] * 3)
        publish_all(bus.path, ("k", bytes(70_000)))
        status, output, errors = outcome(process)
    error = rf"sbus: {capture}/.*/\..*\.jsonl: File too large\n"
    assert (status, output) == (1, "") and re.fullmatch(error, errors)
    assert not segments(capture)
    with recorder_at(capture):
        assert payloads_of(capture) == [bytes(20_000)] * 3


def test_slow_disk(directory: Path, capture: Path) -> None:
    """[BLOCK-16] A recorder reads on while the disk is slow, as a server can
    demand.
    """
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    (directory / "sitecustomize.py").write_text(f"""
import os
fsync = os.fsync
def slow(fd):
    open({str(fifo)!r}).close()
    fsync(fd)
os.fsync = slow
""")
    env = {**ENVIRONMENT, "PYTHONPATH": str(directory)}
    messages = [("k", b"%d" % n + bytes(30_000)) for n in range(70)]
    options = ("--trace", str(directory / "trace"), "--block-timeout=0.2")
    with (
        RealBus(directory, *options) as bus,
        recorder(bus, capture, "--segment-mib=1.5", env=env) as process,
    ):
        publish_all(bus.path, *messages[:50])
        wait_for(lambda: len(segments(capture, hidden=True)) == 2)
        publish_all(bus.path, *messages[50:])
        assert not segments(capture)
        released = os.open(fifo, os.O_RDWR)
        wait_for(lambda: segments(capture))
        stop(process)
        os.close(released)
    assert payloads_of(capture) == [text for _, text in messages]
    check_numbers(capture)


def test_disk_that_fails(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the next segment tells; nothing that was written is lost."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with (
            pytest.raises(SbusError, match="Input/output error"),
            recorder_at(capture) as recorder,
        ):
            recorder.add(Message(b"k", b"1"))
            recorder.add(Message(b"k", b"2"))
    assert not segments(capture)
    with recorder_at(capture):
        assert payloads_of(capture) == [b"1", b"2"]


# ---- record: what a crash has left


NAME = "{}_20260101T000000Z_01234567-000007.jsonl"
ONE = b'{"rec":"r","n":1,"data":""}\n'
TWO = b'{"rec":"r","n":2,"data":""}\n'


@pytest.mark.parametrize("kept", [ONE + TWO, b""])
@pytest.mark.parametrize("cut", [b"", TWO[:-1], b"\0" * 9000])
def test_whole_lines_are_kept(
    bus: RealBus, capture: Path, kept: bytes, cut: bytes
) -> None:
    """No file stays without any line; another host's recorder may be alive."""
    day = capture / "2026-01-01"
    day.mkdir(parents=True)
    name = NAME.format(os.uname().nodename)
    other = day / f".{NAME.format('other')}"
    for hidden in day / f".{name}", other:
        hidden.write_bytes(kept + cut)
    line = f"sbus: recovered {name}\n" if kept else ""
    with recorder(bus, capture) as process:
        process.terminate()
        assert outcome(process) == (0, "", line)
    assert [path.name for path in segments(capture)] == [name] * bool(kept)
    assert not kept or (day / name).read_bytes() == kept
    assert segments(capture, hidden=True) == [other]


def test_two_recorders(bus: RealBus, capture: Path) -> None:
    """One line says that another recorder is there, and that one goes on."""
    with recorder(bus, capture) as first:
        error = "another recorder of this host writes there"
        done = sbus(bus.path, "record", str(capture))
        assert done == (1, "", f"sbus: {capture}: {error}\n")
        publish_all(bus.path, ("k", b"v"))
        stop(first)
    assert payloads_of(capture) == [b"v"]


LINKS = ["lock", "segment", "other name", "FIFO", "day", "directory", "file"]
OTHERS = ["another's lock", "another's day", "another's directory"]


@pytest.mark.parametrize("place", LINKS + OTHERS * (os.getuid() == 0))
def test_hostile_places(
    bus: RealBus, directory: Path, capture: Path, place: str
) -> None:
    """An error names what another user has made, or may have put there, and
    that stays as it is.  No link is followed.
    """
    host = os.uname().nodename
    day = capture / "2026-01-01"
    day.mkdir(parents=True)
    hidden = day / f".{NAME.format(host)}"
    theirs = directory / "theirs"
    theirs.mkdir()
    file = theirs / hidden.name
    file.write_bytes(ONE + b"no whole line")
    path = {
        **dict.fromkeys(["lock", OTHERS[0]], capture / f".{host}.lock"),
        **dict.fromkeys(["day", OTHERS[1]], day),
        **{"directory": capture / "link", OTHERS[2]: capture, "file": file},
    }.get(place, hidden)
    if place in OTHERS:
        path.touch()
        os.chown(path, 1, -1)
    elif place == "FIFO":
        os.mkfifo(path)
    elif place == "other name":
        os.link(file, path)
    elif place in ("lock", "segment"):
        path.symlink_to(file)
    elif place != "file":
        day.rmdir()
        path.symlink_to(theirs)
    where = path if place in ("directory", "file") else capture
    done = sbus(bus.path, "record", str(where))
    assert (done.status, done.output) == (1, "")
    assert done.errors.startswith(f"sbus: {path}: ")
    assert done.errors.count("\n") == 1
    assert file.read_bytes() == ONE + b"no whole line"
    assert [*theirs.iterdir()] == [file]


KILLS = either(20, 6)


def test_kill(directory: Path, capture: Path) -> None:
    """Killed at any moment under load, recorders leave whole lines, without
    gaps, and all of them.
    """
    seed = random.randrange(1 << 32)
    print("seed", seed)
    moments = random.Random(seed)
    options = ("--segment-mib=0.2", "--segment-seconds=0.1")
    words = ("record", str(capture), *options)
    # What is killed cannot tell what it has covered
    env = {k: v for k, v in ENVIRONMENT.items() if "COVERAGE" not in k}
    hidden: list[Path] = []
    left: dict[Path, bytes] = {}  # of a killed recorder, by final names
    recovered = 0
    # A recorder that has no processor, or a slow disk, is to stay
    patient = RealBus(directory, f"--block-timeout={SECONDS_MAX}")
    with patient as bus, child_process(lambda: load(bus)):
        for kill in range(KILLS + 1):
            with started(bus.path, *words, env=env) as process:
                wait_for_another(capture, hidden)
                for path, text in left.items():
                    assert path.read_bytes() == text
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moments.uniform(0, 0.2))
                if kill < KILLS:
                    process.kill()
                process.terminate()
                process.communicate(timeout=SECONDS_MAX)
            counts = check_numbers(capture)
            hidden = segments(capture, hidden=True)
            left = {}
            for path in hidden:
                text, newline, _ = path.read_bytes().rpartition(b"\n")
                if newline:
                    left[path.with_name(path.name[1:])] = text + newline
            recovered += len(left)
    assert not hidden and counts and recovered


def wait_for_another(capture: Path, former: list[Path]) -> None:
    """Return once all former hidden segments have made room for one."""
    wait_for(lambda: {*segments(capture, hidden=True)} - {*former})
    assert not {*segments(capture, hidden=True)} & {*former}


def load(bus: RealBus) -> None:
    """Publish without end."""
    with Client(bus.path) as client:
        for n in range(1 << 30):
            client.publish("k", b"%d " % n * (n % 500))
