"""A simulated kernel: random clients on it, compared with the model.

It runs on one core without a socket or a clock.  Numbers such as K5 name the
kernel's habits that it imitates:

    K1   a packet above the send buffer is refused with EMSGSIZE
    K3   a packet costs 768 bytes more than it holds; as long as some room
         is left, a packet of any size is taken
    K5   a socket with room takes packets, but is reported as writable only
         when three quarters are free
    K9   a peer that shuts its reading side down is not reported; sends to
         it fail with EPIPE, and what it sends still arrives
    K10  after a peer has closed with unread packets, one call fails with
         ECONNRESET; then all that it sent arrives, then the end
    K21  a peer that has closed is reported as readable and writable
"""

from __future__ import annotations

import errno
import os
import random
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import sbus
from fake_kernel import OWNER, FakeListener, FakeSelector, FakeWire, but
from packets import WHOAMI, publish
from patterns import WIDE_LIMITS
from sbus import BACKLOG_BYTES
from spec_model import MODES, PREFIX, SECRET, USER_LIMITS, Model, Party, Setup

SLOTS = [  # who connects, and connects again after leaving
    sbus.Credentials(100, 1000, 11),
    sbus.Credentials(101, 1000, 12),
    sbus.Credentials(100, 1001, 13),
    sbus.Credentials(0, 0, 14),
    sbus.Credentials(100, OWNER, 15),
    sbus.Credentials(100, 65534, 16),
]

SETUPS = [
    Setup(),
    Setup(is_observed=True),
    Setup(USER_LIMITS),
    Setup(USER_LIMITS, is_strict=True, is_observed=True),
    Setup(cred_prefix=PREFIX, is_strict=True),
    Setup(but(USER_LIMITS, max_user_clients=1), PREFIX),
    Setup(allowed_uids=frozenset({0, 1000, 65534})),
    Setup(USER_LIMITS, packet_seconds=1 / 256),
]
PACKET_COST_BYTES = 768  # K3
INCOMING_MAX = 12  # packets that a client can send ahead
SETTLE_ROUNDS_MAX = 2_000

Step = tuple[str, int, Any]  # what, who, how


