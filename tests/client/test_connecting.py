"""Tests of how a client finds its bus, and with reconnect=True another."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import socket
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from client_ends import Kind, beside, open_numbers
from packets import ANSWER, WHOAMI, publish
from processes import SECONDS_MAX
from real_bus import (
    Listener,
    Peer,
    RealBus,
    needs_root,
    other_user,
    seqpacket,
    wait_for,
)
from sbus_client import (
    AddressError,
    AsyncClient,
    Client,
    Disconnected,
    Message,
    PacketError,
    Reconnected,
    SbusError,
    TimedOut,
)
from sizes import either

ABSTRACT = "/dev/unix/abstract/"


# ---- Where a client finds its bus


def test_malformed_address(kind: Kind) -> None:
    """[ADDR-4] An error tells a malformed address from one at which nothing
    is.
    """
    malformed = "", "0", "01", "ff00", "000", "00x", "00 1", "00" * 109
    errors = {
        **{ABSTRACT + text: "after .* come 2 to 216" for text in malformed},
        "\ud800": "is not UTF-8$",
        **dict.fromkeys(
            ("", "a\0b", "\udcc3\udca9" * 54), "path has 1 to 107 bytes"
        ),
        **{f"/dev/fd/{x}": f"descriptor {x}" for x in ("x", "-1", "9" * 30)},
    }
    for address, text in errors.items():
        with pytest.raises(AddressError, match=text):
            kind(address)
    with pytest.raises(Disconnected, match="nothing is there"):
        kind("x/" * 53 + "x")


def test_wrong_descriptor(kind: Kind, directory: Path) -> None:
    """A descriptor is refused for what it is, and stays open."""
    files: list[tuple[Any, str]] = [
        (directory.joinpath("file").open("w"), "on non-socket"),
        (socket.socket(), "not a Unix-domain SEQPACKET socket"),
        (seqpacket(), "a descriptor cannot reconnect"),
        (seqpacket(), "not connected"),
        (Listener(str(directory / "bus"), 8).wire, "not connected"),
    ]
    for file, text in files:
        with file, pytest.raises(AddressError, match=text):
            kind(f"/dev/fd/{file.fileno()}", reconnect="cannot" in text)
        # It was open still, or to close it would have failed


# ---- Finding nobody, and finding a crowd


NO_BUS = {
    errno.ENOENT: "nothing is there; start the server, or",
    errno.ECONNREFUSED: "no server listens there; start",
    errno.EPROTOTYPE: "another kind of socket is there",
    errno.EACCES: "its server does not let this user in",
}


@pytest.mark.parametrize("number", NO_BUS)
def test_no_bus(kind: Kind, directory: Path, number: int) -> None:
    """The error tells the cause, and what to do.  A bus may come where
    nothing is, or nobody listens.
    """
    path = directory / "bus"
    is_other = number == errno.EPROTOTYPE
    form = socket.SOCK_DGRAM if is_other else socket.SOCK_SEQPACKET
    waits = number in (errno.ENOENT, errno.ECONNREFUSED)
    with contextlib.ExitStack() as stack:
        if number != errno.ENOENT:
            wire = socket.socket(socket.AF_UNIX, form)
            stack.enter_context(wire).bind(str(path))
        if number == errno.EACCES:
            path.chmod(0)
            stack.enter_context(other_user())
        with pytest.raises(Disconnected, match=NO_BUS[number]) as caught:
            kind(str(path))
        assert caught.value.errno == number
        with (
            pytest.raises(TimedOut if waits else Disconnected),
            kind(str(path), reconnect=True) as client,
        ):
            client.receive(0)


@pytest.mark.parametrize("reconnect", [False, True])
def test_full_queue(kind: Kind, directory: Path, reconnect: bool) -> None:
    """A client waits until the server lets it in, or its time is over."""
    full = Listener(str(directory / "bus"), backlog=0)

    def connect() -> None:
        with kind(full.path, reconnect=reconnect) as client:
            client.publish("k")

    with full.wire, Client(full.path):
        for timeout in (0, 0.001):
            with pytest.raises(TimeoutError, match="too many clients"):
                kind(full.path, timeout=timeout)
        with beside(connect, asleep=True) as connecting:
            assert not connecting.done()
            with full.accept(), full.accept() as server:
                assert b"MSG k\0" in (server.receive(), server.receive())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS", 0.05)


def is_reconnected(client: Client) -> bool:
    """Return whether a client says next that it has another bus."""
    return type(client.receive(SECONDS_MAX)) is Reconnected


# ---- A bus that is not there yet, is stopped and is started again


def test_pauses(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is half a second at most, and half of that at least; a lost bus
    that has lasted longer is looked for at once.
    """
    now, longest = 1_000.0, 0.5
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(sbus_client, "time", clock)
    monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS", longest)
    with Client(str(directory / "bus"), reconnect=True) as client:
        for _ in range(3):
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    client.receive(0)
                left = client.retry_in()
                assert left is not None and longest / 2 <= left <= longest
                now += left
            with RealBus(directory):
                assert is_reconnected(client)
                now += longest


