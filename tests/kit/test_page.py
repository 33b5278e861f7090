"""Tests of the report for browsers."""

from __future__ import annotations

import random
import re
import sys
from html import escape
from pathlib import Path

import pytest

import implementations
from conformance.clients import all_client_cases
from conformance.kit import Result, all_cases
from conformance.report import Run
from conformance.rules import SPEC
from examples_of_spec import CASES, RULES
from implementations import page
from processes import naive
from sizes import either

ADAPTER = Path(__file__).with_name("client_adapter.py")
CLIENT = f"{sys.executable} {ADAPTER} {{address}}"
IDS = re.compile(r' id="(.*?)"')
FIRST = CASES[0].rules[0]  # a rule with many examples
HOSTILE = "\"><script>alert('&amp;')</script>"


def outcome(name: str, verdict: str, reason: str = "", *said: str) -> Result:
    """Return how an example ended."""
    (rules,) = (case.rules for case in CASES if case.name == name)
    return Result(name, rules, verdict, reason, said)


def page_of(*others: Result) -> str:
    """Return the page of a server; all examples passed, but for some."""
    changed = {result.case: result for result in others}
    results = [
        changed.get(case.name) or Result(case.name, case.rules, "passed")
        for case in CASES
    ]
    return page([Run("server", "mine", "./mine", results)], SPEC)


def row(text: str, rule: str) -> str:
    """Return the row of a rule."""
    match = re.search(rf'<tr id="{rule}".*?</tr>', text, re.S)
    assert match
    return match[0]


def test_it_needs_no_network() -> None:
    """Each link leads to a place in it, or to a chapter."""
    text = page_of()
    ids = IDS.findall(text)
    assert len({*ids}) == len(ids)
    places = {f"#{name}" for name in ids}
    places |= {file.as_uri() for file in SPEC.glob("*.md")}
    assert {*re.findall(r'(?:href|src|action)="(.*?)"', text)} <= places
    assert not re.search("<(script|img|link|iframe|object)", text)


def test_it_leads_to_the_book(directory: Path) -> None:
    """In the book's folder, each id leads to its place in a chapter."""
    for folder in ("book", "spec"):
        (directory / folder).mkdir()
    (directory / "spec/6-echoes.html").touch()
    runs = [Run("server", "it", "./it", [])]
    text = page(runs, directory / "book")
    assert '<a href="../spec/6-echoes.html#ECHO-1">ECHO-1</a>' in text
    assert f'<a href="{(SPEC / "7-limits.md").as_uri()}">LIM' in text


def test_every_rule_has_a_row() -> None:
    """Those of servers for a server, those of clients for a client."""
    for kind in ("server", "client"):
        ids = IDS.findall(page([Run(kind, "it", "./it", [])], SPEC))
        rules = {rule for rule in RULES if RULES[rule].subject == kind}
        assert {*ids} & {*RULES} == rules


def test_a_failure() -> None:
    """It counts for each of its rules, and is told below them."""
    said = ("A > SUB k", "A < MSG k\\0x")
    failure = outcome("reader-that-lags", "failed", "nothing", *said)
    text = page_of(failure)
    for rule in failure.rules:
        cell = re.search(r">failed, (\d+)/(\d+) passed<", row(text, rule))
        assert cell and int(cell[1]) == int(cell[2]) - 1
    assert text.count(">failed, ") == len(failure.rules)
    assert text.count("A &lt; MSG k\\0x\n    -&gt; nothing") == 1


def test_what_was_not_asked_for() -> None:
    """It is in the table, and why stands below, once."""
    others = [
        outcome(case.name, "not asked for", "see --level daemon")
        for case in CASES
        if FIRST in case.rules
    ]
    text = page_of(*others)
    assert ">not asked for</td>" in row(text, FIRST)
    why = f"<li>not asked for, {len(others)}: see --level daemon</li>"
    assert why in text and text.count("see --level daemon") == 1


def test_servers_and_clients_side_by_side() -> None:
    """Each has a column, empty where a rule is not for it."""
    cases = all_client_cases()
    results = [Result(case.name, case.rules, "passed") for case in cases]
    server = Run("server", "one", "./one", [])
    text = page([server, Run("client", "two", "./two", results)], SPEC)
    cell = re.compile("<td[^>]*>(.*?)</td>")
    for rule, one, two in (
        (FIRST, "not run", ""),
        ("CRED-12", "", "1/1 passed"),
        ("ADDR-1", "not run", "8/8 passed"),  # which is for both
    ):
        cells = cell.findall(row(text, rule))
        assert cells == [one, two]


def test_hostile_text() -> None:
    """Whatever a server says, or is called, is text."""
    failure = outcome("subscription-lasts", "failed", HOSTILE, HOSTILE)
    other = outcome("empty-packet", "not applicable", HOSTILE)
    run = Run("server", HOSTILE, HOSTILE, [failure, other])
    text = page([run], SPEC)
    assert "<script" not in text and text.count(escape(HOSTILE)) > 4


def test_a_file_of_five_lines(directory: Path) -> None:
    """All that are known have one, and a line too few is told."""
    known = [*map(implementations.read, implementations.FILES.iterdir())]
    assert {"sbus.py", "naive", "Rust"} <= {tried.name for tried in known}
    assert all(tried.server or tried.client for tried in known)
    (directory / "mine").write_text("name: mine\nserver: x\n", "utf-8")
    with pytest.raises(ValueError, match="needs a line of each: name, "):
        implementations.read(directory / "mine")


def test_a_row_of_the_table() -> None:
    """It says how many examples of each level passed."""
    tried = implementations.Implementation("it", "1", "./it", "", "")
    failure = outcome("subscription-lasts", "failed")
    other = outcome("empty-packet", "passed")
    run = Run("server", "it", "./it", [failure, other])
    cells = implementations.row(tried, [run])
    assert cells[:2] == ["it", "1"]
    assert cells[3:5] == ["0/1 passed", "1/1 passed"]


def test_each_client_with_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that follows the text alone is not blamed for more."""
    cases = all_cases()
    sample = random.Random(1).sample(cases, len(cases) // either(1, 6))
    monkeypatch.setattr("implementations.all_cases", lambda: sample)
    cell = implementations.try_pair(naive(), CLIENT)
    assert re.fullmatch(r"works, \d+ examples", cell), cell
    assert implementations.try_pair(naive(), "false {address}") == (
        "not tried here"
    )
