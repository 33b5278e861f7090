"""The jobs of `sbus queue`, in a file that SQLite writes.

A job is a row, and one column is its state.  `due` is 0 for a job that is
ready, and infinite for one that has failed.  Otherwise it is a time: until
then a worker holds the job or, if nobody does, the job waits to be tried
again.

All that has come is one transaction, which ends by a wait for the disk; the
answers follow it.  So what was answered survives a crash of the process and
of the machine, and many orders share one wait.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from sbus_client import SbusError, printable

from . import shared

T = TypeVar("T")
FORMAT = 1
DISK_SECONDS = 1.0  # until a disk that refused is asked again

# A number never comes again: a late `done` must not forget another job
SCHEMA = """BEGIN;
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT,
    stored REAL, due REAL, tries INTEGER DEFAULT 0, holder TEXT DEFAULT '',
    problem TEXT DEFAULT '', key BLOB, payload BLOB);
CREATE INDEX jobs_due ON jobs (due DESC, number);
CREATE TABLE queue (format INTEGER, name TEXT, paused INTEGER);
INSERT INTO queue VALUES (%d, CAST(X'%s' AS TEXT), 0);
COMMIT"""
HELD = "due > 0 AND due < 9e999 AND holder <> ''"
FAILED = "due = 9e999 AND (:number = '' OR number = :number)"
STATE = f"""CASE WHEN due = 0 AND paused THEN 'paused' WHEN due = 0
    THEN 'ready' WHEN {HELD} THEN 'held' WHEN due < 9e999 THEN 'waits'
    ELSE 'failed' END AS state"""

# What workers and operators order.  Each may be repeated
ORDERS = {
    "done": "DELETE FROM jobs WHERE number = :number",
    "more": """UPDATE jobs SET due = :now + :lease_seconds, holder = :holder
        WHERE number = :number AND tries = :try AND due < 9e999""",
    "back": f"""UPDATE jobs SET holder = '', problem = :problem,
        due = :now + :retry_seconds * (1 << min(tries - 1, 12))
        WHERE number = :number AND tries = :try AND {HELD}""",
    "counts": f"""SELECT {STATE}, count(*) AS jobs,
        round(:now - min(stored), 3) AS age_seconds
        FROM jobs, queue GROUP BY state""",
    "show": f"""SELECT number AS job, {STATE}, tries, holder,
        substr(problem, 1, 200) AS problem,
        round(:now - stored, 3) AS age_seconds, substr(key, 1, 80) AS key,
        length(payload) AS bytes, substr(payload, 1, 80) AS payload
        FROM jobs, queue WHERE number >= 0 + :number
        ORDER BY due DESC, number LIMIT 100""",
    "retry": f"UPDATE jobs SET due = 0, tries = 0 WHERE {FAILED}",
    "forget": f"DELETE FROM jobs WHERE {FAILED}",
    "purge": "DELETE FROM jobs WHERE due = 0",
    "pause": "UPDATE queue SET paused = 1",
    "resume": "UPDATE queue SET paused = 0",
}

# What the broker does by itself
PUT = """INSERT INTO jobs (stored, due, problem, key, payload)
    VALUES (:now, :due, :problem, :key, :payload)"""
READY = """SELECT number, tries + 1, key, payload FROM jobs, queue
    WHERE due = 0 AND NOT paused ORDER BY number LIMIT :count"""
HOLD = """UPDATE jobs SET due = :now + :lease_seconds, tries = :try,
    holder = :holder WHERE number = :number"""
# A job whose time is over is ready, or has failed if this was its last try
SWEEP = """UPDATE jobs SET holder = '',
    problem = CASE holder WHEN '' THEN problem ELSE 'its lease ended' END,
    due = CASE WHEN tries < :tries THEN 0 ELSE 9e999 END
    WHERE due > 0 AND due <= :now"""
# Also of what waits, as a clock that was set back would let it wait for long
RENEW = """UPDATE jobs SET due = :now + :lease_seconds
    WHERE due > 0 AND due < 9e999"""
NEXT_DUE = "SELECT ifnull(min(due), 9e999) FROM jobs WHERE due > 0"


def check_file(path: str) -> None:
    """Create a file, or see that only this user can read or change it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    os.close(descriptor)
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not is_ours or not stat.S_ISREG(status.st_mode):
        raise SbusError(f"{path}: not a file of this user alone (mode 600)")


class Store:
    """The jobs of a queue.  Its methods raise sqlite3.Error."""

    def __init__(self, options: shared.Options) -> None:
        """Open the store of a queue, or create it.  Raises: SbusError."""
        # A clock may be set: while we run, only its start matters
        self._start = time.time() - time.monotonic()
        self._options = vars(options)  # statements name some of them
        self.is_late = True  # leases may have ended while nobody could ask

        path = os.path.abspath(options.store)  # so ":memory:" is a file, too
        for suffix in ("", "-wal", "-journal"):
            if not suffix or os.path.lexists(path + suffix):
                check_file(path + suffix)
        self._db = sqlite3.connect(path, 0, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        # The lock keeps other brokers off, and ends with this process
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        name = printable(os.fsencode(options.name))
        if not self._db.execute("SELECT * FROM sqlite_master").fetchone():
            self._db.executescript(SCHEMA % (FORMAT, name.encode().hex()))
        row = self._db.execute("SELECT format, name FROM queue").fetchone()
        self._db.execute("SELECT * FROM jobs LIMIT 1")  # raises if it is none
        if tuple(row or ()) != (FORMAT, name):
            form = "format {} of queue {!r}".format
            kind = form(*row) if row else "no queue"
            text = f"{kind}, not {form(FORMAT, name)}"
            raise SbusError(f"{path}: {text}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")  # wait for the disk

    def now(self) -> float:
        """Return the time."""
        return self._start + time.monotonic()

    def run(self, statement: str, **values: object) -> sqlite3.Cursor:
        """Run a statement, with the values and options that it names."""
        values = {**self._options, "now": self.now(), **values}
        return self._db.execute(statement, values)

    def commit(self, work: Callable[[], T]) -> T:
        """Do some work in a transaction; return its result once it is on disk.

        While the disk refuses, it waits: the caller has no place for more.
        """
        is_told = False
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                if self.is_late:
                    self.run(RENEW)
                self.run(SWEEP)
                result = work()
                self._db.execute("COMMIT")
                self.is_late = False
                return result
            except sqlite3.OperationalError as error:  # such as a full disk
                if not is_told:
                    path = self._options["store"]
                    shared.note(f"{path}: {error}: trying again")
                is_told = True
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self.is_late = True
                time.sleep(DISK_SECONDS)
