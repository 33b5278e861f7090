#!/usr/bin/env python3
"""speed: how fast a server is, beside the least that Python can do.

    python3 -m bench.speed                            sbus.py, all scenarios
    python3 -m bench.speed --server 'CMD {address}'   any other server
    python3 -m bench.speed --beside 'CMD {address}'   beside another server
    python3 -m bench.speed --only pipe-64,churn       some scenarios
    python3 -m bench.speed --list                     what there is

It is started in the folder that has sbus.py and sbus_client.py, and needs
CPython 3.9 or later on Linux.
Each scenario runs in several rounds, each on a fresh server.  What it is
compared with runs in the same round, after it and before it in turn.  A
figure is the median of the rounds, and a ratio, the figure divided by the
one that it is compared with, is the median of the rounds' ratios.

The relay is the baseline (relay.py).  With --beside, another server is, in
each scenario that measures a server, such as an older sbus.py: what a change
has cost.
Ratios of one run mean something; figures of two runs are not comparable.

The load is made by processes, one for each publisher and each subscriber,
that move up to 64 packets a system call, so that it costs less than a server.
A message that is lost, reordered or changed in size fails the scenario.
Time runs from the first publisher's start until the last subscriber has the
last message, so a backlog counts.  Limits of this: where there are fewer
cores than processes, the load takes processor time from the server.  The
column "busy" is the share of a core that the server had; the further it is
below 1.00, the more a figure says of the load and of the kernel's scheduler.
In "fairness" six processes want to run; the relay's figure shows what that
alone costs.  "memory" reads VmRSS of the process that the command starts, so
a command must not go to the background.  "matching" needs no server: it
drives the module sbus in a process of the load.  "client" compares a Client
of sbus_client.py with bare loops around socket.send and socket.recv, that
look at nothing; both take turns in one process: through the server, which
limits both, and on a pair of sockets, where nothing hides the difference.

Exit status: 0; 1 if something failed, or with --check if a target is missed;
2 for wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

import sbus
import sbus_client

HERE = Path(__file__).resolve().parent
OWN_SERVER = [sys.executable, str(HERE.parent / "sbus.py")]
OWN_SERVER += ["-f", "-a", "{address}"]
RELAY = [sys.executable, str(HERE / "relay.py"), "{address}"]
WHOAMI = b"CMSG !/cred/whoami"
SEND_BUFFER_BYTES = 212_992  # asked for; the kernel doubles it
IDLE_SECONDS_MAX = 10  # that a client of the load waits for a packet
START_SECONDS_MAX = 10
STOP_SECONDS_MAX = 5
WORK_SECONDS_MAX = 120  # of a process of the load

Sample = dict[str, float]  # what was measured, by name of the figure


class BenchError(Exception):
    """The base of all that this file raises on purpose."""


class LoadError(BenchError):
    """A scenario failed; the others go on."""


class ServerError(BenchError):
    """The server did not start, or ended; nothing goes on."""


# =============================================================================
# Servers
# =============================================================================

STOPPING = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> None:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt, but only once."""

    def on_signal(number: int, frame: object) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in STOPPING:
        signal.signal(each, on_signal)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put signals off while processes start or end: none is forgotten."""
    came: list[int] = []
    before = [
        (each, signal.signal(each, lambda number, _: came.append(number)))
        for each in STOPPING
    ]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])


class Server:
    """A server process, the leader of a process group of its own."""

    def __init__(self, command: Sequence[str], directory: str) -> None:
        self.address = os.path.join(directory, "socket")
        self._log = Path(directory, "log")
        words = [word.replace("{address}", self.address) for word in command]
        try:
            with self._log.open("wb") as log, undisturbed():
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            what = error.strerror
            raise ServerError(f"cannot run {words[0]}: {what}") from None

    def wait_until_it_listens(self) -> None:
        """Raise ServerError if it does not."""
        end = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < end:
            self.check()
            try:
                return dial(self.address).close()
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)
        self._fail(f"does not listen after {START_SECONDS_MAX} s")

    def check(self) -> None:
        """Raise ServerError if it has ended."""
        status = self._process.poll()
        if status is not None:
            self._fail(f"ended with status {status}")

    def _fail(self, what: str) -> NoReturn:
        """Raise ServerError with the last line of standard error, if any."""
        lines = self._log.read_text("utf-8", "replace").split("\n")
        last_words = [f": {line[:200]}" for line in lines if line.strip()][-1:]
        raise ServerError(f"the server {what}{''.join(last_words)}")

    def stop(self) -> None:
        """End it, and whatever it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS_MAX)

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used."""
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = status.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return its resident memory (VmRSS)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        size = re.search(r"VmRSS:\s*(\d+) kB", status)
        return int(size[1]) * 1024 if size else 0


Measure = Callable[[Server], Sample]


def on_server(command: Sequence[str], measure: Measure) -> Sample:
    """Return what *measure* finds on a fresh server.

    Raises: LoadError, ServerError.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        server = Server(command, directory)
        try:
            server.wait_until_it_listens()
            return measure(server)
        except (BenchError, FileNotFoundError):  # the latter from /proc
            time.sleep(0.1)
            server.check()  # if it has ended, that is to be told
            raise
        finally:
            with undisturbed():
                server.stop()


