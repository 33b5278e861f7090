"""What an observer of the server's process can see, beside its clients."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import Callable, NamedTuple

from .conversation import END, Failure, describe
from .processes import (
    descriptor_count,
    is_running,
    limit,
    memory_bytes,
)
from .server import ServerProcess
from .wire import FILLER_BYTES, Wire

OVERHEAD_BYTES = 128  # [BLOCK-19] of each packet of a backlog
CROWD = 300  # clients
PACKETS = 25_000
BATCH_PACKETS = 100
DESCRIPTORS = 24  # few, for a server
IDLE_SECONDS = 0.5
END_SECONDS_MIN = 0.1  # in which a server with a backlog does not end
LOOKS = 50  # in that time
SPIN_SHARE_MAX = 0.5  # of looks at a server that nobody asks for anything
GROWTH_BYTES_MAX = 3 << 19
GROWTH_DESCRIPTORS_MAX = 10
WORK_TIMES_MAX = 4


class NotApplicable(Exception):
    """The server, or this machine, has not what a check is about."""


class Trial:
    """A check as it goes on: the server, its clients, and what was done."""

    def __init__(
        self, server: ServerProcess, options: tuple[str, ...]
    ) -> None:
        self.server = server
        self.options = options
        self.said: list[str] = []
        self._clients = contextlib.ExitStack()

    def say(self, text: str) -> None:
        """Note what is done next."""
        self.said.append(text)

    def client(self, pattern: str = "") -> Wire:
        """Return a new client that has subscribed to a pattern, if given."""
        wire = self.server.connect(False, {})
        self._clients.enter_context(contextlib.closing(wire))
        if pattern:
            wire.send(b"SUB " + pattern.encode())
            wire.settle()
        return wire

    def close(self) -> None:
        """Close the clients."""
        self._clients.close()


class Check(NamedTuple):
    """A check, the rules that it shows, and the options it needs."""

    name: str
    rules: tuple[str, ...]
    run: Callable[[Trial], None]
    options: tuple[str, ...]  # of the server
    fills: bool  # whether the kernel is to take no more for a client


CHECKS: list[Check] = []


def check(
    *rules: str, options: str = "", fills: bool = False
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Have a check of the function below, under its name."""

    def add(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = run.__name__.replace("_", "-")
        CHECKS.append(Check(name, rules, run, tuple(options.split()), fills))
        return run

    return add


def require(condition: object, what: str) -> None:
    """Raise Failure if something is not so."""
    if not condition:
        raise Failure(what)


def hear(client: Wire, packet: bytes) -> None:
    """Have a client receive a packet."""
    got = client.receive()
    require(got == packet, f"received {describe(got)}")


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


@check("LIMIT-19")
def memory_over_time(trial: Trial) -> None:
    for what, work in (
        ("clients come, subscribe and leave", visit),
        ("a client subscribes and unsubscribes", change_patterns),
        ("a client publishes, and another reads", publish_much),
        ("packets wait for a client, which reads them or leaves", lag),
        ("clients pass descriptors", pass_descriptors),
    ):
        trial.say(f"{what}, many times, again and again")
        memory, count = growth(trial, work)
        grown = f"the server has {memory >> 10} KiB and {count} descriptors"
        is_more = memory > GROWTH_BYTES_MAX or count > GROWTH_DESCRIPTORS_MAX
        require(not is_more, f"{grown} more each time")


def growth(trial: Trial, work: Callable[[Trial], None]) -> tuple[int, int]:
    """Return what the server has more after some work, done again.

    What it has once and for all does not count: the least of some times.
    """
    least = (sys.maxsize, sys.maxsize)
    before = (0, 0)
    for _ in range(WORK_TIMES_MAX):
        work(trial)
        after = usage(trial)
        memory, count = after[0] - before[0], after[1] - before[1]
        least = min(least[0], memory), min(least[1], count)
        if least[0] <= GROWTH_BYTES_MAX and least[1] <= GROWTH_DESCRIPTORS_MAX:
            break
        before = after
    return least


def usage(trial: Trial) -> tuple[int, int]:
    """Return how much memory the server has, and how many descriptors."""
    for _ in range(5):
        trial.server.fault()  # which comes after what came before
    processes = trial.server.processes
    try:
        return memory_bytes(processes), descriptor_count(processes)
    except OSError:
        raise NotApplicable("the server is another user's") from None


def visit(trial: Trial) -> None:
    """Have clients come, subscribe, ask, and leave."""
    for number in range(2000):
        with contextlib.closing(trial.server.connect(False, {})) as client:
            client.send(b"SUB %d/" % number + b"x" * 1000)
            client.settle()


def change_patterns(trial: Trial) -> None:
    """Have a client subscribe and unsubscribe."""
    client = trial.client()
    for number in range(4000):
        pattern = b"SUB %d/" % number + b"x" * 1000
        client.send(pattern)
        client.send(b"UN" + pattern)
        if number % 50 == 0:
            client.settle()
    client.close()


def publish_much(trial: Trial) -> None:
    """Have a client publish under many keys, and another read."""
    reader, publisher = trial.client("m/"), trial.client()
    for number in range(4000):
        packet = b"MSG m/%d\0" % number + b"x" * 1000
        publisher.send(packet)
        hear(reader, packet)
    reader.close()
    publisher.close()


def lag(trial: Trial) -> None:
    """Have many packets wait for a client, which reads them, or leaves."""
    publisher = trial.client()
    packet = b"MSG l\0" + b"x" * 10_000
    for reads in (True, False):
        reader = trial.client("l")
        for _ in range(400):
            publisher.send(packet)
        publisher.settle()
        for _ in range(400 if reads else 0):
            hear(reader, packet)
        reader.close()
    publisher.close()


def pass_descriptors(trial: Trial) -> None:
    """Have clients pass descriptors that nobody asked for."""
    with open(os.devnull, "rb") as file:
        client = trial.client("k")
        for _ in range(100):
            if not pass_descriptor(client, file.fileno()):
                break
        client.close()


def pass_descriptor(client: Wire, descriptor: int) -> bool:
    """Pass a descriptor beside a packet; return whether that can be."""
    try:
        socket.send_fds(client.wire, [b"MSG fd\0"], [descriptor])
    except PermissionError:  # [CONN-7] SO_PASSRIGHTS is off
        return False
    return True


# =============================================================================
# Descriptors
# =============================================================================


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


@check("CONN-3")
def few_descriptors(trial: Trial) -> None:
    reader, publisher = trial.client("k"), trial.client()
    trial.say(f"the server may have {DESCRIPTORS} descriptors; 40 connect")
    for process in trial.server.processes:
        limit(process, resource.RLIMIT_NOFILE, DESCRIPTORS)
    crowd = []
    for _ in range(40):
        with contextlib.suppress(Failure):  # nobody lets them in
            crowd.append(trial.client())
    trial.say("a client publishes, and another hears it")
    publisher.send(b"MSG k\0001")
    hear(reader, b"MSG k\0001")
    trial.say("the server rests")
    looks = 0
    for _ in range(LOOKS):
        time.sleep(IDLE_SECONDS / LOOKS)
        looks += any(map(is_running, trial.server.processes))
    share = f"it ran at {looks} of {LOOKS} looks, with nothing to do"
    require(looks < LOOKS * SPIN_SHARE_MAX, share)
    publisher.send(b"MSG k\0002")
    hear(reader, b"MSG k\0002")
    trial.say("the 40 leave, and another is let in")
    for client in crowd:
        client.close()
    newcomer = trial.client("k")
    publisher.send(b"MSG k\0003")
    hear(newcomer, b"MSG k\0003")


# =============================================================================
# Flood control
# =============================================================================


class Held(NamedTuple):
    """A reader that does not read, and the publisher that it holds."""

    reader: Wire
    publisher: Wire
    room: int  # packets that the kernel takes for the reader
    packets: list[bytes]  # four times as many in its backlog, and one more


def hold(trial: Trial, *options: str) -> Held:
    """Have a reader hold a publisher, by a backlog that is full."""
    room = trial.server.room
    packets = [
        (b"MSG k/%d\0" % number).ljust(FILLER_BYTES, b".")
        for number in range(4 * room + 1)
    ]
    most = 4 * room * (FILLER_BYTES + OVERHEAD_BYTES)
    trial.server.start(("--max-backlog", str(most), *options))
    reader, publisher = trial.client("k/"), trial.client()
    listener = trial.client(f"k/{4 * room}")
    trial.say(f"the kernel takes {room} packets, and a backlog {4 * room}")
    trial.server.fill(reader)
    trial.say("a publisher fills both, and is paused by one packet more")
    for packet in packets:
        publisher.send(packet)
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


# =============================================================================
# Start and end
# =============================================================================


def stop(trial: Trial, number: signal.Signals = signal.SIGTERM) -> int:
    """Have a signal end the server; return its exit status."""
    trial.say(f"the server receives {number.name}")
    trial.server.send_signal(number)
    return trial.server.await_status(trial.server.seconds_max)


def end_by(trial: Trial, number: signal.Signals) -> None:
    """Have a signal end the server as it is to."""
    status = stop(trial, number)
    require(status == 0, f"it ends with status {status}")


@check("RUN-10")
def end_by_sigterm(trial: Trial) -> None:
    client = trial.client("k")
    end_by(trial, signal.SIGTERM)
    hear(client, END)


@check("RUN-10")
def end_by_sigint(trial: Trial) -> None:
    end_by(trial, signal.SIGINT)


@check("RUN-10")
def end_by_sighup(trial: Trial) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        raise NotApplicable("the server was started with SIGHUP ignored")
    end_by(trial, signal.SIGHUP)


@check("ADDR-10")
def socket_is_removed(trial: Trial) -> None:
    path = trial.server.path
    stop(trial)
    require(not os.path.lexists(path), "its socket is still there")


@check("ADDR-10")
def what_took_its_place_is_kept(trial: Trial) -> None:
    path = trial.server.path
    trial.say("another file takes the place of the socket")
    os.rename(path, path + ".moved")
    with open(path, "wb"):
        pass
    stop(trial)
    require(os.path.lexists(path), "it has removed what is not its own")


@check("RUN-12", fills=True)
def end_delivers_what_was_read(trial: Trial) -> None:
    reader, publisher = trial.client("k"), trial.client()
    trial.server.fill(reader)
    packets = [b"MSG k\0%d" % number for number in range(10)]
    trial.say("ten messages wait for a reader, and the server ends")
    for packet in packets:
        publisher.send(packet)
    publisher.settle()
    trial.server.send_signal(signal.SIGTERM)
    reader.await_end(END_SECONDS_MIN)
    for packet in packets:
        hear(reader, packet)
    hear(reader, END)


@check("RUN-4")
def standard_output_is_closed(trial: Trial) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "wb"):
            trial.server.start(stdout=writing)
        trial.say("the server listens; its standard output is a pipe")
        ready = select.select([reading], [], [], trial.server.seconds_max)
        text = os.read(reading, 1000) if ready[0] else b""
        require(ready[0], "it is still open")
        require(not text, f"it says {describe(text)}")


