#!/usr/bin/env python3
"""sbus_spark: keep, look at, check and repeat the traffic of a bus, on Spark.

    python3 sbus_spark.py audit TRACE...
    python3 sbus_spark.py ingest CAPTURE TABLE [--follow]
    python3 sbus_spark.py report TABLE [-o report.html] [--json]
    python3 sbus_spark.py replay TABLE -a ADDRESS

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (sbus_client.py record), and a table the Parquet files that ingest
makes of captures.  Each step is a function from DataFrame to DataFrame, and
its docstring lists the columns that it returns.

    1  Session    Java, the SparkSession
    2  Trace      read_trace, and what the events say of runs and clients
    3  Audit      was each delivery owed, and each owed delivery made?
    4  Capture    read_capture, ingest, read_table
    5  Report     traffic, and a page of it
    6  Replay
    7  The command line

Names, beside those of sbus.py: event, a line of a trace, with its number n;
run, what one server did from its start on; interval, from one event to
another, both left out.  Keys and patterns are text in which each code point
is a byte.  It needs PySpark 4.2, Java 17 or later, and sbus.py beside it.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

import sbus

from .common import (
    LONG,
    TEXT,
    InputError,
    all_of,
    any_of,
    check_there,
    is_there,
    null,
    schema,
)

# =============================================================================
# 2. Trace                                                  spec/8-running.md
#
# Facts
# - Spark reads a file in splits, and each in its order: the offset of the
#   split and the number that it gives to the line tell the order of all.
# - A server appends to its trace, so a file may hold several runs.
# - Where events are numbered without gaps, n - line is one number in a split.
# - Events are read from JSON once, and then kept: that costs the most.
# =============================================================================


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


# =============================================================================
# 3. Audit                             spec/3-protocol.md to spec/8-running.md
#
# Facts
# - sbus.py says what a pattern selects.  It is asked once for each pattern
#   and key, and not for each message.
# - Most messages are in order, and that is cheap to see: the account of a
#   message is credited with each client that it is owed to, and debited with
#   each that it was sent to or dropped for, once in number and once as the
#   XOR of random marks.  If both come to nothing, each client that is owed
#   it was reached once, and no other was: the XOR says that those and only
#   those were reached an odd number of times, and the number leaves no room
#   for more than once.  A wrong account passes with a chance of 1 in 2^64,
#   for which nobody can prepare, as the marks are drawn for each audit.
# - Only the messages whose account is not empty are looked at client by
#   client, and only the clients that were ever sent a lower message number
#   after a higher one are looked at publisher by publisher.
# - At the end of a client or of a run, what waited in a backlog is lost.  In
#   order/queue that is what comes after all that was sent to it; in another
#   order it may be anything.
# - Who holds what is listed for each span of so many events, so that the
#   lists that a message is compared with do not grow with the trace.
# =============================================================================

BREACHES = (
    "missing",  # owed, and neither sent nor dropped
    "unowed",  # sent, and not owed
    "secret-leak",  # the same, under a secret key
    "duplicate",  # sent more than once
    "out-of-order",  # sent after a later message of the same publisher
    "bad-drop",  # dropped for no reason that the client had asked for
    "bad-trace",  # what no server in order can have written
)
SPAN_BITS = 20  # the spans of 1,048,576 events


@F.udf(returnType=T.BooleanType(), useArrow=False)
def selects(pattern: str, key: str, own: str) -> bool:
    """Return whether a pattern lets whoever holds it receive a key.

    *own* is "gid uid pid prefix" of who holds a secret pattern, else empty.
    Spec: [MATCH-1] to [MATCH-6], [CRED-4] to [CRED-11].
    """
    try:
        wanted, name = pattern.encode("latin-1"), key.encode("latin-1")
        if not own:
            return sbus.pattern_matches(wanted, name)
        gid, uid, pid, prefix = own.encode("latin-1").split(b" ", 3)
        who = sbus.Credentials(int(gid), int(uid), int(pid))
        sbus.check_secret(wanted, who, prefix)
        fits = sbus.fields_fit(name, who, prefix)
        some = sbus.resolve(wanted, who, prefix)
        return fits and any(sbus.pattern_matches(one, name) for one in some)
    except (ValueError, sbus.ProtocolError):
        return False  # no server may have stored it


def selections(subscriptions: DataFrame, keys: DataFrame) -> DataFrame:
    """Return which patterns select which keys.

    | column | type | meaning |
    |---|---|---|
    | pattern, own | string | as in subscriptions |
    | key | string | a key that it selects |
    """
    patterns = subscriptions.select("pattern", "own").distinct()
    literal = F.substring_index("pattern", "*", 1)
    is_possible = F.col("key").startswith(literal)  # [MATCH-1]
    return (
        patterns.crossJoin(keys)
        .filter(is_secret("pattern") == is_secret("key"))  # [CRED-10]
        .filter(is_secret("pattern") | is_possible)
        .filter(selects("pattern", "key", "own"))
        .select("pattern", "own", "key")
    )


def span_of(n: str) -> Column:
    """Return which span an event is in."""
    return F.shiftright(F.col(n), SPAN_BITS)


def start_of(span: str, after: int = 0) -> Column:
    """Return where a span, or another after it, starts."""
    return F.shiftleft(F.col(span) + after, SPAN_BITS)


def holders(
    subscriptions: DataFrame, messages: DataFrame, stretches: DataFrame
) -> DataFrame:
    """Return who held a pattern that selects a key, span by span.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | key | string | a key that was published under |
    | span | long | a span of events |
    | since, until | long | no two intervals overlap, nor leave the span |
    """
    keys = messages.select("key").distinct()
    ends = stretches.groupBy("run").agg(F.max("last").alias("end"))
    of_client = Window.partitionBy("run", "key", "c").orderBy("since")
    before = of_client.rowsBetween(Window.unboundedPreceding, -1)
    so_far = of_client.rowsBetween(Window.unboundedPreceding, 0)
    is_new = F.col("since") > F.coalesce(F.max("until").over(before), F.lit(0))
    spans = F.sequence(span_of("since"), span_of("until"))
    return (
        subscriptions.filter(F.col("count") > 0)
        .join(selections(subscriptions, keys), ["pattern", "own"], "inner")
        .withColumn("is_new", is_new.cast("long"))
        .withColumn("interval", F.sum("is_new").over(so_far))
        .groupBy("run", "key", "c", "interval")
        .agg(F.min("since").alias("since"), F.max("until").alias("until"))
        .join(F.broadcast(ends), "run", how="inner")
        .withColumn("until", F.least("until", F.col("end") + 1))
        .filter(F.col("since") < F.col("until"))
        .withColumn("span", F.explode(spans))
        .withColumn("since", F.greatest("since", start_of("span") - 1))
        .withColumn("until", F.least("until", start_of("span", 1)))
        .select("run", "key", "span", "c", "since", "until")
    )


def receivers(holders: DataFrame, mark: Column) -> DataFrame:
    """Return how many held a pattern that selects a key.

    | column | type | meaning |
    |---|---|---|
    | run, key, span | | as in holders |
    | since, until | long | an interval in which their set is the same |
    | count | long | how many they are, above 0 |
    | mark | long | the XOR of their marks |
    """
    of_key = Window.partitionBy("run", "key", "span").orderBy("at")
    so_far = of_key.rowsBetween(Window.unboundedPreceding, 0)

    def steps(at: str, step: int) -> DataFrame:
        return holders.select(
            "run",
            "key",
            "span",
            F.col(at).alias("at"),
            F.lit(step).alias("step"),
            mark.alias("mark"),
        )

    return (
        steps("since", 1)
        .unionAll(steps("until", -1))
        .groupBy("run", "key", "span", "at")
        .agg(F.sum("step").alias("step"), F.bit_xor("mark").alias("mark"))
        .select(
            "run",
            "key",
            "span",
            F.col("at").alias("since"),
            F.lead("at").over(of_key).alias("until"),
            F.sum("step").over(so_far).alias("count"),
            F.bit_xor("mark").over(so_far).alias("mark"),
        )
        .filter(F.col("count") > 0)
    )


def with_holders(messages: DataFrame, holders: DataFrame) -> DataFrame:
    """Return messages, with what is in holders or receivers at their time."""
    n = F.col("n")
    return (
        messages.withColumn("span", span_of("n"))
        .join(holders, ["run", "key", "span"], how="inner")
        .filter((F.col("since") < n) & (n < F.col("until")))
        .drop("span", "since", "until")
    )


def echoes(messages: DataFrame, silences: DataFrame) -> DataFrame:
    """Return the messages that are not owed to their publishers.

    *silences* are the settings echo/off and echo/on.  The columns are those
    of published, and

    | column | type | meaning |
    |---|---|---|
    | c | long | the publisher |
    """
    publisher, n = F.col("publisher"), F.col("n")
    silent = silences.filter(F.col("key") == "echo/off").select(
        "run",
        F.col("c").alias("publisher"),
        F.col("since").alias("off"),
        F.col("until").alias("on"),
    )
    return (
        messages.join(F.broadcast(silent), ["run", "publisher"], how="inner")
        .filter((F.col("off") < n) & (n < F.col("on")))
        .select(*messages.columns, publisher.alias("c"))
    )


def owed(
    messages: DataFrame, holders: DataFrame, silences: DataFrame
) -> DataFrame:
    """Return the deliveries that were owed.

    *silences* are the settings echo/off and echo/on.

    | column | type | meaning |
    |---|---|---|
    | run, m, n, publisher, key | | the message, as in published |
    | c | long | a client to which it was owed |
    """
    silent = echoes(messages, silences).select("run", "m", "n", "c")
    return (
        with_holders(messages, holders)
        .join(silent, ["run", "m", "n", "c"], how="left_anti")
        .select("run", "m", "n", "publisher", "key", "c")
    )


def reached(events: DataFrame) -> DataFrame:
    """Return what was sent and dropped.

    | column | type | meaning |
    |---|---|---|
    | run, m, c | long | the message, and the client |
    | n | long | event number |
    | is_sent | boolean | whether it was sent; else it was dropped |
    """
    return events.filter(F.col("ev").isin("send", "drop")).select(
        "run", "m", "c", "n", (F.col("ev") == "send").alias("is_sent")
    )


def suspects(
    messages: DataFrame,
    holders: DataFrame,
    silences: DataFrame,
    reached: DataFrame,
) -> DataFrame:
    """Return the messages that did not reach just whom they were owed to.

    | column | type | meaning |
    |---|---|---|
    | run, m | long | the message |
    | msgs | long | how many msg events it has |
    | n | long | number of its msg event, null if there is none |
    | first | long | number of the first send or drop, null for none |
    """
    mark = F.xxhash64(F.lit(secrets.randbits(62)), "c")
    zero, none = F.lit(0).cast("long"), null("long")
    one = zero + 1

    def entry(
        rows: DataFrame, n: Column, first: Column, count: Column, mark: Column
    ) -> DataFrame:
        fields = {"n": n, "first": first, "count": count, "mark": mark}
        named = [column.alias(name) for name, column in fields.items()]
        return rows.select("run", "m", *named)

    credited = with_holders(messages, receivers(holders, mark))
    silent = with_holders(
        echoes(messages, silences).withColumnRenamed("c", "silent"), holders
    ).filter(F.col("c") == F.col("silent"))
    is_empty = (F.col("count") == 0) & (F.col("mark") == 0)
    is_late = F.coalesce(F.col("first") > F.col("n"), F.col("first").isNull())
    entries = (
        entry(messages, F.col("n"), none, zero, zero),
        entry(credited, none, none, F.col("count"), F.col("mark")),
        entry(silent, none, none, -one, mark),
        entry(reached, none, F.col("n"), -one, mark),
    )
    return (
        reduce(DataFrame.unionAll, entries)
        .groupBy("run", "m")
        .agg(
            F.count("n").alias("msgs"),
            F.min("n").alias("n"),
            F.min("first").alias("first"),
            F.sum("count").alias("count"),
            F.bit_xor("mark").alias("mark"),
        )
        .filter(~is_empty | (F.col("msgs") != 1) | ~is_late)
        .select("run", "m", "msgs", "n", "first")
    )


BREACH_FIELDS = ("n", "m", "publisher", "c", "key")


def as_breaches(rows: DataFrame, breach: Column, detail: Column) -> DataFrame:
    """Return what is wrong, a row a breach.

    | column | type | meaning |
    |---|---|---|
    | breach | string | one of BREACHES |
    | run | long | the run, null if it is in none |
    | n, m, publisher, c | long | event, message, clients, null for none |
    | key | string | routing key or pattern, null for none |
    | detail | string | what is wrong |
    """
    kinds = dict.fromkeys(BREACH_FIELDS, "long") | {"key": "string"}
    return rows.select(
        breach.alias("breach"),
        F.col("run") if "run" in rows.columns else null("long").alias("run"),
        *(
            F.col(name) if name in rows.columns else null(kind).alias(name)
            for name, kind in kinds.items()
        ),
        detail.alias("detail"),
    )


DETAILS = {
    "missing": "owed, and neither sent nor dropped, but a later message was",
    "unowed": "sent to a client to which it was not owed",
    "secret-leak": "a secret, sent to a client to which it was not owed",
    "duplicate": "sent more than once to one client",
    "bad-drop": "dropped although it was not owed, or was sent as well",
}


def delivery_breaches(
    messages: DataFrame, owed: DataFrame, reached: DataFrame, lives: DataFrame
) -> DataFrame:
    """Return what is wrong with the deliveries of messages.

    The columns are those of as_breaches; n is the number of the last send
    or drop, or of the msg event where there is neither.
    """
    due = owed.select(
        "run", "m", "c", null("long").alias("at"), null("boolean")
    )
    done = reached.select("run", "m", "c", "n", "is_sent")
    pairs = [text for pair in DETAILS.items() for text in pair]
    detail = F.create_map(*map(F.lit, pairs))[F.col("breach")]
    return (
        done.withColumnRenamed("n", "at")
        .unionAll(due)
        .groupBy("run", "m", "c")
        .agg(
            F.count_if(F.col("at").isNull()).alias("owed"),
            F.count_if("is_sent").alias("sends"),
            F.count_if(~F.col("is_sent")).alias("drops"),
            F.max("at").alias("at"),
        )
        .join(messages, ["run", "m"], how="inner")
        .join(
            lives.select("run", "c", "last_m", "is_reordered"),
            ["run", "c"],
            how="left",
        )
        .withColumn("breach", F.explode(F.array_compact(breaches_of_one())))
        .withColumn("n", F.coalesce("at", "n"))
        .transform(as_breaches, F.col("breach"), detail)
    )


def breaches_of_one() -> Column:
    """Return the breaches in what one client got of one message."""
    sends, drops = F.col("sends"), F.col("drops")
    is_owed = F.col("owed") > 0
    # What waits at the end of a client comes after all that it was sent
    waited = F.col("is_reordered") | (F.col("m") > F.col("last_m"))
    is_lost = (sends + drops == 0) & ~F.coalesce(waited, F.lit(True))
    leak = F.when(is_secret("key"), "secret-leak").otherwise("unowed")
    is_odd = (drops > 0) & (~is_owed | (sends + drops > 1))
    return F.array(
        F.when(is_owed & is_lost, "missing"),
        F.when(~is_owed & (sends > 0), leak),
        F.when(sends > 1, "duplicate"),
        F.when(is_odd, "bad-drop"),
    )


def mixed(reached: DataFrame, lives: DataFrame) -> DataFrame:
    """Return who was sent a message after one that was published later.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | a client that never asked for that |
    """
    in_order = lives.filter(~F.col("is_reordered")).select("run", "c")
    of_client = Window.partitionBy("c", "run").orderBy("n")
    return (
        reached.filter("is_sent")
        .join(F.broadcast(in_order), ["run", "c"], how="left_semi")
        .withColumn("previous", F.lag("m").over(of_client))
        .filter(F.col("m") < F.col("previous"))
        .select("run", "c")
        .distinct()
    )


def first_sends(reached: DataFrame, mixed: DataFrame) -> DataFrame:
    """Return the first sends of each message to some clients.

    | column | type | meaning |
    |---|---|---|
    | run, m, c | long | the message, and the client |
    | n | long | event number |
    """
    return (
        reached.filter("is_sent")
        .join(mixed, ["run", "c"], how="left_semi")
        .groupBy("run", "m", "c")
        .agg(F.min("n").alias("n"))
    )


def order_breaches(owed: DataFrame, firsts: DataFrame) -> DataFrame:
    """Return the sends that came after a later message of the publisher.

    *firsts* are the first sends of messages to clients: run, m, c, at.  What
    was not owed does not count.  The columns are those of as_breaches.
    """
    of_pair = Window.partitionBy("run", "c", "publisher").orderBy("n")
    before = of_pair.rowsBetween(Window.unboundedPreceding, -1)
    detail = F.format_string("sent after message %d", "latest")
    return (
        firsts.join(owed.drop("n"), ["run", "m", "c"], how="inner")
        .withColumn("latest", F.max("m").over(before))
        .filter(F.col("m") < F.col("latest"))
        .transform(as_breaches, F.lit("out-of-order"), detail)
    )


DISCARDS = {
    "soft/discard": ("queue", "discard", "block", "error"),
    "hard/discard": ("discard", "block", "error"),
}


def permissions(events: DataFrame) -> DataFrame:
    """Return which drops clients had asked for, and when.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | reason | string | the reason of the drops |
    | since, until | long | event numbers |
    """
    asked = []
    for reason, modes in DISCARDS.items():
        side = f"blocking/{reason.partition('/')[0]}/"
        asked.append(
            settings(events, [side + mode for mode in modes])
            .filter(F.col("key") == f"blocking/{reason}")
            .withColumn("key", F.lit(reason))
        )
    return reduce(DataFrame.unionAll, asked).select(
        "run", "c", F.col("key").alias("reason"), "since", "until"
    )


def drop_breaches(rare: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the drops for which there was no reason.

    *rare* are the events other than msg and send.  The columns are those of
    as_breaches, publisher and key being null.
    """
    asked = permissions(rare).withColumnsRenamed({"run": "of", "c": "who"})
    is_asked = (
        (F.col("run") == F.col("of"))
        & (F.col("c") == F.col("who"))
        & (F.col("text") == F.col("reason"))
        & (F.col("since") < F.col("n"))
        & (F.col("n") < F.col("until"))
    )
    is_deaf = F.col("text") == "deaf"
    heard_later = F.coalesce(F.col("last_heard") > F.col("n"), F.lit(False))
    detail = F.when(
        is_deaf, "dropped as for a deaf client, which heard more later"
    ).otherwise(F.format_string("%s, which was not asked for", "text"))
    return (
        rare.filter(F.col("ev") == "drop")
        .join(F.broadcast(asked), is_asked, how="left_anti")
        .join(lives.select("run", "c", "last_heard"), ["run", "c"], how="left")
        .filter(~is_deaf | heard_later)
        .transform(as_breaches, F.lit("bad-drop"), detail)
    )


