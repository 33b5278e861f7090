"""Tables: what ingest makes, how it changes, and its upkeep.  Without Spark.

A table is a Delta table in folders of days: the columns of `messages`, and
`day`.  Another one, `_quarantine`, has the lines that were no messages, in
folders of the days on which they were found.
"""

from __future__ import annotations

import datetime
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.dataset as ds  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs

from .inputs import UTC, BusyError, InputError, absolute
from .messages import COLUMNS, schema_of

TABLE = f"{COLUMNS}, day date"
QUARANTINE = "segment string, line string, day date"
TEXT_MAX = 32  # characters of a least or greatest value
LAST_LETTER = "\U0010ffff"
# Delta's log has milliseconds of times, cut
MILLISECOND = 1_000  # microseconds
READERS_HOURS = 24  # for which a reader may use a snapshot
RETENTION = {"delta.logRetentionDuration": f"interval {READERS_HOURS} hours"}
# Of two commits that began with one snapshot and set this, Delta refuses the
# second, so that none adds what the other has added
INGEST = "ingest"
COMPACTED = "compacted"  # its value says when, in milliseconds
# After these a table has all that it had, but for what was dropped on purpose
KEEPING = re.compile(
    "OPTIMIZE|VACUUM.*|DELETE|UPDATE|SET TBLPROPERTIES|ADD COLUMNS?|WRITE"
)


# ==== Tables =================================================================


def open_table(table: str, version: int | None = None) -> DeltaTable:
    """Return a table as it is now, or was at a version.

    Raises: InputError if there is none, or one that ingest did not make.
    """
    where = absolute(table)
    files, folder = fs.FileSystem.from_uri(where)
    is_file = files.get_file_info(folder).type == fs.FileType.File
    if is_file or not DeltaTable.is_deltatable(where):
        raise InputError(f"{table}: there is no table; `ingest` makes one")
    opened = open_delta(where, version)
    if opened.protocol().min_reader_version > 1:
        reason = "it has features that this cannot read, as deletion vectors"
        raise InputError(f"{table}: {reason} or mapped columns")
    kinds = {field.name: field.type for field in opened.schema().fields}
    is_ours = opened.metadata().partition_columns == ["day"]
    for field in Schema.from_arrow(schema_of(TABLE)).fields:
        is_ours = is_ours and kinds.pop(field.name, None) == field.type
    if not is_ours:
        raise InputError(f"{table}: it is no table that `ingest` made")
    for field in opened.schema().fields:
        if field.name in kinds and not field.nullable:
            raise InputError(f"{table}: column {field.name} may not be null")
    return opened


