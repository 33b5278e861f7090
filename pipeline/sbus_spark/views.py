"""Views: the queries of a file of SQL, which are computed by their names.

In a file stands above each query `-- view: NAME`, or `-- view: NAME, kept` if
several others use it, so that its rows are kept.  In a query {NAME} is a view
that was computed or given before, and :NAME a value.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

from pyspark.sql import DataFrame, SparkSession

VIEW = re.compile(r"^-- view: (\w+)(, kept)?\n(.*?)(?=^--|\Z)", re.M | re.S)


class Views(dict[str, DataFrame]):
    """The views that were computed or given so far, by their names."""

    def __init__(
        self, spark: SparkSession, file: str, **given: DataFrame
    ) -> None:
        super().__init__(given)
        self._spark = spark
        text = (importlib.resources.files(__package__) / file).read_text()
        self._queries = {name: rest for name, *rest in VIEW.findall(text)}

    def compute(self, *names: str, **values: object) -> None:
        """Compute some views of the file, one after another."""
        for name in names:
            is_kept, query = self._queries[name]
            self[name] = self._spark.sql(query, values, **self)
            if is_kept:
                self[name] = self[name].localCheckpoint()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a view that has few."""
        return [row.asDict() for row in self[name].collect()]