class SimWire:
    """A client's socket on the simulated kernel."""

    def __init__(self, world: World, slot: int, room_bytes: int) -> None:
        self.world = world
        self.slot = slot
        self.party = Party(SLOTS[slot])
        self.client: sbus.Client | None = None
        self.room_bytes = room_bytes
        self.used_bytes = 0  # of the room
        self.incoming: deque[bytes] = deque()  # sent, not read by the server
        self.unread: deque[int] = deque()  # costs of what the client may read
        self.failures: list[OSError] = []  # of the next sends
        self.ended = False  # nothing comes after what is incoming
        self.deaf = False  # sends fail with EPIPE
        self.reset = False  # the next call fails with ECONNRESET
        self.closed = False  # by the server
        self.is_broken = False  # an error that no socket in order has
        self.refused = False  # since a packet was taken
        self.is_starved = False  # refused for want of memory, likewise
        self.expelled = False
        self.took = False  # a packet, in this round
        self.send_buffer_bytes = 0
        self.taken_time = 0.0
        self.skipped = 0  # packets that were passed over in this round
        self.is_admitted = False
        self.had_turn = False
        self.last_taken = 0  # packets of its backlog, since its end was read
        self.held: set[sbus.Client] = set()  # publishers that it pauses
        self.held_time = 0.0  # since when, or since it took a packet

    # What the server calls

    def fileno(self) -> int:
        return 10 + self.slot

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        self.is_admitted = self.world.model.admit(self.party)
        gid, uid, pid = self.party.own
        return struct.pack("iII", pid, uid, gid)

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        if option == socket.SO_SNDBUF:
            self.send_buffer_bytes = 2 * value

    def setblocking(self, flag: bool, /) -> None:
        pass

    def recv_into(self, buffer: Any, size: int, flags: int, /) -> int:
        self.had_turn = True
        self._check_call()
        if self.incoming:
            packet = self.incoming.popleft()
            self.world.on_read(self, packet)
            count = min(len(packet), len(buffer))
            buffer[:count] = packet[:count]
            return len(packet)
        if self.ended:
            self.last_taken = 0
            self.world.model.leave(self.party)  # [CONN-10]
            return 0
        raise BlockingIOError(errno.EAGAIN, "nothing to read")

    def recvmsg(self, size: int, room: int, /) -> tuple[bytes, list[str]]:
        if self.incoming:
            self.incoming.popleft()
            return b"", ["credentials"]
        self.recv_into(bytearray(size), 0, socket.MSG_TRUNC)
        return b"", []

    def send(self, packet: Any, /) -> int:
        self._check_call()
        if self.failures:
            self.refused = self.is_starved = True
            raise self.failures.pop()
        if self.deaf:
            self.party.may_discard = True
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        if len(packet) + 32 > self.send_buffer_bytes:  # K1
            raise OSError(errno.EMSGSIZE, "message too long")
        if self.used_bytes >= self.room_bytes:
            self.refused = True
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.refused = self.is_starved = False
        self.took = True
        self.taken_time = self.world.now
        self.world.on_send(self, bytes(packet))
        cost = len(packet) + PACKET_COST_BYTES
        self.used_bytes += cost
        self.unread.append(cost)
        return len(packet)

    def has_room(self) -> bool:
        """Return whether a packet would be taken."""
        is_able = not (self.is_starved or self.deaf or self.reset)
        return is_able and self.used_bytes < self.room_bytes

    def _check_call(self) -> None:
        assert not self.closed, "a call after close"
        if self.reset:
            self.reset = False
            self.party.may_discard = True
            raise ConnectionResetError(errno.ECONNRESET, "reset")

    def shutdown(self, how: int, /) -> None:
        assert how == socket.SHUT_RDWR
        assert self.expelled, "shut down without a cause"
        self.ended = self.deaf = True

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.world.on_close(self)

    def events(self) -> int:
        """Return what the socket is ready for."""
        events = 0
        if self.incoming or self.ended or self.reset:
            events |= sbus.READ
        if self.used_bytes * 4 <= self.room_bytes or self.ended:  # K5, K21
            events |= sbus.WRITE
        return events

    # What the client does

    def read(self, count: int) -> None:
        """Read packets, as many as there are."""
        for _ in range(min(count, len(self.unread))):
            self.used_bytes -= self.unread.popleft()

    def leave(self) -> None:
        """Close the client's side."""
        self.reset = bool(self.unread)  # K10
        self.ended = self.deaf = True
        self.unread.clear()
        self.used_bytes = 0


