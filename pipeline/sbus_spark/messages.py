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
import io
from collections.abc import Iterator

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.json  # type: ignore[import-untyped]
from pyarrow import fs

from .inputs import InputError

COLUMNS = (
    "host string, recorder string, n long, time timestamp, key string,"
    " key_bytes binary, size long, payload binary"
)
NUMBERED = ["recorder", "n"]  # which message it is
ORDER = [(name, "ascending") for name in ("host", *NUMBERED)]
BYTES = pa.binary()
ARROW = {
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": BYTES,
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
CHUNK_BYTES = 1 << 20  # of lines that are parsed at once
LINE_BYTES_MAX = 16 << 20  # for which memory has room; a longer one is cut
CUT = b"... (cut)\n"  # ends no message
COMPRESSED = (".gz", ".bz2", ".zst")  # which Arrow knows by their names


def schema_of(columns: str) -> pa.Schema:
    """Return Spark's columns, "name type, name type", as a schema of Arrow."""
    pairs = map(str.split, columns.split(","))
    return pa.schema([(name, ARROW[kind]) for name, kind in pairs])


SCHEMA = schema_of(COLUMNS)
READ = schema_of(f"{COLUMNS}, corrupt string")
# A line of a capture is a JSON object with at least these members; data may
# be missing
LINES = (
    "rec string, n long, t long, host string, key string, size long,"
    " data string"
)
LINE = schema_of(LINES)


# ==== Lines of files =========================================================


def lines_of(
    files: fs.FileSystem, path: str, start: int, end: int
) -> Iterator[bytes]:
    """Yield texts of the lines that begin in some bytes of a file.

    Each has about CHUNK_BYTES.  The last line of a file may be torn: without
    its line feed.  *end* does not matter for a compressed file.
    Raises: InputError for a compressed file that is cut or broken.
    """
    position = max(start - 1, 0)
    if path.endswith(COMPRESSED):
        file = files.open_input_stream(path)
        end = 1 << 62
    else:
        file = files.open_input_file(path)
        file.seek(position)
    with io.BufferedReader(file) as stream:
        try:
            if start:  # the line that begins before belongs to other bytes
                position += rest_of_line(stream)[1]
            while position < end:
                text = stream.read(min(end - position, CHUNK_BYTES))
                if not text:
                    return
                position += len(text)
                if not text.endswith(b"\n"):
                    rest, length = rest_of_line(stream)
                    text += rest
                    position += length
                yield text
        except OSError as error:
            raise InputError(f"{path}: {error}") from None


def rest_of_line(stream: io.BufferedReader) -> tuple[bytes, int]:
    """Return the rest of a line, and how many bytes of a file that is.

    Of one that is longer than LINE_BYTES_MAX, CUT stands for it.
    """
    rest = stream.readline(LINE_BYTES_MAX)
    length = len(rest)
    while len(rest) == LINE_BYTES_MAX and not rest.endswith(b"\n"):
        rest = stream.readline(LINE_BYTES_MAX)
        length += len(rest)
    if length > LINE_BYTES_MAX:
        rest = CUT
    return rest, length


def parse_lines(text: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield whole lines by a schema; nulls for one that Arrow cannot read so.

    Arrow's reader of JSON knows no lines, and no UTF-8.  If each line begins
    and ends with a brace and it reads as many objects as lines, then each
    line is one object, as a line feed between braces is not JSON anywhere
    inside of one.  If not, each half is tried.
    """
    count = text.count(b"\n")
    if text.count(b"}\n{") == count - 1 and text[:1] + text[-2:] == b"{}\n":
        with contextlib.suppress(pa.ArrowInvalid, UnicodeDecodeError):
            text.decode()
            rows = pyarrow.json.read_json(
                pa.BufferReader(text),
                pyarrow.json.ReadOptions(False, len(text)),
                pyarrow.json.ParseOptions(schema, False, "ignore"),
            )
            if len(rows) == count:
                yield from rows.to_batches()
                return
    if count < 2:
        yield pa.RecordBatch.from_pylist([{}] * count, schema)
    else:
        middle = len(text) // 2
        end = text.rfind(b"\n", 0, middle) + 1 or text.find(b"\n", middle) + 1
        yield from parse_lines(text[:end], schema)
        yield from parse_lines(text[end:], schema)


# ==== Lines of a capture =====================================================


def read_lines(text: bytes) -> pa.Table:
    """Return whole lines as rows of READ.

    Of a line that is no message, `corrupt` says why, and what it was.
    """
    parts = [batch.to_struct_array() for batch in parse_lines(text, LINE)]
    rows = pa.RecordBatch.from_struct_array(pa.concat_arrays(parts))
    keys = rows["key"].dictionary_encode()
    distinct = pa.array(map(bytes_of_key, keys.dictionary.to_pylist()), BYTES)
    key_bytes = distinct.take(keys.indices)
    payload = pa.array(map(decode_payload, rows["data"].to_pylist()), BYTES)

    reason = fault_of(rows, key_bytes, payload)
    if reason.null_count < len(rows):
        lines = text.decode("utf-8", "backslashreplace").split("\n")[:-1]
        reason = pc.binary_join_element_wise(reason, pa.array(lines), ": ")
    time = pc.divide(rows["t"], 1_000).cast(SCHEMA.field("time").type)
    names = rows["host"], rows["rec"], rows["n"], time, rows["key"]
    return pa.table([*names, key_bytes, rows["size"], payload, reason], READ)


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
    rows: pa.RecordBatch, key_bytes: pa.Array, payload: pa.Array
) -> pa.Array:
    """Return why lines are no messages; null for those that are.

    The decoder skips characters that are not base64.  Then the length of the
    text is not the one that the size asks for.
    """
    absent = {name: rows[name].is_null() for name in LINE.names}
    has_data = pc.invert(absent["data"])
    size = rows["size"]
    text_length = pc.multiply(pc.divide(pc.add(size, 2), 3), 4)
    is_other = pc.not_equal(pc.binary_length(rows["data"]), text_length)
    is_no_base64 = pc.or_(payload.is_null(), is_other)
    is_other_size = pc.not_equal(pc.binary_length(payload), size)
    is_empty = functools.reduce(pc.and_, absent.values())
    faults = {
        "it is no JSON object of the right types": is_empty,
        **{f"there is no {name}": absent[name] for name in LINE.names[:-1]},
        "data is not base64": pc.and_(has_data, is_no_base64),
        "size is not that of data": pc.and_(has_data, is_other_size),
        "size is below 0": pc.less(size, 0),
        "n is below 1": pc.less(rows["n"], 1),
        "t is below 0": pc.less(rows["t"], 0),
        "key is not of bytes": key_bytes.is_null(),
    }
    return pc.case_when(pc.make_struct(*faults.values()), *faults)
