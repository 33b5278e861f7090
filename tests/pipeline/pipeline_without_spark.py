"""Ingests without Spark: its tasks are done here.  It is a program as well.

python3 pipeline_without_spark.py CAPTURE TABLE
"""

from __future__ import annotations

import contextlib
import io
import json
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
from deltalake import DeltaTable

import sbus_spark
from pipeline_paper import capture_line
from sbus_spark import intake

Work = Callable[[Any], Any]
NO_SESSION: Any = None


def do_here(work: Work, count: int) -> Sequence[Any]:
    """Do the tasks of an ingest; return what they yield."""
    numbers = pa.record_batch([pa.array(range(count), pa.int64())], ["id"])
    rows = [row for x in work(iter([numbers])) for row in x.to_pylist()]
    return [types.SimpleNamespace(**row) for row in rows]


class Bed:
    """A capture and its table."""

    def __init__(self, folder: Path) -> None:
        self.capture, self.table = folder / "capture", folder / "table"
        self.capture.mkdir()
        self.remarks: list[str] = []  # of the last ingest

    def write(self, name: str, *lines: str | bytes) -> Path:
        """Write a segment, which nobody seems to write any more."""
        path = self.capture / name
        path.parent.mkdir(exist_ok=True)
        parts = (x.encode() if isinstance(x, str) else x for x in lines)
        path.write_bytes(b"".join(parts))
        os.utime(path, (0, 0))
        return path

    def add(self, number: int, recorder: str = "h_1_R") -> None:
        """Ingest a segment of ten messages, whose numbers begin with its."""
        numbers = range(10 * number, 10 * number + 10)
        lines = [capture_line(n, rec=recorder) for n in numbers]
        self.write(f"{recorder}-{number:06}.jsonl", *lines)
        assert self.ingest() == 10

    def ingest(self, is_cleaning: bool = False) -> int:
        """Ingest; return how many messages were added."""
        where = str(self.capture), str(self.table)
        batches = [*intake.rounds(NO_SESSION, *where, is_cleaning)]
        self.remarks = batches[-1].remarks
        return sum(batch.messages for batch in batches)

    def opened(self) -> DeltaTable:
        """Return the table."""
        return DeltaTable(str(self.table))

    def run(self, command: str, *words: object) -> tuple[int, str, str]:
        """Run a command on the table; return as command_line does."""
        name, *options = command.split()
        where = (
            [self.capture, self.table] if name == "ingest" else [self.table]
        )
        return command_line(name, *where, *words, *options)

    def show(self, options: str = "") -> list[tuple[str, int]]:
        """Return hosts and numbers of messages, as they are shown."""
        status, output, _ = self.run(f"show --json {options}")
        assert status == 0
        lines = map(json.loads, output.splitlines())
        return [(line["host"], line["n"]) for line in lines]


def command_line(*arguments: object) -> tuple[int, str, str]:
    """Run a command in the session of the tests, if it needs any.

    Return its exit status, its output, and its errors.
    """
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        status = sbus_spark.run(list(map(str, arguments)))
    return status, output.getvalue(), errors.getvalue()


def kill_an_ingest(capture: Path, table: Path, chosen: random.Random) -> bool:
    """Start `ingest --clean`, and kill it; return whether it still ran.

    Most moments are soon after it has changed something in the table.
    """
    words = [sys.executable, __file__, str(capture), str(table)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, env=environment) as process:
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
    sbus_spark.ingest(NO_SESSION, *sys.argv[1:], is_cleaning=True)