# =============================================================================
# Processes of the load
# =============================================================================


class Gate:
    """What a process of the load knows of the one that started it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def wait(self) -> None:
        """Say that everything is ready, and wait to be let go on."""
        self._pipe.send(("gate", ""))
        self._pipe.recv()

    def is_over(self) -> bool:
        """Return whether this process is asked to come to an end."""
        return bool(self._pipe.poll(0))


# A function and its arguments after the first, which is a Gate.  It waits at
# the gate at least once, and returns a list of seconds or other numbers.
Job = tuple[Any, ...]


class Worker:
    """A forked process that does a job."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        with undisturbed():
            self._process = context.Process(
                target=do_job, args=(theirs, *job), daemon=True
            )
            self._process.start()
        theirs.close()

    def _receive(self, wanted: str) -> Any:
        """Return what the process has to say.

        Raises: LoadError if it failed.
        """
        if not self._pipe.poll(WORK_SECONDS_MAX):
            raise LoadError(f"not done after {WORK_SECONDS_MAX} s")
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            raise LoadError("a process of the load was killed") from None
        if kind != wanted:
            raise LoadError(str(content))
        return content

    def arrive(self) -> None:
        """Wait until it is at its gate."""
        self._receive("gate")

    def go(self) -> None:
        """Let it go on from its gate, or ask it to come to an end."""
        with contextlib.suppress(BrokenPipeError):  # _receive will say why
            self._pipe.send(None)

    def result(self) -> list[float]:
        """Wait until its job is done, and return what that returned."""
        return list(self._receive("result"))

    def check(self) -> None:
        """Raise LoadError if it has come to an end."""
        if self._pipe.poll(0):
            self._receive("nothing")

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def do_job(pipe: Any, function: Any, *arguments: object) -> None:
    """Be a process of the load."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pipe.send(("result", function(Gate(pipe), *arguments)))
    except LoadError as error:
        pipe.send(("error", str(error)))
    except BlockingIOError:
        what = f"a client could not send or read for {IDLE_SECONDS_MAX} s"
        pipe.send(("error", what))
    except OSError as error:
        pipe.send(("error", f"a client was disconnected: {error.strerror}"))


@contextlib.contextmanager
def workers(*jobs: Job) -> Iterator[list[Worker]]:
    """Start processes; give them when all are at their gates; end them."""
    started: list[Worker] = []
    try:
        for job in jobs:
            started.append(Worker(job))
        for worker in started:
            worker.arrive()
        yield started
    finally:
        with undisturbed():
            for worker in started:
                worker.kill()


# =============================================================================
# Many packets a system call
# =============================================================================

PACKETS_PER_CALL = 64
MSG_WAITFORONE = 0x10000  # wait for the first packet only
LIBC = ctypes.CDLL(None, use_errno=True)


class IoVector(ctypes.Structure):
    """struct iovec: a piece of memory."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Header(ctypes.Structure):
    """struct msghdr: the pieces of a packet."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("pieces_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class Slot(ctypes.Structure):
    """struct mmsghdr: a packet, and the size that was moved."""

    _fields_ = [("header", Header), ("size", ctypes.c_uint)]


class Batch:
    """Packets of one size: heads one after another, one rest for all."""

    def __init__(self, count: int, head_bytes: int, rest_bytes: int) -> None:
        self.heads = bytearray(count * head_bytes)
        self._rest = ctypes.create_string_buffer(b"x" * rest_bytes)
        self._slots = (Slot * count)()
        self._pieces = (IoVector * (2 * count))()
        memory = (ctypes.c_char * len(self.heads)).from_buffer(self.heads)
        start = ctypes.addressof(memory)
        rest = ctypes.addressof(self._rest)
        for index, slot in enumerate(self._slots):
            head, tail = self._pieces[2 * index : 2 * index + 2]
            head.start, head.size = start + index * head_bytes, head_bytes
            tail.start, tail.size = rest, rest_bytes
            slot.header.pieces = ctypes.addressof(head)
            slot.header.pieces_count = 2
            slot.size = head_bytes + rest_bytes
        self._intact = bytes(self._slots)

    def send(self, wire: socket.socket, first: int, count: int) -> int:
        """Send some; return how many were sent."""
        slots = ctypes.byref(self._slots, first * ctypes.sizeof(Slot))
        sent = LIBC.sendmmsg(wire.fileno(), slots, count, 0)
        return checked(sent)

    def receive(self, wire: socket.socket) -> int:
        """Wait for packets; return how many came.

        Raises: LoadError if one is of another size, or at the end of input.
        """
        slots, count = self._slots, len(self._slots)
        flags = MSG_WAITFORONE
        came = checked(LIBC.recvmmsg(wire.fileno(), slots, count, flags, None))
        used = came * ctypes.sizeof(Slot)
        if memoryview(slots).cast("B")[:used].tobytes() != self._intact[:used]:
            raise LoadError("a message of another size came, or the end")
        return came


def checked(result: int) -> int:
    """Return what a system call returned.

    Raises: OSError if it failed.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# =============================================================================
