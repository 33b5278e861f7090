"""A kernel that writes down each call of the server, and lets some fail."""

from __future__ import annotations

import copyreg
import errno
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sbus
from fake_kernel import FakeKernel, FakeListener, FakeSelector, FakeWire

SELECTS_MAX = 1_000  # calls in a row, while the server stops


class Differs(Exception):
    """The server does what the model does not."""


def require(condition: object, text: str) -> None:
    """Raise Differs if something is not so."""
    if not condition:
        raise Differs(text)


def require_equal(name: str, ours: object, theirs: object) -> None:
    """Raise Differs if the server has not what it should."""
    if ours != theirs:
        raise Differs(f"{name}: {ours}, not {theirs}")


@dataclass
class Call:
    """A call of the kernel, or a step of a turn between two calls."""

    name: str
    wire: Any  # whose it is
    packets: tuple[bytes, ...] = ()
    error: int = 0
    now: float = 0.0  # when it was over


@dataclass
class Fault:
    """An error of the kernel that is to come."""

    name: str  # of the call, or "any"
    calls: int  # of this name that come before
    error: str
    times: int  # that it comes

    def is_due(self, name: str) -> bool:
        """Return whether a call is to fail, and count it."""
        if self.name not in ("any", name):
            return False
        self.calls -= 1
        return -self.times <= self.calls < 0


class Wire(FakeWire):
    """A client's socket."""


class Listener(FakeListener):
    """A listening socket."""


class Selector(FakeSelector):
    """Reports events in one order, or in the other."""

    is_reversed = False

    def select(self, timeout: float) -> list[Any]:
        require(len(self.timeouts) < SELECTS_MAX, "CONN-21: it spins")
        return super().select(timeout)

    def ready(self) -> list[Any]:
        return super().ready()[:: -1 if self.is_reversed else 1]


class Pending(list[sbus.Client]):
    """The receivers of a turn: notes when each is handed its outbox."""

    def __init__(self, kernel: RecordingKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def __iter__(self) -> Iterator[sbus.Client]:
        for client in super().__iter__():
            packets = map(bytes, client.outbox)
            self.kernel.note("deliver", client.wire, *packets)
            yield client
        self.kernel.note("end_turn", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy it: between turns it is empty."""
        return Pending, (self.kernel,)


class Ledger:
    """Stands for sbus.Journal: counts the copies of messages."""

    def __init__(self) -> None:
        self.messages = 0
        self.copies = 0  # that have no end yet

    def note(
        self, event: str, rule: str, who: sbus.Client, **facts: Any
    ) -> None:
        if event == "msg":
            self.messages += 1
            self.copies += facts["receivers"]
            require(facts["m"] == self.messages, "TRACE-1: not the next one")
        elif event in ("send", "drop") and hasattr(facts["packet"], "number"):
            self.copies -= 1  # of a message, and not an answer

    def flush(self) -> None:
        """Write nothing."""


class RecordingKernel(FakeKernel):
    """A server on sockets whose calls are written down."""

    wire_kind = Wire
    listener_kind = Listener
    selector_kind = Selector

    def __init__(self, *words: str) -> None:
        self.calls: list[Call] = []
        self.count = 0  # of calls that may fail
        self.faults: list[Fault] = []
        super().__init__(*words)
        vars(self.listener)["kernel"] = self
        self.bus.pending = Pending(self)

    def note(self, name: str, wire: Any, *packets: bytes) -> Call:
        """Write a call down, and return it."""
        self.calls.append(Call(name, wire, packets, now=self.now))
        return self.calls[-1]

    def may_fail(self, name: str) -> None:
        """Raise an error if one is due."""
        self.count += 1
        due = [fault for fault in self.faults if fault.is_due(name)]
        if due:
            raise OSError(getattr(errno, due[0].error), "a fault")


def record(kind: Any, name: str) -> None:
    """Have a method of a kind write down each call."""
    method = getattr(kind, name)

    def recorded(self: Any, *arguments: Any) -> Any:
        call = self.kernel.note(name, *subject(name, self, arguments))
        try:
            if name not in ("shutdown", "close"):
                self.kernel.may_fail(name)
            return method(self, *arguments)
        except OSError as error:
            call.error = error.errno
            raise
        finally:
            call.now = self.kernel.now

    setattr(kind, name, recorded)


def subject(name: str, target: Any, arguments: Any) -> list[Any]:
    """Return whose a call is, and the packets that it is about."""
    if name == "recv_into":
        return [target, *itertools.islice(target.incoming, 1)]
    if name == "send":
        return [target, bytes(arguments[0])]
    if name == "accept":
        newcomer = next(iter(target.waiting), None)
        return [newcomer, *(newcomer.incoming if newcomer else ())]
    return [arguments[0] if name == "register" else target]


for name in ("recv_into", "recvmsg", "send", "shutdown", "close"):
    record(Wire, name)
record(Listener, "accept")
record(Selector, "register")


# ---- Copies by pickle, which knows no view, and will not know what counts


def buffer(size: int) -> memoryview:
    """Return a buffer; what was in it must not matter."""
    return memoryview(bytearray(size))


def reduce_counter(numbers: Any) -> tuple[Any, ...]:
    """Return how to copy what counts."""
    return itertools.count, tuple(map(int, re.findall(r"-?\d+", str(numbers))))


copyreg.pickle(memoryview, lambda view: (buffer, (len(view),)))
copyreg.pickle(itertools.count, reduce_counter)
