#!/usr/bin/env python3
"""conformance: does a server keep the rules of sbus?

The chapters of spec/ hold examples: blocks of patterns and keys, of packets,
and of conversations between clients and a server.  This file reads them and
runs them against any server:

    python3 conformance.py --server './sbusd -f -a {address}'

It needs spec/ beside it, CPython 3.9 or later on Linux, and nothing else.
The server stays in the foreground, listens at the address, serves until
SIGTERM, answers !/cred/whoami, and stays up whatever its clients do.  If it
dies or hangs, that is a finding of the example that caused it, and the kit
starts it anew.  The exit status is 0 if no example failed, 1 if one did, and
2 if none could be run.

    1  The rules
    2  The examples
    3  Conversations
    4  Real servers
    5  The report, the command line

Names: rule, a sentence of spec/ with an id; block, a fenced example; case,
what one block or one of its rows says; step, a line of a conversation;
settle, wait until the server has handled all that a client sent.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Callable, NamedTuple, Protocol, Union

SPEC = Path(__file__).resolve().parent / "spec"
WHOAMI = b"CMSG !/cred/whoami"
END = b""  # no server sends an empty packet, so it stands for the end


# =============================================================================
# 1. The rules
# =============================================================================


class Rule(NamedTuple):
    """A sentence of the specification."""

    id: str
    level: str  # MUST, MUST NOT, SHOULD, SHOULD NOT or MAY
    subject: str  # server or client
    origin: str  # upstream or ours
    file: str
    sentence: str

    @property
    def family(self) -> str:
        """The id without its number."""
        return self.id.partition("-")[0]


RULE = re.compile(
    r"^\*\*\[([A-Z]+-\d+)\]\*\* (.+?)(?=\n\n|\n*\Z)", re.M | re.S
)
SENTENCE = re.compile(
    r"A (server|client) .*?\b(MUST NOT|MUST|SHOULD NOT|SHOULD|MAY)\b"
    r".+ \((upstream|ours)\)"
)


def chapters() -> list[Path]:
    """Return the files of the specification, in order."""
    return sorted(SPEC.glob("[1-9]-*.md"))


def read_rules() -> dict[str, Rule]:
    """Return the rules of all chapters by their ids.

    Raises: ValueError if a rule is not one sentence of the usual form.
    """
    rules: dict[str, Rule] = {}
    for chapter in chapters():
        for found in RULE.finditer(chapter.read_text("utf-8")):
            name, sentence = found[1], " ".join(found[2].split())
            parts = SENTENCE.fullmatch(sentence)
            if not parts or name in rules:
                raise ValueError(f"{chapter.name}: [{name}] {sentence}")
            subject, level, origin = parts.groups()
            rules[name] = Rule(
                name, level, subject, origin, chapter.name, sentence
            )
    return rules


# =============================================================================
# 2. The examples
#
# A text is a bare word or "..." and has the escapes \0 \n \\ \" \xHH, the
# bulk {x*409000}, and the variables {B.gid}, {B.uid}, {B.pid} and {any},
# which stands for any bytes.  In a match row {byte} makes a case of each
# byte from 01 to ff but '*'; in a conversation {1..32} makes a step of each
# number.  A line that begins with # is a comment.
# =============================================================================


class Part(NamedTuple):
    """A piece of a text: bytes, so many times, or a variable."""

    text: bytes
    times: int = 1
    variable: str = ""


Text = tuple[Part, ...]
PIECE = re.compile(
    r'\\x([0-9a-f]{2})|\\([0n\\"])|\{([^{}]+)\}|([^\\{}])', re.S
)
ESCAPED = {"0": b"\0", "n": b"\n", "\\": b"\\", '"': b'"'}
FIELD = re.compile(r'((?:\w+=)?"(?:\\.|[^"\\])*"|\S+)\s*')


def parse_text(source: str) -> Text:
    """Return the parts of a text.

    Raises: ValueError if it is none.
    """
    if source.startswith('"') and source.endswith('"') and len(source) > 1:
        source = source[1:-1]
    parts: list[Part] = []
    place = 0
    while place < len(source):
        piece = PIECE.match(source, place)
        if not piece:
            raise ValueError(f"not a text: {source!r}")
        parts.append(parse_piece(piece))
        place = piece.end()
    return join_plain(parts)


def parse_piece(piece: re.Match[str]) -> Part:
    """Return one part of a text."""
    code, escaped, braced, plain = piece.groups()
    if code:
        return Part(bytes.fromhex(code))
    if escaped:
        return Part(ESCAPED[escaped])
    if plain:
        return Part(plain.encode("utf-8"))
    bulk, star, times = braced.rpartition("*")
    if star:
        return Part(bulk.encode("utf-8"), int(times))
    if not re.fullmatch(r"any|\w+\.(gid|uid|pid)", braced):
        raise ValueError(f"not a variable: {braced!r}")
    return Part(b"", 1, braced)


def join_plain(parts: Iterable[Part]) -> Text:
    """Return the same parts, neighbours that are plain bytes joined."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        plain = not part.variable and part.times == 1
        if plain and before and not before.variable and before.times == 1:
            joined[-1] = Part(before.text + part.text)
        else:
            joined.append(part)
    return tuple(joined)


