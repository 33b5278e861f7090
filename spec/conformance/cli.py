"""The command line of the kit."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from .clients import ClientKit, all_client_cases
from .conversation import Failure
from .kit import Kit, Named, SomeNamed, all_cases, block_of, choose, names_of
from .page import page
from .report import REPORTS, Run, count
from .rules import SPEC, read_rules
from .server import ServerProcess

BAD = ("failed", "not run")
NAMED = re.compile(r"(?:([\w.+-]+)=)?(.*)", re.S)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
received: set[int] = set()  # of these; what is run is first run to its end


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"conformance: {message}; see --help\n")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exit if they are wrong."""
    parser = Parser(
        prog="conformance",
        description="Run the examples of spec/ against servers and clients.",
    )
    add = parser.add_argument
    name = "[NAME=]COMMAND"
    what = "a server: {address} in its command is the path to listen at"
    add("--server", action="append", default=[], metavar=name, help=what)
    what = "an adapter of a client: {address} is where to connect, or empty"
    add("--client", action="append", default=[], metavar=name, help=what)
    what = "list the examples and checks that would be run"
    add("--list", action="store_true", help=what)
    what = "also run what the original protocol text does not ask for"
    add("--ours", action="store_true", help=what)
    what = "also run what a server may choose"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule, family or chapter, or so named"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "how long a server may take for an answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    what = "how long all may take (default 120); what is left is not run"
    add("--total", type=seconds, default=120.0, metavar="N", help=what)
    what = "write a page for browsers, with all servers and clients"
    add("--html", type=Path, metavar="FILE", help=what)
    either = parser.add_mutually_exclusive_group()
    for kind in ("json", "markdown"):
        either.add_argument(
            f"--{kind}",
            dest="report",
            action="store_const",
            const=kind,
            default="text",
            help=f"print the report as {kind}",
        )
    options = parser.parse_args(arguments)
    if not options.server and not options.client and not options.list:
        parser.error("a --server or a --client is needed")
    for command in (*options.server, *options.client):
        try:
            words = shlex.split(command)
        except ValueError as error:
            parser.error(f"the command {command!r}: {error}")
        if not any("{address}" in word for word in words):
            parser.error(f"the command {command!r} has no {{address}}")
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
    for number in SIGNALS:
        signal.signal(number, lambda number, _: received.add(number))
    try:
        cases = chosen(options)
        if options.list:
            return say(list_of(cases))
        if options.html:
            options.html.touch()  # or all might be run for nothing
        runs = [*run_all(options)]
        if received:
            return 128 + min(received)
        if options.html:
            text = page(runs, beside=options.html.parent)
            options.html.write_text(text, "utf-8")
    except (Failure, OSError, ValueError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    say(report(options.report, runs))
    bad = (count(run.results, verdict) for run in runs for verdict in BAD)
    return 1 if any(bad) else 0


def report(kind: str, runs: Sequence[Run]) -> str:
    """Return the reports of servers and clients, one behind the other."""
    reports = [REPORTS[kind](run.command, run.results) for run in runs]
    if kind == "json" and len(runs) > 1:
        return f"[{','.join(reports)}]"
    return "\n\n".join(reports)


def chosen(options: argparse.Namespace) -> list[Named]:
    """Return what would be run; without a command, that of servers.

    Raises: Failure if there is nothing, or nothing with one of the names.
    """
    cases: list[Named] = []
    if options.server or not options.client:
        cases += all_cases()
    if options.client:
        cases += all_client_cases()
    if not any("/" in case.name for case in all_cases()):
        raise Failure(f"there are no examples in {SPEC}")
    rules = read_rules()
    known = set[str]().union(*(names_of(case, rules) for case in cases))
    unknown = options.only - known
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
    return choose(cases, options.only)


def run_all(options: argparse.Namespace) -> Iterator[Run]:
    """Return the results of all servers and clients.

    Raises: Failure or OSError if one of them does not start.
    """
    limits = options.seconds, options.total
    cases = choose(all_cases(), options.only)
    for name, command in names_and_commands(options.server, bool(cases)):
        with ServerProcess(command, options.seconds) as server:
            kit = Kit(server, options.ours, options.choices, options.total)
            server.start()
            results = [*map(kit.judge, told(cases))]
        yield Run("server", name, command, results)
    others = choose(all_client_cases(), options.only)
    for name, command in names_and_commands(options.client, bool(others)):
        client_kit = ClientKit(command, *limits)
        client_kit.probe()
        results = [*map(client_kit.judge, told(others))]
        yield Run("client", name, command, results)


def names_and_commands(
    texts: Iterable[str], is_wanted: bool
) -> Iterator[tuple[str, str]]:
    """Return how servers or clients are called, and their commands."""
    for text in texts if is_wanted else ():
        found = NAMED.fullmatch(text)
        assert found
        yield found[1] or found[2], found[2]


def told(cases: Sequence[SomeNamed]) -> Iterator[SomeNamed]:
    """Return cases; say on a terminal which is run, and how many are left.

    Exit, and end what was started, if a signal asks for it.
    """
    for number, case in enumerate(cases):
        if received:
            sys.exit(128 + min(received))
        if sys.stderr.isatty():
            line = f"{len(cases) - number} left: {case.name}"[:78]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        yield case
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(text: str) -> int:
    """Print a text; return the status 0."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # its reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def list_of(cases: Iterable[Named]) -> str:
    """Return a line for each block and check, with its rules."""
    blocks: dict[str, list[Named]] = {}
    for case in cases:
        blocks.setdefault(block_of(case), []).append(case)
    lines = []
    for name, group in blocks.items():
        rules = dict.fromkeys(rule for case in group for rule in case.rules)
        many = f", {len(group)} cases" if len(group) > 1 else ""
        shown = " ".join(f"[{rule}]" for rule in rules)
        lines.append(f"{name} {shown}{many}")
    return "\n".join(lines)
