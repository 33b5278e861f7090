"""Markdown as HTML: rules beside their code and tests, examples drawn."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from conformance.examples import HEAD, Step, parse_step
from conformance.rules import SPEC, chapters
from traceability import ROOT, tests_by_rule

from . import drawing
from .drawing import HOLE, cite, page_of
from .listing import Listing

RULE = re.compile(r"\*\*\[([A-Z]+-\d+)\]\*\*")
TEXTS = [*chapters(), SPEC / "choices.md", SPEC / "traceability.md"]
PAGES = {  # of files that texts link to
    **{path.name: page_of(path.name) for path in TEXTS},
    "sbus.py": "sbus-0.html",
    "sbus_client.py": "sbus_client.html",
}
MARKDOWN = MarkdownIt("commonmark").enable("table")
tests = functools.cache(tests_by_rule)


@functools.cache
def listings() -> list[Listing]:
    """Return the server and the client."""
    return [Listing(ROOT / name) for name in ("sbus.py", "sbus_client.py")]


def aside(rule: str) -> str:
    """Return the code that keeps a rule, and the tests that cite it."""
    code = "".join(html for one in listings() for html in one.excerpts(rule))
    code = code.replace("<details>", "<details open>", 1)
    items = "".join(f"<li>{escape(name)}</li>" for name in tests()[rule])
    count = len(tests()[rule])
    summary = f"<summary>{count} test{'s' * (count != 1)}</summary>"
    return f"{code}<details>{summary}<ul>{items}</ul></details>"


# ---- Examples and questions


def figure(kind: str, head: str, source: str) -> str:
    """Return an example as it stands; the page runs those with a text."""
    found = HEAD.fullmatch(f" {head}")
    name, cited = (found[1], found[2]) if found else (head, "")
    lines = source.splitlines()
    notes = " ".join(line[1:] for line in lines if line[:1] == "#")
    note = "" if notes.startswith(" pattern ") else escape(notes)
    text = (
        "<details><summary>As text</summary>"
        f'<textarea aria-label="{name} as text" spellcheck="false" '
        f'rows="{len(lines) + 1}">{escape(source)}</textarea></details>'
    )
    return (
        f'<figure id="example-{name}" data-kind="{kind}"><figcaption>'
        f'<a href="#example-{name}">{name}</a>{cite(cited)}{note}'
        f"</figcaption>{drawn(kind, lines, name)}"
        f"{'' if kind == 'client' else text}</figure>"
    )


def drawn(kind: str, lines: list[str], name: str) -> str:
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
    label = f'role="region" tabindex="0" aria-label="{name}"'
    return f'<div class="drawing" {label}>{html}</div>'


def step_of(line: str) -> Step:
    """Return a step; that of a client who is asked for has the name '?'.

    One that is said for each of some numbers is one step here.
    """
    plain = re.sub(r"\{\d+\.\.\d+\}", "1", re.sub(f"^{HOLE}", "A", line))
    step = parse_step(plain)
    step = step._replace(argument=line.partition(step.verb)[2].strip())
    return step._replace(client="?") if line.startswith(HOLE) else step


def question(name: str, source: str) -> str:
    """Return a question, which the page checks by playing the answer."""
    asked, *lines = source.splitlines()
    text = "\n".join(lines)
    return (
        f'<form class="question" id="question-{name}">'
        f'<label for="answer-{name}">{escape(asked.lstrip("# "))}</label>'
        f"{drawn('conversation', lines, name)}"
        f'<p class="row"><input id="answer-{name}" autocomplete="off" '
        'spellcheck="false" autocapitalize="off"> <button>Check</button> '
        "<output></output></p>"
        f"<textarea hidden>{escape(text)}</textarea></form>"
    )


# ---- Markdown


def to_html(source: str) -> str:
    """Return a text as HTML; each rule with what follows is a section."""
    parts: list[tuple[str, list[Token]]] = [("", [])]
    for block in blocks(MARKDOWN.parse(source)):
        if block[0].type == "heading_open":
            name = re.sub(r"\W+", "-", block[1].content.lower()).strip("-")
            block[0].attrSet("id", name)
            parts.append(("", []))
        elif len(block) > 1 and (rule := RULE.match(block[1].content)):
            parts.append((rule[1], []))
        parts[-1][1].extend(block)
    return "".join(part(*one) for one in parts)


def blocks(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Return the tokens of each block."""
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def part(rule: str, tokens: list[Token]) -> str:
    """Return a rule with all that belongs to it, or other text."""
    html = str(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))
    if not rule:
        return html
    beside = f'<aside aria-label="What keeps {rule}">{aside(rule)}</aside>'
    return f'<section id="{rule}"><div>{html}</div>{beside}</section>'


def text(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    """Return text, with links to rules and chapters outside of links."""
    content = tokens[index].content
    if index and tokens[index - 1].type == "link_open":
        return escape(content)
    if content in drawing.rules():  # as in the matrix
        return drawing.link(content, content)
    pieces = re.split(r"\b(chapter [1-9])\b", content)
    pieces[::2] = map(cite, pieces[::2])
    pieces[1::2] = map(chapter_link, pieces[1::2])
    return "".join(pieces)


def chapter_link(words: str) -> str:
    """Return a link to a chapter."""
    page = page_of(chapters()[int(words[-1]) - 1].name)
    return f'<a href="{page}">{words}</a>'


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


MARKDOWN.add_render_rule("text", text)
MARKDOWN.add_render_rule("fence", fence)
MARKDOWN.add_render_rule("code_block", fence)
MARKDOWN.add_render_rule("link_open", link_open)
WIDE = (
    '<div class="wide" role="region" tabindex="0" aria-label="table"><table>'
)
MARKDOWN.add_render_rule("table_open", lambda *_: WIDE)
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>")
