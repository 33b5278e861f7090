"""Tests of the everyday commands: sub, pub, whoami, ping, control, stats."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbus_client
from commands import Terminal, publish_all, sbus, wait_for_patterns
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from processes import (
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
from real_bus import Listener, Peer, RealBus, seqpacket_pair
from sbus_client import PACKET_BYTES_MAX, Client, Message
from tools import command_line, json_lines, ping, pub, stats
from tools.record import Recorder


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

    def test_what_is_excluded(self, bus: RealBus) -> None:
        """It is neither printed nor counted."""
        arguments = ("sub", "a/", "--exclude=a/b/", "--exclude", "a/*")
        with started(bus.path, *arguments, "--count=1") as command:
            wait_for_patterns(bus, 1)
            keys = ("a/b/c", "a/b", "a/c", "a/c/d")
            publish_all(bus.path, *((key, b"v") for key in keys))
            assert outcome(command) == (0, "a/c/d\tv\n", "")

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
                command.stdout.close()  # and no other message comes
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

    def test_quick_way_to_print(self) -> None:
        """What is printed as it is, is what the slow way makes of it."""
        texts = ["", "a b", "é", "a\\", "\t", "\u202e", "𝄞", "a\udcff"]
        for text in texts:
            for encoding in ("utf-8", "ascii", "latin-1"):
                plain = text.encode("utf-8", "surrogateescape")
                # An escape in front makes it go the slow way
                slow = sbus_client.printable(b"\\" + plain, encoding)
                quick = sbus_client.printable(plain, encoding)
                assert slow == r"\\" + quick

    def test_ready(self, bus: RealBus) -> None:
        """A script that waits for the line loses nothing after it."""
        reader, writer = os.pipe()
        arguments = ("sub", f"--ready-fd={writer}", "--count=1", "k")
        options = {"pass_fds": (writer,)}
        with started(bus.path, *arguments, **options) as command:
            os.close(writer)
            with open(reader) as ready:
                assert ready.read() == "ready\n"
            publish_all(bus.path, ("k", b"v"))
            assert outcome(command) == (0, "k\tv\n", "")

    def test_ready_nowhere(self, bus: RealBus) -> None:
        """A descriptor that is not there is one line."""
        done = sbus(bus.path, "sub", "--ready-fd=77")
        what = "sbus: --ready-fd 77: Bad file descriptor\n"
        assert done == (1, "", what)

    @pytest.mark.parametrize("text", ["0", "1", "2", "-3", "x", "3.0"])
    def test_ready_on_what_is_in_use(self, bus: RealBus, text: str) -> None:
        """Where messages are printed is not closed before the first."""
        status, output, errors = sbus(bus.path, "sub", f"--ready-fd={text}")
        assert (status, output) == (2, "")
        assert f"{text!r} is no descriptor above 2" in errors

    def test_discarding(self, listener: Listener) -> None:
        """The mode is asked for first, and what was missed in the end."""
        command = started(listener.path, "sub", "--discard", "--count=1")
        with command as process, listener.accept() as server:
            assert server.receive() == b"CMSG blocking/soft/discard"
            assert server.receive() == b"SUB "
            server.send(b"MSG k\0v")
            assert [server.receive(), server.receive()] == [
                b"CMSG stats",
                WHOAMI,
            ]
            server.send(b'CMSG stats\0{"discarded": 1200}', ANSWER)
            what = "sbus: 1,200 messages were missed\n"
            assert outcome(process) == (0, "k\tv\n", what)

    def test_what_is_too_large(self, listener: Listener) -> None:
        """It is left out, said once, and counted; the rest is printed."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "100"}
        command = started(listener.path, "sub", "--count=2", env=env)
        with command as process, listener.accept() as server:
            assert server.receive() == b"SUB "
            large = publish(b"k", bytes(200))
            server.send(publish(b"k", b"1"), large, large)
            server.send(publish(b"k", b"2"))
            done = outcome(process)
        assert (done.status, done.output) == (0, "k\t1\nk\t2\n")
        first, last = done.errors.splitlines()
        assert "a packet of 206 bytes was received and lost" in first
        assert first.endswith("; SBUS_MAX_PACKET raises it")
        assert last == "sbus: 2 messages were too large"

    def test_wrong_limit_in_the_environment(self) -> None:
        """It is wrong usage."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "1e6"}
        done = sbus("/nowhere", "whoami", env=env)
        what = "sbus: SBUS_MAX_PACKET is '1e6', and no number"
        assert (done.status, done.output) == (2, "")
        assert done.errors == f"{what}; --help lists the options\n"

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
        """An object a line; what is no text is in base64."""
        lines = self.heard(bus, "--json").decode("ascii").splitlines()
        payload = base64.b64encode(self.BYTES).decode("ascii")
        assert [json.loads(line) for line in lines] == [
            {"key": "k", "payload_base64": payload},
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

    def test_null(self, bus: RealBus) -> None:
        """Payloads alone, with a NUL byte behind each."""
        assert self.heard(bus, "--null") == self.BYTES + b"\0two\0"

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
        what = "sbus: --raw and --null have no place for --time; --help lists"
        assert done == (2, "", f"{what} the options\n")

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
            ({"TERM": "dumb"}, "{}\tk\tv\\x1b[31m\r\n"),
            (
                {"NO_COLOR": ""},
                "\x1b[2m{}\x1b[m\t\x1b[36mk\x1b[m\tv\\x1b[31m\r\n",
            ),
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
        """[LIMIT-1] The largest message fits."""
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
        assert len(peer.receive()) == PACKET_BYTES_MAX

    def test_unreadable_lines(self, bus: RealBus) -> None:
        """Input that cannot be read is one line."""
        with open(os.devnull, "w") as file:
            done = sbus(bus.path, "pub", "k", "--lines", stdin=file)
        assert done == (1, "", "sbus: standard input: Bad file descriptor\n")

    @pytest.mark.parametrize(
        "arguments, what",
        [
            ("k v --lines", "take neither a PAYLOAD nor --repeat"),
            ("k --null --repeat=2", "take neither a PAYLOAD nor --repeat"),
            ("k --lines --null", "exclude each other"),
            ("k --json", "give a KEY, or --json, whose lines have it"),
            ("", "give a KEY, or --json, whose lines have it"),
        ],
    )
    def test_said_twice_or_not(self, arguments: str, what: str) -> None:
        """What is published comes from one place."""
        done = sbus("/nowhere", "pub", *arguments.split())
        assert (done.status, done.output) == (2, "")
        assert done.errors.endswith(f"{what}; --help lists the options\n")

    MESSAGES = [
        Message(b"k", b"v"),
        Message("é".encode(), b"a\nb"),
        Message(b"\xff", b"\0\xff\n"),
        Message(b"", b""),
    ]

    def test_messages_in_json(self, bus: RealBus, peer: Peer) -> None:
        """What sub writes is published as it was."""
        lines = (json_lines.as_json(one, 1) for one in self.MESSAGES)
        text = b"".join(lines).decode("ascii")
        assert sbus(bus.path, "pub", "--json", input=text) == (0, "", "")
        assert peer.fence() == [publish(*one) for one in self.MESSAGES]

    def test_messages_of_a_recorder(
        self, bus: RealBus, peer: Peer, directory: Path
    ) -> None:
        """What record writes is published as it was."""
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
            '{"key": "k"}',
            '{"key": 5, "payload": ""}',
            '{"key": "k", "payload_base64": "?"}',
            '{"rec": "r", "key": "\u20ac", "data": ""}',
        ],
    )
    def test_line_that_is_no_message(
        self, bus: RealBus, peer: Peer, line: str
    ) -> None:
        """It is named; those before it are published."""
        text = f'{{"key": "k", "payload": ""}}\n{line}\n'
        done = sbus(bus.path, "pub", "--json", input=text)
        what = "sbus: line 2 of standard input is no message, as sub --json"
        assert done == (1, "", f"{what} writes it\n")
        assert peer.receive() == publish(b"k")

    @pytest.mark.parametrize("end", ["", "\0"])
    def test_what_ends_with_nul(
        self, bus: RealBus, peer: Peer, end: str
    ) -> None:
        """A payload may have several lines, and what is large comes whole."""
        large = "x" * 200_000
        text = f"one\ntwo\0\0{large}{end}"
        done = sbus(bus.path, "pub", "k", "--null", input=text)
        assert done == (0, "", "")
        payloads = [b"one\ntwo", b"", large.encode()]
        assert peer.fence() == [publish(b"k", one) for one in payloads]

    def test_part_above_the_limit(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-1] Those before it are published, and it is named."""
        text = "one\0" + "x" * PACKET_BYTES_MAX
        done = sbus(bus.path, "pub", "k", "--null", input=text)
        what = "sbus: a part of standard input holds more than the 409594"
        assert done == (1, "", f"{what} bytes that fit with this key\n")
        assert peer.receive() == publish(b"k", b"one")

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
        messages = pub.paced([(b"k", b"")] * 30, 100)
        next(messages)
        late = pub.LATE_SECONDS + 0.05
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=late)
        start = time.monotonic()
        assert len(list(messages)) == 29
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
        for _ in range(int(counts[-1])):
            assert peer.receive() == publish(b"k", b"v")


