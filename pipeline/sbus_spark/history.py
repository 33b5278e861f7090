"""History: what clients hold and have asked for, event by event.

See spec/3-protocol.md to spec/9-running.md.  Facts:

- What a piece changes is told in full only within its task.  To others goes
  what is left of it at its end: the state of clients that are open then, and
  which others have closed.  So what the driver puts together grows with the
  clients that are open, not with the events.
- What a state holds after two pieces is its own, and then the changes of
  each: counts add up, the rest is replaced.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import sbus

from .events import Rare

# What clients ask for by control messages that an audit has to know
MODES = {
    key: key.rpartition("/")[0]
    for key in (
        "echo/off",
        "echo/on",
        *(f"blocking/soft/{mode}" for mode in ("queue", "discard")),
        *(f"blocking/soft/{mode}" for mode in ("block", "error")),
        *(f"blocking/hard/{mode}" for mode in ("discard", "block", "error")),
    )
}
SILENT = "echo/off"
DROPPING = {  # by the reason of a drop, what the client had to ask for
    "soft/discard": "blocking/soft/discard",
    "hard/discard": "blocking/hard/discard",
}
REORDERING = ("order/stack", "order/random")


class Client:
    """What is known of a client."""

    __slots__ = ("counts", "is_open", "modes", "own")

    def __init__(self) -> None:
        self.own = ""  # "gid uid pid", once it is open
        self.is_open = False
        self.counts: dict[str, int] = {}  # of each pattern; none is 0
        self.modes: dict[str, str] = {}  # what it asked for, by what it sets

    def count(self, pattern: str, by: int) -> int:
        """Count a subscription, and return how often it is held."""
        times = self.counts.pop(pattern, 0) + by
        if times:
            self.counts[pattern] = times
        return times


class State:
    """What is known of the clients of a run, or has changed in a piece."""

    def __init__(self) -> None:
        self.prefix = ""  # [CRED-9]
        self.clients: dict[int, Client] = {}
        self.closed = array.array("q")  # who has left
        self.latest = 0  # the highest number of a client that was opened

    def client(self, c: int) -> Client:
        """Return a client, which need not have been opened."""
        return self.clients.setdefault(c, Client())

    def apply(self, event: Rare) -> None:
        """Take over what an event changes."""
        kind, c, text = event.ev, event.c, event.text
        if kind == "start":
            self.prefix = text
        elif kind == "open":
            client = self.client(c)
            client.own, client.is_open = text, True
            self.latest = max(self.latest, c)
        elif kind == "close":
            self.clients.pop(c, None)
            self.closed.append(c)
        elif kind in ("sub", "unsub"):
            self.client(c).count(text, 1 if kind == "sub" else -1)
        elif text in MODES:
            self.client(c).modes[MODES[text]] = text

    def merge(self, later: State) -> None:
        """Take over what a later piece has changed."""
        self.prefix = later.prefix or self.prefix
        self.latest = max(self.latest, later.latest)
        for c in later.closed:
            self.clients.pop(c, None)
        for c, change in later.clients.items():
            client = self.client(c)
            if change.is_open:
                client.own, client.is_open = change.own, True
            for pattern, times in change.counts.items():
                client.count(pattern, times)
            client.modes.update(change.modes)


def changes(rare: Iterable[Rare]) -> State:
    """Return what the events of a piece change."""
    state = State()
    for event in rare:
        state.apply(event)
    return state


class Group(NamedTuple):
    """Those who hold a pattern; of a secret one, those with one name."""

    pattern: str
    own: str  # "gid uid pid" of who holds a secret pattern, else empty


class Span(NamedTuple):
    """From one event of a piece to another, both left out."""

    what: Group | str
    c: int
    since: int  # -1 if it was so before
    until: int  # as many as there are events if it stays so


class Story:
    """What happens to the clients in a piece: a state, brought to its end.

    *spans* tell who held what and had asked for what, *lives* when a client
    was opened and closed, *odd* which clients had events out of their lives,
    and *unheld* the events that made a count less than 0.
    """

    def __init__(self, state: State, rare: Iterable[Rare], end: int) -> None:
        self.state = state
        self.spans: list[Span] = []
        self.lives = {
            c: [-1, end] for c, one in state.clients.items() if one.is_open
        }
        self.odd: set[int] = set()
        self.unheld: list[Rare] = []
        self._began: dict[tuple[Group | str, int], int] = {}
        for c, client in state.clients.items():
            for what in everything(client):
                self._began[what, c] = -1
        for event in rare:
            self._tell(event, end)
        for what, c in list(self._began):
            self._end(what, c, end)

    def _tell(self, event: Rare, end: int) -> None:
        """Bring the state behind an event."""
        at, kind, c, text = event
        before = self.state.clients.get(c)
        is_open = before is not None and before.is_open
        if kind == "open":
            if is_open or c <= self.state.latest:
                self.odd.add(c)
            self.lives.setdefault(c, [at, end])
        elif c and not is_open:
            self.odd.add(c)
        if kind == "close" and c in self.lives:
            self.lives[c][1] = at
        held = set(affected(before, kind, text)) if before else set()
        self.state.apply(event)
        after = self.state.clients.get(c)
        holds = set(affected(after, kind, text)) if after else set()
        for what in held - holds:
            self._end(what, c, at)
        for what in holds - held:
            self._began[what, c] = at
        times = after.counts.get(text, 0) if after else 0
        if kind in ("sub", "unsub") and times < 0:
            self.unheld.append(event)

    def _end(self, what: Group | str, c: int, at: int) -> None:
        self.spans.append(Span(what, c, self._began.pop((what, c)), at))


def everything(client: Client) -> Iterator[Group | str]:
    """Yield what a client holds and has asked for."""
    yield from client.modes.values()
    for pattern in client.counts:
        yield from held(client, pattern)


def held(client: Client, pattern: str) -> Iterator[Group]:
    """Yield as what a client holds a pattern, if it does."""
    if client.counts.get(pattern, 0) > 0:
        is_secret = pattern.startswith(sbus.SECRET.decode())  # [CRED-10]
        yield Group(pattern, client.own if is_secret else "")


def affected(client: Client, kind: str, text: str) -> Iterator[Group | str]:
    """Yield of all that a client has what an event of it may change."""
    if kind in ("sub", "unsub"):
        yield from held(client, text)
    elif kind == "ctl":
        yield from client.modes.values()
    else:
        yield from everything(client)
