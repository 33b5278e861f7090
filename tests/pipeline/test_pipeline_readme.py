"""Tests of what the README says: each of its blocks runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, TOP, plain_environment

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

TEXT = (TOP / "pipeline" / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TEXT, re.M | re.S)
UNITS = sorted((TOP / "contrib" / "systemd").glob("sbus-*.service"))


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Return a folder with links to programs, and an empty capture."""
    for name in "sbus.py", "sbus_client.py", "tools", "services":
        (tmp_path / name).symlink_to(TOP / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    python, package = sys.executable, TOP / "pipeline" / "sbus_spark"
    for name, command in {
        "python3": [python],
        "sbus-spark": [python, str(package)],
    }.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "capture").mkdir()
    return tmp_path


def test_the_blocks_in_their_order(lake: Path) -> None:
    """Those of the shell, and the Python that needs no session of ours."""
    environment = plain_environment()
    environment["PATH"] = f"{lake / 'bin'}:{environment['PATH']}"
    outputs = []
    for kind, block in BLOCKS:
        block = block.replace("/tmp/my.bus", str(lake / "bus"))
        command = ["bash", "-emc", block]
        if kind == "python":
            compile(block, "README.md", "exec")
            command = [sys.executable, "-c", block]
        if "airflow" in block or "readStream" in block:
            continue
        done = subprocess.run(
            command, cwd=lake, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (block, done)
        outputs.append(done.stdout)
    assert "1 messages ingested, 0 lines quarantined" in outputs[0]
    assert "\thouse/hall/temperature\t20.5\n" in outputs[0]
    assert "every delivery was owed and made" in outputs[0]
    metrics = (lake / "sbus-table.prom").read_text()
    assert "\nsbus_table_messages 1\n" in metrics
    assert '"messages":1,' in outputs[-1]


def test_the_program_of_a_stream(
    spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs until it is stopped."""
    (block,) = (text for _, text in BLOCKS if "readStream" in text)
    block = block.replace("/lake/", f"{lake}/")
    block = block.replace("query.awaitTermination()", "query.stop()")
    monkeypatch.setattr(sbus_spark.sessions, "session", lambda _: spark)
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units(unit: Path) -> None:
    """What a unit of systemd starts is a command with such options."""
    parser = sbus_spark.cli.option_parser()
    lines = re.findall(r"^ExecStart=(.*)", unit.read_text(), re.M)
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        if os.path.basename(program) == "sbus-spark":
            assert parser.parse_args(words).run
