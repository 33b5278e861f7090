"""Tests of the pipeline on workers that are processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_paper import PaperBus, write_segments, write_trace
from pipeline_plants import lose, misdeliver

pyspark = pytest.importorskip("pyspark", reason="it needs Python 3.10")


import sbus_spark
from pipeline_bed import (
    PATHS,
    TIMEOUT,
    TOP,
    plain_environment,
    submit_arguments,
)

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

CLUSTER = f"""
{PATHS}
import json, os, signal, subprocess, threading, time
from pathlib import Path
import sbus_spark as S

trace, capture, folder = sys.argv[1:]
spark = S.session("cluster")
context = spark.sparkContext
application = context.applicationId

def executors():
    text = subprocess.check_output(["ps", "-eo", "pid,args"], text=True)
    return [
        int(line.split()[0]) for line in text.splitlines()
        if application in line and "ExecutorBackend" in line
    ]

def kill_one():
    while not list(Path(folder).rglob("sbus-audit-*")):
        time.sleep(0.05)
    os.kill(executors()[0], signal.SIGKILL)

def origins(n):
    import sbus, sbus_client, sbus_spark
    return " ".join(m.__file__ for m in (sbus, sbus_client, sbus_spark))

for text in context.parallelize(range(4), 4).map(origins).collect():
    assert text.count("/sbus_spark-session.zip/") == 3, text
assert len(executors()) == 2
threading.Thread(target=kill_one).start()
found = S.audit(spark, [trace], 100_000).collect()
counts = S.ingest(spark, capture, folder + "/table")
table = S.in_order(S.read_table(spark, folder + "/table"))
times = [row["t"] for row in table.collect()]
S.register(spark)
read = spark.read.format("sbus").load(capture).count()
results = [sorted(row["breach"] for row in found), counts, times, read]
Path(folder, "results").write_text(json.dumps(results))
"""


class TestCluster:
    """Executors that are processes of their own."""

    def test_an_executor_that_dies_changes_no_result(
        self, tmp_path: Path
    ) -> None:
        """What PySpark brings along is enough for a small cluster."""
        events = list(map(json.loads, PaperBus(500, 50, 20).run(5_000)))
        lose(events)
        misdeliver(events)
        write_trace(tmp_path / "trace", events)
        write_segments(tmp_path / "capture", 3)
        home = tmp_path / "home"  # where workers make their folders
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "python":  # PySpark, which nobody has compiled
                (home / path.name).symlink_to(path)
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": submit_arguments(
                "local-cluster[2,1,1024]", tmp_path
            ),
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER]
            + [str(tmp_path / name) for name in ("trace", "capture", "")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "results").read_text())
        breaches, counts, times, read = results
        assert breaches == ["missing", "unowed"]
        assert counts == [300, 0] and read == 300
        assert times == sorted(times) and len(times) == 300

    def test_submitted_with_the_line_of_the_readme(
        self, tmp_path: Path
    ) -> None:
        """The verdict is all that is printed."""
        trace = tmp_path / "trace"
        trace.write_text("".join(PaperBus(500, 50, 20).run(1_000)))
        readme = (TOP / "pipeline" / "README.md").read_text("utf-8")
        archive = tmp_path / "sbus_spark.zip"
        sbus_spark.write_archive(archive)
        line = next(
            line.partition("'")[2].partition("'")[0]
            for line in readme.splitlines()
            if "SUBMIT='spark-submit" in line
        )
        line = line.replace("--master ...", "--master local[2]")
        line = line.replace("build/sbus_spark.zip", str(archive))
        command = line.split()
        assert str(archive) in command
        command[0] = str(Path(pyspark.__file__).parent / "bin/spark-submit")
        done = subprocess.run(
            [*command, "audit", "--json", str(trace)],
            cwd=TOP,
            env=plain_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["breaches"] == []
