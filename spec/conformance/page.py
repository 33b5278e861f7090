"""The report for browsers: one page that needs nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template

from .kit import Result
from .report import (
    NOT_TRIED,
    VERDICTS,
    Run,
    count,
    edition,
    failure_lines,
    failures_by_rule,
    reasons,
    results_by_rule,
    summary,
    verdicts,
)
from .rules import SPEC, Rule, read_rules

FAILURES_SHOWN_MAX = 10  # of one rule
WRONG = ("failed", "differs")


def page(runs: Sequence[Run], title: str = "sbus conformance") -> str:
    """Return an HTML page with the results of servers and clients."""
    columns = [Column(run, notes_of(runs)) for run in runs]
    chapters = rules_by_chapter(columns)
    return PAGE.substitute(
        title=escape(title),
        style=STYLE,
        date=time.strftime("%Y-%m-%d"),
        edition=edition(),
        runs="\n".join(map(run_row, runs)),
        links=" ".join(map(chapter_link, chapters)),
        chapters="\n".join(
            chapter_html(file, rules, columns)
            for file, rules in chapters.items()
        ),
        notes="\n".join(
            f'<li id="why-{number}">{escape(why)}</li>'
            for why, number in notes_of(runs).items()
        ),
    )


def notes_of(runs: Iterable[Run]) -> dict[str, int]:
    """Return the numbers of the reasons why examples were not run."""
    whys = {why: None for run in runs for why in all_reasons(run.results)}
    return {why: number for number, why in enumerate(whys, 1)}


def all_reasons(results: Sequence[Result]) -> list[str]:
    """Return why some examples were not run, or not applicable."""
    return [why for one in NOT_TRIED for why in reasons(results, one)]


class Column:
    """What the tables say of one server or client."""

    def __init__(self, run: Run, notes: Mapping[str, int]) -> None:
        self.run = run
        self.notes = notes
        self.verdicts = verdicts(run.results)
        self.results = results_by_rule(run.results)
        self.told = {
            verdict: failures_by_rule(run.results, verdict)
            for verdict in WRONG
        }

    def binds(self, rule: Rule) -> bool:
        """Return whether a rule is for this one."""
        return rule.subject == self.run.kind or bool(self.results[rule.id])

    def verdict(self, rule: Rule) -> str:
        """Return the verdict on a rule, empty if it is for others."""
        return self.verdicts[rule.id] if self.binds(rule) else ""

    def cell(self, rule: Rule) -> str:
        """Return the verdict, of how many examples it is, and why."""
        verdict, about = self.verdict(rule), self.results[rule.id]
        numbers = [self.notes[why] for why in all_reasons(about)]
        links = [f'<a href="#why-{one}">{one}</a>' for one in numbers]
        whys = f"<sup>{' '.join(links)}</sup>" if links else ""
        shown = verdict + whys
        left = sum(count(about, one) for one in NOT_TRIED)
        if verdict in ("passed", *WRONG):
            shown = f"{verdict} {count(about, verdict)}/{len(about) - left}"
            if left:
                shown += f"<small>{left} not run{whys}</small>"
        name = escape(self.run.name)
        return (
            f'<td class="{css_class(verdict)}" data-name="{name}">{shown}</td>'
        )

    def details(self, rule: Rule) -> str:
        """Return what is told under a rule, folded, or where it is told."""
        folded = "".join(
            self.folded(verdict, by_rule[rule.id])
            for verdict, by_rule in self.told.items()
            if rule.id in by_rule
        )
        return folded or self.elsewhere(rule)

    def folded(self, verdict: str, about: Sequence[Result]) -> str:
        """Return the examples that failed, or differ, folded."""
        shown = "\n\n".join(
            "\n".join(failure_lines(one)) for one in about[:FAILURES_SHOWN_MAX]
        )
        more = [one.case for one in about[FAILURES_SHOWN_MAX:]]
        if more:
            shown += f"\n\n  {verdict}, too, {len(more)}: {', '.join(more)}"
        return (
            f"<details><summary>{escape(self.run.name)}: {len(about)}"
            f" {verdict}</summary><pre>{escape(shown)}</pre></details>"
        )

    def elsewhere(self, rule: Rule) -> str:
        """Return under which rules that is told which is about this, too."""
        names = {one.case for one in self.results[rule.id]}
        links = ", ".join(
            f'<a href="#{other}">{other}</a>'
            for by_rule in self.told.values()
            for other, about in by_rule.items()
            if any(one.case in names for one in about)
        )
        return f"<p>{escape(self.run.name)}: see {links}</p>" if links else ""


def rules_by_chapter(columns: Sequence[Column]) -> dict[str, list[Rule]]:
    """Return the rules that bind one of the columns, by their files."""
    chapters: dict[str, list[Rule]] = {}
    for rule in read_rules().values():
        if any(column.binds(rule) for column in columns):
            chapters.setdefault(rule.file, []).append(rule)
    return chapters


def chapter_html(
    file: str, rules: Iterable[Rule], columns: Sequence[Column]
) -> str:
    """Return a chapter as a table: its rules, and a column for each run."""
    names = "".join(
        f'<th scope="col">{escape(column.run.name)}</th>' for column in columns
    )
    rows = "\n".join(rule_rows(rule, columns) for rule in rules)
    return (
        f'<section id="{file}"><h2>{heading(file)}</h2>\n'
        f'<table class="rules"><thead><tr><th scope="col">Rule</th>{names}'
        f"</tr></thead>\n<tbody>\n{rows}\n</tbody></table></section>"
    )


def heading(file: str) -> str:
    """Return the title of a chapter."""
    return escape((SPEC / file).read_text("utf-8").splitlines()[0].strip("# "))


def chapter_link(file: str) -> str:
    """Return a link to a chapter's place in the page."""
    return f'<a href="#{file}">{heading(file)}</a>'


