"""Finds out all that sbus.py does in a flood, for the first page.

There are one publisher, one reader and tiny limits, so the states are few
enough for the page to have all of them. They come from the server itself, on
the fake kernel of the tests. The page only walks from state to state.
"""

from __future__ import annotations

import json
from collections import deque
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import sbus
from fake_kernel import FakeKernel
from packets import publish

PACKET = publish(b"k", b"m")
BACKLOG_MAX = 8  # packets
READER_ROOM = 4
WAITING_MAX = 3  # packets of the publisher that the server has not read
STEPS = ("publish", "read", "second")
SOFT = ("queue", "block", "discard", "error")
HARD = ("block", "discard", "error")
USERS = {"own": 1000, "other": 1001}  # the publisher's; the reader is 1000


class State(NamedTuple):
    """What decides about all that follows; a page sees the first four."""

    taken: int = 0  # packets that the kernel keeps for the reader
    backlog: int = 0
    waiting: int = 0
    is_paused: bool = False
    held_seconds: int = 0  # since the reader took a packet
    freed_at_bytes: int = -1
    short_turns: int = 0
    is_gone: bool = False  # the reader was disconnected


class Led(NamedTuple):
    """Where a step leads, and what the server told its journal then."""

    state: State
    told: str


# By state and step; None if the step has not been tried
Walked = dict[State, dict[str, Any]]


class Flood:
    """A bus with a slow reader, which notes what its server tells."""

    def __init__(self, soft: str, hard: str, uid: int) -> None:
        self.told: list[str] = []
        limit = BACKLOG_MAX * sbus.cost(PACKET)
        self.kernel = FakeKernel(max_backlog=limit, block_timeout=5)
        vars(self.kernel.bus)["journal"] = self
        self.reader = self.kernel.connect()
        self.publisher = self.kernel.connect(uid)
        modes = f"blocking/soft/{soft}", f"blocking/hard/{hard}"
        self.reader.send(b"SUB k", *(b"CMSG " + m.encode() for m in modes))
        self.reader.wire.room = READER_ROOM

    def note(self, event: str, rule: str, _: Any, **facts: Any) -> None:
        """Be the journal of the server."""
        self.told.append(f"{event} {rule} {facts.get('reason', '')}".strip())

    def flush(self) -> None:
        pass

    def state(self) -> State:
        """Return the state of the bus."""
        if self.reader.wire.closed:
            return State(is_gone=True)
        reader, publisher = self.reader.client, self.publisher.client
        hold = reader.holds.get(publisher)
        timeout = self.kernel.bus.options.block_timeout
        age = self.kernel.now + timeout - reader.progress.due
        return State(
            len(self.reader.wire.taken),
            len(reader.backlog.packets),
            len(self.publisher.wire.incoming),
            bool(publisher.held_by),
            int(age) if hold else 0,
            hold.end_bytes if hold else -1,
            publisher.short_turns,
        )

    def can(self, step: str) -> bool:
        """Return whether a step is possible."""
        state = self.state()
        if step == "publish":
            return not state.is_gone and state.waiting < WAITING_MAX
        return not state.is_gone and (step == "second" or state.taken > 0)

    def do(self, step: str) -> Led:
        """Do a step; return where it leads."""
        self.told.clear()
        if step == "publish":
            self.publisher.send(PACKET)
        elif step == "read":
            self.reader.read(1)
        else:
            self.kernel.wait(1)
        return Led(self.state(), "; ".join(sorted({*self.told})))


def explore(soft: str, hard: str, uid: int) -> Walked:
    """Return where each step leads from each state.

    A walk goes on to the nearest step that has not been tried, until all
    have been. A step that is walked again must lead to the same state.
    """
    walked: Walked = {}
    is_done = False
    while not is_done:
        is_done = True
        flood = Flood(soft, hard, uid)
        path = [""]
        while path:
            state = flood.state()
            if state not in walked:
                walked[state] = dict.fromkeys(filter(flood.can, STEPS))
            path = nearest(walked, state)
            for step in path:
                is_done = False
                state = flood.state()
                led = flood.do(step)
                known = walked[state][step]
                assert known in (None, led), (state, step, known, led)
                walked[state][step] = led
    return walked


def nearest(walked: Walked, start: State) -> list[str]:
    """Return the shortest way to a step that has not been tried, or none."""
    ways: deque[tuple[State, list[str]]] = deque([(start, [])])
    seen = {start}
    while ways:
        state, path = ways.popleft()
        for step, led in walked.get(state, {}).items():
            if not led:
                return [*path, step]
            if led.state not in seen:
                seen.add(led.state)
                ways.append((led.state, [*path, step]))
    return []


def merged(walked: Walked) -> list[list[Any]]:
    """Return the states as rows, those that nobody can tell apart as one.

    A row is what a page sees of the state, and of each step the row to which
    it leads and what is told.
    """
    kinds: dict[State, Any] = {s: (s[:5], s.is_gone) for s in walked}
    count = 0
    while count < len({*kinds.values()}):  # split kinds that lead elsewhere
        count = len({*kinds.values()})
        looks = {
            state: (kinds[state], *((kinds[s], told) for s, told in leads))
            for state, steps in walked.items()
            for leads in [steps.values()]
        }
        order = dict.fromkeys(looks.values())
        numbers = {look: number for number, look in enumerate(order)}
        kinds = {state: numbers[look] for state, look in looks.items()}

    rows: dict[int, list[Any]] = {}
    for state, steps in walked.items():
        leads = [steps.get(step) for step in STEPS]
        row = [(kinds[led[0]], led[1]) if led else None for led in leads]
        seen = [int(value) for value in state[:4]]
        rows[kinds[state]] = [] if state.is_gone else [*seen, *row]
    return [rows[number] for number in sorted(rows)]


def table() -> dict[str, Any]:
    """Return the rows of all modes; what is told stands in them by number."""
    texts = {"": 0}
    modes: dict[str, Any] = {}  # its rows, or the name of modes with the same
    for soft, hard, whose in product(SOFT, HARD, USERS):
        if soft in ("discard", "error") and hard != "block":
            continue  # the hard mode does not matter
        rows = merged(explore(soft, hard, USERS[whose]))
        for row in rows:
            for n, led in enumerate(row[4:], 4):
                number = texts.setdefault(led[1], len(texts)) if led else 0
                row[n] = [led[0], number] if led else None
        same = [name for name in modes if modes[name] == rows]
        modes[f"{soft} {hard} {whose}"] = same[0] if same else rows
    return {"told": [*texts], "modes": modes}


def script() -> str:
    """Return the table as a script, for a page that may be a file."""
    with mock.patch.object(sbus, "log"):
        return f"const FLOOD = {json.dumps(table(), separators=(',', ':'))};"
