"""Matching: which patterns select which keys, by the code of the server.

A server finds the patterns for a key by their shapes (spec/2, sbus.Table):
of each shape one pattern could select the key, whose text follows from the
key.  So Spark joins by equality, and only distinct keys come to Python.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]

import sbus

from .messages import bytes_of_key, schema_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NOBODY = "0 0 0"  # whose ids do not matter
HELD = "pattern string, shape string"  # that of the pattern, as JSON
CANDIDATE = "run long, key string, pattern string"


def selected(messages: DataFrame, patterns: Sequence[str]) -> DataFrame:
    """Return the messages whose keys one of some patterns selects.

    Each code point of a pattern is a byte, as in the column `key`:
    `pattern.encode().decode("latin-1")` makes it of ordinary text.
    Without a pattern it returns all, and with one also those without a key,
    which are lines that are no messages.  A secret key is treated as any
    other.
    """
    from pyspark.sql import functions as F

    if not patterns:
        return messages
    return messages.where(F.col("key").isNull() | is_selected(patterns))


def is_selected(patterns: Sequence[str]) -> Column:
    """Return whether one of some patterns selects the column `key`."""
    from pyspark.sql import functions as F

    @F.arrow_udf("boolean")  # type: ignore[attr-defined,untyped-decorator]
    def are_keys_selected(keys: pa.Array) -> pa.Array:
        return are_selected(patterns, keys)

    column: Column = are_keys_selected("key")
    return column


def are_selected(patterns: Sequence[str], keys: Any) -> Any:
    """Return for each key whether one of some patterns selects it.

    A secret key is treated as any other.  Spec: [MATCH-1] to [MATCH-6].
    """
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    names = [x for x in map(bytes_of_key, patterns) if x is not None]
    coded = keys.dictionary_encode()
    selections = [
        key is not None and any(sbus.pattern_matches(x, key) for x in names)
        for key in map(bytes_of_key, coded.dictionary.to_pylist())
    ]
    return pa.array(selections, pa.bool_()).take(coded.indices)


# ==== What a server stores and finds =========================================


def holds(subscriptions: DataFrame) -> DataFrame:
    """Return subscriptions with the patterns that a server stores for them.

    They have (text, ids, prefix) among their columns; HELD comes after them.
    """
    kinds = ", ".join(f"`{a}` {b}" for a, b in subscriptions.dtypes)
    return subscriptions.mapInArrow(store, f"{kinds}, {HELD}")


def store(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows again for each pattern that is stored for theirs."""
    for batch in batches:
        rows = [
            {**row, **held}
            for row in batch.to_pylist()
            for held in stored(row["text"], row["ids"], row["prefix"])
        ]
        schema = pa.schema([*batch.schema, *schema_of(HELD)])
        yield pa.RecordBatch.from_pylist(rows, schema)


@functools.lru_cache(1 << 16)
def stored(
    pattern: str, ids: str | None, prefix: str
) -> list[dict[str, object]]:
    """Return what a server stores for a client that subscribes: HELD.

    *ids* is "gid uid pid", and *prefix* that of the run.  It stores nothing
    that selects nothing, and nothing that the client may not use: if its ids
    are not known, these are all secrets.
    Spec: [KEY-4], [CRED-4] to [CRED-9], [CRED-13].
    """
    text = bytes_of_key(pattern)
    is_secret = pattern.startswith(sbus.SECRET.decode())
    if text is None or (ids is None and is_secret):
        return []
    credentials = sbus.Credentials(*map(int, (ids or NOBODY).split()))
    start = f"{prefix}/".lstrip("/").encode()
    # A trace does not say who the bus owner is.  It has what took effect, so
    # a client with the upward pattern was one that may have it.
    client: Any = SimpleNamespace(
        credentials=credentials,
        user=SimpleNamespace(is_privileged=True),
        bus=SimpleNamespace(prefix=start),
    )
    with contextlib.suppress(sbus.ProtocolError):
        sbus.check_pattern(text, client)
        shape, plain = sbus.parse_pattern(text)
        places = sbus.places_of(plain, credentials, start)
        if text == sbus.SECRET:
            # As it is, where selections sees which keys go up
            places = [text]
        if shape:
            return [
                {"pattern": x.decode("latin-1"), "shape": json.dumps(shape)}
                for x in places
            ]
    return []


def selections(keys: DataFrame, held: DataFrame) -> DataFrame:
    """Return which stored patterns select keys: (run, key, pattern).

    *keys* are (run, key), distinct, and *held* is what holds returns.
    The upward pattern selects the secret keys without the prefix [CRED-13].
    """
    from pyspark.sql import functions as F

    shapes = [
        sbus.Shape(segments, is_open, tuple(map(tuple, stars)))
        for row in held.select("shape").distinct().collect()
        for segments, is_open, stars in [json.loads(row.shape)]
    ]
    work = functools.partial(candidates_of, shapes)
    patterns = held.select("run", "pattern", "prefix").distinct()
    candidates = keys.mapInArrow(work, CANDIDATE)
    joined = candidates.join(patterns, ["run", "pattern"])
    is_upward = F.col("pattern") == sbus.SECRET.decode()
    is_below = F.col("key").startswith(F.concat("prefix", F.lit("/")))
    return joined.where(~(is_upward & is_below)).drop("prefix")


def candidates_of(
    shapes: Sequence[sbus.Shape], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield each (run, key) with each pattern that may select it."""
    small = (w.slice(at, 100) for w in batches for at in range(0, len(w), 100))
    for batch in small:  # each may become many rows
        rows = [
            {**row, "pattern": pattern}
            for row in batch.to_pylist()
            for pattern in patterns_for(row["key"], shapes)
        ]
        yield pa.RecordBatch.from_pylist(rows, schema_of(CANDIDATE))


def patterns_for(text: str, shapes: Sequence[sbus.Shape]) -> Iterator[str]:
    """Yield each pattern of a shape that may select a key.

    None may select a reserved key [KEY-4], and only secret patterns a secret
    key [CRED-10].
    """
    key = bytes_of_key(text)
    if key is None:
        return
    with contextlib.suppress(sbus.ProtocolError):
        sbus.check_reserved(key)
        segments = key.split(b"/")
        for shape in shapes:
            pattern = sbus.pattern_for(segments, shape)
            if pattern is not None and (
                pattern.startswith(sbus.SECRET) == key.startswith(sbus.SECRET)
            ):
                yield pattern.decode("latin-1")
