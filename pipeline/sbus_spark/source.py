"""The format `sbus`: captures to read, and buses to publish to.

    sbus_spark.register(spark)
    spark.read.format("sbus").load(CAPTURE)
    spark.readStream.format("sbus").load(CAPTURE)
    rows.write.format("sbus").mode("append").option("address", ADDRESS).save()

The README of pipeline/ lists options and guarantees; `messages` the columns.

A capture is a folder of segments, HOST_RUN-000001.jsonl and so on, in folders
of their days.  A recorder gives a segment its name once it is complete.  The
offset of a stream says for each recorder which segment was its first, and
which comes next.
"""

from __future__ import annotations

import datetime
import heapq
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import fs
from pyspark.sql import SparkSession
from pyspark.sql import datasource as ds
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from sbus_client import Client, SbusError

from .inputs import FIRST, InputError, absolute, moment, positive
from .messages import CHUNK_BYTES, COLUMNS, SCHEMA, lines_of, read_lines

# Hidden files are not complete, or another program's
SEGMENT = re.compile(
    r"(?:/[^._/][^/]*)*?"
    r"(?:/(\d{4}-\d\d-\d\d))?/([^._/][^/]*)-(\d{6,})\.jsonl"
)
HIDDEN = re.compile(r"\..*-\d{6,}\.jsonl")
TASK_BYTES_MAX = 64 << 20  # of segments, unless a segment is larger
DAY = datetime.timedelta(days=1)
CAPTURE = ("path", "startingTime", "columnNameOfCorruptRecord")


def register(spark: SparkSession) -> None:
    """Teach a session the format `sbus`."""
    spark.dataSource.register(SbusSource)


class SbusSource(ds.DataSource):
    """Makes the readers and writers that the options ask for.

    It takes no filters from Spark: PySpark 4.3 mixes up those of two queries
    on one DataFrame.  An option skips old segments instead.
    """

    @classmethod
    def name(cls) -> str:
        return "sbus"

    def schema(self) -> str:
        corrupt = self.options.get("columnNameOfCorruptRecord")
        return f"{COLUMNS}, `{corrupt}` string" if corrupt else COLUMNS

    def reader(self, schema: StructType) -> CaptureReader:
        self._check(*CAPTURE)
        return CaptureReader(self.options)

    def streamReader(self, schema: StructType) -> CaptureStream:
        self._check(*CAPTURE, "maxFilesPerTrigger")
        return CaptureStream(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> Publisher:
        self._check("address", "checkpointLocation")
        for name in "key", "payload":
            if name not in schema.names:
                raise InputError(f"publishing needs a column {name!r}")
        return Publisher(self.options)

    streamWriter = writer

    def _check(self, needed: str, *others: str) -> None:
        """Raise InputError for an option that is missing or unknown."""
        if needed not in self.options:
            raise InputError(f"the format sbus needs the option {needed!r}")
        names = needed, *others
        for name in self.options:
            if name.lower() not in map(str.lower, names):
                reason = f"there is no option {name!r}; choose from"
                raise InputError(f"{reason} {', '.join(names)}")


def value_of(options: Any, name: str, kind: Any, default: Any = None) -> Any:
    """Return an option as *kind* makes it of its text.  Raises: InputError."""
    try:
        return kind(options[name]) if name in options else default
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name}: {error}") from None


# ==== Captures ===============================================================


class Segment(NamedTuple):
    """A file of a capture, as it was listed."""

    path: str
    size: int  # bytes
    written: float  # seconds since 1970
    is_old: bool  # its folder is of a day before all that is to be read


Place = tuple[int, int]  # a recorder's first segment, and its next
Offset = dict[str, Place]
Segments = dict[str, dict[int, Segment]]  # by recorder and number


