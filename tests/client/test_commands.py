"""Tests of the everyday commands: sub, pub, request, reply, stats and such."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import (
    Terminal,
    is_gone,
    publish_all,
    sbus,
    subscribed,
    wait_for_patterns,
)
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from processes import (
    ENVIRONMENT,
    SECONDS_MAX,
    Result,
    child_process,
    outcome,
    run,
    started,
)
from real_bus import Listener, Peer, RealBus, freeze, thaw, wait_for
from sbus_client import PACKET_BYTES_MAX, Client, Message
from tools import json_lines
from tools.record import Recorder

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


@contextlib.contextmanager
def served(listener: Listener, *words: str, **options: Any) -> Iterator[Any]:
    """Run a command whose server is the test."""
    with (
        started(listener.path, *words, **options) as process,
        listener.accept() as server,
    ):
        yield process, server


@contextlib.contextmanager
def publisher(bus: RealBus, *messages: tuple[str | bytes, bytes]) -> Any:
    """Have a child publish messages again and again."""

    def chatter() -> None:
        with Client(bus.path) as client:
            while True:
                for message in messages:
                    client.publish(*message)
                client.sync()

    with child_process(chatter):
        yield


class TestBoth:
    """What the small command line of sbus_client.py can do as well."""

    @pytest.mark.parametrize(
        "arguments, payload",
        [
            (["v"], b"v"),
            ([""], b""),
            (["-"], b"one\n\n two\r\n"),
            ([], b"one\n\n two\r\n"),
        ],
    )
    def test_pub(
        self, command: Command, peer: Peer, arguments: Any, payload: bytes
    ) -> None:
        """[PUB-1] A payload is an argument, or standard input as it is."""
        text = {"input": "one\n\n two\r\n"}
        assert command("pub", "k", *arguments, **text) == (0, "", "")
        assert peer.receive() == publish(b"k", payload)

    def test_lines(self, command: Command, peer: Peer) -> None:
        """Each line of standard input is a message, without its end."""
        text = "one\n\n two \r\nthree"
        assert command("pub", "k", "--lines", input=text) == (0, "", "")
        payloads = [b"one", b"", b" two \r", b"three"]
        assert peer.fence() == [publish(b"k", text) for text in payloads]

    def test_bytes_of_no_text(self, command: Command, peer: Peer) -> None:
        """[KEY-1] They are published as they were given."""
        text = os.fsdecode(b"\xff\xc3\xa9")
        assert command("pub", "--", text, f"-{text}") == (0, "", "")
        assert peer.receive() == b"MSG \xff\xc3\xa9\0-\xff\xc3\xa9"

    @pytest.mark.parametrize(
        "arguments, output",
        [
            ((), "a\\tb\t\\xff \\x00\\n\\x7f'é\n\\\\xff\t\\xc2\\x85\n"),
            (("--raw",), "\udcff \0\n\x7f'é\x85"),
        ],
    )
    def test_sub(
        self, command: Command, bus: RealBus, arguments: Any, output: str
    ) -> None:
        """A line is the key, a tab and the payload; others are escaped."""
        two = ("a\tb", b"\xff \0\n\x7f'\xc3\xa9"), (rb"\xff", b"\xc2\x85")
        with publisher(bus, ("x", b""), *two):
            patterns = ("a\tb", r"\xff")
            words = ("sub", "-n", "20", *arguments, *patterns)
            text = {"errors": "surrogateescape", "encoding": "utf-8"}
            done = command(*words, **text)
        assert (done.status, done.errors) == (0, "")
        assert output in done.output and "x\t" not in done.output

    @pytest.mark.parametrize("count", [[], ["-n", "3"]])
    def test_time_is_over(self, command: Command, count: list[str]) -> None:
        """That is an error if a count is not reached."""
        done = command("sub", "-t", "0.1", *count)
        what = "the time is over: heard 0 of 3\n" if count else ""
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
            asked = ("request", *arguments, "a")
            assert command(*asked, "-", input="x\ty\n") == (0, answer, "")
            assert command(*asked).output == answer[-1:] * (not arguments)
            process.terminate()

    def test_nobody_answers(self, command: Command, bus: RealBus) -> None:
        """One line says so; another one that the server is stopped."""
        done = command("request", "a", "-t", "0.1")
        assert (done.status, done.output) == (1, "")
        what = r"sbus(_client\.py)?: nobody answered \S+ within 0\.1 s .*\n"
        assert re.fullmatch(what, done.errors)
        freeze(bus)
        done = command("request", "a", "-t", "0.1")
        thaw(bus)
        assert ": the server does not answer" in done.errors

    def test_whoami(self, command: Command) -> None:
        """[CRED-2] The server's answer is printed."""
        form = rf"!/cred/{os.getgid()}/{os.getuid()}/\d+\n"
        assert re.fullmatch(form, command("whoami").output)


