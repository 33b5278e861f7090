"""A server of a student on fake sockets, in this process.

The program runs until it calls select and nothing is ready.  Once something
is, it goes on where its function serve() begins.  So serve() may keep nothing
that it needs in variables of its own.
"""

from __future__ import annotations

import ast
import contextlib
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import sbus
from conformance import stages
from conformance.conversation import Failure, perform
from conformance.kit import Item, Result
from conformance.trial import Check
from conformance.wire import Wire
from fake_bus import FakeBus, FakeConnection
from fake_kernel import OWNER, FakeListener, FakePeer, FakeWire

FILE = "server.py"  # what an error calls the program
CALLS_MAX = 10_000  # of select, before a program is said to spin
BUSY_SECONDS_MAX = 2.0  # of the processor, until it calls select again


class Pause(BaseException):
    """The program waits for its clients, and for no single one of them."""


class Stuck(BaseException):
    """The program waits in another call, or does not wait at all."""


class ProgramWire(FakeWire):
    """A client's socket, as a program sees it."""

    is_blocking = True

    def setblocking(self, flag: bool, /) -> None:
        self.is_blocking = flag

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        try:
            is_packet = self._wait_for_input()
        except BlockingIOError:
            self.wait("recv")
            raise
        return self.incoming.popleft()[:size] if is_packet else b""

    def send(self, packet: Any, flags: int = 0, /) -> int:
        try:
            return super().send(packet)
        except BlockingIOError:
            self.wait("send")
            raise

    def wait(self, call: str) -> None:
        """Leave a program whose call would not return."""
        if self.is_blocking:
            raise Stuck(f"the server waits in {call} for one client alone")


class ProgramListener(FakeListener):
    """The listening socket, as a program sees it."""

    def bind(self, _: object) -> None: ...
    def listen(self, _: int = 0) -> None: ...
    def setblocking(self, _: bool) -> None: ...

    def accept(self) -> tuple[FakeWire, None]:
        if not self.waiting:
            raise Stuck("the server waits in accept, and for nothing else")
        return super().accept()


