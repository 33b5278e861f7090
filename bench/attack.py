#!/usr/bin/env python3
"""attack: what one user's storms of packets do to another user of a bus.

    python3 bench/attack.py                     all storms, on sbus.py
    python3 bench/attack.py --only shapes,flood     some of them
    python3 bench/attack.py --server 'CMD {address}'    another server
    python3 bench/attack.py --list

It must be started by root.  The server is root's and lets others in (-go).
Processes of user 2001 storm it; a process of user 2002 sends itself one
message after the other, alone for a second and then beside the storm, and
the table shows how long a round trip took.  On a machine with two cores the
storm, the server and the witness share them, so what the storm takes from
the kernel's scheduler is in the figures.

Exit status: 0; 1 if the witness waited for longer than PROMISED_MS, unless it
was for what SECURITY.md does not promise, or a message was lost; 2 for wrong
use.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import os
import resource
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NamedTuple

ATTACKER, WITNESS = 2001, 2002  # user ids
SO_ATTACH_FILTER = 26
SECONDS_ALONE = 1.0
READERS = 300
NEWS = b"news/"  # what the readers of the witness hear
ONE_SHOTS = 10_000
PROMISED_MS = {"p99": 20.0, "max": 100.0}
# What the first four do, the kernel does
NOT_PROMISED = {"large", "filter", "watchers", "nested", "together"}
SBUS = Path(__file__).resolve().parent.parent / "sbus.py"


# =============================================================================
# Clients
# =============================================================================


def dial(address: str) -> socket.socket:
    """Return a new connection."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
    wire.connect(address)
    return wire


def subscribers(
    address: str, count: int, pattern: bytes
) -> list[socket.socket]:
    """Return clients that hold a pattern."""
    wires = [dial(address) for _ in range(count)]
    for wire in wires:
        wire.send(b"SUB " + pattern)
    for wire in wires:
        ask(wire)
    return wires


def ask(wire: socket.socket) -> bytes:
    """Return what the server says that a client is; all else is dropped."""
    question = b"CMSG !/cred/whoami\0"
    wire.send(question)
    while True:
        packet = wire.recv(1 << 19)
        if packet.startswith(question) or not packet:
            return packet[len(question) :]


def read_all(wires: list[socket.socket], at_least: int = 0) -> None:
    """Read whatever comes, for as long as so many are connected."""
    count = len(wires)
    poll = select.epoll()
    by_number = {wire.fileno(): wire for wire in wires}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    buffer = bytearray(1 << 19)
    while count >= at_least:
        for number, _ in poll.poll():
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    flags = socket.MSG_DONTWAIT
                    if not by_number[number].recv_into(buffer, 0, flags):
                        poll.unregister(number)
                        count -= 1
                        break


def in_background(work: Callable[[], object]) -> None:
    """Do something in a process that ends with this one."""
    if not os.fork():
        with contextlib.suppress(OSError):
            work()
        os._exit(0)


def over_and_over(address: str, packets: list[bytes]) -> None:
    """Send packets in turn, for ever; connect again if need be."""
    while True:
        with dial(address) as wire, contextlib.suppress(OSError):
            while True:
                for packet in packets:
                    wire.send(packet)


# =============================================================================
# Storms
# =============================================================================


def storm_subscribe(address: str) -> None:
    """500 clients subscribe and unsubscribe a pattern that they share."""
    wires = subscribers(address, 500, b"x")
    while True:
        for wire in wires:
            with contextlib.suppress(BlockingIOError):
                for packet in (b"SUB */", b"UNSUB */") * 32:
                    wire.send(packet, socket.MSG_DONTWAIT)


