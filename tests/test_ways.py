"""All commands do the same thing in the same way, as CONTRIBUTING says."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sbus
import sbus_client
from conformance.__main__ import seconds as seconds_of_the_kit
from processes import ROOT
from real_bus import RealBus
from sbus_spark import inputs
from tools.sub import utc_text

# Each command by its name, and an option that has a length of time
COMMANDS = {
    "sbusd": ("sbus.py", "--block-timeout"),
    "sbus": ("tools", "sub -t"),
    "sbus_client.py": ("sbus_client.py", "-t"),
    "sbus-spark": ("pipeline/sbus_spark", "status table --max-age"),
    "conformance": ("spec/conformance", "--seconds"),
}
NAMES = [*COMMANDS]
FINDERS = {"sbus-spark", "conformance"}  # to which 1 says what was found
TIMES = {"90": 90, "0.5": 0.5, "30s": 30, "15m": 900, "1h": 3_600}
TIMES |= {"2d": 172_800, "1.5h": 5_400}
NO_TIMES = ["", "0", "0m", "-1", "nan", "inf", "1e3", "1w", "m", "1 h", "5ms"]
READERS: dict[str, Callable[[str], float]] = {
    "sbusd": lambda text: sbus.parse_limit("block_timeout", text),
    "others": sbus_client.seconds,
    "conformance": seconds_of_the_kit,
}


def run(
    name: str, *words: str, output: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, str(ROOT / COMMANDS[name][0]), *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_version(name: str) -> None:
    """It is the command's name and a version, on one line."""
    done = run(name, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name} ") and "0.3" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_beginning_of_an_option(name: str) -> None:
    """It is no option, so that a new option breaks no script."""
    done = run(name, "--vers")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{name}: ")
    assert done.stderr.endswith("; --help lists the options\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("name", NAMES)
def test_output_that_fails(name: str, option: str) -> None:
    """A full disk is one line and an error; a reader that has gone, none."""
    status = 2 if name in FINDERS else 1
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(writer, "wb") as broken:
        done = run(name, option, output=full.fileno())
        assert done.returncode == status
        assert done.stderr.startswith(f"{name}: ")
        assert done.stderr.count("\n") == 1
        done = run(name, option, output=broken.fileno())
        assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("name", READERS)
def test_lengths_of_time(name: str) -> None:
    """They have a unit or none, and are above 0."""
    read = READERS[name]
    assert {text: read(text) for text in TIMES} == TIMES
    for text in NO_TIMES:
        with contextlib.suppress(argparse.ArgumentTypeError):
            pytest.fail(f"{text!r} is {read(text)}")


@pytest.mark.parametrize("name", NAMES)
def test_option_with_a_length_of_time(name: str) -> None:
    """Each command says how a length of time looks."""
    words = COMMANDS[name][1].split()
    done = run(name, *words, "1w")
    assert done.returncode == 2
    assert "such as 90, 0.5, 15m, 1h or 2d" in done.stderr


def test_bytes_that_do_not_print() -> None:
    """No two keys are printed alike; the pipeline prints as the client."""
    keys = [b"\xff", rb"\xff", "é".encode(), b"\xe9", b"\0", b"\\", b"a\nb"]
    texts = [inputs.key_text(key.decode("latin-1")) for key in keys]
    assert texts == [sbus_client.printable(key) for key in keys]
    assert len({*texts}) == len(keys)


def test_times() -> None:
    """A time is in UTC, and ends in a Z."""
    when = 1_795_856_077_270_016_479
    assert utc_text(when) == "2026-11-28T08:54:37.270016Z"
    assert inputs.utc_text(inputs.moment_of(when / 1e9)) == utc_text(when)


def test_json(directory: Path) -> None:
    """It is an object a line, without blanks between."""
    with RealBus(directory) as bus:
        lines = [run("sbus", "-a", str(bus.path), "stats", "--json").stdout]
    server = f"{sys.executable} {ROOT}/sbus.py -f -a {{address}}"
    words = ("--server", server, "--only", "empty-pattern", "--json")
    lines.append(run("conformance", *words).stdout)
    for line in lines:
        text = json.dumps(json.loads(line), separators=(",", ":"))
        assert line == f"{text}\n"
