#!/usr/bin/env python3
"""sbus: a simple message bus over Unix-domain sequenced-packet sockets.

This file is the reference server.  It needs CPython 3.9 or later on Linux
and nothing else: copy it, run it.  Its sections are the chapters of the
specification in spec/, and a bracketed id, as in [PUB-2], names the rule
that a passage keeps.

    1  Overview          errors                              no I/O
    2  Routing keys      matching, the subscription table    no I/O
    3  Protocol          packets, clients, the bus           no I/O
    4  Secret messages   credentials, secret keys            no I/O
    5  Flood control     backlogs, modes, orders             no I/O
    6  Echoes                                                no I/O
    7  Limits            what clients may use                no I/O
    8  Connections       the loop: accept, read, send, close
    9  Running           addresses, command line, log, trace

A packet's way: Server.turn (8) reads it, Bus.handle (3) finds its receivers
in a SubscriptionTable (2) and puts it in their outboxes, Server.deliver (8)
offers them to the kernel, and FloodControl.refuse (5) decides on what the
kernel refuses.

Names: packet, the bytes of one datagram; head, a packet up to its first NUL
byte; key, pattern, payload, parts of a packet; outbox, the packets routed to
a client and not yet offered to the kernel; backlog, those that the kernel
refused; stalled, said of a client with a backlog; paused, of a client that
is not read because a receiver holds it; wire, a client's socket.  Keys,
patterns and payloads are bytes and are never decoded.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import functools
import gc
import heapq
import itertools
import json
import logging
import math
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
import types
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from json.encoder import encode_basestring_ascii as json_of
from typing import Any, Callable, NamedTuple, NoReturn, Union

__version__ = "0.1.0"


# =============================================================================
# 1. Overview                                               spec/1-overview.md
#
# Facts
# - The answer to a client's mistake is the end of its connection.  Nobody
#   else notices, and the log names the client and the rule.
# - So whatever finds a mistake raises ProtocolError: for the client whose
#   packet is handled, and in section 5 for the receiver that gives up.
# =============================================================================


class ProtocolError(Exception):
    """A client broke the rule *requirement*, and is to be disconnected."""

    def __init__(self, requirement: str, what: str) -> None:
        super().__init__(f"[{requirement}] {what}")
        self.requirement = requirement
        self.what = what


class StartError(Exception):
    """The server cannot start: one line, and exit status 1."""


def quote(text: bytes) -> str:
    """Return *text* as at most 80 printable ASCII characters [RUN-15]."""
    quoted = repr(text[:80])
    if len(text) <= 80 and len(quoted) <= 80:
        return quoted
    return quoted[:77] + "..."


# =============================================================================
# 2. Routing keys                                       spec/2-routing-keys.md
#
# Facts
# - A '*' matches up to the next '/' or the end, and the pattern goes on
#   there: 'a*b' matches nothing.  So matching needs no backtracking.
# - The empty pattern is treated as one of no segments that ends in '/'.
# - The shape of a pattern is what its literal bytes do not say.  At most one
#   pattern of each shape selects a key, and the key tells which: the table
#   is a dictionary of patterns, in which each shape costs one look-up.
# =============================================================================

# What patterns of different literal bytes have in common: the number of their
# segments, whether they are open, that is, more may follow what then is not
# counted, and which segments have a '*' after how many bytes
Shape = tuple[int, bool, tuple[tuple[int, int], ...]]


def parse_pattern(pattern: bytes) -> tuple[Shape | None, bytes]:
    """Return a pattern's shape, and the pattern with '**' as '*'.

    The shape is None if it matches nothing: after a '*' the segment is over,
    and more literal bytes fail [MATCH-6].
    """
    is_open = pattern[-1:] in (b"", b"/")  # [MATCH-4] [MATCH-3]
    stars = []
    if b"*" in pattern:
        while b"**" in pattern:
            pattern = pattern.replace(b"**", b"*")
        for index, segment in enumerate(pattern.split(b"/")):
            literal, star, more = segment.partition(b"*")
            if more:
                return None, pattern
            if star:
                stars.append((index, len(literal)))
    size = pattern.count(b"/") + (not is_open)
    return (size, is_open, tuple(stars)), pattern


def pattern_for(segments: list[bytes], shape: Shape) -> bytes | None:
    """Return the pattern of a shape that selects a key, given by segments.

    It selects the key even if it turns out to be of another shape: for 'a'
    and the shape of 'xy*' it is 'a*'.  None stands for a key with too few
    segments, or too many [MATCH-5].
    Spec: [MATCH-1] [MATCH-2] [MATCH-3] [KEY-3].
    """
    size, is_open, stars = shape
    if len(segments) <= size if is_open else len(segments) != size:
        return None
    literals = segments[:size]
    for index, length in stars:
        literals[index] = literals[index][:length] + b"*"
    if is_open:
        literals.append(b"")
    return b"/".join(literals)


def pattern_matches(pattern: bytes, key: bytes) -> bool:
    """Return whether *pattern* selects *key*; neither holds a NUL byte."""
    shape, pattern = parse_pattern(pattern)
    return shape is not None and (
        pattern_for(key.split(b"/"), shape) == pattern
    )


class SubscriptionTable:
    """Which clients hold which patterns; once for each way to write one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # By pattern: its only holder, or of several how often each is one
        self._holders: dict[bytes, Any] = {}
        self._shapes: dict[Shape, int] = {}  # of how many pairs each
        self._users: dict[int, dict[Shape, int]] = {}  # and by user id

    def add(self, pattern: bytes, client: Client) -> None:
        """Add a pair, unless its user has too many shapes [LIMIT-10]."""
        shape, pattern = parse_pattern(pattern)
        if shape:
            own = self._users.setdefault(client.credentials.uid, {})
            most = self._limits.max_shapes
            if shape not in own and len(own) >= most:
                raise over("max_shapes", len(own) + 1, most)
            for counts in (own, self._shapes):
                counts[shape] = counts.get(shape, 0) + 1
            holders = self._holders.get(pattern)
            if holders is None:
                self._holders[pattern] = client
            else:
                if not isinstance(holders, dict):
                    holders = self._holders[pattern] = {holders: 1}
                holders[client] = holders.get(client, 0) + 1

    def remove(self, pattern: bytes, client: Client) -> None:
        """Remove a pair if it is in the table."""
        shape, pattern = parse_pattern(pattern)
        holders: Any = self._holders.get(pattern)
        count = int(holders is client)
        if isinstance(holders, dict):
            count = holders.get(client, 0)
        if shape and count:
            if count > 1:
                holders[client] = count - 1
            elif holders is client or len(holders) == 1:
                del self._holders[pattern]
            else:
                del holders[client]
            uid = client.credentials.uid
            for counts in (self._users[uid], self._shapes):
                counts[shape] -= 1
                if not counts[shape]:
                    del counts[shape]
            if not self._users[uid]:
                del self._users[uid]
            self._shrink(pattern)

    def _shrink(self, pattern: bytes) -> None:
        """Give up the room of holders that have gone, as del does not."""
        holders = self._holders.get(pattern)
        if isinstance(holders, dict):
            if len(holders) == 1 and 1 in holders.values():
                (self._holders[pattern],) = holders
            elif sys.getsizeof(holders) > 200 + 100 * len(holders):
                self._holders[pattern] = dict(holders)

    def find(self, key: bytes) -> dict[Client, int]:
        """Return the clients with a pattern that selects *key*, as keys.

        They are in no particular order [PUB-1] [PUB-3].
        """
        found: dict[Client, int] = {}
        segments = key.split(b"/")
        for shape in self._shapes:
            pattern = pattern_for(segments, shape)
            if pattern in self._holders:
                holders = self._holders[pattern]
                if isinstance(holders, dict):
                    found.update(holders)  # [PUB-2] each once
                else:
                    found[holders] = 1
        return found


# =============================================================================
# 3. Protocol                                               spec/3-protocol.md
#
# Facts
# - The bus decides and does no I/O.  It leaves packets in outboxes and their
#   owners in Bus.touched; section 8 empties both.
# - A packet is routed as it came.  Large ones come as a view of the receive
#   buffer, and only what the kernel refuses is ever copied.
# =============================================================================

Packet = Union[bytes, memoryview]

# ^SUB ([^\x00]*)(\x00.*)?$     \1 pattern, \2 ignored
# ^UNSUB ([^\x00]*)(\x00.*)?$   \1 pattern, \2 ignored
# ^MSG ([^\x00]*)\x00(.*)$      \1 key, \2 payload
# ^CMSG ([^\x00]*)(\x00(.*))?$  \1 key, \3 payload
KINDS = {
    b"SUB": "subscribe",
    b"UNSUB": "unsubscribe",
    b"MSG": "publish",
    b"CMSG": "control",
}


def parse_packet(
    packet: bytes, max_key: int = sys.maxsize, max_segments: int = sys.maxsize
) -> tuple[str, bytes, bytes]:
    """Return a packet's kind, its key or pattern, and its payload.

    Spec: [PKT-1] [KEY-1] [SUB-3] [UNSUB-3] [LIMIT-4] [LIMIT-17].
    """
    head, nul, payload = packet.partition(b"\0")
    word, space, key = head.partition(b" ")
    kind = KINDS.get(word) if space else None
    if kind is None:
        raise ProtocolError("PKT-2", f"unknown packet kind {quote(head)}")
    if len(key) > max_key:
        raise ProtocolError("LIMIT-4", f"{kind} key over {max_key} bytes")
    if kind == "publish" and not nul:
        raise ProtocolError("PKT-2", f"no NUL byte after the key {quote(key)}")
    segments = key.count(b"/") + 1
    if segments > max_segments:
        raise over("max_segments", segments, max_segments)
    if kind in ("subscribe", "unsubscribe"):
        payload = b""
    return kind, key, payload


def text_of(text: bytes) -> str:
    """Return a key or pattern as text: each byte is a code point."""
    return text.decode("latin-1")


class NumberedPacket(bytes):
    """A publish packet that knows its message number, for the journal."""

    number: int


class User:
    """What the clients of one user id use together, and have done."""

    def __init__(self, uid: int, is_privileged: bool) -> None:
        self.uid = uid
        self.is_privileged = is_privileged  # [LIMIT-16] root, the bus owner
        self.clients: dict[Client, None] = {}
        self.used = [0] * len(USE_LIMITS)
        self.past: Counter[str] = Counter()  # of clients that have gone
        self.slow_until = 0.0  # [CONN-20]

    def stats(self) -> dict[str, int]:
        """Return what the user's clients use and have done."""
        counts = Counter(self.past)
        for client in self.clients:
            counts.update(client.counts())
        return {
            "clients": self.used[CLIENTS],
            "patterns": self.used[PATTERNS],
            "backlog_bytes": self.used[BACKLOG_BYTES],
            **{name: counts[name] for name in COUNTED},
        }


COUNTED = ("published", "delivered", "refused", "discarded", "paused")


class Client:
    """What the bus knows of one client [BLOCK-1] [ECHO-1]."""

    def __init__(
        self, number: int, own: Credentials, user: User, wire: Any
    ) -> None:
        self.number = number  # from 1, never used again
        self.credentials = own
        self.user = user
        self.patterns: dict[bytes, int] = {}  # [SUB-2] how often each
        self.used = [0] * len(USE_LIMITS)
        self.outbox: list[Packet] = []
        self.backlog = Backlog()
        self.soft_mode = "queue"
        self.hard_mode = "block"
        self.holding: dict[Client, int] = {}  # until so many backlog bytes
        self.held_by: dict[Client, None] = {}  # paused while there is any
        self.published = 0  # messages
        self.delivered = 0  # packets that the kernel took for it
        self.refused = 0  # packets that the kernel did not take at once
        self.discarded = 0  # packets
        self.paused = 0  # how often
        self.echo = True
        self.deaf = False  # [CONN-8] whatever is for it is discarded
        self.closed = False
        # Section 8's:
        self.wire = wire
        self.events = 0  # what the selector watches for
        self.fault = ""  # [CONN-18] why it is disconnected, once all is read
        self.ignored = False  # whatever is still to be read of it
        self.put_off = True  # [CONN-20] if its user is slow, or has been
        self.progressed = 0.0  # when it took packets, or began to lag
        self.starved = False  # [CONN-9]
        self.discard_logged = False
        self.single_turns = 0  # left, in which one packet is read

    def counts(self) -> dict[str, int]:
        """Return what the client has done so far [CTL-5]."""
        return {name: getattr(self, name) for name in COUNTED}

    def weight(self) -> tuple[bool, int, int]:
        """Return what is larger for whom to part with first for memory."""
        own = self.used[BACKLOG_BYTES] + self.used[PATTERN_BYTES]
        of_user = self.user.used[BACKLOG_BYTES]
        return not self.user.is_privileged, of_user, own

    def __str__(self) -> str:
        own = self.credentials
        return f"client={self.number} uid={own.uid} pid={own.pid}"


