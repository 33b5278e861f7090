"""Spark's own programs: captures to read, and buses to publish to.

    sbus_spark.read_capture(spark.read, CAPTURE)
    sbus_spark.read_capture(spark.readStream, CAPTURE)
    sbus_spark.register(spark)
    rows.write.format("sbus").mode("append").option("address", ADDRESS).save()

The README of pipeline/ lists options and guarantees; `messages` the columns.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as ds
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from sbus_client import Client

from .inputs import InputError, absolute
from .messages import LINES
from .reading import publish

ADDRESS, CHECKPOINT = "address", "checkpointLocation"


def read_capture(reader: Any, capture: str) -> DataFrame:
    """Return the messages of a capture, read by Spark's reader of JSON.

    *reader* is spark.read or spark.readStream, with its options: of lines that
    are no messages, those of mode FAILFAST fail the job, or they have nulls.
    """
    reader = reader.schema(LINES).option("recursiveFileLookup", "true")
    lines = reader.option("pathGlobFilter", "*.jsonl*").json(absolute(capture))
    return lines.select(
        "host",
        F.col("rec").alias("recorder"),
        "n",
        F.expr("timestamp_micros(t div 1000)").alias("time"),
        "key",
        F.encode("key", "ISO-8859-1").alias("key_bytes"),
        "size",
        F.unbase64("data").alias("payload"),
    )


def register(spark: SparkSession) -> None:
    """Teach a session the format `sbus`."""
    spark.dataSource.register(SbusSource)


class SbusSource(ds.DataSource):
    """Makes the writers that the options ask for."""

    @classmethod
    def name(cls) -> str:
        return "sbus"

    def writer(self, schema: StructType, overwrite: bool) -> Publisher:
        if ADDRESS not in self.options:
            raise InputError(f"the format sbus needs the option {ADDRESS!r}")
        for name in self.options:
            if name.lower() not in (ADDRESS, CHECKPOINT.lower()):
                raise InputError(f"there is no option {name!r}")
        for name in "key", "payload":
            if name not in schema.names:
                raise InputError(f"publishing needs a column {name!r}")
        return Publisher(self.options[ADDRESS])

    streamWriter = writer


class Publisher(ds.DataSourceArrowWriter, ds.DataSourceStreamArrowWriter):
    """Publishes the rows of each partition, in order, at least once."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, iterator: Any) -> ds.WriterCommitMessage:
        """Publish rows.  Raises: as publish."""
        with Client(self._address) as bus:
            for batch in iterator:
                for row in batch.to_pylist():
                    publish(bus, row)
            bus.sync()
        return ds.WriterCommitMessage()

    def commit(self, *_: Any) -> None:
        """Do nothing: what is published is published."""

    abort: Any = commit  # a stream publishes its batch again
