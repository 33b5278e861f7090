"""Histories: a capture and its table at random, beside what they should be.

Segments arrive in any order, twice, in halves, compressed, under other names.
Ingests are killed, are two at once, or see another tool change the table
before they commit.  Rows are deleted and erased; days expire; the table is
restored, cloned, or a backup; what was noted is lost.

What the table may have is known without a look at how an ingest works:

- no message twice, and none that never arrived;
- after an ingest, each message of each whole segment that was there, but for
  those that were deleted on purpose;
- a deleted message only if something else was lost that remembered it;
- an erased message without its content;
- each message of a segment that `--clean` has removed.
"""

from __future__ import annotations

import copy
import datetime
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from deltalake import DeltaTable, write_deltalake

from pipeline_paper import capture_line
from pipeline_without_spark import Bed, Work
from sbus_spark import BusyError, captures, intake, tables, upkeep

DAYS = [datetime.date(2025, 11, day) for day in (20, 21, 22)]
Row = tuple[str, int]  # recorder, n
WEIGHTS = {
    "record": 3,
    "arrive": 6,
    "arrive_half": 2,
    "take_in": 4,
    "ingest_killed": 4,
    "two_at_once": 2,
    "meddle": 2,
    "compact": 1,
    "expire": 0.5,
    "delete": 1,
    "erase": 1,
    "restore": 1.5,
    "lose_notes": 1,
    "clone": 0.5,
    "back_up": 0.5,
    "go_back": 0.5,
}


class Killed(BaseException):
    """Ends an ingest as a kill does: nothing is put in order."""


class Recorded(NamedTuple):
    """A segment that was recorded."""

    name: str
    day: datetime.date
    lines: list[str]

    def rows(self, count: int | None = None) -> set[Row]:
        """Return the messages in its first lines."""
        parsed = [json.loads(x) for x in self.lines[:count] if x[0] == "{"]
        return {(line["rec"], line["n"]) for line in parsed}


class Arrived(NamedTuple):
    """A file of the capture: whole lines of a segment, and a part of one."""

    segment: Recorded
    line_count: int
    is_torn: bool


