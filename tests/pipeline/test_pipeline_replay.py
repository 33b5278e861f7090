"""Tests of replays, to a real bus."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import DataFrame, SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_client import Client

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def messages(spark: SparkSession, *rows: str) -> DataFrame:
    """Return messages, each in a partition of its own."""
    names = ["seconds", "host", "recorder", "n", "key", "payload"]
    frame = spark.createDataFrame([row.split() for row in rows], names)
    return frame.repartition(len(rows), "payload").selectExpr(
        "timestamp_micros(bigint(seconds * 1e6)) AS time", "host", "recorder",
        "bigint(n) AS n", "key", "binary(payload) AS payload",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        *(([], b"abcdefg"), (["k/*"], b"cd"), (["k/", "\xe9"], b"cdeg")),
        *((["!/cred/"], b"a"), (["nothing"], b"")),
    ],
)
def test_messages_come_in_order(
    spark: SparkSession, hearer: Client, patterns: list[str], wanted: bytes
) -> None:
    """By time, host, recorder and number; secrets are keys like others."""
    own = hearer.whoami()
    rows = messages(
        spark,
        "2.000001 h r 1 é g", "2 h r 10 B f", "2 h r 9 k/a/b e",
        "2 h q 11 k/é d", "2 g r 12 k/ c", "1 z z 13 B b",
        f"0 z z 14 !/cred/{own.gid}/{own.uid}/{own.pid}/x a",
    )  # fmt: skip
    chosen = sbus_spark.selected(rows, patterns)
    count = sbus_spark.replay(chosen, hearer.address)
    heard = [hearer.receive() for _ in range(count)]
    assert b"".join(one.payload for one in heard) == wanted
    assert {b"k/\xe9", b"\xe9"} & {one.key for one in heard} or count < 2


def test_a_speed_keeps_the_times(spark: SparkSession, hearer: Client) -> None:
    """So many times as fast: an hour does not go by in less than its part."""
    rows = messages(spark, "0 h r 1 k a", "1800 h r 2 k b", "3600 h r 3 k c")
    for speed, seconds in ((None, 0.0), (720.0, 5.0)):
        began = time.monotonic()
        assert sbus_spark.replay(rows, hearer.address, speed=speed) == 3
        assert time.monotonic() - began >= seconds
        assert b"".join(hearer.receive()[1] for _ in "abc") == b"abc"
