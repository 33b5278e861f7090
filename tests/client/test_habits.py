"""Tests of what users of other clients look for, and of advice."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import random
import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import sbus
import sbus_client
from client_ends import Ends, Kind, beside, counted
from processes import SECONDS_MAX
from real_bus import RealBus
from sbus_client import (
    Client,
    Disconnected,
    PacketError,
    RequestFailed,
    SbusError,
    TimedOut,
    matches,
    parse_request,
)


class TestObject:
    """What a client shows of itself."""

    def test_repr_and_closed(self, bus: RealBus) -> None:
        """They tell its state; an address may be bytes."""
        with Client(os.fsencode(bus.path)) as client:
            assert repr(client) == f"<Client at {bus.path!r}: connected>"
            assert not client.closed
        assert repr(client) == f"<Client at {bus.path!r}: closed>"
        assert client.closed
        client = Client(bus.path + "-none", reconnect=True)
        assert repr(client).endswith(": without a bus>")
        client.close()

    @pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_copies(self, bus: RealBus, way: Callable[[Client], Any]) -> None:
        """There are none, whose end would be that of the client."""
        with Client(bus.path) as client:
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                way(client)
            client.sync(SECONDS_MAX)

    def test_time_that_is_over(self, ends: Ends) -> None:
        """It is an SbusError, and a TimeoutError."""
        with pytest.raises(TimedOut) as caught:
            ends.client.receive(0)
        assert isinstance(caught.value, SbusError)
        assert isinstance(caught.value, TimeoutError)

    @pytest.mark.parametrize(
        "limits",
        [
            *[{"packet_bytes_max": size} for size in (-1, 1 << 62, 9.5, "9")],
            *[{"segments_max": 0}, {"key_bytes_max": None}],
        ],
    )
    def test_limits(self, kind: Kind, limits: dict[str, Any]) -> None:
        """One that nothing can keep is refused."""
        with pytest.raises(ValueError, match="a whole number from 1"):
            kind("/nowhere", **limits)

    @pytest.mark.parametrize(
        "library",
        ["gevent._socket3", "eventlet.greenio.base", "pytest_socket"],
    )
    def test_replaced_sockets(
        self, bus: RealBus, monkeypatch: pytest.MonkeyPatch, library: str
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


class TestAdvice:
    """What is refused or remarked on before it is sent."""

    @pytest.mark.parametrize("key", ["\ud800", "a/\udfff"])
    def test_keys_that_no_text_has(self, ends: Ends, key: str) -> None:
        """[KEY-1] Half a pair of surrogates is named."""
        with pytest.raises(PacketError, match="is not UTF-8"):
            ends.client.publish(key)

    def test_control_keys(self, ends: Ends) -> None:
        """[CTL-2] One that no server knows is refused, with those it does."""
        for key in sbus.CHOICES:
            ends.client.control(key)
            assert ends.server.receive() == b"CMSG " + key
        for wrong in "blocking/soft/discrad", b"ping", "", "echo/":
            with pytest.raises(PacketError, match="is none of blocking/soft"):
                ends.client.control(wrong)

    @pytest.mark.parametrize(
        "pattern, remark",
        [
            ("a*b", "'a*b' selects nothing: '*' ends its segment"),
            ("*a/", "selects nothing"),
            ("a/+", "'a/+' has no wildcard: '*' is one segment"),
            ("a/+/b", "has no wildcard"),
            ("#", "has no wildcard"),
            ("a/>", "has no wildcard"),
            ("a.>", "has no wildcard"),
            ("a*", ""),
            ("a/*/b*/", ""),
            ("a/**", ""),
            ("1+1/#7/>=", ""),
            ("", ""),
        ],
    )
    def test_doubtful_patterns(
        self, ends: Ends, pattern: str, remark: str
    ) -> None:
        """[MATCH-2] A warning says what one does not do; it is sent."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ends.client.subscribe(pattern)
            ends.client.unsubscribe(pattern)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == bool(remark)
        assert all(remark in text for text in texts)
        assert ends.server.receive() == b"SUB " + pattern.encode()

    def test_doubt_that_is_an_error(self, ends: Ends) -> None:
        """Where Python makes one of each warning, it is of this library."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(SbusError, match="selects nothing"):
                ends.client.subscribe("a*b")
        ends.client.subscribe("a")
        assert ends.server.receive() == b"SUB a"

    def test_what_is_no_request(self, ends: Ends) -> None:
        """The error names the function that makes one of a message."""
        call: Any
        for call in ends.client.reply, parse_request:
            with pytest.raises(TypeError, match="takes a .*: see|a Message$"):
                call(None)

    def test_payload_that_would_be_a_packet(self, ends: Ends) -> None:
        """It has no say in what the packet is."""

        class Packet:
            def __radd__(self, _: bytes) -> bytes:
                return b"CMSG order/stack"

        with pytest.raises(TypeError, match="a payload is bytes, not Packet"):
            ends.client.publish("k", Packet())  # type: ignore[arg-type]

    def test_timeouts(self, ends: Ends) -> None:
        """What is none is named by a TypeError."""
        calls: dict[str, tuple[object, ...]] = {
            **dict.fromkeys(("receive", "sync", "stats", "whoami"), ()),
            **dict.fromkeys(("subscribe", "unsubscribe", "request"), ("k",)),
            "control": ("echo/on",),
        }
        for name, given in calls.items():
            for timeout in "5", 1j, 10**400:
                with pytest.raises(TypeError, match="or None, not [a-z]+$"):
                    getattr(ends.client, name)(*given, timeout=timeout)

    def test_patterns(self, ends: Ends) -> None:
        """[LIMIT-5] How many are too many, only the server says."""
        for number in range(1_100):
            ends.client.subscribe(f"{number}")
            assert ends.server.receive() == b"SUB %d" % number


def test_matches_as_the_server() -> None:
    """[MATCH-1] A pattern selects the same keys here as there."""
    dice = random.Random(53)
    pieces = ["a", "b", "*", "", "ab", "a*", "*a", "**"]
    for _ in range(20_000):
        pattern, key = (
            "/".join(dice.choices(pieces, k=dice.randrange(1, 5))).encode()
            for _ in range(2)
        )
        expected = sbus.pattern_matches(pattern, key)
        assert matches(pattern, key) == expected, (pattern, key)


def test_matches_of_many_patterns() -> None:
    """One of the most that a client may have costs as much as one of few."""

    def effort(count: int) -> float:
        patterns = [f"a/{number}/*/b" for number in range(count)]
        for _ in range(2):
            with counted() as calls:
                for pattern in patterns:
                    assert not matches(pattern, b"a/b")
        return sum(calls.values()) / count

    assert effort(1_024) < 1.5 * effort(10)


@pytest.mark.parametrize(
    "pattern, is_selected",
    [
        ("!/cred/1/2/3/x", True),
        ("!/cred////", True),
        ("!/cred//2//x", True),
        ("!/cred//2//*", True),
        ("!/cred//7//x", False),
        ("!/cred////y", False),
        ("", False),
        ("*/cred/1/2/3/x", False),
    ],
)
def test_matches_of_secrets(pattern: str, is_selected: bool) -> None:
    """[CRED-10] A secret key is for secret patterns, and those that leave a
    number open.
    """
    assert matches(pattern, "!/cred/1/2/3/x") == is_selected
    assert not matches("!/cred////", "x")


@pytest.mark.parametrize(
    "rest, is_one",
    [
        (b"x", True),
        (b"/" * 57 + b"x", True),
        (b"/" * 58 + b"x", False),
        (b"x" * 4_076, True),
        (b"x" * 4_077, False),
        (b"!", False),
    ],
)
def test_reply_keys(rest: bytes, is_one: bool) -> None:
    """[REQUEST-3] Without an answer that a server takes, there is no request.

    The key for a failure has a segment more, of six bytes.
    """
    payload = b"!/cred/1/2/3/" + rest + b"\0v"
    message = sbus_client.Message(b"k", payload)
    assert bool(parse_request(message)) == is_one


class TestFailures:
    """A service that cannot answer says so."""

    def test_request(self, bus: RealBus, kind: Kind) -> None:
        """Its text is that of the caller's error."""

        def serve() -> None:
            asked = parse_request(service.receive(SECONDS_MAX))
            assert asked
            service.reply(asked.failed(), b"no such lamp")
            service.sync(SECONDS_MAX)

        with kind(bus.path) as service, Client(bus.path) as client:
            service.subscribe("lamps")
            service.sync(SECONDS_MAX)
            with (
                beside(serve),
                pytest.raises(RequestFailed, match="^no such lamp$"),
            ):
                client.request("lamps", b"", SECONDS_MAX)


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


class TestErrorsOfTheKernel:
    """They are waited for, or are told in one sentence of this library."""

    @pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
    def test_no_memory(
        self, ends: Ends, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CLIENT-3] It passes: what a call sends is sent then."""
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

    def test_any_other(self, ends: Ends) -> None:
        """It is of the connection, and has the kernel's number."""
        short = Short(ends.client.socket, errno.EPERM, 1_000)
        client_of(ends.client).socket = short
        for call in ends.client.publish, ends.client.subscribe:
            with pytest.raises(Disconnected, match="not permitted") as caught:
                call("k")
            assert caught.value.errno == errno.EPERM

    @pytest.mark.parametrize("text", [b"[1", b"1", b"[" * 99_999])
    def test_malformed_counts(self, ends: Ends, text: bytes) -> None:
        """[CTL-5] The error shows what the server has sent."""
        ends.server.send(b"CMSG stats\0" + text)
        with pytest.raises(PacketError, match="sent malformed counts"):
            ends.client.stats(SECONDS_MAX)


def client_of(client: Any) -> Any:
    """Return the AsyncClient of one whose calls wait, or a Client itself."""
    return client if isinstance(client, Client) else client.wrapped
