"""Tests of the log and of the trace."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_kernel import FakeKernel
from packets import WHOAMI, publications, publish
from processes import SBUSD, SECONDS_MAX
from real_bus import RealBus, wait_for

HOSTILE = (
    b"",
    b"\n",
    b"BAD\r\nsbusd: stop\n\x1b[2J",
    b"BAD" + bytes(range(256)),
    b"\xff" * 400,
    b"x" * 100_000,
    b"SUB !/" + b"\xff" * 90,
    b"SUB " + b"\x80" * 5_000,
    b"MSG no NUL \xff\n",
)
LINE = re.compile(rb"sbusd: [ -~]{1,292}")
WHO = rf"client=\d+ uid={os.getuid()} pid={os.getpid()}"
EVENT = re.compile(rf"sbusd: {WHO} \w+ (\w+=.+ )?\[[A-Z]+-\d+\]")  # of -v


def lines_of(bus: RealBus) -> list[str]:
    """Return the lines of a log; each is short and printable."""
    lines = bus.log_path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    for line in lines:
        assert LINE.fullmatch(line), line
    return [line.decode("ascii") for line in lines]


class TestLog:
    def test_healthy_bus_is_quiet(self, directory: Path) -> None:
        """[RUN-15] One line at the start, one at the end."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"), b"UNSUB k", b"UNSUB k")
            peer.send(b"CMSG unknown", b"CMSG echo/off")
            peer.fence()
        start, stop = lines_of(bus)
        begin = f"sbusd: start {bus.path} pid={bus.process.pid}"
        assert start.startswith(begin) and stop == "sbusd: stop"

    @pytest.mark.parametrize("option", ["-f", "-v"])
    def test_hostile_bytes(self, directory: Path, option: str) -> None:
        """[RUN-15] [CONN-13] Lines cannot be forged; each names a rule."""
        with RealBus(directory, option) as bus:
            for packet in HOSTILE:
                with bus.connect() as peer:
                    peer.send(b"SUB \xff\n", b"CMSG \xff\n", packet)
                    assert peer.receive_all() == []
        lines = lines_of(bus)
        assert lines.count("sbusd: stop") == 1
        causes = [line for line in lines if " disconnect " in line]
        for line in causes:
            assert re.match(rf"sbusd: disconnect {WHO} \[[A-Z]+-\d+\] ", line)
        for rule in ("PKT-2", "KEY-4", "LIMIT-4"):
            assert f"[{rule}]" in "".join(causes)

    def test_every_decision(self, directory: Path) -> None:
        """[RUN-15] With -v each event is a line of one form."""
        steps = {  # what is sent, and what the log says of it
            b"SUB k\0hidden": 'sub pattern="k" [SUB-1]',
            b"SUB k": 'sub pattern="k" [SUB-2]',
            b"UNSUB k\0hidden": 'unsub pattern="k" [UNSUB-1]',
            b'UNSUB \xe9"': r'ignore pattern="\u00e9\"" [UNSUB-2]',
            publish(b"k", b"hidden"): 'msg key="k" size=6 m=1 receivers=1'
            " [PUB-1]",
            b"SUB " + b"long" * 30: 'sub pattern="' + "long" * 15,
            b"CMSG echo/off\0hidden": 'ctl key="echo/off" [ECHO-2]',
            b"CMSG what": 'ctl key="what" [CTL-2]',
            WHOAMI: 'ctl key="!/cred/whoami" [CRED-2]',
            b"BAD\0hidden": 'close reason="[PKT-2]',
        }
        with RealBus(directory, "-v") as bus, bus.connect() as peer:
            peer.send(*steps)
            assert len(peer.receive_all()) == 2
        lines = lines_of(bus)
        who = f"sbusd: client=1 uid={os.getuid()} pid={os.getpid()} "
        texts = [line[len(who) :] for line in lines if line.startswith(who)]
        assert texts[0].startswith("open ")
        found = [
            next(i for i, text in enumerate(texts) if text.startswith(told))
            for told in steps.values()
        ]
        assert found == sorted(found)
        assert "send m=1 [PUB-1]" in texts
        for line in lines:
            if " client=" in line and "disconnect" not in line:
                assert EVENT.fullmatch(line) or len(line) == 299, line
        assert "hidden" not in bus.log()
        assert "long" * 21 not in bus.log()

    @pytest.mark.parametrize("users", [1, 20])
    def test_lines_are_limited(self, directory: Path, users: int) -> None:
        """[CONN-13] A second one for a user, ten for a rule; all named."""
        if users > 1 and os.getuid():
            pytest.skip("only root can connect as other users")
        with RealBus(directory, "-go") as bus:
            start = time.monotonic()
            for number in range(100):
                uid = 2_000 + number % users if users > 1 else None
                with bus.connect(uid) as peer:
                    peer.send(b"BAD")
                    assert peer.is_disconnected()
            with bus.connect() as peer:
                peer.send(b"SUB !")
                assert peer.is_disconnected()
            assert bus.stop() == 0
            seconds = time.monotonic() - start
        lines = [line for line in lines_of(bus) if "[PKT-2]" in line]
        causes = [line for line in lines if "disconnect" in line]
        most = min(users, 10)
        assert most <= len(causes) <= most * (1 + seconds)
        left_out = re.findall(
            r"(\d+) more of .* pid=(\d+)$", "\n".join(lines), re.M
        )
        assert len(causes) + sum(int(count) for count, _ in left_out) == 100
        assert {pid for _, pid in left_out} == {str(os.getpid())}
        assert bus.log().count("[KEY-4]") == 1

    @pytest.mark.parametrize("count", [1, 2, 64, 65])
    def test_empty_packets_are_logged(
        self, kernel: FakeKernel, capfd: pytest.CaptureFixture[str], count: int
    ) -> None:
        """[CONN-13] [PKT-2] They look like the end of a client's input."""
        peer = kernel.connect()
        peer.send(*[b""] * count)
        assert peer.wire.closed
        assert "[PKT-2] empty packet" in capfd.readouterr().err

    def test_processes_left_out_are_named(self, directory: Path) -> None:
        """[CONN-13] Each one's error says that the log names it."""
        mistakes = ["import sys, socket"]
        mistakes += [
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
        ]
        mistakes += ["s.connect(sys.argv[1])", "s.send(b'BAD')", "s.recv(1)"]
        with RealBus(directory) as bus:
            command = [sys.executable, "-c", "\n".join(mistakes), bus.path]
            programs = [subprocess.Popen(command) for _ in range(3)]
            assert [program.wait() for program in programs] == [0, 0, 0]
            named = [f"pid={program.pid}" for program in programs]
            wait_for(lambda: all(name in bus.log() for name in named))
            assert bus.stop() == 0


