"""Breaches: what is wrong, one by one.

See spec/3-protocol.md to spec/9-running.md.  Facts:

- Only suspects are looked at here, and what is found once more to be in
  order is no breach.
- At the end of a client or of a run, what waited in a backlog is lost.  In
  order/queue that is what comes after all that was sent to it; in another
  order it may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

import sbus

from .accounts import NEVER, Ranges, Setting, dense, mixed
from .common import LONG, TEXT, schema
from .events import Piece
from .history import DROPPING, Story
from .lines import DROP, MSG, RARE, SEND, Array
from .owed import Owed, intervals_of

BREACHES = (
    "missing",  # owed, and neither sent nor dropped
    "unowed",  # sent, and not owed
    "secret-leak",  # the same, under a secret key
    "duplicate",  # sent more than once
    "out-of-order",  # sent after a later message of the same publisher
    "bad-drop",  # dropped for no reason that the client had asked for
    "bad-trace",  # what no server in order can have written
)
DETAILS = {
    "missing": "owed, and neither sent nor dropped, but a later message was",
    "unowed": "sent to a client to which it was not owed",
    "secret-leak": "a secret, sent to a client to which it was not owed",
    "duplicate": "sent more than once to one client",
    "bad-drop": "dropped although it was not owed, or was sent as well",
}


class Breach(NamedTuple):
    """Something that is wrong; what it is not about is None."""

    breach: str  # one of BREACHES
    run: int | None = None
    n: int | None = None
    m: int | None = None
    publisher: int | None = None
    c: int | None = None
    key: str | None = None
    detail: str = ""
    file: str | None = None


BREACH_SCHEMA = schema(
    breach=TEXT,
    run=LONG,
    n=LONG,
    m=LONG,
    publisher=LONG,
    c=LONG,
    key=TEXT,
    detail=TEXT,
    file=TEXT,
)


class Run(NamedTuple):
    """What there is to know of a run to judge its suspects.

    *latest* has for each of *clients*, in order, the highest number of a
    message that was sent to it.
    """

    file: str
    clients: Array
    latest: Array
    reordered: frozenset[int]

    def waits(self, c: int, m: int) -> bool:
        """Return whether a message may have waited for a client to the end.

        What waits at the end of a client comes after all that it was sent.
        """
        place = int(np.searchsorted(self.clients, c))
        is_known = place < len(self.clients) and self.clients[place] == c
        return (
            c in self.reordered or not is_known or m > int(self.latest[place])
        )


class Published(NamedTuple):
    """A msg event."""

    at: int
    n: int
    publisher: int
    key: str
    receivers: list[int]  # to whom it was owed


class Reached(NamedTuple):
    """A send or a drop."""

    at: int
    n: int
    c: int
    is_sent: bool
    is_mixed: bool


# ---- What is wrong in a piece by itself


def jumps(piece: Piece) -> list[int]:
    """Return the events in a piece, but the first, with a wrong number."""
    if isinstance(piece.n, range) and not piece.bad:
        return []
    n = np.asarray(piece.n)
    bad = np.array([one.at for one in piece.bad], np.int64)
    lost = np.bincount(bad, minlength=len(n) + 1)[1 : len(n)]
    gap = np.diff(n) - 1
    found: list[int] = (
        1 + np.flatnonzero((gap < 0) | (gap > lost) | (n[1:] == 1))
    ).tolist()
    return found


def early_stops(piece: Piece) -> list[int]:
    """Return the stops in a piece after which it goes on."""
    last = len(piece.ev) - 1
    return [o.at for o in piece.rare if o.ev == "stop" and o.at < last]


def line_breaches(piece: Piece, file: str, run: int) -> Iterator[Breach]:
    """Yield what is wrong with the lines of a piece."""
    n = piece.n
    for bad in piece.bad:
        what = f"{file} holds what is no event: {bad.text}"
        yield Breach("bad-trace", n=bad.n or None, detail=what)
    for at in jumps(piece):
        yield jump(file, run, int(n[at - 1]), int(n[at]))
    for at in early_stops(piece):
        yield early_stop(file, run, int(n[at]))


def jump(file: str, run: int, before: int, n: int) -> Breach:
    """Return that an event has not the number that it should have."""
    what = f"{file}: event {n} comes after event {before}"
    return bad_trace(file, run, n, what)


def early_stop(file: str, run: int, n: int) -> Breach:
    """Return that a run goes on after its stop."""
    what = f"{file}: event {n} stops, but is not the last"
    return bad_trace(file, run, n, what)


def bad_trace(file: str, run: int, n: int | None, what: str) -> Breach:
    """Return that a trace is wrong; run 0 is none."""
    known = {"run": run, "file": file} if run else {}
    return Breach("bad-trace", n=n, detail=what, **known)  # type: ignore


def bad_drops(piece: Piece, setting: Setting, story: Story) -> list[int]:
    """Return the drops for which there was no reason."""
    found: list[int] = []
    for place, reason in enumerate(piece.reasons):
        at = np.flatnonzero(piece.ev == DROP + place)
        if not len(at):
            continue
        c = piece.c[at].astype(np.int64)
        is_bad = np.ones(len(at), bool)
        if reason in DROPPING:
            asked = intervals_of(story.spans, DROPPING[reason])
            is_bad = ~asked.hold(c, at)
        elif reason == "deaf":
            sends = np.flatnonzero(piece.ev == SEND)
            heard = dict(zip(piece.c[sends].tolist(), sends.tolist()))
            later = setting.clients[setting.after < NEVER]
            last = np.array([heard.get(one, -1) for one in c.tolist()])
            is_bad = np.isin(c, later) | (last > at)
        found += at[is_bad].tolist()
    return found


def piece_breaches(
    piece: Piece, file: str, setting: Setting, story: Story
) -> Iterator[Breach]:
    """Yield the drops and the ends of subscriptions that are wrong."""
    run = setting.run
    for at in bad_drops(piece, setting, story):
        reason = piece.reasons[piece.ev[at] - DROP]
        what = f"{reason}, which was not asked for"
        if reason == "deaf":
            what = "dropped as for a deaf client, which heard more later"
        n, m, c = int(piece.n[at]), int(piece.m[at]), int(piece.c[at])
        yield Breach("bad-drop", run, n, m, None, c, None, what, file)
    for event in story.unheld:
        n, what = int(piece.n[event.at]), "unsub of what is not held"
        yield Breach(
            "bad-trace", run, n, None, None, event.c, event.text, what, file
        )


# ---- Clients


def odd_clients(piece: Piece, story: Story) -> set[int]:
    """Return the clients with an event that may be out of their lives."""
    at = np.flatnonzero(piece.ev != RARE)
    clients, places = dense(piece.c[at].astype(np.int64))
    first = np.full(len(clients), NEVER)
    last = np.full(len(clients), -1)
    np.minimum.at(first, places, at)
    np.maximum.at(last, places, at)
    never = (NEVER - 1, -1)
    lives = [story.lives.get(c, never) for c in clients.tolist()]
    since, until = np.array(lives, np.int64).reshape(-1, 2).T
    is_odd = (first < since) | (last > until)
    return story.odd.union(clients[is_odd].tolist())


class Lived(NamedTuple):
    """An event of a client: its place in the run, its number, its kind."""

    at: int
    n: int
    ev: str  # "open", "close", or empty


def lives_of(
    piece: Piece, setting: Setting, odd: Ranges
) -> Iterator[tuple[int, Lived]]:
    """Yield (c, event) of odd clients in a piece.

    Of the events that are neither open nor close, only the first and the
    last count.
    """
    clients = piece.c.astype(np.int64)
    at = np.flatnonzero(odd.have(clients) & (clients > 0))
    own = clients[at].tolist()
    kinds = {o.at: o.ev for o in piece.rare if o.ev in ("open", "close")}
    last = dict(zip(own, at.tolist()))
    first = dict(zip(own[::-1], at[::-1].tolist()))
    for c, place in zip(own, at.tolist()):
        if place in kinds or place in (first[c], last[c]):
            where, n = place + setting.base, int(piece.n[place])
            yield c, Lived(where, n, kinds.get(place, ""))


def life_breaches(
    run: int, c: int, events: Iterable[Lived], about: Run
) -> Iterator[Breach]:
    """Yield what is wrong with the life of a client."""
    told = sorted(events)
    opens = [one for one in told if one.ev == "open"]
    closes = [one for one in told if one.ev == "close"]
    if len(opens) != 1:
        what = "a client is opened other than once"
    elif told[0] != opens[0]:
        what = "an event before its open"
    elif len(closes) > 1:
        what = "a client is closed more than once"
    elif closes and told[-1] != closes[0]:
        what = "an event after its close"
    else:
        return
    n = told[0].n
    yield Breach("bad-trace", run, n, None, None, c, None, what, about.file)


# ---- Messages


def suspects_of(
    piece: Piece, setting: Setting, suspects: Ranges
) -> Iterator[tuple[int, Published | Reached]]:
    """Yield (m, event) for the events of suspects in a piece."""
    is_one = suspects.have(piece.m.astype(np.int64)) & (piece.ev != RARE)
    at = np.flatnonzero(is_one)
    if not len(at):
        return
    reached = at[piece.ev[at] != MSG]
    unsure = set(mixed(piece, setting, piece.c[reached]).tolist())
    for place in reached.tolist():
        where, n, c = place + setting.base, int(piece.n[place]), piece.c[place]
        is_sent = bool(piece.ev[place] == SEND)
        event = Reached(where, n, int(c), is_sent, place in unsure)
        yield int(piece.m[place]), event
    at = at[piece.ev[at] == MSG]
    if not len(at):
        return
    story = Story(setting.state, piece.rare, len(piece.ev))
    owed = Owed(piece, story, at)
    for row, place in enumerate(at.tolist()):
        where, n, c = place + setting.base, int(piece.n[place]), piece.c[place]
        key, receivers = owed.keys[owed.key[row]], owed.receivers(row)
        message = Published(where, n, int(c), key, receivers)
        yield int(piece.m[place]), message


def message_breaches(
    run: int, m: int, events: Iterable[Published | Reached], about: Run
) -> Iterator[Breach]:
    """Yield what is wrong with a message: these are all of its events."""
    ordered = sorted(events, key=lambda one: one.at)
    messages = [one for one in ordered if isinstance(one, Published)]
    reached = [one for one in ordered if isinstance(one, Reached)]
    if len(messages) != 1:
        what = f"{len(messages)} msg events of one message"
        n = (messages[0] if messages else reached[0]).n
        yield Breach("bad-trace", run, n, m, detail=what, file=about.file)
        return
    message = messages[0]
    if reached and reached[0].at < message.at:
        what = "sent or dropped before it was published"
        yield Breach(
            "bad-trace", run, message.n, m, detail=what, file=about.file
        )
    got: dict[int, list[Reached]] = {c: [] for c in message.receivers}
    for one in reached:
        got.setdefault(one.c, []).append(one)
    for c, own in got.items():
        is_owed = c in message.receivers
        waits = about.waits(c, m)
        for breach in breaches_of_one(is_owed, own, waits, message.key):
            yield Breach(
                breach,
                run,
                own[-1].n if own else message.n,
                m,
                message.publisher,
                c,
                message.key,
                DETAILS[breach],
                about.file,
            )


def breaches_of_one(
    is_owed: bool, reached: list[Reached], waits: bool, key: str
) -> Iterator[str]:
    """Yield the breaches in what one client got of one message."""
    sends = sum(one.is_sent for one in reached)
    drops = len(reached) - sends
    if is_owed and not reached and not waits:
        yield "missing"
    if sends and not is_owed:
        is_secret = key.startswith(sbus.SECRET.decode())
        yield "secret-leak" if is_secret else "unowed"
    if sends > 1:
        yield "duplicate"
    if drops and (not is_owed or sends + drops > 1):
        yield "bad-drop"


def first_sends(
    m: int, events: Iterable[Published | Reached]
) -> Iterator[tuple[int, int, tuple[int, int, int, str]]]:
    """Yield (c, publisher, (at, n, m, key)), where order is unsure.

    Those are the first sends to clients to which the message was owed.
    """
    ordered = sorted(events, key=lambda one: one.at)
    firsts: dict[int, Reached] = {}
    for one in ordered:
        if isinstance(one, Reached) and one.is_mixed:
            firsts.setdefault(one.c, one)
    for message in ordered:
        if isinstance(message, Published):
            for c in firsts.keys() & set(message.receivers):
                send = (firsts[c].at, firsts[c].n, m, message.key)
                yield c, message.publisher, send


def order_breaches(
    of: tuple[int, int, int], sends: Iterable[Any], file: str
) -> Iterator[Breach]:
    """Yield which first sends came after a later message."""
    run, c, publisher = of
    latest = -NEVER
    for _, n, m, key in sorted(sends):
        if m < latest:
            what = f"sent after message {latest}"
            about = (run, n, m, publisher, c, key, what, file)
            yield Breach("out-of-order", *about)
        latest = max(latest, m)
