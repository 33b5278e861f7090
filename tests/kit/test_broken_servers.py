"""Tests that the examples find what is wrong in broken servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import fake_bus
import fake_kernel
from broken_servers import BROKEN, Broken
from conformance.report import failures_by_rule
from fake_bus import CASES, run_on_fake_kernel
from processes import ROOT

SBUS = compile((ROOT / "sbus.py").read_bytes(), "sbus.py", "exec")


@contextlib.contextmanager
def another_server() -> Iterator[ModuleType]:
    """Put a fresh copy of sbus in its place, on the fake kernel."""
    module = ModuleType("another_sbus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(SBUS, module.__dict__)
        patch.setattr(fake_kernel, "sbus", module)
        patch.setattr(fake_bus, "sbus", module)
        yield module


class TestBrokenServers:
    def test_every_rule_that_clients_can_see_is_broken(self) -> None:
        """Some in several ways, each with its own name."""
        assert len({broken.name for broken in BROKEN}) == len(BROKEN)
        on_real_sockets = {"CONN-1", "CONN-4"}
        shown = {rule for case in CASES for rule in case.rules}
        assert {one.rule for one in BROKEN} == shown - on_real_sockets

    def test_a_copy_without_a_mistake_breaks_no_rule(self) -> None:
        """What the kit finds in the others is their mistake."""
        with another_server():
            results = [run_on_fake_kernel(case) for case in CASES]
        assert not failures_by_rule(results)

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.name)
    def test_the_kit_finds_it(self, broken: Broken) -> None:
        """The rule that is broken explains all of some failures."""
        cases = [case for case in CASES if broken.rule in case.rules]
        with another_server() as module:
            broken.spoil(module)
            results = [run_on_fake_kernel(case) for case in cases]
        explained = [
            set.intersection(*({*result.rules} for result in failed))
            for failed in failures_by_rule(results).values()
        ]
        assert any(broken.rule in rules for rules in explained)
