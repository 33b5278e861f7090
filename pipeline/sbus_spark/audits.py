"""Audit: was every delivery expected, and every expected delivery made?

See spec/3-protocol.md to spec/9-running.md.  The idea:

- `events` sums up each block of a trace.  From a row for each part the driver
  finds where runs begin and go on (`runs_of`), and gives each part its place.
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

import functools
import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import sbus

from . import events, inputs, matching, traces
from .messages import schema_of
from .views import Views

# What a control message sets, by its key
MODES = [
    part.decode()
    for key in sbus.CHOICES
    for part in (key, key.rpartition(b"/")[0])
]
# A part of a block is at a *place* among all parts.  It stands in *own_file*,
# and its run began in *file*.  A *run* that did not begin is below 0.  The
# *stop* is the first one in the part.  A run *may_go_on* if its last part may.
RUNS = """
block long, part long, place long, own_file string, run long, file string,
prefix string, may_go_on boolean, stop long
"""
ROWS = """
breach string, file string, n long, t long, m long, publisher long, c long,
key string, detail string, messages long
"""
HISTORY = "events", "spans", "free", "lives", "mixed", "subscriptions", "keys"
EXPECTATIONS = "cases", "expected", "echo_off", "suspects", "blocks"
EXACT = "seen", "published", "deliveries"


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

    A row `undecided` is no breach: it counts messages that wait for a client
    where a trace ends without a stop.
    Raises: InputError if there is no such file, or it is no trace; OSError.
    """
    blocks = traces.blocks_in(paths)
    seed = secrets.randbits(62)
    read = functools.partial(events.read, blocks, seed)
    tasks = 1 + traces.size_of(blocks) // traces.BLOCK_BYTES
    numbers = spark.range(0, len(blocks), 1, tasks)
    facts = numbers.mapInArrow(read, events.FACTS).localCheckpoint()
    # As Arrow: from Python's rows Spark makes them anew, in Python, in each
    # query.  Kept: Spark cannot tell the columns of an inline table apart
    # where it comes twice in a query.
    runs = spark.createDataFrame(runs_of(facts, blocks, is_running))
    views = Views(spark, "audit.sql", facts=facts, runs=runs.localCheckpoint())

    views.compute(*HISTORY, modes=F.create_map(*map(F.lit, MODES)))
    views["held"] = matching.holds(views["subscriptions"]).localCheckpoint()
    views["selections"] = matching.selections(views["keys"], views["held"])
    views.compute(*EXPECTATIONS, seed=seed)
    breaches = ["odd_runs", "odd_lines", "odd_clients", "bad_drops"]
    if not views["blocks"].isEmpty():
        again = views["blocks"].repartition(tasks)
        views["exact"] = again.mapInArrow(read, events.FACTS)
        views.compute(*EXACT)
        breaches += ["odd_messages", "bad_deliveries", "undecided"]
    if not views["mixed"].isEmpty():
        breaches.append("out_of_order")
    views.compute(*breaches)
    rows = spark.createDataFrame([], ROWS)
    for name in breaches:
        rows = rows.unionByName(views[name], allowMissingColumns=True)
    return rows.fillna(1, "messages").localCheckpoint()


def chosen(rows: DataFrame, selection: inputs.Selection) -> DataFrame:
    """Return breaches in some time, of the keys that a pattern selects.

    Those without a time, or a key, are among them.
    """
    if selection[:2] != (inputs.FIRST, inputs.LAST):
        since, until = map(inputs.nanoseconds, selection[:2])
        rows = rows.where(f"t is null or t >= {since} and t < {until}")
    return matching.selected(rows, selection.patterns)


def summary(rows: DataFrame) -> dict[str, int]:
    """Return the messages or breaches of each kind, by its name."""
    counts = rows.groupBy("breach").sum("messages").collect()
    return {str(name): int(count) for name, count in sorted(counts)}


# ==== Runs ===================================================================


def runs_of(
    facts: DataFrame, blocks: Sequence[traces.Block], is_running: bool
) -> pa.Table:
    """Return the RUNS in traces: a row for each part, in their order."""
    parts: dict[str, list[Row]] = defaultdict(list)
    columns = "block", "part", "n", "last", "text", "high"
    for part in sorted(facts.where("ev = 'part'").select(*columns).collect()):
        parts[blocks[part.block].path].append(part)

    rows: list[tuple[Any, ...]] = []
    number = 0
    for chain in chains(parts):
        number += 1
        began = chain[0]
        prefix = None  # until there is a start
        in_chain = [(file, part) for file in chain for part in parts[file]]
        for index, (file, part) in enumerate(in_chain, 1):
            if part.text is not None:
                number += 1
                began = file
                prefix = part.text
            run = -number if prefix is None else number
            place = part.block, part.part, len(rows), file
            may_go_on = is_running and index == len(in_chain)
            rows.append((*place, run, began, prefix, may_go_on, part.high))
    names = schema_of(RUNS).names
    return pa.table(dict(zip(names, zip(*rows), strict=True)), schema_of(RUNS))


def chains(parts: dict[str, list[Row]]) -> list[list[str]]:
    """Return lists of files, in which each goes on where the last ends.

    A file that does not begin with a start needs exactly one other that ends
    there, and no third one that also goes on from there.
    """
    ending: dict[int, list[str]] = defaultdict(list)  # before an event
    beginning: dict[int, list[str]] = defaultdict(list)  # with an event
    for file, in_file in parts.items():
        events_in_file = [part for part in in_file if part.n is not None]
        if not events_in_file:
            continue
        if events_in_file[0].text is None:
            beginning[events_in_file[0].n].append(file)
        # Another file may go on where the last run has no stop
        ends = [(x.text, x.high) for x in events_in_file]
        stops = [high for text, high in ends if (text, high) != (None, None)]
        if not stops or stops[-1] is None:
            ending[events_in_file[-1].last + 1].append(file)
    after = {
        ending[n][0]: files[0]
        for n, files in beginning.items()
        if len(files) == len(ending[n]) == 1 and files != ending[n]
    }

    lists: list[list[str]] = []
    listed: set[str] = set()
    for file in sorted(parts, key={*after.values()}.__contains__):
        chain = []
        while file and file not in listed:
            listed.add(file)
            chain.append(file)
            file = after.get(file, "")
        if chain:
            lists.append(chain)
    return lists
