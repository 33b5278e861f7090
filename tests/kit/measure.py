"""How long sbus.py is, by section, and how long a packet's way is.

    make measure

Code lines are those that are neither empty, nor a comment, nor a docstring.
The way of a packet is the functions of sbus.py that one round of the loop
calls for it, on a fake kernel.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fake_kernel import FakeKernel, FakePeer
from packets import publish

SOURCE = Path(__file__).resolve().parents[2] / "sbus.py"
LINES_MAX = 30
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = node.body[0]
            if ast.get_docstring(node):
                lines.update(lines_of(first))
    return lines


def lines_of(node: Any) -> range:
    """Return the numbers of the lines of a part of the source."""
    return range(node.lineno, node.end_lineno + 1)


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(tree)


def print_sections(source: str) -> None:
    """Print lines, code lines and functions, by section and in all."""
    tree = ast.parse(source)
    code = code_lines(source, tree)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    count = source.count("\n")
    titles = {1: "0. Before the first"}
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(r"# \d\. ", line):
            titles[number - 1] = " ".join(line.split()[1:-1])
    starts = [*titles, count + 1]
    print(f"{'section':24}{'lines':>7}{'code':>7}{'functions':>11}")
    for (start, title), end in zip(titles.items(), starts[1:]):
        own = [one for one in functions if start <= one.lineno < end]
        own_code = sum(start <= line < end for line in code)
        print(f"{title:24}{end - start:7}{own_code:7}{len(own):11}")
    print(f"{'in all':24}{count:7}{len(code):7}{len(functions):11}")
    sizes = {one.name: len(lines_of(one)) for one in functions}
    median = statistics.median(len(lines_of(one)) for one in functions)
    print(
        f"\na function has {median:g} lines in the median; above {LINES_MAX}:"
    )
    for name, size in sizes.items():
        if size > LINES_MAX:
            print(f"    {name}: {size}")


def way_of(kernel: FakeKernel) -> list[str]:
    """Return which functions of sbus.py a round calls, each once."""
    called: dict[str, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename == str(SOURCE) and code.co_name[0] != "<"
        if event == "call" and is_ours:
            called[code.co_name] = None

    sys.setprofile(note)
    try:
        kernel.server.round(0)
    finally:
        sys.setprofile(None)
    return [*called]


def print_ways(names: Iterable[str]) -> None:
    """Print the ways of packets."""
    for name in names:
        kernel = FakeKernel()
        reader, sender = kernel.connect(uid=0), kernel.connect()
        reader.send(b"SUB k", b"SUB n/*")
        way = way_of_packet(kernel, reader, sender, name)
        print(f"\n{name}: {len(way)} functions\n    {' '.join(way)}")


def way_of_packet(
    kernel: FakeKernel, reader: FakePeer, sender: FakePeer, name: str
) -> list[str]:
    """Return the way of one packet: of a known key, a new one, refused."""
    if name != "a new key":
        sender.send(publish(b"k"))
    if name == "refused":
        reader.wire.room = 0
    packet = publish(b"n/1" if name == "a new key" else b"k")
    sender.wire.incoming.append(packet)
    return way_of(kernel)


if __name__ == "__main__":
    print_sections(SOURCE.read_text("utf-8"))
    print_ways(["a known key", "a new key", "refused"])
