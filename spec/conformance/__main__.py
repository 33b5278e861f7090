"""Do servers and clients keep the rules of sbus?  spec/README.md says more.

What is tried; there may be several:

  --server COMMAND     a server; {address} in the command stands for its path
  --client COMMAND     the adapter of a client; {address} stands for where to
                       connect, or for nothing

How it is tried; times are as 90, 0.5, 15m, 1h or 2d:

  --level LEVEL        protocol: what its text asks for; sbus: chapters 2 to 8,
                       the default; daemon: chapter 9 and what needs an option
                       as well
  --only NAME          only this rule or example, of any level, or this family
                       or chapter; there may be several, as in SUB-1,UNSUB
  --without NAME       not this one: a server does not offer it, as TRACE,RUN
  --except FILE        the rules and examples in this file, one a line, may
                       fail; it is a failure if one of them no longer does
  --stage N            a server that grows: what it lacks up to a stage, 1 to 6
  --examples FILE      the examples in this file, instead of those of spec/
  --random [SECONDS]   conversations at random, for so long (default 60)
  --seed N             where these begin (default 1)
  --jobs N             so many servers at once (default 2)
  --seconds SECONDS    how long a server may take to answer (default 2)
  --total SECONDS      how long what fails may take (default 120), before the
                       rest is not run.  Once a twelfth of it went for failures
                       of a family, its rest is tried once, with less time
  --timeout-scale X    multiply both, for servers under valgrind and such; if
                       this is above 1, their memory is not judged

What fails is tried again.  If it then passes twice in a row, it is flaky, and
no failure; --only tries it anew.  Once is enough where the kit had to wait for
a processor; where it waited for much of the time, what fails and is about a
block time was not run.

What is printed or written:

  --list               what would be run
  --verbose            each step when it is taken, with its time
  --save DIRECTORY     each example that fails, as a file for --examples
  --json               a line for each server and client, for programs, instead
  --version            which edition of the specification this is
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import re
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if not __package__:  # run by its path, which Python has put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conformance import conversation, jobs, kit, report
from conformance.clients import ClientCase, ClientKit, all_client_cases
from conformance.conversation import Failure
from conformance.examples import Block, blocks_of, read_blocks
from conformance.rules import SPEC, read_rules
from conformance.server import ServerProcess

UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}  # in seconds


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"conformance: {message}; --help lists the options\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file, flush=True)


def command(text: str) -> str:
    """Return a command; raise ArgumentTypeError if it cannot be run."""
    try:
        words = " ".join(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if "{address}" not in words:
        raise argparse.ArgumentTypeError(f"{text!r} has no {{address}}")
    return text


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exit if they are wrong."""
    form = argparse.RawDescriptionHelpFormatter
    usage = "python3 spec/conformance [option ...]"
    parser = Parser("conformance", usage, __doc__, formatter_class=form)
    parser.allow_abbrev = False
    # The docstring of this module says what they are
    add = functools.partial(parser.add_argument, help=argparse.SUPPRESS)
    add_switch = functools.partial(add, action="store_true")
    add_time = functools.partial(add, type=seconds)

    for name in ("server", "client"):
        add(
            f"--{name}",
            action="append",
            default=[],
            type=command,
            dest=f"{name}s",
        )
    version = f"conformance {report.edition()}"
    add("--version", action="version", version=version)
    for option in ("--list", "--verbose", "--json"):
        add_switch(option)
    add("--level", choices=kit.LEVELS, default="sbus")
    for option in ("--only", "--without"):
        add(option, action="extend", nargs="+", default=[])
    add("--except", type=Path, dest="known", default=set())
    add("--save", type=Path)
    add("--jobs", type=int, choices=range(1, 65), default=2)
    add("--stage", type=int, choices=range(1, 7))
    add("--examples", type=Path)
    add_time("--random", nargs="?", const=60.0)
    add("--seed", default="1")
    add_time("--seconds", default=2.0)
    add_time("--total", default=120.0)
    add_time("--timeout-scale", default=1.0)
    options = parser.parse_args(arguments)
    if not options.servers and not options.clients and not options.list:
        parser.error("a --server or --client is needed")
    for name in ("random", "stage"):
        if getattr(options, name) and not options.servers:
            parser.error(f"--{name} needs a --server")
    left_out = ("random", "clients", "only", "examples", "json")
    for name in left_out if options.stage else ():
        if getattr(options, name):
            parser.error(f"--stage goes without --{name.removesuffix('s')}")
    options.only = names_in(options.only)
    options.without = names_in(options.without)
    if options.verbose:  # somebody follows what happens
        options.jobs = 1
    options.seconds *= options.timeout_scale
    options.total *= options.timeout_scale
    return options


