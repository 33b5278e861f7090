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

from .drawing import cite

STYLES = {  # by kind of token, the first that fits
    String.Doc: "doc",
    Comment: "doc",
    String: "str",
    Number: "num",
    Keyword: "word",
    Name.Function: "def",
    Name.Class: "def",
}
BANNER = re.compile(r"^# ==== (\d\. .+?) =+\n", re.M)
HOLDER = re.compile(r"(\w+)(?:\(\))?\.$")  # of an attribute
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
        self.file = path.name
        source = path.read_text("utf-8")
        self._plain = ["", *source.split("\n")]
        self.sections = list(self._sections(path.stem, source))
        self._cited = list(cited_lines(source))
        self._definitions = list(definitions(source))
        self._places = {
            one.id: one.lineno
            for node in ast.parse(source).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for one in ast.walk(node)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        }
        self._places.update((one[0], one[1]) for one in self._definitions)
        self._lines = self._highlight(source)

    def _sections(self, name: str, source: str) -> Iterator[Section]:
        """Return the parts; the first is what is before the first banner."""
        banners = list(BANNER.finditer(source))
        starts = [source.count("\n", 0, one.start()) for one in banners]
        ends = [*starts, source.count("\n")]
        titles = [self.file, *(one[1] for one in banners)]
        for number, title in enumerate(titles):
            page = f"{name}-{number}.html" if banners else f"{name}.html"
            yield Section(title, page, [0, *starts][number] + 1, ends[number])

    def _place(self, line: int) -> str:
        """Return the address of a line."""
        page = next(one.page for one in self.sections if line <= one.last)
        return f"{page}#L{line}"

    def _highlight(self, source: str) -> list[Markup]:
        """Return the lines as HTML, from the first."""
        lines = [Markup(""), Markup("")]
        for start, kind, text in PythonLexer().get_tokens_unprocessed(source):
            style = next((css for k, css in STYLES.items() if kind in k), "")
            name = self._named(source, start, text, len(lines) - 1)
            for index, piece in enumerate(text.split("\n")):
                lines += [Markup("")] * bool(index)
                html = cite(piece)
                if kind is Name and name in self._places:
                    place = self._place(self._places[name])
                    html = Markup('<a href="{}">{}</a>').format(place, html)
                if style and piece:
                    span = Markup('<span class="{}">{}</span>')
                    html = span.format(style, html)
                lines[-1] += html
        return lines

    def _named(self, source: str, start: int, name: str, line: int) -> str:
        """Return the definition that a name may stand for.

        A name in lower case that is not called is a variable.  An attribute
        is a method if what has it is `self`, or has the name of the class,
        as `bus` has.
        """
        holder = HOLDER.search(source, max(0, start - 40), start)
        if not holder:
            is_called = source.startswith("(", start + len(name))
            return name if is_called or not name.islower() else ""
        owner = holder[1].capitalize()
        if holder[1] == "self":
            owner = self._around(line)[0].partition(".")[0]
        return f"{owner}.{name}"

    def lines(self, first: int, last: int) -> list[tuple[int, Markup]]:
        """Return lines as HTML with their numbers."""
        return list(enumerate(self._lines[first : last + 1], first))

    def excerpts(self, rule: str) -> Iterator[Excerpt]:
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
            place, shown = self._place(first), self.lines(first, last)
            yield Excerpt(name, self.file, place, shown, lines)

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