def parse_bytes(source: str) -> bytes:
    """Return the bytes of a text without variables."""
    parts = parse_text(source)
    assert not any(part.variable for part in parts), source
    return b"".join(part.text * part.times for part in parts)


class Step(NamedTuple):
    """One line of a conversation."""

    client: str  # empty for a step of no client
    verb: str
    argument: str
    text: Text = ()  # the argument of '>', '>>' and '<'

    def __str__(self) -> str:
        return " ".join(filter(None, self[:3]))


class Conversation(NamedTuple):
    """What clients and a server say to each other."""

    name: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...]
    options: tuple[str, ...] = ()  # of the server

    def conversation(self) -> Conversation:
        """Return what shows the rules."""
        return self


class MatchCase(NamedTuple):
    """A pattern, a key, and whether the one selects the other."""

    name: str
    rules: tuple[str, ...]
    pattern: bytes
    key: bytes
    selected: bool

    def conversation(self) -> Conversation:
        """Return what shows the rules: A subscribes, and B publishes."""
        message = b"MSG " + self.key + b"\0"
        steps = [send("A", b"SUB " + self.pattern), send("B", message)]
        if self.selected:
            steps.append(hear("A", message))
        return Conversation(self.name, self.rules, tuple(steps))


class PacketCase(NamedTuple):
    """A packet, its kind or 'invalid', its key or pattern, its payload."""

    name: str
    rules: tuple[str, ...]
    packet: bytes
    packet_kind: str
    key: bytes
    payload: bytes

    def conversation(self) -> Conversation:
        """Return what shows the rules: A sends it, and B helps."""
        message = b"MSG " + self.key + b"\0probe"
        sent, probe = send("A", self.packet), send("B", message)
        listen = send("B", b"SUB ")
        steps = {
            "subscribe": [sent, probe, hear("A", message)],
            "unsubscribe": [send("A", b"SUB " + self.key), sent, probe],
            "publish": [listen, sent, hear("B", self.packet)],
            "control": [listen, sent, Step("A", "<", "no packet")],
            "invalid": [listen, sent, Step("A", "<", "end")],
        }[self.packet_kind]
        return Conversation(self.name, self.rules, tuple(steps))


Case = Union[MatchCase, PacketCase, Conversation]


def escape(text: bytes) -> str:
    """Return bytes as they would stand in a block, cut if they are many."""
    shown = text[:200].decode("latin-1")
    shown = shown.encode("unicode_escape").decode("ascii")
    shown = shown.replace("\\x00", "\\0")
    if shown != shown.strip() or not shown:
        shown = f'"{shown}"'
    return shown + (f"... ({len(text)} bytes)" if len(text) > 200 else "")


def send(client: str, packet: bytes) -> Step:
    """Return the step in which a client sends a packet."""
    return Step(client, ">", escape(packet), (Part(packet),))


def hear(client: str, packet: bytes) -> Step:
    """Return the step in which a client receives a packet."""
    return Step(client, "<", escape(packet), (Part(packet),))


class Block(NamedTuple):
    """A fenced example of a chapter."""

    kind: str
    name: str
    rules: tuple[str, ...]
    lines: tuple[str, ...]
    file: str


FENCE = re.compile(
    r"^```(match|packet|conversation)\b([^\n]*)\n(.*?)^```$", re.M | re.S
)
HEAD = re.compile(r" ([a-z0-9-]+)((?: \[[A-Z]+-\d+\])+)")
CITED = re.compile(r"\[([A-Z]+-\d+)\]")


def read_blocks() -> Iterator[Block]:
    """Return the examples of all chapters.

    Raises: ValueError if the first line of one is malformed.
    """
    for chapter in chapters():
        for found in FENCE.finditer(chapter.read_text("utf-8")):
            kind, head, body = found.groups()
            parts = HEAD.fullmatch(head)
            if not parts:
                raise ValueError(f"{chapter.name}: ```{kind}{head}")
            lines = (line for line in body.splitlines() if line.strip())
            kept = tuple(line for line in lines if line[0] != "#")
            rules = tuple(CITED.findall(parts[2]))
            yield Block(kind, parts[1], rules, kept, chapter.name)


def read_cases() -> list[Case]:
    """Return what all examples say.

    Raises: ValueError if one is malformed, or has another's name.
    """
    cases: list[Case] = []
    for block in read_blocks():
        try:
            cases += PARSERS[block.kind](block)
        except (ValueError, KeyError, AssertionError) as error:
            message = f"{block.file}: {block.name}: {error}"
            raise ValueError(message) from error
    names = [case.name for case in cases]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"names that are used twice: {sorted(twice)}")
    return cases


