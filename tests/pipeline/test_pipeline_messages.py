"""Tests of which lines are messages, without Spark."""

from __future__ import annotations

import base64
import random
import re
from typing import Any

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from sbus_spark.messages import SCHEMA, read_lines


def line(**fields: Any) -> str:
    """Return a line of a capture, with some members changed."""
    return capture_line(7, **fields).strip()


BASE64 = re.compile(r"([\w+/]{4})*([\w+/]{2}==|[\w+/]{3}=)?")
ONE = line()
DEEP = "[" * 9_000 + "]" * 9_000  # more than Python's own reader takes
GOOD = [
    *(ONE, line(key=""), line(key="\xff/}\n{"), line(rec="", host="\0é")),
    *(line(t=0), line(t=(1 << 63) - 1), line(size=0, data=""), line(x="}{")),
    *(line(data=None), line(size=0, data=None)),
    *(line(size=1, data="eB=="), line(n=(1 << 63) - 1), line(x=float("nan"))),
    *(ONE.replace("}", f', "x": {DEEP}}}'), ONE.replace(" ", "\r")),
]
NO_OBJECT = [
    *("", "null", "{}", "5", f"[{ONE}]", "{", "}", '{"x": [1]}', ONE + ONE),
    *(f"{ONE} {ONE}", f"{ONE} null {ONE}", ONE[:20], ONE[20:], f"{ONE},"),
    *(f"{ONE} ", f" {ONE}", f"{ONE}\r", f"x{ONE}", f"\ufeff{ONE}"),
    *('{"rec": "}', '{"}', '{"n": 1, ' + ONE[1:], ONE.replace('"k', '"\t')),
    *(ONE.replace(text, "\udcff") for text in ("R", "k/", "eH", "h")),
    *(line(n=n) for n in (1.0, True, "1", 1 << 63)),
    *(line(key=5), line(key="\ud800"), line(data=[])),
]
WRONG = {
    "it is no JSON object of the right types": NO_OBJECT,
    "there is no rec": [line(rec=None), ONE.replace("rec", "Rec")],
    "n is below 1": [line(n=0), line(n=-1), line(n=-(1 << 63))],
    "t is below 0": [line(t=-1)],
    "size is below 0": [line(size=-1, data=None)],
    "key is not of bytes": [line(key="\0"), line(key="a\u0100")],
    "size is not that of data": [line(size=8), line(size=-1, data="")],
    "data is not base64": [line(size=6), line(data=""), line(data="eHh4eHhé")],
}
LINES = {
    line: why for why, some in {"": GOOD, **WRONG}.items() for line in some
}


def found_in(*lines: str) -> list[dict[str, Any]]:
    """Return what read_lines finds, if Arrow finds that sound."""
    text = "\n".join([*lines, ""])
    rows = read_lines(text.encode("utf-8", "surrogateescape"))
    rows.validate(full=True)
    return list(rows.to_pylist())


def test_each_line_that_is_no_message_has_a_reason() -> None:
    """It stands before the line, whose stray bytes are shown."""
    for text, why in LINES.items():
        (row,) = found_in(text)
        shown = text.replace("\udcff", "\\xff")
        assert row["corrupt"] == (f"{why}: {shown}" if why else None)


def test_what_stands_beside_a_line_changes_nothing() -> None:
    """Many lines are read as each of them alone."""
    alone = {text: found_in(text) for text in LINES}
    chosen = random.Random(1)
    for _ in range(200):
        lot = chosen.choices([ONE, *LINES], [200, *[1] * len(LINES)], k=40)
        assert found_in(*lot) == [row for text in lot for row in alone[text]]


def test_payloads_are_what_a_strict_decoder_takes() -> None:
    """Of whatever could be base64."""
    chosen = random.Random(2)
    for _ in range(900):
        text = "".join(chosen.choices("Az9+/==- ", k=8))
        rows = found_in(*(line(size=n, data=text) for n in range(7)))
        payloads = [row["payload"] for row in rows if not row["corrupt"]]
        wanted = [base64.b64decode(text)] if BASE64.fullmatch(text) else []
        assert payloads == wanted, text


def test_a_message_has_the_columns() -> None:
    """A code point of a key is a byte, and a time has microseconds."""
    (row,) = found_in(line(key="Ã©", t=1_763_717_053_123_456_789))
    assert list(row) == [*SCHEMA.names, "corrupt"]
    assert row["time"].timestamp() == 1_763_717_053.123456
    wanted = "h", "R", 7, row["time"], "Ã©", "é".encode(), 7, b"xxxxxxx"
    assert tuple(row.values()) == (*wanted, None)
