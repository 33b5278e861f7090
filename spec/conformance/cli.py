"""The command line of the kit."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence

from .conversation import Failure
from .kit import Item, Kit, Result, block_of, choose
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
    add("--server", metavar="COMMAND", help=what)
    what = "list the examples and checks that would be run"
    add("--list", action="store_true", help=what)
    what = "run the rules, too, that are not in the original protocol text"
    add("--ours", action="store_true", help=what)
    what = "run what a server may choose, too"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule, family or chapter, or so named"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "how long a server may take for an answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    what = "how long all may take (default 120); what is left is not run"
    add("--total", type=seconds, default=120.0, metavar="N", help=what)
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
    if not options.list:
        check_command(parser, options.server)
    options.only = {name.strip("[]") for name in options.only}
    return options


def check_command(
    parser: argparse.ArgumentParser, command: str | None
) -> None:
    """Exit if a command cannot be that of a server."""
    if command is None:
        parser.error("a --server is needed")
    try:
        words = shlex.split(command)
    except ValueError as error:
        parser.error(f"the command: {error}")
    if not any("{address}" in word for word in words):
        parser.error("the command has no {address}")


def seconds(text: str) -> float:
    """Return a time; raise ValueError if it is none that can be waited."""
    if not 0.001 <= float(text) <= 86_400:
        raise ValueError
    return float(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed, 1 if something did, or 2."""
    options = parse_options(arguments)
    for number in SIGNALS:
        signal.signal(number, end)
    try:
        cases = choose(options.only)
        if options.list:
            return say(list_of(cases))
        results = run(options, cases)
    except (Failure, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    say(REPORTS[options.report](options.server, results))
    is_bad = count(results, "failed") or count(results, "not run")
    return 1 if is_bad else 0


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def end(number: int, _: object) -> None:
    """End as a signal asks for: what was started is ended, too."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def run(options: argparse.Namespace, cases: Sequence[Item]) -> list[Result]:
    """Run cases against a server.

    Raises: Failure or OSError if it does not start.
    """
    with ServerProcess(options.server, options.seconds) as server:
        kit = Kit(server, options.ours, options.choices, options.total)
        server.start()
        results = kit.run(cases, tell_progress)
    tell_progress("", 0)
    return results


def tell_progress(name: str, left: int) -> None:
    """Say on a terminal what is run, and how many are left."""
    if sys.stderr.isatty():
        line = f"{left} left: {name}"[:78] if left else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def say(text: str) -> int:
    """Print a text; return the status 0."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def list_of(cases: Iterable[Item]) -> str:
    """Return a line for each block and check, with its rules."""
    blocks: dict[str, list[Item]] = {}
    for case in cases:
        blocks.setdefault(block_of(case), []).append(case)
    lines = []
    for name, group in blocks.items():
        rules = dict.fromkeys(rule for case in group for rule in case.rules)
        many = f", {len(group)} cases" if len(group) > 1 else ""
        shown = " ".join(f"[{rule}]" for rule in rules)
        lines.append(f"{name} {shown}{many}")
    return "\n".join(lines)
