"""The command line of the kit."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from .conversation import Failure
from .kit import Kit, choose
from .report import REPORTS, count
from .server import ServerProcess


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="conformance",
        description="Run the examples of spec/ against a server.",
    )
    add = parser.add_argument
    what = "command; {address} in it stands for the path to listen at"
    add("--server", required=True, metavar="COMMAND", help=what)
    what = "run the rules, too, that are not in the original protocol text"
    add("--ours", action="store_true", help=what)
    what = "run what a server may choose, too"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule or family, or so named"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "how long a server may take for an answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    for kind in ("json", "markdown"):
        what = f"print the report as {kind}"
        add(
            f"--{kind}",
            dest="report",
            action="store_const",
            const=kind,
            default="text",
            help=what,
        )
    options = parser.parse_args(arguments)
    try:
        words = shlex.split(options.server)
    except ValueError as error:
        parser.error(f"the command: {error}")
    if not any("{address}" in word for word in words):
        parser.error("the command has no {address}")
    options.only = {name.strip("[]") for name in options.only}
    return options


def seconds(text: str) -> float:
    """Return a time; raise ValueError if it is none that can be waited."""
    if not 0.001 <= float(text) <= 86_400:
        raise ValueError
    return float(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed, 1 if something did, or 2."""
    options = parse_options(arguments)
    with ServerProcess(options.server, options.seconds) as server:
        try:
            cases = choose(options.only)
            server.start()
        except (Failure, OSError) as error:
            print(f"conformance: {error}", file=sys.stderr)
            return 2
        results = Kit(server, options.ours, options.choices).run(cases)
    try:
        print(REPORTS[options.report](options.server, results), flush=True)
    except BrokenPipeError:  # whoever reads it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if count(results, "failed") else 0
