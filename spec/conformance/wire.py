"""A client of a real server: a socket, and what was read from it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import socket
import struct
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Callable

from .conversation import END, WHOAMI, Failure, describe

SEND_BUFFER_BYTES = 1 << 19
READ_BYTES_MAX = 1 << 20
FILLER_BYTES = 4_000  # of a packet that no step shows
FILLERS_MAX = 5_000
FILL_SECONDS_MAX = 0.5  # for a packet that the server has handled
UNREAD_PACKETS_MAX = 10_000  # no example leaves nearly as many to a client


class Unanswered(Failure):
    """A server does not say that it has handled all."""


class Wire:
    """A client of a real server."""

    def __init__(
        self,
        wire: socket.socket,
        seconds_max: float,
        credentials: tuple[int, int, int],
    ) -> None:
        self.wire = wire
        self.name = "a new client"
        self.seconds_max = seconds_max  # how long the server may take
        self.gid, self.uid, self.pid = credentials
        self.make_way: Callable[[], None] = lambda: None  # for a packet
        self._inbox: deque[bytes] = deque()  # read on the way to an answer
        self._unanswered = 0
        self._is_deaf = False
        self._filler = b""  # the packet that waits for the client, so often
        self._filler_count = 0
        self._helper: Wire | None = None  # is told when we cannot read
        self.token = b""  # what a helper is told
        self.counts = Counter(published=0, delivered=0)  # as [CTL-5] says
        self.patterns: Counter[bytes] = Counter()

    def send(self, packet: bytes) -> None:
        """Send a packet, and wait only if that has to be."""
        self._unanswered += packet.partition(b"\0")[0] == WHOAMI
        try:
            try:
                self.wire.send(packet, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self.make_way()
                self.wire.send(packet)
        except BlockingIOError:
            raise Failure("the server does not read in time") from None
        except (BrokenPipeError, ConnectionResetError):
            raise Failure("cannot send: the server has closed") from None
        except OSError as error:
            raise Failure(f"cannot send: {error.strerror}") from None
        kind, _, text = packet.partition(b"\0")[0].partition(b" ")
        self.counts["published"] += kind == b"MSG"
        if kind == b"SUB":
            self.patterns[text] += 1
        elif kind == b"UNSUB":
            self.patterns -= Counter([text])

    def settle(self) -> None:
        """Return once the server has handled all; do not read if stalled."""
        if not self._filler_count:
            return self._ask()
        assert self._helper
        try:
            self.send(self._helper.token)
        except Failure:
            return  # closed: the end is to be read
        poll = select.poll()
        poll.register(self._helper.wire, select.POLLIN)
        poll.register(self.wire, select.POLLRDHUP)
        ready = dict(poll.poll(1000 * self.seconds_max))
        if ready and self._helper.wire.fileno() not in ready:
            return  # closed, for a mistake before
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
            except Failure as failure:
                text = f"{self.name}'s {WHOAMI[5:].decode()} is not answered"
                raise Unanswered(f"{text}: {failure}") from None
            if self._unanswered or packet == END:
                self._inbox.append(packet)
            if packet == END:
                return
            if len(self._inbox) > UNREAD_PACKETS_MAX:
                raise Failure(f"receives {describe(packet)} without end")

    def receive(self) -> bytes:
        """Return the next packet that is no filler, or END."""
        return self._inbox.popleft() if self._inbox else self._read()

    def read_fillers(self, count: int = FILLERS_MAX) -> None:
        """Read so many of the fillers that wait, and nothing after them."""
        rest = max(0, self._filler_count - count)
        while self._filler_count > rest:
            packet = self._read_any()
            if packet is not None:
                self._inbox.append(packet)

    def _read(self) -> bytes:
        """Read the next packet that is no filler."""
        while (packet := self._read_any()) is None:
            pass
        return packet

    def _read_any(self) -> bytes | None:
        """Read the next packet; None stands for a filler."""
        for _ in range(2):
            try:
                packet = self.wire.recv(READ_BYTES_MAX)
            except ConnectionResetError:
                continue  # [CLIENT-6] what was sent comes after it
            except BlockingIOError:
                raise Failure("received nothing in time") from None
            except OSError as error:
                raise Failure(f"cannot receive: {error.strerror}") from None
            if packet == END and not self._has_closed():
                raise Failure("received an empty packet")
            self._unanswered -= packet.startswith(WHOAMI + b"\0")
            self.counts["delivered"] += packet != END
            if packet == self._filler and self._filler_count:
                self._filler_count -= 1
                return None
            self._filler_count *= packet != END
            return packet
        return END

    def await_end(self, seconds_max: float = math.inf) -> None:
        """Return once the server has closed, or should have; read nothing."""
        if self._filler_count:
            self._has_closed(min(seconds_max, self.seconds_max))

    def _has_closed(self, seconds_max: float = 0.0) -> bool:
        """Return whether the server closes the connection in time."""
        poll = select.poll()
        poll.register(self.wire, select.POLLRDHUP)
        return bool(poll.poll(1000 * seconds_max))

    def pending(self) -> bytes | None:
        """Read until the client is settled; return what came first, if any."""
        self.read_fillers()
        self._ask()
        return self._inbox[0] if self._inbox else None

    def stats(self) -> bytes:
        """Return the answer to `stats`, or nothing if there is none."""
        if self._is_deaf or self._inbox:
            return b""
        with contextlib.suppress(Failure):
            self.send(b"CMSG stats")
            self._ask()
        answer = self._inbox.popleft() if self._inbox else b""
        return answer if answer.startswith(b"CMSG stats\0") else b""

    def own_numbers(self) -> dict[str, int]:
        """Return what `stats` is to tell it of itself [CTL-5]."""
        sizes = [len(text) for text in self.patterns]
        uses = {"patterns": len(sizes), "pattern_bytes": sum(sizes)}
        return {**self.counts, **uses}

    def unread_bytes(self) -> int:
        """Return how many bytes wait to be read."""
        size = fcntl.ioctl(self.wire, termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(size, sys.byteorder)

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
        while time.monotonic() < end:
            if self.unread_bytes() >= count * FILLER_BYTES:
                return True
            time.sleep(0.001)  # no event tells of one packet more
        return False

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


def numbers_in(answer: bytes) -> dict[str, Any]:
    """Return the numbers of an answer to `stats`; nothing has none."""
    try:
        return dict(json.loads(answer.partition(b"\0")[2] or b"{}"))
    except ValueError:
        raise Failure(f"received {describe(answer)}") from None


def connect(
    name: str | bytes,
    seconds_max: float,
    credentials: Mapping[str, int] | None,
    kind: type[Wire] = Wire,
) -> Wire:
    """Return a client; if it has credentials, a process connects it."""
    gid, uid, pid = os.getegid(), os.geteuid(), os.getpid()
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole, part = divmod(seconds_max, 1)
    timeout = struct.pack("ll", int(whole), int(part * 1e6))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        if credentials is None:
            wire.connect(name)
        else:
            gid = credentials.get("gid", gid)
            uid = credentials.get("uid", uid)
            pid = connect_in_child(wire, name, gid, uid)
    except OSError:
        wire.close()
        raise
    return kind(wire, seconds_max, (gid, uid, pid))


def connect_in_child(
    wire: socket.socket, name: str | bytes, gid: int, uid: int
) -> int:
    """Have a user's process connect a socket; return its number."""
    child = os.fork()
    if not child:
        error = errno.EPERM  # it may not be that user
        try:
            if (gid, uid) != (os.getegid(), os.geteuid()):
                os.setgroups([])
                os.setgid(gid)
                os.setuid(uid)
            error = wire.connect_ex(name)
        finally:
            os._exit(error)

    _, status = os.waitpid(child, 0)
    error = os.waitstatus_to_exitcode(status)
    if error:
        raise OSError(error, f"user {uid}: {os.strerror(error)}")
    return child
