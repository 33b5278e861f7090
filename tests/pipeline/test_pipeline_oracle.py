"""Tests of audits by a second auditor, which is simple and slow."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pipeline_oracle
from pipeline_random import random_trace, spoil
from sizes import either

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import TIMEOUT

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

TRACES = either(400, 40)
NAMES = ("breach", "file", "n", "m", "publisher", "c", "key", "messages")


def by_file(found: Any) -> dict[str, Counter[tuple[Any, ...]]]:
    """Return breaches by the names of their traces."""
    files: dict[str, Counter[tuple[Any, ...]]] = {}
    for one in found:
        own = files.setdefault(Path(one[1]).name, Counter())
        own[(one[0], *one[2:])] += 1
    return files


def test_two_auditors_name_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In traces at random of the server itself, with and without breaches."""
    for seed in range(TRACES):
        chosen = random.Random(seed)
        path = tmp_path / f"{seed:03}"
        path.mkdir()
        random_trace(path / f"plain{seed}", chosen)
        if seed % 4:
            spoil(path / f"plain{seed}", chosen)
            (path / f"plain{seed}").rename(path / f"spoiled{seed}")
    files = sorted(str(path) for path in tmp_path.glob("*/*"))
    wanted = by_file(pipeline_oracle.audit(files))
    rows = sbus_spark.audit(spark, files).select(*NAMES).collect()
    found = by_file(map(tuple, rows))
    for name in {*wanted, *found}:
        assert found.get(name) == wanted.get(name), name
        if name.startswith("plain"):
            kinds = {one[0] for one in found[name]}
            assert kinds <= {"bad-trace", "undecided"}
