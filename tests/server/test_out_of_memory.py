"""Tests that memory may run out at each line of the bus in turn."""

from __future__ import annotations

import errno
import re
import selectors
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus
from fake_kernel import (
    OWNER,
    ROUNDS_MAX,
    FakeKernel,
    FakePeer,
    FakeSelector,
    FakeWire,
)
from packets import WHOAMI, publish
from simulation import holders_in, tables_for
from sizes import IS_SOAK, PROOF, either

SOURCE = sbus.__file__
LINES = dict(enumerate(Path(SOURCE).read_text().splitlines(), 1))
HEADINGS = [n for n, line in LINES.items() if re.match(r"# \d\. ", line)]
FRUGAL = re.compile(  # lines that need no memory
    r" *(?:try:|pass|break|continue|return(?: \w+)?|\w+ = \w+)(?:  #.*)?"
)
GREEDY = {  # the other lines of sections 2 to 7
    number
    for number in range(HEADINGS[1], HEADINGS[7])
    if not FRUGAL.fullmatch(LINES[number])
}
# These survive, if anything does, and make good what others left half done
GUARDS = {
    function.__code__
    for function in (
        sbus.Server.run,
        sbus.Server.round,
    )
}

Place = tuple[str, int]  # a function, and a line of it


class Idle(Exception):
    """Nothing is left to do."""


class Thief:
    """Counts executed lines, and takes the memory away at one of them."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the line, from 0; -1 for none
        self.places: list[Place] = []  # of the lines so far

    def on_call(self, frame: Any, event: str, argument: Any) -> Any:
        """Follow the calls of the bus, as a trace function."""
        code = frame.f_code
        is_ours = code.co_filename == SOURCE and code not in GUARDS
        return self.on_line if is_ours else None

    def on_line(self, frame: Any, event: str, argument: Any) -> Any:
        """Count a line; raise if its time has come."""
        if event == "line" and frame.f_lineno in GREEDY:
            self.places.append((frame.f_code.co_name, frame.f_lineno))
            if len(self.places) == self.number + 1:
                raise MemoryError
        return self.on_line


class IdleSelector(FakeSelector):
    """Ends a run once it has nothing to report twice."""

    rounds_left = 0
    was_idle = False

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        if fileobj in self.keys:  # as Python's own
            raise KeyError(f"{fileobj} is already registered")
        return super().register(fileobj, events, data)

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.rounds_left -= 1
        assert self.rounds_left, "the server spins"
        if not ready and self.was_idle:
            raise Idle
        self.was_idle = not ready
        return ready


class HearingWire(FakeWire):
    """Remembers what the kernel took for its client."""

    def __init__(self, number: int, credentials: sbus.Credentials) -> None:
        super().__init__(number, credentials)
        self.heard: list[bytes] = []

    def send(self, packet: Any, /) -> int:
        size = super().send(packet)
        self.heard.append(bytes(packet))
        return size

    def news(self) -> list[bytes]:
        """Return the messages that were heard."""
        return [packet for packet in self.heard if packet[:4] == b"MSG "]

    def answers(self) -> list[bytes]:
        """Return the answers that were heard, without the counts in them."""
        return [
            packet.partition(b"{")[0]
            for packet in self.heard
            if packet[:4] == b"CMSG"
        ]


class KnowingBus(sbus.Bus):
    """Knows who was ever its client."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: set[object] = set()  # wires

    def open(self, credentials: sbus.Credentials, wire: Any) -> sbus.Client:
        client = super().open(credentials, wire)
        self.known.add(wire)
        return client


class KnowingServer(sbus.Server):
    """Knows whom a want of memory has cost the connection."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.victims: set[object] = set()  # wires

    def expel(
        self, client: sbus.Client, error: Exception, ignored: bool = False
    ) -> None:
        self.note(client, error)
        super().expel(client, error, ignored)

    def disconnect(self, client: sbus.Client, cause: Any) -> None:
        self.note(client, cause)
        super().disconnect(client, cause)

    def note(self, client: sbus.Client, cause: object) -> None:
        """Note a victim."""
        if isinstance(cause, MemoryError) and not client.closed:
            self.victims.add(client.wire)


class PoorKernel(FakeKernel):
    """A server that runs as it does in earnest, and out of memory once."""

    selector: Any
    bus: Any
    server: Any

    def __init__(self, thief: Thief, is_observed: bool) -> None:
        limits = sbus.Limits(
            max_packet=30_000,
            max_backlog=40_000,
            max_user_clients=4,
        )
        super().__init__(limits, OWNER)
        self.thief = thief
        self.is_armed = False
        self.wires: list[HearingWire] = []
        self.sent: dict[bytes, int] = {}  # and by which of the wires
        self.selector = IdleSelector()
        self.bus = KnowingBus(limits, OWNER)
        self.server = KnowingServer(
            self.bus, self.listener, self.selector, lambda: self.now
        )
        if is_observed:
            self.bus.journal = sbus.Journal(-1, {}, False, False)

    def connect(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Connect a client."""
        number = next(self.numbers)
        wire = HearingWire(number, sbus.Credentials(gid, uid, number))
        self.wires.append(wire)
        self.listener.waiting.append(wire)
        self.run()
        self.wait(0.2)  # until somebody accepts again
        return FakePeer(self, wire)

    def run(self) -> None:
        """Let the server work until nothing is left to do."""
        self.selector.rounds_left = ROUNDS_MAX
        self.selector.was_idle = False
        for index, wire in enumerate(self.wires):
            self.sent.update(dict.fromkeys(wire.incoming, index))
        if self.is_armed:
            sys.settrace(self.thief.on_call)
        try:
            self.server.run()
        except Idle:
            pass
        finally:
            sys.settrace(None)
        assert not self.bus.touched, "an outbox was left"
        clients = self.bus.clients.values()
        assert not any(client.outbox for client in clients)


