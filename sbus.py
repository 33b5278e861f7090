#!/usr/bin/env python3
"""sbus: a simple message bus over Unix-domain sequenced-packet sockets.

This file is a whole server for CPython 3.9 or later on Linux: copy it and
run it.  Its sections are the chapters of the specification in spec/, and an
id in brackets, such as [PUB-2], names the rule that a line keeps.

The path of a packet: Server._read (section 8) takes it from the kernel, and
Bus.handle (3) finds its receivers in a Table (2) and adds it to their
outboxes.  Server._deliver (8) offers it to the kernel, and decide (5) says
what becomes of it if the kernel refuses.

Terms: the head of a packet is what precedes the first NUL byte.  An outbox
has packets that were routed in this turn; a backlog begins with one that the
kernel refused.  A receiver holds the publishers that are paused for it.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import base64
import errno
import fcntl
import functools
import heapq
import itertools
import json
import os
import pwd
import re
import resource
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, Callable, Optional

__version__ = "0.2.0"
Options = argparse.Namespace  # the command line's, the limits among them


# ==== 1. Overview ==========================================================
#
# The server answers a mistake of a client by closing its connection, and logs
# the rule.  No other client notices [CONN-12].


class ProtocolError(Exception):
    """A client broke a rule, and is to be disconnected."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"[{rule}] {what}")
        self.rule = rule
        self.what = what


class StartError(Exception):
    """The server cannot start: one line, and exit status 1."""


def log(text: str) -> None:
    """Write a line to standard error, unless that would wait."""
    plain = re.sub("[^ -~]", "?", f"sbusd: {text}")[:299]  # [RUN-15]
    with suppress(OSError):
        if select.select((), (2,), (), 0)[1]:  # [RUN-16]
            os.write(2, plain.encode("ascii") + b"\n")


def quote(text: bytes) -> str:
    """Return a client's text as at most 80 printable characters."""
    return repr(text[:80])[:80]


# ==== 2. Routing keys ======================================================
#
# Facts
# 1. A '*' takes every byte up to the next '/' or the end, so a pattern and a
#    key are compared segment by segment, and no search ever goes back.
# 2. If more follows a '*' in its segment, the pattern matches nothing: 'a*b'.
#    A second '*' takes nothing: '**' is '*'.
# 3. The shape of a pattern is whether it is open (ends in '/'), how many
#    segments come before that, and which have a star after how many bytes.
# 4. A key and a shape determine the one pattern of that shape that could
#    match: the key's own segments, cut where the shape has a star.
# 5. So the table is a dictionary of patterns.  A key costs one look-up for
#    each shape in use, however many patterns there are.

STAR = struct.Struct("II")  # the segment of a star, and the bytes before it
Shape = tuple[int, bool, bytes]  # segments, whether it is open, its stars
Entry = tuple[Optional[Shape], list[bytes]]  # all patterns of that shape


def pattern_matches(pattern: bytes, key: bytes) -> bool:
    """Return whether a pattern matches a key: the definition."""
    form = re.escape(pattern).replace(rb"\*", rb"[^/]*(?=/|\Z)")  # [MATCH-2]
    is_open = pattern[-1:] in (b"", b"/")  # [MATCH-3] [MATCH-4]
    return bool(re.fullmatch(form + b".*" * is_open, key, re.DOTALL))


def parse_pattern(pattern: bytes) -> tuple[Shape | None, bytes]:
    """Return a pattern's shape, if it has one, and it with '**' as '*'."""
    is_open = pattern[-1:] in (b"", b"/")  # [MATCH-3] [MATCH-4]
    if re.search(rb"\*[^*/]", pattern):  # [MATCH-6]
        return None, pattern
    stars = []
    if b"*" in pattern:
        pattern = re.sub(rb"\*+", b"*", pattern)
        for index, part in enumerate(pattern.split(b"/")):
            if part[-1:] == b"*":
                stars.append(STAR.pack(index, len(part) - 1))
    size = pattern.count(b"/") + (not is_open)
    return (size, is_open, b"".join(stars)), pattern


def pattern_for(segments: list[bytes], shape: Shape) -> bytes | None:
    """Return the one pattern of a shape that could match a split key."""
    size, is_open, stars = shape  # [MATCH-1]
    if not (size < len(segments) if is_open else size == len(segments)):
        return None
    chosen = segments[:size]
    for index, length in STAR.iter_unpack(stars):  # [MATCH-2]
        chosen[index] = chosen[index][:length] + b"*"
    if is_open:
        chosen.append(b"")
    return b"/".join(chosen)


class Table:
    """The subscriptions: which clients have which patterns."""

    def __init__(self) -> None:
        # For a pattern: how many subscriptions of each client it stands for
        self._subscribers: dict[bytes, dict[Client, int]] = {}
        self._shapes: dict[Shape, int] = {}

    def change(self, entry: Entry, client: Client, step: int) -> None:
        """Add a subscription of a client, or with a step of -1 remove it."""
        shape, patterns = entry
        own, most = client.user.shapes, client.bus.options.max_shapes
        if shape is None:  # [MATCH-6]
            return
        if shape not in own and len(own) >= most:  # [LIMIT-5]
            raise over("max_shapes", len(own) + 1, most)
        add(own, shape, step)
        add(self._shapes, shape, step)
        for pattern in patterns:
            clients = self._subscribers.setdefault(pattern, {})
            add(clients, client, step)
            if not clients:
                del self._subscribers[pattern]

    def find(self, key: bytes) -> dict[Client, int]:
        """Return, as keys, the clients with a pattern for a key [PUB-1]."""
        found: dict[Client, int] = {}
        segments = key.split(b"/")
        for shape in self._shapes:
            pattern = pattern_for(segments, shape)
            if pattern in self._subscribers:
                found.update(self._subscribers[pattern])  # [PUB-2]
        return found


def add(counts: dict[Any, int], item: object, step: int) -> None:
    """Change the count of an item; an item with a count of 0 goes."""
    left = counts.pop(item, 0) + step
    if left:
        counts[item] = left


# ==== 3. Protocol ==========================================================
#
# The bus decides and does no I/O.  It leaves packets in outboxes, and their
# owners in Bus.touched, for section 8 to empty.

KINDS = {  # of packets, and the methods of Bus that handle them
    b"SUB": "subscribe",  # ^SUB ([^\x00]*)(\x00.*)?$
    b"UNSUB": "unsubscribe",  # ^UNSUB ([^\x00]*)(\x00.*)?$
    b"MSG": "publish",  # ^MSG ([^\x00]*)\x00(.*)$
    b"CMSG": "control",  # ^CMSG ([^\x00]*)(\x00(.*))?$
}
STATS_ROWS_MAX = 1_000  # so that an answer takes but milliseconds
RECENT_HEADS_MAX = 4_096
RECENT_RECEIVERS_MAX = 256  # for more, to send costs far more than to find


def parse_packet(packet: bytes, limits: Options) -> tuple[str, bytes]:
    """Return a packet's kind, and its key or pattern [PKT-1].

    Raises: ProtocolError if it is malformed [PKT-3] or above a limit.
    """
    head, nul, _ = packet.partition(b"\0")  # [KEY-1] [SUB-3] [CTL-2]
    word, space, key = head.partition(b" ")
    if word not in KINDS or not space:
        raise ProtocolError("PKT-2", f"malformed packet {quote(head)}")
    if len(key) > limits.max_key:
        raise over("max_key", len(key), limits.max_key)
    if word == b"MSG" and not nul:
        raise ProtocolError("PKT-2", f"no NUL byte after the key {quote(key)}")
    segments = key.count(b"/") + 1
    if segments > limits.max_segments:
        raise over("max_segments", segments, limits.max_segments)
    return KINDS[word], key