def mode_is(trial: Trial, mode: int) -> None:
    """Start the server, and look at the mode of its socket."""
    trial.say("the server starts, with the umask 0")
    trial.server.start(trial.options, umask=0)
    found = stat.S_IMODE(os.stat(trial.server.path).st_mode)
    require(found == mode, f"the mode of the socket is {found:04o}")


@check("ADDR-6")
def mode_of_the_socket(trial: Trial) -> None:
    mode_is(trial, 0o700)


@check("ADDR-6", options="-g")
def mode_for_the_group(trial: Trial) -> None:
    mode_is(trial, 0o770)


@check("ADDR-6", options="-o")
def mode_for_others(trial: Trial) -> None:
    mode_is(trial, 0o707)


def identity(path: str) -> tuple[int, int]:
    """Return what tells a file from another that takes its place."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        return status.st_ino, status.st_ctime_ns
    return 0, 0


def refuse(trial: Trial, path: str, *options: str) -> None:
    """Have another server refuse to start where something is."""
    before = identity(path)
    with trial.server.another() as rival:
        rival.launch(options, path)
        end = time.monotonic() + rival.start_seconds_max
        while rival.status() is None:
            require(time.monotonic() < end, "another server starts there")
            is_same = identity(path) == before
            require(is_same, "another server takes that place")
            time.sleep(0.005)  # no event tells of a foreign server
        require(rival.status(), "another ends as if all were well")


@check("ADDR-7")
def second_server_at_a_path(trial: Trial) -> None:
    client = trial.client("k")
    trial.say("another server is started at the same path")
    refuse(trial, trial.server.path)
    client.send(b"MSG k\0")
    hear(client, b"MSG k\0")
    require(not trial.server.fault(), "the first is not reached any more")


@check("ADDR-7")
def file_at_the_path(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("there is a file at the path")
    with open(path, "wb") as file:
        file.write(b"precious")
    refuse(trial, path)
    with open(path, "rb") as file:
        require(file.read() == b"precious", "the file has changed")


@check("ADDR-7")
def stale_socket_at_the_path(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("there is a stale socket at the path")
    leave_socket(path)
    refuse(trial, path)


def leave_socket(path: str) -> None:
    """Leave a socket behind that nobody listens to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(path)


