"""Tests of the client library: its file, its packets, and what it refuses."""

from __future__ import annotations

import ast
import contextlib
import copy
import errno
import inspect
import itertools
import os
import pickle
import random
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sbus
import sbus_client
from client_ends import Ends, Kind, both_ends, counted, fill
from packets import ANSWER, HEAD_BYTES, WHOAMI, publications, publish
from processes import ROOT, SECONDS_MAX
from real_bus import RealBus
from sbus_client import (
    PACKET_BYTES_MAX,
    AsyncClient,
    Client,
    ControlMessage,
    Disconnected,
    Message,
    PacketError,
    PacketTooLarge,
    SbusError,
    TimedOut,
    matches,
    owner_of,
    parse_request,
)
from sizes import either

FILE = ROOT / "sbus_client.py"
BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF)


# ---- What the file promises of itself: drop it in


def test_file_alone_runs(directory: Path) -> None:
    """The file needs neither the server's file nor any package, and has no
    syntax newer than 3.9.
    """
    ast.parse(FILE.read_text("utf-8"), feature_version=(3, 9))
    (directory / FILE.name).write_bytes(FILE.read_bytes())
    command = [sys.executable, "-S", "-E", FILE.name, "--version"]
    printed = subprocess.check_output(command, cwd=directory, text=True)
    assert printed == f"sbus_client.py {sbus_client.__version__}\n"


def test_async_client_has_the_calls_of_client() -> None:
    """AsyncClient has the calls of Client with the same parameters, to be
    awaited.
    """
    for name, call in vars(Client).items():
        if name[0] != "_" and name not in ("fileno", "close"):
            other = getattr(AsyncClient, name)
            assert inspect.iscoroutinefunction(other), name
            signatures = map(inspect.signature, (call, other))
            assert len(set(map(str, signatures))) == 1, name
    timeout = inspect.signature(Client.request).parameters["timeout"]
    assert timeout.default == 5


# ---- What the calls send


def test_payloads(ends: Ends) -> None:
    """[PUB-1] [CTL-1] A payload is sent as it is, whatever has its bytes."""
    client, server = ends
    view = memoryview(b"v-\0-w")[::2]
    for payload in b"v\0w", bytearray(b"v\0w"), memoryview(b"v\0w"), view:
        client.publish("k", payload)
        client.control("echo/on", payload)
        assert server.receive() == b"MSG k\0v\0w"
        assert server.receive() == b"CMSG echo/on\0v\0w"


@pytest.mark.parametrize("size", [100_000, 100_001])
def test_small_send_buffer_is_raised(kind: Kind, size: int) -> None:
    """[CLIENT-3] [CLIENT-11] A send buffer grows up to the kernel's limit."""
    with both_ends(kind, packet_bytes_max=1 << 30) as (client, server):
        client.socket.setsockopt(*BUFFER, 0)
        client.publish("k", bytes(size - HEAD_BYTES))
        assert len(server.receive()) == size
        server.wire.setsockopt(*BUFFER, 1 << 30)
        largest = server.wire.getsockopt(*BUFFER)
        with pytest.raises(PacketTooLarge, match="largest send buffer"):
            client.publish("k", bytes(largest - HEAD_BYTES))


@pytest.mark.parametrize("size, timeout", [(0, 0.01), (20_000, 0)])
def test_no_room(ends: Ends, size: int, timeout: float) -> None:
    """No call sends a packet without room.  Once there is room, it is sent."""
    client, server = ends
    count = fill(client, size)
    client.socket.setsockopt(*BUFFER, 0)
    calls = dict.fromkeys(("subscribe", "unsubscribe", "publish"), ["late"])
    calls |= {"control": ["echo/on"], "sync": []}
    for name, arguments in calls.items():
        with pytest.raises(TimeoutError, match="server takes nothing"):
            getattr(client, name)(*arguments, timeout=timeout)
    received = [server.receive() for _ in range(count)]
    assert received == [publish(b"k", bytes(size))] * count
    client.publish("k", b"in time", timeout=SECONDS_MAX)
    assert server.receive() == b"MSG k\0in time"


