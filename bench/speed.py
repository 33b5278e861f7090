"""How fast sbus.py is, beside another server.

    make bench
    make bench ARGS='--only pipe-64,churn --rounds 1 --seconds 0.2'
    make bench ARGS="--beside 'sbusd -f -a {address}' --rounds 15"
    make bench ARGS="--beside 'python3 old/sbus.py -a {address}'"

Without --beside, a case is compared with the relay, which is the least that
a bus in Python can do (relay.py).  A case that adds something to the load, or
an option to the server, is then compared with itself without.

The load is that of `sbus load`.  It takes more processor time than a server,
so that messages/s hides differences where there are few cores.  Messages/CPU
s does not: these are for each second of the server's own processor time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Callable, NamedTuple

from sbus_client import Client, SbusError

from . import harness
from .harness import TOP, BenchError, Running, Sample, Sides, server

OWN = [*harness.SERVER, "-a", "{address}"]
RELAY = [sys.executable, str(TOP / "bench" / "relay.py"), "{address}"]
TRACING = ["--trace", "{address}.trace"]
LATE_SECONDS = 60  # after which what was published has come
PATTERNS_PER_CLIENT = 1_000

# ==== What is added to the plain load ========================================


@contextlib.contextmanager
def patterns(count: int, bus: Running) -> Iterator[None]:
    """Other clients hold patterns."""
    with contextlib.ExitStack() as clients:
        for _ in range(count // PATTERNS_PER_CLIENT):
            client = clients.enter_context(Client(bus.address))
            for n in range(PATTERNS_PER_CLIENT):
                end = ("", "/", "/*")[n % 3]
                client.subscribe(f"{client.fileno()}/{n}{end}")
            client.sync()
        yield


@contextlib.contextmanager
def churn(pace: int, bus: Running) -> Iterator[None]:
    """Another client subscribes and unsubscribes, so often a second."""
    over, start = threading.Event(), time.monotonic()

    def work() -> None:
        with contextlib.suppress(SbusError), Client(bus.address) as client:
            for n in itertools.count(1):
                client.subscribe(f"churn/{n}/*")
                client.unsubscribe(f"churn/{n}/*")
                if over.wait(max(0, start + n / pace - time.monotonic())):
                    break

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ==== Cases ==================================================================


class Case(NamedTuple):
    """What is measured."""

    about: str
    load: str = ""  # options of `sbus load`
    added: Callable[[Running], AbstractContextManager[None]] | None = None
    options: Sequence[str] = ()  # of sbus.py


MESH, PACED = "--publishers 4 --subscribers 4", "--rate 500"
FIGURES = ("messages/s", "messages/CPU s", "p50 us", "p99 us")
CASES = {
    "pipe-64": Case("1 publisher, 1 subscriber, 64 bytes"),
    "pipe-4k": Case("pipe-64 with 4,096 bytes", "--size 4096"),
    "pipe-400k": Case("pipe-64 with 400,000 bytes", "--size 400000"),
    "fan-16": Case("pipe-64 with 16 subscribers", "--subscribers 16"),
    "fan-64": Case("pipe-64 with 64 subscribers", "--subscribers 64"),
    "mesh": Case("4 publishers, 4 subscribers to all of them", MESH),
    "latency": Case("pipe-64 at 500 messages a second", PACED),
    "table-10k": Case("beside 10,000 patterns", "", partial(patterns, 10_000)),
    "table-100k": Case("beside 100,000", "", partial(patterns, 100_000)),
    "churn": Case("1,000 SUB and UNSUB a second", "", partial(churn, 1_000)),
    "trace": Case("pipe-64 with --trace", "", None, TRACING),
}


def run_load(bus: Running, options: Sequence[str], seconds: float) -> Any:
    """Return what a load has found.  Raises: BenchError."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*harness.TOOLS, "-a", bus.address, "load", "--json"]
    command += [*options, "--seconds", str(seconds)]
    with harness.started(command, **pipes) as load:
        try:
            output, errors = load.communicate(None, seconds + LATE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchError("a message is lost, or late") from None
    if load.returncode:
        raise harness.failure("the load", load.returncode, errors)
    figures = json.loads(output)
    if figures["lost"]:
        raise BenchError(f"{figures['lost']} messages were lost")
    return figures


def measure(case: Case, command: Sequence[str], seconds: float) -> Sample:
    """Return the figures of a case on a fresh server.  Raises: BenchError."""
    with contextlib.ExitStack() as running:
        bus = running.enter_context(server(command))
        if case.added:
            running.enter_context(case.added(bus))
        before = bus.cpu_seconds()
        figures = run_load(bus, case.load.split(), seconds)
        used = bus.cpu_seconds() - before
    if PACED in case.load:
        latency = figures["latency_us"]
        return {f"{part} us": latency[part] for part in ("p50", "p99")}
    return {
        "messages/s": figures["received_per_second"],
        "messages/CPU s": figures["received"] / used,
    }


# ==== The command line =======================================================


def sides_of(beside: list[str] | None, seconds: float, name: str) -> Sides:
    """Return what is compared in a case."""
    case = CASES[name]
    label, other, command = "relay", case, RELAY
    if case.options or (case.added and not beside):
        plain = case._replace(added=None)
        label, other, command = "itself without", plain, OWN
    elif beside:
        label, command = "other", beside
    return {
        "sbus.py": partial(measure, case, [*OWN, *case.options], seconds),
        label: partial(measure, other, command, seconds),
    }


def main() -> int:
    """Print the table; return 1 if a case failed."""
    parser = harness.OptionParser("bench.speed", __doc__, rounds=3)
    parser.add_server_options(seconds=1.0)
    options = parser.parse({name: case.about for name, case in CASES.items()})
    sides = partial(sides_of, options.beside, options.seconds)
    return harness.print_table(options, FIGURES, sides)


if __name__ == "__main__":
    harness.run(main)
