"""The book: what the driver puts together of the facts of all pieces."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .accounts import NEVER, Setting, dense
from .breaches import (
    Breach,
    Run,
    bad_trace,
    early_stop,
    early_stops,
    jump,
    jumps,
)
from .events import Piece, shrink
from .history import REORDERING, State, changes
from .lines import MSG, RARE, SEND, Array


class Facts(NamedTuple):
    """What the driver gets of a piece.

    *low* and *high* have for each of *clients*, which are those that it was
    sent or dropped something for, the lowest and the highest message number
    that was sent to it; NEVER and -NEVER stand for none.
    """

    file: str
    is_start: bool
    events: int  # how many
    first: int  # their first number, and their last; 0 for none
    last: int
    lead: int  # how many bad lines come before its events, and after them
    tail: int
    has_stop: bool
    ends: bool  # whether its last event is a stop
    is_faulty: bool  # whether line_breaches yields anything
    change: State
    latest: int  # the highest number of a message
    clients: Array
    low: Array
    high: Array
    reordered: list[int]  # who asked for another order


def facts_of(piece: Piece, file: str) -> Facts:
    """Return what the driver has to know of a piece."""
    count = len(piece.ev)
    reached = np.flatnonzero((piece.ev != MSG) & (piece.ev != RARE))
    found, places = dense(piece.c[reached].astype(np.int64))
    is_sent = piece.ev[reached] == SEND
    sends, to = reached[is_sent], places[is_sent]
    low = np.full(len(found), NEVER)
    high = np.full(len(found), -NEVER)
    m = piece.m.astype(np.int64)
    np.minimum.at(low, to, m[sends])
    np.maximum.at(high, to, m[sends])
    is_there = np.bincount(places, minlength=len(found)) > 0
    stops = [one.at for one in piece.rare if one.ev == "stop"]
    before = [one.at for one in piece.bad]
    asked = {
        one.c
        for one in piece.rare
        if one.ev == "ctl" and one.text in REORDERING
    }
    return Facts(
        file,
        piece.is_start,
        count,
        int(piece.n[0]) if count else 0,
        int(piece.n[-1]) if count else 0,
        before.count(0) if count else 0,
        before.count(count),
        bool(stops),
        stops[-1:] == [count - 1],
        bool(piece.bad or jumps(piece) or early_stops(piece)),
        changes(piece.rare),
        int(m[piece.ev == MSG].max(initial=-NEVER)),
        shrink(found[is_there]),
        low[is_there],
        high[is_there],
        sorted(asked),
    )


class Book:
    """What all pieces come to.

    *breaches* are those that only show where pieces meet.  *settings* has for
    each piece, in order, what its task has to know, pickled; None if it is in
    no run.  *runs* are counted from 1.
    """

    def __init__(self, facts: Iterable[Facts], is_running: bool) -> None:
        """Take the facts in the order of the pieces.

        *is_running*: the last run of a file need not be stopped.
        """
        self.breaches: list[Breach] = []
        self.settings: list[bytes | None] = []
        self.runs: dict[int, Run] = {}
        self._is_running = is_running
        self._chapter: list[Facts] = []  # of one run, or before any
        self._file = ""
        count = 0
        for one in facts:
            count += one.events
            if one.is_start or one.file != self._file:
                self._finish(one.file)
            self._chapter.append(one)
        self._finish("")
        if not count:
            what = "there is no event"
            self.breaches.append(bad_trace("", 0, None, what))

    def _finish(self, following: str) -> None:
        """Close a chapter; the next one is in a file."""
        chapter, file = self._chapter, self._file
        self._chapter, self._file = [], following
        if not chapter:
            return
        run = len(self.runs) + 1 if chapter[0].is_start else 0
        self.breaches += joints(chapter, run)
        events = [one for one in chapter if one.events]
        may_run_on = self._is_running and file != following
        if events and not any(one.has_stop for one in events + [chapter[0]]):
            last = events[-1].last
            what = f"{file}: no stop after event {last}"
            if not may_run_on:
                self.breaches.append(bad_trace(file, run, last, what))
        if run:
            self._settle(run, chapter)
        else:
            self.settings += [None] * len(chapter)

    def _settle(self, run: int, chapter: list[Facts]) -> None:
        """Add what there is to know of a run and of its pieces."""
        clients = np.unique(np.concatenate([one.clients for one in chapter]))
        places = [np.searchsorted(clients, one.clients) for one in chapter]
        reordered = {c for one in chapter for c in one.reordered}
        befores, high = [], np.full(len(clients), -NEVER)
        for one, place in zip(chapter, places):
            befores.append(high[place])
            high[place] = np.maximum(high[place], one.high)
        afters, low = [], np.full(len(clients), NEVER)
        for one, place in zip(chapter[::-1], places[::-1]):
            afters.append(low[place])
            low[place] = np.minimum(low[place], one.low)
        self.runs[run] = Run(
            chapter[0].file, clients, high, frozenset(reordered)
        )
        state, base, latest = State(), 0, -NEVER
        of_run = np.array(sorted(reordered), np.int64)
        for one, before, after in zip(chapter, befores, afters[::-1]):
            own = (one.clients.astype(np.int64), before, after, of_run)
            setting = Setting(run, base, state, latest, *own)
            self.settings.append(pickle.dumps(setting))
            state.merge(one.change)
            base += one.events
            latest = max(latest, one.latest)


def joints(chapter: list[Facts], run: int) -> Iterator[Breach]:
    """Yield what is wrong where a piece goes on from those before it."""
    last, lost = 0, 0
    has_ended = False
    for one in chapter:
        if one.events and not one.is_start:
            if has_ended:
                yield early_stop(one.file, run, last)
            gap = one.first - last - 1
            if not 0 <= gap <= lost + one.lead or one.first == 1:
                yield jump(one.file, run, last, one.first)
        if one.events:
            last, lost, has_ended = one.last, one.tail, one.ends
        else:
            lost += one.tail
