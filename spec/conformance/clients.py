"""Clients: their commands and answers, while the kit is their server.

A client is a process.  A command to it, and its answer, is a word, a key and a
payload, parted by single spaces.  The two are hexadecimal digits, two for each
byte, or '-' if they are empty.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from .conversation import END, WHOAMI, Failure, describe
from .examples import (
    FIELD,
    Block,
    each_number,
    escape,
    parse_bytes,
    read_blocks,
)
from .kit import NO_TIME, SIGNAL, Result, received
from .server import Program
from .trial import NotApplicable
from .wire import READ_BYTES_MAX, SEND_BUFFER_BYTES

COMMANDS = {"receive": 0, "whoami": 0, "close": 0, "subscribe": 1, "reply": 1}
COMMANDS |= {"unsubscribe": 1, "publish": 2, "request": 2}
ANSWERS = {"ok": 0, "message": 2, "control": 2, "credentials": 1, "closed": 0}
ANSWERS |= {"answer": 1, "unknown": 0}
# What 'ok' means as the answer to a question; else it means 'ok'
MEANINGS = {"receive": "message", "whoami": "credentials", "request": "answer"}
LINE_BYTES_MAX = 1 << 22
CREDENTIALS = b"!/cred/1/2/3"  # of a client that asks unexpectedly
REPLY = CREDENTIALS + b"/reply%d"  # so examples name the keys for answers
# Its subscriptions to, and requests with, keys for answers
OWN = rb"(SUB |MSG [^\0]*\0(?=!(?:/\w+){6}\0))(%b/[^\0]*)" % CREDENTIALS
UNSAID = (b"CMSG ", b"SUB %b/" % CREDENTIALS, b"UNSUB %b/" % CREDENTIALS)
START_SECONDS_MAX = 10.0
IDLE_SECONDS = 0.3  # after which a client is taken to wait
PATHS = ("path", "longest-path", "abstract-name", "SBUS_ADDRESS")
PRIVATE = ("private", "private-link", "private-open")
# How to make the client another user, where its address depends on that
OTHER = "unshare --user --map-user={uid} --map-group={uid} "
USERS = {"root": "unshare -Urm sh -c 'mount --bind $XDG_RUNTIME_DIR /run &&"}
USERS["root"] += """ XDG_RUNTIME_DIR=/ exec "$@"' sh """
USERS |= dict.fromkeys(("default", *PRIVATE), OTHER)


class Line(NamedTuple):
    """A command, or an answer; the one text of 'error' says why."""

    word: str
    texts: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.word, *map(escape, self.texts)])

    def encode(self) -> bytes:
        """Return the command as it is sent, with a key and a payload."""
        texts = (b"", *self.texts) if self.word == "reply" else self.texts
        key, payload = [text.hex() or "-" for text in (*texts, b"", b"")][:2]
        return f"{self.word} {key} {payload}\n".encode("ascii")


def parse_answer(line: bytes, command: str) -> Line:
    """Return what an adapter answers to a command.

    What has no meaning there is left out.  Raises: Failure if it is no answer.
    """
    word, *texts = line.decode("latin-1").rstrip("\r\n").split(" ")
    if word == "error":
        return Line(word, (" ".join(texts).encode("latin-1"),))
    if word in ("closed", "unknown"):
        return Line(word)
    if word in ("ok", "control") and len(texts) <= 2:
        if word == "ok" or command != "receive":
            word = MEANINGS.get(command, "ok")
        parts = ("" if text == "-" else text for text in (*texts, "", ""))
        with contextlib.suppress(ValueError):
            both = [bytes.fromhex(part) for part in parts][:2]
            return Line(word, (*both[2 - ANSWERS[word] :],))
    raise Failure(f"the client answered {escape(line)}, not an answer")


