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
    found = spark.createDataFrame(rows, COLUMNS)
    return found.withColumn("time", F.timestamp_micros("t")).drop("t")


def volumes(rows: list[dict[str, Any]], by: str) -> dict[Any, tuple[int, int]]:
    """Return messages and bytes by a column."""
    sizes: dict[Any, list[int]] = {}
    for row in rows:
        sizes.setdefault(row[by], []).append(row["size"])
    return {one: (len(own), sum(own)) for one, own in sizes.items()}


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> dict[str, Any]:
    """Summarize the random messages."""
    return sbus_spark.summarize(table(spark, random_rows()))


def test_all_is_added_up_as_by_hand(found: dict[str, Any]) -> None:
    """In total, by key, host, size and time."""
    rows = random_rows()
    sizes, times = (sorted(row[of] for row in rows) for of in ("size", "t"))
    totals = found["totals"]
    assert (totals["messages"], totals["bytes"]) == (len(rows), sum(sizes))
    assert (totals["first"], totals["last"]) == (times[0], times[-1])
    for name, part in {"p50": 0.5, "p99": 0.99, "largest": 1}.items():
        assert totals[name] == sizes[math.ceil(part * len(sizes)) - 1]
    width = found["seconds"] * 1_000_000
    for row in rows:
        row["time"] = row["t"] // width * width
        row["low"] = (1 << row["size"].bit_length()) >> 1
    for by, told in {
        "key": found["keys"],
        "host": found["hosts"],
        "low": found["sizes"],
        "time": found["times"],
    }.items():
        got = {row[by]: (row["messages"], row["bytes"]) for row in told}
        assert got == volumes(rows, by), by
    busiest = [row["key"] for row in found["keys"]]
    assert busiest[0] == EVIL and list(found["key_times"]) == busiest[:8]
    for key, told in found["key_times"].items():
        got = {row["time"]: (row["messages"], row["bytes"]) for row in told}
        assert got == volumes([r for r in rows if r["key"] == key], "time")


def test_numbers_that_are_missing_are_lost(found: dict[str, Any]) -> None:
    """Only those after a recorder's first: days before it may be gone."""
    numbers: dict[str, list[int]] = {"a": [], "b": []}
    for row in random_rows():
        numbers[row["host"]].append(row["n"])
    lost = {h: max(n) - min(n) + 1 - len(n) for h, n in numbers.items()}
    assert {row["host"]: row["lost"] for row in found["hosts"]} == lost
    assert found["lost"] == sum(lost.values()) >= 100


def test_a_page_runs_and_fetches_nothing(found: dict[str, Any]) -> None:
    """What a key does not print is seen; charts of keys share a scale."""
    page = sbus_spark.page(json.loads(json.dumps(found)), "</title><script>")
    assert page.count("&lt;/title&gt;&lt;script&gt;\\x07 \\u202e</") == 2
    for word in ("<script", "\u202e", "\x07", "<link", "src=", "url("):
        assert word not in page
    charts = page.partition('class="charts"')[2].partition("<table")[0]
    tops = re.findall(r'y1="0.0"[^/]*/><text[^>]*>([^<]+)', charts)
    assert len(tops) == 8 and len(set(tops)) == 1 and ">14 Nov 22:" in charts
    bars = re.findall(r' y="([0-9.]+)"[^>]* height="([0-9.]+)"', charts)
    assert {round(float(y) + float(high), 1) for y, high in bars} == {80}


def test_a_message_of_4_bytes(spark: SparkSession) -> None:
    """It is one message, in a row of its size; none is an error."""
    rows = table(spark, [{**random_rows()[0], "size": 4}])
    page = sbus_spark.page(sbus_spark.summarize(rows), "a table")
    assert "<b>1</b> messages<" in page and "<td>4 to 7</td><td>1</td>" in page
    assert "<b>4 B</b> of payload" in page and "KiB" not in page
    with pytest.raises(sbus_spark.InputError, match="the table is empty"):
        sbus_spark.summarize(rows.where("size = 5"))


@pytest.mark.parametrize("seconds", [0, 1, 121, 86_000, 10**6, 10**8, 10**9])
def test_a_span_of_any_length_has_few_bars(seconds: int) -> None:
    """As many as there is room for, and not one for all."""
    width = BARS[bar_length(START, START + seconds * 1_000_000)]
    assert min(seconds, 4) <= seconds // width < BARS_MAX
