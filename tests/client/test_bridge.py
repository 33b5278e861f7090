"""Tests of bridge: two buses that are joined."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import handles, patterns_of, publish_all, sbus, wait_for_patterns
from packets import ANSWER, WHOAMI, publish
from processes import ROOT, SECONDS_MAX, child_process, gone, outcome, run
from real_bus import Peer, RealBus, seqpacket_pair, wait_for
from sbus_client import Client


class Sides:
    """A bridge between two sockets of the test's own."""

    PROBES = b"!/cred//1000//sbus/bridge/"  # of the user in ANSWER
    JOIN = [
        b"CMSG echo/off",
        b"CMSG blocking/soft/block",
        b"SUB ",
        b"SUB " + PROBES,
    ]
    LEAVE = [b"UNSUB ", b"UNSUB " + PROBES, WHOAMI]

    def __init__(self, *patterns: str) -> None:
        ours, self.left_wire = seqpacket_pair()
        theirs, self.right_wire = seqpacket_pair()
        fds = [ours.fileno(), theirs.fileno()]
        addresses = [f"/dev/fd/{fd}" for fd in fds]
        options = [f"--pattern={pattern}" for pattern in patterns]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools"), "bridge"]
            + [*addresses, *options],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.close()
        theirs.close()
        self.addresses = addresses
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
        for side in (self.left, self.right):
            assert side.receive() == WHOAMI
            side.send(ANSWER)
        for side in (self.right, self.left):
            assert [side.receive() for _ in self.JOIN] == self.JOIN
            if side == self.left:
                self.probe = side.receive()
                assert self.probe.startswith(publish(self.PROBES)[:-1])
            assert side.receive() == WHOAMI
            side.send(ANSWER)
        return self

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
        """Run a bridge; it has subscribed."""
        former = [patterns_of(running) for running in (bus, other)]
        count = max(1, len(options)) + 1
        addresses = (bus.path, other.path)
        with subprocess.Popen(
            [sys.executable, str(ROOT / "tools"), "bridge"]
            + [*addresses, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                wait_for_patterns(bus, former[0] + count)
                wait_for_patterns(other, former[1] + count)
                wait_for(lambda: handles(process.pid, signal.SIGTERM))
                yield process
                process.wait(SECONDS_MAX)
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
        with (
            self.bridged(bus, other, *options) as process,
            other.connect() as right,
        ):
            right.send(b"SUB ")
            right.fence()
            keys = ("a", "a/1/2", "b/1/2", "b/1")
            publish_all(bus.path, *((key, b"") for key in keys))
            process.terminate()
            assert outcome(process) == (0, "", "")
            assert right.fence() == [publish(b"a/1/2"), publish(b"b/1")]

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
            assert outcome(process) == (1, "", gone(ended.path))

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
        assert done == (1, "", gone(sides.addresses[0]))

    def test_signal_loses_nothing(self) -> None:
        """What comes before the last answer is forwarded."""
        with Sides() as sides:
            sides.joined()
            wait_for(lambda: handles(sides.process.pid, signal.SIGTERM))
            sides.process.terminate()
            for side in (sides.left, sides.right):
                assert [side.receive() for _ in sides.LEAVE] == sides.LEAVE
            sides.left.send(publish(b"k", b"late"), ANSWER)
            assert sides.right.receive() == publish(b"k", b"late")
            sides.right.send(publish(b"k", b"later"), ANSWER)
            assert sides.left.receive() == publish(b"k", b"later")
            assert outcome(sides.process) == (0, "", "")

    def test_second_bridge(self, bus: RealBus, other: RealBus) -> None:
        """It ends, whatever its patterns; the first one goes on."""
        with self.bridged(bus, other, "--pattern=a/") as first:
            done = run("tools", "bridge", other.path, bus.path)
            what = f"sbus: {other.path} and {bus.path} are joined already:"
            what += " messages would go round for ever\n"
            assert done == (1, "", what)
            with other.connect() as right:
                right.send(b"SUB ")
                right.fence()
                publish_all(bus.path, ("a/1", b"v"))
                assert right.receive() == publish(b"a/1", b"v")
            first.terminate()
            assert outcome(first) == (0, "", "")

    def test_ring_of_three(
        self, bus: RealBus, other: RealBus, directory: Path
    ) -> None:
        """A chain is no ring; the bridge that would close one ends."""
        place = directory / "third"
        place.mkdir(mode=0o755)
        with (
            RealBus(place, "--trace", str(place / "trace")) as third,
            self.bridged(bus, other) as first,
            self.bridged(other, third) as second,
            third.connect() as end,
        ):
            end.send(b"SUB k")
            end.fence()
            publish_all(bus.path, ("k", b"v"))
            assert end.receive() == publish(b"k", b"v")
            done = run("tools", "bridge", third.path, bus.path)
            assert done.status == 1 and "joined already" in done.errors
            for process in (first, second):
                process.terminate()
                assert outcome(process) == (0, "", "")

    def test_probe_that_comes_late(self) -> None:
        """What was forwarded before it stays so."""
        with Sides() as sides:
            sides.joined()
            sides.left.send(publish(b"k", b"v"))
            assert sides.right.receive() == publish(b"k", b"v")
            sides.right.send(sides.probe)
            assert outcome(sides.process).status == 1
            assert sides.left.is_disconnected()

    def test_probe_of_another_bridge(self) -> None:
        """It is forwarded, under the key that it has there."""
        with Sides() as sides:
            sides.joined()
            sides.right.send(publish(sides.PROBES + b"another"))
            assert sides.left.receive() == publish(sides.PROBES + b"another")

    def test_probe_that_a_stranger_repeats(
        self, bus: RealBus, other: RealBus
    ) -> None:
        """[CRED-11] Who can subscribe to all keys does not hear it."""
        with (
            bus.connect() as left,
            self.bridged(bus, other) as process,
        ):
            left.send(b"SUB ")
            left.fence()
            done = run("tools", "bridge", bus.path, other.path)
            assert done.status == 1 and left.fence() == []
            process.terminate()
            assert outcome(process) == (0, "", "")

    def test_many_messages_before_the_first_event(self) -> None:
        """What came before an answer is forwarded without an event."""
        packets = [publish(b"k", b"%d" % n) for n in range(200)]
        with Sides() as sides:
            sides.right.send(*packets)
            sides.joined()
            assert [sides.left.receive() for _ in packets] == packets

    def test_one_bus(self, bus: RealBus) -> None:
        """A bus is not joined with itself, whatever it is called."""
        same = bus.path.replace("/bus", "/./bus")
        done = run("tools", "bridge", bus.path, same)
        what = f"sbus: {bus.path} and {same} are the same bus\n"
        assert done == (1, "", what)

    def test_no_bus(self, bus: RealBus, directory: Path) -> None:
        """The line does not name -a, which is no option here."""
        path = str(directory / "nothing")
        done = run("tools", "bridge", bus.path, path)
        what = f"sbus: no bus at {path}: nothing is there; start sbusd, or"
        assert done == (1, "", f"{what} give its address\n")

    def test_address_option(self) -> None:
        """Two addresses are enough."""
        done = sbus("/nowhere", "bridge", "/one", "/other")
        what = "sbus: bridge takes two addresses and no -a; --help lists"
        assert done == (2, "", f"{what} the options\n")
