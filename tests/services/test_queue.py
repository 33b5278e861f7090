"""Tests of queue, work and jobs: the promises of book/queue.md, row by row."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from client_ends import beside
from commands import publish_all, sbus, subscribed
from processes import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    child_process,
    outcome,
    signalled_at,
    started,
)
from real_bus import RealBus, needs_root, wait_for
from sbus_client import (
    PACKET_BYTES_MAX,
    Client,
    RequestFailed,
    SbusError,
    parse_request,
)
from services.broker import TAKE_SECONDS_MAX
from sizes import SOAK, either
from tools import command_line

COMMAND = [sys.executable, str(ROOT / "tools")]


class Broker:
    """A broker of the queue `q` beside the test, once it is ready."""

    def __init__(
        self,
        bus: RealBus,
        *words: str,
        command: list[str] = COMMAND,
        **popen_options: Any,
    ) -> None:
        self.store = str(Path(bus.path).with_name("store"))
        read, write = os.pipe()
        words = ("--store", self.store, "--ready-fd", str(write), *words)
        self.process: Any = subprocess.Popen(
            [*command, "-a", bus.path, "queue", "q", "jobs/", *words],
            pass_fds=[write],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            **popen_options,
        )
        os.close(write)
        try:
            with open(read, "rb") as ready:
                line = ready.readline()
            assert line == b"ready\n"
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.process.stderr.closed:
            self.kill()

    def kill(self) -> str:
        """End it as a crash does; return what it has printed."""
        self.process.kill()
        return str(self.process.communicate()[1])

    def stop(self) -> None:
        """Let it do nothing until it is continued."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has ended."""
    return process.poll() is not None


