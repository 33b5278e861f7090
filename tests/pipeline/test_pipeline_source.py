"""Tests of what Spark's own programs use: captures, and buses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_client import Client

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def write(path: Path, numbers: Iterable[int], **fields: Any) -> Path:
    """Write a segment of messages."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(capture_line(n, **fields) for n in numbers))
    return path


def test_a_capture_as_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """It has the columns of a table; a line that is none is told."""
    sbus_spark.register(spark)
    write(tmp_path / "R-000001.jsonl", [3], key="\xe9")
    write(tmp_path / "S-000001.jsonl", range(1, 51), host="g")
    write(tmp_path / ".S-000002.jsonl", [51])
    frame = sbus_spark.read_capture(spark.read, str(tmp_path))
    assert frame.count() == 51
    rows = frame.filter("host = 'h'").selectExpr("*", "string(time)")
    (row,) = rows.collect()
    wanted = "h", "R", 3, row["time"], "\xe9", b"\xe9", 3, b"xxx"
    assert row[:8] == wanted and row[8] == "2025-11-21 09:24:13.003"
    (tmp_path / "T-000001.jsonl").write_text("no JSON\n")
    strict = spark.read.option("mode", "FAILFAST")
    with pytest.raises(Exception, match="T-000001.jsonl"):
        sbus_spark.read_capture(strict, str(tmp_path)).collect()
    writer = frame.select("key").write.format("sbus").mode("append")
    with pytest.raises(PySparkException, match="needs a column 'payl"):
        writer.save(address="x")


def test_a_stream_publishes(
    spark: SparkSession, hearer: Client, tmp_path: Path
) -> None:
    """In order; a row that the bus refuses ends it."""
    sbus_spark.register(spark)
    path = write(tmp_path / "capture" / "R-000001.jsonl", range(1, 51))
    stream = sbus_spark.read_capture(spark.readStream, str(path.parent))
    writer = stream.writeStream.format("sbus").trigger(availableNow=True)
    writer = writer.option("checkpointLocation", f"{tmp_path}/check")
    writer = writer.option("address", hearer.address)
    writer.start().awaitTermination()
    heard = [hearer.receive()[0].decode() for _ in range(50)]
    assert heard == [f"k/{n % 7}" for n in range(1, 51)]
    write(path.with_name("R-000002.jsonl"), [51], key="!")
    with pytest.raises(PySparkException, match="InputError: key '!': "):
        writer.start().awaitTermination()
