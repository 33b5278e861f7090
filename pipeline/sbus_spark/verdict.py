"""The verdict: audit takes traces through all of that, step by step."""

from __future__ import annotations

import itertools
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .breaches import (
    absence_breaches,
    delivery_breaches,
    drop_breaches,
    first_sends,
    life_breaches,
    line_breaches,
    message_breaches,
    mixed,
    number_breaches,
    order_breaches,
    subscription_breaches,
)
from .deliveries import holders, owed, reached, suspects
from .trace import (
    lives,
    published,
    settings,
    stretches,
    subscriptions,
    tallies,
    with_runs,
)


def keep(rows: DataFrame, path: str) -> DataFrame:
    """Write rows down; return what reads them.

    Other than with rows that Spark caches, its plans stay small, memory does
    not fill, and no worker that dies takes rows with it.
    """
    rows.write.mode("overwrite").parquet(path)
    return rows.sparkSession.read.schema(rows.schema).parquet(path)


def audit(lines: DataFrame, scratch: str) -> DataFrame:
    """Return all that is wrong with what traces tell.

    *lines* are those of read_trace; what is found on the way is written to
    folders in *scratch*, which all workers must share.  The columns are
    those of as_breaches, and

    | column | type | meaning |
    |---|---|---|
    | file | string | the trace, null if the detail says it |
    """
    folders = (f"{scratch}/{number}" for number in itertools.count())

    def kept(rows: DataFrame) -> DataFrame:
        return keep(rows, next(folders))

    def some(rows: DataFrame, of: DataFrame) -> DataFrame:
        return rows.join(of.select("run", "m"), ["run", "m"], "left_semi")

    lines = kept(lines)
    numbers = kept(tallies(lines))
    parts = kept(stretches(numbers))
    events = with_runs(lines, parts)
    messages, done = kept(published(events)), reached(events)
    rare = kept(events.filter(~F.col("ev").isin("msg", "send")))
    clients = kept(lives(numbers, parts, rare))
    patterns = kept(subscriptions(rare, clients))
    held = kept(holders(patterns, messages, parts))
    silences = kept(settings(rare, ["echo/off", "echo/on"]))
    wrong = kept(suspects(messages, held, silences, done))
    doubtful = kept(some(messages, wrong.filter(F.col("msgs") == 1)))
    due = owed(doubtful, held, silences)
    breaches = [
        delivery_breaches(doubtful, due, some(done, doubtful), clients),
        drop_breaches(rare, clients),
        line_breaches(lines),
        number_breaches(parts),
        absence_breaches(parts),
        life_breaches(clients),
        message_breaches(wrong),
        subscription_breaches(patterns),
    ]
    unsure = kept(mixed(done, clients))
    if not unsure.isEmpty():
        firsts = kept(first_sends(done, unsure))
        ordered = owed(some(messages, firsts), held, silences)
        breaches.append(order_breaches(ordered, firsts))
    files = parts.select("run", "file").filter(F.col("run").isNotNull())
    found = kept(reduce(DataFrame.unionAll, breaches))
    return found.join(F.broadcast(files.distinct()), "run", how="left")