class NumberedPacket(bytes):
    number = 0  # of the message, for the journal


class User:
    """What the clients of one user id have in common."""

    def __init__(self, is_privileged: bool) -> None:
        self.is_privileged = is_privileged  # root, or the bus owner
        self.counts = dict.fromkeys(COUNTED, 0)
        self.shapes: dict[Shape, int] = {}  # of all patterns


class Client:
    """What the server knows of one client."""

    def __init__(self, bus: Bus, number: int, own: Credentials, user: User):
        self.bus = bus
        self.number = number  # from 1, never reused
        self.own = own
        self.user = user
        self.counts = dict.fromkeys(COUNTED, 0)
        # How often each pattern is stored [SUB-2], and what is in the table
        self.patterns: dict[bytes, tuple[int, Entry]] = {}
        self.modes = dict(DEFAULT_MODES)  # [BLOCK-1] [ECHO-1]
        self.outbox: list[Any] = []  # of packets
        self.backlog = Backlog()
        self.holding: dict[Client, float] = {}  # freed at so much backlog
        self.held_by: set[Client] = set()  # paused while there are any
        # Section 8's:
        self.wire: Any = None
        self.events = 0  # what the selector watches for
        self.last_turn = 0.0
        self.short_turns = 0  # to come, of at most one packet
        self.progressed = 0.0  # when it took a packet or began to hold
        self.resting = False  # the kernel had no memory for its packet
        self.deaf = False  # every packet for it is discarded
        self.leaving = ""  # why it is to go, once its input ends
        self.gone = False

    def __str__(self) -> str:
        return f"client={self.number} uid={self.own.uid} pid={self.own.pid}"


class Bus:
    """The clients, their subscriptions, and what their packets do."""

    def __init__(self, options: Options, owner_uid: int) -> None:
        self.options = options
        self.owner_uid = owner_uid
        self.journal: Journal | None = None
        self.clients: set[Client] = set()
        self.users: dict[int, User] = {}  # those with clients
        self.counts: dict[str, int] = defaultdict(int)  # and of broken rules
        self.touched: list[Client] = []  # those with packets in the outbox
        self._numbers = itertools.count(1)  # of clients
        self._messages = itertools.count(1)
        self._tables = Table(), Table()  # of public and of secret patterns
        # The receivers of recent public heads (b"MSG " + key)
        self._recent: dict[bytes, tuple[Client, ...]] = {}

    def tell(self, event: str, rule: str, who: Client, **facts: Any) -> None:
        """Pass an event to the journal, if there is one."""
        if self.journal:
            self.journal.note(event, rule, who, **facts)

    def open(self, own: Credentials) -> Client:
        """Return a new client with the given credentials."""
        user = User(own.uid in (0, self.owner_uid))
        user = self.users.setdefault(own.uid, user)
        client = Client(self, next(self._numbers), own, user)
        self.clients.add(client)
        count(client, CLIENTS, 1)
        self.tell("open", "CRED-1", client, **own._asdict())
        return client

    def close(self, client: Client, reason: str) -> None:
        """Forget a client and its subscriptions."""
        for pattern, (_, entry) in client.patterns.items():
            self._store(client, pattern, entry, -1)
        count(client, CLIENTS, -1)
        if not client.user.counts[CLIENTS]:
            del self.users[client.own.uid]
        self.clients.remove(client)
        self.tell("close", "CONN-10", client, reason=reason)

    def handle(self, client: Client, packet: bytes, whole: Any = None) -> bool:
        """Do what a packet asks for; return whether it publishes.

        Of a large packet this is only the start; *whole* is a view of all.
        Raises: ProtocolError if the packet breaks a rule.
        """
        end = packet.find(b"\0")
        head = packet[:end] if end > 0 else b""
        receivers = self._recent.get(head)
        if receivers is None:
            kind, key = parse_packet(packet, self.options)
            if kind != "publish":  # subscribe, unsubscribe, control
                getattr(self, kind)(client, key)
                return False
            if len(self._recent) >= RECENT_HEADS_MAX:
                self._recent.clear()
            receivers = self._receivers_of(key, head)
        if client.modes["echo"] == "off":  # [ECHO-2]
            receivers = tuple(one for one in receivers if one is not client)
        packet = whole or packet
        if self.journal:
            packet = self._numbered(client, packet, len(receivers))
        for receiver in receivers:  # the publisher is one like others [PUB-1]
            if not receiver.outbox:
                self.touched.append(receiver)
            receiver.outbox.append(packet)  # as it came [PUB-4]
        return True

    def subscribe(self, client: Client, pattern: bytes) -> None:
        """Store a pattern for a client, or count it once more [SUB-1]."""
        stored, entry = client.patterns.get(pattern, (0, None))
        if entry is None:
            shape, plain = parse_pattern(pattern)
            entry = shape, places_of(plain, client)
            error = excess(client, PATTERNS, 1)
            error = error or excess(client, PATTERN_BYTES, len(pattern))
            if error:
                raise error
            self._store(client, pattern, entry, 1)
        client.patterns[pattern] = stored + 1, entry
        rule = "SUB-2" if stored else "SUB-1"
        self.tell("sub", rule, client, pattern=pattern)

    def _store(
        self, client: Client, pattern: bytes, entry: Entry, step: int
    ) -> None:
        """Store a pattern of a client, or with a step of -1 remove it."""
        self._tables[pattern.startswith(SECRET)].change(entry, client, step)
        count(client, PATTERNS, step)
        count(client, PATTERN_BYTES, step * len(pattern))
        self._recent.clear()

    def unsubscribe(self, client: Client, pattern: bytes) -> None:
        """Remove one of a client's identical patterns [UNSUB-1]."""
        stored, entry = client.patterns.pop(pattern, (0, None))
        if entry is None:
            places_of(pattern, client)  # raises if it may not
            if self.options.strict:  # a server MAY
                raise ProtocolError("UNSUB-2", f"not stored: {quote(pattern)}")
            return self.tell("ignore", "UNSUB-2", client, pattern=pattern)
        if stored > 1:
            client.patterns[pattern] = stored - 1, entry
        else:
            self._store(client, pattern, entry, -1)
        self.tell("unsub", "UNSUB-1", client, pattern=pattern)

    def _receivers_of(self, key: bytes, head: bytes) -> tuple[Client, ...]:
        """Return the receivers of a message [PUB-3], and remember them."""
        check_reserved(key)
        if key.startswith(SECRET):  # no public pattern is asked [CRED-10]
            found = self._tables[True].find(key)  # the second check [CRED-11]
            return tuple(one for one in found if fields_fit(key, one))
        receivers = tuple(self._tables[False].find(key))
        if len(receivers) <= RECENT_RECEIVERS_MAX:
            self._recent[head] = receivers
        return receivers

    def _numbered(self, client: Client, packet: bytes, found: int) -> bytes:
        """Note a message; return its packet with a number for the journal."""
        numbered = NumberedPacket(packet)
        numbered.number = next(self._messages)
        key, _, payload = numbered[4:].partition(b"\0")
        is_secret = key.startswith(SECRET)  # its payload is nobody's [TRACE-4]
        rule, shown = ("CRED-11", None) if is_secret else ("PUB-1", payload)
        what = {"key": key, "size": len(payload), "m": numbered.number}
        self.tell("msg", rule, client, **what, receivers=found, payload=shown)
        return numbered

    def control(self, client: Client, key: bytes) -> None:
        """Do what a control packet asks for; forward nothing [CTL-1]."""
        rule = "CTL-2"  # an unknown one is ignored
        if key in CHOICES:
            mode, choice, rule = CHOICES[key]
            was, client.modes[mode] = client.modes[mode], choice  # [BLOCK-2]
            # Soft mode block holds until the backlog is empty [BLOCK-7]
            if was == "block" and choice != "block" != client.modes["soft"]:
                client.holding = dict.fromkeys(client.holding, sys.maxsize)
        elif key in QUESTIONS:
            question, rule = QUESTIONS[key]
            if not client.outbox:
                self.touched.append(client)
            # It comes after all that was routed before [CTL-3] [CRED-3]
            client.outbox.append(b"CMSG " + key + b"\0" + question(client))
        self.tell("ctl", rule, client, key=key)