def bad_trace(rows: DataFrame, what: Column) -> DataFrame:
    """Return a bad-trace breach for each row where *what* is not null."""
    return as_breaches(
        rows.withColumn("what", what).filter(F.col("what").isNotNull()),
        F.lit("bad-trace"),
        F.col("what"),
    )


def line_breaches(lines: DataFrame) -> DataFrame:
    """Return the lines that are no events; columns as of as_breaches."""
    text = F.coalesce(F.substring("text", 1, 80), F.lit(""))
    what = F.format_string("%s holds what is no event: %s", "file", text)
    rows = lines.filter(F.col("ev").isNull()).select("file", "text", "n")
    return bad_trace(rows, what)


def number_breaches(stretches: DataFrame) -> DataFrame:
    """Return where event numbers do not go on; columns as of as_breaches."""
    in_file = Window.partitionBy("file").orderBy("block", "line")
    is_first, is_last = F.col("n") == 1, F.col("following") == 1
    goes_on = F.col("n") == F.col("previous") + 1
    is_started = is_first & F.col("start").isNotNull()
    is_end = is_last & (F.col("stop") == F.col("last"))

    def told(condition: Column, n: str, text: str, *names: str) -> Column:
        said = F.format_string(text, "file", *names).alias("said")
        return F.when(condition, F.struct(F.col(n).alias("n"), said))

    what = F.array(
        told(
            ~is_started & ~(goes_on & ~is_first),
            "n",
            "%s: event %d comes after event %d",
            "n",
            "previous",
        ),
        told(
            is_last & ~is_there("stop"),
            "last",
            "%s: no stop after event %d",
            "last",
        ),
        told(
            is_there("stop") & ~is_end,
            "stop",
            "%s: event %d stops, but is not the last",
            "stop",
        ),
    )
    return bad_trace(
        stretches.withColumn("previous", F.lag("last", 1, 0).over(in_file))
        .withColumn("following", F.lead("n", 1, 1).over(in_file))
        .select("run", F.inline(F.array_compact(what))),
        F.col("said"),
    )


