"""Known: which segments of a capture need not be looked at again.

The rows of a table are the truth.  To look at each segment in each round would
take long, so an ingest notes the size of each segment whose lines are
committed, in TABLE/_ingested.json.

**What a note says**, and why it may be believed.  It says: each line that the
segment at this path had, when it was of this size, is in the table, or was
dropped from it on purpose.  `--clean` removes a segment on the strength of its
note alone.  Three things make a note true:

1. It is written after the commit that added the lines, and the file names the
   latest commit by its version and its time.  An older log, as of a backup,
   and another table's log do not have this commit: then no note holds.
2. Each commit since then adds rows, or drops them on purpose.  After a
   RESTORE, an overwrite, a commit of an unknown kind or of none, or if the log
   no longer has all of them, no note holds.
3. A segment of another size is another one.

A note that does not hold, and a file that is missing or garbled, cost a look
at the segments.  They change no row, but for one case: rows that a DELETE
dropped come again from segments that are still there.  A row that was erased
(`reading`) does not, as it is there itself.

Two things fool a note.  A segment in which somebody wrote other lines of the
same length is not looked at.  A RESTORE that is made while a round is under
way comes too late for `--clean` to see.

**Runs.**  The file also says which segments each recorder run had, since
`--clean` removes them: number 1 is the first, and a gap is named.  This holds
whatever the table was restored to.  If the file is lost, the runs are those
in the latest rows, and no gap is before the first segment that comes then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import DeltaTable

from .captures import Segment
from .files import files_at, files_of, last_times
from .inputs import LAST
from .tables import NOTES, is_kept, open_delta, stamp_of

FORGOTTEN_SECONDS = 30 * 86_400  # after which a run that rests is forgotten
RECENT_DAYS = 7  # days with messages, in which a host is not forgotten
SHOWN_MAX = 5  # gaps of a recorder


class Run(NamedTuple):
    """The segments of a recorder run.

    *bounds* are a number at which segments begin, the one at which they cease,
    the one at which they begin again, and so on.
    """

    bounds: list[int]
    noted: float  # when it last had a new segment


def run_of(bounds: list[int], noted: float) -> Run:
    """Return a run as a file has it.  Raises: TypeError; ValueError."""
    return Run([int(x) for x in bounds], float(noted))


class Known:
    """What is known of captures and a table, as that was opened.

    *sizes* has that of each segment by its path, if the notes hold, and *runs*
    each recorder run by its name.
    """

    def __init__(self, where: str, opened: DeltaTable) -> None:
        self._where = where
        self._commit = opened.version(), stamp_of(opened)
        self.sizes: dict[str, int] = {}
        self.runs: dict[str, Run] = {}
        try:
            with files_at(where).open_input_stream(NOTES) as file:
                notes = json.loads(file.read())
            self.runs = {x: run_of(*run) for x, run in notes["runs"].items()}
            version, stamp = notes["commit"]
            if stamp and is_kept(opened, version, stamp):
                sizes = notes["sizes"].items()
                self.sizes = {path: int(size) for path, size in sizes}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            names = latest_recorders(where, opened)
            self.runs = {name: Run([], time.time()) for name in names}

    def write(self) -> None:
        """Write what is known to the file, at once.

        The table must still have what it had when it was opened.
        """
        opened = open_delta(self._where)
        if not is_kept(opened, *self._commit):
            return
        self._commit = opened.version(), stamp_of(opened)
        notes = {
            "commit": self._commit,
            "sizes": self.sizes,
            "runs": self.runs,
        }
        files, hidden = files_at(self._where), f"{NOTES}.{os.getpid()}.new"
        try:
            with files.open_output_stream(hidden) as file:
                file.write(json.dumps(notes).encode())
            files.move(hidden, NOTES)
        except BaseException:
            with suppress(OSError):
                files.delete_file(hidden)
            raise

    def has(self, segment: Segment) -> bool:
        """Return whether a segment is as long as when it was read."""
        return self.sizes.get(segment.path) == segment.size

    def has_longer(self, segment: Segment) -> bool:
        """Return whether a segment is shorter than when it was read."""
        return self.sizes.get(segment.path, 0) > segment.size

    def add(self, segments: Sequence[Segment]) -> None:
        """Note that the lines of segments are committed."""
        now = time.time()
        for segment in segments:
            self.sizes[segment.path] = segment.size
            run = self.runs.get(segment.recorder)
            bounds = run.bounds if run else []
            if run and not bounds and segment.number > 1:
                bounds = [1, segment.number]  # those before were noted once
            bounds = with_number(bounds, segment.number)
            self.runs[segment.recorder] = Run(bounds, now)

    def forget(self, folder: str, segments: Sequence[Segment]) -> None:
        """Leave out what a capture no longer has, and runs that rest."""
        paths = {segment.path for segment in segments}
        for path in [*self.sizes]:
            if path.startswith(f"{folder}/") and path not in paths:
                del self.sizes[path]
        limit = time.time() - FORGOTTEN_SECONDS
        listed = {segment.recorder for segment in segments}
        for name, run in [*self.runs.items()]:
            if run.noted < limit and name not in listed:
                del self.runs[name]

    def gaps(self) -> list[str]:
        """Return in words which segments are missing before others."""
        return [
            describe(name, run)
            for name, run in sorted(self.runs.items())
            if gaps_of(run.bounds)
        ]


def latest_recorders(where: str, opened: DeltaTable) -> list[str]:
    """Return the recorders with messages on the latest days of a table."""
    files = files_of(opened)
    days = pc.unique(files["partition.day"]).sort("descending")[:RECENT_DAYS]
    latest = files.filter(pc.is_in(files["partition.day"], days))
    return [*last_times(where, latest, LAST)]


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


def describe(name: str, run: Run) -> str:
    """Return in words which segments of a run are missing."""
    gaps = gaps_of(run.bounds)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:SHOWN_MAX]]
    if len(gaps) > SHOWN_MAX:
        shown.append(f"{len(gaps) - SHOWN_MAX} more gaps")
    return f"{name}: missing: segment {', '.join(shown)}"
