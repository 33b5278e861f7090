#!/usr/bin/env python3
"""sbus_client: talk to an sbus server, from Python or from a shell.

    from sbus_client import Client

    with Client() as bus:
        bus.subscribe("sensors/*/temp")
        bus.publish("sensors/1/temp", b"21.5")
        for message in bus:
            print(message.key, message.payload)

    python3 sbus_client.py sub 'sensors/*/temp'
    python3 sbus_client.py pub sensors/1/temp 21.5

This file needs CPython 3.9 or later on Linux and nothing else, the server's
file included: copy it.  What records, joins and watches buses is another
program on top of it, in tools/.  A bracketed id, as in [CONN-14], names a
rule of the specification in spec/.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import functools
import itertools
import json
import math
import mmap
import os
import random
import re
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    NamedTuple,
    NoReturn,
    TextIO,
    TypeVar,
    Union,
)

if TYPE_CHECKING:  # these take long, and are imported where they are used
    import asyncio

__version__ = "0.1.0"
__all__ = [
    "AddressError",
    "AsyncClient",
    "Client",
    "ControlMessage",
    "Credentials",
    "Disconnected",
    "Message",
    "PacketError",
    "PacketTooLarge",
    "Reconnected",
    "Request",
    "SbusError",
    "TooMuchKept",
    "default_address",
    "matches",
    "owner_of",
    "parse_request",
    "private_key",
    "requests",
]

PACKET_BYTES_MAX = 409_600
HEAD_BYTES_MAX = 8_192  # where the end of a key is looked for at first
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
ABSTRACT = "/dev/unix/abstract/"
ABSTRACT_BYTES = 108
PATH_BYTES_MAX = 107
POLL_SECONDS_MAX = 3_600.0  # poll(2) takes 24 days at most
RECONNECT_SECONDS_MIN = 0.05  # before the second try; doubled up to
RECONNECT_SECONDS_MAX = 5.0
REFUSED_SECONDS = 1.0  # after which a lost connection is no refusal
REFUSALS_MAX = 2  # in a row
KEPT_BYTES_MAX = 1 << 26  # beside an answer
KEPT_OVERHEAD_BYTES = 256  # of each message
WHOAMI = b"!/cred/whoami"
STATS = b"stats"
MODES = {  # what a server remembers of a client, besides its patterns
    b"blocking/soft/queue",
    b"blocking/soft/discard",
    b"blocking/soft/block",
    b"blocking/soft/error",
    b"blocking/hard/discard",
    b"blocking/hard/block",
    b"blocking/hard/error",
    b"order/queue",
    b"order/stack",
    b"order/random",
    b"echo/on",
    b"echo/off",
}


# =============================================================================
# Errors
# =============================================================================


class SbusError(Exception):
    """The base of all errors that this file raises on purpose."""


class AddressError(SbusError, ValueError):
    """An address is malformed."""


class Disconnected(SbusError, ConnectionError):
    """There is no server, or the connection is closed.

    A server closes the connection of a client that broke a rule, of a user
    whom it does not let in, and of all clients when it stops; a client may
    be closed itself.  *errno* is that of connect(2) where there is no
    server, and None otherwise.
    """


class PacketTooLarge(SbusError, ValueError):
    """A packet does not fit: nothing was sent, or a received one is lost."""


class TooMuchKept(SbusError):
    """More arrived beside an answer than is kept: receive it first."""


class PacketError(SbusError, ValueError):
    """A key holds a NUL byte, or a received packet is malformed."""


# =============================================================================
# Packets
# =============================================================================


class Message(NamedTuple):
    """What was published: a routing key and a payload."""

    key: bytes
    payload: bytes


class ControlMessage(NamedTuple):
    """What the server itself has sent."""

    key: bytes
    payload: bytes


class Reconnected(ControlMessage):
    """What a client itself says: it lost its bus, and is connected again.

    Subscriptions and modes are as before.  What was published meanwhile is
    gone, and so may be what this client sent last.  The fields are empty.
    """

    __slots__ = ()


Received = Union[Message, ControlMessage]
Text = Union[str, bytes]
Payload = Union[bytes, bytearray, memoryview]


class Credentials(NamedTuple):
    """Who the server says this client is [CRED-2].

    *path* is the whole answer, as in b"!/cred/100/1000/4242": the keys that
    begin with it and a '/' are private to this client.  The three numbers
    are the last ones in it.
    """

    gid: int
    uid: int
    pid: int
    path: bytes


def to_bytes(text: Text) -> bytes:
    """Return a key or pattern as bytes: UTF-8 unless it is bytes already.

    Raises: PacketError if it holds a NUL byte [KEY-1].
    """
    encoded = text.encode("utf-8") if isinstance(text, str) else text
    if b"\0" in encoded:
        raise PacketError(f"{text!r}: a key cannot hold a NUL byte")
    return encoded


@functools.lru_cache(1_024)
def publish_head(key: Text) -> bytes:
    """Return what a publish packet has before its payload.

    Raises: PacketError if the key holds a NUL byte [KEY-1].
    Spec: [PUB-1].
    """
    return b"MSG " + to_bytes(key) + b"\0"


def payload_bytes(payload: Payload) -> bytes:
    """Return a payload as bytes.

    Raises: TypeError if it has none.
    """
    if isinstance(payload, bytes):
        return payload
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        what = f"a payload is bytes, not {kind}: encode it"
        raise TypeError(what) from None


def parse_packet(packet: memoryview) -> Received:
    """Return what a server's packet says.

    Raises: PacketError if it is neither a publish nor a control packet.
    Spec: [PKT-1].
    """
    head, nul, payload = split_packet(packet)
    word, space, key = head.partition(b" ")
    if nul and word == b"MSG" and space:
        return Message(key, payload)
    if nul and word == b"CMSG" and space:
        return ControlMessage(key, payload)
    raise PacketError(f"the server sent a malformed packet: {head[:80]!r}")


def split_packet(packet: memoryview) -> tuple[bytes, bytes, bytes]:
    """Return what is before the first NUL byte, that byte, and the rest.

    A large packet is copied once, and not a second time to be cut.
    """
    end = packet[:HEAD_BYTES_MAX].tobytes().find(b"\0")
    if end < 0:
        return packet.tobytes().partition(b"\0")
    return packet[:end].tobytes(), b"\0", packet[end + 1 :].tobytes()


def matches(pattern: Text, key: Text) -> bool:
    """Return whether a pattern selects a key.

    Whether a server delivers what is selected is another question, for
    secret keys.
    Raises: PacketError if one of them holds a NUL byte.
    Spec: [MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-5] [MATCH-6].
    """
    selector = pattern_selector(to_bytes(pattern))
    return bool(selector and selector.fullmatch(to_bytes(key)))


@functools.lru_cache(1_024)
def pattern_selector(pattern: bytes) -> re.Pattern[bytes] | None:
    """Return what matches the keys of a pattern, or None if none does."""
    parts = []
    for segment in pattern.split(b"/"):
        literal, star, more = segment.partition(b"*")
        if more.strip(b"*"):  # after a '*' the segment is over
            return None
        parts.append(re.escape(literal) + (b"[^/]*" if star else b""))
    if not pattern or pattern.endswith(b"/"):
        parts[-1] = b".*"
    return re.compile(b"/".join(parts), re.DOTALL)


def parse_credentials(path: bytes) -> Credentials:
    """Return the answer to `!/cred/whoami` with its last three numbers.

    Raises: PacketError if it is malformed.
    Spec: [CRED-2].
    """
    one = rb"!/cred/([0-9]{1,10})/([0-9]{1,10})/([0-9]{1,10})"
    match = re.fullmatch(rb"(?:!/cred/[0-9]+/[0-9]+/[0-9]+/)*" + one, path)
    if not match:
        raise PacketError(f"the server sent malformed credentials: {path!r}")
    gid, uid, pid = map(int, match.groups())
    return Credentials(gid, uid, pid, path)


# =============================================================================
# Addresses
# =============================================================================


def default_address() -> str:
    """Return the address at which a server listens if not told otherwise.

    Raises: AddressError if the environment does not tell.
    Spec: [ADDR-1].
    """
    if os.getuid() == 0:
        return "/run/sbus.socket"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise AddressError("XDG_RUNTIME_DIR is not set: give an address")
    return os.path.join(directory, "sbus.socket")


def usual_address() -> str:
    """Return SBUS_ADDRESS of the environment, or else the default address.

    Raises: AddressError if the environment does not tell.
    """
    return os.environ.get("SBUS_ADDRESS") or default_address()


def socket_name(address: str) -> bytes:
    """Return an address as the kernel knows it.

    Raises: AddressError if it is malformed.
    Spec: [ADDR-4].
    """
    if address.startswith(ABSTRACT):
        digits = address[len(ABSTRACT) :]
        if not re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
            raise AddressError(
                f"{address!r}: after {ABSTRACT} come 2 to 216 hexadecimal"
                " digits, an even number, that begin with 00"
            )
        return bytes.fromhex(digits).ljust(ABSTRACT_BYTES, b"\0")
    name = os.fsencode(address)
    if not name or b"\0" in name or len(name) > PATH_BYTES_MAX:
        raise AddressError(
            f"{address!r}: a path has 1 to {PATH_BYTES_MAX} bytes, none NUL"
        )
    return name


def open_socket(
    address: str, flags: int = 0, timeout: float | None = None
) -> socket.socket:
    """Return a blocking socket that is connected to a server.

    It waits while the server's queue of new connections is full, or with
    MSG_DONTWAIT raises BlockingIOError.
    Raises: TimeoutError; AddressError; Disconnected if there is no server.
    Spec: [CONN-17].
    """
    if address.startswith("/dev/fd/"):
        number = address[len("/dev/fd/") :]
        if not re.fullmatch("[0-9]{1,9}", number):
            raise AddressError(f"{address!r}: not a descriptor's number")
        return inherit_socket(int(number))
    name = socket_name(address)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.setblocking(not flags & socket.MSG_DONTWAIT)
        limit_sends(connected, timeout)
        connected.connect(name)
        limit_sends(connected, None)
        connected.setblocking(True)
    except BlockingIOError:
        connected.close()
        if timeout is None or flags & socket.MSG_DONTWAIT:
            raise
        raise TimeoutError(
            f"the bus at {address} does not let us in"
        ) from None
    except OSError as error:
        connected.close()
        raise no_bus(address, error) from None
    return connected


def limit_sends(connected: socket.socket, timeout: float | None) -> None:
    """Have connect(2) and send(2) wait for so long at most, or for ever."""
    seconds = min(timeout or 0.0, POLL_SECONDS_MAX)
    microseconds = math.ceil(seconds * 1e6)
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def check_server(connected: socket.socket, uid: int) -> None:
    """Close a socket whose server runs as another user.

    Raises: Disconnected if it does.
    """
    size = struct.calcsize("iII")
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, server_uid, _ = struct.unpack("iII", packed)
    if server_uid != uid:
        connected.close()
        raise Disconnected(
            f"the bus runs as the user {server_uid}, and not as {uid}"
        )


def no_bus(address: str, failed: OSError) -> Disconnected:
    """Return the error that tells why connect(2) failed, and what to do."""
    refused = "no server listens there (what is there is stale or no socket)"
    if address.startswith(ABSTRACT):  # nothing stale can be there
        refused = "nothing is there"
    causes = {
        errno.ENOENT: "nothing is there",
        errno.ECONNREFUSED: refused,
        errno.EPROTOTYPE: "another kind of socket is there",
    }
    what = causes.get(failed.errno or 0, failed.strerror)
    what = f"{what}; start sbusd, or give its address"
    if failed.errno == errno.EACCES:
        what = "it may not be used by this user: its server lets others in"
        what += " with -g or -o"
    error = Disconnected(f"no bus at {address}: {what}")
    error.errno = failed.errno
    return error


def inherit_socket(fd: int) -> socket.socket:
    """Return the socket with a descriptor, which the caller gives away.

    Raises: AddressError if it is none that a client can use; then the
    descriptor stays the caller's.
    """
    try:
        inherited = socket.socket(fileno=fd)
    except OSError as error:
        raise AddressError(f"descriptor {fd}: {error.strerror}") from None
    kind = (inherited.family, inherited.type)
    if kind != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        inherited.detach()
        raise AddressError(
            f"descriptor {fd}: not a Unix-domain SEQPACKET socket"
        )
    try:
        inherited.getpeername()
    except OSError as error:
        inherited.detach()
        raise AddressError(f"descriptor {fd}: {error.strerror}") from None
    inherited.setblocking(True)
    return inherited


# =============================================================================
# The client
# =============================================================================


class Kept:
    """What came while something else was waited for, the oldest first."""

    def __init__(self) -> None:
        self.items: deque[Received] = deque()
        self._bytes = 0

    def add(self, received: Received) -> None:
        """Keep something."""
        self.items.append(received)
        self._bytes += len(received.payload) + KEPT_OVERHEAD_BYTES

    def put_back(self, received: Received) -> None:
        """Keep what was taken, as the oldest."""
        self.add(received)
        self.items.rotate(1)

    def take(self, index: int = 0) -> Received:
        """Return something, and keep it no longer."""
        received = self.items[index]
        del self.items[index]
        self._bytes -= len(received.payload) + KEPT_OVERHEAD_BYTES
        return received

    def check(self) -> None:
        """Raise TooMuchKept if it is more than anybody should wait for."""
        if self._bytes > KEPT_BYTES_MAX:
            raise TooMuchKept(
                f"{len(self.items):,} messages arrived while an answer was"
                " waited for: receive them before you ask"
            )


class Client:
    """A connection to a bus.

    *address* is a path, /dev/unix/abstract/HEX or /dev/fd/N; by default it is
    SBUS_ADDRESS of the environment, or the server's own default.  *fd* is the
    descriptor of a connected socket instead; the client closes it.
    *packet_bytes_max* is the server's limit.  *server_uid* refuses a bus that
    runs as another user.  With *reconnect*, a client that loses its bus
    connects again, subscribes and sets its modes again, and says so: see
    Reconnected.

    Keys and patterns are bytes, or str that is sent as UTF-8.  *flags* are
    those of send(2) and recv(2); with MSG_DONTWAIT, BlockingIOError tells
    that the call would have to wait.  Timeouts are seconds, None for ever,
    and TimeoutError tells that one is over: here, that the server has not
    let us in.

    A client is a context manager, an iterator over what it receives, and
    has fileno() for select, poll and epoll; *socket* is there for all else.
    One thread may send while another one receives; else it is not to be used
    by two at once, and to close it wakes nobody.  After fork(2) only one of
    the processes may use it: to the server they are one client.

        with select.epoll() as epoll:
            epoll.register(bus, select.EPOLLIN)
            while epoll.poll():
                print(bus.receive())

    Once it is closed, all calls but close and fileno raise Disconnected.
    Raises: TimeoutError; AddressError; Disconnected if there is no server.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        fd: int | None = None,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        server_uid: int | None = None,
        reconnect: bool = False,
        flags: int = 0,
        timeout: float | None = None,
    ) -> None:
        if fd is not None and address is not None:
            raise AddressError("give an address or a descriptor, not both")
        if fd is not None:
            self.address = f"/dev/fd/{fd}"
        else:
            self.address = usual_address() if address is None else address
        if reconnect and self.address.startswith("/dev/fd/"):
            raise AddressError("a descriptor cannot be connected again")
        self.packet_bytes_max = packet_bytes_max
        self.server_uid = server_uid
        self.reconnect = reconnect
        # What is never received takes no memory
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._view = memoryview(mmap.mmap(-1, packet_bytes_max, flags=private))
        self._kept = Kept()
        self._questions = 0  # that wait for their answers from whoami
        self._patterns: dict[bytes, int] = {}  # and how often each
        self._modes: dict[bytes, None] = {}  # the last sent is the last
        # How it goes with reconnect: connected; then lost, until a connection
        # is open and restored, which the server may have refused soon after
        self._is_lost = False
        self._tries = 0  # to connect again, since it last went well
        self._next_try = 0.0  # by the monotonic clock
        self._restored = -math.inf  # when, by that clock
        self._refusals = 0  # in a row
        self.socket = self._open(flags, timeout)
        self._epoll = select.epoll() if reconnect else None
        if self._epoll:
            self._epoll.register(self.socket, select.EPOLLIN)

    def __repr__(self) -> str:
        state = "closed" if self.socket.fileno() < 0 else "open"
        return f"<sbus Client {self.address} {state}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Return an iterator over what is received, without an end.

        Raises, at a step: Disconnected when the server has closed;
        BlockingIOError after SO_RCVTIMEO; PacketTooLarge; PacketError.
        Spec: [CONN-14] [CONN-15].
        """
        kept, view = self._kept.items, self._view
        limit = self.packet_bytes_max
        new, flags = tuple.__new__, socket.MSG_TRUNC
        while True:
            receive_into = self.socket.recv_into
            while not kept:
                try:
                    size = receive_into(view, 0, flags)
                except (BlockingIOError, socket.timeout):
                    raise
                except OSError:
                    break
                # Most packets are messages: this is parse_packet for them
                if size > HEAD_BYTES_MAX:
                    yield self._received(size)
                    continue
                head, nul, payload = view[:size].tobytes().partition(b"\0")
                if nul and size <= limit and head[:4] == b"MSG ":
                    yield new(Message, (head[4:], payload))
                elif size:
                    yield self._received(size)
                else:
                    break
            yield self.receive()  # which also knows what errors and ends mean

    def close(self) -> None:
        """Leave the bus.  What was published is delivered [CONN-6]."""
        self.socket.close()
        if self._epoll:
            self._epoll.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 once closed.

        It is the socket's; with *reconnect* it is one that stays the same,
        and is quiet while there is no bus: see retry_in.  whoami and sync may
        keep messages that no select will tell of: call receive(0) until it
        raises TimeoutError after them.
        """
        fd = self.socket.fileno()
        return self._epoll.fileno() if self._epoll and fd >= 0 else fd

    def retry_in(self) -> float | None:
        """Return in how many seconds to call receive although nothing comes.

        That is None while there is a bus; with *reconnect*, a program waits
        no longer than this in select, poll and epoll.
        """
        if not self._is_lost:
            return None
        return max(0.0, self._next_try - time.monotonic())

    def subscribe(self, pattern: Text, flags: int = 0) -> None:
        """Subscribe to the keys that a pattern selects; duplicates count.

        Raises: Disconnected; PacketTooLarge; PacketError.
        Spec: [SUB-1] [SUB-2].
        """
        pattern = to_bytes(pattern)
        self._send(b"SUB " + pattern, flags)
        self._patterns[pattern] = self._patterns.get(pattern, 0) + 1

    def unsubscribe(self, pattern: Text, flags: int = 0) -> None:
        """Take back one subscription to an identical pattern.

        Raises: Disconnected; PacketTooLarge; PacketError.
        Spec: [UNSUB-1].
        """
        pattern = to_bytes(pattern)
        self._send(b"UNSUB " + pattern, flags)
        count = self._patterns.get(pattern, 0) - 1
        if count > 0:
            self._patterns[pattern] = count
        else:
            self._patterns.pop(pattern, None)

    def publish(
        self,
        key: Text,
        payload: Payload = b"",
        flags: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Publish a message.

        Raises: TimeoutError; Disconnected; PacketTooLarge; PacketError;
        TypeError if the payload is not bytes.
        Spec: [PUB-1].
        """
        now = flags if timeout is None else socket.MSG_DONTWAIT
        try:
            packet = publish_head(key) + payload
            if len(packet) <= self.packet_bytes_max:
                self.socket.send(packet, now)
                return
        except BlockingIOError:
            if timeout is None:
                raise
        except OSError:
            pass  # _send meets it again, and knows what to do
        except (TypeError, BufferError):
            packet = publish_head(key) + payload_bytes(payload)
        self._send(packet, flags, end_of(timeout))

    def control(
        self, key: Text, payload: Payload = b"", flags: int = 0
    ) -> None:
        """Send a control message to the server.

        Raises: Disconnected; PacketTooLarge; PacketError; TypeError if the
        payload is not bytes.
        Spec: [CTL-1].
        """
        key = to_bytes(key)
        payload = payload_bytes(payload)
        packet = b"CMSG " + key
        self._send(packet + b"\0" + payload if payload else packet, flags)
        if key == WHOAMI:
            self._questions += 1
        elif key in MODES:
            self._modes.pop(key, None)
            self._modes[key] = None

    def receive(
        self, timeout: float | None = None, flags: int = 0
    ) -> Received:
        """Return the next message or control message.

        With MSG_PEEK it stays the next.
        Raises: TimeoutError; Disconnected when all is read and the server
        has closed; PacketTooLarge if the packet is above the limit and lost;
        PacketError if it is malformed.
        Spec: [CONN-14] [CONN-15].
        """
        self._check_open()
        end = end_of(timeout)
        if not self._kept.items:
            try:
                return self._receive_new(end, flags)
            except Disconnected:
                if not self.reconnect:
                    raise
            self._connect_again(end, flags)
        peeked = flags & socket.MSG_PEEK
        return self._kept.items[0] if peeked else self._kept.take()

    def receive_where(
        self,
        wanted: Callable[[Received], bool],
        timeout: float | None = None,
    ) -> Received:
        """Return the first that is wanted; keep the others for receive.

        Raises: TimeoutError; Disconnected, also with *reconnect*, after it
        has connected again, as what was waited for is gone; PacketTooLarge;
        PacketError.
        """
        self._check_open()
        for index, received in enumerate(self._kept.items):
            if wanted(received):
                return self._kept.take(index)
        end = end_of(timeout)
        with self._told_of_loss(end):
            while True:
                received = self._receive_new(end, 0)
                if wanted(received):
                    return received
                self._kept.add(received)
                self._kept.check()

    def whoami(self, timeout: float | None = None) -> Credentials:
        """Return the credentials that the server knows this client by.

        What arrives meanwhile is kept for receive, and so are the answers
        to earlier questions, as after a TimeoutError.
        Raises: TimeoutError; Disconnected, also with *reconnect*, after it
        has connected again: nothing sent before is sure to have been handled,
        so the question must be asked again; PacketTooLarge; PacketError;
        TooMuchKept.
        Spec: [CRED-2] [CRED-12].
        """
        end = end_of(timeout)
        self._check_open()
        with self._told_of_loss(end):
            self._send_by(end, b"CMSG " + WHOAMI)
            self._questions += 1
            while True:
                received = self._receive_new(end, 0)
                if self.is_last_answer(received):
                    return parse_credentials(received.payload)
                self._kept.add(received)
                self._kept.check()

    def sync(self, timeout: float | None = None) -> None:
        """Return once the server has handled all that was sent before.

        Raises: TimeoutError; Disconnected, if the server refused it;
        PacketTooLarge; PacketError.
        Spec: [PKT-5] [CRED-3].
        """
        self.whoami(timeout)

    def request(
        self, key: Text, payload: Payload = b"", timeout: float | None = None
    ) -> bytes:
        """Ask whoever listens to a key; return the first answer's payload.

        The request's payload is the key for the answer, NUL, and *payload*.
        What else arrives meanwhile is kept for receive.
        Raises: TimeoutError, also if nobody listens; Disconnected.
        Spec: [PUB-1] [CRED-10].
        """
        end = end_of(timeout)
        content = b"\0" + payload_bytes(payload)
        with private_key(self, left_of(end)) as reply_key:
            self.publish(key, reply_key + content, timeout=left_of(end))
            return receive_under(self, reply_key, left_of(end)).payload

    def reply(self, asked: Request, payload: Payload = b"") -> None:
        """Answer what parse_request, or requests, has made of a message.

        Raises: Disconnected; PacketTooLarge; TypeError.
        Spec: [PUB-1].
        """
        self.publish(asked.reply_key, payload)

    def is_last_answer(self, received: Received) -> bool:
        """Return whether the last question has the answer just received."""
        return is_answer(received) and not self._questions

    def _open(self, flags: int, timeout: float | None = None) -> socket.socket:
        """Return a socket that is connected to the right server."""
        connected = open_socket(self.address, flags, timeout)
        if self.server_uid is not None:
            check_server(connected, self.server_uid)
        return connected

    def _connect_again(self, end: float | None, flags: int) -> None:
        """Connect, subscribe and set modes as before; keep a Reconnected.

        Until then the old socket stays, at its end: the next call that needs
        a server tries again.
        Raises: TimeoutError; BlockingIOError with MSG_DONTWAIT; Disconnected
        if a server is there that cannot be used, or does not take what is
        subscribed.
        """
        self._lose()
        while True:
            self._pause(end, flags)
            with contextlib.suppress(BlockingIOError):  # it is busy [CONN-17]
                try:
                    fresh = self._open(socket.MSG_DONTWAIT)
                    break
                except Disconnected as error:
                    if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                        raise
        self._keep_the_rest()
        self.socket.close()
        self.socket = fresh
        self._is_lost = False
        if self._epoll:
            self._epoll.register(fresh, select.EPOLLIN)
        self._questions = 0
        self._kept.add(Reconnected(b"", b""))
        self._restore()
        self._restored = time.monotonic()

    def _lose(self) -> None:
        """Note that the bus is lost, and how often so soon after a restore.

        Raises: Disconnected if it was twice in a row.
        """
        if self._is_lost:
            return
        self._is_lost = True
        if self._epoll:
            self._epoll.unregister(self.socket)
        is_soon = time.monotonic() < self._restored + REFUSED_SECONDS
        is_soon &= bool(self._patterns or self._modes)
        self._refusals = self._refusals + 1 if is_soon else 0
        if self._refusals == REFUSALS_MAX:
            self._refusals = 0
            raise Disconnected(
                f"the server at {self.address} has closed the connection each"
                " time after the same subscriptions: it refuses one of them"
            )

    @contextlib.contextmanager
    def _told_of_loss(self, end: float | None) -> Iterator[None]:
        """Connect again if the bus is lost, and say that all is to be asked.

        Raises: TimeoutError; Disconnected.
        """
        try:
            yield
        except Disconnected:
            if self.reconnect:
                self._connect_again(end, 0)
                what = "what was asked before must be asked again"
                lost = f"the bus at {self.address} was lost, and is back"
                raise Disconnected(f"{lost}: {what}") from None
            raise

    def _restore(self) -> None:
        """Subscribe and set modes as on the connection before.

        A server has some seconds to take that.  If it does not, this
        connection is given up, as the next call will find.
        """
        end = end_of(RECONNECT_SECONDS_MAX)
        try:
            for pattern, count in self._patterns.items():
                for _ in range(count):
                    self._send_by(end, b"SUB " + pattern)
            for mode in self._modes:
                self._send_by(end, b"CMSG " + mode)
        except (Disconnected, TimeoutError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _keep_the_rest(self) -> None:
        """Keep what the server sent before it closed [CONN-14]."""
        with contextlib.suppress(Disconnected, BlockingIOError):
            while True:
                with contextlib.suppress(PacketError, PacketTooLarge):
                    self._kept.add(
                        self._receive_new(None, socket.MSG_DONTWAIT)
                    )

    def _pause(self, end: float | None, flags: int) -> None:
        """Wait until it is time to try to connect, and count the try.

        Raises: TimeoutError; BlockingIOError with MSG_DONTWAIT.
        """
        now = time.monotonic()
        if now > self._next_try + RECONNECT_SECONDS_MAX:
            self._tries = 0  # the last is long ago, so it went well
        wait = max(0.0, self._next_try - now)
        if wait and flags & socket.MSG_DONTWAIT:
            raise BlockingIOError(errno.EAGAIN, "no bus yet")
        if wait and end is not None and end < now + wait:
            time.sleep(max(0.0, end - now))
            raise TimeoutError("the time is over")
        time.sleep(wait)
        delay = RECONNECT_SECONDS_MIN * 2**self._tries
        delay = min(delay, RECONNECT_SECONDS_MAX) * random.uniform(0.5, 1)
        self._next_try = time.monotonic() + delay
        self._tries = min(self._tries + 1, 16)

    def _send(
        self, packet: bytes, flags: int, end: float | None = None
    ) -> None:
        """Send a packet, over a new connection if the old one is lost.

        Raises: TimeoutError at *end*; PacketTooLarge; Disconnected.
        Spec: [LIMIT-1].
        """
        self._check_open()
        if len(packet) > self.packet_bytes_max:
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes is above the limit of"
                f" {self.packet_bytes_max} bytes"
            )
        try:
            self._send_by(end, packet, flags)
        except Disconnected:
            if not self.reconnect:
                raise
            self._connect_again(end, flags)
            self._send_by(end, packet, flags)

    def _send_fitting(self, packet: bytes, flags: int) -> None:
        """Send a packet, with a larger send buffer if it needs one.

        Raises: PacketTooLarge if the kernel has none; Disconnected.
        Spec: [CONN-16].
        """
        try:
            return self._send_once(packet, flags)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
        needed = len(packet) + SOCKET_OVERHEAD_BYTES
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, (needed + 1) // 2
        )
        try:
            self._send_once(packet, flags)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes does not fit into the"
                " kernel's largest send buffer (net.core.wmem_max)"
            ) from None

    def _send_once(self, packet: bytes, flags: int) -> None:
        """Send a packet.  Raises: OSError; Disconnected."""
        try:
            self.socket.send(packet, flags)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def _send_by(
        self, end: float | None, packet: bytes, flags: int = 0
    ) -> None:
        """Send a packet.  Raises: TimeoutError at *end*; Disconnected."""
        if end is None:
            return self._send_fitting(packet, flags)
        while True:
            try:
                return self._send_fitting(packet, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLOUT, end)

    def _receive_new(self, end: float | None, flags: int) -> Received:
        """Return the next packet from the socket."""
        while True:
            if end is not None:
                self._wait(select.POLLIN, end)
            try:
                size = self.socket.recv_into(
                    self._view, 0, flags | socket.MSG_TRUNC
                )
                return self._received(size, flags)
            except ConnectionResetError:
                continue  # [CONN-14] the last packets come next

    def _received(self, size: int, flags: int = 0) -> Received:
        """Return what a packet says that was received into the buffer.

        Raises: Disconnected if there was none; PacketTooLarge; PacketError.
        """
        if size > len(self._view):  # [CONN-15]
            raise PacketTooLarge(
                f"a packet of {size} bytes was received and lost; the"
                f" limit is {self.packet_bytes_max} bytes"
            )
        if size == 0:  # no server sends empty packets
            raise self._gone()
        received = parse_packet(self._view[:size])
        if is_answer(received) and not flags & socket.MSG_PEEK:
            self._questions = max(0, self._questions - 1)
        return received

    def _check_open(self) -> None:
        """Raise Disconnected if the client is closed."""
        if self.socket.fileno() < 0:
            raise Disconnected("this client is closed")

    def _gone(self) -> Disconnected:
        """Return the error that tells that the server has closed."""
        return Disconnected(
            f"the server at {self.address} has closed the connection: it"
            " stopped, has too many clients, or refused this user, what was"
            " sent or a reader so slow; its log says why"
        )

    def _wait(self, event: int, end: float | None) -> None:
        """Wait for an event of poll(2).  Raises: TimeoutError at *end*."""
        poll = select.poll()
        poll.register(self.socket, event)
        while True:
            left = math.inf if end is None else end - time.monotonic()
            if poll.poll(1000 * max(0.0, min(left, POLL_SECONDS_MAX))):
                return
            if left <= 0:
                raise TimeoutError("the time is over")


def is_answer(received: Received) -> bool:
    """Return whether a server's packet is the answer to whoami."""
    return isinstance(received, ControlMessage) and received.key == WHOAMI


def end_of(timeout: float | None) -> float | None:
    """Return when a timeout is over, by the monotonic clock."""
    return None if timeout is None else time.monotonic() + timeout


def left_of(end: float | None) -> float | None:
    """Return the timeout (s) that is over at *end*."""
    return None if end is None else max(0.0, end - time.monotonic())


# =============================================================================
# The client for asyncio
# =============================================================================

# Facts: a connect that does not wait fails at once where the server's queue
# of new connections is full, and no event tells when it is not: only trying
# again helps.  A packet is sent or received whole by one call that does not
# wait, so that a call that is cancelled while it waits has done nothing.

Result = TypeVar("Result")
CONNECT_SECONDS_MIN = 0.001  # between two tries; doubled up to
CONNECT_SECONDS_MAX = 0.1
CALLS_PER_TURN = 64  # that need not wait, before other tasks have a turn


class AsyncClient:
    """A connection to a bus, for asyncio.

        async with AsyncClient() as bus:
            await bus.subscribe("sensors/*/temp")
            await bus.publish("sensors/1/temp", b"21.5")
            async for message in bus:
                print(message.key, message.payload)

    It takes what Client takes, but has no flags, and connects in `async with`
    or by connect().  Its calls are those of Client and raise the same errors;
    they wait without holding up other tasks.  Several tasks may use it at
    once; each message goes to one of them.

    To cancel a call is safe: what it would have received is received by the
    next call, what it would have sent is sent whole or not at all.
    """

    # What comes is handed to those who wait: an answer to whoami to the task
    # that asked, a message under a reply key to that request, all else to the
    # first of those who receive.  The loop watches the descriptor as long as
    # anybody waits; what came beside it is kept for the next who receives.

    def __init__(
        self,
        address: str | None = None,
        *,
        fd: int | None = None,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        server_uid: int | None = None,
        reconnect: bool = False,
    ) -> None:
        self._new_client = functools.partial(
            Client,
            address,
            fd=fd,
            packet_bytes_max=packet_bytes_max,
            server_uid=server_uid,
            reconnect=reconnect,
            flags=socket.MSG_DONTWAIT,
        )
        self._client: Client | None = None
        self._kept = Kept()
        self._receivers: deque[asyncio.Future[Received]] = deque()
        self._senders: list[asyncio.Future[None]] = []
        self._answer: asyncio.Future[Received] | None = None
        self._replies: dict[bytes, asyncio.Future[Received]] = {}
        self._inbox = b""  # what begins the reply keys
        self._requests = itertools.count()
        self._calls = 0
        self._is_reading = False
        self._writing = -1  # the descriptor that is watched for room, if any

    def __repr__(self) -> str:
        inner = repr(self._client) if self._client else "not connected"
        return f"<sbus AsyncClient: {inner}>"

    async def connect(self) -> AsyncClient:
        """Connect, and return this client.

        It waits while the server's queue of new connections is full.
        Raises: AddressError; Disconnected if there is no server.
        Spec: [CONN-17].
        """
        import asyncio

        pause = CONNECT_SECONDS_MIN
        while not self._client:
            try:
                self._client = self._new_client()
            except BlockingIOError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, CONNECT_SECONDS_MAX)
        self._loop = asyncio.get_running_loop()
        self._asking = asyncio.Lock()
        self._opening = asyncio.Lock()
        return self

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncClient:
        """Return an iterator over what is received, without an end.

        Raises, at a step: Disconnected when the server has closed.
        """
        return self

    async def __anext__(self) -> Received:
        return await self.receive()

    def close(self) -> None:
        """Leave the bus.  What was published is delivered [CONN-6].

        Calls that wait raise Disconnected.
        """
        if self._client and self._client.fileno() >= 0:
            self._fail(Disconnected("this client is closed"))
            self._wake_senders()
            self._client.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 unless connected."""
        return self._client.fileno() if self._client else -1

    @property
    def socket(self) -> socket.socket:
        """The socket.  Raises: Disconnected before connect."""
        return self._connected().socket

    async def subscribe(self, pattern: Text) -> None:
        """As Client.subscribe [SUB-1] [SUB-2]."""
        await self._send(self._connected().subscribe, pattern)

    async def unsubscribe(self, pattern: Text) -> None:
        """As Client.unsubscribe [UNSUB-1]."""
        await self._send(self._connected().unsubscribe, pattern)

    async def publish(self, key: Text, payload: Payload = b"") -> None:
        """As Client.publish, once the kernel has room for it [PUB-1]."""
        await self._send(self._connected().publish, key, payload)

    async def control(self, key: Text, payload: Payload = b"") -> None:
        """As Client.control [CTL-1]."""
        await self._send(self._connected().control, key, payload)

    async def reply(self, asked: Request, payload: Payload = b"") -> None:
        """As Client.reply [PUB-1]."""
        await self.publish(asked.reply_key, payload)

    async def receive(self, timeout: float | None = None) -> Received:
        """As Client.receive [CONN-14] [CONN-15]."""
        client = self._connected()
        await self._take_turn()
        while not self._kept.items:
            try:
                received = client.receive(flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return await self._receive_later(end_of(timeout))
            if type(received) is Message and not self._inbox:
                return received
            self._hand_over(received)
        return self._kept.take()

    async def whoami(self, timeout: float | None = None) -> Credentials:
        """As Client.whoami; tasks that ask at once are served in turn.

        Spec: [CRED-2] [CRED-12].
        """
        end, client = end_of(timeout), self._connected()
        async with self._asking:
            await self._send(client.control, WHOAMI, end=end)
            self._answer = self._loop.create_future()
            try:
                received = await self._wait(self._answer, end)
            finally:
                self._answer = None
        return parse_credentials(received.payload)

    async def sync(self, timeout: float | None = None) -> None:
        """As Client.sync [PKT-5] [CRED-3]."""
        await self.whoami(timeout)

    async def request(
        self, key: Text, payload: Payload = b"", timeout: float | None = None
    ) -> bytes:
        """As Client.request; any number may wait for their answers at once.

        The client stays subscribed to the keys of its answers, and drops
        those that come too late.
        """
        end = end_of(timeout)
        await self._open_inbox(end)
        reply_key = self._inbox + b"%d" % next(self._requests)
        waiting: asyncio.Future[Received] = self._loop.create_future()
        self._replies[reply_key] = waiting
        content = reply_key + b"\0" + payload_bytes(payload)
        try:
            await self._send(self._connected().publish, key, content, end=end)
            return (await self._wait(waiting, end)).payload
        finally:
            del self._replies[reply_key]

    async def _open_inbox(self, end: float | None) -> None:
        """Subscribe to the keys of answers, unless that is done."""
        async with self._opening:
            if not self._inbox:
                path = (await self.whoami(left_of(end))).path
                inbox = path + b"/" + random_text() + b"/"
                await self.subscribe(inbox)
                self._inbox = inbox

    async def _take_turn(self) -> None:
        """Let other tasks run now and then."""
        self._calls += 1
        if self._calls % CALLS_PER_TURN == 0:
            import asyncio

            await asyncio.sleep(0)

    async def _send(
        self,
        call: Callable[..., None],
        *content: object,
        end: float | None = None,
    ) -> None:
        """Call what sends, once the kernel has room."""
        await self._take_turn()
        while True:
            try:
                return call(*content, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._wait_to_send(end)

    async def _wait_to_send(self, end: float | None) -> None:
        """Wait for room, or for when to connect again.

        Raises: TimeoutError at *end*.
        """
        client, waiting = self._connected(), self._loop.create_future()
        seconds = client.retry_in()
        if seconds is not None:
            self._loop.call_later(seconds, self._wake_senders)
        elif self._writing < 0:
            self._writing = client.socket.fileno()
            self._loop.add_writer(self._writing, self._wake_senders)
        self._senders.append(waiting)
        try:
            await self._wait(waiting, end)
        finally:
            if waiting in self._senders:
                self._senders.remove(waiting)
                if not self._senders:
                    self._wake_senders()

    def _wake_senders(self) -> None:
        """Let all who wait to send try again."""
        if self._writing >= 0:  # the socket may be another one by now
            self._loop.remove_writer(self._writing)
            self._writing = -1
        for waiting in self._senders:
            if not waiting.done():
                waiting.set_result(None)
        self._senders.clear()

    async def _receive_later(self, end: float | None) -> Received:
        """Wait for what comes next; if cancelled, leave it to others."""
        import asyncio

        waiting = self._loop.create_future()
        self._receivers.append(waiting)
        try:
            return await self._wait(waiting, end)
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._put_back(waiting)
            raise
        finally:
            waiting.cancel()

    def _put_back(self, received: asyncio.Future[Received]) -> None:
        """Hand to others what came for a task that does not want it."""
        if not received.exception():
            self._kept.put_back(received.result())
        while self._receivers and self._kept.items:
            self._give_to_receiver(self._kept.take())

    async def _wait(
        self, waiting: asyncio.Future[Result], end: float | None
    ) -> Result:
        """Return what is handed over.  Raises: TimeoutError at *end*."""
        import asyncio

        self._watch()
        try:
            await asyncio.wait([waiting], timeout=left_of(end))
        finally:
            if not waiting.done():
                waiting.cancel()
            self._watch()
        if waiting.cancelled():
            raise TimeoutError("the time is over")
        return waiting.result()

    def _is_awaited(self) -> bool:
        """Return whether anybody waits for what comes."""
        while self._receivers and self._receivers[0].done():
            self._receivers.popleft()
        answer = self._answer and not self._answer.done()
        return bool(answer or self._receivers) or any(
            not reply.done() for reply in self._replies.values()
        )

    def _watch(self) -> None:
        """Have the loop watch the descriptor if anybody waits for it."""
        fd = self.fileno()
        is_awaited = fd >= 0 and self._is_awaited()
        if is_awaited and not self._is_reading:
            self._loop.add_reader(fd, self._read)
        elif self._is_reading and not is_awaited and fd >= 0:
            self._loop.remove_reader(fd)
        self._is_reading = is_awaited

    def _read(self) -> None:
        """Hand over what there is, as long as anybody waits for it."""
        client = self._connected()
        try:
            for _ in range(CALLS_PER_TURN):
                if not self._is_awaited():
                    break
                self._hand_over(client.receive(flags=socket.MSG_DONTWAIT))
        except BlockingIOError:
            seconds = client.retry_in()
            if seconds is not None:
                self._loop.call_later(seconds, self._read)
        except Disconnected as error:
            self._fail(error)
        except (PacketError, PacketTooLarge) as error:
            if self._receivers:
                self._receivers.popleft().set_exception(error)
            else:
                self._fail_questions(error)
        self._watch()

    def _hand_over(self, received: Received) -> None:
        """Give something to the task that it is for, or keep it."""
        if isinstance(received, Reconnected):
            self._fail_questions(Disconnected("the bus was lost: ask again"))
            self._wake_senders()
        elif isinstance(received, Message):
            reply = self._replies.get(received.key)
            if reply and not reply.done():
                return reply.set_result(received)
            if self._inbox and received.key.startswith(self._inbox):
                return None  # too late
        elif self._answer and isinstance(received, ControlMessage):
            is_ours = self._connected().is_last_answer(received)
            if is_ours and not self._answer.done():
                return self._answer.set_result(received)
        self._give_to_receiver(received)
        return None

    def _give_to_receiver(self, received: Received) -> None:
        """Give something to the first task that receives, or keep it."""
        while self._receivers:
            waiting = self._receivers.popleft()
            if not waiting.done():
                return waiting.set_result(received)
        self._kept.add(received)
        try:
            self._kept.check()
        except TooMuchKept as error:
            self._fail_questions(error)

    def _fail_questions(self, error: SbusError) -> None:
        """Tell those who wait for answers that none will come."""
        answers = [self._answer] if self._answer else []
        for waiting in (*answers, *self._replies.values()):
            if not waiting.done():
                waiting.set_exception(type(error)(*error.args))

    def _fail(self, error: Disconnected) -> None:
        """Tell all who wait for what comes that nothing will."""
        self._fail_questions(error)
        for waiting in self._receivers:
            if not waiting.done():
                waiting.set_exception(Disconnected(*error.args))
        self._receivers.clear()
        self._watch()

    def _connected(self) -> Client:
        """Return the client inside.  Raises: Disconnected if there is none."""
        if not self._client:
            raise Disconnected("not connected: use async with, or connect()")
        return self._client


# =============================================================================
# What the protocol leaves to applications
# =============================================================================

# Facts: only a client with the credentials C reads the keys that begin with
# C and '/' [CRED-10] [CRED-11], but anybody may publish under them.  So an
# answer under such a key shows nothing of who sent it, and a random text that
# was sent under such a key and comes back shows that its reader is C.

TOKEN_BYTES = 16


class Request(NamedTuple):
    """What is asked: its key, its payload, and the key for the answer."""

    key: bytes
    payload: bytes
    reply_key: bytes


def random_text() -> bytes:
    """Return what nobody can guess."""
    return os.urandom(TOKEN_BYTES).hex().encode("ascii")


@contextlib.contextmanager
def private_key(client: Client, timeout: float | None) -> Iterator[bytes]:
    """Subscribe for a while to a new key that only this client can read.

    The server has handled all before, so that what is sent under *key* has
    room at once.
    Raises: TimeoutError; Disconnected.
    Spec: [CRED-4] [CRED-10] [CRED-12].
    """
    path = client.whoami(timeout).path
    key = path + b"/" + random_text()
    try:
        client.subscribe(key)
        yield key
    finally:
        with contextlib.suppress(Disconnected, BlockingIOError):
            client.unsubscribe(key, socket.MSG_DONTWAIT)


def receive_under(
    client: Client, key: bytes, timeout: float | None
) -> Received:
    """Return the next message under a key; keep the others for receive."""
    return client.receive_where(
        lambda received: isinstance(received, Message) and received.key == key,
        timeout,
    )


def parse_request(message: Received) -> Request:
    """Return what a message asks for.

    Raises: PacketError if it is no request, or wants its answer elsewhere
    than under a secret key: anybody may publish such.
    Spec: [CRED-10].
    """
    reply_key, nul, payload = message.payload.partition(b"\0")
    if not nul:
        raise PacketError("the message is no request: it has no reply key")
    owner_of(reply_key)
    return Request(message.key, payload, reply_key)


def requests(received: Iterable[Received]) -> Iterator[Request]:
    """Yield what messages ask for, and leave out those that are no requests.

        for asked in requests(bus):
            bus.reply(asked, b"answer")

    Raises: as the iteration over the messages.
    """
    for message in received:
        with contextlib.suppress(PacketError):
            yield parse_request(message)


def owner_of(key: bytes) -> Credentials:
    """Return the credentials of those who can read a private key.

    Raises: PacketError if it is none.
    Spec: [CRED-10] [CRED-11].
    """
    path = re.match(rb"(?:!/cred/[0-9]+/[0-9]+/[0-9]+/)+(?!$)", key)
    if not path:
        raise PacketError(f"not a private key: {key[:80]!r}")
    return parse_credentials(path[0][:-1])


# =============================================================================
# The command line: input and output
# =============================================================================

CLEAR_LINE = "\x1b[K"  # from the cursor to the end of the line
KEY_COLOUR, TIME_COLOUR, NO_COLOUR = "\x1b[36m", "\x1b[2m", "\x1b[m"
ANSWER_SECONDS = 10.0  # in which a server is to answer
PUBLISH_SECONDS = 60.0  # in which the bus is to take a message


class UsageError(SbusError):
    """A command line is wrong: the exit status is 2."""


def note(text: str) -> None:
    """Print a line to standard error."""
    print(f"sbus: {text}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a standard stream is there and is a terminal."""
    return stream is not None and stream.isatty()


