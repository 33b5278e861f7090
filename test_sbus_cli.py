"""Tests of the command line of sbus_client.py.

Each command runs as a process, against a server or the other end of a
socket of the test's own, and on a pseudo-terminal where that matters.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import random
import re
import resource
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from programs import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    Result,
    child_process,
    gone,
    has_ended,
    outcome,
    run,
    started,
)
from real_bus import (
    Listener,
    Peer,
    RealBus,
    freeze,
    other_user,
    seqpacket,
    seqpacket_pair,
    thaw,
    wait_for,
)
from sbus_client import PACKET_BYTES_MAX, Client, Message, SbusError

FORBIDDEN = "it may not be used by this user: its server lets others in with"
FORBIDDEN += " -g or -o"


def sbus(address: str, *arguments: str, **options: Any) -> Result:
    """Run sbus_client.py to its end."""
    options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, **options}
    if "input" in options:
        del options["stdin"]
    return run("sbus_client.py", "-a", address, *arguments, **options)


def patterns_of(bus: RealBus) -> int:
    """Return how many patterns a server has stored since its start."""
    trace = Path(bus.path).with_name("trace")
    return trace.read_text().count('"ev":"sub"')


def wait_for_patterns(bus: RealBus, count: int) -> None:
    """Return once a server has stored so many patterns."""
    wait_for(lambda: patterns_of(bus) >= count)


def publish_all(address: str, *messages: tuple[str | bytes, bytes]) -> None:
    """Publish messages, and return once they are routed."""
    with Client(address) as client:
        for message in messages:
            client.publish(*message)
        client.sync(SECONDS_MAX)


def handles(pid: int, number: int) -> bool:
    """Return whether a process catches a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\t(\w+)", status)
    assert caught
    return bool(int(caught[1], 16) >> (number - 1) & 1)


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 60,
        rows: int = 8,
        env: dict[str, str] | None = None,
    ) -> None:
        self.master, slave = pty.openpty()
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(slave)
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "sbus_client.py"), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**ENVIRONMENT, **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave = slave

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.master, self.slave):
            os.close(file)

    def press(self, text: bytes) -> None:
        """Type at the terminal."""
        os.write(self.master, text)

    def read(self) -> bool:
        """Add what is printed to the output; return whether there is any."""
        if not select.select([self.master], [], [], 0.01)[0]:
            return False
        self.output += os.read(self.master, 65_536).decode("utf-8")
        return True

    def wait_for(self, text: str) -> None:
        """Return once the output holds a text, of the pattern."""
        wait_for(lambda: self.read() and re.search(text, self.output))

    def end(self) -> int:
        """Return the exit status; all that was printed is in the output."""
        wait_for(lambda: not self.read() and self.process.poll() is not None)
        while self.read():
            pass
        return self.process.returncode


# =============================================================================
# sub and pub
# =============================================================================