class TestSub:
    """sub: print messages."""

    def test_lines_come_at_once(self, bus: RealBus) -> None:
        """They are flushed when nothing waits, and when the bus ends."""
        with started(bus.path, "sub", "a/*", "b/") as process:
            wait_for_patterns(bus, 2)
            keys = ("a/1", "a/1/2", "b/1/2", "c")
            publish_all(bus.path, *((key, b"v") for key in keys))
            assert process.stdout
            assert process.stdout.readline() == "a/1\tv\n"
            assert process.stdout.readline() == "b/1/2\tv\n"
            bus.stop()
            assert is_gone(outcome(process), bus.path)

    @pytest.mark.parametrize(
        "excluded, left",
        [
            ("a/b/", "a/b a/c a/c/d a*b !/cred////a/b"),
            ("a/*", "a/b/c a/c/d a*b !/cred////a/b"),
            ("*/*/", "a/b a/c a*b"),
            ("a*b", "a/b/c a/b a/c a/c/d a*b !/cred////a/b"),
            ("a*", "a/b/c a/b a/c a/c/d !/cred////a/b"),
            ("!/cred//0//a/**", "a/b/c a/b a/c a/c/d a*b"),
            ("", ""),
        ],
    )
    def test_what_is_excluded(
        self, listener: Listener, excluded: str, left: str
    ) -> None:
        """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-6] It is not printed."""
        keys = ["a/b/c", "a/b", "a/c", "a/c/d", "a*b", "!/cred/1/0/2/a/b"]
        words = ("sub", "--exclude", excluded, "--exclude=x/y")
        with started(listener.path, *words) as process:
            with listener.accept() as server:
                server.receive()
                server.send(*(publish(key.encode()) for key in keys))
            printed = outcome(process).output.split("\t\n")[:-1]
        expected = left.replace("!/cred////a/b", "!/cred/1/0/2/a/b").split()
        assert printed == expected

    def test_what_is_sent(self, listener: Listener) -> None:
        """[MATCH-4] Patterns as they are; the empty one for none."""
        text = os.fsdecode(b"\xff\xc3\xa9")
        for words, patterns in (
            (["--", "-x", text], [b"SUB -x", b"SUB \xff\xc3\xa9"]),
            ([], [b"SUB "]),
        ):
            with started(listener.path, "sub", *words) as process:
                with listener.accept() as server:
                    heard = [server.receive() for _ in patterns]
                    server.send(b"CMSG x\0v", b"MSG k\0v")
                assert outcome(process).output == "k\tv\n"
            assert heard == patterns

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
        """When nobody reads its output any more sub ends in silence."""
        with started(listener.path, "sub") as process:
            with listener.accept() as server:
                server.receive()
                server.send(b"MSG k\0one")
                assert process.stdout and process.stderr
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
        done = sbus(bus.path, "sub", "--ready-fd=77")
        assert (done.status, done.output) == (1, "")
        assert re.fullmatch("sbus: .*Bad file descriptor.*\n", done.errors)

    def test_address(self, bus: RealBus) -> None:
        """[CRED-6] A secret pattern is shown with the subscriber's numbers."""
        words = ("sub", "--show-address", "-n1", "-q", "k", "!/cred////a/*")
        with started(bus.path, *words) as process:
            assert process.stderr
            address = process.stderr.readline()
            own = f"!/cred/{os.getgid()}/{os.getuid()}/{process.pid}/a"
            assert address == f"{own}/*\n"
            publish_all(bus.path, (f"{own}/b", b"v"))
            assert outcome(process) == (0, f"{own}/b\tv\n", "")

    def test_address_behind_a_prefix(self, directory: Path) -> None:
        """[CRED-9] What stands before the fields stays."""
        with RealBus(directory, "--cred-prefix", "!/cred/1/2/3") as bus:
            pattern = "!/cred/1/2/3/!/cred//0//x"
            words = ("sub", "--show-address", "-t", "0.1", pattern)
            if os.getuid():
                words = (*words[:-1], pattern.replace("0", f"{os.getuid()}"))
            done = sbus(bus.path, *words)
        own = rf"!/cred/1/2/3/!/cred/{os.getgid()}/{os.getuid()}/\d+/x\n"
        assert done.status == 0 and re.fullmatch(own, done.errors)

    def test_reconnecting(self, directory: Path) -> None:
        """It may begin before the server, and goes on with the next."""
        path = str(directory / "bus")
        with started(path, "sub", "--reconnect", "-n", "2", "k") as process:
            assert process.stdout and process.stderr
            what = f"sbus: there is no bus at {path} yet: waiting for it\n"
            assert process.stderr.readline() == what
            for number in (b"1", b"2"):
                with RealBus(directory) as bus:
                    what = f"sbus: connected to {path}\n"
                    assert process.stderr.readline() == what
                    publish_all(bus.path, ("k", number))
                    line = f"k\t{number.decode()}\n"
                    assert process.stdout.readline() == line
                    if number == b"1":
                        bus.stop()
                        what = f"sbus: the bus at {path} is gone: waiting"
                        told = process.stderr.readline()
                        assert told == f"{what} for another\n"
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
            what = "sbus: 1,200 messages were missed\n"
            assert outcome(process) == (0, "k\tv\n", what)

    @pytest.mark.parametrize("quiet", [[], ["-q"]])
    def test_what_is_too_large(
        self, listener: Listener, quiet: list[str]
    ) -> None:
        """It is left out, said once, and counted; the rest is printed."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "100000"}
        words = ("sub", "--count=2", *quiet)
        large = publish(b"k", bytes(110_000))
        with served(listener, *words, env=env) as (process, server):
            server.send(publish(b"k", b"1"), large, large, b"MSG k\0002")
            done = outcome(process)
        assert (done.status, done.output) == (0, "k\t1\nk\t2\n")
        if quiet:
            assert done.errors == ""
            return
        first, last = done.errors.splitlines()
        assert "a packet of 110006 bytes was received and lost" in first
        assert first.endswith("; SBUS_MAX_PACKET raises it")
        assert last == "sbus: 2 messages were too large"

    def test_json(self, listener: Listener) -> None:
        """An object a line; what is no text is in base64; a time is first."""
        before = time.time_ns()
        words = ("sub", "-n", "2", "--json", "--time")
        with served(listener, *words) as (process, server):
            server.receive()
            server.send(b"MSG k\0\xff\0", "MSG é\0two".encode())
            done = outcome(process)
        assert (done.status, done.errors) == (0, "")
        first, second = map(json.loads, done.output.splitlines())
        assert before < first.pop("t") < second.pop("t") < time.time_ns()
        payload = base64.b64encode(b"\xff\0").decode("ascii")
        assert first == {"key": "k", "payload_base64": payload}
        assert second == {"key": "é", "payload": "two"}

    COLOURS = "\x1b[2m{}\x1b[m\t\x1b[36mk\x1b[m\tv\\x1b[31m\r\n"

    @pytest.mark.parametrize(
        "environment, line",
        [
            ({}, COLOURS),
            ({"NO_COLOR": ""}, COLOURS),
            ({"NO_COLOR": "1"}, "{}\tk\tv\\x1b[31m\r\n"),
            ({"TERM": "dumb"}, "{}\tk\tv\\x1b[31m\r\n"),
        ],
    )
    def test_colour_on_a_terminal(
        self, bus: RealBus, environment: dict[str, str], line: str
    ) -> None:
        """Ours is there, unless not wanted; a message's is escaped."""
        arguments = ("sub", "--time", "--count=1", "-a", bus.path)
        with Terminal(*arguments, env=environment) as terminal:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("k", b"v\x1b[31m"))
            assert terminal.end() == 0
            form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d\d:\d\d"
            stamp = re.search(form, terminal.output)
            assert stamp and terminal.output == line.format(stamp[0])


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

    MESSAGES = [
        Message(b"k", b"v"),
        Message("é".encode(), b"a\nb"),
        Message(b"\xff", b"\0\xff\n"),
        Message(b"", b""),
    ]

    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_messages_in_json(
        self, bus: RealBus, peer: Peer, directory: Path, is_recorded: bool
    ) -> None:
        """What sub or record writes is published as it was."""
        lines = (json_lines.as_json(one, 1) for one in self.MESSAGES)
        text = b"".join(lines).decode("ascii")
        if is_recorded:
            with Recorder(directory / "capture", 1 << 20, 10) as recorder:
                for message in self.MESSAGES:
                    recorder.add(message)
            (file,) = (directory / "capture").iterdir()
            text = file.read_text("ascii")
        assert sbus(bus.path, "pub", "--json", input=text) == (0, "", "")
        assert peer.fence() == [publish(*one) for one in self.MESSAGES]

    @pytest.mark.parametrize(
        "line",
        [
            "k v",
            "[]",
            "5",
            "[" * 100_000,
            '{"key": "k"}',
            '{"key": 5, "payload": ""}',
            '{"key": "k", "payload_base64": "?"}',
            '{"rec": "r", "key": "\u20ac", "data": ""}',
        ],
    )
    def test_line_that_is_no_message(
        self, bus: RealBus, peer: Peer, line: str
    ) -> None:
        """It is named, as a wrong key is; those before are published."""
        text = f'{{"key": "k", "payload": ""}}\n{line}\n'
        done = sbus(bus.path, "pub", "--json", input=text)
        what = "sbus: line 2 of standard input is no message, as sub --json"
        assert done == (1, "", f"{what} writes it\n")
        done = sbus(
            bus.path, "pub", "--json", input='{"key":"!","payload":""}'
        )
        assert done.errors.startswith(
            "sbus: message 1: b'!' has a segment '!'"
        )
        assert peer.fence() == [publish(b"k")]

    def test_rate(self, bus: RealBus, peer: Peer) -> None:
        """A message waits for its time, the first one does not."""
        start = time.monotonic()
        words = ("pub", "k", "v", "--repeat=11", "--rate=40")
        assert sbus(bus.path, *words) == (0, "", "")
        assert time.monotonic() - start >= 10 / 40
        assert peer.fence() == [publish(b"k", b"v")] * 11

    def test_interruption(self, bus: RealBus, peer: Peer) -> None:
        """Ctrl-C ends it."""
        options = ("--repeat=1000000", "--rate=100", "-a", bus.path)
        with Terminal("pub", "k", "v", *options) as terminal:
            assert peer.receive() == publish(b"k", b"v")
            terminal.press(b"\x03")
            assert terminal.end() == 130


