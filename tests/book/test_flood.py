"""Tests of the table behind the moving picture of the first page."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

import sbus
from flood import STEPS, USERS, Flood, table
from processes import ROOT
from sizes import either

WALKS = either(12, 4)  # of each setting
STEPS_MAX = 300  # in each walk


@pytest.fixture(scope="module")
def flood() -> dict[str, Any]:
    with mock.patch.object(sbus, "log"):
        return table()


def rows_of(flood: dict[str, Any], name: str) -> list[Any]:
    """Return the rows of a setting."""
    rows = flood["modes"][name]
    return rows_of(flood, rows) if isinstance(rows, str) else list(rows)


def test_walks_lead_where_the_table_says(flood: dict[str, Any]) -> None:
    """At random, side by side with a live server, in all settings."""
    steps = disconnections = 0
    for name in flood["modes"]:
        for seed in range(WALKS):
            count, is_gone = walk(flood, name, random.Random(f"{name} {seed}"))
            steps += count
            disconnections += is_gone
    print(steps, "steps", disconnections, "disconnections")
    assert disconnections


def walk(
    flood: dict[str, Any], name: str, rng: random.Random
) -> tuple[int, bool]:
    """Walk through one setting; return the steps, and if the reader went."""
    soft, hard, whose = name.split()
    rows = rows_of(flood, name)
    weights = [rng.random() + 0.1 for _ in STEPS]
    number = 0
    with mock.patch.object(sbus, "log"):
        live = Flood(soft, hard, USERS[whose])
        for count in range(STEPS_MAX):
            kind = rng.choices(range(len(STEPS)), weights)[0]
            led = rows[number][4 + kind]
            assert live.can(STEPS[kind]) == bool(led), rows[number]
            if led:
                state, sentence = live.do(STEPS[kind])
                number = led[0]
                assert sentence == flood["told"][led[1]]
                if state.is_gone:
                    assert rows[number] == []
                    return count, True
                assert rows[number][:4] == [*map(int, state[:4])]
    return STEPS_MAX, False


def test_the_page_has_a_sentence_for_all_that_is_told(
    flood: dict[str, Any],
) -> None:
    """Of what the server tells, something is in the script."""
    script = (ROOT / "book/static/flood.js").read_text("utf-8")
    sentences = [
        line.partition('": "')[0].strip()[1:]
        for line in script.partition("SENTENCES = {")[2].splitlines()
        if '": "' in line
    ]
    assert len(sentences) == 12
    for sentence in filter(None, flood["told"]):
        assert any(start in sentence for start in sentences), sentence
    for start in sentences:
        assert any(start in sentence for sentence in flood["told"]), start