WORK_MAX = 8  # packets and receivers, after which to ask the clock
STATS_USERS_MAX = 1_000  # so that the answer stays a packet
RECENT_KEYS_MAX = 4_096
RECENT_KEY_BYTES_MAX = 256
RECENT_RECEIVERS_MAX = 256  # of a key; what is more is found anew each time


class Bus:
    """The clients, their subscriptions, and what their packets do."""

    def __init__(
        self,
        limits: Limits,
        owner_uid: int,
        cred_prefix: bytes = b"",
        strict: bool = False,
    ) -> None:
        self.limits = limits
        self._head_limits = (limits.max_key, limits.max_segments)
        self.cred_prefix = cred_prefix
        self.strict = strict
        self.journal: Journal | None = None
        self.owner_uid = owner_uid
        self.accounts = Accounts(limits)
        self.flood = FloodControl(self)
        self.clients: dict[int, Client] = {}
        self.users: dict[int, User] = {}  # those who have clients
        self.touched: list[Client] = []  # those with something in the outbox
        self._numbers = itertools.count(1)  # of clients
        self._messages = itertools.count(1)  # that the journal is told of
        self._public = SubscriptionTable(limits)
        self._secret = SubscriptionTable(limits)
        # The receivers of recent heads (b"MSG " + key), secret ones never,
        # and these heads by the first segment of their keys
        self._recent: dict[bytes, tuple[Client, ...]] = {}
        self._recent_heads: dict[bytes, list[bytes]] = {}

    def tell(self, *event: Any, **facts: Any) -> None:
        """Have the journal, if there is one, note what happens."""
        if self.journal:
            self.journal.note(*event, **facts)

    def open(self, credentials: Credentials, wire: Any) -> Client:
        """Let a client in and return it."""
        uid = credentials.uid
        user = User(uid, is_privileged=uid in (0, self.owner_uid))
        user = self.users.setdefault(uid, user)  # unless there is one
        client = Client(next(self._numbers), credentials, user, wire)
        self.clients[client.number] = client
        user.clients[client] = None
        self.accounts.use(client, CLIENTS, 1)
        self.tell("open", client, **credentials._asdict())
        return client

    def close(self, client: Client, reason: str) -> list[Client]:
        """Forget a client; return the publishers that are resumed by it."""
        for pattern in [*client.patterns]:
            self.drop(client, pattern)
        for what, amount in enumerate(client.used):
            self.accounts.use(client, what, -amount)
        self.tell("close", client, reason)
        client.backlog.clear()
        resumed = self.flood.release(client)  # as it uses nothing any more
        user = client.user
        user.past.update(client.counts())
        user.clients.pop(client, None)
        if not user.clients:
            self.users.pop(user.uid, None)
        del self.clients[client.number]
        return resumed

    def handle(self, client: Client, packet: Packet, start: bytes) -> int:
        """Do what a client's packet asks for; return how much work it was.

        *start* is the packet, or as much of its beginning as holds the
        longest head.  The packet is only good until the outboxes are emptied.
        Spec: [PKT-1] [PKT-3] [PUB-1] [PUB-4] [PUB-5].
        """
        end = start.find(b"\0")  # without one the head is for parse_packet
        head = start[:end]
        receivers = self._recent.get(head) if end > 0 else None
        work = 1
        if receivers is None:
            work = WORK_MAX
            kind, key, _ = parse_packet(start, *self._head_limits)
            if kind != "publish":  # subscribe, unsubscribe, control
                getattr(self, kind)(client, key)
                return work
            receivers = self._route(head, key)
        if not client.echo:
            receivers = without_echo(receivers, client)
        if self.journal:
            packet = NumberedPacket(packet)
            packet.number = next(self._messages)
            text, count = text_of(head[4:]), len(receivers)
            self.journal.note("msg", client, text, packet, receivers=count)
        client.published += 1
        for receiver in receivers:
            if not receiver.outbox:
                self.touched.append(receiver)
            receiver.outbox.append(packet)
        return work + len(receivers)

    def _route(self, head: bytes, key: bytes) -> tuple[Client, ...]:
        """Return the receivers of a key, and remember them [PUB-1]."""
        if b"!" in key:
            check_reserved(key)
        if key.startswith(SECRET):
            # [CRED-10] public patterns are not even looked at
            found = self._secret.find(key)
            # [CRED-11] the second check, made for every delivery
            return tuple(
                client
                for client in found
                if fields_fit(key, client.credentials, self.cred_prefix)
            )
        receivers = tuple(self._public.find(key))
        is_short = len(key) <= RECENT_KEY_BYTES_MAX
        if is_short and len(receivers) <= RECENT_RECEIVERS_MAX:
            if len(self._recent) >= RECENT_KEYS_MAX:
                self._forget_recent(b"")
            start = key.partition(b"/")[0]
            self._recent_heads.setdefault(start, []).append(head)
            self._recent[head] = receivers
        return receivers

    def subscribe(self, client: Client, pattern: bytes) -> None:
        """Store a pattern for a client, or count it again [SUB-1]."""
        self._check_pattern(client, pattern)
        count = client.patterns.get(pattern, 0) + 1
        if count == 1:
            self._hold(client, pattern)
        client.patterns[pattern] = count
        rule = "SUB-1" if count == 1 else "SUB-2"
        self.tell("sub", client, text_of(pattern), count=count, rule=rule)

    def unsubscribe(self, client: Client, pattern: bytes) -> None:
        """Remove one of a client's identical patterns [UNSUB-1]."""
        self._check_pattern(client, pattern)
        held = client.patterns.get(pattern, 0)
        if self.strict and not held:  # [UNSUB-2] MAY
            raise ProtocolError("UNSUB-2", f"{quote(pattern)} is not held")
        if held == 1:
            self.drop(client, pattern)
        elif held:
            client.patterns[pattern] = held - 1
        event = "unsub" if held else "ignore"
        self.tell(event, client, text_of(pattern), count=held - 1)

    def _check_pattern(self, client: Client, pattern: bytes) -> None:
        """Raise ProtocolError if it is forbidden [KEY-4] [CRED-4] [CRED-5]."""
        if pattern.startswith(SECRET):
            check_secret(pattern, client.credentials, self.cred_prefix)
        if b"!" in pattern:
            check_reserved(pattern)

    def _hold(self, client: Client, pattern: bytes) -> None:
        """Give a pattern to a client, and its places in a table."""
        accounts, size = self.accounts, len(pattern)
        error = accounts.excess(client, PATTERNS, 1)  # [LIMIT-5] [LIMIT-12]
        error = error or accounts.excess(client, PATTERN_BYTES, size)
        if error:  # [LIMIT-6] [LIMIT-13]
            raise error
        self._forget_recent(pattern)
        client.patterns[pattern] = 1  # first, for drop to find if this fails
        accounts.use(client, PATTERNS, 1)
        accounts.use(client, PATTERN_BYTES, size)
        table, places = self._places(client, pattern)
        try:
            for place in places:
                table.add(place, client)
        except ProtocolError:  # [LIMIT-10]
            self.drop(client, pattern)
            raise

    def drop(self, client: Client, pattern: bytes) -> None:
        """Take a pattern from its places, and then from its client."""
        self._forget_recent(pattern)
        table, places = self._places(client, pattern)
        for place in places:
            table.remove(place, client)
        del client.patterns[pattern]
        self.accounts.use(client, PATTERNS, -1)
        self.accounts.use(client, PATTERN_BYTES, -len(pattern))

    def _places(
        self, client: Client, pattern: bytes
    ) -> tuple[SubscriptionTable, list[bytes]]:
        """Return in which table a pattern stands, as which patterns."""
        if pattern.startswith(SECRET):
            own = client.credentials
            return self._secret, resolve(pattern, own, self.cred_prefix)
        return self._public, [pattern]

    def _forget_recent(self, pattern: bytes) -> None:
        """Forget the receivers of the keys that a pattern may select."""
        start = pattern.partition(b"/")[0]
        if b"*" in start or not pattern:  # it may select any key
            self._recent.clear()
            self._recent_heads.clear()
        for head in self._recent_heads.get(start, ()):
            self._recent.pop(head, None)
        self._recent_heads.pop(start, None)

    def control(self, client: Client, key: bytes) -> None:
        """Do what a control packet asks for [CTL-1] [CTL-4]."""
        if key in CHOICES:  # [BLOCK-2] [ECHO-3]
            what, choice, rule = CHOICES[key]
            if what == "order":
                client.backlog.reorder(choice)
            else:
                setattr(client, what, choice)
        elif key == WHOAMI:  # [CRED-2]
            rule = "CRED-2"
            own = SECRET + b"%d/%d/%d" % client.credentials
            prefix = self.cred_prefix
            self._answer(client, key, prefix + b"/" + own if prefix else own)
        elif key == b"stats":
            rule = "CTL-5"
            self._answer(client, key, self.stats(client))
        else:
            rule = "CTL-2"
        self.tell("ctl", client, text_of(key), rule=rule)

    def stats(self, client: Client) -> bytes:
        """Return what `stats` is answered with: a JSON object [CTL-5]."""
        stats: dict[str, Any] = {"client": client.number, **client.counts()}
        stats["patterns"] = len(client.patterns)
        stats["backlog_bytes"] = client.used[BACKLOG_BYTES]
        if client.user.is_privileged:
            some = itertools.islice(self.users.values(), STATS_USERS_MAX)
            stats["users"] = {user.uid: user.stats() for user in some}
        return json.dumps(stats).encode("ascii")

    def _answer(self, client: Client, key: bytes, payload: bytes) -> None:
        """Put an answer after all that was routed before [CTL-3] [CRED-3]."""
        if not client.outbox:
            self.touched.append(client)
        client.outbox.append(b"CMSG " + key + b"\0" + payload)


# =============================================================================
# 4. Secret messages                                 spec/4-secret-messages.md
#
# Facts
# - Two checks guard a secret: check_secret when a client subscribes, and
#   fields_fit at every delivery, in Bus._route.
# - The kernel gives pid 0 and the id 65534 to whatever it cannot name.
# =============================================================================

SECRET = b"!/cred/"
WHOAMI = b"!/cred/whoami"
OVERFLOW_ID = 65_534

FIELDS = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")
SECRET_HEAD = re.compile(rb"(?:!/cred/[0-9]*/[0-9]*/[0-9]*/)*")


class Credentials(NamedTuple):
    """Who a client is, as the kernel says, and as secret keys do [CRED-1]."""

    gid: int
    uid: int
    pid: int


def check_reserved(text: bytes) -> None:
    """Raise ProtocolError if a text misuses '!' [KEY-4] [KEY-5]."""
    rest = SECRET_HEAD.sub(b"", text, 1)
    if b"!" in rest.split(b"/"):
        raise ProtocolError("KEY-4", f"reserved '!' in {quote(text)}")


def match_fields(text: bytes, prefix: bytes) -> re.Match[bytes] | None:
    """Return a match of the three fields of a secret text [CRED-9]."""
    start = prefix + b"/" if prefix else b""
    return FIELDS.match(text, len(start)) if text.startswith(start) else None


def fields_fit(text: bytes, own: Credentials, prefix: bytes) -> bool:
    """Return whether each field is empty or the client's own number.

    An empty field of a key fits here; the table has it match an empty field
    of a pattern alone [CRED-7] [CRED-6] [CRED-11].
    """
    match = match_fields(text, prefix)
    return match is not None and all(
        field in (b"", b"%d" % number)
        for field, number in zip(match.groups(), own)
    )


def check_secret(pattern: bytes, own: Credentials, prefix: bytes) -> None:
    """Raise ProtocolError if a secret pattern is not the client's own."""
    if match_fields(pattern, prefix) is None:
        raise ProtocolError("CRED-5", f"not a secret: {quote(pattern)}")
    if not fields_fit(pattern, own, prefix):
        raise ProtocolError("CRED-4", f"not your own: {quote(pattern)}")
    if own.pid == 0 or OVERFLOW_ID in (own.uid, own.gid):
        raise ProtocolError("CRED-8", "nobody in particular has no secrets")


