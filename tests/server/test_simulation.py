"""Random runs on a simulated kernel, judged by the model."""

from __future__ import annotations

import pytest

from sim_steps import failure_of, make_steps, replay_of
from simulation import SETUPS
from sizes import PROOF, either

SEEDS = either(1_040, 80)  # as many of each setup
STEPS = either(8_000, 2_000)
GROUPS = 20

pytestmark = PROOF


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_runs(group: int) -> None:
    """[PUB-1] [PUB-3] [PUB-6] [CRED-11] [BLOCK-12] [CONN-6] [CTL-5] Judged.

    A step of a client changes nothing that the server holds: it only changes
    what the next round will find.  So each round is followed by the checks.
    """
    for seed in range(group, SEEDS, GROUPS):
        setup = SETUPS[seed % len(SETUPS)]
        steps = make_steps(seed, STEPS, setup)
        if failure_of(steps, setup):
            replay = replay_of(steps, setup)
            pytest.fail(f"seed {seed}: {replay}", pytrace=False)


@pytest.mark.parametrize("seed", [81, 242, 411, 1553])
def test_runs_that_failed(seed: int) -> None:
    """[BLOCK-12] [CONN-6] Long runs, each of which has shown a mistake."""
    setup = SETUPS[seed % len(SETUPS)]
    assert not failure_of(make_steps(seed, 8_000, setup), setup)
