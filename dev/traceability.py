"""traceability: which code, which example and which test keep each rule?

    make requirements   write spec/requirements.tsv and tools/rules.txt
    make vectors        write spec/vectors/*.json
    make trace          write spec/traceability.md, which is not kept

All are made from the chapters of spec/, never by running a server.  The tests
fail while one of the first two goals would change a file.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from conformance.examples import (
    CITED,
    EXPECTATIONS,
    Case,
    MatchCase,
    PacketCase,
    Part,
    Step,
    escape,
    read_blocks,
    read_cases,
)
from conformance.kit import (
    CHECKS,
    REAL_BLOCKS,
    level_of,
    needs_of,
    origin_of,
)
from conformance.rules import SPEC, SPECIFICATION, read_rules

ROOT = SPEC.parent
REQUIREMENTS = SPEC / "requirements.tsv"
TRACEABILITY = SPEC / "traceability.md"
VECTORS = SPEC / "vectors"
SENTENCES = ROOT / "tools/rules.txt"  # which `sbus help RULE` prints
# The tests that try the server and the client; others are of pages about them
TESTS = [
    ROOT / "test_sbus.py",
    *sorted(ROOT.glob("tests/server/test_*.py")),
    *sorted(ROOT.glob("tests/refine/test_*.py")),
    *sorted(ROOT.glob("tests/client/test_*.py")),
]
BY_USERS = {"KEY-2", "KEY-6"}  # kept by programs that use a client


def requirements() -> str:
    """Return spec/requirements.tsv: a line a rule."""
    head = "id level subject origin file sentence_sha256"
    lines = [head.replace(" ", "\t")]
    for rule in read_rules().values():
        digest = hashlib.sha256(rule.sentence.encode("utf-8")).hexdigest()[:8]
        lines.append("\t".join([*rule[:5], digest]))
    return "\n".join(lines) + "\n"


def sentences() -> str:
    """Return tools/rules.txt: the sentence of each rule on a line."""
    rules = read_rules().values()
    return "".join(f"{rule.id} {rule.sentence}\n" for rule in rules)


# ---- Vectors


def vectors() -> dict[str, str]:
    """Return the files of spec/vectors by their names: a line a case."""
    lines: dict[str, list[str]] = {}
    for case in read_cases():
        kind, facts = vector(case)
        head = {
            "name": case.name,
            "requirements": list(case.rules),
            "level": level_of(case),
            "origin": origin_of(case),
        }
        lines.setdefault(f"{kind}.json", []).append(json.dumps(head | facts))
    opening = f'{{"specification": "{SPECIFICATION}", "cases": [\n'
    return {
        name: opening + ",\n".join(cases) + "\n]}\n"
        for name, cases in lines.items()
    }


def vector(case: Case) -> tuple[str, dict[str, Any]]:
    """Return a case's kind, and itself for programs that read no blocks."""
    if isinstance(case, MatchCase):
        return "match", {
            "pattern_hex": case.pattern.hex(),
            "key_hex": case.key.hex(),
            "selected": case.selected,
            "note": f"{escape(case.pattern)} {escape(case.key)}",
        }
    if isinstance(case, PacketCase):
        return "packet", {
            "packet_hex": case.packet.hex(),
            "kind": case.packet_kind,
            "key_hex": case.key.hex(),
            "payload_hex": case.payload.hex(),
            "note": escape(case.packet),
        }
    return "conversation", {
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
    times = {"times": part.times} if part.times > 1 else {}
    return {"hex": part.text.hex(), **times}


# ---- Citations


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
                lines = [d.lineno for d in child.decorator_list]
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
    parts = []
    for name, first, last in places:
        inner = [p for p in places if first < p[1] <= p[2] <= last]
        rules = {
            rule
            for line, rule in cited
            if first <= line <= last
            and not any(start <= line <= end for _, start, end in inner)
        }
        parts.append(Citation(name, first, frozenset(rules)))
    return parts


def cited_lines(source: str) -> Iterator[tuple[int, str]]:
    """Return each id that counts, with its line."""
    before = tokenize.NEWLINE
    begins = (tokenize.NEWLINE, tokenize.INDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_string = token.type == tokenize.STRING
        cited: list[str] = []
        if token.type == tokenize.COMMENT or (is_string and before in begins):
            cited = CITED.findall(token.string)
        elif is_string:
            cited = re.findall(r'^"([A-Z]+-\d+)"$', token.string)
        yield from ((token.start[0], rule) for rule in cited)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def code_by_rule() -> dict[str, list[str]]:
    """Return where the server and the client cite each rule."""
    code: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    for file in ("sbus.py", "sbus_client.py"):
        for place in citations(ROOT / file):
            for rule in place.rules & {*code}:
                code[rule].append(f"{file} {place.name}".strip())
    return code


def shown_by_rule() -> dict[str, list[str]]:
    """Return the blocks and the checks that show each rule."""
    shown: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    cases: list[Any] = [*read_blocks(), *REAL_BLOCKS, *CHECKS]
    for case in cases:
        for rule in case.rules:
            shown[rule].append(case.name)
    return shown


def tests_by_rule() -> dict[str, list[str]]:
    """Return the tests of the server and the client that cite each rule."""
    tests: dict[str, list[str]] = {rule: [] for rule in read_rules()}
    for file in TESTS:
        for place in citations(file):
            for rule in place.rules & {*tests}:
                if place.name.rpartition(".")[2].startswith("test_"):
                    tests[rule].append(f"{file.stem} {place.name}")
    return tests


# ---- The matrix

MATRIX = """# Traceability

Written by `make trace`: for each rule, what cites it in the code, the
examples that show it, and the tests of the server and the client that name
it. It shows citation, not proof.

| Rule | Level | Origin | Code | Examples | Tests |
|---|---|---|---|---|---|
"""


def matrix() -> str:
    """Return spec/traceability.md: a row a rule."""
    code, shown, tests = code_by_rule(), shown_by_rule(), tests_by_rule()
    lines = []
    for name, rule in read_rules().items():
        proof = few(shown[name]) or "kept by programs that use a client"
        cells = (name, rule.level, rule.origin, few(code[name]), proof)
        lines.append(f"| {' | '.join(cells)} | {few(tests[name])} |\n")
    return MATRIX + "".join(lines)


def few(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more


def main() -> int:
    """Write what is asked for."""
    asked = sys.argv[1:]
    if asked == ["requirements"]:
        REQUIREMENTS.write_text(requirements(), "utf-8")
        SENTENCES.write_text(sentences(), "utf-8")
    elif asked == ["vectors"]:
        for name, text in vectors().items():
            (VECTORS / name).write_text(text, "utf-8")
    elif asked == ["trace"]:
        TRACEABILITY.write_text(matrix(), "utf-8")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
