#!/usr/bin/env python3
"""Show the pipeline: a bus, traffic, a recording, its audit and its report.

    make demo

All files go to build/demo, which is emptied first.
Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import os
import shlex
import shutil
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
ROOMS = ("attic", "bath", "hall", "kitchen")


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start one of our programs, and show how."""
    print("$ python3", shlex.join(command), "&", flush=True)
    words = [sys.executable, str(TOP / command[0]), *command[1:]]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def spark(*command: str) -> int:
    """Run a command of the pipeline, and show it; return its status."""
    print("$ python3 pipeline/sbus_spark", shlex.join(command), flush=True)
    return int(sbus_spark.run(command))


def publish(address: str) -> None:
    """Publish what a house might say, in waves."""
    with Client(address) as bus:
        for tick in range(400):
            for count in range(10 + tick // 4 % 25):
                degrees = f"{20 + count / 10}".encode()
                bus.publish(f"house/{ROOMS[count % 4]}/temperature", degrees)
            bus.publish(f"house/{ROOMS[tick % 3]}/camera", bytes(tick * 10))
            bus.sync()
            time.sleep(0.02)


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
            process.terminate()
            process.wait()
    status = spark("audit", trace)
    spark("ingest", capture, table)
    spark("report", table, "-o", report)
    return status


if __name__ == "__main__":
    sys.exit(main())
