"""Breaches: what is wrong, a row each.

See spec/3-protocol.md to spec/8-running.md.  Facts:

- Only the messages whose account is not empty are looked at client by
  client, and only the clients that were ever sent a lower message number
  after a higher one are looked at publisher by publisher.
- At the end of a client or of a run, what waited in a backlog is lost.  In
  order/queue that is what comes after all that was sent to it; in another
  order it may be anything.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .common import is_there, null
from .trace import is_secret, settings

BREACHES = (
    "missing",  # owed, and neither sent nor dropped
    "unowed",  # sent, and not owed
    "secret-leak",  # the same, under a secret key
    "duplicate",  # sent more than once
    "out-of-order",  # sent after a later message of the same publisher
    "bad-drop",  # dropped for no reason that the client had asked for
    "bad-trace",  # what no server in order can have written
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


DETAILS = {
    "missing": "owed, and neither sent nor dropped, but a later message was",
    "unowed": "sent to a client to which it was not owed",
    "secret-leak": "a secret, sent to a client to which it was not owed",
    "duplicate": "sent more than once to one client",
    "bad-drop": "dropped although it was not owed, or was sent as well",
}


def delivery_breaches(
    messages: DataFrame, owed: DataFrame, reached: DataFrame, lives: DataFrame
) -> DataFrame:
    """Return what is wrong with the deliveries of messages.

    The columns are those of as_breaches; n is the number of the last send
    or drop, or of the msg event where there is neither.
    """
    due = owed.select(
        "run", "m", "c", null("long").alias("at"), null("boolean")
    )
    done = reached.select("run", "m", "c", "n", "is_sent")
    pairs = [text for pair in DETAILS.items() for text in pair]
    detail = F.create_map(*map(F.lit, pairs))[F.col("breach")]
    return (
        done.withColumnRenamed("n", "at")
        .unionAll(due)
        .groupBy("run", "m", "c")
        .agg(
            F.count_if(F.col("at").isNull()).alias("owed"),
            F.count_if("is_sent").alias("sends"),
            F.count_if(~F.col("is_sent")).alias("drops"),
            F.max("at").alias("at"),
        )
        .join(messages, ["run", "m"], how="inner")
        .join(
            lives.select("run", "c", "last_m", "is_reordered"),
            ["run", "c"],
            how="left",
        )
        .withColumn("breach", F.explode(F.array_compact(breaches_of_one())))
        .withColumn("n", F.coalesce("at", "n"))
        .transform(as_breaches, F.col("breach"), detail)
    )


def breaches_of_one() -> Column:
    """Return the breaches in what one client got of one message."""
    sends, drops = F.col("sends"), F.col("drops")
    is_owed = F.col("owed") > 0
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


def mixed(reached: DataFrame, lives: DataFrame) -> DataFrame:
    """Return who was sent a message after one that was published later.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | a client that never asked for that |
    """
    in_order = lives.filter(~F.col("is_reordered")).select("run", "c")
    of_client = Window.partitionBy("c", "run").orderBy("n")
    return (
        reached.filter("is_sent")
        .join(F.broadcast(in_order), ["run", "c"], how="left_semi")
        .withColumn("previous", F.lag("m").over(of_client))
        .filter(F.col("m") < F.col("previous"))
        .select("run", "c")
        .distinct()
    )


def first_sends(reached: DataFrame, mixed: DataFrame) -> DataFrame:
    """Return the first sends of each message to some clients.

    | column | type | meaning |
    |---|---|---|
    | run, m, c | long | the message, and the client |
    | n | long | event number |
    """
    return (
        reached.filter("is_sent")
        .join(mixed, ["run", "c"], how="left_semi")
        .groupBy("run", "m", "c")
        .agg(F.min("n").alias("n"))
    )


def order_breaches(owed: DataFrame, firsts: DataFrame) -> DataFrame:
    """Return the sends that came after a later message of the publisher.

    *firsts* are the first sends of messages to clients: run, m, c, at.  What
    was not owed does not count.  The columns are those of as_breaches.
    """
    of_pair = Window.partitionBy("run", "c", "publisher").orderBy("n")
    before = of_pair.rowsBetween(Window.unboundedPreceding, -1)
    detail = F.format_string("sent after message %d", "latest")
    return (
        firsts.join(owed.drop("n"), ["run", "m", "c"], how="inner")
        .withColumn("latest", F.max("m").over(before))
        .filter(F.col("m") < F.col("latest"))
        .transform(as_breaches, F.lit("out-of-order"), detail)
    )


DISCARDS = {
    "soft/discard": ("queue", "discard", "block", "error"),
    "hard/discard": ("discard", "block", "error"),
}


def permissions(events: DataFrame) -> DataFrame:
    """Return which drops clients had asked for, and when.

    | column | type | meaning |
    |---|---|---|
    | run, c | long | the client |
    | reason | string | the reason of the drops |
    | since, until | long | event numbers |
    """
    asked = []
    for reason, modes in DISCARDS.items():
        side = f"blocking/{reason.partition('/')[0]}/"
        asked.append(
            settings(events, [side + mode for mode in modes])
            .filter(F.col("key") == f"blocking/{reason}")
            .withColumn("key", F.lit(reason))
        )
    return reduce(DataFrame.unionAll, asked).select(
        "run", "c", F.col("key").alias("reason"), "since", "until"
    )


def drop_breaches(rare: DataFrame, lives: DataFrame) -> DataFrame:
    """Return the drops for which there was no reason.

    *rare* are the events other than msg and send.  The columns are those of
    as_breaches, publisher and key being null.
    """
    asked = permissions(rare).withColumnsRenamed({"run": "of", "c": "who"})
    is_asked = (
        (F.col("run") == F.col("of"))
        & (F.col("c") == F.col("who"))
        & (F.col("text") == F.col("reason"))
        & (F.col("since") < F.col("n"))
        & (F.col("n") < F.col("until"))
    )
    is_deaf = F.col("text") == "deaf"
    heard_later = F.coalesce(F.col("last_heard") > F.col("n"), F.lit(False))
    detail = F.when(
        is_deaf, "dropped as for a deaf client, which heard more later"
    ).otherwise(F.format_string("%s, which was not asked for", "text"))
    return (
        rare.filter(F.col("ev") == "drop")
        .join(F.broadcast(asked), is_asked, how="left_anti")
        .join(lives.select("run", "c", "last_heard"), ["run", "c"], how="left")
        .filter(~is_deaf | heard_later)
        .transform(as_breaches, F.lit("bad-drop"), detail)
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


def number_breaches(stretches: DataFrame) -> DataFrame:
    """Return where event numbers do not go on; columns as of as_breaches."""
    in_file = Window.partitionBy("file").orderBy("block", "line")
    is_first, is_last = F.col("n") == 1, F.col("following") == 1
    goes_on = F.col("n") == F.col("previous") + 1
    is_started = is_first & F.col("start").isNotNull()
    is_end = is_last & (F.col("stop") == F.col("last"))

    def told(condition: Column, n: str, text: str, *names: str) -> Column:
        said = F.format_string(text, "file", *names).alias("said")
        return F.when(condition, F.struct(F.col(n).alias("n"), said))

    what = F.array(
        told(
            ~is_started & ~(goes_on & ~is_first),
            "n",
            "%s: event %d comes after event %d",
            "n",
            "previous",
        ),
        told(
            is_last & ~is_there("stop"),
            "last",
            "%s: no stop after event %d",
            "last",
        ),
        told(
            is_there("stop") & ~is_end,
            "stop",
            "%s: event %d stops, but is not the last",
            "stop",
        ),
    )
    return bad_trace(
        stretches.withColumn("previous", F.lag("last", 1, 0).over(in_file))
        .withColumn("following", F.lead("n", 1, 1).over(in_file))
        .select("run", F.inline(F.array_compact(what))),
        F.col("said"),
    )


def absence_breaches(stretches: DataFrame) -> DataFrame:
    """Return that there is no event at all, as as_breaches."""
    count = stretches.agg(F.count(F.lit(1)).alias("count"))
    what = F.when(F.col("count") == 0, F.lit("there is no event"))
    return bad_trace(count, what)


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


def message_breaches(suspects: DataFrame) -> DataFrame:
    """Return sends without a message before, columns as of as_breaches."""
    what = F.when(
        F.col("msgs") != 1,
        F.format_string("%d msg events of one message", "msgs"),
    ).when(
        F.col("first") < F.col("n"), "sent or dropped before it was published"
    )
    return bad_trace(suspects.withColumn("n", F.coalesce("n", "first")), what)


def subscription_breaches(subscriptions: DataFrame) -> DataFrame:
    """Return unsubs of what is not held, columns as of as_breaches."""
    rows = subscriptions.withColumns(
        {"n": F.col("since"), "key": F.col("pattern")}
    )
    what = F.when(F.col("count") < 0, F.lit("unsub of what is not held"))
    return bad_trace(rows, what)
