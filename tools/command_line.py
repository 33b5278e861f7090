"""The command `sbus`: finds the requested command, and runs it.

exit status: 0, or 1 for an error of the bus, 2 for a wrong command line,
130 if interrupted.  SBUS_ADDRESS in the environment is the default of -a,
and SBUS_MAX_PACKET is the largest packet in bytes (409600).

example:
  sbus sub 'sensors/*/temp' & sbus pub sensors/1/temp 21.5
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import sbus_client
from sbus_client import AddressError, PacketError, SbusError

from . import shared

SERVICES = ["link", "queue", "work", "jobs"]  # in the package services/
COMMANDS = [
    *("sub", "pub", "request", "reply", "whoami"),
    *("stats", "clients", "top", "record", "keep", "bridge"),
    *(*SERVICES, "load", "completion", "help"),
]
# Where a command is, if that is not its name
FILES = {"reply": "request", "whoami": "stats", "clients": "stats"}
FILES |= {"queue": "work", "jobs": "work", "help": "command_line"}
ABOUT = __doc__ or sbus_client.docstring(__file__)
RULES = f"{os.path.dirname(__file__)}/rules.txt"  # a line for each


def all_commands(names: Sequence[str] = COMMANDS) -> dict[str, shared.Command]:
    """Return commands by their names."""
    commands = {}
    for name in names:
        package = __package__
        if name in SERVICES:  # it is sbus_services beside sbus_tools
            package = package.replace("tools", "services")
        module = importlib.import_module(f"{package}.{FILES.get(name, name)}")
        commands[name] = getattr(module, name)
    return commands


def command_of(words: Sequence[str]) -> str:
    """Return the first word that is no option, and no option's value."""
    for before, word in zip(["", *words], words):
        # An equals sign is a word of its own to the completion of bash
        if word[:1] not in "-=" and before not in ("-a", "--address", "="):
            return word
    return ""


@shared.command(
    "help sub",
    shared.argument("topic", "a command, or a rule: BLOCK-16", nargs="?"),
    has_address=False,
)
def help(options: shared.Options) -> None:
    """Print what a command does, and its options; or a rule's sentence."""
    parser, parsers = shared.option_parsers(all_commands(), ABOUT)
    if not options.topic or options.topic in parsers:
        parsers.get(options.topic, parser).print_help()
        return
    name = options.topic.strip("[]").upper()
    with open(RULES, "rb") as rules:
        for line in rules:
            if line.startswith(os.fsencode(f"{name} ")):
                return shared.write(line)
    raise shared.UsageError(f"no command or rule is {options.topic!r}")


def parsed(words: list[str]) -> tuple[shared.OptionParser, shared.Options]:
    """Return the parser that a command line is for, and its options.

    Only the command that is asked for is loaded.
    """
    name = command_of(words)
    known = [name] if name in COMMANDS else COMMANDS
    parser, parsers = shared.option_parsers(all_commands(known), ABOUT)
    if name in COMMANDS:
        words.remove(name)
        return parsers[name], parsers[name].parse(words)
    if name:
        hint = shared.suggestion(name, COMMANDS)
        parser.error(f"there is no command {name!r}{hint}")
    parser.parse_args(words)
    parser.error("the following arguments are required: COMMAND")


def run(interrupt: Any) -> int:
    """Run the command line; return the exit status.

    A command begins with *interrupt* as the handler of SIGINT, but options are
    parsed without it, as argparse turns KeyboardInterrupt into another error.
    0 is success, 1 an error of the bus, 2 of usage, 130 an interruption.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        if not sys.stdout:
            raise SbusError("standard output is closed")
        parser, options = parsed(sys.argv[1:])
        shared.remarks_are_wanted = not hasattr(options, "quiet")
        signal.signal(signal.SIGINT, interrupt)
        try:
            options.run(options)
        except (shared.UsageError, AddressError, PacketError) as error:
            if str(error).startswith("the server sent"):  # and not the user
                raise
            parser.error(str(error))
        return 0
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        shared.complain(sbus_client.NO_MODULE.format(error.name))
        return 1
    except (SbusError, OSError, RuntimeError) as error:  # or no more threads
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            shared.complain(error)
        sbus_client.discard_output(1)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)  # until Python has ended
