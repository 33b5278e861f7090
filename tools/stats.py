"""stats: that of sbus_client.py, and what it counts for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sbus_client
from sbus_client import (
    STATS,
    STATS_COLUMNS,
    Options,
    SbusError,
    ask,
    flag,
    open_bus,
    parse_stats,
    write_line,
)


def metrics_lines(counts: Mapping[str, Sequence[int | None]]) -> list[str]:
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


def print_stats(options: Options) -> None:
    """Print what the server has counted."""
    if not options.openmetrics:
        return sbus_client.stats.run(options)
    with open_bus(options, options.timeout) as bus:
        counts = parse_stats(ask(bus, STATS, options.timeout))
    for line in metrics_lines(counts):
        write_line(line.encode("ascii"))


METRICS = flag("--openmetrics", "print the counts of users for Prometheus")

stats = sbus_client.stats._replace(
    run=print_stats, arguments=(*sbus_client.stats.arguments, METRICS)
)
