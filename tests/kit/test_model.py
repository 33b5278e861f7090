"""Tests of spec/model.py: it is one reading of the rules, on its own."""

from __future__ import annotations

import doctest
import sys
import types
from pathlib import Path

import pytest

import model
from checks import Violation
from examples_of_spec import CASES
from model_bus import run_on_model
from orders import check_orders
from sizes import SOAK, either

# One world, in which all mistakes show, and one in which programs may wait for
# each other; tests/refine has more
WORLDS = {
    "changes": """\
server --max-backlog 300
A process uid=1000
B process uid=1000
C process uid=1000
A > SUB a
A room 1
---
B > MSG a\\02.{0..3}
A > CMSG blocking/soft/block
A > CMSG blocking/soft/queue
A > CMSG blocking/hard/discard
A > CMSG blocking/hard/block
A > CMSG blocking/soft/error
C > MSG a\\03.0
""",
    "ring": """\
server --max-backlog 300
A > SUB a
A > CMSG blocking/soft/block
A > CMSG blocking/hard/discard
A room 1
B > SUB b
B > CMSG blocking/soft/block
B > CMSG blocking/hard/discard
B room 1
A > MSG b\\01.0
B > MSG a\\02.0
---
A > MSG b\\01.{1..3}
B > MSG a\\02.{1..3}
""",
}
MISTAKES = {
    "a publisher goes on late": ("> h.end_bytes", "> h.end_bytes - 200"),
    "a mode that is left frees all": (
        "if h.mode != mode}",
        "if client.modes['soft'] == 'block'}",
    ),
    "the hard mode never decides": (
        "is_over = exceeds(bus, receiver, message.cost)",
        "is_over = False",
    ),
    "one hold of two is too few to pause": (
        "if not self.paused_by(c)]",
        "if len(self.paused_by(c)) < 2]",
    ),
}


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


@SOAK
@pytest.mark.parametrize("name", either([*WORLDS], ["ring"]))
def test_all_orders(name: str) -> None:
    """[BLOCK-7] [BLOCK-10] [BLOCK-12] [BLOCK-16] [BLOCK-22] No violation.

    Programs that wait for each other are found, and the block time ends that.
    """
    checked = check_orders(WORLDS[name], is_apart=True)
    is_deadlock = "is paused by" in "\n".join(checked.deadlock)
    assert is_deadlock == (name == "ring")


@SOAK
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the model shows as a short conversation that breaks a rule."""
    source = Path(model.__file__).read_text("utf-8")
    assert MISTAKES[name][0] in source
    broken = types.ModuleType("broken")
    monkeypatch.setitem(sys.modules, "broken", broken)
    text = source.replace(*MISTAKES[name])
    exec(compile(text, "model.py", "exec"), vars(broken))
    for place in ("Bus", "Client", "Hold", "Unclear", "drain", "handle"):
        monkeypatch.setattr(model, place, getattr(broken, place))
    with pytest.raises(Violation) as violation:
        check_orders(WORLDS["changes"], is_apart=True)
    assert len(violation.value.lines) < 40
