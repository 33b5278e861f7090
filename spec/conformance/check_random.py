"""Conversations at random, whose end the model knows before."""

from __future__ import annotations

from typing import Any

from .conversation import Failure
from .trial import TooBusy, Trial, check

SEED = "1"
CONVERSATIONS = 60
WITH_OPTIONS = 33  # three of each


def walk(trial: Trial, count: int, *choices: dict[str, Any]) -> None:
    """Hold so many conversations with a server that has one of the options.

    Raises: Failure at the first that goes wrong; TooBusy if one may have
    """
    # It reads the model, which a program that lists the checks need not have
    from .random_walk import Walk

    walk = Walk(trial.server, SEED, choices)
    for failure in walk.failures(count=count):
        trial.said[:] = failure.lines
        rules = " ".join(f"[{rule}]" for rule in failure.rules)
        mistake = f"{failure.wrong}; the model decided by {rules}"
        raise Failure(mistake, failure.rules[0], is_sure=True)
    if walk.delayed:
        raise TooBusy


@check("PUB-1", "BLOCK-13", fills=True, is_plain=True)
def random_conversations(trial: Trial) -> None:
    walk(trial, CONVERSATIONS, {})


@check("PUB-1", "LIMIT-12", fills=True)
def random_conversations_with_options(trial: Trial) -> None:
    from .random_walk import OPTIONS

    walk(trial, WITH_OPTIONS, *filter(None, OPTIONS))
