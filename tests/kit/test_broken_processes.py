"""Tests that the checks find what is wrong in servers that run."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

import broken_logs
import broken_processes
import broken_traffic
from broken_servers import Broken
from conformance.checks import CHECKS
from conformance.kit import Kit, Result
from conformance.server import ServerProcess

SECONDS_FOR_A_MISTAKE = 1.0  # what comes later is none of a server's
# One that root has made for itself may be for root only
PYTHONS = [*filter(os.path.exists, (sys.executable, "/usr/bin/python3"))]
TRIALS_MAX = 5  # on a busy machine the kernel may take a packet more or less


def find(broken: Broken, python: str) -> Result:
    """Return what the check that is to find a mistake says of it."""
    check = next(one for one in CHECKS if one.name == broken.rule)
    path = ":".join(filter(None, sys.path))
    words = ["env", f"PYTHONPATH={path}", python, broken_processes.__file__]
    command = shlex.join([*words, broken.name, "-f", "-a", "{address}"])
    with ServerProcess(command, SECONDS_FOR_A_MISTAKE) as server:
        return Kit(server, ours=True, choices=False).judge(check)


def require_failure(broken: Broken) -> None:
    """Have the check that is to find a mistake find it."""
    for python in PYTHONS * TRIALS_MAX:
        result = find(broken, python)
        if result.verdict != "not applicable":
            break
    assert result.verdict == "failed", result
    assert 'File "' not in result.what, "the mistake is a mistake"


class TestBrokenProcesses:
    def test_every_check_finds_one(self) -> None:
        """[LIMIT-19] What a check is about is broken by a server."""
        names = {check.name for check in CHECKS}
        every = broken_processes, broken_logs, broken_traffic
        broken = [one for module in every for one in module.BROKEN]
        assert {one.rule for one in broken} == names

    @pytest.mark.parametrize(
        "broken", broken_processes.BROKEN, ids=lambda one: one.name
    )
    def test_the_check_finds_it(self, broken: Broken) -> None:
        """It is run as any server is."""
        require_failure(broken)


class TestBrokenLogs:
    @pytest.mark.parametrize(
        "broken", broken_logs.BROKEN, ids=lambda one: one.name
    )
    def test_the_check_finds_it(self, broken: Broken) -> None:
        """It is run as any server is."""
        require_failure(broken)


class TestBrokenTraffic:
    @pytest.mark.parametrize(
        "broken", broken_traffic.BROKEN, ids=lambda one: one.name
    )
    def test_the_check_finds_it(self, broken: Broken) -> None:
        """It is run as any server is."""
        require_failure(broken)
