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
from sphinx.application import Sphinx

from drawing import drawn

ROOT = Path(__file__).resolve().parents[1]
RULE = re.compile(r"^\*\*\[([A-Z]+-\d+)\]\*\* (.+?)(?=\n\n|\n*\Z)", re.M | re.S)
EXAMPLE = re.compile(r"^```(?:match|packet|conversation|client) (\S+)(.*)", re.M)
BANNER = re.compile(r"^# =+(?: |\n# )\w.*?(?: |\n# )=+\n", re.M)
LINKED = re.compile(
    r"<(a|textarea|h1)\b.*?</\1>"  # is left as it is
    r"|\[(?P<rule>[A-Z]+-\d+)\]|(?<=>)(?P<cell>[A-Z]+-\d+)(?=<)"
    r"|\b[Cc]hapter (?P<chapter>[1-9])\b"
    r"|(?P<file>sbus(?:_client)?\.py), line (?P<line>\d+)"
    r'|(?P<dot>\.</span>)?<span class="n">(?P<name>\w+)</span>'
    r"|<[^>]*>",
    re.S,
)
COMMON = {*dir(bytes), *dir(dict), *dir(set), *dir(list), "close", "open"}
CLASS_MAX = 40  # lines of a class that is listed in one piece
BODY_MAX = 4  # lines below a condition that are marked with it


def chapters(folder: str) -> dict[str, str]:
    """Return the texts of the chapters in a folder by their pages."""
    paths = sorted((ROOT / folder).glob("[1-9]-*.md"))
    return {f"{folder}/{path.stem}": path.read_text() for path in paths}


PAGES = list(chapters("spec"))
RULES = {  # the page of each, and its sentence
    rule: (page, " ".join(sentence.split()))
    for page, text in chapters("spec").items()
    for rule, sentence in RULE.findall(text)
}
EXAMPLES = [  # that are not in the chapters: page, name, rules
    (page, *found)
    for page, text in chapters("spec/examples").items()
    for found in EXAMPLE.findall(text)
]


