"""Tests of tables that other tools have changed, and of several hosts."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from deltalake import DeltaTable, write_deltalake
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families,
)

from pipeline_bed import TOP, command_line
from pipeline_without_spark import do_here
from sbus_spark import intake, upkeep

Where = tuple[Path, Path]  # a capture and its table
HOUR = 3_600_000_000_000  # nanoseconds
NOON = 1_763_726_400_000_000_000  # 2025-11-21T12:00:00Z


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Where:
    """Return an empty capture and where its table is to be."""
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))
    (tmp_path / "capture").mkdir()
    return tmp_path / "capture", tmp_path / "table"


def write(path: Path, *lines: str) -> Path:
    """Write a segment."""
    path.write_text("".join(lines))
    return path


def ten_messages(where: Where) -> DeltaTable:
    """Ingest ten messages; return their table."""
    lines = map(capture_line, range(1, 11))
    write(where[0] / "R-000001.jsonl", *lines)
    assert command_line("ingest", *where)[0] == 0
    return DeltaTable(str(where[1]))


def append_to_log(opened: DeltaTable, *actions: dict[str, Any]) -> None:
    """Commit actions that deltalake would not."""
    version = opened.version() + 1
    about = {"operation": "UPDATE", "timestamp": int(time.time() * 1_000)}
    lines = map(json.dumps, ({"commitInfo": about}, *actions))
    path = Path(opened.table_uri.removeprefix("file://"), "_delta_log")
    (path / f"{version:020}.json").write_text("\n".join(lines))


def protocol(reader: int, *features: str) -> dict[str, Any]:
    """Return an action that asks readers, or only writers, for features."""
    asked = {"minReaderVersion": reader, "minWriterVersion": 7}
    names = {"writerFeatures": features}
    if reader > 1:
        names["readerFeatures"] = features
    return {"protocol": {**asked, **names}}


# ---- What Delta has and this lacks is refused in words


@pytest.mark.parametrize(
    ("part", "commands"),
    [
        ("", ["show", "report --json", "replay -a x", "expire --keep 1d"]),
        ("/_quarantine", ["status", "compact"]),
    ],
)
def test_rows_that_only_a_later_reader_knows_as_deleted(
    where: Where, part: str, commands: list[str]
) -> None:
    """No command shows them."""
    ten_messages(where)
    path = f"{where[1]}{part}"
    append_to_log(DeltaTable(path), protocol(3, "deletionVectors"))
    for command in commands:
        name, *options = command.split()
        status, output, errors = command_line(name, where[1], *options)
        assert (status, output) == (2, ""), command
        assert f"{path}: " in errors and "deletionVectors" in errors
    assert command_line("ingest", *where)[0] == 2


def test_what_is_asked_of_writers(where: Where) -> None:
    """It is named, and is no reason to try again and again."""
    opened = ten_messages(where)
    append_to_log(opened, protocol(1, "rowTracking"))
    write(where[0] / "R-000002.jsonl", capture_line(11))
    status, _, errors = command_line("ingest", *where, "--follow")
    assert status == 2 and "cannot write it" in errors
    assert "RowTracking" in errors
    assert len(command_line("show", where[1])[1].splitlines()) == 10


def test_rules_for_new_rows(where: Where) -> None:
    """Nothing is added that breaks them."""
    opened = ten_messages(where)
    opened.alter.add_constraint({"small": "size < 20"})
    write(where[0] / "R-000002.jsonl", capture_line(40))
    status, _, errors = command_line("ingest", *where)
    assert status == 2 and "delta.constraints.small" in errors


def test_columns_more(where: Where) -> None:
    """They are null in what comes; one that may not be is refused."""
    opened = ten_messages(where)
    rows = opened.to_pyarrow_table()
    rows = rows.append_column("site", [["here"] * 10])
    write_deltalake(
        str(where[1]), rows, mode="overwrite", schema_mode="overwrite"
    )
    write(where[0] / "R-000002.jsonl", capture_line(11))
    assert command_line("ingest", *where)[0] == 0
    sites = DeltaTable(str(where[1])).to_pyarrow_table()["site"]
    assert sites.null_count == 1 and len(sites) == 11


def test_a_shallow_clone(where: Where) -> None:
    """Its files are another table's."""
    opened = ten_messages(where)
    add = {
        "path": f"{where[1]}/day=2025-11-21/x.parquet",
        "partitionValues": {"day": "2025-11-21"},
        "size": 1,
        "modificationTime": 1,
        "dataChange": True,
    }
    append_to_log(opened, {"add": add})
    status, _, errors = command_line("show", where[1])
    assert status == 2 and "a shallow clone" in errors
    assert str(where[1]) in errors