# Jobs
# =============================================================================


class Stream(NamedTuple):
    """Messages, and who publishes and who receives them."""

    messages: int  # of each publisher
    payload_bytes: int = 64
    subscribers: int = 1  # of each publisher
    publishers: int = 1
    keys: int = 1  # of each publisher, in turn

    def __str__(self) -> str:
        subscribers = self.publishers * self.subscribers
        text = f"{self.publishers} to {subscribers} clients"
        text += f", {self.messages:,} messages of {self.payload_bytes:,} bytes"
        return text + (f", {self.keys:,} keys" if self.keys > 1 else "")

    def heads(self, publisher: int) -> list[bytes]:
        """Return what tells the packets of a publisher apart, in order.

        They are all of one size, and used again and again.
        """
        return [
            b"MSG k%d/%04d\0%08d" % (publisher, number % self.keys, number)
            for number in range(1_000)
        ]

    def batch(self, publisher: int, count: int) -> Batch:
        """Return a batch for *count* packets of a publisher."""
        head_bytes = len(self.heads(publisher)[0])
        return Batch(count, head_bytes, self.payload_bytes - 8)

    def pattern(self, publisher: int) -> bytes:
        """Return the pattern of a publisher's subscribers."""
        return b"k%d/" % publisher + (b"0000" if self.keys == 1 else b"")


def set_send_buffer(wire: socket.socket) -> None:
    """Let a packet of 400,000 bytes be sent."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def dial(address: str, pattern: bytes | None = None) -> socket.socket:
    """Return a connected socket that does not wait for ever.

    Raises: LoadError if a subscription to *pattern* is not confirmed.
    """
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    set_send_buffer(wire)
    # Not settimeout, which would cost a system call for each packet
    limit = struct.pack("ll", IDLE_SECONDS_MAX, 0)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        wire.connect(address)
        if pattern is not None:
            wire.send(b"SUB " + pattern)
            fence(wire)
    except OSError:
        wire.close()
        raise
    return wire


def fence(wire: socket.socket) -> None:
    """Wait until the server has handled all that was sent before."""
    wire.send(WHOAMI)
    answer = wire.recv(4096)
    if not answer.startswith(WHOAMI + b"\0"):
        raise LoadError(f"whoami was answered with {answer[:60]!r}")


def publish(
    gate: Gate, address: str, stream: Stream, publisher: int
) -> list[float]:
    """Publish; return when that began (s)."""
    wire = dial(address)
    heads = stream.heads(publisher)
    batch = stream.batch(publisher, len(heads))
    batch.heads[:] = b"".join(heads)
    gate.wait()
    start = time.monotonic()
    sent = 0
    while sent < stream.messages:
        first = sent % len(heads)
        left = min(stream.messages - sent, len(heads) - first)
        sent += batch.send(wire, first, min(PACKETS_PER_CALL, left))
    return [start]


def receive(
    gate: Gate, address: str, stream: Stream, publisher: int
) -> list[float]:
    """Read and check what is published; return when that ended (s)."""
    wire = dial(address, stream.pattern(publisher))
    heads = stream.heads(publisher)
    batch = stream.batch(publisher, PACKETS_PER_CALL)
    size = len(heads[0])
    wanted = b"".join(heads + heads[:PACKETS_PER_CALL])
    gate.wait()
    read = 0
    while read < stream.messages:
        try:
            count = batch.receive(wire)
        except BlockingIOError:
            what = f"was lost: nothing came for {IDLE_SECONDS_MAX} s"
            raise LoadError(f"message {read} {what}") from None
        start = read % len(heads) * size
        came = batch.heads[: count * size]
        if came != wanted[start : start + len(came)]:
            what = "or one soon after it was lost: another came, or the end"
            raise LoadError(f"message {read} {what}")
        read += count
    return [time.monotonic()]


def drain(gate: Gate, address: str, stream: Stream) -> None:
    """Read what comes until killed."""
    wire = dial(address, stream.pattern(0))
    batch = stream.batch(0, PACKETS_PER_CALL)
    gate.wait()
    while True:
        batch.receive(wire)


def round_trips(
    gate: Gate, address: str, count: int, pause_seconds: float
) -> list[float]:
    """Publish and hear it, again and again; return the times taken (s)."""
    wire = dial(address, b"polite")
    clock, send, recv = time.perf_counter, wire.send, wire.recv
    packet = b"MSG polite\0" + b"x" * 64
    times = []
    gate.wait()
    for _ in range(count):
        if pause_seconds:
            time.sleep(pause_seconds)
        start = clock()
        send(packet)
        answer = recv(4096)
        times.append(clock() - start)
        if answer != packet:
            raise LoadError(f"message {len(times)} did not come back")
    return times


def churn(gate: Gate, address: str, pairs_per_second: int) -> list[float]:
    """Subscribe and unsubscribe until the end; return the pace kept.

    Every other pattern has a '*'.
    """
    wire = dial(address)
    gate.wait()
    start = time.monotonic()
    pairs = 0
    while not gate.is_over():
        pattern = b"c/%d/*" % pairs if pairs % 2 else b"c/%d" % pairs
        wire.send(b"SUB " + pattern)
        wire.send(b"UNSUB " + pattern)
        pairs += 1
        due = start + pairs / pairs_per_second
        time.sleep(max(0.0, due - time.monotonic()))
    fence(wire)
    return [pairs / (time.monotonic() - start)]


def stay(gate: Gate, address: str, clients: int, patterns: int) -> list[float]:
    """Connect, wait at the gate, subscribe so often each, wait once more.

    A pattern has 20 bytes, and is exact, has a '*', or ends in '/'.
    """
    wires = [dial(address) for _ in range(clients)]
    fence(wires[-1])  # the server lets clients in one after another
    gate.wait()
    for client, wire in enumerate(wires):
        for number in range(patterns):
            end = (b"/abc", b"/ab*", b"/ab/")[number % 3]
            wire.send(b"SUB idle/%04d/%06d%s" % (client, number, end))
        fence(wire)
    gate.wait()
    return []


# =============================================================================
# What is measured on a server
# =============================================================================


def measure_stream(stream: Stream, server: Server) -> Sample:
    """Return how many messages all subscribers together got a second."""
    streams = [(server.address, stream, n) for n in range(stream.publishers)]
    readers = [(receive, *each) for each in streams] * stream.subscribers
    writers = [(publish, *each) for each in streams]
    with workers(*readers, *writers) as team:
        used = server.cpu_seconds()
        for worker in team:
            worker.go()
        # Backwards, as it is a publisher that can say what went wrong
        times = [worker.result()[0] for worker in team[::-1]][::-1]
        used = server.cpu_seconds() - used
    seconds = max(times[: len(readers)]) - min(times[len(readers) :])
    rate = stream.messages * len(readers) / seconds
    return {"messages/s": rate, "busy": used / seconds}


def measure_round_trips(count: int, server: Server) -> Sample:
    """Return the median time (us) of a message to oneself."""
    with workers((round_trips, server.address, count, 0.0)) as (client,):
        client.go()
        return {"us, round trip": 1e6 * statistics.median(client.result())}


def measure_beside_patterns(
    stream: Stream, clients: int, server: Server
) -> Sample:
    """Return a stream's figures beside clients of 1,000 patterns each."""
    with workers((stay, server.address, clients, 1_000)) as (others,):
        others.go()
        others.arrive()
        return measure_stream(stream, server)


