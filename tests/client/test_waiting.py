"""Tests of calls that wait: for messages, answers, time, and until close."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sbus_client
from client_ends import (
    Ends,
    Kind,
    beside,
    both_ends,
    fill,
    in_child,
    quick_switches,
    sleeps,
)
from packets import ANSWER, WHOAMI, publish
from processes import ROOT, SECONDS_MAX
from real_bus import RealBus, wait_for
from sbus_client import Client, Disconnected, SbusError, TimedOut

OWN = (os.getgid(), os.getuid(), os.getpid())


# ---- What wakes a call, and a program


@pytest.mark.parametrize("timeout", [None, 2e6, 1e10, float("inf")])
def test_timeouts(ends: Ends, timeout: float | None) -> None:
    """No time-out is over early, and one may be longer than the kernel's."""
    client, server = ends
    start = time.monotonic()
    for short in (0, 0.02):
        with pytest.raises(TimedOut, match="nothing came at") as caught:
            client.receive(short)
        assert isinstance(caught.value, SbusError)
        assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - start >= 0.02
    with beside(client.receive, timeout, asleep=True) as received:
        server.send(b"MSG k\0v")
    assert received.result() == (b"k", b"v")


# ---- whoami, sync and stats


def test_control_in_another_thread(bus: RealBus) -> None:
    """[CRED-12] Each answer is received, and a later one is not mixed up with
    them, wherever one thread takes the turn of the other.
    """

    def ask() -> None:
        for _ in range(10_000):
            client.control("!/cred/whoami")

    with quick_switches(), Client(bus.path) as client, beside(ask):
        for _ in range(10_000):
            assert client.receive(SECONDS_MAX).payload
        assert client.whoami(SECONDS_MAX)[:3] == OWN


def test_interrupted_sync() -> None:
    """[CRED-12] A signal's exception leaves no answer for receive."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def disturb() -> None:
        server.receive()
        wait_for(lambda: sleeps(os.getpid()))  # the main thread
        main = threading.main_thread().ident
        signal.pthread_kill(main or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    with both_ends(Client) as (client, server):
        with beside(disturb), pytest.raises(KeyboardInterrupt):
            client.sync()
        server.send(ANSWER, b"MSG k\0v")
        assert client.receive(0) == (b"k", b"v")
    signal.signal(signal.SIGUSR1, before)


def test_too_much_beside_an_answer(ends: Ends) -> None:
    """Messages that are kept have a bound, and are not lost above it."""
    packets = [publish(b"%d" % n, bytes(100_000)) for n in range(700)]
    with beside(ends.server.send, *packets):
        for _ in range(2):
            with pytest.raises(SbusError, match="receive them first"):
                ends.client.sync(SECONDS_MAX)
        for number in range(len(packets)):
            assert ends.client.receive(SECONDS_MAX)[0] == b"%d" % number


# ---- Requests, their answers, and what is neither


def test_proof_of_identity(bus: RealBus) -> None:
    """[CRED-10] [CRED-11] The program beside chapter 4: each learns who the
    other is.
    """
    text = (ROOT / "spec/examples/4-secret-messages.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    proof: dict[str, Any] = dict(vars(sbus_client))
    exec(example, proof)
    with Client(bus.path) as client, Client(bus.path) as service:
        own = service.whoami(SECONDS_MAX)
        service.subscribe("service")
        service.sync(SECONDS_MAX)

        with beside(
            lambda: proof["verify"](service, service.receive())
        ) as done:
            assert proof["prove"](client, "service")[:3] == OWN
        assert done.result() == own


CLOSED = "^this client is closed$"
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("receive", "sync", "stats"), ()),
    **dict.fromkeys(("publish", "subscribe"), ("k",)),
    "control": ("stats",),
    "request": ("k", b"", None),
}
WAITS = [
    *[("the bus", name) for name in CALLS if name != "subscribe"],
    *[("room", name) for name in CALLS],
    *[("an answer", name) for name in ("sync", "stats", "request")],
]


# ---- close, before a call and beside it


def test_calls_after_close(ends: Ends) -> None:
    """All calls raise the same after close, whatever was kept; close does
    nothing.
    """
    client, server = ends
    server.send(b"MSG k\0v", ANSWER)
    client.sync(0)
    for name, arguments in CALLS.items():
        client.close()
        with pytest.raises(Disconnected, match=CLOSED):
            getattr(client, name)(*arguments)
    assert server.receive() == WHOAMI and server.is_disconnected()


@pytest.mark.parametrize("reason, name", WAITS)
def test_close_wakes(
    directory: Path, reason: str, name: str, monkeypatch: Any
) -> None:
    """A thread that waits, whatever it waits for, and however long."""
    monkeypatch.setattr(sbus_client, "RECONNECT_SECONDS", 999)
    with contextlib.ExitStack() as stack:
        if reason == "the bus":
            client = Client(str(directory / "bus"), reconnect=True)
        else:
            client, _ = stack.enter_context(both_ends(Client))
            if reason == "room":
                fill(client)
        call = getattr(client, name)
        stack.enter_context(pytest.raises(Disconnected, match=CLOSED))
        with beside(call, *CALLS[name], asleep=True) as waiting:
            assert not waiting.done()
            client.close()
    assert client.fileno() == -1


def test_last_message(bus: RealBus, kind: Kind) -> None:
    """[CONN-6] What was published is delivered.  A child process that closes
    does not end the connection of its parent.
    """
    with bus.connect() as peer, kind(bus.path) as client:
        peer.send(b"SUB k")
        peer.fence()
        assert in_child(client.close)
        client.publish("k", b"v")
        client.close()
        assert peer.receive() == b"MSG k\0v"
