#!/usr/bin/env python3
"""The adapter of our client for the kit; spec/README.md has its form.

python3 client_adapter.py ADDRESS [async]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sbus_client import (  # noqa: E402
    AsyncClient,
    Client,
    ControlMessage,
    Disconnected,
    SbusError,
    parse_request,
)


class Waiting:
    """A client for asyncio, whose calls are waited for."""

    def __init__(self, address: str | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._bus = AsyncClient(address)

    def __getattr__(self, name: str) -> Any:
        def call(*texts: bytes) -> Any:
            result = getattr(self._bus, name)(*texts)
            is_over = name == "close"
            return result if is_over else self._loop.run_until_complete(result)

        return call

    def __enter__(self) -> Waiting:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def perform(
    bus: Client | Waiting, last: list[Any], command: str, *texts: bytes
) -> list[str]:
    """Do what a command says; return the words of the answer.

    *last* has what was received last, to which a reply is.
    """
    if command == "receive":
        received = bus.receive()
        last[:] = [received]
        is_control = isinstance(received, ControlMessage)
        kind = "control" if is_control else "message"
        return [kind, *map(to_hex, received)]
    if command == "whoami":
        return ["credentials", to_hex(bus.whoami().path)]
    if command == "request":
        key, question = texts
        return ["answer", to_hex(bus.request(key, question))]
    if command == "reply":
        asked = parse_request(last[0])
        if asked is None:
            return ["error", "that is no request"]
        (answer,) = texts
        bus.reply(asked, answer)
        return ["ok"]
    getattr(bus, command)(*texts)
    return ["ok"]


def to_hex(text: bytes) -> str:
    """Return a text as it stands in a line."""
    return text.hex() or "-"


def from_hex(word: str) -> bytes:
    """Return the text that a word of a line stands for."""
    return bytes.fromhex(word.replace("-", ""))


def serve(address: str, commands: Iterable[str], kind: Any = Client) -> None:
    """Connect, and answer commands, each in a line."""
    last: list[Any] = []
    with kind(address or None) as bus:
        for line in commands:
            command, *words = line.split()
            try:
                answer = perform(bus, last, command, *map(from_hex, words))
            except Disconnected:
                answer = ["closed"]
            except SbusError as error:
                answer = ["error", str(error)]
            print(*answer, flush=True)


if __name__ == "__main__":
    kind = Waiting if "async" in sys.argv[2:] else Client
    serve(sys.argv[1], sys.stdin, kind)
