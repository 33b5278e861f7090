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
program on top of it, in tools/.  A bracketed id, as in [CLIENT-6], names a
rule of the specification in spec/.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import itertools
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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

if TYPE_CHECKING:  # it takes long, and is imported where it is used
    from asyncio import Future

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
    whom it does not let in, and of all clients when it stops.  *errno* is
    that of connect(2) where there is no server, and None otherwise.
    """


class PacketTooLarge(SbusError, ValueError):
    """A packet does not fit: nothing was sent, or a received one is lost."""


class TooMuchKept(SbusError):
    """More arrived beside an answer than is kept: receive it first."""


class PacketError(SbusError, ValueError):
    """A key holds a NUL byte, or a received packet is malformed."""


def malformed(what: str, text: bytes) -> PacketError:
    """Return the error that shows what a server has sent."""
    return PacketError(f"the server sent {what}: {text[:80]!r}")


# =============================================================================
# Packets
# =============================================================================

PACKET_BYTES_MAX = 409_600
WHOAMI = b"!/cred/whoami"


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


def to_bytes(text: Text) -> bytes:
    """Return a key or pattern as bytes: UTF-8 unless it is bytes already.

    Raises: PacketError if it holds a NUL byte [KEY-1].
    """
    encoded = text.encode("utf-8") if isinstance(text, str) else text
    if b"\0" in encoded:
        raise PacketError(f"{text!r}: a key cannot hold a NUL byte")
    return encoded


def payload_bytes(payload: Payload) -> bytes:
    """Return a payload as bytes.  Raises: TypeError if it has none."""
    if isinstance(payload, bytes):
        return payload
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        what = f"a payload is bytes, not {kind}: encode it"
        raise TypeError(what) from None


HEADS_MAX = 1_024  # that are remembered
HEAD_BYTES_MAX = 256  # what is longer is not


class Heads(dict[Any, Any]):
    """What a function makes of the short texts that it was given last.

    What stands before payloads is often the same: it is made and read once.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, text: Text) -> Any:
        made = self._make(text)
        if len(text) <= HEAD_BYTES_MAX:
            if len(self) >= HEADS_MAX:
                self.clear()
            self[text] = made
        return made


def publish_head(key: Text) -> bytes:
    """Return what a publish packet has before its payload [CLIENT-1]."""
    return b"MSG " + to_bytes(key) + b"\0"


def parse_head(head: bytes) -> tuple[type[Received], bytes]:
    """Return what kind of packet of a server begins so, and its key.

    Raises: PacketError if none does [PKT-1] [CLIENT-2].
    """
    word, space, key = head.partition(b" ")
    if space and word in (b"MSG", b"CMSG"):
        return Message if word == b"MSG" else ControlMessage, key
    raise malformed("a malformed packet", head)


publish_heads = Heads(publish_head)
parsed_heads = Heads(parse_head)


def matches(pattern: Text, key: Text) -> bool:
    """Return whether a pattern selects a key.

    Whether a server delivers what is selected is another question, for
    secret keys.
    Raises: PacketError if one of them holds a NUL byte.
    Spec: [MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-6].
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


# =============================================================================
# Credentials and requests
# =============================================================================

# Facts: only a client with the credentials C reads the keys that begin with
# C and '/' [CRED-10] [CRED-11], but anybody may publish under them.  So an
# answer under such a key shows nothing of who sent it, and a random text that
# was sent under such a key and comes back shows that its reader is C.


class Credentials(NamedTuple):
    """Who the server says a client is [CRED-2].

    *path* is the whole answer, as in b"!/cred/100/1000/4242", of which the
    numbers are the last: the keys that begin with it and a '/' are private.
    """

    gid: int
    uid: int
    pid: int
    path: bytes


class Request(NamedTuple):
    """What is asked: its key, its payload, and the key for the answer."""

    key: bytes
    payload: bytes
    reply_key: bytes


def parse_credentials(path: bytes) -> Credentials:
    """Return what whoami has answered.  Raises: PacketError [CRED-2]."""
    one = rb"!/cred/([0-9]{1,10})/([0-9]{1,10})/([0-9]{1,10})"
    match = re.fullmatch(rb"(?:!/cred/[0-9]+/[0-9]+/[0-9]+/)*" + one, path)
    if not match:
        raise malformed("malformed credentials", path)
    gid, uid, pid = map(int, match.groups())
    return Credentials(gid, uid, pid, path)


def owner_of(key: bytes) -> Credentials:
    """Return the credentials of those who can read a private key.

    Raises: PacketError if it is none [CRED-10] [CRED-11].
    """
    path = re.match(rb"(?:!/cred/[0-9]+/[0-9]+/[0-9]+/)+(?!$)", key)
    if not path:
        raise PacketError(f"not a private key: {key[:80]!r}")
    return parse_credentials(path[0][:-1])


def parse_request(message: Received) -> Request:
    """Return what a message asks for.

    Raises: PacketError if it is no request, or wants its answer elsewhere
    than under a secret key: anybody may publish such [CRED-10].
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
    """
    for message in received:
        with contextlib.suppress(PacketError):
            yield parse_request(message)


def random_text() -> bytes:
    """Return what nobody can guess."""
    return os.urandom(16).hex().encode("ascii")


# =============================================================================
# Waiting
# =============================================================================

Timeout = Union[float, None]  # in seconds, or for ever
End = Union[float, None]  # when a timeout is over, by the monotonic clock
TIMEOUT_SECONDS_MAX = 2e6  # poll(2) takes 24 days; what is longer is for ever
RECONNECT_SECONDS_MIN = 0.05  # before the second try; doubled up to
RECONNECT_SECONDS_MAX = 5.0
# Plain numbers, because to combine those of the module takes longer than send
DONTWAIT = int(socket.MSG_DONTWAIT)
PEEK = int(socket.MSG_PEEK)
TRUNC = int(socket.MSG_TRUNC)
Result = TypeVar("Result")


def end_of(timeout: Timeout) -> End:
    """Return when a timeout is over."""
    if timeout is None or timeout > TIMEOUT_SECONDS_MAX:
        return None
    return time.monotonic() + timeout


def left_of(end: End) -> Timeout:
    """Return the timeout (s) that is over at *end*."""
    return None if end is None else max(0.0, end - time.monotonic())


# =============================================================================
# Addresses
# =============================================================================

ABSTRACT = "/dev/unix/abstract/"
ABSTRACT_BYTES = 108
PATH_BYTES_MAX = 107


def default_address() -> str:
    """Return the address at which a server listens if not told otherwise.

    Raises: AddressError if the environment does not tell [ADDR-1].
    """
    if os.getuid() == 0:
        return "/run/sbus.socket"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise AddressError("XDG_RUNTIME_DIR is not set: give an address")
    return os.path.join(directory, "sbus.socket")


def socket_name(address: str) -> bytes:
    """Return an address as the kernel knows it [ADDR-4] [ADDR-1].

    Raises: AddressError if it is malformed.
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


