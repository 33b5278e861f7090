"""Tests that the kit finds what is wrong in servers that run."""

from __future__ import annotations

import math
import os
import random
import shlex
import sys

import pytest

import broken_servers
from broken_servers import Mistake, read_mistakes
from conformance import random_walk
from conformance.examples import read_cases
from conformance.kit import CHECKS, Kit, Result, all_cases, needs_of
from conformance.server import ServerProcess
from conformance.trial import Check
from sizes import IS_SOAK

SECONDS_FOR_A_MISTAKE = 0.5  # an answer that comes later is none
SECONDS_FOR_A_START = 4.0
# Other users may be unable to run a Python that root has made for itself
PYTHONS = [*filter(os.path.exists, (sys.executable, "/usr/bin/python3"))]
CASES = all_cases()
REPORTS = ("failed", "differs")  # the latter where a server may choose


def some_findings() -> list[tuple[Mistake, str]]:
    """Return mistakes and what finds each: a rule or a check.

    In "make soak" these are all, else one for each rule and check.
    """
    findings = [
        (mistake, found_by)
        for mistake in read_mistakes().values()
        for found_by in mistake.found_by
    ]
    random.Random(1).shuffle(findings)
    one_each = {
        found_by: (mistake, found_by) for mistake, found_by in findings
    }
    return findings if IS_SOAK else [*one_each.values()]


FINDINGS = [
    pytest.param(mistake, found_by, id=f"{mistake.name}-by-{found_by}")
    for mistake, found_by in some_findings()
]
BY_RULES = [
    finding for finding in FINDINGS if str(finding.values[1]).isupper()
]
BY_CHECKS = [finding for finding in FINDINGS if finding not in BY_RULES]


@pytest.fixture(autouse=True)
def no_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave to another test to look at what is short."""
    monkeypatch.setattr(random_walk, "SHRINK_SECONDS", 0.0)


def find(mistake: Mistake, found_by: str, python: str) -> list[Result]:
    """Return results up to the first that tells of a mistake."""
    words = [python, broken_servers.__file__, mistake.name, "-f", "-a"]
    command = shlex.join([*words, "{address}"])
    cases = [case for case in CASES if found_by in (case.name, *case.rules)]
    cases.sort(key=lambda case: isinstance(case, Check))  # they take longer
    results: list[Result] = []
    with ServerProcess(command, SECONDS_FOR_A_MISTAKE) as server:
        server.start_seconds_max = SECONDS_FOR_A_START
        for result in map(Kit(server, "daemon", math.inf).judge, cases):
            results.append(result)
            if result.verdict in REPORTS:
                break
    return results


def require_report(mistake: Mistake, found_by: str) -> None:
    """Have the examples of a rule, or a check, find a mistake."""
    for python in PYTHONS:
        *others, last = find(mistake, found_by, python)
        needs_root = any(
            "by root" in result.what for result in (*others, last)
        )
        if needs_root or last.verdict != "not applicable":
            break
    # Without other users, checks leave out what only these show
    has_one_user = os.geteuid() != 0 and not found_by.isupper()
    if (needs_root or has_one_user) and last.verdict not in REPORTS:
        pytest.skip("needs to be run by root")
    assert last.verdict in REPORTS, last
    assert 'File "' not in last.what, "the mistake itself has ended the server"


class TestBrokenServers:
    def test_all_that_is_tried_is_broken(self) -> None:
        """Each rule that has an example, and each check."""
        cases = [case for case in read_cases() if "room" not in needs_of(case)]
        shown = {rule for case in cases for rule in case.rules}
        shown -= {"CONN-1"}  # nobody could even connect
        shown |= {check.name for check in CHECKS}
        mistakes = read_mistakes().values()
        finders = {name for mistake in mistakes for name in mistake.found_by}
        assert shown <= finders

    def test_each_can_be_made(self) -> None:
        """A text of sbus.py that is gone is told, not passed over."""
        source, gone = broken_servers.SBUS.read_text("utf-8"), []
        for mistake in read_mistakes().values():
            try:
                mistake.spoil(source)
            except ValueError as error:
                gone.append(str(error))
        assert not gone, "\n".join(gone)

    @pytest.mark.parametrize("mistake, found_by", BY_RULES)
    def test_the_examples_find_it(
        self, mistake: Mistake, found_by: str
    ) -> None:
        """It is run as any server is."""
        require_report(mistake, found_by)


class TestBrokenProcesses:
    @pytest.mark.parametrize("mistake, found_by", BY_CHECKS)
    def test_the_check_finds_it(self, mistake: Mistake, found_by: str) -> None:
        """It is run as any server is."""
        require_report(mistake, found_by)
