"""The command line: python3 spec/conformance --server COMMAND."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if not __package__:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conformance import kit, report
from conformance.clients import ClientCase, ClientKit, all_client_cases
from conformance.conversation import Failure
from conformance.rules import SPEC
from conformance.server import ServerProcess

received: set[int] = set()  # signals; what is run is first run to its end


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"conformance: {message}; see --help\n")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exit if they are wrong."""
    what = "Run the examples of spec/ against servers and clients."
    parser = Parser(prog="conformance", description=what)
    add = parser.add_argument
    name = "[NAME=]COMMAND"
    what = "a server; {address} in its command stands for its path"
    add("--server", action="append", default=[], metavar=name, help=what)
    what = "an adapter of a client; {address} is where to connect, or empty"
    add("--client", action="append", default=[], metavar=name, help=what)
    what = "list the examples and checks that would be run"
    add("--list", action="store_true", help=what)
    what = "also run what the original protocol text does not ask for"
    add("--ours", action="store_true", help=what)
    what = "also run what a server may choose"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule, family, chapter or name"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "seconds that a server may take to answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    what = "seconds that all may take (default 120); the rest is not run"
    add("--total", type=seconds, default=120.0, metavar="N", help=what)
    what = "write a page for browsers, with all servers and clients"
    add("--html", type=Path, metavar="FILE", help=what)
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("json", "markdown"):
        what = f"print the report as {kind}"
        kinds.add_argument(f"--{kind}", action="store_true", help=what)
    options = parser.parse_args(arguments)
    if not options.server and not options.client and not options.list:
        parser.error("a --server or a --client is needed")
    for command in (*options.server, *options.client):
        try:
            is_told = "{address}" in " ".join(shlex.split(command))
        except ValueError as error:
            parser.error(f"the command {command!r}: {error}")
        if not is_told:
            parser.error(f"the command {command!r} has no {{address}}")
    options.only = {name.strip("[]") for name in options.only}
    return options


def seconds(text: str) -> float:
    """Return seconds; raise ValueError if nobody can wait so long."""
    if not 0.001 <= float(text) <= 86_400:
        raise ValueError
    return float(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed, 1 if something did, or 2."""
    options = parse_options(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: received.add(number))
    try:
        if options.list:
            return say(list_of(options))
        if options.html:
            options.html.touch()  # or all might be run for nothing
        runs = [*run_all(options)]
        if options.html:
            text = report.page(runs, beside=options.html.parent)
            options.html.write_text(text, "utf-8")
    except (Failure, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    say(report.reports(runs, options.json, options.markdown))
    verdicts = {one.verdict for run in runs for one in run.results}
    return 1 if verdicts & {"failed", "not run"} else 0


def chosen(
    options: argparse.Namespace,
) -> tuple[list[kit.Item], list[ClientCase]]:
    """Return what is run for servers, and for clients; or raise Failure."""
    cases = kit.all_cases() if options.server or not options.client else []
    others = all_client_cases() if options.client else []
    if not cases[len(kit.CHECKS) :] and not others:
        raise Failure(f"there are no examples in {SPEC}")
    unknown = options.only - kit.names_of([*cases, *others])
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
    only = options.only
    return kit.choose(cases, only), kit.choose(others, only)


def run_all(options: argparse.Namespace) -> Iterator[report.Run]:
    """Return all results; raise Failure if a program does not start."""
    cases, others = chosen(options)
    what = options.ours, options.choices, options.total
    for text in options.server if cases else ():
        name, command = name_and_command(text)
        with ServerProcess(command, options.seconds) as server:
            judge = kit.Kit(server, *what).judge
            server.start()
            results = [*map(judge, told(cases))]
        yield report.Run("server", name, command, results)
    for text in options.client if others else ():
        name, command = name_and_command(text)
        client_kit = ClientKit(command, options.seconds, options.total)
        client_kit.probe()
        results = [*map(client_kit.judge, told(others))]
        yield report.Run("client", name, command, results)


def name_and_command(text: str) -> tuple[str, str]:
    """Return what a server or client is called, and its command."""
    found = re.fullmatch(r"(?:([\w.+-]+)=)?(.*)", text, re.S)
    assert found
    return found[1] or found[2], found[2]


def told(cases: Sequence[Any]) -> Iterator[Any]:
    """Return cases, and tell the progress; exit if a signal asks for it."""
    for number, case in enumerate(cases):
        tell_progress(f"{len(cases) - number} left: {case.name}")
        yield case
        if received:
            sys.exit(128 + min(received))
    tell_progress("")


def tell_progress(line: str) -> None:
    """Show a line on a terminal, in the place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[:78]}", end="", file=sys.stderr, flush=True)


def say(text: str) -> int:
    """Print a text; return the status 0."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # its reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def list_of(options: argparse.Namespace) -> str:
    """Return a line for each block and check, with its rules."""
    blocks: dict[str, list[kit.Item | ClientCase]] = {}
    for case in itertools.chain(*chosen(options)):
        blocks.setdefault(kit.block_of(case), []).append(case)
    lines = []
    for name, group in blocks.items():
        rules = dict.fromkeys(rule for case in group for rule in case.rules)
        many = f", {len(group)} cases" if len(group) > 1 else ""
        shown = " ".join(f"[{rule}]" for rule in rules)
        lines.append(f"{name} {shown}{many}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
