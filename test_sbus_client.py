"""Tests of sbus_client.py: the library, and the command line.

What only a server can do is tested with a server process.  What a server
does wrong, or does at a certain moment, is done by the other end of a pair
of sockets, or by a listener of the test's own.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sbus_client
from sbus_client import (
    PACKET_BYTES_MAX,
    AddressError,
    Client,
    ControlMessage,
    Credentials,
    Disconnected,
    Message,
    PacketError,
    PacketTooLarge,
    SbusError,
)
from testbed import (
    HERE,
    SECONDS_MAX,
    WHOAMI,
    Peer,
    RealBus,
    Result,
    publish,
    run,
    scratch_directory,
    wait_for,
)

ANSWER = WHOAMI + b"\0!/cred/100/1000/4242"
HEAD_BYTES = len(publish(b"k"))  # of a packet with the key `k`
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


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


@pytest.fixture
def bus(directory: Path) -> Iterator[RealBus]:
    with RealBus(directory, "--trace", str(directory / "trace")) as running:
        yield running


class Listener:
    """A server that does what the test says."""

    def __init__(self, path: str, backlog: int) -> None:
        self.path = path
        self.wire = seqpacket()
        self.wire.settimeout(SECONDS_MAX)
        self.wire.bind(path)
        self.wire.listen(backlog)

    def accept(self) -> Peer:
        """Return the other end of the next client's socket."""
        return Peer(self.wire.accept()[0])


@pytest.fixture
def listener(directory: Path) -> Iterator[Listener]:
    listening = Listener(str(directory / "bus"), backlog=8)
    with listening.wire:
        yield listening


def seqpacket() -> socket.socket:
    """Return a new socket of the bus's kind."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two sockets of the bus's kind that are connected."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def fill(client: Client, payload_bytes: int = 0) -> int:
    """Publish until the kernel takes no more; return how many it took."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            client.publish("k", bytes(payload_bytes), socket.MSG_DONTWAIT)
            count += 1
    return count


def gone(address: str) -> str:
    """Return the line of a command that the server has disconnected."""
    what = "has closed the connection: it stopped, or it refused what was"
    what += " sent or this user; its log says why"
    return f"sbus: the server at {address} {what}\n"


@contextlib.contextmanager
def other_user() -> Iterator[None]:
    """Be a user without privileges for a while, if we are root."""
    own = os.geteuid()
    os.seteuid(own or 65534)
    try:
        yield
    finally:
        os.seteuid(own)


def freeze(bus: RealBus) -> None:
    """Stop a server's process for a while, and return once it stands."""
    bus.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, bus.process.pid, os.WSTOPPED)


def thaw(bus: RealBus) -> None:
    """Let a server's process go on."""
    bus.process.send_signal(signal.SIGCONT)


# =============================================================================
# Commands
# =============================================================================

# What a user has: output into a pipe is kept back unless it is flushed
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": ""}


def sbus(address: str, *arguments: str, **options: Any) -> Result:
    """Run sbus_client.py to its end."""
    options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, **options}
    if "input" in options:
        del options["stdin"]
    return run("sbus_client.py", "-a", address, *arguments, **options)


