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
from typing import Any, NoReturn
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
BUSY_SECONDS_MAX = 2.0  # of the processor, until it waits in select
RUN_SECONDS_MAX = 8.0  # of the processor, for all that is tried


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
            mistake = f"the server waits in {call} for one client alone"
            self.kernel.leave(Stuck(mistake))


class ProgramListener(FakeListener):
    """The listening socket, as a program sees it."""

    def __init__(self, kernel: ProgramKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def bind(self, _: object) -> None: ...
    def listen(self, _: int = 0) -> None: ...
    def setblocking(self, _: bool) -> None: ...

    def accept(self) -> tuple[FakeWire, None]:
        if not self.waiting:
            mistake = "the server waits in accept, and for nothing else"
            self.kernel.leave(Stuck(mistake))
        return super().accept()


class ProgramKernel:
    """A program, and the sockets that it calls."""

    def __init__(
        self, code: CodeType, options: Sequence[str], run_end: float
    ) -> None:
        self.now = 0.0
        self.run_end = run_end  # of the processor's time
        self.left: Pause | Stuck | None = None  # why the program is left
        self.listener = ProgramListener(self)
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

    def tick(self, line: int) -> bool:
        """Return true; leave a program that is to be left, or has no end."""
        if self.left:
            raise self.left
        if time.process_time() > self.end:
            mistake = f"line {line} begins a loop without end"
            if self.end == self.run_end:
                mistake = f"all takes longer than {RUN_SECONDS_MAX:g} seconds"
            self.leave(Stuck(mistake))
        return True

    def leave(self, reason: Pause | Stuck) -> NoReturn:
        """Leave the program, which may catch this, until it is left."""
        self.left = self.left or reason
        raise self.left

    def enter(self, call: Callable[[], object]) -> None:
        """Have the program do something; raise Failure if it ends or waits."""
        self.left = None
        self.end = min(time.process_time() + BUSY_SECONDS_MAX, self.run_end)
        try:
            call()
        except (Pause, Stuck):
            pass
        except (Exception, SystemExit) as error:
            if not self.left:
                raise Failure(how_it_ended(error)) from None
        if isinstance(self.left, Stuck):
            raise Failure(str(self.left))
        if not self.left:
            raise Failure("the server has ended")

    def select(
        self,
        readers: Iterable[Any],
        writers: Iterable[Any],
        *_: object,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what is ready; leave the program if nothing is."""
        self.calls += 1
        if self.left:
            raise self.left
        if self.calls > CALLS_MAX:
            mistake = "the server spins: select reports what it ignores"
            self.leave(Stuck(mistake))
        ready = [wire for wire in readers if self.events(wire) & sbus.READ]
        roomy = [wire for wire in writers if self.events(wire) & sbus.WRITE]
        if not ready and not roomy:
            self.leave(Pause())
        return ready, roomy, []

    def events(self, source: Any) -> int:
        """Return what a socket, or what has its number, is ready for."""
        wire = self.wires[source.fileno()]
        if wire.closed:
            raise ValueError("select was given a socket that is closed")
        return int(wire.events())


def how_it_ended(error: BaseException) -> str:
    """Return where a program raised an error, and which."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == FILE]
    mistake = f"{type(error).__name__}: {error}"
    where = f"line {lines[-1]}" if lines else "a call of serve"
    return f"{where} ends it: {mistake}"


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
            node.body.insert(0, ast.Expr(self.call(node.lineno)))
        if isinstance(node, ast.comprehension):
            node.ifs.insert(0, self.call(node.iter.lineno))
        return node

    def call(self, line: int) -> ast.Call:
        """Return a call that is true."""
        name = ast.Name(self.TICK, ast.Load())
        return ast.Call(name, [ast.Constant(line)], [])


class ProgramKit:
    """Tries a student's server on a fake kernel; see Kit."""

    def __init__(self, source: str) -> None:
        """Raise ValueError if the program is none."""
        try:
            tree = Loops().visit(ast.parse(source, FILE))
        except SyntaxError as error:
            mistake = f"line {error.lineno} is no Python: {error.msg}"
            raise ValueError(mistake) from None
        self.end = time.process_time() + RUN_SECONDS_MAX
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
            kernel = kernel or ProgramKernel(self.code, talk.options, self.end)
            bus = ProgramBus(kernel, self.wire_kind is stages.ReadWire)
            wrong, said, *_ = perform(bus, talk)
        except Failure as failure:
            wrong = str(failure)
        self.kernels.clear()
        if kernel and not wrong:
            with contextlib.suppress(Failure):  # an example shows that as well
                kernel.run()  # the clients have left
                self.kernels[talk.options] = kernel
        verdict = "failed" if wrong else "passed"
        return Result(case.name, case.rules, verdict, wrong, tuple(said))
