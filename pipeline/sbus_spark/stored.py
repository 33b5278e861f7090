"""The data source `sbus`, stored: the messages of captures and of tables.

Facts:

- What a reader plans in one process of Python, and its tasks read in others:
  readers and partitions are pickled.
- The offset of a capture is, for each recorder, in which of its segments the
  stream is, and how many bytes of that are read.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

import sbus

from .common import InputError
from .segments import message_of
from .table import leaves, rows_in

COLUMNS = (
    "host string, recorder string, n long, time timestamp,"
    " key string, payload binary"
)
SEGMENT = re.compile(r"([^._].*)-([0-9]{6,})\.jsonl")
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
KNOWN_KEYS_MAX = 100_000
Selects = Callable[[str], bool]


class Row(NamedTuple):
    """A message as a row of COLUMNS."""

    host: str
    recorder: str
    n: int
    time: datetime.datetime
    key: str
    payload: bytes


def is_any(key: str) -> bool:
    """Return that a key is wanted, whatever it is."""
    return True


class Selection:
    """Says whether one of some patterns selects a key, secret or not."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [text.encode("latin-1") for text in patterns]
        self._known: dict[str, bool] = {}

    def __call__(self, key: str) -> bool:
        found = self._known.get(key)
        if found is None:
            text = key.encode("latin-1")
            found = any(
                sbus.pattern_matches(one, text) for one in self._patterns
            )
            if len(self._known) < KNOWN_KEYS_MAX:
                self._known[key] = found
        return found


# =============================================================================
# Captures
# =============================================================================


class Piece(InputPartition):
    """Some bytes of a segment, at the ends of lines; to its end if None."""

    def __init__(self, path: str, start: int, end: int | None) -> None:
        self.path = path
        self.start = start
        self.end = end


def rows_of(piece: Piece, selects: Selects, start: int) -> Iterator[Row]:
    """Return the messages in a piece of a segment.

    Raises: InputError if a line is none, or the segment is gone.
    """
    if not os.path.exists(piece.path):
        raise InputError(f"{piece.path}: it is gone, and was unread")
    with open(piece.path, "rb") as segment:
        segment.seek(piece.start)
        place = piece.start
        for line in segment:
            place += len(line)
            try:
                found = message_of(line)
            except ValueError as error:
                where = f"{piece.path}, the line up to byte {place}"
                raise InputError(f"{where}: {error}") from None
            if found["t"] >= start and selects(found["key"]):
                yield row_of(found)
            if place == piece.end:
                return


def row_of(found: dict[str, Any]) -> Row:
    """Return a message as a row."""
    time = EPOCH + datetime.timedelta(microseconds=found["t"] // 1_000)
    names = ("host", "rec", "n", "key", "data")
    host, recorder, n, key, payload = (found[name] for name in names)
    return Row(host, recorder, n, time, key, payload)


class Capture:
    """The segments in a folder that programs on other hosts can fill, too."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise InputError(f"{path}: there is no such directory")
        self.path = path

    def segments(self) -> dict[str, dict[int, str]]:
        """Return the files of each recorder, by their numbers."""
        found: dict[str, dict[int, str]] = {}
        for name in sorted(os.listdir(self.path)):
            match = SEGMENT.fullmatch(name)
            if match:
                path = os.path.join(self.path, name)
                found.setdefault(match[1], {})[int(match[2])] = path
        return found


class CaptureReader(DataSourceReader):
    """Reads all segments of a capture, each in a task."""

    def __init__(self, path: str, selects: Selects, start: int) -> None:
        self._capture = Capture(path)
        self._selects = selects
        self._start = start

    def partitions(self) -> list[InputPartition]:
        return [
            Piece(path, 0, None)
            for files in self._capture.segments().values()
            for path in files.values()
        ]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Piece)
        return rows_of(partition, self._selects, self._start)


class CaptureStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new segments, those of a recorder in the order of their numbers.

    A segment that is missing is waited for: it may be on its way.
    """

    def __init__(
        self,
        capture: Capture,
        selects: Selects,
        start: int,
        most: int | None,
    ) -> None:
        self._capture = capture
        self._selects = selects
        self._start = start
        self._most = most
        self._last: dict[str, dict[int, str]] | None = None  # to be read

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._capture.segments()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._most) if self._most else ReadAllAvailable()

    def latestOffset(
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        left = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = dict(start)
        segments = self._last
        if segments is None:
            segments = self._capture.segments()
        for recorder in {**start, **segments}:
            files = segments.get(recorder, {})
            number, offset = place_of(start, recorder, files)
            if offset and number not in files:
                raise self._gone(recorder, number)
            while number in files and left != 0:
                size, count = measure(files[number], offset, left)
                left = None if left is None else left - count
                offset += size
                if offset < os.path.getsize(files[number]):
                    break
                number, offset = number + 1, 0
            end[recorder] = {"segment": number, "bytes": offset}
        return end

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> list[InputPartition]:
        pieces: list[InputPartition] = []
        segments = self._capture.segments()
        for recorder in end:
            files = segments.get(recorder, {})
            number, offset = place_of(start, recorder, files)
            last, last_offset = place_of(end, recorder, files)
            try:
                for each in range(number, last):
                    pieces.append(Piece(files[each], offset, None))
                    offset = 0
                if last_offset > offset:
                    pieces.append(Piece(files[last], offset, last_offset))
            except KeyError as error:
                raise self._gone(recorder, error) from None
        return pieces

    def _gone(self, recorder: str, number: object) -> InputError:
        what = f"segment {number} of {recorder} is gone, and was unread"
        return InputError(f"{self._capture.path}: {what}")

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Piece)
        return rows_of(partition, self._selects, self._start)


def place_of(
    offsets: dict[str, Any], recorder: str, files: dict[int, str]
) -> tuple[int, int]:
    """Return in which segment of a recorder an offset is, and where."""
    place = offsets.get(recorder)
    if place is None:
        return min(files, default=1), 0
    return place["segment"], place["bytes"]


def measure(path: str, start: int, most: int | None) -> tuple[int, int]:
    """Return the bytes and the number of the next lines of a segment."""
    if most is None:
        return os.path.getsize(path) - start, 0
    size = count = 0
    with open(path, "rb") as segment:
        segment.seek(start)
        for line in segment:
            size += len(line)
            count += 1
            if count == most:
                break
    return size, count


# =============================================================================
# Tables
# =============================================================================


class Leaf(InputPartition):
    """A file of a table."""

    def __init__(self, path: str) -> None:
        self.path = path


class TableReader(DataSourceReader):
    """Reads the files of a table, each in a task."""

    def __init__(self, path: str, selects: Selects) -> None:
        self._path = path
        self._selects = selects

    def partitions(self) -> list[InputPartition]:
        return [Leaf(file) for file in leaves(self._path)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.compute as compute  # type: ignore[import-untyped]

        assert isinstance(partition, Leaf)
        stamp = pyarrow.timestamp("us", "UTC")
        for batch in rows_in(partition.path, ["rec", "n", "t", "key", "data"]):
            keys = compute.unique(batch["key"]).to_pylist()
            wanted = pyarrow.array(
                [key for key in keys if self._selects(key)], pyarrow.string()
            )
            if len(wanted) < len(keys):
                batch = batch.filter(compute.is_in(batch["key"], wanted))
            time = compute.divide(batch["t"], 1_000).cast(stamp)
            batch = batch.set_column(3, "time", time)
            yield batch.rename_columns(Row._fields)
