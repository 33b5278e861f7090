#!/usr/bin/env python3
"""attack: what one user's storms of packets do to another user of a bus.

    python3 bench/attack.py                           all storms, on sbus.py
    python3 bench/attack.py --only shapes,flood       some of them
    python3 bench/attack.py --server 'CMD {address}'  another server

Only root can start it.  Processes of user 1001 storm a server of root's that
lets all connect; meanwhile a client of user 1002 publishes to itself, and a
row says how long its round trips took.  Figures of two runs cannot be
compared; with two --server, each storm runs on one and then on the other.
Exit status: 0; 1 if something was slow or lost, or failed; 2 for wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ATTACKER, WITNESS = 1001, 1002  # user ids
P99_MS, MAX_MS = 20.0, 150.0
SILENCE_SECONDS = 20  # that the witness waits for a packet
ONE_SHOTS = 10_000
READERS = 300
SBUS = shlex.quote(str(Path(__file__).resolve().parent.parent / "sbus.py"))


def dial(address: str, *packets: bytes) -> socket.socket:
    """Return a new connection, once the server has handled its packets."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire.connect(address)
    for packet in packets:
        wire.send(packet)
    if packets:
        wire.send(b"CMSG !/cred/whoami")
        while wire.recv(1 << 12)[:5] not in (b"CMSG ", b""):
            pass
    return wire


def over_and_over(address: str, *packets: bytes) -> None:
    """Send packets in turn, for ever; connect again if need be."""
    while True:
        with dial(address) as wire, contextlib.suppress(OSError):
            while True:
                for packet in packets:
                    wire.send(packet)


def exchange(wire: socket.socket, packets: list[bytes], answers: int) -> None:
    """Send packets and receive answers, as many as go without waiting."""
    with contextlib.suppress(BlockingIOError):
        for packet in packets:
            wire.send(packet, socket.MSG_DONTWAIT)
    with contextlib.suppress(BlockingIOError):
        for _ in range(answers):
            wire.recv(1 << 12, socket.MSG_DONTWAIT)


def read_all(wires: list[socket.socket], at_least: int = 1) -> None:
    """Read whatever comes, while so many clients are connected."""
    poll = select.epoll()
    connected = {wire.fileno(): wire for wire in wires}
    for number in connected:
        poll.register(number, select.EPOLLIN)
    while len(connected) >= at_least:
        for number, _ in poll.poll():
            with contextlib.suppress(OSError):  # all is read
                while connected[number].recv(1 << 12, socket.MSG_DONTWAIT):
                    pass
                poll.unregister(number)
                del connected[number]


