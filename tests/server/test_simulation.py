"""Tests of the loop on a simulated kernel, against the model."""

from __future__ import annotations

import pytest

from simulation import SETUPS, failure_of, make_steps, replay_of, run_steps
from sizes import PROOF, either

SEEDS = either(2_080, 80)  # as many of each setup
STEPS = either(8_000, 2_000)
GROUPS = 20


class TestSimulation:
    """Random runs, compared with the model after every round.

    A step of a client changes nothing that the server holds: it only changes
    what its next round will find.  So each round is followed by the checks.
    """

    pytestmark = PROOF

    @pytest.mark.parametrize("group", range(GROUPS))
    def test_random_runs(self, group: int) -> None:
        """[PUB-1] [PUB-3] [PUB-6] [CRED-11] [BLOCK-12] [BLOCK-19] [CONN-6]."""
        for seed in range(group, SEEDS, GROUPS):
            setup = SETUPS[seed % len(SETUPS)]
            steps = make_steps(seed, STEPS, setup)
            if failure_of(steps, setup):
                replay = replay_of(steps, setup)
                pytest.fail(f"seed {seed}: {replay}", pytrace=False)

    @pytest.mark.parametrize("seed", range(4))
    def test_same_seed_same_log(self, seed: int) -> None:
        """Nothing but the steps decides what happens."""
        setup = SETUPS[seed]
        steps = make_steps(seed, STEPS, setup)
        logs = [run_steps(steps, setup).log for _ in range(2)]
        assert logs[0] == logs[1] and len(logs[0]) > 100
