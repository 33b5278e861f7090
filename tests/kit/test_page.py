"""Tests of the report for browsers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from conformance.clients import all_client_cases
from conformance.kit import Result
from conformance.page import page
from conformance.report import Run
from fake_bus import CASES, RULES
from processes import naive, run

LOADING = {"href", "src", "srcset", "action", "data"}
EMPTY = {"br", "hr", "input", "link", "meta"}
FIRST = CASES[0].rules[0]  # a rule with many examples
HOSTILE = "\"><script>alert('&amp;')</script>"


class Reader(HTMLParser):
    """Reads a page; whatever is opened has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.links += [
            value or "" for name, value in attributes if name in LOADING
        ]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outcome(name: str, verdict: str, what: str, *said: str) -> Result:
    """Return how an example ended."""
    (rules,) = (case.rules for case in CASES if case.name == name)
    return Result(name, rules, verdict, what, said)


def results_with(*others: Result) -> list[Result]:
    """Return that all examples for servers passed, but for some."""
    changed = {one.case: one for one in others}
    return [
        changed.get(case.name) or Result(case.name, case.rules, "passed")
        for case in CASES
    ]


def row(text: str, rule: str) -> str:
    """Return the row of a rule, with that of its failures."""
    found = re.search(
        rf'<tr id="{rule}".*?</tr>(\n<tr class="\w+ more">.*?</tr>)?',
        text,
        re.S,
    )
    assert found
    return found[0]


class TestPage:
    def test_it_needs_no_network(self) -> None:
        """Nothing is loaded, and each link leads to a place in it."""
        reader = Reader(page([Run("server", "one", "./one", results_with())]))
        places = {f"#{one}" for one in reader.ids}
        assert {*reader.links} <= places
        assert len(reader.ids) == len(places)
        loading = {"script", "img", "link", "iframe", "object"}
        assert not loading & {*reader.tags}

    def test_every_rule_has_a_row(self) -> None:
        """Those of servers for a server, those of clients for a client."""
        for kind in ("server", "client"):
            ids = Reader(page([Run(kind, "it", "./it", [])])).ids
            rules = [
                rule.id for rule in RULES.values() if rule.subject == kind
            ]
            assert [one for one in ids if one in RULES] == rules

    def test_a_failure(self) -> None:
        """It is told under its first rule, and pointed to from others."""
        said = ("A > SUB k", "A < MSG k\\0x")
        failure = outcome("reader-that-lags", "failed", "nothing", *said)
        text = page([Run("server", "mine", "./mine", results_with(failure))])
        first, second = (row(text, rule) for rule in failure.rules)
        assert "failed 1/" in first and "failed 1/" in second
        assert "<details>" in first and "<details>" not in second
        assert "A &lt; MSG k\\0x\n    -&gt; nothing" in first
        assert f'<p>mine: see <a href="#{failure.rules[0]}">' in second
        other = outcome("subscribers-after-a-change", "passed", "")
        assert "failed" not in row(text, other.rules[1])

    def test_what_a_server_may_choose(self) -> None:
        """It differs, and did not fail."""
        other = outcome("unsubscribe-what-is-not-held", "differs", "the end")
        (rule,) = other.rules
        run = Run("server", "mine", "./mine", results_with(other))
        text = row(page([run]), rule)
        assert f'<tr id="{rule}" class="differs">' in text
        assert "-&gt; the end" in text and "mine: 1 differs" in text
        assert "failed" not in text

    def test_many_failures(self) -> None:
        """A few are told, the others named."""
        failures = [
            Result(case.name, case.rules, "failed", "wrong", ("A > SUB k",))
            for case in CASES
            if case.rules[0] == FIRST
        ]
        results = results_with(*failures)
        told = row(page([Run("server", "it", "./it", results)]), FIRST)
        assert told.count("-&gt; wrong") == 10
        assert f"failed, too, {len(failures) - 10}: " in told
        assert all(one.case in told for one in failures)

    def test_why_something_is_not_applicable(self) -> None:
        """It is told once, and pointed to."""
        whys = [("no time", "not run"), ("needs a clock", "not asked for")]
        others = [
            Result(case.name, case.rules, verdict, why)
            for case, (why, verdict) in zip(CASES, whys * len(CASES))
            if case.rules[0] == FIRST
        ]
        text = page([Run("server", "it", "./it", results_with(*others))])
        assert '<li id="why-1">no time</li>' in text
        assert text.count("needs a clock") == 1
        links = '<a href="#why-1">1</a> <a href="#why-2">2</a></sup>'
        assert f"not run<sup>{links}" in row(text, FIRST)

    def test_servers_and_clients_side_by_side(self) -> None:
        """Each has a column, empty where a rule is not for it."""
        clients = [
            Result(case.name, case.rules, "passed")
            for case in all_client_cases()
        ]
        runs = [
            Run("server", "one", "./one", results_with()),
            Run("server", "two", "./two", []),
            Run("client", "three", "./three", clients),
        ]
        text = page(runs)
        Reader(text)
        cell = re.compile('data-name="(.*?)">(.*?)</td>')
        cells = cell.findall(row(text, FIRST))
        assert [name for name, _ in cells] == ["one", "two", "three"]
        assert re.fullmatch(r"passed (\d+)/\1", cells[0][1])
        assert cells[1] == ("two", "not run")
        assert cells[2] == ("three", "")
        cells = cell.findall(row(text, "CRED-12"))
        assert cells == [("one", ""), ("two", ""), ("three", "passed 1/1")]
        cells = cell.findall(row(text, "ADDR-1"))  # which is for both
        whole = ("three", "passed 4/4")
        assert cells == [("one", "not run"), ("two", "not run"), whole]

    def test_hostile_text(self) -> None:
        """Whatever a server says, or is called, is text."""
        failure = outcome("subscription-lasts", "failed", HOSTILE, HOSTILE)
        other = outcome("empty-packet", "not applicable", HOSTILE)
        results = results_with(failure, other)
        text = page([Run("server", HOSTILE, HOSTILE, results)], HOSTILE)
        reader = Reader(text)
        assert "script" not in reader.tags
        assert reader.text.count(HOSTILE) > 5


class TestCommand:
    def test_page_and_report(self, directory: Path) -> None:
        """The page is written beside the report, for all that are named."""
        file, name = (
            directory / "report.html",
            "one-copy-however-many-patterns",
        )
        servers = ("--server", f"one={naive()}", "--server", naive())
        done = run(
            "spec/conformance",
            *servers,
            "--html",
            str(file),
            "--only",
            name,
            "--ours",
        )
        text = file.read_text("utf-8")
        assert done.status == 0 and not done.errors, done
        assert done.output.count("1 passed, 0 failed") == 2
        assert '<th scope="row">one</th><td>server</td>' in text
        assert (
            row(text, outcome(name, "", "").rules[0]).count("passed 1/1") == 2
        )
