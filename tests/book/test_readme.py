"""Tests of the README: what it shows, and what it says to type."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from processes import ROOT

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
SHOWN = [
    r"\S+T\S+\tsensors/1/temp\t21\.5\n\S+\tsensors/2/temp\t19\.0\n"
    r"\S+\tsensors/2/temp\t19\.5\n",
    r".*\d\d:\d\d:\d\d.*\d{4}\n.*PUBLISHED.*",
]


def start(command: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program of the repository, as the README says it."""
    words = command.replace("'", "").split()[1:]
    return subprocess.Popen(
        [sys.executable, *words],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Return what a process writes, up to the line with a word."""
    text = ""
    for line in process.stdout or ():
        text += line
        if word in line:
            return text
    raise AssertionError(text)


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_a_block_can_be_pasted(number: int, tmp_path: Path) -> None:
    """Into a new terminal, in the folder of the README; nothing is left."""
    assert len(BLOCKS) == len(SHOWN)
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-e", "-c", BLOCKS[number]],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert re.fullmatch(SHOWN[number], done.stdout, re.S), done.stdout
    assert not [*tmp_path.iterdir()]


def test_the_first_commands_deliver(tmp_path: Path) -> None:
    """As they are printed, at an address of the environment."""
    commands = re.findall(r"^    \$ (python3 sbus.*)$", README, re.M)
    env = {"PATH": os.environ["PATH"], "SBUS_ADDRESS": str(tmp_path / "bus")}
    env["PYTHONUNBUFFERED"] = "1"
    server = start(commands[0], env)
    read_until(server, "start")
    subscriber = start(commands[1], env)
    output = subscriber.stdout
    assert output
    is_heard = False
    while not is_heard:  # until it has subscribed
        publisher = start(commands[2], env)
        publisher.communicate()
        assert publisher.returncode == 0
        is_heard = bool(select.select([output], [], [], 0)[0])
    assert read_until(subscriber, "a/b") == "a/b\thello\n"
    for process in subscriber, server:
        process.terminate()
        process.communicate()
