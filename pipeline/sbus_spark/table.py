"""Tables: ingest makes them of captures, and read_table reads them.

Facts:

- Spark's file source passes over names that begin with '.' or '_', and so
  over segments that are being written, and over our own _checkpoint.
- It remembers the files that it has read, and after a kill gives the same
  files to a batch of the same number.  A batch replaces the folders that
  bear its number, so that it may be written again.
- Compaction writes batches 3 to 9 anew as batch=3-9, under a hidden name,
  renames that, and removes batch=3 to batch=9.  Whatever a kill leaves of
  those is removed at the next start.
- A day that has expired is left out by all who begin to read from then on.
  Its files stay for those who have begun before, and are removed later.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from .capture import SEGMENTS, parse_capture, read_messages
from .common import (
    BYTES,
    DATE,
    LONG,
    TEXT,
    InputError,
    PipelineError,
    note,
    progress,
    schema,
)
from .segments import store

TABLE_SCHEMA = schema(
    rec=TEXT,
    n=LONG,
    t=LONG,
    key=TEXT,
    size=LONG,
    data=BYTES,
    day=DATE,
    host=TEXT,
    batch=TEXT,
)
QUARANTINE_SCHEMA = schema(file=TEXT, reason=TEXT, line=TEXT, batch=TEXT)
FILE_COLUMNS = (
    "path string, modificationTime timestamp, length long, content binary"
)
SEGMENTS_PER_BATCH = 64
BATCHES_MAX = 8  # small folders of a day and host, that become one
COMPACT_BYTES_MAX = 64 << 20  # of a small folder, and of its files then
FOLLOW_SECONDS = 5
TELL_SECONDS = 60
READERS_SECONDS = 3_600  # in which who reads an expired day is to be done
PARTITIONS = ("day", "host", "batch")
BATCHES = "day=*/host=*/batch=[0-9]*"
EXPIRIES = "_expired/before=*"


class Folders:
    """The folders of batches in a table, on whatever storage Spark knows."""

    def __init__(self, spark: SparkSession, table: str) -> None:
        context: Any = spark.sparkContext
        hadoop = context._jvm.org.apache.hadoop.fs
        self._spark = spark
        self._path = hadoop.Path
        self._table = table
        self._files = hadoop.Path(table).getFileSystem(
            context._jsc.hadoopConfiguration()
        )

    def find(self, pattern: str) -> list[str]:
        """Return the folders that a pattern below the table selects."""
        found = self._files.globStatus(self._path(f"{self._table}/{pattern}"))
        return [status.getPath().toString() for status in found or ()]

    def remove(self, folder: str) -> None:
        """Remove a folder."""
        self._files.delete(self._path(folder), True)

    def size(self, folder: str) -> int:
        """Return the bytes in a folder."""
        summary = self._files.getContentSummary(self._path(folder))
        return int(summary.getLength())

    def batches(self) -> dict[str, list[str]]:
        """Return the folders of batches that are to be read, as current."""
        return current(self.find(BATCHES), self.find(EXPIRIES))

    def expire(self, before: str) -> None:
        """Have all days before one expire."""
        mark = f"{self._table}/_expired/before={before}_{time.time():.0f}"
        self._files.create(self._path(mark)).close()

    def sweep(self) -> None:
        """Remove days that expired so long ago that nobody reads them."""
        first, at = last_expiry(self.find(EXPIRIES))
        if time.time() >= at + READERS_SECONDS:
            for folder in self.find("day=*"):
                if day_of(folder) < first:
                    self.remove(folder)

    def mend(self) -> None:
        """Remove what a kill left of a compaction."""
        for folder in self.find("day=*/host=*/.compact*"):
            self.remove(folder)
        folders = self.find(BATCHES)
        wanted = set(itertools.chain(*current(folders, []).values()))
        for folder in set(folders) - wanted:
            self.remove(folder)

    def compact(self, before: int) -> None:
        """Make one folder of many small ones, all of batches < *before*."""
        for folders in self.batches().values():
            small: list[str] = []
            for folder in folders:
                is_old = batches_of(folder)[1] < before
                if is_old and self.size(folder) < COMPACT_BYTES_MAX:
                    small.append(folder)
                else:
                    self._merge(small)
                    small = []
            self._merge(small)

    def _merge(self, folders: Sequence[str]) -> None:
        """Make one folder of neighbours, if they are many."""
        if len(folders) < BATCHES_MAX:
            return
        parent = folders[0].rpartition("/")[0]
        first, last = batches_of(folders[0])[0], batches_of(folders[-1])[1]
        draft = f"{parent}/.compact-{first}-{last}"
        size = sum(map(self.size, folders))
        rows = self._spark.read.parquet(*folders)
        files = size // COMPACT_BYTES_MAX + 1
        rows.coalesce(files).write.mode("overwrite").parquet(draft)
        new = self._path(f"{parent}/batch={first}-{last}")
        if not self._files.rename(self._path(draft), new):
            raise PipelineError(
                f"{draft} cannot be renamed to {new.getName()}"
            )
        for folder in folders:
            self.remove(folder)


def current(
    folders: Iterable[str], expiries: Iterable[str]
) -> dict[str, list[str]]:
    """Return which folders of batches are to be read, of each day and host.

    They are in order.  What a folder of many batches holds is not there a
    second time, and days that have expired are not there.
    """
    first, _ = last_expiry(expiries)
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for folder in sorted(folders, key=batches_of):
        if day_of(folder) >= first:
            parent = folder.rpartition("/")[0]
            groups.setdefault(parent, {})[folder] = batches_of(folder)
    return {
        parent: [
            folder
            for folder, own in ranges.items()
            if not any(is_within(own, other) for other in ranges.values())
        ]
        for parent, ranges in groups.items()
    }


def last_expiry(expiries: Iterable[str]) -> tuple[str, float]:
    """Return before which day all have expired, and since when."""
    marks = [mark.rpartition("=")[2].split("_") for mark in expiries]
    return max(((day, float(at)) for day, at in marks), default=("", 0.0))


def batches_of(folder: str) -> tuple[int, int]:
    """Return the first and the last batch in a folder batch=3 or batch=3-9."""
    first, _, last = folder.rpartition("=")[2].partition("-")
    return int(first), int(last or first)


def day_of(folder: str) -> str:
    """Return the day of a folder below day=2026-11-22, or of that itself."""
    return folder.rpartition("day=")[2].partition("/")[0]


def is_within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a range of batches is part of another, larger one."""
    return one != other and other[0] <= one[0] and one[1] <= other[1]


