"""Tests of flood control: limits of backlogs, orders, block time-outs."""

from __future__ import annotations

from typing import Any

import pytest

from fake_kernel import FakeKernel, FakePeer
from packets import publications, publish


@pytest.mark.parametrize(
    "limit", ["max_backlog", "max_user_backlog", "max_bus_backlog"]
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_far_above_a_limit(limit: str, uid: int) -> None:
    """[LIMIT-23] An eighth and a mebibyte above it, the reader has to go."""
    kernel = FakeKernel(**{limit: 80_000})
    reader = kernel.subscriber(room=0, uid=uid)
    used = 0
    bytes_max = 80_000
    if limit == "max_bus_backlog" and uid:
        bytes_max = 60_000
    bytes_max += bytes_max // 8 + (1 << 20)
    while not reader.wire.closed and used < 5_000_000:
        packet = publish(b"k").ljust(30_000 - 128)
        kernel.connect().send(packet)  # which is paused from now on
        used += 30_000
    is_limited = uid != 0 or limit != "max_user_backlog"
    assert reader.wire.closed == is_limited
    assert not is_limited or bytes_max < used - 30_000 <= bytes_max + 30_000


# ---- Readers that hold a publisher


def held(**limits: float) -> tuple[FakeKernel, FakePeer, FakePeer]:
    """Have a reader with little room hold a publisher."""
    kernel = FakeKernel(**limits)
    reader = kernel.subscriber(b"blocking/soft/block", room=8)
    sender = kernel.connect()
    sender.send(*publications(20))
    assert sender.paused
    return kernel, reader, sender


def test_packet_that_is_taken() -> None:
    """[BLOCK-16] Time begins anew for a holder, with an event or not."""
    kernel, reader, sender = held()
    for count in (1, 7):  # too little for the kernel to report, or enough
        kernel.wait(4.9)
        reader.read(count)
        kernel.wait(0.2)
        assert not reader.wire.closed and sender.paused
    kernel.wait(5)
    assert reader.wire.closed and not sender.paused


def test_hold_after_another() -> None:
    """[BLOCK-16] A later hold has all of the time again."""
    kernel, reader, sender = held()
    kernel.wait(4)
    sender.close()  # which is not read before it may go on
    assert sender.paused
    reader.read_all()
    assert sender.wire.closed
    kernel.wait(4)
    other = kernel.connect()
    other.send(*publications(20))
    kernel.wait(4.9)
    assert other.paused and not reader.wire.closed
    kernel.wait(0.2)
    assert reader.wire.closed


def test_time_is_given_once() -> None:
    """[BLOCK-16] Only the first that holds a holder gives it time."""
    kernel, reader, sender = held()
    reader.send(b"SUB x")
    for _ in range(2):  # the first gives it time, from then on
        other = kernel.connect()
        other.send(b"SUB other", b"CMSG blocking/soft/block")
        other.wire.room = 0
        reader.send(publish(b"other"))
        assert reader.paused
        kernel.wait(3)
        assert sender.paused
        other.close()
    kernel.wait(1.9)
    assert not reader.wire.closed
    kernel.wait(0.2)
    assert reader.wire.closed and not sender.paused


@pytest.mark.parametrize("seconds, longest", [(5, 5), (10**9, 3600)])
def test_the_loop_wakes_up_in_time(seconds: int, longest: int) -> None:
    """[BLOCK-16] It waits no longer than epoll can."""
    kernel, _, _ = held(block_timeout=seconds)
    select, timeouts = kernel.selector.select, kernel.selector.timeouts
    timeouts.clear()

    def stop(timeout: float) -> Any:
        kernel.server.stopping = True
        return select(timeout)

    kernel.selector.select = stop  # type: ignore[method-assign]
    kernel.server.run()
    assert timeouts[0] == longest
