"""How a conversation is held, with whatever can be talked to."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any, NamedTuple

from .examples import Conversation, Part, Step, Text, escape
from .rules import read_rules

WHOAMI = b"CMSG !/cred/whoami"
MATCH_STEPS_MAX = 3  # of a pattern and a key: there are a thousand
END = b""  # a client that receives an empty packet raises Failure instead


class Failure(Exception):
    """A server did not do what an example says."""

    def __init__(
        self, text: str, rule: str = "", is_sure: bool = False
    ) -> None:
        super().__init__(text)
        self.rule = rule  # that is broken, if the example has several
        self.is_sure = is_sure  # it came again already


# A client of the server that is under test: a Wire, or what has its methods.
# A bus is the server: a ServerProcess, or what can also connect a client and
# fill it, freeze, thaw and wait, and tell its fault.
Connection = Any
Bus = Any


class Outcome(NamedTuple):
    """How an example or a check ended."""

    wrong: str  # or nothing
    said: list[str]  # up to the step that failed
    rule: str = ""  # that is broken, if that is known
    is_sure: bool = False  # it need not be tried again


is_verbose = False  # whether each step is printed when it is taken


def note(said: list[str], step: str) -> None:
    """Note what is done next."""
    said.append(step)
    if is_verbose:
        print(f"{time.monotonic():12.4f}  {step}", flush=True)


def perform(bus: Bus, conversation: Conversation) -> Outcome:
    """Hold a conversation; return what went wrong, and what was said."""
    talk, wrong, rule = Talk(bus), "", ""
    with contextlib.closing(talk):
        try:
            talk.hold(conversation)
            if hasattr(bus, "audit") and counts_are_due(conversation):
                bus.audit(talk.clients.values())
        except Failure as failure:
            wrong, rule = str(failure), failure.rule
    if not wrong:
        talk.said.append("(the clients close)")
    wrong = "; ".join(filter(None, (wrong, bus.fault())))
    return Outcome(wrong, talk.said, rule)


def counts_are_due(conversation: Conversation) -> bool:
    """Return whether it is one for servers that answer `stats` [CTL-5]."""
    origins = [read_rules()[rule].origin for rule in conversation.rules]
    is_long = len(conversation.steps) > MATCH_STEPS_MAX
    return is_long and {*origins} != {"upstream"}


CREDENTIAL = re.compile(r"\{([A-Z])\.(gid|uid|pid)\}")
NEED_NO_SERVER = (">>", "process", "close", "shut", "deaf", "read")


class Talk:
    """A conversation as it goes on."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.said: list[str] = []
        self.clients: dict[str, Connection] = {}
        self.unsettled: Connection | None = None
        self.has_posts = False

    def hold(self, conversation: Conversation) -> None:
        """Take all steps; raise Failure at one that fails."""
        for step in conversation.steps:
            note(self.said, self.shown(step))
            self.take(step)
        for name in list(self.clients):
            self.said.append(f"{name} < nothing")
            self.expect_nothing(name)

    def shown(self, step: Step) -> str:
        """Return a step with the numbers of the clients that are there."""

        def number(match: re.Match[str]) -> str:
            client = self.clients.get(match[1])
            return str(getattr(client, match[2])) if client else match[0]

        return CREDENTIAL.sub(number, str(step))

    def take(self, step: Step) -> None:
        """Take one step."""
        client = self.clients.get(step.client)
        is_post = step.verb == ">>"  # nobody waits for what it does
        if step.verb not in NEED_NO_SERVER:
            self.bus.thaw()
        may_wait = client is not None and client is self.unsettled
        if not may_wait or step.verb in (">>", "deaf"):  # nobody asks the deaf
            self.settle()
        if is_post:
            self.has_posts = True
            self.bus.freeze()
        if step.verb == "wait":
            self.bus.wait(float(step.argument))
            return
        client = client or self.connect(step)
        if step.verb in (">", ">>"):
            self.send(client, step)
        elif step.verb == "<":
            self.expect(client, step)
        elif step.verb == "close":
            self.settle()
            self.clients.pop(step.client).close()
        elif step.verb in ("shut", "deaf"):
            client.shut() if step.verb == "shut" else client.deafen()
        elif step.verb == "room":
            client.set_room(int(step.argument))
        elif step.verb == "fill":
            self.bus.fill(client)
        elif step.verb == "read":
            client.read_fillers(int(step.argument))

    def connect(self, step: Step) -> Connection:
        """Connect a client at its first step."""
        credentials = None
        if step.verb == "process":
            numbers = (field.split("=") for field in step.argument.split())
            credentials = {name: int(text) for name, text in numbers}
        client = self.bus.connect(credentials)
        client.name = step.client  # for what it reports
        self.clients[step.client] = client
        return client

    def settle(self) -> None:
        """Settle the client whose turn is over."""
        client, self.unsettled = self.unsettled, None
        if client:
            client.settle()

    def send(self, client: Connection, step: Step) -> None:
        """Send a packet."""
        packet = b"".join(map(self.fill, step.text))
        client.send(packet)
        if step.verb == ">":
            self.unsettled = client

    def fill(self, part: Part) -> bytes:
        """Return the bytes of a part; 'B.pid' is a client's number."""
        if not part.variable:
            return part.text * part.times
        name, _, field = part.variable.partition(".")
        if name not in self.clients:
            raise Failure(f"{name} is not there, whose number this is")
        return b"%d" % getattr(self.clients[name], field)

    def expect(self, client: Connection, step: Step) -> None:
        """Compare what a client receives with what the example says."""
        if step.argument in ("nothing", "no packet"):
            may_end = step.argument == "no packet"
            return self.expect_nothing(step.client, may_end)
        why = ""
        if step.argument == "end":
            client.await_end()
            why = ", where the server should close the connection"
        try:
            got = client.receive()
        except Failure as failure:
            raise Failure(f"{failure}{why}") from None
        if why:
            self.unsettled = None  # or it was settled before
            self.clients.pop(step.client).close()
        if not why:
            wrong = self.difference(step.text, got)
        else:
            wrong = f"received {describe(got)}{why}" if got != END else ""
        if wrong:
            raise Failure(wrong)

    def difference(self, text: Text, got: bytes) -> str:
        """Return how a packet differs from what a text says, if it does."""
        pieces = [b""]  # between one {any} or {json} and the next
        objects = []
        for part in text:
            if part.variable == "any" or part.variable[:4] == "json":
                pieces.append(b"")
                objects.append(part.variable[4:])
            else:
                pieces[-1] += self.fill(part)
        if got == pieces[0] and not objects:
            return ""
        expression = b"(.*)".join(map(re.escape, pieces))
        match = re.fullmatch(expression, got, re.S) if objects else None
        if match is None:
            return f"received {describe(got)}"
        wrong = map(json_difference, match.groups(), objects)
        return next(filter(None, wrong), "")

    def expect_nothing(self, name: str, may_end: bool = False) -> None:
        """Raise Failure if a client has received a packet, or the end."""
        client = self.clients[name]
        self.bus.thaw()
        self.settle()
        if self.has_posts:  # an answer may overtake what others have posted
            client.pending()
        got = client.pending()
        if got == END and may_end:
            self.clients.pop(name).close()
        elif got is not None:
            raise Failure(f"received {describe(got)}")

    def close(self) -> None:
        """Close what is open."""
        for client in self.clients.values():
            client.close()


def json_difference(text: bytes, members: str) -> str:
    """Return how a JSON object differs from members, if any are named.

    `a.b=1` is the member b of the member a, `a.any.b=1` that of any member of
    it; what is null may be missing.
    """
    if not members:
        return ""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if not isinstance(whole, dict):
        return f"received {describe(text)}, which is no JSON object"
    for path, value in (member.split("=") for member in members.split()):
        found: list[Any] = [whole]
        for name in path.split("."):
            objects = [value for value in found if isinstance(value, dict)]
            pairs = [pair for value in objects for pair in value.items()]
            found = [each for key, each in pairs if name in (key, "any")]
        values = found or [None]
        plain = [value for value in values if not isinstance(value, bool)]
        if json.loads(value) not in plain:
            received = ", ".join(map(json.dumps, found)) or "nothing"
            return f"{path}: expected {value}, received {received}"
    return ""


def describe(got: bytes) -> str:
    """Return what was received, for a report."""
    return escape(got) if got != END else "the end: the server has closed"
