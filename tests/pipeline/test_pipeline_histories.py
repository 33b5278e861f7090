"""Tests of ingest by random histories; most of them need no Spark."""

from __future__ import annotations

import datetime
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import write_segments
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

from pipeline_bed import TIMEOUT, command_line
from pipeline_history import begin
from pipeline_without_spark import NO_SESSION, do_here
from sbus_spark import BusyError, intake, upkeep

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


# Few in each part: a limit of time is for one part, also on a busy machine
@pytest.mark.parametrize("part", range(either(100, 4)))
def test_histories(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing is twice, what is deleted stays away."""
    seeds = range(4 * part, 4 * (part + 1))
    begin(tmp_path, monkeypatch, do_here, seeds)


@pytest.mark.parametrize("part", range(either(50, 1)))
def test_ingests_that_are_killed(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with processes that SIGKILL ends at some moment."""
    kills, seed = 0, 1_000 * (part + 1)
    while kills < 4:
        seeds = range(seed, seed + 1)
        kills += begin(tmp_path, monkeypatch, do_here, seeds, is_killing=True)
        seed += 1


def test_histories_in_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, by its executors."""
    do = functools.partial(intake.do_tasks, spark)
    begin(tmp_path, monkeypatch, do, range(900, either(905, 901)))


def test_following_goes_on_when_days_expire_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is done again; without --follow an error names the reason."""
    capture, where = tmp_path / "capture", str(tmp_path / "table")
    capture.mkdir()
    until = threading.Event()

    def expire(_: Any, *task: Any) -> Sequence[Any]:
        files = do_here(*task)
        upkeep.expire(where, datetime.date(2025, 11, 22))
        return files

    monkeypatch.setattr(intake, "do_tasks", expire)
    args = NO_SESSION, str(capture), where
    ingest = functools.partial(intake.ingest, *args)
    write_segments(capture, 1)
    assert ingest() == (100, 0)
    write_segments(capture, 2)
    with pytest.raises(BusyError, match="ingest, compact or expire"):
        ingest()
    write_segments(capture, 3)
    assert ingest() == (200, 0)
    write_segments(capture, 4)
    for batch in intake.rounds(*args, until=until):
        until.set()
        assert batch.messages == 100


def test_a_segment_that_was_written_just_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may go on with it."""
    capture, where = tmp_path / "capture", str(tmp_path / "table")
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    write_segments(capture, 1)
    (path,) = capture.iterdir()
    kept = "\n0 segments removed, 1 not yet: ingested now, written"
    for count in 100, 0:
        done = command_line("ingest", capture, where, "--clean")[1]
        assert done.startswith(f"{count} messages") and kept in done
        assert path.exists()
    os.utime(path, (0, 0))
    done = command_line("ingest", capture, where, "--clean")[1]
    assert "\n1 segments removed, 0 not yet" in done and not path.exists()
