"""Tests of clients that die, pass descriptors, or try to spoil the log."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus
from attackers import Pair, attack, descriptors, descriptors_allowed
from fake_kernel import FakeKernel
from packets import publications, publish
from processes import ROOT, SECONDS_MAX, child_process
from real_bus import (
    Peer,
    RealBus,
    connect,
    needs_root,
    read_to_end,
    seqpacket,
    wait_for,
)
from sizes import SOAK, either

with seqpacket() as _wire:
    CAN_REFUSE = sbus.refuse_descriptors(_wire)


def pass_descriptors(peer: Peer, packet: bytes, passed: list[int]) -> bool:
    """Send a packet with descriptors; return whether the kernel took it.

    One that can refuse it must do so.
    """
    rights = struct.pack(f"{len(passed)}i", *passed)
    ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)
    try:
        peer.wire.sendmsg([packet], [ancillary])
    except PermissionError:
        assert CAN_REFUSE
        return False
    return True


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """Give a socket that keeps whoever closes it last for an hour.

    Only the end of the other side, here in the end, is sooner.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    with wire, peer:
        with contextlib.suppress(BlockingIOError):
            while True:
                wire.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        linger = struct.pack("ii", 1, 3_600)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        yield wire


class TestHostileClients:
    """Whatever a client does to its own sockets, the others go on."""

    pytestmark = SOAK

    def test_crashes_while_publishing(self, directory: Path) -> None:
        """[CONN-6] What the kernel took arrives, in order, without a gap."""
        count = 20
        shared = mmap.mmap(-1, 8 * count)
        taken = memoryview(shared).cast("q")  # of each, by the kernel

        def publish_all_the_time() -> None:
            peers = [connect(bus.path) for _ in range(count)]
            for number in itertools.count(1):
                for index, peer in enumerate(peers):
                    peer.send(publish(b"crash", b"%d %d" % (index, number)))
                    taken[index] = number

        with (
            RealBus(directory, "-go") as bus,
            Pair(bus) as pair,
            bus.connect() as reader,
        ):
            reader.send(b"SUB crash", b"CMSG blocking/soft/block")
            reader.fence()
            pair.talk(1)
            before = descriptors(bus)
            for _ in range(either(200, 10)):
                shared[:] = bytes(8 * count)
                heard: Counter[int] = Counter()
                with attack(publish_all_the_time):
                    packets = [reader.receive() for _ in range(200)]
                end = time.monotonic() + SECONDS_MAX
                is_over = False
                while not is_over:
                    # Some may be paused, and some may not have been let in
                    is_over = descriptors(bus) == before and all(
                        heard[index] >= taken[index] for index in range(count)
                    )
                    for packet in packets + reader.fence():
                        index, number = map(int, packet[10:].split())
                        heard[index] += 1
                        assert number == heard[index], "out of order, or a gap"
                    packets = []
                    assert time.monotonic() < end, "some are lost"
                for index in range(count):
                    assert taken[index] <= heard[index] <= taken[index] + 1
                pair.talk(1)

    def test_descriptors_are_passed(self, directory: Path) -> None:
        """[CONN-7] Hundreds in a packet: the server has none of them."""
        with (
            RealBus(directory, "-go") as bus,
            bus.connect() as peer,
            open(os.devnull) as file,
        ):
            peer.send(b"SUB k")
            peer.fence()
            before = descriptors(bus)
            for packet in publications(100):
                if not pass_descriptors(peer, packet, [file.fileno()] * 253):
                    peer.send(packet)
                assert peer.receive() == packet
            assert descriptors(bus) == before

    @pytest.mark.parametrize("is_inherited", [False, True])
    def test_descriptor_that_takes_an_hour_to_close(
        self, directory: Path, is_inherited: bool
    ) -> None:
        """[CONN-7] The server never has it, or its start line warns of it."""
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            if is_inherited:
                listener = stack.enter_context(seqpacket())
                listener.bind(str(directory / "bus"))
                listener.listen()
                number = listener.fileno()
                options["address"] = f"/dev/fd/{number}"
                options["pass_fds"] = [number]
            bus = stack.enter_context(RealBus(directory, **options))
            is_warned = "make the bus wait for its descriptors" in bus.log()
            assert is_warned == (is_inherited or not CAN_REFUSE)
            if not CAN_REFUSE:
                return
            peer, other = stack.enter_context(bus.clients(2))
            wire = stack.enter_context(lingering())
            peer.send(b"SUB k")
            peer.fence()
            if pass_descriptors(peer, publish(b"k"), [wire.fileno()]):
                wire.close()  # so that the server has the last one
            assert other.fence() == []
            assert peer.fence() == []

    def test_one_shots(self, directory: Path) -> None:
        """[CONN-6] [LIMIT-11] Who connects, speaks and leaves is heard."""
        count, readers = either((10_000, 300), (2_000, 100))
        packets = publications(count)
        ready, done = os.pipe()

        def speak() -> None:
            for packet in packets:
                with connect(bus.path) as peer:
                    peer.send(packet)

        def listen() -> None:
            peers = [connect(bus.path) for _ in range(readers)]
            for peer in peers:
                peer.send(b"SUB k")
                peer.fence()
            with child_process(speak):
                for packet in packets:
                    for peer in peers:
                        assert peer.receive() == packet
            os.write(done, b"1")

        # So many lag further behind than one user's clients may
        room = either(["--max-user-backlog=1000000000"], [])
        with RealBus(directory, "-go", *room) as bus, attack(listen):
            os.close(done)
            assert os.read(ready, 1)
        os.close(ready)

    def test_visitors_that_do_not_wait(self, directory: Path) -> None:
        """[CONN-3] [CONN-6] They leave before they are let in."""
        with RealBus(directory) as bus, bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            before = descriptors(bus)
            bus.process.send_signal(signal.SIGSTOP)
            for packet in publications(200):
                with bus.connect() as visitor:
                    visitor.send(packet)
            bus.process.send_signal(signal.SIGCONT)
            heard = [reader.receive() for _ in range(200)]
            assert sorted(heard) == sorted(publications(200))
            wait_for(lambda: descriptors(bus) <= before)

    @needs_root
    def test_silent_crowd(self, directory: Path) -> None:
        """[LIMIT-11] [LIMIT-16] One user gets its share of places only."""
        count = either(5_000, 700)
        ready, done = os.pipe()

        def crowd_in() -> None:
            with descriptors_allowed(count + 100):
                peers = [connect(bus.path) for _ in range(count)]
                os.write(done, b"1")
                signal.pause()
                del peers

        with RealBus(directory, "-go") as bus, Pair(bus) as pair:
            before = descriptors(bus)
            with attack(crowd_in):
                os.close(done)
                assert os.read(ready, 1)
                pair.talk(100)
                most = before + sbus.Limits().max_user_clients
                wait_for(lambda: descriptors(bus) == most)
                pair.talk(100)
                assert descriptors(bus) == most
        assert bus.log().count("[LIMIT-11]") <= 2 + either(10, 3)
        os.close(ready)


