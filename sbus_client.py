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
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, cast

try:
    from mmap import mmap
except ImportError:  # a small Python
    mmap = None  # type: ignore[assignment, misc]

__version__ = "0.3.0"
# fmt: off
__all__ = [
    "AddressError", "AsyncClient", "Client", "ControlMessage", "Credentials",
    "Disconnected", "DoubtfulPattern", "Message", "PacketError",
    "PacketTooLarge", "Reconnected", "Request", "RequestFailed", "SbusError",
    "TimedOut", "default_address", "matches", "owner_of", "parse_request",
]
# fmt: on


# ==== 1. Errors ==============================================================


class SbusError(Exception):
    """The base of all errors that this file raises on purpose."""


class AddressError(SbusError, ValueError):
    """An address is malformed."""


class Disconnected(SbusError, ConnectionError):
    """There is no server (*errno* is that of connect(2)), or it has left."""

    def __init__(self, *texts: str, errno: int | None = None) -> None:
        super().__init__(*texts)
        self.errno = errno


class PacketError(SbusError, ValueError):
    """A key or pattern is malformed, or a packet that a server sent."""


class PacketTooLarge(SbusError, ValueError):
    """A packet does not fit: nothing was sent, or a received one is lost."""


class TimedOut(SbusError, TimeoutError):
    """The time of a call is over: it has sent or received nothing."""


class RequestFailed(SbusError):
    """The answer to a request is that it failed, with this text."""


class DoubtfulPattern(SbusError, UserWarning):
    """A warning: a pattern may select less than was meant.

    Where Python makes an error of a warning, nothing was sent.
    """


def malformed(thing: str, text: bytes) -> PacketError:
    """Return the error that shows what a server has sent."""
    return PacketError(f"the server sent {thing}: {text[:80]!r}")


# ==== 2. Packets =============================================================

