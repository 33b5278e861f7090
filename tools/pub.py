"""pub: that of sbus_client.py, and more that it publishes, at a rate."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator

from sbus_client import (
    KEY,
    LINES,
    PAYLOAD,
    PUBLISH_SECONDS,
    Client,
    Message,
    Options,
    SbusError,
    UsageError,
    argument,
    command,
    flag,
    given_payload,
    input_lines,
    no_room,
    open_bus,
    payload_room,
    standard_input,
    timeout,
)

from .json_lines import parse_json
from .options import amount, number
from .progress import Progress

INPUT_BYTES = 65_536  # read at once
LATE_SECONDS = 0.2  # that a rate makes up for
KeyAndPayload = tuple[bytes, bytes]  # as a Message is


def input_parts(room: int) -> Iterator[bytes]:
    """Yield each part of standard input up to a NUL byte, and the last.

    Raises: SbusError; PacketTooLarge.
    """
    with standard_input() as file:
        left = b""
        while text := os.read(file.fileno(), INPUT_BYTES):
            *parts, left = (left + text).split(b"\0")
            if max(map(len, (*parts, left))) > room:
                raise no_room("a part of standard input", room)
            yield from parts
        if left:
            yield left


def input_messages() -> Iterator[Message]:
    """Yield what the lines of standard input say in JSON.

    Raises: SbusError.
    """
    with standard_input() as file:
        for number, line in enumerate(file, 1):
            try:
                yield parse_json(line)
            except (ValueError, LookupError, TypeError, AttributeError):
                what = f"line {number} of standard input is no message, as"
                raise SbusError(f"{what} sub --json writes it") from None


def given_messages(options: Options, bus: Client) -> Iterable[KeyAndPayload]:
    """Return what the command line asks to publish.

    Raises: SbusError; PacketTooLarge.
    """
    if options.json:
        return input_messages()
    key = os.fsencode(options.key)
    room = payload_room(bus, b"MSG", key)
    if options.lines or options.null:
        parts = input_parts if options.null else input_lines
        return zip(itertools.repeat(key), parts(room))
    payload = given_payload(options.payload, room)
    return itertools.repeat((key, payload), options.repeat or 1)


def paced(
    messages: Iterable[KeyAndPayload], rate: float
) -> Iterator[KeyAndPayload]:
    """Yield messages at a rate a second; what is late is not made up for."""
    due = time.monotonic()
    for message in messages:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic() - LATE_SECONDS) + 1 / rate
        yield message


def check_pub(options: Options) -> None:
    """Raise UsageError if what is to be published is said twice, or not."""
    ways = options.json + options.lines + options.null
    if ways > 1:
        raise UsageError("--json, --lines and --null exclude each other")
    if ways and (options.payload is not None or options.repeat):
        what = "--json, --lines and --null take neither a PAYLOAD nor"
        raise UsageError(f"{what} --repeat")
    if options.json == (options.key is not None):
        raise UsageError("give a KEY, or --json, whose lines have it")


@command(
    "pub sensors/1/temp 21.5",
    argument(*KEY[0], **KEY[1], nargs="?"),
    PAYLOAD,
    LINES,
    flag("--null", "the same for what ends with a NUL byte"),
    flag(
        "--json",
        "publish what standard input says, a line each as `sub --json` and"
        " `record` write it",
    ),
    number("--repeat", "publish it N times"),
    amount("--rate", "R", "publish at most R messages a second"),
    timeout(PUBLISH_SECONDS, "that the bus takes a message"),
)
def pub(options: Options) -> None:
    """Publish, and wait until the server has handled it."""
    check_pub(options)
    start = time.monotonic()
    total = f" of {options.repeat:,}" if options.repeat else ""
    sent = 0

    def describe() -> str:
        rate = sent / (time.monotonic() - start)
        return f"{sent:,}{total} messages, {rate:,.1f} a second"

    with open_bus(options, options.timeout) as bus, Progress() as progress:
        messages = given_messages(options, bus)
        if options.rate:
            messages = paced(messages, options.rate)
        for key, payload in messages:
            bus.publish(key, payload, 0, options.timeout)
            sent += 1
            if progress.is_seen:
                progress.show(describe)
        bus.sync(options.timeout)