def stats_of(client: Client) -> bytes:
    """Return, as JSON, the counts that a client may know [CTL-5]."""
    most = client.bus.options.max_packet - len(b"CMSG stats\0")
    stats: dict[str, Any] = {"client": client.number, **client.counts}
    del stats[CLIENTS]  # which says nothing of one
    if client.user.is_privileged:
        stats.update(users={}, clients={})
        room = most - len(json.dumps(stats))
        for table, number, row in rows_of(client.bus):
            room -= len(f'"{number}": {row}, ')  # as long as it is in JSON
            if room < 0:
                break
            stats[table][number] = row
    answer = json.dumps(stats).encode("ascii")
    return answer if len(answer) <= most else b"{}"


def rows_of(bus: Bus) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield users and clients in turn, those with large backlogs first."""
    clients = [*bus.clients]  # the paused ones come next, then all others
    clients.sort(key=lambda one: -(one.counts[BACKLOG] or bool(one.held_by)))
    pairs = itertools.zip_longest(clients, bus.users.items())
    for one, user in itertools.islice(pairs, STATS_ROWS_MAX):
        if user:
            yield "users", user[0], user[1].counts
        yield "clients", one.number, {
            "uid": one.own.uid,
            "pid": one.own.pid,
            PATTERNS: one.counts[PATTERNS],
            BACKLOG: one.counts[BACKLOG],
            "modes": " ".join(map("/".join, one.modes.items())),
            "paused_by": sorted(holder.number for holder in one.held_by),
        }


# ==== 4. Secret messages ===================================================
#
# Two checks guard a secret: places_of when a client subscribes, fields_fit
# at every delivery.  A mistake in one of them leaks nothing.

SECRET = b"!/cred/"
WHOAMI = b"!/cred/whoami"
OVERFLOW_ID = 65_534  # stands for every user or group the kernel cannot name
FIELDS = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")
RUNS = re.compile(rb"(?:^|(?<=/))!/cred/[0-9]*/[0-9]*/[0-9]*/")

# What the kernel says of a client [CRED-1], in the order of secret keys
Credentials = namedtuple("Credentials", "gid uid pid")


def check_reserved(text: bytes) -> None:
    """Raise ProtocolError if a segment '!' begins no secret [KEY-4]."""
    if b"!" in text:
        rest = RUNS.sub(b"", text) if FIELDS.match(text) else text
        if b"!" in rest.split(b"/"):
            raise ProtocolError("KEY-4", f"reserved '!' in {quote(text)}")


def match_fields(text: bytes, client: Client) -> re.Match[bytes] | None:
    """Match the fields of a secret text, after the bus's prefix [CRED-9]."""
    start = client.bus.options.cred_prefix
    return FIELDS.match(text, len(start)) if text.startswith(start) else None


def fields_fit(text: bytes, client: Client) -> bool:
    """Return whether each field is empty or the client's own number."""
    match = match_fields(text, client)
    return match is not None and all(
        field in (b"", b"%d" % number)  # in no other spelling [CRED-7]
        for field, number in zip(match.groups(), client.own)
    )


def places_of(pattern: bytes, client: Client) -> list[bytes]:
    """Return the patterns that a table stores for a client's pattern.

    For a secret one these are up to eight: an empty field stands for the
    client's own number [CRED-6] and for an empty field of a key [CRED-7].
    Raises: ProtocolError if the client may not use the pattern.
    """
    check_reserved(pattern)
    if not pattern.startswith(SECRET):
        return [pattern]
    match = match_fields(pattern, client)
    numbers = [b"%d" % number for number in client.own]
    fields = match.groups() if match else ()
    choices = [{f, f or n} for f, n in zip(fields, numbers)]
    if not match or any(n not in c for n, c in zip(numbers, choices)):
        raise ProtocolError("CRED-4", f"not its own: {quote(pattern)}")
    if client.own.pid == 0 or OVERFLOW_ID in client.own[:2]:
        raise ProtocolError("CRED-8", "the kernel cannot name the client")
    start, rest = pattern[: match.start(1)], pattern[match.end(3) :]
    return [start + b"/".join(f) + rest for f in itertools.product(*choices)]


def whoami(client: Client) -> bytes:
    """Return a client's credentials, as other clients address it [CRED-2]."""
    prefix = client.bus.options.cred_prefix  # [CRED-9]
    return bytes(prefix + SECRET + b"%d/%d/%d" % client.own)


def parse_prefix(text: str) -> bytes:
    """Return a prefix of the command line, and a '/' after it [CRED-9]."""
    if re.fullmatch(r"!/cred/\d+/\d+/\d+(/!/cred/\d+/\d+/\d+)*", text, re.A):
        return text.encode("ascii") + b"/"
    raise argparse.ArgumentTypeError(f"{text!r} is not !/cred/GID/UID/PID")


QUESTIONS: dict[bytes, tuple[Callable[[Client], bytes], str]] = {
    WHOAMI: (whoami, "CRED-2"),
    b"stats": (stats_of, "CTL-5"),
}


# ==== 5. Flood control =====================================================
#
# Modes belong to the receiver, and matter once the kernel refuses a packet.

DEFAULT_MODES = {"soft": "queue", "hard": "block", "order": "queue"}
CHOICES = {  # the mode, its value, the rule
    b"blocking/soft/queue": ("soft", "queue", "BLOCK-4"),
    b"blocking/soft/discard": ("soft", "discard", "BLOCK-5"),
    b"blocking/soft/block": ("soft", "block", "BLOCK-7"),
    b"blocking/soft/error": ("soft", "error", "BLOCK-8"),
    b"blocking/hard/discard": ("hard", "discard", "BLOCK-9"),
    b"blocking/hard/block": ("hard", "block", "BLOCK-10"),
    b"blocking/hard/error": ("hard", "error", "BLOCK-11"),
    b"order/queue": ("order", "queue", "ORDER-1"),
    b"order/stack": ("order", "stack", "ORDER-2"),
    b"order/random": ("order", "random", "ORDER-3"),
}
PACKET_OVERHEAD_BYTES = 128


def cost(packet: bytes) -> int:
    """Return the bytes that a packet counts for in a backlog [LIMIT-12]."""
    return len(packet) + PACKET_OVERHEAD_BYTES


