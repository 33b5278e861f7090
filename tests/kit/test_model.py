"""Tests of spec/model.py: it is one reading of the rules, on its own."""

from __future__ import annotations

import doctest
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import explore
import model
from explore import make_world, worlds
from fake_bus import CASES
from model_bus import run_on_model
from sizes import SOAK, either

SIZES = either(
    {"changes": 0, "users": 0, "pairs": 3, "rings": 2},
    {"pairs": 1, "rings": 1},  # tests/refine has worlds like the others
)
MISTAKES = [
    ("a publisher goes on late", "> h.end_bytes", "> h.end_bytes - 200"),
    ("a publisher goes on early", "> h.end_bytes", "> h.end_bytes + 200"),
    (
        "a mode that is left frees all",
        "if h.mode != mode}",
        "if client.modes['soft'] == 'block'}",
    ),
    (
        "a mode that is left frees nobody",
        'if choice != "block" and client.holds:',
        "if False:",
    ),
    ("the newest goes first", "return 0  # [ORDER-1]", "return -1"),
    (
        "the hard mode never decides",
        "is_over = exceeds(bus, receiver, message.cost)",
        "is_over = False",
    ),
    (
        "one hold of two is too few to pause",
        "if not self.paused_by(c)]",
        "if len(self.paused_by(c)) < 2]",
    ),
    # These two take longest
    ("an expelled client holds on", "    client.holds.clear()\n", ""),
    (
        "another user pauses",
        "return receiver.is_privileged or is_same",
        "return True",
    ),
]


def test_its_first_page() -> None:
    """What it says of itself is so."""
    assert doctest.testmod(model) == (0, doctest.testmod(model).attempted)
    assert doctest.testmod(model).attempted > 10


def test_it_predicts_all_examples() -> None:
    """Each line of each example for servers, and nothing is unclear."""
    results = [run_on_model(case) for case in CASES]
    assert not {result.case: result for result in results if result.what}


def test_connection_above_a_limit() -> None:
    """[LIMIT-20] [CONN-6] It has one turn, and then has been no client."""
    bus = model.Bus(max_user_clients=1)
    reader = bus.connect(uid=1000)
    bus.send(reader, b"SUB k")
    newcomer = bus.connect(uid=1000)
    newcomer.sent += [b"MSG k\0"] * 200
    bus.run()
    assert len(reader.received) == 64 and newcomer.end == "LIMIT-7"


def test_connection_that_is_refused() -> None:
    """[CONN-2] [CTL-5] It has no number, and no packet of it is handled."""
    bus = model.Bus(users=(7,))
    stranger = bus.connect(uid=5)
    reader = bus.connect(uid=7)
    bus.send(reader, b"SUB k")
    bus.send(stranger, b"MSG k\0")
    assert stranger.end == "CONN-2" and reader.number == 1
    assert not reader.received


def test_several_packets_of_a_turn() -> None:
    """[BLOCK-24] What waited before the first that pauses counts."""
    bus = model.Bus(max_backlog=400, reads_ahead=False)
    reader, sender = bus.connect(), bus.connect()
    bus.send(reader, b"SUB k")
    reader.room = 0
    bus.send(sender, b"MSG k\0")
    sender.sent += [b"MSG k\0" + bytes(200)] * 2
    for _ in range(2):
        model.handle(bus, sender)
    assert reader.holds == {sender.number: model.Hold("hard", 134 // 2)}
    assert len(reader.backlog) == 3


def test_it_can_be_read_alone() -> None:
    """It imports nothing but the standard library."""
    source = Path(model.__file__).read_text("utf-8")
    assert "import sbus" not in source and "conformance" not in source


def search(names: dict[str, int]) -> Iterator[tuple[str, explore.Report]]:
    """Yield what a search of each world finds."""
    for name, count in names.items():
        for title, text in worlds(name, count):
            yield title, explore.explore(make_world(text))


@SOAK
@pytest.mark.parametrize("name", SIZES)
def test_all_orders(name: str) -> None:
    """[BLOCK-7] [BLOCK-10] [BLOCK-12] [BLOCK-16] [BLOCK-22] No violation."""
    for title, report in search({name: SIZES[name]}):
        text = "\n".join([title, report.violation, *report.conversation])
        assert report.is_complete and not report.violation, text


def test_a_world_of_ones_own(directory: Path) -> None:
    """[BLOCK-16] Two programs that wait for each other are found."""
    file = directory / "world"
    lines = []
    for name in "AB":
        subscribe = f"{name} > SUB {name.lower()}"
        lines += [subscribe, f"{name} > CMSG blocking/soft/block"]
        lines.append(f"{name} room 1")
    lines.append("---")
    for name, other in ("AB", "BA"):
        lines += [f"{name} > MSG {other.lower()}\\0{n}" for n in range(4)]
    file.write_text("\n".join(lines), "utf-8")
    ((_, report),) = search({str(file): 0})
    assert not report.violation and report.deadlocks
    assert "is paused by" in "\n".join(report.conversation)


@SOAK
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(*mistake[1:], id=mistake[0])
        for mistake in either(MISTAKES, MISTAKES[:-2])
    ],
)
def test_a_mistake_is_found(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the model shows as a short conversation that breaks a rule."""
    source = Path(model.__file__).read_text("utf-8")
    assert source.count(old) >= 1
    broken = types.ModuleType("broken")
    monkeypatch.setitem(sys.modules, "broken", broken)
    exec(compile(source.replace(old, new), "model.py", "exec"), vars(broken))
    for name in ("Bus", "Client", "Hold", "drain", "handle"):
        monkeypatch.setattr(explore, name, getattr(broken, name))
    names = {"changes": 0, "users": 0, "pairs": 1}
    reports = (report for _, report in search(names) if report.violation)
    report = next(reports, None)
    assert report, "not found"
    assert len(report.conversation) < 30