def printable(text: bytes, encoding: str) -> str:
    """Return bytes as text for a terminal with an encoding.

    What is no UTF-8, or cannot be printed, is escaped as in a bytes literal.
    """
    decoded = text.decode("utf-8", "surrogateescape")
    is_encodable = encoding == "utf-8" or decoded.isascii()
    if is_encodable and decoded.isprintable() and "\\" not in decoded:
        return decoded  # as most are, and quickly
    return "".join(
        char
        if char.isprintable()
        and char != "\\"
        and char.encode(encoding, "ignore")
        else repr(char.encode("utf-8", "surrogateescape"))[2:-1]
        for char in decoded
    )


def standard_output() -> TextIO:
    """Return standard output.  Raises: SbusError if it is closed."""
    if sys.stdout is None:
        raise SbusError("standard output is closed")
    return sys.stdout


def write(text: bytes, at_once: bool = True) -> None:
    """Write to standard output.

    Raises: BrokenPipeError if nobody reads it; SbusError.
    """
    output = standard_output()
    try:
        output.buffer.write(text)
        if at_once:
            output.buffer.flush()
    except OSError as error:
        # Python writes at exit what is left, and would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise SbusError(f"standard output: {error.strerror}") from None


def write_line(*fields: bytes) -> None:
    """Print a line at once, with tabs between its printable fields."""
    encoding = standard_output().encoding
    line = "\t".join(printable(field, encoding) for field in fields)
    write(f"{line}\n".encode(encoding))


