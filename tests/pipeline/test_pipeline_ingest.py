"""Tests of tables: ingest, compact, expire, and those who read them."""

from __future__ import annotations

import datetime
import os
import signal
import socket
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import (
    TIMEOUT,
    command_line,
    numbers,
    start_command,
    wait_for_file,
)

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

DAY = 86_400_000_000_000  # nanoseconds


# ---- Captures to tables


def test_each_line_once_and_bad_ones_aside(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Segments that come later are added; those before stay.

    Hidden files are not complete.
    """
    capture, table = tmp_path / "capture", tmp_path / "a {table} [#1]*?"
    write_segments(capture, 2)
    (capture / ".R-000007.jsonl").write_text(capture_line(900))
    bad = ["null", capture_line(1, size=9).strip(), capture_line(0)[:30]]
    (capture / "bad-000001.jsonl").write_text("\n".join(bad) + "\n")
    args = (spark, str(capture), str(table))
    assert sbus_spark.ingest(*args) == (200, 3)
    assert numbers(spark, table) == list(range(1, 201))
    aside = DeltaTable(f"{table}/_quarantine")
    lines = aside.to_pyarrow_table()["line"].to_pylist()
    assert len(lines) == len(bad)
    assert all(any(map(str.endswith, lines, 3 * [line])) for line in bad)
    odd = capture_line(202, key="{} }", host="a %/:=?").replace(",", ",\t")
    (capture / "late-000001.jsonl").write_text(capture_line(201) + odd)
    assert sbus_spark.ingest(*args) == (2, 0)
    assert sbus_spark.ingest(*args) == (0, 0)
    assert numbers(spark, table) == list(range(1, 203))
    found = sbus_spark.read_table(spark, str(table)).filter("n = 202")
    assert [row.host for row in found.collect()] == ["a %/:=?"]


def test_a_reader_is_not_disturbed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By an ingest, a compaction or an expiry that come after it."""
    capture, table = tmp_path / "capture", tmp_path / "table"
    for number in range(1, 4):
        write_segments(capture, number)
        sbus_spark.ingest(spark, str(capture), str(table))
    reader = sbus_spark.read_table(spark, str(table))
    before = len(DeltaTable(str(table)).file_uris())
    write_segments(capture, 4)
    sbus_spark.ingest(spark, str(capture), str(table))
    sbus_spark.compact(str(table))
    assert len(DeltaTable(str(table)).file_uris()) < before
    assert reader.count() == 300
    assert numbers(spark, table) == list(range(1, 401))
    sbus_spark.expire(str(table), datetime.date(2100, 1, 1))
    assert reader.count() == 300
    assert numbers(spark, table) == []


def test_days_that_expire(spark: SparkSession, tmp_path: Path) -> None:
    """They are dropped from the table; to report on none is an error."""
    capture, table = tmp_path / "capture", tmp_path / "table"
    capture.mkdir()
    lines = [capture_line(n + 1, t=n * DAY) for n in range(3)]
    (capture / "R-000001.jsonl").write_text("".join(lines))
    sbus_spark.ingest(spark, str(capture), str(table))
    day = datetime.date(1970, 1, 3)
    assert sbus_spark.expire(str(table), day) == (2, 0)
    assert numbers(spark, table) == [3]
    assert len(DeltaTable(str(table)).file_uris()) == 1
    done = command_line("expire", table, "--keep", "1d")
    dropped = "are dropped: 1 messages and 0 lines of the quarantine\n"
    assert done[0] == 0 and done[1].endswith(dropped)
    status, _, errors = command_line("report", table, "--json")
    assert status == 2 and "the table has none" in errors
    assert sbus_spark.ingest(spark, str(capture), str(table)) == (0, 0)


def test_following_ends_at_a_signal(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 0, and what it has brought in is there.

    It tells systemd of each round.

    No others can read what may be private.  What is in the table when the
    next batch begins is removed, and not before.
    """
    capture, table = tmp_path / "capture", tmp_path / "table"
    write_segments(capture, 1)
    command = "ingest", capture, table
    lines = "".join(map(capture_line, range(101, 201)))
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with (
        manager,
        start_command(*command, "--follow", "--clean") as process,
    ):
        assert manager.recv(99) == b"READY=1\nWATCHDOG=1"
        os.utime(capture / "R-000001.jsonl", (0, 0))
        wait_for_file(table, "_delta_log/*1.json")
        (capture / "R-000002.jsonl").write_text(lines)
        wait_for_file(table, "_delta_log/*2.json")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    done, removed = output.splitlines()[-2:]
    assert done == b"200 messages ingested, 0 lines quarantined"
    assert removed.startswith(b"1 segments removed, 1 not yet")
    assert output.count(b"100 messages and 0 bad lines of 1 segments") == 2
    assert not errors
    assert process.returncode == 0
    assert [path.name for path in capture.iterdir()] == ["R-000002.jsonl"]
    assert numbers(spark, table) == list(range(1, 201))
    assert not any(path.stat().st_mode & 0o077 for path in table.rglob("*"))
