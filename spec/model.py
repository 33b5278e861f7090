r"""The specification as a model that predicts what every client receives.

Each section below is a chapter, and each decision cites its rule.  There are
no sockets and no loop: you say what clients do, and the model says the rest.

    >>> bus = Bus()
    >>> ann, bob = bus.connect(uid=1000), bus.connect(uid=1000)
    >>> bus.send(ann, b"SUB a/*")
    >>> bus.send(bob, b"MSG a/b\0hi")
    >>> ann.received
    [b'MSG a/b\x00hi']

You are the kernel as well.  Say how many packets it keeps for Ann, and her
modes decide what becomes of the others:

    >>> ann.room = 1
    >>> bus.send(ann, b"CMSG blocking/soft/block")
    >>> bus.send(bob, b"MSG a/b\0wait")
    >>> bus.paused_by(bob), len(ann.backlog)
    ([1], 1)
    >>> bus.log[-1]
    'client 2 is paused by 1 [BLOCK-7]'
    >>> bus.read(ann)
    b'MSG a/b\x00hi'
    >>> bus.paused_by(bob), ann.received
    ([], [b'MSG a/b\x00wait'])

What a client sends stands in `sent` until the server reads it.  What the
kernel takes for a client stands in `received` until the client reads it; what
the kernel refuses stands in `backlog`.  The server does three things, each to
one client at a time:

    handle   it reads a packet, or the end, of a client that is not paused
    drain    it hands a packet of a backlog to the kernel
    expel    it disconnects a client for what that does not read

`send` and `read` do what a client does, and then all that the server can do.
If that ends differently with the order in which clients are served, or with
how far the server reads ahead, the model raises Unclear: the specification
leaves it open.  A bus can be copied, and its `snapshot` can be compared.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SERVER = 0  # the number of the publisher of answers
TURN_PACKETS = 64  # [CONN-5]
NO_ID = 65534  # a group or user that the kernel cannot name here
COUNTS = ("published", "delivered", "refused", "discarded", "paused")
MODES = {"soft": "queue", "hard": "block", "order": "queue", "echo": "on"}


class Unclear(Exception):
    """The specification leaves open what happens.

    The bus is of no use afterwards: go on with a copy from before.
    """


class Mistake(Exception):
    """A client breaks the rule that is the text of this exception."""


class Credentials(NamedTuple):
    """What the kernel says of a process [CRED-1]."""

    gid: int
    uid: int
    pid: int


class Message(NamedTuple):
    """A packet on its way, and the number of its publisher."""

    packet: bytes
    publisher: int

    @property
    def cost(self) -> int:
        """The bytes that it counts for in a backlog."""
        return len(self.packet) + 128  # [LIMIT-22]


class Hold(NamedTuple):
    """Why a receiver holds a publisher, and until when."""

    mode: str  # of the receiver, "soft" or "hard", that is block
    end_bytes: int  # the publisher goes on at so few bytes of backlog


@dataclass
class Client:
    """All that the specification knows of a client."""

    number: int
    credentials: Credentials
    is_privileged: bool  # of root or the bus owner

    # What it has asked for; BLOCK-1 and ECHO-1 say what it has at first
    patterns: Counter[bytes] = field(default_factory=Counter)
    modes: dict[str, str] = field(default_factory=MODES.copy)

    # Its packets, each way
    sent: list[bytes] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    backlog: list[Message] = field(default_factory=list)  # by arrival
    room: int | None = None  # how many may stand in `received`
    holds: dict[int, Hold] = field(default_factory=dict)  # by publisher

    # How it ends
    has_ended: bool = False  # nothing follows what stands in `sent`
    is_deaf: bool = False  # it can receive no more
    end: str = ""  # the rule, once it is leaving or gone

    # What decides nothing but answers and the block time
    counts: Counter[str] = field(default_factory=Counter, repr=False)
    since: float = field(default=0.0, repr=False)  # it reads nothing
    is_given_time: bool = field(default=False, repr=False)  # since it read

    @property
    def backlog_bytes(self) -> int:
        """The size of its backlog."""
        return sum(message.cost for message in self.backlog)

    @property
    def has_room(self) -> bool:
        """Whether the kernel takes a packet for it."""
        return self.room is None or len(self.received) < self.room


Clients = Collection[Client]


class Bus:
    """A server and its clients."""

    def __init__(self, reads_ahead: bool = True, **options: Any) -> None:
        self.options = Options(**options)
        self.reads_ahead = reads_ahead  # as many packets as it likes
        self.clients: dict[int, Client] = {}  # by number
        self.gone: list[Client] = []
        self.count = 0  # of all clients
        self.now = 0.0
        self.log: list[str] = []

    # ---- What clients do

    def connect(self, uid: int = 0, gid: int = 0, pid: int = 1) -> Client:
        """Return a new client; one that is not let in has an end."""
        self.count += 1
        is_owner = uid in (0, self.options.owner)
        client = Client(self.count, Credentials(gid, uid, pid), is_owner)
        admit(self, client)
        return client

    def send(self, client: Client, packet: bytes) -> None:
        """Have a client send a packet, and the server do what follows."""
        client.sent.append(packet)
        self.run()

    def read(self, client: Client) -> bytes:
        """Return the packet that a client receives next."""
        packet = client.received.pop(0)
        client.since = self.now
        client.is_given_time = False
        self.run()
        return packet

    def wait(self, seconds: float) -> None:
        """Let time pass, in which nobody reads [BLOCK-16].

        Raises: Unclear if it matters which of several clients is first
        """
        end = self.now + seconds
        while holders := [c for c in self.clients.values() if c.holds]:
            since = min(client.since for client in holders)
            if since + self.options.block_timeout > end:
                break
            self.now = since + self.options.block_timeout

            # Of clients that are due at once, the first may free others
            due = [c.number for c in holders if c.since == since]
            buses = [self, *(self.copy() for _ in due[1:])]
            for bus, number in zip(buses, due):
                expel(bus, bus.clients[number], "BLOCK-16")
                bus.run()
                bus.wait(0)
            if len({bus.snapshot() for bus in buses}) > 1:
                raise Unclear("which client is disconnected first")
        self.now = end

    # ---- What the server does

    def run(self) -> None:
        """Have the server do all that it can; raise Unclear if that varies."""
        futures: list[Bus] = []
        while ready := self.drained():
            for number in ready[1:]:
                futures.append(self.copy())
                handle(futures[-1], futures[-1].clients[number])
            handle(self, self.clients[ready[0]])

        for future in futures:
            while ready := future.drained():
                handle(future, future.clients[ready[0]])
            if future.snapshot() != self.snapshot():
                raise Unclear("which client is served first")

    def drained(self) -> list[int]:
        """Hand backlogs to the kernel; return the clients that are ready."""
        for client in self.clients.values():
            while client.backlog and client.has_room:
                drain(self, client)
        return self.ready()

    def ready(self) -> list[int]:
        """Return the clients whose next packet, or end, can be handled."""
        senders = [c for c in self.clients.values() if c.sent or c.has_ended]
        return [c.number for c in senders if not self.paused_by(c)]

    # ---- What one may ask

    def paused_by(self, client: Client) -> list[int]:
        """Return the receivers that hold a client."""
        return [n for n, c in self.clients.items() if client.number in c.holds]

    def of_user(self, uid: int) -> list[Client]:
        """Return the clients of a user."""
        return [c for c in self.clients.values() if c.credentials.uid == uid]

    def note(self, rule: str, client: Client, event: str) -> None:
        """Log a decision and its rule."""
        self.log.append(f"client {client.number} {event} [{rule}]")

    def copy(self) -> Bus:
        """Return a bus that can go another way."""
        twin: Bus = pickle.loads(pickle.dumps(self))
        return twin

    def snapshot(self) -> str:
        """Return what decides the future, other than the time."""
        unread = sorted((c.number, c.received) for c in self.gone)
        return repr((self.clients, unread))


# ==== 2. Routing keys ======================================================

# Whole segments: a slash stands before, or nothing
RUN = re.compile(rb"(?<![^/])!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")


def selects(pattern: bytes, key: bytes) -> bool:
    """Return whether a pattern matches a key, going byte by byte."""
    if not pattern:
        return True  # [MATCH-4]

    position = 0  # in the key
    for index in range(len(pattern)):
        byte = pattern[index : index + 1]
        if byte == b"*":
            while key[position : position + 1] not in (b"", b"/"):
                position += 1  # [MATCH-2]
        elif key[position : position + 1] != byte:
            return False  # [MATCH-1] [MATCH-6]
        elif byte == b"/" and index == len(pattern) - 1:
            return True  # [MATCH-3]
        else:
            position += 1  # [KEY-1]

    return position == len(key)  # [MATCH-1]


def check_reserved(text: bytes) -> None:
    """Raise Mistake if a key or pattern misuses the segment '!'."""
    rest = RUN.sub(b"", text) if text.startswith(SECRET) else text
    if b"!" in rest.split(b"/"):
        raise Mistake("KEY-4")  # [KEY-4]


# ==== 3. Protocol ==========================================================

CHOICES = {
    "blocking/soft": ("queue", "discard", "block", "error"),
    "blocking/hard": ("discard", "block", "error"),
    "order": ("queue", "stack", "random"),
    "echo": ("on", "off"),
}


def handle(bus: Bus, client: Client) -> None:
    """Handle a client's next packet, or the end of its input."""
    if not client.sent:
        return disconnect(bus, client, client.end or "CONN-10")
    if client.end == "LIMIT-7":  # its turn may be shorter, but not empty
        del client.sent[TURN_PACKETS:]  # [LIMIT-20]
    packet = client.sent.pop(0)  # [PKT-5]
    try:
        action, key, rest = read_form(packet)
        check_size(bus, packet, key)
        action(bus, client, key, rest)
    except Mistake as mistake:  # [PKT-3]
        disconnect(bus, client, str(mistake))


