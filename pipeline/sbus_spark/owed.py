"""Owed: to whom each message of a piece was to be sent.

See spec/3-protocol.md to spec/6-echoes.md.  Facts:

- Keys that the same patterns select are one case: who holds one of these
  patterns, and when, is found once for all of them.
- A sum over who holds a case at a time is looked up in the running sum of
  what changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .events import Piece
from .history import SILENT, Group, Span, Story
from .lines import MSG, Array
from .matching import selections


def marks(clients: Array, seed: int) -> Array:
    """Return random marks of clients, which are a mix of bits (splitmix64)."""
    bits: Array = clients.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits


class Intervals:
    """Whose intervals an event is in; those of one owner do not overlap."""

    def __init__(self, owner: Array, since: Array, until: Array) -> None:
        order = np.lexsort((since, owner))
        self.owners, places = np.unique(owner[order], return_inverse=True)
        self.until = until[order]
        self.width = int(self.until.max(initial=0)) + 2
        self.starts = places * self.width + since[order] + 1

    def hold(self, owners: Array, at: Array) -> Array:
        """Return whether owners have an interval that an event is in."""
        if not len(self.owners):
            return np.zeros(len(at), bool)
        place = np.searchsorted(self.owners, owners)
        place = np.minimum(place, len(self.owners) - 1)
        is_known = self.owners[place] == owners
        end = np.minimum(at + 1, self.width - 1)
        row = np.searchsorted(self.starts, place * self.width + end) - 1
        is_own = self.starts[row] // self.width == place
        found: Array = is_known & (row >= 0) & is_own & (self.until[row] > at)
        return found


def intervals_of(spans: Sequence[Span], what: str) -> Intervals:
    """Return when clients had asked for something."""
    rows = [(one.c, one.since, one.until) for one in spans if one.what == what]
    return Intervals(*np.array(rows, np.int64).reshape(-1, 3).T)


class Holders(NamedTuple):
    """Who was to receive the keys of a case, disjoint intervals, in order."""

    case: Array
    c: Array
    since: Array
    until: Array


def holders_of(
    spans: Sequence[Span],
    cases: Sequence[Sequence[int]],
    groups: dict[Group, int],
    end: int,
) -> Holders:
    """Return who held one of the patterns of each case, and when.

    *cases* are places of *groups*.  Who holds several patterns of a case at
    once does so in one interval [PUB-2].
    """
    rows = [
        (groups[what], c, since, until)
        for what, c, since, until in spans
        if isinstance(what, Group)
    ]
    table = np.array(rows, np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 0], kind="stable")]
    bounds = np.searchsorted(table[:, 0], np.arange(len(groups) + 1))
    sizes = [len(case) for case in cases]
    of_case = np.repeat(np.arange(len(cases)), sizes)
    places = np.fromiter(
        (place for case in cases for place in case), np.int64, sum(sizes)
    )
    counts = bounds[places + 1] - bounds[places]
    which = np.repeat(bounds[places] - np.cumsum(counts) + counts, counts)
    which += np.arange(len(which))
    case = np.repeat(of_case, counts)
    _, c, since, until = table[which].T
    # Steps of one client in one case, by time: a 1 begins, a -1 ends
    case, c = np.tile(case, 2), np.tile(c, 2)
    at = np.concatenate((since, until))
    step = np.repeat([1, -1], len(which))
    order = np.lexsort((-step, at, c, case))
    case, c, at, step = case[order], c[order], at[order], step[order]
    depth = np.cumsum(step)
    begins = np.flatnonzero((step == 1) & (depth == 1))
    ends = np.flatnonzero((step == -1) & (depth == 0))
    return Holders(case[begins], c[begins], at[begins], at[ends])


class Owed:
    """To whom messages of a piece were owed: those *at* places, or all."""

    def __init__(
        self, piece: Piece, story: Story, at: Array | None = None
    ) -> None:
        self.piece = piece
        self.end = len(piece.ev)
        self.at = np.flatnonzero(piece.ev == MSG)
        self.keys, self.key = piece.keys, piece.key
        if at is not None:
            key = piece.key[np.searchsorted(self.at, at)]
            own, self.key = np.unique(key, return_inverse=True)
            self.keys = [piece.keys[place] for place in own.tolist()]
            self.at = at
        groups: dict[Group, int] = {}
        for span in story.spans:
            if isinstance(span.what, Group):
                groups.setdefault(span.what, len(groups))
        found = selections(groups, self.keys, story.state.prefix)
        cases: dict[tuple[int, ...], int] = {}
        for case in found:
            cases.setdefault(case, len(cases))
        of_key = np.array([cases[case] for case in found], np.int64)
        self.case = of_key[self.key]
        self.holders = holders_of(story.spans, list(cases), groups, self.end)
        self.silent = self._silent(story.spans)

    def _silent(self, spans: Sequence[Span]) -> Array:
        """Return which messages their publishers hold, but are not owed."""
        publisher = self.piece.c[self.at].astype(np.int64)
        silent = np.flatnonzero(
            intervals_of(spans, SILENT).hold(publisher, self.at)
        )
        publisher = publisher[silent]
        clients = np.unique(publisher)
        case, c, since, until = self.holders
        is_known = np.isin(c, clients)
        own = Intervals(
            np.searchsorted(clients, c[is_known])
            + case[is_known] * len(clients),
            since[is_known],
            until[is_known],
        )
        owner = np.searchsorted(clients, publisher)
        owner += self.case[silent] * len(clients)
        found: Array = silent[own.hold(owner, self.at[silent])]
        return found

    def credits(self, seed: int) -> Array:
        """Return the sum of the marks of those who are owed each message."""
        case, c, since, until = self.holders
        mark = marks(c, seed)
        width = self.end + 2
        at = np.concatenate(
            (case * width + since + 1, case * width + until + 1)
        )
        order = np.argsort(at, kind="stable")
        sums = np.concatenate((mark, np.uint64(0) - mark))[order].cumsum()
        sums = np.concatenate((np.zeros(1, np.uint64), sums))
        asked = self.case * width + self.at + 1
        credit: Array = sums[np.searchsorted(at[order], asked)]
        own = self.piece.c[self.at[self.silent]]
        credit[self.silent] -= marks(own, seed)
        return credit

    def receivers(self, message: int) -> list[int]:
        """Return to whom one message of the piece was owed."""
        case, at = self.case[message], self.at[message]
        first, last = np.searchsorted(self.holders.case, (case, case + 1))
        part = slice(first, last)
        is_due = self.holders.since[part] < at
        is_due &= at < self.holders.until[part]
        found = self.holders.c[part][is_due].tolist()
        if message in self.silent:
            found.remove(int(self.piece.c[at]))
        return [int(c) for c in found]