@check("ADDR-8", options="-r")
def live_server_is_not_replaced(trial: Trial) -> None:
    trial.say("another server is started at the same path, with -r")
    refuse(trial, trial.server.path, "-r")
    require(not trial.server.fault(), "the first is not reached any more")


@check("ADDR-7", options="-r")
def stale_socket_is_replaced(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with -r where a stale socket is")
    leave_socket(path)
    trial.server.start(trial.options, path)


@check("RUN-11", options="-c")
def end_with_the_last_client(trial: Trial) -> None:
    trial.say("the server starts, and two clients connect")
    trial.server.launch(trial.options)
    first = first_client(trial)
    second = trial.client()
    trial.say("one leaves")
    first.close()
    for _ in range(5):
        second.settle()
    trial.say("and then the other")
    second.close()
    status = trial.server.await_status(trial.server.seconds_max)
    require(status == 0, f"it ends with status {status}")


def first_client(trial: Trial) -> Wire:
    """Return the first client of a server that starts."""
    end = time.monotonic() + trial.server.start_seconds_max
    while time.monotonic() < end:
        with contextlib.suppress(Failure):
            return trial.client("k")
        time.sleep(0.005)  # no event tells of a foreign server
    raise Failure("the server does not serve")


def perform_check(
    check: Check, server: ServerProcess
) -> tuple[str, list[str]]:
    """Make a check; return what went wrong, and what was done.

    Raises: NotApplicable if it cannot be made.
    """
    trial = Trial(server, check.options)
    try:
        with contextlib.closing(trial):
            check.run(trial)
    except Failure as failure:
        log = server.log()
        return str(failure).replace(log, "") + log, trial.said
    return "", trial.said
