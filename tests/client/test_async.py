"""Tests of AsyncClient where several tasks use it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from client_ends import beside, fill, open_numbers, sleeps
from packets import ANSWER, WHOAMI
from processes import SECONDS_MAX
from real_bus import Listener, Peer, RealBus, seqpacket_pair, wait_for
from sbus_client import (
    AsyncClient,
    Client,
    Disconnected,
    Reconnected,
    SbusError,
    parse_request,
)

Work = Coroutine[Any, Any, Any]


def in_loop(test: Callable[..., Work]) -> Callable[..., None]:
    """Run a test in an event loop; nothing of it may be left over."""

    @functools.wraps(test)
    def run_test(*given: Any, **named: Any) -> None:
        work = asyncio.wait_for(test(*given, **named), SECONDS_MAX)
        asyncio.run(work, debug=True)

    return run_test


async def waiting(work: Work) -> asyncio.Task[Any]:
    """Return a task that has begun to wait."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def cancelled(task: asyncio.Task[Any]) -> bool:
    """Cancel a task; return whether it had nothing to return yet."""
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    return isinstance(results[0], asyncio.CancelledError)


@contextlib.asynccontextmanager
async def async_ends() -> AsyncIterator[tuple[AsyncClient, Peer]]:
    """Give a client, and the other end of its socket."""
    ours, theirs = seqpacket_pair()
    with Peer(theirs) as server:
        async with AsyncClient(f"/dev/fd/{ours.detach()}") as client:
            yield client, server


# ---- Several tasks, some of which are cancelled


@pytest.mark.parametrize("turns", range(4))
@in_loop
async def test_cancelled_receive(turns: int) -> None:
    """A message that comes at the moment of the cancellation goes to another
    task.
    """
    async with async_ends() as (client, server):
        first, second = [await waiting(client.receive()) for _ in "12"]
        with pytest.raises(TimeoutError):
            await client.receive(0.001)
        server.send(b"MSG k\0v")
        for _ in range(turns):  # the loop may have seen it
            await asyncio.sleep(0)
        is_second = await cancelled(first)
        assert await (second if is_second else first) == (b"k", b"v")
        assert is_second or await cancelled(second)
        with pytest.raises(TimeoutError):
            await client.receive(0)


@in_loop
async def test_cancelled_publish() -> None:
    """A cancelled call sends nothing, and does not hold up another call."""
    async with async_ends() as (client, server):
        count = fill(client)
        tasks = [await waiting(client.publish(key)) for key in ("1", "2")]
        assert await cancelled(tasks[0])
        assert {server.receive() for _ in range(count)} == {b"MSG k\0"}
        await tasks[1]
        assert server.receive() == b"MSG 2\0"


@pytest.mark.parametrize("place", [0, 3])
@in_loop
async def test_questions(place: int) -> None:
    """[CRED-12] Each question has its own answer, and a receiver the message.
    The answer to a cancelled question is dropped.
    """
    async with async_ends() as (client, server):
        works: list[Work] = [client.whoami() for _ in "123"]
        works.insert(place, client.receive())
        tasks = [await waiting(work) for work in works]
        receiving = tasks.pop(place)
        assert await cancelled(tasks[1])
        server.send(*[WHOAMI + b"\0!/cred/1/2/%d" % n for n in range(2)])
        assert (await tasks[0]).pid == 0
        server.send(b"MSG k\0v")
        assert await receiving == (b"k", b"v")
        assert not tasks[2].done()
        server.send(ANSWER)
        assert (await tasks[2]).pid == 4242


@in_loop
async def test_close_and_the_end() -> None:
    """Tasks that wait learn that the client is closed, or that the server has
    gone.  The loop then watches nothing, as the next client may have the same
    descriptor.
    """
    for closes in True, False:
        error = "^this client is closed" if closes else "its log names pid"
        async with async_ends() as (client, server):
            asking = await waiting(client.stats())
            fill(client)
            publishing = await waiting(client.publish("k"))
            receiving = await waiting(client.receive())
            client.close() if closes else server.wire.close()
            for task in asking, publishing, receiving:
                with pytest.raises(Disconnected, match=error):
                    await task


@in_loop
async def test_turns() -> None:
    """Other tasks have turns beside calls that need not wait.  The loop
    watches nothing that nobody waits for, which would keep it busy.
    """
    loop, turns = asyncio.get_running_loop(), list[int]()
    async with async_ends() as (client, server):
        loop.call_soon(turns.append, 1)
        for _ in range(100):
            await client.publish("k")
            server.send(*[server.receive()] * 2)
        assert turns == [1]
        loop.call_soon(turns.append, 2)
        for _ in range(100):
            await client.receive()
        server.send(ANSWER)
        loop.call_soon(turns.append, 3)
        await client.sync()  # a hundred messages come before its answer
        assert turns == [1, 2, 3]
        for _ in range(100):
            await client.receive(0)
        assert await cancelled(await waiting(client.receive(9)))
        server.send(b"MSG k\0v")
        await asyncio.sleep(0.01)
        assert not loop.remove_reader(client.socket.fileno())


@in_loop
async def test_many_requests(bus: RealBus) -> None:
    """[CRED-10] Each request has its own answer, in any order, beside a task
    that receives.  The answer to a cancelled request is dropped.
    """
    async with (
        AsyncClient(bus.path) as client,
        AsyncClient(bus.path) as service,
    ):
        await service.subscribe("service")
        await service.sync()
        receiving = await waiting(client.receive())
        texts = [b"%d" % number for number in range(300)]
        works = [client.request("service", text, None) for text in texts]
        tasks = [asyncio.ensure_future(work) for work in works]
        requests = [parse_request(await service.receive()) for _ in texts]
        assert await cancelled(tasks.pop())
        for asked in filter(None, reversed(requests)):
            await service.reply(asked, asked.payload)
        assert await asyncio.gather(*tasks) == texts[:-1]
        assert await cancelled(receiving)


