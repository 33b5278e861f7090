"""A server of a student on fake sockets, in this process.

The program runs until it calls select and nothing is ready.  Once something
is, it goes on where its function serve() begins.  So serve() may keep nothing
that it needs in variables of its own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import reprlib
import select
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, NoReturn
from unittest import mock

import sbus
from conformance import stages
from conformance.conversation import Failure, perform
from conformance.examples import Conversation, Step, escape
from conformance.kit import REAL_CASES, Item, Result
from conformance.trial import Check
from conformance.wire import Wire
from fake_bus import FakeBus, FakeConnection
from fake_kernel import OWNER, FakeListener, FakePeer, FakeWire
from line_trace import LineTrace

FILE = "server.py"  # what an error calls the program
CALLS_MAX = 10_000  # of select, before a program is said to spin
TURNS_MAX = 1_000_000  # of its loops, until it waits in select
OUTPUT_MAX = 2_000  # characters that a program prints at a step
LISTENER = 3  # the number of the socket that listens


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
        self,
        code: CodeType,
        options: Sequence[str],
        output: Output,
    ) -> None:
        self.now = 0.0
        self.left: Pause | Stuck | None = None  # why the program is left
        self.listener = ProgramListener(self)
        self.wires: dict[int, Any] = {self.listener.fileno(): self.listener}
        self.calls = 0
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.names[Loops.TICK] = self.tick
        self.output = output
        self.trace: Any = contextlib.nullcontext()
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
        self.turns += 1
        if self.turns > TURNS_MAX:
            self.leave(Stuck(f"line {line} begins a loop without end"))
        return True

    def leave(self, reason: Pause | Stuck) -> NoReturn:
        """Leave the program, which may catch this, until it is left."""
        self.left = self.left or reason
        raise self.left

    def enter(self, call: Callable[[], object]) -> None:
        """Have the program do something; raise Failure if it ends or waits."""
        self.left = None
        self.turns = 0
        printed = contextlib.redirect_stdout(self.output)
        errors = contextlib.redirect_stderr(self.output)
        try:
            with printed, errors, self.trace:
                call()
        except (Pause, Stuck):
            pass
        except (Exception, SystemExit) as error:
            if not self.left:
                self.output.write(way_to(error))
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
    lines = [frame.lineno for frame in frames_of(error)]
    mistake = f"{type(error).__name__}: {error}"
    where = f"line {lines[-1]}" if lines else "a call of serve"
    return f"{where} stopped it: {mistake}"


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return where a program was when it raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == FILE]


def way_to(error: BaseException) -> str:
    """Return an error as Python prints it, without frames of the page."""
    lines = (
        f"  line {frame.lineno}, in {frame.name}\n"
        for frame in frames_of(error)
    )
    return f"{''.join(lines)}{type(error).__name__}: {error}\n"


class Output(io.TextIOBase):
    """Keeps what a program prints, the last of it."""

    text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[-OUTPUT_MAX:]
        return len(text)

    def take(self) -> str:
        """Return what was printed since the last call."""
        text, self.text = self.text, ""
        return text


class Shown(reprlib.Repr):
    """Shows what a program knows; a client is its letter."""

    def __init__(self, letters: Mapping[int, str]) -> None:
        super().__init__()
        self.letters = letters
        self.maxstring = self.maxother = 60
        self.maxdict = self.maxlist = self.maxset = self.maxdeque = 8

    def repr1(self, x: object, level: int) -> str:
        wire = wire_of(x)
        return self.letters.get(wire, "?") if wire else super().repr1(x, level)

    def cards(self, names: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what is known of each client, and what else there is."""
        cards: dict[str, Any] = {}
        others: dict[str, str] = {}
        for name, value in names.items():
            if not isinstance(value, (list, dict, set)) or name[:2] == "__":
                continue
            for part in value.values() if isinstance(value, dict) else value:
                if wire_of(part) and not isinstance(part, ProgramWire):
                    cards[self.repr(part)] = {
                        label: self.repr(fact)
                        for label, fact in vars(part).items()
                        if not isinstance(fact, ProgramWire)
                    }
            others[name] = self.repr(value)
        return [*sorted(cards.items()), (FILE, others)]