OWN = f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}"
PREFIX = "!/cred/1/2/3/"


# ---- What a server would refuse is told before it is sent


@pytest.mark.parametrize("limits", [(), (5_000, 20, 7)])
def test_cause_is_named(kind: Kind, limits: tuple[int, ...]) -> None:
    """[KEY-4] [KEY-1] [LIMIT-1] An error names the cause, and nothing is sent.
    Limits are options, by default those of a server.
    """
    names = "packet_bytes_max", "key_bytes_max", "segments_max"
    size, length, count = limits or (PACKET_BYTES_MAX, 4_096, 64)
    faults = {
        "a/!/cred/1/2/3/b": "a segment '!', which is reserved",
        "!/cred/1/2": "a segment '!', which is reserved for secrets",
        "k" * (length + 1): f"{length + 1} bytes, over {length}",
        "/" * count: f"{count + 1} segments, over {count}",
        "a\0b": "cannot hold a NUL byte",
    }
    with both_ends(kind, **dict(zip(names, limits))) as (client, server):
        for call in client.subscribe, client.unsubscribe, client.publish:
            for key, fault in faults.items():
                with pytest.raises(PacketError, match=fault):
                    call(key)
        with pytest.raises(PacketTooLarge, match=f"limit of {size} bytes"):
            client.publish("k", bytes(size + 1 - HEAD_BYTES))
        longest = "/" * (count - 1) + "k" * (length - count + 1)
        client.publish(longest)
        assert server.receive() == publish(longest.encode())


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_whatever_a_server_refuses(
    directory: Path, kind: Kind, prefix: str
) -> None:
    """[KEY-4] [CRED-2] The client refuses all that a server refuses, and
    nothing else, but for the secrets of others, which the server alone knows.
    """
    dice, errors = random.Random(24), ""
    options = ("--cred-prefix", prefix[:-1]) if prefix else ()
    starts = [f"{prefix}{OWN}/", f"{OWN}/", f"{prefix}!/cred//", "!/cred////"]
    segments = [*OWN.split("/"), *OWN.split("/")[2:], "", "*", "01", "7"]

    def is_refused(packet: str) -> bool:
        with bus.connect() as peer:
            with contextlib.suppress(BrokenPipeError):
                peer.send(packet.encode(), WHOAMI)
            return peer.receive() == b""

    with RealBus(directory, *options) as bus, kind(bus.path) as client:
        ids = client.whoami(SECONDS_MAX)
        assert ids == owner_of(ids.path + b"/x")
        assert ids.path.decode() == prefix + OWN
        calls: dict[str, Any] = {"MSG ": client.publish}
        calls |= {"SUB ": client.subscribe, "UNSUB ": client.unsubscribe}
        for _ in range(600):
            rest = "/".join(dice.choices(segments, k=dice.randrange(6)))
            text = dice.choice([*starts, ""]) + rest
            word = dice.choice([*calls])
            is_malformed = is_refused(f"MSG {text}\0")
            if is_malformed or not is_refused(f"{word}{text}\0"):
                try:
                    calls[word](text)
                    assert not is_malformed, text
                except PacketError as error:
                    assert is_malformed, text
                    errors += f"{error}\n"
        client.sync(SECONDS_MAX)
    assert errors.count("a segment '!'") > 9


# ---- What receive makes of packets


