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

PAGE = Path(broken_servers.__file__).with_suffix(".txt").read_text("utf-8")
CHAPTERS_2_TO_8, _, CHAPTER_9 = PAGE.partition("# ---- 9.")
NOT_FOUND = [
    # They show with more clients than a small world has
    *("first-256-subscribers-hear", "numbers-are-of-a-hundred-users"),
    *("numbers-are-not-bounded", "some-of-twelve-publishers-are-not-held"),
    # They show when clients wait in a chain, or read now and then
    *("reading-what-the-kernel-kept-is-nothing", "rings-lose-all-but-one"),
    *("reading-renews-all", "time-begins-with-each-hold"),
    "time-is-given-once-for-ever",
    # The model has no turns
    *("turns-have-no-end", "a-turn-has-no-end"),
    *("slices-are-for-clients", "slices-are-long"),
    # The kernel here takes what it is told to take
    *("send-buffers-stay-small", "send-buffers-are-twice-as-large"),
    # They are numbers of the command line
    *("limit-has-32-bits", "numbers-of-users-have-16-bits"),
    "default-as-an-option-is-none",
    # The log may have more lines, or leave some out
    *("nothing-says-how-many-were-left-out", "every-discard-is-logged"),
    *("lines-of-others-name-nobody", "lines-count-the-named"),
    *("left-out-of-one-rule-alone", "lines-have-no-limit"),
    *("a-line-more-in-a-second", "users-without-a-line-are-not-named"),
    "last-process-is-blamed-on-another",
    # What they keep or lack is memory, or descriptors
    *("backlogs-of-the-expelled-are-kept", "patterns-above-a-limit-are-kept"),
    "newcomers-are-looked-at-without-descriptors",
    # Here root owns the bus
    "owner-has-limits-of-the-bus",
    # It shows in a pattern with two credentials, which worlds seldom have
    "rest-of-a-secret-pattern-has-own-numbers",
    # No secret pattern has a shape that the limits of a world admit
    "shapes-of-secrets-count-apart",
    # They show above a mebibyte, or below four of a thing
    *("every-publisher-adds-to-a-backlog", "far-above-is-cut-off"),
    "quarter-of-little-is-all",
    # It ends the process, and the search with it
    "mistake-stops-the-server",
]
# After so many seeds of random worlds a mistake counts as not found
SEEDS = [str(seed) for seed in range(20)]
SMALL_WORLD = {  # all of whose states show it
    "two-that-wait-go-both": ["ring"],
    "first-packet-of-a-backlog-has-no-limit": ["modes-queue-discard"],
    "shapes-are-counted-for-each-client": ["shapes"],
    "second-order-of-a-backlog-is-ignored": ["order"],
    "sizes-forget-what-the-stack-sends": ["order"],
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
    """The program prints a conversation that shows it."""
    source = broken_servers.SBUS.read_text("utf-8")
    try:
        broken = read_mistakes()[name].spoil(source)
    except ValueError as error:  # as test_each_can_be_made says
        pytest.skip(str(error))
    (directory / "sbus.py").write_text(broken, "utf-8")
    places = [str(directory), *sys.path]
    for world in SMALL_WORLD.get(name, SEEDS):
        done = subprocess.run(
            [sys.executable, refine.__file__, world],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            break
    assert done.returncode == 1 and "```conversation" in done.stdout, done
