"""Plays examples on sbus.py itself, on the fake kernel of the tests.

It runs in a page, in Pyodide, and tells it what each line led to.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any
from unittest import mock

if sys.platform == "emscripten":  # what is named at import, and is not there
    for missing in ("resource", "pytest"):
        sys.modules[missing] = mock.MagicMock()
    users = {"root": mock.Mock(pw_uid=0)}
    sys.modules["pwd"] = mock.Mock(getpwnam=users.__getitem__)
    vars(socket).setdefault("AF_UNIX", 1)
    vars(os).update(geteuid=lambda: 0, getegid=lambda: 0)

import sbus
from conformance import examples
from conformance.conversation import perform
from every_order import report_html
from fake_bus import FakeBus, FakeConnection
from fake_kernel import FakeSelector
from orders import try_orders

Answer = dict[str, Any]  # what a page is told, of all or of a line
Talks = Sequence[examples.Conversation]  # one for each line
WHO = re.compile(r"(?:client=|(by=))(\d+)(?: uid=\d+ pid=\d+)?")
DISCONNECTED = re.compile(r"disconnect (\w+) \[([A-Z]+-\d+)\] (.*)")
LOG: list[str] = []  # of the server, since the line began
PLAY_SECONDS = 10.0  # that an example may take
LINE_SECONDS = 0.001  # it tells who has waited longest [BLOCK-16]
PACKETS_MAX, BYTES_MAX = 100_000, 64_000_000  # of an example
TEXT_MAX = 100_000  # its characters
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
TIMES = re.compile(r"\*(\d+)\}")
SLIPS = {  # lines that are none, and what is said of them
    r"(?!wait|server)[a-z]\w* .*|[A-Z]\w+ (?:[<>]|close|room).*": (
        "a client has one capital letter for its name, A to Z"
    ),
    r"wait (?!\d{1,9}(?:\.\d+)?$).*": "wait takes a number of seconds",
    r"[A-Z] room(?! \d{1,9}$).*": "room takes a number of packets, from 0",
    r"server .*(?<!\S)-[acdfhpr]\b.*": "a server in a page is not a process: "
    "leave that option out",
}
STARTS = "SUB ", "UNSUB ", "MSG ", "CMSG "
FORMS = {  # what a hole takes behind its arrow
    ">": (STARTS, "SUB pattern, UNSUB pattern, MSG key\\0payload or CMSG key"),
    "<": (
        ("MSG ", "CMSG ", *examples.EXPECTATIONS),
        "MSG key\\0payload or CMSG key\\0payload; or one word, nothing or end",
    ),
}


class TooLong(BaseException):
    """An example takes too long; no code that it runs catches this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop the server in the first round after that many seconds.

    Raises: TooLong
    """
    end = time.monotonic() + seconds
    select = FakeSelector.select

    def look(*which: Any) -> Any:
        if time.monotonic() > end:
            raise TooLong
        return select(*which)

    with mock.patch.object(FakeSelector, "select", look):
        yield


def check_size(lines: Sequence[str]) -> None:
    """Raise ValueError if the packets of an example are too many or large."""
    packets = size = 0
    for line in lines:
        found = RANGE.search(line)
        times = max(1, int(found[2]) - int(found[1]) + 1) if found else 1
        packets += times
        size += times * (len(line) + sum(map(int, TIMES.findall(line))))
    text = sum(map(len, lines))
    if packets > PACKETS_MAX or size > BYTES_MAX or text > TEXT_MAX:
        raise ValueError(
            f"That is too much for this page, which plays {PACKETS_MAX:,}"
            f" packets and {BYTES_MAX // 1_000_000} MB at most"
        )


def check_form(lines: Sequence[str]) -> None:
    """Raise ValueError if lines are no steps, and say why in plain words."""
    for number, line in enumerate(lines, 1):
        for slip, said in SLIPS.items():
            if re.fullmatch(slip, line):
                raise ValueError(f"Line {number}, “{line}”: {said}")


class WatchedBus(FakeBus):
    """A server whose log is read after each line of a conversation."""

    def __init__(self, talks: Talks) -> None:
        super().__init__([word for talk in talks for word in talk.options])
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
            self.kernel.now += LINE_SECONDS
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
            if cut := reason_of(made, talk):
                self.led[-1]["cut"] = cut
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
            for pattern, count in client.patterns.items()
        )
        modes = [*map("/".join, client.modes.items())]
        holders = (self.names[holder.number] for holder in client.held_by)
        facts: dict[str, object] = {
            "patterns": ", ".join(patterns),
            "unread": len(client.wire.taken),
            "backlog": len(client.backlog.packets),
            "paused by": ", ".join(holders),
            "modes": " ".join(modes[:2]),
            "": " ".join(modes[2:]),
            "uid": client.credentials.uid,
            **{k: n for k, n in client.counts.items() if k not in sbus.USES},
        }
        said = "\n".join(f"{k:9} {fact}" for k, fact in facts.items() if fact)
        return f"<pre><b>{self.names[client.number]}</b>\n{escape(said)}</pre>"


def reason_of(made: list[str], talk: examples.Conversation) -> Any:
    """Return the client that was disconnected, and why, in plain words."""
    found = filter(None, map(DISCONNECTED.search, made))
    for name, rule, reason in (one.groups() for one in found):
        step = talk.steps[-1] if talk.steps else None
        if rule == "PKT-2" and step and step.client == name:
            reason = slip_of(step.argument.strip('"')) or reason
        return name, f"{reason} [{rule}]"
    return None


def slip_of(packet: str) -> str:
    """Return what is wrong with a malformed packet, as it was written."""
    kind = next((start for start in STARTS if packet.startswith(start)), "")
    if kind == "MSG ":
        return "no NUL byte after the key: write MSG key\\0payload"
    word = packet.partition(" ")[0]
    if f"{word.upper()} " in STARTS:
        if word != word.upper():
            return f"a kind has capital letters: {word.upper()}"
        return f"no blank after {word}"
    return "the packet begins with none of SUB, UNSUB, MSG and CMSG"


def talks_of(kind: str, line: str) -> list[examples.Conversation]:
    """Return what a line of an example says, as conversations."""
    block = examples.Block(kind, "", (), (line,), "")
    return [case.conversation() for case in examples.PARSERS[kind](block)]


def kept_lines(text: str) -> list[str]:
    """Return the lines of an example; `SUB ` keeps its blank.

    Comments are left out, and the line --- that every_order.py knows.
    """
    lines = [one if " >" in one else one.strip() for one in text.splitlines()]
    kept = [line for line in lines if line.strip() and line[0] not in "#-"]
    check_size(kept)
    return kept


def talk(kind: str, text: str, most: int = -1) -> Answer:
    """Play a conversation, or so many lines of it in the playground.

    In the playground a line that fails is left out, and the others go on.
    Raises: ValueError if a line is no step, or an option is wrong.
    """
    lines = kept_lines(text)
    check_form(lines)
    talks = [talks_of("conversation", line)[0] for line in lines]
    played = len(talks) if most < 0 else min(most, len(talks))
    failures: dict[int, str] = {}  # by the number of the line
    while True:
        bus, wrong, said = perform_lines(talks, played)
        failed = len(bus.led)
        if kind != "bench" or not wrong or failed >= played:
            break
        failures[failed] = wrong
        talks[failed] = talks[failed]._replace(steps=())

    if kind != "bench" and wrong:
        bus.led.append({"wrong": wrong})
    for number, reason in failures.items():
        bus.led[number]["wrong"] = reason
    if mark_cut(lines, bus.led):
        del bus.led[len(lines) :]  # that another client heard the end
    lines += said[-1:] * (len(bus.led) - len(lines))  # nothing more is heard
    return {"lines": lines, "led": bus.led, "cards": bus.cards, "of": played}


def perform_lines(
    talks: Talks, played: int
) -> tuple[WatchedBus, str, list[str]]:
    """Play lines; return the bus, what went wrong, and what was said."""
    LOG.clear()
    said = [""]
    try:
        bus = WatchedBus(talks)
        steps: Any = bus.steps(talks[:played])
        wrong, said, *_ = perform(bus, examples.Conversation("", (), steps))
    except SystemExit:
        raise ValueError("; ".join(LOG)) from None
    except (ValueError, KeyError) as error:
        wrong = f"{error} is unknown, or of another form"
    return bus, wrong, said


def mark_cut(lines: list[str], led: list[Answer]) -> bool:
    """Let a line fail that has a client disconnected, if none expects it.

    Return whether there is one.
    """
    for number, answer in enumerate(led):
        if "cut" not in answer:
            continue
        name, reason = answer["cut"]
        expected = f"{name} < end", f"{name} < no packet"
        if lines[number + 1 : number + 2] == [f"{name} close"]:
            continue  # it does not matter who closes
        if any(line.startswith(expected) for line in lines[number:]):
            continue
        answer["wrong"] = f"{reason}, so {name} was disconnected"
        return True
    return False


def rows(kind: str, text: str) -> Answer:
    """Play all cases of the rows of a match or packet block."""
    lines, led = kept_lines(text), []
    for line in lines:
        try:
            talks = talks_of(kind, line)
            wrong = (perform(FakeBus(talk.options), talk)[0] for talk in talks)
            led.append({"wrong": next(filter(None, wrong), "")})
        except (ValueError, KeyError, AssertionError):
            led.append({"wrong": "not of the form of the others"})
    return {"lines": lines, "led": led}


def check(_: str, text: str, answer: str) -> Answer:
    """Play a question with an answer in the place of the hole.

    Where a client is asked for, its line is said for each that is named.
    Raises: ValueError if the answer is of another form
    """
    lines = kept_lines(text)
    hole = next(line for line in lines if "____" in line)
    plain = answer.lower().strip(" .`'\"").removeprefix("the ")
    answer = plain if plain in examples.EXPECTATIONS else answer.strip(" `")
    if said := form_of(hole, answer):
        raise ValueError(said)

    filled = []
    for line in lines:
        is_name = line.startswith("____")
        answers = re.findall(r"\b[A-Z]\b", answer) if is_name else [answer]
        filled += [line.replace("____", answer) for answer in answers]
    return talk("conversation", "\n".join(filled))


def surprise(_: str, chapter: str, seed: str) -> Answer:
    """Return a random conversation, and the rules of a chapter that decide it.

    What this needs is imported when it is asked for.
    """
    from conformance.random_writer import Decisions
    from model_bus import ModelBus
    from surprise import make_surprise, rules_of

    task = make_surprise(chapter, seed)
    steps = tuple(map(examples.parse_step, task["lines"]))
    with Decisions() as decisions:
        perform(ModelBus(()), examples.Conversation("", (), steps))
    return {**task, "rules": [*rules_of(chapter, decisions.rules())]}


def form_of(hole: str, answer: str) -> str:
    """Return what is to be said of the form of an answer, if it is wrong."""
    if not answer:
        return "Write something first"
    if "{any}" in answer:
        return "{any} is no answer"
    if hole.startswith("____"):
        if not re.search(r"\b[A-Z]\b", answer):
            return "Write the capital letters of clients, such as X Y"
        return ""
    if re.match("[A-Za-z]? ?[<>]", answer):
        return "The line has its client and arrow already: write what follows"

    if form := FORMS.get(hole[-len("> ____")]):
        if not answer.lstrip('"').startswith(form[0]):
            return f"Write a whole packet, with its kind: {form[1]}"
        if answer.startswith("MSG ") and not re.search(r"\\(0|x00)", answer):
            return "In a message \\0 stands behind the key: MSG key\\0payload"
        return ""

    kind = next((one for one in STARTS if answer.upper().startswith(one)), "")
    if kind and f"> {kind}" in hole:
        return f"The line has its {kind.strip()} already: write what follows"
    return ""


def search(_: str, text: str, name: str) -> Generator[str, None, str]:
    """Yield how far a search of every order is; return its answer as JSON."""
    try:
        kept_lines(text)
        for report in try_orders(text):
            yield f"{report.states:,} states are tried …"
    except ValueError as error:
        return json.dumps({"said": f"{error}."})
    return json.dumps({"html": report_html(report, name)})


def stage(_: str, source: str, number: int) -> Answer:
    """Try a student's server: say what is missing, and show where.

    Raises: ValueError if the program is none
    """
    from program_bus import ProgramKit  # which reads the specification

    said, wrong = ProgramKit(source).try_stages(number)
    if not wrong:
        return {"said": said, "lines": [], "led": []}
    led = [*({} for _ in wrong.dialogue[1:]), {"wrong": wrong.what}]
    return {"said": said, "lines": wrong.dialogue, "led": led}


def call(kind: str, text: str, *more: Any) -> str:
    """Do what a page asks for; return the answer as JSON."""
    ways = {"question": check, "match": rows, "packet": rows, "stage": stage}
    way = {**ways, "surprise": surprise}.get(kind, talk)
    try:
        log = mock.patch.object(sbus, "log", LOG.append)
        with log, time_limit(PLAY_SECONDS):
            return json.dumps(way(kind, text, *more))  # type: ignore[operator]
    except TooLong:
        said = f"It took longer than {PLAY_SECONDS:g} seconds, and was stopped"
    except ValueError as error:
        said = str(error)
    except (Exception, SystemExit) as error:
        said = f"It cannot be played: {type(error).__name__}"
    return json.dumps({"said": f"{said}."})
