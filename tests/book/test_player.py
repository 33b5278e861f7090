"""Tests that examples and lessons play as they say, and say so if not."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from conformance.examples import Block
from fake_bus import each_block
from lesson_answers import ANSWERS
from processes import ROOT

pytest.importorskip("jinja2", reason="the book needs Jinja2")

from book.player import call

LESSONS = sorted((ROOT / "book/lessons").glob("*.md"))
FENCE = re.compile(r"^```(\w+) (\S+)[^\n]*\n(.*?)^```", re.M | re.S)


def play(kind: str, text: str, more: Any = -1) -> dict[str, Any]:
    """Return what a page would be answered."""
    answer: dict[str, Any] = json.loads(call(kind, text, more))
    return answer


def fences(kind: str) -> list[tuple[str, str, str]]:
    """Return the kind, name and text of the lessons' blocks, all or of one."""
    texts = "".join(path.read_text("utf-8") for path in LESSONS)
    return [one for one in FENCE.findall(texts) if one[0] == kind or not kind]


class TestExamples:
    @each_block
    def test_each_plays_as_it_says(self, block: Block) -> None:
        """The outcome in the page is that of the specification."""
        answer = play(block.kind, "\n".join(block.lines))
        assert answer["ok"], answer["said"]

    def test_those_of_the_lessons_too(self) -> None:
        """They are of the same form."""
        examples = [one for one in fences("") if one[0] != "question"]
        assert len(examples) > 15
        for kind, name, text in examples:
            assert play(kind, text)["ok"], name

    def test_a_step_that_fails_says_so(self) -> None:
        """And what follows is not taken."""
        answer = play("conversation", "A > SUB a\nA < MSG a\\0x\nA close")
        assert answer["said"] == "✗ step 2: received nothing"
        assert answer["html"].count("<tr") == 4
        assert answer["html"].count('class="failed"') == 1
        assert answer["html"].count('class="later"') == 1

    def test_what_nobody_said_fails(self) -> None:
        """A conversation is complete."""
        answer = play("conversation", "A > SUB a\nB > MSG a\\0x")
        assert answer["said"] == "✗ step 3: received MSG a\\0x"

    def test_a_row_that_is_wrong_says_so(self) -> None:
        """The others are played all the same."""
        answer = play("match", "a* ab yes\na* ba yes\na* abc yes")
        assert answer["said"] == "✗ row 2: received nothing"
        assert answer["html"].count("✓") == 2
        assert not play("packet", "MSG publish")["ok"]

    @pytest.mark.parametrize(
        ("kind", "row", "said"),
        [
            ("match", "a*", "one is a pattern, a key, and yes or no"),
            ("match", "a* ab maybe", "one is a pattern, a key, and yes or no"),
            ("match", "a* a b yes", "not a row: a* a b yes; one is"),
            ("packet", '"SUB a" hello', "one is a packet, its kind or"),
            ("packet", "\\q invalid", "one is a packet, its kind or"),
        ],
    )
    def test_what_is_no_row_says_so(
        self, kind: str, row: str, said: str
    ) -> None:
        """In a line of plain words, beside the other rows."""
        fine = {"match": "a ab no", "packet": "HELLO invalid"}[kind]
        answer = play(kind, f"{fine}\n{row}")
        assert answer["said"].startswith("✗ row 2: ")
        assert said in answer["said"] and "\n" not in answer["said"]
        assert answer["html"].count("✓") == 1

    def test_steps_have_numbers(self) -> None:
        """Those that the status names, as they stand in the text."""
        answer = play("conversation", "A > SUB a\nA < MSG a\\x00x")
        numbers = re.findall(r'<th scope="row">(\d+)</th>', answer["html"])
        assert numbers == ["1", "2"] and "step 2" in answer["said"]

    def test_the_status_names_who_is_disconnected(self) -> None:
        """Though that is what the example says."""
        answer = play("bench", "A > HELLO")
        said = "✓ 1 of 1 steps went as they say; disconnect A [PKT-2]"
        assert answer["said"].startswith(said)

    def test_a_blank_at_the_end_is_sent(self) -> None:
        """And elsewhere it is none of the text."""
        assert play("conversation", "A > SUB \nB > MSG x\\0\nA < {any} ")["ok"]
        assert play("bench", "A > SUB")["said"].count("disconnect A")

    def test_decisions_name_clients_and_rules(self) -> None:
        """In the words of -v, and with links."""
        html = play("conversation", "A > SUB a\nB > HELLO\nB < end")["html"]
        text = unescape(re.sub("<[^>]*>", "", html))
        assert 'A sub pattern="a" [SUB-1]' in text
        assert "disconnect B [PKT-2] malformed packet" in text
        assert 'href="3-protocol.html#PKT-2"' in html

    def test_who_comes_while_the_server_is_stopped_has_a_name(self) -> None:
        """Once it goes on."""
        text = "A > SUB a\nB >> MSG a\\0x\nB >> MSG a\\0y\nA < MSG a\\0x"
        answer = play("bench", text)
        said = unescape(re.sub("<[^>]*>", "", answer["html"]))
        assert "B open " in said and 'B msg key="a"' in said
        assert "<h3>B</h3>" in answer["cards"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("A > MSG {B.pid}\\0x", "'B' is not connected"),
            ("A > SUB a\nA process uid=1", "it is connected and stays"),
            ("A process pid=1 foo=2", "not as in uid=1001"),
            ("A hums", "not a step: 'A hums'"),
            ("server --bus\nA > SUB a", "unrecognized arguments: --bus"),
            ("A > SUB {1..1001}", "1 to 1000 steps"),
            ("", "1 to 1000 steps"),
            ("wait x", "could not convert"),
        ],
    )
    def test_what_cannot_be_played(self, text: str, said: str) -> None:
        """It is said in a sentence, and is nobody's crash."""
        answer = play("conversation", text)
        assert not answer["ok"] and said in answer["said"]