def inherit_socket(fd: int) -> socket.socket:
    """Return the socket with a descriptor, which the caller gives away.

    Raises: AddressError if it is of no use; then it stays the caller's.
    """
    inherited = None
    try:
        inherited = socket.socket(fileno=fd)
        kind = (inherited.family, inherited.type)
        if kind != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise OSError(errno.EINVAL, "not a Unix-domain SEQPACKET socket")
        inherited.getpeername()
    except OSError as error:
        if inherited:
            inherited.detach()
        raise AddressError(f"descriptor {fd}: {error.strerror}") from None
    inherited.setblocking(True)
    return inherited


def limit_sends(connected: socket.socket, timeout: Timeout) -> None:
    """Have connect(2) and send(2) wait for so long at most, or for ever."""
    microseconds = 0  # for ever
    if timeout is not None and timeout <= TIMEOUT_SECONDS_MAX:
        microseconds = max(1, math.ceil(timeout * 1e6))
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def no_bus(address: str, failed: OSError) -> Disconnected:
    """Return the error that tells why connect(2) failed, and what to do."""
    nothing, start = "nothing is there", "; start sbusd, or give its address"
    refused = "no server listens there (what is there is stale or no socket)"
    if address.startswith(ABSTRACT):  # nothing stale can be there
        refused = nothing
    denied = "it may not be used by this user: its server lets others in"
    what = {
        errno.ENOENT: nothing + start,
        errno.ECONNREFUSED: refused + start,
        errno.EPROTOTYPE: "another kind of socket is there" + start,
        errno.EACCES: denied + " with -g or -o",
    }.get(failed.errno or 0, f"{failed.strerror}{start}")
    error = Disconnected(f"no bus at {address}: {what}")
    error.errno = failed.errno
    return error


def open_socket(address: str, timeout: Timeout) -> socket.socket:
    """Return a blocking socket that is connected to a server.

    Raises: TimeoutError if the server's queue of new connections is full for
    so long; AddressError; Disconnected if there is no server.
    """
    if address.startswith("/dev/fd/"):
        number = address[len("/dev/fd/") :]
        if not re.fullmatch("[0-9]{1,9}", number):
            raise AddressError(f"{address!r}: not a descriptor's number")
        return inherit_socket(int(number))
    name = socket_name(address)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.setblocking(timeout != 0)
        limit_sends(connected, timeout)
        connected.connect(name)
        limit_sends(connected, None)
        connected.setblocking(True)
    except OSError as error:
        connected.close()
        if isinstance(error, BlockingIOError):
            what = f"the bus at {address} does not let us in"
            raise TimeoutError(what) from None
        raise no_bus(address, error) from None
    return connected


# =============================================================================
# The client
# =============================================================================

KEPT_BYTES_MAX = 1 << 26  # beside an answer
KEPT_OVERHEAD_BYTES = 256  # of each message
REFUSED_SECONDS = 1.0  # after which a lost connection is no refusal
REFUSALS_MAX = 2  # in a row
LARGE_BYTES = 1 << 16  # to copy more takes longer than some calls
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
SO_PEEK_OFF = 42  # on most machines; the socket module has no name for it
MODES = set(  # what a server remembers of a client, besides its patterns
    b"blocking/soft/queue blocking/soft/discard blocking/soft/block"
    b" blocking/soft/error blocking/hard/discard blocking/hard/block"
    b" blocking/hard/error order/queue order/stack order/random"
    b" echo/on echo/off".split()
)
new_tuple = tuple.__new__  # makes a Message in half the time of its own call


def is_answer(received: Received, key: bytes = WHOAMI) -> bool:
    """Return whether something is the server's answer to a question."""
    return type(received) is ControlMessage and received.key == key


def kept_bytes(received: Received) -> int:
    """Return how much memory something takes, about, as long as it is kept."""
    return len(received.payload) + KEPT_OVERHEAD_BYTES


