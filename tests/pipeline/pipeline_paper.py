"""Traces and captures that no bus has written."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


# The events of a trace, with what they have unless a case says otherwise
ABOUT = {"version": "1", "address": "", "host": "h", "cred_prefix": ""}
EVENTS: dict[str, Event] = {
    "start": ABOUT,
    "open": {"c": 1, "gid": 1, "uid": 2, "pid": 3},
    "sub": {"c": 1, "pattern": ""},
    "unsub": {"c": 1, "pattern": ""},
    "ctl": {"c": 1, "key": "order/queue"},
    "msg": {"c": 2, "m": 1, "key": "k", "size": 0},
    "send": {"c": 1, "m": 1},
    "drop": {"c": 1, "m": 1, "reason": "deaf"},
    "close": {"c": 1},
    "stop": ABOUT,
}
# A run of two clients, of which the first one subscribes
BEGINNING = "start, open, open c=2, sub"


def write_trace(path: Path, events: str) -> None:
    """Write a trace: BEGINNING, and events such as "msg m=2, send m=2"."""
    words = map(str.split, f"{BEGINNING}, {events}".split(", "))
    lines = []
    for n, (ev, *fields) in enumerate(words, 1):
        event = {"n": n, "t": 1, "ev": ev, **EVENTS[ev]}
        for name, _, value in (x.partition("=") for x in fields):
            event[name] = int(value) if value.isdigit() else value
        lines.append(json.dumps(event))
    path.write_text("\n".join([*lines, ""]))


def capture_line(n: int, /, **fields: Any) -> str:
    """Return a line of a capture."""
    payload = b"x" * (n % 50)
    line = {
        "rec": "R",
        "n": n,
        "t": 1_763_717_053_000_000_000 + n * 1_000_000,
        "host": "h",
        "key": f"k/{n % 7}",
        "size": len(payload),
        "data": base64.b64encode(payload).decode(),
    }
    return json.dumps({**line, **fields}) + "\n"


def write_segments(directory: Path, count: int, lines: int = 100) -> None:
    """Write the segments of a capture."""
    directory.mkdir(exist_ok=True)
    for segment in range(1, count + 1):
        first = (segment - 1) * lines + 1
        text = map(capture_line, range(first, first + lines))
        (directory / f"R-{segment:06}.jsonl").write_text("".join(text))
