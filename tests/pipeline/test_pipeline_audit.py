"""Tests of audits, by traces on paper and by a second auditor.

An audit takes seconds, however small a trace is: one is of all traces here.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pipeline_oracle
from pipeline_paper import write_trace
from pipeline_random import random_trace, spoil
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, real_run
from pipeline_without_spark import command_line
from sbus_spark import audits, traces

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

# By the end of a trace: what is before it, and the breaches to be found, each
# of them a word
SOFT = "ctl key=blocking/soft/discard"
PAPER = {
    "close, close c=2, stop": {
        "msg, send": "",
        "msg": "missing",
        "msg, msg m=2, send m=2": "missing",
        "msg, send, send c=2": "unowed",
        "msg, send c=2": "missing unowed",
        "msg key=!/cred/9/9/9/x, send": "secret-leak",
        "msg, send, send": "duplicate",
        # Deaf clients hear nothing later; others ask for their drops
        "msg, drop": "",
        f"{SOFT}, msg, drop reason=soft/discard": "",
        "msg, drop reason=soft/discard": "bad-drop",
        "msg, drop reason=lost": "bad-drop",
        "ctl key=blocking/soft/queue, msg, drop reason=soft/queue": "bad-drop",
        f"{SOFT}, msg, send, drop reason=soft/discard": "bad-drop",
        f"{SOFT} c=2, msg, send, drop c=2 reason=soft/discard": "bad-drop",
        "msg, drop, drop": "bad-drop",
        "msg, msg m=2, drop, send m=2": "bad-drop",
        "msg, msg m=2, drop m=2, send": "bad-drop",
        "msg, msg m=2, send m=2, drop": "bad-drop",
        "msg, msg m=2, msg m=3, send, drop m=3, ctl, send m=2": "bad-drop",
        # Messages come in their order, but where another was asked for
        "msg, msg m=2, send m=2, send": "out-of-order",
        "msg, msg m=2, send m=2, ctl, send": "out-of-order",
        "msg, msg m=2, send m=2, ctl key=order/stack, send": "",
        "ctl key=order/stack, msg, msg m=2, send m=2, send, ctl, "
        "msg m=3, msg m=4, send m=4, send m=3": "out-of-order",
        "ctl key=order/random, msg, msg m=2, send m=2, send, ctl, "
        "msg m=3, msg m=4, send m=4, send m=3": "out-of-order",
        # Nothing else comes from a sound server
        "send": "bad-trace",
        "send, msg": "bad-trace",
        "msg, msg, send, send": "bad-trace",
        "ctl n=99": "bad-trace bad-trace",  # two gaps
        "open": "bad-trace",
        "open c=3": "bad-trace",
        "sub c=3, open c=3, close c=3": "bad-trace",
        "open c=3, close c=3, close c=3": "bad-trace",
        "open c=3, close c=3, sub c=3": "bad-trace",
        "open c=3, sub c=3, msg, send, close c=3, drop c=3": "bad-trace",
        "unsub, unsub": "bad-trace",
        "stop": "bad-trace",
        "start": "bad-trace bad-trace",  # no event, and a gap
        "msg key=!/cred/9/9/9/x data=eA==": "bad-trace",  # [TRACE-4]
    },
    # [TRACE-7] What was not sent is missing; but while its client is there, a
    # later event may tell
    "close, close c=2": {"msg, msg m=2": "missing missing bad-trace"},
    "close c=2, stop": {"msg, msg m=2": "missing missing bad-trace"},
    "close c=2": {
        "msg, msg m=2": "undecided undecided bad-trace",
        "msg, msg m=2, send m=2": "missing bad-trace",
        "msg, msg": "bad-trace bad-trace",
    },
}
# Parts of a trace that a sound server has not written; the others are in order
SPOILED = ["torn-line", "killed", "headless", "gap", "unfinished"]
SPOILED += ["before-a-gap", "after-a-gap"]


def write_paper(folder: Path) -> dict[str, str]:
    """Write the traces on paper; return the breaches in each, by its path."""
    folder.mkdir()
    breaches: dict[str, str] = {}
    for ending, cases in PAPER.items():
        for events in cases:
            path = folder / f"{len(breaches):02} {events.replace('/', '|')}"
            write_trace(path, f"{events}, {ending}")
            breaches[str(path)] = cases[events]
    return breaches


def write_cut(folder: Path, trace: Path) -> None:
    """Write parts of a trace, and traces that begin, end or go on elsewhere.

    A file without a start goes on where exactly one other ends.
    """
    folder.mkdir()
    text = trace.read_bytes()
    lines = text.splitlines(keepends=True)
    end = text.index(b"\n", text.rindex(b'"ev":"msg"'))
    for name, parts in {
        "part-3": lines[:300],
        "part-2": lines[300:600],
        "part-1": lines[600:],
        "twice": [text, text],
        "whole.gz": [gzip.compress(text)],
        "whole.zst": [pyarrow.compress(text, "zstd", asbytes=True)],
        "torn": [text, b'{"n":20'],
        "torn-line": [*lines[:90], b'{"n":30\n', *lines[90:]],
        "killed": lines[:-1],
        "unfinished": [text[:end], b'\n{"n":20'],
        "headless": lines[1:],
        "gap": [*lines[:-2], lines[-1]],  # a number, and a close
        "before-a-gap": lines[:270],
        "after-a-gap": lines[500:],
    }.items():
        (folder / name).write_bytes(b"".join(parts))


def write_random(folder: Path) -> None:
    """Write traces at random of the server itself, most of them spoiled."""
    for seed in range(either(400, 40)):
        chosen = random.Random(seed)
        path = folder / ("spoiled" if seed % 4 else "plain")
        path.mkdir(parents=True, exist_ok=True)
        random_trace(path / f"{seed}", chosen)
        if seed % 4:
            spoil(path / f"{seed}", chosen)


class Audited:
    """Traces, and what one audit found in all of them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        real_run(folder, 150)
        self.paper = write_paper(folder / "paper")
        write_cut(folder / "cut", folder / "trace")
        write_random(folder / "random")
        names = "paper/*", "cut/*", "random/*/*"
        self.files = sorted(
            str(x) for name in names for x in folder.glob(name)
        )
        self.rows = sbus_spark.audit(spark, self.files).collect()