def too_much(count: int) -> TooMuchKept:
    """Return the error that tells how many messages are kept."""
    return TooMuchKept(
        f"{count:,} messages arrived while an answer was waited for: receive"
        " them before you ask"
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
    that the call would have to wait.  Timeouts are seconds, None or more than
    2,000,000 for ever, and TimeoutError tells that one is over: here, that
    the server has not let us in.

    A client is a context manager, an iterator over what it receives, and
    has fileno() for select, poll and epoll; *socket* is there for all else.
    One thread may send while another one receives; else it is not to be used
    by two at once, and to close it wakes nobody.  After fork(2) only one of
    the processes may use it: to the server they are one client.

        with select.epoll() as epoll:
            epoll.register(bus, select.EPOLLIN)
            while epoll.poll():
                print(bus.receive())

    Any call may raise Disconnected, and does so once the client is closed
    (but for close and fileno); PacketTooLarge if something sent or received
    is above the limit; PacketError for a NUL byte in a key, or a malformed
    packet, which is left out; TypeError for a payload that is not bytes.
    Raises: TimeoutError; AddressError; Disconnected if there is no server.
    """

    # What waits for an answer keeps all else that comes for receive.  Answers
    # of whoami come in the order of the questions: the first is that to the
    # first question, and so on.
    #
    # With *reconnect* a client is connected, or lost: from when a call finds
    # the old connection closed until one that needs a bus has opened another,
    # and has sent there what a server has to know.  If that is lost a moment
    # later, it was refused; twice in a row is an error.

    def __init__(
        self,
        address: str | None = None,
        *,
        fd: int | None = None,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        server_uid: int | None = None,
        reconnect: bool = False,
        timeout: Timeout = None,
    ) -> None:
        if fd is not None and address is not None:
            raise AddressError("give an address or a descriptor, not both")
        if fd is not None:
            address = f"/dev/fd/{fd}"
        elif address is None:
            # [ADDR-1]
            address = os.environ.get("SBUS_ADDRESS") or default_address()
        if reconnect and address.startswith("/dev/fd/"):
            raise AddressError("a descriptor cannot be connected again")
        self.address = address
        self.packet_bytes_max = packet_bytes_max
        self.server_uid = server_uid
        self.reconnect = reconnect
        # [CLIENT-5] The largest packet fits; unused, it takes no memory
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = mmap.mmap(-1, packet_bytes_max, flags=private)
        self._kept: deque[Received] = deque()
        self._is_large = False  # what was received last
        self._asked = 0  # questions to whoami
        self._answered = 0  # of these
        self._patterns: Counter[bytes] = Counter()
        self._modes: dict[bytes, None] = {}  # the last sent is the last
        self._is_lost = False
        self._connected_at = -math.inf  # again, by the monotonic clock
        self._refusals = 0  # in a row
        self._next_try = 0.0  # to connect, by the same clock
        self._pause = 0.0  # after that
        self.socket = self._open(timeout)
        self._epoll = select.epoll() if reconnect else None
        if self._epoll:
            self._epoll.register(self.socket, select.EPOLLIN)

    def __repr__(self) -> str:
        state = "closed" if self.socket.fileno() < 0 else "open"
        return f"<sbus Client {self.address} {state}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Return an iterator over what receive returns, without an end."""
        return iter(self.receive, None)

    def close(self) -> None:
        """Leave the bus.  What was published is delivered [CONN-6]."""
        self._kept.clear()
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
        return left_of(self._next_try) if self._is_lost else None

    def subscribe(self, pattern: Text, flags: int = 0) -> None:
        """Subscribe to a pattern; duplicates count [SUB-1] [SUB-2]."""
        pattern = to_bytes(pattern)
        self._send(b"SUB " + pattern, flags)
        self._patterns[pattern] += 1

    def unsubscribe(self, pattern: Text, flags: int = 0) -> None:
        """Take back one subscription to an identical pattern [UNSUB-1]."""
        pattern = to_bytes(pattern)
        self._send(b"UNSUB " + pattern, flags)
        self._patterns[pattern] -= 1
        if self._patterns[pattern] <= 0:
            del self._patterns[pattern]

    def publish(
        self,
        key: Text,
        payload: Payload = b"",
        flags: int = 0,
        timeout: Timeout = None,
    ) -> None:
        """Publish a message [PUB-1].  Raises: TimeoutError."""
        try:
            packet: bytes = publish_heads[key] + payload
            if len(packet) <= self.packet_bytes_max:
                now = flags if timeout is None else flags | DONTWAIT
                self.socket.send(packet, now)
                return
        except BlockingIOError:
            if timeout is None:
                raise
        except OSError:
            pass  # _send meets it again, and knows what to do
        except (TypeError, BufferError, BytesWarning):
            # The payload is no bytes, or the key a str where python3 -bb
            # forbids to look for it among others that are bytes
            packet = publish_head(key) + payload_bytes(payload)
        self._send(packet, flags, end_of(timeout))

    def control(
        self, key: Text, payload: Payload = b"", flags: int = 0
    ) -> None:
        """Send a control message to the server [CTL-1]."""
        key = to_bytes(key)
        payload = payload_bytes(payload)
        packet = b"CMSG " + key
        self._send(packet + b"\0" + payload if payload else packet, flags)
        if key == WHOAMI:
            self._asked += 1
        elif key in MODES:
            self._modes.pop(key, None)
            self._modes[key] = None

    def receive(self, timeout: Timeout = None, flags: int = 0) -> Received:
        """Return the next message or control message [CLIENT-5].

        With MSG_PEEK it stays the next.
        Raises: TimeoutError; Disconnected when all is read [CLIENT-6].
        """
        if not self._kept:
            end = None
            try:
                if timeout is None:
                    return self._receive_now(flags)
                end = end_of(timeout)
                return self._receive_by(end, flags)
            except Disconnected as lost:
                self._connect_again(lost, end, flags)
        return self._kept[0] if flags & PEEK else self._kept.popleft()

    def receive_where(
        self, wanted: Callable[[Received], bool], timeout: Timeout = None
    ) -> Received:
        """Return the first that is wanted; keep the others for receive.

        Raises: TimeoutError; TooMuchKept; Disconnected, also with
        *reconnect*, after it has connected again: what was waited for is gone.
        """
        for index, received in enumerate(self._kept):
            if wanted(received):
                del self._kept[index]
                return received
        end = end_of(timeout)
        room = KEPT_BYTES_MAX - sum(map(kept_bytes, self._kept))
        with self._saying_if_lost(end):
            while not wanted(received := self._receive_by(end)):
                self._kept.append(received)
                room -= kept_bytes(received)
                if room < 0:
                    raise too_much(len(self._kept))
        return received

    def whoami(self, timeout: Timeout = None) -> Credentials:
        """Return the credentials that the server knows this client by.

        What arrives meanwhile is kept for receive, and so are the answers
        to earlier questions, as after a TimeoutError [CRED-12] [CLIENT-8].
        Raises: as receive_where; what was sent before a loss is not sure to
        have been handled, so that the question must be asked again.
        """
        end = end_of(timeout)
        with self._saying_if_lost(end):
            self._send_by(end, b"CMSG " + WHOAMI)
        self._asked = number = self._asked + 1
        answer = self.receive_where(
            lambda received: is_answer(received) and self._answered == number,
            left_of(end),
        )
        return parse_credentials(answer.payload)

    def sync(self, timeout: Timeout = None) -> None:
        """Return once the server has handled all before [PKT-5] [CRED-3].

        Raises: as whoami; Disconnected if the server refused some of it.
        """
        self.whoami(timeout)

    def request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> bytes:
        """Ask whoever listens to a key; return the first answer's payload.

        The request's payload is the key for the answer, NUL, and *payload*.
        What else arrives meanwhile is kept for receive [CRED-10].
        Raises: as receive_where; TimeoutError also if nobody listens.
        """
        end = end_of(timeout)
        content = b"\0" + payload_bytes(payload)
        with private_key(self, left_of(end)) as reply_key:
            self.publish(key, reply_key + content, timeout=left_of(end))
            return self.receive_where(
                lambda received: received.key == reply_key, left_of(end)
            ).payload

    def reply(self, asked: Request, payload: Payload = b"") -> None:
        """Answer what parse_request, or requests, has made of a message."""
        self.publish(asked.reply_key, payload)

    # Sending and receiving, where _by is: until *end* at most

    def _explained(self, error: OSError) -> OSError:
        """Return the error that a user is told of, instead of the socket's."""
        if error.errno == errno.EBADF:
            return Disconnected("this client is closed")
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            return error
        return Disconnected(
            f"the server at {self.address} has closed the connection: it"
            " stopped, has too many clients, or refused this user, what was"
            " sent or a reader so slow; its log says why"
        )

    def _send(self, packet: bytes, flags: int = 0, end: End = None) -> None:
        """Send a packet, over a new connection if the old one is lost.

        Raises: PacketTooLarge [LIMIT-1] [CLIENT-3].
        """
        if len(packet) > self.packet_bytes_max and self.fileno() >= 0:
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes is above the limit of"
                f" {self.packet_bytes_max} bytes"
            )
        try:
            self._send_by(end, packet, flags)
        except Disconnected as lost:
            self._connect_again(lost, end, flags)
            self._send_by(end, packet, flags)

    def _send_by(self, end: End, packet: bytes, flags: int = 0) -> None:
        """Send a packet, with a larger send buffer if it needs one.

        Raises: TimeoutError at *end*; PacketTooLarge if the kernel has no
        such buffer [CLIENT-3] [CLIENT-6].
        """
        send = functools.partial(self.socket.send, packet)
        try:
            self._call_by(end, send, flags, select.POLLOUT)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise self._explained(error) from None
            self._raise_send_buffer(len(packet) + SOCKET_OVERHEAD_BYTES)
            self._send_by(end, packet, flags)

    def _receive_by(self, end: End, flags: int = 0) -> Received:
        """Return the next packet.  Raises: TimeoutError at *end*."""
        return self._call_by(end, self._receive_now, flags, select.POLLIN)

    def _call_by(
        self, end: End, call: Callable[[int], Result], flags: int, event: int
    ) -> Result:
        """Call what takes flags; at *end*, raise TimeoutError."""
        while end is not None and not flags & DONTWAIT:
            with contextlib.suppress(BlockingIOError):
                return call(flags | DONTWAIT)
            self._wait(event, end)
        return call(flags)

    def _wait(self, event: int, end: float) -> None:
        """Wait for an event of poll(2).  Raises: TimeoutError at *end*."""
        poll = select.poll()
        poll.register(self.socket, event)
        if not poll.poll(1000 * max(0.0, end - time.monotonic())):
            raise TimeoutError("the time is over")

    def _raise_send_buffer(self, size: int) -> None:
        """Have a send buffer of that size.  Raises: PacketTooLarge."""
        option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.socket.setsockopt(*option, (size + 1) // 2)  # the kernel doubles
        if self.socket.getsockopt(*option) < size:
            raise PacketTooLarge(
                f"a packet of {size - SOCKET_OVERHEAD_BYTES} bytes does not"
                " fit into the kernel's largest send buffer"
                " (net.core.wmem_max)"
            )

    def _receive_now(self, flags: int) -> Received:
        """Return the next packet from the socket [CLIENT-6] [CLIENT-5]."""
        buffer = self._buffer
        try:
            parts = self._split_large(flags) if self._is_large else None
            if not parts:
                size = self.socket.recv_into(buffer, 0, flags | TRUNC)
                if size > len(buffer):
                    raise PacketTooLarge(
                        f"a packet of {size} bytes was received and lost; the"
                        f" limit is {len(buffer)} bytes"
                    )
                self._is_large = size > LARGE_BYTES
                parts = buffer[:size].partition(b"\0")
            head, nul, payload = parts
            if not nul:
                if head:
                    raise malformed("a malformed packet", head)
                # [CLIENT-6] It has closed: none sends an empty packet
                raise BrokenPipeError(errno.EPIPE, "the end")
        except ConnectionResetError:
            return self._receive_now(flags)  # the last packets come next
        except OSError as error:
            raise self._explained(error) from None
        kind, key = parsed_heads[head]
        received: Received = new_tuple(kind, (key, payload))
        if self._answered != self._asked and is_answer(received):
            self._answered += not flags & PEEK
        return received

    def _split_large(self, flags: int) -> tuple[bytes, bytes, bytes] | None:
        """Receive a large packet, and return what partition would of it.

        The payload is copied only once: SO_PEEK_OFF has the kernel begin
        behind the head.  Where that is not known, or the next packet is no
        large one, return None.
        """
        wire, buffer = self.socket, self._buffer
        size = wire.recv_into(buffer, HEAD_BYTES_MAX, flags | PEEK | TRUNC)
        head, nul, _ = buffer[: min(size, HEAD_BYTES_MAX)].partition(b"\0")
        if not nul or not LARGE_BYTES < size <= len(buffer):
            return None
        payload, start = b"", len(head) + 1
        with contextlib.suppress(OSError):
            try:
                wire.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, start)
                payload = wire.recv(size, PEEK)
            finally:
                wire.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)
        if start + len(payload) != size:
            return None
        if not flags & PEEK:
            wire.recv_into(buffer, 1)
        return head, nul, payload

    # Connecting

    def _open(self, timeout: Timeout) -> socket.socket:
        """Return a socket that is connected to the right server."""
        wire = open_socket(self.address, timeout)
        option = (socket.SOL_SOCKET, socket.SO_PEERCRED)
        _, uid, _ = struct.unpack("iII", wire.getsockopt(*option, 12))
        if self.server_uid in (None, uid):
            return wire
        wire.close()
        what = f"the user {uid}, and not as {self.server_uid}"
        raise Disconnected(f"the bus runs as {what}")

    @contextlib.contextmanager
    def _saying_if_lost(self, end: End) -> Iterator[None]:
        """Connect again if the bus is lost, and say that it was."""
        try:
            yield
        except Disconnected as lost:
            self._connect_again(lost, end)
            raise Disconnected(
                f"the bus at {self.address} was lost, and is back: what was"
                " asked before must be asked again"
            ) from None

    def _connect_again(
        self, lost: Disconnected, end: End, flags: int = 0
    ) -> None:
        """Connect, subscribe and set modes as before; keep a Reconnected.

        Until then the old socket stays: the next call that needs a server
        meets its end, and tries again.
        Raises: *lost* if this client does not reconnect; TimeoutError at
        *end*; BlockingIOError with MSG_DONTWAIT; Disconnected if a server is
        there that cannot be used, or does not take what is subscribed.
        """
        if not self._epoll or self.socket.fileno() < 0:
            raise lost
        if not self._is_lost:
            self._is_lost = True
            self._epoll.unregister(self.socket)
            self._keep_the_rest()
            self._judge_loss()
        fresh = None
        while not fresh:
            self._wait_to_try(end, flags)
            try:
                fresh = self._open(0)
            except TimeoutError:
                pass  # it is busy
            except Disconnected as error:
                if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                    raise
        self.socket.close()
        self.socket = fresh
        self._epoll.register(fresh, select.EPOLLIN)
        self._is_lost = False
        self._answered = self._asked  # as far as they ever will be
        self._kept.append(Reconnected(b"", b""))
        self._restore()
        self._connected_at = time.monotonic()

    def _keep_the_rest(self) -> None:
        """Keep what the server sent before it closed [CLIENT-6]."""
        with contextlib.suppress(Disconnected, BlockingIOError):
            while True:
                with contextlib.suppress(PacketError, PacketTooLarge):
                    self._kept.append(self._receive_now(DONTWAIT))

    def _judge_loss(self) -> None:
        """Go on with longer pauses if this bus was lost soon, too.

        Raises: Disconnected if it twice refused what was sent at once.
        """
        seconds = time.monotonic() - self._connected_at
        if seconds > RECONNECT_SECONDS_MAX:
            self._pause = RECONNECT_SECONDS_MIN
        may_be_refused = bool(self._patterns or self._modes)
        is_refused = may_be_refused and seconds < REFUSED_SECONDS
        self._refusals = self._refusals + 1 if is_refused else 0
        if self._refusals == REFUSALS_MAX:
            self._refusals = 0
            raise Disconnected(
                f"the server at {self.address} has closed the connection each"
                " time after the same subscriptions: it refuses one of them"
            )

    def _wait_to_try(self, end: End, flags: int) -> None:
        """Return when it is time to try, and begin the next pause.

        Raises: TimeoutError at *end*; BlockingIOError with MSG_DONTWAIT.
        """
        seconds = self._next_try - time.monotonic()
        if seconds > 0:
            if flags & DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "no bus yet")
            left = left_of(end)
            if left is not None and left < seconds:
                time.sleep(left)
                raise TimeoutError("the time is over")
            time.sleep(seconds)
        pause = self._pause * random.uniform(0.5, 1)
        self._next_try = time.monotonic() + pause
        self._pause = min(2 * self._pause, RECONNECT_SECONDS_MAX)

    def _restore(self) -> None:
        """Subscribe and set modes as on the connection before.

        A server has some seconds to take that.  If it does not, this
        connection is given up, as the next call will find.
        """
        end = end_of(RECONNECT_SECONDS_MAX)
        try:
            for pattern in self._patterns.elements():
                self._send_by(end, b"SUB " + pattern)
            for mode in self._modes:
                self._send_by(end, b"CMSG " + mode)
        except (Disconnected, TimeoutError):
            self.socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def private_key(client: Client, timeout: Timeout) -> Iterator[bytes]:
    """Subscribe for a while to a new key that only this client can read.

    The server has handled all before, so that what is sent under it has room
    at once.
    Raises: as Client.whoami [CRED-4] [CRED-10].
    """
    key = client.whoami(timeout).path + b"/" + random_text()
    try:
        client.subscribe(key)
        yield key
    finally:
        with contextlib.suppress(Disconnected, BlockingIOError):
            client.unsubscribe(key, DONTWAIT)


