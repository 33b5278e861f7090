"""Tests of audits by a second auditor, which is simple and slow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
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
from sbus_spark import traces

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT

NAMES = ("breach", "file", "n", "m", "publisher", "c", "key", "messages")


def counted(found: Any) -> Counter[tuple[Any, ...]]:
    """Return breaches with the names of their traces, and how many."""
    return Counter((Path(one[1]).name, *one) for one in found)


def test_two_auditors_name_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In traces at random of the server itself, with and without breaches.

    They are read in many blocks, by a few tasks.
    """
    blocks_in = traces.blocks_in

    def many_blocks_in(paths: Sequence[str]) -> list[traces.Block]:
        with monkeypatch.context() as patch:
            patch.setattr(traces, "BLOCK_BYTES", 9_999)
            return blocks_in(paths)

    monkeypatch.setattr(traces, "blocks_in", many_blocks_in)
    monkeypatch.setattr(traces, "BLOCK_BYTES", 300_000)
    for seed in range(either(400, 40)):
        chosen = random.Random(seed)
        path = tmp_path / f"{seed:03}"
        path.mkdir()
        random_trace(path / f"plain{seed}", chosen)
        if seed % 4:
            spoiled = (path / f"plain{seed}").rename(path / f"spoiled{seed}")
            spoil(spoiled, chosen)
    files = sorted(str(path) for path in tmp_path.glob("*/*"))
    wanted = counted(pipeline_oracle.audit(files))
    rows = sbus_spark.audit(spark, files).select(*NAMES).collect()
    found = counted(map(tuple, rows))
    assert found - wanted == wanted - found == Counter()
    plain = {one[:2] for one in found if one[0].startswith("plain")}
    assert {breach for _, breach in plain} <= {"bad-trace", "undecided"}
    # Those of a server that was killed
    without_stop = {name for name, breach in plain if breach == "bad-trace"}
    assert {name for name, _ in plain} <= without_stop