def start(work: Callable[[], object], uid: int = 0) -> int:
    """Call a function in a process of its own, and return its id."""
    pid = os.fork()
    if not pid:
        try:
            if uid:
                os.setsid()
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            work()
        except Exception as error:
            print(f"attack: user {uid}: {error!r}", file=sys.stderr)
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> bool:
    """Kill a process group; return whether its first had ended already."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return ended is not None


def storm_subscribe(address: str) -> None:
    """500 clients subscribe and unsubscribe one pattern."""
    wires = [dial(address, b"SUB x") for _ in range(500)]
    while True:
        for wire in wires:
            exchange(wire, [b"SUB */", b"UNSUB */"] * 32, 0)


def storm_shapes(address: str) -> None:
    """New keys of 64 segments beside 256 shapes of 63 stars."""
    heads = [b"x" * a + b"*/" + b"y" * b for a in range(16) for b in range(16)]
    with dial(address, *[b"SUB " + head + b"*/" * 62 for head in heads]):
        keys = [b"%d" % n + b"/a" * 63 for n in range(10_000)]
        over_and_over(address, *[b"MSG " + key + b"\0" for key in keys])


def storm_secrets(address: str) -> None:
    """Secret messages for nobody beside 250 clients that have others."""
    wires = [dial(address, b"SUB !/cred////") for _ in range(250)]
    start(lambda: read_all(wires))
    over_and_over(address, b"MSG !/cred/%d/%d/1/x\0" % (ATTACKER, ATTACKER))


def storm_segments(address: str) -> None:
    """New keys of 64 segments, and of 4,000, which are a mistake."""
    start(lambda: over_and_over(address, b"MSG " + b"/" * 4_000 + b"\0"))
    keys = [b"%d" % n + b"/" * 63 for n in range(5_000)]
    over_and_over(address, *[b"MSG " + key + b"\0" for key in keys])


def storm_orders(address: str) -> None:
    """Four readers keep changing the order of 62 MB of backlog."""
    first = (b"SUB o", b"CMSG blocking/hard/discard")
    readers = [dial(address, *first) for _ in range(4)]
    dial(address, *[b"MSG o\0"] * 120_000)
    orders = [b"CMSG order/" + order for order in (b"random", b"stack")] * 2
    while True:
        for reader in readers:
            exchange(reader, orders, len(orders))


def storm_closing(address: str) -> None:
    """16 clients subscribe to 1,000 patterns each and leave, repeatedly."""
    patterns = [b"SUB " + b"*/" * 60 + b"%d" % n for n in range(1_000)]
    while True:
        with contextlib.suppress(OSError):  # the last ones may still count
            wires = [dial(address, *patterns) for _ in range(16)]
            del wires


def storm_questions(address: str) -> None:
    """500 clients ask, and read a little less than the answers."""
    wires = [dial(address) for _ in range(500)]
    while True:
        for wire in wires:
            exchange(wire, [b"CMSG !/cred/whoami", b"CMSG stats"] * 16, 31)


def storm_connects(address: str) -> None:
    """Two processes make connections that they close at once."""
    os.fork()
    while True:
        dial(address).close()


def storm_crowd(address: str) -> None:
    """A user with 512 clients, its limit, makes more connections."""
    wires = [dial(address, b"SUB x") for _ in range(512)]
    while wires:
        dial(address).close()


def storm_mistakes(address: str) -> None:
    """Connections that send a malformed packet."""
    while True:
        dial(address).send(b"HELLO")


def storm_flood(address: str) -> None:
    """Ten publishers of small messages to 300 readers of their user."""
    wires = [dial(address, b"SUB f") for _ in range(READERS)]
    for _ in range(10):
        start(lambda: over_and_over(address, b"MSG f\0x"))
    read_all(wires)


def storm_one_shots(address: str, count: int = sys.maxsize) -> None:
    """Connections that publish a message and close, beside 300 readers."""
    wires = [dial(address, b"SUB 1") for _ in range(READERS)]
    start(lambda: read_all(wires))
    for _ in range(count):
        dial(address).send(b"MSG 1\0")


def storm_descriptors(address: str) -> None:
    """The bus is passed sockets that take 0.1 s to close."""
    listener = socket.create_server(("127.0.0.1", 0))
    wire, linger = dial(address), struct.pack("ii", 1, 3_600)
    while True:
        slow = socket.socket()
        slow.connect(listener.getsockname())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        exchange(slow, [bytes(1 << 16)] * 1_000, 0)  # which nobody reads
        rights = (socket.SCM_RIGHTS, struct.pack("i", slow.fileno()))
        with contextlib.suppress(PermissionError):  # since Linux 6.16
            wire.sendmsg([b"MSG d\0"], [(socket.SOL_SOCKET, *rights)])
        threading.Timer(0.1, listener.accept()[0].close).start()
        slow.close()


STORMS: dict[str, Callable[[str], None]] = {
    "quiet": lambda address: signal.pause(),
    "news": lambda address: over_and_over(address, b"MSG news\0x"),
}
for name, value in [*globals().items()]:
    if name.startswith("storm_"):
        STORMS[name[len("storm_") :].replace("_", "-")] = value


@contextlib.contextmanager
def server(command: str) -> Iterator[str]:
    """Run a server, and give its address; raise OSError if it dies."""
    with tempfile.TemporaryDirectory() as where:
        os.chmod(where, 0o755)
        address, log = os.path.join(where, "bus"), Path(where, "log")
        args = shlex.split(command.replace("{address}", address))
        with log.open("wb") as out:
            bus = subprocess.Popen(args, stderr=out, start_new_session=True)
        try:
            while bus.poll() is None:
                with contextlib.suppress(OSError):
                    dial(address).close()
                    break
                time.sleep(0.01)
            yield address
        finally:
            time.sleep(0.1)  # it may have closed its sockets, and be dying
            status = bus.poll()
            bus.kill()
            bus.wait()
            if status is not None:
                last = log.read_text("latin-1").strip().rpartition("\n")[2]
                raise OSError(f"the bus died with status {status}: {last}")


def witness(address: str, pattern: bytes) -> socket.socket:
    """Return a client of the witness, which does not wait for ever."""
    os.seteuid(WITNESS)
    try:
        wire = dial(address, b"SUB " + pattern)
    finally:
        os.seteuid(0)
    wire.settimeout(SILENCE_SECONDS)
    return wire


def round_trips(wire: socket.socket, seconds: float) -> list[float]:
    """Return how long own messages took to come back: p50, p99, max in ms."""
    times = [time.perf_counter()]
    while times[-1] - times[0] < seconds:
        wire.send(b"MSG ping\0")
        wire.recv(64)
        times.append(time.perf_counter())
    taken = sorted(round(1e3 * (b - a), 2) for a, b in zip(times, times[1:]))
    return [taken[(len(taken) - 1) * part // 100] for part in (50, 99, 100)]


def lost_one_shots(address: str) -> int:
    """Return how many messages of ONE_SHOTS publishers are lost."""
    reader, lost = witness(address, b"1"), ONE_SHOTS
    storm = start(lambda: storm_one_shots(address, ONE_SHOTS), ATTACKER)
    with contextlib.suppress(OSError):  # it has waited for long enough
        while lost and reader.recv(64):
            lost -= 1
    end(storm)
    return lost


def run(name: str, label: str, command: str, seconds: float) -> Iterator[str]:
    """Print a storm's row, and say what was wrong."""
    with server(command) as address:
        wire = witness(address, b"ping")
        news = [witness(address, b"news") for _ in range(READERS)]
        readers = start(lambda: read_all(news, READERS), WITNESS)
        storm = start(lambda: STORMS[name](address), ATTACKER)
        try:
            time.sleep(1)  # for what it prepares
            p50, p99, longest = round_trips(wire, seconds)
        finally:
            if end(storm):
                yield "the storm ended too early"
            if end(readers):
                yield "a reader of the witness was disconnected"
        lost = lost_one_shots(address) if name == "one-shots" else ""
        print(f"| {label} | {p50} | {p99} | {longest} | {lost} |", flush=True)
        if p99 > P99_MS:
            yield f"p99 is {p99} ms, over {P99_MS:g} ms"
        if longest > MAX_MS:
            yield f"max is {longest} ms, over {MAX_MS:g} ms"
        if lost:
            yield f"{lost} of {ONE_SHOTS:,} messages were lost"


