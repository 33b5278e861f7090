"""Tests of control packets and of their answers."""

from __future__ import annotations

import json

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel, small
from packets import ANSWER_HEAD, WHOAMI, publications, publish


class TestControl:
    def test_control_packets_are_not_forwarded(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-1] Not even to those who subscribe to everything."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ", b"SUB news")
        peer.send(b"CMSG news\0x")
        assert witness.read() == []

    @pytest.mark.parametrize(
        "key", [b"", b"news", b"blocking/soft", b"blocking/hard/queue", b"!"]
    )
    def test_unknown_control_packet_is_ignored(
        self, kernel: FakeKernel, key: bytes
    ) -> None:
        """[CTL-2] With and without a payload."""
        peer = kernel.connect()
        peer.send(b"CMSG " + key, b"CMSG " + key + b"\0x")
        assert not peer.wire.closed
        assert peer.read() == []

    def test_answers_need_no_subscription(self, kernel: FakeKernel) -> None:
        """[CTL-3] [CRED-2] Nor do others hear them."""
        peer, witness = kernel.connect(gid=1, uid=2, pid=3), kernel.connect()
        witness.send(b"SUB ")
        peer.send(WHOAMI)
        assert peer.read() == [ANSWER_HEAD + b"!/cred/1/2/3"]
        assert witness.read() == []

    def test_payload_of_a_question_is_ignored(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-4] [CRED-2] A question may carry anything."""
        peer = kernel.connect()
        peer.send(WHOAMI + b"\0please")
        assert len(peer.read()) == 1

    def test_stats_of_a_client(self) -> None:
        """[CTL-5] Its own counts, and nobody else's."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(small(backlog_packets=2))
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.wire.room = 1
        reader.send(b"SUB k", b"SUB l", b"CMSG blocking/hard/discard")
        sender.send(*publications(4))
        assert reader.client.counts() == {
            "published": 0,
            "delivered": 1,
            "refused": 3,
            "discarded": 1,
            "paused": 0,
        }
        assert reader.stats["backlog_bytes"] == 2 * size
        reader.read_all()
        reader.wire.room = None
        reader.send(b"CMSG stats")
        (answer,) = reader.read()
        assert json.loads(answer.partition(b"\0")[2]) == {
            "client": 1,
            "published": 0,
            "delivered": 3,
            "refused": 3,
            "discarded": 1,
            "paused": 0,
            "patterns": 2,
            "backlog_bytes": 0,
        }
        sender.send(b"CMSG stats\0x")
        (answer,) = sender.read()
        assert answer.startswith(b'CMSG stats\0{"client": 2, "published": 4,')

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_stats_of_all_users(self, uid: int) -> None:
        """[CTL-5] For root and the bus owner; the past is not forgotten."""
        kernel = FakeKernel()
        asker = kernel.connect(uid=uid)
        one, two = (kernel.connect(uid=7) for _ in "12")
        one.send(b"SUB k", publish(b"k"), publish(b"x"))
        two.send(b"SUB k", b"CMSG blocking/soft/block")
        two.wire.room = 0
        one.send(publish(b"k"))
        assert one.paused
        two.close()
        asker.send(b"CMSG stats")
        (answer,) = asker.read()
        users = json.loads(answer.partition(b"\0")[2])["users"]
        assert set(users) == {"7", str(uid)}
        assert users["7"] == {
            "clients": 1,
            "patterns": 1,
            "backlog_bytes": 0,
            "published": 3,
            "delivered": 2,
            "refused": 1,
            "discarded": 0,
            "paused": 1,
        }
        one.close()
        assert list(kernel.bus.users) == [uid]

    def test_stats_of_more_users_than_an_answer_holds(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-5] A thousand of them."""
        for uid in range(2, sbus.STATS_USERS_MAX + 9):
            kernel.connect(uid=uid)
        root = kernel.connect(uid=0)
        root.send(b"CMSG stats")
        users = json.loads(root.read()[0].partition(b"\0")[2])["users"]
        assert len(users) == sbus.STATS_USERS_MAX == 1_000

    def test_modes_ignore_their_payload(self, kernel: FakeKernel) -> None:
        """[CTL-4] [BLOCK-2] A mode is its key."""
        peer = kernel.connect()
        peer.send(b"CMSG blocking/soft/error\0x", b"CMSG order/stack\0")
        assert peer.client.soft_mode == "error"
        assert peer.client.backlog.order == "stack"
