"""record: write what is published to files, and lose none of it.

A capture is a directory of segments, files of JSON lines.  A segment is
written under a hidden name, `.` before its own, which it gets when it is
whole and on disk: what has no dot in front never changes any more.  Its
recorder holds a lock on it meanwhile, so that the next one knows what a
dead one has left; it looks only at those of its own host, because not all
shared file systems pass locks on.

A disk may take longer to have a segment than a server waits for a reader.
So a helper, a thread, waits for the disk, one segment at a time so that they
get their names in order; the next segment grows meanwhile, however large and
old it is.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import itertools
import json
import os
import re
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sbus_client import (
    ControlMessage,
    Message,
    Options,
    SbusError,
    argument,
    command,
    note,
    subscribe,
    timeout,
)

from .json_lines import json_line
from .lenient import open_bus
from .options import PATTERN_OPTION, amount
from .progress import Progress
from .stop import Stop, arrived, leave

if TYPE_CHECKING:  # it takes long, and is imported where it is used
    from concurrent.futures import Future

KEEPING_SECONDS = 0.1  # between two looks at whether the helper is done
WRITE_BYTES = 1 << 20  # that are collected before they are written
SEGMENT_MODE = 0o640  # messages may be nobody else's business


def sync_directory(directory: Path) -> None:
    """Return once the names in a directory are on disk."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def keep(file: BinaryIO, hidden: Path) -> None:
    """Give a segment of whole lines its name; remove it if it is empty.

    Closes the file.  Raises: OSError.
    """
    with file:
        if not os.fstat(file.fileno()).st_size:
            hidden.unlink()
            return
        os.fsync(file.fileno())
        hidden.rename(hidden.with_name(hidden.name[1:]))
        sync_directory(hidden.parent)


def is_whole(line: bytes) -> bool:
    """Return whether a line of a segment is whole.

    A crash of the recorder cuts the last line; one of the machine may leave
    anything.
    """
    try:
        return line[-1:] == b"\n" and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def recover(hidden: Path) -> int:
    """Keep the whole lines of a segment; return how many.

    They are 0 if its recorder lives, or if it is no longer there.
    Raises: OSError.
    """
    lines = size = 0
    with contextlib.suppress(FileNotFoundError), hidden.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        for line in itertools.takewhile(is_whole, file):
            lines += 1
            size += len(line)
        file.truncate(size)
        keep(file, hidden)
    return lines


