"""Matching: which patterns select which keys.

The table is that of sbus.py, so a key costs a look-up for each shape of
patterns, however many patterns there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sbus

from .history import Group

ANY_NUMBER = sbus.Limits(max_shapes=1 << 62)


class Holder(NamedTuple):
    """Stands in a table for all who hold a pattern."""

    place: int  # of the group
    credentials: sbus.Credentials


def selections(
    groups: Iterable[Group], keys: Sequence[str], prefix: str
) -> list[tuple[int, ...]]:
    """Return for each key which groups receive it, by their places.

    *prefix* is that of the run [CRED-9].  What no server can have stored
    selects nothing.
    Spec: [MATCH-1] to [MATCH-6], [CRED-4] to [CRED-11].
    """
    start = prefix.encode("latin-1", "replace")
    public = sbus.SubscriptionTable(ANY_NUMBER)
    secret = sbus.SubscriptionTable(ANY_NUMBER)
    for place, group in enumerate(groups):
        try:
            pattern = group.pattern.encode("latin-1")
            holder: Any = Holder(place, credentials_of(group))
            if not pattern.startswith(sbus.SECRET):
                public.add(pattern, holder)
                continue
            own = holder.credentials
            sbus.check_secret(pattern, own, start)
            for one in sbus.resolve(pattern, own, start):
                secret.add(one, holder)
        except (ValueError, sbus.ProtocolError):
            continue
    return [select(public, secret, key, start) for key in keys]


def credentials_of(group: Group) -> sbus.Credentials:
    """Return the credentials of those who hold a secret pattern."""
    if not group.own:
        return sbus.Credentials(0, 0, 0)
    return sbus.Credentials(*map(int, group.own.split()))


def select(
    public: sbus.SubscriptionTable,
    secret: sbus.SubscriptionTable,
    key: str,
    prefix: bytes,
) -> tuple[int, ...]:
    """Return the places of the groups that receive a key, in order."""
    try:
        name = key.encode("latin-1")
    except ValueError:
        return ()
    if not name.startswith(sbus.SECRET):
        found: Iterable[Any] = public.find(name)
    else:
        found = (
            holder
            for holder in secret.find(name)
            if sbus.fields_fit(name, holder.credentials, prefix)
        )
    return tuple(sorted(holder.place for holder in found))
