"""Reading: the messages of a table, by Spark or without it, and replays.

A row without a key is what is left of a message that was erased: its number,
so that it does not come again.  No reader is shown it.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from sbus_client import Client, SbusError

from . import inputs
from .files import MILLISECOND, files_of, rows_in
from .inputs import InputError, Selection, absolute
from .matching import are_selected, selected
from .messages import NUMBERED, ORDER, SCHEMA
from .tables import TABLE, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ALL = Selection()
ABOUT = [*NUMBERED, "host", "time", "key"]  # which says what is wanted


# ==== With Spark =============================================================


def read_table(
    spark: SparkSession, table: str, selection: Selection = ALL
) -> DataFrame:
    """Return the messages of a table as it is now, and `day`, a date.

    A change of the table disturbs its readers only READERS_HOURS later.
    Raises: InputError if there is no table.
    """
    rows = read_rows(spark, table, selection).where("key is not null")
    return selected(rows, selection.patterns)


def read_rows(
    spark: SparkSession, table: str, selection: Selection
) -> DataFrame:
    """Return the rows of a time and hosts, of all keys and without one."""
    from pyspark.sql import functions as F

    where = absolute(table)
    paths = selected_files(table, selection)["path"].to_pylist()
    if not paths:
        return spark.createDataFrame([], TABLE)
    # What looks like a pattern in their paths is none
    options = {"basePath": where, "__globPaths__": "false"}
    reader = spark.read.schema(TABLE).options(**options)
    rows = reader.parquet(*[f"{where}/{path}" for path in paths])
    # One that selects all would still cost a report its code
    if selection.since > inputs.FIRST:
        rows = rows.where(F.col("time") >= selection.since)
    if selection.until < inputs.LAST:
        rows = rows.where(F.col("time") < selection.until)
    if selection.hosts:
        rows = rows.where(F.col("host").isin(*selection.hosts))
    return rows


# ==== Without Spark ==========================================================


def rows_of(
    table: str, selection: Selection = ALL
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a table in the order of their times.

    Those of one time come by host, recorder and number, and those of one
    recorder always by number, though its clock went back.  It has the
    messages of a day in memory, and does not need Spark.
    Raises: as open_table.
    """
    where = absolute(table)
    files = selected_files(table, selection)
    days = pc.unique(files["partition.day"]).sort().to_pylist()
    wanted = wanted_by(selection)
    early = SCHEMA.empty_table()  # messages whose predecessors come later
    for day, next_day in zip(days, [*days[1:], datetime.date.max]):
        of_day = files.filter(pc.field("partition.day") == day)
        of_next = files.filter(pc.field("partition.day") == next_day)
        rows = rows_in(where, of_day, SCHEMA.names, wanted)
        rows = pa.concat_tables([early, rows])
        coming = rows_in(where, of_next, ABOUT, wanted)
        is_early = are_early(rows, coming)
        early = rows.filter(is_early)
        rows = in_order(rows.filter(pc.invert(is_early)))
        if selection.patterns:
            rows = rows.filter(are_selected(selection.patterns, rows["key"]))
        for batch in rows.to_batches(1_000):
            yield from batch.to_pylist()


def wanted_by(selection: Selection) -> pc.Expression:
    """Return which rows are messages of a time and a host."""
    time = pc.field("time")
    wanted = pc.field("key").is_valid()
    wanted &= (time >= selection.since) & (time < selection.until)
    if selection.hosts:
        wanted &= pc.field("host").isin(selection.hosts)
    return wanted


def are_early(rows: pa.Table, coming: pa.Table) -> pa.Array:
    """Return which rows come after others of their recorder that are coming.

    So they do if its clock went back over midnight.
    """
    runs = coming.group_by("recorder", use_threads=False)
    firsts = runs.aggregate([("n", "min")]).combine_chunks()
    at = pc.index_in(rows["recorder"], firsts["recorder"])
    return pc.fill_null(pc.greater(rows["n"], firsts["n_min"].take(at)), False)


def in_order(rows: pa.Table) -> pa.Table:
    """Return messages in the order of times, as if no clock went back."""
    rows = rows.sort_by(ORDER)
    times = rows["time"].cast(pa.int64()).to_numpy().copy()
    recorders = rows["recorder"].combine_chunks().dictionary_encode()
    changes = np.flatnonzero(np.diff(recorders.indices.to_numpy())) + 1
    for part in np.split(times, changes):
        np.maximum.accumulate(part, out=part)
    return rows.take(pa.array(np.argsort(times, kind="stable")))


def selected_files(table: str, selection: Selection) -> pa.Table:
    """Return the files of a table that may have wanted messages.

    Raises: as open_table.
    """
    files = files_of(open_table(table))
    day, low, high = map(pc.field, ("partition.day", "min.time", "max.time"))
    first, last = selection.since, selection.until
    wanted = (day >= first.date()) & (day <= last.date())
    if "min.time" in files.column_names:
        wanted &= low.is_null() | (low < last)
        wanted &= high.is_null() | (high >= first - MILLISECOND)
    return files.filter(wanted)


# ==== Replay =================================================================


def replay(
    table: str,
    address: str,
    speed: float = math.inf,
    selection: Selection = ALL,
) -> int:
    """Publish messages of a table to the bus at an address; return how many.

    They go out in the order of rows_of, without Spark.  *speed* multiplies
    the recorded pace.
    Raises: as open_table and publish; SbusError.
    """
    open_table(table)  # an error comes before the bus is asked
    count = 0
    first = None
    began = time.monotonic()
    with Client(address) as bus:
        for row in rows_of(table, selection):
            first = first or row["time"]
            due = began + (row["time"] - first).total_seconds() / speed
            time.sleep(max(0.0, due - time.monotonic()))
            publish(bus, row)
            count += 1
        bus.sync()
    return count


def publish(bus: Client, row: dict[str, Any]) -> None:
    """Publish a row.

    Raises: InputError if the bus refuses it, or it was recorded without its
    payload.
    """
    key = row["key"]
    if row["payload"] is None:
        reason = "it was recorded without its payload"
        raise InputError(f"key {key!r:.80}: {reason}")
    try:
        name = key.encode("latin-1") if type(key) is str else key
        bus.publish(name, row["payload"])
    except (SbusError, TypeError, UnicodeError) as error:
        raise InputError(f"key {key!r:.80}: {error}") from None
