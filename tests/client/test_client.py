"""Tests of the client library: its file, and packets out and in."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from client_ends import Ends, Kind, both_ends, fill
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
    owner_of,
)

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
    assert printed == f"{sbus_client.__version__}\n"


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


def test_each_call_sends_its_packet(ends: Ends) -> None:
    """[SUB-1] [UNSUB-1] [PUB-1] [CTL-1] Text is sent as UTF-8, and what
    has bytes as those.
    """
    client, server = ends
    for text in "é/*", "é/*".encode(), b"a/\xff", "":
        key = text.encode() if isinstance(text, str) else text
        for call, packet in (
            (client.subscribe, b"SUB " + key),
            (client.unsubscribe, b"UNSUB " + key),
            (client.publish, publish(key)),
        ):
            call(text)
            assert server.receive() == packet
    view = memoryview(b"v-\0-w")[::2]
    for payload in b"v\0w", bytearray(b"v\0w"), memoryview(b"v\0w"), view:
        client.publish("k", payload)
        client.control("echo/on", payload)
        assert server.receive() == b"MSG k\0v\0w"
        assert server.receive() == b"CMSG echo/on\0v\0w"


def test_largest_packet(ends: Ends) -> None:
    """[CLIENT-3] [CLIENT-5] [CLIENT-11] The largest packet passes, but not a
    byte more.
    """
    payload = os.urandom(PACKET_BYTES_MAX - HEAD_BYTES)
    error = "packet of 409601 bytes is above the limit of 409600 bytes"
    with pytest.raises(PacketTooLarge, match=error):
        ends.client.publish("k", payload + b"x")
    ends.client.publish("k", payload)
    assert ends.server.receive() == publish(b"k", payload)
    ends.server.wire.setsockopt(*BUFFER, PACKET_BYTES_MAX)
    ends.server.send(publish(b"k", payload))
    assert ends.client.receive(0) == (b"k", payload)


@pytest.mark.parametrize("size", [100_000, 100_001])
def test_small_send_buffer_is_raised(kind: Kind, size: int) -> None:
    """[CLIENT-3] A send buffer is raised up to the kernel's own limit."""
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
        own = client.whoami(SECONDS_MAX)
        assert own == owner_of(own.path + b"/x")
        assert own.path.decode() == prefix + OWN
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


@pytest.mark.parametrize("learns_by", ["receiving", "reset", "sending"])
def test_last_packets(ends: Ends, learns_by: str) -> None:
    """[CLIENT-6] All packets are read before the end is told, with what to
    look at: the server's log, and whose lines.
    """
    client, server = ends
    error = f"closed the connection: .*its log names pid {os.getpid()}, or"
    if learns_by != "receiving":
        client.publish("k", b"the server never reads this")
    server.send(*publications(3))
    server.wire.close()
    if learns_by == "sending":
        for call in client.publish, client.subscribe, client.request:
            with pytest.raises(Disconnected, match=error):
                call("k")
    for number in range(3):
        assert client.receive(0) == (b"k", b"%d" % number)
    for timeout in (0, None):
        with pytest.raises(Disconnected, match=error):
            client.receive(timeout)


def test_iteration(kind: Kind) -> None:
    """[CLIENT-5] [CLIENT-6] A loop takes all that receive returns, what
    was kept first; its errors are those of receive, and it can go on.
    """
    with both_ends(kind, packet_bytes_max=70_000) as (client, server):
        server.send(*publications(2), ANSWER, b"CMSG x\0two", b"wrong")
        server.send(b"MSG k\0" + bytes(69_995), b"MSG k\0v")
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
            for received in client:
                assert received == (b"k", b"v")
