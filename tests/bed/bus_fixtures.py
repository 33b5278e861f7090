"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbus
from fake_kernel import FakeKernel
from real_bus import Listener, RealBus, scratch_directory

MARK = f"of process {os.getpid()}"
FOLDER_NAME_MAX = 40  # of the 107 bytes of a path, some of which tests need


def pytest_configure() -> None:
    """Have all that a test starts find what it needs, wherever tests run.

    A process that is started ignores what its parent ignores, but not what
    its parent catches: under nohup or in a script, no signal stays ignored.
    Sockets need a folder with a short name, and programs their own folder;
    to what they warn of, users do not object.
    """
    if len(tempfile.gettempdir()) > FOLDER_NAME_MAX:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    os.environ["SBUS_TESTS"] = MARK
    for name in ("PYTHONSAFEPATH", "PYTHONWARNINGS"):
        os.environ.pop(name, None)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_unconfigure() -> None:
    """Leave no process behind, also where tests were interrupted.

    All programs that tests start, and their daemons, inherit MARK.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


@pytest.fixture
def bus(directory: Path) -> Iterator[RealBus]:
    with RealBus(directory, "--trace", str(directory / "trace")) as running:
        yield running


@pytest.fixture
def listener(directory: Path) -> Iterator[Listener]:
    listening = Listener(str(directory / "bus"), backlog=8)
    with listening.wire:
        yield listening


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure no coverage and log nothing: both take longer than the proof."""
    monkeypatch.setattr(sbus, "log", lambda text: None)
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