def resolve(pattern: bytes, own: Credentials, prefix: bytes) -> list[bytes]:
    """Return the patterns, up to eight, that a secret pattern stands for.

    The pattern has passed check_secret.  Each empty field stands for the
    client's own number [CRED-6], and for an empty field of a key [CRED-7].
    """
    match = match_fields(pattern, prefix)
    assert match
    start, end = match.span()
    choices = [
        (field,) if field else (b"%d" % number, field)
        for field, number in zip(match.groups(), own)
    ]
    return [
        pattern[:start] + SECRET + b"/".join(fields) + b"/" + pattern[end:]
        for fields in itertools.product(*choices)
    ]


# =============================================================================
# 5. Flood control                                     spec/5-flood-control.md
#
# Facts
# - Modes belong to the receiver.  They say nothing until the kernel has
#   refused a packet for it.
# - Packets of a backlog are bytes: what arrived as a view is copied here.
# =============================================================================

CHOICES: dict[bytes, tuple[str, Any, str]] = {  # what to set, and the rule
    b"blocking/soft/queue": ("soft_mode", "queue", "BLOCK-2"),
    b"blocking/soft/discard": ("soft_mode", "discard", "BLOCK-2"),
    b"blocking/soft/block": ("soft_mode", "block", "BLOCK-2"),
    b"blocking/soft/error": ("soft_mode", "error", "BLOCK-2"),
    b"blocking/hard/discard": ("hard_mode", "discard", "BLOCK-2"),
    b"blocking/hard/block": ("hard_mode", "block", "BLOCK-2"),
    b"blocking/hard/error": ("hard_mode", "error", "BLOCK-2"),
    b"order/queue": ("order", "queue", "BLOCK-2"),
    b"order/stack": ("order", "stack", "BLOCK-2"),
    b"order/random": ("order", "random", "BLOCK-2"),
    b"echo/on": ("echo", True, "ECHO-3"),
    b"echo/off": ("echo", False, "ECHO-2"),
}
DISCARDED = {  # by reason: which rule
    "deaf": "CONN-8",
    "soft/discard": "BLOCK-5",
    "hard/discard": "BLOCK-9",
}
PACKET_OVERHEAD_BYTES = 128


def cost(packet: Packet) -> int:
    """Return the bytes that a packet counts for in a backlog [BLOCK-19]."""
    return len(packet) + PACKET_OVERHEAD_BYTES


class Backlog:
    """The packets that wait for one client, in the order it chose.

    An order by size has a heap, made when it is first needed, and kept for
    as long as nearly all that it names still waits: a client that changes
    its order at every packet costs no more than others.
    Spec: [ORDER-1] [ORDER-2] [ORDER-3] [ORDER-4] [ORDER-5].
    """

    def __init__(self) -> None:
        self.order = "queue"
        self.direction = 1  # [ORDER-4] of the last chosen of queue and stack
        self._packets: OrderedDict[int, bytes] = OrderedDict()  # by arrival
        self._arrivals = 0
        self._first = 0  # the arrival of what first returned
        # Of ranks, by what a byte weighs in them, and the direction
        self._heaps: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._packets)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._packets.values())

    def push(self, packet: bytes) -> None:
        """Add a packet, the newest."""
        self._arrivals += 1
        for way, heap in self._heaps.items():
            heapq.heappush(heap, rank(packet, self._arrivals, way))
        self._packets[self._arrivals] = packet

    def first(self) -> bytes:
        """Return the packet that is to be sent next, without removing it."""
        self._first = self._next()
        return self._packets[self._first]

    def pop(self) -> None:
        """Remove the packet that first has returned."""
        del self._packets[self._first]

    def trim(self) -> None:
        """Give back the memory of packets that are gone."""
        count = len(self._packets)
        if self._heaps:
            most, heaps = count * 9 // 8, self._heaps.items()
            self._heaps = {way: h for way, h in heaps if len(h) <= most}
        if sys.getsizeof(self._packets) > IDLE_BYTES + count * ENTRY_BYTES:
            self._packets = OrderedDict(self._packets)

    def clear(self) -> list[bytes]:
        """Remove all packets and return them."""
        packets = [*self]
        self._packets.clear()
        self._heaps.clear()
        return packets

    def reorder(self, order: str) -> None:
        """Send packets, those that wait included, in an order [ORDER-5]."""
        self.order = order
        self.direction = DIRECTIONS.get(order, self.direction)

    def _next(self) -> int:
        """Return which packet is to be sent next."""
        if self.order == "queue":
            return next(iter(self._packets))
        if self.order == "stack":
            return next(reversed(self._packets))
        way = BYTE_WEIGHTS[self.order], self.direction
        heap = self._heaps.get(way)
        if heap is None:
            heap = [rank(p, n, way) for n, p in self._packets.items()]
            heapq.heapify(heap)
            self._heaps[way] = heap
        while True:
            number = heap[0] * self.direction % ARRIVALS_MAX
            if number in self._packets:
                return number
            heapq.heappop(heap)


IDLE_BYTES = 4_096
ENTRY_BYTES = 256  # twice what a packet's place takes, and more
ARRIVALS_MAX = 1 << 48
DIRECTIONS = {"queue": 1, "stack": -1}  # the oldest first, the newest first
BYTE_WEIGHTS = {"random": -ARRIVALS_MAX}  # the largest first


def rank(packet: bytes, number: int, way: tuple[int, int]) -> int:
    """Return what is smaller, the sooner one is sent [ORDER-3] [ORDER-4]."""
    weight, direction = way
    return len(packet) * weight + number * direction