def storm_shapes(address: str) -> None:
    """New keys beside the 256 most costly shapes of patterns."""
    wire = dial(address)
    for number in range(256):
        prefix = b"x" * (number % 16) + b"*/" + b"y" * (number // 16) + b"*/"
        wire.send(b"SUB " + prefix + b"*/" * 61)
    ask(wire)
    tail = b"/a" * 63
    packets = [b"MSG %d%b\0" % (number, tail) for number in range(10_000)]
    over_and_over(address, packets)


def storm_secrets(address: str) -> None:
    """Messages to nobody beside 250 clients that listen for secrets."""
    wires = subscribers(address, 250, b"!/cred////")
    in_background(lambda: read_all(wires))
    own = ask(dial(address)).split(b"/")
    over_and_over(address, [b"MSG !/cred/%b/%b/1/x\0" % (own[2], own[3])])


def storm_segments(address: str) -> None:
    """Keys of 4,000 segments, or as many as the server takes."""
    packets = [b"MSG %d%b\0" % (n, b"/" * 63) for n in range(5_000)]
    in_background(lambda: over_and_over(address, [b"MSG " + b"/" * 4_000]))
    over_and_over(address, packets)


def storm_orders(address: str) -> None:
    """Readers with 62 MB of backlog that change its order all the time."""
    readers = subscribers(address, 4, b"o")
    publisher = dial(address)
    for reader in readers:
        reader.send(b"CMSG blocking/hard/discard")
        ask(reader)
    for _ in range(120_000):
        publisher.send(b"MSG o\0")
    ask(publisher)
    orders = (b"random", b"stack", b"random", b"queue")
    while True:
        for reader in readers:
            with contextlib.suppress(BlockingIOError):
                for order in orders:
                    reader.send(b"CMSG order/" + order, socket.MSG_DONTWAIT)
                    reader.recv(64, socket.MSG_DONTWAIT)


def storm_closing(address: str) -> None:
    """16 clients with 1,000 patterns each come and go."""
    patterns = [b"*/" * 60 + b"%d" % number for number in range(1_000)]
    while True:
        wires = [dial(address) for _ in range(16)]
        with contextlib.suppress(OSError):  # the last ones are still counted
            for wire in wires:
                for pattern in patterns:
                    wire.send(b"SUB " + pattern)
            for wire in wires:
                ask(wire)
        for wire in wires:
            wire.close()


def storm_questions(address: str) -> None:
    """500 clients ask, and hardly read."""
    wires = [dial(address) for _ in range(500)]
    while True:
        for wire in wires:
            with contextlib.suppress(BlockingIOError):
                for _ in range(16):
                    wire.send(b"CMSG !/cred/whoami", socket.MSG_DONTWAIT)
                    wire.send(b"CMSG stats", socket.MSG_DONTWAIT)
                for _ in range(31):
                    wire.recv(1 << 12, socket.MSG_DONTWAIT)


def storm_connects(address: str) -> None:
    """Connections that are closed at once."""
    in_background(lambda: connect_only(address))
    connect_only(address)


def connect_only(address: str) -> None:
    while True:
        dial(address).close()


def storm_crowd(address: str) -> None:
    """Connections above the limit of a user."""
    wires = [dial(address) for _ in range(512)]
    for wire in wires:
        ask(wire)
    while True:
        dial(address).close()


def storm_mistakes(address: str) -> None:
    """Connections that send a malformed packet."""
    while True:
        with dial(address) as wire, contextlib.suppress(OSError):
            wire.send(b"HELLO")


def storm_flood(address: str, count: int = READERS) -> None:
    """Ten publishers of small packets to 300 readers."""
    wires = subscribers(address, count, b"f")
    in_background(lambda: read_all(wires))
    for _ in range(9):
        in_background(lambda: over_and_over(address, [b"MSG f\0x"]))
    over_and_over(address, [b"MSG f\0x"])


def storm_news(address: str) -> None:
    """Small messages to the 300 readers of the witness."""
    over_and_over(address, [b"MSG " + NEWS + b"\0x"])


def storm_volumes(address: str) -> None:
    """Packets of 16 kB to the 300 readers of the witness."""
    over_and_over(address, [b"MSG " + NEWS + b"\0" + bytes(16_000)])


def storm_large(address: str) -> None:
    """Packets of 400 kB to 500 readers."""
    wires = subscribers(address, 500, b"l")
    in_background(lambda: read_all(wires[:250]))
    in_background(lambda: read_all(wires[250:]))
    over_and_over(address, [b"MSG l\0" + bytes(400_000)])


def storm_stuck(address: str) -> None:
    """Packets of 16 kB to 400 readers that do not read, and leave."""
    while True:
        with contextlib.suppress(OSError):  # the last ones are still counted
            wires = subscribers(address, 400, b"s")
            for wire in wires:
                wire.send(b"CMSG blocking/hard/discard")
                ask(wire)
            with dial(address) as publisher:
                for _ in range(100):
                    publisher.send(b"MSG s\0" + bytes(16_000))
                ask(publisher)
        wires = []


def storm_filter(address: str) -> None:
    """500 readers with a filter on their sockets that takes long."""
    wires = subscribers(address, 500, b"f")
    message = b"MSG f\0xx" + struct.pack("HH", 4, 1) * 4_000
    for wire in wires:
        attach_filter(wire, len(b"MSG f\0xx"))
    over_and_over(address, [message])


def storm_listeners(address: str, count: int = 500) -> None:
    """500 readers with such a filter hear all that others say."""
    wires = subscribers(address, count, b"ping/")
    for wire in wires:
        attach_filter(wire, 0)
    read_all(wires)


def storm_together(address: str) -> None:
    """The storms listeners and flood, of 250 readers each, and connects."""
    in_background(lambda: storm_listeners(address, 250))
    in_background(lambda: storm_flood(address, 250))
    storm_connects(address)


def storm_tuned(address: str) -> None:
    """500 readers with a filter that takes half as long."""
    wires = subscribers(address, 500, b"f")
    message = b"MSG f\0xx" + struct.pack("HH", 4, 1) * 4_000
    for wire in wires:
        attach_filter(wire, len(b"MSG f\0xx"), 850)
    in_background(lambda: read_all(wires))
    with dial(address) as publisher:
        while True:
            publisher.send(message)
            ask(publisher)


def storm_blame(address: str) -> None:
    """One reader with such a filter, behind the 300 that the witness has."""
    message = b"MSG " + NEWS + b"\0xx" + struct.pack("HH", 4, 1) * 4_000
    (wire,) = subscribers(address, 1, NEWS)
    attach_filter(wire, len(b"MSG " + NEWS + b"\0xx"), 1_200)
    in_background(lambda: read_all([wire]))
    with dial(address) as publisher:
        while True:
            publisher.send(message)
            ask(publisher)


def storm_pair(address: str) -> None:
    """Two readers of everything, watched 50,000 times over each."""
    one, other = wires = subscribers(address, 2, b"")
    with watched(one, 500, 100, 0), watched(other, 500, 100, 0):
        read_all(wires)


def attach_filter(wire: socket.socket, start: int, pairs: int = 2_047) -> None:
    """Have the kernel look for what is not there, over and over.

    A packet filter of up to 4,096 instructions: those in the middle, in
    pairs, look at *start* for an attribute of a type that no packet has, and
    go past all attributes in it.  The last one refuses the packet.
    """
    load, find, give_up = (0, start), (0x20, 0xFFFF_F000 + 12), (0x06, 0)
    steps = [(0x01, 0x1234), *[load, find] * pairs, give_up]
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", code, 0, 0, k) for code, k in steps)
    )
    packed = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    wire.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, packed)


