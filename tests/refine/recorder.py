"""A kernel that writes down each call of the server, and lets some fail."""

from __future__ import annotations

import copyreg
import errno
import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sbus
from conformance.examples import escape
from fake_kernel import FakeKernel, FakeListener, FakeSelector, FakeWire

SELECTS_MAX = 1_000  # calls in a row, while the server stops


@dataclass
class Call:
    """A call of the kernel, or a step of a turn between two calls."""

    name: str
    subject: Any  # the socket or the selector
    arguments: tuple[Any, ...]
    result: Any = None
    error: int = 0
    now: float = 0.0  # when it was over

    def __str__(self) -> str:
        error = errno.errorcode.get(self.error, "")
        words = [self.name, getattr(self.subject, "name", ""), error]
        words += [escape(a) for a in self.arguments if isinstance(a, bytes)]
        return " ".join(filter(None, words))


def recorded(method: Any) -> Any:
    """Return a method whose calls are written down, and fail if it is due."""

    def record(self: Any, *arguments: Any) -> Any:
        if method.__name__ == "send":  # what is in a view changes
            arguments = (bytes(arguments[0]),)
        call = self.kernel.note(method.__name__, self, *arguments)
        try:
            self.kernel.may_fail(call.name)
            call.result = method(self, *arguments)
            return call.result
        except OSError as error:
            call.error = error.errno
            raise
        finally:
            self.kernel.now += self.kernel.seconds
            call.now = self.kernel.now

    return record


class Wire(FakeWire):
    """A client's socket."""

    recv_into = recorded(FakeWire.recv_into)
    recvmsg = recorded(FakeWire.recvmsg)
    send = recorded(FakeWire.send)
    shutdown = recorded(FakeWire.shutdown)
    close = recorded(FakeWire.close)


class Listener(FakeListener):
    """The listening socket."""

    accept = recorded(FakeListener.accept)


class Selector(FakeSelector):
    """A selector that may have no room, and that nobody asks for ever."""

    register = recorded(FakeSelector.register)

    def select(self, timeout: float) -> list[Any]:
        assert len(self.timeouts) < SELECTS_MAX, "the server spins"
        return super().select(timeout)


class Pending(list[sbus.Client]):
    """The receivers of a turn: notes when each is handed its outbox."""

    kernel: RecordingKernel

    def __iter__(self) -> Iterator[sbus.Client]:
        for client in super().__iter__():
            packets = map(bytes, client.outbox)
            self.kernel.note("deliver", client.wire, *packets)
            yield client

    def clear(self) -> None:
        super().clear()
        self.kernel.note("end_turn", None)


class Ledger:
    """Stands for sbus.Journal: counts the copies that have no end yet."""

    copies = 0

    def note(self, event: str, rule: str, client: Any, **facts: Any) -> None:
        if event == "msg":
            self.copies += facts["receivers"]
        elif event in ("send", "drop") and hasattr(facts["packet"], "number"):
            self.copies -= 1  # of a message, and not an answer

    def flush(self) -> None:
        """Write nothing."""


class RecordingKernel(FakeKernel):
    """A server on sockets whose calls are written down."""

    wire_kind: Any = Wire
    listener_kind = Listener
    selector_kind = Selector

    def __init__(self, *words: str) -> None:
        self.calls: list[Call] = []
        self.count = 0  # of calls that may fail
        self.seconds = 0.0  # that a call takes
        self.round_time = 0.0  # when the last round ended
        # By the name of a call, or "any": errors to come, or "" for none
        self.errors: defaultdict[str, deque[str]] = defaultdict(deque)
        super().__init__(*words)
        self.bus.pending = Pending()
        for part in (self.listener, self.bus.pending):
            vars(part)["kernel"] = self

    def note(self, name: str, subject: Any, *arguments: Any) -> Call:
        """Write a call down, and return it."""
        self.calls.append(Call(name, subject, arguments, now=self.now))
        return self.calls[-1]

    def may_fail(self, name: str) -> None:
        """Raise an error if one is due; to close a socket never fails."""
        if name == "close":
            return
        self.count += 1
        for errors in (self.errors["any"], self.errors[name]):
            if error := errors.popleft() if errors else "":
                raise OSError(getattr(errno, error), "a fault")


# ---- Copies by pickle, which knows no view, and will not know what counts


def buffer(size: int) -> memoryview:
    """Return a buffer; what was in it must not matter."""
    return memoryview(bytearray(size))


def reduce_counter(numbers: Any) -> tuple[Any, ...]:
    """Return how to copy what counts."""
    return itertools.count, tuple(map(int, re.findall(r"-?\d+", str(numbers))))


copyreg.pickle(memoryview, lambda view: (buffer, (len(view),)))
copyreg.pickle(itertools.count, reduce_counter)