def match_cases(block: Block) -> Iterator[MatchCase]:
    """Return the cases of a match block: pattern, key, yes or no."""
    for row, line in enumerate(block.lines, 1):
        for suffix, plain in each_byte(line):
            pattern, key, answer = FIELD.findall(plain)
            selected = {"yes": True, "no": False}[answer]
            yield MatchCase(
                f"{block.name}/{row}{suffix}",
                block.rules,
                parse_bytes(pattern),
                parse_bytes(key),
                selected,
            )


def each_byte(line: str) -> Iterator[tuple[str, str]]:
    """Return a line once for each byte if it asks for that, and names."""
    if "{byte}" not in line:
        yield "", line
        return
    for byte in sorted(set(range(1, 256)) - set(b"*")):
        yield f"/{byte:02x}", line.replace("{byte}", f"\\x{byte:02x}")


def packet_cases(block: Block) -> Iterator[PacketCase]:
    """Return the cases of a packet block.

    A row has a packet, its kind, and key=... and payload=..., or the rule
    that it breaks.
    """
    for row, line in enumerate(block.lines, 1):
        packet, kind, *more = FIELD.findall(line)
        rules = tuple(CITED.findall(" ".join(more))) or block.rules
        fields = dict(text.split("=", 1) for text in more if "=" in text)
        yield PacketCase(
            f"{block.name}/{row}",
            rules,
            parse_bytes(packet),
            kind,
            parse_bytes(fields.get("key", "")),
            parse_bytes(fields.get("payload", "")),
        )


EXPECTATIONS = ("nothing", "end", "no packet")  # or a packet
STEP = re.compile(
    r"(?P<client>[A-Z]) (?P<verb>>>?|<|close|shut|deaf|process|room)"
    r"(?: (?P<argument>.+))?|(?P<other>server|wait) (?P<value>.+)"
)


def conversations(block: Block) -> Iterator[Conversation]:
    """Return the one case of a conversation block."""
    lines = (plain for line in block.lines for plain in each_number(line))
    steps = [parse_step(line) for line in lines]
    options = [
        option
        for step in steps
        if step.verb == "server"
        for option in step.argument.split()
    ]
    spoken = tuple(step for step in steps if step.verb != "server")
    yield Conversation(block.name, block.rules, spoken, tuple(options))


def each_number(line: str) -> Iterator[str]:
    """Return a line once for each number if it asks for that."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", line)
    if not numbers:
        yield line
        return
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        yield line.replace(numbers[0], str(number))


def parse_step(line: str) -> Step:
    """Return the step that a line stands for.

    Raises: ValueError if it stands for none.
    """
    found = STEP.fullmatch(line)
    if not found:
        raise ValueError(f"not a step: {line!r}")
    if found["other"]:
        return Step("", found["other"], found["value"])
    verb, argument = found["verb"], found["argument"] or ""
    if not argument and verb in (">", ">>", "<", "room"):
        raise ValueError(f"not a step: {line!r}")
    is_text = verb in (">", ">>", "<") and argument not in EXPECTATIONS
    text = parse_text(argument) if is_text else ()
    return Step(found["client"], verb, argument, text)


PARSERS: dict[str, Callable[[Block], Iterator[Case]]] = {
    "match": match_cases,
    "packet": packet_cases,
    "conversation": conversations,
}


# =============================================================================
# 3. Conversations
#
# - A client connects at its first step, and reads at '<' alone.
# - When the turn passes from X to another client, X is settled: what it sent
#   has been handled.  '>>' sends without that.
# - A conversation is complete.  Whatever a client receives, or has waiting
#   at the end, and the conversation does not say, is a failure.
# =============================================================================


class Failure(Exception):
    """A server did not do what an example says."""


class Connection(Protocol):
    """A client of the server that is under test."""

    gid: int
    uid: int
    pid: int

    def send(self, packet: bytes) -> None:
        """Send a packet."""

    def settle(self) -> None:
        """Return once the server has handled all that was sent."""

    def receive(self) -> bytes:
        """Return the next packet, or END."""

    def pending(self) -> bytes | None:
        """Return what a settled client has received and not read, if any."""

    def shut(self) -> None:
        """Say that nothing more will be sent."""

    def deafen(self) -> None:
        """Say that nothing more will be received."""

    def close(self) -> None:
        """Close the connection."""

    def set_room(self, count: int) -> None:
        """Let so many packets wait for the client; the kernel refuses more."""


class Bus(Protocol):
    """The server that is under test."""

    def connect(
        self, is_process: bool, credentials: dict[str, int]
    ) -> Connection:
        """Return a new client, in a process of its own if so asked."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""

    def fault(self) -> str:
        """Return what is wrong with the server if it serves no more."""


