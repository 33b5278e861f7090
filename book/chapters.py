"""Markdown as HTML: rules beside their code and tests, examples drawn."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup, escape

from conformance.examples import HEAD, Step, parse_step
from conformance.rules import SPEC, chapters
from traceability import ROOT, tests_by_rule

from . import drawing
from .drawing import HOLE, cite, page_of, render
from .listing import Listing

RULE = re.compile(r"\*\*\[([A-Z]+-\d+)\]\*\*")
TEXTS = [*chapters(), SPEC / "choices.md", SPEC / "traceability.md"]
PAGES = {  # of files that texts link to
    **{path.name: page_of(path.name) for path in TEXTS},
    "sbus.py": "sbus-0.html",
    "sbus_client.py": "sbus_client.html",
}
WIDE = (
    '<div class="wide" role="region" tabindex="0" aria-label="table"><table>'
)
tests = functools.cache(tests_by_rule)


@functools.cache
def listings() -> list[Listing]:
    """Return the server and the client."""
    return [Listing(ROOT / name) for name in ("sbus.py", "sbus_client.py")]


def aside(rule: str) -> Markup:
    """Return the code that keeps a rule, and the tests that cite it."""
    code = [found for one in listings() for found in one.excerpts(rule)]
    return render("aside", code=code, tests=tests()[rule])


# ---- Examples and questions


def figure(kind: str, head: str, source: str) -> Markup:
    """Return an example as it stands; the page runs those with a text."""
    found = HEAD.fullmatch(f" {head}")
    name, cited = (found[1], found[2]) if found else (head, "")
    lines = source.splitlines()
    notes = " ".join(line[1:] for line in lines if line[:1] == "#")
    return render(
        "figure",
        kind=kind,
        name=name,
        cited=cited,
        note="" if notes.startswith(" pattern ") else notes,
        drawing=drawn(kind, lines, name),
        source=source,
    )


def drawn(kind: str, lines: list[str], name: str) -> Markup:
    """Return a match table, packets, or the lanes of a conversation."""
    lines = [line for line in lines if line and line[0] != "#"]
    if kind == "conversation":
        steps = [step_of(line) for line in lines]
        options = [step.argument for step in steps if step.verb == "server"]
        steps = [step for step in steps if step.verb != "server"]
        html = drawing.lanes(steps, options)
    elif kind == "client":
        html = drawing.client_lanes(lines)
    else:
        html = drawing.table(kind, lines)
    return render("drawing", name=name, html=html)


def step_of(line: str) -> Step:
    """Return a step; that of a client who is asked for has the name '?'.

    One that is said for each of some numbers is one step here.
    """
    plain = re.sub(r"\{\d+\.\.\d+\}", "1", re.sub(f"^{HOLE}", "A", line))
    step = parse_step(plain)
    step = step._replace(argument=line.partition(step.verb)[2].strip())
    return step._replace(client="?") if line.startswith(HOLE) else step


def question(name: str, source: str) -> Markup:
    """Return a question, which the page checks by playing the answer."""
    asked, _, text = source.partition("\n")
    return render(
        "question",
        name=name,
        asked=asked.lstrip("# "),
        drawing=drawn("conversation", text.splitlines(), name),
        source=text,
    )


# ---- Markdown


def to_html(source: str) -> Markup:
    """Return a text as HTML; each rule with what follows is a section."""
    parts: list[tuple[str, list[Token]]] = [("", [])]
    for node in SyntaxTreeNode(MARKDOWN.parse(source)).children:
        block = node.to_tokens()
        if node.type == "heading":
            name = re.sub(r"\W+", "-", block[1].content.lower()).strip("-")
            block[0].attrSet("id", name)
            parts.append(("", []))
        elif node.nester_tokens and (rule := RULE.match(block[1].content)):
            parts.append((rule[1], []))
        parts[-1][1].extend(block)
    return Markup("").join(part(*one) for one in parts)


def part(rule: str, tokens: list[Token]) -> Markup:
    """Return a rule with all that belongs to it, or other text."""
    html = Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))
    if not rule:
        return html
    return render("rule", rule=rule, text=html, beside=aside(rule))


def text(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    """Return text, with links to rules and chapters outside of links."""
    is_link = index and tokens[index - 1].type == "link_open"
    return (escape if is_link else cite)(tokens[index].content)


def fence(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    """Return an example, a question, or lines of code."""
    kind, _, head = tokens[index].info.partition(" ")
    source = tokens[index].content.rstrip("\n")
    if kind == "question":
        return question(head, source)
    if kind in ("match", "packet", "conversation", "client"):
        return figure(kind, head, source)
    return f'<pre tabindex="0">{cite(source)}</pre>'


def link_open(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    """Return the start of a link; without a page here it leads nowhere."""
    href = str(tokens[index].attrGet("href"))
    name, mark, anchor = href.rpartition("/")[2].partition("#")
    if name and "://" not in href:
        page = PAGES.get(name, name if name.endswith(".html") else "")
        href = page and page + mark + anchor
    return f'<a href="{escape(href)}">' if href else "<a>"


MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.add_render_rule("text", text)
MARKDOWN.add_render_rule("fence", fence)
MARKDOWN.add_render_rule("code_block", fence)
MARKDOWN.add_render_rule("link_open", link_open)
MARKDOWN.add_render_rule("table_open", lambda *_: WIDE)
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>")
