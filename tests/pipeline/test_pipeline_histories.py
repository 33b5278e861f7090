"""Random histories of a capture and its table, beside a list of both.

Segments arrive in any order, twice, in halves under hidden names; ingests are
killed, or are two at once; days expire, files are compacted and removed.  What
does the tasks of an ingest is a function here, so that most need no Spark.
"""

from __future__ import annotations

import datetime
import functools
import os
import random
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pipeline_bed import TIMEOUT
from sbus_spark import PipelineError, marks, table

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

DAYS = [datetime.date(2025, 11, day) for day in (20, 21, 22)]
STEPS = 25
Work = Callable[[Any], Any]
Row = tuple[str, int]  # recorder, n


class Killed(BaseException):
    """Ends an ingest as a kill does: nothing is put in order."""


def do_here(work: Work, count: int) -> Sequence[Any]:
    """Do the tasks of an ingest without Spark."""
    numbers = pa.record_batch([pa.array(range(count), pa.int64())], ["id"])
    batches = work(iter([numbers]))
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


def do_in(spark: SparkSession, work: Work, count: int) -> Sequence[Any]:
    """Do them in Spark."""
    tasks = spark.range(0, count, 1, count)
    return tasks.mapInArrow(work, table.WRITTEN).collect()


class History:
    """What was recorded, what has arrived, and what the table should have."""

    def __init__(self, folder: Path, seed: int, do: Any) -> None:
        self.random = random.Random(seed)
        self.capture, self.table = folder / "capture", folder / "table"
        self.capture.mkdir()
        self.do = do
        self.kill_at = ""
        self.began = time.time_ns() // 1_000_000
        # of each recorder, by number: its day, messages, lines
        self.recorded: dict[str, list[tuple[Any, set[Row], list[str]]]] = {}
        self.arrived: set[Row] = set()
        self.expected: set[Row] = set()
        self.aside: set[str] = set()
        self.taken: set[Row] = set()  # segments
        self.log: list[str] = []

    def path(self, recorder: str, number: int, mark: str = "") -> Path:
        """Return where a segment is to be."""
        day = self.recorded[recorder][number - 1][0]
        name = f"{mark}{recorder}-{number:06}.jsonl"
        path = self.capture / str(day) / name
        path.parent.mkdir(exist_ok=True)
        return path

    # Steps
    def record(self) -> None:
        """Let a recorder complete some segments."""
        recorder = self.random.choice("RST")
        own = self.recorded.setdefault(recorder, [])
        for _ in range(self.random.randrange(1, 6)):
            n = len(own) * 10
            day = self.random.choice(DAYS)
            t = datetime.datetime(day.year, day.month, day.day, 12)
            t = t.replace(tzinfo=datetime.timezone.utc)
            about = {"rec": recorder, "t": int(t.timestamp()) * 10**9}
            numbers = range(n + 1, n + 1 + self.random.randrange(1, 4))
            lines = [capture_line(n, **about) for n in numbers]
            if self.random.random() < 0.3:
                lines.insert(0, f"no message {recorder} {len(own)}\n")
            own.append((day, {(recorder, n) for n in numbers}, lines))

    def arrive(self) -> None:
        """Let some segments arrive, for the first time or again."""
        own = [
            (r, n + 1)
            for r in self.recorded
            for n in range(len(self.recorded[r]))
        ]
        late = [one for one in own if one not in self.arrived]
        chosen = late if late and self.random.random() < 0.8 else own
        many = self.random.randrange(1, 5)
        for one in self.random.sample(chosen, min(many, len(chosen))):
            self.path(*one, ".").unlink(missing_ok=True)
            text = "".join(self.recorded[one[0]][one[1] - 1][2])
            self.path(*one).write_text(text)
            self.arrived.add(one)

    def arrive_half(self) -> None:
        """Let a half of a segment arrive, under a hidden name."""
        if self.recorded:
            recorder = self.random.choice([*self.recorded])
            number = self.random.randrange(len(self.recorded[recorder])) + 1
            text = "".join(self.recorded[recorder][number - 1][2])
            half = self.path(recorder, number, ".")
            half.write_text(text[: len(text) // 2])

    def ingest(self) -> None:
        """Ingest, with or without removing what is known."""
        here = self.here()
        self.run(self.do, self.random.random() < 0.4)
        self.took(here)

    def ingest_killed(self) -> None:
        """Ingest, and be killed anywhere."""
        here = self.here()
        self.kill_at = self.random.choice(["tasks", "done", "between", "end"])
        try:
            self.run(self.do_killed, self.random.random() < 0.4)
        except Killed:
            if self.kill_at == "end":
                self.took(here)
        else:
            self.took(here)
        self.kill_at = ""

    def two_at_once(self) -> None:
        """Ingest while another ingest has begun, and let both end."""
        here = self.here()
        is_first = self.random.random() < 0.5

        def do(work: Work, count: int) -> Sequence[Any]:
            if is_first:
                self.second()
            files = self.do(work, count)
            if not is_first:
                self.second()
            return files

        try:
            self.run(do, self.random.random() < 0.4)
        except PipelineError as error:
            assert "another ingest is at work" in str(error)
        except Exception as error:  # the second has removed a segment
            assert "No such file" in str(error), error
        else:
            self.took(here)

    def second(self) -> None:
        """Be the other ingest: more may have arrived."""
        if self.random.random() < 0.5:
            self.arrive()
        self.ingest()

    def compact(self) -> None:
        """Compact, and clean the log of what is old, as all is."""
        if self.table.exists():
            for path in self.table.rglob("*"):
                os.utime(path, (0, 0))
            table.compact(str(self.table))

    def expire(self) -> None:
        """Let days expire; what comes later stays."""
        if self.table.exists():
            day = self.random.choice(DAYS)
            table.expire(str(self.table), day)
            for recorder, own in self.recorded.items():
                for number, (of, rows, _) in enumerate(own, 1):
                    if of < day and (recorder, number) in self.taken:
                        self.expected -= rows

    # How
    def run(self, do: Any, is_cleaning: bool) -> None:
        """Ingest once."""
        where = str(self.capture), str(self.table)
        gaps: list[str] = []
        table.ingest_by(do, *where, None, is_cleaning, gaps.append)
        self.gaps = gaps

    def do_killed(self, work: Work, count: int) -> Sequence[Any]:
        """Do the tasks, and be killed in the middle of them, or after."""
        files = self.do(work, count)
        if self.kill_at in ("tasks", "done"):
            for one in files if self.kill_at == "tasks" else ():
                if self.random.random() < 0.5:
                    (self.table / one.path).unlink(missing_ok=True)
                    (self.table / "_quarantine" / one.path).unlink(True)
            raise Killed
        return files

    def here(self) -> set[Row]:
        """Return the segments that an ingest finds."""
        paths = [*self.capture.glob("*/[!.]*.jsonl")]
        return {(path.name[0], int(path.name[2:8])) for path in paths}

    def took(self, segments: set[Row]) -> None:
        """Expect what was new."""
        for recorder, number in segments - self.taken:
            _, rows, lines = self.recorded[recorder][number - 1]
            self.expected |= rows
            self.aside |= {x for x in lines if x.startswith("no")}
        self.taken |= segments

    def check(self) -> None:
        """The table has what is expected, once; a file that went is in it."""
        if not (self.table / "_quarantine/_delta_log").exists():
            return
        opened = DeltaTable(str(self.table))
        rows = opened.to_pyarrow_table(columns=["recorder", "n"])
        found = [*zip(*rows.to_pydict().values())]
        assert sorted(found) == sorted(self.expected)
        bad = DeltaTable(str(self.table / "_quarantine")).to_pyarrow_table()
        texts = [
            line.split(": ")[-1] + "\n" for line in bad["line"].to_pylist()
        ]
        assert len(texts) == len({*texts}) and self.aside <= {*texts}
        assert self.arrived - self.here() <= self.taken
        told = marks.marks_in(str(self.table), opened.version())
        assert all(opened.transaction_version(x) == told[x] for x in told)
        all_bounds = marks.bounds_in(told)
        for recorder, own in self.recorded.items():
            bounds = all_bounds.get(recorder, [])
            has = [
                n
                for n in range(len(own) + 2)
                if sum(bound <= n for bound in bounds) % 2
            ]
            assert {(recorder, n) for n in has} == {
                one for one in self.taken if one[0] == recorder
            }
            gaps = [
                n for a, b in marks.gaps_of(bounds) for n in range(a, b + 1)
            ]
            assert gaps == [
                n for n in range(1, max([0, *has])) if n not in has
            ]
            if gaps:
                assert told[f"{recorder}/since"] >= self.began

    def go(self, patch: pytest.MonkeyPatch) -> None:
        """Take random steps, and let all arrive in the end."""
        commit = table.commit

        def commit_killed(opened: Any, files: Any, *told: Any) -> None:
            if self.kill_at == "between" and told:
                raise Killed
            commit(opened, files, *told)
            if self.kill_at == "end" and told:
                raise Killed

        patch.setattr(table, "commit", commit_killed)
        steps = [
            self.record,
            self.arrive,
            self.arrive_half,
            self.ingest,
            self.ingest_killed,
            self.two_at_once,
            self.compact,
            self.expire,
        ]
        weights = [3, 6, 2, 4, 4, 3, 1, 0.5]
        self.record()
        for step in self.random.choices(steps, weights, k=STEPS):
            self.log.append(step.__name__)
            step()
            self.check()
        while len(self.arrived) < sum(map(len, self.recorded.values())):
            self.arrive()
        self.ingest()
        self.check()
        assert not self.gaps
        texts = {
            x
            for own in self.recorded.values()
            for one in own
            for x in one[2]
            if x.startswith("no")
        }
        assert self.aside == texts


@pytest.mark.parametrize("part", range(4))
def test_histories(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing is twice, what is missing is named."""
    begin(tmp_path, monkeypatch, do_here, either(100, 10), part)


def test_histories_in_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same."""
    do = functools.partial(do_in, spark)
    begin(tmp_path, monkeypatch, do, either(5, 1), 9)


def begin(
    folder: Path, patch: pytest.MonkeyPatch, do: Any, count: int, part: int
) -> None:
    """Go through histories; name the seed of one that fails."""
    for seed in range(count * part, count * (part + 1)):
        where = folder / str(seed)
        where.mkdir()
        with patch.context() as own:
            history = History(where, seed, do)
            try:
                history.go(own)
            except BaseException:
                print("seed", seed, "after", history.log)
                raise
