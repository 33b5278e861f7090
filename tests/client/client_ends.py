"""A client, and the other end of its socket in the hands of the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from real_bus import Peer, seqpacket_pair
from sbus_client import Client


class Ends(NamedTuple):
    """A client, and the other end of its socket."""

    client: Client
    server: Peer


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = seqpacket_pair()
    with Client(fd=ours.detach()) as client, Peer(theirs) as server:
        yield Ends(client, server)


def fill(client: Client, payload_bytes: int = 0) -> int:
    """Publish until the kernel takes no more; return how many it took."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            client.publish("k", bytes(payload_bytes), socket.MSG_DONTWAIT)
            count += 1
    return count
