"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException as SparkException

from sbus_client import Client
from sbus_client import SbusError as ClientError

from .blocks import check_traces
from .breaches import Breach
from .common import InputError, PipelineError, check_there, printable
from .launch import WAITING, WORKING, context, session, stop
from .playback import in_order, replay
from .render import page
from .report import summarize, summarize_here
from .table import NO_TABLE, expire, ingest, read_table
from .verdict import Audit

SHOWN_MAX = 1_000  # breaches; -o writes all


def run_audit(options: argparse.Namespace) -> int:
    """Print what is wrong with traces; return 1 if anything is."""
    check_traces(options.trace)
    if options.output and os.path.exists(options.output):
        raise InputError(f"{options.output}: it is there already")
    found = Audit(context(), options.trace, is_running=options.running)
    counts, shown = found.summary(SHOWN_MAX)
    if options.output:
        found.rows(session()).write.json(options.output)
    if options.json:
        rows = [breach._asdict() for breach in shown]
        print(json.dumps({"counts": counts, "breaches": rows}))
    else:
        for breach in shown:
            print(describe(breach))
        total = sum(counts.values())
        if total > len(shown):
            print(f"and {total - len(shown)} more; -o DIR writes all")
        told = (f"{name}: {count}" for name, count in counts.items() if count)
        print(", ".join(told) or "every delivery was owed and made")
    return 1 if any(counts.values()) else 0


def describe(breach: Breach) -> str:
    """Return a breach as a line of text."""
    known = ("n", "m", "publisher", "c", "key")
    about = " ".join(
        f"{name}={value!r}"
        for name, value in breach._asdict().items()
        if name in known and value is not None
    )
    is_told = not breach.file or breach.file in breach.detail
    where = "" if is_told else f" ({breach.file})"
    return printable(f"{breach.breach} {about}: {breach.detail}{where}")


def run_ingest(options: argparse.Namespace) -> int:
    """Bring new segments into a table; a signal ends --follow."""
    if "://" not in options.capture and not os.path.isdir(options.capture):
        raise InputError(f"{options.capture}: there is no such directory")
    are_here = "://" not in options.capture + options.table
    spark = session(java_options=WAITING if are_here else WORKING)
    where = options.capture, options.table
    lines, bad = ingest(spark, *where, options.until)
    print(f"{lines - bad} messages ingested, {bad} lines quarantined")
    return 0


def run_expire(options: argparse.Namespace) -> int:
    """Drop old days of a table."""
    check_there([options.table], NO_TABLE)
    expire(session(), options.table, options.before)
    print(f"the days before {options.before} are dropped")
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write a report of a table."""
    check_there([options.table], NO_TABLE)
    is_here = "://" not in options.table
    if is_here:
        summary = summarize_here(context(), options.table)
    else:
        summary = summarize(read_table(session(), options.table))
    if options.json:
        print(json.dumps(summary))
        return 0
    name = os.path.relpath(options.table) if is_here else options.table
    text = page(summary, name)
    Path(options.output).write_text(text, "utf-8")
    print(f"the report is {Path(options.output).absolute()}")
    return 0


def run_replay(options: argparse.Namespace) -> int:
    """Publish the messages of a table again."""
    check_there([options.table], NO_TABLE)
    texts = [os.fsencode(text).decode("latin-1") for text in options.pattern]
    with Client(options.address) as bus:
        table = read_table(session(), options.table)
        count = replay(in_order(table, texts), bus, options.speed)
    print(f"{count} messages published")
    return 0


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus_spark: {message}; --help lists the options\n")


def speed(text: str) -> float:
    """Return how many times as fast to replay."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def day(text: str) -> datetime.date:
    """Return a day."""
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no day as 2026-11-22")


