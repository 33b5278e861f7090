"""Tests of bridge: two buses that are joined."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import handles, patterns_of, publish_all, wait_for_patterns
from packets import ANSWER, ANSWER_HEAD, WHOAMI, publish
from processes import (
    ROOT,
    SECONDS_MAX,
    Result,
    child_process,
    outcome,
    run,
)
from real_bus import Peer, RealBus, seqpacket_pair, wait_for
from sbus_client import Client


def check_gone(done: Result, address: str) -> None:
    """Check how a command ends that the server has disconnected."""
    assert (done.status, done.output) == (1, "")
    what = re.escape(f"sbus: the server at {address} closed the connection: ")
    assert re.fullmatch(f"{what}.*\n", done.errors)


def started_bridge(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Start a bridge."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(ROOT / "tools"), "bridge", *arguments]
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, **more
    )


class Sides:
    """A bridge between two sockets of the test's own.

    Its user has another number on the right side, behind another bus.
    """

    WHO = (b"!/cred/100/1000/42", b"!/cred/1/2/3/!/cred/100/1001/43")
    PROBES = (
        b"!/cred//1000//sbus/bridge/",
        b"!/cred/1/2/3/!/cred//1001//sbus/bridge/",
    )

    def __init__(self) -> None:
        ours, self.left_wire = seqpacket_pair()
        theirs, self.right_wire = seqpacket_pair()
        option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
        theirs.setsockopt(*option, 20_000)  # that it is full soon
        fds = [ours.fileno(), theirs.fileno()]
        self.addresses = [f"/dev/fd/{fd}" for fd in fds]
        self.process = started_bridge(*self.addresses, pass_fds=fds)
        ours.close()
        theirs.close()
        self.left = Peer(self.left_wire)
        self.right = Peer(self.right_wire)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.left_wire.close()
        self.right_wire.close()
        self.process.kill()
        self.process.communicate()

    def joined(self) -> Sides:
        """Answer what the bridge asks for at its start; note its probe."""
        sides = (self.left, self.right)
        for side, who in zip(sides, self.WHO):
            assert side.receive() == WHOAMI
            side.send(ANSWER_HEAD + who)
        for side, probes in zip(sides, self.PROBES):
            wanted = [b"echo/off", b"blocking/soft/block"]
            packets = [b"CMSG " + mode for mode in wanted]
            packets += [b"SUB ", b"SUB " + probes]
            assert [side.receive() for _ in packets] == packets
        assert self.right.receive() == WHOAMI
        self.right.send(ANSWER)
        self.probe = self.left.receive().rpartition(b"/")[2]
        assert self.left.receive() == WHOAMI
        self.left.send(ANSWER)
        return self

    def leave(self) -> None:
        """Have it ask for its end, and for an answer behind the last."""
        wait_for(lambda: handles(self.process.pid, signal.SIGTERM))
        self.process.terminate()
        for side, probes in zip((self.left, self.right), self.PROBES):
            packets = [b"UNSUB ", b"UNSUB " + probes, WHOAMI]
            assert [side.receive() for _ in packets] == packets

    def stand(self) -> None:
        """Stop the bridge's process, and return once it stands."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


