"""Tests of the benchmarks: that they measure, and say when they cannot.

What they measure is no matter of tests.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from processes import ROOT, Result

ENDS = f"{sys.executable} -c exit(3) {{address}}"
OWN = f"{sys.executable} {ROOT}/sbus.py -a {{address}}"


def bench(program: str, *arguments: str, change: str = "") -> Result:
    """Run a benchmark to its end; *change* is done before."""
    words = ["-m", f"bench.{program}"]
    if change:
        code = f"from bench import harness, {program}; {change}\n"
        words = ["-c", f"{code}harness.run({program}.main)"]
    done = subprocess.run(
        [sys.executable, *words, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def speed(*arguments: str) -> Result:
    """Run the benchmark of the server once, for a short time."""
    return bench("speed", "--rounds", "1", "--seconds", "0.1", *arguments)


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    assert (result.status, result.errors) == (0, "")
    lines = result.output.splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def test_server_beside_the_relay() -> None:
    """The second row has the ratio to the first."""
    server, relay = rows(speed("--only", "pipe-4k"))
    assert (server[2], relay[2]) == ("sbus.py", "relay")
    assert relay[3].endswith(")") and not server[3].endswith(")")


def test_server_beside_another() -> None:
    """A case with an addition is compared with the other server."""
    result = speed("--only", "latency,churn", "--beside", OWN)
    sides = [(name, side) for name, _, side, *_ in rows(result)]
    both = ("sbus.py", "other")
    names = ("latency", "churn")
    assert sides == [(name, side) for name in names for side in both]


def test_server_with_an_option() -> None:
    """It is compared with itself without the option."""
    server, without = rows(speed("--only", "trace"))
    assert (server[2], without[2]) == ("sbus.py", "itself without")


@pytest.mark.parametrize("program", ["link", "queue"])
def test_services_beside_what_is_installed(program: str) -> None:
    """Each peer that is missing is named once, and left out."""
    few = f"{program}.CASES['4k'] = 4_096, 1_280"
    result = bench(program, "--rounds", "1", "--only", "4k", change=few)
    notes = result.errors.splitlines()
    assert all(note.startswith("left out: install ") for note in notes)
    assert len(notes) == len({*notes})
    service, *peers = rows(result._replace(errors=""))
    assert service[2].startswith(("link", "sbus queue"))
    assert all(row[3].endswith(")") for row in peers)


def test_client_library() -> None:
    """Each case is compared with a bare loop."""
    table = rows(bench("client", "--rounds", "1"))
    assert {row[2] for row in table} == {"library", "bare loop"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as others")
@pytest.mark.parametrize("storm", ["mistakes", "slow-news"])
def test_attack(storm: str) -> None:
    """A row has what two other users see of a storm."""
    (row,) = rows(bench("attack", "--only", storm, "--seconds", "1"))
    milliseconds = [float(cell.replace(",", "")) for cell in row[3:9]]
    assert row[0] == storm and all(milliseconds)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "nothing"], "no case 'nothing'"),
        (["--rounds", "0"], "'0' is not 1 or more"),
        (["--seconds", "inf"], "'inf' is not 0.01 or more"),
        (["--beside", "sbusd"], "has no {address}"),
        (["--beside", "/no/such {address}"], "cannot run /no/such"),
        (["--beside", ENDS], "the server ended with status 3"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    """One line, and status 2."""
    result = speed(*arguments)
    assert (result.status, result.output) == (2, "")
    assert message in result.errors and result.errors.count("\n") == 1


def test_server_that_loses_messages() -> None:
    """The case is named, and the others go on."""
    other = f"{OWN} --max-packet 100000"
    result = speed("--only", "pipe-400k,pipe-64", "--beside", other)
    assert (result.status, result.errors.count("\n")) == (1, 1)
    assert result.errors.startswith("pipe-400k: the load ended")
    assert "| pipe-64 |" in result.output
