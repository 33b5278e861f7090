"""Files: the Parquet files of a Delta table, and their rows.

Delta's log has of each file the least and the greatest value of some columns,
its statistics.  They say which files need not be read, so that a look for a
few messages is cheap in a table of any size.  Another tool may leave them
out: such a file may have anything.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import DeltaTable
from pyarrow import fs

from .inputs import UTC, InputError
from .messages import COLUMNS, schema_of

# Those of a table, and of its quarantine
STORED = schema_of(f"{COLUMNS}, segment string, line string")
TEXT_MAX = 32  # characters of a least or greatest value
LAST_LETTER = "\U0010ffff"
MILLISECOND = datetime.timedelta(milliseconds=1)  # to which the log cuts times


def files_at(where: str) -> fs.FileSystem:
    """Return the files in a folder, whose paths begin there."""
    system, folder = fs.FileSystem.from_uri(where)
    return fs.SubTreeFileSystem(folder, system)


def write_file(
    where: str, day: datetime.date, rows: pa.Table, counted: Sequence[str]
) -> dict[str, Any]:
    """Write rows of a day to a file of a new name.

    Return what a commit needs, with the statistics of the *counted* columns.
    """
    system = files_at(where)
    system.create_dir(f"day={day}")
    path = f"day={day}/{uuid.uuid4()}.parquet"
    pq.write_table(rows, path, filesystem=system, compression="zstd")

    ends = {name: pc.min_max(rows[name]).as_py() for name in counted}
    stats = {
        "numRecords": len(rows),
        "minValues": {x: bound(ends[x]["min"], "") for x in counted},
        "maxValues": {x: bound(ends[x]["max"], LAST_LETTER) for x in counted},
        "nullCount": {x: rows[x].null_count for x in rows.column_names},
    }
    return {
        "path": path,
        "day": str(day),
        "stats": json.dumps(stats),
        "rows": len(rows),
        "bytes": system.get_file_info(path).size,
    }


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
    """Return what the log says of the files of a table, a row for each.

    Raises: InputError if they are not in its folder.
    """
    actions = opened.get_add_actions(flatten=True)
    files = pa.RecordBatchReader.from_stream(actions).read_all()
    if pc.any(pc.match_substring_regex(files["path"], "^/|://")).as_py():
        reason = "its files are another table's, as those of a shallow clone"
        raise InputError(f"{opened.table_uri}: {reason}")
    return files


def with_one_of(files: pa.Table, name: str, values: Any) -> pa.Table:
    """Return the files that may have one of some values in a column."""
    if f"min.{name}" not in files.column_names or not len(values):
        return files
    has_ends = pc.and_(
        files[f"min.{name}"].is_valid(), files[f"max.{name}"].is_valid()
    )
    known = files.filter(has_ends)
    low, high = known[f"min.{name}"], known[f"max.{name}"]
    if name == "time":
        high = pc.add(high, pa.scalar(MILLISECOND))

    # There is one if fewer are below the least than up to the greatest
    points = np.unique(values.to_numpy(zero_copy_only=False))
    below = np.searchsorted(points, low.to_numpy())
    is_in = below < np.searchsorted(points, high.to_numpy(), "right")
    unknown = files.filter(pc.invert(has_ends))
    return pa.concat_tables([unknown, known.filter(pa.array(is_in))])


def rows_in(
    where: str,
    files: pa.Table,
    columns: Sequence[str],
    wanted: pc.Expression | None = None,
) -> pa.Table:
    """Return columns of the wanted rows in some files of a table.

    What is *wanted* goes by these columns.
    """
    system = files_at(where)
    schema = pa.schema([STORED.field(name) for name in columns])
    parts = [schema.empty_table()]
    for path in files["path"].to_pylist():
        with pq.ParquetFile(path, filesystem=system) as file:
            for batch in file.iter_batches(columns=columns):
                rows = pa.Table.from_batches([batch]).select(columns)
                # Another tool may have written other types of text and time,
                # which Arrow's own datasets cannot filter
                rows = rows.cast(schema)
                parts.append(rows if wanted is None else rows.filter(wanted))
    return pa.concat_tables(parts)


def count_rows(where: str, files: pa.Table) -> int:
    """Return how many rows files have; without statistics they are opened."""
    system = files_at(where)
    uncounted = files.filter(files["num_records"].is_null())["path"]
    counts = [
        pq.read_metadata(path, filesystem=system).num_rows
        for path in uncounted.to_pylist()
    ]
    return sum(counts) + (pc.sum(files["num_records"]).as_py() or 0)


def last_times(
    where: str, files: pa.Table, until: datetime.datetime
) -> dict[str, datetime.datetime]:
    """Return when each recorder wrote its last message.

    Later ones than *until* do not count.  It has a file in memory at a time.
    """
    latest: dict[str, datetime.datetime] = {}
    for at in range(len(files)):
        file, early = files.slice(at, 1), pc.field("time") <= until
        rows = rows_in(where, file, ["recorder", "time"], early)
        runs = rows.group_by("recorder", use_threads=False)
        for run in runs.aggregate([("time", "max")]).to_pylist():
            name, time = run["recorder"], run["time_max"]
            latest[name] = max(time, latest.get(name, time))
    return latest
