"""Python clients of message buses beside each other.

    python3 bench/peers/clients.py             four rounds
    python3 bench/peers/clients.py --rounds 1

It prints the processor time that a client's own process spends for a message
of 64 bytes, and the wall time, as ratios to `Client` of sbus_client.py.  Each
time is the least of all rounds, in which the clients take turns.  A client
that asks waits for each answer before it asks again.  book/speed.md says what
has to be installed.  Servers are at Unix sockets, but NATS at the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD = bytes(64)
MESSAGES, REQUESTS = 30_000, 3_000
START_SECONDS = 1.0  # in which servers start, and clients without an answer
NATS = "nats://127.0.0.1:14222"
MOSQUITTO = """listener 0 {}/mqtt
allow_anonymous true
max_queued_messages 0
max_inflight_messages 0
log_type none
user root
"""


# ==== What each client does, in a process of its own =========================


class Meter:
    """Prints what this process has spent for each of some messages."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.start = time.process_time(), time.perf_counter()

    def print(self) -> None:
        end = time.process_time(), time.perf_counter()
        spent = [(b - a) / self.count for a, b in zip(self.start, end)]
        print(json.dumps(spent), flush=True)


def ready() -> None:
    print("ready", flush=True)


def repeat(
    call: Callable[[], Any],
    count: int = MESSAGES,
    finish: Callable[[], Any] = bool,
) -> None:
    meter = Meter(count)
    for _ in range(count):
        call()
    finish()
    meter.print()


