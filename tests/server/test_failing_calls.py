"""Tests that each call to the kernel may fail, in turn, with each error."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from typing import Any, Callable, NamedTuple, Union

import pytest

import sbus
from fake_kernel import (
    OWNER,
    ROUNDS_MAX,
    FakeKernel,
    FakeListener,
    FakePeer,
    FakeSelector,
    FakeWire,
)
from packets import WHOAMI, publish
from sizes import PROOF, either

Error = Union[OSError, MemoryError]
Call = tuple[object, str]  # whose, which

ERRORS: list[Error] = [
    *(
        OSError(number, os.strerror(number))
        for number in (
            errno.EAGAIN,
            errno.EINTR,
            errno.EPIPE,
            errno.ECONNRESET,
            errno.ENOBUFS,
            errno.ENOMEM,
            errno.EMFILE,
            errno.ENFILE,
            errno.ECONNABORTED,
            errno.EMSGSIZE,
            errno.EACCES,
            errno.EIO,
        )
    ),
    MemoryError(),
]
WIRE_CALLS = ["recv_into", "send", "getsockopt", "setsockopt"]
WIRE_CALLS += ["setblocking", "shutdown", "close"]
SELECTOR_CALLS = ["select", "register", "modify", "unregister"]
LASTING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PASSING = {  # errors that leave a socket as good as before
    "recv_into": (errno.EAGAIN, errno.ECONNRESET),
    "send": (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM),
}


class Gremlin:
    """Counts calls to the kernel, and has one fail, or it and its like."""

    def __init__(self, number: int, error: Error, times: int) -> None:
        self.number = number  # of the call that fails, from 0
        self.error = error
        self.times = times  # that it is still to fail
        self.calls: list[Call] = []
        self.target: Call | None = None
        self.is_armed = False

    def passes(self, whose: object, name: str) -> None:
        """Note a call; raise the error if its time has come."""
        if not self.is_armed:
            return
        call = (whose, name)
        if len(self.calls) == self.number:
            self.target = call
        self.calls.append(call)
        if call == self.target and self.times:
            self.times -= 1
            raise self.error


def shaky(base: type, *names: str) -> Any:
    """Return a kind of fake whose named methods may fail.

    As with those of Python, a failing close has closed, a failing unregister
    or modify has unregistered, unregister raises no OSError, and select
    returns nothing when it is interrupted.
    """

    def method(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        def call(self: Any, *arguments: Any) -> Any:
            try:
                self.gremlin.passes(self, name)
            except (OSError, MemoryError) as error:
                if name == "close":
                    original(self)
                elif name in ("unregister", "modify"):
                    self.keys.pop(arguments[0], None)
                if isinstance(error, OSError) and name == "unregister":
                    return None
                if isinstance(error, InterruptedError) and name == "select":
                    return []
                raise
            return original(self, *arguments)

        return call

    return type(base.__name__, (base,), {name: method(name) for name in names})


ShakyWire = shaky(FakeWire, *WIRE_CALLS)
ShakyListener = shaky(FakeListener, "accept", "close")
ShakySelector = shaky(FakeSelector, *SELECTOR_CALLS)


class ShakyKernel(FakeKernel):
    """A server on fake sockets that fail when a gremlin says so."""

    def __init__(self, gremlin: Gremlin) -> None:
        limits = sbus.Limits(max_backlog=600, max_packet=30_000)
        super().__init__(limits, OWNER)
        self.gremlin = gremlin
        self.wires: list[FakeWire] = []
        self.start(ShakyListener())

    def start(self, listener: FakeListener) -> None:
        """Start a server on a listener."""
        self.listener = listener
        self.selector = ShakySelector()
        shaken: Any
        for shaken in (self.listener, self.selector):
            shaken.gremlin = self.gremlin
        self.bus = sbus.Bus(self.bus.limits, OWNER)
        self.server = sbus.Server(
            self.bus,
            self.listener,
            self.selector,
            self.clock,
            processor_clock=lambda: self.now,
        )

    def clock(self) -> float:
        """Return the time, which goes on as it is asked for."""
        self.now += 1e-3
        return self.now

    def knock(self, uid: int = 1000) -> FakePeer:
        """Have a client wait for being accepted."""
        number = next(self.numbers)
        credentials = sbus.Credentials(100, uid, 4000 + number)
        wire = ShakyWire(number, credentials)
        wire.gremlin = self.gremlin
        self.wires.append(wire)
        self.listener.waiting.append(wire)
        return FakePeer(self, wire)

    def connect(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Connect a client."""
        peer = self.knock(uid)
        self.run()
        return peer

    def run(self) -> None:
        """Let the server work until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            self.server.round(0)
            if not FakeSelector.select(self.selector):
                return
        raise AssertionError("the server spins")


def start(kernel: ShakyKernel) -> None:
    """A server starts, and may fail to."""
    with contextlib.suppress(OSError, MemoryError):
        kernel.start(ShakyListener())


def accept(kernel: ShakyKernel) -> None:
    """Three clients wait."""
    for _ in range(3):
        kernel.knock()
    kernel.run()


def subscribe(kernel: ShakyKernel) -> None:
    """A client subscribes and unsubscribes."""
    kernel.connect().send(b"SUB x", b"SUB y/*", b"UNSUB x", b"SUB !/cred////")


def publish_to_three(kernel: ShakyKernel) -> None:
    """A client publishes small and large packets to three."""
    peers = [kernel.connect() for _ in range(3)]
    for peer in peers:
        peer.send(b"SUB x")
    peers[0].send(publish(b"x", b"1"), publish(b"x", bytes(20_000)))


def ask(kernel: ShakyKernel) -> None:
    """A client asks who it is."""
    kernel.connect().send(WHOAMI, WHOAMI)


def queue_and_drain(kernel: ShakyKernel) -> None:
    """A client is stalled, and reads again."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"SUB x")
    reader.wire.room = 1
    writer.send(*[publish(b"x")] * 3)
    for _ in range(3):
        reader.read(min(1, len(reader.wire.taken)))


