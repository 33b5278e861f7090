"""Tests of the pipeline on workers that are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import PaperBus, write_segments, write_trace
from pipeline_plants import lose, misdeliver

pyspark = pytest.importorskip("pyspark", reason="it needs Python 3.10")


import sbus_spark
from pipeline_bed import (
    PATHS,
    QUICK_JAVA,
    TIMEOUT,
    TOP,
    plain_environment,
    submit_arguments,
)
from sizes import IS_SOAK

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
STANDALONE = f"""
{PATHS}
import json, os, signal, subprocess
from pathlib import Path
import sbus_spark as S
from sbus_spark.launch import prepare_java

capture, folder = sys.argv[1:]
prepare_java("")  # for the cluster, too
spark_class = os.environ["SPARK_HOME"] + "/bin/spark-class"

def start(*arguments):
    command = [spark_class, "org.apache.spark.deploy." + arguments[0]]
    command += ["--host", "127.0.0.1", "--webui-port", "0", *arguments[1:]]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )

def told(daemon, what):
    # The line of its log; it logs too little after that to fill the pipe
    return next(line for line in daemon.stderr if what in line)

master = start("master.Master", "--port", "0")
address = told(master, "Starting Spark master at").split()[-1]
sizes = ("--cores", "1", "--memory", "1g", "--work-dir", folder + "/work")
workers = [start("worker.Worker", *sizes, address) for _ in range(2)]
for worker in workers:
    told(worker, "Successfully registered")
arguments = os.environ["PYSPARK_SUBMIT_ARGS"].replace("MASTER", address)
os.environ["PYSPARK_SUBMIT_ARGS"] = arguments
spark = S.session("stream")
S.register(spark)
batches = []

def executors(worker):
    command = ["ps", "-o", "pid=", "--ppid", str(worker.pid)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return list(map(int, text.split()))

def take(rows, batch):
    if batch == 1:
        assert all(map(executors, workers))
        for pid in (workers[0].pid, *executors(workers[0])):
            os.kill(pid, signal.SIGKILL)
    batches.append([row["n"] for row in rows.collect()])

reader = spark.readStream.format("sbus").option("maxMessagesPerTrigger", 100)
writer = reader.load(capture).writeStream.foreachBatch(take)
writer = writer.option("checkpointLocation", folder + "/checkpoint")
writer.trigger(availableNow=True).start().awaitTermination()
assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
Path(folder, "results").write_text(json.dumps(batches))
"""


def run_on(master: str, script: str, *arguments: Path, folder: Path) -> Any:
    """Run a script that uses a cluster, and return its results."""
    home = folder / "home"  # where workers make their folders
    home.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "python":  # PySpark, which nobody has compiled
            (home / path.name).symlink_to(path)
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": submit_arguments(master, folder),
        "TMPDIR": str(folder),
    }
    environment.pop("JAVA_HOME", None)  # a session's own, blind to SPARK_HOME
    running = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments), str(folder)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, told = running.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # also what it has started
    assert running.returncode == 0, told
    return json.loads((folder / "results").read_text())


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
        results = run_on(
            "local-cluster[2,1,1024]",
            CLUSTER,
            tmp_path / "trace",
            tmp_path / "capture",
            folder=tmp_path,
        )
        breaches, counts, times, read = results
        assert breaches == ["missing", "unowed"]
        assert counts == [300, 0] and read == 300
        assert times == sorted(times) and len(times) == 300

    if IS_SOAK:  # six programs of Java, of which each starts slowly

        def test_a_worker_that_dies_while_a_stream_is_read(
            self, tmp_path: Path
        ) -> None:
            """On a standalone cluster of two, each message comes once."""
            write_segments(tmp_path / "capture", 4)
            capture = tmp_path / "capture"
            batches = run_on("MASTER", STANDALONE, capture, folder=tmp_path)
            assert len(batches) > 2
            assert sorted(sum(batches, [])) == [*range(1, 401)]

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
            env={**plain_environment(), "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["breaches"] == []
