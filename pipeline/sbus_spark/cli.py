"""The command line."""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import functools
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import sbus
from sbus_client import SbusError

from . import inputs
from .inputs import PipelineError, Selection, key_text, printable

if TYPE_CHECKING:
    from .intake import Batch

SHOWN_MAX = 1_000  # breaches; the function `audit` returns all
# In what Spark says of an error: one of ours, or its innermost cause
CAUSES = (
    r"(?:InputError|PipelineError): (.*)",
    r"^(?:\w*Error|\w+\.[\w.$]+|Caused by): (.*)",
)
# What to do about it, by what stands in the text
REMEDIES = {
    "No space left": "make room, and run this again: nothing is lost",
    "OutOfMemoryError|Java heap space": "give Spark more memory than 2g, with"
    " PYSPARK_SUBMIT_ARGS='--driver-memory 8g pyspark-shell'",
    "FILE_NOT_EXIST": "a compaction has removed it: run this again",
    "JAVA_GATEWAY_EXITED": "Java did not start: --verbose shows why",
    "Permission denied": "run this as a user who may",
    "codec can't encode": "set PYTHONUTF8=1, or use --json",
    "Failed to open local file": "if the file has gone, run this again",
}

# ==== Commands ===============================================================
# Each returns its exit status.  Its docstring is its help.  Modules that need
# Spark or Delta are imported where they are used, so that help comes at once.


def run_ingest(options: argparse.Namespace) -> int:
    """Add new segments of a capture to a table."""
    until = until_signal() if options.follow else None
    from . import intake

    remarks: list[str] = []

    def report(batch: Batch) -> None:
        """Print what a round did, and what is missing if that has changed."""
        notify("READY=1\nWATCHDOG=1")
        for remark in batch.remarks:
            if remark not in remarks:
                note(remark)
        remarks[:] = batch.remarks
        if options.follow and batch.segments:
            print(
                "{:,} messages and {:,} bad lines of {:,} segments in"
                " {:.1f} s, the oldest {:,.0f} s old".format(*batch),
                flush=True,
            )

    @functools.cache
    def spark() -> Any:
        """Return a session, once there is something to do."""
        from . import sessions

        return sessions.session(size=0)

    where = options.capture, options.table
    if options.again:
        again = intake.mend(options.table)
        print("{} messages mended, {} lines left quarantined".format(*again))
    counts = intake.ingest(spark, *where, until, options.clean, report)
    print("{} messages ingested, {} lines quarantined".format(*counts))
    if options.follow:
        return 0
    return 1 if remarks or options.strict and counts[1] else 0


def until_signal() -> threading.Event:
    """Return what SIGINT and SIGTERM set from now on."""
    until = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, lambda *_: until.set())
    return until


def run_status(options: argparse.Namespace) -> int:
    """Show what a table has, what it lacks, and what waits."""
    from . import states

    state = states.state(options.table, options.capture)
    if options.openmetrics:
        print(*states.metrics_of(state), sep="\n")
    else:
        print(json.dumps(state, indent=None if options.json else 2))
    is_old = states.age_of(state) > options.max_age
    if is_old:
        note(f"{options.table}: what is oldest is older than --max-age")
    is_missing = any(state.get(name) for name in ("gaps", "torn"))
    return 1 if is_old or is_missing else 0


def run_show(options: argparse.Namespace) -> int:
    """Show the messages of a table, in the order of their times."""
    from . import reading

    form = json_line if options.json else text_line
    for row in reading.rows_of(options.table, selection_of(options)):
        print(form(row))
    return 0


def text_line(row: dict[str, Any]) -> str:
    """Return a message as a line: time, host, key and payload.

    A backslash is doubled, so that it is not taken for that of an escape.
    """
    payload = (row["payload"] or b"").decode("latin-1")
    keys = [x.replace("\\", "\\\\") for x in (row["key"], payload)]
    time = row["time"].isoformat(timespec="microseconds")
    texts = row["host"], *map(key_text, keys)
    return "\t".join([time, *map(printable, texts)])


def json_line(row: dict[str, Any]) -> str:
    """Return a message as a line of a capture."""
    line = {"rec": row["recorder"], "n": row["n"]}
    line["t"] = inputs.nanoseconds(row["time"])
    line |= {name: row[name] for name in ("host", "key", "size")}
    if row["payload"] is not None:
        line["data"] = base64.b64encode(row["payload"]).decode()
    return json.dumps(line, separators=(",", ":"))


def run_compact(options: argparse.Namespace) -> int:
    """Merge the small files of each day."""
    from . import upkeep

    counts = upkeep.compact(options.table)
    print("{} files became {}; {} older ones are removed".format(*counts))
    return 0


