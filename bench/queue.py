"""What a job of `sbus queue` costs, beside beanstalkd and lists of Redis.

    python3 -m bench.queue
    python3 -m bench.queue --only small --rounds 9

Four clients store jobs, each 16 at a time, and wait until all are stored.
Then eight workers take one job at a time.  With the next take, each says that
its last job is finished.  All clients are in Python, and write each order by
itself.  What counts is the processor time of all processes; the last figure
leaves the clients out.

The name of a side says when what it has answered is on disk.  Each side keeps
its jobs under TMPDIR, which should be on a disk.  Peers are left out where
they are not installed.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Callable

from sbus_client import Client, random_part

from . import harness
from .harness import SERVER, TOOLS, BenchError, Peer, Sample, Sides

PUBLISHERS = 4
WORKERS = 8
TOGETHER = 16  # jobs that a publisher sends before it waits
ANSWER_SECONDS = 60
FIGURES = ("us to store", "us to take and finish", "us of both", "of servers")
Kind = Callable[[str], Any]  # of clients: what makes one of an address
CASES = {"small": (64, 6_400), "4k": (4_096, 3_200)}

# ==== Clients of the brokers =================================================
#
# Each can store() a job, say whether the answer is_stored(), and take() a job
# once it has finished its last one, or return False if there is none.


class Sbus:
    """Speaks to `sbus queue`."""

    def __init__(self, address: str) -> None:
        self.bus = Client(address)
        self.own_key = self.bus.whoami().path + random_part()
        self.bus.subscribe(self.own_key)
        self.inbox = self.bus.request("queue/jobs", b"", ANSWER_SECONDS)
        self.lease = b""

    def store(self, payload: bytes) -> None:
        self.bus.publish("jobs/x", self.own_key + b"\0" + payload)

    def is_stored(self) -> bool:
        return self.bus.receive(ANSWER_SECONDS).key == self.own_key

    def take(self) -> bool:
        order = self.inbox + b"/take/0"
        job = self.bus.request(order, self.lease, ANSWER_SECONDS)
        self.lease = job.partition(b"\0")[0]
        return bool(job)


class Stream:
    """What clients of the two peers share."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_SECONDS)
        self.socket.connect(address)
        self.answers = self.socket.makefile("rb")
        self.finish = b""  # the order that finishes the last job


class Beanstalkd(Stream):
    """Speaks to beanstalkd."""

    def store(self, payload: bytes) -> None:
        head = b"put 0 0 30 %d\r\n" % len(payload)  # a lease of 30 s
        self.socket.sendall(head + payload + b"\r\n")

    def is_stored(self) -> bool:
        return self.answers.readline().startswith(b"INSERTED ")

    def take(self) -> bool:
        self.socket.sendall(self.finish + b"reserve-with-timeout 0\r\n")
        if self.finish and self.answers.readline() != b"DELETED\r\n":
            raise BenchError("beanstalkd did not delete a job")

        head = self.answers.readline()
        if head == b"TIMED_OUT\r\n":
            return False
        _, job, size = head.split()
        self.answers.read(int(size) + 2)
        self.finish = b"delete %b\r\n" % job
        return True


class Redis(Stream):
    """Speaks to Redis: a worker has the job that it does in a list."""

    def store(self, payload: bytes) -> None:
        self.socket.sendall(redis_command(b"LPUSH", b"jobs", payload))

    def is_stored(self) -> bool:
        return self.answers.readline().startswith(b":")

    def take(self) -> bool:
        mine = b"held by %d" % os.getpid()
        take = redis_command(b"LMOVE", b"jobs", mine, b"RIGHT", b"LEFT")
        self.socket.sendall(self.finish + take)
        if self.finish and self.answers.readline() != b":1\r\n":
            raise BenchError("Redis did not remove a job")

        head = self.answers.readline()
        if head == b"$-1\r\n":
            return False
        job = self.answers.read(int(head[1:]) + 2)[:-2]
        self.finish = redis_command(b"LREM", mine, b"1", job)
        return True


def redis_command(*words: bytes) -> bytes:
    """Return a command as Redis reads it."""
    lines = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n" % len(words) + b"".join(lines)


# ==== What is compared =======================================================


BUS = [*SERVER, "-a", "{}/bus"]
BROKER = [*TOOLS, "-a", "{}/bus", "queue", "jobs", "jobs/"]
BROKER += ["--store", "{}/store"]
BEANSTALKD = ["beanstalkd", "-l", "unix:{}/bus", "-b", "{}"]
REDIS = ["redis-server", "--port", "0", "--unixsocket", "{}/bus"]
REDIS += ["--dir", "{}", "--save", "", "--appendonly", "yes", "--appendfsync"]
QUEUES = {
    "sbus queue, fsync a batch": Peer([BUS, BROKER], Sbus),
    "beanstalkd, fsync a write": Peer([[*BEANSTALKD, "-f0"]], Beanstalkd),
    "beanstalkd, fsync in 50 ms": Peer([[*BEANSTALKD, "-f50"]], Beanstalkd),
    "Redis, fsync a batch": Peer([[*REDIS, "always"]], Redis),
    "Redis, fsync in 1 s": Peer([[*REDIS, "everysec"]], Redis),
}


def store(kind: Kind, address: str, size: int, count: int) -> float:
    """Store jobs; return the seconds of the processor that this took."""
    client = kind(address)
    start = time.process_time()
    for _ in range(count // TOGETHER):
        for _ in range(TOGETHER):
            client.store(bytes(size))
        for _ in range(TOGETHER):
            if not client.is_stored():
                raise BenchError("a job was not stored")
    return time.process_time() - start


def work(kind: Kind, address: str) -> tuple[int, float]:
    """Do all jobs; return how many, and the seconds of the processor."""
    client = kind(address)
    start = time.process_time()
    done = 0
    while client.take():
        done += 1
    return done, time.process_time() - start


def measure(queue: Peer, size: int, count: int) -> Sample:
    """Return what a job costs, in microseconds.  Raises: BenchError."""
    started = harness.all_started(queue.commands)
    with started as brokers, ProcessPoolExecutor(WORKERS) as clients:
        whom = (queue.client, f"{brokers.address}/bus")
        share = (size, count // PUBLISHERS)
        begun = brokers.cpu_seconds()
        stores = [
            clients.submit(store, *whom, *share) for _ in range(PUBLISHERS)
        ]
        stored_by_clients = sum(future.result() for future in stores)

        stored = brokers.cpu_seconds()
        works = [clients.submit(work, *whom) for _ in range(WORKERS)]
        shares = [future.result() for future in works]
        done = brokers.cpu_seconds()

    done_count, done_by_clients = map(sum, zip(*shares))
    if done_count != count:
        raise BenchError(f"{done_count} of {count} jobs were done")
    to_store = stored - begun + stored_by_clients
    to_do = done - stored + done_by_clients
    seconds = (to_store, to_do, to_store + to_do, done - begun)
    return {name: 1e6 * s / count for name, s in zip(FIGURES, seconds)}


def sides_of(name: str) -> Sides:
    """Return what is compared in a case."""
    return harness.sides_of_peers(QUEUES, measure, *CASES[name])


def main() -> int:
    """Print the table; return 1 if a case failed."""
    parser = harness.OptionParser("bench.queue", __doc__, rounds=5)
    sizes = {name: f"{size:,} bytes" for name, (size, _) in CASES.items()}
    return harness.print_table(parser.parse(sizes), FIGURES, sides_of)


if __name__ == "__main__":
    harness.run(main)
