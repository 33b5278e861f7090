"""The report: for a terminal, for programs, as Markdown and as a page."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from .clients import all_client_cases
from .kit import Result, all_cases
from .rules import (
    SPEC,
    SPECIFICATION,
    Rule,
    chapters,
    examples_of,
    read_rules,
)

FAILURES_SHOWN_MAX = 3  # of one rule, on a terminal
FAILURES_ON_PAGE_MAX = 10
STEPS_SHOWN_MAX = 30
WRONG = ("failed", "differs")
NOT_TRIED = ("not run", "not applicable", "not asked for")
VERDICTS = ("passed", *WRONG, *NOT_TRIED)
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
    """Return the verdict on each rule: the worst of its examples."""
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
    run = sum(count(results, one) for one in VERDICTS[:3])
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
    """Return the specification's number, and what any change changes."""
    files = [*chapters(), *map(examples_of, chapters())]
    text = b"".join(file.read_bytes() for file in files if file.exists())
    return f"{SPECIFICATION} ({hashlib.sha256(text).hexdigest()[:8]})"


def by_first_rule(
    results: Iterable[Result], verdict: str
) -> dict[str, list[Result]]:
    """Return the results with a verdict, by the first of their rules."""
    found: dict[str, list[Result]] = {}
    for one in results:
        if one.verdict == verdict:
            found.setdefault(one.rules[0], []).append(one)
    return found


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


def not_run(results: Sequence[Result]) -> Iterator[str]:
    """Return why some were not run; name those that came too late."""
    names: dict[tuple[str, str], list[str]] = {}
    for one in results:
        if one.verdict in NOT_TRIED:
            block = one.case.partition("/")[0]
            names.setdefault((one.verdict, one.what), []).append(block)
    for (verdict, why), blocks in names.items():
        shown = f": {', '.join(dict.fromkeys(blocks))}"
        shown *= verdict == "not run"
        yield f"{verdict}, {len(blocks)}: {why}{shown}"


def reports(runs: Sequence[Run], as_json: bool, as_markdown: bool) -> str:
    """Return the reports of servers and clients, one after the other."""
    if as_json:
        told = [json_report(*run[2:]) for run in runs]
        return json.dumps(told if len(told) > 1 else told[0], indent=1)
    tell = markdown_report if as_markdown else text_report
    return "\n\n".join(tell(*run[2:]) for run in runs)


