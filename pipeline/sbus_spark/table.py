"""Tables: ingest makes them; read_table and replay read them.

A table is a Delta table in folders of days: the columns of `messages`, and
`day`.  Another one, `_quarantine`, has the lines that were no messages.

The table itself knows what is in it: a commit adds the rows of new segments,
and the marks that say so.  Both are in the log, or neither is.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql import DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import InputPartition

from .inputs import InputError, PipelineError, absolute
from .marks import marks_in, news
from .matching import selects
from .messages import COLUMNS, READ, schema_of
from .source import Capture, register

TABLE, BAD = f"{COLUMNS}, day date", "line string"
ORDER = [(name, "ascending") for name in ("host", "recorder", "n")]
WRITTEN = "path string, day string, rows long, bytes long"
READERS_HOURS = 24  # for which a reader may use a snapshot
LOG = {"delta.logRetentionDuration": f"interval {READERS_HOURS} hours"}
REPLAYED = ("time", "host", "recorder", "n")  # the order of a replay
FOLLOW_SECONDS = 5.0
Batches = Iterator[pa.RecordBatch]
# Does tasks by their numbers; returns the rows of WRITTEN that they yield
Doer = Callable[[Callable[[Batches], Batches], int], Sequence[Any]]


def ingest(
    spark: SparkSession,
    capture: str,
    table: str,
    until: threading.Event | None = None,
    is_cleaning: bool = False,
    note: Callable[[str], object] = id,
) -> tuple[int, int]:
    """Add new segments of a capture to a table, each line once.

    Those of a recorder may come in any order; *note* is told which ones are
    missing.  With *until*, go on with segments that come later, until it is
    set.  With *is_cleaning*, remove segments that were in the table already.
    Return how many messages were added to the table, and how many lines to
    the quarantine.
    Raises: PySparkException; PipelineError if another ingest is at work.
    """
    do = functools.partial(do_in_spark, lambda: spark)
    return ingest_by(do, capture, table, until, is_cleaning, note)


def do_in_spark(
    start: Callable[[], SparkSession],
    work: Callable[[Batches], Batches],
    count: int,
) -> Sequence[Row]:
    """Do tasks in a session, which starts when there are some."""
    tasks = start().range(0, count, 1, count)
    return tasks.mapInArrow(work, WRITTEN).collect()


def ingest_by(
    do: Doer,
    capture: str,
    table: str,
    until: threading.Event | None = None,
    is_cleaning: bool = False,
    note: Callable[[str], object] = id,
) -> tuple[int, int]:
    """Ingest as above, whatever *does* the tasks."""
    options = {"path": absolute(capture), "columnNameOfCorruptRecord": "bad"}
    source, where = Capture(options), absolute(table)
    make_table(where)
    bad = f"{where}/_quarantine"
    added = aside = 0
    noted: list[str] = []
    while True:
        opened = DeltaTable(where)
        marks = marks_in(where, opened.version())
        found = news(source.segments(), marks)
        for piece in found.known if is_cleaning else ():
            source.remove(piece)
        if found.new:
            groups = source.groups(found.new)
            work = functools.partial(write_files, options, where, groups)
            files = do(work, len(groups))
            # A kill between the two lets both be done again: the files of the
            # quarantine have the same names then, which Delta has once
            commit(DeltaTable(bad), [one for one in files if not one.day])
            commit(opened, [one for one in files if one.day], found.marks)
            added += sum(one.rows for one in files if one.day)
            aside += sum(one.rows for one in files if not one.day)
        for told in found.gaps:
            if told not in noted:
                note(told)
        noted = found.gaps
        if not until or until.wait(FOLLOW_SECONDS):
            return added, aside


def commit(
    table: DeltaTable,
    files: Sequence[Any],
    marks: dict[str, int] | None = None,
) -> None:
    """Add files to a table as it was opened, all at once, with marks.

    Raises: PipelineError if a mark was set since then.
    """
    now = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = []
    for row in files:
        day = {"day": row.day} if row.day else {}
        stats = json.dumps({"numRecords": row.rows})
        actions.append(AddAction(row.path, row.bytes, day, now, True, stats))
    told = [Transaction(*mark, now) for mark in (marks or {}).items()]
    if actions or told:
        try:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                commit_properties=CommitProperties(app_transactions=told),
            )
        except CommitFailedError as error:
            what = "another ingest is at work; try again"
            raise PipelineError(f"{table.table_uri}: {what}") from error


def write_files(
    options: Any, table: str, groups: Any, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's segments to files; yield a row of WRITTEN for each file.

    Lines that were no messages have the day ''.  Those of a segment have a
    file whose name follows from the segment's.
    """
    os.umask(0o077)  # what was recorded may be private
    source = Capture(options)
    for number in (one for some in batches for one in some[0].to_pylist()):
        tables = []
        for piece in groups[number]:
            rows = pa.Table.from_batches(source.read(InputPartition([piece])))
            lines = rows["bad"].drop_null()
            tables.append(rows.filter(rows["bad"].is_null()).drop("bad"))
            if len(lines):
                name = uuid.uuid5(
                    uuid.NAMESPACE_URL, os.path.basename(piece.path)
                )
                more = pa.table({"line": lines})
                yield write_file(f"{table}/_quarantine", "", name, more)
        rows = pa.concat_tables(tables)
        days = rows["time"].cast(pa.date32())
        for day in pc.unique(days):
            own = rows.filter(pc.equal(days, day)).sort_by(ORDER)
            yield write_file(table, str(day), uuid.uuid4(), own)


