"""Tests of tables: ingest, compact, expire, and those who read them."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families,
)
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import (
    TIMEOUT,
    command_line,
    numbers,
    start_command,
    wait_for_file,
)
from sbus_spark import tables
from sizes import IS_SOAK

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

DAY = 86_400_000_000_000  # nanoseconds


def only_aside(where: str, *more: Any) -> None:
    """Commit to the quarantine, and be killed before the table's commit."""
    if not where.endswith("/_quarantine"):
        raise KeyboardInterrupt
    COMMIT(where, *more)


COMMIT = tables.commit


class TestRepairs:
    """What an operator does once."""

    def test_half_copied_segments_and_mended_lines(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Ingest takes in both, once; a mended line is one of a segment."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 2)
        half, torn = (capture / f"R-00000{n}.jsonl" for n in (1, 2))
        texts = half.read_text(), torn.read_text()
        half.write_text("".join(texts[0].splitlines(True)[:40]))
        torn.write_text(texts[1][:1_000])
        (capture / "S-000001.jsonl").write_text(capture_line(900, size=1))
        status, output, errors = command_line("ingest", capture, table)
        assert (status, output) == (
            1,
            "40 messages ingested, 1 lines quarantined\n",
        )
        assert f"{torn}: its last line is not complete" in errors
        half.write_text(texts[0])
        torn.write_text(texts[1])
        done = 0, "160 messages ingested, 0 lines quarantined\n", ""
        assert command_line("ingest", capture, table) == done
        (capture / "mended-000001.jsonl").write_text(capture_line(900))
        done = 0, "1 messages ingested, 0 lines quarantined\n", ""
        assert command_line("ingest", capture, table) == done
        assert numbers(spark, table) == [*range(1, 201), 900]


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
            patch.setattr(tables, "commit", only_aside)
            with pytest.raises(KeyboardInterrupt):
                sbus_spark.ingest(*args)
        assert numbers(spark, table) == []
        (capture / "bad-000002.jsonl").write_text("no JSON either\n")
        assert sbus_spark.ingest(*args) == (100, 1)
        log = min(table.glob("_delta_log/*.json"))
        left = table / "day=2025-11-21" / "left.parquet"  # by a kill
        left.touch()
        for old in *table.glob("_delta_log/*.json"), left:
            os.utime(old, (0, 0))
        sbus_spark.compact(str(table))
        assert not log.exists() and not left.exists()
        write_segments(capture, 2)
        assert sbus_spark.ingest(*args) == (100, 0)
        assert numbers(spark, table) == list(range(1, 201))
        aside = DeltaTable(f"{table}/_quarantine")
        assert aside.to_pyarrow_table().num_rows == aside.count() == 2

    def test_segments_in_any_order(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """What is missing is named; what is in the table may be removed."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        capture.mkdir()
        named: list[str] = []

        def ingested() -> int:
            args = spark, str(capture), str(table)
            batches = [*sbus_spark.rounds(*args, is_cleaning=True)]
            named[:] = batches[-1].remarks
            return sum(batch.messages for batch in batches)

        def arrive(*some: int) -> None:
            for n in some:
                path = capture / f"R-00000{n}.jsonl"
                path.write_text(capture_line(n))
                os.utime(path, (0, 0))  # it is not half copied

        arrive(2, 3, 5)
        assert ingested() == 3
        assert named.pop().endswith(": segment 1, 4")
        arrive(1, 3)
        assert ingested() == 1
        assert named.pop().endswith(": segment 4")
        assert [one.name for one in capture.iterdir()] == ["R-000001.jsonl"]
        arrive(4, 5)
        assert (ingested(), ingested()) == (1, 0)
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
        day = 86_400 * 10**9
        for rec, days in (("S_1", 2), ("S_2", 1)):  # a host that is silent
            line = capture_line(
                1, rec=rec, t=1_763_717_053 * 10**9 - days * day
            )
            (capture / f"{rec}-000001.jsonl").write_text(line)
        sbus_spark.ingest(spark, str(capture), str(table))
        status, output, _ = command_line("status", table)
        assert status == 1 and ': segment 2"\n' in output
        assert output.startswith('{\n  "messages": 202,\n')
        late.rename(capture / "R-000002.jsonl")
        (capture / ".R-000004.jsonl.x").write_text("half")
        status, output, _ = command_line("status", table, capture)
        assert status == 0 and '\n  "waiting": 1,\n' in output
        assert '/.R-000004.jsonl.x": ' in output
        assert command_line("status", table, "--max-age", "9s")[0] == 1
        sbus_spark.ingest(spark, str(capture), str(table))
        state = json.loads(command_line("status", table, capture, "--json")[1])
        assert state["messages"] == 302
        assert not state["gaps"] and state["wait_seconds"] is None
        assert state["runs"]["R"]["last"] == 3
        assert {*state["runs"]} == {"R", "S_2"}
        assert command_line("status", table, "--max-age", "99999d")[0] == 0
        metrics = command_line("status", table, capture, "--openmetrics")[1]
        parse: Any = text_string_to_metric_families
        families = parse(metrics)
        values = {one.name: one.samples[0].value for one in families}
        assert values["sbus_table_messages"] == 302
        assert values["sbus_table_waiting"] == values["sbus_table_torn"] == 0
        assert values["sbus_table_hidden"] == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sbus_spark.sessions.session", pytest.fail)
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
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
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
        assert output.splitlines()[-1] == (
            b"200 messages ingested, 0 lines quarantined"
        )
        assert output.count(b"100 messages and 0 bad lines of 1 segments") == 2
        assert not errors
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
