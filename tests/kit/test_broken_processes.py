"""Tests that the checks find what is wrong in servers that run."""

from __future__ import annotations

import shlex
import sys

import pytest

import broken_processes
from broken_servers import Broken
from conformance.checks import CHECKS
from conformance.kit import Kit
from conformance.server import ServerProcess

SECONDS_FOR_A_MISTAKE = 1.0  # what comes later is none of a server's


class TestBrokenProcesses:
    def test_every_check_finds_one(self) -> None:
        """[LIMIT-19] What a check is about is broken by a server."""
        names = {check.name for check in CHECKS}
        assert {one.rule for one in broken_processes.BROKEN} == names

    @pytest.mark.parametrize(
        "broken", broken_processes.BROKEN, ids=lambda one: one.name
    )
    def test_the_check_finds_it(self, broken: Broken) -> None:
        """It is run as any server is."""
        check = next(one for one in CHECKS if one.name == broken.rule)
        file = broken_processes.__file__
        path = ":".join(filter(None, sys.path))
        words = ["env", f"PYTHONPATH={path}", sys.executable, file]
        command = shlex.join([*words, broken.name, "-f", "-a", "{address}"])
        with ServerProcess(command, SECONDS_FOR_A_MISTAKE) as server:
            result = Kit(server, ours=True, choices=False).judge(check)
        if result.what == "no user can start it":
            pytest.skip("root's Python is not for others")
        assert result.verdict == "failed", result
