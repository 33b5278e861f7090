"""top: show the keys with the most messages, again and again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from sbus_client import Message, end_of, printable

from . import shared
from .shared import Options

TOP_KEYS_MAX = 10_000  # beyond, the quieter half is forgotten
HEADING = f"{'MESSAGES/S':>10} {'BYTES/S':>11} {'MESSAGES':>9}  KEY"
# Another screen, without a cursor and without breaks in long lines
ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"
LEAVE_SCREEN = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, CLEAR_BELOW, CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"


class Top:
    """The traffic of all keys, and of everything, which has no key."""

    def __init__(self, by_bytes: bool = False) -> None:
        self.messages: Counter[bytes | None] = Counter()  # of this interval
        self.bytes: Counter[bytes | None] = Counter()  # of this interval
        self.totals: Counter[bytes | None] = Counter()  # messages, of all time
        self.order = [self.messages, self.bytes, self.totals]
        if by_bytes:
            self.order = [self.bytes, self.messages, self.totals]

    def add(self, message: Message) -> None:
        """Count a message."""
        for key in message.key, None:
            self.messages[key] += 1
            self.bytes[key] += len(message.payload)
            self.totals[key] += 1
        if len(self.totals) > TOP_KEYS_MAX:
            for key in self.loudest()[TOP_KEYS_MAX // 2 :]:
                for counter in self.order:
                    del counter[key]

    def loudest(self) -> list[bytes]:
        """Return all keys, the loudest first."""
        keys = [key for key in self.totals if key is not None]
        keys.sort()
        keys.sort(key=lambda key: [-counter[key] for counter in self.order])
        return keys

    def table(self, seconds: float) -> list[str]:
        """Return the lines for an interval of so many seconds; end it."""
        keys = self.loudest()
        names = [f"({len(keys):,} key{'s' * (len(keys) != 1)})"]
        names += map(printable, keys)
        lines = [HEADING]
        for key, name in zip([None, *keys], names):
            messages = self.messages[key] / seconds
            rates = f"{messages:10,.1f} {self.bytes[key] / seconds:11,.0f}"
            lines.append(f"{rates} {self.totals[key]:9,}  {name}")
        self.messages.clear()
        self.bytes.clear()
        return lines


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """Use the terminal's other screen for a while, and leave no trace.

    Raises: SystemExit on SIGTERM.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        shared.write(ENTER_SCREEN.encode("ascii"))
        yield
    finally:
        shared.write(LEAVE_SCREEN.encode("ascii"))


def draw(lines: Sequence[str]) -> None:
    """Draw a table on a terminal, or print it and an empty line behind it."""
    text = "".join(f"{line}\n" for line in [*lines, ""])
    if sys.stdout.isatty():  # draw what fits over the one before
        size = os.get_terminal_size(sys.stdout.fileno())
        columns = size.columns or 80
        rows = size.lines or 24
        shown = [f"{line[:columns]}{CLEAR_LINE}" for line in lines[:rows]]
        text = HOME + "\n".join(shown) + CLEAR_BELOW
    shared.write(text.encode())


@shared.command(
    "top 'sensors/'",
    shared.PATTERNS,
    shared.flag("--bytes", "order by bytes a second instead of messages"),
    shared.amount("--interval", "S", "show every S seconds (1)", default=1.0),
    shared.number("-n --count", "end after N tables"),
)
def top(options: Options) -> None:
    """Show the keys with the most messages a second, loudest first.

    On a terminal it redraws one table, elsewhere it prints another each time.
    MESSAGES counts from the start.  If messages come too fast, top misses
    some rather than slow their publishers (blocking/soft/discard).
    """
    table = Top(options.bytes)
    with shared.open_bus(options) as bus:
        bus.control("blocking/soft/discard")  # looking on holds nobody up
        shared.subscribe(bus, options.pattern)
        with screen() if sys.stdout.isatty() else contextlib.nullcontext():
            for _ in itertools.islice(itertools.count(), options.count):
                start = time.monotonic()
                end = end_of(options.interval)
                for message in shared.messages(bus, None, end):
                    table.add(message)
                draw(table.table(time.monotonic() - start))
