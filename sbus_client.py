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

This file needs CPython 3.9 or later on Linux and nothing else, not even the
server's file: copy it.  The command `sbus` has more; it is in tools/.  An id
in brackets, as in [CLIENT-6], names a rule of the specification in spec/.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import mmap
import os
import random
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, cast

__version__ = "0.3.0"
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
    "default_address",
    "owner_of",
    "parse_request",
]


# =============================================================================
# Errors
# =============================================================================


class SbusError(Exception):
    """The base of all errors that this file raises on purpose."""


class AddressError(SbusError, ValueError):
    """An address is malformed."""


class Disconnected(SbusError, ConnectionError):
    """There is no server (*errno* is that of connect(2)), or it has left."""


class PacketTooLarge(SbusError, ValueError):
    """A packet does not fit: nothing was sent, or a received one is lost."""


class PacketError(SbusError, ValueError):
    """A server would refuse a key or pattern, or sent a malformed packet."""


def malformed(what: str, text: bytes) -> PacketError:
    """Return the error that shows what a server has sent."""
    return PacketError(f"the server sent {what}: {text[:80]!r}")


# =============================================================================
# Packets
# =============================================================================

PACKET_BYTES_MAX = 409_600
KEY_BYTES_MAX = 4_096
SEGMENTS_MAX = 64
HEADS_MAX = 1_024  # remembered
HEAD_BYTES_MAX = 256  # of those
WHOAMI = b"!/cred/whoami"
STATS = b"stats"
MODES = (b"blocking/", b"order/", b"echo/")
SECRET = b"!/cred/"
FIELDS = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")
SECRETS = re.compile(rb"(?:^|(?<=/))" + FIELDS.pattern)


class Message(NamedTuple):
    """What a client published: a routing key and a payload."""

    key: bytes
    payload: bytes


class ControlMessage(NamedTuple):
    """A packet of the server itself: a routing key and a payload."""

    key: bytes
    payload: bytes


class Reconnected(ControlMessage):
    """A notice of the client itself: after it had no bus, one has answered.

    Its subscriptions and modes are in force.  It has missed what others
    published meanwhile; what it sent last may be lost.  The fields are empty.
    """

    __slots__ = ()


Received = Union[Message, ControlMessage]
Text = Union[str, bytes]
Payload = Union[bytes, bytearray, memoryview]
new_tuple = tuple.__new__  # makes a Message in half the time of its own call


def to_bytes(text: Text) -> bytes:
    """Return a key or pattern as bytes: UTF-8 unless it is bytes already.

    Raises: TypeError; PacketError if it holds a NUL byte [KEY-1].
    """
    if isinstance(text, str):
        text = text.encode()
    elif not isinstance(text, bytes):
        what = f"a key or pattern is str or bytes, not {type(text).__name__}"
        raise TypeError(what)
    if b"\0" in text:
        raise PacketError(f"{text!r}: a key cannot hold a NUL byte")
    return text


def payload_bytes(payload: Payload) -> bytes:
    """Return a payload as bytes.  Raises: TypeError if it has none."""
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        what = f"a payload is bytes, not {kind}: encode it"
        raise TypeError(what) from None


def control_packet(key: Text, payload: Payload) -> bytes:
    """Return a control packet [CTL-1].  Raises: TypeError; PacketError."""
    content = payload_bytes(payload)
    return b"CMSG " + to_bytes(key) + (b"\0" + content if content else b"")


def parse_head(head: bytes) -> tuple[type[Received], bytes]:
    """Return what kind of packet begins so, and its key [CLIENT-2]."""
    word, space, key = head.partition(b" ")
    if space and word in (b"MSG", b"CMSG"):
        return Message if word == b"MSG" else ControlMessage, key
    raise malformed("a malformed packet", head)