def main() -> str | None:
    """Run the command line; return what was wrong, if anything."""
    parser = argparse.ArgumentParser("attack", argparse.SUPPRESS)
    parser.add_argument("--only", metavar="NAMES", default=",".join(STORMS))
    parser.add_argument("--seconds", metavar="N", type=float, default=4.0)
    parser.add_argument("--server", metavar="CMD", action="append")
    options = parser.parse_args()
    default = f"{shlex.quote(sys.executable)} {SBUS} -go -a {{address}}"
    servers, names = options.server or [default], options.only.split(",")
    for name in names:
        if name not in STORMS:
            parser.error(f"no storm {name!r}; there are {', '.join(STORMS)}")
    if not all("{address}" in command for command in servers):
        parser.error("--server has no {address}")
    if not options.seconds > 0:
        parser.error("--seconds is not above 0")
    if os.getuid():
        parser.error("only root can act as several users")
    print("| storm | p50 ms | p99 ms | max ms | lost |\n|---|---|---|---|---|")
    faults = []
    for name in names:
        for number, command in enumerate(servers, 1):
            label = name + f" ({number})" * (len(servers) > 1)
            try:
                found = [*run(name, label, command, options.seconds)]
            except OSError as error:
                found = [f"failed: {error}"]
            faults += [f"attack: {label}: {what}" for what in found]
    return "\n".join(faults) or None


if __name__ == "__main__":
    sys.exit(main())
