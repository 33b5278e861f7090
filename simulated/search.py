"""Searches all that can happen, the shortest ways first.

A world says which steps may come next, takes one of them, and says what of it
decides the future.  It is copied by pickle, so it holds what can go two ways.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Steps(Protocol):
    """What a search asks of a world."""

    def snapshot(self) -> object:
        """Return what decides the future."""

    def steps(self) -> Iterable[tuple[str, str]]:
        """Return the steps that may come next."""

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line."""


World = TypeVar("World", bound=Steps)


class Search(Generic[World]):
    """A search of all states of a world, or of as many as there may be.

    states_max bounds the states, bytes_max the worlds that wait for their
    turn: of a large world fewer states are tried.
    """

    def __init__(
        self, world: World, states_max: int, bytes_max: float = math.inf
    ) -> None:
        self.states_max = states_max
        self.bytes_max = bytes_max
        self.state: object = world.snapshot()  # whose turn it is
        self.step = ("the state is", "")  # that was tried last
        self.is_complete = False

        # In how many orders of steps each state is reached, if all ways to
        # a state have the same length
        self.orders = Counter({self.state: 1})
        self.came_from: dict[object, tuple[object, str]] = {}
        self.todo: deque[tuple[object, bytes]] = deque()
        self.bytes = 0  # of the worlds there
        self.add(self.state, world)

    def add(self, state: object, world: World) -> None:
        """Have a world wait for its turn."""
        frozen = pickle.dumps(world)
        self.bytes += len(frozen)
        self.todo.append((state, frozen))

    def worlds(self) -> Iterator[World]:
        """Yield a world in each state, and then try all steps from there.

        Raises: what a world raises at a step
        """
        while self.todo:
            if len(self.orders) >= self.states_max:
                return
            if self.bytes > self.bytes_max:
                return
            self.state, frozen = self.todo.popleft()
            self.bytes -= len(frozen)
            self.step = ("the state is", "")
            world: World = pickle.loads(frozen)
            yield world

            for step in [*world.steps()]:
                self.step = step
                other: World = pickle.loads(frozen)
                line = other.take(*step)
                after = other.snapshot()
                if after not in self.orders:
                    self.came_from[after] = self.state, line
                    self.add(after, other)
                self.orders[after] += self.orders[self.state]
        self.is_complete = True

    def way(self) -> list[str]:
        """Return the lines of a shortest way to the state of this turn."""
        state, lines = self.state, []
        while state in self.came_from:
            state, line = self.came_from[state]
            lines.append(line)
        return lines[::-1]