def decide(
    receiver: Client, publisher: Client, packet: bytes
) -> tuple[str, str]:
    """Return what becomes of a refused packet, and the rule that says so.

    The first is "queue", or "pause" (queue it and pause its publisher), or
    the reason to discard it.
    Raises: ProtocolError if the receiver is to be disconnected.
    """
    soft, hard = receiver.modes["soft"], receiver.modes["hard"]
    above = excess(receiver, BACKLOG, cost(packet))
    if receiver.deaf:
        return "deaf", "CONN-6"
    if packet[:5] == b"CMSG ":  # an answer is never discarded
        if above:
            raise ProtocolError("BLOCK-17", above.what)
        return "queue", "BLOCK-17"
    if soft == "discard":
        return "soft/discard", "BLOCK-5"
    if soft == "error":
        raise ProtocolError("BLOCK-8", "stalled in soft mode error")
    if not above:
        if soft == "block" and may_pause(receiver, publisher):
            return "pause", "BLOCK-7"
        return "queue", "BLOCK-13" if soft == "block" else "BLOCK-4"
    if hard == "discard":
        return "hard/discard", "BLOCK-9"
    if hard == "error":
        raise ProtocolError("BLOCK-11", above.what)
    if not may_pause(receiver, publisher):
        raise ProtocolError("BLOCK-13", above.what)
    if excess(receiver, BACKLOG, 0, is_far=True):
        raise ProtocolError("LIMIT-12", f"far above: {above.what}")
    return "pause", "BLOCK-10"


def may_pause(receiver: Client, publisher: Client) -> bool:
    """Return whether a receiver may have a publisher paused [BLOCK-13]."""
    uid = receiver.own.uid
    is_same_user = uid == publisher.own.uid and uid != OVERFLOW_ID
    return receiver.user.is_privileged or is_same_user


def hold(receiver: Client, publisher: Client) -> None:
    """Pause a publisher until enough of a backlog has gone."""
    if publisher not in receiver.holding:
        most = min(receiver.counts[BACKLOG], receiver.bus.options.max_backlog)
        is_soft = receiver.modes["soft"] == "block"  # [BLOCK-7] [BLOCK-10]
        receiver.holding[publisher] = 0 if is_soft else most // 2
        count(publisher, "paused", not publisher.held_by)  # by the first
        publisher.held_by.add(receiver)


def release(receiver: Client) -> list[Client]:
    """Free and return publishers, if the backlog is down [BLOCK-12]."""
    waiting = receiver.counts[BACKLOG]
    freed = [one for one, most in receiver.holding.items() if waiting <= most]
    for publisher in freed:
        del receiver.holding[publisher]
        publisher.held_by.remove(receiver)
    return freed


class Backlog:
    """The packets that wait for one client."""

    def __init__(self) -> None:
        self.packets: OrderedDict[int, bytes] = OrderedDict()  # by arrival
        self._arrivals = 0
        self._largest: list[int] = []  # a heap of arrival - (size << 48)

    def push(self, packet: bytes) -> None:
        """Add the newest packet."""
        self._arrivals += 1
        self.packets[self._arrivals] = packet
        if self._largest:
            rank = self._arrivals - (len(packet) << 48)
            heapq.heappush(self._largest, rank)
            if len(self._largest) > 2 * len(self.packets):
                self._largest.clear()  # most of it was sent in another order

    def first(self, order: str) -> int:
        """Return the arrival number of the packet to send next."""
        if order == "queue":  # the oldest [ORDER-1]
            return next(iter(self.packets))
        if order == "stack":  # the newest [ORDER-2]
            return next(reversed(self.packets))
        while True:  # the largest, of equals the oldest [ORDER-3]
            if not self._largest:
                ranks = [n - (len(p) << 48) for n, p in self.packets.items()]
                heapq.heapify(ranks)
                self._largest = ranks
            number = self._largest[0] & ((1 << 48) - 1)
            if number in self.packets:
                return number
            heapq.heappop(self._largest)


# ==== 6. Echoes ============================================================
#
# A client that has switched its echo off does not receive what it publishes.

DEFAULT_MODES["echo"] = "on"
CHOICES[b"echo/on"] = ("echo", "on", "ECHO-1")
CHOICES[b"echo/off"] = ("echo", "off", "ECHO-2")


# ==== 7. Limits ============================================================

LIMITS = {  # by option: the default, the rule, and what is counted
    "max_packet": (409_600, "LIMIT-1", "bytes of a packet"),
    "max_key": (4_096, "LIMIT-4", "bytes of a key or pattern"),
    "max_segments": (64, "LIMIT-4", "segments of a key or pattern"),
    "max_patterns": (1_024, "LIMIT-5", "patterns of a client"),
    "max_pattern_bytes": (1 << 18, "LIMIT-5", "pattern bytes of a client"),
    "max_backlog": (1 << 24, "LIMIT-12", "bytes of backlog of a client"),
    "max_clients": (16_384, "LIMIT-7", "clients"),
    "block_timeout": (5.0, "BLOCK-16", "seconds to read while pausing others"),
    "max_shapes": (256, "LIMIT-5", "shapes of patterns of a user"),
    "max_user_clients": (512, "LIMIT-7", "clients of a user"),
    "max_user_patterns": (16_384, "LIMIT-12", "patterns of a user"),
    "max_user_pattern_bytes": (1 << 22, "LIMIT-12", "pattern bytes of a user"),
    "max_user_backlog": (1 << 26, "LIMIT-12", "bytes of backlog of a user"),
    "max_bus_backlog": (1 << 30, "LIMIT-12", "bytes of backlog of the bus"),
}
CLIENTS, PATTERNS = "clients", "patterns"
PATTERN_BYTES, BACKLOG = "pattern_bytes", "backlog_bytes"
USES = {  # what is used: the options for a client, for a user, for the bus
    CLIENTS: ("", "max_user_clients", "max_clients"),
    PATTERNS: ("max_patterns", "max_user_patterns", ""),
    PATTERN_BYTES: ("max_pattern_bytes", "max_user_pattern_bytes", ""),
    BACKLOG: ("max_backlog", "max_user_backlog", "max_bus_backlog"),
}
COUNTED = (*USES, "published", "delivered", "refused", "discarded", "paused")
DESCRIPTORS_KEPT = 16  # for all that is not a client


def over(limit: str, used: int, most: float) -> ProtocolError:
    """Return the error for a client that exceeds a limit."""
    _, rule, what = LIMITS[limit]
    return ProtocolError(rule, f"{used} {what}, over {most}")


def count(client: Client, what: str, amount: int) -> None:
    """Change a count of a client, of its user, and of the bus."""
    client.counts[what] += amount
    client.user.counts[what] += amount
    client.bus.counts[what] += amount


def excess(
    client: Client, what: str, more: int, is_far: bool = False
) -> ProtocolError | None:
    """Return the error if so much more would exceed a limit, or None."""
    is_privileged = client.user.is_privileged
    owners: tuple[Any, ...] = (client, client.user, client.bus)
    for owner, name in zip(owners, USES[what]):
        if not name or (owner is client.user and is_privileged):
            continue
        most = getattr(client.bus.options, name)
        if owner is client.bus and not is_privileged:  # [LIMIT-16]
            most -= most // 4
        if is_far:  # [LIMIT-12]
            most += most // 8 + (1 << 20)
        if owner.counts[what] + more > most:
            return over(name, owner.counts[what] + more, most)
    return None


