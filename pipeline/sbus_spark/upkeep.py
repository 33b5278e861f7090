"""Upkeep: what is to be done with a table each night.  Without Spark."""

from __future__ import annotations

import contextlib
import datetime

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from .files import count_rows, files_at, files_of
from .inputs import absolute
from .known import Known
from .tables import READERS_HOURS, open_delta, parts_of


def expire(table: str, before: datetime.date) -> tuple[int, int]:
    """Drop the days of a table before a day.

    Return how many messages went, and how many lines of the quarantine.
    Raises: as open_table.
    """
    counts = []
    for where, opened in parts_of(table):
        files = files_of(opened)
        old = files.filter(pc.less(files["partition.day"], pa.scalar(before)))
        counts.append(count_rows(where, old))
        if len(old):
            opened.delete(f"day < '{before}'")
    clear(table)
    return counts[0], sum(counts[1:])


def compact(table: str) -> tuple[int, int]:
    """Merge the small files of each day, of the quarantine as well.

    Return how many files there were, and how many there are.
    Raises: as open_table.
    """
    before = after = 0
    for _, opened in parts_of(table):
        before += len(files_of(opened))
        opened.optimize.compact()
        opened.update_incremental()
        after += len(files_of(opened))
    clear(table)
    return before, after


def clear(table: str) -> None:
    """Remove files of days that no snapshot of the last READERS_HOURS names.

    The log of older commits goes as well: a checkpoint has what they did.
    """
    for where, opened in parts_of(table):
        files = files_at(where)
        for path in opened.vacuum(READERS_HOURS, True, False, full=True):
            # Delta would remove others' files as well, also through links.
            # The second folder has changes that another tool wanted to see
            if path.startswith(("day=", "_change_data/")):
                # The log names for a week also what has gone before
                with contextlib.suppress(FileNotFoundError):
                    files.delete_file(path)

    where = absolute(table)
    # While the log tells that they hold
    Known(where, open_delta(where)).write()
    for _, opened in parts_of(table):
        opened.create_checkpoint()
        opened.cleanup_metadata()
