"""Tests of reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline_paper import capture_line, write_segments

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT
from sbus_spark.common import SECOND
from sbus_spark.render import chart
from sbus_spark.report import bucket_seconds

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
        assert summary["totals"]["bytes"] == sum(
            n % 50 for n in [*range(1, 101), 151, 152, 3, 3]
        )
        assert summary["keys_total"] == 8
        assert summary["lost"] == 52
        assert [(gap["after"], gap["lost"]) for gap in summary["gaps"]] == [
            (0, 2),
            (100, 50),
        ]
        assert sum(row["messages"] for row in summary["times"]) == 104
        json.dumps(summary)
        page = sbus_spark.page(summary, "a table")
        assert "&lt;b&gt;\\x07" in page and page.count("<svg") == 2
        for word in ("<script", "<link", 'href="http', "src="):
            assert word not in page
        with pytest.raises(sbus_spark.InputError, match="empty"):
            sbus_spark.summarize(rows.filter("n is null"))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "seconds",
        [0, 1, 5, 27, 121, 299, 7_000, 86_000, 172_000, 10**6, 10**8],
    )
    def test_charts_of_any_length(self, seconds: int) -> None:
        """Where no interval suits it, the plotting library would warn."""
        width = bucket_seconds(0, seconds * SECOND)
        first = 1_763_717_053 // width * width
        times = [
            {"t": t * SECOND, "messages": 1}
            for t in (first, first + seconds // width * width)
        ]
        assert "UTC" in chart(times, width, "messages")