def write_batch(
    spark: SparkSession, files: Sequence[str], table: str, batch: int
) -> tuple[int, int]:
    """Do what store does, wherever Spark can read and write.

    This takes many times as long.
    """
    names = [re.sub(r"([][{}*?\\])", r"\\\1", file) for file in files]
    lines = spark.read.text(names).select("value", "_metadata")
    seen = Observation()
    counts = F.count(F.lit(1)).alias("lines"), F.count("reason").alias("bad")
    number = F.lit(str(batch))
    read = read_messages(lines).withColumn("batch", number)
    good = read.observe(seen, *counts).filter(F.col("reason").isNull())
    overwrite(good.select(*TABLE_SCHEMA.names), table, *PARTITIONS)
    if seen.get["bad"]:
        read = parse_capture(lines).withColumn("batch", number)
        bad = read.filter(F.col("reason").isNotNull())
        rows = bad.select(*QUARANTINE_SCHEMA.names)
        overwrite(rows, f"{table}/_quarantine", "batch", kind="json")
    return seen.get["lines"], seen.get["bad"]


def overwrite(
    rows: DataFrame, path: str, *partitions: str, kind: str = "parquet"
) -> None:
    """Write rows in place of what is in the same partitions."""
    writer = rows.write.mode("overwrite").partitionBy(*partitions)
    writer.option("partitionOverwriteMode", "dynamic").format(kind).save(path)


def ingest(
    spark: SparkSession,
    capture: str,
    table: str,
    until: threading.Event | None = None,
) -> tuple[int, int]:
    """Bring new segments of a capture into a table, each line once.

    Where *until* is given, go on with segments that come later, until it is
    set.  Return how many lines were read now, and how many of them are
    quarantined.
    Raises: PipelineError if another one does so.
    """
    with sole_ingest(table):
        return ingest_alone(spark, capture, table, until)


