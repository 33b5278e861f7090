"""What one user's storms of packets do to other users of a bus.

    make attack                                       all storms
    make attack ARGS='--only deep,flood --seconds 1'
    make attack ARGS="--beside 'CMD {address}'"       and another server

Only root can start it, as processes of user 1001 storm a server of root's.
Some storms have twelve users more, as one person may have many user ids.
Meanwhile a client of user 1002, who also has 300 readers, and one of a third
user, who has nothing else, publish to themselves in turn.  A row says how
long their round trips took.  Compare figures of one run only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Callable

from . import harness
from .harness import BenchError, Sample, Sides, server

OWN = [*harness.SERVER, "-go", "-a", "{address}"]
ATTACKER, WITNESS, THIRD = 1001, 1002, 1010  # user ids
MANY = range(100_000, 100_012)  # user ids of a person, as of /etc/subuid
SHAPES = 256  # that a user tries to have; the limits may allow fewer
SILENCE_SECONDS = 20  # that the witness waits for a packet
FIGURES = ("p50 ms", "p99 ms", "max ms")  # of round trips
TIMES = (*FIGURES, *(f"third {figure}" for figure in FIGURES))
READERS = 300
WHERE = b"/sensors/kitchen/temperature/celsius"  # of the witness's keys
KEEP_READER = b"CMSG blocking/hard/discard"  # also when it is flooded
Wires = list[socket.socket]

# ==== Clients and processes ==================================================


def dial(address: str, *packets: bytes) -> socket.socket:
    """Return a new connection, once the server has handled its packets."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire.connect(address)
    for packet in (*packets, b"CMSG !/cred/whoami") if packets else ():
        wire.send(packet)
    while packets and wire.recv(1 << 12)[:5] not in (b"CMSG ", b""):
        pass
    return wire


def dial_as(uid: int, address: str, *packets: bytes) -> socket.socket:
    """Return a new connection of a user, and go on as root."""
    os.seteuid(0)
    os.seteuid(uid)
    try:
        return dial(address, *packets)
    finally:
        os.seteuid(0)


def over_and_over(address: str, *packets: bytes) -> None:
    """Send packets in turn, for ever; connect again if need be."""
    while True:
        with dial(address) as wire, contextlib.suppress(OSError):
            for packet in itertools.cycle(packets):
                wire.send(packet)


def exchange(wire: socket.socket, packets: list[bytes], answers: int) -> None:
    """Send packets and receive answers, as many as go without waiting."""
    with contextlib.suppress(BlockingIOError):
        for packet in packets:
            wire.send(packet, socket.MSG_DONTWAIT)
    with contextlib.suppress(BlockingIOError):
        for _ in range(answers):
            wire.recv(1 << 12, socket.MSG_DONTWAIT)


def read_all(wires: Wires) -> None:
    """Read whatever comes, while all clients are connected."""
    poll = select.epoll()
    connected = {wire.fileno(): wire for wire in wires}
    for number in connected:
        poll.register(number, select.EPOLLIN)
    while len(connected) == len(wires):
        for number, _ in poll.poll():
            with contextlib.suppress(OSError):  # all is read
                while connected[number].recv(1 << 12, socket.MSG_DONTWAIT):
                    pass
                poll.unregister(number)
                del connected[number]


def read_nothing(wires: Wires) -> None:
    """Keep clients connected."""
    while wires:
        signal.pause()


def exchange_in_turn(wires: Wires, packets: list[bytes], answers: int) -> None:
    """Have each client exchange packets in turn, for ever."""
    for wire in itertools.cycle(wires):
        exchange(wire, packets, answers)


def read_slowly(wires: Wires) -> None:
    """Read a packet of each client in turn, for ever.

    The kernel has room again for all of them at about the same time.
    """
    exchange_in_turn(wires, [], 1)


def fork(work: Callable[[], object], uid: int = 0) -> int:
    """Work in a process, which may be a user's; return its id."""
    pid = os.fork()
    if not pid:
        try:
            if uid:
                os.setsid()  # so that it leads a process group
                os.setgroups([])
                os.setgid(uid)
                os.setresuid(uid, uid, 0)  # a storm may have more users
            work()
        except Exception as error:
            print(f"attack: user {uid}: {error!r}", file=sys.stderr)
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def at_work(uid: int, work: Callable[[], object]) -> Iterator[None]:
    """Have a user's process work.  Raises: BenchError if it ends too early."""
    pid = fork(work, uid)
    try:
        yield
    finally:
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if over:
            raise BenchError(f"a process of user {uid} ended")


# ==== Storms =================================================================


def storm_quiet(address: str) -> None:
    """No storm at all."""
    signal.pause()


def storm_news(address: str) -> None:
    """Messages for the 300 readers of the witness."""
    over_and_over(address, b"MSG news\0x")


