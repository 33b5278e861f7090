"""What the tests of the pipeline stand on: programs, and a real bus.

pipeline_session.py has the session of Spark, and pipeline_paper.py traces and
captures without a bus.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import SECONDS_MAX
from real_bus import RealBus, wait_for
from sbus_client import Client
from sizes import either

TOP = Path(__file__).parents[2]
# Spark trusts its classes here, and Java writes no statistics to /tmp
PLAIN = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:-UsePerfData",
}
QUICK = {**PLAIN, "SPARK_CONF_DIR": str(Path(__file__).parent / "spark")}
TIMEOUT = pytest.mark.timeout(either(1_200, 600))


def wait_for_file(directory: Path, pattern: str) -> None:
    """Return once there is a file; Spark is slow."""
    while not any(directory.glob(pattern)):
        time.sleep(0.02)


ASKED = {
    "plain": (),
    "silent": ("echo/off",),
    "soft": ("blocking/soft/discard",),
    "hard": ("blocking/soft/queue", "blocking/hard/discard"),
    "stack": ("order/stack",),
    "random": ("order/random",),
    "leaver": (),
    "reader": (),
}
KEYS = (b"a/1", b"a/2", b"b/c/1", b"a/3", b"b/", b"c", b"a/", b"b/c")


def real_run(directory: Path, count: int) -> None:
    """Trace and record a real bus with clients of every mode.

    The files are directory/trace and directory/capture.
    """
    trace, capture = directory / "trace", directory / "capture"
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(RealBus(directory, "--trace", str(trace)))
        clients = {}
        for name, controls in ASKED.items():
            client = stack.enter_context(Client(bus.path))
            for control in controls:
                client.control(control)
            for pattern in ("a/*", "a/*", "b/"):
                client.subscribe(pattern)
            client.sync()
            clients[name] = client
        clients["plain"].subscribe("!/cred////x")
        words = [sys.executable, str(TOP / "tools"), "-a", bus.path]
        recorder = subprocess.Popen(
            [*words, "record", str(capture)], stderr=subprocess.DEVNULL
        )
        stack.enter_context(recorder)
        wait_for(lambda: '"blocking/soft/block"' in trace.read_text())
        wait_for(lambda: '"pattern":""' in trace.read_text())
        publish_all(clients, count)
        recorder.send_signal(signal.SIGTERM)
        assert recorder.wait(SECONDS_MAX) == 0
        bus.stop()


def publish_all(clients: dict[str, Client], count: int) -> None:
    """Publish through three clients in turn; the others never read.

    A message in a hundred is secret.
    """
    publishers = [clients[name] for name in ("plain", "silent", "reader")]
    ids = clients["plain"].whoami()
    secret = b"!/cred/%d//%d/x" % (ids.gid, ids.pid)
    for n in range(count):
        key = secret if n % 100 == 7 else KEYS[n % len(KEYS)]
        publishers[n % 3].publish(key, b"%d" % n)
        if n % 100 == 0:  # who reads these gets all that is for them
            for publisher in publishers:
                publisher.sync()
        if n == count // 2:
            clients["leaver"].close()
            clients["plain"].unsubscribe("b/")
    for publisher in publishers:
        publisher.sync()


def start_command(
    *arguments: object, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a command in a process group, with more of an environment."""
    program = [sys.executable, str(TOP / "pipeline" / "sbus_spark")]
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        env=plain_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def places(folder: Path) -> dict[str, str]:
    """Return an environment in which a folder has what Spark leaves."""
    java = f"{PLAIN['SPARK_SUBMIT_OPTS']} -Djava.io.tmpdir={folder}"
    names = {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
    return names | {"SPARK_SUBMIT_OPTS": java}


def plain_environment() -> dict[str, str]:
    """Return an environment in which Spark starts as it does for a user."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYSPARK_SUBMIT_ARGS", "PYTHONPATH", "SPARK_CONF_DIR")
    } | PLAIN
