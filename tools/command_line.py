"""The command `sbus`: finds the requested command, and runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sbus_client import SbusError, discard_output

from . import shared

COMMANDS = [
    *("sub", "pub", "request", "reply", "whoami", "ping", "control"),
    *("stats", "clients", "top", "record", "bridge", "load"),
    *("completion", "help"),
]
FILES = {  # where a command is, if that is not its name
    "reply": "request",
    "whoami": "control",
    "ping": "control",
    "clients": "stats",
    "help": "command_line",
}


def all_commands(names: Sequence[str] = COMMANDS) -> dict[str, shared.Command]:
    """Return commands by their names."""
    found = {}
    for name in names:
        file = f".{FILES.get(name, name)}"
        found[name] = getattr(importlib.import_module(file, __package__), name)
    return found


def command_of(words: Sequence[str]) -> str:
    """Return the first word that is no option, and no option's value."""
    before = ""
    for word in words:
        # An equals sign is a word of its own to the completion of bash
        if word[:1] not in "-=" and before not in ("-a", "--address", "="):
            return word
        before = word
    return ""


@shared.command(
    "help sub",
    shared.argument(
        "topic",
        "default: all",
        metavar="COMMAND",
        nargs="?",
        choices=COMMANDS,
    ),
    has_address=False,
)
def help(options: shared.Options) -> None:
    """Print what a command does, and its options."""
    parser, parsers = shared.option_parsers(all_commands())
    parsers.get(options.topic, parser).print_help()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0 is success, 1 an error of the bus, 2 of usage, 130 an interruption.
    Only the command that is asked for is loaded.
    """
    words = sys.argv[1:] if arguments is None else arguments
    name = command_of(words)
    known = [name] if name in COMMANDS else COMMANDS
    parser, _ = shared.option_parsers(all_commands(known))
    try:
        if not (sys.stdin and sys.stdout):
            raise SbusError("standard input or output is closed")
        options = parser.parse_args(words)
        shared.remarks_are_wanted = not hasattr(options, "quiet")
        options.run(options)
        return 0
    except shared.UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except (SbusError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            shared.complain(error)
        discard_output(1)
        return 1