def path(text: str) -> str:
    """Return where something is, as Spark is to be told."""
    if re.search(r"[][{}*?\\]", text):
        told = f"{text!r}: Spark takes []{{}}*?\\ for a pattern; rename it"
        raise argparse.ArgumentTypeError(told)
    return text if "://" in text else os.path.abspath(text)


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbus_spark",
        description="Keep and check the traffic of a bus, on Spark.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Any, what: str) -> Any:
        name = run.__name__.removeprefix("run_")
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        return added.add_argument

    a_table: dict[str, Any] = {"metavar": "TABLE", "type": path}
    add = command(run_audit, "check that a bus did what it was to do")
    help_text = "what sbus.py --trace has written, or a directory of it"
    add("trace", metavar="TRACE", nargs="+", type=path, help=help_text)
    help_text = "write all breaches there, as JSON; it must not be there yet"
    add("-o", "--output", metavar="DIR", type=path, help=help_text)
    add("--json", action="store_true", help="print JSON")
    help_text = "the bus still runs: that no stop is there is no breach"
    add("--running", action="store_true", help=help_text)
    add = command(run_ingest, "bring the segments of a capture into a table")
    help_text = "the directory that `sbus record` writes to"
    add("capture", metavar="CAPTURE", type=path, help=help_text)
    add("table", **a_table, help="a directory, made if it is not there")
    event = threading.Event()
    help_text = "go on until interrupted"
    add(
        "--follow",
        dest="until",
        action="store_const",
        const=event,
        help=help_text,
    )
    add = command(run_expire, "drop the old days of a table")
    add("table", **a_table, help="what ingest has made")
    help_text = "the first day that stays, as 2026-11-22"
    add("--before", metavar="DATE", type=day, required=True, help=help_text)
    add = command(run_report, "show the traffic in a table")
    add("table", **a_table, help="what ingest has made")
    help_text = "the page to write, else report.html here"
    add(
        "-o", "--output", metavar="FILE", default="report.html", help=help_text
    )
    add("--json", action="store_true", help="print JSON, write no page")
    add = command(run_replay, "publish the messages of a table again")
    add("table", **a_table, help="what ingest has made")
    add("-a", "--address", help="the bus")
    help_text = "only what it selects; may be given more than once"
    add("--pattern", metavar="P", action="append", default=[], help=help_text)
    help_text = "times as fast as it was; as fast as possible without"
    add("--speed", metavar="X", type=speed, help=help_text)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    return option_parser().parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit status.

    0 is success, 1 an error or a breach.
    """
    try:
        status: int = options.run(options)
    except (PipelineError, ClientError, OSError) as error:
        print(f"sbus_spark: {error}", file=sys.stderr)
        return 1
    except (SparkException, Py4JJavaError) as error:
        print(f"sbus_spark: {reason_of(error)}", file=sys.stderr)
        return 1
    return status


def reason_of(error: Exception) -> str:
    """Return as one line why Spark failed: the cause, and what it stopped."""
    told = str(error)
    if isinstance(error, Py4JJavaError):
        told = str(error.java_exception.getMessage())
    causes = re.findall(r"^Caused by: (.*)", str(error), re.MULTILINE)
    return "; ".join([*causes[-1:], told.splitlines()[0]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line in a session of its own."""
    options = parse(arguments)
    mask = os.umask(0o077)  # a report names keys, which may be private
    logging.disable()  # what goes wrong is raised as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a slow end
            return run_and_stop(options)
    finally:
        logging.disable(logging.NOTSET)
        os.umask(mask)


def run_and_stop(options: argparse.Namespace) -> int:
    """Run the command line, and end the session that it has started.

    Return the exit status, 130 after an interruption.  The work has a thread
    of its own, which an interruption does not reach: what is between us and
    Java would not survive an exception halfway.
    """
    until = getattr(options, "until", None)
    if until:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: until.set())
    work: Future[int] = Future()
    threading.Thread(target=do, args=(work, options), daemon=True).start()
    try:
        return work.result()
    except KeyboardInterrupt:
        sys.stderr = io.StringIO()  # the work tells there how it fails now
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop()


def do(work: Future[int], options: argparse.Namespace) -> None:
    """Run the command line; keep its status, or the error that it raises."""
    try:
        work.set_result(run(options))
    except BaseException as error:
        work.set_exception(error)
