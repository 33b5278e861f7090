"""Tests of the log and of the trace."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sbus
from fake_kernel import FakeKernel, start_journal
from packets import WHOAMI, publications, publish
from processes import ROOT, SBUSD, SECONDS_MAX
from real_bus import RealBus, connect, needs_root, read_to_end
from servers import (
    is_served,
    mode_of,
    occupied,
    refusal,
    started,
    told_of,
)

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


class TestLog:
    def test_healthy_bus_is_quiet(self, directory: Path) -> None:
        """[RUN-14] One line at the start, one at the end."""
        with RealBus(directory) as bus, bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"), b"UNSUB k", b"UNSUB k")
            peer.send(b"CMSG unknown", b"CMSG echo/off")
            peer.fence()
        start = f"sbusd: start {bus.path} pid={bus.process.pid}"
        assert bus.log() == f"{start}{told_of()}\nsbusd: stop\n"

    @pytest.mark.parametrize("option", ["-f", "-v"])
    def test_hostile_bytes(self, directory: Path, option: str) -> None:
        """[RUN-15] Lines are printable ASCII of at most 300 bytes."""
        with RealBus(directory, option) as bus:
            for packet in HOSTILE:
                with bus.connect() as peer:
                    peer.send(b"SUB \xff\n", b"CMSG \xff\n", packet)
                    assert peer.receive_all() == []
        lines = bus.log_path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        for line in lines:
            assert re.fullmatch(b"sbusd: [ -~]{1,292}", line), line
        assert lines.count(b"sbusd: stop") == 1
        assert sum(b"disconnect client=" in line for line in lines) > 3

    def test_keys_are_cut(self, directory: Path) -> None:
        """[RUN-15] Of a client's text at most 80 bytes are shown."""
        with RealBus(directory, "-v") as bus, bus.connect() as peer:
            peer.send(b"SUB " + b"k" * 81)
            peer.fence()
            assert "k" * 70 in bus.log()
            assert "k" * 81 not in bus.log()

    def test_payloads_are_not_shown(self, directory: Path) -> None:
        """[RUN-15] Not even to whoever asks for every decision."""
        with RealBus(directory, "-v") as bus, bus.connect() as peer:
            peer.send(b"SUB k\0hidden", publish(b"k", b"hidden"))
            peer.send(b"CMSG unknown\0hidden", b"CMSG echo/off\0hidden")
            peer.send(b"UNSUB k\0hidden", b"BAD\0hidden")
            assert len(peer.receive_all()) == 1
        assert bus.log().count("[") > 6
        assert "hidden" not in bus.log()

    def test_every_decision(self, directory: Path) -> None:
        """[RUN-14] With -v the log names the rule of each packet."""
        own = f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}"
        steps = {
            b"SUB k": 'SUB "k": its count is 1 [SUB-1]',
            b"SUB k\0": 'SUB "k": its count is 2 [SUB-2]',
            b"UNSUB k": 'UNSUB "k": its count is 1 [UNSUB-1]',
            b"UNSUB l": 'UNSUB "l": ignored [UNSUB-2]',
            publish(b"k", b"123"): 'MSG "k" 3 bytes, message 1: receivers: 1'
            " [PUB-1]",
            publish(own.encode() + b"/x"): f'MSG "{own}/x" 0 bytes, message 2'
            ": receivers: 0 [CRED-10]",
            b"CMSG echo/off": 'CMSG "echo/off" [ECHO-2]',
            b"CMSG echo/on": 'CMSG "echo/on" [ECHO-3]',
            b"CMSG order/stack": 'CMSG "order/stack" [BLOCK-2]',
            b"CMSG what": 'CMSG "what" [CTL-2]',
            WHOAMI: 'CMSG "!/cred/whoami" [CRED-2]',
        }
        with RealBus(directory, "-v") as bus:
            with bus.connect() as peer:
                peer.send(*steps)
                peer.fence()
            bus.wait_for_log(' "end of input"\n')
            with bus.connect() as peer:
                peer.send(b"BAD")
                assert peer.is_disconnected()
        who = f"client=1 uid={os.getuid()} pid={os.getpid()}"
        log = bus.log()
        assert f"sbusd: open {who} [CRED-1]\n" in log
        for line in steps.values():
            assert f"sbusd: {who} {line}\n" in log
        assert f"sbusd: {who}: sent message 1 [PUB-1]\n" in log
        assert f"sbusd: {who}: sent an answer [CTL-3]\n" in log
        assert f'sbusd: close {who} "end of input"\n' in log
        assert "sbusd: close client=2" in log
        positions = [log.index(line) for line in steps.values()]
        assert positions == sorted(positions)

    def test_every_decision_on_a_stalled_client(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[RUN-14] With -v those of flood control are named, too."""
        caplog.set_level(logging.DEBUG, "sbus")
        kernel = FakeKernel(sbus.Limits(max_backlog=200))
        kernel.bus.journal = sbus.Journal(-1, {}, False, True)
        reader = kernel.connect(pid=1)
        sender = kernel.connect(pid=2)
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/hard/discard")
        sender.send(*publications(3))  # taken, queued, discarded
        reader.read()
        reader.send(b"CMSG blocking/soft/discard")
        sender.send(publish(b"k"))  # discarded
        reader.send(b"CMSG blocking/soft/block")
        sender.send(publish(b"k"))  # queued
        reader.read()
        reader.send(WHOAMI)
        reader.read()
        reader.wire.deaf = True
        sender.send(publish(b"k"))
        to, by = "client=1 uid=1000 pid=1:", "client=2 uid=1000 pid=2:"
        size = len(publish(b"k")) + sbus.PACKET_OVERHEAD_BYTES
        answer = len(WHOAMI + b"\0!/cred/100/1000/1") + 128
        decisions = [
            line for line in caplog.messages if line.startswith((to, by))
        ]
        assert decisions == [
            f"{to} sent message 1 [PUB-1]",
            f"{to} stalled, queued message 2, backlog {size + 1} bytes"
            " [BLOCK-4]",
            f'{to} discarded message 3 "hard/discard" [BLOCK-9]',
            f"{to} sent message 2 [PUB-1]",
            f'{to} discarded message 4 "soft/discard" [BLOCK-5]',
            f"{by} paused for client=1 [BLOCK-7]",
            f"{to} stalled, queued message 5, backlog {size} bytes [BLOCK-4]",
            f"{to} sent message 5 [PUB-1]",
            f"{by} resumed [BLOCK-12]",
            f"{to} stalled, queued an answer, backlog {answer} bytes"
            " [BLOCK-17]",
            f"{to} sent an answer [CTL-3]",
            f'{to} discarded message 6 "deaf" [CONN-8]',
        ]

    def test_publisher_that_two_hold(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[BLOCK-12] It is resumed once, by the last of them."""
        caplog.set_level(logging.DEBUG, "sbus")
        kernel = FakeKernel()
        kernel.bus.journal = sbus.Journal(-1, {}, False, True)
        readers, sender = [kernel.connect() for _ in "12"], kernel.connect()
        for reader in readers:
            reader.wire.room = 0
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(publish(b"k"))
        for reader in readers:
            resumed = [line for line in caplog.messages if "resumed" in line]
            assert sender.paused and not resumed
            reader.wire.room = None
            kernel.run()
        resumed = [line for line in caplog.messages if "resumed" in line]
        assert len(resumed) == 1 and not sender.paused


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Give the end to write to of a pipe that has no room."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


class TestBlockedLog:
    def test_pipe_that_nobody_reads(self, directory: Path) -> None:
        """[RUN-16] The bus goes on; lines are left out, none is cut."""
        reader, writer = os.pipe()
        path = str(directory / "bus")
        with started("-va", path, stderr=writer) as output:
            os.close(writer)
            read_to_end(output)
            with connect(path) as peer:
                for number in range(2_000):
                    peer.send(b"SUB %d" % number, b"UNSUB %d" % number)
                assert peer.fence() == []
            for _ in range(20):
                with connect(path) as peer:
                    peer.send(b"malformed")
                    assert peer.is_disconnected()
            assert is_served(directory / "bus")
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read()
        assert 0 < text.count(b"\n") < 4_000
        assert re.fullmatch(b"(sbusd: [ -~]+\n)+", text)

    def test_terminal_that_nobody_reads(self, directory: Path) -> None:
        """[RUN-16] The bus goes on; it says that it has room, and waits."""
        reader, terminal = os.openpty()
        path = f"{directory}/bus"
        with started("-va", path, stderr=terminal) as output:
            os.close(terminal)
            read_to_end(output)
            with connect(path) as peer:
                peer.send(*publications(2_000))
                assert peer.fence() == []
        with os.fdopen(reader, "rb", 0) as screen:
            assert screen.read(13) == b"sbusd: start "

    @pytest.mark.parametrize("status, argument", [(1, "--trace=/"), (2, "-x")])
    def test_full_pipe_at_the_start(
        self, directory: Path, status: int, argument: str
    ) -> None:
        """[RUN-16] [RUN-1] [RUN-2] A refusal does not wait either."""
        with full_pipe() as writer:
            done = subprocess.run(
                [*SBUSD, "-a", f"{directory}/bus", argument],
                stderr=writer,
                timeout=SECONDS_MAX,
            )
        assert done.returncode == status

    def test_pipe_that_is_made_smaller(self) -> None:
        """[RUN-16] Its reader can do so after it has said to have room."""
        code = (
            "import sbus, select, sys, types\n"
            "ready = types.SimpleNamespace()\n"
            "ready.register, ready.poll = print, lambda _: [2]\n"
            "select.poll = lambda: ready\n"
            "sys.exit(sbus.main(['-x']))"
        )
        with full_pipe() as writer:
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.DEVNULL,
                stderr=writer,
                cwd=ROOT,
                timeout=SECONDS_MAX,
            )
            assert os.get_blocking(writer)  # for those who share it
        assert done.returncode == 2

    @pytest.mark.parametrize("what", ["full disk", "closed pipe"])
    def test_log_that_fails(self, directory: Path, what: str) -> None:
        """[RUN-16] The bus goes on."""
        if what == "full disk":
            log = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, log = os.pipe()
            os.close(reader)
        path = str(directory / "bus")
        with started("-va", path, stderr=log) as output:
            os.close(log)
            assert read_to_end(output) == b""
            with connect(path) as peer:
                peer.send(b"malformed")
                assert peer.is_disconnected()
            assert is_served(directory / "bus")


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace without their time."""
    events = []
    for line in path.read_bytes().splitlines():
        event = json.loads(line.decode("ascii"))
        assert list(event)[:3] == ["n", "t", "ev"]
        assert isinstance(event.pop("t"), int)
        events.append(event)
    return events


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """Return events with their numbers from 1."""
    return [{"n": n, **event} for n, event in enumerate(events, 1)]


class Traced(NamedTuple):
    """A bus on a fake kernel with a trace."""

    kernel: FakeKernel
    path: Path

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events so far, of some kinds."""
        events = events_of(self.path)
        return [event for event in events if event["ev"] in kinds]


