"""Tests of control packets: modes, and what `stats` answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel, FakePeer, cost
from packets import publications, publish
from processes import ROOT


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


@pytest.mark.parametrize("uid", [0, OWNER])
def test_stats_of_all_clients(kernel: FakeKernel, uid: int) -> None:
    """[CTL-5] For root and the bus owner, and for nobody else."""
    one = kernel.connect(uid=7, pid=70)
    one.send(b"SUB k", b"SUB l", b"CMSG order/stack", b"CMSG echo/off")
    asker = kernel.connect(uid=uid, pid=80)
    kernel.connect(uid=8).close()
    assert "clients" not in ask(one)
    assert ask(asker)["clients"] == {
        "1": {
            "uid": 7,
            "pid": 70,
            "patterns": 2,
            "backlog_bytes": 0,
            "modes": "soft/queue hard/block order/stack echo/off",
            "paused_by": [],
        },
        "2": {
            "uid": uid,
            "pid": 80,
            "patterns": 0,
            "backlog_bytes": 0,
            "modes": "soft/queue hard/block order/queue echo/on",
            "paused_by": [],
        },
    }


def test_stats_of_a_paused_client(kernel: FakeKernel) -> None:
    """[CTL-5] [BLOCK-7] All who hold it, until they let it go."""
    writer, asker = kernel.connect(), kernel.connect(uid=0)
    mode = b"blocking/soft/block"
    readers = [kernel.subscriber(mode, room=0) for _ in "123"]
    writer.send(publish(b"k"))
    assert ask(asker)["clients"]["1"]["paused_by"] == [3, 4, 5]
    for reader in readers[1:]:
        reader.wire.room = None
    kernel.run()
    assert ask(asker)["clients"]["1"]["paused_by"] == [3]
    assert ask(asker)["clients"]["3"]["paused_by"] == []
    assert ask(asker)["users"]["1000"]["paused"] == 1  # once, by all of them


def test_refused_connection_has_no_number() -> None:
    """[CTL-5] [CONN-2] The next client has the next number."""
    kernel = FakeKernel("-u", "7")
    numbers = []
    for uid in (7, 8, 8, 7):
        peer = kernel.connect(uid=uid)
        if not peer.wire.closed:
            numbers.append(ask(peer)["client"])
    assert numbers == [1, 2]


def test_stats_have_large_backlogs_first(kernel: FakeKernel) -> None:
    """[CTL-5] Of a thousand clients; those that are paused come next."""
    for uid in range(2, 1_010):
        kernel.connect(uid=uid)
    readers = [kernel.connect(uid=1) for _ in range(3)]
    for key, reader in zip((b"a", b"b*", b"*"), readers):
        reader.send(b"SUB " + key)
        reader.wire.room = 0
    readers[0].send(b"CMSG blocking/soft/block")
    writer = kernel.connect(uid=1)
    writer.send(publish(b"a"), publish(b"b"), publish(b"bb"))
    stats = ask(kernel.connect(uid=0))
    assert len(stats["users"]) == sbus.STATS_ROWS_MAX == 1_000
    assert len(stats["clients"]) == sbus.STATS_ROWS_MAX
    assert [*stats["clients"]][:4] == ["1011", "1010", "1009", "1012"]


def test_stats_fit_in_a_packet(kernel: FakeKernel) -> None:
    """[CTL-5] [LIMIT-1] However many clients, users and holders there are."""
    asker, other = kernel.connect(uid=0), kernel.connect(uid=7)
    for uid in [0] * 60 + [*range(1_000, 1_060)]:
        kernel.subscriber(b"blocking/soft/block", room=0, uid=uid)
        kernel.connect(uid=uid).send(publish(b"k"))  # paused by up to sixty
    for limit in [*range(20, 3_000, 7), 9_999]:
        kernel.bus.options.max_packet = limit
        for peer in (asker, other):
            peer.send(b"CMSG stats")
            (answer,) = peer.read()
            assert len(answer) <= limit
            stats = json.loads(answer.partition(b"\0")[2])
            assert limit < 300 or "published" in stats
            has_room = peer is asker and limit > 1_000
            assert not has_room or (stats["users"] and stats["clients"])
            assert not has_room or len(answer) > limit - 500  # a long row
    assert not asker.wire.closed and not other.wire.closed


def test_stats_have_a_row_that_just_fits(kernel: FakeKernel) -> None:
    """[CTL-5] One byte less, and a row is left out."""
    asker = kernel.connect(uid=0)
    kernel.connect(uid=7)
    asker.send(b"CMSG stats")
    (answer,) = asker.read()
    for limit, count in ((len(answer), 4), (len(answer) - 1, 3)):
        kernel.bus.options.max_packet = limit
        stats = ask(asker)
        assert len(stats["users"]) + len(stats["clients"]) == count


def is_part(part: Any, whole: Any) -> bool:
    """Return whether what an object has is in another."""
    if not isinstance(part, dict):
        return bool(part == whole)
    return all(is_part(part[name], whole.get(name)) for name in part)


def test_stats_have_the_form_of_the_chapter(kernel: FakeKernel) -> None:
    """[CTL-5] The example there has some of the members."""
    chapter = (ROOT / "spec/3-protocol.md").read_text("utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```", chapter, re.M | re.S)
    writer = kernel.connect(uid=1001, pid=4193)
    reader = kernel.connect(uid=1001, pid=4194)
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.wire.room = 0
    writer.send(publish(b"k", b"1"))
    part, whole = json.loads(example), ask(kernel.connect(uid=0))
    assert is_part(part, whole), whole
