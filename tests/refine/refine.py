#!/usr/bin/env python3
"""Hold the real server to the model, in every order of events.

    export PYTHONPATH=.:spec:dev:tests/bed:tests/refine
    python3 tests/refine/refine.py SEED COUNT   so many random worlds
    python3 tests/refine/refine.py WORLD        all states of a small world

The server of sbus.py runs on a kernel that writes down each call.  After each
round the model goes the same way, call by call.  Then both must be in one
state, and the server's own books must be right.  In the end all is read, and
then nobody waits; or the server stops, and then nobody is left.  worlds.md
has the worlds.  What differs is printed as a short conversation, and the exit
status is 1.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional, cast
from unittest.mock import patch

import model
import sbus
from books import alarms_of, check_books, recent_of
from conformance.examples import escape, parse_step
from fake_kernel import FakePeer
from follower import Follower
from model_bus import model_options
from recorder import Differs, Fault, Ledger, RecordingKernel, require
from search import Search
from worlds import random_world, small_worlds

ROUNDS_MAX = 200  # after which all that can be read is read
SLOW_SECONDS = 0.0011  # of a call: more than a turn
REST_SECONDS = 0.06  # more than a client rests
END_CHANCE = 0.02  # that a way ends before all is done
WAYS = 6  # through a random world
STATES_MAX = 100_000  # of a small world
# So small that small worlds are beyond them
SMALL_TURNS = {"PACKETS_PER_TURN": 2, "SENDS_PER_TURN": 3, "SHORT_TURNS": 1}
SMALL_TURNS |= {"BYTES_PER_TURN": 20, "RECENT_KEYS_MAX": 1}
SMALL_TURNS |= {"RECENT_BYTES_MAX": 10}
ERRORS = ["EAGAIN", "EPIPE", "ECONNRESET", "EMFILE", "ENOBUFS", "ENOMEM"]
ERRORS += ["ENOSPC", "EIO"]
# A line of a world, and who takes it
NAME = re.compile(r"^(?=([A-Z](?= )|# fail|wait))(.*)", re.M)
LOG: list[str] = []  # of the server
Action = tuple[str, str]  # a step of a way, and whose it is


@contextmanager
def prepared(text: str) -> Iterator[None]:
    """Have the server and the model work as a world needs it."""
    ours: dict[str, Any] = {"log": LOG.append}
    ours |= SMALL_TURNS if "# small turns" in text else {}
    theirs: dict[str, Any] = {"offer": Follower.put_off}
    theirs["disconnect"] = Follower.note_mistake
    with patch.multiple(sbus, **ours), patch.multiple(model, **theirs):
        yield


class World:
    """A server, the model that follows it, and programs."""

    def __init__(self, text: str) -> None:
        before, _, after = text.partition("---\n")
        words = " ".join(re.findall(r"^server (.*)", before, re.M)).split()
        self.kernel = RecordingKernel(*words)
        self.follower = Follower(**model_options(words))
        if "# journal" in before:
            self.kernel.bus.journal = cast(sbus.Journal, Ledger())
        self.peers: dict[str, FakePeer] = {}
        self.programs: dict[str, list[str]] = {}  # lines, by who takes them

        last = ""
        for line in filter(NAME.match, before.splitlines()):
            if line[0] != last:  # those of a client come at once
                self.settle()
                last = line[0]
            self.act(line)
        self.settle()
        for name, line in NAME.findall(after):
            self.programs.setdefault(name, []).append(line)

    # ---- What can happen

    def steps(self) -> Iterator[Action]:
        """Yield what may come next."""
        for name, program in self.programs.items():
            has_left = name in self.peers and self.peers[name].wire.ended
            if program and not has_left:
                yield "act", name
        for name, peer in self.peers.items():
            wire = peer.wire
            if wire.taken and wire.room is not None and not wire.deaf:
                yield "read", name

        alarms = alarms_of(self.kernel.server).values()
        served = [key.data for key, _ in self.kernel.selector.ready()]
        if served or min(alarms, default=sbus.NEVER) <= self.kernel.now:
            yield "round", "in no time"
        if any(isinstance(client, sbus.Client) for client in served):
            yield "round", "slowly"
        if len(served) > 1:
            yield "round", "the other way round"

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line; raise Differs."""
        if action == "act":
            return self.act(self.programs[name].pop(0))
        return getattr(self, action)(name)  # type: ignore[no-any-return]

    def act(self, line: str) -> str:
        """Have a client, the kernel or the clock do a step."""
        if line.startswith("# fail"):
            call, count, error, times = line.split()[2:]
            fault = Fault(call, int(count), error, int(times))
            self.kernel.faults.append(fault)
            return line
        name, verb, argument, text = parse_step(line)
        if verb == "wait":
            self.kernel.now += float(argument)
            return line
        if name not in self.peers:
            pairs = re.findall(r"([gup]id)=(\d+)", line)  # of a process
            ids = {key: int(number) for key, number in pairs}
            self.peers[name] = self.kernel.knock(**ids)
        wire = self.peers[name].wire
        if verb in (">", ">>"):
            packet = b"".join(part.text * part.times for part in text)
            wire.incoming.append(packet)
            if client := self.follower.of_wire.get(wire):
                client.sent.append(packet)
        elif verb == "room":
            wire.room = int(argument)
        wire.ended |= verb in ("close", "shut")
        wire.deaf |= verb in ("close", "deaf")
        wire.reset |= verb == "close" and bool(wire.taken)
        return line.replace(" > ", " >> ")

    def read(self, name: str) -> str:
        """Have a client read a packet."""
        wire = self.peers[name].wire
        packet = wire.taken.popleft()
        if client := self.follower.of_wire.get(wire):
            client.since = self.kernel.now
            client.is_given_time = False
            del client.received[:1]  # of one that is expelled none are left
        return f"{name} < {escape(packet)}"

    def round(self, way: str = "in no time") -> str:
        """Have the server work for a round, and the model follow it."""
        kernel = self.kernel
        kernel.calls.clear()
        kernel.selector.timeouts.clear()
        LOG.clear()
        for peer in self.peers.values():
            seconds = SLOW_SECONDS if way == "slowly" else 0.0
            peer.wire.recv_seconds = peer.wire.send_seconds = seconds
        vars(kernel.selector)["is_reversed"] = way == "the other way round"
        is_idle = kernel.selector.ready() and way != "slowly"

        kernel.server.round(0)
        self.follower.follow(kernel.calls)
        self.follower.compare(kernel, LOG)
        check_books(kernel)
        require(kernel.calls or not is_idle, "CONN-21: a round for nothing")
        return f"# a round {way}: {self.shown()}"

    def settle(self) -> None:
        """Have the server do all that it can."""
        for _ in range(ROUNDS_MAX):
            self.round()
            if not self.kernel.selector.ready():
                return
        raise Differs("CONN-21: the server spins")

    def shown(self) -> str:
        """Return the calls of a round, as they stand in a comment."""
        names = {peer.wire: name for name, peer in self.peers.items()}
        calls = []
        for call in self.kernel.calls:
            error = errno.errorcode.get(call.error, "")
            words = [call.name, names.get(call.wire, ""), error]
            words += map(escape, call.packets)
            calls.append(" ".join(filter(None, words)))
        return "; ".join(calls)

    # ---- How it ends

    def finish(self) -> None:
        """Have all read; raise Differs if somebody waits all the same."""
        kernel = self.kernel
        clients = kernel.bus.clients
        for peer in self.peers.values():
            peer.wire.room = peer.wire.room or None
        for _ in range(ROUNDS_MAX):
            for name, peer in self.peers.items():
                while peer.wire.taken and not peer.wire.deaf:
                    self.read(name)
            self.settle()
            kernel.now += REST_SECONDS
            if not any(map(waits, clients)) and not kernel.listener.waiting:
                return
        raise Differs("BLOCK-12: not all go on, though all read")

    def stop(self) -> None:
        """Have the server stop; raise Differs if it does so wrongly."""
        kernel = self.kernel
        bus = kernel.bus
        kernel.faults.clear()
        owed = [
            (client.wire.taken, len(client.wire.taken) + len(client.backlog))
            for client in bus.clients
            if not client.wire.deaf and client.wire.room is None
        ]
        kernel.server.stopping = True
        kernel.server.run()
        is_empty = not (bus.clients or bus.users or kernel.selector.keys)
        require(is_empty, "RUN-12: a client or a socket is left")
        require(not any(bus.counts[use] for use in sbus.USES), "RUN-12: uses")
        left = [peer.wire for peer in self.peers.values()]
        left = [wire for wire in left if not wire.closed]
        require(left == [*kernel.listener.waiting], "RUN-12: not closed")
        is_whole = all(len(taken) == count for taken, count in owed)
        require(is_whole, "RUN-12: packets are lost")

    def snapshot(self) -> object:
        """Return what decides the future, with times in halves of a limit."""
        kernel = self.kernel
        follower = self.follower
        half = follower.options.block_timeout / 2
        now = kernel.now
        clients = sorted(kernel.bus.clients, key=lambda client: client.number)
        turns = sorted({client.last_turn for client in clients})
        state: list[Any] = [follower.snapshot(), self.programs, kernel.faults]
        state.append([wire.number for wire in kernel.listener.waiting])
        for wire in (peer.wire for peer in self.peers.values()):
            ends = wire.ended, wire.deaf, wire.reset
            state.append((wire.incoming, wire.taken, wire.room, ends))
        for client in clients:
            turn = turns.index(client.last_turn)
            is_given = client.progress.is_given
            state.append((turn, client.short_turns, client.lacks, is_given))
            times = [client.progress.due] if client.holds else []
            times += [follower.clients[client.number].since] if times else []
            state.append([(now - time) // half for time in times])
        for item, due in alarms_of(kernel.server).items():
            state.append((getattr(item, "number", item), (now - due) // half))
        recent = recent_of(kernel.bus).items()
        state += sorted((head, len(some)) for head, some in recent)
        return hashlib.sha256(repr(state).encode()).digest()


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
    size: int = 0  # how many calls could fail, or states there are

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
    return way._replace(size=world.kernel.count)


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
        fault = f"# fail any {place} {draw.choice(ERRORS)} 1\n"
        yield go_again(fault + text, whole.end, whole.steps)


def explore(text: str) -> Way:
    """Search all states of a world; return a way to what differs."""
    with prepared(text):
        search: Search[World] = Search(World(text), STATES_MAX)
        try:
            for world in search.worlds():
                twin: World = pickle.loads(pickle.dumps(world))
                end = twin.stop if any(twin.steps()) else twin.finish
                end()
        except Exception as error:
            lines = [*search.way(), f"# {' '.join(search.step)}"]
            return Way(text, "", [], lines, difference(error))
    return Way(text, "", [], [], "", len(search.orders))


def shrink(way: Way) -> Way:
    """Return a short way through a small world on which something differs."""
    for place in reversed(range(way.world.count("\n"))):
        lines = way.world.splitlines(keepends=True)
        del lines[place]
        other = go_again("".join(lines), way.end, way.steps)
        way = other if other.wrong else way
    for place in reversed(range(len(way.steps))):
        steps = way.steps[:place] + way.steps[place + 1 :]
        other = go_again(way.world, way.end, steps)
        way = other if other.wrong else way
    return way


def main() -> int:
    """Go the ways that are asked for; return 1 if something differs, or 0."""
    name, *count = sys.argv[1:]
    ways = random_ways(name, int(count[0])) if count else iter(())
    way = next((shrink(way) for way in ways if way.wrong), None)
    if not count:
        way = explore(small_worlds()[name])
    if way and way.wrong:
        print(way.block(f"refine-{name}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
