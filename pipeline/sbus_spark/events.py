"""Events: the text of a trace to arrays.

See spec/9-running.md.  Facts:

- Most events are sends, then messages and drops.  Where their lines are as
  sbus.py writes them, which is looked at, they are parsed all at once; any
  other line is parsed by itself.
- A line that is as sbus.py writes it, but for its numbers and its key, is
  one fixed text: so lines are right if what is left of them is that text.
- A piece is what a block has of one run: a start begins a new one.
- A line that is no event may have been one, so its number may be missing.
"""

from __future__ import annotations

import bisect
import json
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Numbers = Union[range, Array]

# What is in Piece.ev; a drop is DROP and the place of its reason
SEND, MSG, RARE, DROP = range(4)
REASONS = ["soft/discard", "hard/discard", "deaf"]  # those of sbus.py first
BAD_MAX = 80  # characters shown of a line that is no event
CHUNK = 1 << 20  # bytes that are parsed at once: what a cache holds

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


class Lines:
    """The lines of a chunk, an element each, until they are events."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.bytes = np.frombuffer(text, np.uint8)
        controls = np.flatnonzero(self.bytes < 32)
        self.ends = controls[self.bytes[controls] == 10]
        self.is_plain = len(controls) == len(self.ends) and text.isascii()
        self.starts = np.concatenate(([0], self.ends[:-1] + 1))
        size = len(self.ends)
        self.ev = np.full(size, UNREAD, np.uint8)
        self.n, self.m, self.c = np.zeros((3, size), np.int64)
        self.key = np.zeros(size, np.int32)

    def word(self, at: Array) -> Array:
        """Return the four bytes that begin at each of some offsets."""
        size = len(self.text) - 3
        words: Array = np.ndarray((size,), "<u4", self.text, strides=(1,))
        found: Array = words[np.clip(at, 0, size - 1)]
        return found


UNREAD, NONE = 254, 255  # in Lines.ev: not looked at yet, and no event
DIGITS = b"0123456789"
HEAD = re.compile(rb'^\{"n":([0-9]{1,18}),"t":[0-9]{19},"ev":"', re.MULTILINE)
EV_AFTER_N = len(',"t":1763717053000000000,"ev":"')
DATA = re.compile(rb',"data":"[A-Za-z0-9+/=]*"}\n')
ODD_NUMBER = re.compile(rb":0[0-9]")  # which JSON does not allow
SKELETONS = {
    SEND: b'{"n":,"t":,"ev":"send","m":,"c":}\n',
    MSG: b'{"n":,"t":,"ev":"msg","c":,"m":,"key":"","size":}\n',
} | {
    DROP + place: b'{"n":,"t":,"ev":"drop","m":,"c":,"reason":"%s"}\n'
    % reason.encode()
    for place, reason in enumerate(REASONS)
}
QUOTES = 18  # in the line of a message; the key is between 15 and 16
TO_BLANKS = bytes.maketrans(b",", b" ")
NO_NUMBERS = bytes(set(range(256)) - set(DIGITS + b",\n"))


def four(text: bytes) -> int:
    """Return four bytes as a number, as Lines.word does."""
    return int.from_bytes(text, "little")


def guess_kinds(lines: Lines) -> None:
    """Say of lines which frequent events they look like."""
    head = HEAD.search(lines.text)
    if not head or not lines.is_plain:
        return
    escapes = np.flatnonzero(lines.bytes == ord("\\"))
    is_odd = np.zeros(len(lines.ends), bool)
    is_odd[np.searchsorted(lines.ends, escapes)] = True
    for digits in (len(head[1]), len(head[1]) + 1):
        comma = lines.starts + len('{"n":') + digits
        at = comma + EV_AFTER_N
        fits = (at + 4 < lines.ends) & ~is_odd
        fits &= lines.word(comma) == four(b',"t"')
        word = lines.word(at)
        lines.ev[fits & (word == four(b"send"))] = SEND
        lines.ev[fits & (word == four(b'msg"'))] = MSG
        drops = np.flatnonzero(fits & (word == four(b"drop")))
        for place, reason in enumerate(REASONS):
            tail = reason.encode()[:4]
            start = lines.ends[drops] - len(reason) - len('"}')
            named = drops[lines.word(start) == four(tail)]
            lines.ev[named] = DROP + place


def read_frequent(lines: Lines, keys: dict[bytes, int]) -> None:
    """Parse the lines that look like frequent events, if they are."""
    changes = np.flatnonzero(np.diff(lines.ev)) + 1
    firsts = np.concatenate(([0], changes))
    bounds = np.append(lines.starts[firsts], len(lines.text)).tolist()
    parts: dict[int, list[bytes]] = {}
    for index, kind in enumerate(lines.ev[firsts].tolist()):
        part = lines.text[bounds[index] : bounds[index + 1]]
        parts.setdefault(kind, []).append(part)
    for kind in parts.keys() & SKELETONS.keys():
        rows = np.flatnonzero(lines.ev == kind)
        text, names = b"".join(parts[kind]), None
        if kind == MSG:
            text, names = without_keys(text, len(rows))
        numbers = read_numbers(text, kind, len(rows))
        if numbers is None:
            lines.ev[rows] = UNREAD
            continue
        c, m = (2, 3) if kind == MSG else (3, 2)
        lines.n[rows] = numbers[:, 0]
        lines.c[rows], lines.m[rows] = numbers[:, c], numbers[:, m]
        if names is not None:
            for name in names:
                keys.setdefault(name, len(keys))
            ids = map(keys.__getitem__, names)
            lines.key[rows] = np.fromiter(ids, np.int32, len(rows))


def without_keys(text: bytes, count: int) -> tuple[bytes, list[bytes]]:
    """Return the lines of messages without their keys, and the keys."""
    if b',"data":"' in text:
        text = DATA.sub(b"}\n", text)
    quotes = np.flatnonzero(np.frombuffer(text, np.uint8) == ord('"'))
    if len(quotes) != count * QUOTES:
        return b"", []
    at = quotes.reshape(-1, QUOTES)
    starts, ends = (at[:, 14] + 1).tolist(), at[:, 15].tolist()
    rests = zip([0, *ends], [*starts, len(text)])
    names = [text[start:end] for start, end in zip(starts, ends)]
    return b"".join([text[start:end] for start, end in rests]), names


def read_numbers(text: bytes, kind: int, count: int) -> Array | None:
    """Return the numbers of lines of a kind, None if they are others."""
    if text.translate(None, DIGITS) != SKELETONS[kind] * count:
        return None
    if b":0" in text and ODD_NUMBER.search(text):
        return None
    blank = text.translate(TO_BLANKS, NO_NUMBERS)
    numbers = np.fromstring(blank, np.int64, sep=" ")
    width = 5 if kind == MSG else 4
    if len(numbers) != count * width or numbers.max() == MOST:
        return None
    rows: Array = numbers.reshape(count, width)
    return rows if rows[:, 2 if kind == MSG else 3].min() > 0 else None


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
    """Makes one array of each column of the chunks of a block."""

    def __init__(self) -> None:
        self.keys: dict[bytes, int] = {}
        self.others: dict[str, int] = {}  # keys with escapes
        self.reasons = list(REASONS)
        self.columns: list[tuple[Array, ...]] = []
        self.rare: list[Rare] = []
        self.bad: list[Bad] = []
        self.count = 0  # of the events of the chunks before

    def read(self, text: bytes) -> None:
        """Parse a chunk of whole lines."""
        lines = Lines(text)
        guess_kinds(lines)
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
                line = text[start:end][: 4 * BAD_MAX]
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


def read_pieces(text: bytes) -> Iterator[Piece]:
    """Yield the pieces of a block of whole lines."""
    reader = Reader()
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + CHUNK) + 1 or len(text)
        reader.read(text[start:end])
        start = end
    yield from reader.pieces()