class Listing:
    """A file of Python: its parts, and where names are defined."""

    def __init__(self, file: str) -> None:
        source = (ROOT / file).read_text("utf-8")
        self.file = file
        self.lines = ["", *source.splitlines(), ""]
        starts = (one.start() for one in BANNER.finditer(source))
        self.sections = [1, *(source.count("\n", 0, n) + 1 for n in starts)]
        self.places: dict[str, int] = {}
        self.statements = [
            (node, parent)
            for parent in ast.walk(ast.parse(source))
            for node in ast.iter_child_nodes(parent)
            if isinstance(node, ast.stmt)
        ]
        cuts = dict.fromkeys([*self.sections, len(self.lines)], "")
        for node, parent in self.statements:
            name = getattr(node, "name", "")
            if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
                self.places[ast.unparse(node.targets[0])] = node.lineno
            elif name and isinstance(parent, ast.Module):
                cuts[node.lineno] = name
                self.places[name] = node.lineno
            elif name and isinstance(parent, ast.ClassDef):
                self.places[name] = 0 if name in self.places else node.lineno
                if length(parent) > CLASS_MAX:
                    cuts[node.lineno] = f"{parent.name}.{name}"
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
            marked = [n - first + 1 for n in kept if first <= n <= last]
            if marked:
                head = f"<p><code>{name}</code> {self.file}, line {first}</p>"
                yield raw(head)
                yield self.block(first, last, hl_lines=marked)

    def kept(self, line: int) -> list[int]:
        """Return the lines of the code that a citation stands at.

        At a docstring that is the body of the function, at a condition or
        what depends on it both, and in a large table its row.
        """
        while re.match(r" *(#|$)", self.lines[line]):
            line += 1
        node, parent = min(
            (n for n in self.statements if n[0].lineno <= line <= ends(n[0])),
            key=lambda one: length(one[0]),
        )
        first, last = node.lineno, ends(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = last + 1, ends(parent)
        elif hasattr(node, "body") and length(node) > BODY_MAX:
            last = node.body[0].lineno - 1
        elif isinstance(parent, ast.If) and parent.body == [node]:
            first = parent.lineno
        elif isinstance(node, ast.Assign) and length(node) > BODY_MAX:
            first = last = line
        return [n for n in range(first, last + 1) if self.lines[n]]


def ends(node: ast.AST) -> int:
    """Return the last line of a statement; a file has none."""
    return int(getattr(node, "end_lineno", 0))


def length(node: Any) -> int:
    """Return how many lines follow the first one of a statement."""
    return int(node.end_lineno - node.lineno)


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
    """An example that is drawn, and that the page runs; or a question."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        name, _, head = self.arguments[0].partition(" ")
        head, _, steps = head.partition("steps=")
        lines = [line for line in self.content if line.strip()]
        said = [escape(line[2:]) for line in lines if line[0] == "#"]
        hints = [one[6:] for one in said if one.startswith("Hint: ")]
        note = " ".join(one for one in said if one[6:] not in hints)
        drawing = drawn(self.name, [one for one in lines if one[0] != "#"])
        is_open = "examples/" not in self.state.document.current_source
        hint = "<details><summary>A hint</summary><p>{}</p></details>"
        text = escape("\n".join(self.content))
        return [
            raw(
                f'<details class="example" data-kind="{self.name}" '
                f'data-name="{name}" data-steps="{steps}" '
                f'data-text="{text}"{" open" * is_open}>'
                f"<summary>{name} {head}</summary><p>{note}</p>"
                f'<div class="drawing" id="example-{name}">{drawing}</div>'
                f"{''.join(map(hint.format, hints))}</details>"
            )
        ]


def add_code(app: Sphinx, document: nodes.document) -> None:
    """Put below each rule the code that keeps it, and its examples."""
    for strong in [*document.findall(nodes.strong)]:
        rule = strong.astext()[1:-1]
        page, sentence = RULES.get(rule, ("", ""))
        if page != app.env.docname:
            continue
        section = strong.parent.parent
        place = section.index(strong.parent)
        more = [*takewhile(belongs, section.children[place + 1 :])]
        section[place : place + 1 + len(more)] = [
            nodes.container(
                "",
                strong.parent,
                *more,
                *extras(rule),
                ids=[rule],
                classes=["rule"],
            )
        ]


def belongs(node: nodes.Node) -> bool:
    """Return whether a node belongs to the rule before it."""
    is_rule = re.match(r"\[[A-Z]+-\d+\]", node.astext())
    return not is_rule and not isinstance(node, nodes.section)


def extras(rule: str) -> Iterator[nodes.Node]:
    """Return what is shown below a rule, folded: code and more examples."""
    is_client = RULES[rule][1].startswith("A client")
    file = "sbus_client.py" if is_client else "sbus.py"
    if code := [*LISTINGS[file].excerpts(rule)]:
        yield raw(f'<details class="kept"><summary>Kept in {file}</summary>')
        yield from code
        yield raw("</details>")
    links = ", ".join(
        f'<a href="examples/{Path(page).name}.html#example-{name}">{name}</a>'
        for page, name, head in EXAMPLES
        if f"[{rule}]" in head
    )
    if links:
        head = "<details><summary>More examples</summary>"
        yield raw(f"{head}<p>{links}</p></details>")


def link(
    app: Sphinx, page: str, _: str, context: dict[str, Any], __: object
) -> None:
    """Link all that a page cites: rules, chapters, lines, names in code."""
    is_server = "client" not in page
    own = LISTINGS["sbus.py" if is_server else "sbus_client.py"]
    is_source = page.startswith("book/source/")

    def linked(found: re.Match[str]) -> str:
        place = found.groupdict()
        rule = RULES.get(place["rule"] or place["cell"] or "")
        target, anchor, title = "", "", ""
        if rule:
            target, anchor, title = rule[0], place["rule"] or place["cell"], rule[1]
        elif place["chapter"]:
            target = PAGES[int(place["chapter"]) - 1]
        elif place["line"]:
            line = int(place["line"])
            target, anchor = LISTINGS[place["file"]].page(line), f"L-{line}"
        elif is_source and place["name"]:
            line = own.places.get(place["name"], 0)
            if line and not (place["dot"] and place["name"] in COMMON):
                target, anchor = own.page(line), f"L-{line}"
        if not target:
            return found[0]
        href = app.builder.get_relative_uri(page, target)
        kind = ' class="id"' * bool(title)
        title = f' title="{escape(title)}"' * bool(title)
        return f'<a href="{href}#{anchor}"{kind}{title}>{found[0]}</a>'

    if "body" in context:
        context["body"] = LINKED.sub(linked, context["body"])


def finish(app: Sphinx, error: Exception | None) -> None:
    """Write what the pages need beside them."""
    rules = {rule: [f"{p}.html", text] for rule, (p, text) in RULES.items()}
    static = Path(app.outdir) / "_static"
    (static / "rules.json").write_text(json.dumps(rules), "utf-8")
    to_start = '<meta http-equiv="refresh" content="0; url=book/index.html">'
    (Path(app.outdir) / "index.html").write_text(to_start, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Be an extension of Sphinx."""
    for kind in ("match", "packet", "conversation", "client", "question"):
        app.add_directive(kind, Example)
    app.add_directive("source", Source)
    app.connect("doctree-read", add_code)
    app.connect("html-page-context", link)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
