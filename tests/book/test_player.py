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


def wrong(kind: str, text: str, *more: Any) -> str:
    """Return the first line that failed, and how; or nothing."""
    answer = play(kind, text, *more)
    for line, led in zip(answer.get("lines", ()), answer.get("led", ())):
        if led.get("wrong"):
            return f"{line}: {led['wrong']}"
    return str(answer.get("said", ""))


@pytest.mark.parametrize(("kind", "name", "text"), BLOCKS)
def test_lessons_play_as_they_say(kind: str, name: str, text: str) -> None:
    """Examples go as written, and right answers alone are accepted."""
    if kind != "question":
        assert not wrong(kind, text)
        return
    right, others = ANSWERS[name]
    for answer in right:
        assert not wrong(kind, text, answer)
    for answer in others:
        assert wrong(kind, text, answer), answer


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "conversation",
            "A > SUB a\nA < MSG a\\0x\nA close",
            "A < MSG a\\0x: received nothing",
        ),
        (
            "conversation",
            "A > SUB a\nB > MSG a\\0x",
            "A < nothing: received MSG a\\0x",
        ),
        ("match", "a* ab yes\na* ba yes", "a* ba yes: received nothing"),
        ("match", "a ab no\na*", "a*: not of the form of the others"),
        ("packet", "\\q invalid", "\\q invalid: not of the form of"),
        ("bench", "A hums", "not a step: 'A hums'."),
        ("bench", "server --bus", "unrecognized arguments: --bus"),
        ("bench", "A > SUB {B.pid}", "A > SUB {B.pid}: 'B' is unknown"),
        ("bench", "wait x", "wait x: could not convert"),
    ],
)
def test_what_differs_is_said(kind: str, text: str, said: str) -> None:
    """A wrong line is named, with what came instead."""
    assert wrong(kind, text).startswith(said)


def test_lines_have_what_they_led_to() -> None:
    """In the words of the server's log, with the names of the clients."""
    text = "A > SUB a\nB > HELLO\nC > MSG a\\0x\nA < {any}"
    led = play("bench", text)["led"]
    assert 'A sub pattern="a" [SUB-1]' in led[0]["made"]
    made = " ".join(led[1]["made"])
    assert "disconnect B [PKT-2] malformed packet" in made
    assert led[3]["got"] == "MSG a\\0x"


def test_a_blank_at_the_end_is_sent() -> None:
    """The empty pattern is behind it."""
    assert not wrong("conversation", "A > SUB \nB > MSG x\\0\nA < {any} ")


def test_the_playground_stops_where_it_is_told() -> None:
    """Its cards say what the server knows by then."""
    text = "A > SUB k\nA > SUB k\nA > CMSG blocking/soft/block\nA room 1\n"
    text += "B > MSG k\\0one\nB > MSG k\\0two\nB > MSG k\\0three\nwait 2.5"
    answers = [play("bench", text, count) for count in (2, 6, -1)]
    assert [len(answer["led"]) for answer in answers] == [2, 6, 8]
    assert "k × 2" in answers[0]["cards"]
    assert re.search(r"paused by +A", answers[1]["cards"])
