"""Messages: their columns, and which lines of a capture are messages.

Captures, tables, the sink and replays share these columns:

| column | type | meaning |
|---|---|---|
| host, recorder | string | where it was recorded, and by which recorder run |
| n | long | the number that the recorder gave it, from 1 without gaps |
| time | timestamp | when it was recorded, in microseconds |
| key | string | the routing key; each code point is a byte |
| key_bytes | binary | the same bytes, for a key that is UTF-8 |
| size | long | bytes of the payload |
| payload | binary | null if the recorder left it out |
"""

from __future__ import annotations

import binascii
import contextlib
import functools
from collections.abc import Iterator

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.json  # type: ignore[import-untyped]

COLUMNS = (
    "host string, recorder string, n long, time timestamp, key string,"
    " key_bytes binary, size long, payload binary"
)
BYTES = pa.binary()
ARROW = {
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": BYTES,
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}


def schema_of(columns: str) -> pa.Schema:
    """Return as a schema of Arrow what Spark reads as columns."""
    pairs = map(str.split, columns.split(","))
    return pa.schema([(name, ARROW[kind]) for name, kind in pairs])


SCHEMA = schema_of(COLUMNS)
READ = schema_of(f"{COLUMNS}, corrupt string")
# A line of a capture: one JSON object with at least these members, or all
# but the last
LINE = schema_of(
    "rec string, n long, t long, host string, key string, size long,"
    " data string"
)


def read_lines(text: bytes) -> pa.Table:
    """Return whole lines as rows of READ.

    Of a line that is no message, `corrupt` says why, and what it was.
    """
    parts = [one.to_struct_array() for one in parse_lines(text, LINE)]
    found = pa.RecordBatch.from_struct_array(pa.concat_arrays(parts))
    keys = found["key"].dictionary_encode()
    distinct = pa.array(map(bytes_of_key, keys.dictionary.to_pylist()), BYTES)
    key_bytes = distinct.take(keys.indices)
    payload = pa.array(map(decode_payload, found["data"].to_pylist()), BYTES)
    reason = fault_of(found, key_bytes, payload)
    if reason.null_count < len(found):
        lines = text.decode("utf-8", "backslashreplace").split("\n")[:-1]
        reason = pc.binary_join_element_wise(reason, pa.array(lines), ": ")
    time = pc.divide(found["t"], 1_000).cast(SCHEMA.field("time").type)
    about = found["host"], found["rec"], found["n"], time, found["key"]
    return pa.table([*about, key_bytes, found["size"], payload, reason], READ)


def parse_lines(text: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield whole lines by a schema; nulls for one that Arrow cannot read so.

    Arrow's reader of JSON knows no lines, and no UTF-8.  If each line begins
    and ends with a brace and it finds as many objects as lines, then each
    line is one object, as a line feed between braces is not JSON anywhere
    inside of one.  If not, each half is tried.
    """
    count = text.count(b"\n")
    if text.count(b"}\n{") == count - 1 and text[:1] + text[-2:] == b"{}\n":
        with contextlib.suppress(pa.ArrowInvalid, UnicodeDecodeError):
            text.decode()
            found = pyarrow.json.read_json(
                pa.BufferReader(text),
                pyarrow.json.ReadOptions(False, len(text)),
                pyarrow.json.ParseOptions(schema, False, "ignore"),
            )
            if len(found) == count:
                yield from found.to_batches()
                return
    if count < 2:
        yield pa.RecordBatch.from_pylist([{}] * count, schema)
    else:
        middle = len(text) // 2
        end = text.rfind(b"\n", 0, middle) + 1 or text.find(b"\n", middle) + 1
        yield from parse_lines(text[:end], schema)
        yield from parse_lines(text[end:], schema)


def bytes_of_key(key: str) -> bytes | None:
    """Return a key as bytes; None if it is not of bytes, or has a NUL."""
    with contextlib.suppress(UnicodeEncodeError):
        return key.encode("latin-1") if "\0" not in key else None
    return None


def decode_payload(text: str | None) -> bytes | None:
    """Return a payload from base64; None if it is no base64."""
    try:
        return binascii.a2b_base64(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def fault_of(
    found: pa.RecordBatch, key_bytes: pa.Array, payload: pa.Array
) -> pa.Array:
    """Return why lines are no messages; null for those that are.

    The decoder skips what is not base64: then text and payload have lengths
    that do not fit.
    """
    absent = {name: found[name].is_null() for name in LINE.names}
    has_data = pc.invert(absent["data"])
    size = found["size"]
    wanted = pc.multiply(pc.divide(pc.add(size, 2), 3), 4)
    is_other = pc.not_equal(pc.binary_length(found["data"]), wanted)
    length = pc.binary_length(payload)
    faults = {
        "it is no JSON object of the right types": functools.reduce(
            pc.and_, absent.values()
        ),
        **{f"there is no {name}": absent[name] for name in LINE.names[:-1]},
        "data is not base64": pc.and_(
            has_data, pc.or_(payload.is_null(), is_other)
        ),
        "size is not that of data": pc.and_(
            has_data, pc.not_equal(length, size)
        ),
        "size is below 0": pc.less(size, 0),
        "n is below 1": pc.less(found["n"], 1),
        "t is below 0": pc.less(found["t"], 0),
        "key is not of bytes": key_bytes.is_null(),
    }
    return pc.case_when(pc.make_struct(*faults.values()), *faults)
