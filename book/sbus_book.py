"""What the book adds to Sphinx: rules with their code, examples, the source.

`[PUB-2]` in any text or code becomes a link to the rule, and a name in the
source one to its definition.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect
from collections.abc import Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.transforms import Transform
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from conformance.examples import read_blocks, read_cases
from conformance.rules import Rule, read_rules
from every_order import ends_html, example_html
from flood import script
from lesson_answers import ANSWERS
from mistakes import SHOWN
from picture import draw

ROOT = Path(__file__).resolve().parents[1]
BANNER = re.compile(r"^# =+(?: |\n# )\w.*?(?: |\n# )=+\n", re.M)
LINKED = re.compile(
    r"<(a|textarea|h1)\b.*?</\1>"  # is left as it is
    r"|\[(?P<rule>[A-Z]+-\d+)\]|(?<=[>;])(?P<cell>[A-Z]+-\d+)(?=[<&])"
    r'|(\.</span>)?<span class="n">(\w+)</span>(?=(<span class="p">\()?)'
    r"|<[^>]*>",
    re.S,
)
COMMON = {*dir(bytes), *dir(dict), *dir(set), *dir(list), "close", "open"}
FLOOD = "spec/5-flood-control"
NAMED = re.compile(r"<code[^>]*><span[^>]*>([\w.]+)</span></code>")
COMMENT = re.compile(r" *(#|$)")  # or an empty line


raw = partial(nodes.raw, "", format="html")  # HTML as part of a page
RULES = read_rules()
CITED = {  # page, anchor, the rule itself
    rule: (f"spec/{Path(file).stem}", rule, sentence.replace("`", ""))
    for rule, *_, file, sentence in RULES.values()
}


def is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a text and nothing else."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Listing:
    """A file of Python: its parts, and where names are defined."""

    def __init__(self, stem: str, folder: str = "") -> None:
        source = (ROOT / folder / f"{stem}.py").read_text("utf-8")
        self.stem = stem
        self.lines = ["", *source.splitlines(), ""]
        starts = (banner.start() for banner in BANNER.finditer(source))
        self.sections = [1, *(source.count("\n", 0, n) + 1 for n in starts)]
        if folder:  # it is shown on one page
            del self.sections[1:]
        tags = ModuleAnalyzer.for_string(source, stem).find_tags()
        cuts = dict.fromkeys([*self.sections, len(self.lines)], "")
        cuts.update((first, name) for name, (_, first, _) in tags.items())
        ends = sorted(cuts)
        self.parts = [(cuts[a], a, b - 1) for a, b in zip(ends, ends[1:])]
        self.starts = {name: first for name, first, _ in self.parts if name}
        self.places = {}  # of names, the first of several
        for first, name in sorted(cuts.items(), reverse=True):
            if name:
                while self.lines[first].lstrip().startswith("@"):
                    first += 1  # a decorator
                self.places[name.rpartition(".")[2]] = first
        for match in re.finditer(r"^(\w+) = ", source, re.M):
            self.places[match[1]] = source.count("\n", 0, match.start()) + 1
        self.statements: list[tuple[Any, Any]] = [  # each with what it is in
            (node, parent)
            for parent in ast.walk(ast.parse(source))
            for node in ast.iter_child_nodes(parent)
            if isinstance(node, ast.stmt)
        ]
        self.prose = {  # lines of docstrings
            line
            for node, _ in self.statements
            if is_docstring(node)
            for line in range(node.lineno, node.end_lineno + 1)
        }

    def page(self, line: int) -> str:
        """Return the page with the section of a line."""
        number = bisect(self.sections, line) - 1
        return f"book/source/{self.stem}-{number}"

    def block(self, first: int, last: int, **more: Any) -> nodes.Node:
        """Return lines as a block of code."""
        text = "\n".join(self.lines[first : last + 1]).rstrip()
        args = {"linenostart": first, **more}
        kind = {"language": "python", "linenos": True, "highlight_args": args}
        return nodes.literal_block(text, text, **kind)

    def excerpts(self, rule: str) -> Iterator[nodes.Node]:
        """Return the parts that keep a rule; the lines that do are marked."""
        cited = re.compile(rf'\[{rule}\]|"{rule}"')
        hits = (n for n, line in enumerate(self.lines) if cited.search(line))
        kept = {line for number in hits for line in self.kept(number)}
        for name, first, last in self.parts:
            if lines := [n - first + 1 for n in kept if first <= n <= last]:
                line = first + min(lines) - 1
                link = f'<a href="../{self.page(line)}.html#L-{line}">'
                yield raw(f"<p>{link}{name or 'line'} {line}</a></p>")
                yield self.block(first, last, hl_lines=lines)

    def kept(self, line: int) -> list[int]:
        """Return the lines of the code that a citation stands at.

        At a docstring that is the body of the function, at a condition or
        what depends on it both, and in a large table its row.
        """
        while COMMENT.match(self.lines[line]):
            line += 1
        around = (
            (node.end_lineno - node.lineno, index)
            for index, (node, _) in enumerate(self.statements)
            if node.lineno <= line <= node.end_lineno
        )
        node, parent = self.statements[min(around)[1]]
        first, last = node.lineno, node.end_lineno
        if is_docstring(node):
            first, last = last + 1, getattr(parent, "end_lineno", 0)
        elif isinstance(parent, ast.If) and parent.body == [node]:
            first = parent.lineno
        elif last - first > 4:  # it is long
            body = getattr(node, "body", None)
            first, last = (first, body[0].lineno - 1) if body else (line, line)
        return [
            number
            for number in range(first, last + 1)
            if number not in self.prose
            and not COMMENT.match(self.lines[number])
        ]


LISTINGS = {stem: Listing(stem) for stem in ("sbus", "sbus_client")}
LISTINGS["model"] = Listing("model", "spec")


class Source(Directive):
    """A section of a file, definition by definition."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        listing = LISTINGS[self.arguments[0].partition("-")[0]]
        parts: list[nodes.Node] = []
        for name, first, last in listing.parts:
            if listing.page(first).endswith(f"/{self.arguments[0]}"):
                block = listing.block(first, last, linespans="L")
                title = nodes.title("", "", nodes.literal("", name))
                part = nodes.section("", title, block, ids=[name])
                parts.append(part if name else block)
        return parts