def test_any_packet(ends: Ends) -> None:
    """[PKT-1] [CLIENT-2] [CLIENT-5] A packet is cut at its first NUL byte,
    however large it is, or malformed.
    """
    client, server = ends
    server.wire.setsockopt(*BUFFER, PACKET_BYTES_MAX)
    dice = random.Random(5)
    words = [*[b"MSG ", b"CMSG "] * 2, b"SUB ", b"msg ", b""]
    sizes = [0, 1, 255, 257, 65_000, 65_529, 65_530, 65_531, 65_536]
    kinds = {b"MSG ": Message, b"CMSG ": ControlMessage}
    for number in range(400):
        word, nul = dice.choice(words), dice.choice([b"\0"] * 9 + [b""])
        key = b"k" * dice.choice([*range(9), *sizes]) + b" %d" % number
        payload = b"\0v" * (dice.choice(sizes) // 2)
        server.send(word + key + nul + payload)
        if word in kinds and (nul or payload):
            received = client.receive(0)
            assert type(received) is kinds[word]
            assert received == (key, payload if nul else payload[1:])
        else:
            with pytest.raises(PacketError, match="malformed packet"):
                client.receive(0)


def test_malformed_answers(ends: Ends) -> None:
    """[CTL-5] [CRED-2] Counts and credentials that are none are an error."""
    client, server = ends
    for counts in b"", b"5", b"[" * 100_000, b"\xff":
        server.send(b"CMSG stats\0" + counts)
        with pytest.raises(PacketError, match="malformed counts"):
            client.stats(SECONDS_MAX)
    for path in b"", b"!/cred/1/2", b"!/cred/1/2/x":
        server.send(WHOAMI + b"\0" + path)
        with pytest.raises(PacketError, match="malformed credentials"):
            client.whoami(SECONDS_MAX)


def test_iteration(kind: Kind) -> None:
    """[CLIENT-5] [CLIENT-6] A loop takes all that receive returns, what
    was kept first; its errors are those of receive, and it can go on.
    """
    with both_ends(kind, packet_bytes_max=70_000) as (client, server):
        server.send(*publications(2), ANSWER, b"CMSG x\0two", b"wrong")
        large = [b"MSG k\0" + bytes(size) for size in (69_995, 69_994)]
        server.send(*large, b"MSG k\0v")
        client.sync(0)
        payloads = [message.payload for message in itertools.islice(client, 3)]
        assert payloads == [b"0", b"1", b"two"]
        with pytest.raises(PacketError, match="malformed packet"):
            next(iter(client))
        with pytest.raises(PacketTooLarge, match="70001 bytes was receiv"):
            next(iter(client))
        client.publish("k", b"never read")
        server.wire.close()
        with pytest.raises(Disconnected):
            for payload in (large[1][6:], b"v", b"never"):
                assert next(iter(client)) == (b"k", payload)


# ---- What a client shows of itself


def test_repr_and_closed(bus: RealBus) -> None:
    """repr tells the state of a client; an address may be bytes."""
    with Client(os.fsencode(bus.path)) as client:
        assert repr(client) == f"<Client at {bus.path!r}: connected>"
        assert not client.closed
    assert repr(client) == f"<Client at {bus.path!r}: closed>"
    assert client.closed
    client = Client(bus.path + "-none", reconnect=True)
    assert repr(client).endswith(": without a bus>")
    client.close()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(bus: RealBus, way: Callable[[Client], Any]) -> None:
    """A client has no copies, whose end would be that of the client."""
    with Client(bus.path) as client:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            way(client)
        client.sync(SECONDS_MAX)


@pytest.mark.parametrize(
    "limits",
    [
        *[{"packet_bytes_max": size} for size in (-1, 1 << 62, 9.5, "9")],
        *[{"segments_max": 0}, {"key_bytes_max": None}],
    ],
)
def test_limits(kind: Kind, limits: dict[str, Any]) -> None:
    """A limit that nothing can keep is refused."""
    with pytest.raises(ValueError, match="a whole number from 1"):
        kind("/nowhere", **limits)


@pytest.mark.parametrize(
    "library", ["gevent._socket3", "eventlet.greenio.base", "pytest_socket"]
)
def test_replaced_sockets(
    bus: RealBus, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """One line says which of other libraries do not work."""
    other = type("socket", (socket.socket,), {"__module__": library})
    monkeypatch.setattr(socket, "socket", other)
    with contextlib.ExitStack() as stack:
        if library != "pytest_socket":
            refused = pytest.raises(SbusError, match="'s, do not work")
            stack.enter_context(refused)
        with Client(bus.path) as client:
            client.sync(SECONDS_MAX)


# ---- What is refused or remarked on before it is sent


class Packet:
    """A payload that would have a say in what the packet is."""

    def __radd__(self, _: bytes) -> bytes:
        return b"CMSG order/stack"


def test_wrong_arguments(ends: Ends) -> None:
    """The error names what is wrong, and nothing is sent."""
    client: Any = ends.client
    keyed = client.subscribe, client.unsubscribe, client.publish
    for call in (*keyed, client.control):
        with pytest.raises(TypeError, match="is str or bytes, not int$"):
            call(5)
    for call in client.publish, client.control, client.request:
        for payload in "text", "", 5, None, Packet():
            name = type(payload).__name__
            with pytest.raises(TypeError, match=f"bytes, not {name}: encode"):
                call("k", payload)
    calls: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("receive", "sync", "stats", "whoami"), ()),
        **dict.fromkeys(("subscribe", "unsubscribe", "request"), ("k",)),
        "control": ("echo/on",),
    }
    for name, arguments in calls.items():
        for timeout in "5", 1j, 10**400:
            with pytest.raises(TypeError, match="or None, not [a-z]+$"):
                getattr(client, name)(*arguments, timeout=timeout)
    wrong_request: Any = None
    for call in client.reply, parse_request:
        with pytest.raises(TypeError, match="takes a .*: see|a Message$"):
            call(wrong_request)
    for key in "\ud800", "a/\udfff":
        with pytest.raises(PacketError, match="is not UTF-8"):
            client.publish(key)
    for key in "blocking/soft/discrad", "ping", "", "echo/":
        with pytest.raises(PacketError, match="is none of blocking/soft"):
            client.control(key)
    for choice in sbus.CHOICES:  # [CTL-2]
        client.control(choice)
        assert ends.server.receive() == b"CMSG " + choice