class Worker:
    """Asks a broker, as any program can."""

    def __init__(self, bus: Client) -> None:
        self.bus = bus
        self.inbox = b""
        while not self.inbox:  # the broker may still look for this bus
            with contextlib.suppress(TimeoutError):
                self.inbox = bus.request("queue/q", timeout=1)

    def ask(self, order: str, payload: bytes = b"") -> bytes:
        """Return an answer."""
        key = self.inbox + b"/" + order.encode("latin-1")
        return self.bus.request(key, payload, SECONDS_MAX)

    def take(self, done: bytes = b"") -> tuple[str, bytes]:
        """Return a job's lease and payload."""
        lease, _, _, payload = self.ask("take/60", done).split(b"\0", 3)
        return lease.decode(), payload

    def begin_to_wait(self) -> None:
        """Ask for a job, and return once the broker knows that."""
        key = self.bus.whoami().path + b"/nobody"
        order = b"/take/%d" % TAKE_SECONDS_MAX
        self.bus.publish(self.inbox + order, key + b"\0")
        self.ask("counts")

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state."""
        lines = map(json.loads, self.ask("counts").splitlines())
        return {line["state"]: line["jobs"] for line in lines}


def store_job(
    client: Client, payload: bytes = b"", key: str = "jobs/x"
) -> bytes:
    """Have a job stored; return its number."""
    return client.request(key, payload, SECONDS_MAX)


def can_write(end: IO[bytes]) -> bool:
    """Return whether a pipe has a reader."""
    with contextlib.suppress(BrokenPipeError):
        return bool(os.write(end.fileno(), b"x"))
    return False


def can_trace() -> bool:
    """Return whether strace is here, and may see what a process calls."""
    command = ["strace", "-o", os.devnull, "true"]
    return bool(shutil.which("strace")) and not subprocess.call(command)


def change(store: str | Path, statement: str) -> None:
    """Change a store as nobody but its broker may."""
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute(statement)


@pytest.fixture
def fifo(directory: Path) -> str:
    path = str(directory / "fifo")
    os.mkfifo(path)
    return path


@pytest.fixture
def client(bus: RealBus) -> Iterator[Client]:
    with Client(bus.path) as client:
        yield client


@pytest.fixture
def broker(bus: RealBus) -> Iterator[Broker]:
    with Broker(bus) as broker:
        yield broker


@pytest.fixture
def worker(broker: Broker, client: Client) -> Worker:
    return Worker(client)


# ---- Jobs


def test_a_message_is_a_job(
    bus: RealBus, broker: Broker, client: Client
) -> None:
    """A request is answered with its number; jobs are given in order."""
    assert store_job(client, b"one", "jobs/a") == b"1"
    client.publish("jobs/b", b"two")
    client.publish("other", b"three")
    command = "printf '%s %s ' $SBUS_JOB $SBUS_KEY; cat; echo"
    words = ("work", "q", "--drain", "--", "sh", "-c", command)
    done = sbus(bus.path, *words)
    assert done == (0, "1.1 jobs/a one\n2.1 jobs/b two\n", "")
    assert sbus(bus.path, "jobs", "q") == (0, "", "")


def test_what_comes_back_goes_first(bus: RealBus, client: Client) -> None:
    """Jobs are given in the order of their numbers."""
    with Broker(bus, "--retry-seconds", "0.000001"):
        for text in (b"1", b"2", b"3"):
            client.publish("jobs/x", text)
        worker = Worker(client)
        assert worker.take() == ("1.1", b"1")
        assert worker.ask("back/1.1") == b"1"
        assert worker.take() == ("1.2", b"1")
        assert worker.take(b"1.2") == ("2.1", b"2")


def test_a_poison_job_fails_at_last(bus: RealBus, client: Client) -> None:
    """A poison job is given --tries times, listed with its reason, and
    retried.
    """
    with Broker(bus, "--tries", "3", "--retry-seconds", "0.01"):
        store_job(client, b"poison\xff")
        store_job(client, b"fine")
        worker = Worker(client)
        with started(bus.path, "work", "q", "grep", "fine") as process:
            wait_for(lambda: worker.counts() == {"failed": 1})
            process.terminate()
            done = outcome(process)
        lines = [f"sbus: job 1.{n}: status 1" for n in (1, 2, 3)]
        assert done == (0, "fine\n", "\n".join([*lines, ""]))
        job = json.loads(sbus(bus.path, "jobs", "q", "show").output)
        assert (job["tries"], job["problem"]) == (3, "status 1")
        assert job["payload"] == r"poison\xff"
        assert sbus(bus.path, "jobs", "q", "retry/1").output == "1\n"
        assert worker.take()[0] == "1.1"


def test_a_job_that_no_answer_can_hold(client: Client, worker: Worker) -> None:
    """A job that no answer can hold has failed at once, and a worker gets the
    next one.
    """
    client.publish("jobs/x", bytes(PACKET_BYTES_MAX - 4_300))
    client.publish("jobs/x", bytes(PACKET_BYTES_MAX - 4_100))
    assert worker.take()[0] == "1.1"
    assert worker.counts() == {"held": 1, "failed": 1}
    job = json.loads(worker.ask("show").splitlines()[0])
    assert job["problem"] == "it is too large to be given"


def test_a_late_worker_may_say_done(bus: RealBus, client: Client) -> None:
    """A late worker says done while another has the job: done is done, and
    only this job.
    """
    with Broker(bus, "--lease-seconds", "0.2"):
        store_job(client, b"slow")
        worker = Worker(client)
        assert [worker.take()[0], worker.take()[0]] == ["1.1", "1.2"]
        assert worker.ask("more/1.1") == worker.ask("back/1.1") == b"0"
        assert worker.ask("done/1.1") == b"1"
        assert worker.ask("done/1.2") == b"0"
        assert store_job(client) == b"2"  # no number comes again


def test_a_worker_keeps_its_lease(
    bus: RealBus, client: Client, fifo: str
) -> None:
    """A worker has its lease while it lives.  While it is stopped, another
    gets the job.
    """
    with Broker(bus, "--lease-seconds", "1"):
        store_job(client)
        worker = Worker(client)
        words = ("work", "q", "--drain", "--", "cat", fifo)
        with started(bus.path, *words) as process, open(fifo, "wb"):
            assert worker.ask("take/2.5") == b""  # in which one lease ends
            process.send_signal(signal.SIGSTOP)
            assert worker.take()[0] == "1.2"
            process.send_signal(signal.SIGCONT)
            assert process.stderr
            assert "another worker has it" in process.stderr.readline()
        assert worker.ask("done/1.2") == b"0"


def test_a_drained_queue_has_no_job_left(
    bus: RealBus, client: Client, directory: Path
) -> None:
    """A job that waits for another try is left; a failed one is not."""
    with Broker(bus, "--tries", "2"):
        store_job(client)
        path = str(directory / "at the second try")
        command = f"test -e '{path}' || ! touch '{path}'"
        words = ("work", "q", "--drain", "--", "sh", "-c")
        done = sbus(bus.path, *words, command)
        assert done == (0, "", "sbus: job 1.1: status 1\n")
        store_job(client)
        done = sbus(bus.path, *words, "false")
        assert done.status == 1 and "jobs have failed: see" in done.errors


def test_a_worker_that_is_told_to_leave(
    bus: RealBus, client: Client, fifo: str
) -> None:
    """A worker that is told to leave begins no job.  A second signal ends the
    command of the last.
    """
    with Broker(bus, "--retry-seconds", "60"):
        worker = Worker(client)
        store_job(client)
        with started(bus.path, "work", "q", "cat", fifo) as process:
            with open(fifo, "wb") as end:
                # Two of one number might come as one
                process.send_signal(signal.SIGINT)
                store_job(client, b"", "jobs/y")
                process.terminate()
                wait_for(lambda: not can_write(end))
            assert outcome(process).errors == "sbus: job 1.1: status -15\n"
        assert worker.counts() == {"ready": 1, "waits": 1}

        # This one has no job in hand when it is told
        with started(bus.path, "work", "q", "echo") as process:
            assert process.stdout
            assert process.stdout.readline() == "\n"
            wait_for(lambda: "held" not in worker.counts())
            process.terminate()
            store_job(client, b"", "jobs/z")
            assert outcome(process) == (0, "", "")
        states = worker.counts()
        assert sum(states.values()) == 2 and "held" not in states


def test_signals_while_a_command_starts(
    bus: RealBus, client: Client, directory: Path
) -> None:
    """The second one ends it: a worker knows of what it has started."""
    with Broker(bus, "--retry-seconds", "60"):
        store_job(client)
        path = signalled_at(directory, "subprocess.Popen.__init__")
        environment = {**ENVIRONMENT, "PYTHONPATH": path}
        words = ("work", "q", "sleep", "1000")
        with started(bus.path, *words, env=environment) as process:
            assert outcome(process).errors == "sbus: job 1.1: status -15\n"


def test_a_command_goes_on_without_a_broker(
    bus: RealBus, client: Client, fifo: str
) -> None:
    """A command ends by itself, even if its worker is told to leave."""
    with Broker(bus, "--lease-seconds", "0.3") as broker:
        store_job(client)
        with started(bus.path, "work", "q", "cat", fifo) as process:
            with open(fifo, "wb") as end:
                broker.kill()
                process.terminate()
                assert process.stderr
                assert "does not answer" in process.stderr.readline()
                end.write(b"the end")
            done = outcome(process)
    assert done.output == "the end" and "does not answer" in done.errors


@pytest.mark.parametrize(
    "words, answer, output",
    [
        ("jobs q", b'"\\u001b[2J"\n"\xc2\x9b"', '"\\u001b[2J"\n"\\u009b"\n'),
        ("jobs q", b"\033[2J", ""),
        ("work q cat", b"x", ""),
    ],
)
def test_strangers_in_place_of_a_broker(
    bus: RealBus, client: Client, words: str, answer: bytes, output: str
) -> None:
    """Neither a terminal nor a worker obeys what they answer."""
    inbox = client.whoami().path + b"/inbox"
    client.subscribe(inbox + b"/")
    client.subscribe("queue/q")
    with started(bus.path, *words.split()) as process:
        for text in inbox, answer:
            asked = parse_request(client.receive(SECONDS_MAX))
            assert asked
            client.reply(asked, text)
        done = outcome(process)
    assert done.output == output
    assert done.errors.count("malformed") == (not output)
    assert done.errors.count("\n") == done.status == (not output)


def test_a_command_has_a_session_of_its_own(
    bus: RealBus, broker: Broker, client: Client
) -> None:
    """A signal that a terminal sends to a group of processes is not for the
    command.
    """
    store_job(client)
    command = ("cut", "-d ", "-f1,6", "/proc/self/stat")
    words = ("work", "q", "--drain", "--", *command)
    process_id, session_id = sbus(bus.path, *words).output.split()
    assert process_id == session_id


def test_operators_hear_of_jobs_that_are_not_there(
    bus: RealBus, broker: Broker
) -> None:
    for order in ("retry/7", "forget/7", "done/7"):
        done = sbus(bus.path, "jobs", "q", order)
        assert done == (1, "", f"sbus: {order}: there is no such job\n")
    done = sbus(bus.path, "jobs", "q", "retry/x")
    assert (done.status, done.output) == (1, "")
    assert "'x' is no number of a job" in done.errors


def test_no_order_ends_the_broker(client: Client, worker: Worker) -> None:
    """Wrong orders are answered, and operators' ones may be repeated."""
    orders = "x,take/x,take/nan,take/-1,done,done/,more/,back/1,back/1.x"
    orders += ",show/x,done/a.b.c,more/1e9.1,/,counts/\xff,retry,forget"
    for order in orders.split(","):
        with contextlib.suppress(RequestFailed):
            worker.ask(order)
        client.publish(worker.inbox + b"/" + order.encode("latin-1"))
    for payload in (b"", b"\0", b"!/cred/0/0/1/x\0"):
        client.publish("queue/q", payload)
    assert worker.ask("pause") == worker.ask("pause") == b"1"
    client.publish("jobs/x", b"1")
    assert worker.ask("take/0") == b""
    assert worker.counts() == {"paused": 1}
    assert worker.ask("resume") == worker.ask("purge") == b"1"
    assert worker.counts() == {}


