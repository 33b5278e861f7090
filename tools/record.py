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
import itertools
import json
import os
import re
import select
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from sbus_client import ControlMessage, Message, SbusError, end_of, left_of

from . import options as shared
from .json_lines import json_line
from .options import Options
from .stop import Stop, arrived, leave

KEEPING_SECONDS = 0.1  # between two looks at whether the helper is done
WRITE_BYTES = 1 << 20  # that are collected before they are written
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
SEGMENT_MODE = 0o640  # messages may be nobody else's business


def keep(file: BinaryIO, hidden: Path, count: int) -> int:
    """Give a segment of whole lines its name; remove it if it is empty.

    Closes the file.  Returns *count*, once all is on disk.  Raises: OSError.
    """
    with file:
        if os.fstat(file.fileno()).st_size:
            os.fsync(file.fileno())
            hidden.rename(hidden.with_name(hidden.name[1:]))
        else:
            hidden.unlink()
    directory = os.open(hidden.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return count


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
        return keep(file, hidden, lines)
    return 0


class Recorder:
    """Writes messages to a new capture in a directory."""

    def __init__(self, directory: Path, bytes_max: int, seconds_max: float):
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
        self._helper = ThreadPoolExecutor(1)
        self._keeping: Future[int] = self._helper.submit(int)  # nothing yet
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
                if lines := recover(hidden):
                    what = f"{hidden.name[1:]} is recovered"
                    shared.note(f"{what}: {lines:,} messages")
            except OSError as error:
                shared.note(f"{hidden} is not recovered: {error.strerror}")

    def _begin(self) -> None:
        """Create the next segment."""
        self.segments += 1
        name = f".{self.rec}-{self.segments:06}.jsonl"
        self._hidden = self.directory / name
        self._end: float | None = None  # there is none before a first line
        while True:
            fd = os.open(self._hidden, NEW_FILE, SEGMENT_MODE)
            self._file = os.fdopen(fd, "wb", WRITE_BYTES)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return
            self._file.close()  # another recorder was quicker and removed it

    def seconds_left(self) -> float | None:
        """Return after how many seconds there is something to do."""
        return left_of(self._end) if self._keeping.done() else KEEPING_SECONDS

    def add(self, message: Message) -> None:
        """Record a message, which flush writes.  Raises: as flush."""
        self.n += 1
        self._end = self._end or end_of(self.seconds_max)
        line = {
            "rec": self.rec,
            "n": self.n,
            "t": time.time_ns(),
            "host": self.host,
            "key": message.key.decode("latin-1"),
            "size": len(message.payload),
            "data": base64.b64encode(message.payload).decode("ascii"),
        }
        try:
            self._file.write(json_line(line))
            is_large = self._file.tell() >= self.bytes_max
        except OSError as error:
            raise self._failure(error) from None
        if is_large:
            self.flush()

    def flush(self, ends: bool = False) -> None:
        """Write what was added; end the segment if it is to end.

        Raises: SbusError; then the recorder has ended, and has kept all
        that could be written.
        """
        try:
            self._file.flush()
            if not (ends or self._keeping.done()):
                return
            self._kept = self._keeping.result()
            is_large = self._file.tell() >= self.bytes_max
            if ends or is_large or left_of(self._end) == 0:
                kept = self._file, self._hidden, self.n
                self._keeping = self._helper.submit(keep, *kept)
                if ends:
                    self._keeping.result()
                else:
                    self._begin()
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, failed: OSError) -> SbusError:
        """Keep what can be kept; return the error that tells what."""
        with contextlib.suppress(OSError):
            self._kept = self._keeping.result()  # it needs its file until then
        with contextlib.suppress(OSError):  # what is not written is lost
            self._file.close()
        for hidden in sorted(self.directory.glob(f".{self.rec}-*")):
            with contextlib.suppress(OSError):  # the next recorder tries again
                self._kept += recover(hidden)
        self._helper.shutdown()
        return SbusError(
            f"{self.directory}: {failed.strerror}: {self._kept:,} of"
            f" {self.n:,} messages are recorded"
        )


@shared.command(
    "record /var/lib/capture --pattern 'sensors/'",
    shared.argument("directory", metavar="DIR", help="made if it is missing"),
    shared.PATTERN_OPTION,
    shared.amount(
        "--segment-mib", "M", "end a file at M MiB (64)", default=64.0
    ),
    shared.amount(
        "--segment-seconds",
        "S",
        "end a file S seconds after its first message (10)",
        default=10.0,
    ),
    shared.timeout(),
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
    bytes_max = int(options.segment_mib * (1 << 20))
    directory = Path(options.directory)
    recorder = Recorder(directory, bytes_max, options.segment_seconds)
    with shared.open_bus(options, options.timeout) as bus, Stop() as stop:
        bus.control("blocking/soft/block")
        shared.subscribe(bus, options.pattern)
        bus.sync(options.timeout)
        with recorder:
            while True:
                for received in arrived(bus):
                    if isinstance(received, ControlMessage):
                        return
                    recorder.add(received)
                recorder.flush()
                wanted = {bus: select.POLLIN}
                if stop.wait(wanted, recorder.seconds_left()):
                    leave(bus, options.pattern)
