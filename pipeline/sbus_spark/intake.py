"""Intake: captures to tables, each message once.

A message is known by its recorder and its number.  A task reads segments, and
leaves out what the table has: Delta's log says which files have messages of
those times, recorders and numbers, which are few.  So it does no harm to look
at a segment twice, and what need not be looked at is only noted (`known`).

The driver adds all files in one commit.  Of two ingests that began with the
same snapshot Delta refuses the second, so that none adds what the other has.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import write_deltalake

from . import inputs, tables
from .captures import Capture, Segment
from .inputs import BusyError, InputError, absolute
from .known import Known
from .messages import read_lines, schema_of

Session = Any  # of Spark, or a function that starts one
ORDER = [(name, "ascending") for name in ("host", "recorder", "n")]
NUMBERED = ["recorder", "n"]  # which message it is
# Of these a file has the least and the greatest value in Delta's log
COUNTED = ("host", "recorder", "n", "time", "key", "size")
# What a task did.  A row is a file, of the table or of lines for the
# quarantine; or a segment that was read, and which numbers it has of a
# recorder; or one that was not, and why
OUTCOME = """
task long, path string, is_aside boolean, day string, rows long, bytes long,
stats string, segment string, recorder string, first long, last long,
fault string
"""
FOLLOW_SECONDS = 5.0
REST_SECONDS = 300.0  # after which nobody seems to copy a segment
LEFT_SECONDS = 3_600.0  # after which nobody seems to write a hidden segment
Batches = Iterator[pa.RecordBatch]


class Batch(NamedTuple):
    """What a round of an ingest did."""

    messages: int
    quarantined: int
    segments: int
    seconds: float  # that it took
    lag: float  # seconds since the oldest of its segments was written
    remarks: list[str]  # what is missing, or not whole


def ignore(_: Batch) -> None:
    """Do nothing."""


def ingest(
    spark: Session,
    capture: str,
    table: str,
    until: threading.Event | None = None,
    is_cleaning: bool = False,
    report: Callable[[Batch], object] = ignore,
) -> tuple[int, int]:
    """Add what a capture has and a table lacks, each line once.

    *spark* is a session, or starts one when there are new segments.  Those of
    a recorder may come in any order; *report* is called after each round, and
    names those that are missing.  With *until*, go on with segments that come
    later, until it is set.  With *is_cleaning*, remove segments that were in
    the table when a round begins, and that nobody has written for
    REST_SECONDS: others may be half copied.  Return how many messages were
    added to the table, and how many lines to the quarantine.
    Raises: PySparkException; InputError; without *until* BusyError, if
    another command is at work on the table.
    """
    source = Capture(capture)
    where = absolute(table)
    tables.make_table(where)
    messages = quarantined = 0
    while True:
        try:
            batch, is_done = ingest_once(spark, source, where, is_cleaning)
        except BusyError:
            if not until:
                raise
            continue  # what it wrote is in no snapshot
        messages += batch.messages
        quarantined += batch.quarantined
        report(batch)
        if is_done and (not until or until.wait(FOLLOW_SECONDS)):
            return messages, quarantined


def ingest_once(
    spark: Session, source: Capture, where: str, is_cleaning: bool
) -> tuple[Batch, bool]:
    """Do a round of an ingest; return also whether nothing is left for now.

    Raises: as ingest.
    """
    began = time.time()
    opened, bad_opened = (
        tables.open_table(where),
        tables.open_delta(tables.aside(where)),
    )
    segments, hidden = source.files()
    known = Known(where, opened)
    known.trust(segments)
    new = [segment for segment in segments if not known.has(segment)]
    if is_cleaning:
        for segment in segments:
            is_at_rest = segment.written < began - REST_SECONDS
            if is_at_rest and known.has(segment):
                source.remove(segment)

    outcomes: list[Any] = []
    if new:
        groups = source.groups(new)
        versions = opened.version(), bad_opened.version()
        work = functools.partial(do_task, source, where, versions, groups)
        outcomes = [*do_tasks(spark, work, len(groups))]
    late = late_tasks(outcomes)
    outcomes = [x for x in outcomes if x.task not in late]
    files = [x for x in outcomes if x.path and not x.is_aside]
    bad_files = [x for x in outcomes if x.path and x.is_aside]
    if bad_files:  # first: if it is killed then, the next one finds them
        tables.commit(
            tables.aside(where), bad_opened, bad_files, tables.INGEST
        )
    if files:
        tables.commit(where, opened, files, tables.INGEST)

    faults = {x.segment: x.fault for x in outcomes if x.fault}
    done = {x.segment for x in outcomes if x.segment and not x.fault}
    shrunk = [segment for segment in new if known.has_longer(segment)]
    known.add([segment for segment in new if segment.path in done])
    known.forget(source.folder, segments)
    if new:
        known.write()
    batch = Batch(
        sum(file.rows for file in files),
        sum(file.rows for file in bad_files),
        len(done),
        time.time() - began,
        began - min((x.written for x in new), default=began),
        remarks_on(known, faults, shrunk, hidden, began),
    )
    return batch, not late


def do_tasks(
    spark: Session, work: Callable[[Batches], Batches], count: int
) -> Sequence[Any]:
    """Do tasks by their numbers; return the rows of OUTCOME they yield."""
    session = spark() if callable(spark) else spark
    tasks = session.range(0, count, 1, count)
    return tasks.mapInArrow(work, OUTCOME).collect()


def late_tasks(outcomes: Sequence[Any]) -> set[int]:
    """Return the tasks that may have messages which others have as well.

    As of a copy under another name.  What they wrote is left out, and their
    segments are looked at in another round.
    """
    ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for x in outcomes:
        if x.recorder is not None:
            ranges[x.recorder].append((x.first, x.last, x.task))
    late: set[int] = set()
    for numbers in ranges.values():
        end = 0
        tasks = {task for _, _, task in numbers}
        for first, last, _ in sorted(numbers):
            if first <= end:
                late |= tasks - {min(tasks)}
            end = max(end, last)
    return late


def remarks_on(
    known: Known,
    faults: dict[str, str],
    shrunk: list[Segment],
    hidden: dict[str, float],
    now: float,
) -> list[str]:
    """Return in words what an ingest had to leave out."""
    remarks = known.gaps()
    remarks += [f"{path}: {faults[path]}" for path in sorted(faults)]
    for segment in shrunk:
        remarks.append(
            f"{segment.path}: it is smaller than when it was read; the table"
            " keeps what it had"
        )
    remedy = (
        "start a recorder on its host, or if that is gone, remove the dot from"
        " the name"
    )
    for path, written in sorted(hidden.items()):
        if now - written > LEFT_SECONDS:
            when = inputs.utc_text(written)
            remarks.append(f"{path}: left hidden since {when}: {remedy}")
    return remarks


# ==== Tasks ==================================================================


def do_task(
    source: Capture,
    where: str,
    versions: tuple[int, int],
    groups: list[list[Segment]],
    batches: Batches,
) -> Batches:
    """Write what some segments have and a table lacks; yield OUTCOMEs."""
    os.umask(0o077)  # what was recorded may be private
    for number in (n for batch in batches for n in batch[0].to_pylist()):
        for outcome in outcomes_of(source, where, versions, groups[number]):
            row = {"task": number, **outcome}
            yield pa.RecordBatch.from_pylist([row], schema_of(OUTCOME))


def outcomes_of(
    source: Capture,
    where: str,
    versions: tuple[int, int],
    segments: list[Segment],
) -> Iterator[dict[str, Any]]:
    """Write what some segments have and a table lacks; yield what was done.

    A segment that cannot be read stops no other.
    """
    parts = []
    for segment in segments:
        about = {"segment": segment.path}
        try:
            rows = source.read(segment)
        except FileNotFoundError:
            continue  # another ingest has removed it
        except (InputError, OSError) as error:
            reason = str(error).removeprefix(f"{segment.path}: ")
            yield {**about, "fault": reason}
            continue
        is_bad = rows["corrupt"].is_valid()
        parts.append(rows.filter(pc.invert(is_bad)).drop("corrupt"))
        runs = parts[-1].group_by("recorder", use_threads=False)
        ends = runs.aggregate([("n", "min"), ("n", "max")])
        ends = ends.rename_columns(["recorder", "first", "last"])
        for numbers in ends.to_pylist() or [{}]:
            yield {**about, **numbers}
        lines = rows["corrupt"].drop_null()
        yield from write_lines(where, versions[1], segment, lines)
    if parts:
        rows = lacking(where, versions[0], pa.concat_tables(parts))
        yield from write_messages(where, rows)


def lacking(where: str, version: int, rows: pa.Table) -> pa.Table:
    """Return the messages that a table lacked at a version, each once.

    A message has its time wherever it is copied, so that only files of these
    times are looked at.
    """
    if not len(rows):
        return rows
    files = tables.files_of(tables.open_table(where, version))
    for name in ("time", "recorder", "n"):
        files = tables.with_one_of(files, name, rows[name])
    n = pc.field("n")
    ends = pc.min_max(rows["n"])
    is_near = pc.field("recorder").isin(pc.unique(rows["recorder"]))
    is_near &= (n >= ends["min"]) & (n <= ends["max"])
    present = tables.rows_in(where, files, NUMBERED, is_near)
    both = pa.concat_tables([present, rows.select(NUMBERED)])
    both = both.append_column("at", pa.array(np.arange(len(both))))
    groups = both.group_by(NUMBERED, use_threads=False)
    first = groups.aggregate([("at", "min")])
    places = first["at_min"].to_numpy() - len(present)
    return rows.take(pa.array(places[places >= 0]))


def write_messages(where: str, rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Write messages to a file for each of their days."""
    days = rows["time"].cast(pa.date32())
    for day in pc.unique(days).to_pylist():
        of_day = rows.filter(pc.equal(days, day)).sort_by(ORDER)
        yield {
            "is_aside": False,
            **tables.write_file(where, day, of_day, COUNTED),
        }