# ---- Store


def test_a_full_disk_loses_nothing(bus: RealBus, client: Client) -> None:
    """No request is answered until there is room; then all jobs are stored."""
    size = resource.RLIMIT_FSIZE
    with Broker(bus) as broker, Client(bus.path) as other:
        pid = broker.process.pid
        _, hard = resource.prlimit(pid, size)
        resource.prlimit(pid, size, (4_096, hard))
        other.publish("jobs/x", bytes(100_000))
        assert broker.process.stderr
        assert "trying again" in broker.process.stderr.readline()
        with beside(store_job, client):
            resource.prlimit(pid, size, (hard, hard))
        assert Worker(client).counts() == {"ready": 2}


@pytest.mark.skipif(not can_trace(), reason="no strace, or no permission")
def test_an_answer_waits_for_the_disk(
    bus: RealBus, client: Client, directory: Path
) -> None:
    """What was answered survives a crash of the machine."""
    calls = directory / "calls"
    strace = ["strace", "-D", "-o", str(calls), "-e"]
    strace.append("fdatasync,fsync,sendto")
    with Broker(bus, command=[*strace, *COMMAND]):
        for _ in range(20):
            store_job(client)
        worker = Worker(client)
        worker.ask(f"done/{worker.take()[0]}")
    order = re.sub(r"^([fs]).*\n", r"\1", calls.read_text(), flags=re.M)
    assert "fs" * 20 + "s" + "fsfs" in order  # the inbox is not stored


