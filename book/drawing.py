"""Examples as HTML: tables, packets with marked parts, lanes of clients.

The generator draws them as they stand, and the player as they went.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from conformance.examples import CITED, FIELD, Step
from conformance.rules import Rule, read_rules

HOLE = "____"  # what a question asks for
KINDS = ("SUB", "UNSUB", "MSG", "CMSG")
WORDS = {  # of steps that are no packets
    "nothing": "receives nothing",
    "no packet": "receives no packet",
    "end": "finds the end: the server has closed",
    "close": "closes",
    "shut": "will send no more",
    "deaf": "will receive no more",
    "process": "is a process {}",
    "fill": "has its buffer full",
    "room": "room for {}",
    "wait": "{} seconds pass",
    "> end": "closes",
    "< end": "finds the end: the server has closed",
    "= nothing": "has no answer for now",
}
HEADS = {
    "match": ["pattern", "key", "selected"],
    "packet": ["packet", "kind", "parts"],
}


class Outcome(NamedTuple):
    """What a step, or a row of a table, led to."""

    wrong: str = ""
    decisions: tuple[str, ...] = ()  # of the server, in the words of -v
    got: str = ""  # what was received, as it would stand in an example


rules = functools.cache(read_rules)


def page_of(file: str) -> str:
    """Return the page of a chapter."""
    return file.replace(".md", ".html")


def link(rule_id: str, text: str) -> str:
    """Return a text as a link to a rule, if there is such a rule."""
    rule: Rule | None = rules().get(rule_id)
    if rule is None:
        return text
    place, title = f"{page_of(rule.file)}#{rule.id}", escape(rule.sentence)
    return f'<a class="id" href="{place}" title="{title}">{text}</a>'


def cite(text: str) -> str:
    """Return a text as HTML, in which ids in brackets are links."""
    return CITED.sub(lambda found: link(found[1], found[0]), escape(text))


def marked(source: str) -> str:
    """Return a text of an example with the parts of a packet marked.

    In a key or pattern '*' and '/' are.
    """
    is_quoted = len(source) > 1 and source[0] == source[-1] == '"'
    text = source[1:-1] if is_quoted else source
    word, space, rest = text.partition(" ")
    if word not in KINDS or not space:
        stars = re.sub("[*/]+", r"<b>\g<0></b>", escape(source))
        return f"<code>{stars}</code>"
    key, nul, load = rest.partition("\\0")
    return message(word=word + " ", key=key, nul=nul, load=load)


def message(**parts: str) -> str:
    """Return the parts of a packet or command, each marked as what it is."""
    html = "".join(
        f'<span class="{name}">{escape(part).replace("/", "/<wbr>")}</span>'
        for name, part in parts.items()
        if part or name == "key"
    )
    return f'<code class="message">{html}</code>'


def decided(outcome: Outcome | None) -> str:
    """Return what a server decided, with links to the rules."""
    if outcome is None:
        return ""
    html = "".join(f"<div>{cite(line)}</div>" for line in outcome.decisions)
    wrong = f"<strong>✗ {cite(outcome.wrong)}</strong>"
    return html + (wrong if outcome.wrong else "")


def frame(kind: str, heads: Sequence[str], rows: str, caption: str) -> str:
    """Return a table."""
    cells = "".join(f'<th scope="col">{head}</th>' for head in heads)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = f"<thead><tr>{cells}</tr></thead><tbody>{rows}</tbody>"
    return f'<table class="{kind}">{title}{body}</table>'


def table(
    kind: str, lines: Sequence[str], outcomes: Sequence[Outcome] = ()
) -> str:
    """Return the rows of a match or packet block."""
    html = ""
    for line, outcome in zip_longest(lines, outcomes):
        first, second, *rest = FIELD.findall(line)
        cells = [marked(first), marked(second), cite(" ".join(rest))]
        if outcome:
            cells[-1] += " ✗" if outcome.wrong else " ✓"
            cells.append(decided(outcome))
        answer = rest[0] if kind == "match" else ""
        row = "</td><td>".join(cells)
        html += f'<tr class="{escape(answer)}"><td>{row}</td></tr>'
    heads = HEADS[kind] + ["the server"] * bool(outcomes)
    return frame(kind, heads, html, "")


def lanes(
    steps: Sequence[Step],
    options: Sequence[str],
    outcomes: Sequence[Outcome] | None = None,
) -> str:
    """Return a conversation: a lane a client, and the server's at the right.

    Steps without an outcome, where there are outcomes, were not taken.
    """
    names = sorted({step.client for step in steps if step.client})
    html = ""
    for step, outcome in zip_longest(steps, outcomes or ()):
        state = "later" if outcomes is not None and not outcome else ""
        if outcome and outcome.wrong:
            state = "failed"
        html += f'<tr class="{state}">{lane_cells(step, names, outcome)}</tr>'
    caption = "sbusd " + " ".join(options) if options else ""
    return frame("lanes", [*names, "the server"], html, caption)


def lane_cells(step: Step, names: list[str], outcome: Outcome | None) -> str:
    """Return a row: what a client does, and what the server makes of it."""
    before = names.index(step.client) if step.client else 0
    is_sent = step.verb[0] == ">"
    is_packet = is_sent or bool(step.text)
    if is_packet:
        text = (outcome and not outcome.wrong and outcome.got) or step.argument
        way = "sends" if is_sent else "receives"
        said = f"<span>{way}</span> {marked(text)}"
    else:
        way = "does"
        word = step.argument if step.verb == "<" else step.verb
        what = WORDS.get(word, word).format(step.argument)
        said = f"<span>{escape(what)}</span>"
    wire = '<td class="wire"></td>' if is_packet else "<td></td>"
    return (
        "<td></td>" * before
        + f'<td class="{way}">{said}</td>'
        + wire * (len(names) - before - 1)
        + f'<td class="{"arrives" if is_sent else ""}">{decided(outcome)}</td>'
    )


def client_lanes(lines: Sequence[str]) -> str:
    """Return an example for clients: a program, its client, the server."""
    html = place = ""
    for line in lines:
        verb, _, rest = line.partition(" ")
        if verb == "server":
            place = f"the server is at: {rest}"
            continue
        is_packet = verb in ("<", ">")  # or what the program says or hears
        way = "receives" if verb in ("<", "=") else "sends"
        said = f"<span>{way}</span> "
        if rest and line in WORDS:
            said = f"<em>{WORDS[line]}</em>"
        elif is_packet:
            said += marked(rest)
        else:
            answers = line.lstrip("= ").split(" | ")
            said += " or ".join(map(command, answers))
        arrow = "arrives" if way == "sends" else ""
        cells = f'<td class="{way}">{said}</td><td class="{arrow}"></td>'
        row = "<td></td>" + cells if is_packet else cells + "<td></td>"
        html += f"<tr>{row}</tr>"
    heads = ["the program", "its client", "the server"]
    return frame("lanes", heads, html, place)


def command(text: str) -> str:
    """Return what a client is told, or answers, with its parts marked."""
    word, *texts = FIELD.findall(text)
    parts = zip(("key", "load"), (f" {part}" for part in texts))
    return message(word=word, **dict(parts))


def card(name: str, facts: dict[str, object]) -> str:
    """Return what is known of a client."""
    items = "".join(
        f"<div><dt>{what}</dt><dd>{escape(str(fact))}</dd></div>"
        for what, fact in facts.items()
        if fact != ""
    )
    inner = f"<h3>{name}</h3><dl>{items}</dl>"
    return f'<article class="{facts["is"]}">{inner}</article>'