def read_form(packet: bytes) -> tuple[Action, bytes, bytes]:
    """Return what a packet asks for, its key, and what follows."""
    for action, form in FORMS.items():
        if match := form.fullmatch(packet):
            return action, match[1], match[2]  # [PKT-1]
    raise Mistake("PKT-2")  # [PKT-2]


def subscribe(bus: Bus, client: Client, pattern: bytes, rest: bytes) -> None:
    """Store a pattern, as often as it comes; the rest has no meaning."""
    check_pattern(bus, client, pattern)
    if pattern not in client.patterns:
        check_room(bus, client, pattern)
    client.patterns[pattern] += 1  # [SUB-1] [SUB-2] [SUB-3]


def unsubscribe(bus: Bus, client: Client, pattern: bytes, rest: bytes) -> None:
    """Remove a pattern once; the rest has no meaning."""
    check_pattern(bus, client, pattern)
    if pattern in client.patterns:
        client.patterns -= Counter([pattern])  # [UNSUB-1] [SUB-3]
    elif bus.options.strict:
        raise Mistake("UNSUB-2")


def publish(bus: Bus, publisher: Client, key: bytes, payload: bytes) -> None:
    """Send a packet to all clients that may hear it."""
    check_reserved(key)
    publisher.counts["published"] += 1  # [CTL-5]
    everybody = bus.clients.values()
    receivers = [c for c in everybody if hears(bus, c, publisher, key)]

    # Who is first may matter to what they share [LIMIT-12]; of more than two
    # receivers that share a limit, not all orders are tried
    twin = bus.copy() if sum(not c.has_room for c in receivers) > 1 else bus
    message = Message(b"MSG " + key + b"\0" + payload, publisher.number)
    for client in receivers:
        offer(bus, client, message)  # [PUB-1] [PUB-2] [PUB-4] [PUB-6]
    if twin is not bus:
        for client in reversed(receivers):
            offer(twin, twin.clients[client.number], message)
        if twin.snapshot() != bus.snapshot():
            raise Unclear("which client is refused first")


