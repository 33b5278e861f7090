"""What a stage's page shows: an editor, the new code, and what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from conformance.kit import all_cases, block_of
from conformance.stages import DEMANDS
from cut_stage import program
from every_order import example_html
from mistakes import SHOWN, choices, excerpt
from sbus_book import code_spans, raw

FORM, MISTAKE = (
    Template(Path(__file__).with_name(name).read_text("utf-8"))
    for name in ("stage.html", "mistake.html")
)
RULES = {f"`{block_of(case)}`": case.rules for case in all_cases()}


class Editor(Directive):
    """A form with the server of the stage before, for the kit to try."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [*self.parts(int(self.arguments[0]))]

    def parts(self, stage: int) -> Iterator[nodes.Node]:
        """Return what the page of a stage shows here."""
        start = escape(program(stage - 1))
        yield raw(FORM.substitute(stage=stage, before=stage - 1, start=start))


class NewCode(Editor):
    """The parts of the server that are new; its new lines are marked."""

    def parts(self, stage: int) -> Iterator[nodes.Node]:
        yield raw("<details><summary>Show the new code</summary>")
        before = {*program(stage - 1).splitlines()}
        for part in map(str.rstrip, program(stage).split("\n\n\n")):
            lines = enumerate(part.splitlines(), 1)
            if new := [number for number, line in lines if line not in before]:
                code = nodes.literal_block(part, part, language="python")
                code["highlight_args"] = {"hl_lines": new}
                yield code
        yield raw("</details>")


class Asked(Editor):
    """What the kit asks, with its examples, and their rules as links."""

    def parts(self, stage: int) -> Iterator[nodes.Node]:
        for _, sentence, names in filter(lambda d: d[0] == stage, DEMANDS):
            rules = (
                f"[{rule}]" for name in names.split() for rule in RULES[name]
            )
            text = f"{sentence}: {names} {' '.join(dict.fromkeys(rules))}"
            item = nodes.paragraph("", "", *code_spans(text))
            yield nodes.bullet_list("", nodes.list_item("", item))


class Mistakes(Directive):
    """Servers with one mistake each, and three examples to try on each."""

    def run(self) -> list[nodes.Node]:
        return [self.section(*server) for server in enumerate(SHOWN, 1)]

    def section(self, number: int, name: str) -> nodes.Node:
        """Return what is shown of one mistake."""
        first, code = excerpt(name)
        block = nodes.literal_block(code, code, language="python")
        block["linenos"] = True
        block["highlight_args"] = {"linenostart": first}
        shown = [nodes.title("", f"Server {number}"), block]
        for title, lines in choices(name):
            said = title.replace("-", " ").capitalize()
            data = {"kind": "broken", "name": f"{name}-{title}"}
            text = "\n".join(lines)
            head = f"<summary>{said}</summary>"
            html = example_html(
                head, text, is_open=False, **data, mistake=name
            )
            shown.append(raw(html))
        right, wrong = map(escape, SHOWN[name].changes[0])
        form = MISTAKE.substitute(name=name, right=right, wrong=wrong)
        return nodes.section("", *shown, raw(form), ids=[name])


def setup(app: Sphinx) -> dict[str, bool]:
    """Be an extension of Sphinx."""
    app.add_directive("editor", Editor)
    app.add_directive("new-code", NewCode)
    app.add_directive("asked", Asked)
    app.add_directive("mistakes", Mistakes)
    return {"parallel_read_safe": True}