@contextlib.contextmanager
def standard_input() -> Iterator[BinaryIO]:
    """Give standard input to read.  Raises: SbusError if that fails."""
    if sys.stdin is None:
        raise SbusError("standard input is closed")
    try:
        yield sys.stdin.buffer
    except OSError as error:
        raise SbusError(f"standard input: {error.strerror}") from None


def payload_room(bus: Client, word: bytes, key: bytes) -> int:
    """Return how many bytes of payload a packet has room for."""
    return bus.packet_bytes_max - len(word + b" " + key + b"\0")


def check_room(payload: bytes, what: str, room: int) -> None:
    """Raise PacketTooLarge if a payload that was read does not fit."""
    if len(payload) > room:
        raise PacketTooLarge(
            f"{what} holds more than the {room} bytes that fit with this key"
        )


def given_payload(payload: str | None, room: int) -> bytes:
    """Return the payload that an argument gives, or standard input.

    Raises: SbusError; PacketTooLarge.
    """
    if payload not in (None, "-"):
        return os.fsencode(payload)
    with standard_input() as file:
        text = file.read(room + 1)
    check_room(text, "standard input", room)
    return text


def input_lines(room: int) -> Iterator[bytes]:
    """Yield each line of standard input, without its line feed.

    Raises: SbusError; PacketTooLarge.
    """
    with standard_input() as file:
        lines = iter(functools.partial(file.readline, room + 2), b"")
        for number, line in enumerate(lines, 1):
            text = line[:-1] if line.endswith(b"\n") else line
            check_room(text, f"line {number} of standard input", room)
            yield text


