"""Tests of what an ingest notes, and of each way to lose or to fool it.

What is wrong costs a look at segments.  It changes no row, and `--clean`
removes nothing that the table lacks.
"""

from __future__ import annotations

import functools
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

from deltalake import Field, write_deltalake
from deltalake.schema import PrimitiveType

from pipeline_bed import TOP
from pipeline_without_spark import Bed
from sbus_spark import tables
from sbus_spark.known import Known

pytest_plugins = "pipeline_session"


def log(bed: Bed) -> list[Path]:
    """Return the commits in the log."""
    return sorted(bed.table.glob("_delta_log/*.json"))


def knows(bed: Bed) -> bool:
    """Return whether any segment is known."""
    return bool(Known(str(bed.table), bed.opened()).sizes)


@pytest.fixture(autouse=True)
def two_segments(bed: Bed) -> None:
    """Ingest two segments, one after another."""
    for number in 1, 2:
        bed.add(number)
    assert knows(bed)


def add_a_column(bed: Bed) -> None:
    bed.opened().alter.add_columns([Field("site", PrimitiveType("string"))])


def append(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table(filters=[("n", "=", 10)])
    copy = rows.set_column(1, "recorder", [["other"]])
    write_deltalake(str(bed.table), copy, mode="append")


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
    bed.table = bed.table.rename(bed.table.with_name("moved"))


@pytest.mark.parametrize(
    "act",
    [
        lambda bed: bed.opened().optimize.compact(),
        lambda bed: bed.opened().optimize.z_order(["key"]),
        lambda bed: bed.opened().delete("n = 15"),
        lambda bed: bed.opened().update({"key": "null"}, predicate="n = 15"),
        lambda bed: bed.run("compact"),
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
    assert knows(bed)
    assert bed.ingest(is_cleaning=True) == 0
    assert not [*bed.capture.iterdir()]
    assert bed.opened().count() == rows
    bed.add(3)  # what comes later is ingested as ever


def restore(bed: Bed) -> None:
    bed.opened().restore(1)


def overwrite(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table()[:5]
    write_deltalake(str(bed.table), rows, mode="overwrite")


def lose_a_file(bed: Bed) -> None:
    (path, *_) = bed.table.glob("day=*/*")
    path.unlink()
    bed.opened().repair()


def clone(bed: Bed) -> None:
    rows = bed.opened().to_pyarrow_table()
    shutil.rmtree(bed.table)
    write_deltalake(str(bed.table), rows, partition_by=["day"])


def restore_and_hide_it(bed: Bed) -> None:
    restore(bed)
    lines = log(bed)[-1].read_text().splitlines(True)
    others = [line for line in lines if '"commitInfo"' not in line]
    log(bed)[-1].write_text("".join(others))


def restore_and_clean_the_log(bed: Bed) -> None:
    restore(bed)
    set_a_property(bed)
    for commit in log(bed)[:-1]:
        commit.unlink()


def lose_notes(bed: Bed) -> None:
    (bed.table / tables.NOTES).unlink()


def garble_notes(bed: Bed, text: str) -> None:
    (bed.table / tables.NOTES).write_text(text)


def garble_runs(bed: Bed) -> None:
    notes = json.loads((bed.table / tables.NOTES).read_text())
    garble_notes(bed, json.dumps({**notes, "runs": {"R": [["x"], "y"]}}))


def use_an_older_log(bed: Bed) -> None:
    """As of a backup, beside notes that are newer."""
    log(bed)[-1].unlink()


def go_on_with_an_older_log(bed: Bed) -> None:
    """So that the version of the notes is another commit."""
    notes = (bed.table / tables.NOTES).read_text()
    use_an_older_log(bed)
    bed.opened().delete("n = 15")
    garble_notes(bed, notes)


GARBLED = [
    '{"commit": ["1", {}], "runs": {}',
    '{"commit": ["1", []], "runs": {"R": 1}, "sizes": 1}',
]


@pytest.mark.parametrize(
    "act",
    [
        *(restore, overwrite, lose_a_file, clone, restore_and_hide_it),
        *(restore_and_clean_the_log, use_an_older_log),
        *(go_on_with_an_older_log, lose_notes, garble_runs),
        *(functools.partial(garble_notes, text=text) for text in GARBLED),
    ],
)
def test_what_may_have_dropped_rows_has_all_looked_at_again(
    bed: Bed, act: Callable[[Bed], object]
) -> None:
    """`--clean` removes nothing until then."""
    act(bed)
    assert not knows(bed)
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

    with monkeypatch.context() as patch:
        patch.setattr(Known, "write", write_late)
        bed.add(3)
    assert bed.ingest() == 20


def test_notes_that_cannot_be_written(bed: Bed) -> None:
    """Nothing of them stays, and the next run makes it good."""
    lose_notes(bed)
    (bed.table / tables.NOTES / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        bed.add(3)
    assert not [*bed.table.glob("*.new")]
    shutil.rmtree(bed.table / tables.NOTES)
    assert bed.ingest() == 0 and bed.opened().count() == 30


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
    bed.add(1, "g_1_S")
    bed.ingest(is_cleaning=True)
    lose_notes(bed)
    bed.add(3)
    assert not bed.remarks
    bed.add(2, "g_1_S")  # a round later
    assert not bed.remarks
    bed.add(4, "g_1_S")
    assert [x.partition(":")[0] for x in bed.remarks] == ["g_1_S"]
    assert bed.remarks[0].endswith(": segment 3")


def test_files_of_others_stay(bed: Bed, tmp_path: Path) -> None:
    """A compaction removes nothing that is not the table's, nor by a link."""
    elsewhere = tmp_path / "elsewhere"
    kept = [elsewhere / "a", bed.table / "sub" / "b", bed.table / "c.txt"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    (bed.table / "link").symlink_to(elsewhere)
    assert bed.run("compact")[0] == 0
    assert all(path.exists() for path in kept)


def test_what_was_printed_before_an_error(bed: Bed) -> None:
    """It is not lost, also where standard output has a buffer."""
    days = [capture_line(n, t=(n + 1) * 10**18) for n in (1, 2)]
    bed.write("h_1_S-000001.jsonl", *days)
    assert bed.ingest() == 2
    (last,) = max(bed.table.glob("day=*")).glob("*.parquet")
    last.write_bytes(b"damaged" * 100)
    program = str(TOP / "pipeline" / "sbus_spark")
    show = [sys.executable, program, "show", str(bed.table)]
    environment = {**os.environ}
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(show, env=environment, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert done.stdout.count(b"\n") == 20  # those of the first day
