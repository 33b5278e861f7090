"""Captures: which of their lines are messages, and why others are none."""

from __future__ import annotations

import secrets

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from .common import DAY, LONG, TEXT, all_of, any_of, is_there, schema

CAPTURE_SCHEMA = schema(
    rec=TEXT, n=LONG, t=LONG, host=TEXT, key=TEXT, size=LONG, data=TEXT
)
NUMBER_MAX = 1 << 53
# Names a folder: any that Linux allows, but the one that stands for none
HOST = r"\A(?!__HIVE_DEFAULT_PARTITION__)[ -~]{1,64}\z"
SEGMENTS = "*.jsonl"


def read_capture(spark: SparkSession, directory: str) -> DataFrame:
    """Return the lines of a capture; columns as of parse_capture."""
    lines = spark.read.text(directory, pathGlobFilter=SEGMENTS)
    return lines.select("value", "_metadata").transform(parse_capture)


def parse_capture(lines: DataFrame) -> DataFrame:
    """Return what lines of text say.

    | column | type | meaning |
    |---|---|---|
    | file | string | the segment |
    | line | string | the line itself |
    | others | | as of check_capture |
    """
    parsed = F.from_json(object_of("value"), CAPTURE_SCHEMA)
    file = F.col("_metadata.file_path")
    return (
        lines.select("value", file.alias("file"), parsed.alias("parsed"))
        .select("file", F.col("value").alias("line"), "parsed.*")
        .transform(check_capture, "file", "line")
    )


def read_messages(lines: DataFrame) -> DataFrame:
    """Return what lines of text say, as check_capture: a row for each line.

    The JSON reader is twice as fast as from_json, but it keeps neither the
    line nor the file.
    """
    reader = lines.sparkSession.read.schema(CAPTURE_SCHEMA)
    objects = reader.json(lines.select(object_of("value")))
    return objects.transform(check_capture)


def object_of(column: str) -> Column:
    """Return a line that is one object; null in JSON for any other.

    To itself, the JSON reader passes over what follows an object.
    """
    line = F.col(column)
    end = F.octet_length(F.substring_index(line, "}", 1)) + 1
    is_plain = line.startswith("{") & (end == F.octet_length(line))
    mark = secrets.token_hex(8)  # which nobody can have written into the line
    marked = F.concat(F.lit("["), line, F.lit(f',"{mark}"]'))
    is_one = F.get_json_object(marked, "$[1]") == mark
    is_object = F.ltrim(line).startswith("{") & is_one
    return F.when(is_plain | is_object, line).otherwise("null")


def check_capture(parsed: DataFrame, *others: str) -> DataFrame:
    """Return which of the objects of a capture are messages.

    *parsed* has the columns of CAPTURE_SCHEMA, and *others*.

    | column | type | meaning |
    |---|---|---|
    | those of *others* | | |
    | reason | string | why it is quarantined; null if it is in order |
    | rec, n, t, host, key, size | | as in CAPTURE_SCHEMA; t in nanoseconds |
    | data | binary | the payload |
    | day | date | UTC |
    """
    payload = F.try_to_binary("data", F.lit("base64"))
    days = F.expr(f"int(t div {DAY})")
    return parsed.withColumn("payload", payload).select(
        *others,
        fault().alias("reason"),
        *CAPTURE_SCHEMA.names[:-1],
        F.col("payload").alias("data"),
        F.date_from_unix_date(days).alias("day"),
    )


def fault() -> Column:
    """Return why a line of a capture is no message, null if it is one."""
    names = CAPTURE_SCHEMA.names
    absent = [F.when(~is_there(name), name) for name in names]
    missing = F.concat(F.lit("missing or wrong: "), F.concat_ws(", ", *absent))
    return (
        F.when(~any_of(map(is_there, names)), "not a JSON object of ours")
        .when(~all_of(map(is_there, names)), missing)
        .when(F.col("payload").isNull(), "data is not base64")
        .when(F.octet_length("payload") != F.col("size"), "size is not data's")
        .when(~F.col("n").between(1, NUMBER_MAX), "n is out of range")
        .when(F.col("t") < 0, "t is out of range")
        .when(F.col("key").rlike(r"[^\x01-\xff]"), "key is not of bytes")
        .when(~F.col("host").rlike(HOST), "host is no name of a host")
    )