class TestBridge:
    """bridge: two buses joined."""

    @pytest.fixture
    def other(self, directory: Path) -> Iterator[RealBus]:
        place = directory / "other"
        place.mkdir(mode=0o755)
        with RealBus(place, "--trace", str(place / "trace")) as running:
            yield running

    @contextlib.contextmanager
    def bridged(
        self, bus: RealBus, other: RealBus, *options: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a bridge; it has subscribed.  Then it ends without a word."""
        former = [patterns_of(running) for running in (bus, other)]
        count = max(1, len(options)) + 1
        with started_bridge(bus.path, other.path, *options) as process:
            try:
                wait_for_patterns(bus, former[0] + count)
                wait_for_patterns(other, former[1] + count)
                wait_for(lambda: handles(process.pid, signal.SIGTERM))
                yield process
                if process.returncode is None:
                    process.terminate()
                    assert outcome(process) == (0, "", "")
            finally:
                process.kill()

    def test_both_directions(self, bus: RealBus, other: RealBus) -> None:
        """[ECHO-2] What is published on one is heard once on each."""
        with (
            self.bridged(bus, other) as process,
            bus.connect() as left,
            other.connect() as right,
        ):
            for peer in (left, right):
                peer.send(b"SUB ")
                peer.fence()
            left.send(publish(b"a", b"from left"))
            assert right.receive() == publish(b"a", b"from left")
            right.send(publish(b"b", b"from right"))
            assert left.receive() == publish(b"a", b"from left")
            assert left.receive() == publish(b"b", b"from right")
            assert right.receive() == publish(b"b", b"from right")
            process.terminate()
            assert outcome(process) == (0, "", "")
            assert left.fence() == right.fence() == []

    def test_patterns(self, bus: RealBus, other: RealBus) -> None:
        """Only keys that a pattern selects cross."""
        options = ("--pattern=a/", "--pattern=b/*")
        with self.bridged(bus, other, *options), other.connect() as right:
            right.send(b"SUB ")
            right.fence()
            keys = ("a", "a/1/2", "b/1/2", "b/1")
            publish_all(bus.path, *((key, b"") for key in keys))
            assert right.receive() == publish(b"a/1/2")
            assert right.receive() == publish(b"b/1")

    def test_order_and_completeness(
        self, bus: RealBus, other: RealBus
    ) -> None:
        """[PUB-6] Many messages cross in order, and none is lost."""
        count = 5000
        with (
            self.bridged(bus, other) as process,
            Client(other.path) as right,
        ):
            right.subscribe("k")
            right.sync()
            with child_process(
                lambda: publish_all(
                    bus.path, *(("k", b"%d" % n) for n in range(count))
                )
            ):
                heard = [right.receive(SECONDS_MAX) for _ in range(count)]
            payloads = [received.payload for received in heard]
            assert payloads == [b"%d" % n for n in range(count)]
            process.send_signal(signal.SIGINT)
            assert outcome(process) == (0, "", "")

    @pytest.mark.parametrize("which", [0, 1])
    def test_bus_that_ends(
        self, bus: RealBus, other: RealBus, which: int
    ) -> None:
        """One line names it."""
        with self.bridged(bus, other) as process:
            ended = (bus, other)[which]
            ended.stop()
            check_gone(outcome(process), ended.path)

    def test_directions_do_not_wait_for_each_other(self) -> None:
        """One that is full holds up its own publishers alone."""
        with Sides() as sides:
            sides.joined()
            poll = select.poll()
            poll.register(sides.left_wire, select.POLLOUT)
            sent = 0
            while poll.poll(200):
                sides.left.send(publish(b"k", b"%d" % sent))
                sent += 1
            sides.right.send(publish(b"back"))
            assert sides.left.receive() == publish(b"back")
            heard = [sides.right.receive() for _ in range(sent)]
            assert heard == [publish(b"k", b"%d" % n) for n in range(sent)]

    def test_what_an_ended_bus_has_left(self) -> None:
        """It is published, although nothing can be published there."""
        packets = [publish(b"k", b"%d" % n) for n in range(200)]
        with Sides() as sides:
            sides.joined().stand()
            sides.left.send(*packets)
            sides.left_wire.close()
            sides.right.send(publish(b"back"))
            sides.process.send_signal(signal.SIGCONT)
            assert sides.right.receive_all() == packets
            done = outcome(sides.process)
        check_gone(done, sides.addresses[0])

    def test_signal_loses_nothing(self) -> None:
        """What comes before the last answer is forwarded."""
        with Sides() as sides:
            sides.joined()
            sides.leave()
            sides.left.send(publish(b"k", b"late"), ANSWER)
            assert sides.right.receive() == publish(b"k", b"late")
            sides.right.send(publish(b"k", b"later"), ANSWER)
            assert sides.left.receive() == publish(b"k", b"later")
            assert outcome(sides.process) == (0, "", "")

    def test_second_bridge(self, bus: RealBus, other: RealBus) -> None:
        """[CRED-11] It ends, whatever its patterns; the first one goes on.

        A client that subscribes to all keys does not hear its probe.
        """
        with (
            self.bridged(bus, other, "--pattern=a/"),
            other.connect() as right,
        ):
            right.send(b"SUB ")
            right.fence()
            done = run("tools", "bridge", other.path, bus.path)
            what = f"sbus: {other.path} and {bus.path} are joined already:"
            what += " messages would go round for ever\n"
            assert done == (1, "", what)
            publish_all(bus.path, ("a/1", b"v"))
            assert right.receive() == publish(b"a/1", b"v")

    def test_ring_of_three(
        self, bus: RealBus, other: RealBus, directory: Path
    ) -> None:
        """A chain is no ring; the bridge that would close one ends."""
        place = directory / "third"
        place.mkdir(mode=0o755)
        with (
            RealBus(place, "--trace", str(place / "trace")) as third,
            self.bridged(bus, other),
            self.bridged(other, third),
            third.connect() as end,
        ):
            end.send(b"SUB k")
            end.fence()
            publish_all(bus.path, ("k", b"v"))
            assert end.receive() == publish(b"k", b"v")
            done = run("tools", "bridge", third.path, bus.path)
            assert done.status == 1 and "joined already" in done.errors

    def test_probes(self) -> None:
        """Another bridge's is forwarded, under the key that it has there.

        Its own ends it, however late it comes.
        """
        with Sides() as sides:
            sides.joined()
            left, right = (publish(each + b"x") for each in sides.PROBES)
            sides.left.send(left)
            sides.right.send(right)
            assert sides.left.receive() == left
            assert sides.right.receive() == right
            sides.right.send(publish(sides.PROBES[1] + sides.probe))
            assert outcome(sides.process).status == 1
            assert sides.left.is_disconnected()

    def test_many_messages_before_the_first_event(self) -> None:
        """What came before an answer is forwarded without an event."""
        packets = [publish(b"k", b"%d" % n) for n in range(200)]
        with Sides() as sides:
            sides.right.send(*packets)
            sides.joined()
            assert [sides.left.receive() for _ in packets] == packets

    def test_wrong_addresses(self, bus: RealBus, directory: Path) -> None:
        """No bus, one bus by two names, and an option that is no use here."""
        same = bus.path.replace("/bus", "/./bus")
        none = str(directory / "nothing")
        for status, before, second, what in (
            (1, (), same, f"{bus.path} and {same} are the same bus"),
            (1, (), none, f"no bus at {none}: nothing is there; .*"),
            (2, ("-a", bus.path), same, "bridge takes two addresses.*"),
        ):
            done = run("tools", *before, "bridge", bus.path, second)
            assert (done.status, done.output) == (status, "")
            assert re.fullmatch(f"sbus: {what}\n", done.errors)
