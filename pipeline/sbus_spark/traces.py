"""Traces: their lines (spec/9-running.md), in blocks, as tables of Arrow.

A block is the lines that begin in some bytes of a file.  One task reads it.
A compressed file cannot be cut, so it is one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import fs

from .inputs import InputError, absolute
from .messages import COMPRESSED, lines_of, parse_lines, schema_of

BLOCK_BYTES = 16 << 20
SHOWN = 80  # characters of a line that is no event
REMEDY = "`sbus.py --trace` writes one"

NUMBERS = ("n", "t", "c", "m", "size", "gid", "uid", "pid")
TEXTS = ("ev", "key", "pattern", "reason", "cred_prefix", "data")
LINE = schema_of(
    ",".join([f"{x} long" for x in NUMBERS] + [f"{x} string" for x in TEXTS])
)
FIELDS = {  # that an event has beside n and t
    "send": ("c", "m"),
    "msg": ("c", "m", "size", "key"),
    "drop": ("c", "m", "reason"),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c",),
    "start": ("cred_prefix",),
    "stop": (),
}
SEND, MSG, DROP, CTL, START, STOP = 0, 1, 2, 5, 8, 9  # places in FIELDS


class Block(NamedTuple):
    """The lines of a file that begin in [start, end)."""

    path: str
    start: int
    end: int


def blocks_in(paths: Sequence[str]) -> list[Block]:
    """Return the blocks of some traces, each once.  Raises: as blocks_of."""
    return [block for x in dict.fromkeys(paths) for block in blocks_of(x)]


def size_of(blocks: Sequence[Block]) -> int:
    """Return the bytes of some blocks."""
    return sum(block.end - block.start for block in blocks)


def blocks_of(path: str) -> Iterator[Block]:
    """Yield the blocks of a trace, or of those in a directory by their names.

    Raises: InputError if one is not there, is empty, or is no trace.
    """
    where = absolute(path)
    system, place = fs.FileSystem.from_uri(where)
    files = {where: system.get_file_info(place)}
    if files[where].type == fs.FileType.Directory:
        inside = system.get_file_info(fs.FileSelector(place))
        files = {
            f"{where}/{file.base_name}": file
            for file in sorted(inside, key=lambda file: str(file.base_name))
            if file.size and file.base_name[0] not in "._"
        }
    if not files:
        raise InputError(f"{path}: there is no trace in it; {REMEDY}")
    for name, file in files.items():
        if not file.size:
            reason = "the file is empty or not there"
            raise InputError(f"{name}: {reason}; {REMEDY}")
        head = next(texts_of(Block(name, 0, file.size)), b"")
        if not len(parse(head)["ev"].drop_null()):
            reason = "no line at its beginning is an event"
            raise InputError(f"{name}: this is no trace: {reason}; {REMEDY}")
        step = file.size if name.endswith(COMPRESSED) else BLOCK_BYTES
        for start in range(0, file.size, step):
            yield Block(name, start, min(start + step, file.size))


def texts_of(block: Block) -> Iterator[bytes]:
    """Yield texts of the whole lines of a block; a torn last line is none."""
    system, place = fs.FileSystem.from_uri(block.path)
    for text in lines_of(system, place, block.start, block.end):
        yield text[: text.rfind(b"\n") + 1]


def parse(text: bytes) -> pa.Table:
    """Return lines as LINE, code and line; nulls for lines of no event.

    *code* is an event's place in FIELDS or -1, and *line* begins the text of
    what is no event.
    """
    table = pa.Table.from_batches(parse_lines(text, LINE), LINE)
    code = codes_of(table)
    line = pa.nulls(len(table), pa.string())
    if (code < 0).any():
        table = pa.table([pc.if_else(code >= 0, x, None) for x in table], LINE)
        lines = [raw[:SHOWN] for raw in text.split(b"\n")[:-1]]
        line = pa.array([raw.decode("utf-8", "replace") for raw in lines])
    return with_columns(table, code=code, line=line)


def with_columns(table: pa.Table, **columns: Any) -> pa.Table:
    """Return a table with more columns."""
    for name, values in columns.items():
        if not isinstance(values, pa.ChunkedArray):
            values = pa.array(values)
        table = table.append_column(name, values)
    return table


def codes_of(table: pa.Table) -> Any:
    """Return each event's place in FIELDS; -1 if it lacks a field."""
    present = sum(
        np.left_shift(column.is_valid().to_numpy().astype(int), index)
        for index, column in enumerate(table.columns)
    )
    needed_by_kind = [
        sum(1 << LINE.get_field_index(name) for name in ("n", "t", *names))
        for names in FIELDS.values()
    ]
    kinds = pc.index_in(table["ev"], pa.array(FIELDS))
    code = pc.fill_null(kinds, -1).to_numpy().astype(int)
    needed = np.array(needed_by_kind)[code]
    is_first = pc.fill_null(table["n"], 0).to_numpy() == 1
    is_late_start = (code == START) & ~is_first
    code[((present & needed) != needed) | is_late_start] = -1
    return code
