#!/usr/bin/env python3
"""traceability: which code, which example and which test keep each rule?

    python3 traceability.py requirements   write spec/requirements.tsv
    python3 traceability.py vectors        write spec/vectors/*.json
    python3 traceability.py trace          write and print
                                           spec/traceability.md

All three are made from the chapters of spec/, never by running a server.
The tests fail while one of the first two is not what this file would write.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conformance.examples import (
    CITED,
    EXPECTATIONS,
    Case,
    Conversation,
    MatchCase,
    PacketCase,
    Part,
    Step,
    escape,
    read_blocks,
    read_cases,
)
from conformance.kit import CHECKS, level_of, needs_of, origin_of
from conformance.rules import SPEC, Rule, read_rules

ROOT = SPEC.parent
REQUIREMENTS = SPEC / "requirements.tsv"
TRACEABILITY = SPEC / "traceability.md"
VECTORS = SPEC / "vectors"

BY_USERS = {"KEY-2", "KEY-6"}  # kept by programs that use a client


# =============================================================================
# Requirements
# =============================================================================


def digest(sentence: str) -> str:
    """Return what changes when a sentence is edited."""
    return hashlib.sha256(sentence.encode("utf-8")).hexdigest()[:8]


def requirements() -> str:
    """Return spec/requirements.tsv: a line a rule."""
    head = "id level subject origin file sentence_sha256"
    lines = [head.replace(" ", "\t")]
    for rule in read_rules().values():
        lines.append("\t".join([*rule[:5], digest(rule.sentence)]))
    return "\n".join(lines) + "\n"


# =============================================================================
# Vectors
# =============================================================================


def vectors() -> dict[str, str]:
    """Return the files of spec/vectors by their names."""
    cases, rules = read_cases(), read_rules()
    kinds: dict[str, Sequence[Case]] = {
        "match": [one for one in cases if isinstance(one, MatchCase)],
        "packet": [one for one in cases if isinstance(one, PacketCase)],
        "conversation": [
            one for one in cases if isinstance(one, Conversation)
        ],
    }
    return {
        f"{kind}.json": as_lines(vector(case, rules) for case in chosen)
        for kind, chosen in kinds.items()
    }


def as_lines(cases: Iterable[dict[str, Any]]) -> str:
    """Return a JSON array with one case in each line."""
    return "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n"


def vector(case: Case, rules: dict[str, Rule]) -> dict[str, Any]:
    """Return a case for programs that cannot read blocks."""
    head = {
        "name": case.name,
        "requirements": list(case.rules),
        "level": level_of(case),
        "origin": origin_of(case),
    }
    if isinstance(case, MatchCase):
        return {
            **head,
            "pattern_hex": case.pattern.hex(),
            "key_hex": case.key.hex(),
            "selected": case.selected,
            "note": f"{escape(case.pattern)} {escape(case.key)}",
        }
    if isinstance(case, PacketCase):
        return {
            **head,
            "packet_hex": case.packet.hex(),
            "kind": case.packet_kind,
            "key_hex": case.key.hex(),
            "payload_hex": case.payload.hex(),
            "note": escape(case.packet),
        }
    return {
        **head,
        "options": list(case.options),
        "needs": needs_of(case),
        "steps": [step_vector(step) for step in case.steps],
    }


VERBS = {">": "send", ">>": "post", "<": "receive"}


def step_vector(step: Step) -> dict[str, Any]:
    """Return a step of a conversation."""
    verb = VERBS.get(step.verb, step.verb)
    if verb == "receive" and not step.text:
        verb = step.argument  # one of EXPECTATIONS
    vector: dict[str, Any] = {"do": verb, "note": str(step)}
    if step.client:
        vector["client"] = step.client
    if step.verb in VERBS and verb not in EXPECTATIONS:
        vector["packet"] = [part_vector(part) for part in step.text]
    elif verb in ("room", "wait"):
        vector["number"] = float(step.argument)
    elif verb == "process":
        fields = (field.split("=") for field in step.argument.split())
        vector["credentials"] = {name: int(text) for name, text in fields}
    return vector


def part_vector(part: Part) -> dict[str, Any]:
    """Return a part of a packet."""
    if part.variable:
        return {"var": part.variable}
    if part.times > 1:
        return {"hex": part.text.hex(), "times": part.times}
    return {"hex": part.text.hex()}


# =============================================================================
# Citations
# =============================================================================


class Citation(NamedTuple):
    """A place in code that cites rules."""

    name: str  # of the function or class, or "" at the top of a file
    first_line: int  # where its definition begins
    rules: frozenset[str]


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(source: str) -> Iterator[tuple[str, int, int]]:
    """Return the name, first and last line of each function and class."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                lines = [one.lineno for one in child.decorator_list]
                first = min([child.lineno, *lines])
                assert child.end_lineno
                yield prefix + child.name, first, child.end_lineno
                yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(ast.parse(source), "")


