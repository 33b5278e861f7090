"""Lines: the frequent events of a trace, many of them at once.

See spec/9-running.md.  Facts:

- Most events are sends, then messages and drops.  A line that is just as
  sbus.py writes it is fixed texts with numbers, and maybe a key, between
  them; where these begin is found by its commas.  Every byte is looked at.
- Any other line is left: it is read by itself.
- Eight bytes are one number of 64 bits, the first byte its lowest: so a few
  operations on arrays check eight digits, or read them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What is in Lines.ev; a drop is DROP and the place of its reason
SEND, MSG, RARE, DROP = range(4)
UNREAD, NONE = 254, 255  # not read yet, and no event
REASONS = ["soft/discard", "hard/discard", "deaf"]  # those of sbus.py


class Text(NamedTuple):
    """A fixed text of a line; each 0 in it stands for any digit."""

    comma: int  # behind how many commas it begins, with the last of them
    shift: int  # so many bytes later
    text: bytes


class Form(NamedTuple):
    """The fixed texts of a kind of line, and what is between them."""

    texts: list[Text]
    between: list[str]


LAST, END = -2, -1  # as Text.comma: the last one, and the end of the line
STAMP = b',"t":0000000000000000000,"ev":"'
EV_BEGINS = len(STAMP)


def form_of(kind: bytes, between: str, *rest: Text) -> Form:
    """Return the form of lines that begin with n, t, and ev."""
    second = between.split()[1].encode()
    head = Text(1, 0, STAMP + b'%s","%s":' % (kind, second))
    return Form([Text(0, 0, b'{"n":'), head, *rest], between.split())


FORMS = {
    SEND: form_of(
        b"send", "n m c", Text(4, 0, b',"c":'), Text(END, -1, b"}\n")
    ),
    MSG: form_of(
        b"msg",
        "n c m key size",
        Text(4, 0, b',"m":'),
        Text(5, 0, b',"key":"'),
        Text(LAST, -1, b'","size":'),
        Text(END, -1, b"}\n"),
    ),
}
for place, reason in enumerate(REASONS):
    FORMS[DROP + place] = form_of(
        b"drop",
        "n m c",
        Text(4, 0, b',"c":'),
        Text(5, 0, b',"reason":"%s"}\n' % reason.encode()),
    )
DATA = re.compile(rb',"data":"[A-Za-z0-9+/=]*"}\n')
PADDING = bytes(64)  # around a text, so that one can look beyond its ends
DIGITS_MAX = 16  # of a number


class Lines:
    """The whole lines of a text, an element each, until they are events."""

    def __init__(self, text: bytes) -> None:
        if b',"data":"' in text:  # it ends the line, and nobody asks for it
            text = DATA.sub(b"}\n", text)
        self.text = PADDING + text + PADDING
        self.bytes = np.frombuffer(self.text, np.uint8)
        own = self.bytes[len(PADDING) : -len(PADDING)]
        self._marks = np.flatnonzero((own == ord(",")) | (own < 32))
        self._marks += len(PADDING)
        found = self.bytes[self._marks]
        self._last = np.flatnonzero(found == ord("\n"))
        self._first = np.append(0, self._last + 1)[:-1]
        self.ends = self._marks[self._last]
        self.starts = np.append(len(PADDING), self.ends + 1)[:-1]
        is_plain = ((found == ord("\n")) | (found == ord(","))).all()
        size = len(self.ends)
        self.ev = np.full(size, UNREAD, np.uint8)
        self.n, self.m, self.c = np.zeros((3, size), np.int64)
        self.key = np.zeros(size, np.int32)
        self.is_plain = bool(is_plain) and text.isascii()

    def comma(self, rows: Array, number: int) -> Array:
        """Return where lines have a comma, their ends if they have not."""
        last = self._last[rows]
        if number == 0:
            found: Array = self.starts[rows]
            return found
        place = self._first[rows] + number - 1
        if number == LAST:
            place = np.maximum(last - 1, 0)
        elif number == END:
            place = last
        found = self._marks[np.minimum(place, last)]
        return found

    def words(self, at: Array, count: int) -> Array:
        """Return so many words of eight bytes from each of some offsets."""
        kind, size = f"V{8 * count}", len(self.text) - 8 * count + 1
        cells: Array = np.ndarray((size,), kind, self.text, strides=(1,))
        return cells[at].view("<u8").reshape(len(at), count)

    def have(self, at: Array, text: bytes) -> Array:
        """Return at which offsets there is a fixed text."""
        count = -(-len(text) // 8)
        found = self.words(at, count)
        is_wrong = np.zeros(len(at), np.uint64)
        for place in range(count):
            part = text[8 * place : 8 * place + 8]
            digits = bytes(0xFF * (byte == ord("0")) for byte in part)
            fixed = bytes(0xFF * (byte != ord("0")) for byte in part)
            difference = found[:, place] ^ word(part)
            is_wrong |= difference & word(fixed)
            if any(digits):
                is_wrong |= odd_digits(difference & word(digits))
        is_right: Array = is_wrong == 0
        return is_right

    def numbers(self, starts: Array, ends: Array) -> tuple[Array, Array]:
        """Return what numbers are between offsets, and whether they are."""
        width = ends - starts
        is_number = (width > 0) & (width <= DIGITS_MAX)
        is_number &= (self.bytes[starts] != ord("0")) | (width == 1)
        value, are_digits = self._eight(ends, width)
        if width.max(initial=0) > 8:
            high, are_high = self._eight(ends - 8, width - 8)
            value += high * 10**8
            are_digits &= are_high
        return value, is_number & are_digits

    def _eight(self, ends: Array, width: Array) -> tuple[Array, Array]:
        """Return the last eight digits, or fewer, before offsets.

        What is before the number is shifted out.
        """
        found = self.words(ends - 8, 1)[:, 0] ^ word(b"00000000")
        bits = 64 - 8 * np.clip(width, 0, 8).astype(np.uint64)
        found = np.where(width > 0, found >> bits % 64 << bits % 64, 0)
        are_digits = odd_digits(found) == 0
        for shift, mask in (
            (8, 0x00FF00FF00FF00FF),
            (16, 0x0000FFFF0000FFFF),
            (32, 0x00000000FFFFFFFF),
        ):
            power = np.uint64(10 ** (shift // 8))  # of all but the first half
            found = found * power + (found >> np.uint64(shift))
            found &= np.uint64(mask)
        return found.astype(np.int64), are_digits


class Places(dict[bytes, int]):
    """The places of keys, in the order in which they came.

    What is no key as it stands, as JSON has it, is not kept, and at -1.
    """

    def __missing__(self, key: bytes) -> int:
        if b'"' in key or b"\\" in key:
            return -1
        return self.setdefault(key, len(self))


def word(text: bytes) -> np.uint64:
    """Return up to eight bytes as a number, as Lines.words does."""
    return np.uint64(int.from_bytes(text, "little"))


def odd_digits(words: Array) -> Array:
    """Return where a byte is not 0 to 9; of other bytes, what is before it."""
    high = np.uint64(0xF0F0F0F0F0F0F0F0)
    return (words | (words + np.uint64(0x0606060606060606))) & high


def read_frequent(lines: Lines, keys: Places) -> None:
    """Read the lines that are frequent events; *keys* are given places."""
    if not lines.is_plain:
        return
    every = np.arange(len(lines.ends))
    at = lines.comma(every, 1) + EV_BEGINS
    initial = lines.bytes[np.minimum(at, len(lines.bytes) - 1)]
    for kind, form in FORMS.items():
        is_one = initial == form.texts[1].text[EV_BEGINS]
        rows = np.flatnonzero(is_one & (lines.ev == UNREAD))
        if len(rows):
            read_form(lines, rows, kind, keys)


def read_form(lines: Lines, rows: Array, kind: int, keys: Places) -> None:
    """Read those of some lines that are of a form."""
    form = FORMS[kind]
    places = [lines.comma(rows, one.comma) + one.shift for one in form.texts]
    first_of_t = lines.bytes[places[1] + len(',"t":')]
    is_right = (first_of_t > ord("0")) & (first_of_t < ord("9"))  # 64 bits
    for at, one in zip(places, form.texts):
        is_right &= lines.have(at, one.text)
    values, spans = {}, None
    for name, at, one, end in zip(
        form.between, places, form.texts, places[1:]
    ):
        begin = at + len(one.text)
        if name == "key":
            spans = begin, end
        else:
            values[name], are_numbers = lines.numbers(begin, end)
            is_right &= are_numbers
    is_right &= values["c"] > 0
    if spans:
        starts, ends = (one[is_right] for one in spans)
        are_keys = read_keys(lines, rows[is_right], starts, ends, keys)
        is_right[is_right] = are_keys
    rows = rows[is_right]
    lines.ev[rows] = kind
    lines.n[rows] = values["n"][is_right]
    lines.m[rows] = values["m"][is_right]
    lines.c[rows] = values["c"][is_right]


def read_keys(
    lines: Lines,
    rows: Array,
    starts: Array,
    ends: Array,
    keys: Places,
) -> Array:
    """Note the keys of messages; return whether they are as they stand."""
    text = lines.text
    names = [
        text[start:end] for start, end in zip(starts.tolist(), ends.tolist())
    ]
    places = map(keys.__getitem__, names)
    lines.key[rows] = np.fromiter(places, np.int32, len(names))
    is_plain: Array = lines.key[rows] >= 0
    return is_plain