def test_a_store_has_one_broker(bus: RealBus, broker: Broker) -> None:
    """The second broker ends, whatever its queue."""
    done = sbus(bus.path, "queue", "p", "--store", broker.store)
    assert done == (1, "", f"sbus: {broker.store}: database is locked\n")


def test_two_brokers_start_at_once(bus: RealBus, directory: Path) -> None:
    """Of two brokers of a queue, exactly one serves, and names itself."""
    for number in range(either(12, 2)):
        with contextlib.ExitStack() as stack:
            brokers = [
                stack.enter_context(
                    started(bus.path, "queue", "q", "--store", str(store))
                )
                for store in (
                    directory / f"{number}a",
                    directory / f"{number}b",
                )
            ]
            wait_for(lambda: any(map(has_ended, brokers)))  # noqa: B023
            with Client(bus.path) as client:
                Worker(client)
            first, second = sorted(brokers, key=has_ended)
            text = f"sbus: process {first.pid} serves queue/q already\n"
            assert outcome(second) == (1, "", text)
            first.kill()


def test_what_is_no_store_stays_as_it_is(
    bus: RealBus, directory: Path
) -> None:
    """One line says why a file is not used."""
    path = directory / "store"
    with Broker(bus):
        pass

    def error_of(name: str = "q") -> str:
        done = sbus(bus.path, "queue", name, "--store", str(path))
        assert done.status == 1 and done.errors.count("\n") == 1
        return done.errors

    assert path.stat().st_mode & 0o777 == 0o600
    text = "format 1 of queue 'q', not format 1 of queue 'p'"
    assert text in error_of("p")
    change(path, "UPDATE queue SET format = 2")
    assert "format 2 of queue 'q', not format 1 of" in error_of()
    path.chmod(0o644)
    assert "mode 600" in error_of()
    path.unlink()
    path.symlink_to(directory / "elsewhere")
    assert "symbolic links" in error_of()
    path.unlink()
    path.write_bytes(b"")
    path.chmod(0o600)
    change(path, "CREATE TABLE queue (format, name)")
    assert "no such table: jobs" in error_of()
    change(path, "CREATE TABLE jobs (number)")
    assert "no queue, not format 1 of queue 'q'" in error_of()
    path.write_text("a file of somebody")
    assert "not a database" in error_of()
    assert path.read_text() == "a file of somebody"


