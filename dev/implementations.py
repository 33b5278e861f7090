"""Try all implementations that are known, and write how they fare.

    make book-results                 those in contrib/implementations
    python3 dev/implementations.py TABLE PAGE [FILE ...]   or in these files

An implementation is a file of five lines, as book/results.md says.  Its
commands are run in the root of the repository, and {address} stands for the
place of the socket.  TABLE gets two tables in Markdown: how each fares alone,
and each client with each server.  PAGE gets a page in HTML, rule by rule.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

from conformance.__main__ import parse_options, run_all
from conformance.conversation import Failure, perform
from conformance.examples import Conversation
from conformance.kit import LEVELS, all_cases, scope_of
from conformance.report import (
    JUDGED,
    WRONG,
    Run,
    edition,
    failure_lines,
    not_run,
    results_by_rule,
    summary,
    tell,
    verdicts,
)
from conformance.rules import SPEC, Rule, read_rules
from conformance.server import ServerProcess
from conformance.trial import NotApplicable
from pairs import Pair, can_be_held

FILES = SPEC.parent / "contrib/implementations"
SECONDS_MAX = 2.0  # for an answer
BUILD_SECONDS_MAX = 300  # for a compiler
HEAD = ["Implementation", "Version", "Tried", *LEVELS, "client"]
DAY = time.strftime("%Y-%m-%d")


class Implementation(NamedTuple):
    """What a file says of an implementation; see above."""

    name: str
    version: str
    server: str
    client: str
    without: str


def read(file: Path) -> Implementation:
    """Return what a file says; raise ValueError if a line is not there."""
    lines = file.read_text("utf-8").splitlines()
    pairs = [line.split(":", 1) for line in lines if line[:1] != "#"]
    if [*zip(*pairs)][:1] != [Implementation._fields]:
        form = ", ".join(Implementation._fields)
        raise ValueError(f"{file} needs a line of each: {form}")
    return Implementation(*(text.strip() for _, text in pairs))


def judge(tried: Implementation) -> list[Run]:
    """Return how a server and a client fare, whichever there are."""
    runs: list[Run] = []
    for option, command in ("server", tried.server), ("client", tried.client):
        if not command:
            continue
        words = [f"--{option}", command, "--level=daemon"]
        without = ["--without", tried.without] if tried.without else []
        try:
            if option == "client":
                build(command)
            results = run_all(parse_options([*words, *without]))
            runs += [run._replace(name=tried.name) for run in results]
        except (Failure, NotApplicable, OSError) as error:
            print(f"{tried.name} is not tried here: {error}", file=sys.stderr)
    return runs


def build(command: str) -> None:
    """Start a client once where no server is: that may compile it."""
    words = shlex.split(command.replace("{address}", "/dev/null/none"))
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BUILD_SECONDS_MAX,
        )


# ---- The tables


def row(tried: Implementation, runs: Sequence[Run]) -> list[str]:
    """Return the cells of an implementation: how many examples passed."""
    levels = {case.name: scope_of(case) for case in all_cases()}
    cells = dict.fromkeys(HEAD[3:], "")
    for run in runs:
        if run.kind == "client":
            cells["client"] = tell(run.results)
            continue
        for level in LEVELS:
            of_level = [r for r in run.results if levels[r.case] == level]
            cells[level] = tell(of_level)
    return [tried.name, tried.version, DAY if runs else "", *cells.values()]


def rows_of_pairs(
    servers: Sequence[Implementation], clients: Sequence[Implementation]
) -> Iterator[list[str]]:
    """Yield a row for each server: how it fares with each client."""
    yield ["Server", *(client.name for client in clients)]
    for server in servers:
        cells = (try_pair(server.server, client.client) for client in clients)
        yield [server.name, *cells]


def try_pair(server: str, client: str) -> str:
    """Return how a server fares with a client, in a few words."""
    passed, failed = 0, []
    with ServerProcess(server, SECONDS_MAX) as process:
        pair = Pair(process, client)
        try:
            process.start()
            pair.connect().close()
        except (Failure, NotApplicable, OSError):
            return "not tried here"
        for case in filter(can_be_held, all_cases()):
            assert isinstance(case, Conversation)
            try:
                is_right = not perform(pair, case).wrong
            except NotApplicable:
                continue
            passed += is_right
            failed += [] if is_right else [case.rules[0]]
    if failed:
        return f"fails {' '.join(dict.fromkeys(failed))}"
    return f"works, {passed} examples"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, in Markdown."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- The page for browsers: it needs nothing else


def page(runs: Sequence[Run], beside: Path) -> str:
    """Return an HTML page; its rules link to the book if it is there."""
    columns = [*map(column, runs)]
    rules = [
        rule
        for rule in read_rules().values()
        if any(rule.id in cells for cells in columns)
    ]
    names = (f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    whys = dict.fromkeys(why for run in runs for why in not_run(run.results))
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    return Template(template).substitute(
        date=DAY,
        edition=edition(),
        runs="\n".join(map(run_html, runs)),
        names="".join(names),
        rules="\n".join(rule_row(rule, columns, beside) for rule in rules),
        notes="\n".join(f"<li>{escape(why)}</li>" for why in whys),
    )


def run_html(run: Run) -> str:
    """Return how a server or client fared, and what is wrong, folded."""
    lines = [
        line
        for result in run.results
        if result.verdict in WRONG
        for line in (result.verdict.upper(), *failure_lines(result))
    ]
    text = "\n".join(lines)
    return (
        f"<h2>{escape(run.name)}</h2>\n"
        f"<p>{run.kind} <code>{escape(run.command)}</code></p>\n"
        f"<details><summary>{summary(run.results)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def column(run: Run) -> dict[str, str]:
    """Return a cell for each rule that is for a server or a client."""
    by_rule, cells = results_by_rule(run.results), {}
    for rule, verdict in verdicts(run.results).items():
        about, shown = by_rule[rule], verdict
        if verdict == "passed":
            shown = tell(about)
        elif verdict in JUDGED:
            shown = f"{verdict}, {tell(about)}"
        if about or read_rules()[rule].subject == run.kind:
            cells[rule] = f'<td class="{verdict}">{shown}</td>'
    return cells


def rule_row(
    rule: Rule, columns: Sequence[dict[str, str]], beside: Path
) -> str:
    """Return the row of a rule, with its sentence and its cells."""
    link = Path("../spec", rule.file).with_suffix(".html")
    place = (SPEC / rule.file).as_uri()
    if (beside / link).exists():
        place = f"{link}#{rule.id}"
    said = re.sub("`([^`]+)`", r"<code>\1</code>", escape(rule.statement))
    cells = "".join(cells.get(rule.id, "<td></td>") for cells in columns)
    return (
        f'<tr id="{rule.id}"><th scope="row"><a href="{place}">{rule.id}</a> '
        f"{said} <small>{rule.origin}</small></th>{cells}</tr>"
    )


def main(table_file: str, page_file: str, *files: str) -> int:
    """Write the tables and the page; return 0."""
    known = [*map(read, map(Path, files or sorted(FILES.glob("*.txt"))))]
    runs = {tried: judge(tried) for tried in known}
    servers = [tried for tried in known if tried.server]
    clients = [tried for tried in known if tried.client]
    alone = [HEAD, *(row(tried, runs[tried]) for tried in known)]
    pairs = [*rows_of_pairs(servers, clients)]
    text = f"{table(alone)}\n{table(pairs)}"
    Path(table_file).write_text(text, "utf-8")

    titled = [
        run._replace(name=f"{tried.name} {tried.version}".strip())
        for tried, of_tried in runs.items()
        for run in of_tried
    ]
    place = Path(page_file)
    place.write_text(page(titled, place.parent), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
