"""sub: print messages in lines, in colour, as JSON or as they are."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import NamedTuple, TextIO

import sbus_client
from sbus_client import (
    ANSWER_SECONDS,
    COUNT,
    DURATION,
    PATTERNS,
    STATS,
    Argument,
    Client,
    Message,
    Options,
    SbusError,
    UsageError,
    argument,
    ask,
    flag,
    messages,
    note,
    printable,
    standard_output,
    subscribe,
    write,
)

from .json_lines import as_json
from .lenient import open_bus
from .progress import is_terminal

KEY_COLOUR, TIME_COLOUR, NO_COLOUR = "\x1b[36m", "\x1b[2m", "\x1b[m"


class Style(NamedTuple):
    """How text is printed."""

    encoding: str
    is_coloured: bool


def style_of(output: TextIO) -> Style:
    """Return how text is printed there: in colour on most terminals."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Style(output.encoding, is_terminal(output) and not is_plain)


# How a message is printed; *when*, if it is told, is in nanoseconds since 1970


def as_text(message: Message, when: int | None, style: Style) -> bytes:
    """Return a message as a line."""
    key, payload = (printable(text, style.encoding) for text in message)
    stamp = "" if when is None else local_time(when)
    if style.is_coloured:
        key = f"{KEY_COLOUR}{key}{NO_COLOUR}"
        stamp = stamp and f"{TIME_COLOUR}{stamp}{NO_COLOUR}"
    line = f"{stamp}\t" if stamp else ""
    return f"{line}{key}\t{payload}\n".encode(style.encoding)


def local_time(when: int) -> str:
    """Return a time with its zone, as ISO 8601 has it."""
    moment = datetime.datetime.fromtimestamp(when / 1e9).astimezone()
    return moment.isoformat(timespec="microseconds")


def as_json_line(message: Message, when: int | None, _: Style) -> bytes:
    """Return a message as a line of JSON."""
    return as_json(message, when)


def as_payload(message: Message, _: int | None, __: Style) -> bytes:
    """Return a payload as it is."""
    return message.payload


def as_null_ended(message: Message, _: int | None, __: Style) -> bytes:
    """Return a payload as it is, and a NUL byte."""
    return message.payload + b"\0"


def form(name: str, form: Callable[..., bytes], help: str) -> Argument:
    """Return an option that chooses how messages are printed."""
    choice = {"action": "store_const", "const": form, "default": as_text}
    return argument(name, dest="form", help=help, **choice)


def descriptor_of(text: str) -> int:
    """Return a descriptor that a user named.  Raises: ArgumentTypeError."""
    number = int(text) if text.isdecimal() else 0
    if number <= 2:
        what = f"{text!r} is no descriptor above 2, such as 3 of 3>ready"
        raise ArgumentTypeError(what)
    return number


def tell_ready(descriptor: int) -> None:
    """Write a line to a descriptor and close it.  Raises: SbusError."""
    try:
        os.write(descriptor, b"ready\n")
        os.close(descriptor)
    except OSError as error:
        what = f"--ready-fd {descriptor}: {error.strerror}"
        raise SbusError(what) from None


def note_missed(bus: Client) -> None:
    """Say how many messages were discarded, if any and if the server knows.

    Spec: [CTL-5].
    """
    errors = (SbusError, TimeoutError, ValueError, LookupError)
    with contextlib.suppress(*errors):
        missed = json.loads(ask(bus, STATS, ANSWER_SECONDS))["discarded"]
        if missed:
            note(f"{missed:,} messages were missed")


def print_messages(options: Options) -> None:
    """Print what is published."""
    if options.time and options.form in (as_payload, as_null_ended):
        raise UsageError("--raw and --null have no place for --time")
    form, style = options.form, style_of(standard_output())
    wanted = (options.count, options.timeout, options.exclude)
    with open_bus(options) as bus:
        if options.discard:
            bus.control("blocking/soft/discard")
        subscribe(bus, options.pattern)
        if options.ready_fd is not None:
            bus.sync()
            tell_ready(options.ready_fd)
        try:
            for message in messages(bus, *wanted):
                when = time.time_ns() if options.time else None
                write(form(message, when, style), at_once=False)
        finally:
            write(b"")
            if options.discard:
                note_missed(bus)


JSON = form(
    "--json",
    as_json_line,
    "print a JSON object a line instead: key and payload, or key_base64 and"
    " payload_base64 for what is no UTF-8",
)
EXCLUDE = argument(
    "--exclude",
    metavar="PATTERN",
    action="append",
    type=os.fsencode,
    default=[],
    help="leave out the keys that it selects; may be repeated",
)
DISCARD = flag(
    "--discard",
    "miss messages rather than slow their publishers down, and say how many"
    " in the end",
)
READY = argument(
    "--ready-fd",
    metavar="FD",
    type=descriptor_of,
    help="write a line there once it is subscribed, and close it; above 2",
)

print_messages.__doc__ = sbus_client.sub.run.__doc__
sub = sbus_client.sub._replace(
    run=print_messages,
    arguments=(
        PATTERNS,
        JSON,
        form("--raw", as_payload, "print the payloads alone, as they are"),
        form("--null", as_null_ended, "the same, each with a NUL byte"),
        flag(
            "--time",
            "print first when it came; in JSON, t is nanoseconds since 1970",
        ),
        EXCLUDE,
        DISCARD,
        READY,
        COUNT,
        DURATION,
    ),
)
