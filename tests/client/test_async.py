"""Tests of AsyncClient where several tasks use it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from client_ends import beside, fill, open_numbers, sleeps
from packets import ANSWER, WHOAMI, publish
from processes import SECONDS_MAX
from real_bus import Listener, Peer, RealBus, seqpacket_pair, wait_for
from sbus_client import (
    AsyncClient,
    Client,
    Disconnected,
    Reconnected,
    SbusError,
)
from sizes import either

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


class Tasks:
    """Tasks that share a client, and what its server is to send."""

    def __init__(self, client: AsyncClient, server: Peer, seed: int) -> None:
        self.client = client
        self.server = server
        self.dice = random.Random(seed)
        self.results: dict[asyncio.Task[Any], bytes] = {}
        self.receivers: list[asyncio.Task[Any]] = []
        self.sent: list[bytes] = []
        self.questions: list[bytes] = []  # in order, as their answers come
        self.requests: list[bytes] = []

    async def act(self, text: bytes) -> None:
        """Do something at random; a text tells it from all else."""
        action = self.dice.randrange(7)
        tasks = [*self.results, *self.receivers]
        if action == 0:
            task = asyncio.ensure_future(self.client.receive())
            self.receivers.append(task)
        elif action == 1:
            path = b"!/cred/1/2/" + text
            self.results[await waiting(self.client.whoami())] = path
            assert self.server.receive() == WHOAMI
            self.questions.append(WHOAMI + b"\0" + path)
        elif action == 2:
            work = self.client.request("job", text, None)
            self.results[await waiting(work)] = text
            reply_key = self.server.receive().split(b"\0")[1]
            self.requests.append(publish(reply_key, text))
        elif action == 3:
            self.sent.append(text)
            self.server.send(publish(b"k", text))
        elif action == 4 and self.questions:
            self.server.send(self.questions.pop(0))
        elif action == 5 and self.requests:
            index = self.dice.randrange(len(self.requests))
            self.server.send(self.requests.pop(index))
        elif action == 6 and tasks:
            self.dice.choice(tasks).cancel()
        for _ in range(self.dice.randrange(4)):  # the loop may have seen it
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Check all that has come, and what is left over."""
        self.server.send(*self.questions, *self.requests)
        for task, expected in self.results.items():
            with contextlib.suppress(asyncio.CancelledError):
                result = await task
                assert getattr(result, "path", result) == expected
        heard = [
            task.result().payload
            for task in self.receivers
            if not await cancelled(task)
        ]
        with pytest.raises(TimeoutError):
            while True:
                heard.append((await self.client.receive(0)).payload)
        assert sorted(heard) == sorted(self.sent)


@pytest.mark.parametrize("seed", range(either(300, 5)))
@in_loop
async def test_random_tasks(seed: int) -> None:
    """[CRED-10] [CRED-12] Whatever is cancelled at what moment, each message
    goes to one task, and each question and each request has its own answer.
    """
    async with async_ends() as (client, server):
        server.send(ANSWER)  # only the first request asks whose it is
        with pytest.raises(TimeoutError):
            await client.request("job", timeout=0.001)
        assert [server.receive() for _ in range(3)]
        tasks = Tasks(client, server, seed)
        for number in range(200):
            await tasks.act(b"%d" % number)
        await tasks.end()


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


# ---- close, wherever and whenever it is called


@pytest.mark.parametrize("is_in_handler", [False, True])
@in_loop
async def test_beside_the_loop(is_in_handler: bool) -> None:
    """close in another thread or in a signal handler wakes a loop that sleeps,
    and its tasks learn of it.
    """
    tid = threading.get_native_id()

    def close() -> None:
        wait_for(lambda: sleeps(tid))
        if is_in_handler:
            main = threading.main_thread().ident or 0
            signal.pthread_kill(main, signal.SIGUSR1)
        else:
            client.close()

    async with async_ends() as (client, server):
        before = signal.signal(signal.SIGUSR1, lambda *_: client.close())
        with (
            pytest.raises(Disconnected, match="this client is closed"),
            beside(close),
        ):
            await client.receive(SECONDS_MAX)
        signal.signal(signal.SIGUSR1, before)
        assert server.is_disconnected()


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
