"""sbus_spark: keep, show, check and repeat the traffic of a bus, on Spark.

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (`sbus record`), and a table the Delta table that ingest makes of
captures.  Each step is a function, and a command.

    inputs      what needs no library: errors, and texts of arguments
    messages    columns, and which lines of a capture are messages
    matching    which keys patterns select
    source      the format `sbus` for Spark's own programs
    marks       which segments a table has
    table       ingest, compact, expire, and those who read
    repairs     lines that were mended, and tables of version 0.2
    states      what a table has, and what it lacks
    report      the traffic in a table, in numbers and as a page
    events      the lines of traces as a DataFrame
    audits      the deliveries that were expected, beside the actual ones
    sessions    Java, and the Spark session of the command line
    cli         the command line

A module imports only those above it, and of the repository beside this
package sbus (what a pattern selects) and sbus_client (Client).

Licence: ISC, see LICENSE.
"""

import importlib
import importlib.util
import os
import sys
from typing import Any

for name in "deltalake", "pyspark":
    if not importlib.util.find_spec(name):
        what = f"sbus_spark: {name} is not installed: pip install '.[spark]'"
        program = os.path.basename(os.path.normpath(sys.argv[0]))
        if program in ("sbus-spark", "-m", "__main__.py", "sbus_spark"):
            print(what, file=sys.stderr)  # its user is to see no traceback
            sys.exit(2)
        raise ModuleNotFoundError(what, name=name)

__all__ = [
    "InputError",
    "JavaError",
    "PipelineError",
    "Selection",
    "audit",
    "compact",
    "expire",
    "find_java",
    "ingest",
    "main",
    "page",
    "read_table",
    "register",
    "replay",
    "run",
    "session",
    "summarize",
    "summary",
]
# Where they are; a module is imported once it is needed, as Spark is large
MODULES = {
    "audits": ("audit", "summary"),
    "cli": ("main", "run"),
    "inputs": ("InputError", "PipelineError", "Selection"),
    "report": ("page", "summarize"),
    "sessions": ("JavaError", "find_java", "session"),
    "source": ("register",),
    "table": ("compact", "expire", "ingest", "read_table", "replay"),
}


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in (module, *names):
            found = importlib.import_module(f"{__name__}.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
