"""Tests of audits: what is planted into traces is found, and nothing else.

An audit takes seconds, however small a trace is: one is of all traces here.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline_paper import Event, write_trace
from pipeline_plants import PLANTED

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow  # type: ignore[import-untyped]
from pyspark.sql import Row, SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, real_run
from sbus_spark import audits, inputs

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

Breaches = dict[str, int]  # messages, by what is wrong with them

ABOUT = {"version": "1", "address": "", "host": "h", "cred_prefix": ""}
OPENS: list[Event] = [
    {"t": 1, "ev": "open", "c": c, "gid": 1, "uid": 2, "pid": c}
    for c in (1, 2)
]
# A run of two clients, of which the first one subscribes
BEGINNING: list[Event] = [
    {"t": 1, "ev": "start", **ABOUT},
    *OPENS,
    {"t": 1, "ev": "sub", "c": 1, "pattern": ""},
]
CLOSE: Event = {"t": 1, "ev": "close", "c": 1}
OTHER_CLOSE: Event = {"t": 1, "ev": "close", "c": 2}
STOP: Event = {"t": 1, "ev": "stop", **ABOUT}
ENDING = [CLOSE, OTHER_CLOSE, STOP]
# [TRACE-7] What was not sent is missing, but while its client is there, a
# later event may tell: how a trace ends after messages that were not sent
UNSENT: dict[str, tuple[list[Event], Breaches]] = {
    "left": ([CLOSE, OTHER_CLOSE, STOP], {"missing": 1_000}),
    "left-killed": ([CLOSE, OTHER_CLOSE], {"missing": 1_000, "bad-trace": 1}),
    "there": ([OTHER_CLOSE, STOP], {"missing": 1_000, "bad-trace": 1}),
    "there-killed": ([OTHER_CLOSE], {"undecided": 1_000, "bad-trace": 1}),
    "later": (
        [{"t": 1, "ev": "send", "m": 1_000, "c": 1}],
        {"missing": 999, "bad-trace": 1},
    ),
}


def message(m: int) -> Event:
    """Return a message of the second client, which the first is to get."""
    return {"t": 1, "ev": "msg", "c": 2, "m": m, "key": "k", "size": 0}


def write_planted(folder: Path, trace: Sequence[str]) -> dict[str, Breaches]:
    """Write traces with a breach each; return what is to be found."""
    expected = {}
    for plant, breach in PLANTED.items():
        events = list(map(json.loads, trace))
        plant(events)
        write_trace(folder / plant.__name__, events)
        expected[plant.__name__] = dict(Counter(breach.split()))
    return expected


def write_cut(folder: Path, trace: Sequence[str]) -> dict[str, Breaches]:
    """Write traces that begin, end or go on elsewhere; return what is wrong.

    A file without a start goes on where exactly one other ends.
    """
    text = "".join(trace).encode()
    end = text.index(b"\n", text.rindex(b'"ev":"msg"'))
    for name, lines in {
        "part-3": trace[:1_000],
        "part-2": trace[1_000:2_000],
        "part-1": trace[2_000:],
        "twice": [*trace, *trace],
        "torn-line": [*trace[:300], '{"n":30\n', *trace[300:]],
        "killed": trace[:-1],
        "headless": trace[1:],
        "gap": [*trace[:-2], trace[-1]],  # a number, and a close
        "before-a-gap": trace[:900],
        "after-a-gap": trace[1_900:],
    }.items():
        (folder / name).write_text("".join(lines))
    for name, content in {
        "whole.gz": gzip.compress(text),
        "whole.zst": pyarrow.compress(text, "zstd", asbytes=True),
        "torn": text + b'{"n":20',
        "unfinished": text[:end] + b'\n{"n":20',
    }.items():
        (folder / name).write_bytes(content)
    names = "torn-line killed headless before-a-gap after-a-gap unfinished"
    return {
        **{name: {"bad-trace": 1} for name in names.split()},
        "gap": {"bad-trace": 2},
    }


def write_on_paper(folder: Path, trace: Sequence[str]) -> dict[str, Breaches]:
    """Write traces that no server has written; return what is wrong."""
    messages = [message(m) for m in range(1, 1_001)]
    for name, (ending, _) in UNSENT.items():
        write_trace(folder / name, [*BEGINNING, *messages, *ending])

    # What is sent before and after an order is to be in the usual one
    events = [*BEGINNING]
    for m, order in (2, "queue"), (4, "stack"), (6, "queue"):
        key = f"order/{order}"
        events.append({"t": 1, "ev": "ctl", "c": 1, "key": key})
        events += message(m - 1), message(m)
        for sent in (m, m - 1):
            events.append({"t": 1, "ev": "send", "m": sent, "c": 1})
    write_trace(folder / "orders", [*events, *ENDING])

    # The close and the stop are in another file
    write_trace(folder / "begins", [*BEGINNING, message(1), *ENDING])
    lines = (folder / "begins").read_text().splitlines(keepends=True)
    (folder / "begins").write_text("".join(lines[:5]))
    (folder / "ends").write_text("".join(lines[5:]))

    # [TRACE-4] A server never writes the payload of a secret
    secret = next(
        line for line in trace if '"ev":"msg"' in line and "!/cred/" in line
    )
    told = secret.replace("}", ',"data":"eA=="}')
    (folder / "secret").write_text("".join(trace).replace(secret, told))
    return {
        **{name: breaches for name, (_, breaches) in UNSENT.items()},
        "orders": {"out-of-order": 2},
        "begins": {"missing": 1},
        "secret": {"bad-trace": 1},
    }


class Audited:
    """Traces, what is to be found in them, and what one audit found."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.folder = folder / "traces"
        self.folder.mkdir()
        real_run(folder, 500)
        trace = (folder / "trace").read_text().splitlines(keepends=True)
        self.expected: dict[str, Breaches] = {}
        for write in write_planted, write_cut, write_on_paper:
            self.expected |= write(self.folder, trace)
        self.rows = sbus_spark.audit(spark, [str(self.folder)]).collect()

    def rows_of(self, name: str) -> list[Row]:
        """Return what was found in a trace."""
        return [row for row in self.rows if Path(row.file).name == name]


