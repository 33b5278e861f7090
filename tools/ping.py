"""ping: measure many round trips."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from sbus_client import (
    Client,
    Options,
    command,
    open_bus,
    timeout,
    write_line,
)

from .options import number


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least of some values that so large a part does not pass."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def round_trip(bus: Client, seconds: float) -> float:
    """Return how many seconds the server takes to answer.

    Raises: TimeoutError if it does not answer in time.
    """
    start = time.perf_counter()
    bus.sync(seconds)
    return time.perf_counter() - start


@command(
    "ping --count 100",
    number("--count", "ask N times (1000)", default=1000),
    timeout(),
)
def ping(options: Options) -> None:
    """Print how long the server takes to answer a question.

    These are the shortest time, the median, the time that 99 of 100 do not
    pass, and the longest.
    """
    with open_bus(options, options.timeout) as bus:
        times = sorted(
            1000 * round_trip(bus, options.timeout)
            for _ in range(options.count)
        )
        parts = {"minimum": 0, "median": 0.5, "p99": 0.99, "maximum": 1}
        figures = ", ".join(
            f"{name} {quantile(times, part):.3f} ms"
            for name, part in parts.items()
        )
        trips = "round trip" if len(times) == 1 else "round trips"
        line = f"{bus.address}: {len(times)} {trips}: {figures}"
        write_line(os.fsencode(line))
