"""The page of a report.

It has no link, image or font of its own, so that it can be mailed, printed,
and opened from disk.  Its script only sorts and filters the table of keys.
"""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .common import SECOND, printable

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sbus: {table}</title>
<style>
:root {{ color-scheme: light dark; --text: #1c2733; --page: #fff;
  --quiet: #5b6875; --box: #f1f4f7; --line: #dde3e9; --bar: #2f6f9f }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #dbe3ea;
  --page: #12181e; --quiet: #93a1ae; --box: #1d262e; --line: #2c3843;
  --bar: #66a8d9 }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto;
  padding: 1rem; color: var(--text); background: var(--page) }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1.1rem }}
h3 {{ font-size: .9rem; font-weight: 400; margin: 0; overflow-wrap: anywhere }}
.about, small {{ color: var(--quiet) }}
dl {{ display: grid; gap: .6rem; margin: 1rem 0; padding: 0;
  grid-template-columns: repeat(4, 1fr) }}
dl div {{ background: var(--box); border-radius: .5rem; padding: .6rem .8rem }}
dt {{ font-size: .85rem; color: var(--quiet) }}
dd {{ margin: 0; font-size: 1.25rem; font-weight: 600 }}
svg {{ display: block; width: 100%; height: auto; font-size: 11px }}
svg text {{ fill: var(--quiet) }} svg .bar {{ fill: var(--bar) }}
svg .all {{ fill: transparent }} svg g:hover .all {{ fill: var(--box) }}
.charts {{ display: grid; gap: 1rem; grid-template-columns: 1fr 1fr }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
td, th {{ text-align: right; padding: .25rem .6rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }}
td:first-child, th:first-child {{ text-align: left; white-space: normal;
  overflow-wrap: anywhere; min-width: 9rem }}
th button {{ all: unset; cursor: pointer }}
th button:focus-visible {{ outline: 2px solid var(--bar) }}
input {{ font: inherit; padding: .2rem .5rem; width: 20rem; max-width: 100% }}
section {{ break-inside: avoid }}
@media (max-width: 40rem) {{ dl {{ grid-template-columns: 1fr 1fr }}
  .charts {{ grid-template-columns: 1fr }} }}
@media print {{ body {{ font-size: 10pt; max-width: none; padding: 0 }}
  input {{ display: none }} dl div {{ border: 1px solid var(--line) }} }}
</style>
<h1>Traffic of the bus</h1>
<p class="about">{table}<br>{first} to {last} UTC</p>
<dl>{totals}</dl>
{sections}
<script type="application/json" id="keys">{keys}</script>
<script>{script}</script>
</html>
"""
# Shows of the keys those that hold a text, in the order of a column
SCRIPT = """
const rows = JSON.parse(document.getElementById("keys").textContent);
const body = document.querySelector("#busiest tbody");
const input = document.querySelector("#busiest input");
const about = document.querySelector("#busiest small");
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
let column = 1, sign = -1;
function unit(count) {
  let at = 0;
  while (count >= 1024 && at < 4) { count /= 1024; at++; }
  return count.toFixed(at ? 1 : 0) + " " + units[at];
}
function show() {
  const found = rows.filter(row => row[0].includes(input.value));
  const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
  found.sort((a, b) => sign * compare(a[column], b[column]));
  body.replaceChildren(...found.slice(0, SHOWN).map(row => {
    const line = document.createElement("tr");
    row.forEach((cell, at) => {
      line.insertCell().textContent = at === 0 ? cell || "(empty)"
        : at === 1 ? cell.toLocaleString("en") : unit(cell);
    });
    return line;
  }));
  const more = found.length - SHOWN;
  about.textContent = more > 0 ? `and ${more.toLocaleString("en")} more` : "";
}
document.querySelectorAll("#busiest th").forEach((head, at) => {
  const button = document.createElement("button");
  button.textContent = head.textContent;
  button.onclick = () => {
    sign = at === column ? -sign : at ? -1 : 1;
    column = at;
    show();
  };
  head.replaceChildren(button);
});
input.hidden = false;
input.oninput = show;
show();
"""
SHOWN_MAX = 100  # keys in the table at once
KEYS_BYTES_MAX = 700_000  # so that a page stays below a megabyte
LARGE, SMALL = (600, 140), (300, 90)  # charts: width and height


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
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(
    heights: Sequence[float],
    told: Sequence[str],
    ends: tuple[str, str],
    shape: tuple[int, int],
) -> str:
    """Return a chart of bars as SVG; each tells its value where it is asked.

    *told* is what they tell, *ends* stand below the first and the last, and
    *shape* is how wide and high the chart is.
    """
    width, bottom = shape
    most, floor = max(heights), bottom - 18
    step = width / len(heights)
    drawn = []
    for at, (height, text) in enumerate(zip(heights, told)):
        size = height / most * (floor - 16) if most else 0.0
        x, wide = at * step, max(step - 1, step * 0.8)
        drawn.append(
            f"<g><title>{escape(text)}</title>"
            f'<rect class="all" x="{x:.1f}" y="0" width="{step:.1f}"'
            f' height="{floor}"/><rect class="bar" x="{x:.1f}"'
            f' y="{floor - size:.1f}" width="{wide:.1f}"'
            f' height="{size:.1f}"/></g>'
        )
    first, last = map(escape, ends)
    top = escape(told[heights.index(most)].rpartition(": ")[2])
    return (
        f'<svg viewBox="0 0 {width} {bottom}" role="img">{"".join(drawn)}'
        f'<text x="0" y="11">{top}</text>'
        f'<text x="0" y="{bottom - 4}">{first}</text>'
        f'<text x="{width}" y="{bottom - 4}" text-anchor="end">{last}</text>'
        "</svg>"
    )


def over_time(
    times: Sequence[dict[str, Any]],
    span: tuple[int, int, int],
    of: str,
    shape: tuple[int, int] = LARGE,
) -> str:
    """Return a chart over time: messages or bytes a second.

    *span* is when the first and the last bar begin, in nanoseconds since
    1970, and how long each is, in seconds.
    """
    first, last, seconds = span
    found: dict[int, int] = {row["t"]: row[of] for row in times}
    starts = range(first, last + 1, seconds * SECOND)
    heights = [found.get(t, 0) / seconds for t in starts]
    show = unit if of == "bytes" else "{:,.1f} messages".format
    told = [f"{clock(t)}: {show(one)} / s" for t, one in zip(starts, heights)]
    ends = (clock(first), clock(last + seconds * SECOND))
    return bars(heights, told, ends, shape)


def size_chart(sizes: Sequence[dict[str, Any]]) -> str:
    """Return how many messages are how large, by powers of two."""
    counts: dict[int, int] = {row["power"]: row["messages"] for row in sizes}
    powers = range(max(counts) + 1)
    edges = [0, *(1 << power for power in powers)]
    heights = [counts.get(power, 0) for power in powers]
    told = [
        f"below {unit(edges[power + 1])}: {count:,} messages"
        for power, count in zip(powers, heights)
    ]
    return bars(heights, told, ("0 B", unit(edges[-1])), LARGE)


def page(summary: dict[str, Any], table: str) -> str:
    """Return a report as a page of HTML that needs nothing else."""
    times, seconds = summary["times"], summary["seconds"]
    span = (times[0]["t"], times[-1]["t"], seconds)
    by_key = "".join(
        f"<div><h3>{escape(key or '(empty)')}</h3>"
        + over_time(rows, span, "messages", SMALL)
        + "</div>"
        for key, rows in summary["key_times"].items()
    )
    sections = {
        "Messages over time": over_time(times, span, "messages"),
        "Bytes over time": over_time(times, span, "bytes"),
        "Sizes": size_chart(summary["sizes"]),
        "Busiest keys over time": f'<div class="charts">{by_key}</div>',
        "Busiest keys": keys_table(summary["keys"]),
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
        keys=keys_as_json(summary["keys"]),
        script=SCRIPT.replace("SHOWN", str(SHOWN_MAX)),
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


def keys_table(keys: Sequence[dict[str, Any]]) -> str:
    """Return the busiest keys; the script shows others of them."""
    shown = traffic_table("key", keys[:SHOWN_MAX])
    field = '<input hidden placeholder="only keys with" aria-label="filter">'
    return f'<div id="busiest">{field}{shown}<small></small></div>'


def keys_as_json(keys: Sequence[dict[str, Any]]) -> str:
    """Return keys with their numbers, the busiest, as far as there is room."""
    rows: list[str] = []
    left = KEYS_BYTES_MAX
    for row in keys:
        names = ("messages", "bytes", "p50", "p99")
        text = json.dumps([printable(row["key"]), *(row[n] for n in names)])
        left -= len(text) + 1
        if left < 0:
            break
        rows.append(text.replace("<", "\\u003c"))
    return f"[{','.join(rows)}]"


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
