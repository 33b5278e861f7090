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
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.transforms import Transform
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
RULE = re.compile(r"^\*\*\[(\w+-\d+)\]\*\* (.+?)(?=\n\n|\n*\Z)", re.M | re.S)
BANNER = re.compile(r"^# =+(?: |\n# )\w.*?(?: |\n# )=+\n", re.M)
LINKED = re.compile(
    r"<(a|textarea|h1)\b.*?</\1>"  # is left as it is
    r"|\[(?P<rule>[A-Z]+-\d+)\]|(?<=>)(?P<cell>[A-Z]+-\d+)(?=<)"
    r"|\b[Cc](?P<chapter>hapter [1-9])\b"
    r'|(\.</span>)?<span class="n">(?P<name>\w+)</span>(?=(<span class="p">\()?)'
    r"|<[^>]*>",
    re.S,
)
COMMON = {*dir(bytes), *dir(dict), *dir(set), *dir(list), "close", "open"}
BODY_MAX = 4  # lines below a condition that are marked with it

CITED: dict[str, tuple[str, str, str]] = {}  # page, anchor, the rule itself
for chapter in sorted((ROOT / "spec").glob("[1-9]-*.md")):
    page = f"spec/{chapter.stem}"
    CITED[f"hapter {chapter.stem[0]}"] = page, "", ""
    for rule, sentence in RULE.findall(chapter.read_text("utf-8")):
        CITED[rule] = page, rule, " ".join(sentence.replace("`", "").split())


class Listing:
    """A file of Python: its parts, and where names are defined."""

    def __init__(self, file: str) -> None:
        source = (ROOT / file).read_text("utf-8")
        self.file = file
        self.lines = ["", *source.splitlines(), ""]
        starts = (one.start() for one in BANNER.finditer(source))
        self.sections = [1, *(source.count("\n", 0, n) + 1 for n in starts)]
        self.statements: list[tuple[Any, Any]] = [  # each with what it is in
            (node, parent)
            for parent in ast.walk(ast.parse(source))
            for node in ast.iter_child_nodes(parent)
            if isinstance(node, ast.stmt)
        ]
        cuts = dict.fromkeys([*self.sections, len(self.lines)], "")
        self.places: dict[str, int] = {}  # of names, 0 for several
        for node, parent in self.statements:
            name = getattr(node, "name", "")
            if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
            elif name and isinstance(parent, (ast.Module, ast.ClassDef)):
                prefix = getattr(parent, "name", "")
                cuts[node.lineno] = f"{prefix}.{name}".lstrip(".")
            self.places[name] = 0 if name in self.places else node.lineno
        ends = sorted(cuts)
        self.parts = [(cuts[a], a, b - 1) for a, b in zip(ends, ends[1:])]

    def page(self, line: int) -> str:
        """Return the page with the section of a line."""
        return f"book/source/{self.file[:-3]}-{bisect(self.sections, line) - 1}"

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
                href = f"../{self.page(line)}.html#L-{line}"
                yield raw(f'<p><a href="{href}">{name} line {line}</a></p>')
                yield self.block(first, last, hl_lines=lines)

    def kept(self, line: int) -> list[int]:
        """Return the lines of the code that a citation stands at.

        At a docstring that is the body of the function, at a condition or
        what depends on it both, and in a large table its row.
        """
        while re.match(r" *(#|$)", self.lines[line]):
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
        elif last - first > BODY_MAX:
            body = getattr(node, "body", None)
            first, last = (first, body[0].lineno - 1) if body else (line, line)
        return [n for n in range(first, last + 1) if self.lines[n]]


LISTINGS = {file: Listing(file) for file in ("sbus.py", "sbus_client.py")}


def raw(html: str) -> nodes.Node:
    """Return HTML as part of a page."""
    return nodes.raw("", html, format="html")


