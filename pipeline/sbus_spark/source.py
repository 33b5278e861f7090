"""The data source `sbus`: captures, tables and buses in Spark's own programs.

    register(spark)
    spark.read.format("sbus").load(CAPTURE or TABLE)
    spark.readStream.format("sbus").load(CAPTURE)
    spark.readStream.format("sbus").option("address", ADDRESS).load()
    rows.write.format("sbus").mode("append").option("address", ADDRESS).save()

The README of pipeline/ has its options, columns and guarantees.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from pyspark.errors import PySparkNotImplementedError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import StructType

from .common import InputError
from .live import LiveStream, Publisher, StreamPublisher, check_columns
from .stored import (
    COLUMNS,
    EPOCH,
    Capture,
    CaptureReader,
    CaptureStream,
    Selection,
    Selects,
    TableReader,
    is_any,
)


def register(spark: SparkSession) -> None:
    """Have a session know the format `sbus`."""
    spark.dataSource.register(SbusSource)


class SbusSource(DataSource):
    """Makes the readers and writers that the options ask for."""

    @classmethod
    def name(cls) -> str:
        return "sbus"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        path = self._required("path")
        if any(Path(path).glob("day=*")):
            return TableReader(path, self._selects())
        return CaptureReader(path, self._selects(), self._start())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if "address" in self.options:  # it is simpleStreamReader's
            raise PySparkNotImplementedError(
                errorClass="NOT_IMPLEMENTED",
                messageParameters={"feature": "streamReader"},
            )
        capture = Capture(self._required("path"))
        most = self._messages_max()
        return CaptureStream(capture, self._selects(), self._start(), most)

    def simpleStreamReader(
        self, schema: StructType
    ) -> SimpleDataSourceStreamReader:
        return LiveStream(self._required("address"), self._patterns())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        check_columns(schema)
        if overwrite:
            raise InputError('a bus keeps nothing: mode("append") publishes')
        return Publisher(self._required("address"))

    def streamWriter(
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        check_columns(schema)
        return StreamPublisher(self._required("address"))

    def _required(self, name: str) -> str:
        value = self.options.get(name)
        if not value:
            raise InputError(f"the format sbus needs the option {name!r}")
        return str(value)

    def _patterns(self) -> list[str]:
        return str(self.options.get("pattern", "")).splitlines() or [""]

    def _selects(self) -> Selects:
        """Return a function that says whether a key is wanted."""
        if "pattern" not in self.options:
            return is_any
        return Selection(self._patterns())

    def _start(self) -> int:
        """Return when the first message came that is wanted; nanoseconds."""
        text = self.options.get("startingTime", "1970-01-01")
        try:
            start = datetime.datetime.fromisoformat(text)
        except ValueError:
            what = "is no date as 2026-11-22 or 2026-11-22T12:00:00+00:00"
            raise InputError(f"startingTime: {text!r} {what}") from None
        if start.tzinfo is None:
            start = start.replace(tzinfo=datetime.timezone.utc)
        passed = start - EPOCH
        return passed // datetime.timedelta(microseconds=1) * 1_000

    def _messages_max(self) -> int | None:
        text = self.options.get("maxMessagesPerTrigger")
        if text is None:
            return None
        if not re.fullmatch("[1-9][0-9]{0,15}", text):
            what = f"{text!r} is no whole number above 0"
            raise InputError(f"maxMessagesPerTrigger: {what}")
        return int(text)