PACKET_BYTES_MAX = 409_600
KEY_BYTES_MAX = 4_096
SEGMENTS_MAX = 64
WHOAMI = b"!/cred/whoami"
STATS = b"stats"
MODES = b"""blocking/soft/queue blocking/soft/discard blocking/soft/block
blocking/soft/error blocking/hard/discard blocking/hard/block
blocking/hard/error order/queue order/stack order/random
echo/on echo/off""".split()
CONTROL_KEYS = (*MODES, STATS, WHOAMI)
# The first word of each kind of packet
SUBSCRIBE, UNSUBSCRIBE = b"SUB ", b"UNSUB "
PUBLISH, CONTROL = b"MSG ", b"CMSG "
# A secret key begins with a run !/cred/G/U/P/.  Behind a bridge it has several
# in a row, as in !/cred/1/2/3/!/cred/4/5/6/x
SECRET = b"!/cred/"
FIELDS = re.compile(rb"!/cred/([0-9]*)/([0-9]*)/([0-9]*)/")  # a run
RUN = re.compile(rb"(?:^|(?<=/))" + FIELDS.pattern)  # each run of a key


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

    The new bus is told all subscriptions and modes before anything else.  The
    client has missed what others published meanwhile, and what it sent last
    may be lost.  The fields are empty.
    """


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
    except (TypeError, ValueError):  # the latter of a view that was released
        kind = type(payload).__name__
        raise TypeError(f"a payload is bytes, not {kind}: encode it") from None


def publish_head(key_bytes_max: int, segments_max: int, key: Text) -> bytes:
    """Return what a publish packet has before its payload [CLIENT-1]."""
    return PUBLISH + checked(key, key_bytes_max, segments_max) + b"\0"


def checked(text: Text, key_bytes_max: int, segments_max: int) -> bytes:
    """Return a key or pattern as bytes, if a server takes it [KEY-4]."""
    text = to_bytes(text)
    fault = ""
    if len(text) > key_bytes_max:
        fault = f"{len(text)} bytes, over {key_bytes_max}"
    elif (count := text.count(b"/") + 1) > segments_max:
        fault = f"{count} segments, over {segments_max}"
    elif b"!" in text:
        is_secret = FIELDS.match(text)
        rest = RUN.sub(b"", text) if is_secret else text
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

PATH = re.compile(rb"(?:!/cred/[0-9]{1,10}/[0-9]{1,10}/[0-9]{1,10}/)+")
FAILED = b"/failed"  # ends the key of an answer that tells of a failure


def matches(pattern: Text, key: Text) -> bool:
    """Return whether a pattern selects a key that this client received.

    A program with several patterns asks which of them a message is for.  A
    secret key is for secret patterns alone [CRED-10], where an empty field
    is any number: the server has let only our own pass [CRED-6].
    """
    return selection_of(pattern)(to_bytes(key)) is not None


# The cache of `re` has 512, and a client may have twice as many patterns
# Typed, as python3 -bb lets nobody compare str and bytes
@functools.lru_cache(4_096, typed=True)
def selection_of(pattern: Text) -> Callable[[bytes], Any]:
    """Return what returns None for a key that a pattern does not select."""
    pattern = to_bytes(pattern)
    form = re.escape(pattern).replace(rb"\*", rb"[^/]*(?=/|\Z)")  # [MATCH-2]
    if pattern[-1:] in (b"", b"/"):
        form += b".*"  # [MATCH-3] [MATCH-4]
    if pattern.startswith(SECRET):
        form = RUN.sub(any_for_empty, form)
    else:
        form = b"(?!" + SECRET + b")" + form
    return re.compile(form, re.DOTALL).fullmatch  # [MATCH-1]


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
    path = PATH.match(key)
    if not path or path.end() == len(key):
        raise PacketError(f"not a private key: {key[:80]!r}")
    gid, uid, pid = map(int, path[0].split(b"/")[-4:-1])
    return Credentials(gid, uid, pid, path[0][:-1])


def credentials_of(answer: Received) -> Credentials:
    """Return what whoami has answered.  Raises: PacketError [CRED-2]."""
    if not PATH.fullmatch(answer.payload + b"/"):
        raise malformed("malformed credentials", answer.payload)
    return owner_of(answer.payload + b"/x")


def random_part() -> bytes:
    """Return a '/', and what nobody can guess, for a private key."""
    return b"/" + os.urandom(12).hex().encode("ascii")


def parse_request(message: Received) -> Request | None:
    """Return what a message asks for, or None if it is no request.

    Its answer goes to a private key, which any server takes that has the usual
    limits [KEY-4] [REQUEST-3].  This does not prove who asks: anybody may name
    the key of somebody else [CRED-10].

        for message in bus:
            if asked := parse_request(message):
                bus.reply(asked, b"answer")
    """
    if not isinstance(message, (Message, ControlMessage)):
        raise TypeError("parse_request takes a Message")
    reply_key, _, payload = message.payload.partition(b"\0")
    with contextlib.suppress(PacketError):
        checked(reply_key + FAILED, KEY_BYTES_MAX, SEGMENTS_MAX)
        owner_of(reply_key)
        return Request(message.key, payload, reply_key)
    return None


# ==== 4. Addresses and time ==================================================

NO_MODULE = """this Python has no module {0}: install python3 (Debian), \
python3-{0} (OpenWrt, Yocto)"""
NOT_YOURS = "{}: not yours alone; name another"
ABSTRACT = "/dev/unix/abstract/"
INHERITED = "/dev/fd/"
PATH_BYTES_MAX = 107
KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
SO_PEERCRED = getattr(socket, "SO_PEERCRED", 17)  # PyPy has no name for it
START = "start the server, or give its address"
# What the kernel is short of for now: memory, or descriptors
NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
PASSING = (*NO_MEMORY, errno.EMFILE, errno.ENFILE)
Result = TypeVar("Result")
Address = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Timeout = Union[float, None]  # in seconds, or for ever
End = Union[float, None]  # when a timeout is over, by the monotonic clock


def end_of(timeout: Timeout) -> End:
    """Return when a timeout is over.  Raises: TypeError."""
    try:
        return None if timeout is None else float(time.monotonic() + timeout)
    except (TypeError, OverflowError):
        kind = type(timeout).__name__
        text = f"a timeout is a number of seconds or None, not {kind}"
        raise TypeError(text) from None


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
    credentials = wire.getsockopt(socket.SOL_SOCKET, SO_PEERCRED, 12)
    _, owner, _ = struct.unpack("iII", credentials)
    defaults = [f"{path}/sbus.socket" for path in user_directories(uid)]
    if uid and owner not in (0, uid) and address in defaults:
        raise AddressError(NOT_YOURS.format(f"the server at {address}"))


def socket_name(address: str) -> bytes:
    """Return an address as the kernel knows it, or AddressError [ADDR-4]."""
    if address.startswith(ABSTRACT):
        digits = address[len(ABSTRACT) :]
        if re.fullmatch("00([0-9a-fA-F]{2}){0,107}", digits):
            return bytes.fromhex(digits).ljust(108, b"\0")
        form = "2 to 216 hexadecimal digits, an even number that begins with"
        raise AddressError(f"{address!r}: after {ABSTRACT} come {form} 00")

    try:
        name = os.fsencode(address)
    except UnicodeEncodeError:
        raise AddressError(f"{address!r} is not UTF-8") from None
    if 1 <= len(name) <= PATH_BYTES_MAX and b"\0" not in name:
        return name
    form = f"a path has 1 to {PATH_BYTES_MAX} bytes, none NUL"
    raise AddressError(f"{address!r}: {form}")


@contextlib.contextmanager
def needed(thing: str) -> Iterator[None]:
    """Say in one sentence that a process or its Python has no such thing.

    It may be a descriptor, or a module, for whose file one is needed as well.
    Raises: SbusError.
    """
    try:
        yield
    except ImportError:
        raise SbusError(NO_MODULE.format(thing)) from None
    except OSError as error:
        text = f"this process can get no {thing}: {error.strerror}"
        raise SbusError(text) from None


def open_socket(address: str) -> socket.socket:
    """Return a socket that is connected to a server.

    Raises: AddressError; Disconnected, with EAGAIN if the server is busy.
    """
    if address.startswith(INHERITED):
        return inherited_socket(address[len(INHERITED) :])

    try:
        # At each try, as another user may have made the directory meanwhile
        name = socket_name(checked_address(address))
        with socket.socket(*KIND) as wire:
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
        if (wire.family, wire.type) != KIND:
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
    text = {
        errno.ENOENT: f"nothing is there; {START}",
        errno.ECONNREFUSED: f"no server listens there; {START}",
        errno.EPROTOTYPE: f"another kind of socket is there; {START}",
        errno.EACCES: "its server does not let this user in: see its -g,"
        " -o and -u",
    }.get(failed.errno or 0, str(failed.strerror))
    return Disconnected(f"no bus at {address}: {text}", errno=failed.errno)


# ==== 5. What both clients share: a connection that never waits ==============
#
# Client and AsyncClient share their code as follows.  What may have to wait is
# a coroutine, and suspends in _sleep and _turn alone.  AsyncClient awaits it.
# In Client these two never suspend, since _sleep itself waits; so run()
# finishes a coroutine in one step, as if it were a function.  All else never
# waits: it raises BlockingIOError, or returns False if its name begins with
# _try.
#
# Two classes stand on each other.  Packets has a socket, and knows one bus:
# what it was asked, what it said, and which calls wait for that.  Connection
# goes from one bus to the next, and has the calls and their way to wait.

LIMIT_MAX = 1 << 30  # the kernel takes no larger packet
KEPT_BYTES_MAX = 1 << 26  # of messages that came before an answer
KEPT_OVERHEAD_BYTES = 256  # what Python needs for each of them
ASK_SECONDS = 5.0  # in which somebody is to answer a request
STATS_SECONDS = 10.0  # in which the server is to answer
# Between tries to connect, half of it at least: a try costs some 10 us where
# nothing is there, but a server logs each client that it turns away
RECONNECT_SECONDS = 0.5
# Until there may be room for more subscriptions, or the kernel may have memory
# again: short beside what a person notices, long beside the try
RETRY_SECONDS = 0.01
LARGE_BYTES = 1 << 16  # to copy more takes longer than some calls
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
MAY_COME = (errno.ENOENT, errno.ECONNREFUSED, *PASSING)  # a bus, after these
CLOSED = "this client is closed"
NOT_CONNECTED = "not connected: use async with, or connect()"
ASK_AGAIN = "the bus at {} was lost before it answered: ask again"
TOO_LARGE = "a packet of {} bytes is above the limit of {} bytes"
NO_BUFFER = "{} bytes: above the largest send buffer (net.core.wmem_max)"
NO_ROOM = "the server takes nothing (a slow reader, or it is stopped)"
LOST_PACKET = "a packet of {} bytes was received and lost; the limit is {}"
NEW_ADDRESS = "ask whoami, and subscribe to the new address"
GOODBYE = """the server at {} closed the connection: it stopped, or refused \
this client; its log names pid {}, or counts it among others"""
NO_LOOP = "AsyncClient is for asyncio, and no loop of it runs here"
OTHER_LOOP = """this client belongs to another event loop: make one in each"""
FORKED = "this client belongs to process {}, which forked: make one in each"
# What a call waits for: an event of the socket, or RETRY, that some time is
# over, since there is no bus, or no memory
READ, WRITE, RETRY = select.POLLIN, select.POLLOUT, 0
# Plain numbers, as those of the module are enums, which take long to use
MSG_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0x4000)  # PyPy has no name
SEND = int(socket.MSG_DONTWAIT | MSG_NOSIGNAL)
TRUNC = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)


class Answer:
    """What a question waits for: a packet, or why none will come."""

    outcome: Received | str = ""
    waiter: Any = None  # of the call that waits for it
    reply_key = b""  # under which it comes, if it is of a request


# ---- Packets, and what is known of the bus at the other end
#
# A Bus is all that a client knows of one bus, and ends with the connection to
# it: another bus was asked nothing, and may know this client by other
# credentials.  So whoever sends something that only this bus can answer looks
# at the Bus, sends and notes what it sent in one hold of the lock.
#
# An answer of the server belongs to the first question of its key, since its
# answers to different questions may overtake each other (order/stack).  What
# nobody asked for is kept for receive.


class Bus:
    """What a client knows of one bus, and has still to tell it."""

    def __init__(self) -> None:
        self.unsent: deque[bytes] = deque()
        self.own_path = b""  # once whoami has said it
        self.reply_keys = b""  # how they begin, once it is subscribed to
        # By control key; None if control has asked
        self.questions: dict[bytes, deque[Answer | None]] = defaultdict(deque)
        self.requests: dict[bytes, Answer] = {}  # by reply key


class Buffer(bytearray):
    """The memory of a Python without mmap; its slices are bytes."""

    def __getitem__(self, part: Any) -> Any:
        return bytes(memoryview(self)[part])


class Packets:
    """Packets out and in, what they say of the bus, and who waits for it."""

    def __init__(
        self, packet_bytes_max: int, key_bytes_max: int, segments_max: int
    ) -> None:
        self.packet_bytes_max = packet_bytes_max
        self.key_bytes_max = key_bytes_max
        self.segments_max = segments_max
        # A client publishes few keys often: it makes their heads once
        head_of = functools.partial(publish_head, key_bytes_max, segments_max)
        self._head_of = functools.lru_cache(1_024)(head_of)

        # [CLIENT-5] The largest packet fits
        buffer_bytes = max(packet_bytes_max, LARGE_BYTES)
        with needed("memory"):
            # The kernel gives the memory of an mmap only where it is used
            if mmap is None:
                self._buffer: Any = Buffer(buffer_bytes)
            else:
                self._buffer = mmap(-1, buffer_bytes)
        # The socket keeps its descriptor on the way to another bus
        with needed("descriptor"):
            self.socket = socket.socket(*KIND)
        self.socket.settimeout(None)
        self._fd = self.socket.fileno()

        self._bus = Bus()
        self._kept: deque[Received] = deque()  # until a call wants it
        self._kept_bytes = 0
        self._is_short = False  # the kernel, of memory for the last packet
        self._waiting: dict[Any, int] = {}  # waiters, and for which event
        self._receivers: deque[Any] = deque()  # those for messages, in line

    # What each client does in its own way

    def _wake(self, waiter: Any) -> None:
        """Have the call of a waiter look again."""

    def _changed(self) -> None:
        """Note a change of the state, or of whether anything is kept."""

    # A malformed key or pattern raises an error before anything is sent

    def _pattern(self, text: Text) -> bytes:
        """Return a pattern as bytes.  Raises: TypeError; PacketError.

        Whether this client may have its secrets, only the server knows.
        """
        return checked(text, self.key_bytes_max, self.segments_max)

    def _subscription(self, text: Text) -> bytes:
        """Return a subscribe packet; warn of a doubtful pattern [SUB-1]."""
        pattern = self._pattern(text)
        if doubt := doubt_about(pattern):
            warning = DoubtfulPattern(f"{quoted(pattern)} {doubt}")
            warnings.warn(warning, stacklevel=3)
        return SUBSCRIBE + pattern

    # Out

    def _write(self, packet: bytes) -> None:
        """Send a packet [CLIENT-3] [CLIENT-11].

        Raises: PacketTooLarge; BlockingIOError if the kernel cannot take it
        now; OSError if the bus has gone.
        """
        size = len(packet)
        if size > self.packet_bytes_max:
            raise PacketTooLarge(TOO_LARGE.format(size, self.packet_bytes_max))
        self._is_short = False
        try:
            self.socket.send(packet, SEND)
        except OSError as error:
            if error.errno in NO_MEMORY:
                self._is_short = True
                raise BlockingIOError from None
            if error.errno != errno.EMSGSIZE:
                raise
            # Have a send buffer in which the packet has room
            room = size + SOCKET_OVERHEAD_BYTES
            option = (socket.SOL_SOCKET, socket.SO_SNDBUF)
            # The kernel doubles it
            self.socket.setsockopt(*option, (room + 1) // 2)
            if self.socket.getsockopt(*option) < room:
                raise PacketTooLarge(NO_BUFFER.format(size)) from None
            self._write(packet)

    def _query(self, key: bytes, packet: bytes, answer: Answer | None) -> None:
        """Send a question to the bus, and note it."""
        self._write(packet)
        self._bus.questions[key].append(answer)

    # In

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

        if head[:4] == PUBLISH:
            message = new_tuple(Message, (head[4:], payload))
            if not self._bus.reply_keys or not self._answer_request(message):
                return message
        elif head[:5] == CONTROL:
            control = ControlMessage(head[5:], payload)
            if not self._answer_question(control):
                return control
        else:
            raise malformed("a malformed packet", head)
        return None

    def _answer_request(self, message: Message) -> bool:
        """Give a message to its request; return whether it is an answer."""
        bus = self._bus
        if not message.key.startswith(bus.reply_keys):
            return False
        reply_key = message.key.removesuffix(FAILED)
        self._give(bus.requests.pop(reply_key, None), message)
        return True

    def _answer_question(self, received: ControlMessage) -> bool:
        """Give a control message to its question; return if it is for one."""
        bus = self._bus
        questions = bus.questions.get(received.key)
        if not questions:
            return False
        answer = questions.popleft()
        if received.key == WHOAMI:
            with contextlib.suppress(PacketError):
                bus.own_path = credentials_of(received).path
        self._give(answer, received)
        return answer is not None

    # What is kept for receive

    def _keep(self, received: Received) -> None:
        """Keep something for receive, and wake a call that waits for it."""
        self._kept.append(received)
        self._kept_bytes += len(received.payload) + KEPT_OVERHEAD_BYTES
        self._changed()
        self._wake_receiver()

    def _keep_notice(self) -> None:
        """Keep a notice, unless the last that is kept is one already."""
        if not (self._kept and isinstance(self._kept[-1], Reconnected)):
            self._keep(Reconnected(b"", b""))

    def _step(self) -> None:
        """Read a packet, for whomever it is."""
        if received := self._read():
            self._keep(received)

    def _take_leave(self, text: str) -> None:
        """Keep what a bus has left, and tell those who wait for its answers.

        Then nothing is known of a bus.
        """
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(PacketError, PacketTooLarge):
                    self._step()
        bus = self._bus
        for answer in chain(bus.requests.values(), *bus.questions.values()):
            self._give(answer, text)
        self._bus = Bus()

    # Who waits

    def _give(self, answer: Answer | None, outcome: Received | str) -> None:
        """Give an answer to the call that waits for it, if one still does."""
        if answer and not answer.outcome:
            answer.outcome = outcome
            if answer.waiter in self._waiting:  # else its call is awake
                del self._waiting[answer.waiter]
                self._wake(answer.waiter)

    def _wake_receiver(self) -> None:
        """Wake the call that waits longest for a message, with the lock."""
        if self._receivers:
            waiter = self._receivers.popleft()
            self._waiting.pop(waiter, None)
            self._wake(waiter)

    def _wake_all(self) -> None:
        for waiter in list(self._waiting):
            self._wake(waiter)


# ---- One bus after another, and the calls
#
# There is one way to wait.  A call enlists a waiter, looks whether what it
# waits for has come, and then sleeps.  Whoever has something takes the waiter
# that it is for off the list, and wakes it.  A call that is awake looks again.
#
# The lock is for all but a first try to publish.  Nothing sleeps with it, and
# its owner may take it again.  So a signal handler may close at any moment,
# also in the midst of what the lock protects: it sets a mark, which nothing
# takes back, and wakes all that are enlisted; a call that enlists looks at the
# mark afterwards.
#
# What a client owns ends in _close.  What a call still uses ends with that
# call.  What a loop of the program polls, to be woken, ends in _end, which is
# when `with` or the object does.  Nothing else is left to a finalizer, which
# may come when a number is another's file already.
#
# NEW becomes UP by connecting.  With *reconnect*, UP becomes LOST when the bus
# has gone.  LOST becomes RESTORING when another bus lets the client in.
# RESTORING becomes UP once that bus is told all subscriptions and modes, or
# LOST if it goes before.  No call has a loop of its own to find a bus: each
# call that needs one takes the next step, and then waits like any other.
#
# The client does not judge what only a server knows, such as how many patterns
# are too many, or who may have a secret.  A server that refuses a pattern
# closes the connection, and its log says why.  With *reconnect* that happens
# again after each pause, until the program unsubscribes.
#
# What every bus has to be told is remembered (_told), and needs no bus.  All
# else is for the bus that is there.


class State(enum.Enum):
    """What a connection has, unless it is closed."""

    NEW = "not connected yet"
    UP = "connected"
    LOST = "without a bus"
    RESTORING = "subscribing again"


# Before Python 3.12, to look them up takes long
NEW = State.NEW
UP = State.UP


class Connection(Packets):
    """What Client and AsyncClient share."""

    _why_closed = CLOSED  # until the constructor is far enough

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
        # Others that replace sockets, as pytest-socket, leave them as they are
        library = socket.socket.__module__.partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise SbusError(f"replaced sockets, as {library}'s, do not work")
        if address is None:  # [ADDR-1]
            address = os.environ.get("SBUS_ADDRESS") or default_address()
        self.address = os.fsdecode(address)
        self.reconnect = reconnect
        if reconnect and self.address.startswith(INHERITED):
            raise AddressError("a descriptor cannot reconnect")
        for limit in (packet_bytes_max, key_bytes_max, segments_max):
            if not isinstance(limit, int) or not 1 <= limit <= LIMIT_MAX:
                text = f"a limit is a whole number from 1 to {LIMIT_MAX}"
                raise ValueError(text)
        self._prepare()
        super().__init__(packet_bytes_max, key_bytes_max, segments_max)

        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._state = NEW
        self._told: Counter[bytes] = Counter()  # packets, and how often
        self._next_try = 0.0  # to connect, by the monotonic clock
        self._was_without = False  # a bus: the program is told of the next
        self._is_switching = False  # the descriptor
        self._why_closed = ""
        connections.add(self)
        self._begin(timeout)

    # What each client does in its own way

    def _prepare(self) -> None:
        """Make what its way to wait needs."""

    def _begin(self, timeout: Timeout) -> None:
        self._timeout = timeout  # for connect

    def _waiter(self) -> Any:
        """Return a waiter, which is hashable."""

    def _release(self, waiter: Any) -> None:
        """Take back a waiter, which nobody wakes any more."""

    async def _sleep(self, waiter: Any, event: int, left: Timeout) -> None:
        """Wait to be woken, for an event of the socket, or to try again."""

    async def _turn(self) -> None:
        """Let other tasks run now and then."""

    def _free(self, is_last: bool) -> None:
        """Free what no call uses; at last, also what a loop may poll."""

    # The end of its object

    def _end(self) -> None:
        """Close, and free also what a loop of the program polls."""
        with contextlib.suppress(AttributeError):  # if the constructor failed
            self._close()
            with self._lock:
                self._free(is_last=True)

    __del__ = _end  # of a client that a program forgets to close

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be copied or pickled: make another")

    # The state

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return bool(self._why_closed)

    def __repr__(self) -> str:
        kind = type(self).__name__
        state = "closed" if self._why_closed else self._state.value
        return f"<{kind} at {self.address!r}: {state}>"

    def retry_in(self) -> float | None:
        """Return the seconds to the next try, or None while there is a bus."""
        if self._why_closed or self._state in (UP, NEW):
            return None
        if self._state is State.RESTORING:
            return RETRY_SECONDS
        return left_of(self._next_try)

    def _check_open(self) -> None:
        """Raise Disconnected unless there is a bus, or one is looked for."""
        if self._why_closed:
            raise Disconnected(self._why_closed) from None
        if self._state is NEW:
            raise Disconnected(NOT_CONNECTED) from None

    def _become(self, state: State) -> None:
        self._state = state
        self._changed()
        self._wake_all()

    # The end

    def _close(self) -> None:
        """Close if that was not done; free first, and raise nothing."""
        if self._why_closed:
            return
        if os.getpid() != self._pid:  # a handler closes before the fork's hook
            self._close_after_fork()
            return
        with self._lock:
            self._why_closed = CLOSED
            self._changed()
            if not self._is_switching:  # else _open closes it
                self._close_socket()
            self._wake_all()
            self._free(is_last=False)

    def _close_socket(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()

    def _close_after_fork(self) -> None:
        """Leave all to the parent, of which this process is a child."""
        self._lock = threading.RLock()  # a thread that is gone may own it
        self._why_closed = self._why_closed or FORKED.format(self._pid)
        with contextlib.suppress(OSError):
            self.socket.close()
        self._free(is_last=True)

    # Losing the bus, and finding another

    def _lose(self, error: OSError) -> None:
        """Begin to have no bus, and keep what it has left; or raise.

        Every error of the socket comes here; of a closed one it says so.
        """
        self._check_open()
        if isinstance(error, SbusError):
            raise error
        if error.errno not in GONE:
            text = f"the connection to {self.address} failed: {error.strerror}"
            raise Disconnected(text, errno=error.errno) from None
        if not self.reconnect:
            text = GOODBYE.format(self.address, self._pid)
            raise Disconnected(text) from None
        self._was_without = True
        own_path = self._bus.own_path
        self._take_leave(ASK_AGAIN.format(self.address))
        self._become(State.LOST)
        self._forget_address(own_path)

    def _forget_address(self, path: bytes) -> None:
        """Forget what was subscribed to under our address below another bus.

        The next bus may have another prefix, and would refuse that each time.
        Raises: PacketError, so that the program asks for its new address.
        """
        if path.count(SECRET) < 2:
            return
        start = SUBSCRIBE + path + b"/"
        former = [x for x in self._told if x.startswith(start)]
        for packet in former:
            del self._told[packet]
        if former:
            pattern = quoted(former[0][len(SUBSCRIBE) :])
            raise PacketError(f"{pattern} is over with its bus: {NEW_ADDRESS}")

    def _try(self, act: Callable[[], object]) -> bool:
        """Do something with the bus, or take a step to find one.

        Return whether it was done.  Raises: Disconnected if no bus may come.
        """
        with self._lock:
            self._check_open()
            while True:
                try:
                    if self._state is not UP:
                        self._find_bus()
                    act()
                    return True
                except BlockingIOError:
                    return False
                except OSError as error:
                    self._lose(error)

    def _find_bus(self) -> None:
        """Connect, and tell the bus all that it has to be told.

        Raises: BlockingIOError if that cannot be finished yet; OSError.
        """
        if self._state is State.LOST:
            self._open()
        bus = self._bus
        while bus.unsent:
            self._write(bus.unsent[0])
            bus.unsent.popleft()
        self._become(UP)

    def _open(self) -> None:
        """Connect the socket, if it is time, and list what to tell."""
        now = time.monotonic()
        if self.socket.fileno() < 0:
            raise Disconnected("the socket of this client was closed")
        if now < self._next_try:
            raise BlockingIOError
        share = 0.5 + os.urandom(1)[0] / 512  # all clients lose a bus at once
        self._next_try = now + RECONNECT_SECONDS * share
        try:
            fresh = open_socket(self.address)
        except Disconnected as error:
            may_come = self.reconnect and error.errno in MAY_COME
            if may_come or error.errno == errno.EAGAIN:
                raise BlockingIOError from None
            raise

        with fresh:
            self._bus.unsent = deque(self._told.elements())
            try:
                self._is_switching = True  # no handler is to free the number
                if not self._why_closed:
                    os.dup2(fresh.fileno(), self._fd, inheritable=False)
            finally:
                self._is_switching = False
        self._state = State.RESTORING
        if self._was_without:
            self._keep_notice()
        if self._why_closed:
            self._close_socket()

    # What every bus has to be told: subscriptions and modes

    def _try_tell(self, packet: bytes) -> bool:
        """Tell the bus, and remember it for the next one."""
        with self._lock:
            self._check_open()
            write = functools.partial(self._write, packet)
            if not (self._state is UP and self._try(write)):
                if self._state is UP:
                    return False
                self._bus.unsent.append(packet)  # which LOST begins anew

            if packet.startswith(SUBSCRIBE):
                self._told[packet] += 1
            elif packet.startswith(UNSUBSCRIBE):
                pattern = packet[len(UNSUBSCRIBE) :]
                self._told -= Counter([SUBSCRIBE + pattern])
            else:
                self._told.pop(packet, None)
                self._told[packet] = 1  # the last sent is the last
        return True

    # What is for the bus that is there

    def _write_request(self, head: bytes, tail: bytes, answer: Answer) -> None:
        """Send a request to the bus, and note it, if its path is known."""
        bus = self._bus
        if not bus.own_path:
            return
        if not bus.reply_keys:
            keys = self._pattern(bus.own_path + random_part() + b"/")
            self._write(SUBSCRIBE + keys)
            bus.reply_keys = keys
        reply_key = bus.reply_keys[:-1] + random_part()
        self._write(head + reply_key + tail)
        bus.requests[reply_key] = answer
        answer.reply_key = reply_key

    def _try_publish(self, key: Text, payload: Payload) -> bool:
        """Publish if all is as usual; without the lock, since it is quick."""
        try:
            if type(payload) is not bytes:
                payload = payload_bytes(payload)
            packet = self._head_of(key) + payload
            if len(packet) <= self.packet_bytes_max and self._state is UP:
                self.socket.send(packet, SEND)
                return True
        except (OSError, TypeError, BufferError, BytesWarning, ValueError):
            pass  # try with more care; a BytesWarning is what python3 -bb has
        return False

    # How a call waits

    async def _wait(
        self, event: int, end: End, text: str, answer: Answer | None = None
    ) -> None:
        """Wait until the call may go on, or it is time to try again.

        It waits for an answer; or READ for a message, or WRITE for room.
        Raises: TimedOut, which says *text*, at *end*; Disconnected.
        """
        left = left_of(end)
        if left == 0:
            has_none = self.reconnect and self.retry_in() is not None
            reason = "there is no bus" if has_none else text
            raise TimedOut(f"{reason} at {self.address}")

        waiter = self._waiter()
        try:
            with self._lock:
                # First, or a signal handler that closes now would wake nobody
                self._waiting[waiter] = event
                self._check_open()
                if answer:
                    answer.waiter = waiter
                elif event == READ:
                    self._receivers.append(waiter)
                has_come = event == READ and self._has_come(answer)
                pause = self.retry_in()
                if self._is_short and event == WRITE:
                    pause = RETRY_SECONDS
            if pause is not None:  # then the socket does not tell
                event = RETRY
                left = pause if left is None else min(left, pause)
            if not has_come:
                await self._sleep(waiter, event, left)
        finally:
            with self._lock:
                self._waiting.pop(waiter, None)
                if waiter in self._receivers:
                    self._receivers.remove(waiter)
            self._release(waiter)

    def _has_come(self, answer: Answer | None) -> bool:
        """Return whether there is an answer, or else something kept."""
        return bool(answer.outcome if answer else self._kept)

    # Calls: coroutines that suspend in _sleep and _turn alone

    async def _connect(self, timeout: Timeout) -> None:
        """Connect for the first time; with *reconnect*, perhaps later."""
        end = end_of(timeout)
        self._state = State.LOST
        try:
            while not self._try(self._check_open):
                if self.reconnect:
                    self._was_without = True
                    return
                await self._wait(READ, end, "too many clients connect at once")
        except BaseException:
            self._state = NEW
            raise

    async def _send(self, act: Callable[[], object], end: End) -> None:
        """Do something once there is a bus, and room for it."""
        while not self._try(act):
            await self._wait(WRITE, end, NO_ROOM)

    async def _tell(self, packet: bytes, timeout: Timeout) -> None:
        """Subscribe, unsubscribe or set a mode."""
        end = end_of(timeout)
        while not self._try_tell(packet):
            await self._wait(WRITE, end, NO_ROOM)

    async def _post(self, key: Text, payload: Payload, end: End) -> None:
        """Publish a message [PUB-1]."""
        packet = self._head_of(to_bytes(key)) + payload_bytes(payload)
        await self._send(functools.partial(self._write, packet), end)

    async def _control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Send a control message to the server [CTL-1].

        Raises: TimedOut; PacketError if no server knows the key.
        """
        content = payload_bytes(payload)
        name = to_bytes(key)
        if name not in CONTROL_KEYS:  # [CTL-2]
            keys = b" ".join(CONTROL_KEYS).decode()
            raise PacketError(f"{quoted(name)} is none of {keys}")

        packet = CONTROL + name + (b"\0" + content if content else b"")
        if name in MODES:
            await self._tell(packet, timeout)
        else:  # a question, whose answer is for receive
            ask = functools.partial(self._query, name, packet, None)
            await self._send(ask, end_of(timeout))

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

    async def _ask(self, key: bytes, end: End) -> Received:
        """Return the server's answer to a question."""
        answer = Answer()
        packet = CONTROL + key
        ask = functools.partial(self._query, key, packet, answer)
        await self._send(ask, end)
        return await self._outcome(answer, end, "the server does not answer")

    async def _stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """Return the counts of the server, by the names of [CTL-5].

        Raises: as whoami; TimedOut also if this server has no counts;
        SbusError if this Python has no module json.
        """
        with needed("json"):
            import json

        answer = await self._ask(STATS, end_of(timeout))
        try:
            return dict(json.loads(answer.payload))
        except (ValueError, TypeError, RecursionError):
            raise malformed("malformed counts", answer.payload) from None

    async def _request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = ASK_SECONDS
    ) -> bytes:
        """Publish a request; return the payload of the first answer.

        The request's payload is the key for the answer, NUL, and *payload*.
        This client stays subscribed to the keys of its answers, and drops an
        answer that comes too late [REQUEST-1] [REQUEST-2].
        Raises: as whoami; TimedOut also if nobody answers; RequestFailed if
        the answer says so.
        """
        end = end_of(timeout)
        answer = Answer()
        key = to_bytes(key)
        head = self._head_of(key)
        tail = b"\0" + payload_bytes(payload)
        ask = functools.partial(self._write_request, head, tail, answer)
        try:
            await self._send(ask, end)
            while not answer.reply_key:  # on a bus that has not told our path
                credentials_of(await self._ask(WHOAMI, end))
                await self._send(ask, end)
            seconds = round(float(timeout or 0), 2)
            text = f"nobody answered {quoted(key)} within {seconds:g} s"
            reply = await self._outcome(answer, end, text)
        except BaseException:
            with self._lock:
                self._bus.requests.pop(answer.reply_key, None)
            raise

        if reply.key != answer.reply_key:
            raise RequestFailed(printable(reply.payload or b"it failed"))
        return reply.payload

    async def _reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Answer a parsed request, unless no server takes its reply key.

        Raises: as publish [PUB-1].
        """
        if not isinstance(asked, Request):
            raise TypeError("reply takes a Request: see parse_request")
        with contextlib.suppress(PacketError):
            # Past the cache, as this key never comes again
            head = self._head_of.__wrapped__(asked.reply_key)
            packet = head + payload_bytes(payload)
            write = functools.partial(self._write, packet)
            await self._send(write, end_of(timeout))

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
        if self._try(self._step):
            await self._turn()
            return
        if self._has_come(answer):  # when the bus was lost just now
            return
        await self._wait(READ, end, text, answer)


# A child process would read, from the same socket, what is for its parent

connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def close_after_fork() -> None:
    """Close the clients of the parent in a child process."""
    for client in connections:
        if client._pid != os.getpid():  # an earlier hook may have made others
            client._close_after_fork()


os.register_at_fork(after_in_child=close_after_fork)


# ==== 6. The client ==========================================================


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

    def __init__(self, wire_fd: int) -> None:
        """Make a bell for a socket.  Raises: SbusError."""
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # they are those of an eventfd
        with needed("descriptor"):
            if hasattr(os, "eventfd"):
                self.fds = [os.eventfd(0, flags)]
            else:
                self.fds = list(os.pipe2(flags))
        self._is_rung = False

        # Three ways to wait for it: alone, or with an event of the socket
        self._polls = {event: select.poll() for event in (RETRY, READ, WRITE)}
        for event, poll in self._polls.items():
            poll.register(self.fds[0], select.POLLIN)
            if event != RETRY:
                poll.register(wire_fd, event)

    def close(self) -> None:
        with contextlib.suppress(IndexError):  # once, whoever else does so
            while True:
                os.close(self.fds.pop())

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            with contextlib.suppress(OSError, IndexError):
                # An eventfd takes eight bytes, and a pipe any number
                os.write(self.fds[-1], b"\1" * 8)

    def silence(self) -> None:
        # A handler that rings in the midst of this is not heard; but the mark
        # goes last, so that the bell can be rung again
        if self._is_rung:
            with contextlib.suppress(OSError, IndexError):
                os.read(self.fds[0], 64)
            self._is_rung = False

    def wait(self, event: int, seconds: Timeout) -> None:
        """Wait for the bell, or for an event of the socket."""
        # poll(2) takes 24 days at most
        limit = None if seconds is None else 1000 * min(seconds, 1e6)
        self._polls[event].poll(limit)


class Beacon:
    """What fileno gives to a loop of the program.

    It holds a bell, which is rung while receive has something that was kept,
    and while there is a bus, the socket.
    """

    def __init__(self, wire_fd: int) -> None:
        """Make a beacon for a socket.  Raises: SbusError."""
        self._wire_fd = wire_fd
        self.bell = Bell(wire_fd)
        with needed("descriptor"), contextlib.ExitStack() as parts:
            parts.callback(self.bell.close)
            self._epoll = parts.enter_context(select.epoll())
            self.fd = self._epoll.fileno()
            self._add(self.bell.fds[0])
            self._add(wire_fd)
            self.close = parts.pop_all().close

    def _add(self, fd: int) -> None:
        # A child that a handler forks just here may have added it before us
        with contextlib.suppress(FileExistsError):
            self._epoll.register(fd, select.EPOLLIN)

    def watch(self, has_bus: bool) -> None:
        """Watch the socket while there is a bus."""
        # It may be as it should be, or just be closed
        with contextlib.suppress(OSError, ValueError):
            if has_bus:
                self._add(self._wire_fd)
            else:
                self._epoll.unregister(self._wire_fd)


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
    thread may do anything, and a signal handler may close.  A closed client
    stays closed.  Only the process that made a client can use it, not one that
    fork(2) makes.

        with select.epoll() as epoll:
            epoll.register(bus, select.EPOLLIN)
            while True:
                epoll.poll(bus.retry_in())
                with contextlib.suppress(TimeoutError):
                    print(bus.receive(timeout=0))

    Any call may raise Disconnected, and all but close and fileno do so once
    the client is closed; PacketTooLarge for a packet above the limit;
    PacketError for a key or pattern that is malformed or too long, or for a
    malformed packet, which is skipped; SbusError if the process has no
    descriptor to wait with; and TypeError.
    Raises: TimedOut; AddressError; Disconnected if there is no server.
    """

    # A client has one bell, at which its calls wait, and one more for each
    # further thread that waits at the same time.  A bell that a call uses is
    # among those of _waiting, or about to be

    def _prepare(self) -> None:
        self._idle_bells: list[Bell] = []
        self._beacon: Beacon | None = None

    def _begin(self, timeout: Timeout) -> None:
        try:
            self._release(Bell(self._fd))
            run(self._connect(timeout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[Received]:
        """Return an iterator over all that receive returns."""
        return iter(self.receive, None)

    def close(self) -> None:
        """Leave the bus, which still delivers what was published [CONN-6].

        A call that waits in another thread raises Disconnected.  The
        descriptor of fileno, if that was called, stays readable, to wake a
        loop that polls it, until `with` or the object ends.  So a program that
        closes all descriptors by their numbers uses `with`.
        """
        self._close()

    def subscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """Subscribe to a pattern; duplicates count [SUB-1] [SUB-2].

        Raises: TimedOut if the server takes nothing.
        """
        run(self._tell(self._subscription(pattern), timeout))

    def unsubscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """Take back one subscription to an identical pattern [UNSUB-1].

        Raises: TimedOut if the server takes nothing.
        """
        run(self._tell(UNSUBSCRIBE + self._pattern(pattern), timeout))

    def publish(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Publish a message [PUB-1].

        Raises: TimedOut if the server takes nothing, or there is no bus.
        """
        if not self._try_publish(key, payload):
            run(self._post(key, payload, end_of(timeout)))

    def control(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Send a control message to the server [CTL-1].

        Raises: TimedOut; PacketError if no server knows the key.
        """
        run(self._control(key, payload, timeout))

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
        return credentials_of(run(self._ask(WHOAMI, end_of(timeout))))

    def sync(self, timeout: Timeout = None) -> None:
        """Return once the server has handled all sent so far [PKT-5] [CRED-3].

        Raises: as whoami; Disconnected if the server refused some of it.
        """
        self.whoami(timeout)

    def stats(self, timeout: Timeout = STATS_SECONDS) -> dict[str, Any]:
        """Return the counts of the server, by the names of [CTL-5].

        Raises: as whoami; TimedOut also if this server has no counts;
        SbusError if this Python has no module json.
        """
        return run(self._stats(timeout))

    def request(
        self, key: Text, payload: Payload = b"", timeout: Timeout = ASK_SECONDS
    ) -> bytes:
        """Publish a request; return the payload of the first answer.

        The request's payload is the key for the answer, NUL, and *payload*.
        This client stays subscribed to the keys of its answers, and drops an
        answer that comes too late [REQUEST-1] [REQUEST-2].
        Raises: as whoami; TimedOut also if nobody answers; RequestFailed if
        the answer says so.
        """
        return run(self._request(key, payload, timeout))

    def reply(
        self, asked: Request, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """Answer a parsed request, unless no server takes its reply key.

        Raises: as publish [PUB-1].
        """
        run(self._reply(asked, payload, timeout))

    def fileno(self) -> int:
        """Return a descriptor that is readable if receive has something.

        It stays the same until the client is closed; then it is -1.  While
        there is no bus it is quiet: see retry_in.
        """
        with self._lock:
            if not (self._beacon or self._why_closed):
                try:
                    self._beacon = Beacon(self._fd)
                except SbusError:
                    self._check_open()  # a handler may have closed the socket
                    raise
                self._changed()
                if self._why_closed:  # by a handler, perhaps in a child
                    self._free(is_last=True)
            beacon = self._beacon
            return beacon.fd if beacon and not self._why_closed else -1

    def _changed(self) -> None:
        beacon = self._beacon
        if not beacon or os.getpid() != self._pid:
            return
        if not self._kept:
            beacon.bell.silence()
        # Asked afterwards, as a handler may just have closed
        if self._kept or self._why_closed:
            beacon.bell.ring()
        beacon.watch(self._state is UP and not self._why_closed)

    def _waiter(self) -> Bell:
        try:
            return self._idle_bells.pop()
        except IndexError:
            return Bell(self._fd)

    def _release(self, waiter: Bell) -> None:
        waiter.silence()
        self._idle_bells.append(waiter)
        if self._why_closed:
            self._free(is_last=False)

    def _free(self, is_last: bool) -> None:
        if os.getpid() != self._pid:  # the calls are those of the parent
            for bell in self._waiting:
                bell.close()
        with contextlib.suppress(IndexError):  # when they are all popped
            while True:
                self._idle_bells.pop().close()
        if is_last and self._beacon:
            beacon, self._beacon = self._beacon, None
            beacon.close()

    def _wake(self, waiter: Bell) -> None:
        waiter.ring()

    async def _sleep(self, waiter: Bell, event: int, left: Timeout) -> None:
        waiter.wait(event, left)


# ==== 7. The client for asyncio ==============================================

CALLS_PER_TURN = 64  # that need not wait, before other tasks have a turn


class Done:
    """What AsyncClient.close returns, for those who await it."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class AsyncClient(Connection):
    """A connection to a bus, for asyncio.

        async with AsyncClient() as bus:
            await bus.subscribe("sensors/*/temp")
            await bus.publish("sensors/1/temp", b"21.5")
            async for message in bus:
                print(message.key, message.payload)

    Its arguments are those of Client.  It connects in `async with` or by
    connect(), once.  Its calls are those of Client and raise the same errors,
    but let other tasks run while they wait.  Several tasks of the loop in
    which it connected may use it at once; each message goes to one of them.

    A call may be cancelled: the next call receives what it would have
    received, and a packet is sent whole or not at all.
    """

    # The waiter of a task is a future.  As long as any task waits for a packet
    # the loop reads for all of them, from one reader.  The loop has but a weak
    # reference to a client, so that one which a program drops is closed

    def _prepare(self) -> None:
        with needed("asyncio"):
            import asyncio  # which takes long, and others do without

        self._asyncio: Any = asyncio
        self._loop: Any = None  # once it is connected
        self._watched: set[int] = set()  # events that the loop looks for
        self._calls = 0  # since other tasks had a turn

    async def connect(self) -> AsyncClient:
        """Connect, and return this client.  Raises: as Client."""
        if self._why_closed or self._state is NEW:
            try:
                self._loop = self._asyncio.get_running_loop()
            except RuntimeError:
                raise SbusError(NO_LOOP) from None
            await self._connect(self._timeout)
        return self

    __aenter__ = connect

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __aiter__(self) -> AsyncClient:
        """Return an iterator over what receive returns, without an end."""
        return self

    def close(self) -> Done:
        """As Client.close, at once; await what it returns, or do not."""
        self._close()
        return Done()

    async def subscribe(self, pattern: Text, timeout: Timeout = None) -> None:
        """As Client.subscribe [SUB-1] [SUB-2]."""
        await self._tell(self._subscription(pattern), timeout)

    async def unsubscribe(
        self, pattern: Text, timeout: Timeout = None
    ) -> None:
        """As Client.unsubscribe [UNSUB-1]."""
        await self._tell(UNSUBSCRIBE + self._pattern(pattern), timeout)

    async def publish(
        self, key: Text, payload: Payload = b"", timeout: Timeout = None
    ) -> None:
        """As Client.publish, once the kernel has room for it [PUB-1]."""
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            await self._turn()
        if not self._try_publish(key, payload):
            await self._post(key, payload, end_of(timeout))

    control = Connection._control

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
        return credentials_of(await self._ask(WHOAMI, end_of(timeout)))

    async def sync(self, timeout: Timeout = None) -> None:
        """As Client.sync [PKT-5] [CRED-3]."""
        await self.whoami(timeout)

    stats = Connection._stats
    request = Connection._request
    reply = Connection._reply

    async def _turn(self) -> None:
        self._calls += 1
        if self._calls >= CALLS_PER_TURN:
            self._calls = 0
            await self._asyncio.sleep(0)

    def _waiter(self) -> Any:
        if self._asyncio.get_running_loop() is not self._loop:
            raise SbusError(OTHER_LOOP)
        return self._loop.create_future()

    def _wake(self, waiter: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def _wake_all(self) -> None:
        # In the loop's own time, which also wakes a loop that sleeps while a
        # signal handler or another thread closes
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # that has ended
                self._loop.call_soon_threadsafe(super()._wake_all)

    async def _sleep(self, waiter: Any, event: int, left: Timeout) -> None:
        if event != RETRY and event not in self._watched:
            self._watch(event)
        timer = None
        if left is not None:
            timer = self._loop.call_later(left, self._wake, waiter)
        try:
            await waiter
        finally:
            if timer:
                timer.cancel()

    # ---- What the loop does for all tasks that wait

    def _watch(self, event: int) -> None:
        reader, writer = self._loop.add_reader, self._loop.add_writer
        watch = reader if event == READ else writer
        with self._lock:
            try:
                watch(self._fd, on_event, weakref.ref(self), event)
                self._watched.add(event)
            except OSError as error:
                self._lose(error)
            if self._why_closed:  # a handler has just closed
                self._unwatch(event)

    def _unwatch(self, *events: int) -> None:
        for event in self._watched.intersection(events):
            self._watched.remove(event)
            if self._loop.is_closed():
                continue
            if event == READ:
                self._loop.remove_reader(self._fd)
            else:
                self._loop.remove_writer(self._fd)

    def _changed(self) -> None:
        if self._state is not UP or self._why_closed:
            self._unwatch(READ, WRITE)

    def _is_awaited(self) -> bool:
        """Return whether a task waits for a packet."""
        if self._receivers:
            return True
        may_keep = self._kept_bytes <= KEPT_BYTES_MAX
        return may_keep and READ in self._waiting.values()

    def _on_event(self, event: int) -> None:
        """Read for all, or wake those who wait for room."""
        if event != READ or not self._is_awaited():
            self._unwatch(event)
            for waiter, awaited in list(self._waiting.items()):
                if awaited == event:
                    self._wake(waiter)
            return
        try:
            for _ in range(CALLS_PER_TURN):
                if not (self._is_awaited() and self._try(self._step)):
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
UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}  # in seconds


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


def seconds(text: str) -> float:
    """Return a length of time in seconds, for argparse: 90, 0.5, 15m, 1h, 2d.

    Raises: argparse.ArgumentTypeError.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd]?)", text)
    if match and float(match[1]):
        return float(match[1]) * UNITS[match[2]]
    form = "a time above 0, such as 90, 0.5, 15m, 1h or 2d"
    raise argparse.ArgumentTypeError(f"{text!r} is not {form}")


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
    parser = Parser("sbus_client.py", description=about, formatter_class=form)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("command", choices=COMMANDS, metavar="COMMAND", help="see above")
    add("words", nargs="*", metavar="WORD", help="of the command")
    version = f"sbus_client.py {__version__}"
    add("--version", action="version", version=version)
    add("-a", "--address", help="a path, /dev/unix/abstract/HEX, /dev/fd/N")
    add("-t", "--timeout", type=seconds, help="end after 90, 15m, 1h or 2d")
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
        # Also where warnings are to be errors, in programs; other warnings
        # are for programmers, such as of a call that Ctrl-C kept from a start
        warnings.simplefilter("ignore")
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
