"""A second auditor: plain Python, one pass, to be seen to be right.

It keeps what it reads in memory, and shares no code with sbus_spark, and with
sbus.py the form of credentials alone: what a pattern selects it asks the model
of the specification.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow

import sbus
from spec_model import MODES, is_reserved, may_hear, may_use

FIELDS = {  # the numbers of each event, and then its texts
    **dict.fromkeys(["start", "stop"], ("", "")),
    **dict.fromkeys(["sub", "unsub"], ("c", "pattern")),
    **{"open": ("c gid uid pid", ""), "close": ("c", ""), "ctl": ("c", "key")},
    **{"msg": ("c m size", "key"), "send": ("m c", "")},
    **{"drop": ("m c", "reason")},
}
Found = tuple[Any, ...]  # breach, file, n, m, publisher, c, key, messages
Event = dict[str, Any]


def parse(line: bytes) -> Event:
    """Return an event; of what is none, nothing."""
    try:
        event = json.loads(line.decode())
        numbers, texts = FIELDS.get(event.get("ev"), ("none", ""))
    except (ValueError, AttributeError, TypeError):
        return {}
    values = [event.get(name) for name in ("n", "t", *numbers.split())]
    is_event = all(
        type(value) is int and abs(value) < 1 << 63 for value in values
    )
    is_event = is_event and (event["ev"] != "start" or event["n"] == 1)
    is_event &= all(type(event.get(name)) is str for name in texts.split())
    return event if is_event else {}


def to_bytes(text: str) -> bytes | None:
    """Return a key or pattern, None if no client can have sent it."""
    is_one = all(0 < ord(char) < 256 for char in text)
    return text.encode("latin-1") if is_one else None


@functools.lru_cache(100_000)
def hears(
    pattern: str, key: str, holder: sbus.Credentials | None, prefix: bytes
) -> bool:
    """Return whether who holds a pattern is to receive a key.

    Without its open nobody knows a client's secrets.
    """
    one, name = to_bytes(pattern), to_bytes(key)
    if one is None or name is None or is_reserved(name):
        return False
    if holder is None and one.startswith(b"!/cred/"):
        return False
    ids = holder or sbus.Credentials(0, 0, 0)
    # A client that has the upward pattern may have it [CRED-13]
    is_held = may_use(one, ids, prefix, is_privileged=True)
    return is_held and may_hear(one, name, ids, prefix)


class Run:
    """What has happened in a run so far."""

    def __init__(self, prefix: str, opened: set[int]) -> None:
        self.opened = opened  # clients of which the trace has an open
        self.prefix = prefix.encode()
        self.place = 0  # of the event, counted in the run
        self.own: dict[int, sbus.Credentials] = {}
        self.closed: set[int] = set()
        self.times: Counter[tuple[int, str]] = Counter()
        self.holders: dict[str, set[int]] = defaultdict(set)
        self.modes: dict[int, dict[str, str]] = defaultdict(dict)
        self.first: dict[int, int] = {}  # the number of a client's first event
        self.lives: dict[int, str] = {}  # as "oec": open, others, close
        self.published: dict[int, list[Found]] = defaultdict(list)
        self.reached: dict[int, list[Found]] = defaultdict(list)
        self.latest: dict[int, int] = {}  # highest one sent in order/queue
        self.deaf: list[Found] = []
        self.heard: dict[int, int] = {}  # where the last one was sent

    def take(self, event: Event) -> Iterator[Found]:
        """Take an event of a client; yield what is wrong with it already."""
        n, ev, c = event["n"], event["ev"], event["c"]
        self.place += 1
        self.first.setdefault(c, n)
        life = self.lives.get(c, "")
        kind = {"open": "o", "close": "c"}.get(ev, "e")
        if kind != "e" or life[-1:] != "e":
            self.lives[c] = life + kind
        if ev in ("send", "drop"):
            m, order = event["m"], self.modes[c].get("order", "queue")
            self.reached[m].append((self.place, n, c, ev, order == "queue"))
        if ev == "send":
            self.heard[c] = self.place
            if order == "queue":
                self.latest[c] = max(m, self.latest.get(c, m))
        elif ev == "msg":
            due = self.receivers(event["key"])
            if self.modes[c].get("echo") == "off":
                due.discard(c)
            message = self.place, n, c, event["key"], due
            self.published[event["m"]].append(message)
        elif ev == "drop":
            side, _, mode = event["reason"].partition("/")
            asked = self.modes[c].get(f"blocking/{side}")
            if event["reason"] == "deaf":
                self.deaf.append((self.place, n, m, c))
            elif mode != "discard" or mode != asked:
                yield "bad-drop", n, m, None, c, None, 1
        elif ev == "ctl":
            if event["key"] in MODES:
                topic, _, mode = event["key"].rpartition("/")
                self.modes[c][topic] = mode
        elif ev in ("sub", "unsub"):
            pattern = event["pattern"]
            self.times[c, pattern] += 1 if ev == "sub" else -1
            clients = self.holders[pattern]
            is_held = self.times[c, pattern] > 0
            (clients.add if is_held else clients.discard)(c)
            if self.times[c, pattern] < 0:
                yield "bad-trace", n, None, None, c, pattern, 1
        elif ev == "open":
            ids = (event["gid"], event["uid"], event["pid"])
            self.own.setdefault(c, sbus.Credentials(*ids))
        else:
            self.closed.add(c)

    def receivers(self, key: str) -> set[int]:
        """Return which open clients hold a pattern that selects a key.

        One whose open is missing is open; that it is missing is told once.
        """
        return {
            c
            for pattern, clients in self.holders.items()
            for c in clients - self.closed
            if c in self.own or c not in self.opened
            if hears(pattern, key, self.own.get(c), self.prefix)
        }

    def end(self, is_stopped: bool) -> Iterator[Found]:
        """Yield what is wrong with the run as a whole."""
        for place, n, m, c in self.deaf:
            hears_later = place < self.heard.get(c, place)
            if hears_later or m < self.latest.get(c, m):
                yield "bad-drop", n, m, None, c, None, 1
        for c, life in self.lives.items():
            if not re.fullmatch("oe?c" if is_stopped else "oe?c?", life):
                yield "bad-trace", self.first[c], None, None, c, None, 1
        lost: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for m in {**self.published, **self.reached}:
            about = self.published[m], self.reached[m]
            yield from self.judge(m, *about, lost, is_stopped)
        for c, some in lost.items():
            n, m = map(min, zip(*some))
            yield "undecided", n, m, None, c, None, len(some)
        yield from self.late()

    def judge(
        self, m: int, published: Any, reached: Any, lost: Any, is_stopped: bool
    ) -> Iterator[Found]:
        """Yield what is wrong with a message; put who may wait into lost.

        Nobody waits that has a close, or for whom the run has stopped.
        """
        place, n, publisher, key, due = (published or [(0, 0, 0, "", ())])[0]
        if len(published) != 1 or reached and reached[0][0] < place:
            at = n if published else reached[0][1]
            yield "bad-trace", at, m, None, None, None, 1
        if len(published) != 1:
            return
        for c in due | {event[2] for event in reached}:
            ends = [event for event in reached if event[2] == c]
            sends = sum(event[3] == "send" for event in ends)
            about = (ends[-1][1] if ends else n, m, publisher, c, key, 1)
            is_over = is_stopped or c in self.closed
            if not ends and (is_over or m < self.latest.get(c, m)):
                yield "missing", *about
            elif not ends:
                lost[c].append((n, m))
            is_secret = key.startswith("!/cred/")
            is_known = c in self.opened or not is_secret
            if sends and c not in due and is_known:
                yield "secret-leak" if is_secret else "unowed", *about
            if sends > 1:
                yield "duplicate", *about
            if len(ends) > sends and (c not in due or len(ends) > 1):
                yield "bad-drop", *about

    def late(self) -> Iterator[Found]:
        """Yield what was sent after a later message of its publisher."""
        sends: dict[tuple[int, int], tuple[int, int]] = {}  # the first ones
        for m, some in self.reached.items():
            for place, n, c, ev, is_in_order in some:
                if ev == "send" and is_in_order:
                    sends.setdefault((m, c), (place, n))
        highest: dict[tuple[int, int], int] = {}
        for (_, n), (m, c) in sorted((at, of) for of, at in sends.items()):
            if len(self.published[m]) != 1:
                continue
            _, _, publisher, key, due = self.published[m][0]
            before = highest.get((c, publisher), m)
            if c in due and m < before:
                yield "out-of-order", n, m, publisher, c, key, 1
            if c in due:
                highest[c, publisher] = max(m, before)


def chains(files: dict[str, list[Event]]) -> Iterator[list[str]]:
    """Yield the files that belong together, in order.

    A file without a start goes on where exactly one ends, if it is the only
    one to go on there.
    """
    heads, ends = {}, {}
    for file, events in files.items():
        known = [event for event in events if event]
        if known and known[0]["ev"] != "start":
            heads[file] = known[0]["n"] - 1
        edges = [x["ev"] for x in known if x["ev"] in ("start", "stop")]
        if known and edges[-1:] != ["stop"]:
            ends[file] = known[-1]["n"]
    after = {}
    for file, n in heads.items():
        before = [end for end in ends if ends[end] == n]
        if len(before) == 1 == [*heads.values()].count(n):
            after[before[0]] = file
    for file in files:
        if file not in after.values():
            chain = [file]
            while chain[-1] in after:
                chain.append(after[chain[-1]])
            yield chain


def audit_chain(
    files: dict[str, list[Event]], is_running: bool
) -> Iterator[Found]:
    """Yield what is wrong with files that go on one where another ends."""
    run, before, stop = None, None, None
    began, *_ = files
    nothing = [None] * 4
    pairs = [(name, event) for name in files for event in files[name]]
    for at, (file, event) in enumerate(pairs):
        if not event:
            yield "bad-trace", file, None, *nothing, 1
            continue
        n, ev = event["n"], event["ev"]
        has_data = ev == "msg" and type(event.get("data")) is str
        if has_data and event["key"].startswith("!/cred/"):  # [TRACE-4]
            message = (event["m"], event["c"], None, event["key"], 1)
            yield "bad-trace", file, n, *message
        if ev == "start":
            if before is not None and stop is None:
                yield "bad-trace", began, before, *nothing, 1
            yield from ended(run, began, before, stop)
            later = [event for _, event in pairs[at + 1 :] if event]
            rest = itertools.takewhile(lambda x: x["ev"] != "start", later)
            opened = {event["c"] for event in rest if event["ev"] == "open"}
            run = Run(event.get("cred_prefix") or "", opened)
            began, before, stop = file, 0, None
        elif before is None:
            yield "bad-trace", file, n, *nothing, 1
            before = n - 1
        if n != before + 1:
            yield "bad-trace", file, n, *nothing, 1
        if run and ev not in ("start", "stop"):
            for breach, *about in run.take(event):
                yield breach, began, *about
        if ev == "stop" and stop is None:
            stop = n
        before = n
    if before is not None and stop is None and not is_running:
        yield "bad-trace", began, before, *nothing, 1
    yield from ended(run, began, before, stop)


def ended(
    run: Run | None, began: str, before: int | None, stop: int | None
) -> Iterator[Found]:
    """Yield what is wrong with a run as a whole."""
    if stop not in (None, before):
        yield "bad-trace", began, stop, None, None, None, None, 1
    for breach, *about in run.end(stop is not None) if run else ():
        yield breach, began, *about


def audit(paths: Sequence[str], is_running: bool = False) -> Iterator[Found]:
    """Yield what is wrong with some traces."""
    files = {}
    for path in paths:
        with pyarrow.input_stream(path) as file:  # it may be compressed
            lines = list(io.BytesIO(file.read()))
        files[path] = [parse(line) for line in lines if line.endswith(b"\n")]
    for chain in chains(files):
        yield from audit_chain(
            {path: files[path] for path in chain}, is_running
        )