def control(bus: Bus, client: Client, key: bytes, rest: bytes) -> None:
    """Answer a question, or set a mode; forward nothing."""
    mode, _, choice = key.decode("latin-1").rpartition("/")  # [CTL-1]
    if key in ANSWERS:
        packet = b"CMSG " + key + b"\0" + ANSWERS[key](bus, client)
        offer(bus, client, Message(packet, SERVER))  # [CTL-3] [CRED-3]
    elif choice in CHOICES.get(mode, ()):
        set_mode(bus, client, mode.rpartition("/")[2], choice)
    else:
        bus.note("CTL-2", client, "sends what nobody knows")  # [CTL-2]


Action = Callable[[Bus, Client, bytes, bytes], None]
FORMS: dict[Action, re.Pattern[bytes]] = {
    subscribe: re.compile(rb"SUB ([^\x00]*)(\x00.*)?", re.S),
    unsubscribe: re.compile(rb"UNSUB ([^\x00]*)(\x00.*)?", re.S),
    publish: re.compile(rb"MSG ([^\x00]*)\x00(.*)", re.S),
    control: re.compile(rb"CMSG ([^\x00]*)(\x00.*)?", re.S),
}


def stats(bus: Bus, client: Client) -> bytes:
    """Return the counts that a client may know."""
    numbers: dict[str, Any] = {"client": client.number, **uses_of([client])}
    if client.is_privileged:
        users = sorted({c.credentials.uid for c in bus.clients.values()})
        numbers["users"] = {uid: user_row(bus, uid) for uid in users}
        clients = bus.clients.values()
        numbers["clients"] = {c.number: client_row(bus, c) for c in clients}
    return json.dumps(numbers).encode()  # [CTL-5]


