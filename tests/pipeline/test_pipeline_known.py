"""Tests of what an ingest notes, and of each way to lose or to fool it.

What is wrong costs a look at segments.  It changes no row, and `--clean`
removes nothing that the table lacks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from pipeline_bed import TOP, command_line
from pipeline_without_spark import NO_SESSION, do_here
from sbus_spark import intake, tables
from sbus_spark.known import Known


class Bed:
    """A capture and its table."""

    def __init__(self, folder: Path) -> None:
        self.capture, self.table = folder / "capture", folder / "table"
        self.where = str(self.table)
        self.capture.mkdir()
        self.remarks: list[str] = []

    def write(self, number: int, recorder: str = "h_1_R") -> Path:
        """Write a segment of ten messages."""
        path = self.capture / f"{recorder}-{number:06}.jsonl"
        numbers = range(10 * number, 10 * number + 10)
        lines = [capture_line(n, rec=recorder) for n in numbers]
        path.write_text("".join(lines))
        os.utime(path, (0, 0))
        return path

    def ingest(self, is_cleaning: bool = False) -> int:
        """Ingest; return how many messages were added."""
        where = str(self.capture), self.where
        batches = [*intake.rounds(NO_SESSION, *where, is_cleaning)]
        self.remarks = batches[-1].remarks
        return sum(batch.messages for batch in batches)

    def opened(self) -> DeltaTable:
        """Return the table."""
        return DeltaTable(self.where)

    def log(self) -> list[Path]:
        """Return the commits in the log."""
        return sorted(self.table.glob("_delta_log/*.json"))

    def knows(self) -> bool:
        """Return whether any segment is known."""
        return bool(Known(self.where, self.opened()).sizes)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    """Return a table of two segments, which came one after another."""
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    bed = Bed(tmp_path)
    for number in 1, 2:
        bed.write(number)
        bed.ingest()
    assert bed.knows()
    return bed


def add_a_column(bed: Bed) -> None:
    bed.opened().alter.add_columns([Field("site", PrimitiveType("string"))])


def append(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table(filters=[("n", "=", 10)])
    copy = rows.set_column(1, "recorder", [["other"]])
    write_deltalake(bed.where, copy, mode="append")


def constrain(bed: Bed) -> None:
    bed.opened().alter.add_constraint({"small": "size < 1000"})
    bed.opened().alter.drop_constraint("small")


def set_a_property(bed: Bed) -> None:
    name = "delta.setTransactionRetentionDuration"
    bed.opened().alter.set_table_properties({name: "interval 1 seconds"})
    bed.opened().create_checkpoint()


def vacuum(bed: Bed) -> None:
    bed.opened().vacuum(0, dry_run=False, enforce_retention_duration=False)


def copy_elsewhere(bed: Bed) -> None:
    bed.where += "-moved"
    bed.table = bed.table.rename(bed.where)


@pytest.mark.parametrize(
    "act",
    [
        lambda bed: bed.opened().optimize.compact(),
        lambda bed: bed.opened().optimize.z_order(["key"]),
        lambda bed: bed.opened().delete("n = 15"),
        lambda bed: bed.opened().update({"key": "null"}, predicate="n = 15"),
        lambda bed: command_line("compact", bed.where),
        *(vacuum, set_a_property, append, add_a_column, constrain),
        copy_elsewhere,
    ],
)
def test_what_keeps_rows_keeps_what_is_known(
    bed: Bed, act: Callable[[Bed], object]
) -> None:
    """Or drops some on purpose: they stay away, and `--clean` goes on."""
    act(bed)
    rows = bed.opened().count()
    assert bed.knows()
    assert bed.ingest(is_cleaning=True) == 0
    assert not [*bed.capture.iterdir()]
    assert bed.opened().count() == rows


def test_files_of_others_stay(bed: Bed, tmp_path: Path) -> None:
    """A compaction removes nothing that is not the table's, nor by a link."""
    elsewhere = tmp_path / "elsewhere"
    kept = [elsewhere / "a", bed.table / "sub" / "b", bed.table / "c.txt"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    (bed.table / "link").symlink_to(elsewhere)
    assert command_line("compact", bed.where)[0] == 0
    assert all(path.exists() for path in kept)


def test_what_was_printed_before_an_error(bed: Bed) -> None:
    """It is not lost, also where standard output has a buffer."""
    for n in 1, 2:  # a message on each of two other days
        line = capture_line(n, rec="h_1_S", t=(n + 1) * 10**18)
        (bed.capture / f"h_1_S-{n:06}.jsonl").write_text(line)
    assert bed.ingest() == 2
    (last,) = max(bed.table.glob("day=*")).glob("*.parquet")
    last.write_bytes(b"damaged" * 100)
    program = str(TOP / "pipeline" / "sbus_spark")
    show = [sys.executable, program, "show", bed.where]
    environment = {**os.environ}
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(show, env=environment, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert done.stdout.count(b"\n") == 20  # those of the first day


def restore(bed: Bed) -> None:
    bed.opened().restore(1)


def overwrite(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table()[:5]
    write_deltalake(bed.where, rows, mode="overwrite")


def lose_a_file(bed: Bed) -> None:
    (path, *_) = bed.table.glob("day=*/*")
    path.unlink()
    bed.opened().repair()


def clone(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table()
    shutil.rmtree(bed.table)
    write_deltalake(bed.where, rows, partition_by=["day"])


def restore_and_hide_it(bed: Bed) -> None:
    restore(bed)
    lines = bed.log()[-1].read_text().splitlines(True)
    others = [line for line in lines if '"commitInfo"' not in line]
    bed.log()[-1].write_text("".join(others))


def restore_and_clean_the_log(bed: Bed) -> None:
    restore(bed)
    set_a_property(bed)
    for commit in bed.log()[:-1]:
        commit.unlink()


def lose_notes(bed: Bed) -> None:
    (bed.table / tables.NOTES).unlink()


def garble_notes(bed: Bed) -> None:
    (bed.table / tables.NOTES).write_text('{"commit": ["1", {}], "runs": {}')


def make_notes_of_another_kind(bed: Bed) -> None:
    notes = {"commit": ["1", []], "runs": {"R": 1}, "sizes": 1}
    (bed.table / tables.NOTES).write_text(json.dumps(notes))


def make_runs_of_another_kind(bed: Bed) -> None:
    path = bed.table / tables.NOTES
    notes = json.loads(path.read_text())
    notes["runs"] = {"R": [[1, 5], None, None], "S": ["x", "y", "z"]}
    path.write_text(json.dumps(notes))


def use_an_older_log(bed: Bed) -> None:
    """As of a backup, beside notes that are newer."""
    bed.log()[-1].unlink()


def go_on_with_an_older_log(bed: Bed) -> None:
    """So that the version of the notes is another commit."""
    notes = (bed.table / tables.NOTES).read_bytes()
    use_an_older_log(bed)
    bed.opened().delete("n = 15")
    (bed.table / tables.NOTES).write_bytes(notes)


@pytest.mark.parametrize(
    "act",
    [
        *(restore, overwrite, lose_a_file, clone, restore_and_hide_it),
        *(restore_and_clean_the_log, lose_notes, garble_notes),
        *(
            make_notes_of_another_kind,
            make_runs_of_another_kind,
            use_an_older_log,
        ),
        go_on_with_an_older_log,
    ],
)
def test_what_may_have_dropped_rows_has_all_looked_at_again(
    bed: Bed, act: Callable[[Bed], object]
) -> None:
    """`--clean` removes nothing until then."""
    act(bed)
    assert not bed.knows()
    bed.ingest(is_cleaning=True)
    assert len([*bed.capture.iterdir()]) == 2
    assert bed.opened().count() == 20
    assert bed.ingest() == bed.ingest(is_cleaning=True) == 0
    assert not [*bed.capture.iterdir()] and bed.opened().count() == 20


def test_a_restore_before_notes_are_written(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not."""
    write = Known.write

    def write_late(known: Known) -> None:
        restore(bed)
        write(known)

    bed.write(3)
    with monkeypatch.context() as patch:
        patch.setattr(Known, "write", write_late)
        assert bed.ingest() == 10
    assert bed.ingest() == 20


def test_another_size_is_another_segment(bed: Bed) -> None:
    """It is looked at; one that became smaller is named."""
    path = bed.capture / "h_1_R-000001.jsonl"
    text = path.read_text()
    path.write_text(text + capture_line(19_999, rec="h_1_R"))
    assert bed.ingest() == 1 and not bed.remarks
    path.write_text(text)
    assert bed.ingest() == 0
    assert "it is smaller than when it was read" in bed.remarks[0]


def test_runs_outlive_what_was_lost(bed: Bed) -> None:
    """No gap is before what comes next, but one after it is named."""
    bed.write(1, "g_1_S")
    bed.ingest(is_cleaning=True)
    bed.ingest(is_cleaning=True)
    lose_notes(bed)
    bed.write(3)
    assert bed.ingest() == 10 and not bed.remarks
    bed.write(2, "g_1_S")  # a round later
    assert bed.ingest() == 10 and not bed.remarks
    bed.write(4, "g_1_S")
    assert bed.ingest() == 10
    assert [x.partition(":")[0] for x in bed.remarks] == ["g_1_S"]
    assert bed.remarks[0].endswith(": segment 3")