def storm_subscribe(address: str) -> None:
    """500 clients subscribe and unsubscribe one pattern."""
    wires = [dial(address, b"SUB x") for _ in range(500)]
    exchange_in_turn(wires, [b"SUB */", b"UNSUB */"] * 32, 0)


def cut(key: bytes) -> bytes:
    """Return a pattern that fits a key: of each segment a beginning."""
    parts = [s[: random.randrange(len(s) + 1)] for s in key.split(b"/")]
    return b"*/".join(parts) + b"*"


def with_shapes(address: str, key: bytes) -> Wires:
    """Return clients of twelve users, with all shapes that these may have.

    The first clients, one of each user, have a short pattern.  The others
    have patterns that fit the beginning of a key.  These have two each, as a
    client loses all of them if one is refused.
    """
    wires = [dial_as(uid, address, b"SUB */x") for uid in MANY]
    for uid in [*MANY] * (SHAPES // 2):
        pair = [b"SUB " + cut(key) + b"/x" for _ in range(2)]
        with contextlib.suppress(OSError):  # one is refused
            wires.append(dial_as(uid, address, *pair))
    return wires


def storm_forms(address: str) -> None:
    """12 users have all shapes that fit new keys of the witness."""
    read_nothing(with_shapes(address, b"0" + WHERE))


def storm_forget(address: str) -> None:
    """The same, and they unsubscribe and subscribe all the time."""
    wires = with_shapes(address, b"0" + WHERE)
    packets = [b"UNSUB */x", b"SUB */x"] * 32
    exchange_in_turn(wires[: len(MANY)], packets, 0)


def storm_deep(address: str) -> None:
    """12 users publish new keys that fit their patterns of 63 stars."""
    key = b"/".join([b"abc"] * 63)
    wires = with_shapes(address, key)
    numbers = itertools.count()
    for wire in itertools.cycle(wires[: len(MANY)]):
        packets = [b"MSG %b/%d\0" % (key, next(numbers)) for _ in range(64)]
        exchange(wire, packets, 0)


def storm_secrets(address: str) -> None:
    """Secret messages for nobody beside 250 clients that have others."""
    wires = [dial(address, b"SUB !/cred////") for _ in range(250)]
    fork(lambda: read_all(wires))
    over_and_over(address, b"MSG !/cred/%d/%d/1/x\0" % (ATTACKER, ATTACKER))


def storm_segments(address: str) -> None:
    """New keys of 64 segments, and of 4,000, which are a mistake."""
    fork(lambda: over_and_over(address, b"MSG " + b"/" * 4_000 + b"\0"))
    ends = b"/" * 63 + b"\0"
    over_and_over(address, *[b"MSG %d" % n + ends for n in range(5_000)])


def storm_orders(address: str) -> None:
    """Four readers keep changing the order of 62 MB of backlog."""
    first = (b"SUB o", b"CMSG blocking/hard/discard")
    readers = [dial(address, *first) for _ in range(4)]
    dial(address, *[b"MSG o\0"] * 120_000)
    orders = [b"CMSG order/" + order for order in (b"random", b"stack")] * 2
    exchange_in_turn(readers, orders, len(orders))


def with_patterns(address: str) -> Wires:
    """Return 16 clients with all the patterns that a user may have.

    They are secret, of 256 bytes and 63 segments, so each takes much room.
    """
    head, tail = b"SUB !/cred////" + b"*/" * 58, b"x" * 125
    patterns = [head + b"%05d" % n + tail for n in range(16 << 10)]
    return [dial(address, *patterns[first::16]) for first in range(16)]


def storm_closing(address: str) -> None:
    """16 clients subscribe to 1,024 secret patterns each and leave."""
    while True:
        with contextlib.suppress(OSError):  # the last ones may still count
            with_patterns(address)


def storm_questions(address: str) -> None:
    """500 clients ask, and read a little less than the answers."""
    wires = [dial(address) for _ in range(500)]
    exchange_in_turn(wires, [b"CMSG !/cred/whoami", b"CMSG stats"] * 16, 31)


def storm_crowd(address: str) -> None:
    """A user with 512 clients, its limit, makes more connections."""
    wires = [dial(address, b"SUB x") for _ in range(512)]
    while wires:
        dial(address).close()


def storm_mistakes(address: str) -> None:
    """Connections that send a malformed packet."""
    while True:
        dial(address).send(b"HELLO")


def flooded(address: str, *modes: bytes) -> Wires:
    """Return 300 readers, whom ten publishers of their user flood."""
    wires = [dial(address, b"SUB f", *modes) for _ in range(READERS)]
    for _ in range(10):
        fork(lambda: over_and_over(address, b"MSG f\0x"))
    return wires


def storm_flood(address: str) -> None:
    """Ten publishers of small messages for 300 readers of their user."""
    read_all(flooded(address))


def storm_unread(address: str) -> None:
    """The same for 300 readers that never read."""
    read_nothing(flooded(address, KEEP_READER))


def storm_discard(address: str) -> None:
    """The same for 300 that never read, and discard what is refused."""
    read_nothing(flooded(address, b"CMSG blocking/soft/discard"))


def storm_deaf(address: str) -> None:
    """The same for 300 that have shut down their receiving half."""
    wires = flooded(address)
    for wire in wires:
        wire.shutdown(socket.SHUT_RD)
    read_nothing(wires)


def storm_slow(address: str) -> None:
    """The same for 300 that read a packet now and then."""
    read_slowly(flooded(address, KEEP_READER))


def storm_resume(address: str) -> None:
    """250 slow readers pause and free 250 publishers of their user."""
    first = (b"SUB p", b"CMSG blocking/soft/block")
    readers = [dial(address, *first) for _ in range(250)]
    publishers = [dial(address) for _ in range(250)]
    fork(lambda: exchange_in_turn(readers, [], 3))
    exchange_in_turn(publishers, [b"MSG p\0x"], 0)


def storm_slow_news(address: str) -> None:
    """Messages for the 300 readers of the witness, which read slowly."""
    over_and_over(address, b"MSG news\0x")


def storm_wide(address: str) -> None:
    """Messages for 1,600 readers of four users, the witness among them."""
    over_and_over(address, b"MSG news\0x")


def storm_one_shots(address: str) -> None:
    """Connections that publish a message and close, beside 300 readers."""
    wires = [dial(address, b"SUB 1") for _ in range(READERS)]
    fork(lambda: read_all(wires))
    while True:
        dial(address).send(b"MSG 1\0")


# ==== The witness ============================================================


def witness(
    address: str, pattern: bytes, *modes: bytes, uid: int = WITNESS
) -> socket.socket:
    """Return a client of a user, which does not wait for ever."""
    wire = dial_as(uid, address, b"SUB " + pattern, *modes)
    wire.settimeout(SILENCE_SECONDS)
    return wire


def readers_of_news(address: str, storm: str) -> Callable[[], object]:
    """Subscribe the readers of a storm; return what they do in it."""
    modes = [KEEP_READER] if storm == "slow-news" else []
    readers, users = (1_600, 4) if storm == "wide" else (READERS, 1)
    uids = (WITNESS + number % users for number in range(readers))
    news = [witness(address, b"news", *modes, uid=uid) for uid in uids]
    return partial(read_slowly if modes else read_all, news)


def round_trips(wires: Wires, storm: str, seconds: float) -> list[Sample]:
    """Return how long own messages took to come back, in ms.

    The clients take turns, so that each sees as much of the storm.
    """
    taken: list[list[float]] = [[] for _ in wires]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for number, wire in enumerate(wires):
            # In this storm, the witness uses no key twice
            last = len(taken[number]) if storm == "forms" else 0
            packet = b"MSG %d%b/%d\0" % (number, WHERE, last)
            began = time.perf_counter()
            wire.send(packet)
            wire.recv(64)
            taken[number].append(1e3 * (time.perf_counter() - began))
    samples = []
    for times in map(sorted, taken):
        ranks = ((len(times) - 1) * part // 100 for part in (50, 99, 100))
        samples.append(dict(zip(FIGURES, (times[rank] for rank in ranks))))
    return samples


def measure(name: str, command: Sequence[str], seconds: float) -> Sample:
    """Return what the witness sees of a storm.  Raises: BenchError."""
    with server(command) as bus, contextlib.ExitStack() as running:
        wire = witness(bus.address, b"0" + WHERE + b"/")
        other = witness(bus.address, b"1" + WHERE + b"/", uid=THIRD)
        readers = readers_of_news(bus.address, name)
        running.enter_context(at_work(WITNESS, readers))
        storm = partial(STORMS[name], bus.address)
        running.enter_context(at_work(ATTACKER, storm))
        time.sleep(2)  # for what the storm prepares
        sample, third = round_trips([wire, other], name, seconds)
        sample.update((f"third {key}", ms) for key, ms in third.items())
        return sample


# ==== The program ============================================================


STORMS: dict[str, Callable[[str], None]] = {
    name.partition("_")[2].replace("_", "-"): value
    for name, value in list(globals().items())
    if name.startswith("storm_")
}


def sides_of(beside: list[str] | None, seconds: float, name: str) -> Sides:
    """Return what is compared in a case."""
    figures = partial(measure, name, seconds=seconds)
    sides: Sides = {"sbus.py": partial(figures, OWN)}
    if beside:
        sides["other"] = partial(figures, beside)
    return sides


def main() -> int:
    """Print the table; return 1 if a case failed."""
    parser = harness.OptionParser("bench.attack", __doc__, rounds=1)
    parser.add_server_options(seconds=4.0)
    abouts = {name: str(storm.__doc__) for name, storm in STORMS.items()}
    options = parser.parse(abouts)
    if os.getuid():
        parser.error("only root can act as several users")
    sides = partial(sides_of, options.beside, options.seconds)
    return harness.print_table(options, TIMES, sides)


if __name__ == "__main__":
    harness.run(main)
