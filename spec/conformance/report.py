"""The report: for a terminal, for programs, and as a page."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from .clients import all_client_cases
from .examples import Block
from .kit import Result, all_cases
from .rules import (
    SPECIFICATION,
    chapters,
    examples_of,
    read_rules,
)

FAILURES_SHOWN_MAX = 3  # of one rule, on a terminal
ALIKE_SHOWN_MAX = 4  # steps in a row that differ in numbers alone
SLOW_SHOWN_MAX = 10  # cases
SLOW_SECONDS = 1.0  # others are not worth a line
WRONG = ("failed", "differs", "flaky")
JUDGED = ("passed", *WRONG, "known")
NOT_TRIED = ("not run", "not applicable", "not offered", "not asked for")
VERDICTS = (*JUDGED, *NOT_TRIED)
# Of the verdicts on the examples of a rule, the first of these counts
ORDER = ("failed", "not run", "known", "differs", "flaky", *VERDICTS)


class Run(NamedTuple):
    """How one server or client fared."""

    kind: str  # server or client
    name: str  # in a table, or else its command
    command: str
    results: Sequence[Result]


def results_by_rule(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results that are about each rule."""
    by_rule: dict[str, list[Result]] = {rule: [] for rule in read_rules()}
    for result in results:
        for rule in result.rules:
            by_rule[rule].append(result)
    return by_rule


def verdicts(results: Iterable[Result]) -> dict[str, str]:
    """Return the verdict on each rule: the worst of its examples."""
    cases = (*all_cases(), *all_client_cases())
    shown = {rule for case in cases for rule in case.rules}
    by_rule = {}
    for rule, about in results_by_rule(results).items():
        kinds = {result.verdict for result in about}
        otherwise = "not run" if rule in shown else "no example"
        by_rule[rule] = next(filter(kinds.__contains__, ORDER), otherwise)
    return by_rule


def count(results: Iterable[Result], verdict: str) -> int:
    """Return how many results have a verdict."""
    return sum(result.verdict == verdict for result in results)


def tell(results: Sequence[Result]) -> str:
    """Return how many passed, of those that were run."""
    passed = count(results, "passed")
    run = sum(count(results, verdict) for verdict in JUDGED)
    if not run and count(results, "not asked for") == len(results):
        return "not asked for"
    return f"{passed}/{run} passed" if run else "none was run"


def summary(results: Sequence[Result]) -> str:
    """Return one line on all results."""
    counts = {verdict: count(results, verdict) for verdict in VERDICTS}
    always = ("passed", "failed", "not applicable")
    return ", ".join(
        f"{number} {verdict}"
        for verdict, number in counts.items()
        if number or verdict in always
    )


def edition() -> str:
    """Return the specification's number, and what any change changes."""
    files = [*chapters(), *map(examples_of, chapters())]
    text = b"".join(file.read_bytes() for file in files if file.exists())
    return f"{SPECIFICATION} ({hashlib.sha256(text).hexdigest()[:8]})"


def is_step(line: str) -> bool:
    """Return whether a line of a dialogue is no note of the kit."""
    return not line.startswith("(")


def failure_lines(result: Result) -> list[str]:
    """Return a failure: the rules, the conversation, what went wrong."""
    ids = " ".join(f"[{rule}]" for rule in result.rules)
    steps = [*filter(is_step, result.dialogue)]
    where = f"  {result.case} {ids}, step {len(steps)}:"
    said = [f"    {step}" for step in shortened(result.dialogue)]
    return [where, *said, f"    -> {result.what}"]


def shortened(dialogue: Iterable[str]) -> Iterator[str]:
    """Yield steps; of many that differ in numbers alone, both ends."""
    for _, group in groupby(dialogue, lambda step: re.sub("[0-9]+", "", step)):
        steps = [*group]
        if len(steps) > ALIKE_SHOWN_MAX:
            steps[1:-1] = [f"... {len(steps) - 2} more between these two"]
        yield from steps


