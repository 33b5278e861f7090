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
file included: copy it.  A bracketed id, as in [CONN-14], names a rule of
the specification in spec/.

Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, NoReturn, Union

__version__ = "0.1.0"

PACKET_BYTES_MAX = 409_600
SOCKET_OVERHEAD_BYTES = 32  # of each packet, in a send buffer
ABSTRACT = "/dev/unix/abstract/"
ABSTRACT_BYTES = 108
PATH_BYTES_MAX = 107
POLL_SECONDS_MAX = 3_600.0  # poll(2) takes 24 days at most
WHOAMI = b"!/cred/whoami"


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


def parse_packet(packet: bytes) -> Received:
    """Return what a server's packet says.

    Raises: PacketError if it is neither a publish nor a control packet.
    Spec: [PKT-1].
    """
    head, nul, payload = packet.partition(b"\0")
    word, space, key = head.partition(b" ")
    if nul and word == b"MSG" and space:
        return Message(key, payload)
    if nul and word == b"CMSG" and space:
        return ControlMessage(key, payload)
    raise PacketError(f"the server sent a malformed packet: {head[:80]!r}")


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


def open_socket(address: str) -> socket.socket:
    """Return a blocking socket that is connected to a server.

    It waits while the server's queue of new connections is full [CONN-17].
    Raises: AddressError; Disconnected if there is no server.
    """
    if address.startswith("/dev/fd/"):
        number = address[len("/dev/fd/") :]
        if not re.fullmatch("[0-9]{1,9}", number):
            raise AddressError(f"{address!r}: not a descriptor's number")
        return inherit_socket(int(number))
    name = socket_name(address)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(name)
    except OSError as error:
        connected.close()
        raise no_bus(address, error) from None
    return connected


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
        what = error.strerror
        raise AddressError(f"descriptor {fd}: {what}") from None
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


