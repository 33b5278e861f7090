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

ROOT = Path(__file__).resolve().parents[1]
RULE = re.compile(r"^\*\*\[(\w+-\d+)\]\*\* (.+?)(?=\n\n|\n*\Z)", re.M | re.S)
BANNER = re.compile(r"^# =+(?: |\n# )\w.*?(?: |\n# )=+\n", re.M)
LINKED = re.compile(
    r"<(a|textarea|h1)\b.*?</\1>"  # is left as it is
    r"|\[(?P<rule>[A-Z]+-\d+)\]|(?<=[>;])(?P<cell>[A-Z]+-\d+)(?=[<&])"
    r'|(\.</span>)?<span class="n">(\w+)</span>(?=(<span class="p">\()?)'
    r"|<[^>]*>",
    re.S,
)
COMMON = {*dir(bytes), *dir(dict), *dir(set), *dir(list), "close", "open"}
COMMENT = re.compile(r" *(#|$)")  # or an empty line

raw = partial(nodes.raw, "", format="html")  # HTML as part of a page
CITED: dict[str, tuple[str, str, str]] = {}  # page, anchor, the rule itself
for chapter in sorted((ROOT / "spec").glob("[1-9]-*.md")):
    page = f"spec/{chapter.stem}"
    for rule, sentence in RULE.findall(chapter.read_text("utf-8")):
        CITED[rule] = page, rule, " ".join(sentence.replace("`", "").split())


class Listing:
    """A file of Python: its parts, and where names are defined."""

    def __init__(self, stem: str) -> None:
        source = (ROOT / f"{stem}.py").read_text("utf-8")
        self.stem = stem
        self.lines = ["", *source.splitlines(), ""]
        starts = (one.start() for one in BANNER.finditer(source))
        self.sections = [1, *(source.count("\n", 0, n) + 1 for n in starts)]
        tags = ModuleAnalyzer.for_string(source, stem).find_tags()
        cuts = dict.fromkeys([*self.sections, len(self.lines)], "")
        cuts.update((first, name) for name, (_, first, _) in tags.items())
        ends = sorted(cuts)
        self.parts = [(cuts[a], a, b - 1) for a, b in zip(ends, ends[1:])]
        self.places = {  # of names, the first of several
            name.rpartition(".")[2]: first
            for first, name in sorted(cuts.items(), reverse=True)
            if name
        }
        for one in re.finditer(r"^(\w+) = ", source, re.M):
            self.places[one[1]] = source.count("\n", 0, one.start()) + 1
        self.statements: list[tuple[Any, Any]] = [  # each with what it is in
            (node, parent)
            for parent in ast.walk(ast.parse(source))
            for node in ast.iter_child_nodes(parent)
            if isinstance(node, ast.stmt)
        ]

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
        found = (n for n, line in enumerate(self.lines) if cited.search(line))
        kept = {line for number in found for line in self.kept(number)}
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
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = last + 1, getattr(parent, "end_lineno", 0)
        elif isinstance(parent, ast.If) and parent.body == [node]:
            first = parent.lineno
        elif last - first > 4:  # it is long
            body = getattr(node, "body", None)
            first, last = (first, body[0].lineno - 1) if body else (line, line)
        lines = range(first, last + 1)
        return [n for n in lines if not COMMENT.match(self.lines[n])]


LISTINGS = {stem: Listing(stem) for stem in ("sbus", "sbus_client")}


class Source(Directive):
    """A section of a file, definition by definition."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        listing = LISTINGS[self.arguments[0].partition("-")[0]]
        found: list[nodes.Node] = []
        for name, first, last in listing.parts:
            if listing.page(first).endswith(f"/{self.arguments[0]}"):
                block = listing.block(first, last, linespans="L")
                title = nodes.title("", "", nodes.literal("", name))
                part = nodes.section("", title, block, ids=[name])
                found.append(part if name else block)
        return found


class Example(Directive):
    """An example or a question, which book.js draws, and the page runs."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        name, _, head = self.arguments[0].partition(" ")
        head, _, steps = head.partition(" steps=")
        is_open = "examples/" not in self.state.document.current_source
        html = (
            f'<details class="example" data-kind="{self.name}" data-name='
            f'"{name}" data-steps="{steps or -1}"{" open" * is_open}>'
            f"<summary>{name}</summary><p>{head}</p><div id=example-{name} "
            f'class="drawing"><pre>{escape(chr(10).join(self.content))}'
            "</pre></div></details>"
        )
        return [raw(html)]


class Rules(Transform):
    """Puts below each rule the code that keeps it, and its examples."""

    default_priority = 700

    def apply(self) -> None:
        page = self.document.settings.env.docname
        for strong in [*self.document.findall(nodes.strong)]:
            rule, said = strong.astext()[1:-1], strong.parent
            if rule in CITED and CITED[rule][0] == page:
                said.update_basic_atts({"ids": [rule], "classes": ["rule"]})
                place = said.parent.index(said) + 1
                said.parent[place:place] = [*self.below(rule)]

    def below(self, rule: str) -> Iterator[nodes.Node]:
        """Return entries of the index, the code, and a link to examples."""
        page, _, sentence = CITED[rule]
        texts = rule, f"{rule}; {sentence}"  # for the search, and to read
        entries = [("single", text, rule, "", None) for text in texts]
        yield addnodes.index(entries=entries)
        examples = page.replace("spec/", "examples/")
        text = (ROOT / f"spec/{examples}.md").read_text("utf-8")
        if f"\n## {rule}\n" in text:
            link = f'<a href="{examples}.html#{rule.lower()}">Examples</a>'
            yield raw(f'<p class="more">{link}</p>')
        stem = "sbus_client" if sentence[:8] == "A client" else "sbus"
        if code := [*LISTINGS[stem].excerpts(rule)]:
            head = f"<summary>The code in {stem}.py</summary>"
            yield from [raw(f'<details class="kept">{head}'), *code]
            yield raw("</details>")


def link(app: Sphinx, page: str, *more: Any) -> None:
    """Link what a page cites: rules, chapters, and names in the source."""
    _, context, _ = more
    own = LISTINGS["sbus_client" if "client" in page else "sbus"]

    def linked(cited: re.Match[str]) -> str:
        key = cited["rule"] or cited["cell"] or ""
        name, anchor, tip = CITED.get(key, ("", "", ""))
        *_, dot, word, call = cited.groups("")
        is_name = word not in COMMON if dot else call or not word.islower()
        if (line := own.places.get(word, 0)) and is_name and "source/" in page:
            name, anchor = own.page(line), f"L-{line}"
        if not name:
            return cited[0]
        href = app.builder.get_relative_uri(page, name) + f"#{anchor}"
        look = f' class="id" title="{escape(tip)}"' * bool(tip)
        return f'<a href="{href}"{look}>{cited[0]}</a>'

    context["body"] = LINKED.sub(linked, context.get("body", ""))


def finish(app: Sphinx, _: Exception | None) -> None:
    """Write what book.js links to."""
    (Path(app.outdir) / "_static/rules.json").write_text(json.dumps(CITED))


def setup(app: Sphinx) -> dict[str, Any]:
    """Be an extension of Sphinx."""
    for kind in app.config.myst_fence_as_directive:
        app.add_directive(kind, Example)
    app.add_directive("source", Source)
    app.add_transform(Rules)
    app.connect("html-page-context", link)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
