#!/usr/bin/env python3
"""client: what sbus_client costs beside bare loops around send and recv.

    python3 -m bench.client

It is started in the folder that has sbus.py and sbus_client.py.  Each row is
done both ways in turn, 15 times; its ratio is the median of the rounds'
ratios: 1.00 is as fast as the bare loop, which looks at nothing.  Library
calls run on a pair of sockets in one process, so that nothing hides the
difference; the commands run beside a server, and their start is not counted.

Where a system call takes half a microsecond, some of the targets are out of
reach of Python.  At 64 bytes, a bare loop that also joins key and payload
reaches 0.90, and 0.83 in a method.  One that also cuts what it receives into
key and payload reaches 0.86, and 0.52 if it makes a Message of them in a
method.  At 400,000 bytes, one that also copies a payload out of its packet
reaches 0.50.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sbus_client import AsyncClient, Client

ROUNDS = 15
ROOT = Path(__file__).resolve().parents[1]
BUFFER_BYTES = 1 << 22  # of a send buffer, where that is allowed
TOGETHER_BYTES = 100_000  # that are sent before any is received
MESSAGES = 50_000  # of a command
Timed = Callable[[int], float]  # seconds that so many messages take


class Ends:
    """Two ends of a connection: a client at one, a socket at the other."""

    def __init__(self, size: int) -> None:
        ours, self.far = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        for end in (ours, self.far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.client = Client(f"/dev/fd/{ours.detach()}")
        self.near = self.client.socket
        self.packet = b"MSG k\0" + b"x" * size
        self.payload = b"x" * size
        self.together = max(1, min(100, TOGETHER_BYTES // size))
        self.buffer = bytearray(size + 100)

    def send_bare(self, count: int) -> float:
        return self._timed(count, self._send_bare, self._drain_far)

    def publish(self, count: int) -> float:
        return self._timed(count, self._publish, self._drain_far)

    def receive_bare(self, count: int) -> float:
        return self._timed(count, self._receive_bare, self._fill, True)

    def receive(self, count: int) -> float:
        return self._timed(count, self._receive, self._fill, True)

    def iterate(self, count: int) -> float:
        return self._timed(count, self._iterate, self._fill, True)

    def _timed(
        self,
        count: int,
        work: Callable[[], None],
        other: Callable[[], None],
        other_first: bool = False,
    ) -> float:
        """Return what work takes, so much of it that *count* are moved."""
        seconds = 0.0
        for _ in range(max(1, count // self.together)):
            if other_first:
                other()
            start = time.perf_counter()
            work()
            seconds += time.perf_counter() - start
            if not other_first:
                other()
        return seconds

    def _send_bare(self) -> None:
        send, packet = self.near.send, self.packet
        for _ in range(self.together):
            send(packet)

    def _publish(self) -> None:
        publish, payload = self.client.publish, self.payload
        for _ in range(self.together):
            publish("k", payload)

    def _receive_bare(self) -> None:
        recv, size = self.near.recv, len(self.buffer)
        for _ in range(self.together):
            recv(size)

    def _receive(self) -> None:
        receive = self.client.receive
        for _ in range(self.together):
            receive()

    def _iterate(self) -> None:
        for _, _ in zip(range(self.together), self.client):
            pass

    def _fill(self) -> None:
        for _ in range(self.together):
            self.far.send(self.packet)

    def _drain_far(self) -> None:
        for _ in range(self.together):
            self.far.recv_into(self.buffer)


def with_asyncio(size: int, is_receiving: bool) -> Timed:
    """Return what times an AsyncClient."""

    async def work(count: int) -> float:
        ours, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        payload, packet = b"x" * size, b"MSG k\0" + b"x" * size
        seconds, together = 0.0, max(1, min(100, TOGETHER_BYTES // size))
        with far:
            async with AsyncClient(f"/dev/fd/{ours.detach()}") as client:
                for _ in range(count // together):
                    if is_receiving:
                        for _ in range(together):
                            far.send(packet)
                    start = time.perf_counter()
                    if is_receiving:
                        left = together
                        async for _ in client:
                            left -= 1
                            if not left:
                                break
                    else:
                        for _ in range(together):
                            await client.publish("k", payload)
                    seconds += time.perf_counter() - start
                    if not is_receiving:
                        for _ in range(together):
                            far.recv(size + 100)
        return seconds

    return lambda count: asyncio.run(work(count))


BARE_SUB = """
import socket, sys
wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
wire.connect(sys.argv[1])
wire.send(b"SUB k")
wire.send(b"CMSG !/cred/whoami")
wire.recv(1000)
open(int(sys.argv[4]), "w").close()
output = open(sys.argv[2], "wb")
for _ in range(int(sys.argv[3])):
    output.write(wire.recv(5_000) + b"\\n")
