"""Shows what a search of every order comes to, in the pages and in a page.

Sphinx prints what it comes to below the conversations of a lesson, and the
worker of the pages does the same for a conversation that somebody has edited.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from html import escape

from orders import End, Report, try_orders

ENDS_SHOWN = 8  # of kinds of ends, those of most orders


def example_html(
    kind: str,
    name: str,
    head: str,
    text: str,
    more: str = "",
    is_open: bool = True,
    **data: object,
) -> str:
    """Return an example, which book.js draws and runs."""
    facts = {"kind": kind, "name": name, **data}
    said = "".join(f' data-{k}="{escape(str(v))}"' for k, v in facts.items())
    return (
        f'<details class="example"{said}{" open" * is_open}>{head}'
        f'<div id="example-{name}" class="drawing"><pre>{escape(text)}</pre>'
        f"</div>{more}</details>"
    )


def ends_html(text: str, name: str) -> str:
    """Return what a search of every order finds, folded."""
    *_, report = try_orders(text)
    return (
        "<details><summary>What the search finds</summary>"
        f'<div class="ends">{report_html(report, name)}</div></details>'
    )


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def items(facts: tuple[str, ...]) -> str:
    """Return facts as a list."""
    return f"<ul>{''.join(f'<li>{escape(fact)}' for fact in facts)}</ul>"


def report_html(report: Report, name: str) -> str:
    """Return how many orders there are, and a way to each kind of end."""
    orders = counted(report.orders, "order")
    said = f"<p>{orders}, {counted(report.end_states, 'end state')}.</p>"
    if report.always:
        said += f"<p>In every order:</p>{items(report.always)}"
    for number, end in enumerate(report.ends[:ENDS_SHOWN], 1):
        said += end_html(end, report, f"{name}-end-{number}")
    if len(report.ends) > ENDS_SHOWN:
        left_out = counted(len(report.ends) - ENDS_SHOWN, "kind")
        said += f"<p>And {left_out} of ends, each in fewer orders.</p>"
    return said


def end_html(end: End, report: Report, name: str) -> str:
    """Return what a kind of end has, and the shortest way to it."""
    title = f"In {end.orders:,} of {counted(report.orders, 'order')}"
    head = f"<summary>{title}</summary>{items(end.facts) * bool(end.facts)}"
    text = "\n".join(end.lines)
    return example_html("conversation", name, head, text, steps=-1)


def search(text: str, name: str) -> Generator[str, None, str]:
    """Yield how far a search is; return what it comes to, as JSON."""
    try:
        for report in try_orders(text):
            yield f"{report.states:,} states are tried …"
    except ValueError as error:
        return json.dumps({"said": f"{error}."})
    return json.dumps({"html": report_html(report, name)})
