"""Tests of how lines of a trace become arrays: together as one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pipeline_paper import PaperBus
from sbus_spark import events
from sbus_spark.lines import NONE, UNREAD, Lines, Places, read_frequent

# What may stand in a line in place of what a server writes
ODD = [bytes((byte,)) for byte in b'0159-+.eE,:"{}[]\\ \t\r\x00/\x7f\x80']
ODD += [b"", b"00", b",,", b'","', b"1" * 20, b'"x":1,', b',"data":"x"']
HEAD = b'{"n":9,"t":1763717053000002000,"ev":'
FREQUENT = [
    HEAD + b'"send","m":5,"c":1}\n',
    HEAD + b'"drop","m":5,"c":1,"reason":"hard/discard"}\n',
    HEAD + b'"drop","m":5,"c":1,"reason":"deaf"}\n',
    HEAD + b'"msg","c":1,"m":5,"key":"k/1","size":3}\n',
    HEAD + b'"msg","c":1,"m":5,"key":"k/1","size":3,"data":"AAA="}\n',
]
SPOILED = {  # what servers write, and what they do not
    b'"c":1': [b'"c":0', b'"c":', b'"c":-1', b'"c":01'],
    b'"n":9': [b'"n":', b'"n":-9', b'"n":9.0', b'"n":9x12345678'],
    b'"t":1': [b'"t":0', b'"t":9', b'"t":', b'"t":11'],
    b'"key":"': [b'"key":"\\n', b'"key":"\x80', b'"key":"\t', b'"key":""'],
}


def lines_of_a_trace(clients: int) -> list[bytes]:
    """Return lines as a server writes them, of every kind."""
    text = "".join(PaperBus(20, 20, clients).run(1_000)).encode()
    return text.splitlines(keepends=True) + FREQUENT


def spoiled(line: bytes, chosen: random.Random) -> bytes:
    """Return a line with something else in some place."""
    start = chosen.randrange(len(line))
    end = min(start + chosen.randrange(3), len(line) - 1)
    return line[:start] + chosen.choice(ODD) + line[end:]


def told(texts: list[bytes]) -> Iterator[object]:
    """Yield all that pieces have of some texts."""
    for piece in events.read_pieces(texts):
        keys = [piece.keys[place] for place in piece.key.tolist()]
        columns = (piece.ev, piece.m, piece.c)
        yield list(piece.n), [one.tolist() for one in columns], keys
        yield piece.rare, piece.bad, piece.reasons


def test_spoiled_lines_are_read_as_json_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that are read together say what each says by itself."""
    chosen = random.Random(1)
    lines = lines_of_a_trace(12)
    texts = [
        line.replace(old, new)
        for line in FREQUENT
        for old, news in SPOILED.items()
        for new in news
    ]
    for _ in range(200):
        some = chosen.choices(lines, k=40)
        at = chosen.randrange(len(some))
        some[at] = spoiled(some[at], chosen)
        texts.append(b"".join(some))
    together = [list(told([text])) for text in texts]
    monkeypatch.setattr(events, "read_frequent", lambda lines, keys: None)
    for text, found in zip(texts, together):
        assert found == list(told([text]))


def test_lines_of_a_server_are_read_together() -> None:
    """Of the frequent events, none is left to be read by itself."""
    text = b"".join(lines_of_a_trace(12))
    lines = Lines(text)
    read_frequent(lines, Places())
    left = {
        line.split(b'"')[7]
        for line, kind in zip(text.splitlines(), lines.ev.tolist())
        if kind in (UNREAD, NONE)
    }
    assert left and not left & {b"send", b"msg", b"drop"}


@pytest.mark.parametrize(
    "number", [0, 7, 10**8 - 1, 10**8, 10**16 - 1, 10**16]
)
def test_numbers_of_any_width(number: int) -> None:
    """Also those that are too long to be read together."""
    line = FREQUENT[0].replace(b"9", b"%d" % number, 1)
    line = line.replace(b'"m":5', b'"m":%d' % number)
    (piece,) = events.read_pieces([line * 2])
    assert list(piece.n) == piece.m.tolist() == [number, number]
