"""relay: the least that a bus in one Python thread can do, to compare with.

    python3 bench/relay.py ADDRESS

It looks the key of a packet up in a dictionary and sends the packet on.  It
has no queues, limits or checks, and waits for slow receivers.  A client has
one subscription, its last, to all keys that begin so.  A signal ends it.
"""

from __future__ import annotations

import select
import socket
import sys

WHOAMI = b"CMSG !/cred/whoami"
SEND_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)


class Relay:
    """Sends each packet to the subscribers of its key."""

    def __init__(self) -> None:
        self.patterns: dict[socket.socket, bytes] = {}
        self.routes: dict[bytes, list[socket.socket]] = {}
        self.buffer = bytearray(409_600)

    def run(self, listener: socket.socket) -> None:
        """Serve until a signal ends the process."""
        poll, sockets = select.epoll(), {listener.fileno(): listener}
        poll.register(listener, select.EPOLLIN)
        while True:
            for number, _ in poll.poll():
                if sockets[number] is listener:
                    client, _ = listener.accept()
                    client.setsockopt(*SEND_BUFFER)
                    poll.register(client, select.EPOLLIN)
                    sockets[client.fileno()] = client
                elif not self.turn(sockets[number]):
                    self.subscribe(sockets[number], None)
                    sockets.pop(number).close()

    def turn(self, client: socket.socket) -> bool:
        """Handle packets of a client; return whether it is still there."""
        view, buffer = memoryview(self.buffer), self.buffer
        try:
            for _ in range(64):  # then it is the turn of another client
                size = client.recv_into(view, 0, socket.MSG_DONTWAIT)
                end = buffer.find(0, 4, size)
                if buffer.startswith(b"MSG ") and end > 0:
                    key = view[4:end].tobytes()
                    for receiver in self.routes.get(key) or self.route(key):
                        receiver.send(view[:size])
                elif buffer.startswith(b"SUB "):
                    self.subscribe(client, view[4:size].tobytes())
                elif view[:size] == WHOAMI:
                    client.send(WHOAMI + b"\0!/cred/0/0/0")
                elif not size:
                    return False
        except BlockingIOError:
            pass  # all is read
        except ConnectionError:
            return False
        return True

    def subscribe(self, client: socket.socket, pattern: bytes | None) -> None:
        """Change the subscription of a client."""
        self.patterns.pop(client, None)
        if pattern is not None:
            self.patterns[client] = pattern
        self.routes.clear()

    def route(self, key: bytes) -> list[socket.socket]:
        """Return the receivers of a key, and remember them."""
        held = self.patterns.items()
        self.routes[key] = [to for to, start in held if key.startswith(start)]
        return self.routes[key]


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bus:
        bus.bind(sys.argv[1])
        bus.listen(4_096)
        Relay().run(bus)
