"""Tasks: what executors do for an ingest.

A task reads segments, and leaves out the messages that the table has: the
statistics of its files say which files have messages of those times, recorders
and numbers, mostly none.  It writes the others to new files, which are in the
table once the driver commits them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from . import files, tables
from .captures import Capture, Segment
from .inputs import UTC, InputError
from .messages import NUMBERED, ORDER, schema_of

# Of these a file has the least and the greatest value in Delta's log
COUNTED = ("host", "recorder", "n", "time", "key", "size")
# What a task did.  A row is a file, of the table or of lines for the
# quarantine (*is_aside*); or a segment that was read, and which numbers it has
# of a recorder; or one that was not, and why
OUTCOME = """
task long, path string, is_aside boolean, day string, rows long, bytes long,
stats string, segment string, recorder string, first long, last long,
fault string
"""
Batches = Iterator[pa.RecordBatch]


def do_task(
    source: Capture, where: str, groups: list[list[Segment]], batches: Batches
) -> Batches:
    """Do the tasks of some numbers, each for a group of segments.

    Yield OUTCOMEs.
    """
    os.umask(0o077)  # what was recorded may be private
    for batch in batches:
        for task in batch["id"].to_pylist():
            for outcome in add_segments(source, where, groups[task]):
                row = {"task": task, **outcome}
                yield pa.RecordBatch.from_pylist([row], schema_of(OUTCOME))


def add_segments(
    source: Capture, where: str, segments: list[Segment]
) -> Iterator[dict[str, Any]]:
    """Write what some segments have and a table lacks; yield what was done.

    A segment that cannot be read stops no other.
    """
    parts = []
    bad: dict[tuple[str, str], None] = {}  # lines of segments, each once
    for segment in segments:
        try:
            rows = source.read(segment)
        except FileNotFoundError:  # another ingest has removed it
            continue
        except (InputError, OSError) as error:
            reason = str(error).removeprefix(f"{segment.path}: ")
            yield {"segment": segment.path, "fault": reason}
            continue

        messages = rows.filter(rows["corrupt"].is_null()).drop("corrupt")
        parts.append(messages)
        for numbers in ranges_of(messages) or [{}]:
            yield {"segment": segment.path, **numbers}
        lines = rows["corrupt"].drop_null().to_pylist()
        bad |= dict.fromkeys((segment.name, line) for line in lines)
    if parts:
        rows = lacking(where, pa.concat_tables(parts))
        yield from write_messages(where, rows)
        yield from write_lines(where, [*bad])


def ranges_of(messages: pa.Table) -> list[dict[str, Any]]:
    """Return the first and last number of each recorder."""
    runs = messages.group_by("recorder", use_threads=False)
    ends = runs.aggregate([("n", "min"), ("n", "max")])
    ends = ends.rename_columns(["recorder", "first", "last"])
    return list(ends.to_pylist())


def lacking(where: str, rows: pa.Table) -> pa.Table:
    """Return the messages that a table lacks, each once.

    A message has its time wherever it is copied, so that only files of these
    times are looked at.
    """
    if not len(rows):
        return rows
    near = files.files_of(tables.open_table(where))
    for name in ("time", *NUMBERED):
        near = files.with_one_of(near, name, rows[name])
    of_these = pc.field("recorder").isin(pc.unique(rows["recorder"]))
    present = files.rows_in(where, near, NUMBERED, of_these)
    both = pa.concat_tables([present, rows.select(NUMBERED)])
    both = both.append_column("at", pa.array(np.arange(len(both))))
    groups = both.group_by(NUMBERED, use_threads=False)
    first_at = groups.aggregate([("at", "min")])["at_min"].to_numpy()
    new_at = first_at[first_at >= len(present)] - len(present)
    return rows.take(pa.array(new_at))


def write_messages(where: str, rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Write messages to a file for each of their days."""
    days = rows["time"].cast(pa.date32())
    for day in pc.unique(days).to_pylist():
        of_day = rows.filter(pc.equal(days, day)).sort_by(ORDER)
        file = files.write_file(where, day, of_day, COUNTED)
        yield {"is_aside": False, **file}


def write_lines(
    where: str, bad: list[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Write the lines of segments that the quarantine lacks."""
    if not bad:
        return
    aside = tables.aside(where)
    near = files.files_of(tables.open_delta(aside))
    names = pa.array([name for name, _ in bad])
    near = files.with_one_of(near, "segment", names)
    rows = files.rows_in(aside, near, ["segment", "line"]).to_pydict()
    present = {*zip(rows["segment"], rows["line"])}
    new = [pair for pair in bad if pair not in present]
    if new:
        today = datetime.datetime.now(UTC).date()
        rows = pa.table([*zip(*new)], ["segment", "line"])
        file = files.write_file(aside, today, rows, ["segment"])
        yield {"is_aside": True, **file}
