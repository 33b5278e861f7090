#!/usr/bin/env python3
"""Hold the real server to the model, in every order of events.

    export PYTHONPATH=.:spec:simulated:tests/bed:tests/refine
    python3 tests/refine/refine.py SEED    random worlds
    python3 tests/refine/refine.py WORLD   all states of a small world

The server of sbus.py runs on a kernel that writes down each call.  After each
round the model goes the same way, call by call.  Then the facts of facts.py
must be alike.  In the end all is read, and then nobody waits; or the server
stops, and then nobody is left.  worlds.md has the worlds.  A difference is
printed as a short conversation, and the exit status is 1.
"""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional
from unittest.mock import patch

import model
import sbus
from conformance.examples import escape, parse_step
from facts import alarms_of, facts_of
from follower import Differs, Follower, require, require_equal
from model_bus import model_options
from recorder import Ledger, RecordingKernel
from search import Search
from worlds import expand, random_world, small_worlds

ROUNDS_MAX = 200  # after which all that can be read is read
SLOW_SECONDS = 0.0011  # of a call: more than a turn
REST_SECONDS = 0.06  # more than a client rests
END_CHANCE = 0.02  # that a way ends before all is done
WORLDS = 400  # of a seed, which take some 12 s of the processor
WAYS = 6  # through a random world
# A line of a world, and its actor: a client, the kernel, or the clock
NAME = re.compile(r"^(?=([A-Z](?= )|# fail|wait))(.*)", re.M)
LOG: list[str] = []  # of the server
Action = tuple[str, str]  # a step of a way, and whose it is


@contextmanager
def prepared(text: str) -> Iterator[None]:
    """Have the server and the model work as a world needs it."""
    constants = re.findall(r"^# set (\w+) (\d+)", text, re.M)
    server: dict[str, Any] = {name: int(number) for name, number in constants}
    server["log"] = LOG.append
    follower: dict[str, Any] = {"offer": Follower.put_off}
    follower["disconnect"] = Follower.note_mistake
    with patch.multiple(sbus, **server), patch.multiple(model, **follower):
        yield