# =============================================================================
# The command line: options
# =============================================================================

Options = argparse.Namespace
Argument = tuple[tuple[str, ...], dict[str, Any]]  # what add_argument takes

MAIN_HELP = """
exit status: 0, or 1 for an error of the bus, 2 for a wrong command line,
130 if interrupted.  SBUS_ADDRESS in the environment stands for -a, and
SBUS_MAX_PACKET is the largest packet (409600).

example:
  sbus sub 'sensors/*/temp' & sbus pub sensors/1/temp 21.5
"""


class Command(NamedTuple):
    """What a command does, and what its help says."""

    run: Callable[[Options], None]
    short: str
    about: str
    example: str
    arguments: tuple[Argument, ...]
    has_address: bool = True  # one, by -a


def command(
    short: str, example: str, *arguments: Argument, has_address: bool = True
) -> Callable[[Callable[[Options], None]], Command]:
    """Return what makes a command of a function, whose docstring is help."""

    def make(run: Callable[[Options], None]) -> Command:
        about = (run.__doc__ or "").replace("\n    ", "\n")
        return Command(run, short, about, example, arguments, has_address)

    return make


def count_of(text: str) -> int:
    """Return a count.  Raises: ArgumentTypeError."""
    if re.fullmatch("0*[1-9][0-9]{0,17}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")


