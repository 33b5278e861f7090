"""Examples as HTML: tables, packets with marked parts, lanes of clients.

The generator draws them as they stand, and the player as they went.  What
they look like is in templates/; what they show is here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from conformance.examples import FIELD, Step, parse_step
from conformance.examples import escape as shown
from conformance.rules import chapters, read_rules

RULES = read_rules()
HOLE = "____"  # what a question asks for
CITED = re.compile(r"\[([A-Z]+-\d+)\]|\A([A-Z]+-\d+)\Z|\b[Cc]hapter ([1-9])\b")
PACKET = re.compile(
    r'"?(?P<word>(UN)?SUB |C?MSG )(?P<key>.*?)((?P<nul>\\0)(?P<load>.*?))?"?'
)
PARTS = ("key", "load")  # of what a client is told, or answers


class Outcome(NamedTuple):
    """What a step, or a row of a table, led to."""

    wrong: str = ""
    decisions: tuple[str, ...] = ()  # of the server, in the words of -v
    got: str = ""  # what was received, as it would stand in an example


class Turn(NamedTuple):
    """What one does in its lane: a packet with its parts, or something else.

    There is no outcome of what was not done.
    """

    lane: int  # from 0
    does: str  # 'sends', 'receives', or what the template has words for
    said: Sequence[dict[str, str]] = ()
    far: int = 0  # the lane that a packet comes from, or goes to
    argument: str = ""
    outcome: Outcome | None = Outcome()


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
    if found[3]:
        page = page_of(chapters()[int(found[3]) - 1].name)
        return Markup('<a href="{}">{}</a>').format(page, found[0])
    if not (rule := RULES.get(found[1] or found[2])):
        return Markup(found[0])
    html = Markup('<a class="id" href="{}#{}" title="{}">{}</a>')
    return html.format(page_of(rule.file), rule.id, rule.sentence, found[0])


def parts_of(text: str) -> dict[str, str]:
    """Return a text of an example as the parts of a packet.

    If it is none, it is a key or pattern.
    """
    found = PACKET.fullmatch(text)
    return found.groupdict("") if found else {"plain": text}


def stars(text: str) -> Markup:
    """Return a key or pattern with its '*' and '/' marked."""
    return Markup(re.sub("[*/]+", r"<b>\g<0></b>", str(escape(text))))


TEMPLATES = Environment(
    autoescape=True,
    loader=PackageLoader("book"),
    lstrip_blocks=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)
TEMPLATES.filters.update(cite=cite, parts=parts_of, stars=stars, text=shown)


def render(template: str, **facts: object) -> Markup:
    """Return a template filled in."""
    return Markup(TEMPLATES.get_template(f"{template}.html").render(facts))


def drawn(kind: str, lines: Sequence[str]) -> Markup:
    """Return a match table, packets, or lanes, as they stand."""
    if kind == "client":
        return client_lanes(lines)
    if kind in ("match", "packet"):
        return table(kind, lines)
    steps = [step_of(line) for line in lines]
    options = [step.argument for step in steps if step.verb == "server"]
    taken = [(step, Outcome()) for step in steps if step.verb != "server"]
    return lanes(taken, options)


def step_of(line: str) -> Step:
    """Return a step; that of a client who is asked for has the name '?'.

    One that is said for each of some numbers is one step here.
    """
    plain = re.sub(r"\{\d+\.\.\d+\}", "1", re.sub(f"^{HOLE}", "A", line))
    step = parse_step(plain)
    step = step._replace(argument=line.partition(step.verb)[2].strip())
    return step._replace(client="?") if line.startswith(HOLE) else step


def table(
    kind: str, lines: Sequence[str], outcomes: Sequence[Outcome] = ()
) -> Markup:
    """Return the rows of a match or packet block."""
    fields = (FIELD.findall(line) for line in lines)
    rows = list(zip_longest(fields, outcomes))
    return render("table", kind=kind, rows=rows, is_played=bool(outcomes))


def lanes(
    taken: Sequence[tuple[Step, Outcome | None]], options: Sequence[str]
) -> Markup:
    """Return a conversation: a lane a client, and the server's at the right.

    What has no outcome was not taken.
    """
    names = sorted({step.client for step, _ in taken if step.client})
    turns = [turn_of(step, names, outcome) for step, outcome in taken]
    caption = " ".join(["sbusd", *options]) if options else ""
    heads = [*names, "the server"]
    return render("lanes", heads=heads, turns=turns, caption=caption)


def turn_of(step: Step, names: list[str], outcome: Outcome | None) -> Turn:
    """Return what a client does, and what the server makes of it."""
    lane = names.index(step.client) if step.client else 0
    said, does = step.argument, "sends" if step.verb[0] == ">" else "receives"
    if does == "receives" and not step.text:
        does = said if step.verb == "<" else step.verb
        return Turn(lane, does, argument=said, outcome=outcome)
    if outcome and outcome.got and not outcome.wrong:
        said = outcome.got
    return Turn(lane, does, [parts_of(said)], len(names), outcome=outcome)


def client_lanes(lines: Sequence[str]) -> Markup:
    """Return an example for clients: a program, its client, the server."""
    turns, caption = [], ""
    for line in lines:
        verb, _, rest = line.partition(" ")
        does = "receives" if verb in ("<", "=") else "sends"
        if verb == "server":
            caption = f"the server is at: {rest}"
        elif verb in ("<", ">"):
            turns.append(Turn(1, does, [parts_of(rest)], 2, line))
        else:  # what the program says or hears
            said = [command(one) for one in line.lstrip("= ").split(" | ")]
            turns.append(Turn(0, does, said, 1, line))
    heads = ["the program", "its client", "the server"]
    return render("lanes", heads=heads, turns=turns, caption=caption)


def command(text: str) -> dict[str, str]:
    """Return the parts of what a client is told, or answers."""
    word, *texts = FIELD.findall(text)
    return {"word": word, **dict(zip(PARTS, (f" {one}" for one in texts)))}


def cards(clients: dict[str, Any]) -> Markup:
    """Return what the server knows of each client."""
    names = {client: name for name, client in clients.items()}
    return render("cards", clients=clients, names=names)
