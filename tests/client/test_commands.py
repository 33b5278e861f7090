"""Tests of the everyday commands: sub, pub, request, reply, stats and such."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client_ends import beside
from commands import (
    is_gone,
    publish_all,
    ready,
    run_here,
    sbus,
    served,
    subscribed,
    wait_for_patterns,
    with_file,
)
from packets import HEAD_BYTES, WHOAMI, publications, publish
from processes import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    Result,
    outcome,
    run,
    started,
)
from real_bus import Listener, Peer, RealBus
from sbus_client import PACKET_BYTES_MAX, Message
from tools import json_lines

ROOM = PACKET_BYTES_MAX - HEAD_BYTES  # for a payload under the key `k`
Command = Callable[..., Result]


@pytest.fixture(params=["tools", "sbus_client.py"])
def command(request: pytest.FixtureRequest, bus: RealBus) -> Command:
    """Run the full command line, and the small one."""

    def run_it(*arguments: str, **options: Any) -> Result:
        options = {"env": ENVIRONMENT, "input": "", **options}
        return run(request.param, "-a", bus.path, *arguments, **options)

    return run_it


@pytest.fixture
def peer(bus: RealBus) -> Iterator[Peer]:
    with subscribed(bus) as peer:
        yield peer


# ---- What the small command line of sbus_client.py can do as well


@pytest.mark.parametrize(
    "words, payload",
    [
        (["v"], b"v"),
        ([""], b""),
        (["-"], b"one\n\n two \r\nthree"),
        ([], b"one\n\n two \r\nthree"),
        (["--", "-\udcff\udcc3\udca9"], b"-\xff\xc3\xa9"),
    ],
)
def test_pub(command: Command, peer: Peer, words: Any, payload: bytes) -> None:
    """[PUB-1] [KEY-1] A payload is an argument or standard input, as it is;
    bytes of no text are published as they were given.
    """
    text = "one\n\n two \r\nthree"
    assert command("pub", "\udcff", *words, input=text) == (0, "", "")
    assert peer.fence() == [publish(b"\xff", payload)]


@pytest.mark.parametrize(
    "option, output",
    [
        ("-n2", "a\\tb\t\\xff \\x00\\n\\x7f'é\n\\\\xff\t\\xc2\\x85\n"),
        ("--raw", "\udcff \0\n\x7f'é\x85"),
    ],
)
def test_sub(command: Command, bus: RealBus, option: str, output: str) -> None:
    """A line is the key, a tab and the payload; what would not print is
    escaped.
    """
    text = {"errors": "surrogateescape", "encoding": "utf-8"}
    words = ("sub", "a\tb", "-n2", option, r"\xff")
    with beside(lambda: command(*words, **text)) as done:
        wait_for_patterns(bus, 2)
        first = ("a\tb", b"\xff \0\n\x7f'\xc3\xa9")
        publish_all(bus.path, ("x", b""), first, (rb"\xff", b"\xc2\x85"))
    assert done.result() == (0, output, "")


@pytest.mark.parametrize(
    "words, status, output, error",
    [
        ("sub -t0.1", 0, "", ""),
        ("sub -t0.1 -n3", 1, "", "out of time: heard 0 of 3"),
        ("request a -t0.1", 1, "", "nobody answered 'a' within .* s at .*"),
        ("whoami", 0, rf"!/cred/{os.getgid()}/{os.getuid()}/\d+\n", ""),
    ],
)
def test_line(
    command: Command, words: str, status: int, output: str, error: str
) -> None:
    """[CRED-2] A line ends with a status, and at most one error.

    A time that is over is an error if a count is not reached.
    """
    done = command(*words.split())
    assert done.status == status
    assert re.fullmatch(output, done.output)
    assert re.fullmatch(f"sbus.*: {error}\n" if error else "", done.errors)


@pytest.mark.parametrize(
    "options, answer", [([], "x\\ty\\n\n"), (["--raw"], "x\ty\n")]
)
def test_request(
    command: Command, bus: RealBus, options: list[str], answer: str
) -> None:
    """[CRED-10] The first answer is printed."""
    with ready(bus.path, "reply", "a", "--", "cat", "-") as process:
        words = ("request", "-t99", *options, "a")
        assert command(*words, "-", input="x\ty\n") == (0, answer, "")
        assert command(*words).output == ("" if options else "\n")
        process.terminate()


# ---- sub: print messages


def test_patterns_of_sub(listener: Listener) -> None:
    """Patterns are sent as they are, and messages alone are printed."""
    words = ("sub", "--", "-x", "\udcff\udcc3\udca9")
    with served(listener, *words) as (process, server):
        assert server.receive() == b"SUB -x"
        assert server.receive() == b"SUB \xff\xc3\xa9"
        server.send(b"CMSG x\0v", b"MSG k\0v")
        server.wire.close()
        done = outcome(process)
    assert done.output == "k\tv\n" and is_gone(done, listener.path)


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_signal(listener: Listener, number: int, status: int) -> None:
    """A signal ends sub without another word."""
    with served(listener, "sub") as (process, server):
        server.receive()
        process.send_signal(number)
        assert outcome(process) == (status, "", "")
        assert server.is_disconnected()


@pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
def test_reader_that_goes_away(listener: Listener, file: str) -> None:
    """A line is printed at once, and sub ends silently with its reader; that
    of sbus_client.py at the next message.
    """
    words = [sys.executable, str(ROOT / file), "-a", listener.path, "sub"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words, stdout=pipe, stderr=pipe) as process,
        listener.accept() as server,
    ):
        assert server.receive() == b"SUB "
        server.send(b"MSG k\0one")
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"k\tone\n"
        process.stdout.close()
        if file == "sbus_client.py":
            server.send(b"MSG k\0two")
        assert process.wait(SECONDS_MAX) == 1
        assert process.stderr.read() == b""


def test_ready_without_a_reader(bus: RealBus) -> None:
    """The command says why it ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w"):
        words = ("sub", f"--ready-fd={writer}")
        done = sbus(bus.path, *words, pass_fds=[writer])
    assert done == (1, "", f"sbus: --ready-fd {writer}: Broken pipe\n")


