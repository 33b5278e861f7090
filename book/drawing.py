"""Examples as HTML: lanes with arrows, match tables, packets in parts.

The extension draws them as they stand, the player as they went.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

FIELD = re.compile(r'((?:\w+=)?"(?:\\.|[^"\\])*"|\S+)\s*')
STEP = re.compile(r"(?:([A-Z]|____) )?(>>?|<|=|\w+) ?(.*)")
PACKET = re.compile(r'"?((?:UN)?SUB|C?MSG) (.*?)(?:(\\0|\\x00)(.*?))?"?')
NUL = '<span class="nul">\\x00</span>'
NO_PACKETS = ("end", "nothing", "no packet")
DOES = {  # what a line says of a client, or of all
    ">": "sends",
    ">>": "sends, while the server is busy,",
    "<": "receives",
    "close": "closes",
    "shut": "will send no more",
    "deaf": "will receive no more",
    "process": "is a process {}",
    "fill": "has its buffer full",
    "room": "has room for {}",
    "wait": "{} s pass",
    "server": "The server is started with {}",
    "then": "In the end nobody receives anything more",
}
ARROWS = {  # the heads, at the right and the left end of a row
    "sends": '<svg x="100%"><path d="M-10 1 0 6-10 11z"/></svg>',
    "receives": '<path d="M10 1 0 6 10 11z"/>',
}
HEADS = {"match": ("Pattern", "Key", "Match"), "packet": ("Packet", "Kind")}


class Outcome(NamedTuple):
    """What a line of an example led to."""

    wrong: str = ""
    decisions: tuple[str, ...] = ()  # of the server, in the words of -v
    got: str = ""  # what was received, as it would stand in an example


def drawn(
    kind: str, lines: Sequence[str], outcomes: Sequence[Outcome] | None = None
) -> str:
    """Return an example as HTML; a line without its outcome was not taken."""
    if kind in HEADS:
        return table(kind, lines, outcomes or ())
    outcomes = [Outcome()] * len(lines) if outcomes is None else outcomes
    names = {found[1] for line in lines if (found := STEP.match(line))}
    lanes = {n: f"{1.1 + 2.4 * i}rem" for i, n in enumerate(sorted(names - {None}))}
    lanes = {"Program": "2rem", "Client": "50%"} if kind == "client" else lanes
    lanes["Server"] = "100% - 2.2rem"
    heads = (f'<b style="left:calc({at})">{n}</b>' for n, at in lanes.items())
    poles = (f'<rect style="x:calc({at})"/>' for at in lanes.values())
    rows = (row(*one, lanes) for one in zip_longest(lines, outcomes))
    return (
        f'<div class="heads" aria-hidden="true">{"".join(heads)}</div>'
        '<div class="lanes"><svg class="poles" aria-hidden="true">'
        f"{''.join(poles)}</svg><ol>{''.join(rows)}</ol></div>"
    )


def row(line: str, outcome: Outcome | None, lanes: dict[str, str]) -> str:
    """Return one line of a conversation, from one lane to another."""
    found = STEP.match(line)
    who, verb, said = found.groups() if found else ("", line, "")
    left, right = lanes.get(who, "2rem"), lanes["Server"]
    if "Program" in lanes and verb in ("<", ">"):
        who, left = "Client", "50%"
    elif "Program" in lanes:
        who, right = "Program", "50%"
        verb, said = ("<", said) if verb == "=" else (">", line)
    kind = {">": "sends", "<": "receives"}.get(verb[0], "acts")
    kind = "acts" if said in ("nothing", "no packet") else kind
    said = outcome.got if outcome and outcome.got and "{" in said else said
    shown = DOES.get(verb, verb).format(f"<code>{escape(said)}</code>")
    if verb[0] in "<>":
        is_word = said in NO_PACKETS
        shown += f" <em>{said}</em>" if is_word else f" {packet(said)}"
    if kind in ARROWS:
        line = f'<line x2="100%" y1="6" y2="6"/>{ARROWS[kind]}'
        shown += f'<svg class="arrow" aria-hidden="true">{line}</svg>'
    style = f"margin:0 calc(100% - ({right})) 0 calc({left})"
    mode = f"{kind}{' busy' * (verb == '>>')}{state(outcome)}"
    who = f'<span class="who">{who}</span> ' if who else ""
    return f'<li class="{mode}" style="{style}">{who}{shown}{led(outcome)}</li>'


def state(outcome: Outcome | None) -> str:
    """Return the class of a line that failed, or was not taken."""
    return " later" if not outcome else " failed" if outcome.wrong else ""


def led(outcome: Outcome | None) -> str:
    """Return what the server did, and what is wrong."""
    made, wrong = (outcome.decisions, outcome.wrong) if outcome else ((), "")
    shown = "".join(f'<span class="made">{escape(one)}</span>' for one in made)
    return shown + (f"<strong>✗ {escape(wrong)}</strong>" if wrong else "")


def packet(text: str) -> str:
    """Return a packet with its parts, or another text, as code."""
    found = PACKET.fullmatch(text)
    if not found:
        return f"<code>{marked(text)}</code>"
    parts = f'<span class="kind">{found[1]}</span>'
    parts += f'<span class="key">{marked(found[2])}</span>'
    load = f'{NUL}<span class="load">{marked(found[4] or "")}</span>'
    return f'<code class="packet">{parts}{load if found[3] else ""}</code>'


def marked(text: str) -> str:
    """Return a text whose NUL bytes, and its '*' and '/', can be seen."""
    text = re.sub(r"\\0|\\x00", lambda _: NUL, escape(text))
    return re.sub(r"(?<!<)([*/]+)", r"<b>\1</b><wbr>", text)


def table(
    kind: str, lines: Sequence[str], outcomes: Sequence[Outcome]
) -> str:
    """Return the rows of a match or packet block."""
    rows = ""
    for line, outcome in zip_longest(lines, outcomes):
        first, second, *rest = [*FIELD.findall(line), ""]
        more = "".join(rest)
        cells = [first, second, more] if kind == "match" else [first]
        html = "".join(f"<td>{packet(one)}</td>" for one in cells[:2])
        fine = " ✓" * (outcome is not None and not outcome.wrong)
        said = more if kind == "match" else f"{second} {' '.join(rest)}"
        html += f"<td>{escape(said)}{fine}{led(outcome)}</td>"
        mode = more if kind == "match" else second
        rows += f'<tr class="{mode}{state(outcome) * bool(outcomes)}">{html}</tr>'
    heads = "".join(f'<th scope="col">{one}</th>' for one in HEADS[kind])
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead>{rows}</table>'
