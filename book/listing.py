"""Python files as HTML: highlighted, with links to rules and definitions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from traceability import cited_lines, definitions

from .drawing import cite, render

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


class Excerpt(NamedTuple):
    """The lines of a file that keep a rule."""

    name: str  # of the definition that they are of, if they are of one
    file: str
    place: str  # in the source
    lines: list[tuple[int, Markup]]
    cited: list[int]  # the numbers of those that cite the rule


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

    def _highlight(self, source: str) -> list[Markup]:
        """Return the lines as HTML, from the first."""
        lines, column = [Markup(""), Markup("")], 0
        for _, kind, text in PythonLexer().get_tokens_unprocessed(source):
            style = next((css for k, css in STYLES.items() if kind in k), "")
            name = self._links.get((len(lines) - 1, column), "")
            for index, piece in enumerate(text.split("\n")):
                if index:
                    lines.append(Markup(""))
                    column = 0
                column += len(piece.encode())
                html = cite(piece)
                if name and kind in Name:
                    place = self._place(self._places[name])
                    html = Markup('<a href="{}">{}</a>').format(place, html)
                if style and piece:
                    span = Markup('<span class="{}">{}</span>')
                    html = span.format(style, html)
                lines[-1] += html
        return lines

    def page(self, section: Section) -> Markup:
        """Return a part, with an anchor for each line."""
        lines = self._numbered(section.first, section.last)
        return render("section", title=section.title, lines=lines)

    def excerpts(self, rule: str) -> Iterator[Excerpt]:
        """Return the definitions, or paragraphs, that cite a rule."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for line, cited in self._cited:
            if cited == rule:
                while not re.search(rf"\b{rule}\b", self._plain[line]):
                    line += 1  # the docstring begins before
                found.setdefault(self._around(line), []).append(line)
        for (name, first, last), cited in found.items():
            if not name:
                first = max(first, cited[0] - PARAGRAPH_MAX)
                last = min(last, cited[-1] + PARAGRAPH_MAX)
            lines, place = self._numbered(first, last), self._place(first)
            yield Excerpt(name, self.path.name, place, lines, cited)

    def _numbered(self, first: int, last: int) -> list[tuple[int, Markup]]:
        """Return lines as HTML with their numbers."""
        return list(enumerate(self._lines[first : last + 1], first))

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