def uses_of(clients: Clients) -> dict[str, int]:
    """Return what clients have had, and use; identical patterns are one."""
    patterns = [text for c in clients for text in c.patterns]
    return {
        **{name: sum(c.counts[name] for c in clients) for name in COUNTS},
        "patterns": len(patterns),
        "pattern_bytes": sum(map(len, patterns)),
        "backlog_bytes": sum(c.backlog_bytes for c in clients),
    }


def user_row(bus: Bus, uid: int) -> dict[str, int]:
    """Return the sums of a user, those of clients that are gone included."""
    gone = [c for c in bus.gone if c.credentials.uid == uid]
    clients = bus.of_user(uid)
    return {"clients": len(clients), **uses_of(clients + gone)}


def client_row(bus: Bus, client: Client) -> dict[str, Any]:
    """Return what root and the bus owner may know of a client."""
    return {
        "uid": client.credentials.uid,
        "pid": client.credentials.pid,
        "patterns": len(client.patterns),
        "backlog_bytes": client.backlog_bytes,
        "modes": " ".join(map("/".join, client.modes.items())),
        "paused_by": bus.paused_by(client),
    }


# ==== 4. Secret messages ===================================================

SECRET = b"!/cred/"


def whoami(bus: Bus, client: Client) -> bytes:
    """Return a client's credentials, behind the prefix."""
    start = start_of(bus.options.cred_prefix)
    return start + b"!/cred/%d/%d/%d" % client.credentials  # [CRED-2]


ANSWERS = {b"!/cred/whoami": whoami, b"stats": stats}


def start_of(prefix: bytes) -> bytes:
    """Return what stands before the credentials."""
    return prefix + b"/" if prefix else b""  # [CRED-9]


def fields_of(text: bytes, prefix: bytes) -> tuple[bytes, ...]:
    """Return the three fields and the rest; nothing if it is cut short."""
    start = start_of(prefix)
    match = RUN.match(text, len(start)) if text.startswith(start) else None
    return (*match.groups(), text[match.end() :]) if match else ()


def are_own(fields: Iterable[bytes], credentials: Credentials) -> bool:
    """Return whether each field is empty or a client's own."""
    pairs = zip(fields, credentials)  # [CRED-1] [CRED-7]
    return all(text in (b"", b"%d" % number) for text, number in pairs)


def check_pattern(bus: Bus, client: Client, pattern: bytes) -> None:
    """Raise Mistake if a client may not use a pattern."""
    prefix = bus.options.cred_prefix
    is_upward = pattern == SECRET and prefix and client.is_privileged
    if not is_upward:  # [CRED-13]
        check_reserved(pattern)
    if not pattern.startswith(SECRET):
        return
    if client.credentials.pid == 0 or NO_ID in client.credentials[:2]:
        raise Mistake("CRED-8")  # [CRED-8]
    fields = fields_of(pattern, prefix)
    is_own = fields and are_own(fields[:3], client.credentials)
    if not (is_own or is_upward):
        raise Mistake("CRED-4")  # [CRED-4]