def news(number: int, size: int = 0) -> bytes:
    """Return a packet that is like no other, in each of its bytes."""
    return publish(b"news/%d" % (number % 2), bytes([number]) * (size + 1))


SLOW = 3  # of the wires, whose client has its packets in another order


def a_day(kernel: PoorKernel) -> Iterator[None]:
    """All that clients can do, in steps."""
    reader, slow, writer = (kernel.connect() for _ in range(3))
    stranger = kernel.connect(uid=2000)
    yield
    reader.send(b"SUB news/0", b"SUB news/", b"SUB !/cred////")
    slow.send(b"SUB */*", b"SUB end", b"SUB end", b"UNSUB end")
    stranger.send(b"CMSG echo/off", b"SUB ")
    yield
    own = b"!/cred/100/1000/%d/" % reader.wire.fileno()
    writer.send(news(1), news(2, 20_000), publish(own, b"3"), news(4))
    yield
    reader.send(b"CMSG blocking/soft/block")
    reader.wire.room = slow.wire.room = 0
    writer.send(news(5), news(6, 17_000))
    writer.send(news(7))  # it is paused
    yield
    stranger.send(news(8, 100), news(9))
    yield
    slow.send(b"CMSG order/random", WHOAMI, b"CMSG order/stack")
    slow.wire.room = 1
    kernel.run()
    slow.send(b"CMSG order/random")
    slow.wire.room = None
    slow.read_all()
    yield
    reader.wire.room = None
    reader.read_all()
    yield
    owner = kernel.connect(uid=OWNER)
    owner.send(b"CMSG stats", b"SUB x/*", b"UNSUB x/*", b"UNSUB x")
    yield
    crowd = [kernel.connect() for _ in range(2)]  # one is too many
    crowd[0].send(b"SUB end", b"CMSG blocking/soft/error")
    crowd[0].wire.room = 0
    writer.send(publish(b"end", b"10"))  # the receiver is disconnected
    yield
    crowd[1].send(b"MSG !")
    reader.wire.failures.append(OSError(errno.ENOBUFS, "no buffers"))
    stranger.send(news(11), news(12))
    kernel.wait(0.1)
    yield
    kernel.listener.failures.append(OSError(errno.EMFILE, "no descriptors"))
    late = kernel.connect(uid=3000)
    for _ in range(3):
        kernel.wait(0.2)
    late.send(b"SUB news/*", b"CMSG blocking/hard/discard")
    yield
    late.wire.room = 0
    for number in (13, 14, 15, 16):
        stranger.send(news(number, 17_000))
        kernel.wait(0.1)  # as it has to keep pace with readers
    late.wire.ended = True
    late.wire.room = 1
    kernel.run()
    yield
    reader.wire.room = 0
    writer.send(news(17), news(18))
    kernel.wait(6)  # the reader holds the writer for too long
    yield
    writer.close()


def check_routes(bus: sbus.Bus) -> None:
    """Check that each message still goes to those who asked for it.

    Where memory ran out between two statements, a count may be off by one.
    """
    public, secret = tables_for(bus)
    assert holders_in(bus._public) == holders_in(public)
    assert holders_in(bus._secret) == holders_in(secret)
    for head, receivers in bus._recent.items():
        assert set(receivers) == set(public.find(head[4:]))


