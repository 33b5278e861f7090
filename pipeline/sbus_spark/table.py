"""Tables: ingest makes them; read_table, rows_of and replay read them.

A table is a Delta table in folders of days: the columns of `messages`, and
`day`.  Another one, `_quarantine`, has the lines that were no messages, in
folders of the days on which they were found.

The table itself knows what is in it: a commit adds the rows of new segments,
and the marks that say so.  Both are in the log, or neither is.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import re
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Union

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.dataset as ds  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import InputPartition

from sbus_client import Client

from . import inputs
from .inputs import BusyError, InputError, Selection, absolute
from .marks import (
    COMPACTED,
    EXPIRED,
    Log,
    Marks,
    News,
    corrections,
    news,
    read_log,
)
from .matching import are_selected, selected
from .messages import COLUMNS, schema_of
from .source import Capture, Segment, Segments, publish

TABLE = f"{COLUMNS}, day date"
QUARANTINE = "segment string, line string, day date"
ORDER = [(name, "ascending") for name in ("host", "recorder", "n")]
NUMBERED = ["recorder", "n"]  # which message it is
# A file that a task wrote: of the table, or of `_quarantine` if it has the
# lines of a *segment* that are no messages
WRITTEN = """
path string, segment string, day string, rows long, bytes long, stats string
"""
# Of these a file has the least and the greatest value in Delta's log
ORDERED = ("host", "recorder", "n", "time", "key", "size")
TEXT_MAX = 32  # characters of a least or greatest value
LAST_LETTER = "\U0010ffff"
READERS_HOURS = 24  # for which a reader may use a snapshot
RETENTION = {"delta.logRetentionDuration": f"interval {READERS_HOURS} hours"}
ALL = Selection()
FOLLOW_SECONDS = 5.0
REST_SECONDS = 300.0  # after which nobody seems to copy a segment
LEFT_SECONDS = 3_600.0  # after which nobody seems to write a hidden segment
Batches = Iterator[pa.RecordBatch]
Session = Union[SparkSession, Callable[[], SparkSession]]


class Batch(NamedTuple):
    """What a round of an ingest did."""

    messages: int
    quarantined: int
    segments: int
    seconds: float  # that it took
    lag: float  # seconds since the oldest of its segments was written
    remarks: list[str]  # what is missing, or not whole


# ==== Ingest =================================================================


def ingest(
    spark: Session,
    capture: str,
    table: str,
    until: threading.Event | None = None,
    is_cleaning: bool = False,
    report: Callable[[Batch], object] = id,
) -> tuple[int, int]:
    """Add new segments of a capture to a table, each line once.

    *spark* is a session, or starts one when there are new segments.  Those of
    a recorder may come in any order; *report* is called after each round, and
    names those that are missing.  With *until*, go on with segments that come
    later, until it is set.  With *is_cleaning*, remove segments that were in
    the table already, as clean does.  Return how many messages were added to
    the table, and how many lines to the quarantine.
    Raises: PySparkException; InputError; without *until* BusyError, if
    another command is at work on the table.
    """
    options = bad_lines_of(capture)
    source = Capture(options)
    where = absolute(table)
    make_table(where)
    opened = DeltaTable(where)
    log: Log | None = None
    messages = quarantined = 0
    while True:
        began = time.time()
        log = settle(where, opened, log)
        segments, hidden = source.files()
        arrivals = news(segments, log, source.is_whole)
        known = arrivals.known if is_cleaning else []
        kept = clean(where, log, source, known)

        files: Sequence[Any] = []
        if arrivals.new:
            groups = source.groups(arrivals.new)
            work = functools.partial(write_files, options, where, groups)
            files = do_tasks(spark, work, len(groups))
        good = [file for file in files if not file.segment]
        bad = [file for file in files if file.segment]
        sizes = {os.path.basename(x.path): x.size for x in arrivals.new}
        try:
            add_aside(where, bad, segments)
            commit(where, opened, good, arrivals.marks, sizes)
        except BusyError:
            if not until:
                raise
            opened.update_incremental()
            continue  # what it wrote is in no snapshot

        batch = Batch(
            sum(file.rows for file in good),
            sum(file.rows for file in bad),
            len(arrivals.new),
            time.time() - began,
            began - min((x.written for x in arrivals.new), default=began),
            remarks_on(arrivals, kept, hidden, began),
        )
        messages += batch.messages
        quarantined += batch.quarantined
        report(batch)
        if not until or until.wait(FOLLOW_SECONDS):
            return messages, quarantined
        opened.update_incremental()


def bad_lines_of(capture: str) -> dict[str, str]:
    """Return the options that read a capture with its bad lines."""
    return {"path": absolute(capture), "columnNameOfCorruptRecord": "bad"}


def clean(
    where: str, log: Log, source: Capture, segments: Sequence[Segment]
) -> list[Segment]:
    """Remove segments that a table has; return those that it has not whole.

    One that was written within REST_SECONDS stays: it may be half copied.
    """
    latest = time.time() - REST_SECONDS
    old = [segment for segment in segments if segment.written < latest]
    kept = unfinished(where, log, source, old)
    for segment in {*old} - {*kept}:
        source.remove(segment)
    return kept


def unfinished(
    where: str, log: Log, source: Capture, segments: Sequence[Segment]
) -> list[Segment]:
    """Return the segments whose last message a table does not have.

    One without a message at its end is among them.  Messages of days that
    have expired count as if the table had them.
    """
    if not segments:
        return []
    ends = [source.last_message(segment) for segment in segments]
    numbers = not_in(where, log, pa.concat_tables(ends)).select(NUMBERED)
    lacking = numbers.to_pylist()
    return [
        segment
        for segment, end in zip(segments, ends)
        if not len(end) or end.select(NUMBERED).to_pylist()[0] in lacking
    ]


def not_in(where: str, log: Log, rows: pa.Table) -> pa.Table:
    """Return the messages that a table does not have, each once.

    Those of days that have expired are left out.
    """
    days = rows["time"].cast(pa.date32())
    expired = datetime.date.fromordinal(log.marks.get(EXPIRED) or 1)
    rows = rows.filter(pc.greater_equal(days, expired))
    all_files = files_of(DeltaTable(where))
    days = pc.unique(days).to_pylist()
    files = [file for file in all_files if file["partition.day"] in days]
    is_near = pc.field("recorder").isin(pc.unique(rows["recorder"]))
    is_near &= pc.field("n").isin(pc.unique(rows["n"]))
    present = dataset_of(where, files).to_table(NUMBERED, is_near)
    both = pa.concat_tables([present, rows.select(NUMBERED)]).to_pandas()
    is_repeated = both.duplicated().to_numpy()[len(present) :]
    return rows.filter(pa.array(~is_repeated))


def do_tasks(
    spark: Session, work: Callable[[Batches], Batches], count: int
) -> Sequence[Any]:
    """Do tasks by their numbers; return the rows of WRITTEN they yield."""
    session = spark() if callable(spark) else spark
    tasks = session.range(0, count, 1, count)
    return tasks.mapInArrow(work, WRITTEN).collect()


def add_aside(where: str, files: list[Any], segments: Segments) -> None:
    """Commit the files of lines that are no messages, if there are any.

    A kill before the commit of the table lets them be written again.  So the
    quarantine has marks as well: of the segments whose lines it has.  After a
    RESTORE of the table, lines that were mended before are added again.
    """
    bad = {file.segment: file for file in files}
    if bad:
        quarantine = f"{where}/_quarantine"
        opened = DeltaTable(quarantine)
        log = settle(quarantine, opened)
        of_bad = {
            recorder: {n: x for n, x in numbered.items() if x.path in bad}
            for recorder, numbered in segments.items()
        }
        arrivals = news(of_bad, log)
        new = [bad[segment.path] for segment in arrivals.new]
        for segment in arrivals.known:
            path = f"{quarantine}/{bad[segment.path].path}"
            lines = pq.read_table(path, columns=["line"])["line"]
            present = opened.to_pyarrow_table(columns=["line"])["line"]
            missing = lines.filter(pc.invert(pc.is_in(lines, present)))
            if len(missing):
                new += rows_in([write_lines(where, segment, missing)])
        commit(quarantine, opened, new, arrivals.marks)


def remarks_on(
    arrivals: News,
    kept: list[Segment],
    hidden: dict[str, float],
    now: float,
) -> list[str]:
    """Return in words what an ingest had to leave out."""
    remarks = list(arrivals.gaps)
    for segment in arrivals.torn:
        remarks.append(
            f"{segment.path}: its last line is not complete, so it waits"
        )
    for segment in arrivals.grown:
        remarks.append(
            f"{segment.path}: it has grown since it was read, half copied:"
            " `ingest --again` takes in the rest"
        )
    for segment in kept:
        remarks.append(
            f"{segment.path}: --clean keeps it, as its last message is not in"
            " the table: `ingest --again` takes in the rest; if it ends with"
            " no message, remove it by hand"
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


# ==== Commits ================================================================


def settle(where: str, opened: DeltaTable, log: Log | None = None) -> Log:
    """Return what the log of a table says, and read on from an older *log*.

    After a RESTORE it first sets the marks of the version restored.
    Raises: as read_log and commit.
    """
    log = read_log(where, opened.version(), log)
    if marks := corrections(log):
        commit(where, opened, [], marks)
        opened.update_incremental()
        log = read_log(where, opened.version(), log)
    return log


def commit(
    where: str,
    opened: DeltaTable,
    files: Sequence[Any],
    marks: Marks,
    sizes: dict[str, int] | None = None,
) -> None:
    """Add files to a table as it was opened, all at once, with marks.

    Raises: BusyError if a mark was set since then, or rows were dropped.
    """
    if not files and not marks:
        return
    now = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = [
        AddAction(x.path, x.bytes, {"day": x.day}, now, True, x.stats)
        for x in files
    ]
    properties = CommitProperties(
        custom_metadata={"sizes": sizes or {}},
        app_transactions=[Transaction(*mark, now) for mark in marks.items()],
    )
    try:
        opened.create_write_transaction(
            actions, "append", opened.schema(), commit_properties=properties
        )
    except CommitFailedError as error:
        raise BusyError(
            f"another ingest, compact or expire is at work on {where}; run"
            " this one again"
        ) from error


# ==== Files ==================================================================


def write_files(
    options: Any, table: str, groups: Any, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's segments to files; yield a row of WRITTEN for each file.

    The lines of a segment that are no messages have a file of their own.
    """
    os.umask(0o077)  # what was recorded may be private
    source = Capture(options)
    for number in (n for batch in batches for n in batch[0].to_pylist()):
        tables = []
        for segment in groups[number]:
            messages, lines = read_segment(source, segment)
            tables.append(messages)
            if len(lines):
                yield write_lines(table, segment, lines)
        yield from write_messages(table, pa.concat_tables(tables))


