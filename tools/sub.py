"""sub: print messages as lines, as JSON or unchanged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from sbus_client import Client, Message, printable

from . import shared
from .json_lines import ERRORS, as_json
from .keep import last_values

MISSED_SECONDS = 1.0  # in which a server is to say what was missed
# A form prints a message; *when*, if it is told, is in nanoseconds since 1970
Form = Callable[[Message, "int | None"], bytes]


def as_text(message: Message, when: int | None) -> bytes:
    """Return a line: a time, a tab, the key, a tab, the payload."""
    fields = [printable(message.key), printable(message.payload)]
    if when is not None:
        fields.insert(0, utc_text(when))
    return "\t".join(fields).encode() + b"\n"


def utc_text(when: int) -> str:
    """Return a time, in nanoseconds since 1970, as text."""
    second, rest = divmod(when, 1_000_000_000)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
    return f"{moment}.{rest // 1_000:06}Z"


def as_payload(message: Message, _: int | None) -> bytes:
    """Return a payload as it is."""
    return message.payload


def as_null_ended(message: Message, _: int | None) -> bytes:
    """Return a payload as it is, and a NUL byte."""
    return message.payload + b"\0"


def form(name: str, form: Form, help: str) -> shared.Argument:
    """Return an option that chooses how messages are printed."""
    choice = {"action": "store_const", "const": form, "dest": "form"}
    return shared.argument(name, help, **choice)


def note_missed(bus: Client) -> None:
    """Say how many messages were discarded, if the server knows [CTL-5]."""
    with contextlib.suppress(OSError, *ERRORS):
        if missed := bus.stats(MISSED_SECONDS)["discarded"]:
            shared.note(f"missed {missed:,} messages")


@shared.command(
    "sub 'sensors/*/temp'",
    shared.PATTERNS,
    (
        form("--json", as_json, "print JSON objects, one a line"),
        form("--raw", as_payload, "print the payloads unchanged"),
        form("--null", as_null_ended, "print payloads, each with a NUL byte"),
    ),
    shared.flag("--time", "print the time of arrival first, in UTC"),
    shared.flag("--discard", "miss messages rather than pause publishers"),
    shared.RECONNECT,
    shared.flag("--last", "print first what `sbus keep` has"),
    shared.KEEPER,
    shared.READY_FD,
    shared.COUNT,
    shared.DURATION,
)
def sub(options: shared.Options) -> None:
    r"""Print each message as a line: its key, a tab, its payload.

    In a PATTERN, '*' matches up to the next '/', and a final '/' all that
    follows it: 'a/*' selects a/b but not a/b/c, 'a/' selects both.

    Bytes that are not printable text are escaped as in a Python bytes
    literal: a line feed is \n, a backslash \\.  JSON objects have key and
    payload, or key_base64 and payload_base64 for bytes that are not UTF-8,
    and as t the time in nanoseconds since 1970.  With --count and --timeout,
    the exit status is 1 if the time runs out before the count is reached.
    --discard prints at the end how many messages were missed.  --reconnect
    misses what others publish meanwhile; --last prints the last values again
    after it.  --ready-fd closes the descriptor after a line.
    """
    if options.time and options.form in (as_payload, as_null_ended):
        raise shared.UsageError("--time does not go with --raw or --null")
    form = options.form or as_text
    with shared.open_bus(options, options.reconnect) as bus:
        if options.discard:
            bus.control("blocking/soft/discard")
        shared.subscribe(bus, options.pattern)
        shared.tell_ready(options, bus)
        try:
            count, end = options.count, options.end
            last = partial(last_values, bus, options)
            before = last if options.last else tuple
            for message in shared.messages(bus, count, end, before):
                when = time.time_ns() if options.time else None
                shared.write(form(message, when), at_once=False)
        finally:
            shared.write(b"")
            if options.discard:
                note_missed(bus)
