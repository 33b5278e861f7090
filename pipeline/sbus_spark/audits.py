"""Audit: was every delivery expected, and every expected delivery made?

See spec/3-protocol.md to spec/9-running.md.  The idea:

- `events` sums up each block of a trace.  From a row for each part the driver
  finds where runs begin and go on (`outline`), and gives each part its place.
  So each event has a place in its run (*at*), whatever its number.
- What clients subscribed to or asked for are intervals (*spans*).  Keys that
  the same patterns select are one case.  *expected* says which clients
  receive a case, and when.
- A message is credited with a random mark of each client that it is expected
  at, and debited with those of the clients that it reached.  If the sum is not
  zero, it is one of the *suspects*.
- Only the blocks with suspects, and with clients that were sent messages out
  of order, are read again, and looked at event by event (*seen*).
"""

from __future__ import annotations

import importlib.resources
import itertools
import re
import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import sbus

from . import events, matching
from .inputs import FIRST, LAST, Selection, nanoseconds

# What a control message sets, by its key
MODES = [
    part.decode()
    for key in sbus.CHOICES
    for part in (key, key.rpartition(b"/")[0])
]
RUNS = """
block long, part long, place long, own_file string, run long, file string,
prefix string
"""
VIEW = re.compile(r"^-- view: (\w+)(, kept)?\n(.*?)(?=^--|\Z)", re.M | re.S)
HISTORIES = "events", "spans", "lives", "mixed", "subscriptions", "keys"
EXPECTATIONS = "cases", "expected", "echo_off", "suspects", "blocks"
EXACT = "seen", "published", "deliveries"
ROWS = (
    "breach string, file string, n long, t long, m long, publisher long,"
    " c long, key string, detail string, messages long"
)


def audit(
    spark: SparkSession, paths: Sequence[str], is_running: bool = False
) -> DataFrame:
    """Return all that is wrong with some traces, a row for each breach.

    *paths* are files, or directories of them.  If a bus *is_running*, the
    last run of a trace need not have stopped.

    | column | type | meaning |
    |---|---|---|
    | breach | string | missing, unowed, secret-leak, duplicate, bad-drop, |
    | | | out-of-order, bad-trace; or undecided |
    | file | string | where the run began; of a line, where it stands |
    | n, m | long | the numbers of an event and a message, or null |
    | t | long | the time of the event, in nanoseconds since 1970, or null |
    | publisher, c | long | clients, or null |
    | key | string | a routing key or pattern, or null |
    | detail | string | what is wrong |
    | messages | long | how many messages the row stands for |

    A row `undecided` is no breach: it counts messages that were expected at a
    client, and of which nobody can know.
    Raises: InputError if there is no such file, or it is no trace; OSError.
    """
    blocks = [x for y in dict.fromkeys(paths) for x in events.blocks_of(y)]
    seed = secrets.randbits(62)
    tasks = events.tasks_for(blocks)
    numbers = spark.range(0, len(blocks), 1, tasks)
    facts = events.facts(numbers, blocks, seed).localCheckpoint()
    runs, told = outline(facts, blocks, is_running)
    views = {"facts": facts, "runs": spark.createDataFrame(runs, RUNS)}
    file = importlib.resources.files(__package__) / "audit.sql"
    queries = {name: rest for name, *rest in VIEW.findall(file.read_text())}
    values = {"seed": seed, "modes": F.create_map(*map(F.lit, MODES))}

    def compute(*names: str) -> None:
        for name in names:
            is_kept, query = queries[name]
            views[name] = spark.sql(query, values, **views)
            if is_kept:  # several use it, or one that reads files again
                views[name] = views[name].localCheckpoint()

    compute(*HISTORIES)
    views["held"] = matching.holds(views["subscriptions"]).localCheckpoint()
    views["selections"] = matching.selections(views["keys"], views["held"])
    compute(*EXPECTATIONS)
    found = ["odd_lines", "odd_clients", "bad_drops"]
    if not views["blocks"].isEmpty():
        again = views["blocks"].repartition(tasks)
        views["exact"] = events.facts(again, blocks, seed)
        compute(*EXACT)
        found += ["odd_messages", "bad_deliveries", "undecided"]
    if not views["mixed"].isEmpty():
        found.append("out_of_order")
    compute(*found)
    rows = spark.createDataFrame(told, ROWS)
    for name in found:
        rows = rows.unionByName(views[name], allowMissingColumns=True)
    return rows.fillna(1, "messages").localCheckpoint()


