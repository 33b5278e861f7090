"""request and reply: a question and its answer."""

from __future__ import annotations

import os
import threading
from functools import partial
from subprocess import PIPE, run

import sbus_client
from sbus_client import Client, PacketTooLarge, Request, left_of, printable

from . import shared
from .stop import Job


@shared.command(
    "request services/time",
    shared.key(),
    shared.PAYLOAD,
    shared.flag("--raw", "print the answer unchanged"),
    shared.timeout(sbus_client.ASK_SECONDS),
)
def request(options: shared.Options) -> None:
    """Publish a request, and print the payload of the first answer.

    If that tells of a failure, its text is our error, and the exit status 1.
    """
    key = shared.given_key(options.key)
    payload = shared.given_payload(options.payload or "")
    with shared.open_bus(options) as bus:
        answer = bus.request(key, payload, left_of(options.end))
    write = shared.write if options.raw else shared.write_line
    write(answer)


@shared.command(
    "reply services/time date",
    shared.argument("pattern", "the keys to answer"),
    shared.argument("words", "what answers", metavar="COMMAND", nargs="A..."),
    shared.number("-j --jobs", "run up to N commands at once (1)", default=1),
    shared.RECONNECT,
    shared.READY_FD,
)
def reply(options: shared.Options) -> None:
    """Answer each request under the keys that a pattern selects.

    Run a command with the request as its standard input and its key in
    SBUS_KEY.  Its output is the answer.  If its exit status is not 0, or its
    output is too large for a message, the asker gets the text of a failure,
    which is that output if it has any.  Options stand before the COMMAND.
    """
    words = options.words[options.words[:1] == ["--"] :]
    slots = threading.Semaphore(options.jobs)
    jobs: list[Job] = []
    with shared.open_bus(options, options.reconnect) as bus:
        shared.subscribe(bus, [options.pattern])
        shared.tell_ready(options, bus)
        try:
            for message in shared.messages(bus):
                if asked := sbus_client.parse_request(message):
                    slots.acquire()
                    jobs = [job for job in jobs if job.is_alive()]
                    jobs.append(Job(partial(answer, bus, words, asked), slots))
        finally:
            for job in jobs:  # which answer by this bus
                job.join()


def answer(bus: Client, words: list[str], asked: Request) -> None:
    """Run a command, and answer a request with what it prints."""
    env = {**os.environb, b"SBUS_KEY": asked.key}
    try:
        done = run(words, input=asked.payload, stdout=PIPE, env=env)
        if done.returncode == 0:
            return bus.reply(asked, done.stdout)
        problem = f"{words[0]}: status {done.returncode}"
        text = done.stdout.rstrip(b"\n") or problem.encode()
    except (OSError, PacketTooLarge) as error:
        problem = str(error)
        text = problem.encode()
    shared.note(f"{printable(asked.key)} fails: {problem}")
    # Beside a key of usual length, a quarter of a packet fits
    bus.reply(asked.failed(), text[: min(4_096, bus.packet_bytes_max // 4)])
