"""Tests of control packets: modes, and what `stats` answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel, FakePeer, cost
from packets import publications, publish


def ask(peer: FakePeer) -> dict[str, Any]:
    """Have a client that is not stalled ask for `stats`."""
    peer.send(b"CMSG stats")
    head, _, answer = peer.read()[-1].partition(b"\0")
    assert head == b"CMSG stats"
    stats = json.loads(answer)
    assert isinstance(stats, dict)
    return stats


def test_stats_of_a_client() -> None:
    """[CTL-5] Its own counts, and nobody else's."""
    kernel = FakeKernel(max_backlog=cost(2))
    reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
    reader.wire.room = 1
    reader.send(b"SUB k", b"SUB lm", b"CMSG blocking/hard/discard")
    sender.send(*publications(4))
    assert reader.waiting == cost(2)
    reader.read_all()
    reader.wire.room = None
    assert ask(reader) == {
        "client": 1,
        "published": 0,
        "delivered": 3,
        "refused": 3,
        "discarded": 1,
        "paused": 0,
        "patterns": 2,
        "pattern_bytes": 3,
        "backlog_bytes": 0,
    }
    assert ask(sender)["published"] == 4
    assert ask(sender)["delivered"] == 1  # the answer before


@pytest.mark.parametrize("uid", [0, OWNER])
def test_stats_of_all_users(kernel: FakeKernel, uid: int) -> None:
    """[CTL-5] For root and the bus owner; the past is not forgotten."""
    asker = kernel.connect(uid=uid)
    one, two = (kernel.connect(uid=7) for _ in "12")
    one.send(b"SUB k", publish(b"k"), publish(b"x"))
    two.send(b"SUB k", b"CMSG blocking/soft/block")
    two.wire.room = 0
    one.send(publish(b"k"))
    assert one.paused
    two.close()
    users = ask(asker)["users"]
    assert set(users) == {"7", str(uid)}
    assert users["7"] == {
        "clients": 1,
        "patterns": 1,
        "pattern_bytes": 1,
        "backlog_bytes": 0,
        "published": 3,
        "delivered": 2,
        "refused": 1,
        "discarded": 1,
        "paused": 1,
    }
    one.close()
    assert set(ask(asker)["users"]) == {str(uid)}


def test_stats_of_more_users_than_an_answer_holds(kernel: FakeKernel) -> None:
    """[CTL-5] A thousand of them."""
    for uid in range(2, 1_010):
        kernel.connect(uid=uid)
    users = ask(kernel.connect(uid=0))["users"]
    assert len(users) == sbus.STATS_USERS_MAX == 1_000
