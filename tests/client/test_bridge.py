"""Tests of bridge: two buses that are joined."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import (
    handles,
    is_gone,
    publish_all,
    subscribed,
    wait_for_patterns,
)
from packets import ANSWER, WHOAMI, publications, publish
from processes import ROOT, outcome, run
from real_bus import Peer, RealBus, seqpacket_pair, wait_for


def started_bridge(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Start a bridge."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(ROOT / "tools"), "bridge", *arguments]
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, **more
    )


class Sides:
    """A bridge between two sockets of the test's own."""

    def __init__(self) -> None:
        pairs = seqpacket_pair(), seqpacket_pair()
        self.left, self.right = self.peers = [Peer(end) for _, end in pairs]
        option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
        pairs[1][0].setsockopt(*option, 20_000)  # that it is full soon
        fds = [end.fileno() for end, _ in pairs]
        self.addresses = [f"/dev/fd/{fd}" for fd in fds]
        self.process = started_bridge(*self.addresses, pass_fds=fds)
        for end, _ in pairs:
            end.close()
        # What the bridge asks for at its start is answered, but for its probe
        for side in self.peers:
            packets = [b"CMSG echo/off", b"CMSG blocking/soft/block"]
            packets += [b"SUB ", b"SUB sbus/bridge/"]
            assert [side.receive() for _ in packets] == packets
        assert self.right.receive() == WHOAMI
        self.right.send(ANSWER)
        self.probe = self.left.receive()
        assert self.left.receive() == WHOAMI
        self.left.send(ANSWER)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.wire.close()
        self.process.kill()
        self.process.communicate()


# ---- bridge: two buses joined


@pytest.fixture
def other(directory: Path) -> Iterator[RealBus]:
    place = directory / "other"
    place.mkdir(mode=0o755)
    with RealBus(place, "--trace", str(place / "trace")) as running:
        yield running


@contextlib.contextmanager
def bridged(
    bus: RealBus, other: RealBus, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a bridge; it has subscribed.  Then it ends without a word."""
    count = max(1, len(options)) + 1
    with started_bridge(bus.path, other.path, *options) as process:
        try:
            wait_for_patterns(bus, count)
            wait_for_patterns(other, count)
            wait_for(lambda: handles(process.pid, signal.SIGTERM))
            yield process
            if process.returncode is None:
                process.terminate()
                assert outcome(process) == (0, "", "")
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_directions(bus: RealBus, other: RealBus, number: int) -> None:
    """[ECHO-2] A message on one bus arrives once on each."""
    with (
        bridged(bus, other) as process,
        subscribed(bus) as left,
        subscribed(other) as right,
    ):
        left.send(publish(b"a", b"from left"))
        assert right.receive() == publish(b"a", b"from left")
        right.send(publish(b"b", b"from right"))
        assert left.receive() == publish(b"a", b"from left")
        assert left.receive() == publish(b"b", b"from right")
        assert right.receive() == publish(b"b", b"from right")
        process.send_signal(number)
        assert outcome(process) == (0, "", "")
        assert left.fence() == right.fence() == []


@pytest.mark.parametrize("index", [0, 1])
def test_bus_that_ends(bus: RealBus, other: RealBus, index: int) -> None:
    """One line names the bus that has ended."""
    with bridged(bus, other) as process:
        ended = (bus, other)[index]
        ended.stop()
        assert is_gone(outcome(process), ended.path)


def test_directions_do_not_wait_for_each_other() -> None:
    """[PUB-6] A direction that is full holds up its own publishers alone, and
    loses nothing.
    """
    with Sides() as sides:
        poll = select.poll()
        poll.register(sides.left.wire, select.POLLOUT)
        sent = 0
        while poll.poll(200):
            sides.left.send(publish(b"k", b"%d" % sent))
            sent += 1
        sides.right.send(publish(b"back"))
        assert sides.left.receive() == publish(b"back")
        packets = [sides.right.receive() for _ in range(sent)]
        assert packets == list(publications(sent))


def test_what_an_ended_bus_has_left() -> None:
    """A bridge publishes what an ended bus has left, although nothing can be
    published there.
    """
    packets = [*publications(200)]
    with Sides() as sides:
        sides.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sides.process.pid, os.WSTOPPED)
        sides.left.send(*packets)
        sides.left.wire.close()
        sides.right.send(publish(b"back"))
        sides.process.send_signal(signal.SIGCONT)
        assert sides.right.receive_all() == packets
        done = outcome(sides.process)
    assert is_gone(done, sides.addresses[0])


def test_signal_loses_nothing() -> None:
    """A bridge that ends forwards what comes before the last answer."""
    with Sides() as sides:
        wait_for(lambda: handles(sides.process.pid, signal.SIGTERM))
        sides.process.terminate()
        for side in sides.peers:
            packets = [b"UNSUB ", b"UNSUB sbus/bridge/", WHOAMI]
            assert [side.receive() for _ in packets] == packets
        sides.left.send(publish(b"k", b"late"), ANSWER)
        assert sides.right.receive() == publish(b"k", b"late")
        sides.right.send(publish(b"k", b"later"), ANSWER)
        assert sides.left.receive() == publish(b"k", b"later")
        assert outcome(sides.process) == (0, "", "")


def test_second_bridge(bus: RealBus, other: RealBus) -> None:
    """A second bridge ends, whatever its user and its patterns.  The first
    goes on with the keys that its own patterns select.
    """
    options = ("--pattern=a/", "--pattern=b/*")
    with bridged(bus, other, *options), subscribed(other) as right:
        done = run("tools", "bridge", other.path, bus.path, "--pattern=c")
        error = f"sbus: {other.path} and {bus.path} are joined already:"
        error += " messages would go round for ever\n"
        assert done == (1, "", error)
        assert right.receive().startswith(b"MSG sbus/bridge/")
        keys = ("a", "a/1/2", "b/1/2", "b/1")
        publish_all(bus.path, *((key, b"") for key in keys))
        assert right.receive() == publish(b"a/1/2")
        assert right.receive() == publish(b"b/1")


def test_probes() -> None:
    """A bridge forwards another's probe, and its own on the left bus, where
    all users hear it.  Its own on the right bus ends it, by whatever ring of
    bridges and however late it comes.
    """
    with Sides() as sides:
        sides.left.send(publish(b"sbus/bridge/x"))
        assert sides.right.receive() == publish(b"sbus/bridge/x")
        sides.left.send(sides.probe)
        assert sides.right.receive() == sides.probe
        sides.right.send(sides.probe)
        assert outcome(sides.process).status == 1
        assert sides.left.is_disconnected()


def test_key_that_the_other_bus_refuses() -> None:
    """[KEY-4] A key that the other bus refuses is left out, with a remark, and
    ends nothing.
    """
    with Sides() as sides:
        sides.left.send(publish(b"k" * 5_000), publish(b"k"))
        assert sides.right.receive() == publish(b"k")
        sides.left.wire.close()
        remark, _ = outcome(sides.process).errors.splitlines()
    assert remark.startswith(f"sbus: {sides.addresses[1]} does not get a")
    assert remark.endswith("has 5000 bytes, over 4096")