LOG_LINE = re.compile(rb"sbusd: [ -~]{1,292}")
HOSTILE_WORDS = [b"SUB ", b"MSG ", b"CMSG ", b"UNSUB ", b"BAD", b"", b"\xff"]
HOSTILE_BYTES = [b"\n", b"\r", b"\x1b[2J", b"\0", b"\xff", b"%s%d", b"!/"]
HOSTILE_BYTES += [b"\nsbusd: stop\n", b"x" * 300, bytes(range(256)), b"\\"]
SECRET_PAYLOAD = b"\0payload-payload"


def hostile(random_: random.Random) -> bytes:
    """Return a malformed packet whose text would spoil a log."""
    pieces = random_.choices(HOSTILE_BYTES, k=random_.randrange(5))
    if random_.random() < 0.01:
        pieces.append(b"\n" * 100_000)
    text = b"".join(pieces).replace(b"\0", b"")
    return random_.choice(HOSTILE_WORDS) + text + b"/!" + SECRET_PAYLOAD


class TestLogSafety:
    """Clients can neither forge lines, nor flood or stop the log."""

    pytestmark = SOAK

    @pytest.mark.parametrize("option", ["-f", "-v"])
    def test_hostile_bytes(self, directory: Path, option: str) -> None:
        """[RUN-15] [CONN-13] Lines are short, printable, and few."""
        count = either(200_000, 1_000)
        random_ = random.Random(10)
        with RealBus(directory, "-go", option) as bus:
            start = time.monotonic()
            for _ in range(count):
                with bus.connect() as peer:
                    peer.send(hostile(random_))
            with Pair(bus) as pair:
                pair.talk(1)
            seconds = time.monotonic() - start
        lines = bus.log_path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        for line in lines:
            assert LOG_LINE.fullmatch(line), line
            assert b"payload-payload" not in line
        assert lines.count(b"sbusd: stop") == 1
        causes = [line for line in lines if b"sbusd: disconnect" in line]
        rules = Counter(re.findall(rb"\[([A-Z]+-\d+)\]", b"".join(causes)))
        assert len(rules) >= 2
        assert max(rules.values()) <= 1 + 10 * (1 + seconds)
        if option == "-v":
            assert len(lines) > count

    @needs_root
    def test_many_users(self, directory: Path) -> None:
        """[CONN-13] Together they get ten lines a second for a rule."""
        count = either(1_000, 40)
        with RealBus(directory, "-go") as bus:
            start = time.monotonic()
            for uid in range(2_000, 2_000 + count):
                with bus.connect(uid, uid) as peer:
                    peer.send(b"BAD")
            with Pair(bus) as pair:
                pair.talk(1)
            seconds = time.monotonic() - start
            written = bus.log().count("sbusd: disconnect")
        assert written <= 10 * (1 + seconds)
        left_out = re.findall(r"\((\d+) more\)", bus.log())
        assert written + sum(map(int, left_out)) == count

    def test_no_count_is_lost(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """[CONN-13] Of however many users, without remembering them all."""
        monkeypatch.setattr(sbus, "CAUSES_MAX", 40)
        kernel = FakeKernel()
        for uid in range(100):
            kernel.connect(uid=uid).send(b"BAD")
        kernel.server.stop()
        kernel.server.run()
        written = caplog.text.count("disconnect client=")
        left_out = re.findall(r"\((\d+) more\)", caplog.text)
        assert written == 10
        assert left_out == ["41", "41", "8"]

    @pytest.mark.parametrize("what", ["full pipe", "full disk", "closed"])
    def test_log_that_takes_nothing(
        self, directory: Path, what: str, record_property: Any
    ) -> None:
        """[RUN-16] The bus is about as fast as with a log that works."""
        rates = [self.rate(directory, log) for log in ["file", what] * 2]
        shares = [bad / good for good, bad in zip(rates[::2], rates[1::2])]
        record_property("share of the speed", round(max(shares), 2))
        assert max(shares) > 0.1  # it would be 0 if the bus waited

    def rate(self, directory: Path, what: str) -> float:
        """Return how many packets a second are handled, each with a line."""
        rounds = either(500, 20)
        reader, writer = os.pipe()
        options: dict[str, Any] = {"stderr": writer}
        if what == "full pipe":
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(4096))
            os.set_blocking(writer, True)
        elif what == "closed":
            options = {"preexec_fn": lambda: os.close(2)}
        else:
            name = "/dev/full" if what == "full disk" else directory / "text"
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), writer)
        path = f"{directory}/bus"
        command = [sys.executable, str(ROOT / "sbus.py"), "-va", path]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, **options
        ) as process:
            try:
                assert process.stdout
                read_to_end(process.stdout)
                with connect(path) as peer:
                    start = time.monotonic()
                    for _ in range(rounds):
                        peer.send(*[b"SUB k", b"UNSUB k"] * 50)
                        assert peer.fence() == []
                    seconds = time.monotonic() - start
                process.terminate()
                assert process.wait(SECONDS_MAX) == 0
            finally:
                process.kill()
        os.close(reader)
        os.close(writer)
        return rounds * 101 / seconds
