"""The command line."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from .inputs import (
    InputError,
    PipelineError,
    absolute,
    positive,
    printable,
)

SHOWN_MAX = 1_000  # breaches; -o writes all
# In what Spark tells of an error: one of ours, else its innermost cause
CAUSES = (
    r"InputError: (.*)",
    r"^(?:\w*Error|\w+\.[\w.]+|Caused by): (.*)",
)


# Each command returns its exit status.  Its docstring is its help.
def run_ingest(options: argparse.Namespace) -> int:
    """Add new segments of a capture to a table."""
    until = None
    if options.follow:
        until = threading.Event()
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            signal.signal(number, lambda *_: until.set())
    from . import sessions, table

    where = options.capture, options.table
    how = until, options.clean, note
    start = functools.cache(functools.partial(sessions.session, size=0))
    do = functools.partial(table.do_in_spark, start)
    counts = table.ingest_by(do, *where, *how)
    print("{} messages ingested, {} lines quarantined".format(*counts))
    return 0


def note(text: str) -> None:
    """Say something beside the output."""
    print(f"sbus-spark: {printable(text)}", file=sys.stderr, flush=True)


def run_status(options: argparse.Namespace) -> int:
    """Show what a table has, what it lacks, and what waits."""
    from . import states

    found = states.state(options.table, options.capture)
    lines = [json.dumps(found)] if options.json else states.lines_of(found)
    for line in lines:
        print(printable(line))
    lag, wait = found["lag"], found.get("wait")
    ages = [math.inf if lag is None else lag, wait or 0]
    oldest = max([*ages, *found.get("hidden", {}).values()])
    return 1 if found["gaps"] or oldest > options.max_age else 0


def run_compact(options: argparse.Namespace) -> int:
    """Merge the small files of each day."""
    from . import table

    table.compact(options.table)
    print("the files of each day are compacted")
    return 0


def run_expire(options: argparse.Namespace) -> int:
    """Drop the old days of a table."""
    from . import table

    table.expire(options.table, options.before)
    print(f"the days before {options.before} are dropped")
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write a report of the traffic in a table."""
    from . import report, sessions, table

    table.open_table(options.table)
    output = Path(options.output)
    if not options.json:
        output.open("a").close()  # before Spark works for nothing
    messages = table.read_table(sessions.session(), options.table)
    found = report.summarize(messages)
    if options.json:
        print(json.dumps(found))
    else:
        output.write_text(report.page(found, options.table), "utf-8")
        print(f"the report is {output.absolute()}")
    return 0


def run_audit(options: argparse.Namespace) -> int:
    """Check that a bus delivered what it should."""
    from . import audits, events, sessions

    if options.output and os.path.exists(options.output):
        raise InputError(f"{options.output}: it is there already")
    spark = sessions.session(size=events.size_of(options.trace))
    found = audits.audit(spark, options.trace, options.running)
    counts = audits.summary(found)
    undecided = counts.pop("undecided", 0)
    if options.output:
        found.write.json(options.output)
    breaches = found.filter("breach <> 'undecided'")
    shown = breaches.orderBy("file", "n").limit(SHOWN_MAX).collect()
    if options.json:
        rows = [row.asDict() for row in shown]
        told = {"counts": counts, "undecided": undecided, "breaches": rows}
        print(json.dumps(told))
        return 1 if counts else 0
    for row in shown:
        print(printable(describe(row)))
    total = sum(counts.values())
    if total > len(shown):
        print(f"and {total - len(shown)} more; -o DIR writes all")
    each = ", ".join(f"{name}: {counts[name]}" for name in counts)
    closing = each or "every delivery was owed and made"
    if undecided:
        closing += f"; undecided: {undecided} that were owed, not yet made"
    print(closing)
    return 1 if counts else 0


def describe(row: Any) -> str:
    """Return a breach as a line of text."""
    names = ("n", "m", "publisher", "c", "key")
    about = [f"{x}={row[x]!r}" for x in names if row[x] is not None]
    return f"{row.breach} {' '.join(about)}: {row.detail} ({row.file})"


def run_replay(options: argparse.Namespace) -> int:
    """Publish the messages of a table again."""
    from . import sessions, table

    table.open_table(options.table)
    texts = [os.fsencode(text).decode("latin-1") for text in options.pattern]
    messages = table.read_table(sessions.session(), options.table)
    count = table.replay(messages, options.address, texts, options.speed)
    print(f"{count} messages published")
    return 0


