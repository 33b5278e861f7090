"""request and reply: a question and its answer."""

from __future__ import annotations

import os
import subprocess
import tempfile

from sbus_client import (
    REQUEST_SECONDS,
    PacketTooLarge,
    Request,
    SbusError,
    parse_request,
    printable,
)

from . import options as shared


@shared.command(
    "request services/time",
    shared.argument("key", **shared.KEY),
    shared.INPUT,
    shared.flag("--raw", "print the answer as it is"),
    shared.timeout(REQUEST_SECONDS),
)
def request(options: shared.Options) -> None:
    """Publish a request, and print the payload of the first answer."""
    key = os.fsencode(options.key)
    with shared.open_bus(options, options.timeout) as bus:
        most = bus.packet_bytes_max
        payload = shared.given_payload(options.payload or "", most)
        answer = bus.request(key, payload, options.timeout)
    if options.raw:
        shared.write(answer)
    else:
        shared.write_line(answer)


@shared.command(
    "reply services/time date",
    shared.argument("pattern", metavar="PATTERN", help="the keys to answer"),
    shared.argument(
        "words", metavar="COMMAND", nargs="...", help="and its arguments"
    ),
)
def reply(options: shared.Options) -> None:
    """Answer each request under the keys that a pattern selects.

    Run a command with the request as its standard input and its key in
    SBUS_KEY; what it prints is the answer.  A command that prints more than
    a message can hold is ended, and the request stays without an answer.
    """
    words = options.words[options.words[:1] == ["--"] :]
    if not words:
        raise shared.UsageError("give a COMMAND that answers")
    with shared.open_bus(options) as bus:
        shared.subscribe(bus, [options.pattern])
        for message in shared.messages(bus):
            if asked := parse_request(message):
                answer = output_of(words, asked, bus.packet_bytes_max)
                try:
                    bus.reply(asked, answer)
                except PacketTooLarge as error:
                    key = printable(asked.key)
                    shared.note(f"{key} stays without an answer: {error}")


def output_of(words: list[str], asked: Request, bytes_max: int) -> bytes:
    """Return what a command prints; end it if that is too much.

    Raises: SbusError if it cannot run.
    """
    environment = {**os.environb, b"SBUS_KEY": asked.key}
    with tempfile.TemporaryFile() as given:
        given.write(asked.payload)
        given.seek(0)
        try:
            running = subprocess.Popen(
                words, stdin=given, stdout=subprocess.PIPE, env=environment
            )
        except OSError as error:
            raise SbusError(f"{words[0]}: {error.strerror}") from None
    with running:
        assert running.stdout
        answer = running.stdout.read(bytes_max + 1)
        if len(answer) > bytes_max:
            running.kill()
    if running.returncode and len(answer) <= bytes_max:
        shared.note(f"{words[0]}: status {running.returncode}")
    return answer