def text_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for a terminal: lines of families, then failures."""
    lines = [f"sbus conformance of {command}, specification {edition()}", ""]
    families: dict[str, dict[str, Result]] = {}
    for rule, about in results_by_rule(results).items():
        family = families.setdefault(rule.partition("-")[0], {})
        family.update((result.case, result) for result in about)
    for name, once in families.items():
        if once:
            lines.append(f"{name:6} {tell([*once.values()]):>16}")
    rules = read_rules()
    for verdict in WRONG:
        for name, found in by_first_rule(results, verdict).items():
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
        "the reference implementation, under the rules that they show.",
        "Without an example, clients cannot see whether a rule is kept.",
        "",
        "| Rule | Level | Origin | Verdict | Examples | Says |",
        "|---|---|---|---|---|---|",
    ]
    rules, verdict = read_rules(), verdicts(results)
    for name, about in results_by_rule(results).items():
        rule = rules[name]
        says = rule.statement.replace("|", "\\|")
        cells = (name, rule.level, rule.origin, verdict[name])
        lines.append(f"| {' | '.join(cells)} | {tell(about)} | {says} |")
    for name, failed in by_first_rule(results, "failed").items():
        lines += ["", f"## Failures of {name}"]
        shown = first_failures(failed, "failed", len(failed))
        lines += [f"    {line}" if line else "" for line in shown]
    lines += ["", "## Not run", ""]
    lines += [f"- {line}" for line in not_run(results)]
    return "\n".join(lines) + "\n"


def json_report(command: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "server": command,
        "specification": edition(),
        "rules": verdicts(results),
        "results": [result._asdict() for result in results],
    }


# ---- The page for browsers: it needs nothing else


class Column:
    """What the tables say of one server or client."""

    def __init__(self, run: Run) -> None:
        self.kind = run.kind
        self.name = escape(run.name)
        self.results = results_by_rule(run.results)
        self._verdicts = verdicts(run.results)

    def verdict(self, rule: Rule) -> str:
        """Return the verdict on a rule, empty if it is for others."""
        is_for_it = rule.subject == self.kind or self.results[rule.id]
        return self._verdicts[rule.id] if is_for_it else ""

    def cell(self, rule: Rule) -> str:
        """Return the verdict, and how many of those that were run passed."""
        shown = verdict = self.verdict(rule)
        if verdict == "passed":
            shown = tell(self.results[rule.id])
        elif verdict in WRONG:
            shown = f"{verdict}, {tell(self.results[rule.id])}"
        return f'<td class="{verdict}">{shown}</td>'

    def details(self, rule: Rule) -> str:
        """Return what failed, or differs, folded."""
        shown, about = "", self.results[rule.id]
        for verdict in WRONG:
            wrong = [one for one in about if one.verdict == verdict]
            lines = first_failures(wrong, verdict, FAILURES_ON_PAGE_MAX)
            if wrong:
                what = f"{self.name}: {len(wrong)} {verdict}"
                text = escape("\n".join(lines))
                shown += f"<details><summary>{what}</summary><pre>{text}</pre>"
                shown += "</details>"
        return shown


def page(runs: Sequence[Run], beside: Path = SPEC) -> str:
    """Return an HTML page; its rules link to the book if it is there."""
    columns = [*map(Column, runs)]
    chapters: dict[str, list[Rule]] = {}
    for rule in read_rules().values():
        if any(column.verdict(rule) for column in columns):
            chapters.setdefault(rule.file, []).append(rule)
    whys = dict.fromkeys(why for run in runs for why in not_run(run.results))
    return PAGE.substitute(
        style=STYLE,
        date=time.strftime("%Y-%m-%d"),
        edition=edition(),
        runs="\n".join(map(run_row, runs)),
        chapters="\n".join(
            chapter_html(rules, columns, beside) for rules in chapters.values()
        ),
        notes="\n".join(f"<li>{escape(why)}</li>" for why in whys),
    )


def run_row(run: Run) -> str:
    """Return the row of a server or client in the first table."""
    return (
        f'<tr><th scope="row">{escape(run.name)}</th><td>{run.kind}</td>'
        f"<td><code>{escape(run.command)}</code></td>"
        f"<td>{summary(run.results)}</td></tr>"
    )


def chapter_html(
    rules: Sequence[Rule], columns: Sequence[Column], beside: Path
) -> str:
    """Return a chapter as a table; fold what nobody asked for."""
    chapter = SPEC / rules[0].file
    link = Path("../spec", rules[0].file).with_suffix(".html")
    place = f"{link}#" if (beside / link).exists() else chapter.as_uri()
    asked: list[str] = []
    others: list[str] = []
    for rule in rules:
        found = {column.verdict(rule) for column in columns}
        rows = others if found <= {"not asked for", ""} else asked
        rows.append(rule_rows(rule, columns, place))
    title = chapter.read_text("utf-8").splitlines()[0].strip("# ")
    shown = table(asked, columns) if asked else ""
    if others:
        what = f"not asked for: {len(others)} of {len(rules)}"
        shown += f"<details><summary>{what}</summary>"
        shown += f"{table(others, columns)}</details>"
    return f"<section><h2>{escape(title)}</h2>\n{shown}</section>"


def table(rows: Sequence[str], columns: Sequence[Column]) -> str:
    """Return a table of rules."""
    names = "".join(f'<th scope="col">{one.name}</th>' for one in columns)
    head = f'<thead><tr><th scope="col">Rule</th>{names}</tr></thead>'
    body = "\n".join(rows)
    return f'<table class="rules">{head}\n<tbody>{body}</tbody></table>'


def rule_rows(rule: Rule, columns: Sequence[Column], place: str) -> str:
    """Return the row of a rule, and one with its failures if there are."""
    found = {column.verdict(rule) for column in columns}
    kind = next((one for one in WRONG if one in found), "other")
    link = f"{place}{rule.id}" if place.endswith("#") else place
    said = re.sub("`([^`]+)`", r"<code>\1</code>", escape(rule.statement))
    said = said.replace(rule.level, f"<b>{rule.level}</b>", 1)
    cells = "".join(column.cell(rule) for column in columns)
    row = (
        f'<tr id="{rule.id}" class="{kind}"><th scope="row">'
        f'<a href="{link}">{rule.id}</a> {said} <small>{rule.origin}</small>'
        f"</th>{cells}</tr>"
    )
    details = "".join(column.details(rule) for column in columns)
    if details:
        row += f'\n<tr class="{kind} more"><td colspan="{len(columns) + 1}">'
        row += f"{details}</td></tr>"
    return row


STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#606066, #9a9aa3);
  --passed: light-dark(#17702f, #5fcf80);
  --failed: light-dark(#c1121f, #ff7b83);
  --differs: light-dark(#8a5a00, #e0b050); }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: CanvasText;
  background: Canvas; font: 15px/1.45 system-ui, sans-serif; }
code, pre { font: .87em ui-monospace, monospace; overflow-wrap: anywhere; }
pre { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .4rem .6rem; border-top: 1px solid #8884;
  text-align: left; vertical-align: top; font-weight: normal; }
.more td { border: 0; padding-top: 0; }
.rules td, .rules thead th + th { width: 8rem; }
td, small, thead th, summary { color: var(--faint); }
td.passed { color: var(--passed); }
td.failed, .failed summary { color: var(--failed); }
td.differs, .differs summary { color: var(--differs); }
summary { cursor: pointer; }
#only:checked ~ main tbody tr:not(.failed),
#only:checked ~ main section:not(:has(.failed)) { display: none; }
"""

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sbus conformance</title>
<style>$style</style>
</head>
<body>
<h1>sbus conformance</h1>
<p>Specification $edition, $date. A rule failed if one of its examples did.
Without an example, nobody can see from outside whether a rule is kept.</p>
<table><tbody>
$runs
</tbody></table>
<input type="checkbox" id="only"> <label for="only">failures only</label>
<main>
$chapters
</main>
<h2>What was not run, and why</h2>
<ul>
$notes
</ul>
</body>
</html>
""")