def run_expire(options: argparse.Namespace) -> int:
    """Drop the old days of a table."""
    from . import upkeep

    messages, lines = upkeep.expire(options.table, options.before)
    print(
        f"the days before {options.before} are dropped: {messages} messages"
        f" and {lines} lines of the quarantine"
    )
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write a report of the traffic in a table."""
    from . import reading, report, sessions, tables

    # An error comes before Spark starts
    tables.open_table(options.table)
    output = Path(options.output)
    if not options.json:
        output.open("a").close()
    spark = sessions.session()
    selection = selection_of(options)
    messages = reading.read_table(spark, options.table, selection)
    numbers = report.summarize(messages)
    if options.json:
        print(json.dumps(numbers))
    else:
        output.write_text(report.page(numbers, options.table), "utf-8")
        print(f"the report is {output.absolute()}")
    return 0


def run_audit(options: argparse.Namespace) -> int:
    """Check that a bus delivered what it should."""
    from . import audits, events, sessions

    spark = sessions.session(size=events.size_of(options.trace))
    rows = audits.audit(spark, options.trace, options.running)
    rows = audits.chosen(rows, selection_of(options))
    counts = audits.summary(rows)
    undecided = counts.pop("undecided", 0)
    shown = []
    if counts:  # else the query has nothing to find
        breaches = rows.filter("breach <> 'undecided'")
        shown = breaches.orderBy("file", "n").limit(SHOWN_MAX).collect()
    if options.json:
        dicts = [row.asDict() for row in shown]
        result = {"counts": counts, "undecided": undecided, "breaches": dicts}
        print(json.dumps(result))
        return 1 if counts else 0

    for row in shown:
        print(printable(describe(row)))
    total = sum(counts.values())
    if total > len(shown):
        print(f"and {total - len(shown)} more")
    kinds = ", ".join(f"{name}: {counts[name]}" for name in counts)
    closing = kinds or "every delivery was owed and made"
    if undecided:
        closing += f"; undecided: {undecided} that were owed, not yet made"
    print(closing)
    return 1 if counts else 0


def describe(row: Any) -> str:
    """Return a breach as a line of text."""
    about = [
        f"{name}={row[name]}"
        for name in ("n", "m", "publisher", "c")
        if row[name] is not None
    ]
    if row["key"] is not None:
        about.append(f"key={key_text(row['key'])!r}")
    return f"{row.breach} {' '.join(about)}: {row.detail} ({row.file})"


def run_replay(options: argparse.Namespace) -> int:
    """Publish the messages of a table again."""
    from . import reading

    selection = selection_of(options)
    where = options.table, options.address
    count = reading.replay(*where, options.speed, selection)
    print(f"{count} messages published")
    return 0


def run_prepare(_: argparse.Namespace) -> int:
    """Halve what a start of Spark takes, by a file of its classes."""
    from . import sessions

    archive = sessions.write_archive()
    size = archive.stat().st_size >> 20
    print(f"Spark's classes are in {archive}, {size} MiB")
    return 0


# ==== Options ================================================================


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus-spark: {message}; --help lists the options\n")


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbus-spark",
        description="Keep, show, check and repeat the traffic of a bus.",
        epilog="`sbus-spark COMMAND --help` gives an example.  The exit status"
        " is 0; 1 if something was found, as a breach or a gap; 2 if it could"
        " not be done.",
    )
    version = f"sbus-spark {sbus.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Callable[..., int], example: str, **paths: str) -> Any:
        """Let run, whose docstring says what it does, be a command."""
        name, about = run.__name__[4:], str(run.__doc__)
        epilog = f"example: sbus-spark {name} {example}"
        subparser = commands.add_parser(name, help=about, epilog=epilog)
        subparser.description = about
        subparser.set_defaults(run=run)
        for path, help in paths.items():
            add(subparser, path, help, type=inputs.absolute)
        add(subparser, "--verbose", "show all of an error")
        return subparser

    made = {"table": "a table that ingest made"}
    recorded, new = "what `sbus record` writes", "created if it is missing"
    example = "capture table --follow"
    ingest = command(run_ingest, example, capture=recorded, table=new)
    add(ingest, "--follow", "go on until interrupted")
    add(ingest, "--clean", "remove ingested segments")
    add(ingest, "--again", "take in lines mended in the quarantine, too")
    add(ingest, "--strict", "exit with status 1 if a line is quarantined")

    status = command(run_status, "table capture --max-age 1h", **made)
    add(status, "capture", recorded, nargs="?", type=inputs.absolute)
    about = (
        "exit with status 1 if the last message, a segment that waits, or a"
        " hidden file is older: 90, 15m, 1h, 2d"
    )
    add(status, "--max-age", about, type=AGE, default=math.inf)
    add(status, "--json", "print one line")
    add(status, "--openmetrics", "print metrics")

    show = command(run_show, "table --since 2026-11-22T09 --host h1", **made)
    add_selection(show)
    add(show, "--json", "print lines as in a capture")

    command(run_compact, "table", **made)

    expire = command(run_expire, "table --keep 30d", **made)
    group = expire.add_mutually_exclusive_group(required=True)
    add(group, "--before", "the first day to keep", type=DAY)
    about = "how long to keep a day, 1d at least: 30d"
    add(group, "--keep", about, type=DAYS, dest="before", metavar="KEEP")

    report = command(run_report, "table -o traffic.html", **made)
    about = "the page to write (report.html)"
    add(report, "-o --output", about, default="report.html")
    add(report, "--json", "print JSON, write no page")
    add_selection(report)

    audit = command(run_audit, "my.trace")
    about = "a file of sbus.py --trace, or a folder of them"
    add(audit, "trace", about, nargs="+", type=inputs.absolute)
    add(audit, "--json", "print JSON")
    about = "the bus still runs, so a missing stop is no breach"
    add(audit, "--running", about)
    add_selection(audit, has_host=False)

    example = "table -a /tmp/other.bus --pattern 'a/*' --speed 1"
    replay = command(run_replay, example, **made)
    add(replay, "-a --address", "the bus", required=True)
    about = "so many times as fast as recorded (as fast as possible)"
    add(replay, "--speed", about, type=SPEED, default=math.inf)
    add_selection(replay)

    command(run_prepare, "")
    return parser


def read_as(parse: Callable[[str], Any], example: str) -> Callable[[str], Any]:
    """Return what reads an argument, and says in an error how it looks."""

    def value_of(text: str) -> Any:
        """Return the value of an argument.  Raises: ArgumentTypeError."""
        try:
            return parse(text)
        except (ValueError, OverflowError):
            reason = f"{text!r} does not look like {example}"
            raise argparse.ArgumentTypeError(reason) from None

    return value_of


# What arguments are, and how they look
AGE = read_as(inputs.seconds, "90, 15m, 1h or 2d")
DAY = read_as(datetime.date.fromisoformat, "2026-11-22")
DAYS = read_as(inputs.day_ago, "30d (at least 1d)")
MOMENT = read_as(inputs.moment, "2026-11-22 or 2026-11-22T09:00")
SPEED = read_as(inputs.positive, "0.5 or 10 (above 0)")


def add(parser: Any, names: str, about: str, **more: Any) -> None:
    """Add an argument to a parser; an option without *more* has no value."""
    more = more or {"action": "store_true"}
    parser.add_argument(*names.split(), help=about, **more)


def add_selection(parser: Any, has_host: bool = True) -> None:
    """Add the options that say which messages are wanted."""
    many: dict[str, Any] = {"action": "append", "default": []}
    add(parser, "--pattern", "only keys it selects; repeatable", **many)
    if has_host:
        add(parser, "--host", "only this host; repeatable", **many)
    about = "only from then on, UTC: 2026-11-22, 2026-11-22T09:00"
    first, last = inputs.FIRST, inputs.LAST
    add(parser, "--since", about, type=MOMENT, default=first)
    add(parser, "--until", "only before", type=MOMENT, default=last)


def selection_of(options: argparse.Namespace) -> Selection:
    """Return which messages the options want."""
    keys = [os.fsencode(text).decode("latin-1") for text in options.pattern]
    return Selection(
        options.since,
        options.until,
        tuple(getattr(options, "host", ())),
        tuple(keys),
    )


# ==== Running ================================================================


def note(text: str) -> None:
    """Say something beside the output.

    spark-submit merges our standard error with the output; its own it keeps.
    """
    line = f"sbus-spark: {printable(text)}"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.java_gateway import launch_gateway

        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        gateway.jvm.System.err.println(line)
    else:
        print(line, file=sys.stderr, flush=True)


def notify(state: str) -> None:
    """Say to systemd, if it has started this, how it goes."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        name = "\0" + address[1:] if address[0] == "@" else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), name)