# =============================================================================
# The client for asyncio
# =============================================================================

# Facts: a connect that does not wait fails at once where the server's queue
# of new connections is full, and no event tells when it is not: only trying
# again helps.  A packet is sent or received whole by one call that does not
# wait, so that a call that is cancelled while it waits has done nothing.

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

    # Each call tries at once, on a Client that does not wait.  Tasks that
    # wait for room share a future, which the loop sets when the descriptor
    # has room: then all try again.  While tasks wait for what comes, each for
    # a future of its own, the loop reads and hands over: an answer to who
    # asked that question, all else to the inbox, of which one receiver is
    # told.  What is sent may find the bus lost: then both happen at once.

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
            timeout=0,
        )
        self._client: Client | None = None
        self._calls = 0  # since other tasks had a turn
        self._room: Future[None] | None = None  # if anybody waits for it
        self._watched = -1  # the descriptor that had none
        # By the number of a question to whoami, or the reply key of a request
        self._questions: dict[int | bytes, Future[Received]] = {}
        self._answered = 0  # of those to whoami
        self._reply_keys = b""  # what they begin with
        self._requests = itertools.count()
        self._receivers: deque[Future[None]] = deque()
        self._inbox: deque[Received] = deque()
        self._inbox_bytes = 0

    def __repr__(self) -> str:
        inner = repr(self._client) if self._client else "not connected"
        return f"<sbus AsyncClient: {inner}>"

    async def connect(self) -> AsyncClient:
        """Connect, and return this client.

        It waits while the server's queue of new connections is full.
        Raises: AddressError; Disconnected if there is no server.
        """
        import asyncio

        pause = CONNECT_SECONDS_MIN
        while not self._client:
            try:
                self._client = self._new_client()
            except TimeoutError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, CONNECT_SECONDS_MAX)
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        return self

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncClient:
        """Return an iterator over what receive returns, without an end."""
        return self

    def close(self) -> None:
        """Leave the bus; calls that wait raise Disconnected [CONN-6]."""
        fd = self.fileno()
        if self._client and fd >= 0:
            self._fail_all(Disconnected("this client is closed"))
            self._wake_senders()
            self._loop.remove_reader(fd)
            self._client.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 unless connected."""
        return self._client.fileno() if self._client else -1

    @property
    def socket(self) -> socket.socket:
        """The socket.  Raises: Disconnected before connect."""
        return (self._client or not_connected()).socket

    async def subscribe(self, pattern: Text) -> None:
        """As Client.subscribe [SUB-1] [SUB-2]."""
        await self._send(Client.subscribe, pattern)

    async def unsubscribe(self, pattern: Text) -> None:
        """As Client.unsubscribe [UNSUB-1]."""
        await self._send(Client.unsubscribe, pattern)

    async def publish(self, key: Text, payload: Payload = b"") -> None:
        """As Client.publish, once the kernel has room for it [PUB-1]."""
        client = self._client or not_connected()
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            await self._give_turn()
        try:
            client.publish(key, payload, DONTWAIT)
            if client._kept:
                self._look_again()
        except BlockingIOError:
            await self._send(Client.publish, key, payload)

    async def control(self, key: Text, payload: Payload = b"") -> None:
        """As Client.control [CTL-1]."""
        await self._send(Client.control, key, payload)

    async def reply(self, asked: Request, payload: Payload = b"") -> None:
        """As Client.reply [PUB-1]."""
        await self.publish(asked.reply_key, payload)

    async def receive(self, timeout: Timeout = None) -> Received:
        """As Client.receive [CLIENT-6] [CLIENT-5]."""
        client = self._client or not_connected()
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            await self._give_turn()
        while not self._inbox:
            try:
                received = client.receive(None, DONTWAIT)
            except BlockingIOError:
                await self._wait_for_message(end_of(timeout))
            else:
                if type(received) is Message and not self._reply_keys:
                    return received
                self._hand_over(client, received)
        received = self._inbox.popleft()
        self._inbox_bytes -= kept_bytes(received)
        return received

    __anext__ = receive

    async def whoami(self, timeout: Timeout = None) -> Credentials:
        """As Client.whoami; several tasks may ask at once [CRED-12]."""
        end = end_of(timeout)
        await self._send(Client.control, WHOAMI, end=end)
        client = self._client or not_connected()
        answer = await self._answer(client._asked, end)
        return parse_credentials(answer.payload)

    async def sync(self, timeout: Timeout = None) -> None:
        """As Client.sync [PKT-5] [CRED-3]."""
        await self.whoami(timeout)

    async def request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> bytes:
        """As Client.request; any number may wait for their answers at once.

        The client stays subscribed to the keys of its answers, and drops
        those that come too late.
        """
        end = end_of(timeout)
        async with self._opening:
            if not self._reply_keys:
                path = (await self.whoami(left_of(end))).path
                reply_keys = path + b"/" + random_text() + b"/"
                await self.subscribe(reply_keys)
                self._reply_keys = reply_keys
        reply_key = self._reply_keys + b"%d" % next(self._requests)
        content = reply_key + b"\0" + payload_bytes(payload)
        await self._send(Client.publish, key, content, end=end)
        return (await self._answer(reply_key, end)).payload

    async def _give_turn(self) -> None:
        """Let other tasks run."""
        import asyncio

        self._calls = 0
        await asyncio.sleep(0)

    async def _in_time(self, waiting: Future[Result], end: End) -> Result:
        """Return what tasks wait for.  Raises: TimeoutError at *end*."""
        import asyncio

        await asyncio.wait([waiting], timeout=left_of(end))
        if not waiting.done():
            raise TimeoutError("the time is over")
        return waiting.result()

    # Waiting for room

    async def _send(
        self, call: Callable[..., None], *content: object, end: End = None
    ) -> None:
        """Call what sends, once there is room or it is time to connect."""
        client = self._client or not_connected()
        while True:
            with contextlib.suppress(BlockingIOError):
                call(client, *content, flags=DONTWAIT)
                return self._look_again()
            if not self._room:
                self._room = self._loop.create_future()
                self._watched = client.socket.fileno()
                seconds = client.retry_in()
                if seconds is None:
                    self._loop.add_writer(self._watched, self._wake_senders)
                else:
                    self._loop.call_later(seconds, self._wake_senders)
            await self._in_time(self._room, end)

    def _look_again(self) -> None:
        """Have those who wait look again, as the bus may have been lost."""
        self._wake_senders()
        if self._questions or self._receivers:
            self._loop.call_soon(self._read)

    def _wake_senders(self) -> None:
        """Let all who wait for room try again."""
        if self._room:
            self._loop.remove_writer(self._watched)
            self._room.set_result(None)
            self._room = None

    # Waiting for what comes

    async def _handed(self, waiting: Future[Result], end: End) -> Result:
        """Return what is handed over, for which the loop reads meanwhile."""
        self._loop.add_reader(self.fileno(), self._read)
        return await self._in_time(waiting, end)

    async def _answer(self, question: int | bytes, end: End) -> Received:
        """Return the answer to a question that was sent just now."""
        waiting: Future[Received] = self._loop.create_future()
        self._questions[question] = waiting
        try:
            return await self._handed(waiting, end)
        finally:
            self._questions.pop(question, None)

    async def _wait_for_message(self, end: End) -> None:
        """Wait until something is in the inbox."""
        while not self._inbox:
            waiting: Future[None] = self._loop.create_future()
            self._receivers.append(waiting)
            try:
                await self._handed(waiting, end)
            except BaseException:
                if waiting in self._receivers:
                    self._receivers.remove(waiting)
                elif self._inbox:
                    self._wake_receiver()  # it is for the next of us
                raise

    def _wake_receiver(self) -> None:
        """Tell the first who waits for it that something is in the inbox."""
        while self._receivers:
            waiting = self._receivers.popleft()
            if not waiting.done():
                return waiting.set_result(None)

    def _read(self) -> None:
        """Hand over what there is, as long as anybody waits for it."""
        client = self._client or not_connected()
        try:
            for _ in range(CALLS_PER_TURN):
                if not self._questions and not self._receivers:
                    if client.fileno() >= 0:
                        self._loop.remove_reader(client.fileno())
                    break
                self._hand_over(client, client.receive(None, DONTWAIT))
        except BlockingIOError:
            seconds = client.retry_in()
            if seconds is not None:
                self._loop.call_later(seconds, self._read)
        except Disconnected as error:
            self._fail_all(error)
        except (PacketError, PacketTooLarge) as error:
            if self._receivers:
                fail(error, self._receivers.popleft())
            else:
                fail(error, *self._questions.values())

    def _hand_over(self, client: Client, received: Received) -> None:
        """Give something to the task that it is for, or to the inbox."""
        if isinstance(received, Reconnected):
            lost = Disconnected("the bus was lost: ask again")
            fail(lost, *self._questions.values())
            self._wake_senders()
            self._answered = client._answered
        question: int | bytes = received.key
        if is_answer(received):
            self._answered += self._answered < client._asked
            question = self._answered
        answer = self._questions.pop(question, None)
        if answer and not answer.done():
            answer.set_result(received)
            return
        if self._reply_keys and received.key.startswith(self._reply_keys):
            return  # too late
        self._inbox.append(received)
        self._inbox_bytes += kept_bytes(received)
        self._wake_receiver()
        if self._inbox_bytes > KEPT_BYTES_MAX:
            fail(too_much(len(self._inbox)), *self._questions.values())

    def _fail_all(self, error: SbusError) -> None:
        """Have all tasks that wait for something to come raise an error."""
        fail(error, *self._questions.values(), *self._receivers)


def fail(error: SbusError, *waiting: Future[Any]) -> None:
    """Have tasks that wait raise an error."""
    for each in waiting:
        if not each.done():
            each.set_exception(type(error)(*error.args))


def not_connected() -> NoReturn:
    """Raise Disconnected."""
    raise Disconnected("not connected: use async with, or connect()")


# =============================================================================
# The command line: input and output
# =============================================================================

STATS = b"stats"
ANSWER_SECONDS = 10.0  # in which a server is to answer
PUBLISH_SECONDS = 60.0  # in which the bus is to take a message


class UsageError(SbusError):
    """A command line is wrong: the exit status is 2."""


def note(text: str) -> None:
    """Print a line to standard error."""
    print(f"sbus: {text}", file=sys.stderr, flush=True)


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


def write_line(*fields: bytes, at_once: bool = True) -> None:
    """Print a line, with tabs between its printable fields."""
    encoding = standard_output().encoding
    line = "\t".join([printable(field, encoding) for field in fields])
    write(f"{line}\n".encode(encoding), at_once)


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


def no_room(what: str, room: int) -> PacketTooLarge:
    """Return the error that tells that what was read is too large."""
    fits = f"the {room} bytes that fit with this key"
    return PacketTooLarge(f"{what} holds more than {fits}")


def given_payload(payload: str | None, room: int) -> bytes:
    """Return the payload that an argument gives, or standard input."""
    if payload not in (None, "-"):
        return os.fsencode(payload)
    with standard_input() as file:
        text = file.read(room + 1)
    if len(text) > room:
        raise no_room("standard input", room)
    return text


def input_lines(room: int) -> Iterator[bytes]:
    """Yield each line of standard input, without its line feed."""
    with standard_input() as file:
        lines = iter(functools.partial(file.readline, room + 2), b"")
        for number, line in enumerate(lines, 1):
            text = line[:-1] if line.endswith(b"\n") else line
            if len(text) > room:
                raise no_room(f"line {number} of standard input", room)
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

    run: Callable[[Options], None]  # its docstring is help
    example: str
    arguments: tuple[Argument, ...]
    has_address: bool = True  # one, by -a


def command(
    example: str, *arguments: Argument, has_address: bool = True
) -> Callable[[Callable[[Options], None]], Command]:
    """Return what makes a command of a function."""
    return lambda run: Command(run, example, arguments, has_address)


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, or an option."""
    return names, options


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


