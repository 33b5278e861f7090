"""Servers with one mistake each, to test whether the kit finds it.

    python3 broken_servers.py NAME OPTION...   run one of them

broken_servers.txt has the mistakes: for each its name, and the rules or checks
that the kit must report.  Then comes what replaces a function or a constant
of sbus.py, or else a text of it, and what stands in its place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

SBUS = Path(__file__).resolve().parents[2] / "sbus.py"
MISTAKE = re.compile(r"^([a-z0-9-]+): ([\w -]+)\n((?:[-+*] .*\n)+)", re.M)
REPLACED = re.compile(r"^\* (.*\n)", re.M)
START = '\n\nif __name__ == "__main__":\n'
CHANGE = re.compile(r"((?:- .*\n)+)((?:\+ .*\n)+)")


class Mistake(NamedTuple):
    """A mistake, and what must be reported of it."""

    name: str
    found_by: tuple[str, ...]  # rules or checks
    changes: tuple[tuple[str, str], ...]  # texts of sbus.py, and others
    code: str = ""  # what is done when all of sbus.py is defined

    def spoil(self, source: str) -> str:
        """Return the source of the server with the mistake.

        Raises: ValueError if one of the texts is not in it exactly once.
        """
        for text, other in self.changes:
            if source.count(text) != 1:
                wrong = f"{source.count(text)} times in sbus.py: {text!r}"
                raise ValueError(f"{self.name}: {wrong}")
            source = source.replace(text, other)
        return source.replace(START, f"\n{self.code}{START}")


def read_mistakes() -> dict[str, Mistake]:
    """Return all mistakes by their names."""
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    mistakes = {}
    for name, found_by, changes in MISTAKE.findall(text):
        pairs = tuple(
            (plain(before), plain(after))
            for before, after in CHANGE.findall(changes)
        )
        code = "".join(REPLACED.findall(changes))
        mistakes[name] = Mistake(name, tuple(found_by.split()), pairs, code)
    return mistakes


def plain(lines: str) -> str:
    """Return a text without the signs before its lines."""
    return "\n".join(line[2:] for line in lines.splitlines())


if __name__ == "__main__":
    source = read_mistakes()[sys.argv.pop(1)].spoil(SBUS.read_text("utf-8"))
    exec(compile(source, "sbus.py", "exec", dont_inherit=True))