def measure_beside_churn(stream: Stream, pace: int, server: Server) -> Sample:
    """Return a stream's figures beside a client that changes its mind."""
    with workers((churn, server.address, pace)) as (fickle,):
        fickle.go()
        sample = measure_stream(stream, server)
        fickle.go()
        sample["SUB/UNSUB pairs/s"] = fickle.result()[0]
        return sample


def measure_memory(clients: int, holders: int, server: Server) -> Sample:
    """Return the bytes of resident memory of each client and pattern.

    There are *clients* without patterns, and *holders* of 1,000 each.
    """
    address = server.address
    with workers((stay, address, 100, 0)):  # so that buffers have grown
        before = server.memory_bytes()
        with workers((stay, address, clients, 0)):
            per_client = (server.memory_bytes() - before) / clients
    with workers((stay, address, holders, 1_000)) as (holder,):
        before = server.memory_bytes()
        holder.go()
        holder.arrive()
        per_pattern = (server.memory_bytes() - before) / (holders * 1_000)
    return {"bytes, idle client": per_client, "bytes, pattern": per_pattern}


def measure_fairness(publishers: int, count: int, server: Server) -> Sample:
    """Return the round trip (ms) of a polite client beside a flood."""
    address = server.address
    endless = Stream(1 << 40)
    polite = (round_trips, address, count, 0.001)
    reader = (drain, address, endless)
    floods = [(publish, address, endless, 0)] * publishers
    with workers(polite, reader, *floods) as team:
        for worker in team[1:]:
            worker.go()
        time.sleep(0.3)
        team[0].go()
        times = sorted(1e3 * seconds for seconds in team[0].result())
        for worker in team[1:]:
            worker.check()
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    return {"ms, round trip p50": p50, "ms, round trip p99": p99}


# =============================================================================
# What is measured of the client library
# =============================================================================

COMPARED = "compared: "  # begins the name of a figure of the bare loops
CLIENT_PAYLOAD = b"x" * 64
CALLS = 200  # whose packets fit into the kernel at once
CLIENT_ROUNDS = 100
RECEIVE_BYTES = 4_096  # of the bare loop, which would cut what is larger

# What publishes or receives so many messages
Loop = Callable[[sbus_client.Client, int], None]