def parse_limit(name: str, text: str) -> float:
    """Return a limit of the command line; only seconds may be fractions."""
    if text == "unlimited" and name != "max_packet":
        return sys.maxsize
    form = "[0-9]{1,15}" + r"(\.[0-9]{1,9})?" * (name == "block_timeout")
    if re.fullmatch(form, text) and float(text):
        return float(text) if "." in text else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def fit_limits(options: Options) -> None:
    """Lower limits to what the kernel gives, or refuse to start [RUN-1]."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            size = min(options.max_packet // 2 + 32, 1 << 30)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            ours.send(bytes(options.max_packet))
        except (OSError, MemoryError, OverflowError):
            raise StartError("--max-packet: the kernel takes less") from None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard - DESCRIPTORS_KEPT
    if most <= 0:
        raise StartError(f"ulimit -n is not above {DESCRIPTORS_KEPT}")
    if options.max_clients > most:
        options.max_clients, half = most, most // 2 or 1
        options.max_user_clients = min(options.max_user_clients, half)


# ==== 8. Connections =======================================================
#
# A connected client may be stalled (it has a backlog), paused (a receiver
# holds it), deaf (it receives nothing more), or leaving (it goes once all
# that it sent is handled), until it is gone.

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
SO_PASSRIGHTS = 83  # since Linux 6.16; Python has no name for it

PACKETS_PER_TURN = 64  # [CONN-5]
TURN_SECONDS = 0.001  # for a client, for a user in a round, for newcomers
SENDS_PER_TURN = 1_536  # they take some milliseconds if all are refused
BYTES_PER_TURN = 1 << 18  # to send soon, while the processor has them at hand
SHORT_TURNS = 9  # after a single packet: to look for more costs as much
REST_SECONDS = 0.05  # for what no event tells the end of
STOP_SECONDS = 1.0
CAUSE_LINES_MAX = 10  # a second, for one rule
SEND_BUFFER_BYTES = 212_992  # at least; the kernel doubles what is asked for


class Server:
    """The loop: in each round, each client that is ready has a turn."""

    def __init__(self, bus: Bus, listener: Any, selector: Any, clock: Any):
        self.bus = bus
        self.listener: socket.socket = listener
        self.selector: selectors.BaseSelector = selector
        self.clock: Callable[[], float] = clock  # in seconds
        self.stopping = False
        self._view = memoryview(bytearray(bus.options.max_packet))
        # When to look at a client again, or at the listener, without an event
        self._alarms: dict[Any, float] = {}
        # By rule: when and of whom the last lines were; how many were left out
        self._lines: dict[str, deque[tuple[float, int]]] = {}
        self._left_out: Counter[str] = Counter()
        selector.register(listener, READ, self.accept)

    def run(self) -> None:
        """Serve until told to stop, then deliver what was read [RUN-12]."""
        while not self.stopping:
            self.round(3_600.0)  # epoll takes no more than 24 days
        if self.listener not in self._alarms:
            self.selector.unregister(self.listener)
        for client in [*self.bus.clients]:
            self._watch(client)
        end = self.clock() + STOP_SECONDS
        while self.bus.counts[BACKLOG] and self.clock() < end:
            self.round(end - self.clock())
        for client in [*self.bus.clients]:
            self.disconnect(client, "stop")
        for rule, left_out in self._left_out.items():
            log(f"[{rule}] ({left_out} more)")

    def round(self, seconds: float) -> None:
        """Wait for events, and give clients that are ready their turns.

        The clients of one user share a slice of the round [CONN-5].  The one
        that has waited longest goes first; those left out are reported again.
        """
        due = min(self._alarms.values(), default=sys.maxsize)
        seconds = max(0.0, min(due - self.clock(), seconds))
        ready = self.selector.select(seconds)
        now = began = self.clock()
        self._ring(now)
        if len(ready) > 1:
            ready.sort(key=lambda one: getattr(one[0].data, "last_turn", now))
            now = self.clock()
        share = max(TURN_SECONDS, 2 * (now - began))  # sorting is not all
        spent: dict[User, float] = defaultdict(float)
        for (_, _, _, who), events in ready:
            if not isinstance(who, Client):
                who()  # lets newcomers in, or obeys a signal
            elif spent[who.user] < share and not who.gone:
                if events & WRITE:
                    self._drain(who)
                if events & READ and not who.gone:
                    self._turn(who)
                began, now = now, self.clock()
                spent[who.user] += now - began
                who.last_turn = now
        if self.bus.journal:
            self.bus.journal.flush()

    def _ring(self, now: float) -> None:
        """Listen again, and look again at clients, if their time has come."""
        for who in [who for who, due in self._alarms.items() if due <= now]:
            if self.clock() > now + TURN_SECONDS:
                break  # what is left is due in the next round
            self._alarms[who] = now + REST_SECONDS
            if who is not self.listener:
                who.resting = False
                is_due = now >= who.progressed + self.bus.options.block_timeout
                if not self._drain(who) and is_due and who.holding:
                    what = "holds publishers and takes no packet"
                    self._expel(who, ProtocolError("BLOCK-16", what))
            elif not self.stopping:
                with suppress(OSError):  # if epoll has no room, it rests on
                    self.selector.register(who, READ, self.accept)
                    del self._alarms[who]

    def accept(self) -> None:
        """Let in waiting clients, for a turn's time."""
        end = self.clock() + TURN_SECONDS
        while self.clock() < end:
            try:
                wire, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no event tells when it would succeed
                self._log_cause("LIMIT-7", -1, f"accept: {error.strerror}")
                self.selector.unregister(self.listener)
                self._alarms[self.listener] = self.clock() + REST_SECONDS
                return
            self._admit(wire)

    def _admit(self, wire: socket.socket) -> None:
        """Make a client of a new connection, and give it a first turn."""
        packed = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = struct.unpack("iII", packed)
        allowed = self.bus.options.user
        if allowed and uid not in (self.bus.owner_uid, *allowed):
            line = f"refuse uid={uid} pid={pid} [CONN-2] not a user here"
            self._log_cause("CONN-2", uid, line)
            return wire.close()
        wire.setblocking(False)
        size = max(SEND_BUFFER_BYTES, self.bus.options.max_packet // 2 + 32)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        client = self.bus.open(Credentials(gid, uid, pid))
        client.wire = wire
        self._turn(client)  # if it has said all and left, it is not too many
        error = excess(client, CLIENTS, 0)
        if error and not client.gone:  # [LIMIT-7]
            self.disconnect(client, self._blame(client, error))
        self._watch(client)

    def _turn(self, client: Client) -> None:
        """Read a run of a client's packets, and send them on."""
        ended, fault = False, None
        try:
            ended = self._read(client)
        except OSError as error:
            # A reset comes once, before the client's last packets [CONN-6]
            if not isinstance(error, ConnectionResetError):
                fault = ProtocolError("CONN-6", f"recv: {error.strerror}")
        except ProtocolError as error:
            fault = error
        for receiver in self.bus.touched:  # also before a fault [CONN-6]
            self._deliver(receiver, client)
        self.bus.touched.clear()
        if fault:
            self.disconnect(client, self._blame(client, fault))
        elif client.holding or client.held_by:  # by now, or in another mode
            self._after_change(client)
        # It may have shut down one half only, and still take packets [CONN-10]
        if ended and not (self._drain(client) and client.backlog.packets):
            self.disconnect(client, client.leaving or "end of input")

    def _read(self, client: Client) -> bool:
        """Route a run of packets; return whether the input has ended."""
        recv_into, handle = client.wire.recv_into, self.bus.handle
        view, touched, clock = self._view, self.bus.touched, self.clock
        start_max = self.bus.options.max_key + len(b"UNSUB \0")
        size, published, volume = -1, 0, 0  # nothing was read yet
        end = clock() + TURN_SECONDS
        try:  # in the order sent [PKT-5]
            for found in range(1 if client.short_turns else PACKETS_PER_TURN):
                # It takes no descriptors: the kernel closes them [CONN-7]
                size = recv_into(view, 0, socket.MSG_TRUNC)
                if not size and not client.wire.recv(1, socket.MSG_PEEK):
                    return True  # two empty packets look the same
                if size > len(view):  # it was cut, and goes nowhere [PUB-4]
                    raise over("max_packet", size, len(view))
                volume += size
                if size <= BYTES_PER_TURN:
                    published += handle(client, view[:size].tobytes())
                else:  # it is the last of this turn, and not copied
                    start = view[:start_max].tobytes()
                    published += handle(client, start, view[:size])
                is_wide = found * len(touched) > SENDS_PER_TURN
                if is_wide or volume > BYTES_PER_TURN or clock() > end:
                    break
        except BlockingIOError:  # all is read
            if size == 0:
                raise ProtocolError("PKT-2", "empty packet") from None
            client.short_turns = SHORT_TURNS if found == 1 else 0
        finally:
            count(client, "published", published)
        client.short_turns = max(0, client.short_turns - 1)
        return False

    def _deliver(self, client: Client, publisher: Client) -> None:
        """Offer an outbox to the kernel, behind the backlog [PUB-6]."""
        outbox, client.outbox, done = client.outbox, [], 0
        while done < len(outbox):
            if not (client.backlog.packets or client.deaf):
                done += self._send(client, outbox[done:])  # [BLOCK-5]
            if done < len(outbox):
                self._refuse(client, outbox[done], publisher)
                done += 1
        if client.backlog.packets or client.deaf:
            self._after_change(client)

    def _send(self, client: Client, packets: list[bytes]) -> int:
        """Offer packets to the kernel; return how many it takes."""
        send, taken = client.wire.send, 0
        try:
            for packet in packets:
                send(packet)
                taken += 1
        except OSError as error:
            client.resting = error.errno in (errno.ENOBUFS, errno.ENOMEM)
            if error.errno != errno.EAGAIN and not client.resting:
                self._deafen(client)  # it receives nothing more [CONN-6]
        count(client, "delivered", taken)
        for packet in packets[:taken] if self.bus.journal else ():
            self.bus.tell("send", "PUB-1", client, packet=packet)
        return taken

    def _refuse(self, client: Client, packet: Any, publisher: Client) -> None:
        """Carry out the decision on a refused packet."""
        count(client, "refused", 1)
        try:
            what, rule = decide(client, publisher, packet)
        except ProtocolError as error:
            self._expel(client, error)
            what, rule = "deaf", "CONN-6"
        if what not in ("queue", "pause"):
            return self._discard(client, [packet], what, rule)
        if what == "pause":
            if not client.holding:
                client.progressed = self.clock()
            hold(client, publisher)
            self.bus.tell("pause", rule, publisher, holder=client.number)
        if isinstance(packet, memoryview):
            packet = bytes(packet)
        client.backlog.push(packet)
        count(client, BACKLOG, cost(packet))
        waiting = client.counts[BACKLOG]
        self.bus.tell("queue", rule, client, packet=packet, backlog=waiting)

    def _discard(self, client: Client, lost: list[bytes], *why: str) -> None:
        """Count lost packets; log the first that a client loses."""
        reason, rule = why
        if lost and not (client.counts["discarded"] or client.leaving):
            line = f"discard {client} {reason} [{rule}]"
            self._log_cause(rule, client.own.uid, line)
        count(client, "discarded", len(lost))
        for one in lost if self.bus.journal else ():
            self.bus.tell("drop", rule, client, packet=one, reason=reason)

    def _drain(self, client: Client) -> int:
        """Offer a backlog, for a turn's time; return how many were taken."""
        backlog, taken = client.backlog, 0
        end = self.clock() + TURN_SECONDS
        while backlog.packets and self.clock() < end:
            number = backlog.first(client.modes["order"])
            if not self._send(client, [backlog.packets[number]]):
                break
            count(client, BACKLOG, -cost(backlog.packets.pop(number)))
            taken += 1
        if taken:
            client.progressed = self.clock()
        self._after_change(client)
        return taken

    def _after_change(self, client: Client) -> None:
        """Free publishers, set the alarm, and watch for the right events."""
        for publisher in release(client):
            self._watch(publisher)
            self.bus.tell("resume", "BLOCK-12", publisher)
        due = self._alarms.pop(client, sys.maxsize)
        if client.resting and client.backlog.packets:
            self._alarms[client] = min(due, self.clock() + REST_SECONDS)
        elif client.holding:  # [BLOCK-16]
            timeout = self.bus.options.block_timeout
            self._alarms[client] = client.progressed + timeout
        self._watch(client)

    def _deafen(self, client: Client) -> None:
        """Discard a client's backlog, and all packets for it from now on."""
        client.deaf = True
        lost, client.backlog = client.backlog.packets, Backlog()
        count(client, BACKLOG, -client.counts[BACKLOG])
        self._discard(client, [*lost.values()], "deaf", "CONN-6")

    def _expel(self, client: Client, error: ProtocolError) -> None:
        """Make a client leave, once all that it sent is handled [CONN-6]."""
        client.leaving = self._blame(client, error)
        self._deafen(client)
        with suppress(OSError):
            client.wire.shutdown(socket.SHUT_RDWR)
        self._after_change(client)

    def disconnect(self, client: Client, reason: str) -> None:
        """Forget a client and close its socket; nobody else notices."""
        if client.gone:  # _watch may have done so already
            return
        if client.events:
            self.selector.unregister(client.wire)
        client.gone = True
        self._deafen(client)
        client.wire.close()
        self.bus.close(client, reason)
        for holder in sorted(client.held_by, key=lambda one: one.number):
            holder.holding.pop(client, None)
            self._after_change(holder)
        self._after_change(client)  # it has no backlog, so it holds nobody
        if self.bus.options.close and not self.bus.clients:
            self.stopping = True  # [RUN-10]

    def _blame(self, client: Client, error: ProtocolError) -> str:
        """Log the cause of a disconnection, and return it [CONN-13]."""
        self.bus.counts[error.rule] += 1
        line = f"disconnect {client} {error}"
        self._log_cause(error.rule, client.own.uid, line)
        return str(error)

    def _log_cause(self, rule: str, uid: int, line: str) -> None:
        """Log at most ten lines a second for a rule, one for a user of it."""
        last = self._lines.setdefault(rule, deque(maxlen=CAUSE_LINES_MAX))
        recent = [of for when, of in last if when > self.clock() - 1]
        if uid in recent or len(recent) == CAUSE_LINES_MAX:
            self._left_out[rule] += 1
        else:
            last.append((self.clock(), uid))
            left_out = self._left_out.pop(rule, 0)
            log(f"{line} ({left_out} more)" if left_out else line)

    def _watch(self, client: Client) -> None:
        """Watch for the events that a client is ready to handle."""
        events = 0 if client.held_by or self.stopping else READ  # [BLOCK-12]
        if client.backlog.packets and not client.resting:
            events |= WRITE
        if client.gone or events == client.events:
            return
        before, client.events = client.events, events
        try:
            if not before:
                self.selector.register(client.wire, events, client)
            elif events:
                self.selector.modify(client.wire, events, client)
            else:
                self.selector.unregister(client.wire)
        except OSError as error:  # epoll has no room for it
            client.events = 0
            fault = ProtocolError("LIMIT-7", f"epoll: {error.strerror}")
            self.disconnect(client, self._blame(client, fault))


# ==== 9. Running ===========================================================

SOCKET_KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # [CONN-1]
NAME_BYTES = 108  # of an address in the kernel
ABSTRACT = "/dev/unix/abstract"
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SIGNALS = {*STOP_SIGNALS, signal.SIGUSR1}


def default_address() -> str:
    """Return where to listen without -a [ADDR-1]."""
    pid = os.environ.pop("LISTEN_PID", "")
    passed = os.environ.pop("LISTEN_FDS", "")
    if passed and pid == str(os.getpid()):  # by systemd
        if passed != "1":
            raise StartError(f"LISTEN_FDS is {passed}; one socket is needed")
        return "/dev/fd/3"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if os.environ.get("SBUS_ADDRESS"):
        return os.environ["SBUS_ADDRESS"]
    if not directory and os.getuid():
        raise StartError("XDG_RUNTIME_DIR is not set; use -a ADDRESS")
    return f"{directory if os.getuid() else '/run'}/sbus.socket"


def open_listener(options: Options, cleanup: ExitStack) -> socket.socket:
    """Return a listening socket; complete its address in the options."""
    address = options.address
    try:
        is_open = address.startswith("/dev/fd/")
        listener = inherit(address) if is_open else socket.socket(*SOCKET_KIND)
        cleanup.enter_context(listener)
        if address == ABSTRACT or address.startswith(ABSTRACT + "/"):
            name = abstract_name(address)
            options.address = f"{ABSTRACT}/{name.hex()}"
            listener.bind(name)
        elif not is_open:
            bind_path(listener, options, cleanup)
        with suppress(OSError):  # before Linux 6.16 [CONN-7]
            listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.listen(4_096)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise StartError(f"{address}: {error.strerror}") from None


def inherit(address: str) -> socket.socket:
    """Return a socket that the parent process opened [ADDR-1]."""
    number = address[len("/dev/fd/") :]
    if not re.fullmatch("[0-9]{1,9}", number):
        raise StartError(f"{address}: not a descriptor's number")
    listener = socket.socket(fileno=os.dup(int(number)))  # it may be 0 to 2
    if (listener.family, listener.type) != SOCKET_KIND:
        raise StartError(f"{address}: not a Unix-domain SEQPACKET socket")
    return listener


def abstract_name(address: str) -> bytes:
    """Return the 108 bytes that an abstract address stands for [ADDR-4]."""
    if address == ABSTRACT:
        return b"\0" + os.urandom(NAME_BYTES - 1)
    digits = address[len(ABSTRACT) + 1 :]
    if not re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
        raise StartError(f"{address}: needs 2 to 216 hex digits, first 00")
    return bytes.fromhex(digits).ljust(NAME_BYTES, b"\0")


def bind_path(
    listener: socket.socket, options: Options, cleanup: ExitStack
) -> None:
    """Create a socket at a path, which becomes an absolute one."""
    path = options.address
    if not 0 < len(os.fsencode(path)) < NAME_BYTES or "\0" in path:
        raise StartError(f"a path has 1 to 107 bytes, none NUL: {path!r}")
    options.address = os.path.join(os.getcwd(), path)
    with ExitStack() as lock:
        lock_directory(os.path.dirname(options.address), lock)
        make_way(path, options.replace)
        mode = 0o700 | options.group * 0o070 | options.others * 0o007
        before = os.umask(0o777 & ~mode)  # chmod would come too late [ADDR-6]
        listener.bind(os.fsencode(path))
        os.umask(before)
        # The socket is removed before it is closed, so it never looks stale
        cleanup.callback(remove, os.lstat(path), options.address)


def lock_directory(directory: str, lock: ExitStack) -> None:
    """Keep other starts out of a directory for a while [ADDR-8]."""
    with suppress(PermissionError):  # to bind may be allowed all the same
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        lock.callback(os.close, descriptor)
        for _ in range(100):  # a second: anybody may have locked it for long
            with suppress(BlockingIOError):
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.01)