def storm_watchers(address: str) -> None:
    """A reader whose socket is watched 400,000 times over."""
    wire = subscribers(address, 1, b"w")[0]
    with watched(wire, 1_000, 400):
        in_background(lambda: read_all([wire]))
        over_and_over(address, [b"MSG w\0x"])


def storm_nested(address: str) -> None:
    """A reader that 30 watch, by an epoll that ten poll 15,000 times over."""
    wire = subscribers(address, 1, b"w")[0]
    with watched(wire, 1, 30) as (watcher,):
        poll = select.poll()
        for _ in range(15_000):
            poll.register(os.dup(watcher.fileno()), 0)
        for _ in range(10):
            in_background(poll.poll)
        in_background(lambda: read_all([wire]))
        over_and_over(address, [b"MSG w\0x"])


@contextlib.contextmanager
def watched(
    wire: socket.socket,
    watchers: int,
    copies: int,
    events: int = select.EPOLLIN | select.EPOLLOUT,
) -> Iterator[list[select.epoll]]:
    """Have a socket watched that many times over."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    dups = [socket.socket(fileno=os.dup(wire.fileno())) for _ in range(copies)]
    polls = [select.epoll() for _ in range(watchers)]
    for poll in polls:
        for dup in dups:
            poll.register(dup, events)
    yield polls
    for poll in polls:
        poll.close()
    for dup in dups:
        dup.close()


def storm_unread(address: str) -> None:
    """A mistake and 4 MiB behind it, of a socket watched 10,000 times."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            with watched(wire, 1_000, 10):
                wire.connect(address)
                wire.setblocking(False)
                with contextlib.suppress(OSError):
                    while True:
                        wire.send(b"HELLO")
                end = select.poll()
                end.register(wire, select.POLLHUP)
                end.poll(1_000)


