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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Figure = tuple[str, float, float]  # what was measured, and is at most so much
LINES = {  # of all files together
    "sbus_client.py": 1_400,
    "spec/conformance/*.py": 3_600,
    "tests/kit/*.py": 2_400,
    "tests/server/*.py tests/bed/*.py": 5_500,
    "bench/*.py": 1_200,
    "README.md": 150,
    "SECURITY.md": 80,
    "pipeline/README.md": 120,
}


def of_server(source: str) -> Iterator[Figure]:
    """Return the figures of sbus.py."""
    lines, tree = source.splitlines(), ast.parse(source)
    code = code_lines(source)
    # The lines of each section: from its title to the next, or the end
    starts = [n for n, line in enumerate(lines, 1) if line[:7] == "# ==== "]
    parts = list(map(range, starts, [*starts[1:], len(lines) + 1]))
    yield "sbus.py, lines of code", len(code), 1_150
    first = sum(map(len, (code.intersection(part) for part in parts[:7])))
    yield "  sections 1 to 7", first, 540
    yield "  section 8", len(code.intersection(parts[7])), 310
    yield "  section 9", len(code.intersection(parts[8])), 340
    sizes = [
        len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    yield "  longest function", max(sizes), 35
    yield "  functions, median", statistics.median(sizes), 9
    constants = [
        name.lineno
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        if name.id.isupper()
    ]
    yield "  constants", len(constants), 45
    inner = sum(line in parts[7] for line in constants)
    yield "  constants in section 8", inner, 16
    for name, most in (("Server", 12), ("Client", 20)):
        text = source.partition(f"\nclass {name}")[2].partition("\n\n\n")[0]
        found = {*re.findall(r"^ +self\.(\w+)(?::| =)", text, re.M)}
        yield f"  {name}, attributes", len(found), most


def code_lines(source: str) -> set[int]:
    """Return which lines are not blank, nor all comment or docstring."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - texts


def of_others() -> Iterator[Figure]:
    """Return the figures of the specification, the tests, and so on."""
    spec = read("spec/[1-9]-*.md")
    rules = len(re.findall(r"^\*\*\[[A-Z]+-\d+\]\*\* ", spec, re.M))
    yield "spec/[1-9]-*.md, rules", rules, 92
    text = re.sub(r"^```.*?^```$", "", spec, flags=re.M | re.S)
    yield "  words, without examples", len(text.split()), 5_500
    for names, most in LINES.items():
        yield f"{names}, lines", read(*names.split()).count("\n"), most


def read(*names: str) -> str:
    """Return what is in some files."""
    files = [file for name in names for file in sorted(ROOT.glob(name))]
    return "".join(file.read_text("utf-8") for file in files)


def main() -> int:
    """Print all figures; return 1 if a budget is exceeded."""
    figures = [*of_server(read("sbus.py")), *of_others()]
    for what, value, most in figures:
        over = "OVER" if value > most else ""
        print(f"{what:42}{value:8g}  at most {most:<7g} {over}".rstrip())
    return 1 if any(value > most for _, value, most in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
