"""What `sbus link` costs, beside `sbus bridge`: processor time.

    python3 -m bench.link
    python3 -m bench.link --only small --rounds 9

Both join two buses of this machine, the link by a relay that copies its
stream.  What counts is all that stands between a publisher and a reader: both
servers, what joins them, and the relay, but not these clients.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sbus_client import Client

from . import harness
from .harness import Sample, Sides

TOP = Path(__file__).resolve().parents[1]
SBUS = f"{shlex.quote(sys.executable)} {TOP}/tools"
SBUSD = f"{shlex.quote(sys.executable)} {TOP}/sbus.py"
RELAY = f"{shlex.quote(sys.executable)} {TOP}/tests/services/relay.py"
FIGURE = "microseconds a message"
CASES = {
    "small": (100, 50_000),
    "4k": (4_096, 20_000),
    "large": (400_000, 500),
}
WAYS = {
    "link": [
        f"{SBUS} link -a {{}}/m --listen {{}}/up --block",
        f"{SBUS} link -a {{}}/l --through '{RELAY} {{}}/up' --block "
        f"--server '{SBUSD}'",
    ],
    "bridge": [f"{SBUSD} -a {{}}/l", f"{SBUS} bridge {{}}/m {{}}/l"],
}


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and what it has started."""
    seconds = harness.Server("", pid).cpu_seconds()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            seconds += cpu_seconds(int(child))
    return seconds


@contextlib.contextmanager
def joined(way: str) -> Iterator[tuple[Client, Client, list[int]]]:
    """Join two buses; give a client of each, and all processes."""
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory())
        pids = []
        for command in [f"{SBUSD} -a {{}}/m", *WAYS[way]]:
            words = shlex.split(command.replace("{}", where))
            process = harness.started(words, stderr=-3)
            pids.append(stack.enter_context(process).pid)
            with contextlib.suppress(TimeoutError):  # it has begun
                Client(f"{where}/m", reconnect=True).receive(1)
        upper = stack.enter_context(Client(f"{where}/m"))
        lower = stack.enter_context(Client(f"{where}/l", reconnect=True))
        upper.subscribe("n")
        upper.control("blocking/soft/block")
        has_come = False
        while not has_come:
            with contextlib.suppress(TimeoutError):
                lower.publish("n")
                has_come = bool(upper.receive(1))
        yield upper, lower, pids


def measure(way: str, size: int, count: int) -> Sample:
    """Return what a message costs on its way up."""

    def publish() -> None:
        for _ in range(count):
            lower.publish("n", bytes(size))

    with joined(way) as (upper, lower, pids):
        before = sum(map(cpu_seconds, pids))
        publisher = threading.Thread(target=publish)
        publisher.start()
        for _ in range(count):
            upper.receive()
        publisher.join()
        used = sum(map(cpu_seconds, pids)) - before
    return {FIGURE: 1e6 * used / count}


def sides_of(name: str) -> Sides:
    """Return what is compared in a case."""
    return {way: partial(measure, way, *CASES[name]) for way in WAYS}


def main() -> int:
    """Print the table."""
    parser = harness.OptionParser("bench.link", __doc__, rounds=5)
    sizes = {name: f"{size:,} bytes" for name, (size, _) in CASES.items()}
    return harness.print_table(parser.parse(sizes), [FIGURE], sides_of)


if __name__ == "__main__":
    harness.run(main)
