"""What the model of the specification says of keys and patterns."""

from __future__ import annotations

import functools

import model
import sbus
from model import CHOICES

MODES = [f"{mode}/{way}" for mode, ways in CHOICES.items() for way in ways]

selects = model.selects
may_hear = functools.lru_cache(100_000)(model.may_hear)


def is_reserved(text: bytes) -> bool:
    """Return whether a key or pattern misuses the segment '!' [KEY-4]."""
    try:
        model.check_reserved(text)
    except model.Mistake:
        return True
    return False


@functools.lru_cache(100_000)
def may_use(
    pattern: bytes,
    own: sbus.Credentials,
    prefix: bytes = b"",
    is_privileged: bool = False,
) -> bool:
    """Return whether a client may subscribe to a pattern."""
    client = model.Client(0, model.Credentials(*own), is_privileged)
    try:
        model.check_pattern(model.Bus(cred_prefix=prefix), client, pattern)
    except model.Mistake:
        return False
    return True
