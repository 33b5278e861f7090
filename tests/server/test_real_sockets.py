"""Tests of clients on real sockets: large packets, deaths, visitors."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packets import WHOAMI, publications, publish
from processes import child_process
from real_bus import Peer, RealBus, freeze, needs_root, thaw, wait_for

ATTACKER, INNOCENT = 1000, 1001
LARGE_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)


@pytest.fixture(name="bus")
def bus_for_all(directory: Path) -> Iterator[RealBus]:
    with RealBus(directory, "-go") as running:
        yield running


@pytest.fixture
def reader(bus: RealBus) -> Iterator[Peer]:
    with bus.connect() as peer:
        peer.send(b"SUB k")
        peer.fence()
        yield peer


def descriptors(bus: RealBus) -> int:
    """Return how many descriptors a server has open."""
    return len(os.listdir(f"/proc/{bus.process.pid}/fd"))


@pytest.mark.parametrize("size", [1 << 12, 1 << 17, 212_960, 409_599])
def test_sizes(bus: RealBus, reader: Peer, size: int) -> None:
    """[CONN-1] [PUB-4] [LIMIT-1] Sizes where the kernel changes pass."""
    with bus.connect() as sender:
        sender.wire.setsockopt(*LARGE_BUFFER)
        for more in (-1, 0, 1):
            packet = publish(b"k", os.urandom(size + more - 6))
            sender.send(packet)
            assert reader.receive() == packet
        sender.send(publish(b"k", bytes(409_595)))
        assert sender.is_disconnected()
        assert reader.fence() == []


def test_killed_publishers(bus: RealBus, reader: Peer) -> None:
    """[CONN-6] Packets that the kernel took before a kill -9 are delivered."""
    before = descriptors(bus)
    for count in (10, 100, 250):
        packets = publications(count)
        with bus.connect() as sender:
            sender.send(WHOAMI)
            sender.wire.recv(1, socket.MSG_PEEK)  # it is left unread
            freeze(bus)

            def publish_and_die(
                sender: Peer = sender, packets: Any = packets
            ) -> None:
                sender.send(*packets)
                os.kill(os.getpid(), signal.SIGKILL)

            with child_process(publish_and_die) as child:
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        thaw(bus)
        assert [reader.receive() for _ in packets] == packets
    wait_for(lambda: descriptors(bus) == before)


@needs_root
def test_visitors_without_end(bus: RealBus) -> None:
    """[CONN-5] [CONN-12] Another user's messages go on."""

    def rage() -> None:
        os.setuid(ATTACKER)
        while True:
            bus.connect().send(b"SUB storm", publish(b"storm"), b"BAD")

    with bus.connect(INNOCENT) as sender, bus.connect(INNOCENT) as reader:
        reader.send(b"SUB calm")
        reader.fence()
        with child_process(rage), child_process(rage):
            for packet in publications(300, b"calm"):
                sender.send(packet)
                assert reader.receive() == packet
