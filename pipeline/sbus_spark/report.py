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

COUNTED = ("size", "messages", "first", "last")


def traffic(table: DataFrame, *by: Column | str) -> DataFrame:
    """Return how much traffic there was, by whatever columns.

    | column | type | unit |
    |---|---|---|
    | those of *by* | | |
    | messages | long | messages |
    | bytes | long | bytes of payload |
    | p50, p99, largest | long | bytes of payload of a message |
    | first, last | long | nanoseconds since 1970 |
    """
    # Percentiles of rows that are counts cost a fraction of those of messages
    counted = table.groupBy(*by, "size").agg(
        F.count(F.lit(1)).alias("messages"),
        F.min("t").alias("first"),
        F.max("t").alias("last"),
    )
    names = [name for name in counted.columns if name not in COUNTED]
    sizes = F.percentile("size", [0.5, 0.99], F.col("messages"))
    return (
        counted.groupBy(*names)
        .agg(
            sizes.alias("sizes"),
            F.sum(F.col("size") * F.col("messages")).alias("bytes"),
            F.max("size").alias("largest"),
            F.sum("messages").alias("messages"),
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


def over_time(
    table: DataFrame, keys: Sequence[str], bucket: Column
) -> dict[str, list[dict[str, Any]]]:
    """Return how many messages some keys had, by spans of time."""
    chosen = table.filter(F.col("key").isin(*keys))
    counts = chosen.groupBy("key", bucket).agg(
        F.count(F.lit(1)).alias("messages")
    )
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in rows_of(counts):
        found[row["key"]].append(row)
    return found


def sizes(table: DataFrame) -> DataFrame:
    """Return how many messages are how large, by powers of two.

    | column | type | meaning |
    |---|---|---|
    | power | int | 0 for no byte, n for up to 2 to the power of n less one |
    | messages | long | messages |
    """
    digits = F.length(F.bin("size"))
    power = F.when(F.col("size") == 0, 0).otherwise(digits)
    return table.groupBy(power.alias("power")).agg(
        F.count(F.lit(1)).alias("messages")
    )


def summarize(table: DataFrame) -> dict[str, Any]:
    """Return all that a report shows; times in nanoseconds since 1970."""
    totals = rows_of(traffic(table))[0]
    if not totals["messages"]:
        raise InputError("the table is empty: there is nothing to report")
    seconds = bucket_seconds(totals["first"], totals["last"])
    width = seconds * SECOND
    bucket = (F.col("t") - F.col("t") % width).alias("t")
    busiest = traffic(table, "key").orderBy(F.desc("messages"), "key")
    keys = rows_of(busiest.limit(KEYS_MAX))
    keys_total = len(keys)
    if keys_total == KEYS_MAX:
        keys_total = table.select("key").distinct().count()
    first_keys = [row["key"] for row in keys[:KEYS_OVER_TIME]]
    lost = rows_of(recordings(table).agg(F.sum("lost").alias("lost")))[0]
    return {
        "totals": totals,
        "keys_total": keys_total,
        "keys": keys,
        "key_times": over_time(table, first_keys, bucket),
        "sizes": rows_of(sizes(table)),
        "hosts": rows_of(traffic(table, "host").orderBy("host").limit(1_000)),
        "seconds": seconds,
        "times": rows_of(traffic(table, bucket).orderBy("t")),
        "lost": lost["lost"],
        "gaps": first_gaps(table) if lost["lost"] else [],
    }