def run(arguments: Sequence[str] | None) -> int:
    """Do what the command line asks for; return the exit status.

    0 is success, 1 that something was found, 2 an error.
    """
    options = option_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # as of `show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if options.verbose:
            traceback.print_exc()
        reason, where = explain(error), getattr(options, "table", "")
        is_named = isinstance(error, (PipelineError, SbusError))
        is_named = is_named or where in reason
        note(reason if is_named else f"{where}: {reason}")
        return 2


def explain(error: Exception) -> str:
    """Return in a line what went wrong, and what to do about it."""
    text = str(error) or repr(error)
    if isinstance(error, (PipelineError, SbusError)):
        return text
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"{package} is not installed: pip install '.[spark]'"
    raised_in_task, *reasons = (re.findall(x, text, re.M) for x in CAUSES)
    if raised_in_task:
        return str(raised_in_task[-1])

    # Spark gives the plan of a query after the reason
    reason = [*text.splitlines()[:1], *reasons[0]][-1]
    if isinstance(error, OSError) and error.filename and error.strerror:
        reason = f"{os.fsdecode(error.filename)}: {error.strerror}"
    remedies = [REMEDIES[x] for x in REMEDIES if re.search(x, text)]
    return "; ".join([reason, *remedies, "--verbose shows all"][:2])


def end(*_: object) -> NoReturn:
    """End as a signal asks, and leave nothing behind."""
    raise SystemExit(143)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 130 if interrupted."""
    os.umask(0o077)  # what was recorded may be private
    logging.disable()  # what goes wrong is raised as well
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, end)
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "pyspark.sql" in sys.modules:
            from pyspark.sql import SparkSession

            with contextlib.suppress(Exception):  # a signal breaks Spark
                if spark := SparkSession.getActiveSession():
                    spark.stop()
