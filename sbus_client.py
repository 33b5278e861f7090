#!/usr/bin/env python3
"""sbus_client: talk to an sbus server, from Python or from a shell.

    from sbus_client import Client

    with Client() as bus:
        bus.subscribe("sensors/*/temp")
        bus.publish("sensors/1/temp", b"21.5")
        for message in bus:
            print(message.key, message.payload)

This file needs CPython 3.9 or later on Linux and nothing else, not even the
server's file: copy it.  The command `sbus` has more; it is in tools/.  An id
in brackets, as in [CLIENT-6], names a rule of the specification in spec/.

Licence: ISC, see LICENSE.

From a shell:

    sbus_client.py sub PATTERN...         print messages: key, tab, payload
    sbus_client.py pub KEY [PAYLOAD]      publish; without, standard input
    sbus_client.py request KEY [PAYLOAD]  print the first answer
    sbus_client.py whoami                 print the credentials of this client

A '*' in a pattern matches up to the next '/', and a final '/' all that follows
it: 'a/*' selects a/b but not a/b/c, 'a/' selects both.  Without a pattern, sub
prints all keys but secrets.  The PAYLOAD - is standard input.  Write -- before
words that begin with '-'.  SBUS_ADDRESS is the default of -a.  The exit status
is 1 for an error of the bus, 2 for a wrong command line.  The command sbus, in
tools/, does more.
"""

from __future__ import annotations

if __name__ == "__main__":  # until options are parsed, Ctrl-C ends in silence
    import _signal as signal  # type: ignore  # quick: signal loads others

    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import enum
import errno
import functools
import os
import random
import re
import select
import socket
import stat
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, cast

__version__ = "0.3.0"
# fmt: off
__all__ = [
    "AddressError", "AsyncClient", "Client", "ControlMessage", "Credentials",
    "Disconnected", "Message", "PacketError", "PacketTooLarge", "Reconnected",
    "Request", "RequestFailed", "SbusError", "TimedOut", "default_address",
    "matches", "owner_of", "parse_request",
]
# fmt: on


# ==== 1. Errors ==============================================================


class SbusError(Exception):
    """The base of all errors that this file raises on purpose."""


class AddressError(SbusError, ValueError):
    """An address is malformed."""


class Disconnected(SbusError, ConnectionError):
    """There is no server (*errno* is that of connect(2)), or it has left."""


class PacketError(SbusError, ValueError):
    """A server would refuse a key or pattern, or sent a malformed packet."""


class PacketTooLarge(SbusError, ValueError):
    """A packet does not fit: nothing was sent, or a received one is lost."""


class TimedOut(SbusError, TimeoutError):
    """The time of a call is over: it has sent or received nothing."""


class RequestFailed(SbusError):
    """The answer to a request is that it failed, with this text."""


def malformed(thing: str, text: bytes) -> PacketError:
    """Return the error that shows what a server has sent."""
    return PacketError(f"the server sent {thing}: {text[:80]!r}")


# ==== 2. Packets =============================================================

PACKET_BYTES_MAX = 409_600
KEY_BYTES_MAX = 4_096
SEGMENTS_MAX = 64
PATTERNS_MAX = 1_024
HEADS_MAX = 1_024  # that a client remembers, of packets that it publishes
WHOAMI = b"!/cred/whoami"
STATS = b"stats"
MODES = b"""blocking/soft/queue blocking/soft/discard blocking/soft/block
blocking/soft/error blocking/hard/discard blocking/hard/block
blocking/hard/error order/queue order/stack order/random
echo/on echo/off""".split()
CONTROL_KEYS = (*MODES, STATS, WHOAMI)


class Message(NamedTuple):
    """What a client published: a routing key and a payload."""

    key: bytes
    payload: bytes


class ControlMessage(NamedTuple):
    """A packet of the server itself: a routing key and a payload.

    As a tuple it equals a Message of the same fields: look at the type.
    """

    key: bytes
    payload: bytes


