"""Repairs: what an operator does once, when ingest alone cannot.

`ingest --again` takes in what was left out and is sound now; `convert` turns
a table of version 0.2 into one of this version.
"""

from __future__ import annotations

import json
import os
import time

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import DeltaTable, write_deltalake
from pyarrow import fs

from . import table as tables
from .inputs import InputError, absolute
from .marks import Marks, marks_of, news
from .messages import read_lines
from .source import Capture

AGAIN = "/again"  # a mark: of two of these at once, Delta refuses the second


def ingest_again(capture: str, table: str) -> tuple[int, int]:
    """Add what is sound now: mended lines, the rest of grown segments.

    A message that the table has already, by its recorder and number, is not
    added, nor one of a day that has expired.  Return how many messages were
    added, and how many lines are left in the quarantine.
    Raises: PipelineError, as ingest.
    """
    source = Capture(tables.bad_lines_of(capture))
    where = absolute(table)
    tables.make_table(where)
    opened = DeltaTable(where)
    log = tables.settle(where, opened)
    arrivals = news(source.segments(), log)
    old = tables.unfinished(where, log, source, arrivals.known)
    grown = arrivals.grown + [x for x in old if len(source.last_message(x))]
    grown = list(filter(source.is_whole, grown))
    quarantine = DeltaTable(f"{where}/_quarantine")
    lines = quarantine.to_pyarrow_table()

    # A reason stands before the line, which begins with a brace.  A line feed
    # is no part of a line
    texts = [
        line[line.find("{") :].strip().replace("\n", "\\n")
        for line in lines["line"].to_pylist()
    ]
    mended = read_lines("".join(f"{text}\n" for text in texts).encode())
    is_bad = mended["corrupt"].is_valid()
    parts = [mended.filter(pc.invert(is_bad)).drop("corrupt")]
    left = lines.filter(is_bad)

    sizes = {}
    for segment in grown:
        messages, bad = tables.read_segment(source, segment)
        parts.append(messages)
        new = bad.filter(pc.invert(pc.is_in(bad, lines["line"])))
        left = pa.concat_tables([left, tables.lines_aside(segment.path, new)])
        sizes[os.path.basename(segment.path)] = segment.size
    rows = tables.not_in(where, log, pa.concat_tables(parts))

    # A kill between the two commits lets both be done again, to no effect
    files = tables.rows_in(tables.write_messages(where, rows))
    tables.commit(where, opened, files, {AGAIN: opened.version()}, sizes)
    if left != lines:
        write_deltalake(quarantine, left, mode="overwrite")
    return len(rows), len(left)


def convert(table: str) -> int:
    """Turn a table of version 0.2 into one of this version.

    Its `_checkpoint` says which segments it has: for each recorder run the
    first, and the one that comes next.  It goes last, so that after a kill
    this can be done again.  Return how many recorder runs the table has.
    Raises: InputError if it is no table of 0.2.
    """
    where = absolute(table)
    files, folder = fs.FileSystem.from_uri(where)
    checkpoint = f"{folder}/_checkpoint"
    if files.get_file_info(checkpoint).type != fs.FileType.Directory:
        raise InputError(f"{table}: it is not of 0.2: it has no _checkpoint")
    opened = DeltaTable(where)
    tables.check_is_ours(table, opened)
    quarantine = DeltaTable(f"{where}/_quarantine")
    with files.open_input_file(f"{checkpoint}/metadata") as file:
        query = json.loads(file.read())["id"]

    # A batch is in the table once Spark says so, or the table itself does
    commits = files.get_file_info(fs.FileSelector(f"{checkpoint}/commits"))
    numbers = [int(x.base_name) for x in commits if x.base_name.isdigit()]
    in_table = max([*numbers, batch_of(opened, query)])
    in_quarantine = max(in_table, batch_of(quarantine, query))

    if "day" not in quarantine.schema().to_arrow().names:
        write_deltalake(
            quarantine,
            tables.lines_aside("", quarantine.to_pyarrow_table()["line"]),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=["day"],
        )
        quarantine.update_incremental()
    bad_marks = marks_at(files, f"{checkpoint}/offsets/{in_quarantine}")
    tables.commit(f"{where}/_quarantine", quarantine, [], bad_marks)
    marks = marks_at(files, f"{checkpoint}/offsets/{in_table}")
    tables.commit(where, opened, [], marks)
    files.delete_dir(checkpoint)
    opened.update_incremental()
    tables.commit(
        where, opened, [], {query: 0}
    )  # no recorder run has that name
    return sum("/" not in recorder for recorder in marks)


def batch_of(opened: DeltaTable, query: str) -> int:
    """Return the last batch of a query that a table has; -1 for none."""
    number = opened.transaction_version(query)
    return -1 if number is None else number


def marks_at(files: fs.FileSystem, path: str) -> Marks:
    """Return the marks that an offset of version 0.2 stands for."""
    if path.endswith("/-1"):
        return {}
    with files.open_input_file(path) as file:
        offset = json.loads(file.read().splitlines()[2])
    marks: Marks = {}
    for recorder, (first, next_number, _) in offset.items():
        if first < next_number:
            marks |= marks_of(recorder, [max(first, 1), next_number])
        if first > 1:
            marks[f"{recorder}/since"] = time.time_ns() // 1_000_000
    return marks
