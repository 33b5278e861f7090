"""Tests of reports."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_spark.common import SECOND
from sbus_spark.render import keys_as_json, over_time
from sbus_spark.report import BUCKETS_MAX, bucket_seconds

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


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
        json.dumps(summary)
        page = sbus_spark.page(summary, "a table")
        assert "&lt;b&gt;\\x07" in page and "\\u003cb>\\\\x07" in page
        assert page.count("<svg") == 3 + 8
        assert "below 2 B: 3 messages" in page
        for word in ("<link", "http", "src=", "url("):
            assert word not in page
        with pytest.raises(sbus_spark.InputError, match="empty"):
            sbus_spark.summarize(rows.filter("n is null"))

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
