"""States: what a table has, and what it lacks, without Spark."""

from __future__ import annotations

import math
import time
from typing import Any

from .inputs import absolute, utc_text
from .marks import COMPACTED, bounds_in, news, read_log
from .source import Capture, Segments
from .table import dataset_of, files_of, parts_of

State = dict[str, Any]
SILENT_DAYS_SHOWN = 7  # days with messages, the last one among them


def state(table: str, capture: str | None = None) -> State:
    """Return the state of a table, as values for JSON.

    | name | value |
    |---|---|
    | messages, files, bytes, quarantined | how many |
    | changed_seconds, | since the last commit, |
    | compacted_seconds, | since the last compaction, |
    | lag_seconds | and since the last message |
    | runs | of each recorder run with messages on the last day, and of a |
    | | host that was silent then on its last day, within seven: the `last` |
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
    runs = runs_of(table, files, bounds, now)
    lags = [run["lag_seconds"] for run in runs.values()]
    compacted = log.marks.get(COMPACTED)
    changed = opened.history(1)[0]["timestamp"] / 1_000
    result: State = {
        "messages": opened.count(),
        "files": len(files),
        "bytes": sum(file["size_bytes"] for file in files),
        "quarantined": sum(quarantine.count() for _, quarantine in others),
        "changed_seconds": round(now - changed, 1),
        "compacted_seconds": compacted and round(now - compacted / 1_000, 1),
        "lag_seconds": min(lags, default=None),
        "runs": runs,
    }

    # The gaps are of all recorders; what waits may fill some
    segments: Segments = dict.fromkeys(bounds, {})
    if capture:
        source = Capture({"path": absolute(capture)})
        listed, hidden = source.files()
        arrivals = news(segments | listed, log, source.is_whole)
        waits = [now - segment.written for segment in arrivals.new]
        result |= {
            "waiting": len(arrivals.new),
            "waiting_bytes": sum(segment.size for segment in arrivals.new),
            "wait_seconds": round(max(waits), 1) if waits else None,
            "torn": [segment.path for segment in arrivals.torn],
            "grown": [segment.path for segment in arrivals.grown],
            "hidden": {x: round(now - hidden[x], 1) for x in sorted(hidden)},
        }
    else:
        arrivals = news(segments, log)
    return result | {"missing": len(arrivals.gaps), "gaps": arrivals.gaps}


def runs_of(
    table: str, files: list[State], bounds: dict[str, list[int]], now: float
) -> State:
    """Return what a state says of recorder runs.

    They are those of the last day, and of a host that was silent on it those
    of its own last day, if that is not long ago.
    """
    runs: State = {}
    days = sorted({file["partition.day"] for file in files})
    for day in days[: -1 - SILENT_DAYS_SHOWN : -1]:
        seen = {host_of(name) for name in runs}
        if seen.issuperset(map(host_of, bounds)):
            break
        of_day = [file for file in files if file["partition.day"] == day]
        rows = dataset_of(table, of_day).to_table(["recorder", "time"])
        last = rows.group_by("recorder").aggregate([("time", "max")])
        for row in last.to_pylist():
            name, time = row["recorder"], row["time_max"].timestamp()
            if host_of(name) not in seen:
                runs[name] = {
                    "last": (bounds.get(name) or [1])[-1] - 1,
                    "time": utc_text(time),
                    "lag_seconds": round(now - time, 1),
                }
    return dict(sorted(runs.items()))


def host_of(recorder: str) -> str:
    """Return the host of a recorder run, which is HOST_TIME_RANDOM."""
    return recorder.partition("_")[0]


def age_of(state: State) -> float:
    """Return the seconds of what is oldest.

    That is the time since the last message, infinite without any; or since a
    segment that waits, or a hidden file, was written.
    """
    lag = math.inf if state["lag_seconds"] is None else state["lag_seconds"]
    hidden = state.get("hidden", {}).values()
    return float(max([lag, state.get("wait_seconds") or 0.0, *hidden]))


def metrics_of(state: State) -> list[str]:
    """Return the numbers of a state in the format OpenMetrics.

    Of a list it is how long it is.  The lag of an empty table is infinite.
    """
    lines = []
    for name, value in state.items():
        if isinstance(value, (list, dict)):
            value = len(value)
        elif name == "lag_seconds" and value is None:
            value = "+Inf"
        if value is not None:
            metric = f"sbus_table_{name}"
            lines += [f"# TYPE {metric} gauge", f"{metric} {value}"]
    return [*lines, "# EOF"]
