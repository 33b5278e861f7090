"""The format `sbus`: captures to read, and buses to publish to.

    sbus_spark.register(spark)
    spark.read.format("sbus").load(CAPTURE)
    spark.readStream.format("sbus").load(CAPTURE)
    rows.write.format("sbus").mode("append").option("address", ADDRESS).save()

The README of pipeline/ lists options and guarantees; `messages` the columns.

A capture is a folder of segments, HOST_RUN-000001.jsonl and so on, in folders
of their days.  A recorder gives a segment its name once it is complete.  The
offset of a stream says for each recorder which segment was its first, which
comes next, and how many bytes of that one are read.
"""

from __future__ import annotations

import datetime
import heapq
import itertools
import math
import operator
import os
import re
import time
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

from .inputs import FIRST, LAST, InputError, absolute, moment, positive
from .matching import selects
from .messages import COLUMNS, SCHEMA, read_lines

# Hidden files are not complete, or another program's
SEGMENT = re.compile(
    r"(?:/[^._/][^/]*)*?"
    r"(?:/(\d{4}-\d\d-\d\d))?/([^._/][^/]*)-(\d{6,})\.jsonl"
)
HIDDEN = re.compile(r"\..*-\d{6,}\.jsonl")
LINE_TIME = re.compile(rb'"t":\s*([0-9]{1,19})')
READ_BYTES = 1 << 20  # of lines that are parsed at once
TASK_BYTES_MAX = 64 << 20  # of segments, unless one is larger
LINES = operator.methodcaller("split", "\n")
DAY = datetime.timedelta(days=1)
FILTERS = ("host", "pattern", "startingTime", "endingTime")
CAPTURE = ("path", *FILTERS, "minPartitions", "columnNameOfCorruptRecord")
STREAM = ("maxMessagesPerTrigger", "cleanSource")


def register(spark: SparkSession) -> None:
    """Teach a session the format `sbus`."""
    spark.dataSource.register(SbusSource)


