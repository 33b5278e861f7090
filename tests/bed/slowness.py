"""Have clients of a fake kernel take long, by the wall or the processor."""

from __future__ import annotations

from typing import Any

from fake_kernel import FakeKernel, FakePeer


def slow_down(kernel: FakeKernel, seconds: float) -> Any:
    """Have each packet take some time; return what handled them before."""
    handle = kernel.bus.handle

    def slow(*arguments: Any) -> int:
        kernel.now += seconds
        return handle(*arguments)

    kernel.bus.handle = slow  # type: ignore
    return handle


def spend_on_sends(kernel: FakeKernel, peer: FakePeer, seconds: float) -> None:
    """Have each packet for a client take some time."""
    send = peer.wire.send

    def slow(packet: Any) -> int:
        kernel.now += seconds
        return send(packet)

    peer.wire.send = slow  # type: ignore[method-assign]


def tick(kernel: FakeKernel, seconds: float) -> None:
    """Have so much time of the processor pass, and the server told."""
    kernel.server._processed -= seconds
    kernel.server.tick()


def wait_for_processor(kernel: FakeKernel, seconds: float) -> None:
    """Have time pass in which the server has no processor."""
    kernel.now += seconds
    kernel.server._processed += seconds


def spend_ticks(
    kernel: FakeKernel, peer: FakePeer, ticks: int = 2, seconds: float = 0.02
) -> None:
    """Have each packet for a client take some time of the processor."""
    send = peer.wire.send

    def slow(packet: Any) -> int:
        for _ in range(ticks):
            kernel.now += seconds / ticks
            kernel.server.tick()
        return send(packet)

    peer.wire.send = slow  # type: ignore[method-assign]


def slow_down_shutdown(
    kernel: FakeKernel, peer: FakePeer, seconds: float
) -> None:
    """Have it take some time of the processor to shut a client down."""
    shutdown = peer.wire.shutdown

    def slow(how: int) -> None:
        tick(kernel, seconds)
        kernel.now += seconds
        shutdown(how)

    peer.wire.shutdown = slow  # type: ignore[method-assign]