class Reconnected(ControlMessage):
    """A notice of the client itself: it was without a bus, and is back.

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
        try:
            text = text.encode("utf-8", "surrogateescape")  # as os.fsencode
        except UnicodeEncodeError:
            raise PacketError(f"{text!r} is not UTF-8") from None
    elif not isinstance(text, bytes):
        kind = type(text).__name__
        raise TypeError(f"a key or pattern is str or bytes, not {kind}")
    if b"\0" in text:
        raise PacketError(f"{quoted(text)}: a key cannot hold a NUL byte")
    return text


def payload_bytes(payload: Payload) -> bytes:
    """Return a payload as bytes.  Raises: TypeError if it has none."""
    try:
        return bytes(memoryview(payload))
    except TypeError:
        kind = type(payload).__name__
        raise TypeError(f"a payload is bytes, not {kind}: encode it") from None


def control_packet(key: Text, payload: Payload) -> bytes:
    """Return a control packet [CTL-1].

    Raises: TypeError; PacketError if no server knows the key [CTL-2].
    """
    content = payload_bytes(payload)
    key = to_bytes(key)
    if key not in CONTROL_KEYS:
        keys = b" ".join(CONTROL_KEYS).decode()
        raise PacketError(f"{quoted(key)} is none of {keys}")
    return b"CMSG " + key + (b"\0" + content if content else b"")


class Buffer(bytearray):
    """What receives packets in a Python without mmap: its slices are bytes."""

    def __getitem__(self, part: Any) -> Any:
        return bytes(super().__getitem__(part))


def publish_head(key_bytes_max: int, segments_max: int, key: Text) -> bytes:
    """Return what a publish packet has before its payload [CLIENT-1]."""
    return b"MSG " + checked(key, key_bytes_max, segments_max) + b"\0"


def checked(text: Text, key_bytes_max: int, segments_max: int) -> bytes:
    """Return a key or pattern as bytes, if a server takes it [KEY-4]."""
    text = to_bytes(text)
    fault = ""
    if len(text) > key_bytes_max:
        fault = f"{len(text)} bytes, over {key_bytes_max}"
    elif (count := text.count(b"/") + 1) > segments_max:
        fault = f"{count} segments, over {segments_max}"
    elif b"!" in text:
        rest = RUNS.sub(b"", text) if FIELDS.match(text) else text
        if b"!" in rest.split(b"/"):
            fault = "a segment '!', which is reserved for secrets"
    if fault:
        raise PacketError(f"{quoted(text)} has {fault}")
    return text


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


def quoted(text: bytes) -> str:
    """Return the beginning of a key or pattern, for an error."""
    return f"'{printable(text[:80])}'"


# ==== 3. Patterns, credentials and requests ==================================

SECRET = b"!/cred/"
FIELDS = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")
RUNS = re.compile(rb"(?:^|(?<=/))" + FIELDS.pattern)
FAILED = b"/failed"  # ends the key of an answer that tells of a failure
OVERFLOW_ID = b"65534"  # the kernel's stand-in for an id of another namespace


def matches(pattern: Text, key: Text) -> bool:
    """Return whether a pattern selects a key that this client received.

    A program with several patterns asks which of them a message is for.  A
    secret key is for secret patterns alone [CRED-10], where an empty field
    is any number: the server has let only our own pass [CRED-6].
    """
    key = to_bytes(key)
    pattern = to_bytes(pattern)
    if pattern.startswith(SECRET) != key.startswith(SECRET):
        return False

    form = re.escape(pattern).replace(rb"\*", rb"[^/]*(?=/|\Z)")  # [MATCH-2]
    if pattern[-1:] in (b"", b"/"):
        form += b".*"  # [MATCH-3] [MATCH-4]
    if pattern.startswith(SECRET):
        form = RUNS.sub(any_for_empty, form)
    return bool(re.fullmatch(form, key, re.DOTALL))  # [MATCH-1]


def any_for_empty(run: re.Match[bytes]) -> bytes:
    """Return the fields of a secret pattern, any number for an empty one."""
    return b"!/cred/%b/%b/%b/" % tuple(f or b"[0-9]*" for f in run.groups())


def doubt_about(pattern: bytes) -> str:
    """Return why a pattern may select less than was meant, or nothing."""
    if re.search(rb"\*[^/*]", pattern):  # [MATCH-6]
        return "selects nothing: '*' ends its segment"
    if re.search(rb"(^|/)[+#](/|$)|(^|[/.])>$", pattern):  # as elsewhere
        return "has no wildcard: '*' is one segment, and a final '/' all"
    return ""


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

    def failed(self) -> Request:
        """Return the request to reply to with the text of a failure.

        Then its caller gets RequestFailed.
        """
        return self._replace(reply_key=self.reply_key + FAILED)


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
        credentials = owner_of(answer.payload + b"/x")
        if credentials.path == answer.payload:
            return credentials
    raise malformed("malformed credentials", answer.payload)


def random_part() -> bytes:
    """Return a '/', and what nobody can guess, for a private key."""
    return b"/" + os.urandom(12).hex().encode("ascii")


def parse_request(message: Received) -> Request | None:
    """Return what a message asks for, or None if it is no request.

    Its answer goes to a private key, which any server takes that has the usual
    limits [KEY-4].  This does not prove who asks: anybody
    may name the key of somebody else [CRED-10].

        for message in bus:
            if asked := parse_request(message):
                bus.reply(asked, b"answer")
    """
    reply_key, _, payload = message.payload.partition(b"\0")
    with contextlib.suppress(PacketError):
        checked(reply_key + FAILED, KEY_BYTES_MAX, SEGMENTS_MAX)
        owner_of(reply_key)
        return Request(message.key, payload, reply_key)
    return None


# ==== 4. Addresses and time ==================================================

NOT_YOURS = "{}: not yours alone; name another"
ABSTRACT = "/dev/unix/abstract/"
INHERITED = "/dev/fd/"
ABSTRACT_BYTES = 108
PATH_BYTES_MAX = 107
Address = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
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
    for directory in user_directories(uid)[:2]:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            is_safe = status.st_mode & ~0o7755 == stat.S_IFDIR
            if is_safe and status.st_uid == uid and os.path.isabs(directory):
                return f"{directory}/sbus.socket"

    return checked_address(f"/tmp/sbus-{uid}/sbus.socket")


def user_directories(uid: int) -> tuple[str, str, str]:
    """Return where the default socket of a user other than root may be."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return runtime, f"/run/user/{uid}", f"/tmp/sbus-{uid}"


def checked_address(address: str) -> str:
    """Return an address, unless it is our default and another's directory.

    Raises: AddressError.
    """
    uid, directory = os.getuid(), os.path.dirname(address)
    if directory == f"/tmp/sbus-{uid}":
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(directory)
            is_private = status.st_mode & ~0o7700 == stat.S_IFDIR
            if status.st_uid != uid or not is_private:
                raise AddressError(NOT_YOURS.format(directory))
    return address


def check_server(wire: socket.socket, address: str) -> None:
    """Raise AddressError if a default address has led to another user.

    Since its directory was looked at, another may have taken its place.
    """
    uid = os.getuid()
    peer = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    owner = int.from_bytes(peer[4:8], sys.byteorder)
    defaults = [f"{path}/sbus.socket" for path in user_directories(uid)]
    if uid and owner not in (0, uid) and address in defaults:
        raise AddressError(NOT_YOURS.format(f"the server at {address}"))


def socket_name(address: str) -> bytes:
    """Return an address as the kernel knows it, or AddressError [ADDR-4]."""
    if address.startswith(ABSTRACT):
        digits = address[len(ABSTRACT) :]
        if re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
            return bytes.fromhex(digits).ljust(ABSTRACT_BYTES, b"\0")
        form = "2 to 216 hexadecimal digits, an even number that begins with"
        raise AddressError(f"{address!r}: after {ABSTRACT} come {form} 00")

    name = os.fsencode(address)
    if 1 <= len(name) <= PATH_BYTES_MAX and b"\0" not in name:
        return name
    form = f"a path has 1 to {PATH_BYTES_MAX} bytes, none NUL"
    raise AddressError(f"{address!r}: {form}")


def open_socket(address: str) -> socket.socket:
    """Return a socket that is connected to a server.

    Raises: AddressError; Disconnected, with EAGAIN if the server is busy.
    """
    if address.startswith(INHERITED):
        return inherited_socket(address[len(INHERITED) :])

    try:
        # At each try, as another user may have made the directory meanwhile
        name = socket_name(checked_address(address))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            wire.setblocking(False)
            wire.connect(name)
            wire.setblocking(True)
            check_server(wire, address)
            return socket.socket(fileno=wire.detach())
    except OSError as error:
        raise no_bus(address, error) from None


def inherited_socket(number: str) -> socket.socket:
    """Return a connected socket; AddressError leaves it to the caller."""
    wire = None
    try:
        if not number.isdecimal():
            raise ValueError("not a number")
        wire = socket.socket(fileno=int(number))
        if (wire.family, wire.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise ValueError("not a Unix-domain SEQPACKET socket")
        wire.getpeername()
        return wire
    except (ValueError, OverflowError, OSError) as error:
        if wire:
            wire.detach()
        cause = getattr(error, "strerror", None) or error
        raise AddressError(f"descriptor {number}: {cause}") from None


def no_bus(address: str, failed: OSError) -> Disconnected:
    """Return the error that tells why connect(2) failed, and what to do."""
    cause = {
        errno.ENOENT: "nothing is there",
        errno.ECONNREFUSED: "no server listens there",
        errno.EPROTOTYPE: "another kind of socket is there",
    }.get(failed.errno or 0, str(failed.strerror))
    text = f"{cause}; start the server, or give its address"
    if failed.errno == errno.EACCES:
        text = "its server does not let this user in: see its -g, -o and -u"
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(address).st_mode):
            text = "no socket is there; give the address of a server"
    error = Disconnected(f"no bus at {address}: {text}")
    error.errno = failed.errno
    return error


