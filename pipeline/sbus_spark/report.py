"""Reports: the traffic in a table, in numbers, and as a page.

The limits below bound what reaches the driver, however large the table is.
The page is one file of HTML that runs and fetches nothing.
"""

from __future__ import annotations

import datetime
import html
import importlib.resources
import json
import string
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .inputs import UTC, InputError, key_text, printable
from .matching import is_selected
from .views import Views

SHOWN_MAX = 100  # keys and hosts
BARS_MAX = 120
TEXT_MAX = 200  # characters shown of a key
SECOND = 1_000_000  # microseconds
HOUR, DAY = 3_600, 86_400  # seconds
BARS = {
    "second": 1,
    "10 seconds": 10,
    "minute": 60,
    "10 minutes": 600,
    "hour": HOUR,
    "6 hours": 6 * HOUR,
    "day": DAY,
    "10 days": 10 * DAY,
    "365 days": 365 * DAY,
}
EMPTY = (
    "there are no messages: --since, --until, --pattern and --host select"
    " none, or the table has none"
)
LISTS = "keys", "hosts", "sizes", "times"
Row = dict[str, Any]

# ==== Numbers ================================================================


def summarize(rows: DataFrame, patterns: Sequence[str] = ()) -> Row:
    """Return what a page shows of messages, as values for JSON.

    It reads the columns host, recorder, n, time, key and size.  Rows without a
    key, and of keys that none of the *patterns* selects, are no messages: they
    are only not lost.  Times are in microseconds since 1970 (UTC), sizes and
    `bytes` in bytes of payload.

    | name | value |
    |---|---|
    | totals | volume, the median and the 99th percentile of sizes (`p50`, |
    | | `p99`), the `largest` size, `first` and `last` time |
    | keys | volume by `key`, the SHOWN_MAX busiest first |
    | hosts | volume by `host` and what it `lost`, the worst, then busiest |
    | keys_total, hosts_total | how many there are |
    | lost | how many messages all hosts lost |
    | sizes | volume by size, in steps from `low` on: 0, 1, 2, 4, 8, ... |
    | bar, seconds | the length of a step in time |
    | times | volume by `time`, the start of a step that has messages |

    Volume is `messages` and `bytes`.  A host lost the numbers that are missing
    after the first of each of its recorders: those before it may have expired.
    Raises: InputError if there are no messages.
    """
    is_message = F.col("key").isNotNull()
    if patterns:
        is_message &= is_selected(patterns)
    rows = rows.withColumn("is_message", is_message)
    views = Views(rows.sparkSession, "report.sql", rows=rows)
    views.compute("totals")
    totals = views.rows("totals")[0]
    if not totals["messages"]:
        raise InputError(EMPTY)

    bar = bar_length(totals["first"], totals["last"])
    width = BARS[bar] * SECOND
    views.compute("groups", "hosts", limit=SHOWN_MAX, width=width)
    views.compute("lists", "counts", limit=SHOWN_MAX)
    lists: dict[str, list[Row]] = {name: [] for name in LISTS}
    for row in views.rows("lists"):
        lists[row["list"]].append(json.loads(row["row"]))
    lists["sizes"].sort(key=lambda row: int(row["low"]))
    lists["times"].sort(key=lambda row: int(row["time"]))
    return {
        "totals": totals,
        **lists,
        **views.rows("counts")[0],
        "bar": bar,
        "seconds": BARS[bar],
    }


def bar_length(first: int, last: int) -> str:
    """Return a length that keeps bars few; times are in microseconds."""
    for bar, seconds in BARS.items():
        if last // SECOND // seconds - first // SECOND // seconds < BARS_MAX:
            return bar
    return bar


# ==== The page ===============================================================


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


def clock(time: int) -> str:
    """Return a time, in microseconds since 1970, for people."""
    seconds = datetime.datetime.fromtimestamp(time // SECOND, UTC)
    return f"{seconds:%Y-%m-%d %H:%M:%S}"


NUMBER = "{:,}".format
# By the name of a column: how its cells look
VOLUME = {"messages": NUMBER, "bytes": unit}
KEY = {"key": key_text, **VOLUME}
HOST = {"host": str, **VOLUME, "lost": NUMBER}
SIZE = {"size": str, **VOLUME}


def chart(numbers: Row, name: str) -> str:
    """Return bars of messages or bytes over time."""
    rows = {row["time"]: row for row in numbers["times"]}
    highest = max(row[name] for row in rows.values()) or 1
    show = VOLUME[name]
    bars = []
    for time in range(min(rows), max(rows) + 1, numbers["seconds"] * SECOND):
        value = rows[time][name] if time in rows else 0
        title = f"{clock(time)}, {name}: {show(value)}"
        share = value / highest
        bars.append(f'<i style="--share: {share:.1%}" title="{title}"></i>')
    return (
        f"<h2>{name.capitalize()} per {numbers['bar']}</h2>"
        f"<figure>{''.join(bars)}</figure>"
        f"<p>{clock(min(rows))} to {clock(max(rows))} UTC,"
        f" at most {show(highest)}</p>"
    )


def table(rows: Sequence[Row], columns: Any, total: int = 0) -> str:
    """Return a table; behind the first cells are bars of the messages."""
    highest = max(row["messages"] for row in rows)
    lines = []
    for row in rows:
        cells = (visible(show(row[name])) for name, show in columns.items())
        text = "".join(f"<td>{cell}</td>" for cell in cells)
        share = row["messages"] / highest
        lines.append(f'<tr style="--share: {share:.1%}">{text}</tr>')
    heads = "".join(f"<th>{name}</th>" for name in columns)
    more = ""
    if total > len(rows):
        more = f"<p>and {total - len(rows):,} more</p>"
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>{more}"


def size_table(sizes: Sequence[Row]) -> str:
    """Return a table of the sizes, each step as the range that it is."""
    rows = []
    for row in sizes:
        low = row["low"]
        name = f"{low:,} to {2 * low - 1:,}" if low > 1 else f"{low}"
        rows.append({"size": name, **row})
    return table(rows, SIZE)


def page(numbers: Row, name: str) -> str:
    """Return what summarize returns as a page of HTML."""
    file = importlib.resources.files(__package__) / "report.html"
    totals = numbers["totals"]
    texts = {"name": visible(name), "messages": NUMBER(totals["messages"])}
    for total in "first", "last":
        texts[total] = clock(totals[total])
    for total in "bytes", "p50", "p99", "largest":
        texts[total] = unit(totals[total])
    for total in "keys_total", "hosts_total", "lost":
        texts[total] = NUMBER(numbers[total])
    return string.Template(file.read_text("utf-8")).substitute(
        texts,
        messages_chart=chart(numbers, "messages"),
        bytes_chart=chart(numbers, "bytes"),
        size_table=size_table(numbers["sizes"]),
        key_table=table(numbers["keys"], KEY, numbers["keys_total"]),
        host_table=table(numbers["hosts"], HOST, numbers["hosts_total"]),
    )
