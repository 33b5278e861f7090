"""Reports: the traffic in a table, in numbers.

Two jobs read the table.  The first counts messages by key, host and size,
and looks at the numbers that recorders gave them; the second counts by spans
of time, whose length the first has found.  A task counts what it reads; what
tasks have counted of the same key, host, recorder or span meets in one task,
which adds it up.

What reaches the driver is a few rows, however large the table: from each of
TASKS_MAX tasks at most KEYS_MAX of a kind, and GAPS_MAX of gaps.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import DataFrame

from .common import DAY, SECOND, InputError
from .table import leaves, no_messages, rows_in

BUCKETS_MAX = 120
KEYS_MAX = 10_000
KEYS_OVER_TIME = 8  # the busiest
HOSTS_MAX = 1_000
GAPS_MAX = 100
BUCKET_SECONDS = (1, 2, 5, 10, 30, 60, 300, 900, 3_600, 21_600, 86_400)
TASKS_MAX = 16  # that add up
FILES_MAX = 64  # of a table, that a task reads
ROWS = 1 << 16  # of Spark, that are counted at once
COUNTS = 1 << 20  # that a task keeps before it adds them up
COLUMNS = ("host", "rec", "n", "t", "key", "size")
PERCENTILES = {"p50": 50, "p99": 99, "largest": 100}
RECORDER = ("host", "rec")
NUMBERS = {"messages": "sum", "bytes": "sum", "first": "min", "last": "max"}

By = tuple[str, ...]  # names of columns
Table = Any  # of Arrow
Part = tuple[int, tuple[By, Table]]  # which task is to add it up, and what
Found = tuple[int, list[dict[str, Any]]]  # how many there are, and the first


def bucket_seconds(first: int, last: int) -> int:
    """Return how long the spans of a chart are, in seconds."""
    for seconds in BUCKET_SECONDS:
        if (last - first) / SECOND / seconds < BUCKETS_MAX:
            return seconds
    days = (last - first) // DAY
    return 86_400 * (days // BUCKETS_MAX + 1)


# =============================================================================
# Counting
# =============================================================================


def summed(counts: Table, *by: str) -> Table:
    """Return the NUMBERS of all messages, by some columns."""
    groups = counts.group_by([*by], use_threads=False)
    made = groups.aggregate(list(NUMBERS.items()))
    return made.rename_columns([*by, *NUMBERS])


class Counts:
    """The NUMBERS of messages, by some columns and by size."""

    def __init__(self) -> None:
        self._parts: list[Table] = []

    def add(self, batch: Table, **by: Any) -> None:
        """Count the messages of a batch by columns that are given."""
        size, t = batch["size"], batch["t"]
        columns = pyarrow.repeat(1, len(size)), size, t, t
        by["size"] = size
        found = pyarrow.table({**by, **dict(zip(NUMBERS, columns))})
        self._parts.append(summed(found, *by))
        first, *others = map(len, self._parts)
        if sum(others) > max(COUNTS, first):
            self._parts = [summed(pyarrow.concat_tables(self._parts), *by)]

    def parts(self, tasks: int, *kinds: By) -> Iterator[Part]:
        """Yield what was counted, by columns of each kind and by size."""
        if self._parts:
            counts = pyarrow.concat_tables(self._parts)
            # 0 for no byte, n for up to 2 to the power of n less one
            power = np.frexp(counts["size"].to_numpy())[1].astype("i8")
            counts = counts.append_column("power", pyarrow.array(power))
            for by in kinds:
                yield from spread(tasks, by, summed(counts, *by, "size"))


def spread(tasks: int, by: By, counts: Table) -> Iterator[Part]:
    """Yield each row for the task that gets those that are like it."""
    number = np.zeros(len(counts), "i8")
    if by:
        names = counts[by[0]].combine_chunks().dictionary_encode()
        texts = (str(name).encode() for name in names.dictionary.to_pylist())
        chosen = [zlib.crc32(text) % tasks for text in texts]
        number = np.array(chosen, "i8")[names.indices]
    for task in set(number.tolist()):
        yield task, (by, counts.filter(pyarrow.array(number == task)))


def count_kinds(tasks: int, batches: Iterable[Table]) -> Iterator[Part]:
    """Yield what a task counts by key, host and size, and what is there."""
    counts = Counts()
    for batch in batches:
        counts.add(batch, host=batch["host"], key=batch["key"])
        n = batch["n"]
        numbers = {"first": n, "last": n, "t": batch["t"]}
        names = {name: batch[name] for name in RECORDER}
        for own in recorders(pyarrow.table({**names, **numbers})):
            yield from spread(tasks, RECORDER, ranges(own))
    yield from counts.parts(tasks, ("key",), ("host",), ("power",), ())


def count_times(
    span: int, keys: list[str], tasks: int, batches: Iterable[Table]
) -> Iterator[Part]:
    """Yield what a task counts by spans of time, also of some keys."""
    counts, wanted = Counts(), pyarrow.array(keys, pyarrow.string())
    for batch in batches:
        t, key = batch["t"].to_numpy(), batch["key"]
        key = compute.if_else(compute.is_in(key, wanted), key, None)
        counts.add(batch, t=pyarrow.array(t - t % span), key=key)
    yield from counts.parts(tasks, ("t",), ("t", "key"))


def recorders(rows: Table) -> Iterator[Table]:
    """Yield the rows of each recorder."""
    names = rows.group_by([*RECORDER]).aggregate([]).to_pylist()
    for one in names:
        own = rows
        if len(names) > 1:
            is_own = (compute.field(name) == one[name] for name in one)
            own = rows.filter(functools.reduce(operator.and_, is_own))
        yield own


def ranges(rows: Table) -> Table:
    """Return the numbers of one recorder, in order, as ranges without gaps.

    | column | type | meaning |
    |---|---|---|
    | host, rec | string | the run |
    | first, last | long | the range, both included |
    | t | long | nanoseconds since 1970, of the first |
    """
    rows = rows.take(np.argsort(rows["first"].to_numpy(), kind="stable"))
    first = rows["first"].to_numpy()
    last = np.maximum.accumulate(rows["last"].to_numpy())
    begins = np.flatnonzero(np.append(True, first[1:] > last[:-1] + 1))
    ends = np.append(begins[1:], len(rows)) - 1
    last = pyarrow.array(last[ends])
    return rows.take(begins).drop(["last"]).append_column("last", last)


# =============================================================================
# Adding up
# =============================================================================


def gaps(tables: list[Table], by: By) -> Found:
    """Return where the numbers of recorders' runs do not go on.

    They are the first GAPS_MAX of them, how many there are is of messages.

    | column | type | unit |
    |---|---|---|
    | host, rec | string | the run |
    | after | long | the number before the gap |
    | lost | long | messages |
    | t | long | nanoseconds since 1970, of the first message after it |
    """
    found = []
    for own in recorders(pyarrow.concat_tables(tables)):
        own = ranges(own)
        after = np.append(0, own["last"].to_numpy()[:-1])
        lost = own["first"].to_numpy() - after - 1
        own = own.append_column("after", pyarrow.array(after))
        own = own.append_column("lost", pyarrow.array(lost))
        found.append(own.filter(pyarrow.array(lost > 0)))
    every = pyarrow.concat_tables(found).select([*by, "after", "lost", "t"])
    lost = compute.sum(every["lost"]).as_py() or 0
    return lost, every.sort_by("t").slice(0, GAPS_MAX).to_pylist()


def traffic(tables: list[Table], by: By) -> Found:
    """Return how much traffic there was, by columns, the busiest first.

    | column | type | unit |
    |---|---|---|
    | those of *by* | | |
    | messages | long | messages |
    | bytes | long | bytes of payload |
    | first, last | long | nanoseconds since 1970 |
    | p50, p99, largest | long | bytes of payload of a message |
    """
    counts = summed(pyarrow.concat_tables(tables), *by, "size")
    names = [(name, "ascending") for name in by]
    counts = counts.sort_by([*names, ("size", "ascending")])
    found = summed(counts, *by)
    found = found.sort_by(names) if by else found
    messages = found["messages"].to_numpy()
    begins = np.cumsum(messages) - messages
    ends = np.cumsum(counts["messages"].to_numpy())
    sizes = counts["size"].to_numpy()
    for name, percent in PERCENTILES.items():
        place, part = np.divmod(percent * (messages - 1), 100)
        low, high = (
            sizes[np.searchsorted(ends, begins + one, "right")]
            for one in (place, place + (part > 0))
        )
        size = low + (high - low) * part // 100
        found = found.append_column(name, pyarrow.array(size))
    found = found.sort_by([("messages", "descending"), *names])
    return len(found), found.slice(0, KEYS_MAX).to_pylist()


def added_up(parts: Iterable[Part]) -> Iterator[tuple[By, Found]]:
    """Yield what tasks have counted, by the same columns."""
    tables: dict[By, list[Table]] = {}
    for _, (by, table) in parts:
        tables.setdefault(by, []).append(table)
    for by, some in tables.items():
        yield by, (gaps if by == RECORDER else traffic)(some, by)


def job(
    batches: Any, count: Callable[[int, Iterable[Table]], Iterator[Part]]
) -> dict[By, Found]:
    """Return what is counted of an RDD of batches, as added_up."""
    tasks = min(batches.getNumPartitions(), TASKS_MAX)
    parts = batches.mapPartitions(functools.partial(count, tasks))
    rows = parts.partitionBy(tasks, int).mapPartitions(added_up).collect()
    found: dict[By, Found] = {}
    for by, (number, some) in rows:
        total, first = found.get(by, (0, []))
        found[by] = total + number, first + some
    return found


# =============================================================================
# What is read
# =============================================================================


def batches_of(rows: Iterable[Any]) -> Iterator[Table]:
    """Yield rows of Spark as batches."""
    rows = iter(rows)
    while some := list(itertools.islice(rows, ROWS)):
        yield pyarrow.table(dict(zip(COLUMNS, map(list, zip(*some)))))


def batches_in(files: Iterable[str]) -> Iterator[Table]:
    """Yield what is in files of a table as batches."""
    for file in files:
        for batch in rows_in(file, COLUMNS[1:]):
            yield pyarrow.Table.from_batches([batch])


def summarize_here(context: SparkContext, table: str) -> dict[str, Any]:
    """Return what summarize does, of a table in a folder of all executors.

    This takes a fraction of the time.  Raises: InputError.
    """
    files = leaves(table)
    if not files:
        raise no_messages(table, os.path.exists(f"{table}/_checkpoint"))
    tasks = min(len(files), 4 * context.defaultParallelism)
    tasks = max(tasks, len(files) // FILES_MAX)
    return summary(context.parallelize(files, tasks).mapPartitions(batches_in))


def summarize(table: DataFrame) -> dict[str, Any]:
    """Return all that a report shows; times in nanoseconds since 1970.

    Raises: InputError if the table is empty.
    """
    return summary(table.select(*COLUMNS).rdd.mapPartitions(batches_of))


def summary(batches: Any) -> dict[str, Any]:
    """Return all that a report shows of an RDD of batches."""
    found = job(batches, count_kinds)
    if not found:
        raise InputError("the table is empty: there is nothing to report")
    (totals,) = found[()][1]
    keys_total, keys = found["key",]
    keys.sort(key=lambda row: (-row["messages"], row["key"]))
    hosts = sorted(found["host",][1], key=lambda row: row["host"])
    lost, some_gaps = found[RECORDER]
    seconds = bucket_seconds(totals["first"], totals["last"])
    first_keys = [row["key"] for row in keys[:KEYS_OVER_TIME]]
    count = functools.partial(count_times, seconds * SECOND, first_keys)
    spans = job(batches, count)
    times, key_times = (
        sorted(spans[by][1], key=lambda row: row["t"])
        for by in (("t",), ("t", "key"))
    )
    return {
        "totals": totals,
        "keys_total": keys_total,
        "keys": keys[:KEYS_MAX],
        "key_times": {
            key: [row for row in key_times if row["key"] == key]
            for key in first_keys
        },
        "sizes": sorted(found["power",][1], key=lambda row: row["power"]),
        "hosts": hosts[:HOSTS_MAX],
        "seconds": seconds,
        "times": times,
        "lost": lost,
        "gaps": sorted(some_gaps, key=lambda row: row["t"])[:GAPS_MAX],
    }
