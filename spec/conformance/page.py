"""The report for browsers: one page that needs nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from .report import (
    VERDICTS,
    Run,
    count,
    edition,
    first_failures,
    not_run,
    results_by_rule,
    summary,
    tell,
    verdicts,
)
from .rules import SPEC, Rule, read_rules

FAILURES_SHOWN_MAX = 10  # of one rule
WRONG = ("failed", "differs")


def page(
    runs: Sequence[Run],
    title: str = "sbus conformance",
    beside: Path = Path(),
) -> str:
    """Return an HTML page with the results of servers and clients.

    A rule's id leads to its page of the book, if that is beside this one,
    else to the chapter's file.
    """
    columns = [Column(run) for run in runs]
    chapters: dict[str, list[Rule]] = {}
    for rule in read_rules().values():
        if any(column.verdict(rule) for column in columns):
            chapters.setdefault(rule.file, []).append(rule)
    whys = {why: None for run in runs for why in not_run(run.results)}
    return PAGE.substitute(
        title=escape(title),
        style=STYLE,
        date=time.strftime("%Y-%m-%d"),
        edition=edition(),
        runs="\n".join(map(run_row, runs)),
        links="\n".join(
            f'<a href="#{file}">{heading(file)}</a>' for file in chapters
        ),
        chapters="\n".join(
            chapter_html(file, rules, columns, beside)
            for file, rules in chapters.items()
        ),
        notes="\n".join(f"<li>{escape(why)}</li>" for why in whys),
    )


class Column:
    """What the tables say of one server or client."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name = escape(run.name)
        self.results = results_by_rule(run.results)
        self._verdicts = verdicts(run.results)

    def verdict(self, rule: Rule) -> str:
        """Return the verdict on a rule, empty if it is for others."""
        is_for_it = rule.subject == self.run.kind or self.results[rule.id]
        return self._verdicts[rule.id] if is_for_it else ""

    def cell(self, rule: Rule) -> str:
        """Return the verdict, and how many of those that were run passed."""
        shown = verdict = self.verdict(rule)
        if verdict == "passed":
            shown = tell(self.results[rule.id])
        elif verdict in WRONG:
            shown = f"{verdict}, {tell(self.results[rule.id])}"
        kind = verdict.replace(" ", "-") or "for-others"
        return f'<td class="{kind}" data-name="{self.name}">{shown}</td>'

    def details(self, rule: Rule) -> str:
        """Return what failed, or differs, folded."""
        folded = ""
        for verdict in WRONG:
            about = self.results[rule.id]
            wrong = [one for one in about if one.verdict == verdict]
            lines = first_failures(wrong, verdict, FAILURES_SHOWN_MAX)
            if wrong:
                folded += (
                    f"<details><summary>{self.name}: {len(wrong)} {verdict}"
                    f"</summary><pre>{escape(chr(10).join(lines))}</pre>"
                    "</details>"
                )
        return folded


def heading(file: str) -> str:
    """Return the title of a chapter."""
    return escape((SPEC / file).read_text("utf-8").splitlines()[0].strip("# "))


def chapter_html(
    file: str, rules: Sequence[Rule], columns: Sequence[Column], beside: Path
) -> str:
    """Return a chapter as a table: its rules, and a column for each run.

    The rules that nobody asked for are folded.
    """
    asked: dict[bool, list[str]] = {True: [], False: []}
    for rule in rules:
        found = {column.verdict(rule) for column in columns}
        row = rule_rows(rule, columns, beside)
        asked[not found <= {"not asked for", ""}].append(row)
    shown = table(asked[True], columns) if asked[True] else ""
    if asked[False]:
        count = len(asked[False])
        what = "a rule was" if count == 1 else f"{count} rules were"
        shown += f"<details><summary>{what} not asked for</summary>"
        shown += f"{table(asked[False], columns)}</details>"
    return f'<section id="{file}"><h2>{heading(file)}</h2>{shown}</section>'


def table(rows: Sequence[str], columns: Sequence[Column]) -> str:
    """Return a table of rules."""
    names = "".join(f'<th scope="col">{one.name}</th>' for one in columns)
    return (
        f'<table class="rules"><thead><tr><th scope="col">Rule</th>{names}'
        f"</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>"
    )


