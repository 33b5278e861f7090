"""Tests of calls that wait, and of what signals, threads and forks do then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import sbus_client
from client_ends import (
    Blocking,
    Ends,
    Kind,
    beside,
    both_ends,
    counted,
    fill,
    in_child,
    open_numbers,
    quick_switches,
    serving,
    sleeps,
)
from commands import IMPORTING
from packets import ANSWER, WHOAMI, publish
from processes import ROOT, SECONDS_MAX
from real_bus import RealBus, wait_for
from sbus_client import AsyncClient, Client, Disconnected, SbusError, TimedOut

SIGNAL = signal.SIGUSR1
CLOSED = "^this client is closed$"


@contextlib.contextmanager
def interrupted(moment: int, handler: Callable[[], None]) -> Iterator[None]:
    """Call a handler before the instruction with a number, as signals do.

    It is one of this thread's Python code, also of the standard library.
    """
    moments = iter(range(moment, -1, -1))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and next(moments, None) == 0:
            handler()
        return trace

    before = sys.gettrace()
    # Python 3.12 counts instructions only if a frame asked for it before
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Files:
    """What a program opens, whose numbers may have been a client's."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def open(self) -> None:
        for number in range(8):
            self.numbers.append(os.memfd_create(str(number)))

    def close(self) -> None:
        """Check that nobody else has closed them, or written to them."""
        while self.numbers:
            assert not os.fstat(self.numbers[-1]).st_size
            os.close(self.numbers.pop())


WAITS: dict[str, Callable[[Client], object]] = {
    "receive": lambda client: client.receive(0.0001),
    "sync": lambda client: client.sync(0.0001),
    "publish": lambda client: client.publish("k", b"", 0.0001),
    "request": lambda client: client.request("k", b"", 0.0001),
    "fileno": lambda client: (client.fileno(), client.receive(0.0001)),
}


# ---- A signal handler that closes the client


@pytest.mark.parametrize(
    "kind, name, has_bus",
    [
        *[(Client, name, True) for name in WAITS],
        *[(Client, name, False) for name in WAITS],
        *[(Blocking, name, True) for name in ("receive", "sync")],
    ],
)
def test_close_at_any_moment(
    directory: Path, kind: Kind, name: str, has_bus: bool
) -> None:
    """The call that it interrupts raises Disconnected, or is over.

    It neither hangs nor leaves a descriptor open, nor touches a file that
    the handler opens.  An event loop looks at none.
    """

    def handle() -> None:
        client.close()
        files.open()
        client.close()

    files = Files()
    before = len(os.listdir("/proc/self/fd"))
    moments = range(0, 100_000, 7)  # a wait is of hundreds of them
    for moment in moments:
        with contextlib.ExitStack() as stack:
            if has_bus:
                client, _ = stack.enter_context(both_ends(kind))
            else:
                client = kind(str(directory / "bus"), reconnect=True)
                stack.enter_context(client)
            if has_bus and name == "publish":
                fill(client)
            with (
                contextlib.suppress(TimedOut),
                pytest.raises(Disconnected, match=CLOSED),
                interrupted(moment, handle),
            ):
                WAITS[name](client)
                client.receive(0)  # it was over, but perhaps is closed
            if isinstance(client, Blocking):
                assert not any(map(client.loop.remove_reader, files.numbers))
            if not client.closed:
                break
        files.close()
    assert moments.index(moment) > 20
    client = None  # type: ignore[assignment]
    gc.collect()  # errors hold what they passed through
    assert len(os.listdir("/proc/self/fd")) <= before


def test_closed_fileno_is_readable() -> None:
    """A program that polls a closed client does not sleep for ever."""
    for moment in range(100_000):
        with both_ends(Client) as ends, select.epoll() as epoll:
            client, server = ends
            epoll.register(client, select.EPOLLIN)
            server.send(publish(b"k"), ANSWER)
            client.sync(SECONDS_MAX)  # which keeps the message
            with (
                contextlib.suppress(Disconnected),
                interrupted(moment, client.close),
            ):
                client.receive(0)
            if not client.closed:
                break
            client.close()  # as who presses Ctrl-C twice
            assert epoll.poll(0)
    assert moment > 100


# ---- Any thread may do anything


def test_what_an_asking_thread_has_kept() -> None:
    """A message that an asking thread keeps wakes a thread that waits for
    messages.
    """
    for _ in range(200):
        with (
            both_ends(Client) as (client, server),
            beside(client.receive, SECONDS_MAX, asleep=True) as received,
        ):
            with beside(client.sync, SECONDS_MAX):
                assert server.receive() == WHOAMI
                server.send(b"MSG k\0v", ANSWER)
            assert received.result(SECONDS_MAX) == (b"k", b"v")


