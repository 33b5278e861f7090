#!/usr/bin/env python3
"""Tries every order in which the clients of a conversation can take steps.

    orders.py FILE ...           print each way in which it can end
    orders.py --apart FILE ...   the steps of the server come apart as well

What stands before a line `---` happens as it is written.  After it each
client does its own steps in their order, and the clients take turns in every
way:

    >>> *_, report = try_orders('''
    ... A > SUB k
    ... A > CMSG blocking/soft/discard
    ... A room 1
    ... ---
    ... A < {any}
    ... B > MSG k\\\\0one
    ... B > MSG k\\\\0two
    ... ''')
    >>> report.orders, report.end_states
    (2, 2)
    >>> for end in report.ends:
    ...     print(end.orders, *end.facts, sep="; ")
    1; A gets MSG k\\0one, MSG k\\0two
    1; A gets MSG k\\0one; A loses 1 message [BLOCK-5]

The model is the server, as world.py says.  The program looks in each state
whether the rules of chapter 5 hold.  What breaks one is printed as the
shortest conversation that leads there, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "spec"))

import model  # noqa: E402
from checks import CheckedWorld, Violation  # noqa: E402
from reader import check_bounds, read_world  # noqa: E402
from search import Search  # noqa: E402
from world import World  # noqa: E402

STATES_MAX = 300_000
BYTES_MAX = 400_000_000  # of the copies that wait for their turn
STATES_REPORTED = 1000  # how often a search says how far it is


class End(NamedTuple):
    """A way in which things end, and how to get there."""

    facts: tuple[str, ...]  # sentences without a full stop
    orders: int  # that end so
    states: int  # in which they do
    lines: list[str]  # the shortest of these orders, as a conversation


class Report(NamedTuple):
    """What a search has come to so far."""

    states: int
    orders: int  # of the steps of all clients
    end_states: int
    always: tuple[str, ...]  # facts of all ends
    ends: list[End]  # with other facts; that of most orders first


def new_bus() -> model.Bus:
    """Return a bus that reads a packet at a time."""
    return model.Bus(reads_ahead=False)


def try_orders(text: str) -> Iterator[Report]:
    """Yield reports of a search now and then; the last one is of all.

    Raises: ValueError at what is no step, or is beyond a bound
    """
    world = World(new_bus())
    before = read_world(world, text)
    check_bounds(world)
    search = Search(world, STATES_MAX, BYTES_MAX)
    ends: dict[tuple[str, ...], End] = {}
    for count, world in enumerate(search.worlds(), 1):
        if not any(world.steps()):
            facts = tuple(world.facts())
            if facts not in ends:
                way = search.way()
                if world.unclear:
                    world = world_before(text, way)
                lines = [*before, *way, *world.last_lines()]
                ends[facts] = End(facts, 0, 0, lines)
            end = ends[facts]
            orders = end.orders + search.orders[search.state]
            ends[facts] = end._replace(orders=orders, states=end.states + 1)
        if count % STATES_REPORTED == 0:
            yield report_of(len(search.orders), ends)
    if search.bytes > BYTES_MAX:
        raise ValueError(
            "The states of these need more memory than the search may have:"
            " send fewer or shorter messages, or leave out some steps"
        )
    if not search.is_complete:
        raise ValueError(
            f"These have more than {STATES_MAX:,} states, which is as many as"
            " the search tries: leave out a client, or some steps"
        )
    yield report_of(len(search.orders), ends)


def world_before(text: str, way: list[str]) -> World:
    """Return the world before its last step, of which the end is open."""
    world = World(new_bus())
    read_world(world, text)
    for line in way[:-1]:
        name = line.partition(" ")[0]
        world.take(*(("wait", "") if name == "wait" else ("act", name)))
    return world


def report_of(states: int, ends: dict[tuple[str, ...], End]) -> Report:
    """Return a report, with what all ends have in common said once."""
    always = [
        fact
        for fact in next(iter(ends), ())
        if all(fact in facts for facts in ends)
    ]
    differing = [
        end._replace(facts=tuple(f for f in end.facts if f not in always))
        for end in ends.values()
    ]
    return Report(
        states,
        sum(end.orders for end in ends.values()),
        sum(end.states for end in ends.values()),
        tuple(always),
        sorted(differing, key=lambda end: -end.orders),
    )


# ---- What holds in every state


class Checked(NamedTuple):
    """What a search of all states has found."""

    states: int
    deadlock: list[str]  # the shortest way to one, if programs may wait so


def check_orders(text: str, is_apart: bool = False) -> Checked:
    """Search all states of a conversation.

    Raises: Violation with the way to a state that breaks a rule; ValueError
    at what is no step, or if there are too many states
    """
    world = CheckedWorld(new_bus())
    before = read_world(world, text)
    world.is_apart = is_apart
    search = Search(world, STATES_MAX, BYTES_MAX)
    deadlock: list[str] = []
    try:
        for world in search.worlds():
            if not world.unclear:
                world.check()
            if world.is_deadlock():
                deadlock = deadlock or [*before, *search.way()]
    except Violation as error:
        last = f"# {' '.join(search.step)}: {error}"
        error.lines = [*before, *search.way(), last]
        raise
    if not search.is_complete:
        raise ValueError(f"These have more than {STATES_MAX:,} states")
    return Checked(len(search.orders), deadlock)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def print_orders(text: str, is_apart: bool) -> None:
    """Check a conversation, and print what it comes to."""
    states, deadlock = check_orders(text, is_apart)
    if is_apart:
        print(f"{states:,} states")
        if deadlock:
            print("programs may wait for each other:", *deadlock, sep="\n")
        return
    *_, report = try_orders(text)
    print(f"orders: {report.orders:,}; end states: {report.end_states:,}")
    for fact in report.always:
        print(f"in every order: {fact}")
    for end in report.ends:
        facts = "; ".join(end.facts) or "nothing else"
        print(f"orders with this end: {end.orders:,}; {facts}")
        print(*end.lines, "", sep="\n")


def main() -> int:
    """Search what is asked for; return 1 if a rule is broken, or 0."""
    parser = Parser(
        prog="orders.py",
        description="Try every order of the steps of a conversation.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path)
    about = "the steps of the server come apart as well"
    parser.add_argument("--apart", action="store_true", help=about)
    options = parser.parse_args()
    for file in options.files:
        try:
            print_orders(file.read_text("utf-8"), options.apart)
        except Violation as error:
            print("\n".join([str(error), *error.lines]))
            return 1
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            parser.error(f"{file}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