def run_prepare(_: argparse.Namespace) -> int:
    """Halve what a start of Spark takes, by a file of its classes."""
    from . import sessions

    archive = sessions.write_archive()
    size = archive.stat().st_size >> 20
    print(f"Spark's classes are in {archive}, {size} MiB")
    return 0


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus-spark: {message}; --help lists the options\n")


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbus-spark",
        description="Keep, show, check and repeat the traffic of a bus.",
        epilog="`sbus-spark COMMAND --help` gives an example.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Callable[..., int], example: str, **places: str) -> Any:
        """Let run, whose docstring says what it does, be a command."""
        name, what = run.__name__[4:], str(run.__doc__)
        told = f"example: sbus-spark {name} {example}"
        added = commands.add_parser(name, help=what, epilog=told)
        added.description = what
        added.set_defaults(run=run)
        add = added.add_argument
        for place, told in places.items():
            add(place, metavar=place.upper(), type=absolute, help=told)
        return add

    made = {"table": "a table that ingest made"}
    recorded, new = "what `sbus record` writes", "created if it is missing"
    example = "capture table --follow"
    add = command(run_ingest, example, capture=recorded, table=new)
    add("--follow", action="store_true", help="go on until interrupted")
    add("--clean", action="store_true", help="remove ingested segments")

    add = command(run_status, "table capture --max-age 600", **made)
    add("capture", metavar="CAPTURE", nargs="?", type=absolute, help=recorded)
    what = "exit with status 1 if something is older"
    add(
        "--max-age",
        metavar="SECONDS",
        type=positive,
        default=math.inf,
        help=what,
    )
    add("--json", action="store_true", help="print JSON")

    command(run_compact, "table", **made)

    add = command(run_expire, "table --before 2026-11-22", **made)
    what, kind = "the first day to keep: 2026-11-22", date.fromisoformat
    add("--before", metavar="DAY", type=kind, required=True, help=what)

    add = command(run_report, "table -o traffic.html", **made)
    what = "the page to write (report.html)"
    add("-o", "--output", metavar="FILE", default="report.html", help=what)
    add("--json", action="store_true", help="print JSON, write no page")

    add = command(run_audit, "my.trace")
    what = "a file of sbus.py --trace, or a folder of them"
    add("trace", metavar="TRACE", nargs="+", type=absolute, help=what)
    what = "write all breaches as JSON to this new folder"
    add("-o", "--output", metavar="DIR", type=absolute, help=what)
    add("--json", action="store_true", help="print JSON")
    what = "the bus still runs, so a missing stop is no breach"
    add("--running", action="store_true", help=what)

    example = "table -a /tmp/other.bus --pattern 'a/*' --speed 1"
    add = command(run_replay, example, **made)
    add("-a", "--address", required=True, help="the bus")
    what = "only keys that it selects; may be repeated"
    add("--pattern", metavar="P", action="append", default=[], help=what)
    what = "X times as fast as recorded (as fast as possible)"
    add("--speed", metavar="X", type=positive, help=what)

    command(run_prepare, "")
    return parser


def run(arguments: Sequence[str] | None) -> int:
    """Do what the command line asks for; return the exit status.

    0 is success, 1 a breach, 2 an error.
    """
    options = option_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except Exception as error:
        if not isinstance(error, known_errors()):
            raise
        text = str(error) or repr(error)
        found = [re.findall(cause, text, re.M) for cause in CAUSES]
        # Spark tells the plan of a query after the reason
        told = next((one[-1] for one in found if one), text.splitlines()[0])
        note(told)
        return 2


def known_errors() -> tuple[type[Exception], ...]:
    """Return the errors of which one line tells all that a user needs."""
    from deltalake.exceptions import DeltaError
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ours = (PipelineError, OSError, UnicodeError)
    return *ours, DeltaError, Py4JError, ArrowException, PySparkException


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 130 if interrupted."""
    os.umask(0o077)  # what was recorded may be private
    logging.disable()  # what goes wrong is raised as well
    warnings.simplefilter("ignore")
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if "pyspark.sql" in sys.modules:
            from pyspark.sql import SparkSession

            if spark := SparkSession.getActiveSession():
                spark.stop()
