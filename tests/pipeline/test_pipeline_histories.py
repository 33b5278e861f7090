"""Random histories of a capture and its table, beside a list of both.

Segments arrive in any order, twice, in halves; ingests are killed, or are two
at once; days expire, files are compacted and removed, old versions restored.
What does the tasks of an ingest is a function here, so most need no Spark.
"""

from __future__ import annotations

import datetime
import functools
import gzip
import json
import os
import random
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line, write_segments
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pipeline_bed import TIMEOUT
from sbus_spark import PipelineError, intake, tables, upkeep
from sbus_spark.inputs import BusyError

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

DAYS = [datetime.date(2025, 11, day) for day in (20, 21, 22)]
STEPS = 25
Work = Callable[[Any], Any]
Row = tuple[str, int]  # recorder, n
Segment = tuple[str, int]  # recorder, number
WEIGHTS = {
    "record": 3,
    "arrive": 6,
    "arrive_hidden": 1,
    "arrive_half": 2,
    "ingest": 4,
    "ingest_killed": 4,
    "two_at_once": 3,
    "compact": 1,
    "expire": 0.5,
    "restore": 1.5,
}


class Killed(BaseException):
    """Ends an ingest as a kill does: nothing is put in order."""


def do_here(work: Work, count: int) -> Sequence[Any]:
    """Do the tasks of an ingest without Spark."""
    numbers = pa.record_batch([pa.array(range(count), pa.int64())], ["id"])
    batches = work(iter([numbers]))
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