class World(RecordingKernel):
    """A server, the model that follows it, and programs."""

    def __init__(self, text: str) -> None:
        before, _, after = text.partition("---\n")
        words = " ".join(re.findall(r"^server (.*)", before, re.M)).split()
        super().__init__(*words)
        self.follower = Follower(**model_options(words))
        if "# journal" in before:
            vars(self.bus)["journal"] = Ledger()
        self.wires: dict[str, Any] = {}
        self.programs: dict[str, list[str]] = {}  # lines, by the actor

        for _, line in NAME.findall(before):
            self.act(line)
        self.settle()
        for name, line in NAME.findall(after):
            self.programs.setdefault(name, []).append(line)

    # ---- What can happen

    def steps(self) -> Iterator[Action]:
        """Yield what may come next."""
        for name, program in self.programs.items():
            has_left = name in self.wires and self.wires[name].ended
            if program and not has_left:
                yield "act", name
        for name, wire in self.wires.items():
            if wire.taken and wire.room is not None and not wire.deaf:
                yield "read", name

        served = [key.data for key, _ in self.selector.ready()]
        alarms = alarms_of(self.server).values()
        if served or min(alarms, default=sbus.NEVER) <= self.now:
            yield "round", "in no time"
        if any(isinstance(client, sbus.Client) for client in served):
            yield "round", "slowly"

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line; raise Differs."""
        if action == "act":
            return self.act(self.programs[name].pop(0))
        if action == "read":
            return self.read(name)
        return self.round(SLOW_SECONDS if name == "slowly" else 0.0)

    def act(self, line: str) -> str:
        """Have a client, the kernel or the clock do a step."""
        if line.startswith("# fail"):
            call, count, error, times = line.split()[2:]
            plan = [""] * int(count) + [error] * int(times)
            self.errors[call].extend(plan)
            return line
        name, verb, argument, text = parse_step(line)
        if verb == "wait":
            self.now += float(argument)
            return line

        if name not in self.wires:
            pairs = re.findall(r"([gup]id)=(\d+)", line)  # of a process
            ids = {key: int(number) for key, number in pairs}
            self.wires[name] = self.knock(**ids).wire
            vars(self.wires[name]).update(name=name, sent=[])
        wire = self.wires[name]
        if verb == ">":
            packet = b"".join(part.text * part.times for part in text)
            wire.incoming.append(packet)
            wire.sent.append(packet)
        elif verb == "room":
            wire.room = int(argument)
        wire.ended |= verb in ("close", "shut")
        wire.deaf |= verb in ("close", "deaf")
        wire.reset |= verb == "close" and bool(wire.taken)
        return line.replace(" > ", " >> ")

    def read(self, name: str) -> str:
        """Have a client read a packet."""
        wire = self.wires[name]
        packet = wire.taken.popleft()
        if client := self.follower.of_wire.get(wire):
            client.since = self.now
            client.is_given_time = False
            del client.received[:1]  # of one that is expelled none are left
        return f"{name} < {escape(packet)}"

    def round(self, seconds: float = 0.0) -> str:
        """Have the server work for a round, and the model follow it.

        Each call takes so many seconds.
        """
        LOG.clear()
        self.selector.timeouts.clear()
        self.seconds = seconds
        self.server.round(0)
        self.follower.follow(self.calls)
        for fact in facts_of(self, self.follower, "\n".join(LOG)):
            require_equal(*fact)
        self.round_time = self.now

        text = "; ".join(map(str, self.calls))
        self.calls.clear()
        return f"# a round: {text}"

    def settle(self) -> None:
        """Have the server do all that it can."""
        for _ in range(ROUNDS_MAX):
            self.round()
            if not self.selector.ready():
                return
        raise Differs("CONN-21: the server spins")

    # ---- How it ends

    def finish(self) -> None:
        """Have all read; raise Differs if somebody waits all the same."""
        for wire in self.wires.values():
            wire.room = wire.room or None
        for _ in range(ROUNDS_MAX):
            for name, wire in self.wires.items():
                while wire.taken and not wire.deaf:
                    self.read(name)
            self.settle()
            self.now += REST_SECONDS
            is_calm = not any(map(waits, self.bus.clients))
            if is_calm and not self.listener.waiting:
                return
        raise Differs("BLOCK-12: not all go on, though all read")

    def stop(self) -> None:
        """Have the server stop; raise Differs if it does so wrongly."""
        self.errors.clear()
        owed = {
            client.wire: len(client.wire.taken) + len(client.backlog)
            for client in self.bus.clients
            if not client.wire.deaf and client.wire.room is None
        }
        self.server.stopping = True
        self.server.run()

        taken = {wire: len(wire.taken) for wire in owed}
        require_equal("RUN-12: taken", taken, owed)
        is_left = self.bus.clients or self.bus.users or self.selector.keys
        require(not is_left, "RUN-12: a client or a socket is left")
        uses = [self.bus.counts[use] for use in sbus.USES]
        require_equal("RUN-12: uses", uses, [0] * len(uses))
        wires = [wire for wire in self.wires.values() if not wire.closed]
        require_equal("RUN-12: open", wires, [*self.listener.waiting])

    def snapshot(self) -> object:
        """Return what decides the future, with times in halves of a limit."""
        half = self.follower.options.block_timeout / 2
        state: list[Any] = [self.follower.snapshot(), self.programs]
        state.append(self.errors)
        for wire in self.wires.values():
            ends = wire.ended, wire.deaf, wire.reset
            state.append((wire.incoming, wire.taken, wire.room, ends))
        for due in alarms_of(self.server).values():
            state.append((self.now - due) // half)
        return hash(repr(state))


def waits(client: sbus.Client) -> bool:
    """Return whether something is still to come of or for a client."""
    is_owed = client.is_stalled and not client.wire.deaf
    is_unread = bool(client.wire.incoming or client.wire.ended)
    return is_owed or bool(client.held_by) or is_unread


# ---- Ways through a world


class Way(NamedTuple):
    """A way through a world, and what differs at its end."""

    world: str
    end: str  # "finish" or "stop"
    steps: list[Action]
    lines: list[str]  # the same, to be read
    wrong: str = ""
    size: int = 0  # how many calls could fail

    def block(self, name: str) -> str:
        """Return it as an example of the specification."""
        rule = re.match(r"[A-Z]+-\d+", self.wrong)
        head = f"```conversation {name} [{rule[0] if rule else 'CONN-12'}]\n"
        lines = "\n".join([*self.lines, f"# {self.wrong}", "```"])
        return head + self.world.partition("---\n")[0] + lines


Choose = Callable[[list[Action]], Optional[Action]]


def go(text: str, end: str, choose: Choose) -> Way:
    """Go one way through a world, and return it."""
    way = Way(text, end, [], [])
    with prepared(text):
        try:
            world = World(text)
            while step := choose([*world.steps()]):
                way.steps.append(step)
                way.lines.append(f"# {' '.join(step)}")  # if it raises
                way.lines[-1] = world.take(*step)
            way.lines.append(f"# {end}")
            getattr(world, end)()
        except Exception as error:
            return way._replace(wrong=difference(error))
    return way._replace(size=world.count)


def difference(error: Exception) -> str:
    """Return what differs: a server that crashes does as well."""
    is_crash = not isinstance(error, Differs)
    return f"CONN-12: it crashes: {error!r}" if is_crash else str(error)


def go_at_random(text: str, seed: str) -> Way:
    """Go a way at random."""
    draw = random.Random(seed)
    end = draw.choice(["finish", "stop"])

    def choose(ready: list[Action]) -> Action | None:
        is_over = not ready or draw.random() < END_CHANCE
        return None if is_over else draw.choice(ready)

    return go(text, end, choose)


def go_again(text: str, end: str, steps: list[Action]) -> Way:
    """Go the same steps, as far as they can come."""
    left = iter(steps)

    def choose(ready: list[Action]) -> Action | None:
        return next((step for step in left if step in ready), None)

    return go(text, end, choose)


def random_ways(seed: str, count: int) -> Iterator[Way]:
    """Yield some ways through each of so many random worlds."""
    for number in range(count):
        text = random_world(random.Random(f"{seed}/{number}"))
        for way in range(WAYS):
            yield go_at_random(text, f"{seed}/{number}/{way}")


def failing_ways(text: str, seed: str) -> Iterator[Way]:
    """Yield a way, and the same while each call of the kernel fails."""
    draw = random.Random(seed)
    whole = go_at_random(text, seed)
    yield whole
    for place in range(whole.size):
        fault = f"# fail any {place} {expand(draw, 'error')} 1\n"
        yield go_again(fault + text, whole.end, whole.steps)


def explore(text: str) -> Way:
    """Search all states of a world; return a way to what differs."""
    with prepared(text):
        search: Search[World] = Search(World(text), sys.maxsize)
        try:
            for world in search.worlds():
                twin: World = pickle.loads(pickle.dumps(world))
                end = twin.stop if any(twin.steps()) else twin.finish
                end()
        except Exception as error:
            lines = [*search.way(), f"# {' '.join(search.step)}"]
            return Way(text, "settle", [], lines, difference(error))
    return Way(text, "settle", [], [])


def shrink(way: Way) -> Way:
    """Return a short way through a small world on which something differs."""
    for index in reversed(range(way.world.count("\n"))):
        lines = way.world.splitlines(keepends=True)
        del lines[index]
        shorter = go_again("".join(lines), way.end, way.steps)
        way = shorter if shorter.wrong else way
    for index in reversed(range(len(way.steps))):
        steps = way.steps[:index] + way.steps[index + 1 :]
        shorter = go_again(way.world, way.end, steps)
        way = shorter if shorter.wrong else way
    return way


def main() -> int:
    """Go the ways that are asked for; return 1 if something differs, or 0."""
    name = sys.argv[1]
    world = small_worlds().get(name)
    ways = iter([explore(world)]) if world else random_ways(name, WORLDS)
    for way in ways:
        if way.wrong:
            print(shrink(way).block(f"refine-{name}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
