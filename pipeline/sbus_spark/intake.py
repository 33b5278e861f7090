"""Intake: captures to tables, each message once.

A message is known by its recorder and its number.  The driver lists segments,
and lets `tasks` read those that are not `known`, and leave out what the table
has.  So it does no harm to look at a segment twice.  Then it adds all files in
one commit.  Of two ingests that began with the same snapshot Delta refuses the
second, so that none adds what the other has.  Tasks begin later, so they look
at this snapshot or a later one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from deltalake import DeltaTable

from . import tables
from .captures import Capture, Segment
from .inputs import BusyError, absolute, moment_of, utc_text
from .known import Known
from .tasks import OUTCOME, Batches, do_task

Session = Any  # of Spark, or a function that starts one
FOLLOW_SECONDS = 5.0
REST_SECONDS = 300.0  # after which nobody seems to copy a segment
LEFT_SECONDS = 3_600.0  # after which nobody seems to write a hidden segment


class Batch(NamedTuple):
    """What a round of an ingest did."""

    messages: int
    quarantined: int
    segments: int
    removed: int  # segments
    kept: int  # segments that may be removed later
    remarks: list[str]  # what is missing, or not whole


def ingest(
    spark: Session, capture: str, table: str, is_cleaning: bool = False
) -> tuple[int, int]:
    """Add what a capture has and a table lacks, each line once.

    Return how many messages were added to the table, and how many lines to
    the quarantine.  Raises: as rounds.
    """
    batches = [*rounds(spark, capture, table, is_cleaning)]
    lines = sum(batch.quarantined for batch in batches)
    return sum(batch.messages for batch in batches), lines


def rounds(
    spark: Session,
    capture: str,
    table: str,
    is_cleaning: bool = False,
    until: threading.Event | None = None,
) -> Iterator[Batch]:
    """Ingest in rounds; yield what each did.

    *spark* is a session, or starts one when there are new segments.  Those of
    a recorder may come in any order; a batch names those that are missing.
    With *is_cleaning*, remove segments that were in the table when a round
    begins, and that nobody has written for REST_SECONDS: others may be half
    copied.  With *until*, go on with segments that come later, until it is
    set.  Raises: PySparkException; InputError; without *until* BusyError, if
    another command is at work on the table.
    """
    source = Capture(capture)
    where = absolute(table)
    tables.make_table(where)
    is_done = False
    while not is_done:
        try:
            batch, is_done = ingest_once(spark, source, where, is_cleaning)
        except BusyError:
            if not until:
                raise
            continue  # what it wrote is in no snapshot
        yield batch
        if is_done and until:
            is_done = until.wait(FOLLOW_SECONDS)


def ingest_once(
    spark: Session, source: Capture, where: str, is_cleaning: bool
) -> tuple[Batch, bool]:
    """Do a round of an ingest; return also whether nothing is left for now.

    Raises: as rounds.
    """
    began = time.time()
    opened = tables.open_table(where)
    quarantine = tables.open_delta(tables.aside(where))
    segments, hidden = source.files()
    known = Known(where, opened)
    new = [segment for segment in segments if not known.has(segment)]
    shrunk = [segment for segment in new if known.has_longer(segment)]
    rested_since = began - REST_SECONDS
    removed = sum(
        source.remove(segment)
        for segment in segments
        if is_cleaning
        and known.has(segment)
        and segment.written < rested_since
    )

    outcomes: Sequence[Any] = []
    if new:
        groups = source.groups(new)
        work = functools.partial(do_task, source, where, groups)
        outcomes = do_tasks(spark, work, len(groups))
    late = late_tasks(outcomes)
    outcomes = [x for x in outcomes if x.task not in late]
    counts = add_files(where, opened, quarantine, outcomes)

    faults = {x.segment: x.fault for x in outcomes if x.fault}
    read = {x.segment for x in outcomes if x.segment and not x.fault}
    known.add([segment for segment in new if segment.path in read])
    known.forget(source.folder, segments)
    if new:
        known.write()
    batch = Batch(
        *counts,
        len(read),
        removed,
        len(segments) - removed,
        remarks_on(known, faults, shrunk, hidden, began),
    )
    return batch, not late


def do_tasks(
    spark: Session, work: Callable[[Batches], Batches], count: int
) -> Sequence[Any]:
    """Do tasks by their numbers; return the rows of OUTCOME they yield."""
    session = spark() if callable(spark) else spark
    numbers = session.range(0, count, 1, count)
    rows: Sequence[Any] = numbers.mapInArrow(work, OUTCOME).collect()
    return rows


def late_tasks(outcomes: Sequence[Any]) -> set[int]:
    """Return the tasks that may have messages which others have as well.

    As of a copy under another name.  What they wrote is left out, and their
    segments are looked at in another round.  Of a recorder whose ranges
    overlap its first task stays, so each round adds something.
    """
    ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for x in outcomes:
        if x.recorder is not None:
            ranges[x.recorder].append((x.first, x.last, x.task))
    late: set[int] = set()
    for of_recorder in ranges.values():
        tasks = {task for _, _, task in of_recorder}
        end = 0
        for first, last, _ in sorted(of_recorder):
            if first <= end:
                late |= tasks - {min(tasks)}
            end = max(end, last)
    return late


def add_files(
    where: str,
    opened: DeltaTable,
    quarantine: DeltaTable,
    outcomes: Iterable[Any],
) -> tuple[int, int]:
    """Commit the files that tasks wrote; return how many messages and lines.

    Those of the quarantine are first: after a kill between the commits, the
    next ingest reads the segments again, and finds that it has their lines.
    Raises: as commit.
    """
    written = [x for x in outcomes if x.path]
    of_lines = [x for x in written if x.is_aside]
    of_messages = [x for x in written if not x.is_aside]
    if of_lines:
        aside = tables.aside(where)
        tables.commit(aside, quarantine, of_lines)
    if of_messages:
        tables.commit(where, opened, of_messages)
    return sum(x.rows for x in of_messages), sum(x.rows for x in of_lines)


def remarks_on(
    known: Known,
    faults: dict[str, str],
    shrunk: Iterable[Segment],
    hidden: dict[str, float],
    now: float,
) -> list[str]:
    """Return in words what an ingest had to leave out."""
    remarks = known.gaps()
    remarks += [f"{path}: {faults[path]}" for path in sorted(faults)]
    for segment in shrunk:
        remarks.append(
            f"{segment.path}: it is smaller than when it was read; the table"
            " keeps what it had"
        )
    remedy = (
        "start a recorder on its host, or if that is gone, remove the dot from"
        " the name"
    )
    for path, written in sorted(hidden.items()):
        if now - written > LEFT_SECONDS:
            when = utc_text(moment_of(written))
            remarks.append(f"{path}: left hidden since {when}: {remedy}")
    return remarks
