"""Tests of the library in sbus_client.py; test_sbus_cli.py has the rest.

What only a server can do is tested with a server process.  What a server
does wrong, or does at a certain moment, is done by the other end of a pair
of sockets, or by a listener of the test's own.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import functools
import os
import re
import select
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import pytest

import sbus_client
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from programs import ROOT, SECONDS_MAX, gone, has_ended, outcome, run, started
from real_bus import (
    Listener,
    Peer,
    RealBus,
    freeze,
    other_user,
    seqpacket,
    seqpacket_pair,
    thaw,
    wait_for,
)
from sbus_client import (
    PACKET_BYTES_MAX,
    AddressError,
    AsyncClient,
    Client,
    ControlMessage,
    Credentials,
    Disconnected,
    IdentityError,
    Message,
    PacketError,
    PacketTooLarge,
    Received,
    Reconnected,
    SbusError,
    acknowledge,
    parse_request,
    prove_identity,
    reply,
    request,
    verify_identity,
)

ABSTRACT = "/dev/unix/abstract/"


class Ends(NamedTuple):
    """A client, and the other end of its socket."""

    client: Client
    server: Peer


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = seqpacket_pair()
    with Client(fd=ours.detach()) as client, Peer(theirs) as server:
        yield Ends(client, server)


def fill(client: Client, payload_bytes: int = 0) -> int:
    """Publish until the kernel takes no more; return how many it took."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            client.publish("k", bytes(payload_bytes), socket.MSG_DONTWAIT)
            count += 1
    return count


def is_connecting(process: subprocess.Popen[str]) -> bool:
    """Return whether a command sleeps and has a socket."""
    process_directory = Path(f"/proc/{process.pid}")
    try:
        status = (process_directory / "status").read_text("utf-8")
        files = [os.readlink(f) for f in process_directory.glob("fd/*")]
    except OSError:  # it is opening or closing files
        return False
    return "\nState:\tS" in status and "socket:" in " ".join(files)


# =============================================================================
# The file
# =============================================================================


