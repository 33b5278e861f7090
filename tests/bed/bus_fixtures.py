"""Fixtures, and which rules the tests that passed cite, for the trace check.

A test cites the rules in its docstring; a test of an example, those of its
block.  The trace check itself is moved to the end of the run.  Runs side by
side leave the rules in files of the folder that SBUS_RULES names, and a last
run reads them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel
from real_bus import Listener, RealBus, scratch_directory

CITED = re.compile(r"\[([A-Z]+-\d+)\]")
LAST = "test_every_rule_has_a_test_that_passed"
FOLDER = os.environ.get("SBUS_RULES")


class Trace:
    """What this run has shown so far."""

    def __init__(self) -> None:
        self.is_whole = True  # no test was left out on the command line
        self.passed: set[str] = set()  # rules


TRACE = pytest.StashKey[Trace]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TRACE] = Trace()
    catch_what_is_ignored()


def catch_what_is_ignored() -> None:
    """Have servers start with no signal ignored, under nohup or in a script.

    A process that is started ignores what its parent ignores, but not what
    its parent catches.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[TRACE].is_whole = False


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    items.sort(key=lambda item: item.name == LAST)
    is_all = config.args == config.getini("testpaths")
    config.stash[TRACE].is_whole &= is_all


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.passed:
        trace = item.config.stash[TRACE]
        function = getattr(item, "obj", None)
        trace.passed |= set(CITED.findall(function.__doc__ or ""))
        parameters = getattr(item, "callspec", None)
        block = parameters and parameters.params.get("block")
        trace.passed |= set(block.rules) if block else set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if FOLDER:
        rules = " ".join(session.config.stash[TRACE].passed)
        Path(FOLDER, str(os.getpid())).write_text(rules, "ascii")


@pytest.fixture
def rules_that_passed(request: pytest.FixtureRequest) -> set[str]:
    """The rules that tests of this run cite, or of all, if all were run."""
    trace = request.config.stash[TRACE]
    if FOLDER:
        texts = [path.read_text("ascii") for path in Path(FOLDER).iterdir()]
        return {rule for text in texts for rule in text.split()}
    if not trace.is_whole:
        pytest.skip("only some of the tests were run")
    return trace.passed


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