@pytest.mark.parametrize("reconnect", [False, True])
def test_readers_beside_askers(bus: RealBus, reconnect: bool) -> None:
    """Each answer comes to the thread that asks, and each message to one
    of two readers.
    """
    names, count, copies = range(3), 300, 10

    def ask(name: int) -> None:
        for number in range(count):
            payload = b"%d/%d" % (name, number)
            assert client.request("job", payload, SECONDS_MAX) == payload
            for _ in range(copies):
                client.publish("feed", payload)

    def read() -> list[bytes]:
        return [*iter(lambda: client.receive(SECONDS_MAX).payload, b"")]

    with contextlib.ExitStack() as stack:
        stack.enter_context(quick_switches())
        stack.enter_context(serving(bus, "job"))
        client = Client(bus.path, reconnect=reconnect)
        stack.enter_context(client).subscribe("feed")
        readers = [stack.enter_context(beside(read)) for _ in range(2)]
        with contextlib.ExitStack() as askers:
            for name in names:
                askers.enter_context(beside(ask, name))
        for _ in readers:
            client.publish("feed")
        payloads = Counter[bytes]()
        for reader in readers:
            payloads.update(reader.result(SECONDS_MAX))
    texts = [b"%d/%d" % (n, m) for n in names for m in range(count)]
    assert payloads == dict.fromkeys(texts, copies)


def test_first_requests(bus: RealBus) -> None:
    """[REQUEST-1] Threads that ask first share the keys of answers."""
    with quick_switches(), serving(bus, "job"):
        for _ in range(100):
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(Client(bus.path))
                for _ in range(4):
                    ask = client.request, "job", b"x", SECONDS_MAX
                    stack.enter_context(beside(*ask))


def test_close_beside_three_threads(directory: Path) -> None:
    """All threads end with their client, with and without a bus, and so do its
    descriptors, though the program still refers to it.
    """
    calls = [("receive",), ("request", "k", b"", 0.0005), ("publish", "k")]

    def work(client: Client, name: str, *arguments: object) -> None:
        with pytest.raises(Disconnected, match=CLOSED):
            while True:
                with contextlib.suppress(TimedOut):
                    getattr(client, name)(*arguments)

    before = open_numbers()
    with RealBus(directory) as bus:
        for number in range(60):
            address = bus.path + ("-none" if number % 3 == 2 else "")
            client = Client(address, reconnect=number % 3 > 0)
            with contextlib.ExitStack() as stack:
                for call in calls:
                    stack.enter_context(beside(work, client, *call))
                stack.callback(client.close)
            assert open_numbers() == before


# ---- What a client owns ends with it, not with its object


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_half_made_client(kind: type[Client]) -> None:
    """To close or to drop a half-made client is no error."""
    client = kind.__new__(kind)
    for _ in range(2):
        client.close()
    assert client.closed