class FloodControl:
    """The decisions on packets that the kernel refused."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.accounts = bus.accounts
        self.discarded: Counter[str] = Counter()  # [BLOCK-20] by reason
        self._copied = (memoryview(b""), b"")  # the last, and from where

    def refuse(
        self, receiver: Client, packet: Packet, publisher: Client
    ) -> None:
        """Queue or discard a packet, pause its publisher, or give up."""
        receiver.refused += 1  # [BLOCK-20]
        soft, hard = receiver.soft_mode, receiver.hard_mode
        excess = self.accounts.excess(receiver, BACKLOG_BYTES, cost(packet))
        if receiver.deaf:
            self.discard(receiver, [packet], "deaf")
        elif packet[:5] == b"CMSG ":
            if excess:
                raise ProtocolError("BLOCK-18", excess.what)
            self._queue(receiver, packet, "BLOCK-17")
        elif receiver.put_off and not excess:  # it was not even offered
            self._queue(receiver, packet, "CONN-20")
        elif soft == "discard":  # [BLOCK-5]
            self.discard(receiver, [packet], "soft/discard")
        elif soft == "error":
            raise ProtocolError("BLOCK-8", "stalled in soft mode error")
        elif excess and hard == "discard":  # [BLOCK-9]
            self.discard(receiver, [packet], "hard/discard")
        else:
            if excess:  # [LIMIT-14] [LIMIT-15]
                self._hold_back(publisher, receiver, excess.what)
            elif soft == "block" and self.may_pause(publisher, receiver):
                self._pause(publisher, receiver, 0, "BLOCK-7")
            self._queue(receiver, packet, "BLOCK-4")

    def _hold_back(
        self, publisher: Client, receiver: Client, why: str
    ) -> None:
        """Pause who fills a backlog above its limit, or give up."""
        if receiver.hard_mode == "error":
            raise ProtocolError("BLOCK-11", why)
        if not self.may_pause(publisher, receiver):
            raise ProtocolError("BLOCK-15", why)
        if self.accounts.excess(receiver, BACKLOG_BYTES, 0, is_far=True):
            raise ProtocolError("BLOCK-21", f"far {why}")
        level = 0
        if receiver.soft_mode != "block":
            most = self.bus.limits.max_backlog
            level = min(receiver.used[BACKLOG_BYTES], most) // 2
        self._pause(publisher, receiver, level, "BLOCK-10")

    def may_pause(self, publisher: Client, receiver: Client) -> bool:
        """Return whether a receiver may hold a publisher up [BLOCK-13]."""
        if publisher.closed:  # while its packets were delivered
            return False
        if receiver.user.is_privileged:
            return True
        uid = receiver.user.uid
        return uid == publisher.user.uid and uid != OVERFLOW_ID

    def _queue(self, receiver: Client, packet: Packet, rule: str) -> None:
        """Add a packet to a backlog [BLOCK-14]."""
        if isinstance(packet, memoryview):
            if packet is not self._copied[0]:  # one for all who are to have it
                self._copied = (packet, bytes(packet))
            packet = self._copied[1]
        receiver.backlog.push(packet)
        self.accounts.use(receiver, BACKLOG_BYTES, cost(packet))
        if self.bus.journal:
            facts = {"rule": rule, "backlog": receiver.used[BACKLOG_BYTES]}
            self.bus.tell("queue", receiver, packet=packet, **facts)

    def discard(
        self, receiver: Client, packets: Sequence[Packet], reason: str
    ) -> None:
        """Count packets that nobody will get [BLOCK-20]."""
        self.discarded[reason] += len(packets)
        receiver.discarded += len(packets)
        if self.bus.journal:
            rule = DISCARDED[reason]
            for packet in packets:
                self.bus.tell("drop", receiver, reason, packet, rule=rule)

    def _pause(
        self, publisher: Client, receiver: Client, level: int, rule: str
    ) -> None:
        """Pause a publisher until a backlog is down to *level* bytes."""
        if publisher not in receiver.holding:
            publisher.paused += not publisher.held_by  # [CTL-5]
            receiver.holding[publisher] = level
            publisher.held_by[receiver] = None
            holder = receiver.number
            self.bus.tell("pause", publisher, holder=holder, rule=rule)

    def release(self, receiver: Client) -> list[Client]:
        """Return those that a backlog pauses no more [BLOCK-7] [BLOCK-10]."""
        resumed = []
        # Who receives nothing any more pauses nobody
        size = 0 if receiver.deaf else receiver.used[BACKLOG_BYTES]
        for publisher, level in [*receiver.holding.items()]:
            if size <= level:
                publisher.held_by.pop(receiver, None)
                del receiver.holding[publisher]
                if not publisher.held_by:
                    resumed.append(publisher)
                    self.bus.tell("resume", publisher)
        return resumed

    def deafen(self, client: Client) -> None:
        """Discard what waits for one that receives no more [CONN-8]."""
        client.deaf = True
        self.accounts.use(client, BACKLOG_BYTES, -client.used[BACKLOG_BYTES])
        self.discard(client, client.backlog.clear(), "deaf")


# =============================================================================
# 6. Echoes                                                   spec/6-echoes.md
# =============================================================================


def without_echo(
    receivers: tuple[Client, ...], publisher: Client
) -> tuple[Client, ...]:
    """Return the receivers other than the publisher [ECHO-2]."""
    return tuple(client for client in receivers if client is not publisher)


# =============================================================================
# 7. Limits                                                   spec/7-limits.md
# =============================================================================

LIMITS = {  # by option: what is the default, what rule has it, what it counts
    "max_packet": (409_600, "LIMIT-1", "bytes of a packet"),
    "max_key": (4_096, "LIMIT-4", "bytes of a key or pattern"),
    "max_segments": (64, "LIMIT-17", "segments of a key or pattern"),
    "max_patterns": (1_024, "LIMIT-5", "patterns of a client"),
    "max_pattern_bytes": (1 << 18, "LIMIT-6", "pattern bytes of a client"),
    "max_backlog": (1 << 24, "BLOCK-19", "bytes of backlog of a client"),
    "max_clients": (16_384, "LIMIT-7", "clients"),
    "block_timeout": (5.0, "BLOCK-16", "seconds"),
    "max_shapes": (256, "LIMIT-10", "shapes of patterns of a user"),
    "max_user_clients": (512, "LIMIT-11", "clients of a user"),
    "max_user_patterns": (16_384, "LIMIT-12", "patterns of a user"),
    "max_user_pattern_bytes": (1 << 22, "LIMIT-13", "pattern bytes of a user"),
    "max_user_backlog": (1 << 26, "LIMIT-14", "bytes of backlog of a user"),
    "max_bus_backlog": (1 << 30, "LIMIT-15", "bytes of backlog of the bus"),
}


class Limits(types.SimpleNamespace):
    """What a client, the clients of a user, and all together may use."""

    def __init__(self, **other: float) -> None:
        defaults = {name: default for name, (default, *_) in LIMITS.items()}
        super().__init__(**{**defaults, **other})

    def memory_bytes_max(self) -> int:
        """Return about how much memory clients can make the server use.

        Measured, for the worst that each may be; a test does so again.  The
        kernel's buffers are not in it.
        """
        shape = 1_500 + 64 * self.max_segments
        shapes = min(self.max_patterns, 2 * self.max_shapes) * shape
        patterns = self.max_patterns * 1_800 + self.max_pattern_bytes * 9
        holders = min(self.max_clients, self.max_user_clients) * 220
        clients = self.max_clients * (2_500 + patterns + shapes + holders)
        backlog = with_overshoot(self.max_bus_backlog) * 4  # in small pieces
        recent = RECENT_KEYS_MAX * 3_200
        return int(clients + backlog + recent + self.max_packet)


def with_overshoot(limit: int) -> int:
    """Return what backlogs may come to that pause publishers [BLOCK-21]."""
    return limit + limit // 8 + 1_048_576


def over(limit: str, used: int, most: float) -> ProtocolError:
    """Return what to say of a client that is above a limit."""
    _, rule, what = LIMITS[limit]
    return ProtocolError(rule, f"{used} {what}, over {most}")


# What is used, and for each the limits for a client, a user, the bus, if any
CLIENTS, PATTERNS, PATTERN_BYTES, BACKLOG_BYTES = range(4)
USE_LIMITS = (
    ("", "max_user_clients", "max_clients"),
    ("max_patterns", "max_user_patterns", ""),
    ("max_pattern_bytes", "max_user_pattern_bytes", ""),
    ("max_backlog", "max_user_backlog", "max_bus_backlog"),
)
RESERVED_PART = 4  # [LIMIT-16] one in so many of what the bus has


def most_of(
    names: Sequence[str], limits: Limits, is_privileged: bool
) -> tuple[int, int, int]:
    """Return what a client, its user, and the bus may use of something."""
    own, shared, total = (getattr(limits, one, sys.maxsize) for one in names)
    if is_privileged:
        return own, sys.maxsize, total
    return own, shared, total - total // RESERVED_PART  # [LIMIT-16]


class Accounts:
    """What clients, their users, and all together use of what is limited."""

    def __init__(self, limits: Limits) -> None:
        self.used = [0] * len(USE_LIMITS)
        self.most = [
            [most_of(names, limits, one) for names in USE_LIMITS]
            for one in (False, True)  # is_privileged
        ]

    def use(self, client: Client, what: int, amount: int) -> None:
        """Count what a client uses more, or less if negative."""
        client.used[what] += amount
        client.user.used[what] += amount
        self.used[what] += amount

    def excess(
        self, client: Client, what: int, more: int, is_far: bool = False
    ) -> ProtocolError | None:
        """Return which limit so much more would break, or break by far.

        Spec: [BLOCK-19] [BLOCK-21].
        """
        user = client.user
        own, shared, total = self.most[user.is_privileged][what]
        if is_far:
            own, shared, total = map(with_overshoot, (own, shared, total))
        if client.used[what] + more > own:
            return over(USE_LIMITS[what][0], client.used[what] + more, own)
        if user.used[what] + more > shared:
            return over(USE_LIMITS[what][1], user.used[what] + more, shared)
        if self.used[what] + more > total:
            return over(USE_LIMITS[what][2], self.used[what] + more, total)
        return None

    def fill(self, client: Client, what: int) -> float:
        """Return how much is used of what has least room, from 0 to 1."""
        user = client.user
        used = (client.used[what], user.used[what], self.used[what])
        most = self.most[user.is_privileged][what]
        return min(1.0, max(one / of for one, of in zip(used, most)))

    def add_up(self, users: Iterable[User]) -> None:
        """Count anew what may be half counted, as memory has run out."""
        self.used = [0] * len(USE_LIMITS)
        for user in users:
            user.used = [0] * len(USE_LIMITS)
            for client in user.clients:
                client.used = [0] * len(USE_LIMITS)
                self.use(client, CLIENTS, 1)
                self.use(client, PATTERNS, len(client.patterns))
                self.use(client, PATTERN_BYTES, sum(map(len, client.patterns)))
                self.use(client, BACKLOG_BYTES, sum(map(cost, client.backlog)))


# =============================================================================
# 8. Connections                                         spec/8-connections.md
#
# Facts
# - The selector is level-triggered: what is not read now is reported again.
# - The kernel can refuse a packet (EAGAIN) although the socket was never
#   reported as full, and take one although it was not reported as writable.
# - More on the kernel is in the chapter's notes for authors in C.
# - To learn that nothing is left costs more than to read a packet.
# - A descriptor that is closed in a round may be accepted anew in it, so
#   events name the client, which knows whether it is closed.
# =============================================================================

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Ready = tuple[selectors.SelectorKey, int]  # what, and for which events
MSG_TRUNC = socket.MSG_TRUNC
SO_PASSRIGHTS = 83  # since Linux 6.16; Python has no name for it

PACKETS_PER_TURN = 64
SINGLE_TURNS = 8  # after one that found a single packet
TURN_SECONDS_MAX = 0.001
ROUND_SECONDS_MAX = 0.002  # of all clients of a user, before others have turns
TICK_SECONDS = 0.010  # of processor time
LOOK_SECONDS = 0.005  # after which to look at the processor's time again
SMALL_DEBT_MAX = 0.010  # seconds that are made up for in rounds, not in time
DEBT_MAX = 60.0  # seconds; what is more is forgiven
NOTED_SENDS_MIN = 0.00002  # seconds, for sends to neighbours of one user
SLOW_SENDS_MIN = 0.005  # seconds, of one flush to all of a user's clients
SLOW_SECONDS = 1.0  # for which sends to a user are left to its own turns
SLOW_DEBT_MIN = 0.1  # seconds of a debt; until it is less, they are, too
BYTES_PER_TURN = 10_000_000  # times receivers
SEND_COST_BYTES = 4_096  # what a send costs beside its bytes
SEND_SECONDS = 0.000005  # that a send may take beside its bytes
BYTES_PER_SECOND = 4e9  # that a send copies at least
LARGE_BYTES = 130_000  # a packet of so many may take twice as long
READ_SECONDS = 0.00004  # in which a reader surely takes a packet
READ_BYTES_PER_SECOND = 1.25e8  # that it surely takes, beside that
READING_SECONDS = 1.0  # for which who has taken a packet counts as reading
LAG_MIN = 16_384  # bytes that wait for a client; its user's may be more
PACED_FILL_MIN = 0.25  # of the limit of a backlog
PACE_SECONDS_MAX = 0.008  # that a turn is later because of readers
CROWD_MAX = 64  # clients above a limit that are read out
COPY_BYTES_MAX = 16_384  # larger packets are sent from the receive buffer
SELECT_SECONDS_MAX = 3_600.0  # epoll knows no more than 24 days
REST_SECONDS = 0.05  # after which to try again what no event tells
STOP_SECONDS_MAX = 1.0
STOPPED_SECONDS_MIN = 1.0  # a round so much too long had the process stopped
CAUSE_LINES_MAX = 10  # a second, for one rule
CAUSES_MAX = 10_000  # pairs of rule and user that are remembered
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
SEND_BUFFER_BYTES = 212_992  # asked for at least; the kernel doubles it
RESERVE_BYTES = 4_194_304  # more than a round needs to part with a client

log = logging.getLogger("sbus")


class CauseLog:
    """Logs a line a second for a rule and user, ten for a rule [CONN-13]."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[str, dict[int, float]] = {}  # rule: uid: when
        self._left_out: Counter[tuple[str, int]] = Counter()

    def write(self, rule: str, uid: int, line: str) -> None:
        """Log a line, or count it."""
        now = self._clock()
        lines = self._lines.get(rule, {})
        lines = {one: at for one, at in lines.items() if now < at + 1.0}
        self._lines[rule] = lines  # of the last second
        if uid in lines or len(lines) == CAUSE_LINES_MAX:
            self._left_out[rule, uid] += 1
        else:
            lines[uid] = now
            left_out = self._left_out.pop((rule, uid), 0)
            more = f" ({left_out} more)" if left_out else ""
            log.warning("%s%s", line, more)
        if len(self._left_out) > CAUSES_MAX:
            self.close()

    def close(self) -> None:
        """Log how many lines were left out and not reported since."""
        totals: Counter[str] = Counter()
        for (rule, _), left_out in self._left_out.items():
            totals[rule] += left_out
        for rule, left_out in totals.items():
            log.warning("[%s] (%d more)", rule, left_out)
        self._left_out.clear()


