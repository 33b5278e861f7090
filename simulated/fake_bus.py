"""A bus on a fake kernel, for conversations of the conformance kit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import sbus
from conformance.conversation import END, Failure, perform
from conformance.examples import Case, MatchCase
from conformance.kit import Result
from fake_kernel import OWNER, FakeKernel, FakePeer
from packets import WHOAMI

FILLER = b"MSG fill\0"  # what no step shows


@contextlib.contextmanager
def crashes_are_failures() -> Iterator[None]:
    """Report an exception of the server as what it is: the server's end."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"the server crashed: {error!r}") from error


class FakeConnection:
    """A client on a fake kernel; see Connection."""

    def __init__(self, kernel: FakeKernel, peer: FakePeer) -> None:
        self.kernel = kernel
        self.wire = peer.wire
        self.is_deaf = False  # by its own wish
        self.gid, self.uid, self.pid = peer.wire.credentials

    def send(self, packet: bytes) -> None:
        if self.wire.closed:
            raise Failure("cannot send: the server has closed")
        self.wire.incoming.append(packet)

    def settle(self) -> None:
        with crashes_are_failures():
            self.kernel.run()

    def receive(self) -> bytes:
        packet = self.pending()
        if packet is None:
            raise Failure("received nothing")
        if packet != END:
            self.wire.taken.popleft()
            self.settle()
        return packet

    def await_end(self) -> None:
        self.settle()

    def pending(self) -> bytes | None:
        self.settle()
        if self.wire.taken and self.wire.taken[0] == FILLER:
            self.wire.taken.popleft()
            self.wire.room = None
            self.settle()
        if self.wire.taken:
            if not self.wire.taken[0]:
                raise Failure("received an empty packet")
            return self.wire.taken[0]
        return END if self.wire.closed and not self.is_deaf else None

    def shut(self) -> None:
        self.wire.ended = True

    def deafen(self) -> None:
        self.is_deaf = self.wire.deaf = True

    def close(self) -> None:
        self.wire.reset = bool(self.wire.taken)
        self.wire.ended = self.wire.deaf = True

    def set_room(self, count: int) -> None:
        self.wire.room = count


class FakeBus:
    """A server on a fake kernel; see Bus."""

    def __init__(self, options: Sequence[str]) -> None:
        self.is_frozen = False
        self.kernel = FakeKernel(*options)

    def connect(
        self, credentials: Mapping[str, int] | None = None
    ) -> FakeConnection:
        with crashes_are_failures(), self.frozen_kernel():
            peer = self.kernel.connect(**{"uid": OWNER, **(credentials or {})})
        return FakeConnection(self.kernel, peer)

    def fill(self, client: FakeConnection) -> None:
        client.settle()
        client.wire.taken.append(FILLER)
        client.wire.room = 1

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False

    @contextlib.contextmanager
    def frozen_kernel(self) -> Iterator[None]:
        """Have the kernel run nothing while the server is frozen."""
        if self.is_frozen:
            vars(self.kernel)["run"] = lambda: None
        try:
            yield
        finally:
            vars(self.kernel).pop("run", None)

    def wait(self, seconds: float) -> None:
        with crashes_are_failures():
            self.kernel.wait(seconds)

    def fault(self) -> str:
        try:
            self.wait(0)
            client = self.connect()
            client.send(WHOAMI)
            answer = client.receive()
        except Failure as failure:
            return str(failure)
        return "" if answer.startswith(WHOAMI) else f"answered {answer!r}"


def run_on_fake_kernel(case: Case) -> Result:
    """Run one case in this process."""
    conversation = case.conversation()
    wrong, said, *_ = perform(FakeBus(conversation.options), conversation)
    if isinstance(case, MatchCase) and not wrong:
        selected = sbus.pattern_matches(case.pattern, case.key)
        if selected is not case.selected:
            wrong = "the definition does not agree with the table"
    verdict = "failed" if wrong else "passed"
    return Result(case.name, case.rules, verdict, wrong, tuple(said))
