"""Traces: read_trace, and what the events say of runs and clients.

See spec/8-running.md.  Facts:

- Spark reads a file in splits, and each in its order: the offset of the
  split and the number that it gives to the line tell the order of all.
- A server appends to its trace, so a file may hold several runs.
- Where events are numbered without gaps, n - line is one number in a split.
- Events are read from JSON once, and then kept: that costs the most.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

import sbus

from .common import (
    LONG,
    TEXT,
    InputError,
    all_of,
    any_of,
    check_there,
    is_there,
    schema,
)

TRACE_SCHEMA = schema(
    n=LONG,
    t=LONG,
    ev=TEXT,
    c=LONG,
    m=LONG,
    key=TEXT,
    size=LONG,
    pattern=TEXT,
    gid=LONG,
    uid=LONG,
    pid=LONG,
    reason=TEXT,
    cred_prefix=TEXT,
    corrupt=TEXT,  # a line that is no event
)
# What an event has beside n and t; the most frequent come first
FIELDS = {
    "send": ("c", "m"),
    "msg": ("c", "m", "key", "size"),
    "drop": ("c", "m", "reason"),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c",),
    "start": (),
    "stop": (),
}
FOR_EVER = (1 << 63) - 1  # the number of no event


def is_event() -> Column:
    """Return whether a line of a trace is an event with all its fields."""
    kinds = [
        all_of([F.col("ev") == kind, *map(is_there, fields)])
        for kind, fields in FIELDS.items()
    ]
    is_whole = F.col("corrupt").isNull() & is_there("n") & is_there("t")
    is_first = (F.col("ev") != "start") | (F.col("n") == 1)
    return is_whole & any_of(kinds) & is_first


def check_traces(paths: Iterable[str]) -> None:
    """Raise InputError if there is no trace, or Spark would not read it."""
    check_there(paths)
    for path in paths:
        if os.path.basename(path)[:1] in ("_", "."):
            raise InputError(f"{path}: Spark reads no name that begins so")
        if os.path.isfile(path) and not os.path.getsize(path):
            raise InputError(f"{path}: the file is empty")


def read_trace(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Return the lines of traces.

    | column | type | meaning |
    |---|---|---|
    | file | string | where it stands |
    | block | long | the split of the file, as its first byte's offset |
    | line | long | rises within a split; no two lines have the same |
    | ev | string | kind of event; null for a line that is no event |
    | n | long | event number |
    | c | long | client number |
    | m | long | message number |
    | text | string | key, pattern, reason of a drop, "gid uid pid" of an \
open, credential prefix of a start, or the line that is no event |

    Raises: InputError if there is no such file, or nothing in it.
    """
    check_traces(paths)
    lines = spark.read.schema(TRACE_SCHEMA).json(
        list(paths), columnNameOfCorruptRecord="corrupt"
    )
    who = F.concat_ws(" ", "gid", "uid", "pid")
    text = F.coalesce("key", "pattern", F.when(F.col("ev") == "open", who))
    more = F.coalesce("reason", "cred_prefix")
    return lines.select(
        F.col("_metadata.file_path").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
        F.when(is_event(), F.col("ev")).alias("ev"),
        "n",
        "c",
        "m",
        F.when(F.col("ev") == "send", None)
        .otherwise(F.coalesce(text, more, "corrupt"))
        .alias("text"),
    )


def tallies(lines: DataFrame) -> DataFrame:
    """Return the events in numbers, stretch by stretch and client by client.

    In a stretch of a split the event numbers go on as the lines do.

    | column | type | meaning |
    |---|---|---|
    | file, block, stretch | | the stretch; see stretch_of |
    | c | long | the client, null for events of none |
    | line | long | the first line |
    | n, last | long | the first and the last event number |
    | start | long | the line of the start of a run, null if it has none |
    | stop | long | number of the first stop, null for none |
    | opened, closed | long | number of such an event, null for none |
    | opens, closes | long | how many of these events there are |
    | last_m | long | the last message that was sent to it |
    | last_heard | long | event number of the last send to it |
    """
    return (
        lines.filter(F.col("ev").isNotNull())
        .groupBy("file", "block", stretch_of(), "c")
        .agg(
            F.min("line").alias("line"),
            F.min("n").alias("n"),
            F.max("n").alias("last"),
            F.min(when_event("start", "line")).alias("start"),
            F.min(when_event("stop", "n")).alias("stop"),
            F.max(when_event("open", "n")).alias("opened"),
            F.max(when_event("close", "n")).alias("closed"),
            F.count(when_event("open", "n")).alias("opens"),
            F.count(when_event("close", "n")).alias("closes"),
            F.max(when_event("send", "m")).alias("last_m"),
            F.max(when_event("send", "n")).alias("last_heard"),
        )
    )


def stretch_of() -> Column:
    """Return in which stretch an event is: one number for a whole trace."""
    return (F.col("n") - F.col("line")).alias("stretch")


