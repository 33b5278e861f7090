"""Tests of reports."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_spark.report import BARS, BARS_MAX, bar_length

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

COLUMNS = "host string, recorder string, n long, t long, key string, size long"
START = 1_700_000_000_000_000  # microseconds
EVIL = "</title><script>\x07 \u202e".encode().decode("latin-1")


def random_rows() -> list[dict[str, Any]]:
    """Return the messages of an hour and two recorders, with gaps."""
    chosen = random.Random(1)
    return [
        {
            "host": "ab"[n % 2],
            "recorder": "RS"[n % 2],
            "n": n // 2,
            "t": START + chosen.randrange(3_600_000_000),
            "key": EVIL if n % 3 else f"k/{int(30 * chosen.random() ** 2)}",
            "size": int(900 * chosen.random() ** 2),
        }
        for n in range(200, 3_000)
        if n not in range(600, 700) and chosen.random() < 0.99
    ]


def table(spark: SparkSession, rows: list[dict[str, Any]]) -> DataFrame:
    """Return messages as read_table does."""
    messages = spark.createDataFrame(rows, COLUMNS)
    return messages.withColumn("time", F.timestamp_micros("t")).drop("t")


def volumes(rows: list[dict[str, Any]], by: str) -> dict[Any, tuple[int, int]]:
    """Return messages and bytes by a column."""
    sizes: dict[Any, list[int]] = {}
    for row in rows:
        sizes.setdefault(row[by], []).append(row["size"])
    return {one: (len(own), sum(own)) for one, own in sizes.items()}


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> dict[str, Any]:
    """Summarize the random messages."""
    return sbus_spark.summarize(table(spark, random_rows()))


def test_all_is_added_up_as_by_hand(numbers: dict[str, Any]) -> None:
    """In total, by key, host, size and time."""
    rows = random_rows()
    sizes, times = (sorted(row[of] for row in rows) for of in ("size", "t"))
    totals = numbers["totals"]
    assert (totals["messages"], totals["bytes"]) == (len(rows), sum(sizes))
    assert (totals["first"], totals["last"]) == (times[0], times[-1])
    for name, part in {"p50": 0.5, "p99": 0.99, "largest": 1}.items():
        assert totals[name] == sizes[math.ceil(part * len(sizes)) - 1]
    width = numbers["seconds"] * 1_000_000
    for row in rows:
        row["time"] = row["t"] // width * width
        row["low"] = (1 << row["size"].bit_length()) >> 1
    for by, sums in {
        "key": numbers["keys"],
        "host": numbers["hosts"],
        "low": numbers["sizes"],
        "time": numbers["times"],
    }.items():
        volume = {row[by]: (row["messages"], row["bytes"]) for row in sums}
        assert volume == volumes(rows, by), by
    assert numbers["keys"][0]["key"] == EVIL
    assert numbers["keys_total"] == len(volumes(rows, "key"))
    assert numbers["hosts_total"] == 2
    for name in "sizes", "times":
        steps = [[*row.values()][0] for row in numbers[name]]
        assert steps == sorted(steps)


def test_numbers_that_are_missing_are_lost(numbers: dict[str, Any]) -> None:
    """Only those after a recorder's first: days before it may be gone."""
    by_host: dict[str, list[int]] = {"a": [], "b": []}
    for row in random_rows():
        by_host[row["host"]].append(row["n"])
    lost = {h: max(n) - min(n) + 1 - len(n) for h, n in by_host.items()}
    assert {row["host"]: row["lost"] for row in numbers["hosts"]} == lost
    assert numbers["lost"] == sum(lost.values()) >= 100


def test_rows_that_are_no_messages_are_not_lost(spark: SparkSession) -> None:
    """Those that were erased, and those of other keys."""
    rows: list[dict[str, Any]] = random_rows()
    erasable = [row for row in rows if row["key"] == EVIL]
    for row in erasable[::3]:
        row["key"] = None
    chosen = [row for row in rows if row["key"] == EVIL]
    numbers = sbus_spark.summarize(table(spark, rows), [EVIL])
    assert numbers["totals"]["messages"] == len(chosen) < len(erasable)
    assert [row["key"] for row in numbers["keys"]] == [EVIL]
    times = sum(row["messages"] for row in numbers["times"])
    assert times == len(chosen) and numbers["keys_total"] == 1
    assert numbers["lost"] == sbus_spark.summarize(table(spark, rows))["lost"]


def test_a_page_runs_and_fetches_nothing(numbers: dict[str, Any]) -> None:
    """What a key does not print is seen; the highest bar fills its chart."""
    text = json.dumps(numbers)
    page = sbus_spark.page(json.loads(text), "</title><script>")
    shown = r"&lt;/title&gt;&lt;script&gt;\x07 \xe2\x80\xae</"
    assert page.count(shown) == 1
    for word in ("<script", "\u202e", "\x07", "<link", "src=", "url("):
        assert word not in page
    charts = re.findall("<figure>(.*?)</figure>", page)
    assert len(charts) == 2
    for chart in charts:
        shares = re.findall(r"--share: ([0-9.]+)%", chart)
        assert max(map(float, shares)) == 100 and len(shares) == 61


def test_a_message_of_4_bytes(spark: SparkSession) -> None:
    """It is one message, in a row of its size; none is an error."""
    rows = table(spark, [{**random_rows()[0], "size": 4}])
    page = sbus_spark.page(sbus_spark.summarize(rows), "a table")
    assert "<b>1</b> messages<" in page and "<td>4 to 7</td><td>1</td>" in page
    assert "<b>4 B</b> of payload" in page and "KiB" not in page
    with pytest.raises(sbus_spark.InputError, match="the table has none"):
        sbus_spark.summarize(rows.where("size = 5"))


@pytest.mark.parametrize("seconds", [0, 1, 121, 86_000, 10**6, 10**8, 10**9])
def test_a_span_of_any_length_has_few_bars(seconds: int) -> None:
    """As many as there is room for, and not one for all."""
    width = BARS[bar_length(START, START + seconds * 1_000_000)]
    assert min(seconds, 4) <= seconds // width < BARS_MAX
