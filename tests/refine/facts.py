"""What must be alike after a round: the server's state and the model's.

The server's own books are compared as well: a wrong entry shows to clients
late or never, as a leak, a wake-up too many, or a stale receiver.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import model
import sbus
from follower import Follower, named
from recorder import RecordingKernel

LATE_SECONDS = 1.0  # that an alarm may be late where each call takes time
CAUSE = re.compile(r"disconnect client=(\d+) uid=\d+ pid=\d+ \[([A-Z]+-\d+)\]")
CITED = re.compile(r"\[([A-Z]+-\d+)\]")
# The rule and a name, what the server has, and what it should have
Fact = tuple[str, object, object]


def facts_of(
    kernel: RecordingKernel, follower: Follower, log: str
) -> Iterator[Fact]:
    """Yield all that is to be alike."""
    clients = {client.number: client for client in kernel.bus.clients}
    yield "CONN-10: clients", {*clients}, {*follower.clients}
    for client in clients.values():
        yield from facts_of_client(client, follower)
        yield from facts_of_events(client, kernel, follower)
    yield from facts_of_bus(kernel, follower)
    yield from facts_of_causes(kernel.bus.counts, follower, log)


def alarms_of(server: sbus.Server) -> dict[Any, float]:
    """Return the alarms of a server: of clients, and others by their names.

    All that is private is read here and in the next function.
    """
    alarms = server._alarms.items()
    return {getattr(item, "__name__", item): due for item, due in alarms}


def recent_of(bus: sbus.Bus) -> dict[bytes, list[sbus.Client]]:
    """Return the receivers of messages that came lately, by their heads."""
    return bus._recent


def facts_of_client(client: sbus.Client, follower: Follower) -> Iterator[Fact]:
    """Yield what is to be alike of a client."""
    twin = follower.clients[client.number]
    is_lost = twin.is_deaf or bool(twin.end)
    cause = client.expelled[1:].partition("]")[0]
    yield "CONN-6: end", (cause, client.deaf), (twin.end, is_lost)
    if not is_lost:
        lack = follower.lacks.get(twin.number, "")
        yield "PUB-4: packets", [*client.wire.taken], twin.received
        yield "PUB-6: what the kernel lacks", client.lacks, lack

    waiting = [message.packet for message in twin.backlog]
    yield "BLOCK-4: backlog", [*map(bytes, client.backlog)], waiting
    yield "PUB-1: outbox", client.outbox, []
    yield "SUB-1: patterns", client.patterns, twin.patterns
    yield "BLOCK-2: modes", client.modes, twin.modes
    holds = {p.number: tuple(hold) for p, hold in client.holds.items()}
    yield "BLOCK-12: holds", holds, twin.holds
    holders = sorted(holder.number for holder in client.held_by)
    yield "BLOCK-12: held by", holders, sorted(follower.paused_by(twin))
    uses = model.uses_of([twin])
    yield "CTL-5: counts", {name: client.counts[name] for name in uses}, uses


def facts_of_events(
    client: sbus.Client, kernel: RecordingKernel, follower: Follower
) -> Iterator[Fact]:
    """Yield what the server is to wait for on account of a client."""
    is_resting = client.is_stalled and client.lacks == "memory"
    events = 0 if client.held_by else sbus.READ
    if client.is_stalled and not is_resting:
        events |= sbus.WRITE
    key = kernel.selector.keys.get(client.wire)
    yield "CONN-21: events", key.events if key else 0, events

    latest = client.progress.due if client.holds else sbus.NEVER
    if is_resting:
        latest = kernel.now + sbus.REST_SECONDS
    due = alarms_of(kernel.server).get(client, sbus.NEVER)
    expected = latest if latest == sbus.NEVER else min(due, latest)
    yield "CONN-21: alarm", due, expected
    if client.holds:
        # What the kernel kept may have counted, one time late [BLOCK-16].  A
        # round may come late, so this was to be seen by the one before
        limit = 2 * follower.options.block_timeout + LATE_SECONDS
        age = kernel.round_time - follower.clients[client.number].since
        yield "BLOCK-16: long due", age > limit, False


def facts_of_bus(
    kernel: RecordingKernel, follower: Follower
) -> Iterator[Fact]:
    """Yield what is to be alike of users, and of the bus."""
    bus = kernel.bus
    for uid, user in bus.users.items():
        yield "CTL-5: a user", user.counts, model.user_row(follower, uid)
    for use in sbus.USES:
        total = sum(user.counts[use] for user in bus.users.values())
        yield f"LIMIT-12: {use}", bus.counts[use], total

    # Of clients that are gone nothing is left
    expected = [] if kernel.listener in kernel.selector.keys else ["_listen"]
    alarms = {*alarms_of(kernel.server)} - bus.clients - {"write_left_out"}
    yield "CONN-21: alarms", [*alarms], expected
    counts = [sum(user.shapes.values()) for user in bus.users.values()]
    shapes = [*bus.public.shapes.values(), *bus.secret.shapes.values()]
    yield "LIMIT-5: shapes of users", sum(counts), sum(shapes)
    tables = [vars(bus.public), vars(bus.secret)]
    yield "UNSUB-1: tables", tables, tables_of(bus)
    recent = {head: {*clients} for head, clients in recent_of(bus).items()}
    receivers = {head: {*bus.public.find(head[4:-1])} for head in recent}
    yield "UNSUB-1: receivers", recent, receivers
    bytes_max = max(map(len, recent), default=0) - len(b"MSG \0")
    is_much = len(recent) > sbus.RECENT_KEYS_MAX
    yield "LIMIT-4: keys", is_much or bytes_max > sbus.RECENT_BYTES_MAX, False

    backlogs = [client.backlog for client in follower.clients.values()]
    publishers = [m.publisher for backlog in backlogs for m in backlog]
    waiting = len(publishers) - publishers.count(model.SERVER)
    copies = getattr(bus.journal, "copies", waiting)
    yield "TRACE-1: copies without an end", copies, waiting


def tables_of(bus: sbus.Bus) -> list[dict[str, Any]]:
    """Return what the tables of all patterns have."""
    tables = [sbus.Table(), sbus.Table()]
    for client in bus.clients:
        for text in client.patterns:
            shape, plain = sbus.parse_pattern(text)
            if shape:
                places = sbus.places_of(plain, client.credentials, bus.prefix)
                table = tables[text.startswith(sbus.SECRET)]
                table.change(shape, places, client, 1)
    return [*map(vars, tables)]


def facts_of_causes(
    counts: dict[str, int], follower: Follower, log: str
) -> Iterator[Fact]:
    """Yield why clients have left, as counts and the log say it."""
    known = Counter(rule for _, rule in follower.causes)
    counted: Counter[str] = Counter()
    for rule in {*counts} - {*sbus.COUNTED}:
        counted[named(rule)] += counts[rule]
    yield "CONN-13: causes", counted, known

    lines = CAUSE.findall(log)
    yield "CONN-13: named", len(lines), log.count("disconnect client=")
    logged = {(int(number), named(rule)) for number, rule in lines}
    yield "CONN-13: logged wrongly", logged - {*follower.causes}, set()
    follower.logged.update(map(named, CITED.findall(log)))
    yield "CONN-13: not logged", {*known} - follower.logged, set()
