"""Blocks: the files of traces, cut at the ends of lines.

Facts:

- A block is the lines that begin in so many bytes of a file.  A compressed
  file cannot be cut, so a task reads all of it, and yields its blocks.
- How long a file is counts when the audit begins.  Without a line feed, its
  last line is still being written, and is not looked at.
- Where a path is an address ("hdfs://..."), Spark reads the lines.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import importlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from pyspark import SparkContext

from .common import InputError, check_there

BLOCK_BYTES = 32 << 20
BLOCK_BYTES_MIN = 1 << 20  # where the trace is small, unless told
TEXT_BYTES = 2 << 20  # about, that are read at once: what a cache holds
LINES = 1 << 15  # the same, of those that Spark has read


class Block(NamedTuple):
    """The lines of a file that begin in [start, end)."""

    file: str
    start: int
    end: int
    size: int  # of the file, when the audit began


def open_zst(path: str) -> BinaryIO:
    """Return a stream of what a .zst file holds."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).open(path)  # type: ignore
        except ModuleNotFoundError:
            continue
    raise InputError(f"{path}: to read it, pip install backports.zstd")


OPENERS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": open_zst,
}


def opener_of(path: str) -> Any:
    """Return what opens a compressed file, None for another."""
    return OPENERS.get(os.path.splitext(path)[1])


def check_traces(paths: Iterable[str]) -> None:
    """Raise InputError if there is no trace, or it cannot be read."""
    paths = list(paths)
    check_there(paths)
    for path in paths:
        if os.path.isfile(path):
            if not os.path.getsize(path):
                raise InputError(f"{path}: the file is empty")
            with open(path, "rb"):
                pass
            if opener_of(path) is open_zst:
                open_zst(path).close()


def files_of(paths: Sequence[str]) -> list[str]:
    """Return the files, of directories those in them, each in its order.

    As Spark does, it passes over names in a directory that begin with a dot
    or an underscore.
    """
    found = []
    for path in paths:
        if os.path.isdir(path):
            entries = sorted(os.scandir(path), key=lambda one: one.name)
            found += [
                entry.path
                for entry in entries
                if entry.is_file() and entry.name[0] not in "._"
            ]
        else:
            found.append(path)
    return found


def cut(
    paths: Sequence[str], tasks: int, block_bytes: int | None = None
) -> list[list[Block]]:
    """Return the blocks of files, in order, those of a task in a list.

    That is one, or more of small files.  Without a size they are small
    enough for that many tasks, within bounds.
    """
    sizes = [(path, os.path.getsize(path)) for path in files_of(paths)]
    if not block_bytes:
        share = sum(size for _, size in sizes) // tasks + 1
        block_bytes = max(BLOCK_BYTES_MIN, min(share, BLOCK_BYTES))
    groups: list[list[Block]] = []
    room = 0
    for path, size in sizes:
        step = size if opener_of(path) else block_bytes
        for start in range(0, size, max(1, step)):
            end = min(start + step, size)
            if end - start > room:
                groups.append([])
                room = block_bytes
            groups[-1].append(Block(path, start, end, size))
            room -= end - start
    return groups


def some_of(stream: Any) -> bytes:
    """Return what comes next of a compressed file, empty at its end."""
    parts: list[bytes] = []
    with contextlib.suppress(EOFError):  # it is still being written
        while sum(map(len, parts)) < TEXT_BYTES:
            parts.append(stream.read1(TEXT_BYTES))
            if not parts[-1]:
                break
    return b"".join(parts)


def whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines of a compressed file, some at a time."""
    rest = b""
    while text := some_of(stream):
        end = text.rfind(b"\n") + 1
        if end:
            yield rest + text[:end]
            rest = b""
        rest += text[end:]


def texts_of(block: Block) -> Iterator[bytes]:
    """Yield the text of a block, whole lines, some at a time.

    Raises: InputError if the file is not compressed as its name says.
    """
    if opener := opener_of(block.file):
        try:
            with opener(block.file) as stream:
                yield from whole_lines(stream)
        except (OSError, ValueError) as error:
            raise InputError(f"{block.file}: {error}") from None
        return
    with open(block.file, "rb") as file:
        if block.start:
            file.seek(block.start - 1)  # where a line feed may be
            file.readline()
        while (at := file.tell()) < block.end:
            text = file.read(min(TEXT_BYTES, block.end - at))
            if not text:  # the file has become shorter
                return
            if not text.endswith(b"\n"):
                text += file.readline(block.size - at - len(text))
            yield text[: text.rfind(b"\n") + 1]


def texts_of_all(
    blocks: Iterable[Block],
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the file and the texts of each block."""
    for block in blocks:
        yield block.file, texts_of(block)


def texts(
    context: SparkContext, paths: Sequence[str], block_bytes: int | None
) -> Any:
    """Return an RDD of (file, texts), a block or more of a task."""
    tasks = 4 * context.defaultParallelism
    here = [path for path in paths if "://" not in path]
    groups = cut(here, tasks, block_bytes)
    parts = [
        context.textFile(
            file, size // (block_bytes or BLOCK_BYTES) + 1, use_unicode=False
        ).mapPartitions(functools.partial(of_file, file))
        for path in paths
        if "://" in path
        for file, size in listed(context, path)
    ]
    if groups or not parts:
        blocks = context.parallelize(groups, max(1, len(groups)))
        parts.insert(0, blocks.flatMap(texts_of_all))
    return context.union(parts) if len(parts) > 1 else parts[0]


def joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends as text, some at a time."""
    lines = iter(lines)
    while some := list(itertools.islice(lines, LINES)):
        yield b"\n".join([*some, b""])


def of_file(
    file: str, lines: Iterable[bytes]
) -> list[tuple[str, Iterator[bytes]]]:
    """Return the lines of a part of a file as an element of texts."""
    return [(file, joined(lines))]


def listed(context: SparkContext, path: str) -> list[tuple[str, int]]:
    """Return the files at an address, as files_of, and their sizes."""
    java: Any = context
    where = java._jvm.org.apache.hadoop.fs.Path(path)
    files = where.getFileSystem(java._jsc.hadoopConfiguration())
    found = [
        (one.getPath().toString(), one.getLen())
        for one in files.listStatus(where)
        if one.isFile()
    ]
    return sorted(
        (file, size)
        for file, size in found
        if len(found) == 1 or os.path.basename(file)[0] not in "._"
    )
