"""The model, which goes the way that the server was seen to go."""

from __future__ import annotations

import errno
import json
import re
from collections import Counter, deque
from typing import Any

import model
import sbus
from recorder import Call, RecordingKernel, require, require_equal

STATS = b"CMSG stats\0"
NOTHING_YET = (errno.EAGAIN, errno.ECONNRESET)  # to receive
NO_READER = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED)
# Where a packet has to wait: what the kernel lacks
LACKS = {0: "", errno.EAGAIN: "room"}
LACKS |= dict.fromkeys((errno.ENOBUFS, errno.ENOMEM), "memory")
LATE_SECONDS = 1.0  # that an alarm may be late where each call takes time
OFFER = model.offer
DISCONNECT = model.disconnect
# What the model logs of clients that leave, and the server
LEAVES = re.compile(r"client (\d+) is (?:gone|disconnected) \[(.*)\]")
IDS = r"client=(\d+) uid=\d+ pid=\d+"
CAUSE = re.compile(rf"disconnect {IDS} \[([A-Z]+-\d+)\]")
CITED = re.compile(r"\[([A-Z]+-\d+)\]")
# Which of these is named of a packet that breaks two of them is left open
EITHER = ("CRED-8", "CRED-4", "KEY-4")


class Follower(model.Bus):
    """Does what the server was seen to do, call by call.

    What the model does at once, the server does at the end of a turn: it
    offers packets, and closes the connection of who has made a mistake.  So
    put_off and note_mistake stand for two functions of the model.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(reads_ahead=False, **options)
        self.of_wire: dict[Any, model.Client] = {}
        self.calls: deque[Call] = deque()  # of a round, still to be followed
        self.offers: list[tuple[model.Client, model.Message]] = []
        self.mistakes: dict[int, str] = {}  # rules, by the client's number
        # Clients that go after a turn, and what each had sent before it
        self.too_many: dict[int, list[bytes]] = {}
        self.held: set[int] = set()  # who was paused before this round
        self.errors: dict[Any, int] = {}  # of the last packet for a socket
        self.refused: set[Any] = set()  # sockets, in this round
        self.handled = 0  # packets, since the turn began
        self.pauses: dict[int, int] = {}  # of clients paused in this turn
        self.causes: set[tuple[str, str]] = set()  # clients and rules
        self.logged: set[str] = set()  # rules that the log has named

    def put_off(self, client: model.Client, message: model.Message) -> None:
        """Keep a packet for a receiver until the server delivers it."""
        self.offers.append((client, message))

    def note_mistake(self, client: model.Client, rule: str) -> None:
        """Keep in mind that a client is to be disconnected."""
        self.mistakes[client.number] = rule

    def follow(self, calls: list[Call]) -> None:
        """Go the way of a round; raise Differs where there is none."""
        self.calls.extend(calls)
        holders = self.clients.values()
        self.held = {number for holder in holders for number in holder.holds}
        self.refused = {call.wire for call in calls if call.error}
        while self.calls:
            call = self.calls.popleft()
            self.now = call.now
            getattr(self, f"see_{call.name}")(call)
        self.causes.update(LEAVES.findall("\n".join(self.log)))
        self.log.clear()

    # ---- Newcomers

    def see_accept(self, call: Call) -> None:
        """Let a newcomer in."""
        if call.error:
            return
        gid, uid, pid = call.wire.credentials
        client = self.of_wire[call.wire] = self.connect(uid, gid, pid)
        client.sent += call.packets
        if client.end == "LIMIT-7":  # one too many is like others for a turn
            self.too_many[client.number] = [*client.sent]
            client.end = ""
            client.has_ended = False

    def see_register(self, call: Call) -> None:
        """Have a client go that cannot be watched."""
        if call.error and call.wire in self.of_wire:
            self.note_mistake(self.of_wire[call.wire], "LIMIT-7")

    # ---- Reading

    def see_recv_into(self, call: Call) -> None:
        """Handle a packet; an empty one shows in the next call."""
        client = self.of_wire[call.wire]
        is_sound = client.number not in self.mistakes
        require(is_sound, "CONN-6: it is read after a mistake")
        if call.error and call.error not in NOTHING_YET:
            self.note_mistake(client, "CONN-6")
        if call.error or call.packets in ((), (b"",)):
            return
        require(client.number not in self.held, "BLOCK-12: it is paused")
        require_equal("PKT-5: read", [*call.packets], client.sent[:1])
        model.handle(self, client)
        self.handled += 1

    def see_recvmsg(self, call: Call) -> None:
        """Handle an empty packet, or the end of input, which looks alike."""
        client = self.of_wire[call.wire]
        if call.error and call.error not in NOTHING_YET:
            self.note_mistake(client, "CONN-6")
        elif call.error or call.wire.incoming:
            self.note_mistake(client, "PKT-2")
        else:  # an empty packet just before the end counts for nothing
            require(client.sent in ([], [b""]), "CONN-6: an end too early")
            client.sent.clear()
            client.has_ended = True

    # ---- Sending

    def see_deliver(self, call: Call) -> None:
        """Offer what a turn has left to a receiver, as the server did."""
        receiver = self.of_wire[call.wire]
        offers = self.offers
        messages = [message for to, message in offers if to is receiver]
        self.offers = [offer for offer in offers if offer[0] is not receiver]
        require_equal("PUB-1: copies", len(call.packets), len(messages))
        for message, packet in zip(messages, call.packets):
            self.require_same(packet, message.packet)
            self.offer(call.wire, message._replace(packet=packet))

    def require_same(self, packet: bytes, expected: bytes) -> None:
        """Raise Differs unless a packet is the one that the model has."""
        if not packet.startswith(STATS):
            require_equal("PUB-4", packet, expected)
        elif len(expected) <= self.options.max_packet:  # else rows are cut
            ours = json.loads(packet[len(STATS) :])
            theirs = json.loads(expected[len(STATS) :])
            if self.handled > 1:  # some is counted at the end of a turn
                forget(ours)
                forget(theirs)
            require_equal("CTL-5: the answer", ours, theirs)

    def offer(self, wire: Any, message: model.Message) -> None:
        """Offer a packet as the server did."""
        receiver = self.of_wire[wire]
        error = errno.EAGAIN
        if not (receiver.backlog or receiver.is_deaf or receiver.end):
            require(self.calls, "BLOCK-5: not offered")
            call = self.calls.popleft()
            seen = (call.name, call.wire, *call.packets)
            require_equal("BLOCK-5", seen, ("send", wire, message.packet))
            self.now = call.now
            error = self.errors[wire] = call.error

        if error not in (*LACKS, *NO_READER):
            receiver.counts["refused"] += 1
            model.expel(self, receiver, "CONN-6")
            return
        if error in NO_READER:
            model.deafen(self, receiver)
        receiver.room = 0 if error else None
        publisher = self.clients.get(message.publisher, receiver)
        times = publisher.counts["paused"]
        OFFER(self, receiver, message)
        if publisher.counts["paused"] > times:
            # Who lets go in a turn does so at its end: that is one pause
            publisher.counts["paused"] = self.pauses.setdefault(
                publisher.number, times + 1
            )
        receiver.room = None

    def see_end_turn(self, _: Call) -> None:
        """Raise Differs if something is left of a turn."""
        require(not self.offers, "PUB-1: a receiver is left out")
        self.handled = 0
        self.pauses.clear()

    def see_send(self, call: Call) -> None:
        """Have the kernel take a packet of a backlog, or refuse it."""
        client = self.of_wire[call.wire]
        require(client.backlog, "PUB-4: a packet is sent twice")
        packet = client.backlog[model.next_index(client)].packet
        require_equal("ORDER-1: sent", call.packets, (packet,))
        self.errors[call.wire] = call.error
        if not call.error:
            model.drain(self, client)
        elif call.error in NO_READER:
            model.deafen(self, client)
        elif call.error not in LACKS:
            client.counts["discarded"] -= 1  # it is one of the backlog
            model.expel(self, client, "CONN-6")

    # ---- Leaving

    def see_shutdown(self, call: Call) -> None:
        """Have a client leave that holds others and does not read."""
        client = self.of_wire[call.wire]
        if not client.end:
            is_over = self.now - client.since >= self.options.block_timeout
            require(client.holds and is_over, "BLOCK-16: too early")
            model.expel(self, client, "BLOCK-16")

    def see_close(self, call: Call) -> None:
        """Have a client go."""
        client = self.of_wire.pop(call.wire)
        if client.end == "CONN-2":
            return
        rule = self.mistakes.pop(client.number, "")
        if not rule and client.has_ended and not client.sent:
            rule = client.end or "CONN-10"
            is_owed = client.backlog and call.wire not in self.refused
            require(not is_owed, "CONN-10: packets wait for who is closed")
        elif client.number in self.too_many:
            rule = rule or "LIMIT-7"
        require(rule, "CONN-12: a client is closed for nothing")
        sent = self.too_many.pop(client.number, [])
        require(client.sent != sent or not sent, "LIMIT-20: it is not heard")
        DISCONNECT(self, client, rule)

    # ---- What must be alike

    def compare(self, kernel: RecordingKernel, log: list[str]) -> None:
        """Raise Differs if the server is in another state."""
        clients = {client.wire: client for client in kernel.bus.clients}
        require({*clients} == {*self.of_wire}, "CONN-10: who is there?")
        require(not self.mistakes, "PKT-3: a mistake has no end")
        require(not self.too_many, "LIMIT-7: one too many stays")
        for wire, client in self.of_wire.items():
            mine = clients[wire]
            compare_clients(mine, client)
            # What the kernel kept may have counted, one time late [BLOCK-16]
            limit = 2 * self.options.block_timeout + LATE_SECONDS
            is_late = client.holds and kernel.now - client.since > limit
            require(not is_late, "BLOCK-16: a holder has long been due")
            if not mine.deaf:
                lack = LACKS[self.errors.get(wire, 0)]
                require_equal("PUB-6: what it lacks", mine.lacks, lack)
        for uid, user in kernel.bus.users.items():
            row = model.user_row(self, uid)
            require_equal("CTL-5: a user", user.counts, row)
        self.compare_causes(kernel.bus.counts, log)

    def compare_causes(self, counts: dict[str, int], log: list[str]) -> None:
        """Raise Differs if a client has gone for another cause."""
        known = Counter(named(rule) for _, rule in self.causes)
        del known["CONN-10"]  # no mistake
        ours: Counter[str] = Counter()
        for rule in {*counts} - {*sbus.COUNTED}:
            ours[named(rule)] += counts[rule]
        require_equal("CONN-13: causes", ours, known)
        text = "\n".join(log)
        causes = CAUSE.findall(text)
        is_whole = len(causes) == text.count("disconnect client=")
        require(is_whole, "CONN-13: a line does not say who it is")
        for number, rule in causes:
            is_right = (number, rule) in self.causes or rule in EITHER
            require(is_right, f"CONN-13: {number} is said to break {rule}")
        self.logged.update(map(named, CITED.findall(text)))
        require({*known} <= self.logged, "CONN-13: a cause is not logged")


def named(rule: str) -> str:
    """Return a rule, or what stands for those that it may be named for."""
    return "a secret" if rule in EITHER else rule


def compare_clients(mine: sbus.Client, client: model.Client) -> None:
    """Raise Differs if a client is not as the model has it."""
    is_lost = client.is_deaf or bool(client.end)
    taken = client.received if is_lost else [*mine.wire.taken]
    holds = {p.number: tuple(hold) for p, hold in mine.holds.items()}
    cause = mine.expelled[1:].partition("]")[0]
    waiting = [message.packet for message in client.backlog]
    uses = model.uses_of([client])
    counts = {name: mine.counts[name] for name in uses}
    require_equal("CONN-13: numbers", mine.number, client.number)
    require_equal("PUB-4: packets", taken, client.received)
    require_equal("BLOCK-4: backlog", [*map(bytes, mine.backlog)], waiting)
    require_equal("SUB-1: patterns", mine.patterns, dict(client.patterns))
    require_equal("BLOCK-2: modes", mine.modes, client.modes)
    require_equal("BLOCK-12: holds", holds, client.holds)
    require_equal("CONN-6: end", (cause, mine.deaf), (client.end, is_lost))
    require_equal("CTL-5: counts", counts, uses)


def forget(numbers: dict[str, Any]) -> None:
    """Remove what is counted at the end of a turn, at any depth."""
    for name in ("published", "paused_by"):
        numbers.pop(name, None)
    for member in numbers.values():
        if isinstance(member, dict):
            forget(member)
