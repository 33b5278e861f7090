"""Tests that the book is whole: pages, links, rules with their code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conformance.examples import read_blocks
from fake_bus import RULES
from processes import ROOT

pytest.importorskip("jinja2", reason="the book needs Jinja2")
pytest.importorskip("markdown_it", reason="the book needs markdown-it-py")
pytest.importorskip("pygments", reason="the book needs Pygments")

from book.__main__ import build
from book.chapters import LISTINGS, example, part
from book.drawing import drawn

EMPTY = ("input", "link", "meta", "option", "wbr")  # what has no end


class Page(HTMLParser):
    """The anchors and links of a page; whatever is opened is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = path.read_text("utf-8")
        self.feed(self.text)
        assert not self.open, path

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        if tag not in EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            elif name in ("href", "src", "for") and value:
                self.links.append(f"#{value}" if name == "for" else value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, written anew."""
    path = tmp_path_factory.mktemp("site")
    build(path)
    return path


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.name: Page(path) for path in site.glob("*.html")}


class TestPages:
    def test_every_link_resolves(
        self, site: Path, pages: dict[str, Page]
    ) -> None:
        """To a file of the site, and to an anchor if it names one."""
        assert len(pages) > 25
        for name, page in pages.items():
            for link in page.links:
                file, _, anchor = link.partition("#")
                if "://" in link or link.startswith("data:"):
                    continue
                target = file or name
                assert (site / target).exists(), f"{name}: {link}"
                if anchor and not anchor.startswith("played="):
                    assert anchor in pages[target].ids, f"{name}: {link}"
        assert "#clients" in pages["specification.html"].links

    def test_no_anchor_is_there_twice(self, pages: dict[str, Page]) -> None:
        """So that each link leads to one place."""
        for name, page in pages.items():
            assert len(page.ids) == len(set(page.ids)), name

    def test_nothing_comes_from_elsewhere(
        self, pages: dict[str, Page]
    ) -> None:
        """The pages need no network."""
        for name, page in pages.items():
            loaded = re.findall(r'<(?:script|link|img)\b[^>]*"', page.text)
            assert loaded and "://" not in "".join(loaded), name

    def test_every_rule_stands_beside_its_code_and_tests(
        self, pages: dict[str, Page]
    ) -> None:
        """In its chapter, with its id as the anchor."""
        for rule in RULES.values():
            page = pages[rule.file.replace(".md", ".html")]
            section = page.text.partition(f'<section id="{rule.id}">')[2]
            beside = section.partition("</section>")[0]
            if rule.id not in ("KEY-2", "KEY-6", "CRED-12"):  # of any client
                assert '<pre class="code"' in beside, rule.id
                assert "<mark>" in beside, rule.id
                assert re.search(r"[1-9]\d* tests?</summary>", beside), rule.id

    def test_no_line_stands_beside_a_rule_twice(self) -> None:
        """What cites it near each other is one excerpt."""
        for rule in RULES:
            shown = re.findall(r"<i> *(\d+)</i>  (.*)", part(rule, []))
            assert len(shown) == len(set(shown)), rule
            for mark in re.findall("<mark>(.*)</mark>", part(rule, [])):
                assert re.search(rf"\b{rule}\b", mark), rule

    def test_every_example_is_drawn(self, pages: dict[str, Page]) -> None:
        """In its chapter, with its name as the anchor."""
        for block in read_blocks():
            page = pages[block.file.replace(".md", ".html")]
            assert f"example-{block.name}" in page.ids

    @pytest.mark.parametrize("kind", ["match", "packet"])
    def test_rows_say_what_their_lines_say(self, kind: str) -> None:
        """But for blanks and quotation marks."""
        for block in read_blocks():
            if block.kind == kind:
                html = drawn(kind, block.lines).partition("<tbody>")[2]
                cells = re.findall("(?s)<td>.*?</td>", html)
                text = unescape(re.sub("<[^>]*>", "", "".join(cells)))
                said = "".join(block.lines)
                assert re.sub(r'[\s"]', "", text) == re.sub(r'[\s"]', "", said)

    def test_an_example_for_clients_has_three_lanes(self) -> None:
        """A program, its client and the server; arrows say who speaks."""
        steps = [
            "server busy",
            "publish k one",
            r"> MSG k\0one",
            "< end",
            "= error | message k {x*3}",
            "close",
            "> end",
        ]
        html = example("client", "a-name [CLIENT-1]", "\n".join(steps))
        rows = [
            [
                " ".join(re.sub("<.*?>", "", cell).split())
                for cell in re.findall("(?s)<td.*?/td>", row)
            ]
            for row in html.split("<tr>")[2:]
        ]
        assert rows == [
            ["sends publish k one", "", ""],
            ["", r"sends MSG k\0one", ""],
            ["", "finds the end: the server has closed", ""],
            ["receives error or message k {x*3}", "", ""],
            ["sends close", "", ""],
            ["", "closes", ""],
        ]
        assert "the server is at: busy" in html
        assert html.count('class="arrives"') == 4
        assert "<textarea" not in html  # no page can run it

    def test_lines_of_the_source_are_anchors(
        self, pages: dict[str, Page]
    ) -> None:
        """Each of them once, in the section that it is of."""
        count = (ROOT / "sbus.py").read_text("utf-8").count("\n")
        parts = [page for name, page in pages.items() if name[:5] == "sbus-"]
        lines = [one for page in parts for one in page.ids if one[0] == "L"]
        assert len(parts) == 10
        assert sorted(lines) == sorted(f"L{n + 1}" for n in range(count))

    def test_names_lead_to_definitions(self, pages: dict[str, Page]) -> None:
        """Of functions, constants and methods; local ones lead nowhere."""
        lines = (ROOT / "sbus.py").read_text("utf-8").split("\n")
        found = re.findall(
            r'<a href="sbus-\d\.html#L(\d+)">(\w+)</a>',
            "".join(page.text for page in pages.values()),
        )
        assert len(found) > 1_000
        for line, name in found:
            near = "\n".join(lines[int(line) - 1 :][:2])  # behind a decorator
            assert re.search(rf"\b{name}\b", near), name
        names = {name for _, name in found}
        assert {
            "pattern_for",
            "WHOAMI",
            "BACKLOG",
            "handle",
            "excess",
        } <= names
        linked = re.findall(r">(\w+)</a>", pages["sbus-8.html"].text)
        assert "seconds" not in linked

    def test_citations_lead_to_rules(self, pages: dict[str, Page]) -> None:
        """Those in comments, and those of errors."""
        source = (ROOT / "sbus.py").read_text("utf-8")
        cited = re.findall(r'\[([A-Z]+-\d+)\]|"([A-Z]+-\d+)"', source)
        linked = [
            rule
            for name, page in pages.items()
            if name.startswith("sbus-")
            for rule in re.findall(r'"id" href="[^"#]*#([^"]*)"', page.text)
        ]
        assert sorted(linked) == sorted(one or two for one, two in cited)

    def test_the_code_is_that_of_the_files(
        self, pages: dict[str, Page]
    ) -> None:
        """Without its marks and numbers."""
        text = re.sub(r'<i id="L\d+".*?</i>  ', "", pages["sbus-4.html"].text)
        code = text.partition("<pre")[2].partition(">")[2]
        plain = re.sub("<[^>]*>", "", code.partition("</pre>")[0])
        section = LISTINGS[0].sections[4]
        lines = (ROOT / "sbus.py").read_text("utf-8").split("\n")
        expected = "\n".join(lines[section.first - 1 : section.last])
        assert unescape(plain).strip("\n") == expected.rstrip()


class TestPlayer:
    def test_without_pyodide_it_is_said(self, tmp_path: Path) -> None:
        """That what is made alone can be read, but not run."""
        paths = [str(ROOT), *(str(ROOT / p) for p in ("spec", "tests/kit"))]
        done = subprocess.run(
            [sys.executable, "-m", "book", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "pages are in" in done.stdout, done.stderr
        assert "make book fetches pyodide" in done.stdout

    def test_the_archive_has_all_that_it_imports(
        self, site: Path, tmp_path: Path
    ) -> None:
        """The player runs where nothing but the archive is."""
        with zipfile.ZipFile(site / "player.zip") as archive:
            archive.extractall(tmp_path)
        code = (
            "import sys; from unittest.mock import MagicMock;"
            "sys.modules['pytest'] = MagicMock();"
            "from book.player import call;"
            "print(call('bench', 'A > SUB a'))"
        )
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert '"ok": true' in done.stdout, done.stderr
