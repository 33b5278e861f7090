#!/usr/bin/env python3
"""A second server of sbus, for the tests of the conformance kit.

It is naive on purpose: a thread for each client, blocking sockets, one lock,
regular expressions.  It keeps the rules of the original protocol text, has
no limits and no flood control, and one client that does not read stops all.

    python3 naive_server.py ADDRESS
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import sys
import threading
from collections import Counter

PACKET_BYTES_MAX = 1 << 20
SECRET = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")

lock = threading.Lock()
subscriptions: dict[Client, Counter[bytes]] = {}


class Client(threading.Thread):
    """Serves one client until it has gone."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(daemon=True)
        self.wire = wire
        packed = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = struct.unpack("iII", packed)
        self.own = tuple(b"%d" % number for number in (gid, uid, pid))

    def run(self) -> None:
        with self.wire, contextlib.suppress(OSError):
            while True:
                packet = self.wire.recv(PACKET_BYTES_MAX)
                with lock:
                    if not packet or not self.handle(packet):
                        break
        with lock:
            del subscriptions[self]

    def handle(self, packet: bytes) -> bool:
        """Do what a packet asks for; return whether it makes sense."""
        head, nul, _ = packet.partition(b"\0")
        word, space, text = head.partition(b" ")
        if word in (b"SUB", b"UNSUB") and space and self.may_read(text):
            subscriptions[self][text] += 1 if word == b"SUB" else -1
            if subscriptions[self][text] <= 0:
                del subscriptions[self][text]
            return True
        if word == b"MSG" and space and nul:
            publish(text, packet)
            return True
        if word == b"CMSG" and space:
            if text == b"!/cred/whoami":
                self.wire.send(head + b"\0!/cred/" + b"/".join(self.own))
            return True
        return False

    def may_read(self, pattern: bytes) -> bool:
        """Return whether a pattern is the client's own, or not secret."""
        fields = SECRET.match(pattern)
        if not fields:
            return not pattern.startswith(b"!/")
        return all(map(fits, fields.groups(), self.own))

    def hears(self, key: bytes) -> bool:
        """Return whether the client is to have a message."""
        fields = SECRET.match(key)
        if fields and not all(map(fits, fields.groups(), self.own)):
            return False
        return any(
            expression(pattern).fullmatch(key)
            for pattern in subscriptions[self]
            if bool(SECRET.match(pattern)) == bool(fields)
        )


def fits(field: bytes, number: bytes) -> bool:
    """Return whether a field is empty or a client's own number."""
    return field in (b"", number)


def expression(pattern: bytes) -> re.Pattern[bytes]:
    """Return a regular expression that matches what a pattern selects."""
    fields = SECRET.match(pattern)
    start = b""
    if fields:
        numbers = (field or b"[0-9]*" for field in fields.groups())
        start = b"!/cred/" + b"/".join(numbers) + b"/"
        pattern = pattern[fields.end() :]
    rest = re.escape(pattern).replace(re.escape(b"*"), b"[^/]*")
    is_open = not pattern or pattern.endswith(b"/")
    return re.compile(start + rest + (b".*" if is_open else b""), re.S)


def publish(key: bytes, packet: bytes) -> None:
    """Send a message to all who are to have it."""
    for client in list(subscriptions):
        if client.hears(key):
            with contextlib.suppress(OSError):
                client.wire.send(packet)


def main() -> None:
    """Accept clients for ever."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(0))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.umask(0o077)
    listener.bind(sys.argv[1])
    listener.listen()
    os.close(1)
    while True:
        wire, _ = listener.accept()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
        client = Client(wire)
        with lock:
            subscriptions[client] = Counter()
        client.start()


if __name__ == "__main__":
    main()