def test_buffer_that_is_too_large() -> None:
    """A constructor that fails has no descriptor either."""
    before = open_numbers()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), limits[1]))
    try:
        with pytest.raises(SbusError, match="can get no memory"):
            Client(packet_bytes_max=1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert open_numbers() == before


# ---- Forks, at any moment


@pytest.mark.parametrize("name", ["receive", "sync", "request", "fileno"])
def test_fork_at_any_moment(name: str) -> None:
    """In the child, a call that a handler interrupts raises, and touches
    no file that the handler opens.
    """

    def fork() -> None:
        children.append(os.fork())
        if not children[0]:
            files.open()

    files = Files()
    before = open_numbers()
    for moment in range(0, 100_000, 7):
        children: list[int] = []
        try:
            with both_ends(Client) as (client, _):
                with contextlib.suppress(TimedOut), interrupted(moment, fork):
                    WAITS[name](client)
                if children == [0]:
                    client.receive(0)  # the call was over already
                elif name == "fileno":
                    assert not select.select([client], [], [], 0)[0]
        except Disconnected as error:
            assert "which forked" in str(error) and children == [0]
            files.close()
            assert open_numbers() <= before
            os._exit(0)
        finally:
            if children == [0]:
                os._exit(1)
        if not children:
            break
        assert os.waitpid(children[0], 0)[1] == 0
    assert moment > 200


def test_fork_while_a_call_waits() -> None:
    """A call that waits ends in the child."""

    def fork(*_: object) -> None:
        children.append(os.fork())
        if not children[0]:
            signal.alarm(9)  # which kills it

    def interrupt() -> None:
        wait_for(lambda: sleeps(tid))
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        wait_for(lambda: children)
        assert os.waitpid(children[0], 0)[1] == 0
        ends.server.send(publish(b"k"))

    tid = threading.get_native_id()
    children: list[int] = []
    before = signal.signal(SIGNAL, fork)
    with both_ends(Client) as ends, beside(interrupt):
        try:
            ends.client.receive(SECONDS_MAX)
        except Disconnected:
            os._exit(bool(children[0]))
    signal.signal(SIGNAL, before)


def test_other_hooks(bus: RealBus) -> None:
    """A hook that runs before ours may close the parent's client, and
    make a client for the child.
    """
    program = """
import os, sys
def hook():
    global client
    client.close()
    client = sbus_client.Client(sys.argv[1])
os.register_at_fork(after_in_child=hook)
import sbus_client
client = sbus_client.Client(sys.argv[1])
child = os.fork()
client.sync(99)
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""
    command = [sys.executable, "-c", program, bus.path]
    subprocess.run(command, env=IMPORTING, check=True)


# ---- A client that a program forgets to close


def test_descriptors(bus: RealBus) -> None:
    """Descriptors of a dropped client are closed at once, without the
    collector of cycles.
    """

    def use() -> None:
        client = Client(bus.path)
        client.fileno()
        client.subscribe("k")
        with pytest.raises(TimedOut):
            client.request("nobody", b"", 0.001)

    async def use_async() -> None:
        client = AsyncClient(bus.path)
        await client.connect()
        await client.whoami()
        with pytest.raises(TimedOut):
            await client.receive(0.001)

    gc.collect()
    gc.disable()
    loop = asyncio.new_event_loop()
    try:
        with warnings.catch_warnings(), contextlib.closing(loop):
            warnings.simplefilter("ignore", ResourceWarning)
            for run in use, lambda: loop.run_until_complete(use_async()):
                counts = set()
                for _ in range(5):
                    run()
                    counts.add(len(open_numbers()))
                assert len(counts) == 1
    finally:
        gc.enable()


# ---- What does not cost more where there is more of it


def test_requests_in_flight(bus: RealBus) -> None:
    """First requests share one subscription to their answers.  An answer
    wakes the task that it is for, and no other.
    """

    async def effort(count: int) -> float:
        async with AsyncClient(bus.path) as client:
            calls = [
                client.request("job", b"x", SECONDS_MAX) for _ in range(count)
            ]
            with counted() as efforts:
                assert await asyncio.gather(*calls) == [b"x"] * count
        return sum(efforts.values()) / count

    with serving(bus, "job"):
        alone, many = (asyncio.run(effort(count)) for count in (10, 1_100))
    assert many < 1.5 * alone


def test_each_call_waits_once() -> None:
    """A call is not woken once more for the answer to the call before."""
    efforts = set()

    def answer() -> None:
        assert server.receive() == WHOAMI
        wait_for(lambda: sleeps(tid))
        server.send(ANSWER)

    tid = threading.get_native_id()
    with both_ends(Client) as (client, server):
        for _ in range(5):
            with beside(answer), counted() as calls:
                client.sync(SECONDS_MAX)
            efforts.add(sum(calls.values()))
    assert len(efforts) == 1


def test_second_loop(bus: RealBus) -> None:
    """An AsyncClient says so, once it waits there."""

    async def receive() -> None:
        await client.connect()
        await client.receive(0.001)

    client = AsyncClient(bus.path)
    with pytest.raises(TimedOut):
        asyncio.run(receive())
    with pytest.raises(SbusError, match="belongs to another event loop"):
        asyncio.run(receive())
    client.close()


OWN = (os.getgid(), os.getuid(), os.getpid())


# ---- What wakes a call, and a program


@pytest.mark.parametrize("timeout", [None, 2e6, 1e10, float("inf")])
def test_timeouts(ends: Ends, timeout: float | None) -> None:
    """No time-out is over early, and one may be longer than the kernel's."""
    client, server = ends
    start = time.monotonic()
    for short in (0, 0.02):
        with pytest.raises(TimedOut, match="nothing came at") as caught:
            client.receive(short)
        assert isinstance(caught.value, SbusError)
        assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - start >= 0.02
    with beside(client.receive, timeout, asleep=True) as received:
        server.send(b"MSG k\0v")
    assert received.result() == (b"k", b"v")


# ---- whoami, sync and stats


def test_control_in_another_thread(bus: RealBus) -> None:
    """[CRED-12] Each answer is received, and a later one is not mixed up with
    them, wherever one thread takes the turn of the other.
    """

    def ask() -> None:
        for _ in range(10_000):
            client.control("!/cred/whoami")

    with quick_switches(), Client(bus.path) as client, beside(ask):
        for _ in range(10_000):
            assert client.receive(SECONDS_MAX).payload
        assert client.whoami(SECONDS_MAX)[:3] == OWN


def test_too_much_beside_an_answer(ends: Ends) -> None:
    """Messages that are kept have a bound, and are not lost above it."""
    packets = [publish(b"%d" % n, bytes(100_000)) for n in range(700)]
    with beside(ends.server.send, *packets):
        for _ in range(2):
            with pytest.raises(SbusError, match="receive them first"):
                ends.client.sync(SECONDS_MAX)
        for number in range(len(packets)):
            assert ends.client.receive(SECONDS_MAX)[0] == b"%d" % number


# ---- Requests, their answers, and what is neither


def test_proof_of_identity(bus: RealBus) -> None:
    """[CRED-10] [CRED-11] The program beside chapter 4: each learns who the
    other is.
    """
    text = (ROOT / "spec/examples/4-secret-messages.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    proof: dict[str, Any] = dict(vars(sbus_client))
    exec(example, proof)
    with Client(bus.path) as client, Client(bus.path) as service:
        asker = service.whoami(SECONDS_MAX)
        service.subscribe("service")
        service.sync(SECONDS_MAX)

        with beside(
            lambda: proof["verify"](service, service.receive())
        ) as done:
            assert proof["prove"](client, "service")[:3] == OWN
        assert done.result() == asker


CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("receive", "sync", "stats"), ()),
    **dict.fromkeys(("publish", "subscribe"), ("k",)),
    "control": ("stats",),
    "request": ("k", b"", None),
}
WAITED_FOR = [
    *[("the bus", name) for name in CALLS if name != "subscribe"],
    *[("room", name) for name in CALLS],
    *[("an answer", name) for name in ("sync", "stats", "request")],
]