def perform(bus: Bus, conversation: Conversation) -> tuple[str, list[str]]:
    """Hold a conversation; return what went wrong, and what was said."""
    talk = Talk(bus)
    try:
        with contextlib.closing(talk):
            talk.hold(conversation)
        talk.said.append("(the clients close)")
        wrong = ""
    except Failure as failure:
        wrong = str(failure)
    fault = bus.fault()
    return "; ".join(filter(None, (wrong, fault))), talk.said


class Talk:
    """A conversation as it goes on."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.said: list[str] = []
        self.clients: dict[str, Connection] = {}
        self.unsettled: Connection | None = None

    def hold(self, conversation: Conversation) -> None:
        """Take all steps; raise Failure at one that fails."""
        for step in conversation.steps:
            self.said.append(str(step))
            self.take(step)
        for name in list(self.clients):
            self.said.append(f"{name} < nothing")
            self.expect_nothing(name)

    def take(self, step: Step) -> None:
        """Take one step."""
        if step.verb == "wait":
            self.settle()
            return self.bus.wait(float(step.argument))
        client = self.clients.get(step.client)
        if client is None or client is not self.unsettled:
            self.settle()
        if client is None:
            client = self.connect(step)
        if step.verb in (">", ">>"):
            self.send(client, step)
        elif step.verb == "<":
            self.expect(client, step)
        elif step.verb == "close":
            self.settle()
            self.drop(step.client)
        elif step.verb == "shut":
            client.shut()
        elif step.verb == "deaf":
            client.deafen()
        elif step.verb == "room":
            client.set_room(int(step.argument))

    def connect(self, step: Step) -> Connection:
        """Connect a client at its first step."""
        is_process = step.verb == "process"
        fields = step.argument.split() if is_process else []
        numbers = dict(field.split("=") for field in fields)
        credentials = {name: int(text) for name, text in numbers.items()}
        client = self.bus.connect(is_process, credentials)
        self.clients[step.client] = client
        return client

    def settle(self) -> None:
        """Settle the client whose turn is over."""
        client, self.unsettled = self.unsettled, None
        if client:
            client.settle()

    def send(self, client: Connection, step: Step) -> None:
        """Send a packet."""
        client.send(b"".join(map(self.fill, step.text)))
        if step.verb == ">":
            self.unsettled = client

    def fill(self, part: Part) -> bytes:
        """Return the bytes of a part; 'B.pid' is a client's number."""
        if not part.variable:
            return part.text * part.times
        name, _, field = part.variable.partition(".")
        return b"%d" % getattr(self.clients[name], field)

    def expect(self, client: Connection, step: Step) -> None:
        """Compare what a client receives with what the example says."""
        if step.argument in ("nothing", "no packet"):
            may_end = step.argument == "no packet"
            return self.expect_nothing(step.client, may_end)
        got = client.receive()
        if step.argument == "end":
            self.unsettled = None  # or it was settled before
            self.drop(step.client)
            matches = got == END
        else:
            matches = self.matches(step.text, got)
        if not matches:
            raise Failure(f"received {describe(got)}")

    def matches(self, text: Text, got: bytes) -> bool:
        """Return whether a packet is what a text says."""
        pieces = [b""]  # between one {any} and the next
        for part in text:
            if part.variable == "any":
                pieces.append(b"")
            else:
                pieces[-1] += self.fill(part)
        if len(pieces) == 1:
            return got == pieces[0]
        expression = b".*".join(map(re.escape, pieces))
        return bool(re.fullmatch(expression, got, re.S))

    def expect_nothing(self, name: str, may_end: bool = False) -> None:
        """Raise Failure if a client has received a packet, or the end."""
        client = self.clients[name]
        self.settle()
        client.settle()
        got = client.pending()
        if got == END and may_end:
            self.drop(name)
        elif got is not None:
            raise Failure(f"received {describe(got)}")

    def drop(self, name: str) -> None:
        """Close a client."""
        self.clients.pop(name).close()

    def close(self) -> None:
        """Close what is open."""
        for client in self.clients.values():
            client.close()


def describe(got: bytes) -> str:
    """Return what was received, for a report."""
    return escape(got) if got != END else "the end: the server has closed"


# =============================================================================
# 4. Real servers
#
# The kernel of a real server cannot be told how many packets to take for a
# client, nor the clock to go on.  A client is settled when a question of its
# own, !/cred/whoami, is answered [CRED-3].
# =============================================================================

SEND_BUFFER_BYTES = 1 << 19
READ_BYTES_MAX = 1 << 20
UNREAD_PACKETS_MAX = 10_000  # no example leaves nearly as many to a client
START_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 1 << 26  # a server that writes more is killed


