"""What an observer of a server's process sees when its clients work."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .conversation import END, WHOAMI, Failure, describe
from .processes import is_running
from .trial import NotApplicable, Trial, check, hear, require
from .wire import FILLER_BYTES, Wire

OVERHEAD_BYTES = 128  # [LIMIT-12] of each packet of a backlog
CROWD = 300  # clients
PACKETS = 25_000
BATCH_PACKETS = 100
TURN_PACKETS = 200  # of a client, more than a turn has
IDLE_SECONDS = 0.5
LOOKS = 50  # in that time
SPIN_SHARE_MAX = 0.5  # of looks at a server that nobody asks for anything


# =============================================================================
# Many clients, many packets
# =============================================================================


@check("PUB-1")
def crowd_of_clients(trial: Trial) -> None:
    with descriptors(CROWD + 50):
        trial.say(f"{CROWD} clients subscribe to k")
        crowd = [trial.client("k") for _ in range(CROWD)]
        trial.say("another publishes two messages")
        publisher = trial.client()
        for payload in (b"1", b"2"):
            publisher.send(b"MSG k\0" + payload)
        trial.say("each hears both")
        for client in crowd:
            hear(client, b"MSG k\0001")
            hear(client, b"MSG k\0002")
        trial.say("all but one leave, and that one hears a third")
        for client in crowd[:-1]:
            client.close()
        publisher.send(b"MSG k\0003")
        hear(crowd[-1], b"MSG k\0003")


@check("PUB-6", "PUB-1")
def many_packets(trial: Trial) -> None:
    reader, publisher = trial.client("n/*"), trial.client()
    trial.say(f"a client publishes {PACKETS} messages, and another reads")
    for first in range(0, PACKETS, BATCH_PACKETS):
        batch = [
            b"MSG n/%d\0%d" % (number % 1009, number)
            for number in range(first, first + BATCH_PACKETS)
        ]
        for packet in batch:
            publisher.send(packet)
        for packet in batch:
            hear(reader, packet)


@check("CONN-5")
def turns_end(trial: Trial) -> None:
    senders = {b"MSG k\0%d" % number: trial.client() for number in range(6)}
    listener = trial.client("k")
    for client in (*senders.values(), listener):
        client.settle()  # so the last turn before the stop is the listener's
    trial.say(f"while the server is stopped, six send {TURN_PACKETS} each")
    trial.server.freeze()
    for packet, client in senders.items():
        for _ in range(TURN_PACKETS):
            client.send(packet)
    trial.server.thaw()
    trial.say("as long as all have some left, none waits for much of another")
    left = dict.fromkeys(senders, TURN_PACKETS)
    ahead = {packet: Counter[bytes]() for packet in senders}
    first, most = b"", 64
    while all(left.values()):
        packet = listener.receive()
        require(packet in left, f"received {describe(packet)}")
        left[packet] -= 1
        first = first or packet
        if packet != first:  # whose turns may meet another's:
            most = 128  # who was put off was first just once
        for other, packets in ahead.items():
            packets[packet] += 1
            if other == packet:
                packets.clear()
        count = max(packets[packet] for packets in ahead.values())
        require(count <= most, f"{count} of one client came before another's")


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Let this process have so many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < count:
        raise NotApplicable(f"the kit may not have {count} descriptors")
    if before[0] < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def pass_descriptor(client: Wire, descriptor: int) -> bool:
    """Pass a descriptor beside a packet; return whether that can be."""
    try:
        socket.send_fds(client.wire, [b"MSG fd\0"], [descriptor])
    except PermissionError:  # [CONN-7] SO_PASSRIGHTS is off
        return False
    except OSError as error:
        raise Failure(f"cannot pass one: {error.strerror}") from None
    return True


# =============================================================================
# Descriptors
# =============================================================================


def rest(trial: Trial) -> None:
    """Have the server do nothing for a while."""
    trial.say("the server rests")
    looks = 0
    for _ in range(LOOKS):
        time.sleep(IDLE_SECONDS / LOOKS)
        looks += any(map(is_running, trial.server.processes))
    share = f"it ran at {looks} of {LOOKS} looks, with nothing to do"
    require(looks < LOOKS * SPIN_SHARE_MAX, share)


@check("CONN-7")
def passed_descriptor_is_closed(trial: Trial) -> None:
    client = trial.client("k")
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "wb"):
            trial.say("a client passes the only writing end of a pipe")
            if not pass_descriptor(client, writing):
                return
            client.settle()
        trial.say("and waits for the end of file at the reading one")
        ready = select.select([reading], [], [], trial.server.seconds_max)
        require(ready[0], "the server has kept it open")


# =============================================================================
# Flood control
# =============================================================================


class Held(NamedTuple):
    """A reader that does not read, and the publisher that it holds."""

    reader: Wire
    publisher: Wire
    room: int  # packets that the kernel takes for the reader
    packets: list[bytes]  # those that fill its backlog, and one more


def hold(
    trial: Trial, *options: str, mode: bytes = b"", count: int = 0
) -> Held:
    """Have a reader hold a publisher, by a backlog that is full.

    So many packets fill it, or four times as many as the kernel takes.
    """
    room = trial.server.room
    count = count or 4 * room
    packets = [
        (b"MSG k/%d\0" % number).ljust(FILLER_BYTES, b".")
        for number in range(count + 1)
    ]
    most = count * (FILLER_BYTES + OVERHEAD_BYTES)
    trial.server.start(("--max-backlog", str(most), *options))
    reader, publisher = trial.client("k/"), trial.client()
    listener = trial.client(f"k/{count}")
    trial.say(f"the kernel takes {room} packets, and a backlog {count}")
    trial.server.fill(reader)
    trial.say("a publisher fills both, and is paused by one packet more")
    for packet in packets[:-1]:
        publisher.send(packet)
    if mode:
        publisher.settle()
        reader.send(b"CMSG " + mode)
        reader.settle()
    publisher.send(packets[-1])
    hear(listener, packets[-1])
    listener.settle()
    return Held(reader, publisher, room, packets)


@check("BLOCK-10", options="--max-backlog 100000", fills=True)
def publisher_goes_on_at_half(trial: Trial) -> None:
    reader, publisher, room, packets = hold(trial)
    witness = trial.client("w")
    publisher.send(b"MSG w\0")
    require(witness.pending() is None, "it is not paused")
    trial.say("the reader reads what the kernel held: more than half waits")
    reader.read_fillers()
    for _ in range(3):
        require(witness.pending() is None, "it goes on too early")
    trial.say("the reader reads half of the backlog: less than half waits")
    for packet in packets[: 2 * room]:
        hear(reader, packet)
    hear(witness, b"MSG w\0")
    trial.say("and the rest")
    for packet in packets[2 * room :]:
        hear(reader, packet)


def take_at_once(trial: Trial, held: Held) -> None:
    """Have the kernel take from a full backlog what it has room for, once."""
    trial.say("while the server is stopped, the reader makes room for all")
    trial.server.freeze()
    held.reader.read_fillers()
    trial.server.thaw()
    other = trial.client()
    for _ in range(2):  # between two answers the server looks at all
        other.settle()
    if not held.reader.holds_exactly(held.room):
        raise NotApplicable("the kernel takes another number of packets")


def await_half(
    trial: Trial, held: Held, publishers: list[Wire], is_half: bool
) -> None:
    """Say whether paused publishers go on after the kernel took packets."""
    witness = trial.client("w")
    for publisher in publishers:
        publisher.send(b"MSG w\0")
    require(witness.pending() is None, "they are not paused")
    take_at_once(trial, held)
    for _ in range(0 if is_half else 5):
        require(witness.pending() is None, "one goes on too early")
    trial.say("what waits is " + ("half: they go on" if is_half else "more"))
    for packet in [] if is_half else held.packets:
        hear(held.reader, packet)
    for _ in publishers:
        hear(witness, b"MSG w\0")


@check("BLOCK-10", options="--max-backlog 100000", fills=True)
def exactly_half_is_enough(trial: Trial) -> None:
    held = hold(trial, count=2 * trial.server.room - 2)
    await_half(trial, held, [held.publisher], is_half=True)


@check("BLOCK-10", options="--max-backlog 100000", fills=True)
def a_bit_more_than_half_is_too_much(trial: Trial) -> None:
    held = hold(trial, count=2 * trial.server.room - 1)
    await_half(trial, held, [held.publisher], is_half=False)


@check("BLOCK-10", options="--max-backlog 100000", fills=True)
def half_of_the_limit_counts(trial: Trial) -> None:
    held = hold(trial, count=2 * trial.server.room - 3)
    second, listener = trial.client(), trial.client("k/last")
    trial.say("the backlog is above its limit; one more adds to it")
    packet = b"MSG k/last\0".ljust(FILLER_BYTES, b".")
    second.send(packet)
    hear(listener, packet)
    held.packets.append(packet)
    await_half(trial, held, [held.publisher, second], is_half=False)


@check("BLOCK-7", "BLOCK-10", options="--max-backlog 100000", fills=True)
def soft_block_waits_for_all(trial: Trial) -> None:
    held = hold(trial, mode=b"blocking/soft/block")
    witness = trial.client("w")
    held.publisher.send(b"MSG w\0")
    trial.say("the reader reads more than half of what waits")
    held.reader.read_fillers()
    for packet in held.packets[: 3 * held.room]:
        hear(held.reader, packet)
    for _ in range(3):
        require(witness.pending() is None, "it goes on before all is read")
    trial.say("and the rest")
    for packet in held.packets[3 * held.room :]:
        hear(held.reader, packet)
    hear(witness, b"MSG w\0")


def hold_softly(trial: Trial) -> tuple[Wire, Wire, Wire]:
    """Have a reader hold a publisher, which sends more, to a witness."""
    reader, publisher = trial.client("k"), trial.client()
    listener, witness = trial.client("k"), trial.client("w")
    reader.send(b"CMSG blocking/soft/block")
    trial.server.fill(reader)
    trial.say("a message waits for a reader, which holds its publisher")
    publisher.send(b"MSG k\0")
    hear(listener, b"MSG k\0")
    listener.settle()
    publisher.send(b"MSG w\0")
    require(witness.pending() is None, "it is not paused")
    return reader, publisher, witness


@check("BLOCK-12", options="--block-timeout unlimited", fills=True)
def rest_while_one_is_paused(trial: Trial) -> None:
    trial.server.start(trial.options)
    reader, publisher, witness = hold_softly(trial)
    rest(trial)
    trial.say("the publisher hangs up")
    publisher.close()
    rest(trial)
    trial.say("the reader reads")
    hear(reader, b"MSG k\0")
    hear(witness, b"MSG w\0")


def overtake(trial: Trial, *packets: bytes) -> None:
    """Have a packet wait, and others come when the kernel has some room."""
    reader, publisher = trial.client("k"), trial.client()
    trial.server.fill(reader)
    trial.say("a message waits for a reader")
    publisher.send(b"MSG k\0001")
    publisher.settle()
    trial.say("while the server is stopped, there comes room, and more")
    trial.server.freeze()
    reader.read_fillers(2)
    for packet in packets:
        (reader if packet == WHOAMI else publisher).send(packet)
    trial.server.thaw()
    reader.settle()  # by its helper: it does not read
    publisher.settle()
    hear(reader, b"MSG k\0001")
    for packet in packets:
        got = reader.receive()
        require(got.startswith(packet), f"received {describe(got)}")


@check("CRED-3", fills=True)
def answer_does_not_overtake(trial: Trial) -> None:
    overtake(trial, WHOAMI)


@check("PUB-6", "BLOCK-4", fills=True)
def message_does_not_overtake(trial: Trial) -> None:
    overtake(trial, b"MSG k\0002", b"MSG k\0003")


@check(
    "BLOCK-16", options="--max-backlog 100000 --block-timeout 9", fills=True
)
def holder_that_reads_now_and_then(trial: Trial) -> None:
    held = hold(trial, "--block-timeout", "3")
    for what in ("what the kernel held", "all"):
        time.sleep(1.8)
        trial.say(f"after more than half of the time it reads {what}")
        held.reader.read_fillers()
    for packet in held.packets:
        hear(held.reader, packet)


@check("BLOCK-16", options="--block-timeout 9", fills=True)
def holder_that_made_room_unseen(trial: Trial) -> None:
    trial.server.start(("--block-timeout", "0.5"))
    reader, _, witness = hold_softly(trial)
    trial.say("the reader makes so little room that no event tells of it")
    reader.read_fillers(2)
    trial.say("when the block time is over, that is made use of")
    hear(witness, b"MSG w\0")
    hear(reader, b"MSG k\0")


# =============================================================================
# Departure
# =============================================================================


@check("CONN-10", fills=True)
def departure_with_a_backlog(trial: Trial) -> None:
    reader, publisher = trial.client("k"), trial.client()
    trial.server.fill(reader)
    trial.say("three messages wait in the backlog of a reader")
    packets = [b"MSG k\0001", b"MSG k\0002", b"MSG k\0003"]
    for packet in packets:
        publisher.send(packet)
    publisher.settle()
    # With so little room the kernel takes packets, and reports no room
    trial.say(
        "while the server is stopped, it makes room for a few, and leaves"
    )
    trial.server.freeze()
    reader.read_fillers(2)
    reader.shut()
    trial.say("the server goes on, and the reader hears all three")
    trial.server.thaw()
    reader.await_end()
    for packet in (*packets, END):
        hear(reader, packet)
