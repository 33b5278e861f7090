"""Segments: the files of captures, in plain Python, many lines at once.

Facts:

- Most lines are as a recorder writes them.  Arrow's reader of JSON, which
  knows no lines, takes those that are an object in braces each.
- Where it cannot, or a line is no message, the text is halved, and halved
  again, until what is left is read line by line.  That is what says why.
- A piece of a segment is written to a draft below the table, as it is to be
  there, in a file of a name of its own, which a second attempt replaces.
- A task of an executor that is given up may still write: each batch, and each
  attempt at it, has a draft of its own, and what comes late is not looked at.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pyspark import SparkContext

from .capture import NUMBER_MAX
from .common import DAY

FIELDS = {
    "rec": str,
    "n": int,
    "t": int,
    "host": str,
    "key": str,
    "size": int,
    "data": str,
}
NONE = "__HIVE_DEFAULT_PARTITION__"  # stands for no host, in a table
ESCAPED = "[\"#%'*/:=?\\\\^\\[\\]{]"  # in the names of folders, as Spark does
HALVES = "[\ud800-\udfff]"  # of characters, which are no text
EPOCH = datetime.date(1970, 1, 1)
UMASK = "fs.permissions.umask-mode"
PIECE_BYTES = 32 << 20
READ_BYTES = 1 << 20  # that are parsed at once: what a cache holds
SLOW_BYTES = 1 << 14  # that are read line by line


def message_of(line: bytes) -> dict[str, Any]:
    """Return a line of a capture as FIELDS, its data as bytes.

    Raises: ValueError with what read_capture has for a reason.
    """
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object of ours")
    wrong = [name for name, kind in FIELDS.items() if not has(found, name)]
    if len(wrong) == len(FIELDS):
        raise ValueError("not a JSON object of ours")
    if wrong:
        raise ValueError(f"missing or wrong: {', '.join(wrong)}")
    try:
        payload = base64.b64decode(found["data"], validate=True)
    except ValueError:
        raise ValueError("data is not base64") from None
    if len(payload) != found["size"]:
        raise ValueError("size is not data's")
    if not 1 <= found["n"] <= NUMBER_MAX:
        raise ValueError("n is out of range")
    if found["t"] < 0:
        raise ValueError("t is out of range")
    if re.search("[^\x01-\xff]", found["key"]):
        raise ValueError("key is not of bytes")
    if not is_host(found["host"]):
        raise ValueError("host is no name of a host")
    return {name: found[name] for name in FIELDS} | {"data": payload}


def has(found: dict[str, Any], name: str) -> bool:
    """Return whether an object has a member of its right type."""
    value = found.get(name)
    if type(value) is int:
        return FIELDS[name] is int and -(1 << 63) <= value < 1 << 63
    if type(value) is str:
        return FIELDS[name] is str and not re.search(HALVES, value)
    return False


def is_host(name: str) -> bool:
    """Return whether a text is the name of a host, and can name a folder."""
    return bool(re.fullmatch("[ -~]{1,64}", name)) and name != NONE


def messages_in(text: bytes) -> Any:
    """Return the messages in whole lines as a table of Arrow, as FIELDS.

    It is None if one of the lines is no message, or may be none.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute as compute  # type: ignore[import-untyped]
    import pyarrow.json  # type: ignore[import-untyped]

    longest = longest_of(text)
    if not longest:
        return None
    size = max(longest, READ_BYTES)
    how = pyarrow.json.ReadOptions(use_threads=False, block_size=size)
    kinds = pyarrow.json.ParseOptions(
        explicit_schema=schema_of(pyarrow.string()),
        unexpected_field_behavior="ignore",
    )
    try:
        found = pyarrow.json.read_json(pyarrow.BufferReader(text), how, kinds)
        data = payloads_of(found["data"].combine_chunks())
    except ValueError:  # of JSON, or of base64
        return None
    lengths = compute.equal(compute.binary_length(data), found["size"])
    n, t = (compute.min_max(found[name]).as_py() for name in ("n", "t"))
    keys = compute.unique(found["key"])
    odd_keys = compute.match_substring_regex(keys, r"[^\x01-\x{FF}]")
    is_right = (
        not any(column.null_count for column in found.columns)
        and compute.all(lengths).as_py()
        and 1 <= n["min"] <= n["max"] <= NUMBER_MAX
        and t["min"] >= 0
        and not compute.any(odd_keys).as_py()
        and all(map(is_host, compute.unique(found["host"]).to_pylist()))
    )
    at = found.schema.get_field_index("data")
    return found.set_column(at, "data", data) if is_right else None


def longest_of(text: bytes) -> int:
    """Return the bytes of the longest line, 0 if one may be no object."""
    chars = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(chars == ord("\n"))
    counts = [np.count_nonzero(chars == ord(one)) for one in "{}"]
    is_right = (
        text.isascii()
        and counts == [len(ends)] * 2
        and (chars[ends - 1] == ord("}")).all()
        and (chars[np.append(0, ends[:-1] + 1)] == ord("{")).all()
    )
    return int(np.diff(ends, prepend=-1).max()) if is_right else 0


