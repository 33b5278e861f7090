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

FAILURES_SHOWN_MAX = 3  # of one rule, on a terminal
STEPS_SHOWN_MAX = 30
VERDICTS = (
    "passed",
    "failed",
    "differs",
    "not run",
    "not applicable",
    "not asked for",
)
ORDER = ("failed", "not run", "differs", *VERDICTS)  # the first counts


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


def first_failures(
    about: Sequence[Result], verdict: str, most: int
) -> Iterator[str]:
    """Return the lines on the first failures of a rule, and name the rest."""
    for result in about[:most]:
        yield from ("", *failure_lines(result))
    more = [result.case for result in about[most:]]
    if more:
        yield from ("", f"  also {verdict}, {len(more)}: {', '.join(more)}")


def reasons(results: Iterable[Result], verdict: str) -> dict[str, list[str]]:
    """Return the blocks that were not run with a verdict, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == verdict:
            by_reason.setdefault(result.what, []).append(result.case)
    return by_reason


def not_run(results: Sequence[Result]) -> Iterator[str]:
    """Return a line for each reason why some were not run.

    Those for which there was no time are named.
    """
    for verdict in VERDICTS[3:]:
        for why, names in reasons(results, verdict).items():
            blocks = dict.fromkeys(name.partition("/")[0] for name in names)
            shown = f": {', '.join(blocks)}" if verdict == "not run" else ""
            yield f"{verdict}, {len(names)}: {why}{shown}"


def text_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for a terminal: a line a family, then failures."""
    lines = [f"sbus conformance of {command}, specification {edition()}", ""]
    families: dict[str, dict[str, Result]] = {}
    for rule, about in results_by_rule(results).items():
        family = families.setdefault(rule.partition("-")[0], {})
        family.update((result.case, result) for result in about)
    for name, once in families.items():
        if once:
            lines.append(f"{name:6} {tell([*once.values()]):>16}")
    rules = read_rules()
    for verdict in ("failed", "differs"):
        for name, found in failures_by_rule(results, verdict).items():
            head = f"{verdict.upper()} [{name}] {rules[name].sentence}"
            lines += ["", head]
            lines += first_failures(found, verdict, FAILURES_SHOWN_MAX)
    for line in not_run(results):
        lines += ["", line]
    return "\n".join([*lines, "", summary(results)])


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
        shown = first_failures(failed, "failed", len(failed))
        lines += [f"    {line}" if line else "" for line in shown]
    lines += ["", "## Not run", ""]
    lines += [f"- {line}" for line in not_run(results)]
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
