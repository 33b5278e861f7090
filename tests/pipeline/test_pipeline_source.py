"""Tests of the format `sbus`: captures, and buses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyarrow import fs  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_client import Client
from sbus_spark.source import SbusSource

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def write(path: Path, numbers: Iterable[int], **fields: Any) -> Path:
    """Write a segment of messages."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(capture_line(n, **fields) for n in numbers))
    return path


def make(kind: str, **options: object) -> Any:
    """Return a reader, as Spark makes it."""
    source = SbusSource({name: str(one) for name, one in options.items()})
    return getattr(source, kind)(StructType())


def read(reader: Any, tasks: Any) -> list[int]:
    """Return the numbers of what tasks read."""
    batches = [one for task in tasks for one in reader.read(task)]
    return sorted(n for one in batches for n in one["n"].to_pylist())


def read_all(path: Path, **options: str) -> list[int]:
    """Return the numbers of what a capture holds."""
    reader = make("reader", path=path, **options)
    return read(reader, reader.partitions())


def read_next(stream: Any, start: Any) -> tuple[list[int], Any]:
    """Return the numbers of the next batch of a stream, and its offset."""
    end = stream.latestOffset(start, None)
    return read(stream, stream.partitions(start, end)), end


def test_a_capture_as_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """Queries of one frame are told apart, and errors are one line."""
    sbus_spark.register(spark)
    write(tmp_path / "R-000001.jsonl", [3], key="\xe9")
    write(tmp_path / "S-000001.jsonl", range(1, 51), host="g")
    frame = spark.read.load(str(tmp_path), "sbus")
    some = frame.filter("host = 'g' and time > timestamp'2025-01-01'")
    assert some.union(frame).count() == 101 and some.count() == 50
    rows = frame.filter("host = 'h'").selectExpr("*", "string(time)")
    (row,) = rows.collect()
    wanted = "h", "R", 3, row["time"], "\xe9", b"\xe9", 3, b"xxx"
    assert row[:8] == wanted and row[8] == "2025-11-21 09:24:13.003"
    for name, told in (
        ("startingTimestamp", "no option 'startingtimestamp'; .* path, "),
        ("startingTime", "startingTime: Invalid isoformat"),
    ):
        reader = spark.read.format("sbus").option(name, "-1")
        with pytest.raises(PySparkException, match=f"InputError: .*{told}"):
            reader.load(str(tmp_path)).count()
    writer = frame.select("key").write.format("sbus").mode("append")
    with pytest.raises(PySparkException, match="needs a column 'payl"):
        writer.save(address="x")


def test_a_line_that_is_no_message(tmp_path: Path) -> None:
    """It fails the job, or is a row, whatever else is asked for."""
    path = write(tmp_path / "R-000001.jsonl", [1, 0, 3])
    few = {"startingTime": "2025-11-21T09:24:13.002"}
    with pytest.raises(sbus_spark.InputError, match=f"{path}: n is below 1: "):
        read_all(tmp_path, **few)
    assert read_all(tmp_path, **few, columnNameOfCorruptRecord="y") == [0, 3]


def test_which_files_are_segments(tmp_path: Path) -> None:
    """Those with a number that are not hidden, each there once."""
    names = "R R-1 .R-000003 R-000001 R-000002"
    for n, name in enumerate(names.split()):
        write(tmp_path / "2025-11-21" / f"{name}.jsonl", [n])
    assert read_all(tmp_path) == [3, 4]
    write(tmp_path / "R-000002.jsonl", [5])
    with pytest.raises(sbus_spark.InputError, match="R has another segment"):
        read_all(tmp_path)


def test_a_start(tmp_path: Path) -> None:
    """What is from then on belongs to it, and UTC is the rule.

    A segment in the folder of a day before is not read.
    """
    write(tmp_path / "2025-11-21" / "h_R-000001.jsonl", range(1, 101))
    start = "2025-11-22T00:24:13.098+15:00"
    assert read_all(tmp_path, startingTime=start) == [98, 99, 100]
    write(tmp_path / "2025-11-19" / "h_R-000002.jsonl", [0])
    start = "2025-11-21T09:24:13.098"
    assert read_all(tmp_path, startingTime=start) == [98, 99, 100]
    with pytest.raises(sbus_spark.InputError, match="R-000002.jsonl: n is"):
        read_all(tmp_path)


