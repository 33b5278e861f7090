"""Tries every order in which the clients of a conversation can take steps.

What stands before a line `---` happens as it is written.  After it each
client does its own steps in their order, and the clients take turns in every
way:

    >>> *_, report = try_orders('''
    ... A > SUB k
    ... A > CMSG blocking/soft/discard
    ... A room 1
    ... ---
    ... A < {any}
    ... B > MSG k\\\\0one
    ... B > MSG k\\\\0two
    ... ''')
    >>> report.orders, report.end_states
    (2, 2)
    >>> for end in report.ends:
    ...     print(end.orders, *end.facts, sep="; ")
    1; A gets MSG k\\0one, MSG k\\0two
    1; A gets MSG k\\0one; A loses 1 message [BLOCK-5]

The model is the server.  It finishes what a step leads to before the next
step comes.  The next packet of a paused client waits in its call until the
server reads that client again, for here the kernel keeps none.  A step that
receives takes whatever packet is next, and waits for one.  When nobody can go
on and a publisher is paused, time passes: the block time [BLOCK-16].
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conformance.examples import (
    EXPECTATIONS,
    Step,
    each_number,
    escape,
    parse_step,
)
from model import Bus, Client, Options, Unclear, deafen
from search import Search

CLIENTS_MAX = 3
STEPS_MAX = 6  # of a client, after the line `---`
STATES_MAX = 300_000
WORLD_BYTES_MAX = 50_000  # of all that waits, which each state has a copy of
DIGITS_MAX = 12  # of a limit; times of more are not exact
BYTES_MAX = 400_000_000  # of the copies that wait for their turn
STATES_REPORTED = 1000  # how often a search says how far it is
OWNER = 500  # the user of the server, and of clients that do not say theirs
STEP_SECONDS = 0.001  # so short that no step decides about the block time
PIDS = 70_000_001  # the first process id, which no other number is like
NUMBER = re.compile(r"\b(gid|uid|pid)=(\d+)")
LIMIT = re.compile(r"--(max-[a-z-]+|block-timeout) (\d+)")
LOSS = re.compile(r"client (\d+) loses (\d+) \[((?:BLOCK|LIMIT)-\d+)\]")


class End(NamedTuple):
    """A way in which things end, and how to get there."""

    facts: tuple[str, ...]  # sentences without a full stop
    orders: int  # that end so
    states: int  # in which they do
    lines: list[str]  # the shortest of these orders, as a conversation


class Report(NamedTuple):
    """What a search has come to so far."""

    states: int
    orders: int  # of the steps of all clients
    end_states: int
    always: tuple[str, ...]  # facts of all ends
    ends: list[End]  # with other facts; that of most orders first


class Act(NamedTuple):
    """A step of a client, ready to be taken."""

    verb: str
    packet: bytes
    line: str


@dataclass
class World:
    """A bus, and the programs of its clients."""

    bus: Bus
    programs: dict[str, list[Act]]  # what each has still to do
    clients: dict[str, Client] = field(default_factory=dict)
    gets: dict[str, list[bytes]] = field(default_factory=dict)  # in order
    unread: dict[str, list[bytes]] = field(default_factory=dict)  # if deaf
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)  # for each other, in words
    unclear: str = ""  # what the specification leaves open

    def snapshot(self) -> object:
        """Return what decides the future, or is said of the past."""
        holders = [c for c in self.clients.values() if c.holds]
        holders.sort(key=lambda client: client.since)
        state = (
            self.bus.snapshot(),
            [client.number for client in holders],  # who is due first
            round(self.bus.now, 3),
            [len(acts) for acts in self.programs.values()],
            [client.end for client in self.clients.values()],
            self.gets,
            sorted(self.losses.items()),
            self.waits,
            self.unclear,
        )
        return hashlib.blake2b(repr(state).encode(), digest_size=16).digest()

    # ---- What can happen

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield the steps that may come next: an action and a client."""
        ready = [name for name in self.programs if self.may_act(name)]
        for name in ready:
            yield "act", name
        if not ready and self.is_held() and not self.unclear:
            yield "wait", ""

    def may_act(self, name: str) -> bool:
        """Return whether a program can do its next step."""
        acts, client = self.programs[name], self.clients[name]
        if not acts or self.unclear:
            return False
        if acts[0].verb == "<":
            return bool(client.received)
        if client.end:
            return False
        return not (acts[0].verb == ">" and self.bus.paused_by(client))

    def is_held(self) -> bool:
        """Return whether a publisher is paused."""
        return any(client.holds for client in self.clients.values())

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line of a conversation."""
        self.bus.now += STEP_SECONDS
        try:
            line = self.act(name) if action == "act" else self.wait()
        except Unclear as reason:
            self.unclear = str(reason)
            line = f"# The specification leaves open {reason}"

        names = {str(c.number): name for name, c in self.clients.items()}
        for number, count, rule in LOSS.findall("\n".join(self.bus.log)):
            self.losses[names[number], rule] += int(count)
        self.bus.log.clear()
        return line

    def act(self, name: str) -> str:
        """Have a program do its next step."""
        act, client = self.programs[name].pop(0), self.clients[name]
        if act.verb == "<":
            packet = self.bus.read(client)
            self.gets[name].append(packet)
            return f"{name} < {self.shown(packet)}"

        if act.verb == ">":
            client.sent.append(act.packet)
        elif act.verb == "room":
            client.room = int(act.packet)
        if act.verb in ("close", "shut"):
            client.has_ended = True
        if act.verb == "deaf":  # the kernel keeps what came before
            self.unread[name] = [*client.received]
        if act.verb in ("close", "deaf"):
            deafen(self.bus, client)
        self.bus.run()
        return act.line

    def wait(self) -> str:
        """Let the block time pass."""
        self.waits += self.waiting()
        seconds = self.bus.options.block_timeout + 1
        self.bus.wait(seconds)
        return f"wait {seconds:g}"

    def waiting(self) -> Iterator[str]:
        """Yield which clients wait in a call that sends for whom, in words."""
        holders = {
            name: [
                other
                for other, c in self.clients.items()
                if client.number in c.holds
            ]
            for name, client in self.clients.items()
            if self.programs[name] and not client.end
            if self.programs[name][0].verb == ">"
        }
        circle = {name for name in holders if name in reached(name, holders)}
        if len(circle) == 1:
            yield f"{listed(circle)} waits for itself to read"
        elif circle:
            yield f"{listed(circle)} wait for each other"
        for name in sorted({*holders} - circle):
            if holders[name]:
                yield f"{name} waits for {listed(holders[name])} to read"

    # ---- What is said of an end

    def shown(self, packet: bytes) -> str:
        """Return a packet as it stands in a conversation."""
        text = escape(packet)
        for name, client in self.clients.items():
            pid = str(client.credentials.pid)
            text = text.replace(pid, f"{{{name}.pid}}")
        return text

    def facts(self) -> Iterator[str]:
        """Yield what each client comes to, in sentences."""
        if self.unclear:
            yield f"the specification leaves open {self.unclear}"
            return  # the bus has gone one way of several
        for wait in self.waits:
            yield f"{wait}, until the block time"
        for name, client in self.clients.items():
            waiting = [message.packet for message in client.backlog]
            gets = sorted([*self.gets[name], *client.received, *waiting])
            if gets or client.patterns:
                packets = ", ".join(map(self.shown, gets)) or "nothing"
                yield f"{name} gets {packets}"
        for (name, rule), count in sorted(self.losses.items()):
            messages = "message" if count == 1 else "messages"
            yield f"{name} loses {count} {messages} [{rule}]"
        for name, client in self.clients.items():
            if client.end and client.end != "CONN-10":
                yield f"{name} is disconnected [{client.end}]"
            elif self.programs[name] and not (client.end or self.unclear):
                yield f"{name} waits for a message that does not come"

    def last_lines(self) -> Iterator[str]:
        """Have clients read what is left; yield lines of it and of ends."""
        for name, client in self.clients.items():
            for packet in self.unread.get(name, ()):
                yield f"{name} < {self.shown(packet)}"
            if client.is_deaf:
                continue
            with suppress(Unclear):  # what follows may be open as well
                while client.received:
                    yield f"{name} < {self.shown(self.bus.read(client))}"
            if client.end:
                yield f"{name} < end"
            elif self.programs[name]:
                yield f"{name} < nothing"


def reached(name: str, holders: dict[str, list[str]]) -> set[str]:
    """Return all that a client waits for, or that those wait for."""
    names: set[str] = set()
    todo = [name]
    while todo:
        for other in holders.get(todo.pop(), ()):
            if other not in names:
                names.add(other)
                todo.append(other)
    return names


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence has them."""
    *others, last_name = sorted(names)
    return f"{', '.join(others)} and {last_name}" if others else last_name