class TestReply:
    """reply: answer requests."""

    def test_remarks(self, bus: RealBus) -> None:
        """[CRED-10] What cannot be answered is one, and it goes on."""
        script = "case $SBUS_KEY in a/large) cat /dev/zero;; "
        script += '*) echo "$SBUS_KEY: $(cat)"; exit 3; esac'
        with started(bus.path, "reply", "a/*", "sh", "-c", script) as process:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("a/1", b"no request"))
            publish_all(bus.path, ("a/1", b"!/cred/1/2/3/x/!/y\0"))
            done = sbus(bus.path, "request", "a/large", "-t", "0.5")
            assert done.errors.startswith("sbus: nobody answered")
            done = sbus(bus.path, "request", "a/b", "x")
            assert done == (0, "a/b: x\\n\n", "")
            process.terminate()
            remarks = outcome(process).errors.splitlines()
        failed = "sbus: sh: status 3"
        assert [remarks[0], *remarks[2:]] == [failed, failed]
        what = "sbus: a/large stays without an answer: a packet of 4096"
        assert remarks[1].startswith(what)

    def test_command_that_is_not_there(self, bus: RealBus) -> None:
        """It is one line, when the first request comes."""
        with started(bus.path, "reply", "a", "/nowhere") as process:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("a", b"!/cred/1/2/3/x\0"))
            what = "sbus: /nowhere: No such file or directory\n"
            assert outcome(process) == (1, "", what)


