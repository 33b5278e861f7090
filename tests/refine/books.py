"""The server's own books: what it remembers, and must remember rightly."""

from __future__ import annotations

from typing import Any, cast

import sbus
from recorder import Ledger, RecordingKernel, require, require_equal


def alarms_of(server: sbus.Server) -> dict[Any, float]:
    """Return the alarms of a server: of clients, and others by their names.

    All that is private is read here and in the next function.  A wrong entry
    shows to clients late or never: as a leak, a wake-up too many, or a stale
    receiver.
    """
    alarms = server._alarms.items()
    return {getattr(item, "__name__", item): due for item, due in alarms}


def recent_of(bus: sbus.Bus) -> dict[bytes, list[sbus.Client]]:
    """Return the receivers of messages that came lately, by their heads."""
    return bus._recent


def check_books(kernel: RecordingKernel) -> None:
    """Raise Differs if the server's own books are wrong."""
    bus = kernel.bus
    alarms = alarms_of(kernel.server)
    is_listening = kernel.listener in kernel.selector.keys
    watched: dict[Any, int] = {}
    if is_listening:
        watched[kernel.listener] = sbus.READ
    for client in bus.clients:
        check_client(client)
        check_alarm(client, alarms.pop(client, None), kernel.now)
        if client.events:
            watched[client.wire] = client.events
    events = {wire: key.events for wire, key in kernel.selector.keys.items()}
    require_equal("CONN-21: watched", events, watched)
    alarms.pop("write_left_out", None)  # late lines of the log
    expected = [] if is_listening else ["_listen"]
    require_equal("CONN-21: alarms", [*alarms], expected)

    for use in sbus.USES:
        total = sum(user.counts[use] for user in bus.users.values())
        require_equal(f"LIMIT-12: {use}", bus.counts[use], total)
    check_tables(bus)
    check_recent(bus)
    if bus.journal:
        packets = [bytes(p) for client in bus.clients for p in client.backlog]
        waiting = sum(packet.startswith(b"MSG ") for packet in packets)
        copies = cast(Ledger, bus.journal).copies
        require_equal("TRACE-1: copies without an end", copies, waiting)


def check_client(client: sbus.Client) -> None:
    """Raise Differs if an outbox, a hold, or an event to watch is wrong."""
    require(not client.outbox and not client.gone, "PUB-1: an outbox is left")
    others = {*client.holds, *client.held_by}
    require(others <= client.bus.clients, "CONN-10: a hold of who is gone")
    is_held = all(client in holder.holds for holder in client.held_by)
    does_hold = all(client in held.held_by for held in client.holds)
    require(is_held and does_hold, "BLOCK-12: a hold has one side")
    events = 0 if client.held_by else sbus.READ
    if client.is_stalled and client.lacks != "memory":
        events |= sbus.WRITE
    require_equal("CONN-21: events", client.events, events)


def check_alarm(client: sbus.Client, due: float | None, now: float) -> None:
    """Raise Differs if an alarm is missing, or for nothing."""
    if client.lacks == "memory" and client.is_stalled:
        latest = now + sbus.REST_SECONDS
    elif client.holds:
        latest = client.progress.due
    else:
        require(due is None, "CONN-21: an alarm for nothing")
        return
    require(due is not None and due <= latest, "BLOCK-16: no alarm")


def check_tables(bus: sbus.Bus) -> None:
    """Raise Differs if the tables are not those of all patterns."""
    tables = [sbus.Table(), sbus.Table()]
    for client in bus.clients:
        for text in client.patterns:
            shape, plain = sbus.parse_pattern(text)
            if shape:
                places = sbus.places_of(plain, client.credentials, bus.prefix)
                table = tables[text.startswith(sbus.SECRET)]
                table.change(shape, places, client, 1)
    ours = [vars(bus.public), vars(bus.secret)]
    require_equal("UNSUB-1: tables", ours, [*map(vars, tables)])


def check_recent(bus: sbus.Bus) -> None:
    """Raise Differs if receivers are remembered wrongly, or too many."""
    recent = recent_of(bus)
    require(len(recent) <= sbus.RECENT_KEYS_MAX, "LIMIT-4: too many keys")
    for head, receivers in recent.items():
        key = head[len(b"MSG ") : -1]
        size = len(key) + 8 * len(receivers)  # eight for each pointer
        require(size <= sbus.RECENT_BYTES_MAX, "LIMIT-4: too long a key")
        require_equal("UNSUB-1", {*receivers}, {*bus.public.find(key)})
