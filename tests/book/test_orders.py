"""Tests of the search of every order, which the book has pages for."""

from __future__ import annotations

import doctest
import json

import pytest

import orders
from orders import Report, try_orders
from player import call

POLITE = """\
A > SUB a
A > CMSG blocking/soft/block
A room 1
B > SUB b
B > CMSG blocking/soft/block
B room 1
---
"""
SOONER_OR_LATER = """\
A > SUB k
A < {any}
B > MSG k\\0one
B > MSG k\\0two
"""
CONVERSATIONS = {
    "a subscription that comes late": SOONER_OR_LATER,
    "nobody reads before three are published": POLITE
    + "A > MSG b\\0{1..3}\nA < {any}\nB > MSG a\\0{1..3}\nB < {any}\n",
    "a reader that is over while it holds another": POLITE
    + "A < {any}\nB > MSG a\\0{1..4}",
    "a reader of another user": "A process uid=1001\nA > SUB k\nA room 1\n"
    "A > CMSG blocking/soft/error\n---\nA < {any}\nB > MSG k\\0{1..2}",
    "messages over the limit": "server --max-backlog 270\nA > SUB k\n"
    "A > CMSG blocking/hard/discard\nA room 1\n---\nA < {any}\nA < {any}\n"
    "B > MSG k\\0{1..2}\nC > MSG k\\0{3..4}",
    "programs that leave": "A > SUB k\nB > SUB k\n---\nA close\n"
    "B > MSG k\\0one\nB shut\nC > MSG k\\0two\nC > HELLO",
    "who asks for itself": "A > CMSG !/cred/whoami\nA < {any}\nB > SUB "
    "!/cred/{B.gid}/{B.uid}/{B.pid}/\nA > MSG !/cred////\\0secret",
}


def report_on(text: str) -> Report:
    """Return what a search says in the end."""
    *_, report = try_orders(text)
    return report


def test_its_first_page() -> None:
    """What it says of itself is so."""
    assert doctest.testmod(orders) == (0, 3)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_server_does_what_the_model_found(name: str) -> None:
    """All lines of each shortest way go as written on sbus.py."""
    report = report_on(CONVERSATIONS[name])
    assert report.is_complete and report.ends
    for end in report.ends:
        answer = json.loads(call("bench", "\n".join(end.lines)))
        assert len(answer["led"]) == len(end.lines)
        wrong = [led["wrong"] for led in answer["led"] if "wrong" in led]
        assert not wrong, end.lines


@pytest.mark.parametrize(
    ("name", "counts", "facts"),
    [
        (
            "a subscription that comes late",
            (4, 3),
            ["A gets MSG k\\0two", "A waits for a message that does not come"],
        ),
        (
            "nobody reads before three are published",
            (6, 1),
            [
                "A and B wait for each other, until the block time",
                "A is disconnected [BLOCK-16]",
            ],
        ),
        (
            "a reader that is over while it holds another",
            (2, 1),
            ["B waits for A to read, until the block time"],
        ),
        (
            "a reader of another user",
            (2, 2),
            ["A gets MSG k\\01", "A is disconnected [BLOCK-8]"],
        ),
        (
            "messages over the limit",
            (54, 12),
            ["A loses 1 message [BLOCK-9]"],
        ),
    ],
)
def test_what_differs_is_found(
    name: str, counts: tuple[int, int], facts: list[str]
) -> None:
    """[BLOCK-5] [BLOCK-8] [BLOCK-9] [BLOCK-16] Orders are counted as well."""
    report = report_on(CONVERSATIONS[name])
    assert (report.orders, report.end_states) == counts
    known = {fact for end in report.ends for fact in end.facts}
    assert {*facts} <= known | {*report.always}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A hums", "Line 1, “A hums”: not a step"),
        ("A > SUB k\nwait 6", "Line 2, “wait 6”: here time passes when"),
        ("A fill", "Line 1, “A fill”: here a buffer has a size"),
        ("A > SUB {B.pid}", "Line 1, “A > SUB {B.pid}”: no client B"),
        ("A < {any}\n---", "Line 1, “A < {any}”: before the line ---"),
        ("server --strict", "The search knows limits alone"),
        ("A close\nB close\nC close\nD close", "The search takes 3 clients"),
        ("---\nA > MSG k\\0{1..7}", "The search takes 6 steps of a client"),
    ],
)
def test_what_cannot_be_tried_is_said(text: str, said: str) -> None:
    """In one line, which bound it is, or what would be right."""
    with pytest.raises(ValueError, match=".") as error:
        report_on(text)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the bound of states, and says how far it is."""
    monkeypatch.setattr(orders, "STATES_MAX", 60)
    monkeypatch.setattr(orders, "STATES_REPORTED", 10)
    reports = [*try_orders(CONVERSATIONS["messages over the limit"])]
    assert len(reports) == 5 and not reports[-1].is_complete
    sizes = [report.states for report in reports]
    assert sizes == sorted(sizes) and sizes[-1] in range(60, 64)
