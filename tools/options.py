"""Options that some of these commands share."""

from __future__ import annotations

from typing import Any

from sbus_client import Argument, amount_of, argument, count_of

PATTERN_OPTION = argument(
    "--pattern",
    metavar="PATTERN",
    action="append",
    default=[],
    help="the keys to choose, as for sub; may be repeated; all by default",
)


def number(name: str, help: str, **options: Any) -> Argument:
    """Return an option with a count from 1."""
    return argument(name, metavar="N", type=count_of, help=help, **options)


def amount(name: str, metavar: str, help: str, **options: Any) -> Argument:
    """Return an option with a positive number."""
    options.update(metavar=metavar, type=amount_of, help=help)
    return argument(name, **options)