@contextlib.contextmanager
def started(
    address: str, *arguments: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run sbus_client.py beside the test, up to its own end."""
    file = str(HERE / "sbus_client.py")
    with subprocess.Popen(
        [sys.executable, file, "-a", address, *arguments],
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": ENVIRONMENT,
            **options,
        },
    ) as process:
        try:
            yield process
            process.wait(SECONDS_MAX)
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> Result:
    """Return how a command ends that runs beside the test."""
    output, errors = process.communicate(timeout=SECONDS_MAX)
    return Result(process.returncode, output or "", errors)


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Return whether a command has ended."""
    return process.poll() is not None


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

    PATH = HERE / "sbus_client.py"
    USED = "__future__ argparse collections errno math os re select socket"
    USED += " sys time types typing"
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
            def control(
                self,
                key: str | bytes,
                payload: sbus_client.Payload = b"",
                flags: int = 0,
            ) -> None:
                try:
                    super().control(key, payload, flags)
                except BlockingIOError:
                    thaw(bus)
                    raise

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
# The command line
# =============================================================================


class TestSub:
    """sub: print messages."""

    def test_message_is_a_line(self, bus: RealBus) -> None:
        """A line is the key, a tab and the payload, and comes at once."""
        trace = Path(bus.path).with_name("trace")
        with started(bus.path, "sub", "a/*", "b/") as command:
            wait_for(lambda: trace.read_text().count('"ev":"sub"') == 2)
            with Client(bus.path) as client:
                for key in ("a/1", "a/1/2", "b/1/2", "c"):
                    client.publish(key, b"some text")
            assert command.stdout
            assert command.stdout.readline() == "a/1\tsome text\n"
            assert command.stdout.readline() == "b/1/2\tsome text\n"
            assert not has_ended(command)
            bus.stop()
            assert outcome(command) == (1, "", gone(bus.path))

    def test_no_pattern(self, listener: Listener) -> None:
        """[MATCH-4] Without a pattern sub subscribes to the empty one."""
        with started(listener.path, "sub"), listener.accept() as server:
            assert server.receive() == b"SUB "

    def test_pattern_that_is_no_text(self, listener: Listener) -> None:
        """A pattern's bytes are sent as they were given."""
        pattern = os.fsdecode(b"\xff\xc3\xa9")
        command = started(listener.path, "sub", "--", "-x", pattern)
        with command, listener.accept() as server:
            assert server.receive() == b"SUB -x"
            assert server.receive() == b"SUB \xff\xc3\xa9"

    def test_control_messages_are_not_printed(
        self, listener: Listener
    ) -> None:
        """sub prints what was published and nothing else."""
        with started(listener.path, "sub") as command:
            with listener.accept() as server:
                server.receive()
                server.send(b"CMSG x\0v", b"MSG k\0v")
            assert outcome(command).output == "k\tv\n"

    @pytest.mark.parametrize(
        "encoding, accent", [("utf-8", "é"), ("ascii", r"\xc3\xa9")]
    )
    def test_unprintable_bytes_are_escaped(
        self, listener: Listener, encoding: str, accent: str
    ) -> None:
        """What is no text, or breaks a line, is as in a bytes literal."""
        with started(
            listener.path,
            "sub",
            env={**ENVIRONMENT, "PYTHONIOENCODING": encoding},
            encoding=encoding,
        ) as command:
            with listener.accept() as server:
                server.receive()
                server.send(
                    publish(b"a\tb", b"\xff \x00\n\x7f'\xc3\xa9"),
                    publish(rb"\xff", b"\xc2\x85\xed\xb3\xbf\xe2\x80\xae"),
                )
            first, second = outcome(command).output.splitlines()
        assert first.split("\t") == [r"a\tb", r"\xff \x00\n\x7f'" + accent]
        escaped = r"\xc2\x85\xed\xb3\xbf\xe2\x80\xae"
        assert second.split("\t") == [r"\\xff", escaped]

    @pytest.mark.parametrize(
        "number, status",
        [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
    )
    def test_signal(
        self, listener: Listener, number: int, status: int
    ) -> None:
        """A signal ends sub without another word."""
        command = started(listener.path, "sub")
        with command as process, listener.accept() as server:
            server.receive()
            process.send_signal(number)
            assert outcome(process) == (status, "", "")
            assert server.is_disconnected()

    def test_refused_pattern(self, bus: RealBus) -> None:
        """[KEY-4] A pattern that the server refuses ends sub."""
        done = sbus(bus.path, "sub", "!")
        assert done == (1, "", gone(bus.path))

    def test_reader_that_goes_away(self, listener: Listener) -> None:
        """When nobody reads its output any more sub ends in silence."""
        with started(listener.path, "sub") as command:
            with listener.accept() as server:
                server.receive()
                server.send(b"MSG k\0one")
                assert command.stdout
                assert command.stdout.readline() == "k\tone\n"
                command.stdout.close()
                server.send(b"MSG k\0two")
                assert command.wait(SECONDS_MAX) == 1
            assert command.stderr
            assert command.stderr.read() == ""

    def test_full_device(self, listener: Listener) -> None:
        """A line that cannot be written ends sub with one line."""
        with open("/dev/full", "w") as full:
            command = started(listener.path, "sub", stdout=full)
            with command as process, listener.accept() as server:
                server.receive()
                server.send(b"MSG k\0v")
                what = "sbus: standard output: No space left on device\n"
                assert outcome(process) == (1, "", what)


class TestPub:
    """pub: publish a message."""

    @pytest.fixture
    def peer(self, bus: RealBus) -> Iterator[Peer]:
        with bus.connect() as peer:
            peer.send(b"SUB ")
            peer.fence()
            yield peer

    def test_payload_is_given(self, bus: RealBus, peer: Peer) -> None:
        """The payload is the second argument, which may be empty."""
        assert sbus(bus.path, "pub", "a/1", "some text") == (0, "", "")
        assert sbus(bus.path, "pub", "a/2", "") == (0, "", "")
        assert peer.receive() == b"MSG a/1\0some text"
        assert peer.receive() == b"MSG a/2\0"

    @pytest.mark.parametrize("dash", [["-"], []])
    def test_payload_is_standard_input(
        self, bus: RealBus, peer: Peer, dash: list[str]
    ) -> None:
        """Without a payload, or with -, it is standard input."""
        done = sbus(bus.path, "pub", "k", *dash, input="one\ntwo\n")
        assert done == (0, "", "")
        assert peer.receive() == b"MSG k\0one\ntwo\n"

    def test_arguments_that_are_no_text(
        self, bus: RealBus, peer: Peer
    ) -> None:
        """Bytes are published as they were given."""
        text = os.fsdecode(b"\xff\xc3\xa9")
        assert sbus(bus.path, "pub", "--", text, f"-{text}").status == 0
        assert peer.receive() == b"MSG \xff\xc3\xa9\0-\xff\xc3\xa9"

    def test_message_of_the_limit(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-3] The largest message fits."""
        text = "x" * (PACKET_BYTES_MAX - HEAD_BYTES)
        assert sbus(bus.path, "pub", "k", input=text) == (0, "", "")
        assert peer.receive() == publish(b"k", text.encode("ascii"))

    # What a longer key takes is missing for the payload
    TOO_MUCH = "sbus: standard input holds more than the {} bytes that fit"
    TOO_MUCH += " with this key: the limit of a packet is 409600 bytes\n"

    @pytest.mark.parametrize("key, room", [("k", 409594), ("a/b", 409592)])
    def test_input_above_the_limit(
        self, bus: RealBus, peer: Peer, key: str, room: int
    ) -> None:
        """[LIMIT-1] A byte too much is told of, and nothing is published."""
        done = sbus(bus.path, "pub", key, input="x" * (room + 1))
        assert done == (1, "", self.TOO_MUCH.format(room))
        assert sbus(bus.path, "pub", key, input="x" * room) == (0, "", "")
        assert len(peer.receive()) == PACKET_BYTES_MAX

    def test_endless_input(self, bus: RealBus, peer: Peer) -> None:
        """[LIMIT-1] Input above the limit is not read to its end."""
        with open("/dev/zero") as zero:
            done = sbus(bus.path, "pub", "k", stdin=zero)
        assert done == (1, "", self.TOO_MUCH.format(409594))
        assert peer.fence() == []

    def test_closed_input(self, bus: RealBus) -> None:
        """Without a standard input there is no payload."""
        done = sbus(bus.path, "pub", "k", preexec_fn=lambda: os.close(0))
        assert done == (1, "", "sbus: standard input is closed\n")

    def test_unreadable_input(self, bus: RealBus) -> None:
        """Input that cannot be read is one line."""
        with open(os.devnull, "w") as file:
            done = sbus(bus.path, "pub", "k", stdin=file)
        what = "sbus: standard input: Bad file descriptor\n"
        assert done == (1, "", what)

    def test_refused_message(self, bus: RealBus, peer: Peer) -> None:
        """[KEY-4] pub waits until it knows that the message was taken."""
        done = sbus(bus.path, "pub", "!", "v")
        assert done == (1, "", gone(bus.path))
        assert peer.fence() == []


class TestWhoamiCommand:
    """whoami: print the credentials."""

    def test_credentials_are_printed(self, bus: RealBus) -> None:
        """[CRED-2] whoami prints the server's answer."""
        with started(bus.path, "whoami") as command:
            own = (os.getgid(), os.getuid(), command.pid)
            line = "!/cred/{}/{}/{}\n".format(*own)
            assert outcome(command) == (0, line, "")

    def test_output_on_a_full_device(self, bus: RealBus) -> None:
        """Output that cannot be written is one line."""
        what = "sbus: standard output: No space left on device\n"
        with (
            open("/dev/full", "w") as full,
            started(bus.path, "whoami", stdout=full) as command,
        ):
            assert outcome(command) == (1, "", what)

    def test_output_that_nobody_reads(self, bus: RealBus) -> None:
        """A pipe without a reader is not worth a line."""
        read_end, write_end = os.pipe()
        os.close(read_end)
        with (
            open(write_end, "w") as pipe,
            started(bus.path, "whoami", stdout=pipe) as command,
        ):
            assert outcome(command) == (1, "", "")

    def test_closed_output(self, bus: RealBus) -> None:
        """Without a standard output there is nothing to print to."""
        done = sbus(bus.path, "whoami", preexec_fn=lambda: os.close(1))
        assert done == (1, "", "sbus: standard output is closed\n")

    def test_inherited_descriptor(self) -> None:
        """A command can use a socket that its parent connected."""
        ours, theirs = seqpacket_pair()
        with ours, Peer(theirs) as server:
            fd = ours.fileno()
            server.send(ANSWER)
            done = sbus(f"/dev/fd/{fd}", "whoami", pass_fds=[fd])
            assert done == (0, "!/cred/100/1000/4242\n", "")
            assert server.receive() == WHOAMI


class TestUsage:
    """Exit statuses, and one clear line."""

    @pytest.mark.parametrize(
        "arguments, error",
        [
            ((), "the following arguments are required: COMMAND"),
            (("pub",), "the following arguments are required: KEY"),
            (("nothing",), "argument COMMAND: invalid choice: 'nothing'.*"),
            (("whoami", "x"), "unrecognized arguments: x"),
            (("sub", "-x"), "unrecognized arguments: -x"),
            (("-a",), "argument -a/--address: expected one argument"),
        ],
    )
    def test_wrong_usage(self, arguments: tuple[str, ...], error: str) -> None:
        """A wrong command line is one line and the exit status 2."""
        done = sbus("/nowhere", *arguments)
        assert (done.status, done.output) == (2, "")
        what = f"sbus: {error}; --help lists the options\n"
        assert re.fullmatch(what, done.errors)

    @pytest.mark.parametrize("command", [["sub"], ["pub", "k"], ["whoami"]])
    def test_no_bus(self, directory: Path, command: list[str]) -> None:
        """No bus at the address is one line and the exit status 1."""
        path = str(directory / "bus")
        what = f"sbus: no bus at {path}: nothing is there; start sbusd"
        what += ", or give its address with -a\n"
        assert sbus(path, *command) == (1, "", what)

    def test_forbidden_bus(
        self, directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where another address is no help the line does not name -a."""
        path = directory / "bus"
        with seqpacket() as listener:
            listener.bind(str(path))
            path.chmod(0)
            with other_user():
                assert sbus_client.main(["-a", str(path), "whoami"]) == 1
        what = f"sbus: no bus at {path}: {TestConnecting.FORBIDDEN}\n"
        assert capsys.readouterr() == ("", what)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("pub", "-a", "{}", "k", "v"),
            ("pub", "k", "v", "-a", "{}"),
            ("pub", "--address={}", "--", "k", "v"),
            ("-a", "/nowhere", "pub", "-a{}", "k", "v"),
        ],
    )
    def test_address_after_the_command(
        self, bus: RealBus, arguments: tuple[str, ...]
    ) -> None:
        """An address may follow the command; of several the last counts."""
        command = [word.format(bus.path) for word in arguments]
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert run("sbus_client.py", *command) == (0, "", "")
            assert peer.receive() == b"MSG k\0v"

    def test_address_after_every_command(self, directory: Path) -> None:
        """sub and whoami take it too."""
        path = str(directory / "bus")
        for arguments in (["sub", "-a", path, "x"], ["whoami", "-a", path]):
            done = run("sbus_client.py", *arguments)
            assert done.status == 1
            assert done.errors.startswith(f"sbus: no bus at {path}: ")

    def test_wrong_address(self) -> None:
        """A wrong address is one line and the exit status 1."""
        done = sbus("", "whoami")
        what = "sbus: '': a path has 1 to 107 bytes, none NUL\n"
        assert done == (1, "", what)

    def test_help(self) -> None:
        """The help names every command."""
        done = run("sbus_client.py", "--help")
        assert (done.status, done.errors) == (0, "")
        for command in ("sub", "pub", "whoami"):
            assert re.search(f"^    {command} ", done.output, re.M)

    @pytest.mark.parametrize(
        "command, facts",
        [
            (
                "sub",
                [
                    "[-a ADDRESS] [PATTERN ...]",
                    "a line each: its key, a tab, its payload",
                    "no printable text are escaped as in a Python bytes",
                    "'a/*' selects a/b but not a/b/c, 'a/' selects both",
                    "none at all selects all",
                ],
            ),
            (
                "pub",
                [
                    "[-a ADDRESS] KEY [PAYLOAD]",
                    "KEY the routing key that subscribers' patterns select",
                    "'-' or no PAYLOAD is standard input as it is, a final"
                    " line feed included",
                    "write -- before a PAYLOAD that begins with '-'",
                ],
            ),
            ("whoami", ["[-a ADDRESS]", "credentials"]),
        ],
    )
    def test_help_of_a_command(self, command: str, facts: list[str]) -> None:
        """The help of a command says what it takes and prints."""
        env = {**ENVIRONMENT, "COLUMNS": "80"}
        done = run("sbus_client.py", command, "--help", env=env)
        assert (done.status, done.errors) == (0, "")
        assert max(map(len, done.output.splitlines())) < 80
        text = " ".join(done.output.split())
        assert [fact for fact in facts if fact not in text] == []

    def test_examples_in_the_help(self, bus: RealBus) -> None:
        """The examples are commands that work together."""
        examples = {}
        for command in ("sub", "pub"):
            text = run("sbus_client.py", command, "--help").output
            _, example = text.split("\nexample:\n  sbus ")
            examples[command] = shlex.split(example)
        trace = Path(bus.path).with_name("trace")
        with started(bus.path, *examples["sub"]) as subscriber:
            wait_for(lambda: '"ev":"sub"' in trace.read_text())
            assert sbus(bus.path, *examples["pub"]) == (0, "", "")
            assert subscriber.stdout
            line = "\t".join(examples["pub"][1:]) + "\n"
            assert subscriber.stdout.readline() == line
            bus.stop()

    @pytest.mark.parametrize(
        "arguments", [["--", "k", "-v"], ["k", "--", "-v"]]
    )
    def test_payload_that_begins_with_a_dash(
        self, bus: RealBus, arguments: list[str]
    ) -> None:
        """What follows -- is no option."""
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert sbus(bus.path, "pub", *arguments) == (0, "", "")
            assert peer.receive() == b"MSG k\0-v"
