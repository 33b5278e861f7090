"""record: write messages to files, and lose none of them.

A capture is a directory of segments, files of JSON lines, each in a folder of
the day (UTC) on which it was begun.  A segment is written under a hidden
name, `.` before its own, which it gets when it is whole and on disk: what has
no dot in front never changes any more.

One recorder of a host writes to a directory, and holds a lock there: a
segment that it finds hidden is one that a dead recorder has left.  A helper,
a thread, waits for the disk while the next segment grows, because a disk may
take longer than a server waits for a reader.

Others may be able to write in the directory.  So a recorder follows no link,
uses only folders of its own user or root, and only files of its own that have
no other name.  It reaches them from folders that it holds open.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import stat
import time
from functools import partial
from typing import BinaryIO, NamedTuple

from sbus_client import ControlMessage, Message, SbusError, end_of, left_of

from . import shared
from .shared import Options, amount, duration, errors_about
from .stop import Job, leave, run_until_signal

SEGMENT_MODE = 0o640  # messages may be nobody else's business
LOCK_MODE = 0o600  # anybody who can read a file can lock it
FOLDER = os.O_RDONLY | os.O_DIRECTORY
DAY = re.compile(r"\d{4}-\d\d-\d\d")


def open_ours(path: str, flags: int, folder: int | None = None) -> int:
    """Open a file or folder of our user, or of root.

    *folder* is what the path is in, if that is open.
    Raises: SbusError, also for a link, or a file that has another name.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # nor wait for a reader of a FIFO
    name = path if folder is None else os.path.basename(path)
    with errors_about(path):
        descriptor = os.open(name, flags, SEGMENT_MODE, dir_fd=folder)
    status = os.fstat(descriptor)
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    is_plain = is_file or stat.S_ISDIR(status.st_mode)
    if is_plain and status.st_uid in (0, os.geteuid()):
        return descriptor
    os.close(descriptor)
    raise SbusError(f"{path}: another user's, or no regular file of one name")


class Segment(NamedTuple):
    """Whole lines under a hidden name, and the folder of their day."""

    file: BinaryIO
    hidden: str
    folder: int  # open
    end: float | None

    def keep(self, directory: int) -> None:
        """Give it its name once it is on disk, and close both."""
        name, folder = os.path.basename(self.hidden), self.folder
        with errors_about(self.hidden), self.file:
            os.fsync(self.file.fileno())
            os.rename(name, name[1:], src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)  # the names, too
            os.fsync(directory)
            os.close(folder)