# ---- Conversations


def make_world(text: str) -> tuple[World, list[str]]:
    """Return the world of a conversation, and the lines that came before.

    Raises: ValueError at what is no step, or is beyond a bound
    """
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("---") if "---" in lines else -1
    options = [line for line in lines if line.startswith("server ")]
    bus = Bus(reads_ahead=False, owner=OWNER, **limits(options))
    world, before = World(bus, {}), [*options]

    for number, line in enumerate(lines):
        if not line or line[0] == "#" or line == "---" or line in options:
            continue
        try:
            for plain in each_number(line):
                add_step(world, parse_step(plain))
            if number < start:
                before += prepared(world)
        except ValueError as error:
            message = f"Line {number + 1}, \u201c{line}\u201d: {error}"
            raise ValueError(message) from None

    check_bounds(world)
    return world, before


def limits(lines: Iterable[str]) -> dict[str, Any]:
    """Return the limits of a server; raise ValueError at other options."""
    words = " ".join(line.partition(" ")[2] for line in lines)
    pairs = LIMIT.findall(words)
    names = {name.replace("-", "_") for name, _ in pairs}
    if LIMIT.sub("", words).strip() or not names <= vars(Options()).keys():
        raise ValueError(
            f"A search knows only limits, such as --max-backlog 270, and"
            f" not \u201cserver {words}\u201d"
        )
    if any(len(count) > DIGITS_MAX for _, count in pairs):
        raise ValueError(f"A limit here has {DIGITS_MAX} digits at most")
    return {name.replace("-", "_"): int(count) for name, count in pairs}


