"""load: measure a bus with processes that publish and subscribe.

A message begins with its time by the monotonic clock, which all share.  Each
publisher ends with an empty one, so that a subscriber knows when it has all.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sbus_client import Client, SbusError

from . import shared
from .shared import Options, amount, number

TIME = struct.Struct("d")
PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TABLE = """\
sent      {sent:12,}  {sent_per_second:12,.0f} a second
received  {received:12,}  {received_per_second:12,.0f} a second
lost      {lost:12,}
latency   {latency}
"""
Job = Callable[[Options, int, Client, Connection], None]


def publish(options: Options, n: int, bus: Client, told: Connection) -> None:
    """Publish; tell how many messages, since when and until when."""
    key = b"%b/%d" % (options.key, n)
    rest = bytes(options.size - TIME.size)
    count = options.count and len(range(n, options.count, options.publishers))
    start, sent = time.monotonic(), 0
    end = start + options.seconds
    while sent != count and (now := time.monotonic()) < end:
        due = start + (sent * options.publishers + n) / options.rate
        if due > now:
            time.sleep(min(due, end) - now)
        else:
            bus.publish(key, TIME.pack(now) + rest)
            sent += 1
    bus.publish(key)
    bus.sync()
    told.send((sent, start, time.monotonic()))


def hear(options: Options, _: int, bus: Client, told: Connection) -> None:
    """Subscribe, and tell so; then tell how many messages took how long."""
    taken: Counter[int] = Counter()  # by microseconds
    ended, now = 0, 0.0
    bus.subscribe(options.key + b"/")
    bus.sync(shared.ANSWER_SECONDS)
    told.send(None)
    while ended < options.publishers:
        if payload := bus.receive().payload:
            now = time.monotonic()
            (sent,) = TIME.unpack_from(payload)
            taken[int(1e6 * (now - sent))] += 1
        else:
            ended += 1
    told.send((taken, now))


def work(job: Job, options: Options, n: int, told: Connection) -> None:
    """Do a job with a client of its own; tell its error if it fails."""
    # Signals are for the first process, which then ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with shared.open_bus(options, shared.ANSWER_SECONDS) as bus:
            job(options, n, bus, told)
    except (SbusError, OSError) as error:
        told.send(error)


def start(job: Job, options: Options, count: int) -> list[Connection]:
    """Start processes; return what they tell."""
    pipes = []
    for n in range(count):
        pipe, told = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=work, args=(job, options, n, told), daemon=True
        )
        process.start()
        told.close()
        pipes.append(pipe)
    return pipes


def heard_from(pipe: Connection) -> Any:
    """Return what a process tells.  Raises: the error that it tells."""
    try:
        found = pipe.recv()
    except EOFError:
        raise SbusError("a process of the load was killed") from None
    if isinstance(found, Exception):
        raise found
    return found


def percentile(taken: Counter[int], part: float) -> int | None:
    """Return the least time that so large a part does not pass, if any."""
    times, wanted = sorted(taken), part * sum(taken.values())
    places = itertools.accumulate(taken[each] for each in times)
    return next((t for t, n in zip(times, places) if n >= wanted), None)


@shared.command(
    "load --subscribers 4 --rate 1000 --seconds 10",
    number("--publishers", "processes that publish (1)", default=1),
    number("--subscribers", "processes that receive all (1)", default=1),
    number("--size", "bytes of a payload, at least 8 (64)", default=64),
    amount("--rate", "R", "messages a second in all", default=math.inf),
    amount("--seconds", "S", "publish for S seconds (5, without --count)"),
    number("-n --count", "publish N messages in all"),
    shared.argument("--key", "the beginning of keys (load)", default="load"),
    shared.flag("--json", "print a JSON object, with microseconds"),
)
def load(options: Options) -> None:
    """Publish as fast as the bus takes it, and print what is received.

    A subscriber that does not keep up pauses publishers.  So latency is that
    of full queues, unless --rate is below what the bus can carry.  The keys
    hold a random text, so that two loads do not hear each other.
    """
    if options.size < TIME.size:
        raise shared.UsageError("--size must be at least 8")
    options.key = os.fsencode(f"{options.key}/{os.urandom(4).hex()}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.seconds = options.seconds or (math.inf if options.count else 5)
    subscribers = start(hear, options, options.subscribers)
    for each in subscribers:
        heard_from(each)  # that it has subscribed
    publishers = start(publish, options, options.publishers)
    counts, starts, ends = zip(*map(heard_from, publishers))
    parts, times = zip(*map(heard_from, subscribers))
    taken: Counter[int] = sum(parts, Counter())
    received, first, last = sum(taken.values()), min(starts), max(times)
    seconds = max(ends) - first
    figures = {
        "seconds": seconds,
        "sent": sum(counts),
        "sent_per_second": sum(counts) / seconds,
        "received": received,
        "received_per_second": received and received / (last - first),
        "lost": sum(counts) * options.subscribers - received,
    }
    latency = {name: percentile(taken, part) for name, part in PARTS.items()}
    if options.json:
        text = json.dumps({**figures, "latency_us": latency}) + "\n"
    else:
        shown = (f"{p} {(t or 0) / 1000:.3f} ms" for p, t in latency.items())
        text = TABLE.format(latency=", ".join(shown), **figures)
    shared.write(text.encode())