@contextlib.contextmanager
def traced(
    path: Path, payloads: bool = False, **options: Any
) -> Iterator[Traced]:
    """Give a bus on a fake kernel with a trace, and end it."""
    kernel = FakeKernel(**options)
    journal = start_journal(kernel, path, {"version": "7"}, payloads)
    yield Traced(kernel, path)
    journal.close()


class TestTraceEvents:
    def test_every_kind(self, directory: Path) -> None:
        """[TRACE-1] [TRACE-2] All events, their fields and their order."""
        path = directory / "trace"
        limits = sbus.Limits(max_backlog=200)
        with traced(path, limits=limits) as (kernel, _):
            reader = kernel.connect(uid=1000, gid=100, pid=11)
            sender = kernel.connect(uid=1001, gid=101, pid=12)
            reader.wire.room = 1
            reader.send(b"SUB k\0x", b"CMSG blocking/hard/discard\0x")
            sender.send(*publications(3))  # taken, queued, discarded
            reader.read()
            reader.send(b"CMSG blocking/soft/discard")
            sender.send(publish(b"k"))  # discarded
            reader.send(b"UNSUB k")
            sender.send(publish(b"k"))  # for nobody
            reader.close()
            sender.send(b"BAD")
        assert events_of(path) == numbered(
            {"ev": "start", "version": "7"},
            {"ev": "open", "c": 1, "gid": 100, "uid": 1000, "pid": 11},
            {"ev": "open", "c": 2, "gid": 101, "uid": 1001, "pid": 12},
            {"ev": "sub", "c": 1, "pattern": "k"},
            {"ev": "ctl", "c": 1, "key": "blocking/hard/discard"},
            {"ev": "msg", "c": 2, "m": 1, "key": "k", "size": 1},
            {"ev": "msg", "c": 2, "m": 2, "key": "k", "size": 1},
            {"ev": "msg", "c": 2, "m": 3, "key": "k", "size": 1},
            {"ev": "send", "m": 1, "c": 1},
            {"ev": "drop", "m": 3, "c": 1, "reason": "hard/discard"},
            {"ev": "send", "m": 2, "c": 1},
            {"ev": "ctl", "c": 1, "key": "blocking/soft/discard"},
            {"ev": "msg", "c": 2, "m": 4, "key": "k", "size": 0},
            {"ev": "drop", "m": 4, "c": 1, "reason": "soft/discard"},
            {"ev": "unsub", "c": 1, "pattern": "k"},
            {"ev": "msg", "c": 2, "m": 5, "key": "k", "size": 0},
            {"ev": "close", "c": 1, "reason": "end of input"},
            {
                "ev": "close",
                "c": 2,
                "reason": "[PKT-2] unknown packet kind b'BAD'",
            },
            {"ev": "stop", "version": "7"},
        )

    def test_client_that_no_longer_receives(self, directory: Path) -> None:
        """[TRACE-1] [CONN-8] What is for it is dropped, answers unseen."""
        with traced(directory / "trace") as (kernel, path):
            deaf = kernel.connect()
            deaf.wire.deaf = True
            deaf.send(b"SUB k", publish(b"k"), WHOAMI, publish(b"k"))
        drops = [event for event in events_of(path) if event["ev"] == "drop"]
        assert [drop["m"] for drop in drops] == [1, 2]
        assert {drop["reason"] for drop in drops} == {"deaf"}

    def test_what_has_no_effect(self, directory: Path) -> None:
        """[TRACE-1] Refused packets and control answers are no events."""
        with traced(directory / "trace") as (kernel, path):
            kernel.connect().send(b"UNSUB k", WHOAMI)
            kernel.connect().send(b"SUB !/x")
            kernel.connect().send(b"SUB !/cred/1/2/3/x")
            kernel.connect().send(b"MSG !\0")
            kernel.connect().send(b"MSG k")
        kinds = [event["ev"] for event in events_of(path)]
        assert kinds == ["start", "open", "ctl", *["open", "close"] * 4] + [
            "stop"
        ]

    def test_bytes_of_keys(self, directory: Path) -> None:
        """[TRACE-1] Each is the code point of its value; lines are ASCII."""
        key = bytes(range(1, 256)).replace(b"!", b"")
        with traced(directory / "trace") as trace:
            peer = trace.kernel.connect()
            peer.send(b"SUB " + key, publish(key), b"CMSG " + key)
            peer.send(b"UNSUB " + key)
            events = trace.events("sub", "msg", "ctl", "unsub")
        texts = [event.get("key", event.get("pattern")) for event in events]
        assert texts == [key.decode("latin-1")] * 4

    def test_payload(self, directory: Path) -> None:
        """[TRACE-3] Only where it is asked for, in base64."""
        payload = bytes(range(256))
        for is_wanted in (False, True):
            path = directory / f"trace-{is_wanted}"
            with traced(path, is_wanted) as trace:
                trace.kernel.connect().send(publish(b"k", payload))
                (event,) = trace.events("msg")
                data = base64.b64encode(payload).decode("ascii")
                assert event.get("data") == (data if is_wanted else None)
                assert event["size"] == 256

    @pytest.mark.parametrize("prefix", ["", "!/cred/1/2/3"])
    def test_payload_of_a_secret(self, directory: Path, prefix: str) -> None:
        """[TRACE-4] Never; the key and the size are written."""
        options = {"cred_prefix": prefix.encode("ascii")}
        key = (prefix and prefix + "/") + "!/cred/100/1000/11/x"
        with traced(directory / "trace", True, **options) as trace:
            reader = trace.kernel.connect(pid=11)
            reader.send(b"SUB " + key.encode("ascii"))
            packet = publish(key.encode("ascii"), b"hidden")
            trace.kernel.connect().send(packet)
            assert reader.read() == [packet]
            (event,) = trace.events("msg")
        assert event == {
            "n": 5, "ev": "msg", "c": 2, "m": 1, "key": key, "size": 6,
        }  # fmt: skip
        assert b"hidden" not in trace.path.read_bytes()
        assert b"aGlkZGVu" not in trace.path.read_bytes()

    def test_events_of_a_real_bus(self, directory: Path) -> None:
        """[TRACE-1] [TRACE-2] Numbers have no gaps, sends follow messages."""
        path = directory / "trace"
        with (
            RealBus(directory, "--trace", str(path)) as bus,
            bus.clients(2) as (reader, sender),
        ):
            reader.send(b"SUB k")
            reader.fence()
            sender.send(*publications(500))
            for _ in range(500):
                reader.receive()
        events = events_of(path)
        about = {
            "version": sbus.__version__,
            "address": bus.path,
            "host": socket.gethostname(),
            "cred_prefix": "",
        }
        assert events[0] == {"n": 1, "ev": "start", **about}
        assert events[-1] == {"n": len(events), "ev": "stop", **about}
        assert [event["n"] for event in events] == [*range(1, len(events) + 1)]
        order = [e["m"] for e in events if e["ev"] == "msg"]
        assert order == [*range(1, 501)]
        assert order == [e["m"] for e in events if e["ev"] == "send"]
        assert {e["reason"] for e in events if e["ev"] == "close"} <= {
            "end of input", "stop",
        }  # fmt: skip

    def test_time(self, directory: Path) -> None:
        """[TRACE-1] Nanoseconds since 1970."""
        before = time.time_ns()
        with traced(directory / "trace"):
            pass
        for line in (directory / "trace").read_text().splitlines():
            assert before <= json.loads(line)["t"] <= time.time_ns()


