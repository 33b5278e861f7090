"""The verdict: audit takes traces through all of that, in two jobs.

In the first, each task reads its block and keeps it as arrays; the driver
gets from it what the task of another block has to know.  In the second, each
task says which of its messages and clients are suspects.  Only where there
are any, a third looks at them one by one.

What the driver gets of a block grows with the clients that are open in it,
with what they hold, and with the clients that it was sent anything to; not
with events.  Of suspects it gets ranges, RANGES_MAX from a task.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import pickle
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from .accounts import (
    M,
    Ranges,
    Setting,
    accounts,
    coarse,
    mixed,
    settle,
)
from .blocks import check_traces, texts
from .book import Book, Facts, facts_of
from .breaches import (
    BREACH_SCHEMA,
    BREACHES,
    Breach,
    bad_drops,
    first_sends,
    life_breaches,
    line_breaches,
    lives_of,
    message_breaches,
    odd_clients,
    order_breaches,
    piece_breaches,
    suspects_of,
)
from .events import Piece
from .history import Story
from .kept import Element, pieces_of
from .lines import Array
from .owed import Owed

TASKS_MAX = 16  # that put open accounts together
SPREAD_BITS = 12  # so many low bits of a message number do not choose one


def all_facts(
    kept: str, task: int, elements: Iterable[Element]
) -> Iterator[list[Facts]]:
    """Yield the facts of the pieces of a task, in a list."""
    pieces = pieces_of(kept, task, elements)
    yield [facts_of(piece, file) for file, piece in pieces]


def each_piece(
    work: Callable[[Piece, str, Setting], Iterable[Any]],
    kept: str,
    known: Any,
    task: int,
    elements: Iterable[Element],
) -> Iterator[Any]:
    """Yield what *work* yields of the pieces of a task that are in a run."""
    pieces = pieces_of(kept, task, elements)
    for (file, piece), setting in zip(pieces, known.value[task]):
        if setting is not None:
            yield from work(piece, file, pickle.loads(setting))


def suspicions(
    seed: int, tasks: int, piece: Piece, file: str, setting: Setting
) -> Iterator[tuple[int, tuple[str, int, Any]]]:
    """Yield (task, (what, run, ...)): open accounts, and what is odd."""
    story = Story(setting.state, piece.rare, len(piece.ev))
    run = setting.run
    if story.unheld or bad_drops(piece, setting, story):
        yield 0, ("pieces", run, ())
    if odd := odd_clients(piece, story):
        yield 0, ("clients", run, coarse(odd))
    unsure = mixed(piece, setting)
    if len(unsure):
        yield 0, ("order", run, ())
    rows = accounts(piece, setting, Owed(piece, story), unsure, seed)
    task = ((rows[:, M] >> SPREAD_BITS) + run) % tasks
    for number in set(task.tolist()):
        yield number, ("accounts", run, rows[task == number])


def settled(
    found: Iterable[tuple[int, tuple[str, int, Any]]],
) -> Iterator[tuple[str, int, Any]]:
    """Yield (what, run, ranges) of what is wrong, as suspicions tell it."""
    tables: dict[int, list[Array]] = {}
    for _, (what, run, value) in found:
        if what == "accounts":
            tables.setdefault(run, []).append(value)
        else:
            yield what, run, value
    for run, table in tables.items():
        if suspects := settle(table):
            yield "messages", run, coarse(suspects)


def direct(piece: Piece, file: str, setting: Setting) -> Iterator[Breach]:
    """Yield what is wrong in a piece by itself, but for its lines."""
    story = Story(setting.state, piece.rare, len(piece.ev))
    return piece_breaches(piece, file, setting, story)


def details(
    messages: dict[int, Ranges],
    clients: dict[int, Ranges],
    piece: Piece,
    file: str,
    setting: Setting,
) -> Iterator[tuple[tuple[str, int, int], Any]]:
    """Yield ((what, run, number), ...) of the suspects in a piece."""
    run = setting.run
    if run in clients:
        for c, life in lives_of(piece, setting, clients[run]):
            yield ("client", run, c), life
    if run in messages:
        for m, event in suspects_of(piece, setting, messages[run]):
            yield ("message", run, m), event


def judged(
    runs: Any, told: tuple[tuple[str, int, int], Iterable[Any]]
) -> Iterator[Breach]:
    """Yield what is wrong with a suspect."""
    (what, run, number), values = told
    judge: Any = life_breaches if what == "client" else message_breaches
    yield from judge(run, number, values, runs.value[run])


def ordered(
    told: tuple[tuple[str, int, int], Iterable[Any]],
) -> Iterator[tuple[tuple[int, int, int], Any]]:
    """Yield ((run, c, publisher), send) of which the order is to be seen."""
    (what, run, m), values = told
    if what == "message":
        for c, publisher, send in first_sends(m, values):
            yield (run, c, publisher), send


def placed(
    runs: Any, told: tuple[tuple[int, int, int], Iterable[Any]]
) -> Iterator[Breach]:
    """Yield which of the sends to a client came too late."""
    of, sends = told
    yield from order_breaches(of, sends, runs.value[of[0]].file)


class Audit:
    """An audit: what is wrong, as far as it is known.

    *few* are breaches that the driver found, *many* is an RDD of others.
    """

    def __init__(
        self,
        context: SparkContext,
        paths: Sequence[str],
        block_bytes: int | None = None,
        is_running: bool = False,
    ) -> None:
        self._context = context
        self._texts = texts(self._context, paths, block_bytes)
        self._kept = f"sbus-audit-{secrets.token_hex(8)}"
        facts = functools.partial(all_facts, self._kept)
        found = self._texts.mapPartitionsWithIndex(facts).collect()
        flat = [one for task in found for one in task]
        self._book = Book(flat, is_running)
        self._is_faulty = any(one.is_faulty for one in flat)
        settings = iter(self._book.settings)
        self._known = self._context.broadcast(
            [[next(settings) for _ in task] for task in found]
        )
        self._tasks = min(len(found), TASKS_MAX)
        self.few = self._book.breaches
        self.many = self._look_closer(self._doubts())

    def _doubts(self) -> list[tuple[str, int, Any]]:
        """Return what may be wrong: (what, run, ranges)."""
        seed = secrets.randbits(64)
        work = functools.partial(suspicions, seed, self._tasks)
        spread = self._each(work).partitionBy(self._tasks, int)
        doubts: list[Any] = spread.mapPartitions(settled).collect()
        return doubts

    def _look_closer(self, doubts: list[tuple[str, int, Any]]) -> Any:
        """Return an RDD of breaches, None if there is none."""
        ranges: dict[str, dict[int, list[Any]]] = {}
        for what, run, found in doubts:
            ranges.setdefault(what, {}).setdefault(run, []).extend(found)
        messages, clients = (
            {run: Ranges(some) for run, some in ranges.get(what, {}).items()}
            for what in ("messages", "clients")
        )
        runs = self._context.broadcast(self._book.runs)
        parts = []
        if self._is_faulty:
            lines = functools.partial(lines_of, self._kept, self._known)
            parts.append(self._texts.mapPartitionsWithIndex(lines))
        if "pieces" in ranges:
            parts.append(self._each(direct))
        if messages or clients:
            work = functools.partial(details, messages, clients)
            told = self._each(work).groupByKey(self._tasks)
            parts.append(told.flatMap(functools.partial(judged, runs)))
            if "order" in ranges:
                sends = told.flatMap(ordered).groupByKey(self._tasks)
                parts.append(sends.flatMap(functools.partial(placed, runs)))
        return self._context.union(parts) if parts else None

    def _each(self, work: Callable[..., Iterable[Any]]) -> Any:
        """Return an RDD of what *work* yields of each piece."""
        each = functools.partial(each_piece, work, self._kept, self._known)
        return self._texts.mapPartitionsWithIndex(each)

    def summary(self, shown: int) -> tuple[dict[str, int], list[Breach]]:
        """Return how many breaches of each kind there are, and the first."""
        counts = dict.fromkeys(BREACHES, 0)
        found = [summary_of(shown, self.few)]
        if self.many is not None:
            each = functools.partial(summary_of, shown)
            found += self.many.mapPartitions(
                lambda rows: [each(rows)]
            ).collect()
        for some, _ in found:
            for name, count in some.items():
                counts[name] += count
        first = heapq.merge(*(some for _, some in found), key=place_of)
        return counts, list(itertools.islice(first, shown))

    def rows(self, spark: SparkSession) -> DataFrame:
        """Return the breaches; for the columns see audit."""
        rows = self._context.parallelize(self.few, 1)
        if self.many is not None:
            rows = rows.union(self.many)
        return spark.createDataFrame(rows, BREACH_SCHEMA)


def place_of(breach: Breach) -> tuple[int, int]:
    """Return where a breach is told: by run and number, none first."""
    return breach.run or 0, breach.n or 0


def summary_of(
    shown: int, rows: Iterable[Breach]
) -> tuple[Counter[str], list[Breach]]:
    """Return how many breaches there are, and the first of them, in order."""
    counts: Counter[str] = Counter()
    first: list[Breach] = []
    for row in rows:
        counts[row.breach] += 1
        first.append(row)
        if len(first) > 2 * shown:
            first = heapq.nsmallest(shown, first, key=place_of)
    return counts, heapq.nsmallest(shown, first, key=place_of)


def audit(
    spark: SparkSession,
    paths: Sequence[str],
    block_bytes: int | None = None,
    is_running: bool = False,
) -> DataFrame:
    """Return all that is wrong with what traces tell, a row a breach.

    *paths* are files, or directories of them.  Of *block_bytes* there is a
    task each; without, it is chosen.  If the bus *is_running*, the last run
    of a file need not be stopped.

    | column | type | meaning |
    |---|---|---|
    | breach | string | one of BREACHES |
    | run | long | the run, from 1 on in the order of the files, or null |
    | n, m, publisher, c | long | event, message, clients, null for none |
    | key | string | routing key or pattern, null for none |
    | detail | string | what is wrong |
    | file | string | the trace, null if the detail says it |

    Raises: InputError if there is no such file, or nothing in it.
    """
    check_traces(paths)
    made = Audit(spark.sparkContext, paths, block_bytes, is_running)
    return made.rows(spark)


def lines_of(
    kept: str, known: Any, task: int, elements: Iterable[Element]
) -> Iterator[Breach]:
    """Yield what is wrong with the lines of the pieces of a task."""
    pieces = pieces_of(kept, task, elements)
    for (file, piece), setting in zip(pieces, known.value[task]):
        run = pickle.loads(setting).run if setting else 0
        yield from line_breaches(piece, file, run)
