"""The rules of the chapters: their sentences, levels and origins."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

SPEC = Path(__file__).resolve().parents[1]
SPECIFICATION = "sbus 0.3"  # the number of the chapters beside this file


class Rule(NamedTuple):
    """A sentence of the specification."""

    id: str
    level: str  # MUST, MUST NOT, SHOULD, SHOULD NOT or MAY
    subject: str  # server or client
    origin: str  # one of ORIGINS
    file: str
    sentence: str

    @property
    def family(self) -> str:
        """The first part of the id."""
        return self.id.partition("-")[0]

    @property
    def statement(self) -> str:
        """The sentence without its origin."""
        return self.sentence.rpartition(" (")[0]


# What the protocol text asks for, what it says a server may do, what only the
# original daemon does, and what this project decided
ORIGINS = ("upstream", "upstream, optional", "original daemon", "ours")
RULE = re.compile(
    r"^\*\*\[([A-Z]+-\d+)\]\*\* (.+?)(?=\n\n|\n*\Z)", re.M | re.S
)
SENTENCE = re.compile(
    r"A (server|client) .*?\b(MUST NOT|MUST|SHOULD NOT|SHOULD|MAY)\b"
    rf".+ \(({'|'.join(ORIGINS)})\)"
)


def chapters() -> list[Path]:
    """Return the files of the specification, in order."""
    return sorted(SPEC.glob("[1-9]-*.md"))


def examples_of(chapter: Path) -> Path:
    """Return the file of the examples of a chapter that are not in it."""
    return SPEC / "examples" / chapter.name


@functools.cache
def read_rules() -> dict[str, Rule]:
    """Return all rules by their ids; raise ValueError if one is malformed."""
    rules: dict[str, Rule] = {}
    for chapter in chapters():
        for match in RULE.finditer(chapter.read_text("utf-8")):
            name, sentence = match[1], " ".join(match[2].split())
            parts = SENTENCE.fullmatch(sentence)
            if not parts or name in rules:
                raise ValueError(f"{chapter.name}: [{name}] {sentence}")
            subject, level, origin = parts.groups()
            rules[name] = Rule(
                name, level, subject, origin, chapter.name, sentence
            )
    return rules
