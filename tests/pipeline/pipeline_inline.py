"""Spark on paper: what an audit uses of it, in this process, at once.

What goes from one task to another is pickled, as it is in Spark.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

Part = list[Any]
FOLDER = tempfile.TemporaryDirectory(prefix="sbus-")  # of an executor


class Rows:
    """What PySpark calls an RDD: a list a task."""

    def __init__(self, parts: Iterable[Iterable[Any]]) -> None:
        self.parts: list[Part] = [
            [pickle.loads(pickle.dumps(row)) for row in part] for part in parts
        ]

    def mapPartitionsWithIndex(self, work: Any) -> Rows:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARK_LOCAL_DIRS", FOLDER.name)
            parts = enumerate(self.parts)
            return Rows(work(at, iter(own)) for at, own in parts)

    def mapPartitions(self, work: Any) -> Rows:
        return Rows(work(iter(part)) for part in self.parts)

    def flatMap(self, work: Any) -> Lazy:
        return Lazy(self, work)

    def partitionBy(self, count: int, place: Callable[[Any], int]) -> Rows:
        parts: list[Part] = [[] for _ in range(count)]
        for row in itertools.chain(*self.parts):
            parts[place(row[0]) % count].append(row)
        return Rows(parts)

    def groupByKey(self, count: int) -> Rows:
        groups: dict[Any, Part] = {}
        for key, value in itertools.chain(*self.parts):
            groups.setdefault(key, []).append(value)
        return Rows([list(groups.items())])

    def collect(self) -> Part:
        return list(itertools.chain(*self.parts))


class Lazy(Rows):
    """Rows that cannot be pickled before more work is done on them."""

    def __init__(self, rows: Rows, work: Any) -> None:
        self.parts = [
            list(itertools.chain.from_iterable(map(work, part)))
            for part in rows.parts
        ]


class Context:
    """What PySpark calls a SparkContext."""

    defaultParallelism = 2

    def parallelize(self, rows: Part, count: int) -> Rows:
        return Rows([row] for row in rows) if rows else Rows([[]])

    def broadcast(self, value: object) -> Any:
        return SimpleNamespace(value=pickle.loads(pickle.dumps(value)))

    def union(self, parts: list[Rows]) -> Rows:
        return Rows(itertools.chain(*(rows.parts for rows in parts)))


CONTEXT: Any = Context()
