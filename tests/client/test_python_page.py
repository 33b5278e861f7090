"""The programs of book/python.md, each as it stands there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from client_ends import serving
from commands import IMPORTING, keeping, subscribed
from processes import ROOT, SECONDS_MAX
from real_bus import RealBus, wait_for
from sbus_client import Client

PAGE = (ROOT / "book/python.md").read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def program(mark: str) -> str:
    """Return the first program of the page that has a text."""
    return next(str(text) for text in PROGRAMS if mark in text)


@contextlib.contextmanager
def running(bus: RealBus, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program beside the client's file."""
    environment = {**IMPORTING, "SBUS_ADDRESS": bus.path}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", text],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints."""
    assert process.stdout
    return process.stdout.readline()


def wait_for_subscriber(client: Client, patterns: int = 1) -> None:
    """Return once another client of the bus has so many patterns."""

    def is_there() -> bool:
        rows = client.stats(SECONDS_MAX)["clients"].values()
        return any(row["patterns"] >= patterns for row in rows)

    wait_for(is_there)


@pytest.mark.parametrize(
    "mark, key, line",
    [
        ("sensors/*/temp", "", "b'sensors/1/temp' b'21.5'"),
        ("isinstance(received, Reconnected)", "sensors/1/set", "set b'sens"),
        ("select.select", "a/b", "Message(key=b'a/b', payload=b'v')"),
        ("blocking/soft/discard", "k", "b'k' 1"),
        ("signal.SIGTERM", "a/b", "b'v'"),
        ("MSG_PEEK", "", "b'MSG a/b\\x00x'"),
        ("HANDLERS", "alarms/1", "alarm b'v'"),
        ('"have come"', "", "1000 have come"),
        ("due +=", "", "a minute is over"),
    ],
)
def test_program_prints(bus: RealBus, mark: str, key: str, line: str) -> None:
    """A program that only listens prints what was published."""
    with running(bus, program(mark)) as process, Client(bus.path) as client:
        if key:
            wait_for_subscriber(client, 2 if mark == "HANDLERS" else 1)
            client.publish(key, b"v")
        assert next_line(process).startswith(line)
        if 'print("missed"' in program(mark):
            assert next_line(process) == "missed 0\n"
        if "SIGTERM" in program(mark):
            process.terminate()
            assert process.wait(SECONDS_MAX) == 0


def test_request_and_reply(bus: RealBus) -> None:
    """One program asks, and the other answers."""
    with running(bus, program("half past nine")), Client(bus.path) as client:
        wait_for_subscriber(client)
        with running(bus, program("bus.request(")) as asking:
            assert next_line(asking) == "b'half past nine to Ann'\n"


def test_workers(bus: RealBus) -> None:
    """Four tasks share a client."""
    with running(bus, program("worker")), Client(bus.path) as client:
        wait_for_subscriber(client)
        assert client.request("jobs/1", b"abc", SECONDS_MAX) == b"ABC"


def test_proof_of_identity(bus: RealBus) -> None:
    """The program for proofs serves its own user, and nobody that lies."""
    names: dict[str, Any] = {}
    exec(program("def serve"), names)
    server = program("def serve") + "\nwith Client() as bus:\n"
    server += "    bus.subscribe('s')\n    serve(bus, os.getuid())\n"
    with running(bus, server), Client(bus.path) as client:
        wait_for_subscriber(client)
        done = names["ask"](client, "s", os.getuid(), b"x")
        assert done == b"done: x"
        with Client(bus.path) as liar:
            victim = client.whoami(SECONDS_MAX).path + b"/k"
            client.subscribe(victim)
            client.sync(SECONDS_MAX)
            liar.publish("s", victim + b"\0x")  # the answer is for the victim
            assert b"done" not in client.receive(SECONDS_MAX).payload


ANSWERS = " ".join(str(b"%d" % number * 2) for number in range(8))


@pytest.mark.parametrize(
    "mark, line",
    [
        ("threads.map", ANSWERS),
        ("pool.map", ANSWERS),
        ("services/health", "2 answers: b'' b''"),
    ],
)
def test_many_answers(bus: RealBus, mark: str, line: str) -> None:
    """Threads share a client; processes have one each.  In a survey, all
    services answer.
    """
    with (
        serving(bus, "services/*", 2),
        serving(bus, "services/", 2),
        running(bus, program(mark)) as process,
    ):
        assert next_line(process) == f"{line}\n"


@pytest.mark.parametrize(
    "mark, packet",
    [
        ("BusHandler", b"MSG log/warning/pump\0too hot: 95 degrees"),
        ("ended/pump", b"MSG ended/pump\0000"),
    ],
)
def test_program_publishes(bus: RealBus, mark: str, packet: bytes) -> None:
    """A program that only publishes."""
    with subscribed(bus) as peer, running(bus, program(mark)):
        assert peer.receive() == packet


def test_last_values(bus: RealBus) -> None:
    """The values of a keeper come first."""
    with keeping(bus, "state/"), Client(bus.path) as client:
        client.publish("state/1", b"on")
        client.sync(SECONDS_MAX)
        with running(bus, program("keep/last")) as process:
            assert next_line(process) == "b'state/1' b'on'\n"
            client.publish("state/1", b"off")
            assert next_line(process) == "b'state/1' b'off'\n"
