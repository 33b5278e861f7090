"""The rules and the examples of the specification, read once for all tests."""

from __future__ import annotations

import pytest

from conformance.examples import PARSERS, Block, Case, read_blocks, read_cases
from conformance.rules import read_rules

RULES = read_rules()
CASES = read_cases()
BLOCKS = [block for block in read_blocks() if block.kind in PARSERS]


def cases_of(block: Block) -> list[Case]:
    """Return the cases of a block."""
    return list(PARSERS[block.kind](block))


each_block = pytest.mark.parametrize(
    "block", BLOCKS, ids=[block.name for block in BLOCKS]
)
