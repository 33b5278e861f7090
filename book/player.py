"""Plays examples on sbus.py itself, on the fake kernel of the tests.

It runs in a page, in Pyodide, and tells it what each line led to.
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
    for missing in ("resource", "pytest"):
        sys.modules[missing] = mock.MagicMock()
    users = {"root": mock.Mock(pw_uid=0)}
    sys.modules["pwd"] = mock.Mock(getpwnam=users.__getitem__)
    vars(socket).setdefault("AF_UNIX", 1)

import sbus
from conformance import examples
from conformance.conversation import perform
from fake_bus import FakeBus, FakeConnection

Answer = dict[str, Any]  # what a page is told, of all or of a line
Talks = Sequence[examples.Conversation]  # one for each line
WHO = re.compile(r"(?:client=|(holder=))(\d+)(?: uid=\d+ pid=\d+)?")
LOG: list[str] = []  # of the server, since the line began


class WatchedBus(FakeBus):
    """A server whose log is read after each line of a conversation."""

    def __init__(self, talks: Talks) -> None:
        super().__init__([word for one in talks for word in one.options])
        self.bus = self.kernel.bus
        vars(self.bus.options).update(verbose=True, trace=None)
        self.bus.journal = sbus.Journal(self.bus.options, "")
        self.names = [""]  # of clients, by their numbers
        self.wires: dict[str, Any] = {}  # by their names
        self.led: list[Answer] = []
        self.who = self.cards = ""

    def connect(self, *which: Any) -> FakeConnection:
        self.names.append(self.who)
        connection = super().connect(*which)
        self.wires[self.who] = connection.wire
        return connection

    def steps(self, talks: Talks) -> Iterator[examples.Step]:
        """Return the steps; note after each line what it led to."""
        for talk in talks:
            got = b""
            for step in talk.steps:
                self.who = step.client
                if step.client in self.wires and self.wires[self.who].taken:
                    got = self.wires[self.who].taken[0]
                yield step
            if not self.is_frozen:
                self.kernel.run()
            made = [WHO.sub(self.named, line) for line in LOG]
            self.led.append({"made": made, "got": examples.escape(got)})
            clients = sorted(self.bus.clients, key=lambda one: one.number)
            self.cards = "".join(map(self.card, clients))
            LOG.clear()

    def named(self, found: re.Match[str]) -> str:
        """Return the client of a line of the log by its name."""
        return (found[1] or "") + self.names[int(found[2])]

    def card(self, client: sbus.Client) -> str:
        """Return what the server knows of a client."""
        patterns = (
            f"{examples.escape(pattern)} × {count}"
            for pattern, (count, _) in client.patterns.items()
        )
        holders = (self.names[one.number] for one in client.held_by)
        facts: dict[str, object] = {
            "patterns": ", ".join(patterns),
            "unread": len(client.wire.taken),
            "backlog": len(client.backlog.packets),
            "paused by": ", ".join(holders),
            "modes": " ".join(map("/".join, client.modes.items())),
            "uid": client.credentials.uid,
            **{k: n for k, n in client.counts.items() if k not in sbus.USES},
        }
        said = "\n".join(f"{k:9} {fact}" for k, fact in facts.items() if fact)
        return f"<pre><b>{self.names[client.number]}</b>\n{escape(said)}</pre>"


def talks_of(kind: str, line: str) -> list[examples.Conversation]:
    """Return what a line of an example says, as conversations."""
    block = examples.Block(kind, "", (), (line,), "")
    return [one.conversation() for one in examples.PARSERS[kind](block)]


def kept_lines(text: str) -> list[str]:
    """Return the lines of an example but comments; `SUB ` keeps its blank."""
    lines = [one if " >" in one else one.strip() for one in text.splitlines()]
    return [line for line in lines if line.strip() and line[0] != "#"]


def talk(kind: str, text: str, most: int = -1) -> Answer:
    """Play a conversation, or so many lines of it in the playground.

    Raises: ValueError if a line is no step, or an option is wrong.
    """
    lines = kept_lines(text)
    talks = [talks_of("conversation", line)[0] for line in lines]
    played = len(talks) if most < 0 else min(most, len(talks))
    said = [""]
    LOG.clear()
    try:
        bus = WatchedBus(talks)
        steps: Any = bus.steps(talks[:played])
        wrong, said, _ = perform(bus, examples.Conversation("", (), steps))
    except SystemExit:
        raise ValueError("; ".join(LOG)) from None
    except (ValueError, KeyError) as error:
        wrong = f"{error} is unknown, or of another form"
    if wrong and (kind != "bench" or len(bus.led) < played):
        bus.led.append({"wrong": wrong})
    lines += said[-1:] * (len(bus.led) - len(lines))  # nothing more is heard
    return {"lines": lines, "led": bus.led, "cards": bus.cards, "of": played}


def rows(kind: str, text: str) -> Answer:
    """Play all cases of the rows of a match or packet block."""
    lines, led = kept_lines(text), []
    for line in lines:
        try:
            talks = talks_of(kind, line)
            wrong = (perform(FakeBus(one.options), one)[0] for one in talks)
            led.append({"wrong": next(filter(None, wrong), "")})
        except (ValueError, KeyError, AssertionError):
            led.append({"wrong": "not of the form of the others"})
    return {"lines": lines, "led": led}


def check(_: str, text: str, answer: str) -> Answer:
    """Play a question with an answer in the place of the hole.

    Where a client is asked for, its line is said for each that is named.
    """
    if "{any}" in answer:
        raise ValueError("{any} is no answer")
    plain = answer.lower().strip(" .`'\"").removeprefix("the ")
    answer = plain if plain in examples.EXPECTATIONS else answer.strip()
    lines = []
    for line in kept_lines(text):
        is_name = line.startswith("____")
        answers = re.findall(r"\b[A-Z]\b", answer) if is_name else [answer]
        lines += [line.replace("____", one) for one in answers]
    return talk("conversation", "\n".join(lines))


def call(kind: str, text: str, *more: Any) -> str:
    """Do what a page asks for; return the answer as JSON."""
    way = {"question": check, "match": rows, "packet": rows}.get(kind, talk)
    try:
        with mock.patch.object(sbus, "log", LOG.append):
            return json.dumps(way(kind, text, *more))  # type: ignore[operator]
    except ValueError as error:
        return json.dumps({"said": f"{error}."})