def test_descriptor(directory: Path) -> None:
    """The descriptor stays the same, and is quiet while there is no bus.
    Programs that the client's program starts do not inherit the socket.
    """
    with (
        select.epoll() as epoll,
        Client(str(directory / "bus"), reconnect=True) as client,
    ):
        epoll.register(client, select.EPOLLIN)
        ready = [(client.fileno(), select.EPOLLIN)]
        client.subscribe("k")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                client.receive(0)
            assert not epoll.poll(client.retry_in())
            with RealBus(directory) as bus, bus.connect() as peer:
                received = None
                while not received:
                    epoll.poll(client.retry_in())
                    with contextlib.suppress(TimeoutError):
                        received = client.receive(0)
                assert type(received) is Reconnected
                assert not os.get_inheritable(client.socket.fileno())
                client.sync(SECONDS_MAX)
                assert not epoll.poll(0)
                peer.send(b"MSG k\0v")
                assert epoll.poll(SECONDS_MAX) == ready
                assert client.receive(0) == (b"k", b"v")
                assert not epoll.poll(0)
            assert epoll.poll(SECONDS_MAX) == ready


def test_threads(directory: Path) -> None:
    """Each of three clients has a thread that sends and one that receives.  No
    call raises anything, order is kept, and in the end all receive from all.
    """
    keys = {b"k/%d" % number for number in range(3)}
    path, is_over = str(directory / "bus"), threading.Event()
    keys_heard: list[set[bytes]] = [set() for _ in keys]

    def send(client: Client, number: int) -> None:
        sent = 0
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                text = b"%07d" % sent * 1_000
                client.publish(f"k/{number}", text, timeout=0.1)
                sent += 1

    def receive(client: Client, number: int) -> None:
        last = dict.fromkeys(keys, b"")
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                key, payload = received = client.receive(0.1)
                if type(received) is Message:
                    assert payload == payload[:7] * 1_000 > last[key]
                    last[key] = payload
                    keys_heard[number].add(key)

    with contextlib.ExitStack() as stack:
        for number in range(3):
            client = Client(path, reconnect=True)
            stack.enter_context(client).subscribe("k/")
            for work in send, receive:
                stack.enter_context(beside(work, client, number))
        stack.callback(is_over.set)
        for _ in range(6):
            with RealBus(directory):
                for received in keys_heard:
                    received.clear()
                wait_for(lambda: keys_heard == [keys] * 3)


# ---- What a server of the test sees and does


@pytest.fixture
def client(kind: Kind, listener: Listener) -> Iterator[Client]:
    with kind(listener.path, reconnect=True) as client:
        yield client


def another(client: Client, listener: Listener) -> tuple[Peer, list[bytes]]:
    """Have a client find a server; return that, and what it was sent."""

    def greet() -> tuple[Peer, list[bytes]]:
        server = listener.accept()
        packets = list(iter(server.receive, WHOAMI))
        server.send(ANSWER)
        return server, packets

    with beside(greet) as done:
        assert is_reconnected(client)
        client.sync(SECONDS_MAX)
    return done.result()


NOTICE = Reconnected(b"", b"")  # before what comes from another bus


