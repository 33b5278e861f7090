"""Known: which segments of a capture need not be looked at again.

The rows of a table are the truth.  To look at each segment in each round would
take long, so an ingest notes the size of each segment whose lines are
committed, in TABLE/_ingested.json.  A segment of another size is looked at
again, and adds what the table lacks.  So these notes may be lost without harm.

They hold for a version of the table, and for later ones as long as rows were
only added, or dropped on purpose.  After a RESTORE, or if the log no longer
tells what happened, all is looked at again.

They also say which segments each recorder run had, since `--clean` removes
them: number 1 is the first, and a gap is named.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import DeltaTable
from pyarrow import fs

from .captures import Segment
from .inputs import utc_text
from .tables import (
    files_of,
    is_kept,
    open_delta,
    stamp_of,
    with_one_of,
)

FORGOTTEN_SECONDS = 30 * 86_400  # after which a run that rests is forgotten
SHOWN_MAX = 5  # gaps of a recorder


class Known:
    """Notes about captures that hold for a table as it was opened.

    *sizes* has that of each segment by its path; *runs* for each recorder run
    its bounds, when the first of its gaps was found, and when it last had a
    new segment.  Bounds are a number at which segments begin, the one at which
    they cease, the one at which they begin again, and so on.
    """

    def __init__(self, where: str, opened: DeltaTable) -> None:
        files, folder = fs.FileSystem.from_uri(where)
        self._files, self._path = files, f"{folder}/_ingested.json"
        self._where, self._opened = where, opened
        self._commit = opened.version(), stamp_of(opened)
        self.sizes: dict[str, int] = {}
        self.runs: dict[str, list[Any]] = {}
        self.is_lost = True
        self._read()

    def _read(self) -> None:
        """Read what the file says, and of the sizes only if they hold."""
        try:
            with self._files.open_input_stream(self._path) as file:
                notes = json.loads(file.read())
            self.runs = notes["runs"]
            self.is_lost = False
            if is_kept(self._opened, *notes["commit"]):
                self.sizes = notes["sizes"]
        except (OSError, ValueError, KeyError, TypeError):
            return

    def write(self) -> None:
        """Write what is known to the file, at once.

        It holds for the table as it is now: an older log, as of a backup, may
        lack what was added meanwhile.
        """
        opened = open_delta(self._where)
        if not is_kept(opened, *self._commit):
            return
        self._commit = opened.version(), stamp_of(opened)
        notes = {"commit": self._commit, "sizes": self.sizes}
        hidden = f"{self._path}.{os.getpid()}.new"
        with self._files.open_output_stream(hidden) as file:
            file.write(json.dumps(notes | {"runs": self.runs}).encode())
        self._files.move(hidden, self._path)

    def has(self, segment: Segment) -> bool:
        """Return whether a segment is as long as when it was read."""
        return self.sizes.get(segment.path) == segment.size

    def has_longer(self, segment: Segment) -> bool:
        """Return whether a segment is shorter than when it was read."""
        return self.sizes.get(segment.path, 0) > segment.size

    def trust(self, segments: Sequence[Segment]) -> None:
        """Let no gap be before the first segments, if notes are lost.

        It is so for runs of which the table may have messages: `--clean` may
        have removed what was before.
        """
        firsts: dict[str, int] = {}
        for segment in segments if self.is_lost else ():
            firsts.setdefault(segment.recorder, segment.number)
        files = files_of(self._opened)
        for name, first in firsts.items():
            may_have = with_one_of(files, "recorder", pa.array([name]))
            if first > 1 and len(may_have):
                self.runs[name] = [[1, first], 0.0, time.time()]

    def add(self, segments: Sequence[Segment]) -> None:
        """Note that the lines of segments are committed."""
        for segment in segments:
            self.sizes[segment.path] = segment.size
            bounds, since, _ = self.runs.get(segment.recorder, ([], 0.0, 0.0))
            has_gap = bool(gaps_of(bounds))
            bounds = with_number(bounds, segment.number)
            if gaps_of(bounds) and not has_gap:
                since = time.time()
            self.runs[segment.recorder] = [bounds, since, time.time()]

    def forget(self, folder: str, segments: Sequence[Segment]) -> None:
        """Leave out what a capture no longer has, and runs that rest."""
        here = {segment.path for segment in segments}
        for path in [x for x in self.sizes if x.startswith(f"{folder}/")]:
            if path not in here:
                del self.sizes[path]
        limit = time.time() - FORGOTTEN_SECONDS
        listed = {segment.recorder for segment in segments}
        for name in {x for x in self.runs if self.runs[x][2] < limit}:
            if name not in listed:
                del self.runs[name]

    def gaps(self) -> list[str]:
        """Return in words which segments are missing before others."""
        return [
            describe(name, bounds, since)
            for name, (bounds, since, _) in sorted(self.runs.items())
            if gaps_of(bounds)
        ]


def with_number(bounds: list[int], number: int) -> list[int]:
    """Return bounds with one more number."""
    if sum(bound <= number for bound in bounds) % 2:
        return bounds
    # An edge that is there already is one no more
    return sorted({*bounds} ^ {number, number + 1})


def gaps_of(bounds: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last numbers of what is missing before others."""
    edges = sorted({1} ^ {*bounds})
    return [(first, end - 1) for first, end in zip(edges[::2], edges[1::2])]


def describe(recorder: str, bounds: Iterable[int], since: float) -> str:
    """Return in words which segments are missing."""
    gaps = gaps_of(bounds)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:SHOWN_MAX]]
    if len(gaps) > SHOWN_MAX:
        shown.append(f"{len(gaps) - SHOWN_MAX} more gaps")
    when = utc_text(since)
    return f"{recorder}: missing since {when}: segment {', '.join(shown)}"
