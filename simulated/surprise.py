"""Makes conversations at random, with the kit's generator, to be predicted."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from conformance.random_walk import WEIGHTS, Maker
from conformance.random_writer import WITNESS, write


class Chapter(NamedTuple):
    """What conversations about a chapter of the specification are like."""

    families: str  # of its rules
    word: str  # that has to stand in them
    weights: dict[str, int]  # how often each kind of operation comes


CHAPTERS = {
    "2": Chapter("KEY MATCH", "*", {"subscribe": 10, "publish": 12}),
    "3": Chapter(
        "PKT SUB UNSUB PUB",
        "> UNSUB",
        {"subscribe": 9, "unsubscribe": 6, "publish": 12},
    ),
    "4": Chapter(
        "CRED", "< MSG !/cred", {"subscribe": 2, "secret": 20, "publish": 3}
    ),
    "5": Chapter(
        "BLOCK ORDER",
        " fill",
        {"subscribe": 3, "publish": 10, "fill": 5, "stir": 12},
    ),
    "6": Chapter(
        "ECHO", "echo/off", {"subscribe": 12, "publish": 14, "mode": 8}
    ),
}
OPERATIONS = 10
LINES_MAX = 20
HEARD_MIN = 3  # of what all clients receive
HEARD = re.compile(r"([A-Z]) < (?:.*\\0(\d+)x*|(end))")


class SurpriseMaker(Maker):
    """Makes operations for a chapter, without what is hard to read."""

    def __init__(self, chapter: str, seed: str) -> None:
        super().__init__(seed, {})
        self.weights = dict.fromkeys(WEIGHTS, 0) | CHAPTERS[chapter].weights
        self.names = [*"ABC"]
        self.sizes = [0]

    def tail(self) -> bytes:
        """Return nothing, which is what follows a text."""
        return b""


def make_surprise(chapter: str, seed: str) -> dict[str, Any]:
    """Return a conversation, what of it is shown, and what is to be said.

    The same seed gives the same conversation.
    Raises: ValueError if there is none for a chapter
    """
    if chapter not in CHAPTERS:
        raise ValueError("There are surprises for chapters 2 to 6")
    for attempt in itertools.count():
        maker = SurpriseMaker(chapter, f"{chapter}/{seed}/{attempt}")
        operations = [maker.operation() for _ in range(OPERATIONS)]
        written = write(operations, {}).lines
        kept = (line for line in written if is_of_clients(line, chapter))
        # In a page each packet is handled before the next one comes
        lines = [line.replace(" >> ", " > ") for line in kept]
        heard = [*filter(None, map(HEARD.fullmatch, lines))]
        is_short = len(heard) >= HEARD_MIN and len(lines) <= LINES_MAX
        if is_short and CHAPTERS[chapter].word in "\n".join(lines):
            break

    answers: dict[str, list[str]] = {line[0]: [] for line in lines}
    for name, number, end in (match.groups() for match in heard):
        answers[name].append(number or end)
    return {"lines": lines, "shown": [*shown_of(lines)], "answers": answers}


def shown_of(lines: list[str]) -> Iterator[str]:
    """Yield lines without what is received, but for when somebody reads."""
    last_act = max(n for n, line in enumerate(lines) if " < " not in line)
    before = ""
    for line in lines[: last_act + 1]:
        if " < " in line:
            line = "" if line.endswith(" end") else f"{line[0]} < …"
        if line and line != before:
            yield line
        before = line


def rules_of(chapter: str, counts: Counter[str]) -> Iterator[str]:
    """Yield the rules of a chapter that have decided something, as links."""
    families = CHAPTERS[chapter].families.split()
    for rule, count in counts.items():
        if count and rule.partition("-")[0] in families:
            yield f"[{rule}]"


def is_of_clients(line: str, chapter: str) -> bool:
    """Return whether a line is not for the sake of the generator alone."""
    if line.startswith((WITNESS, "wait")) or line.endswith(" > CMSG n"):
        return False
    return chapter in "45" or " process" not in line
