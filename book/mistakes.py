"""Servers with one mistake each, which a reader and the kit try to catch.

The mistakes are those with which the tests try the kit.  A server is made of
the source of sbus.py, and plays on the fake kernel in this process.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Generator, Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from unittest import mock

import fake_kernel
import sbus
from broken_servers import Mistake, read_mistakes
from conformance.conversation import perform
from conformance.examples import Conversation, parse_step, read_cases
from conformance.kit import block_of
from conformance.random_walk import Maker
from conformance.random_writer import write
from fake_bus import FakeBus

SOURCE = Path(sbus.__file__).read_text("utf-8")
CONVERSATIONS_MAX = 1_000  # of a walk
WALK_LINES_MAX = 60  # of a conversation that it holds
LINES_MAX = 12  # of an example
AROUND = 4  # lines that are shown before and after a mistake
MESSAGE = re.compile(r"\\0\d+")  # by which a walk tells messages apart
ALL = read_mistakes()
NAMES = "star-crosses-slashes only-the-first-subscriber-hears"
NAMES += " a-copy-for-each-pattern text-without-nul-is-published"
NAMES += " new-pattern-takes-the-place-of-others final-slash-needs-more"
NAMES += " recent-keys-outlive-a-subscribe uid-comes-first"
NAMES += " secrets-of-others-may-be-subscribed-to"
NAMES += " wide-patterns-hear-secrets the-publisher-always-hears"
NAMES += " queue-is-stack soft-error-discards"
SHOWN: dict[str, Mistake] = {name: ALL[name] for name in NAMES.split()}


@contextlib.contextmanager
def server_of(source: str) -> Iterator[ModuleType]:
    """Have all that plays meet another server than sbus.py; yield it.

    It logs as sbus.py does, and its lines count as those of sbus.py.
    """
    module = ModuleType("sbus")
    module.__file__ = sbus.__file__
    with mock.patch.dict(sys.modules, {"sbus": module}):  # for dataclasses
        exec(compile(source, sbus.__file__, "exec"), vars(module))
    vars(module)["log"] = lambda text: sbus.log(text)
    with mock.patch.object(fake_kernel, "sbus", module):
        yield module


def wrong_of(lines: list[str]) -> str:
    """Return what goes wrong in a conversation, or nothing."""
    steps = tuple(map(parse_step, lines))
    return perform(FakeBus(()), Conversation("walk", (), steps)).wrong


def walk(name: str) -> Generator[str, None, list[str]]:
    """Yield how far the kit is; return the shortest conversation it found.

    Raises: ValueError if it found none
    """
    server = server_of(SHOWN[name].spoil(SOURCE))
    with server as spoiled, mock.patch.object(sbus, "log"):
        for number in range(1, CONVERSATIONS_MAX + 1):
            yield f"{number} conversations …"
            operations = Maker(f"{name}/{number}", {}).operations()
            lines = write(operations, {}).lines
            if len(lines) <= WALK_LINES_MAX and wrong_of(lines):
                yield f"Conversation {number} goes wrong. It is made shorter …"
                return fewest(lines, spoiled)
    raise ValueError(f"{CONVERSATIONS_MAX} conversations betray nothing")


def fewest(lines: list[str], spoiled: ModuleType) -> list[str]:
    """Return lines that betray a server; no client, line or pair can go."""

    def betray(lines: list[str]) -> bool:
        with mock.patch.object(fake_kernel, "sbus", spoiled):
            if not wrong_of(lines):
                return False
        with mock.patch.object(fake_kernel, "sbus", sbus):
            return not wrong_of(lines)

    numbers = range(len(lines))
    named: dict[str, set[int]] = {}  # lines by their clients and messages
    for number, line in enumerate(lines):
        for name in (line[0], *MESSAGE.findall(line)):
            named.setdefault(name, set()).add(number)
    gaps = [*named.values()]
    gaps += [{*gap} for size in (1, 2) for gap in combinations(numbers, size)]
    for gap in gaps:
        fewer = [line for n, line in enumerate(lines) if n not in gap]
        if betray(fewer):
            return fewest(fewer, spoiled)
    return lines


def choices(name: str) -> list[tuple[str, list[str]]]:
    """Return the names and lines of three examples; one betrays a server."""
    family = SHOWN[name].found_by[0].partition("-")[0]
    good: dict[str, list[str]] = {}
    bad: dict[str, list[str]] = {}

    def is_far(case: object) -> bool:
        return family not in str(getattr(case, "rules", ""))

    with server_of(SHOWN[name].spoil(SOURCE)), mock.patch.object(sbus, "log"):
        for case in sorted(read_cases(), key=is_far):
            talk = case.conversation()
            lines = [*map(str, talk.steps)]
            if talk.options or len(lines) > LINES_MAX:
                continue
            with contextlib.suppress(ValueError):  # bytes that no line has
                found = bad if wrong_of(lines) else good
                found.setdefault(block_of(case), lines)
            if bad and len({*good} - {*bad}) > 1:
                break
    good = {block: lines for block, lines in good.items() if block not in bad}
    chosen = [*bad.items()][:1] + [*good.items()][:2]
    return random.Random(name).sample(chosen, len(chosen))


def excerpt(name: str) -> tuple[int, str]:
    """Return the first line of what is around a mistake, and its lines."""
    source = SHOWN[name].spoil(SOURCE)
    mistake = SHOWN[name].changes[0][1]
    line = source.count("\n", 0, source.index(mistake))
    first = max(0, line - AROUND)
    last = line + mistake.count("\n") + AROUND
    return first + 1, "\n".join(source.splitlines()[first : last + 1])
