"""pub: publish an argument, or standard input whole or in parts, at a rate."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from sbus_client import PacketError, PacketTooLarge, SbusError, left_of

from . import json_lines, shared

INPUT_BYTES = 65_536  # read at once
JSON_BYTES_MAX = 8  # of a line, for each byte that a packet may have
Messages = Iterator[tuple[bytes, bytes]]  # keys and payloads


def input_parts(end: bytes, bytes_max: int) -> Iterator[bytes]:
    """Yield each part of standard input up to an end, and the last.

    Raises: OSError; SbusError if a part is too large.
    """
    left = b""
    while text := os.read(shared.standard_input().fileno(), INPUT_BYTES):
        *parts, left = (left + text).split(end)
        yield from parts
        shared.check_size(left, bytes_max)
    if left:
        yield left


def given_messages(options: shared.Options) -> Messages:
    """Return what the command line asks to publish.

    Raises: OSError; UsageError; one of json_lines.ERRORS.
    """
    bytes_max = shared.packet_bytes_max()
    if options.json:
        lines = input_parts(b"\n", JSON_BYTES_MAX * bytes_max)
        return map(json_lines.parse_json, lines)
    key = shared.given_key(options.key)
    if options.lines or options.null:
        end = b"\0" if options.null else b"\n"
        return ((key, part) for part in input_parts(end, bytes_max))
    payload = shared.given_payload(options.payload)
    return iter([(key, payload)])


def paced(messages: Messages, rate: float) -> Messages:
    """Yield messages at a rate a second; do not make up for late ones."""
    due = time.monotonic()
    for message in messages:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic()) + 1 / rate
        yield message


@shared.command(
    "pub sensors/1/temp 21.5",
    shared.key(nargs="?"),
    shared.PAYLOAD,
    (
        shared.flag("--lines", "publish each line of standard input"),
        shared.flag("--null", "publish each part that a NUL byte ends"),
        shared.flag("--json", "publish the lines of `sub --json` or `record`"),
    ),
    shared.amount("--rate", "R", "publish at most R messages a second"),
    shared.timeout(60, "for the bus to take a message"),
)
def pub(options: shared.Options) -> None:
    """Publish, and wait until the server has handled it.

    Without PAYLOAD, or with '-', it is all of standard input, with its final
    line feed.  Write -- before a PAYLOAD that begins with '-'.  Many messages
    are quicker by --lines than by as many commands.
    """
    if options.json == (options.key is not None):
        raise shared.UsageError("give a KEY, or --json, whose lines have keys")
    are_parts = options.json or options.lines or options.null
    if are_parts and options.payload is not None:
        raise shared.UsageError("give a PAYLOAD, or its parts on input")
    sent = 0
    messages = given_messages(options)
    if options.rate:
        messages = paced(messages, options.rate)

    def seconds_left() -> float | None:
        """Return how long to wait: a part may come much later."""
        return options.timeout if are_parts else left_of(options.end)

    with shared.open_bus(options) as bus:
        try:
            for key, payload in messages:
                bus.publish(key, payload, seconds_left())
                sent += 1
        except (PacketError, PacketTooLarge) as error:
            if not are_parts:
                raise
            raise SbusError(f"message {sent + 1}: {error}") from None
        except json_lines.ERRORS:
            form = "of standard input is not a message as sub --json writes it"
            raise SbusError(f"line {sent + 1} {form}") from None
        bus.sync(seconds_left())