# ---- close, wherever and whenever it is called


@pytest.mark.parametrize("closer", ["another thread", "signal handler"])
def test_beside_the_loop(closer: str) -> None:
    """close wakes a loop that sleeps, and its tasks learn of it."""
    tid = threading.get_native_id()

    def close() -> None:
        wait_for(lambda: sleeps(tid))
        if closer == "signal handler":
            main = threading.main_thread().ident or 0
            signal.pthread_kill(main, signal.SIGUSR1)
        else:
            client.close()

    async def receive() -> None:
        await client.connect()
        with beside(close):
            await client.receive(SECONDS_MAX)

    ours, theirs = seqpacket_pair()
    client = AsyncClient(f"/dev/fd/{ours.detach()}")
    before = signal.signal(signal.SIGUSR1, lambda *_: client.close())
    with Peer(theirs) as server:
        with pytest.raises(Disconnected, match="this client is closed"):
            asyncio.run(receive())
        assert server.is_disconnected()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("waits_for", ["a message", "room", "a bus"])
def test_after_the_loop(directory: Path, waits_for: str) -> None:
    """close leaves the bus at once, though a task of that loop waited."""

    async def wait() -> asyncio.Task[Any]:
        await client.connect()
        if waits_for == "room":
            fill(client)
            return await waiting(client.publish("k"))
        return await waiting(client.sync())

    async def close_again() -> None:
        await client.close()  # as users of other libraries do

    ours, theirs = seqpacket_pair()
    with Peer(theirs) as server:
        if waits_for == "a bus":
            client = AsyncClient(str(directory / "bus"), reconnect=True)
            ours.close()
        else:
            client = AsyncClient(f"/dev/fd/{ours.detach()}")
        loop = asyncio.new_event_loop()
        task = loop.run_until_complete(wait())
        loop.close()
        client.close()
        assert client.socket.fileno() == -1 and client.closed
        assert server.receive_all()[-1:] in ([], [WHOAMI], [b"MSG k\0"])
    asyncio.run(close_again())
    task.get_coro().close()
    loop.call_exception_handler = lambda _: None  # type: ignore


@in_loop
async def test_question_that_nobody_waits_for() -> None:
    """The loop does not read on into memory for a question that is over."""
    async with async_ends() as (client, server):
        for call in client.stats, client.request:
            given = ("k",) if call == client.request else ()
            with pytest.raises(TimeoutError):
                await call(*given, timeout=0.001)  # type: ignore
        server.send(b"MSG k\0first", b"MSG k\0second")
        for _ in range(5):
            await asyncio.sleep(0)
        peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
        assert client.socket.recv(99, peek) == b"MSG k\0first"


def test_without_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another library's loop, or a Python without it, the error says
    so.
    """
    with pytest.raises(SbusError, match="for asyncio, and no loop"):
        AsyncClient("/dev/null").connect().send(None)
    monkeypatch.setitem(sys.modules, "asyncio", None)
    with pytest.raises(SbusError, match="python3-asyncio"):
        AsyncClient("/dev/null")


# ---- Finding a bus, and another one, beside other tasks


@in_loop
async def test_not_connected(directory: Path) -> None:
    """A client that never was, or failed to be, says so; a connect that
    is cancelled leaves nothing open.
    """
    path = str(directory / "bus")
    client = AsyncClient(path)
    with pytest.raises(Disconnected, match="nothing is there"):
        await client.connect()
    with Listener(path, backlog=0).wire, Client(path):
        before = open_numbers()
        assert await cancelled(await waiting(client.connect()))
        assert open_numbers() == before
    for unconnected in client, AsyncClient(path):
        calls = unconnected.publish, unconnected.subscribe, unconnected.request
        for call in calls:
            with pytest.raises(Disconnected, match="not connected: use"):
                await call("k")
    os.unlink(path)
    with RealBus(directory):
        assert await client.connect() is client
        await client.sync()
    client.close()
    with pytest.raises(Disconnected, match="client is closed"):
        await client.connect()


@in_loop
async def test_tasks_while_there_is_no_bus(directory: Path) -> None:
    """A question is to be asked again; all else goes on with the next
    bus, also after some gave up, or is told that the client is closed.
    """
    path = str(directory / "bus")
    async with AsyncClient(path, reconnect=True) as client:
        await client.subscribe("k")
        receiving = await waiting(client.receive())
        for _ in range(3):
            with RealBus(directory):
                assert type(await receiving) is Reconnected
                asking = await waiting(client.request("k", timeout=None))
                assert (await client.receive()).key == b"k"  # it is out
                receiving = await waiting(client.receive())
            with pytest.raises(Disconnected, match="ask again"):
                await asking
            assert await cancelled(receiving)
            for _ in range(3):
                with pytest.raises(TimeoutError, match="there is no bus"):
                    await client.receive(0.01)
            await asyncio.sleep(0.01 + (client.retry_in() or 0))
            receiving = await waiting(client.receive())
        publishing = await waiting(client.publish("k"))
        client.close()
        for task in receiving, publishing:
            with pytest.raises(Disconnected, match="client is closed"):
                await task
