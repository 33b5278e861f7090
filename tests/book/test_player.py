"""Tests of what the book's player answers, under CPython."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lesson_answers import ANSWERS
from player import call
from processes import ROOT

LESSONS = sorted((ROOT / "book/lessons").glob("*.md"))
TEXTS = "".join(path.read_text("utf-8") for path in LESSONS)
BLOCKS = re.findall(r"^```(\w+) (\S+)[^\n]*\n(.*?)^```", TEXTS, re.M | re.S)


def play(kind: str, text: str, *more: Any) -> dict[str, Any]:
    """Return what a page would be answered."""
    answer: dict[str, Any] = json.loads(call(kind, text, *more))
    return answer


@pytest.mark.parametrize(("kind", "name", "text"), BLOCKS)
def test_lessons_play_as_they_say(kind: str, name: str, text: str) -> None:
    """Examples go as written, and right answers alone are accepted."""
    if kind != "question":
        assert play(kind, text)["ok"], play(kind, text)["said"]
        return
    right, wrong = ANSWERS[name]
    for answer in right:
        assert play(kind, text, answer)["said"] == "Right."
    for answer in wrong:
        assert not play(kind, text, answer)["ok"], answer


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "conversation",
            "A > SUB a\nA < MSG a\\0x\nA close",
            "Step 2, “A < MSG a\\x00x”: received nothing.",
        ),
        (
            "conversation",
            "A > SUB a\nB > MSG a\\0x",
            "Step 3, “A < nothing”: received MSG a\\x00x.",
        ),
        ("match", "a* ab yes\na* ba yes", "Row 2, “a* ba yes”: received noth"),
        ("match", "a ab no\na*", "Row 2, “a*”: not of the form of the others"),
        ("packet", "\\q invalid", "Row 1, “\\q invalid”: not of the form"),
        ("bench", "A hums", "not a step: 'A hums'."),
        ("bench", "server --bus", "unrecognized arguments: --bus"),
        ("bench", "A > MSG {B.pid}\\0x", "Step 1, “A > MSG {B.pid}\\x00x”: 'B'"),
        ("bench", "A > SUB {1..1001}", "A conversation has at most 1000 steps"),
        ("bench", "wait x", "Step 1, “wait x”: could not convert"),
    ],
)
def test_what_differs_is_said(kind: str, text: str, said: str) -> None:
    """A wrong line is named, with what came instead."""
    answer = play(kind, text)
    assert not answer["ok"] and answer["said"].startswith(said)


def test_lines_have_what_they_led_to() -> None:
    """In the words of the server's log, with the names of the clients."""
    text = "A > SUB a\nB > HELLO\nC > MSG a\\0x\nA < {any}"
    answer = play("bench", text)
    made = [one["made"] for one in answer["led"]]
    assert 'A sub pattern="a" [SUB-1]' in made[0]
    assert any(one.startswith("disconnect B [PKT-2]") for one in made[1])
    assert "disconnect B [PKT-2]" in answer["said"]
    assert answer["led"][3]["got"] == "MSG a\\0x"


def test_a_blank_at_the_end_is_sent() -> None:
    """The empty pattern is behind it."""
    assert play("conversation", "A > SUB \nB > MSG x\\0\nA < {any} ")["ok"]


def test_the_playground_stops_where_it_is_told() -> None:
    """Its cards say what the server knows by then."""
    text = "A > SUB k\nA > SUB k\nA > CMSG blocking/soft/block\nA room 1\n"
    text += "B > MSG k\\0one\nB > MSG k\\0two\nB > MSG k\\0three\nwait 2.5"
    answers = [play("bench", text, count) for count in (2, 6, -1)]
    assert [len(answer["led"]) for answer in answers] == [2, 6, 8]
    assert "k × 2" in answers[0]["cards"]
    assert re.search(r"paused by +A", answers[1]["cards"])
    assert answers[2]["said"].endswith("The clock shows 2.5 s.")
