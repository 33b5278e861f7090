"""Plays examples on sbus.py itself, on the fake kernel of the tests.

It runs in a page, in Pyodide, and under CPython.  What it returns is HTML,
and a sentence on how it went.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

if sys.platform == "emscripten":  # what is named at import, and is not there
    for missing in ("pwd", "resource", "pytest"):
        sys.modules[missing] = mock.MagicMock()
    vars(socket).setdefault("AF_UNIX", 1)

import sbus
from conformance import examples
from conformance.conversation import Connection, Failure, Talk
from conformance.examples import Block, Conversation, Step, Text
from fake_bus import FakeBus

from . import drawing
from .drawing import HOLE, Outcome

Answer = dict[str, Any]  # what a page is told
STEPS_MAX = 1_000
WHO = re.compile(r"(?:client=|(holder=))(\d+)(?: uid=\d+ pid=\d+)?")
CREDENTIALS = re.compile(r"((uid|gid|pid)=\d{1,9}( |$))*")
SENT = re.compile(r"\s*[A-Z] >")
FORMS = {  # of rows
    "match": "a pattern, a key, and yes or no",
    "packet": "a packet, its kind or invalid, key=... and payload=...",
}


class Player(Talk):
    """A conversation whose every step is watched."""

    bus: FakeBus

    def __init__(self, options: Sequence[str], log: list[str]) -> None:
        try:
            super().__init__(FakeBus(options))
        except SystemExit:
            raise ValueError("; ".join(log)) from None
        bus = self.bus.kernel.bus
        vars(bus.options).update(verbose=True, trace=None)
        bus.journal = sbus.Journal(bus.options, "")
        self.log = log
        self.got = ""  # in this step
        self.seen: dict[str, sbus.Client] = {}  # by name, as the server does

    def watch(self, step: Step) -> Outcome:
        """Take a step, and return what it led to."""
        self.log.clear()
        self.got = wrong = ""
        try:
            self.take(step)
            if step.verb == ">":
                self.settle()
        except (Failure, ValueError) as failure:
            wrong = str(failure)
        except KeyError as error:
            wrong = f"{error} is not connected"
        self.look()
        return Outcome(wrong, tuple(self.words(step)), self.got)

    def look(self) -> None:
        """See whom the server has let in, though it was stopped before."""
        by_wire = {one.wire: one for one in self.bus.kernel.bus.clients}
        for name, connection in self.clients.items():
            if client := by_wire.get(vars(connection)["wire"]):
                self.seen[name] = client

    def words(self, step: Step) -> Iterator[str]:
        """Return what the server logged, with the names of the clients."""
        names = {str(one.number): name for name, one in self.seen.items()}

        def name_of(found: re.Match[str]) -> str:
            name = names.get(found[2])
            return (found[1] or "") + name if name else found[0]

        yield from (WHO.sub(name_of, line) for line in self.log)
        client = self.seen.get(step.client)
        if client and client.held_by and client.wire.incoming:
            yield f"({step.client} is paused, and what it sends waits)"

    def take(self, step: Step) -> None:
        if step.verb == "process":
            if step.client in self.clients:
                raise Failure("it is connected and stays who it is [CRED-1]")
            if not CREDENTIALS.fullmatch(step.argument):
                raise Failure("not as in uid=1001 gid=100 pid=7")
        super().take(step)

    def connect(self, step: Step) -> Connection:
        connection = super().connect(step)
        self.look()
        return connection

    def matches(self, text: Text, got: bytes) -> bool:
        self.got = examples.escape(got)
        return super().matches(text, got)


def play(
    conversation: Conversation, is_whole: bool = True
) -> tuple[list[tuple[Step, Outcome]], Player]:
    """Take the steps of a conversation up to the first that fails.

    If it is whole, nobody may hear anything else, and the server has to go
    on serving.  A step that fails for that is one more.
    """
    said: list[str] = []
    taken: list[tuple[Step, Outcome]] = []
    with mock.patch.object(sbus, "log", said.append):
        player = Player(conversation.options, said)
        for step in conversation.steps:
            taken.append((step, player.watch(step)))
            if taken[-1][1].wrong:
                return taken, player
        for name in [*player.clients] if is_whole else ():
            last = Step(name, "<", "nothing")
            outcome = player.watch(last)
            if outcome.wrong:
                return [*taken, (last, outcome)], player
        if is_whole:
            player.close()
            step, outcome = taken[-1]
            taken[-1] = step, outcome._replace(wrong=player.bus.fault())
    return taken, player


def kept_lines(text: str) -> tuple[str, ...]:
    """Return the lines of an example that are neither empty nor comments.

    A blank at the end counts in what is sent: `SUB ` is a packet.
    """
    lines = (
        line.lstrip() if SENT.match(line) else line.strip()
        for line in text.splitlines()
    )
    return tuple(line for line in lines if line and line[0] != "#")


# ---- What a page asks for


def talk(kind: str, text: str, count: int) -> Answer:
    """Play a conversation, or so many of its steps on the bench.

    Raises: ValueError if a line is no step, or there are none or too many.
    """
    block = Block(kind, "", (), kept_lines(text), "")
    (whole,) = examples.conversations(block)
    most = len(whole.steps)
    if not (kind != "bench") <= most <= STEPS_MAX:
        raise ValueError(f"a conversation has 1 to {STEPS_MAX} steps")
    part = whole._replace(steps=whole.steps[: most if count < 0 else count])
    taken, player = play(part, kind == "conversation")
    later = [(step, None) for step in whole.steps[len(taken) :]]
    answer = verdict("step", [outcome for _, outcome in taken], most)
    if player.bus.kernel.now:
        answer["said"] += f"; the clock shows {player.bus.kernel.now:g} s"
    html = drawing.lanes([*taken, *later], whole.options)
    cards = drawing.cards(player.seen)
    return {**answer, "html": html, "cards": cards, "count": most}


def rows(kind: str, text: str, _: Any) -> Answer:
    """Play the rows of a match or packet block."""
    lines = kept_lines(text)
    outcomes = [play_row(kind, line) for line in lines]
    html = drawing.table(kind, lines, outcomes)
    return {"html": html, **verdict("row", outcomes, len(lines))}


def play_row(kind: str, line: str) -> Outcome:
    """Play all cases of a row; return what came of the last, or failed.

    Of the server's decisions those are shown that the last packet led to.
    """
    try:
        block = Block(kind, "", (), (line,), "")
        talks = [case.conversation() for case in examples.PARSERS[kind](block)]
    except (ValueError, KeyError, AssertionError):
        return Outcome(f"not a row: {line}; one is {FORMS[kind]}")
    for one in talks:
        taken, _ = play(one)
        *_, probe = (led_to for step, led_to in taken if step.verb == ">")
        made = (one for one in probe.decisions if one.split()[1] != "open")
        outcome = taken[-1][1]._replace(decisions=tuple(made))
        if outcome.wrong:
            break
    return outcome


def verdict(what: str, outcomes: Sequence[Outcome], most: int) -> Answer:
    """Return whether all came as was said, and a sentence."""
    for number, outcome in enumerate(outcomes, 1):
        if outcome.wrong:
            said = f"✗ {what} {number}: {outcome.wrong}"
            return {"ok": False, "said": said}
    lost = (
        line
        for outcome in outcomes
        for line in outcome.decisions
        if line.startswith("disconnect ")
    )
    said = f"✓ {len(outcomes)} of {most} {what}s went as they say"
    return {"ok": True, "said": "; ".join([said, *lost])}


def check(_: str, text: str, answer: str) -> Answer:
    """Play a question with an answer in the place of the hole.

    Where a client is asked for, its line is said for each that is named.
    """
    if "{any}" in answer:
        raise ValueError("{any} is no answer")
    plain = answer.lower().strip(" .`'\"")
    plain = plain[4:] if plain.startswith("the ") else plain
    answer = plain if plain in examples.EXPECTATIONS else answer.strip()
    lines = []
    for line in kept_lines(text):
        is_name = line.startswith(HOLE)
        answers = re.findall(r"\b[A-Z]\b", answer) if is_name else [answer]
        lines += [line.replace(HOLE, one) for one in answers]
    return talk("conversation", "\n".join(lines), -1)


WAYS = {"question": check, "match": rows, "packet": rows}


def call(kind: str, text: str, more: Any = -1) -> str:
    """Do what a page asks for; return the answer as JSON."""
    try:
        answer = WAYS.get(kind, talk)(kind, text, more)
    except (ValueError, KeyError) as error:
        answer = {"ok": False, "said": f"✗ {error}"}
    return json.dumps(answer)
