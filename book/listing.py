"""Python files as HTML: highlighted, with links to rules and definitions."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from traceability import cited_lines, definitions

from .drawing import cite, link

STYLES = {  # by kind of token, the first that fits
    String.Doc: "doc",
    Comment: "doc",
    String: "str",
    Number: "num",
    Keyword: "word",
    Name.Function: "def",
    Name.Class: "def",
}
BANNER = re.compile(r"^# =+\n# (\d\. .+?) +spec/\S+\n", re.M)
EXCERPT_MAX = 60  # lines of a definition that is shown whole
PARAGRAPH_MAX = 12  # lines of a paragraph before and after those that count


class Section(NamedTuple):
    """A part of a file, which has a page."""

    title: str
    page: str
    first: int
    last: int


class Listing:
    """A file, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = path.read_text("utf-8")
        self._plain = ["", *source.split("\n")]
        self.sections = list(self._sections(source))
        self._definitions = list(definitions(source))
        self._places = {name: first for name, first, _ in self._definitions}
        tree = ast.parse(source)
        for node in tree.body:
            if isinstance(node, ast.Assign):
                names = names_in(node)
                self._places.update(dict.fromkeys(names, node.lineno))
        self._links = dict(self._find_links(tree, "", set()))
        self._lines = self._highlight(source)
        self._cited = list(cited_lines(source))

    def _sections(self, source: str) -> Iterator[Section]:
        """Return the parts; the first is what is before the first banner."""
        name, count = self.path.stem, source.count("\n")
        banners = list(BANNER.finditer(source))
        starts = [source.count("\n", 0, one.start()) for one in banners]
        titles = [self.path.name, *(one[1] for one in banners)]
        for number, title in enumerate(titles):
            page = f"{name}-{number}.html" if banners else f"{name}.html"
            first, last = [0, *starts, count][number : number + 2]
            yield Section(title, page, first + 1, last)

    def _place(self, line: int) -> str:
        """Return the address of a line."""
        page = next(one.page for one in self.sections if line <= one.last)
        return f"{page}#L{line}"

    def _find_links(
        self, node: ast.AST, owner: str, local: set[str]
    ) -> Iterator[tuple[tuple[int, int], str]]:
        """Return what names at which line and column are definitions.

        An attribute is a method if what has it is `self`, or has the name of
        the class, as `bus` has.
        """
        name, start = "", 0
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            local = local | names_in(node)
        elif isinstance(node, ast.Name) and node.id not in local:
            name, start = node.id, node.col_offset
        elif isinstance(node, ast.Attribute):
            holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
            kind = owner if holder == "self" else holder.capitalize()
            name = f"{kind}.{node.attr}"
            start = (node.end_col_offset or 0) - len(node.attr)
        if name in self._places:
            yield (getattr(node, "end_lineno", 0), start), name
        for child in ast.iter_child_nodes(node):
            yield from self._find_links(child, owner, local)

    def _highlight(self, source: str) -> list[str]:
        """Return the lines as HTML, from the first."""
        lines, column = ["", ""], 0
        for _, kind, text in PythonLexer().get_tokens_unprocessed(source):
            style = next((css for k, css in STYLES.items() if kind in k), "")
            name = self._links.get((len(lines) - 1, column), "")
            for index, piece in enumerate(text.split("\n")):
                if index:
                    lines.append("")
                    column = 0
                column += len(piece.encode())
                html = cite(piece)
                if kind in String:  # an error has its rule's id alone
                    html = link(piece, html)
                if name and kind in Name:
                    place = self._place(self._places[name])
                    html = f'<a href="{place}">{html}</a>'
                if style and piece:
                    html = f'<span class="{style}">{html}</span>'
                lines[-1] += html
        return lines

    def page(self, section: Section) -> str:
        """Return a part, with an anchor for each line."""
        rows = (
            f'<i id="L{line}">{line:4}</i>  {self._lines[line]}\n'
            for line in range(section.first, section.last + 1)
        )
        title = f"<h1>{escape(section.title)}</h1>"
        return f'{title}<pre class="code" tabindex="0">{"".join(rows)}</pre>'

    def excerpts(self, rule: str) -> Iterator[str]:
        """Return the definitions, or paragraphs, that cite a rule."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for line, cited in self._cited:
            if cited == rule:
                while not re.search(rf"\b{rule}\b", self._plain[line]):
                    line += 1  # the docstring begins before
                found.setdefault(self._around(line), []).append(line)
        for (name, first, last), lines in found.items():
            if not name:
                first = max(first, lines[0] - PARAGRAPH_MAX)
                last = min(last, lines[-1] + PARAGRAPH_MAX)
            what = f"<code>{escape(name)}</code> {self.path.name}, "
            yield (
                f"<details><summary>{what}lines {first} to {last}</summary>"
                f"{self._excerpt(first, last, lines)}"
                f'<p><a href="{self._place(first)}">in the source</a></p>'
                "</details>"
            )

    def _excerpt(self, first: int, last: int, marked: Collection[int]) -> str:
        """Return lines of which some are marked."""
        rows = ""
        for line in range(first, last + 1):
            row = f"<i>{line:4}</i>  {self._lines[line]}"
            rows += f"<mark>{row}</mark>\n" if line in marked else f"{row}\n"
        return f'<pre class="code" tabindex="0">{rows}</pre>'

    def _around(self, line: int) -> tuple[str, int, int]:
        """Return the name, first and last line of what a line is in."""
        for name, first, last in reversed(self._definitions):
            if first <= line <= last < first + EXCERPT_MAX:
                return name, first, last
        first = last = line
        while self._plain[first - 1]:
            first -= 1
        while self._plain[last + 1]:
            last += 1
        return "", first, last


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that are bound anywhere in a piece of code."""
    return {
        getattr(node, "arg", getattr(node, "id", ""))
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