class Adapter:
    """A client that runs; commands are written while anything is awaited."""

    def __init__(
        self, program: Program, address: str, environment: Mapping[str, str]
    ) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        program.run(address, env=environment, bufsize=0, **pipes)
        assert program.process
        assert program.process.stdin and program.process.stdout
        self._program = program
        self._commands = program.process.stdin.fileno()
        self._answers = program.process.stdout.fileno()
        os.set_blocking(self._commands, False)
        self._unwritten = b""
        self._unread = b""
        self._is_over = False
        self._unanswered: list[str] = []  # commands

    def tell(self, command: Line) -> None:
        """Tell the client to do something; its answer comes later."""
        self._unwritten += command.encode()
        self._unanswered.append(command.word)

    def end(self) -> None:
        """End the commands, all of which are answered: the client closes."""
        assert self._program.process and self._program.process.stdin
        self._program.process.stdin.close()

    def answer(self, seconds_max: float) -> Line | None:
        """Return the next answer, or None if there is none in time."""
        if not self.wait(seconds_max):
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        command = self._unanswered.pop(0) if self._unanswered else "nothing"
        return parse_answer(line, command)

    def wait(self, seconds_max: float, other: int = -1) -> bool:
        """Return whether an answer, or else a descriptor, is ready in time."""
        end = time.monotonic() + seconds_max
        while other >= 0 or b"\n" not in self._unread:
            left = max(0.0, end - time.monotonic())
            ready = self._take_turn(other, 0 if self._is_over else left)
            if other in ready:
                break
            if self._is_over:
                with contextlib.suppress(Failure):
                    self._program.await_status(0.2)
                if other >= 0 and self._take_turn(other, 0):
                    break  # its connection ended after its output
                how = self._program.end() or "has closed its standard output"
                raise Failure(f"the client {how}")
            if len(self._unread) > LINE_BYTES_MAX:
                raise Failure("the client never stops answering")
            if not ready and not left:
                return False
        return True

    def _take_turn(self, other: int, seconds_max: float) -> list[int]:
        """Write and read what can be; return what was ready."""
        readers = [] if self._is_over else [self._answers]
        readers += [other] * (other >= 0)
        writers = [self._commands] * bool(self._unwritten)
        readable, writable, _ = select.select(
            readers, writers, [], seconds_max
        )
        if writable:
            try:
                size = os.write(self._commands, self._unwritten)
            except BrokenPipeError:  # it has ended, as its output tells
                size = len(self._unwritten)
            self._unwritten = self._unwritten[size:]
        if self._answers in readable:
            got = os.read(self._answers, READ_BYTES_MAX)
            self._unread += got
            self._is_over = not got
        return [*readable, *writable]


class ClientStep(NamedTuple):
    """One line of an example for clients."""

    source: str
    verb: str  # a command, or '>', '<', '='
    packet: bytes = b""  # that the client sends or receives, or END
    lines: tuple[Line, ...] = ()  # the command, or the answers that may be


class ClientCase(NamedTuple):
    """What a client does when it is told to, and its server says this."""

    name: str
    rules: tuple[str, ...]
    place: str  # where the server is: one of PATHS, or of USERS
    steps: tuple[ClientStep, ...]


def all_client_cases(blocks: Sequence[Block] = ()) -> list[ClientCase]:
    """Return the examples for clients in blocks, or in the specification.

    Raises: ValueError at a malformed one.
    """
    blocks = blocks or [*read_blocks()]
    return [client_case(block) for block in blocks if block.kind == "client"]


def client_case(block: Block) -> ClientCase:
    """Return the case of a block; raise ValueError if it is malformed."""
    lines = [plain for line in block.lines for plain in each_number(line)]
    place = "path"
    if lines[0].startswith("server "):
        place = lines.pop(0).partition(" ")[2]
    if place not in {*PATHS, *USERS}:
        raise ValueError(f"{block.name}: no server is at {place!r}")
    steps = tuple(map(parse_client_step, lines))
    return ClientCase(block.name, block.rules, place, steps)


def parse_client_step(line: str) -> ClientStep:
    """Return a line's step; raise ValueError if it stands for none."""
    verb, _, rest = line.partition(" ")
    if verb in COMMANDS:
        return ClientStep(line, verb, b"", (parse_words(line, COMMANDS),))
    if verb in (">", "<") and rest:
        packet = END if rest == "end" else parse_bytes(rest)
        return ClientStep(line, verb, packet)
    if verb == "=" and rest:
        choices = rest.split(" | ") if rest != "nothing" else []
        known = {**ANSWERS, "error": 0}
        lines = (parse_words(choice, known) for choice in choices)
        return ClientStep(line, verb, b"", tuple(lines))
    raise ValueError(f"not a step: {line!r}")


def parse_words(source: str, known: dict[str, int]) -> Line:
    """Return a command or an answer of an example; or raise ValueError."""
    word, *texts = FIELD.findall(source)
    if known.get(word) != len(texts):
        raise ValueError(f"not a command or an answer: {source!r}")
    return Line(word, tuple(map(parse_bytes, texts)))


