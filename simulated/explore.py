#!/usr/bin/env python3
"""Search all that can happen to a few clients of the model, in every order.

    export PYTHONPATH=spec
    python3 simulated/explore.py pairs [N]   two that publish to each other
    python3 simulated/explore.py rings [N]   three, each of which publishes on
    python3 simulated/explore.py changes   a reader that changes its modes
    python3 simulated/explore.py users   readers and publishers of three users
    python3 simulated/explore.py FILE   a world of your own, as below

N is how many messages each sends.  A world is a conversation of the
specification: what stands before the line `---` is done in order, and what
follows in every order that keeps that of each client:

    A > SUB a
    A > CMSG blocking/soft/block
    A room 1
    ---
    B > MSG a\\01
    B > MSG a\\02

A program sends with calls that block while a packet of it is unread, and
reads whenever it is not in such a call.  Between two steps any other may
come, those of the server included, which reads one packet at a time.  In
every state the rules of chapter 5 hold, and all go on if all read; the block
time ends what waits for each other.  What breaks that is printed as the
shortest conversation that leads there, and the exit status is 1.
"""

from __future__ import annotations

import itertools
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from model import CHOICES, Bus, Client, Hold, drain, handle, may_pause
from search import Search

STATES_MAX = 200_000
MAX_BACKLOG = 300  # two messages and a little more
READS_MAX = 1_000  # of all programs, after which they have read all
STEP = re.compile(r"([A-Z]) (>|room|process) (.*)")
RULES = {"soft": "BLOCK-7", "hard": "BLOCK-10"}


class Violation(Exception):
    """A rule of chapter 5 is broken."""


def require(condition: object, text: str) -> None:
    """Raise Violation if something is not so."""
    if not condition:
        raise Violation(text)


class Report(NamedTuple):
    """What a search has found."""

    violation: str  # or nothing
    conversation: list[str]  # which leads to it, or else into a deadlock
    states: int
    is_complete: bool
    deadlocks: int


