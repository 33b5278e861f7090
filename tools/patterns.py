"""The option of the commands that choose keys, and have other arguments."""

from __future__ import annotations

from sbus_client import argument

PATTERN_OPTION = argument(
    "--pattern",
    metavar="PATTERN",
    action="append",
    default=[],
    help="the keys to choose, as for sub; may be repeated; all by default",
)