class History:
    """What was recorded, what has arrived, and what the table should have."""

    def __init__(self, folder: Path, seed: int, do: Any) -> None:
        self.random = random.Random(seed)
        self.capture, self.table = folder / "capture", folder / "table"
        self.capture.mkdir()
        self.do = do
        self.kill_at = ""
        # of each recorder, by number: its day and lines
        self.recorded: dict[str, list[tuple[Any, list[str]]]] = {}
        self.arrived: dict[Segment, int] = {}  # how many whole lines
        self.torn: set[Segment] = set()  # that end within a line
        self.taken: dict[Segment, int] = {}  # lines that were read
        self.noted: dict[Segment, int] = {}  # bytes, as the table has noted
        self.expected: set[Row] = set()
        self.aside: set[str] = set()
        self.expired = datetime.date.min  # days before it were dropped
        # what a version of the table has, while its files are there
        self.versions: dict[int, tuple[set[Row], dict[Segment, int], Any]] = {}
        self.remarks: list[str] = []
        self.steps: list[str] = []

    def lines(self, segment: Segment) -> list[str]:
        """Return the lines of a segment."""
        return self.recorded[segment[0]][segment[1] - 1][1]

    def path(self, segment: Segment, mark: str = "") -> Path:
        """Return where a segment is to be."""
        recorder, number = segment
        day = self.recorded[recorder][number - 1][0]
        path = self.capture / str(day) / f"{mark}{recorder}-{number:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        return path

    def segments(self) -> list[Segment]:
        """Return all segments that were recorded."""
        return [
            (recorder, number + 1)
            for recorder, segments in self.recorded.items()
            for number in range(len(segments))
        ]

    # Steps
    def record(self) -> None:
        """Let a recorder complete some segments."""
        recorder = self.random.choice("RST")
        segments = self.recorded.setdefault(recorder, [])
        for _ in range(self.random.randrange(1, 6)):
            n = len(segments) * 10
            day = self.random.choice(DAYS)
            t = datetime.datetime(day.year, day.month, day.day, 12)
            t = t.replace(tzinfo=datetime.timezone.utc)
            about = {"rec": recorder, "t": int(t.timestamp()) * 10**9}
            numbers = range(n + 1, n + 1 + self.random.randrange(1, 4))
            lines = [capture_line(n, **about) for n in numbers]
            if self.random.random() < 0.3:
                lines.insert(0, f"no message {recorder} {len(segments)}\n")
            segments.append((day, lines))

    def arrive(self) -> None:
        """Let some segments arrive, for the first time or again."""
        late = [x for x in self.segments() if x not in self.arrived]
        chosen = self.segments()
        if late and self.random.random() < 0.8:
            chosen = late
        count = self.random.randrange(1, 5)
        for segment in self.random.sample(chosen, min(count, len(chosen))):
            self.put(segment)

    def put(self, segment: Segment) -> None:
        """Let a whole segment arrive."""
        self.path(segment, ".").unlink(missing_ok=True)
        self.path(segment).write_text("".join(self.lines(segment)))
        self.arrived[segment] = len(self.lines(segment))
        self.torn.discard(segment)

    def arrive_hidden(self) -> None:
        """Let a half of a segment arrive, under a hidden name."""
        segment = self.random.choice(self.segments())
        text = "".join(self.lines(segment))
        self.path(segment, ".").write_text(text[: len(text) // 2])

    def arrive_half(self) -> None:
        """Let the beginning of a segment arrive, under its own name."""
        late = [x for x in self.segments() if x not in self.arrived]
        if late:
            segment = self.random.choice(late)
            lines = self.lines(segment)
            count = self.random.randrange(len(lines))
            text = "".join(lines[:count])
            if count == 0 or self.random.random() < 0.5:
                text += lines[count][:9]
                self.torn.add(segment)
            self.path(segment).write_text(text)
            self.arrived[segment] = count

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
                self.took(here, is_noted=False)
        else:
            self.took(here)
        self.kill_at = ""

    def two_at_once(self) -> None:
        """Ingest while another ingest has begun, and let both end."""
        here, noted = self.here(), dict(self.noted)
        is_first = self.random.random() < 0.5

        def do(work: Work, count: int) -> Sequence[Any]:
            if is_first:
                self.second()
            files: Sequence[Any] = self.do(work, count)
            if not is_first:
                self.second()
            return files

        try:
            self.run(do, self.random.random() < 0.4)
        except PipelineError as error:
            assert "another ingest, compact" in str(error)
        else:  # it notes what it knows
            self.took(here, noted)

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
            upkeep.compact(str(self.table))
            self.versions.clear()

    def expire(self) -> None:
        """Let days expire; what comes later stays."""
        if self.table.exists():
            day = self.random.choice(DAYS)
            upkeep.expire(str(self.table), day)
            for segment, count in self.taken.items():
                of, lines = self.recorded[segment[0]][segment[1] - 1]
                if of < day:
                    self.expected -= rows_in(lines[:count])
            self.expired = max(day, self.expired)

    def restore(self) -> None:
        """Let the table be again what it was."""
        if self.versions:
            version = self.random.choice([*self.versions])
            opened = DeltaTable(str(self.table))
            if version < opened.version():
                opened.restore(version)
                rows, taken, self.expired = self.versions[version]
                self.expected, self.taken = set(rows), dict(taken)
                self.noted.clear()
                for segment in {*self.arrived} - {*self.here()}:
                    if self.arrived[segment] > taken.get(segment, -1):
                        del self.arrived[segment]  # it has to come again

    # How
    def run(self, do: Any, is_cleaning: bool) -> None:
        """Ingest once."""
        where = str(self.capture), str(self.table)
        batches: list[intake.Batch] = []
        for path in self.capture.glob("*/*"):
            os.utime(path, (0, 0))  # nobody seems to copy it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(intake, "do_tasks", lambda _, *task: do(*task))
            session: Any = None
            intake.ingest(session, *where, None, is_cleaning, batches.append)
        self.remarks = batches[0].remarks

    def do_killed(self, work: Work, count: int) -> Sequence[Any]:
        """Do the tasks, and be killed in the middle of them, or after."""
        files: Sequence[Any] = self.do(work, count)
        if self.kill_at in ("tasks", "done"):
            for file in files if self.kill_at == "tasks" else ():
                if file.path and self.random.random() < 0.5:
                    (self.table / file.path).unlink(missing_ok=True)
                    (self.table / "_quarantine" / file.path).unlink(True)
            raise Killed
        return files

    def here(self) -> dict[Segment, int]:
        """Return the segments that there are, and how many bytes."""
        paths = [*self.capture.glob("*/[!.]*.jsonl")]
        return {(x.name[0], int(x.name[2:8])): x.stat().st_size for x in paths}

    def took(
        self,
        here: dict[Segment, int],
        noted: dict[Segment, int] | None = None,
        is_noted: bool = True,
    ) -> None:
        """Expect what was new, and what is noted then."""
        noted = self.noted if noted is None else noted
        new = [x for x in here if noted.get(x) != here[x]]
        whole = [segment for segment in new if segment not in self.torn]
        for segment in whole:
            self.take(segment, self.arrived[segment])
        if new and is_noted:
            self.noted = {x: noted[x] for x in here if x in noted}
            self.noted |= {segment: here[segment] for segment in whole}

    def take(self, segment: Segment, count: int) -> None:
        """Expect the first lines of a segment."""
        self.taken[segment] = count
        lines = self.lines(segment)[:count]
        self.expected |= rows_in(lines)
        self.aside |= {line for line in lines if line.startswith("no")}

    def check(self) -> None:
        """The table has what is expected, once; a file that went is in it."""
        if not (self.table / "_delta_log").exists():
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
        gone = {x for x in self.arrived if not self.path(x).exists()}
        for segment in gone:
            assert self.taken[segment] >= self.arrived[segment]
        self.versions[opened.version()] = (
            set(self.expected),
            dict(self.taken),
            self.expired,
        )

    def go(self, patch: pytest.MonkeyPatch) -> None:
        """Take random steps, and let all arrive in the end."""
        commit = tables.commit

        def commit_killed(where: str, *more: Any) -> None:
            is_table = not where.endswith("_quarantine")
            if self.kill_at == "between" and is_table:
                raise Killed
            commit(where, *more)
            if self.kill_at == "end" and is_table:
                raise Killed

        patch.setattr(tables, "commit", commit_killed)
        self.record()
        names = [*WEIGHTS]
        for name in self.random.choices(names, [*WEIGHTS.values()], k=STEPS):
            self.steps.append(name)
            getattr(self, name)()
            self.check()
        self.steps.append("the end")
        for segment in self.segments():
            count = self.taken.get(segment)
            if count != len(self.lines(segment)) or segment in self.arrived:
                self.put(segment)
        self.ingest()
        named = " ".join(self.remarks)
        self.check()
        assert "missing since" not in named and "complete" not in named
        for segment in self.segments():
            assert self.taken[segment] == len(self.lines(segment))


def rows_in(lines: Sequence[str]) -> set[Row]:
    """Return the messages in some lines."""
    parsed = [json.loads(line) for line in lines if line[0] == "{"]
    return {(line["rec"], line["n"]) for line in parsed}


@pytest.mark.parametrize("part", range(4))
def test_histories(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing is twice, what is missing is named."""
    begin(tmp_path, monkeypatch, do_here, either(100, 10), part)


def test_a_restore_behind_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went comes in again, whoever wrote the checkpoint."""
    capture, where = tmp_path / "capture", str(tmp_path / "table")
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    session: Any = None
    for count in (1, 2):
        write_segments(capture, count)
        intake.ingest(session, str(capture), where)
    opened = DeltaTable(where)
    opened.restore(1)
    opened.create_checkpoint()
    assert intake.ingest(session, str(capture), where) == (100, 0)
    assert DeltaTable(where).count() == 200
    assert intake.ingest(session, str(capture), where) == (0, 0)


def write_again(path: Path, *numbers: int) -> None:
    """Write a segment that nobody seems to copy any more."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(capture_line, numbers)))
    os.utime(path, (0, 0))


def test_a_segment_that_grows_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest comes in."""
    where = str(tmp_path / "capture"), str(tmp_path / "table")
    path = tmp_path / "capture" / "R-000001.jsonl"
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    session: Any = None
    clean = functools.partial(intake.ingest, session, *where, None, True)
    write_again(path, 1)
    assert clean() == (1, 0)
    path.touch()
    assert clean() == (0, 0) and path.exists()
    write_again(path, 1, 2)
    assert clean() == (1, 0) and path.exists()
    assert DeltaTable(where[1]).count() == 2
    assert clean() == (0, 0) and not path.exists()


def test_copies_under_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is there once, though different tasks read the copies."""
    capture, where = tmp_path / "capture", str(tmp_path / "table")
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    session: Any = None
    for number in range(1, 9):
        write_segments(capture, number)
        text = (capture / f"R-{number:06}.jsonl").read_bytes()
        (capture / f"Z{number}-{number:06}.jsonl").write_bytes(text)
        (capture / f"A-{number:06}.jsonl.gz").write_bytes(gzip.compress(text))
    assert intake.ingest(session, str(capture), where) == (800, 0)
    assert DeltaTable(where).count() == 800
    assert intake.ingest(session, str(capture), where) == (0, 0)


@pytest.mark.parametrize("lost", ["notes", "log", "marks", "clone", "stats"])
def test_what_is_lost_makes_nothing_come_twice(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes, older commits, transaction ids; a table made of its rows."""
    capture, where = tmp_path / "capture", tmp_path / "table"
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    session: Any = None
    write_segments(capture, 1)
    assert intake.ingest(session, str(capture), str(where)) == (100, 0)
    opened = DeltaTable(str(where))
    if lost == "notes":
        (where / "_ingested.json").unlink()
    elif lost == "log":
        opened.create_checkpoint()
        min(where.glob("_delta_log/*.json")).unlink()
    elif lost == "marks":
        name = "delta.setTransactionRetentionDuration"
        opened.alter.set_table_properties({name: "interval 1 seconds"})
        time.sleep(2.5)
        opened.create_checkpoint()
    else:
        where = tmp_path / "clone"
        write_deltalake(
            str(where),
            opened.to_pyarrow_table(),
            partition_by=["day"],
            configuration={"delta.dataSkippingNumIndexedCols": "0"}
            if lost == "stats"
            else {},
        )
    write_segments(capture, 2)
    assert intake.ingest(session, str(capture), str(where)) == (100, 0)
    assert DeltaTable(str(where)).count() == 200


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
    session: Any = None
    ingest = functools.partial(intake.ingest, session, str(capture), where)
    write_segments(capture, 1)
    assert ingest() == (100, 0)
    write_segments(capture, 2)
    with pytest.raises(BusyError, match="ingest, compact or expire"):
        ingest()
    write_segments(capture, 3)
    assert ingest() == (200, 0)
    write_segments(capture, 4)
    counts = ingest(until=until, report=lambda _: until.set())
    assert counts == (100, 0)


def test_histories_in_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same."""
    do = functools.partial(intake.do_tasks, spark)
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
                print("seed", seed, "after", history.steps)
                raise