def chosen(rows: DataFrame, selection: Selection) -> DataFrame:
    """Return breaches in some time, of the keys that a pattern selects.

    Those without a time, or a key, are among them.
    """
    if selection.since > FIRST:
        since = nanoseconds(selection.since)
        rows = rows.where(F.col("t").isNull() | (F.col("t") >= since))
    if selection.until < LAST:
        until = nanoseconds(selection.until)
        rows = rows.where(F.col("t").isNull() | (F.col("t") < until))
    return matching.selected(rows, selection.patterns)


def summary(rows: DataFrame) -> dict[str, int]:
    """Return the messages or breaches of each kind, by its name."""
    counts = rows.groupBy("breach").sum("messages").collect()
    return {str(name): int(count) for name, count in sorted(counts)}


def outline(
    facts: DataFrame, blocks: Sequence[events.Block], is_running: bool
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the RUNS in traces, and as ROWS what is wrong with whole runs."""
    parts: dict[str, list[Row]] = defaultdict(list)
    columns = ("block", "part", "n", "last", "text", "high")
    for part in sorted(facts.where("ev = 'part'").select(*columns).collect()):
        parts[blocks[part.block].path].append(part)
    runs: list[tuple[Any, ...]] = []
    told: list[tuple[Any, ...]] = []

    def wrong(file: str, n: int, detail: str) -> None:
        told.append(("bad-trace", file, n, *[None] * 5, detail, 1))

    count = 0
    for chain in chains(parts):
        own: list[list[tuple[str, Row]]] = [[]]  # of each run; first of none
        for file in chain:
            for part in parts[file]:
                if part.text is not None:
                    own.append([])
                own[-1].append((file, part))
        for run in filter(None, own):
            began, first = run[0]
            count += first.text is not None
            about = (count if first.text is not None else 0, began, first.text)
            for file, part in run:
                place = part.block, part.part, len(runs), file
                runs.append((*place, *about))
            some = [(file, part) for file, part in run if part.n is not None]
            if first.text is None and some:
                wrong(some[0][0], some[0][1].n, NO_START)
            for (_, one), (file, two) in itertools.pairwise(some):
                if two.n != one.last + 1:
                    what = f"event {two.n} comes after event {one.last}"
                    wrong(file, two.n, what)
            stops = [part.high for _, part in some if part.high is not None]
            if some and not stops and not (is_running and run is own[-1]):
                wrong(began, some[-1][1].last, "the run has no stop")
            elif stops and stops[0] != some[-1][1].last:
                wrong(began, stops[0], "it goes on after its stop")
    return runs, told


NO_START = "it begins neither with start nor where exactly one other file ends"


def chains(parts: dict[str, list[Row]]) -> list[list[str]]:
    """Return lists of files, in which each goes on where the last ends.

    A file that does not begin with a start needs exactly one other that ends
    there, and no third one that also goes on from there.
    """
    last, first = defaultdict(list), defaultdict(list)
    for file, own in parts.items():
        some = [part for part in own if part.n is not None]
        if some and some[0].text is None:
            first[some[0].n].append(file)
        ends = [x.high for x in some if {x.text, x.high} != {None}]
        if some and (not ends or ends[-1] is None):
            last[some[-1].last + 1].append(file)
    after = {
        last[n][0]: some[0]
        for n, some in first.items()
        if len(some) == len(last[n]) == 1 and some != last[n]
    }
    found: list[list[str]] = []
    seen: set[str] = set()
    for file in sorted(parts, key={*after.values()}.__contains__):
        found.append([])
        while file and file not in seen:
            seen.add(file)
            found[-1].append(file)
            file = after.get(file, "")
    return found