# ---- Bus


def test_publishers_wait_for_the_disk(
    bus: RealBus, broker: Broker, client: Client
) -> None:
    """Publishers of the same user are paused, and nothing is lost."""

    def is_paused() -> bool:
        clients = client.stats(SECONDS_MAX)["clients"].values()
        return any(row["paused_by"] for row in clients)

    broker.stop()
    with beside(publish_all, bus.path, *[("jobs/x", bytes(10_000))] * 200):
        wait_for(is_paused)
        broker.process.send_signal(signal.SIGCONT)
    assert Worker(client).counts() == {"ready": 200}


@pytest.mark.parametrize("words", [[], ["--reconnect"]])
def test_the_last_messages_of_a_bus(directory: Path, words: list[str]) -> None:
    """The broker stores the last messages of a bus that has gone, as its
    workers have.
    """
    with RealBus(directory) as bus, Broker(bus, *words) as broker:
        with Client(bus.path) as client:
            Worker(client).begin_to_wait()
            broker.stop()
            publish_all(bus.path, *[("jobs/x", b"")] * 5)
            bus.stop()
        broker.process.send_signal(signal.SIGCONT)
        if not words:
            assert "closed the connection" in broker.process.stderr.read()
        with (
            RealBus(directory) as bus,
            Client(bus.path) as client,
            broker if words else Broker(bus),
        ):
            assert Worker(client).counts() == {"ready": 5}


def test_workers_of_a_lost_bus(directory: Path) -> None:
    """Workers of a lost bus are given no job that is stored later."""
    with RealBus(directory) as bus, Broker(bus, "--reconnect") as broker:
        with Client(bus.path) as client:
            Worker(client).begin_to_wait()
        bus.stop()
        with RealBus(directory) as bus, Client(bus.path) as client, broker:
            worker = Worker(client)
            assert store_job(client) == b"1"
            assert worker.counts() == {"ready": 1}


def test_leases_begin_anew(bus: RealBus, client: Client) -> None:
    """Leases begin anew with a broker, as nobody could ask for more of one
    while none ran.
    """
    with Broker(bus, "--lease-seconds", "0.5"):
        store_job(client)
        assert Worker(client).take()[0] == "1.1"
    with pytest.raises(TimeoutError):
        client.request("jobs/x", b"", 1)  # longer than the lease
    with Broker(bus, "--lease-seconds", "60"):
        assert Worker(client).counts() == {"held": 1}


def test_a_clock_that_is_set_back(bus: RealBus, client: Client) -> None:
    """A job waits for one lease longer, and not for a day."""
    with Broker(bus) as broker:
        store_job(client)
        assert Worker(client).take()[0] == "1.1"
        assert Worker(client).ask("back/1.1") == b"1"
    change(broker.store, "UPDATE jobs SET due = due + 86400")
    with Broker(bus, "--lease-seconds", "0.1"):
        assert Worker(client).take()[0] == "1.2"


def test_no_broker(bus: RealBus, client: Client) -> None:
    """A plain message is lost, and a request says so."""
    client.publish("jobs/x", b"lost")
    with pytest.raises(TimeoutError):
        client.request("jobs/x", b"asked again", 0.1)
    with started(bus.path, "work", "q", "cat") as process:
        assert process.stderr
        assert "trying again" in process.stderr.readline()
        process.terminate()
        assert outcome(process).status == 1
    done = sbus(bus.path, "jobs", "q", "-t", "0.1")
    assert "nobody answered 'queue/q'" in done.errors
    with Broker(bus):
        assert store_job(client, b"asked again") == b"1"


