"""Ingests without Spark: its tasks are done here.  It is a program as well.

python3 pipeline_without_spark.py CAPTURE TABLE [--clean]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import sbus_spark
from sbus_spark import intake

Work = Callable[[Any], Any]
NO_SESSION: Any = None


def do_here(work: Work, count: int) -> Sequence[Any]:
    """Do the tasks of an ingest; return what they yield."""
    numbers = pa.record_batch([pa.array(range(count), pa.int64())], ["id"])
    rows = [row for x in work(iter([numbers])) for row in x.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


def kill_an_ingest(
    capture: Path, table: Path, is_cleaning: bool, chosen: random.Random
) -> bool:
    """Start an ingest, and kill it at some moment; return whether it lived.

    Most moments are soon after it has changed something in the table.
    """
    words = [sys.executable, __file__, capture, table]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [*map(str, words), *["--clean"] * is_cleaning],
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        before = names_in(table)
        end = time.monotonic() + chosen.uniform(0.5, 5)
        while process.poll() is None and time.monotonic() < end:
            if names_in(table) != before and chosen.random() < 0.9:
                break
            time.sleep(0.002)
        time.sleep(chosen.choice([0, 0, 0.003, 0.01, 0.03, 0.06]))
        is_alive = process.poll() is None
        if is_alive:
            process.send_signal(signal.SIGKILL)
    return is_alive


def names_in(folder: Path) -> set[str]:
    """Return all names below a folder."""
    return {name for _, *names in os.walk(folder) for x in names for name in x}


if __name__ == "__main__":
    intake.do_tasks = lambda _, *task: do_here(*task)
    is_cleaning = "--clean" in sys.argv
    sbus_spark.ingest(NO_SESSION, *sys.argv[1:3], is_cleaning)
