"""Plays examples on sbus.py itself, on the fake kernel of the tests.

It runs in a page, in Pyodide, and under CPython.  A page gets HTML, and a
sentence on how it went.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any
from unittest import mock

if sys.platform == "emscripten":  # what is named at import, and is not there
    for missing in ("pwd", "resource", "pytest"):
        sys.modules[missing] = mock.MagicMock()
    vars(socket).setdefault("AF_UNIX", 1)

import sbus
from conformance import examples
from conformance.conversation import perform
from drawing import HEADS, NO_PACKETS, Outcome, drawn
from fake_bus import FakeBus, FakeConnection

Answer = dict[str, Any]  # what a page is told
Talks = Sequence[examples.Conversation]  # one for each line
STEPS_MAX = 1_000
HOLE = "____"  # what a question asks for
LOG: list[str] = []  # of the server, since the line began
CREDENTIALS = re.compile(r"((uid|gid|pid)=\d{1,9}( |$))*")
WHO = re.compile(r"(?:client=|(holder=))(\d+)(?: uid=\d+ pid=\d+)?")


class WatchedBus(FakeBus):
    """A server whose log is read after each line of a conversation."""

    def __init__(self, talks: Talks) -> None:
        super().__init__([word for one in talks for word in one.options])
        self.bus = self.kernel.bus
        vars(self.bus.options).update(verbose=True, trace=None)
        self.bus.journal = sbus.Journal(self.bus.options, "")
        self.who = self.got = self.cards = ""
        self.names = [""]  # of clients, by their numbers
        self.taken: list[Outcome] = []

    def connect(self, *which: Any) -> FakeConnection:
        self.names.append(self.who)
        connection = super().connect(*which)
        receive = connection.receive

        def note() -> bytes:
            packet = receive()
            self.got = examples.escape(packet)
            return packet

        vars(connection)["receive"] = note
        return connection

    def steps(self, talks: Talks) -> Iterator[examples.Step]:
        """Return the steps; note after each line what it led to."""
        for talk in talks:
            for step in talk.steps:
                self.who = step.client
                is_process = step.verb == "process"
                if is_process and not CREDENTIALS.fullmatch(step.argument):
                    raise ValueError(repr(step.argument))
                yield step
            if not self.is_frozen:
                self.kernel.run()
            made = [WHO.sub(self.name_of, line) for line in LOG]
            self.taken.append(Outcome("", tuple(made), self.got))
            clients = sorted(self.bus.clients, key=lambda one: one.number)
            self.cards = "".join(map(self.card, clients))
            LOG.clear()

    def name_of(self, found: re.Match[str]) -> str:
        """Return a client of the log by its name."""
        return (found[1] or "") + self.names[int(found[2])]

    def card(self, client: sbus.Client) -> str:
        """Return what the server knows of a client."""
        patterns = [
            examples.escape(pattern) + f" × {count}" * (count > 1)
            for pattern, (count, _) in client.patterns.items()
        ]
        room = client.wire.room
        facts: dict[str, object] = {
            "patterns": "\n".join(patterns),
            "unread": f"{len(client.wire.taken)}" + f" of {room}" * bool(room),
            "backlog": len(client.backlog.packets),
            "paused by": " ".join(self.names[o.number] for o in client.held_by),
            "modes": " ".join(map("/".join, client.modes.items())),
            "uid": client.own.uid,
            **{k: n for k, n in client.counts.items() if k not in sbus.USES},
        }
        rows = "".join(
            f"<div><dt>{what}</dt><dd>{escape(str(said))}</dd></div>"
            for what, said in facts.items()
            if said
        )
        name = self.names[client.number]
        return f"<article><h3>{name}</h3><dl>{rows}</dl></article>"


def talks_of(kind: str, line: str) -> list[examples.Conversation]:
    """Return what a line of an example says, as conversations."""
    block = examples.Block(kind, "", (), (line,), "")
    return [one.conversation() for one in examples.PARSERS[kind](block)]


def play(talks: Talks, is_whole: bool) -> tuple[WatchedBus, str]:
    """Play lines up to the first that fails; return what was said last.

    If the conversation is whole, nobody may hear anything else, and the
    server has to go on serving.
    """
    LOG.clear()
    said = [""]
    try:
        bus = WatchedBus(talks)
        steps: Any = bus.steps(talks)
        wrong, said = perform(bus, examples.Conversation("", (), steps))
    except SystemExit:
        raise ValueError("; ".join(LOG)) from None
    except (ValueError, KeyError) as error:
        wrong = f"{error} is unknown, or of another form"
    if wrong and (is_whole or len(bus.taken) < len(talks)):
        bus.taken.append(Outcome(wrong))
    return bus, said[-1]


def kept_lines(text: str) -> list[str]:
    """Return the lines of an example but comments; `SUB ` keeps its blank."""
    lines = [one if " >" in one else one.strip() for one in text.splitlines()]
    return [line for line in lines if line.strip() and line[0] != "#"]


# ---- What a page asks for


def talk(kind: str, text: str, most: int) -> Answer:
    """Play a conversation, or so many lines of it in the playground.

    Raises: ValueError if a line is no step, or there are none or too many.
    """
    lines, talks, is_whole = kept_lines(text), [], kind != "bench"
    for number, line in enumerate(lines, 1):
        try:
            talks += talks_of("conversation", line)
        except ValueError as error:
            raise ValueError(f"Line {number} is {error}") from None
    if not is_whole <= sum(len(one.steps) for one in talks) <= STEPS_MAX:
        raise ValueError(f"A conversation has 1 to {STEPS_MAX} steps")
    most = len(lines) if most < 0 else most
    bus, said = play(talks[:most], is_whole)
    lines += [said] * (len(bus.taken) - len(lines))
    answer = verdict("conversation", lines, bus.taken)
    if bus.kernel.now:
        answer["said"] += f" The clock shows {bus.kernel.now:g} s."
    return {**answer, "cards": bus.cards, "of": most}


def rows(kind: str, text: str, _: Any) -> Answer:
    """Play all cases of the rows of a match or packet block."""
    lines, outcomes = kept_lines(text), []
    for line in lines:
        try:
            talks = talks_of(kind, line)
            wrong = (perform(FakeBus(one.options), one)[0] for one in talks)
            outcomes.append(Outcome(next(filter(None, wrong), "")))
        except (ValueError, KeyError, AssertionError):
            outcomes.append(Outcome("not of the form of the others"))
    return verdict(kind, lines, outcomes)


def verdict(kind: str, lines: list[str], outcomes: list[Outcome]) -> Answer:
    """Return the drawing, whether all came as was said, and a sentence."""
    what = "row" if kind in HEADS else "step"
    said = f"{len(outcomes)} of {len(lines)} {what}s went as they are written."
    said = said if len(outcomes) < len(lines) else f"Right: {said}"
    said += "".join(
        f" {line}."
        for outcome in outcomes
        for line in outcome.decisions
        if line.startswith("disconnect ")
    )
    wrong = [
        f"{what.title()} {number}, “{line}”: {outcome.wrong}."
        for number, (line, outcome) in enumerate(zip(lines, outcomes), 1)
        if outcome.wrong
    ]
    html = drawn(kind, lines, outcomes)
    said = [*wrong, said][0].replace("\\0", "\\x00")
    return {"ok": not wrong, "said": said, "html": html}


def check(_: str, text: str, answer: str) -> Answer:
    """Play a question with an answer in the place of the hole.

    Where a client is asked for, its line is said for each that is named.
    """
    if "{any}" in answer:
        raise ValueError("{any} is no answer")
    plain = answer.lower().strip(" .`'\"").removeprefix("the ")
    answer = plain if plain in NO_PACKETS else answer.strip()
    lines = []
    for line in kept_lines(text):
        is_name = line.startswith(HOLE)
        answers = re.findall(r"\b[A-Z]\b", answer) if is_name else [answer]
        lines += [line.replace(HOLE, one) for one in answers]
    played = talk("conversation", "\n".join(lines), -1)
    return {**played, "said": "Right." if played["ok"] else played["said"]}


def call(kind: str, text: str, more: Any = -1) -> str:
    """Do what a page asks for; return the answer as JSON."""
    way = {"question": check, "match": rows, "packet": rows}.get(kind, talk)
    try:
        with mock.patch.object(sbus, "log", LOG.append):
            return json.dumps(way(kind, text, more))
    except ValueError as error:
        return json.dumps({"ok": False, "said": f"{error}."})
