"""record: write messages to files, and lose none of them.

A capture is a directory of segments, files of JSON lines, each in a folder of
the day (UTC) on which it was begun.  A segment is written under a hidden
name, `.` before its own, which it gets when it is whole and on disk: what has
no dot in front never changes any more.

One recorder of a host writes to a directory, and holds a lock there: a
segment that it finds hidden is one that a dead recorder has left.  A helper,
a thread, waits for the disk while the next segment grows, because a disk may
take longer than a server waits for a reader.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from sbus_client import ControlMessage, Message, SbusError, end_of, left_of

from . import shared
from .json_lines import json_line
from .shared import Options, amount
from .stop import leave, run_until_signal

SEGMENT_MODE = 0o640  # messages may be nobody else's business
LEFT = """another host left it hidden: if its recorder is gone, rename it \
without the dot"""
BLOCK_BYTES = 1 << 20  # that are searched at once for the last line feed
HIDDEN = re.compile(r"\..*-.*\.jsonl")
LEFT_SECONDS = 3_600  # after which nobody seems to write a hidden segment


def open_own(name: str, flags: int, folder: int) -> int:
    """Open a file of ours, or of root, that is no link and has none.

    Others may write to the folder.  Raises: OSError.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(name, flags, SEGMENT_MODE, dir_fd=folder)
    about = os.fstat(file)
    is_ours = about.st_uid in (os.geteuid(), 0) and about.st_nlink == 1
    if is_ours and stat.S_ISREG(about.st_mode):
        return file
    os.close(file)
    raise OSError(errno.EPERM, f"{name} is no file of ours")


