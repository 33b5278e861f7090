"""Clients and servers together: adapters hold conversations with a server."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from conformance.clients import Adapter, Line
from conformance.conversation import END, Failure
from conformance.examples import Conversation
from conformance.kit import Item
from conformance.server import Program, ServerProcess
from conformance.trial import NotApplicable

FORMS = {  # what a client can be told to send
    "subscribe": re.compile(rb"SUB ([^\0]*)"),
    "unsubscribe": re.compile(rb"UNSUB ([^\0]*)"),
    "publish": re.compile(rb"MSG ([^\0]*)\0(.*)", re.S),
}
LIMITED = "LIMIT", "way-out"  # examples of limits, and of who leaves for them
KINDS = {"message": b"MSG", "control": b"CMSG"}  # of what it receives


def command_for(packet: bytes) -> Line | None:
    """Return the command that has a client send a packet, if one does."""
    for word, form in FORMS.items():
        if match := form.fullmatch(packet):
            return Line(word, match.groups())
    return None


def can_be_held(case: Item) -> bool:
    """Return whether all clients of a case do what any client can.

    At a limit a client has no place for the pattern of its token.
    """
    if not isinstance(case, Conversation) or case.options:
        return False
    names = (case.name, *case.rules)
    is_at_a_limit = any(name.startswith(LIMITED) for name in names)
    verbs = {step.verb for step in case.steps}
    packets = [
        b"".join(part.text * part.times for part in step.text)
        for step in case.steps
        if step.verb == ">"
    ]
    is_plain = verbs <= {">", "<", "close"} and all(map(command_for, packets))
    return is_plain and not is_at_a_limit


class Speaker:
    """A client of a server, through its adapter; it does what a Wire does."""

    def __init__(self, command: str, server: ServerProcess) -> None:
        self.name = "a new client"
        self._program = Program(command, server.start_seconds_max)
        self._adapter = Adapter(self._program, str(server.name), os.environ)
        self._inbox: list[bytes] = []  # what came before a token
        self._token = b""

    def begin(self, seconds_max: float) -> None:
        """Learn who the client is; its answers then take less than a start."""
        answer = self._ask("whoami")
        path = b"".join(answer.texts)
        numbers = re.findall(rb"\d+", path)
        if len(numbers) != 3:
            raise Failure(f"the client answered whoami with {answer}")
        self.gid, self.uid, self.pid = map(int, numbers)
        # A secret key, so that no pattern of another client matches it
        self._token = path + b"/settled"
        self._ask("subscribe", self._token)
        self._program.seconds_max = seconds_max

    def _ask(self, word: str, *texts: bytes) -> Line:
        """Return the answer to a command.

        Raises: NotApplicable if the client refuses, as before a mistake.
        """
        self._adapter.tell(Line(word, texts))
        answer = self._adapter.answer(self._program.seconds_max)
        if answer is None:
            raise Failure(f"{self.name} does not answer {word} in time")
        if answer.word == "error":
            raise NotApplicable(f"the client answered {word} with {answer}")
        return answer

    def send(self, packet: bytes) -> None:
        """Send a packet."""
        command = command_for(packet)
        assert command, packet
        self._ask(command.word, *command.texts)

    def settle(self) -> None:
        """Return once the server has handled all."""
        self._ask("whoami")

    def receive(self) -> bytes:
        """Return the next packet, or END."""
        if self._inbox:
            return self._inbox.pop(0)
        answer = self._ask("receive")
        if answer.word not in KINDS:
            return END
        return KINDS[answer.word] + b" " + b"\0".join(answer.texts)

    def await_end(self) -> None:
        """Return at once: to receive the end is to wait for it."""

    def pending(self) -> bytes | None:
        """Return what has come, if anything has; a token comes after it."""
        if not self._inbox:
            self._ask("publish", self._token, b"")
            self._inbox.append(self.receive())
        if self._inbox == [b"MSG " + self._token + b"\0"]:
            self._inbox.clear()
        return self._inbox[0] if self._inbox else None

    def close(self) -> None:
        """End the client."""
        self._program.__exit__()


class Pair:
    """A server whose clients are those of an adapter."""

    def __init__(self, server: ServerProcess, command: str) -> None:
        self.fault = server.fault
        self._server = server
        self._command = command

    def connect(self, credentials: Any = None) -> Speaker:
        """Return a new client; raise Failure if it does not connect."""
        with contextlib.ExitStack() as cleanup:
            client = Speaker(self._command, self._server)
            cleanup.callback(client.close)
            client.begin(self._server.seconds_max)
            cleanup.pop_all()
        return client

    def thaw(self) -> None:
        """Do nothing: no step stops the server."""
