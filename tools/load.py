"""load: measure a bus with processes that publish and subscribe.

A message begins with its time by the monotonic clock, which all share.  Once
the server has handled all, a secret tells subscribers that they have all:
others can publish under the same keys.
"""

from __future__ import annotations

import itertools
import marshal
import math
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from sbus_client import Client, SbusError

from . import shared
from .json_lines import json_line
from .shared import Options, amount, duration, number
from .stop import SIGNALS

TIME = struct.Struct("d")
SECRET_BYTES = 16
PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TABLE = """\
sent      {sent:12,}  {sent_per_second:12,.0f} a second
received  {received:12,}  {received_per_second:12,.0f} a second
lost      {lost:12,}
latency   {latency}
"""
Children = dict[BinaryIO, int]  # processes, by the pipes from them
Job = Callable[[Options, int, Client, BinaryIO], None]


def send(pipe: BinaryIO, report: Any) -> None:
    """Send a report as a line."""
    pipe.write(marshal.dumps(report).hex().encode("ascii") + b"\n")
    pipe.flush()


def publish(options: Options, n: int, bus: Client, pipe: BinaryIO) -> None:
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
    bus.sync()
    send(pipe, (sent, start, time.monotonic()))


def hear(options: Options, index: int, bus: Client, pipe: BinaryIO) -> None:
    """Subscribe, and say so; then send how many messages took how long."""
    latencies: Counter[int] = Counter()  # by microseconds
    start, now = time.monotonic(), 0.0
    bus.subscribe(options.key + b"/")
    bus.sync(shared.ANSWER_SECONDS)
    send(pipe, None)
    for _, payload in bus:
        if payload == options.secret:
            break
        if len(payload) == options.size:
            heard = time.monotonic()
            (sent,) = TIME.unpack_from(payload)
            if start <= sent <= heard:  # or it is of somebody else
                latencies[int(1e6 * (heard - sent))] += 1
                now = heard
    send(pipe, (dict(latencies), now))


def work(job: Job, options: Options, n: int, writer: int) -> NoReturn:
    """Do a job, or send its error, and end this process."""
    # The first process gets a terminal's signal, and then ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    try:
        with os.fdopen(writer, "wb") as pipe:
            try:
                with shared.open_bus(options) as bus:
                    job(options, n, bus, pipe)
            except (SbusError, OSError) as error:
                send(pipe, str(error))
    finally:
        os._exit(0)


def start(
    job: Job, options: Options, count: int, children: Children
) -> list[BinaryIO]:
    """Start processes, and add them to *children*; return their pipes."""
    # A signal waits until all are listed that it has to end
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for n in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            work(job, options, n, writer)
        os.close(writer)
        children[os.fdopen(reader, "rb")] = pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return list(children)[-count:]


def leave(number: int, _: object) -> NoReturn:
    """End this process, but only once: nothing disturbs the end."""
    for other in SIGNALS:
        signal.signal(other, lambda *_: None)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def end(children: Children) -> None:
    """End all processes that were started, whatever signals come."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    finally:  # a handler may raise as the mask is set
        for pipe, pid in children.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()


def report_from(pipe: BinaryIO) -> Any:
    """Return what a process has sent.  Raises: SbusError if that is one."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise SbusError("a process of the load was killed")
    report = marshal.loads(bytes.fromhex(line.decode("ascii")))
    if isinstance(report, str):
        raise SbusError(report)
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
    duration("--seconds", "publish for S seconds (5, without --count)"),
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
    options.key = shared.given_key(f"{options.key}/{os.urandom(4).hex()}")
    options.secret = os.urandom(SECRET_BYTES)
    options.seconds = options.seconds or (math.inf if options.count else 5)
    options.timeout = shared.ANSWER_SECONDS
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, leave)
    children: Children = {}
    with shared.open_bus(options) as bus:  # or say why there is none
        try:
            subscribers = start(hear, options, options.subscribers, children)
            for pipe in subscribers:
                report_from(pipe)  # that it has subscribed
            publishers = start(publish, options, options.publishers, children)
            counts, starts, ends = zip(*map(report_from, publishers))
            bus.publish(options.key + b"/end", options.secret)
            parts, times = zip(*map(report_from, subscribers))
        finally:
            end(children)
    latencies: Counter[int] = sum(map(Counter, parts), Counter())
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
        return shared.write(json_line({**figures, "latency_us": latency}))
    shown = (f"{p} {(t or 0) / 1000:.3f} ms" for p, t in latency.items())
    text = TABLE.format(latency=", ".join(shown), **figures)
    shared.write(text.encode())
