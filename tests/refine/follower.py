"""The model, which goes the way that the server was seen to go."""

from __future__ import annotations

import errno
import json
from collections import defaultdict, deque
from typing import Any

import model
from recorder import Call

STATS = b"CMSG stats\0"
NOTHING_YET = (errno.EAGAIN, errno.ECONNRESET)  # to receive
NO_READER = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED)
# What the kernel lacks where a packet has to wait
LACKS = {0: "", errno.EAGAIN: "room"}
LACKS |= dict.fromkeys((errno.ENOBUFS, errno.ENOMEM), "memory")
OFFER = model.offer
DISCONNECT = model.disconnect
# Which of these is named of a packet that breaks two of them is left open
EITHER = ("CRED-8", "CRED-4", "KEY-4")


class Differs(Exception):
    """The server does what the model does not."""


def require(condition: object, text: str) -> None:
    """Raise Differs if something is not so."""
    if not condition:
        raise Differs(text)


def require_equal(name: str, actual: object, expected: object) -> None:
    """Raise Differs if the server has not what it should."""
    require(actual == expected, f"{name}: {actual}, not {expected}")


def named(rule: str) -> str:
    """Return a rule, or what stands for those that it may be named for."""
    return "a secret" if rule in EITHER else rule


class Follower(model.Bus):
    """Does what the server was seen to do, call by call.

    What the model does at once, the server does at the end of a turn: it
    offers packets, and closes the connection of a client that has made a
    mistake.  So put_off and note_mistake stand for two functions of the model.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(reads_ahead=False, **options)
        self.of_wire: dict[Any, model.Client] = {}
        self.lacks: dict[int, str] = {}  # by number
        self.mistakes: dict[int, str] = {}  # rules, by the client's number
        self.causes: list[tuple[int, str]] = []  # clients and rules
        self.logged: set[str] = set()  # rules that the log has named

        # A round: calls to follow, sockets of which a call failed, and
        # sockets that were read
        self.calls: deque[Call] = deque()
        self.refused: set[Any] = set()
        self.heard: set[Any] = set()

        # A turn: packets to offer by receiver, how many were handled, whose
        # they were, and how often that client had been paused before
        self.offers: dict[int, list[model.Message]] = defaultdict(list)
        self.handled = 0
        self.reader: model.Client | None = None
        self.pauses = 0

    def put_off(self, client: model.Client, message: model.Message) -> None:
        """Keep a packet for a receiver until the server delivers it."""
        self.offers[client.number].append(message)

    def note_mistake(self, client: model.Client, rule: str) -> None:
        """Keep in mind that a client is to be disconnected."""
        self.mistakes[client.number] = rule

    def note(self, rule: str, client: model.Client, event: str) -> None:
        """Keep in mind why a client is disconnected."""
        if event == "is disconnected":
            self.causes.append((client.number, named(rule)))

    def follow(self, calls: list[Call]) -> None:
        """Go the way of a round; raise Differs where there is none."""
        self.calls.extend(calls)
        self.refused = {call.subject for call in calls if call.error}
        reads = [call for call in calls if call.name == "recv_into"]
        self.heard = {call.subject for call in reads}
        while self.calls:
            call = self.calls.popleft()
            self.now = call.now
            getattr(self, f"see_{call.name}")(call)

        require(not self.mistakes, "PKT-3: a mistake has no end")

    # ---- Newcomers

    def see_accept(self, call: Call) -> None:
        """Let a newcomer in."""
        if call.error:
            return
        wire, _ = call.result
        gid, uid, pid = wire.credentials
        client = self.connect(uid, gid, pid)
        client.sent = wire.sent
        self.of_wire[wire] = client

    def see_register(self, call: Call) -> None:
        """Have a client go that cannot be watched."""
        client = self.of_wire.get(call.arguments[0])
        if call.error and client:
            self.note_mistake(client, "LIMIT-7")

    # ---- Reading

    def see_recv_into(self, call: Call) -> None:
        """Handle a packet; an empty one shows in the next call."""
        client = self.of_wire[call.subject]
        if not self.handled:
            self.reader = client
            self.pauses = client.counts["paused"]
        is_sound = client.number not in self.mistakes
        require(is_sound, "CONN-6: it is read after a mistake")
        if call.error and call.error not in NOTHING_YET:
            self.note_mistake(client, "CONN-6")
        if not call.result:
            return
        model.handle(self, client)
        self.handled += 1

    def see_recvmsg(self, call: Call) -> None:
        """Handle an empty packet, or the end of input, which looks alike."""
        client = self.of_wire[call.subject]
        if call.error and call.error not in NOTHING_YET:
            self.note_mistake(client, "CONN-6")
        elif call.error or call.subject.incoming:
            self.note_mistake(client, "PKT-2")
        else:  # an empty packet just before the end counts for nothing
            require(client.sent in ([], [b""]), "CONN-6: an end too early")
            client.sent.clear()
            client.has_ended = True
            if client.end == "LIMIT-7":  # it leaves by itself
                client.end = ""

    # ---- Sending

    def see_deliver(self, call: Call) -> None:
        """Offer what a turn has left to a receiver, as the server did."""
        receiver = self.of_wire[call.subject]
        messages = self.offers.pop(receiver.number, [])
        require_equal("PUB-1: copies", len(call.arguments), len(messages))
        for message, packet in zip(messages, call.arguments):
            self.require_same(packet, message.packet)
            self.offer(call.subject, message._replace(packet=packet))

    def require_same(self, packet: bytes, expected: bytes) -> None:
        """Raise Differs unless a packet is the one that the model has."""
        if not packet.startswith(STATS):
            require_equal("PUB-4", packet, expected)
            return
        # Of several packets some is counted at the end of a turn, and of a
        # long answer rows are cut
        if self.handled == 1 and len(expected) <= self.options.max_packet:
            actual = json.loads(packet[len(STATS) :])
            numbers = json.loads(expected[len(STATS) :])
            require_equal("CTL-5: the answer", actual, numbers)

    def offer(self, wire: Any, message: model.Message) -> None:
        """Offer a packet as the server did."""
        receiver = self.of_wire[wire]
        is_lost = receiver.is_deaf or receiver.end not in ("", "LIMIT-7")
        if not (receiver.backlog or is_lost):
            require(self.calls, "BLOCK-5: not offered")
            call = self.calls.popleft()
            seen = (call.name, call.subject, *call.arguments)
            require_equal("BLOCK-5", seen, ("send", wire, message.packet))
            self.note_answer(receiver, call)
            receiver.room = 0 if call.error else None
        OFFER(self, receiver, message)
        receiver.room = None

    def see_end_turn(self, _: Call) -> None:
        """Raise Differs if something is left of a turn."""
        require(not self.offers, "PUB-1: a receiver is left out")
        self.handled = 0
        # A client that is let go in a turn is let go at its end, so to hold
        # it again is no second pause
        if self.reader:
            counts = self.reader.counts
            counts["paused"] = min(counts["paused"], self.pauses + 1)

    def see_send(self, call: Call) -> None:
        """Have the kernel take a packet of a backlog, or refuse it."""
        client = self.of_wire[call.subject]
        require(client.backlog, "PUB-4: a packet is sent twice")
        packet = client.backlog[model.next_index(client)].packet
        require_equal("ORDER-1: sent", call.arguments, (packet,))
        self.note_answer(client, call)
        if not call.error:
            model.drain(self, client)

    def note_answer(self, client: model.Client, call: Call) -> None:
        """Note what the kernel says of a packet, and what follows of that."""
        self.now = call.now
        self.lacks[client.number] = LACKS.get(call.error, "")
        if call.error in NO_READER:
            model.deafen(self, client)
        elif call.error not in LACKS:
            model.expel(self, client, "CONN-6")
            client.counts["discarded"] -= 1  # the packet counts elsewhere

    # ---- Leaving

    def see_shutdown(self, call: Call) -> None:
        """Have a client leave that holds others and does not read."""
        client = self.of_wire[call.subject]
        if not client.end:
            is_over = self.now - client.since >= self.options.block_timeout
            require(client.holds and is_over, "BLOCK-16: too early")
            model.expel(self, client, "BLOCK-16")

    def see_close(self, call: Call) -> None:
        """Have a client go."""
        client = self.of_wire.pop(call.subject)
        if client.end == "CONN-2":
            return
        rule = self.mistakes.pop(client.number, "")
        if not rule and client.end == "LIMIT-7":
            rule = client.end
            require(call.subject in self.heard, "LIMIT-20: it is not heard")
        elif not rule:
            is_over = client.has_ended and not client.sent
            require(is_over, "CONN-12: a client is closed for nothing")
            is_owed = client.backlog and call.subject not in self.refused
            require(not is_owed, "CONN-10: packets wait for it")

        if rule:
            self.causes.append((client.number, named(rule)))
        DISCONNECT(self, client, rule or client.end or "CONN-10")
