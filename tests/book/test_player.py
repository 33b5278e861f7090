"""Tests of what the book's player answers, under CPython."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import player
from conformance.examples import PARSERS, read_blocks
from cut_stage import program
from lesson_answers import ANSWERS
from mistakes import SHOWN, choices
from player import call
from processes import ROOT
from real_bus import needs_root
from sizes import either

PAGES = [
    path
    for folder in ("lessons", "packets")
    for path in sorted((ROOT / "book" / folder).glob("*.md"))
]
BUTTONS = ("bench.html", "flood.html", "stage.html", "mistake.html")
SCRIPTS = ("static/book.js", "static/work.js")
TEXTS = "".join(path.read_text("utf-8") for path in PAGES)
BLOCKS = re.findall(
    r"^```(?!orders)(\w+) (\S+)[^\n]*\n(.*?)^```", TEXTS, re.M | re.S
)


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
def test_pages_play_as_they_say(kind: str, name: str, text: str) -> None:
    """Examples go as written, and right answers alone are accepted."""
    if kind != "question":
        assert not wrong(kind, text)
        return
    right, others = ANSWERS[name]
    for answer in right:
        assert not wrong(kind, text, answer)
    for answer in others:
        assert wrong(kind, text, answer), answer


SAID = "A > SUB a\nB > MSG a\\0x"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("conversation", "A > SUB a\nA < a\nA close", "A < a: received noth"),
        ("conversation", SAID, "A < nothing: received MSG a\\0x"),
        ("match", "a* ab yes\na* ba yes", "a* ba yes: received nothing"),
        ("match", "a ab no\na*", "a*: not of the form of the others"),
        ("packet", "\\q invalid", "\\q invalid: not of the form of"),
        ("bench", "A hums", "not a step: 'A hums'."),
        ("bench", "server --bus", "unrecognized arguments: --bus"),
        ("bench", "A > SUB {B.pid}", "A > SUB {B.pid}: B is not there"),
        ("bench", "wait x", "Line 1, “wait x”: wait takes a number"),
        ("bench", "wait inf", "Line 1, “wait inf”: wait takes a number"),
        ("bench", "A room -1", "Line 1, “A room -1”: room takes a number"),
        ("bench", "server -d", "Line 1, “server -d”: a server in a page"),
        ("bench", "A process uid=99999999999", "Line 1, “A process"),
        ("bench", "A process uid=4294967296", "Line 1: no id is above 42"),
        ("bench", "a > SUB k", "Line 1, “a > SUB k”: a client has one"),
        ("bench", "Alice > SUB k", "Line 1, “Alice > SUB k”: a client has"),
    ],
)
def test_what_differs_is_said(kind: str, text: str, said: str) -> None:
    """A wrong line is named, with what came instead."""
    assert wrong(kind, text).startswith(said)


def test_all_examples_play_as_they_say() -> None:
    """Those of the specification, with all that they disconnect."""
    failed = [
        (block.name, said)
        for block in read_blocks()
        if block.kind in PARSERS
        and (said := wrong(block.kind, "\n".join(block.lines)))
    ]
    assert not failed


def test_lines_have_what_they_led_to() -> None:
    """In the words of the server's log, with the names of the clients."""
    text = "A > SUB a\nB > HELLO\nC > MSG a\\0x\nA < {any}"
    led = play("bench", text)["led"]
    assert 'A sub pattern="a" [SUB-1]' in led[0]["made"]
    made = " ".join(led[1]["made"])
    assert "disconnect B [PKT-2] malformed packet" in made
    assert led[3]["got"] == "MSG a\\0x"


@pytest.mark.parametrize("kind", ["bench", "conversation"])
@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        ("MSG a/b hello", "no NUL byte after the key"),
        ("sub a", "a kind has capital letters: SUB"),
        ("SUB", "no blank after SUB"),
        ("HELLO", "the packet begins with none of SUB"),
        ("MSG a/!\\0", "reserved '!' in"),
        ("SUB !/cred/1/2/3/", "not its own"),
    ],
)
def test_a_client_that_is_disconnected_is_not_right(
    kind: str, packet: str, reason: str
) -> None:
    """Its own line fails, with the reason first, unless the end is there."""
    text = f"A > {packet}"
    line, _, said = wrong(kind, f"B > SUB k\n{text}").partition(": ")
    assert line == text and said.startswith(reason)
    assert said.endswith("so A was disconnected")
    assert not wrong(kind, f"{text}\nA < end")