class TestDropIn:
    """What sbus_client.py alone has in another form."""

    def printed(
        self, capfd: pytest.CaptureFixture[str], *words: str, **packets: bytes
    ) -> tuple[str, str]:
        """Return what it prints when a server has sent some packets."""
        ours, theirs = seqpacket_pair()
        with Peer(theirs) as server:
            server.send(*packets.values())
            arguments = ["-a", f"/dev/fd/{ours.detach()}", *words]
            assert sbus_client.main(arguments) == 0
        return capfd.readouterr()

    def test_sub(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Lines, or payloads as they are."""
        packets = {"one": b"MSG k\0v\n", "two": b"MSG l\0w"}
        lines = self.printed(capfd, "sub", "--count=2", **packets)
        assert lines == ("k\tv\\n\nl\tw\n", "")
        raw = self.printed(capfd, "sub", "--count=2", "--raw", **packets)
        assert raw == ("v\nw", "")

    def test_what_is_too_large(
        self,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is left out, and said."""
        monkeypatch.setenv("SBUS_MAX_PACKET", "100")
        packets = {"one": publish(b"k", bytes(200)), "two": b"MSG k\0v"}
        output, errors = self.printed(capfd, "sub", "--count=1", **packets)
        assert output == "k\tv\n"
        assert errors.startswith("sbus: a packet of 206 bytes was received")
        assert errors.endswith("; SBUS_MAX_PACKET raises it\n")

    def test_ping(self, capfd: pytest.CaptureFixture[str]) -> None:
        """One round trip."""
        output, errors = self.printed(capfd, "ping", answer=ANSWER)
        form = r"/dev/fd/\d+: 1 round trip: \d+\.\d{3} ms\n"
        assert re.fullmatch(form, output) and errors == ""

    def test_stats(self, capfd: pytest.CaptureFixture[str]) -> None:
        """[CTL-5] The server's own words."""
        packets = {"stats": b'CMSG stats\0{"client":7}', "answer": ANSWER}
        assert self.printed(capfd, "stats", **packets) == (
            '{"client":7}\n',
            "",
        )

    def published(self, bus: RealBus, *arguments: str) -> list[bytes]:
        """Return what it publishes of two lines, and the argument."""
        with bus.connect() as peer:
            peer.send(b"SUB ")
            peer.fence()
            command = ("sbus_client.py", "-a", bus.path, "pub", *arguments)
            done = run(*command, input="one\ntwo", env=ENVIRONMENT)
            assert done == (0, "", "")
            return peer.fence()

    def test_pub(self, bus: RealBus) -> None:
        """An argument, or standard input, whole or line by line."""
        assert self.published(bus, "k", "v") == [publish(b"k", b"v")]
        assert self.published(bus, "k") == [publish(b"k", b"one\ntwo")]
        packets = [publish(b"k", text) for text in (b"one", b"two")]
        assert self.published(bus, "k", "--lines") == packets

    def test_request(self, bus: RealBus, directory: Path) -> None:
        """[CRED-10] A copy of the file asks a copy that answers."""
        copy = directory / "sbus_client.py"
        copy.write_bytes((ROOT / "sbus_client.py").read_bytes())
        command = [sys.executable, str(copy), "-a", bus.path]
        with subprocess.Popen([*command, "reply", "a", "cat"]) as answering:
            wait_for_patterns(bus, 1)
            words = (str(copy), "-a", bus.path, "request", "a", "hello")
            assert run(*words, cwd=directory) == (0, "hello\n", "")
            answering.terminate()

    def test_payload_that_is_said_twice(self) -> None:
        """What is published comes from one place."""
        done = run("sbus_client.py", "pub", "k", "v", "--lines")
        what = "sbus: --lines takes no PAYLOAD; --help lists the options\n"
        assert done == (2, "", what)


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
        quantiles = [ping.quantile(values, part) for part in parts]
        assert quantiles == [1, 100, 198, 200]
        assert [ping.quantile([7], part) for part in parts] == [7] * 4

    @pytest.mark.parametrize(
        "command",
        [
            ["ping"],
            ["whoami"],
            ["stats"],
            ["control", "x"],
            ["pub", "k", "v"],
            ["record", "capture"],
        ],
        ids=lambda command: command[0],
    )
    def test_server_that_does_not_answer(
        self, listener: Listener, directory: Path, command: list[str]
    ) -> None:
        """One line says so in time."""
        options = ["--timeout=0.1"]
        done = sbus(listener.path, *command, *options, cwd=directory)
        what = "the server hangs, is stopped, or makes us wait"
        assert done == (1, "", f"sbus: the time is over: {what}\n")

    def test_server_that_lets_nobody_in(self, directory: Path) -> None:
        """The time to connect counts as well."""
        full = Listener(str(directory / "bus"), backlog=0)
        with full.wire, Client(full.path):
            done = sbus(full.path, "whoami", "--timeout=0.1")
        what = f"sbus: the bus at {full.path} does not let us in: the server"
        assert (done.status, done.output) == (1, "")
        assert done.errors.startswith(what)


class TestRequest:
    """request and reply: a question and its answer."""

    def test_answer(self, bus: RealBus) -> None:
        """[CRED-10] A command answers; what is no request does no harm."""
        script = 'echo "$SBUS_KEY: $(cat)"; exit 3'
        arguments = ("reply", "a/*", "sh", "-c", script)
        with started(bus.path, *arguments) as command:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("a/1", b"no request"))
            done = sbus(bus.path, "request", "a/b", "-", input="x\ty")
            assert done == (0, "a/b: x\\ty\\n\n", "")
            done = sbus(bus.path, "request", "a/c")
            assert done == (0, "a/c: \\n\n", "")
            command.terminate()
            assert outcome(command).errors == "sbus: sh: status 3\n" * 2

    def test_no_command(self) -> None:
        """It is wrong usage."""
        done = sbus("/nowhere", "reply", "a")
        what = "sbus: give a COMMAND that answers; --help lists the options\n"
        assert done == (2, "", what)

    def test_nobody_answers(self, bus: RealBus) -> None:
        """One line says so in time."""
        done = sbus(bus.path, "request", "a", "--timeout=0.1")
        assert (done.status, done.output) == (1, "")
        assert done.errors.startswith("sbus: the time is over")

    def test_command_that_is_not_there(self, bus: RealBus) -> None:
        """It is one line, when the first request comes."""
        with started(bus.path, "reply", "a", "/nowhere") as command:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, ("a", b"!/cred/1/2/3/x\0"))
            what = "sbus: /nowhere: No such file or directory\n"
            assert outcome(command) == (1, "", what)


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

    def test_key_that_nobody_knows(self, bus: RealBus) -> None:
        """[CTL-2] A server ignores it, but who typed it is told."""
        assert sbus(bus.path, "control", "echo/off") == (0, "", "")
        done = sbus(bus.path, "control", "echo/of")
        what = "sbus: the server does not answer 'echo/of', and this client"
        assert done == (1, "", f"{what} does not know it\n")

    def test_payload_is_standard_input(self, listener: Listener) -> None:
        """Only - is; without a payload there is none."""
        for arguments, packet in (
            (["-"], b"CMSG echo/off\0some input"),
            ([], b"CMSG echo/off"),
        ):
            command = started(
                listener.path,
                "control",
                "echo/off",
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
        assert len(samples) == len(stats.STATS_COLUMNS)

    def test_metrics_without_users(self, listener: Listener) -> None:
        """Who is not told of them is told that."""
        command = started(listener.path, "stats", "--openmetrics")
        with command as process, listener.accept() as server:
            server.receive()
            server.send(b'CMSG stats\0{"client": 1}', ANSWER)
            what = "sbus: no metrics: only root and the bus owner are told of"
            assert outcome(process) == (1, "", f"{what} users\n")

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
            assert command_line.main(["-a", f"/dev/fd/{fd}", "stats"]) == 0
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
