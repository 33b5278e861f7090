"""Plays examples on sbus.py itself, on a fake kernel.

It runs in a page, in Pyodide, and tells it what each line led to.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import closing, contextmanager
from difflib import unified_diff
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest import mock

if sys.platform == "emscripten":  # what is named at import, and is not there
    sys.modules["resource"] = mock.MagicMock()
    users = {"root": mock.Mock(pw_uid=0)}
    sys.modules["pwd"] = mock.Mock(getpwnam=users.__getitem__)
    vars(socket).setdefault("AF_UNIX", 1)
    ids = {"geteuid": lambda: 0, "getegid": lambda: 0, "getpid": lambda: 4000}
    vars(os).update(ids)

import sbus
from conformance import examples
from conformance.conversation import Failure, Talk, perform
from cut_stage import program
from every_order import report_html
from fake_bus import FakeBus, FakeConnection
from fake_kernel import FakeSelector
from line_trace import LineTrace
from orders import try_orders

Answer = dict[str, Any]  # what a page is told, of all or of a line
Talks = Sequence[examples.Conversation]  # one for each line
WHO = re.compile(r"(?:client=|(by=))(\d+)(?: uid=\d+ pid=\d+)?")
DISCONNECTED = re.compile(r"disconnect (\w+) \[([A-Z]+-\d+)\] (.*)")
LOG: list[str] = []  # of the server, since the line began
ROUNDS_MAX = 50_000  # of the server, in an example
LINE_SECONDS = 0.001  # it tells who has waited longest [BLOCK-16]
PACKETS_MAX, BYTES_MAX = 20_000, 64_000_000  # of an example
TEXT_MAX = 100_000  # its characters
PATTERNS_SHOWN = 12  # of a client, the last
NO_STEPS = examples.Conversation("", (), ())  # all clients hear nothing
ROWS_MAX = 200  # lines that book.js draws, the last
SOURCE = Path(sbus.__file__).read_text("utf-8")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
TIMES = re.compile(r"\*(\d+)\}")
ID_MAX = (1 << 32) - 1  # of a user, a group or a process
SLIPS = {  # lines that are none, and what is said of them
    r"(?!wait|server)[a-z]\w* .*|[A-Z]\w+ (?:[<>]|close|room).*": (
        "a client has one capital letter for its name, A to Z"
    ),
    r"wait (?!\d{1,9}(?:\.\d+)?$).*": "wait takes a number of seconds",
    r"[A-Z] room(?! \d{1,9}$).*": "room takes a number of packets, from 0",
    r"server .*(?<!\S)-[acdfhpr]\b.*": "a server in a page is not a process: "
    "leave that option out",
    r"[A-Z] process .*=(?!\d{1,10}\b).*": "users and processes are numbers, "
    f"up to {ID_MAX}",
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
    """An example has no end in sight; no code that it runs catches this."""


@contextmanager
def work_limit() -> Iterator[None]:
    """Stop the server after so many rounds, on however busy a machine.

    Raises: TooLong
    """
    rounds = count()
    select = FakeSelector.select

    def look(*which: Any) -> Any:
        if next(rounds) > ROUNDS_MAX:
            raise TooLong
        return select(*which)

    with mock.patch.object(FakeSelector, "select", look):
        yield


def check_size(lines: Sequence[str]) -> None:
    """Raise ValueError if the packets of an example are too many or large."""
    packets = size = 0
    for line in lines:
        numbers = RANGE.search(line)
        times = max(1, int(numbers[2]) - int(numbers[1]) + 1) if numbers else 1
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
        ids = re.findall(r"=(\d+)", line) if " process " in line else []
        if any(int(number) > ID_MAX for number in ids):
            raise ValueError(f"Line {number}: no id is above {ID_MAX}")


class WatchedBus(FakeBus):
    """A server whose log is read after each line of a conversation."""

    def __init__(self, talks: Talks) -> None:
        super().__init__([word for talk in talks for word in talk.options])
        self.bus = self.kernel.bus
        vars(self.bus.options).update(verbose=True, trace=None)
        self.bus.journal = sbus.Journal(self.bus.options, "")
        self.names = [""]  # of clients, by their numbers
        self.wires: dict[str, Any] = {}  # by their names
        self.trace = LineTrace(sbus.__file__)
        self.actor = ""

    def connect(self, *which: Any) -> FakeConnection:
        self.names.append(self.actor)
        connection = super().connect(*which)
        self.wires[self.actor] = connection.wire
        return connection

    def play(self, talk: Talk, line: examples.Conversation) -> Answer:
        """Take the steps of a line; return what it led to.

        Raises: Failure if a step fails
        """
        self.kernel.now += LINE_SECONDS
        LOG.clear()
        got = b""
        for step in line.steps:
            self.actor = step.client
            if step.client in self.wires and self.wires[step.client].taken:
                got = self.wires[step.client].taken[0]
            talk.take(step)
        if not self.is_frozen:
            self.kernel.run()
        made = [WHO.sub(self.named, text) for text in LOG]
        led: Answer = {"made": made, "got": examples.escape(got)}
        cut = reason_of(made, line)
        return {**led, "cut": cut} if cut else led

    def named(self, match: re.Match[str]) -> str:
        """Return the client of a line of the log by its name."""
        return (match[1] or "") + self.names[int(match[2])]

    def cards(self) -> list[tuple[str, Answer]]:
        """Return what the server knows of each client, and its table."""
        clients = sorted(self.bus.clients, key=lambda peer: peer.number)
        table: dict[str, str] = {}
        for client in clients:
            for pattern in newest(client.patterns):
                text = examples.escape(pattern)
                known = f"{table.get(text, '→')} {self.names[client.number]}"
                table[text] = known
        cards = [*map(self.card, clients)]
        return [*cards, ("table", table)] if table else cards

    def card(self, client: sbus.Client) -> tuple[str, Answer]:
        """Return the name of a client, and what the server knows of it."""
        patterns = [
            f"{examples.escape(pattern)} × {count}"
            for pattern, count in newest(client.patterns.items())
        ]
        held_by = [self.names[holder.number] for holder in client.held_by]
        facts: Answer = {
            "patterns": ", ".join(patterns),
            "in the kernel": shown_packets(client.wire.taken),
            "backlog": shown_packets(client.backlog.packets.values()),
            "not read yet": shown_packets(client.wire.incoming),
            "paused by": ", ".join(held_by),
            "modes": " ".join(map("/".join, client.modes.items())),
            "uid": client.credentials.uid,
            **{k: n for k, n in client.counts.items() if k not in sbus.USES},
        }
        name = self.names[client.number]
        return name, {label: fact for label, fact in facts.items() if fact}


def newest(items: Collection[Any]) -> Iterator[Any]:
    """Return the last of some items, as many as are shown."""
    return islice(items, max(0, len(items) - PATTERNS_SHOWN), None)


def shown_packets(packets: Iterable[sbus.Packet]) -> list[str]:
    """Return packets as they are shown."""
    return [examples.escape(bytes(packet)) for packet in packets]


def reason_of(made: list[str], talk: examples.Conversation) -> Any:
    """Return the client that was disconnected, and why, in plain words."""
    matches = filter(None, map(DISCONNECTED.search, made))
    for name, rule, reason in (match.groups() for match in matches):
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
    lines = [row if " >" in row else row.strip() for row in text.splitlines()]
    kept = [line for line in lines if line.strip() and line[0] not in "#-"]
    check_size(kept)
    return kept


def talk(kind: str, text: str) -> Answer:
    """Play a conversation.

    In the playground a line that fails is left out, and the others go on.
    Raises: ValueError if a line is no step, or an option is wrong.
    """
    lines = kept_lines(text)
    check_form(lines)
    talks = [talks_of("conversation", line)[0] for line in lines]
    led, said = perform_lines(talks, goes_on=kind == "bench")
    if mark_cut(lines, led):
        del led[len(lines) :]  # that another client heard the end
    lines += said[-1:] * (len(led) - len(lines))  # nothing more is heard
    return {"lines": lines, "led": led, "source": SOURCE}


def perform_lines(talks: Talks, goes_on: bool) -> tuple[list[Answer], Any]:
    """Play lines; return what each led to, and what was said.

    In the playground the others go on after a line that fails.
    Raises: ValueError if an option is wrong
    """
    LOG.clear()
    try:
        bus = WatchedBus(talks)
    except SystemExit:
        raise ValueError("; ".join(LOG)) from None
    led: list[Answer] = []
    with bus.trace, closing(Talk(bus)) as talk:
        for number, line in enumerate(talks):
            try:
                led.append(bus.play(talk, line))
            except Failure as failure:
                led.append({"wrong": str(failure)})
            except (ValueError, KeyError) as error:
                said = f"{error} is unknown, or of another form"
                led.append({"wrong": said})
            if "wrong" in led[-1] and not goes_on:
                return led, []
            if number >= len(talks) - ROWS_MAX:
                led[-1].update(cards=bus.cards(), ran=bus.trace.take())
        if not goes_on:
            try:
                talk.hold(NO_STEPS)
            except Failure as failure:
                led.append({"wrong": str(failure)})
        return led, talk.said


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
        return "{any} is not an answer"
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

    kind = next((s for s in STARTS if answer.upper().startswith(s)), "")
    if kind and f"> {kind}" in hole:
        return f"The line has its {kind.strip()} already: write what follows"
    return ""


def search(kind: str, text: str, name: str) -> Generator[str, None, str]:
    """Yield how far a search of every order is; return its answer as JSON."""
    try:
        if kind == "walk":
            from mistakes import walk

            lines = yield from walk(name)
            return json.dumps({"lines": lines, "led": []})
        if not kept_lines(text):
            raise ValueError("There is no step yet")
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

    kit = ProgramKit(source)
    said, wrong = kit.try_stages(number)
    if not wrong:
        return {"said": said, "lines": [], "led": []}
    lines = [*map(kit.filled, wrong.dialogue)]
    led = [*kit.seen[: len(lines)]]
    led += [{} for _ in lines[len(led) :]]
    led[-1] = {**led[-1], "wrong": wrong.what}
    return {"said": said, "lines": lines, "led": led, "source": source}


def compare(_: str, source: str, number: int) -> Answer:
    """Return how a student's server differs from ours of a stage."""
    ours = program(number).splitlines()
    lines = unified_diff(source.splitlines(), ours, n=3, lineterm="")
    return {"lines": [*lines][2:] or ["They are the same."], "led": []}