@contextlib.contextmanager
def sole_ingest(table: str) -> Iterator[None]:
    """Keep others from bringing segments into a table.

    A table that a URL names is not kept: its storage may have no locks.
    Raises: PipelineError if another one is at it.
    """
    if "://" in table:
        yield
        return
    os.makedirs(table, mode=0o700, exist_ok=True)
    lock = os.open(f"{table}/_lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another ingest brings segments into it"
            raise PipelineError(f"{table}: {what}") from None
        yield
    finally:
        os.close(lock)


def ingest_alone(
    spark: SparkSession,
    capture: str,
    table: str,
    until: threading.Event | None,
) -> tuple[int, int]:
    """Do what ingest does, where no other does."""
    folders = Folders(spark, table)
    folders.mend()
    totals = [0, 0]
    errors = []

    def write(files: list[str], batch: int) -> tuple[int, int]:
        are_here = all(file.startswith("file:") for file in files)
        if are_here and "://" not in table:
            return store(spark.sparkContext, files, table, batch)
        return write_batch(spark, files, table, batch)

    def take(segments: DataFrame, batch: int) -> None:
        try:
            folders.sweep()
            folders.compact(batch)  # those before are done with
            files = sorted(row["path"] for row in segments.collect())
            counts = write(files, batch)
        except Exception as error:
            errors.append(error)
            raise
        for index, count in enumerate(counts):
            totals[index] += count
        progress(f"{totals[0]} lines")

    source = spark.readStream.options(
        pathGlobFilter=SEGMENTS,
        maxFilesPerTrigger=SEGMENTS_PER_BATCH,
        maxFileAge="36500d",  # else segments that come late are passed over
    )
    # Their names: this format reads no file of which nothing else is asked
    source = source.format("binaryFile").schema(FILE_COLUMNS)
    names = source.load(capture).select("path")
    writer = names.writeStream.foreachBatch(take).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", f"{table}/_checkpoint")
    told = time.monotonic()
    while True:
        try:
            writer.start().awaitTermination()
        except StreamingQueryException as error:
            raise (errors or [error])[0] from None  # it is wrapped in layers
        if until is None or until.wait(FOLLOW_SECONDS):
            return totals[0], totals[1]
        if time.monotonic() >= told + TELL_SECONDS:
            told = time.monotonic()
            note(f"{totals[0]} lines read, {totals[1]} of them quarantined")


def expire(spark: SparkSession, table: str, before: datetime.date) -> None:
    """Drop the days of a table before one, also what comes of them later.

    Who reads the table by then is not disturbed: the files are removed by
    the first call of this, or of ingest, that comes READERS_SECONDS later.
    Raises: InputError if there is no table.
    """
    folders = Folders(spark, table)
    if not folders.find("_checkpoint"):
        raise InputError(f"{table}: {NO_TABLE}")
    folders.expire(before.isoformat())
    with contextlib.suppress(PipelineError), sole_ingest(table):
        folders.sweep()


NO_TABLE = "there is no table; `ingest` makes one"


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the messages of a table; columns as in TABLE_SCHEMA.

    Raises: InputError if there is no table, or nothing in it.
    """
    there = Folders(spark, table)
    folders = list(itertools.chain(*there.batches().values()))
    if not folders:
        raise no_messages(table, bool(there.find("_checkpoint")))
    reader = spark.read.schema(TABLE_SCHEMA).option("basePath", table)
    return reader.parquet(*folders)


def no_messages(table: str, is_there: bool) -> InputError:
    """Return what is wrong with a table of no messages."""
    what = "no message was ingested yet" if is_there else NO_TABLE
    return InputError(f"{table}: {what}")


def leaves(table: str) -> list[str]:
    """Return the files of a table that is in a folder here."""
    path = Path(table)
    marks = map(str, path.glob(EXPIRIES))
    groups = current(map(str, path.glob(BATCHES)), marks)
    return [
        str(file)
        for folder in itertools.chain(*groups.values())
        for file in sorted(Path(folder).glob("[!._]*.parquet"))
    ]


def rows_in(file: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield batches of Arrow: host, and columns, of a file of a table."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    name = file.rpartition("/host=")[2].partition("/")[0]
    with pyarrow.parquet.ParquetFile(file) as found:
        for batch in found.iter_batches(columns=columns, use_threads=False):
            host = pyarrow.repeat(unquote(name), len(batch))
            yield batch.add_column(0, "host", host)
