"""What the counts of a server add up to, after any conversation [CTL-5]."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import Failure
from .wire import Wire, numbers_in

SUMS = ("published", "delivered", "refused", "discarded", "paused")
USES = ("patterns", "backlog_bytes")
OWN_USE = "pattern_bytes"  # which only its client is told


def require_counts(clients: Sequence[Wire], observer: Wire) -> None:
    """Raise Failure unless a server counts what its clients did.

    The observer sees more if it is root's or the bus owner's.
    """
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for client in (*clients, observer):
        observer.settle()  # so the turn of the client is over
        wanted = client.own_numbers()  # before the answer is one more
        counts = numbers_in(client.stats())
        compare(client.name, counts, wanted, {})
        sums[str(client.uid)]["clients"] += bool(counts)
        for name in {*SUMS, OWN_USE} & {*counts}:
            sums[str(client.uid)][name] += counts[name]

    whole = numbers_in(observer.stats())
    rows = whole.get("clients", {}).values()
    for uid, user in whole.get("users", {}).items():
        parts = [row for row in rows if str(row.get("uid")) == uid]
        is_whole = len(parts) == user.get("clients")  # no row is left out
        uses = {
            name: sum(row.get(name, 0) for row in parts)
            for name in USES * is_whole
        }
        if sums[uid]["clients"] == user.get("clients"):  # all were asked
            uses[OWN_USE] = sums[uid][OWN_USE]
        compare(f"user {uid}", user, uses, sums[uid])


def compare(
    whose: str,
    counts: dict[str, Any],
    exact: Mapping[str, int],
    least: Mapping[str, int],
) -> None:
    """Raise Failure unless counts are as they should be, or no less."""
    lost = {"refused": counts.get("discarded", 0)}
    for name, number in (*exact.items(), *lost.items(), *least.items()):
        count = counts.get(name, number)
        if count < number or count > exact.get(name, count):
            claim = f"`stats` says of {whose}: {name} {count}"
            relation = "not" if name in exact else "less than"
            raise Failure(f"{claim}, {relation} {number}", "CTL-5")
