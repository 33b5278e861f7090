"""Tests of replays."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sbus_spark.playback
from pipeline_bed import TIMEOUT

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Publisher:
    """A client that notes what is published, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.published: list[tuple[float, bytes, bytes]] = []
        self.is_synced = False

    def publish(self, key: bytes, payload: bytes) -> None:
        self.published.append((self.clock.now, key, payload))

    def sync(self) -> None:
        self.is_synced = True


class TestReplay:
    ROWS = (
        ("r", 2, 1_500_000_000, "h", "a/é", b"\0"),
        ("r", 1, 1_000_000_000, "h", "!/cred/1/2/3/x", b"s"),
        ("r", 3, 3_000_000_000, "h", "B", b""),
        ("q", 1, 1_500_000_000, "g", "a/", b"1"),
    )

    def table(self, spark: SparkSession) -> DataFrame:
        """Return a table as read_table does."""
        kinds = "rec string, n long, t long, host string, key string"
        rows = spark.createDataFrame(self.ROWS, f"{kinds}, data binary")
        return rows.withColumn("size", F.octet_length("data"))

    @pytest.mark.parametrize(
        ("patterns", "keys"),
        [
            ([], ["!/cred/1/2/3/x", "a/", "a/é", "B"]),
            (["a/*"], ["a/", "a/é"]),
            (["a/", "B"], ["a/", "a/é", "B"]),
            (["!/cred/1/2/3/x"], ["!/cred/1/2/3/x"]),
            (["!/cred/"], ["!/cred/1/2/3/x"]),
            (["c"], []),
        ],
    )
    def test_what_patterns_select_in_order(
        self, spark: SparkSession, patterns: list[str], keys: list[str]
    ) -> None:
        """By time, host, recorder and number; secrets are keys like others."""
        rows = sbus_spark.in_order(self.table(spark), patterns).collect()
        assert [row["key"] for row in rows] == keys

    def test_partitions_stay_small(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However large a table is; one comes after the other."""
        monkeypatch.setattr(sbus_spark.playback, "PART_BYTES_MAX", 2_000)
        rows = spark.range(100).selectExpr(
            *("'r' rec", "id n", "99 - id t", "'h' host", "'k' key"),
            *("binary('') data", "0 size"),
        )
        ordered = sbus_spark.in_order(rows)
        parts = ordered.rdd.glom().collect()
        assert len(parts) == 11 and max(map(len, parts)) < 30
        times = [row["t"] for part in parts for row in part]
        assert times == [*range(100)]

    @pytest.mark.parametrize(
        ("speed", "times"),
        [(1.0, [0.0, 0.5, 0.5, 2.0]), (4.0, [0.0, 0.125, 0.125, 0.5])],
    )
    def test_pace(
        self,
        spark: SparkSession,
        speed: float,
        times: list[float],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As it was recorded, or so many times as fast."""
        clock = Clock()
        bus = Publisher(clock)
        monkeypatch.setattr(sbus_spark.playback, "time", clock)
        rows = sbus_spark.in_order(self.table(spark))
        assert sbus_spark.replay(rows, bus, speed) == 4  # type: ignore
        assert [at for at, _, _ in bus.published] == times
        assert bus.published[2][1:] == (b"a/\xe9", b"\0")
        assert bus.is_synced

    def test_as_fast_as_possible(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a speed nobody sleeps."""
        clock = Clock()
        bus = Publisher(clock)
        monkeypatch.setattr(sbus_spark.playback, "time", clock)
        rows = sbus_spark.in_order(self.table(spark))
        sbus_spark.replay(rows, bus, None)  # type: ignore
        assert clock.now == 0.0 and len(bus.published) == 4
