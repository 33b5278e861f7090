"""Tests of captures and tables."""

from __future__ import annotations

import datetime
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark.table
from pipeline_bed import TIMEOUT, numbers, wait_for_file
from pipeline_console import Console
from sbus_spark.common import DAY
from sizes import IS_SOAK, either

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


class TestIngest:
    """Captures to tables."""

    @pytest.mark.parametrize("where", ["", "file://"])
    def test_each_line_once_and_bad_ones_aside(
        self, where: str, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Segments that come later are added; those before stay.

        Where the table is named by a URL, Spark reads and writes it.
        """
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 2)
        (capture / ".R-000007.jsonl").write_text(capture_line(900))
        (capture / "notes.txt").write_text(capture_line(901))
        good = capture_line(1).strip()
        foreign = (
            '{"rec":"R","n":1',
            '{"hello":1}',
            "",
            "null",
            "[]",
            f"[{good}]",
            f"{good} x",
            f"{good}{good}",
            f"{good},{good}",
            f"{good}]{good}",
            f"{good},0]{good}",
        )
        bad = {
            **dict.fromkeys(foreign, "not a JSON object of ours"),
            capture_line(1, key=None).strip(): "missing or wrong: key",
            capture_line(1, n="x").strip(): "missing or wrong: n",
            capture_line(1, data="?").strip(): "data is not base64",
            capture_line(1, size=9).strip(): "size is not data's",
            capture_line(0).strip(): "n is out of range",
            capture_line(1, n=1 << 60).strip(): "n is out of range",
            capture_line(1, t=-1).strip(): "t is out of range",
            capture_line(1, host="").strip(): "host is no name of a host",
            capture_line(1, host="a\0").strip(): "host is no name of a host",
            capture_line(
                1, host="h" * 65
            ).strip(): "host is no name of a host",
            capture_line(1, key="\u0100").strip(): "key is not of bytes",
        }
        (capture / "bad.jsonl").write_text("\n".join(bad) + "\n")
        args = (spark, str(capture), f"{where}{table}")
        assert sbus_spark.ingest(*args) == (200 + len(bad), len(bad))
        assert numbers(spark, table) == list(range(1, 201))
        aside = spark.read.json(str(table / "_quarantine")).collect()
        assert {row["line"]: row["reason"] for row in aside} == bad
        assert {Path(row["file"]).name for row in aside} == {"bad.jsonl"}
        made = [table, *table.glob("[!_.]*"), *table.rglob("*/part-*")]
        assert len(made) > 3
        assert not any(path.stat().st_mode & 0o077 for path in made)
        host = "a %\"#'*/:=?\\^[]{}<"
        odd = capture_line(202, key="{} }", host=host).replace(",", ",\t")
        (capture / "late.jsonl").write_text(capture_line(201) + " " + odd)
        os.utime(capture / "late.jsonl", (1, 1))
        assert sbus_spark.ingest(*args) == (2, 0)
        assert numbers(spark, table) == list(range(1, 203))
        hosts = [path.name for path in table.glob("day=*/host=*")]
        found = sbus_spark.read_table(spark, str(table)).select("host")
        assert {row["host"] for row in found.collect()} == {"h", host}
        escaped = "%22%23%27%2A%2F%3A%3D%3F%5C%5E%5B%5D%7B"
        assert set(hosts) == {"host=h", f"host=a %25{escaped}}}<"}

    def test_small_files_are_compacted(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What a kill leaves of a compaction is removed."""
        monkeypatch.setattr(sbus_spark.table, "SEGMENTS_PER_BATCH", 1)
        monkeypatch.setattr(sbus_spark.table, "BATCHES_MAX", 4)
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 6, 10)
        sbus_spark.ingest(spark, str(capture), str(table))
        folders = sorted(path.name for path in table.glob("day=*/*/batch=*"))
        assert folders == ["batch=0-3", "batch=4", "batch=5"]
        draft = next(table.glob("day=*/*/batch=4"))
        draft.rename(draft.with_name("batch=2"))
        (draft.parent / ".compact-0-3").mkdir()
        sbus_spark.ingest(spark, str(capture), str(table))
        left = sorted(path.name for path in draft.parent.iterdir())
        assert left == ["batch=0-3", "batch=5"]

    def test_following_tells_what_it_did(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Now and then, and nothing in between."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)

        class Thrice(threading.Event):
            """It is set when it is asked for the third time."""

            calls = 0

            def wait(self, timeout: float | None = None) -> bool:
                self.calls += 1
                seconds = 0 if self.calls == 2 else 60
                monkeypatch.setattr(sbus_spark.table, "TELL_SECONDS", seconds)
                return self.calls == 3

        sbus_spark.ingest(spark, str(capture), str(table), Thrice())
        told = "sbus_spark: 100 lines read, 0 of them quarantined\n"
        assert capsys.readouterr().err.count(told) == 1

    def test_days_that_expire(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """They are not read any more; who reads them already goes on."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        capture.mkdir()
        days = ["1970-01-01", "1970-01-02", "1970-01-03"]
        lines = [capture_line(n, t=n * DAY) for n in range(3)]
        (capture / "R-000001.jsonl").write_text("".join(lines[1:]))
        args = (spark, str(capture), str(table))
        sbus_spark.ingest(*args)
        reader = sbus_spark.read_table(spark, str(table))
        sbus_spark.expire(spark, str(table), datetime.date(1970, 1, 3))
        assert numbers(spark, table) == [2] and reader.count() == 2
        (capture / "R-000002.jsonl").write_text(capture_line(3, t=1))
        sbus_spark.ingest(*args)
        assert numbers(spark, table) == [2]
        assert [path.name[4:] for path in sorted(table.glob("d*"))] == days
        monkeypatch.setattr(sbus_spark.table, "READERS_SECONDS", 0)
        sbus_spark.expire(spark, str(table), datetime.date(1970, 1, 2))
        assert [path.name[4:] for path in table.glob("d*")] == days[2:]
        assert numbers(spark, table) == [2]

    @pytest.mark.parametrize(
        "number", either([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM])
    )
    def test_following_ends_at_a_signal(
        self,
        number: int,
        spark: SparkSession,
        console: Console,
        tmp_path: Path,
    ) -> None:
        """With status 0, and what it has brought in is there."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        console.start("ingest", capture, table, "--follow")
        wait_for_file(table, "_checkpoint/commits/0")
        write_segments(capture, 2)
        wait_for_file(table, "_checkpoint/commits/1")
        with pytest.raises(sbus_spark.PipelineError, match="another ingest"):
            sbus_spark.ingest(spark, str(capture), str(table))
        console.signal(number)
        told = "200 messages ingested, 0 lines quarantined\n"
        assert console.finish() == (0, told, "")
        assert numbers(spark, table) == list(range(1, 201))

    def test_a_kill_loses_and_repeats_nothing(
        self, spark: SparkSession, console: Console, tmp_path: Path
    ) -> None:
        """Killed when it writes, when it compacts, and just after that."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 30, 500)
        first, compacting = "_checkpoint/offsets/0", "day=*/*/.compact-*"
        every = [first, compacting, "day=*/*/batch=*-*"]
        for moment in either(every, [compacting]):
            console.start("ingest", capture, table)
            wait_for_file(table, moment)
            console.kill()
            if moment != first:
                done = numbers(spark, table)  # before anything is mended
                assert len(done) == len(set(done))
        sbus_spark.ingest(spark, str(capture), str(table))
        assert numbers(spark, table) == list(range(1, 15_001))

    if IS_SOAK:  # each start of Spark takes long

        def test_killed_at_any_moment(
            self, spark: SparkSession, console: Console, tmp_path: Path
        ) -> None:
            """At random ones."""
            capture, table = tmp_path / "capture", tmp_path / "table"
            write_segments(capture, 300, 30)
            chosen = random.Random()
            for _ in range(20):
                seen = len(list(table.glob("_checkpoint/offsets/[0-9]*")))
                console.start("ingest", capture, table)
                wait_for_file(table, f"_checkpoint/offsets/{seen}")
                time.sleep(chosen.uniform(0, 2))
                console.kill()
            sbus_spark.ingest(spark, str(capture), str(table))
            assert numbers(spark, table) == list(range(1, 9_001))
