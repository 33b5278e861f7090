"""The command `sbus`: those of sbus_client.py, and those of this package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence

import sbus_client
from sbus_client import Command

MODULES = {  # where each command is: None is sbus_client.py
    "sub": "sub",
    "pub": "pub",
    "whoami": None,
    "ping": None,
    "request": "request",
    "reply": "request",
    "control": None,
    "stats": "stats",
    "record": "record",
    "top": "top",
    "bridge": "bridge",
    "completion": "completion",
}


class Commands(Mapping[str, Command]):
    """All commands by their names; a module is loaded when it is used."""

    def __getitem__(self, name: str) -> Command:
        module = MODULES[name]
        if module is None:
            return sbus_client.COMMANDS[name]
        found = importlib.import_module(f".{module}", __package__)
        command: Command = getattr(found, name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


COMMANDS = Commands()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, as sbus_client.main."""
    return sbus_client.main(arguments, COMMANDS)
