"""Tests of tables that other tools have changed, and of several hosts."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pipeline_bed import TOP
from pipeline_without_spark import Bed
from sbus_spark import upkeep

pytest_plugins = "pipeline_session"

HOUR = 3_600_000_000_000  # nanoseconds
NOON = 1_763_726_400_000_000_000  # 2025-11-21T12:00:00Z


# ---- What Delta has and this lacks is refused in words


def append_to_log(bed: Bed, action: dict[str, Any], part: str = "") -> None:
    """Commit an action that deltalake would not."""
    path = bed.table / part
    version = DeltaTable(str(path)).version() + 1
    about = {"operation": "UPDATE", "timestamp": int(time.time() * 1_000)}
    lines = map(json.dumps, ({"commitInfo": about}, action))
    log = path / "_delta_log" / f"{version:020}.json"
    log.write_text("\n".join(lines))


def have_deletion_vectors(bed: Bed, part: str = "") -> None:
    asked = {"minReaderVersion": 3, "minWriterVersion": 7}
    names = dict.fromkeys(
        ["readerFeatures", "writerFeatures"], ["deletionVectors"]
    )
    append_to_log(bed, {"protocol": {**asked, **names}}, part)


def track_rows(bed: Bed) -> None:
    asked = {"minReaderVersion": 1, "minWriterVersion": 7}
    protocol = {**asked, "writerFeatures": ["rowTracking"]}
    append_to_log(bed, {"protocol": protocol})


def constrain(bed: Bed) -> None:
    bed.opened().alter.add_constraint({"small": "size < 20"})


def be_a_shallow_clone(bed: Bed) -> None:
    day = "2025-11-21"
    file = {"path": f"{bed.table}/day={day}/x.parquet", "size": 1}
    file |= {"partitionValues": {"day": day}, "modificationTime": 1}
    append_to_log(bed, {"add": {**file, "dataChange": True}})


def damage_the_log(bed: Bed) -> None:
    max(bed.table.glob("_delta_log/*.json")).write_text("{")


def lose_the_log(bed: Bed) -> None:
    shutil.rmtree(bed.table / "_delta_log")


@pytest.mark.parametrize(
    ("act", "reason", "commands"),
    [
        (
            have_deletion_vectors,
            "/table: it has features that this cannot read: deletionVectors",
            "ingest show report replay expire",
        ),
        (
            functools.partial(have_deletion_vectors, part="_quarantine"),
            "_quarantine: it has features that this cannot read: deletionVec",
            "ingest status compact",
        ),
        (track_rows, "Delta cannot write it: ", "ingest follow"),
        (constrain, "delta.constraints.small", "ingest"),
        (be_a_shallow_clone, "those of a shallow clone", "show"),
        (damage_the_log, "/table: its log is broken", "status"),
        (lose_the_log, "its log (_delta_log) is gone", "ingest status"),
    ],
)
def test_tables_that_are_refused(
    bed: Bed, act: Callable[[Bed], None], reason: str, commands: str
) -> None:
    """Nothing is shown, or added; it is no reason to try again and again."""
    bed.add(1)
    act(bed)
    bed.write("h_1_R-000002.jsonl", capture_line(40))
    words = {"report": "report --json", "replay": "replay -a x"}
    words |= {"expire": "expire --keep 1d", "follow": "ingest --follow"}
    for name in commands.split():
        status, output, errors = bed.run(words.get(name, name))
        assert (status, output) == (2, ""), name
        assert reason in errors and errors.count("\n") == 1


def test_statistics_that_are_gone(bed: Bed) -> None:
    """Rows are counted, and come once, all the same.

    A row without a key is what is left of a message; it is not shown.
    """
    bed.add(1)
    opened = bed.opened()
    nothing = dict.fromkeys(["key", "key_bytes", "payload"], "null")
    opened.update(nothing, predicate="n = 15")
    name = "delta.checkpoint.writeStatsAsJson"
    opened.alter.set_table_properties({name: "false"})
    opened.create_checkpoint()
    (bed.table / "_ingested.json").unlink()
    assert bed.ingest() == 0
    assert json.loads(bed.run("status")[1])["messages"] == 10
    shown = [n for _, n in bed.show()]
    assert shown == [n for n in range(10, 20) if n != 15]
    dropped = " are dropped: 10 messages and 0 lines of the quarantine\n"
    assert bed.run("expire --keep 1d")[1].endswith(dropped)


# ---- An unreadable one stops only itself


def test_those_that_cannot_be_read(bed: Bed) -> None:
    """Each is named, with its reason."""
    lines = [capture_line(n).encode() for n in range(1, 22)]
    more = gzip.compress(b"".join(lines[10:15]))
    segments = {
        "R-000001.jsonl": b"".join(lines[:10]),
        "R-000002.jsonl.gz": b"no gzip",
        "R-000003.jsonl.gz": gzip.compress(os.urandom(9_999))[:-20],
        "R-000004.jsonl.bz2": b"BZh9 broken",
        "R-000005.jsonl": b"",
        "R-000006.jsonl": lines[0][:-1],
        "R-000007.jsonl.gz": more + gzip.compress(b"".join(lines[15:20])),
        "R-000008.jsonl.bz2": bz2.compress(lines[10]),
        "R-1.jsonl": lines[20],  # these are none
        ".R-000009.jsonl": lines[20],
    }
    for name, data in segments.items():
        bed.write(name, data)
    status, output, errors = bed.run("ingest")
    assert status == 1 and output[:3] == "20 "
    for number in range(2, 7):
        name = f"R-{number:06}.jsonl"
        assert sum(name in line for line in errors.splitlines()) == 1
    assert bed.run("status", bed.capture)[0] == 1


def test_a_line_without_end(bed: Bed) -> None:
    """It takes no more memory than the limit, and is quarantined."""
    with gzip.open(bed.capture / "R-000001.jsonl.gz", "wb", 1) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
        file.write(("\n" + capture_line(1)).encode())
    code = (
        "import re, sys, pipeline_without_spark as p;"
        "p.intake.do_tasks = lambda _, *task: p.do_here(*task);"
        "c = p.intake.ingest(None, *sys.argv[1:]);"
        "s = open('/proc/self/status');"
        "print(*c, *re.findall('VmHWM[^0-9]+([0-9]+)', s.read()))"
    )
    answer = run_python(code, bed.capture, bed.table)
    messages, lines, kibibytes = map(int, answer.stdout.split())
    assert (messages, lines) == (1, 1) and kibibytes < 400 << 10


def run_python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=TOP,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )


# ---- Three of them, with clocks of their own


@pytest.mark.parametrize(
    "hours",
    [
        [2, 1, 0, 3],
        [0, 12, 11, 13],  # over midnight
        [0, 1, -400_000, 2],  # 1980
        [13, 12, -20, -40],
    ],
)
def test_a_clock_that_goes_back(bed: Bed, hours: Sequence[int]) -> None:
    """The messages of a recorder come in its order."""
    lines = [
        capture_line(n, t=NOON + hour * HOUR, host="h")
        for n, hour in enumerate(hours, 1)
    ]
    bed.write("h_1_R-000001.jsonl", *lines)
    other = capture_line(1, rec="g_1_S", host="g", t=NOON + 12 * HOUR)
    bed.write("g_1_S-000001.jsonl", other)
    assert bed.ingest() == len(bed.show()) == 5
    wanted = [("h", n) for n in range(1, 5)]
    assert [x for x in bed.show() if x[0] == "h"] == wanted
    assert bed.show("--host h") == wanted


@pytest.mark.parametrize("is_lost", [False, True])
def test_one_that_is_silent(bed: Bed, is_lost: bool) -> None:
    """It is found though the others go on, and whatever is lost."""
    now = time.time_ns()
    for host, age in ("a_1", 0), ("a_2", 30 * HOUR), ("a_3", -HOUR):
        run = f"{host}_20251121T000000Z_ab"
        line = capture_line(1, rec=run, host=host, t=now - age)
        bed.write(f"{run}-000001.jsonl", line)
    assert bed.ingest() == 3
    if is_lost:
        (bed.table / "_ingested.json").unlink()
    status, _, errors = bed.run("status --max-age 20h")
    assert status == 1
    assert "no message of a_2 came for 108,00" in errors
    status, output, _ = bed.run("status --max-age 40h --json")
    state = json.loads(output)
    assert status == 0 and len(state["runs"]) == 2  # one is ahead
    assert state["lag_seconds"] < 3_600 < state["silent_seconds"]
    assert 3_000 < state["ahead_seconds"] < 3_601
    for host, code in ("a_1", 0), ("a_2", 1), ("a_4", 1):
        watched = bed.run(f"status --max-age 20h --host {host}")
        assert watched[0] == code, host


def test_segments_in_any_order(bed: Bed) -> None:
    """What is missing is named; what is in the table may be removed."""
    for numbers, gaps in ([2, 3, 5], "1, 4"), ([1, 3], "4"), ([4, 5], ""):
        for n in numbers:
            bed.write(f"R-{n:06}.jsonl", capture_line(n))
        status, _, errors = bed.run("ingest --clean")
        message = f"sbus-spark: R: missing: segment {gaps}\n" if gaps else ""
        assert (status, errors) == (1 if gaps else 0, message)
    assert bed.run("ingest --clean")[0] == 0
    assert not [*bed.capture.iterdir()]
    assert [n for _, n in bed.show()] == [1, 2, 3, 4, 5]


def test_the_state_of_a_table(bed: Bed) -> None:
    """Status 1 if something is missing or old, 0 if not."""
    for n in 1, 3:
        bed.write(f"h_1_R-{n:06}.jsonl", capture_line(n, rec="h_1_R"))
    bed.ingest()
    status, output, _ = bed.run("status")
    assert status == 1 and ': segment 2"\n' in output
    assert output.startswith('{\n  "messages": 2,\n')
    bed.write("h_1_R-000002.jsonl", capture_line(2, rec="h_1_R"))
    bed.write(".h_1_R-000004.jsonl.x", "half")
    status, output, _ = bed.run("status", bed.capture)
    assert status == 0 and '\n  "waiting": 1,\n' in output
    assert '/.h_1_R-000004.jsonl.x": ' in output
    bed.ingest()
    for age, status in ("9s", 1), ("99999d", 0):
        assert bed.run(f"status --max-age {age}")[0] == status
    state = json.loads(bed.run("status --json", bed.capture)[1])
    assert state["messages"] == 3 == state["runs"]["h_1_R"]["last"]
    assert not state["gaps"] and state["wait_seconds"] is None
    metrics = bed.run("status --openmetrics", bed.capture)[1]
    parse: Any = text_string_to_metric_families
    values = {x.name: x.samples[0].value for x in parse(metrics)}
    assert values["sbus_table_messages"] == 3
    assert values["sbus_table_waiting"] == values["sbus_table_torn"] == 0
    assert values["sbus_table_hidden"] == 1


def test_upkeep_of_each_night(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log goes on to name what the night before has removed.

    Changes that another tool wanted to see have what was erased: they go.
    """
    monkeypatch.setattr(upkeep, "READERS_HOURS", 0)
    for number in range(1, 4):
        bed.add(number)
        (bed.table / "day=2025-11-21" / "left.parquet").touch()  # by a kill
        feed = {"delta.enableChangeDataFeed": "true"}
        bed.opened().alter.set_table_properties(feed)
        bed.opened().update({"key": "null"}, predicate=f"n = {number}5")
        assert [*bed.table.glob("_change_data/**/*.parquet")]
        done = bed.run("compact")
        assert done[0] == 0, done[2]
        assert not [*bed.table.glob("_change_data/**/*.parquet")]
    assert len([*bed.table.glob("day=*/*")]) == 1
    shutil.rmtree(bed.table / "_quarantine")  # it is sound without
    assert bed.run("expire --keep 1d")[0] == 0
    assert not [*bed.table.glob("day=*/*")]


def test_what_needs_no_spark_imports_none(bed: Bed) -> None:
    """Nor pandas, which takes as long as all else."""
    bed.add(1)
    code = (
        "import sys, sbus_spark; *words, capture, table = sys.argv[1:];"
        "done = [sbus_spark.main(x.split() + [capture] * (x == 'ingest') +"
        " [table]) for x in words];"
        "print(*done, *{'pyspark.sql', 'pandas.core'} & {*sys.modules})"
    )
    words = "ingest", "status", "show", "compact"
    answer = run_python(code, *words, bed.capture, bed.table)
    assert answer.stdout.splitlines()[-1] == "0 0 0 0"