def amount_of(text: str) -> float:
    """Return a positive number.  Raises: ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 1e-6 <= float(text) <= 1e9:
            return float(text)
    what = f"{text!r} is not a number from 0.000001 to 1000000000"
    raise argparse.ArgumentTypeError(what)


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, or an option."""
    return names, options


def flag(name: str, help: str) -> Argument:
    """Return an option that is there or not."""
    return argument(name, action="store_true", help=help)


def number(name: str, help: str, **options: Any) -> Argument:
    """Return an option with a count from 1."""
    return argument(name, metavar="N", type=count_of, help=help, **options)


def amount(name: str, metavar: str, help: str, **options: Any) -> Argument:
    """Return an option with a positive number."""
    options.update(metavar=metavar, type=amount_of, help=help)
    return argument(name, **options)


def timeout(
    seconds: float = ANSWER_SECONDS, what: str = "for an answer"
) -> Argument:
    """Return the option for how long to wait for the server."""
    help = f"wait up to S seconds {what} ({seconds:g})"
    return amount("--timeout", "S", help, default=seconds)


def form(name: str, form: Callable[..., bytes], help: str) -> Argument:
    """Return an option that chooses how messages are printed."""
    choice = {"action": "store_const", "const": form, "default": as_text}
    return argument(name, dest="form", help=help, **choice)