def wire_of(value: object) -> int:
    """Return the number of a client's socket, or of what has one, or 0."""
    if isinstance(value, ProgramWire):
        return value.number
    if type(value).__module__ != "__main__":
        return 0  # no class of the program
    parts = vars(value).values() if hasattr(value, "__dict__") else ()
    numbers = (part.number for part in parts if isinstance(part, ProgramWire))
    return next(numbers, 0)


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
        self.letters: dict[int, str] = {}  # of clients, by their sockets
        self.seen: list[dict[str, Any]] = []  # at each step

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

    def watched(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield steps; note after each what the program did and knows."""
        self.kernel.trace = LineTrace(FILE)
        for step in steps:
            try:
                yield step
                if not self.is_frozen:
                    self.kernel.run()
            finally:
                self.note(step.client)

    def note(self, client: str) -> None:
        """Note what the program did at a step, and what it knows now."""
        kernel = self.kernel
        wires = {n: wire for n, wire in kernel.wires.items() if n != LISTENER}
        for number in wires:
            self.letters.setdefault(number, client)
        unread = {self.letters[n]: [*wire.taken] for n, wire in wires.items()}
        cards = Shown(self.letters).cards(kernel.names)
        for name, facts in cards:
            if unread.get(name):
                facts["in the kernel"] = [*map(escape, unread[name])]
        printed, ran = kernel.output.take(), kernel.trace.take()
        self.seen.append({"cards": cards, "printed": printed, "ran": ran})


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
            mistake = f"line {error.lineno} is not valid Python: {error.msg}"
            raise ValueError(mistake) from None
        self.code = compile(ast.fix_missing_locations(tree), FILE, "exec")
        self.kernels: dict[tuple[str, ...], ProgramKernel] = {}
        self.server = self
        self.wire_kind = Wire  # stages.py sets it
        self.seen: list[dict[str, Any]] = []  # at each step of what failed
        self.letters: dict[str, Any] = {}  # its clients
        self.output = Output()

    def try_stages(self, last: int) -> tuple[str, Result | None]:
        """Return what the kit says, and the first result that is wrong."""
        return stages.try_stages(last, self)

    def judge(self, case: Item) -> Result:
        """Run one case; one server does for those with the same options.

        A check, and what is for real kernels alone, needs a process.
        """
        if isinstance(case, Check) or case in REAL_CASES:
            return Result(case.name, case.rules, "not applicable")
        talk = case.conversation()
        kernel, wrong, said = self.kernels.get(talk.options), "", ["(start)"]
        try:
            kernel = kernel or self.start(talk.options)
            bus = ProgramBus(kernel, self.wire_kind is stages.ReadWire)
            wrong, said, *_ = perform(bus, talk)
        except Failure as failure:
            wrong = str(failure)
        self.kernels.clear()
        if kernel and not wrong:
            with contextlib.suppress(Failure):  # an example shows that as well
                kernel.run()  # the clients have left
                self.kernels[talk.options] = kernel
        if wrong:
            wrong, said = self.watch(talk) or (wrong, said)
        verdict = "failed" if wrong else "passed"
        return Result(case.name, case.rules, verdict, wrong, tuple(said))

    def watch(self, talk: Conversation) -> tuple[str, list[str]] | None:
        """Hold a conversation once more, and note what the program does.

        A packet is handled before the next is sent: so what goes wrong is
        known at its step, or it may go well, and then None is returned.
        """
        try:
            kernel = self.start(talk.options)
        except Failure:
            self.seen = [{"printed": self.output.take()}]
            return None
        bus = ProgramBus(kernel, self.wire_kind is stages.ReadWire)
        steps: Any = bus.watched(talk.steps)
        wrong, said, *_ = perform(bus, talk._replace(steps=steps))
        steps.close()  # so that the step that failed is noted
        if not wrong:
            return None
        self.seen = bus.seen
        self.letters = {
            letter: kernel.wires[number].credentials
            for number, letter in bus.letters.items()
        }
        return wrong, said

    def start(self, options: Sequence[str]) -> ProgramKernel:
        """Have the program run until it waits; raise Failure if it ends."""
        self.output.take()
        return ProgramKernel(self.code, options, self.output)

    def filled(self, line: str) -> str:
        """Return a line with numbers where it names those of clients."""

        def number(match: re.Match[str]) -> str:
            owner = self.letters.get(match[1])
            return str(getattr(owner, match[2])) if owner else match[0]

        return re.sub(r"\{(\w+)\.(gid|uid|pid)\}", number, line)
