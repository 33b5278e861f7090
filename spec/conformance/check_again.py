"""Checks that hold the examples again.

They are held with a trace, by many clients, and with another bus owner.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from .check_log import SAID, TEXTS, Event, read_trace, require_plain_log
from .check_traffic import GROWTH_BYTES_MAX, descriptors_and_bytes
from .conversation import END, Failure, perform
from .examples import Conversation, read_cases
from .server import ServerProcess
from .trial import NotApplicable, Trial, check, require, tell
from .wire import Wire

with contextlib.suppress(ImportError):  # the kit says what it lacks
    import model

OWNER = 4242  # of a bus, who is not root
REASONS = ("soft/discard", "hard/discard", "deaf")
# Of clients that leave in one way: at first, then, and if memory grows
ROUNDS = 2, 10, 10


Lot = tuple[tuple[str, ...], Iterator[Conversation]]


def lots(is_asked: Callable[[Conversation], bool]) -> Iterator[Lot]:
    """Return examples that any kernel can hold at once, by options."""
    cases = []
    for case in read_cases():
        if not isinstance(case, Conversation) or not is_asked(case):
            continue
        verbs = {step.verb for step in case.steps}
        is_strange = "pid=" in str(case.steps) or verbs & {"room", "wait"}
        if not is_strange and (os.geteuid() == 0 or not has_users(case)):
            cases.append(case)
    options = operator.attrgetter("options")
    return itertools.groupby(sorted(cases, key=options), options)


def has_users(case: Conversation) -> bool:
    """Return whether an example has clients of other users."""
    return any(s.verb == "process" and s.argument for s in case.steps)


def hold(trial: Trial, case: Conversation, how: str, bus: Any = None) -> None:
    """Hold an example with a server that runs; raise Failure if it fails."""
    os.chmod(trial.server.path, 0o777)
    outcome = perform(bus or trial.server, case)
    trial.said += outcome.said if outcome.wrong else []
    text = f"{case.name}, {how}: {outcome.wrong}"
    require(not outcome.wrong, text, outcome.rule)


# ---- Clients that leave


@check("CONN-21", fills=True, is_plain=True)
def ways_to_leave(trial: Trial) -> None:
    leave_in_ways(trial, is_plain=True)


@check("CONN-21", fills=True)
def ways_to_leave_above_limits(trial: Trial) -> None:
    leave_in_ways(trial, is_plain=False)


def leave_in_ways(trial: Trial, is_plain: bool) -> None:
    """Have clients leave as examples say that have options, or have none."""
    for options, cases in lots(lambda case: case.name.startswith("way-out")):
        if is_plain != bool(options):
            trial.start(*options)
            stays = [trial.client()] if is_plain else []
            for case in cases:
                leave(trial, case)
            trial.server.audit(stays)


def leave(trial: Trial, case: Conversation) -> None:
    """Have clients leave in one way; raise Failure if anything is left."""
    trial.say(f"time and again this is held: {case.name}")
    before, more = (0, 0), 0
    for number, rounds in enumerate(ROUNDS):
        before = descriptors_and_bytes(trial)
        for _ in range(rounds):
            hold(trial, case, "time and again")
        count, size = descriptors_and_bytes(trial)
        more = size - before[1]
        if number and more < GROWTH_BYTES_MAX and count <= before[0] + 2:
            break  # else it may have made room, which it does once

    trial.wait_until(
        lambda: descriptors_and_bytes(trial)[0] <= before[0] + 2,
        f"after {case.name} it has more descriptors than before",
    )
    is_small = more < GROWTH_BYTES_MAX or trial.server.is_instrumented
    require(is_small, f"after {case.name} it uses {more} bytes more")


# ---- The trace


@check("TRACE-7", "TRACE-1", "RUN-15", fills=True)
def log_and_trace_of_every_example(trial: Trial) -> None:
    for options, cases in lots(is_traced):
        path, address = trial.server.new_path(), trial.server.new_path() + '"'
        trial.start("-v", *options, "--trace", path, path=address)
        for case in cases:
            hold(trial, case, "with a trace")
        trial.stall(b"MSG k\0")  # which is lost when it stops
        for form, text in itertools.product(SAID, TEXTS):
            tell(trial.client(), form % text)
        trial.stop()
        require_plain_log(trial)
        events = read_trace(path)
        require_deliveries(events)
        kinds = [event["ev"] for event in events]
        ends = kinds[0], events[0]["address"], kinds[-1]
        wanted = "start", address, "stop"
        require(ends == wanted, f"its trace begins and ends with {ends}")


def is_traced(case: Conversation) -> bool:
    """Return whether an example is plain, or one of clients that leave."""
    return not case.options or case.name.startswith("way-out")


def require_deliveries(events: list[Event]) -> None:
    """Raise Failure unless each message ends once for each of its receivers.

    That is by a `send` or a `drop`, before the receiver's `close`.
    """
    bus = model.Bus()
    due: dict[int, set[int]] = {}  # messages, by receiver
    opened = 0
    for number, event in enumerate(events, 1):
        require(event.get("n") == number, f"{event} is not {number}")
        kind = event.get("ev")
        client, message = event.get("c", 0), event.get("m", 0)
        if kind == "open":
            opened += 1
            require(client == opened, f"{event} is not client {opened}")
            due[client] = set()
            ids = model.Credentials(event["gid"], event["uid"], event["pid"])
            bus.clients[client] = model.Client(client, ids, False)
        elif kind in ("start", "stop"):
            require(not due, f"before it {kind}s, {[*due]} are not closed")
            continue
        require(client in due, f"{event} is of none that is open")
        if kind == "msg":
            for receiver in receivers_of(bus, event):
                due[receiver].add(message)
        elif kind in ("send", "drop"):
            require(message in due[client], f"{event} is of none that is due")
            due[client].remove(message)
            is_known = event.get("reason", "deaf") in REASONS
            require(is_known, f"{event} has no reason of the table")
        elif kind == "close":
            lost = due.pop(client)
            require(not lost, f"{event}: neither sent nor dropped are {lost}")
            del bus.clients[client]
        else:
            follow(bus.clients[client], event)


def receivers_of(bus: model.Bus, event: Event) -> list[int]:
    """Return the clients that are to hear a message of a trace."""
    key, publisher = event["key"].encode("latin-1"), bus.clients[event["c"]]
    clients = bus.clients.values()
    return [
        client.number
        for client in clients
        if model.hears(bus, client, publisher, key)
    ]


def follow(client: model.Client, event: Event) -> None:
    """Have a client of the model change as a trace says."""
    text = str(event.get("pattern", event.get("key")))
    pattern = text.encode("latin-1")
    if event["ev"] == "sub":
        client.patterns[pattern] += 1
    elif event["ev"] == "unsub":
        require(pattern in client.patterns, f"{event} takes no effect")
        client.patterns -= Counter([pattern])
    elif text in ("echo/on", "echo/off"):
        client.modes["echo"] = text[5:]


# ---- The owner of the bus


class OwnersServer:
    """A server whose owner is not root, and the clients of examples.

    What root does in an example, the owner does; or root does, and then who
    is nobody in particular there is the owner.
    """

    def __init__(self, server: ServerProcess, root: int) -> None:
        self._server = server
        self._root = root

    def connect(self, credentials: Mapping[str, int] | None = None) -> Wire:
        """Return a new client."""
        ids = {"uid": self._root, **(credentials or {})}
        if ids["uid"] == 0:
            ids["uid"] = self._root
        return self._server.connect(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@check("BLOCK-13", "CONN-2", "CTL-5", "LIMIT-7", "LIMIT-16", fills=True)
def owner_who_is_not_root(trial: Trial) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    directory = trial.server.new_path()
    os.mkdir(directory)
    os.chown(directory, OWNER, OWNER)
    ids = {"user": OWNER, "group": OWNER, "extra_groups": []}
    for options, cases in lots(is_for_owners):
        try:
            trial.start(*options, path=f"{directory}/bus", **ids)
        except Failure as failure:
            why = f"user {OWNER} cannot start it: {failure}"
            raise NotApplicable(why) from None
        for case, root in itertools.product(cases, (0, OWNER)):
            bus = OwnersServer(trial.server, root)
            hold(trial, case, f"on a bus of user {OWNER}", bus)
    trial.start("-u", "root", path=f"{directory}/bus", **ids)
    is_out = trial.client(uid=OWNER).pending() == END
    require(not is_out, "the bus owner may not connect", "CONN-2")


def is_for_owners(case: Conversation) -> bool:
    """Return whether an example has users, and something that root may do."""
    ids = [step.argument for step in case.steps if step.verb == "process"]
    return "uid=0" in ids or has_users(case) and not case.options