class ProgramKernel:
    """A program, and the sockets that it calls."""

    def __init__(self, code: CodeType, options: Sequence[str]) -> None:
        self.now = 0.0
        self.listener = ProgramListener()
        self.wires: dict[int, Any] = {self.listener.fileno(): self.listener}
        self.calls = 0
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.names[Loops.TICK] = self.tick
        arguments = [FILE, "-f", "-a", "/tmp/sbus-program", *options]
        modules = {
            "select": module_like(select, select=self.select),
            "socket": module_like(socket, socket=lambda *_: self.listener),
        }
        argv = mock.patch.object(sys, "argv", arguments)
        with argv, mock.patch.dict(sys.modules, modules):
            self.enter(lambda: exec(code, self.names))

    def connect(
        self, uid: int = 1000, gid: int = 100, pid: int | None = None
    ) -> FakePeer:
        """Connect a client."""
        number = 10 + len(self.wires)
        pid = 4000 + number if pid is None else pid
        owner = sbus.Credentials(gid, uid, pid)
        wire = self.wires[number] = ProgramWire(self, number, owner)
        self.listener.waiting.append(wire)
        self.run()
        return FakePeer(self, wire)  # type: ignore[arg-type]

    def run(self) -> None:
        """Let the program work until nothing is left to do."""
        self.calls = 0
        if "serve" not in self.names:
            raise Failure("the page needs a function serve(listener)")
        self.enter(lambda: self.names["serve"](self.listener))

    def tick(self, line: int) -> None:
        """Leave a loop of the program that has no end."""
        if time.process_time() > self.end:
            raise Stuck(f"line {line} begins a loop without end")

    def enter(self, call: Callable[[], object]) -> None:
        """Have the program do something; raise Failure if it ends or waits."""
        self.end = time.process_time() + BUSY_SECONDS_MAX
        try:
            call()
        except Pause:
            return
        except Stuck as stuck:
            raise Failure(str(stuck)) from None
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [one.lineno for one in frames if one.filename == FILE]
            what = f"{type(error).__name__}: {error}"
            where = f"line {lines[-1]}" if lines else "a call of serve"
            raise Failure(f"{where} ends it: {what}") from None
        raise Failure("the server has ended")

    def select(
        self,
        readers: Iterable[Any],
        writers: Iterable[Any],
        *_: object,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what is ready; leave the program if nothing is."""
        self.calls += 1
        self.end = time.process_time() + BUSY_SECONDS_MAX
        if self.calls > CALLS_MAX:
            raise Stuck("the server spins: select reports what it ignores")
        ready = [one for one in readers if self.events(one) & sbus.READ]
        roomy = [one for one in writers if self.events(one) & sbus.WRITE]
        if not ready and not roomy:
            raise Pause
        return ready, roomy, []

    def events(self, source: Any) -> int:
        """Return what a socket, or what has its number, is ready for."""
        wire = self.wires[source.fileno()]
        if wire.closed:
            raise ValueError("select was given a socket that is closed")
        return int(wire.events())


def module_like(module: ModuleType, **others: object) -> ModuleType:
    """Return a module with some names that are others."""
    copy = ModuleType(module.__name__)
    vars(copy).update({**vars(module), **others})
    return copy


class ProgramConnection(FakeConnection):
    """A client of a student's server; see Connection."""

    is_to_be_read = False  # by a server that does nothing else yet

    def settle(self) -> None:
        super().settle()
        if self.is_to_be_read and self.wire.incoming:
            raise Failure("a packet is not read")


class ProgramBus(FakeBus):
    """A student's server on a fake kernel; see Bus."""

    def __init__(self, kernel: ProgramKernel, is_to_be_read: bool) -> None:
        self.is_frozen = False
        self.kernel: Any = kernel
        self.is_to_be_read = is_to_be_read

    def connect(
        self, credentials: Mapping[str, int] | None = None
    ) -> ProgramConnection:
        with self.frozen_kernel():
            peer = self.kernel.connect(**{"uid": OWNER, **(credentials or {})})
        client = ProgramConnection(self.kernel, peer)
        client.is_to_be_read = self.is_to_be_read
        return client

    def fault(self) -> str:
        return ""  # each client has been settled


class Loops(ast.NodeTransformer):
    """Has each loop of a program call a function at each turn."""

    TICK = "tick of the page"  # no name that a program could have

    def visit(self, node: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, (ast.While, ast.For)):
            name = ast.Name(self.TICK, ast.Load())
            call = ast.Call(name, [ast.Constant(node.lineno)], [])
            node.body.insert(0, ast.Expr(call))
        return node


class ProgramKit:
    """Tries a student's server on a fake kernel; see Kit."""

    def __init__(self, source: str) -> None:
        """Raise ValueError if the program is none."""
        try:
            tree = Loops().visit(ast.parse(source, FILE))
        except SyntaxError as error:
            what = f"line {error.lineno} is no Python: {error.msg}"
            raise ValueError(what) from None
        self.code = compile(ast.fix_missing_locations(tree), FILE, "exec")
        self.kernels: dict[tuple[str, ...], ProgramKernel] = {}
        self.server = self
        self.wire_kind = Wire  # stages.py sets it

    def try_stages(self, last: int) -> tuple[str, Result | None]:
        """Return what the kit says, and the first result that is wrong."""
        return stages.try_stages(last, self)

    def judge(self, case: Item) -> Result:
        """Run one case; one server does for those with the same options.

        A check needs a process.
        """
        if isinstance(case, Check):
            return Result(case.name, case.rules, "not applicable")
        talk = case.conversation()
        kernel, wrong, said = self.kernels.get(talk.options), "", ["(start)"]
        try:
            kernel = kernel or ProgramKernel(self.code, talk.options)
            bus = ProgramBus(kernel, self.wire_kind is stages.ReadWire)
            wrong, said, _ = perform(bus, talk)
        except Failure as failure:
            wrong = str(failure)
        self.kernels.clear()
        if kernel and not wrong:
            with contextlib.suppress(Failure):  # an example shows that as well
                kernel.run()  # the clients have left
                self.kernels[talk.options] = kernel
        verdict = "failed" if wrong else "passed"
        return Result(case.name, case.rules, verdict, wrong, tuple(said))