def key_argument(help: str, **options: Any) -> Argument:
    """Return the argument for a key."""
    return argument("key", metavar="KEY", help=help, **options)


def payload_argument(help: str = "'-' is standard input") -> Argument:
    """Return the argument for a payload that may be missing."""
    return argument("payload", metavar="PAYLOAD", nargs="?", help=help)


KEY_HELP = "the routing key that subscribers' patterns select, such as a/b"
PAYLOAD_HELP = (
    "'-' or no PAYLOAD is standard input as it is, a final line feed"
    " included; write -- before a PAYLOAD that begins with '-'"
)
LINES = flag(
    "--lines", "publish each line of standard input, without its line feed"
)
PATTERNS = argument(
    "pattern",
    metavar="PATTERN",
    nargs="*",
    help="the keys to choose, where '*' is what stands between two '/' and a"
    " '/' at the end is all below: 'a/*' selects a/b but not a/b/c, 'a/'"
    " selects both, none at all selects all but secrets; quote it",
)
ADDRESS = argument(
    "-a",
    "--address",
    default=argparse.SUPPRESS,  # or a command's would undo ours
    help="the bus: a path, /dev/unix/abstract/HEX or /dev/fd/N",
)


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2.

    Its help is output like any other: what fails is told.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus: {message}; --help lists the options\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            write(message.encode(standard_output().encoding))
        else:
            super()._print_message(message, file)


