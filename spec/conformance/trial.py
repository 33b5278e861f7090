"""The frame of a check: it starts a server and looks at what that does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from io import FileIO
from typing import Any, Callable, NamedTuple

from .conversation import Failure, Outcome, describe, note
from .server import ServerProcess
from .wire import Wire


class NotApplicable(Exception):
    """The server, or this machine, lacks what a check needs."""


class TooBusy(Exception):
    """What failed did so while the kit waited for a processor."""


class Check(NamedTuple):
    """A check of a server's process, and the rules that it shows."""

    name: str
    rules: tuple[str, ...]
    run: Callable[[Trial], None]
    fills: bool  # whether it fills what the kernel keeps for a client
    is_plain: bool  # it needs nothing but a server with its defaults


def check(
    *rules: str, fills: bool = False, is_plain: bool = False
) -> Callable[[Callable[[Trial], None]], Check]:
    """Make a check of the function below, under its name."""
    return lambda run: Check(
        run.__name__.replace("_", "-"), rules, run, fills, is_plain
    )


class Trial:
    """A check as it goes on: the server, its clients, and what was done."""

    user = 1001  # an ordinary one

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.said: list[str] = []
        self.cleanup = contextlib.ExitStack()  # what ends with the check

    def say(self, text: str) -> None:
        """Note what is done next."""
        note(self.said, text)

    def start(self, *options: str, path: str = "", **more: Any) -> None:
        """Start the server, after the end of the one before."""
        self.say(" ".join(["the server is started", *options]))
        self.server.start(path, *options, **more)

    def launch(self, path: str = "", *options: str, **more: Any) -> str:
        """Start the server; return what it writes before it is ready."""
        self.say(" ".join(["the server is started", path, *options]))
        output, end = self.pipe()
        self.server.launch(path, *options, stdout=end, **more)
        end.close()
        parts = iter(lambda: self.read(output), b"")
        return b"".join(parts).decode("latin-1")

    def send_signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        self.say(f"the server receives {number.name}")
        self.server.send_signal(number)

    def stop(self) -> None:
        """End the server by SIGTERM, with any exit status."""
        self.send_signal(signal.SIGTERM)
        self.server.await_status(self.server.start_seconds_max)

    def require_status(self, wanted: int) -> None:
        """Wait for the server's end, with this exit status."""
        status = self.server.await_status(self.server.start_seconds_max)
        require(status == wanted, f"it ends with status {status}")

    def require_service(self) -> None:
        """Raise Failure if the server no longer serves."""
        fault = self.server.fault()
        require(not fault, fault)

    def client(self, pattern: str = "", uid: int | None = None) -> Wire:
        """Return a new client, with a pattern or of a user if given."""
        if uid is not None and os.geteuid() != 0:
            raise NotApplicable("needs to be run by root")
        wire = self.server.connect(None if uid is None else {"uid": uid})
        self.cleanup.enter_context(contextlib.closing(wire))
        if pattern:
            tell(wire, b"SUB " + pattern.encode())
        return wire

    def stall(
        self, *packets: bytes, modes: tuple[bytes, ...] = ()
    ) -> tuple[Wire, Wire]:
        """Have packets wait for a reader of k; return it and a publisher."""
        reader, publisher = self.client("k"), self.client()
        for mode in modes:
            reader.send(b"CMSG " + mode)
        self.say("the kernel takes no more for a reader, and messages come")
        self.server.fill(reader)
        tell(publisher, *packets)
        return reader, publisher

    def pipe(self) -> tuple[FileIO, FileIO]:
        """Return both ends of a pipe."""
        reading, writing = os.pipe()
        ends = FileIO(reading, "r"), FileIO(writing, "w")
        for end in ends:
            self.cleanup.enter_context(end)
        return ends

    def read(self, pipe: FileIO) -> bytes:
        """Return the next bytes from a pipe, or none at its end."""
        seconds = self.server.start_seconds_max
        ready = select.select([pipe], [], [], seconds)[0]
        require(ready, "it neither writes to a pipe nor closes it")
        return pipe.read(1 << 16)

    def wait_until(
        self, condition: Callable[[], object], otherwise: str
    ) -> None:
        """Return once something is so.  Raises: Failure if it never is."""
        end = time.monotonic() + self.server.start_seconds_max
        while not condition():
            require(time.monotonic() < end, otherwise)
            time.sleep(0.005)  # no event tells of it

    def file(self, data: bytes) -> str:
        """Return the path of a new file."""
        path = self.server.new_path()
        with open(path, "wb") as file:
            file.write(data)
        return path


def require(condition: object, text: str, rule: str = "") -> None:
    """Raise Failure if something is not so; the rule is what it breaks."""
    if not condition:
        raise Failure(text, rule)


def tell(client: Wire, *packets: bytes) -> None:
    """Have a client send packets, and the server handle them."""
    for packet in packets:
        client.send(packet)
    client.settle()


def hear(client: Wire, *packets: bytes) -> None:
    """Have a client receive packets."""
    for packet in packets:
        got = client.receive()
        require(got == packet, f"received {describe(got)}")


def perform_check(check: Check, server: ServerProcess) -> Outcome:
    """Make a check; return what went wrong, and what was done."""
    server.stop()
    trial = Trial(server)
    try:
        with trial.cleanup:
            check.run(trial)
    except Failure as failure:
        sure = failure.rule, failure.is_sure
        return Outcome(str(failure), trial.said, *sure)
    except OSError as error:  # what it should have made is not there
        return Outcome(str(error), trial.said)
    return Outcome("", trial.said)
