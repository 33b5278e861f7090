"""top: show the keys with the most messages, again and again."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter

from sbus_client import end_of, printable

from . import shared
from .shared import Options

KEYS_MAX = 10_000  # beyond, the quieter half is forgotten
HEADING = f"{'MESSAGES/S':>10} {'BYTES/S':>11}  KEY"
CLEAR_SCREEN = "\x1b[H\x1b[J"


class Traffic:
    """What comes in an interval: under all keys, and in all, as under None."""

    def __init__(self, by_bytes: bool) -> None:
        self.messages: Counter[bytes | None] = Counter({None: 0})
        self.bytes: Counter[bytes | None] = Counter({None: 0})
        self.order = self.bytes if by_bytes else self.messages

    def add(self, key: bytes, size: int) -> None:
        """Count a message."""
        for name in None, key:
            self.messages[name] += 1
            self.bytes[name] += size
        if len(self.order) > KEYS_MAX:
            for name, _ in self.order.most_common()[KEYS_MAX // 2 :]:
                del self.messages[name], self.bytes[name]

    def table(self, seconds: float) -> list[str]:
        """Return the lines for so many seconds, the loudest key first."""
        lines = [HEADING]
        for key, _ in self.order.most_common():
            name = "(all keys)" if key is None else printable(key)
            messages = self.messages[key] / seconds
            rate = self.bytes[key] / seconds
            lines.append(f"{messages:10,.1f} {rate:11,.0f}  {name}")
        return lines


def draw(lines: list[str]) -> None:
    """Draw a table on a terminal, or print it and an empty line behind it."""
    if sys.stdout.isatty():  # draw what fits over the one before
        size = os.get_terminal_size(sys.stdout.fileno())
        columns = size.columns or 80
        rows = (size.lines or 24) - 1  # the last one is for the cursor
        lines = [line[:columns] for line in lines[:rows]]
        shared.write(CLEAR_SCREEN.encode("ascii"), at_once=False)
    else:
        lines = [*lines, ""]
    shared.write("".join(f"{line}\n" for line in lines).encode())


@shared.command(
    "top 'sensors/'",
    shared.PATTERNS,
    shared.flag("--bytes", "order by bytes a second instead of messages"),
    shared.duration("--interval", "show every S seconds (1)", default=1.0),
    shared.number("-n --count", "end after N tables"),
)
def top(options: Options) -> None:
    """Show the keys with the most messages a second, loudest first.

    On a terminal it redraws one table, elsewhere it prints another each time.
    If messages come too fast, top misses some rather than slow their
    publishers (blocking/soft/discard).
    """
    with shared.open_bus(options) as bus:
        bus.control("blocking/soft/discard")  # looking on holds nobody up
        shared.subscribe(bus, options.pattern)
        for _ in itertools.islice(itertools.count(), options.count):
            traffic = Traffic(options.bytes)
            start = time.monotonic()
            end = end_of(options.interval)
            for message in shared.messages(bus, None, end):
                traffic.add(message.key, len(message.payload))
            draw(traffic.table(time.monotonic() - start))