def place_of(
    kind: str, directory: str, uid: int
) -> tuple[Any, str, dict[str, str]]:
    """Return where a server is, its address or none, and the environment."""
    path = f"{directory}/bus"
    hidden = ("SBUS_ADDRESS", "XDG_RUNTIME_DIR")
    kept = {name: os.environ[name] for name in {*os.environ} - {*hidden}}
    if kind == "abstract-name":  # its address leaves out the NUL bytes
        name = b"\0" + secrets.token_bytes(16) + b"x"
        address = f"/dev/unix/abstract/{name.hex()}"
        return name.ljust(108, b"\0"), address, kept
    if kind == "SBUS_ADDRESS":
        return path, "", {**kept, kind: path}
    if kind in ("default", "root"):
        kept["XDG_RUNTIME_DIR"] = directory
        return f"{directory}/sbus.socket", "", kept
    if kind in PRIVATE:
        private = f"/tmp/sbus-{uid}"
        made = f"{directory}/x" if kind == "private-link" else private
        os.mkdir(made)
        os.chmod(made, 0o711 if kind == "private-open" else 0o700)
        if kind == "private-link":
            os.symlink(made, private)
        return f"{private}/sbus.socket", "", kept
    path = path.ljust(107, "x") if kind == "longest-path" else path
    return path, path, kept


class ClientTalk:
    """An example as it goes on: the kit is the server."""

    def __init__(
        self, kit: ClientKit, adapter: Adapter, listener: socket.socket
    ) -> None:
        self._kit = kit
        self._adapter = adapter
        self._listener = listener
        self._wire: socket.socket | None = None
        self._unanswered: list[str] = []  # commands
        self._patterns: tuple[bytes, ...] = ()  # for its own answers
        self._reply_keys: dict[bytes, bytes] = {}  # by what they are here
        self.said: list[str] = []

    def hold(self, steps: Sequence[ClientStep]) -> None:
        """Take all steps; raise Failure at one that fails."""
        for step in steps:
            self.said.append(step.source)
            self._take(step)
        self._confirm()

    def judge(self, case: ClientCase) -> None:
        """Raise Failure if the client does not do what a case says."""
        if not case.place.startswith("private-"):
            self.hold(case.steps)
            return self._finish()

        # It is not to connect
        self.said += [step.source for step in case.steps]
        self._adapter.tell(case.steps[0].lines[0])
        with contextlib.suppress(Failure):  # which says how it has ended
            self._adapter.answer(START_SECONDS_MAX)
        if select.select([self._listener], [], [], 0)[0]:
            raise Failure("the client has connected")

    def _finish(self) -> None:
        """Raise Failure if a packet came that no step says."""
        self.said.append("(the client sends no more)")
        wire = self._connection()
        if wire.fileno() < 0:
            return
        wire.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while (got := wire.recv(READ_BYTES_MAX)) != END:
                if not got.startswith(UNSAID):
                    raise Failure(f"the client also sent {describe(got)}")

    def _take(self, step: ClientStep) -> None:
        """Take one step."""
        if step.verb == "close":
            self._connection()
            self._confirm()
            self._adapter.end()
        elif step.verb in COMMANDS:
            self._adapter.tell(step.lines[0])
            self._unanswered.append(step.verb)
            self._connection()
        elif step.verb == ">":
            self._expect(step.packet)
        elif step.verb == "<":
            self._confirm()
            self._send(step.packet)
        elif step.lines:  # about the last command
            last = self._unanswered.pop()
            self._confirm()
            answer = self._adapter.answer(self._kit.seconds_max)
            self._compare(last, answer, step.lines)
        else:
            self._confirm(self._kit.idle_seconds)

    def _confirm(self, idle_seconds: float = 0.0) -> None:
        """Expect answers that are not told, or that none comes any more."""
        while self._unanswered and self._unanswered[0] not in MEANINGS:
            answer = self._adapter.answer(
                idle_seconds or self._kit.seconds_max
            )
            if answer is None and idle_seconds:
                return
            self._compare(self._unanswered.pop(0), answer, (Line("ok"),))

    def _compare(
        self, command: str, answer: Line | None, choices: tuple[Line, ...]
    ) -> None:
        """Raise Failure unless an answer is one of those."""
        if answer is None:
            raise Failure(f"the client does not answer {command} in time")
        if answer.word == "unknown" and command in ("request", "reply"):
            raise NotApplicable(f"the client has no {command}")
        fits = Line("error") if answer.word == "error" else answer
        if fits not in choices:
            raise Failure(f"the client answered {command} with {answer}")

    def _connection(self) -> socket.socket:
        """Return the client's connection, once it has connected."""
        if self._wire is None:
            listener = self._listener.fileno()
            if not self._adapter.wait(START_SECONDS_MAX, listener):
                raise Failure("the client does not connect in time")
            self._wire, _ = self._listener.accept()
            self._wire.settimeout(self._kit.seconds_max)
            self._wire.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
            )
        return self._wire

    def _send(self, packet: bytes) -> None:
        """Send the client a packet, or close."""
        wire = self._connection()
        for key, name in self._reply_keys.items():
            packet = packet.replace(name, key)
        try:
            wire.send(packet) if packet != END else wire.close()
        except OSError as error:
            raise Failure(f"cannot send to the client: {error}") from None

    def _expect(self, packet: bytes) -> None:
        """Compare what the client sends with what the example says."""
        while plain(got := self._own(self._receive())) != plain(packet):
            if not got.startswith(UNSAID):
                said = describe(got) if got else "the end: it has closed"
                raise Failure(f"the client sent {said}")
            if plain(got) == WHOAMI:
                self._send(WHOAMI + b"\0" + CREDENTIALS)

    def _own(self, packet: bytes) -> bytes:
        """Return a packet, with the key for an answer as an example has it."""
        match = re.match(OWN, packet)
        if match and packet.startswith(b"SUB "):
            self._patterns += (match[2].rstrip(b"*"),)
        elif match:
            if not match[2].startswith(self._patterns):
                raise Failure("the client has not subscribed to its answer")
            name = REPLY % (len(self._reply_keys) + 1)
            name = self._reply_keys.setdefault(match[2], name)
            packet = packet.replace(match[2], name, 1)
        return packet

    def _receive(self) -> bytes:
        """Return the next packet of the client, or END."""
        wire = self._connection()
        if not self._adapter.wait(self._kit.seconds_max, wire.fileno()):
            self._confirm(self._kit.idle_seconds)  # it may have told why
            if self._unanswered and (answer := self._adapter.answer(0)):
                self._compare(self._unanswered[0], answer, ())
            raise Failure("the client sent nothing in time")
        try:
            return wire.recv(READ_BYTES_MAX)
        except ConnectionResetError:  # it has left packets unread
            return wire.recv(READ_BYTES_MAX)

    def close(self) -> None:
        """Close the connection."""
        if self._wire:
            self._wire.close()