def write_lines(
    where: str, version: int, segment: Segment, lines: Any
) -> Iterator[dict[str, Any]]:
    """Write lines that are no messages, and that the quarantine lacks."""
    if not len(lines):
        return
    where, name = tables.aside(where), os.path.basename(segment.path)
    files = tables.files_of(tables.open_delta(where, version))
    files = tables.with_one_of(files, "segment", pa.array([name]))
    is_same = pc.field("segment") == name
    present = tables.rows_in(where, files, ["line"], is_same)["line"]
    new = lines.filter(pc.invert(pc.is_in(lines, present)))
    if len(new):
        today = datetime.datetime.now(inputs.UTC).date()
        rows = pa.table({"segment": [name] * len(new), "line": new})
        file = tables.write_file(where, today, rows, ["segment"])
        yield {"is_aside": True, **file}


def as_rows(batches: Iterable[pa.RecordBatch]) -> list[Any]:
    """Return rows of OUTCOME as Spark does."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


# ==== Mended lines ===========================================================


def mend(table: str) -> tuple[int, int]:
    """Add the lines of the quarantine that are messages now.

    Return how many messages were added, and how many lines are left.
    Raises: PipelineError, as ingest.
    """
    where = absolute(table)
    tables.make_table(where)
    opened, quarantine = (
        tables.open_table(where),
        tables.open_delta(tables.aside(where)),
    )
    lines = quarantine.to_pyarrow_table()

    # A reason stands before the line, which begins with a brace.  A line feed
    # is no part of a line
    texts = [
        line[line.find("{") :].strip().replace("\n", "\\n")
        for line in lines["line"].to_pylist()
    ]
    mended = read_lines("".join(f"{text}\n" for text in texts).encode())
    is_bad = mended["corrupt"].is_valid()
    sound = mended.filter(pc.invert(is_bad)).drop("corrupt")
    rows = lacking(where, opened.version(), sound)

    # A kill between the two commits lets both be done again, to no effect
    files = [types.SimpleNamespace(**x) for x in write_messages(where, rows)]
    if files:
        tables.commit(where, opened, files, tables.INGEST)
    if len(sound):
        left = lines.filter(is_bad)
        write_deltalake(quarantine, left, mode="overwrite")
    return len(rows), len(lines) - len(sound)
