"""Tests that each call to the kernel may fail, in turn, with each error."""

from __future__ import annotations

import errno
import functools
import os
from typing import Any, Callable

import pytest

from fake_kernel import FakeKernel, FakePeer
from packets import WHOAMI, publish
from sizes import PROOF

ERRORS = [errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED]
ERRORS += [errno.EMFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.EIO]
LASTING = {  # errors that come again until time has passed
    "accept": (errno.EMFILE, errno.ENOBUFS, errno.ENOMEM, errno.EIO),
    "send": (errno.ENOBUFS, errno.ENOMEM),
}
HARMLESS = {  # errors that leave a socket as good as before
    "recv_into": (errno.EAGAIN, errno.ECONNRESET),
    "send": (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM),
}
TRIES_MAX = 4  # of one call, in no time


class ShakyKernel(FakeKernel):
    """A server on fake sockets, one of whose calls fails.

    As with the selectors of Python, a modify that fails has unregistered.
    """

    def __init__(self, number: int, error: int, times: int) -> None:
        super().__init__(max_backlog=600, max_packet=30_000)
        self.number = number  # of the call that fails
        self.error = error
        self.times = times  # that it still does
        self.calls: list[str] = []
        self.target: tuple[object, str] | None = None
        self.victim: object = None  # the socket that it concerns
        self.peers: list[FakePeer] = []
        self.shake(self.listener, "accept")
        self.shake(self.selector, "register", "modify")
        self.pairs = [(self.connect(uid=7), self.connect(uid=8)) for _ in "12"]
        for _, reader in self.pairs:
            reader.send(b"SUB %d" % reader.wire.fileno())
        self.calls.clear()
        self.is_armed = True

    is_armed = False

    def knock(self, *numbers: Any, **more: Any) -> FakePeer:
        """Have a client wait for being accepted."""
        peer = super().knock(*numbers, **more)
        self.shake(peer.wire, "recv_into", "recvmsg", "send")
        self.peers.append(peer)
        return peer

    def shake(self, whose: Any, *names: str) -> None:
        """Have calls of something fail when their time has come."""
        for name in names:
            call = functools.partial(self.call, whose, getattr(whose, name))
            vars(whose)[name] = call

    def call(
        self, whose: Any, method: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call the kernel, which fails if it is the call's turn."""
        name = method.__name__
        if self.is_armed:
            if len(self.calls) == self.number:
                self.target = whose, name
                self.victim = arguments[0] if whose is self.selector else whose
            self.calls.append(name)
            if (whose, name) == self.target and self.times:
                self.times -= 1
                if name == "modify":
                    del self.selector.keys[arguments[0]]
                raise OSError(self.error, os.strerror(self.error))
        return method(*arguments)

    def run(self) -> None:
        before = self.times
        super().run()
        assert before - self.times <= TRIES_MAX, "the server spins"

    def talk(self, payload: bytes) -> None:
        """Have each pair say something."""
        for writer, reader in self.pairs:
            key = b"%d" % reader.wire.fileno()
            if not writer.wire.closed:
                writer.send(publish(key, payload))

    def check(self) -> None:
        """Check that it has cost at most the client that it concerned."""
        self.is_armed = False
        for peer in self.peers:
            peer.wire.room = None
        for _ in range(3):
            self.wait(1)
        self.talk(b"3")
        clients = {client.wire for client in self.bus.clients}
        for peer in self.peers:
            assert peer.wire.closed != (peer.wire in clients), "lost or left"
        assert not self.listener.waiting, "nobody accepts"
        _, name = self.target or (None, "")
        is_harmless = self.error in HARMLESS.get(name, ())
        for writer, reader in self.pairs:
            if is_harmless or self.victim not in (writer.wire, reader.wire):
                key = b"%d" % reader.wire.fileno()
                heard = reader.read_all()
                assert heard == [publish(key, n) for n in (b"1", b"2", b"3")]
                writer.send(WHOAMI)
                assert len(writer.read_all()) == 1, "no answer"


def accept(kernel: ShakyKernel) -> None:
    """Three clients wait, one of them has left."""
    for _ in range(3):
        kernel.knock()
    kernel.peers[-1].post(publish(b"x"))
    kernel.peers[-1].close()


def publish_to_three(kernel: ShakyKernel) -> None:
    """A client publishes small and large packets to three."""
    peers = [kernel.connect() for _ in range(3)]
    for peer in peers:
        peer.send(b"SUB x")
    peers[0].send(publish(b"x", b"1"), publish(b"x", bytes(20_000)))


def block(kernel: ShakyKernel) -> None:
    """A publisher is paused, goes on, and is paused for too long."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"CMSG blocking/soft/block", b"SUB x")
    reader.wire.room = 1
    writer.send(*[publish(b"x")] * 3)
    writer.send(publish(b"x"))
    reader.read_all()
    reader.wire.room = 0
    writer.send(publish(b"x"), publish(b"x"))
    kernel.wait(5.1)


def hard_error(kernel: ShakyKernel) -> None:
    """A stalled client is disconnected, and heard out."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"CMSG blocking/hard/error", b"SUB x")
    reader.wire.room = 0
    reader.post(*[publish(b"y")] * 3)
    writer.send(*[publish(b"x")] * 6)


def close(kernel: ShakyKernel) -> None:
    """Clients leave: one with packets unread, one that is stalled."""
    first, second = kernel.connect(), kernel.connect()
    for peer in (first, second):
        peer.send(b"SUB x")
    second.wire.room = 0
    first.send(publish(b"x"))
    first.post(publish(b"x"))
    first.wire.reset = True
    first.close()
    second.close()


def no_descriptors(kernel: ShakyKernel) -> None:
    """No descriptor is left for a while."""
    error = OSError(errno.EMFILE, "too many open files")
    kernel.listener.failures.extend([error, error])
    kernel.connect()
    for _ in range(4):
        kernel.wait(0.1)


def stop(kernel: ShakyKernel) -> None:
    """The server stops while a client is stalled."""
    reader, writer = kernel.connect(), kernel.connect()
    reader.send(b"SUB x")
    reader.wire.room = 1
    writer.send(*[publish(b"x")] * 3)
    reader.wire.room = None
    kernel.server.stopping = True
    kernel.server.run()
    left = [one.wire for one in kernel.peers if not one.wire.closed]
    assert left == [*kernel.listener.waiting], "not closed"


Scenario = Callable[[ShakyKernel], None]
SCENARIOS: list[Scenario] = [accept, publish_to_three, block, hard_error]
SCENARIOS += [close, no_descriptors, stop]


def problem_of(scenario: Scenario, kernel: ShakyKernel) -> str:
    """Run a scenario while a call fails; return what goes wrong."""
    try:
        kernel.talk(b"1")
        scenario(kernel)
        if scenario is not stop:
            kernel.talk(b"2")
            kernel.check()
    except Exception as error:  # whatever the mistake in sbus.py is
        return f"{type(error).__name__}: {error}"
    return ""


pytestmark = PROOF


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_call_fails_in_turn(scenario: Scenario) -> None:
    """[CONN-12] The bus goes on, others are served, no socket is left.

    What can fail for long fails a hundred times as well.
    """
    whole = ShakyKernel(-1, 0, 0)
    assert not problem_of(scenario, whole)
    problems = []
    for number, name in enumerate(whole.calls):
        for error in ERRORS:
            is_lasting = error in LASTING.get(name, ())
            for times in (1, 100) if is_lasting else (1,):
                kernel = ShakyKernel(number, error, times)
                problem = problem_of(scenario, kernel)
                if problem:
                    what = f"{name} {number} {errno.errorcode[error]}"
                    problems.append(f"{what} {times} times: {problem}")
    assert not problems, "\n".join(problems)
