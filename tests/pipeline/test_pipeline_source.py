"""Tests of the data source `sbus`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import sbus_spark
from pipeline_bed import TIMEOUT
from real_bus import RealBus
from sbus_client import Client, Message
from sbus_spark.live import LiveStream, publish_rows
from sbus_spark.segments import message_of
from sbus_spark.stored import (
    EPOCH,
    Capture,
    CaptureStream,
    is_any,
)

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

BAD_LINES = [
    "",
    "[1]",
    "{}",
    '{"rec": "R"}',
    capture_line(1).replace('"n": 1', '"n": "1"'),
    capture_line(1).replace('"n": 1', '"n": 0'),
    capture_line(1, host="a\0"),
    capture_line(1, host=""),
    capture_line(1, t=1 << 63),
    capture_line(1).replace('"data": "', '"data": "!'),
    capture_line(1).replace('"size": ', '"size": 9'),
    capture_line(1).replace('"key": "', '"key": "\\u0100'),
    capture_line(1).replace('"key": "', '"key": "\\u0000'),
]


@pytest.fixture(scope="module")
def knowing(spark: SparkSession) -> SparkSession:
    """Return the session of the tests, which knows the format `sbus`."""
    sbus_spark.register(spark)
    return spark


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[RealBus]:
    """Run a bus."""
    with RealBus(tmp_path) as running:
        yield running


def rows_of(spark: SparkSession, path: Path, **options: Any) -> list[Any]:
    """Return the rows of a capture or table, in order."""
    rows = spark.read.format("sbus").options(**options).load(str(path))
    return sorted(rows.collect())


class Stream:
    """A stream of a capture that notes the numbers of each batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self.batches: list[list[int]] = []

    def run(self, **options: Any) -> list[list[int]]:
        """Read what is new, and return the batches."""
        self.batches.clear()
        reader = self._spark.readStream.format("sbus").options(**options)
        rows = reader.load(str(self._folder / "capture"))
        writer = rows.writeStream.foreachBatch(self._note)
        where = str(self._folder / "checkpoint")
        writer = writer.option("checkpointLocation", where)
        writer.trigger(availableNow=True).start().awaitTermination()
        return self.batches

    def _note(self, rows: DataFrame, _: int) -> None:
        self.batches.append(sorted(row["n"] for row in rows.collect()))


