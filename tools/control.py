"""whoami, ping and control: what one asks or tells the server itself."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time

from sbus_client import SbusError

from . import options as shared

MODES = re.compile(  # to which a server gives no answer
    rb"blocking/(soft/(queue|discard|block|error)|hard/(discard|block|error))"
    rb"|order/(queue|stack|random)|echo/(on|off)"
)
QUANTILES = {"minimum": 0, "median": 0.5, "p99": 0.99, "maximum": 1}


@shared.command("whoami", shared.timeout())
def whoami(options: shared.Options) -> None:
    """Print the credentials by which the server knows this client.

    They are as in !/cred/GID/UID/PID: what begins so and goes on with '/' is
    a private key.
    """
    with shared.open_bus(options, options.timeout) as bus:
        shared.write_line(bus.whoami(options.timeout).path)


@shared.command(
    "ping --count 100",
    shared.number("--count", "ask N times (1000)", default=1000),
    shared.timeout(),
)
def ping(options: shared.Options) -> None:
    """Print how long the server takes to answer a question.

    These are the shortest time, the median, the time that 99 of 100 do not
    pass, and the longest.
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
    trips = "round trip" if len(times) == 1 else "round trips"
    line = f"{bus.address}: {len(times)} {trips}: {figures}"
    shared.write_line(os.fsencode(line))


@shared.command(
    "control '!/cred/whoami'",
    shared.argument("key", metavar="KEY", help="such as '!/cred/whoami'"),
    shared.INPUT,
    shared.timeout(),
)
def control(options: shared.Options) -> None:
    """Send a control message to the server, and wait until it is handled.

    Print the answer, if there is one: its key, a tab, its payload.
    """
    key = os.fsencode(options.key)
    is_known = bool(MODES.fullmatch(key))
    with shared.open_bus(options, options.timeout) as bus:
        most = bus.packet_bytes_max
        payload = shared.given_payload(options.payload or "", most)
        bus.control(key, payload, options.timeout)
        bus.sync(options.timeout)
        with contextlib.suppress(TimeoutError):
            while True:
                shared.write_line(*bus.receive(0))
                is_known = True
    if not is_known:
        what = f"the server does not answer {options.key!r}"
        raise SbusError(f"{what}, and this client does not know it")
