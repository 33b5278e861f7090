"""A check of a server's process as it goes on, and the list of all."""

from __future__ import annotations

import contextlib
from typing import Callable, NamedTuple

from .conversation import Failure, describe
from .server import ServerProcess
from .wire import Wire


class NotApplicable(Exception):
    """The server, or this machine, has not what a check is about."""


class Trial:
    """A check as it goes on: the server, its clients, and what was done."""

    def __init__(
        self, server: ServerProcess, options: tuple[str, ...]
    ) -> None:
        self.server = server
        self.options = options
        self.said: list[str] = []
        self._clients = contextlib.ExitStack()

    def say(self, text: str) -> None:
        """Note what is done next."""
        self.said.append(text)

    def client(self, pattern: str = "") -> Wire:
        """Return a new client that has subscribed to a pattern, if given."""
        wire = self.server.connect(False, {})
        self._clients.enter_context(contextlib.closing(wire))
        if pattern:
            wire.send(b"SUB " + pattern.encode())
            wire.settle()
        return wire

    def close(self) -> None:
        """Close the clients."""
        self._clients.close()


class Check(NamedTuple):
    """A check, the rules that it shows, and the options it needs."""

    name: str
    rules: tuple[str, ...]
    run: Callable[[Trial], None]
    options: tuple[str, ...]  # of the server
    fills: bool  # whether the kernel is to take no more for a client


CHECKS: list[Check] = []


def check(
    *rules: str, options: str = "", fills: bool = False
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Have a check of the function below, under its name."""

    def add(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = run.__name__.replace("_", "-")
        CHECKS.append(Check(name, rules, run, tuple(options.split()), fills))
        return run

    return add


def require(condition: object, what: str) -> None:
    """Raise Failure if something is not so."""
    if not condition:
        raise Failure(what)


def hear(client: Wire, packet: bytes) -> None:
    """Have a client receive a packet."""
    got = client.receive()
    require(got == packet, f"received {describe(got)}")


def perform_check(
    check: Check, server: ServerProcess
) -> tuple[str, list[str]]:
    """Make a check; return what went wrong, and what was done.

    Raises: NotApplicable if it cannot be made.
    """
    trial = Trial(server, check.options)
    try:
        with contextlib.closing(trial):
            check.run(trial)
    except Failure as failure:
        log = server.log()
        return str(failure).replace(log, "") + log, trial.said
    return "", trial.said
