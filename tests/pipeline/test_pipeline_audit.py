"""Tests of audits of a real trace, with breaches planted into it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pipeline_paper import Event, write_trace
from pipeline_plants import PLANTED

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow  # type: ignore[import-untyped]
from pyspark.sql import Row, SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, real_run

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


ABOUT = {"version": "1", "address": "", "host": "h", "cred_prefix": ""}


def beginning() -> list[Event]:
    """Return the start of a run with two clients, of which one subscribes."""
    events: list[Event] = [{"t": 1, "ev": "start", **ABOUT}]
    for c in (1, 2):
        own = {"gid": 1, "uid": 2, "pid": c}
        events.append({"t": 1, "ev": "open", "c": c, **own})
    return [*events, {"t": 1, "ev": "sub", "c": 1, "pattern": ""}]


def ending() -> list[Event]:
    """Return the end of that run."""
    closes = [{"t": 1, "ev": "close", "c": c} for c in (1, 2)]
    return [*closes, {"t": 1, "ev": "stop", **ABOUT}]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines of a trace of a real bus."""
    folder = tmp_path_factory.mktemp("real")
    real_run(folder, 500)
    return (folder / "trace").read_text().splitlines(keepends=True)


def breaches_in(spark: SparkSession, path: Path) -> list[Row]:
    """Return what is wrong with traces."""
    found = sbus_spark.audit(spark, [str(path)])
    return found.filter("breach <> 'undecided'").collect()


def breaches_by_file(rows: list[Row]) -> dict[str, list[str]]:
    """Return the names of breaches, by the name of the trace."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(Path(row.file).name, []).append(row.breach)
    return {name: sorted(breaches) for name, breaches in found.items()}


# ---- Was each delivery owed, and each owed delivery made?


def test_planted_breaches_are_found_and_nothing_else(
    spark: SparkSession, trace: list[str], tmp_path: Path
) -> None:
    """Each in a trace of its own; a trace without is in order."""
    expected = {}
    for plant, breach in PLANTED.items():
        events = list(map(json.loads, trace))
        plant(events)
        write_trace(tmp_path / plant.__name__, events)
        expected[plant.__name__] = breach.split()
    for name, lines in {
        "torn": [*trace[:300], '{"n":30\n', *trace[300:]],
        "killed": trace[:-1],
        "headless": trace[1:],
    }.items():
        (tmp_path / name).write_text("".join(lines))
        expected[name] = ["bad-trace"]
    (tmp_path / "gap").write_text("".join([*trace[:-2], trace[-1]]))
    expected["gap"] = ["bad-trace", "bad-trace"]  # a number, and a close
    (tmp_path / "twice").write_text("".join(trace + trace))
    assert breaches_by_file(breaches_in(spark, tmp_path)) == expected


def test_compressed_and_unfinished_traces(
    spark: SparkSession, trace: list[str], tmp_path: Path
) -> None:
    """A bus that still runs has not stopped, nor ended its last line."""
    text = "".join(trace).encode()
    end = text.index(b"\n", text.rindex(b'"ev":"msg"'))
    unfinished = text[:end] + b'\n{"n":20'
    for name, content in {
        "a.gz": gzip.compress(text),
        "b.zst": pyarrow.compress(text, "zstd", asbytes=True),
        "torn": text + b'{"n":20',
    }.items():
        (tmp_path / name).write_bytes(content)
    assert breaches_in(spark, tmp_path) == []
    (tmp_path / "unfinished").write_bytes(unfinished)
    (found,) = breaches_in(spark, tmp_path)
    assert found.breach == "bad-trace" and "no stop" in found.detail
    running = sbus_spark.audit(spark, [str(tmp_path)], is_running=True)
    assert set(sbus_spark.summary(running)) == {"undecided"}


def test_a_trace_in_several_files(
    spark: SparkSession, trace: list[str], tmp_path: Path
) -> None:
    """A file without a start goes on where exactly one other ends."""
    for name, part in {
        "c": trace[:1_000],
        "b": trace[1_000:2_000],
        "a": trace[2_000:],
    }.items():
        (tmp_path / name).write_text("".join(part))
    assert breaches_in(spark, tmp_path) == []
    (tmp_path / "b").unlink()
    found = {row.breach for row in breaches_in(spark, tmp_path)}
    assert found == {"bad-trace"}


def test_an_order_exempts_only_while_it_is_in_force(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What is sent before and after it is to be in order."""
    events, m = beginning(), 0
    for order in ("queue", "stack", "queue"):
        key = f"order/{order}"
        events.append({"t": 1, "ev": "ctl", "c": 1, "key": key})
        m += 2
        for one in (m - 1, m):
            more = {"m": one, "key": "k", "size": 0}
            events.append({"t": 1, "ev": "msg", "c": 2, **more})
        for one in (m, m - 1):
            events.append({"t": 1, "ev": "send", "m": one, "c": 1})
    write_trace(tmp_path / "t", [*events, *ending()])
    found = breaches_in(spark, tmp_path / "t")
    assert sorted((row.breach, row.m) for row in found) == [
        ("out-of-order", 1),
        ("out-of-order", 5),
    ]