def example_of(result: Result, blocks: Iterable[Block]) -> str:
    """Return a failure as an example: the block that it is of.

    A conversation of the random walk has none; no other check is one.
    """
    name = result.block
    kind, lines = "conversation", [*filter(is_step, result.dialogue)]
    is_known = name.startswith("random-")
    for block in blocks:
        if block.name == name:
            kind, lines, is_known = block.kind, [*block.lines], True
    tags = " ".join(f"[{rule}]" for rule in result.rules)
    head = f"```{kind} {name} {tags}"
    text = "\n".join([head, *lines, f"# {result.what}", "```"])
    return text if is_known else ""


def slowest(results: Iterable[Result]) -> list[str]:
    """Return a line for each of the slowest cases."""
    by_time = sorted(results, key=lambda result: -result.seconds)
    return [
        f"{result.seconds:6.1f} s {result.case}"
        for result in by_time[:SLOW_SHOWN_MAX]
        if result.seconds > SLOW_SECONDS
    ]


def not_run(results: Sequence[Result]) -> Iterator[str]:
    """Return how many were not run, and why."""
    whys = Counter(
        (one.verdict, one.what) for one in results if one.verdict in NOT_TRIED
    )
    for (verdict, why), number in whys.items():
        yield f"{verdict}, {number}: {why}"


def failure_report(results: Sequence[Result], again: str) -> str:
    """Return what is said of the last result, if it is wrong.

    The text 'again' has the options that name what is tried.
    """
    result = results[-1]
    if result.verdict not in WRONG:
        return ""
    rule = result.rules[0]
    alike = [
        one for one in results if one.rules[0] == rule and one.verdict in WRONG
    ]
    head = f"{result.verdict.upper()} [{rule}]"
    if len(alike) > FAILURES_SHOWN_MAX:
        return f"{head} also {result.case}"
    if len(alike) == 1:
        head += f" {read_rules()[rule].sentence}"
    again = f"python3 spec/conformance {again} --only {result.case} --verbose"
    lines = ["", head, *failure_lines(result), f"    again: {again}"]
    return "\n".join(lines)


def text_report(results: Sequence[Result]) -> str:
    """Return what is said at the end: families, what was not run, a sum."""
    lines = [""]
    for family in dict.fromkeys(rule.family for rule in read_rules().values()):
        about = [result for result in results if family in families_of(result)]
        if about:
            lines.append(f"{family:6} {tell(about):>16}")
    judged, others = (
        {rule for one in results if one.verdict in kind for rule in one.rules}
        for kind in (JUDGED, NOT_TRIED)
    )
    lines += ["", *slowest(results)]
    if others:
        lines += ["", *not_run(results), ""]
    if others - judged:
        lines.append(f"not judged: {by_family(others - judged)}")
    if others & judged:
        lines.append(f"judged in part: {by_family(others & judged)}")
    return "\n".join([*lines, "", summary(results)])


def families_of(result: Result) -> set[str]:
    """Return the families of the rules that a result is about."""
    return {rule.partition("-")[0] for rule in result.rules}


def by_family(ids: Iterable[str]) -> str:
    """Return ids of rules, sorted, as in 'CONN 8, 10; LIMIT 1'."""
    pairs = (rule.split("-") for rule in ids)
    rules = sorted((family, int(number)) for family, number in pairs)
    return "; ".join(
        f"{family} {', '.join(str(number) for _, number in group)}"
        for family, group in groupby(rules, lambda rule: rule[0])
    )


def json_report(runs: Sequence[Run]) -> str:
    """Return a report for programs: a line for each run."""
    reports = [
        {
            "server": run.command,
            "specification": edition(),
            "rules": verdicts(run.results),
            "results": [result._asdict() for result in run.results],
        }
        for run in runs
    ]
    # In a line, without blanks
    write = functools.partial(json.dumps, separators=(",", ":"))
    return "\n".join(map(write, reports))
