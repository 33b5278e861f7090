"""Tests of the gateways, with real brokers where they are installed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from broker_names import MQTT, NATS, Names, first_match
from processes import ENVIRONMENT, ROOT, SECONDS_MAX
from real_bus import RealBus, wait_for
from sbus_client import Client, Message, Received, matches
from sizes import either

BROKERS = {
    "mqtt": ("paho.mqtt.client", "mosquitto"),
    "nats": ("nats", "nats-server"),
}
PIECES = [b"a", b"*", b"%=", b"%41", b".", b" ", b"$SYS", b">", b"#", b"+"]
PIECES += [b"\xff", b"\xc3\xa9", b"\x07", b"\n", b"!", b"\xed\xa0\x80", b""]


def random_text(chosen: random.Random, pieces: Sequence[bytes]) -> bytes:
    """Return segments of up to three pieces."""
    return b"/".join(
        b"".join(chosen.choices(pieces, k=chosen.randint(0, 3)))
        for _ in range(chosen.randint(1, 4))
    )


def is_selected(names: Names, form: str, name: str) -> bool:
    """Return whether a broker's filter selects a name."""
    wanted = form.split(names.separator)
    given = name.split(names.separator)
    if wanted[-1] == names.rest:
        wanted.pop()
        given[len(wanted) :] = []
    return len(wanted) == len(given) and all(
        want in (names.one, text) for want, text in zip(wanted, given)
    )


# ---- The mapping of keys is total and reversible


@pytest.mark.parametrize("names", [MQTT, NATS])
def test_each_key_has_one_name(names: Names) -> None:
    """Random keys there and back; no two of them have one name."""
    chosen = random.Random(1)
    keys = {random_text(chosen, PIECES) for _ in range(either(40_000, 9_000))}
    by_name = {names.name(key): key for key in keys}
    assert len(by_name) == len(keys) > 5_000
    for name, key in by_name.items():
        assert names.key(name) == key
        assert name and not name.startswith("$")
        assert not {"\0", "\n", "\x07", names.one, names.rest} & {*name}


def test_the_page() -> None:
    """The names of its table are those of the code."""
    page = (ROOT / "book/beyond.md").read_text("utf-8")
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \| `(.*)` \|$", page, re.M)
    assert len(rows) == 4
    for key, topic, subject in rows:
        name = key.encode()
        assert (MQTT.name(name), NATS.name(name)) == (topic, subject)


@pytest.mark.parametrize("names", [MQTT, NATS])
def test_names_that_are_no_keys(names: Names) -> None:
    """A key has no second name, and '$' stays with the broker."""
    others = ["%=a", "%=%2b", "%=%00", "a\0", "%=%C3%A9", "$SYS/x", "$JS"]
    assert [names.key(name) for name in others] == [None] * len(others)


@pytest.mark.parametrize("names", [MQTT, NATS])
def test_a_filter_selects_all_keys_of_its_pattern(names: Names) -> None:
    """[MATCH-2] [MATCH-3] [MATCH-4] A filter may select more than its pattern,
    and never less.
    """
    chosen = random.Random(2)
    few = [b"a", b"a", b"*", b"", b"$", b"."]
    count = 0
    for _ in range(either(20_000, 9_000)):
        pattern = random_text(chosen, few)
        key = random_text(chosen, [x for x in few if x != b"*"])
        if matches(pattern, key):
            count += 1
            assert is_selected(names, names.filter(pattern), names.name(key))
    assert count > 300


def test_the_first_pattern_counts() -> None:
    """[CRED-10] No public pattern selects a secret key."""
    assert first_match(["b", "a/", "a/*"], b"a/x") == 1
    assert first_match(["", "a"], b"!/cred////x") is None


class Broker:
    """A broker on a port of the loopback, which can end and come back."""

    def __init__(self, kind: str, directory: Path) -> None:
        library, program = BROKERS[kind]
        pytest.importorskip(library)
        self.kind = kind
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        if not path:
            pytest.skip(f"there is no {program}")
        with socket.socket() as wire:
            wire.bind(("127.0.0.1", 0))
            self.port = str(wire.getsockname()[1])
        self.command = [path, "-a", "127.0.0.1", "-p", self.port]
        if kind == "mqtt":
            settings = directory / "mosquitto.conf"
            settings.write_text(
                f"listener {self.port} 127.0.0.1\nallow_anonymous true\n"
                f"persistence true\npersistence_location {directory}/\n"
                f"max_queued_messages 0\nuser {os.environ.get('USER', 'root')}"
            )
            self.command = [path, "-c", str(settings)]

    def __enter__(self) -> Broker:
        none = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=none, stderr=none)
        wait_for(self.is_there)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def is_there(self) -> bool:
        with contextlib.suppress(OSError):
            address = ("127.0.0.1", int(self.port))
            socket.create_connection(address).close()
            return True
        return False


