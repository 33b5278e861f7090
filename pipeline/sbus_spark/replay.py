"""Replay: the messages of a table, published again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from .matching import selects
from .source import register

ORDER = ("time", "host", "recorder", "n")


def replay(
    messages: DataFrame,
    address: str,
    patterns: Sequence[str] = (),
    speed: float | None = None,
) -> int:
    """Publish messages to the bus at an address; return how many.

    They go out in the order of their times, those of one time by host,
    recorder and number.  *speed* multiplies the recorded pace; None is as
    fast as possible.  One task publishes all of them, on the host where it
    runs.
    Raises: PySparkException with the row that the bus refuses.
    """
    register(messages.sparkSession)
    counted = Observation()
    rows = (
        selected(messages, patterns)
        .select(*ORDER, "key", "payload")
        .repartition(1)  # coalesce keeps no order where hosts are preferred
        .sortWithinPartitions(*ORDER)
        .observe(counted, F.count(F.lit(1)).alias("messages"))
    )
    options = {"address": address, "speed": speed or "inf"}
    rows.write.format("sbus").mode("append").options(**options).save()
    return int(counted.get["messages"])


def selected(messages: DataFrame, patterns: Sequence[str]) -> DataFrame:
    """Return the messages whose keys one of some patterns selects.

    All of them are returned if there is no pattern.  Secret keys are keys
    like others here.
    """

    def choose(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys = batch["key"].to_pylist()
            chosen = list(compress(keys, selects(patterns, keys)))
            yield pa.RecordBatch.from_pydict({"key": chosen}, batch.schema)

    if not patterns:
        return messages
    keys = messages.select("key").distinct()
    return messages.join(
        keys.mapInArrow(choose, "key string"), "key", "left_semi"
    )