def names_in(texts: Sequence[str]) -> set[str]:
    """Return the names in texts, in which commas separate them."""
    names = ",".join(texts).split(",")
    return {name.strip("[] ") for name in names} - {""}


def seconds(text: str) -> float:
    """Return a length of time; raise ArgumentTypeError if it has none."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd]?)", text)
    if match and float(match[1]):
        return float(match[1]) * UNITS[match[2]]
    form = "a time above 0, such as 90, 0.5, 15m, 1h or 2d"
    raise argparse.ArgumentTypeError(f"{text!r} is not {form}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed, 1 if something did, or 2."""
    try:
        return try_all(parse_options(arguments))
    except (Failure, OSError, ValueError) as error:
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            print(f"conformance: {error}", file=sys.stderr)
        # Python writes at exit what is left
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2


def try_all(options: argparse.Namespace) -> int:
    """Do what the options ask for; return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end_soon)
    conversation.is_verbose = options.verbose
    if options.list:
        say(list_of(options))
        return 0
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    if options.known:
        text = re.sub("#.*", "", options.known.read_text("utf-8"))
        options.known = names_in(text.split())
    if options.stage or options.random:
        judge = grow if options.stage else walk
        status = max(judge(options, server) for server in options.servers)
        return 128 + min(kit.received) if kit.received else status
    # Nothing else is printed where a program is to read a report
    with contextlib.redirect_stdout(None if options.json else sys.stdout):
        runs = [*run_all(options)]
    if options.json:
        say(report.json_report(runs))
    if kit.received:
        return 128 + min(kit.received)
    results = [result for run in runs for result in run.results]
    return status_of(results, options.known)


def end_soon(number: int, _: object) -> None:
    """Have all processes of the kit end, after what they are at."""
    kit.received.add(number)
    for child in multiprocessing.active_children():
        child.terminate()


def status_of(results: Sequence[kit.Result], known: set[str]) -> int:
    """Return the exit status; tell of failures that are no more, or of none.

    What a file says has to be so, or nobody would keep it.
    """
    names: dict[str, set[str]] = defaultdict(set)  # by verdict
    for result in results:
        names[result.verdict] |= result.names
    if fixed := known & names["passed"] - names["known"]:
        said = ", ".join(sorted(fixed))
        print(f"conformance: no longer fails: {said}", file=sys.stderr)
    if fixed or names["failed"] or names["not run"]:
        return 1
    if {*report.JUDGED} & {result.verdict for result in results}:
        return 0
    whys = "; ".join(dict.fromkeys(result.what for result in results))
    print(f"conformance: nothing was run: {whys}", file=sys.stderr)
    return 2


def walk(options: argparse.Namespace, server_command: str) -> int:
    """Hold conversations at random; return 1 if one of them failed, or 0."""
    from conformance import random_walk  # which needs spec/model.py

    count = 0
    with server_of(options, server_command) as server:
        walk = random_walk.Walk(server, options.seed)
        for failure in walk.failures(options.random):
            count += 1
            say(f"{failure.block()}\n")
            save(options, failure.name, failure.block())
    is_few = walk.count < random_walk.CONVERSATIONS_MIN and not count
    few = ", which are too few" if is_few else ""
    say(f"{walk.count} conversations{few}, {count} wrong, seed {options.seed}")
    for why, seeds in {
        "not seen again on a fresh server": walk.once,
        "seen again only while the kit waited for a processor": walk.delayed,
    }.items():
        if seeds:
            say(f"{why}: {' '.join(seeds)}")
    return 1 if count else 2 * bool(is_few or walk.delayed)


def grow(options: argparse.Namespace, server_command: str) -> int:
    """Try the stages of a server; return 1 if it lacks something, or 0."""
    from conformance import stages  # which reads spec/stages.md

    kind = stages.GrowingServer
    with server_of(options, server_command, kind) as server:
        runner = kit.Kit(server, "daemon", options.total, tries_again=True)
        said, wrong = stages.try_stages(options.stage, runner)
    if kit.received:
        return 0
    say("\n".join([*(report.failure_lines(wrong) if wrong else ()), said]))
    return 1 if wrong else 0


def blocks_in(options: argparse.Namespace) -> tuple[Block, ...]:
    """Return the examples that are run."""
    file = options.examples
    if not file:
        return (*read_blocks(),)
    return (*blocks_of(file.read_text("utf-8"), file.name),)


def chosen(
    options: argparse.Namespace,
) -> tuple[list[kit.Item], list[ClientCase]]:
    """Return what is run for servers, and for clients; or raise Failure."""
    file = options.examples
    blocks = blocks_in(options) if file else ()
    if file and not blocks:
        raise Failure(f"{file}: no block of an example")
    rules = {rule for block in blocks for rule in block.rules}
    if unknown := rules - read_rules().keys():
        raise Failure(f"no rule is {', '.join(sorted(unknown))}")
    is_for_clients = bool(options.clients)
    is_for_servers = bool(options.servers) or not is_for_clients
    cases = kit.all_cases(blocks) if is_for_servers else []
    others = all_client_cases(blocks) if is_for_clients else []
    if not {*cases, *others} - {*kit.CHECKS, *kit.REAL_CASES}:
        raise Failure(f"there are no examples for that in {file or SPEC}")
    if file:
        options.only = options.only or {one.name for one in (*cases, *others)}
    names = kit.names_of([*cases, *others])
    unknown = (options.only | options.without | options.known) - names
    if unknown:
        wrong = ", ".join(map(repr, sorted(unknown)))
        raise Failure(f"no example of {wrong}; --list tells their names")
    only = options.only
    return kit.choose(cases, only), kit.choose(others, only)


def run_all(options: argparse.Namespace) -> Iterator[report.Run]:
    """Return all results; raise Failure if a program does not start."""
    cases, others = chosen(options)
    for server_command in options.servers if cases else ():
        with server_of(options, server_command) as server:
            server.start()
        make = functools.partial(kit_of, options, server_command)
        yield run(options, "server", server_command, make, cases)
    for adapter in options.clients if others else ():
        client_kit = ClientKit(adapter, options.seconds, options.total)
        client_kit.probe()
        yield run(options, "client", adapter, client_kit.begin, others)


def server_of(
    options: argparse.Namespace,
    server_command: str,
    kind: type[ServerProcess] = ServerProcess,
) -> ServerProcess:
    """Return a server."""
    server = kind(server_command, options.seconds)
    server.start_seconds_max *= options.timeout_scale
    return server


def kit_of(
    options: argparse.Namespace, server_command: str
) -> tuple[ServerProcess, jobs.Judge]:
    """Return a server, and what judges it."""
    server = server_of(options, server_command)
    rest = options.level, options.total, options.only
    return server, kit.Kit(server, *rest, tries_again=True).judge


def run(
    options: argparse.Namespace,
    kind: str,
    text: str,
    make: jobs.Make,
    cases: Sequence[Any],
) -> report.Run:
    """Return the results of cases, and tell of failures when they happen.

    The text is the command of a server, or of a client's adapter.
    """
    again = f"--{kind} {shlex.quote(text)}"
    if options.examples:
        again += f" --examples {shlex.quote(str(options.examples))}"
    say(f"sbus conformance of {text}, specification {report.edition()}")
    results: dict[int, kit.Result] = {}
    for number, case in enumerate(cases):
        if why := kit.not_offered(case, options.without):
            left_out = case.name, case.rules, "not offered", why
            results[number] = kit.Result(*left_out)
    asked = [number for number in range(len(cases)) if number not in results]
    count = options.jobs if kind == "server" else 1
    for number, result in jobs.judge_all(make, cases, asked, count):
        if result.verdict == "failed" and result.names & options.known:
            result = result._replace(verdict="known")
        results[number] = result
        tell_progress(f"{len(results)} of {len(cases)}: {result.case}")
        if said := report.failure_report([*results.values()], again):
            tell_progress("")
            say(said)
            example = report.example_of(result, blocks_in(options))
            save(options, result.block, example)
    tell_progress("")
    in_order = [results[number] for number in sorted(results)]
    say(report.text_report(in_order))
    return report.Run(kind, text, text, in_order)


def save(options: argparse.Namespace, name: str, example: str) -> None:
    """Write an example to a file of its own, if that is wished."""
    if options.save and example:
        (options.save / f"{name}.md").write_text(f"{example}\n", "utf-8")


def tell_progress(text: str) -> None:
    """Print a line in the place of the one before, if somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a text."""
    print(text, flush=True)


def list_of(options: argparse.Namespace) -> str:
    """Return a line for each block and check, with its rules."""
    rules: dict[str, set[str]] = defaultdict(set)
    cases, others = chosen(options)
    without = options.without
    run = [
        case
        for case in cases
        if not kit.left_out(case, options.level, options.only)
        and not kit.not_offered(case, without)
    ]
    for case in (*run, *others):
        rules[kit.block_of(case)].update(f"[{rule}]" for rule in case.rules)
    if not rules:
        raise Failure(f"none of that is of --level {options.level}")
    return "\n".join(
        f"{name} {' '.join(sorted(rules[name]))}" for name in rules
    )


if __name__ == "__main__":
    sys.exit(main())
