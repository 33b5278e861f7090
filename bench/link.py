"""What `sbus link` costs, beside `sbus bridge` and other brokers' bridges.

    python3 -m bench.link
    python3 -m bench.link --only small --rounds 9

Each way joins a lower machine's broker to an upper machine's one, both here:
the link by a relay that copies its stream, mosquitto by its bridge, NATS by a
leaf node.  What counts is the processor time of all that stands between a
publisher below and a reader above: both brokers, what joins them, and the
relay, but not these clients.  Mosquitto and NATS are left out where they are
not installed.
"""

from __future__ import annotations

import select
import shlex
import socket
import threading
from functools import partial
from typing import Any, BinaryIO, Callable, NamedTuple

from sbus_client import Client

from . import harness
from .harness import SERVER, TOOLS, TOP, BenchError, Peer, Sample, Sides

RELAY = shlex.join([SERVER[0], str(TOP / "tests" / "services" / "relay.py")])
PEERS = TOP / "bench" / "peers"
UNREAD_BYTES = 4 << 20  # that may be on the way: no broker drops messages
SILENCE_SECONDS = 60
FIGURE = "microseconds a message"
CASES = {
    "small": (100, 50_000),
    "4k": (4_096, 20_000),
    "large": (400_000, 500),
}

# ==== Clients of the brokers =================================================


class Ends(NamedTuple):
    """A publisher below and a reader above."""

    publisher: Any  # a Client or a socket, as the reader
    reader: Any
    publish: Callable[[], object]  # one message
    receive: Callable[[], object]


def sbus_ends(where: str, payload: bytes) -> Ends:
    """Return clients of two buses, whose readers lose nothing."""
    upper = Client(f"{where}/m")
    lower = Client(f"{where}/l", reconnect=True)
    upper.subscribe("n")
    upper.control("blocking/soft/block")
    return Ends(
        lower, upper, partial(lower.publish, "n", payload), upper.receive
    )


def dial(port: int, greeting: bytes, answer: bytes) -> socket.socket:
    """Return a connection, once a broker has answered all of a greeting."""
    wire = socket.create_connection(("127.0.0.1", port), SILENCE_SECONDS)
    wire.sendall(greeting)
    stream = wire.makefile("rb")
    text = b""
    while not text.endswith(answer):
        text += receive(stream, 1)
    return wire


def receive(stream: BinaryIO, size: int) -> bytes:
    """Return so many bytes.  Raises: BenchError if there are no more."""
    text = stream.read(size)
    if len(text) < size:
        raise BenchError("a broker has closed a connection")
    return text


def stream_ends(
    publisher: socket.socket, reader: socket.socket, packet: bytes, size: int
) -> Ends:
    """Return clients: a packet of one is received as so many bytes."""
    publish = partial(publisher.sendall, packet)
    stream = reader.makefile("rb")
    return Ends(publisher, reader, publish, partial(receive, stream, size))


def mosquitto_ends(where: str, payload: bytes) -> Ends:
    """Return clients that speak MQTT 3.1.1."""
    connect = b"\x10\x0d\0\4MQTT\4\2\0\0\0\1"  # and a name of one byte
    subscribe = b"\x82\6\0\1\0\1n\0"
    publisher = dial(24_222, connect + b"p", b"\x20\2\0\0")
    reader = dial(24_221, connect + b"r" + subscribe, b"\x90\3\0\1\0")

    body = b"\0\1n" + payload
    head = b"\x30"  # to publish; the length follows in digits of 7 bits
    left = len(body)
    while left > 127:
        head += bytes([left & 127 | 128])
        left >>= 7
    packet = head + bytes([left]) + body
    return stream_ends(publisher, reader, packet, len(packet))


def nats_ends(where: str, payload: bytes) -> Ends:
    """Return clients that speak the protocol of NATS."""
    connect = b'CONNECT {"verbose":false}\r\n'
    publisher = dial(24_224, connect + b"PING\r\n", b"PONG\r\n")
    reader = dial(24_223, connect + b"SUB n 1\r\nPING\r\n", b"PONG\r\n")

    text = b"%d\r\n%b\r\n" % (len(payload), payload)
    size = len(b"MSG n 1 " + text)
    return stream_ends(publisher, reader, b"PUB n " + text, size)


# ==== What is compared =======================================================


def brokers(program: str) -> list[list[str]]:
    """Return the commands of the upper and the lower machine."""
    files = [PEERS / f"{program}-{end}.conf" for end in ("upper", "lower")]
    return [[program, "-c", str(file)] for file in files]


UPPER = [*SERVER, "-a", "{}/m"]
LOWER = [*SERVER, "-a", "{}/l"]
BRIDGE = [*TOOLS, "bridge", "{}/m", "{}/l"]
LISTEN = [*TOOLS, "link", "--block", "-a", "{}/m", "--listen", "{}/up"]
DIAL = [*TOOLS, "link", "--block", "-a", "{}/l", "--through", RELAY + " {}/up"]
DIAL += ["--server", shlex.join(SERVER)]
WAYS = {
    "link": Peer([UPPER, LISTEN, DIAL], sbus_ends),
    "bridge": Peer([UPPER, LOWER, BRIDGE], sbus_ends),
    "mosquitto": Peer(brokers("mosquitto"), mosquitto_ends),
    "NATS": Peer(brokers("nats-server"), nats_ends),
}


def measure(way: Peer, size: int, count: int) -> Sample:
    """Return what a message costs on its way up, in microseconds."""
    with harness.all_started(way.commands) as running:
        ends = way.client(running.address, bytes(size))
        with ends.publisher, ends.reader:
            is_joined = False
            while not is_joined:
                ends.publish()
                is_joined = bool(select.select([ends.reader], [], [], 1)[0])
            ends.receive()

            before = running.cpu_seconds()
            move(ends, count, 1 + UNREAD_BYTES // size)
            used = running.cpu_seconds() - before
    return {FIGURE: 1e6 * used / count}


def move(ends: Ends, count: int, unread_count: int) -> None:
    """Publish and receive messages, of which so many may be on the way."""
    room = threading.Semaphore(unread_count)

    def publish() -> None:
        for _ in range(count):
            room.acquire()
            ends.publish()

    publisher = threading.Thread(target=publish, daemon=True)
    publisher.start()
    for _ in range(count):
        ends.receive()
        room.release()
    publisher.join()


def sides_of(name: str) -> Sides:
    """Return what is compared in a case."""
    return harness.sides_of_peers(WAYS, measure, *CASES[name])


def main() -> int:
    """Print the table; return 1 if a case failed."""
    parser = harness.OptionParser("bench.link", __doc__, rounds=5)
    sizes = {name: f"{size:,} bytes" for name, (size, _) in CASES.items()}
    return harness.print_table(parser.parse(sizes), [FIGURE], sides_of)


if __name__ == "__main__":
    harness.run(main)
