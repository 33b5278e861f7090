"""Tests of tables: ingest, compact, expire, and those who read them."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable
from pyspark.sql import Row, SparkSession

import sbus_spark
from pipeline_bed import (
    TIMEOUT,
    command_line,
    numbers,
    start_command,
    wait_for_file,
)
from sizes import IS_SOAK

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

DAY = 86_400_000_000_000  # nanoseconds


def only_aside(opened: DeltaTable, files: list[Row], *marks: object) -> None:
    """Commit to the quarantine, and be killed before the table's commit."""
    if marks:
        raise KeyboardInterrupt
    COMMIT(opened, files)


COMMIT = sbus_spark.table.commit


class TestIngest:
    """Captures to tables."""

    def test_each_line_once_and_bad_ones_aside(
        self, spark: SparkSession, tmp_path: Path
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
        assert all(any(map(str.endswith, lines, 3 * [one])) for one in bad)
        odd = capture_line(202, key="{} }", host="a %/:=?").replace(",", ",\t")
        (capture / "late-000001.jsonl").write_text(capture_line(201) + odd)
        assert sbus_spark.ingest(*args) == (2, 0)
        assert sbus_spark.ingest(*args) == (0, 0)
        assert numbers(spark, table) == list(range(1, 203))
        found = sbus_spark.read_table(spark, str(table)).filter("n = 202")
        assert [row.host for row in found.collect()] == ["a %/:=?"]

    def test_a_batch_that_is_done_again_adds_nothing(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As after a kill between the commits of the quarantine and the table.

        What the table knows of its segments outlives a compaction.
        """
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        (capture / "bad-000001.jsonl").write_text("no JSON\n")
        args = (spark, str(capture), str(table))
        with monkeypatch.context() as patch:
            patch.setattr(sbus_spark.table, "commit", only_aside)
            with pytest.raises(KeyboardInterrupt):
                sbus_spark.ingest(*args)
        assert numbers(spark, table) == []
        (capture / "bad-000002.jsonl").write_text("no JSON either\n")
        assert sbus_spark.ingest(*args) == (100, 2)
        log = min(table.glob("_delta_log/*.json"))
        left = table / "day=2025-11-21" / "left.parquet"  # by a kill
        left.touch()
        for old in log, left:
            os.utime(old, (0, 0))
        sbus_spark.compact(str(table))
        assert not log.exists() and not left.exists()
        write_segments(capture, 2)
        assert sbus_spark.ingest(*args) == (100, 0)
        assert numbers(spark, table) == list(range(1, 201))
        aside = DeltaTable(f"{table}/_quarantine")
        assert aside.to_pyarrow_table().num_rows == aside.count() == 2

    def test_a_commit_that_comes_second_adds_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """It says so; one of other recorders is no hindrance."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        args = (spark, str(capture), str(table))
        (tmp_path / "none").mkdir()
        sbus_spark.ingest(spark, str(tmp_path / "none"), str(table))
        first, second, third = (DeltaTable(str(table)) for _ in range(3))
        source = sbus_spark.source.Capture({"path": str(capture)})
        pieces, _, marks, _ = sbus_spark.marks.news(source.segments(), {})
        assert len(pieces) == 1 and marks == {"R": 1}
        sbus_spark.table.commit(first, [], marks)
        with pytest.raises(sbus_spark.PipelineError, match="another ingest"):
            sbus_spark.table.commit(second, [], marks)
        sbus_spark.table.commit(third, [], {"S": 1})
        assert sbus_spark.ingest(*args) == (0, 0)

    def test_segments_in_any_order(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """What is missing is named; what is in the table may be removed."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        capture.mkdir()
        named: list[str] = []
        where = str(capture), str(table)
        args = (spark, *where, None, True, named.append)

        def arrive(*some: int) -> None:
            for n in some:
                (capture / f"R-00000{n}.jsonl").write_text(capture_line(n))

        arrive(2, 3, 5)
        assert sbus_spark.ingest(*args) == (3, 0)
        assert named.pop().endswith(": segment 1, 4")
        arrive(1, 3)
        assert sbus_spark.ingest(*args) == (1, 0)
        assert named.pop().endswith(": segment 4")
        assert [one.name for one in capture.iterdir()] == ["R-000001.jsonl"]
        arrive(4, 5)
        assert sbus_spark.ingest(*args) == (1, 0)
        assert sbus_spark.ingest(*args) == (0, 0)
        assert not named and not list(capture.iterdir())
        assert numbers(spark, table) == [1, 2, 3, 4, 5]

    def test_the_state_of_a_table(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Status 1 if something is missing or old, 0 if not.

        With nothing new, ingest starts no Spark.
        """
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 3)
        late = (capture / "R-000002.jsonl").rename(tmp_path / "late")
        sbus_spark.ingest(spark, str(capture), str(table))
        status, output, _ = command_line("status", table)
        assert status == 1 and output.endswith(": segment 2\n")
        assert output.startswith("200 messages in ")
        late.rename(capture / "R-000002.jsonl")
        (capture / ".R-000004.jsonl.x").write_text("half")
        status, output, _ = command_line("status", table, capture)
        assert status == 0 and "1 segments of" in output
        assert "/.R-000004.jsonl.x: not complete" in output
        assert command_line("status", table, "--max-age", "9")[0] == 1
        sbus_spark.ingest(spark, str(capture), str(table))
        told = json.loads(command_line("status", table, capture, "--json")[1])
        assert (told["messages"], told["gaps"], told["wait"]) == (
            300,
            [],
            None,
        )
        assert told["hosts"]["R"]["segments"] == 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sbus_spark.sessions, "session", pytest.fail)
            done = command_line("ingest", capture, table)
        assert done == (0, "0 messages ingested, 0 lines quarantined\n", "")

    def test_a_reader_is_not_disturbed(
        self, spark: SparkSession, tmp_path: Path
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

    def test_days_that_expire(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """They are dropped from the table; to report on none is an error."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        capture.mkdir()
        lines = [capture_line(n + 1, t=n * DAY) for n in range(3)]
        (capture / "R-000001.jsonl").write_text("".join(lines))
        sbus_spark.ingest(spark, str(capture), str(table))
        done = command_line("expire", table, "--before", "1970-01-03")
        assert done == (0, "the days before 1970-01-03 are dropped\n", "")
        assert numbers(spark, table) == [3]
        assert len(DeltaTable(str(table)).file_uris()) == 1
        command_line("expire", table, "--before", "1970-01-04")
        status, _, errors = command_line("report", table, "--json")
        assert status == 2 and "the table is empty" in errors
        assert sbus_spark.ingest(spark, str(capture), str(table)) == (0, 0)

    def test_of_two_at_once_one_gives_up(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """No line is there twice."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 20, 500)
        with (
            start_command("ingest", capture, table) as first,
            start_command("ingest", capture, table) as second,
        ):
            told = [process.communicate() for process in (first, second)]
        assert 0 in (first.returncode, second.returncode), told
        assert all(len((out + err).splitlines()) == 1 for out, err in told)
        sbus_spark.ingest(spark, str(capture), str(table))
        assert numbers(spark, table) == list(range(1, 10_001))

    def test_following_ends_at_a_signal(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """With status 0, and what it has brought in is there.

        No others can read what may be private.  What is in the table when the
        next batch begins is removed, and not before.
        """
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        command = "ingest", capture, table
        lines = "".join(map(capture_line, range(101, 201)))
        with start_command(*command, "--follow", "--clean") as process:
            wait_for_file(table, "_delta_log/*1.json")
            (capture / "R-000002.jsonl").write_text(lines)
            wait_for_file(table, "_delta_log/*2.json")
            process.send_signal(signal.SIGTERM)
            told = b"200 messages ingested, 0 lines quarantined\n"
            assert process.communicate() == (told, b"")
        assert process.returncode == 0
        assert [one.name for one in capture.iterdir()] == ["R-000002.jsonl"]
        assert numbers(spark, table) == list(range(1, 201))
        assert not any(one.stat().st_mode & 0o077 for one in table.rglob("*"))

    def test_a_kill_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """At any moment of its work."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 30, 500)
        command, chosen = ("ingest", capture, table), random.Random()
        for at in range(60 if IS_SOAK else 1):
            write_segments(capture, 31 + at, 500)
            scratch = tmp_path / str(at)
            with start_command(*command, scratch=scratch) as process:
                wait_for_file(scratch, "blockmgr-*")  # Spark is at it
                time.sleep(chosen.uniform(2, 12))
                os.killpg(process.pid, signal.SIGKILL)
            if (table / "_delta_log").exists():
                done = numbers(spark, table)  # before anything is mended
                assert len(done) == len(set(done))
        sbus_spark.ingest(spark, str(capture), str(table))
        last = 500 * len(list(capture.iterdir()))
        assert numbers(spark, table) == list(range(1, last + 1))
