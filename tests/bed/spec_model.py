"""A model of the specification: what becomes of each packet, and why.

It judges the server in rounds of many packets, of which spec/model.py, which
it has its patterns from, would say that they are unclear.  It is told what the
kernel sees and what the trace says, and raises AssertionError where a rule
forbids that.  With sbus.py it shares nothing but the names of the limits.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from typing import Any, Callable, NamedTuple, Union

import model
import sbus
from fake_kernel import OWNER
from model import CHOICES, shape_of
from packets import WHOAMI

MODES = [f"{mode}/{way}" for mode, ways in CHOICES.items() for way in ways]
Line = Union[dict[str, Any], None]  # of the trace

selects = model.selects
may_hear = functools.lru_cache(100_000)(model.may_hear)


def read_form(packet: bytes) -> tuple[str, bytes]:
    """Return the kind and the key of a packet; no kind if malformed."""
    try:
        action, key, _ = model.read_form(packet)
    except model.Mistake:
        return "", b""
    return action.__name__, key


def is_reserved(text: bytes) -> bool:
    """Return whether a key or pattern misuses the segment '!' [KEY-4]."""
    try:
        model.check_reserved(text)
    except model.Mistake:
        return True
    return False


@functools.lru_cache(100_000)
def may_use(
    pattern: bytes, own: sbus.Credentials, prefix: bytes = b""
) -> bool:
    """Return whether a client may subscribe to a pattern."""
    client = model.Client(0, model.Credentials(*own), is_privileged=False)
    try:
        model.check_pattern(model.Bus(cred_prefix=prefix), client, pattern)
    except model.Mistake:
        return False
    return True


class Message(NamedTuple):
    """A packet on its way to clients."""

    packet: bytes
    publisher: Party | None  # nobody's, if it is an answer
    number: int = 0  # in the trace

    @property
    def cost(self) -> int:
        """What it counts for in a backlog."""
        return len(self.packet) + 128


class Hold(NamedTuple):
    """How long a receiver pauses a publisher: until few bytes of backlog wait.

    The model may not know whether it is paused, nor how many are few.
    """

    is_sure: bool
    least: float  # so few bytes of backlog surely free the publisher
    most: float  # more bytes surely do not
    mode: str  # soft or hard: which is block; nothing if that is not known

    def is_on(self, waiting: int) -> bool:
        """Return whether the publisher surely is paused."""
        return self.is_sure and waiting > self.most


class Party:
    """What the specification says of one client."""

    def __init__(self, own: sbus.Credentials) -> None:
        self.own = own
        self.number = 0
        self.patterns: Counter[bytes] = Counter()
        self.echo = True
        self.soft, self.hard, self.order = "queue", "block", "queue"  # BLOCK-1
        self.fresh: list[Message] = []  # routed to it in this turn
        self.backlog: list[Message] = []  # by arrival
        self.queued = 0  # bytes of it that came in this turn
        self.is_refused = False  # what is the first of fresh
        self.is_leaving = False  # whatever is for it is lost
        self.is_wrong = False  # it has broken a rule
        self.is_expelled = False  # for what it did not read
        self.is_at_end = False  # an empty packet before it is taken for it
        self.may_be_blamed = {False}  # when it was closed
        self.is_closed = False
        self.holds: dict[Party, Hold] = {}
        self.since = 0.0  # it may hold somebody, or has taken a packet
        self.surely_since = 0.0  # likewise, and surely holds somebody
        self.pauses = 0  # that may have been counted
        self.counts: Counter[str] = Counter()
        self.is_privileged = own.uid in (0, OWNER)

    @property
    def waiting(self) -> int:
        """The bytes of its backlog."""
        return sum(one.cost for one in self.backlog)

    def may_pause(self, publisher: Party) -> bool:
        """Return whether it may hold a publisher up [BLOCK-13]."""
        is_same = self.own.uid == publisher.own.uid != 65534
        return is_same or self.is_privileged

    def uses(self) -> dict[str, int]:
        """Return what it uses of what is limited."""
        return {
            "patterns": len(self.patterns),
            "pattern_bytes": sum(map(len, self.patterns)),
            "backlog_bytes": self.waiting,
        }

    def next_index(self) -> int:
        """Return which packet of its backlog is to be sent next."""
        if self.order == "queue":  # [ORDER-1]
            return 0
        if self.order == "stack":  # [ORDER-2]
            return len(self.backlog) - 1
        sizes = [len(one.packet) for one in self.backlog]
        return sizes.index(max(sizes))  # [ORDER-3]

    def surely_holds(self) -> bool:
        """Return whether it has to hold somebody."""
        waiting = self.waiting
        return any(hold.is_on(waiting) for hold in self.holds.values())

    def let_go(self) -> None:
        """Free those who surely are free; be sure of none who may be."""
        for one, hold in [*self.holds.items()]:
            if self.waiting <= hold.least or one.is_closed:
                del self.holds[one]
            elif self.waiting <= hold.most:
                self.holds[one] = hold._replace(is_sure=False)


class Model:
    """What clients are owed, as the server reads packet after packet."""

    def __init__(
        self, options: argparse.Namespace, clock: Callable[[], float]
    ) -> None:
        self.options = options
        self.prefix = options.cred_prefix.rstrip(b"/")
        self.clock = clock
        self.parties: dict[Party, None] = {}  # those that are connected
        self.past: dict[int, Counter[str]] = {}  # by user: of those who left
        self.messages = 0
        self.freed = 0  # bytes of backlogs that were lost in this turn

    def open(self, party: Party, number: int) -> Line:
        """Let a client in; return what the trace says of it."""
        party.number = number
        self.parties[party] = None
        self.past.setdefault(party.own.uid, Counter())
        return {"ev": "open", "c": number, **party.own._asdict()}

    def close(self, party: Party) -> None:
        """Forget a client that is gone."""
        self.lose_rest(party)
        del self.parties[party]
        party.is_closed = True
        for other in self.parties:
            other.let_go()
        self.past[party.own.uid].update(party.counts)
        if not self.of_user(party.own.uid):
            del self.past[party.own.uid]

    def may_connect(self, party: Party) -> bool:
        """Return whether the user of a client may connect [CONN-2]."""
        some = self.options.user
        return not some or party.own.uid in (OWNER, *some)

    def is_crowded(self, party: Party) -> bool:
        """Return whether a newcomer that is here is one too many [LIMIT-7]."""
        most = self.options.max_clients
        if not party.is_privileged:
            most -= most // 4  # [LIMIT-16]
            users = self.of_user(party.own.uid)
            if len(users) > self.options.max_user_clients:
                return True
        return bool(len(self.parties) > most)

    def of_user(self, uid: int) -> list[Party]:
        """Return the connected clients of a user."""
        return [one for one in self.parties if one.own.uid == uid]

    # ---- What a packet means

    def handle(self, sender: Party, packet: bytes) -> Line:
        """Do what a packet asks for; return what the trace says of it."""
        kind, key = read_form(packet)
        sender.is_wrong = self.is_wrong(sender, kind, key)
        sender.is_wrong |= len(packet) > self.options.max_packet  # [LIMIT-1]
        if sender.is_wrong:
            return None
        line = {"c": sender.number}
        if kind == "publish":
            more = self.publish(sender, key, packet)
            return {"ev": "msg", **line, **more}
        text = key.decode("latin-1")
        if kind == "control":
            self.control(sender, text)
            return {"ev": "ctl", **line, "key": text}
        held = sender.patterns[key]
        change = 1 if kind == "subscribe" else -1  # [SUB-2] [UNSUB-1]
        sender.patterns[key] = max(0, held + change)
        sender.patterns = +sender.patterns
        is_race = kind == "unsubscribe" and not held  # [UNSUB-2]
        event = kind.replace("subscribe", "sub")
        return None if is_race else {"ev": event, **line, "pattern": text}

    def is_wrong(self, sender: Party, kind: str, key: bytes) -> bool:
        """Return whether a packet is to disconnect its sender."""
        options = self.options
        is_long = len(key.split(b"/")) > options.max_segments
        if not kind or is_long or len(key) > options.max_key:  # [LIMIT-4]
            return True
        if kind == "control":
            return False
        if kind == "publish":
            return is_reserved(key)
        if not may_use(key, sender.own, self.prefix):
            return True
        if kind == "unsubscribe":  # [UNSUB-2]
            return options.strict and key not in sender.patterns
        return key not in sender.patterns and not self.has_room(sender, key)

    def has_room(self, sender: Party, pattern: bytes) -> bool:
        """Return whether a client may hold one more pattern [LIMIT-5]."""
        options = self.options
        users = self.of_user(sender.own.uid)
        shapes = {shape_of(text) for one in users for text in one.patterns}
        shapes = (shapes | {shape_of(pattern)}) - {None}
        owners = [("max", [sender])]
        if not sender.is_privileged:  # [LIMIT-12]
            owners.append(("max_user", users))
        for start, some in owners:
            every = [text for one in some for text in one.patterns] + [pattern]
            most = getattr(options, f"{start}_pattern_bytes")
            if sum(map(len, every)) > most:
                return False
            if len(every) > getattr(options, f"{start}_patterns"):
                return False
        return bool(len(shapes) <= options.max_shapes)

    def publish(
        self, sender: Party, key: bytes, packet: bytes
    ) -> dict[str, Any]:
        """Owe a packet to all that may hear it [PUB-1] [PUB-2] [PUB-3]."""
        self.messages += 1
        message = Message(packet, sender, self.messages)
        sender.counts["published"] += 1
        for party in self.parties:
            some = party.patterns if party is not sender or party.echo else ()
            if any(may_hear(one, key, party.own, self.prefix) for one in some):
                party.fresh.append(message)  # [ECHO-2]
        size = len(packet) - len(b"MSG " + key + b"\0")
        text = key.decode("latin-1")
        return {"m": self.messages, "key": text, "size": size}

    def control(self, sender: Party, key: str) -> None:
        """Set a mode, or owe an answer."""
        what, _, choice = key.rpartition("/")
        if key == "!/cred/whoami":  # [CRED-2]
            own = "!/cred/{}/{}/{}".format(*sender.own).encode()
            start = self.prefix and self.prefix + b"/"
            answer = WHOAMI + b"\0" + start + own
            sender.fresh.append(Message(answer, None))
        elif choice not in CHOICES.get(what, ()):  # [CTL-2]
            return
        elif what == "order":
            sender.order = choice
        elif what == "echo":
            sender.echo = choice == "on"
        else:
            mode = what[9:]
            is_left = getattr(sender, mode) == "block" != choice
            setattr(sender, mode, choice)
            for one, hold in sender.holds.items():  # which it may let go
                if is_left and hold.mode in (mode, ""):
                    sender.holds[one] = hold._replace(is_sure=False)

    # ---- What becomes of a packet

    def offer(self, party: Party, packet: bytes) -> tuple[list[Message], int]:
        """Return where the packet is that the kernel is offered: the next."""
        if party.backlog or party.is_refused:
            self.end_turn()
            some, index = party.backlog, party.next_index()
        else:
            assert party.fresh, "sent twice, or never routed"
            some, index = party.fresh, 0
        assert some[index].packet == packet, "not the next packet"
        return some, index

    def deliver(self, party: Party, packet: bytes) -> Line:
        """Note that the kernel has taken a packet."""
        some, index = self.offer(party, packet)
        message = some.pop(index)
        if some is party.backlog:
            party.since = party.surely_since = self.clock()
            party.let_go()
        party.counts["delivered"] += 1
        line = {"ev": "send", "m": message.number, "c": party.number}
        return line if message.number else None

    def refuse(self, party: Party, packet: bytes) -> None:
        """Note that the kernel has not taken a packet."""
        self.offer(party, packet)
        party.is_refused = not party.backlog

    def excess(
        self, party: Party, size: int, is_far: bool = False
    ) -> tuple[bool, bool]:
        """Return whether so much more surely, or perhaps, breaks a limit.

        What others were routed in this turn may wait already, or not.
        """
        options = self.options
        crowd = [one for one in self.parties if one is not party]
        users = [one for one in crowd if one.own.uid == party.own.uid]
        bus_max = options.max_bus_backlog
        owners: list[tuple[list[Party], int]] = [([], options.max_backlog)]
        if not party.is_privileged:  # [LIMIT-12]
            owners.append((users, options.max_user_backlog))
            bus_max -= bus_max // 4  # [LIMIT-16]
        owners.append((crowd, bus_max))
        surely = perhaps = False
        for others, most in owners:
            most += is_far * (most // 8 + (1 << 20))
            used = party.waiting + sum(one.waiting for one in others) + size
            fresh = sum(m.cost for one in others for m in one.fresh)
            fresh += self.freed * bool(others)
            surely |= used - sum(one.queued for one in others) > most
            perhaps |= used + fresh > most
        return surely, perhaps

    def queue(self, party: Party) -> None:
        """Move what is first to a backlog: it was neither sent nor lost."""
        assert party.is_refused or party.backlog, "not offered"
        message = party.fresh.pop(0)
        surely, perhaps = self.excess(party, message.cost)
        level = min(party.waiting, self.options.max_backlog) // 2
        party.counts["refused"] += 1
        party.is_refused = False
        party.backlog.append(message)
        party.queued += message.cost
        if message.publisher is None:  # [BLOCK-17]
            assert not surely, "an answer above the limit"
            return
        soft, hard = party.soft, party.hard
        may_pause = party.may_pause(message.publisher)
        assert soft in ("queue", "block"), "queued in spite of the soft mode"
        if soft == "block" and may_pause:  # [BLOCK-7]
            self.hold(party, message.publisher, Hold(True, 0, 0, "soft"))
        elif perhaps and hard == "block" and may_pause:  # [BLOCK-10]
            hold = Hold(surely, level, level, "hard")
            self.hold(party, message.publisher, hold)
        if surely:  # [BLOCK-9] [BLOCK-11] [BLOCK-13]
            assert hard == "block" and may_pause, "queued above a limit"
            is_far, _ = self.excess(party, -message.cost, is_far=True)
            assert not is_far, "queued far above a limit"

    def hold(self, party: Party, publisher: Party, hold: Hold) -> None:
        """Have a receiver pause a publisher."""
        if publisher.is_closed:
            return
        publisher.pauses += 1
        if not party.holds:
            party.since = self.clock()
        if not party.surely_holds():
            party.surely_since = self.clock()
        old = party.holds.get(publisher, hold)
        if not old.is_sure:  # it may be paused as before, or anew
            least, most = min(old.least, hold.least), max(old.most, hold.most)
            mode = hold.mode if hold.mode == old.mode else ""
            old = Hold(hold.is_sure, least, most, mode)
        party.holds[publisher] = old

    def lose(self, line: dict[str, Any]) -> None:
        """Judge a packet that the trace says is dropped."""
        party = next(one for one in self.parties if one.number == line["c"])
        reason = line["reason"]
        party.counts["discarded"] += 1
        if reason == "deaf":  # [CONN-6] [CONN-10]
            assert party.is_leaving, "it could receive"
            some = party.backlog + party.fresh
            message = next(one for one in some if one.number == line["m"])
            if message in party.backlog:
                party.backlog.remove(message)
            else:
                party.fresh.remove(message)
                party.counts["refused"] += 1
                assert message.publisher  # whom it may have paused
                message.publisher.pauses += 1
            return
        while party.fresh[0].number != line["m"]:
            self.queue(party)
        assert party.is_refused or party.backlog, "not offered"
        if reason == "soft/discard":  # [BLOCK-5]
            assert party.soft == "discard"
        else:  # [BLOCK-9]
            _, perhaps = self.excess(party, party.fresh[0].cost)
            assert (reason, party.hard) == ("hard/discard", "discard")
            assert party.soft in ("queue", "block") and perhaps
        del party.fresh[0]
        party.is_refused = False
        party.counts["refused"] += 1

    def may_be_expelled(self, party: Party) -> bool:
        """Return whether there is a reason to disconnect a stalled client."""
        timeout = self.options.block_timeout
        if party.holds and self.clock() - party.since >= timeout:  # [BLOCK-16]
            return True
        if not party.fresh or not (party.is_refused or party.backlog):
            return False
        _, perhaps = self.excess(party, sum(one.cost for one in party.fresh))
        _, is_far = self.excess(party, 0, is_far=True)
        if is_far or (perhaps and party.hard == "error"):  # [BLOCK-11]
            return True
        publishers = {one.publisher for one in party.fresh}
        if party.soft == "error" and publishers != {None}:  # [BLOCK-8]
            return True
        return perhaps and any(  # [BLOCK-13] [BLOCK-17]
            one is None or not party.may_pause(one) for one in publishers
        )

    def note_progress(self, party: Party) -> None:
        """Note that a client reads, which the server sees in a block time."""
        party.since = self.clock()
        party.surely_since = self.clock() + self.options.block_timeout

    def leave(self, party: Party) -> None:
        """Note that all is lost that waits for a client.

        A publisher that it held has its block time anew, and so have those
        that this publisher holds [BLOCK-16].
        """
        sure, waiting = {party}, [party]
        renewed: set[Party] = set()
        while waiting:
            holder = waiting.pop()
            for publisher, hold in holder.holds.items():
                publisher.surely_since = self.clock()
                if holder in sure and hold.is_on(holder.waiting):
                    publisher.since = self.clock()
                    sure.add(publisher)
                if publisher not in renewed:
                    renewed.add(publisher)
                    waiting.append(publisher)
        self.freed += sum(one.cost for one in party.fresh + party.backlog)
        party.is_leaving = True
        party.holds = {}

    def lose_rest(self, party: Party) -> None:
        """Have a client that receives nothing more lose answers as well."""
        lost = party.fresh + party.backlog
        assert not any(one.number for one in lost), "lost, and not traced"
        party.counts["refused"] += len(party.fresh)
        party.counts["discarded"] += len(lost)
        party.fresh, party.backlog = [], []

    def end_turn(self) -> None:
        """Have all that was routed in a turn, and not sent or lost, wait."""
        for party in self.parties:
            if party.is_leaving:
                self.lose_rest(party)
            while party.fresh:
                self.queue(party)
        for party in self.parties:
            party.queued = 0
        self.freed = 0