@dataclass
class World:
    """A bus, and the programs that use it."""

    bus: Bus
    clients: dict[str, Client]
    programs: dict[str, list[bytes]]  # what each has still to send
    blocked: set[str]  # those that are in a call which blocks

    def snapshot(self) -> tuple[object, ...]:
        """Return what decides the future."""
        lengths = tuple(map(len, self.programs.values()))
        return self.bus.snapshot(), lengths, tuple(sorted(self.blocked))

    def copy(self) -> World:
        """Return a world that can go another way."""
        twin: World = pickle.loads(pickle.dumps(self))
        return twin

    # ---- What can happen

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield each thing that may happen next, and to which client."""
        ready = self.bus.ready()
        for name, client in self.clients.items():
            if not client.end:
                yield from self.steps_of_program(name, client)
            if client.number in ready:
                yield "handle", name
            if client.backlog and client.has_room:
                yield "drain", name

    def steps_of_program(
        self, name: str, client: Client
    ) -> Iterator[tuple[str, str]]:
        """Yield what a program may do next."""
        if name in self.blocked:
            if not client.sent:
                yield "send", name
            return
        if self.programs[name]:
            yield "block" if client.sent else "send", name
        if client.received:
            yield "read", name

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line; raise Violation."""
        client, before = self.clients[name], self.holds()
        line = self.perform(action, name, client)
        for holder, publisher, hold in before - self.holds():
            client, other = self.clients[holder], self.clients[publisher]
            is_left = client.modes[hold.mode] != "block"
            is_low = client.backlog_bytes <= hold.end_bytes
            may_go = is_left or is_low or client.end or other.end
            rule = RULES[hold.mode]
            require(may_go, f"{rule}: {publisher} goes on too early")
        return line

    def holds(self) -> set[tuple[str, str, Hold]]:
        """Return which client holds which."""
        names = {client.number: name for name, client in self.clients.items()}
        return {
            (name, names[number], hold)
            for name, client in self.clients.items()
            for number, hold in client.holds.items()
        }

    def perform(self, action: str, name: str, client: Client) -> str:
        """Do what a step says; return it as a line of a conversation."""
        if action == "handle":
            self.handle(client)
            return f"# the server handles {name}: {self.decisions()}"
        if action == "drain":
            drain(self.bus, client)
            return f"# the kernel takes a packet for {name}"
        if action == "read":
            return f"{name} < {shown(client.received.pop(0))}"
        packet = self.programs[name][0]
        if action == "block":
            self.blocked.add(name)
            return f"# {name} waits in its call for {shown(packet)}"
        del self.programs[name][0]
        self.blocked.discard(name)
        client.sent.append(packet)
        return f"{name} >> {shown(packet)}"

    def handle(self, client: Client) -> None:
        """Handle a packet; raise Violation if one is lost without a reason."""
        before = {
            name: (c.counts["discarded"], c.backlog_bytes)
            for name, c in self.clients.items()
        }
        holders = self.bus.paused_by(client)
        require(not holders, "BLOCK-12: a paused publisher is read")
        handle(self.bus, client)
        for name, receiver in self.clients.items():
            lost, size = before[name]
            is_lost = receiver.counts["discarded"] > lost
            may_lose = "discard" in receiver.modes.values() or receiver.end
            require(may_lose or not is_lost, f"BLOCK-4: {name} loses a packet")
            is_over = receiver.backlog_bytes > max(size, MAX_BACKLOG)
            is_paused = client.number in receiver.holds
            require(is_paused or not is_over, f"BLOCK-10: {name} has too much")

    def decisions(self) -> str:
        """Return what the model has decided, with the names of clients."""
        names = {str(c.number): name for name, c in self.clients.items()}
        text = "; ".join(self.bus.log)
        self.bus.log.clear()
        text = re.sub(r"client (\d+)", lambda found: names[found[1]], text)
        return re.sub(r"by (\d+)", lambda found: f"by {names[found[1]]}", text)

    # ---- What must hold

    def check(self) -> None:
        """Raise Violation if a state breaks a rule."""
        for name, client in self.clients.items():
            for number, hold in client.holds.items():
                may = may_pause(client, self.bus.clients[number])
                require(may, f"BLOCK-13: {name} may not hold {number}")
                is_block = client.modes[hold.mode] == "block"
                require(is_block, f"BLOCK-22: {name} has left {hold.mode}")
                waits = client.backlog_bytes > hold.end_bytes
                require(waits, f"{RULES[hold.mode]}: {name} holds for nothing")
            is_free = not (client.holds or client.backlog)
            require(is_free or not client.end, f"CONN-6: {name} holds on")
            self.check_order(name, client)

    def check_order(self, name: str, client: Client) -> None:
        """Raise Violation if packets of one publisher are out of order."""
        packets = [*client.received, *(m.packet for m in client.backlog)]
        for sender in self.clients.values():
            mark = b"\0%d." % sender.number
            numbers = [p.partition(mark)[2] for p in packets if mark in p]
            is_sorted = numbers == sorted(numbers)
            is_other = client.modes["order"] != "queue"
            require(is_sorted or is_other, f"PUB-6: {name} has {numbers}")

    def check_that_all_go_on(self) -> None:
        """Raise Violation if somebody stays paused though all read."""
        for _ in range(READS_MAX):
            for client in self.clients.values():
                client.received.clear()
                if client.backlog:
                    drain(self.bus, client)
            for number in self.bus.ready()[:1]:
                handle(self.bus, self.bus.clients[number])
            for name in sorted(self.blocked):
                if not self.clients[name].sent:
                    self.take("send", name)
            clients = self.bus.clients.values()
            if not any(c.backlog or c.sent or c.received for c in clients):
                break
        is_held = any(client.holds for client in self.clients.values())
        require(not is_held, "BLOCK-12: not all go on, though all read")

    def is_deadlock(self) -> bool:
        """Return whether programs wait for each other."""
        blocked = [name for name in self.blocked if not self.clients[name].end]
        return bool(blocked) and not any(self.steps())

    def check_that_time_helps(self) -> None:
        """Raise Violation if the block time does not end a deadlock."""
        for _ in self.clients:
            # One after another, as the rule does not say which is first
            for client in self.clients.values():
                client.since = self.bus.now - 1 / client.number
            if self.is_deadlock():
                self.bus.wait(self.bus.options.block_timeout)
        require(not self.is_deadlock(), "BLOCK-16: they wait for ever")