def stretches(tallies: DataFrame) -> DataFrame:
    """Return the stretches of the trace files, and in which run they are.

    | column | type | meaning |
    |---|---|---|
    | file, block, stretch | | the stretch |
    | line | long | its first line |
    | n, last | long | its first and its last event number |
    | start, stop | long | as in tallies |
    | run | long | the line of the start of the run; null if there is none |
    """
    so_far = (
        Window.partitionBy("file")
        .orderBy("block", "line")
        .rowsBetween(Window.unboundedPreceding, 0)
    )
    return (
        tallies.groupBy("file", "block", "stretch")
        .agg(
            F.min("line").alias("line"),
            F.min("n").alias("n"),
            F.max("last").alias("last"),
            F.min("start").alias("start"),
            F.min("stop").alias("stop"),
        )
        .withColumn("run", F.last("start", True).over(so_far))
    )


def with_runs(lines: DataFrame, stretches: DataFrame) -> DataFrame:
    """Return the events of all runs.

    | column | type | meaning |
    |---|---|---|
    | run | long | the run that it belongs to |
    | ev, n, c, m, text | | as in read_trace |
    """
    of = stretches.filter(F.col("run").isNotNull()).select("stretch", "run")
    return (
        lines.filter(F.col("ev").isNotNull())
        .withColumn("stretch", stretch_of())
        .join(of, "stretch", how="inner")
        .select("run", "ev", "n", "c", "m", "text")
    )


def when_event(kind: str, value: str) -> Column:
    """Return a column's value in events of one kind, null in others."""
    return F.when(F.col("ev") == kind, F.col(value))


REORDERING = ("order/stack", "order/random")


def lives(
    tallies: DataFrame, stretches: DataFrame, rare: DataFrame
) -> DataFrame:
    """Return the clients.

    *rare* are the events other than msg and send.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | first, last | long | numbers of its first and its last event |
    | opened, closed, opens, closes, last_m, last_heard | | as in tallies |
    | is_reordered | boolean | whether it ever asked for another order |
    | own | string | credentials and prefix: "gid uid pid prefix" |
    """
    asked = (F.col("ev") == "ctl") & F.col("text").isin(*REORDERING)
    latest = ("last", "opened", "closed", "last_m", "last_heard")
    starts = rare.filter(F.col("ev") == "start")
    prefix = starts.select("run", F.col("text").alias("prefix"))
    who = rare.groupBy("run", "c").agg(
        F.max(when_event("open", "text")).alias("who"),
        F.max(asked).alias("asked"),
    )
    own = F.concat_ws(" ", "who", F.coalesce("prefix", F.lit("")))
    return (
        tallies.filter(F.col("c").isNotNull())
        .join(stretches.select("stretch", "run"), "stretch", how="inner")
        .filter(F.col("run").isNotNull())
        .groupBy("run", "c")
        .agg(
            F.min("n").alias("first"),
            *(F.max(name).alias(name) for name in latest),
            *(F.sum(name).alias(name) for name in ("opens", "closes")),
        )
        .join(who, ["run", "c"], how="left")
        .join(prefix, "run", how="left")
        .withColumn("is_reordered", F.coalesce("asked", F.lit(False)))
        .withColumn("own", own)
        .drop("who", "asked", "prefix")
    )


def settings(events: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return what clients had asked for by control messages, and when.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | key | string | what it asked for, one of *keys* |
    | since, until | long | from one event to another that ends it |
    """
    of_client = Window.partitionBy("run", "c").orderBy("n")
    until = F.lead("n", 1, FOR_EVER).over(of_client)
    return events.filter(
        (F.col("ev") == "ctl") & F.col("text").isin(*keys)
    ).select(
        "run",
        "c",
        F.col("text").alias("key"),
        F.col("n").alias("since"),
        until.alias("until"),
    )


def subscriptions(events: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the intervals in which clients held patterns.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | pattern | string | the pattern |
    | own | string | of a secret pattern the client's own; else empty |
    | count | long | how often it held it, less than 0 if the trace is wrong |
    | since, until | long | event numbers |
    """
    of_pattern = Window.partitionBy("run", "c", "text").orderBy("n")
    step = F.when(F.col("ev") == "sub", 1).otherwise(-1)
    so_far = of_pattern.rowsBetween(Window.unboundedPreceding, 0)
    until = F.coalesce("until", "closed", F.lit(FOR_EVER))
    own = F.when(is_secret("text"), F.col("own")).otherwise("")
    return (
        events.filter(F.col("ev").isin("sub", "unsub"))
        .withColumn("count", F.sum(step).over(so_far))
        .withColumn("until", F.lead("n").over(of_pattern))
        .join(lives.select("run", "c", "own", "closed"), ["run", "c"], "left")
        .select(
            "run",
            "c",
            F.col("text").alias("pattern"),
            F.coalesce(own, F.lit("")).alias("own"),
            "count",
            F.col("n").alias("since"),
            until.alias("until"),
        )
    )


def is_secret(column: str) -> Column:
    """Return whether a key or pattern is secret [CRED-10]."""
    return F.col(column).startswith(sbus.SECRET.decode("ascii"))


def published(events: DataFrame) -> DataFrame:
    """Return the messages.

    | column | type | meaning |
    |---|---|---|
    | run, m | long | the message |
    | n | long | number of its msg event |
    | publisher | long | client number |
    | key | string | its routing key |
    """
    return events.filter(F.col("ev") == "msg").select(
        "run",
        "m",
        "n",
        F.col("c").alias("publisher"),
        F.col("text").alias("key"),
    )