@pytest.fixture(scope="module")
def audited(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Audited:
    return Audited(spark, tmp_path_factory.mktemp("audit"))


def counted(rows: Sequence[Row]) -> dict[str, Breaches]:
    """Return how many messages each breach has, by the name of the trace."""
    found: dict[str, Breaches] = {}
    for row in rows:
        counts = found.setdefault(Path(row.file).name, {})
        counts[row.breach] = counts.get(row.breach, 0) + row.messages
    return found


def test_what_is_planted_is_found_and_nothing_else(audited: Audited) -> None:
    """Each breach in a trace of its own; the others are in order.

    A real trace may have messages of which nobody can know.
    """
    breaches = counted(audited.rows)
    for name in breaches.keys() - UNSENT.keys():
        breaches[name].pop("undecided", None)
    breaches = {name: counts for name, counts in breaches.items() if counts}
    assert breaches == audited.expected


def test_a_row_names_what_is_wrong(audited: Audited) -> None:
    """The message, its clients, and a reason."""
    (row,) = audited.rows_of("begins")
    assert (row.breach, row.m, row.c) == ("missing", 1, 1)
    (row,) = audited.rows_of("secret")
    assert "secret" in row.detail
    unfinished = audited.rows_of("unfinished")
    (row,) = (x for x in unfinished if x.breach == "bad-trace")
    assert "no stop" in row.detail
    assert sorted(x.m for x in audited.rows_of("orders")) == [1, 5]


def test_what_is_chosen(spark: SparkSession, audited: Audited) -> None:
    """Breaches of another time or key are left out; others may have none."""
    rows = spark.createDataFrame(audited.rows_of("begins"), audits.ROWS)
    then = inputs.moment_of(1)
    for selection, count in (
        (sbus_spark.Selection(patterns=("k",)), 1),
        (sbus_spark.Selection(patterns=("other",)), 0),
        (sbus_spark.Selection(until=then), 1),
        (sbus_spark.Selection(since=then), 0),
    ):
        assert audits.chosen(rows, selection).count() == count


def test_a_bus_that_still_runs(spark: SparkSession, audited: Audited) -> None:
    """It has not stopped, nor ended its last line."""
    names = [*UNSENT, "unfinished"]
    paths = [str(audited.folder / name) for name in names]
    rows = sbus_spark.audit(spark, paths, is_running=True).collect()
    breaches = counted(rows)
    assert set(breaches.pop("unfinished")) == {"undecided"}
    expected = {name: {**UNSENT[name][1]} for name in UNSENT}
    for name in UNSENT:
        if name != "there":  # a client that is not closed before the stop
            expected[name].pop("bad-trace", None)
    assert breaches == expected
