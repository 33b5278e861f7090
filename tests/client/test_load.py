"""Tests of load: it measures what a bus carries."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import sbus
from processes import ENVIRONMENT, outcome, signalled_at, started
from real_bus import RealBus, wait_for

# ---- load: publishers and subscribers, and what they find


def figures(bus: RealBus, *options: str) -> dict[str, Any]:
    """Return what it prints, and check what is always so."""
    done = sbus(bus.path, "load", "--json", *options)
    assert (done.status, done.errors) == (0, "")
    values: dict[str, Any] = json.loads(done.output)
    latency = values["latency_us"]
    assert list(latency) == ["p50", "p90", "p99", "max"]
    assert list(latency.values()) == sorted(latency.values())
    assert latency["p50"] > 0 and values["lost"] == 0
    assert values["sent_per_second"] > 0 < values["received_per_second"]
    return values


@pytest.mark.parametrize("publishers, subscribers", [(1, 1), (3, 2)])
def test_count(bus: RealBus, publishers: int, subscribers: int) -> None:
    """Each subscriber gets every message, of the size that is wanted."""
    team = [f"--publishers={publishers}", f"--subscribers={subscribers}"]
    options = ["--count=1000", "--size=100", "--key=a/\udcff"]
    values = figures(bus, *team, *options)
    assert (values["sent"], values["received"]) == (1000, 1000 * subscribers)
    trace = (bus.log_path.parent / "trace").read_text()
    events = [json.loads(line) for line in trace.splitlines()]
    messages = [event for event in events if event["ev"] == "msg"]
    assert {event["size"] for event in messages} == {100, 16}
    (key,) = {event["key"].rpartition("/")[0] for event in messages}
    assert re.fullmatch("a/\xff/[0-9a-f]+", key)
    clients = {event["c"] for event in messages if event["size"] == 100}
    assert len(clients) == publishers
    patterns = [event["n"] for event in events if event["ev"] == "sub"]
    assert len(patterns) == subscribers
    assert max(patterns) < messages[0]["n"]


def test_rate(bus: RealBus) -> None:
    """Publishers together do not publish faster than that."""
    options = ("--publishers=2", "--rate=400", "--seconds=0.5")
    values = figures(bus, *options)
    assert 0 < values["sent"] <= 201 and values["seconds"] >= 0.5


def test_table(bus: RealBus) -> None:
    """Without --json there are four lines, of which none says that a message
    took no time.
    """
    done = sbus(bus.path, "load", "--count=1000", "--subscribers=2")
    rate = r" +1,000  +[0-9,]+ a second\n"
    times = ", ".join(rf"{p} \d+\.\d+ ms" for p in ("p50", "p90", "p99"))
    form = f"sent{rate}received{rate.replace('1,', '2,')}lost +0\n"
    form += rf"latency +{times}, max \d+\.\d+ ms\n"
    assert done.status == 0 and re.fullmatch(form, done.output)
    assert " 0.000 ms" not in done.output


def wait_for_message(bus: RealBus) -> None:
    """Return once something was published."""
    trace = bus.log_path.parent / "trace"
    wait_for(lambda: '"ev":"msg"' in trace.read_text())


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signal(bus: RealBus, number: int, status: int) -> None:
    """A signal ends all processes of load, without a word."""
    words = ("load", "--rate=100", "--seconds=1000")
    with started(bus.path, *words, start_new_session=True) as command:
        wait_for_message(bus)
        os.killpg(command.pid, number)
        assert outcome(command) == (status, "", "")


def test_signals_while_it_starts(bus: RealBus, directory: Path) -> None:
    """Two of them end all processes as well."""
    path = signalled_at(directory, "os.fork")
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    with started(bus.path, "load", env=environment) as command:
        assert outcome(command) == (130, "", "")


def test_bus_that_ends(bus: RealBus) -> None:
    """One line says that the bus has ended, and no process stays."""
    options = ("--publishers=2", "--subscribers=2", "--rate=100")
    with started(bus.path, "load", *options, "--count=100000") as command:
        wait_for_message(bus)
        bus.stop()
        done = outcome(command)  # at the end of what all have for errors
    assert (done.status, done.output) == (1, "")
    # On a busy machine a process may not have connected yet
    error = "sbus: (.* closed the connection|no bus at .*): .*\n"
    assert re.fullmatch(error, done.errors)


def test_process_that_fails(bus: RealBus) -> None:
    """The error of a process is the line, and the others end."""
    done = sbus(bus.path, "load", "--size=1000000")
    error = "sbus: a packet of 10[0-9]+ bytes is above the limit .*\n"
    assert (done.status, done.output) == (1, "")
    assert re.fullmatch(error, done.errors)