class Recorder:
    """Writes messages to a new capture in a directory.

    What it cannot write is an SbusError; the next recorder recovers the rest.
    """

    def __init__(self, options: Options) -> None:
        import json  # which a small Python lacks

        self.directory = str(options.directory).rstrip("/") or "/"
        self.options = options
        self.host = os.uname().nodename
        self._name = re.sub("[^0-9A-Za-z.-]", "-", self.host).lstrip(".")
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.rec = f"{self._name}_{moment}_{os.urandom(4).hex()}"
        self.n = 0  # the number of the last message
        self.segments = 0
        self._to_json = json.JSONEncoder(separators=(",", ":")).encode
        self._segment: Segment | None = None
        self._keeping: Job | None = None  # the segment before

    def __enter__(self) -> Recorder:
        """Make the directory, and recover what is in it."""
        with errors_about(self.directory):
            os.makedirs(self.directory, exist_ok=True)
        self._folder = open_ours(self.directory, FOLDER)
        path = f"{self.directory}/.{self._name}.lock"
        self._lock = open_ours(path, os.O_RDWR | os.O_CREAT, self._folder)
        with errors_about(path):
            os.fchmod(self._lock, LOCK_MODE)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "another recorder of this host writes there"
                raise SbusError(f"{self.directory}: {problem}") from None
        for day in sorted(filter(DAY.fullmatch, os.listdir(self._folder))):
            self._recover(f"{self.directory}/{day}")
        return self

    def _recover(self, day: str) -> None:
        """Keep what a dead recorder of this host left in a day's folder.

        Whether the recorders of others live is not known here, as a lock may
        not reach other hosts.
        """
        hidden = re.compile(rf"\.{re.escape(self._name)}_\w+-\d+\.jsonl")
        folder = open_ours(day, FOLDER, self._folder)
        for name in sorted(filter(hidden.fullmatch, os.listdir(folder))):
            self._keep_lines(f"{day}/{name}", folder)
        os.close(folder)

    def _keep_lines(self, hidden: str, folder: int) -> None:
        """Keep the whole lines of a segment, or remove it if it has none."""
        descriptor = open_ours(hidden, os.O_RDWR, folder)
        with errors_about(hidden), os.fdopen(descriptor, "r+b") as file:
            size = file.read().rfind(b"\n") + 1
            if not size:
                return os.unlink(os.path.basename(hidden), dir_fd=folder)
            file.truncate(size)
            Segment(file, hidden, os.dup(folder), None).keep(self._folder)
        shared.note(f"recovered {os.path.basename(hidden)[1:]}")

    def __exit__(self, *_: object) -> None:
        """Keep the last segment, without a helper.

        Python may be ending by now, and some then start no thread.
        """
        try:
            if self._keeping:
                self._keeping.wait()
            if self._segment:
                self._segment.keep(self._folder)
        finally:
            os.close(self._lock)
            os.close(self._folder)

    def seconds_left(self) -> float | None:
        """Return after how many seconds the segment is to end."""
        return left_of(self._segment.end) if self._segment else None

    def add(self, message: Message) -> None:
        """Record a message."""
        line = {
            "rec": self.rec,
            "n": self.n + 1,
            "t": time.time_ns(),
            "host": self.host,
            "key": message.key.decode("latin-1"),
            "size": len(message.payload),
        }
        if not self.options.no_payload:
            data = base64.b64encode(message.payload)
            line["data"] = data.decode("ascii")
        text = self._to_json(line).encode("ascii") + b"\n"

        segment = self._segment or self._begin()
        self._segment = None  # what ends with a part of a line is not kept
        with errors_about(segment.hidden):
            while text:  # if the disk has no room, a part is written first
                text = text[segment.file.write(text) :]
        self._segment = segment
        self.n += 1
        mib = segment.file.tell() / (1 << 20)
        if mib >= self.options.segment_mib or left_of(segment.end) == 0:
            self.end_segment()

    def end_segment(self) -> None:
        """Have a helper keep the segment, once the one before is kept.

        That one is waited for, so that no more than two wait for the disk.
        """
        assert self._segment
        keep = partial(self._segment.keep, self._folder)
        self._segment = None
        if self._keeping:
            self._keeping.wait()
        self._keeping = Job(keep)

    def _begin(self) -> Segment:
        """Create the next segment."""
        self.segments += 1
        today = time.strftime("%Y-%m-%d", time.gmtime())
        day = f"{self.directory}/{today}"
        with errors_about(day), contextlib.suppress(FileExistsError):
            os.mkdir(today, dir_fd=self._folder)
        folder = open_ours(day, FOLDER, self._folder)
        hidden = f"{day}/.{self.rec}-{self.segments:06}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = os.fdopen(open_ours(hidden, flags, folder), "wb", buffering=0)
        end = end_of(self.options.segment_seconds)
        return Segment(file, hidden, folder, end)


@shared.command(
    "record /var/lib/capture --pattern 'sensors/'",
    shared.argument("directory", "created if it is missing", metavar="DIR"),
    shared.PATTERN_OPTION,
    amount("--segment-mib", "M", "end a file at M MiB (64)", default=64.0),
    duration("--segment-seconds", "or after S seconds (10)", default=10.0),
    shared.flag("--no-payload", "leave payloads out"),
    shared.timeout(),
)
def record(options: Options) -> None:
    """Record messages in DIR, until SIGINT or SIGTERM comes.

    Then the exit status is 0.  The files REC-000001.jsonl and so on, each in
    a folder of its day (UTC), hold a JSON object a line: rec names this run,
    n counts its messages from 1, t is nanoseconds since 1970, host is where
    it runs, key has a code point for each byte, size counts the payload's
    bytes, data is the payload in base64, unless --no-payload leaves it out.
    A file is hidden, by a dot before its name, until it is complete and on
    disk.  The next start on the same host recovers what a crash has left.
    Only one recorder of a host can write to a DIR.  A slow recorder pauses
    publishers, for the server's --block-timeout at most
    (blocking/soft/block).  DIR is a folder of this user or root, and no link.
    """

    def work() -> None:
        with Recorder(options) as recorder:
            bus.control("blocking/soft/block")
            shared.subscribe(bus, options.pattern)
            bus.sync(left_of(options.end))
            while True:
                try:
                    received = bus.receive(recorder.seconds_left())
                except TimeoutError:
                    recorder.end_segment()
                    continue
                if isinstance(received, ControlMessage):
                    return
                recorder.add(received)

    with shared.open_bus(options) as bus:
        run_until_signal([work], lambda: leave(bus, options.pattern))