def make_way(path: str, replace: bool) -> None:
    """Remove a stale socket or an empty file, and nothing else [ADDR-8]."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(status.st_mode):
        # The kernel knows whether anybody is bound to it: only a stale one
        # refuses a socket of another type with this error
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex(path) != errno.ECONNREFUSED:
                raise StartError(f"{path}: a server listens there already")
    elif not stat.S_ISREG(status.st_mode) or status.st_size:
        raise StartError(f"{path}: something else is there; use another path")
    if not replace:
        raise StartError(f"{path}: stale or empty; -r replaces it")
    os.unlink(path)


def remove(file: os.stat_result, path: str) -> None:
    """Remove an open file if it is still in its place [ADDR-10]."""
    with suppress(OSError):
        if os.path.samestat(file, os.lstat(path)):
            os.unlink(path)


def open_regular(path: str, flags: int = 0) -> int:
    """Open or create a file of our own, or of root, to read and write it."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StartError(f"{path}: not a regular file")
    if status.st_uid not in (0, os.getuid()):
        raise StartError(f"{path}: another user's file")
    return descriptor


def open_pid_file(path: str) -> int:
    """Return a locked descriptor of a pid file that no process uses."""
    descriptor = open_regular(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"{path}: a server uses this file") from None
    text = os.pread(descriptor, 32, 0)
    if text and not re.fullmatch(rb"[0-9]{1,10}\n?", text):
        raise StartError(f"{path}: not a pid file; it stays as it is")
    if text and os.path.exists(f"/proc/{int(text)}"):
        raise StartError(f"{path}: process {int(text)} is alive")
    if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
        raise StartError(f"{path}: a server has just removed it; try again")
    return descriptor


