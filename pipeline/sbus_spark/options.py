"""Options: what a command line may say."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

import sbus
import sbus_client

from . import commands, inputs


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus-spark: {message}; --help lists the options\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file, flush=True)


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


DAYS = read_as(inputs.day_ago, "30d (at least 1d)")
MOMENT = read_as(inputs.moment, "2026-11-22 or 2026-11-22T09:00")
SPEED = read_as(inputs.positive, "0.5 or 10 (above 0)")


def value(about: str, kind: Any = str, **more: Any) -> dict[str, Any]:
    """Return what argparse is to know of an argument with a value."""
    return {"help": about, "type": kind, **more}


MANY: dict[str, Any] = {"action": "append", "default": []}
# The arguments of all commands; one that is only a text has no value
ARGUMENTS: dict[str, Any] = {
    "table": value("a table that ingest makes", inputs.absolute),
    "capture": value("what `sbus record` writes", inputs.absolute),
    "trace": value(
        "what sbus.py --trace writes, or a folder", inputs.absolute, nargs="+"
    ),
    "--follow": "go on until interrupted",
    "--clean": "remove ingested segments",
    "--strict": "status 1 if a line is quarantined",
    "--max-age": value(
        "status 1 if the last message of a host, a segment that waits, or a"
        " hidden file is older: 90, 15m, 1h, 2d",
        sbus_client.seconds,
        default=math.inf,
    ),
    "--openmetrics": "print metrics",
    "--keep": value("how long to keep a day: 30d", DAYS, required=True),
    "-o": value("the page to write", dest="output", default="report.html"),
    "--json": "print JSON for programs",
    "--running": "the bus still runs, so a missing stop is no breach",
    "-a": value("the address of the bus", dest="address", required=True),
    "--speed": value(
        "so many times as fast as recorded", SPEED, default=math.inf
    ),
    "--pattern": value("only keys it selects; repeatable", **MANY),
    "--host": value("only this host; repeatable", **MANY),
    "--since": value(
        "only from then on, UTC: 2026-11-22, 2026-11-22T09:00",
        MOMENT,
        default=inputs.FIRST,
    ),
    "--until": value("only before", MOMENT, default=inputs.LAST),
    "--verbose": "show all of an error",
}
# Which a command has; one with a question mark may be left out
TIME = "--pattern --since --until"
STATUS = "--max-age --host --json --openmetrics"
COMMANDS = {
    commands.run_ingest: "capture table --follow --clean --strict",
    commands.run_status: f"table capture? {STATUS}",
    commands.run_show: f"table --json --host {TIME}",
    commands.run_compact: "table",
    commands.run_expire: "table --keep",
    commands.run_report: f"table -o --json --host {TIME}",
    commands.run_audit: f"trace --json --running {TIME}",
    commands.run_replay: f"table -a --speed --host {TIME}",
    commands.run_prepare: "",
}


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbus-spark",
        allow_abbrev=False,
        description="Keep, show, check and repeat the traffic of a bus.",
        epilog="The exit status is 0; 1 if something was found, as a breach or"
        " a gap; 2 if it could not be done.",
    )
    version = f"sbus-spark {sbus.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, names in COMMANDS.items():
        name, about = run.__name__.removeprefix("run_"), run.__doc__
        subparser = subparsers.add_parser(
            name, help=about, description=about, allow_abbrev=False
        )
        subparser.set_defaults(run=run)
        for argument in [*names.split(), "--verbose"]:
            add(subparser, argument)
    return parser


def add(parser: argparse.ArgumentParser, argument: str) -> None:
    """Add one of the ARGUMENTS to the parser of a command."""
    name = argument.rstrip("?")
    about = ARGUMENTS[name]
    if isinstance(about, str):
        about = {"help": about, "action": "store_true"}
    if name != argument:
        about = {**about, "nargs": "?"}
    parser.add_argument(name, **about)