def may_hear(
    pattern: bytes, key: bytes, credentials: Credentials, prefix: bytes = b""
) -> bool:
    """Return whether a pattern lets a client hear a key."""
    if pattern.startswith(SECRET) != key.startswith(SECRET):
        return False  # [CRED-10]
    if not key.startswith(SECRET):
        return selects(pattern, key)

    if pattern == SECRET:
        return not key.startswith(start_of(prefix))  # [CRED-13]
    fields, wanted = fields_of(key, prefix), fields_of(pattern, prefix)
    if not fields or not are_own(fields[:3], credentials):
        return False  # [CRED-11]
    pairs = zip(wanted[:3], fields)
    is_wanted = all(want in (b"", text) for want, text in pairs)  # [CRED-6]
    return is_wanted and selects(wanted[3], fields[3])


# ==== 5. Flood control =====================================================


def offer(bus: Bus, receiver: Client, message: Message) -> None:
    """Send a packet to a client: to the kernel, or to its modes."""
    # A connection that is one too many receives as any other [LIMIT-20]
    is_lost = receiver.is_deaf or receiver.end not in ("", "LIMIT-7")
    if receiver.has_room and not (receiver.backlog or is_lost):
        return take(bus, receiver, message)
    receiver.counts["refused"] += 1
    if is_lost:
        return discard(bus, receiver, 1, "CONN-22")  # [CONN-22]
    decide(bus, receiver, message)


def take(bus: Bus, receiver: Client, message: Message) -> None:
    """Have the kernel take a packet."""
    receiver.received.append(message.packet)
    receiver.counts["delivered"] += 1
    receiver.since = bus.now
    receiver.is_given_time = False


