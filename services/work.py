"""queue, work and jobs: a queue, its workers and its operators.

A worker knows of a queue what any program can know: its name.  What a broker
does is in broker.py, which is loaded only where one runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from subprocess import Popen, TimeoutExpired

from sbus_client import (
    ASK_SECONDS,
    Client,
    Disconnected,
    SbusError,
    TimedOut,
)

from . import json_lines, shared, signals

FIND_SECONDS = 1.0  # in which a broker is to say that it serves a queue
TAKE_SECONDS = 3  # for which a worker waits; less than for an answer
DRAIN_SECONDS = 1  # after which it asks whether there are jobs at all
Command = Popen[bytes]


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
    shared.duration("--lease-seconds", "of a worker (30)", default=30.0),
    shared.duration("--retry-seconds", "pause, doubled (1)", default=1.0),
    shared.number("--tries", "give a job N times (5)", default=5),
    shared.argument(
        "--user",
        "its number: takes jobs, too",
        action="append",
        type=int,
        default=[],
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


class Queue:
    """A queue, as its workers and operators see it."""

    def __init__(self, bus: Client, name: str) -> None:
        self.bus = bus
        self.name = name
        self.inbox = b""  # of its broker, once that has said so

    def find(self, seconds: float) -> None:
        """Have the inbox of the broker.  Raises: SbusError."""
        if not self.inbox:
            self.inbox = self.bus.request(f"queue/{self.name}", b"", seconds)

    def ask(
        self, order: bytes, payload: bytes, seconds: float = ASK_SECONDS
    ) -> bytes:
        """Return the answer to an order.  Raises: SbusError."""
        try:
            return self.bus.request(
                self.inbox + b"/" + order, payload, seconds
            )
        except TimedOut:
            # The inbox is not for logs
            text = f"the broker of queue {self.name} does not answer"
            raise TimedOut(text) from None


class Worker:
    """Does jobs of a queue, one after another, by a command."""

    def __init__(self, queue: Queue, words: list[str]) -> None:
        self.queue = queue
        self.words = words
        self.is_leaving = False
        self.process: Command | None = None  # of the job in hand

    def leave(self, number: int, _: object) -> None:
        """End after the job in hand; at a second signal, end its command."""
        if self.is_leaving:
            signal.signal(number, signal.SIG_DFL)
            if self.process:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGTERM)
        self.is_leaving = True

    def insist(self, order: bytes, payload: bytes = b"") -> bytes:
        """Ask until a broker answers, or a signal has come.

        It may be the next broker, on another bus.
        """
        is_told = False
        while True:
            try:
                self.queue.find(FIND_SECONDS)
                return self.queue.ask(order, payload)
            except TimedOut as error:
                if self.is_leaving:
                    raise
                if not is_told:
                    shared.note(f"{error}: trying again")
                is_told = True
            except Disconnected:
                if not self.queue.bus.reconnect:
                    raise
            self.queue.inbox = b""

    def run(self, is_draining: bool) -> None:
        """Do jobs until a signal comes, or a drained queue has none.

        Raises: SbusError.
        """
        order = b"take/%d" % (DRAIN_SECONDS if is_draining else TAKE_SECONDS)
        lease = b""  # of a job that is done
        while not self.is_leaving:
            job = self.insist(order, lease)
            lease = b""
            if job:
                lease = self.do(job)
            elif is_draining and self.is_drained():
                return
        if lease:
            self.insist(b"done/" + lease)

    def is_drained(self) -> bool:
        """Return whether all jobs are done.

        Raises: SbusError if all others have failed.
        """
        states = self.insist(b"counts").splitlines()
        if len(states) == 1 and b'"failed"' in states[0]:
            remedy = f"see `sbus jobs {self.queue.name} show`"
            raise SbusError(f"jobs have failed: {remedy}")
        return not states

    def do(self, job: bytes) -> bytes:
        """Run the command with a job; return its lease if the job is done."""
        try:
            lease, seconds, key, payload = job.split(b"\0", 3)
            lease_seconds = float(seconds)
        except ValueError:
            raise SbusError(f"a malformed job came: {job[:80]!r}") from None
        if self.is_leaving:  # the signal came while this worker waited
            self.insist(b"back/" + lease, b"its worker ends")
            return b""

        process = self.start(key, lease, payload)
        status = self.wait(process, lease, lease_seconds)
        self.process = None
        if status == 0:
            return lease
        shared.note(f"job {lease.decode()}: status {status}")
        self.insist(b"back/" + lease, b"status %d" % status)
        return b""

    def start(self, key: bytes, lease: bytes, payload: bytes) -> Command:
        """Start the command, with a job; return it."""
        import tempfile  # which a small Python lacks

        environment = {**os.environb, b"SBUS_KEY": key, b"SBUS_JOB": lease}
        # No pipe: if the worker is killed, the command has all of the job
        with tempfile.TemporaryFile() as file:
            file.write(payload)
            file.seek(0)
            options = {"stdin": file, "env": environment}
            with signals.starting(self.words, **options) as process:
                self.process = process
        return process

    def wait(
        self, process: Command, lease: bytes, lease_seconds: float
    ) -> int:
        """Return the exit status of a command; keep its lease meanwhile."""
        pause: float | None = lease_seconds / 3  # so two may be late
        while True:
            try:
                return process.wait(pause)
            except TimeoutExpired:
                try:
                    is_kept = self.insist(b"more/" + lease) != b"0"
                except SbusError as error:  # the command goes on
                    shared.note(error)
                    continue
                if not is_kept:
                    text = "it was forgotten, or another worker has it"
                    shared.note(f"job {lease.decode()}: {text}")
                    pause = None


@shared.command(
    "work mail -- ./send.sh",
    NAME,
    shared.argument("words", "what to run", metavar="COMMAND", nargs="A..."),
    shared.flag("--drain", "end once all jobs are done, or have failed"),
    shared.RECONNECT,
)
def work(options: shared.Options) -> None:
    """Do the jobs of a queue, one after another.

    Run a command for each, with the job as its standard input, its key in
    SBUS_KEY and its lease, as 17.1, in SBUS_JOB.  Exit status 0 says that it
    is done; with another one it is given again, later.  A signal has the
    worker end once the command has ended; a second one ends the command.
    With --drain, the status is 1 if jobs have failed.  Options stand before
    the COMMAND.
    """
    import shutil  # which a small Python lacks

    words = options.words[options.words[:1] == ["--"] :]
    if not shutil.which(words[0]):
        raise shared.UsageError(f"there is no command {words[0]!r}")

    with shared.open_bus(options, reconnect=options.reconnect) as bus:
        worker = Worker(Queue(bus, options.name), words)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, worker.leave)
        worker.run(options.drain)


@shared.command(
    "jobs mail show",
    NAME,
    shared.argument("order", "counts, if none is given", nargs="?"),
    shared.timeout(ASK_SECONDS),
)
def jobs(options: shared.Options) -> None:
    """Print what is in a queue, or order something.

    ORDER is counts; show for 100 jobs, those that failed first, or show/N for
    those from number N; retry or forget all that failed, or retry/N or
    forget/N; pause or resume giving jobs; purge, to forget all that are ready;
    done/N to forget a job.
    """
    import json  # which a small Python lacks

    order = os.fsencode(options.order or "counts")
    with shared.open_bus(options) as bus:
        queue = Queue(bus, options.name)
        queue.find(options.timeout)
        answer = queue.ask(order, b"", options.timeout)
    if answer == b"0" and b"/" in order:
        raise SbusError(f"{options.order}: there is no such job")
    for line in answer.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            text = f"a malformed answer came: {line[:80]!r}"
            raise SbusError(text) from None
        shared.write(json_lines.json_line(row))
