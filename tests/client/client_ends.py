"""Clients whose other end the test holds, and both kinds of client as one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import pytest

from packets import publish
from processes import SECONDS_MAX
from real_bus import Peer, RealBus, seqpacket_pair, wait_for
from sbus_client import (
    AsyncClient,
    Client,
    Disconnected,
    Received,
    parse_request,
)

Done = TypeVar("Done")
Kind = Callable[..., Client]


class Blocking:
    """An AsyncClient whose calls wait, as those of Client do."""

    def __init__(self, address: str | None = None, **options: Any) -> None:
        self.wrapped = AsyncClient(address, **options)
        self.loop = asyncio.new_event_loop()
        try:
            self.loop.run_until_complete(self.wrapped.connect())
        except BaseException:
            self.__exit__()
            raise

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.wrapped, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        run = self.loop.run_until_complete
        return lambda *given, **named: run(attribute(*given, **named))

    def __iter__(self) -> Iterator[Received]:
        following = self.wrapped.__aiter__()
        while True:
            yield self.loop.run_until_complete(following.__anext__())

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *_: object) -> None:
        self.wrapped.close()
        self.loop.close()


@pytest.fixture(params=[Client, Blocking], ids=["Client", "AsyncClient"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each test of this is run with both kinds of client."""
    return cast(Kind, request.param)


class Ends(NamedTuple):
    """A client, and the other end of its socket."""

    client: Client
    server: Peer


@contextlib.contextmanager
def both_ends(kind: Kind, **options: Any) -> Iterator[Ends]:
    """Give a client whose server is the test."""
    ours, theirs = seqpacket_pair()
    address = f"/dev/fd/{ours.detach()}"
    with Peer(theirs) as server, kind(address, **options) as client:
        yield Ends(client, server)


@pytest.fixture
def ends(kind: Kind) -> Iterator[Ends]:
    with both_ends(kind) as both:
        yield both


def fill(client: Client | AsyncClient, payload_bytes: int = 0) -> int:
    """Publish until the kernel takes no more; return how many it took."""
    packet, count = publish(b"k", bytes(payload_bytes)), 0
    with contextlib.suppress(BlockingIOError):
        while client.socket.send(packet, socket.MSG_DONTWAIT):
            count += 1
    return count


@contextlib.contextmanager
def beside(
    work: Callable[..., Done], *arguments: object, asleep: bool = False
) -> Iterator[Future[Done]]:
    """Do some work in another thread, and go on, perhaps once it waits.

    In the end, raise what it raises.
    """
    tids: list[int] = []

    def noted() -> Done:
        tids.append(threading.get_native_id())
        return work(*arguments)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(noted)
        wait_for(lambda: not asleep or (tids and sleeps(tids[0])))
        yield done
        done.result(SECONDS_MAX)


@contextlib.contextmanager
def serving(bus: RealBus, key: str, times: int = 1) -> Iterator[None]:
    """Answer requests with their own payloads, so many times in a row."""

    def serve() -> None:
        with contextlib.suppress(Disconnected):
            for message in service:
                if asked := parse_request(message):
                    service.reply(asked, times * asked.payload)

    with Client(bus.path) as service:
        service.subscribe(key)
        service.sync(SECONDS_MAX)
        with beside(serve):
            try:
                yield
            finally:
                service.close()


def in_child(work: Callable[[], object]) -> bool:
    """Do some work in a child process; return whether it succeeds."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return not os.waitpid(child, 0)[1]


def open_numbers() -> set[str]:
    """Return the numbers of the descriptors that are open."""
    numbers = os.listdir("/proc/self/fd")
    return {
        number for number in numbers if os.path.exists(f"/dev/fd/{number}")
    }


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def sleeps(tid: int) -> bool:
    """Return whether a thread of ours sleeps in the kernel."""
    stat = Path(f"/proc/self/task/{tid}/stat").read_text("utf-8")
    return stat.rpartition(")")[2].split()[0] == "S"


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of functions of this thread."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
