"""Marks: which segments of each recorder a table has, told in its own log.

Number 1 is the first, always.  Segments may come in any order, so that the
table has a set of them.  A commit that adds segments sets marks in Delta's log
(transaction identifiers), of which the latest of each name counts:

| mark | value | meaning |
|---|---|---|
| RECORDER | N | the table has the segments 1 to N; 0 if 1 is missing |
| RECORDER/FIRST | LAST | it also has those: behind a gap, now or once |
| RECORDER/since | milliseconds | when the first gap that it has was found |
| /compacted | milliseconds | when the table was compacted |
| /expired | a day's number | days before it were dropped (1 is 0001-01-01) |

Every commit that adds segments of a recorder sets its mark RECORDER.  Of two
that began with the same table, Delta refuses the commit that comes second.
The commit also notes how many bytes each segment had, so that one that was
read while it was half copied is noticed.

Delta's RESTORE removes rows and leaves marks.  So the marks that count after
it are those of the version that was restored.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import fs

from .inputs import InputError, utc_text
from .source import Segment, Segments

CHECKPOINT = re.compile(r"(\d{20})\.checkpoint.*\.parquet")
SHOWN_MAX = 5  # gaps of a recorder
SIZES_COMMITS = 20  # after which a segment that was half copied is whole
COMPACTED = "/compacted"
EXPIRED = "/expired"
Marks = dict[str, int]


class Log(NamedTuple):
    """What the log of a table says up to a version."""

    version: int
    marks: Marks  # that count
    written: Marks  # that Delta has: they differ after a RESTORE
    sizes: dict[str, int]  # bytes that segments had when they were read


class Commit(NamedTuple):
    """What a commit says."""

    marks: Marks
    sizes: dict[str, int]
    restored: str  # the version that it restores, or ""


class News(NamedTuple):
    """What a capture has for a table."""

    new: list[Segment]
    known: list[Segment]  # what the table has
    torn: list[Segment]  # new, and they end within a line, so they wait
    grown: list[Segment]  # the table has only their beginning
    marks: Marks  # to set when the new ones are added
    gaps: list[str]  # which segments are missing then, in words


# ==== The log of a table =====================================================


def read_log(where: str, version: int, log: Log | None = None) -> Log:
    """Return what the log of a table says up to a version.

    It reads on from an older *log*, or from the latest checkpoint.
    Raises: InputError after a RESTORE if the log no longer tells what that
    version had.
    """
    files, folder = fs.FileSystem.from_uri(f"{where}/_delta_log")
    is_known = log is not None
    commits: list[Commit] = []
    if log is None:
        log, commits = read_checkpoint(files, folder, version)
    for number in range(log.version + len(commits) + 1, version + 1):
        commit = read_commit(files, folder, number)
        if commit is None and is_known:  # it was cleaned up meanwhile
            return read_log(where, version)
        if commit is None:
            raise InputError(
                f"{where}: its log no longer has commit {number}, so what"
                f" version {version} has is not known: ingest the capture"
                " into another table"
            )
        commits.append(commit)

    marks, written, sizes = dict(log.marks), dict(log.written), dict(log.sizes)
    for commit in commits:
        written |= commit.marks
        marks |= commit.marks
        sizes |= commit.sizes
        if commit.restored.isdigit():
            restored = read_log(where, int(commit.restored))
            marks, sizes = dict(restored.marks), dict(restored.sizes)
        elif commit.restored:
            raise InputError(
                f"{where}: it was restored to a time: restore it once more, to"
                " a version by its number, which says what it has"
            )
    return Log(version, marks, written, sizes)


def read_checkpoint(
    files: fs.FileSystem, folder: str, version: int
) -> tuple[Log, list[Commit]]:
    """Return the log up to a commit, and the commits up to the checkpoint.

    A checkpoint may hide a RESTORE that no ingest has seen yet.
    """
    base = -1
    paths: list[str] = []  # of the latest checkpoint
    for file in files.get_file_info(fs.FileSelector(folder)):
        match = CHECKPOINT.fullmatch(file.base_name)
        if match and base <= int(match[1]) <= version:
            if base < int(match[1]):
                paths.clear()
            base = int(match[1])
            paths.append(file.path)
    marks: Marks = {}
    for path in paths:
        rows = pq.read_table(path, columns=["txn"], filesystem=files)
        for mark in rows["txn"].drop_null().to_pylist():
            marks[mark["appId"]] = mark["version"]

    # The newest first: those after the last one with marks may be a RESTORE
    commits: list[Commit] = []
    sizes: dict[str, int] = {}
    is_settled = False
    number = base
    while number >= 0:
        commit = read_commit(files, folder, number)
        if commit is None or (is_settled and base - number >= SIZES_COMMITS):
            break
        sizes = commit.sizes | sizes
        is_settled = is_settled or bool(commit.marks)
        number -= 1
        if not is_settled:
            commits.insert(0, commit)
        elif commit.restored.isdigit():  # what is between was undone
            number = int(commit.restored)
    return Log(base - len(commits), marks, marks, sizes), commits


def read_commit(
    files: fs.FileSystem, folder: str, number: int
) -> Commit | None:
    """Return what a commit says; None if the log no longer has it."""
    path = f"{folder}/{number:020}.json"
    try:
        with files.open_input_file(path) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    marks: Marks = {}
    about: dict[str, Any] = {}
    try:
        for line in text.splitlines() or [b""]:
            action = json.loads(line)
            if mark := action.get("txn"):
                marks[mark["appId"]] = mark["version"]
            about = action.get("commitInfo", about)
    except ValueError:
        raise InputError(
            f"{path}: it is no commit of Delta, as after a full disk: if it is"
            " the last one, remove it"
        ) from None
    restored = ""
    if about.get("operation") == "RESTORE":
        restored = str(about["operationParameters"].get("version"))
    return Commit(marks, about.get("sizes") or {}, restored)


def corrections(log: Log) -> Marks:
    """Return the marks to set so that Delta has those that count."""
    marks = {name: log.marks.get(name, empty(name)) for name in log.written}
    return {x: marks[x] for x in marks if marks[x] != log.written[x]}


def empty(name: str) -> int:
    """Return the value with which a mark says that there is nothing."""
    first = name.rpartition("/")[2]
    return int(first) - 1 if "/" in name and first.isdigit() else 0


# ==== What is new ============================================================


def news(
    segments: Segments,
    log: Log,
    is_whole: Callable[[Segment], bool] = lambda _: True,
) -> News:
    """Return what a capture has for a table."""
    arrivals = News([], [], [], [], {}, [])
    all_bounds = bounds_in(log.marks)
    for recorder, numbered in sorted(segments.items()):
        before = all_bounds.get(recorder, [])
        after = {*before}
        for number, segment in sorted(numbered.items()):
            name = os.path.basename(segment.path)
            is_in_table = bisect.bisect(before, number) % 2 == 1
            if is_in_table and log.sizes.get(name, math.inf) < segment.size:
                arrivals.grown.append(segment)
            elif is_in_table:
                arrivals.known.append(segment)
            elif is_whole(segment):
                arrivals.new.append(segment)
                # A bound that is there already is one no more: ranges merge
                after ^= {number, number + 1}
            else:
                arrivals.torn.append(segment)

        since = log.marks.get(f"{recorder}/since", 0)
        if after != {*before}:
            marks = marks_of(recorder, sorted(after))
            if gaps_of(after) and not gaps_of(before):
                since = time.time_ns() // 1_000_000
                marks[f"{recorder}/since"] = since
            for name, value in marks.items():
                if name == recorder or log.marks.get(name) != value:
                    arrivals.marks[name] = value
        if gaps_of(after):
            arrivals.gaps.append(describe(recorder, after, since))
    return arrivals


def bounds_in(marks: Marks) -> dict[str, list[int]]:
    """Return the bounds of each recorder's segments.

    They are a number at which segments that a table has begin, the one at
    which they cease, the one at which they begin again, and so on.
    """
    ranges = []
    for name, last in marks.items():
        recorder, _, first = name.partition("/")
        if recorder and first != "since":
            ranges.append((recorder, int(first or 1), last + 1))

    all_bounds: dict[str, list[int]] = {}
    for recorder, begin, end in sorted(ranges):
        bounds = all_bounds.get(recorder, [])
        if bounds and begin <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        elif begin < end:
            all_bounds[recorder] = [*bounds, begin, end]
    return all_bounds


def marks_of(recorder: str, bounds: list[int]) -> Marks:
    """Return the marks of bounds."""
    ranges = zip(bounds[::2], bounds[1::2])
    marks = {f"{recorder}/{first}": end - 1 for first, end in ranges}
    return {recorder: marks.pop(f"{recorder}/1", 0), **marks}


def gaps_of(bounds: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last numbers of what is missing before others."""
    edges = sorted({1} ^ {*bounds})
    return [(first, end - 1) for first, end in zip(edges[::2], edges[1::2])]


def describe(recorder: str, bounds: Iterable[int], since: int) -> str:
    """Return in words which segments are missing."""
    gaps = gaps_of(bounds)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:SHOWN_MAX]]
    if len(gaps) > SHOWN_MAX:
        shown.append(f"{len(gaps) - SHOWN_MAX} more gaps")
    when = utc_text(since / 1_000)
    return f"{recorder}: missing since {when}: segment {', '.join(shown)}"