# ==== 5. What both clients share: a connection that never waits ==============
#
# How Client and AsyncClient share their code: what may have to wait is a
# coroutine of Connection, and suspends in _sleep and _turn alone.  AsyncClient
# awaits it.  In Client these two never suspend, since _sleep itself waits; so
# run() finishes a coroutine in one step, as if it were a function.  All else
# never waits: a method whose name begins with _try returns False instead.
# A call that waits has a waiter, and whoever has something for it wakes it.

KEPT_BYTES_MAX = 1 << 26  # of messages that came before an answer
KEPT_OVERHEAD_BYTES = 256  # what Python needs for each of them
ASK_SECONDS = 5.0  # in which somebody is to answer a request
STATS_SECONDS = 10.0  # in which the server is to answer
# Between tries to connect, half of it at least: a try costs some 10 us where
# nothing is there, but a server logs each client that it turns away
RECONNECT_SECONDS = 0.5
RESTORE_SECONDS = 0.01  # until there may be room for more subscriptions
LARGE_BYTES = 1 << 16  # to copy more takes longer than some calls
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
CLOSED = "this client is closed"
NOT_CONNECTED = "not connected: use async with, or connect()"
ASK_AGAIN = "the bus at {} was lost before it answered: ask again"
TOO_LARGE = "a packet of {} bytes is above the limit of {} bytes"
NO_BUFFER = "{} bytes: above the largest send buffer (net.core.wmem_max)"
LOST_PACKET = "a packet of {} bytes was received and lost; the limit is {}"
ANOTHERS = "{} is another's secret: this client is {}"
NAMELESS = "no secrets and no requests: the server knows this client as {}"
GOODBYE = """the server at {} closed the connection: it stopped, or refused \
this client; its log says why, and counts or names pid {}"""
BEHIND = "; this client had not read all that came for {:.1f} s"
OTHER_LOOP = """this client belongs to another event loop: make one in each"""
FORKED = "this client belongs to process {}, which forked: make one in each"
READ, WRITE = select.POLLIN, select.POLLOUT
# Plain numbers: to combine those of the module takes longer than send
SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
TRUNC = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)


class State(enum.Enum):
    """What a connection has.

    NEW becomes UP by connecting.  With *reconnect*, UP becomes LOST when the
    bus has gone; LOST becomes RESTORING when another lets the client in; and
    that UP once it is told all subscriptions and modes, or else LOST again.
    """

    NEW = "not connected yet"
    UP = "connected"
    LOST = "without a bus"
    RESTORING = "subscribing again"
    CLOSED = "closed"


UP = State.UP  # before Python 3.12, to look it up takes long


class Answer:
    """What a question waits for: a packet, or why none will come."""

    outcome: Received | str = ""
    waiter: Any = None  # of the call that waits for it


class Asked:
    """What waits for an answer: questions to the server, and requests."""

    def __init__(self) -> None:
        # In their order, each with its control key; None if control has asked
        self.questions: deque[tuple[bytes, Answer | None]] = deque()
        self.requests: dict[bytes, Answer] = {}  # by reply key
        self.reply_keys = b""  # what all of those begin with


