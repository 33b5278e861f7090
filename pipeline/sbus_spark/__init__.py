"""sbus_spark: keep, look at, check and repeat the traffic of a bus, on Spark.

    python3 pipeline/sbus_spark audit TRACE...
    python3 pipeline/sbus_spark ingest CAPTURE TABLE [--follow]
    python3 pipeline/sbus_spark expire TABLE --before DATE
    python3 pipeline/sbus_spark report TABLE [-o report.html] [--json]
    python3 pipeline/sbus_spark replay TABLE -a ADDRESS

A trace is what a server did (sbus.py --trace), a capture what one subscriber
heard (`sbus record`), and a table the Parquet files that ingest
makes of captures.  Each step is a function from DataFrame to DataFrame, and
its docstring lists the columns that it returns.

    common      errors, columns, and text for people
    launch      Java, the session, and the archive of code for workers
    lines       the frequent events of a trace to arrays
    events      all events of a trace, in pieces
    kept        the pieces of a task, for the jobs after the first
    history     what clients hold and have asked for, event by event
    matching    which patterns select which keys
    owed        to whom each message was to be sent
    accounts    which messages did not reach just these
    breaches    what is wrong, one by one
    blocks      the files of traces, cut at the ends of lines
    book        what the driver puts together of all blocks
    verdict     audit: a trace through all of that
    capture     read_capture: which lines are messages
    segments    the same of files that are here, to Parquet
    table       ingest, expire, read_table
    report      the traffic in a table, in numbers
    render      the page of a report
    playback    replay
    stored      the data source `sbus`: captures and tables
    live        the same: buses, to hear and to publish to
    source      register; what its options ask for
    cli         the command line

A module imports only those above it.  Of the repository beside this package,
only sbus (what a pattern selects) and sbus_client (Client) are imported, and
nothing there imports this package but its tests and demo.py, which use what
is listed below.

Names, beside those of sbus.py: event, a line of a trace, with its number n;
run, what one server did from its start on; interval, from one event to
another, both left out.  Keys and patterns are text in which each code point
is a byte.  It needs PySpark 4.2 and Java 17 or later.

Licence: ISC, see LICENSE.
"""

import os
import sys

try:
    from .capture import read_capture
except ModuleNotFoundError as error:
    if error.name not in ("py4j", "pyspark"):
        raise
    what = "sbus_spark: PySpark is not installed: pip install '.[spark]' in a"
    what += " checkout of sbus"
    if os.path.basename(sys.argv[0]) in ("sbus-spark", "-m"):
        sys.exit(what)  # a command imports this first, before its own file
    raise ModuleNotFoundError(what, name=error.name) from None
from .cli import main, parse, run
from .common import InputError, JavaError, PipelineError
from .launch import find_java, session, write_archive
from .playback import in_order, replay
from .render import page
from .report import summarize
from .source import register
from .table import expire, ingest, read_table
from .verdict import audit

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "JavaError",
    "PipelineError",
    "audit",
    "expire",
    "find_java",
    "in_order",
    "ingest",
    "main",
    "page",
    "parse",
    "read_capture",
    "read_table",
    "register",
    "replay",
    "run",
    "session",
    "summarize",
    "write_archive",
]
