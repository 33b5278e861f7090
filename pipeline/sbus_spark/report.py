"""Reports: the traffic in a table, in numbers, and as a page of charts.

The limits below bound what reaches the driver, however large the table is.
The page is one file of HTML that runs and fetches nothing.
"""

from __future__ import annotations

import datetime
import html
import importlib.resources
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .inputs import InputError, key_text, printable

SHOWN_MAX = 100  # keys and hosts
CHARTED_MAX = 8  # keys over time
BARS_MAX = 120
SECOND = 1_000_000  # microseconds
MINUTE, HOUR, DAY = 60, 3_600, 86_400  # seconds
BARS = {
    "1 second": 1,
    "10 seconds": 10,
    "1 minute": MINUTE,
    "10 minutes": 10 * MINUTE,
    "1 hour": HOUR,
    "6 hours": 6 * HOUR,
    "1 day": DAY,
    "10 days": 10 * DAY,
    "365 days": 365 * DAY,
}
# The least size of as many binary digits
LOW = "if(size = 0, 0L, shiftleft(1L, length(bin(size)) - 1))"
EMPTY = "the table is empty: nothing was ingested, or all of it has expired"


def summarize(messages: DataFrame) -> dict[str, Any]:
    """Return what a page shows of messages, as values for JSON.

    It reads the columns host, recorder, n, time, key and size.  Times are in
    microseconds since 1970 (UTC), sizes and `bytes` in bytes of payload.

    | name | value |
    |---|---|
    | totals | traffic, the `largest` size, `first` and `last` time |
    | keys | traffic by `key`, the SHOWN_MAX busiest first |
    | hosts | volume by `host` and what it `lost`, the worst, then busiest |
    | keys_total, hosts_total | how many there are |
    | lost | how many messages all hosts lost |
    | sizes | volume by size, in steps from `low` on: 0, 1, 2, 4, 8, ... |
    | bar, seconds | the length of a step in time |
    | times | volume by `time`, the start of a step that has messages |
    | key_times | the same by key, of the CHARTED_MAX busiest |

    Volume is `messages` and `bytes`.  Traffic adds the median and the 99th
    percentile of sizes, `p50` and `p99`.
    Raises: InputError if there are no messages.
    """
    ends = [f"unix_micros({x}(time))" for x in ("min", "max")]
    more = f"{ends[0]} first", f"{ends[1]} last", "max(size) largest"
    totals = collect(messages.agg(*traffic(), *map(F.expr, more)))[0]
    if not totals["messages"]:
        raise InputError(EMPTY)
    bar = bar_length(totals["first"], totals["last"])
    time = F.unix_micros(F.window("time", bar)["start"]).alias("time")
    by_time = messages.groupBy(time).agg(*volume())
    by_size = messages.groupBy(F.expr(LOW).alias("low")).agg(*volume())
    by_key = messages.groupBy("key").agg(*volume()).localCheckpoint()
    by_host = volume_by_host(messages).localCheckpoint()
    order = F.desc("messages"), "key"
    busiest = by_key.orderBy(*order).limit(SHOWN_MAX)
    shown = messages.join(F.broadcast(busiest), "key", "left_semi")
    keys = collect(shown.groupBy("key").agg(*traffic()).orderBy(*order))
    key_times: dict[str, Any] = {row["key"]: [] for row in keys[:CHARTED_MAX]}
    charted = messages.where(F.col("key").isin([*key_times]))
    by_key_time = charted.groupBy("key", time).agg(*volume())
    for row in collect(by_key_time.orderBy("time")):
        key_times[row.pop("key")].append(row)
    worst = by_host.orderBy(F.desc("lost"), F.desc("messages"), "host")
    return {
        "totals": totals,
        "keys": keys,
        "hosts": collect(worst.limit(SHOWN_MAX)),
        "keys_total": by_key.count(),
        "hosts_total": by_host.count(),
        "lost": by_host.agg(F.sum("lost")).collect()[0][0],
        "sizes": collect(by_size.orderBy("low")),
        "bar": bar,
        "seconds": BARS[bar],
        "times": collect(by_time.orderBy("time")),
        "key_times": key_times,
    }


def collect(rows: DataFrame) -> list[dict[str, Any]]:
    """Return rows of which there are few."""
    return [row.asDict() for row in rows.collect()]