class Conversation:
    """A client, its buses, which the test is, and what it is to receive."""

    def __init__(self, client: Client, listener: Listener, seed: int) -> None:
        self.client = client
        self.listener = listener
        self.bus = listener.accept()
        self.dice = random.Random(seed)
        # Each second Client is watched, which changes how it works
        self.has_descriptor = isinstance(client, Client) and seed % 2 == 1
        self.number = 0
        self.told: Counter[bytes] = Counter()  # as each bus is to be
        self.coming: list[tuple[bytes, bytes]] = []  # as receive is to return
        # By key, whether receive is to return the answer
        self.questions: dict[str, list[bool]] = {
            "!/cred/whoami": [],
            "stats": [],
        }

    def act(self) -> None:
        """Do something at random, and check what comes of it."""
        self.number += 1
        names = "subscribe unsubscribe set_mode publish hear receive ask"
        names += " ask_in_vain answer sync lose_the_bus"
        getattr(self, self.dice.choice(names.split()))()

    def subscribe(self) -> None:
        pattern = self.dice.choice("abc")
        self.client.subscribe(pattern)
        self.told[b"SUB " + pattern.encode()] += 1
        assert self.bus.receive() == b"SUB " + pattern.encode()

    def unsubscribe(self) -> None:
        pattern = self.dice.choice("abc")
        self.client.unsubscribe(pattern)
        self.told -= Counter([b"SUB " + pattern.encode()])
        assert self.bus.receive() == b"UNSUB " + pattern.encode()

    def set_mode(self) -> None:
        mode = self.dice.choice(["order/stack", "order/random", "echo/off"])
        self.client.control(mode)
        packet = b"CMSG " + mode.encode()
        self.told.pop(packet, None)
        self.told[packet] = 1  # the last sent is the last
        assert self.bus.receive() == packet

    def publish(self) -> None:
        self.client.publish("k", b"%d" % self.number)
        assert self.bus.receive() == publish(b"k", b"%d" % self.number)

    def hear(self) -> None:
        self.bus.send(publish(b"k", b"%d" % self.number))
        self.coming.append((b"k", b"%d" % self.number))

    def receive(self) -> None:
        if self.coming:
            assert self.is_readable()
            assert self.client.receive(0) == self.coming.pop(0)
        else:
            with pytest.raises(TimedOut, match="nothing came"):
                self.client.receive(0)
            assert not self.has_descriptor or not self.is_readable()

    def is_readable(self) -> bool:
        """Return what the descriptor says, if this client has one."""
        if not self.has_descriptor:
            return True
        return bool(select.select([self.client], [], [], 0)[0])

    def ask(self) -> None:
        key = self.dice.choice([*self.questions])
        self.client.control(key)
        self.questions[key].append(True)
        assert self.bus.receive() == b"CMSG " + key.encode()

    def ask_in_vain(self) -> None:
        key = self.dice.choice([*self.questions])
        call = self.client.stats if key == "stats" else self.client.whoami
        with pytest.raises(TimedOut, match="server does not answer"):
            call(0)
        self.questions[key].append(False)
        assert self.bus.receive() == b"CMSG " + key.encode()

    def answer(self, key: str = "") -> None:
        """Answer the first question of a key, or what nobody has asked."""
        key = key or self.dice.choice([*self.questions])
        text = b"{}" if key == "stats" else b"!/cred/1/2/%d" % self.number
        self.bus.send(b"CMSG " + key.encode() + b"\0" + text)
        is_asked = bool(self.questions[key])
        if not is_asked or self.questions[key].pop(0):
            self.coming.append((key.encode(), text))
        while self.coming and not is_asked:  # before there is a question
            self.receive()

    def sync(self) -> None:
        while self.questions["!/cred/whoami"]:
            self.answer("!/cred/whoami")
        self.bus.send(ANSWER)
        self.client.sync(0)
        assert self.bus.receive() == WHOAMI

    def lose_the_bus(self) -> None:
        """Lose it, with all that it was asked, and find another."""
        self.bus.wire.close()
        self.client.subscribe(f"{self.number}")  # which the old one misses
        self.told[b"SUB %d" % self.number] += 1
        self.client.publish("k", timeout=SECONDS_MAX)
        self.bus = self.listener.accept()
        packets = [*self.told.elements(), publish(b"k")]
        assert [self.bus.receive() for _ in packets] == packets
        if self.coming[-1:] != [NOTICE]:
            self.coming.append(NOTICE)
        for questions in self.questions.values():
            questions.clear()


@pytest.mark.parametrize("seed", range(either(40, 2)))
def test_random_conversations(
    client: Client, listener: Listener, seed: int
) -> None:
    """[CLIENT-6] [CLIENT-8] [CRED-12] [REQUEST-2] Whatever happens in what
    order, all messages come in theirs, after a notice if their bus is new.  An
    answer belongs to the first question of its key, and is dropped if its
    call is over.  A new bus is told each pattern as often as it is held, and
    each mode, in the order in which they were sent last.
    """
    conversation = Conversation(client, listener, seed)
    for _ in range(400):
        conversation.act()
    while conversation.coming:
        conversation.receive()
    conversation.bus.wire.close()


