"""Traces and captures on paper: of any size, and with no bus."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sbus

Event = dict[str, Any]


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write events as a trace, numbered anew."""
    with path.open("w") as file:
        for number, event in enumerate(events, 1):
            file.write(json.dumps({**event, "n": number}) + "\n")


class PaperBus:
    """Writes the trace of a server whose clients act at random."""

    def __init__(self, keys: int, patterns: int, clients: int) -> None:
        self.chosen = random.Random(1)
        side = round((keys / 20) ** 0.5)
        self.keys = [
            f"k{a}/{b}/{c}"
            for a in range(20)
            for b in range(side)
            for c in range(side)
        ]
        self.patterns = [self.pattern(n) for n in range(patterns)]
        self.selected = {
            text: [
                key
                for key in self.keys
                if sbus.pattern_matches(text.encode(), key.encode())
            ]
            for text in self.patterns
        }
        self.holders = {key: Counter[int]() for key in self.keys}
        self.held: dict[int, list[str]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.lines: list[str] = []
        self.n = self.c = self.m = 0
        self.write("start", ABOUT)
        for _ in range(clients):
            self.open()

    def pattern(self, n: int) -> str:
        """Return a pattern that selects 1, some, or many keys."""
        key = self.chosen.choice(self.keys)
        a, b, c = key.split("/")
        kinds = (key, key, f"{a}/*/{c}", f"{a}/{b}/", f"{a}/{b}/")
        return self.chosen.choice(kinds) if n % 20 else f"{a}/"

    def write(self, ev: str, fields: str) -> None:
        self.n += 1
        t = START + self.n * 1_000
        self.lines.append(f'{{"n":{self.n},"t":{t},"ev":"{ev}"{fields}}}\n')

    def open(self) -> None:
        """Let in a client, which asks for something and subscribes."""
        self.c += 1
        c = self.c
        self.write("open", f',"c":{c},"gid":100,"uid":1000,"pid":{c}')
        if kind_of(c):
            self.write("ctl", f',"c":{c},"key":"{kind_of(c)}"')
        self.held[c], self.waiting[c] = [], []
        for _ in range(5):
            self.subscribe(c)
        if c % 10 == 5:  # with a secret
            self.write("sub", f',"c":{c},"pattern":"!/cred////x"')
            self.keys.append(secret_of(c))
            self.holders[secret_of(c)] = Counter({c: 1})

    def subscribe(self, c: int) -> None:
        pattern = self.chosen.choice(self.patterns)
        self.write("sub", f',"c":{c},"pattern":"{pattern}"')
        self.held[c].append(pattern)
        for key in self.selected[pattern]:
            self.holders[key][c] += 1

    def unsubscribe(self, c: int) -> None:
        pattern = self.held[c][0]
        self.write("unsub", f',"c":{c},"pattern":"{pattern}"')
        self.forget(c)

    def forget(self, c: int) -> None:
        for key in self.selected[self.held[c].pop(0)]:
            self.holders[key][c] -= 1
            self.holders[key] += Counter()  # only what is above 0 stays

    def close(self, c: int) -> None:
        for m in self.waiting[c]:
            self.write("drop", f',"m":{m},"c":{c},"reason":"deaf"')
        self.write("close", f',"c":{c},"reason":"end of input"')
        while self.held[c]:
            self.forget(c)
        del self.held[c], self.waiting[c]
        if c % 10 == 5:
            self.keys.remove(secret_of(c))

    def turn(self) -> None:
        """Handle packets of one client, then send to its receivers."""
        publisher = self.chosen.choice(list(self.held))
        is_silent = kind_of(publisher) == "echo/off"
        touched: dict[int, None] = {}
        for key in self.chosen.choices(self.keys, k=16):
            self.m += 1
            fields = f',"c":{publisher},"m":{self.m},"key":"{key}"'
            self.write("msg", f'{fields},"size":{self.m % 99}')
            for c in self.holders[key]:
                if c != publisher or not is_silent:
                    self.waiting[c].append(self.m)
                    touched[c] = None
        for c in touched:
            self.flush(c, is_stalled=self.n % 50 == 0)

    def flush(self, c: int, is_stalled: bool) -> None:
        """Send, or drop, what waits for a client; or let it wait."""
        waiting, ev, reason = self.waiting[c], "send", ""
        if is_stalled:
            if kind_of(c) != "blocking/soft/discard":
                return
            ev, reason = "drop", ',"reason":"soft/discard"'
        if kind_of(c) == "order/stack":
            waiting.reverse()
        for m in waiting:
            self.write(ev, f',"m":{m},"c":{c}{reason}')
        waiting.clear()

    def run(self, events: int) -> Iterator[str]:
        """Yield the lines of a trace of about so many events."""
        turns = 0
        while self.n < events:
            turns += 1
            self.turn()
            if turns % 20 == 0:
                c = self.chosen.choice(list(self.held))
                self.unsubscribe(c)
                self.subscribe(c)
            if turns % 1_000 == 0:
                self.close(self.chosen.choice(list(self.held)))
                self.open()
            yield from self.lines
            self.lines.clear()
        for c in list(self.held):
            self.close(c)
        self.write("stop", ABOUT)
        yield from self.lines


ABOUT = ',"version":"1","address":"","host":"h","cred_prefix":""'
START = 1_763_717_053_000_000_000
KINDS = {7: "echo/off", 8: "order/stack", 9: "blocking/soft/discard"}


def kind_of(c: int) -> str:
    """Return what a client on paper asks for."""
    return KINDS.get(c % 10, "")


def secret_of(c: int) -> str:
    """Return the secret key of a client on paper."""
    return f"!/cred/100//{c}/x"


def find(events: Sequence[Event], **fields: Any) -> list[int]:
    """Return where the events with such fields are."""
    return [
        index
        for index, event in enumerate(events)
        if fields.items() <= event.items()
    ]


def capture_line(n: int, /, **fields: Any) -> str:
    """Return a line of a capture."""
    payload = b"x" * (n % 50)
    line = {
        "rec": "R",
        "n": n,
        "t": 1_763_717_053_000_000_000 + n * 1_000_000,
        "host": "h",
        "key": f"k/{n % 7}",
        "size": len(payload),
        "data": base64.b64encode(payload).decode(),
    }
    return json.dumps({**line, **fields}) + "\n"


def write_segments(directory: Path, count: int, lines: int = 100) -> None:
    """Write the segments of a capture."""
    directory.mkdir(exist_ok=True)
    for segment in range(1, count + 1):
        first = (segment - 1) * lines + 1
        text = map(capture_line, range(first, first + lines))
        (directory / f"R-{segment:06}.jsonl").write_text("".join(text))
