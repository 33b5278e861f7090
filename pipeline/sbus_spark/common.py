"""What more than one module needs: errors, columns, and text for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T


class PipelineError(Exception):
    """The base of all that this package raises on purpose."""


class JavaError(PipelineError):
    """There is no Java that Spark can run on."""


class InputError(PipelineError):
    """What is to be read is not there, or is something else."""


LONG, TEXT = T.LongType(), T.StringType()
BYTES, DATE = T.BinaryType(), T.DateType()


def schema(**columns: T.DataType) -> T.StructType:
    """Return a schema of columns, by name and type."""
    fields = [T.StructField(name, kind) for name, kind in columns.items()]
    return T.StructType(fields)


def all_of(conditions: Iterable[Column]) -> Column:
    """Return whether all conditions hold."""
    return reduce(lambda one, other: one & other, conditions)


def any_of(conditions: Iterable[Column]) -> Column:
    """Return whether one of the conditions holds."""
    return reduce(lambda one, other: one | other, conditions)


def is_there(column: str) -> Column:
    """Return whether a column is not null."""
    return F.col(column).isNotNull()


def check_there(
    paths: Iterable[str], what: str = "there is no such file"
) -> None:
    """Raise InputError if a path of this machine is not there."""
    for path in paths:
        if "://" not in path and not os.path.exists(path):
            raise InputError(f"{path}: {what}")


def null(kind: str) -> Column:
    """Return the null of a type."""
    return F.lit(None).cast(kind)


SECOND = 1_000_000_000  # nanoseconds
DAY = 86_400 * SECOND


def rows_of(rows: DataFrame) -> list[dict[str, Any]]:
    """Return rows of which there are few."""
    return [row.asDict() for row in rows.collect()]


def printable(text: object) -> str:
    """Return text for people; what is no printable text as \\xNN."""
    return "".join(
        char if char.isprintable() else repr(char)[1:-1] for char in str(text)
    )


def progress(text: str) -> None:
    """Show on a terminal how far we are."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Say something on standard error that is no error."""
    print(f"sbus_spark: {text}", file=sys.stderr, flush=True)