class Source(Directive):
    """A section of a file, definition by definition."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        page = f"book/source/{self.arguments[0]}"
        found: list[nodes.Node] = []
        for listing in LISTINGS.values():
            for name, first, last in listing.parts:
                if listing.page(first) == page:
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
        text = escape("\n".join(self.content))
        html = (
            f'<details class="example" data-kind="{self.name}" data-name='
            f'"{name}" data-steps="{steps or -1}"{" open" * is_open}>'
            f"<summary>{name} {head}</summary><div id=example-{name} "
            f'class="drawing"><pre>{text}</pre></div></details>'
        )
        return [raw(html)]


class Rules(Transform):
    """Puts below each rule the code that keeps it, and its examples."""

    default_priority = 700

    def apply(self) -> None:
        page = self.document.settings.env.docname
        for strong in [*self.document.findall(nodes.strong)]:
            rule = strong.astext()[1:-1]
            if rule in CITED and CITED[rule][0] == page:
                section = strong.parent.parent
                place = section.index(strong.parent)
                more = [*takewhile(belongs, section.children[place + 1 :])]
                box = nodes.container("", strong.parent, *more, *extras(rule))
                box.update_basic_atts({"ids": [rule], "classes": ["rule"]})
                section[place : place + 1 + len(more)] = [box]


def belongs(node: nodes.Node) -> bool:
    """Return whether a node belongs to the rule before it."""
    is_rule = re.match(r"\[[A-Z]+-\d+\]", node.astext())
    return not is_rule and not isinstance(node, nodes.section)


def extras(rule: str) -> Iterator[nodes.Node]:
    """Return what is shown below a rule: its code, folded, and examples."""
    page, _, sentence = CITED[rule]
    texts = rule, f"{rule}; {sentence}"  # for the search, and for the index
    entries = [("single", text, rule, "", None) for text in texts]
    yield addnodes.index(entries=entries)
    file = "sbus_client.py" if sentence[:8] == "A client" else "sbus.py"
    if code := [*LISTINGS[file].excerpts(rule)]:
        yield raw(f'<details class="kept"><summary>Kept in {file}</summary>')
        yield from [*code, raw("</details>")]
    examples = ROOT / page.replace("spec/", "spec/examples/")
    if f"\n## {rule}\n" in examples.with_suffix(".md").read_text("utf-8"):
        href = f"examples/{examples.name}.html#{rule.lower()}"
        yield raw(f'<p class="more"><a href="{href}">More examples</a></p>')


def link(
    app: Sphinx, page: str, _: str, context: dict[str, Any], __: object
) -> None:
    """Link what a page cites: rules, chapters, and names in the source."""
    own = LISTINGS["sbus_client.py" if "client" in page else "sbus.py"]

    def linked(cited: re.Match[str]) -> str:
        key = cited["rule"] or cited["cell"] or cited["chapter"] or ""
        name, anchor, tip = CITED.get(key, ("", "", ""))
        *_, dot, word, call = cited.groups()
        if word and "source/" in page and (call or not word.islower()):
            line = own.places.get(word, 0) * (not dot or word not in COMMON)
            name, anchor = own.page(line) if line else "", f"L-{line}"
        if not name:
            return cited[0]
        href = app.builder.get_relative_uri(page, name) + f"#{anchor}"
        look = f' class="id" title="{escape(tip)}"' * bool(tip)
        return f'<a href="{href}"{look}>{cited[0]}</a>'

    if "body" in context:
        context["body"] = LINKED.sub(linked, context["body"])


def finish(app: Sphinx, _: Exception | None) -> None:
    """Write what the pages need beside them."""
    rules = {key: [f"{p}.html#{a}", tip] for key, (p, a, tip) in CITED.items()}
    (Path(app.outdir) / "_static/rules.json").write_text(json.dumps(rules))
    start = '<meta http-equiv="refresh" content="0; url=book/index.html">'
    (Path(app.outdir) / "index.html").write_text(start)


def setup(app: Sphinx) -> dict[str, Any]:
    """Be an extension of Sphinx."""
    for kind in app.config.myst_fence_as_directive:
        app.add_directive(kind, Example)
    app.add_directive("source", Source)
    app.add_transform(Rules)
    app.connect("html-page-context", link)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