def add_step(world: World, step: Step) -> None:
    """Give a client one more step; raise ValueError if none can have it."""
    if step.verb == "wait":
        raise ValueError("here time passes when nobody can go on")
    if step.verb == "fill":
        raise ValueError("here a buffer has a size: write room 0")

    name = step.client
    if name not in world.clients:
        fields = {"gid": 100, "uid": OWNER, "pid": PIDS + world.bus.count}
        if step.verb == "process":
            pairs = NUMBER.findall(step.argument)
            fields.update((key, int(number)) for key, number in pairs)
        world.clients[name] = world.bus.connect(**fields)
        world.programs[name], world.gets[name] = [], []
    if step.argument in EXPECTATIONS:
        return  # it takes nothing
    verbs = {act.verb for act in world.programs[name]}
    is_gone = bool(world.clients[name].end) and step.verb != "<"
    if "close" in verbs or is_gone:
        raise ValueError(
            f"{name} has left: a client that comes has a new name"
        )
    if "shut" in verbs and step.verb[0] == ">":
        raise ValueError(f"{name} sends nothing more after shut")
    if step.verb == ">>":
        step = step._replace(verb=">")  # the server is never busy

    packet = b"".join(
        part.text * part.times
        if not part.variable or step.verb == "<"
        else value_of(world, part.variable)
        for part in step.text
    )
    if step.verb == "room":
        packet = step.argument.encode()
    world.programs[name].append(Act(step.verb, packet, str(step)))


