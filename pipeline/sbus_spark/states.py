"""States: what a table has, and what it lacks, without Spark."""

from __future__ import annotations

import time
from typing import Any

from deltalake import DeltaTable

from .inputs import absolute
from .marks import COMPACTED, bounds_in, describe, gaps_of, news, read_log
from .source import Capture
from .table import dataset_of, files_of, open_table, parts_of

State = dict[str, Any]


def state(table: str, capture: str | None = None) -> State:
    """Return the state of a table, as values for JSON.

    | name | value |
    |---|---|
    | messages, files, bytes, quarantined | how many |
    | changed, compacted | seconds since the last commit, and compaction |
    | lag | seconds since the last message |
    | hosts | by name: how many `runs`, `segments`, and the `lag` |
    | runs | of each recorder run with messages on the last day: the `last` |
    | | segment, the `time` of its last message, and the `lag` |
    | missing | how many runs have gaps |
    | gaps | in words, which segments are missing |
    | waiting, waiting_bytes | segments of the capture to be ingested |
    | wait | seconds for which the oldest of them waits |
    | grown | segments that were read while they were half copied |
    | hidden | seconds since a file was written, by its path: incomplete |

    Null stands for what there is not.  The last five are of a capture.
    Raises: InputError as open_table.
    """
    opened = open_table(table)
    where = absolute(table)
    now = time.time()
    log = read_log(where, opened.version())
    files = files_of(opened)
    bounds = bounds_in(log.marks)
    gaps = {
        recorder: describe(recorder, x, log.marks.get(f"{recorder}/since", 0))
        for recorder, x in bounds.items()
        if gaps_of(x)
    }
    compacted = log.marks.get(COMPACTED)
    changed = opened.history(1)[0]["timestamp"] / 1_000
    result: State = {
        "messages": opened.count(),
        "files": len(files),
        "bytes": sum(file["size_bytes"] for file in files),
        "quarantined": sum(DeltaTable(x).count() for x in parts_of(where)[1:]),
        "changed": round(now - changed, 1),
        "compacted": compacted and round(now - compacted / 1_000, 1),
        **recorders_of(last_times(table, files), bounds, now),
    }
    if capture:
        source = Capture({"path": absolute(capture)})
        segments, hidden = source.files()
        arrivals = news(segments, log)
        other = [gaps[x] for x in gaps if x not in segments]
        waits = [now - piece.written for piece in arrivals.new]
        result |= {
            "waiting": len(arrivals.new),
            "waiting_bytes": sum(piece.end for piece in arrivals.new),
            "wait": round(max(waits), 1) if waits else None,
            "grown": [piece.path for piece in arrivals.grown],
            "hidden": {x: round(now - y, 1) for x, y in hidden.items()},
        }
        gaps = dict(enumerate(other + arrivals.gaps))  # type: ignore[arg-type]
    return result | {"missing": len(gaps), "gaps": list(gaps.values())}


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
    hosts: State = {}
    for recorder, ends in bounds.items():
        host = hosts.setdefault(
            host_of(recorder), {"runs": 0, "segments": 0, "lag": None}
        )
        host["runs"] += 1
        host["segments"] += sum(ends[1::2]) - sum(ends[::2])

    runs: State = {}
    for recorder, at in sorted(times.items()):
        lag = round(now - at, 1)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        ends = bounds.get(recorder) or [1, 1]
        runs[recorder] = {"last": ends[-1] - 1, "time": when, "lag": lag}
        host = hosts.setdefault(
            host_of(recorder), {"runs": 0, "segments": 0, "lag": None}
        )
        host["lag"] = min(lag, lag if host["lag"] is None else host["lag"])
    lags = [run["lag"] for run in runs.values()]
    return {"lag": min(lags, default=None), "hosts": hosts, "runs": runs}


def host_of(recorder: str) -> str:
    """Return the host in the name of a recorder run."""
    return recorder.partition("_")[0]


def age_of(state: State) -> float:
    """Return the seconds of what is oldest: messages, or what waits."""
    lag = float("inf") if state["lag"] is None else state["lag"]
    hidden = state.get("hidden", {}).values()
    return float(max([lag, state.get("wait") or 0.0, *hidden]))


def lines_of(state: State) -> list[str]:
    """Return a state as lines of text."""
    compacted = "never compacted"
    if state["compacted"] is not None:
        compacted = f"compacted {state['compacted']:,.0f} s ago"
    lines = [
        "{messages:,} messages in {files:,} files of {bytes:,} bytes,"
        " {quarantined:,} lines quarantined".format(**state),
        f"changed {state['changed']:,.0f} s ago, {compacted}",
    ]
    for name, host in sorted(state["hosts"].items()):
        lines.append(
            f"{name}: {host['segments']:,} segments of {host['runs']:,}"
            " recorder runs"
        )
    for name, run in state["runs"].items():
        lines.append(
            f"{name}: segment {run['last']}, last message {run['time']},"
            f" {run['lag']:,.0f} s ago"
        )
    lines += state["gaps"]
    if state.get("waiting"):
        lines.append(
            "{waiting:,} segments of {waiting_bytes:,} bytes wait to be"
            " ingested, the oldest for {wait:,.0f} s".format(**state)
        )
    for path in state.get("grown", ()):
        lines.append(f"{path}: it has grown since it was read, half copied")
    for path, age in sorted(state.get("hidden", {}).items()):
        lines.append(f"{path}: not complete, written {age:,.0f} s ago")
    return lines


def metrics_of(state: State) -> list[str]:
    """Return the numbers of a state in the format OpenMetrics."""
    lines = []
    for name, value in state.items():
        if isinstance(value, (int, float)):
            metric = f"sbus_table_{name}"
            lines += [f"# TYPE {metric} gauge", f"{metric} {value}"]
    return [*lines, "# EOF"]