class MainParser(OptionParser):
    """Parses what is before a command, and the command as a list of words."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        super().__init__(
            prog="sbus",
            description="Use a message bus.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.commands = commands
        what = f"sbus {__version__}"
        self.add_argument("--version", action="version", version=what)
        self.add_argument(*ADDRESS[0], **ADDRESS[1])
        self.add_argument(
            "command",
            metavar="COMMAND",
            nargs=argparse.PARSER,
            choices=commands,
            help="and its arguments: sbus COMMAND --help tells of them",
        )

    def format_help(self) -> str:
        """Return the help, for which all commands are looked at."""
        names = "".join(
            f"    {name:<12}{command.short}\n"
            for name, command in self.commands.items()
        )
        self.epilog = f"commands:\n{names}{MAIN_HELP}"
        return super().format_help()


def command_parser(name: str, command: Command) -> OptionParser:
    """Return the parser of what follows the name of a command."""
    parser = OptionParser(
        prog=f"sbus {name}",
        description=command.about,
        epilog=f"example:\n  sbus {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=command.run, has_address=command.has_address)
    address = (ADDRESS,) if command.has_address else ()
    for names, options in (*address, *command.arguments):
        parser.add_argument(*names, **options)
    return parser


# =============================================================================
# The command line: commands
# =============================================================================


class LenientClient(Client):
    """A client for commands: what is too large for it is left out, and said.

    SBUS_MAX_PACKET in the environment is the limit.
    """

    left_out = 0

    def __init__(
        self, address: str | None, timeout: float | None = None
    ) -> None:
        limit = os.environ.get("SBUS_MAX_PACKET") or str(PACKET_BYTES_MAX)
        if not re.fullmatch("[1-9][0-9]{0,9}", limit):
            raise UsageError(f"SBUS_MAX_PACKET is {limit!r}, and no number")
        super().__init__(address, packet_bytes_max=int(limit), timeout=timeout)

    def close(self) -> None:
        if self.left_out > 1:
            note(f"{self.left_out:,} messages were too large")
        self.left_out = 0
        super().close()

    def _receive_new(self, end: float | None, flags: int) -> Received:
        while True:
            try:
                return super()._receive_new(end, flags)
            except PacketTooLarge as error:
                if not self.left_out:
                    note(f"{error}; SBUS_MAX_PACKET raises it")
                self.left_out += 1


def open_bus(options: Options, timeout: float | None = None) -> Client:
    """Return a client of the bus that -a or the environment names.

    Raises: TimeoutError; AddressError; UsageError; Disconnected if there is
    no server.
    """
    return LenientClient(getattr(options, "address", None), timeout)


def subscribe(bus: Client, patterns: Sequence[str]) -> None:
    """Subscribe to patterns as the shell gave them, or to all keys."""
    for pattern in patterns or [""]:
        bus.subscribe(os.fsencode(pattern))


def messages(
    bus: Client,
    count: int | None,
    seconds: float | None,
    excluded: Sequence[bytes] = (),
) -> Iterator[Message]:
    """Yield what is published: so many messages, or for so long.

    What an excluded pattern selects is left out and does not count.
    What was written meanwhile is printed before it waits for more.
    Raises: SbusError if the time is over before the count is reached.
    """
    end = None if seconds is None else time.monotonic() + seconds
    heard = 0
    while count is None or heard < count:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            if count is None:
                return
            raise SbusError(f"the time is over: heard {heard} of {count}")
        try:
            received = bus.receive(flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            wait_to_print(bus, left)
            continue
        if isinstance(received, Message) and not any(
            matches(pattern, received.key) for pattern in excluded
        ):
            heard += 1
            yield received


def wait_to_print(bus: Client, seconds: float | None) -> None:
    """Wait until a message comes, for so long, and print what is written.

    Raises: BrokenPipeError if nobody reads standard output; SbusError.
    """
    write(b"")
    poll = select.poll()
    poll.register(bus, select.POLLIN)
    poll.register(standard_output(), 0)  # tells when its reader has gone
    left = POLL_SECONDS_MAX if seconds is None else max(0.0, seconds)
    ready = dict(poll.poll(1000 * min(left, POLL_SECONDS_MAX)))
    if ready and bus.fileno() not in ready:
        raise BrokenPipeError


class Style(NamedTuple):
    """How text is printed."""

    encoding: str
    is_coloured: bool


def style_of(output: TextIO) -> Style:
    """Return how text is printed there: in colour on most terminals."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Style(output.encoding, is_terminal(output) and not is_plain)


def as_text(message: Message, when: int | None, style: Style) -> bytes:
    """Return a message as a line; *when* is in nanoseconds since 1970."""
    key, payload = (printable(text, style.encoding) for text in message)
    stamp = "" if when is None else local_time(when)
    if style.is_coloured:
        key = f"{KEY_COLOUR}{key}{NO_COLOUR}"
        stamp = stamp and f"{TIME_COLOUR}{stamp}{NO_COLOUR}"
    line = f"{stamp}\t" if stamp else ""
    return f"{line}{key}\t{payload}\n".encode(style.encoding)


def local_time(when: int) -> str:
    """Return a time with its zone, as ISO 8601 has it."""

    moment = datetime.datetime.fromtimestamp(when / 1e9).astimezone()
    return moment.isoformat(timespec="microseconds")


def as_payload(message: Message, _: int | None, __: Style) -> bytes:
    """Return a payload as it is."""
    return message.payload


@command(
    "print messages",
    "sub 'sensors/*/temp'",
    PATTERNS,
    form("--raw", as_payload, "print the payloads alone, as they are"),
    flag("--time", "print first when it came"),
    argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        type=os.fsencode,
        default=[],
        help="leave out the keys that it selects; may be repeated",
    ),
    flag(
        "--discard",
        "miss messages rather than slow their publishers down, and say how"
        " many in the end",
    ),
    argument(
        "--ready-fd",
        metavar="FD",
        type=int,
        help="write a line there once it is subscribed, and close it",
    ),
    number("--count", "end after N messages"),
    amount("--timeout", "S", "end after S seconds"),
)
def sub(options: Options) -> None:
    r"""Print what is published, a line each: its key, a tab, its payload.

    Bytes that are no printable text are escaped as in a Python bytes literal:
    a line feed is \n, a backslash \\.  With --count and --timeout, the exit
    status is 1 if the time is over before the count is reached.
    """
    if options.time and options.form is as_payload:
        raise UsageError("--raw has no place for --time")
    form, style = options.form, style_of(standard_output())
    wanted = (options.count, options.timeout, options.exclude)
    with open_bus(options) as bus:
        if options.discard:
            bus.control("blocking/soft/discard")
        subscribe(bus, options.pattern)
        if options.ready_fd is not None:
            bus.sync()
            tell_ready(options.ready_fd)
        try:
            for message in messages(bus, *wanted):
                when = time.time_ns() if options.time else None
                write(form(message, when, style), at_once=False)
        finally:
            write(b"")
            if options.discard:
                note_missed(bus)


