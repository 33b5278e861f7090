"""Tests of control packets: modes, and what `stats` answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel, FakePeer
from packets import publish
from processes import ROOT


def ask(peer: FakePeer) -> dict[str, Any]:
    """Have a client that is not stalled ask for `stats`."""
    peer.send(b"CMSG stats")
    head, _, answer = peer.read()[-1].partition(b"\0")
    assert head == b"CMSG stats"
    stats = json.loads(answer)
    assert isinstance(stats, dict)
    return stats


def test_stats_have_large_backlogs_first(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[CTL-5] Paused clients come next; an answer has so many rows."""
    monkeypatch.setattr(sbus, "STATS_ROWS_MAX", 10)
    for uid in range(2, 14):
        kernel.connect(uid=uid)
    readers = [kernel.connect(uid=1) for _ in range(3)]
    for key, reader in zip((b"a", b"b*", b"*"), readers):
        reader.send(b"SUB " + key)
        reader.wire.room = 0
    readers[0].send(b"CMSG blocking/soft/block")
    writer = kernel.connect(uid=1)
    writer.send(publish(b"a"), publish(b"b"), publish(b"bb"))
    stats = ask(kernel.connect(uid=0))
    assert len(stats["users"]) == len(stats["clients"]) == 10
    assert [*stats["clients"]][:4] == ["15", "14", "13", "16"]


def test_stats_fit_in_a_packet(kernel: FakeKernel) -> None:
    """[CTL-5] [LIMIT-1] Rows of many clients, users and holders are cut."""
    asker, other = kernel.connect(uid=0), kernel.connect(uid=7)
    for uid in [0] * 20 + [*range(1_000, 1_020)]:
        kernel.subscriber(b"blocking/soft/block", room=0, uid=uid)
        kernel.connect(uid=uid).send(publish(b"k"))  # paused by up to twenty
    for limit in [*range(20, 3_000, 29), 9_999]:
        kernel.bus.options.max_packet = limit
        for peer in (asker, other):
            peer.send(b"CMSG stats")
            (answer,) = peer.read()
            assert len(answer) <= limit
            stats = json.loads(answer.partition(b"\0")[2])
            assert limit < 300 or "published" in stats
            if peer is asker and limit > 1_000:
                assert stats["users"] and stats["clients"]
                assert len(answer) > limit - 400  # which is a long row
    assert not asker.wire.closed and not other.wire.closed


def test_stats_have_a_row_that_just_fits(kernel: FakeKernel) -> None:
    """[CTL-5] For want of a byte the row is left out."""
    asker = kernel.connect(uid=0)
    kernel.connect(uid=7)
    asker.send(b"CMSG stats")
    (answer,) = asker.read()
    for limit, count in ((len(answer), 4), (len(answer) - 1, 3)):
        kernel.bus.options.max_packet = limit
        stats = ask(asker)
        assert len(stats["users"]) + len(stats["clients"]) == count


def is_part(part: Any, whole: Any) -> bool:
    """Return whether an object has all members of another, the part."""
    if not isinstance(part, dict):
        return bool(part == whole)
    return all(is_part(part[name], whole.get(name)) for name in part)


def test_stats_have_the_form_of_the_chapter(kernel: FakeKernel) -> None:
    """[CTL-5] An answer has all members that the example there has."""
    chapter = (ROOT / "spec/3-protocol.md").read_text("utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```", chapter, re.M | re.S)
    writer = kernel.connect(uid=1001, pid=4193)
    reader = kernel.connect(uid=1001, pid=4194)
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.wire.room = 0
    writer.send(publish(b"k", b"1"))
    part, whole = json.loads(example), ask(kernel.connect(uid=0))
    assert is_part(part, whole), whole