def block(kernel: ShakyKernel) -> None:
    """A publisher is paused, and goes on."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"CMSG blocking/soft/block", b"SUB x")
    reader.wire.room = 1
    writer.send(*[publish(b"x")] * 3)
    writer.send(publish(b"x"))
    reader.read_all()
    reader.wire.room = 0
    writer.send(publish(b"x"), publish(b"x"))
    kernel.wait(5)


def hard_error(kernel: ShakyKernel) -> None:
    """A stalled client is disconnected, and heard out."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"CMSG blocking/hard/error", b"SUB x")
    reader.wire.room = 0
    reader.wire.incoming.extend([publish(b"y")] * 3)
    writer.send(*[publish(b"x")] * 6)


def close(kernel: ShakyKernel) -> None:
    """Clients leave: one with packets unread, one that is stalled."""
    first, second = kernel.connect(), kernel.connect()
    for peer in (first, second):
        peer.send(b"SUB x")
    second.wire.room = 0
    first.send(publish(b"x"))
    first.wire.incoming.append(publish(b"x"))
    first.wire.reset = True
    first.close()
    second.close()


def stop(kernel: ShakyKernel) -> None:
    """The server stops while a client is stalled."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"SUB x")
    reader.wire.room = 1
    writer.send(*[publish(b"x")] * 3)
    reader.wire.room = None
    kernel.server.stop()
    kernel.server.run()


def no_descriptors(kernel: ShakyKernel) -> None:
    """No descriptor is left for a while."""
    error = OSError(errno.EMFILE, "too many open files")
    kernel.listener.failures.extend([error, error])
    kernel.connect()
    for _ in range(4):
        kernel.wait(0.1)


def restart(kernel: ShakyKernel) -> None:
    """A second server goes on with the listener of the first."""
    kernel.server.stop()
    kernel.server.run()
    heir = ShakyListener()
    heir.waiting = kernel.listener.waiting
    with contextlib.suppress(OSError, MemoryError):
        kernel.start(heir)
        accept(kernel)


Scenario = Callable[[ShakyKernel], None]
SCENARIOS = [start, accept, subscribe, publish_to_three, ask]
SCENARIOS += [queue_and_drain, block, hard_error, close, stop]
SCENARIOS += [no_descriptors, restart]
ENDINGS = (start, stop, restart)  # the clients from before are gone


class Outcome(NamedTuple):
    """What became of a scenario."""

    calls: list[str]  # their names
    problem: str


def outcome_of(
    scenario: Scenario,
    number: int = -1,
    error: Error = ERRORS[0],
    times: int = 1,
) -> Outcome:
    """Run a scenario while one call fails; see what became of others."""
    gremlin = Gremlin(number, error, times)
    kernel = ShakyKernel(gremlin)
    pairs = [Pair(kernel, key) for key in (b"calm/1", b"calm/2")]
    problem = ""
    gremlin.is_armed = True
    try:
        for pair in pairs:
            pair.talk()
        scenario(kernel)
        gremlin.is_armed = False
        kernel_settles(kernel, scenario)
        if scenario not in ENDINGS:
            for pair in pairs:
                pair.check(gremlin)
    except Exception as found:  # whatever the mistake in sbus.py is
        problem = f"{type(found).__name__}: {found}"
    return Outcome([name for _, name in gremlin.calls], problem)


class Pair:
    """A publisher and a subscriber, of one user, that mind their own."""

    def __init__(self, kernel: ShakyKernel, key: bytes) -> None:
        self.key = key
        self.publisher = kernel.connect()
        self.subscriber = kernel.connect()
        self.subscriber.send(b"SUB " + key)

    def talk(self) -> None:
        """Say something while calls may fail."""
        self.publisher.send(publish(self.key, b"1"), publish(self.key, b"2"))

    def check(self, gremlin: Gremlin) -> None:
        """Check that all arrives, if both sockets are in order."""
        whose, name = gremlin.target or (None, "")
        number = getattr(gremlin.error, "errno", None)
        is_ours = whose in (self.publisher.wire, self.subscriber.wire)
        if is_ours and number not in PASSING.get(name, ()):
            return
        if is_ours and (name, number) == ("send", errno.ECONNRESET):
            return
        if name in SELECTOR_CALLS:
            return self.check_watched()
        self.publisher.send(publish(self.key, b"3"), WHOAMI)
        heard = self.subscriber.read_all()
        assert heard == [publish(self.key, b"%d" % n) for n in (1, 2, 3)], (
            f"the subscriber of {self.key!r} heard {heard}"
        )
        assert len(self.publisher.read_all()) == 1, "no answer"

    def check_watched(self) -> None:
        """Check that each is served, or was disconnected."""
        for peer in (self.publisher, self.subscriber):
            if not peer.wire.closed:
                peer.send(WHOAMI)
                answers = peer.read_all()
                assert answers[-1].startswith(WHOAMI), "no answer"


def kernel_settles(kernel: ShakyKernel, scenario: Scenario) -> None:
    """Let time pass, and check that sockets and clients are one to one."""
    for wire in kernel.wires:
        wire.room = None
    if scenario not in (start, stop):
        for _ in range(3):
            kernel.wait(1)
    clients = {client.wire for client in kernel.bus.clients.values()}
    if scenario is start:  # the clients are those of the server before
        return
    for wire in kernel.wires:
        is_waiting = wire in kernel.listener.waiting
        assert wire.closed != (wire in clients or is_waiting), (
            "a socket without a client"
        )
    assert not kernel.listener.waiting or kernel.listener.closed, (
        "nobody accepts"
    )


STEP = either(1, 2)  # each call with every other error, in turn


def problems_of(
    scenario: Scenario, is_wanted: Callable[[str, Error], bool]
) -> list[str]:
    """Have the wanted calls of a scenario fail in turn; return what happens.

    Accept and send, which can fail for long, also fail a hundred times.
    """
    whole = outcome_of(scenario)
    assert whole.calls and not whole.problem, whole.problem
    problems = []
    cases = itertools.product(enumerate(whole.calls), ERRORS)
    for (number, name), error in itertools.islice(cases, 0, None, STEP):
        if not is_wanted(name, error):
            continue
        lasts = getattr(error, "errno", None) in LASTING
        for times in (1, 100) if lasts and name in ("accept", "send") else [1]:
            problem = outcome_of(scenario, number, error, times).problem
            if problem:
                what = f"call {number} {name}: {error!r} {times} times"
                problems.append(f"{what}: {problem}")
    return problems


def is_memory(error: Error) -> bool:
    return isinstance(error, MemoryError)


class TestFailingCalls:
    """Whatever call fails, with whatever error, the loop goes on."""

    pytestmark = PROOF

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_each_call_fails_in_turn(
        self, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-3] [CONN-9] [CONN-12] Others are served, no socket is left."""
        monkeypatch.setattr(sbus, "RESERVE_BYTES", 1_000)  # of many kernels

        def is_wanted(name: str, error: Error) -> bool:
            if name in ("select", "close"):
                return False
            memory = (*SELECTOR_CALLS, "shutdown")
            return not (is_memory(error) and name in memory)

        problems = problems_of(scenario, is_wanted)
        assert not problems, "\n".join(problems)

    def test_failing_close(self) -> None:
        """[CONN-12] The others of the round are closed, each once."""
        problems = problems_of(close, lambda name, _: name == "close")
        assert not problems, "\n".join(problems)

    def test_failing_select(self) -> None:
        """[CONN-12] Everybody is served in the next round."""
        problems = problems_of(
            publish_to_three, lambda name, _: name == "select"
        )
        assert not problems, "\n".join(problems)

    def test_memory_runs_out_while_watching(self) -> None:
        """[CONN-12] The one client is disconnected."""

        def is_wanted(name: str, error: Error) -> bool:
            watching = ("register", "modify", "unregister", "shutdown")
            return is_memory(error) and name in watching

        problems = problems_of(block, is_wanted)
        problems += problems_of(no_descriptors, is_wanted)
        assert not problems, "\n".join(problems)