class Client:
    """A connection to a bus.

    *address* is a path, /dev/unix/abstract/HEX or /dev/fd/N; by default the
    server's own default.  *fd* is the descriptor of a connected socket
    instead; the client closes it.  *packet_bytes_max* is the server's limit.

    Keys and patterns are bytes, or str that is sent as UTF-8.  *flags* are
    those of send(2) and recv(2); with MSG_DONTWAIT, BlockingIOError tells
    that the call would have to wait.  Timeouts are seconds, None for ever,
    and TimeoutError tells that one is over.

    A client is a context manager, an iterator over what it receives, and
    has fileno() for select, poll and epoll; *socket* is there for all else.
    It is not to be used by two threads at once.

        with select.epoll() as epoll:
            epoll.register(bus, select.EPOLLIN)
            while epoll.poll():
                print(bus.receive())

    Once it is closed, all calls but close and fileno raise Disconnected.
    Raises: AddressError; Disconnected if there is no server.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        fd: int | None = None,
        packet_bytes_max: int = PACKET_BYTES_MAX,
    ) -> None:
        if fd is not None and address is not None:
            raise AddressError("give an address or a descriptor, not both")
        if fd is not None:
            self.address = f"/dev/fd/{fd}"
        else:
            self.address = default_address() if address is None else address
        self.packet_bytes_max = packet_bytes_max
        self._buffer = bytearray(packet_bytes_max)
        self._view = memoryview(self._buffer)
        self._kept: deque[Received] = deque()  # what whoami had to pass by
        self._questions = 0  # that wait for their answers from whoami
        self.socket = open_socket(self.address)

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

        Raises, at a step: Disconnected when the server has closed.
        """
        while True:
            yield self.receive()

    def close(self) -> None:
        """Leave the bus.  What was published is delivered [CONN-6]."""
        self.socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed.

        whoami and sync may keep messages that no select will tell of: call
        receive(0) until it raises TimeoutError after them.
        """
        return self.socket.fileno()

    def subscribe(self, pattern: Text, flags: int = 0) -> None:
        """Subscribe to the keys that a pattern selects; duplicates count.

        Raises: Disconnected; PacketTooLarge; PacketError.
        Spec: [SUB-1] [SUB-2].
        """
        self._send(b"SUB " + to_bytes(pattern), flags)

    def unsubscribe(self, pattern: Text, flags: int = 0) -> None:
        """Take back one subscription to an identical pattern.

        Raises: Disconnected; PacketTooLarge; PacketError.
        Spec: [UNSUB-1].
        """
        self._send(b"UNSUB " + to_bytes(pattern), flags)

    def publish(
        self, key: Text, payload: Payload = b"", flags: int = 0
    ) -> None:
        """Publish a message.

        Raises: Disconnected; PacketTooLarge; PacketError; TypeError if the
        payload is not bytes.
        Spec: [PUB-1].
        """
        payload = payload_bytes(payload)
        self._send(b"MSG " + to_bytes(key) + b"\0" + payload, flags)

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
        if self._kept:
            peeked = flags & socket.MSG_PEEK
            return self._kept[0] if peeked else self._kept.popleft()
        return self._receive_new(end_of(timeout), flags)

    def whoami(self, timeout: float | None = None) -> Credentials:
        """Return the credentials that the server knows this client by.

        What arrives meanwhile is kept for receive, and so are the answers
        to earlier questions, as after a TimeoutError.
        Raises: TimeoutError; Disconnected; PacketTooLarge; PacketError.
        Spec: [CRED-2] [CRED-12].
        """
        end = end_of(timeout)
        while True:
            try:
                self.control(WHOAMI, flags=socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                self._wait(select.POLLOUT, end)
        while True:
            received = self._receive_new(end, 0)
            if is_answer(received) and not self._questions:
                return parse_credentials(received.payload)
            self._kept.append(received)

    def sync(self, timeout: float | None = None) -> None:
        """Return once the server has handled all that was sent before.

        Raises: TimeoutError; Disconnected, if the server refused it;
        PacketTooLarge; PacketError.
        Spec: [PKT-5] [CRED-3].
        """
        self.whoami(timeout)

    def _send(self, packet: bytes, flags: int) -> None:
        """Send a packet, with a larger send buffer if it needs one.

        Raises: PacketTooLarge; Disconnected.
        Spec: [CONN-16].
        """
        self._check_open()
        if len(packet) > self.packet_bytes_max:
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes is above the limit of"
                f" {self.packet_bytes_max} bytes"
            )
        try:
            self._send_once(packet, flags)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            needed = len(packet) + SOCKET_OVERHEAD_BYTES
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, (needed + 1) // 2
            )
            self._send_fitting(packet, flags)

    def _send_once(self, packet: bytes, flags: int) -> None:
        """Send a packet.  Raises: OSError; Disconnected."""
        try:
            self.socket.send(packet, flags)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def _send_fitting(self, packet: bytes, flags: int) -> None:
        """Send a packet.  Raises: PacketTooLarge if the kernel refuses."""
        try:
            self._send_once(packet, flags)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            raise PacketTooLarge(
                f"a packet of {len(packet)} bytes does not fit into the"
                " kernel's largest send buffer (net.core.wmem_max)"
            ) from None

    def _receive_new(self, end: float | None, flags: int) -> Received:
        """Return the next packet from the socket."""
        while True:
            if end is not None:
                self._wait(select.POLLIN, end)
            try:
                size = self.socket.recv_into(
                    self._buffer, 0, flags | socket.MSG_TRUNC
                )
                break
            except ConnectionResetError:
                continue  # [CONN-14] the last packets come next
        if size > len(self._buffer):  # [CONN-15]
            raise PacketTooLarge(
                f"a packet of {size} bytes was received and lost; the"
                f" limit is {self.packet_bytes_max} bytes"
            )
        if size == 0:  # no server sends empty packets
            raise self._gone()
        received = parse_packet(self._view[:size].tobytes())
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
            " stopped, or it refused what was sent or this user; its log"
            " says why"
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


# =============================================================================
# The command line
# =============================================================================


def printable(text: bytes, encoding: str) -> str:
    """Return bytes as text for a terminal with an encoding.

    What is no UTF-8, or cannot be printed, is escaped as in a bytes literal.
    """
    return "".join(
        char
        if char.isprintable()
        and char != "\\"
        and char.encode(encoding, "ignore")
        else repr(char.encode("utf-8", "surrogateescape"))[2:-1]
        for char in text.decode("utf-8", "surrogateescape")
    )


def write_line(*fields: bytes) -> None:
    """Print a line at once, with tabs between its fields.

    Raises: BrokenPipeError if nobody reads it; SbusError.
    """
    if sys.stdout is None:
        raise SbusError("standard output is closed")
    encoding = sys.stdout.encoding
    line = "\t".join(printable(field, encoding) for field in fields)
    try:
        print(line, flush=True)
    except OSError as error:
        # Python prints at exit what is left, and would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise SbusError(f"standard output: {error.strerror}") from None


def read_input(size: int) -> bytes:
    """Return standard input, but not more than so many bytes.

    Raises: SbusError.
    """
    if sys.stdin is None:
        raise SbusError("standard input is closed")
    try:
        return sys.stdin.buffer.read(size)
    except OSError as error:
        raise SbusError(f"standard input: {error.strerror}") from None


def sub(bus: Client, options: argparse.Namespace) -> None:
    """Print what is published, a line a message: key, tab, payload."""
    for pattern in options.pattern or [""]:
        bus.subscribe(os.fsencode(pattern))
    for message in bus:
        if isinstance(message, Message):
            write_line(message.key, message.payload)


def pub(bus: Client, options: argparse.Namespace) -> None:
    """Publish one message, and wait until the server has routed it."""
    key = os.fsencode(options.key)
    if options.payload in (None, "-"):
        room = bus.packet_bytes_max - len(b"MSG " + key + b"\0")
        payload = read_input(room + 1)
        if len(payload) > room:
            raise PacketTooLarge(
                f"standard input holds more than the {room} bytes that fit"
                " with this key: the limit of a packet is"
                f" {bus.packet_bytes_max} bytes"
            )
    else:
        payload = os.fsencode(options.payload)
    bus.publish(key, payload)
    bus.sync()


def whoami(bus: Client, _: argparse.Namespace) -> None:
    """Print the credentials by which the server knows this client."""
    write_line(bus.whoami().path)


SUB_HELP = r"""
Print what is published, a line each: its key, a tab, its payload.  Bytes
that are no printable text are escaped as in a Python bytes literal: a line
feed is \n, a backslash \\.
"""
PUB_HELP = """
Publish one message, and wait until the server has handled it.
"""
WHOAMI_HELP = """
Print the credentials by which the server knows this client, as in
!/cred/GID/UID/PID: what begins so and goes on with '/' is a private key.
"""


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sbus: {message}; --help lists the options\n")


def option_parser() -> OptionParser:
    """Return the parser of the command line."""
    parser = OptionParser(prog="sbus", description="Use a message bus.")
    parser.add_argument(
        "--version", action="version", version=f"sbus {__version__}"
    )
    commands = parser.add_subparsers(
        metavar="COMMAND", dest="command", required=True
    )
    for run, short, description, example in (
        (sub, "print messages", SUB_HELP, "sub 'sensors/*/temp'"),
        (pub, "publish a message", PUB_HELP, "pub sensors/1/temp 21.5"),
        (whoami, "print your credentials", WHOAMI_HELP, "whoami"),
    ):
        command = commands.add_parser(
            run.__name__,
            help=short,
            description=description,
            epilog=f"example:\n  sbus {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
    for each in (parser, *commands.choices.values()):
        each.add_argument(
            "-a",
            "--address",
            default=argparse.SUPPRESS,  # or a command's would undo ours
            help="the bus: a path, /dev/unix/abstract/HEX or /dev/fd/N",
        )
    parser.set_defaults(address=None)
    commands.choices["sub"].add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="*",
        help="the keys to print, where '*' is what stands between two '/' and"
        " a '/' at the end is all below: 'a/*' selects a/b but not a/b/c,"
        " 'a/' selects both, none at all selects all but secrets; quote it",
    )
    command = commands.choices["pub"]
    command.add_argument(
        "key",
        metavar="KEY",
        help="the routing key that subscribers' patterns select, such as a/b",
    )
    command.add_argument(
        "payload",
        metavar="PAYLOAD",
        nargs="?",
        help="'-' or no PAYLOAD is standard input as it is, a final line feed"
        " included; write -- before a PAYLOAD that begins with '-'",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0 is success, 1 an error of the bus, 2 of usage, 130 an interruption.
    """
    options = option_parser().parse_args(arguments)
    try:
        with Client(options.address) as bus:
            options.run(bus, options)
    except BrokenPipeError:  # whoever read our output has had enough
        return 1
    except Disconnected as error:
        elsewhere = error.errno not in (None, errno.EACCES)
        print(f"sbus: {error}{' with -a' * elsewhere}", file=sys.stderr)
        return 1
    except (SbusError, OSError) as error:
        print(f"sbus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