def example(kind: str, title: str, text: str, is_open: bool) -> nodes.Node:
    """Return an example or a question, which book.js draws and runs."""
    name, _, head = title.partition(" ")
    data = {"kind": kind, "name": name}
    if kind == "question":
        data["answer"] = ANSWERS[name][0][0]
    said = name.replace("-", " ").capitalize()
    more = ends_html(text, name) if kind == "orders" else ""
    head = f"<summary>{said}</summary><p>{head}</p>"
    return raw(example_html(head, text, more, is_open, **data))


class Example(Directive):
    """An example or a question."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        is_open = "examples/" not in self.state.document.current_source
        text = "\n".join(self.content)
        return [example(self.name, self.arguments[0], text, is_open)]


class Picture(Example):
    """A picture that is written as text."""

    def run(self) -> list[nodes.Node]:
        return [raw(draw("\n".join(self.content), self.arguments[0]))]


class FoundBy(Directive):
    """Words that, typed into the search, find this page first."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        words = ", ".join(self.content).split(", ")
        entries = [("single", word, "", "main", None) for word in words]
        return [addnodes.index(entries=entries)]


def printed(rule: Rule, *before: nodes.Node) -> nodes.paragraph:
    """Return a rule as it is printed, with its origins as badges."""
    said = [*before, *code_spans(rule.statement)]
    for origin in rule.origin.split(", "):
        look = ["origin", origin.split()[0]]
        said += [nodes.Text(" "), nodes.inline("", origin, classes=look)]
    return nodes.paragraph("", "", *said)


def code_spans(text: str) -> Iterator[nodes.Node]:
    """Return a sentence, of which every second part stands in backticks."""
    for number, part in enumerate(text.split("`")):
        yield nodes.literal("", part) if number % 2 else nodes.Text(part)