class Recorder:
    """Writes messages to a new capture in a directory."""

    def __init__(self, directory: Path, bytes_max: int, seconds_max: float):
        from concurrent.futures import Future, ThreadPoolExecutor

        self.directory = directory
        self.bytes_max = bytes_max
        self.seconds_max = seconds_max
        self.host = os.uname().nodename
        name = re.sub("[^0-9A-Za-z.-]", "-", self.host).lstrip(".")
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.name_of_host = name
        self.rec = f"{name}_{moment}_{os.urandom(4).hex()}"
        self.n = 0  # the number of the last message
        self.segments = 0
        self._lines = bytearray()  # not yet written
        self._helper = ThreadPoolExecutor(1)
        self._keeping: Future[None] = Future()  # the segment before
        self._keeping.set_result(None)  # there is none
        self._ended = 0  # messages up to the end of that
        self._kept = 0  # messages in segments that have their name

    def __enter__(self) -> Recorder:
        """Make the directory, recover what is in it, and begin.

        Raises: SbusError.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._recover_all()
            self._begin()
        except OSError as error:
            what = f"{self.directory}: {error.strerror}"
            raise SbusError(f"{what}: nothing is recorded") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the last segment.  Raises: SbusError."""
        if not self._file.closed:
            self.flush(ends=True)
        self._helper.shutdown()

    def _recover_all(self) -> None:
        """Recover what recorders on this host have left."""
        for hidden in sorted(self.directory.glob(f".{self.name_of_host}_*")):
            try:
                lines = recover(hidden)
            except OSError as error:
                note(f"{hidden} is not recovered: {error.strerror}")
            else:
                if lines:
                    note(f"{hidden.name[1:]} is recovered: {lines:,} messages")

    def _begin(self) -> None:
        """Create the next segment."""
        self.segments += 1
        name = f".{self.rec}-{self.segments:06}.jsonl"
        self._hidden = self.directory / name
        self._size = 0
        self._end: float | None = None  # there is none before a first line
        while True:
            self._file = io.FileIO(self._hidden, "x", opener=create_segment)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file.fileno()).st_nlink:
                return
            self._file.close()  # another recorder was quicker and removed it

    def describe(self) -> str:
        """Return how far it is."""
        return f"{self.n:,} messages, segment {self.segments:,}"

    def seconds_left(self) -> float | None:
        """Return after how many seconds there is something to do."""
        if not self._keeping.done():
            return KEEPING_SECONDS
        return None if self._end is None else self._end - time.monotonic()

    def add(self, message: Message) -> None:
        """Record a message.  Raises: SbusError."""
        self.n += 1
        if self._end is None:
            self._end = time.monotonic() + self.seconds_max
        line = {
            "rec": self.rec,
            "n": self.n,
            "t": time.time_ns(),
            "host": self.host,
            "key": message.key.decode("latin-1"),
            "size": len(message.payload),
            "data": base64.b64encode(message.payload).decode("ascii"),
        }
        self._lines += json_line(line)
        if len(self._lines) >= WRITE_BYTES:
            self.flush()

    def flush(self, ends: bool = False) -> None:
        """Write what was added; end the segment if it is to end.

        Raises: SbusError; then the recorder has ended, and has kept all
        that could be written.
        """
        lines, self._lines = memoryview(self._lines), bytearray()
        self._size += len(lines)
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
            if ends or self._keeping.done():
                self._settle()
                if ends or self._is_over():
                    self._finish(ends)
        except OSError as error:
            raise self._failure(error) from None

    def _is_over(self) -> bool:
        """Return whether the segment is large or old enough."""
        left = self.seconds_left()
        return self._size >= self.bytes_max or (left is not None and left <= 0)

    def _finish(self, ends: bool) -> None:
        """Have the segment kept, and begin another if this is not the end."""
        self._keeping = self._helper.submit(keep, self._file, self._hidden)
        self._ended = self.n
        if ends:
            self._settle()
        else:
            self._begin()

    def _settle(self) -> None:
        """Return once the segment before has its name.  Raises: OSError."""
        self._keeping.result()
        self._kept = self._ended

    def _failure(self, failed: OSError) -> SbusError:
        """Keep what can be kept; return the error that tells what."""
        with contextlib.suppress(OSError):
            self._settle()  # the helper needs its file until then
        self._file.close()
        for hidden in sorted(self.directory.glob(f".{self.rec}-*")):
            with contextlib.suppress(OSError):  # the next recorder tries again
                self._kept += recover(hidden)
        self._helper.shutdown()
        return SbusError(
            f"{self.directory}: {failed.strerror}: {self._kept:,} of"
            f" {self.n:,} messages are recorded"
        )


def create_segment(path: str, flags: int) -> int:
    """Return the descriptor of a new file that others cannot read."""
    return os.open(path, flags, SEGMENT_MODE)


@command(
    "record /var/lib/capture --pattern 'sensors/'",
    argument("directory", metavar="DIR", help="made if it is missing"),
    PATTERN_OPTION,
    amount("--segment-mib", "M", "end a file at M MiB (64)", default=64.0),
    amount(
        "--segment-seconds",
        "S",
        "end a file S seconds after its first message (10)",
        default=10.0,
    ),
    timeout(),
)
def record(options: Options) -> None:
    """Record what is published in DIR, until SIGINT or SIGTERM comes.

    Then the exit status is 0.  The file REC-000001.jsonl and its successors
    hold a JSON object a line: rec names this run, n counts its messages from
    1, t is nanoseconds since 1970, host is where it runs, key has a code
    point for each byte, size counts the payload's bytes, data is the payload
    in base64.  A file gets its name when it is whole and on disk; it is
    hidden before, by a dot.  What a crash has left is recovered at the next
    start on the same host.  Publishers wait for a recorder that is slow, for
    the server's --block-timeout at most: it asks for blocking/soft/block.
    """
    megabytes = options.segment_mib * (1 << 20)
    recorder = Recorder(
        Path(options.directory), int(megabytes), options.segment_seconds
    )
    with open_bus(options, options.timeout) as bus, Stop() as stop:
        bus.sync(options.timeout)  # it lives
        bus.control("blocking/soft/block")
        subscribe(bus, options.pattern)
        with Progress() as progress, recorder:
            while True:
                for received in arrived(bus):
                    if isinstance(received, ControlMessage):
                        return
                    recorder.add(received)
                recorder.flush()
                progress.show(recorder.describe)
                wanted = {bus: select.POLLIN}
                if stop.wait(wanted, recorder.seconds_left()):
                    leave(bus, options.pattern)
