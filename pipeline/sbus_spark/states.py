"""States: what a table has, and what it lacks, without Spark."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from .captures import Capture
from .files import count_rows, files_of, last_times
from .inputs import moment_of, utc_text
from .known import RECENT_DAYS, Known
from .tables import parts_of, stamp_of

State = dict[str, Any]


def state(table: str, capture: str | None = None) -> State:
    """Return the state of a table, as values for JSON.

    | name | value |
    |---|---|
    | messages, files, bytes, quarantined | how many |
    | changed_seconds | since the last commit |
    | lag_seconds | since the last message; |
    | silent_seconds | the same of the host that is silent for longest |
    | ahead_seconds | how far the latest message is after now: above 0 the |
    | | clock of a host is ahead |
    | runs | of each recorder run with messages on the last day, and of a |
    | | host that was silent then on its last day, within RECENT_DAYS: the |
    | | `last` segment, the `time` of its last message, its `lag_seconds` |
    | waiting, waiting_bytes | segments of the capture to be ingested |
    | wait_seconds | for which the oldest of them waits |
    | torn | segments that end within a line, or cannot be read |
    | hidden | by its path: seconds since an incomplete file was written |
    | gaps | in words, which segments are missing |

    Null stands for what there is not.  Those from `waiting` to `hidden` are of
    a capture.  No time after now counts, as of a host whose clock is ahead.
    Raises: InputError as open_table.
    """
    now = time.time()
    (where, opened), *others = parts_of(table)
    known = Known(where, opened)
    files = files_of(opened)
    runs = runs_of(where, files, known, now)
    lags = lags_of(runs).values()
    changed = stamp_of(opened)
    result: State = {
        "messages": count_rows(where, files),
        "files": len(files),
        "bytes": pc.sum(files["size_bytes"]).as_py() or 0,
        "quarantined": sum(count_rows(x, files_of(y)) for x, y in others),
        "changed_seconds": changed and round(now - changed / 1_000, 1),
        "lag_seconds": min(lags, default=None),
        "silent_seconds": max(lags, default=None),
        "ahead_seconds": seconds_ahead(files, now),
        "runs": runs,
    }
    if capture:
        result |= waiting_in(Capture(capture), known, now)
    return result | {"gaps": known.gaps()}


def seconds_ahead(files: pa.Table, now: float) -> float:
    """Return how far the latest message is after now, by the statistics."""
    if "max.time" not in files.column_names:
        return 0.0
    latest = pc.max(files["max.time"]).as_py() or moment_of(now)
    return round(max(0.0, latest.timestamp() - now), 1)


def waiting_in(source: Capture, known: Known, now: float) -> State:
    """Return what a state says of a capture, and let what waits be known.

    It may fill gaps.
    """
    segments, hidden = source.files()
    new = [segment for segment in segments if not known.has(segment)]
    torn = [segment for segment in new if source.fault_of(segment)]
    waiting = [segment for segment in new if segment not in torn]
    known.add(waiting)
    waits = [now - segment.written for segment in waiting]
    return {
        "waiting": len(waiting),
        "waiting_bytes": sum(segment.size for segment in waiting),
        "wait_seconds": round(max(waits), 1) if waits else None,
        "torn": [segment.path for segment in torn],
        "hidden": {x: round(now - hidden[x], 1) for x in sorted(hidden)},
    }


def runs_of(where: str, files: pa.Table, known: Known, now: float) -> State:
    """Return what a state says of recorder runs.

    They are those of the last day, and of a host that was silent on it those
    of its own last day, if that is not long ago.
    """
    present = moment_of(now)
    hosts = {host_of(name) for name in known.runs}
    days = pc.unique(files["partition.day"]).sort("descending").to_pylist()
    past = [day for day in days if day <= present.date()]
    runs: State = {}
    for day in past[:RECENT_DAYS]:
        seen = {host_of(name) for name in runs}
        if seen and seen >= hosts:
            break
        of_day = files.filter(pc.field("partition.day") == day)
        for name, last in last_times(where, of_day, present).items():
            bounds = known.runs[name].bounds if name in known.runs else []
            if host_of(name) not in seen:
                runs[name] = {
                    "last": bounds[-1] - 1 if bounds else 0,
                    "time": utc_text(last),
                    "lag_seconds": round(now - last.timestamp(), 1),
                }
    return dict(sorted(runs.items()))


def host_of(recorder: str) -> str:
    """Return the host of a recorder run, which is HOST_TIME_RANDOM."""
    return recorder.rsplit("_", 2)[0]


def lags_of(runs: State) -> dict[str, float]:
    """Return the seconds since the last message of each host."""
    lags: dict[str, float] = {}
    for name, run in runs.items():
        host, lag = host_of(name), run["lag_seconds"]
        lags[host] = min(lags.get(host, lag), lag)
    return lags


def ages_of(state: State, hosts: Sequence[str] = ()) -> dict[str, float]:
    """Return the seconds of what may be too old, by what to say of it.

    That is the time since the last message of each host, or of some *hosts*,
    infinite without any; or since a segment that waits, or a hidden file, was
    written.
    """
    lags = lags_of(state["runs"])
    ages = {
        f"no message of {host} came": lags.get(host, math.inf)
        for host in hosts or lags or ["any host"]
    }
    for path, seconds in state.get("hidden", {}).items():
        ages[f"{path} stays hidden, and was not written"] = seconds
    if seconds := state.get("wait_seconds"):
        ages["a segment waits"] = seconds
    return ages


def metrics_of(state: State) -> list[str]:
    """Return the numbers of a state in the format OpenMetrics.

    Of a list it is how long it is.  The lags of an empty table are infinite.
    """
    lines = []
    for name, value in state.items():
        if isinstance(value, (list, dict)):
            value = len(value)
        elif value is None and name in ("lag_seconds", "silent_seconds"):
            value = "+Inf"
        if value is not None:
            metric = f"sbus_table_{name}"
            lines += [f"# TYPE {metric} gauge", f"{metric} {value}"]
    return [*lines, "# EOF"]