def read_segment(source: Capture, segment: Segment) -> tuple[Any, Any]:
    """Return the messages of a segment, and the lines that are none."""
    rows = pa.Table.from_batches(source.read(InputPartition([segment])))
    messages = rows.filter(rows["bad"].is_null()).drop("bad")
    return messages, rows["bad"].drop_null()


def write_lines(table: str, segment: Segment, lines: Any) -> pa.RecordBatch:
    """Write lines that are no messages to a file of the quarantine."""
    rows = lines_aside(segment.path, lines)
    day = rows["day"][0].as_py()
    stats = {"numRecords": len(rows)}
    quarantine = f"{table}/_quarantine"
    return write_file(quarantine, segment.path, day, rows.drop("day"), stats)


def lines_aside(path: str, lines: Any) -> pa.Table:
    """Return lines of a segment as rows of the quarantine, of today."""
    today = datetime.datetime.now(inputs.UTC).date()
    columns = {
        "segment": [os.path.basename(path)] * len(lines),
        "line": lines,
        "day": [today] * len(lines),
    }
    return pa.table(columns, schema_of(QUARANTINE))


def write_messages(table: str, rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Write messages to a file for each of their days."""
    days = rows["time"].cast(pa.date32())
    for day in pc.unique(days).to_pylist():
        of_day = rows.filter(pc.equal(days, day)).sort_by(ORDER)
        yield write_file(table, "", day, of_day, stats_of(of_day))


def rows_in(batches: Iterable[pa.RecordBatch]) -> list[Any]:
    """Return rows of WRITTEN as Spark does."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


def write_file(
    table: str, segment: str, day: datetime.date, rows: pa.Table, stats: object
) -> pa.RecordBatch:
    """Write rows to a file of a new name; return its row of WRITTEN."""
    files, folder = fs.FileSystem.from_uri(table)
    files.create_dir(f"{folder}/day={day}")
    path = f"day={day}/{uuid.uuid4()}.parquet"
    whole = f"{folder}/{path}"
    pq.write_table(rows, whole, filesystem=files, compression="zstd")
    row = {
        "path": path,
        "segment": segment,
        "day": str(day),
        "rows": len(rows),
        "bytes": files.get_file_info(whole).size,
        "stats": json.dumps(stats),
    }
    return pa.RecordBatch.from_pylist([row], schema_of(WRITTEN))


def stats_of(rows: pa.Table) -> dict[str, object]:
    """Return what Delta's log says of a file: with it, readers skip files."""
    ends = {name: pc.min_max(rows[name]).as_py() for name in ORDERED}
    return {
        "numRecords": len(rows),
        "minValues": {x: bound(ends[x]["min"], "") for x in ORDERED},
        "maxValues": {x: bound(ends[x]["max"], LAST_LETTER) for x in ORDERED},
        "nullCount": {x: rows[x].null_count for x in rows.column_names},
    }


def bound(value: Any, after: str) -> Any:
    """Return a least or greatest value as Delta has it.

    Times have milliseconds.  *after* follows a text that is cut.
    """
    if isinstance(value, str) and len(value) > TEXT_MAX:
        return value[:TEXT_MAX] + after
    if isinstance(value, datetime.datetime):
        text = value.astimezone(inputs.UTC).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")
    return value


# ==== Reading ================================================================


def read_table(
    spark: SparkSession, table: str, selection: Selection = ALL
) -> DataFrame:
    """Return the messages of a table as it is now, and `day`, a date.

    A change of the table disturbs its readers only READERS_HOURS later.
    Raises: InputError if there is no table.
    """
    opened = open_table(table)
    where = absolute(table)
    paths = [file["path"] for file in files_of(opened, selection)]
    if not paths:
        return spark.createDataFrame([], TABLE)
    # What looks like a pattern in their paths is none
    options = {"basePath": where, "__globPaths__": "false"}
    reader = spark.read.schema(TABLE).options(**options)
    messages = reader.parquet(*[f"{where}/{path}" for path in paths])
    if selection.since > inputs.FIRST:
        messages = messages.where(F.col("time") >= selection.since)
    if selection.until < inputs.LAST:
        messages = messages.where(F.col("time") < selection.until)
    if selection.hosts:
        messages = messages.where(F.col("host").isin(*selection.hosts))
    return selected(messages, selection.patterns)


def rows_of(
    table: str, selection: Selection = ALL
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a table in the order of their times.

    Those of one time come by host, recorder and number.  It does not need
    Spark, and has the messages of a day in memory.  Raises: as open_table.
    """
    opened = open_table(table)
    time = pc.field("time")
    is_read = time >= pa.scalar(selection.since)
    is_read &= time < pa.scalar(selection.until)
    if selection.hosts:
        is_read &= pc.field("host").isin(selection.hosts)
    files = files_of(opened, selection)
    for day in sorted({file["partition.day"] for file in files}):
        of_day = [file for file in files if file["partition.day"] == day]
        rows = dataset_of(table, of_day).to_table(filter=is_read)
        rows = rows.sort_by([("time", "ascending"), *ORDER])
        if selection.patterns:
            rows = rows.filter(are_selected(selection.patterns, rows["key"]))
        for batch in rows.to_batches(1_000):
            yield from batch.to_pylist()


def files_of(
    opened: DeltaTable, selection: Selection = ALL
) -> list[dict[str, Any]]:
    """Return what the log says of the files that may have wanted messages."""
    files = pa.table(opened.get_add_actions(flatten=True)).to_pylist()
    return [file for file in files if may_have(file, selection)]


def dataset_of(table: str, files: Sequence[dict[str, Any]]) -> ds.Dataset:
    """Return some files of a table, which files_of returned.

    That of deltalake 1.6 passes over files without the least values of all
    columns, which versions before 0.3 wrote.
    """
    system, folder = fs.FileSystem.from_uri(absolute(table))
    paths = [f"{folder}/{file['path']}" for file in files]
    return ds.dataset(paths, schema_of(COLUMNS), "parquet", system)


def may_have(file: dict[str, Any], selection: Selection) -> bool:
    """Return whether a file of a table may have wanted messages."""
    day = file["partition.day"]
    first, last = file.get("min.time"), file.get("max.time")
    if not first or not last:  # it was written by a version before 0.3
        return selection.since.date() <= day <= selection.until.date()
    last += datetime.timedelta(milliseconds=1)
    return bool(first < selection.until and selection.since < last)


def open_table(table: str) -> DeltaTable:
    """Return a table as it is now.

    Raises: InputError if there is none, or one that ingest did not make.
    """
    where = absolute(table)
    files, folder = fs.FileSystem.from_uri(where)
    is_file = files.get_file_info(folder).type == fs.FileType.File
    if is_file or not DeltaTable.is_deltatable(where):
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    checkpoint = files.get_file_info(f"{folder}/_checkpoint")
    if checkpoint.type != fs.FileType.NotFound:
        raise InputError(
            f"{table}: it is of version 0.2: `sbus-spark convert` converts it"
        )
    opened = DeltaTable(where)
    check_is_ours(table, opened)
    return opened


def check_is_ours(table: str, opened: DeltaTable) -> None:
    """Raise InputError if a table has not our columns and partitions."""
    expected = Schema.from_arrow(schema_of(TABLE))
    pairs = [
        [(field.name, field.type) for field in schema.fields]
        for schema in (expected, opened.schema())
    ]
    is_by_day = opened.metadata().partition_columns == ["day"]
    if not is_by_day or pairs[0] != pairs[1]:
        raise InputError(f"{table}: it is no table that `ingest` made")


def make_table(table: str) -> None:
    """Make a table, unless there is one.

    Raises: InputError if something else is there.
    """
    if "://" not in table and re.search("%[0-9A-Fa-f]{2}", table):
        raise InputError(f"{table}: Delta reads % in a path as an escape")
    files, folder = fs.FileSystem.from_uri(table)
    if files.get_file_info(folder).type == fs.FileType.File:
        raise InputError(f"{table}: it is a file; name a new folder")
    listing = files.get_file_info(fs.FileSelector(folder, True))
    names = {file.base_name for file in listing}
    if DeltaTable.is_deltatable(table):
        open_table(table)
    elif names - {"_delta_log", "_quarantine"}:
        raise InputError(
            f"{table}: something other than a table is there; name a new"
            " folder"
        )
    quarantine = f"{table}/_quarantine"
    for where, columns in (quarantine, QUARANTINE), (table, TABLE):
        schema = Schema.from_arrow(schema_of(columns))
        DeltaTable.create(
            where, schema, "ignore", "day", configuration=RETENTION
        )


# ==== Upkeep =================================================================


def parts_of(table: str) -> Iterator[tuple[str, DeltaTable]]:
    """Yield a table, and its quarantine if nobody has removed that.

    Raises: as open_table.
    """
    where = absolute(table)
    yield where, open_table(table)
    quarantine = f"{where}/_quarantine"
    if DeltaTable.is_deltatable(quarantine):
        yield quarantine, DeltaTable(quarantine)


def expire(table: str, before: datetime.date) -> tuple[int, int]:
    """Drop the days of a table before a day.

    Return how many messages went, and how many lines of the quarantine.
    Raises: as open_table.
    """
    counts = []
    for part, opened in parts_of(table):
        log = settle(part, opened)

        # First, so that a kill lets no segment of those days come back
        if log.marks.get(EXPIRED, 0) < before.toordinal():
            commit(part, opened, [], {EXPIRED: before.toordinal()})
            opened.update_incremental()

        files = files_of(opened)
        old = [file for file in files if file["partition.day"] < before]
        counts.append(sum(file["num_records"] for file in old))
        if old:
            opened.delete(f"day < '{before}'")
        clear(part)
    return counts[0], sum(counts[1:])


def compact(table: str) -> tuple[int, int, int]:
    """Merge the small files of each day, of the quarantine as well.

    Return how many files there were, how many there are, and how many older
    ones were removed.  Raises: as open_table.
    """
    before = after = removed = 0
    for part, opened in parts_of(table):
        settle(part, opened)
        before += len(opened.file_uris())
        opened.optimize.compact()
        opened.update_incremental()
        after += len(opened.file_uris())
        now = time.time_ns() // 1_000_000
        commit(part, opened, [], {COMPACTED: now})
        removed += clear(part)
    return before, after, removed


def clear(where: str) -> int:
    """Remove files of days that no snapshot of the last READERS_HOURS names.

    The log of older commits goes as well: a checkpoint has what they did.
    Return how many files went.
    """
    opened = DeltaTable(where)
    files, folder = fs.FileSystem.from_uri(where)
    paths = [
        path
        for path in opened.vacuum(READERS_HOURS, True, False, full=True)
        if path.startswith("day=")  # else it is not the table's
    ]
    for path in paths:
        files.delete_file(f"{folder}/{path}")
    opened.create_checkpoint()
    opened.cleanup_metadata()
    return len(paths)


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