def explore(world: World) -> Report:
    """Search all states, or as many as there may be."""
    search = Search(world, STATES_MAX)
    deadlocks = 0
    conversation: list[str] = []
    violation = ""

    try:
        for world in search.worlds():
            world.check()
            world.copy().check_that_all_go_on()
            if world.is_deadlock():
                deadlocks += 1
                conversation = conversation or search.way()
                world.copy().check_that_time_helps()
    except Violation as error:
        violation = str(error)
        last = f"# {' '.join(search.step)}: {violation}"
        conversation = [*search.way(), last]

    count, is_complete = len(search.orders), search.is_complete
    return Report(violation, conversation, count, is_complete, deadlocks)


# ---- Worlds


def make_world(text: str) -> World:
    """Return the world of a text; raise ValueError at what is no step."""
    bus = Bus(reads_ahead=False, max_backlog=MAX_BACKLOG)
    world = World(bus, {}, {}, set())
    start, _, rest = text.partition("---\n")
    for part in (start, rest):
        for line in part.splitlines():
            match = STEP.fullmatch(line.strip())
            if not match:
                raise ValueError(f"not a step: {line!r}")
            name, verb, words = match.groups()
            uid = int(words.partition("=")[2]) if verb == "process" else 1000
            if name not in world.clients:
                world.clients[name] = bus.connect(uid)
                world.programs[name] = []
            packet = words.replace("\\0", "\0").encode()
            if verb == "room":
                world.clients[name].room = int(words)
            elif verb == ">" and part is rest:
                world.programs[name].append(packet)
            elif verb == ">":
                bus.send(world.clients[name], packet)
    bus.log.clear()
    return world


def shown(packet: bytes) -> str:
    """Return a packet as it stands in a conversation."""
    return packet.decode("latin-1").replace("\0", "\\0")


def circle(modes: list[tuple[str, str]], count: int) -> str:
    """Return a world in which each client publishes to the next."""
    names = "ABC"[: len(modes)]
    lines = []
    for name, (soft, hard) in zip(names, modes):
        lines += [
            f"{name} > SUB {name.lower()}",
            f"{name} > CMSG blocking/soft/{soft}",
            f"{name} > CMSG blocking/hard/{hard}",
            f"{name} room 1",
        ]
    messages = [
        f"{name} > MSG {names[number % len(names)].lower()}\\0{number}."
        for number, name in enumerate(names, 1)
    ]
    lines += [f"{text}0" for text in messages]
    lines.append("---")
    lines += [f"{text}{n}" for text in messages for n in range(1, count + 1)]
    return "\n".join(lines)


CHANGES = """\
A > SUB a
A room 1
---
B > MSG a\\02.0
B > MSG a\\02.1
B > MSG a\\02.2
B > MSG a\\02.3
A > CMSG blocking/soft/block
A > CMSG blocking/soft/queue
A > CMSG blocking/hard/discard
A > CMSG blocking/hard/block
A > CMSG blocking/soft/error
C > MSG a\\03.0
"""
USERS = """\
A process uid=1001
A > SUB k
A > CMSG blocking/soft/block
A room 1
B process uid=0
B > SUB k
B > CMSG blocking/soft/block
B room 1
---
C process uid=1001
C > MSG k\\03.0
C > MSG k\\03.1
D process uid=1002
D > MSG k\\04.0
D > MSG k\\04.1
B > CMSG blocking/soft/queue
"""


def worlds(name: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield worlds, and what they are called."""
    ways = itertools.product(
        CHOICES["blocking/soft"], CHOICES["blocking/hard"]
    )
    if name == "pairs":
        for pair in itertools.combinations_with_replacement(ways, 2):
            yield " ".join(map("/".join, pair)), circle([*pair], count)
    elif name == "rings":
        for way in ways:
            yield "/".join(way), circle([way] * 3, count)
    elif name in ("changes", "users"):
        yield name, CHANGES if name == "changes" else USERS
    else:
        yield name, Path(name).read_text("utf-8")


def main() -> int:
    """Explore what is asked for; return 1 if a rule is broken, or 0."""
    name, *more = sys.argv[1:] or ["pairs"]
    is_wrong = False
    for title, text in worlds(name, int(more[0]) if more else 3):
        report = explore(make_world(text))
        is_wrong |= bool(report.violation)
        extent = "all" if report.is_complete else "more than"
        print(f"{title}: {extent} {report.states} states")
        if report.conversation:
            kind = report.violation or f"{report.deadlocks} deadlocks, such as"
            print(f"{kind}\n{text.partition('---')[0]}", end="")
            print("\n".join(report.conversation))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