def test_statistics_that_are_gone(where: Where) -> None:
    """Rows are counted, and come once, all the same."""
    opened = ten_messages(where)
    name = "delta.checkpoint.writeStatsAsJson"
    opened.alter.set_table_properties({name: "false"})
    opened.create_checkpoint()
    (where[1] / "_ingested.json").unlink()
    none = "0 messages ingested, 0 lines quarantined\n"
    assert command_line("ingest", *where) == (0, none, "")
    state = json.loads(command_line("status", where[1])[1])
    assert state["messages"] == 10
    done = command_line("expire", where[1], "--keep", "1d")
    assert " 10 messages" in done[1]


# ---- A row without a key is what is left of a message


def test_it_is_not_shown_and_not_lost(where: Where) -> None:
    """It does not come again, either."""
    opened = ten_messages(where)
    nothing = dict.fromkeys(["key", "key_bytes", "payload"], "null")
    opened.update(nothing, predicate="n = 5")
    (where[1] / "_ingested.json").unlink()
    assert command_line("ingest", *where)[1][:2] == "0 "
    numbers = [n for _, n in shown(where[1])]
    assert numbers == [n for n in range(1, 11) if n != 5]


# ---- An unreadable one stops only itself


def test_those_that_cannot_be_read(where: Where) -> None:
    """Each is named, with its reason."""
    capture, table = where
    text = "".join(map(capture_line, range(1, 11))).encode()
    write(capture / "R-000001.jsonl").write_bytes(text)
    write(capture / "R-000002.jsonl.gz").write_bytes(b"no gzip")
    cut = gzip.compress(os.urandom(9_999))[:-20]
    write(capture / "R-000003.jsonl.gz").write_bytes(cut)
    write(capture / "R-000004.jsonl.bz2").write_bytes(b"BZh9 broken")
    write(capture / "R-000005.jsonl", "")
    write(capture / "R-000006.jsonl", capture_line(60)[:-1])
    more = "".join(map(capture_line, range(71, 81))).encode()
    compressed = gzip.compress(more[:200]) + gzip.compress(more[200:])
    write(capture / "R-000007.jsonl.gz").write_bytes(compressed)
    write(capture / "R-000008.jsonl.bz2").write_bytes(bz2.compress(more))
    status, output, errors = command_line("ingest", *where)
    assert status == 1 and output[:3] == "20 "
    for number in range(2, 7):
        name = f"R-{number:06}.jsonl"
        assert sum(name in line for line in errors.splitlines()) == 1
    assert command_line("status", table, capture)[0] == 1