class Day:
    """A day on which memory may run out, and what came of it."""

    def __init__(self, number: int, is_observed: bool) -> None:
        self.thief = Thief(number)
        self.kernel = kernel = PoorKernel(self.thief, is_observed)
        self.pair = [kernel.connect(uid=5) for _ in range(2)]
        self.pair[0].send(b"SUB calm/1")
        self.said: list[bytes] = []

    def run(self) -> None:
        """Go through the day, and check all that must be so after it."""
        kernel = self.kernel
        steps = a_day(kernel)
        is_over = False
        while not is_over:
            kernel.is_armed = True
            is_over = next(steps, self) is self
            kernel.is_armed = False
            self.talk()
        for wire in kernel.wires:
            wire.room = None
        for _ in range(3):
            kernel.wait(10)
        self.check_peace()
        self.check_newcomers()
        self.close()

    def talk(self) -> None:
        """Have the witnesses say and hear something."""
        self.said.append(publish(b"calm/1", b"%d" % len(self.said)))
        self.pair[1].send(self.said[-1])
        wire: Any = self.pair[0].wire
        assert wire.heard == self.said, "a witness is disturbed"

    def check_peace(self) -> None:
        """Check that all are served, and what is known of them is true."""
        kernel, server, bus = self.kernel, self.kernel.server, self.kernel.bus
        assert set(kernel.selector.keys) == {
            kernel.listener,
            *(client.wire for client in bus.clients.values()),
        }, "watched is somebody else"
        for client in bus.clients.values():
            wire: Any = client.wire
            assert not wire.closed, "a client without a socket"
            assert not wire.ended, "a client that has left is kept"
            assert not wire.incoming, "not read"
            assert not client.held_by and not client.holding, "paused"
            assert not client.backlog
            assert kernel.selector.keys[wire].events == sbus.READ
            assert client.events == sbus.READ
        assert not server._alarms
        check_routes(bus)

    def check_newcomers(self) -> None:
        """Check that newcomers hear each other."""
        pair = [self.kernel.connect(uid=7) for _ in range(2)]
        pair[0].send(b"SUB news/", b"SUB !/cred////")
        pair[1].send(news(50), news(51), news(52, 20_000))
        own = b"!/cred/100/7/%d/" % pair[0].wire.fileno()
        pair[1].send(publish(own))
        wire: Any = pair[0].wire
        expected = [news(50), news(51), news(52, 20_000), publish(own)]
        assert wire.heard == expected, "newcomers do not hear all"

    def close(self) -> None:
        """Have all leave; nothing may be left of them."""
        kernel, bus = self.kernel, self.kernel.bus
        for wire in kernel.wires:
            wire.ended = True
        for _ in range(3):
            kernel.wait(10)
        assert not bus.clients
        assert list(kernel.selector.keys) == [kernel.listener]
        assert not holders_in(bus._public) and not holders_in(bus._secret)

    @property
    def victims(self) -> set[HearingWire]:
        """Those whom the want of memory has cost the connection."""
        wires, known = self.kernel.wires, self.kernel.bus.known
        cut_off = self.kernel.server.victims
        return {one for one in wires if one in cut_off or one not in known}


def compare(day: Day, calm: Day) -> None:
    """Check that only a victim notices that there was no memory."""
    victims = {day.kernel.wires.index(wire) for wire in day.victims}
    assert len(victims) <= 1, "it cost more than one client"
    sent = calm.kernel.sent
    both = zip(day.kernel.wires, calm.kernel.wires)
    for index, (wire, other) in enumerate(both):
        heard = wire.news()
        assert all(packet in sent for packet in heard), "never sent"
        assert len(set(heard)) == len(heard), "heard twice"
        if index in victims:
            continue
        assert wire.answers() == other.answers(), "other answers"
        lost = set(other.news()) - set(heard)
        assert {sent[packet] for packet in lost} <= victims, "a packet is lost"
        if index != SLOW:
            for publisher in set(sent.values()):
                some = [one for one in heard if sent[one] == publisher]
                assert some == [one for one in sent if one in some], "order"


def some_of_each(places: list[Place]) -> list[int]:
    """Return when some places come first and last; when all do in a soak."""
    last = {place: number for number, place in enumerate(places)}
    backwards = reversed(list(enumerate(places)))
    first = {place: number for number, place in backwards}
    chosen = {*first.values(), *last.values()}
    if IS_SOAK:
        chosen.update(range(0, len(places), 5))
    return sorted(chosen)[:: either(1, 10)]


def problem_of(number: int, calm: Day) -> str:
    """Return what goes wrong after memory runs out at a line, if anything."""
    day = Day(number, calm.kernel.bus.journal is not None)
    try:
        day.run()
        compare(day, calm)
    except Exception as found:  # whatever the mistake in sbus.py is
        name, line = calm.thief.places[number]
        return f"{name}:{line}: {type(found).__name__}: {found}"
    return ""


class TestNoMemory:
    """Wherever memory runs out, it costs one client at most."""

    pytestmark = PROOF

    @pytest.mark.parametrize("is_observed", either([False, True], [False]))
    def test_each_line_fails_in_turn(self, is_observed: bool) -> None:
        """[CONN-12] [PUB-6] The others hear all; nothing is left."""
        calm = Day(-1, is_observed)
        calm.run()
        compare(calm, calm)
        lines = some_of_each(calm.thief.places)
        problems = [problem_of(number, calm) for number in lines]
        found = sorted({problem for problem in problems if problem})
        assert not found, "\n".join(found)
