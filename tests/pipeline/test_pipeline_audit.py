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

from pipeline_bed import TIMEOUT, real_run
from pipeline_inline import CONTEXT
from sbus_spark.breaches import Breach
from sbus_spark.history import Group
from sbus_spark.matching import selections
from sbus_spark.verdict import Audit

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


def audited(path: Path) -> list[Breach]:
    """Return what is wrong with traces, found without Spark."""
    audit = Audit(CONTEXT, [str(path)])
    return [*audit.few, *(audit.many.collect() if audit.many else [])]


def breaches_by_file(rows: list[Breach]) -> dict[str, list[str]]:
    """Return the names of breaches, by the name of the trace."""
    found: dict[str, list[str]] = {}
    for row in rows:
        name = Path(row.file or row.detail.split(" ")[0]).name
        found.setdefault(name.rstrip(":"), []).append(row.breach)
    return {name: sorted(breaches) for name, breaches in found.items()}


class TestAudit:
    """Was each delivery owed, and each owed delivery made?"""

    def test_planted_breaches_are_found_and_nothing_else(
        self, tmp_path: Path
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
        assert breaches_by_file(audited(traces)) == expected

    def test_compressed_and_unfinished_traces(self, tmp_path: Path) -> None:
        """A bus that still runs has not stopped, nor ended its last line."""
        text = "".join(PaperBus(500, 50, 20).run(2_000)).encode()
        unfinished = text[: text.rindex(b"{")] + b'{"n":20'
        zstd = pytest.importorskip("backports.zstd", reason="it is missing")
        for name, content in {
            "a.gz": gzip.compress(text),
            "b.zst": zstd.compress(text),
            "torn": text + b'{"n":20',
        }.items():
            (tmp_path / name).write_bytes(content)
        assert audited(tmp_path) == []
        (tmp_path / "c.gz").write_bytes(gzip.compress(unfinished)[:-9])
        (tmp_path / "unfinished").write_bytes(unfinished)
        found = {
            one.detail.partition(": ")[2][:8] for one in audited(tmp_path)
        }
        assert found == {"no stop "}
        context = Audit(CONTEXT, [str(tmp_path)], is_running=True)
        assert context.few == []

    @pytest.mark.parametrize(
        "line",
        [
            '"ev":"close","c":0',
            '"ev":"msg","c":1,"m":9999,"key":"k","size":-1',
            '"ev":"send","m":1,"c":0',
        ],
    )
    def test_client_0_and_negative_sizes_are_no_events(
        self, line: str, tmp_path: Path
    ) -> None:
        """No server writes them."""
        lines = list(PaperBus(500, 50, 20).run(500))
        lines.insert(-1, f'{{"n":{len(lines)},"t":1,{line}}}\n')
        (tmp_path / "trace").write_text("".join(lines))
        found = audited(tmp_path / "trace")
        assert [one.breach for one in found] == ["bad-trace"]
        assert line in found[0].detail

    def test_matcher_is_that_of_the_server(self) -> None:
        """Patterns that no server stores select nothing."""

        def selects(pattern: str, key: str, own: str) -> bool:
            return selections([Group(pattern, own)], [key], "") == [(0,)]

        assert selects("a/*", "a/\xff", "")
        assert not selects("a/*", "a/\u1234", "")
        assert selects("!/cred////x", "!/cred/1//3/x", "1 2 3")
        assert not selects("!/cred////x", "!/cred/1//4/x", "1 2 3")
        assert not selects("!/cred/7///x", "!/cred/7///x", "1 2 3")