def tell_ready(descriptor: int) -> None:
    """Write a line to a descriptor and close it.  Raises: SbusError."""
    try:
        os.write(descriptor, b"ready\n")
        os.close(descriptor)
    except OSError as error:
        what = f"--ready-fd {descriptor}: {error.strerror}"
        raise SbusError(what) from None


def note_missed(bus: Client) -> None:
    """Say how many messages were discarded, if any and if the server knows.

    Spec: [CTL-5].
    """

    errors = (SbusError, TimeoutError, ValueError, LookupError)
    with contextlib.suppress(*errors):
        missed = json.loads(ask(bus, STATS, ANSWER_SECONDS))["discarded"]
        if missed:
            note(f"{missed:,} messages were missed")


@command(
    "publish messages",
    "pub sensors/1/temp 21.5",
    key_argument(KEY_HELP),
    payload_argument(PAYLOAD_HELP),
    LINES,
    timeout(PUBLISH_SECONDS, "that the bus takes a message"),
)
def pub(options: Options) -> None:
    """Publish, and wait until the server has handled it."""
    if options.lines and options.payload is not None:
        raise UsageError("--lines takes no PAYLOAD")
    key = os.fsencode(options.key)
    with open_bus(options, options.timeout) as bus:
        room = payload_room(bus, b"MSG", key)
        if options.lines:
            payloads = input_lines(room)
        else:
            payloads = iter([given_payload(options.payload, room)])
        for payload in payloads:
            bus.publish(key, payload, timeout=options.timeout)
        bus.sync(options.timeout)


@command("print your credentials", "whoami", timeout())
def whoami(options: Options) -> None:
    """Print the credentials by which the server knows this client.

    They are as in !/cred/GID/UID/PID: what begins so and goes on with '/' is
    a private key.
    """
    with open_bus(options, options.timeout) as bus:
        write_line(bus.whoami(options.timeout).path)


@command(
    "send a control message",
    "control '!/cred/whoami'",
    key_argument("such as '!/cred/whoami'"),
    payload_argument(),
    timeout(),
)
def control(options: Options) -> None:
    """Send a control message to the server, and wait until it is handled.

    Print the answer, if there is one: its key, a tab, its payload.
    """
    key = os.fsencode(options.key)
    with open_bus(options, options.timeout) as bus:
        bus.control(key, question(options, bus, b"CMSG", key))
        bus.sync(options.timeout)
        is_known = key in {WHOAMI, STATS, *MODES}
        with contextlib.suppress(TimeoutError):
            while True:
                write_line(*bus.receive(0))
                is_known = True
    if not is_known:
        what = f"the server does not answer {options.key!r}"
        raise SbusError(f"{what}, and this client does not know it")


def question(options: Options, bus: Client, word: bytes, key: bytes) -> bytes:
    """Return the payload of what is asked, which may be empty.

    Raises: SbusError; PacketTooLarge.
    """
    if options.payload is None:
        return b""
    return given_payload(options.payload, payload_room(bus, word, key))


@command(
    "measure how fast the server answers",
    "ping --count 100",
    number("--count", "ask N times (1000)", default=1000),
    timeout(),
)
def ping(options: Options) -> None:
    """Print how long the server takes to answer a question.

    These are the shortest time, the median, the time that 99 of 100 do not
    pass, and the longest.
    """
    with open_bus(options, options.timeout) as bus:
        times = sorted(
            round_trip(bus, options.timeout) for _ in range(options.count)
        )
        parts = {"minimum": 0, "median": 0.5, "p99": 0.99, "maximum": 1}
        figures = ", ".join(
            f"{name} {1000 * quantile(times, part):.3f} ms"
            for name, part in parts.items()
        )
        trips = "round trip" if len(times) == 1 else "round trips"
        line = f"{bus.address}: {len(times)} {trips}: {figures}"
        write_line(os.fsencode(line))


def round_trip(bus: Client, seconds: float) -> float:
    """Return how many seconds the server takes to answer.

    Raises: TimeoutError if it does not answer in time.
    """
    start = time.perf_counter()
    bus.sync(seconds)
    return time.perf_counter() - start


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least of some values that so large a part does not pass."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


STATS_COLUMNS = {  # a heading, and the server's name for what is below
    "CLIENTS": "clients",
    "PATTERNS": "patterns",
    "PUBLISHED": "published",
    "DELIVERED": "delivered",
    "REFUSED": "refused",
    "DISCARDED": "discarded",
    "PAUSED": "paused",
    "BACKLOG": "backlog_bytes",
}


@command(
    "print what the server has counted",
    "stats --json",
    flag("--json", "print the server's answer, a JSON object"),
    timeout(),
)
def stats(options: Options) -> None:
    """Print what the server has counted for this client.

    Root and the bus owner are told of the clients of each user, since the
    first of those that are connected came.  REFUSED packets are those that
    the kernel did not take at first, because their receiver was slow,
    DISCARDED those that a receiver never got, PAUSED is how often a publisher
    had to wait, BACKLOG what the server holds for receivers, in bytes.
    """
    with open_bus(options, options.timeout) as bus:
        answer = ask(bus, STATS, options.timeout)
    if options.json:
        write(answer + b"\n")
        return
    for line in stats_lines(parse_stats(answer)):
        write_line(line.encode("utf-8"))


def ask(bus: Client, key: bytes, timeout: float) -> bytes:
    """Return the payload of the server's answer to a control message.

    Raises: SbusError if it gives none; TimeoutError.
    Spec: [CTL-2].
    """

    def is_wanted(received: Received) -> bool:
        return isinstance(received, ControlMessage) and received.key == key

    bus.control(key)
    bus.sync(timeout)
    try:
        return bus.receive_where(is_wanted, 0).payload
    except TimeoutError:
        what = f"the server at {bus.address} does not answer"
        raise SbusError(f"{what} {key.decode('latin-1')!r}") from None


def parse_stats(answer: bytes) -> dict[str, list[int | None]]:
    """Return what a server has counted: for us, and for users by their ids.

    The values are in the order of STATS_COLUMNS; what it does not say is None.
    Raises: PacketError if the answer is malformed.
    Spec: [CTL-5].
    """

    try:
        own = json.loads(answer)
        counts = {f"client {own['client']}": own, **own.get("users", {})}
        return {
            name: [
                None if (n := each.get(column)) is None else int(n)
                for column in STATS_COLUMNS.values()
            ]
            for name, each in counts.items()
        }
    except (ValueError, TypeError, LookupError, AttributeError):
        what = f"the server sent malformed stats: {answer[:80]!r}"
        raise PacketError(what) from None


def stats_lines(counts: Mapping[str, Sequence[int | None]]) -> list[str]:
    """Return a table of what a server has counted."""
    rows = [["", *STATS_COLUMNS]]
    for name, each in counts.items():
        title = name if name.startswith("client") else f"user {name}"
        rows.append([title, *("" if n is None else f"{n:,}" for n in each)])
    width, *widths = (max(map(len, column)) for column in zip(*rows))
    return [
        " ".join([row[0].ljust(width), *map(str.rjust, row[1:], widths)])
        for row in rows
    ]


COMMANDS: Mapping[str, Command] = {
    "sub": sub,
    "pub": pub,
    "whoami": whoami,
    "ping": ping,
    "control": control,
    "stats": stats,
}


def main(
    arguments: Sequence[str] | None = None,
    commands: Mapping[str, Command] = COMMANDS,
) -> int:
    """Run the command line; return the exit status.

    0 is success, 1 an error of the bus, 2 of usage, 130 an interruption.
    """
    parser, options = MainParser(commands), Options()
    try:
        parser.parse_args(arguments, options)
        name, *rest = options.command
        command_parser(name, commands[name]).parse_args(rest, options)
        options.run(options)
    except BrokenPipeError:  # whoever read our output has had enough
        return 1
    except UsageError as error:
        parser.error(str(error))
    except Disconnected as error:
        elsewhere = error.errno not in (None, errno.EACCES)
        note(f"{error}{' with -a' * (elsewhere and options.has_address)}")
        return 1
    except TimeoutError as error:
        note(f"{error}: the server hangs, is stopped, or makes us wait")
        return 1
    except (SbusError, OSError) as error:
        note(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
