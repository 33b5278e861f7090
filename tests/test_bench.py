"""Tests of the benchmark: that it measures, and says so when it cannot.

What it measures is no matter of tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from processes import ROOT, Result


def bench(*arguments: str) -> Result:
    """Run the benchmark to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.speed", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return Result(done.returncode, done.stdout, done.stderr)


class TestMeasuring:
    def test_figures_of_a_scenario(self) -> None:
        """Each has its rounds, and what it is compared with."""
        result = bench("--only", "pipe-4k", "--rounds", "2", "--json")
        assert (result.status, result.errors) == (0, "")
        report = json.loads(result.output)
        (figure,) = report["figures"]
        assert report["rounds"] == len(figure["values"]) == 2
        assert min(figure["value"], figure["compared"], figure["busy"]) > 0
        assert figure["against"] == "relay"

    def test_table(self) -> None:
        """It says what was measured, on what, and whether targets are met."""
        result = bench("--only", "memory", "--rounds", "1")
        assert (result.status, result.errors) == (0, "")
        server = f"{sys.executable} {ROOT.resolve()}/sbus.py"
        assert f"server: {server}" in result.output
        lines = result.output.splitlines()
        verdicts = [line.split()[-1] for line in lines if line[:6] == "memory"]
        assert len(verdicts) == 2 and {*verdicts} <= {"ok", "MISSED"}

    def test_client_library(self) -> None:
        """It is compared with bare loops, with a server and without."""
        result = bench("--only", "client", "--rounds", "1", "--json")
        assert (result.status, result.errors) == (0, "")
        figures = json.loads(result.output)["figures"]
        wanted = [figure["wanted"] for figure in figures]
        assert wanted == ["ratio >= 0.8", "ratio >= 0.8", None, None]
        for figure in figures:
            assert figure["against"] == "bare loops"
            assert min(figure["value"], figure["compared"]) > 0

    def test_another_server(self) -> None:
        """Here the relay itself."""
        command = f"{sys.executable} {ROOT}/bench/relay.py {{address}}"
        arguments = ("--only", "pipe-4k", "--rounds", "1")
        result = bench("--server", command, *arguments)
        assert (result.status, result.errors) == (0, "")

    def test_beside_another_server(self) -> None:
        """It is what the figures are compared with, and nothing is wanted."""
        command = f"{sys.executable} {ROOT}/sbus.py -a {{address}}"
        arguments = ("--only", "pipe-4k,memory", "--rounds", "1", "--json")
        result = bench("--beside", command, *arguments)
        assert (result.status, result.errors) == (0, "")
        figures = json.loads(result.output)["figures"]
        assert {figure["against"] for figure in figures} == {"other server"}
        assert {figure["wanted"] for figure in figures} == {None}
        assert min(figure["ratio"] for figure in figures) > 0

    def test_list(self) -> None:
        """Every scenario has a line."""
        lines = bench("--list").output.splitlines()
        names = {line.split()[0] for line in lines}
        assert {"pipe-64", "mesh", "churn", "fairness"} < names


class TestFailing:
    @pytest.mark.parametrize(
        "arguments, what",
        [
            (["--only", "nothing"], "no scenario 'nothing'"),
            (["--rounds", "0"], "'0' is not a number from 1"),
            (["--server", "sbusd"], "has no {address}"),
            (["--beside", "sbusd"], "has no {address}"),
            (
                ["--beside", "sbusd -a {address}", "--only", "mesh,client"],
                "client is not measured beside a server",
            ),
            (["--fast"], "unrecognized arguments: --fast"),
        ],
    )
    def test_wrong_use(self, arguments: list[str], what: str) -> None:
        """One line, and status 2."""
        result = bench(*arguments)
        assert (result.status, result.output) == (2, "")
        assert what in result.errors and result.errors.count("\n") == 1

    @pytest.mark.parametrize(
        "command, what",
        [
            ("/no/such/server {address}", "cannot run /no/such/server"),
            (f"{sys.executable} -c exit(3) {{address}}", "status 3"),
        ],
    )
    def test_server_that_does_not_start(self, command: str, what: str) -> None:
        """One line, and status 1."""
        result = bench("--server", command, "--only", "mesh")
        assert (result.status, result.output) == (1, "")
        assert what in result.errors and result.errors.count("\n") == 1

    def test_server_that_loses_messages(self) -> None:
        """The scenario fails, and is named."""
        command = f"{sys.executable} {ROOT}/sbus.py -a {{address}}"
        command += " --max-packet 100000"
        result = bench("--server", command, "--only", "pipe-400k")
        assert (result.status, result.errors.count("\n")) == (1, 1)
        assert result.errors.startswith("bench.speed: pipe-400k: ")
