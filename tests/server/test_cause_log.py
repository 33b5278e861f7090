"""Tests of what the log says of clients that are disconnected."""

from __future__ import annotations

import errno

import pytest

import sbus
from fake_kernel import FakeKernel
from packets import publications, publish


class TestCauseLog:
    def test_one_line_names_client_and_rule(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Who, and which rule."""
        kernel.connect(uid=7, pid=9).send(b"HELLO\x1b[31m")
        assert caplog.messages == [
            "disconnect client=1 uid=7 pid=9 [PKT-2] unknown packet kind"
            " b'HELLO\\x1b[31m'"
        ]

    @pytest.mark.parametrize(
        ("limit", "line"),
        [
            ("max_packet", "[LIMIT-1] 70 bytes of a packet, over 60"),
            ("max_key", "[LIMIT-4] publish key over 60 bytes"),
            (
                "max_segments",
                "[LIMIT-17] 61 segments of a key or pattern, over 60",
            ),
            ("max_patterns", "[LIMIT-5] 61 patterns of a client, over 60"),
            (
                "max_pattern_bytes",
                "[LIMIT-6] 66 pattern bytes of a client, over 60",
            ),
            (
                "max_user_patterns",
                "[LIMIT-12] 61 patterns of a user, over 60",
            ),
            (
                "max_user_pattern_bytes",
                "[LIMIT-13] 66 pattern bytes of a user, over 60",
            ),
            (
                "max_shapes",
                "[LIMIT-10] 61 shapes of patterns of a user, over 60",
            ),
        ],
    )
    def test_limit_is_named(
        self, limit: str, line: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] What was broken, and what would have been right."""
        kernel = FakeKernel(sbus.Limits(**{limit: 60}))
        peer = kernel.connect(uid=7, pid=9)
        if line.startswith(("[LIMIT-1]", "[LIMIT-4]")):
            peer.send(publish(bytes(65).replace(b"\0", b"k")))
        else:
            peer.send(*(b"SUB " + b"/" * n for n in range(1, 62)))
        assert caplog.messages == [f"disconnect client=1 uid=7 pid=9 {line}"]

    @pytest.mark.parametrize(
        ("limit", "line"),
        [
            ("max_backlog", "1080 bytes of backlog of a client, over 1000"),
            (
                "max_user_backlog",
                "1080 bytes of backlog of a user, over 1000",
            ),
            (
                "max_bus_backlog",
                "810 bytes of backlog of the bus, over 750",
            ),
        ],
    )
    def test_limit_of_a_backlog_is_named(
        self, limit: str, line: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] The one that was reached first."""
        kernel = FakeKernel(sbus.Limits(**{limit: 1_000}))
        peer = kernel.connect(uid=7, pid=9)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/error")
        kernel.connect().send(*publications(20))
        lost = 5 if limit == "max_bus_backlog" else 7
        assert caplog.messages == [
            f"disconnect client=1 uid=7 pid=9 [BLOCK-11] {line},"
            f" backlog of {lost} packets lost"
        ]

    def test_departures_are_not_logged(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Only disconnections for cause are."""
        kernel.connect().close()
        assert not caplog.messages

    def test_lines_are_limited_by_rule_and_user(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] One a second, with a count of the others."""
        for _ in range(100):
            kernel.connect(uid=7).send(b"HELLO")
        assert len(caplog.messages) == 1
        kernel.connect(uid=8).send(b"HELLO")
        kernel.connect(uid=7).send(b"SUB !")
        assert len(caplog.messages) == 3
        kernel.wait(1.1)
        kernel.connect(uid=7).send(b"HELLO")
        assert caplog.messages[-1].endswith(" (99 more)")

    def test_lines_are_limited_by_rule(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Ten a second, however many users there are."""
        for uid in range(1, 31):
            kernel.connect(uid=uid).send(b"HELLO")
            kernel.wait(1 / 64)
        assert len(caplog.messages) == 10
        kernel.now = 1.0  # a second after the first of them
        kernel.connect(uid=31).send(b"HELLO")
        kernel.connect(uid=32).send(b"HELLO")
        assert len(caplog.messages) == 11
        kernel.connect(uid=1).send(b"HELLO")  # a second after its own
        kernel.wait(1 / 64)
        kernel.connect(uid=1).send(b"HELLO")
        assert caplog.messages[-1].startswith("disconnect client=34 uid=1 ")
        assert caplog.messages[-1].endswith(" (1 more)")

    @pytest.mark.parametrize(
        ("error", "what"),
        [
            (OSError(errno.EIO, "odd"), "[CONN-12] [Errno 5] odd"),
            (MemoryError(), "[CONN-12] there is no memory for it"),
        ],
    )
    def test_errors_have_a_rule(
        self,
        kernel: FakeKernel,
        error: Exception,
        what: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """[CONN-12] [CONN-13] Those of the system as well."""

        def fail(*_: object) -> int:
            raise error

        reading, writing = (kernel.connect(uid=7, pid=pid) for pid in (8, 9))
        writing.send(b"SUB k")
        writing.wire.send = fail  # type: ignore[method-assign]
        kernel.connect().send(publish(b"k"))
        kernel.wait(1)
        reading.wire.recv_into = fail  # type: ignore[method-assign]
        reading.send(b"x")
        assert caplog.messages == [
            f"disconnect client=2 uid=7 pid=9 {what}",
            f"disconnect client=1 uid=7 pid=8 {what}",
        ]

    def test_long_key_of_a_large_packet(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] [LIMIT-4] It is the key that is wrong, not the packet."""
        packets = [b"MSG " + b"k" * 20_000, publish(b"k" * 20_000)]
        packets += [b"CMSG " + b"k" * 20_000, b"UNSUB " + b"k" * 20_000]
        for uid, packet in enumerate(packets):
            kernel.connect(uid=uid).send(packet)
        kinds = ("publish", "publish", "control", "unsubscribe")
        assert [line.partition("[")[2] for line in caplog.messages] == [
            f"LIMIT-4] {kind} key over 4096 bytes" for kind in kinds
        ]

    def test_lines_left_out_are_counted_at_the_end(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] No count is lost."""
        for _ in range(3):
            kernel.connect(uid=7).send(b"HELLO")
        kernel.server.stop()
        kernel.server.run()
        assert caplog.messages[-1] == "[PKT-2] (2 more)"

    def test_first_discarded_packet_is_logged(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[BLOCK-20] The first of each client."""
        peer = kernel.connect(uid=7, pid=9)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/soft/discard")
        kernel.connect().send(*publications(200))
        kernel.wait(2)
        kernel.connect().send(*publications(200))
        assert len(caplog.messages) == 1
        assert "client=1 uid=7 pid=9 [BLOCK-20]" in caplog.messages[0]

    def test_refused_users_are_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-2] [CONN-13] With the rule."""
        FakeKernel(allowed_uids={1}).connect(uid=2, pid=3)
        assert caplog.messages == [
            "refuse uid=2 pid=3 [CONN-2] not a user of this bus"
        ]