def broken(_: str, text: str, name: str) -> Answer:
    """Play a conversation on a server that has a mistake.

    Raises: ValueError if it goes wrong on sbus.py as well
    """
    import mistakes

    right = talk("conversation", text)
    for line, led in zip(right["lines"], right["led"]):
        if wrong := led.get("wrong"):
            raise ValueError(f"sbus.py itself does not do “{line}”: {wrong}")
    source = mistakes.SHOWN[name].spoil(SOURCE)
    with mistakes.server_of(source):
        answer = talk("conversation", text)
    return {**answer, "source": source, "rules": mistakes.SHOWN[name].found_by}


def call(kind: str, text: str, *more: Any) -> str:
    """Do what a page asks for; return the answer as JSON."""
    ways: dict[str, Callable[..., Answer]]
    ways = {"question": check, "match": rows, "packet": rows, "stage": stage}
    ways |= {"surprise": surprise, "broken": broken, "compare": compare}
    way = ways.get(kind, talk)
    try:
        log = mock.patch.object(sbus, "log", LOG.append)
        with log, work_limit():
            return json.dumps(way(kind, text, *more))
    except TooLong:
        said = f"It takes the server more than {ROUNDS_MAX:,} rounds"
    except ValueError as error:
        said = str(error)
    except (Exception, SystemExit) as error:
        said = f"It cannot be played: {type(error).__name__}"
    return json.dumps({"said": f"{said}."})