class TestClientFile:
    """What the file promises of itself: drop it in."""

    PATH = ROOT / "sbus_client.py"
    USED = "__future__ argparse asyncio base64 collections concurrent"
    USED += " contextlib dataclasses datetime errno fcntl functools io"
    USED += " itertools json math os pathlib random re select signal socket"
    USED += " struct sys time types typing"
    # Python itself knows since 3.10
    STANDARD = getattr(sys, "stdlib_module_names", frozenset(USED.split()))

    def test_client_imports_the_standard_library_alone(self) -> None:
        """It imports neither the server's file nor any package."""
        imported = set()
        for node in ast.walk(ast.parse(self.PATH.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(node.module or "")
        assert imported
        roots = {name.partition(".")[0] for name in imported}
        assert roots <= self.STANDARD

    def test_client_is_in_the_grammar_of_python_3_9(self) -> None:
        """It has no syntax that is newer."""
        ast.parse(self.PATH.read_text("utf-8"), feature_version=(3, 9))

    def test_client_runs_where_there_is_no_other_file(
        self, directory: Path
    ) -> None:
        """A copy of it in an empty directory is complete."""
        copy = directory / "sbus_client.py"
        copy.write_bytes(self.PATH.read_bytes())
        done = run(str(copy), "--version", cwd=directory)
        assert done == (0, f"sbus {sbus_client.__version__}\n", "")


# =============================================================================
# Sending
# =============================================================================


class TestSending:
    """What the client's calls send."""

    def test_subscribe_sends_the_pattern(self, ends: Ends) -> None:
        """[SUB-1] A subscribe packet holds the pattern."""
        ends.client.subscribe(b"a/*/\xff")
        assert ends.server.receive() == b"SUB a/*/\xff"

    def test_unsubscribe_sends_the_pattern(self, ends: Ends) -> None:
        """[UNSUB-1] An unsubscribe packet holds the pattern."""
        ends.client.unsubscribe(b"a/*/\xff")
        assert ends.server.receive() == b"UNSUB a/*/\xff"

    def test_publish_sends_key_and_payload(self, ends: Ends) -> None:
        """[PUB-1] A publish packet holds the key, NUL and the payload."""
        ends.client.publish(b"a/\xff", b"v\0w")
        ends.client.publish(b"a")
        assert ends.server.receive() == b"MSG a/\xff\0v\0w"
        assert ends.server.receive() == b"MSG a\0"

    @pytest.mark.parametrize(
        "payload",
        [bytearray(b"v\0w"), memoryview(b"v\0w"), memoryview(b"v-\0-w")[::2]],
        ids=["bytearray", "memoryview", "every second byte"],
    )
    def test_payload_of_another_type(
        self, ends: Ends, payload: bytearray | memoryview
    ) -> None:
        """[PUB-1] A payload is whatever has bytes."""
        ends.client.publish("k", payload)
        ends.client.control("k", payload)
        assert ends.server.receive() == b"MSG k\0v\0w"
        assert ends.server.receive() == b"CMSG k\0v\0w"

    @pytest.mark.parametrize(
        "payload, kind",
        [("text", "str"), ("", "str"), (5, "int"), (None, "NoneType")],
    )
    @pytest.mark.parametrize("call", ["publish", "control"])
    def test_payload_without_bytes(
        self, ends: Ends, call: str, payload: Any, kind: str
    ) -> None:
        """What has no bytes is a TypeError, and nothing is sent."""
        with pytest.raises(TypeError) as caught:
            getattr(ends.client, call)("k", payload)
        what = f"a payload is bytes, not {kind}: encode it"
        assert str(caught.value) == what
        ends.client.publish("next")
        assert ends.server.receive() == b"MSG next\0"

    def test_control_sends_key_and_payload(self, ends: Ends) -> None:
        """[CTL-1] A control packet without a payload has no NUL byte."""
        ends.client.control("echo/off")
        ends.client.control(b"x", b"v")
        assert ends.server.receive() == b"CMSG echo/off"
        assert ends.server.receive() == b"CMSG x\0v"

    def test_text_is_sent_as_utf_8(self, ends: Ends) -> None:
        """Keys and patterns that are str are encoded."""
        ends.client.subscribe("é")
        ends.client.unsubscribe("é")
        ends.client.publish("é", b"v")
        ends.client.control("é")
        received = [ends.server.receive() for _ in range(4)]
        encoded = b"\xc3\xa9"
        assert received == [
            b"SUB " + encoded,
            b"UNSUB " + encoded,
            b"MSG " + encoded + b"\0v",
            b"CMSG " + encoded,
        ]

    @pytest.mark.parametrize("key", ["a\0b", b"a\0b", "\0", b"\0"])
    @pytest.mark.parametrize(
        "call", ["subscribe", "unsubscribe", "publish", "control"]
    )
    def test_nul_in_a_key(
        self, ends: Ends, call: str, key: str | bytes
    ) -> None:
        """[KEY-1] A NUL byte in a key is an error, and nothing is sent."""
        with pytest.raises(PacketError, match="NUL"):
            getattr(ends.client, call)(key)
        ends.client.publish("k")
        assert ends.server.receive() == b"MSG k\0"

    @pytest.mark.parametrize(
        "call", ["subscribe", "unsubscribe", "publish", "control"]
    )
    def test_dontwait_with_a_full_buffer(self, ends: Ends, call: str) -> None:
        """With MSG_DONTWAIT no call waits for room."""
        count = fill(ends.client)
        with pytest.raises(BlockingIOError):
            getattr(ends.client, call)("k", flags=socket.MSG_DONTWAIT)
        received = [ends.server.receive() for _ in range(count)]
        assert count and received == [b"MSG k\0"] * count
        ends.client.publish("k", b"there is room", socket.MSG_DONTWAIT)
        assert ends.server.receive() == b"MSG k\0there is room"

    @pytest.mark.parametrize("unread", [False, True])
    def test_send_after_the_server_has_closed(
        self, ends: Ends, unread: bool
    ) -> None:
        """A server that has gone, reading all or not, is Disconnected."""
        if unread:
            ends.client.publish("k")
        ends.server.wire.close()
        with pytest.raises(Disconnected) as caught:
            ends.client.publish("k")
        assert f"sbus: {caught.value}\n" == gone(ends.client.address)
        assert caught.value.errno is None


class TestPacketSize:
    """Packets up to the limit, and above."""

    LARGEST = bytes(PACKET_BYTES_MAX - HEAD_BYTES)

    def test_largest_packet_passes(self, bus: RealBus) -> None:
        """[LIMIT-3] [CONN-16] A packet of 409,600 bytes passes unharmed."""
        payload = os.urandom(len(self.LARGEST))
        with Client(bus.path) as sender, Client(bus.path) as receiver:
            receiver.subscribe("k")
            receiver.sync()
            sender.publish("k", payload)
            assert receiver.receive(SECONDS_MAX) == (b"k", payload)

    def test_packet_above_the_limit(self, ends: Ends) -> None:
        """[LIMIT-1] One byte more is not sent, and the client goes on."""
        ends.client.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES_MAX
        )
        what = "packet of 409601 bytes is above the limit of 409600 bytes"
        with pytest.raises(PacketTooLarge, match=what):
            ends.client.publish("k", self.LARGEST + b"x")
        ends.client.publish("k", b"next")
        assert ends.server.receive() == b"MSG k\0next"

    @pytest.mark.parametrize("size", [100_000, 100_001])
    def test_small_send_buffer_is_raised(self, ends: Ends, size: int) -> None:
        """[CONN-16] A send buffer that is too small is raised."""
        ends.client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        ends.client.publish("k", bytes(size - HEAD_BYTES))
        assert len(ends.server.receive()) == size

    def test_packet_that_no_send_buffer_holds(self) -> None:
        """[CONN-16] A packet above the kernel's own limit is an error."""
        ours, theirs = seqpacket_pair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            largest = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            with (
                Client(fd=ours.detach(), packet_bytes_max=largest) as client,
                pytest.raises(PacketTooLarge, match="largest send buffer"),
            ):
                client.publish("k", bytes(largest - HEAD_BYTES))

    def test_dontwait_when_the_send_buffer_is_raised(self, ends: Ends) -> None:
        """[CONN-16] A raised buffer may be full, which is no other error."""
        fill(ends.client, 10_000)
        ends.client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        with pytest.raises(BlockingIOError):
            ends.client.publish("k", bytes(20_000), socket.MSG_DONTWAIT)

    def test_received_packet_above_the_limit(self) -> None:
        """[CONN-15] A cut packet is an error and never data."""
        ours, theirs = seqpacket_pair()
        with (
            Client(fd=ours.detach(), packet_bytes_max=100) as client,
            Peer(theirs) as server,
        ):
            fitting = bytes(100 - HEAD_BYTES)
            server.send(publish(b"k", fitting + b"x"))
            server.send(publish(b"k", fitting))
            with pytest.raises(PacketTooLarge, match="101 bytes was received"):
                client.receive(0)
            assert client.receive(0) == (b"k", fitting)


# =============================================================================
# Receiving
# =============================================================================


class TestReceiving:
    """What receive returns, and when it gives up."""

    def test_publish_packet_is_a_message(self, ends: Ends) -> None:
        """[PKT-1] The key ends at the first NUL byte, spaces belong to it."""
        ends.server.send(b"MSG a b\0v\0w", b"MSG \0")
        first, second = ends.client.receive(), ends.client.receive()
        assert isinstance(first, Message)
        assert first == (b"a b", b"v\0w")
        assert isinstance(second, Message)
        assert second == (b"", b"")

    def test_control_packet_is_a_control_message(self, ends: Ends) -> None:
        """[CTL-3] A control packet is told from a message."""
        ends.server.send(b"CMSG x y\0v\0w")
        received = ends.client.receive()
        assert isinstance(received, ControlMessage)
        assert received == (b"x y", b"v\0w")

    @pytest.mark.parametrize(
        "packet",
        [b"MSG k", b"CMSG k", b"MSG\0v", b"CMSG\0", b"SUB k\0", b"\0", b"msg"],
    )
    def test_malformed_packet(self, ends: Ends, packet: bytes) -> None:
        """[PKT-1] A malformed packet is an error; the next one is read."""
        ends.server.send(packet, b"MSG k\0v")
        with pytest.raises(PacketError, match="malformed packet"):
            ends.client.receive(0)
        assert ends.client.receive(0) == (b"k", b"v")

    def test_timeout_of_zero(self, ends: Ends) -> None:
        """With a timeout of 0 what is there is returned, and nothing else."""
        with pytest.raises(TimeoutError):
            ends.client.receive(0)
        ends.server.send(b"MSG k\0v")
        assert ends.client.receive(0) == (b"k", b"v")
        with pytest.raises(TimeoutError):
            ends.client.receive(0)

    @pytest.mark.parametrize("poll_seconds_max", [0.001, 3_600.0])
    def test_timeout_is_waited_for(
        self,
        ends: Ends,
        monkeypatch: pytest.MonkeyPatch,
        poll_seconds_max: float,
    ) -> None:
        """A timeout is not over before its time, however often we poll."""
        monkeypatch.setattr(sbus_client, "POLL_SECONDS_MAX", poll_seconds_max)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ends.client.receive(0.02)
        assert 0.02 <= time.monotonic() - start < SECONDS_MAX

    @pytest.mark.parametrize("timeout", [1e10, float("inf")])
    def test_endless_timeout(self, ends: Ends, timeout: float) -> None:
        """A timeout may be longer than the kernel's longest."""
        ends.server.send(b"MSG k\0v")
        assert ends.client.receive(timeout) == (b"k", b"v")

    def test_dontwait_without_a_packet(self, ends: Ends) -> None:
        """With MSG_DONTWAIT receive does not wait."""
        with pytest.raises(BlockingIOError):
            ends.client.receive(flags=socket.MSG_DONTWAIT)

    def test_peek_leaves_the_packet(self, ends: Ends) -> None:
        """With MSG_PEEK a message stays the next."""
        ends.server.send(b"MSG k\0v")
        assert ends.client.receive(0, socket.MSG_PEEK) == (b"k", b"v")
        assert ends.client.receive(0) == (b"k", b"v")
        with pytest.raises(TimeoutError):
            ends.client.receive(0, socket.MSG_PEEK)

    def test_last_packets_of_a_server_that_has_closed(
        self, ends: Ends
    ) -> None:
        """All packets are read before the end is told."""
        ends.server.send(b"MSG k\0one", b"MSG k\0two")
        ends.server.wire.close()
        assert ends.client.receive(0) == (b"k", b"one")
        assert ends.client.receive() == (b"k", b"two")
        for _ in range(2):
            with pytest.raises(Disconnected) as caught:
                ends.client.receive()
            assert f"sbus: {caught.value}\n" == gone(ends.client.address)

    @pytest.mark.parametrize("timeout", [None, SECONDS_MAX])
    def test_last_packets_after_a_reset(
        self, ends: Ends, timeout: float | None
    ) -> None:
        """[CONN-14] A client reads on after ECONNRESET."""
        ends.client.publish("k", b"the server never reads this")
        ends.server.send(b"MSG k\0one", b"MSG k\0two")
        ends.server.wire.close()
        assert ends.client.receive(timeout) == (b"k", b"one")
        assert ends.client.receive(timeout) == (b"k", b"two")
        with pytest.raises(Disconnected):
            ends.client.receive(timeout)

    def test_last_packets_after_a_send_has_failed(self, ends: Ends) -> None:
        """[CONN-14] A client that learns of the end by sending reads on."""
        ends.client.publish("k", b"the server never reads this")
        ends.server.send(b"MSG k\0one")
        ends.server.wire.close()
        with pytest.raises(Disconnected):
            ends.client.sync()
        assert ends.client.receive(0) == (b"k", b"one")

    def test_iteration_ends_in_disconnected(self, ends: Ends) -> None:
        """A loop over a client takes every message, and ends in an error."""
        ends.server.send(b"MSG k\0one", b"CMSG x\0two")
        ends.server.wire.close()
        received = []
        with pytest.raises(Disconnected):
            for message in ends.client:
                received.append(message)
        assert received == [(b"k", b"one"), (b"x", b"two")]

    def test_iteration_after_a_reset(self, ends: Ends) -> None:
        """[CONN-14] A loop reads on after ECONNRESET."""
        ends.client.publish("k", b"the server never reads this")
        ends.server.send(b"MSG k\0one")
        ends.server.wire.close()
        received = iter(ends.client)
        assert next(received) == (b"k", b"one")
        with pytest.raises(Disconnected):
            next(received)

    def test_iteration_over_what_was_kept(self, ends: Ends) -> None:
        """[CRED-12] A loop takes what whoami has kept, in order."""
        ends.server.send(*publications(2), ANSWER, publish(b"k", b"2"))
        ends.client.sync(0)
        taken = [m.payload for _, m in zip(range(3), ends.client)]
        assert taken == [b"0", b"1", b"2"]

    @pytest.mark.parametrize("packet", [b"MSG k", b"msg k\0", b"\0"])
    def test_iteration_over_a_malformed_packet(
        self, ends: Ends, packet: bytes
    ) -> None:
        """[PKT-1] A loop takes nothing malformed for a message."""
        ends.server.send(packet)
        with pytest.raises(PacketError, match="malformed packet"):
            next(iter(ends.client))

    def test_iteration_over_a_packet_above_the_limit(self) -> None:
        """[CONN-15] A loop takes no cut packet for a message."""
        ours, theirs = seqpacket_pair()
        with (
            Client(fd=ours.detach(), packet_bytes_max=100) as client,
            Peer(theirs) as server,
        ):
            server.send(publish(b"k", bytes(101 - HEAD_BYTES)))
            with pytest.raises(PacketTooLarge, match="101 bytes was received"):
                next(iter(client))

    def test_iteration_with_a_time_limit_of_the_kernel(
        self, ends: Ends
    ) -> None:
        """A user may set SO_RCVTIMEO, and is told when it is over."""
        limit = struct.pack("ll", 0, 1_000)
        ends.client.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit
        )
        with pytest.raises(BlockingIOError):
            next(iter(ends.client))

    def test_time_limit_of_the_kernel_is_waited_for_once(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call that it ends is not tried again."""
        calls = []

        class Slow:
            """A socket whose time limits are over."""

            def send(self, *_: object) -> NoReturn:
                calls.append("send")
                raise BlockingIOError

            def recv_into(self, *_: object) -> NoReturn:
                calls.append("recv_into")
                raise BlockingIOError

        with monkeypatch.context() as patch:
            patch.setattr(ends.client, "socket", Slow())
            with pytest.raises(BlockingIOError):
                ends.client.publish("k")
            with pytest.raises(BlockingIOError):
                next(iter(ends.client))
        assert calls == ["send", "recv_into"]


class TestWaiting:
    """The client's descriptor, with whatever waits for descriptors."""

    def test_select(self, ends: Ends) -> None:
        """select tells of a message."""
        assert select.select([ends.client], [], [], 0)[0] == []
        ends.server.send(b"MSG k\0")
        ready, _, _ = select.select([ends.client], [], [], SECONDS_MAX)
        assert ready == [ends.client]

    def test_example(
        self, ends: Ends, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The example in the docstring prints all, up to the end."""
        text = textwrap.dedent(Client.__doc__ or "")
        example = re.search(r"^ +with select.*?\n\n", text, re.M | re.S)
        assert example
        ends.server.send(b"MSG k\0one", b"MSG k\0two")
        ends.server.wire.close()
        names = {"select": select, "bus": ends.client}
        with pytest.raises(Disconnected, match="has closed"):
            exec(textwrap.dedent(example[0]), names)
        lines = "Message(key=b'k', payload=b'one')\n"
        lines += "Message(key=b'k', payload=b'two')\n"
        assert capsys.readouterr().out == lines

    def test_poll(self, ends: Ends) -> None:
        """poll tells of a message."""
        poll = select.poll()
        poll.register(ends.client, select.POLLIN)
        assert poll.poll(0) == []
        ends.server.send(b"MSG k\0")
        ready = [(ends.client.fileno(), select.POLLIN)]
        assert poll.poll(SECONDS_MAX * 1000) == ready

    def test_epoll(self, ends: Ends) -> None:
        """epoll tells of a message."""
        with select.epoll() as epoll:
            epoll.register(ends.client, select.EPOLLIN)
            assert epoll.poll(0) == []
            ends.server.send(b"MSG k\0")
            ready = [(ends.client.fileno(), select.EPOLLIN)]
            assert epoll.poll(SECONDS_MAX) == ready


# =============================================================================
# Asking the server
# =============================================================================


class TestWhoami:
    """Credentials, and what arrives before them."""

    def test_own_credentials(self, bus: RealBus) -> None:
        """[CRED-2] The server's answer holds the client's own numbers."""
        gid, uid, pid = os.getgid(), os.getuid(), os.getpid()
        path = b"!/cred/%d/%d/%d" % (gid, uid, pid)
        with Client(bus.path) as client:
            assert client.whoami() == Credentials(gid, uid, pid, path)

    def test_own_credentials_are_a_pattern(self, bus: RealBus) -> None:
        """[CRED-10] Below its credentials a client has private keys."""
        with Client(bus.path) as client, Client(bus.path) as other:
            secret = client.whoami().path + b"/x"
            client.subscribe(secret)
            client.sync()
            other.publish(secret, b"v")
            assert client.receive(SECONDS_MAX) == (secret, b"v")

    def test_credentials_with_a_prefix(self, directory: Path) -> None:
        """[CRED-2] After a prefix the last three numbers are the client's."""
        own = (os.getgid(), os.getuid(), os.getpid())
        path = b"!/cred/1/2/3/!/cred/%d/%d/%d" % own
        options = ("--cred-prefix", "!/cred/1/2/3")
        with RealBus(directory, *options) as bus, Client(bus.path) as client:
            assert client.whoami() == Credentials(*own, path)

    def test_credentials_with_two_prefixes(self, ends: Ends) -> None:
        """[CRED-2] The bus may be below a bus that is below another."""
        path = b"!/cred/1/2/3/!/cred/4/5/6/!/cred/7/8/9"
        ends.server.send(WHOAMI + b"\0" + path)
        assert ends.client.whoami(0) == Credentials(7, 8, 9, path)

    @pytest.mark.parametrize(
        "path",
        [
            b"",
            b"!/cred/1/2",
            b"!/cred/1/2/3/",
            b"!/cred/1/2/3\n",
            b"!/cred/1//3",
            b"!/cred/1/2/x",
            b"!/cred/1/2/33333333333",
            b"x/!/cred/1/2/3",
            b"!/cred/1/2/!/cred/1/2/3",
        ],
    )
    def test_malformed_credentials(self, ends: Ends, path: bytes) -> None:
        """[CRED-2] An answer that is no credentials is an error."""
        ends.server.send(WHOAMI + b"\0" + path)
        with pytest.raises(PacketError, match="malformed credentials"):
            ends.client.whoami(0)

    def test_what_arrives_meanwhile_is_kept(self, ends: Ends) -> None:
        """[CRED-12] Packets before the answer are received later, in order."""
        ends.server.send(b"MSG k\0one", b"CMSG x\0two", ANSWER)
        assert ends.client.whoami(0).pid == 4242
        ends.server.send(b"MSG k\0three", ANSWER, b"MSG k\0four")
        ends.client.sync(0)
        peeked = ends.client.receive(0, socket.MSG_PEEK)
        received = [ends.client.receive(0) for _ in range(4)]
        assert peeked == received[0]
        assert received == [
            Message(b"k", b"one"),
            ControlMessage(b"x", b"two"),
            Message(b"k", b"three"),
            Message(b"k", b"four"),
        ]
        assert isinstance(received[1], ControlMessage)

    def test_message_with_the_key_of_the_answer(self, ends: Ends) -> None:
        """[CRED-12] Only a control message is an answer."""
        ends.server.send(publish(b"!/cred/whoami", b"!/cred/1/2/3"), ANSWER)
        assert ends.client.whoami(0).pid == 4242

    def test_each_question_has_its_own_answer(self, ends: Ends) -> None:
        """[CRED-12] A late answer is not taken for that to a new question."""
        answers = [WHOAMI + b"\0!/cred/1/2/%d" % n for n in range(4)]
        with pytest.raises(TimeoutError):
            ends.client.whoami(0)
        ends.server.send(answers[0])
        with pytest.raises(TimeoutError):
            ends.client.sync(0)
        ends.client.control("!/cred/whoami")
        ends.server.send(*answers[1:])
        assert ends.client.whoami(0).pid == 3
        pids = [ends.client.receive(0).payload[-1:] for _ in range(3)]
        assert pids == [b"0", b"1", b"2"]

    def test_peeked_answer_is_counted_once(self, ends: Ends) -> None:
        """[CRED-12] An answer that was only looked at is yet to come."""
        ends.client.control("!/cred/whoami")
        ends.server.send(ANSWER)
        ends.client.receive(0, socket.MSG_PEEK)
        with pytest.raises(TimeoutError):
            ends.client.whoami(0)

    def test_answer_that_nobody_asked_for(self, ends: Ends) -> None:
        """[CRED-12] An answer too many does no harm."""
        ends.server.send(ANSWER)
        assert ends.client.receive(0).key == b"!/cred/whoami"
        ends.server.send(ANSWER)
        assert ends.client.whoami(0).pid == 4242

    def test_stopped_server(self, bus: RealBus) -> None:
        """A timeout holds though the server is stopped, its queue full too."""
        with Client(bus.path) as client:
            client.sync()
            freeze(bus)
            with pytest.raises(TimeoutError):
                client.whoami(0.01)
            fill(client)
            with pytest.raises(TimeoutError):
                client.whoami(0.01)
            thaw(bus)
            assert client.whoami(SECONDS_MAX).pid == os.getpid()

    def test_full_queue_is_waited_for(self, bus: RealBus) -> None:
        """whoami goes on when a server does whose queue was full."""

        class Asking(Client):
            def _wait(self, event: int, end: float | None) -> None:
                thaw(bus)
                super()._wait(event, end)

        freeze(bus)
        with Asking(bus.path) as client:
            fill(client)
            assert client.whoami(SECONDS_MAX).pid == os.getpid()

    def test_full_queue_and_an_unread_message(self, ends: Ends) -> None:
        """A message is no reason to ask again before there is room."""
        ends.server.send(b"MSG k\0v")
        fill(ends.client)
        with pytest.raises(TimeoutError):
            ends.client.whoami(0.01)
        assert ends.client.receive(0) == (b"k", b"v")


class TestSync:
    """The proof that all before was handled."""

    def test_subscription_is_in_force(self, bus: RealBus) -> None:
        """[PKT-5] After sync others' messages arrive."""
        with Client(bus.path) as client, Client(bus.path) as other:
            client.subscribe("k")
            client.sync()
            other.publish("k", b"v")
            assert client.receive(SECONDS_MAX) == (b"k", b"v")

    def test_unsubscription_is_in_force(self, bus: RealBus) -> None:
        """[PKT-5] [CRED-3] After sync no more messages arrive."""
        with Client(bus.path) as client:
            client.subscribe("k")
            client.publish("k", b"one")
            client.unsubscribe("k")
            client.publish("k", b"two")
            client.sync()
            assert client.receive(0) == (b"k", b"one")
            with pytest.raises(TimeoutError):
                client.receive(0)

    def test_refused_subscription(self, bus: RealBus) -> None:
        """[KEY-4] sync tells that the server has refused a pattern."""
        with Client(bus.path) as client:
            client.subscribe("!/")
            with pytest.raises(Disconnected):
                client.sync()


# =============================================================================
# Addresses
# =============================================================================


class TestClientAddresses:
    """Where a client finds its bus."""

    def test_default_of_a_user(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ADDR-1] A user's bus is in XDG_RUNTIME_DIR."""
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        address = str(directory / "sbus.socket")
        with RealBus(directory, address=address), Client() as client:
            client.sync()
            assert client.address == address

    def test_default_of_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """[ADDR-1] Root's bus is in /run."""
        monkeypatch.setattr(os, "getuid", lambda: 0)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
        assert sbus_client.default_address() == "/run/sbus.socket"

    @pytest.mark.parametrize("value", [None, ""])
    def test_no_default(
        self, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        """[ADDR-1] Without XDG_RUNTIME_DIR a user has to give an address."""
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        with pytest.raises(AddressError, match="XDG_RUNTIME_DIR is not set"):
            Client()

    def test_random_abstract_name(self, directory: Path) -> None:
        """[RUN-3] What the server prints is an address."""
        with RealBus(directory, address=ABSTRACT[:-1]) as bus:
            digits = bus.output.rstrip("\n")[len(ABSTRACT) :]
            for spelling in (digits, digits.upper()):
                with Client(ABSTRACT + spelling) as client:
                    client.sync()

    def test_short_abstract_name(self, directory: Path) -> None:
        """[ADDR-4] A name is filled up with NUL bytes to 108 bytes."""
        digits = "00" + os.urandom(16).hex()
        with RealBus(directory, address=ABSTRACT + digits):
            for padding in ("", "00", "00" * (108 - 17)):
                with Client(ABSTRACT + digits + padding) as client:
                    client.sync()

    @pytest.mark.parametrize(
        "digits",
        ["", "0", "01", "ff00", "000", "00xx", "00 11", "00" * 109, "00\n"],
    )
    def test_wrong_abstract_name(self, digits: str) -> None:
        """[ADDR-4] Digits that are no abstract name."""
        with pytest.raises(AddressError, match="after .* come 2 to 216"):
            Client(ABSTRACT + digits)

    @pytest.mark.parametrize("path", ["", "a\0b", "x" * 108, "é" * 54])
    def test_wrong_path(self, path: str) -> None:
        """A path that the kernel would refuse, or cut."""
        with pytest.raises(AddressError, match="a path has 1 to 107 bytes"):
            Client(path)

    def test_longest_path(self) -> None:
        """A path of 107 bytes is asked for."""
        with pytest.raises(Disconnected, match="nothing is there"):
            Client("x/" * 53 + "x")

    @pytest.mark.parametrize("number", ["", "x", "-1", "1 ", "1000000000"])
    def test_wrong_descriptor_number(self, number: str) -> None:
        """What follows /dev/fd/ is a number."""
        with pytest.raises(AddressError, match="not a descriptor's number"):
            Client("/dev/fd/" + number)

    def test_address_of_a_descriptor(self) -> None:
        """A descriptor can be given as an address."""
        ours, theirs = seqpacket_pair()
        with Client(f"/dev/fd/{ours.detach()}") as client, theirs:
            client.publish("k")
            assert theirs.recv(100) == b"MSG k\0"

    def test_address_and_descriptor(self) -> None:
        """An address and a descriptor together are an error."""
        with pytest.raises(AddressError, match="not both"):
            Client("/nowhere", fd=0)


class TestDescriptors:
    """Sockets that somebody else connected."""

    def test_nonblocking_descriptor_blocks(self) -> None:
        """A socket that did not wait waits from now on."""
        ours, theirs = seqpacket_pair()
        ours.setblocking(False)
        with Client(fd=ours.detach()) as client, theirs:
            assert os.get_blocking(client.fileno())

    def test_closed_descriptor(self) -> None:
        """A number that is no descriptor's."""
        read_end, write_end = os.pipe()
        os.close(write_end)
        os.close(read_end)
        with pytest.raises(AddressError, match="Bad file descriptor"):
            Client(fd=read_end)

    def test_file(self) -> None:
        """A descriptor of something else than a socket stays open."""
        with open(os.devnull) as file:
            with pytest.raises(AddressError, match="operation on non-socket"):
                Client(fd=file.fileno())
            os.fstat(file.fileno())

    @pytest.mark.parametrize(
        "family, kind",
        [
            (socket.AF_UNIX, socket.SOCK_STREAM),
            (socket.AF_UNIX, socket.SOCK_DGRAM),
            (socket.AF_INET, socket.SOCK_STREAM),
        ],
    )
    def test_socket_of_another_kind(self, family: int, kind: int) -> None:
        """A socket of another kind is refused, and stays open."""
        with socket.socket(family, kind) as other:
            with pytest.raises(AddressError, match="not a Unix-domain SEQ"):
                Client(fd=other.fileno())
            os.fstat(other.fileno())

    @pytest.mark.parametrize("listening", [False, True])
    def test_socket_that_is_not_connected(
        self, directory: Path, listening: bool
    ) -> None:
        """A socket that leads nowhere is refused, and stays open."""
        with seqpacket() as other:
            if listening:
                other.bind(str(directory / "bus"))
                other.listen()
            with pytest.raises(AddressError, match="not connected"):
                Client(fd=other.fileno())
            os.fstat(other.fileno())


class TestConnecting:
    """Finding nobody, and finding a crowd."""

    def test_nothing_at_the_path(self, directory: Path) -> None:
        """A client without a server is Disconnected."""
        path = str(directory / "bus")
        what = "nothing is there; start sbusd, or give its address"
        self.check(path, errno.ENOENT, what)

    def test_file_at_the_path(self, directory: Path) -> None:
        """A file is no bus."""
        path = directory / "bus"
        path.touch()
        self.check(str(path), errno.ECONNREFUSED, self.REFUSED)

    def test_stale_socket_at_the_path(self, directory: Path) -> None:
        """A socket that a dead server has left is no bus."""
        path = str(directory / "bus")
        with seqpacket() as listener:
            listener.bind(path)
        self.check(path, errno.ECONNREFUSED, self.REFUSED)

    def test_nothing_at_the_abstract_name(self) -> None:
        """Nothing stale can be behind an abstract name."""
        address = f"{ABSTRACT}00{os.urandom(16).hex()}"
        what = "nothing is there; start sbusd, or give its address"
        self.check(address, errno.ECONNREFUSED, what)

    def test_socket_of_another_kind_at_the_path(self, directory: Path) -> None:
        """A datagram socket is no bus."""
        path = str(directory / "bus")
        what = "another kind of socket is there"
        what += "; start sbusd, or give its address"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.bind(path)
            self.check(path, errno.EPROTOTYPE, what)

    def test_path_below_a_file(self, directory: Path) -> None:
        """For what else there may be the kernel has words."""
        path = directory / "file"
        path.touch()
        what = "Not a directory; start sbusd, or give its address"
        self.check(str(path / "bus"), errno.ENOTDIR, what)

    def test_path_of_another_user(self, directory: Path) -> None:
        """A server that does not let others in, or its directory."""
        path = directory / "bus"
        with seqpacket() as listener:
            listener.bind(str(path))
            path.chmod(0)
            with other_user():
                self.check(str(path), errno.EACCES, self.FORBIDDEN)

    REFUSED = "no server listens there (what is there is stale or no socket)"
    REFUSED += "; start sbusd, or give its address"
    FORBIDDEN = "it may not be used by this user: its server lets others in"
    FORBIDDEN += " with -g or -o"

    def check(self, address: str, number: int, what: str) -> None:
        """Find no bus at an address; be told the cause and what to do."""
        with pytest.raises(Disconnected) as caught:
            Client(address)
        assert str(caught.value) == f"no bus at {address}: {what}"
        assert caught.value.errno == number

    def test_full_queue_of_new_connections(self, directory: Path) -> None:
        """[CONN-17] A client waits while the server's queue is full."""
        full = Listener(str(directory / "bus"), backlog=0)
        with (
            full.wire,
            Client(full.path),
            started(full.path, "whoami") as command,
        ):
            wait_for(lambda: is_connecting(command) or has_ended(command))
            assert not has_ended(command)
            with full.accept(), full.accept() as server:
                assert server.receive() == WHOAMI
                server.send(ANSWER)
                answered = (0, "!/cred/100/1000/4242\n", "")
                assert outcome(command) == answered


class TestClientObject:
    """What a client is to Python."""

    def test_context_manager_closes(self, ends: Ends) -> None:
        """The end of a with statement closes the socket."""
        with ends.client as client:
            assert client is ends.client
            assert client.fileno() >= 0
        assert client.fileno() == -1
        assert ends.server.is_disconnected()

    def test_close_twice(self, ends: Ends) -> None:
        """To close what is closed does nothing."""
        ends.client.close()
        ends.client.close()
        assert ends.client.fileno() == -1

    @pytest.mark.parametrize(
        "call",
        [
            lambda client: client.subscribe("k"),
            lambda client: client.unsubscribe("k"),
            lambda client: client.publish("k"),
            lambda client: client.publish("k", bytes(PACKET_BYTES_MAX)),
            lambda client: client.control("k"),
            lambda client: client.receive(),
            lambda client: client.receive(0),
            lambda client: client.receive(flags=socket.MSG_DONTWAIT),
            lambda client: client.whoami(),
            lambda client: client.whoami(0),
            lambda client: client.sync(),
            lambda client: next(iter(client)),
        ],
    )
    @pytest.mark.parametrize("kept", [False, True])
    def test_use_after_close(
        self, ends: Ends, call: Callable[[Client], object], kept: bool
    ) -> None:
        """Every call on a closed client raises the same error."""
        if kept:
            ends.server.send(b"MSG k\0v", ANSWER)
            ends.client.sync(0)
        ends.client.close()
        with pytest.raises(Disconnected) as caught:
            call(ends.client)
        assert str(caught.value) == "this client is closed"

    def test_published_before_close(self, bus: RealBus) -> None:
        """[CONN-6] What was published before close is delivered."""
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            client = Client(bus.path)
            client.publish("k", b"v")
            client.close()
            assert peer.receive() == b"MSG k\0v"

    def test_repr(self, ends: Ends) -> None:
        """A client shows its address, and whether it is open."""
        name = f"/dev/fd/{ends.client.fileno()}"
        assert repr(ends.client) == f"<sbus Client {name} open>"
        ends.client.close()
        assert repr(ends.client) == f"<sbus Client {name} closed>"

    def test_errors_are_sbus_errors(self) -> None:
        """One except clause is enough, and the standard ones work too."""
        assert AddressError.__bases__ == (SbusError, ValueError)
        assert Disconnected.__bases__ == (SbusError, ConnectionError)
        assert PacketTooLarge.__bases__ == (SbusError, ValueError)
        assert PacketError.__bases__ == (SbusError, ValueError)


# =============================================================================
# Whose bus, and a bus that comes back
# =============================================================================


class TestServerUser:
    """A client that wants a certain user's bus."""

    def test_right_user(self, bus: RealBus) -> None:
        """The server's user is the one that is wanted."""
        with Client(bus.path, server_uid=os.getuid()) as client:
            client.sync()

    def test_wrong_user(self, listener: Listener) -> None:
        """Another user's bus is refused, and hears nothing."""
        other = os.getuid() + 1
        what = f"runs as the user {os.getuid()}, and not as {other}"
        with pytest.raises(Disconnected, match=what):
            Client(listener.path, server_uid=other)
        with listener.accept() as server:
            assert server.is_disconnected()


class TestReconnecting:
    """reconnect=True: a bus that goes away and comes back."""

    GONE = Reconnected(b"", b"")

    @pytest.fixture(autouse=True)
    def no_delays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Try again at once, as far as a test can."""
        monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS_MIN", 0.001)

    @pytest.fixture
    def client(self, listener: Listener) -> Iterator[Client]:
        with Client(listener.path, reconnect=True) as client:
            yield client

    def test_subscriptions_and_modes_are_sent_again(
        self, client: Client, listener: Listener
    ) -> None:
        """Each pattern as often as it is held; modes in their last order."""
        with listener.accept():
            for pattern in ("a", "b", "b", "c", "c", "d"):
                client.subscribe(pattern)
            for pattern in ("a", "c", "x"):
                client.unsubscribe(pattern)
            for key in ("order/stack", "order/random", "other", "order/stack"):
                client.control(key)
        received = client.receive(SECONDS_MAX)
        assert isinstance(received, Reconnected)
        assert os.get_blocking(client.fileno())
        with listener.accept() as server:
            client.publish("k")
            assert [server.receive() for _ in range(7)] == [
                b"SUB b",
                b"SUB b",
                b"SUB c",
                b"SUB d",
                b"CMSG order/random",
                b"CMSG order/stack",
                b"MSG k\0",
            ]

    def test_last_messages_come_before(
        self, client: Client, listener: Listener
    ) -> None:
        """[CONN-14] What the old server sent is received first."""
        with listener.accept() as server:
            client.publish("k", b"never read")
            server.send(b"MSG k\0one", b"wrong", b"MSG k\0two")
        client.publish("k", b"by the new one")
        with listener.accept() as server:
            assert server.receive() == b"MSG k\0by the new one"
            server.send(b"MSG k\0three")
            received = [client.receive(SECONDS_MAX) for _ in range(4)]
        assert received == [
            (b"k", b"one"),
            (b"k", b"two"),
            self.GONE,
            (b"k", b"three"),
        ]
        assert isinstance(received[2], Reconnected)

    def test_iteration_goes_on(
        self, client: Client, listener: Listener
    ) -> None:
        """A loop over a client is told, and goes on."""
        received = iter(client)
        with listener.accept() as server:
            server.send(b"MSG k\0one")
        assert next(received) == (b"k", b"one")
        assert isinstance(next(received), Reconnected)
        with listener.accept() as server:
            server.send(b"MSG k\0two")
            assert next(received) == (b"k", b"two")

    def test_peek_shows_that_it_has_reconnected(
        self, client: Client, listener: Listener
    ) -> None:
        """With MSG_PEEK it stays the next."""
        listener.accept().wire.close()
        peeked = client.receive(SECONDS_MAX, socket.MSG_PEEK)
        assert isinstance(peeked, Reconnected)
        assert client.receive(0) is peeked

    def test_restarted_server(self, directory: Path) -> None:
        """A subscription outlives a server."""
        with RealBus(directory) as bus:
            client = Client(bus.path, reconnect=True)
            client.subscribe("k")
            client.sync()
            bus.stop()
        with client, RealBus(directory) as bus:
            assert isinstance(client.receive(SECONDS_MAX), Reconnected)
            client.sync(SECONDS_MAX)
            with bus.connect() as peer:
                peer.send(b"MSG k\0v")
                assert client.receive(SECONDS_MAX) == (b"k", b"v")

    def test_no_server_for_a_while(
        self, client: Client, listener: Listener, directory: Path
    ) -> None:
        """Timeouts hold while there is none, and the client tries on."""
        server = listener.accept()
        listener.wire.close()
        server.wire.close()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                client.receive(0.002)
        with pytest.raises(BlockingIOError):
            while True:
                client.receive(0, socket.MSG_DONTWAIT)
        os.unlink(listener.path)
        again = Listener(listener.path, backlog=8)
        with again.wire:
            assert isinstance(client.receive(SECONDS_MAX), Reconnected)
            client.publish("k")
            with again.accept() as server:
                assert server.receive() == b"MSG k\0"

    def test_pauses_grow_to_a_limit_and_start_anew(
        self, monkeypatch: pytest.MonkeyPatch, client: Client
    ) -> None:
        """Pauses double up to 5 s, less up to half; and begin again later."""
        now, slept = 1000.0, []

        def sleep(seconds: float) -> None:
            nonlocal now
            slept.append(seconds)
            now += seconds

        monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS_MIN", 0.05)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        monkeypatch.setattr(time, "sleep", sleep)
        for _ in range(30):
            client._pause(None, 0)
        assert slept[0] == 0
        for number, seconds in enumerate(slept[1:]):
            longest = min(5.0, 0.05 * 2**number)
            assert longest / 2 <= round(seconds, 9) <= longest
        assert len(set(slept)) == 30
        now += 11
        client._pause(None, 0)
        client._pause(None, 0)
        assert slept[30] == 0 and slept[31] <= 0.05

    def test_full_queue_of_new_connections(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-17] A full queue is tried again."""
        full = Listener(str(directory / "bus"), backlog=0)
        with full.wire, Client(full.path, reconnect=True) as client:
            server = full.accept()
            with Client(full.path):  # which fills the queue
                server.wire.close()
                with pytest.raises(TimeoutError):
                    client.receive(0.01)
                full.accept().wire.close()
                assert isinstance(client.receive(SECONDS_MAX), Reconnected)

    def test_server_that_may_not_be_used(
        self, client: Client, listener: Listener
    ) -> None:
        """What another try would not mend is told at once."""
        listener.accept().wire.close()
        client.server_uid = os.getuid() + 1
        with pytest.raises(Disconnected, match="runs as the user"):
            client.receive(SECONDS_MAX)
        client.server_uid = None
        assert isinstance(client.receive(SECONDS_MAX), Reconnected)

    def test_server_that_closes_at_once(
        self,
        client: Client,
        listener: Listener,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A publish is tried on one new connection, and then fails."""
        client.subscribe("k")
        listener.accept().wire.close()
        send = Client._send_once

        def refuse(self: Client, packet: bytes, flags: int) -> None:
            if packet.startswith(b"SUB"):
                listener.accept().wire.close()
            send(self, packet, flags)

        monkeypatch.setattr(Client, "_send_once", refuse)
        with pytest.raises(Disconnected):
            client.publish("k")
        assert isinstance(client.receive(0), Reconnected)

    def test_server_that_does_not_read(
        self,
        client: Client,
        listener: Listener,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A connection on which nobody listens is given up."""
        monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS_MAX", 0.01)
        for _ in range(2_000):
            client._patterns[b"%d" % len(client._patterns)] = 1
        listener.accept().wire.close()
        assert isinstance(client.receive(SECONDS_MAX), Reconnected)
        client._patterns.clear()
        assert isinstance(client.receive(SECONDS_MAX), Reconnected)

    def test_whoami_does_not_reconnect(
        self, client: Client, listener: Listener
    ) -> None:
        """[PKT-5] sync does not vouch for what an older server handled."""
        listener.accept().wire.close()
        with pytest.raises(Disconnected):
            client.sync(SECONDS_MAX)

    def test_descriptor(self) -> None:
        """A descriptor has no address."""
        for given in ({"fd": 0}, {"address": "/dev/fd/0"}):
            with pytest.raises(AddressError, match="connected again"):
                Client(**given, reconnect=True)


# =============================================================================
# What the protocol leaves to applications
# =============================================================================

Work = Callable[[], object]


@contextlib.contextmanager
def beside(work: Work) -> Iterator[None]:
    """Do some work in another thread; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result(SECONDS_MAX)


class TestApplications:
    """acknowledge, request and reply, proofs of identity."""

    @pytest.fixture
    def two(self, bus: RealBus) -> Iterator[tuple[Client, Client]]:
        """Two clients; the second listens to `service`."""
        with Client(bus.path) as one, Client(bus.path) as other:
            other.subscribe("service")
            other.sync()
            yield one, other

    def test_acknowledge(self, two: tuple[Client, Client]) -> None:
        """[PUB-6] What was published before arrives before, and is kept."""
        one, other = two
        one.subscribe("k")
        one.publish("k", b"v")
        one.publish("service", b"v")
        acknowledge(one, SECONDS_MAX)
        assert one.receive(0) == (b"k", b"v")
        assert other.receive(0) == (b"service", b"v")
        with pytest.raises(TimeoutError):
            one.receive(0)

    def test_acknowledge_without_an_echo(self, bus: RealBus) -> None:
        """[ECHO-2] Without echoes nothing comes back; then it is over."""
        with Client(bus.path) as client:
            client.control("echo/off")
            with pytest.raises(TimeoutError):
                acknowledge(client, 0.05)
            client.sync(SECONDS_MAX)
            assert client._patterns == {}

    def test_server_that_goes_away(self, ends: Ends) -> None:
        """The error is that of the server, not of what comes after it."""
        ends.server.send(ANSWER)
        ends.server.wire.shutdown(socket.SHUT_WR)
        with pytest.raises(Disconnected):
            acknowledge(ends.client, SECONDS_MAX)

    def test_server_that_goes_away_for_long(self, listener: Listener) -> None:
        """A client that reconnects does not wait for that in a helper."""

        def serve() -> None:
            with listener.accept() as server:
                listener.wire.close()
                server.receive()
                server.send(ANSWER)
                assert server.receive().startswith(b"SUB ")
                assert server.receive().startswith(b"MSG ")

        with Client(listener.path, reconnect=True) as client:
            with beside(serve), pytest.raises(Disconnected):
                acknowledge(client, SECONDS_MAX)
            assert not list(client._kept)

    def test_request(self, two: tuple[Client, Client]) -> None:
        """[CRED-10] The answer comes under a private key."""
        one, other = two

        def serve() -> None:
            asked = parse_request(other.receive(SECONDS_MAX))
            path = other.whoami(SECONDS_MAX).path
            assert asked.reply_key.startswith(path + b"/")  # one process
            assert asked[:2] == (b"service", b"1\0002")
            reply(other, asked, b"answer")

        with beside(serve):
            answer = request(one, "service", b"1\0002", SECONDS_MAX)
        assert answer == b"answer"
        assert one._patterns == {}

    def test_request_that_nobody_answers(
        self, two: tuple[Client, Client]
    ) -> None:
        """A late answer is not taken for that to another request."""
        one, other = two
        with pytest.raises(TimeoutError):
            request(one, "service", timeout=0.01)
        late = parse_request(other.receive(SECONDS_MAX))
        reply(other, late, b"late")
        with beside(
            lambda: reply(
                other, parse_request(other.receive(SECONDS_MAX)), b"right"
            )
        ):
            assert request(one, "service", timeout=SECONDS_MAX) == b"right"

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"!/cred/1/2/3/x",
            b"a\0",
            b"!/cred/1/2/3\0",
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
            found.append(verify_identity(other, message, SECONDS_MAX))

        with beside(verify):
            found.append(prove_identity(one, "service", SECONDS_MAX))
        assert found == [one.whoami(), other.whoami()]

    def test_liar_who_cannot_read(self, two: tuple[Client, Client]) -> None:
        """[CRED-11] Who names another's key does not hear the challenge."""
        one, other = two
        one.publish("service", b"!/cred/0/0/1/x\0")
        message = other.receive(SECONDS_MAX)
        with pytest.raises(TimeoutError):
            verify_identity(other, message, 0.05)

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

        with beside(lie), pytest.raises(IdentityError, match="not repeat"):
            message = other.receive(SECONDS_MAX)
            verify_identity(other, message, SECONDS_MAX)

    def test_liar_who_verifies(self, two: tuple[Client, Client]) -> None:
        """[CRED-11] A wrong text is no proof of the one that was asked."""
        one, other = two

        def lie() -> None:
            first = parse_request(other.receive(SECONDS_MAX))
            own = other.whoami(SECONDS_MAX).path + b"/x"
            other.subscribe(own)
            reply(other, first, own + b"\0challenge")
            third = parse_request(other.receive(SECONDS_MAX))
            reply(other, third, b"wrong")

        with beside(lie), pytest.raises(IdentityError, match="not repeat"):
            prove_identity(one, "service", SECONDS_MAX)

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


# =============================================================================
# The client for asyncio
# =============================================================================


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
        """A reader that was left behind would keep the loop busy."""
        loop = asyncio.get_running_loop()
        async with async_ends() as (client, server):
            with pytest.raises(TimeoutError):
                await client.receive(0.001)
            task = await waiting(client.receive())
            server.send(b"MSG k\0v")
            await task
            assert not loop.remove_reader(client.fileno())
            await fill_up(client)
            task = await waiting(client.receive())
            publishing = await waiting(client.publish("k"))
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
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
        """[CONN-14] A loop takes every message, and ends in an error."""
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

    def test_full_queue_of_new_connections(self, directory: Path) -> None:
        """[CONN-17] A client waits while the server's queue is full."""
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
        """[CONN-17] To cancel it leaves nothing open."""
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
