"""Upkeep: what is to be done with a table each night.  Without Spark."""

from __future__ import annotations

import datetime

import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import fs

from . import tables
from .known import Known


def expire(table: str, before: datetime.date) -> tuple[int, int]:
    """Drop the days of a table before a day.

    Return how many messages went, and how many lines of the quarantine.
    Raises: as open_table.
    """
    counts = []
    for where, opened in tables.parts_of(table):
        files = tables.files_of(opened)
        old = files.filter(pc.less(files["partition.day"], before))
        counts.append(pc.sum(old["num_records"]).as_py() or 0)
        if len(old):
            opened.delete(f"day < '{before}'")
        clear(where)
    return counts[0], sum(counts[1:])


def compact(table: str) -> tuple[int, int, int]:
    """Merge the small files of each day, of the quarantine as well.

    Return how many files there were, how many there are, and how many older
    ones were removed.  Raises: as open_table.
    """
    before = after = removed = 0
    for where, opened in tables.parts_of(table):
        before += len(tables.files_of(opened))
        opened.optimize.compact()
        opened.update_incremental()
        after += len(tables.files_of(opened))
        tables.commit(where, opened, [], tables.COMPACTED)
        removed += clear(where)
    return before, after, removed


def clear(where: str) -> int:
    """Remove files of days that no snapshot of the last READERS_HOURS names.

    The log of older commits goes as well: a checkpoint has what they did.
    Return how many files went.
    """
    opened = tables.open_delta(where)
    known = Known(where, opened)
    if known.sizes:  # they hold from now on, as the log is cleaned up
        known.write()
    files, folder = fs.FileSystem.from_uri(where)
    hours = tables.READERS_HOURS
    removable = opened.vacuum(hours, True, False, full=True)
    # What is not in a folder of a day is not the table's
    paths = [path for path in removable if path.startswith("day=")]
    for path in paths:
        files.delete_file(f"{folder}/{path}")
    opened.create_checkpoint()
    opened.cleanup_metadata()
    return len(paths)
