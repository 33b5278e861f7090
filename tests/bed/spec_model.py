"""A model of the specification: what each client is owed, packet by packet.

It is the second reading of the rules, and shares nothing with sbus.py but the
names of the limits.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import NamedTuple

import sbus
from fake_kernel import OWNER, but
from packets import WHOAMI

FORMS = {
    "subscribe": re.compile(rb"SUB ([^\x00]*)(\x00.*)?", re.S),
    "unsubscribe": re.compile(rb"UNSUB ([^\x00]*)(\x00.*)?", re.S),
    "publish": re.compile(rb"MSG ([^\x00]*)\x00(.*)", re.S),
    "control": re.compile(rb"CMSG ([^\x00]*)(\x00(.*))?", re.S),
}
SECRET_FORM = re.compile(rb"(?:!/cred/[0-9]*/[0-9]*/[0-9]*/)+(.*)", re.S)
FIELDS_FORM = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/(.*)", re.S)
SECRET = b"!/cred/"
CHOICES = {
    "blocking/soft": ("queue", "discard", "block", "error"),
    "blocking/hard": ("discard", "block", "error"),
    "order": ("queue", "stack", "random"),
    "echo": ("on", "off"),
}


def read_form(packet: bytes) -> tuple[str, bytes]:
    """Return the kind and the key of a packet; no kind if malformed."""
    for kind, form in FORMS.items():
        match = form.fullmatch(packet)
        if match:
            return kind, match[1]
    return "", b""


def selects(pattern: bytes, key: bytes) -> bool:
    """Return whether a pattern selects a key, going byte by byte."""
    if not pattern:  # [MATCH-4]
        return True
    place = 0
    for index in range(len(pattern)):
        wanted = pattern[index : index + 1]
        if wanted == b"*":  # [MATCH-2]
            while place < len(key) and key[place : place + 1] != b"/":
                place += 1
        elif key[place : place + 1] != wanted:  # [MATCH-1]
            return False
        elif wanted == b"/" and index == len(pattern) - 1:  # [MATCH-3]
            return True
        else:
            place += 1
    return place == len(key)  # [MATCH-5]


def is_reserved(text: bytes) -> bool:
    """Return whether a key or pattern misuses the segment '!' [KEY-4]."""
    secret = SECRET_FORM.fullmatch(text)
    return b"!" in (secret[1] if secret else text).split(b"/")


class Secret(NamedTuple):
    """A secret key or pattern in its parts."""

    fields: tuple[bytes, ...]  # gid, uid, pid
    rest: bytes

    def suits(self, own: sbus.Credentials) -> bool:
        """Return whether each field is empty or a client's own.

        Spec: [CRED-4] [CRED-7] [CRED-11].
        """
        return all(
            field in (b"", str(number).encode())
            for field, number in zip(self.fields, own)
        )


def read_secret(text: bytes, prefix: bytes) -> Secret | None:
    """Return the parts of a secret text; None if it is cut short [CRED-9]."""
    start = prefix + b"/" if prefix else b""
    if not text.startswith(start):
        return None
    match = FIELDS_FORM.fullmatch(text[len(start) :])
    return Secret(match.groups()[:3], match[4]) if match else None


def may_use(
    pattern: bytes, own: sbus.Credentials, prefix: bytes = b""
) -> bool:
    """Return whether a client may subscribe to a pattern."""
    if is_reserved(pattern):
        return False
    if not pattern.startswith(SECRET):
        return True
    secret = read_secret(pattern, prefix)
    is_somebody = own.pid != 0 and 65534 not in (own.gid, own.uid)  # [CRED-8]
    return is_somebody and secret is not None and secret.suits(own)  # [CRED-5]


@functools.lru_cache(100_000)
def may_hear(
    pattern: bytes, key: bytes, own: sbus.Credentials, prefix: bytes = b""
) -> bool:
    """Return whether a pattern lets a client receive a key."""
    if pattern.startswith(SECRET) != key.startswith(SECRET):  # [CRED-10]
        return False
    if not key.startswith(SECRET):
        return selects(pattern, key)
    wanted, secret = read_secret(pattern, prefix), read_secret(key, prefix)
    return (
        wanted is not None
        and secret is not None
        and secret.suits(own)  # [CRED-11]
        and all(
            field in (b"", there)
            for field, there in zip(wanted.fields, secret.fields)
        )  # [CRED-6]
        and selects(wanted.rest, secret.rest)
    )


def shape_of(pattern: bytes) -> object:
    """Return what is left of a pattern without its literal bytes [LIMIT-10].

    Nothing is left of one that matches nothing.
    """
    segments = pattern.split(b"/")
    if any(re.search(rb"\*[^*]", segment) for segment in segments):
        return None
    stars = [one.find(b"*") for one in segments]  # -1 if there is none
    return not segments[-1], tuple(stars)


class Party:
    """What the specification says of one client."""

    def __init__(self, own: sbus.Credentials) -> None:
        self.own = own
        self.patterns: Counter[bytes] = Counter()
        self.echo = True
        self.soft = "queue"  # [BLOCK-1]
        self.hard = "block"
        self.order = "queue"
        self.ties = "queue"
        self.is_wrong = False  # it has broken a rule
        self.pending: list[bytes] = []  # owed to it and not sent, oldest first
        self.may_discard = False  # it was in a mode discard, or hears nothing
        self.waited = 0  # packets in its backlog, other than answers
        self.same_soft = ""  # its soft mode, if it was so since it stalled
        self.owed = 0  # packets that were routed to it
        self.taken_at_once = 0
        self.counts = Counter(dict.fromkeys(sbus.COUNTED, 0))
        self.sum: Counter[str] = Counter()  # of those who left, of its user

    @property
    def is_privileged(self) -> bool:
        """Whether it is root or the bus owner."""
        return self.own.uid in (0, OWNER)

    def owe(self, packet: bytes) -> None:
        """Route a packet to it."""
        self.pending.append(packet)
        self.owed += 1

    def shapes(self, is_secret: bool) -> set[object]:
        """Return the shapes of its patterns, those of secrets or others."""
        some = {
            pattern
            for pattern in self.patterns
            if pattern.startswith(SECRET) == is_secret
        }
        return {one for one in map(shape_of, some) if one}

    def next_index(self) -> int:
        """Return which packet of its backlog is to be sent next."""
        if self.order == "queue":  # [ORDER-1]
            return 0
        last = len(self.pending) - 1
        if self.order == "stack":  # [ORDER-2]
            return last
        sizes = [len(packet) for packet in self.pending]
        largest = max(sizes)  # [ORDER-3]
        if self.ties == "queue":  # [ORDER-4]
            return sizes.index(largest)
        return last - sizes[::-1].index(largest)


class Model:
    """What clients are owed, as the server reads packet after packet."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = setup.limits
        self.parties: dict[Party, None] = {}  # those that are connected
        self.sums: dict[int, Counter[str]] = {}  # of those who left, by user
        self.publishers: dict[bytes, Party] = {}  # of each packet
        self.faults = 0  # disconnections for cause

    def admit(self, party: Party) -> bool:
        """Let a client in; return whether its user may connect [CONN-2]."""
        allowed, uid = self.setup.allowed_uids, party.own.uid
        if allowed is not None and uid not in allowed:
            return False
        party.sum = self.sums.setdefault(uid, Counter())
        self.stay(party)
        return True

    def is_crowded(self, party: Party) -> bool:
        """Return whether a newcomer that is still here is one too many.

        Spec: [LIMIT-7] [LIMIT-11].
        """
        most = self.limits.max_clients
        if not party.is_privileged:
            most -= most // 4  # [LIMIT-16]
            users = self.of_user(party.own.uid)
            if len(users) > self.limits.max_user_clients:
                return True
        return bool(len(self.parties) > most)

    def stay(self, party: Party) -> None:
        """Note that a client is connected, although it may be at its end."""
        self.parties[party] = None
        self.sums[party.own.uid] = party.sum

    def leave(self, party: Party) -> None:
        """Note that all is read of a client."""
        self.parties.pop(party, None)
        if not self.of_user(party.own.uid):
            self.sums.pop(party.own.uid, None)

    def of_user(self, uid: int) -> list[Party]:
        """Return the connected clients of a user."""
        return [one for one in self.parties if one.own.uid == uid]

    def handle(self, sender: Party, packet: bytes) -> None:
        """Note what a packet of *sender* means, unless it was wrong before."""
        if sender.is_wrong:
            return
        kind, key = read_form(packet)
        if len(packet) > self.limits.max_packet or self.is_wrong(
            sender, kind, key
        ):  # [LIMIT-1]
            sender.is_wrong = sender.may_discard = True
        elif kind == "subscribe":
            sender.patterns[key] += 1  # [SUB-2]
        elif kind == "unsubscribe":
            sender.patterns[key] -= 1  # [UNSUB-1]
            if sender.patterns[key] <= 0:
                del sender.patterns[key]
        elif kind == "publish":
            self.publish(sender, key, packet)
        else:
            self.control(sender, key)

    def is_wrong(self, sender: Party, kind: str, key: bytes) -> bool:
        """Return whether a packet is to disconnect its sender."""
        if not kind or len(key) > self.limits.max_key:  # [LIMIT-4]
            return True
        if len(key.split(b"/")) > self.limits.max_segments:  # [LIMIT-17]
            return True
        if kind == "control":
            return False
        if kind == "publish":
            return is_reserved(key)
        if not may_use(key, sender.own, self.setup.cred_prefix):
            return True
        if kind == "unsubscribe":  # [UNSUB-2]
            return self.setup.is_strict and key not in sender.patterns
        return key not in sender.patterns and not self.has_room(sender, key)

    def has_room(self, sender: Party, pattern: bytes) -> bool:
        """Return whether a client may hold one more pattern."""
        limits, size = self.limits, len(pattern)
        own = sender.patterns
        users = self.of_user(sender.own.uid)
        every = [text for party in users for text in party.patterns]
        is_secret = pattern.startswith(SECRET)
        shapes = {one for party in users for one in party.shapes(is_secret)}
        shapes |= {shape_of(pattern)} - {None}
        return (
            len(own) < limits.max_patterns  # [LIMIT-5]
            and sum(map(len, own)) + size <= limits.max_pattern_bytes
            and len(shapes) <= limits.max_shapes  # [LIMIT-10]
            and (
                sender.is_privileged
                or (
                    len(every) < limits.max_user_patterns  # [LIMIT-12]
                    and sum(map(len, every)) + size
                    <= limits.max_user_pattern_bytes
                )
            )
        )

    def publish(self, sender: Party, key: bytes, packet: bytes) -> None:
        """Owe a packet to all that may hear it [PUB-1] [PUB-2] [PUB-3]."""
        self.publishers[packet] = sender
        sender.counts["published"] += 1
        prefix = self.setup.cred_prefix
        for party in self.parties:
            if party is sender and not party.echo:  # [ECHO-2]
                continue
            for pattern in party.patterns:
                if may_hear(pattern, key, party.own, prefix):
                    party.owe(packet)
                    break

    def control(self, sender: Party, key: bytes) -> None:
        """Set a mode, or owe an answer."""
        what, _, choice = key.decode("latin-1").rpartition("/")
        if choice not in CHOICES.get(what, ()):
            what = ""  # [CTL-2]
        if what == "blocking/soft":
            sender.soft = choice
            sender.same_soft = ""
        elif what == "blocking/hard":
            sender.hard = choice
        elif what == "order":
            sender.order = choice
            if choice != "random":
                sender.ties = choice
        elif what == "echo":
            sender.echo = choice == "on"
        elif key == b"!/cred/whoami":  # [CRED-2]
            own = "!/cred/{}/{}/{}".format(*sender.own).encode()
            sender.owe(WHOAMI + b"\0" + self.setup.full(own))
        if "discard" in (sender.soft, sender.hard):
            sender.may_discard = True


LIMITS = sbus.Limits(
    max_packet=20_000,
    max_key=64,
    max_segments=12,
    max_patterns=7,
    max_pattern_bytes=60,
    max_backlog=2_500,
    max_clients=5,
)
USER_LIMITS = but(
    LIMITS,
    max_shapes=5,
    max_user_patterns=8,
    max_user_pattern_bytes=40,
    max_user_backlog=3_000,
    max_bus_backlog=6_000,
)
PREFIX = b"!/cred/1/2/3"


class Setup(NamedTuple):
    """How a server is set up."""

    limits: sbus.Limits = LIMITS
    cred_prefix: bytes = b""
    is_strict: bool = False
    allowed_uids: frozenset[int] | None = None
    is_observed: bool = False
    packet_seconds: float = 0.0  # that pass while a packet is read

    def full(self, secret: bytes) -> bytes:
        """Return a secret text below the credential prefix."""
        start = self.cred_prefix
        return start + b"/" + secret if start else secret


MODES = [f"{what}/{how}" for what, hows in CHOICES.items() for how in hows]
