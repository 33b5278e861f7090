"""Tests of audits.

Traces are made by the server itself, on a fake kernel that refuses what it is
told to; by a real bus; and by a bus on paper, which writes any number of
events.  Each has breaches planted into it.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path

import pytest

from fake_kernel import FakeKernel, start_journal
from packets import publish
from pipeline_paper import Event, PaperBus, write_trace
from pipeline_plants import PLANTED

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow  # type: ignore[import-untyped]
from pyspark.sql import Row, SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT, real_run

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def kernel_trace(path: Path) -> list[Event]:
    """Return the trace of a server with clients of every kind."""
    kernel = FakeKernel(max_backlog=2_000)
    trace = start_journal(kernel, path)
    controls = {
        "plain": (),
        "secret": (),
        "silent": (b"CMSG echo/off",),
        "soft": (b"CMSG blocking/soft/discard",),
        "hard": (b"CMSG blocking/hard/discard",),
        "stack": (b"CMSG order/stack", b"CMSG blocking/hard/discard"),
        "random": (b"CMSG order/random", b"CMSG blocking/hard/discard"),
        "deaf": (b"CMSG blocking/hard/discard",),
        "leaver": (),
        "publisher": (),
    }
    peers = {name: kernel.connect() for name in controls}
    for name, packets in controls.items():
        peers[name].send(*packets, b"SUB a/*", b"SUB a/*", b"SUB b/")
    peers["secret"].send(b"SUB !/cred////x")
    own = peers["secret"].wire.credentials
    secret = b"!/cred/%d//%d/x" % (own.gid, own.pid)
    chosen = random.Random(1)
    publishers = [peers["publisher"], peers["silent"]]
    keys = (b"a/1", b"a/2", b"b/c/d", b"c", secret)
    for step in range(200):
        if step == 50:
            for name in ("soft", "hard", "stack", "random", "deaf"):
                peers[name].wire.room = 3
        if step == 100:
            peers["deaf"].wire.room = None
            peers["deaf"].wire.deaf = True
            peers["plain"].send(b"UNSUB a/*", b"UNSUB b/")
            peers["silent"].send(b"CMSG echo/on")
        if step == 150:
            peers["plain"].send(b"UNSUB a/*", b"SUB b/")
            peers["leaver"].close()
        key = chosen.choice(keys)
        chosen.choice(publishers).send(publish(key, b"x" * (step % 90)))
        if step % 20 == 0:
            for name in ("soft", "hard", "stack", "random"):
                peers[name].read(min(2, len(peers[name].wire.taken)))
    kernel.server.stopping = True
    kernel.server.clock = time.monotonic  # it waits a second for backlogs
    kernel.server.run()
    trace.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def paper_trace() -> list[Event]:
    """Return a small trace of a bus on paper."""
    return list(map(json.loads, PaperBus(500, 50, 20).run(4_000)))


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


class TestAudit:
    """Was each delivery owed, and each owed delivery made?"""

    def test_planted_breaches_are_found_and_nothing_else(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Each in a trace of its own; a trace without is in order."""
        traces = tmp_path / "traces"
        traces.mkdir()
        sources = {
            "kernel": kernel_trace(tmp_path / "kernel"),
            "paper": paper_trace(),
            "real": real_run(tmp_path, 500),
        }
        kinds = {event.get("reason") for event in sources["kernel"]}
        assert {"soft/discard", "hard/discard", "deaf", "stop"} <= kinds
        expected = {}
        for source, events in sources.items():
            write_trace(traces / source, events)
            for plant, breach in PLANTED.items():
                name = f"{source}-{plant.__name__}"
                planted = [dict(event) for event in events]
                plant(planted)
                write_trace(traces / name, planted)
                expected[name] = breach.split()
        lines = (traces / "paper").read_text().splitlines(keepends=True)
        for name, text in {
            "gap": [*lines[:-2], lines[-1]],
            "torn": [*lines[:300], '{"n":30\n', *lines[300:]],
            "killed": lines[:-1],
            "headless": lines[1:],
        }.items():
            (traces / name).write_text("".join(text))
            expected[name] = ["bad-trace"]
        (traces / "twice").write_text("".join(lines + lines))
        found = breaches_in(spark, traces)
        assert breaches_by_file(found) == expected

    def test_compressed_and_unfinished_traces(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A bus that still runs has not stopped, nor ended its last line."""
        text = "".join(PaperBus(500, 50, 20).run(2_000)).encode()
        unfinished = text[: text.rindex(b"{")] + b'{"n":20'
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
        assert set(sbus_spark.summary(running)) <= {"undecided"}

    def test_a_trace_in_several_files(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A file without a start goes on where exactly one other ends."""
        lines = list(PaperBus(500, 50, 20).run(3_000))
        for name, part in {
            "c": lines[:1_000], "b": lines[1_000:2_000], "a": lines[2_000:]
        }.items():
            (tmp_path / name).write_text("".join(part))
        assert breaches_in(spark, tmp_path) == []
        (tmp_path / "b").unlink()
        found = {row.breach for row in breaches_in(spark, tmp_path)}
        assert found == {"bad-trace"}

    def test_an_order_exempts_only_while_it_is_in_force(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """What is sent before and after it is to be in order."""
        events: list[Event] = [{"t": 1, "ev": "start", **ABOUT}]
        for c in (1, 2):
            own = {"gid": 1, "uid": 2, "pid": c}
            events.append({"t": 1, "ev": "open", "c": c, **own})
        events.append({"t": 1, "ev": "sub", "c": 1, "pattern": ""})
        m = 0
        for order in ("queue", "stack", "queue"):
            key = f"order/{order}"
            events.append({"t": 1, "ev": "ctl", "c": 1, "key": key})
            m += 2
            for one in (m - 1, m):
                more = {"m": one, "key": "k", "size": 0}
                events.append({"t": 1, "ev": "msg", "c": 2, **more})
            for one in (m, m - 1):
                events.append({"t": 1, "ev": "send", "m": one, "c": 1})
        write_trace(tmp_path / "t", [*events, {"t": 1, "ev": "stop", **ABOUT}])
        found = breaches_in(spark, tmp_path / "t")
        assert sorted((row.breach, row.m) for row in found) == [
            ("out-of-order", 1),
            ("out-of-order", 5),
        ]

    def test_what_was_never_sent_is_undecided(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A client that got none of its messages was not served."""
        events = [{"t": 1, "ev": "start", **ABOUT}]
        events += [
            {"t": 1, "ev": "open", "c": c, "gid": 1, "uid": 2, "pid": c}
            for c in (1, 2)
        ]
        events.append({"t": 1, "ev": "sub", "c": 1, "pattern": "k"})
        events += [
            {"t": 1, "ev": "msg", "c": 2, "m": m, "key": "k", "size": 0}
            for m in range(1, 1_001)
        ]
        write_trace(tmp_path / "t", [*events, {"t": 1, "ev": "stop", **ABOUT}])
        found = sbus_spark.audit(spark, [str(tmp_path / "t")])
        assert sbus_spark.summary(found) == {"undecided": 1_000}

    def test_payload_of_a_secret(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """[TRACE-4] A server never writes it."""
        lines = list(PaperBus(500, 50, 20).run(2_000))
        at = next(
            at for at, line in enumerate(lines)
            if '"ev":"msg"' in line and "!/cred/" in line
        )
        lines[at] = lines[at].replace("}", ',"data":"eA=="}')
        (tmp_path / "t").write_text("".join(lines))
        (found,) = breaches_in(spark, tmp_path / "t")
        assert found.breach == "bad-trace" and "secret" in found.detail


ABOUT = {"version": "1", "address": "", "host": "h", "cred_prefix": ""}
