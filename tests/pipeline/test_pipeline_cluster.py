"""Tests of the pipeline where Spark runs in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_paper import write_segments, write_trace

pyspark = pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pipeline_bed import QUICK, TIMEOUT, TOP, plain_environment
from sizes import IS_SOAK, either

pytestmark = TIMEOUT

HOME = Path(pyspark.__file__).parent
# A standalone master, and workers of a core, each with a process to execute
MASTER = f"local-cluster[{either(2, 1)},1,1024]"
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
    events = "msg, msg m=2, send m=2, send m=2 c=2, close, close c=2, stop"
    write_trace(tmp_path / "trace", events)
    write_segments(tmp_path / "capture", 3)
    return tmp_path


def submit(
    archive: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run a command with the line of the README, on a cluster."""
    readme = (TOP / "pipeline" / "README.md").read_text("utf-8")
    line = next(
        line.partition("'")[2].partition("'")[0]
        for line in readme.splitlines()
        if "SUBMIT='spark-submit" in line
    )
    line = line.replace("--master ...", f"--master {MASTER}")
    line = line.replace("build/sbus_spark.zip", str(archive))
    words = [str(HOME / "bin" / line.split()[0]), *line.split()[1:]]
    return subprocess.run(
        [*words, *map(str, arguments)],
        cwd=TOP,
        env=plain_environment() | QUICK | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )


def test_a_standalone_cluster(traffic: Path) -> None:
    """spark-submit runs ingest, report and audit on workers."""
    archive = traffic / "sbus_spark.zip"
    made = ["-m", "zipfile", "-c", str(archive), "sbus.py", "sbus_client.py"]
    made.append("pipeline/sbus_spark/")
    subprocess.run([sys.executable, *made], cwd=TOP, check=True)
    table = traffic / "table"
    done = submit(archive, "ingest", traffic / "capture", table)
    assert done.stdout == "300 messages ingested, 0 lines quarantined\n", done
    if not IS_SOAK:  # the others take a minute
        return
    done = submit(archive, "report", table, "--json")
    assert json.loads(done.stdout)["totals"]["messages"] == 300
    done = submit(archive, "audit", traffic / "trace", "--json")
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
    counts, total, breaches = json.loads(done.stdout.splitlines()[-1])
    assert (counts, total) == ([300, 0], 300)
    assert breaches == {"missing": 1, "unowed": 1}
