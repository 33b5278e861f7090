"""What an observer sees when clients lag, and when many are of one user."""

from __future__ import annotations

import random
import re

from .check_traffic import OVERHEAD_BYTES
from .trial import Trial, check, hear, require, tell
from .wire import Wire

ORDERS = (  # one after the other, of a backlog
    (b"random", b"stack", b"random"),
    (b"stack", b"queue", b"stack"),
    (b"queue", b"random", b"queue"),
    (b"random", b"queue", b"stack"),
)
SIZES = 20_000, 40_000, 60_000
PACKETS = 100
PACKETS_READ = 20  # before the order changes; it takes a fifth of them
BULK = 400_128  # what a large packet counts for in a backlog
TINY = 200  # and a small one
SENDERS = 200  # of one user
SENT = 130  # packets of each
TURNS = 3  # of another's client


def pass_on(client: Wire, witness: Wire, *packets: bytes) -> None:
    """Have the server handle packets of a client that does not read."""
    for packet in (*packets, b"MSG w\0"):
        client.send(packet)
    hear(witness, b"MSG w\0")


# ---- The order of a backlog


def first(sizes: dict[int, int], order: bytes) -> int:
    """Return the number of the packet that an order sends first."""
    if order == b"random":
        return max(sizes, key=lambda number: (sizes[number], -number))
    return min(sizes) if order == b"queue" else max(sizes)


@check("ORDER-1", "ORDER-2", "ORDER-3", "BLOCK-2", fills=True, is_plain=True)
def orders_of_a_backlog(trial: Trial) -> None:
    trial.start()
    draw, witness = random.Random(PACKETS), trial.client("w")
    for orders in ORDERS:
        names = b", then ".join(orders).decode()
        trial.say(f"{PACKETS} packets wait, in the order {names}")
        reader, publisher = trial.client("k"), trial.client()
        tell(reader, b"CMSG order/" + orders[0])
        trial.server.fill(reader)
        sizes = {number: draw.choice(SIZES) for number in range(PACKETS)}
        for number, size in sizes.items():
            publisher.send((b"MSG k\0%d" % number).ljust(size, b"."))
        publisher.settle()
        phase = 0
        for count in range(PACKETS):
            if count in (PACKETS_READ, 2 * PACKETS_READ):
                order = orders[count // PACKETS_READ]
                pass_on(reader, witness, b"CMSG order/" + order)
            got = re.fullmatch(rb"MSG k\0(\d+)\.+", reader.receive())
            require(got, f"packet {count} is none of those")
            number = int(got[1]) if got else 0
            # Nobody knows how many the kernel took before the order changed
            while number != first(sizes, orders[phase]):
                phase += 1
                require(phase < len(orders), f"packet {number} comes early")
            del sizes[number]
        require(phase == len(orders) - 1, "a new order has no effect")
        reader.close()


# ---- The level at which a publisher goes on


def sized(key: bytes, size: int) -> bytes:
    """Return a message that counts so many bytes in a backlog."""
    return (b"MSG " + key + b"\0").ljust(size - OVERHEAD_BYTES, b".")


@check("BLOCK-24", "BLOCK-10", "BLOCK-7")
def levels_at_which_publishers_go_on(trial: Trial) -> None:
    trial.start()
    reader, publisher = trial.client("k"), trial.client()
    trial.say("large packets come for a reader, until the kernel takes none")
    tell(publisher, *[sized(b"k", BULK)] * 4)
    held = reader.unread_bytes() // (BULK - OVERHEAD_BYTES)
    # Packets of two parts pause a publisher once 32 and others wait
    part = held * BULK // 32
    for order, mode, limit, rest in (
        (b"queue", b"hard", 61 * part, 28 * part),  # half of what waits
        (b"queue", b"hard", 61 * part, 28 * part + 1),
        (b"random", b"hard", 56 * part, 26 * part),  # half of the limit
        (b"random", b"hard", 56 * part, 26 * part + 1),
        (b"queue", b"soft", 61 * part, 28 * part),
    ):
        trial.start("--max-backlog", str(limit))
        modes = b"CMSG order/" + order, b"CMSG blocking/" + mode + b"/block"
        sizes = [*[BULK] * 2 * held, rest // 2, rest - rest // 2]
        reader, publisher = trial.client("k/"), trial.client()
        listener = trial.client("k/")
        for size in sizes:  # of which the last may pause this one
            publisher.send(sized(b"k/", size))
            hear(listener, sized(b"k/", size))
        listener.close()
        pass_on(reader, trial.client("w"), *modes)
        level = min(32 * part + rest, limit) // 2 if mode == b"hard" else 0
        witness, size = pause_in_a_turn(trial, 2 * part)
        read_what_the_kernel_kept(trial, reader, held)
        left = rest + size
        trial.say(f"{left} bytes wait; a publisher goes on at {level}")
        if left <= level:
            hear(witness, b"MSG w\0")
        else:
            require_paused(witness)


def require_paused(witness: Wire) -> None:
    """Raise Failure if a witness hears from a paused publisher."""
    for _ in range(5):
        require(witness.pending() is None, "a publisher goes on too early")


def pause_in_a_turn(trial: Trial, size: int) -> tuple[Wire, int]:
    """Have two packets that come at once pause a publisher.

    Return a witness of its next message, and how much those count that were
    handled: the server may have read the first alone.
    """
    publisher, listener = trial.client(), trial.client("k/1")
    witness = trial.client("w")
    sizes = size - TINY, TINY
    trial.server.freeze()
    for part in sizes:
        publisher.send(sized(b"k/1", part))
    trial.server.thaw()
    hear(listener, sized(b"k/1", sizes[0]))
    is_alone = [listener.pending() for _ in range(2)][1] is None
    publisher.send(b"MSG w\0")
    require_paused(witness)
    return witness, sizes[0] if is_alone else size


def read_what_the_kernel_kept(trial: Trial, reader: Wire, held: int) -> None:
    """Have a reader read the large packets at once; others take their place.

    As many wait as the kernel holds, and are the next that it takes.
    """
    trial.say("while the server is stopped, what the kernel held is read")
    trial.server.freeze()
    hear(reader, *[sized(b"k/", BULK)] * held)
    trial.server.thaw()
    size = held * (BULK - OVERHEAD_BYTES)
    full = "the kernel takes no more than before"
    trial.wait_until(lambda: reader.unread_bytes() >= size, full)


# ---- Users


@check("CONN-5")
def users_have_slices(trial: Trial) -> None:
    trial.start("-g", "-o")
    listener, other = trial.client("k"), trial.client(uid=trial.user + 1)
    crowd = [trial.client(uid=trial.user) for _ in range(SENDERS)]
    trial.say(f"while the server is stopped, {SENDERS} clients of a user send")
    trial.server.freeze()
    for client in (*crowd * SENT, *[other] * TURNS * 64):
        client.send(b"MSG k\0%d" % client.uid)
    trial.server.thaw()
    count, left = 0, TURNS * 64
    while left:
        if listener.receive() == b"MSG k\0%d" % other.uid:
            left -= 1
        else:
            count += 1
    half = SENDERS * SENT // 2  # without slices nearly all come before
    require(count < half, f"{count} come before {TURNS} turns of another user")
