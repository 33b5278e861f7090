"""Repairs: what an operator does once, when ingest alone cannot.

`ingest --again` takes in what was left out and is sound now; `convert` turns
a table of version 0.2 into one of this version.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import types
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import DeltaTable, write_deltalake
from pyarrow import fs
from pyspark.sql.datasource import InputPartition

from .inputs import InputError, absolute
from .marks import Marks, marks_of, news
from .messages import read_lines, schema_of
from .source import Capture
from .table import (
    QUARANTINE,
    commit,
    dataset_of,
    files_of,
    is_ours,
    open_table,
    settle,
    write_messages,
)

AGAIN = "/again"  # a mark: two of these at once are refused


def ingest_again(capture: str, table: str) -> tuple[int, int]:
    """Add what is sound now: mended lines, the rest of grown segments.

    A message that the table has already, by its recorder and number, is not
    added.  Return how many messages were added, and how many lines are left
    in the quarantine.  Raises: as open_table.
    """
    where = absolute(table)
    opened = open_table(table)
    log = settle(where, opened)
    source = Capture({"path": capture, "columnNameOfCorruptRecord": "bad"})
    grown = [
        piece
        for piece in news(source.segments(), log).grown
        if source.is_whole(piece)
    ]
    aside = DeltaTable(f"{where}/_quarantine")
    lines = aside.to_pyarrow_table()
    # A reason stands before the line, which begins with a brace
    texts = [line[line.find("{") :] for line in lines["line"].to_pylist()]
    mended = read_lines("".join(f"{x}\n" for x in texts).encode())
    is_bad = mended["corrupt"].is_valid()

    tables = [mended.filter(pc.invert(is_bad)).drop("corrupt")]
    left = lines.filter(is_bad)
    for piece in grown:
        rows = pa.Table.from_batches(source.read(InputPartition([piece])))
        tables.append(rows.filter(rows["bad"].is_null()).drop("bad"))
        bad = rows["bad"].drop_null()
        new = bad.filter(pc.invert(pc.is_in(bad, lines["line"])))
        left = pa.concat_tables([left, lines_aside(piece.path, new)])
    rows = not_in(where, opened, pa.concat_tables(tables))

    # A kill between the two commits lets both be done again, to no effect
    files = [
        types.SimpleNamespace(**row)
        for batch in write_messages(where, rows)
        for row in batch.to_pylist()
    ]
    sizes = {os.path.basename(piece.path): piece.end for piece in grown}
    commit(where, opened, files, {AGAIN: opened.version()}, sizes)
    if left != lines:
        write_deltalake(aside, left, mode="overwrite")
    return len(rows), len(left)


def not_in(where: str, opened: DeltaTable, rows: pa.Table) -> pa.Table:
    """Return the messages that a table does not have, each once."""
    days = pc.unique(rows["time"].cast(pa.date32())).to_pylist()
    paths = [x["path"] for x in files_of(opened) if x["partition.day"] in days]
    recorders = pc.unique(rows["recorder"])
    there = dataset_of(where, paths).to_table(
        ["recorder", "n"], filter=pc.field("recorder").isin(recorders)
    )
    names = {*zip(there["recorder"].to_pylist(), there["n"].to_pylist())}
    is_new = []
    for name in zip(rows["recorder"].to_pylist(), rows["n"].to_pylist()):
        is_new.append(name not in names)
        names.add(name)
    return rows.filter(pa.array(is_new, pa.bool_()))


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
    if not is_ours(opened):
        raise InputError(f"{table}: it is no table that `ingest` made")
    quarantine = f"{where}/_quarantine"
    aside = DeltaTable(quarantine)
    with files.open_input_file(f"{checkpoint}/metadata") as file:
        name = json.loads(file.read())["id"]

    # A batch is in the table once Spark says so, or the table itself does
    done = files.get_file_info(fs.FileSelector(f"{checkpoint}/commits"))
    numbers = [int(x.base_name) for x in done if x.base_name.isdigit()]
    in_table = max(numbers + [batch_of(opened, name)], default=-1)
    in_aside = max(in_table, batch_of(aside, name))

    if "day" not in aside.schema().to_arrow().names:
        lines = aside.to_pyarrow_table()["line"]
        write_deltalake(
            aside,
            lines_aside("", lines),
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=["day"],
        )
        aside = DeltaTable(quarantine)
    marks = marks_at(files, f"{checkpoint}/offsets/{in_table}")
    commit(
        quarantine,
        aside,
        [],
        marks_at(files, f"{checkpoint}/offsets/{in_aside}"),
    )
    commit(where, opened, [], marks)
    files.delete_dir(checkpoint)
    opened.update_incremental()
    commit(where, opened, [], {name: 0})  # no recorder run has that name
    return sum("/" not in recorder for recorder in marks)


def batch_of(opened: DeltaTable, name: str) -> int:
    """Return the last batch of a query that a table has; -1 for none."""
    number = opened.transaction_version(name)
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


def lines_aside(path: str, lines: Any) -> pa.Table:
    """Return lines as rows of the quarantine, of today."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    segment = os.path.basename(path)
    columns = [[segment] * len(lines), lines, [today] * len(lines)]
    arrays = [
        pa.chunked_array([column], field.type)
        if isinstance(column, list)
        else column
        for column, field in zip(columns, schema_of(QUARANTINE))
    ]
    return pa.table(arrays, schema_of(QUARANTINE))
