"""Inputs: errors, and what texts of arguments mean; it needs no library."""

from __future__ import annotations

import datetime
import os
import re
from typing import NamedTuple

UTC = datetime.timezone.utc
FIRST, LAST = (datetime.datetime(y, 1, 2, tzinfo=UTC) for y in (1, 9999))
UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


class PipelineError(Exception):
    """What the pipeline raises, with a reason of one line."""


class InputError(PipelineError):
    """What was given is not there, or is not what it should be."""


class Selection(NamedTuple):
    """Which messages of a table are wanted."""

    since: datetime.datetime = FIRST
    until: datetime.datetime = LAST  # the first moment after them
    hosts: tuple[str, ...] = ()  # none of them: all
    patterns: tuple[str, ...] = ()  # the same; each code point is a byte


def absolute(path: str) -> str:
    """Return a path or address that means the same in other processes."""
    return path if "://" in path else os.path.abspath(path)


def printable(text: str) -> str:
    """Return text with escapes for what does not print."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def key_text(key: str) -> str:
    """Return a key, whose code points are bytes, as the text in UTF-8."""
    octets = key.encode("latin-1", "backslashreplace")
    return octets.decode("utf-8", "backslashreplace")


def positive(text: str) -> float:
    """Return a number above 0.  Raises: ValueError."""
    number = float(text)
    if not number > 0:
        raise ValueError(f"{text!r} is not above 0")
    return number


def seconds(text: str) -> float:
    """Return a length of time: 90, 90s, 15m, 1h, 30d.  Raises: ValueError."""
    match = re.fullmatch(r"(.*?)([smhd]?)", text)
    assert match
    return positive(match[1]) * UNITS[match[2]]


def days(text: str) -> float:
    """Return a length of time of a day at least: 30d.  Raises: ValueError."""
    length = seconds(text)
    if not UNITS["d"] <= length <= 700_000 * UNITS["d"]:
        raise ValueError(text)
    return length


def moment(text: str) -> datetime.datetime:
    """Return a time, in UTC unless it says otherwise.  Raises: ValueError."""
    time = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    time = time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
    return sorted((FIRST, time, LAST))[1]


def nanoseconds(time: datetime.datetime) -> int:
    """Return a time as nanoseconds since 1970."""
    since = time - datetime.datetime(1970, 1, 1, tzinfo=UTC)
    return since // datetime.timedelta(microseconds=1) * 1_000