class Gateway:
    """A gateway between a bus and a broker, and what it prints."""

    def __init__(self, bus: RealBus, broker: Broker, *words: str) -> None:
        program = ROOT / "contrib/gateways" / f"{broker.kind}_gateway.py"
        command = [sys.executable, str(program), "-a", bus.path]
        command += [*words, "127.0.0.1", broker.port]
        # MQTT answers each subscription
        asked = words.count("--in") if broker.kind == "mqtt" else 0
        self.lines = 1 + asked
        self.log = Path(bus.path).with_name(f"{random.random()}.log")
        env = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{program.parent}"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env
            )

    def __enter__(self) -> Gateway:
        wait_for(lambda: self.output().count("\n") >= self.lines)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait()


@contextlib.contextmanager
def reading(bus: RealBus, *patterns: str) -> Iterator[Client]:
    with Client(bus.path) as client:
        for pattern in patterns:
            client.subscribe(pattern)
        client.sync()
        yield client


def take(client: Client, count: int) -> list[Received]:
    """Return the next messages."""
    return [client.receive(SECONDS_MAX) for _ in range(count)]


@pytest.fixture(params=[*BROKERS])
def broker(
    request: pytest.FixtureRequest, directory: Path
) -> Iterator[Broker]:
    with Broker(request.param, directory) as broker:
        yield broker


@pytest.fixture
def buses(directory: Path) -> Iterator[list[RealBus]]:
    with contextlib.ExitStack() as stack:
        running = []
        for name in ("near", "far"):
            (directory / name).mkdir()
            bus = RealBus(directory / name)
            running.append(stack.enter_context(bus))
        yield running


# ---- Two buses, each joined to one broker


def test_both_ways_in_order(broker: Broker, buses: list[RealBus]) -> None:
    """Odd keys, overlapping patterns: each once.  SIGTERM loses none."""
    near, far = buses
    keys = ["up/x", "up/", "up//a.b c", "up/$x/%=/é", "up/\x07"]
    sent = [Message(keys[n % 5].encode(), b"%d" % n) for n in range(500)]
    with (
        reading(far, "up/") as up,
        reading(near, "down/") as down,
        Gateway(far, broker, "--out", "down/", "--in", "up/", "--in", ""),
        Gateway(near, broker, "--out", "up/", "--in", "down/") as gateway,
        Client(near.path) as near_client,
        Client(far.path) as far_client,
    ):
        far_client.publish("down/1", b"there")
        assert take(down, 1) == [(b"down/1", b"there")]
        for message in sent:
            near_client.publish(*message)
        near_client.sync()
        assert gateway.end() == 0, gateway.output()
        assert take(up, len(sent)) == sent


def test_what_stays(broker: Broker, buses: list[RealBus]) -> None:
    """Secrets, requests, and what no pattern names."""
    near, far = buses
    with (
        reading(far, "", "!/cred////x") as far_client,
        Gateway(far, broker, "--in", "up/"),
        Gateway(near, broker, "--out", "") as gateway,
        Client(near.path) as client,
    ):
        # A request, by REQUEST-1
        client.publish("up/ask", client.whoami().path + b"/random/1\0")
        client.publish("!/cred////x")
        client.publish("other")
        client.publish("up/last")
        assert take(far_client, 1) == [(b"up/last", b"")]
        wait_for(lambda: "not let out: 1" in gateway.output())


def test_a_bus_that_ends(broker: Broker, buses: list[RealBus]) -> None:
    """The gateway ends as well, and says so in a line."""
    near, _ = buses
    with Gateway(near, broker, "--out", "", "--in", "x") as gateway:
        near.__exit__(None, None, None)
        assert gateway.process.wait() == 1
        assert "closed the connection" in gateway.output()
        assert "Traceback" not in gateway.output()


def test_a_broker_that_comes_back(
    buses: list[RealBus], directory: Path
) -> None:
    """MQTT loses nothing of what is published meanwhile."""
    near, far = buses
    with (
        Broker("mqtt", directory) as broker,
        reading(far, "up/") as up,
        Gateway(far, broker, "--in", "up/"),
        Gateway(near, broker, "--out", "up/"),
        Client(near.path) as client,
    ):
        client.publish("up/1")
        take(up, 1)
        broker.__exit__()
        sent = {b"%d" % number for number in range(100)}
        for payload in sent:
            client.publish("up/2", payload)
        client.sync()
        broker.__enter__()
        while sent:  # the first message may come again, with all others
            sent.discard(take(up, 1)[0].payload)


def test_a_bus_that_is_slower(buses: list[RealBus], directory: Path) -> None:
    """NATS drops what does not wait in the gateway, which counts that."""
    far = buses[1]
    with (
        Broker("nats", directory) as broker,
        reading(far, "up/") as up,
        Gateway(far, broker, "--in", "up/") as gateway,
        socket.create_connection(("127.0.0.1", int(broker.port))) as wire,
    ):
        up.control("blocking/soft/block")
        up.sync()
        wire.sendall(b"CONNECT {}\r\n" + b"PUB up.x 0\r\n\r\n" * 80_000)
        wait_for(lambda: "reported: nats: slow consumer" in gateway.output())
        assert len(take(up, 65_536)) == 65_536
