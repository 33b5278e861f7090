"""Tests of audits by a second auditor, which is simple and slow.

Both look at traces at random.  An audit runs in this process, on what stands
for Spark in pipeline_inline.py; some traces are for Spark itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import pipeline_oracle
from pipeline_random import random_trace, spoil
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

from pipeline_bed import TIMEOUT
from pipeline_inline import CONTEXT
from sbus_spark.verdict import Audit

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

TRACES = either(300, 20)
BLOCKS = (1 << 10, 3_000, 20_000, 32 << 20)  # bytes


def named(found: Any) -> list[tuple[Any, ...]]:
    """Return breaches in an order, None before all numbers."""
    return sorted(
        found, key=lambda one: [(part is not None, part) for part in one]
    )


def by_oracle(path: Path) -> list[tuple[Any, ...]]:
    return named(pipeline_oracle.audit(str(path)))


def by_audit(path: Path, block_bytes: int) -> list[tuple[Any, ...]]:
    audit = Audit(CONTEXT, [str(path)], block_bytes)
    rows = [*audit.few, *(audit.many.collect() if audit.many else [])]
    assert all(str(path) in (row.file or row.detail) for row in rows)
    return named(
        (row.breach, row.n, row.m, row.publisher, row.c, row.key)
        for row in rows
    )


class TestOracle:
    """Two auditors name the same."""

    @pytest.mark.parametrize("seed", range(TRACES))
    def test_random_traces_with_random_breaches(
        self, seed: int, tmp_path: Path
    ) -> None:
        """In blocks of any size; what a server wrote itself is in order."""
        chosen = random.Random(seed)
        path = tmp_path / "trace"
        random_trace(path, chosen)
        killed = {one[0] for one in by_oracle(path)}
        assert killed <= {"bad-trace"}  # there is no stop
        for is_spoiled in (False, True):
            if is_spoiled:
                spoil(path, chosen)
            found = by_oracle(path)
            for block_bytes in (BLOCKS[0], chosen.choice(BLOCKS[1:])):
                assert by_audit(path, block_bytes) == found, block_bytes

    def test_on_spark(self, spark: SparkSession, tmp_path: Path) -> None:
        """Of a directory of traces, in blocks that cut them."""
        chosen = random.Random(1)
        wanted = []
        for number in range(either(50, 8)):
            path = tmp_path / str(number)
            random_trace(path, chosen)
            spoil(path, chosen)
            wanted += by_oracle(path)
        audit = Audit(spark.sparkContext, [str(tmp_path)], 50_000)
        found = [*audit.few, *audit.many.collect()]
        assert named(wanted) == named(
            (row.breach, row.n, row.m, row.publisher, row.c, row.key)
            for row in found
        )
