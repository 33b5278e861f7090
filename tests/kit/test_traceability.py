"""Tests of the matrix and of spec/vectors, made from the chapters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import sbus
import traceability
from conformance.examples import Block, Case, MatchCase
from conformance.kit import level_of, origin_of
from conformance.rules import RULE, SPEC, chapters
from examples_of_spec import CASES, RULES, cases_of, each_block
from fake_bus import run_on_fake_kernel
from processes import ROOT
from traceability import BY_USERS

ID = r"[A-Z]+-\d+"
NOT_LIVE = {"CONN-1"}  # cited where sockets are made, and there are none
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def test_rules_are_as_they_were_reviewed() -> None:
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


def test_choices_are_explained() -> None:
    """choices.md tells what we do where a server MAY."""
    choices = (SPEC / "choices.md").read_text("utf-8")
    for rule in RULES.values():
        assert rule.level != "MAY" or f"[{rule.id}]" in choices


def test_no_rule_goes_in_silence() -> None:
    """Each id below the next of its family is a rule, or has a line.

    In choices.md, which says what became of it; no id is used again.
    """
    choices = (SPEC / "choices.md").read_text("utf-8")
    opening, *rows = choices.partition("no more\n")[2].split("\n| ")
    first_cells = " ".join(row.partition("|")[0] for row in rows)
    gone = re.findall(ID, first_cells)
    given = [
        f"{family}-{number}"
        for family, end in re.findall(r"\b([A-Z]+)-(\d+)", opening)
        for number in range(1, int(end))
    ]
    assert sorted([*RULES, *gone]) == sorted(given)


@pytest.mark.parametrize("file", sorted(SPEC.glob("examples/*.md")))
def test_an_example_stands_under_its_rule(file: Path) -> None:
    """It is the first that the example cites, and there is one."""
    text = file.read_text("utf-8")
    for section in re.split(rf"(?m)^## (?={ID}$)", text)[1:]:
        rule = section.partition("\n")[0]
        shown = re.findall(rf"^```[a-z]+ \S+ \[({ID})\]", section, re.M)
        assert rule in RULES and {*shown} == {rule}, section


def test_only_rules_bind() -> None:
    """No other sentence of a chapter has one of their words."""
    for chapter in chapters():
        text = RULE.sub("", chapter.read_text("utf-8"))
        assert not re.search(r"\b(MUST|SHOULD|MAY)\b", text), chapter


def test_terms_have_their_place() -> None:
    """Chapter 1 says where each term of the others is defined."""
    first, *others = chapters()
    listed = re.compile(r"\[([a-z ,]+)\]\(([2-9][^#)]+)")
    defined = re.compile(r"\*\*([a-z][a-z ]*)\*\*")
    terms = [
        (file, term)
        for names, file in listed.findall(first.read_text("utf-8"))
        for term in names.split(", ")
    ]
    uses = [
        (chapter.name, term.rstrip("s"))
        for chapter in others
        for term in defined.findall(chapter.read_text("utf-8"))
    ]
    for name, term in uses:
        is_plural = (name, term + "s") in terms
        assert is_plural or (name, term) in terms, term
    assert len(uses) == len(terms)


def test_every_rule_has_its_evidence() -> None:
    """A line keeps it, and an example or a check shows it."""
    code, shown = traceability.code_by_rule(), traceability.shown_by_rule()
    assert {rule for rule in RULES if not code[rule]} == BY_USERS
    assert {rule for rule in RULES if not shown[rule]} == BY_USERS


def test_rules_on_matching_are_shown_from_both_sides() -> None:
    """By what a pattern selects, and by what it does not."""
    answers: dict[str, set[bool]] = {"MATCH-4": {False}}  # selects all
    for case in CASES:
        if isinstance(case, MatchCase):
            for rule in case.rules:
                answers.setdefault(rule, set()).add(case.selected)
    assert {rule for rule in RULES if rule.startswith("MATCH")} <= {*answers}
    assert all(len(both) == 2 for both in answers.values()), answers


def test_the_matrix_has_every_rule() -> None:
    """In the order of the chapters."""
    text = traceability.matrix()
    assert re.findall(r"^\| ([A-Z]+-\d+) ", text, re.M) == [*RULES]


def test_what_is_cited_exists() -> None:
    """Every id in brackets is a rule; a test that is named, a test."""
    programs = [ROOT / "sbus.py", ROOT / "sbus_client.py"]
    names = "spec/**/*.md", "*.md", "book/*.md"
    pages = [page for name in names for page in ROOT.glob(name)]
    tests = "".join(file.read_text("utf-8") for file in traceability.TESTS)
    for file in (*pages, *programs, *traceability.TESTS):
        text = file.read_text("utf-8")
        assert {*re.findall(r"\[([A-Z]+-\d+)\]", text)} <= {*RULES}, file
        for name in re.findall(r"`([Tt]est_?[A-Z_a-z]+)`", text):
            named = rf"(class|def) {name}\b"
            assert file not in pages or re.search(named, tests), name


@each_block
def test_citations_are_live(block: Block) -> None:
    """An example runs code that cites its rules."""
    live = rules_of_functions_run_by(cases_of(block)[:20])
    assert {*block.rules} - NOT_LIVE <= live


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
    of_server = [code for code in called if code.co_filename == sbus.__file__]
    lines = {code.co_firstlineno for code in of_server}
    places = traceability.citations(ROOT / "sbus.py")
    live = {place.name for place in places if place.first_line in lines}
    live |= {name.rpartition(".")[0] for name in live}  # classes, tables
    return {
        rule for place in places if place.name in live for rule in place.rules
    }


def schema_errors(value: Any, schema: Any, root: Any) -> Iterator[str]:
    """Return what a value breaks of as much of JSON Schema as we use."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        yield f"{value!r} is not of type {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{value!r} does not match {schema['pattern']}"
    if "anyOf" in schema and all(
        any(schema_errors(value, choice, root)) for choice in schema["anyOf"]
    ):
        yield f"{value!r} is none of those allowed"
    for item in value if "items" in schema else ():
        yield from schema_errors(item, schema["items"], root)
    if "properties" in schema:
        yield from (f"no {name}" for name in {*schema["required"]} - {*value})
        for name in value:
            known = schema["properties"].get(name, {"enum": ()})
            yield from schema_errors(value[name], known, root)


@pytest.mark.parametrize("name", sorted(traceability.vectors()))
def test_they_are_those_of_the_chapters(name: str) -> None:
    """If not: make vectors.  They keep their schema."""
    written = (traceability.VECTORS / name).read_text("utf-8")
    assert written == traceability.vectors()[name]
    file = traceability.VECTORS / "schema.json"
    schema = json.loads(file.read_text("utf-8"))
    vectors = json.loads(written)
    for case in vectors["cases"]:
        of_case = {**vectors, "cases": [case]}
        assert not [*schema_errors(of_case, schema, schema)]
        of_case["cases"] = [{**case, "name": 7}]
        assert [*schema_errors(of_case, schema, schema)]


def test_names_are_used_once() -> None:
    """A report, and --only, know a case by its name."""
    assert len({case.name for case in CASES}) == len(CASES)


def test_of_upstream_ask_for_no_disconnection() -> None:
    """The original text lets a server ignore what it does not accept."""
    for case in CASES:
        if (origin_of(case), level_of(case)) == ("upstream", "must"):
            steps = case.conversation().steps
            assert all(step.argument != "end" for step in steps), case
