"""The command `sbus`: those of sbus_client.py, and those of this package."""

from __future__ import annotations

from collections.abc import Sequence

import sbus_client

from . import bridge, completion, record, top

COMMANDS = (
    *sbus_client.COMMANDS,
    *(each.COMMAND for each in (record, top, bridge, completion)),
)


def option_parsers() -> tuple[
    sbus_client.OptionParser, dict[str, sbus_client.OptionParser]
]:
    """Return the parser of the command line, and those of the commands."""
    return sbus_client.option_parsers(COMMANDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, as sbus_client.main."""
    return sbus_client.main(arguments, COMMANDS)
