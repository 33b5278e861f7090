"""Marks: which segments of each recorder a table has, told in its own log.

Number 1 is the first, always.  Segments may come in any order, so that the
table has a set of them.  A commit that adds segments sets marks in Delta's log
(transaction identifiers), of which the latest of each name counts:

| mark | value | meaning |
|---|---|---|
| RECORDER | N | the table has the segments 1 to N; 0 if 1 is missing |
| RECORDER/FIRST | LAST | it also has those: behind a gap, now or once |
| RECORDER/since | milliseconds | when the first gap that it has was found |

Whoever adds a segment sets RECORDER.  Of two that began with the same table,
Delta refuses the commit that comes second.
"""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import DeltaTable
from pyarrow import fs

from .messages import parse_lines
from .source import Piece, Segments

LOG = re.compile(r"(\d{20})(\.checkpoint.*\.parquet|\.json)")
MARK = pa.struct({"appId": pa.string(), "version": pa.int64()})
ACTION = pa.schema({"txn": MARK})  # or another, and then null
SHOWN_MAX = 5  # gaps of a recorder
Marks = dict[str, int]


class News(NamedTuple):
    """What a capture has for a table."""

    new: list[Piece]
    known: list[Piece]  # what the table has
    marks: Marks  # to set when the new ones are added
    gaps: list[str]  # what is missing then, in words


def marks_in(where: str, version: int) -> Marks:
    """Return the marks in a version of a table.

    deltalake looks up one by its name, and reads the log each time.
    """
    files, folder = fs.FileSystem.from_uri(where)
    listing = files.get_file_info(fs.FileSelector(f"{folder}/_delta_log"))
    found = [LOG.fullmatch(one.base_name) for one in listing]
    log = sorted((int(x[1]), x[2], x[0]) for x in found if x)
    log = [one for one in log if one[0] <= version]
    base = max((at for at, kind, _ in log if kind != ".json"), default=-1)
    marks: Marks = {}
    for at, kind, name in log:
        path = f"{folder}/_delta_log/{name}"
        told = []
        if kind == ".json" and at > base:
            with files.open_input_file(path) as file:
                actions = parse_lines(file.read().rstrip() + b"\n", ACTION)
            told = [x["txn"] for some in actions for x in some.to_pylist()]
        elif kind != ".json" and at == base:
            table = pq.read_table(path, columns=["txn"], filesystem=files)
            told = table["txn"].to_pylist()
        marks |= {one["appId"]: one["version"] for one in told if one}
    return marks


def news(segments: Segments, marks: Marks) -> News:
    """Return what a capture has for a table with marks."""
    found = News([], [], {}, [])
    bounds = bounds_in(marks)
    for recorder, files in sorted(segments.items()):
        before = bounds.get(recorder, [])
        after = {*before}
        for number, piece in sorted(files.items()):
            if bisect.bisect(before, number) % 2:
                found.known.append(piece)
            else:
                found.new.append(piece)
                after ^= {number, number + 1}
        since = marks.get(f"{recorder}/since", 0)
        if after != {*before}:
            told = marks_of(recorder, sorted(after))
            if gaps_of(after) and not gaps_of(before):
                since = time.time_ns() // 1_000_000
                told[f"{recorder}/since"] = since
            for name, value in told.items():
                if name == recorder or marks.get(name) != value:
                    found.marks[name] = value
        if gaps_of(after):
            found.gaps.append(describe(recorder, after, since))
    return found


def bounds_in(marks: Marks) -> dict[str, list[int]]:
    """Return the bounds of each recorder's segments.

    They are a number at which segments that a table has begin, the one at
    which they cease, the one at which they begin again, and so on.
    """
    found: dict[str, list[int]] = {}
    ranges = []
    for name, last in marks.items():
        recorder, _, first = name.partition("/")
        if first != "since":
            ranges.append((recorder, int(first or 1), last + 1))
    for recorder, first, end in sorted(ranges):
        own = found.setdefault(recorder, [])
        if own and first <= own[-1]:
            own[-1] = max(own[-1], end)
        elif first < end:
            own += first, end
    return found


def marks_of(recorder: str, bounds: list[int]) -> Marks:
    """Return the marks of bounds."""
    ranges = zip(bounds[::2], bounds[1::2])
    marks = {f"{recorder}/{first}": end - 1 for first, end in ranges}
    return {recorder: marks.pop(f"{recorder}/1", 0), **marks}


def gaps_of(bounds: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last numbers of what is missing before others."""
    edges = sorted({1} ^ {*bounds})
    return [(one, two - 1) for one, two in zip(edges[::2], edges[1::2])]


def describe(recorder: str, bounds: Iterable[int], since: int) -> str:
    """Return in words which segments are missing."""
    gaps = gaps_of(bounds)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:SHOWN_MAX]]
    shown += [f"{len(gaps) - SHOWN_MAX} more gaps"] * (len(gaps) > SHOWN_MAX)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since // 1_000))
    return f"{recorder}: missing since {when}: segment {', '.join(shown)}"
