"""Servers with one mistake each, which a reader and the kit try to catch.

The mistakes are those with which the tests try the kit.  A server is made of
the source of sbus.py, and plays on the fake kernel in this process.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fake_kernel
import sbus
from broken_servers import read_mistakes
from conformance.conversation import perform
from conformance.examples import Case, Conversation, parse_step, read_cases
from conformance.kit import block_of
from conformance.random_walk import Maker, smaller
from conformance.random_writer import Operation, write
from fake_bus import FakeBus

SOURCE = Path(sbus.__file__).read_text("utf-8")
CONVERSATIONS_MAX = 1_000
LOT = 20  # conversations, after which a page is told how many they are
LINES_MAX = 12  # of an example
AROUND = 4  # lines that are shown before and after a mistake
MISTAKES = read_mistakes()
SHOWN = """
    star-crosses-slashes final-slash-needs-more recent-keys-outlive-a-subscribe
    only-the-first-subscriber-hears text-without-nul-is-published
    uid-comes-first secrets-of-others-may-be-subscribed-to
    a-copy-for-each-pattern queue-is-stack the-publisher-always-hears
"""


def spoiled(name: str) -> ModuleType:
    """Return sbus.py with a mistake."""
    module = ModuleType("sbus")
    module.__file__ = sbus.__file__
    with mock.patch.dict(sys.modules, {"sbus": module}):  # for dataclasses
        exec(MISTAKES[name].spoil(SOURCE), vars(module))
    vars(module)["log"] = lambda _: None
    return module


@contextlib.contextmanager
def mistaken(name: str) -> Iterator[ModuleType]:
    """Have all that plays meet a server with a mistake."""
    module = spoiled(name)
    vars(module)["log"] = lambda text: sbus.log(text)
    with mock.patch.object(fake_kernel, "sbus", module):
        yield module


def walk(name: str) -> Generator[str, None, list[str]]:
    """Yield how far the kit is; return the shortest conversation it found.

    Raises: ValueError if it found none
    """
    module = spoiled(name)
    for number in range(1, CONVERSATIONS_MAX + 1):
        if number % LOT == 0:
            yield f"{number} conversations, all as they should be …"
        operations = Maker(f"{name}/{number}", {}).operations()
        if is_caught(module, write(operations, {}).lines):
            yield f"Conversation {number} goes wrong. It is made shorter …"
            return fewest(
                module, write(shortest(module, operations), {}).lines
            )
    raise ValueError(f"The kit found nothing in {CONVERSATIONS_MAX} tries")


def wrong_on(module: ModuleType, lines: Sequence[str]) -> str:
    """Return what goes wrong in a conversation on a server."""
    steps = tuple(map(parse_step, lines))
    with mock.patch.object(fake_kernel, "sbus", module):
        return perform(FakeBus(()), Conversation("walk", (), steps)).wrong


def is_caught(module: ModuleType, lines: Sequence[str]) -> bool:
    """Return whether lines go wrong on a server, and right on sbus.py."""
    return bool(wrong_on(module, lines)) and not wrong_on(sbus, lines)


def shortest(module: ModuleType, operations: list[Operation]) -> list[Any]:
    """Return operations of which none can be left out or made smaller."""
    place = len(operations)
    while place:
        place -= 1
        for fewer in smaller(operations, place):
            if is_caught(module, write(fewer, {}).lines):
                operations, place = fewer, min(place + 1, len(fewer))
                break
    return operations


def fewest(module: ModuleType, lines: list[str]) -> list[str]:
    """Return lines of which no client, line or pair can be left out."""
    numbers = range(len(lines))
    gaps = [{n for n in numbers if lines[n][0] == one} for one in "ABCDEFIL"]
    gaps += map(set, combinations_with_replacement(numbers, 2))
    for gap in gaps:
        fewer = [line for n, line in enumerate(lines) if n not in gap]
        if gap and is_caught(module, fewer):
            return fewest(module, fewer)
    return lines


def choices(name: str) -> list[tuple[str, list[str]]]:
    """Return the names and lines of three examples; one of them fails."""
    module, family = spoiled(name), MISTAKES[name].found_by[0][:3]
    fails: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}

    def is_far(case: Case) -> bool:
        return not any(rule.startswith(family) for rule in case.rules)

    for case in sorted(read_cases(), key=is_far):
        talk = case.conversation()
        lines = [*map(str, talk.steps)]
        if talk.options or len(lines) > LINES_MAX:
            continue
        with contextlib.suppress(ValueError):  # bytes that no line has
            does_fail = bool(wrong_on(module, lines))
            fails[does_fail].setdefault(block_of(case), lines)
        if fails[True] and len(fails[False]) > 1:
            break
    chosen = [*fails[True].items()][:1] + [*fails[False].items()][:2]
    return random.Random(name).sample(chosen, len(chosen))


def excerpt(name: str) -> tuple[int, str]:
    """Return the first line of what is around a mistake, and its lines."""
    source = MISTAKES[name].spoil(SOURCE)
    at = source.index(MISTAKES[name].changes[0][1])
    first = max(0, source.count("\n", 0, at) - AROUND)
    last = first + 2 * AROUND + MISTAKES[name].changes[0][1].count("\n") + 1
    return first + 1, "\n".join(source.splitlines()[first:last])
