"""States: what a table has, and what it lacks, without Spark."""

from __future__ import annotations

import math
import time
from typing import Any

from .inputs import absolute, utc_text
from .marks import COMPACTED, bounds_in, describe, gaps_of, news, read_log
from .source import Capture
from .table import dataset_of, files_of, parts_of

State = dict[str, Any]


def state(table: str, capture: str | None = None) -> State:
    """Return the state of a table, as values for JSON.

    | name | value |
    |---|---|
    | messages, files, bytes, quarantined | how many |
    | changed_seconds, | since the last commit, |
    | compacted_seconds, | since the last compaction, |
    | lag_seconds | and since the last message |
    | hosts | by name: how many `runs` and `segments` |
    | runs | of each recorder run with messages on the last day: the `last` |
    | | segment, the `time` of its last message, its `lag_seconds` |
    | missing | how many runs have gaps |
    | gaps | in words, which segments are missing |
    | waiting, waiting_bytes | segments of the capture to be ingested |
    | wait_seconds | for which the oldest of them waits |
    | torn | segments that end within a line |
    | grown | segments that were read while they were half copied |
    | hidden | by its path: seconds since an incomplete file was written |

    Null stands for what there is not.  The last six are of a capture.
    Raises: InputError as open_table.
    """
    now = time.time()
    (where, opened), *others = parts_of(table)
    log = read_log(where, opened.version())
    files = files_of(opened)
    bounds = bounds_in(log.marks)
    gaps = {
        name: describe(name, bounds[name], log.marks.get(f"{name}/since", 0))
        for name in bounds
        if gaps_of(bounds[name])
    }
    compacted = log.marks.get(COMPACTED)
    changed = opened.history(1)[0]["timestamp"] / 1_000
    result: State = {
        "messages": opened.count(),
        "files": len(files),
        "bytes": sum(file["size_bytes"] for file in files),
        "quarantined": sum(quarantine.count() for _, quarantine in others),
        "changed_seconds": round(now - changed, 1),
        "compacted_seconds": compacted and round(now - compacted / 1_000, 1),
        **recorders_of(last_times(table, files), bounds, now),
    }
    if capture:
        source = Capture({"path": absolute(capture)})
        segments, hidden = source.files()
        arrivals = news(segments, log, source.is_whole)
        waits = [now - segment.written for segment in arrivals.new]
        result |= {
            "waiting": len(arrivals.new),
            "waiting_bytes": sum(segment.size for segment in arrivals.new),
            "wait_seconds": round(max(waits), 1) if waits else None,
            "torn": [segment.path for segment in arrivals.torn],
            "grown": [segment.path for segment in arrivals.grown],
            "hidden": {x: round(now - hidden[x], 1) for x in sorted(hidden)},
        }
        # What waits may fill a gap of the table
        others_gaps = [gaps[name] for name in gaps if name not in segments]
        gaps_in_words = others_gaps + arrivals.gaps
    else:
        gaps_in_words = [*gaps.values()]
    return result | {"missing": len(gaps_in_words), "gaps": gaps_in_words}


def last_times(table: str, files: list[State]) -> dict[str, float]:
    """Return the last time of each recorder on the last day of a table."""
    day = max((file["partition.day"] for file in files), default=None)
    paths = [file["path"] for file in files if file["partition.day"] == day]
    rows = dataset_of(table, paths).to_table(["recorder", "time"])
    last = rows.group_by("recorder").aggregate([("time", "max")]).to_pylist()
    return {row["recorder"]: row["time_max"].timestamp() for row in last}


def recorders_of(
    times: dict[str, float], bounds: dict[str, list[int]], now: float
) -> State:
    """Return what a state says of hosts and recorder runs."""
    lags = {name: round(now - times[name], 1) for name in sorted(times)}
    runs = {
        recorder: {
            "last": (bounds.get(recorder) or [1])[-1] - 1,
            "time": utc_text(times[recorder]),
            "lag_seconds": lags[recorder],
        }
        for recorder in lags
    }
    hosts: dict[str, State] = {}
    for recorder, edges in sorted(bounds.items()):
        name = recorder.partition("_")[0]  # a run is HOST_TIME_RANDOM
        host = hosts.setdefault(name, {"runs": 0, "segments": 0})
        host["runs"] += 1
        host["segments"] += sum(edges[1::2]) - sum(edges[::2])
    lag = min(lags.values(), default=None)
    return {"lag_seconds": lag, "hosts": hosts, "runs": runs}


def age_of(state: State) -> float:
    """Return the seconds of what is oldest.

    That is the time since the last message, infinite without any; or since a
    segment that waits, or a hidden file, was written.
    """
    lag = math.inf if state["lag_seconds"] is None else state["lag_seconds"]
    hidden = state.get("hidden", {}).values()
    return float(max([lag, state.get("wait_seconds") or 0.0, *hidden]))


def lines_of(state: State) -> list[str]:
    """Return a state as lines of text, with the names that JSON has."""
    lines = []
    for name, value in state.items():
        if isinstance(value, dict):
            lines += [f"{name}: {x}: {text_of(value[x])}" for x in value]
        elif isinstance(value, list):
            lines += [f"{name}: {x}" for x in value]
        else:
            lines.append(f"{name}: {text_of(value)}")
    return lines


def text_of(value: Any) -> str:
    """Return a value of a state as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {text_of(value[name])}" for name in value)
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return "none" if value is None else str(value)


def metrics_of(state: State) -> list[str]:
    """Return the numbers of a state in the format OpenMetrics."""
    lines = []
    for name, value in state.items():
        if isinstance(value, (int, float)):
            metric = f"sbus_table_{name}"
            lines += [f"# TYPE {metric} gauge", f"{metric} {value}"]
    return [*lines, "# EOF"]
