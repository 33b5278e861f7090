"""Tests of the client library: packets out and in, questions, addresses."""

from __future__ import annotations

import ast
import itertools
import os
import pydoc
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import sbus
import sbus_client
from client_ends import Ends, fill
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from processes import ROOT, SECONDS_MAX, gone, run
from real_bus import Peer, RealBus, freeze, seqpacket_pair, thaw
from sbus_client import (
    PACKET_BYTES_MAX,
    Client,
    ControlMessage,
    Credentials,
    Disconnected,
    Message,
    PacketError,
    PacketTooLarge,
)


class TestClientFile:
    """What the file promises of itself: drop it in."""

    PATH = ROOT / "sbus_client.py"
    USED = "__future__ argparse asyncio base64 collections concurrent"
    USED += " contextlib dataclasses datetime errno fcntl functools io"
    USED += (
        " itertools json math mmap os pathlib random re select signal socket"
    )
    USED += " struct subprocess sys time types typing"
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

    def test_names(self) -> None:
        """What a program needs is said, and what it does not is not."""
        for name in sbus_client.__all__:
            assert getattr(sbus_client, name).__module__ == "sbus_client"
        assert len(pydoc.render_doc(sbus_client).splitlines()) < 1_500


class TestMatching:
    def test_short_patterns(self) -> None:
        """[MATCH-1] [MATCH-6] The client's matching is the server's."""

        def texts(alphabet: bytes, most: int) -> Iterator[bytes]:
            for count in range(most + 1):
                for text in itertools.product(alphabet, repeat=count):
                    yield bytes(text)

        keys = [*texts(b"a/\n", 4)]
        for pattern in texts(b"a/*", 4):
            for key in keys:
                expected = sbus.pattern_matches(pattern, key)
                assert sbus_client.matches(pattern, key) == expected

    def test_text(self) -> None:
        """[KEY-1] Keys and patterns may be text, without a NUL byte."""
        assert sbus_client.matches("é/*", "é/x".encode())
        with pytest.raises(PacketError):
            sbus_client.matches("a\0", "a")


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

    def test_publish_in_time(self, ends: Ends) -> None:
        """A packet that nobody takes meanwhile is not sent."""
        count = fill(ends.client)
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                ends.client.publish("k", b"late", timeout=timeout)
        for _ in range(count):
            ends.server.receive()
        ends.client.publish("k", b"in time", timeout=SECONDS_MAX)
        assert ends.server.receive() == b"MSG k\0in time"

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
        """[LIMIT-1] [CLIENT-3] A packet of 409,600 bytes passes unharmed."""
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
        """[CLIENT-3] A send buffer that is too small is raised."""
        ends.client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        ends.client.publish("k", bytes(size - HEAD_BYTES))
        assert len(ends.server.receive()) == size

    def test_packet_that_no_send_buffer_holds(self) -> None:
        """[CLIENT-3] A packet above the kernel's own limit is an error."""
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
        """[CLIENT-3] A raised buffer may be full, which is no other error."""
        fill(ends.client, 10_000)
        ends.client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        with pytest.raises(BlockingIOError):
            ends.client.publish("k", bytes(20_000), socket.MSG_DONTWAIT)

    def test_received_packet_above_the_limit(self) -> None:
        """[CLIENT-5] A cut packet is an error and never data."""
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


