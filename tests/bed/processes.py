"""Programs of the repository that run beside a test, or to their end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SBUSD = (sys.executable, str(ROOT / "tests/bed/sbusd.py"))
NAIVE = ROOT / "tests/kit/naive_server.py"
SECONDS_MAX = 100.0  # for what a test waits; pytest gives it longer


MARK = f"of process {os.getpid()}"  # which all that tests start inherit
FOLDER_NAME_MAX = 40  # of the 107 bytes of a path, some of which tests need
FOLDERS: list[str] = []  # for sockets, to be removed in the end


def mend_environment() -> None:
    """Have all that a test starts find what it needs, wherever tests run.

    Sockets need a folder with a short name, and programs their own folder;
    to what they warn of, users do not object.
    """
    if len(tempfile.gettempdir()) > FOLDER_NAME_MAX:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    os.environ["SBUS_TESTS"] = MARK
    for name in ("PYTHONSAFEPATH", "PYTHONWARNINGS"):
        os.environ.pop(name, None)


mend_environment()  # before anything copies it
# What a user has: output into a pipe is kept back unless it is flushed
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": ""}


def leave_nothing() -> None:
    """End the programs that tests have started, and remove their folders."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            is_marked = b"SBUS_TESTS=" + MARK.encode() in variables
            if is_marked and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
    for folder in FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


SIGNALLED = """\
import os, signal, socket, subprocess

signal.signal(signal.SIGINT, signal.SIG_DFL)  # wherever tests run
process, call = os.getpid(), PLACE

def signalled(*arguments, **options):
    try:
        return call(*arguments, **options)
    finally:
        if os.getpid() == process and "WORD" in str(arguments):
            os.kill(process, signal.SIGINT)
            os.kill(process, signal.SIGTERM)

PLACE = signalled
"""


def signalled_at(directory: Path, place: str, word: str = "") -> str:
    """Return a PYTHONPATH with which two signals end calls of a function.

    They come before the caller has what it returns, if its arguments have
    the word.
    """
    text = SIGNALLED.replace("PLACE", place).replace("WORD", word)
    (directory / "sitecustomize.py").write_text(text, "utf-8")
    return str(directory)


class Result(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    output: str
    errors: str


def run(*command: str, **options: Any) -> Result:
    """Run one of our files to its end, with Python."""
    done = subprocess.run(
        [sys.executable, str(ROOT / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        **{"timeout": SECONDS_MAX, **options},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run_kit(*arguments: str, **options: Any) -> Result:
    """Run the conformance kit to its end."""
    return run("spec/conformance", *arguments, **options)


@contextlib.contextmanager
def child_process(work: Callable[[], object]) -> Iterator[int]:
    """Have a child process do some work; kill it in the end."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def started(
    address: str, *arguments: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run the client's command line beside the test, up to its own end."""
    file = str(ROOT / "tools")
    with subprocess.Popen(
        [sys.executable, file, "-a", address, *arguments],
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": ENVIRONMENT,
            **options,
        },
    ) as process:
        try:
            yield process
            process.wait(SECONDS_MAX)
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> Result:
    """Return how a command ends that runs beside the test."""
    output, errors = process.communicate(timeout=SECONDS_MAX)
    return Result(process.returncode, output or "", errors)


def naive(path: Path = NAIVE) -> str:
    """Return the command of the naive server, or of a copy of it."""
    return f"{sys.executable} {path} {{address}}"
