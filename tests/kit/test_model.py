"""Tests of spec/model.py: it is one reading of the rules, on its own."""

from __future__ import annotations

import doctest
import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import model
from checks import Violation
from examples_of_spec import CASES
from model_bus import run_on_model
from orders import check_orders
from sizes import SOAK, either

SIZES = either(
    {"changes": 0, "users": 0, "pairs": 3, "rings": 2},
    {"pairs": 1, "rings": 1},  # tests/refine has worlds like the others
)
LIMIT = "server --max-backlog 300"  # two messages and a little more
WORLDS = {
    "changes": f"""\
{LIMIT}
A process uid=1000
B process uid=1000
C process uid=1000
A > SUB a
A room 1
---
B > MSG a\\02.{{0..3}}
A > CMSG blocking/soft/block
A > CMSG blocking/soft/queue
A > CMSG blocking/hard/discard
A > CMSG blocking/hard/block
A > CMSG blocking/soft/error
C > MSG a\\03.0
""",
    "users": f"""\
{LIMIT}
A process uid=1001
A > SUB k
A > CMSG blocking/soft/block
A room 1
B process uid=0
B > SUB k
B > CMSG blocking/soft/block
B room 1
---
C process uid=1001
C > MSG k\\03.{{0..1}}
D process uid=1002
D > MSG k\\04.{{0..1}}
B > CMSG blocking/soft/queue
""",
}
MISTAKES = [
    ("a publisher goes on late", "> h.end_bytes", "> h.end_bytes - 200"),
    (
        "a mode that is left frees all",
        "if h.mode != mode}",
        "if client.modes['soft'] == 'block'}",
    ),
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
    # This one takes longest
    ("an expelled client holds on", "    client.holds.clear()\n", ""),
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


def circle(modes: Sequence[tuple[str, str]], count: int) -> str:
    """Return a world in which each program publishes to the next."""
    names = "ABC"[: len(modes)]
    before, messages = [LIMIT], []
    for number, (name, (soft, hard)) in enumerate(zip(names, modes), 1):
        key = names[number % len(names)].lower()
        before += [
            f"{name} process uid=1000",
            f"{name} > SUB {name.lower()}",
            f"{name} > CMSG blocking/soft/{soft}",
            f"{name} > CMSG blocking/hard/{hard}",
            f"{name} room 1",
        ]
        messages.append(f"{name} > MSG {key}\\0{number}.")
    before += [f"{text}0" for text in messages]
    after = [f"{text}{{1..{count}}}" for text in messages]
    return "\n".join([*before, "---", *after])


def worlds(name: str, count: int) -> Iterator[str]:
    """Yield worlds of a kind, in which each program sends so much more."""
    pair = model.CHOICES["blocking/soft"], model.CHOICES["blocking/hard"]
    ways = [*itertools.product(*pair)]
    if name == "pairs":
        for modes in itertools.combinations_with_replacement(ways, 2):
            yield circle(modes, count)
    elif name == "rings":
        for way in ways:
            yield circle([way] * 3, count)
    else:
        yield WORLDS[name]


@SOAK
@pytest.mark.parametrize("name", SIZES)
def test_all_orders(name: str) -> None:
    """[BLOCK-7] [BLOCK-10] [BLOCK-12] [BLOCK-16] [BLOCK-22] No violation."""
    for text in worlds(name, SIZES[name]):
        check_orders(text, is_apart=True)


def test_programs_that_wait_for_each_other() -> None:
    """[BLOCK-16] They are found, and the block time ends that."""
    checked = check_orders(circle([("block", "discard")] * 2, 3), True)
    assert "is paused by" in "\n".join(checked.deadlock)


@SOAK
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(*mistake[1:], id=mistake[0])
        for mistake in either(MISTAKES, MISTAKES[:-1])
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
    for name in ("Bus", "Client", "Hold", "Unclear", "drain", "handle"):
        monkeypatch.setattr(model, name, getattr(broken, name))
    names = {"changes": 0, "users": 0, "pairs": 1}
    with pytest.raises(Violation) as found:
        for name, count in names.items():
            for text in worlds(name, count):
                check_orders(text, is_apart=True)
    assert len(found.value.lines) < 40
