"""The command `sbus`: those of sbus_client.py, and those of this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import sbus_client
from sbus_client import Command

MODULES = {  # where each command is, instead of in sbus_client.py
    "sub": "sub",
    "pub": "pub",
    "whoami": None,
    "ping": "ping",
    "request": None,
    "reply": None,
    "control": None,
    "stats": "stats",
    "record": "record",
    "top": "top",
    "bridge": "bridge",
    "completion": "completion",
}


def load(name: str) -> Command:
    """Return a command."""
    module = MODULES[name]
    if module is None:
        return sbus_client.COMMANDS[name]
    found = importlib.import_module(f".{module}", __package__)
    command: Command = getattr(found, name)
    return command


def all_commands() -> dict[str, Command]:
    """Return all commands by their names."""
    return {name: load(name) for name in MODULES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, as sbus_client.main.

    Where a command comes first, or behind an address, no other is loaded.
    """
    words = sys.argv[1:] if arguments is None else arguments
    has_address = words[:1] in (["-a"], ["--address"])
    name = "".join(words[2:3] if has_address else words[:1])
    commands = {name: load(name)} if name in MODULES else all_commands()
    return sbus_client.main(words, commands)
