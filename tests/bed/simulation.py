"""A simulated kernel: random clients on it, judged by the model.

It runs on one core without a socket or a clock.  All that it knows of the
server is what that asks of the kernel, its trace, and `stats`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import socket
import tempfile
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from selectors import SelectorKey
from typing import Any, NamedTuple

import sbus
from fake_kernel import (
    OWNER,
    FakeKernel,
    FakeListener,
    FakeSelector,
    FakeWire,
    start_journal,
    stats_of,
)
from spec_model import Line, Model, Party

SLOTS = [  # who connects, and connects again after leaving
    sbus.Credentials(100, 1000, 11),
    sbus.Credentials(101, 1000, 12),
    sbus.Credentials(100, 1001, 13),
    sbus.Credentials(0, 0, 14),
    sbus.Credentials(100, OWNER, 15),
    sbus.Credentials(100, 65534, 16),
]
LIMITS = {
    "max_packet": 20_000,
    "max_key": 64,
    "max_segments": 12,
    "max_patterns": 7,
    "max_pattern_bytes": 60,
    "max_backlog": 2_500,
    "max_clients": 5,
}
USER_LIMITS = {
    "max_shapes": 5,
    "max_user_patterns": 8,
    "max_user_pattern_bytes": 40,
    "max_user_backlog": 3_000,
    "max_bus_backlog": 6_000,
}
PREFIX = "!/cred/1/2/3"


class Setup(NamedTuple):
    """How a server is set up."""

    options: dict[str, Any] = {}
    packet_seconds: float = 0.0  # that pass while a packet is read


SETUPS = [
    Setup(),
    Setup(USER_LIMITS),
    Setup({**USER_LIMITS, "strict": True}),
    Setup({"cred_prefix": PREFIX, "strict": True}),
    Setup({**USER_LIMITS, "max_user_clients": 1, "cred_prefix": PREFIX}),
    Setup({"user": [1000, 65534]}),
    Setup(USER_LIMITS, packet_seconds=1 / 256),
    Setup(packet_seconds=1 / 2048),
]
PACKET_COST_BYTES = 768  # in the kernel, more than it holds
INCOMING_MAX = 12  # packets that a client can send ahead
SETTLE_ROUNDS_MAX = 2_000
TURN_SECONDS = 0.001
TURN_PACKETS = 64
REST_SECONDS_MAX = 0.1

Step = tuple[str, int, Any]  # what, who, how


class SimWire(FakeWire):
    """A client's socket on the simulated kernel."""

    def __init__(self, world: World, slot: int, room_bytes: int) -> None:
        super().__init__(world, 10 + slot, SLOTS[slot])
        self.slot = slot
        self.party = Party(SLOTS[slot])
        self.room_bytes = room_bytes
        self.is_starved = False  # it was last refused for want of memory
        self.starved_time = 0.0  # then
        self.is_broken = False  # a send has failed in a way that lasts
        self.is_open = False  # the trace says so
        self.skips = 0  # rounds in which it was ready, and not served
        self.is_served = False  # in this round
        self.is_paused = False
        self.pauses = 0

    # What the server calls

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        if option == socket.SO_PEERCRED:
            self.kernel.on_accept(self)
        return super().getsockopt(level, option, size)

    def send(self, packet: Any, /) -> int:
        self.is_served = True
        try:
            size = super().send(packet)
        except OSError as error:
            self.is_starved = error.errno in (errno.ENOBUFS, errno.ENOMEM)
            self.starved_time = self.kernel.now
            is_lost = not self.is_starved and error.errno != errno.EAGAIN
            self.is_broken = is_lost and not isinstance(error, ConnectionError)
            self.kernel.on_refusal(self, bytes(packet), is_lost)
            raise
        self.is_starved = False
        self.kernel.on_send(self, bytes(packet))
        return size

    def shutdown(self, how: int, /) -> None:
        self.kernel.on_shutdown(self)
        super().shutdown(how)

    def close(self) -> None:
        self.kernel.on_close(self)
        super().close()

    # What the kernel thinks

    @property
    def used_bytes(self) -> int:
        """What the packets use that the client has not read."""
        return sum(len(one) + PACKET_COST_BYTES for one in self.taken)

    def _check(self) -> None:
        self.is_served = True
        super()._check()

    def note_read(self, packet: bytes) -> None:
        self.kernel.on_read(self, packet)

    def has_room(self) -> bool:
        return self.used_bytes < self.room_bytes

    def has_much_room(self) -> bool:
        return self.used_bytes * 4 <= self.room_bytes

    # What the client does

    def read(self, count: int) -> None:
        """Read packets, as many as there are."""
        if count and self.taken:
            self.kernel.model.note_progress(self.party)
        for _ in range(min(count, len(self.taken))):
            self.taken.popleft()

    def leave(self) -> None:
        """Close the client's side."""
        self.reset = bool(self.taken)  # one call fails
        self.ended = self.deaf = True
        self.taken.clear()