def test_slow_server(client: Client, listener: Listener) -> None:
    """No call waits for a server that does not read; messages are sent once
    it has read more patterns than the kernel can hold.
    """
    patterns = [b"SUB %d" % number for number in range(600)]
    with listener.accept() as server:
        for pattern in patterns:
            client.subscribe(pattern[4:])
            server.receive()
    assert is_reconnected(client)
    with listener.accept() as server:
        client.subscribe("another")
        client.unsubscribe("another")
        for call in client.receive, client.sync, client.stats:
            with pytest.raises(TimeoutError, match="there is no bus at /"):
                call(0.01)
        with pytest.raises(TimeoutError, match="there is no bus at /"):
            client.publish("k", timeout=0)
        client.subscribe("meanwhile")
        packets = [b""]
        while packets[-1] != b"SUB meanwhile":
            packets.append(server.receive())
            with pytest.raises(TimeoutError):
                client.receive(0)
        assert packets[1:601] == patterns
        client.publish("k")
        assert server.receive() == b"MSG k\0"


def test_ask_again(client: Client, listener: Listener) -> None:
    """[PKT-5] sync does not vouch for what an older server handled, and a
    request's answer is lost; what follows has its own.  The next server is
    not told of the keys of answers, which may be another's there.
    """

    def serve_up_to(word: bytes) -> None:
        with server:
            while not (packet := server.receive()).startswith(word):
                if packet == WHOAMI:
                    server.send(ANSWER)

    server = listener.accept()
    for word in WHOAMI, b"MSG":
        with (
            beside(serve_up_to, word),
            pytest.raises(Disconnected, match="ask again"),
        ):
            client.request("k", timeout=SECONDS_MAX)
        server, packets = another(client, listener)
        assert packets == []
    with server:
        server.send(WHOAMI + b"\0!/cred/1/2/3", ANSWER)
        assert client.whoami(SECONDS_MAX).pid == 3
        assert client.whoami(SECONDS_MAX).pid == 4242


# ---- What a client knows of one bus is not used for the next


@pytest.mark.parametrize("packet_count", [1, 2, 3])
def test_bus_that_goes_amid_a_first_request(
    client: Client, listener: Listener, packet_count: int
) -> None:
    """The next bus knows this client by another path, and hears nothing of
    the first; the request is answered, or is to be asked again.
    """

    def serve() -> list[bytes]:
        with listener.accept() as server:
            for _ in range(packet_count):
                if server.receive() == WHOAMI:
                    server.send(WHOAMI + b"\0!/cred/7/7/7")
        packets = [WHOAMI]
        with listener.accept() as server:
            while not packets[-1].startswith(b"MSG"):
                packets.append(server.receive())
                if packets[-1] == WHOAMI:
                    server.send(WHOAMI + b"\0!/cred/1/2/3")
            server.send(publish(packets[-1].split(b"\0")[1], b"answer"))
        return [packet for packet in packets if packet != WHOAMI]

    with beside(serve) as served:
        for _ in range(3):
            with contextlib.suppress(Disconnected):
                assert client.request("k", b"", SECONDS_MAX) == b"answer"
                break
    subscription, request = served.result()
    assert subscription.startswith(b"SUB !/cred/1/2/3/")
    assert request.startswith(b"MSG k\0!/cred/1/2/3/")


@pytest.mark.parametrize("pattern", ["!/cred/1/2/3/x", "b"])
def test_pattern_that_the_bus_refuses(
    directory: Path, kind: Kind, pattern: str
) -> None:
    """[CRED-4] [LIMIT-5] A pattern is another's secret, or one too many.  The
    client comes back after each pause, and stays once it takes the pattern
    back.
    """
    with kind(str(directory / "bus"), reconnect=True) as client:
        client.subscribe("a")
        client.subscribe(pattern)
        with RealBus(directory, "--max-patterns", "1"):
            for _ in range(3):
                assert is_reconnected(client)
            client.unsubscribe(pattern)
            with contextlib.suppress(Disconnected):  # of the bus before
                client.sync(SECONDS_MAX)
            client.sync(SECONDS_MAX)


def test_address_below_another_bus(directory: Path, kind: Kind) -> None:
    """A private address dies with its bus, as the next one may have another
    prefix.
    """
    path = str(directory / "bus")
    with RealBus(directory, "--cred-prefix", "!/cred/1/2/3") as bus:
        client = kind(path, reconnect=True)
        client.subscribe("a")
        client.subscribe(client.whoami(SECONDS_MAX).path + b"/inbox")
        bus.stop()
    with client, RealBus(directory, "--cred-prefix", "!/cred/1/2/4"):
        with pytest.raises(PacketError, match="inbox' is over with its bus"):
            client.receive(SECONDS_MAX)
        assert is_reconnected(client)
        client.subscribe(client.whoami(SECONDS_MAX).path + b"/inbox")
        client.publish("a")
        assert client.receive(SECONDS_MAX) == (b"a", b"")


