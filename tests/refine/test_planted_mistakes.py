"""Tests that random worlds show the mistakes that are planted for the kit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import broken_servers
import refine
from broken_servers import read_mistakes
from sizes import PROOF, either

WORLDS = 400  # which take some 12 s of the processor
TIME = "it shows when nobody reads for long, again and again"
NUMBER = "it shows with more clients than a small world has"
PAGE = Path(broken_servers.__file__).with_suffix(".txt").read_text("utf-8")
CHAPTERS_2_TO_8, _, CHAPTER_9 = PAGE.partition("# ---- 9.")
NOT_FOUND = {
    "first-256-subscribers-hear": NUMBER,
}

pytestmark = PROOF


def mistakes_of_chapters() -> list[str]:
    """Return the names of the mistakes that a world can show."""
    names = [name for name in read_mistakes() if name not in NOT_FOUND]
    return [name for name in names if f"\n{name}: " in CHAPTERS_2_TO_8]


def test_what_is_not_found_exists() -> None:
    """A mistake that is gone needs no reason."""
    assert {*NOT_FOUND} <= {*read_mistakes()}


# Each takes seconds
@pytest.mark.parametrize("name", either(mistakes_of_chapters(), []))
def test_a_mistake_is_found(name: str, directory: Path) -> None:
    """It shows as a conversation."""
    source = broken_servers.SBUS.read_text("utf-8")
    try:
        broken = read_mistakes()[name].spoil(source)
    except ValueError as error:  # as test_each_can_be_made says
        pytest.skip(str(error))
    (directory / "sbus.py").write_text(broken, "utf-8")
    places = [str(directory), *sys.path]
    done = subprocess.run(
        [sys.executable, refine.__file__, "7", str(WORLDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "```conversation" in done.stdout, done
