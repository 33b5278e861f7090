"""request and reply: a question, and a command that answers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from sbus_client import (
    INPUT,
    KEY,
    Options,
    Request,
    SbusError,
    UsageError,
    argument,
    command,
    given_payload,
    messages,
    note,
    payload_room,
    requests,
    subscribe,
    timeout,
    write_line,
)

from .lenient import open_bus


@command(
    "ask, and print the answer",
    "request services/time",
    KEY,
    INPUT,
    timeout(),
)
def request(options: Options) -> None:
    """Publish a request, and print what the first who answers it says."""
    key = os.fsencode(options.key)
    with open_bus(options, options.timeout) as bus:
        room = payload_room(bus, b"MSG", key)
        payload = given_payload(options.payload or "", room)
        write_line(bus.request(key, payload, options.timeout))


@command(
    "answer requests",
    "reply services/time date",
    argument("pattern", metavar="PATTERN", help="the keys to answer"),
    argument(
        "run_for_each",
        metavar="COMMAND",
        nargs="...",
        help="and its arguments",
    ),
)
def reply(options: Options) -> None:
    """Answer each request under the keys that a pattern selects.

    Run a command with the request as its standard input and its key in
    SBUS_KEY; what it prints is the answer.
    """
    if not options.run_for_each:
        raise UsageError("give a COMMAND that answers")
    with open_bus(options) as bus:
        subscribe(bus, [options.pattern])
        for asked in requests(messages(bus, None, None)):
            bus.reply(asked, output_of(options.run_for_each, asked))


def output_of(words: Sequence[str], asked: Request) -> bytes:
    """Return what a command prints.  Raises: SbusError if it cannot run."""
    environment = {**os.environb, b"SBUS_KEY": asked.key}
    try:
        done = subprocess.run(
            words,
            input=asked.payload,
            stdout=subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        raise SbusError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        note(f"{words[0]}: status {done.returncode}")
    return done.stdout
