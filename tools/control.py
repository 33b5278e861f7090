"""whoami, ping and control: questions and orders to the server itself."""

from __future__ import annotations

import math
import os
import time

from sbus_client import STATS, WHOAMI, SbusError

from . import shared

NO_MODES = """give stats or !/cred/whoami; a mode would last only as long as \
this command, see sub --discard"""
QUANTILES = {"minimum": 0, "median": 0.5, "p99": 0.99, "maximum": 1}


@shared.command("whoami", shared.timeout())
def whoami(options: shared.Options) -> None:
    """Print the credentials by which the server knows this client.

    They have the form !/cred/GID/UID/PID.  A key that begins with them and a
    '/' is private.
    """
    with shared.open_bus(options, options.timeout) as bus:
        shared.write_line(bus.whoami(options.timeout).path)


@shared.command(
    "ping --count 100",
    shared.number("-n --count", "ask N times (1000)", default=1000),
    shared.timeout(),
)
def ping(options: shared.Options) -> None:
    """Print how long the server takes to answer a question.

    It prints the shortest time, the median, the 99th percentile and the
    longest time.
    """
    times = []
    with shared.open_bus(options, options.timeout) as bus:
        for _ in range(options.count):
            start = time.perf_counter()
            bus.sync(options.timeout)
            times.append(1000 * (time.perf_counter() - start))
    times.sort()
    figures = ", ".join(
        f"{name} {times[max(0, math.ceil(part * len(times)) - 1)]:.3f} ms"
        for name, part in QUANTILES.items()
    )
    trips = "round trip" if options.count == 1 else "round trips"
    line = f"{bus.address}: {options.count} {trips}: {figures}"
    shared.write_line(os.fsencode(line))


@shared.command(
    "control '!/cred/whoami'",
    shared.argument("key", "such as '!/cred/whoami'"),
    shared.payload(),
    shared.timeout(),
)
def control(options: shared.Options) -> None:
    """Send a control message to the server, and print the answer.

    An answer is its key, a tab, its payload.  No answer is an error.
    """
    if os.fsencode(options.key) not in (STATS, WHOAMI):
        raise shared.UsageError(NO_MODES)
    with shared.open_bus(options, options.timeout) as bus:
        payload = shared.given_payload(options.payload or "", bus)
        bus.control(os.fsencode(options.key), payload, options.timeout)
        bus.sync(options.timeout)
        try:
            shared.write_line(*bus.receive(0))
        except TimeoutError:
            problem = f"the server does not answer {options.key!r}"
            raise SbusError(problem) from None