def flag(name: str, help: str) -> Argument:
    """Return an option that is there or not."""
    return argument(name, action="store_true", help=help)


def timeout(
    seconds: float = ANSWER_SECONDS, what: str = "for an answer"
) -> Argument:
    """Return the option for how long to wait for the server."""
    help = f"wait up to S seconds {what} ({seconds:g})"
    return argument(
        "--timeout", metavar="S", type=amount_of, help=help, default=seconds
    )


PATTERNS = argument(
    "pattern",
    metavar="PATTERN",
    nargs="*",
    help="the keys to choose, where '*' is what stands between two '/' and a"
    " '/' at the end is all below: 'a/*' selects a/b but not a/b/c, 'a/'"
    " selects both, none at all selects all but secrets; quote it",
)
KEY = argument(
    "key",
    metavar="KEY",
    help="the routing key that subscribers' patterns select, such as a/b",
)
PAYLOAD = argument(
    "payload",
    metavar="PAYLOAD",
    nargs="?",
    help="'-' or no PAYLOAD is standard input as it is, a final line feed"
    " included; write -- before a PAYLOAD that begins with '-'",
)
INPUT = argument(
    "payload", metavar="PAYLOAD", nargs="?", help="'-' is standard input"
)
LINES = flag(
    "--lines", "publish each line of standard input, without its line feed"
)
COUNT = argument(
    "--count", metavar="N", type=count_of, help="end after N messages"
)
DURATION = argument(
    "--timeout", metavar="S", type=amount_of, help="end after S seconds"
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


def option_parsers(
    commands: Mapping[str, Command],
) -> tuple[OptionParser, dict[str, OptionParser]]:
    """Return the parser of the command line, and those of the commands."""
    parser = OptionParser(
        prog="sbus",
        description="Use a message bus.",
        epilog=MAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"sbus {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(*ADDRESS[0], **ADDRESS[1])
    parsers = parser.add_subparsers(
        metavar="COMMAND", dest="command", required=True
    )
    for name, command in commands.items():
        about = (command.run.__doc__ or "").replace("\n    ", "\n")
        first = about.partition("\n")[0].rstrip(".")
        own = parsers.add_parser(
            name,
            help=first[:1].lower() + first[1:],
            description=about,
            epilog=f"example:\n  sbus {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(run=command.run, has_address=command.has_address)
        address = [ADDRESS] * command.has_address
        for names, options in (*address, *command.arguments):
            own.add_argument(*names, **options)
    return parser, parsers.choices


# =============================================================================
# The command line: commands
# =============================================================================


def open_bus(
    options: Options, timeout: Timeout = None, kind: type[Client] = Client
) -> Client:
    """Return a client of the bus that -a or the environment names.

    Raises: UsageError; as Client.
    """
    limit = os.environ.get("SBUS_MAX_PACKET") or str(PACKET_BYTES_MAX)
    if not re.fullmatch("[1-9][0-9]{0,9}", limit):
        raise UsageError(f"SBUS_MAX_PACKET is {limit!r}, and no number")
    address = getattr(options, "address", None)
    return kind(address, packet_bytes_max=int(limit), timeout=timeout)


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

    What an excluded pattern selects, or is too large, does not count.  What
    was written meanwhile is printed before it waits for more.
    Raises: SbusError if the time is over before the count is reached.
    """
    end = end_of(seconds)
    heard = 0
    while count is None or heard < count:
        if left_of(end) == 0:
            if count is None:
                return
            raise SbusError(f"the time is over: heard {heard} of {count}")
        try:
            received = bus.receive(None, DONTWAIT)
        except BlockingIOError:
            wait_to_print(bus, end)
        except PacketTooLarge as error:
            note(f"{error}; SBUS_MAX_PACKET raises it")
        else:
            if isinstance(received, Message) and not any(
                matches(pattern, received.key) for pattern in excluded
            ):
                heard += 1
                yield received


def wait_to_print(bus: Client, end: End) -> None:
    """Print what is written, and wait until a message comes, or the end.

    Raises: BrokenPipeError if nobody reads standard output; SbusError.
    """
    write(b"")
    poll = select.poll()
    poll.register(bus, select.POLLIN)
    poll.register(standard_output(), 0)  # tells when its reader has gone
    left = left_of(end)
    ready = dict(poll.poll(None if left is None else 1000 * left))
    if ready and bus.fileno() not in ready:
        raise BrokenPipeError


@command(
    "sub 'sensors/*/temp'",
    PATTERNS,
    flag("--raw", "print the payloads alone, as they are"),
    COUNT,
    DURATION,
)
def sub(options: Options) -> None:
    r"""Print what is published, a line each: its key, a tab, its payload.

    Bytes that are no printable text are escaped as in a Python bytes literal:
    a line feed is \n, a backslash \\.  With --count and --timeout, the exit
    status is 1 if the time is over before the count is reached.
    """
    with open_bus(options) as bus:
        subscribe(bus, options.pattern)
        try:
            for message in messages(bus, options.count, options.timeout):
                if options.raw:
                    write(message.payload, at_once=False)
                else:
                    write_line(*message, at_once=False)
        finally:
            write(b"")


@command(
    "pub sensors/1/temp 21.5",
    KEY,
    PAYLOAD,
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


@command("whoami", timeout())
def whoami(options: Options) -> None:
    """Print the credentials by which the server knows this client.

    They are as in !/cred/GID/UID/PID: what begins so and goes on with '/' is
    a private key.
    """
    with open_bus(options, options.timeout) as bus:
        write_line(bus.whoami(options.timeout).path)


@command(
    "control '!/cred/whoami'",
    argument("key", metavar="KEY", help="such as '!/cred/whoami'"),
    INPUT,
    timeout(),
)
def control(options: Options) -> None:
    """Send a control message to the server, and wait until it is handled.

    Print the answer, if there is one: its key, a tab, its payload.
    """
    key = os.fsencode(options.key)
    with open_bus(options, options.timeout) as bus:
        room = payload_room(bus, b"CMSG", key)
        bus.control(key, given_payload(options.payload or "", room))
        bus.sync(options.timeout)
        is_known = key in {WHOAMI, STATS, *MODES}
        with contextlib.suppress(TimeoutError):
            while True:
                write_line(*bus.receive(0))
                is_known = True
    if not is_known:
        what = f"the server does not answer {options.key!r}"
        raise SbusError(f"{what}, and this client does not know it")


@command("ping", timeout())
def ping(options: Options) -> None:
    """Print how long the server takes to answer a question."""
    with open_bus(options, options.timeout) as bus:
        start = time.perf_counter()
        bus.sync(options.timeout)
        milliseconds = 1000 * (time.perf_counter() - start)
        line = f"{bus.address}: 1 round trip: {milliseconds:.3f} ms"
        write_line(os.fsencode(line))


@command("stats", timeout())
def stats(options: Options) -> None:
    """Print what the server has counted, as a JSON object.

    That is for this client; root and the bus owner are told of the clients of
    each user as well, since the first of those that are connected came.
    """
    with open_bus(options, options.timeout) as bus:
        write(ask(bus, STATS, options.timeout) + b"\n")


def ask(bus: Client, key: bytes, timeout: float) -> bytes:
    """Return the payload of the server's answer to a control message.

    Raises: SbusError if it gives none [CTL-2]; TimeoutError.
    """
    bus.control(key)
    bus.sync(timeout)
    try:
        return bus.receive_where(lambda got: is_answer(got, key), 0).payload
    except TimeoutError:
        what = f"the server at {bus.address} does not answer"
        raise SbusError(f"{what} {key.decode('latin-1')!r}") from None


@command(
    "request services/time",
    KEY,
    INPUT,
    timeout(),
)
def request(options: Options) -> None:
    """Publish a request, and print what the first who answers it says."""
    key = os.fsencode(options.key)
    with open_bus(options, options.timeout) as bus:
        room = payload_room(bus, b"MSG", key)
        payload = given_payload(options.payload or "", room)
        write_line(bus.request(key, payload, options.timeout))


@command(
    "reply services/time date",
    argument("pattern", metavar="PATTERN", help="the keys to answer"),
    argument(
        "run_for_each",
        metavar="COMMAND",
        nargs="...",
        help="and its arguments",
    ),
)
def reply(options: Options) -> None:
    """Answer each request under the keys that a pattern selects.

    Run a command with the request as its standard input and its key in
    SBUS_KEY; what it prints is the answer.
    """
    if not options.run_for_each:
        raise UsageError("give a COMMAND that answers")
    with open_bus(options) as bus:
        subscribe(bus, [options.pattern])
        for asked in requests(messages(bus, None, None)):
            bus.reply(asked, output_of(options.run_for_each, asked))


def output_of(words: Sequence[str], asked: Request) -> bytes:
    """Return what a command prints.  Raises: SbusError if it cannot run."""
    import subprocess  # no other command needs it

    environment = {**os.environb, b"SBUS_KEY": asked.key}
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            words, input=asked.payload, stdout=pipe, env=environment
        )
    except OSError as error:
        raise SbusError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        note(f"{words[0]}: status {done.returncode}")
    return done.stdout


COMMANDS: Mapping[str, Command] = {
    "sub": sub,
    "pub": pub,
    "whoami": whoami,
    "ping": ping,
    "request": request,
    "reply": reply,
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
    parser, _ = option_parsers(commands)
    options = Options()
    try:
        parser.parse_args(arguments, options)
        options.run(options)
        return 0
    except BrokenPipeError:  # whoever read our output has had enough
        pass
    except UsageError as error:
        parser.error(str(error))
    except Disconnected as error:
        elsewhere = error.errno not in (None, errno.EACCES)
        note(f"{error}{' with -a' * (elsewhere and options.has_address)}")
    except TimeoutError as error:
        note(f"{error}: the server hangs, is stopped, or makes us wait")
    except (SbusError, OSError) as error:
        note(str(error))
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