class TestBench:
    TEXT = r"""server --max-backlog 1000
        A process uid=1001 gid=7
        A > SUB k
        A > SUB k
        A > CMSG blocking/soft/block
        A room 1
        B process uid=1001
        B > MSG k\0one
        B > MSG k\0two
        B > MSG k\0three
        wait 2.5
        A < {any}"""

    def facts(self, steps: int) -> dict[str, dict[str, str]]:
        """Return what the cards say after so many steps, by client."""
        cards = play("bench", self.TEXT, steps)["cards"]
        return {
            name: dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card))
            for name, card in re.findall(
                r"(?s)<h3>(.)</h3>(.*?)</article>", cards
            )
        }

    def test_cards_say_what_the_server_knows(self) -> None:
        """Patterns with their counts, modes, backlogs, who holds whom."""
        cards = self.facts(9)
        assert cards["A"]["patterns"] == "k × 2"
        assert cards["A"]["modes"] == "soft block, hard block"
        assert cards["A"]["unread"] == "1 of 1"
        assert cards["A"]["backlog"] == "1"
        assert cards["A"]["is"] == "stalled" and cards["A"]["holds"] == "B"
        assert cards["A"]["who"].startswith("uid 1001, gid 7, pid")
        assert cards["B"]["is"] == "paused"
        assert cards["B"]["paused by"] == "A"
        assert cards["B"]["published"] == "2"

    def test_each_step_can_be_the_last(self) -> None:
        """So one can go back, and on; the end need not be whole."""
        counts = [len(self.facts(steps)) for steps in range(7)]
        assert counts == [0, 1, 1, 1, 1, 1, 2]
        whole = play("bench", self.TEXT)
        assert whole["ok"] and whole["count"] == 11
        assert whole["said"].endswith("; the clock shows 2.5 s")
        assert "MSG" in whole["html"] and "{any}" not in whole["html"]

    def test_a_client_that_has_gone_keeps_its_card(self) -> None:
        """It says that it is disconnected."""
        cards = play("bench", "A > HELLO")["cards"]
        assert '<article class="disconnected">' in cards


class TestQuestions:
    @pytest.mark.parametrize(("kind", "name", "text"), fences("question"))
    def test_right_answers_alone_are_accepted(
        self, kind: str, name: str, text: str
    ) -> None:
        """Of several that are right, each."""
        right, wrong = ANSWERS[name]
        asked = text.partition("\n")[2]
        for answer in right:
            assert play(kind, asked, answer)["ok"], answer
        for answer in wrong:
            assert not play(kind, asked, answer)["ok"], answer

    def test_each_lesson_has_three(self) -> None:
        """And there are five lessons."""
        counts = [path.read_text("utf-8").count("```q") for path in LESSONS]
        assert counts == [3] * 5
