"""Tests of ingest by random histories; most of them need no Spark."""

from __future__ import annotations

import datetime
import functools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line, write_segments
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

from pipeline_bed import TIMEOUT
from pipeline_history import go_through
from pipeline_without_spark import NO_SESSION, Bed, do_here, kill_an_ingest
from sbus_spark import BusyError, intake, upkeep

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


# Few in each part: a limit of time is for one part, also on a busy machine
@pytest.mark.parametrize("part", range(either(100, 4)))
def test_histories(part: int, tmp_path: Path) -> None:
    """Nothing is lost, nothing is twice, what is deleted stays away."""
    go_through(tmp_path, do_here, range(4 * part, 4 * (part + 1)))


def test_histories_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The same, by its executors."""
    do = functools.partial(intake.do_tasks, spark)
    go_through(tmp_path, do, range(901, either(906, 902)), steps=8)


def test_ingests_that_are_killed(bed: Bed) -> None:
    """Processes that SIGKILL ends at some moment; `--clean` loses nothing."""
    chosen = random.Random(1)
    kills, number = 0, 0
    while kills < either(99, 4):
        for _ in range(chosen.randrange(1, 9)):
            number += 1
            line = capture_line(number, rec=f"h_1_{number % 3}")
            bed.write(f"h_1_{number % 3}-{number:06}.jsonl", line)
        kills += kill_an_ingest(bed.capture, bed.table, chosen)
    bed.ingest()
    rows = bed.opened().to_pyarrow_table()["n"].to_pylist()
    assert sorted(rows) == [*range(1, number + 1)]


def test_following_goes_on_when_days_expire_meanwhile(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is done again; without --follow an error names the reason."""
    until = threading.Event()

    def expire(_: Any, *task: Any) -> Sequence[Any]:
        files = do_here(*task)
        upkeep.expire(str(bed.table), datetime.date(2025, 11, 22))
        return files

    monkeypatch.setattr(intake, "do_tasks", expire)
    write_segments(bed.capture, 1)
    assert bed.ingest() == 100
    write_segments(bed.capture, 2)
    with pytest.raises(BusyError, match="ingest, compact or expire"):
        bed.ingest()
    write_segments(bed.capture, 3)
    assert bed.ingest() == 200
    write_segments(bed.capture, 4)
    where = str(bed.capture), str(bed.table)
    for batch in intake.rounds(NO_SESSION, *where, until=until):
        until.set()
        assert batch.messages == 100


def test_a_segment_that_was_written_just_now_is_not_removed(bed: Bed) -> None:
    """Somebody may go on with it."""
    write_segments(bed.capture, 1)
    (path,) = bed.capture.iterdir()
    kept = "\n0 segments removed, 1 not yet: ingested now, written"
    for count in 100, 0:
        done = bed.run("ingest --clean")[1]
        assert done.startswith(f"{count} messages") and kept in done
        assert path.exists()
    os.utime(path, (0, 0))
    done = bed.run("ingest --clean")[1]
    assert "\n1 segments removed, 0 not yet" in done and not path.exists()