def publish_bare(client: sbus_client.Client, count: int) -> None:
    """Send packets that were made before."""
    send, packet = client.socket.send, b"MSG k\0" + CLIENT_PAYLOAD
    for _ in range(count):
        send(packet)


def publish_with(client: sbus_client.Client, count: int) -> None:
    """Publish messages."""
    publish, payload = client.publish, CLIENT_PAYLOAD
    for _ in range(count):
        publish("k", payload)


def receive_bare(client: sbus_client.Client, count: int) -> None:
    """Receive packets, and look at none."""
    recv = client.socket.recv
    for _ in range(count):
        recv(RECEIVE_BYTES)


def receive_with(client: sbus_client.Client, count: int) -> None:
    """Receive messages."""
    for _ in itertools.islice(client, count):
        pass


def time_in_turn(calls: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Return how many seconds each call takes, many times.

    The calls take turns, so that what disturbs one disturbs the others too.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CLIENT_ROUNDS):
        for call, own in zip(calls, times):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return times


def time_client(
    gate: Gate,
    address: str,
    loops: Sequence[Loop],
    pattern: bytes | None,
    count: int,
) -> list[float]:
    """Return how many messages a second loops move through a server.

    There are *count* messages in all.
    """
    share = count // CLIENT_ROUNDS // len(loops)
    with sbus_client.Client(address) as client:
        if pattern is not None:
            client.subscribe(pattern)
        client.sync()

        def move(loop: Loop) -> None:
            loop(client, share)
            if pattern is None:
                client.sync()  # what was published is handled

        gate.wait()
        calls = [functools.partial(move, loop) for loop in loops]
        times = time_in_turn(calls)
        return [share / statistics.fmean(own) for own in times]