@pytest.fixture(scope="module")
def audited(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Audited:
    """Audit all traces, in many blocks, by a few tasks."""
    blocks_in = traces.blocks_in

    def many_blocks_in(paths: Sequence[str]) -> list[traces.Block]:
        blocks = []
        for path in paths:
            size = 99 if "/paper/" in path else 9_999
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(traces, "BLOCK_BYTES", size)
                blocks += blocks_in([path])
        return blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "blocks_in", many_blocks_in)
        patch.setattr(traces, "BLOCK_BYTES", 900_000)
        return Audited(spark, tmp_path_factory.mktemp("audit"))


def breaches_in(folder: str, rows: Iterable[Any]) -> set[tuple[str, str]]:
    """Return the names of traces in a folder, with each kind of breach."""
    paths = [(Path(row.file), row.breach) for row in rows]
    return {(x.name, breach) for x, breach in paths if x.parent.name == folder}


def test_two_auditors_name_the_same(audited: Audited) -> None:
    """In traces with and without breaches."""
    names = "breach", "file", "n", "m", "publisher", "c", "key", "messages"
    breaches = Counter(tuple(row[x] for x in names) for row in audited.rows)
    wanted = Counter(pipeline_oracle.audit(audited.files))
    assert breaches - wanted == wanted - breaches == Counter()


def test_traces_on_paper(audited: Audited) -> None:
    """Each breach is found, and nothing else."""
    by_file: dict[str, list[str]] = {path: [] for path in audited.paper}
    for row in audited.rows:
        if row.file in by_file:
            by_file[row.file] += [row.breach] * row.messages
    for path, breaches in audited.paper.items():
        assert Counter(by_file[path]) == Counter(breaches.split()), path


def test_traces_of_a_sound_server(audited: Audited) -> None:
    """Only a kill, and what it left undecided, is in them."""
    breaches = breaches_in("plain", audited.rows)
    assert {breach for _, breach in breaches} <= {"bad-trace", "undecided"}
    killed = {name for name, breach in breaches if breach == "bad-trace"}
    assert {name for name, _ in breaches} == killed
    cut = {x for x in breaches_in("cut", audited.rows) if x[1] != "undecided"}
    assert cut == {(name, "bad-trace") for name in SPOILED}


def test_the_command(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bus that still runs has not stopped; breaches may be selected."""
    folder, audit = tmp_path / "traces", audits.audit
    folder.mkdir()
    write_trace(folder / "left", "msg, close, close c=2")
    write_trace(folder / "there", "msg, close c=2")
    audit_once = functools.cache(lambda: audit(spark, [str(folder)], True))

    def check_words(_: SparkSession, *words: Any) -> DataFrame:
        assert words == ([str(folder)], True)
        return audit_once()

    monkeypatch.setattr(audits, "audit", check_words)
    command = "audit", folder, "--running"
    status, output, _ = command_line(*command, "--json")
    result = json.loads(output)
    assert status == 1 and result["counts"] == {"missing": 1}
    assert result["undecided"] == len(result["breaches"]) == 1
    status, output, _ = command_line(*command, "--pattern", "k")
    assert status == 1 and output == (
        "missing n=5 m=1 publisher=2 c=1 key='k': expected, and neither sent"
        f" nor dropped before its client closed ({folder}/left)\n"
        "missing: 1; undecided: 1 that were owed, not yet made\n"
    )
    for option in "since 1970-01-02", "until 1970-01-01", "pattern other":
        words = f"--{option}".split()
        status, output, _ = command_line(*command, *words)
        assert status == 0 and output.startswith("every delivery was owed")