class Connection:
    """What Client and AsyncClient share."""

    _why_closed = CLOSED  # if the constructor fails

    def __init__(
        self,
        address: Address | None = None,
        *,
        timeout: Timeout = None,
        reconnect: bool = False,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        key_bytes_max: int = KEY_BYTES_MAX,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        if socket.socket.__module__ != "socket":
            raise SbusError("replaced sockets, as gevent's, do not work")
        if address is None:  # [ADDR-1]
            address = os.environ.get("SBUS_ADDRESS") or default_address()
        self.address = os.fsdecode(address)
        self.reconnect = reconnect
        if reconnect and self.address.startswith(INHERITED):
            raise AddressError("a descriptor cannot reconnect")
        if min(packet_bytes_max, key_bytes_max, segments_max) < 1:
            raise ValueError("a limit is a whole number from 1")
        self.packet_bytes_max = packet_bytes_max
        self.key_bytes_max = key_bytes_max
        self.segments_max = segments_max

        head_of = functools.partial(publish_head, key_bytes_max, segments_max)
        self._head_of = functools.lru_cache(HEADS_MAX)(head_of)
        self._make_socket()

        # The lock is for all but a first try to publish.  Its owner may take
        # it again, as a signal handler that closes may interrupt the owner
        self._lock = threading.RLock()
        self._bus = State.NEW  # see _state
        self._why_closed = ""
        self._pid = os.getpid()
        self._own_path = b""  # what whoami would say, as far as is known

        self._kept: deque[Received] = deque()  # until a call wants it
        self._kept_bytes = 0
        self._asked = Asked()
        self._waiting: dict[Any, Answer | int] = {}  # waiters, and for what
        self._receivers: deque[Any] = deque()  # those for messages, in line

        # What another bus has to be told, and the way to it
        self._told: Counter[bytes] = Counter()  # packets, and how often
        self._unsent: deque[bytes] = deque()  # while RESTORING
        self._greeting: Answer | None = None  # of a bus that is found again
        self._is_switching = False  # the descriptor
        self._next_try = 0.0  # to connect, by the monotonic clock
        self._read_all_at = time.monotonic()  # that had come
        self._has_read = False  # a message, since then
        connections.add(self)
        self._begin(timeout)

    def _make_socket(self) -> None:
        """Make what packets are sent and received by."""
        # The socket keeps its descriptor when it is connected to another bus
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(None)
        self._fd = self.socket.fileno()
        # [CLIENT-5] The largest packet fits; unused, it takes no memory
        size = max(self.packet_bytes_max, LARGE_BYTES)
        try:
            import mmap

            self._buffer: Any = mmap.mmap(-1, size)
        except ImportError:
            self._buffer = Buffer(size)

    # ---- What each client does in its own way

    def _begin(self, timeout: Timeout) -> None:
        """Prepare to wait; connect, or keep the timeout for connect."""

    def _waiter(self) -> Any:
        """Return a waiter, which is hashable."""

    def _release(self, waiter: Any) -> None:
        """Take back a waiter, which nobody wakes any more."""

    def _wake(self, waiter: Any) -> None:
        """Have the call of a waiter look again."""

    async def _sleep(self, waiter: Any, event: int, left: Timeout) -> None:
        """Wait to be woken, for an event of the socket, or to try again."""

    async def _turn(self) -> None:
        """Let other tasks run now and then."""

    def _changed(self) -> None:
        """Note a change of the state, or of whether anything is kept."""

    # ---- The state

    @property
    def _state(self) -> State:
        # Closing is a mark of its own that nothing takes back, since a signal
        # handler may close in the midst of any other change
        return State.CLOSED if self._why_closed else self._bus

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return bool(self._why_closed)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} at {self.address!r}: {self._state.value}>"

    def retry_in(self) -> float | None:
        """Return the seconds to the next try, or None while there is a bus."""
        if self._bus is UP or self._state in (State.NEW, State.CLOSED):
            return None
        is_fresh = self._bus is State.RESTORING
        return RESTORE_SECONDS if is_fresh else left_of(self._next_try)

    def close(self) -> None:
        """Leave the bus, which still delivers what was published [CONN-6].

        A call that waits in another thread or task raises Disconnected.
        """
        with self._lock:
            if not self._why_closed:
                self._why_closed = CLOSED
                self._changed()
                self._wake_all()
                if not self._is_switching:  # else _try_open closes it
                    self._close_socket()

    def _close_socket(self) -> None:
        if self._pid == os.getpid():  # or our parent would lose it, too
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _check_open(self) -> None:
        """Raise Disconnected unless there is a bus, or one is looked for."""
        if self._why_closed:
            raise Disconnected(self._why_closed) from None
        if self._bus is State.NEW:
            raise Disconnected(NOT_CONNECTED) from None

    # ---- Waiting

    async def _wait(
        self, event: int, end: End, text: str, answer: Answer | None = None
    ) -> None:
        """Wait until the call may go on, or it is time to try to connect.

        It waits for an answer; or READ for a message, or WRITE for room.
        Raises: TimedOut, which says *text*, at *end*; Disconnected.
        """
        left = left_of(end)
        if left == 0:
            raise self._timed_out(text)
        waiter = self._waiter()
        try:
            with self._lock:
                # First, or a signal handler that closes now would wake nobody
                self._waiting[waiter] = answer or event
                self._check_open()
                if answer:
                    answer.waiter = waiter
                elif event == READ:
                    self._receivers.append(waiter)
                may_receive = event == READ and self._kept
            if not (answer.outcome if answer else may_receive):
                await self._sleep(waiter, event, left)
        finally:
            with self._lock:
                self._waiting.pop(waiter, None)
                if waiter in self._receivers:
                    self._receivers.remove(waiter)
            self._release(waiter)

    def _timed_out(self, text: str) -> TimedOut:
        """Return the error that tells what has not happened in time."""
        has_none = self.reconnect and self.retry_in() is not None
        reason = "there is no bus" if has_none else text
        return TimedOut(f"{reason} at {self.address}")

    def _wake_receiver(self) -> None:
        """Wake the call that waits longest for a message, with the lock."""
        if self._receivers:
            self._wake(self._receivers.popleft())

    def _wake_all(self) -> None:
        for waiter in list(self._waiting):
            self._wake(waiter)

    def _give(self, answer: Answer | None, outcome: Received | str) -> None:
        """Give an answer to the call that waits for it, if one still does."""
        if answer and not answer.outcome:
            answer.outcome = outcome
            if answer.waiter in self._waiting:  # else its call is awake
                self._wake(answer.waiter)

    # ---- Packets: what a server would refuse is told before it is sent

    def _pattern(self, text: Text) -> bytes:
        """Return a pattern as bytes, unless it is another's secret [CRED-4].

        Until whoami has told our credentials, this process's own numbers
        count, unless the server is in another process namespace.
        """
        pattern = checked(text, self.key_bytes_max, self.segments_max)
        start = max(0, self._own_path.rfind(SECRET))
        numbers = self._own_path[start:].split(b"/")[2:]
        fields = FIELDS.match(pattern, start)
        if fields and numbers and pattern.rfind(SECRET) == start:
            path = self._own_path.decode()
            if any(f and f != n for f, n in zip(fields.groups(), numbers)):
                raise PacketError(ANOTHERS.format(quoted(pattern), path))
            if numbers[2] == b"0" or OVERFLOW_ID in numbers[:2]:  # [CRED-8]
                raise PacketError(NAMELESS.format(path))
        return pattern

    def _subscription(self, text: Text) -> bytes:
        """Return a subscribe packet [SUB-1]; warn of a doubtful pattern."""
        pattern = self._pattern(text)
        if doubt := doubt_about(pattern):
            warnings.warn(f"{quoted(pattern)} {doubt}", stacklevel=3)
        return b"SUB " + pattern

    def _answer(self, asked: Request, payload: Payload) -> bytes:
        """Return the packet of an answer, whose key never comes again."""
        head = self._head_of.__wrapped__(asked.reply_key)
        return head + payload_bytes(payload)

    def _publication(self, key: Text, payload: Payload) -> bytes:
        """Return a publish packet [PUB-1]."""
        return self._head_of(to_bytes(key)) + payload_bytes(payload)

    # ---- Sending

    def _try_publish(self, key: Text, payload: Payload) -> bool:
        """Publish if all is as usual; without the lock, since it is quick."""
        try:
            packet: bytes = self._head_of(key) + payload
            if len(packet) <= self.packet_bytes_max and self._bus is UP:
                self.socket.send(packet, SEND)
                return True
        except (OSError, TypeError, BufferError, BytesWarning):
            pass  # try with more care; the last is what python3 -bb raises
        return False

    def _try_send(self, packet: bytes, answer: Answer | None) -> bool:
        """Send a packet; what another bus has to know may wait for one."""
        word, _, rest = packet.partition(b" ")
        key = rest.partition(b"\0")[0]
        is_mode = word == b"CMSG" and key in MODES
        is_remembered = is_mode or word in (b"SUB", b"UNSUB")
        with self._lock:
            self._check_open()
            if len(packet) > self.packet_bytes_max:
                text = TOO_LARGE.format(len(packet), self.packet_bytes_max)
                raise PacketTooLarge(text)
            if word == b"SUB" and self._pattern_count() >= PATTERNS_MAX:
                raise PacketError(f"over {PATTERNS_MAX} patterns")
            if not self._try_write(packet, is_remembered):
                return False
            if word == b"SUB":
                self._told[packet] += 1
            elif word == b"UNSUB":
                self._told -= Counter([b"SUB " + key])
            elif is_mode:
                self._told.pop(packet, None)
                self._told[packet] = 1  # the last sent is the last
            elif word == b"CMSG":
                self._asked.questions.append((key, answer))
        return True

    def _pattern_count(self) -> int:
        counts = self._told.items()
        return sum(n for packet, n in counts if packet.startswith(b"SUB "))

    def _try_write(self, packet: bytes, is_remembered: bool) -> bool:
        """Give a packet to the kernel, or leave it to the next connection."""
        while self._bus is UP or not is_remembered:
            if self._bus is not UP and not self._try_connect():
                return False
            try:
                self._write(packet)
                return True
            except BlockingIOError:
                return False
            except OSError as error:
                self._lose(error)
        if self._bus is State.RESTORING:
            self._unsent.append(packet)
        return True

    def _write(self, packet: bytes) -> None:
        """Send a packet, with a larger send buffer if need be [CLIENT-3]."""
        option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
        try:
            self.socket.send(packet, SEND)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            size = len(packet) + SOCKET_OVERHEAD_BYTES
            # The kernel doubles it
            self.socket.setsockopt(*option, (size + 1) // 2)
            if self.socket.getsockopt(*option) < size:
                raise PacketTooLarge(NO_BUFFER.format(len(packet))) from None
            self._write(packet)

    # ---- Receiving

    def _take(self) -> Received | None:
        """Return the first that is kept, if anything is, and remove it."""
        with self._lock:
            self._check_open()
            if not self._kept:
                return None
            received = self._kept.popleft()
            self._kept_bytes -= len(received.payload) + KEPT_OVERHEAD_BYTES
            if not self._kept:
                self._changed()
            return received

    def _keep(self, received: Received) -> None:
        """Keep something for receive, and wake a call that waits for it."""
        self._kept.append(received)
        self._kept_bytes += len(received.payload) + KEPT_OVERHEAD_BYTES
        self._changed()
        self._wake_receiver()
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._wake_all()

    def _try_step(self) -> bool:
        """Read a packet, for whomever it is, or go on to find a bus."""
        with self._lock:
            if self._bus is not UP:
                self._check_open()
                return self._try_connect()
            try:
                if received := self._read():
                    self._keep(received)
            except BlockingIOError:
                return False
            except OSError as error:
                self._lose(error)
            return True

    def _read(self) -> Received | None:
        """Return the next packet, or None if it was an answer [CLIENT-6].

        Raises: PacketError; PacketTooLarge; OSError, also at the end.
        """
        buffer = self._buffer
        try:
            size = self.socket.recv_into(buffer, 0, TRUNC)
        except ConnectionResetError:
            return self._read()  # the last packets come next

        if size < LARGE_BYTES:
            # [CLIENT-2] What follows the first NUL is payload
            head, nul, payload = buffer[:size].partition(b"\0")
            if not nul:
                if not size:  # no server sends an empty packet
                    raise BrokenPipeError(errno.EPIPE, "the end")
                raise malformed("a malformed packet", head)
        elif size <= len(buffer):  # which takes long to copy twice
            end = max(0, buffer.find(b"\0", 0, size))
            head, payload = buffer[:end], buffer[end + 1 : size]
        else:
            raise PacketTooLarge(LOST_PACKET.format(size, len(buffer)))

        if head[:4] == b"MSG ":
            self._has_read = True
            message = new_tuple(Message, (head[4:], payload))
            if not self._asked.reply_keys or not self._answer_request(message):
                return message
        elif head[:5] == b"CMSG ":
            control = ControlMessage(head[5:], payload)
            if not self._answer_question(control):
                return control
        else:
            raise malformed("a malformed packet", head)
        return None

    def _answer_request(self, message: Message) -> bool:
        """Give a message to its request; return whether it is an answer."""
        if not message.key.startswith(self._asked.reply_keys):
            return False
        reply_key = message.key.removesuffix(FAILED)
        self._give(self._asked.requests.pop(reply_key, None), message)
        return True

    def _answer_question(self, received: ControlMessage) -> bool:
        """Give a control message to its question; return if it is for one."""
        key = received.key
        if key not in [asked for asked, _ in self._asked.questions]:
            return False
        while self._asked.questions[0][0] != key:  # a server may not know it
            self._asked.questions.popleft()
        _, answer = self._asked.questions.popleft()
        if key == WHOAMI:
            with contextlib.suppress(PacketError):
                self._own_path = credentials_of(received).path
        if not answer:  # control has asked
            return False
        if answer is self._greeting:
            self._keep(Reconnected(b"", b""))
        self._give(answer, received)
        return True

    # ---- Losing the bus, and finding another

    def _become(self, state: State) -> None:
        self._bus = state
        self._changed()
        self._wake_all()

    def _lose(self, error: OSError) -> None:
        """Begin to have no bus, and keep what it has left; or raise.

        Every error of the socket comes here; of a closed one it says so.
        """
        if error.errno not in GONE:
            raise error
        self._check_open()
        if not self.reconnect:
            text = GOODBYE.format(self.address, self._pid)
            behind = time.monotonic() - self._read_all_at
            if self._has_read and behind > 1:
                text += BEHIND.format(behind)
            raise Disconnected(text) from None

        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(PacketError, PacketTooLarge):
                    if received := self._read():
                        self._keep(received)
        asked = [answer for _, answer in self._asked.questions]
        for answer in (*asked, *self._asked.requests.values()):
            self._give(answer, ASK_AGAIN.format(self.address))
        # Another bus may know this client by other credentials
        if self._asked.reply_keys:
            del self._told[b"SUB " + self._asked.reply_keys]
        self._asked = Asked()
        self._greeting = Answer()
        self._become(State.LOST)

    def _try_connect(self) -> bool:
        """Take a step towards another bus; return whether it is there.

        Raises: Disconnected if none may come.
        """
        with self._lock:
            if self._bus is State.LOST and not self._try_open():
                return False
            try:
                while self._unsent:
                    self._write(self._unsent[0])
                    self._unsent.popleft()
                if self._greeting:
                    self._write(b"CMSG " + WHOAMI)
                    self._asked.questions.append((WHOAMI, self._greeting))
            except BlockingIOError:
                return False
            except OSError as error:
                self._lose(error)
                return False
            self._become(UP)
            return True

    def _try_open(self) -> bool:
        """Connect the socket, if it is time, and list what to tell."""
        now = time.monotonic()
        if now < self._next_try:
            return False
        self._next_try = now + RECONNECT_SECONDS * random.uniform(0.5, 1)
        try:
            fresh = open_socket(self.address)
        except Disconnected as error:
            may_come = error.errno in (errno.ENOENT, errno.ECONNREFUSED)
            if error.errno == errno.EAGAIN or (self.reconnect and may_come):
                return False
            raise

        peer = fresh.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        # A pid of 0 is of a server in another process namespace
        is_ours = any(peer[:4]) and not self.address.startswith(INHERITED)
        if is_ours and not self._own_path:
            ids = (os.getegid(), os.geteuid(), self._pid)
            self._own_path = b"!/cred/%d/%d/%d" % ids
        self._unsent = deque(self._told.elements())

        self._is_switching = True  # a handler must not free the number now
        if not self._why_closed:
            os.dup2(fresh.fileno(), self._fd, inheritable=False)
        self._is_switching = False
        fresh.close()
        self._bus = State.RESTORING
        if self._why_closed:
            self._close_socket()
        return True

    # ---- Calls: coroutines that suspend in _sleep and _turn alone

    async def _connect(self, timeout: Timeout) -> None:
        """Connect for the first time; with *reconnect*, perhaps later."""
        end = end_of(timeout)
        with self._lock:
            self._bus = State.LOST
            self._check_open()
        try:
            while not self._try_connect():
                if self.reconnect:
                    self._greeting = Answer()
                    return
                await self._wait(READ, end, "too many clients connect at once")
        except BaseException:
            with self._lock:
                self._bus = State.NEW
            raise

    async def _send(
        self, packet: bytes, timeout: Timeout, answer: Answer | None = None
    ) -> None:
        """Send a packet once there is room, or a bus."""
        end = end_of(timeout)
        text = "the server takes nothing (a slow reader, or it is stopped)"
        while not self._try_send(packet, answer):
            await self._wait(WRITE, end, text)

    async def _receive(self, timeout: Timeout) -> Received:
        """Return what comes next."""
        end = end_of(timeout)
        try:
            while not (received := self._take()):
                await self._go_on(end, "nothing came", None)
            return received
        except BaseException:
            with self._lock:
                if self._kept:  # this call may have been woken for it
                    self._wake_receiver()
            raise

    async def _ask(self, key: bytes, timeout: Timeout) -> Received:
        """Return the server's answer to a question."""
        end, answer = end_of(timeout), Answer()
        await self._send(b"CMSG " + key, timeout, answer)
        return await self._outcome(answer, end, "the server does not answer")

    async def _request(
        self, key: Text, payload: Payload, timeout: Timeout
    ) -> bytes:
        """Return the payload of the first answer to a request."""
        end, answer = end_of(timeout), Answer()
        content = b"\0" + payload_bytes(payload)
        while not (keys := self._asked.reply_keys) or (
            b"SUB " + keys not in self._told
        ):
            path = credentials_of(await self._ask(WHOAMI, timeout)).path
            with self._lock:  # for another thread may ask first, too
                keys = self._asked.reply_keys or path + random_part() + b"/"
                self._asked.reply_keys = self._pattern(keys)
            if b"SUB " + keys not in self._told:  # by another call, meanwhile
                await self._send(b"SUB " + keys, left_of(end))
        reply_key = keys[:-1] + random_part()
        content = reply_key + content
        self._asked.requests[reply_key] = answer
        try:
            if not self._try_publish(key, content):
                await self._send(self._publication(key, content), left_of(end))
            name = quoted(to_bytes(key))
            seconds = round(timeout or 0, 2)
            text = f"nobody answered {name} within {seconds:g} s"
            reply = await self._outcome(answer, end, text)
            if reply.key != reply_key:
                raise RequestFailed(printable(reply.payload or b"it failed"))
            return reply.payload
        finally:
            self._asked.requests.pop(reply_key, None)

    async def _outcome(self, answer: Answer, end: End, text: str) -> Received:
        """Return an answer; keep all else that comes before it."""
        while not answer.outcome:
            if self._kept_bytes > KEPT_BYTES_MAX:
                count = f"{len(self._kept):,} messages"
                text = f"{count} came before an answer: receive them first"
                raise SbusError(text)
            await self._go_on(end, text, answer)
        if isinstance(answer.outcome, str):
            raise Disconnected(answer.outcome)
        return answer.outcome

    async def _go_on(self, end: End, text: str, answer: Answer | None) -> None:
        """Take a step, or wait until one can be taken."""
        # An answer to a question that was just sent can hardly be there yet
        is_too_early = answer and not answer.waiter and left_of(end) != 0
        if not is_too_early and self._try_step():
            await self._turn()
        else:
            self._read_all_at, self._has_read = time.monotonic(), False
            await self._wait(READ, end, text, answer)
            self._read_all_at = time.monotonic()  # nothing came until then


# A child process would read, from the same socket, what is for its parent

connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def close_after_fork() -> None:
    """Close the clients of the parent in a child process."""
    for client in connections:
        client._lock = threading.RLock()  # a thread that is gone may own it
        if not client._why_closed:
            client._why_closed = FORKED.format(client._pid)
            client.socket.close()


os.register_at_fork(after_in_child=close_after_fork)


# ==== 6. The client ==========================================================

Result = TypeVar("Result")


def run(call: Coroutine[Any, Any, Result]) -> Result:
    """Return what a coroutine returns that never suspends."""
    try:
        call.send(None)
    except StopIteration as end:
        return cast(Result, end.value)
    raise AssertionError("it suspended")


class Bell:
    """The waiter of a thread: a descriptor that anybody may make readable.

    To ring takes no lock, so a signal handler may do it, whatever the thread
    is about to do.
    """

    fds: tuple[int, ...] = ()  # none, if a signal ends the constructor

    def __init__(self, wire_fd: int) -> None:
        self.fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_rung = False
        # Three ways to wait for it: alone, or with an event of the socket
        self._polls = {event: select.poll() for event in (0, READ, WRITE)}
        for event, poll in self._polls.items():
            poll.register(self.fds[0], select.POLLIN)
            if event:
                poll.register(wire_fd, event)

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            os.write(self.fds[1], b"\1")

    def silence(self) -> None:
        # A handler that rings in the midst of this is not heard; but the mark
        # goes last, so that the bell can be rung again
        if self._is_rung:
            with contextlib.suppress(BlockingIOError):
                os.read(self.fds[0], 64)
            self._is_rung = False

    def wait(self, event: int, seconds: Timeout) -> None:
        """Wait for the bell, or for an event of the socket."""
        # poll(2) takes 24 days at most
        limit = None if seconds is None else 1000 * min(seconds, 1e6)
        self._polls[event].poll(limit)


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
    raises TimedOut, which is a TimeoutError, has sent or received nothing.

    A client is a context manager and an iterator over what it receives.  It
    has fileno() for select, poll and epoll, and *socket* for all else.  Any
    thread may do anything, and a signal handler may close.  Only the process
    that made a client can use it, not one that fork(2) makes.

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
    Raises: TimedOut; AddressError; Disconnected if there is no server.
    """

    # A client has one bell, at which its calls wait, and one more for each
    # further thread that waits at the same time

    def _begin(self, timeout: Timeout) -> None:
        self._idle_bells = [Bell(self._fd)]
        self._epoll: select.epoll | None = None  # for fileno
        self._kept_bell: Bell | None = None  # in it, rung while any is kept
        self._is_watched = False  # in it: the socket
        try:
            run(self._connect(timeout))
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
        run(self._send(self._subscription(pattern), timeout))

    def unsubscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """Take back one subscription to an identical pattern [UNSUB-1]."""
        run(self._send(b"UNSUB " + self._pattern(pattern), timeout))

    def publish(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Publish a message [PUB-1]."""
        if not self._try_publish(key, payload):
            run(self._send(self._publication(key, payload), timeout))

    def control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Send a control message to the server [CTL-1]."""
        run(self._send(control_packet(key, payload), timeout))

    def receive(self, timeout: Timeout = None) -> Received:
        """Return the next message or control message.

        Raises: TimedOut; Disconnected when all is read [CLIENT-6].
        """
        try:
            with self._lock:
                received = self._take() if self._kept else self._read()
        except OSError:
            received = None  # _receive meets it again
        return received or run(self._receive(timeout))

    def whoami(self, timeout: Timeout = None) -> Credentials:
        """Return the credentials that the server knows this client by.

        It keeps for receive what else arrives [CRED-12] [CLIENT-8].
        Raises: TimedOut; SbusError if that is too much; Disconnected, even
        with *reconnect*, if the bus is lost meanwhile: ask again.
        """
        return credentials_of(run(self._ask(WHOAMI, timeout)))

    def sync(self, timeout: Timeout = None) -> None:
        """Return once the server has handled all sent so far [PKT-5] [CRED-3].

        Raises: as whoami; Disconnected if the server refused some of it.
        """
        self.whoami(timeout)

    def stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """Return the counts of the server, by the names of [CTL-5].

        Raises: as whoami; TimedOut also if this server has no counts.
        """
        import json

        return dict(json.loads(run(self._ask(STATS, timeout)).payload))

    def request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = ASK_SECONDS
    ) -> bytes:
        """Publish a request; return the payload of the first answer.

        The request's payload is the key for the answer, NUL, and *payload*.
        This client stays subscribed to the keys of its answers, and drops an
        answer that comes too late [CRED-10].
        Raises: as whoami; TimedOut also if nobody answers.
        """
        return run(self._request(key, payload, timeout))

    def reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Answer a parsed request, unless no server takes its reply key."""
        with contextlib.suppress(PacketError):
            run(self._send(self._answer(asked, payload), timeout))

    def fileno(self) -> int:
        """Return a descriptor that is readable if receive has something.

        It stays the same until the client is closed; then it is -1.  While
        there is no bus it is quiet: see retry_in.
        """
        with self._lock:
            if self._why_closed:
                return -1
            if not self._epoll:
                self._kept_bell = Bell(self._fd)
                self._epoll = select.epoll()
                self._epoll.register(self._kept_bell.fds[0], select.EPOLLIN)
                self._changed()
            return self._epoll.fileno()

    def _changed(self) -> None:
        if not (self._epoll and self._kept_bell):
            return
        if not self._kept:
            self._kept_bell.silence()
        if self._kept or self._why_closed:  # last: a handler may just close
            self._kept_bell.ring()
        has_bus = self._state is UP
        if has_bus != self._is_watched:
            self._is_watched = has_bus
            with contextlib.suppress(OSError):  # a handler may close just now
                if has_bus:
                    self._epoll.register(self._fd, select.EPOLLIN)
                else:
                    self._epoll.unregister(self._fd)

    def _waiter(self) -> Bell:
        try:
            return self._idle_bells.pop()
        except IndexError:
            return Bell(self._fd)

    def _release(self, waiter: Bell) -> None:
        waiter.silence()
        self._idle_bells.append(waiter)

    def _wake(self, waiter: Bell) -> None:
        waiter.ring()

    async def _sleep(self, waiter: Bell, event: int, left: Timeout) -> None:
        pause = self.retry_in()
        if pause is None:
            waiter.wait(event, left)
        else:
            waiter.wait(0, pause if left is None else min(left, pause))


# ==== 7. The client for asyncio ==============================================

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

    # The waiter of a task is a future.  As long as any task waits for a packet
    # the loop reads for all of them, from one reader.  The loop has but a weak
    # reference to a client, so that one which a program drops is closed

    def _begin(self, timeout: Timeout) -> None:
        self._timeout = timeout
        self._loop: Any = None  # once it is connected
        self._watched: set[int] = set()  # events that the loop looks for
        self._calls = 0  # since other tasks had a turn

    async def connect(self) -> AsyncClient:
        """Connect, and return this client.  Raises: as Client."""
        import asyncio  # which takes long, and others do without

        if self._state in (State.NEW, State.CLOSED):
            self._loop = asyncio.get_running_loop()
            await self._connect(self._timeout)
        return self

    __aenter__ = connect

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._why_closed:
            self.close()

    def __aiter__(self) -> AsyncClient:
        """Return an iterator over what receive returns, without an end."""
        return self

    async def subscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """As Client.subscribe [SUB-1] [SUB-2]."""
        await self._send(self._subscription(pattern), timeout)

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
        if not self._try_publish(key, payload):
            await self._send(self._publication(key, payload), timeout)

    async def control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.control [CTL-1]."""
        await self._send(control_packet(key, payload), timeout)

    async def receive(self, timeout: Timeout = None) -> Received:
        """As Client.receive [CLIENT-6] [CLIENT-5]."""
        await self._turn()
        try:
            received = self._take() if self._kept else self._read()
        except OSError:
            received = None  # _receive meets it again
        return received or await self._receive(timeout)

    __anext__ = receive

    async def whoami(self, timeout: Timeout = None) -> Credentials:
        """As Client.whoami; several tasks may ask at once [CRED-12]."""
        return credentials_of(await self._ask(WHOAMI, timeout))

    async def sync(self, timeout: Timeout = None) -> None:
        """As Client.sync [PKT-5] [CRED-3]."""
        await self.whoami(timeout)

    async def stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """As Client.stats [CTL-5]."""
        import json

        return dict(json.loads((await self._ask(STATS, timeout)).payload))

    async def request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = ASK_SECONDS
    ) -> bytes:
        """As Client.request; any number may wait for their answers at once."""
        return await self._request(key, payload, timeout)

    async def reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.reply [PUB-1]."""
        with contextlib.suppress(PacketError):
            await self._send(self._answer(asked, payload), timeout)

    async def _turn(self) -> None:
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            import asyncio

            self._calls = 0
            await asyncio.sleep(0)

    def _waiter(self) -> Any:
        import asyncio

        if asyncio.get_running_loop() is not self._loop:
            raise SbusError(OTHER_LOOP)
        return self._loop.create_future()

    def _wake(self, waiter: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    async def _sleep(self, waiter: Any, event: int, left: Timeout) -> None:
        self._watch(event)
        late = 1e9 if left is None else left
        timer = self._loop.call_later(late, self._wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    # ---- What the loop does for all tasks that wait

    def _watch(self, event: int) -> None:
        """Have the loop tell of an event, or without a bus when to try."""
        pause = self.retry_in()
        if pause is not None:
            event = 0
        if event not in self._watched:
            self._watched.add(event)
            weak = weakref.ref(self)
            if event == READ:
                self._loop.add_reader(self._fd, on_event, weak, event)
            elif event == WRITE:
                self._loop.add_writer(self._fd, on_event, weak, event)
            else:
                self._loop.call_later(pause, on_event, weak, event)

    def _unwatch(self, *events: int) -> None:
        for event in self._watched.intersection(events):
            self._watched.remove(event)
            if event == READ:
                self._loop.remove_reader(self._fd)
            elif event == WRITE:
                self._loop.remove_writer(self._fd)

    def _changed(self) -> None:
        if self._state is not UP:
            self._unwatch(READ, WRITE)

    def _is_awaited(self) -> bool:
        """Return whether a task waits for a packet."""
        asks = self._asked.requests or any(a for _, a in self._asked.questions)
        may_keep = self._kept_bytes <= KEPT_BYTES_MAX
        return bool(self._receivers or asks and may_keep)

    def _on_event(self, event: int) -> None:
        """Read for all, or wake those who wait for room or a bus."""
        if event != READ or not self._is_awaited():
            self._unwatch(event)
            for waiter, awaited in list(self._waiting.items()):
                if awaited == event or not event:
                    self._wake(waiter)
            return
        try:
            for _ in range(CALLS_PER_TURN):
                if not (self._is_awaited() and self._try_step()):
                    break
        except (PacketError, PacketTooLarge) as error:
            waiter = next(iter(self._receivers or self._waiting), None)
            if waiter and not waiter.done():
                waiter.set_exception(error)
        except (SbusError, OSError):
            self._wake_all()  # each meets the error for itself


def on_event(weak: Callable[[], AsyncClient | None], event: int) -> None:
    """Pass on what the loop tells, unless the client has been dropped."""
    if client := weak():
        client._on_event(event)


# ==== 8. The command line ====================================================

Options = argparse.Namespace


def note(text: object, program: str = "sbus_client.py") -> None:
    """Print a remark on standard error, if anything can be printed there.

    What a terminal would obey is escaped.
    """
    chars = (c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    try:
        if sys.stderr:
            print(f"{program}: {''.join(chars)}", file=sys.stderr, flush=True)
    except OSError:
        discard_output(2)


def discard_output(descriptor: int) -> None:
    """Lead an output that cannot be written to nowhere.

    Python writes at exit what is left, and would fail once more.
    """
    with contextlib.suppress(OSError):  # there may be no /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def show(fields: Sequence[bytes], is_raw: bool = False) -> None:
    """Print fields, with tabs between, or the last one as it is."""
    line = "\t".join(map(printable, fields)).encode() + b"\n"
    sys.stdout.buffer.write(fields[-1] if is_raw else line)
    sys.stdout.flush()


def key_and_payload(words: list[bytes], default: bytes) -> list[bytes]:
    """Return a key, and a payload or the standard input that it names."""
    if not 1 <= len(words) <= 2:
        refuse("give a KEY and at most one PAYLOAD, in quotes")
    key, payload = [*words, default][:2]
    return [key, sys.stdin.buffer.read() if payload == b"-" else payload]


def sub(bus: Client, options: Options, *patterns: bytes) -> None:
    """Print each message as a line: its key, a tab, its payload."""
    for pattern in patterns or [""]:
        bus.subscribe(pattern)
    heard = 0
    while heard != options.count:
        try:
            received = bus.receive(left_of(options.end))
        except TimeoutError:
            if options.count:
                count = f"heard {heard} of {options.count}"
                raise SbusError(f"out of time: {count}") from None
            return
        if type(received) is Message:
            heard += 1
            show(received, options.raw)


def pub(bus: Client, options: Options, key: bytes, payload: bytes) -> None:
    """Publish, and wait until the server has handled it."""
    bus.publish(key, payload, left_of(options.end))
    bus.sync(left_of(options.end))


def request(bus: Client, options: Options, key: bytes, payload: bytes) -> None:
    """Publish a request, and print the payload of the first answer."""
    show([bus.request(key, payload, left_of(options.end))], options.raw)


def whoami(bus: Client, options: Options, *_: bytes) -> None:
    """Print the credentials by which the server knows this client."""
    show([bus.whoami(left_of(options.end)).path])


COMMANDS: Any = {"sub": sub, "pub": pub, "request": request, "whoami": whoami}
SECONDS = {"pub": 60.0, "request": ASK_SECONDS, "whoami": 10.0}
PAYLOADS = {"pub": b"-", "request": b""}  # if none is given


def refuse(message: str) -> NoReturn:
    """End with the exit status 2 for a wrong command line."""
    if message.startswith("unrecognized arguments: -"):
        message += " (write -- before what begins with '-')"
    note(f"{message}; --help lists the options")
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Answers a wrong option with one line, and prints help like others."""

    error = staticmethod(refuse)  # argparse calls it

    def _print_message(self, message: str, file: Any = None) -> None:
        sys.stdout.write(message)
        sys.stdout.flush()


def docstring(path: str, start: str = "") -> str:
    """Return the docstring of a file, or of what begins with a text in it.

    `python -OO` has left it out of what it runs.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return text[text.index(start) :].split('"""')[1]


def parse(arguments: list[str]) -> Options:
    """Return what a command line asks for; options may stand anywhere."""
    # With a width of its own it needs no shutil, which a small Python lacks
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=78)
    about = __doc__ or docstring(__file__)
    parser = Parser(description=about, formatter_class=form)
    add = parser.add_argument
    add("command", choices=COMMANDS, metavar="COMMAND", help="see above")
    add("words", nargs="*", metavar="WORD", help="of the command")
    add("--version", action="version", version=__version__)
    add("-a", "--address", help="a path, /dev/unix/abstract/HEX, /dev/fd/N")
    add("-t", "--timeout", type=float, help="end after so many seconds")
    add("-n", "--count", type=int, help="sub: end after so many messages")
    add("--raw", action="store_true", help="sub, request: payloads alone")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_intermixed_args(arguments[:cut])
    options.words += arguments[cut + 1 :]
    options.timeout = options.timeout or SECONDS.get(options.command)
    return options


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        if not sys.stdout:
            raise SbusError("standard output is closed")
        options = parse(sys.argv[1:])
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, handler)
        words = list(map(os.fsencode, options.words))
        if options.command in PAYLOADS:
            words = key_and_payload(words, PAYLOADS[options.command])
        # Also where warnings are to be errors, in programs
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda text, *_: note(text)
        options.end = end_of(options.timeout)
        with Client(options.address, timeout=options.timeout) as bus:
            COMMANDS[options.command](bus, options, *words)
        return 0
    except KeyboardInterrupt:
        return 130
    except (SbusError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            note(error)
        discard_output(1)
        return 2 if isinstance(error, AddressError) else 1


if __name__ == "__main__":
    sys.exit(main())
