#!/usr/bin/env python3
"""relay: the least that a bus in one Python thread can do, to compare with.

    python3 bench/relay.py ADDRESS

It receives a packet, looks its key up in a dictionary and sends it on,
without queues, limits or checks, until a signal ends it.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Callable

SEND_BUFFER_BYTES = 212_992  # asked for; the kernel doubles it
WHOAMI = b"CMSG !/cred/whoami"


class Relay:
    """The least that a relay in one Python thread can do.

    A client has one subscription, its last: to a key, or to all keys that
    begin with it if it ends in '/'.  Sending waits for slow receivers.
    """

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address)
        self.listener.listen(4096)
        self.clients: dict[int, socket.socket] = {}
        self.patterns: dict[socket.socket, bytes] = {}
        self.routes: dict[bytes, list[Callable[[memoryview], int]]] = {}
        self.buffer = bytearray(409_600)

    def run(self) -> None:
        """Serve until a signal ends the process."""
        poll = select.epoll()
        poll.register(self.listener, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self.clients:
                    self.turn(self.clients[descriptor])
                else:
                    client, _ = self.listener.accept()
                    client.setsockopt(
                        socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
                    )
                    self.clients[client.fileno()] = client
                    poll.register(client, select.EPOLLIN)

    def turn(self, client: socket.socket) -> None:
        """Send on a run of a client's packets."""
        view, find = memoryview(self.buffer), self.buffer.find
        try:
            for _ in range(64):
                size = client.recv_into(view, 0, socket.MSG_DONTWAIT)
                end = find(0, 4, size)
                if end < 0 or view[0] != 0x4D:  # not MSG
                    if not size:
                        return self.forget(client)
                    self.handle(client, view[:size].tobytes())
                    continue
                key = view[4:end].tobytes()
                for send in self.routes.get(key) or self.route(key):
                    send(view[:size])
        except BlockingIOError:
            pass
        except OSError:
            self.forget(client)

    def route(self, key: bytes) -> list[Callable[[memoryview], int]]:
        """Return what sends to the receivers of a key, and remember it."""
        self.routes[key] = [
            client.send
            for client, pattern in self.patterns.items()
            if pattern == key
            or (pattern.endswith(b"/") and key.startswith(pattern))
        ]
        return self.routes[key]

    def handle(self, client: socket.socket, packet: bytes) -> None:
        """Do what a packet that is no message asks for."""
        if packet.startswith(b"SUB "):
            self.patterns[client] = packet[4:]
            self.routes.clear()
        elif packet == WHOAMI:
            client.send(WHOAMI + b"\0!/cred/0/0/0")

    def forget(self, client: socket.socket) -> None:
        """Close a client's socket."""
        self.patterns.pop(client, None)
        self.routes.clear()
        del self.clients[client.fileno()]
        client.close()


if __name__ == "__main__":
    Relay(sys.argv[1]).run()
