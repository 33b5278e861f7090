"""States: what a table has, and what it lacks, from Delta's log alone."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import DeltaTable

from .inputs import absolute
from .marks import bounds_in, describe, gaps_of, marks_in, news
from .source import Capture
from .table import open_table


def state(table: str, capture: str | None = None) -> dict[str, Any]:
    """Return the state of a table, as values for JSON.

    | name | value |
    |---|---|
    | messages, files, bytes, quarantined | how many |
    | changed | seconds since the last commit |
    | lag | seconds since the last message; null if there is none |
    | hosts | by name: `runs`, `segments`, `lag` of those with messages |
    | | on the last day |
    | gaps | in words, which segments of a recorder run are missing |
    | waiting, waiting_bytes | segments of the capture to be ingested |
    | wait | seconds for which the oldest of them waits; null for none |
    | hidden | seconds since a file was written, by its path: incomplete |

    The last three are of a capture.  Raises: InputError as open_table.
    """
    opened = open_table(table)
    now = time.time()
    marks = marks_in(absolute(table), opened.version())
    added = pa.table(opened.get_add_actions(flatten=True))
    bad = DeltaTable(f"{absolute(table)}/_quarantine")
    hosts: dict[str, dict[str, Any]] = {}
    gaps: dict[str, str] = {}
    for recorder, bounds in bounds_in(marks).items():
        own = hosts.setdefault(
            recorder.partition("_")[0], {"runs": 0, "segments": 0}
        )
        own["runs"] += 1
        own["segments"] += sum(bounds[1::2]) - sum(bounds[::2])
        if gaps_of(bounds):
            since = marks[f"{recorder}/since"]
            gaps[recorder] = describe(recorder, bounds, since)
    lags = []
    if len(added):
        day = pc.max(added["partition.day"]).as_py()
        rows = opened.to_pyarrow_dataset().to_table(
            ["recorder", "time"], filter=pc.field("day") == day
        )
        last = rows.group_by("recorder").aggregate([("time", "max")])
        for row in last.sort_by("time_max").to_pylist():
            lag = round(now - row["time_max"].timestamp(), 1)
            hosts.setdefault(row["recorder"].partition("_")[0], {})["lag"] = (
                lag
            )
            lags.append(lag)
    found = {
        "messages": opened.count(),
        "files": len(added),
        "bytes": pc.sum(added["size_bytes"]).as_py() or 0,
        "quarantined": bad.count(),
        "changed": round(now - opened.history(1)[0]["timestamp"] / 1_000, 1),
        "lag": min(lags, default=None),
        "hosts": hosts,
        "gaps": list(gaps.values()),
    }
    if capture:
        source = Capture({"path": absolute(capture)})
        segments = source.segments()
        told = news(segments, marks)
        others = [gaps[x] for x in gaps if x not in segments]
        ages = source.ages(now)
        waits = [ages.get(piece.path, 0.0) for piece in told.new]
        hidden = {x: y for x, y in ages.items() if is_hidden(x)}
        found |= {
            "gaps": others + told.gaps,
            "waiting": len(told.new),
            "waiting_bytes": sum(piece.end for piece in told.new),
            "wait": max(waits, default=None),
            "hidden": hidden,
        }
    return found


def is_hidden(path: str) -> bool:
    """Return whether a file may be a segment that is not complete."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and ".jsonl" in name


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return a state as lines of text."""
    lines = [
        "{messages:,} messages in {files:,} files of {bytes:,} bytes,"
        " {quarantined:,} lines quarantined; changed {changed:,.0f} s ago".format(
            **found
        )
    ]
    for host, own in sorted(found["hosts"].items()):
        lag = f"{own['lag']:,.0f} s ago" if "lag" in own else "on a day before"
        runs, segments = own.get("runs", 0), own.get("segments", 0)
        lines.append(
            f"{host}: {segments:,} segments of {runs:,} recorder runs,"
            f" last message {lag}"
        )
    lines += found["gaps"]
    if found.get("waiting"):
        lines.append(
            "{waiting:,} segments of {waiting_bytes:,} bytes wait to be"
            " ingested, the oldest for {wait:,.0f} s".format(**found)
        )
    for path, age in sorted(found.get("hidden", {}).items()):
        lines.append(f"{path}: not complete, written {age:,.0f} s ago")
    return lines