def storm_one_shots(address: str) -> None:
    """A process that connects, publishes and closes, beside 300 readers."""
    wires = subscribers(address, READERS, b"1")
    in_background(lambda: read_all(wires))
    one_shots(address, 1 << 60)


def one_shots(address: str, count: int) -> None:
    for number in range(count):
        with dial(address) as wire:
            wire.send(b"MSG 1\0%d" % number)


def storm_descriptors(address: str) -> None:
    """Sockets that linger, passed with a packet and closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    wire = dial(address)
    while True:
        lingering = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        lingering.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                lingering.send(bytes(1 << 16))
        linger = struct.pack("ii", 1, 3_600)
        lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        rights = array.array("i", [lingering.fileno()])
        with contextlib.suppress(OSError):
            ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)
            wire.sendmsg([b"MSG d\0x"], [ancillary])
        lingering.detach()
        os.close(rights[0])
        time.sleep(0.1)
        peer.close()


"x".encode("idna")  # while its module can be read: for storm_descriptors

STORMS: dict[str, Callable[[str], None]] = {
    name[len("storm_") :].replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith("storm_")
}


# =============================================================================
# The witness
# =============================================================================


class Times(NamedTuple):
    """How long round trips took, in milliseconds."""

    median: float
    p99: float
    max: float


def round_trips(address: str, seconds: float) -> Times:
    """Return how long one's own messages take to come back."""
    wire = dial(address)
    wire.send(b"SUB ping/%d" % os.getpid())
    ask(wire)
    packet = b"MSG ping/%d\0x" % os.getpid()

    def send_and_receive() -> None:
        wire.send(packet)
        wire.recv(64)

    return time_of(send_and_receive, seconds)


def read_news(address: str) -> None:
    """Read what comes for many readers, until one is disconnected."""
    wires = subscribers(address, READERS, NEWS)
    read_all(wires, at_least=len(wires))


def connect_times(address: str, seconds: float) -> Times:
    """Return how long it takes to connect and be answered."""

    def connect_and_ask() -> None:
        with dial(address) as wire:
            ask(wire)

    return time_of(connect_and_ask, seconds)


def time_of(work: Callable[[], None], seconds: float) -> Times:
    """Return how long a piece of work takes, done over and over."""
    taken: list[float] = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        start = now
        work()
        now = time.perf_counter()
        taken.append((now - start) * 1_000)
    taken.sort()
    count = len(taken)
    return Times(taken[count // 2], taken[count * 99 // 100], taken[-1])


def as_user(uid: int, work: Callable[[], object]) -> int:
    """Do something in a process group of another user; return its number."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setsid()
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            work()
            status = 0
        except BaseException as error:
            print(f"attack: user {uid}: {error!r}", file=sys.stderr)
        finally:
            os._exit(status)
    return pid


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; it must not be killed then."""
    return os.waitpid(pid, os.WNOHANG) != (0, 0)


def kill(pid: int) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def witnessed(
    address: str, seconds: float, measure: Callable[[str, float], Times]
) -> Times:
    """Return what a process of the other user measures."""
    reader, writer = os.pipe()

    def work() -> None:
        os.write(writer, struct.pack("3d", *measure(address, seconds)))

    pid = as_user(WITNESS, work)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], seconds + 30)
    packed = os.read(reader, 24) if ready else b""
    os.close(reader)
    kill(pid)
    if len(packed) < 24:
        return Times(*[float("inf")] * 3)
    return Times(*struct.unpack("3d", packed))


# =============================================================================
# The runs
# =============================================================================


