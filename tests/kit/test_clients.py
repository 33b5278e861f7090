"""Tests of the kit's examples for clients: of ours, and of broken ones."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import broken_clients
import sbus_client
from broken_clients import BROKEN, BrokenClient
from conformance import clients
from conformance.clients import (
    ClientCase,
    ClientKit,
    all_client_cases,
    client_case,
)
from conformance.conversation import Failure
from conformance.examples import Block
from examples_of_spec import CASES
from processes import ROOT, SECONDS_MAX, run_kit

CASES_OF_CLIENTS = all_client_cases()
OURS = f"{sys.executable} {ROOT / 'tests/kit/client_adapter.py'} {{address}}"
FILE = broken_clients.__file__
BROKEN_COMMAND = f"env PYTHONPATH={ROOT} {sys.executable} {FILE}"


def patient(command: str = OURS) -> Iterator[ClientKit]:
    """Return a kit that waits longer each time, should a machine be slow."""
    for seconds in (0.5, 4.0, 30.0):
        kit = ClientKit(command, seconds)
        kit.idle_seconds = seconds / 10
        yield kit


def case_of(name: str) -> ClientCase:
    """Return the case of an example."""
    (case,) = (case for case in CASES_OF_CLIENTS if case.name == name)
    return case


def adapter(directory: Path, statement: str) -> str:
    """Return the command of an adapter that does something else."""
    path = directory / "adapter.py"
    start = "import os, socket, sys, time\n"
    connect = "wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    connect += "wire.connect(sys.argv[1])\n"
    path.write_text(f"{start}{connect}{statement}\n", "utf-8")
    return f"{sys.executable} {path} {{address}}"


@pytest.mark.parametrize("case", CASES_OF_CLIENTS, ids=lambda case: case.name)
def test_our_client(case: ClientCase) -> None:
    """[CLIENT-1] [CLIENT-2] [CLIENT-3] [CLIENT-5] [CLIENT-6] [CLIENT-8]
    [ADDR-1] [CRED-12] [REQUEST-1] [REQUEST-2] [REQUEST-3] It does all that
    the examples ask for.
    """
    result = ClientKit(OURS, SECONDS_MAX).judge(case)
    if result.verdict == "not applicable":
        pytest.skip(result.what)
    assert result.verdict == "passed", result


def test_every_example_is_broken() -> None:
    """By one client or several, each with its own name and place."""
    assert len({client.name for client in BROKEN}) == len(BROKEN)
    names = {case.name for case in CASES_OF_CLIENTS}
    assert {client.example for client in BROKEN} == names
    assert not names & {case.name for case in CASES}
    for client in BROKEN:  # a place that is not there breaks all examples
        assert operator.attrgetter(client.place)(sbus_client)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda client: client.name)
def test_the_kit_finds_it(broken: BrokenClient) -> None:
    """The example that shows the mistake fails."""
    command = f"{BROKEN_COMMAND} {broken.name} {{address}}"
    verdicts = (
        kit.judge(case_of(broken.example)).verdict for kit in patient(command)
    )
    assert "failed" in verdicts


def test_list() -> None:
    """It has the examples for clients, and nothing is run."""
    done = run_kit("--list", "--client", "no {address}", "--only", "9")
    assert done.status == 0, done
    assert "longest-path [ADDR-1]\n" in done.output
    assert "CLIENT-" not in done.output and "RUN-" not in done.output


def test_a_failure_is_told(directory: Path) -> None:
    """[CLIENT-6] With the rule, what was said, and what went wrong."""
    command = adapter(directory, ADAPTER)
    done = run_kit(
        "--client", command, "--only", "reset-before-the-last-messages"
    )
    assert done.status == 1
    assert "FAILED [CLIENT-6] A client MUST read until" in done.output
    assert "  reset-before-the-last-messages [CLIENT-6]" in done.output
    assert "    < MSG k\\01\n" in done.output
    answer = "    -> the client answered receive with error reset\n"
    assert answer in done.output, done


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("sys.exit('no')", "ended with status 1: no"),
        ("os.kill(os.getpid(), 9)", "was killed: Killed"),
        ("os.close(1); time.sleep(99)", "has closed its standard output"),
        ("print('fine', flush=True)", "answered fine, not an answer"),
        ("print('ok ok', flush=True)", "answered ok ok, not an answer"),
        ("print('message x y')", "answered message x y, not an"),
        ("while True: print('', end='x' * 9999)", "never stops answering"),
    ],
)
def test_an_adapter_that_is_wrong(
    directory: Path, statement: str, message: str
) -> None:
    """It is said in one line, with the status 2."""
    command = adapter(directory, statement)
    done = run_kit("--client", command, "--seconds", "30")
    assert (done.status, done.output) == (2, "")
    assert message in done.errors, done
    assert done.errors.startswith("conformance: the client ")
    assert done.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no >&2; exit 3", "ended with status 3: no"),
        ("sleep 99", "does not connect in time"),
    ],
)
def test_a_client_that_does_not_connect(
    monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """Nobody waits for one that has ended, nor for ever."""
    monkeypatch.setattr(clients, "START_SECONDS_MAX", 3.0)
    with pytest.raises(Failure, match=reason):
        ClientKit(f"sh -c '{script}' {{address}}", 0.5).probe()


def test_what_an_adapter_does_not_have(directory: Path) -> None:
    """Requests are a convention of clients, which one may lack."""
    statement = "sys.stdin.readline(); print('unknown', flush=True)"
    command = adapter(directory, f"{statement}; sys.stdin.read()")
    for name in ("request-and-answer", "request-that-fails"):
        for kit in patient(command):
            result = kit.judge(case_of(name))
            if result.verdict == "not applicable":
                break
        assert result.what == "the client has no request", result


def test_a_machine_without_user_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No client is blamed for what the kit may not do."""
    monkeypatch.setitem(clients.USERS, "root", "false ")
    kit = ClientKit(OURS, SECONDS_MAX)
    result = kit.judge(case_of("address-of-root"))
    assert result.verdict == "not applicable"
    assert "unshare" in result.what


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("subscribe k; > SUB k", ""),
        ("subscribe k; > SUB x", "the client sent SUB k"),
        ("subscribe k; > end", "the client sent SUB k"),
        ("subscribe k", "the client also sent SUB k"),
        ("subscribe k; > SUB k; > SUB k", "the client sent nothing"),
        ("close; > SUB k", "the client sent the end"),
        ("subscribe k; = closed; > SUB k", "the client answered"),
        ("subscribe k; > SUB k; < end; publish k x", "the client answe"),
        ("whoami; > CMSG !/cred/whoami; = nothing", ""),
        ("subscribe k; = nothing; > SUB k; = nothing", ""),
        ("whoami; subscribe k; > SUB k; < end; = closed", "the client"),
        ("receive; = message k x", "the client does not answer receive"),
        ("subscribe k; > SUB k; < MSG k\\0x; receive; = message k x", ""),
        ("subscribe k; > SUB k; < MSG k\\0x; receive; = error", "the cl"),
    ],
)
def test_examples_are_complete_and_exact(lines: str, wrong: str) -> None:
    """What is sent or answered, and not as said, is a failure."""
    spoken = tuple(lines.split("; "))
    block = Block("client", "x", ("CLIENT-1",), spoken, "x.md")
    for kit in patient():
        result = kit.judge(client_case(block))
        if result.what.startswith(wrong) and bool(wrong or not result[3]):
            break
    assert result.what.startswith(wrong), result
    assert bool(wrong) == (result.verdict == "failed"), result


@pytest.mark.parametrize(
    "line",
    ["subscribe", "publish k", "close k", "> ", "<", "= fine", "= ok ok"]
    + ["server nowhere", "A > SUB k", "subscribe {any}"],
)
def test_step_that_is_none(line: str) -> None:
    """A slip in an example is not passed over."""
    block = Block("client", "x", ("CLIENT-1",), (line, "close"), "x.md")
    with pytest.raises((ValueError, AssertionError)):
        client_case(block)


# An adapter that takes a reset for an error; the connection is *wire*
ADAPTER = """
for line in sys.stdin:
    try:
        if line.startswith("receive"):
            print("closed" if not wire.recv(1 << 20) else "message 6b 31")
        else:
            wire.send(b"SUB k" if line.startswith("sub") else b"MSG k\\0x")
            print("ok")
    except ConnectionResetError:
        print("error reset")
    sys.stdout.flush()
"""