class TestTraceFile:
    def test_mode(self, directory: Path) -> None:
        """[TRACE-5] 0600, whatever the umask allows."""
        path = directory / "trace"
        with RealBus(directory, "--trace", str(path), umask=0):
            assert mode_of(path) == 0o600

    def test_start_is_written_at_once(self, directory: Path) -> None:
        """[TRACE-1] A bus without clients has a trace as well."""
        path = directory / "trace"
        with RealBus(directory, "--trace", str(path)):
            assert [event["ev"] for event in events_of(path)] == ["start"]

    def test_two_runs(self, directory: Path) -> None:
        """[TRACE-5] [TRACE-2] The second is appended, numbered from 1."""
        path = directory / "trace"
        path.write_text('{"n":1,"t":1,"ev":"x"}\n')
        for _ in range(2):
            with traced(path):
                pass
        numbers = [(event["n"], event["ev"]) for event in events_of(path)]
        runs = [(1, "start"), (2, "stop")] * 2
        assert numbers == [(1, "x"), *runs]

    def test_unfinished_line(self, directory: Path) -> None:
        """[TRACE-5] What a crash cut off stays a line of its own."""
        path = directory / "trace"
        path.write_text('{"n":1,"t":1,"ev"')
        with traced(path):
            pass
        first, *others = path.read_text().splitlines()
        assert first == '{"n":1,"t":1,"ev"'
        assert [json.loads(line)["n"] for line in others] == [1, 2]

    def test_killed_server(self, directory: Path) -> None:
        """[TRACE-5] What happened before the last round is in the file."""
        path = directory / "trace"
        for _ in range(2):
            with (
                RealBus(directory, "-r", "--trace", str(path)) as bus,
                bus.connect() as peer,
            ):
                peer.send(b"SUB k")
                peer.fence()
                peer.fence()  # answered in a later round than the first
                bus.process.kill()
                bus.process.wait()
        kinds = [event["ev"] for event in events_of(path)]
        assert kinds[:4] == ["start", "open", "sub", "ctl"]
        assert kinds.count("start") == 2
        assert "stop" not in kinds

    @pytest.mark.parametrize(
        "what, reason",
        [
            ("directory", "Is a directory"),
            ("FIFO", "not a regular file"),
            ("link to nothing", "a symbolic link is not followed"),
            ("stream server", "No such device or address"),
        ],
    )
    def test_wrong_file(self, directory: Path, what: str, reason: str) -> None:
        """[TRACE-5] [RUN-2] One line; nothing is left behind."""
        options = ("-a", "bus", "--trace", "trace")
        with occupied(directory / "trace", what):
            line = refusal(1, *options, cwd=directory)
        assert line == f"sbusd: trace: {reason}\n"
        assert os.listdir(directory) == ["trace"]

    @needs_root
    def test_file_of_another_user(self, directory: Path) -> None:
        """[TRACE-5] [RUN-2] Who could read what is written to it."""
        path = directory / "trace"
        path.touch()
        os.chown(path, 1234, -1)
        line = refusal(1, "-a", "bus", "--trace", str(path), cwd=directory)
        assert line == f"sbusd: {path}: another user's file\n"

    def test_device(self, directory: Path) -> None:
        """[TRACE-5] [RUN-2] A device is no file."""
        options = ("-a", "bus", "--trace", "/dev/full")
        line = refusal(1, *options, cwd=directory)
        assert line == "sbusd: /dev/full: not a regular file\n"

    def test_full_disk(self, directory: Path) -> None:
        """[TRACE-6] [TRACE-2] One line in the log, and the bus goes on."""
        path = directory / "trace"
        with (
            RealBus(directory, "--trace", str(path)) as bus,
            file_size_limit(2_000, bus.process.pid),
            bus.connect() as peer,
        ):
            for number in range(50):
                peer.send(b"SUB %d" % number)
            assert peer.fence() == []
            bus.wait_for_log("[TRACE-6] no trace from now on: ")
            assert is_served(directory / "bus")
        assert bus.log().count("TRACE-6") == 1
        assert path.stat().st_size == 2_000
        *lines, _ = path.read_text("ascii").splitlines()
        numbers = [json.loads(line)["n"] for line in lines]
        assert numbers == [*range(1, len(numbers) + 1)]

    def test_full_disk_at_the_start(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[TRACE-6] A server starts without its trace, too."""
        path = directory / "trace"
        with file_size_limit(0), traced(path) as trace:
            peer = trace.kernel.connect()
            peer.send(WHOAMI)
            assert len(peer.read()) == 1
        assert path.read_bytes() == b""
        assert "[TRACE-6] no trace from now on: " in caplog.text


@contextlib.contextmanager
def file_size_limit(bytes_max: int, pid: int = 0) -> Iterator[None]:
    """Let files grow no larger for a while, as if the disk were full."""
    kind = resource.RLIMIT_FSIZE
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (bytes_max, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, (soft, hard))