DOUBTS = {
    "selects nothing: '*' ends its segment": "a*b *a/",
    "has no wildcard: '*' is one segment": "a/+ a/+/b # a/> a.>",
    "": "a* a/*/b*/ a/** 1+1/#7/>=",
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_doubtful_patterns(ends: Ends, doubt: str) -> None:
    """[MATCH-2] A warning says what a pattern does not do, and it is sent.
    Where Python makes an error of it, it is of this library.
    """
    for pattern in DOUBTS[doubt].split():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ends.client.subscribe(pattern)
            ends.client.unsubscribe(pattern)
        texts = [f"'{pattern}' {doubt}"] if doubt else []
        assert [str(w.message).partition(",")[0] for w in caught] == texts
        assert ends.server.receive() == b"SUB " + pattern.encode()
        assert ends.server.receive() == b"UNSUB " + pattern.encode()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refused = pytest.raises(SbusError, match="selects|wildcard")
            with refused if doubt else contextlib.nullcontext():
                ends.client.subscribe(pattern)
                assert ends.server.receive() == b"SUB " + pattern.encode()


def test_matches_as_the_server() -> None:
    """[MATCH-1] A pattern selects the same keys here as there."""
    dice = random.Random(53)
    pieces = ["a", "b", "*", "", "ab", "a*", "*a", "**"]
    for _ in range(either(20_000, 5_000)):
        pattern, key = (
            "/".join(dice.choices(pieces, k=dice.randrange(1, 5))).encode()
            for _ in range(2)
        )
        expected = sbus.pattern_matches(pattern, key)
        assert matches(pattern, key) == expected, (pattern, key)


def test_matches_of_many_patterns() -> None:
    """A pattern of the most that a client may have costs as much as one of
    few.
    """

    def effort(count: int) -> float:
        patterns = [f"a/{number}/*/b" for number in range(count)]
        for _ in range(2):
            with counted() as calls:
                for pattern in patterns:
                    assert not matches(pattern, b"a/b")
        return sum(calls.values()) / count

    assert effort(1_024) < 1.5 * effort(10)


@pytest.mark.parametrize(
    "patterns, is_selected",
    [
        ("!/cred/1/2/3/x !/cred//// !/cred//2//x !/cred//2//*", True),
        ("!/cred//7//x !/cred////y */cred/1/2/3/x", False),
    ],
)
def test_matches_of_secrets(patterns: str, is_selected: bool) -> None:
    """[CRED-10] A secret key is for secret patterns, and those that leave a
    number open.
    """
    for pattern in patterns.split():
        assert matches(pattern, "!/cred/1/2/3/x") == is_selected
    assert not matches("", "!/cred/1/2/3/x")
    assert not matches("!/cred////", "x")


OWN_PATH = b"!/cred/1/2/3"


@pytest.mark.parametrize(
    "key, pid",
    [
        (OWN_PATH + b"/x", 3),
        (OWN_PATH + b"/!/cred/4/5/6/x/y//z", 6),
        (OWN_PATH + b"/" + b"/" * 57 + b"x", 3),
        (OWN_PATH + b"/" + b"/" * 58 + b"x", 0),
        (OWN_PATH + b"/" + b"x" * 4_076, 3),
        (OWN_PATH + b"/" + b"x" * 4_077, 0),
        (OWN_PATH + b"/!/x", 0),
        *[(key, None) for key in (b"", b"a", OWN_PATH, OWN_PATH + b"/")],
        (b"x/" + OWN_PATH + b"/x", None),
    ],
)
def test_reply_keys(key: bytes, pid: int | None) -> None:
    """[REQUEST-3] Without an answer that a server takes, there is no
    request.  The key for a failure has a segment more, of six bytes.
    """
    asked = parse_request(sbus_client.Message(b"k", key + b"\0a\0b"))
    assert asked == ((b"k", b"a\0b", key) if pid else None)
    if pid:
        assert owner_of(key).pid == pid
    elif pid is None:
        with pytest.raises(PacketError, match="not a private key"):
            owner_of(key)


# ---- A service that cannot answer says so


class Short:
    """A socket for which the kernel is short of something for a while."""

    def __init__(self, wire: socket.socket, number: int, times: int) -> None:
        self.wire = wire
        self.number = number
        self.times = times

    def send(self, packet: bytes, flags: int) -> int:
        self.times -= 1
        if self.times >= 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.wire.send(packet, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)


# ---- They are waited for, or are told in one sentence of this library


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_no_memory(ends: Ends, number: int) -> None:
    """[CLIENT-3] A want of memory passes: what a call sends is sent then."""
    client, server = ends
    wire = client.socket
    for call in client.publish, client.subscribe, client.unsubscribe:
        client_of(client).socket = Short(wire, number, 99)
        with pytest.raises(TimedOut):
            call("k", timeout=0)
        client_of(client).socket = Short(wire, number, 4)
        call("k", timeout=SECONDS_MAX)
    client_of(client).socket = wire
    assert [server.receive()[-3:] for _ in range(3)]
    server.wire.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        server.wire.recv(1)


def test_any_other(ends: Ends) -> None:
    """Any other error is of the connection, and has the kernel's number."""
    short = Short(ends.client.socket, errno.EPERM, 1_000)
    client_of(ends.client).socket = short
    for call in ends.client.publish, ends.client.subscribe:
        with pytest.raises(Disconnected, match="not permitted") as caught:
            call("k")
        assert caught.value.errno == errno.EPERM


def client_of(client: Any) -> Any:
    """Return the AsyncClient of one whose calls wait, or a Client itself."""
    return client if isinstance(client, Client) else client.wrapped
