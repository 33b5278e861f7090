"""Tests of how a client connects, stays connected, and is used."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from client_ends import Ends
from packets import ANSWER, WHOAMI
from processes import SECONDS_MAX, has_ended, outcome, started
from real_bus import (
    Listener,
    RealBus,
    other_user,
    seqpacket,
    seqpacket_pair,
    wait_for,
)
from sbus_client import (
    PACKET_BYTES_MAX,
    AddressError,
    Client,
    Disconnected,
    PacketError,
    PacketTooLarge,
    Reconnected,
    SbusError,
)

ABSTRACT = "/dev/unix/abstract/"


def is_connecting(process: subprocess.Popen[str]) -> bool:
    """Return whether a command sleeps and has a socket."""
    process_directory = Path(f"/proc/{process.pid}")
    try:
        status = (process_directory / "status").read_text("utf-8")
        files = [os.readlink(f) for f in process_directory.glob("fd/*")]
    except OSError:  # it is opening or closing files
        return False
    return "\nState:\tS" in status and "socket:" in " ".join(files)


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
        """[RUN-8] What the server prints is an address."""
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

    def test_address_in_the_environment(
        self, listener: Listener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It stands for the default, and for no other."""
        monkeypatch.setenv("SBUS_ADDRESS", listener.path)
        with Client() as client:
            assert client.address == listener.path
        with pytest.raises(Disconnected, match="/nowhere"):
            Client("/nowhere")

    def test_full_queue_of_new_connections(self, directory: Path) -> None:
        """A client waits while the server's queue is full."""
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

    @pytest.mark.parametrize("timeout", [0, 0.001])
    def test_full_queue_for_a_time(
        self, directory: Path, timeout: float
    ) -> None:
        """A timeout is over, one of nothing at once."""
        full = Listener(str(directory / "bus"), backlog=0)
        with full.wire, Client(full.path), pytest.raises(TimeoutError):
            Client(full.path, timeout=timeout)


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
        assert os.get_blocking(client.socket.fileno())
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
        """[CLIENT-6] What the old server sent is received first."""
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
        self,
        client: Client,
        listener: Listener,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Pauses double up to 5 s, less up to half, and begin again after a
        connection that lived for longer.
        """
        now, slept = 1000.0, []

        def sleep(seconds: float) -> None:
            nonlocal now
            slept.append(seconds)
            now += seconds
            if len(slept) == 29:
                bind()

        def bind() -> None:
            os.unlink(listener.path)
            listeners.append(Listener(listener.path, backlog=8))

        monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS_MIN", 0.05)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        monkeypatch.setattr(time, "sleep", sleep)
        listeners = [listener]
        for lived, first in ((0, 0.05), (1, 5.0), (11, 0.05)):
            now += lived
            slept.clear()
            server = listeners[-1].accept()
            listeners.pop().wire.close()
            server.wire.close()
            assert isinstance(client.receive(), Reconnected)
            for number, seconds in enumerate(slept):
                longest = min(5.0, first * 2**number)
                assert (
                    longest / 2 - (number == 0) <= round(seconds, 9) <= longest
                )
            assert len(slept) == len(set(slept)) == 29
        listeners.pop().wire.close()

    def test_full_queue_of_new_connections(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full queue is tried again."""
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
        send = Client._send_by

        def refuse(self: Client, end: Any, packet: bytes, *flags: int) -> None:
            if packet.startswith(b"SUB"):
                listener.accept().wire.close()
            send(self, end, packet, *flags)

        monkeypatch.setattr(Client, "_send_by", refuse)
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

    def test_question_is_to_be_asked_again(
        self, client: Client, listener: Listener
    ) -> None:
        """[PKT-5] sync does not vouch for what an older server handled."""
        listener.accept().wire.close()
        with pytest.raises(Disconnected, match="must be asked again"):
            client.sync(SECONDS_MAX)
        with listener.accept() as server:
            server.send(ANSWER)
            client.sync(SECONDS_MAX)
        assert isinstance(client.receive(0), Reconnected)

    def test_requests_alone(self, directory: Path) -> None:
        """A client that only asks is connected again as well."""
        with RealBus(directory) as bus:
            client = Client(bus.path, reconnect=True)
            client.sync(SECONDS_MAX)
            bus.stop()
        with client, RealBus(directory):
            with pytest.raises(Disconnected, match="must be asked again"):
                client.request("k", timeout=SECONDS_MAX)
            with pytest.raises(TimeoutError):
                client.request("k", timeout=0.01)

    def test_epoll_is_quiet(self, client: Client, listener: Listener) -> None:
        """While there is no bus a program sleeps, and asks for how long."""
        server = listener.accept()
        with select.epoll() as epoll:
            epoll.register(client, select.EPOLLIN)
            assert client.retry_in() is None and not epoll.poll(0)
            assert client.fileno() != client.socket.fileno()
            listener.wire.close()
            server.wire.close()
            assert epoll.poll(SECONDS_MAX)
            for _ in range(5):
                with pytest.raises(BlockingIOError):
                    client.receive(flags=socket.MSG_DONTWAIT)
                seconds = client.retry_in()
                assert seconds is not None and not epoll.poll(seconds)
            os.unlink(listener.path)
            again = Listener(listener.path, backlog=8)
            with again.wire:
                assert isinstance(client.receive(SECONDS_MAX), Reconnected)
                assert client.retry_in() is None and not epoll.poll(0)
                with again.accept() as server:
                    server.send(b"MSG k\0v")
                    assert epoll.poll(SECONDS_MAX)
                    assert client.receive(0) == (b"k", b"v")

    def test_once_it_is_closed(self, client: Client) -> None:
        """There is no descriptor any more."""
        client.close()
        assert client.fileno() == -1
        with pytest.raises(Disconnected, match="client is closed"):
            client.receive(0)

    def test_refused_subscription(self, directory: Path) -> None:
        """[KEY-4] One's own mistake is told, not repeated for ever."""
        with (
            RealBus(directory) as bus,
            Client(bus.path, reconnect=True) as client,
        ):
            client.subscribe("a/!")
            with pytest.raises(Disconnected, match="refuses one of them"):
                for _ in range(3):
                    received = client.receive(SECONDS_MAX)
                    assert isinstance(received, Reconnected)

    def test_descriptor(self) -> None:
        """A descriptor has no address."""
        for given in ({"fd": 0}, {"address": "/dev/fd/0"}):
            with pytest.raises(AddressError, match="connected again"):
                Client(**given, reconnect=True)