PUBLISH_BOTH = """
import socket
from sbus_client import Client
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
with Client(fd=ours.detach()) as client:
    for key in ("k", b"k", "k", b"k"):
        client.publish(key, b"v")
        assert theirs.recv(100) == b"MSG k\\0v"
theirs.close()
"""


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

    @pytest.mark.parametrize("key_bytes", [1, 8_187, 8_188, 20_000])
    def test_large_packet(self, ends: Ends, key_bytes: int) -> None:
        """It is cut at its first NUL byte, however far that is."""
        key, payload = b"k" * key_bytes, b"\0" + bytes(100_000) + b"v"
        for _ in range(2):
            ends.server.send(publish(key, payload))
        assert ends.client.receive() == Message(key, payload)
        assert next(iter(ends.client)) == Message(key, payload)

    def test_memory_of_many_clients(self) -> None:
        """What was never received takes none."""
        wires = [seqpacket_pair() for _ in range(200)]

        def memory() -> int:
            pages = Path("/proc/self/statm").read_text().split()[1]
            return int(pages) * resource.getpagesize()

        before = memory()
        clients = [Client(fd=ours.detach()) for ours, _ in wires]
        assert memory() - before < 20_480 * len(clients)
        for client, (_, theirs) in zip(clients, wires):
            client.close()
            theirs.close()

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

    def test_large_packets_among_others(self, ends: Ends) -> None:
        """[CLIENT-5] What comes behind a large packet is as it was sent."""
        large, longest = b"MSG k\0" + b"x" * 99_999, b"k" * 100_000
        ends.server.wire.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES_MAX
        )
        for packet in (
            large,
            b"CMSG c\0" + b"y" * 99_999,
            b"MSG " + longest + b"\0v",
            large,
            b"MSG k\0\0",
            large,
            b"MSG k",
            large,
        ):
            ends.server.send(packet)
            head, nul, payload = packet.partition(b"\0")
            if not nul:
                with pytest.raises(PacketError):
                    ends.client.receive(0)
                continue
            for flags in (socket.MSG_PEEK, socket.MSG_PEEK, 0):
                received = ends.client.receive(0, flags)
                assert received == (head.partition(b" ")[2], payload)
                assert isinstance(received, Message) == (head[:1] == b"M")
        with pytest.raises(TimeoutError):
            ends.client.receive(0)
        with pytest.raises(TimeoutError):
            ends.client.receive(0.001)
        ends.server.send(large)
        assert ends.client.socket.recv(3, socket.MSG_PEEK) == b"MSG"
        assert ends.client.receive(0).payload == b"x" * 99_999

    def test_large_packet_where_the_kernel_cannot_skip(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other kernels refuse an option, or take no notice of it."""
        large = b"MSG k\0" + b"x" * 99_999
        for option in (-1, socket.SO_PRIORITY):
            monkeypatch.setattr(sbus_client, "SO_PEEK_OFF", option)
            for _ in range(3):
                ends.server.send(large)
                assert ends.client.receive(0) == (b"k", large[6:])

    def test_keys_of_both_kinds(self) -> None:
        """A key as str and as bytes is one, where bytes are no str, too."""
        done = subprocess.run(
            [sys.executable, "-bb", "-c", PUBLISH_BOTH],
            cwd=Path(sbus_client.__file__).parent,
            stderr=subprocess.PIPE,
        )
        assert (done.returncode, done.stderr) == (0, b"")

    def test_long_keys_are_not_remembered(self) -> None:
        """What others publish under long keys takes no memory later."""
        heads = sbus_client.Heads(bytes.upper)
        assert heads[b"k" * 1_000] == b"K" * 1_000 and not heads
        for number in range(3_000):
            assert heads[b"k%d" % number] == b"K%d" % number
        assert 0 < len(heads) <= 1_024

    def test_timeout_of_zero(self, ends: Ends) -> None:
        """With a timeout of 0 what is there is returned, and nothing else."""
        with pytest.raises(TimeoutError):
            ends.client.receive(0)
        ends.server.send(b"MSG k\0v")
        assert ends.client.receive(0) == (b"k", b"v")
        with pytest.raises(TimeoutError):
            ends.client.receive(0)

    def test_timeout_is_waited_for(self, ends: Ends) -> None:
        """A timeout is not over before its time."""
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ends.client.receive(0.02)
        assert 0.02 <= time.monotonic() - start < SECONDS_MAX

    @pytest.mark.parametrize("timeout", [2e6, 1e10, float("inf")])
    def test_endless_timeout(self, ends: Ends, timeout: float) -> None:
        """A timeout may be longer than the kernel's longest."""
        sender = threading.Timer(0.01, ends.server.send, [b"MSG k\0v"])
        sender.start()
        assert ends.client.receive(timeout) == (b"k", b"v")
        sender.join()

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
        """[CLIENT-6] A client reads on after ECONNRESET."""
        ends.client.publish("k", b"the server never reads this")
        ends.server.send(b"MSG k\0one", b"MSG k\0two")
        ends.server.wire.close()
        assert ends.client.receive(timeout) == (b"k", b"one")
        assert ends.client.receive(timeout) == (b"k", b"two")
        with pytest.raises(Disconnected):
            ends.client.receive(timeout)

    def test_last_packets_after_a_send_has_failed(self, ends: Ends) -> None:
        """[CLIENT-6] A client that learns of the end by sending reads on."""
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
        """[CLIENT-6] A loop reads on after ECONNRESET."""
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
        """[PKT-1] A loop takes nothing malformed for a message, and can go on
        behind it.
        """
        ends.server.send(packet, b"MSG k\0v")
        received = iter(ends.client)
        with pytest.raises(PacketError, match="malformed packet"):
            next(received)
        assert next(received) == (b"k", b"v")

    def test_iteration_over_a_packet_above_the_limit(self) -> None:
        """[CLIENT-5] A loop takes no cut packet for a message."""
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

    def test_iteration_with_a_time_limit_of_python(self, ends: Ends) -> None:
        """settimeout of the socket is heeded."""
        ends.client.socket.settimeout(0.01)
        with pytest.raises(socket.timeout):
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
            def _wait(self, event: int, end: float) -> None:
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