def decide(bus: Bus, receiver: Client, message: Message) -> None:
    """Decide about a packet that the kernel refuses, or that must wait."""
    soft, hard = receiver.modes["soft"], receiver.modes["hard"]  # [BLOCK-2]
    is_over = exceeds(bus, receiver, message.cost)

    # An answer of the server
    if message.publisher == SERVER and is_over:
        return expel(bus, receiver, "BLOCK-17")  # [BLOCK-17]
    if message.publisher == SERVER:
        return receiver.backlog.append(message)  # [BLOCK-17]

    # Two soft modes add nothing to the backlog, which so has no limit
    if soft == "discard":
        return discard(bus, receiver, 1, "BLOCK-5")  # [BLOCK-5]
    if soft == "error":
        return expel(bus, receiver, "BLOCK-8")  # [BLOCK-8]

    # The hard modes
    publisher = bus.clients[message.publisher]
    can_pause = may_pause(receiver, publisher)
    if is_over and hard == "discard":
        return discard(bus, receiver, 1, "BLOCK-9")  # [BLOCK-9]
    if is_over and hard == "error":
        return expel(bus, receiver, "BLOCK-11")  # [BLOCK-11]
    if is_over and not can_pause:
        return expel(bus, receiver, "BLOCK-13")  # [BLOCK-13]
    if is_over and exceeds(bus, receiver, 0, is_far=True):
        return expel(bus, receiver, "LIMIT-23")  # [LIMIT-23]

    # Whether its publisher waits with it
    before = min(receiver.backlog_bytes, bus.options.max_backlog)  # [BLOCK-24]
    receiver.backlog.append(message)  # [BLOCK-4]
    if soft == "block" and can_pause:
        hold(bus, receiver, publisher, Hold("soft", 0))  # [BLOCK-7]
    elif is_over:
        hold(bus, receiver, publisher, Hold("hard", before // 2))  # [BLOCK-10]


def may_pause(receiver: Client, publisher: Client) -> bool:
    """Return whether a receiver may hold a publisher."""
    is_same = receiver.credentials.uid == publisher.credentials.uid != NO_ID
    return receiver.is_privileged or is_same  # [BLOCK-13]


def discard(bus: Bus, receiver: Client, count: int, rule: str) -> None:
    """Lose packets for a client."""
    receiver.counts["discarded"] += count
    if count:
        bus.note(rule, receiver, f"loses {count}")


def hold(bus: Bus, receiver: Client, publisher: Client, reason: Hold) -> None:
    """Pause a publisher."""
    if bus.reads_ahead and (publisher.sent or publisher.has_ended):
        raise Unclear("how much of it is read before the pause")
    if not bus.paused_by(publisher):
        publisher.counts["paused"] += 1
    if not receiver.holds:
        receiver.since = bus.now
        receiver.is_given_time = False
    receiver.holds.setdefault(publisher.number, reason)  # [BLOCK-24]
    rule = {"soft": "BLOCK-7", "hard": "BLOCK-10"}[reason.mode]
    bus.note(rule, publisher, f"is paused by {receiver.number}")


def set_mode(bus: Bus, client: Client, mode: str, choice: str) -> None:
    """Set a mode, and free the publishers that it had paused."""
    client.modes[mode] = choice
    bus.note("ECHO-2" if mode == "echo" else "BLOCK-2", client, f"sets {mode}")
    if choice != "block" and client.holds:
        holds = client.holds.items()
        client.holds = {n: h for n, h in holds if h.mode != mode}  # [BLOCK-22]


def drain(bus: Bus, client: Client) -> None:
    """Have the kernel take the next packet of a backlog."""
    take(bus, client, client.backlog.pop(next_index(client)))
    size, holds = client.backlog_bytes, client.holds.items()
    client.holds = {n: h for n, h in holds if size > h.end_bytes}  # [BLOCK-12]


def next_index(client: Client) -> int:
    """Return which packet of a backlog is next."""
    if client.modes["order"] == "queue":
        return 0  # [ORDER-1]
    if client.modes["order"] == "stack":
        return len(client.backlog) - 1  # [ORDER-2]
    sizes = [len(message.packet) for message in client.backlog]
    return sizes.index(max(sizes))  # [ORDER-3]


def lose_backlog(bus: Bus, client: Client, rule: str) -> None:
    """Discard all that waits for a client, and free whom it holds."""
    discard(bus, client, len(client.backlog), rule)  # [CONN-22]
    client.backlog.clear()
    waiting = [*client.holds]
    client.holds.clear()
    while waiting:
        freed = bus.clients[waiting.pop()]
        if not freed.is_given_time:  # [BLOCK-23]
            freed.since = bus.now
            freed.is_given_time = True
            waiting.extend(freed.holds)


# ==== 6. Echoes ============================================================


def hears(bus: Bus, client: Client, publisher: Client, key: bytes) -> bool:
    """Return whether a client is sent a message with a key."""
    if client is publisher and client.modes["echo"] == "off":
        return False  # [ECHO-2]
    ids, prefix = client.credentials, bus.options.cred_prefix
    return any(may_hear(text, key, ids, prefix) for text in client.patterns)


# ==== 7. Limits ============================================================


@dataclass
class Options:
    """The limits, under the names of their options, and other options."""

    max_packet: int = 409_600
    max_key: int = 4096
    max_segments: int = 64
    max_patterns: int = 1024
    max_pattern_bytes: int = 262_144
    max_shapes: int = 256
    max_backlog: int = 16_777_216
    block_timeout: float = 5
    max_user_clients: int = 512
    max_user_patterns: int = 16_384
    max_user_pattern_bytes: int = 4_194_304
    max_user_backlog: int = 67_108_864
    max_clients: int = 16_384
    max_bus_shapes: int = 4096
    max_bus_backlog: int = 1_073_741_824
    strict: bool = False
    cred_prefix: bytes = b""
    owner: int = 0  # the user of the server
    users: tuple[int, ...] = ()  # who alone may connect, if any are named


def check_size(bus: Bus, packet: bytes, key: bytes) -> None:
    """Raise Mistake for a packet, key or pattern that is too large."""
    if len(packet) > bus.options.max_packet:
        raise Mistake("LIMIT-1")
    is_long = len(key) > bus.options.max_key
    if is_long or len(key.split(b"/")) > bus.options.max_segments:
        raise Mistake("LIMIT-4")


def check_room(bus: Bus, client: Client, pattern: bytes) -> None:
    """Raise Mistake if a client may not hold one more pattern."""
    options, users = bus.options, bus.of_user(client.credentials.uid)
    if exceeds_shapes(users, pattern, options.max_shapes):
        raise Mistake("LIMIT-5")  # [LIMIT-24]
    limit = limit_of_bus(client, options.max_bus_shapes)
    if exceeds_shapes(bus.clients.values(), pattern, limit):
        raise Mistake("LIMIT-12")

    uses, size = uses_of([client]), len(pattern)
    is_over = uses["pattern_bytes"] + size > options.max_pattern_bytes
    if is_over or uses["patterns"] + 1 > options.max_patterns:
        raise Mistake("LIMIT-5")
    uses = uses_of(users)
    is_over = uses["pattern_bytes"] + size > options.max_user_pattern_bytes
    is_over |= uses["patterns"] + 1 > options.max_user_patterns
    if is_over and not client.is_privileged:
        raise Mistake("LIMIT-12")


def limit_of_bus(client: Client, limit: int) -> int:
    """Return what a limit of the bus is for a client."""
    return limit if client.is_privileged else limit - limit // 4  # [LIMIT-16]


def exceeds_shapes(clients: Clients, pattern: bytes, limit: int) -> bool:
    """Return whether a pattern takes the shapes of clients over a limit."""
    shapes = {shape_of(text) for c in clients for text in c.patterns}
    shape = shape_of(pattern)
    more = 0 if shape in shapes else shape[0]
    return more > 0 and more + sum(count for count, *_ in shapes) > limit


def shape_of(pattern: bytes) -> tuple[int, ...]:
    """Return what is left of a pattern without its literal bytes.

    The first number is that of its segments.  What matches nothing has none.
    """
    if re.search(rb"\*[^*/]", pattern):
        return (0,)
    segments = pattern.split(b"/")
    stars = (text.find(b"*") for text in segments)
    return len(segments), segments[-1] == b"", *stars


def exceeds(bus: Bus, client: Client, size: int, is_far: bool = False) -> bool:
    """Return whether so many bytes more take a backlog over a limit."""
    everybody = [*bus.clients.values()]
    bus_limit = limit_of_bus(client, bus.options.max_bus_backlog)
    backlogs = [([client], bus.options.max_backlog), (everybody, bus_limit)]
    if not client.is_privileged:
        users = bus.of_user(client.credentials.uid)
        backlogs.append((users, bus.options.max_user_backlog))  # [LIMIT-12]

    for clients, limit in backlogs:
        more = limit // 8 + (1 << 20) if is_far else 0
        if sum(c.backlog_bytes for c in clients) + size > limit + more:
            return True
    return False


# ==== 8. Connections =======================================================


def admit(bus: Bus, client: Client) -> None:
    """Let a new client in, or have it leave."""
    options, uid = bus.options, client.credentials.uid
    if options.users and uid not in (options.owner, *options.users):
        client.end = "CONN-2"
        bus.count -= 1  # it has no number [CONN-13]
        return

    limit = limit_of_bus(client, options.max_clients)
    is_crowded = len(bus.of_user(uid)) >= options.max_user_clients
    if (is_crowded and not client.is_privileged) or len(bus.clients) >= limit:
        client.has_ended = True
        client.end = "LIMIT-7"  # but it is heard [LIMIT-20]
    bus.clients[client.number] = client


def deafen(bus: Bus, client: Client) -> None:
    """Have a client receive no more."""
    client.is_deaf = True
    client.received.clear()
    lose_backlog(bus, client, "CONN-22")


def expel(bus: Bus, client: Client, rule: str) -> None:
    """Disconnect a client for what it did not read.

    It receives nothing more and holds nobody, but all that it has sent is
    handled [CONN-6].
    """
    if rule != "BLOCK-16":  # the packet that it did not take is lost as well
        discard(bus, client, 1, rule)
    lose_backlog(bus, client, rule)
    client.has_ended = True
    client.end = rule
    bus.note(rule, client, "is disconnected")


def disconnect(bus: Bus, client: Client, rule: str) -> None:
    """Close a connection: its client is gone."""
    lose_backlog(bus, client, rule)
    client.patterns = Counter()
    client.end = rule
    bus.note(rule, client, "is gone")

    del bus.clients[client.number]
    for other in bus.clients.values():
        other.holds.pop(client.number, None)

    # The counts of a user end with its last client [CTL-5]
    bus.gone.append(client)
    for other in bus.gone:
        if not bus.of_user(other.credentials.uid):
            other.counts.clear()
