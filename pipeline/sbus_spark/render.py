"""The page of a report.

It has no script, no link and no font of its own, so that it can be mailed,
printed, and opened from disk.
"""

from __future__ import annotations

import datetime
import html
import importlib
import io
from collections.abc import Iterable, Sequence
from typing import Any

from .common import SECOND, PipelineError, printable

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sbus: {table}</title>
<style>
:root {{ color-scheme: light }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto;
  padding: 1rem; color: #1c2733; background: #fff }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1.1rem }}
.about, small {{ color: #5b6875 }}
dl {{ display: grid; gap: .6rem; margin: 1rem 0; padding: 0;
  grid-template-columns: repeat(4, 1fr) }}
dl div {{ background: #f1f4f7; border-radius: .5rem; padding: .6rem .8rem }}
dt {{ font-size: .85rem; color: #5b6875 }}
dd {{ margin: 0; font-size: 1.25rem; font-weight: 600 }}
svg {{ display: block; width: 100%; max-width: 46rem; height: auto }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
td, th {{ text-align: right; padding: .25rem .6rem; white-space: nowrap;
  border-bottom: 1px solid #dde3e9; font-variant-numeric: tabular-nums }}
td:first-child, th:first-child {{ text-align: left; white-space: normal;
  overflow-wrap: anywhere; min-width: 9rem }}
section {{ break-inside: avoid }}
@media (max-width: 40rem) {{ dl {{ grid-template-columns: 1fr 1fr }} }}
@media print {{ body {{ font-size: 10pt; max-width: none; padding: 0 }}
  dl {{ grid-template-columns: repeat(4, 1fr) }}
  dl div {{ border: 1px solid #dde3e9 }} }}
</style>
<h1>Traffic of the bus</h1>
<p class="about">{table}<br>{first} to {last} UTC</p>
<dl>{totals}</dl>
{sections}
</html>
"""


def escape(text: object) -> str:
    """Return text for a page."""
    return html.escape(printable(text))


def unit(count: float) -> str:
    """Return a number of bytes for people."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if name == "B" else f"{count:.1f} {name}"
        count /= 1024
    return f"{count:.1f} TiB"


def clock(t: int) -> str:
    """Return a time for people."""
    moment = datetime.datetime.fromtimestamp(
        t // SECOND, datetime.timezone.utc
    )
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of a page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def rates(
    times: Sequence[dict[str, Any]], seconds: int, of: str
) -> tuple[list[datetime.datetime], list[float]]:
    """Return the edges of the spans of a chart, and the rate in each."""
    spans: dict[int, int] = {row["t"]: row[of] for row in times}
    step = seconds * SECOND
    starts = range(min(spans), max(spans) + step, step)
    edges = [
        datetime.datetime.fromtimestamp(t // SECOND, datetime.timezone.utc)
        for t in (*starts, starts[-1] + step)
    ]
    return edges, [spans.get(start, 0) / seconds for start in starts]


def time_format(length: datetime.timedelta) -> str:
    """Return how the times of a chart are written."""
    if length < datetime.timedelta(days=1):
        return "%H:%M:%S"
    return "%m-%d %H:%M" if length < datetime.timedelta(days=9) else "%Y-%m-%d"


def chart(times: Sequence[dict[str, Any]], seconds: int, of: str) -> str:
    """Return a chart over time, as SVG: messages or bytes a second.

    Raises: PipelineError if matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError:
        raise PipelineError(
            "a report needs matplotlib: pip install matplotlib, or use --json"
        ) from None
    from matplotlib import ticker
    from matplotlib.figure import Figure

    dates: Any = importlib.import_module("matplotlib.dates")
    edges, heights = rates(times, seconds, of)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=(6.5, 2.6))
        figure.subplots_adjust(left=0.16, right=0.97, bottom=0.2, top=0.95)
        axes = figure.add_subplot()
        axes.stairs(heights, dates.date2num(edges), fill=True, color="#2f6f9f")
        axes.xaxis_date()
        locator = dates.AutoDateLocator(minticks=2, maxticks=5)
        axes.xaxis.set_major_locator(locator)
        labels = dates.DateFormatter(time_format(edges[-1] - edges[0]))
        axes.xaxis.set_major_formatter(labels)
        axes.set_xlabel("UTC")
        axes.set_ylabel(f"{of} / s")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(
            ticker.EngFormatter("B") if of == "bytes" else "{x:,.0f}"
        )
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    image = out.getvalue()[out.getvalue().index("<svg") :]
    return image


def page(summary: dict[str, Any], table: str) -> str:
    """Return a report as a page of HTML that needs nothing else."""
    times, seconds = summary["times"], summary["seconds"]
    sections = {
        "Messages over time": chart(times, seconds, "messages"),
        "Bytes over time": chart(times, seconds, "bytes"),
        "Busiest keys": traffic_table("key", summary["keys"]),
        "Hosts": traffic_table("host", summary["hosts"]),
        "Gaps": gaps_table(summary["gaps"]),
    }
    return PAGE.format(
        table=escape(table),
        first=clock(summary["totals"]["first"]),
        last=clock(summary["totals"]["last"]),
        totals=totals_list(summary),
        sections="\n".join(
            f"<section><h2>{name}</h2>\n{body}</section>"
            for name, body in sections.items()
        ),
    )


def totals_list(summary: dict[str, Any]) -> str:
    """Return the totals on top of a page."""
    totals = summary["totals"]
    length = max(1.0, (totals["last"] - totals["first"]) / SECOND)
    shown = {
        "messages": f"{totals['messages']:,}",
        "bytes": unit(totals["bytes"]),
        "messages / s": f"{totals['messages'] / length:,.1f}",
        "keys": f"{summary['keys_total']:,}",
        "size, median": unit(totals["p50"]),
        "size, 99th percentile": unit(totals["p99"]),
        "size, largest": unit(totals["largest"]),
        "lost": f"{summary['lost']:,}",
    }
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>"
        for name, value in shown.items()
    )


def traffic_table(by: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return what a page says of traffic, by key or host."""
    header = (by, "messages", "bytes", "size, median", "99th percentile")
    sizes = ("bytes", "p50", "p99")
    return html_table(
        header,
        (
            (
                row[by] or "(empty)",
                f"{row['messages']:,}",
                *(unit(row[name]) for name in sizes),
            )
            for row in rows
        ),
    )


def gaps_table(found: Sequence[dict[str, Any]]) -> str:
    """Return what a page says of gaps."""
    if not found:
        return "<p>None: the recorders lost nothing.</p>"
    return html_table(
        ("recorder", "after its number", "lost", "before"),
        (
            (
                f"{gap['host']} {gap['rec']}",
                gap["after"],
                gap["lost"],
                clock(gap["t"]),
            )
            for gap in found
        ),
    )
