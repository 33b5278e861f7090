"""Tests of the pictures of the chapters, which are plain text."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

import sbus
from fake_kernel import FakeKernel
from model import CHOICES
from packets import publish
from picture import COLUMNS_MAX, draw
from processes import ROOT

CHAPTERS = sorted((ROOT / "spec").glob("[1-9]-*.md"))
FENCE = re.compile(r"^```picture ([^\n]*)\n(.*?)^```$", re.M | re.S)
PICTURES = [
    (chapter.stem, title, text)
    for chapter in CHAPTERS
    for title, text in FENCE.findall(chapter.read_text("utf-8"))
]


def test_each_chapter_has_a_picture() -> None:
    assert {name for name, *_ in PICTURES} == {page.stem for page in CHAPTERS}


@pytest.mark.parametrize(("chapter", "title", "text"), PICTURES)
def test_a_picture_is_whole(chapter: str, title: str, text: str) -> None:
    """Its words stay where they are, and all of its lines are drawn."""
    assert not re.search(r"--|->|<-|[|+^]", "".join(lines(text)))
    for row, line in zip(lines(text), text.splitlines()):
        for word in re.finditer(r"[\w/*!.]{2,}", line):
            assert row[slice(*word.span())] == word[0]


def test_lines_meet() -> None:
    """Boxes beside and within each other, round corners, and arrows."""
    text = "+--+  .->\n|  +--'\n+--+  systemd's v-w"
    drawn = "┌──┐  ╭─►\n│  ├──╯\n└──┘  systemd's v-w"
    assert [row.rstrip() for row in lines(text)] == drawn.splitlines()


def lines(text: str) -> list[str]:
    """Return the rows of a picture as they are drawn."""
    html = draw(text, "").partition("<figcaption>")[0]
    return unescape(re.sub("<[^>]*>", "", html)).splitlines()


def test_what_is_too_wide_for_a_telephone_is_refused() -> None:
    with pytest.raises(ValueError, match="47 columns are too many"):
        draw("x" * (COLUMNS_MAX + 1), "wide")


FLOW = next(text for _, title, text in PICTURES if "becomes of" in title)
LIMIT = 4 * sbus.cost(publish(b"k"))
PUBLISHERS = {"own": 1000, "other": 1001}  # the receiver's user is 1000


def shown(soft: str, hard: str, is_full: bool, whose: str) -> tuple[str, str]:
    """Return what the picture of chapter 5 says: an action, and its rule."""
    boxes = [box for box in FLOW.split("+-----------------+\n") if "->" in box]
    for title, mode in ("soft mode", soft), ("below", soft), ("above", hard):
        box = next(box for box in boxes if f"| {title}" in box)
        if title == "below" and is_full:
            continue
        for condition in mode, f"{whose} user":
            row = rf"\| +{condition} -*\+-> \((\w+)\) \[([A-Z]+-\d+)\]"
            if match := re.search(row, box):
                return match[1], match[2]
    raise AssertionError("the picture has no way out")


@pytest.mark.parametrize("soft", CHOICES["blocking/soft"])
@pytest.mark.parametrize("hard", CHOICES["blocking/hard"])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("whose", PUBLISHERS)
def test_the_flow_of_chapter_5_is_what_the_server_decides(
    soft: str, hard: str, is_full: bool, whose: str
) -> None:
    """For all modes, below and above the limit, of one user and of two."""
    kernel = FakeKernel(max_backlog=LIMIT)
    receiver = kernel.connect()
    publisher = kernel.connect(PUBLISHERS[whose])
    receiver.send(b"SUB k")
    receiver.wire.room = 0
    publisher.send(*[publish(b"k")] * (4 if is_full else 1))
    for mode in ("soft/" + soft, "hard/" + hard):
        receiver.send(b"CMSG blocking/" + mode.encode())

    expected: Any
    try:
        expected = sbus.decide(
            receiver.client, publisher.client, publish(b"k")
        )
    except sbus.ProtocolError as error:
        expected = "disconnect", error.rule
    # A sentence below the picture has both modes: then the soft one counts
    if soft == hard == "block" and expected == ("pause", "BLOCK-7"):
        expected = "pause", "BLOCK-10" if is_full else "BLOCK-7"
    assert shown(soft, hard, is_full, whose) == expected