def redirect(descriptor: int, path: str, flags: int = os.O_RDWR) -> None:
    """Let a standard stream lead to a file."""
    file = os.open(path, flags)
    os.dup2(file, descriptor)
    os.close(file)


TRACED = {  # the members of an event in the trace, after n, t and ev
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c", "reason"),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "msg": ("c", "m", "key", "size", "data"),
    "send": ("m", "c"),
    "drop": ("m", "c", "reason"),
}


class Journal:
    """Writes events to a trace of JSON lines, and to the log with -v."""

    def __init__(self, options: Options, address: str) -> None:
        self._options = options
        prefix = options.cred_prefix.decode("ascii")[:-1]
        self._about = {"version": __version__, "address": address}
        self._about.update(host=socket.gethostname(), cred_prefix=prefix)
        self._events = itertools.count(1)
        self._lines: list[str] = []
        self._trace = -1
        if options.trace is not None:
            self._trace = open_regular(options.trace, os.O_APPEND)
            size = os.fstat(self._trace).st_size
            if size and os.pread(self._trace, 1, size - 1) != b"\n":
                self._lines.append("\n")  # the last server was killed
        self._write("start", self._about)
        self.flush()

    def note(self, event: str, rule: str, who: Client, **facts: Any) -> None:
        """Write an event of a client to the log, the trace, or both."""
        packet, payload = facts.pop("packet", b""), facts.pop("payload", None)
        if isinstance(packet, NumberedPacket):
            facts["m"] = packet.number
        elif packet:
            return  # an answer
        for name, value in facts.items():
            if isinstance(value, bytes):  # each byte is a code point
                facts[name] = value.decode("latin-1")
        if self._options.verbose:
            words = [f"{k}={json.dumps(v)[:80]}" for k, v in facts.items()]
            log(" ".join([str(who), event, *words, f"[{rule}]"]))
        facts["c"] = who.number
        if self._options.trace_payload and payload is not None:
            facts["data"] = base64.b64encode(payload).decode("ascii")
        names = [name for name in TRACED.get(event, ()) if name in facts]
        if names:
            self._write(event, {name: facts[name] for name in names})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        if self._trace >= 0:
            head = {"n": next(self._events), "t": time.time_ns(), "ev": event}
            line = json.dumps({**head, **facts}, separators=(",", ":"))
            self._lines.append(line + "\n")  # [TRACE-1]

    def flush(self) -> None:
        """Hand the events of a round to the kernel, in order."""
        text = "".join(self._lines).encode("ascii")
        self._lines.clear()
        try:
            while text:
                text = text[os.write(self._trace, text) :]
        except OSError as error:  # the bus goes on
            log(f"[RUN-16] no trace from now on: {error.strerror}")
            self._trace = -1

    def close(self) -> None:
        """Write the last event."""
        self._write("stop", self._about)
        self.flush()


