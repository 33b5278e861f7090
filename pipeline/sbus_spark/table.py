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
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

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
    progress,
    schema,
)

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
SEGMENTS_PER_BATCH = 64
BATCHES_MAX = 8  # small folders of a day and host, that become one
COMPACT_BYTES_MAX = 64 << 20  # of a small folder, and of its files then
FOLLOW_SECONDS = 5
PARTITIONS = ("day", "host", "batch")


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
        """Return the folders of batches, in order, of each day and host.

        What a folder of many batches holds is not there a second time.
        """
        groups = self._all_batches()
        for day, folders in groups.items():
            ranges = list(map(batches_of, folders))
            groups[day] = [
                folder
                for folder, own in zip(folders, ranges)
                if not any(is_within(own, other) for other in ranges)
            ]
        return groups

    def _all_batches(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for folder in self.find("day=*/host=*/batch=[0-9]*"):
            groups.setdefault(folder.rpartition("/")[0], []).append(folder)
        return {day: sorted(groups[day], key=batches_of) for day in groups}

    def mend(self) -> None:
        """Remove what a kill left of a compaction."""
        for folder in self.find("day=*/host=*/.compact*"):
            self.remove(folder)
        wanted = self.batches()
        for day, folders in self._all_batches().items():
            for folder in set(folders) - set(wanted[day]):
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


def batches_of(folder: str) -> tuple[int, int]:
    """Return the first and the last batch in a folder batch=3 or batch=3-9."""
    first, _, last = folder.rpartition("=")[2].partition("-")
    return int(first), int(last or first)


def is_within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a range of batches is part of another, larger one."""
    return one != other and other[0] <= one[0] and one[1] <= other[1]


def write_batch(lines: DataFrame, table: str, batch: int) -> tuple[int, int]:
    """Write the lines of one batch, for the first time or again.

    Return how many lines there are, and how many of them are quarantined.
    """
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
    """
    folders = Folders(spark, table)
    folders.mend()
    totals = [0, 0]
    errors = []

    def take(lines: DataFrame, batch: int) -> None:
        try:
            folders.compact(batch)  # those before are done with
            counts = write_batch(lines, table, batch)
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
    lines = source.text(capture).select("value", "_metadata")
    writer = lines.writeStream.foreachBatch(take).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", f"{table}/_checkpoint")
    while True:
        try:
            writer.start().awaitTermination()
        except StreamingQueryException as error:
            raise (errors or [error])[0] from None  # it is wrapped in layers
        if until is None or until.wait(FOLLOW_SECONDS):
            return totals[0], totals[1]


NO_TABLE = "there is no table; `ingest` makes one"


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the messages of a table; columns as in TABLE_SCHEMA.

    Raises: InputError if there is no table, or nothing in it.
    """
    there = Folders(spark, table)
    folders = list(itertools.chain(*there.batches().values()))
    if not folders and there.find("_checkpoint"):
        raise InputError(f"{table}: no message was ingested yet")
    if not folders:
        raise InputError(f"{table}: {NO_TABLE}")
    reader = spark.read.schema(TABLE_SCHEMA).option("basePath", table)
    return reader.parquet(*folders)