def test_time_runs_out_before_it_is_ready(directory: Path) -> None:
    """The command ends, although there is no bus."""
    path = str(directory / "bus")
    with open(os.devnull, "w") as file:
        words = ("sub", "-qt0.1", "--reconnect", f"--ready-fd={file.fileno()}")
        done = sbus(path, *words, pass_fds=[file.fileno()])
    assert done == (1, "", f"sbus: there is no bus at {path}\n")


@pytest.mark.parametrize("words", ["sub --last", "keep"])
def test_bus_lost_before_it_answers(listener: Listener, words: str) -> None:
    """The command asks the next one."""
    words += " --reconnect k"
    with served(listener, *words.split()) as (process, server):
        assert WHOAMI in iter(server.receive, b"")
        server.wire.close()
        with listener.accept() as server:
            assert WHOAMI in iter(server.receive, b"")
            process.kill()


def test_reconnecting(directory: Path) -> None:
    """sub may begin before the server, and goes on with the next."""
    path = str(directory / "bus")
    with started(path, "sub", "--reconnect", "-n", "2", "k") as process:
        assert process.stdout and process.stderr
        there_is_none = f"no bus at {path} yet: waiting for one"
        for remark in there_is_none, f"the bus at {path} has gone: waiting":
            assert process.stderr.readline().startswith(f"sbus: {remark}")
            with RealBus(directory):
                connected = f"sbus: connected to {path}\n"
                assert process.stderr.readline() == connected
                publish_all(path, ("k", b"v"))
                assert process.stdout.readline() == "k\tv\n"
        assert outcome(process) == (0, "", "")


def test_discarding(listener: Listener) -> None:
    """sub asks for the mode first, and for the count of missed messages at its
    end.
    """
    words = ("sub", "--discard", "-n1")
    with served(listener, *words) as (process, server):
        assert server.receive() == b"CMSG blocking/soft/discard"
        assert server.receive() == b"SUB "
        server.send(b"MSG k\0v")
        assert server.receive() == b"CMSG stats"
        server.send(b'CMSG stats\0{"discarded": 1200}')
        remark = "sbus: missed 1,200 messages\n"
        assert outcome(process) == (0, "k\tv\n", remark)


