"""request and reply: a question and its answer."""

from __future__ import annotations

import os
import subprocess

from sbus_client import (
    REQUEST_SECONDS,
    PacketTooLarge,
    Request,
    parse_request,
    printable,
)

from . import shared


@shared.command(
    "request services/time",
    shared.key(),
    shared.payload(),
    shared.flag("--raw", "print the answer unchanged"),
    shared.timeout(REQUEST_SECONDS),
)
def request(options: shared.Options) -> None:
    """Publish a request, and print the payload of the first answer."""
    key = os.fsencode(options.key)
    with shared.open_bus(options, options.timeout) as bus:
        payload = shared.given_payload(options.payload or "", bus)
        answer = bus.request(key, payload, options.timeout)
    if options.raw:
        shared.write(answer)
    else:
        shared.write_line(answer)


@shared.command(
    "reply services/time date",
    shared.argument("pattern", "the keys to answer", metavar="PATTERN"),
    shared.argument(
        "words", "a command and arguments", metavar="COMMAND", nargs="..."
    ),
)
def reply(options: shared.Options) -> None:
    """Answer each request under the keys that a pattern selects.

    Run a command with the request as its standard input and its key in
    SBUS_KEY.  Its output is the answer, unless it is too large for a message.
    """
    words = options.words[options.words[:1] == ["--"] :]
    if not words:
        raise shared.UsageError("give a COMMAND that answers")
    with shared.open_bus(options) as bus:
        shared.subscribe(bus, [options.pattern])
        for message in shared.messages(bus):
            if asked := parse_request(message):
                answer = output_of(words, asked)
                try:
                    bus.reply(asked, answer)
                except PacketTooLarge as error:
                    key = printable(asked.key)
                    shared.note(f"{key} gets no answer: {error}")


def output_of(words: list[str], asked: Request) -> bytes:
    """Return what a command prints.  Raises: OSError if it cannot run."""
    environment = {**os.environb, b"SBUS_KEY": asked.key}
    done = subprocess.run(
        words, input=asked.payload, stdout=subprocess.PIPE, env=environment
    )
    if done.returncode:
        shared.note(f"{words[0]}: status {done.returncode}")
    return done.stdout