class Wire:
    """A client of a real server."""

    def __init__(self, wire: socket.socket, gid: int, uid: int, pid: int):
        self.wire = wire
        self.gid, self.uid, self.pid = gid, uid, pid
        self._inbox: deque[bytes] = deque()  # read on the way to an answer
        self._unanswered = 0
        self._is_deaf = False

    def send(self, packet: bytes) -> None:
        """Send a packet."""
        self._unanswered += packet.partition(b"\0")[0] == WHOAMI
        try:
            self.wire.send(packet)
        except BlockingIOError:
            raise Failure("the server does not read in time") from None
        except OSError as error:
            raise Failure(f"cannot send: {error.strerror}") from None

    def settle(self) -> None:
        """Ask, and read up to the answer; it answers all that came before."""
        if self._is_deaf or END in self._inbox:
            return
        with contextlib.suppress(Failure):  # closed: the end is to be read
            self.send(WHOAMI)
        while self._unanswered:
            try:
                packet = self._read()
            except Failure:
                raise Failure(
                    "!/cred/whoami is not answered in time"
                ) from None
            if self._unanswered or packet == END:
                self._inbox.append(packet)
            if packet == END:
                return
            if len(self._inbox) > UNREAD_PACKETS_MAX:
                raise Failure(f"receives {describe(packet)} without end")

    def receive(self) -> bytes:
        """Return the next packet, or END."""
        return self._inbox.popleft() if self._inbox else self._read()

    def _read(self) -> bytes:
        """Read the next packet."""
        for _ in range(2):
            try:
                packet = self.wire.recv(READ_BYTES_MAX)
            except ConnectionResetError:
                continue  # [CONN-14] what was sent comes after it
            except BlockingIOError:
                raise Failure("received nothing in time") from None
            except OSError as error:
                raise Failure(f"cannot receive: {error.strerror}") from None
            self._unanswered -= packet.startswith(WHOAMI + b"\0")
            return packet
        return END

    def pending(self) -> bytes | None:
        """Return what a settled client has received and not read, if any."""
        return self._inbox[0] if self._inbox else None

    def shut(self) -> None:
        """Say that nothing more will be sent."""
        self.wire.shutdown(socket.SHUT_WR)

    def deafen(self) -> None:
        """Say that nothing more will be received."""
        self.wire.shutdown(socket.SHUT_RD)
        self._is_deaf = True

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def set_room(self, count: int) -> None:
        raise NotImplementedError


def connect_socket(path: str, seconds_max: float) -> socket.socket:
    """Return a socket that is connected to a server."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole, part = divmod(seconds_max, 1)
    timeout = struct.pack("ll", int(whole), int(part * 1e6))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        wire.connect(path)
    except OSError:
        wire.close()
        raise
    return wire


def connect_in_child(
    path: str, seconds_max: float, gid: int, uid: int
) -> Wire:
    """Return a client that another process connected.

    It has that process's credentials, although the process has ended.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            hand_over(theirs, path, seconds_max, gid, uid)
        os.waitpid(child, 0)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise ConnectionError(0, f"user {uid} cannot")
    return Wire(socket.socket(fileno=descriptors[0]), gid, uid, child)


def hand_over(
    to: socket.socket, path: str, seconds_max: float, gid: int, uid: int
) -> None:
    """Become another user, connect, pass the socket on, and exit."""
    try:
        if (gid, uid) != (os.getegid(), os.geteuid()):
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        wire = connect_socket(path, seconds_max)
        socket.send_fds(to, [b"x"], [wire.fileno()])
    finally:
        os._exit(0)


