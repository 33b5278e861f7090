"""load: measure a bus, by processes that publish and others that subscribe.

A message begins with its time by the monotonic clock, which all share.  To
these processes SIGTERM says that it is enough; SIGINT is for the first one.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import multiprocessing
import os
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from typing import Any

from sbus_client import Client, ControlMessage, SbusError

from . import options as shared
from .options import Options, amount, number
from .stop import PACKETS_A_TURN, SIGNALS, Stop, arrived, leave

Says = Iterator[Any]  # what a process has to say
TIME = struct.Struct("d")
PR_SET_PDEATHSIG = 1  # no process outlives the first one
PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TABLE = """\
sent      {sent:12,}  {sent_per_second:12,.0f} a second
received  {received:12,}  {received_per_second:12,.0f} a second
lost      {lost:12,}
latency   {latency}
"""


def publish(options: Options, n: int, bus: Client, stop: Stop) -> Says:
    """Publish; yield how many messages, since when and until when."""
    key = os.fsencode(f"{options.key}/{n}")
    rest = bytes(options.size - TIME.size)
    count = options.count and len(range(n, options.count, options.publishers))
    start, sent = time.monotonic(), 0
    end = start + options.seconds
    while sent != count and (now := time.monotonic()) < end:
        due = start + (sent * options.publishers + n) / options.rate
        early = min(due, end) - now
        is_time = early > 0 or sent % PACKETS_A_TURN == 0
        if is_time and stop.wait({}, max(0, early)):
            break
        if early <= 0:
            bus.publish(key, TIME.pack(now) + rest)
            sent += 1
    bus.sync()
    yield sent, start, time.monotonic()


def hear(options: Options, _: int, bus: Client, stop: Stop) -> Says:
    """Subscribe, and yield; then yield how many messages took how long."""
    taken: Counter[int] = Counter()  # by microseconds
    pattern, now = f"{options.key}/", 0.0
    bus.subscribe(os.fsencode(pattern))
    bus.sync(shared.ANSWER_SECONDS)
    yield None
    while True:
        for received in arrived(bus):
            if isinstance(received, ControlMessage):
                yield taken, now
                return
            now = time.monotonic()
            (sent,) = TIME.unpack_from(received.payload)
            taken[int(1e6 * (now - sent))] += 1
        if stop.wait({bus: select.POLLIN}):
            leave(bus, [pattern])


class Worker(ForkProcess):
    """A process with a client of its own, which says something in time."""

    def __init__(self, job: Any, options: Options, n: int) -> None:
        super().__init__()
        self.job, self.options, self.n = job, options, n
        self.pipe, self._end = multiprocessing.Pipe(duplex=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._end.close()

    def run(self) -> None:
        """Do the job; say what it yields, or its error."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        options, wait = self.options, shared.ANSWER_SECONDS
        try:
            with Stop() as stop, shared.open_bus(options, wait) as bus:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                for found in self.job(options, self.n, bus, stop):
                    self._end.send(found)
        except (SbusError, OSError) as error:
            self._end.send(error)

    def said(self) -> Any:
        """Return what it says.  Raises: the error that it says; SbusError."""
        try:
            found = self.pipe.recv()
        except EOFError:
            raise SbusError("a process of the load was killed") from None
        if isinstance(found, Exception):
            raise found
        return found


def measure(options: Options) -> tuple[list[Any], list[Any]]:
    """Return what each publisher has to say, and each subscriber."""
    hearing = [Worker(hear, options, n) for n in range(options.subscribers)]
    for each in hearing:
        each.said()
    sent = []
    with Stop() as stop:
        team = [Worker(publish, options, n) for n in range(options.publishers)]
        for each in team:
            if stop.wait({each.pipe: select.POLLIN}):
                for other in team:
                    other.terminate()
            sent.append(each.said())
    for each in hearing:
        each.terminate()
    heard = [each.said() for each in hearing]
    for each in (*team, *hearing):
        each.join()
    return sent, heard


def percentile(taken: Counter[int], part: float) -> int | None:
    """Return the least time that so large a part does not pass, if any."""
    times, wanted = sorted(taken), part * sum(taken.values())
    places = itertools.accumulate(taken[each] for each in times)
    return next((t for t, n in zip(times, places) if n >= wanted), None)


@shared.command(
    "load --subscribers 4 --rate 1000 --seconds 10",
    number("--publishers", "so many processes publish (1)", default=1),
    number("--subscribers", "so many hear all of it (1)", default=1),
    number("--size", "the bytes of a payload, 8 or more (64)", default=64),
    amount("--rate", "R", "messages a second in all", default=math.inf),
    amount("--seconds", "S", "publish for S seconds (5, without --count)"),
    number("--count", "publish N messages in all"),
    shared.argument("--key", help="what keys begin with", default="load"),
    shared.flag("--json", "print a JSON object, with microseconds"),
)
def load(options: Options) -> None:
    """Publish as fast as the bus takes it, and print what is received.

    Publishers are paused while a subscriber does not keep up, so that latency
    is that of full queues unless --rate is less than the bus can carry.
    SIGINT or SIGTERM ends it early.  The keys hold a random text, so that
    two loads do not hear each other.
    """
    if options.size < TIME.size:
        raise shared.UsageError(f"--size {options.size}: it is 8 or more")
    options.key = f"{options.key}/{os.urandom(4).hex()}"
    options.seconds = options.seconds or (math.inf if options.count else 5)
    try:
        sent, heard = measure(options)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
    counts, starts, ends = zip(*sent)
    taken: Counter[int] = sum((each for each, _ in heard), Counter())
    received, start = sum(taken.values()), min(starts)
    last = max(when for _, when in heard)
    figures = {
        "seconds": max(ends) - start,
        "sent": sum(counts),
        "sent_per_second": sum(counts) / (max(ends) - start),
        "received": received,
        "received_per_second": received and received / (last - start),
        "lost": sum(counts) * options.subscribers - received,
    }
    times = {name: percentile(taken, part) for name, part in PARTS.items()}
    if options.json:
        text = json.dumps({**figures, "latency_us": times}) + "\n"
    else:
        parts = (f"{p} {(t or 0) / 1000:.3f} ms" for p, t in times.items())
        text = TABLE.format(latency=", ".join(parts), **figures)
    shared.write(text.encode())
