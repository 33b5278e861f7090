"""Tests of what the README says: each of its blocks runs."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, TOP, plain_environment
from pipeline_without_spark import command_line

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

TEXT = (TOP / "pipeline" / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TEXT, re.M | re.S)
UNITS = sorted((TOP / "contrib" / "systemd").glob("sbus-*.service"))
# It has the process of the tests run a command, in the session of Spark there
SBUS_SPARK = f"""#!{sys.executable}
import json, os, socket, sys

wire = socket.socket(socket.AF_UNIX)
wire.connect(os.path.dirname(__file__) + "/commands")
wire.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
status, output, errors = json.load(wire.makefile())
sys.stdout.write(output)
sys.stderr.write(errors)
sys.exit(status)
"""


@pytest.fixture
def lake(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with links to programs, and an empty capture."""
    for name in "sbus.py", "sbus_client.py", "tools", "services":
        (directory / name).symlink_to(TOP / name)
    programs = directory / "bin"
    programs.mkdir()
    python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name, text in ("python3", python), ("sbus-spark", SBUS_SPARK):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (directory / "capture").mkdir()
    monkeypatch.chdir(directory)
    return directory


def run_in_shell(block: str, lake: Path) -> str:
    """Run a block in a shell, and its commands here; return its output."""
    environment = plain_environment()
    environment["PATH"] = f"{lake / 'bin'}:{environment['PATH']}"
    words = ["bash", "-emc", block]
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (lake / "output").open("w") as output,
        subprocess.Popen(words, env=environment, stdout=output) as shell,
    ):
        listener.bind(str(lake / "bin" / "commands"))
        listener.listen()
        end = os.pidfd_open(shell.pid)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(end, select.POLLIN)
        while (listener.fileno(), select.POLLIN) in poll.poll():
            wire = listener.accept()[0]
            with wire, wire.makefile("rw") as stream:
                words = json.loads(stream.readline())
                json.dump(command_line(*words), stream)
        os.close(end)
        os.unlink(lake / "bin" / "commands")
    assert shell.returncode == 0, block
    return (lake / "output").read_text()


def test_the_blocks_in_their_order(
    spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the shell and of Python; a stream runs until it is stopped."""
    monkeypatch.setattr(sbus_spark.sessions, "session", lambda *_, **__: spark)
    outputs = []
    for kind, block in BLOCKS:
        block = block.replace("/tmp/my.bus", str(lake / "bus"))
        block = block.replace("/lake/", f"{lake}/")
        block = block.replace("query.awaitTermination()", "query.stop()")
        if kind == "sh":
            outputs.append(run_in_shell(block, lake))
        else:
            code = compile(block, "README.md", "exec")
            if "airflow" not in block:
                exec(code, {})
    assert "1 messages ingested, 0 lines quarantined" in outputs[0]
    assert "\thouse/hall/temperature\t20.5\n" in outputs[0]
    assert "every delivery was owed and made" in outputs[0]
    metrics = (lake / "sbus-table.prom").read_text()
    assert "\nsbus_table_messages 1\n" in metrics
    assert '"messages":1,' in outputs[-1]


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