def test_socket_that_the_program_closes(bus: RealBus) -> None:
    """The number of a closed socket may be another file's, which is left
    alone.
    """
    with Client(bus.path, reconnect=True) as client:
        number = client.socket.fileno()
        client.socket.close()
        assert os.open(os.devnull, os.O_RDONLY) == number
        with pytest.raises(Disconnected, match="socket .* was closed"):
            client.publish("k")
        assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
        os.close(number)


@contextlib.contextmanager
def no_descriptor(free: int = 0) -> Iterator[None]:
    """Have the process get no descriptor more, or only some."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + free, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for number in taken[len(taken) - free :]:
            os.close(number)
        yield
    finally:
        for number in taken[: len(taken) - free]:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_no_descriptor_is_free(directory: Path) -> None:
    """The client waits for one where it looks for its bus.  A call that
    cannot do without says so, and takes none.
    """
    with RealBus(directory) as bus:
        client = Client(bus.path, reconnect=True)
        client.sync(SECONDS_MAX)
    with client, RealBus(directory) as bus:
        with no_descriptor():
            for timeout in (0.1, 0):
                with pytest.raises(TimedOut, match="there is no bus"):
                    client.receive(timeout)
            with pytest.raises(SbusError, match="can get no descriptor: Too"):
                Client(bus.path)
        for free in range(2):
            before = open_numbers()
            with (
                no_descriptor(free),
                pytest.raises(SbusError, match="can get no descriptor: Too"),
            ):
                client.fileno()
            assert open_numbers() == before
        assert is_reconnected(client)
        assert client.fileno() != -1


@pytest.mark.parametrize("name", ["json", "asyncio"])
def test_no_descriptor_for_a_module(
    name: str, bus: RealBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that loads one says so in a sentence of ours."""
    with Client(bus.path) as client:
        monkeypatch.delitem(sys.modules, name)
        with (
            no_descriptor(),
            pytest.raises(SbusError, match=f"can get no {name}: Too many"),
        ):
            AsyncClient(bus.path) if name == "asyncio" else client.stats()


def test_timeout_over_several_buses(directory: Path) -> None:
    """A request that each bus leaves alone is over in its own time."""
    lost: list[bytes] = []

    def serve() -> None:
        while not is_over.is_set():
            with listener.accept() as server:
                lost.append(server.receive())

    def stop() -> None:
        is_over.set()
        client.close()
        with seqpacket() as last:
            last.connect(listener.path)

    is_over = threading.Event()
    with Client(str(directory / "bus"), reconnect=True) as client:
        for number in range(600):  # more than the kernel can hold
            client.subscribe(f"{number}")
        listener = Listener(str(directory / "bus"), 8)
        with listener.wire, beside(serve), contextlib.ExitStack() as stack:
            stack.callback(stop)
            with pytest.raises(TimedOut, match="there is no bus"):
                client.request("k", timeout=1.0)
    assert len(lost) > 1


def test_default_directory_that_another_has_made_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[ADDR-1] A client that looks for its bus goes to nobody else's."""
    for name in ("XDG_RUNTIME_DIR", "SBUS_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    uid = 4_000_000_000 + os.getpid()  # nobody's
    monkeypatch.setattr(os, "getuid", lambda: uid)
    address = sbus_client.default_address()
    assert address == f"/tmp/sbus-{uid}/sbus.socket"
    os.mkdir(os.path.dirname(address), 0o700)
    try:
        with pytest.raises(AddressError, match="not yours alone"):
            Client(address)
    finally:
        os.rmdir(os.path.dirname(address))


@needs_root
@pytest.mark.parametrize("owner", [1, 2])
def test_default_server_that_another_has_put_there(
    monkeypatch: pytest.MonkeyPatch, directory: Path, owner: int
) -> None:
    """[ADDR-1] The kernel says whose it is, however the path got there."""
    monkeypatch.setattr(os, "getuid", lambda: 1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    os.chown(directory, owner, -1)
    with other_user(owner):
        listener = Listener(str(directory / "sbus.socket"), 8)
    os.chown(directory, 1, -1)
    with listener.wire:
        if owner == 1:
            Client().close()
            return
        with pytest.raises(AddressError, match="not yours alone"):
            Client(listener.path)