@pytest.mark.parametrize("options", [[], ["-q"]])
def test_what_is_too_large(listener: Listener, options: list[str]) -> None:
    """A packet above the limit is left out, and a remark says so."""
    env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "100000"}
    large = publish(b"k", bytes(110_000))
    words = ("sub", "--count=2", *options)
    with served(listener, *words, env=env) as (process, server):
        server.send(publish(b"k", b"1"), large, large, b"MSG k\0002")
        done = outcome(process)
    assert (done.status, done.output) == (0, "k\t1\nk\t2\n")
    text = "sbus: a packet of 110006 bytes was received and lost; .*"
    text += "; SBUS_MAX_PACKET raises it\n"
    assert re.fullmatch("" if options else text * 2, done.errors)


def test_json(listener: Listener) -> None:
    """Each message is an object a line.  Text that is no UTF-8 is in base64,
    and a time is first.
    """
    before = time.time_ns()
    words = ("sub", "-n", "2", "--json", "--time")
    with served(listener, *words) as (process, server):
        server.send(b"MSG k\0\xff\0", "MSG é\0two".encode())
        done = outcome(process)
    assert (done.status, done.errors) == (0, "")
    first, second = map(json.loads, done.output.splitlines())
    assert before < first.pop("t") < second.pop("t") < time.time_ns()
    payload = base64.b64encode(b"\xff\0").decode("ascii")
    assert first == {"key": "k", "payload_base64": payload}
    assert second == {"key": "é", "payload": "two"}


def test_time(listener: Listener) -> None:
    """A time is of the form of ISO 8601, in UTC."""
    with served(listener, "sub", "--time", "-n1") as (process, server):
        server.send(b"MSG k\0v\x1b[31m")
        done = outcome(process)
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
    assert (done.status, done.errors) == (0, "")
    assert re.fullmatch(rf"{form}\tk\tv\\x1b\[31m\n", done.output)


# ---- pub: publish messages


@pytest.mark.parametrize(
    "way, before, place", [([], "", ""), (["--lines"], "one\n", "message 2: ")]
)
def test_limit(
    bus: RealBus, peer: Peer, way: Any, before: str, place: str
) -> None:
    """[LIMIT-1] The largest message fits, and a byte more is told."""
    text = before + "x" * ROOM
    assert sbus(bus.path, "pub", "k", *way, input=text) == (0, "", "")
    assert peer.fence()[-1] == publish(b"k", b"x" * ROOM)
    done = sbus(bus.path, "pub", "k", *way, input=f"{text}x")
    error = f"{place}a packet of 409601 bytes is above the limit of"
    assert done == (1, "", f"sbus: {error} 409600 bytes\n")
    done = sbus(bus.path, "pub", "k", *way, input="x" * 500_000)
    error = "standard input: a message over 409,600 bytes"
    assert done == (1, "", f"sbus: {error}\n")
    assert peer.fence() == [b"MSG k\0one"] * len(way)


@pytest.mark.parametrize("way", [[], ["--lines"], ["--json"]])
def test_endless_input(bus: RealBus, peer: Peer, way: list[str]) -> None:
    """[LIMIT-1] Input above the limit is not read to its end."""
    key = [] if way == ["--json"] else ["k"]
    with open("/dev/zero") as zero:
        done = sbus(bus.path, "pub", *key, *way, stdin=zero)
    assert (done.status, done.output) == (1, "")
    assert done.errors.count("\n") == 1 and peer.fence() == []


def test_lines_are_published_at_once(bus: RealBus, peer: Peer) -> None:
    """A line does not wait for the next one."""
    pipe = {"stdin": subprocess.PIPE}
    with started(bus.path, "pub", "k", "--lines", **pipe) as process:
        assert process.stdin
        process.stdin.write("one\n")
        process.stdin.flush()
        assert peer.receive() == b"MSG k\0one"
        process.stdin.close()