class TestServer:
    """ping and control, and servers that do not answer."""

    def test_ping(self, bus: RealBus) -> None:
        """A line holds four times in milliseconds, in order."""
        done = sbus(bus.path, "ping", "--count=50")
        assert (done.status, done.errors) == (0, "")
        head, tail = done.output.rsplit(": ", 1)
        assert head == f"{bus.path}: 50 round trips"
        times = re.findall(r"(\w+) ([0-9.]+) ms", tail)
        names = ["minimum", "median", "p99", "maximum"]
        assert [name for name, _ in times] == names
        values = [float(value) for _, value in times]
        assert values == sorted(values) and values[0] > 0

    @pytest.mark.parametrize(
        "words",
        ["ping", "whoami", "stats", "clients", "control x", "pub k v"]
        + ["sub --ready-fd=3", "request k"],
    )
    def test_silence(self, listener: Listener, words: str) -> None:
        """One line says in time that the server does not answer."""
        done = sbus(listener.path, *words.split(), "--timeout=0.1")
        what = f"sbus: the server does not answer at {listener.path}\n"
        assert done == (1, "", what)

    def test_control(self, listener: Listener) -> None:
        """[CTL-1] What is printed is what the server answers."""
        for words, packet in (
            (["v"], b"CMSG x\0v"),
            (["-"], b"CMSG x\0some input"),
            ([], b"CMSG x"),
        ):
            words, pipe = ["control", "x", *words], subprocess.PIPE
            with served(listener, *words, stdin=pipe) as (process, server):
                process.stdin.write("some input")
                process.stdin.close()
                process.stdin = None
                assert server.receive() == packet
                assert server.receive() == WHOAMI
                server.send(b"CMSG y\0a\tb", ANSWER)
                assert outcome(process) == (0, "y\ta\\tb\n", "")

    @pytest.mark.parametrize(
        "key, output",
        [
            ("echo/off", ""),
            ("blocking/soft/queue", ""),
            ("!/cred/whoami", r"!/cred/whoami\t!/cred/\d+/\d+/\d+\n"),
            ("stats", r"stats\t\{.*\n"),
        ],
    )
    def test_keys_that_are_known(
        self, bus: RealBus, key: str, output: str
    ) -> None:
        """[CTL-2] A server ignores others, but this command complains."""
        done = sbus(bus.path, "control", key)
        assert (done.status, done.errors) == (0, "")
        assert re.fullmatch(output, done.output)
        done = sbus(bus.path, "control", f"{key}/x")
        what = f"sbus: the server does not answer '{key}/x', and this client"
        assert done == (1, "", f"{what} does not know it\n")