def volume() -> list[Column]:
    """Return how many messages and bytes a group has."""
    return [F.count("*").alias("messages"), F.sum("size").alias("bytes")]


def traffic() -> list[Column]:
    """Return the volume of a group, and how its sizes spread."""
    found = F.percentile_approx("size", [0.5, 0.99])
    return [*volume(), found[0].alias("p50"), found[1].alias("p99")]


def volume_by_host(messages: DataFrame) -> DataFrame:
    """Return the volume by host, and how many numbers its recorders miss.

    Numbers before a recorder's first do not count: they may have expired.
    """
    missing = F.max("n") - F.min("n") + 1 - F.count("*")
    recorders = messages.groupBy("host", "recorder")
    found = recorders.agg(*volume(), missing.alias("lost"))
    sums = [F.sum(of).alias(of) for of in ("messages", "bytes", "lost")]
    return found.groupBy("host").agg(*sums)


def bar_length(first: int, last: int) -> str:
    """Return a length that keeps bars few; times are in microseconds."""
    for bar, seconds in BARS.items():
        if last // SECOND // seconds - first // SECOND // seconds < BARS_MAX:
            return bar
    return bar


TEXT_MAX = 200  # characters shown of a key
Row = dict[str, Any]


def visible(text: str) -> str:
    """Return text for a page, with escapes for what does not print."""
    if (more := len(text) - TEXT_MAX) > 0:
        text = f"{text[:TEXT_MAX]}... and {more:,} more characters"
    return html.escape(printable(text))


def unit(size: float) -> str:
    """Return a number of bytes for people."""
    power = max(int(size).bit_length() - 1, 0) // 10
    name = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power]
    value = size / 1024**power
    return f"{value:.3g} {name}" if value < 100 else f"{value:.0f} {name}"