def value_of(world: World, variable: str) -> bytes:
    """Return what stands for a number of a client, such as B.pid."""
    name, _, field_name = variable.partition(".")
    if name not in world.clients:
        raise ValueError(f"no client {name} has come before")
    return b"%d" % getattr(world.clients[name].credentials, field_name)


def prepared(world: World) -> Iterator[str]:
    """Have all clients do all that they have to do; yield that as lines.

    Raises: ValueError if one of them cannot go on
    """
    for name, acts in world.programs.items():
        while acts:
            if not world.may_act(name):
                raise ValueError("before the line --- nobody waits")
            yield world.take("act", name)
    if world.unclear:
        raise ValueError(f"the specification leaves open {world.unclear}")


def check_bounds(world: World) -> None:
    """Raise ValueError if there are too many clients, steps or bytes."""
    if len(pickle.dumps(world)) > WORLD_BYTES_MAX:
        raise ValueError("A search handles only few and short messages")
    if len(world.clients) > CLIENTS_MAX:
        raise ValueError(
            f"A search handles at most {CLIENTS_MAX} clients; this has"
            f" {len(world.clients)}"
        )
    for name, acts in world.programs.items():
        if len(acts) > STEPS_MAX:
            raise ValueError(
                f"A search handles at most {STEPS_MAX} steps of a client;"
                f" {name} has {len(acts)}: put a line --- after the steps"
                " whose order is fixed"
            )


def try_orders(text: str) -> Iterator[Report]:
    """Yield reports of a search now and then; the last one is of all.

    Raises: ValueError at what is no step, or is beyond a bound
    """
    world, before = make_world(text)
    search = Search(world, STATES_MAX, BYTES_MAX)
    ends: dict[tuple[str, ...], End] = {}
    for count, world in enumerate(search.worlds(), 1):
        if not any(world.steps()):
            facts = tuple(world.facts())
            if facts not in ends:
                way = search.way()
                if world.unclear:
                    world = world_before(text, way)
                lines = [*before, *way, *world.last_lines()]
                ends[facts] = End(facts, 0, 0, lines)
            end = ends[facts]
            orders = end.orders + search.orders[search.state]
            ends[facts] = end._replace(orders=orders, states=end.states + 1)
        if count % STATES_REPORTED == 0:
            yield report_of(len(search.orders), ends)
    if search.bytes > BYTES_MAX:
        raise ValueError(
            "The states of these need more memory than the search may have:"
            " send fewer or shorter messages, or leave out some steps"
        )
    if not search.is_complete:
        raise ValueError(
            f"These have more than {STATES_MAX:,} states, which is as many as"
            " the search tries: leave out a client, or some steps"
        )
    yield report_of(len(search.orders), ends)


def world_before(text: str, way: list[str]) -> World:
    """Return the world before its last step, of which the end is open."""
    world, _ = make_world(text)
    for line in way[:-1]:
        name = line.partition(" ")[0]
        world.take(*(("wait", "") if name == "wait" else ("act", name)))
    return world


def report_of(states: int, ends: dict[tuple[str, ...], End]) -> Report:
    """Return a report, with what all ends have in common said once."""
    always = [
        fact
        for fact in next(iter(ends), ())
        if all(fact in facts for facts in ends)
    ]
    differing = [
        end._replace(facts=tuple(f for f in end.facts if f not in always))
        for end in ends.values()
    ]
    return Report(
        states,
        sum(end.orders for end in ends.values()),
        sum(end.states for end in ends.values()),
        tuple(always),
        sorted(differing, key=lambda end: -end.orders),
    )