class TestStats:
    """stats and clients: what the server has counted."""

    def answered(
        self, listener: Listener, answer: bytes, *words: str
    ) -> Result:
        """Return how a command ends that a server answers so."""
        with served(listener, *words) as (process, server):
            assert server.receive() == b"CMSG stats"
            server.send(b"CMSG stats\0" + answer)
            return outcome(process)

    def test_owner_sees_all_users(self, bus: RealBus) -> None:
        """[CTL-5] A row for this client, and one for each user."""
        with bus.connect() as peer, bus.connect() as other:
            peer.send(b"SUB k", b"SUB l", *publications(1234))
            heard = [peer.receive() for _ in range(1234)]
            other.fence()
            done = sbus(bus.path, "stats")
            told = json.loads(sbus(bus.path, "stats", "--json").output)
        assert (done.status, done.errors, len(heard)) == (0, "", 1234)
        assert told["users"][str(os.getuid())]["clients"] == 3
        heading, client, user = done.output.splitlines()
        assert len(heading) == len(client) == len(user)
        assert client.split() == ["client", "3", *"0000000"]
        cells = dict(zip(["", *heading.split()], user.split()[1:]))
        assert cells.pop("") == str(os.getuid())
        expected = {"CLIENTS": "3", "PATTERNS": "2", "PUBLISHED": "1,234"}
        expected.update(DELIVERED="1,235", BACKLOG="0")
        assert expected.items() <= cells.items()

    def test_metrics(self, bus: RealBus) -> None:
        """They are of the OpenMetrics format, and say what the table does."""
        parser = pytest.importorskip("prometheus_client.openmetrics.parser")
        with bus.connect() as peer:
            peer.send(b"SUB k", *publications(3))
            done = sbus(bus.path, "stats", "--openmetrics")
        assert (done.status, done.errors) == (0, "")
        families = parser.text_string_to_metric_families(done.output)
        samples = {
            sample.name: (sample.labels, sample.value)
            for family in families
            for sample in family.samples
        }
        user = {"uid": str(os.getuid())}
        assert samples["sbus_clients"] == (user, 2)
        assert samples["sbus_published_total"] == (user, 3)
        assert len(samples) == 8

    def test_clients(self, directory: Path) -> None:
        """[CTL-5] A row for each, with those for whose sake it waits."""
        with (
            RealBus(directory, "--block-timeout=100") as bus,
            bus.connect() as slow,
            bus.connect() as quick,
            Client(bus.path) as watcher,
        ):
            slow.send(b"CMSG blocking/soft/block", b"SUB k")
            slow.fence()

            def is_paused() -> bool:
                with contextlib.suppress(BlockingIOError):
                    packet = publish(b"k", bytes(100_000))
                    quick.wire.send(packet, socket.MSG_DONTWAIT)
                return bool(watcher.stats()["clients"]["2"]["paused_by"])

            wait_for(is_paused)
            done = sbus(bus.path, "clients")
        assert (done.status, done.errors) == (0, "")
        heading, first, second, *others = done.output.splitlines()
        names = "CLIENT UID PID PATTERNS BACKLOG MODES PAUSED BY"
        assert heading.split() == names.split() and len(others) == 2
        number, uid, pid, patterns, backlog, modes = first.split()[:6]
        who = [str(os.getuid()), str(os.getpid())]
        assert [number, uid, pid, patterns] == ["1", *who, "1"]
        assert int(backlog.replace(",", "")) > 0 and modes == "soft/block"
        assert second.split()[::10] == ["2"] and second.split()[-1] == "1"

    def test_only_some_clients(self, listener: Listener) -> None:
        """It is a remark that others did not fit into the answer."""
        answer = b'{"users":{"0":{"clients":1200}},"clients":{"7":{"uid":0}}}'
        done = self.answered(listener, answer, "clients")
        assert done.status == 0 and done.output.split()[-2:] == ["7", "0"]
        assert done.errors == "sbus: 1 of 1,200 clients are shown\n"

    @pytest.mark.parametrize(
        "words, error",
        [
            ("clients", "no clients: only root and the bus owner are told of"),
            ("stats --openmetrics", "no metrics: only root and the bus owner"),
        ],
    )
    def test_those_who_are_not_told(
        self, listener: Listener, words: str, error: str
    ) -> None:
        """[CTL-5] One line says so; what is not there is empty."""
        answer = b'{"client":7,"new":1,"paused":2}'
        done = self.answered(listener, answer, *words.split())
        assert (done.status, done.output) == (1, "")
        assert done.errors.startswith(f"sbus: {error}")
        done = self.answered(listener, answer, "stats")
        assert (done.status, done.errors) == (0, "")
        heading, row = done.output.splitlines()
        assert row.split() == ["client", "7", "2"]
        assert row.index("2") == heading.index("PAUSED") + 5

    @pytest.mark.parametrize("words", ["stats", "clients"])
    @pytest.mark.parametrize(
        "answer",
        [b"", b"\xff", b"5", b'{"client":1,"users":[5],"clients":{"0":5}}'],
    )
    def test_malformed_answer(
        self, listener: Listener, answer: bytes, words: str
    ) -> None:
        """It is one line."""
        done = self.answered(listener, answer, words)
        what = "sbus: the server sent malformed .*\n"
        assert done.status == 1 and re.fullmatch(what, done.errors)
