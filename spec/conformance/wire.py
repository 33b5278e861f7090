"""A client of a real server: a socket, and what was read from it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import struct
import sys
import termios
import time
from collections import deque
from typing import Callable

from .conversation import END, WHOAMI, Failure, Unanswered, describe

SEND_BUFFER_BYTES = 1 << 19
READ_BYTES_MAX = 1 << 20
FILLER_BYTES = 4_000  # of a packet that no step shows
FILLERS_MAX = 5_000
FILL_SECONDS_MAX = 0.5  # for a packet that the server has handled
UNREAD_PACKETS_MAX = 10_000  # no example leaves nearly as many to a client


class Wire:
    """A client of a real server."""

    def __init__(
        self,
        wire: socket.socket,
        seconds_max: float,
        gid: int,
        uid: int,
        pid: int,
    ) -> None:
        self.wire = wire
        self.seconds_max = seconds_max  # how long the server may take
        self.gid, self.uid, self.pid = gid, uid, pid
        self.make_way: Callable[[], None] = lambda: None  # for a packet
        self._inbox: deque[bytes] = deque()  # read on the way to an answer
        self._unanswered = 0
        self._is_deaf = False
        self._filler = b""  # the packet that waits for the client, so often
        self._filler_count = 0
        self._helper: Wire | None = None  # is told when we cannot read
        self.token = b""  # what a helper is told

    def send(self, packet: bytes) -> None:
        """Send a packet."""
        self._unanswered += packet.partition(b"\0")[0] == WHOAMI
        try:
            self._offer(packet)
        except BlockingIOError:
            raise Failure("the server does not read in time") from None
        except OSError as error:
            raise Failure(f"cannot send: {error.strerror}") from None

    def _offer(self, packet: bytes) -> None:
        """Send a packet, and wait only if that has to be."""
        try:
            self.wire.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.make_way()
            self.wire.send(packet)

    def settle(self) -> None:
        """Return once the server has handled all that was sent.

        One for whom fillers wait does not read: it tells its helper.
        """
        if not self._filler_count:
            return self._ask()
        assert self._helper
        try:
            self.send(self._helper.token)
        except Failure:
            return  # closed: the end is to be read
        heard = self._helper.receive()
        if heard != self._helper.token:
            raise Failure(f"a witness received {describe(heard)}")

    def _ask(self) -> None:
        """Ask, and read up to the answer; it answers all that came before."""
        if self._is_deaf or END in self._inbox:
            return
        with contextlib.suppress(Failure):  # closed: the end is to be read
            self.send(WHOAMI)
        while self._unanswered:
            try:
                packet = self._read()
            except Failure:
                raise Unanswered(self._unanswered_why()) from None
            if self._unanswered or packet == END:
                self._inbox.append(packet)
            if packet == END:
                return
            if len(self._inbox) > UNREAD_PACKETS_MAX:
                raise Failure(f"receives {describe(packet)} without end")

    def _unanswered_why(self) -> str:
        """Return what is wrong with the answer that is waited for."""
        why = "!/cred/whoami is not answered in time"
        for packet in self._inbox:
            if packet.startswith(WHOAMI) and b"\0" not in packet:
                why += f": received {describe(packet)}, which has no NUL"
        return why

    def receive(self) -> bytes:
        """Return the next packet that is no filler, or END."""
        return self._inbox.popleft() if self._inbox else self._read()

    def read_fillers(self, count: int = FILLERS_MAX) -> None:
        """Read so many of the fillers that wait, and nothing after them."""
        rest = max(0, self._filler_count - count)
        while self._filler_count > rest:
            packet = self._read_any()
            if packet == self._filler:
                self._filler_count -= 1
                continue
            self._inbox.append(packet)
            self._filler_count *= packet != END

    def _read(self) -> bytes:
        """Read the next packet that is no filler."""
        packet = self._read_any()
        while self._filler_count and packet == self._filler:
            self._filler_count -= 1
            packet = self._read_any()
        self._filler_count *= packet != END
        return packet

    def _read_any(self) -> bytes:
        """Read the next packet."""
        for _ in range(2):
            try:
                packet = self.wire.recv(READ_BYTES_MAX)
            except ConnectionResetError:
                continue  # [CLIENT-6] what was sent comes after it
            except BlockingIOError:
                raise Failure("received nothing in time") from None
            except OSError as error:
                raise Failure(f"cannot receive: {error.strerror}") from None
            self._unanswered -= packet.startswith(WHOAMI + b"\0")
            return packet
        return END

    def await_end(self, seconds_max: float = math.inf) -> None:
        """Return once the server has closed, or should have.

        As long as nothing is read the kernel takes no more packets.
        """
        if self._filler_count:
            poll = select.poll()
            poll.register(self.wire, select.POLLRDHUP)
            poll.poll(1000 * min(seconds_max, self.seconds_max))

    def pending(self) -> bytes | None:
        """Read until the client is settled; return what came first, if any."""
        self.read_fillers()
        self._ask()
        return self._inbox[0] if self._inbox else None

    def fill(self, helper: Wire, count: int) -> None:
        """Have a helper publish as many fillers as the kernel takes."""
        if self._helper:
            self._helper.close()
        self._filler = self._subscribe(b"fill")
        helper.token = helper._subscribe(b"settled")
        for _ in range(count):
            helper.send(self._filler)
        helper.settle()
        if not self._has_unread(count):
            raise Failure(f"received fewer than {count} fillers")
        self._filler_count, self._helper = count, helper

    def learn_room(self, helper: Wire) -> int:
        """Return how many fillers the kernel takes for this client."""
        self._filler = self._subscribe(b"fill")
        for count in range(FILLERS_MAX):
            helper.send(self._filler)
            helper.settle()
            if not self._has_unread(count + 1):
                return count
        raise Failure(f"the kernel takes {FILLERS_MAX} packets and more")

    def _has_unread(self, count: int) -> bool:
        """Return whether so many fillers wait to be read, or soon do."""
        end = time.monotonic() + FILL_SECONDS_MAX
        while unread_bytes(self.wire) < count * FILLER_BYTES:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)  # no event tells of one packet more
        return True

    def holds_exactly(self, count: int) -> bool:
        """Return whether so many packets, each like a filler, come."""
        is_enough = self._has_unread(count)
        return is_enough and unread_bytes(self.wire) == count * FILLER_BYTES

    def _subscribe(self, key: bytes) -> bytes:
        """Subscribe to a key of our own; return a message under it."""
        key += b"/%d" % self.wire.fileno()
        self.send(b"SUB " + key)
        self.settle()
        return (b"MSG %b\0" % key).ljust(FILLER_BYTES, b".")

    def shut(self) -> None:
        """Say that nothing more will be sent."""
        self.wire.shutdown(socket.SHUT_WR)

    def deafen(self) -> None:
        """Say that nothing more will be received."""
        self.wire.shutdown(socket.SHUT_RD)
        self._is_deaf = True

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()
        if self._helper:
            self._helper.close()

    def set_room(self, count: int) -> None:
        raise NotImplementedError


def unread_bytes(wire: socket.socket) -> int:
    """Return how many bytes of packets wait to be read."""
    count = fcntl.ioctl(wire, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(count, sys.byteorder)


def connect_socket(path: str | bytes, seconds_max: float) -> socket.socket:
    """Return a socket that is connected to a server."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole, part = divmod(seconds_max, 1)
    timeout = struct.pack("ll", int(whole), int(part * 1e6))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        wire.connect(path)
    except OSError:
        wire.close()
        raise
    return wire


def connect_in_child(
    path: str | bytes, seconds_max: float, gid: int, uid: int
) -> Wire:
    """Return a client that another process connected.

    It has that process's credentials, although the process has ended.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            hand_over(theirs, path, seconds_max, gid, uid)
        os.waitpid(child, 0)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise ConnectionError(0, f"user {uid} cannot")
    wire = socket.socket(fileno=descriptors[0])
    return Wire(wire, seconds_max, gid, uid, child)


def hand_over(
    to: socket.socket,
    path: str | bytes,
    seconds_max: float,
    gid: int,
    uid: int,
) -> None:
    """Become another user, connect, pass the socket on, and exit."""
    try:
        if (gid, uid) != (os.getegid(), os.geteuid()):
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        wire = connect_socket(path, seconds_max)
        socket.send_fds(to, [b"x"], [wire.fileno()])
    finally:
        os._exit(0)
