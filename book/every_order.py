"""Shows what a search of every order comes to.

Sphinx prints it below the conversations of a lesson.  The worker of the pages
does the same for conversations that somebody has written or edited.
"""

from __future__ import annotations

from html import escape

from orders import Report, try_orders

ENDS_SHOWN = 8  # kinds of ends, those of most orders


def example_html(
    head: str, text: str, more: str = "", is_open: bool = True, **data: object
) -> str:
    """Return an example, which book.js draws and runs.

    data has its kind and name, and what else book.js is to know.
    """
    said = "".join(f' data-{k}="{escape(str(v))}"' for k, v in data.items())
    return (
        f'<details class="example"{said}{" open" * is_open}>{head}'
        f'<div id="example-{data["name"]}" class="drawing">'
        f"<pre>{escape(text)}</pre></div>{more}</details>"
    )


def ends_html(text: str, name: str) -> str:
    """Return what a search of every order finds, folded."""
    *_, report = try_orders(text)
    head = "<details><summary>What the search finds</summary>"
    return (
        f'{head}<div class="ends">{report_html(report, name)}</div></details>'
    )


def report_html(report: Report, name: str) -> str:
    """Return how many orders there are, and a way to each kind of end."""
    counts = f"Orders: {report.orders:,}. End states: {report.end_states:,}."
    said = f"<p>{counts}</p>{facts_html('In every order:', report.always)}"
    for number, end in enumerate(report.ends[:ENDS_SHOWN], 1):
        title = f"In {end.orders:,} of {report.orders:,} orders"
        head = f"<summary>{title}</summary>{facts_html('', end.facts)}"
        end_name, text = f"{name}-end-{number}", "\n".join(end.lines)
        said += example_html(head, text, kind="conversation", name=end_name)
    left_out = len(report.ends) - ENDS_SHOWN
    more = f"<p>Other kinds of ends, in fewer orders: {left_out:,}.</p>"
    return said + more * (left_out > 0)


def facts_html(title: str, facts: tuple[str, ...]) -> str:
    """Return facts as a list with a title, or nothing."""
    rows = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return f"<p>{title}</p><ul>{rows}</ul>" if facts else ""