class SbusSource(ds.DataSource):
    """Makes the readers and writers that the options ask for.

    It takes no filters from Spark: PySpark 4.3 mixes up those of two queries
    on one DataFrame.  Options select messages instead.
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
        self._check(*CAPTURE, *STREAM)
        return CaptureStream(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> Publisher:
        self._check("address", "speed", "checkpointLocation")
        for name in ["key", "payload"] + ["time"] * ("speed" in self.options):
            if name not in schema.names:
                raise InputError(f"publishing needs a column {name!r}")
        return Publisher(self.options)

    streamWriter = writer

    def _check(self, needed: str, *others: str) -> None:
        """Raise InputError for an option that is missing or unknown."""
        if needed not in self.options:
            raise InputError(f"the format sbus needs the option {needed!r}")
        for name in self.options:
            if name.lower() not in map(str.lower, (needed, *others)):
                told = f"there is no option {name!r}; choose from"
                raise InputError(f"{told} {', '.join((needed, *others))}")


def value_of(options: Any, name: str, kind: Any, default: Any = None) -> Any:
    """Return an option as *kind* makes it of its text.  Raises: InputError."""
    try:
        return kind(options[name]) if name in options else default
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name}: {error}") from None


class Piece(NamedTuple):
    """A segment, or a part of one that begins and ends with whole lines."""

    path: str
    start: int
    end: int
    may_match: bool  # if not, its name shows that it has nothing wanted
    written: float  # seconds since 1970


Place = tuple[int, int, int]  # first segment, next segment, bytes of that
Offset = dict[str, Place]
Segments = dict[str, dict[int, Piece]]  # by recorder and number


class Capture:
    """The segments in a folder, and which of their messages are wanted."""

    def __init__(self, options: Any) -> None:
        path = absolute(options["path"])
        self._files, folder = fs.FileSystem.from_uri(path)
        self._folder = folder.rstrip("/")
        kind = self._files.get_file_info(self._folder).type
        if kind != fs.FileType.Directory:
            raise InputError(f"{path}: there is no such directory")
        since = value_of(options, "startingTime", moment, FIRST)
        until = value_of(options, "endingTime", moment, LAST)
        # A segment may begin a day before, or end a day after, its folder's
        self._days = str((since - DAY).date()), str((until + DAY).date())
        at = pc.field("time")
        self._wanted = (at >= pa.scalar(since)) & (at < pa.scalar(until))
        hosts = value_of(options, "host", LINES, [])
        if hosts:
            self._wanted &= pc.field("host").isin(hosts)
        self._hosts = [re.sub("[^0-9A-Za-z.-]", "-", one) for one in hosts]
        self._patterns = value_of(options, "pattern", LINES)
        self._corrupt = options.get("columnNameOfCorruptRecord")
        least = value_of(options, "minPartitions", positive)
        self._tasks_min = least or os.cpu_count() or 1

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
            written = (file.mtime_ns or 0) / 1e9
            if match := SEGMENT.fullmatch(file.path[len(self._folder) :]):
                day, recorder, number = match.groups()
                may_match = self._may_match(day, recorder)
                piece = Piece(file.path, 0, file.size, may_match, written)
                pieces = segments.setdefault(recorder, {})
                if pieces.setdefault(int(number), piece) is not piece:
                    reason = f"{recorder} has another segment {number}"
                    raise InputError(f"{file.path}: {reason}")
            elif HIDDEN.match(file.base_name):
                hidden[file.path] = written
        return segments, hidden

    def _may_match(self, day: str | None, recorder: str) -> bool:
        """Return whether a segment may have wanted messages.

        The name of a recorder begins with its host and `_`.  A clock that was
        not yet set made a folder of 1970.
        """
        first, last = self._days
        host, mark, _ = recorder.partition("_")
        is_host = not self._hosts or not mark or host in self._hosts
        is_of_day = not day or day[:4] == "1970" or first <= day <= last
        return is_host and is_of_day

    def groups(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Return some pieces in groups of about the same size."""
        sizes = (piece.end - piece.start for piece in pieces)
        starts = [*itertools.accumulate(sizes, initial=0)]
        bytes_most = min(TASK_BYTES_MAX, starts[-1] // self._tasks_min + 1)
        groups: dict[int, list[Piece]] = {}
        for piece, start in zip(pieces, starts):
            middle = start + (piece.end - piece.start) // 2
            groups.setdefault(middle // bytes_most, []).append(piece)
        return list(groups.values())

    def _lines(self, piece: Piece) -> Iterator[bytes]:
        """Yield texts of whole lines, of about READ_BYTES each.

        No file stays open meanwhile: a stream with a limit looks into a
        segment of each recorder at once.
        """
        rest = b""
        for at in range(piece.start, piece.end, READ_BYTES):
            with self._files.open_input_file(piece.path) as file:
                text = file.read_at(min(READ_BYTES, piece.end - at), at)
            whole, end, rest = (rest + text).rpartition(b"\n")
            if end:
                yield whole + end
        if rest:  # no recorder leaves such a line
            yield rest + b"\n"

    def is_whole(self, piece: Piece) -> bool:
        """Return whether a segment ends with a whole line, as all do."""
        with self._files.open_input_file(piece.path) as file:
            return piece.end > 0 and file.read_at(1, piece.end - 1) == b"\n"

    def remove(self, piece: Piece) -> None:
        """Remove a segment."""
        self._files.delete_file(piece.path)

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the wanted messages of a task.

        Raises: InputError for a line that is none, unless a column is for it.
        """
        is_bad = pc.field("corrupt").is_valid()
        for piece in partition.value:
            for text in self._lines(piece):
                rows = read_lines(text).filter(is_bad | self._wanted)
                if self._patterns is not None:
                    keys = pc.unique(rows["key"]).drop_null().to_pylist()
                    chosen = selects(self._patterns, keys)
                    some = pa.array(itertools.compress(keys, chosen), "string")
                    rows = rows.filter(is_bad | pc.field("key").isin(some))
                if self._corrupt:
                    rows = rows.rename_columns([*SCHEMA.names, self._corrupt])
                else:
                    for why in rows["corrupt"].drop_null().to_pylist():
                        raise InputError(f"{piece.path}: {why:.200}")
                    rows = rows.drop_columns("corrupt")
                yield from rows.to_batches()


class CaptureReader(Capture, ds.DataSourceReader):
    """Reads what a capture holds."""

    def partitions(self) -> Sequence[ds.InputPartition]:
        files = itertools.chain(*map(dict.values, self.segments().values()))
        groups = self.groups([piece for piece in files if piece.may_match])
        # Of no partition, Spark makes its own
        return list(map(ds.InputPartition, groups or [[]]))


class CaptureStream(
    Capture, ds.DataSourceStreamReader, SupportsTriggerAvailableNow
):
    """Reads new segments, those of a recorder in the order of their numbers.

    It begins with number 1, or with the first one that startingTime selects.
    It waits for a segment that is missing, which may be on its way.  A limit
    takes the earliest messages of all recorders, so that none of them gets
    ahead of another one, and of a watermark.  Spark commits a batch when the
    next one begins: until then cleanSource leaves its segments.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        limit = value_of(options, "maxMessagesPerTrigger", positive)
        self._most = limit and math.ceil(min(limit, 1e15))
        clean = options.get("cleanSource", "off")
        is_filtered = any(name in options for name in FILTERS)
        self._is_cleaning = clean == "delete" and not is_filtered
        if clean != "off" and not self._is_cleaning:
            what = f"'off', or 'delete' without {', '.join(FILTERS)}"
            raise InputError(f"cleanSource is {what}; not {clean!r}")
        self._has_start = "startingTime" in options
        self._listed: Segments = {}  # when the batch began
        self._is_last = False  # segments that come later are left out

    def initialOffset(self) -> Offset:
        return {}

    def prepareForTriggerAvailableNow(self) -> None:
        self._listed, self._is_last = self.segments(), True

    def latestOffset(self, start: Offset, limit: object) -> Offset:
        if not self._is_last:
            self._listed = self.segments()
        return self._end(start, self._most)

    def reportLatestOffset(self) -> Offset:
        return self._end({}, None)

    def _end(self, start: Offset, most: int | None) -> Offset:
        """Return the offset after *most* messages, None for all."""
        places = []
        for recorder, files in self._listed.items():
            wanted = [n for n in files if files[n].may_match]
            first = min(wanted, default=-1)
            if wanted and not self._has_start:
                first = 1
            begin = start.get(recorder, (first, first, 0))
            places.append(self._places(recorder, files, begin, most))
        end = dict(start)
        for _, recorder, place in itertools.islice(heapq.merge(*places), most):
            end[recorder] = place
        return end

    def _places(
        self, recorder: str, files: dict[int, Piece], place: Place, most: Any
    ) -> Iterator[tuple[int, str, Place]]:
        """Yield the places after each unread line of a recorder, with times.

        Without a limit there are only those after each segment.
        """
        first, number, at = place
        t = 0
        while piece := files.get(number):
            rest = piece._replace(start=at)
            for text in self._lines(rest) if most else ():
                for line in text.split(b"\n")[:-1]:
                    at += len(line) + 1
                    if match := LINE_TIME.search(line):
                        t = int(match[1])
                    if at < piece.end:
                        yield t, recorder, (first, number, at)
            number, at = number + 1, 0
            yield t, recorder, (first, number, at)

    def partitions(self, start: Offset, end: Offset) -> Sequence[Any]:
        segments = self._listed or self.segments()
        pieces = []
        for recorder, (first, last, last_at) in end.items():
            files = segments.get(recorder, {})
            _, number, at = start.get(recorder, (first, first, 0))
            while (number, at) < (last, last_at):
                if number not in files:
                    what = f"segment {number} of {recorder} is gone, unread"
                    raise InputError(f"{self._folder}: {what}")
                stop = last_at if number == last else files[number].end
                pieces.append(files[number]._replace(start=at, end=stop))
                number, at = number + 1, 0
        return list(map(ds.InputPartition, self.groups(pieces)))

    def commit(self, end: Offset) -> None:
        for recorder, (first, last, _) in end.items():
            files = self._listed.get(recorder, {}) if self._is_cleaning else {}
            for number in [one for one in files if first <= one < last]:
                self.remove(files.pop(number))


class Publisher(ds.DataSourceArrowWriter, ds.DataSourceStreamArrowWriter):
    """Publishes the rows of each partition, in order, at least once.

    With a *speed* it keeps the times between rows, that many times as fast.
    """

    def __init__(self, options: Any) -> None:
        self._address = options["address"]
        self._speed = value_of(options, "speed", positive, float("inf"))

    def write(self, iterator: Any) -> ds.WriterCommitMessage:
        """Publish rows.  Raises: InputError with the row that is refused."""
        rows = (row for batch in iterator for row in batch.to_pylist())
        began, first = time.monotonic(), None
        with Client(self._address) as bus:
            for number, row in enumerate(rows, 1):
                key = row["key"]
                if self._speed < float("inf"):
                    first = first or row["time"]
                    due = (row["time"] - first).total_seconds() / self._speed
                    time.sleep(max(0.0, began + due - time.monotonic()))
                if row["payload"] is None:
                    reason = "it was recorded without its payload"
                    raise InputError(f"key {key!r:.80}: {reason}")
                try:
                    name = key.encode("latin-1") if type(key) is str else key
                    bus.publish(name, row["payload"])
                except (SbusError, TypeError, UnicodeError) as error:
                    what = f"row {number} of a partition, key {key!r:.80}"
                    raise InputError(f"{what}: {error}") from None
            bus.sync()
        return ds.WriterCommitMessage()

    def commit(self, *told: Any) -> None:
        """Do nothing: what is published is published."""

    abort: Any = commit  # a stream publishes its batch again