def write_file(
    table: str, day: str, name: uuid.UUID, rows: pa.Table
) -> pa.RecordBatch:
    """Write rows to a file; return its row of WRITTEN."""
    files, folder = fs.FileSystem.from_uri(table)
    path = f"day={day}/" if day else ""
    files.create_dir(f"{folder}/{path}")
    path += f"{name}.parquet"
    whole = f"{folder}/{path}"
    pq.write_table(rows, whole, filesystem=files, compression="zstd")
    size = files.get_file_info(whole).size
    row = {"path": path, "day": day, "rows": len(rows), "bytes": size}
    return pa.RecordBatch.from_pylist([row])


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the messages of a table as it is now, and `day`, a date.

    A change of the table disturbs its readers only READERS_HOURS later.
    Raises: InputError if there is no table.
    """
    opened = open_table(table)
    where = absolute(table)
    paths = pa.table(opened.get_add_actions())["path"].to_pylist()
    if not paths:
        return spark.createDataFrame([], TABLE)
    files = [f"{where}/{path}" for path in paths]
    # What looks like a pattern in their paths is none
    options = {"basePath": where, "__globPaths__": "false"}
    return spark.read.schema(TABLE).options(**options).parquet(*files)


def open_table(table: str) -> DeltaTable:
    """Return a table as it is now.

    Raises: InputError if there is none, or one that ingest did not make.
    """
    where = absolute(table)
    if not DeltaTable.is_deltatable(where):
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    opened = DeltaTable(where)
    own, found = Schema.from_arrow(schema_of(TABLE)), opened.schema()
    columns = [[(x.name, x.type) for x in y.fields] for y in (own, found)]
    if columns[0] != columns[1] or opened.metadata().partition_columns != [
        "day"
    ]:
        raise InputError(f"{table}: it is no table that `ingest` made")
    return opened


def make_table(table: str) -> None:
    """Make a table, unless there is one.

    Raises: InputError if something else is there.
    """
    if "://" not in table and re.search("%[0-9A-Fa-f]{2}", table):
        raise InputError(f"{table}: Delta reads % in a path as an escape")
    files, folder = fs.FileSystem.from_uri(table)
    listing = files.get_file_info(fs.FileSelector(folder, True))
    names = {one.base_name for one in listing}
    if "_checkpoint" in names:
        raise InputError(f"{table}: it is of version 0.2, as _checkpoint says")
    if DeltaTable.is_deltatable(table):
        open_table(table)
    elif names - {"_delta_log", "_quarantine"}:
        raise InputError(f"{table}: something other than a table is there")
    bad = f"{table}/_quarantine"
    for one, columns, by in (table, TABLE, "day"), (bad, BAD, None):
        schema = Schema.from_arrow(schema_of(columns))
        DeltaTable.create(one, schema, "ignore", by, configuration=LOG)


def expire(table: str, before: datetime.date) -> None:
    """Drop the days of a table before one.  Raises: as open_table."""
    open_table(table).delete(f"day < '{before}'")
    clear(table)


def compact(table: str) -> None:
    """Merge the small files of each day.  Raises: as open_table."""
    open_table(table).optimize.compact()
    clear(table)


def clear(table: str) -> None:
    """Remove files of days that no snapshot of the last READERS_HOURS names.

    The log of older commits goes as well: a checkpoint has what they did.
    """
    opened = open_table(table)
    files, folder = fs.FileSystem.from_uri(absolute(table))
    for path in opened.vacuum(READERS_HOURS, True, False, full=True):
        if path.startswith("day="):  # else it is not the table's
            files.delete_file(f"{folder}/{path}")
    opened.create_checkpoint()
    opened.cleanup_metadata()


def replay(
    messages: DataFrame,
    address: str,
    patterns: Sequence[str] = (),
    speed: float | None = None,
) -> int:
    """Publish messages to the bus at an address; return how many.

    They go out in the order of their times, those of one time by host,
    recorder and number.  *speed* multiplies the recorded pace; None is as
    fast as possible.  One task publishes all of them, on the host where it
    runs.
    Raises: PySparkException with the row that the bus refuses.
    """
    register(messages.sparkSession)
    counted = Observation()
    rows = (
        selected(messages, patterns)
        .select(*REPLAYED, "key", "payload")
        .repartition(1)  # coalesce keeps no order where hosts are preferred
        .sortWithinPartitions(*REPLAYED)
        .observe(counted, F.count(F.lit(1)).alias("messages"))
    )
    options = {"address": address, "speed": speed or "inf"}
    rows.write.format("sbus").mode("append").options(**options).save()
    return int(counted.get["messages"])


def selected(messages: DataFrame, patterns: Sequence[str]) -> DataFrame:
    """Return the messages whose keys one of some patterns selects.

    Without a pattern it returns all.  A secret key is treated as any other.
    """

    @F.arrow_udf("boolean")  # type: ignore[attr-defined,untyped-decorator]
    def is_selected(keys: pa.Array) -> pa.Array:
        coded = keys.dictionary_encode()
        chosen = selects(patterns, coded.dictionary.to_pylist())
        return pa.array(chosen, pa.bool_()).take(coded.indices)

    return messages.where(is_selected("key")) if patterns else messages
