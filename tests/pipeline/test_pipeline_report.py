"""Tests of reports."""

from __future__ import annotations

import base64
import json
import math
import random
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_spark import report
from sbus_spark.common import DAY, SECOND
from sbus_spark.render import keys_as_json, over_time
from sbus_spark.report import BUCKETS_MAX, bucket_seconds, summarize_here

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


SPAN = 900 * SECOND  # of a chart of random_rows


def random_rows(chosen: random.Random) -> list[dict[str, Any]]:
    """Return the messages of a day and two recorders, some twice."""
    rows = []
    for n in range(2, 3_000):
        size = chosen.choice((0, 1, 2, 3, 4, 700, 801))
        row = {
            "rec": "RS"[n % 2],
            "host": "ab"[n % 2],
            "n": n // 2,
            "t": DAY + chosen.randrange(DAY),
            "key": f"k/{int(30 * chosen.random() ** 2)}",
            "size": size,
            "data": base64.b64encode(bytes(size)).decode(),
        }
        rows += [row] * chosen.choice((0, 1, 1, 1, 2))
    chosen.shuffle(rows)
    return rows


def by_hand(rows: list[dict[str, Any]], *by: str) -> list[dict[str, Any]]:
    """Return the numbers of messages by some columns, as a report has them."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        span = row["t"] - row["t"] % SPAN
        known = row | {"power": row["size"].bit_length(), "t": span}
        names = tuple(known[name] for name in by)
        groups.setdefault(names, []).append(row)
    return [
        dict(zip(by, names)) | numbers_of(groups[names])
        for names in sorted(groups)
    ]


def numbers_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many messages there are, and how large."""
    sizes = sorted(row["size"] for row in rows)
    times = [row["t"] for row in rows]
    return {
        "messages": len(rows),
        "bytes": sum(sizes),
        "first": min(times),
        "last": max(times),
        "p50": percentile(sizes, Fraction("0.5")),
        "p99": percentile(sizes, Fraction("0.99")),
        "largest": sizes[-1],
    }


def percentile(sizes: list[int], share: Fraction) -> int:
    """Return what is at a share of sizes in order, or between two, cut."""
    place = share * (len(sizes) - 1)
    low, high = sizes[math.floor(place)], sizes[math.ceil(place)]
    return int(low + (high - low) * (place % 1))


def gaps_by_hand(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gaps in the numbers of recorders, by time."""
    found = []
    for host, rec in ("a", "R"), ("b", "S"):
        own = {row["n"]: row["t"] for row in rows if row["rec"] == rec}
        numbers = [0, *sorted(own)]
        found += [
            {
                "host": host,
                "rec": rec,
                "after": after,
                "lost": n - after - 1,
                "t": own[n],
            }
            for after, n in zip(numbers, numbers[1:])
            if n > after + 1
        ]
    return sorted(found, key=lambda gap: gap["t"])


def test_many_counts_are_added_up_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the same as all at once."""
    names = report.COLUMNS
    rows = [
        [row[name] for name in names] for row in random_rows(random.Random(1))
    ]
    monkeypatch.setattr(report, "ROWS", 100)

    def found() -> dict[report.By, report.Found]:
        batches = report.batches_of(rows)
        return dict(report.added_up(report.count_kinds(2, batches)))

    at_once = found()
    monkeypatch.setattr(report, "COUNTS", 1)
    assert found() == at_once and at_once[()][0] == 1


class TestReport:
    """Tables to pages."""

    def test_totals_gaps_and_a_page_without_links(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Keys are escaped; nothing is fetched."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        write_segments(capture, 1)
        more = [capture_line(n, key="<b>\x07") for n in (151, 152)]
        more += [capture_line(3, rec="S")] * 2
        (capture / "more.jsonl").write_text("".join(more))
        sbus_spark.ingest(spark, str(capture), str(table))
        rows = sbus_spark.read_table(spark, str(table))
        summary = sbus_spark.summarize(rows)
        assert summary["totals"]["messages"] == 104
        sizes = [n % 50 for n in [*range(1, 101), 151, 152, 3, 3]]
        assert summary["totals"]["bytes"] == sum(sizes)
        assert summary["totals"]["p50"] == statistics.median_low(sizes)
        assert summary["totals"]["p99"] == 48  # and a bit: it is cut
        assert summary["totals"]["largest"] == 49
        assert summary["keys_total"] == 8
        assert summary["lost"] == 52
        assert [(gap["after"], gap["lost"]) for gap in summary["gaps"]] == [
            (0, 2),
            (100, 50),
        ]
        assert sum(row["messages"] for row in summary["times"]) == 104
        here = summarize_here(spark.sparkContext, str(table))
        assert here == summary
        json.dumps(summary)
        page = sbus_spark.page(summary, "a table")
        assert "&lt;b&gt;\\x07" in page and "\\u003cb>\\\\x07" in page
        assert page.count("<svg") == 3 + 8
        assert "below 2 B: 3 messages" in page
        for word in ("<link", "http", "src=", "url("):
            assert word not in page
        with pytest.raises(sbus_spark.InputError, match="empty"):
            sbus_spark.summarize(rows.filter("n is null"))

    def test_all_is_added_up_as_by_hand(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Of random messages in many files."""
        capture, table = tmp_path / "capture", tmp_path / "table"
        rows = random_rows(random.Random(1))
        capture.mkdir()
        for at in range(7):
            text = "".join(
                capture_line(row["n"], **row) for row in rows[at::7]
            )
            (capture / f"{at}.jsonl").write_text(text)
        sbus_spark.ingest(spark, str(capture), str(table))
        found = summarize_here(spark.sparkContext, str(table))
        assert found["seconds"] * SECOND == SPAN
        assert [found["totals"]] == by_hand(rows)
        assert found["hosts"] == by_hand(rows, "host")
        keys = by_hand(rows, "key")
        keys.sort(key=lambda row: -row["messages"])
        assert found["keys"] == keys and found["keys_total"] == 30
        assert found["sizes"] == by_hand(rows, "power")
        assert found["times"] == by_hand(rows, "t")
        assert list(found["key_times"]) == [row["key"] for row in keys[:8]]
        for key, told in found["key_times"].items():
            own = [row for row in rows if row["key"] == key]
            assert told == by_hand(own, "t", "key")
        lost = gaps_by_hand(rows)
        assert found["lost"] == sum(gap["lost"] for gap in lost)
        assert len(lost) > len(found["gaps"]) == 100
        assert found["gaps"] == lost[:100]

    @pytest.mark.parametrize("seconds", [0, 1, 121, 86_000, 10**6, 10**8])
    def test_charts_of_any_length(self, seconds: int) -> None:
        """Each span has a bar that tells its rate."""
        width = bucket_seconds(0, seconds * SECOND)
        first = 1_763_717_053 // width * width
        last = first + seconds // width * width
        times = [{"t": t * SECOND, "messages": width} for t in {first, last}]
        span = (first * SECOND, last * SECOND, width)
        chart = over_time(times, span, "messages")
        assert chart.count("<g>") == seconds // width + 1 <= BUCKETS_MAX
        assert chart.count(": 1.0 messages / s<") == len(times)

    def test_as_many_keys_as_a_page_has_room_for(self) -> None:
        """The busiest; the page stays below a megabyte."""
        numbers = {"messages": 1, "bytes": 2, "p50": 3, "p99": 4}
        keys = [{"key": "k" * 100, **numbers} for _ in range(10_000)]
        text = keys_as_json(keys)
        assert 600_000 < len(text) < 700_000
        assert json.loads(text)[0] == ["k" * 100, 1, 2, 3, 4]
