"""Tests of the search of every order, and of the surprises of the book."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

import orders
from every_order import ends_html
from orders import check_orders, try_orders
from player import call, search
from processes import ROOT, run
from real_bus import needs_root

LESSONS = "".join(
    path.read_text("utf-8") for path in (ROOT / "book/lessons").glob("*.md")
)
BLOCKS = re.findall(r"^```orders (\S+)[^\n]*\n(.*?)^```", LESSONS, re.M | re.S)
HELD = "A > CMSG blocking/soft/block\nA > SUB a\nA room 1\n---\n"
MANY = (
    "server --max-backlog 270\nA > SUB k\nA > CMSG blocking/hard/discard\n"
    "A room 1\n---\nA < {any}\nA < {any}\nB > MSG k\\0{1..2}\n"
    "C > MSG k\\0{3..4}"
)
LARGE = "".join(f"{name} > MSG k\\0{{x*4000}}{{1..3}}\n" for name in "ABC")
CONVERSATIONS = {
    **dict(BLOCKS),
    "over-before-all-is-read": HELD + "A < {any}\nB > MSG a\\0{1..4}",
    "another-user": "A process uid=1001\nA > SUB k\nA room 1\n"
    "A > CMSG blocking/soft/error\n---\nA < {any}\nB > MSG k\\0{1..2}",
    "over-the-limit": MANY,
    "a-line-comes-again": "A > SUB k\nA > CMSG blocking/soft/discard\n"
    "A room 1\nB > MSG k\\0one\n---\nB > MSG k\\0one\nA < {any}",
    "ends-for-two-reasons": "server --max-shapes 1\n"
    "server --max-user-pattern-bytes 9\nA process uid=1000\n"
    "B process uid=1000\n---\nB > SUB a*\nB > UNSUB a*\n"
    "B > SUB 012345\nB > UNSUB 012345\nA > SUB kkkk",
    "due-at-once": "A > SUB k\nA > CMSG blocking/soft/block\nA room 1\n"
    "B > SUB k\nB > CMSG blocking/soft/block\nB room 1\n---\n"
    "A > MSG k\\0{1..3}",
    "deaf-with-unread": "B > SUB j\nA > SUB k\n---\nB > MSG k\\0x\nA deaf",
    "full-for-a-while": "A > SUB k\nA fill\nwait 1\n---\nA < {any}\n"
    "B > MSG k\\0one",
    "holds-itself": HELD + "A > MSG a\\0{1..3}",
    "programs-that-leave": "A > SUB k\nB > SUB k\n---\nA close\n"
    "B > MSG k\\0one\nB shut\nC > MSG k\\0two\nC > HELLO",
    "secrets": "A > CMSG !/cred/whoami\nA < {any}\nB > SUB "
    "!/cred/{B.gid}/{B.uid}/{B.pid}/\nA > MSG !/cred////\\0secret",
}
RULES = {  # by the numbers of their chapters
    path.name[0]: re.findall(
        r"^\*\*(\[\w+-\d+\])", path.read_text("utf-8"), re.M
    )
    for path in (ROOT / "spec").glob("[1-9]-*.md")
}
UNTIL = "until the block time"
WAIT = f"A and B wait for each other, {UNTIL}"
OPEN = "the specification leaves open"
EVERYTHING = "B gets MSG b\\0one, MSG b\\0three, MSG b\\0two"
FOUND: dict[str, tuple[Any, ...]] = {  # orders, end states, facts
    "too-late": (4, 3, "A waits for a message that does not come"),
    "both-publish-first": (6, 2, WAIT, "B loses 1 message [BLOCK-16]"),
    "the-go-ahead": (1235, 7, WAIT, EVERYTHING),
    "one-at-a-time": (144, 1, EVERYTHING),
    "in-the-backlog": (792, 1, EVERYTHING),
    "a-reader-beside": (2092, 1, EVERYTHING),
    "over-before-all-is-read": (2, 1, f"B waits for A to read, {UNTIL}"),
    "another-user": (2, 2, "A is disconnected [BLOCK-8]"),
    "over-the-limit": (54, 12, "A loses 1 message [BLOCK-9]"),
    "a-line-comes-again": (2, 2, "A loses 1 message [BLOCK-5]"),
    "ends-for-two-reasons": (5, 5, "A is disconnected [LIMIT-12]"),
    "due-at-once": (1, 1, f"{OPEN} which client is disconnected first"),
    "deaf-with-unread": (2, 1, "A gets nothing"),
    "full-for-a-while": (1, 1, "A gets MSG k\\0one"),
    "holds-itself": (1, 1, f"A waits for itself to read, {UNTIL}"),
    "programs-that-leave": (30, 3, "C is disconnected [PKT-2]"),
    "secrets": (4, 1, "B gets nothing"),
}


def play(kind: str, *more: str) -> dict[str, Any]:
    """Return what a page is answered."""
    answer: dict[str, Any] = json.loads(call(kind, *more))
    return answer


def went_as_written(lines: list[str]) -> bool:
    """Return whether the server does all that a conversation says."""
    lines = [line for line in lines if not line.startswith("#")]
    led = play("conversation", "\n".join(lines))["led"]
    return len(led) == len(lines) and not any("wrong" in step for step in led)


def test_its_first_page() -> None:
    """What the search says of itself is so."""
    assert doctest.testmod(orders) == (0, 3)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_order(name: str) -> None:
    """[BLOCK-16] The server does what is found, and the page prints it."""
    text = CONVERSATIONS[name]
    *_, report = try_orders(text)
    assert play("bench", text)["lines"]  # the playground takes it as well
    for end in report.ends:
        assert went_as_written(end.lines), end.lines

    count, states, *facts = FOUND[name]
    assert (report.orders, report.end_states) == (count, states)
    shown = {fact for end in report.ends for fact in end.facts}
    assert {*facts} <= shown | {*report.always}
    printed = ends_html(text, name)
    assert f"<p>Orders: {count:,}. End states: {states}.</p>" in printed
    if EVERYTHING in facts and states == 1:
        assert len(report.always) == 2 and not report.ends[0].facts


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chapter_5_holds(name: str) -> None:
    """[BLOCK-7] [BLOCK-10] [BLOCK-12] [BLOCK-22] In each state and step."""
    assert check_orders(CONVERSATIONS[name]).states > 1


def test_command(directory: Path) -> None:
    """It prints ways to each end, or a line that says what is wrong."""
    file = directory / "talk"
    file.write_text(CONVERSATIONS["both-publish-first"], "utf-8")
    done = run("simulated/orders.py", str(file))
    assert done.status == 0
    assert done.output.startswith("orders: 6; end states: 2")
    done = run("simulated/orders.py", "--apart", str(file))
    assert done.status == 0 and done.output.endswith(" states\n")
    for words, said in (
        ([str(directory)], "Is a directory"),
        (["--apar", str(file)], "unrecognized arguments: --apar"),
        ([], "the following arguments are required: FILE"),
    ):
        done = run("simulated/orders.py", *words)
        assert (done.status, done.output) == (2, "")
        assert done.errors.count("\n") == 1 and said in done.errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A hums", "Line 1, “A hums”: not a step"),
        ("A > SUB k\nwait 6", "Line 2, “wait 6”: here time passes when"),
        ("A > SUB {B.pid}", "Line 1, “A > SUB {B.pid}”: no client B"),
        ("A < {any}\n---", "Line 1, “A < {any}”: before the line ---"),
        ("---\nA close\n---", "a conversation has one line ---"),
        ("server --strict", "A search knows only limits"),
        ("server --owner 5", "A search knows only limits"),
        ("A > MSG k\\0{1..3000000}\n---", "That is too much for this page"),
        ("A process x=1", "Line 1, “A process x=1”: not a step"),
        ("A room x", "Line 1, “A room x”: not a step"),
        ("A shut\nB shut\nC shut\nD shut", "A search handles at most 3 cli"),
        ("---\nA > MSG k\\0{1..7}", "A search handles at most 6 steps"),
        ("A > MSG k\\0{x*90000}", "A search handles only few"),
        ("---\nA close\nA > SUB k", "Line 3, “A > SUB k”: A has left"),
        ("A > HI\nA > SUB k\n---", "Line 2, “A > SUB k”: A has left"),
        ("A shut\nA > SUB k", "Line 2, “A > SUB k”: A sends nothing more"),
        ("server --max-key " + "9" * 400, "A limit here has 12 digits"),
        (f"server --block-timeout {'9' * 400}\n{HELD}B shut", "A limit here"),
        (LARGE, "The states of these need more memory than the search"),
        (MANY, "These have more than 60 states"),
    ],
)
def test_what_cannot_be_tried_is_said(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, which bound it is, or what would be right."""
    monkeypatch.setattr(orders, "STATES_MAX", 60)
    monkeypatch.setattr(orders, "STATES_REPORTED", 10)
    monkeypatch.setattr(orders, "BYTES_MAX", 100_000)
    searching = search("orders", text, "x")
    progress = []
    with pytest.raises(StopIteration) as over:
        while True:
            progress.append(next(searching))
    answer = json.loads(over.value.value)
    assert answer["said"].startswith(said) and "\n" not in answer["said"]
    assert len(progress) == (4 if text == MANY else 0)


@needs_root  # as whom the page makes conversations
@pytest.mark.parametrize("chapter", "23456")
def test_a_surprise_is_played_as_predicted(chapter: str) -> None:
    """What is asked is not shown; the seed alone decides which it is."""
    texts = set()
    for seed in "123456":
        task = play("surprise", chapter, seed)
        assert task == play("surprise", chapter, seed)
        assert went_as_written(task["lines"])
        assert task["rules"] and {*task["rules"]} <= {*RULES[chapter]}
        texts.add("\n".join(task["lines"]))
        assert len(task["lines"]) <= 20
        heard = [line for line in task["shown"] if " < " in line]
        assert all(line.endswith(" < …") for line in heard)
        assert sum(map(len, task["answers"].values())) >= 3
    assert len(texts) == 6
    assert play("surprise", "1", "x")["said"].startswith("There are surprises")
