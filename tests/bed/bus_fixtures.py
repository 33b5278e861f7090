"""Fixtures of all tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbus
from fake_kernel import FakeKernel
from processes import leave_nothing
from real_bus import Listener, RealBus, scratch_directory


def pytest_configure() -> None:
    """Have a program that a test starts end at a signal, as users have it.

    It ignores what its parent ignores, but not what its parent catches: under
    nohup or in a script, no signal stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_unconfigure() -> None:
    """Leave nothing behind, also where tests were interrupted."""
    leave_nothing()


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