@contextlib.contextmanager
def hung(what: str) -> Iterator[tuple[int, int]]:
    """Give a log that takes no lines, or few: its two ends."""
    reader, writer = os.openpty() if what == "terminal" else os.pipe()
    if what == "full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    elif what == "full pipe":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
    elif what == "broken pipe":
        os.dup2(os.open(os.devnull, os.O_RDWR), reader)
    yield reader, writer
    os.close(reader)
    os.close(writer)


class TestHungLog:
    @pytest.mark.parametrize(
        "what", ["pipe", "full pipe", "broken pipe", "full disk", "terminal"]
    )
    def test_the_bus_goes_on(self, directory: Path, what: str) -> None:
        """[RUN-16] Lines that nobody takes are left out, and none is cut."""
        with hung(what) as (reader, log):
            with (
                RealBus(directory, "-v", stderr=log) as bus,
                bus.connect() as peer,
            ):
                for number in range(2_000):
                    peer.send(b"SUB %d" % number, b"UNSUB %d" % number)
                assert peer.fence() == []
                peer.send(b"malformed")
                assert peer.is_disconnected()
                assert bus.stop() == 0
            command = [*SBUSD, "-x"]  # nor does a refusal wait
            done = subprocess.run(command, stderr=log, timeout=SECONDS_MAX)
            assert done.returncode == 2
            if what == "pipe":
                text = os.read(reader, 1 << 20)
                assert 0 < text.count(b"\n") < 4_000
                assert re.fullmatch(b"(sbusd: [ -~]+\n)+", text)