def test_messages_in_json(bus: RealBus, peer: Peer) -> None:
    """pub publishes what sub or record writes as it was."""
    messages = [Message("é".encode(), b"a\nb"), Message(b"\xff", b"\0\xff\n")]
    messages.append(Message(b"", b""))
    lines = [json_lines.as_json(message, 1) for message in messages]
    lines.append(b'{"rec": "r", "key": "\\u00ff", "data": "AP8K"}\n')
    text = b"".join(lines).decode("ascii")
    assert sbus(bus.path, "pub", "--json", input=text) == (0, "", "")
    messages.append(messages[1])
    assert peer.fence() == [publish(*message) for message in messages]


@pytest.mark.parametrize(
    "line",
    [
        "k v",
        "[]",
        "[" * 100_000,
        '{"key": 5, "payload": ""}',
        '{"key": "k", "payload_base64": "?"}',
        '{"rec": "r", "key": "\\u20ac", "data": ""}',
    ],
)
def test_line_that_is_no_message(bus: RealBus, peer: Peer, line: str) -> None:
    """An error names a line that is no message; those before are published."""
    text = f'{{"key": "k", "payload": ""}}\n{line}\n'
    done = sbus(bus.path, "pub", "--json", input=text)
    error = "sbus: line 2 of standard input is not a message as sub --json"
    assert done == (1, "", f"{error} writes it\n")
    assert peer.receive() == publish(b"k")


def test_rate(bus: RealBus, peer: Peer) -> None:
    """A message waits for its time, the first one does not."""
    start = time.monotonic()
    words = ("pub", "k", "--lines", "--rate=40")
    assert sbus(bus.path, *words, input="v\n" * 11) == (0, "", "")
    assert time.monotonic() - start >= 10 / 40
    assert peer.fence() == [publish(b"k", b"v")] * 11


# ---- reply: answer requests


def test_failures_of_reply(bus: RealBus) -> None:
    """[CRED-10] An asker learns what fails, and reply goes on.  A long text
    of a failure is cut, so that it fits.
    """
    script = "case $SBUS_KEY in a/large) head -c 500000 /dev/zero;; "
    script += "a/long) printf %05000d 0; exit 1;; a/mute) exit 4;; "
    script += '*) echo "$SBUS_KEY: $(cat)"; exit 3; esac'
    words = ("reply", "a/*", "sh", "-c", script)
    env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "2000"}
    with ready(bus.path, *words, env=env) as process:
        publish_all(bus.path, ("a/1", b"no request"))
        publish_all(bus.path, ("a/1", b"!/cred/1/2/3/x/!/y\0"))
        texts = []
        for key in "a/large", "a/long", "a/mute", "a/b":
            done = sbus(bus.path, "request", "-t99", key, "x")
            assert (done.status, done.output) == (1, "")
            texts.append(done.errors.removeprefix("sbus: ").strip())
        process.terminate()
        remarks = outcome(process).errors.splitlines()
    assert texts[0].startswith("a packet of 5000")
    assert texts[1:] == ["0" * 500, "sh: status 4", "a/b: x"]
    assert remarks == [
        f"sbus: a/large fails: {texts[0]}",
        "sbus: a/long fails: sh: status 1",
        "sbus: a/mute fails: sh: status 4",
        "sbus: a/b fails: sh: status 3",
    ]


def test_no_command(bus: RealBus) -> None:
    """An asker learns that there is no program of this name."""
    # A place on PATH may be one that this user cannot look at
    with ready(bus.path, "reply", "k", "/no/such-program") as process:
        done = sbus(bus.path, "request", "-t99", "k", "x")
        text = "[Errno 2] No such file or directory: '/no/such-program'"
        assert done == (1, "", f"sbus: {text}\n")
        process.terminate()
        assert outcome(process).errors == f"sbus: k fails: {text}\n"


def test_jobs(bus: RealBus, directory: Path) -> None:
    """Commands run side by side: each of three waits for the others."""
    script = f"cd {directory}; touch $(cat); until [ -e 1 -a -e 2 -a -e 3 ]"
    words = ("sh", "-c", f"{script}; do sleep 0.01; done")
    with (
        ready(bus.path, "reply", "--jobs=3", "a", *words) as process,
        ThreadPoolExecutor(3) as pool,
    ):
        ask = functools.partial(sbus, bus.path, "request", "-t99", "a")
        assert [*pool.map(ask, "123")] == [(0, "\n", "")] * 3
        process.terminate()


