"""Options: what a command line may say."""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable
from typing import Any, NoReturn

import sbus

from . import commands, inputs


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus-spark: {message}; --help lists the options\n")


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

# What has more than one use
TABLE: Any = {"help": "a table that ingest makes", "type": inputs.absolute}
CAPTURE: Any = {"help": "what `sbus record` writes", "type": inputs.absolute}
MANY: Any = {"action": "append", "default": []}


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
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_options, run, example in (
        (add_ingest, commands.run_ingest, "capture table --follow"),
        (add_status, commands.run_status, "table capture --max-age 1h"),
        (add_show, commands.run_show, "table --since 2026-11-22T09 --host h1"),
        (add_table, commands.run_compact, "table"),
        (add_expire, commands.run_expire, "table --keep 30d"),
        (add_report, commands.run_report, "table -o traffic.html"),
        (add_audit, commands.run_audit, "my.trace"),
        (add_replay, commands.run_replay, "table -a /tmp/b.bus --speed 1"),
        (lambda _: None, commands.run_prepare, ""),
    ):
        name, about = run.__name__.removeprefix("run_"), str(run.__doc__)
        epilog = f"example: sbus-spark {name} {example}"
        subparser = subparsers.add_parser(name, help=about, epilog=epilog)
        subparser.description = about
        subparser.set_defaults(run=run)
        add_options(subparser)
        add(subparser, "--verbose", help="show all of an error")
    return parser


def add(parser: Any, *names: str, **about: Any) -> None:
    """Add an argument to a parser; one with only a help has no value."""
    if about.keys() == {"help"}:
        about["action"] = "store_true"
    parser.add_argument(*names, **about)


def add_table(parser: Any) -> None:
    add(parser, "table", **TABLE)


def add_ingest(parser: Any) -> None:
    add(parser, "capture", **CAPTURE)
    add(parser, "table", **TABLE)
    add(parser, "--follow", help="go on until interrupted")
    add(parser, "--clean", help="remove ingested segments")
    add(parser, "--strict", help="status 1 if a line is quarantined")


def add_status(parser: Any) -> None:
    add(parser, "table", **TABLE)
    add(parser, "capture", nargs="?", **CAPTURE)
    about = (
        "status 1 if the last message of a host, a segment that waits, or a"
        " hidden file is older: 90, 15m, 1h, 2d"
    )
    add(parser, "--max-age", help=about, type=AGE, default=math.inf)
    add(parser, "--json", help="print one line")
    add(parser, "--openmetrics", help="print metrics")


def add_show(parser: Any) -> None:
    add(parser, "table", **TABLE)
    add(parser, "--json", help="print lines as in a capture")
    add_selection(parser)


def add_expire(parser: Any) -> None:
    add(parser, "table", **TABLE)
    group = parser.add_mutually_exclusive_group(required=True)
    add(group, "--before", help="the first day to keep", type=DAY)
    about = "how long to keep a day, 1d at least: 30d"
    add(group, "--keep", help=about, type=DAYS, dest="before", metavar="KEEP")


def add_report(parser: Any) -> None:
    add(parser, "table", **TABLE)
    about = "the page to write (report.html)"
    add(parser, "-o", "--output", help=about, default="report.html")
    add(parser, "--json", help="print JSON, write no page")
    add_selection(parser)


def add_audit(parser: Any) -> None:
    about = "a file of sbus.py --trace, or a folder of them"
    add(parser, "trace", help=about, nargs="+", type=inputs.absolute)
    add(parser, "--json", help="print JSON")
    about = "the bus still runs, so a missing stop is no breach"
    add(parser, "--running", help=about)
    add_selection(parser, has_host=False)


def add_replay(parser: Any) -> None:
    add(parser, "table", **TABLE)
    add(parser, "-a", "--address", help="the bus", required=True)
    about = "so many times as fast as recorded (as fast as possible)"
    add(parser, "--speed", help=about, type=SPEED, default=math.inf)
    add_selection(parser)


def add_selection(parser: Any, has_host: bool = True) -> None:
    """Add the options that say which messages are wanted."""
    add(parser, "--pattern", help="only keys it selects; repeatable", **MANY)
    if has_host:
        add(parser, "--host", help="only this host; repeatable", **MANY)
    about = "only from then on, UTC: 2026-11-22, 2026-11-22T09:00"
    add(parser, "--since", help=about, type=MOMENT, default=inputs.FIRST)
    add(
        parser, "--until", help="only before", type=MOMENT, default=inputs.LAST
    )
