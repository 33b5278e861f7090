"""Tables: what ingest makes, and the commits that change it.  Without Spark.

A table is a Delta table in folders of days: the columns of `messages`, and
`day`.  Another one, `_quarantine`, has the lines that were no messages, in
folders of the days on which they were found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs

from .files import files_at
from .inputs import BusyError, InputError, absolute
from .messages import COLUMNS, schema_of

TABLE = f"{COLUMNS}, day date"
QUARANTINE = "segment string, line string, day date"
READERS_HOURS = 24  # for which a reader may use a snapshot
RETENTION = {"delta.logRetentionDuration": f"interval {READERS_HOURS} hours"}
NOTES = "_ingested.json"  # what is `known`, which may be lost
CONFLICT = "Failed to commit transaction"  # so begins what Delta says of one
# After commits of these kinds a table has all that it had, but for what was
# dropped on purpose.  So it has after a WRITE that appends
KEEPING = {
    *("OPTIMIZE", "VACUUM START", "VACUUM END", "CLUSTER BY"),
    *("DELETE", "MERGE", "TRUNCATE", "UPDATE"),
    *("ADD COLUMN", "ADD COLUMNS", "CHANGE COLUMN", "UPDATE TABLE METADATA"),
    *("SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "ADD FEATURE"),
    *("ADD CONSTRAINT", "DROP CONSTRAINT", "UPGRADE PROTOCOL"),
}


# ==== Tables =================================================================


def is_table(where: str) -> bool:
    """Return whether there is a table; False if there is nothing.

    Raises: InputError if there is something else, or a table without a log.
    """
    system, folder = fs.FileSystem.from_uri(where)
    listing = system.get_file_info(fs.FileSelector(folder, True))
    names = {file.base_name for file in listing}
    if "_delta_log" in names and DeltaTable.is_deltatable(where):
        return True
    if NOTES in names:
        reason = "its log (_delta_log) is gone: copy that back, or move the"
        reason += " rest away and ingest the capture again"
        raise InputError(f"{where}: {reason}")
    if names - {"_delta_log", "_quarantine"}:
        reason = "something other than a table is there; name a new folder"
        raise InputError(f"{where}: {reason}")
    return False


def open_table(table: str) -> DeltaTable:
    """Return a table as it is now.

    Raises: InputError if there is none, or one that ingest did not make.
    """
    where = absolute(table)
    if not is_table(where):
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    opened = open_delta(where)

    kinds = {field.name: field.type for field in opened.schema().fields}
    wrong = [
        field.name
        for field in Schema.from_arrow(schema_of(TABLE)).fields
        if kinds.get(field.name) != field.type
    ]
    if opened.metadata().partition_columns != ["day"]:
        wrong.append("day")
    if wrong:
        reason = f"it has no, or other, columns {', '.join(wrong)}"
        raise InputError(f"{table}: no table that `ingest` made: {reason}")
    return opened


def open_delta(where: str) -> DeltaTable:
    """Return a table of Delta as it is now.

    Raises: InputError if its log is broken, or it has features that only a
    later reader knows: without them, rows that were deleted would be shown.
    """
    try:
        opened = DeltaTable(where)
    except (DeltaError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{where}: its log is broken: {reason}") from None
    protocol = opened.protocol()
    if protocol.min_reader_version > 1:
        names = ", ".join(protocol.reader_features or ["columnMapping"])
        reason = f"it has features that this cannot read: {names}"
        raise InputError(f"{where}: {reason}")
    return opened


def make_table(table: str) -> None:
    """Make a table, unless there is one that rows can be added to.

    Raises: InputError if there is something else.
    """
    if "://" not in table and re.search("%[0-9A-Fa-f]{2}", table):
        raise InputError(f"{table}: Delta reads % in a path as an escape")
    if is_table(table):
        check_rules(table, open_table(table))
    for where, columns in (aside(table), QUARANTINE), (table, TABLE):
        schema = Schema.from_arrow(schema_of(columns))
        try:
            DeltaTable.create(
                where, schema, "ignore", "day", configuration=RETENTION
            )
        except CommitFailedError:
            if not DeltaTable.is_deltatable(where):  # made by another ingest
                raise


def check_rules(table: str, opened: DeltaTable) -> None:
    """Check that another tool gave a table no rules for new rows.

    Raises: InputError, as `ingest` could not keep them.
    """
    names = schema_of(TABLE).names
    others = [x for x in opened.schema().fields if x.name not in names]
    rules = [x.name for x in others if x.metadata or not x.nullable]
    properties = opened.metadata().configuration
    rules += [x for x in properties if x.startswith("delta.constraints.")]
    if rules:
        reason = "it has rules for new rows, which `ingest` cannot keep"
        raise InputError(f"{table}: {reason}: {', '.join(rules)}")


def aside(table: str) -> str:
    """Return where the quarantine of a table is."""
    return f"{absolute(table)}/_quarantine"


def parts_of(table: str) -> Iterator[tuple[str, DeltaTable]]:
    """Yield a table, and its quarantine if nobody has removed that.

    Raises: as open_table.
    """
    yield absolute(table), open_table(table)
    if DeltaTable.is_deltatable(aside(table)):
        yield aside(table), open_delta(aside(table))


# ==== Commits ================================================================


def commit(where: str, opened: DeltaTable, files: Sequence[Any]) -> None:
    """Add files to a table as it was opened, all at once.

    Raises: BusyError if files were added so since then, or the table has
    changed so that it may lack what it had, or a file is gone; InputError if
    Delta cannot write the table.
    """
    busy = BusyError(
        f"another ingest, compact or expire is at work on {where}; run this"
        " one again"
    )
    # What another tool may have done while the files were written
    infos = files_at(where).get_file_info([x.path for x in files])
    if any(info.type == fs.FileType.NotFound for info in infos):
        raise busy
    if not is_kept(open_delta(where), opened.version(), stamp_of(opened)):
        raise busy

    now = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = [
        AddAction(x.path, x.bytes, {"day": x.day}, now, True, x.stats)
        for x in files
    ]
    # Of two commits that began with one snapshot and set this, Delta refuses
    # the second, so that none adds what the other has added
    ingest = Transaction("ingest", now)
    properties = CommitProperties(app_transactions=[ingest])
    try:
        opened.create_write_transaction(
            actions, "append", opened.schema(), commit_properties=properties
        )
    except CommitFailedError as error:
        if str(error).startswith(CONFLICT):
            raise busy from error
        raise InputError(f"{where}: Delta cannot write it: {error}") from None


def stamp_of(opened: DeltaTable) -> int | None:
    """Return when the latest commit was made; None if it does not say so."""
    commits = opened.history(1)
    return commits[0].get("timestamp") if commits else None


def is_kept(opened: DeltaTable, version: int, stamp: int | None) -> bool:
    """Return whether a table has what it had at a version of some time.

    What was dropped on purpose counts as if it was there.  If the log does
    not tell, it is not kept.
    """
    later = opened.version() - version
    if later <= 0:
        return later == 0 and stamp_of(opened) == stamp
    # The last commit is first; one that says nothing of itself is not listed
    commits = opened.history(later + 1)
    return (
        len(commits) == later + 1
        and commits.pop().get("timestamp") == stamp
        and all(map(is_keeping, commits))
    )


def is_keeping(commit: dict[str, Any]) -> bool:
    """Return whether a commit kept all rows, or dropped some on purpose."""
    operation = commit.get("operation")
    mode = commit.get("operationParameters", {}).get("mode")
    return operation in KEEPING or (operation, mode) == ("WRITE", "Append")
