"""sbus_spark: keep, show, check and repeat the traffic of a bus, on Spark.

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (`sbus record`), and a table the Delta table that ingest makes of
captures.  Each step is a function, and a command.

    messages    columns, and which lines of a capture are messages
    matching    which keys patterns select
    source      the format `sbus` for Spark's own programs
    table       ingest, compact, expire, read_table, replay
    report      the traffic in a table, in numbers and as a page
    events      the lines of traces as a DataFrame
    audit       the deliveries that were expected, beside the actual ones
    session     Java, and the Spark session of the command line
    cli         the command line

A module imports only those above it, and of the repository beside this
package sbus (what a pattern selects) and sbus_client (Client).

Licence: ISC, see LICENSE.
"""

import os
import sys

try:
    import deltalake  # noqa: F401
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    what = f"sbus_spark: {error.name} is not installed: pip install '.[spark]'"
    if os.path.basename(sys.argv[0]) in ("sbus-spark", "-m", "__main__.py"):
        sys.exit(what)  # a command, whose user is to see no traceback
    raise ModuleNotFoundError(what, name=error.name) from None
from .audit import audit, summary
from .cli import main, run
from .messages import InputError, PipelineError
from .report import page, summarize
from .session import JavaError, find_java, session
from .source import register
from .table import compact, expire, ingest, read_table, replay

__all__ = [
    "InputError",
    "JavaError",
    "PipelineError",
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
