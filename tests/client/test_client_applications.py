"""Tests of the client in programs: event loops, threads, asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

import sbus_client
from client_ends import Ends, fill
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications
from processes import ROOT, SECONDS_MAX
from real_bus import Listener, Peer, RealBus, seqpacket_pair
from sbus_client import (
    PACKET_BYTES_MAX,
    AsyncClient,
    Client,
    Credentials,
    Disconnected,
    Message,
    PacketError,
    PacketTooLarge,
    Received,
    Reconnected,
    TooMuchKept,
    owner_of,
    parse_request,
    requests,
)

Work = Callable[[], object]


@contextlib.contextmanager
def beside(work: Work) -> Iterator[None]:
    """Do some work in another thread; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result(SECONDS_MAX)


def proof_of_identity() -> Any:
    """Return the functions of the program beside chapter 4."""
    file = ROOT / "spec/examples/4-secret-messages.md"
    (example,) = re.findall(r"```python\n(.*?)```", file.read_text(), re.S)
    module = types.ModuleType("proof")
    vars(module).update(vars(sbus_client))
    exec(example, vars(module))
    return module


PROOF = proof_of_identity()


class TestApplications:
    """request and reply, and the proof of identity of chapter 4."""

    @pytest.fixture
    def two(self, bus: RealBus) -> Iterator[tuple[Client, Client]]:
        """Two clients; the second listens to `service`."""
        with Client(bus.path) as one, Client(bus.path) as other:
            other.subscribe("service")
            other.sync()
            yield one, other

    def test_server_that_goes_away(self, ends: Ends) -> None:
        """The error is that of the server, not of what comes after it."""
        ends.server.send(ANSWER)
        ends.server.wire.shutdown(socket.SHUT_WR)
        with pytest.raises(Disconnected):
            ends.client.request("service", timeout=SECONDS_MAX)

    def test_server_that_goes_away_for_long(self, listener: Listener) -> None:
        """A client that reconnects waits for it no longer than it is told."""

        def serve() -> None:
            with listener.accept() as server:
                listener.wire.close()
                server.receive()
                server.send(ANSWER)
                assert server.receive().startswith(b"SUB ")
                assert server.receive().startswith(b"MSG ")

        with Client(listener.path, reconnect=True) as client:
            with beside(serve), pytest.raises(TimeoutError):
                client.request("service", timeout=2)
            assert not client._kept

    def test_request(self, two: tuple[Client, Client]) -> None:
        """[CRED-10] The answer comes under a private key."""
        one, other = two

        def serve() -> None:
            asked = parse_request(other.receive(SECONDS_MAX))
            path = other.whoami(SECONDS_MAX).path
            assert asked.reply_key.startswith(path + b"/")  # one process
            assert asked[:2] == (b"service", b"1\0002")
            other.reply(asked, b"answer")

        with beside(serve):
            answer = one.request("service", b"1\0002", SECONDS_MAX)
        assert answer == b"answer"
        assert one._patterns == {}

    def test_requests(self, two: tuple[Client, Client]) -> None:
        """What is no request is left out, and ends no service."""
        one, other = two

        def serve() -> None:
            other.reply(next(requests(other)), b"answer")

        one.publish("service", b"no request")
        one.publish("service", b"!/cred/x\0no request")
        with beside(serve):
            assert one.request("service", timeout=SECONDS_MAX) == b"answer"

    @pytest.mark.parametrize(
        "key", [b"!/cred/1/2/3/x", b"!/cred/1/2/3/!/cred/4/5/6/x/y//z"]
    )
    def test_owner(self, key: bytes) -> None:
        """[CRED-10] Of any key below one's own credentials."""
        asked = parse_request(Message(b"k", key + b"\0"))
        assert asked.reply_key == key
        nested = key.count(b"cred") > 1
        assert owner_of(key)[:3] == ((4, 5, 6) if nested else (1, 2, 3))

    def test_request_that_nobody_answers(
        self, two: tuple[Client, Client]
    ) -> None:
        """A late answer is not taken for that to another request."""
        one, other = two
        late: list[Received] = []
        timeout = 0.01
        while not late:  # until it asks before its time is over
            with pytest.raises(TimeoutError):
                one.request("service", timeout=timeout)
            one.sync()
            other.sync()
            with contextlib.suppress(TimeoutError):
                while True:
                    late.append(other.receive(0))
            timeout *= 2
        other.reply(parse_request(late[-1]), b"late")
        with beside(
            lambda: other.reply(
                parse_request(other.receive(SECONDS_MAX)), b"right"
            )
        ):
            assert one.request("service", timeout=SECONDS_MAX) == b"right"

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"!/cred/1/2/3/x",
            b"a\0",
            b"!/cred/1/2/3\0",
            b"!/cred/1/2/3/\0",
            b"x/!/cred/1/2/3/y\0",
        ],
    )
    def test_message_that_is_no_request(self, payload: bytes) -> None:
        """[CRED-10] An answer goes to a secret key and nowhere else."""
        with pytest.raises(PacketError):
            parse_request(Message(b"k", payload))

    def test_proof_of_identity(self, two: tuple[Client, Client]) -> None:
        """[CRED-10] [CRED-11] Each learns who the other is."""
        one, other = two
        found = []

        def verify() -> None:
            message = other.receive(SECONDS_MAX)
            found.append(PROOF.verify(other, message))

        with beside(verify):
            found.append(PROOF.prove(one, "service"))
        assert found == [one.whoami(), other.whoami()]

    def test_liar_who_cannot_read(self, two: tuple[Client, Client]) -> None:
        """[CRED-11] Who names another's key does not hear the challenge."""
        one, other = two
        one.publish("service", b"!/cred/0/0/1/x\0")
        message = other.receive(SECONDS_MAX)
        with pytest.raises(TimeoutError):
            PROOF.verify(other, message, 0.05)

    @pytest.mark.parametrize("fault", ["challenge", "owner"])
    def test_liar_who_proves(
        self, two: tuple[Client, Client], fault: str
    ) -> None:
        """[CRED-11] A wrong text, or another's key, is no proof."""
        one, other = two

        def lie() -> None:
            own = one.whoami(SECONDS_MAX).path + b"/x"
            one.subscribe(own)
            one.publish("service", own + b"\0")
            key, _, text = one.receive(SECONDS_MAX).payload.partition(b"\0")
            text = bytes(16) if fault == "challenge" else text
            own = own if fault == "challenge" else b"!/cred/0/0/1/x"
            one.publish(key, own + b"\0" + bytes(16) + text)

        with beside(lie), pytest.raises(ValueError, match="cannot read"):
            message = other.receive(SECONDS_MAX)
            PROOF.verify(other, message)

    def test_liar_who_verifies(self, two: tuple[Client, Client]) -> None:
        """[CRED-11] A wrong text is no proof of the one that was asked."""
        one, other = two

        def lie() -> None:
            first = parse_request(other.receive(SECONDS_MAX))
            own = other.whoami(SECONDS_MAX).path + b"/x"
            other.subscribe(own)
            other.reply(first, own + b"\0challenge")
            third = parse_request(other.receive(SECONDS_MAX))
            other.reply(third, b"wrong")

        with beside(lie), pytest.raises(ValueError, match="cannot read"):
            PROOF.prove(one, "service")

    def test_too_much_beside_an_answer(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is kept has a bound, and is not lost above it."""
        monkeypatch.setattr(sbus_client, "KEPT_BYTES_MAX", 3_000)
        ends.server.send(*publications(20), ANSWER)
        for _ in range(2):
            with pytest.raises(TooMuchKept, match="receive them before"):
                ends.client.sync(0)
        kept = len(ends.client._kept)
        assert kept == 13
        received = [ends.client.receive(0) for _ in range(20)]
        assert [one.payload for one in received] == [
            b"%d" % number for number in range(20)
        ]

    def test_receive_where(self, ends: Ends) -> None:
        """The first that is wanted, kept or new; the others stay in order."""
        ends.server.send(*publications(3), ANSWER, *publications(2))
        ends.client.sync(0)

        def is_one(received: Received) -> bool:
            return received.payload == b"1"

        for _ in range(2):
            assert ends.client.receive_where(is_one, 0) == (b"k", b"1")
        with pytest.raises(TimeoutError):
            ends.client.receive_where(is_one, 0)
        left = [ends.client.receive(0).payload for _ in range(3)]
        assert left == [b"0", b"2", b"0"]


class AsyncEnds(NamedTuple):
    """A client for asyncio, and the other end of its socket."""

    client: AsyncClient
    server: Peer


@contextlib.asynccontextmanager
async def async_ends() -> AsyncIterator[AsyncEnds]:
    """Connect a client for asyncio with the test."""
    ours, theirs = seqpacket_pair()
    with Peer(theirs) as server:
        async with AsyncClient(fd=ours.detach()) as client:
            yield AsyncEnds(client, server)


async def fill_up(client: AsyncClient) -> int:
    """Publish until the kernel takes no more; return how many it took."""
    assert client._client
    return fill(client._client)


async def waiting(work: Coroutine[Any, Any, Done]) -> asyncio.Task[Done]:
    """Return a task that has begun to wait for its descriptor."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


Done = TypeVar("Done")
Test = TypeVar("Test", bound=Callable[..., Coroutine[Any, Any, None]])


def in_loop(test: Test) -> Callable[..., None]:
    """Run a test in an event loop; nothing of it may be left over."""

    @functools.wraps(test)
    def run_test(*arguments: Any, **names: Any) -> None:
        async def work() -> None:
            await asyncio.wait_for(test(*arguments, **names), SECONDS_MAX)

        asyncio.run(work(), debug=True)

    return run_test


class TestAsyncClient:
    """The same for asyncio."""

    @in_loop
    async def test_calls_send_what_those_of_client_do(self) -> None:
        """[SUB-1] [UNSUB-1] [PUB-1] [CTL-1] One packet for each call."""
        async with async_ends() as (client, server):
            await client.subscribe("é")
            await client.unsubscribe(b"\xff")
            await client.publish("k", bytearray(b"v"))
            await client.control("x", b"v")
            assert [server.receive() for _ in range(4)] == [
                b"SUB \xc3\xa9",
                b"UNSUB \xff",
                b"MSG k\0v",
                b"CMSG x\0v",
            ]

    @in_loop
    async def test_errors_are_those_of_client(self) -> None:
        """[KEY-1] [LIMIT-1] What is wrong is not sent."""
        async with async_ends() as (client, server):
            with pytest.raises(PacketError):
                await client.subscribe("a\0b")
            with pytest.raises(PacketTooLarge):
                await client.publish("k", bytes(PACKET_BYTES_MAX))
            with pytest.raises(TypeError):
                await client.publish("k", "text")  # type: ignore
            await client.publish("k", bytes(PACKET_BYTES_MAX - HEAD_BYTES))
            assert len(server.receive()) == PACKET_BYTES_MAX

    @in_loop
    async def test_receive_waits(self) -> None:
        """A message that comes later wakes the task."""
        async with async_ends() as (client, server):
            task = await waiting(client.receive())
            server.send(b"MSG k\0v")
            assert await task == (b"k", b"v")

    @in_loop
    async def test_timeout(self) -> None:
        """TimeoutError is Python's own; 0 takes what is there."""
        async with async_ends() as (client, server):
            start = time.monotonic()
            for timeout in (0, 0.01):
                with pytest.raises(TimeoutError):
                    await client.receive(timeout)
            assert time.monotonic() - start >= 0.01
            server.send(b"MSG k\0v")
            assert await client.receive(0) == (b"k", b"v")

    @in_loop
    async def test_cancelled_receive_loses_nothing(self) -> None:
        """What comes at the moment of the cancellation comes later."""
        async with async_ends() as (client, server):
            for number in range(3):
                task = await waiting(client.receive())
                server.send(b"MSG k\0%d" % number)
                for _ in range(number):  # the loop may have seen it
                    await asyncio.sleep(0)
                if not task.done():
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    received = await client.receive(0)
                else:
                    received = task.result()
                assert received == (b"k", b"%d" % number)
                with pytest.raises(TimeoutError):
                    await client.receive(0)

    @in_loop
    async def test_publish_waits_for_room(self) -> None:
        """Back-pressure: a publish awaits until the kernel takes it."""
        async with async_ends() as (client, server):
            count = await fill_up(client)
            task = await waiting(client.publish("last"))
            for _ in range(count):
                assert server.receive() == b"MSG k\0"
            await task
            assert server.receive() == b"MSG last\0"

    @in_loop
    async def test_cancelled_publish_sends_nothing(self) -> None:
        """What did not fit when it was cancelled is never sent."""
        async with async_ends() as (client, server):
            count = await fill_up(client)
            task = await waiting(client.publish("cancelled"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(count):
                server.receive()
            await client.publish("next")
            assert server.receive() == b"MSG next\0"

    @in_loop
    async def test_two_publishers_wait(self) -> None:
        """One that is cancelled does not take the other's event with it."""
        async with async_ends() as (client, server):
            count = await fill_up(client)
            one = await waiting(client.publish("one"))
            two = await waiting(client.publish("two"))
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
            for _ in range(count):
                server.receive()
            await two
            assert server.receive() == b"MSG two\0"

    @in_loop
    async def test_many_receivers(self) -> None:
        """Each message goes to one of the tasks that wait."""
        async with async_ends() as (client, server):
            tasks = [await waiting(client.receive()) for _ in range(5)]
            server.send(*publications(5))
            received = [(await task).payload for task in tasks]
            assert sorted(received) == [b"0", b"1", b"2", b"3", b"4"]

    @in_loop
    async def test_cancelled_receiver_beside_another(self) -> None:
        """What it was told of is received by the next."""
        async with async_ends() as (client, server):
            one, two = [await waiting(client.receive()) for _ in "12"]
            server.send(b"MSG k\0v")
            while not client._inbox:
                await asyncio.sleep(0)
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
            assert await two == (b"k", b"v")

    @in_loop
    async def test_timeout_beside_another_receiver(self) -> None:
        """One that gives up does not take the other's event with it."""
        async with async_ends() as (client, server):
            task = await waiting(client.receive())
            with pytest.raises(TimeoutError):
                await client.receive(0.001)
            server.send(b"MSG k\0v")
            assert await task == (b"k", b"v")

    @in_loop
    async def test_loop_watches_nothing_that_nobody_waits_for(self) -> None:
        """A descriptor that was left behind would keep the loop busy."""
        loop = asyncio.get_running_loop()
        async with async_ends() as (client, server):
            with pytest.raises(TimeoutError):
                await client.receive(0.001)
            task = await waiting(client.receive())
            server.send(b"MSG k\0v")
            await task
            assert not loop.remove_reader(client.fileno())
            task = await waiting(client.receive())
            task.cancel()
            server.send(b"MSG k\0v")
            for _ in range(3):
                await asyncio.sleep(0)
            assert not loop.remove_reader(client.fileno())
            assert await client.receive() == (b"k", b"v")
            count = await fill_up(client)
            task = await waiting(client.receive())
            publishing = await waiting(client.publish("k"))
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            for _ in range(count):
                server.receive()
            while client._room:
                await asyncio.sleep(0)
            assert not loop.remove_writer(client.fileno())
            fd = client.fileno()
            client.close()
            assert not loop.remove_reader(fd)
            with pytest.raises(Disconnected):
                await task

    @in_loop
    async def test_other_tasks_have_their_turn(self) -> None:
        """A task that never has to wait lets others run."""
        async with async_ends() as (client, server):
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            task = asyncio.ensure_future(other())
            for _ in range(2 * sbus_client.CALLS_PER_TURN):
                await client.publish("k")
                server.send(server.receive())
            assert turns
            turns = 0
            for _ in range(2 * sbus_client.CALLS_PER_TURN):
                await client.receive()
            assert turns
            task.cancel()

    @in_loop
    async def test_iteration_ends_in_disconnected(self) -> None:
        """[CLIENT-6] A loop takes every message, and ends in an error."""
        async with async_ends() as (client, server):
            await client.publish("k", b"never read")
            server.send(b"MSG k\0one", b"CMSG x\0two")
            server.wire.close()
            received = []
            with pytest.raises(Disconnected):
                async for message in client:
                    received.append(message)
            assert received == [(b"k", b"one"), (b"x", b"two")]
            with pytest.raises(Disconnected):
                await client.publish("k")

    @in_loop
    async def test_server_goes_while_a_task_waits(self) -> None:
        """Tasks that wait to receive and to publish are told."""
        async with async_ends() as (client, server):
            await fill_up(client)
            publishing = await waiting(client.publish("k"))
            receiving = await waiting(client.receive())
            server.wire.close()
            for task in (publishing, receiving):
                with pytest.raises(Disconnected, match="has closed"):
                    await task

    @in_loop
    async def test_close_while_tasks_wait(self) -> None:
        """Tasks that wait are told that the client is closed."""
        async with async_ends() as (client, _):
            await fill_up(client)
            publishing = await waiting(client.publish("k"))
            receiving = await waiting(client.receive())
            client.close()
            for task in (publishing, receiving):
                with pytest.raises(Disconnected, match="client is closed"):
                    await task
            for call in (client.receive, client.whoami, client.sync):
                with pytest.raises(Disconnected, match="client is closed"):
                    await call()
            client.close()
            assert client.fileno() == -1

    @in_loop
    async def test_close_while_a_task_asks(self) -> None:
        """[CRED-12] A task that waits for its answer is told too."""
        async with async_ends() as (client, _):
            asking = await waiting(client.whoami())
            client.close()
            with pytest.raises(Disconnected, match="client is closed"):
                await asking

    @in_loop
    async def test_whoami_keeps_what_arrives(self) -> None:
        """[CRED-12] Messages before the answer are received later."""
        async with async_ends() as (client, server):
            task = await waiting(client.whoami())
            server.send(b"MSG k\0one", b"CMSG x\0two", ANSWER)
            assert (await task).pid == 4242
            received = [await client.receive(0) for _ in range(2)]
            assert received == [(b"k", b"one"), (b"x", b"two")]

    @pytest.mark.parametrize("receives_first", [False, True])
    @in_loop
    async def test_whoami_beside_a_receive(self, receives_first: bool) -> None:
        """[CRED-12] The task that asks gets the answer, in any order."""
        async with async_ends() as (client, server):
            if receives_first:
                receiving = await waiting(client.receive())
                asking = await waiting(client.whoami())
            else:
                asking = await waiting(client.whoami())
                receiving = await waiting(client.receive())
            server.send(ANSWER)
            assert (await asking).pid == 4242
            assert not receiving.done()
            asking = await waiting(client.whoami())
            server.send(b"MSG k\0v")
            assert await receiving == (b"k", b"v")
            server.send(ANSWER)
            assert (await asking).pid == 4242

    @in_loop
    async def test_answer_that_a_receive_finds(self) -> None:
        """[CRED-12] It is passed on to the task that asked."""
        async with async_ends() as (client, server):
            asking = await waiting(client.whoami())
            server.send(ANSWER)  # not told of by the loop yet
            with pytest.raises(TimeoutError):
                await client.receive(0)
            assert (await asking).pid == 4242

    @in_loop
    async def test_message_that_whoami_finds(self) -> None:
        """[CRED-12] A task that waits for it gets it."""
        async with async_ends() as (client, server):

            async def ask() -> Credentials:
                server.send(b"MSG k\0v")  # which the loop will never see
                return await client.whoami()

            receiving = await waiting(client.receive())
            asking = asyncio.ensure_future(ask())
            assert await receiving == (b"k", b"v")
            server.send(ANSWER)
            assert (await asking).pid == 4242

    @in_loop
    async def test_tasks_that_ask_at_once(self) -> None:
        """[CRED-12] Each question has its own answer."""
        async with async_ends() as (client, server):
            one = await waiting(client.whoami())
            two = await waiting(client.whoami())
            server.send(ANSWER)
            assert (await one).pid == 4242
            assert not two.done()
            server.send(WHOAMI + b"\0!/cred/1/2/3")
            assert (await two).pid == 3

    @in_loop
    async def test_whoami_timeout(self) -> None:
        """[CRED-12] A late answer is not taken for that to a new question."""
        async with async_ends() as (client, server):
            with pytest.raises(TimeoutError):
                await client.whoami(0.001)
            server.send(WHOAMI + b"\0!/cred/1/2/3")
            task = await waiting(client.whoami())
            server.send(ANSWER)
            assert (await task).pid == 4242
            assert (await client.receive(0)).payload == b"!/cred/1/2/3"

    @in_loop
    async def test_whoami_with_a_full_buffer(self) -> None:
        """[CRED-12] The timeout holds for the question too."""
        async with async_ends() as (client, _):
            await fill_up(client)
            with pytest.raises(TimeoutError):
                await client.whoami(0.001)

    @in_loop
    async def test_too_much_beside_an_answer(self) -> None:
        """What is kept has a bound, and is not lost above it."""
        async with async_ends() as (client, server):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sbus_client, "KEPT_BYTES_MAX", 3_000)
                asking = await waiting(client.whoami())
                server.send(*publications(20))
                with pytest.raises(TooMuchKept):
                    await asking
            for number in range(20):
                assert (await client.receive(0)).payload == b"%d" % number

    @in_loop
    async def test_packet_that_is_malformed(self) -> None:
        """[CLIENT-5] One task that receives is told."""
        async with async_ends() as (client, server):
            tasks = [await waiting(client.receive()) for _ in "12"]
            server.send(b"wrong", b"MSG k\0v")
            with pytest.raises(PacketError):
                await tasks[0]
            assert await tasks[1] == (b"k", b"v")

    def test_with_a_server(self, bus: RealBus) -> None:
        """[PKT-5] Two clients on a real bus."""

        @in_loop
        async def work() -> None:
            async with (
                AsyncClient(bus.path) as one,
                AsyncClient(bus.path, server_uid=os.getuid()) as other,
            ):
                await one.subscribe("k")
                await one.sync()
                for number in range(1_000):
                    await other.publish("k", b"%d" % number)
                for number in range(1_000):
                    assert (await one.receive()).payload == b"%d" % number

        work()

    def test_requests_at_once(self, bus: RealBus) -> None:
        """[CRED-10] Each of a thousand has its own answer, in any order."""

        async def serve(other: AsyncClient) -> None:
            some = []
            async for message in other:
                some.append(parse_request(message))
                if len(some) == 100:
                    for asked in reversed(some):
                        await other.reply(asked, b"to " + asked.payload)
                    some.clear()

        @in_loop
        async def work() -> None:
            async with (
                AsyncClient(bus.path) as one,
                AsyncClient(bus.path) as other,
            ):
                await other.subscribe("service")
                await other.sync()
                serving = asyncio.ensure_future(serve(other))
                texts = [b"%d" % number for number in range(1_000)]
                asked = [one.request("service", text) for text in texts]
                answers = await asyncio.gather(*asked)
                assert answers == [b"to " + text for text in texts]
                assert not one._questions and not one._receivers
                serving.cancel()

        work()

    def test_request_beside_a_receive(self, bus: RealBus) -> None:
        """[CRED-10] A late answer is nobody's, and a message is not one."""

        @in_loop
        async def work() -> None:
            async with (
                AsyncClient(bus.path) as one,
                AsyncClient(bus.path) as other,
            ):
                await other.subscribe("service")
                await other.sync()
                await one.subscribe("k")
                receiving = await waiting(one.receive())
                asking = asyncio.ensure_future(one.request("service"))
                late = parse_request(await other.receive())
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                asking = asyncio.ensure_future(one.request("service"))
                asked = parse_request(await other.receive())
                await other.reply(late, b"late")
                await other.publish("k", b"v")
                await other.reply(asked, b"in time")
                assert await asking == b"in time"
                assert await receiving == (b"k", b"v")
                await other.reply(late, b"late")
                await other.publish("k", b"w")
                assert await one.receive() == (b"k", b"w")
                with pytest.raises(TimeoutError):
                    await one.request("nobody", timeout=0.01)

        work()

    def test_reconnect(self, directory: Path) -> None:
        """Those who ask are told, those who receive and publish go on."""

        @in_loop
        async def work() -> None:
            with RealBus(directory) as bus:
                client = AsyncClient(bus.path, reconnect=True)
                await client.connect()
                await client.subscribe("k")
                await client.sync()
                receiving = await waiting(client.receive())
                asking = asyncio.ensure_future(client.request("nobody"))
                while not client._reply_keys or not client._questions:
                    await asyncio.sleep(0)
                bus.stop()
            with RealBus(directory):
                assert isinstance(await receiving, Reconnected)
                with pytest.raises(Disconnected, match="ask again"):
                    await asking
                await client.publish("k", b"v")
                assert await client.receive() == (b"k", b"v")
                client.close()

        work()

    def test_question_after_a_reconnect(self, listener: Listener) -> None:
        """[CRED-12] It is answered, and not taken for one of before."""

        @in_loop
        async def work() -> None:
            client = AsyncClient(listener.path, reconnect=True)
            await client.connect()
            asking = await waiting(client.whoami())
            listener.accept().wire.close()
            with pytest.raises(Disconnected, match="ask again"):
                await asking
            with listener.accept() as server:
                asking = await waiting(client.whoami())
                server.send(ANSWER)
                assert (await asking).pid == 4242
            client.close()

        work()

    def test_answer_before_a_reconnect(self, listener: Listener) -> None:
        """[CRED-12] It is that to the first question, however it is found."""

        @in_loop
        async def work() -> None:
            client = AsyncClient(listener.path, reconnect=True)
            await client.connect()
            one = await waiting(client.whoami())
            two = await waiting(client.whoami())
            with listener.accept() as server:
                server.send(ANSWER)
            await client.publish("k")  # before the loop sees the answer
            assert (await one).pid == 4242
            with pytest.raises(Disconnected, match="ask again"):
                await two
            with listener.accept() as server:
                asking = await waiting(client.whoami())
                server.send(WHOAMI + b"\0!/cred/1/2/3")
                assert (await asking).pid == 3
            client.close()

        work()

    def test_reconnect_while_a_task_waits_for_room(
        self, listener: Listener
    ) -> None:
        """It publishes on the new connection."""

        @in_loop
        async def work() -> None:
            client = AsyncClient(listener.path, reconnect=True)
            await client.connect()
            server = listener.accept()
            await fill_up(client)
            publishing = await waiting(client.publish("last"))
            receiving = await waiting(client.receive())
            server.wire.close()
            assert isinstance(await receiving, Reconnected)
            await publishing
            with listener.accept() as server:
                assert server.receive() == b"MSG last\0"
            client.close()

        work()

    def test_reconnect_beside_a_task_that_waits_for_room(
        self, listener: Listener
    ) -> None:
        """Who publishes on the new connection tells those who wait."""

        @in_loop
        async def work() -> None:
            client = AsyncClient(listener.path, reconnect=True)
            await client.connect()
            for call in (client.publish, client.subscribe):
                server = listener.accept()
                await fill_up(client)
                publishing = await waiting(client.publish("last"))
                server.wire.close()
                await call("first")  # before the loop looks at the old one
                await publishing
            with listener.accept() as server:
                received = {server.receive() for _ in range(2)}
                assert received == {b"SUB first", b"MSG last\0"}
            client.close()

        work()

    def test_publish_while_the_bus_is_away(self, directory: Path) -> None:
        """It waits, and is published once there is a bus."""

        @in_loop
        async def work() -> None:
            with RealBus(directory) as bus:
                client = AsyncClient(bus.path, reconnect=True)
                await client.connect()
                await client.sync()
                bus.stop()
            publishing = [
                await waiting(client.publish("k", b"%d" % number))
                for number in range(3)
            ]
            with RealBus(directory):
                await asyncio.gather(*publishing)
                client.close()

        work()

    def test_full_queue_of_new_connections(self, directory: Path) -> None:
        """A client waits while the server's queue is full."""
        full = Listener(str(directory / "bus"), backlog=0)

        @in_loop
        async def work() -> None:
            client = AsyncClient(full.path)
            with Client(full.path):
                connecting = await waiting(client.connect())
                with full.accept():
                    assert await connecting is client
                client.close()

        with full.wire:
            work()

    def test_connecting_that_is_cancelled(self, directory: Path) -> None:
        """To cancel it leaves nothing open."""
        full = Listener(str(directory / "bus"), backlog=0)

        @in_loop
        async def work() -> None:
            client = AsyncClient(full.path)
            with Client(full.path):
                before = len(os.listdir("/proc/self/fd"))
                connecting = await waiting(client.connect())
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
                assert len(os.listdir("/proc/self/fd")) == before
                assert client.fileno() == -1

        with full.wire:
            work()

    @in_loop
    async def test_before_it_is_connected(self) -> None:
        """It says so; nothing else does harm."""
        client = AsyncClient("/nowhere")
        with pytest.raises(Disconnected, match="nothing is there"):
            await client.connect()
        for call in (client.receive, client.whoami):
            with pytest.raises(Disconnected, match="not connected: use"):
                await call()
        with pytest.raises(Disconnected, match="not connected: use"):
            await client.publish("k")
        assert repr(client) == "<sbus AsyncClient: not connected>"
        assert client.fileno() == -1
        client.close()

    @in_loop
    async def test_what_is_shown(self) -> None:
        """repr, descriptor and socket are those of the connection."""
        async with async_ends() as (client, _):
            fd = client.fileno()
            name = f"<sbus Client /dev/fd/{fd} open>"
            assert repr(client) == f"<sbus AsyncClient: {name}>"
            assert client.socket.fileno() == fd
