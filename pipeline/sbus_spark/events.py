"""Events: the text of a trace to pieces, which are arrays.

See spec/9-running.md.  Facts:

- A piece is what a block has of one run: a start begins a new one.
- A line that is no event may have been one, so its number may be missing.
"""

from __future__ import annotations

import bisect
import json
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np

from .lines import (
    DROP,
    MSG,
    NONE,
    RARE,
    REASONS,
    SEND,
    UNREAD,
    Array,
    Lines,
    Places,
    read_frequent,
)

Numbers = Union[range, Array]

BAD_MAX = 80  # characters shown of a line that is no event
EVENTS_MAX = 1 << 19  # of a piece, about: of a block it is one, or two

# What an event has beside n and t: numbers, then texts
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "send": (("c", "m"), ()),
    "msg": (("c", "m", "size"), ("key",)),
    "drop": (("c", "m"), ("reason",)),
    "sub": (("c",), ("pattern",)),
    "unsub": (("c",), ("pattern",)),
    "ctl": (("c",), ("key",)),
    "open": (("c", "gid", "uid", "pid"), ()),
    "close": (("c",), ()),
    "start": ((), ()),
    "stop": ((), ()),
}


class Rare(NamedTuple):
    """An event of those of which there are few."""

    at: int  # which event of the piece it is
    ev: str
    c: int  # 0 for none
    text: str  # pattern, key, "gid uid pid", or the prefix of a start


class Bad(NamedTuple):
    """A line that is no event."""

    at: int  # which event of the piece comes next
    n: int  # its number, 0 for none
    text: str


Told = TypeVar("Told", Rare, Bad)


class Piece(NamedTuple):
    """What a block has of one run, an event an element.

    The arrays are as long as there are events; *key* has the place in
    *keys* of each message.
    """

    n: Numbers
    ev: Array
    m: Array
    c: Array
    key: Array
    keys: list[str]
    reasons: list[str]
    rare: list[Rare]
    bad: list[Bad]

    @property
    def is_start(self) -> bool:
        """Whether a run begins here; else it goes on."""
        return any(one.ev == "start" for one in self.rare[:1])


MOST = (1 << 63) - 1


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number of 64 bits."""
    return type(value) is int and -MOST <= value < MOST


def read_line(line: bytes) -> dict[str, Any]:
    """Return the event in a line; what is no event has no ev.

    Client numbers count from 1, sizes from 0, and a start is event 1.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not is_number(found.get("n")):
        return {}
    n, kind = found["n"], found.get("ev")
    if not isinstance(kind, str) or kind not in FIELDS:
        return {"n": n}
    numbers, texts = FIELDS[kind]
    is_event = (
        all(is_number(found.get(name)) for name in ("t", *numbers))
        and all(isinstance(found.get(name), str) for name in texts)
        and ("c" not in numbers or found["c"] > 0)
        and ("size" not in numbers or found["size"] >= 0)
        and (kind != "start" or n == 1)
    )
    if not is_event:
        return {"n": n}
    return found if "c" in numbers else {**found, "c": 0}


def text_of(event: dict[str, Any]) -> str:
    """Return what there is to know of a rare event."""
    if event["ev"] == "open":
        return f"{event['gid']} {event['uid']} {event['pid']}"
    name = {"start": "cred_prefix", "ctl": "key"}.get(event["ev"], "pattern")
    return str(event.get(name) or "")


