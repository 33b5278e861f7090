"""Tests of rival starts, and of signals at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sbus
from attackers import attack
from packets import publish
from processes import child_process
from real_bus import RealBus, connect, read_to_end, wait_for
from sizes import SOAK, either


class TestSignalsUnderLoad:
    """A signal at any moment ends a server well, or only asks it."""

    pytestmark = SOAK

    def test_random_moments(self, directory: Path) -> None:
        """[RUN-10] [RUN-12] [RUN-17] [ADDR-10] Status 0, nothing is left."""
        random_ = random.Random(11)
        path = str(directory / "bus")

        def talk_all_the_time() -> None:
            key = b"busy/%d" % os.getpid()  # its own, so that it keeps up
            while True:
                time.sleep(0.001)  # leave the processor to the next server
                with contextlib.suppress(OSError), connect(path) as peer:
                    peer.send(b"SUB " + key)
                    while True:
                        peer.send(publish(key, bytes(1_000)))
                        peer.receive()

        stops = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        with attack(talk_all_the_time), attack(talk_all_the_time):
            for number in range(either(500, 10)):
                with RealBus(directory, "-go") as bus:
                    time.sleep(random_.random() / 20)
                    first = random_.choice([*stops, signal.SIGUSR1])
                    bus.process.send_signal(first)
                    if number % 2:
                        time.sleep(0.001)
                    assert bus.stop(random_.choice(stops)) == 0
                assert os.listdir(directory) == ["log"]
        assert bus.log().count("sbusd: stop\n") == either(500, 10)
        assert "Traceback" not in bus.log()

    def test_idle_server_wakes_up(self, directory: Path) -> None:
        """[RUN-10] [RUN-17] A signal is not left until the next event."""
        with RealBus(directory) as bus:
            for count in range(1, 6):
                bus.process.send_signal(signal.SIGUSR1)
                wait_for(lambda: bus.log().count("stats users=0") == count)  # noqa: B023


def start_rival(path: str, gate: int, done: int, others: list[int]) -> int:
    """Fork a server that starts when all who hold the gate have closed it.

    What it learns of the socket that is there is out of date a little later.
    It closes *done* when it serves, or has refused to.
    """
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.dup2(done, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for descriptor in (done, *others):
            os.close(descriptor)
        ask = sbus.is_stale

        def ask_slowly(path: str) -> bool:
            answer = ask(path)
            time.sleep(random.random() / 500)
            return answer

        setattr(sbus, "is_stale", ask_slowly)  # noqa: B010
        os.read(gate, 1)
        status = sbus.main(["-ra", path])
    finally:
        os._exit(status)


class TestStarts:
    """Of those who start at once one serves, after whatever crash."""

    pytestmark = SOAK

    def test_races(self, directory: Path) -> None:
        """[ADDR-8] [ADDR-9] Two to five that find a stale socket."""
        path = str(directory / "bus")
        random_ = random.Random(12)
        for _ in range(either(200, 8)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
                stale.bind(path)
            gate, opener = os.pipe()
            ready, done = os.pipe()
            rivals = [
                start_rival(path, gate, done, [opener, ready])
                for _ in range(random_.randint(2, 5))
            ]
            for descriptor in (opener, gate, done):
                os.close(descriptor)
            with os.fdopen(ready, "rb") as output:
                read_to_end(output)  # each serves, or has refused to
            with connect(path) as peer:
                assert peer.fence() == []
            for rival in rivals:
                os.kill(rival, signal.SIGTERM)
            ends = [os.waitpid(rival, 0)[1] for rival in rivals]
            statuses = sorted(map(os.waitstatus_to_exitcode, ends))
            assert statuses == [0] + [1] * (len(rivals) - 1)
            assert os.listdir(directory) == []

    def test_crashes(self, directory: Path, record_property: Any) -> None:
        """[ADDR-8] After each kill -9 a start with -r is enough."""
        longest = 0.0
        for _ in range(either(100, 8)):
            start = time.monotonic()
            with RealBus(directory, "-r") as bus:
                longest = max(longest, time.monotonic() - start)
                with bus.connect() as peer:
                    peer.send(b"SUB k", publish(b"k"))
                    assert peer.fence() == [publish(b"k")]
                    bus.process.kill()
                    bus.process.wait()
                    assert peer.receive_all() == []
        record_property("longest start in milliseconds", round(longest * 1000))

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_mode_under_observation(self, directory: Path, umask: int) -> None:
        """[ADDR-6] Whoever looks all the time sees only what was asked for."""
        path = str(directory / "bus")
        count = either(10_000, 1_000)

        def start_again_and_again() -> None:
            os.umask(umask)
            for _ in range(count):
                sbus.open_endpoint(path, 0o770, False).close()
            os.rename(directory / "there", directory / "done")

        (directory / "there").touch()
        modes = Counter[int]()
        with child_process(start_again_and_again):
            while not (directory / "done").exists():
                for _ in range(100):
                    with contextlib.suppress(FileNotFoundError):
                        modes[stat.S_IMODE(os.lstat(path).st_mode)] += 1
        assert set(modes) == {0o770}
