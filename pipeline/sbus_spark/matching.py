"""Matching: which patterns select which keys.

A bus of sbus.py itself says it, with a client for all who hold a pattern: so
a key costs a look-up for each shape of patterns, however many there are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence

import sbus

from .history import Group


def selections(
    groups: Iterable[Group], keys: Sequence[str], prefix: str
) -> list[tuple[int, ...]]:
    """Return for each key which groups receive it, by their places.

    *prefix* is that of the run [CRED-9].  What no server can have stored
    selects nothing.
    Spec: [MATCH-1] to [MATCH-6], [CRED-4] to [CRED-11].
    """
    options = sbus.parse_options([])
    vars(options).update(dict.fromkeys(sbus.LIMITS, sys.maxsize))
    start = f"{prefix}/" if prefix else ""
    options.cred_prefix = start.encode("latin-1", "replace")
    bus = sbus.Bus(options, 0)
    places = {}
    for place, group in enumerate(groups):
        client = bus.open(credentials_of(group))
        places[client] = place
        handle(bus, client, "SUB", group.pattern)
    publisher = bus.open(sbus.Credentials(0, 0, 0))
    found = []
    for key in keys:
        handle(bus, publisher, "MSG", key)
        for client in bus.touched:
            client.outbox.clear()
        found.append(tuple(sorted(map(places.__getitem__, bus.touched))))
        bus.touched.clear()
    return found


def credentials_of(group: Group) -> sbus.Credentials:
    """Return the credentials of those who hold a secret pattern."""
    return sbus.Credentials(*map(int, group.own.split() or "000"))


def handle(bus: sbus.Bus, client: sbus.Client, word: str, text: str) -> None:
    """Have a bus handle a packet, unless no client can have sent it."""
    if "\0" not in text:
        with contextlib.suppress(ValueError, sbus.ProtocolError):
            bus.handle(client, f"{word} {text}\0".encode("latin-1"))