def test_strangers_hear_no_inbox(bus: RealBus, client: Client) -> None:
    """The key of an inbox stands in no message that others can select."""
    with subscribed(bus) as peer, Broker(bus):
        worker = Worker(client)
        store_job(client)
        worker.take()
        packets = peer.fence()
        assert len(packets) == 2  # a worker's question, and the job
        assert not any(worker.inbox in packet for packet in packets)


def test_workers_are_on_the_brokers_bus(
    client: Client, worker: Worker
) -> None:
    """A number of the broker's user may be another user's elsewhere."""
    path = client.whoami().path
    client.subscribe(path + b"/")
    below = path + b"/!/cred/0/%d/1/x" % os.getuid()
    client.publish("queue/q", below + b"\0")
    key, _ = client.receive(SECONDS_MAX)
    assert key == below + b"/failed"


@needs_root
def test_strangers_store_and_never_take(directory: Path) -> None:
    """A stranger takes no job, neither in its own name, nor in a name that is
    below it.
    """
    with (
        RealBus(directory, "-o") as bus,
        Broker(bus),
        bus.connect(1234, 1234) as peer,
    ):
        path = peer.path
        peer.send(b"SUB " + path + b"/")
        for key in (path + b"/x", path + b"/!/cred/0/0/1/x"):
            peer.send(b"MSG queue/q\0" + key + b"\0")
            assert peer.receive().startswith(b"MSG " + key + b"/failed\0")
        peer.send(b"MSG jobs/x\0" + path + b"/x\0")
        assert peer.receive().endswith(b"\0001")


@needs_root
def test_the_bus_owner_runs_it(directory: Path) -> None:
    """The flood of another user disconnects a broker of any user but the bus
    owner [BLOCK-13].
    """
    os.chmod(directory, 0o777)
    words = ["queue", "q", "jobs/", "--store", str(directory / "store")]

    def serve(address: str) -> None:
        os.setgid(1234)
        os.setuid(1234)
        sys.argv = ["sbus", "-a", address, *words]
        command_line.run(signal.SIG_DFL)

    with (
        RealBus(directory, "-o") as bus,
        child_process(lambda: serve(bus.path)) as pid,
        Client(bus.path) as client,
        bus.connect(4321, 4321) as peer,
    ):
        with contextlib.suppress(TimeoutError):
            client.request("jobs/x", b"", 1)
        client.request("jobs/x", b"", SECONDS_MAX)
        os.kill(pid, signal.SIGSTOP)
        for _ in range(200):
            peer.send(b"MSG jobs/x\0" + bytes(100_000))
        bus.wait_for_log("BLOCK-13")


# ---- The programs of book/queue.md, each as it stands there


def test_programs(bus: RealBus, directory: Path) -> None:
    """A publisher, a worker, and a program without the client."""
    page = (ROOT / "book/queue.md").read_text("utf-8")
    page = page.replace("queue/mail", "queue/q").replace("mail/", "jobs/")
    form = r"^```(?:python|sh)\n(.*?)^```"
    publisher, worker, bare = re.findall(form, page, re.M | re.S)
    python = [sys.executable, "-u", "-c"]
    env = {**ENVIRONMENT, "SBUS_ADDRESS": bus.path, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"cwd": directory, "text": True, "env": env}
    with Broker(bus):
        output = subprocess.check_output([*python, publisher], **options)
        assert output == "stored as b'1'\n"
        output = subprocess.check_output(["sh", "-c", bare], **options)
        assert json.loads(output)["state"] == "ready"
        options["stdout"] = subprocess.PIPE
        with subprocess.Popen([*python, worker], **options) as process:
            assert process.stdout
            assert "to Bob" in process.stdout.readline()
            with Client(bus.path) as client:
                queue = Worker(client)
                wait_for(lambda: not queue.counts())
            bus.stop()  # which ends the worker


