"""Examples as HTML: tables, packets with marked parts, lanes of clients.

The generator draws them as they stand, and the player as they went.  What
they look like is in templates/; what they show is here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from conformance.examples import FIELD, Step
from conformance.rules import chapters, read_rules

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
    "wait": "wait {} s",
    "> end": "closes",
    "< end": "finds the end: the server has closed",
    "= nothing": "has no answer for now",
}
HEADS = {
    "match": ["pattern", "key", "selected"],
    "packet": ["packet", "kind", "parts"],
}
CITED = re.compile(
    r"\[(?P<id>[A-Z]+-\d+)\]|\b[Cc]hapter (?P<chapter>[1-9])\b"
    r"|\A(?P<only>[A-Z]+-\d+)\Z"
)
PARTS = ("key", "load")  # of what a client is told, or answers


class Outcome(NamedTuple):
    """What a step, or a row of a table, led to."""

    wrong: str = ""
    decisions: tuple[str, ...] = ()  # of the server, in the words of -v
    got: str = ""  # what was received, as it would stand in an example


class Turn(NamedTuple):
    """What one does in its lane: a packet with its parts, or words."""

    lane: int  # from 0
    does: str  # 'sends' or 'receives', or nothing of the kind
    far: int  # the lane that a packet comes from, or goes to
    said: Sequence[dict[str, str]] = ()
    words: str = ""
    outcome: Outcome | None = None
    state: str = ""  # of the row: 'failed', or 'later' if it was not taken


rules = functools.cache(read_rules)


def page_of(file: str) -> str:
    """Return the page of a chapter."""
    return file.replace(".md", ".html")


def cite(text: str) -> Markup:
    """Return a text in which ids in brackets, and chapters, are links.

    An id that is all of the text needs no brackets.
    """
    return Markup(CITED.sub(linked, escape(text)))


def linked(found: re.Match[str]) -> Markup:
    """Return a citation as a link, if there is such a rule."""
    if found["chapter"]:
        page = page_of(chapters()[int(found["chapter"]) - 1].name)
        return Markup('<a href="{}">{}</a>').format(page, found[0])
    rule = rules().get(found["only"] or found["id"])
    if not rule:
        return Markup(found[0])
    html = Markup('<a class="id" href="{}#{}" title="{}">{}</a>')
    return html.format(page_of(rule.file), rule.id, rule.sentence, found[0])


def parts_of(source: str) -> dict[str, str]:
    """Return a text of an example as the parts of a packet.

    If it is none, it is a key or pattern.
    """
    is_quoted = len(source) > 1 and source[0] == source[-1] == '"'
    text = source[1:-1] if is_quoted else source
    word, space, rest = text.partition(" ")
    if word not in KINDS or not space:
        return {"plain": source}
    key, nul, load = rest.partition("\\0")
    return {"word": word + " ", "key": key, "nul": nul, "load": load}


def stars(text: str) -> Markup:
    """Return a key or pattern with its '*' and '/' marked."""
    return Markup(re.sub("[*/]+", r"<b>\g<0></b>", escape(text)))


TEMPLATES = Environment(
    autoescape=True,
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    lstrip_blocks=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)
TEMPLATES.filters.update(cite=cite, parts=parts_of, stars=stars)


def render(template: str, **facts: object) -> Markup:
    """Return a template filled in."""
    html = TEMPLATES.get_template(f"{template}.html").render(facts)
    return Markup(html.strip())


def table(
    kind: str, lines: Sequence[str], outcomes: Sequence[Outcome] = ()
) -> Markup:
    """Return the rows of a match or packet block."""
    heads = HEADS[kind] + ["the server"] * bool(outcomes)
    fields = (FIELD.findall(line) for line in lines)
    rows = [
        (cells[:2], " ".join(cells[2:]), outcome)
        for cells, outcome in zip_longest(fields, outcomes)
    ]
    return render("table", kind=kind, heads=heads, rows=rows)


def lanes(
    steps: Sequence[Step],
    options: Sequence[str],
    outcomes: Sequence[Outcome] | None = None,
) -> Markup:
    """Return a conversation: a lane a client, and the server's at the right.

    Steps without an outcome, where there are outcomes, were not taken.
    """
    names = sorted({step.client for step in steps if step.client})
    turns = []
    for step, outcome in zip_longest(steps, outcomes or ()):
        turn = turn_of(step, names, outcome)
        if outcomes is not None and not outcome:
            turn = turn._replace(state="later")
        turns.append(turn)
    caption = "sbusd " + " ".join(options) if options else ""
    heads = [*names, "the server"]
    return render("lanes", heads=heads, turns=turns, caption=caption)


def turn_of(step: Step, names: list[str], outcome: Outcome | None) -> Turn:
    """Return what a client does, and what the server makes of it."""
    lane = names.index(step.client) if step.client else 0
    state = "failed" if outcome and outcome.wrong else ""
    if step.verb[0] == ">" or step.text:
        does = "sends" if step.verb[0] == ">" else "receives"
        text = (outcome and not state and outcome.got) or step.argument
        said, words = [parts_of(text)], ""
    else:
        word = step.argument if step.verb == "<" else step.verb
        said, words = [], WORDS.get(word, word).format(step.argument)
        does = ""
    return Turn(lane, does, len(names), said, words, outcome, state)


def client_lanes(lines: Sequence[str]) -> Markup:
    """Return an example for clients: a program, its client, the server."""
    turns, caption = [], ""
    for line in lines:
        verb, _, rest = line.partition(" ")
        if verb == "server":
            caption = f"the server is at: {rest}"
            continue
        lane = int(verb in ("<", ">"))  # or what the program says or hears
        does = "receives" if verb in ("<", "=") else "sends"
        words = WORDS.get(line, "") if rest else ""
        if lane:
            said = [parts_of(rest)]
        else:
            said = [command(one) for one in line.lstrip("= ").split(" | ")]
        turns.append(Turn(lane, does, lane + 1, said, words))
    heads = ["the program", "its client", "the server"]
    return render("lanes", heads=heads, turns=turns, caption=caption)


def command(text: str) -> dict[str, str]:
    """Return the parts of what a client is told, or answers."""
    word, *texts = FIELD.findall(text)
    return {"word": word, **dict(zip(PARTS, (f" {one}" for one in texts)))}