# ---- close, before a call and beside it


def test_calls_after_close(ends: Ends) -> None:
    """All calls raise the same after close, whatever was kept; close does
    nothing.
    """
    client, server = ends
    server.send(b"MSG k\0v", ANSWER)
    client.sync(0)
    for name, arguments in CALLS.items():
        client.close()
        with pytest.raises(Disconnected, match=CLOSED):
            getattr(client, name)(*arguments)
    assert server.receive() == WHOAMI and server.is_disconnected()


@pytest.mark.parametrize("reason, name", WAITED_FOR)
def test_close_wakes(
    directory: Path, reason: str, name: str, monkeypatch: Any
) -> None:
    """A thread that waits, whatever it waits for, and however long."""
    monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS", 999)
    with contextlib.ExitStack() as stack:
        if reason == "the bus":
            client = Client(str(directory / "bus"), reconnect=True)
        else:
            client, _ = stack.enter_context(both_ends(Client))
            if reason == "room":
                fill(client)
        call = getattr(client, name)
        stack.enter_context(pytest.raises(Disconnected, match=CLOSED))
        with beside(call, *CALLS[name], asleep=True) as waiting:
            assert not waiting.done()
            client.close()
    assert client.fileno() == -1


# ---- A child process has the parent's client, and may not use it


def test_child(bus: RealBus, kind: Kind) -> None:
    """[CONN-6] What was published last is delivered.  A child process may not
    use the client, and does not end the connection of its parent.

    The child has no descriptor of a client, though a thread of the parent
    waits.
    """

    def use_in_child() -> None:
        text = f"client belongs to process {os.getppid()}, which forked:"
        with pytest.raises(Disconnected, match=f"{text} make one in each"):
            client.publish("k", b"of the child")
        assert kind is not Client or open_numbers() <= before
        client.close()

    with bus.connect() as peer:
        peer.send(b"SUB k")
        peer.fence()
        before = open_numbers()
        with kind(bus.path) as client, contextlib.ExitStack() as stack:
            if kind is Client:
                client.subscribe("k")
                waits = beside(client.receive, SECONDS_MAX, asleep=True)
                stack.enter_context(waits)
            assert in_child(use_in_child)
            client.publish("k", b"first")
        client = kind(bus.path)
        client.publish("k", b"last")
        client.close()
        packets = [peer.receive() for _ in range(2)]
        assert packets == [b"MSG k\0first", b"MSG k\0last"]