class Rules(Transform):
    """Makes a card of each rule, with the code and examples folded below."""

    default_priority = 700

    def apply(self) -> None:
        page = self.document.settings.env.docname
        for strong in [*self.document.findall(nodes.strong)]:
            name = strong.astext()[1:-1]
            if name in CITED and CITED[name][0] == page:
                strong.parent.replace_self(self.card(RULES[name]))
        if page.startswith("spec/examples/"):
            for section in self.document.findall(nodes.section):
                if rule := RULES.get(section[0].astext()):
                    section.insert(1, printed(rule))

    def card(self, rule: Rule) -> nodes.Node:
        """Return a rule, its origin, and what shows and keeps it."""
        said = printed(
            rule, raw(f'<a class="id" href="#{rule.id}">{rule.id}</a> ')
        )
        looks = ["rule", rule.level.split()[0].lower()]
        below = self.below(rule.id)
        return nodes.container("", said, *below, ids=[rule.id], classes=looks)

    def below(self, rule: str) -> Iterator[nodes.Node]:
        """Return an entry for the search, and one line: examples, code."""
        page, _, sentence = CITED[rule]
        yield addnodes.index(entries=[("single", rule, rule, "main", None)])
        stem = "sbus_client" if sentence[:8] == "A client" else "sbus"
        code = [*LISTINGS[stem].excerpts(rule)]
        model = [*LISTINGS["model"].excerpts(rule)]
        file = page.replace("spec/", "examples/")
        text = (ROOT / f"spec/{file}.md").read_text("utf-8")
        first = rf"\n## {rule}\n.*?```(\w+) (\S+) ([^\n]*)\n(.*?)\n```"
        shown = []
        if match := re.search(first, text, re.S):
            kind, name, head, lines = match.groups()
            shown = [example(kind, f"{name} {head}", lines, page != FLOOD)]
            if page == FLOOD:  # there each rule has an example beside it
                yield shown.pop()
            link = f'<a href="{file}.html#{rule.lower()}">All examples</a>'
            shown.append(raw(f'<p class="more">{link}</p>'))
        parts = {"example": match, "code": code, "model": model}
        said = " · ".join(part for part, is_there in parts.items() if is_there)
        if not said:
            return
        yield raw(f'<details class="kept"><summary>{said}</summary>')
        if model:
            model.insert(0, raw("<p>In the model of the specification:</p>"))
        yield from [*shown, *code, *model, raw("</details>")]


WITHOUT_SCRIPTS = (
    "<noscript><p><strong>JavaScript is switched off here</strong>, so"
    " examples are shown as text, and cannot be run.</p></noscript>"
)


def link(app: Sphinx, page: str, *more: Any) -> None:
    """Link what a page cites: rules, chapters, and names in the source."""
    _, context, _ = more
    stem = page.rpartition("/")[2].partition("-")[0]
    code = LISTINGS.get(stem, LISTINGS["sbus"])

    def linked(cited: re.Match[str]) -> str:
        key = cited["rule"] or cited["cell"] or ""
        name, anchor, tip = CITED.get(key, ("", "", ""))
        *_, dot, word, call = cited.groups("")
        is_name = word not in COMMON if dot else call or not word.islower()
        line = code.places.get(word, 0)
        if line and is_name and "source/" in page:
            name, anchor = code.page(line), f"L-{line}"
        if not name:
            return cited[0]
        href = app.builder.get_relative_uri(page, name) + f"#{anchor}"
        look = f' class="id" title="{escape(tip)}"' * bool(tip)
        return f'<a href="{href}"{look}>{cited[0]}</a>'

    def toured(name: re.Match[str]) -> str:
        if not (line := LISTINGS["sbus"].starts.get(name[1], 0)):
            return name[0]
        href = app.builder.get_relative_uri(page, code.page(line))
        return f'<a href="{href}#{name[1]}">{name[0]}</a>'

    body = LINKED.sub(linked, context.get("body", ""))
    if page == "book/source":
        body = NAMED.sub(toured, body)
    if 'class="example"' in body:
        body = body.replace("</h1>", f"</h1>{WITHOUT_SCRIPTS}", 1)
    context["body"] = body


def figures() -> dict[str, str]:
    """Return what the pages say of the size of the project."""
    files = [ROOT / "test_sbus.py", *(ROOT / "tests").rglob("test_*.py")]
    tests = "".join(path.read_text("utf-8") for path in files)
    mistakes = (ROOT / "tests/kit/broken_servers.txt").read_text("utf-8")
    counts = {
        "rules": len(RULES),
        "blocks": len([*read_blocks()]),
        "cases": len(read_cases()),
        "shown_mistakes": len(SHOWN),
        "mistakes": len(re.findall(r"^[a-z0-9-]+: ", mistakes, re.M)),
        "tests": len(re.findall(r"^ *(?:async )?def test_", tests, re.M)),
        "lines": len(LISTINGS["sbus"].lines) - 2,
    }
    return {name: f"{count:,}" for name, count in counts.items()}


def finish(app: Sphinx, _: Exception | None) -> None:
    """Write what the scripts of the pages read."""
    (Path(app.outdir) / "_static/rules.json").write_text(json.dumps(CITED))
    (Path(app.outdir) / "_static/flood-table.js").write_text(script())


def setup(app: Sphinx) -> dict[str, Any]:
    """Be an extension of Sphinx."""
    for kind in app.config.myst_fence_as_directive:
        app.add_directive(kind, Picture if kind == "picture" else Example)
    app.add_directive("source", Source)
    app.add_directive("found-by", FoundBy)
    app.add_transform(Rules)
    app.connect("html-page-context", link)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
