"""Tests of the log and of the trace."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_kernel import FakeKernel
from packets import WHOAMI, publish
from processes import SBUSD, SECONDS_MAX
from real_bus import RealBus

SELF = rf"client=\d+ uid={os.getuid()} pid={os.getpid()}"
EVENT = re.compile(rf"sbusd: {SELF} \w+ (\w+=.+ )?\[[A-Z]+-\d+\]")  # of -v


# ---- What the log says


def test_every_decision(directory: Path) -> None:
    """[RUN-15] [SUB-3] With -v each event is a short line of one form."""
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
    log = bus.log()
    head = f"sbusd: client=1 uid={os.getuid()} pid={os.getpid()} "
    places = [log.index(head + start) for start in steps.values()]
    assert places == sorted(places)
    assert f"{head}open " in log
    assert f"{head}send m=1 [PUB-1]\n" in log
    assert "hidden" not in log and "long" * 21 not in log
    for line in log.splitlines():
        assert re.fullmatch("sbusd: [ -~]{1,292}", line)
        if " client=" in line and "disconnect" not in line:
            assert EVENT.fullmatch(line) or len(line) == 299, line


def test_a_second_of_mistakes(
    kernel: FakeKernel, capfd: pytest.CaptureFixture[str]
) -> None:
    """[CONN-13] A user has a line a second; a second later comes the rest."""
    counts = []
    for number, seconds in enumerate((0, 0.5, 0.4, 0.2)):
        kernel.wait(seconds)
        if number != 2:
            kernel.connect(uid=7).send(b"BAD")
        counts.append(len(capfd.readouterr().err.splitlines()))
    assert counts == [1, 0, 0, 1]
    kernel.wait(0.5)
    assert capfd.readouterr().err.startswith("sbusd: 1 more of uid=7 ")


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


def test_trace_on_a_full_disk(directory: Path) -> None:
    """[RUN-16] [TRACE-1] The log has a line of it, and the bus goes on."""
    path = directory / "trace"
    with (
        RealBus(directory, "--trace", str(path)) as bus,
        bus.connect() as peer,
    ):
        limit = bus.process.pid, resource.RLIMIT_FSIZE
        former = resource.prlimit(*limit)
        resource.prlimit(*limit, (2_000, former[1]))
        peer.send(*[b"SUB %d" % number for number in range(50)])
        assert peer.fence() == []
        resource.prlimit(*limit, former)  # so coverage is kept
        assert bus.stop() == 0
    assert bus.log().count(f" no trace from now on: {path}: File") == 1
    assert path.stat().st_size == 2_000
