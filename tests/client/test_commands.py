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
import tempfile
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
    sbus,
    served,
    subscribed,
    wait_for_patterns,
)
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from processes import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    Result,
    outcome,
    run,
    started,
)
from real_bus import Listener, Peer, RealBus, seqpacket_pair
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


class TestBoth:
    """What the small command line of sbus_client.py can do as well."""

    @pytest.mark.parametrize(
        "words, payloads",
        [
            (["v"], [b"v"]),
            ([""], [b""]),
            (["-"], [b"one\n\n two \r\nthree"]),
            ([], [b"one\n\n two \r\nthree"]),
            (["--", "-\udcffé"], [b"-\xff\xc3\xa9"]),
        ],
    )
    def test_pub(
        self, command: Command, peer: Peer, words: Any, payloads: list[bytes]
    ) -> None:
        """[PUB-1] [KEY-1] A payload is an argument, standard input as it is,
        or a line of it; bytes of no text are published as they were given.
        """
        text = "one\n\n two \r\nthree"
        assert command("pub", "\udcff", *words, input=text) == (0, "", "")
        assert peer.fence() == [publish(b"\xff", each) for each in payloads]

    @pytest.mark.parametrize(
        "option, output",
        [
            ("-n2", "a\\tb\t\\xff \\x00\\n\\x7f'é\n\\\\xff\t\\xc2\\x85\n"),
            ("--raw", "\udcff \0\n\x7f'é\x85"),
        ],
    )
    def test_sub(
        self, command: Command, bus: RealBus, option: str, output: str
    ) -> None:
        """A line is the key, a tab and the payload; others are escaped."""
        text = {"errors": "surrogateescape", "encoding": "utf-8"}
        words = ("sub", "-n2", option, "a\tb", r"\xff")
        with beside(lambda: command(*words, **text)) as done:
            wait_for_patterns(bus, 2)
            first = ("a\tb", b"\xff \0\n\x7f'\xc3\xa9")
            publish_all(bus.path, ("x", b""), first, (rb"\xff", b"\xc2\x85"))
        assert done.result() == (0, output, "")

    def test_output_that_nobody_reads(self, bus: RealBus) -> None:
        """`sbus_client.py sub` ends silently at the first message."""
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, str(ROOT / "sbus_client.py")]

        def sub() -> subprocess.CompletedProcess[bytes]:
            return subprocess.run(
                [*words, "-a", bus.path, "sub"],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                timeout=SECONDS_MAX,
            )

        with beside(sub) as done:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("k", b"v"))
        os.close(writer)
        assert (done.result().returncode, done.result().stderr) == (1, b"")

    def test_sub_without_a_pattern(
        self, command: Command, bus: RealBus
    ) -> None:
        """It hears all."""
        with beside(lambda: command("sub", "-n1")) as done:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("x", b"y"))
        assert done.result() == (0, "x\ty\n", "")

    @pytest.mark.parametrize("count", [[], ["-n", "3"]])
    def test_time_is_over(self, command: Command, count: list[str]) -> None:
        """That is an error if a count is not reached."""
        done = command("sub", "-t", "0.1", *count)
        what = "out of time: heard 0 of 3\n" if count else ""
        assert (done.status, done.output) == (len(count) // 2, "")
        assert done.errors.partition(": ")[2] == what

    @pytest.mark.parametrize(
        "arguments, answer", [((), "x\\ty\\n\n"), (("--raw",), "x\ty\n")]
    )
    def test_request(
        self, command: Command, bus: RealBus, arguments: Any, answer: str
    ) -> None:
        """[CRED-10] The first answer is printed."""
        with started(bus.path, "reply", "a", "--", "cat", "-") as process:
            wait_for_patterns(bus, 1)
            asked = ("request", "-t99", *arguments, "a")
            assert command(*asked, "-", input="x\ty\n") == (0, answer, "")
            assert command(*asked).output == answer[-1:] * (not arguments)
            process.terminate()

    @pytest.mark.parametrize(
        "answers, what",
        [
            ([ANSWER], "nobody answered 'a' within X s"),
            ([], "the server does not answer"),
        ],
    )
    def test_nobody_answers(
        self, command: Command, answers: list[bytes], what: str
    ) -> None:
        """One line says so; another one that the server is stopped."""
        ours, theirs = seqpacket_pair()
        with Peer(theirs) as server, ours:
            server.send(*answers)
            where = f"/dev/fd/{ours.fileno()}"
            words = ("request", "a", "-t0.1", "-a", where)
            done = command(*words, pass_fds=[ours.fileno()])
        assert (done.status, done.output) == (1, "")
        form = re.escape(f"{what} at {where}\n").replace("X", r"[0-9.]+")
        assert re.fullmatch(form, done.errors.partition(": ")[2])

    def test_whoami(self, command: Command) -> None:
        """[CRED-2] The server's answer is printed."""
        form = rf"!/cred/{os.getgid()}/{os.getuid()}/\d+\n"
        assert re.fullmatch(form, command("whoami").output)


class TestSub:
    """sub: print messages."""

    @pytest.mark.parametrize(
        "words, patterns",
        [("-- -x \udcffé", [b"SUB -x", b"SUB \xff\xc3\xa9"]), ("", [b"SUB "])],
    )
    def test_what_is_sent(
        self, listener: Listener, words: str, patterns: list[bytes]
    ) -> None:
        """[MATCH-4] Patterns as they are; the empty one for none."""
        with served(listener, "sub", *words.split()) as (process, server):
            assert [server.receive() for _ in patterns] == patterns
            server.send(b"CMSG x\0v", b"MSG k\0v")
            server.wire.close()
            done = outcome(process)
        assert done.output == "k\tv\n" and is_gone(done, listener.path)

    @pytest.mark.parametrize(
        "number, status",
        [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
    )
    def test_signal(
        self, listener: Listener, number: int, status: int
    ) -> None:
        """A signal ends sub without another word."""
        with served(listener, "sub") as (process, server):
            server.receive()
            process.send_signal(number)
            assert outcome(process) == (status, "", "")
            assert server.is_disconnected()

    def test_reader_that_goes_away(self, listener: Listener) -> None:
        """A line is printed at once; sub ends silently with its reader."""
        with served(listener, "sub") as (process, server):
            server.send(b"MSG k\0one")
            assert process.stdout.readline() == "k\tone\n"
            process.stdout.close()  # and no other message comes
            assert process.wait(SECONDS_MAX) == 1
            assert process.stderr.read() == ""

    def test_ready(self, bus: RealBus) -> None:
        """A script that waits for the line loses nothing after it."""
        reader, writer = os.pipe()
        arguments = ("sub", f"--ready-fd={writer}", "--count=1", "k")
        with started(bus.path, *arguments, pass_fds=(writer,)) as process:
            os.close(writer)
            with open(reader) as ready:
                assert ready.read() == "ready\n"
            publish_all(bus.path, ("k", b"v"))
            assert outcome(process) == (0, "k\tv\n", "")

    def test_ready_without_a_reader(self, bus: RealBus) -> None:
        """It says why it ends."""
        reader, writer = os.pipe()
        os.close(reader)
        words = ("sub", f"--ready-fd={writer}")
        done = sbus(bus.path, *words, pass_fds=[writer])
        os.close(writer)
        what = f"sbus: --ready-fd {writer}: Broken pipe\n"
        assert done == (1, "", what)

    def test_time_runs_out_before_it_is_ready(self, directory: Path) -> None:
        """It ends, although there is no bus."""
        with open(os.devnull, "w") as ready:
            fd = ready.fileno()
            words = ("sub", "-qt0.1", "--reconnect", f"--ready-fd={fd}")
            path = str(directory / "bus")
            done = sbus(path, *words, pass_fds=[fd])
        assert done == (1, "", f"sbus: there is no bus at {path}\n")

    @pytest.mark.parametrize("words", ["sub --last", "keep"])
    def test_bus_lost_before_it_answers(
        self, listener: Listener, words: str
    ) -> None:
        """The command asks the next one."""
        words += " --reconnect k"
        with served(listener, *words.split()) as (process, server):
            while server.receive() != WHOAMI:
                pass
            server.wire.close()
            with listener.accept() as following:
                while following.receive() != WHOAMI:
                    pass
                process.kill()

    def test_reconnecting(self, directory: Path) -> None:
        """It may begin before the server, and goes on with the next."""
        path = str(directory / "bus")
        with started(path, "sub", "--reconnect", "-n", "2", "k") as process:
            assert process.stdout and process.stderr
            there_is_none = f"no bus at {path} yet: waiting for one"
            for what in there_is_none, f"the bus at {path} has gone: waiting":
                assert process.stderr.readline().startswith(f"sbus: {what}")
                with RealBus(directory):
                    connected = f"sbus: connected to {path}\n"
                    assert process.stderr.readline() == connected
                    publish_all(path, ("k", b"v"))
                    assert process.stdout.readline() == "k\tv\n"
            assert outcome(process) == (0, "", "")

    def test_discarding(self, listener: Listener) -> None:
        """The mode is asked for first, and what was missed in the end."""
        words = ("sub", "--discard", "-n1")
        with served(listener, *words) as (process, server):
            assert server.receive() == b"CMSG blocking/soft/discard"
            assert server.receive() == b"SUB "
            server.send(b"MSG k\0v")
            assert server.receive() == b"CMSG stats"
            server.send(b'CMSG stats\0{"discarded": 1200}')
            what = "sbus: missed 1,200 messages\n"
            assert outcome(process) == (0, "k\tv\n", what)

    @pytest.mark.parametrize("quiet", [[], ["-q"]])
    def test_what_is_too_large(
        self, listener: Listener, quiet: list[str]
    ) -> None:
        """It is left out, and said; the rest is printed."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "100000"}
        words = ("sub", "--count=2", *quiet)
        large = publish(b"k", bytes(110_000))
        with served(listener, *words, env=env) as (process, server):
            server.send(publish(b"k", b"1"), large, large, b"MSG k\0002")
            done = outcome(process)
        assert (done.status, done.output) == (0, "k\t1\nk\t2\n")
        what = "sbus: a packet of 110006 bytes was received and lost; .*"
        what += "; SBUS_MAX_PACKET raises it\n"
        assert re.fullmatch("" if quiet else what * 2, done.errors)

    def test_json(self, listener: Listener) -> None:
        """An object a line; what is no text is in base64; a time is first."""
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

    def test_time(self, listener: Listener) -> None:
        """The time has the form of ISO 8601, in UTC."""
        with served(listener, "sub", "--time", "-n1") as (process, server):
            server.send(b"MSG k\0v\x1b[31m")
            done = outcome(process)
        form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
        assert (done.status, done.errors) == (0, "")
        assert re.fullmatch(rf"{form}\tk\tv\\x1b\[31m\n", done.output)


class TestPub:
    """pub: publish messages."""

    @pytest.mark.parametrize(
        "way, before, where",
        [([], "", ""), (["--lines"], "one\n", "message 2: ")],
    )
    def test_limit(
        self, bus: RealBus, peer: Peer, way: Any, before: str, where: str
    ) -> None:
        """[LIMIT-1] The largest message fits, and a byte more is told."""
        text = before + "x" * ROOM
        assert sbus(bus.path, "pub", "k", *way, input=text) == (0, "", "")
        assert peer.fence()[-1] == publish(b"k", b"x" * ROOM)
        done = sbus(bus.path, "pub", "k", *way, input=f"{text}x")
        what = f"{where}a packet of 409601 bytes is above the limit of"
        assert done == (1, "", f"sbus: {what} 409600 bytes\n")
        done = sbus(bus.path, "pub", "k", *way, input="x" * 500_000)
        what = "standard input: a message over 409,600 bytes"
        assert done == (1, "", f"sbus: {what}\n")
        assert peer.fence() == [b"MSG k\0one"] * len(way)

    @pytest.mark.parametrize("way", [[], ["--lines"], ["--json"]])
    def test_endless_input(
        self, bus: RealBus, peer: Peer, way: list[str]
    ) -> None:
        """[LIMIT-1] Input above the limit is not read to its end."""
        key = [] if way == ["--json"] else ["k"]
        with open("/dev/zero") as zero:
            done = sbus(bus.path, "pub", *key, *way, stdin=zero)
        assert (done.status, done.output) == (1, "")
        assert done.errors.count("\n") == 1 and peer.fence() == []

    def test_lines_are_published_at_once(
        self, bus: RealBus, peer: Peer
    ) -> None:
        """A line does not wait for the next one."""
        pipe = {"stdin": subprocess.PIPE}
        with started(bus.path, "pub", "k", "--lines", **pipe) as process:
            assert process.stdin
            process.stdin.write("one\n")
            process.stdin.flush()
            assert peer.receive() == b"MSG k\0one"
            process.stdin.close()

    def test_messages_in_json(self, bus: RealBus, peer: Peer) -> None:
        """What sub or record writes is published as it was."""
        some = ("é".encode(), b"a\nb"), (b"\xff", b"\0\xff\n"), (b"", b"")
        lines = [json_lines.as_json(Message(*one), 1) for one in some]
        lines.append(b'{"rec": "r", "key": "\\u00ff", "data": "AP8K"}\n')
        text = b"".join(lines).decode("ascii")
        assert sbus(bus.path, "pub", "--json", input=text) == (0, "", "")
        assert peer.fence() == [publish(*one) for one in (*some, some[1])]

    @pytest.mark.parametrize(
        "line",
        [
            "k v",
            "[]",
            "[" * 100_000,
            '{"key": 5, "payload": ""}',
            '{"key": "k", "payload_base64": "?"}',
            '{"rec": "r", "key": "\u20ac", "data": ""}',
        ],
    )
    def test_line_that_is_no_message(
        self, bus: RealBus, peer: Peer, line: str
    ) -> None:
        """It is named; those before are published."""
        text = f'{{"key": "k", "payload": ""}}\n{line}\n'
        done = sbus(bus.path, "pub", "--json", input=text)
        what = "sbus: line 2 of standard input is not a message as sub --json"
        assert done == (1, "", f"{what} writes it\n")
        assert peer.receive() == publish(b"k")

    def test_rate(self, bus: RealBus, peer: Peer) -> None:
        """A message waits for its time, the first one does not."""
        start = time.monotonic()
        words = ("pub", "k", "--lines", "--rate=40")
        assert sbus(bus.path, *words, input="v\n" * 11) == (0, "", "")
        assert time.monotonic() - start >= 10 / 40
        assert peer.fence() == [publish(b"k", b"v")] * 11


class TestReply:
    """reply: answer requests."""

    def test_remarks(self, bus: RealBus) -> None:
        """[CRED-10] Whoever asks learns what fails, and it goes on."""
        script = "case $SBUS_KEY in a/large) head -c 500000 /dev/zero;; "
        script += 'a/mute) exit 4;; *) echo "$SBUS_KEY: $(cat)"; exit 3; esac'
        with started(bus.path, "reply", "a/*", "sh", "-c", script) as process:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("a/1", b"no request"))
            publish_all(bus.path, ("a/1", b"!/cred/1/2/3/x/!/y\0"))
            texts = []
            for key in "a/large", "a/mute", "a/b":
                done = sbus(bus.path, "request", "-t99", key, "x")
                assert (done.status, done.output) == (1, "")
                texts.append(done.errors.removeprefix("sbus: ").strip())
            process.terminate()
            remarks = outcome(process).errors.splitlines()
        assert texts[0].startswith("a packet of 5000")
        assert texts[1:] == ["sh: status 4", "a/b: x"]
        reasons = [texts[0], "sh: status 4", "sh: status 3"]
        keys = ["a/large", "a/mute", "a/b"]
        assert remarks == [
            f"sbus: {key} fails: {reason}"
            for key, reason in zip(keys, reasons)
        ]

    def test_no_command(self, bus: RealBus) -> None:
        """Whoever asks learns that there is none of this name."""
        with started(bus.path, "reply", "k", "no-such-program") as process:
            wait_for_patterns(bus, 1)
            done = sbus(bus.path, "request", "-t99", "k", "x")
            what = "[Errno 2] No such file or directory: 'no-such-program'"
            assert done == (1, "", f"sbus: {what}\n")
            process.terminate()
            assert outcome(process).errors == f"sbus: k fails: {what}\n"

    def test_ready(self, bus: RealBus) -> None:
        """It says when it is there for requests."""
        reader, writer = os.pipe()
        words = ("reply", "k", "--ready-fd", str(writer), "cat")
        with started(bus.path, *words, pass_fds=[writer]) as process:
            os.close(writer)
            with open(reader) as lines:
                assert lines.read() == "ready\n"
            done = sbus(bus.path, "request", "-t99", "k", "x")
            assert done == (0, "x\n", "")
            process.terminate()

    def test_failure_in_a_small_packet(self, bus: RealBus) -> None:
        """Its text is cut, so that the asker learns of it."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "2000"}
        words = ("reply", "k", "sh", "-c", "printf %05000d 0; exit 1")
        with started(bus.path, *words, env=env) as process:
            wait_for_patterns(bus, 1)
            done = sbus(bus.path, "request", "-t99", "k", "")
            assert done == (1, "", f"sbus: {'0' * 500}\n")
            process.terminate()
            assert "fails: sh: status 1" in outcome(process).errors

    def test_jobs(self, bus: RealBus) -> None:
        """Commands run side by side: each of three waits for the others."""
        with tempfile.TemporaryDirectory() as name:
            script = f"cd {name}; touch $(cat); until [ -e 1 -a -e 2 -a -e 3 ]"
            words = ["sh", "-c", f"{script}; do sleep 0.01; done"]
            command = ("reply", "--jobs", "3", "a", *words)
            with (
                started(bus.path, *command) as process,
                ThreadPoolExecutor(3) as pool,
            ):
                wait_for_patterns(bus, 1)
                ask = functools.partial(sbus, bus.path, "request", "-t99", "a")
                for done in pool.map(ask, "123"):
                    assert done == (0, "\n", "")
                process.terminate()

    def test_reconnect(self, directory: Path) -> None:
        """It may begin before the server."""
        path = str(directory / "bus")
        with started(path, "reply", "--reconnect", "a", "cat") as process:
            assert process.stderr
            assert "waiting for one" in process.stderr.readline()
            with RealBus(directory):
                assert "connected to" in process.stderr.readline()
                done = sbus(path, "request", "-t99", "a", "x")
                assert done == (0, "x\n", "")
            process.terminate()


class TestServer:
    """Servers that do not answer."""

    @pytest.mark.parametrize(
        "words", ["whoami", "stats", "clients", "pub k v", "request k"]
    )
    def test_silence(self, listener: Listener, words: str) -> None:
        """One line says in time that the server does not answer."""
        done = sbus(listener.path, *words.split(), "--timeout=0.1")
        what = f"sbus: the server does not answer at {listener.path}\n"
        assert done == (1, "", what)


class TestStats:
    """stats and clients: what the server has counted."""

    def test_owner_sees_all_users(self, bus: RealBus) -> None:
        """[CTL-5] A row for this client, and one for each user."""
        with bus.connect() as peer, bus.connect() as other:
            peer.send(b"SUB k", b"SUB l", *publications(1234))
            assert all(peer.receive() for _ in range(1234))
            other.fence()
            done = sbus(bus.path, "stats")
            told = json.loads(sbus(bus.path, "stats", "--json").output)
        assert (done.status, done.errors) == (0, "")
        uid = str(os.getuid())
        assert told["users"][uid]["clients"] == 3
        heading, client, user = done.output.splitlines()
        assert len(heading) == len(client) == len(user)
        assert heading.split()[:3] == ["CLIENTS", "PATTERNS", "PUBLISHED"]
        assert client.split() == ["client", "3", *"0000000"]
        assert user.split()[:6] == ["user", uid, "3", "2", "1,234", "1,235"]

    def test_metrics(self, bus: RealBus) -> None:
        """They are of the OpenMetrics format, and say what the table does."""
        parser = pytest.importorskip("prometheus_client.openmetrics.parser")
        with bus.connect() as peer:
            peer.send(b"SUB k", *publications(3))
            done = sbus(bus.path, "stats", "--openmetrics")
        assert (done.status, done.errors) == (0, "")
        families = parser.text_string_to_metric_families(done.output)
        samples = [one for family in families for one in family.samples]
        assert {one.labels["uid"] for one in samples} == {str(os.getuid())}
        values = {one.name: one.value for one in samples}
        some = {"sbus_clients": 2, "sbus_published_total": 3}
        assert some.items() <= values.items() and len(values) == 8

    def test_clients(self, bus: RealBus) -> None:
        """[CTL-5] A row for each."""
        with bus.connect() as peer:
            peer.send(b"CMSG blocking/soft/block", b"SUB k")
            peer.fence()
            done = sbus(bus.path, "clients")
            told = json.loads(sbus(bus.path, "clients", "--json").output)
        assert (done.status, done.errors) == (0, "")
        assert told["1"]["pid"] == os.getpid()
        heading, *rows = done.output.splitlines()
        names = "CLIENT UID PID PATTERNS BACKLOG MODES PAUSED BY"
        assert heading.split() == names.split()
        who = [str(os.getuid()), str(os.getpid())]
        row = ["1", *who, "1", "0", "soft/block"]
        assert len(rows) == 2 and row in [one.split()[:6] for one in rows]

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
        self,
        listener: Listener,
        words: str,
        answer: bytes,
        row: str,
        error: str,
    ) -> None:
        """[CTL-5] It is empty, or one line says so."""
        with served(listener, *words.split()) as (process, server):
            assert server.receive() == b"CMSG stats"
            server.send(b"CMSG stats\0" + answer)
            status, output, errors = outcome(process)
        assert status == (not row)
        rows = [line.split() for line in output.splitlines()[1:]]
        assert rows == [row.split()] * bool(row)
        assert errors.startswith(f"sbus: {error}" if error else "")
        assert errors.count("\n") == bool(error)