def refuse_options(message: str) -> None:
    """Answer wrong options with one line [RUN-1]."""
    log(f"{message}; --help lists the options")
    sys.exit(2)


def user_id(text: str) -> int:
    """Return the number of a user who is given by name or number."""
    with suppress(KeyError, ValueError):
        return pwd.getpwnam(text).pw_uid
    if re.fullmatch("[0-9]{1,10}", text) and int(text) < (1 << 32) - 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"no such user: {text!r}")


def parse_options(arguments: list[str] | None) -> Options:
    """Return the options; exit with status 2 if they are wrong."""
    parser = argparse.ArgumentParser("sbusd", allow_abbrev=False)
    parser.error = refuse_options  # type: ignore
    add = parser.add_argument
    add("-a", "--address", help="a path, /dev/unix/abstract[/HEX], /dev/fd/N")
    switch = functools.partial(add, action="store_true")
    switch("-c", "--close", help="exit when the last client has gone")
    switch("-d", "--daemon", help="detach; log only to a regular file")
    switch("-f", "--foreground", help="do not detach (default)")
    switch("-g", "--group", help="let the group connect")
    switch("-o", "--others", help="let others connect")
    switch("-r", "--replace", help="replace a stale socket")
    switch("-v", "--verbose", help="log every decision")
    switch("--strict", help="disconnect where a server MAY")
    switch("--trace-payload", help="write payloads to the trace as well")
    add("-p", "--pid-file", metavar="PIDFILE", help="for the pid; implies -d")
    what = "let only these users and your own connect (with -g or -o)"
    add("-u", "--user", action="append", type=user_id, help=what)
    what = "!/cred/GID/UID/PID of this bus on the bus above it"
    add("--cred-prefix", type=parse_prefix, default=b"", help=what)
    add("--trace", metavar="FILE", help="append every event to FILE")
    add("--version", action="version", version=f"sbusd {__version__}")
    for name, (default, _, what) in LIMITS.items():
        kind = functools.partial(parse_limit, name)
        what = f"at most N {what} (default %(default)s)"
        option = "--" + name.replace("_", "-")
        add(option, metavar="N", type=kind, default=default, help=what)
    options = parser.parse_args(arguments)
    options.daemon = options.daemon or options.pid_file is not None
    if options.daemon and options.foreground:
        parser.error("-f cannot go with -d or -p")
    if options.trace_payload and options.trace is None:
        parser.error("--trace-payload needs --trace FILE")
    return options


def go_to_background(path: str | None, cleanup: ExitStack) -> int:
    """Become a daemon; return where to tell that it is ready [RUN-8]."""
    if path is not None:
        pid_file, place = open_pid_file(path), os.path.join(os.getcwd(), path)
        cleanup.callback(remove, os.fstat(pid_file), place)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)  # what was called ends then
    os.close(reader)
    os.setsid()  # one fork is enough, as the server opens no terminal
    os.chdir("/")
    if path is not None:
        os.ftruncate(pid_file, 0)
        os.pwrite(pid_file, b"%d\n" % os.getpid(), 0)
    return writer


def announce(address: str, ready: int) -> None:
    """Tell all who wait for it that the server listens [RUN-8]."""
    with suppress(OSError):
        if address and select.select((), (1,), (), 0)[1]:
            os.write(1, f"{address}\n".encode("ascii"))
    redirect(1, os.devnull)  # a reader of the output goes on now
    notify = os.environ.pop("NOTIFY_SOCKET", "")
    if notify:
        name = "\0" + notify[1:] if notify[0] == "@" else notify
        notifier = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with notifier, suppress(OSError):
            notifier.setblocking(False)
            notifier.sendto(b"READY=1\nMAINPID=%d\n" % os.getpid(), name)
    if ready >= 0:
        redirect(0, os.devnull)
        if not stat.S_ISREG(os.fstat(2).st_mode):
            redirect(2, os.devnull)
        os.write(ready, b"1")
        os.close(ready)


def obey_signals(server: Server) -> None:
    """Let signals wake the server, and tell it what to do [RUN-10]."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    def wake_up() -> None:
        numbers = os.read(reader, 4096)
        if signal.SIGUSR1 in numbers:
            log_stats(server.bus)
        server.stopping |= not STOP_SIGNALS.isdisjoint(numbers)
    server.selector.register(reader, READ, wake_up)
    ignores_hang_up = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    if server.bus.options.daemon or ignores_hang_up:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def log_stats(bus: Bus) -> None:
    """Log what the clients of each user use and have done [CTL-5]."""
    some = itertools.islice(bus.users.items(), STATS_ROWS_MAX)
    counts = {f" uid={uid}": user.counts for uid, user in some}
    for whose, each in {**counts, "": bus.counts}.items():
        words = [f"{name}={number}" for name, number in each.items()]
        log(f"stats{whose} {' '.join(words)}")


def serve(options: Options) -> None:
    """Run a server until it is stopped."""
    fit_limits(options)
    if options.address is None:
        options.address = default_address()
    is_random = options.address == ABSTRACT
    with ExitStack() as cleanup:
        listener = open_listener(options, cleanup)
        address, ready = options.address, -1
        bus = Bus(options, os.getuid())
        if options.trace is not None or options.verbose:
            bus.journal = Journal(options, address)
            cleanup.callback(bus.journal.close)
        if options.daemon:
            ready = go_to_background(options.pid_file, cleanup)
        selector = selectors.DefaultSelector()
        server = Server(bus, listener, selector, time.monotonic)
        obey_signals(server)
        about = f"start {address} pid={os.getpid()}"
        if address.startswith(ABSTRACT) and not options.user:
            about += "; any user may connect"
        try:
            listener.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            about += "; clients can make the bus wait by passing descriptors"
        log(about)
        announce(address if is_random else "", ready)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        cleanup.callback(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)
        server.run()
    log("stop")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it can obey
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # descriptors 0 to 2 stay standard streams, and become no sockets
    os.close(lowest)
    with suppress(OSError):  # the log never waits [RUN-16]
        if not stat.S_ISREG(os.fstat(2).st_mode):
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
            redirect(2, "/proc/self/fd/2", flags)
    options = parse_options(arguments)
    try:
        serve(options)
        return 0
    except OSError as error:
        log(f"{error.filename or 'cannot continue'}: {error.strerror}")
    except (StartError, MemoryError) as error:
        log(str(error) or "out of memory")
    return 1


if __name__ == "__main__":
    sys.exit(main())