class TestSub:
    """sub: print messages."""

    def test_message_is_a_line(self, bus: RealBus) -> None:
        """A line is the key, a tab and the payload, and comes at once."""
        with started(bus.path, "sub", "a/*", "b/") as command:
            wait_for_patterns(bus, 2)
            with Client(bus.path) as client:
                for key in ("a/1", "a/1/2", "b/1/2", "c"):
                    client.publish(key, b"some text")
            assert command.stdout
            assert command.stdout.readline() == "a/1\tsome text\n"
            assert command.stdout.readline() == "b/1/2\tsome text\n"
            assert not has_ended(command)
            bus.stop()
            assert outcome(command) == (1, "", gone(bus.path))

    def test_no_pattern(self, listener: Listener) -> None:
        """[MATCH-4] Without a pattern sub subscribes to the empty one."""
        with started(listener.path, "sub"), listener.accept() as server:
            assert server.receive() == b"SUB "

    def test_pattern_that_is_no_text(self, listener: Listener) -> None:
        """A pattern's bytes are sent as they were given."""
        pattern = os.fsdecode(b"\xff\xc3\xa9")
        command = started(listener.path, "sub", "--", "-x", pattern)
        with command, listener.accept() as server:
            assert server.receive() == b"SUB -x"
            assert server.receive() == b"SUB \xff\xc3\xa9"

    def test_control_messages_are_not_printed(
        self, listener: Listener
    ) -> None:
        """sub prints what was published and nothing else."""
        with started(listener.path, "sub") as command:
            with listener.accept() as server:
                server.receive()
                server.send(b"CMSG x\0v", b"MSG k\0v")
            assert outcome(command).output == "k\tv\n"

    @pytest.mark.parametrize(
        "encoding, accent", [("utf-8", "é"), ("ascii", r"\xc3\xa9")]
    )
    def test_unprintable_bytes_are_escaped(
        self, listener: Listener, encoding: str, accent: str
    ) -> None:
        """What is no text, or breaks a line, is as in a bytes literal."""
        with started(
            listener.path,
            "sub",
            env={**ENVIRONMENT, "PYTHONIOENCODING": encoding},
            encoding=encoding,
        ) as command:
            with listener.accept() as server:
                server.receive()
                server.send(
                    publish(b"a\tb", b"\xff \x00\n\x7f'\xc3\xa9"),
                    publish(rb"\xff", b"\xc2\x85\xed\xb3\xbf\xe2\x80\xae"),
                )
            first, second = outcome(command).output.splitlines()
        assert first.split("\t") == [r"a\tb", r"\xff \x00\n\x7f'" + accent]
        escaped = r"\xc2\x85\xed\xb3\xbf\xe2\x80\xae"
        assert second.split("\t") == [r"\\xff", escaped]

    @pytest.mark.parametrize(
        "number, status",
        [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
    )
    def test_signal(
        self, listener: Listener, number: int, status: int
    ) -> None:
        """A signal ends sub without another word."""
        command = started(listener.path, "sub")
        with command as process, listener.accept() as server:
            server.receive()
            process.send_signal(number)
            assert outcome(process) == (status, "", "")
            assert server.is_disconnected()

    def test_refused_pattern(self, bus: RealBus) -> None:
        """[KEY-4] A pattern that the server refuses ends sub."""
        done = sbus(bus.path, "sub", "!")
        assert done == (1, "", gone(bus.path))

    def test_reader_that_goes_away(self, listener: Listener) -> None:
        """When nobody reads its output any more sub ends in silence."""
        with started(listener.path, "sub") as command:
            with listener.accept() as server:
                server.receive()
                server.send(b"MSG k\0one")
                assert command.stdout
                assert command.stdout.readline() == "k\tone\n"
                command.stdout.close()
                server.send(b"MSG k\0two")
                assert command.wait(SECONDS_MAX) == 1
            assert command.stderr
            assert command.stderr.read() == ""

    def test_full_device(self, listener: Listener) -> None:
        """A line that cannot be written ends sub with one line."""
        with open("/dev/full", "w") as full:
            command = started(listener.path, "sub", stdout=full)
            with command as process, listener.accept() as server:
                server.receive()
                server.send(b"MSG k\0v")
                what = "sbus: standard output: No space left on device\n"
                assert outcome(process) == (1, "", what)

    BYTES = bytes(set(range(256)) - {13})  # a text stream would change it

    def heard(self, bus: RealBus, *options: str) -> bytes:
        """Return what sub prints of two messages."""
        arguments = ("sub", "--count=2", *options, "k")
        command = started(bus.path, *arguments, encoding="latin-1")
        with command as process:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("k", self.BYTES), ("k", b"two"))
            done = outcome(process)
        assert (done.status, done.errors) == (0, "")
        return done.output.encode("latin-1")

    def test_json(self, bus: RealBus) -> None:
        """An object a line, in which a code point is a byte."""
        lines = self.heard(bus, "--json").decode("ascii").splitlines()
        payload = self.BYTES.decode("latin-1")
        assert [json.loads(line) for line in lines] == [
            {"key": "k", "payload": payload},
            {"key": "k", "payload": "two"},
        ]

    def test_json_with_the_time(self, bus: RealBus) -> None:
        """Nanoseconds since 1970 come first."""
        before = time.time_ns()
        lines = self.heard(bus, "--json", "--time").splitlines()
        first, second = (json.loads(line)["t"] for line in lines)
        assert before < first < second < time.time_ns()

    def test_raw(self, bus: RealBus) -> None:
        """Payloads alone, with nothing between or behind."""
        assert self.heard(bus, "--raw") == self.BYTES + b"two"

    def test_lines_with_the_time(self, bus: RealBus) -> None:
        """A time stamp, with its zone, is the first field."""
        lines = self.heard(bus, "--time").decode().splitlines()
        stamp, key, payload = lines[1].split("\t")
        assert (key, payload) == ("k", "two")
        form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d\d:\d\d"
        assert re.fullmatch(form, stamp)

    def test_raw_with_the_time(self) -> None:
        """There is no place for it, which is wrong usage."""
        done = sbus("/nowhere", "sub", "--raw", "--time")
        what = "sbus: --raw has no place for --time; --help lists the options"
        assert done == (2, "", f"{what}\n")

    def test_time_is_over(self, bus: RealBus) -> None:
        """After its time sub ends; messages do not make it longer."""

        def chatter() -> None:
            with Client(bus.path) as client:
                while True:
                    client.publish("k")

        with child_process(chatter):
            done = sbus(bus.path, "sub", "--timeout", "0.2", "k")
        assert (done.status, done.errors) == (0, "")
        assert {*done.output.splitlines()} == {"k\t"}

    def test_time_is_over_before_the_count(self, bus: RealBus) -> None:
        """Then the exit status is 1."""
        done = sbus(bus.path, "sub", "--timeout=0.1", "--count=2")
        what = "sbus: the time is over: heard 0 of 2\n"
        assert done == (1, "", what)

    @pytest.mark.parametrize(
        "environment, line",
        [
            ({}, "\x1b[2m{}\x1b[m\t\x1b[36mk\x1b[m\tv\\x1b[31m\r\n"),
            ({"NO_COLOR": "1"}, "{}\tk\tv\\x1b[31m\r\n"),
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
            stamp = re.search(r"20\d\d-[^\t\x1b]+", terminal.output)
            assert stamp and terminal.output == line.format(stamp[0])


class TestPub:
    """pub: publish a message."""

    @pytest.fixture
    def peer(self, bus: RealBus) -> Iterator[Peer]:
        with bus.connect() as peer:
            peer.send(b"SUB ")
            peer.fence()
            yield peer

    def test_payload_is_given(self, bus: RealBus, peer: Peer) -> None:
        """The payload is the second argument, which may be empty."""
        assert sbus(bus.path, "pub", "a/1", "some text") == (0, "", "")
        assert sbus(bus.path, "pub", "a/2", "") == (0, "", "")
        assert peer.receive() == b"MSG a/1\0some text"
        assert peer.receive() == b"MSG a/2\0"

    @pytest.mark.parametrize("dash", [["-"], []])
    def test_payload_is_standard_input(
        self, bus: RealBus, peer: Peer, dash: list[str]
    ) -> None:
        """Without a payload, or with -, it is standard input."""
        done = sbus(bus.path, "pub", "k", *dash, input="one\ntwo\n")
        assert done == (0, "", "")
        assert peer.receive() == b"MSG k\0one\ntwo\n"

    def test_arguments_that_are_no_text(
        self, bus: RealBus, peer: Peer
    ) -> None:
        """Bytes are published as they were given."""
        text = os.fsdecode(b"\xff\xc3\xa9")
        assert sbus(bus.path, "pub", "--", text, f"-{text}").status == 0
        assert peer.receive() == b"MSG \xff\xc3\xa9\0-\xff\xc3\xa9"

    def test_message_of_the_limit(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-3] The largest message fits."""
        text = "x" * (PACKET_BYTES_MAX - HEAD_BYTES)
        assert sbus(bus.path, "pub", "k", input=text) == (0, "", "")
        assert peer.receive() == publish(b"k", text.encode("ascii"))

    # What a longer key takes is missing for the payload
    TOO_MUCH = "sbus: standard input holds more than the {} bytes that fit"
    TOO_MUCH += " with this key\n"

    @pytest.mark.parametrize("key, room", [("k", 409594), ("a/b", 409592)])
    def test_input_above_the_limit(
        self, bus: RealBus, peer: Peer, key: str, room: int
    ) -> None:
        """[LIMIT-1] A byte too much is told of, and nothing is published."""
        done = sbus(bus.path, "pub", key, input="x" * (room + 1))
        assert done == (1, "", self.TOO_MUCH.format(room))
        assert sbus(bus.path, "pub", key, input="x" * room) == (0, "", "")
        assert len(peer.receive()) == PACKET_BYTES_MAX

    def test_endless_input(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-1] Input above the limit is not read to its end."""
        with open("/dev/zero") as zero:
            done = sbus(bus.path, "pub", "k", stdin=zero)
        assert done == (1, "", self.TOO_MUCH.format(409594))
        assert peer.fence() == []

    def test_closed_input(self, bus: RealBus) -> None:
        """Without a standard input there is no payload."""
        done = sbus(bus.path, "pub", "k", preexec_fn=lambda: os.close(0))
        assert done == (1, "", "sbus: standard input is closed\n")

    def test_unreadable_input(self, bus: RealBus) -> None:
        """Input that cannot be read is one line."""
        with open(os.devnull, "w") as file:
            done = sbus(bus.path, "pub", "k", stdin=file)
        what = "sbus: standard input: Bad file descriptor\n"
        assert done == (1, "", what)

    def test_refused_message(self, bus: RealBus, peer: Peer) -> None:
        """[KEY-4] pub waits until it knows that the message was taken."""
        done = sbus(bus.path, "pub", "!", "v")
        assert done == (1, "", gone(bus.path))
        assert peer.fence() == []

    def test_lines(self, bus: RealBus, peer: Peer) -> None:
        """Each line of standard input is a message, without its end."""
        text = "one\n\n two \r\nthree"
        done = sbus(bus.path, "pub", "k", "--lines", input=text)
        assert done == (0, "", "")
        payloads = [b"one", b"", b" two \r", b"three"]
        assert peer.fence() == [publish(b"k", text) for text in payloads]

    def test_lines_are_published_at_once(
        self, bus: RealBus, peer: Peer
    ) -> None:
        """A line does not wait for the next one."""
        command = started(
            bus.path, "pub", "k", "--lines", stdin=subprocess.PIPE
        )
        with command as process:
            assert process.stdin
            process.stdin.write("one\n")
            process.stdin.flush()
            assert peer.receive() == b"MSG k\0one"
            assert not has_ended(process)
            process.stdin.close()

    def test_line_above_the_limit(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-1] Those before it are published, and it is named."""
        room = PACKET_BYTES_MAX - HEAD_BYTES
        text = "x" * room
        done = sbus(bus.path, "pub", "k", "--lines", input=f"{text}\n{text}x")
        what = f"sbus: line 2 of standard input holds more than the {room}"
        assert done == (1, "", f"{what} bytes that fit with this key\n")
        assert [len(packet) for packet in peer.fence()] == [PACKET_BYTES_MAX]

    def test_unreadable_lines(self, bus: RealBus) -> None:
        """Input that cannot be read is one line."""
        with open(os.devnull, "w") as file:
            done = sbus(bus.path, "pub", "k", "--lines", stdin=file)
        assert done == (1, "", "sbus: standard input: Bad file descriptor\n")

    @pytest.mark.parametrize("other", ["payload", "--repeat=2"])
    def test_lines_and_something_else(self, other: str) -> None:
        """--lines says where all payloads come from."""
        done = sbus("/nowhere", "pub", "k", other, "--lines")
        what = "sbus: --lines takes neither a PAYLOAD nor --repeat; --help"
        assert done == (2, "", f"{what} lists the options\n")

    def test_repeat(self, bus: RealBus, peer: Peer) -> None:
        """The same message, many times."""
        assert sbus(bus.path, "pub", "k", "v", "--repeat=1000").status == 0
        assert peer.fence() == [publish(b"k", b"v")] * 1000

    def test_rate(self, bus: RealBus, peer: Peer) -> None:
        """A message waits for its time, the first one does not."""
        start = time.monotonic()
        command = ("pub", "k", "v", "--repeat=11", "--rate=40")
        assert sbus(bus.path, *command) == (0, "", "")
        assert time.monotonic() - start >= 10 / 40
        assert len(peer.fence()) == 11

    def test_rate_is_kept_after_a_delay(self) -> None:
        """What is late by more than a moment is not made up for."""
        payloads = sbus_client.paced([b""] * 30, 100)
        next(payloads)
        late = sbus_client.PROGRESS_SECONDS + 0.05
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=late)
        start = time.monotonic()
        assert len(list(payloads)) == 29
        assert time.monotonic() - start >= 0.05

    def test_progress_on_a_terminal(self, bus: RealBus, peer: Peer) -> None:
        """A line tells how far it is; its last state stays."""
        options = ("--repeat=40", "--rate=100", "-a", bus.path)
        with Terminal("pub", "k", "v", *options) as terminal:
            assert terminal.end() == 0
            *_, first, last, nothing = re.split("[\r\n]+", terminal.output)
        form = r"(\d+) of 40 messages, [0-9.]+ a second\x1b\[K"
        assert re.fullmatch(form, first) and nothing == ""
        assert re.fullmatch(form.replace(r"(\d+)", "40"), last)

    def test_interruption(self, bus: RealBus, peer: Peer) -> None:
        """Ctrl-C ends it; what was published is delivered."""
        options = ("--repeat=1000000", "--rate=100", "-a", bus.path)
        with Terminal("pub", "k", "v", *options) as terminal:
            terminal.wait_for("of 1,000,000 messages")
            terminal.press(b"\x03")
            assert terminal.end() == 130
            counts = re.findall("([0-9]+) of", terminal.output)
        assert len(peer.fence()) >= int(counts[-1])


# =============================================================================
# whoami, ping and control
# =============================================================================


class TestWhoamiCommand:
    """whoami: print the credentials."""

    def test_credentials_are_printed(self, bus: RealBus) -> None:
        """[CRED-2] whoami prints the server's answer."""
        with started(bus.path, "whoami") as command:
            own = (os.getgid(), os.getuid(), command.pid)
            line = "!/cred/{}/{}/{}\n".format(*own)
            assert outcome(command) == (0, line, "")

    def test_output_on_a_full_device(self, bus: RealBus) -> None:
        """Output that cannot be written is one line."""
        what = "sbus: standard output: No space left on device\n"
        with (
            open("/dev/full", "w") as full,
            started(bus.path, "whoami", stdout=full) as command,
        ):
            assert outcome(command) == (1, "", what)

    def test_output_that_nobody_reads(self, bus: RealBus) -> None:
        """A pipe without a reader is not worth a line."""
        read_end, write_end = os.pipe()
        os.close(read_end)
        with (
            open(write_end, "w") as pipe,
            started(bus.path, "whoami", stdout=pipe) as command,
        ):
            assert outcome(command) == (1, "", "")

    def test_closed_output(self, bus: RealBus) -> None:
        """Without a standard output there is nothing to print to."""
        done = sbus(bus.path, "whoami", preexec_fn=lambda: os.close(1))
        assert done == (1, "", "sbus: standard output is closed\n")

    def test_inherited_descriptor(self) -> None:
        """A command can use a socket that its parent connected."""
        ours, theirs = seqpacket_pair()
        with ours, Peer(theirs) as server:
            fd = ours.fileno()
            server.send(ANSWER)
            done = sbus(f"/dev/fd/{fd}", "whoami", pass_fds=[fd])
            assert done == (0, "!/cred/100/1000/4242\n", "")
            assert server.receive() == WHOAMI


class TestPing:
    """ping: how long the server takes to answer."""

    def test_figures(self, bus: RealBus) -> None:
        """A line holds four times in milliseconds, in order."""
        done = sbus(bus.path, "ping", "--count=50")
        assert (done.status, done.errors) == (0, "")
        head, tail = done.output.rsplit(": ", 1)
        assert head == f"{bus.path}: 50 round trips"
        names = ["minimum", "median", "p99", "maximum"]
        times = re.findall(r"(\w+) ([0-9.]+) ms", tail)
        assert [name for name, _ in times] == names
        values = [float(value) for _, value in times]
        assert values == sorted(values) and values[0] > 0

    def test_quantiles(self) -> None:
        """A quantile is one of the values."""
        values = [float(n) for n in range(1, 201)]
        parts = (0, 0.5, 0.99, 1)
        quantiles = [sbus_client.quantile(values, part) for part in parts]
        assert quantiles == [1, 100, 198, 200]
        assert [sbus_client.quantile([7], part) for part in parts] == [7] * 4

    def test_server_that_does_not_answer(self, listener: Listener) -> None:
        """One line says so in time."""
        done = sbus(listener.path, "ping", "--timeout=0.1")
        what = f"sbus: no answer from {listener.path} in 0.1 seconds: its"
        assert done == (1, "", f"{what} server hangs or is stopped\n")


class TestControl:
    """control: any control message."""

    def test_message_is_sent(self, listener: Listener) -> None:
        """[CTL-1] What is printed is what the server answers."""
        command = started(listener.path, "control", "x", "v")
        with command as process, listener.accept() as server:
            assert server.receive() == b"CMSG x\0v"
            assert server.receive() == WHOAMI
            server.send(b"CMSG y\0a\tb", ANSWER)
            assert outcome(process) == (0, "y\ta\\tb\n", "")

    def test_payload_is_standard_input(self, listener: Listener) -> None:
        """Only - is; without a payload there is none."""
        for arguments, packet in (
            (["-"], b"CMSG x\0some input"),
            ([], b"CMSG x"),
        ):
            command = started(
                listener.path,
                "control",
                "x",
                *arguments,
                stdin=subprocess.PIPE,
            )
            with command as process, listener.accept() as server:
                assert process.stdin
                process.stdin.write("some input")
                process.stdin.close()
                process.stdin = None
                assert server.receive() == packet
                server.send(ANSWER)
                assert outcome(process) == (0, "", "")

    def test_question(self, bus: RealBus) -> None:
        """[CRED-2] The answer to whoami has its key in front."""
        done = sbus(bus.path, "control", "!/cred/whoami")
        own = f"!/cred/{os.getgid()}/{os.getuid()}"
        form = rf"!/cred/whoami\t{own}/\d+\n"
        assert done.status == 0 and re.fullmatch(form, done.output)


class TestStats:
    """stats: what the server has counted."""

    def table(self, text: str) -> dict[str, dict[str, str]]:
        """Return the rows of a table by their names."""
        heading, *lines = text.splitlines()
        assert len({len(line) for line in [heading, *lines]}) == 1
        ends = [match.end() for match in re.finditer(r"\w+", heading)]
        rows = {}
        for line in lines:
            name, start = line[: ends[0] - 7].strip(), ends[0] - 7
            cells = {}
            for column, end in zip(heading.split(), ends):
                cells[column] = line[start:end].strip()
                start = end
            rows[name] = cells
        return rows

    def test_owner_sees_all_users(self, bus: RealBus) -> None:
        """[CTL-5] A row for this client, and one for each user."""
        with bus.connect() as peer, bus.connect() as other:
            peer.send(b"SUB k", b"SUB l", *publications(1234))
            heard = [peer.receive() for _ in range(1234)]
            other.fence()
            done = sbus(bus.path, "stats")
        assert (done.status, done.errors, len(heard)) == (0, "", 1234)
        client, user = self.table(done.output).items()
        assert client[0] == "client 3" and user[0] == f"user {os.getuid()}"
        assert {*client[1].values()} == {"", "0"}
        assert client[1]["CLIENTS"] == "" and client[1]["PATTERNS"] == "0"
        known = ("CLIENTS", "PATTERNS", "PUBLISHED", "DELIVERED", "BACKLOG")
        values = [user[1][column] for column in known]
        assert values == ["3", "2", "1,234", "1,235", "0"]

    def test_other_user_sees_itself(
        self, directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """[CTL-5] What others do is not its business."""
        if os.getuid():
            pytest.skip("only root can be another user")
        with (
            RealBus(directory, "-g", "-o") as bus,
            bus.connect(uid=1001) as peer,
        ):
            fd = os.dup(peer.wire.fileno())
            assert sbus_client.main(["-a", f"/dev/fd/{fd}", "stats"]) == 0
        output, errors = capsys.readouterr()
        assert errors == "" and [*self.table(output)] == ["client 1"]

    def test_json(self, bus: RealBus) -> None:
        """[CTL-5] The server's own words, in a line."""
        done = sbus(bus.path, "stats", "--json")
        assert (done.status, done.errors) == (0, "")
        assert done.output.count("\n") == 1
        counts = json.loads(done.output)
        assert counts["client"] == 1
        assert counts["users"][str(os.getuid())]["clients"] == 1

    def answered(self, listener: Listener, *packets: bytes) -> Result:
        """Return how stats ends that a server answers so."""
        command = started(listener.path, "stats")
        with command as process, listener.accept() as server:
            assert server.receive() == b"CMSG stats"
            assert server.receive() == WHOAMI
            server.send(*packets, ANSWER)
            return outcome(process)

    def test_server_that_knows_no_stats(self, listener: Listener) -> None:
        """[CTL-2] It ignores the question: one line."""
        done = self.answered(listener, b"MSG stats\0{}", b"CMSG other\0{}")
        what = f"sbus: the server at {listener.path} does not answer 'stats'"
        assert done == (1, "", f"{what}\n")

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"\xff",
            b"5",
            b"{}",
            b'{"client":1,"users":[5]}',
            b'{"client":1,"users":{"0":5}}',
            b'{"client":1,"published":"x"}',
        ],
    )
    def test_malformed_answer(self, listener: Listener, answer: bytes) -> None:
        """One line shows its beginning."""
        done = self.answered(listener, b"CMSG stats\0" + answer)
        what = f"sbus: the server sent malformed stats: {answer!r}\n"
        assert done == (1, "", what)

    def test_answer_with_more_and_less(self, listener: Listener) -> None:
        """What is not known is left out, what is not there is empty."""
        answer = b'CMSG stats\0{"client":7,"new":1,"paused":2}'
        done = self.answered(listener, answer)
        assert (done.status, done.errors) == (0, "")
        row = self.table(done.output)["client 7"]
        assert row.pop("PAUSED") == "2" and {*row.values()} == {""}


# =============================================================================
# record
# =============================================================================


def segments(directory: Path, hidden: bool = False) -> list[Path]:
    """Return the segments of a capture, in order."""
    return sorted(directory.glob(".*.jsonl" if hidden else "[!.]*.jsonl"))


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of all segments that have their names."""
    text = b"".join(path.read_bytes() for path in segments(directory))
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def payloads_of(directory: Path) -> list[bytes]:
    """Return the payloads of a capture."""
    return [base64.b64decode(line["data"]) for line in lines_of(directory)]


def check_numbers(directory: Path) -> Counter[str]:
    """Return how many lines each run has; they are numbered without gaps."""
    counts: Counter[str] = Counter()
    for line in lines_of(directory):
        counts[line["rec"]] += 1
        assert line["n"] == counts[line["rec"]]
    return counts


@pytest.fixture
def capture(directory: Path) -> Path:
    return directory / "new" / "capture"


@contextlib.contextmanager
def recorder(
    bus: RealBus, capture: Path, *options: str, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a recorder; it has subscribed and begun."""
    former = patterns_of(bus)
    hidden = segments(capture, hidden=True)
    command = started(bus.path, "record", str(capture), *options, **more)
    with command as process:
        wait_for_patterns(bus, former + 1)
        wait_for(lambda: {*segments(capture, hidden=True)} - {*hidden})
        yield process


def stop(process: subprocess.Popen[str]) -> None:
    """Have a recorder end, without a word."""
    process.terminate()
    assert outcome(process) == (0, "", "")


class TestRecord:
    """record: a capture."""

    def test_line(self, bus: RealBus, capture: Path) -> None:
        """A line has the fields that the pipeline expects."""
        before = time.time_ns()
        with recorder(bus, capture) as process:
            publish_all(bus.path, ("k", b"v\0\xff"), (b"a/\xff", b""))
            stop(process)
        (segment,) = segments(capture)
        first, second = lines_of(capture)
        host = os.uname().nodename
        assert list(first) == ["rec", "n", "t", "host", "key", "size", "data"]
        assert segment.name == f"{first['rec']}-000001.jsonl"
        assert before < first["t"] < second["t"] < time.time_ns()
        assert (first["n"], first["host"], first["key"]) == (1, host, "k")
        assert (first["size"], first["data"]) == (3, "dgD/")
        assert (second["n"], second["key"], second["size"]) == (2, "a/\xff", 0)
        assert segment.stat().st_mode & 0o137 == 0

    def test_modes_and_patterns(
        self, listener: Listener, capture: Path
    ) -> None:
        """It asks for soft mode block before it subscribes."""
        options = ("--pattern=a/", "--pattern", "b")
        command = started(listener.path, "record", str(capture), *options)
        with command as process, listener.accept() as server:
            packets = [server.receive() for _ in range(3)]
            mode = b"CMSG blocking/soft/block"
            assert packets == [mode, b"SUB a/", b"SUB b"]
            wait_for(lambda: segments(capture, hidden=True))
            process.terminate()
            packets = [server.receive() for _ in range(3)]
            assert packets == [b"UNSUB a/", b"UNSUB b", WHOAMI]
            server.send(publish(b"a/1", b"late"), ANSWER)
            assert outcome(process) == (0, "", "")
        assert payloads_of(capture) == [b"late"]

    def test_nothing_to_record(self, bus: RealBus, capture: Path) -> None:
        """No empty file stays."""
        with recorder(bus, capture) as process:
            stop(process)
        assert list(capture.iterdir()) == []

    def test_segment_is_hidden_until_it_is_old(
        self, bus: RealBus, capture: Path
    ) -> None:
        """Its age counts from its first message."""
        option = "--segment-seconds=0.3"
        with recorder(bus, capture, option) as process:
            publish_all(bus.path, ("k", b"one"))
            start = time.monotonic()
            wait_for(lambda: segments(capture, hidden=True)[0].stat().st_size)
            assert not segments(capture)
            wait_for(lambda: segments(capture))
            assert time.monotonic() - start > 0.2
            publish_all(bus.path, ("k", b"two"))
            wait_for(lambda: len(segments(capture)) == 2)
            stop(process)
        assert payloads_of(capture) == [b"one", b"two"]
        assert len(segments(capture)) == 2
        check_numbers(capture)

    def test_segment_ends_when_it_is_large(
        self, bus: RealBus, capture: Path
    ) -> None:
        """Large messages fill several segments."""
        option = "--segment-mib=2"
        payloads = [os.urandom(400_000) for _ in range(10)]
        with recorder(bus, capture, option) as process:
            publish_all(bus.path, *(("k", payload) for payload in payloads))
            stop(process)
        assert payloads_of(capture) == payloads
        sizes = [path.stat().st_size for path in segments(capture)]
        assert len(sizes) > 1
        assert all(2**21 <= size < 2**22 for size in sizes[:-1])
        check_numbers(capture)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_loses_nothing(
        self, bus: RealBus, capture: Path, number: int
    ) -> None:
        """What waits for it, here and in the server, is recorded."""
        payloads = [b"%d" % n for n in range(3000)]
        with recorder(bus, capture) as process:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            with child_process(
                lambda: publish_all(
                    bus.path, *(("k", payload) for payload in payloads)
                )
            ):
                trace = Path(bus.path).with_name("trace")
                wait_for(lambda: '"m":200,' in trace.read_text())
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)
                assert outcome(process) == (0, "", "")
        recorded = payloads_of(capture)
        assert len(recorded) >= 200 and recorded == payloads[: len(recorded)]

    def test_second_signal(self, bus: RealBus, capture: Path) -> None:
        """A server that hangs does not keep it; its lines are kept."""
        with recorder(bus, capture) as process:
            publish_all(bus.path, ("k", b"v"))
            wait_for(lambda: segments(capture, hidden=True)[0].stat().st_size)
            freeze(bus)
            process.send_signal(signal.SIGINT)
            wait_for(lambda: not handles(process.pid, signal.SIGTERM))
            process.send_signal(signal.SIGINT)
            assert outcome(process) == (130, "", "")
            thaw(bus)
        assert payloads_of(capture) == [b"v"]

    def test_bus_that_ends(self, bus: RealBus, capture: Path) -> None:
        """One line, and what it has sent is recorded."""
        with recorder(bus, capture) as process:
            publish_all(bus.path, *[("k", b"v")] * 1000)
            bus.stop()
            assert outcome(process) == (1, "", gone(bus.path))
        assert payloads_of(capture) == [b"v"] * 1000

    def test_full_disk(self, bus: RealBus, capture: Path) -> None:
        """One line, and what could be written is kept."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        with recorder(bus, capture, preexec_fn=limit) as process:
            with Client(bus.path) as client:
                for _ in range(3):
                    client.publish("k", bytes(20_000))
                client.sync()
                hidden = segments(capture, hidden=True)[0]
                wait_for(lambda: hidden.stat().st_size > 60_000)
                for _ in range(2):
                    client.publish("k", bytes(20_000))
                client.sync()
            done = outcome(process)
        assert done.status == 1 and done.output == ""
        what = f"sbus: {capture}: File too large: 3 of [45] messages are"
        assert re.fullmatch(f"{what} recorded\n", done.errors)
        assert payloads_of(capture) == [bytes(20_000)] * 3
        assert len(list(capture.iterdir())) == 1

    def test_slow_disk(self, directory: Path, capture: Path) -> None:
        """[BLOCK-16] It reads on meanwhile, as a server can demand."""
        fifo = directory / "fifo"
        os.mkfifo(fifo)
        (directory / "sitecustomize.py").write_text(
            "import os\n"
            "fsync = os.fsync\n"
            "def slow(fd):\n"
            f"    open({str(fifo)!r}).close()\n"
            "    fsync(fd)\n"
            "os.fsync = slow\n"
        )
        env = {**ENVIRONMENT, "PYTHONPATH": str(directory)}
        messages = [("k", b"%d " % n * 10_000) for n in range(50)]
        options = ("--trace", str(directory / "trace"), "--block-timeout=0.2")
        with (
            RealBus(directory, *options) as bus,
            recorder(bus, capture, "--segment-mib=0.1", env=env) as process,
        ):
            publish_all(bus.path, *messages)
            wait_for(lambda: len(segments(capture, hidden=True)) == 2)
            publish_all(bus.path, *messages)
            assert not segments(capture)
            assert len(segments(capture, hidden=True)) == 2
            released = os.open(fifo, os.O_RDWR)
            wait_for(lambda: segments(capture))
            stop(process)
            os.close(released)
        assert payloads_of(capture) == [text for _, text in messages * 2]
        check_numbers(capture)

    def test_disk_that_fails_in_the_end(
        self, capture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next look tells; what can be kept of both segments is."""
        failed = threading.Event()

        def fail(_: int) -> None:
            if threading.current_thread() is threading.main_thread():
                return
            assert failed.wait(SECONDS_MAX)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with sbus_client.Recorder(capture, 1, 10) as recorder:
            for n in range(3):
                recorder.add(Message(b"k", b"%d" % n))
                recorder.flush()
            assert len(segments(capture, hidden=True)) == 2
            failed.set()
            wait_for(lambda: recorder.seconds_left() != 0.1)
            recorder.add(Message(b"k", b"3"))
            with pytest.raises(
                SbusError, match="4 of 4 messages are recorded"
            ):
                recorder.flush()
        assert payloads_of(capture) == [b"0", b"1", b"2", b"3"]
        check_numbers(capture)

    def test_next_segment_that_cannot_be(
        self, capture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The one before is kept first, undisturbed."""
        failed = threading.Event()

        def fail(*_: object) -> int:
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")

        def wait(fd: int) -> None:
            assert failed.wait(SECONDS_MAX) and os.fstat(fd)

        with sbus_client.Recorder(capture, 1, 10) as recorder:
            monkeypatch.setattr(os, "fsync", wait)
            monkeypatch.setattr(sbus_client, "create_segment", fail)
            recorder.add(Message(b"k", b"v"))
            with pytest.raises(SbusError, match="files: 1 of 1 messages"):
                recorder.flush()
            assert recorder._keeping.exception() is None
        assert payloads_of(capture) == [b"v"]

    def test_full_disk_behind_a_kept_segment(self, capture: Path) -> None:
        """What has its name is counted."""
        with sbus_client.Recorder(capture, 1, 10) as recorder:
            recorder.add(Message(b"k", b"v"))
            recorder.flush()
            wait_for(lambda: segments(capture))
            recorder._file.close()
            recorder._file = io.FileIO("/dev/full", "w")
            recorder.add(Message(b"k", b"v"))
            with pytest.raises(SbusError, match="1 of 2 messages are rec"):
                recorder.flush()
        assert payloads_of(capture) == [b"v"]
        assert len(list(capture.iterdir())) == 1

    def test_directory_that_cannot_be(
        self, bus: RealBus, directory: Path
    ) -> None:
        """A file is in its place: one line, and nothing is recorded."""
        done = sbus(bus.path, "record", str(directory / "log"))
        what = f"sbus: {directory}/log: File exists: nothing is recorded\n"
        assert done == (1, "", what)

    def test_progress_on_a_terminal(self, bus: RealBus, capture: Path) -> None:
        """A line tells how far it is; its last state stays."""
        options = ("--segment-seconds=0.3", "-a", bus.path)
        with Terminal("record", str(capture), *options) as terminal:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, *[("k", b"v")] * 1200)
            terminal.wait_for("1,200 messages, segment 2\x1b")
            terminal.press(b"\x03")
            assert terminal.end() == 0
        assert terminal.output.endswith("segment 2\x1b[K\r\n")
        assert len(payloads_of(capture)) == 1200


class TestRecovery:
    """record: what a crash has left."""

    NAME = "{}_20260101T000000Z_01234567-000007.jsonl"
    ONE = b'{"rec":"r","n":1,"data":""}\n'
    TWO = b'{"rec":"r","n":2,"data":""}\n'

    def leave(self, capture: Path, text: bytes) -> str:
        """Make a segment that no recorder writes; return its name."""
        capture.mkdir(parents=True)
        name = self.NAME.format(os.uname().nodename)
        (capture / f".{name}").write_bytes(text)
        return name

    @pytest.mark.parametrize(
        "rest",
        [b"", TWO[:-1], b"{\n" + TWO, b"5\n" + TWO, b"\0" * 9000, b"\xff\n"],
        ids=["nothing", "cut", "no JSON", "no object", "NUL", "no text"],
    )
    def test_whole_lines_are_kept(
        self, bus: RealBus, capture: Path, rest: bytes
    ) -> None:
        """Up to the first that is not whole."""
        name = self.leave(capture, self.ONE + self.TWO + rest)
        with recorder(bus, capture) as process:
            assert (capture / name).read_bytes() == self.ONE + self.TWO
            process.terminate()
            line = f"sbus: {name} is recovered: 2 messages\n"
            assert outcome(process) == (0, "", line)
        assert [path.name for path in capture.iterdir()] == [name]

    @pytest.mark.parametrize("text", [b"", ONE[:-1]])
    def test_segment_without_a_whole_line(
        self, bus: RealBus, capture: Path, text: bytes
    ) -> None:
        """It is removed."""
        self.leave(capture, text)
        with recorder(bus, capture) as process:
            stop(process)
        assert list(capture.iterdir()) == []

    def test_segment_of_another_host(
        self, bus: RealBus, capture: Path
    ) -> None:
        """Its recorder may be alive although no lock tells of it."""
        name = self.leave(capture, self.ONE)
        other = capture / f".{name}".replace("_", "-other_", 1)
        (capture / f".{name}").rename(other)
        with recorder(bus, capture) as process:
            stop(process)
        assert list(capture.iterdir()) == [other]

    def test_segment_that_cannot_be_recovered(
        self, bus: RealBus, capture: Path
    ) -> None:
        """One line tells, and the recorder records."""
        name = self.leave(capture, b"")
        (capture / f".{name}").unlink()
        (capture / f".{name}").mkdir()
        with recorder(bus, capture) as process:
            publish_all(bus.path, ("k", b"v"))
            process.terminate()
            what = f"sbus: {capture}/.{name} is not recovered: Is a directory"
            assert outcome(process) == (0, "", f"{what}\n")
        assert payloads_of(capture) == [b"v"]

    def test_two_recorders(self, bus: RealBus, capture: Path) -> None:
        """Neither takes the other's segment for one of a dead recorder."""
        with recorder(bus, capture) as first:
            publish_all(bus.path, ("k", b"one"))
            with recorder(bus, capture) as second:
                assert not segments(capture)
                publish_all(bus.path, ("k", b"two"))
                stop(second)
            stop(first)
        assert sorted(payloads_of(capture)) == [b"one", b"two", b"two"]
        assert sorted(check_numbers(capture).values()) == [1, 2]

    def test_segment_that_is_removed_before_it_is_locked(
        self, capture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A starting recorder may do that: then there is another file."""
        lock = fcntl.flock
        removed: list[Path] = []

        def remove_first(file: Any, operation: int) -> None:
            if not removed:
                removed.extend(segments(capture, hidden=True))
                removed[0].unlink()
            lock(file, operation)

        monkeypatch.setattr(fcntl, "flock", remove_first)
        with sbus_client.Recorder(capture, 1 << 20, 10) as recorder:
            assert segments(capture, hidden=True) == removed
            recorder.add(Message(b"k", b"v"))
        assert payloads_of(capture) == [b"v"]

    def test_segment_that_is_no_longer_there(self, capture: Path) -> None:
        """Another recorder may be quicker."""
        assert sbus_client.recover(capture / "nothing") == 0

    KILLS = 20

    def test_kill(self, directory: Path, capture: Path) -> None:
        """At any moment under load: whole lines, without gaps, and all."""
        seed = random.randrange(1 << 32)
        print("seed", seed)
        moments = random.Random(seed)
        names: list[str] = []
        left = b""
        renamed = recovered = 0
        with RealBus(directory) as bus, child_process(lambda: self.load(bus)):
            for _ in range(self.KILLS):
                with self.loaded_recorder(bus, capture) as process:
                    self.check_recovered(capture, names, left)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(moments.uniform(0, 0.2))
                    process.kill()
                    process.wait(SECONDS_MAX)
                renamed += sum(check_numbers(capture).values())
                names = [path.name for path in segments(capture)]
                hidden = segments(capture, hidden=True)
                lines = {
                    path.name[1:]: self.whole_lines(path) for path in hidden
                }
                left = b"".join(lines.values())
                names += [name for name, text in lines.items() if text]
                recovered += left.count(b"\n")
            with self.loaded_recorder(bus, capture) as process:
                self.check_recovered(capture, names, left)
                process.terminate()
                assert process.wait(SECONDS_MAX) == 0
        assert not segments(capture, hidden=True)
        check_numbers(capture)
        assert renamed and recovered

    def load(self, bus: RealBus) -> None:
        """Publish without end."""
        with Client(bus.path) as client:
            for n in range(1 << 30):
                client.publish("k", b"%d " % n * (n % 500))

    @contextlib.contextmanager
    def loaded_recorder(
        self, bus: RealBus, capture: Path
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a recorder; it has recovered what there was."""
        former = segments(capture, hidden=True)
        options = ("--segment-mib=0.2", "--segment-seconds=0.1")
        environment = {  # what is killed cannot tell what it has covered
            name: value
            for name, value in ENVIRONMENT.items()
            if not name.startswith("COVERAGE_")
        }
        arguments = ("record", str(capture), *options)
        command = started(bus.path, *arguments, env=environment)
        with command as process:
            wait_for(lambda: {*segments(capture, hidden=True)} - {*former})
            assert not {*segments(capture, hidden=True)} & {*former}
            yield process

    def whole_lines(self, path: Path) -> bytes:
        """Return the whole lines of a segment."""
        text = path.read_bytes()
        return text[: text.rfind(b"\n") + 1]

    def check_recovered(
        self, capture: Path, names: list[str], left: bytes
    ) -> None:
        """Find all of a killed recorder in segments; remove them."""
        text = b"".join((capture / name).read_bytes() for name in names)
        assert text.endswith(left)
        lines = text.splitlines()
        numbers = [json.loads(line)["n"] for line in lines]
        assert numbers == [*range(1, len(lines) + 1)]
        for name in names:
            (capture / name).unlink()


# =============================================================================
# top
# =============================================================================


class TestTop:
    """top: the loudest keys."""

    def table(self, output: str) -> list[list[str]]:
        """Return the fields of the first table."""
        lines = output.split("\n\n")[0].splitlines()
        assert lines[0].split() == ["MESSAGES/S", "BYTES/S", "MESSAGES", "KEY"]
        return [line.split(maxsplit=3) for line in lines[1:]]

    @pytest.mark.parametrize(
        "options, keys",
        [
            ([], ["many", "tab\\tbed", "large"]),
            (["--bytes"], ["large", "many"]),
            (["--slowest"], ["large", "tab\\tbed", "many"]),
        ],
    )
    def test_table_in_a_pipe(
        self, bus: RealBus, options: list[str], keys: list[str]
    ) -> None:
        """The loudest key is first, and everything before it."""
        options = ["--interval=0.5", "--count=1", *options]
        with started(bus.path, "top", *options) as command:
            wait_for_patterns(bus, 1)
            publish_all(
                bus.path,
                *[("many", b"12345678")] * 30,
                *[("tab\tbed", b"")] * 2,
                ("large", bytes(1000)),
            )
            done = outcome(command)
        assert (done.status, done.errors) == (0, "")
        total, *lines = self.table(done.output)
        assert total[2:] == ["33", "(3 keys)"]
        assert [line[3] for line in lines][: len(keys)] == keys
        many = next(line for line in lines if line[3] == "many")
        assert many[2] == "30"
        rate, speed = (float(text.replace(",", "")) for text in many[:2])
        assert 0 < rate <= 60 and abs(speed - 8 * rate) < 2

    def test_intervals(self, bus: RealBus) -> None:
        """Rates are those of the interval, the last column is the total."""
        options = ["--interval=0.2", "--count=3", "k", "l"]
        with started(bus.path, "top", *options) as command:
            wait_for_patterns(bus, 2)
            publish_all(bus.path, ("k", b"v"), ("k", b"v"), ("other", b"v"))
            tables = outcome(command).output.split("\n\n")
        assert len(tables) == 4 and tables[3] == ""
        last = [line.split() for line in tables[2].splitlines()[2:]]
        assert last == [["0.0", "0", "2", "k"]]

    def test_modes(self, listener: Listener) -> None:
        """[BLOCK-5] It looks on, and holds nobody up."""
        command = started(listener.path, "top", "--count=1", "--interval=0.1")
        with command as process, listener.accept() as server:
            assert server.receive() == b"CMSG blocking/soft/discard"
            assert server.receive() == b"SUB "
            assert outcome(process).status == 0

    def test_one_key(self) -> None:
        """It is no plural."""
        top = sbus_client.Top()
        for keys in ("(0 keys)", "(1 key)", "(2 keys)"):
            assert top.table(1, "ascii")[1].endswith(f"  {keys}")
            top.add(Message(keys.encode(), b""))

    def test_many_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of too many keys the quieter half is forgotten."""
        monkeypatch.setattr(sbus_client, "TOP_KEYS_MAX", 4)
        top = sbus_client.Top()
        for key in (b"a", b"b", b"b", b"c", b"d", b"d", b"e"):
            top.add(Message(key, b""))
        assert [*top.keys] == [b"b", b"d"]

    ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
    LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

    def frames(self, output: str) -> list[list[str]]:
        """Return what each frame shows, a string a row."""
        assert output.startswith(self.ENTER)
        drawn = output[len(self.ENTER) :].split("\x1b[?7h")[0]
        first, *frames = drawn.split("\x1b[H")
        assert first == ""
        rows = [frame.split("\r\n") for frame in frames]
        assert all(frame[-1].endswith("\x1b[K\x1b[J") for frame in rows)
        return [
            [re.sub(r"\x1b\[[JK]", "", row) for row in frame] for frame in rows
        ]

    @pytest.mark.parametrize(
        "end, status",
        [
            (lambda terminal: terminal.press(b"\x03"), 130),
            (lambda terminal: terminal.process.terminate(), 143),
        ],
        ids=["Ctrl-C", "SIGTERM"],
    )
    def test_terminal(
        self, bus: RealBus, end: Callable[[Terminal], None], status: int
    ) -> None:
        """Frames fit the terminal; in the end it is as it was."""
        with Terminal("-a", bus.path, "top", "--interval=0.1") as terminal:
            wait_for_patterns(bus, 1)
            messages = [(f"{n}/" + "x" * 60, b"v") for n in range(10)]
            publish_all(bus.path, *messages)
            terminal.wait_for("10 keys")
            end(terminal)
            assert terminal.end() == status
            assert termios.tcgetattr(terminal.slave) == terminal.before
        output = re.sub(r"\^C", "", terminal.output)
        assert output.endswith(self.LEAVE)
        frame = self.frames(output)[-1]
        assert len(frame) == 8
        assert {len(row) for row in frame[2:]} == {60}
        assert "  0/xxx" in frame[2] and "  5/xxx" in frame[7]

    def test_terminal_that_changes_its_size(self, bus: RealBus) -> None:
        """The next frame fits; a terminal that has none is 80 by 24."""
        arguments = ("-a", bus.path, "top", "--interval=0.1")
        with Terminal(*arguments, columns=0, rows=0) as terminal:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, *[(f"{n}", b"v") for n in range(40)])
            terminal.wait_for(r"(?s)40 keys.*\x1b\[J")
            assert len(self.frames(terminal.output)[-1]) == 24
            size = struct.pack("HHHH", 3, 30, 0, 0)
            fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, size)
            terminal.output = ""
            row = r".{30}\x1b\[K"
            terminal.wait_for(rf"\x1b\[H({row}\r\n){{2}}{row}\x1b\[J")

    def test_bus_that_ends(self, bus: RealBus) -> None:
        """The line of the error stays after the screen has gone."""
        with Terminal("-a", bus.path, "top") as terminal:
            wait_for_patterns(bus, 1)
            bus.stop()
            assert terminal.end() == 1
        line = gone(bus.path).replace("\n", "\r\n")
        assert terminal.output.endswith(self.LEAVE + line)


# =============================================================================
# bridge
# =============================================================================


class Sides:
    """A bridge between two sockets of the test's own."""

    JOIN = [
        b"CMSG echo/off",
        b"CMSG blocking/soft/block",
        b"SUB ",
        b"SUB sbus/bridge/",
    ]
    LEAVE = [b"UNSUB ", b"UNSUB sbus/bridge/", WHOAMI]

    def __init__(self, *patterns: str) -> None:
        ours, self.left_wire = seqpacket_pair()
        theirs, self.right_wire = seqpacket_pair()
        fds = [ours.fileno(), theirs.fileno()]
        addresses = [f"/dev/fd/{fd}" for fd in fds]
        options = [f"--pattern={pattern}" for pattern in patterns]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "sbus_client.py"), "bridge"]
            + [*addresses, *options],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.close()
        theirs.close()
        self.addresses = addresses
        self.left = Peer(self.left_wire)
        self.right = Peer(self.right_wire)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.left_wire.close()
        self.right_wire.close()
        self.process.kill()
        self.process.communicate()

    def joined(self) -> Sides:
        """Answer what the bridge asks for at its start; note its probe."""
        for side in (self.right, self.left):
            assert [side.receive() for _ in self.JOIN] == self.JOIN
            if side == self.left:
                self.probe = side.receive()
                assert self.probe.startswith(publish(b"sbus/bridge/")[:-1])
            assert side.receive() == WHOAMI
            side.send(ANSWER)
        return self

    def stand(self) -> None:
        """Stop the bridge's process, and return once it stands."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


class TestBridge:
    """bridge: two buses joined."""

    @pytest.fixture
    def other(self, directory: Path) -> Iterator[RealBus]:
        place = directory / "other"
        place.mkdir(mode=0o755)
        with RealBus(place, "--trace", str(place / "trace")) as running:
            yield running

    @contextlib.contextmanager
    def bridged(
        self, bus: RealBus, other: RealBus, *options: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a bridge; it has subscribed."""
        former = [patterns_of(running) for running in (bus, other)]
        count = max(1, len(options)) + 1
        addresses = (bus.path, other.path)
        with subprocess.Popen(
            [sys.executable, str(ROOT / "sbus_client.py"), "bridge"]
            + [*addresses, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                wait_for_patterns(bus, former[0] + count)
                wait_for_patterns(other, former[1] + count)
                wait_for(lambda: handles(process.pid, signal.SIGTERM))
                yield process
                process.wait(SECONDS_MAX)
            finally:
                process.kill()

    def test_both_directions(self, bus: RealBus, other: RealBus) -> None:
        """[ECHO-2] What is published on one is heard once on each."""
        with (
            self.bridged(bus, other) as process,
            bus.connect() as left,
            other.connect() as right,
        ):
            for peer in (left, right):
                peer.send(b"SUB ")
                peer.fence()
            left.send(publish(b"a", b"from left"))
            assert right.receive() == publish(b"a", b"from left")
            right.send(publish(b"b", b"from right"))
            assert left.receive() == publish(b"a", b"from left")
            assert left.receive() == publish(b"b", b"from right")
            assert right.receive() == publish(b"b", b"from right")
            process.terminate()
            assert outcome(process) == (0, "", "")
            assert left.fence() == right.fence() == []

    def test_patterns(self, bus: RealBus, other: RealBus) -> None:
        """Only keys that a pattern selects cross."""
        options = ("--pattern=a/", "--pattern=b/*")
        with (
            self.bridged(bus, other, *options) as process,
            other.connect() as right,
        ):
            right.send(b"SUB ")
            right.fence()
            keys = ("a", "a/1/2", "b/1/2", "b/1")
            publish_all(bus.path, *((key, b"") for key in keys))
            process.terminate()
            assert outcome(process) == (0, "", "")
            assert right.fence() == [publish(b"a/1/2"), publish(b"b/1")]

    def test_order_and_completeness(
        self, bus: RealBus, other: RealBus
    ) -> None:
        """[PUB-6] Many messages cross in order, and none is lost."""
        count = 5000
        with (
            self.bridged(bus, other) as process,
            Client(other.path) as right,
        ):
            right.subscribe("k")
            right.sync()
            with child_process(
                lambda: publish_all(
                    bus.path, *(("k", b"%d" % n) for n in range(count))
                )
            ):
                heard = [right.receive(SECONDS_MAX) for _ in range(count)]
            payloads = [received.payload for received in heard]
            assert payloads == [b"%d" % n for n in range(count)]
            process.send_signal(signal.SIGINT)
            assert outcome(process) == (0, "", "")

    @pytest.mark.parametrize("which", [0, 1])
    def test_bus_that_ends(
        self, bus: RealBus, other: RealBus, which: int
    ) -> None:
        """One line names it."""
        with self.bridged(bus, other) as process:
            ended = (bus, other)[which]
            ended.stop()
            assert outcome(process) == (1, "", gone(ended.path))

    def test_directions_do_not_wait_for_each_other(self) -> None:
        """One that is full holds up its own publishers alone."""
        with Sides() as sides:
            sides.joined()
            poll = select.poll()
            poll.register(sides.left_wire, select.POLLOUT)
            sent = 0
            while poll.poll(200):
                sides.left.send(publish(b"k", b"%d" % sent))
                sent += 1
            sides.right.send(publish(b"back"))
            assert sides.left.receive() == publish(b"back")
            heard = [sides.right.receive() for _ in range(sent)]
            assert heard == [publish(b"k", b"%d" % n) for n in range(sent)]

    def test_what_an_ended_bus_has_left(self) -> None:
        """It is published, although nothing can be published there."""
        packets = [publish(b"k", b"%d" % n) for n in range(200)]
        with Sides() as sides:
            sides.joined().stand()
            sides.left.send(*packets)
            sides.left_wire.close()
            sides.right.send(publish(b"back"))
            sides.process.send_signal(signal.SIGCONT)
            assert sides.right.receive_all() == packets
            done = outcome(sides.process)
        assert done == (1, "", gone(sides.addresses[0]))

    def test_signal_loses_nothing(self) -> None:
        """What comes before the last answer is forwarded."""
        with Sides() as sides:
            sides.joined()
            wait_for(lambda: handles(sides.process.pid, signal.SIGTERM))
            sides.process.terminate()
            for side in (sides.left, sides.right):
                assert [side.receive() for _ in sides.LEAVE] == sides.LEAVE
            sides.left.send(publish(b"k", b"late"), ANSWER)
            assert sides.right.receive() == publish(b"k", b"late")
            sides.right.send(publish(b"k", b"later"), ANSWER)
            assert sides.left.receive() == publish(b"k", b"later")
            assert outcome(sides.process) == (0, "", "")

    def test_second_bridge(self, bus: RealBus, other: RealBus) -> None:
        """It ends, whatever its patterns; the first one goes on."""
        with self.bridged(bus, other, "--pattern=a/") as first:
            done = run("sbus_client.py", "bridge", other.path, bus.path)
            what = f"sbus: {other.path} and {bus.path} are joined already:"
            what += " messages would go round for ever\n"
            assert done == (1, "", what)
            with other.connect() as right:
                right.send(b"SUB ")
                right.fence()
                publish_all(bus.path, ("a/1", b"v"))
                assert right.receive() == publish(b"a/1", b"v")
            first.terminate()
            assert outcome(first) == (0, "", "")

    def test_ring_of_three(
        self, bus: RealBus, other: RealBus, directory: Path
    ) -> None:
        """A chain is no ring; the bridge that would close one ends."""
        place = directory / "third"
        place.mkdir(mode=0o755)
        with (
            RealBus(place, "--trace", str(place / "trace")) as third,
            self.bridged(bus, other) as first,
            self.bridged(other, third) as second,
            third.connect() as end,
        ):
            end.send(b"SUB k")
            end.fence()
            publish_all(bus.path, ("k", b"v"))
            assert end.receive() == publish(b"k", b"v")
            done = run("sbus_client.py", "bridge", third.path, bus.path)
            assert done.status == 1 and "joined already" in done.errors
            for process in (first, second):
                process.terminate()
                assert outcome(process) == (0, "", "")

    def test_probe_that_comes_late(self) -> None:
        """What was forwarded before it stays so."""
        with Sides() as sides:
            sides.joined()
            sides.left.send(publish(b"k", b"v"))
            assert sides.right.receive() == publish(b"k", b"v")
            sides.right.send(sides.probe)
            assert outcome(sides.process).status == 1
            assert sides.left.is_disconnected()

    def test_many_messages_before_the_first_event(self) -> None:
        """What came before an answer is forwarded without an event."""
        packets = [publish(b"k", b"%d" % n) for n in range(200)]
        with Sides() as sides:
            sides.right.send(*packets)
            sides.joined()
            assert [sides.left.receive() for _ in packets] == packets

    def test_one_bus(self, bus: RealBus) -> None:
        """A bus is not joined with itself, whatever it is called."""
        same = bus.path.replace("/bus", "/./bus")
        done = run("sbus_client.py", "bridge", bus.path, same)
        what = f"sbus: {bus.path} and {same} are the same bus\n"
        assert done == (1, "", what)

    def test_no_bus(self, bus: RealBus, directory: Path) -> None:
        """The line does not name -a, which is no option here."""
        path = str(directory / "nothing")
        done = run("sbus_client.py", "bridge", bus.path, path)
        what = f"sbus: no bus at {path}: nothing is there; start sbusd, or"
        assert done == (1, "", f"{what} give its address\n")

    def test_address_option(self) -> None:
        """Two addresses are enough."""
        done = sbus("/nowhere", "bridge", "/one", "/other")
        what = "sbus: bridge takes two addresses and no -a; --help lists"
        assert done == (2, "", f"{what} the options\n")


# =============================================================================
# All commands
# =============================================================================


class TestUsage:
    """Exit statuses, and one clear line."""

    @pytest.mark.parametrize(
        "arguments, error",
        [
            ((), "the following arguments are required: COMMAND"),
            (("pub",), "the following arguments are required: KEY"),
            (("nothing",), "argument COMMAND: invalid choice: 'nothing'.*"),
            (("whoami", "x"), "unrecognized arguments: x"),
            (("sub", "-x"), "unrecognized arguments: -x"),
            (("-a",), "argument -a/--address: expected one argument"),
        ],
    )
    def test_wrong_usage(self, arguments: tuple[str, ...], error: str) -> None:
        """A wrong command line is one line and the exit status 2."""
        done = sbus("/nowhere", *arguments)
        assert (done.status, done.output) == (2, "")
        what = f"sbus: {error}; --help lists the options\n"
        assert re.fullmatch(what, done.errors)

    @pytest.mark.parametrize("command", [["sub"], ["pub", "k"], ["whoami"]])
    def test_no_bus(self, directory: Path, command: list[str]) -> None:
        """No bus at the address is one line and the exit status 1."""
        path = str(directory / "bus")
        what = f"sbus: no bus at {path}: nothing is there; start sbusd"
        what += ", or give its address with -a\n"
        assert sbus(path, *command) == (1, "", what)

    def test_forbidden_bus(
        self, directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where another address is no help the line does not name -a."""
        path = directory / "bus"
        with seqpacket() as listener:
            listener.bind(str(path))
            path.chmod(0)
            with other_user():
                assert sbus_client.main(["-a", str(path), "whoami"]) == 1
        what = f"sbus: no bus at {path}: {FORBIDDEN}\n"
        assert capsys.readouterr() == ("", what)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("pub", "-a", "{}", "k", "v"),
            ("pub", "k", "v", "-a", "{}"),
            ("pub", "--address={}", "--", "k", "v"),
            ("-a", "/nowhere", "pub", "-a{}", "k", "v"),
        ],
    )
    def test_address_after_the_command(
        self, bus: RealBus, arguments: tuple[str, ...]
    ) -> None:
        """An address may follow the command; of several the last counts."""
        command = [word.format(bus.path) for word in arguments]
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert run("sbus_client.py", *command) == (0, "", "")
            assert peer.receive() == b"MSG k\0v"

    def test_address_after_every_command(self, directory: Path) -> None:
        """sub and whoami take it too."""
        path = str(directory / "bus")
        for arguments in (["sub", "-a", path, "x"], ["whoami", "-a", path]):
            done = run("sbus_client.py", *arguments)
            assert done.status == 1
            assert done.errors.startswith(f"sbus: no bus at {path}: ")

    def test_wrong_address(self) -> None:
        """A wrong address is one line and the exit status 1."""
        done = sbus("", "whoami")
        what = "sbus: '': a path has 1 to 107 bytes, none NUL\n"
        assert done == (1, "", what)

    def test_help(self) -> None:
        """The help names every command."""
        done = run("sbus_client.py", "--help")
        assert (done.status, done.errors) == (0, "")
        for command in ("sub", "pub", "whoami"):
            assert re.search(f"^    {command} ", done.output, re.M)

    @pytest.mark.parametrize(
        "arguments", [["--help"], ["sub", "--help"], ["--version"]]
    )
    def test_help_on_a_full_device(self, arguments: list[str]) -> None:
        """It is output as any other."""
        what = "sbus: standard output: No space left on device\n"
        with open("/dev/full", "w") as full:
            command = [sys.executable, str(ROOT / "sbus_client.py")]
            done = subprocess.run(
                [*command, *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            )
        assert (done.returncode, done.stderr) == (1, what)

    @pytest.mark.parametrize(
        "command, facts",
        [
            (
                "sub",
                [
                    "[PATTERN ...]",
                    "a line each: its key, a tab, its payload",
                    "no printable text are escaped as in a Python bytes",
                    "'a/*' selects a/b but not a/b/c, 'a/' selects both",
                    "none at all selects all",
                ],
            ),
            (
                "pub",
                [
                    "[-a ADDRESS]",
                    "KEY [PAYLOAD]",
                    "KEY the routing key that subscribers' patterns select",
                    "'-' or no PAYLOAD is standard input as it is, a final"
                    " line feed included",
                    "write -- before a PAYLOAD that begins with '-'",
                ],
            ),
            ("whoami", ["[-a ADDRESS]", "credentials"]),
        ],
    )
    def test_help_of_a_command(self, command: str, facts: list[str]) -> None:
        """The help of a command says what it takes and prints."""
        env = {**ENVIRONMENT, "COLUMNS": "80"}
        done = run("sbus_client.py", command, "--help", env=env)
        assert (done.status, done.errors) == (0, "")
        assert max(map(len, done.output.splitlines())) < 80
        text = " ".join(done.output.split())
        assert [fact for fact in facts if fact not in text] == []

    def test_examples_in_the_help(self, bus: RealBus) -> None:
        """The examples are commands that work together."""
        examples = {}
        for command in ("sub", "pub"):
            text = run("sbus_client.py", command, "--help").output
            _, example = text.split("\nexample:\n  sbus ")
            examples[command] = shlex.split(example)
        with started(bus.path, *examples["sub"]) as subscriber:
            wait_for_patterns(bus, 1)
            assert sbus(bus.path, *examples["pub"]) == (0, "", "")
            assert subscriber.stdout
            line = "\t".join(examples["pub"][1:]) + "\n"
            assert subscriber.stdout.readline() == line
            bus.stop()

    @pytest.mark.parametrize(
        "arguments", [["--", "k", "-v"], ["k", "--", "-v"]]
    )
    def test_payload_that_begins_with_a_dash(
        self, bus: RealBus, arguments: list[str]
    ) -> None:
        """What follows -- is no option."""
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert sbus(bus.path, "pub", *arguments) == (0, "", "")
            assert peer.receive() == b"MSG k\0-v"

    @pytest.mark.parametrize(
        "arguments, what",
        [
            (["sub", "--count=0"], "'0' is not a number from 1"),
            (["pub", "k", "--repeat=x"], "'x' is not a number from 1"),
            (["pub", "k", "--rate=0"], "'0' is not a number from 0.000001 to"),
            (["top", "--interval=nan"], "'nan' is not a number from 0.000001"),
            (["sub", "--timeout=x"], "'x' is not a number from 0.000001 to"),
            (["bridge", "/one"], "the following arguments are required"),
            (["completion", "zsh"], "argument shell: invalid choice: 'zsh'"),
        ],
    )
    def test_wrong_value(self, arguments: list[str], what: str) -> None:
        """A wrong value is one line and the exit status 2."""
        done = run("sbus_client.py", *arguments)
        assert (done.status, done.output) == (2, "")
        assert what in done.errors and done.errors.count("\n") == 1

    def test_address_in_the_environment(self, bus: RealBus) -> None:
        """SBUS_ADDRESS stands for -a, which is stronger; empty is none."""
        for value, arguments, status in (
            (bus.path, [], 0),
            ("/nowhere", ["-a", bus.path], 0),
            (bus.path, ["-a", "/nowhere"], 1),
        ):
            env = {**ENVIRONMENT, "SBUS_ADDRESS": value}
            command = ["sbus_client.py", "whoami", *arguments]
            assert run(*command, env=env).status == status

    def test_empty_address_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is as if it were not there."""
        monkeypatch.setenv("SBUS_ADDRESS", "")
        monkeypatch.setattr(sbus_client, "Client", lambda address: address)
        options = sbus_client.Options()
        bus: Any = sbus_client.open_bus(options)
        assert bus is None

    def test_every_command_has_an_example(self) -> None:
        """It begins with the command, and can be parsed."""
        parser, commands = sbus_client.option_parsers()
        for name, command in commands.items():
            assert f"    {name} " in parser.format_help()
            _, example = command.format_help().split("\nexample:\n  sbus ")
            words = shlex.split(example.split(">")[0])
            assert words[0] == name
            assert parser.parse_args(words).command == name


class TestCompletion:
    """completion: what bash completes."""

    def completed(self, *words: str) -> list[str]:
        """Return what bash offers for the last word."""
        script = run("sbus_client.py", "completion", "bash").output
        quoted = " ".join(map(shlex.quote, words))
        script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _sbus"
        script += '; printf "%s\\n" "${COMPREPLY[@]}"; complete -p sbus'
        done = subprocess.run(
            ["bash", "--norc", "-c", script], capture_output=True, text=True
        )
        *offers, rule = done.stdout.splitlines()
        assert (done.stderr, rule) == ("", "complete -o default -F _sbus sbus")
        return [offer for offer in offers if offer]

    @pytest.mark.parametrize(
        "words, offers",
        [
            (["p"], ["pub", "ping"]),
            (["st"], ["stats"]),
            (["stats", "--"], ["--help", "--address", "--json"]),
            (["-a", "sub", "co"], ["control", "completion"]),
            (["--address", "=", "sub", "rec"], ["record"]),
            (["--v"], ["--version"]),
            (["sub", "--ti"], ["--time", "--timeout"]),
            (["-a", "/tmp/bus", "sub", "a/*", "--r"], ["--raw"]),
            (["record", "--seg"], ["--segment-mib", "--segment-seconds"]),
            (["bridge", "--a"], []),
            (["pub", "--a"], ["--address"]),
            (["completion", "b"], ["bash"]),
            (["sub", "-a", ""], []),
            (["--address", "=", ""], []),
        ],
    )
    def test_offers(self, words: list[str], offers: list[str]) -> None:
        """Commands, then the options of the command; else files."""
        assert self.completed("sbus", *words) == offers