class TestStored:
    """Captures and tables are read alike."""

    def test_a_capture_and_its_table(
        self, knowing: SparkSession, tmp_path: Path
    ) -> None:
        """By pattern and, for captures, from a time on."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 3)
        sbus_spark.ingest(knowing, str(capture), str(table))
        rows = rows_of(knowing, capture)
        assert len(rows) == 300 and rows == rows_of(knowing, table)
        key = rows[0]["key"]
        wanted = [row for row in rows if row["key"] == key]
        for path in (capture, table):
            assert rows_of(knowing, path, pattern=key) == wanted
        middle = json.loads(capture_line(150))["t"] // 1_000
        start = EPOCH + datetime.timedelta(microseconds=middle)
        late = rows_of(knowing, capture, startingTime=start.isoformat())
        assert [row["n"] for row in late] == [*range(150, 301)]

    def test_lines_that_are_no_messages(
        self, knowing: SparkSession, tmp_path: Path
    ) -> None:
        """The same ones, for the same reasons, as ingest has."""
        text = "".join(line.strip() + "\n" for line in BAD_LINES)
        (tmp_path / "R-000001.jsonl").write_text(text)
        rows = sbus_spark.read_capture(knowing, str(tmp_path)).collect()
        assert len(rows) == len(BAD_LINES)
        for row in rows:
            with pytest.raises(ValueError) as raised:
                message_of(row["line"].encode("utf-8"))
            assert str(raised.value) == row["reason"]
        with pytest.raises(PySparkException, match="the line up to byte 1: "):
            rows_of(knowing, tmp_path)

    def test_a_stream_reads_each_message_once(
        self, knowing: SparkSession, tmp_path: Path
    ) -> None:
        """At most so many at a time; new segments after a restart."""
        capture = tmp_path / "capture"
        write_segments(capture, 2)
        stream = Stream(knowing, tmp_path)
        batches = stream.run(maxMessagesPerTrigger=70)
        assert [len(numbers) for numbers in batches] == [70, 70, 60]
        assert sum(batches, []) == [*range(1, 201)]
        write_segments(capture, 4)
        (capture / "R-000002.jsonl").rename(tmp_path / "late")
        assert stream.run() == []
        (tmp_path / "late").rename(capture / "R-000002.jsonl")
        assert sorted(sum(stream.run(), [])) == [*range(201, 401)]

    def test_a_segment_that_was_removed_unread(self, tmp_path: Path) -> None:
        """One line names it, whenever it was removed."""
        write_segments(tmp_path, 2)
        stream = CaptureStream(Capture(str(tmp_path)), is_any, 0, None)
        half = stream.latestOffset({}, ReadMaxRows(150))
        end = stream.latestOffset(half, ReadAllAvailable())
        assert end == {"R": {"segment": 2, "bytes": 0}}
        (planned,) = stream.partitions(half, end)
        (tmp_path / "R-000001.jsonl").unlink()
        told = "R-000001.jsonl: it is gone, and was unread"
        with pytest.raises(sbus_spark.InputError, match=told):
            list(stream.read(planned))
        told = "segment 1 of R is gone, and was unread"
        with pytest.raises(sbus_spark.InputError, match=told):
            stream.partitions(half, end)
        for _ in range(2):
            with pytest.raises(sbus_spark.InputError, match=told):
                stream.latestOffset(half, ReadAllAvailable())
            (tmp_path / "R-000000.jsonl").unlink(missing_ok=True)


class TestLive:
    """A bus is heard, and rows are published."""

    def test_what_is_published_is_heard(
        self, knowing: SparkSession, bus: RealBus
    ) -> None:
        """In the order of the rows; a stream hears what matches."""
        reader = knowing.readStream.format("sbus")
        reader = reader.option("address", bus.path).option("pattern", "a/")
        writer = reader.load().writeStream.format("memory").queryName("heard")
        query = writer.start()
        try:
            while query.lastProgress is None:
                query.processAllAvailable()
            texts = [(f"a/{n}", b"\0%d" % n) for n in range(50)]
            rows = knowing.createDataFrame(
                [*texts, ("b", b"")], "key string, payload binary"
            )
            writing = rows.coalesce(1).write.format("sbus").mode("append")
            writing.option("address", bus.path).save()
            query.processAllAvailable()
            heard = knowing.table("heard").orderBy("n").collect()
        finally:
            query.stop()
        assert [row["n"] for row in heard] == [*range(1, 51)]
        assert [(row["key"], row["payload"]) for row in heard] == texts

    def test_what_is_lost_is_left_out_of_the_numbers(
        self, bus: RealBus
    ) -> None:
        """A stream that does not ask slows nobody."""
        stream = LiveStream(bus.path, [""])
        assert list(stream.read({"n": 0})[0]) == []
        with Client(bus.path) as publisher:
            for _ in range(3_000):
                publisher.publish("k", bytes(1_000))
            publisher.sync()
            rows, end = stream.read({"n": 0})
            count = len(list(rows))
            assert 0 < count < 3_000 and end == {"n": 3_000}
            publisher.publish("k", b"")
            publisher.sync()
        ((_, _, n, *_),) = stream.read(end)[0]
        assert n == 3_001

    def test_a_row_that_is_refused(
        self, knowing: SparkSession, bus: RealBus
    ) -> None:
        """It is named; those before it are published."""
        with Client(bus.path) as reader:
            reader.subscribe("")
            reader.sync()
            keys = [f"k{n}" for n in range(1_500)] + ["a/!"]
            rows = [{"key": key, "payload": "é"} for key in keys]
            with pytest.raises(sbus_spark.InputError) as raised:
                publish_rows(bus.path, rows)
            assert str(raised.value).startswith(
                "row 1501 of a partition, key b'a/!': "
            )
            heard = {reader.receive() for _ in range(1_500)}
            texts = (key.encode("ascii") for key in keys[:-1])
            assert heard == {Message(key, "é".encode()) for key in texts}

    def test_a_stream_is_published(
        self, knowing: SparkSession, bus: RealBus, tmp_path: Path
    ) -> None:
        """At least once: a row that is refused is named, at each start."""
        lines = [*map(capture_line, range(1, 51)), capture_line(51, key="!")]
        (tmp_path / "R-000001.jsonl").write_text("".join(lines))
        rows = knowing.readStream.format("sbus").load(str(tmp_path))
        writer = rows.writeStream.format("sbus").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{tmp_path}/_checkpoint")
        with Client(bus.path) as reader:
            reader.subscribe("")
            reader.sync()
            for _ in range(2):
                query = writer.option("address", bus.path).start()
                told = "row 51 of a partition, key b'!'"
                with pytest.raises(PySparkException, match=told):
                    query.awaitTermination()
                heard = [reader.receive() for _ in range(50)]
                wanted = [f"k/{n % 7}".encode() for n in range(1, 51)]
                assert [message.key for message in heard] == wanted

    @pytest.mark.parametrize(
        ("row", "told"),
        [
            ({"key": "\u0100", "payload": ""}, "key '\u0100' is not of bytes"),
            ({"key": None, "payload": ""}, "it has no key"),
        ],
    )
    def test_a_row_that_is_none(
        self, bus: RealBus, row: dict[str, Any], told: str
    ) -> None:
        """One line says which, and why."""
        good = {"key": "k", "payload": ""}
        with pytest.raises(sbus_spark.InputError) as raised:
            publish_rows(bus.path, [good, row])
        assert str(raised.value).startswith(f"row 2 of a partition: {told}")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({}, "needs the option 'path'"),
            ({"path": "/nowhere"}, "/nowhere: there is no such directory"),
            ({"path": "/", "startingTime": "noon"}, "'noon' is no date"),
        ],
    )
    def test_wrong_options(
        self, knowing: SparkSession, options: dict[str, str], told: str
    ) -> None:
        """One line says what would be right."""
        with pytest.raises(PySparkException, match=told):
            knowing.read.format("sbus").options(**options).load().count()
