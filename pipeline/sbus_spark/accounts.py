"""Accounts: which messages did not reach just whom they were owed to.

See spec/3-protocol.md to spec/6-echoes.md.  Facts:

- The account of a message is credited with a mark of each client that it is
  owed to, and debited with that of each that it was sent to or dropped for.
  Marks are 64 bits, and drawn for each audit: an account that comes to 0 is
  in order, but for a chance of 1 in 2^64, for which nobody can prepare.
- What leaves a task is the accounts that its piece leaves open: those of
  messages that were sent in another piece than they were published in.
- To be suspected is no breach: suspects are looked at one by one, and it
  does no harm if there are too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .events import Piece
from .history import State
from .lines import MSG, RARE, SEND, Array
from .owed import Owed, marks

NEVER = (1 << 63) - 1  # the place of no event, and above all numbers
RANGES_MAX = 10_000  # that one task tells of; above it they grow coarser


class Setting(NamedTuple):
    """What a task has to know of other pieces of the run.

    *before* and *after* have for each of *clients*, in order, the highest
    message number that was sent to it earlier, and the lowest later; -NEVER
    and NEVER stand for none.
    """

    run: int
    base: int  # how many events come before the piece
    state: State  # before the piece
    latest: int  # the highest message number before it
    clients: Array
    before: Array
    after: Array
    reordered: Array  # who asked for another order, at any time


class Ranges:
    """A set of numbers, as ranges that do not overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Take ranges [first, end), in any order."""
        merged: list[list[int]] = []
        for first, end in sorted(ranges):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([first, end])
        self.firsts, self.ends = np.array(merged, np.int64).reshape(-1, 2).T

    def have(self, numbers: Array) -> Array:
        """Return which numbers are in it."""
        if not len(self.firsts):
            return np.zeros(len(numbers), bool)
        place = np.searchsorted(self.firsts, numbers, side="right") - 1
        found: Array = (place >= 0) & (numbers < self.ends[place])
        return found


def coarse(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return few ranges that hold all of these numbers, and maybe more."""
    found, step = set(numbers), 0
    while len(found) > RANGES_MAX:
        found = {number >> 1 for number in found}
        step += 1
    return [(one << step, (one + 1) << step) for one in found]


def dense(numbers: Array) -> tuple[Array, Array]:
    """Return ascending numbers that hold all of these, and their places."""
    if not len(numbers):
        return numbers, np.zeros(0, np.int64)
    first, last = int(numbers.min()), int(numbers.max())
    if last - first < 4 * len(numbers) + 1_000:
        return np.arange(first, last + 1), numbers.astype(np.int64) - first
    found, places = np.unique(numbers, return_inverse=True)
    return found.astype(np.int64), places


def mixed(
    piece: Piece, setting: Setting, clients: Array | None = None
) -> Array:
    """Return the sends that may have come in another order than they should.

    Those are the sends of a message after or before one with the same or,
    respectively, a higher or lower number, to clients that asked for nothing.
    Only *clients* are looked at, if they are given.
    """
    at = np.flatnonzero(piece.ev == SEND)
    if clients is not None:
        at = at[np.isin(piece.c[at], clients)]
    at = at[~np.isin(piece.c[at], setting.reordered)]
    at = at[np.argsort(piece.c[at], kind="stable")]
    c, m = piece.c[at].astype(np.int64), piece.m[at].astype(np.int64)
    firsts = np.flatnonzero(np.diff(c, prepend=-1))
    if not len(firsts):
        return at
    own = np.searchsorted(setting.clients, c[firsts])
    before, after = setting.before[own], setting.after[own]
    falls = np.diff(m, prepend=0) <= 0
    falls[firsts] = False
    is_mixed = np.logical_or.reduceat(falls, firsts)
    is_mixed |= np.minimum.reduceat(m, firsts) <= before
    is_mixed |= np.maximum.reduceat(m, firsts) >= after
    found = [at[:0]]
    ends = np.append(firsts[1:], len(at))
    for client in np.flatnonzero(is_mixed):
        part = slice(firsts[client], ends[client])
        own = m[part]
        highest = np.maximum.accumulate(np.append(before[client], own))[:-1]
        lowest = np.minimum.accumulate(np.append(after[client], own[::-1]))
        is_one = (own <= highest) | (own >= lowest[-2::-1])
        found.append(at[part][is_one])
    return np.concatenate(found)


# The columns of accounts: message number, what is left of its account, how
# often it was published, where first, where first sent or dropped, suspect?
COLUMNS = M, SUM, TIMES, PUBLISHED, REACHED, SUSPECT = range(6)


def accounts(
    piece: Piece, setting: Setting, owed: Owed, unsure: Array, seed: int
) -> Array:
    """Return the accounts that a piece leaves open, a row a message.

    *unsure* are the sends that mixed has found.  All columns are 64 bits;
    places are counted from the start of the run.
    """
    reached = np.flatnonzero((piece.ev != MSG) & (piece.ev != RARE))
    m = piece.m[np.concatenate((owed.at, reached))].astype(np.int64)
    ms, places = dense(m)
    published, done = np.split(places, [len(owed.at)])
    table = np.zeros((len(COLUMNS), len(ms)), np.int64)
    table[M] = ms
    sums = table[SUM].view(np.uint64)
    np.add.at(sums, published, owed.credits(seed))
    np.subtract.at(sums, done, marks(piece.c[reached], seed))
    np.add.at(table[TIMES], published, 1)
    table[[PUBLISHED, REACHED]] = NEVER
    np.minimum.at(table[PUBLISHED], published, owed.at + setting.base)
    np.minimum.at(table[REACHED], done, reached + setting.base)
    own = m[: len(owed.at)]  # numbers rise, or it may be there twice
    highest = np.maximum.accumulate(np.append(setting.latest, own))[:-1]
    table[SUSPECT][published[own <= highest]] = 1
    table[SUSPECT] |= np.isin(ms, piece.m[unsure])
    is_there = (table[TIMES] > 0) | (table[REACHED] < NEVER)
    return table[:, is_there & is_open(table)].T


def is_open(table: Array) -> Array:
    """Return which accounts are not in order, as far as these tell."""
    found: Array = (
        (table[SUM] != 0)
        | (table[TIMES] != 1)
        | (table[REACHED] < table[PUBLISHED])
        | (table[SUSPECT] > 0)
    )
    return found


def settle(tables: list[Array]) -> list[int]:
    """Return the suspects among the messages of some accounts."""
    rows = np.concatenate(tables)
    ms, places = np.unique(rows[:, M], return_inverse=True)
    table = np.zeros((len(COLUMNS), len(ms)), np.int64)
    table[[PUBLISHED, REACHED]] = NEVER
    for column in (SUM, TIMES, SUSPECT):
        np.add.at(table[column], places, rows[:, column])
    for column in (PUBLISHED, REACHED):
        np.minimum.at(table[column], places, rows[:, column])
    found: list[int] = ms[is_open(table)].tolist()
    return found