class Capture:
    """The segments in a folder, and which of their messages to read."""

    def __init__(self, options: Any) -> None:
        path = absolute(options["path"])
        self._files, folder = fs.FileSystem.from_uri(path)
        self._folder = folder.rstrip("/")
        kind = self._files.get_file_info(self._folder).type
        if kind != fs.FileType.Directory:
            reason = "there is no such folder; `sbus record` makes one"
            raise InputError(f"{path}: {reason}")
        log = self._files.get_file_info(f"{self._folder}/_delta_log")
        if log.type != fs.FileType.NotFound:
            raise InputError(f"{path}: it is a table, and no capture")

        self._start = value_of(options, "startingTime", moment, FIRST)
        # A segment may end a day after its folder's
        self._first_day = str((self._start - DAY).date())
        self._corrupt = options.get("columnNameOfCorruptRecord")

    def segments(self) -> Segments:
        """Return all segments.  Raises: InputError if two files are one."""
        return self.files()[0]

    def files(self) -> tuple[Segments, dict[str, float]]:
        """Return all segments, and when those that are hidden were written.

        The latter are incomplete, by their paths.  Raises: as segments.
        """
        segments: Segments = {}
        hidden: dict[str, float] = {}
        listing = fs.FileSelector(self._folder, recursive=True)
        for file in self._files.get_file_info(listing):
            if file.type != fs.FileType.File:
                continue  # to read a FIFO would wait for a writer
            written = (file.mtime_ns or 0) / 1e9
            if match := SEGMENT.fullmatch(file.path[len(self._folder) :]):
                day, recorder, number = match.groups()
                # A clock that was not yet set made a folder of 1970
                is_old = bool(day) and "1971" <= day < self._first_day
                segment = Segment(file.path, file.size, written, is_old)
                numbered = segments.setdefault(recorder, {})
                if numbered.setdefault(int(number), segment) is not segment:
                    reason = f"{recorder} has another segment {number}"
                    raise InputError(f"{file.path}: {reason}; remove one")
            elif HIDDEN.match(file.base_name):
                hidden[file.path] = written
        return segments, hidden

    def groups(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Return segments in groups of about the same size, one a core."""
        starts = [*itertools.accumulate((x.size for x in segments), initial=0)]
        cores = os.cpu_count() or 1
        limit = min(TASK_BYTES_MAX, starts[-1] // cores + 1)
        groups: dict[int, list[Segment]] = {}
        for segment, start in zip(segments, starts):
            middle = start + segment.size // 2
            groups.setdefault(middle // limit, []).append(segment)
        return list(groups.values())

    def is_whole(self, segment: Segment) -> bool:
        """Return whether a segment ends with a whole line, as all do."""
        if segment.size == 0:
            return False
        with self._files.open_input_file(segment.path) as file:
            return bool(file.read_at(1, segment.size - 1) == b"\n")

    def last_message(self, segment: Segment) -> pa.Table:
        """Return the last message of a segment as it is now, as a table.

        It has no row if the last CHUNK_BYTES have no message.
        """
        with self._files.open_input_file(segment.path) as file:
            start = max(0, file.size() - CHUNK_BYTES)
            text = file.read_at(CHUNK_BYTES, start)
        # The first line may be cut, and is no message then
        rows = read_lines(text.removesuffix(b"\n") + b"\n")
        return rows.filter(rows["corrupt"].is_null()).drop("corrupt")[-1:]

    def remove(self, segment: Segment) -> None:
        """Remove a segment, unless it has changed since it was listed."""
        file = self._files.get_file_info(segment.path)
        listed = segment.size, segment.written
        if (file.size, (file.mtime_ns or 0) / 1e9) == listed:
            self._files.delete_file(segment.path)

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task.

        Raises: InputError for a line that is none, unless a column is for it.
        """
        for segment in partition.value:
            for text in lines_of(self._files, segment.path, 0, segment.size):
                if not text.endswith(b"\n"):  # no recorder leaves such a line
                    text += b"\n"
                is_bad = pc.field("corrupt").is_valid()
                is_new = pc.field("time") >= pa.scalar(self._start)
                rows = read_lines(text).filter(is_bad | is_new)
                if self._corrupt:
                    rows = rows.rename_columns([*SCHEMA.names, self._corrupt])
                else:
                    for reason in rows["corrupt"].drop_null().to_pylist():
                        raise InputError(f"{segment.path}: {reason:.200}")
                    rows = rows.drop_columns("corrupt")
                yield from rows.to_batches()


class CaptureReader(Capture, ds.DataSourceReader):
    """Reads what a capture holds."""

    def partitions(self) -> Sequence[ds.InputPartition]:
        files = itertools.chain(*map(dict.values, self.segments().values()))
        groups = self.groups([x for x in files if not x.is_old])
        # Of no partition, Spark makes its own
        return list(map(ds.InputPartition, groups or [[]]))


class CaptureStream(
    Capture, ds.DataSourceStreamReader, SupportsTriggerAvailableNow
):
    """Reads new segments, those of a recorder in the order of their numbers.

    It begins with number 1, or with the first one that startingTime selects.
    It waits for a segment that is missing, which may be on its way.  A limit
    takes the segments that were written first, so that no recorder gets ahead
    of another, and of a watermark.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        limit = value_of(options, "maxFilesPerTrigger", positive)
        self._limit = limit and math.ceil(min(limit, 1e15))
        self._has_start = "startingTime" in options
        self._listing: Segments = {}  # when the batch began
        self._is_last = False  # segments that come later are left out

    def initialOffset(self) -> Offset:
        return {}

    def prepareForTriggerAvailableNow(self) -> None:
        self._listing = self.segments()
        self._is_last = True

    def latestOffset(self, start: Offset, limit: object) -> Offset:
        if not self._is_last:
            self._listing = self.segments()
        return self._end(start, self._limit)

    def reportLatestOffset(self) -> Offset:
        return self._end({}, None)

    def _end(self, start: Offset, limit: int | None) -> Offset:
        """Return the offset after as many segments; None is all."""
        waiting = [self._waiting(name, start) for name in self._listing]
        end = dict(start)
        earliest = itertools.islice(heapq.merge(*waiting), limit)
        for _, recorder, place in earliest:
            end[recorder] = place
        return end

    def _waiting(
        self, recorder: str, start: Offset
    ) -> Iterator[tuple[float, str, Place]]:
        """Yield a recorder's unread segments.

        Of each, when it was written, the recorder, and the place after it.
        """
        segments = self._listing[recorder]
        first = 1
        if self._has_start:
            numbers = [n for n in segments if not segments[n].is_old]
            first = min(numbers, default=-1)
        # Version 0.2 had a third number
        first, number, *_ = start.get(recorder, (first, first))
        while segment := segments.get(number):
            number += 1
            yield segment.written, recorder, (first, number)

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        segments = self._listing or self.segments()
        batch = []
        for recorder, (first, last, *_) in end.items():
            numbered = segments.get(recorder, {})
            _, begin, *_ = start.get(recorder, (first, first))
            for number in range(begin, last):
                if number not in numbered:
                    reason = f"segment {number} of {recorder} is gone, unread"
                    raise InputError(f"{self._folder}: {reason}")
                batch.append(numbered[number])
        return list(map(ds.InputPartition, self.groups(batch)))


# ==== Buses ==================================================================


class Publisher(ds.DataSourceArrowWriter, ds.DataSourceStreamArrowWriter):
    """Publishes the rows of each partition, in order, at least once."""

    def __init__(self, options: Any) -> None:
        self._address = options["address"]

    def write(self, iterator: Any) -> ds.WriterCommitMessage:
        """Publish rows.  Raises: as publish."""
        with Client(self._address) as bus:
            for batch in iterator:
                for row in batch.to_pylist():
                    publish(bus, row)
            bus.sync()
        return ds.WriterCommitMessage()

    def commit(self, *_: Any) -> None:
        """Do nothing: what is published is published."""

    abort: Any = commit  # a stream publishes its batch again


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
