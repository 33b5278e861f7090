"""States: what a table has, and what it lacks, without Spark."""

from __future__ import annotations

import math
import time
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]

from .captures import Capture, Segment
from .inputs import moment_of, utc_text
from .known import Known
from .tables import COMPACTED, files_of, parts_of, rows_in

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
    | torn | segments that end within a line, or cannot be read |
    | hidden | by its path: seconds since an incomplete file was written |

    Null stands for what there is not.  The last five are of a capture.  No
    time after now counts, as of a host whose clock is ahead.
    Raises: InputError as open_table.
    """
    now = time.time()
    (where, opened), *others = parts_of(table)
    files = files_of(opened)
    known = Known(where, opened)
    compacted = opened.transaction_version(COMPACTED)
    changed = opened.history(1)[0]["timestamp"] / 1_000
    runs = runs_of(where, files, {*known.runs}, now)
    for name, run in runs.items():
        bounds = known.runs.get(name, [[1]])[0]
        run["last"] = bounds[-1] - 1
    lags = [run["lag_seconds"] for run in runs.values()]
    result: State = {
        "messages": opened.count(),
        "files": len(files),
        "bytes": pc.sum(files["size_bytes"]).as_py() or 0,
        "quarantined": sum(quarantine.count() for _, quarantine in others),
        "changed_seconds": round(now - changed, 1),
        "compacted_seconds": compacted and round(now - compacted / 1_000, 1),
        "lag_seconds": min(lags, default=None),
        "runs": runs,
    }
    if capture:
        source = Capture(capture)
        segments, hidden = source.files()
        known.trust(segments)
        new = [segment for segment in segments if not known.has(segment)]
        torn = [segment for segment in new if not is_sound(source, segment)]
        waiting = [segment for segment in new if segment not in torn]
        waits = [now - segment.written for segment in waiting]
        result |= {
            "waiting": len(waiting),
            "waiting_bytes": sum(segment.size for segment in waiting),
            "wait_seconds": round(max(waits), 1) if waits else None,
            "torn": [segment.path for segment in torn],
            "hidden": {x: round(now - hidden[x], 1) for x in sorted(hidden)},
        }
        known.add(waiting)  # they may fill gaps
    gaps = known.gaps()
    return result | {"missing": len(gaps), "gaps": gaps}


def is_sound(source: Capture, segment: Segment) -> bool:
    """Return whether a segment can be read, and is whole."""
    try:
        return source.is_whole(segment)
    except OSError:
        return False


def runs_of(where: str, files: Any, recorders: set[str], now: float) -> State:
    """Return what a state says of recorder runs.

    They are those of the last day, and of a host that was silent on it those
    of its own last day, if that is not long ago.
    """
    runs: State = {}
    today = moment_of(now).date()
    days = files["partition.day"]
    past = sorted(x for x in pc.unique(days).to_pylist() if x <= today)
    for day in past[: -1 - SILENT_DAYS_SHOWN : -1]:
        seen = {host_of(name) for name in runs}
        if seen and seen.issuperset(map(host_of, recorders)):
            break
        of_day = files.filter(pc.equal(days, day))
        is_past = pc.field("time") <= moment_of(now)
        rows = rows_in(where, of_day, ["recorder", "time"], is_past)
        last = rows.group_by("recorder").aggregate([("time", "max")])
        for row in last.to_pylist():
            name, at = row["recorder"], row["time_max"].timestamp()
            if host_of(name) not in seen:
                about = {"time": utc_text(at), "lag_seconds": now - at}
                runs[name] = {"last": 0, **about}
    for run in runs.values():
        run["lag_seconds"] = round(run["lag_seconds"], 1)
    return dict(sorted(runs.items()))


def host_of(recorder: str) -> str:
    """Return the host of a recorder run, which is HOST_TIME_RANDOM."""
    return recorder.partition("_")[0]


def age_of(state: State) -> float:
    """Return the seconds of what is oldest.

    That is the time since the last message of a host, infinite without any;
    or since a segment that waits, or a hidden file, was written.
    """
    lags: dict[str, float] = {}
    for name, run in state["runs"].items():
        host = host_of(name)
        lags[host] = min(lags.get(host, math.inf), run["lag_seconds"])
    hidden = state.get("hidden", {}).values()
    waits = [state.get("wait_seconds") or 0.0, *hidden]
    return float(max([*(lags.values() or [math.inf]), *waits]))


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
