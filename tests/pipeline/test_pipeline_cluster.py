"""Tests of the pipeline where Spark runs in other processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline_paper import write_segments, write_trace
from pipeline_plants import lose, misdeliver

pyspark = pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pipeline_bed import (
    PLAIN,
    QUICK,
    TIMEOUT,
    TOP,
    plain_environment,
    real_run,
)
from sizes import IS_SOAK

pytestmark = TIMEOUT

HOME = Path(pyspark.__file__).parent
# A standalone master and two workers, of which each has a core
DAEMONS = ["master.Master --port 0", *["worker.Worker --cores 1 -m 1g"] * 2]
CONNECT = f"""
import os, sys
sys.path[:0] = {[str(TOP / "pipeline"), str(TOP)]}
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
import json
import sbus_spark as s
from pyspark.sql import SparkSession

trace, capture, table = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
counts = s.ingest(spark, capture, table)
messages = s.read_table(spark, table)
total = s.summarize(messages)["totals"]["messages"]
found = s.summary(s.audit(spark, [trace]))
print(json.dumps([counts, total, found]), flush=True)
os._exit(0)  # the server that it has started says much at its end
"""


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Write a trace with two breaches, and a capture."""
    (tmp_path / "real").mkdir()
    events = real_run(tmp_path / "real", 500)
    lose(events)
    misdeliver(events)
    write_trace(tmp_path / "trace", events)
    write_segments(tmp_path / "capture", 3)
    return tmp_path


def start_daemon(arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Start a daemon of Spark on this host; a folder has all it leaves."""
    name, *options = arguments.split()
    options += ["--host", "127.0.0.1", "--webui-port", "0"]
    if name.startswith("worker"):
        options += ["--work-dir", str(folder / "work")]
    java = f"{PLAIN['SPARK_SUBMIT_OPTS']} -Djava.io.tmpdir={folder}"
    return subprocess.Popen(
        [str(HOME / "bin" / "spark-class")]
        + [f"org.apache.spark.deploy.{name}", *options],
        env=plain_environment() | {"SPARK_DAEMON_JAVA_OPTS": java},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def told(daemon: subprocess.Popen[str], what: str) -> str:
    """Return the line of a daemon's log that says something."""
    assert daemon.stderr  # it logs too little after that to fill the pipe
    return next(line for line in daemon.stderr if what in line)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """Give the address of a standalone cluster with two workers.

    Without soak the driver has the master and a worker; the executor is a
    process of its own there too.
    """
    if not IS_SOAK:
        yield "local-cluster[1,1,1024]"
        return
    with contextlib.ExitStack() as stack:
        address, daemons = "", []
        for arguments in DAEMONS:
            daemon = start_daemon(f"{arguments} {address}", tmp_path)
            stack.enter_context(daemon)
            stack.callback(os.killpg, daemon.pid, signal.SIGKILL)
            daemons.append(daemon)
            if not address:
                address = told(daemon, "Starting Spark master at").split()[-1]
        for worker in daemons[1:]:
            told(worker, "Successfully registered")
        yield address


def submit(
    master: str, archive: Path, arguments: Sequence[object]
) -> subprocess.CompletedProcess[str]:
    """Run a command with the line of the README, on a cluster."""
    readme = (TOP / "pipeline" / "README.md").read_text("utf-8")
    line = next(
        line.partition("'")[2].partition("'")[0]
        for line in readme.splitlines()
        if "SUBMIT='spark-submit" in line
    )
    line = line.replace("--master ...", f"--master {master}")
    line = line.replace("build/sbus_spark.zip", str(archive))
    words = [str(HOME / "bin" / line.split()[0]), *line.split()[1:]]
    return subprocess.run(
        [*words, *map(str, arguments)],
        cwd=TOP,
        env=plain_environment() | QUICK | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )


def test_a_standalone_cluster(traffic: Path, master: str) -> None:
    """spark-submit runs ingest, report and audit on two workers."""
    archive = traffic / "sbus_spark.zip"
    made = ["-m", "zipfile", "-c", str(archive), "sbus.py", "sbus_client.py"]
    made.append("pipeline/sbus_spark/")
    subprocess.run([sys.executable, *made], cwd=TOP, check=True)
    table = traffic / "table"
    done = submit(master, archive, ["ingest", traffic / "capture", table])
    assert done.stdout == "300 messages ingested, 0 lines quarantined\n", done
    if not IS_SOAK:  # the others take a minute
        return
    done = submit(master, archive, ["report", table, "--json"])
    assert json.loads(done.stdout)["totals"]["messages"] == 300
    done = submit(master, archive, ["audit", traffic / "trace", "--json"])
    assert json.loads(done.stdout)["counts"] == {"missing": 1, "unowed": 1}
    assert done.returncode == 1


def test_spark_connect(traffic: Path) -> None:
    """A client without Java of its own gets the same."""
    pytest.importorskip("grpc", reason="it needs pyspark[connect]")
    names = (str(traffic / name) for name in ("trace", "capture", "table"))
    # Spark's own tests set it as well: its server takes any port that is free
    settings = {"SPARK_TESTING": "1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, *names],
        cwd=traffic,
        env=plain_environment() | QUICK | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts, total, found = json.loads(done.stdout.splitlines()[-1])
    assert (counts, total) == ([300, 0], 300)
    found.pop("undecided", None)
    assert found == {"missing": 1, "unowed": 1}