def time_calls(
    gate: Gate, publish_loops: Sequence[Loop], receive_loops: Sequence[Loop]
) -> list[float]:
    """Return us a call, on a pair of sockets in this process.

    Each run neither fills nor empties a socket.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        sbus_client.Client(f"/dev/fd/{ours.detach()}") as near,
        sbus_client.Client(f"/dev/fd/{theirs.detach()}") as far,
    ):
        gate.wait()
        calls = []
        for publish_loop, receive_loop in zip(publish_loops, receive_loops):
            calls += [
                functools.partial(publish_loop, near, CALLS),
                functools.partial(receive_loop, far, CALLS),
            ]
        times = time_in_turn(calls)
        return [1e6 * statistics.median(own) / CALLS for own in times]


def measure_client(stream: Stream, server: Server) -> Sample:
    """Return how fast loops publish and receive, with a server and without."""
    address, count = server.address, stream.messages
    publish_loops = (publish_with, publish_bare)
    receive_loops = (receive_with, receive_bare)
    with workers((time_client, address, publish_loops, None, count)) as (one,):
        one.go()
        published = one.result()
    pattern = stream.pattern(0)
    reader = (time_client, address, receive_loops, pattern, count)
    writer = (publish, address, stream, 0)
    with workers(reader, writer) as team:
        for worker in team:
            worker.go()
        received = team[0].result()
    with workers((time_calls, publish_loops, receive_loops)) as (one,):
        one.go()
        calls = one.result()
    sample = {}
    for number, prefix in enumerate(("", COMPARED)):
        sample[f"{prefix}publish, msgs/s"] = published[number]
        sample[f"{prefix}iterate, msgs/s"] = received[number]
        sample[f"{prefix}us, publish call"] = calls[2 * number]
        sample[f"{prefix}us, next message"] = calls[2 * number + 1]
    return sample


# =============================================================================
# What is measured without a server: matching
# =============================================================================

TABLE_CLIENTS = 100
OPERATIONS = 2_000  # of a kind, in one go
REPEATS = 7


def table_pattern(number: int) -> bytes:
    """Return one of many patterns, in some twenty shapes.

    A third are exact, a third end in '/', a third have a '*'; of these, three
    in ten begin with it.
    """
    name = b"a/" * (number // 3 % 5) + b"%d" % number
    if number % 3 == 0:
        return name + b"/temperature"
    if number % 3 == 1:
        return name + b"/"
    return b"*/" + name if number // 3 % 10 < 3 else name + b"/t*"


def handle_all(
    bus: sbus.Bus, client: sbus.Client, packets: Sequence[bytes]
) -> float:
    """Have a bus handle packets of a client; return us for each of them."""
    start = time.perf_counter()
    for packet in packets:
        bus.handle(client, packet)
    return 1e6 * (time.perf_counter() - start) / len(packets)


def empty_outboxes(bus: sbus.Bus) -> int:
    """Return how many packets the bus has routed, and remove them."""
    count = 0
    for client in bus.touched:
        count += len(client.outbox)
        client.outbox.clear()
    bus.touched.clear()
    return count


def use_table(gate: Gate, patterns: int) -> list[float]:
    """Return us to route a new key, to subscribe and to unsubscribe.

    Each key is selected by one pattern, chosen by chance.
    """
    gate.wait()
    options = sbus.parse_options([])
    vars(options).update(dict.fromkeys(sbus.LIMITS, sys.maxsize))
    bus = sbus.Bus(options, os.getuid())
    own = sbus.Credentials(os.getgid(), os.getuid(), os.getpid())
    clients = [bus.open(own) for _ in range(TABLE_CLIENTS + 1)]
    for number in range(patterns):
        packet = b"SUB " + table_pattern(number)
        bus.handle(clients[number % TABLE_CLIENTS], packet)
    chance, numbers = random.Random(1), range(1, patterns, 3)
    more = [table_pattern(1 << 30 | number) for number in range(OPERATIONS)]
    times = []
    for repeat in range(REPEATS):
        keys = [
            table_pattern(chance.choice(numbers)) + b"%d-%d" % (repeat, n)
            for n in range(OPERATIONS)
        ]
        publishes = [b"MSG " + key + b"\0" for key in keys]
        taken = handle_all(bus, clients[-1], publishes)
        if empty_outboxes(bus) != OPERATIONS:
            raise LoadError("a message was not routed to one client")
        subscribes = [b"SUB " + pattern for pattern in more]
        unsubscribes = [b"UN" + packet for packet in subscribes]
        held = handle_all(bus, clients[-1], subscribes)
        freed = handle_all(bus, clients[-1], unsubscribes)
        times.append((taken, held, freed))
    return [statistics.median(column) for column in zip(*times)]


def measure_matching(patterns: int) -> Sample:
    """Return the times (us) that a table of so many patterns takes."""
    with workers((use_table, patterns)) as (worker,):
        worker.go()
        names = ("us, new key", "us, subscribe", "us, unsubscribe")
        return dict(zip(names, worker.result()))


# =============================================================================
# Scenarios
# =============================================================================

# What measures, given the command of a server
Side = Callable[[Sequence[str]], Sample]


class Scenario(NamedTuple):
    """What is measured, beside what.

    It is compared with *compare*, or if that is None with the relay at the
    same work; with nothing if *against* is empty.  With *in_turn*, it has
    measured itself what it is compared with, as COMPARED figures.
    """

    measure: Side
    against: str = ""
    compare: Side | None = None
    in_turn: bool = False


def served(
    function: Callable[..., Sample],
    *sizes: object,
    options: Sequence[str] = (),
) -> Side:
    """Return what measures on a server that is started with options."""
    measure = functools.partial(function, *sizes)
    return lambda command: on_server([*command, *options], measure)


PIPE = Stream(150_000)
HOT = Stream(150_000, keys=1_000)
CLIENT = Stream(300_000)
STREAMS = {
    "pipe-64": PIPE,
    "pipe-4k": Stream(60_000, 4_096),
    "pipe-400k": Stream(4_000, 400_000),
    "fan-16": Stream(25_000, subscribers=16),
    "fan-64": Stream(6_000, subscribers=64),
    "mesh": Stream(50_000, publishers=4),
    "hot": HOT,
}
WORK = {
    **{name: str(stream) for name, stream in STREAMS.items()},
    "ping-pong": "a client hears itself 15,000 times, 64 bytes; the median",
    "table-10k": "pipe-64 beside 10,000 patterns of others",
    "table-100k": "pipe-64 beside 100,000 patterns of others",
    "matching": "in the module sbus: packets beside 1,000,000 patterns",
    "churn": "pipe-64 beside 1,000 SUB/UNSUB pairs a second, half with '*'",
    "churn-hot": "hot beside the same",
    "memory": "VmRSS of 2,000 idle clients; of 100,000 20-byte patterns",
    "fairness": "3 flood a reader; another hears itself 800 times, 1 ms apart",
    "client": "Client, 150,000 messages of 64 bytes; 20,000 without a server",
    "trace": "pipe-64 with --trace",
}
ON_PIPE, ON_HOT = served(measure_stream, PIPE), served(measure_stream, HOT)
TRACING = ("--trace", "{address}.trace")
WITHOUT = "itself without"

SCENARIOS = {
    **{
        name: Scenario(served(measure_stream, stream), "relay")
        for name, stream in STREAMS.items()
    },
    "ping-pong": Scenario(served(measure_round_trips, 15_000), "relay"),
    "table-10k": Scenario(
        served(measure_beside_patterns, PIPE, 10), WITHOUT, ON_PIPE
    ),
    "table-100k": Scenario(
        served(measure_beside_patterns, PIPE, 100), WITHOUT, ON_PIPE
    ),
    "matching": Scenario(
        lambda _: measure_matching(1_000_000),
        "100 patterns",
        lambda _: measure_matching(100),
    ),
    "churn": Scenario(
        served(measure_beside_churn, PIPE, 1_000), WITHOUT, ON_PIPE
    ),
    "churn-hot": Scenario(
        served(measure_beside_churn, HOT, 1_000), WITHOUT, ON_HOT
    ),
    "memory": Scenario(served(measure_memory, 2_000, 100)),
    "fairness": Scenario(served(measure_fairness, 3, 800), "relay"),
    "client": Scenario(
        served(measure_client, CLIENT), "bare loops", in_turn=True
    ),
    "trace": Scenario(
        served(measure_stream, PIPE, options=TRACING), WITHOUT, ON_PIPE
    ),
}
OWN_SCENARIOS = ("matching", "trace")  # not for any server
OTHER = "other server"


def beside(command: Sequence[str]) -> dict[str, Scenario]:
    """Return the scenarios of servers, each compared with another server."""
    return {
        name: Scenario(one.measure, OTHER, on_other(one.measure, command))
        for name, one in SCENARIOS.items()
        if name not in OWN_SCENARIOS and not one.in_turn
    }


def on_other(measure: Side, command: Sequence[str]) -> Side:
    """Return what measures the same on a server of its own."""
    return lambda _: measure(command)


# (scenario, figure): of its ratio or its value, at least or at most, this
TARGETS = {
    ("matching", "us, new key"): ("ratio", "<=", 3.0),
    ("matching", "us, subscribe"): ("ratio", "<=", 3.0),
    ("matching", "us, unsubscribe"): ("ratio", "<=", 3.0),
    ("churn", "messages/s"): ("ratio", ">=", 0.8),
    ("churn", "SUB/UNSUB pairs/s"): ("value", ">=", 900.0),
    ("churn-hot", "messages/s"): ("ratio", ">=", 0.8),
    ("churn-hot", "SUB/UNSUB pairs/s"): ("value", ">=", 900.0),
    ("memory", "bytes, idle client"): ("value", "<=", 6_144.0),
    ("memory", "bytes, pattern"): ("value", "<=", 400.0),
    ("fairness", "ms, round trip p99"): ("value", "<=", 2.0),
    ("client", "publish, msgs/s"): ("ratio", ">=", 0.8),
    ("client", "iterate, msgs/s"): ("ratio", ">=", 0.8),
    ("trace", "messages/s"): ("ratio", ">=", 0.4),
}

# What one round measured: on the server, and what it is compared with
Pair = tuple[Sample, Sample]


def run_round(
    scenario: Scenario, command: Sequence[str], is_swapped: bool
) -> Pair:
    """Return what one round of a scenario measures.

    Raises: LoadError, ServerError.
    """
    if scenario.in_turn:
        return split_sample(scenario.measure(command))
    other = scenario.compare or scenario.measure
    other_command = command if scenario.compare else RELAY
    compared = {}
    if scenario.against and is_swapped:
        compared = other(other_command)
    measured = scenario.measure(command)
    if scenario.against and not is_swapped:
        compared = other(other_command)
    return measured, compared


def split_sample(sample: Sample) -> Pair:
    """Return a sample's own figures, and those that it is compared with."""
    own = {
        name: value
        for name, value in sample.items()
        if not name.startswith(COMPARED)
    }
    return own, {name: sample[COMPARED + name] for name in own}