class Reader:
    """Makes one array of each column of the texts of a block."""

    def __init__(self) -> None:
        self.keys = Places()
        self.others: dict[str, int] = {}  # keys with escapes
        self.reasons = list(REASONS)
        self.columns: list[tuple[Array, ...]] = []
        self.rare: list[Rare] = []
        self.bad: list[Bad] = []
        self.count = 0  # of the events of the texts before

    def read(self, text: bytes) -> None:
        """Parse some whole lines."""
        lines = Lines(text)
        read_frequent(lines, self.keys)
        unread = np.flatnonzero(lines.ev == UNREAD)
        found = self.read_each(lines, unread.tolist())
        is_event = lines.ev != NONE
        places = np.cumsum(is_event) - is_event + self.count
        for row, event in found:
            at = int(places[row])
            if "ev" in event:
                told = Rare(at, event["ev"], event["c"], text_of(event))
                self.rare.append(told)
            else:
                start, end = int(lines.starts[row]), int(lines.ends[row])
                line = lines.text[start:end][: 4 * BAD_MAX]
                shown = line.decode("utf-8", "replace")[:BAD_MAX]
                self.bad.append(Bad(at, event.get("n", 0), shown))
        names = (lines.n, lines.ev, lines.m, lines.c, lines.key)
        self.columns.append(tuple(one[is_event] for one in names))
        self.count += int(is_event.sum())

    def read_each(
        self, lines: Lines, rows: list[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Parse lines one by one; return those of no frequent event."""
        found = []
        for row in rows:
            line = lines.text[lines.starts[row] : lines.ends[row]]
            event = read_line(line)
            kind = event.get("ev")
            lines.ev[row] = RARE if kind else NONE
            if kind:
                lines.n[row], lines.c[row] = event["n"], event["c"]
            if kind in ("send", "msg", "drop"):
                lines.m[row] = event["m"]
                lines.ev[row] = self.code_of(event)
                if kind == "msg":
                    lines.key[row] = self.key_of(event["key"])
            elif kind or line.strip():
                found.append((row, event))
        return iter(found)

    def code_of(self, event: dict[str, Any]) -> int:
        """Return what stands for a frequent event in Piece.ev."""
        if event["ev"] != "drop":
            return SEND if event["ev"] == "send" else MSG
        reason = event["reason"]
        if reason not in self.reasons:
            if len(self.reasons) > REASONS_MAX:
                return DROP + REASONS_MAX
            self.reasons.append(reason)
        return DROP + self.reasons.index(reason)

    def key_of(self, key: str) -> int:
        """Return the place of a key; one with escapes has it below 0."""
        if key.isascii():
            return self.keys.setdefault(key.encode(), len(self.keys))
        return ~self.others.setdefault(key, len(self.others))

    def pieces(self) -> Iterator[Piece]:
        """Yield what was read, run by run; each may have no event."""
        columns = [np.concatenate(one) for one in zip(*self.columns)]
        n, ev, m, c, key = columns or [np.zeros(0, np.int64)] * 5
        keys = [name.decode() for name in self.keys] + list(self.others)
        key = np.where(key < 0, ~key + len(self.keys), key)
        starts = [one.at for one in self.rare if one.ev == "start"]
        if not self.count or starts[:1] != [0]:
            starts.insert(0, 0)
        for start, end in zip(starts, [*starts[1:], self.count]):
            part = slice(start, end)
            is_last = end == self.count
            names, places = np.unique(
                key[part][ev[part] == MSG], return_inverse=True
            )
            yield Piece(
                as_range(n[part]),
                ev[part],
                shrink(m[part]),
                shrink(c[part]),
                shrink(places),
                [keys[place] for place in names.tolist()],
                self.reasons,
                between(self.rare, start, end),
                between(self.bad, start, end + is_last),
            )


def between(told: list[Told], start: int, end: int) -> list[Told]:
    """Return what was told at some events, counted from the first."""
    first, last = (
        bisect.bisect_left(told, at, key=operator.attrgetter("at"))
        for at in (start, end)
    )
    return [one._replace(at=one.at - start) for one in told[first:last]]


REASONS_MAX = 200  # different ones; more are taken for the last


def as_range(n: Array) -> Numbers:
    """Return numbers as a range, if they are one."""
    if len(n) and not (np.diff(n) != 1).any():
        return range(int(n[0]), int(n[0]) + len(n))
    return n


def shrink(numbers: Array) -> Array:
    """Return numbers in as few bytes as they need."""
    if not len(numbers) or numbers.min() < 0:
        return numbers
    return numbers.astype(np.min_scalar_type(numbers.max()))


def read_pieces(texts: Iterable[bytes]) -> Iterator[Piece]:
    """Yield the pieces of the texts of a block, each of whole lines."""
    reader = Reader()
    for text in texts:
        if reader.count > EVENTS_MAX:
            yield from reader.pieces()
            reader = Reader()
        reader.read(text)
    yield from reader.pieces()
