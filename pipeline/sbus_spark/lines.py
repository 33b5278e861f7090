"""Lines: the frequent events of a trace, many of them at once.

See spec/9-running.md.  Facts:

- Most events are sends, then messages and drops.  A line that is just as
  sbus.py writes it is fixed texts, and between them numbers, and maybe a
  key; where these begin is found by its commas.  Every byte is looked at.
- Any other line is left: it is read by itself.
- Eight bytes are one number of 64 bits, the first byte its lowest: so a few
  operations on arrays check eight digits, or read them.
"""

from __future__ import annotations

import functools
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

    comma: int  # which one it begins with: from 1, or from the end of the line
    shift: int  # so many bytes later
    text: bytes


class Form(NamedTuple):
    """The fixed texts of a kind of line, and what is between them."""

    texts: list[Text]
    between: list[str]


BUT_ONE, LAST, END = -3, -2, -1  # as Text.comma: the last ones, and the end
STAMP = b',"t":0000000000000000000,"ev":"'
EV_BEGINS = len(STAMP)


def form_of(kind: bytes, between: str, *rest: Text) -> Form:
    """Return the form of lines that begin with n, t, and ev."""
    second = between.split()[1].encode()
    head = Text(1, 0, STAMP + b'%s","%s":' % (kind, second))
    return Form([Text(0, 0, b'{"n":'), head, *rest], between.split())


def form_of_messages(size: Text, *rest: Text) -> Form:
    """Return the form of messages, from the size on."""
    between = "n c m key size data" if rest[1:] else "n c m key size"
    key = Text(5, 0, b',"key":"')
    return form_of(b"msg", between, Text(4, 0, b',"m":'), key, size, *rest)


def form_of_drops(reason: str) -> Form:
    """Return the form of drops for a reason."""
    rest = b',"reason":"%s"}\n' % reason.encode()
    return form_of(b"drop", "n m c", Text(4, 0, b',"c":'), Text(5, 0, rest))


SIZE, TAIL = b'","size":', Text(END, -1, b"}\n")
FORMS = [
    (SEND, form_of(b"send", "n m c", Text(4, 0, b',"c":'), TAIL)),
    (MSG, form_of_messages(Text(LAST, -1, SIZE), TAIL)),
    (
        MSG,
        form_of_messages(
            Text(BUT_ONE, -1, SIZE),
            Text(LAST, 0, b',"data":"'),
            Text(END, -2, b'"}\n'),
        ),
    ),
    *(
        (DROP + place, form_of_drops(reason))
        for place, reason in enumerate(REASONS)
    ),
]
PADDING = bytes(64)  # around a text, so that one can look beyond its ends
DIGITS_MAX = 16  # of a number


class Lines:
    """The whole lines of a text, an element each, until they are events."""

    def __init__(self, text: bytes) -> None:
        self.text = PADDING + text + PADDING
        self.bytes = np.frombuffer(self.text, np.uint8)
        own = self.bytes[len(PADDING) : -len(PADDING)]
        # Where commas and ends of lines are, and which of these are whose
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
        place = np.minimum(self._first[rows] + number - 1, last)
        if number < 0:
            place = np.maximum(last + number + 1, 0)
        found = self._marks[place]
        return found

    def words(self, at: Array, count: int) -> Array:
        """Return so many words of eight bytes from each of some offsets."""
        kind, size = f"V{8 * count}", len(self.text) - 8 * count + 1
        cells: Array = np.ndarray((size,), kind, self.text, strides=(1,))
        return cells[at].view("<u8").reshape(len(at), count)

    def have(self, at: Array, text: bytes) -> Array:
        """Return at which offsets there is a fixed text."""
        masks = masks_of(text)
        found = self.words(at, len(masks))
        is_wrong = np.zeros(len(at), np.uint64)
        for place, (wanted, fixed, digits) in enumerate(masks):
            difference = found[:, place] ^ wanted
            is_wrong |= difference & fixed
            if digits:
                is_wrong |= odd_digits(difference & digits)
        is_right: Array = is_wrong == 0
        return is_right

    def names(self, starts: Array, ends: Array, places: Places) -> Array:
        """Return the places of the names between offsets, -1 for none."""
        text, spans = self.text, zip(starts.tolist(), ends.tolist())
        found = [text[start:end] for start, end in spans]
        return np.fromiter(map(places.__getitem__, found), "i4", len(found))

    def numbers(self, starts: Array, ends: Array) -> Array:
        """Return what numbers are between offsets, -1 for none."""
        width = ends - starts
        is_number = (width > 0) & (width <= DIGITS_MAX)
        is_number &= (self.bytes[starts] != ord("0")) | (width == 1)
        value, are_digits = self._eight(ends, width)
        if width.max(initial=0) > 8:
            high, are_high = self._eight(ends - 8, width - 8)
            value += high * 10**8
            are_digits &= are_high
        value[~(is_number & are_digits)] = -1
        return value

    def _eight(self, ends: Array, width: Array) -> tuple[Array, Array]:
        """Return the number before offsets, and whether it is of digits.

        At most its last eight digits count; a width below 1 is a 0.
        """
        found = self.words(ends - 8, 1)[:, 0] ^ word(b"00000000")
        found &= LAST_BYTES[np.clip(width, 0, 8)]
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
    """The places of names, in the order in which they came.

    What is no name as it stands, as JSON has it, is not kept, and at -1.
    """

    def __missing__(self, name: bytes) -> int:
        if b'"' in name or b"\\" in name:
            return -1
        return self._place(name)

    def _place(self, name: bytes) -> int:
        return self.setdefault(name, len(self))


