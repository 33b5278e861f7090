"""Packets that many tests send and expect."""

from __future__ import annotations

from collections.abc import Sequence

WHOAMI = b"CMSG !/cred/whoami"


def publish(key: bytes, payload: bytes = b"") -> bytes:
    """Return a publish packet."""
    return b"MSG " + key + b"\0" + payload


def publications(count: int, key: bytes = b"k") -> Sequence[bytes]:
    """Return publish packets with the payloads 0, 1, 2 and so on."""
    return [publish(key, b"%d" % number) for number in range(count)]


ANSWER_HEAD = WHOAMI + b"\0"
ANSWER = ANSWER_HEAD + b"!/cred/100/1000/4242"
HEAD_BYTES = len(publish(b"k"))  # of a packet with the key `k`
