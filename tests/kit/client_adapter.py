#!/usr/bin/env python3
"""The adapter of our client for the kit; spec/README.md has its form.

python3 client_adapter.py ADDRESS
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sbus_client import (  # noqa: E402
    Client,
    ControlMessage,
    Disconnected,
    SbusError,
)


def perform(bus: Client, command: str, *texts: bytes) -> list[str]:
    """Do what a command says; return the words of the answer."""
    if command == "receive":
        received = bus.receive()
        is_control = isinstance(received, ControlMessage)
        kind = "control" if is_control else "message"
        return [kind, *map(to_hex, received)]
    if command == "whoami":
        return ["credentials", to_hex(bus.whoami().path)]
    getattr(bus, command)(*texts)
    return ["ok"]


def to_hex(text: bytes) -> str:
    """Return a text as it stands in a line."""
    return text.hex() or "-"


def from_hex(word: str) -> bytes:
    """Return the text that a word of a line stands for."""
    return bytes.fromhex(word.replace("-", ""))


def serve(address: str, commands: Iterable[str]) -> None:
    """Connect, and answer commands, each in a line."""
    with Client(address or None) as bus:
        for line in commands:
            command, *words = line.split()
            try:
                answer = perform(bus, command, *map(from_hex, words))
            except Disconnected:
                answer = ["closed"]
            except SbusError as error:
                answer = ["error", str(error)]
            print(*answer, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin)