def clock(time: int, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time, in microseconds since 1970, for people."""
    zone = datetime.timezone.utc
    return datetime.datetime.fromtimestamp(time // SECOND, zone).strftime(form)


# By the name of a value: what stands above a column, and how its cells look
Columns = dict[str, tuple[str, Callable[[Any], str]]]
NUMBER = "{:,}".format
VOLUME: Columns = {"messages": ("messages", NUMBER), "bytes": ("bytes", unit)}
SIZES: Columns = {"p50": ("median", unit), "p99": ("99th percentile", unit)}
SIZE: Columns = {"size": ("bytes of payload", str), **VOLUME}
KEY: Columns = {"key": ("key", key_text), **VOLUME, **SIZES}
HOST: Columns = {"host": ("host", str), **VOLUME, "lost": ("lost", NUMBER)}


def axis_top(most: int, base: int) -> int:
    """Return the least round number that is not below another."""
    scale = 1
    while scale * base <= most:
        scale *= base
    steps = (n * ten for ten in (1, 10, 100) for n in (1, 2, 4, 6, 8))
    return scale * next(n for n in (*steps, base) if scale * n >= most)


def axes(of: str, top: int, span: range, floor: int) -> str:
    """Return the axes of a chart, with labels, as SVG.

    Widths are in per cent, so text keeps its size on a screen of any width.
    """
    drawn = [f'<text x="-8" y="{floor + 18}" text-anchor="end">UTC</text>']
    for value in (0, top // 2, top) if top % 2 == 0 else (0, top):
        y = floor - floor * value / top
        drawn.append(
            f'<line x2="100%" y1="{y}" y2="{y}"/><text x="-8" y="{y + 4}"'
            f' text-anchor="end">{VOLUME[of][1](value)}</text>'
        )
    form = "%d %b %H:%M" if span.step >= MINUTE * SECOND else "%H:%M:%S"
    form = "%d %b %Y" if span.step >= DAY * SECOND else form
    for at in sorted({0, len(span) // 2, len(span) - 1}):
        x = (at + 0.5) * 100 / len(span)
        anchor = "start" if x < 15 else "end" if x > 85 else "middle"
        drawn.append(
            f'<text x="{x:.2f}%" y="{floor + 18}" text-anchor="{anchor}">'
            f"{clock(span[at], form)}</text>"
        )
    return "".join(drawn)


def bars(
    rows: Sequence[Row], of: str, most: int, span: range, floor: int
) -> str:
    """Return bars over time, on an axis from 0 to at least *most*."""
    top = axis_top(most, 1024 if of == "bytes" else 1000)
    slot = 100 / len(span)
    wide = min(0.85 * slot, 8)
    drawn = [axes(of, top, span, floor)]
    for row in rows:
        x = (span.index(row["time"]) + 0.5) * slot - wide / 2
        high = max(1, floor * row[of] / top) if row[of] else 0
        drawn.append(
            f'<rect x="{x:.2f}%" y="{floor - high:.1f}" width="{wide:.2f}%"'
            f' height="{high:.1f}"><title>{clock(row["time"])}, '
            f"{of}: {VOLUME[of][1](row[of])}</title></rect>"
        )
    return f'<svg height="{floor + 24}">{"".join(drawn)}</svg>'


def table(rows: Sequence[Row], columns: Columns, total: int = 0) -> str:
    """Return a table; behind the first cells are bars of the messages."""
    most = max(row["messages"] for row in rows)
    lines = []
    for row in rows:
        cells = (visible(show(row[of])) for of, (_, show) in columns.items())
        text = "".join(f"<td>{cell}</td>" for cell in cells)
        share = row["messages"] / most
        lines.append(f'<tr style="--share: {share:.1%}">{text}</tr>')
    heads = "".join(f"<th>{head}</th>" for head, _ in columns.values())
    more = f"<p>and {total - len(rows):,} more</p>" * (total > len(rows))
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>{more}"


def size_table(sizes: Sequence[Row]) -> str:
    """Return a table of all steps from the least size to the largest."""
    found = {row["low"]: row for row in sizes}
    rows = []
    for digits in range(min(found).bit_length(), max(found).bit_length() + 1):
        low, high = (1 << digits) >> 1, (1 << digits) - 1
        name = f"{low:,} to {high:,}" if low < high else f"{low}"
        none = {"messages": 0, "bytes": 0}
        rows.append({"size": name, **found.get(low, none)})
    return table(rows, SIZE)


def tiles(found: Row) -> str:
    """Return the totals on top of a page."""
    totals = found["totals"]
    shown = [
        f"<b>{totals['messages']:,}</b> messages",
        f"<b>{unit(totals['bytes'])}</b> of payload",
        f"<b>{found['keys_total']:,}</b> keys",
        f"<b>{found['hosts_total']:,}</b> hosts",
        f"<b>{unit(totals['p50'])}</b> median size",
        f"<b>{unit(totals['p99'])}</b> 99th percentile size",
        f"<b>{unit(totals['largest'])}</b> largest size",
        f"<b>{found['lost']:,}</b> lost by recorders",
    ]
    return "".join(f"<li>{one}</li>" for one in shown)


def page(found: Row, name: str) -> str:
    """Return what summarize found as a page of HTML."""
    css = importlib.resources.files(__package__).joinpath("report.css")
    times, of_keys = found["times"], found["key_times"]
    bar = found["bar"].removeprefix("1 ")
    ends = sorted({clock(found["totals"][at]) for at in ("first", "last")})
    width = found["seconds"] * SECOND
    span = range(times[0]["time"], times[-1]["time"] + 1, width)
    tallest = max(row["messages"] for rows in of_keys.values() for row in rows)
    by_key = "".join(
        f"<div><h3>{visible(key_text(key))}</h3>"
        f"{bars(rows, 'messages', tallest, span, 80)}</div>"
        for key, rows in of_keys.items()
    )
    charts = (
        f"<h2>{of.capitalize()} per {bar}</h2>"
        f"{bars(times, of, max(row[of] for row in times), span, 160)}"
        for of in VOLUME
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Report: {visible(name)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<style>
{css.read_text()}</style>
<h1>Traffic of the bus</h1>
<p>{visible(name)}<br>{" to ".join(ends)} UTC</p>
<ul>{tiles(found)}</ul>
{"".join(charts)}
<h2>Messages by size</h2>{size_table(found["sizes"])}
<h2>Messages per {bar} of the busiest keys, on one scale</h2>
<div class="charts">{by_key}</div>
<h2>Messages by key</h2>{table(found["keys"], KEY, found["keys_total"])}
<h2>Messages by host, the greatest losses first</h2>
{table(found["hosts"], HOST, found["hosts_total"])}
</html>
"""
