"""sbus_spark: keep, show, check and repeat the traffic of a bus, on Spark.

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (`sbus record`), and a table the Delta table that ingest makes of
captures.  Each step is a function, and a command.

    inputs      what needs no library: errors, and what arguments mean
    messages    columns, and which lines of a capture are messages
    matching    which keys patterns select
    captures    the segments that recorders wrote
    files       the Parquet files of a table, and their rows
    tables      a Delta table, and the commits that change it
    known       which segments need not be looked at again
    upkeep      compact and expire
    tasks       what executors do for an ingest
    intake      ingest: captures to tables, each message once
    reading     read_table, show and replay
    source      for Spark's own programs
    states      what a table has, and what it lacks
    views       queries of files of SQL, by their names
    report      the traffic in a table, in numbers and as a page
    traces      the lines of traces as tables of Arrow
    events      these summed up as rows for Spark
    audits      the deliveries that were expected, beside the actual ones
    sessions    Java, and the Spark session of the command line
    console     what is said beside the output
    commands    what the command line can do
    options     what a command line may say
    cli         the command line

A module imports only those above it, and of the repository beside this
package sbus (what a pattern selects) and sbus_client (Client).

Licence: ISC, see LICENSE.
"""

import importlib
from typing import Any

# Where names are; a module is imported once it is needed, as Spark is large
MODULES = {
    "audits": ("audit", "summary"),
    "cli": ("main", "run"),
    "inputs": ("BusyError", "InputError", "PipelineError", "Selection"),
    "intake": ("ingest", "rounds"),
    "matching": ("selected",),
    "reading": ("read_table", "replay"),
    "report": ("page", "summarize"),
    "sessions": ("JavaError", "find_java", "session"),
    "source": ("read_capture", "register"),
    "upkeep": ("compact", "expire"),
}
__all__ = [name for names in MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in (module, *names):
            value = importlib.import_module(f"{__name__}.{module}")
            return value if name == module else getattr(value, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