class Server:
    """The loop: one turn for each client that is ready, and around again.

    The selector, the clocks (seconds, of the wall and of the processor) and
    the listening socket come from outside, so that a simulation can provide
    them.
    """

    def __init__(
        self,
        bus: Bus,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        allowed_uids: Set[int] | None = None,
        close_after_last: bool = False,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.bus = bus
        self.listener = listener
        self.selector = selector
        self.clock = clock
        self.processor_clock = processor_clock
        self.allowed_uids = allowed_uids  # None for everybody
        self.close_after_last = close_after_last
        self.stopping = False
        self._view = memoryview(bytearray(bus.limits.max_packet))
        self._copied_bytes_max = min(COPY_BYTES_MAX, len(self._view))
        self._head_bytes_max = bus.limits.max_key + len(b"UNSUB \0")
        self._causes = CauseLog(clock)
        self.disconnected: Counter[str] = Counter()  # for cause, by rule
        # What is to be done, to whom, and when
        self._alarms: dict[tuple[Callable[[Any], None], Any], float] = {}
        self._woken = clock()  # when the last wait was over
        # [CONN-19] Who has had how much time
        self._now = clock()  # when the last turn was over
        self._spent: dict[int, float] = {}  # seconds, not made up for, by uid
        self._turn_kinds = [WRITE, READ]  # which go first, in turns
        self._paced_until: dict[int, float] = {}  # by uid, as readers lag
        self._paced = 0.0  # seconds, because of what newcomers have sent
        self._has_debts = False  # somebody has spent too much, or is paced
        self._settled = 0.0  # when debts were, last
        self._late: dict[Client, int] = {}  # put off, and for which events
        self._accept_time = 0.0  # when newcomers have their next turn
        # [CONN-20] What sends have taken
        self._measured = 0.0  # up to when it is known who took the time
        self._offered: list[list[Packet]] = []  # since then
        self._shares: dict[User, float] = {}  # seconds more than is normal
        self._ticks: list[None] = []  # of the timer, since a turn began
        self._processed = processor_clock()  # when that was looked at last
        self._look_time = 0.0  # when to look again, before a turn
        # [CONN-12] What to do when memory runs out
        self._served: Client | None = None  # whose turn it is
        self._want: Exception | None = None  # that is to be mended
        self._reserve: bytes | None = None  # empty once memory has run out
        selector.register(listener, READ, self.accept)

    def run(self) -> None:
        """Serve until stop is called, then deliver what was read."""
        self._reserve = bytes(RESERVE_BYTES)
        while not self.stopping:
            self.round()
        self._finish()

    def stop(self) -> None:
        """Have run return soon."""
        self.stopping = True

    def round(self, seconds_max: float | None = None) -> None:
        """Wait for events, and give each client that is ready its turn."""
        try:
            if self._reserve == b"":
                self._recover()
            wait = self._wait if self._alarms else self.selector.select
            ended, ready = self._now, wait(seconds_max)
            self._now = self._woken = self.clock()
            if self._has_debts:
                self._settle_debts(self._now - ended)
            else:
                self._spent.clear()
            if self._alarms:
                self._ring()
            turns, self._late = self._late, {}
            for key, events in ready:
                if isinstance(key.data, Client):
                    turns[key.data] = events  # those put off keep their place
            self._turn_kinds.reverse()  # neither keeps the other waiting
            for kind in self._turn_kinds:
                for client, events in turns.items():
                    if events & kind:
                        self._serve(client, kind)
            for key, _ in ready:  # those who are here go before newcomers
                if not isinstance(key.data, Client):
                    key.data()
            if self.bus.journal:
                self.bus.journal.flush()
        except (OSError, MemoryError) as error:
            self._reserve, self._want = b"", error.with_traceback(None)

    def _recover(self) -> None:
        """Go on after memory has run out, which may happen here as well."""
        if self._want:
            self._mend(self._want)
        try:
            self._reserve = bytes(RESERVE_BYTES)
        except MemoryError as error:  # at the cost of who uses most
            clients = self.bus.clients.values()
            largest = max(clients, key=Client.weight, default=None)
            if largest:
                self.disconnect(largest, error)

    def _mend(self, error: Exception) -> None:
        """Part with the client whose turn it was [CONN-12].

        Anything may be half done, so all are parted with that are closed,
        and watched that are not.
        """
        self._now = self.clock()
        if self._served:
            self._flush(self._served)
            self.disconnect(self._served, error)
            self._served = None
        else:
            self._causes.write("CONN-12", -1, f"[CONN-12] {error!r}")
        for client in [*self.bus.clients.values()]:
            if client.closed:
                self.disconnect(client, "no memory")
            elif client.fault:
                self._set_alarm(self._shut, client, 0.0)
            client.starved = False
            self._limit_holding(client)
            self._watch(client)
        self._listen(self.listener)
        self.bus.accounts.add_up(self.bus.users.values())
        self._want = None

    # ---- When time is up

    def _set_alarm(
        self, call: Callable[[Any], None], client: Any, seconds: float
    ) -> None:
        """Have something done after some time, unless it is to be already."""
        self._alarms.setdefault((call, client), self.clock() + seconds)

    def _wait(self, seconds_max: float | None) -> list[Ready]:
        """Wait for an event or the next alarm, and return what is ready."""
        most = SELECT_SECONDS_MAX if seconds_max is None else seconds_max
        most = min(most, max(0.0, min(self._alarms.values()) - self.clock()))
        ready = self.selector.select(most)
        passed = self.clock() - self._woken
        if passed > most + STOPPED_SECONDS_MIN:
            for alarm in self._alarms:  # nobody could be served meanwhile
                self._alarms[alarm] += passed
        return ready

    def _ring(self) -> None:
        """Do what is due and no event asks for."""
        now = self.clock()
        for alarm in [*self._alarms]:
            call, client = alarm
            must_wait = isinstance(client, Client) and self._owes(client.user)
            if self._alarms.get(alarm, math.inf) <= now and not must_wait:
                del self._alarms[alarm]
                call(client)

    def _feed(self, client: Client) -> None:
        """Send to a client for which the kernel had no memory [CONN-9]."""
        client.starved = False
        self._serve(client, WRITE)
        self._watch(client)

    def _check_holder(self, client: Client) -> None:
        """Disconnect who holds publishers and takes no packet [BLOCK-16]."""
        # A reader of few packets may have made room without an event
        self._serve(client, WRITE)
        if client.holding and (self._check_holder, client) not in self._alarms:
            what = "holds publishers and takes no packet"
            self.expel(client, ProtocolError("BLOCK-16", what))

    def _listen(self, listener: socket.socket) -> None:
        """Watch the listening socket again [CONN-3]."""
        if self.stopping:
            return
        try:
            with contextlib.suppress(KeyError):  # it was not unregistered
                self.selector.register(listener, READ, self.accept)
        except (OSError, MemoryError):
            self._set_alarm(self._listen, listener, REST_SECONDS)

    # ---- When a user has had enough

    def _settle_debts(self, idle: float) -> None:
        """Have users who took too much time make up for it [CONN-19].

        A large debt takes time: rounds in which nobody has a turn are short,
        and in the *idle* seconds before this one nobody wanted any.
        """
        passed = ROUND_SECONDS_MAX
        if len(self.bus.users) > 1:
            passed = min(passed, (self._now - self._settled) / 4)
        passed = max(passed, idle / 4)
        self._settled = self._now
        for uid, spent in self._spent.items():
            is_small = spent <= SMALL_DEBT_MAX
            self._spent[uid] -= ROUND_SECONDS_MAX if is_small else passed
        self._spent = {uid: s for uid, s in self._spent.items() if s > 0}
        times, now = self._paced_until, self._now
        self._paced_until = {uid: t for uid, t in times.items() if t > now}
        self._has_debts = bool(self._spent or self._paced_until)

    def _serve(self, client: Client, kind: int, is_new: bool = False) -> None:
        """Give a client a turn, unless its user had enough [CONN-19]."""
        if client.closed:
            return
        if self._has_debts and not is_new:
            user = client.user
            if self._owes(user) or (kind == READ and self._is_paced(user)):
                self._late[client] = self._late.get(client, 0) | kind
                return
        if self._now > self._look_time:
            self._look_time = self._now + LOOK_SECONDS
            self._processed = self.processor_clock()
        self._served = client
        if kind == READ:
            self.turn(client)
        elif not client.deaf:  # since this round began
            self.drain(client)
        self._served = None
        self._charge(client.user, self.clock() - self._now)

    def _charge(self, user: User, seconds: float) -> None:
        """Have a user account for what follows the time accounted for."""
        start = self._now
        self._now += seconds
        if seconds > ROUND_SECONDS_MAX:  # to wait for others is no fault
            seconds = min(seconds, self.processor_clock() - self._processed)
        spent = self._spent.get(user.uid, 0.0) + seconds
        if spent >= ROUND_SECONDS_MAX:
            spent = min(spent, DEBT_MAX)
            if not self._has_debts:
                self._has_debts, self._settled = True, start
        self._spent[user.uid] = spent

    def _owes(self, user: User, least: float = ROUND_SECONDS_MAX) -> bool:
        """Return whether a user has had enough [CONN-19]."""
        return self._spent.get(user.uid, 0.0) >= least

    def _is_paced(self, user: User) -> bool:
        """Return whether a user has to wait for readers [CONN-19]."""
        return self._now < self._paced_until.get(user.uid, 0.0)

    # ---- On a new connection

    def accept(self) -> None:
        """Let in clients that wait, and give each its first turn."""
        start, processed = self._now, self.processor_clock()
        if start < self._accept_time:
            return
        self._paced = 0.0
        while self._now + self._paced < start + ROUND_SECONDS_MAX:
            try:
                wire, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except (OSError, MemoryError) as error:
                # No event tells when there are descriptors or memory again
                self._causes.write("CONN-3", -1, f"[CONN-3] accept: {error}")
                self._set_alarm(self._listen, self.listener, REST_SECONDS)
                with contextlib.suppress(OSError, MemoryError):
                    self.selector.unregister(self.listener)
                break
            self._admit(wire)
            self._now = self.clock()
        taken = min(self._now - start, self.processor_clock() - processed)
        if taken > 2 * ROUND_SECONDS_MAX:  # what they sent was costly
            self._accept_time = start + 4 * taken
        paced = min(self._paced, PACE_SECONDS_MAX)
        self._accept_time = max(self._accept_time, start + paced)

    def _admit(self, wire: socket.socket) -> None:
        """Make a client of a new connection, and give it its first turn.

        One that has said all and left is gone then, and never one too many.
        """
        try:
            packed = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, gid = struct.unpack("iII", packed)  # [CRED-1]
            if self.allowed_uids is not None and uid not in self.allowed_uids:
                refused = f"refuse uid={uid} pid={pid} [CONN-2] not a user"
                self._causes.write("CONN-2", uid, f"{refused} of this bus")
                wire.close()
                return
            wire.setblocking(False)
            with contextlib.suppress(OSError):  # [CONN-7] before the start
                wire.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            size = send_buffer_bytes(self.bus.limits.max_packet)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        except (OSError, MemoryError):
            wire.close()
            return
        client = self.bus.open(Credentials(gid, uid, pid), wire)  # [CONN-4]
        self._serve(client, READ, is_new=True)
        if not client.closed:
            self._judge(client)
            self._watch(client)
            gc.collect(1)  # its backlog, once long, is not looked at again

    def _judge(self, client: Client) -> None:
        """Disconnect a newcomer that is one too many.

        What it sent is read first, unless many wait for that [LIMIT-18].
        """
        late = sum(one.user is client.user for one in self._late)
        late = min(late, CROWD_MAX)  # they may have left
        excess = self.bus.accounts.excess
        error = excess(client, CLIENTS, -late)
        if error:  # [LIMIT-7] [LIMIT-11]
            if excess(client, CLIENTS, -late - CROWD_MAX):
                self.disconnect(client, error)
            else:
                self.expel(client, error, ignored=bool(client.held_by))

    # ---- When reading

    def turn(self, client: Client) -> None:
        """Read a run of a client's packets, route them, and flush [CONN-5]."""
        ended = False
        fault: Exception | None = None
        self._ticks.clear()
        try:
            ended = self._receive(client)
        except ConnectionResetError:
            pass  # [CONN-6] its packets are still to come
        except (ProtocolError, OSError) as error:
            fault = error.with_traceback(None)  # which would hold this frame
        self._flush(client)  # [CONN-11]
        if isinstance(fault, ProtocolError):
            self.expel(client, fault, ignored=True)
        elif fault:
            self.disconnect(client, fault)
        elif ended:
            self._depart(client)
        elif client.held_by:
            self._watch(client)

    def _receive(self, client: Client) -> bool:
        """Route a run of packets [PKT-5]; return whether the input has ended.

        recv_into takes no descriptors, so the kernel closes any [CONN-7].
        After a turn that found one packet, the next few look for one only.
        """
        touched, recv_into = self.bus.touched, client.wire.recv_into
        handle = (lambda *_: WORK_MAX) if client.ignored else self.bus.handle
        view, copied_max = self._view, self._copied_bytes_max
        work, ticks, end = 0, self._ticks, self._now + TURN_SECONDS_MAX
        packets_max = PACKETS_PER_TURN
        if client.single_turns:
            client.single_turns -= 1
            packets_max = 1
        for count in range(1, packets_max + 1):
            try:
                size = recv_into(view, 0, MSG_TRUNC)
            except BlockingIOError:  # all is read
                if count == 2:
                    client.single_turns = SINGLE_TURNS
                return False
            if not size:
                return self._is_end(client)
            if size <= copied_max:
                packet = view[:size].tobytes()
                work += handle(client, packet, packet)
            else:
                work += self._handle_large(client, size, handle)
                if client.held_by or client.closed:
                    break
                if self._is_paced(client.user):
                    break
            if work >= WORK_MAX or ticks:
                work = 0
                sent = (count + 1) * len(touched) * (size + SEND_COST_BYTES)
                if sent > BYTES_PER_TURN or self.clock() >= end:
                    break
        return False

    def _handle_large(
        self, client: Client, size: int, handle: Callable[..., int]
    ) -> int:
        """Route a packet from the buffer, which the flush sets free."""
        most = self.bus.limits.max_packet
        if size > most:  # [LIMIT-1] [LIMIT-2] [LIMIT-3]
            raise over("max_packet", size, most)
        head = self._view[: min(size, self._head_bytes_max)].tobytes()
        handle(client, self._view[:size], head)
        self._flush(client)
        return WORK_MAX

    def _is_end(self, client: Client) -> bool:
        """Return that the input has ended, or raise ProtocolError [PKT-4].

        After the end comes the end, or once a reset, which is turn's to pass
        over.  A packet, even an empty one, would come with credentials.
        """
        with contextlib.suppress(BlockingIOError):
            client.wire.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            _, credentials, *_ = client.wire.recvmsg(0, socket.CMSG_SPACE(12))
            if not credentials:
                return True
        raise ProtocolError("PKT-4", "empty packet")

    # ---- When sending

    def _flush(self, publisher: Client) -> None:
        """Offer to the kernel what a publisher's turn has routed."""
        touched = self.bus.touched
        if not touched:
            return
        user = touched[0].user
        self._shares.clear()
        self._measured = start = self.clock()
        for client in touched:
            if client.user is not user:
                self._judge_sends(user)
                user = client.user
            if not client.closed:
                self._offered.append(client.outbox)
                self.deliver(client, publisher)
        if self.clock() > start + SLOW_SENDS_MIN:
            self._judge_sends(user)
        self._offered.clear()
        touched.clear()

    def _judge_sends(self, user: User) -> None:
        """Leave a user to itself if sends to its clients have taken long.

        What a flush costs is its publisher's to account for, but not what
        the receivers have made it cost.  All that was offered since that was
        measured last was offered to clients of this user [CONN-20].
        """
        now = self.clock()
        seconds, offered = now - self._measured, self._offered
        self._measured, self._offered = now, []
        if seconds < NOTED_SENDS_MIN:
            return
        sizes = [len(packet) for outbox in offered for packet in outbox]
        size = sum(one + one * one / LARGE_BYTES for one in sizes)
        normal = len(sizes) * SEND_SECONDS + size / BYTES_PER_SECOND
        extra = max(0.0, seconds - normal)
        share = self._shares[user] = self._shares.get(user, 0.0) + extra
        if share > SLOW_SENDS_MIN:
            worked = self.processor_clock() - self._processed
            if worked > SLOW_SENDS_MIN + LOOK_SECONDS:  # in this turn, surely
                self._leave_to_itself(user, share)
                self._shares.clear()

    def deliver(self, client: Client, publisher: Client) -> None:
        """Empty a client's outbox into the kernel, or its backlog [PUB-6]."""
        client.delivered += len(client.outbox)
        packets, client.outbox = iter(client.outbox), []
        send, used = client.wire.send, client.used
        more = self.bus.journal or self._ticks  # to look at after each send
        if client.put_off and not used[BACKLOG_BYTES]:
            client.put_off = self._is_slow(client.user)
        is_stalled = False
        while True:
            packet = None
            try:
                if not (used[BACKLOG_BYTES] or client.deaf or client.put_off):
                    for packet in packets:
                        send(packet)  # [BLOCK-3] [BLOCK-6]
                        if more and self._is_put_off(client, packet):
                            break
                    else:
                        break
                packet = next(packets, None)
            except BlockingIOError:
                pass
            except (OSError, MemoryError) as error:
                self._take_error(client, error)
            if packet is None or client.closed:
                break
            is_stalled = True
            self._refuse(client, packet, publisher)
        if is_stalled:
            self._after_refusal(client)

    def _is_put_off(self, client: Client, packet: Packet) -> bool:
        """Note a send; return whether the next are left to turns [CONN-20]."""
        self.bus.tell("send", client, packet=packet)
        if self._ticks:
            self._ticks.clear()
            self._judge_sends(client.user)
        return client.put_off

    def _refuse(
        self, client: Client, packet: Packet, publisher: Client
    ) -> None:
        """Have it decided what becomes of a packet that was not taken."""
        client.delivered -= 1
        waiting = client.used[BACKLOG_BYTES]
        try:
            self.bus.flood.refuse(client, packet, publisher)
        except (ProtocolError, MemoryError) as error:
            self.expel(client, error)
            self.bus.flood.discard(client, [packet], "deaf")
        is_queued = client.used[BACKLOG_BYTES] > waiting
        if is_queued and client.user is not publisher.user:
            if not waiting:
                client.progressed = self._now
            self._keep_pace(publisher.user, client, packet)

    def _keep_pace(self, user: User, reader: Client, packet: Packet) -> None:
        """Have a user wait while a reader takes a packet, if it lags much.

        Or a flood would outrun readers of another user that take all they
        get.  It waits neither for slow ones nor for those who do not read
        [CONN-19].
        """
        fill = self.bus.accounts.fill(reader, BACKLOG_BYTES)
        lags = fill >= PACED_FILL_MIN and reader.used[BACKLOG_BYTES] > LAG_MIN
        if lags and self._now < reader.progressed + READING_SECONDS:
            pace = READ_SECONDS + len(packet) / READ_BYTES_PER_SECOND
            self._paced += fill * pace
            until = max(self._now, self._paced_until.get(user.uid, 0.0))
            until = min(until + fill * pace, self._now + PACE_SECONDS_MAX)
            self._paced_until[user.uid] = until
            self._has_debts = True

    def _is_slow(self, user: User) -> bool:
        """Return whether sends to a user wait for its turns [CONN-20].

        If much waits already, they do until it has made up for the last.
        """
        if user.slow_until <= self._now:
            return self._owes(user, SLOW_DEBT_MIN)
        most = self.bus.limits.max_user_backlog // 4
        return user.used[BACKLOG_BYTES] < most or self._owes(user)

    def _leave_to_itself(self, user: User, seconds: float) -> None:
        """Leave sends to a user's clients to its own turns for a while.

        A filter on a client's socket, or many that watch it, make each send
        take long.  The user accounts for what they have taken [CONN-20].
        Whose own turn it is waits for that, so the end of it is enough.
        """
        self._charge(user, seconds)
        user.slow_until = self.clock()
        if not (self._served and self._served.user is user):
            user.slow_until += SLOW_SECONDS
        for client in user.clients:
            client.put_off = True

    def tick(self, *_: object) -> None:
        """Have the clock asked in the middle of sends to one user.

        To ask it after each would cost too much.  The kernel ticks if it can.
        """
        self._ticks[:] = [None]  # or they add up while nobody has a turn

    def _take_error(self, client: Client, error: Exception) -> None:
        """Do what an error of send asks for [CONN-8] [CONN-9] [CONN-12]."""
        number = getattr(error, "errno", None)
        if number in (errno.ENOBUFS, errno.ENOMEM):
            client.starved = True
            self._set_alarm(self._feed, client, REST_SECONDS)
            self._watch(client)
        elif number in (errno.EPIPE, errno.ECONNRESET):
            self.bus.flood.deafen(client)
            self._after_progress(client)
        else:
            self.expel(client, error)

    def _after_refusal(self, client: Client) -> None:
        """Wait for a stalled client, and not for ever."""
        self._watch(client)
        self._limit_holding(client)
        if client.discarded and not (client.discard_logged or client.fault):
            client.discard_logged = True
            why = f"soft={client.soft_mode} hard={client.hard_mode}"
            why += f" deaf={client.deaf} backlog={client.used[BACKLOG_BYTES]}"
            line = f"discard {client} [BLOCK-20] {why}"
            self._causes.write("BLOCK-20", client.credentials.uid, line)

    def drain(self, client: Client) -> int:
        """Offer a backlog; return how many were taken [CONN-5]."""
        backlog, send = client.backlog, client.wire.send
        end = self._now + TURN_SECONDS_MAX
        taken = taken_bytes = 0
        error: OSError | None = None
        try:
            for _ in range(len(backlog)):
                packet = backlog.first()
                send(packet)
                backlog.pop()
                taken += 1
                taken_bytes += cost(packet)
                if self.bus.journal:
                    self.bus.tell("send", client, packet=packet)
                if self.clock() >= end:
                    break
        except BlockingIOError:
            pass
        except OSError as other:
            error = other.with_traceback(None)  # which would hold this frame
        if taken:
            backlog.trim()
            self.bus.accounts.use(client, BACKLOG_BYTES, -taken_bytes)
            client.progressed = self._now
            client.delivered += taken
            self._after_progress(client)
        if error:
            self._take_error(client, error)
        return taken

    def _after_progress(self, client: Client) -> None:
        """Resume publishers that need not wait for a client any longer."""
        for publisher in self.bus.flood.release(client):
            self._watch(publisher)
        self._alarms.pop((self._check_holder, client), None)
        self._limit_holding(client)
        self._watch(client)

    def _limit_holding(self, client: Client) -> None:
        """Have a client hold publishers for some time only [BLOCK-16]."""
        if client.holding:
            seconds = self.bus.limits.block_timeout
            self._set_alarm(self._check_holder, client, seconds)

    # ---- When a client leaves
    # _depart is for the end of its input; expel, for a fault, shuts it down
    # and has what it sent read, up to _depart.  Both end in disconnect.

    def _depart(self, client: Client) -> None:
        """Hand to the kernel what it takes of a backlog, and close.

        That may take several turns; the end is reported again [CONN-10].
        """
        if client.deaf:
            self.bus.flood.deafen(client)
        if self.drain(client) and client.backlog:
            return
        start = self.clock()
        for pattern in [*client.patterns]:
            self.bus.drop(client, pattern)
            if self.clock() >= start + TURN_SECONDS_MAX:
                return
        self.disconnect(client, client.fault or "end of input")

    def expel(
        self, client: Client, error: Exception, ignored: bool = False
    ) -> None:
        """Disconnect a client once all that it sent is read [CONN-18].

        To close a socket with much unread can take long, so what need not
        be handled is read as well, in turns.
        """
        if ignored:
            client.ignored = True
            self._free(client)
        if client.closed or client.fault:
            return
        client.fault = self._blame(client, error)
        client.deaf = True
        self._watch(client)
        if self._served in (None, client):
            self._shut(client)
        else:  # that is not to be paid by whose turn it is
            self._set_alarm(self._shut, client, 0.0)

    def _shut(self, client: Client) -> None:
        """Let a client send no more, which may take long if it is watched."""
        with contextlib.suppress(OSError, MemoryError):
            client.wire.shutdown(socket.SHUT_RDWR)
        self._after_progress(client)
        self._charge(client.user, self.clock() - self._now)

    def disconnect(self, client: Client, cause: str | Exception) -> None:
        """Forget a client and close its socket [CONN-12] [LIMIT-19].

        If memory has run out half way, all is done again.
        """
        if client.number not in self.bus.clients:
            return
        if isinstance(cause, Exception):
            cause = client.fault or self._blame(client, cause)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self.selector.unregister(client.wire)  # if it is watched
        if not client.closed:
            client.closed = True
            with contextlib.suppress(OSError):
                client.wire.close()
        self._free(client)
        resumed = self.bus.close(client, cause)
        for call in (self._check_holder, self._feed, self._shut):
            self._alarms.pop((call, client), None)
        for publisher in resumed:
            self._watch(publisher)
        if self.close_after_last and not self.bus.clients:
            self.stop()  # [RUN-11]

    def _free(self, publisher: Client) -> None:
        """Have nobody hold a publisher any longer."""
        for holder in publisher.held_by:
            holder.holding.pop(publisher, None)
            if not holder.holding:
                self._alarms.pop((self._check_holder, holder), None)
        publisher.held_by.clear()
        self._watch(publisher)

    def _blame(self, client: Client, error: Exception) -> str:
        """Log who is disconnected, and return why [CONN-13]."""
        if isinstance(error, MemoryError):
            self._reserve = b""  # to go on
            error = ProtocolError("CONN-12", "there is no memory for it")
        elif not isinstance(error, ProtocolError):
            error = ProtocolError("CONN-12", str(error))
        rule = error.requirement
        self.disconnected[rule] += 1
        line = f"disconnect {client} {error}"
        if client.backlog:
            line += f", backlog of {len(client.backlog)} packets lost"
        self._causes.write(rule, client.credentials.uid, line)
        return str(error)

    def _watch(self, client: Client) -> None:
        """Have the selector watch for what it can do [BLOCK-12] [CONN-9]."""
        events = 0 if client.held_by or self.stopping else READ
        is_ready = not (client.starved or client.deaf)
        if client.used[BACKLOG_BYTES] and is_ready:
            events |= WRITE
        if client.closed or events == client.events:
            return
        before, client.events = client.events, events
        try:
            if not before:
                self.selector.register(client.wire, events, client)
            elif events:
                self.selector.modify(client.wire, events, client)
            else:
                self.selector.unregister(client.wire)
        except (OSError, MemoryError) as error:
            self.disconnect(client, error)

    def _finish(self) -> None:
        """Deliver what was read, for a second at most, and close [RUN-12]."""
        with contextlib.suppress(KeyError, OSError, MemoryError):
            self.selector.unregister(self.listener)  # if it is not resting
        self._late.clear()
        clients = self.bus.clients
        for client in list(clients.values()):
            self._watch(client)
        end = self.clock() + STOP_SECONDS_MAX
        while (left := end - self.clock()) > 0 and any(
            one.backlog and not one.deaf for one in clients.values()
        ):
            self.round(left)
        self.listener.close()
        for client in list(clients.values()):
            self.disconnect(client, "stop")
        self._causes.close()


def send_buffer_bytes(max_packet: int) -> int:
    """Return what to ask of the kernel, which doubles it, for it to fit."""
    needed = max_packet + SOCKET_OVERHEAD_BYTES
    return max(SEND_BUFFER_BYTES, (needed + 1) // 2)


# =============================================================================
# 9. Running                                                 spec/9-running.md
#
# Facts
# - The kernel says whether anybody is bound to a path without a visit: to
#   connect a datagram socket fails with EPROTOTYPE if so, and with
#   ECONNREFUSED if the socket is stale.
# - Whatever keeps the server from starting is a StartError, or an OSError
#   that names a file.  What it has opened then, its end closes.
# - The mode of a socket is the umask's doing; chmod would come too late.
# - A handler of a signal does not end select, the wake-up descriptor does.
# =============================================================================

SOCKET_KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # [CONN-1]
DESCRIPTORS_KEPT = 16  # for all that is not a client
PATH_BYTES_MAX = 107
ABSTRACT_BYTES = 108
ABSTRACT = "/dev/unix/abstract"
LISTEN_BACKLOG = 4_096
TAKEN = "a server listens there already"
LOCK_SECONDS_MAX = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGPROF)
STATS_LINES_MAX = 100
LOG_LINE_BYTES_MAX = 300  # no pipe that has room makes such a line wait


# ---- Addresses


def default_address() -> str:
    """Return where to listen if nothing else is said [ADDR-1] [ADDR-2]."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    if count and pid == str(os.getpid()):  # systemd has handed over so many
        if count != "1":
            raise StartError(f"LISTEN_FDS is {count}; one socket is needed")
        return "/dev/fd/3"
    if os.getuid() == 0:
        return "/run/sbus.socket"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise StartError("XDG_RUNTIME_DIR is not set; use -a ADDRESS")
    return os.path.join(directory, "sbus.socket")


class Endpoint(NamedTuple):
    """A listening socket, and what is to be removed when it is closed."""

    listener: socket.socket
    address: str  # as a client of any directory can use it
    is_guarded: bool  # against descriptors of clients
    file: int  # what we created at a path, kept open, or -1

    def close(self) -> None:
        """Close the socket, and remove it if it is still ours [ADDR-10]."""
        self.listener.close()
        if self.file >= 0:
            with (
                contextlib.suppress(StartError),
                directory_lock(os.path.dirname(self.address)),
            ):
                remove(self.file, self.address)


def open_endpoint(address: str, mode: int, replace: bool) -> Endpoint:
    """Listen at an address of any kind; the mode is for a path [ADDR-7]."""
    given, file = address, -1
    try:
        if address.startswith("/dev/fd/"):
            listener = inherit(address)
        else:
            listener = socket.socket(*SOCKET_KIND)
            if address == ABSTRACT or address.startswith(ABSTRACT + "/"):
                name = abstract_name(address)
                listener.bind(name)
                address = f"{ABSTRACT}/{name.hex()}"
            else:
                address, file = bind_path(listener, address, mode, replace)
        is_guarded = refuse_descriptors(listener)
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        what = TAKEN if is_taken else error.strerror
        raise StartError(f"{given}: {what}") from None
    listener.setblocking(False)
    return Endpoint(listener, address, is_guarded, file)


def inherit(address: str) -> socket.socket:
    """Return a socket that the parent process opened [ADDR-2] [ADDR-3]."""
    number = address[len("/dev/fd/") :]
    if not re.fullmatch("[0-9]{1,9}", number):
        raise StartError(f"{address}: not a descriptor's number")
    descriptor = int(number)
    if descriptor < 3:  # [RUN-7] those have other uses
        descriptor = os.dup(descriptor)
    listener = socket.socket(fileno=descriptor)
    if (listener.family, listener.type) != SOCKET_KIND:
        raise StartError(f"{address}: not a Unix-domain SEQPACKET socket")
    return listener


def abstract_name(address: str) -> bytes:
    """Return the 108 bytes that an address stands for [ADDR-4] [ADDR-5]."""
    if address == ABSTRACT:
        return b"\0" + os.urandom(ABSTRACT_BYTES - 1)
    digits = address[len(ABSTRACT) + 1 :]
    if not re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
        raise StartError(
            f"after {ABSTRACT}/ come 2 to 216 hexadecimal digits, an even"
            f" number, that begin with 00: {digits!r}"
        )
    return bytes.fromhex(digits).ljust(ABSTRACT_BYTES, b"\0")


def bind_path(
    listener: socket.socket, path: str, mode: int, replace: bool
) -> tuple[str, int]:
    """Create a socket in a directory; return its absolute path, and open it.

    Spec: [ADDR-6] [ADDR-8] [ADDR-9].
    """
    name = os.fsencode(path)
    if not name or b"\0" in name or len(name) > PATH_BYTES_MAX:
        what = f"a path has 1 to {PATH_BYTES_MAX} bytes, none NUL"
        raise StartError(f"{what}: {path!r}")
    address = absolute(path)
    with directory_lock(os.path.dirname(address)):
        make_way(path, replace)
        before = os.umask(0o777 & ~mode)
        listener.bind(name)
        os.umask(before)
        return address, os.open(address, os.O_PATH | os.O_NOFOLLOW)


def make_way(path: str, replace: bool) -> None:
    """Remove a stale socket or an empty file, and nothing else [ADDR-8]."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    is_socket = stat.S_ISSOCK(status.st_mode)
    is_empty = stat.S_ISREG(status.st_mode) and status.st_size == 0
    if is_socket and not is_stale(path):
        raise StartError(f"{path}: {TAKEN}")
    if replace and (is_socket or is_empty):
        return os.unlink(path)
    what = "what is there is no socket; use another address"
    if is_socket:
        what = "a stale socket is there; -r replaces it"
    raise StartError(f"{path}: {what}")


def is_stale(path: str) -> bool:
    """Return whether no process is bound to the socket at a path [ADDR-8]."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def absolute(path: str) -> str:
    """Return what leads to a file from every directory.

    A ".." stays: what it means behind a link is for the kernel to say.
    """
    return path if path[:1] == "/" else os.path.join(os.getcwd(), path)


def is_in_place(descriptor: int, path: str) -> bool:
    """Return whether a path leads to an open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def refuse_descriptors(listener: socket.socket) -> bool:
    """Have the kernel refuse the descriptors that clients pass [CONN-7].

    To close one that nobody else holds may take its owner's time: a socket
    can be made to linger.  Return whether no client can pass any, or has.
    """
    level = socket.SOL_SOCKET
    try:
        was_open = listener.getsockopt(level, SO_PASSRIGHTS)
        listener.setsockopt(level, SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return not (was_open and listener.getsockopt(level, socket.SO_ACCEPTCONN))


@contextlib.contextmanager
def directory_lock(directory: str) -> Iterator[None]:
    """Keep other servers from starting or ending in a directory [ADDR-9].

    It is held from the look at what is there until the socket is bound.
    Whoever can read the directory can keep the lock, so none is waited for
    any longer than a start takes.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # to bind may be allowed all the same
        yield
        return
    except OSError as error:
        raise StartError(f"directory {directory}: {error.strerror}") from None
    try:
        end = time.monotonic() + LOCK_SECONDS_MAX
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


# ---- The pid file


def open_pid_file(path: str) -> int:
    """Return a descriptor of a pid file, locked as long as it is open."""
    descriptor = open_regular(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"{path}: a server holds this file") from None
    if not is_in_place(descriptor, path):
        what = "a server has just removed this file; try again"
        raise StartError(f"{path}: {what}")
    text = os.pread(descriptor, 32, 0)
    if text and not re.fullmatch(rb"[0-9]{1,10}\n?", text):
        raise StartError(f"{path}: not a pid file; it is left as it is")
    if text and is_alive(int(text)):  # [RUN-9]
        raise StartError(f"{path}: process {int(text)} is alive")
    return descriptor


def remove(descriptor: int, path: str) -> None:
    """Close a file, and remove it if it is still in its place.

    While it is open, no other can have its number [ADDR-10] [RUN-13].
    """
    if is_in_place(descriptor, path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Return whether a process lives; a zombie has only not been buried."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as status:
            state = status.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"ZX"


def open_regular(path: str, flags: int = 0) -> int:
    """Open or create a file of our own, or root's, to read and write it."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        what = "a symbolic link is not followed" if is_link else error.strerror
        raise StartError(f"{path}: {what}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StartError(f"{path}: not a regular file")
    if status.st_uid not in (0, os.getuid()):
        raise StartError(f"{path}: another user's file")
    return descriptor


# ---- The log


class LogHandler(logging.Handler):
    """Writes to standard error and never waits for it [RUN-15] [RUN-16].

    A line that would have to wait is left out.  A terminal says that it has
    room when it has little, and who reads a pipe can make it smaller, so they
    are opened anew as what never waits.
    """

    def __init__(self) -> None:
        super().__init__()
        with contextlib.suppress(OSError):  # neither, or not ours
            if not stat.S_ISREG(os.fstat(2).st_mode):
                flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
                redirect(2, "/proc/self/fd/2", flags)

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub("[^ -~]", "?", f"sbusd: {record.getMessage()}")
        line = text[: LOG_LINE_BYTES_MAX - 1].encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            if select.select((), (2,), (), 0)[1]:
                os.write(2, line)


# ---- The journal

# What a line of the trace says of an event, by its name
TRACED: dict[str, Callable[[Client, int, str, int], str]] = {
    "open": lambda c, *_: (
        f',"c":{c.number},"gid":{c.credentials.gid}'
        f',"uid":{c.credentials.uid},"pid":{c.credentials.pid}'
    ),
    "close": lambda c, m, t, n: f',"c":{c.number},"reason":{json_of(t)}',
    "sub": lambda c, m, t, n: f',"c":{c.number},"pattern":{json_of(t)}',
    "unsub": lambda c, m, t, n: f',"c":{c.number},"pattern":{json_of(t)}',
    "ctl": lambda c, m, t, n: f',"c":{c.number},"key":{json_of(t)}',
    "msg": lambda c, m, t, n: (
        f',"c":{c.number},"m":{m},"key":{json_of(t)},"size":{n}'
    ),
    "send": lambda c, m, *_: f',"m":{m},"c":{c.number}',
    "drop": lambda c, m, t, n: f',"m":{m},"c":{c.number},"reason":"{t}"',
}
LOGGED = {  # what the log says of it with -v
    "open": "open %(who)s [CRED-1]",
    "close": "close %(who)s %(text)s",
    "sub": "%(who)s SUB %(text)s: its count is %(count)d [%(rule)s]",
    "unsub": "%(who)s UNSUB %(text)s: its count is %(count)d [UNSUB-1]",
    "ignore": "%(who)s UNSUB %(text)s: ignored [UNSUB-2]",
    "ctl": "%(who)s CMSG %(text)s [%(rule)s]",
    "msg": "%(who)s MSG %(text)s %(size)d bytes, message %(m)d: "
    "receivers: %(receivers)d [%(rule)s]",
    "send": "%(who)s: sent %(what)s [%(rule)s]",
    "queue": "%(who)s: stalled, queued %(what)s, "
    "backlog %(backlog)d bytes [%(rule)s]",
    "drop": "%(who)s: discarded %(what)s %(text)s [%(rule)s]",
    "pause": "%(who)s: paused for client=%(holder)d [%(rule)s]",
    "resume": "%(who)s: resumed [BLOCK-12]",
}


class Journal:
    """Writes what the bus does to a trace of JSON lines, and to the log.

    Spec: [TRACE-1] [TRACE-2] [TRACE-3] [TRACE-4] [TRACE-5] [TRACE-6].
    """

    def __init__(
        self, trace: int, about: dict[str, str], payloads: bool, verbose: bool
    ) -> None:
        self._trace = trace  # its descriptor, or -1
        self._about = f",{json.dumps(about)[1:-1]}"
        self._payloads = payloads
        self._verbose = verbose
        self._events = 0
        self._lines: list[str] = []
        if trace >= 0:
            size = os.fstat(trace).st_size
            if size and os.pread(trace, 1, size - 1) != b"\n":
                self._lines.append("\n")  # the last server was killed
        self._write("start", self._about)
        self.flush()

    def note(
        self,
        event: str,
        client: Client,
        text: str = "",
        packet: Packet = b"",
        **facts: Any,
    ) -> None:
        """Write an event wherever it belongs."""
        number = getattr(packet, "number", 0)
        start = len(text) + len(b"MSG \0")
        size = len(packet) - start
        if event in TRACED and (number or not packet):
            line = TRACED[event](client, number, text, size)
            if self._payloads and event == "msg" and text[:7] != "!/cred/":
                data = base64.b64encode(packet[start:]).decode("ascii")
                line += f',"data":"{data}"'  # [TRACE-4]
            self._write(event, line)
        if self._verbose:
            rule = "CRED-10" if text[:7] == "!/cred/" else "PUB-1"
            facts.setdefault("rule", rule if number else "CTL-3")
            facts["what"] = f"message {number}" if number else "an answer"
            facts.update(who=client, m=number, size=size)
            facts["text"] = json_of(text)[:80]
            log.debug(LOGGED[event], facts)

    def _write(self, event: str, fields: str) -> None:
        self._events += 1
        head = f'{{"n":{self._events},"t":{time.time_ns()},"ev":"{event}"'
        self._lines.append(f"{head}{fields}}}\n")

    def flush(self) -> None:
        """Hand the events of a round to the kernel."""
        text = "".join(self._lines).encode("ascii")
        self._lines.clear()
        try:
            while text and self._trace >= 0:
                text = text[os.write(self._trace, text) :]
        except OSError as error:
            log.error("[TRACE-6] no trace from now on: %s", error)
            os.close(self._trace)
            self._trace = -1

    def close(self) -> None:
        """Write the last event."""
        self._write("stop", self._about)
        self.flush()
        if self._trace >= 0:
            os.close(self._trace)


# ---- The command line


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line [RUN-1]."""

    def error(self, message: str) -> NoReturn:
        log.error("%s; --help lists the options", message)
        sys.exit(2)


def limit(is_whole: bool, text: str) -> float:
    """Return a limit, which only seconds have a fraction of [LIMIT-8]."""
    if text == "unlimited":
        return sys.maxsize if is_whole else math.inf
    fraction = "" if is_whole else r"(\.[0-9]{1,9})?"
    if re.fullmatch("[0-9]{1,15}" + fraction, text) and float(text):
        return int(text) if is_whole else float(text)
    what = "whole number" if is_whole else "number of seconds"
    what = f"{text!r} is neither a {what} above 0 nor 'unlimited'"
    raise argparse.ArgumentTypeError(what)


def user_id(text: str) -> int:
    """Return the number of a user who is given by name or number."""
    if re.fullmatch("[0-9]{1,10}", text) and int(text) < (1 << 32) - 1:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"no such user: {text!r}") from None


def prefix(text: str) -> bytes:
    """Return a credential prefix [CRED-9]."""
    encoded = os.fsencode(text)
    if not re.fullmatch(rb"(?:!/cred/\d+/\d+/\d+(?:/(?!\Z)|\Z))+", encoded):
        what = f"{text!r} is not of the form !/cred/GID/UID/PID"
        raise argparse.ArgumentTypeError(what)
    return encoded


SWITCHES = (
    ("-c", "--close", "exit when the last client has gone"),
    ("-d", "--daemon", "detach; log only if standard error is a file"),
    ("-f", "--foreground", "do not detach (default)"),
    ("-g", "--group", "let the group connect"),
    ("-o", "--others", "let others connect"),
    ("-r", "--replace", "replace a stale socket"),
    ("--strict", "disconnect where a server MAY"),
    ("--trace-payload", "write the payloads, too"),
    ("-v", "--verbose", "log every decision"),
)


def option_of(name: str) -> str:
    """Return the option that sets a limit."""
    return "--" + name.replace("_", "-")


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="sbusd",
        description="A simple message bus over Unix-domain sockets.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-a", "--address", help="a path, /dev/unix/abstract[/HEX], /dev/fd/N")
    for *names, what in SWITCHES:
        add(*names, action="store_true", help=what)
    add("-p", "--pid-file", metavar="PIDFILE", help="implies -d")
    what = "let only these users and your own connect (with -g or -o)"
    add("-u", "--user", action="append", type=user_id, help=what)
    what = "!/cred/GID/UID/PID of this bus on the bus above it"
    add("--cred-prefix", metavar="PREFIX", type=prefix, default=b"", help=what)
    add("--trace", metavar="FILE", help="append every event to FILE")
    add("--version", action="version", version=f"sbusd {__version__}")
    for name, (default, _, what) in LIMITS.items():
        add(
            option_of(name),
            metavar="N",
            type=functools.partial(limit, isinstance(default, int)),
            default=default,
            help=f"{what} (default %(default)s)",
        )
    return parser


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; exit with status 2 if they are wrong [RUN-1]."""
    parser = option_parser()
    options = parser.parse_args(arguments)
    if options.pid_file is not None:
        options.daemon = True
    if options.daemon and options.foreground:
        parser.error("-f cannot go with -d or -p")
    if options.trace_payload and options.trace is None:
        parser.error("--trace-payload needs --trace FILE")
    return options


# ---- Start


def limits_of(options: argparse.Namespace) -> Limits:
    """Return the limits, with no more clients than descriptors [RUN-6]."""
    limits = Limits(**{name: getattr(options, name) for name in LIMITS})
    check_packet_size(limits.max_packet)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_KEPT
    if most <= 0:
        needed = f"more than {DESCRIPTORS_KEPT} are needed"
        raise StartError(f"ulimit -n is {most + DESCRIPTORS_KEPT}; {needed}")
    if limits.max_clients > most:
        limits.max_clients = most  # and one user is to leave some to others
        limits.max_user_clients = min(limits.max_user_clients, most // 2 or 1)
    return limits


def check_packet_size(max_packet: int) -> None:
    """Raise StartError if the kernel takes no such packet [LIMIT-9]."""
    size = min(send_buffer_bytes(max_packet), (1 << 31) - 1)
    ours, theirs = socket.socketpair(*SOCKET_KIND)
    with ours, theirs:
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            ours.send(bytes(max_packet))
        except (OSError, MemoryError, OverflowError):
            what = "the kernel takes no packet of that size"
            raise StartError(f"--max-packet: {what}") from None


def redirect(
    descriptor: int, path: str = os.devnull, flags: int = os.O_RDWR
) -> None:
    """Have a standard stream lead to a file, or to nothing."""
    file = os.open(path, flags)
    os.dup2(file, descriptor)
    os.close(file)


def notify_ready() -> None:
    """Tell the service manager that the server listens [RUN-5]."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        message = f"READY=1\nMAINPID={os.getpid()}\n"
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier,
        ):
            name = "\0" + address[1:] if address[0] == "@" else address
            notifier.setblocking(False)
            notifier.sendto(message.encode("ascii"), name)


def obey_signals(server: Server, is_daemon: bool) -> None:
    """Have signals stop the server, or log what it does [RUN-10] [RUN-17].

    They wake it up.  A timer of the processor's time lets it tick.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wake_up() -> None:
        if signal.SIGUSR1 in os.read(reader, 4096):
            log_stats(server)

    server.selector.register(reader, READ, wake_up)
    ignores_hang_up = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: server.stop())
    if is_daemon or ignores_hang_up:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGPROF, server.tick)
    signal.setitimer(signal.ITIMER_PROF, TICK_SECONDS, TICK_SECONDS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def describe_start(
    options: argparse.Namespace, endpoint: Endpoint, limits: Limits
) -> str:
    """Return what the start line says beside the address [RUN-14]."""
    about = "".join(
        f" {option_of(name)[2:]}={value}"
        for name, value in vars(limits).items()
        if value != LIMITS[name][0]
    )
    most = limits.memory_bytes_max() >> 20
    about += f" memory<={most}MiB" if most < 1 << 40 else " memory<=unlimited"
    if not endpoint.is_guarded:
        about += "; a client may make the bus wait for its descriptors"
    if endpoint.address.startswith(ABSTRACT) and not options.user:
        about += "; any user may connect"
    if is_foreign_terminal():
        about += "; no log from now on, as this terminal is another user's"
    is_private = not (options.group or options.others)
    if endpoint.file >= 0 and options.user and is_private:
        about += "; -u lets nobody in without -g or -o"
    log_file = "/proc/self/fd/2"
    places = (log_file, os.path.dirname(os.path.realpath(log_file)))
    there = filter(os.path.exists, places)
    is_open = any(os.stat(place).st_mode & 0o044 for place in there)
    if is_open and stat.S_ISREG(os.fstat(2).st_mode) and not is_private:
        about += "; who can read its log or its directory may make it wait"
    return about


def is_foreign_terminal() -> bool:
    """Return whether the log would wait for its terminal [RUN-16]."""
    return os.isatty(2) and os.get_blocking(2)


def announce(address: str, is_random: bool, ready: int | None) -> None:
    """Tell everybody who waits for it that the server listens."""
    if is_random:  # [RUN-3] nobody knows it yet
        with contextlib.suppress(OSError):
            os.write(1, f"{address}\n".encode("ascii"))
    redirect(1)  # [RUN-4] whoever waits for the end of it goes on now
    notify_ready()
    is_file = stat.S_ISREG(os.fstat(2).st_mode)
    if is_foreign_terminal() or (ready is not None and not is_file):
        redirect(2)
    if ready is not None:
        redirect(0)
        os.write(ready, b"1")
        os.close(ready)


def log_stats(server: Server) -> None:
    """Log what the clients of each user use and have done [RUN-17]."""
    bus = server.bus
    users = list(bus.users.values())
    for user in users[:STATS_LINES_MAX]:
        log.info("stats uid=%d %s", user.uid, describe_counts(user.stats()))
    totals = {
        "users": len(users),
        "clients": len(bus.clients),
        "backlog_bytes": bus.accounts.used[BACKLOG_BYTES],
        **bus.flood.discarded,
        **server.disconnected,
    }
    more = len(users) - STATS_LINES_MAX
    left_out = f" ({more} users left out)" if more > 0 else ""
    log.info("stats %s%s", describe_counts(totals), left_out)


def describe_counts(counts: dict[str, int]) -> str:
    """Return counts with their names for the log."""
    return " ".join(f"{name}={count}" for name, count in counts.items())


def open_journal(options: argparse.Namespace, address: str) -> Journal:
    """Begin the trace that the options ask for, and the words of -v."""
    about = {
        "version": __version__,
        "address": address,
        "host": socket.gethostname(),
        "cred_prefix": options.cred_prefix.decode("ascii"),
    }
    trace = -1
    if options.trace is not None:
        trace = open_regular(options.trace, os.O_APPEND)
    return Journal(trace, about, options.trace_payload, options.verbose)


def go_to_background(path: str | None, cleanup: contextlib.ExitStack) -> int:
    """Go on as a daemon, and write its process id to a pid file, if any.

    Return a descriptor to write to once the server is ready: the process
    that called waits for that, and exits [RUN-8].
    """
    if path is not None:
        pid_file = open_pid_file(path)
        cleanup.callback(remove, pid_file, absolute(path))
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(reader)
    os.chdir("/")
    if path is not None:
        os.ftruncate(pid_file, 0)
        os.pwrite(pid_file, b"%d\n" % os.getpid(), 0)
    return writer


def serve(options: argparse.Namespace) -> None:
    """Run a server until it is stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it can obey
    limits = limits_of(options)
    bus = Bus(limits, os.getuid(), options.cred_prefix, options.strict)
    with contextlib.ExitStack() as cleanup:
        mode = 0o700 | options.group * 0o070 | options.others * 0o007
        given = options.address
        address = default_address() if given is None else given
        endpoint = open_endpoint(address, mode, options.replace)
        cleanup.callback(endpoint.close)
        if options.trace is not None or options.verbose:
            bus.journal = open_journal(options, endpoint.address)
            cleanup.callback(bus.journal.close)
        path, is_daemon = options.pid_file, options.daemon
        ready = go_to_background(path, cleanup) if is_daemon else None
        users = {os.getuid(), *options.user} if options.user else None
        selector, clock = selectors.DefaultSelector(), time.monotonic
        server = Server(
            bus, endpoint.listener, selector, clock, users, options.close
        )
        cleanup.callback(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)
        obey_signals(server, is_daemon)
        bytes(2 * RESERVE_BYTES)  # without so much it is no use to begin
        gc.set_threshold(700, 10, 1 << 30)  # to look at all takes long
        about = describe_start(options, endpoint, limits)
        log.info("start %s pid=%d%s", endpoint.address, os.getpid(), about)
        announce(endpoint.address, given == ABSTRACT, ready)
        server.run()
    log.info("stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status [RUN-1] [RUN-2]."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # [RUN-7] 0, 1 and 2 are left open, to become no sockets
    os.close(lowest)
    log.addHandler(LogHandler())
    log.propagate = False
    options = parse_options(arguments)
    log.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    try:
        serve(options)
        return 0
    except StartError as error:
        log.error("%s", error)
    except OSError as error:
        log.error("%s: %s", error.filename or "cannot go on", error.strerror)
    except MemoryError:
        log.error("there is no memory")
    return 1


if __name__ == "__main__":
    sys.exit(main())