@functools.cache
def citations(path: Path) -> list[Citation]:
    """Return what cites rules in comments and docstrings of a file.

    Of other strings those count that are an id, as that of an error is.
    """
    source = path.read_text("utf-8")
    cited = list(cited_lines(source))
    places = [("", 1, len(source)), *definitions(source)]
    found = []
    for name, first, last in places:
        inner = [one for one in places if first < one[1] <= one[2] <= last]
        rules = {
            rule
            for line, rule in cited
            if first <= line <= last
            and not any(start <= line <= end for _, start, end in inner)
        }
        found.append(Citation(name, first, frozenset(rules)))
    return found


def cited_lines(source: str) -> Iterator[tuple[int, str]]:
    """Return each id that counts, with its line."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
        )
        if token.type == tokenize.COMMENT or is_docstring:
            for rule in CITED.findall(token.string):
                yield token.start[0], rule
        elif token.type == tokenize.STRING:
            for rule in re.findall(r'^"([A-Z]+-\d+)"$', token.string):
                yield token.start[0], rule
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def code_by_rule() -> dict[str, list[str]]:
    """Return where the server and the client cite each rule."""
    code: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    for file in ("sbus.py", "sbus_client.py"):
        for place in citations(ROOT / file):
            for rule in place.rules & set(code):
                code[rule].append(f"{file} {place.name}".strip())
    return code


def examples_by_rule() -> dict[str, list[str]]:
    """Return the blocks and the checks that show each rule."""
    examples: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    for block in read_blocks():
        for rule in block.rules:
            examples[rule].append(block.name)
    for check in CHECKS:
        for rule in check.rules:
            examples[rule].append(check.name)
    return examples


def tests_by_rule() -> dict[str, list[str]]:
    """Return the tests whose docstrings cite each rule."""
    tests: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    for file in [ROOT / "test_sbus.py", *files]:
        for place in citations(file):
            for rule in place.rules & set(tests):
                if place.name.rpartition(".")[2].startswith("test_"):
                    tests[rule].append(f"{file.stem} {place.name}")
    return tests


# =============================================================================
# The matrix
# =============================================================================


def matrix() -> str:
    """Return spec/traceability.md: a row a rule."""
    lines = [
        "# Traceability",
        "",
        "Written by `make trace`: for each rule, what cites it in the code,",
        "the examples that show it, and the tests whose docstrings name it.",
        "It shows citation, not proof.",
        "",
        "| Rule | Level | Origin | Code | Examples | Tests |",
        "|---|---|---|---|---|---|",
    ]
    code, examples = code_by_rule(), examples_by_rule()
    tests = tests_by_rule()
    for name, rule in read_rules().items():
        shown = few(examples[name]) or "kept by programs that use a client"
        cells = (name, rule.level, rule.origin, few(code[name]), shown)
        lines.append(f"| {' | '.join(cells)} | {few(tests[name])} |")
    return "\n".join(lines) + "\n"


def few(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more


def main() -> int:
    """Write what is asked for."""
    asked = sys.argv[1:]
    if asked == ["requirements"]:
        REQUIREMENTS.write_text(requirements(), "utf-8")
    elif asked == ["vectors"]:
        for name, text in vectors().items():
            (VECTORS / name).write_text(text, "utf-8")
    elif asked == ["trace"]:
        TRACEABILITY.write_text(matrix(), "utf-8")
        print(matrix(), end="")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
