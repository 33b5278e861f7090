#!/usr/bin/env python3
"""Show the pipeline: a bus, traffic, a recording, its audit and its report.

    make demo

All files go to build/demo, which is emptied first.  It takes some twenty
seconds.  Where sbus is not installed: PYTHONPATH=. python3 pipeline/demo.py.
Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import sbus_spark
from sbus_client import Client

TOP = Path(__file__).parents[1]
FOLDER = TOP / "build" / "demo"
SECONDS = 8.0  # of traffic


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start one of our programs, and show how."""
    print("$ python3", shlex.join(command), "&", flush=True)
    return subprocess.Popen(
        [sys.executable, str(TOP / command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def spark(*arguments: str) -> int:
    """Run a command of the pipeline, and show it; return its status."""
    print("$ python3 pipeline/sbus_spark", shlex.join(arguments), flush=True)
    return sbus_spark.run(sbus_spark.parse(arguments))


def publish(address: str) -> None:
    """Publish what a house might say, in waves."""
    chosen = random.Random(1)
    with Client(address) as bus, Client(address) as display:
        display.subscribe("house/*/temperature")
        began = time.monotonic()
        while (now := time.monotonic() - began) < SECONDS:
            for _ in range(20 + int(15 * math.sin(now))):
                room = chosen.choice(("attic", "bath", "hall", "kitchen"))
                degrees = f"{chosen.gauss(20, 2):.1f}".encode()
                bus.publish(f"house/{room}/temperature", degrees)
                if chosen.random() < 0.2:
                    picture = bytes(chosen.randrange(4_000))
                    bus.publish(f"house/{room}/camera", picture)
            display.sync()
            time.sleep(0.02)
        bus.sync()


def main() -> int:
    """Run the demonstration; return the status of the audit."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    folder = os.path.relpath(FOLDER)
    trace, capture = f"{folder}/trace", f"{folder}/capture"
    table, report = f"{folder}/table", f"{folder}/report.html"
    with tempfile.TemporaryDirectory(prefix="sbus-") as scratch:
        address = f"{scratch}/bus"
        bus = start("sbus.py", "-a", address, "--trace", trace)
        assert bus.stdout
        bus.stdout.read()  # it is closed once the bus listens
        recorder = start("tools", "-a", address, "record", capture)
        starting = threading.Thread(target=sbus_spark.session)
        starting.start()  # it takes about as long as the traffic
        publish(address)
        starting.join()
        for process in recorder, bus:
            process.send_signal(signal.SIGTERM)
            process.wait()
    status = spark("audit", trace)
    spark("ingest", capture, table)
    spark("report", table, "-o", report)
    return status


if __name__ == "__main__":
    sys.exit(main())
