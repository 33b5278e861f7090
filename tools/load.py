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
FORK = multiprocessing.get_context("fork")
Job = Callable[[Options, int, Client, Connection], None]


def publish(options: Options, n: int, bus: Client, pipe: Connection) -> None:
    """Publish; send how many messages, since when and until when."""
    key = b"%b/%d" % (options.key, n)
    count = options.count and len(range(n, options.count, options.publishers))
    start, sent = time.monotonic(), 0
    end = start + options.seconds
    while sent != count and (now := time.monotonic()) < end:
        due = start + (sent * options.publishers + n) / options.rate
        if due > now:
            time.sleep(min(due, end) - now)
        else:
            bus.publish(key, TIME.pack(now).ljust(options.size, b"\0"))
            sent += 1
    bus.publish(key)
    bus.sync()
    pipe.send((sent, start, time.monotonic()))


def hear(options: Options, _: int, bus: Client, pipe: Connection) -> None:
    """Subscribe, and say so; then send how many messages took how long."""
    latencies: Counter[int] = Counter()  # by microseconds
    ended, now = 0, 0.0
    bus.subscribe(options.key + b"/")
    bus.sync(shared.ANSWER_SECONDS)
    pipe.send(None)
    while ended < options.publishers:
        if payload := bus.receive().payload:
            now = time.monotonic()
            (sent,) = TIME.unpack_from(payload)
            latencies[int(1e6 * (now - sent))] += 1
        else:
            ended += 1
    pipe.send((latencies, now))


def leave_signals() -> None:
    """Leave signals to the first process, which then ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def work(job: Job, options: Options, n: int, pipe: Connection) -> None:
    """Do a job with a client of its own; send its error if it fails."""
    try:
        with shared.open_bus(options, shared.ANSWER_SECONDS) as bus:
            job(options, n, bus, pipe)
    except (SbusError, OSError) as error:
        pipe.send(error)


def start(job: Job, options: Options, count: int) -> list[Connection]:
    """Start processes; return the pipes from them."""
    pipes = []
    for n in range(count):
        pipe, far_end = multiprocessing.Pipe(duplex=False)
        arguments = job, options, n, far_end
        FORK.Process(target=work, args=arguments, daemon=True).start()
        far_end.close()
        pipes.append(pipe)
    return pipes


def report_from(pipe: Connection) -> Any:
    """Return what a process has sent.  Raises: the error that it has sent."""
    try:
        report = pipe.recv()
    except EOFError:
        raise SbusError("a process of the load was killed") from None
    if isinstance(report, Exception):
        raise report
    return report


def percentile(latencies: Counter[int], part: float) -> int | None:
    """Return the least time that so large a part does not pass, if any."""
    times, rank = sorted(latencies), part * sum(latencies.values())
    ranks = itertools.accumulate(latencies[time] for time in times)
    return next((t for t, n in zip(times, ranks) if n >= rank), None)


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
    os.register_at_fork(after_in_child=leave_signals)  # before its first line
    options.seconds = options.seconds or (math.inf if options.count else 5)
    subscribers = start(hear, options, options.subscribers)
    for pipe in subscribers:
        report_from(pipe)  # that it has subscribed
    publishers = start(publish, options, options.publishers)
    counts, starts, ends = zip(*map(report_from, publishers))
    parts, times = zip(*map(report_from, subscribers))
    latencies: Counter[int] = sum(parts, Counter())
    received, first, last = sum(latencies.values()), min(starts), max(times)
    seconds = max(ends) - first
    figures = {
        "seconds": seconds,
        "sent": sum(counts),
        "sent_per_second": sum(counts) / seconds,
        "received": received,
        "received_per_second": received and received / (last - first),
        "lost": sum(counts) * options.subscribers - received,
    }
    latency = {p: percentile(latencies, part) for p, part in PARTS.items()}
    if options.json:
        text = json.dumps({**figures, "latency_us": latency}) + "\n"
    else:
        shown = (f"{p} {(t or 0) / 1000:.3f} ms" for p, t in latency.items())
        text = TABLE.format(latency=", ".join(shown), **figures)
    shared.write(text.encode())
