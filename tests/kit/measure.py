"""How long the parts of the repository are, beside what they may be.

    make measure

The exit status is 1 if a budget is exceeded.  It needs nothing but Python.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Union

ROOT = Path(__file__).resolve().parents[2]
Definition = Union[ast.FunctionDef, ast.ClassDef]


class Figure(NamedTuple):
    """What was measured, and what it may be at most, or at least."""

    what: str
    value: float
    budget: float
    is_least: bool = False

    def is_kept(self) -> bool:
        """Return whether the budget is not exceeded."""
        if self.is_least:
            return self.value >= self.budget
        return self.value <= self.budget

    def __str__(self) -> str:
        bound = f"{'at least' if self.is_least else 'at most'} {self.budget:g}"
        over = "" if self.is_kept() else "OVER"
        return f"{self.what:42}{self.value:8g}  {bound:14} {over}".rstrip()


def of_server(source: str) -> Iterator[Figure]:
    """Return the figures of sbus.py."""
    lines, tree = source.splitlines(), ast.parse(source)
    # The lines of each section: from its title to the next, or the end
    starts = [n for n, line in enumerate(lines, 1) if line[:7] == "# ==== "]
    parts = list(map(range, starts, [*starts[1:], len(lines) + 1]))
    yield Figure("sbus.py, lines", len(lines), 1_500)
    first, connections, running = sum(map(len, parts[:7])), parts[7], parts[8]
    yield Figure("  sections 1 to 7, lines", first, 760)
    yield Figure("  section 8, lines", len(connections), 380)
    yield Figure("  section 9, lines", len(running), 420)
    sizes = sorted(
        (len(lines_of(one)), one.name)
        for one in definitions(tree)
        if isinstance(one, ast.FunctionDef)
    )
    most, name = sizes[-1]
    yield Figure(f"  longest function: {name}, lines", most, 35)
    median = statistics.median(size for size, _ in sizes)
    yield Figure("  functions, median of lines", median, 10)
    where = list(constants(tree))
    inner = sum(line in connections for line in where)
    yield Figure("  constants", len(where), 45)
    yield Figure("  constants in section 8", inner, 16)
    for name, most in (("Server", 12), ("Client", 20)):
        count = len(attributes(tree, name))
        yield Figure(f"  {name}, attributes", count, most)
    yield Figure("  longest line, columns", max(map(len, lines)), 79)
    share = 100 * len(prose(source, tree)) / len(lines)
    yield Figure("  lines of prose, per cent", round(share, 1), 20, True)


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines of a part of the source."""
    return range(node.lineno, (node.end_lineno or 0) + 1)


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Return all functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node


def constants(tree: ast.Module) -> Iterator[int]:
    """Return the line of each constant of the module."""
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for name in (one for target in targets for one in ast.walk(target)):
            if isinstance(name, ast.Name) and name.id.isupper():
                yield name.lineno


def attributes(tree: ast.Module, name: str) -> set[str]:
    """Return the attributes of self that a class assigns to."""
    (cls,) = (one for one in definitions(tree) if one.name == name)
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def prose(source: str, tree: ast.Module) -> set[int]:
    """Return the lines that have a comment or are of a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {one.start[0] for one in tokens if one.type == tokenize.COMMENT}
    for node in (tree, *definitions(tree)):
        if ast.get_docstring(node):
            lines.update(lines_of(node.body[0]))
    return lines


def of_others() -> Iterator[Figure]:
    """Return the figures of the specification, the tests, and so on."""
    spec = read(sorted(ROOT.glob("spec/[1-9]-*.md")))
    rules = len(re.findall(r"^\*\*\[[A-Z]+-\d+\]\*\* ", spec, re.M))
    text = re.sub(r"^```.*?^```$", "", spec, flags=re.M | re.S)
    yield Figure("spec/[1-9]-*.md, rules", rules, 92)
    yield Figure("  words, without examples", len(text.split()), 5_500)
    tests = [*ROOT.glob("tests/server/*.py"), *ROOT.glob("tests/bed/*.py")]
    count = read(tests).count("\n")
    yield Figure("tests/server and tests/bed, lines", count, 5_500)
    attack = read([ROOT / "bench/attack.py"]).count("\n")
    yield Figure("bench/attack.py, lines", attack, 350)
    security = read([ROOT / "SECURITY.md"]).splitlines()
    yield Figure("SECURITY.md, lines", len(security), 80)
    yield Figure("  longest line, columns", max(map(len, security)), 120)


def read(files: Iterable[Path]) -> str:
    """Return what is in some files."""
    return "".join(file.read_text("utf-8") for file in files)


def main() -> int:
    """Print all figures; return 1 if a budget is exceeded."""
    figures = [*of_server(read([ROOT / "sbus.py"])), *of_others()]
    print(*figures, sep="\n")
    return 0 if all(one.is_kept() for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
