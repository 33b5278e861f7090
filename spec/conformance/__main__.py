"""The command line: python3 spec/conformance --server COMMAND."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NoReturn

if not __package__:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conformance import conversation, kit, report
from conformance.clients import ClientCase, ClientKit, all_client_cases
from conformance.conversation import Failure
from conformance.examples import blocks_of, read_cases
from conformance.rules import SPEC, read_rules
from conformance.server import ServerProcess

REPORTS = {
    "json": report.json_report,
    "junit": report.junit_report,
    "tap": report.tap_report,
}
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
    add("--list", action="store_true", help="list what would be run")
    what = "protocol: what its text asks for; sbus: chapters 2 to 8, which is"
    what += " the default; daemon: chapter 9 and what needs an option as well"
    add("--level", choices=kit.LEVELS, default="sbus", help=what)
    ours: dict[str, Any] = {"action": "store_const", "const": "daemon"}
    add("--ours", dest="level", help="as --level daemon", **ours)
    what = "run only this rule or example, of any level; or family or chapter"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "try a server that grows: say what it lacks up to a stage, 1 to 6"
    add("--stage", type=int, choices=range(1, 7), metavar="N", help=what)
    what = "run the examples in this file instead of those of spec/"
    add("--examples", type=Path, metavar="FILE", help=what)
    what = "hold conversations at random, for so long (default 60)"
    number: dict[str, Any] = {"type": seconds, "metavar": "SECONDS"}
    add("--random", nargs="?", const=60.0, help=what, **number)
    add("--seed", default="1", help="where --random begins (default 1)")
    what = "seconds that a server may take to answer (default 2)"
    add("--seconds", default=2.0, help=what, **number)
    what = "seconds that all may take (default 120); the rest is not run"
    add("--total", default=120.0, help=what, **number)
    what = "multiply both, for servers under valgrind and such"
    add("--timeout-scale", type=float, default=1.0, metavar="X", help=what)
    add("--verbose", action="store_true", help="print each step when taken")
    add("--keep", action="store_true", help="at a failure wait for Enter")
    what = "write a page for browsers, with all servers and clients"
    add("--html", type=Path, metavar="FILE", help=what)
    kinds = parser.add_mutually_exclusive_group()
    for kind in REPORTS:
        what = f"print {kind.upper()} instead"
        kinds.add_argument(f"--{kind}", action="store_true", help=what)
    options = parser.parse_args(arguments)
    if not options.server and not options.client and not options.list:
        parser.error("a --server or a --client is needed")
    if (options.stage or options.random) and not options.server:
        parser.error("--stage and --random need a --server")
    for command in (*options.server, *options.client):
        try:
            is_told = "{address}" in " ".join(shlex.split(command))
        except ValueError as error:
            parser.error(f"the command {command!r}: {error}")
        if not is_told:
            parser.error(f"the command {command!r} has no {{address}}")
    options.only = {name.strip("[]") for name in options.only}
    options.seconds *= options.timeout_scale
    options.total *= options.timeout_scale
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
    conversation.is_verbose = options.verbose
    try:
        if options.list:
            return say(list_of(options))
        if options.html:
            options.html.touch()  # or all might be run for nothing
        if options.stage:
            return max(grow(options, text) for text in options.server)
        if options.random:
            return max(walk(options, text) for text in options.server)
        runs = [*run_all(options)]
        if options.html:
            text = report.page(runs, beside=options.html.parent)
            options.html.write_text(text, "utf-8")
    except (Failure, OSError, ValueError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    for kind, make in REPORTS.items():
        if getattr(options, kind):
            say(make(runs))
    if received:
        return 128 + min(received)
    results = [one for run in runs for one in run.results]
    verdicts = {one.verdict for one in results}
    if verdicts & {"failed", "not run"}:
        return 1
    if verdicts & {*report.JUDGED}:
        return 0
    whys = dict.fromkeys(one.what for one in results)
    print(f"conformance: nothing was run: {'; '.join(whys)}", file=sys.stderr)
    return 2


def walk(options: argparse.Namespace, text: str) -> int:
    """Hold conversations at random; return 1 if one of them failed, or 0."""
    from conformance import random_walk  # which needs spec/model.py

    _, command = name_and_command(text)
    count = 0
    with ServerProcess(command, options.seconds) as server:
        walk = random_walk.Walk(server, options.seed)
        for block in walk.failures(options.random):
            count += 1
            say(f"{block}\n")
            if options.keep or received:
                break
    say(f"{walk.count} conversations, {count} wrong, seed {options.seed}")
    if walk.once:
        say(f"not seen again on a fresh server: {' '.join(walk.once)}")
    counts = sorted(walk.tally.rules().items(), key=lambda pair: pair[1])
    say(" ".join(f"{rule}:{number}" for rule, number in counts))
    return min(count, 1)


def grow(options: argparse.Namespace, text: str) -> int:
    """Try the stages of a server; return 1 if it lacks something, or 0."""
    from conformance import stages  # which reads spec/stages.md

    _, command = name_and_command(text)
    with stages.GrowingServer(command, options.seconds) as server:
        runner = kit.Kit(server, "daemon", options.total, tries=2)
        said, wrong = stages.try_stages(options.stage, runner)
    say("\n".join([*(report.failure_lines(wrong) if wrong else ()), said]))
    return 1 if wrong else 0


def chosen(
    options: argparse.Namespace,
) -> tuple[list[kit.Item], list[ClientCase]]:
    """Return what is run for servers, and for clients; or raise Failure."""
    cases = kit.all_cases() if options.server or not options.client else []
    if options.examples:
        text = options.examples.read_text("utf-8")
        cases = [*read_cases(blocks_of(text, options.examples.name))]
        rules = {rule for case in cases for rule in case.rules}
        if unknown := rules - read_rules().keys():
            raise Failure(f"no rule is {', '.join(sorted(unknown))}")
        if not cases:
            raise Failure(f"{options.examples}: no block of an example")
        options.only = options.only or {case.name for case in cases}
    others = all_client_cases() if options.client else []
    if not options.examples and not cases[len(kit.CHECKS) :] and not others:
        raise Failure(f"there are no examples in {SPEC}")
    unknown = options.only - kit.names_of([*cases, *others])
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
    only = options.only
    return kit.choose(cases, only), kit.choose(others, only)


def run_all(options: argparse.Namespace) -> Iterator[report.Run]:
    """Return all results; raise Failure if a program does not start."""
    cases, others = chosen(options)
    what = options.level, options.total, options.only
    for text in options.server if cases else ():
        name, command = name_and_command(text)
        with ServerProcess(command, options.seconds) as server:
            server.start_seconds_max *= options.timeout_scale
            if options.keep:
                conversation.keep = functools.partial(wait_for_enter, server)
            judge = kit.Kit(server, *what, tries=2 - options.keep).judge
            server.start()
            results = judged(told(command, options), judge, cases)
        yield report.Run("server", name, command, results)
    for text in options.client if others else ():
        name, command = name_and_command(text)
        client_kit = ClientKit(command, options.seconds, options.total)
        client_kit.probe()
        results = judged(told(command, options), client_kit.judge, others)
        yield report.Run("client", name, command, results)


def told(command: str, options: argparse.Namespace) -> report.Stream:
    """Return what tells of failures, unless a program is to read them."""
    is_silent = any(getattr(options, kind) for kind in REPORTS)
    return report.Stream(command, (lambda _: 0) if is_silent else say)


def judged(
    stream: report.Stream, judge: Callable[[Any], Any], cases: Sequence[Any]
) -> list[kit.Result]:
    """Return the results of cases, and tell of failures when they happen."""
    results: list[kit.Result] = []
    for number, case in enumerate(cases):
        if received:  # a signal
            why = "a signal has ended the run"
            results.append(kit.Result(case.name, case.rules, "not run", why))
            continue
        tell_progress(f"{len(cases) - number} left: {case.name}")
        results.append(judge(case))
        tell_progress("")
        stream.tell(results[-1])
    stream.say(report.text_report(results))
    return results


def wait_for_enter(server: ServerProcess) -> None:
    """Leave all as it is until somebody has looked at it."""
    print(f"it failed; the server is {server.processes}, and Enter goes on")
    sys.stdin.readline()
    received.add(0)


def name_and_command(text: str) -> tuple[str, str]:
    """Return what a server or client is called, and its command."""
    found = re.fullmatch(r"(?:([\w.+-]+)=)?(.*)", text, re.S)
    assert found
    return found[1] or found[2], found[2]


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
    lines = []
    cases = itertools.chain(*chosen(options))
    for name, cases_of_block in itertools.groupby(cases, kit.block_of):
        group = list(cases_of_block)
        ids = dict.fromkeys(f"[{i}]" for case in group for i in case.rules)
        many = f", {len(group)} cases" if len(group) > 1 else ""
        lines.append(f"{name} {' '.join(ids)}{many}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