def test_what_was_never_sent_is_missing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """[TRACE-7] But while its client is there, a later event may tell."""
    events = beginning()
    for m in range(1, 1_001):
        more = {"m": m, "key": "k", "size": 0}
        events.append({"t": 1, "ev": "msg", "c": 2, **more})
    close, other, stop = ending()
    for name, last in {
        "left": [close, other, stop],
        "left, killed": [close, other],
        "there": [other, stop],
        "there, killed": [other],
        "later": [{"t": 1, "ev": "send", "m": 1_000, "c": 1}],
    }.items():
        write_trace(tmp_path / name, [*events, *last])
    for is_running in (False, True):
        rows = sbus_spark.audit(spark, [str(tmp_path)], is_running)
        found: dict[str, dict[str, int]] = {}
        for row in rows.collect():
            counts = found.setdefault(Path(row.file).name, {})
            counts.setdefault(row.breach, 0)
            counts[row.breach] += row.messages
        no_stop = {} if is_running else {"bad-trace": 1}
        assert found == {
            "left": {"missing": 1_000},
            "left, killed": {"missing": 1_000, **no_stop},
            "there": {"missing": 1_000, "bad-trace": 1},
            "there, killed": {"undecided": 1_000, **no_stop},
            "later": {"missing": 999, **no_stop},
        }


def test_the_stop_is_in_another_file(
    spark: SparkSession, tmp_path: Path
) -> None:
    """[TRACE-7] And so is the close: what was never sent is missing."""
    more = {"m": 1, "key": "k", "size": 0}
    message = {"t": 1, "ev": "msg", "c": 2, **more}
    write_trace(tmp_path / "t", [*beginning(), message, *ending()])
    lines = (tmp_path / "t").read_text().splitlines(keepends=True)
    (tmp_path / "t").write_text("".join(lines[:5]))
    (tmp_path / "u").write_text("".join(lines[5:]))
    (found,) = breaches_in(spark, tmp_path)
    assert (found.breach, found.m, found.c) == ("missing", 1, 1)


def test_payload_of_a_secret(
    spark: SparkSession, trace: list[str], tmp_path: Path
) -> None:
    """[TRACE-4] A server never writes it."""
    lines = [*trace]
    at = next(
        at
        for at, line in enumerate(lines)
        if '"ev":"msg"' in line and "!/cred/" in line
    )
    lines[at] = lines[at].replace("}", ',"data":"eA=="}')
    (tmp_path / "t").write_text("".join(lines))
    (found,) = breaches_in(spark, tmp_path / "t")
    assert found.breach == "bad-trace" and "secret" in found.detail