class SimListener(FakeListener):
    """Is asked for another client once the last one is judged."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def accept(self) -> tuple[FakeWire, None]:
        self.world.judge_newcomer()
        return super().accept()


class SimBus(sbus.Bus):
    """Tells each wire who its client is."""

    def open(self, credentials: sbus.Credentials, wire: Any) -> sbus.Client:
        client = super().open(credentials, wire)
        wire.client = client
        wire.world.newcomer = wire
        return client


class SimServer(sbus.Server):
    """Tells each wire that its client is to be disconnected, or at its end."""

    def _depart(self, client: sbus.Client) -> None:
        wire: Any = client.wire
        super()._depart(client)
        wire.world.on_departure(wire)

    def expel(
        self, client: sbus.Client, error: Exception, ignored: bool = False
    ) -> None:
        wire: Any = client.wire
        if not (client.closed or client.fault):
            wire.world.on_expulsion(wire, client.ignored or ignored)
        elif (
            ignored
        ):  # one too many, which had been expelled in its first turn
            wire.party.is_wrong = True
        super().expel(client, error, ignored)


class SimSelector(FakeSelector):
    """Reports events in any order, and not always all of them."""

    salt = 0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.timeouts.clear()
        if self.salt & 1:
            ready.reverse()
        first = self.salt % (len(ready) or 1)
        return ready[first:] + ready[: first if self.salt & 2 else 0]


class Witness(sbus.Journal):
    """Sees what only the moment shows: limits, and what is left at the end."""

    def __init__(self, world: World) -> None:
        super().__init__(-1, {}, False, False)
        self.world = world

    def note(
        self,
        event: str,
        client: sbus.Client,
        text: str = "",
        packet: sbus.Packet = b"",
        **facts: Any,
    ) -> None:
        super().note(event, client, text, packet, **facts)
        if event == "close":
            self.on_close(client, text)
        elif event == "pause":
            self.on_pause(client)
        elif event == "queue":
            self.on_queue(client, packet)
        elif event == "drop":
            self.on_drop(client, packet, text)

    def on_close(self, client: sbus.Client, reason: str) -> None:
        wire: Any = client.wire
        if reason == "end of input":  # [CONN-10]
            assert not client.used[BACKLOG_BYTES] or not wire.has_room(), (
                "the kernel would have taken more"
            )

    def on_pause(self, publisher: sbus.Client) -> None:
        wire: Any = publisher.wire
        wire.party.counts["paused"] += len(publisher.held_by) == 1

    def on_queue(self, client: sbus.Client, packet: sbus.Packet) -> None:
        if self.world.limits_broken(client, 0):  # [BLOCK-10] [BLOCK-18]
            wire: Any = client.wire
            held: list[Any] = [publisher.wire for publisher in client.holding]
            publisher = self.world.model.publishers[bytes(packet)]
            assert wire.party.hard == "block", "queued beyond a limit"
            assert publisher in [one.party for one in held], "not paused"

    def on_drop(
        self, client: sbus.Client, packet: sbus.Packet, reason: str
    ) -> None:
        wire: Any = client.wire
        soft, hard = wire.party.soft, wire.party.hard
        if reason == "deaf":  # [CONN-8]
            assert client.deaf
        elif reason == "soft/discard":  # [BLOCK-5]
            assert soft == "discard"
        else:  # [BLOCK-9]
            assert (reason, hard) == ("hard/discard", "discard")
            assert self.world.limits_broken(client, len(packet) + 128)


class World:
    """A server on a simulated kernel, its clients, and the model."""

    def __init__(self, setup: Setup) -> None:
        self.now = 0.0
        self.log: list[object] = []
        self.setup = setup
        self.limits = setup.limits
        self.model = Model(setup)
        self.listener = SimListener(self)
        self.selector = SimSelector()
        self.bus = SimBus(
            setup.limits, OWNER, setup.cred_prefix, setup.is_strict
        )
        if setup.is_observed:
            self.bus.journal = Witness(self)
        listener: Any = self.listener
        self.server = SimServer(
            self.bus,
            listener,
            self.selector,
            lambda: self.now,
            setup.allowed_uids,
            processor_clock=lambda: self.now,
        )
        self.slots: list[SimWire | None] = [None] * len(SLOTS)
        self.wires: dict[SimWire, None] = {}  # those that are not closed
        self.newcomer: SimWire | None = None  # accepted and not yet judged
        self.is_table_new = False  # it has changed since it was checked
        self.is_stopping = False
        self.discarded = 0  # packets for clients that have gone

    # ---- Steps

    def step(self, step: Step) -> None:
        """Do one step; one that is not possible now does nothing."""
        what, slot, how = step
        if what == "serve":
            self.serve(how)
        elif what == "connect":
            self.connect(slot, how)
        elif what == "wait":
            self.wait(how)
        elif what == "exhaust":
            self.listener.failures.append(OSError(how, os.strerror(how)))
        else:
            wire = self.slots[slot]
            if wire and not wire.closed:
                self.act(wire, what, how)

    def connect(self, slot: int, room_packets: int) -> None:
        """Connect a client, unless it is connected."""
        wire = self.slots[slot]
        if not wire or wire.closed or wire.ended:
            wire = SimWire(self, slot, room_packets * (PACKET_COST_BYTES + 20))
            self.slots[slot] = wire
            self.wires[wire] = None
            waiting: Any = self.listener.waiting
            waiting.append(wire)

    def act(self, wire: SimWire, what: str, how: Any) -> None:
        """Have a client do something."""
        if what == "send":
            if not wire.ended and len(wire.incoming) < INCOMING_MAX:
                wire.incoming.append(how)
        elif what == "read":
            wire.read(how)
        elif what == "fail":
            wire.failures.append(OSError(how, os.strerror(how)))
            wire.is_broken |= how == errno.EIO
        elif what == "finish":  # a half-close
            wire.ended = True
        elif what == "deafen":
            wire.deaf = True  # K9
        elif what == "leave":
            wire.leave()
            self.slots[wire.slot] = None

    def serve(self, salt: int) -> None:
        """Give the server a round, and check everything."""
        self.selector.salt = salt
        self.server.round(0)
        self.check()

    def wait(self, seconds: float) -> None:
        """Let time pass in rounds that do not look like a stop."""
        for _ in range(8):
            self.now += seconds / 8  # exactly
            self.serve(0)

    # ---- What the wires report

    def on_read(self, wire: SimWire, packet: bytes) -> None:
        """Note that the server has read a packet."""
        party = wire.party
        self.now += self.setup.packet_seconds
        if party.is_wrong:
            assert wire.client and wire.client.ignored, "read after a mistake"
            return
        self.log.append((wire.slot, "sent", packet[:40]))
        if wire.ended and not (packet or wire.incoming or wire.reset):
            # An empty packet before the end cannot be told from the end
            return
        self.model.handle(party, packet)
        self.model.faults += party.is_wrong and not wire.expelled
        self.is_table_new |= packet[:3] in (b"SUB", b"UNS")

    def on_send(self, wire: SimWire, packet: bytes) -> None:
        """Check that a packet is owed, and is the next to be sent."""
        self.log.append((wire.slot, "heard", packet[:40]))
        party = wire.party
        party.counts["delivered"] += 1
        assert wire.client
        if wire.client.used[BACKLOG_BYTES]:
            self.account(wire)
            index = party.next_index()
            assert party.pending[index] == packet, "not the next packet"
            del party.pending[index]
            wire.last_taken += 1
            return
        assert packet in party.pending, "not owed, or out of order"
        index = party.pending.index(packet)  # [BLOCK-3]
        wire.skipped += index
        party.taken_at_once += 1
        del party.pending[: index + 1]

    def on_departure(self, wire: SimWire) -> None:
        """Note that who has not gone comes back to hand over more."""
        if not wire.closed:
            assert wire.last_taken, "not closed at its end"  # [CONN-10]
            self.model.stay(wire.party)

    def judge_newcomer(self) -> None:
        """Check that who came last is expelled if it is one too many."""
        wire, self.newcomer = self.newcomer, None
        if wire and wire.party in self.model.parties:
            is_crowded = self.model.is_crowded(wire.party)
            is_behind = bool(self.server._late)  # who is late may have left
            is_expelled = wire.expelled or is_behind
            assert is_expelled or not is_crowded, "one too many"

    def on_expulsion(self, wire: SimWire, is_ignored: bool) -> None:
        """Check that a client is disconnected for a cause."""
        self.log.append((wire.slot, "expelled"))
        wire.expelled = True
        wire.party.may_discard = True
        self.model.faults += not wire.party.is_wrong
        client = wire.client
        assert client
        if wire.party.is_wrong:
            return
        wire.party.is_wrong = is_ignored
        if wire is self.newcomer and self.model.is_crowded(wire.party):
            assert wire.had_turn, "judged before it was read"
            return
        size = max(map(len, wire.party.pending), default=0)
        is_full = bool(self.limits_broken(client, size + 128))
        waited = self.now - wire.taken_time
        is_idle = client.holding and waited >= self.limits.block_timeout
        is_stalled = wire.refused or client.used[BACKLOG_BYTES]
        assert wire.is_broken or (
            is_stalled and (wire.party.soft == "error" or is_full or is_idle)
        ), "expelled for nothing"

    def limits_broken(self, client: sbus.Client, size: int) -> list[str]:
        """Return which limits that many more bytes of backlog would break."""
        limits = self.limits
        bus_max = limits.max_bus_backlog
        uses = {"client": (client.used[BACKLOG_BYTES], limits.max_backlog)}
        wire: Any = client.wire
        if not wire.party.is_privileged:
            bus_max -= bus_max // 4  # [LIMIT-16]
            used = client.user.used[BACKLOG_BYTES]
            uses["user"] = (used, limits.max_user_backlog)  # [LIMIT-14]
        uses["bus"] = (
            self.bus.accounts.used[BACKLOG_BYTES],
            bus_max,
        )  # [LIMIT-15]
        return [
            name for name, (used, most) in uses.items() if used + size > most
        ]

    def on_close(self, wire: SimWire) -> None:
        """Check that a client was disconnected for a cause, and heard out."""
        self.log.append((wire.slot, "closed"))
        del self.wires[wire]
        assert bool(wire.client) == wire.is_admitted, "let in or kept out"
        if wire.client:
            self.discarded += wire.client.discarded
            self.check_counts(wire.client, wire.party)
            wire.party.sum.update(wire.client.counts())
        is_here = wire.party in self.model.parties
        assert self.is_stopping or not is_here, "closed before its end"
        self.model.leave(wire.party)
        self.is_table_new = True
        if wire.client and not wire.party.is_wrong and not self.is_stopping:
            assert wire.ended, "disconnected for nothing"
            assert not wire.incoming, "not heard out"  # [CONN-6] [CONN-18]

    # ---- What must be so after each round

    def check(self) -> None:
        """Compare all that the server holds with what is so."""
        bus = self.bus
        self.judge_newcomer()
        assert not bus.touched, "an outbox was left"
        watched = discarded = 0
        for client in bus.clients.values():
            watched += self.check_client(client, client.wire)
            discarded += client.discarded
        assert len(bus.clients) == len(self.model.parties)
        assert sum(bus.flood.discarded.values()) == discarded + self.discarded
        assert sum(self.server.disconnected.values()) == self.model.faults
        resting = self.has_alarm(sbus.Server._listen)
        assert (self.listener in self.selector.keys) != resting
        assert len(self.selector.keys) == watched + (not resting), (
            "somebody is watched who is closed"
        )
        self.check_users()
        if self.is_table_new:
            self.is_table_new = False
            self.check_tables()

    def check_client(self, client: sbus.Client, wire: Any) -> bool:
        """Check one client; return whether it is watched."""
        assert not client.closed and not wire.closed
        assert not client.outbox
        is_over = client.ignored
        assert is_over or not wire.party.is_wrong, "a mistake without end"
        assert wire.client is client
        party = wire.party
        assert party in self.model.parties
        self.account(wire)
        assert client.discarded == party.counts["discarded"], "not counted"
        self.check_counts(client, party)
        bytes_ = sum(map(len, party.pending)) + 128 * len(party.pending)
        assert client.used[BACKLOG_BYTES] == bytes_, "wrong count of bytes"
        self.check_holding(client)
        self.check_modes(client, wire)
        is_starved = client.starved
        assert is_starved == self.has_alarm(sbus.Server._feed, client)
        events = 0 if client.held_by else sbus.READ
        if bytes_ and not (is_starved or client.deaf):
            events |= sbus.WRITE
        key = self.selector.keys.get(wire)
        assert client.events == events == (key.events if key else 0), (
            "watched for the wrong events"
        )
        party.may_discard = client.deaf or "discard" in (
            party.soft,
            party.hard,
        )
        return key is not None

    def account(self, wire: SimWire) -> None:
        """Check that what is owed waits, or was counted as discarded."""
        client, party = wire.client, wire.party
        assert client
        party.counts["discarded"] += wire.skipped
        wire.skipped = 0
        waiting = by_arrival(client.backlog)
        if waiting != party.pending:
            lost = difference(party.pending, waiting)
            is_lossy = party.may_discard
            assert is_lossy or not lost, "a packet is missing"
            assert client.deaf or not any(
                packet.startswith(b"CMSG ") for packet in lost
            ), "an answer is missing"  # [BLOCK-17]
            party.pending = waiting
            party.counts["discarded"] += len(lost)

    def check_counts(self, client: sbus.Client, party: Party) -> None:
        """Compare what a client has done with what the server counted."""
        expected = party.counts
        expected["refused"] = party.owed - party.taken_at_once
        for name in ("published", "delivered", "refused", "paused"):
            is_known = name != "paused" or self.setup.is_observed
            count = getattr(client, name)
            assert not is_known or count == expected[name], f"{name}: {count}"

    def check_holding(self, client: sbus.Client) -> None:
        """Check who is paused by whom, and that there is a time limit."""
        for publisher, level in client.holding.items():
            assert client in publisher.held_by
            assert not publisher.closed, "a client that left is held"
            assert client.used[BACKLOG_BYTES] > level, "held for nothing"
            uid = client.credentials.uid  # [BLOCK-13]
            is_same = uid == publisher.credentials.uid and uid != 65534
            assert is_same or uid in (0, OWNER), "held by another user"
        for holder in client.held_by:
            assert not holder.closed and client in holder.holding, (
                "paused by nobody"
            )
        is_holder = self.has_alarm(sbus.Server._check_holder, client)
        assert is_holder == bool(client.holding)
        wire: Any = client.wire
        held = set(client.holding)
        if wire.took or not held & wire.held:
            wire.held_time = self.now
        wire.held = held
        seconds = self.now - wire.held_time
        is_due = held and seconds >= self.limits.block_timeout
        assert not is_due or self.server._owes(client.user), (  # [CONN-19]
            "holds publishers for too long"
        )  # [BLOCK-16]

    def check_modes(self, client: sbus.Client, wire: SimWire) -> None:
        """Check that those are paused who are to be, and note the mode."""
        party = wire.party
        wires: list[Any] = [held.wire for held in client.holding]
        held = [wire.party for wire in wires]
        packets = [one for one in party.pending if one[:4] == b"MSG "]
        expected = []
        is_over = client.used[BACKLOG_BYTES] > self.limits.max_backlog
        is_new = len(packets) > party.waited and not wire.took
        if is_over and is_new:  # [BLOCK-10]
            expected = packets[-1:]
        if party.same_soft == "block":  # [BLOCK-7]
            expected = packets
        if party.same_soft in ("discard", "error"):  # [BLOCK-5] [BLOCK-8]
            assert not packets, "queued in spite of the soft mode"
        for packet in [] if client.deaf else expected:
            publisher = self.model.publishers[packet]
            uids = (party.own.uid, publisher.own.uid)
            may_hold = uids[0] in (0, OWNER) or (
                uids[0] == uids[1] and uids[0] != 65534
            )
            is_here = publisher in self.model.parties
            is_here &= not publisher.is_wrong
            assert publisher in held or not (may_hold and is_here), (
                "not paused"
            )
        if not party.pending:
            party.same_soft = party.soft
        party.waited = len(packets)
        wire.took = False

    def check_users(self) -> None:
        """Check what the clients of each user use and have done together."""
        check_sums(self.bus)
        for uid, user in self.bus.users.items():
            assert user.past == self.model.sums[uid], "wrong counts of a user"

    def check_tables(self) -> None:
        """Check the subscriptions, and what is remembered of them."""
        for client in self.bus.clients.values():
            wire: Any = client.wire
            assert client.patterns == wire.party.patterns
        check_subscriptions(self.bus)

    def has_alarm(self, call: Callable[..., None], whose: Any = None) -> bool:
        """Return whether something is to be done later."""
        return any(
            method.__func__ is call and whose in (None, one)  # type: ignore
            for method, one in self.server._alarms
        )

    # ---- The end

    def settle(self) -> None:
        """Let everybody read and time pass, until all is delivered."""
        for _ in range(SETTLE_ROUNDS_MAX):
            self.now += 1 / 16
            self.serve(2)
            for wire in self.wires:
                wire.read(1_000)
            if not self.server._alarms and not self.selector.select():
                break
        else:
            raise AssertionError("the server spins")
        for wire in self.wires:
            assert not wire.party.pending, "not delivered"
            assert not wire.incoming, "not read"

    def stop(self) -> None:
        """Stop the server; nothing may be left open."""
        self.is_stopping = True
        self.server.stop()
        self.server.run()
        assert not self.wires and not self.bus.clients
        assert not self.selector.keys and self.listener.closed
        check_subscriptions(self.bus)
        self.model.publishers.clear()  # large packets, held in a cycle


def by_arrival(backlog: sbus.Backlog) -> list[bytes]:
    """Return the packets of a backlog, oldest first."""
    return list(backlog)


def difference(owed: list[bytes], waiting: list[bytes]) -> list[bytes]:
    """Return what is owed and does not wait; all that waits is owed."""
    left = deque(waiting)
    lost = []
    for packet in owed:
        if left and left[0] == packet:
            left.popleft()
        else:
            lost.append(packet)
    assert not left, "a packet waits that is not owed, or in another order"
    return lost


def check_sums(bus: sbus.Bus) -> None:
    """Check what the clients of each user use together."""
    users = bus.users.values()
    assert sum(len(user.clients) for user in users) == len(bus.clients)
    total = [0] * len(sbus.USE_LIMITS)
    for uid, user in bus.users.items():
        assert user.clients, "a user without clients is remembered"
        used = [0] * len(sbus.USE_LIMITS)
        for client in user.clients:
            assert client.credentials.uid == uid and not client.closed
            check_use(client)
            used = [*map(sum, zip(used, client.used))]
        assert user.used == used, "wrong sums of a user"
        total = [*map(sum, zip(total, used))]
    assert bus.accounts.used == total


def check_use(client: sbus.Client) -> None:
    """Check what a client uses of what is limited."""
    assert client.used == [
        1,
        len(client.patterns),
        sum(map(len, client.patterns)),
        sum(map(sbus.cost, client.backlog)),
    ]


def check_subscriptions(bus: sbus.Bus) -> None:
    """Check that the tables and recent keys hold what clients hold."""
    for table, fresh in zip((bus._public, bus._secret), tables_for(bus)):
        assert holders_in(table) == holders_in(fresh)
        assert table._shapes == fresh._shapes
        assert table._users == fresh._users
    heads = []
    for start, some in bus._recent_heads.items():
        assert some and all(is_in_group(head, start) for head in some)
        heads += some
    assert sorted(heads) == sorted(bus._recent)
    for head, receivers in bus._recent.items():
        assert set(receivers) == set(bus._public.find(head[4:]))


def is_in_group(head: bytes, start: bytes) -> bool:
    return head[4:].split(b"/")[0] == start


def tables_for(bus: sbus.Bus) -> list[sbus.SubscriptionTable]:
    """Return new tables, public and secret, of what the clients hold."""
    tables = [sbus.SubscriptionTable(WIDE_LIMITS) for _ in range(2)]
    for client in bus.clients.values():
        for pattern in client.patterns:
            own, prefix = client.credentials, bus.cred_prefix
            is_secret = pattern.startswith(SECRET)
            some = (
                sbus.resolve(pattern, own, prefix) if is_secret else [pattern]
            )
            for one in some:
                tables[is_secret].add(one, client)
    return tables


def holders_in(table: sbus.SubscriptionTable) -> object:
    """Return which clients hold which patterns, and how often each."""
    found = {}
    for pattern, holders in table._holders.items():
        counts = holders if isinstance(holders, dict) else {holders: 1}
        found[pattern] = {one.number: count for one, count in counts.items()}
    return found


WEIGHTS = {
    "serve": 36,
    "send": 44,
    "read": 10,
    "connect": 6,
    "leave": 0.5,
    "finish": 0.3,
    "deafen": 0.2,
    "fail": 0.7,
    "exhaust": 0.2,
    "wait": 3,
}
PATTERNS = [b"", b"a", b"a/", b"a/*", b"*", b"*/b", b"*/", b"b*", b"a*b"]
PATTERNS += [b"!x", b"b/c", b"a/b"]
KEYS = [b"a", b"b", b"a/b", b"a/", b"ab", b"b/c", b"", b"!x", b"a/b/c"]

MISTAKES = [b"", b"MSG a", b"SUB", b"SUB a/!", b"MSG !\0", b"hello"]
MISTAKES += [bytes(20_001), b"SUB !/cred/1/*/", b"SUB " + b"a" * 65]
MISTAKES += [word + b"/" * 12 + b"\0" for word in (b"SUB ", b"MSG ", b"CMSG ")]
SIZES = [0] * 30 + [300] * 4 + [3_000, 17_000]


def secrets_of(slot: int) -> list[bytes]:
    """Return secret texts that are good as keys and as patterns."""
    gid, uid, pid = SLOTS[slot]
    texts = [f"{gid}/{uid}/{pid}/x", f"/{uid}//x", "///", f"{gid}///x/y"]
    return [SECRET + text.encode() for text in texts]


SECRETS = [secrets_of(slot) for slot in range(len(SLOTS))]


def make_packet(
    random_: random.Random, number: int, slot: int, setup: Setup
) -> bytes:
    """Return a packet for a client to send."""
    pick = random_.random()
    if pick < 0.62:
        is_secret = random_.random() < 0.15
        keys = random_.choice(SECRETS) if is_secret else KEYS
        key = random_.choice(keys)
        payload = b"%d " % number + bytes(random_.choice(SIZES))
        return publish(setup.full(key) if is_secret else key, payload)
    if pick < 0.88:
        most = 0.87 if setup.is_strict else 0.77
        word = b"SUB " if pick < most else b"UNSUB "
        if random_.random() < 0.2:
            return word + setup.full(random_.choice(SECRETS[slot]))
        return word + random_.choice(PATTERNS)
    if pick < 0.96:
        return b"CMSG " + random_.choice(MODES).encode()
    if pick < 0.99:
        return WHOAMI
    if pick < 0.998:
        return b"SUB " + random_.choice(random_.choice(SECRETS))
    return random_.choice(MISTAKES)


def make_steps(seed: int, count: int, setup: Setup) -> list[Step]:
    """Return the steps of a run."""
    random_ = random.Random(seed)
    weights = dict(WEIGHTS)
    weights["read"] *= random_.choice([0.2, 1, 3])  # slow and fast readers
    weights["serve"] *= random_.choice([0.5, 1])
    rooms = random_.choice([[1, 2, 4], [4, 12], [1, 40]])
    names = random_.choices(list(weights), list(weights.values()), k=count)
    steps: list[Step] = [
        ("connect", slot, random_.choice(rooms)) for slot in range(5)
    ]
    errors = [errno.ENOBUFS, errno.ENOMEM] * 8 + [errno.EIO]
    for number, what in enumerate(names):
        slot = random_.randrange(len(SLOTS))
        how: Any = None
        if what == "send":
            how = make_packet(random_, number, slot, setup)
        elif what == "serve":
            how = random_.randrange(64)
        elif what == "read":
            how = random_.choice([1, 2, 5, 100])
        elif what == "connect":
            how = random_.choice(rooms)
        elif what == "fail":
            how = random_.choice(errors)
        elif what == "exhaust":
            how = random_.choice([errno.EMFILE, errno.ECONNABORTED])
        elif what == "wait":
            how = random_.choice([1 / 64, 1 / 16, 1.0, 5.0])
        steps.append((what, slot, how))
    return steps


def run_steps(steps: Iterable[Step], setup: Setup) -> World:
    """Run steps on a new bus, let it settle, and stop it."""
    world = World(setup)
    for step in steps:
        world.step(step)
    world.settle()
    world.stop()
    return world


def failure_of(steps: Sequence[Step], setup: Setup) -> str:
    """Return how a run fails, nothing if it does not."""
    try:
        run_steps(steps, setup)
    except Exception as error:  # whatever the mistake in sbus.py is
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def shrink(
    steps: list[Step], is_failing: Callable[[list[Step]], bool]
) -> list[Step]:
    """Remove steps for as long as the rest still fails."""
    end = time.monotonic() + 30
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps) and time.monotonic() < end:
            fewer = steps[:start] + steps[start + size :]
            if is_failing(fewer):
                steps = fewer
            else:
                start += size
        size //= 2
    return steps


def as_python(step: Step) -> str:
    """Return a step as Python, with the padding of packets made short."""
    what, slot, how = step
    text = repr(how)
    if isinstance(how, bytes) and len(how) > 64:
        start = how.rstrip(how[-1:])
        padding = f"{how[-1:]!r} * {len(how) - len(start)}"
        text = f"{start!r} + {padding}" if start else padding
    return f"({what!r}, {slot}, {text})"


def replay_of(steps: list[Step], setup: Setup) -> str:
    """Return the shortest failing run that is found, as Python."""
    steps = shrink(steps, lambda fewer: bool(failure_of(fewer, setup)))
    lines = "".join(f"        {as_python(step)},\n" for step in steps)
    where = f"SETUPS[{SETUPS.index(setup)}]"
    return (
        f"{failure_of(steps, setup)}\n    run_steps([\n{lines}    ], {where})"
    )
