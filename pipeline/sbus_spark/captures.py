"""Captures: the segments that recorders wrote.  It needs no Spark.

A capture is a folder of segments, HOST_RUN-000001.jsonl and so on, in folders
of their days.  A recorder gives a segment its name once it is complete; before
that, the name begins with a dot.  A segment may be compressed since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import fs

from .inputs import InputError, absolute
from .messages import COMPRESSED, READ, lines_of, read_lines

# Hidden files are not complete, or another program's
SEGMENT = re.compile(
    r"(?:/[^._/][^/]*)*?/([^._/][^/]*)-(\d{6,})\.jsonl(?:\.gz|\.bz2|\.zst)?"
)
HIDDEN = re.compile(r"\..*-\d{6,}\.jsonl")
# What a task reads takes it about half a second, so that to start it pays.
# How many tasks can run at once, only Spark knows
TASK_BYTES = 16 << 20
SEGMENT_BYTES_MIN = 64 << 10  # to open a segment takes as long as to read this


class Segment(NamedTuple):
    """A file of a capture, as it was listed."""

    recorder: str
    number: int
    path: str
    size: int  # bytes
    written: float  # seconds since 1970

    @property
    def name(self) -> str:
        """Which segment it is, wherever it is copied or compressed."""
        return f"{self.recorder}-{self.number:06}.jsonl"


class Capture:
    """The segments in a folder."""

    def __init__(self, path: str) -> None:
        path = absolute(path)
        self._files, folder = fs.FileSystem.from_uri(path)
        self.folder = folder.rstrip("/")
        kind = self._files.get_file_info(self.folder).type
        if kind != fs.FileType.Directory:
            reason = "there is no such folder; `sbus record` makes one"
            raise InputError(f"{path}: {reason}")
        log = self._files.get_file_info(f"{self.folder}/_delta_log")
        if log.type != fs.FileType.NotFound:
            raise InputError(f"{path}: it is a table, and no capture")

    def files(self) -> tuple[list[Segment], dict[str, float]]:
        """Return all segments, and when those that are hidden were written.

        Those of a recorder are in order.  The latter are incomplete, by their
        paths.
        """
        segments: list[Segment] = []
        hidden: dict[str, float] = {}
        listing = fs.FileSelector(self.folder, recursive=True)
        for file in self._files.get_file_info(listing):
            written = (file.mtime_ns or 0) / 1e9
            match = SEGMENT.fullmatch(file.path[len(self.folder) :])
            if match and file.type != fs.FileType.Directory:
                # A FIFO has no size: to read it would wait for a writer
                about = file.path, file.size or 0, written
                segments.append(Segment(match[1], int(match[2]), *about))
            elif HIDDEN.match(file.base_name):
                hidden[file.path] = written
        return sorted(segments), hidden

    def groups(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Return segments, which are sorted, in groups of about TASK_BYTES.

        Copies of one are in one group.
        """
        groups: list[list[Segment]] = []
        free = 0
        name = ""
        for segment in segments:
            if free <= 0 and segment.name != name:
                groups.append([])
                free = TASK_BYTES
            groups[-1].append(segment)
            free -= max(segment.size, SEGMENT_BYTES_MIN)
            name = segment.name
        return groups

    def fault_of(self, segment: Segment) -> str:
        """Return why a segment cannot be read yet; "" if it can.

        A compressed one that is cut is found when it is read.
        """
        if segment.size == 0:
            return "it is empty, or no file, so it waits"
        if segment.path.endswith(COMPRESSED):
            return ""
        try:
            with self._files.open_input_file(segment.path) as file:
                if file.read_at(1, segment.size - 1) == b"\n":
                    return ""
        except FileNotFoundError:  # another ingest has removed it
            return ""
        except OSError as error:
            return str(error)
        return "its last line is not complete, so it waits"

    def remove(self, segment: Segment) -> bool:
        """Remove a segment, unless it has changed since it was listed.

        Return whether it was removed.
        """
        file = self._files.get_file_info(segment.path)
        listed = segment.size, segment.written
        is_same = (file.size, (file.mtime_ns or 0) / 1e9) == listed
        if is_same:
            self._files.delete_file(segment.path)
        return is_same

    def read(self, segment: Segment) -> pa.Table:
        """Return the lines of a segment, as it was listed, as rows of READ.

        Raises: OSError; InputError if it is cut or broken, or not whole.
        """
        if fault := self.fault_of(segment):
            raise InputError(fault)
        parts = [READ.empty_table()]
        for text in lines_of(self._files, segment.path, 0, segment.size):
            parts.append(read_lines(text.removesuffix(b"\n") + b"\n"))
        return pa.concat_tables(parts)