def payloads_of(texts: Any) -> Any:
    """Return what an array of texts says in base64.

    All are decoded at once, padding as if it were of bytes, which are then
    left out.  Raises: ValueError if one of them may be wrong.
    """
    import pyarrow

    _, offsets, found = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[: len(texts) + 1]
    text = found.to_pybytes()[: ends[-1]] if found else b""
    width, chars = np.diff(ends), np.frombuffer(b"  " + text, np.uint8)
    last, second = (chars[ends[1:] + at] == ord("=") for at in (1, 0))
    pads = (width > 0) * last * (1 + second)
    data = np.frombuffer(
        binascii.a2b_base64(text.replace(b"=", b"A")), np.uint8
    )
    if (
        (width % 4).any()
        or pads.sum() != text.count(b"=")
        or len(data) * 4 != len(text) * 3
    ):
        raise ValueError("this is no base64")
    after = np.cumsum(width) // 4 * 3
    left_out = np.append(after[pads > 0] - 1, after[pads > 1] - 2)
    data = np.delete(data, left_out)
    ends = np.append(0, np.cumsum(width // 4 * 3 - pads)).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(texts), buffers)


def schema_of(data: Any) -> Any:
    """Return FIELDS as a schema of Arrow, with a type of data."""
    import pyarrow

    types = {str: pyarrow.string(), int: pyarrow.int64()}
    kinds = {name: types[kind] for name, kind in FIELDS.items()}
    return pyarrow.schema(kinds | {"data": data})


Bad = tuple[str, bytes]  # why a line is no message, and the line


def read_lines(text: bytes) -> Iterator[tuple[Any, list[Bad]]]:
    """Yield the messages in whole lines, some at a time, and the bad lines."""
    found = messages_in(text)
    middle = text.find(b"\n", len(text) // 2) + 1
    if found is not None:
        yield found, []
    elif len(text) > SLOW_BYTES and middle < len(text):
        yield from read_lines(text[:middle])
        yield from read_lines(text[middle:])
    else:
        yield read_each(text)


def read_each(text: bytes) -> tuple[Any, list[Bad]]:
    """Return the messages in whole lines, and the bad lines, one by one."""
    import pyarrow

    found, bad = [], []
    for line in text.split(b"\n")[:-1]:
        try:
            found.append(message_of(line))
        except ValueError as error:
            bad.append((str(error), line))
    kinds = schema_of(pyarrow.binary())
    return pyarrow.Table.from_pylist(found, kinds), bad


def store(
    context: SparkContext, files: Sequence[str], table: str, batch: int
) -> tuple[int, int]:
    """Write the lines of segments as one batch, for the first time or again.

    Return how many lines there are, and how many of them are quarantined.
    """
    drafts = f"{table}/_drafts"
    shutil.rmtree(drafts, ignore_errors=True)
    draft = f"{drafts}/{secrets.token_hex(8)}"
    mask = context.getConf().get(f"spark.hadoop.{UMASK}", "022")
    task = functools.partial(store_segment, draft, batch, int(str(mask), 8))
    tasks = min(len(files), 4 * context.defaultParallelism)
    segments = context.parallelize(list(enumerate(files)), tasks)
    counts = segments.map(task).collect()
    publish(draft, table)
    shutil.rmtree(drafts, ignore_errors=True)
    return sum(one for one, _ in counts), sum(bad for _, bad in counts)


def publish(draft: str, table: str) -> None:
    """Move folders of a draft to where they belong."""
    for name in os.listdir(draft):
        source, target = f"{draft}/{name}", f"{table}/{name}"
        if os.path.exists(target) and not name.startswith("batch="):
            publish(source, target)
        else:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(source, target)


def store_segment(
    draft: str, batch: int, mask: int, segment: tuple[int, str]
) -> tuple[int, int]:
    """Write a segment to a draft; return how many lines, and bad ones."""
    number, file = segment
    lines = bad = 0
    mask = os.umask(mask)
    try:
        os.makedirs(draft, exist_ok=True)
        for place, text in enumerate(pieces_of(file.removeprefix("file:"))):
            name = f"part-{number:05}-{place:05}"
            lines += text.count(b"\n")
            bad += store_piece(draft, batch, name, file, text)
    finally:
        os.umask(mask)
    return lines, bad


def pieces_of(path: str) -> Iterator[bytes]:
    """Yield whole lines of a segment, many at a time."""
    with open(path, "rb") as segment:
        while text := segment.read(PIECE_BYTES):
            text += segment.readline()
            yield text if text.endswith(b"\n") else text + b"\n"


def store_piece(
    draft: str, batch: int, name: str, file: str, text: bytes
) -> int:
    """Write lines of a segment to a draft; return how many of them are bad."""
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.parquet  # type: ignore[import-untyped]

    tables, lists = zip(*read_lines(text))
    rows = pyarrow.concat_tables(tables)
    rows = rows.append_column("day", compute.divide(rows["t"], DAY))
    groups = rows.group_by(["day", "host"]).aggregate([]).to_pylist()
    for one in groups:
        own = rows
        if len(groups) > 1:
            of_day = compute.equal(rows["day"], one["day"])
            of_host = compute.equal(rows["host"], one["host"])
            own = rows.filter(compute.and_(of_day, of_host))
        day = EPOCH + datetime.timedelta(one["day"])
        host = re.sub(
            ESCAPED, lambda char: f"%{ord(char[0]):02X}", one["host"]
        )
        with new_file(
            f"{draft}/day={day}/host={host}/batch={batch}", f"{name}.parquet"
        ) as path:
            pyarrow.parquet.write_table(
                own.drop(["day", "host"]),
                path,
                use_dictionary=["rec", "key", "size"],
                column_encoding=dict.fromkeys("nt", "DELTA_BINARY_PACKED"),
            )
    bad = [one for some in lists for one in some]
    if bad:
        folder = f"{draft}/_quarantine/batch={batch}"
        with new_file(folder, f"{name}.json") as path, open(path, "w") as made:
            for reason, line in bad:
                told = line.decode("utf-8", "replace")
                row = {"file": file, "reason": reason, "line": told}
                made.write(json.dumps(row) + "\n")
    return len(bad)


@contextlib.contextmanager
def new_file(folder: str, name: str) -> Iterator[str]:
    """Yield a path to write a file to, which then has its name."""
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/.{name}-{secrets.token_hex(8)}"
    yield path
    os.replace(path, f"{folder}/{name}")
