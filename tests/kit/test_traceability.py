"""Tests of the matrix: every rule has code, examples and tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import CodeType, FrameType

import sbus
import traceability
from conformance.examples import Block, Case, MatchCase
from conformance.rules import SPEC, Rule
from fake_bus import CASES, RULES, cases_of, each_block, run_on_fake_kernel
from processes import ROOT


def is_binding(rule: Rule) -> bool:
    """Return whether somebody must keep a rule, or should."""
    return rule.level != "MAY" and rule.id not in traceability.BY_USERS


class TestTraceability:
    def test_rules_are_as_they_were_reviewed(self) -> None:
        """An edited sentence makes its citations stale.

        Look at what cites it, and then: make requirements.
        """
        written = traceability.REQUIREMENTS.read_text("utf-8").splitlines()
        current = traceability.requirements().splitlines()
        changed = {*current} ^ {*written}
        code, tests = traceability.code_by_rule(), traceability.tests_by_rule()
        stale = [
            f"{name}: {code.get(name)} {tests.get(name)}"
            for name in {line.split("\t")[0] for line in changed}
        ]
        assert not stale and written == current

    def test_choices_are_explained(self) -> None:
        """Chapter 9 tells what we do where a server MAY."""
        choices = (SPEC / "choices.md").read_text("utf-8")
        for rule in RULES.values():
            assert rule.level != "MAY" or f"[{rule.id}]" in choices

    def test_every_rule_is_shown(self) -> None:
        """By an example or a check, unless programs are to keep it."""
        shown = traceability.examples_by_rule()
        not_shown = {rule for rule, examples in shown.items() if not examples}
        assert not_shown == traceability.BY_USERS

    def test_rules_on_matching_are_shown_from_both_sides(self) -> None:
        """By what a pattern selects, and by what it does not."""
        answers: dict[str, set[bool]] = {"MATCH-4": {False}}  # selects all
        for case in CASES:
            if isinstance(case, MatchCase):
                for rule in case.rules:
                    answers.setdefault(rule, set()).add(case.selected)
        assert {one for one in RULES if one.startswith("MATCH")} <= {*answers}
        assert all(len(both) == 2 for both in answers.values()), answers

    def test_the_matrix_has_every_rule(self) -> None:
        """If not: make trace."""
        text = traceability.TRACEABILITY.read_text("utf-8")
        assert re.findall(r"^\| ([A-Z]+-\d+) ", text, re.M) == [*RULES]

    @each_block
    def test_citations_are_live(self, block: Block) -> None:
        """An example runs code that cites its rules."""
        live = rules_of_functions_run_by(cases_of(block)[:20])
        assert {*block.rules} - NOT_LIVE <= live

    def test_every_rule_has_a_test_that_passed(self) -> None:
        """A test cites it, or runs an example of it."""
        tests = traceability.tests_by_rule()
        tested = {rule for rule, names in tests.items() if names}
        tested |= {rule for case in CASES for rule in case.rules}
        binding = {rule.id for rule in RULES.values() if is_binding(rule)}
        assert not binding - tested


NOT_LIVE = {"CONN-1"}  # cited where sockets are made, and there are none


def rules_of_functions_run_by(cases: Sequence[Case]) -> set[str]:
    """Return the rules that are cited by the functions that cases run.

    sys.setprofile sees what sys.settrace does, and leaves that to coverage.
    """
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        for case in cases:
            run_on_fake_kernel(case)
    finally:
        sys.setprofile(None)
    lines = {
        code.co_firstlineno
        for code in called
        if code.co_filename == sbus.__file__
    }
    places = traceability.citations(ROOT / "sbus.py")
    live = {place.name for place in places if place.first_line in lines}
    live |= {name.rpartition(".")[0] for name in live}  # classes, tables
    return {rule for one in places if one.name in live for rule in one.rules}