def test_a_script_that_moves(bus: RealBus, directory: Path) -> None:
    """The two halves of the page's script do each file once."""
    page = (ROOT / "book/queue.md").read_text("utf-8")
    script = re.findall(r"^    for (?:.*\n)+?\n", page, re.M)[0]
    script = "for" + re.sub("#.*", "", script.partition("for")[2])
    script = script.replace("audio/", "jobs/").replace("audio", "q")
    programs = {"sbus": shlex.join(COMMAND) + ' "$@"'}
    programs["lame"] = 'echo "$1" >>done'
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    files = [directory / f"{name}.wav" for name in ("-x", "a b", "c")]
    for file in files:
        file.touch()
    env = {**ENVIRONMENT, "SBUS_ADDRESS": bus.path}
    env["PATH"] = f"{directory}:{os.environ['PATH']}"
    with Broker(bus):
        words = ["sh", "-c", script]
        subprocess.run(words, check=True, cwd=directory, env=env)
    done = (directory / "done").read_text().splitlines()
    assert sorted(done) == sorted(map(str, files))


class Storm:
    """A bus, a broker and two workers that are killed at random moments."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.stack = contextlib.ExitStack()
        self.done = directory / "done"
        self.started = 0  # workers
        self.killed: set[int] = set()  # workers, in the order of their start
        self.numbers: list[int] = []  # of jobs whose storing was answered
        self.bus = self.start_bus()
        self.broker = self.start_broker()
        self.workers = [self.start_worker() for _ in range(2)]

    def start_bus(self) -> RealBus:
        (self.directory / "bus").unlink(missing_ok=True)
        return self.stack.enter_context(RealBus(self.directory))

    def start_broker(self) -> Broker:
        words = ("--reconnect", "--lease-seconds", either("20", "5"))
        return self.stack.enter_context(Broker(self.bus, *words))

    def start_worker(self) -> Any:
        script = f'echo "$SBUS_JOB $WORKER" >> {self.done}'
        words = ("work", "q", "--reconnect", "--", "sh", "-c", script)
        self.started += 1
        environment = {**ENVIRONMENT, "WORKER": str(self.started)}
        options = {"stderr": subprocess.DEVNULL, "env": environment}
        worker = started(self.bus.path, *words, **options)
        return self.started, self.stack.enter_context(worker)

    def store(self, client: Client) -> None:
        """Ask for a job to be stored, until that is answered."""
        while True:
            with contextlib.suppress(SbusError):
                self.numbers.append(int(client.request("jobs/x", b"", 1)))
                return

    def kill(self, victim: str) -> None:
        """Kill a process, and start it anew."""
        if victim == "bus":
            self.bus.stop(signal.SIGKILL)
            self.bus = self.start_bus()
        elif victim == "broker":
            self.broker.kill()
            self.broker = self.start_broker()
        else:
            number, worker = self.workers.pop(0)
            worker.kill()
            self.killed.add(number)
            self.workers.append(self.start_worker())

    def run(self, kills: int, jobs: int) -> None:
        """Store jobs, and kill after an answer, or with a job on its way."""
        victims = ["bus", "broker", "worker"]
        with self.stack, Client(self.bus.path, reconnect=True) as client:
            for _ in range(kills):
                for _ in range(self.random.randrange(2 * jobs // kills)):
                    self.store(client)
                if self.random.random() < 0.5:
                    client.publish("jobs/x")
                self.kill(self.random.choice(victims))
            while not self.is_empty(client):
                time.sleep(0.1)  # pytest ends this if nobody works
            for _, worker in self.workers:
                worker.kill()
            self.broker.kill()

    def is_empty(self, client: Client) -> bool:
        """Return whether no job is left."""
        with contextlib.suppress(SbusError):
            return not Worker(client).counts()
        return False

    def check(self) -> None:
        """No job is lost; twice is done what a killed worker had begun."""
        workers: dict[int, list[int]] = {}
        for line in self.done.read_text().splitlines():
            lease, worker = line.split()
            job = int(lease.partition(".")[0])
            workers.setdefault(job, []).append(int(worker))
        # The number of a job that is lost may be given to the next one
        lost = len(self.numbers) - len({*self.numbers} & {*workers})
        assert not lost, f"{lost} of {len(self.numbers)} jobs are lost"
        for earlier in workers.values():
            assert self.killed.issuperset(earlier[:-1])


# ---- Storm


@SOAK
@pytest.mark.parametrize("seed", range(either(4, 1)))
def test_nothing_is_lost(directory: Path, seed: int) -> None:
    """Whatever is killed, each job is done, and twice only where its worker
    was killed between doing it and saying so.
    """
    storm = Storm(directory, seed)
    storm.run(either(50, 8), either(3_750, 80))
    storm.check()