class Ignored(Places):
    """The same of names that nobody asks for."""

    def _place(self, name: bytes) -> int:
        return 0


def word(text: bytes) -> np.uint64:
    """Return up to eight bytes as a number, as Lines.words does."""
    return np.uint64(int.from_bytes(text, "little"))


@functools.cache
def masks_of(text: bytes) -> list[tuple[np.uint64, np.uint64, np.uint64]]:
    """Return the words of a text, and which bits are fixed, which digits."""
    found = []
    for start in range(0, len(text), 8):
        part = text[start : start + 8]
        fixed = bytes(0xFF * (byte != ord("0")) for byte in part)
        digits = bytes(0xFF * (byte == ord("0")) for byte in part)
        found.append((word(part), word(fixed), word(digits)))
    return found


# For each number of bytes, the last so many of a word
LAST_BYTES = np.array([(1 << 64) - (1 << 64 >> 8 * n) for n in range(9)], "u8")


def odd_digits(words: Array) -> Array:
    """Return words that are 0 if all of their bytes are 0 to 9."""
    high = np.uint64(0xF0F0F0F0F0F0F0F0)
    return (words | (words + np.uint64(0x0606060606060606))) & high


def read_frequent(lines: Lines, keys: Places) -> None:
    """Read the lines that are frequent events; *keys* are given places."""
    if not lines.is_plain:
        return
    every = np.arange(len(lines.ends))
    at = lines.comma(every, 1) + EV_BEGINS
    initial = lines.bytes[np.minimum(at, len(lines.bytes) - 1)]
    for kind, form in FORMS:
        is_one = initial == form.texts[1].text[EV_BEGINS]
        rows = np.flatnonzero(is_one & (lines.ev == UNREAD))
        if len(rows):
            read_form(lines, rows, kind, form, keys)


def read_form(
    lines: Lines, rows: Array, kind: int, form: Form, keys: Places
) -> None:
    """Read those of some lines that are of a form."""
    places = [lines.comma(rows, one.comma) + one.shift for one in form.texts]
    is_one = np.ones(len(rows), bool)
    for at, one in zip(places, form.texts):
        is_one &= lines.have(at, one.text)
    first_of_t = lines.bytes[places[1] + len(',"t":')]
    is_one &= (first_of_t > ord("0")) & (first_of_t < ord("9"))  # 64 bits
    rows, places = rows[is_one], [at[is_one] for at in places]
    starts = [at + len(one.text) for at, one in zip(places, form.texts)]
    values = {}
    for name, start, end in zip(form.between, starts, places[1:]):
        if name == "key":
            values[name] = lines.names(start, end, keys)
        elif name == "data":
            values[name] = lines.names(start, end, Ignored())
        else:
            values[name] = lines.numbers(start, end)
    is_one = values["c"] > 0
    for value in values.values():
        is_one &= value >= 0
    rows = rows[is_one]
    lines.ev[rows] = kind
    lines.n[rows] = values["n"][is_one]
    lines.m[rows] = values["m"][is_one]
    lines.c[rows] = values["c"][is_one]
    if kind == MSG:
        lines.key[rows] = values["key"][is_one]