"""
BARE_PUB = """
import socket, sys
wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
wire.connect(sys.argv[1])
for line in sys.stdin.buffer:
    wire.send(b"MSG k\\0" + line[:-1])
wire.send(b"CMSG !/cred/whoami")
wire.recv(1000)
"""


@contextlib.contextmanager
def server(directory: str) -> Iterator[str]:
    """Run a server."""
    address = f"{directory}/bus"
    command = [sys.executable, str(ROOT / "sbus.py"), "-a", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout
        process.stdout.read()  # it listens
        try:
            yield address
        finally:
            process.terminate()


def subscriber(address: str, size: int, is_bare: bool) -> Timed:
    """Return what times a command that prints messages into a file."""
    packet = b"MSG k\0" + b"x" * size

    def work(count: int) -> float:
        ready, told = os.pipe()
        command = [sys.executable, "-c", BARE_SUB, address, os.devnull]
        command += [str(count), str(told)]
        if not is_bare:
            command = [sys.executable, str(ROOT / "tools")]
            command += ["-a", address, "sub", "k", f"--count={count}"]
            command += [f"--ready-fd={told}"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, pass_fds=[told]
        ) as process:
            os.close(told)
            with open(ready) as subscribed, Client(address) as client:
                subscribed.read()
                send = client.socket.send
                start = time.perf_counter()
                for _ in range(count):
                    send(packet)
                process.wait()
                return time.perf_counter() - start

    return work


def publisher(address: str, size: int, is_bare: bool) -> Timed:
    """Return what times a command that publishes lines."""
    line = b"x" * size + b"\n"

    def work(count: int) -> float:
        command = [sys.executable, "-c", BARE_PUB, address]
        if not is_bare:
            command = [sys.executable, str(ROOT / "tools")]
            command += ["-a", address, "pub", "k", "--lines"]
        with Client(address) as client:
            client.subscribe("k")
            client.sync()
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                assert process.stdin
                process.stdin.write(line)
                process.stdin.flush()
                client.receive()
                client.control("blocking/soft/discard")
                client.unsubscribe("k")
                client.sync()
                start = time.perf_counter()
                process.stdin.write(line * (count - 1))
                process.stdin.close()
                process.wait()
                return time.perf_counter() - start

    return work


def show(
    name: str, target: float, count: int, ours: Timed, bare: Timed
) -> None:
    """Measure and print a row."""
    ratios = []
    for number in range(ROUNDS):
        if number % 2:
            seconds, least = ours(count), bare(count)
        else:
            least, seconds = bare(count), ours(count)
        ratios.append(least / seconds)
    figure = f"{statistics.median(ratios):.2f}"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"| {name:28} | {target:.1f} | {figure} | {spread} |", flush=True)


def main() -> None:
    """Print the table."""
    print("| beside a bare loop           | at least | median | all |")
    print("|---|---:|---:|---:|")
    for size in (64, 4_096):
        ends = Ends(size)
        show(f"publish {size}", 0.9, 20_000, ends.publish, ends.send_bare)
        show(f"iterate {size}", 0.9, 20_000, ends.iterate, ends.receive_bare)
    ends = Ends(400_000)
    show("receive 400000", 0.8, 200, ends.receive, ends.receive_bare)
    ends = Ends(64)
    ours = with_asyncio(64, True)
    show("async for 64", 0.6, 20_000, ours, ends.receive_bare)
    ours = with_asyncio(64, False)
    show("AsyncClient.publish 64", 0.6, 20_000, ours, ends.send_bare)
    with tempfile.TemporaryDirectory() as where, server(where) as address:
        for size in (64, 4_096):
            ours = subscriber(address, size, False)
            bare = subscriber(address, size, True)
            show(f"sub into a file {size}", 0.5, MESSAGES, ours, bare)
        ours = publisher(address, 64, False)
        bare = publisher(address, 64, True)
        show("pub --lines 64", 0.7, MESSAGES, ours, bare)


if __name__ == "__main__":
    main()
