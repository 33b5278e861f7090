"""The report: for a terminal, for programs, and as Markdown."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .clients import all_client_cases
from .kit import Result, all_cases
from .rules import chapters, examples_of, read_rules


class Run(NamedTuple):
    """How one server or client fared."""

    kind: str  # server or client
    name: str
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
    """Return the verdict on each rule: failed if any example of it did.

    One whose examples were not all run is not called passed.
    """
    cases = (*all_cases(), *all_client_cases())
    shown = {rule for case in cases for rule in case.rules}
    by_rule = {}
    for rule, about in results_by_rule(results).items():
        found = {result.verdict for result in about}
        otherwise = "not run" if rule in shown else "no example"
        by_rule[rule] = next((one for one in ORDER if one in found), otherwise)
    return by_rule


VERDICTS = (
    "passed",
    "failed",
    "differs",
    "not run",
    "not applicable",
    "not asked for",
)
NOT_TRIED = VERDICTS[3:]
ORDER = ("failed", "not run", "differs", *VERDICTS)  # the first counts


def count(results: Iterable[Result], verdict: str) -> int:
    """Return how many results have a verdict."""
    return sum(result.verdict == verdict for result in results)


def tell(results: Sequence[Result]) -> str:
    """Return how many passed, of those that were run."""
    passed = count(results, "passed")
    run = passed + count(results, "failed") + count(results, "differs")
    if not run and count(results, "not asked for") == len(results):
        return "not asked for"
    return f"{passed}/{run} passed" if run else "none was run"


def summary(results: Sequence[Result]) -> str:
    """Return one line on all results."""
    counts = {one: count(results, one) for one in VERDICTS}
    always = ("passed", "failed", "not applicable")
    return ", ".join(
        f"{number} {verdict}"
        for verdict, number in counts.items()
        if number or verdict in always
    )


def edition() -> str:
    """Return what changes when a chapter does, or an example."""
    files = [*chapters(), *map(examples_of, chapters())]
    text = b"".join(file.read_bytes() for file in files if file.exists())
    return hashlib.sha256(text).hexdigest()[:8]


def text_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for a terminal: a line a family, then failures.

    Of the failures that are about one rule the first few are shown.
    """
    lines = [f"sbus conformance of {command}, specification {edition()}", ""]
    families: dict[str, list[Result]] = {}
    for rule, about in results_by_rule(results).items():
        families.setdefault(rule.partition("-")[0], []).extend(about)
    for family, about in families.items():
        once = list({result.case: result for result in about}.values())
        if once:
            lines.append(f"{family:6} {tell(once):>16}")
    for verdict in ("failed", "differs"):
        for name, found in failures_by_rule(results, verdict).items():
            lines += described(name, found, verdict)
    for verdict in ("not applicable", "not asked for"):
        for why, names in reasons(results, verdict).items():
            lines += ["", f"{verdict}, {len(names)}: {why}"]
    for why, names in reasons(results, "not run").items():
        blocks = dict.fromkeys(name.partition("/")[0] for name in names)
        lines += ["", f"not run, {len(names)}: {why}: {', '.join(blocks)}"]
    return "\n".join([*lines, "", summary(results)])


def described(
    name: str, about: Sequence[Result], verdict: str
) -> Iterator[str]:
    """Return the lines on those that failed, or differ, under one rule."""
    yield from (
        "",
        f"{verdict.upper()} [{name}] {read_rules()[name].sentence}",
    )
    for result in about[:FAILURES_SHOWN_MAX]:
        yield from ("", *failure_lines(result))
    more = [result.case for result in about[FAILURES_SHOWN_MAX:]]
    if more:
        yield from ("", f"  {verdict}, too, {len(more)}: {', '.join(more)}")


FAILURES_SHOWN_MAX = 3
STEPS_SHOWN_MAX = 30


def failures_by_rule(
    results: Iterable[Result], verdict: str = "failed"
) -> dict[str, list[Result]]:
    """Return the failures by the rule that explains most, then the next.

    Of rules that explain as many, the one that is named first explains them.
    """
    left = [result for result in results if result.verdict == verdict]
    by_rule: dict[str, list[Result]] = {}
    while left:
        named = Counter(rule for result in left for rule in result.rules)
        first = Counter(result.rules[0] for result in left)
        rule = max(named, key=lambda one: (named[one], first[one]))
        by_rule[rule] = [result for result in left if rule in result.rules]
        left = [result for result in left if rule not in result.rules]
    return by_rule


def failure_lines(result: Result) -> list[str]:
    """Return a failure: the rules, the conversation, what went wrong."""
    ids = " ".join(f"[{rule}]" for rule in result.rules)
    said = [f"    {step}" for step in result.dialogue]
    where = f"  {result.case} {ids}, step {len(said)}:"
    if len(said) > STEPS_SHOWN_MAX:
        said = ["    ...", *said[-STEPS_SHOWN_MAX:]]
    return [where, *said, f"    -> {result.what}"]


def reasons(results: Iterable[Result], verdict: str) -> dict[str, list[str]]:
    """Return the cases that were not run with a verdict, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == verdict:
            by_reason.setdefault(result.what, []).append(result.case)
    return by_reason


def markdown_report(command: str, results: Sequence[Result]) -> str:
    """Return a report that can be published as it is."""
    today = time.strftime("%Y-%m-%d")
    lines = [
        "# sbus conformance report",
        "",
        f"Server: `{command}`. Date: {today}. Specification: {edition()}.",
        f"Examples: {summary(results)}.",
        "",
        "A rule failed if any example of it did. Examples are in `spec/` of",
        "the reference implementation, under the rules that they show; where",
        "there is no example, clients cannot see whether a rule is kept.",
        "",
        "| Rule | Level | Origin | Verdict | Examples | Says |",
        "|---|---|---|---|---|---|",
    ]
    rules, verdict = read_rules(), verdicts(results)
    for name, about in results_by_rule(results).items():
        rule = rules[name]
        says = rule.sentence.rpartition(" (")[0].replace("|", "\\|")
        cells = (name, rule.level, rule.origin, verdict[name])
        lines.append(f"| {' | '.join(cells)} | {tell(about)} | {says} |")
    for name, failed in failures_by_rule(results).items():
        lines += ["", f"## Failures of {name}"]
        for result in failed:
            code = (f"    {line}" for line in failure_lines(result))
            lines += ["", *code]
    lines += ["", "## Not run", ""]
    for kind in NOT_TRIED:
        for why, names in reasons(results, kind).items():
            lines.append(f"- {kind}, {why}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def json_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for programs."""
    report = {
        "server": command,
        "specification": edition(),
        "rules": verdicts(results),
        "results": [result._asdict() for result in results],
    }
    return json.dumps(report, indent=1)


REPORTS = {
    "text": text_report,
    "json": json_report,
    "markdown": markdown_report,
}
