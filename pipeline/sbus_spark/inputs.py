"""Inputs: errors, and what arguments mean.  It needs no library."""

from __future__ import annotations

import datetime
import os
from typing import NamedTuple

import sbus_client

UTC = datetime.timezone.utc
# A day from the ends of the calendar, so that zones and days can be added
FIRST = datetime.datetime(1, 1, 2, tzinfo=UTC)
LAST = datetime.datetime(9999, 1, 2, tzinfo=UTC)


class PipelineError(Exception):
    """The pipeline cannot do what it was asked for; the reason is one line."""


class InputError(PipelineError):
    """A file, folder, table or option is missing, or of another kind."""


class BusyError(PipelineError):
    """Another command has changed the table meanwhile: do it again."""


class Selection(NamedTuple):
    """Which messages of a table to read."""

    since: datetime.datetime = FIRST
    until: datetime.datetime = LAST  # the first moment after them
    hosts: tuple[str, ...] = ()  # empty: all
    patterns: tuple[str, ...] = ()  # empty: all; each code point is a byte


def absolute(path: str) -> str:
    """Return a path or address that means the same in other processes."""
    return path if "://" in path else os.path.abspath(path)


def printable(text: str) -> str:
    """Return text with escapes for what does not print."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def key_text(key: str) -> str:
    """Return text whose code points are bytes as a client prints it."""
    return sbus_client.printable(key.encode("latin-1", "backslashreplace"))


def positive(text: str) -> float:
    """Return a number above 0.  Raises: ValueError."""
    number = float(text)
    if not number > 0:
        raise ValueError(f"{text!r} is not above 0")
    return number


def day_ago(text: str) -> datetime.date:
    """Return the day so long ago, a day at least: 30d.  Raises: ValueError."""
    age = sbus_client.seconds(text)
    if not 86_400 <= age <= 700_000 * 86_400:
        raise ValueError(text)
    now = datetime.datetime.now(UTC)
    return (now - datetime.timedelta(seconds=age)).date()


def moment(text: str) -> datetime.datetime:
    """Return a time, in UTC unless it says otherwise.  Raises: ValueError."""
    time = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    time = time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
    return min(max(FIRST, time), LAST)


def moment_of(seconds: float) -> datetime.datetime:
    """Return a time, in seconds since 1970."""
    return datetime.datetime.fromtimestamp(seconds, UTC)


def utc_text(time: datetime.datetime) -> str:
    """Return a time as text, in UTC."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def nanoseconds(time: datetime.datetime) -> int:
    """Return a time as nanoseconds since 1970."""
    since = time - datetime.datetime(1970, 1, 1, tzinfo=UTC)
    return since // datetime.timedelta(microseconds=1) * 1_000
