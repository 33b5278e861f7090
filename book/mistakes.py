"""Servers with one mistake each, which a reader and the kit try to catch.

The mistakes are those with which the tests try the kit.  A server is made of
the source of sbus.py, and plays on the fake kernel in this process.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import fake_kernel
import sbus
from broken_servers import Mistake, read_mistakes
from conformance.conversation import perform
from conformance.examples import Conversation, parse_step, read_cases
from conformance.kit import block_of
from conformance.random_walk import Walk
from fake_bus import FakeBus

SOURCE = Path(sbus.__file__).read_text("utf-8")
CONVERSATIONS_MAX = 1_000  # of a walk
LINES_MAX = 12  # of an example
AROUND = 4  # lines that are shown before and after a mistake
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


class WalkedBus(FakeBus):
    """What the kit's walk needs of a server's process."""

    room, path = 1, ""  # it has learned the room, and needs no path

    def __init__(self) -> None:  # it is started before it is used
        pass

    def start(self, *options: str) -> None:
        """Begin anew."""
        super().__init__(options[1:])

    def patience(self, _: float) -> contextlib.AbstractContextManager[None]:
        """Wait as long as ever: nothing here takes time."""
        return contextlib.nullcontext()


def walk(name: str) -> Generator[str, None, list[str]]:
    """Yield how far the kit is; return the conversation that it found.

    Raises: ValueError if it found none
    """
    spoiled = server_of(SHOWN[name].spoil(SOURCE))
    walk = Walk(cast(Any, WalkedBus()), name, [{}])
    with spoiled, mock.patch.object(sbus, "log"):
        while walk.count < CONVERSATIONS_MAX:
            yield f"{walk.count} conversations …"
            for failure in walk.failures(count=walk.count + 1):
                return failure.lines
    raise ValueError(f"{CONVERSATIONS_MAX} conversations betray nothing")


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
                side = bad if wrong_of(lines) else good
                side.setdefault(block_of(case), lines)
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