def run_rounds(
    scenarios: dict[str, Scenario], command: Sequence[str], rounds: int
) -> dict[str, list[Pair]]:
    """Return what was measured, by scenario; those that failed are not there.

    Raises: ServerError.
    """
    pairs: dict[str, list[Pair]] = {name: [] for name in scenarios}
    for count in range(rounds):
        for name in list(pairs):
            show_progress(f"round {count + 1} of {rounds}: {name}")
            try:
                pair = run_round(scenarios[name], command, count % 2 == 1)
                pairs[name].append(pair)
            except LoadError as error:
                complain(f"{name}: {error}")
                del pairs[name]
            except ServerError as error:
                raise ServerError(f"{name}: {error}") from None
    show_progress("")
    return pairs


# =============================================================================
# The report
# =============================================================================

Row = dict[str, Any]
LAYOUT = "{:<10}  {:<18} {:>9} {:>5} {:>9} {:>6}  {:<14}  {}"
HEADINGS = "scenario,figure,server,busy,compared,ratio,compared with,wanted"


def summarize(
    name: str, figure: str, pairs: Sequence[Pair], against: str
) -> Row:
    """Return what the rounds say of a figure; None where nothing is said.

    What is wanted is said of a server for itself, not beside another.
    """
    values = [sample[figure] for sample, _ in pairs]
    others = [other[figure] for _, other in pairs if figure in other]
    busy = [sample["busy"] for sample, _ in pairs if "busy" in sample]
    ratios = [value / other for value, other in zip(values, others)]
    row: Row = {
        "scenario": name,
        "figure": figure,
        "value": statistics.median(values),
        "busy": statistics.median(busy) if busy else None,
        "compared": statistics.median(others) if others else None,
        "ratio": statistics.median(ratios) if others else None,
        "against": against if others else None,
        "wanted": None,
        "met": None,
        "values": values,
        "ratios": ratios,
    }
    if (name, figure) in TARGETS and against != OTHER:
        of, relation, limit = TARGETS[name, figure]
        found = row[of]
        row["wanted"] = f"{of} {relation} {show_number(limit)}"
        row["met"] = found <= limit if relation == "<=" else found >= limit
    return row


