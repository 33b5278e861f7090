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
from .messages import schema_of

NUMBERED = ["recorder", "n"]  # which message it is
ORDER = [(name, "ascending") for name in ("host", "recorder", "n")]
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
    bad: dict[str, pa.ChunkedArray] = {}  # lines by their segments
    for segment in segments:
        try:
            rows = source.read(segment)
        except FileNotFoundError:
            continue  # another ingest has removed it
        except (InputError, OSError) as error:
            reason = str(error).removeprefix(f"{segment.path}: ")
            yield {"segment": segment.path, "fault": reason}
            continue

        messages = rows.filter(rows["corrupt"].is_null()).drop("corrupt")
        parts.append(messages)
        for numbers in ranges_of(messages) or [{}]:
            yield {"segment": segment.path, **numbers}
        lines = rows["corrupt"].drop_null()
        if segment.name in bad:  # another copy of it
            lines = lines.filter(pc.invert(pc.is_in(lines, bad[segment.name])))
            lines = pa.chunked_array(
                [*bad[segment.name].chunks, *lines.chunks]
            )
        bad[segment.name] = lines
    if parts:
        yield from write_messages(
            where, lacking(where, pa.concat_tables(parts))
        )
        yield from write_lines(where, bad)


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
    recorders = pc.unique(rows["recorder"])
    present = files.rows_in(
        where, near, NUMBERED, lambda x: pc.is_in(x["recorder"], recorders)
    )
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
    where: str, bad: dict[str, pa.ChunkedArray]
) -> Iterator[dict[str, Any]]:
    """Write the lines of segments that the quarantine lacks."""
    names = [name for name, lines in bad.items() for _ in lines]
    if not names:
        return
    aside = tables.aside(where)
    rows = pa.table(
        {
            "segment": names,
            "line": pa.concat_arrays(
                [x for y in bad.values() for x in y.chunks]
            ),
        }
    )
    near = files.files_of(tables.open_delta(aside))
    near = files.with_one_of(near, "segment", rows["segment"])
    present = files.rows_in(aside, near, rows.column_names)
    both = [
        pc.binary_join_element_wise(x["segment"], x["line"], "/")
        for x in (rows, present)
    ]
    new = rows.filter(pc.invert(pc.is_in(*both)))
    if len(new):
        today = datetime.datetime.now(UTC).date()
        file = files.write_file(aside, today, new, ["segment"])
        yield {"is_aside": True, **file}
