"""Reports: the traffic in a table, in numbers.

What reaches the driver is a few rows, however large the table: at most
BUCKETS_MAX of time, also for each of KEYS_OVER_TIME keys, KEYS_MAX of keys,
GAPS_MAX of gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .common import DAY, SECOND, InputError, rows_of

BUCKETS_MAX = 120
KEYS_MAX = 10_000
KEYS_OVER_TIME = 8  # the busiest
GAPS_MAX = 100
BUCKET_SECONDS = (1, 2, 5, 10, 30, 60, 300, 900, 3_600, 21_600, 86_400)


def counted(table: DataFrame, *by: Column | str) -> DataFrame:
    """Return how many messages there are, by whatever columns and by size.

    | column | type | unit |
    |---|---|---|
    | those of *by* | | |
    | size | long | bytes of payload of each message |
    | messages | long | messages |
    | first, last | long | nanoseconds since 1970 |

    All else is added up of these, which are kept: they are fewer than the
    messages, and percentiles of rows that are counts cost a fraction.
    """
    counts = table.groupBy(*by, "size").agg(
        F.count(F.lit(1)).alias("messages"),
        F.min("t").alias("first"),
        F.max("t").alias("last"),
    )
    return counts.persist()


def traffic(counts: DataFrame, *by: str) -> DataFrame:
    """Return how much traffic there was, by columns of counted.

    | column | type | unit |
    |---|---|---|
    | those of *by* | | |
    | messages | long | messages |
    | bytes | long | bytes of payload |
    | p50, p99, largest | long | bytes of payload of a message |
    | first, last | long | nanoseconds since 1970 |
    """
    sizes = F.percentile("size", [0.5, 0.99], F.col("messages"))
    return (
        counts.groupBy(*by)
        .agg(
            sizes.alias("sizes"),
            F.sum(F.col("size") * F.col("messages")).alias("bytes"),
            F.max("size").alias("largest"),
            messages(),
            F.min("first").alias("first"),
            F.max("last").alias("last"),
        )
        .withColumn("p50", F.col("sizes")[0].cast("long"))
        .withColumn("p99", F.col("sizes")[1].cast("long"))
        .drop("sizes")
    )


def recordings(table: DataFrame) -> DataFrame:
    """Return the runs of recorders.

    | column | type | unit |
    |---|---|---|
    | host, rec | string | the run |
    | messages | long | messages |
    | lost | long | numbers that are not there |
    """
    # To count numbers that may come twice: 64 of them are the bits of a word
    bit = F.expr("shiftleft(1L, int(n % 64))")
    words = table.groupBy("host", "rec", F.expr("n div 64")).agg(
        F.count(F.lit(1)).alias("messages"),
        F.bit_or(bit).alias("bits"),
        F.max("n").alias("last"),
    )
    lost = F.max("last") - F.sum(F.bit_count("bits"))
    return words.groupBy("host", "rec").agg(
        F.sum("messages").alias("messages"), lost.alias("lost")
    )


def gaps(table: DataFrame) -> DataFrame:
    """Return where the numbers of a recorder's run do not go on.

    | column | type | unit |
    |---|---|---|
    | host, rec | string | the run |
    | after | long | the number before the gap |
    | lost | long | messages |
    | t | long | nanoseconds since 1970, of the first message after it |
    """
    in_run = Window.partitionBy("host", "rec").orderBy("n")
    lossy = recordings(table).filter(F.col("lost") > 0).select("host", "rec")
    return (
        table.select("host", "rec", "n", "t")
        .join(lossy, ["host", "rec"], how="left_semi")
        .withColumn("after", F.lag("n", 1, 0).over(in_run))
        .withColumn("lost", F.col("n") - F.col("after") - 1)
        .filter(F.col("lost") > 0)
        .select("host", "rec", "after", "lost", "t")
    )


def first_gaps(table: DataFrame) -> list[dict[str, Any]]:
    """Return the first GAPS_MAX of the gaps."""
    return rows_of(gaps(table).orderBy("t").limit(GAPS_MAX))


def bucket_seconds(first: int, last: int) -> int:
    """Return how long the spans of a chart are, in seconds."""
    for seconds in BUCKET_SECONDS:
        if (last - first) / SECOND / seconds < BUCKETS_MAX:
            return seconds
    days = (last - first) // DAY
    return 86_400 * (days // BUCKETS_MAX + 1)


def messages() -> Column:
    """Return how many messages rows of counted count."""
    return F.sum("messages").alias("messages")


def over_time(
    spans: DataFrame, keys: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return how many messages some keys had, by spans of time."""
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in rows_of(spans.groupBy("key", "t").agg(messages())):
        if row["key"] in found:  # the others are together
            found[row["key"]].append(row)
    return found


def sizes(counts: DataFrame) -> DataFrame:
    """Return how many messages are how large, by powers of two.

    | column | type | meaning |
    |---|---|---|
    | power | int | 0 for no byte, n for up to 2 to the power of n less one |
    | messages | long | messages |
    """
    digits = F.length(F.bin("size"))
    power = F.when(F.col("size") == 0, 0).otherwise(digits)
    return counts.groupBy(power.alias("power")).agg(messages())


def summarize(table: DataFrame) -> dict[str, Any]:
    """Return all that a report shows; times in nanoseconds since 1970."""
    counts = counted(table, "host", "key")
    totals = rows_of(traffic(counts))[0]
    if not totals["messages"]:
        raise InputError("the table is empty: there is nothing to report")
    busiest = traffic(counts, "key").orderBy(F.desc("messages"), "key")
    keys = rows_of(busiest.limit(KEYS_MAX))
    keys_total = len(keys)
    if keys_total == KEYS_MAX:
        keys_total = counts.select("key").distinct().count()
    seconds = bucket_seconds(totals["first"], totals["last"])
    span = (F.col("t") - F.col("t") % (seconds * SECOND)).alias("t")
    first_keys = [row["key"] for row in keys[:KEYS_OVER_TIME]]
    is_first = F.col("key").isin(first_keys)
    spans = counted(table, span, F.when(is_first, F.col("key")).alias("key"))
    lost = rows_of(recordings(table).agg(F.sum("lost").alias("lost")))[0]
    summary = {
        "totals": totals,
        "keys_total": keys_total,
        "keys": keys,
        "key_times": over_time(spans, first_keys),
        "sizes": rows_of(sizes(counts)),
        "hosts": rows_of(traffic(counts, "host").orderBy("host").limit(1_000)),
        "seconds": seconds,
        "times": rows_of(traffic(spans, "t").orderBy("t")),
        "lost": lost["lost"],
        "gaps": first_gaps(table) if lost["lost"] else [],
    }
    counts.unpersist()
    spans.unpersist()
    return summary
