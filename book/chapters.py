"""Markdown as HTML: rules beside their code and tests, examples drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup, escape

from conformance.examples import HEAD
from conformance.rules import SPEC, chapters
from traceability import ROOT, tests_by_rule

from .drawing import cite, drawn, page_of, render
from .listing import Listing

RULE = re.compile(r"\*\*\[([A-Z]+-\d+)\]\*\*")
TEXTS = [*chapters(), SPEC / "choices.md", SPEC / "traceability.md"]
PAGES = {  # of files that texts link to
    **{path.name: page_of(path.name) for path in TEXTS},
    "sbus.py": "sbus-0.html",
    "sbus_client.py": "sbus_client.html",
}
EXAMPLES = ("match", "packet", "conversation", "client", "question")
LISTINGS = [Listing(ROOT / name) for name in ("sbus.py", "sbus_client.py")]
TESTS = tests_by_rule()


def example(kind: str, head: str, source: str) -> Markup:
    """Return an example as it stands, or a question.

    The page runs it, and checks an answer, by what stands in a text area.
    Behind the head may be after how many steps the bench is to show it.
    """
    head, _, shown = head.partition(" bench=")
    found = HEAD.fullmatch(f" {head}")
    name, cited = (found[1], found[2]) if found else (head, "")
    lines = source.splitlines()
    notes = " ".join(line[2:] for line in lines if line[:1] == "#")
    return render(
        "question" if kind == "question" else "example",
        kind=kind,
        name=name,
        played=shown or -1,
        cited=cited,
        note="" if notes.startswith("pattern ") else notes,
        drawing=drawn(kind, [line for line in lines if line[:1] not in "#"]),
        source=source,
    )


class Renderer(RendererHTML):
    """Markdown as HTML: what is not as usual."""

    def text(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Return text, with links to rules and chapters outside of links."""
        is_link = index and tokens[index - 1].type == "link_open"
        return (escape if is_link else cite)(tokens[index].content)

    def fence(self, tokens: Sequence[Token], index: int, *__: Any) -> str:
        """Return an example, a question, or lines of code."""
        kind, _, head = tokens[index].info.partition(" ")
        source = tokens[index].content.rstrip("\n")
        if kind in EXAMPLES:
            return example(kind, head, source)
        return f'<pre tabindex="0">{cite(source)}</pre>'

    def link_open(self, tokens: Sequence[Token], index: int, *_: Any) -> str:
        """Return the start of a link; without a page it leads nowhere."""
        href = str(tokens[index].attrGet("href"))
        name, mark, anchor = href.rpartition("/")[2].partition("#")
        if href[:1] != "#" and "://" not in href:
            page = PAGES.get(name, name if name.endswith(".html") else "")
            href = page and page + mark + anchor
        return f'<a href="{escape(href)}">' if href else "<a>"

    def table_open(self, *_: Any) -> str:
        """Return the start of a table that can be moved sideways."""
        attributes = 'role="region" tabindex="0" aria-label="table"'
        return f'<div class="wide" {attributes}><table>'

    def table_close(self, *_: Any) -> str:
        return "</table></div>"


MARKDOWN = MarkdownIt("commonmark", renderer_cls=Renderer).enable("table")
MARKDOWN.add_render_rule("code_block", Renderer.fence)


def to_html(source: str) -> Markup:
    """Return a text as HTML; each rule with what follows is a section."""
    parts: list[tuple[str, list[Token]]] = [("", [])]
    for node in SyntaxTreeNode(MARKDOWN.parse(source)).children:
        block = node.to_tokens()
        if node.type == "heading":
            name = re.sub(r"\W+", "-", block[1].content.lower()).strip("-")
            block[0].attrSet("id", name)
            parts.append(("", []))
        elif len(block) > 1 and (rule := RULE.match(block[1].content)):
            parts.append((rule[1], []))
        parts[-1][1].extend(block)
    return Markup("").join(part(*one) for one in parts)


def part(rule: str, tokens: list[Token]) -> Markup:
    """Return a rule with all that belongs to it, or other text."""
    html = Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))
    if not rule:
        return html
    code = [found for one in LISTINGS for found in one.excerpts(rule)]
    return render("rule", rule=rule, html=html, code=code, tests=TESTS[rule])
