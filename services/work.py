"""queue, work and jobs: a queue, its workers and its operators.

A worker knows of a queue what any program can know: its name.  What a broker
does is in broker.py, which is loaded only where one runs.
"""

from __future__ import annotations

import argparse
import os
import signal
from subprocess import Popen, TimeoutExpired

import sbus_client
from sbus_client import Client, Disconnected, SbusError, TimedOut

from . import shared

TAKE_SECONDS = 3  # for which a worker waits; less than for an answer
signals: list[int] = []  # that have come: this worker is to end


def queue_name(text: str) -> str:
    """Return the name of a queue, for argparse."""
    name = shared.unmarked(text)
    if "*" in name or {"", "!"} & {*name.split("/")} or len(name) > 200:
        raise argparse.ArgumentTypeError(f"{name!r} is no name for a queue")
    return name


NAME = shared.argument("name", "of the queue", type=queue_name)


@shared.command(
    "queue mail 'mail/' --store mail.db",
    NAME,
    shared.argument("pattern", "the keys whose messages are jobs", nargs="*"),
    shared.argument("--store", "the file of the jobs", required=True),
    shared.amount("--lease-seconds", "S", "of a worker (30)", default=30.0),
    shared.amount("--retry-seconds", "S", "pause, doubled (1)", default=1.0),
    shared.number("--tries", "give a job N times (5)", default=5),
    shared.argument(
        "--user", "takes jobs, too", action="append", type=int, default=[]
    ),
    *(shared.RECONNECT, shared.READY_FD),
)
def queue(options: shared.Options) -> None:
    """Store messages as jobs, and give each to one worker at a time.

    A message under a PATTERN is a job; a request there is answered with its
    number once it is on disk.  `sbus work` does jobs, and `sbus jobs` shows
    them.  A job is done at least once: it is given again if its worker does
    not say in time that it is done, or gives it back.  After --tries it has
    failed, and stays in the store.  Run it as the owner of the bus.
    """
    try:
        from . import broker
    except ImportError as error:  # some Pythons have no sqlite3
        text = "install python3-sqlite3, or all of python3"
        raise SbusError(f"{error}: {text}") from None
    broker.serve(options)


def ask(
    bus: Client, name: str, order: bytes, payload: bytes, seconds: float
) -> bytes:
    """Return the answer to an order.  Raises: SbusError."""
    inbox = bus.request(f"queue/{name}", b"", seconds)
    return bus.request(inbox + b"/" + order, payload, seconds)


def insist(
    bus: Client, name: str, order: bytes, payload: bytes = b""
) -> bytes:
    """Ask until a broker answers, or a signal has come.

    It may be the next broker, on another bus.
    """
    is_told = False
    while True:
        try:
            return ask(bus, name, order, payload, sbus_client.ASK_SECONDS)
        except TimedOut as error:
            if signals:
                raise
            if not is_told:
                shared.note(f"{error}: trying again")
            is_told = True
        except Disconnected:
            if not bus.reconnect:
                raise


def do(bus: Client, name: str, job: bytes, words: list[str]) -> bytes:
    """Run a command with a job; return its lease if the job is done."""
    import tempfile  # which a small Python lacks

    lease, seconds, key, payload = job.split(b"\0", 3)
    environment = {**os.environb, b"SBUS_KEY": key, b"SBUS_JOB": lease}
    # No pipe: if the worker is killed, the command has all of the job
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.seek(0)
        process = Popen(words, stdin=file, env=environment)

    pause: float | None = float(seconds) / 3  # so two of them may be late
    status = None
    while status is None:
        try:
            status = process.wait(pause)
        except TimeoutExpired:
            if insist(bus, name, b"more/" + lease) == b"0":
                shared.note(f"job {lease.decode()}: another has it now")
                pause = None
    if status == 0:
        return lease
    shared.note(f"job {lease.decode()}: status {status}")
    insist(bus, name, b"back/" + lease, b"status %d" % status)
    return b""


@shared.command(
    "work mail -- ./send.sh",
    NAME,
    shared.argument("words", "what to run", metavar="COMMAND", nargs="A..."),
    shared.flag("--drain", "end once no job is ready"),
    shared.RECONNECT,
)
def work(options: shared.Options) -> None:
    """Do the jobs of a queue, one after another.

    Run a command for each, with the job as its standard input, its key in
    SBUS_KEY and its lease, as 17.1, in SBUS_JOB.  Exit status 0 says that it
    is done; with another one it is given again, later.  A signal has the
    worker end once the command has ended.  Options stand before the COMMAND.
    """
    import shutil  # which a small Python lacks

    words = options.words[options.words[:1] == ["--"] :]
    if not shutil.which(words[0]):
        raise shared.UsageError(f"there is no command {words[0]!r}")

    def leave(number: int, _: object) -> None:
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    with shared.open_bus(options, reconnect=options.reconnect) as bus:
        order = b"take/%d" % (0 if options.drain else TAKE_SECONDS)
        lease = b""  # of a job that is done
        while not signals:
            job = insist(bus, options.name, order, lease)
            lease = do(bus, options.name, job, words) if job else b""
            if options.drain and not job:
                break
        if lease:
            insist(bus, options.name, b"done/" + lease)


@shared.command(
    "jobs mail show",
    NAME,
    shared.argument("order", "counts, if none is given", nargs="?"),
    shared.timeout(sbus_client.ASK_SECONDS),
)
def jobs(options: shared.Options) -> None:
    """Print what is in a queue, or order something.

    ORDER is counts; show for 100 jobs, those that failed first, or show/N for
    those from number N; retry or forget all that failed, or retry/N or
    forget/N; pause or resume giving jobs; purge, to forget all that are ready;
    done/N to forget a job.
    """
    order = os.fsencode(options.order or "counts")
    with shared.open_bus(options) as bus:
        answer = ask(bus, options.name, order, b"", options.timeout)
    shared.write(answer + b"\n" if answer else b"")