def absence_breaches(stretches: DataFrame) -> DataFrame:
    """Return that there is no event at all, as as_breaches."""
    count = stretches.agg(F.count(F.lit(1)).alias("count"))
    what = F.when(F.col("count") == 0, F.lit("there is no event"))
    return bad_trace(count, what)


def life_breaches(lives: DataFrame) -> DataFrame:
    """Return clients with events outside of their lives, as as_breaches."""
    last, closed = F.col("last"), F.col("closed")
    what = (
        F.when(
            F.col("opens") != 1, F.lit("a client is opened other than once")
        )
        .when(F.col("first") != F.col("opened"), "an event before its open")
        .when(F.col("closes") > 1, "a client is closed more than once")
        .when(last > closed, "an event after its close")
    )
    return bad_trace(lives.withColumn("n", F.col("first")), what)


def message_breaches(suspects: DataFrame) -> DataFrame:
    """Return sends without a message before, columns as of as_breaches."""
    what = F.when(
        F.col("msgs") != 1,
        F.format_string("%d msg events of one message", "msgs"),
    ).when(
        F.col("first") < F.col("n"), "sent or dropped before it was published"
    )
    return bad_trace(suspects.withColumn("n", F.coalesce("n", "first")), what)


def subscription_breaches(subscriptions: DataFrame) -> DataFrame:
    """Return unsubs of what is not held, columns as of as_breaches."""
    rows = subscriptions.withColumns(
        {"n": F.col("since"), "key": F.col("pattern")}
    )
    what = F.when(F.col("count") < 0, F.lit("unsub of what is not held"))
    return bad_trace(rows, what)


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