ATTACKS = {  # what has been tried to make the page stand still
    "packets": "A > MSG {1..3000000}\\0x",
    "packets in many lines": "A > MSG {1..50000}\\0x\n" * 40,
    "a large packet": "A > MSG k\\0{x*900000000}",
    "many large packets": "A > MSG k\\0{x*400000}\n" * 200,
    "much text": "A > SUB k\n" * 300_000,
    "a long line": "A > SUB " + "a/" * 1_000_000,
    "numbers": "wait 9" + "9" * 400,
    "infinity": "wait inf",
    "time": "wait 999999999",
    "time in many lines": "wait 900000\n" * 2_000,
    "failing lines": "A < {any}\n" * 9_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_run_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit, with a line that says so."""
    monkeypatch.setattr(player, "ROUNDS_MAX", 5_000)
    answer = play("bench", ATTACKS[name])
    assert re.search("too much|rounds|takes a", answer["said"])


def test_the_playground_goes_on_after_a_line_that_fails() -> None:
    """A read that found nothing is marked; what follows is played."""
    text = "A > SUB k\nA < {any}\nB > MSG k\\0x\nA < {any}"
    led = play("bench", text)["led"]
    assert [bool(step.get("wrong")) for step in led] == [0, 1, 0, 0]
    assert led[3]["got"] == "MSG k\\0x"


@pytest.mark.parametrize(
    ("hole", "answer", "said"),
    [
        ("A < ____", "two", "Write a whole packet"),
        ("A < ____", "MSG k", "In a message \\0 stands"),
        ("A > ____", "order/stack", "Write a whole packet"),
        ("A < ____", "SUB k", "Write a whole packet, with its kind: MSG key"),
        ("A < ____", "A < MSG k\\0x", "The line has its client and arrow"),
        ("A > ____", "A > SUB k", "The line has its client and arrow"),
        ("A > SUB ____", "A > SUB k", "The line has its client and arrow"),
        ("A > SUB ____", "SUB k", "The line has its SUB already"),
        ("A > SUB ____", "sub k", "The line has its SUB already"),
        ("____ < MSG k\\0x", "b c", "Write the capital letters of clients"),
        ("____ < MSG k\\0x", "", "Write something first"),
    ],
)
def test_a_slip_of_form_is_told(hole: str, answer: str, said: str) -> None:
    """It is not played, so nothing gives the answer away."""
    assert play("question", hole, answer)["said"].startswith(said)


def test_pages_name_buttons_as_they_are() -> None:
    """What a page prints in italics, with a capital letter, is a button."""
    book = ROOT / "book"
    pages = [*PAGES, book / "bench.md", book / "teaching.md"]
    text = " ".join(path.read_text("utf-8") for path in pages)
    buttons = "".join(
        (book / name).read_text("utf-8") for name in BUTTONS + SCRIPTS
    )
    named = re.findall(r"(?<!\*)\*([A-Z][\w\s]{2,30})\*(?!\*)", text)
    assert named
    for name in named:
        label = re.escape(" ".join(name.split()))
        assert re.search(f'[>"]{label}[<"]', buttons), name


def test_a_blank_at_the_end_is_sent() -> None:
    """The empty pattern is behind it."""
    assert not wrong("conversation", "A > SUB \nB > MSG x\\0\nA < {any} ")


def test_each_line_has_what_the_server_knew_by_then() -> None:
    """Of each client and of its table, and which of its lines ran."""
    text = "A > SUB k\nA > SUB k\nA > CMSG blocking/soft/block\nA room 1\n"
    text += "B > MSG k\\0one\nB > MSG k\\0two\nB > MSG k\\0three\nwait 2.5"
    answer = play("bench", text)
    known = [dict(led["cards"]) for led in answer["led"]]
    assert known[0]["table"] == {"k": "→ A"} and "B" not in known[3]
    assert [known[n]["A"]["patterns"] for n in (0, 1)] == ["k × 1", "k × 2"]
    assert known[5]["B"]["paused by"] == "A"
    assert known[5]["A"]["backlog"] == ["MSG k\\0two"]
    assert known[6]["B"]["not read yet"] == ["MSG k\\0three"]
    code = answer["source"].splitlines()
    ran = [{code[n - 1].strip() for n in led["ran"]} for led in answer["led"]]
    paused = 'count(publisher, "paused", 0 if publisher.held_by else 1)'
    assert [n for n, lines in enumerate(ran) if paused in lines] == [5]


def test_many_lines_are_played() -> None:
    """The page has the last of them."""
    text = "".join(f"{'ABC'[n % 3]} > SUB {n}\n" for n in range(1_500))
    led = play("bench", text)["led"]
    assert ["cards" in step for step in led] == [False] * 1_300 + [True] * 200


def test_many_lines_that_fail_are_played_once() -> None:
    """As after a limit, which has the client disconnected."""
    lines = [f"A > SUB {n}\n" for n in range(1_100)]
    led = play("bench", "".join(lines))["led"]
    failed = [n for n, step in enumerate(led) if step.get("wrong")]
    assert failed == [*range(failed[0], 1_100)] and failed[0] > 1_000


@needs_root  # as whom the page walks; others have no clients of other users
@pytest.mark.parametrize(
    "name", either([*SHOWN], random.Random(1).sample([*SHOWN], 5))
)
def test_the_kit_catches_each_mistake_that_is_shown(name: str) -> None:
    """By a short conversation; one of the examples beside it does too."""
    lines = search("walk", "", name)["lines"]
    assert len(lines) < 12
    answer = play("broken", "\n".join(lines), name)
    assert [led for led in answer["led"] if led.get("wrong")]
    assert answer["rules"] == [*SHOWN[name].found_by]
    shown = [lines for _, lines in choices(name)]
    betray = [wrong("broken", "\n".join(lines), name) for lines in shown]
    assert len(shown) == 3 and len([*filter(None, betray)]) == 1
    said = wrong("broken", "A > SUB k\nA < end", name)
    assert said.startswith("sbus.py itself does not do “A < end”")


def search(kind: str, text: str, name: str) -> Any:
    """Return what a page would be answered in the end."""
    steps = player.search(kind, text, name)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return json.loads(end.value)


def test_there_is_nothing_to_search_in_nothing() -> None:
    assert search("orders", "# no step", "")["said"] == "There is no step yet."


def test_a_server_is_compared_with_ours() -> None:
    """Only what differs, with some lines around."""
    ours = program(2)
    assert play("compare", ours, 2)["lines"] == ["They are the same."]
    lines = play("compare", ours.replace("set()", "[]"), 2)["lines"]
    assert [line for line in lines if line[0] in "+-"] == [
        "-        self.patterns = []  # what it has subscribed to",
        "+        self.patterns = set()  # what it has subscribed to",
    ]


# Whatever a page asks for: an example, a stage, a search, the gallery
ASKED = """
import sys

sys.path.insert(0, ".")
import mistakes, player, sbus
for module in "program_bus", "model_bus", "surprise", "checks":
    __import__(module)
print(sbus.__file__, player.call("conversation", "A > SUB k"))
"""


def test_the_archive_of_the_page_is_complete(directory: Path) -> None:
    """What make packs for the page needs nothing of the checkout."""
    show = "--eval=played:;@echo $(PLAYED)"
    make = ["make", "-s", "-C", str(ROOT), show, "played"]
    names = subprocess.check_output(make, text=True).split()
    files = [str(file) for name in names for file in ROOT.glob(name)]
    archive = str(directory / "player.zip")
    pack = [sys.executable, "-m", "zipfile", "-c", archive, *files]
    subprocess.run(pack, check=True)
    shutil.unpack_archive(archive, directory)
    python = [sys.executable, "-I", "-c", ASKED]
    done = subprocess.run(
        python, cwd=directory, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{directory}/sbus.py "), done
    assert '"led"' in done.stdout, done


NODE = shutil.which("node")
DRAWN = """
const text = require("fs").readFileSync(0, "utf8").split("// ---- ");
const drawings = text.find((part) => part.startsWith("Drawings"));
const make = new Function("root", "rules", `//${drawings}
  return [drawn("match", ['a b "><img>']), drawn("orders", ["<img>"]),
    drawn("bench", ["<img>"]), cited("[FOO-1] <img>")];`);
console.log(make("/", {}).join(""));
"""


@pytest.mark.skipif(not NODE, reason="there is no node")
def test_a_drawing_shows_what_is_typed_as_text() -> None:
    """No line becomes HTML, and a rule that is unknown has no link."""
    code = (ROOT / "book/static/book.js").read_text("utf-8")
    words = [str(NODE), "-e", DRAWN]
    said = subprocess.run(words, input=code, capture_output=True, text=True)
    assert "<img" not in said.stdout and "[FOO-1]" in said.stdout, said