def rule_rows(rule: Rule, columns: Sequence[Column], beside: Path) -> str:
    """Return the row of a rule, and one with its failures if there are."""
    found = {column.verdict(rule) for column in columns}
    kind = next((one for one in WRONG if one in found), "other")
    cells = "".join(column.cell(rule) for column in columns)
    of_book = Path(rule.file).with_suffix(".html")
    link = f"{of_book}#{rule.id}"
    if not (beside / of_book).exists():
        link = (SPEC / rule.file).as_uri()
    row = (
        f'<tr id="{rule.id}" class="{kind}"><th scope="row">'
        f'<a href="{link}">{rule.id}</a> {sentence(rule)}</th>{cells}</tr>'
    )
    details = "".join(column.details(rule) for column in columns)
    if details:
        row += f'\n<tr class="{kind} more"><td colspan="{len(columns) + 1}">'
        row += f"{details}</td></tr>"
    return row


def sentence(rule: Rule) -> str:
    """Return what a rule says, its level emphasised, and its origin."""
    said, _, _ = rule.sentence.rpartition(" (")
    said = re.sub("`([^`]+)`", r"<code>\1</code>", escape(said))
    said = said.replace(rule.level, f"<b>{rule.level}</b>", 1)
    return f"{said} <small>{rule.origin}</small>"


def run_row(run: Run) -> str:
    """Return the row of a server or client in the first table."""
    bar = "".join(
        f'<i class="{one.replace(" ", "-")}" style="flex:{number}"></i>'
        for one in VERDICTS[:-1]
        if (number := count(run.results, one))
    )
    return (
        f'<tr><th scope="row">{escape(run.name)}</th><td>{run.kind}</td>'
        f"<td><code>{escape(run.command)}</code></td>"
        f'<td>{summary(run.results)}<span class="bar">{bar}</span></td></tr>'
    )


STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#606066, #9a9aa3);
  --line: light-dark(#d9d9de, #36373d); --sunk: light-dark(#f4f4f6, #202126);
  --passed: light-dark(#17702f, #5fcf80);
  --failed: light-dark(#c1121f, #ff7b83);
  --differs: light-dark(#8a5a00, #e0b050); }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: CanvasText;
  background: Canvas; font: 15px/1.45 system-ui, sans-serif; }
code, pre { font-family: ui-monospace, monospace; font-size: .87em; }
code { overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; font-weight: normal; }
thead th { color: var(--faint); font-size: .87em; }
.rules td, .rules thead th + th { width: 8rem; }
.rules .more td { width: auto; padding-top: 0; }
.rules tr:has(+ .more) > * { border-bottom: 0; }
small { color: var(--faint); font-size: .8em; font-weight: normal; }
td small { display: block; }
nav a { margin-right: 1rem; white-space: nowrap; }
td.passed { color: var(--passed); }
td.failed { color: var(--failed); font-weight: 600; }
td.differs { color: var(--differs); }
td { color: var(--faint); }
summary { cursor: pointer; color: var(--faint); }
.failed summary { color: var(--failed); }
.differs summary { color: var(--differs); }
pre { margin: .4rem 0; padding: .6rem; overflow-x: auto;
  background: var(--sunk); }
.bar { display: flex; height: .4rem; margin-top: .3rem;
  background: var(--line); }
.bar .passed { background: var(--passed); }
.bar .failed { background: var(--failed); min-width: .3rem; }
.bar .differs { background: var(--differs); min-width: .3rem; }
#only:checked ~ main tbody tr:not(.failed),
#only:checked ~ main section:not(:has(.failed)) { display: none; }
@media (max-width: 44rem) {
  table, tbody, tr, th, td { display: block; width: auto !important; }
  thead, td.for-others { display: none; }
  th, td { border: 0; padding: .15rem .5rem; }
  tr { border-bottom: 1px solid var(--line); }
  td[data-name]::before { content: attr(data-name) ": "; }
}
"""

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
<p>Specification $edition, $date. A rule failed if one of its examples did.
Where there is no example, nobody can see from outside whether it is kept.</p>
<table class="runs"><tbody>
$runs
</tbody></table>
<nav>
$links
</nav>
<input type="checkbox" id="only"> <label for="only">failures only</label>
<main>
$chapters
</main>
<h2>Why some was not run</h2>
<ul>
$notes
</ul>
</body>
</html>
""")
