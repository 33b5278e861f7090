"""Tables: ingest makes them; read_table and replay read them.

A table is a Delta table in folders of days: the columns of `messages`, and
`day`.  Another one, `_quarantine`, has the lines that were no messages, and
`_checkpoint` is Spark's.  No Java library for Delta is needed: executors read
the segments of a batch and write Parquet below the table, and the driver adds
all files to the log at once, with the number of the batch.  A batch that is
repeated after a kill finds its number there, and adds nothing.  Files that a
kill left are in no snapshot of the table: `compact` removes them.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql import DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import InputPartition

from .matching import selects
from .messages import COLUMNS, READ, InputError, absolute, schema_of
from .source import Capture, Piece, register

TABLE, BAD = f"{COLUMNS}, day date", "line string"
ORDER = [(name, "ascending") for name in ("host", "recorder", "n")]
WRITTEN = "path string, day string, bytes long, stats string"
READERS_HOURS = 24  # for which a reader may use a snapshot
LOG = {"delta.logRetentionDuration": f"interval {READERS_HOURS} hours"}
REPLAYED = ("time", "host", "recorder", "n")  # the order of a replay
TRIGGER: Any = {"processingTime": "5 seconds"}  # while following


def ingest(
    spark: SparkSession,
    capture: str,
    table: str,
    until: threading.Event | None = None,
    is_cleaning: bool = False,
) -> tuple[int, int]:
    """Add new segments of a capture to a table, each line once.

    With *until*, go on with segments that come later, until it is set.  With
    *is_cleaning*, remove segments that are in the table when the next batch
    begins.  Return how many messages were added to the table, and how many
    lines to the quarantine.
    Raises: PySparkException, also while another ingest is at work.
    """
    register(spark)
    where = absolute(table)
    bad = f"{where}/_quarantine"
    for one, columns, by in (where, TABLE, "day"), (bad, BAD, None):
        schema = Schema.from_arrow(schema_of(columns))
        DeltaTable.create(one, schema, "ignore", by, configuration=LOG)
    read = {"path": absolute(capture), "columnNameOfCorruptRecord": "corrupt"}
    work = functools.partial(write_files, read, where)
    files, folder = fs.FileSystem.from_uri(where)

    def take(rows: DataFrame, number: int) -> None:
        with files.open_input_stream(f"{folder}/_checkpoint/metadata") as file:
            batch = str(json.load(file)["id"]), number
        found = rows.mapInArrow(work, WRITTEN).collect()
        commit(bad, [row for row in found if not row.day], *batch)
        commit(where, [row for row in found if row.day], *batch)

    before = DeltaTable(where).count(), DeltaTable(bad).count()
    # As rows, messages would go through Java twice
    stream = spark.readStream.format("sbus").options(
        pieces=True, cleanSource="delete" if is_cleaning else "off"
    )
    writer = stream.load(read["path"]).writeStream.foreachBatch(take)
    writer = writer.option("checkpointLocation", f"{where}/_checkpoint")
    when = TRIGGER if until else {"availableNow": True}
    query = writer.trigger(**when).start()
    while not query.awaitTermination(1):
        if until and until.is_set():
            query.stop()
    after = DeltaTable(where).count(), DeltaTable(bad).count()
    return after[0] - before[0], after[1] - before[1]


def commit(table: str, files: Sequence[Row], name: str, number: int) -> None:
    """Add the files of a batch to a table, all at once, if it lacks them."""
    opened = DeltaTable(table)
    done = opened.transaction_version(name)
    if not files or (done is not None and done >= number):
        return
    now = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = []
    for row in files:
        day = {"day": row.day} if row.day else {}
        add = AddAction(row.path, row.bytes, day, now, True, row.stats)
        actions.append(add)
    batch = [Transaction(name, number, now)]
    marked = CommitProperties(app_transactions=batch)
    opened.create_write_transaction(
        actions, "append", opened.schema(), commit_properties=marked
    )


def write_files(
    options: Any, table: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's pieces to files; yield a row of WRITTEN for each file.

    Lines that were no messages have the day ''.
    """
    os.umask(0o077)  # what was recorded may be private
    pieces = [Piece(**one) for some in batches for one in some.to_pylist()]
    read = Capture(options).read(InputPartition(pieces))
    rows = pa.Table.from_batches(read, READ)
    bad = rows["corrupt"].drop_null()
    if len(bad):
        yield write_file(f"{table}/_quarantine", "", pa.table({"line": bad}))
    rows = rows.filter(pc.field("corrupt").is_null()).drop_columns("corrupt")
    days = rows["time"].cast(pa.date32())
    for day in pc.unique(days):
        own = rows.filter(pc.equal(days, day)).sort_by(ORDER)
        yield write_file(table, str(day), own)


def write_file(table: str, day: str, rows: pa.Table) -> pa.RecordBatch:
    """Write rows to a file of a new name; return its row of WRITTEN."""
    files, folder = fs.FileSystem.from_uri(table)
    path = f"day={day}/" if day else ""
    files.create_dir(f"{folder}/{path}")
    path += f"{uuid.uuid4()}.parquet"
    whole = f"{folder}/{path}"
    pq.write_table(rows, whole, filesystem=files, compression="zstd")
    size = files.get_file_info(whole).size
    stats = json.dumps({"numRecords": len(rows)})
    row = {"path": path, "day": day, "bytes": size, "stats": stats}
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
    return spark.read.schema(TABLE).option("basePath", where).parquet(*files)


def open_table(table: str) -> DeltaTable:
    """Return a table as it is now.  Raises: InputError if there is none."""
    where = absolute(table)
    if not DeltaTable.is_deltatable(where):
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    return DeltaTable(where)


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

    @F.pandas_udf("boolean")  # type: ignore[attr-defined,untyped-decorator]
    def is_selected(keys: pd.Series) -> pd.Series:
        some = keys.unique()
        return keys.map(dict(zip(some, selects(patterns, some)))).astype(bool)

    return messages.where(is_selected("key")) if patterns else messages