def open_delta(where: str, version: int | None = None) -> DeltaTable:
    """Return a table of Delta.  Raises: InputError if its log is broken."""
    try:
        return DeltaTable(where, version)
    except (DeltaError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{where}: its log is broken: {reason}") from None


def make_table(table: str) -> None:
    """Make a table, unless there is one.

    Raises: InputError if something else is there.
    """
    if "://" not in table and re.search("%[0-9A-Fa-f]{2}", table):
        raise InputError(f"{table}: Delta reads % in a path as an escape")
    files, folder = fs.FileSystem.from_uri(table)
    if files.get_file_info(folder).type == fs.FileType.File:
        raise InputError(f"{table}: it is a file; name a new folder")
    listing = files.get_file_info(fs.FileSelector(folder, True))
    names = {file.base_name for file in listing}
    if DeltaTable.is_deltatable(table):
        open_table(table)
    elif names - {"_delta_log", "_quarantine"}:
        reason = "something other than a table is there; name a new folder"
        raise InputError(f"{table}: {reason}")
    for where, columns in (aside(table), QUARANTINE), (table, TABLE):
        schema = Schema.from_arrow(schema_of(columns))
        DeltaTable.create(
            where, schema, "ignore", "day", configuration=RETENTION
        )


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


def commit(
    where: str, opened: DeltaTable, files: Sequence[Any], name: str
) -> None:
    """Add files to a table as it was opened, all at once, under a name.

    Raises: BusyError if another commit of that name was made since then, or
    the table has changed so that the files may be there already.
    """
    now = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = [
        AddAction(x.path, x.bytes, {"day": x.day}, now, True, x.stats)
        for x in files
    ]
    properties = CommitProperties(app_transactions=[Transaction(name, now)])
    system, folder = fs.FileSystem.from_uri(where)
    infos = system.get_file_info([f"{folder}/{x.path}" for x in files])
    now_there = open_delta(where)
    try:
        # What another tool may have done while the files were written
        if any(info.type == fs.FileType.NotFound for info in infos):
            raise CommitFailedError("a file was removed")
        if not is_kept(now_there, opened.version()):
            raise CommitFailedError("the table was restored")
        opened.create_write_transaction(
            actions, "append", opened.schema(), commit_properties=properties
        )
    except CommitFailedError as error:
        raise BusyError(
            f"another ingest, compact or expire is at work on {where}; run"
            " this one again"
        ) from error


def stamp_of(opened: DeltaTable) -> int | None:
    """Return when the latest commit was made; None if it does not say so."""
    return next((x["timestamp"] for x in opened.history(1)), None)


def is_kept(opened: DeltaTable, version: int, stamp: Any = None) -> bool:
    """Return whether a table has what it had at a version.

    What was dropped on purpose counts as if it was there.  With a *stamp*,
    the version must have that.  If the log does not tell, it is not kept.
    """
    count = opened.version() - version
    commits = opened.history(count + 1) if count >= 0 else []
    if count < 0 or len(commits) <= count:
        return count == 0 and stamp is None
    is_kept = stamp in (None, commits.pop()["timestamp"])
    for commit in commits:
        mode = commit.get("operationParameters", {}).get("mode", "Append")
        is_kept &= bool(KEEPING.fullmatch(commit.get("operation", "")))
        is_kept &= mode == "Append"
    return is_kept


# ==== Files ==================================================================


def write_file(
    where: str, day: datetime.date, rows: pa.Table, counted: Sequence[str]
) -> dict[str, Any]:
    """Write rows of a day to a file of a new name; return what a commit needs.

    With the least and greatest values of some columns, readers skip files.
    """
    files, folder = fs.FileSystem.from_uri(where)
    files.create_dir(f"{folder}/day={day}")
    path = f"day={day}/{uuid.uuid4()}.parquet"
    whole = f"{folder}/{path}"
    pq.write_table(rows, whole, filesystem=files, compression="zstd")
    ends = {name: pc.min_max(rows[name]).as_py() for name in counted}
    stats = {
        "numRecords": len(rows),
        "minValues": {x: bound(ends[x]["min"], "") for x in counted},
        "maxValues": {x: bound(ends[x]["max"], LAST_LETTER) for x in counted},
        "nullCount": {x: rows[x].null_count for x in rows.column_names},
    }
    size = files.get_file_info(whole).size
    about = {"path": path, "day": str(day), "stats": json.dumps(stats)}
    return {**about, "rows": len(rows), "bytes": size}


def bound(value: Any, after: str) -> Any:
    """Return a least or greatest value as Delta has it.

    *after* follows a text that is cut.
    """
    if isinstance(value, str) and len(value) > TEXT_MAX:
        return value[:TEXT_MAX] + after
    if isinstance(value, datetime.datetime):
        text = value.astimezone(UTC).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")
    return value


def files_of(opened: DeltaTable) -> pa.Table:
    """Return what the log says of the files of a table, a row for each."""
    return pa.table(opened.get_add_actions(flatten=True))


def with_one_of(files: pa.Table, name: str, values: Any) -> pa.Table:
    """Return the files that may have one of some values in a column."""
    if f"min.{name}" not in files.column_names or not len(values):
        return files
    is_known = files[f"min.{name}"].is_valid()
    known = files.filter(is_known)
    low, high = known[f"min.{name}"], known[f"max.{name}"]
    if name == "time":
        values, low, high = (x.cast(pa.int64()) for x in (values, low, high))
        high = pc.add(high, MILLISECOND)
    if not isinstance(values, pa.ChunkedArray):
        values = pa.chunked_array([values])
    points = np.unique(values.to_numpy())
    # The first value that is not below the least: is it above the greatest?
    places = np.searchsorted(points, low.to_numpy())
    near = points[np.minimum(places, len(points) - 1)]
    is_in = (places < len(points)) & (near <= high.to_numpy())
    unknown = files.filter(pc.invert(is_known))
    return pa.concat_tables([unknown, known.filter(pa.array(is_in))])


def rows_in(
    where: str, files: pa.Table, columns: Sequence[str], wanted: Any = None
) -> pa.Table:
    """Return columns of the wanted rows in some files of a table."""
    system, folder = fs.FileSystem.from_uri(where)
    paths = [f"{folder}/{path}" for path in files["path"].to_pylist()]
    schema = schema_of(f"{COLUMNS}, segment string, line string")
    rows = ds.dataset(paths, schema, "parquet", system)
    return rows.to_table(columns, wanted)
