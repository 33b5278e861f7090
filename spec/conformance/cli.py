"""The command line of the kit."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .adapter import ClientProcess
from .clients import ClientKit, all_client_cases
from .conversation import Failure
from .kit import (
    Kit,
    Named,
    Result,
    all_cases,
    block_of,
    choose,
    refuse_unknown,
)
from .page import page
from .report import REPORTS, Run, count
from .server import ServerProcess


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
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
    what = "run what the original protocol text does not ask for, too"
    add("--ours", action="store_true", help=what)
    what = "run what a server may choose, too"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule, family or chapter, or so named"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "how long a server may take for an answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    what = "how long all may take (default 120); what is left is not run"
    add("--total", type=seconds, default=120.0, metavar="N", help=what)
    what = "write a page for browsers, with all servers and clients"
    add("--html", type=Path, metavar="FILE", help=what)
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
    if not options.server and not options.client and not options.list:
        parser.error("a --server or a --client is needed")
    for text in (*options.server, *options.client):
        check_command(parser, text)
    options.only = {name.strip("[]") for name in options.only}
    return options


def check_command(parser: argparse.ArgumentParser, command: str) -> None:
    """Exit if a command cannot be run, or is not told the address."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        parser.error(f"the command: {error}")
    if not any("{address}" in word for word in words):
        parser.error("the command has no {address}")


NAMED = re.compile(r"(?:([\w.+-]+)=)?(.*)", re.S)


def name_and_command(text: str) -> tuple[str, str]:
    """Return what a server or client is called, and its command."""
    found = NAMED.fullmatch(text)
    assert found
    return found[1] or found[2], found[2]


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
        if options.list:
            return say(list_of(chosen(options)))
        if options.html:
            options.html.touch()  # or all might be run for nothing
        runs = run_all(options)
        if options.html:
            options.html.write_text(page(runs), "utf-8")
    except (Failure, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    say(report(options.report, runs))
    bad = (count(run.results, verdict) for run in runs for verdict in BAD)
    return 1 if any(bad) else 0


BAD = ("failed", "not run")


def report(kind: str, runs: Sequence[Run]) -> str:
    """Return the reports of servers and clients, one behind the other."""
    reports = [REPORTS[kind](run.command, run.results) for run in runs]
    if kind == "json" and len(runs) > 1:
        return f"[{','.join(reports)}]"
    return "\n\n".join(reports)


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def end(number: int, _: object) -> None:
    """End as a signal asks for: what was started is ended, too."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def chosen(options: argparse.Namespace) -> list[Named]:
    """Return what would be run; without a command, that of servers.

    Raises: Failure if there is nothing with one of the names.
    """
    cases: list[Named] = []
    if options.server or not options.client:
        cases += all_cases()
    if options.client:
        cases += all_client_cases()
    refuse_unknown(cases, options.only)
    return choose(cases, options.only)


def run_all(options: argparse.Namespace) -> list[Run]:
    """Return the results of all servers and clients.

    Raises: Failure or OSError if one of them does not start.
    """
    chosen(options)
    runs = []
    for kind, texts, run in (
        ("server", options.server, run_server),
        ("client", options.client, run_client),
    ):
        for name, command in map(name_and_command, texts):
            results = run(command, options)
            if results:  # --only may have named none of this kind
                runs.append(Run(kind, name, command, results))
    tell_progress("", 0)
    return runs


def run_server(command: str, options: argparse.Namespace) -> list[Result]:
    """Run cases against a server.

    Raises: Failure or OSError if it does not start.
    """
    with ServerProcess(command, options.seconds) as server:
        kit = Kit(server, options.ours, options.choices, options.total)
        server.start()
        return kit.run(choose(all_cases(), options.only), tell_progress)


def run_client(command: str, options: argparse.Namespace) -> list[Result]:
    """Run cases against a client.

    Raises: Failure or OSError if it does not connect.
    """
    kit = ClientKit(ClientProcess(command), options.seconds, options.total)
    kit.probe()
    cases = choose(all_client_cases(), options.only)
    return kit.run(cases, tell_progress)


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
