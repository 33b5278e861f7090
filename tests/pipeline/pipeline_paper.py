"""Traces and captures that no bus has written."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write events as a trace, numbered anew."""
    with path.open("w") as file:
        for number, event in enumerate(events, 1):
            file.write(json.dumps({**event, "n": number}) + "\n")


def find(events: Sequence[Event], **fields: Any) -> list[int]:
    """Return where the events with such fields are."""
    return [
        index
        for index, event in enumerate(events)
        if fields.items() <= event.items()
    ]


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
