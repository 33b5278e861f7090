"""How long the parts of the repository are, beside what they may be.

    make measure

Code lines count: those that are not blank, nor all comment or docstring.  The
exit status is 1 if a budget is exceeded.  It needs nothing but Python.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# The parts of the repository, and how many code lines each may have
CODE = {
    "sbus.py": 1_329,
    # It is to have 1,100
    "sbus_client.py": 1_254,
    # It is to have 1,300, which would cost the completion of shells
    "tools/*.py": 1_346,
    # It is to have 290
    "services/link.py": 421,
    # The other files of services/ are to have 340
    "services/[!l_]*.py": 514,
    # It is to have 4,300, which would cost a kind of check
    "spec/**/*.py": 4_484,
    "spec/model.py": 475,
    # It is to have 2,100, which would cost features: the archive of Spark's
    # classes has 20 lines, metrics and what is told of errors 30, what refuses
    # or outlives other tools' tables some 50, the order of a recorder 20
    "pipeline/**/*.py": 2_302,
    "pipeline/**/*.sql": 260,
    # It is to have 1,500, which would cost the checks of chapter 5
    "simulated/*.py": 1_580,
    # They are to have 10,800: some folders have not been measured by mutants
    "tests/**/*.py test_sbus.py": 14_325,
    # It is to have 900, which would cost the benchmark of the client
    "bench/**/*.py": 990,
    # It is to have 1,950, which would cost the gallery of mistakes; 39 lines
    # are the answers of its lessons, which had stood with the tests
    "book/*.py book/static/*.js book/static/*.css": 2_085,
    "book/stages/*.py": 170,  # six servers in one file, for students
}
CLIENTS = "c/sbus.h go/sbus.go rust/src/lib.rs javascript/sbus.js perl/Sbus.pm"
CLIENTS += " shell/sbus.sh"
CODE.update({f"contrib/clients/{name}": 200 for name in CLIENTS.split()})
ADAPTERS = "c/adapter.c go/adapter/main.go rust/examples/adapter.rs"
ADAPTERS += " javascript/adapter.js perl/adapter.pl shell/adapter.sh"
CODE.update({f"contrib/clients/{name}": 40 for name in ADAPTERS.split()})
# Pages, and how many lines each may have
LINES = {
    "README.md": 150,
    "SECURITY.md": 90,
    "CONTRIBUTING.md": 90,
}
COMMENTS = ("--", "//", "/*", "* ", "*/")  # how one begins, but in Python
HASH = (".pm", ".pl", ".sh")  # or by this sign in these files
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Figure(NamedTuple):
    """Something that was measured."""

    name: str
    value: float
    limit: float


def files_of(patterns: str) -> list[Path]:
    """Return the files that patterns with blanks between them name."""
    names = patterns.split()
    return [file for name in names for file in sorted(ROOT.glob(name))]


def read(patterns: str) -> str:
    """Return what is in some files."""
    return "".join(file.read_text("utf-8") for file in files_of(patterns))


# ---- Code


def code_lines(source: str) -> set[int]:
    """Return the numbers of the code lines of a Python program."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(lines_of(node))

    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - texts


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_line_count(file: Path) -> int:
    """Return how many code lines a file in any language has."""
    source = file.read_text("utf-8")
    if file.suffix == ".py":
        return len(code_lines(source))
    lines = filter(None, map(str.strip, source.splitlines()))
    comments = "#" if file.suffix in HASH else COMMENTS
    return sum(not f"{line} ".startswith(comments) for line in lines)


def figures_of_code() -> Iterator[Figure]:
    """Return the code lines of each part."""
    for patterns, limit in CODE.items():
        count = sum(map(code_line_count, files_of(patterns)))
        yield Figure(f"{patterns}, code lines", count, limit)


# ---- The server


def figures_of_server(source: str) -> Iterator[Figure]:
    """Return how long the functions of sbus.py are, and what it defines."""
    code, tree = code_lines(source), ast.parse(source)
    sizes = [
        len(code.intersection(lines_of(node)))
        for node in ast.walk(tree)
        if isinstance(node, DEFINITIONS)
    ]
    yield Figure("sbus.py, longest function", max(sizes), 40)
    yield Figure("sbus.py, functions, median", statistics.median(sizes), 11)

    constants = [
        name
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        if name.id.isupper()
    ]
    yield Figure("sbus.py, constants", len(constants), 50)

    limits = {"Server": 12, "Client": 20}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in limits:
            name = f"sbus.py, attributes of {node.name}"
            yield Figure(name, len(attributes_of(node)), limits[node.name])


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class give to self."""
    return {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


# ---- Texts


def figures_of_texts() -> Iterator[Figure]:
    """Return how long the chapters and other pages are."""
    chapters = read("spec/[1-9]-*.md")
    rules = re.findall(r"^\*\*\[[A-Z]+-\d+\]\*\* ", chapters, re.M)
    yield Figure("spec/[1-9]-*.md, rules", len(rules), 106)

    # Examples and pictures are fenced blocks, which are not read as words
    text = re.sub(r"^```.*?^```$", "", chapters, flags=re.M | re.S)
    yield Figure("spec/[1-9]-*.md, words", len(text.split()), 6_364)

    for name, limit in LINES.items():
        yield Figure(f"{name}, lines", read(name).count("\n"), limit)


def main() -> int:
    """Print all figures; return 1 if a budget is exceeded."""
    figures = [
        *figures_of_code(),
        *figures_of_server(read("sbus.py")),
        *figures_of_texts(),
    ]
    for name, value, limit in figures:
        verdict = "OVER" if value > limit else ""
        print(f"{name:58}{value:7g} of {limit:<7g}{verdict}".rstrip())
    return 1 if any(value > limit for _, value, limit in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