class SimListener(FakeListener):
    """Is asked for another client once the last one is judged."""

    def accept(self) -> tuple[FakeWire, None]:
        self.kernel.end_turn()
        return super().accept()


class SimSelector(FakeSelector):
    """Reports events in any order, and not always all of them."""

    salt = 0

    def select(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        ready = super().select(timeout)
        if self.salt & 1:
            ready.reverse()
        first = self.salt % (len(ready) or 1)
        ready = ready[first:] + ready[: first if self.salt & 2 else 0]
        self.kernel.on_select([key.fileobj for key, _ in ready])
        return ready


class World(FakeKernel):
    """A server on a simulated kernel, its clients, and the model.

    Without a trace nothing is judged: it is to do what it does with one.
    """

    listener_kind = SimListener
    selector_kind = SimSelector
    selector: SimSelector

    def __init__(
        self, setup: Setup, files: contextlib.ExitStack | None
    ) -> None:
        super().__init__(**{**LIMITS, **setup.options})
        self.setup = setup
        self.log: list[object] = []
        self.model = Model(self.bus.options, lambda: self.now)
        self.trace: Any = None
        self.lines = 0
        self.expected: deque[Line] = deque()  # in the trace
        self.slots: list[SimWire | None] = [None] * len(SLOTS)
        self.wires: dict[SimWire, None] = {}  # those that are not closed
        self.seen = weakref.WeakSet[sbus.Client]()
        self.opened = self.rounds = 0
        self.newcomer: SimWire | None = None  # let in, and not yet judged
        self.reader: SimWire | None = None  # whose turn it is
        self.reads: Counter[SimWire] = Counter()  # in this round
        self.turn_start = self.round_start = 0.0
        self.ready: list[SimWire] = []  # of whom this round was told
        if files:
            self.start_trace(files)

    def start_trace(self, files: contextlib.ExitStack) -> None:
        """Have the server write a trace, for the model."""
        temporary = tempfile.NamedTemporaryFile
        self.trace = files.enter_context(temporary("r", encoding="ascii"))
        descriptor = os.dup(0)  # of the file that is opened next
        os.close(descriptor)
        start_journal(self, Path(self.trace.name))
        files.callback(os.close, descriptor)
        start = json.loads(self.trace.readline())
        assert (start["n"], start["ev"]) == (1, "start")
        self.lines = 1

    # ---- Steps

    def step(self, step: Step) -> None:
        """Do one step; one that is not possible now does nothing."""
        what, slot, how = step
        if what == "serve":
            self.serve(how)
        elif what == "connect":
            self.enter(slot, how)
        elif what == "wait":
            for _ in range(8):
                self.now += how / 8  # exactly
                self.serve(0)
        elif what == "settle":
            self.settle()
        elif what == "exhaust":
            self.listener.failures.append(OSError(how, os.strerror(how)))
        else:
            wire = self.slots[slot]
            if wire and not wire.closed:
                self.act(wire, what, how)

    def enter(self, slot: int, room_packets: int) -> None:
        """Connect a client, unless it is connected."""
        wire = self.slots[slot]
        if not wire or wire.closed or wire.ended:
            wire = SimWire(self, slot, room_packets * (PACKET_COST_BYTES + 20))
            self.slots[slot] = wire
            self.wires[wire] = None
            self.listener.waiting.append(wire)

    def act(self, wire: SimWire, what: str, how: Any) -> None:
        """Have a client do something."""
        if what == "send":
            if not wire.ended and len(wire.incoming) < INCOMING_MAX:
                wire.incoming.append(how)
        elif what == "read":
            wire.read(how)
        elif what == "fail":
            wire.failures.append(OSError(how, os.strerror(how)))
        elif what == "finish":  # a half-close
            wire.ended = True
        elif what == "deafen":
            wire.deaf = True  # which no event tells
        elif what == "leave":
            wire.leave()
            self.slots[wire.slot] = None

    def serve(self, salt: int) -> None:
        """Give the server a round, and check everything."""
        self.selector.salt = salt
        self.server.round(0)
        self.end_turn()
        if self.trace:
            self.check()

    # ---- What the trace says

    def sync(self) -> None:
        """Judge what the trace says since the last time.

        That a run of packets was sent may be said at the end of the run.
        """
        if not self.trace:
            return
        assert self.bus.journal
        self.bus.journal.flush()
        for text in self.trace:
            line = json.loads(text)
            self.lines += 1
            assert line.pop("n") == self.lines, "a gap in the trace"
            del line["t"]
            if line["ev"] == "drop":
                self.model.lose(line)
            elif line["ev"] == "close":
                self.on_last_line(line)
            elif line["ev"] != "stop":
                assert self.expected and line == self.expected.popleft(), line

    def expect(self, line: Line) -> None:
        """Have the trace say something next."""
        if line and self.trace:
            self.expected.append(line)

    def on_last_line(self, line: dict[str, Any]) -> None:
        """Judge the last line of a client: whether it names a rule."""
        party = next(p for p in self.model.parties if p.number == line["c"])
        is_blamed = line["reason"].startswith("[")
        assert is_blamed in party.may_be_blamed, line
        self.model.close(party)

    def end_turn(self) -> None:
        """Judge a turn that is over, and whoever came last."""
        self.sync()
        assert not self.expected, "not traced"
        if self.trace:
            self.model.end_turn()
            wire = self.newcomer
            if wire and not wire.closed:
                assert not self.model.is_crowded(wire.party), "one too many"
        self.newcomer = self.reader = None

    # ---- What the wires report

    def on_select(self, ready: list[Any]) -> None:
        """Note that a round begins, and judge the one before."""
        self.end_turn()
        self.judge_turns()
        self.reads.clear()
        self.round_start = self.now
        self.ready = [one for one in ready if isinstance(one, SimWire)]
        for wire in self.wires:
            wire.is_served = False

    def judge_turns(self) -> None:
        """Check that all who were ready have turns, user by user [CONN-5]."""
        users: dict[int, list[SimWire]] = {}
        for wire in self.ready:
            users.setdefault(wire.party.own.uid, []).append(wire)
        seconds = self.setup.packet_seconds
        for some in users.values():
            assert any(one.is_served for one in some), "starved"
            spent = seconds * sum(self.reads[one] for one in some)
            assert spent <= 2 * TURN_SECONDS + seconds, "more than a slice"
            for one in some:
                one.skips = 0 if one.is_served else one.skips + 1
                assert one.skips <= len(SLOTS), "passed over again and again"

    def on_accept(self, wire: SimWire) -> None:
        """Note that a client is let in, or refused [CONN-2]."""
        self.log.append((wire.slot, "accepted"))
        if self.trace and self.model.may_connect(wire.party):
            self.newcomer = wire
            wire.is_open = True
            self.opened += 1
            self.expect(self.model.open(wire.party, self.opened))

    def on_read(self, wire: SimWire, packet: bytes) -> None:
        """Judge that the server reads a packet, and do what it says."""
        self.log.append((wire.slot, "sent", packet[:40]))
        if self.reader is not wire:
            if wire is not self.newcomer:
                self.end_turn()
            self.reader, self.turn_start = wire, self.now
        self.sync()
        assert not self.expected, "not traced"
        self.reads[wire] += 1
        assert self.reads[wire] <= TURN_PACKETS, "a turn without end"
        assert self.now - self.turn_start <= TURN_SECONDS, "a long turn"
        self.now += self.setup.packet_seconds
        party = wire.party
        assert not (party.is_wrong or party.is_at_end), "read after its end"
        if not packet and wire.ended and not wire.incoming:
            party.is_at_end = True
        elif self.trace:
            self.expect(self.model.handle(party, packet))

    def on_send(self, wire: SimWire, packet: bytes) -> None:
        """Judge that the server sends a packet, which the kernel takes."""
        self.log.append((wire.slot, "heard", packet[:40]))
        self.sync()
        if self.trace:
            self.expect(self.model.deliver(wire.party, packet))

    def on_refusal(self, wire: SimWire, packet: bytes, is_lost: bool) -> None:
        """Judge that the server sends a packet that the kernel refuses."""
        self.log.append((wire.slot, "refused", packet[:40]))
        self.sync()
        if self.trace:
            self.model.refuse(wire.party, packet)
        if wire.is_starved:  # the kernel is to blame [BLOCK-16]
            timeout = self.bus.options.block_timeout
            wire.party.surely_since = self.now + timeout
        if is_lost:
            self.model.leave(wire.party)

    def on_shutdown(self, wire: SimWire) -> None:
        """Judge that a client is disconnected for what it did not read."""
        self.log.append((wire.slot, "expelled"))
        if self.trace:
            is_due = wire.is_broken or self.model.may_be_expelled(wire.party)
            assert is_due, "expelled for nothing"
        wire.party.is_expelled = wire.is_served = True
        self.model.leave(wire.party)
        self.sync()

    def on_close(self, wire: SimWire) -> None:
        """Judge that a client is closed: not too soon [CONN-6] [CONN-10]."""
        self.log.append((wire.slot, "closed"))
        del self.wires[wire]
        party = wire.party
        if not wire.is_open:
            return
        is_crowded = wire is self.newcomer and self.model.is_crowded(party)
        is_stopping = self.server.stopping
        if is_crowded or is_stopping:
            party.may_be_blamed = {False, True}
        else:
            party.may_be_blamed = {party.is_wrong or party.is_expelled}
        is_over = party.is_wrong or party.is_at_end or is_stopping
        if not is_over and not is_crowded:
            assert wire.ended, "disconnected for nothing"
            assert not wire.incoming, "not heard out"
            is_able = wire.has_room() and not wire.is_starved
            is_able &= not (wire.deaf or wire.reset or party.is_leaving)
            assert not (is_able and party.backlog), "it would have had more"
        self.model.leave(party)
        self.sync()

    # ---- What must be so after each round

    def check(self) -> None:
        """Compare what the server does and says with what is so."""
        wires: dict[SimWire, sbus.Client]
        wires = {client.wire: client for client in self.bus.clients}
        assert {one.party for one in wires} == set(self.model.parties)
        self.seen.update(self.bus.clients)
        self.rounds += 1
        for wire, client in wires.items():
            self.check_watched(wire)
            if not self.rounds % 8:  # a wrong count stays wrong
                self.check_stats(wire, stats_of(client))

    def check_watched(self, wire: SimWire) -> None:
        """Check that a client is paused, or watched, as it has to be."""
        party = wire.party
        key = self.selector.keys.get(wire)
        events = key.events if key else 0
        is_paused = not events & sbus.READ  # [BLOCK-12]
        holders = [one for one in self.model.parties if party in one.holds]
        is_held = any(one.holds[party].is_on(one.waiting) for one in holders)
        assert is_paused or not is_held, "not paused"
        assert holders or not is_paused, "paused by nobody"
        wire.pauses += is_paused and not wire.is_paused
        wire.is_paused = is_paused
        is_waiting = bool(events & sbus.WRITE)
        assert wire.is_starved or is_waiting == bool(party.backlog)
        rest = wire.is_starved and self.round_start - wire.starved_time
        assert not party.backlog or rest < REST_SECONDS_MAX, "a rest for ever"
        seconds = self.round_start - party.surely_since
        is_due = seconds >= self.bus.options.block_timeout
        is_too_long = is_due and party.surely_holds()
        assert not is_too_long, "holds publishers too long"  # [BLOCK-16]

    def check_stats(self, wire: SimWire, stats: dict[str, Any]) -> None:
        """Compare what `stats` says with what is so [CTL-5]."""
        party = wire.party
        names = ("published", "delivered", "refused", "discarded")
        counts = {name: party.counts[name] for name in names}
        expected = {"client": party.number, **party.uses(), **counts}
        pauses = stats.pop("paused")
        is_right = wire.pauses <= pauses <= party.pauses
        assert is_right, f"{wire.pauses} <= {pauses} <= {party.pauses} pauses"
        users = stats.pop("users", None)
        clients = stats.pop("clients", None)
        assert stats == expected
        assert bool(clients) == party.is_privileged
        parties = {str(one.number): one for one in self.model.parties}
        for text, row in (clients or {}).items():
            self.check_row(parties.pop(text), row)
        assert not (clients and parties), "a client is left out"
        assert bool(users) == party.is_privileged
        for text, sums in (users or {}).items():
            some = self.model.of_user(int(text))
            total = Counter({"clients": len(some)})
            total += self.model.past[int(text)]
            for one in some:
                total.update({**one.uses(), **one.counts})
            del sums["paused"]
            assert +Counter(sums) == +total, "wrong sums of a user"
        assert users is None or {*map(int, users)} == {*self.model.past}

    def check_row(self, party: Party, row: dict[str, Any]) -> None:
        """Compare what `stats` says of one client with what is so."""
        paused_by = {*row.pop("paused_by")}
        modes = f"soft/{party.soft} hard/{party.hard} order/{party.order}"
        uses, echo = party.uses(), "on" if party.echo else "off"
        del uses["pattern_bytes"]
        _, uid, pid = party.own
        modes = f"{modes} echo/{echo}"
        assert row == {"uid": uid, "pid": pid, **uses, "modes": modes}
        holders = [one for one in self.model.parties if party in one.holds]
        are_sure = [one.holds[party].is_on(one.waiting) for one in holders]
        numbers = [one.number for one in holders]
        assert {*itertools.compress(numbers, are_sure)} <= paused_by
        assert paused_by <= {*numbers}

    # ---- The end

    def settle(self) -> None:
        """Let everybody read and time pass, until all is delivered."""
        for _ in range(SETTLE_ROUNDS_MAX):
            self.now += 1 / 16
            self.serve(2)
            for wire in self.wires:
                wire.read(1_000)
            if not self.selector.ready() and not self.is_something_left():
                break
        else:
            raise AssertionError("the server spins")
        self.selector.salt = 0
        self.now += 1
        self.server.round(0)  # the log names the processes it left out
        self.server.round(1_000.0)
        assert self.selector.timeouts[-1] == 1_000, "the server does not sleep"

    def is_something_left(self) -> bool:
        """Return whether something is to be read or sent."""
        is_resting = self.listener not in self.selector.keys
        stats = [stats_of(client) for client in self.bus.clients]
        is_backlog = any(one["backlog_bytes"] for one in stats)
        return bool(self.listener.waiting) or is_resting or is_backlog

    def stop(self) -> None:
        """Stop the server; nothing may be left of its clients."""
        self.server.stopping = True
        self.log.append("stop")
        self.server.run()
        self.sync()
        left = self.wires.keys() - {*self.listener.waiting}
        assert not left and not self.bus.clients and not self.bus.users
        assert not self.selector.keys, "still watched"
        used = [name for name in sbus.USES if self.bus.counts[name]]
        assert not used, "what the bus uses"
        if self.seen:
            gc.collect()
            assert not self.seen, "a client is remembered"


def run_steps(
    steps: Iterable[Step], setup: Setup, is_traced: bool = True
) -> World:
    """Run steps on a new bus, and stop it."""
    with contextlib.ExitStack() as files:
        world = World(setup, files if is_traced else None)
        for step in steps:
            world.step(step)
        world.stop()
        return world