async def repeat_async(
    call: Callable[[], Awaitable[Any]],
    count: int = MESSAGES,
    finish: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    meter = Meter(count)
    for _ in range(count):
        await call()
    if finish:
        await finish()
    meter.print()


def drain(messages: Iterator[Any]) -> None:
    ready()
    next(messages)
    meter = Meter(MESSAGES)
    for _ in zip(range(MESSAGES - 1), messages):
        pass
    meter.print()


async def drain_async(receive: Callable[[], Awaitable[Any]]) -> None:
    ready()
    await receive()
    await repeat_async(receive, MESSAGES - 1)


def sbus(folder: str) -> Any:
    from sbus_client import Client

    return Client(f"{folder}/sbus")


def async_sbus(folder: str) -> Any:
    from sbus_client import AsyncClient

    return AsyncClient(f"{folder}/sbus")


def sbus_publish(folder: str) -> None:
    bus = sbus(folder)
    repeat(partial(bus.publish, "a/b", PAYLOAD), MESSAGES, bus.sync)


def sbus_iterate(folder: str) -> None:
    bus = sbus(folder)
    bus.subscribe("a/*")
    bus.sync()
    drain(iter(bus))


def sbus_request(folder: str) -> None:
    bus = sbus(folder)
    repeat(partial(bus.request, "service", PAYLOAD), REQUESTS)


def sbus_answer(folder: str) -> None:
    from sbus_client import parse_request

    bus = sbus(folder)
    bus.subscribe("service")
    bus.sync()
    ready()
    for message in bus:
        if asked := parse_request(message):
            bus.reply(asked, asked.payload)


async def async_sbus_publish(folder: str) -> None:
    async with async_sbus(folder) as bus:
        publish = partial(bus.publish, "a/b", PAYLOAD)
        await repeat_async(publish, MESSAGES, bus.sync)


async def async_sbus_iterate(folder: str) -> None:
    async with async_sbus(folder) as bus:
        await bus.subscribe("a/*")
        await bus.sync()
        await drain_async(bus.receive)


async def async_sbus_request(folder: str) -> None:
    async with async_sbus(folder) as bus:
        await repeat_async(partial(bus.request, "service", PAYLOAD), REQUESTS)


async_sbus_answer = sbus_answer


def redis(folder: str) -> Any:
    import redis

    return redis.Redis(unix_socket_path=f"{folder}/redis")


def async_redis(folder: str) -> Any:
    import redis.asyncio

    return redis.asyncio.Redis(unix_socket_path=f"{folder}/redis")


def redis_publish(folder: str) -> None:
    bus = redis(folder)
    repeat(partial(bus.publish, "a/b", PAYLOAD))


def redis_pipeline_publish(folder: str) -> None:
    bus = redis(folder)
    meter = Meter(MESSAGES)
    for _ in range(MESSAGES // 100):
        with bus.pipeline(transaction=False) as pipeline:
            for _ in range(100):
                pipeline.publish("a/b", PAYLOAD)
            pipeline.execute()
    meter.print()


def redis_iterate(folder: str) -> None:
    channel = redis(folder).pubsub()
    channel.psubscribe("a/*")
    channel.get_message(timeout=START_SECONDS)
    drain(channel.listen())


redis_pipeline_iterate = redis_iterate


def redis_request(folder: str) -> None:
    bus = redis(folder)

    def ask() -> None:
        bus.rpush("questions", PAYLOAD)
        bus.blpop("answers")

    repeat(ask, REQUESTS)


def redis_answer(folder: str) -> None:
    bus = redis(folder)
    ready()
    while question := bus.blpop("questions"):
        bus.rpush("answers", question[1])


async def async_redis_publish(folder: str) -> None:
    bus = async_redis(folder)
    await repeat_async(partial(bus.publish, "a/b", PAYLOAD))


async def async_redis_iterate(folder: str) -> None:
    channel = async_redis(folder).pubsub()
    await channel.psubscribe("a/*")
    await channel.get_message(timeout=START_SECONDS)
    await drain_async(channel.listen().__anext__)


def zmq_socket(context: Any, kind: int, address: str) -> Any:
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(address)
    return socket


def zmq_publish(folder: str) -> None:
    import zmq

    socket = zmq_socket(zmq.Context(), zmq.PUB, f"ipc://{folder}/zmq-in")
    time.sleep(START_SECONDS)
    repeat(partial(socket.send_multipart, [b"a/b", PAYLOAD]))
    signal.pause()


def zmq_iterate(folder: str) -> None:
    import zmq

    socket = zmq_socket(zmq.Context(), zmq.SUB, f"ipc://{folder}/zmq-out")
    socket.subscribe(b"a/")
    time.sleep(START_SECONDS)
    drain(iter(socket.recv_multipart, None))


def zmq_request(folder: str) -> None:
    import zmq

    socket = zmq_socket(zmq.Context(), zmq.REQ, f"ipc://{folder}/zmq-service")

    def ask() -> None:
        socket.send(PAYLOAD)
        socket.recv()

    repeat(ask, REQUESTS)


def zmq_answer(folder: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.REP)
    socket.bind(f"ipc://{folder}/zmq-service")
    ready()
    while True:
        socket.send(socket.recv())


def zmq_proxy(folder: str) -> None:
    import zmq

    context = zmq.Context()
    ends = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for end, name in zip(ends, ("in", "out")):
        end.sndhwm = end.rcvhwm = 0
        end.bind(f"ipc://{folder}/zmq-{name}")
    zmq.proxy(*ends)


async def async_zmq_publish(folder: str) -> None:
    import zmq.asyncio

    socket = zmq_socket(
        zmq.asyncio.Context(), zmq.PUB, f"ipc://{folder}/zmq-in"
    )
    await asyncio.sleep(START_SECONDS)
    await repeat_async(partial(socket.send_multipart, [b"a/b", PAYLOAD]))
    signal.pause()


async def async_zmq_iterate(folder: str) -> None:
    import zmq.asyncio

    socket = zmq_socket(
        zmq.asyncio.Context(), zmq.SUB, f"ipc://{folder}/zmq-out"
    )
    socket.subscribe(b"a/")
    await asyncio.sleep(START_SECONDS)
    await drain_async(socket.recv_multipart)


def paho_client() -> Any:
    import paho.mqtt.client as mqtt

    kind = mqtt.CallbackAPIVersion.VERSION2
    return mqtt.Client(kind, transport="unix")


def paho_publish(folder: str) -> None:
    client = paho_client()
    client.connect(f"{folder}/mqtt")
    client.loop_start()
    time.sleep(START_SECONDS)

    def finish() -> None:
        client.publish("end", b"", qos=1).wait_for_publish()

    repeat(partial(client.publish, "a/b", PAYLOAD), MESSAGES, finish)


def paho_iterate(folder: str) -> None:
    meters: list[Meter] = []
    count = 0

    def on_message(*_: Any) -> None:
        nonlocal count
        if not count:
            meters.append(Meter(MESSAGES))
        count += 1
        if count == MESSAGES:
            meters[0].print()

    client = paho_client()
    client.on_message = on_message
    client.on_connect = lambda client, *_: client.subscribe("a/+")
    client.on_subscribe = lambda *_: ready()
    client.connect(f"{folder}/mqtt")
    client.loop_forever()


async def nats_publish(_: str) -> None:
    import nats

    bus = await nats.connect(NATS)
    publish = partial(bus.publish, "a.b", PAYLOAD)
    await repeat_async(publish, MESSAGES, partial(bus.flush, 60))


async def nats_iterate(_: str) -> None:
    import nats

    limits = {"pending_msgs_limit": -1, "pending_bytes_limit": -1}
    bus = await nats.connect(NATS)
    channel = await bus.subscribe("a.*", **limits)
    await bus.flush()
    await drain_async(channel.messages.__anext__)


async def nats_request(_: str) -> None:
    import nats

    bus = await nats.connect(NATS)
    await repeat_async(partial(bus.request, "service", PAYLOAD), REQUESTS)


async def nats_answer(_: str) -> None:
    import nats

    bus = await nats.connect(NATS)
    channel = await bus.subscribe("service")
    await bus.flush()
    ready()
    async for message in channel.messages:
        await message.respond(message.data)


# ==== Rounds =================================================================

CLIENTS = [
    *("sbus", "async_sbus", "zmq", "nats", "redis", "redis_pipeline", "paho"),
    *("async_redis", "async_zmq"),
]
ASKERS = ["sbus", "async_sbus", "zmq", "nats", "redis"]


def started(folder: str, role: str) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "--role", role, folder]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def servers(folder: str) -> Iterator[None]:
    """Run a server for each client."""
    conf = Path(folder, "mosquitto.conf")
    conf.write_text(MOSQUITTO.format(folder))
    redis_server = (
        f"redis-server --port 0 --unixsocket {folder}/redis --save".split()
    )
    redis_server += ["", "--client-output-buffer-limit", "pubsub 0 0 0"]
    host, _, port = NATS.rpartition("/")[2].partition(":")
    commands = [
        [sys.executable, str(ROOT / "sbus.py"), "-a", f"{folder}/sbus"],
        ["mosquitto", "-c", str(conf)],
        ["nats-server", "-a", host, "-p", port],
        redis_server,
    ]
    output = subprocess.DEVNULL
    with contextlib.ExitStack() as stack:
        for command in commands:
            server = subprocess.Popen(command, stdout=output, stderr=output)
            stack.callback(server.wait)
            stack.callback(server.terminate)
        proxy = stack.enter_context(started(folder, "zmq_proxy"))
        stack.callback(proxy.kill)
        time.sleep(2 * START_SECONDS)
        yield


def pair(
    folder: str, first: str, second: str, count: int
) -> list[list[float]]:
    """Run two roles, the first once the second is ready; return their times.

    Only the first *count* of them have any.
    """
    with started(folder, second) as other:
        assert other.stdout and other.stdout.readline()
        with started(folder, first) as process:
            assert process.stdout
            outputs = [process.stdout, other.stdout][:count]
            times = [json.loads(output.readline()) for output in outputs]
            process.kill()
        other.kill()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        name, folder = options.role
        sys.path[0] = str(ROOT)
        work = globals()[name](folder)
        if work:
            asyncio.run(work)
        return

    least: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))

    def note(client: str, figure: str, seconds: float) -> None:
        least[client, figure] = min(least[client, figure], seconds)

    with tempfile.TemporaryDirectory() as folder, servers(folder):
        for _ in range(options.rounds):
            for client in CLIENTS:
                roles = f"{client}_publish", f"{client}_iterate"
                (publish, _), (iterate, wall) = pair(folder, *roles, 2)
                note(client, "publish", publish)
                note(client, "iterate", iterate)
                note(client, "wall", wall)
            for client in ASKERS:
                roles = f"{client}_request", f"{client}_answer"
                ((request, _),) = pair(folder, *roles, 1)
                note(client, "request", request)

    for (client, figure), seconds in least.items():
        ratio = seconds / least["sbus", figure]
        print(f"{figure:8} {client:15} {1e6 * seconds:7.2f} us {ratio:6.2f}")


if __name__ == "__main__":
    main()
