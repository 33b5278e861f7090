"""Deliveries: which were owed, which were made, and where the two differ.

See spec/3-protocol.md to spec/8-running.md.  Facts:

- sbus.py says what a pattern selects.  It is asked once for each pattern
  and key, and not for each message.
- Most messages are in order, and that is cheap to see: the account of a
  message is credited with each client that it is owed to, and debited with
  each that it was sent to or dropped for, once in number and once as the
  XOR of random marks.  If both come to nothing, each client that is owed
  it was reached once, and no other was: the XOR says that those and only
  those were reached an odd number of times, and the number leaves no room
  for more than once.  A wrong account passes with a chance of 1 in 2^64,
  for which nobody can prepare, as the marks are drawn for each audit.
- Who holds what is listed for each span of so many events, so that the
  lists that a message is compared with do not grow with the trace.
"""

from __future__ import annotations

import secrets
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

import sbus

from .common import null
from .trace import is_secret

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
