"""Inputs: what the command line checks before any library is needed."""

from __future__ import annotations

import os


class PipelineError(Exception):
    """The base of all errors that this package raises on purpose."""


class InputError(PipelineError):
    """Something to be read is missing, or is something else."""


def absolute(path: str) -> str:
    """Return where something is, whatever folder a process runs in."""
    return path if "://" in path else os.path.abspath(path)


def printable(text: str) -> str:
    """Return text with escapes for what does not print."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def positive(text: str) -> float:
    """Return a number above 0.  Raises: ValueError."""
    if not float(text) > 0:
        raise ValueError(f"{text!r} is not above 0")
    return float(text)
