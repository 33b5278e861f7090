"""Tests of load: it measures what a bus carries."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from commands import sbus
from processes import outcome, started
from real_bus import RealBus, wait_for


class TestLoad:
    """load: publishers and subscribers, and what they find."""

    def figures(self, bus: RealBus, *options: str) -> dict[str, Any]:
        """Return what it prints, and check what is always so."""
        done = sbus(bus.path, "load", "--json", *options)
        assert (done.status, done.errors) == (0, "")
        found: dict[str, Any] = json.loads(done.output)
        latency = found["latency_us"]
        assert list(latency) == ["p50", "p90", "p99", "max"]
        assert list(latency.values()) == sorted(latency.values())
        assert latency["p50"] > 0 and found["lost"] == 0
        assert found["sent_per_second"] > 0 < found["received_per_second"]
        return found

    @pytest.mark.parametrize("publishers, subscribers", [(1, 1), (3, 2)])
    def test_count(
        self, bus: RealBus, publishers: int, subscribers: int
    ) -> None:
        """Each subscriber gets every message, of the size that is wanted."""
        team = [f"--publishers={publishers}", f"--subscribers={subscribers}"]
        options = ["--count=1000", "--size=100", "--key=a/\udcff"]
        found = self.figures(bus, *team, *options)
        assert (found["sent"], found["received"]) == (1000, 1000 * subscribers)
        trace = (bus.log_path.parent / "trace").read_text()
        events = [json.loads(line) for line in trace.splitlines()]
        messages = [event for event in events if event["ev"] == "msg"]
        assert {event["size"] for event in messages} == {100, 16}
        keys = {event["key"].rpartition("/")[0] for event in messages}
        assert len(keys) == 1 and re.fullmatch("a/\xff/[0-9a-f]+", keys.pop())
        clients = {event["c"] for event in messages if event["size"] == 100}
        assert len(clients) == publishers
        first = next(e for e in events if e["ev"] == "msg")["n"]
        subscribed = [e["n"] for e in events if e["ev"] == "sub"]
        assert len(subscribed) == subscribers and max(subscribed) < first

    def test_rate(self, bus: RealBus) -> None:
        """Publishers together do not publish faster than that."""
        options = ["--publishers=2", "--rate=400", "--seconds=0.5"]
        found = self.figures(bus, *options)
        assert 0 < found["sent"] <= 201 and found["seconds"] >= 0.5

    def test_table(self, bus: RealBus) -> None:
        """Without --json there are four lines."""
        done = sbus(bus.path, "load", "--count=1000", "--subscribers=2")
        rate = r" +1,000  +[0-9,]+ a second\n"
        times = ", ".join(rf"{p} \d+\.\d+ ms" for p in ("p50", "p90", "p99"))
        assert done.status == 0 and re.fullmatch(
            f"sent{rate}received{rate.replace('1,', '2,')}lost +0\n"
            rf"latency +{times}, max \d+\.\d+ ms\n",
            done.output,
        )

    @pytest.mark.parametrize(
        "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    )
    def test_signal(self, bus: RealBus, number: int, status: int) -> None:
        """It ends all processes, without a word."""
        options = ("--rate=100", "--seconds=1000")
        with started(
            bus.path, "load", *options, start_new_session=True
        ) as command:
            self.wait_for_message(bus)
            os.killpg(command.pid, number)
            assert outcome(command) == (status, "", "")

    def wait_for_message(self, bus: RealBus) -> None:
        """Return once something was published."""
        trace = bus.log_path.parent / "trace"
        wait_for(lambda: '"ev":"msg"' in trace.read_text())

    def test_bus_that_ends(self, bus: RealBus) -> None:
        """One line, and no process stays."""
        options = ("--publishers=2", "--subscribers=2", "--rate=100")
        with started(bus.path, "load", *options, "--count=100000") as command:
            self.wait_for_message(bus)
            bus.stop()
            done = outcome(command)  # at the end of what all have for errors
        assert (done.status, done.output) == (1, "")
        # On a busy machine a process may not have connected yet
        what = "sbus: (.* closed the connection|no bus at .*): .*\n"
        assert re.fullmatch(what, done.errors)

    def test_process_that_fails(self, bus: RealBus) -> None:
        """What it says is the line; the others end."""
        done = sbus(bus.path, "load", "--size=1000000")
        what = "sbus: a packet of 10[0-9]+ bytes is above the limit .*\n"
        assert (done.status, done.output) == (1, "")
        assert re.fullmatch(what, done.errors)