class Heads(dict[Any, Any]):
    """What a function makes of short texts, which often come again."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, text: Text) -> Any:
        made = self._make(text)
        if len(text) <= HEAD_BYTES_MAX:
            if len(self) >= HEADS_MAX:
                self.clear()
            self[text] = made
        return made


parsed_heads = Heads(parse_head)


# =============================================================================
# Credentials and requests
# =============================================================================


class Credentials(NamedTuple):
    """Who the server says a client is [CRED-2].

    *path* is the whole answer, such as b"!/cred/100/1000/4242".  Keys that
    begin with it and a '/' are private.
    """

    gid: int
    uid: int
    pid: int
    path: bytes


class Request(NamedTuple):
    """A request: its key, its payload, and the key for the answer."""

    key: bytes
    payload: bytes
    reply_key: bytes


def owner_of(key: bytes) -> Credentials:
    """Return the credentials that the reader of a private key must have.

    Anybody may publish under such a key [CRED-10] [CRED-11].
    Raises: PacketError if the key is not private.
    """
    path = re.match(rb"(?:!/cred/[0-9]{1,10}/[0-9]{1,10}/[0-9]{1,10}/)+", key)
    if not path or path.end() == len(key):
        raise PacketError(f"not a private key: {key[:80]!r}")
    gid, uid, pid = map(int, path[0].split(b"/")[-4:-1])
    return Credentials(gid, uid, pid, path[0][:-1])


def credentials_of(answer: Received) -> Credentials:
    """Return what whoami has answered.  Raises: PacketError [CRED-2]."""
    with contextlib.suppress(PacketError):
        found = owner_of(answer.payload + b"/x")
        if found.path == answer.payload:
            return found
    raise malformed("malformed credentials", answer.payload)


def random_part() -> bytes:
    """Return a '/', and what nobody can guess, for a private key."""
    return b"/" + os.urandom(12).hex().encode("ascii")


def parse_request(message: Received) -> Request | None:
    """Return what a message asks for, or None if it is no request.

    Its answer goes to a private key.  This does not prove who asks: anybody
    may name the key of somebody else [CRED-10].

        for message in bus:
            if asked := parse_request(message):
                bus.reply(asked, b"answer")
    """
    reply_key, _, payload = message.payload.partition(b"\0")
    with contextlib.suppress(PacketError):
        owner_of(reply_key)
        return Request(message.key, payload, reply_key)
    return None


# =============================================================================
# Addresses and time
# =============================================================================

ABSTRACT = "/dev/unix/abstract/"
ABSTRACT_BYTES = 108
PATH_BYTES_MAX = 107
Timeout = Union[float, None]  # in seconds, or for ever
End = Union[float, None]  # when a timeout is over, by the monotonic clock


def end_of(timeout: Timeout) -> End:
    """Return when a timeout is over."""
    return None if timeout is None else time.monotonic() + timeout


def left_of(end: End) -> Timeout:
    """Return the timeout that is over at *end*."""
    return None if end is None else max(0.0, end - time.monotonic())


def default_address() -> str:
    """Return the address where a server listens by default [ADDR-1].

    Raises: AddressError if another user may have made it.
    """
    uid = os.getuid()
    if uid == 0:
        return "/run/sbus.socket"
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    for directory in (named, f"/run/user/{uid}"):
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == uid:
                return os.path.join(directory, "sbus.socket")

    directory = f"/tmp/sbus-{uid}"
    with contextlib.suppress(FileNotFoundError):  # no server has made it
        status = os.lstat(directory)
        if status.st_uid != uid or status.st_mode & ~0o7700 != stat.S_IFDIR:
            problem = f"{directory}: not yours alone"
            raise AddressError(f"{problem}; give an address")
    return f"{directory}/sbus.socket"


def socket_name(address: str) -> bytes:
    """Return an address as the kernel knows it, or AddressError [ADDR-4]."""
    if address.startswith(ABSTRACT):
        digits = address[len(ABSTRACT) :]
        if re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
            return bytes.fromhex(digits).ljust(ABSTRACT_BYTES, b"\0")
        what = "2 to 216 hexadecimal digits, an even number that begins with"
        raise AddressError(f"{address!r}: after {ABSTRACT} come {what} 00")
    name = os.fsencode(address)
    if 1 <= len(name) <= PATH_BYTES_MAX and b"\0" not in name:
        return name
    what = f"a path has 1 to {PATH_BYTES_MAX} bytes, none NUL"
    raise AddressError(f"{address!r}: {what}")


def open_socket(address: str) -> socket.socket:
    """Return a socket that is connected to a server, if it is not busy."""
    if address.startswith("/dev/fd/"):
        return inherited_socket(address[len("/dev/fd/") :])
    name = socket_name(address)
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        wire.setblocking(False)
        wire.connect(name)
        wire.setblocking(True)
        return wire
    except OSError as error:
        wire.close()
        if isinstance(error, BlockingIOError):
            raise
        raise no_bus(address, error) from None


def inherited_socket(number: str) -> socket.socket:
    """Return a connected socket; AddressError leaves it to the caller."""
    wire = None
    try:
        wire = socket.socket(fileno=int(number))
        if (wire.family, wire.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise ValueError("not a Unix-domain SEQPACKET socket")
        wire.getpeername()
        return wire
    except (ValueError, OverflowError, OSError) as error:
        if wire:
            wire.detach()
        raise AddressError(f"descriptor {number}: {error}") from None


def no_bus(address: str, failed: OSError) -> Disconnected:
    """Return the error that tells why connect(2) failed, and what to do."""
    what = {
        errno.ENOENT: "nothing is there",
        errno.ECONNREFUSED: "no server listens there",
        errno.EPROTOTYPE: "another kind of socket is there",
    }.get(failed.errno or 0, str(failed.strerror))
    what += "; start sbusd, or give its address"
    if failed.errno == errno.EACCES:
        what = "its server does not let this user in: see its -g, -o and -u"
    error = Disconnected(f"no bus at {address}: {what}")
    error.errno = failed.errno
    return error


# =============================================================================
# What both clients share: a connection that never waits
# =============================================================================

KEPT_BYTES_MAX = 1 << 26  # beside an answer
KEPT_OVERHEAD_BYTES = 256  # of each message
REQUEST_SECONDS = 5.0  # in which somebody is to answer
STATS_SECONDS = 10.0  # in which the server is to
RECONNECT_SECONDS_MIN = 0.05  # before the second try; doubled up to
RECONNECT_SECONDS_MAX = 5.0
RESTORE_SECONDS = 0.01  # until there may be room for more subscriptions
LARGE_BYTES = 1 << 16  # to copy more takes longer than some calls
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
BUSY = "too many clients connect at once"
FULL = "the server takes nothing (a slow reader, or it is stopped)"
SILENT = "the server does not answer"
CLOSED = "this client is closed"
# Plain numbers: to combine those of the module takes longer than send
SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
TRUNC = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)


Answer = list[Any]  # what a question waits for: a packet, or an error


class Connection:
    """What Client and AsyncClient share; only their _wait waits.

    A method whose name begins with _try raises BlockingIOError if it would
    have to wait.

    With *reconnect*, a client is lost from when it finds that it has no bus
    until the kernel has taken, for another one, all that a bus has to know.
    Until then that connection is _fresh, and what it has yet to be told is
    _unsent.  Then it takes the descriptor of the old one.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        timeout: Timeout = None,
        reconnect: bool = False,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        key_bytes_max: int = KEY_BYTES_MAX,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        if address is None:  # [ADDR-1]
            address = os.environ.get("SBUS_ADDRESS") or default_address()
        self.address = address = os.fspath(address)
        if reconnect and address.startswith("/dev/fd/"):
            raise AddressError("a descriptor cannot reconnect")
        self.reconnect = reconnect
        self.packet_bytes_max = packet_bytes_max
        self.key_bytes_max = key_bytes_max
        self.segments_max = segments_max
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(None)
        # [CLIENT-5] The largest packet fits; unused, it takes no memory
        self._buffer = mmap.mmap(-1, max(packet_bytes_max, LARGE_BYTES))
        self._receive_into = self.socket.recv_into  # it stays the same
        self._heads = Heads(self._publish_head)
        self._lock = threading.RLock()  # for all but a first try to publish
        self._pid = os.getpid()
        self._own_path = b""  # what whoami would say, as far as is known
        # What came and was not received yet, and what is still to come
        self._kept: deque[Received] = deque()
        self._kept_bytes = 0
        self._questions: deque[tuple[bytes, Answer | None]] = deque()
        self._replies: dict[bytes, Answer] = {}  # by reply key
        self._reply_keys = b""  # what those begin with
        # What another server has to know
        self._patterns: Counter[bytes] = Counter()
        self._modes: dict[bytes, None] = {}  # the last sent is the last
        # The state of the connection
        self._why_closed = "not connected: use async with, or connect()"
        self._is_lost = False
        self._fresh: socket.socket | None = None
        self._unsent: deque[bytes] = deque()
        self._greeting: Answer | None = None  # of a bus that is found again
        self._next_try = 0.0  # to connect, by the monotonic clock
        self._pause = 0.0  # after that
        self._begin(timeout)

    def _begin(self, timeout: Timeout) -> None:
        """Prepare to wait; connect, or keep the timeout for connect."""
        raise NotImplementedError

    def retry_in(self) -> float | None:
        """Return the seconds to the next try, or None while there is a bus."""
        if not self._is_lost:
            return None
        return RESTORE_SECONDS if self._fresh else left_of(self._next_try)

    def close(self) -> None:
        """Leave the bus, which still delivers what was published [CONN-6].

        A call that waits in another thread or task raises Disconnected.
        """
        with self._lock:
            if self._why_closed == CLOSED:
                return
            self._why_closed, self._is_lost = CLOSED, False
            self._changed()
            if self._pid == os.getpid():  # or our parent would lose it, too
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()
            if self._fresh:
                self._fresh.close()

    async def _wait(self, event: int, end: End, what: str) -> None:
        """Wait for an event of poll(2), a change, or until it is time to try.

        Raises: TimeoutError, which says *what*, at *end*; Disconnected.
        """
        raise NotImplementedError

    async def _turn(self) -> None:
        """Let other tasks run now and then."""

    def _changed(self) -> None:
        """Note that something is kept, answered, lost, found or closed."""
        raise NotImplementedError

    def _late(self, what: str) -> TimeoutError:
        """Return the error that tells what has not happened in time."""
        if self._is_lost and self.reconnect:
            what = "there is no bus"
        return TimeoutError(f"{what} at {self.address}")

    # Packets: what a server would refuse is told before it is sent

    def _checked(self, text: Text) -> bytes:
        """Return a key or pattern as bytes, if a server takes it [KEY-4]."""
        text = to_bytes(text)
        count, segments, why = len(text), text.count(b"/") + 1, ""
        if count > self.key_bytes_max:
            why = f"{count} bytes, over {self.key_bytes_max}"
        elif segments > self.segments_max:
            why = f"{segments} segments, over {self.segments_max}"
        elif b"!" in text:
            rest = SECRETS.sub(b"", text) if FIELDS.match(text) else text
            if b"!" in rest.split(b"/"):
                why = "a segment '!', which is reserved for secrets"
        if why:
            raise PacketError(f"{text[:80]!r} has {why}")
        return text

    def _pattern(self, text: Text) -> bytes:
        """Return a pattern as bytes, unless it is another's secret [CRED-4].

        Until whoami has told our credentials, this process's own numbers
        count, unless the server is in another process namespace.
        """
        pattern = self._checked(text)
        start = max(0, self._own_path.rfind(SECRET))
        own = self._own_path[start:].split(b"/")[2:]
        fields = FIELDS.match(pattern, start)
        if fields and pattern.rfind(SECRET) == start:  # no other prefix
            for field, number in zip(fields.groups(), own):
                if field not in (b"", number):
                    raise PacketError(
                        f"{pattern[:80]!r} is another's secret: this client is"
                        f" {self._own_path.decode()}"
                    )
        return pattern

    def _publish_head(self, key: Text) -> bytes:
        """Return what a publish packet has before its payload [CLIENT-1]."""
        return b"MSG " + self._checked(key) + b"\0"

    def _publication(self, key: Text, payload: Payload) -> bytes:
        """Return a publish packet [PUB-1]."""
        return self._publish_head(key) + payload_bytes(payload)

    # Sending

    def _try_send(self, packet: bytes, answer: Answer | None) -> None:
        """Send a packet; what another bus has to know may wait for one."""
        if len(packet) > self.packet_bytes_max and not self._why_closed:
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes is above the limit of"
                f" {self.packet_bytes_max} bytes"
            )
        word, _, rest = packet.partition(b" ")
        key = rest.partition(b"\0")[0]
        is_mode = word == b"CMSG" and key.startswith(MODES)
        stays = is_mode or word in (b"SUB", b"UNSUB")  # a server remembers it
        with self._lock:
            while not (stays and self._is_lost):
                if self._is_lost:
                    self._try_connect()
                try:
                    self._write(self.socket, packet)
                    break
                except OSError as error:
                    self._lose(error)
            else:
                if self._fresh:
                    self._unsent.insert(-1, packet)  # before the greeting
            if word == b"SUB":
                self._patterns[key] += 1
            elif word == b"UNSUB":
                self._patterns[key] -= 1
                self._patterns = +self._patterns  # without those of 0
            elif is_mode:
                self._modes.pop(packet, None)
                self._modes[packet] = None
            elif word == b"CMSG" and key in (WHOAMI, STATS):
                self._questions.append((key, answer))

    def _write(self, wire: socket.socket, packet: bytes) -> None:
        """Send a packet, with a larger send buffer if need be [CLIENT-3]."""
        option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
        try:
            wire.send(packet, SEND)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            size = len(packet) + SOCKET_OVERHEAD_BYTES
            wire.setsockopt(*option, (size + 1) // 2)  # the kernel doubles it
            if wire.getsockopt(*option) < size:
                raise PacketTooLarge(
                    f"a packet of {len(packet)} bytes does not fit into the"
                    " kernel's largest send buffer (net.core.wmem_max)"
                ) from None
            self._write(wire, packet)

    # Receiving

    def _ready(self) -> Received | None:
        """Return what is there for receive, if anything is."""
        if self._kept:
            return self._take()
        try:
            if not self.reconnect:
                return self._read()
            with self._lock:  # another thread may just find the bus lost
                return None if self._kept else self._read()
        except OSError:
            return None  # _receive meets it again

    def _try_keep(self) -> None:
        """Keep what comes next for receive, unless it is an answer."""
        with self._lock:
            if self._is_lost:
                return self._try_connect()
            try:
                if received := self._read():
                    self._keep(received)
            except OSError as error:
                self._lose(error)

    def _read(self) -> Received | None:
        """Return the next packet, or None if it is an answer [CLIENT-6]."""
        buffer = self._buffer
        try:
            size = self._receive_into(buffer, 0, TRUNC)
        except ConnectionResetError:
            return self._read()  # the last packets come next
        if size < LARGE_BYTES:
            head, nul, payload = buffer[:size].partition(b"\0")
            if not nul:
                if not size:  # no server sends an empty packet
                    raise BrokenPipeError(errno.EPIPE, "the end")
                raise malformed("a malformed packet", head)
        elif size <= len(buffer):  # which takes long to copy twice
            end = max(0, buffer.find(b"\0", 0, size))
            head, payload = buffer[:end], buffer[end + 1 : size]
        else:
            raise PacketTooLarge(
                f"a packet of {size} bytes was received and lost; the limit"
                f" is {len(buffer)} bytes"
            )
        kind, key = parsed_heads[head]
        received: Received = new_tuple(kind, (key, payload))
        if kind is Message and not self._reply_keys:
            return received
        with self._lock:  # another thread may just be asking
            return None if self._is_answer(received) else received

    def _is_answer(self, received: Received) -> bool:
        """Give an answer to its question; return whether it is one."""
        key, answer = received.key, None
        if type(received) is Message:
            if not key.startswith(self._reply_keys):
                return False
            answer = self._replies.pop(key, None)
        else:
            if key not in [asked for asked, _ in self._questions]:
                return False
            while self._questions[0][0] != key:  # a server may not know it
                self._questions.popleft()
            _, answer = self._questions.popleft()
            if key == WHOAMI:
                self._own_path = received.payload
            if answer is None:  # control has asked
                return False
            if answer is self._greeting:
                self._keep(Reconnected(b"", b""))
        if answer == []:
            answer.append(received)
            self._changed()
        return True

    def _keep(self, received: Received) -> None:
        """Keep something for receive."""
        self._kept.append(received)
        self._kept_bytes += len(received.payload) + KEPT_OVERHEAD_BYTES
        self._changed()

    def _take(self) -> Received:
        """Return the first that is kept, and keep it no longer."""
        with self._lock:
            if self._why_closed:
                raise Disconnected(self._why_closed)
            received = self._kept.popleft()
            self._kept_bytes -= len(received.payload) + KEPT_OVERHEAD_BYTES
            if not self._kept:
                self._changed()
            return received

    # Losing the bus, and finding another

    def _lose(self, error: OSError) -> None:
        """Begin to have no bus, and keep what it has left; or raise."""
        if error.errno not in GONE:
            raise error
        if self._why_closed:
            raise Disconnected(self._why_closed) from None
        if not self.reconnect:
            raise Disconnected(
                f"the server at {self.address} closed the connection: it"
                " stopped, or refused this client; its log says why, and"
                f" names pid {self._pid}"
            ) from None
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(PacketError, PacketTooLarge):
                    if received := self._read():
                        self._keep(received)
        self._is_lost, self._greeting = True, Answer()
        self._changed()
        what = f"the bus at {self.address} was lost before it answered"
        asked = [answer for _, answer in self._questions]
        for answer in (*asked, *self._replies.values()):
            if answer == []:
                answer.append(Disconnected(f"{what}: ask again"))
        self._questions.clear()
        if time.monotonic() - self._next_try > RECONNECT_SECONDS_MAX:
            self._pause = 0.0  # that bus has lasted for some time

    def _try_connect(self) -> None:
        """Take a step towards another connection; return once it is up."""
        if not self._fresh:
            if (now := time.monotonic()) < self._next_try:
                raise BlockingIOError
            self._next_try = now + self._pause * random.uniform(0.5, 1)
            pause = max(2 * self._pause, RECONNECT_SECONDS_MIN)
            self._pause = min(pause, RECONNECT_SECONDS_MAX)
            try:
                self._fresh = open_socket(self.address)
            except Disconnected as error:
                may_come = error.errno in (errno.ENOENT, errno.ECONNREFUSED)
                if not (self.reconnect and may_come):
                    raise
                raise BlockingIOError from None
            patterns = (b"SUB " + each for each in self._patterns.elements())
            greeting = [b"CMSG " + WHOAMI] * (self._greeting is not None)
            self._unsent = deque((*patterns, *self._modes, *greeting))
        try:
            while self._unsent:
                self._write(self._fresh, self._unsent[0])
                self._unsent.popleft()
        except ConnectionError:
            self._fresh.close()
            self._fresh = None
            raise BlockingIOError from None
        fresh, self._fresh = self._fresh, None
        os.dup2(fresh.fileno(), self.socket.fileno(), inheritable=False)
        fresh.close()
        self._is_lost = False
        option = (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("iII", self.socket.getsockopt(*option))
        if pid and not self._own_path and self.address[:8] != "/dev/fd/":
            ids = (os.getegid(), os.geteuid(), os.getpid())
            self._own_path = b"!/cred/%d/%d/%d" % ids
        if self._greeting is not None:
            self._questions.append((WHOAMI, self._greeting))
        self._changed()

    # Calls: coroutines that suspend in _wait and _turn alone

    async def _connect(self, timeout: Timeout) -> None:
        """Connect for the first time; with *reconnect*, perhaps later."""
        end, why_closed = end_of(timeout), self._why_closed
        if why_closed == CLOSED:
            raise Disconnected(CLOSED)
        self._why_closed, self._is_lost = "", True
        try:
            while self._is_lost:
                try:
                    self._try_connect()
                except BlockingIOError:
                    if self.reconnect:
                        self._greeting = Answer()
                        return
                    await self._wait(select.POLLIN, end, BUSY)
        except BaseException:
            self._why_closed = self._why_closed or why_closed
            self._is_lost = False
            raise

    async def _send(
        self, packet: bytes, timeout: Timeout, answer: Answer | None = None
    ) -> None:
        """Send a packet once there is room, or a bus."""
        end = end_of(timeout)
        while True:
            try:
                return self._try_send(packet, answer)
            except BlockingIOError:
                await self._wait(select.POLLOUT, end, FULL)

    async def _receive(self, timeout: Timeout) -> Received:
        """Return what comes next."""
        end = end_of(timeout)
        while not self._kept:
            await self._keep_next(end, "nothing came")
        return self._take()

    async def _keep_next(self, end: End, what: str) -> None:
        """Keep what comes next, or wait for it."""
        try:
            self._try_keep()
            await self._turn()
        except BlockingIOError:
            await self._wait(select.POLLIN, end, what)

    async def _ask(self, key: bytes, timeout: Timeout) -> Received:
        """Return the server's answer to a question."""
        end, answer = end_of(timeout), Answer()
        await self._send(b"CMSG " + key, timeout, answer)
        return await self._awaited(answer, end, SILENT)

    async def _awaited(self, answer: Answer, end: End, what: str) -> Received:
        """Return an answer; keep all else that comes before it."""
        while not answer:
            if self._kept_bytes > KEPT_BYTES_MAX:
                count = f"{len(self._kept):,} messages"
                what = f"{count} came before an answer: receive them first"
                raise SbusError(what)
            await self._keep_next(end, what)
        received: Received | SbusError = answer[0]
        if isinstance(received, SbusError):
            raise received
        return received

    async def _request(
        self, key: Text, payload: Payload, timeout: Timeout
    ) -> bytes:
        """Return the payload of the first answer to a request."""
        end, answer = end_of(timeout), Answer()
        content = b"\0" + payload_bytes(payload)
        if not self._reply_keys or self._reply_keys not in self._patterns:
            path = credentials_of(await self._ask(WHOAMI, timeout)).path
            self._reply_keys = self._reply_keys or path + random_part() + b"/"
            await self._send(b"SUB " + self._reply_keys, left_of(end))
        reply_key = self._reply_keys[:-1] + random_part()
        packet = self._publication(key, reply_key + content)
        self._replies[reply_key] = answer
        try:
            await self._send(packet, left_of(end))
            name = to_bytes(key).decode(errors="backslashreplace")
            what = f"nobody answered {name!r} within {timeout or 0:g} s"
            return (await self._awaited(answer, end, what)).payload
        finally:
            self._replies.pop(reply_key, None)


# =============================================================================
# The client
# =============================================================================

Result = TypeVar("Result")
Call = Callable[..., Coroutine[Any, Any, Result]]


def run(call: Call[Result], *arguments: Any) -> Result:
    """Return what a coroutine returns that never suspends."""
    try:
        call(*arguments).send(None)
    except StopIteration as end:
        return cast(Result, end.value)
    raise AssertionError("it suspended")


class Client(Connection):
    """A connection to a bus.

    *address* is a path, /dev/unix/abstract/HEX, or /dev/fd/N for a connected
    socket, which the client closes.  The default is SBUS_ADDRESS of the
    environment, or the server's own default.  With *reconnect*, a client may
    start without a bus; whenever it has none, it keeps trying to connect.
    Then it subscribes and sets its modes again, and reports a Reconnected.
    The last three options are limits, which should be those of the server.

    Keys and patterns are bytes, or str that is sent as UTF-8.  A timeout is
    in seconds, None for ever; with 0 a call does not wait.  A call that
    raises TimeoutError has sent or received nothing.

    A client is a context manager and an iterator over what it receives.  It
    has fileno() for select, poll and epoll, and *socket* for all else.  Any
    thread may send and close, but only one at a time may receive, which
    whoami, sync, stats and request also do.  Only the process that made a
    client can use it, not one that fork(2) makes.

        with select.epoll() as epoll:
            epoll.register(bus, select.EPOLLIN)
            while True:
                epoll.poll(bus.retry_in())
                with contextlib.suppress(TimeoutError):
                    print(bus.receive(timeout=0))

    Any call may raise Disconnected, and all but close and fileno do so once
    the client is closed; PacketTooLarge for a packet above the limit;
    PacketError for a key or pattern that a server would refuse, or for a
    malformed packet, which is skipped; and TypeError.
    Raises: TimeoutError; AddressError; Disconnected if there is no server.
    """

    def _begin(self, timeout: Timeout) -> None:
        self._closing = threading.Event()
        self._epoll: select.epoll | None = None  # for fileno
        self._bell = -1  # what is always readable, for what is kept
        self._watched: set[int] = set()  # of the socket and the bell
        try:
            run(self._connect, timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Return an iterator over all that receive returns."""
        return iter(self.receive, None)

    def subscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """Subscribe to a pattern; duplicates count [SUB-1] [SUB-2]."""
        run(self._send, b"SUB " + self._pattern(pattern), timeout)

    def unsubscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """Take back one subscription to an identical pattern [UNSUB-1]."""
        run(self._send, b"UNSUB " + self._pattern(pattern), timeout)

    def publish(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Publish a message [PUB-1]."""
        try:
            packet: bytes = self._heads[key] + payload
            if len(packet) <= self.packet_bytes_max:
                self.socket.send(packet, SEND)
                return
        except (OSError, TypeError, BufferError, BytesWarning):
            pass  # try with more care; the last is what python3 -bb raises
        run(self._send, self._publication(key, payload), timeout)

    def control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Send a control message to the server [CTL-1]."""
        run(self._send, control_packet(key, payload), timeout)

    def receive(self, timeout: Timeout = None) -> Received:
        """Return the next message or control message.

        Raises: TimeoutError; Disconnected when all is read [CLIENT-6].
        """
        return self._ready() or run(self._receive, timeout)

    def whoami(self, timeout: Timeout = None) -> Credentials:
        """Return the credentials that the server knows this client by.

        It keeps for receive what else arrives [CRED-12] [CLIENT-8].
        Raises: TimeoutError; SbusError if that is too much; Disconnected, even
        with *reconnect*, if the bus is lost meanwhile: ask again.
        """
        return credentials_of(run(self._ask, WHOAMI, timeout))

    def sync(self, timeout: Timeout = None) -> None:
        """Return once the server has handled all sent so far [PKT-5] [CRED-3].

        Raises: as whoami; Disconnected if the server refused some of it.
        """
        self.whoami(timeout)

    def stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """Return the counts of the server, by the names of [CTL-5].

        Raises: as whoami; TimeoutError also if this server has no counts.
        """
        return dict(json.loads(run(self._ask, STATS, timeout).payload))

    def request(
        self,
        key: Text,
        payload: Payload = b"",
        timeout: Timeout = REQUEST_SECONDS,
    ) -> bytes:
        """Publish a request; return the payload of the first answer.

        The request's payload is the key for the answer, NUL, and *payload*.
        This client stays subscribed to the keys of its answers, and drops an
        answer that comes too late [CRED-10].
        Raises: as whoami; TimeoutError also if nobody answers.
        """
        return run(self._request, key, payload, timeout)

    def reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Answer a parsed request, unless no server takes its reply key."""
        with contextlib.suppress(PacketError):
            self.publish(asked.reply_key, payload, timeout)

    def fileno(self) -> int:
        """Return a descriptor that is readable if receive has something.

        It stays the same until the client is closed; then it is -1.  While
        there is no bus it is quiet: see retry_in.
        """
        with self._lock:
            if self._why_closed:
                return -1
            if not self._epoll:
                self._bell, other_end = os.pipe()
                os.close(other_end)  # so it is at its end, and readable
                self._epoll = select.epoll()
                self._changed()
            return self._epoll.fileno()

    async def _wait(self, event: int, end: End, what: str) -> None:
        left = left_of(end)
        if left == 0:
            raise self._late(what)
        seconds = min(left or 1e6, 1e6)  # poll(2) takes 24 days
        with self._lock:
            if self._why_closed:
                raise Disconnected(self._why_closed)
            fd = os.dup(self.socket.fileno())  # which close leaves alone
            pause = self.retry_in()
        try:
            if pause is None:
                poll = select.poll()
                poll.register(fd, event)
                poll.poll(1000 * seconds)
            else:
                self._closing.wait(min(seconds, pause))
        finally:
            os.close(fd)

    def _changed(self) -> None:
        """Have the descriptor of fileno tell of what is there or kept."""
        if self._why_closed == CLOSED:
            self._closing.set()
            if self._epoll:
                self._epoll.close()
                os.close(self._bell)
        elif self._epoll:
            readable = set() if self._is_lost else {self.socket.fileno()}
            if self._kept:
                readable.add(self._bell)
            for fd in self._watched - readable:
                self._epoll.unregister(fd)
            for fd in readable - self._watched:
                self._epoll.register(fd, select.EPOLLIN)
            self._watched = readable


# =============================================================================
# The client for asyncio
# =============================================================================

CALLS_PER_TURN = 64  # that need not wait, before other tasks have a turn


class AsyncClient(Connection):
    """A connection to a bus, for asyncio.

        async with AsyncClient() as bus:
            await bus.subscribe("sensors/*/temp")
            await bus.publish("sensors/1/temp", b"21.5")
            async for message in bus:
                print(message.key, message.payload)

    Its arguments are those of Client.  It connects in `async with` or by
    connect().  Its calls are those of Client and raise the same errors, but
    let other tasks run while they wait.  Several tasks of the loop in which
    it connected may use it at once; each message goes to one of them.

    A call may be cancelled: the next call receives what it would have
    received, and a packet is sent whole or not at all.
    """

    # All tasks that wait share one future, which is set when something
    # changes: then each looks for itself, and the first reads for all.

    def _begin(self, timeout: Timeout) -> None:
        self._timeout = timeout
        self._loop: Any = None  # once it is connected
        self._change: Any = None  # the future, if any task waits
        self._calls = 0  # since other tasks had a turn

    async def connect(self) -> AsyncClient:
        """Connect, and return this client.  Raises: as Client."""
        import asyncio  # which takes long, and others do without

        if self._why_closed:
            self._loop = asyncio.get_running_loop()
            await self._connect(self._timeout)
        return self

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncClient:
        """Return an iterator over what receive returns, without an end."""
        return self

    async def subscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """As Client.subscribe [SUB-1] [SUB-2]."""
        await self._send(b"SUB " + self._pattern(pattern), timeout)

    async def unsubscribe(
        self, pattern: Text, timeout: Timeout = None
    ) -> None:
        """As Client.unsubscribe [UNSUB-1]."""
        await self._send(b"UNSUB " + self._pattern(pattern), timeout)

    async def publish(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.publish, once the kernel has room for it [PUB-1]."""
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            await self._turn()
        try:
            packet: bytes = self._heads[key] + payload
            if len(packet) <= self.packet_bytes_max:
                self.socket.send(packet, SEND)
                return
        except (OSError, TypeError, BufferError, BytesWarning):
            pass  # as in Client.publish
        await self._send(self._publication(key, payload), timeout)

    async def control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.control [CTL-1]."""
        await self._send(control_packet(key, payload), timeout)

    async def receive(self, timeout: Timeout = None) -> Received:
        """As Client.receive [CLIENT-6] [CLIENT-5]."""
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            await self._turn()
        return self._ready() or await self._receive(timeout)

    __anext__ = receive

    async def whoami(self, timeout: Timeout = None) -> Credentials:
        """As Client.whoami; several tasks may ask at once [CRED-12]."""
        return credentials_of(await self._ask(WHOAMI, timeout))

    async def sync(self, timeout: Timeout = None) -> None:
        """As Client.sync [PKT-5] [CRED-3]."""
        await self.whoami(timeout)

    async def stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """As Client.stats [CTL-5]."""
        return dict(json.loads((await self._ask(STATS, timeout)).payload))

    async def request(
        self,
        key: Text,
        payload: Payload = b"",
        timeout: Timeout = REQUEST_SECONDS,
    ) -> bytes:
        """As Client.request; any number may wait for their answers at once."""
        return await self._request(key, payload, timeout)

    async def reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.reply [PUB-1]."""
        with contextlib.suppress(PacketError):
            await self.publish(asked.reply_key, payload, timeout)

    async def _turn(self) -> None:
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            import asyncio

            self._calls = 0
            await asyncio.sleep(0)

    async def _wait(self, event: int, end: End, what: str) -> None:
        import asyncio

        left = left_of(end)
        if left == 0:
            raise self._late(what)
        if self._why_closed:
            raise Disconnected(self._why_closed)
        if not self._change:
            self._change = self._loop.create_future()
        waits = [s for s in (left, self.retry_in()) if s is not None]
        if not self._is_lost:
            is_sender = event == select.POLLOUT
            add = self._loop.add_writer if is_sender else self._loop.add_reader
            add(self.socket, self._changed)
        await asyncio.wait([self._change], timeout=min(waits, default=None))

    def _changed(self) -> None:
        """Have all tasks that wait look for themselves."""
        if self._change:
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self._change.set_result(None)
            self._change = None


# =============================================================================
# The command line
# =============================================================================

PATTERNS = """the keys to select: '*' matches up to the next '/', and a final
'/' all that follows it; 'a/*' selects a/b but not a/b/c, 'a/' selects both;
without a pattern, all keys but secrets; quote it"""
HELP = """exit status: 1 for an error of the bus, 2 for a wrong command line.
SBUS_ADDRESS is the default of -a.  The command sbus, in tools/, does more."""
Options = argparse.Namespace


def note(text: object) -> None:
    """Print a remark on standard error, if anything can be printed there."""
    if not sys.stderr:
        return
    try:
        print(f"sbus_client.py: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard_output(2)


def discard_output(descriptor: int) -> None:
    """Lead an output that cannot be written to nowhere.

    Python writes at exit what is left, and would fail once more.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def printable(text: bytes) -> str:
    """Return bytes as text for a terminal.

    What is no UTF-8, or cannot be printed, is escaped as in a bytes literal.
    """
    decoded = text.decode("utf-8", "surrogateescape")
    if decoded.isprintable() and "\\" not in decoded:
        return decoded  # as most are, and quickly
    return "".join(
        char
        if char.isprintable() and char != "\\"
        else repr(char.encode("utf-8", "surrogateescape"))[2:-1]
        for char in decoded
    )


def show(fields: Sequence[bytes], is_raw: bool = False) -> None:
    """Print fields, with tabs between, or the last one as it is."""
    line = "\t".join(map(printable, fields)).encode() + b"\n"
    sys.stdout.buffer.write(fields[-1] if is_raw else line)
    sys.stdout.flush()


def payload_of(options: Options) -> bytes:
    """Return the payload that an argument gives, or standard input."""
    text = options.payload
    return sys.stdin.buffer.read() if text == "-" else os.fsencode(text)


def sub(bus: Client, options: Options) -> None:
    """Print each message as a line: its key, a tab, its payload."""
    for pattern in options.pattern or [""]:
        bus.subscribe(os.fsencode(pattern))
    end, heard = end_of(options.timeout), 0
    while heard != options.count:
        try:
            received = bus.receive(left_of(end))
        except TimeoutError:
            if options.count:
                what = f"heard {heard} of {options.count:g}"
                raise SbusError(f"out of time: {what}") from None
            return
        if type(received) is Message:
            heard += 1
            show(received, options.raw)
        elif type(received) is Reconnected:
            note(f"connected to {bus.address}")


def pub(bus: Client, options: Options) -> None:
    """Publish, and wait until the server has handled it."""
    lines = sys.stdin.buffer if options.lines else [payload_of(options)]
    for line in lines:
        payload = line.rstrip(b"\n") if options.lines else line
        bus.publish(os.fsencode(options.key), payload, options.timeout)
    bus.sync(options.timeout)


def request(bus: Client, options: Options) -> None:
    """Publish a request, and print the payload of the first answer."""
    key, payload = os.fsencode(options.key), payload_of(options)
    show([bus.request(key, payload, options.timeout)], options.raw)


def whoami(bus: Client, options: Options) -> None:
    """Print the credentials by which the server knows this client."""
    show([bus.whoami(options.timeout).path])


def positive(text: str) -> float:
    """Return the value of an option.  Raises: ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


class Parser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        note(f"{message}; --help lists the options")
        sys.exit(2)


def option_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(prog="sbus_client.py", epilog=HELP)
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(address=None, reconnect=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    where = "the bus: a path, /dev/unix/abstract/HEX or /dev/fd/N"
    for run, wait in (sub, None), (pub, 60), (request, 5), (whoami, 10):
        text = run.__doc__
        own = commands.add_parser(run.__name__, help=text, description=text)
        add = own.add_argument
        if run is sub:
            add("pattern", nargs="*", metavar="PATTERN", help=PATTERNS)
            add("-n", "--count", type=positive, help="end after so many")
            add("--reconnect", action="store_true", help="wait for the bus")
        if run in (pub, request):
            add("key", metavar="KEY", help="the routing key, such as a/b")
            either = own.add_mutually_exclusive_group().add_argument
            what, default = "'-' is standard input", "-" if run is pub else ""
            either("payload", nargs="?", default=default, help=what)
        if run is pub:
            either("--lines", action="store_true", help="publish each line")
        if run in (sub, request):
            add("--raw", action="store_true", help="print payloads alone")
        what = f"end after this many seconds{f' ({wait})' if wait else ''}"
        add("-t", "--timeout", type=positive, default=wait, help=what)
        # A default here would undo an address before the command
        add("-a", "--address", default=argparse.SUPPRESS, help=where)
        own.set_defaults(run=run)
    parser.add_argument("-a", "--address", help=where)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = option_parser().parse_args(arguments)
    try:
        if not (sys.stdin and sys.stdout):
            raise SbusError("standard input or output is closed")
        where, waits = options.address, options.reconnect
        with Client(where, timeout=options.timeout, reconnect=waits) as bus:
            options.run(bus, options)
        return 0
    except KeyboardInterrupt:
        return 130
    except (SbusError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            note(error)
        discard_output(1)
        return 1


if __name__ == "__main__":
    sys.exit(main())
