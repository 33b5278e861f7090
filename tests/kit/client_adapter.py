#!/usr/bin/env python3
"""The adapter of our client for the kit; spec/README.md has its form.

python3 client_adapter.py [--async] [ADDRESS]
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
    key, payload = texts
    if command == "receive":
        received = bus.receive()
        last[:] = [received]
        is_control = isinstance(received, ControlMessage)
        kind = "control" if is_control else "ok"
        return [kind, *map(to_hex, received)]
    if command == "whoami":
        return ["ok", "-", to_hex(bus.whoami().path)]
    if command == "request":
        return ["ok", "-", to_hex(bus.request(key, payload))]
    if command == "reply":
        asked = parse_request(last[0])
        if asked is None:
            return ["error", "that is no request"]
        bus.reply(asked, payload)
    elif command == "publish":
        bus.publish(key, payload)
    else:
        getattr(bus, command)(key)
    return ["ok"]


def to_hex(text: bytes) -> str:
    """Return a text as it stands in a line."""
    return text.hex() or "-"


def from_hex(word: str) -> bytes:
    """Return the text that a word of a line stands for."""
    return bytes.fromhex(word.replace("-", ""))


def serve(
    commands: Iterable[str], address: str | None = None, kind: Any = Client
) -> None:
    """Connect, answer commands, each in a line, and close."""
    last: list[Any] = []
    with kind(address) as bus:
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
    is_async = "--async" in sys.argv
    addresses = [word for word in sys.argv[1:] if word != "--async"]
    address = addresses[0] if addresses else None
    serve(sys.stdin, address, Waiting if is_async else Client)