# ---- Servers that do not answer


@pytest.mark.parametrize(
    "words",
    ["whoami", "stats", "clients", "pub k v", "request k"]
    + ["sbus_client.py request k", "sbus_client.py whoami"],
)
def test_silence(listener: Listener, words: str) -> None:
    """One line says in time that the server does not answer."""
    command = [*with_file(words), "-a", listener.path, "--timeout=0.1"]
    status, output, errors = run_here(*command)
    error = f"the server does not answer at {listener.path}\n"
    assert (status, output, errors.partition(": ")[2]) == (1, "", error)


# ---- stats and clients: what the server has counted


def test_tables(bus: RealBus) -> None:
    """[CTL-5] An owner sees a row for each client, and for each user."""
    with bus.connect() as peer, bus.connect() as second:
        peer.send(b"SUB k", b"SUB l", *publications(1234))
        assert all(peer.receive() for _ in range(1234))
        peer.send(b"CMSG blocking/soft/block")
        peer.fence()
        second.fence()
        tables = [
            sbus(bus.path, *words.split())
            for words in ("stats", "clients", "stats --json", "clients --json")
        ]
    assert {(done.status, done.errors) for done in tables} == {(0, "")}
    users, clients, *objects = [done.output.splitlines() for done in tables]
    uid, pid = str(os.getuid()), str(os.getpid())
    counts, rows = [json.loads(text) for (text,) in objects]
    assert counts["users"][uid]["clients"] == 3
    assert rows["1"]["pid"] == os.getpid()
    assert len({len(line) for line in users}) == 1
    heading, client, user = [line.split() for line in users]
    assert heading[:3] == ["CLIENTS", "PATTERNS", "PUBLISHED"]
    assert client == ["client", "3", *"0000000"]
    assert user[:6] == ["user", uid, "3", "2", "1,234", "1,236"]
    heading, *rows = [line.split() for line in clients]
    names = "CLIENT UID PID PATTERNS BACKLOG MODES PAUSED BY"
    assert " ".join(heading) == names and len(rows) == 3
    assert ["1", uid, pid, "2", "0", "soft/block"] in [r[:6] for r in rows]


def test_metrics(bus: RealBus) -> None:
    """Metrics are of the OpenMetrics format, and say what the table does."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    with bus.connect() as peer:
        peer.send(b"SUB k", *publications(3))
        done = sbus(bus.path, "stats", "--openmetrics")
    assert (done.status, done.errors) == (0, "")
    families = parser.text_string_to_metric_families(done.output)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["uid"] for sample in samples} == {str(os.getuid())}
    values = {sample.name: sample.value for sample in samples}
    assert (values["sbus_clients"], values["sbus_published_total"]) == (2, 3)
    assert len(values) == 8


ONE = b'"clients":{"7":{"uid":0,"backlog_bytes":1234,"paused_by":[2,3]}}'
SOME_OF_MANY = b'{"users":{"0":{"clients":1200}},' + ONE + b"}"
NOT_TOLD = b'{"client":7,"new":1,"paused":2}'  # of others


@pytest.mark.parametrize(
    "words, answer, row, error",
    [
        ("stats", NOT_TOLD, "client 7 2", ""),
        ("clients", b"{%b}" % ONE, "7 0 1,234 2, 3", ""),
        ("clients", SOME_OF_MANY, "7 0 1,234 2, 3", "1 of 1,200 clients"),
        ("clients", NOT_TOLD, "", "no clients: only root and the bus o"),
        ("stats --openmetrics", NOT_TOLD, "", "no metrics: only root"),
    ],
)
def test_what_is_not_told(
    listener: Listener, words: str, answer: bytes, row: str, error: str
) -> None:
    """[CTL-5] A table without rows of others is empty, or one line says so."""
    with served(listener, *words.split()) as (process, server):
        assert server.receive() == b"CMSG stats"
        server.send(b"CMSG stats\0" + answer)
        status, output, errors = outcome(process)
    assert status == (not row)
    rows = [line.split() for line in output.splitlines()[1:]]
    assert rows == [row.split()] * bool(row)
    assert errors.startswith(f"sbus: {error}" if error else "")
    assert errors.count("\n") == bool(error)
