"""Tests of the log and of the trace."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_kernel import FakeKernel
from packets import WHOAMI, publications, publish
from processes import SBUSD, SECONDS_MAX
from real_bus import RealBus, wait_for

LINE = re.compile(rb"sbusd: [ -~]{1,292}")
SELF = rf"client=\d+ uid={os.getuid()} pid={os.getpid()}"
EVENT = re.compile(rf"sbusd: {SELF} \w+ (\w+=.+ )?\[[A-Z]+-\d+\]")  # of -v


def lines_of(bus: RealBus) -> list[str]:
    """Return the lines of a log; each is short and printable."""
    lines = bus.log_path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    for line in lines:
        assert LINE.fullmatch(line), line
    return [line.decode("ascii") for line in lines]


# ---- What the log says


def test_every_decision(directory: Path) -> None:
    """[RUN-15] [SUB-3] With -v each event is a line of one form."""
    steps = {  # what is sent, and what the log says of it
        b"SUB k\0hidden": 'sub pattern="k" [SUB-1]',
        b"SUB k": 'sub pattern="k" [SUB-2]',
        b"UNSUB k\0hidden": 'unsub pattern="k" [UNSUB-1]',
        b'UNSUB \xe9"': r'ignore pattern="\u00e9\"" [UNSUB-2]',
        publish(b"k", b"hidden"): 'msg key="k" size=6 m=1 receivers=1 [PUB-1]',
        b"SUB " + b"long" * 30: 'sub pattern="' + "long" * 15,
        b"CMSG echo/off\0hidden": 'ctl key="echo/off" [ECHO-2]',
        b"CMSG what": 'ctl key="what" [CTL-2]',
        WHOAMI: 'ctl key="!/cred/whoami" [CRED-2]',
        b"BAD\0hidden": 'close reason="[PKT-2]',
    }
    with RealBus(directory, "-v") as bus, bus.connect() as peer:
        peer.send(*steps)
        assert len(peer.receive_all()) == 2
    lines = lines_of(bus)
    head = f"sbusd: client=1 uid={os.getuid()} pid={os.getpid()} "
    texts = [line[len(head) :] for line in lines if line.startswith(head)]
    assert texts[0].startswith("open ")
    places = [
        next(i for i, text in enumerate(texts) if text.startswith(start))
        for start in steps.values()
    ]
    assert places == sorted(places)
    assert "send m=1 [PUB-1]" in texts
    for line in lines:
        if " client=" in line and "disconnect" not in line:
            assert EVENT.fullmatch(line) or len(line) == 299, line
    assert "hidden" not in bus.log()
    assert "long" * 21 not in bus.log()


def test_a_second_of_mistakes(
    kernel: FakeKernel, capfd: pytest.CaptureFixture[str]
) -> None:
    """[CONN-13] A user has a line, and a rule ten; then come others."""
    for number in range(30):
        kernel.wait(0.5 if number == 15 else 0)
        peer = kernel.connect(uid=1_000 + number // 2, pid=number)
        peer.send(b"BAD")
    kernel.connect(uid=7, pid=99).send(b"SUB !")  # another rule
    lines = capfd.readouterr().err.splitlines()
    start = "sbusd: disconnect client={} uid={} pid={} [{}] "
    numbers = [(2 * n + 1, 1_000 + n, 2 * n, "PKT-2") for n in range(10)]
    for line, facts in zip(lines, [*numbers, (31, 7, 99, "KEY-4")]):
        assert line.startswith(start.format(*facts))
    assert len(lines) == 11

    kernel.wait(0.4)
    assert capfd.readouterr().err == ""
    kernel.wait(0.2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 11
    for number in range(10):
        process = f"uid={1_000 + number} [PKT-2]: pid={2 * number + 1}"
        assert f"sbusd: 1 more of {process}" in lines
    pids = " ".join(f"pid={number}" for number in range(20, 30))
    assert f"sbusd: 10 more of other users [PKT-2]: {pids}" in lines

    kernel.connect(uid=1_000, pid=1).send(b"BAD")
    assert " uid=1000 pid=1 [PKT-2] " in capfd.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 64, 65])
def test_empty_packets_are_logged(
    kernel: FakeKernel, capfd: pytest.CaptureFixture[str], count: int
) -> None:
    """[CONN-13] [PKT-2] An empty packet looks like the end of input."""
    peer = kernel.connect()
    peer.send(*[b""] * count)
    assert peer.wire.closed
    assert "[PKT-2] empty packet" in capfd.readouterr().err


def full_disk() -> tuple[int, int]:
    """Return two descriptors, the second of which takes nothing."""
    return os.open(os.devnull, os.O_RDWR), os.open("/dev/full", os.O_RDWR)


# ---- A log that nobody reads


@pytest.mark.parametrize("kind", [os.pipe, os.openpty, full_disk])
def test_the_bus_goes_on(
    directory: Path, kind: Callable[[], tuple[int, int]]
) -> None:
    """[RUN-16] Lines that nobody takes are left out, and none is cut."""
    reader, log = kind()
    with RealBus(directory, "-v", stderr=log) as bus, bus.connect() as peer:
        for number in range(2_000):
            peer.send(b"SUB %d" % number, b"UNSUB %d" % number)
        assert peer.fence() == []
        peer.send(b"malformed")
        assert peer.is_disconnected()
        assert bus.stop() == 0
    command = [*SBUSD, "-x"]  # nor does a refusal wait
    done = subprocess.run(command, stderr=log, timeout=SECONDS_MAX)
    assert done.returncode == 2
    if kind is os.pipe:
        text = os.read(reader, 1 << 20)
        assert 0 < text.count(b"\n") < 4_000
        assert re.fullmatch(b"(sbusd: [ -~]+\n)+", text)
    os.close(reader)
    os.close(log)


# ---- What the trace says


def test_every_message_has_one_end(directory: Path) -> None:
    """[TRACE-7] [CONN-10] [RUN-12] It is sent, or dropped for a reason."""
    path = directory / "trace"
    with (
        RealBus(
            directory, "--trace", str(path), "--max-backlog", "100000"
        ) as bus,
        bus.clients(3) as (reader, leaver, sender),
    ):
        for peer in (reader, leaver):
            peer.send(b"SUB ", b"CMSG blocking/hard/discard")
            peer.fence()
        packets = [*publications(3_000)]
        sender.send(*packets)
        sender.fence()
        for peer in (reader, leaver):
            peer.send(b"CMSG blocking/soft/discard")
        wait_for(lambda: path.read_text().count("/soft/discard") == 2)
        leaver.wire.shutdown(socket.SHUT_WR)
        sender.send(*packets)
        sender.fence()
        assert bus.stop() == 0
        heard = reader.receive_all()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert events[-1]["ev"] == "stop"
    last = {event["c"]: event["ev"] for event in events if "c" in event}
    assert {*last.values()} == {"close"}
    numbers = [event["m"] for event in events if event["ev"] == "msg"]
    assert numbers == [*range(1, 6_001)]
    drops = [event for event in events if event["ev"] == "drop"]
    sends = [event for event in events if event["ev"] == "send"]
    received = [event["m"] for event in sends if event["c"] == 1]
    assert heard == [(packets * 2)[number - 1] for number in received]
    ends = Counter((event["c"], event["m"]) for event in sends + drops)
    assert {*ends.values()} == {1}
    assert {number for client, number in ends if client == 1} == {*numbers}
    reasons = {(event["c"], event["reason"]) for event in drops}
    for reason in ("hard/discard", "soft/discard", "deaf"):
        assert (1, reason) in reasons
    assert (2, "deaf") in reasons


def test_start_after_a_kill(directory: Path) -> None:
    """[TRACE-1] A cut line stays alone; each round is in the trace."""
    path = directory / "trace"
    path.write_text('{"n":1,"t":1,"ev"')
    with (
        RealBus(directory, "--trace", str(path)) as bus,
        bus.connect() as peer,
    ):
        peer.send(b"SUB k")
        peer.fence()
        peer.fence()  # answered in a later round than the first
        bus.stop(signal.SIGKILL)
    first, *events = path.read_text().splitlines()
    assert first == '{"n":1,"t":1,"ev"'
    kinds = [json.loads(line)["ev"] for line in events]
    assert kinds[:4] == ["start", "open", "sub", "ctl"]


def test_full_disk(directory: Path) -> None:
    """[RUN-16] [TRACE-1] The log has a line of it, and the bus goes on."""
    path = directory / "trace"
    with (
        RealBus(directory, "--trace", str(path)) as bus,
        bus.connect() as peer,
    ):
        limits = (2_000, 2_000)
        resource.prlimit(bus.process.pid, resource.RLIMIT_FSIZE, limits)
        peer.send(*[b"SUB %d" % number for number in range(50)])
        assert peer.fence() == []
        assert bus.stop() == 0
    assert bus.log().count(f" no trace from now on: {path}: File") == 1
    assert path.stat().st_size == 2_000
