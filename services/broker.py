"""queue: store each message, and give it to one worker at a time.

A message under a pattern of the queue is a job.  If it is a request, its
answer is the job's number, and says that the job is on disk.

A worker asks under `queue/NAME` for the inbox of the broker, a private key
that nobody can guess.  The answer reaches only processes that may take jobs,
so the inbox is the permission: no order has to prove it again.  Orders are
requests under the inbox:

    INBOX/take/SECONDS  wait so long for a job.  The answer is a lease, its
                        seconds, the job's key and its payload, with NULs
                        between; or it is empty.  The payload may be the last
                        lease, whose job is then done
    INBOX/done/LEASE    the job is done: forget it
    INBOX/more/LEASE    begin the time of the lease anew
    INBOX/back/LEASE    give the job again, later; the payload says why

Operators order counts, show, retry, forget, purge, pause and resume.  The
table in store.py has all orders.

The broker reads all that has come, handles it in one transaction, and then
answers:

    read -> store jobs, run orders -> lease jobs -> commit -> answer

So it may be killed at any moment.  What it has answered is stored, and what
it has not may be asked again.

A queue has one broker of a user on a bus.  A broker asks the others under a
key that reaches only this user, and only answers a question that comes after
its own.  So of two brokers, the later one is answered, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from typing import Optional

import sbus_client
from sbus_client import Client, Message, Received, Request, SbusError, left_of

from . import shared, store

PAUSE_SECONDS = 0.5  # in which an earlier broker is to answer
TAKE_SECONDS_MAX = 60  # for which a worker that is gone may get jobs
ANSWER_BYTES_MAX = sbus_client.KEY_BYTES_MAX + 100  # but for the job in it
BATCH_MESSAGES = 256  # more would save little, and need more memory
Answer = tuple[Request, Optional[bytes]]  # None: the worker is to wait


def holder_of(asked: Request) -> str:
    """Return which process asks."""
    return sbus_client.owner_of(asked.reply_key).path.decode("ascii")


class Broker:
    """Serves a queue on a bus."""

    def __init__(
        self, bus: Client, jobs: store.Store, options: shared.Options
    ) -> None:
        self.bus = bus
        self.jobs = jobs
        self.lease_seconds = options.lease_seconds
        # A job has to fit into an answer
        self.job_bytes_max = bus.packet_bytes_max - ANSWER_BYTES_MAX
        uid = os.geteuid()
        self.users = {uid, *options.user}
        self.key = b"queue/" + os.fsencode(options.name)
        path = bus.whoami().path
        # What all private keys begin with, if this bus is below another one
        self.prefix = path[: path.rindex(sbus_client.SECRET)]
        self.inbox = path + sbus_client.random_part() + b"/"
        # Brokers ask each other under the first key, and answer to the second
        self.claim_key = self.prefix + b"!/cred//%d//" % uid + self.key
        self.own_key = path + sbus_client.random_part()
        self.is_first = False  # its question came before what it now hears
        self.batch: list[Message] = []
        self.waiting: dict[Request, float] = {}  # workers, and until when

    # ---- Reading

    def run(self) -> None:
        """Serve for ever."""
        seconds: float | None = 0
        while True:
            try:
                self.hear(self.bus.receive(seconds))
                seconds = 0
            except TimeoutError:  # all is read that has come
                seconds = self.serve()
            except sbus_client.Disconnected:
                self.waiting.clear()
                self.jobs.commit(self.handle_batch)  # the last of this bus
                raise

    def claim(self) -> None:
        """Serve this bus, unless another broker answers in time."""
        self.is_first = False
        self.jobs.is_late = True
        self.waiting.clear()  # they ask again on this bus
        self.bus.publish(self.claim_key, self.own_key + b"\0")
        end = None
        with contextlib.suppress(TimeoutError):
            while left_of(end) != 0:
                self.hear(self.bus.receive(left_of(end)))
                if self.is_first and end is None:
                    end = sbus_client.end_of(PAUSE_SECONDS)

    def hear(self, received: Received) -> None:
        """Take a message into the batch, or answer another broker."""
        if type(received) is sbus_client.Reconnected:
            shared.note(f"connected to {self.bus.address}")
            self.claim()
        elif received.key == self.own_key:
            raise SbusError(sbus_client.printable(received.payload))
        elif received.key == self.claim_key:
            asked = sbus_client.parse_request(received)
            if asked and asked.reply_key == self.own_key:
                self.is_first = True
            elif asked and self.is_first:
                text = b"process %d serves %b already"
                self.bus.reply(asked, text % (os.getpid(), self.key))
        elif type(received) is Message:
            self.batch.append(received)
            if len(self.batch) >= BATCH_MESSAGES:
                self.serve()

    # ---- A batch

    def serve(self) -> float | None:
        """Handle the batch; return after how many seconds more is to do."""
        answers = self.jobs.commit(self.handle_batch)
        self.batch.clear()
        for asked, payload in answers:
            if payload is not None:
                self.waiting.pop(asked, None)
                with contextlib.suppress(sbus_client.PacketTooLarge):
                    self.bus.reply(asked, payload)

        if not self.waiting:
            return None
        due: float = self.jobs.run(store.NEXT_DUE).fetchone()[0]
        return max(0, min(due, *self.waiting.values()) - self.jobs.now())

    def handle_batch(self) -> list[Answer]:
        """Store jobs, run orders, and give jobs; return the answers."""
        answers = []
        for message in self.batch:
            asked = sbus_client.parse_request(message)
            if asked:
                answers.append(self.answer(asked))
            elif not self.is_order(message.key):
                self.put(message)

        if self.bus.retry_in() is not None:
            self.waiting.clear()  # their bus has gone
        return answers + self.give() if self.waiting else answers

    def give(self) -> list[Answer]:
        """Return jobs for workers, and nothing for those who waited enough."""
        now = self.jobs.now()
        ended = [asked for asked, end in self.waiting.items() if end <= now]
        answers = dict.fromkeys(ended, b"")

        ready = self.jobs.run(store.READY, count=len(self.waiting)).fetchall()
        for asked, (job, tries, key, payload) in zip(self.waiting, ready):
            lease = {"number": job, "try": tries, "holder": holder_of(asked)}
            self.jobs.run(store.HOLD, **lease)
            head = b"%d.%d\0%g\0" % (job, tries, self.lease_seconds)
            answers[asked] = head + key + b"\0" + payload
        return list(answers.items())

    # ---- A message

    def is_order(self, key: bytes) -> bool:
        """Return whether a message is for us, and so no job."""
        return key == self.key or key.startswith(self.inbox)

    def answer(self, asked: Request) -> Answer:
        """Do what a request asks for; return its answer."""
        try:
            if asked.key == self.key:
                return asked, self.admit(asked)
            if asked.key.startswith(self.inbox):
                return asked, self.obey(asked)
            return asked, self.put(Message(asked.key, asked.payload))
        except ValueError as error:
            return asked.failed(), str(error).encode()

    def admit(self, asked: Request) -> bytes:
        """Return the inbox, if the user of a worker may have it.

        The worker must be on our bus: on another one, the same number may be
        another user's.  Raises: ValueError.
        """
        worker = sbus_client.owner_of(asked.reply_key)
        bus = worker.path[: worker.path.rindex(sbus_client.SECRET)]
        if bus != self.prefix or worker.uid not in self.users:
            broker = (
                f"the broker, process {os.getpid()} of user {os.geteuid()}"
            )
            raise ValueError(f"{broker}, gives this user no jobs: see --user")
        return self.inbox[:-1]

    def put(self, job: Message) -> bytes:
        """Store a job; return its number."""
        due, problem = 0.0, ""
        if len(job.key) + len(job.payload) > self.job_bytes_max:
            due, problem = float("inf"), "it is too large to be given"
        about = {"due": due, "problem": problem, **job._asdict()}
        row = self.jobs.run(store.PUT, **about)
        return b"%d" % (row.lastrowid or 0)

    def obey(self, asked: Request) -> bytes | None:
        """Run an order; return its rows as JSON, or how many it changed.

        Return None for a worker that is to wait.  Raises: ValueError.
        """
        order = asked.key[len(self.inbox) :].decode("latin-1")
        verb, _, word = order.partition("/")
        if verb == "take":
            if not 0 <= (seconds := float(word)) <= TAKE_SECONDS_MAX:
                raise ValueError(
                    f"{word} is above {TAKE_SECONDS_MAX} s, or below 0"
                )
            self.waiting[asked] = self.jobs.now() + seconds
            verb, word = "done", asked.payload.decode("latin-1")
        if verb not in store.ORDERS:
            raise ValueError(f"there is no order {verb!r}")

        number, _, tries = word.partition(".")
        if not re.fullmatch("[0-9]*", number):
            raise ValueError(f"{word!r} is no number of a job")
        problem = sbus_client.printable(asked.payload[:1_000].strip())
        lease = {"number": number, "try": tries, "holder": holder_of(asked)}
        rows = self.jobs.run(store.ORDERS[verb], problem=problem, **lease)
        if asked in self.waiting:
            return None
        if not rows.description:
            return b"%d" % rows.rowcount
        escape = sbus_client.printable  # what is no text
        lines = [json.dumps(dict(row), default=escape) for row in rows]
        return "\n".join(lines).encode()


def serve(options: shared.Options) -> None:
    """Serve a queue for ever.  Raises: SbusError; OSError."""
    try:
        jobs = store.Store(options)
        with shared.open_bus(options, reconnect=options.reconnect) as bus:
            # Rather slow publishers down than miss a message
            bus.control("blocking/soft/block")
            broker = Broker(bus, jobs, options)
            ours = [broker.own_key, broker.claim_key, broker.key, broker.inbox]
            for pattern in [*ours, *map(os.fsencode, options.pattern)]:
                bus.subscribe(pattern)
            broker.claim()
            shared.tell_ready(options, bus)
            broker.run()
    except sqlite3.Error as error:
        raise SbusError(f"{options.store}: {error}") from None
