"""Tests of tables: ingest, compact, expire, and those who read them."""

from __future__ import annotations

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
from pipeline_bed import TIMEOUT, start_command, wait_for_file
from pipeline_without_spark import Bed

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def test_each_line_once_and_bad_ones_aside(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Segments that come later are added; hidden ones are not complete.

    No name of a table, a host or a key is read as more than a name.
    """
    capture, table = tmp_path / "capture", tmp_path / "a {table} [#1]*?"
    write_segments(capture, 2)
    (capture / ".R-000007.jsonl").write_text(capture_line(900))
    bad = ["null", capture_line(1, size=9).strip(), capture_line(0)[:30]]
    (capture / "bad-000001.jsonl").write_text("\n".join(bad) + "\n")
    args = (spark, str(capture), str(table))
    assert sbus_spark.ingest(*args) == (200, 3)
    aside = DeltaTable(f"{table}/_quarantine").to_pyarrow_table()
    lines = aside["line"].to_pylist()
    assert sorted(x.partition(": ")[2] for x in lines) == sorted(bad)
    odd = capture_line(201, key="{} }", host="a %/:=?").replace(",", ",\t")
    (capture / "late-000001.jsonl").write_text(odd)
    assert sbus_spark.ingest(*args) == (1, 0)
    rows = sbus_spark.read_table(spark, str(table)).sort("n").collect()
    assert [row.n for row in rows] == list(range(1, 202))
    assert rows[-1].host == "a %/:=?"


def test_a_reader_is_not_disturbed(spark: SparkSession, bed: Bed) -> None:
    """By an ingest, a compaction or an expiry that come after it."""
    for number in 1, 2, 3:
        bed.add(number)
    reader = sbus_spark.read_table(spark, str(bed.table))
    bed.add(4)
    assert bed.run("compact")[1] == "4 files became 1\n"
    assert reader.count() == 30 and bed.opened().count() == 40
    assert bed.run("expire --keep 1d")[0] == 0
    assert reader.count() == 30 and bed.opened().count() == 0


def test_following_ends_at_a_signal(tmp_path: Path) -> None:
    """With status 0, and what it has brought in is there.

    It tells systemd of each round.  No others can read what may be private.
    What is in the table when the next batch begins is removed, and not before.
    """
    capture, table = tmp_path / "capture", tmp_path / "table"
    write_segments(capture, 1)
    command = "ingest", capture, table, "--follow", "--clean"
    address = str(tmp_path / "notify")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    with manager, start_command(*command, NOTIFY_SOCKET=address) as process:
        assert manager.recv(99) == b"READY=1\nWATCHDOG=1"
        os.utime(capture / "R-000001.jsonl", (0, 0))
        wait_for_file(table, "_delta_log/*1.json")
        lines = "".join(map(capture_line, range(101, 201)))
        (capture / "R-000002.jsonl").write_text(lines)
        wait_for_file(table, "_delta_log/*2.json")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    done, removed = output.splitlines()[-2:]
    assert done == b"200 messages ingested, 0 lines quarantined"
    assert removed.startswith(b"1 segments removed, 1 not yet")
    assert output.count(b"100 messages and 0 bad lines of 1 segments") == 2
    assert (process.returncode, errors) == (0, b"")
    assert [path.name for path in capture.iterdir()] == ["R-000002.jsonl"]
    rows = DeltaTable(str(table)).to_pyarrow_table()["n"].to_pylist()
    assert sorted(rows) == list(range(1, 201))
    assert not any(path.stat().st_mode & 0o077 for path in table.rglob("*"))
