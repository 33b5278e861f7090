"""A bus of the model, and programs that take turns in using it.

The server finishes what a step leads to before the next step comes, and the
next packet of a paused client waits in its call until the server reads that
client again, for here the kernel keeps none.  A step that receives takes
whatever packet is next, and waits for one.  When nobody can go on and a
publisher is paused, time passes: the block time [BLOCK-16].

Or the steps of the server come apart: it handles a packet, or the kernel takes
one of a backlog, and between two of these anybody may go on.  Then the kernel
keeps a packet of each client, a client with a bounded buffer reads whenever it
is not in a call that sends, and no time passes.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import model
from conformance.examples import escape

STEP_SECONDS = 0.001  # so short that no step decides about the block time
LOSS = re.compile(r"client (\d+) loses (\d+) \[((?:BLOCK|LIMIT)-\d+)\]")


class Act(NamedTuple):
    """A step of a client, ready to be taken."""

    verb: str
    packet: bytes
    line: str


@dataclass
class World:
    """A bus, and the programs of its clients."""

    bus: model.Bus
    is_apart: bool = False  # the steps of the server come apart
    programs: dict[str, list[Act]] = field(default_factory=dict)  # to be done
    clients: dict[str, model.Client] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)  # until they read all
    blocked: set[str] = field(default_factory=set)  # in a call that sends
    gets: dict[str, list[bytes]] = field(default_factory=dict)  # in order
    unread: dict[str, list[bytes]] = field(default_factory=dict)  # if deaf
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)  # for each other, in words
    unclear: str = ""  # what the specification leaves open

    def snapshot(self) -> object:
        """Return what decides the future, or is said of the past."""
        state: list[object] = [
            self.bus.snapshot(),
            [len(acts) for acts in self.programs.values()],
            sorted(self.full),
            sorted(self.blocked),
            self.unclear,
        ]
        if not self.is_apart:
            holders = [c for c in self.clients.values() if c.holds]
            holders.sort(key=lambda client: client.since)
            state += [
                [client.number for client in holders],  # who is due first
                round(self.bus.now, 3),
                [client.end for client in self.clients.values()],
                self.gets,
                sorted(self.losses.items()),
                self.waits,
            ]
        return hashlib.blake2b(repr(state).encode(), digest_size=16).digest()

    def copy(self) -> World:
        """Return a world that can go another way."""
        twin: World = pickle.loads(pickle.dumps(self))
        return twin

    # ---- What can happen

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield the steps that may come next: an action and a client."""
        if self.unclear:
            return
        acting = [name for name in self.programs if self.may_act(name)]
        for name in acting:
            yield "act", name
        if self.is_apart:
            yield from self.steps_apart()
        elif not acting and self.is_held():
            yield "wait", ""

    def steps_apart(self) -> Iterator[tuple[str, str]]:
        """Yield the steps of the server and the kernel, and what is read."""
        ready = self.bus.ready()
        for name, client in self.clients.items():
            if client.number in ready:
                yield "handle", name
            if client.backlog and client.has_room:
                yield "drain", name
            is_free = name not in self.blocked and not client.end
            if client.received and client.room is not None and is_free:
                yield "read", name

    def may_act(self, name: str) -> bool:
        """Return whether a program can do its next step."""
        acts, client = self.programs[name], self.clients[name]
        if not acts:
            return False
        if acts[0].verb == "<":
            return bool(client.received or self.is_kept_full(name))
        if client.end:
            return False
        if acts[0].verb == ">" and not self.is_apart:
            return not self.bus.paused_by(client)
        return not (name in self.blocked and client.sent)

    def is_kept_full(self, name: str) -> bool:
        """Return whether a packet comes once a client has read all."""
        return name in self.full and bool(self.clients[name].backlog)

    def is_held(self) -> bool:
        """Return whether a publisher is paused."""
        return any(client.holds for client in self.clients.values())

    def is_deadlock(self) -> bool:
        """Return whether programs wait for each other, and nobody goes on."""
        blocked = [name for name in self.blocked if not self.clients[name].end]
        return bool(blocked) and not any(self.steps())

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line of a conversation."""
        try:
            line = str(getattr(self, action)(name))
        except model.Unclear as reason:
            self.unclear = str(reason)
            line = f"# The specification leaves open {reason}"

        names = {str(c.number): name for name, c in self.clients.items()}
        log = "\n".join(self.bus.log)
        for number, count, rule in LOSS.findall(log):
            self.losses[names[number], rule] += int(count)
        self.bus.log.clear()
        return line

    # ---- Each step, which returns a line

    def act(self, name: str) -> str:
        """Have a program do its next step."""
        client, act = self.clients[name], self.programs[name][0]
        if act.verb == ">" and client.sent:
            self.blocked.add(name)
            return f"# {name} waits in its call for {self.shown(act.packet)}"
        self.blocked.discard(name)
        del self.programs[name][0]

        if not self.is_apart:
            self.bus.now += STEP_SECONDS
        if act.verb == "<":
            return self.read(name)
        self.change(name, client, act)
        if self.is_apart:
            return act.line.replace(" > ", " >> ")
        self.bus.run()
        return act.line

    def change(self, name: str, client: model.Client, act: Act) -> None:
        """Do what a step does to a client, before the server sees it."""
        if act.verb == ">":
            client.sent.append(act.packet)
        elif act.verb == "room":
            self.full.discard(name)
            client.room = int(act.packet)
        elif act.verb == "fill":
            self.full.add(name)
            client.room = 0
        if act.verb in ("close", "shut"):
            client.has_ended = True
        if act.verb == "deaf":  # the kernel keeps what came before
            self.unread[name] = [*client.received]
        if act.verb in ("close", "deaf"):
            model.deafen(self.bus, client)

    def read(self, name: str) -> str:
        """Have a client read a packet."""
        client = self.clients[name]
        if self.is_apart:
            return f"{name} < {self.shown(client.received.pop(0))}"
        if not client.received:
            self.empty(name)
        packet = self.bus.read(client)
        self.gets[name].append(packet)
        return f"{name} < {self.shown(packet)}"

    def empty(self, name: str) -> None:
        """Have a client read what has filled its buffer, if that is so."""
        if name in self.full:
            self.full.discard(name)
            self.clients[name].room = None
            self.clients[name].since = self.bus.now
            self.bus.run()

    def handle(self, name: str) -> str:
        """Have the server handle a packet of a client, or its end."""
        model.handle(self.bus, self.clients[name])
        names = {str(c.number): name for name, c in self.clients.items()}
        text = re.sub(
            r"(client|by) (\d+)",
            lambda match: f"{match[1]} {names[match[2]]}",
            "; ".join(self.bus.log),
        )
        return f"# the server handles {name}: {text}"

    def drain(self, name: str) -> str:
        """Have the kernel take a packet of a backlog."""
        model.drain(self.bus, self.clients[name])
        return f"# the kernel takes a packet for {name}"

    def wait(self, _: str) -> str:
        """Let the block time pass."""
        self.bus.now += STEP_SECONDS
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
            with suppress(model.Unclear):  # what follows may be open as well
                self.empty(name)
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