def open_folder(name: str, folder: int) -> int:
    """Open a folder that is no link.  Raises: OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    return os.open(name, flags, dir_fd=folder)


def keep(file: BinaryIO, root: int, folder: int, hidden: str) -> None:
    """Close a segment and its folder; name it once it is on disk."""
    try:
        with file:
            os.fsync(file.fileno())
        os.rename(hidden, hidden[1:], src_dir_fd=folder, dst_dir_fd=folder)
        for directory in folder, root:  # the names, too
            os.fsync(directory)
    finally:
        os.close(folder)


def recover(hidden: str, root: int, folder: int) -> None:
    """Keep the whole lines of a segment that a dead recorder has left."""
    file = os.fdopen(open_own(hidden, os.O_RDWR, folder), "rb+", 0)
    size = os.fstat(file.fileno()).st_size
    end = 0
    while size and not end:
        start = max(0, size - BLOCK_BYTES)
        block = os.pread(file.fileno(), size - start, start)
        end = block.rfind(b"\n") + 1
        size = start + end
    if not size:
        file.close()
        return os.unlink(hidden, dir_fd=folder)
    os.truncate(file.fileno(), size)
    keep(file, root, os.dup(folder), hidden)
    shared.note(f"recovered {hidden[1:]}")


class Recorder:
    """Writes messages to a new capture in a directory.

    What it cannot write is an SbusError; the next recorder recovers the rest.
    """

    def __init__(self, options: Options) -> None:
        self.directory = Path(options.directory)
        self.has_payload = not options.no_payload
        self.bytes_max = int(options.segment_mib * (1 << 20))
        self.seconds_max = options.segment_seconds
        self.host = os.uname().nodename
        self._name = re.sub("[^0-9A-Za-z.-]", "-", self.host).lstrip(".")
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.rec = f"{self._name}_{moment}_{os.urandom(4).hex()}"
        self.n = 0  # the number of the last message
        self.segments = 0
        self._file: BinaryIO | None = None  # a segment of whole lines
        self._helper = ThreadPoolExecutor(1)
        self._keeping: Future[None] | None = None  # the segment before

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the directory in an error of the disk."""
        try:
            yield
        except OSError as error:
            raise SbusError(f"{self.directory}: {error.strerror}") from None

    def __enter__(self) -> Recorder:
        """Make the directory, and recover what is in it."""
        with self._named_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY
            self._root = os.open(self.directory, flags)
            flags = os.O_RDWR | os.O_CREAT
            self._lock = open_own(f".{self._name}.lock", flags, self._root)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "another recorder of this host writes there"
                raise SbusError(f"{self.directory}: {problem}") from None
            for day in sorted(os.listdir(self._root)):
                with contextlib.suppress(NotADirectoryError):
                    folder = open_folder(day, self._root)
                    self._recover_day(day, folder)
                    os.close(folder)
        return self

    def _recover_day(self, day: str, folder: int) -> None:
        """Recover our hidden segments of a day; name old ones of others.

        Whether the recorders of other hosts live is not known here, as a lock
        may not reach them.  A container has a new host name at each start.
        """
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(f".{self._name}_"):
                    self._recover(name, folder)
                elif HIDDEN.fullmatch(name):
                    about = os.lstat(name, dir_fd=folder)
                    if time.time() - about.st_mtime > LEFT_SECONDS:
                        path = self.directory / day / name
                        shared.note(f"{path}: {LEFT}")

    def _recover(self, hidden: str, folder: int) -> None:
        """Recover a segment, unless it is not ours."""
        try:
            recover(hidden, self._root, folder)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ELOOP, errno.ENXIO):
                raise
            shared.note(f"{self.directory}: {hidden} stays: it is not ours")

    def __exit__(self, *_: object) -> None:
        """Keep the last segment."""
        try:
            with self._named_errors():
                self._helper.shutdown()
                if self._file:
                    keep(self._file, *self._place)
                if self._keeping:
                    self._keeping.result()
        finally:
            os.close(self._root)
            os.close(self._lock)

    def seconds_left(self) -> float | None:
        """Return after how many seconds the segment is to end."""
        return left_of(self._end) if self._file else None

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
        if self.has_payload:
            data = base64.b64encode(message.payload)
            line["data"] = data.decode("ascii")
        with self._named_errors():
            file, self._file = self._file or self._begin(), None
            text = json_line(line)
            while text:  # if the disk has no room, a part is written first
                text = text[file.write(text) :]
            self._file = file
            self.n += 1
            if file.tell() >= self.bytes_max or left_of(self._end) == 0:
                self.end_segment()

    def end_segment(self) -> None:
        """Have the helper keep the segment, once it has kept the one before.

        That one is waited for, so that no more than two wait for the disk.
        """
        assert self._file
        before = self._keeping
        self._keeping = self._helper.submit(keep, self._file, *self._place)
        self._file = None
        if before:
            with self._named_errors():
                before.result()

    def _begin(self) -> BinaryIO:
        """Create the next segment."""
        self.segments += 1
        day = time.strftime("%Y-%m-%d", time.gmtime())
        with contextlib.suppress(FileExistsError):
            os.mkdir(day, dir_fd=self._root)
        folder = open_folder(day, self._root)
        hidden = f".{self.rec}-{self.segments:06}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = open_own(hidden, flags, folder)
        self._place = self._root, folder, hidden
        self._end = end_of(self.seconds_max)
        return os.fdopen(file, "wb", 0)


@shared.command(
    "record /var/lib/capture --pattern 'sensors/'",
    shared.argument("directory", "created if it is missing", metavar="DIR"),
    shared.PATTERN_OPTION,
    amount("--segment-mib", "M", "end a file at M MiB (64)", default=64.0),
    amount("--segment-seconds", "S", "or after S seconds (10)", default=10.0),
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
    (blocking/soft/block).
    """

    def work() -> None:
        with Recorder(options) as recorder:
            bus.control("blocking/soft/block")
            shared.subscribe(bus, options.pattern)
            bus.sync(options.timeout)
            while True:
                try:
                    received = bus.receive(recorder.seconds_left())
                except TimeoutError:
                    recorder.end_segment()
                    continue
                if isinstance(received, ControlMessage):
                    return
                recorder.add(received)

    with shared.open_bus(options, options.timeout) as bus:
        run_until_signal([work], lambda: leave(bus, options.pattern))
