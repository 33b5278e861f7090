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
from typing import Any, NamedTuple

import pytest

from commands import handles, is_gone, subscribed, wait_for_patterns
from packets import ANSWER, WHOAMI, publications, publish
from processes import ROOT, outcome, run
from real_bus import Peer, RealBus, seqpacket_pair, wait_for


@contextlib.contextmanager
def bridged(*arguments: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a bridge."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(ROOT / "tools"), "bridge", *arguments]
    options = {"stdout": pipe, "stderr": pipe, "text": True, **more}
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


class Sides(NamedTuple):
    """A bridge between two sockets of the test's own."""

    left: Peer
    right: Peer
    addresses: list[str]
    process: subprocess.Popen[str]
    probe: bytes


@contextlib.contextmanager
def both_sides() -> Iterator[Sides]:
    """Give a bridge that has been told all that it asks at its start."""
    pairs = seqpacket_pair(), seqpacket_pair()
    option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
    pairs[1][0].setsockopt(*option, 20_000)  # that it is full soon
    fds = [end.fileno() for end, _ in pairs]
    addresses = [f"/dev/fd/{fd}" for fd in fds]
    with (
        Peer(pairs[0][1]) as left,
        Peer(pairs[1][1]) as right,
        bridged(*addresses, pass_fds=fds) as process,
    ):
        for end, _ in pairs:
            end.close()
        for side in left, right:
            packets = [b"CMSG echo/off", b"CMSG blocking/soft/block"]
            packets += [b"SUB ", b"SUB sbus/bridge/"]
            assert [side.receive() for _ in packets] == packets
        assert right.receive() == WHOAMI
        right.send(ANSWER)
        probe = left.receive()
        assert left.receive() == WHOAMI
        left.send(ANSWER)
        yield Sides(left, right, addresses, process, probe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_buses(bus: RealBus, directory: Path, number: int) -> None:
    """[ECHO-2] A message on one bus arrives once on each, if a pattern of the
    bridge selects it.  A second bridge ends, whatever its user and patterns.
    """
    place = directory / "other"
    place.mkdir(mode=0o755)
    with (
        RealBus(place, "--trace", str(place / "trace")) as other,
        bridged(
            bus.path, other.path, "--pattern=a/", "--pattern=b/*"
        ) as first,
        subscribed(bus) as left,
        subscribed(other) as right,
    ):
        wait_for_patterns(bus, 4)
        wait_for_patterns(other, 4)
        wait_for(lambda: handles(first.pid, signal.SIGTERM))
        done = run("tools", "bridge", other.path, bus.path, "--pattern=c")
        error = f"sbus: {other.path} and {bus.path} are joined already:"
        error += " messages would go round for ever\n"
        assert done == (1, "", error)
        left.fence()
        assert right.fence()[-1].startswith(b"MSG sbus/bridge/")

        packets = [*map(publish, (b"a", b"a/1/2", b"b/1/2", b"b/1"))]
        left.send(*packets)
        assert right.receive() == packets[1]
        assert right.receive() == packets[3]
        packets.append(publish(b"a/2"))
        right.send(packets[-1])
        assert right.receive() == packets[-1]
        assert [left.receive() for _ in packets] == packets
        first.send_signal(number)
        assert outcome(first) == (0, "", "")
        assert left.fence() == right.fence() == []


def test_directions_do_not_wait_for_each_other() -> None:
    """[PUB-6] A direction that is full holds up its own publishers alone, and
    loses nothing.
    """
    with both_sides() as sides:
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


@pytest.mark.parametrize("index", [0, 1])
def test_what_an_ended_bus_has_left(index: int) -> None:
    """A bridge publishes what an ended bus has left, although nothing can be
    published there.  One line names that bus.
    """
    packets = [*publications(200)]
    with both_sides() as sides:
        ended, peer = sides[:2] if index == 0 else sides[1::-1]
        sides.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sides.process.pid, os.WSTOPPED)
        ended.send(*packets)
        ended.wire.close()
        peer.send(publish(b"back"))
        sides.process.send_signal(signal.SIGCONT)
        assert peer.receive_all() == packets
        done = outcome(sides.process)
    assert is_gone(done, sides.addresses[index])


def test_signal_loses_nothing() -> None:
    """A bridge that ends forwards what comes before the last answer."""
    with both_sides() as sides:
        wait_for(lambda: handles(sides.process.pid, signal.SIGTERM))
        sides.process.terminate()
        for side in (sides.left, sides.right):
            packets = [b"UNSUB ", b"UNSUB sbus/bridge/", WHOAMI]
            assert [side.receive() for _ in packets] == packets
        sides.left.send(publish(b"k", b"late"), ANSWER)
        assert sides.right.receive() == publish(b"k", b"late")
        sides.right.send(publish(b"k", b"later"), ANSWER)
        assert sides.left.receive() == publish(b"k", b"later")
        assert outcome(sides.process) == (0, "", "")


def test_probes() -> None:
    """A bridge forwards another's probe, and its own on the left bus, where
    all users hear it.  Its own on the right bus ends it, by whatever ring of
    bridges and however late it comes.
    """
    with both_sides() as sides:
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
    with both_sides() as sides:
        sides.left.send(publish(b"k" * 5_000), publish(b"k"))
        assert sides.right.receive() == publish(b"k")
        sides.left.wire.close()
        remark, _ = outcome(sides.process).errors.splitlines()
    assert remark.startswith(f"sbus: {sides.addresses[1]} does not get a")
    assert remark.endswith("has 5000 bytes, over 4096")