class History(Bed):
    """What was recorded, what has arrived, and what the table should have."""

    def __init__(self, folder: Path, seed: int, do: Any) -> None:
        super().__init__(folder)
        tables.make_table(str(self.table))
        self.random = random.Random(seed)
        self.backup_folder = folder / "backup"
        self.do = do
        self.recorded: list[Recorded] = []
        self.arrived: dict[Path, Arrived] = {}
        self.all_arrived: set[Row] = set()
        self.required: set[Row] = set()
        self.deleted: set[Row] = set()  # which nothing brings back
        self.forgotten: set[Row] = set()  # deleted; an ingest may not know
        self.erased: set[Row] = set()
        self.noted: dict[Path, int] = {}  # sizes that an ingest knows
        self.versions: dict[int, dict[Row, bool]] = {}
        self.backup: tuple[Any, ...] = ()
        self.steps: list[str] = []

    def go(self, steps: int) -> None:
        """Take random steps, and let all arrive in the end."""
        self.record()
        names, weights = [*WEIGHTS], [*WEIGHTS.values()]
        for name in self.random.choices(names, weights, k=steps):
            self.steps.append(name)
            getattr(self, name)()
            self.check()
        self.steps.append("the end")
        for path in [path for path in self.arrived if not path.exists()]:
            del self.arrived[path]
        for segment in self.recorded:
            self.put(segment, ".jsonl")
            self.put(segment, "copy")
        self.take_in()
        self.check()
        gaps = [x for x in self.remarks if "missing" in x and x[0] != "Z"]
        assert not gaps
        absent = self.all_arrived - {*self.rows()}
        assert absent <= self.deleted | self.forgotten

    # ---- What arrives

    def record(self) -> None:
        """Let a recorder complete some segments."""
        recorder = self.random.choice(["h_1_R", "h_1_S", "g_2_T"])
        for _ in range(self.random.randrange(1, 6)):
            names = [x.name.startswith(recorder) for x in self.recorded]
            number = 1 + sum(names)
            day = self.random.choice(DAYS)
            noon = datetime.datetime(day.year, day.month, day.day, 12)
            noon = noon.replace(tzinfo=datetime.timezone.utc)
            first = number * 10
            numbers = range(first, first + self.random.randrange(4))
            about = {"rec": recorder, "t": int(noon.timestamp()) * 10**9}
            lines = [capture_line(n, **about) for n in numbers]
            if not lines or self.random.random() < 0.3:
                lines.insert(0, f"no message {recorder} {number}\n")
            name = f"{recorder}-{number:06}"
            self.recorded.append(Recorded(name, day, lines))

    def arrive(self) -> None:
        """Let some segments arrive, for the first time or again."""
        names = {x.segment.name for x in self.arrived.values()}
        late = [x for x in self.recorded if x.name not in names]
        chosen = late if late and self.random.random() < 0.8 else self.recorded
        count = min(self.random.randrange(1, 5), len(chosen))
        for segment in self.random.sample(chosen, count):
            kinds = [*3 * [".jsonl"], ".jsonl.gz", "copy", "other name"]
            self.put(segment, self.random.choice(kinds))

    def put(self, segment: Recorded, kind: str) -> None:
        """Let a whole segment arrive."""
        folder, name = str(segment.day), segment.name
        if kind in ("copy", "other name"):
            folder = "copies"
            name = f"Z_{name}" if kind == "other name" else name
            kind = ".jsonl"
        data = "".join(segment.lines).encode()
        if kind == ".jsonl.gz":
            data = gzip.compress(data, mtime=0)
        path = self.write(f"{folder}/{name}{kind}", data)
        self.arrived[path] = Arrived(segment, len(segment.lines), False)

    def arrive_half(self) -> None:
        """Let the beginning of a segment arrive, under its own name."""
        segment = self.random.choice(self.recorded)
        name = f"{segment.day}/{segment.name}.jsonl"
        path = self.capture / name
        if path in self.arrived and path.exists():
            return
        count = self.random.randrange(len(segment.lines))
        text = "".join(segment.lines[:count])
        is_torn = count == 0 or self.random.random() < 0.5
        if is_torn:
            text += segment.lines[count][:9]
        self.write(name, text)
        self.arrived[path] = Arrived(segment, count, is_torn)

    # ---- Ingests

    def take_in(self, between: Callable[[], object] = lambda: None) -> None:
        """Ingest; do something between the tasks and the commit."""
        listed = self.listed()
        self.may_come_back()

        def do(_: Any, work: Work, count: int) -> Sequence[Any]:
            outcomes: Sequence[Any] = self.do(work, count)
            between()
            return outcomes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(intake, "do_tasks", do)
            self.ingest(is_cleaning=self.random.random() < 0.4)
        self.noted.clear()
        for path in [path for path in listed if path in self.arrived]:
            segment, count, is_torn = self.arrived[path]
            if not is_torn:
                rows = segment.rows(count)
                self.required |= rows - self.deleted - self.forgotten
                self.noted[path] = listed[path]

    def listed(self) -> dict[Path, int]:
        """Return the sizes of the segments that there are."""
        return {x: x.stat().st_size for x in self.arrived if x.exists()}

    def may_come_back(self) -> None:
        """Let what was deleted come back if its segment is looked at."""
        for path, size in self.listed().items():
            if self.noted.get(path) != size:
                rows = self.arrived[path].segment.rows()
                self.forgotten |= self.deleted & rows
                self.deleted -= rows

    def ingest_killed(self) -> None:
        """Ingest, and be killed anywhere."""
        self.may_come_back()
        kill_at = self.random.choice(["tasks", "done", "between", "end"])
        commit = tables.commit

        def commit_killed(where: str, *more: Any) -> None:
            is_table = not where.endswith("_quarantine")
            if kill_at == "between" and is_table:
                raise Killed
            commit(where, *more)
            if kill_at == "end" and is_table:
                raise Killed

        def do_killed(_: Any, work: Work, count: int) -> Sequence[Any]:
            outcomes: Sequence[Any] = self.do(work, count)
            for x in outcomes if kill_at == "tasks" else ():
                if x.path and self.random.random() < 0.5:
                    (self.table / x.path).unlink(missing_ok=True)
                    (self.table / "_quarantine" / x.path).unlink(True)
            if kill_at in ("tasks", "done"):
                raise Killed
            return outcomes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "commit", commit_killed)
            patch.setattr(intake, "do_tasks", do_killed)
            try:
                self.ingest()
            except Killed:
                self.noted.clear()

    def two_at_once(self) -> None:
        """Ingest while another ingest has begun, and let both end."""

        def second() -> None:
            if self.random.random() < 0.5:
                self.arrive()
            self.take_in()

        self.ingest_or_give_up(second)
        self.noted.clear()  # each has noted what it knows

    def meddle(self) -> None:
        """Let another tool change the table before an ingest commits."""
        act = self.random.choice(
            [self.optimize, self.vacuum, self.delete, self.restore, self.erase]
        )
        self.steps.append(act.__name__)
        self.ingest_or_give_up(act)
        if act == self.restore:
            self.versions.clear()
            self.required &= {*self.rows()}
        self.noted.clear()
        self.may_come_back()  # in a second round

    def ingest_or_give_up(self, between: Any) -> None:
        """Ingest; a change of the table may make it give up."""
        try:
            self.take_in(between)
        except BusyError as error:
            assert "another ingest, compact" in str(error)

    # ---- Upkeep, and other tools

    def compact(self) -> None:
        """Compact, and clean the log of what is old, as all is."""
        for path in self.table.rglob("*"):
            os.utime(path, (0, 0))
        upkeep.compact(str(self.table))
        self.versions.clear()

    def optimize(self) -> None:
        """Merge files by another tool."""
        opened = self.opened()
        opened.optimize.compact()
        opened.create_checkpoint()

    def vacuum(self) -> None:
        """Remove at once what is in no snapshot, by another tool."""
        self.opened().vacuum(0, False, enforce_retention_duration=False)
        self.versions.clear()

    def expire(self) -> None:
        """Let days expire."""
        day = self.random.choice(DAYS)
        old = [x for x in self.recorded if x.day < day]
        rows = {row for x in old for row in x.rows()} & {*self.rows()}
        assert upkeep.expire(str(self.table), day)[0] == len(rows)
        self.delete_rows(rows)
        self.versions.clear()

    def delete(self) -> None:
        """Delete rows on purpose."""
        n, before = self.random.randrange(10, 60), self.rows()
        recorder = self.random.choice(["h_1_R", "h_1_S"])
        self.opened().delete(f"n < {n} and recorder = '{recorder}'")
        self.delete_rows({x for x in before if x[0] == recorder and x[1] < n})

    def delete_rows(self, rows: set[Row]) -> None:
        """Expect that rows are not there, and do not come again."""
        self.deleted |= rows
        self.forgotten -= rows
        self.required -= rows
        self.erased -= rows

    def erase(self) -> None:
        """Erase what a person sent."""
        n, before = self.random.randrange(10, 60), self.rows()
        nothing = dict.fromkeys(["key", "key_bytes", "payload"], "null")
        self.opened().update(nothing, predicate=f"n = {n}")
        self.erased |= {x for x in before if x[1] == n}

    def restore(self) -> None:
        """Let the table be again what it was."""
        opened = self.opened()
        versions = [x for x in self.versions if x < opened.version()]
        if versions:
            self.check_removed(self.rows())
            version = self.random.choice(versions)
            opened.restore(version)
            self.have(self.versions[version])

    def have(self, rows: dict[Row, bool]) -> None:
        """Expect these rows; all others may come in again."""
        self.required = {*rows}
        self.erased = {row for row, is_erased in rows.items() if is_erased}
        self.deleted.clear()
        self.forgotten.clear()
        self.noted.clear()

    def lose_notes(self) -> None:
        """Lose what was noted, or some of it."""
        notes = self.table / tables.NOTES
        if notes.exists():
            text = notes.read_bytes()
            notes.write_bytes(text[: self.random.randrange(len(text))])
            if self.random.random() < 0.5:
                notes.unlink()
            self.noted.clear()

    def clone(self) -> None:
        """Make the table anew from its rows, with or without statistics."""
        rows = self.opened().to_pyarrow_table()
        clone = self.table.with_name("clone")
        columns = self.random.choice(["0", "32"])
        about = {"delta.dataSkippingNumIndexedCols": columns}
        write_deltalake(
            str(clone), rows, partition_by=["day"], configuration=about
        )
        shutil.rmtree(self.table)
        clone.rename(self.table)
        self.versions.clear()
        self.noted.clear()

    def back_up(self) -> None:
        """Copy the table, its log first."""
        shutil.rmtree(self.backup_folder, ignore_errors=True)
        log = "_delta_log"
        shutil.copytree(self.table / log, self.backup_folder / log)
        shutil.copytree(self.table, self.backup_folder, dirs_exist_ok=True)
        state = self.deleted, self.forgotten, self.noted
        self.backup = copy.deepcopy((self.rows(), *state))

    def go_back(self) -> None:
        """Use a backup, with its own notes or with those that are newer."""
        if self.backup:
            notes = self.table / tables.NOTES
            newer = notes.read_bytes() if notes.exists() else b""
            shutil.rmtree(self.table)
            shutil.copytree(self.backup_folder, self.table)
            rows, *state = copy.deepcopy(self.backup)
            self.have(rows)
            self.versions.clear()
            if newer and self.random.random() < 0.5:
                notes.write_bytes(newer)
            else:
                self.deleted, self.forgotten, self.noted = state

    # ---- What holds

    def rows(self) -> dict[Row, bool]:
        """Return the rows of the table, and whether each is erased."""
        columns = ["recorder", "n", "key", "payload"]
        rows = self.opened().to_pyarrow_table(columns=columns).to_pylist()
        erased = {
            (x["recorder"], x["n"]): x["key"] is None and x["payload"] is None
            for x in rows
        }
        assert len(erased) == len(rows), "a message is there twice"
        return erased

    def check(self) -> None:
        """The table has what it should have."""
        self.all_arrived |= {
            row
            for segment, count, is_torn in self.arrived.values()
            for row in segment.rows(None if is_torn else count)
        }
        rows = self.rows()
        assert not self.required - {*rows}, "messages are lost"
        assert not {*rows} - self.all_arrived
        assert not self.deleted & {*rows}, "deleted messages are back"
        assert all(rows.get(row, True) for row in self.erased)
        self.check_removed(rows)
        self.versions[self.opened().version()] = rows
        self.check_lines()

    def check_removed(self, rows: dict[Row, bool]) -> None:
        """The table has what was in the segments that are gone."""
        for path in [path for path in self.arrived if not path.exists()]:
            segment, count, _ = self.arrived.pop(path)
            known = {*rows} | self.deleted | self.forgotten
            assert not segment.rows(count) - known, f"{path} was removed"

    def check_lines(self) -> None:
        """No line of a segment is in the quarantine twice."""
        where = tables.aside(str(self.table))
        if DeltaTable.is_deltatable(where):
            lines = DeltaTable(where).to_pyarrow_table().to_pylist()
            kept = {(x["segment"], x["line"]) for x in lines}
            assert len(kept) == len(lines)


def go_through(
    folder: Path, do: Any, seeds: Iterable[int], steps: int = 25
) -> None:
    """Go through histories; name the seed of one that fails."""
    for seed in seeds:
        where = folder / str(seed)
        where.mkdir()
        history = History(where, seed, do)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if seed % 2:  # a task for each segment
                    patch.setattr(captures, "TASK_BYTES", 1)
                history.go(steps)
        except BaseException:
            print("seed", seed, "after", history.steps)
            raise
        shutil.rmtree(where)