@contextlib.contextmanager
def server(command: list[str], directory: str) -> Iterator[str]:
    """Run a server, and give its address."""
    address = os.path.join(directory, "bus")
    arguments = [part.replace("{address}", address) for part in command]
    with open(os.path.join(directory, "log"), "ab") as log:
        process = subprocess.Popen(arguments, stderr=log)
    try:
        for _ in range(1_000):
            with contextlib.suppress(OSError):
                dial(address).close()
                break
            time.sleep(0.01)
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        Path(address).unlink(missing_ok=True)


def run(name: str, command: list[str], seconds: float, where: str) -> bool:
    """Run one storm, print what came of it, and return if all was well."""
    with server(command, where) as address:
        readers = as_user(WITNESS, lambda: read_news(address))
        before = witnessed(address, SECONDS_ALONE, round_trips)
        storm = as_user(ATTACKER, lambda: STORMS[name](address))
        time.sleep(1)  # of storm, for what it prepares
        is_over = has_ended(storm)
        during = witnessed(address, seconds, round_trips)
        is_lost = has_ended(readers)
        if not is_over:
            kill(storm)
        if not is_lost:
            kill(readers)
    show(name, before, during)
    if is_over:
        print(f"attack: {name} ended before it was measured", file=sys.stderr)
    if is_lost:
        print("attack: the witness has lost a reader", file=sys.stderr)
    is_late = name not in NOT_PROMISED and any(
        getattr(during, figure) > most for figure, most in PROMISED_MS.items()
    )
    return not (is_late or is_over or is_lost)


def run_connects(command: list[str], seconds: float, where: str) -> None:
    """Print how long a new connection of another user takes in a storm."""
    with server(command, where) as address:
        before = witnessed(address, SECONDS_ALONE, connect_times)
        pid = as_user(ATTACKER, lambda: storm_connects(address))
        during = witnessed(address, seconds, connect_times)
        kill(pid)
    show("connect", before, during)


def run_losses(command: list[str], where: str) -> bool:
    """Count the messages of one-shot publishers that are lost."""
    with server(command, where) as address:
        reader, writer = os.pipe()

        def work() -> None:
            wires = subscribers(address, READERS, b"1")
            in_background(lambda: read_all(wires[1:]))
            in_background(lambda: one_shots(address, ONE_SHOTS))
            wires[0].settimeout(20)
            heard = 0
            with contextlib.suppress(OSError):
                while heard < ONE_SHOTS and wires[0].recv(64):
                    heard += 1
            os.write(writer, struct.pack("i", heard))

        pid = as_user(ATTACKER, work)
        heard = struct.unpack("i", os.read(reader, 4))[0]
        kill(pid)
        os.close(reader)
        os.close(writer)
    lost = ONE_SHOTS - heard
    print(f"{lost} of {ONE_SHOTS} one-shots lost beside {READERS} readers")
    return not lost


def show(name: str, before: Times, during: Times) -> None:
    """Print a row of the table."""
    figures = " | ".join(f"{figure:9.3f}" for figure in (*before, *during))
    print(f"| {name:12} | {figures} |", flush=True)


def storm_names(text: str) -> list[str]:
    """Return the storms of an option."""
    names = text.split(",")
    for name in names:
        if name not in STORMS:
            what = f"{name!r} is none of {', '.join(STORMS)}"
            raise argparse.ArgumentTypeError(what)
    return names


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="attack", allow_abbrev=False)
    default = f"{shlex.quote(sys.executable)} {shlex.quote(str(SBUS))}"
    default += " -go -a {address}"
    parser.add_argument("--server", default=default, metavar="CMD")
    parser.add_argument("--only", type=storm_names, default=list(STORMS))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for name, storm in STORMS.items():
            print(f"{name:12} {storm.__doc__}")
        return 0
    if os.getuid():
        parser.error("only root can be several users; use sudo")
    command = shlex.split(options.server)
    print("milliseconds of another user's round trip, before and during")
    print("| storm        |    median |       p99 |       max", end="")
    print(" |    median |       p99 |       max |\n|---" + "|---:" * 6 + "|")
    is_well = True
    with tempfile.TemporaryDirectory(prefix="sbus-") as where:
        os.chmod(where, 0o755)
        for name in options.only:
            is_well &= run(name, command, options.seconds, where)
        if "connects" in options.only:
            run_connects(command, options.seconds, where)
        if "one-shots" in options.only:
            is_well &= run_losses(command, where)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
