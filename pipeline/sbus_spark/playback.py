"""Replay: the messages of a table, published again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

import sbus
from sbus_client import Client

from .common import SECOND, progress

PART_BYTES_MAX = 16 << 20  # about; many messages of one moment stay together
ROW_BYTES = 200  # of a message, beside its payload


@F.udf(returnType=T.BooleanType(), useArrow=False)
def selects(pattern: str, key: str) -> bool:
    """Return whether a pattern selects a key, secret or not."""
    texts = (pattern.encode("latin-1"), key.encode("latin-1"))
    return sbus.pattern_matches(*texts)


def in_order(table: DataFrame, patterns: Sequence[str] = ()) -> DataFrame:
    """Return the messages that patterns select, in the order recorded.

    Each partition holds what comes after that before it, and about so much
    that two of them have room in the driver.

    | column | type | unit |
    |---|---|---|
    | t | long | nanoseconds since 1970 |
    | key | string | |
    | data | binary | payload |
    """
    if patterns:
        keys = table.select("key").distinct()
        wanted = F.array(*(F.lit(text) for text in patterns))
        chosen = keys.withColumn("pattern", F.explode(wanted)).filter(
            selects("pattern", "key")
        )
        table = table.join(chosen.select("key"), "key", how="left_semi")
    order = ("t", "host", "rec", "n")
    weight = F.sum(F.col("size") + ROW_BYTES).alias("weight")
    (row,) = table.agg(weight).collect()
    parts = (row["weight"] or 0) // PART_BYTES_MAX + 1
    ranges = table.repartitionByRange(parts, *order)
    return ranges.sortWithinPartitions(*order).select("t", "key", "data")


def replay(rows: DataFrame, bus: Client, speed: float | None) -> int:
    """Publish messages in order; return how many.

    *speed* is how many times as fast as they came, None for at once.
    """
    count = 0
    for row in rows.toLocalIterator(prefetchPartitions=True):
        if not count:
            started, first = time.monotonic(), row["t"]
        if speed is not None:
            due = started + (row["t"] - first) / SECOND / speed
            time.sleep(max(0.0, due - time.monotonic()))
        bus.publish(row["key"].encode("latin-1"), bytes(row["data"]))
        count += 1
        if count % 1_000 == 0:
            progress(f"{count} messages")
    bus.sync()
    return count