def show_number(value: float) -> str:
    """Return a number with the digits that count."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def show_row(row: Row) -> str:
    """Return a line of the table."""
    cells = [row["scenario"], row["figure"], show_number(row["value"])]
    cells.append("" if row["busy"] is None else f"{row['busy']:.2f}")
    if row["ratio"] is None:
        cells += ["", "", ""]
    else:
        cells += [show_number(row["compared"]), f"{row['ratio']:.2f}"]
        cells.append(row["against"])
    verdict = "ok" if row["met"] else "MISSED"
    cells.append(f"{row['wanted']}: {verdict}" if row["wanted"] else "")
    return LAYOUT.format(*cells).rstrip()


def describe_run(command: Sequence[str], rounds: int) -> Row:
    """Return what was measured, and on what."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {
        "server": shlex.join(command),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": python,
        "rounds": rounds,
    }


def print_table(about: Row, rows: Sequence[Row]) -> None:
    """Print what was measured, on what, and the figures."""
    print(f"server: {about['server']}")
    print(f"on: {about['system']} {about['machine']}, {about['cores']} cores")
    print(f"load and relay: {about['python']}; rounds: {about['rounds']}")
    for name, work in about["scenarios"].items():
        print(f"  {name:<10}  {work}")
    print()
    print(LAYOUT.format(*HEADINGS.split(",")))
    for row in rows:
        print(show_row(row))
    print(f"\nIt took {about['seconds']:.0f} s.  Compare ratios of one run.")


# =============================================================================
# The command line
# =============================================================================


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench.speed: {message}; --help lists the options\n")


def rounds_number(text: str) -> int:
    """Return a number of rounds, 1 to 999."""
    if not re.fullmatch("[0-9]{1,3}", text) or not int(text):
        what = f"{text!r} is not a number from 1 to 999"
        raise argparse.ArgumentTypeError(what)
    return int(text)


def server_command(text: str) -> list[str]:
    """Return the words of a server's command."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not any("{address}" in word for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} has no {{address}}")
    return words


def scenario_names(text: str) -> list[str]:
    """Return the names of scenarios."""
    names = text.split(",")
    for name in names:
        if name not in SCENARIOS:
            what = f"no scenario {name!r}; there are {', '.join(SCENARIOS)}"
            raise argparse.ArgumentTypeError(what)
    return names


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; exit with status 2 if they are wrong."""
    parser = OptionParser(
        prog="bench.speed",
        description="Measure an sbus server beside a bare relay in Python.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "with {address} in it (default: sbus.py of this folder)"
    add("--server", metavar="COMMAND", type=server_command, help=text)
    text = "another to compare it with, instead of the relay"
    add("--beside", metavar="COMMAND", type=server_command, help=text)
    text = "these (default: all; matching and trace not with --server)"
    add("--only", metavar="NAME,...", type=scenario_names, help=text)
    text = "rounds (default 3)"
    add("--rounds", metavar="N", type=rounds_number, default=3, help=text)
    add("--list", action="store_true", help="list the scenarios and end")
    add("--json", action="store_true", help="print JSON, not a table")
    add("--check", action="store_true", help="status 1 if a target is missed")
    options = parser.parse_args(arguments)
    if options.beside and options.only:
        for name in {*options.only} - {*beside(options.beside)}:
            parser.error(f"{name} is not measured beside a server")
    return options


def show_progress(text: str) -> None:
    """Write over the last line of standard error, if it is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """Write a line to standard error."""
    show_progress("")
    print(f"bench.speed: {line}", file=sys.stderr, flush=True)


def bench(options: argparse.Namespace) -> int:
    """Measure and report; return the exit status.

    Raises: ServerError.
    """
    start = time.monotonic()
    scenarios = beside(options.beside) if options.beside else SCENARIOS
    left_out = OWN_SCENARIOS if options.server else ()
    usual = [name for name in scenarios if name not in left_out]
    names = options.only or usual
    scenarios = {name: scenarios[name] for name in names}
    command = options.server or OWN_SERVER
    measured = run_rounds(scenarios, command, options.rounds)
    rows = [
        summarize(name, figure, pairs, scenarios[name].against)
        for name, pairs in measured.items()
        for figure in pairs[0][0]
        if figure != "busy"
    ]
    about = describe_run(command, options.rounds)
    about["scenarios"] = {name: WORK[name] for name in names}
    about["seconds"] = time.monotonic() - start
    if options.json:
        print(json.dumps({**about, "figures": rows}, indent=1))
    else:
        print_table(about, rows)
    sys.stdout.flush()
    is_missed = any(row["met"] is False for row in rows)
    has_failed = len(measured) < len(set(names))
    return int(has_failed or (options.check and is_missed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse_options(arguments)
    if options.list:
        for name, work in WORK.items():
            print(f"{name:<10}  {work}")
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stop_on_signals()
    try:
        return bench(options)
    except (BenchError, OSError) as error:
        complain(str(error))
    except KeyboardInterrupt:
        complain("interrupted")
    return 1


if __name__ == "__main__":
    sys.exit(main())
