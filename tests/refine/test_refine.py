"""Tests that the server is in the state of the model, whatever happens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from refine import Way, explore, failing_ways, random_ways, shrink
from sizes import PROOF, either
from worlds import small_worlds

WORLDS = small_worlds()
SEEDS = either(60, 10)  # half an hour, or 10 s of the processor
WORLDS_OF_A_SEED = either(600, 30)
FAILING_WAYS = either(200, 5)  # of each small world

pytestmark = PROOF


def require_none_wrong(ways: Iterable[Way], name: str) -> None:
    """Fail with a short conversation, if one shows a difference."""
    for way in ways:
        if way.wrong:
            pytest.fail(shrink(way).block(name), pytrace=False)


@pytest.mark.parametrize("name", WORLDS)
def test_all_states(name: str) -> None:
    """[BLOCK-7] [BLOCK-8] [BLOCK-9] [BLOCK-10] [BLOCK-11] [BLOCK-12]
    [BLOCK-16] [BLOCK-22] [CONN-10] [LIMIT-7] [ORDER-1] [ORDER-2]
    [PUB-6] Server and model agree in each order of events.
    """
    way = explore(WORLDS[name])
    assert not way.wrong, way.block(name)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_worlds(seed: int) -> None:
    """[PUB-1] [PUB-3] [PUB-4] [PUB-6] [PKT-5] [CRED-11] [CTL-5] [CONN-6]
    [BLOCK-17] [CONN-13] [ECHO-1] [LIMIT-12] [RUN-12] [TRACE-1] Server and
    model agree in some ways through each.
    """
    ways = random_ways(str(seed), WORLDS_OF_A_SEED)
    require_none_wrong(ways, f"random-{seed}")


@pytest.mark.parametrize("name", WORLDS)
def test_each_call_fails_in_turn(name: str) -> None:
    """[CONN-12] An error costs at most the client that it concerns."""
    for seed in range(FAILING_WAYS):
        ways = failing_ways(WORLDS[name], str(seed))
        require_none_wrong(ways, f"failing-{name}-{seed}")
