"""stats: what the server has counted, as a table or for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sbus_client import (
    STATS,
    Options,
    SbusError,
    ask,
    command,
    flag,
    malformed,
    open_bus,
    timeout,
    write,
    write_line,
)

STATS_COLUMNS = {  # a heading, and the server's name for what is below
    "CLIENTS": "clients",
    "PATTERNS": "patterns",
    "PUBLISHED": "published",
    "DELIVERED": "delivered",
    "REFUSED": "refused",
    "DISCARDED": "discarded",
    "PAUSED": "paused",
    "BACKLOG": "backlog_bytes",
}
Counts = Mapping[str, Sequence["int | None"]]  # as STATS_COLUMNS


def parse_stats(answer: bytes) -> Counts:
    """Return what a server has counted: for us, and for users by their ids.

    What it does not say is None.
    Raises: PacketError if the answer is malformed.
    Spec: [CTL-5].
    """
    try:
        own = json.loads(answer)
        counts = {f"client {own['client']}": own, **own.get("users", {})}
        return {
            name: [
                None if (n := each.get(column)) is None else int(n)
                for column in STATS_COLUMNS.values()
            ]
            for name, each in counts.items()
        }
    except (ValueError, TypeError, LookupError, AttributeError):
        raise malformed("malformed stats", answer) from None


def stats_lines(counts: Counts) -> list[str]:
    """Return a table of what a server has counted."""
    rows = [["", *STATS_COLUMNS]]
    for name, each in counts.items():
        title = name if name.startswith("client") else f"user {name}"
        rows.append([title, *("" if n is None else f"{n:,}" for n in each)])
    width, *widths = (max(map(len, column)) for column in zip(*rows))
    return [
        " ".join([row[0].ljust(width), *map(str.rjust, row[1:], widths)])
        for row in rows
    ]


def metrics_lines(counts: Counts) -> list[str]:
    """Return what has been counted for users in the OpenMetrics format.

    Raises: SbusError if the server does not tell that.
    """
    _, *users = counts
    if not users:
        what = "only root and the bus owner are told of users"
        raise SbusError(f"no metrics: {what}")
    lines = []
    for place, name in enumerate(STATS_COLUMNS.values()):
        is_gauge = name in ("clients", "patterns", "backlog_bytes")
        lines.append(
            f"# TYPE sbus_{name} {'gauge' if is_gauge else 'counter'}"
        )
        end = "" if is_gauge else "_total"
        lines += [
            f'sbus_{name}{end}{{uid="{uid}"}} {counts[uid][place] or 0}'
            for uid in users
        ]
    return [*lines, "# EOF"]


@command(
    "stats --json",
    flag("--json", "print the server's answer, a JSON object"),
    flag("--openmetrics", "print the counts of users for Prometheus"),
    timeout(),
)
def stats(options: Options) -> None:
    """Print what the server has counted for this client.

    Root and the bus owner are told of the clients of each user, since the
    first of those that are connected came.  REFUSED packets are those that
    the kernel did not take at first, because their receiver was slow,
    DISCARDED those that a receiver never got, PAUSED is how often a publisher
    had to wait, BACKLOG what the server holds for receivers, in bytes.
    """
    with open_bus(options, options.timeout) as bus:
        answer = ask(bus, STATS, options.timeout)
    if options.json:
        write(answer + b"\n")
        return
    lines_of = metrics_lines if options.openmetrics else stats_lines
    for line in lines_of(parse_stats(answer)):
        write_line(line.encode("utf-8"))
