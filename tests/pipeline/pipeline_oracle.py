"""A second auditor: plain Python, one pass, to be seen to be right.

It keeps what it reads in memory, and shares no code with sbus_spark; what a
pattern selects it asks sbus.py, pattern by pattern.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import sbus

FIELDS = {  # the numbers of each event, and then its texts
    **dict.fromkeys(["start", "stop"], ("", "")),
    **dict.fromkeys(["sub", "unsub"], ("c", "pattern")),
    **{"open": ("c gid uid pid", ""), "close": ("c", ""), "ctl": ("c", "key")},
    **{"msg": ("c m size", "key"), "send": ("m c", "")},
    **{"drop": ("m c", "reason")},
}
Found = tuple[Any, ...]  # breach, n, m, publisher, c, key
NONE = (None, None, None, None)


def parse(line: bytes) -> tuple[Any, bool]:
    """Return an event; or the number of what is none, if any, and False."""
    try:
        event = json.loads(line)
        numbers, texts = FIELDS.get(event.get("ev"), ("none", ""))
    except (ValueError, AttributeError, TypeError):
        return None, False
    values = [event.get(name) for name in ("n", "t", *numbers.split())]
    is_number = [type(one) is int and abs(one) < 1 << 63 for one in values]
    is_event = all(is_number) and (event["ev"] != "start" or event["n"] == 1)
    is_event &= all(type(event.get(name)) is str for name in texts.split())
    if is_event and "c" in numbers:
        is_event = event["c"] > 0 and event.get("size", 0) >= 0
    n = values[0] if is_number[0] else None
    return event if is_event else n or None, is_event


def selects(pattern: str, own: str, key: str, prefix: str) -> bool:
    """Return whether who holds a pattern, and is "gid uid pid", gets a key."""
    try:
        one, name = pattern.encode("latin-1"), key.encode("latin-1")
    except ValueError:
        return False
    if sbus.SECRET not in (one[:7], name[:7]):
        return sbus.pattern_matches(one, name)
    start = re.escape(f"{prefix}/" if prefix else "").encode("latin-1")
    head = start + rb"!/cred/(\d*)/(\d*)/(\d*)/(.*)"
    held, asked = (re.fullmatch(head, text, re.S) for text in (one, name))
    numbers = [number.encode() for number in own.split()]
    if not held or not asked or numbers[2:] in ([], [b"0"]):
        return False
    *fields, rest = zip(held.groups(), asked.groups())
    return sbus.pattern_matches(*rest) and all(
        field in (b"", number) and other in (field, field or number)
        for (field, other), number in zip(fields, numbers)
    )


class Run:
    """What has happened in a run so far."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.place = 0  # of the event, counted in the run
        self.own: dict[int, str] = {}
        self.times: dict[int, Counter[str]] = defaultdict(Counter)
        self.modes: dict[int, dict[str, str]] = defaultdict(dict)
        self.reordered: set[int] = set()
        self.first: dict[int, int] = {}  # the number of a client's first event
        self.lives: dict[int, str] = {}  # as "oec": open, others, close
        self.holders: dict[str, set[int]] = {}
        self.groups: dict[str, list[set[int]]] = {}  # of holders, by key
        self.published: dict[int, list[Found]] = defaultdict(list)
        self.reached: dict[int, list[Found]] = defaultdict(list)
        self.latest: dict[int, int] = {}  # highest message sent to a client
        self.heard: dict[int, int] = {}  # the place of the last send to it
        self.deaf: list[Found] = []

    def take(self, event: dict[str, Any]) -> Iterator[Found]:
        """Take an event of a client; yield what is wrong with it already."""
        n, ev, c = event["n"], event["ev"], event["c"]
        self.place += 1
        self.first.setdefault(c, n)
        life = self.lives.get(c, "")
        kind = {"open": "o", "close": "c"}.get(ev, "e")
        if kind != "e" or life[-1:] != "e":
            self.lives[c] = life + kind
        if ev in ("send", "drop"):
            m = event["m"]
            self.reached[m].append((self.place, n, c, ev))
        if ev == "send":
            self.latest[c] = max(m, self.latest.get(c, m))
            self.heard[c] = self.place
        elif ev == "msg":
            due = self.receivers(event["key"])
            if self.modes[c].get("echo") == "off":
                due.discard(c)
            one = (self.place, n, c, event["key"], due)
            self.published[event["m"]].append(one)
        elif ev == "drop":
            side, _, mode = event["reason"].partition("/")
            asked = self.modes[c].get(f"blocking/{side}")
            if event["reason"] == "deaf":
                self.deaf.append((self.place, n, m, c))
            elif mode != "discard" or mode != asked:
                yield "bad-drop", n, m, None, c, None
        elif ev == "ctl":
            kind, _, mode = event["key"].rpartition("/")
            if event["key"] in ("order/stack", "order/random"):
                self.reordered.add(c)
            if event["key"].encode("utf-8") in sbus.CHOICES:
                self.modes[c][kind] = mode
        elif ev in ("sub", "unsub"):
            held, pattern = self.times[c], event["pattern"]
            held[pattern] += 1 if ev == "sub" else -1
            if pattern not in self.holders:
                self.holders[pattern] = set()
                self.groups.clear()
            clients = self.holders[pattern]
            (clients.add if held[pattern] > 0 else clients.discard)(c)
            if held[pattern] < 0:
                yield "bad-trace", n, None, None, c, pattern
        elif ev == "open":
            self.own[c] = "{gid} {uid} {pid}".format(**event)
        else:
            for pattern in self.times.pop(c, ()):
                self.holders[pattern].discard(c)
            self.own.pop(c, None)
            self.modes.pop(c, None)

    def receivers(self, key: str) -> set[int]:
        """Return who holds a pattern that selects a key."""
        if key.startswith("!/cred/"):
            return {
                c
                for pattern in self.holders
                if pattern.startswith("!/cred/")
                for c in self.holders[pattern]
                if selects(pattern, self.own.get(c, ""), key, self.prefix)
            }
        if key not in self.groups:
            self.groups[key] = [
                clients
                for pattern, clients in self.holders.items()
                if selects(pattern, "", key, self.prefix)
            ]
        return set[int]().union(*self.groups[key])

    def end(self) -> Iterator[Found]:
        """Yield what is wrong with the run as a whole."""
        for place, n, m, c in self.deaf:
            if self.heard.get(c, 0) > place:
                yield "bad-drop", n, m, None, c, None
        for c, life in self.lives.items():
            if not re.fullmatch("oe?c?", life):
                yield "bad-trace", self.first[c], None, None, c, None
        for m in {**self.published, **self.reached}:
            yield from self.judge(m, self.published[m], self.reached[m])
        yield from self.late()

    def judge(self, m: int, published: Any, reached: Any) -> Iterator[Found]:
        """Yield what is wrong with a message."""
        place, n, publisher, key, due = (published or [(0, 0, 0, "", ())])[0]
        if len(published) != 1 or reached and reached[0][0] < place:
            at = n if published else reached[0][1]
            yield "bad-trace", at, m, None, None, None
        if len(published) != 1:
            return
        for c in due | {one[2] for one in reached}:
            own = [one for one in reached if one[2] == c]
            sends = sum(one[3] == "send" for one in own)
            about = (own[-1][1] if own else n, m, publisher, c, key)
            is_waiting = c in self.reordered or m >= self.latest.get(c, m)
            if not own and not is_waiting:
                yield "missing", *about
            if sends and c not in due:
                is_secret = key.startswith("!/cred/")
                yield "secret-leak" if is_secret else "unowed", *about
            if sends > 1:
                yield "duplicate", *about
            if len(own) > sends and (c not in due or len(own) > 1):
                yield "bad-drop", *about

    def late(self) -> Iterator[Found]:
        """Yield what was sent after a later message of its publisher."""
        sends: dict[tuple[int, int], tuple[int, int]] = {}  # the first ones
        for m, some in self.reached.items():
            for place, n, c, ev in some:
                if ev == "send" and c not in self.reordered:
                    sends.setdefault((m, c), (place, n))
        highest: dict[tuple[int, int], int] = {}
        for (_, n), (m, c) in sorted((at, of) for of, at in sends.items()):
            for _, _, publisher, key, due in self.published[m]:
                before = highest.get((c, publisher), m)
                if c in due and m < before:
                    yield "out-of-order", n, m, publisher, c, key
                if c in due:
                    highest[c, publisher] = max(m, before)


def audit(path: str) -> Iterator[Found]:
    """Yield what is wrong with a trace."""
    run, last, last_ev, is_stopped = None, 0, "", False
    lost = 0  # lines that may have been events
    with open(path, "rb") as file:
        for line in filter(bytes.strip, file):
            event, is_event = parse(line)
            if not line.endswith(b"\n"):
                break
            if not is_event:
                lost += 1
                yield "bad-trace", event, *NONE
                continue
            n, ev = event["n"], event["ev"]
            if ev == "start":
                if last_ev and not is_stopped:
                    yield "bad-trace", last, *NONE
                yield from run.end() if run else ()
                run, is_stopped = Run(event.get("cred_prefix") or ""), False
            else:
                if last_ev == "stop":
                    yield "bad-trace", last, *NONE
                if n == 1 or not last < n <= last + 1 + lost:
                    yield "bad-trace", n, *NONE
                if run and ev != "stop":
                    yield from run.take(event)
            is_stopped |= ev == "stop"
            last, last_ev, lost = n, ev, 0
    if last_ev and not is_stopped:
        yield "bad-trace", last, *NONE
    yield from run.end() if run else ()