def rule_rows(rule: Rule, columns: Sequence[Column]) -> str:
    """Return the row of a rule, and one with its failures if there are."""
    found = {column.verdict(rule) for column in columns}
    row_class = next((one for one in WRONG if one in found), "other")
    cells = "".join(column.cell(rule) for column in columns)
    row = (
        f'<tr id="{rule.id}" class="{row_class}"><th scope="row">'
        f'<a href="#{rule.id}">{rule.id}</a> {sentence(rule)}</th>{cells}</tr>'
    )
    details = "".join(column.details(rule) for column in columns)
    if details:
        width = len(columns) + 1
        row += f'\n<tr class="{row_class} more"><td colspan="{width}">'
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
    parts = "".join(
        f'<i class="{css_class(one)}" style="flex:{count(run.results, one)}">'
        "</i>"
        for one in VERDICTS
        if count(run.results, one)
    )
    return (
        f'<tr><th scope="row">{escape(run.name)}</th><td>{run.kind}</td>'
        f"<td><code>{escape(run.command)}</code></td>"
        f'<td>{summary(run.results)}<span class="bar">{parts}</span></td></tr>'
    )


def css_class(verdict: str) -> str:
    """Return a verdict as the style sheet calls it."""
    return verdict.replace(" ", "-") or "for-others"


STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --back: #fff;
  --faint: #606066; --line: #d9d9de; --sunk: #f4f4f6; --link: #1f5fbf;
  --passed: #17702f; --failed: #c1121f; --differs: #8a5a00;
  --passed-back: #e3f4e7; --failed-back: #fde5e6; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e6e6ea; --back: #17181b; --faint: #9a9aa3;
    --line: #36373d; --sunk: #202126; --link: #8ab4f8; --passed: #5fcf80;
    --failed: #ff7b83; --differs: #e0b050;
    --passed-back: #16301f; --failed-back: #401a1d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--text);
  background: var(--back); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
a { color: var(--link); text-decoration: none; }
code, pre { font-family: ui-monospace, monospace; font-size: .87em; }
code { overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; font-weight: normal; }
thead th { position: sticky; top: 0; background: var(--back);
  color: var(--faint); font-size: .87em; }
.rules td, .rules thead th + th { width: 9.5rem; }
.rules th a { font-weight: 600; white-space: nowrap; }
tr:target { background: var(--sunk); }
small { color: var(--faint); font-size: .8em; font-weight: normal; }
sup { line-height: 0; padding-left: .15rem; }
.runs th { font-weight: 600; }
nav { margin-top: 1rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
#only { margin: 1.2rem 0 0; }
td.passed { color: var(--passed); background: var(--passed-back); }
td small { display: block; }
td.failed { color: var(--failed); background: var(--failed-back);
  font-weight: 600; }
td.differs { color: var(--differs); }
td.not-applicable, td.no-example, td.not-run, td.not-asked-for {
  color: var(--faint); }
.rules .more td { width: auto; padding-top: 0; }
.rules tr:has(+ .more) > * { border-bottom: 0; }
summary { cursor: pointer; color: var(--failed); }
.differs summary { color: var(--differs); }
.more p { margin: 0; color: var(--faint); }
.more p a { text-decoration: underline; }
pre { margin: .4rem 0; padding: .6rem; overflow-x: auto;
  background: var(--sunk); border-radius: .3rem; }
.bar { display: flex; height: .4rem; margin-top: .3rem; overflow: hidden;
  border-radius: .2rem; background: var(--sunk); }
.bar .passed { background: var(--passed); }
.bar .failed { background: var(--failed); min-width: .3rem; }
.bar .differs { background: var(--differs); min-width: .3rem; }
.bar .not-applicable, .bar .not-run, .bar .not-asked-for {
  background: var(--line); }
#only:checked ~ main tbody tr:not(.failed),
#only:checked ~ main section:not(:has(.failed)) { display: none; }
@media (max-width: 44rem) {
  table, tbody, tr, th, td { display: block; width: auto !important; }
  thead { display: none; }
  th, td { border: 0; padding: .15rem .5rem; }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  tr:has(+ .more) { border-bottom: 0; }
  td[data-name]::before { content: attr(data-name) ": ";
    color: var(--text); font-weight: normal; }
  td.for-others { display: none; }
  td small { display: inline; margin-left: .5rem; }
  .runs th, .runs th + td { display: inline; }
}
@media print {
  :root { color-scheme: light; }
  #only, [for=only] { display: none; }
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
<nav>$links</nav>
<input type="checkbox" id="only"> <label for="only">failures only</label>
<main>
$chapters
</main>
<h2>Why some was not run</h2>
<ol>
$notes
</ol>
</body>
</html>
""")