FIELDS = {  # of each event, after n, t and ev
    "start": ["version", "address", "host", "cred_prefix"],
    "stop": ["version", "address", "host", "cred_prefix"],
    "open": ["c", "gid", "uid", "pid"],
    "close": ["c", "reason"],
    "sub": ["c", "pattern"],
    "unsub": ["c", "pattern"],
    "ctl": ["c", "key"],
    "msg": ["c", "m", "key", "size"],
    "send": ["m", "c"],
    "drop": ["m", "c", "reason"],
}


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace of whole runs, each of which is valid."""
    events: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        event = json.loads(line.decode("ascii"))
        fields = ["n", "t", "ev", *FIELDS[event["ev"]]]
        fields += ["data"] * ("data" in event)
        assert sorted(event) == sorted(fields)  # in any order
        is_first = event["ev"] == "start"
        assert event["n"] == (1 if is_first else events[-1]["n"] + 1)
        assert is_first or event["t"] >= events[-1]["t"]
        events.append({name: event[name] for name in fields})
    return events


def pick(events: list[dict[str, Any]], kind: str) -> list[tuple[Any, ...]]:
    """Return the fields of all events of a kind."""
    return [
        tuple(event.values())[3:] for event in events if event["ev"] == kind
    ]


class TestTrace:
    def test_every_kind(self, directory: Path) -> None:
        """[TRACE-1] Each event in its place; a byte is a code point."""
        path = directory / "trace"
        before = time.time_ns()
        with RealBus(directory, "--trace", str(path)) as bus:
            assert pick(events_of(path), "start")  # without any client
            with bus.connect() as peer:
                peer.send(b"SUB \xe9\n\0x", b"SUB \xe9\n")
                peer.send(publish(b"\xe9\n", b"123"), publish(b"none"))
                peer.send(b"CMSG echo/off\0x", b"UNSUB \xe9\n")
                peer.send(b"UNSUB none", WHOAMI, b"BAD")
                assert len(peer.receive_all()) == 2
        events = events_of(path)
        assert before <= events[0]["t"] and events[-1]["t"] <= time.time_ns()
        version, *about = pick(events, "start")[0]
        assert about == [bus.path, socket.gethostname(), ""]
        *_, closed, stopped = events
        assert closed["reason"].startswith("[PKT-2] ")
        values = [tuple(event.values())[2:] for event in events]
        assert values.index(("send", 1, 1)) > 4  # after its message
        values.remove(("send", 1, 1))
        assert values == [
            ("start", version, *about),
            ("open", 1, os.getgid(), os.getuid(), os.getpid()),
            ("sub", 1, "\xe9\n"),
            ("sub", 1, "\xe9\n"),
            ("msg", 1, 1, "\xe9\n", 3),
            ("msg", 1, 2, "none", 0),
            ("ctl", 1, "echo/off"),
            ("unsub", 1, "\xe9\n"),
            ("ctl", 1, "!/cred/whoami"),
            ("close", 1, closed["reason"]),
            ("stop", version, *about),
        ]

    def test_every_message_has_one_end(self, directory: Path) -> None:
        """[TRACE-1] [CONN-10] [RUN-12] Sent, or dropped for a reason."""
        path = directory / "trace"
        with (
            RealBus(
                directory, "--trace", str(path), "--max-backlog", "100000"
            ) as bus,
            bus.clients(3) as (reader, leaver, sender),
        ):
            for peer in (reader, leaver):
                peer.send(b"SUB ", b"CMSG blocking/hard/discard")
                peer.fence()
            packets = [*publications(3_000)]
            sender.send(*packets)
            sender.fence()
            for peer in (reader, leaver):
                peer.send(b"CMSG blocking/soft/discard")
            wait_for(lambda: path.read_text().count("/soft/discard") == 2)
            leaver.wire.shutdown(socket.SHUT_WR)
            sender.send(*packets)
            sender.fence()
            assert bus.stop() == 0
            heard = reader.receive_all()
        events = events_of(path)
        sends = pick(events, "send")
        drops = pick(events, "drop")
        numbers = {m: key for _, m, key, _ in pick(events, "msg")}
        assert [*numbers] == [*range(1, 6_001)]
        assert len(heard) == sum(client == 1 for _, client in sends)
        assert heard == [
            (packets * 2)[m - 1] for m, client in sends if client == 1
        ]
        ends = Counter([*sends, *(drop[:2] for drop in drops)])
        assert set(ends.values()) == {1}
        assert {m for m, client in ends if client == 1} == set(numbers)
        reasons = {(client, reason) for _, client, reason in drops}
        for reason in ("hard/discard", "soft/discard", "deaf"):
            assert (1, reason) in reasons
        assert (2, "deaf") in reasons

    @pytest.mark.parametrize("prefix", ["", "!/cred/1/2/3"])
    def test_payloads(self, directory: Path, prefix: str) -> None:
        """[TRACE-4] Only where they are asked for; those of secrets never."""
        for options in ([], ["--trace-payload"]):
            path = directory / f"trace{len(options)}"
            more = ["--cred-prefix", prefix] if prefix else []
            with (
                RealBus(
                    directory, "--trace", str(path), *options, *more
                ) as bus,
                bus.connect() as peer,
            ):
                secret = publish(peer.path + b"/x", b"hidden")
                peer.send(b"SUB " + peer.path + b"/")
                peer.send(publish(b"k", bytes(range(256))), secret)
                assert peer.fence() == [secret]
            texts = [base64.b64encode(bytes(range(256))).decode("ascii")]
            public, private = pick(events_of(path), "msg")
            assert public == (1, 1, "k", 256, *texts[: len(options)])
            assert private[3:] == (6,)
            for text in (b"hidden", base64.b64encode(b"hidden")):
                assert text not in path.read_bytes()

    @pytest.mark.parametrize("is_killed", [False, True])
    def test_runs_are_appended(self, directory: Path, is_killed: bool) -> None:
        """[TRACE-1] Each numbered from 1; a cut line is one of its own."""
        path = directory / "trace"
        path.write_text('{"n":1,"t":1,"ev"')
        for _ in range(2):
            with (
                RealBus(directory, "-r", "--trace", str(path)) as bus,
                bus.connect() as peer,
            ):
                peer.send(b"SUB k")
                peer.fence()
                peer.fence()  # answered in a later round than the first
                bus.stop(signal.SIGKILL if is_killed else signal.SIGTERM)
        first, _, rest = path.read_text().partition("\n")
        assert first == '{"n":1,"t":1,"ev"'
        (directory / "rest").write_text(rest)
        kinds = [event["ev"] for event in events_of(directory / "rest")]
        assert kinds[:4] == ["start", "open", "sub", "ctl"]
        assert kinds.count("start") == 2
        assert kinds.count("stop") == (0 if is_killed else 2)

    def test_full_disk(self, directory: Path) -> None:
        """[RUN-16] [TRACE-1] One line in the log, and the bus goes on."""
        path = directory / "trace"
        with (
            RealBus(directory, "--trace", str(path)) as bus,
            bus.connect() as peer,
        ):
            few = (2_000, 2_000)
            resource.prlimit(bus.process.pid, resource.RLIMIT_FSIZE, few)
            for number in range(50):
                peer.send(b"SUB %d" % number)
            assert peer.fence() == []
            peer.send(b"SUB last", publish(b"last"))
            assert peer.fence() == [publish(b"last")]
            assert bus.stop() == 0
        assert bus.log().count(" no trace from now on: ") == 1
        assert path.stat().st_size == 2_000
        path.write_bytes(path.read_bytes().rpartition(b"\n")[0])
        assert len(events_of(path)) > 10