def test_a_line_without_end(where: Where) -> None:
    """It takes no more memory than the limit, and is quarantined."""
    capture, table = where
    with gzip.open(capture / "R-000001.jsonl.gz", "wb", 1) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
        file.write(("\n" + capture_line(1)).encode())
    code = (
        "import resource, sys, pipeline_without_spark as p;"
        "p.intake.do_tasks = lambda _, *task: p.do_here(*task);"
        "c = p.intake.ingest(None, *sys.argv[1:]); print(*c,"
        " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(capture), str(table)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    messages, lines, mebibytes = map(int, answer.stdout.split())
    assert (messages, lines) == (1, 1) and mebibytes < 400


def test_copies_of_bad_lines(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same segment elsewhere, or compressed, adds none."""
    capture, table = where
    text = "no JSON\nno JSON\n" + capture_line(1)
    for name in "a", "b":
        (capture / name).mkdir()
        write(capture / name / "R-000001.jsonl", text)
    packed = gzip.compress(text.encode())
    write(capture / "R-000001.jsonl.gz").write_bytes(packed)
    done = "1 messages ingested, 1 lines quarantined\n"
    assert command_line("ingest", *where) == (0, done, "")
    (table / "_ingested.json").unlink()
    none = "0 messages ingested, 0 lines quarantined\n"
    assert command_line("ingest", *where) == (0, none, "")


def shown(table: Path, *options: str) -> list[tuple[str, int]]:
    """Return hosts and numbers of messages, as they are shown."""
    status, output, _ = command_line("show", table, "--json", *options)
    assert status == 0
    lines = map(json.loads, output.splitlines())
    return [(line["host"], line["n"]) for line in lines]


# ---- Three of them, with clocks of their own


@pytest.mark.parametrize(
    ("hours", "order"),
    [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([2, 1, 0, 3], [1, 2, 3, 4]),
        ([0, 12, 11, 13], [1, 2, 3, 4]),  # over midnight
        ([0, 1, -400_000, 2], [1, 2, 3, 4]),  # 1980
        ([13, 12, -20, -40], [1, 2, 3, 4]),
    ],
)
def test_a_clock_that_goes_back(
    where: Where, hours: Sequence[int], order: list[int]
) -> None:
    """The messages of a recorder come in its order."""
    capture, table = where
    lines = [
        capture_line(n, t=NOON + hour * HOUR, host="h")
        for n, hour in enumerate(hours, 1)
    ]
    write(capture / "h_1_R-000001.jsonl", *lines)
    other = capture_line(1, rec="g_1_S", host="g", t=NOON + 12 * HOUR)
    write(capture / "g_1_S-000001.jsonl", other)
    assert command_line("ingest", *where)[0] == 0
    rows = shown(table)
    assert [n for host, n in rows if host == "h"] == order
    assert len(rows) == 5
    assert shown(table, "--host", "h") == [("h", n) for n in order]


@pytest.mark.parametrize("is_lost", [False, True])
def test_one_that_is_silent(where: Where, is_lost: bool) -> None:
    """It is found though the others go on, and whatever is lost."""
    capture, table = where
    now = time.time_ns()
    for host, age in ("a_1", 0), ("a_2", 30 * HOUR), ("a_3", -HOUR):
        run = f"{host}_20251121T000000Z_ab"
        line = capture_line(1, rec=run, host=host, t=now - age)
        write(capture / f"{run}-000001.jsonl", line)
    assert command_line("ingest", *where)[0] == 0
    if is_lost:
        (table / "_ingested.json").unlink()
    command = "status", table, "--max-age"
    status, _, errors = command_line(*command, "20h")
    assert status == 1
    assert "no message of a_2 came for 108,00" in errors
    status, output, _ = command_line(*command, "40h", "--json")
    state = json.loads(output)
    assert status == 0 and len(state["runs"]) == 2  # one is ahead
    assert state["lag_seconds"] < 3_600 < state["silent_seconds"]
    assert 3_000 < state["ahead_seconds"] < 3_601
    for host, code in ("a_1", 0), ("a_2", 1), ("a_4", 1):
        watched = command_line(*command, "20h", "--host", host)
        assert watched[0] == code, host


def test_segments_in_any_order(where: Where) -> None:
    """What is missing is named; what is in the table may be removed."""
    capture, table = where
    for numbers, gaps in ([2, 3, 5], "1, 4"), ([1, 3], "4"), ([4, 5], ""):
        for n in numbers:
            path = write(capture / f"R-{n:06}.jsonl", capture_line(n))
            os.utime(path, (0, 0))  # it is not half copied
        status, _, errors = command_line("ingest", *where, "--clean")
        told = f"sbus-spark: R: missing: segment {gaps}\n" if gaps else ""
        assert (status, errors) == (1 if gaps else 0, told)
    assert command_line("ingest", *where, "--clean")[0] == 0
    assert not [*capture.iterdir()]
    assert [n for _, n in shown(table)] == [1, 2, 3, 4, 5]


def test_the_state_of_a_table(where: Where) -> None:
    """Status 1 if something is missing or old, 0 if not."""
    capture, table = where
    for n in 1, 3:
        write(capture / f"h_1_R-{n:06}.jsonl", capture_line(n, rec="h_1_R"))
    command_line("ingest", *where)
    status, output, _ = command_line("status", table)
    assert status == 1 and ': segment 2"\n' in output
    assert output.startswith('{\n  "messages": 2,\n')
    write(capture / "h_1_R-000002.jsonl", capture_line(2, rec="h_1_R"))
    write(capture / ".h_1_R-000004.jsonl.x", "half")
    status, output, _ = command_line("status", table, capture)
    assert status == 0 and '\n  "waiting": 1,\n' in output
    assert '/.h_1_R-000004.jsonl.x": ' in output
    command_line("ingest", *where)
    for age, status in ("9s", 1), ("99999d", 0):
        assert command_line("status", table, "--max-age", age)[0] == status
    state = json.loads(command_line("status", table, capture, "--json")[1])
    assert state["messages"] == 3 == state["runs"]["h_1_R"]["last"]
    assert not state["gaps"] and state["wait_seconds"] is None
    metrics = command_line("status", table, capture, "--openmetrics")[1]
    parse: Any = text_string_to_metric_families
    values = {x.name: x.samples[0].value for x in parse(metrics)}
    assert values["sbus_table_messages"] == 3
    assert values["sbus_table_waiting"] == values["sbus_table_torn"] == 0
    assert values["sbus_table_hidden"] == 1


def test_upkeep_of_each_night(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log goes on to name what the night before has removed."""
    monkeypatch.setattr(upkeep, "READERS_HOURS", 0)
    for number in range(1, 4):
        line = capture_line(number, t=NOON + number)
        write(where[0] / f"R-00000{number}.jsonl", line)
        assert command_line("ingest", *where)[0] == 0
        write(where[1] / "day=2025-11-21" / "left.parquet")  # by a kill
        done = command_line("compact", where[1])
        assert done[0] == 0, done[2]
    assert len([*where[1].glob("day=*/*")]) == 1
    assert command_line("expire", where[1], "--keep", "1d")[0] == 0
    assert not [*where[1].glob("day=*/*")]


def test_changes_that_another_tool_wants_to_see(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was erased is not kept among them."""
    monkeypatch.setattr(upkeep, "READERS_HOURS", 0)
    opened = ten_messages(where)
    feed = {"delta.enableChangeDataFeed": "true"}
    opened.alter.set_table_properties(feed)
    opened.update({"key": "null"}, predicate="n = 5")
    assert [*where[1].glob("_change_data/**/*.parquet")]
    assert command_line("compact", where[1])[0] == 0
    assert not [*where[1].glob("_change_data/**/*.parquet")]


def test_a_log_that_is_lost(where: Where) -> None:
    """What would make a table, and what reads one, say the same."""
    ten_messages(where)
    shutil.rmtree(where[1] / "_delta_log")
    for words in ("ingest", *where), ("status", where[1]):
        status, _, errors = command_line(*words)
        assert status == 2 and "its log (_delta_log) is gone" in errors


def test_what_needs_no_spark_imports_none(where: Where) -> None:
    """Nor pandas, which takes as long as all else."""
    ten_messages(where)
    capture, table = where
    code = (
        "import sys, sbus_spark; status = sbus_spark.main(sys.argv[1:]);"
        "large = {'pyspark.sql', 'pandas.core'} & {*sys.modules};"
        "print(status, *large, file=sys.stderr)"
    )
    for words in (
        ["ingest", str(capture), str(table)],
        ["status", str(table), str(capture)],
        ["show", str(table)],
        ["compact", str(table)],
    ):
        answer = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=TOP,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert answer.stderr == "0\n", words