def test_a_clock_that_was_not_set(tmp_path: Path) -> None:
    """A segment in a folder of 1970 may have messages of any day."""
    write(tmp_path / "1970-01-01" / "R-000001.jsonl", [1, 2])
    assert read_all(tmp_path, startingTime="2025-11-21") == [1, 2]


def test_a_segment_that_is_missing(tmp_path: Path) -> None:
    """It is waited for; one that goes before it is read is named."""
    paths = [write(tmp_path / f"R-00000{n}.jsonl", [n]) for n in (1, 2, 3)]
    stream, late = make("streamReader", path=tmp_path), tmp_path / "late"
    paths[1].rename(late)
    found, end = read_next(stream, {})
    assert found == [1] and read_next(stream, end) == ([], end)
    late.rename(paths[1])
    found, last = read_next(stream, end)
    assert found == [2, 3] and stream.reportLatestOffset() == last
    paths[1].unlink()
    with pytest.raises(sbus_spark.InputError, match="segment 2 of R is gone"):
        make("streamReader", path=tmp_path).partitions(end, last)


def test_a_first_segment_that_is_late(tmp_path: Path) -> None:
    """It is waited for, as number 1 is the first."""
    for n in (2, 3):
        write(tmp_path / f"R-00000{n}.jsonl", [n])
    stream = make("streamReader", path=tmp_path)
    found, end = read_next(stream, {})
    assert found == []
    write(tmp_path / "R-000001.jsonl", [1])
    assert read_next(stream, end)[0] == [1, 2, 3]


def test_a_start_that_changes(tmp_path: Path) -> None:
    """Older segments are passed over on a checkpoint, not waited for."""
    for n in (1, 2, 3, 4):
        write(tmp_path / f"2025-11-{12 + 3 * n}" / f"R-00000{n}.jsonl", [n])
    first = make("streamReader", path=tmp_path, maxFilesPerTrigger=1)
    _, end = read_next(first, {})
    since = make("streamReader", path=tmp_path, startingTime="2025-11-21")
    assert since.latestOffset(end, None) == {"R": (1, 5)}
    assert since.latestOffset({}, None) == {"R": (3, 5)}


def test_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the segments of all recorders that were written first.

    So none is behind a watermark.  A batch takes one listing.
    """
    for n in range(1, 101):
        for recorder in ("2025-11-21/R", "2025-11-22/S"):
            path = write(tmp_path / f"{recorder}-{n:06}.jsonl", [n])
            os.utime(path, (n, n))
    listing = Mock(wraps=fs.FileSelector)
    monkeypatch.setattr(fs, "FileSelector", listing)
    stream = make("streamReader", path=tmp_path, maxFilesPerTrigger=80)
    end: Any = {}
    for first in (1, 41, 81):
        numbers, end = read_next(stream, end)
        assert numbers == sorted([*range(first, min(first + 40, 101))] * 2)
    assert listing.call_count == 3


def test_a_stream_publishes(
    spark: SparkSession, hearer: Client, tmp_path: Path
) -> None:
    """In order; a row that the bus refuses ends it."""
    sbus_spark.register(spark)
    path = write(tmp_path / "capture" / "R-000001.jsonl", range(1, 51))
    stream = spark.readStream.format("sbus").load(str(path.parent))
    writer = stream.writeStream.format("sbus").trigger(availableNow=True)
    writer = writer.option("checkpointLocation", f"{tmp_path}/check")
    writer = writer.option("address", hearer.address)
    writer.start().awaitTermination()
    heard = [hearer.receive()[0].decode() for _ in range(50)]
    assert heard == [f"k/{n % 7}" for n in range(1, 51)]
    write(path.with_name("R-000002.jsonl"), [51], key="!")
    with pytest.raises(PySparkException, match="InputError: key '!': "):
        writer.start().awaitTermination()