def plain(packet: bytes) -> bytes:
    """Return a packet without what has no meaning in it."""
    head, _, payload = packet.partition(b"\0")
    if head.startswith((b"SUB ", b"UNSUB ")):
        return head
    return head if head.startswith(b"CMSG ") and not payload else packet


class ClientKit:
    """Runs cases against a client, which a command starts for each."""

    def __init__(
        self, command: str, seconds_max: float, total: float = math.inf
    ) -> None:
        self._command = command
        self.seconds_max = seconds_max
        self._seconds_left = total  # for what fails
        self.idle_seconds = IDLE_SECONDS

    def probe(self) -> None:
        """Raise Failure or OSError if the client does not connect."""
        with self._talk("path") as talk:
            talk.hold([parse_client_step("subscribe k")])

    def begin(self) -> tuple[Any, Callable[[Any], Result]]:
        """Return what is left in the end, and what judges."""
        return contextlib.nullcontext(), self.judge

    def judge(self, case: ClientCase) -> Result:
        """Run one case."""
        if received or self._seconds_left < 0:
            why = SIGNAL if received else NO_TIME
            return Result(case.name, case.rules, "not run", why)
        start = time.monotonic()
        try:
            with self._talk(case.place) as talk:
                try:
                    talk.judge(case)
                except Failure as wrong:
                    seconds = time.monotonic() - start
                    self._seconds_left -= seconds
                    report = str(wrong), tuple(talk.said), round(seconds, 4)
                    return Result(case.name, case.rules, "failed", *report)
        except NotApplicable as why_not:
            why = str(why_not)
            return Result(case.name, case.rules, "not applicable", why)
        return Result(case.name, case.rules, "passed")

    @contextlib.contextmanager
    def _talk(self, kind: str) -> Iterator[ClientTalk]:
        """Start a client; raise Failure if it cannot be run."""
        with contextlib.ExitStack() as cleanup:
            uid = secrets.randbelow(1 << 30) + (1 << 30)  # nobody's
            start = USERS.get(kind, "").format(uid=uid)
            program = Program(start + self._command, self.seconds_max)
            cleanup.enter_context(program)
            place = place_of(kind, program.directory, uid)
            if kind in PRIVATE:
                cleanup.callback(os.system, f"rm -r /tmp/sbus-{uid}")
            test: Any = {
                "shell": True,
                "env": place[2],
                "capture_output": True,
            }
            if start and subprocess.run(f"{start}true", **test).returncode:
                raise NotApplicable("needs unshare, and the right to it")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            cleanup.enter_context(listener)
            listener.bind(place[0])
            listener.listen()
            adapter = Adapter(program, *place[1:])
            talk = ClientTalk(self, adapter, listener)
            cleanup.callback(talk.close)
            yield talk
