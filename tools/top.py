"""top: show the keys with the most messages, again and again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from sbus_client import (
    PATTERNS,
    Message,
    Options,
    command,
    flag,
    messages,
    printable,
    standard_output,
    subscribe,
    write,
)

from .lenient import open_bus
from .options import amount, number
from .progress import CLEAR_LINE, is_terminal

TOP_KEYS_MAX = 10_000  # beyond, the quieter half is forgotten
TOP_HEADING = f"{'MESSAGES/S':>12} {'BYTES/S':>14} {'MESSAGES':>12}  KEY"
# Another screen, without a cursor and without breaks in long lines
ENTER_SCREEN, LEAVE_SCREEN = (
    "\x1b[?1049h\x1b[?25l\x1b[?7l",
    "\x1b[?7h\x1b[?25h\x1b[?1049l",
)
HOME, CLEAR_BELOW = "\x1b[H", "\x1b[J"


@dataclasses.dataclass
class Traffic:
    """The messages of a key: in the last interval, and since the start."""

    messages: int = 0
    payload_bytes: int = 0
    messages_total: int = 0

    def line(self, seconds: float, key: str) -> str:
        """Return a line of the table."""
        return (
            f"{self.messages / seconds:12,.1f}"
            f" {self.payload_bytes / seconds:14,.0f}"
            f" {self.messages_total:12,}  {key}"
        )


class Top:
    """The traffic of all keys."""

    def __init__(self, by_bytes: bool = False) -> None:
        self.by_bytes = by_bytes
        self.everything = Traffic()
        self.keys: dict[bytes, Traffic] = {}

    def add(self, message: Message) -> None:
        """Count a message."""
        traffic = self.keys.setdefault(message.key, Traffic())
        for each in (traffic, self.everything):
            each.messages += 1
            each.payload_bytes += len(message.payload)
            each.messages_total += 1
        if len(self.keys) > TOP_KEYS_MAX:
            self.keys = dict(self.loudest()[: TOP_KEYS_MAX // 2])

    def loudest(self) -> list[tuple[bytes, Traffic]]:
        """Return all keys, the loudest first."""
        return sorted(self.keys.items(), key=self._rank)

    def _rank(self, item: tuple[bytes, Traffic]) -> tuple[object, ...]:
        """Return what keys are ordered by; the smallest is the loudest."""
        key, traffic = item
        loudness = [-traffic.messages, -traffic.payload_bytes]
        if self.by_bytes:
            loudness.reverse()
        return *loudness, -traffic.messages_total, key

    def table(self, seconds: float, encoding: str) -> list[str]:
        """Return the lines for an interval of so many seconds."""
        lines = [
            traffic.line(seconds, printable(key, encoding))
            for key, traffic in self.loudest()
        ]
        count = f"{len(self.keys):,} key{'s' * (len(self.keys) != 1)}"
        total = self.everything.line(seconds, f"({count})")
        return [TOP_HEADING, total, *lines]

    def start_interval(self) -> None:
        """Count from nothing, but for the totals."""
        for traffic in (self.everything, *self.keys.values()):
            traffic.messages = traffic.payload_bytes = 0


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """Have the terminal's other screen for a while, and leave no trace.

    Raises: SystemExit on SIGTERM.
    """
    status = 128 + signal.SIGTERM
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
    try:
        write(ENTER_SCREEN.encode("ascii"))
        yield
    finally:
        write(LEAVE_SCREEN.encode("ascii"))
        signal.signal(signal.SIGTERM, former)


def frame(lines: Sequence[str], columns: int, rows: int) -> str:
    """Return what draws the lines that fit over those of before."""
    shown = [line[:columns] + CLEAR_LINE for line in lines[:rows]]
    return HOME + "\n".join(shown) + CLEAR_BELOW


def draw(lines: Sequence[str]) -> None:
    """Draw a table on a terminal, or print it and an empty line behind it."""
    output = standard_output()
    if is_terminal(output):
        size = os.get_terminal_size(output.fileno())
        text = frame(lines, size.columns or 80, size.lines or 24)
    else:
        text = "".join(f"{line}\n" for line in [*lines, ""])
    write(text.encode(output.encoding))


@command(
    "top 'sensors/'",
    PATTERNS,
    flag("--bytes", "order by bytes a second instead of messages"),
    amount("--interval", "S", "show every S seconds (1)", default=1.0),
    number("--count", "end after N tables"),
)
def top(options: Options) -> None:
    """Show the keys with the most messages a second, loudest first.

    On a terminal this is over and over, else one table after the other.
    MESSAGES counts from the start.  What comes too fast is left out, not
    waited for: top asks for blocking/soft/discard.
    """
    table = Top(options.bytes)
    is_live = is_terminal(standard_output())
    with open_bus(options) as bus:
        bus.control("blocking/soft/discard")  # looking on holds nobody up
        subscribe(bus, options.pattern)
        with screen() if is_live else contextlib.nullcontext():
            for _ in itertools.islice(itertools.count(), options.count):
                start = time.monotonic()
                for message in messages(bus, None, options.interval):
                    table.add(message)
                seconds = time.monotonic() - start
                draw(table.table(seconds, standard_output().encoding))
                table.start_interval()