class ServerProcess:
    """A server that a command starts, as often as it takes."""

    def __init__(self, command: str, seconds_max: float) -> None:
        self._words = shlex.split(command)
        self.seconds_max = seconds_max
        self.start_seconds_max = START_SECONDS_MAX
        self._directory = tempfile.TemporaryDirectory(prefix="sbus-")
        os.chmod(self._directory.name, 0o755)  # for other users
        self._count = 0
        self._path = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, options: Sequence[str] = ()) -> None:
        """Start a server, after the end of any other.

        Raises: Failure if it does not serve.
        """
        self.stop()
        self._count += 1
        self._path = f"{self._directory.name}/{self._count}"
        words = [word.replace("{address}", self._path) for word in self._words]
        with open(self._path + ".log", "wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*words, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failure(f"cannot run {words[0]}: {error}") from None
        with contextlib.suppress(OSError):  # it may have ended
            limits = (LOG_BYTES_MAX, LOG_BYTES_MAX)
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, limits)
        self._await(time.monotonic() + self.start_seconds_max)

    def _await(self, end: float) -> None:
        """Return once the server serves."""
        assert self._process
        what = ""
        while time.monotonic() < end and self._process.poll() is None:
            try:
                return self._probe()
            except Failure as failure:
                what = f"does not serve: {failure}"
            time.sleep(0.005)  # no event tells of a foreign server
        raise Failure(f"the server {self._end() or what}{self.log()}")

    def connect(self, is_process: bool, credentials: dict[str, int]) -> Wire:
        """Return a new client, in a process of its own if so asked."""
        gid = credentials.get("gid", os.getegid())
        uid = credentials.get("uid", os.geteuid())
        try:
            if is_process:
                return connect_in_child(self._path, self.seconds_max, gid, uid)
            wire = connect_socket(self._path, self.seconds_max)
        except OSError as error:
            raise Failure(f"cannot connect: {error.strerror}") from None
        return Wire(wire, gid, uid, os.getpid())

    def wait(self, seconds: float) -> None:
        raise NotImplementedError

    def fault(self) -> str:
        """Return what is wrong with the server if it serves no more."""
        assert self._process
        try:
            self._probe()
        except Failure as failure:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            what = self._end() or f"does not serve a new client: {failure}"
            return f"the server {what}{self.log()}"
        return ""

    def _probe(self) -> None:
        """Connect until a client has had two answers.

        The first may come before the departure of others is handled, and
        a client more may be too many until then.
        Raises: Failure if none has.
        """
        for _ in range(5):
            with contextlib.closing(self.connect(False, {})) as client:
                client.settle()
                client.settle()
                if client.pending() is None:
                    return
        raise Failure("it closes each connection")

    def _end(self) -> str:
        """Return how the server ended, if it did."""
        assert self._process
        status = self._process.poll()
        if status is not None and status < 0:
            return f"was killed: {signal.strsignal(-status) or -status}"
        return "" if status is None else f"ended with status {status}"

    def log(self) -> str:
        """Return the last lines that the server wrote, made printable."""
        with open(self._path + ".log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            lines = file.read().splitlines()[-5:]
        return ": " + " / ".join(map(escape, lines)) if lines else ""

    def stop(self) -> None:
        """Stop the server and all that it started, and forget its log."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.seconds_max)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.unlink(self._path + ".log")
        self._process = None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()


# =============================================================================
# 5. The report, the command line
# =============================================================================


class Result(NamedTuple):
    """How one case ended."""

    case: str
    rules: tuple[str, ...]
    verdict: str  # passed, failed, or not applicable
    what: str = ""  # went wrong, or why it is not applicable
    dialogue: tuple[str, ...] = ()  # up to the step that failed


def origin_of(case: Case, rules: dict[str, Rule]) -> str:
    """Return whether upstream's rules alone ask for what a case shows."""
    ours = any(rules[rule].origin == "ours" for rule in case.rules)
    return "ours" if ours else "upstream"


def level_of(case: Case, rules: dict[str, Rule]) -> str:
    """Return must, should, or choice: the weakest level of a case's rules."""
    levels = {rules[rule].level for rule in case.rules}
    if "MAY" in levels:
        return "choice"
    return "should" if levels & {"SHOULD", "SHOULD NOT"} else "must"


OBSTACLES = {
    "room": "needs a kernel whose buffers can be set",
    "clock": "needs a clock that can be set",
    "unknown-process": "needs a kernel that does not know a process",
    "root": "needs to be run by root",
}


def obstacle_kinds(conversation: Conversation) -> list[str]:
    """Return what a conversation needs that not every kit has."""
    kinds = set()
    for step in conversation.steps:
        if step.verb == "room":
            kinds.add("room")
        elif step.verb == "wait":
            kinds.add("clock")
        elif "pid=" in step.argument and step.verb == "process":
            kinds.add("unknown-process")
        elif "id=" in step.argument and step.verb == "process":
            kinds.add("root")
    return [kind for kind in OBSTACLES if kind in kinds]


def obstacle(conversation: Conversation) -> str:
    """Return why a conversation cannot be held with a real server, if so."""
    for kind in obstacle_kinds(conversation):
        if kind != "root" or os.geteuid() != 0:
            return OBSTACLES[kind]
    return ""


ANSWERS_MAX = 10  # so many times the longest, for the failures of a block


class Kit:
    """Runs cases against a server process."""

    def __init__(
        self, server: ServerProcess, ours: bool, choices: bool
    ) -> None:
        self.server = server
        self.ours = ours
        self.choices = choices
        self.rules = read_rules()
        self._options: tuple[str, ...] | None = None  # of the running server
        self._refused: dict[tuple[str, ...], str] = {}  # options, and why
        # How many seconds the failures of each block have taken
        self._slow: dict[str, float] = defaultdict(float)

    def run(self, cases: Iterable[Case]) -> list[Result]:
        """Run cases; return results in the same order.

        Those that need the same options are run by one server.
        """
        cases = list(cases)
        results = {
            case.name: self.judge(case)
            for case in sorted(cases, key=lambda one: options_of(one))
        }
        return [results[case.name] for case in cases]

    def judge(self, case: Case) -> Result:
        """Run one case."""
        conversation = case.conversation()
        why = self.left_out(case) or obstacle(conversation)
        why = why or self.prepare(conversation.options)
        if why:
            return Result(case.name, case.rules, "not applicable", why)
        start = time.monotonic()
        wrong, said = perform(self.server, conversation)
        if not wrong:
            return Result(case.name, case.rules, "passed")
        self._options = None  # a server that went wrong is not used again
        self._slow[block_of(case)] += time.monotonic() - start
        return Result(case.name, case.rules, "failed", wrong, tuple(said))

    def left_out(self, case: Case) -> str:
        """Return why a case was not asked for, if so."""
        if not self.ours and origin_of(case, self.rules) == "ours":
            return "not asked for by the original protocol; see --ours"
        if not self.ours and options_of(case):
            return "needs an option of the reference server; see --ours"
        if not self.choices and level_of(case, self.rules) == "choice":
            return "a server may choose; see --choices"
        if self._slow[block_of(case)] > ANSWERS_MAX * self.server.seconds_max:
            return "too many like it were not answered in time"
        return ""

    def prepare(self, options: tuple[str, ...]) -> str:
        """Have a server run; return why it does not, if so."""
        why = self._refused.get(()) or self._refused.get(options, "")
        if why or options == self._options:
            return why
        self._options = None
        try:
            self.server.start(options)
        except Failure as failure:
            head = f"with {' '.join(options)}: " if options else ""
            self._refused[options] = f"{head}{failure}"
            return self._refused[options]
        self._options = options
        return ""


def block_of(case: Case) -> str:
    """Return the name of the block that a case is of."""
    return case.name.partition("/")[0]


def options_of(case: Case) -> tuple[str, ...]:
    """Return the options of the server that a case needs."""
    return case.conversation().options


def results_by_rule(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results that are about each rule."""
    by_rule: dict[str, list[Result]] = {rule: [] for rule in read_rules()}
    for result in results:
        for rule in result.rules:
            by_rule[rule].append(result)
    return by_rule


def verdicts(results: Iterable[Result]) -> dict[str, str]:
    """Return the verdict on each rule: failed if any example of it did."""
    shown = {rule for case in read_cases() for rule in case.rules}
    by_rule = {}
    for rule, about in results_by_rule(results).items():
        found = {result.verdict for result in about}
        order = ("failed", "passed", "not applicable")
        otherwise = "not run" if rule in shown else "no example"
        by_rule[rule] = next((one for one in order if one in found), otherwise)
    return by_rule


def count(results: Iterable[Result], verdict: str) -> int:
    """Return how many results have a verdict."""
    return sum(result.verdict == verdict for result in results)


def tell(results: Sequence[Result]) -> str:
    """Return how many passed, of those that were run."""
    passed, failed = count(results, "passed"), count(results, "failed")
    run = passed + failed
    return f"{passed}/{run} passed" if run else "none was run"


def summary(results: Sequence[Result]) -> str:
    """Return one line on all results."""
    return ", ".join(
        f"{count(results, verdict)} {verdict}"
        for verdict in ("passed", "failed", "not applicable")
    )


def edition() -> str:
    """Return what changes when a chapter of the specification does."""
    text = b"".join(chapter.read_bytes() for chapter in chapters())
    return hashlib.sha256(text).hexdigest()[:8]


def text_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for a terminal: a line a family, then failures.

    Of the failures that are about one rule the first few are shown.
    """
    lines = [f"sbus conformance of {command}, specification {edition()}", ""]
    families: dict[str, list[Result]] = {}
    for rule, about in results_by_rule(results).items():
        families.setdefault(rule.partition("-")[0], []).extend(about)
    for family, about in families.items():
        once = list({result.case: result for result in about}.values())
        if once:
            lines.append(f"{family:6} {tell(once):>16}")
    rules = read_rules()
    for name, failed in failures_by_rule(results).items():
        lines += ["", f"FAILED [{name}] {rules[name].sentence}"]
        for result in failed[:FAILURES_SHOWN_MAX]:
            lines += ["", *failure_lines(result)]
        more = [result.case for result in failed[FAILURES_SHOWN_MAX:]]
        if more:
            lines += ["", f"  failed, too, {len(more)}: {', '.join(more)}"]
    for why, names in reasons(results).items():
        lines += ["", f"not applicable, {len(names)}: {why}"]
    return "\n".join([*lines, "", summary(results)])


FAILURES_SHOWN_MAX = 3
STEPS_SHOWN_MAX = 30


def failures_by_rule(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the failures by the rule that each is about first of all."""
    by_rule: dict[str, list[Result]] = {}
    for result in results:
        if result.verdict == "failed":
            by_rule.setdefault(result.rules[0], []).append(result)
    return by_rule


def failure_lines(result: Result) -> list[str]:
    """Return a failure: the rules, the conversation, what went wrong."""
    ids = " ".join(f"[{rule}]" for rule in result.rules)
    said = [f"    {step}" for step in result.dialogue]
    where = f"  {result.case} {ids}, step {len(said)}:"
    if len(said) > STEPS_SHOWN_MAX:
        said = ["    ...", *said[-STEPS_SHOWN_MAX:]]
    return [where, *said, f"    -> {result.what}"]


def reasons(results: Iterable[Result]) -> dict[str, list[str]]:
    """Return the cases that are not applicable, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "not applicable":
            by_reason.setdefault(result.what, []).append(result.case)
    return by_reason


def markdown_report(command: str, results: Sequence[Result]) -> str:
    """Return a report that can be published as it is."""
    today = time.strftime("%Y-%m-%d")
    lines = [
        "# sbus conformance report",
        "",
        f"Server: `{command}`. Date: {today}. Specification: {edition()}.",
        f"Examples: {summary(results)}.",
        "",
        "A rule failed if any example of it did. Examples are in `spec/` of",
        "the reference implementation, under the rules that they show; where",
        "there is no example, clients cannot see whether a rule is kept.",
        "",
        "| Rule | Level | Origin | Verdict | Examples | Says |",
        "|---|---|---|---|---|---|",
    ]
    rules, verdict = read_rules(), verdicts(results)
    for name, about in results_by_rule(results).items():
        rule = rules[name]
        says = rule.sentence.rpartition(" (")[0].replace("|", "\\|")
        cells = (name, rule.level, rule.origin, verdict[name])
        lines.append(f"| {' | '.join(cells)} | {tell(about)} | {says} |")
    for name, failed in failures_by_rule(results).items():
        lines += ["", f"## Failures of {name}"]
        for result in failed:
            code = (f"    {line}" for line in failure_lines(result))
            lines += ["", *code]
    lines += ["", "## Not applicable", ""]
    for why, names in reasons(results).items():
        lines.append(f"- {why}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def json_report(command: str, results: Sequence[Result]) -> str:
    """Return the report for programs."""
    report = {
        "server": command,
        "specification": edition(),
        "rules": verdicts(results),
        "results": [result._asdict() for result in results],
    }
    return json.dumps(report, indent=1)


REPORTS = {
    "text": text_report,
    "json": json_report,
    "markdown": markdown_report,
}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="conformance.py",
        description="Run the examples of spec/ against a server.",
    )
    add = parser.add_argument
    what = "command; {address} in it stands for the path to listen at"
    add("--server", required=True, metavar="COMMAND", help=what)
    what = "run the rules, too, that are not in the original protocol text"
    add("--ours", action="store_true", help=what)
    what = "run what a server may choose, too"
    add("--choices", action="store_true", help=what)
    what = "run only the examples of this rule or family, or so named"
    add("--only", action="append", default=[], metavar="NAME", help=what)
    what = "how long a server may take for an answer (default 2)"
    add("--seconds", type=seconds, default=2.0, metavar="N", help=what)
    for kind in ("json", "markdown"):
        what = f"print the report as {kind}"
        add(
            f"--{kind}",
            dest="report",
            action="store_const",
            const=kind,
            default="text",
            help=what,
        )
    options = parser.parse_args(arguments)
    try:
        words = shlex.split(options.server)
    except ValueError as error:
        parser.error(f"the command: {error}")
    if not any("{address}" in word for word in words):
        parser.error("the command has no {address}")
    options.only = {name.strip("[]") for name in options.only}
    return options


def seconds(text: str) -> float:
    """Return a time; raise ValueError if it is none that can be waited."""
    if not 0.001 <= float(text) <= 86_400:
        raise ValueError
    return float(text)


def names_of(case: Case) -> set[str]:
    """Return the names by which a case can be asked for."""
    families = {rule.partition("-")[0] for rule in case.rules}
    return {case.name, block_of(case), *case.rules, *families}


def choose(only: set[str]) -> list[Case]:
    """Return the cases that are asked for, all if none is named.

    Raises: Failure if there are no examples, or none with one of the names.
    """
    cases = read_cases()
    if not cases:
        raise Failure(f"there are no examples in {SPEC}")
    unknown = only - {name for case in cases for name in names_of(case)}
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
    return [case for case in cases if not only or names_of(case) & only]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed, 1 if something did, or 2."""
    options = parse_options(arguments)
    with ServerProcess(options.server, options.seconds) as server:
        try:
            cases = choose(options.only)
            server.start()
        except (Failure, OSError) as error:
            print(f"conformance.py: {error}", file=sys.stderr)
            return 2
        results = Kit(server, options.ours, options.choices).run(cases)
    try:
        print(REPORTS[options.report](options.server, results), flush=True)
    except BrokenPipeError:  # whoever reads it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if count(results, "failed") else 0


if __name__ == "__main__":
    sys.exit(main())
