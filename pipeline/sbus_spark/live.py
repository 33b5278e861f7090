"""The data source `sbus`, live: to hear a bus, and to publish rows.

Facts:

- A server answers after all that it has sent before.  So what a live stream
  reads in one go ends with the answer to its question.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import (
    DataSourceStreamWriter,
    DataSourceWriter,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sbus_client import Client, ControlMessage, Disconnected, SbusError

from .common import InputError
from .stored import Row

ROWS_PER_SYNC = 1_000


class LiveStream(SimpleDataSourceStreamReader):
    """Hears what a bus delivers; what comes while nobody asks may be lost.

    It never slows a bus (soft mode `discard`).  The numbers n of what it
    hears leave out as many as were lost.
    """

    def __init__(self, address: str, patterns: list[str]) -> None:
        self._address = address
        self._patterns = patterns
        self._bus: Client | None = None
        self._name = f"live_{secrets.token_hex(4)}"
        self._lost = 0

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def read(
        self, start: dict[str, Any]
    ) -> tuple[Iterator[tuple[Any, ...]], dict[str, Any]]:
        n = start["n"]
        rows = []
        bus = self._bus = self._bus or self._connect()
        host = os.uname().nodename
        bus.control("stats")
        for received in bus:
            if isinstance(received, ControlMessage):
                break
            n += 1
            now = datetime.datetime.now(datetime.timezone.utc)
            key = received.key.decode("latin-1")
            row = Row(host, self._name, n, now, key, received.payload)
            rows.append(row)
        lost = json.loads(received.payload)["discarded"]
        n += lost - self._lost
        self._lost = lost
        return iter(rows), {"n": n}

    def readBetweenOffsets(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Return nothing: what was heard before a restart is gone."""
        return iter(())

    def _connect(self) -> Client:
        bus = Client(self._address)
        bus.control("blocking/soft/discard")
        for pattern in self._patterns:
            bus.subscribe(pattern.encode("latin-1"))
        return bus


def check_columns(schema: StructType) -> None:
    """Raise InputError if rows cannot be published."""
    kinds = {field.name: field.dataType.typeName() for field in schema}
    for name in ("key", "payload"):
        if kinds.get(name) not in ("string", "binary"):
            what = f"a column {name!r} of strings or binary"
            raise InputError(f"to publish rows takes {what}; not {kinds}")


def publish_rows(address: str, rows: Iterable[Any]) -> None:
    """Publish rows in order, each at least once.

    Raises: InputError with the row that the bus refuses.
    """
    waiting: list[tuple[int, bytes, bytes]] = []
    bus = Client(address)
    try:
        for number, row in enumerate(rows, 1):
            key = bytes_of(row, number, "key")
            payload = bytes_of(row, number, "payload")
            waiting.append((number, key, payload))
            try:
                bus.publish(key, payload)
                if len(waiting) == ROWS_PER_SYNC:
                    bus.sync()
                    waiting.clear()
            except SbusError as error:
                bus = one_by_one(bus, waiting, error)
                waiting.clear()
        try:
            bus.sync()
        except Disconnected as error:
            bus = one_by_one(bus, waiting, error)
    finally:
        bus.close()


def one_by_one(
    bus: Client, rows: list[tuple[int, bytes, bytes]], why: Exception
) -> Client:
    """Publish rows that may not all have come through; return a new client.

    Raises: InputError with the row that the bus refuses.
    """
    with contextlib.suppress(SbusError):
        bus.sync()  # what has come through is routed first
    bus.close()
    bus = Client(bus.address)
    for number, key, payload in rows:
        try:
            bus.publish(key, payload)
            bus.sync()
        except SbusError as error:
            bus.close()
            text = f"row {number} of a partition, key {key[:80]!r}"
            raise InputError(f"{text}: {error or why}") from None
    return bus


def bytes_of(row: Any, number: int, name: str) -> bytes:
    """Return a column of a row that is to be published.

    Raises: InputError if there is none, or its text is not of bytes.
    """
    value = row[name]
    where = f"row {number} of a partition"
    if value is None:
        raise InputError(f"{where}: it has no {name}")
    if not isinstance(value, str):
        return bytes(value)
    try:
        return value.encode("latin-1" if name == "key" else "utf-8")
    except UnicodeEncodeError:
        what = "is not of bytes; encode it, and publish binary"
        raise InputError(f"{where}: {name} {value[:80]!r} {what}") from None


class PartitionPublisher:
    """Publishes the rows of each partition from where they are."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        publish_rows(self._address, iterator)
        return WriterCommitMessage()


class Publisher(PartitionPublisher, DataSourceWriter):
    """Publishes rows."""


class StreamPublisher(PartitionPublisher, DataSourceStreamWriter):
    """Publishes the rows of each batch of a stream."""

    def commit(
        self, messages: list[WriterCommitMessage | None], batchId: int
    ) -> None:
        """Do nothing: what is published is published."""

    def abort(
        self, messages: list[WriterCommitMessage | None], batchId: int
    ) -> None:
        """Do nothing: the batch will be published again."""
