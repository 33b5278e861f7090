"""Tests of chapters 1 to 7: the rules of the bus, and its loop.

The core and the loop are driven on a fake kernel (testbed.py), where a test
says how many packets a receiver has room for and what the clock shows.  What
depends on the kernel is tested with a server process and real sockets.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import gc
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

import sbus
from conformance.examples import MatchCase, read_cases
from fake_kernel import FakeKernel, FakePeer, FakeWire
from packets import WHOAMI, publications, publish
from programs import ROOT, child_process
from real_bus import Peer, RealBus, wait_for

OWNER = 500  # the bus owner on a fake kernel
LARGE_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
ANSWER = WHOAMI + b"\0"

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can connect as other users"
)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


def hold(
    table: sbus.SubscriptionTable, pattern: bytes, client: sbus.Client
) -> sbus.Subscription:
    """Add a pattern to a table."""
    subscription = table.place([pattern], client.credentials.uid)
    table.add(subscription, client)
    return subscription


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that grows with each call of a function of sbus.py."""
    function, calls = getattr(sbus, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return function(*arguments)

    monkeypatch.setattr(sbus, name, counted)
    return calls


def small(backlog_packets: int, payload_bytes: int = 1) -> sbus.Limits:
    """Return limits with room for so many packets with the key `k`."""
    size = len(publish(b"k")) + payload_bytes + sbus.PACKET_OVERHEAD_BYTES
    return sbus.Limits(max_backlog=backlog_packets * size)


# =============================================================================
# The files
# =============================================================================


class TestFiles:
    """What sbus.py and spec/ promise about themselves."""

    SOURCE = (ROOT / "sbus.py").read_text("utf-8")
    CHAPTERS = sorted((ROOT / "spec").glob("[1-9]-*.md"))
    RULE = re.compile(
        r"^\*\*\[([A-Z]+-\d+)\]\*\* (.+?)$(?=\n\n|\n*\Z)", re.M | re.S
    )

    def sections(self) -> list[tuple[str, str]]:
        """Return the title and the text of each section of sbus.py."""
        banner = re.compile(r"^# =+\n# (\d\. .+)\n", re.M)
        parts = banner.split(self.SOURCE)
        return list(zip(parts[1::2], parts[2::2]))

    def rules(self) -> list[tuple[str, str]]:
        """Return the id and the sentence of each rule."""
        return [
            (match[1], " ".join(match[2].split()))
            for chapter in self.CHAPTERS
            for match in self.RULE.finditer(chapter.read_text("utf-8"))
        ]

    def test_sections_are_the_chapters(self) -> None:
        """Each section carries the title of its chapter and its file name."""
        titles = []
        for title, _ in self.sections():
            name, file = title.rsplit(None, 1)
            heading = (ROOT / file).read_text("utf-8").splitlines()[0]
            assert heading == f"# {name}"
            titles.append(ROOT / file)
        assert titles == self.CHAPTERS[:8]

    def test_the_core_does_no_io(self) -> None:
        """Sections 1 to 6 name none of the modules that do I/O."""
        core = "\n".join(text for _, text in self.sections()[:6])
        named = {
            node.id
            for node in ast.walk(ast.parse(core))
            if isinstance(node, ast.Name)
        }
        assert "literals_of" in named
        assert not named & {"socket", "selectors", "os", "time", "select"}

    def test_only_the_standard_library_is_imported(self) -> None:
        """sbus.py runs where there is nothing but Python."""
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(self.SOURCE))
            for name in imported_by(node)
        }
        assert "selectors" in imported
        if sys.version_info >= (3, 10):
            assert imported <= sys.stdlib_module_names

    def test_truncating_recv_is_not_used(self) -> None:
        """recv with MSG_TRUNC returns bytes that nobody sent."""
        assert not re.search(r"\.recv\([^)]*MSG_TRUNC", self.SOURCE)

    def test_rules_have_one_id_a_level_and_an_origin(self) -> None:
        """A rule is one sentence, and no id is defined twice."""
        ids = [rule for rule, _ in self.rules()]
        assert len(ids) > 90
        assert len(ids) == len(set(ids))
        for rule, sentence in self.rules():
            assert re.search(r"\b(MUST|SHOULD|MAY)\b", sentence), rule
            assert re.search(r"\. \((upstream|ours)\)$", sentence), rule

    def test_ids_have_no_gaps(self) -> None:
        """Ids of a family are numbered from 1."""
        families: dict[str, list[int]] = {}
        for rule, _ in self.rules():
            family, number = rule.rsplit("-", 1)
            families.setdefault(family, []).append(int(number))
        for family, numbers in families.items():
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), family

    @pytest.mark.parametrize(
        "file",
        [
            *sorted(ROOT.glob("*.py")),
            *sorted(ROOT.glob("pipeline/**/*.py")),
            *sorted(ROOT.glob("tests/*.py")),
            *sorted(ROOT.glob("spec/*.md")),
            ROOT / "README.md",
        ],
        ids=lambda path: path.name,
    )
    def test_cited_ids_exist(self, file: Path) -> None:
        """Every id in brackets is that of a rule."""
        defined = {rule for rule, _ in self.rules()}
        cited = re.findall(r"\[([A-Z]+-\d+)\]", file.read_text("utf-8"))
        assert set(cited) <= defined

    def test_named_tests_exist(self) -> None:
        """What SECURITY.md says to be tested is tested there."""
        text = (ROOT / "SECURITY.md").read_text("utf-8")
        tests = "".join(
            path.read_text("utf-8") for path in ROOT.glob("test_sbus*.py")
        )
        named = re.findall(r"`([Tt]est_?[A-Z_a-z]+)`", text)
        assert len(named) > 20
        for name in named:
            assert re.search(rf"(class|def) {name}\b", tests), name

    def test_every_server_rule_is_cited_by_the_server_and_a_test(self) -> None:
        """What the specification asks for can be found in code and tests."""
        server = self.SOURCE
        client = (ROOT / "sbus_client.py").read_text("utf-8")
        tests = "".join(
            path.read_text("utf-8") for path in ROOT.glob("test_sbus*.py")
        )
        missing = []
        for rule, sentence in self.rules():
            code = client if sentence.startswith("A client") else server
            by_users = {"KEY-2", "KEY-6", "CRED-12"}  # of any client
            if f"[{rule}]" not in code and rule not in by_users:
                missing.append(f"{rule} in code")
            if f"[{rule}]" not in tests and rule not in by_users:
                missing.append(f"{rule} in tests")
        assert not missing


def imported_by(node: ast.AST) -> list[str]:
    """Return the names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


# =============================================================================
# 2. Routing keys
# =============================================================================


def match_examples() -> Iterator[tuple[str, bytes, bytes, bool]]:
    """Return the rows of the `match` blocks of the specification."""
    for case in read_cases():
        if isinstance(case, MatchCase):
            yield case.name, case.pattern, case.key, case.selected


def every_text(alphabet: bytes, length_max: int) -> Iterator[bytes]:
    """Return every text over an alphabet, up to a length."""
    for length in range(length_max + 1):
        for letters in itertools.product(alphabet, repeat=length):
            yield bytes(letters)


def as_expression(pattern: bytes) -> re.Pattern[bytes]:
    """Return a regular expression for a pattern: a second opinion."""
    if re.search(rb"\*[^*/]", pattern):
        return re.compile(rb"(?!)")
    escaped = re.escape(re.sub(rb"\*+", b"*", pattern))
    expression = escaped.replace(re.escape(b"*"), b"[^/]*")
    if not pattern or pattern.endswith(b"/"):
        expression += b".*"
    return re.compile(expression, re.S)


class TestRoutingKeys:
    def test_examples_of_the_specification(self) -> None:
        """[MATCH-1] to [MATCH-6], as chapter 2 shows them."""
        for name, pattern, key, selected in match_examples():
            assert sbus.pattern_matches(pattern, key) is selected, name

    def test_there_are_examples(self) -> None:
        """The blocks of chapter 2 are found."""
        assert len(list(match_examples())) > 400

    def test_every_byte_but_nul_is_ordinary(self, kernel: FakeKernel) -> None:
        """[KEY-1] Keys have no character set."""
        for byte in range(1, 256):
            text = bytes([byte])
            others = b"" if text == b"*" else bytes([byte ^ 1 or 3])
            assert sbus.pattern_matches(text, text)
            if text not in (b"*", b"/"):
                assert not sbus.pattern_matches(text, others)
        peer = kernel.connect()
        key = bytes(set(range(1, 256)) - set(b"*/!"))
        peer.send(b"SUB " + key, publish(key))
        assert peer.read() == [publish(key)]

    def test_empty_key_and_pattern(self, kernel: FakeKernel) -> None:
        """[KEY-1] [MATCH-4] The empty key reaches the empty pattern."""
        peer = kernel.connect()
        peer.send(b"SUB ", publish(b""))
        assert peer.read() == [publish(b"")]

    def test_agrees_with_regular_expressions(self) -> None:
        """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-5] [MATCH-6] Short texts."""
        texts = list(every_text(b"a/*", 4))
        for pattern in texts:
            expression = as_expression(pattern)
            for key in texts:
                expected = bool(expression.fullmatch(key))
                assert sbus.pattern_matches(pattern, key) is expected, (
                    pattern,
                    key,
                )

    @pytest.mark.parametrize(
        "key", [b"!", b"!/x", b"a/!", b"a/!/b", b"x/!/cred/1/2/3/"]
    )
    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB ", b"MSG "])
    def test_reserved_segment_disconnects(
        self, kernel: FakeKernel, key: bytes, word: bytes
    ) -> None:
        """[KEY-4] A segment that is exactly '!' is reserved."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        peer.send(word + key + b"\0")
        assert peer.wire.closed
        assert witness.read() == []

    @pytest.mark.parametrize("key", [b"a!", b"!!", b"!x", b"!x/!y", b"a/b!/c"])
    def test_other_exclamation_marks_are_ordinary(
        self, kernel: FakeKernel, key: bytes
    ) -> None:
        """[KEY-5] '!' beside another byte has no meaning."""
        peer = kernel.connect()
        peer.send(b"SUB " + key, publish(key), b"UNSUB " + key, publish(key))
        assert peer.read() == [publish(key)]

    def test_star_in_a_key_is_ordinary(self, kernel: FakeKernel) -> None:
        """[KEY-3] A publisher cannot widen its audience."""
        star, exact = kernel.connect(), kernel.connect()
        star.send(b"SUB a/*")
        exact.send(b"SUB a/b")
        kernel.connect().send(publish(b"a/*"))
        assert star.read() == [publish(b"a/*")]
        assert exact.read() == []


NUMBERS = itertools.count()


def new_keys(count: int) -> list[bytes]:
    """Return publish packets with keys that were never used before."""
    return [publish(b"%d" % next(NUMBERS)) for _ in range(count)]


def slow_down(kernel: FakeKernel, seconds: float) -> Any:
    """Have each packet take some time; return what handled them before."""
    handle = kernel.bus.handle

    def slow(*arguments: Any) -> bool:
        kernel.now += seconds
        return handle(*arguments)

    kernel.bus.handle = slow  # type: ignore
    return handle


def spend_on_sends(kernel: FakeKernel, peer: FakePeer, seconds: float) -> None:
    """Have each packet for a client take some time."""
    send = peer.wire.send

    def slow(packet: Any) -> int:
        kernel.now += seconds
        return send(packet)

    peer.wire.send = slow  # type: ignore[method-assign]


def spend_ticks(kernel: FakeKernel, peer: FakePeer) -> None:
    """Have each packet for a client take ten milliseconds of processor."""
    send = peer.wire.send

    def slow(packet: Any) -> int:
        kernel.server.ticks += [1, 1]
        kernel.now += 0.01
        return send(packet)

    peer.wire.send = slow  # type: ignore[method-assign]


def newcomers(
    kernel: FakeKernel, count: int, *packets: bytes, uid: int = 1
) -> list[FakeWire]:
    """Have clients of a user wait to be let in, with what they have sent."""
    wires = []
    for number in range(count):
        own = sbus.Credentials(1, uid, 1_000 + number)
        wire = FakeWire(next(kernel.numbers), own)
        wire.incoming.extend(packets)
        wires.append(wire)
    kernel.listener.waiting.extend(wires)
    return wires


class TestSubscriptionTable:
    TOKENS = (b"", b"", b"a", b"b", b"ab", b"*", b"a*", b"ab*", b"**", b"a*b")

    def random_text(self, chance: random.Random) -> bytes:
        """Return a pattern or key with adversarial segments."""
        count = chance.randrange(1, 5)
        return b"/".join(chance.choice(self.TOKENS) for _ in range(count))

    @pytest.mark.parametrize("seed", range(20))
    def test_agrees_with_the_definition(self, seed: int) -> None:
        """[PUB-1] [PUB-3] The table finds what pattern_matches selects."""
        chance = random.Random(seed)
        kernel = FakeKernel()
        clients = [kernel.connect().client for _ in range(6)]
        table = sbus.SubscriptionTable(sbus.Limits(max_shapes=1000))
        held: dict[tuple[bytes, sbus.Client], sbus.Subscription] = {}
        for _ in range(400):
            pair = self.random_text(chance), chance.choice(clients)
            if pair in held:
                table.remove(held.pop(pair), pair[1])
            else:
                held[pair] = hold(table, *pair)
            key = self.random_text(chance)
            found = set(table.find(key))
            assert found == {
                client
                for pattern, client in held
                if sbus.pattern_matches(pattern, key)
            }
        for pair, subscription in held.items():
            table.remove(subscription, pair[1])
        assert not table._shapes and not table._users

    def test_recent_keys_do_not_outlive_a_change(
        self, kernel: FakeKernel
    ) -> None:
        """[PUB-1] [PUB-3] Each change of the table counts at once."""
        chance = random.Random(1)
        peers = [kernel.connect() for _ in range(3)]
        held: list[tuple[bytes, FakePeer]] = []
        keys = (b"a", b"ab/b", b"a/", b"", b"ab", b"a/b", b"a/b/a")
        for _ in range(2_000):
            if len(held) > 4:
                pattern, peer = held.pop(chance.randrange(len(held)))
                peer.send(b"UNSUB " + pattern)
            else:
                pattern, peer = self.random_text(chance), chance.choice(peers)
                held.append((pattern, peer))
                peer.send(b"SUB " + pattern)
            peers[0].send(*map(publish, keys))
            for peer in peers:
                patterns = [text for text, holder in held if holder is peer]
                assert peer.read() == [
                    publish(key)
                    for key in keys
                    if any(sbus.pattern_matches(p, key) for p in patterns)
                ]

    def test_the_memory_of_recent_keys_is_bounded(
        self, kernel: FakeKernel
    ) -> None:
        """[LIMIT-4] A publisher of many keys uses no memory for them."""
        peer = kernel.connect()
        for number in range(2 * sbus.RECENT_KEYS_MAX):
            kernel.bus.handle(peer.client, b"", publish(b"%d" % number))
        assert len(kernel.bus._recent) <= sbus.RECENT_KEYS_MAX
        assert len(kernel.bus._recent_heads) <= sbus.RECENT_KEYS_MAX

    def test_what_is_too_large_to_remember(self, kernel: FakeKernel) -> None:
        """[LIMIT-4] Long keys, and keys of many receivers."""
        for _ in range(sbus.RECENT_RECEIVERS_MAX):
            kernel.connect(uid=0).send(b"SUB k")
        peer, more = kernel.connect(), kernel.connect()
        longest = b"l" * sbus.RECENT_KEY_BYTES_MAX
        peer.send(publish(b"k"), publish(longest), publish(longest + b"l"))
        assert set(kernel.bus._recent) == {b"MSG k", b"MSG " + longest}
        more.send(b"SUB k", publish(b"k"), publish(b"k"))
        assert len(more.read()) == 2
        assert set(kernel.bus._recent) == {b"MSG " + longest}

    @pytest.mark.parametrize("pattern", [b"k%d", b"k%d/", b"k%d/*", b"k*%d"])
    def test_recent_keys_are_forgotten_for_good(
        self, kernel: FakeKernel, pattern: bytes
    ) -> None:
        """[LIMIT-4] Whoever makes the bus forget them leaves nothing."""
        peer = kernel.connect()
        for number in range(100):
            key = pattern % number
            peer.send(publish(key), b"SUB " + key, b"UNSUB " + key)
        assert not kernel.bus._recent
        assert not kernel.bus._recent_heads


# =============================================================================
# 1. and 3. Limits, packets, and what they do
# =============================================================================


class TestPackets:
    @pytest.mark.parametrize(
        "packet",
        [
            b"",
            b"\0",
            b"SUB",
            b"SUB\0x",
            b"UNSUB",
            b"MSG",
            b"MSG k",
            b"MSG\0k",
            b"CMSG",
            b"CMSG\0",
            b" SUB x",
            b"sub x",
            b"SUBx y",
            b"SUB\tx",
            b"HELLO world\0",
            b"\nSUB x",
            b"MSG\n k\0",
        ],
    )
    def test_malformed_packet_disconnects_its_sender(
        self, kernel: FakeKernel, packet: bytes
    ) -> None:
        """[PKT-2] [PKT-3] [PKT-4] [CONN-12] And nobody else notices."""
        sender, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        sender.send(packet)
        assert sender.wire.closed
        assert not witness.wire.closed
        assert witness.read() == []

    @pytest.mark.parametrize(
        ("packet", "kind", "key", "payload"),
        [
            (b"SUB k", "subscribe", b"k", b""),
            (b"SUB ", "subscribe", b"", b""),
            (b"SUB k\0v", "subscribe", b"k", b""),
            (b"UNSUB k\0v\0w", "unsubscribe", b"k", b""),
            (b"MSG k\0", "publish", b"k", b""),
            (b"MSG \0\0", "publish", b"", b"\0"),
            (b"MSG  k\0v\0w", "publish", b" k", b"v\0w"),
            (b"CMSG k", "control", b"k", b""),
            (b"CMSG k\0v\0w", "control", b"k", b"v\0w"),
        ],
    )
    def test_parts_of_a_packet(
        self, packet: bytes, kind: str, key: bytes, payload: bytes
    ) -> None:
        """[PKT-1] [SUB-3] [UNSUB-3] As the expressions of chapter 3 say."""
        assert sbus.parse_packet(packet) == (kind, key, payload)

    @pytest.mark.parametrize("packet", [b"MSG k", b"MSG k\n"])
    def test_key_without_nul_after_a_recent_one(
        self, kernel: FakeKernel, packet: bytes
    ) -> None:
        """[PKT-2] [PKT-3] A well-known key excuses nothing."""
        peer = kernel.connect()
        peer.send(b"SUB k", publish(b"k"), packet)
        assert peer.wire.closed
        assert list(peer.wire.taken) == [publish(b"k")]

    def test_all_before_a_mistake_is_handled(self, kernel: FakeKernel) -> None:
        """[CONN-11] [PKT-5] Only what comes after it is lost."""
        sender, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        sender.send(publish(b"1"), publish(b"2"), b"HELLO", publish(b"3"))
        assert witness.read() == [publish(b"1"), publish(b"2")]

    def test_all_before_an_empty_packet_is_handled(
        self, kernel: FakeKernel
    ) -> None:
        """[PKT-4] An empty packet is a mistake, not a departure."""
        sender, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        sender.send(publish(b"1"), b"", publish(b"3"))
        assert sender.wire.closed
        assert witness.read() == [publish(b"1")]

    def test_packet_of_the_limit_passes(self, kernel: FakeKernel) -> None:
        """[LIMIT-3] [PUB-4] 409,600 bytes arrive whole."""
        peer = kernel.connect()
        packet = publish(b"k", bytes(random.Random(0).randbytes(409_594)))
        assert len(packet) == 409_600
        peer.send(b"SUB k", packet)
        assert peer.read() == [packet]

    def test_larger_packet_disconnects_its_sender(
        self, kernel: FakeKernel
    ) -> None:
        """[LIMIT-1] [LIMIT-2] And no part of it is forwarded."""
        sender, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        sender.send(publish(b"k", bytes(409_595)))
        assert sender.wire.closed
        assert witness.read() == []

    @pytest.mark.parametrize("size", [1, 100, 16_383, 16_384, 16_385, 70_000])
    def test_packet_is_forwarded_as_it_came(
        self, kernel: FakeKernel, size: int
    ) -> None:
        """[PUB-4] Whether it is copied or sent from the receive buffer."""
        sender, one, two = (kernel.connect() for _ in range(3))
        one.send(b"SUB k")
        two.send(b"SUB k")
        packets = [
            publish(b"k", random.Random(seed).randbytes(size))
            for seed in range(3)
        ]
        two.wire.room = 1
        sender.send(*packets)
        assert one.read() == packets
        assert two.read_all() == packets

    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB ", b"MSG ", b"CMSG "])
    def test_key_above_the_limit_disconnects(
        self, kernel: FakeKernel, word: bytes
    ) -> None:
        """[LIMIT-4] In every kind of packet, small or large."""
        peer = kernel.connect()
        peer.send(word + b"k" * 4096 + b"\0")
        assert not peer.wire.closed
        peer.send(word + b"k" * 4097 + b"\0")
        assert peer.wire.closed
        peer = kernel.connect()
        peer.send(word + b"k" * 100_000 + b"\0" + bytes(200_000))
        assert peer.wire.closed

    def test_large_subscribe_packet(self, kernel: FakeKernel) -> None:
        """[SUB-3] [UNSUB-3] [CTL-4] What is ignored may be large."""
        peer = kernel.connect()
        peer.send(b"SUB k\0" + bytes(100_000), publish(b"k"))
        assert peer.read() == [publish(b"k")]
        peer.send(b"CMSG echo/off\0" + bytes(100_000), publish(b"k"))
        assert peer.read() == []
        peer.send(
            b"UNSUB k\0" + bytes(100_000), b"CMSG echo/on", publish(b"k")
        )
        assert peer.read() == []

    @pytest.mark.parametrize("seed", range(10))
    def test_no_packet_harms_others(self, seed: int) -> None:
        """[CONN-12] [PKT-2] Random packets cost at most their sender."""
        chance = random.Random(seed)
        kernel = FakeKernel()
        witness = kernel.connect(uid=1)
        witness.send(b"SUB witness")
        words = (b"SUB ", b"UNSUB ", b"MSG ", b"CMSG ", b"MSG", b"")
        pieces = (
            b"!",
            b"/",
            b"cred",
            b"\0",
            b"*",
            b"1000",
            b"\xff",
            b"whoami",
        )
        for _ in range(500):
            packet = chance.choice(words) + b"".join(
                chance.choice(pieces) for _ in range(chance.randrange(9))
            )
            kernel.connect().send(packet)
        kernel.connect().send(publish(b"witness"))
        assert witness.read() == [publish(b"witness")]


class TestSubscribe:
    def test_pattern_is_stored(self, kernel: FakeKernel) -> None:
        """[SUB-1] [PUB-1] [PUB-3] The client hears what it selected."""
        peer = kernel.connect()
        peer.send(b"SUB a/*", publish(b"a/b"), publish(b"b"))
        assert peer.read() == [publish(b"a/b")]

    def test_text_after_nul_is_ignored(self, kernel: FakeKernel) -> None:
        """[SUB-3] [UNSUB-3] The pattern ends at the first NUL byte."""
        peer = kernel.connect()
        peer.send(b"SUB k\0x\0y", publish(b"k"))
        assert peer.read() == [publish(b"k")]
        peer.send(b"UNSUB k\0other", publish(b"k"))
        assert peer.read() == []

    def test_duplicates_count(self, kernel: FakeKernel) -> None:
        """[SUB-2] [UNSUB-1] Each unsubscribe removes one."""
        peer = kernel.connect()
        peer.send(b"SUB k", b"SUB k", b"UNSUB k", publish(b"k"))
        assert peer.read() == [publish(b"k")]
        peer.send(b"UNSUB k", publish(b"k"))
        assert peer.read() == []

    def test_pattern_that_matches_nothing(self, kernel: FakeKernel) -> None:
        """[MATCH-6] [UNSUB-1] It is stored, counted, and can be removed."""
        kernel = FakeKernel(strict=True)
        peer = kernel.connect()
        peer.send(b"SUB a*b", publish(b"a*b"), b"UNSUB a*b", WHOAMI)
        assert peer.read()[0].startswith(ANSWER)
        peer.send(b"UNSUB a*b")
        assert peer.wire.closed

    def test_limit_of_patterns(self) -> None:
        """[LIMIT-5] Duplicates do not count towards it."""
        kernel = FakeKernel(sbus.Limits(max_patterns=2))
        peer = kernel.connect()
        peer.send(b"SUB a", b"SUB b", b"SUB a", b"UNSUB b", b"SUB c")
        assert not peer.wire.closed
        peer.send(b"SUB d")
        assert peer.wire.closed

    def test_limit_of_pattern_bytes(self) -> None:
        """[LIMIT-6] What is removed does not count."""
        kernel = FakeKernel(sbus.Limits(max_pattern_bytes=10))
        peer = kernel.connect()
        peer.send(b"SUB 12345", b"SUB 67890", b"UNSUB 12345", b"SUB abcde")
        assert not peer.wire.closed
        peer.send(b"SUB f")
        assert peer.wire.closed

    def test_limit_of_the_patterns_of_a_user(self) -> None:
        """[LIMIT-12] All its clients together; what is removed is free."""
        kernel = FakeKernel(sbus.Limits(max_user_patterns=3))
        one, two, other = (kernel.connect(uid=uid) for uid in (1, 1, 2))
        one.send(b"SUB a", b"SUB a", b"SUB b")
        two.send(b"SUB a", b"UNSUB a", b"SUB c")
        other.send(b"SUB a", b"SUB b", b"SUB c")
        assert not (one.wire.closed or two.wire.closed or other.wire.closed)
        two.send(b"SUB d")
        assert two.wire.closed
        one.send(b"SUB e")
        assert not one.wire.closed
        one.send(b"SUB f")
        assert one.wire.closed

    def test_limit_of_the_pattern_bytes_of_a_user(self) -> None:
        """[LIMIT-13] All its clients together."""
        kernel = FakeKernel(sbus.Limits(max_user_pattern_bytes=10))
        one, two = (kernel.connect(uid=1) for _ in "12")
        one.send(b"SUB 12345", b"UNSUB 12345", b"SUB 67890")
        two.send(b"SUB 67890")
        assert not (one.wire.closed or two.wire.closed)
        two.send(b"SUB a")
        assert two.wire.closed and not one.wire.closed
        one.send(b"SUB abcde")  # in the place of what the other one held
        assert not one.wire.closed
        one.send(b"SUB a")
        assert one.wire.closed

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_limits_of_a_user_are_not_for_the_privileged(
        self, uid: int
    ) -> None:
        """[LIMIT-11] [LIMIT-12] [LIMIT-13] [LIMIT-14] Root and the owner."""
        limits = sbus.Limits(
            max_user_patterns=1,
            max_user_pattern_bytes=1,
            max_user_clients=1,
            max_user_backlog=1,
        )
        kernel = FakeKernel(limits)
        peers = [kernel.connect(uid=uid) for _ in range(3)]
        for peer in peers:
            peer.wire.room = 0
            peer.send(b"SUB k", b"SUB aa", publish(b"k"))
        assert not any(peer.wire.closed for peer in peers)
        assert not any(peer.paused for peer in peers)

    def test_limit_of_shapes(self) -> None:
        """[LIMIT-10] All clients of a user share it; what is left is free."""
        kernel = FakeKernel(sbus.Limits(max_shapes=3))
        one, two, other = (kernel.connect(uid=uid) for uid in (1, 1, 2))
        one.send(b"SUB a", b"SUB b", b"SUB a/b", b"SUB a*b", b"SUB a/")
        two.send(b"SUB c", b"SUB c/", b"SUB d", b"UNSUB d", b"UNSUB c")
        other.send(b"SUB *", b"SUB a*", b"SUB aa*", b"SUB bb*")
        assert not (one.wire.closed or two.wire.closed or other.wire.closed)
        one.send(b"UNSUB a/b", b"SUB *")
        assert not one.wire.closed
        two.send(b"SUB ")
        assert two.wire.closed
        one.close()
        other.send(b"SUB aaa*")
        assert other.wire.closed
        assert not kernel.bus._public._users

    def test_patterns_vanish_with_their_client(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-10] Nothing remains of a client that has gone."""
        peer, other = kernel.connect(), kernel.connect()
        own = b"!/cred/" + b"/".join(peer.wire.credentials.fields()) + b"/x"
        peer.send(b"SUB k", b"SUB k", b"SUB a/", b"SUB *", b"SUB " + own)
        peer.close()
        other.send(publish(b"k"), publish(own))
        assert not other.wire.closed
        assert not kernel.bus._public._shapes
        assert not kernel.bus._secret._shapes
        assert not kernel.bus.clients[2].outbox


class TestUnsubscribe:
    def test_unknown_pattern_is_ignored(self, kernel: FakeKernel) -> None:
        """[UNSUB-2] It may be a race."""
        peer = kernel.connect()
        peer.send(b"SUB k", b"UNSUB x", b"UNSUB k*", publish(b"k"))
        assert peer.read() == [publish(b"k")]

    def test_unknown_pattern_disconnects_when_strict(self) -> None:
        """[UNSUB-2] A server MAY disconnect."""
        kernel = FakeKernel(strict=True)
        peer = kernel.connect()
        peer.send(b"SUB k", b"UNSUB k")
        assert not peer.wire.closed
        peer.send(b"UNSUB k")
        assert peer.wire.closed

    def test_other_clients_keep_theirs(self, kernel: FakeKernel) -> None:
        """[UNSUB-1] One client's unsubscribe concerns that client."""
        one, two = kernel.connect(), kernel.connect()
        one.send(b"SUB k")
        two.send(b"SUB k", b"UNSUB k")
        two.send(publish(b"k"))
        assert one.read() == [publish(b"k")]
        assert two.read() == []


class TestPublish:
    def test_one_copy_for_each_client(self, kernel: FakeKernel) -> None:
        """[PUB-2] However many of its patterns match."""
        peer = kernel.connect()
        peer.send(b"SUB ", b"SUB a/", b"SUB a/*", b"SUB a/b", b"SUB a/b")
        peer.send(publish(b"a/b"))
        assert peer.read() == [publish(b"a/b")]

    def test_publisher_is_a_client_like_others(
        self, kernel: FakeKernel
    ) -> None:
        """[PUB-5] [ECHO-1] It hears itself only if it has subscribed."""
        one, two = kernel.connect(), kernel.connect()
        one.send(b"SUB k")
        one.send(publish(b"k"))
        two.send(publish(b"k"))
        assert one.read() == [publish(b"k")] * 2
        assert two.read() == []

    def test_payload_may_hold_anything(self, kernel: FakeKernel) -> None:
        """[PUB-4] NUL bytes, and nothing at all."""
        peer = kernel.connect()
        packets = [publish(b"k"), publish(b"k", b"\0\0"), publish(b"k", b"\n")]
        peer.send(b"SUB k", *packets)
        assert peer.read() == packets

    def test_order_of_one_publisher(self, kernel: FakeKernel) -> None:
        """[PUB-6] [PKT-5] Also over many turns and while stalled."""
        peer, sender = kernel.connect(), kernel.connect()
        peer.send(b"SUB k")
        peer.wire.room = 7
        packets = publications(1000)
        sender.send(*packets)
        assert peer.read_all() == packets

    def test_subscribing_takes_effect_in_order(
        self, kernel: FakeKernel
    ) -> None:
        """[PKT-5] What was published before a SUB is not heard."""
        peer = kernel.connect()
        peer.send(publish(b"k", b"1"), b"SUB k", publish(b"k", b"2"))
        assert peer.read() == [publish(b"k", b"2")]

    def test_popular_keys_are_delivered_to_all(
        self, kernel: FakeKernel
    ) -> None:
        """[PUB-1] Also with more receivers than are remembered."""
        peers = [
            kernel.connect() for _ in range(sbus.RECENT_RECEIVERS_MAX + 2)
        ]
        for peer in peers:
            peer.send(b"SUB k")
        for _ in range(2):
            peers[0].send(publish(b"k"))
            assert all(peer.read() == [publish(b"k")] for peer in peers)


class TestControl:
    def test_control_packets_are_not_forwarded(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-1] Not even to those who subscribe to everything."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ", b"SUB news")
        peer.send(b"CMSG news\0x")
        assert witness.read() == []

    @pytest.mark.parametrize(
        "key", [b"", b"news", b"blocking/soft", b"blocking/hard/queue", b"!"]
    )
    def test_unknown_control_packet_is_ignored(
        self, kernel: FakeKernel, key: bytes
    ) -> None:
        """[CTL-2] With and without a payload."""
        peer = kernel.connect()
        peer.send(b"CMSG " + key, b"CMSG " + key + b"\0x")
        assert not peer.wire.closed
        assert peer.read() == []

    def test_answers_need_no_subscription(self, kernel: FakeKernel) -> None:
        """[CTL-3] [CRED-2] Nor do others hear them."""
        peer, witness = kernel.connect(gid=1, uid=2, pid=3), kernel.connect()
        witness.send(b"SUB ")
        peer.send(WHOAMI)
        assert peer.read() == [ANSWER + b"!/cred/1/2/3"]
        assert witness.read() == []

    def test_payload_of_a_question_is_ignored(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-4] [CRED-2] A question may carry anything."""
        peer = kernel.connect()
        peer.send(WHOAMI + b"\0please")
        assert len(peer.read()) == 1

    def test_stats_of_a_client(self) -> None:
        """[CTL-5] Its own counts, and nobody else's."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(small(backlog_packets=2))
        reader, sender = kernel.connect(uid=1), kernel.connect(uid=2)
        reader.wire.room = 1
        reader.send(b"SUB k", b"SUB l", b"CMSG blocking/hard/discard")
        sender.send(*publications(4))
        assert reader.client.counts() == {
            "published": 0,
            "delivered": 1,
            "refused": 3,
            "discarded": 1,
            "paused": 0,
        }
        assert reader.client.backlog.bytes == 2 * size
        reader.read_all()
        reader.wire.room = None
        reader.send(b"CMSG stats")
        (answer,) = reader.read()
        assert json.loads(answer.partition(b"\0")[2]) == {
            "client": 1,
            "published": 0,
            "delivered": 3,
            "refused": 3,
            "discarded": 1,
            "paused": 0,
            "patterns": 2,
            "backlog_bytes": 0,
        }
        sender.send(b"CMSG stats\0x")
        (answer,) = sender.read()
        assert answer.startswith(b'CMSG stats\0{"client": 2, "published": 4,')

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_stats_of_all_users(self, uid: int) -> None:
        """[CTL-5] For root and the bus owner; the past is not forgotten."""
        kernel = FakeKernel()
        asker = kernel.connect(uid=uid)
        one, two = (kernel.connect(uid=7) for _ in "12")
        one.send(b"SUB k", publish(b"k"), publish(b"x"))
        two.send(b"SUB k", b"CMSG blocking/soft/block")
        two.wire.room = 0
        one.send(publish(b"k"))
        assert one.paused
        two.close()
        asker.send(b"CMSG stats")
        (answer,) = asker.read()
        users = json.loads(answer.partition(b"\0")[2])["users"]
        assert set(users) == {"7", str(uid)}
        assert users["7"] == {
            "clients": 1,
            "patterns": 1,
            "backlog_bytes": 0,
            "published": 3,
            "delivered": 2,
            "refused": 1,
            "discarded": 0,
            "paused": 1,
        }
        one.close()
        assert list(kernel.bus.users) == [uid]

    def test_stats_of_more_users_than_an_answer_holds(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-5] A thousand of them."""
        for uid in range(2, sbus.STATS_USERS_MAX + 9):
            kernel.connect(uid=uid)
        root = kernel.connect(uid=0)
        root.send(b"CMSG stats")
        users = json.loads(root.read()[0].partition(b"\0")[2])["users"]
        assert len(users) == sbus.STATS_USERS_MAX == 1_000

    def test_modes_ignore_their_payload(self, kernel: FakeKernel) -> None:
        """[CTL-4] [BLOCK-2] A mode is its key."""
        peer = kernel.connect()
        peer.send(b"CMSG blocking/soft/error\0x", b"CMSG order/stack\0")
        assert peer.client.soft_mode == "error"
        assert peer.client.backlog.order == "stack"


# =============================================================================
# 4. Secret messages
# =============================================================================


def secret(*fields: object, rest: str = "x") -> bytes:
    """Return a secret key."""
    return f"!/cred/{'/'.join(map(str, fields))}/{rest}".encode()


class TestSecretMessages:
    OWN = sbus.Credentials(100, 1000, 4242)

    def owner(self, kernel: FakeKernel) -> FakePeer:
        """Connect the client whose secrets are tested."""
        return kernel.connect(gid=100, uid=1000, pid=4242)

    def test_own_secret_arrives(self, kernel: FakeKernel) -> None:
        """[CRED-4] [CRED-10] [CRED-11] From anybody, at its owner alone."""
        owner, sender = self.owner(kernel), kernel.connect()
        key = secret(100, 1000, 4242)
        owner.send(b"SUB " + key)
        sender.send(publish(key, b"psst"))
        assert owner.read() == [publish(key, b"psst")]

    @pytest.mark.parametrize(
        "pattern",
        [b"", b"*", b"*/", b"!*/", b"!*/*/", b"*/cred/", b"*/*/*/*/*/x"],
    )
    def test_wide_patterns_do_not_hear_secrets(
        self, kernel: FakeKernel, pattern: bytes
    ) -> None:
        """[CRED-10] [MATCH-4] Not even one's own."""
        owner, other = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + pattern)
        other.send(b"SUB " + pattern)
        other.send(
            publish(secret(100, 1000, 4242)), publish(secret("", "", ""))
        )
        assert owner.read() == other.read() == []
        assert not owner.wire.closed

    @pytest.mark.parametrize(
        "fields",
        [
            (101, 1000, 4242),
            (100, 1001, 4242),
            (100, 1000, 4243),
            (10, 1000, 4242),
            (100, 1000, 42421),
            ("", 1001, ""),
            ("0100", 1000, 4242),
            (100, "01000", 4242),
            ("*", 1000, 4242),
            (100, "*", 4242),
            (100, 1000, "*"),
            (100, 1000, "4*"),
            ("+100", 1000, 4242),
            (" 100", 1000, 4242),
            (100, 1000, "4242x"),
            (100, 1000, "9" * 400),
            ("\u0661\u0660\u0660", 1000, 4242),
        ],
    )
    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB "])
    def test_pattern_of_others_disconnects(
        self, kernel: FakeKernel, fields: tuple[object, ...], word: bytes
    ) -> None:
        """[CRED-4] [CRED-5] [CRED-7] One wrong field is enough."""
        owner = self.owner(kernel)
        owner.send(word + secret(*fields))
        assert owner.wire.closed

    @pytest.mark.parametrize(
        "pattern",
        [
            b"!/cred/",
            b"!/cred",
            b"!/cred/100",
            b"!/cred/100/1000",
            b"!/cred/100/1000/4242",
            b"!/cred///",
            b"!/cred/100/1000/",
            b"!/cred/*",
            b"!/*/100/1000/4242/x",
            b"!/whoami",
        ],
    )
    def test_truncated_pattern_disconnects(
        self, kernel: FakeKernel, pattern: bytes
    ) -> None:
        """[CRED-5] [KEY-4] Three fields, each with a '/' after it."""
        owner = self.owner(kernel)
        owner.send(b"SUB " + pattern)
        assert owner.wire.closed

    @pytest.mark.parametrize(
        ("pattern", "rule"),
        [
            (b"!/cred/", "CRED-5"),
            (b"!/cred/100/1000/4242", "CRED-5"),
            (b"!/cred/100/x/4242/", "CRED-5"),
            (b"!/cred/100/1/4242/", "CRED-4"),
        ],
    )
    def test_error_names_the_rule(self, pattern: bytes, rule: str) -> None:
        """[CRED-4] [CRED-5] Malformed is not the same as foreign."""
        with pytest.raises(sbus.ProtocolError) as caught:
            sbus.check_secret(pattern, self.OWN, b"")
        assert caught.value.requirement == rule

    def test_empty_fields_are_ones_own(self, kernel: FakeKernel) -> None:
        """[CRED-6] They match the own number and the empty field."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret("", "", ""))
        own = [
            secret(*fields)
            for fields in itertools.product((100, ""), (1000, ""), (4242, ""))
        ]
        foreign = [
            secret(101, 1000, 4242),
            secret("", 1, ""),
            secret("", "", 1),
        ]
        sender.send(*map(publish, own + foreign))
        assert owner.read() == [publish(key) for key in own]

    def test_numbers_do_not_match_empty_fields(
        self, kernel: FakeKernel
    ) -> None:
        """[CRED-6] Only an empty field of the pattern does."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret(100, "", 4242))
        sender.send(publish(secret("", 1000, 4242)))
        sender.send(publish(secret(100, "", 4242)))
        assert owner.read() == [publish(secret(100, "", 4242))]

    def test_wildcards_after_the_fields(self, kernel: FakeKernel) -> None:
        """[CRED-10] [MATCH-2] [MATCH-3] The rest is a pattern."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret(100, 1000, 4242, rest=""))
        owner.send(b"SUB " + secret(100, 1000, 4242, rest="a/*"))
        key = secret(100, 1000, 4242, rest="a/b")
        sender.send(publish(key), publish(secret(100, 1000, 4243, rest="a/b")))
        assert owner.read() == [publish(key)]

    def test_examples_of_the_specification(self) -> None:
        """[CRED-4] [CRED-5] [CRED-6] [CRED-7] [CRED-10] Those of chapter 4."""
        text = (ROOT / "spec/4-secret-messages.md").read_text("utf-8")
        row = r"^\| (`.+`|\(empty\).*) \| (?:`(.+)`)? ?\| (\w+) \|"
        examples = re.findall(row, text, re.M)
        assert len(examples) == 10
        for patterns, key, outcome in examples:
            for pattern in patterns.replace("(empty)", "``").split(", "):
                kernel = FakeKernel()
                owner, sender = self.owner(kernel), kernel.connect()
                owner.send(b"SUB " + pattern.strip("`").encode())
                assert owner.wire.closed is (outcome == "disconnected")
                if key:
                    sender.send(publish(key.encode()))
                    assert len(owner.read()) == (outcome == "yes")

    def test_unsubscribing_a_secret(self, kernel: FakeKernel) -> None:
        """[UNSUB-1] [CRED-6] With the text that was subscribed."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret("", "", ""))
        owner.send(b"UNSUB " + secret(100, 1000, 4242))
        sender.send(publish(secret(100, 1000, 4242)))
        assert len(owner.read()) == 1
        owner.send(b"UNSUB " + secret("", "", ""))
        sender.send(publish(secret(100, 1000, 4242)))
        assert owner.read() == []

    def test_the_rest_may_be_a_secret_again(self, kernel: FakeKernel) -> None:
        """[KEY-4] [CRED-10] For a process behind another server."""
        owner, sender = self.owner(kernel), kernel.connect()
        key = secret(100, 1000, 4242, rest="!/cred/7/8/9/x")
        owner.send(b"SUB " + key)
        sender.send(publish(key))
        assert owner.read() == [publish(key)]
        owner.send(b"SUB " + secret(100, 1000, 4242, rest="x/!/cred/7/8/9/"))
        assert owner.wire.closed

    @pytest.mark.parametrize(
        "credentials",
        [(100, 1000, 0), (65_534, 1, 2), (1, 65_534, 2)],
    )
    def test_nobody_in_particular_has_no_secrets(
        self, kernel: FakeKernel, credentials: tuple[int, int, int]
    ) -> None:
        """[CRED-8] But may ask who it is."""
        peer = kernel.connect()
        peer.client.credentials = sbus.Credentials(*credentials)
        peer.send(WHOAMI)
        assert peer.read() == [ANSWER + secret(*credentials, rest="")[:-1]]
        peer.send(b"SUB " + secret(*credentials))
        assert peer.wire.closed

    def test_answer_comes_after_what_was_routed_before(
        self, kernel: FakeKernel
    ) -> None:
        """[CRED-3] [PKT-5] A question fences."""
        owner = self.owner(kernel)
        owner.send(b"SUB k", publish(b"k"), WHOAMI, publish(b"k", b"2"))
        answer = ANSWER + b"!/cred/100/1000/4242"
        expected = [publish(b"k"), answer, publish(b"k", b"2")]
        assert owner.read() == expected

    def test_prefix(self) -> None:
        """[CRED-2] [CRED-9] It stands before all secret keys."""
        prefix = b"!/cred/7/8/9"
        kernel = FakeKernel(cred_prefix=prefix)
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(WHOAMI)
        path = prefix + b"/!/cred/100/1000/4242"
        assert owner.read() == [ANSWER + path]
        owner.send(b"SUB " + path + b"/x")
        sender.send(publish(path + b"/x"))
        sender.send(publish(b"!/cred/100/1000/4242/x"))
        assert owner.read() == [publish(path + b"/x")]
        owner.send(b"SUB !/cred/100/1000/4242/x")
        assert owner.wire.closed

    def test_prefix_does_not_open_the_secrets_of_others(self) -> None:
        """[CRED-9] [CRED-11] The fields after the prefix are compared."""
        prefix = b"!/cred/100/1000/4242"
        kernel = FakeKernel(cred_prefix=prefix)
        owner = self.owner(kernel)
        owner.send(b"SUB " + prefix + b"/!/cred/100/1000/4243/x")
        assert owner.wire.closed

    @pytest.mark.parametrize("word", [b"SUB ", b"MSG "])
    def test_malformed_secret_key(
        self, kernel: FakeKernel, word: bytes
    ) -> None:
        """[KEY-4] A key with '!' that is none of chapter 4's is reserved."""
        peer = kernel.connect()
        peer.send(word + b"!/cred/1/2/x/y\0")
        assert peer.wire.closed

    def test_the_delivery_check_stands_alone(self, kernel: FakeKernel) -> None:
        """[CRED-11] Also if a foreign pattern were in the table."""
        owner, sender = self.owner(kernel), kernel.connect()
        key = secret(100, 1000, 1)
        kernel.bus._hold(owner.client, key)
        sender.send(publish(key))
        assert owner.read() == []

    def test_the_subscription_check_stands_alone(self) -> None:
        """[CRED-4] Also if the delivery check let everything pass."""
        for pattern in (secret(100, 1000, 1), secret("", 1, "")):
            with pytest.raises(sbus.ProtocolError):
                sbus.check_secret(pattern, self.OWN, b"")

    def test_cost_of_a_secret_of_another(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-6] [CONN-19] Only those who asked for it are looked at."""
        holders = [kernel.connect() for _ in range(250)]
        for holder in holders:
            holder.send(b"SUB !/cred////")
        checks = count_calls(monkeypatch, "fields_fit")
        own = holders[7].wire.credentials
        sender = kernel.connect()
        sender.send(publish(secret(*own)), publish(secret(100, 1000, 1)))
        assert len(checks) == len(holders[7].read()) == 1
        sender.send(publish(secret("", own.uid, "")))
        assert len(checks) == 1 + 250

    @pytest.mark.parametrize("prefix", [b"", b"!/cred/1/2/3"])
    def test_table_and_check_agree_with_the_definition(
        self, prefix: bytes
    ) -> None:
        """[CRED-6] [CRED-10] [CRED-11] On every combination of fields."""
        kernel = FakeKernel(cred_prefix=prefix)
        owner, sender = self.owner(kernel), kernel.connect()
        start = (prefix + b"/" if prefix else b"").decode()
        grid = list(
            itertools.product(
                ("", 100, 1),
                ("", 1000, 1),
                ("", 4242, 1),
                ("", "x", "*", "x/"),
            )
        )
        texts = [
            start.encode() + secret(*fields, rest=rest)
            for *fields, rest in grid
        ]
        for pattern in texts:
            try:
                sbus.check_secret(pattern, self.OWN, prefix)
            except sbus.ProtocolError:
                continue
            owner.send(b"SUB " + pattern)
            for key in texts:
                sender.send(publish(key))
                owed = sbus.fields_fit(key, self.OWN, prefix) and any(
                    sbus.pattern_matches(one, key)
                    for one in sbus.resolve(pattern, self.OWN, prefix)
                )
                assert owner.read() == [publish(key)] * owed, (pattern, key)
            owner.send(b"UNSUB " + pattern)


# =============================================================================
# 5. Flood control
# =============================================================================


class TestBacklog:
    def backlog(self, order: str, *packets: bytes) -> sbus.Backlog:
        """Return a backlog in an order, with packets."""
        backlog = sbus.Backlog()
        backlog.reorder(order)
        for packet in packets:
            backlog.push(packet)
        return backlog

    def drain(self, backlog: sbus.Backlog) -> list[bytes]:
        """Return the packets in the order in which they would be sent."""
        packets = []
        while len(backlog):
            packets.append(backlog.first())
            backlog.pop()
        return packets

    def test_oldest_first(self) -> None:
        """[ORDER-1] In order/queue."""
        packets = [b"1", b"333", b"22"]
        assert self.drain(self.backlog("queue", *packets)) == packets

    def test_newest_first(self) -> None:
        """[ORDER-2] In order/stack."""
        packets = [b"1", b"333", b"22"]
        assert self.drain(self.backlog("stack", *packets)) == packets[::-1]

    def test_largest_first(self) -> None:
        """[ORDER-3] In order/random."""
        packets = [b"1", b"333", b"22", b""]
        expected = [b"333", b"22", b"1", b""]
        assert self.drain(self.backlog("random", *packets)) == expected

    @pytest.mark.parametrize(
        ("orders", "expected"),
        [
            (["random"], b"abc"),
            (["stack", "random"], b"cba"),
            (["stack", "queue", "random"], b"abc"),
            (["random", "stack", "random"], b"cba"),
        ],
    )
    def test_ties(self, orders: list[str], expected: bytes) -> None:
        """[ORDER-4] Among packets of one size the last order decides."""
        for changed_first in (True, False):
            backlog = sbus.Backlog()
            if changed_first:
                for order in orders:
                    backlog.reorder(order)
            for packet in (b"a", b"b", b"c"):
                backlog.push(packet)
            if not changed_first:
                for order in orders:
                    backlog.reorder(order)
            assert b"".join(self.drain(backlog)) == expected

    def test_new_order_applies_to_what_waits(self) -> None:
        """[ORDER-5] And arrivals are not forgotten by order/random."""
        backlog = self.backlog("queue", b"a", b"ccc", b"bb")
        backlog.reorder("random")
        backlog.push(b"dddd")
        backlog.pop()
        backlog.reorder("stack")
        backlog.reorder("random")
        backlog.reorder("queue")
        assert self.drain(backlog) == [b"a", b"ccc", b"bb"]

    def test_cost_of_another_order(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[ORDER-5] [CONN-19] However often it changes while packets wait."""
        ranks = count_calls(monkeypatch, "rank")
        backlog = self.backlog("queue", *[bytes(n % 50) for n in range(999)])
        for order in ["random", "stack", "random", "queue"] * 100:
            backlog.reorder(order)
            backlog.first()
            backlog.pop()
        assert len(backlog) == 999 - 400
        assert len(ranks) <= 2 * 999

    @pytest.mark.parametrize("order", ["queue", "stack", "random"])
    def test_backlog_that_is_never_empty(self, order: str) -> None:
        """[CONN-19] [ORDER-5] It keeps no place of what has been sent."""
        backlog = self.backlog("random", b"x", b"yy")
        backlog.first()
        backlog.reorder(order)
        for number in range(10_000):
            backlog.push(bytes(number % 7))
            backlog.pop()
        assert len(backlog) == 2
        assert len(backlog._line) < 3_000
        assert all(len(heap) < 3_000 for heap in backlog._ranks.values())

    @pytest.mark.parametrize("seed", range(20))
    def test_orders_that_change(self, seed: int) -> None:
        """[ORDER-1] [ORDER-2] [ORDER-3] [ORDER-4] [ORDER-5] At any time."""
        chance = random.Random(seed)
        backlog = sbus.Backlog()
        waiting: list[tuple[int, bytes]] = []  # (arrival, packet)
        order = ties = "queue"
        for arrival in range(2_000):
            if chance.random() < 0.1:
                order = chance.choice(list(sbus.ORDERS.values()))
                ties = ties if order == "random" else order
                backlog.reorder(order)
            if chance.random() < 0.5 or not waiting:
                waiting.append((arrival, bytes(chance.randrange(9))))
                backlog.push(waiting[-1][1])
                continue
            sign = 1 if ties == "queue" else -1
            is_random = order == "random"
            first = min(
                waiting,
                key=lambda one: (-len(one[1]) * is_random, sign * one[0]),
            )
            assert backlog.first() is first[1]
            waiting.remove(first)
            backlog.pop()

    @pytest.mark.parametrize("seed", range(10))
    def test_bytes_are_those_of_the_packets(self, seed: int) -> None:
        """[BLOCK-19] Each counts as its size and 128 bytes."""
        chance = random.Random(seed)
        backlog = sbus.Backlog()
        waiting: list[bytes] = []
        for _ in range(500):
            action = chance.randrange(4)
            if action == 0 and waiting:
                waiting.remove(backlog.first())
                backlog.pop()
            elif action == 1 and not chance.randrange(5):
                backlog.reorder(chance.choice(list(sbus.ORDERS.values())))
            else:
                packet = bytes(chance.randrange(50))
                waiting.append(packet)
                backlog.push(packet)
            assert len(backlog) == len(waiting)
            assert backlog.bytes == sum(len(p) + 128 for p in waiting)
        backlog.clear()
        assert backlog.bytes == len(backlog) == 0


class TestSoftModes:
    def stalled(
        self, kernel: FakeKernel, *modes: bytes, room: int = 2, uid: int = 1000
    ) -> FakePeer:
        """Connect a subscriber to `k` that has room for few packets."""
        peer = kernel.connect(uid=uid)
        peer.wire.room = room
        peer.send(b"SUB k", *modes)
        return peer

    def test_defaults(self, kernel: FakeKernel) -> None:
        """[BLOCK-1] Soft queue, hard block, order queue, echo on."""
        client = kernel.connect().client
        assert (client.soft_mode, client.hard_mode) == ("queue", "block")
        assert client.backlog.order == "queue"
        assert client.echo

    def test_queue(self, kernel: FakeKernel) -> None:
        """[BLOCK-4] [PUB-6] All arrive, in order, and nobody waits."""
        reader, sender = self.stalled(kernel), kernel.connect()
        sender.send(*publications(100))
        assert not sender.paused
        assert len(reader.client.backlog) == 98
        assert reader.read_all() == publications(100)
        assert len(reader.client.backlog) == 0

    def test_packets_wait_behind_the_backlog(self, kernel: FakeKernel) -> None:
        """[BLOCK-3] A client stays stalled until its backlog is empty."""
        reader, sender = self.stalled(kernel), kernel.connect()
        sender.send(*publications(4))
        reader.wire.room = 3  # room for one that must be the third
        sender.send(publish(b"k", b"4"))
        assert reader.read_all() == publications(5)

    def test_order_is_of_no_effect_without_a_backlog(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-3] Packets go in order of arrival until one is refused."""
        reader = self.stalled(kernel, b"CMSG order/stack", room=100)
        kernel.connect().send(*publications(50))
        assert reader.read() == publications(50)

    def test_discard(self, kernel: FakeKernel) -> None:
        """[BLOCK-5] [BLOCK-20] What the kernel refuses is counted."""
        reader = self.stalled(kernel, b"CMSG blocking/soft/discard")
        sender = kernel.connect()
        sender.send(*publications(5))
        assert reader.client.discarded == 3
        assert kernel.bus.flood.discarded == {"soft/discard": 3}
        assert reader.read_all() == publications(2)

    def test_discard_tries_each_packet(self, kernel: FakeKernel) -> None:
        """[BLOCK-6] One read is enough to hear again."""
        reader = self.stalled(kernel, b"CMSG blocking/soft/discard", room=8)
        sender = kernel.connect()
        sender.send(*publications(9))
        reader.read(1)
        sender.send(publish(b"k", b"new"))
        assert reader.read()[-1] == publish(b"k", b"new")

    def test_discard_while_a_backlog_waits(self, kernel: FakeKernel) -> None:
        """[BLOCK-5] [BLOCK-2] What waits already is still delivered."""
        reader, sender = self.stalled(kernel), kernel.connect()
        sender.send(*publications(4))
        reader.send(b"CMSG blocking/soft/discard")
        sender.send(publish(b"k", b"lost"))
        assert reader.read_all() == publications(4)

    def test_block(self, kernel: FakeKernel) -> None:
        """[BLOCK-7] Until the backlog is empty, not merely smaller."""
        reader = self.stalled(kernel, b"CMSG blocking/soft/block", room=4)
        sender = kernel.connect()
        sender.send(*publications(6))
        assert sender.paused
        sender.wire.incoming.extend(publications(8)[6:])
        reader.read(1)
        assert sender.paused
        assert len(reader.client.backlog) == 2
        packets = reader.read_all()
        assert not sender.paused
        assert packets == publications(8)[1:]

    def test_block_pauses_only_those_who_write(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-12] Everybody else goes on."""
        reader = self.stalled(kernel, b"CMSG blocking/soft/block")
        sender, other, witness = (kernel.connect() for _ in range(3))
        witness.send(b"SUB other")
        sender.send(*publications(3))
        other.send(publish(b"other"))
        assert sender.paused
        assert not other.paused and not reader.paused
        assert witness.read() == [publish(b"other")]

    def test_one_that_blocks_itself(self, kernel: FakeKernel) -> None:
        """[BLOCK-7] It reads, and is read again."""
        peer = self.stalled(kernel, b"CMSG blocking/soft/block")
        peer.send(*publications(5))
        assert peer.paused
        assert peer.read_all() == publications(5)
        assert not peer.paused

    def test_publisher_held_by_two(self, kernel: FakeKernel) -> None:
        """[BLOCK-7] It goes on when the last lets go."""
        one, two = (
            self.stalled(kernel, b"CMSG blocking/soft/block") for _ in "12"
        )
        sender = kernel.connect()
        sender.send(*publications(3))
        one.read_all()
        assert sender.paused
        two.read_all()
        assert not sender.paused

    def test_error(self, kernel: FakeKernel) -> None:
        """[BLOCK-8] The stalled client is disconnected, nobody else."""
        reader = self.stalled(kernel, b"CMSG blocking/soft/error")
        witness, sender = kernel.connect(), kernel.connect()
        witness.send(b"SUB k")
        sender.send(*publications(2))
        assert not reader.wire.closed
        sender.send(publish(b"k"))
        assert reader.wire.closed
        assert not sender.wire.closed
        assert len(witness.read()) == 3

    def test_last_mode_is_in_force(self, kernel: FakeKernel) -> None:
        """[BLOCK-2] Each receiver has its own."""
        reader = self.stalled(
            kernel, b"CMSG blocking/soft/error", b"CMSG blocking/soft/queue"
        )
        other = self.stalled(kernel, b"CMSG blocking/soft/discard")
        kernel.connect().send(*publications(5))
        assert reader.read_all() == publications(5)
        assert other.read_all() == publications(2)

    @pytest.mark.parametrize("uid", [0, OWNER, 1000])
    def test_who_may_pause_a_publisher(
        self, kernel: FakeKernel, uid: int
    ) -> None:
        """[BLOCK-13] Root, the bus owner, and the publisher's own user."""
        self.stalled(kernel, b"CMSG blocking/soft/block", uid=uid)
        sender = kernel.connect(uid=1000)
        sender.send(*publications(5))
        assert sender.paused

    @pytest.mark.parametrize("uids", [(1001, 1000), (1000, 0), (1000, OWNER)])
    def test_soft_block_of_another_user_is_queue(
        self, kernel: FakeKernel, uids: tuple[int, int]
    ) -> None:
        """[BLOCK-13] [BLOCK-14] No user can hold up another."""
        reader_uid, sender_uid = uids
        reader = self.stalled(
            kernel, b"CMSG blocking/soft/block", uid=reader_uid
        )
        sender = kernel.connect(uid=sender_uid)
        sender.send(*publications(5))
        assert not sender.paused
        assert reader.read_all() == publications(5)

    def test_nobody_pauses_nobody(self, kernel: FakeKernel) -> None:
        """[BLOCK-13] All that the kernel cannot name have one user id."""
        uid = 65_534
        self.stalled(kernel, b"CMSG blocking/soft/block", uid=uid)
        sender = kernel.connect(uid=uid)
        sender.send(*publications(5))
        assert not sender.paused


class TestHardModes:
    def full(
        self, mode: bytes = b"", uid: int = 1000
    ) -> tuple[FakeKernel, FakePeer, FakePeer]:
        """Fill a subscriber's backlog; return it and its publisher."""
        kernel = FakeKernel(small(backlog_packets=4))
        reader, sender = kernel.connect(uid=uid), kernel.connect(uid=1000)
        reader.wire.room = 1
        reader.send(b"SUB k", *([b"CMSG " + mode] if mode else []))
        sender.send(*publications(5))
        assert len(reader.client.backlog) == 4
        return kernel, reader, sender

    def test_discard(self) -> None:
        """[BLOCK-9] [BLOCK-20] The new packet, not an old one."""
        kernel, reader, sender = self.full(b"blocking/hard/discard")
        sender.send(publish(b"k", b"x"))
        assert kernel.bus.flood.discarded == {"hard/discard": 1}
        assert reader.client.discarded == 1
        assert not sender.paused
        assert reader.read_all() == publications(5)

    def test_block(self) -> None:
        """[BLOCK-10] It is queued; half the limit lets its sender go on."""
        _, reader, sender = self.full()
        assert not sender.paused
        sender.send(publish(b"k", b"5"))
        assert sender.paused
        read = []
        for waiting in (4, 3):
            read += reader.read(1)
            assert sender.paused and len(reader.client.backlog) == waiting
        read += reader.read(1)
        assert not sender.paused and len(reader.client.backlog) == 2
        assert read + reader.read_all() == publications(6)

    def test_backlog_of_a_user(self) -> None:
        """[LIMIT-14] All its clients share it; others have their own."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_user_backlog=3 * size))
        peers = [kernel.connect(uid=uid) for uid in (1, 1, 2)]
        for peer in peers:
            peer.wire.room = 0
            peer.send(b"SUB k", b"CMSG blocking/hard/discard")
        kernel.connect().send(*publications(4))
        waiting = [len(peer.client.backlog) for peer in peers]
        assert waiting[0] + waiting[1] == waiting[2] == 3
        assert kernel.bus.users[1].backlog_bytes == 3 * size
        peers[0].close()
        peers[1].wire.room = None
        kernel.run()
        assert kernel.bus.users[1].backlog_bytes == 0
        assert kernel.bus.flood.backlog_bytes == 3 * size

    @pytest.mark.parametrize("uid, count", [(1, 6), (0, 8), (OWNER, 8)])
    def test_backlog_of_the_bus(self, uid: int, count: int) -> None:
        """[LIMIT-15] [LIMIT-16] A quarter is kept for the privileged."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_bus_backlog=8 * size))
        peer = kernel.connect(uid=uid)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/discard")
        kernel.connect().send(*publications(9))
        assert len(peer.client.backlog) == count

    def test_block_at_the_limit_of_a_user(self) -> None:
        """[LIMIT-14] [BLOCK-10] Half of what waits has to go."""
        size = small(backlog_packets=1).max_backlog
        kernel = FakeKernel(sbus.Limits(max_user_backlog=4 * size))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(6))
        assert sender.paused
        reader.read(2 - 1)
        reader.read(1)
        assert sender.paused and len(reader.client.backlog) == 3
        reader.read(1)
        assert not sender.paused
        assert len(reader.read_all()) == 3

    def test_error(self) -> None:
        """[BLOCK-11] The stalled client is disconnected."""
        _, reader, sender = self.full(b"blocking/hard/error")
        sender.send(publish(b"k", b"5"))
        assert reader.wire.closed and not sender.wire.closed

    def test_block_of_another_user_is_error(self) -> None:
        """[BLOCK-15] No user can hold up another, nor use memory for it."""
        _, reader, sender = self.full(uid=1001)
        sender.send(publish(b"k", b"5"))
        assert reader.wire.closed and not sender.paused

    def test_discard_of_another_user(self) -> None:
        """[BLOCK-9] Nobody needs to wait for that."""
        _, reader, sender = self.full(b"blocking/hard/discard", uid=1001)
        sender.send(publish(b"k", b"5"))
        assert not reader.wire.closed
        assert reader.client.discarded == 1

    def test_packet_that_just_fits(self) -> None:
        """[BLOCK-19] The limit itself is no excess."""
        _, reader, sender = self.full(b"blocking/hard/error")
        assert not reader.wire.closed

    def test_hard_and_then_soft_block(self) -> None:
        """[BLOCK-2] [BLOCK-7] The mode that holds longer counts."""
        _, reader, sender = self.full()
        sender.send(publish(b"k", b"5"))
        reader.send(b"CMSG blocking/soft/block")
        sender.kernel.bus.flood.refuse(reader.client, b"x", sender.client)
        while len(reader.client.backlog) > 1:
            reader.read(1)
            assert sender.paused
        reader.read_all()
        assert not sender.paused

    def test_soft_and_hard_block(self) -> None:
        """[BLOCK-7] [BLOCK-10] The backlog has to be empty then."""
        kernel = FakeKernel(small(backlog_packets=4))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(8))
        assert sender.paused
        for _ in range(6):
            reader.read(1)
            assert sender.paused
        reader.read(1)
        assert not sender.paused

    def test_answers_are_queued_in_every_mode(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-17] [CRED-3] They are neither discarded nor refused."""
        for mode in sbus.SOFT_MODES:
            peer = kernel.connect()
            peer.wire.room = 1
            peer.send(b"CMSG " + mode, WHOAMI, WHOAMI)
            assert not peer.wire.closed
            assert len(peer.read_all()) == 2

    @pytest.mark.parametrize("mode", [*sbus.SOFT_MODES, *sbus.HARD_MODES])
    def test_answer_above_the_limit_disconnects(self, mode: bytes) -> None:
        """[BLOCK-18] Who asks and never reads uses no more memory."""
        kernel = FakeKernel(small(backlog_packets=4))
        peer = kernel.connect()
        peer.wire.room = 1
        peer.send(b"CMSG " + mode, *[WHOAMI] * 10)
        assert peer.wire.closed

    @pytest.mark.parametrize("soft", sorted(sbus.SOFT_MODES))
    @pytest.mark.parametrize("hard", sorted(sbus.HARD_MODES))
    @pytest.mark.parametrize("order", sorted(sbus.ORDERS))
    @pytest.mark.parametrize("echo", sorted(sbus.ECHOES))
    def test_every_combination(
        self, soft: bytes, hard: bytes, order: bytes, echo: bytes
    ) -> None:
        """[BLOCK-4] [BLOCK-12] [BLOCK-20] Nothing vanishes, others go on."""
        kernel = FakeKernel(small(backlog_packets=10, payload_bytes=2))
        peer, witness, sender = (kernel.connect() for _ in range(3))
        witness.send(b"SUB k")
        modes = [b"CMSG " + mode for mode in (soft, hard, order, echo)]
        peer.wire.room = 3
        peer.send(b"SUB k", *modes, publish(b"k", b"-"))
        sender.send(*publications(40)[10:])  # of one size
        assert len(peer.wire.taken) == 3
        rest = 30 + sbus.ECHOES[echo] - 3
        soft_mode, hard_mode = sbus.SOFT_MODES[soft], sbus.HARD_MODES[hard]
        queues = soft_mode in ("queue", "block")
        is_error = soft_mode == "error" or (queues and hard_mode == "error")
        assert peer.wire.closed is is_error
        if not is_error:
            kept = rest if hard_mode == "block" else 10
            waiting = kept if queues else 0
            assert len(peer.client.backlog) == waiting
            assert peer.client.discarded == rest - waiting
            is_paused = queues and "block" in (soft_mode, hard_mode)
            assert sender.paused is is_paused
        peer.read_all()
        assert not sender.paused
        assert len(witness.read_all()) == 31


class TestOvershoot:
    """[BLOCK-21] How far publishers take a backlog before they are paused."""

    def readers(self, uid: int, **limits: int) -> tuple[FakeKernel, FakePeer]:
        """Connect a reader that takes nothing, with some limits."""
        kernel = FakeKernel(sbus.Limits()._replace(**limits))
        reader = kernel.connect(uid=uid)
        reader.wire.room = 0
        reader.send(b"SUB k")
        return kernel, reader

    def fill(self, kernel: FakeKernel, uid: int, size: int) -> None:
        """Queue that many bytes, with a publisher for each large packet."""
        most = 400_000 + sbus.PACKET_OVERHEAD_BYTES
        while size:
            part = size if size <= most else min(most, size - 1_000)
            packet = publish(b"k").ljust(part - sbus.PACKET_OVERHEAD_BYTES)
            kernel.connect(uid=uid).send(packet)
            size -= part

    @pytest.mark.parametrize(
        ("limit", "uid"),
        [
            ("max_backlog", 1000),
            ("max_backlog", 0),
            ("max_backlog", OWNER),
            ("max_user_backlog", 1000),
            ("max_bus_backlog", 0),
        ],
    )
    def test_bound(self, limit: str, uid: int) -> None:
        """[BLOCK-21] An eighth and a mebibyte: what is above ends it."""
        kernel, reader = self.readers(uid, **{limit: 80_000})
        self.fill(kernel, 1000, 80_000 + 10_000 + (1 << 20))
        assert not reader.wire.closed
        self.fill(kernel, 1000, 200)  # the bound itself is not above it
        assert not reader.wire.closed
        self.fill(kernel, 1000, 200)
        assert reader.wire.closed

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_limit_of_a_user_is_not_for_the_privileged(self, uid: int) -> None:
        """[BLOCK-21] [LIMIT-14] As ever."""
        kernel, reader = self.readers(uid, max_user_backlog=80_000)
        self.fill(kernel, 1000, 2_000_000)
        assert not reader.wire.closed


class TestBlockTimeout:
    def held(self) -> tuple[FakeKernel, FakePeer, FakePeer]:
        """Have a reader hold a publisher."""
        kernel = FakeKernel()
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 8
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(20))
        assert sender.paused
        return kernel, reader, sender

    def test_holder_that_takes_nothing(self) -> None:
        """[BLOCK-16] It is disconnected, and its publishers go on."""
        kernel, reader, sender = self.held()
        kernel.wait(4.9)
        assert sender.paused
        kernel.wait(0.2)
        assert reader.wire.closed and not sender.paused
        kernel.server.round()
        assert kernel.selector.timeouts[-1] is None

    def test_holder_that_takes_a_packet(self) -> None:
        """[BLOCK-16] Its time begins anew, without an event to tell."""
        kernel, reader, sender = self.held()
        for _ in range(5):
            kernel.wait(4.9)
            reader.read(1)  # too little for the kernel to report
            kernel.wait(0.2)
            assert not reader.wire.closed and sender.paused
        kernel.wait(5.1)
        assert reader.wire.closed

    def test_time_counts_from_the_last_packet(self) -> None:
        """[BLOCK-16] Not from the first one that was refused."""
        kernel, reader, sender = self.held()
        kernel.wait(4)
        reader.read(7)  # enough for the kernel to report
        kernel.wait(4.9)
        assert not reader.wire.closed and sender.paused
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_holder_that_lets_go(self) -> None:
        """[BLOCK-16] Who holds nobody has all the time."""
        kernel, reader, sender = self.held()
        reader.read_all()
        reader.send(b"CMSG blocking/soft/queue")
        sender.send(*publications(20))
        kernel.wait(100)
        assert not reader.wire.closed

    def test_stalled_client_that_holds_nobody(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-16] A slow reader as such is no offence."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(5))
        kernel.wait(100)
        assert reader.read_all() == publications(5)

    def test_two_that_wait_for_each_other(self, kernel: FakeKernel) -> None:
        """[BLOCK-16] The bus does not let them wait for ever."""
        one, two = kernel.connect(), kernel.connect()
        for peer in (one, two):
            peer.wire.room = 1
            peer.send(b"SUB k", b"CMSG blocking/soft/block")
        one.send(*publications(3))
        two.send(*publications(3))
        assert one.paused and two.paused
        kernel.wait(5.1)
        assert one.wire.closed and two.wire.closed

    def test_stop_of_the_server(self) -> None:
        """[BLOCK-16] The time that it was stopped does not count."""
        kernel, reader, sender = self.held()
        select = kernel.selector.select

        def stopped(timeout: float | None = None) -> Any:
            kernel.now += 7
            kernel.selector.select = select  # type: ignore[method-assign]
            return select(timeout)

        kernel.wait(4)
        kernel.selector.select = stopped  # type: ignore[method-assign]
        kernel.server.round()
        assert not reader.wire.closed and sender.paused
        kernel.wait(0.9)
        reader.read(1)
        kernel.wait(0.2)
        kernel.wait(4.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_the_loop_wakes_up_in_time(self) -> None:
        """[BLOCK-16] [CONN-9] It waits for no longer than a timer says."""
        kernel, _, _ = self.held()
        kernel.server.round()
        timeout = kernel.selector.timeouts[-1]
        assert timeout is not None and 4 < timeout <= 5

    def test_time_ends_with_the_last_held_publisher(self) -> None:
        """[BLOCK-16] The next one that is held has all of it."""
        kernel, reader, sender = self.held()
        kernel.wait(1)
        kernel.server.disconnect(sender.client, "test")
        kernel.wait(3.9)
        kernel.connect().send(publish(b"k"))
        kernel.wait(4.9)
        assert not reader.wire.closed
        kernel.wait(0.2)
        assert reader.wire.closed

    def test_publisher_that_was_disconnected_is_not_held(self) -> None:
        """[BLOCK-16] Nobody is made responsible for it."""
        kernel, reader, sender = self.held()
        client = sender.client
        reader.read_all()
        kernel.server.disconnect(client, "test")
        assert not kernel.bus.flood.may_pause(client, reader.client)

    def test_long_block_time(self) -> None:
        """[BLOCK-16] [LIMIT-8] Longer than epoll can wait."""
        kernel = FakeKernel(sbus.Limits(block_timeout=1e9))
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(3))
        kernel.server.round()
        timeout = kernel.selector.timeouts[-1]
        assert timeout is not None and timeout <= 3600

    def test_publisher_that_leaves_while_paused(self) -> None:
        """[CONN-6] [BLOCK-12] What it sent is handled once it may go on."""
        kernel, reader, sender = self.held()
        sender.wire.incoming.append(publish(b"k", b"last"))
        sender.close()
        assert reader.read_all()[-1] == publish(b"k", b"last")
        assert sender.wire.closed

    def test_holder_that_leaves(self) -> None:
        """[BLOCK-12] Its publishers go on."""
        _, reader, sender = self.held()
        reader.close()
        assert reader.wire.closed and not sender.paused

    def test_paused_publisher_that_is_disconnected(self) -> None:
        """[CONN-12] Nobody holds it any longer."""
        kernel, reader, sender = self.held()
        client = sender.client
        kernel.server.disconnect(client, "test")
        assert reader.client.holding == {} and not client.held_by
        reader.read_all()


# =============================================================================
# 6. Echoes
# =============================================================================


class TestEchoes:
    def test_echo_off_and_on(self, kernel: FakeKernel) -> None:
        """[ECHO-1] [ECHO-2] [ECHO-3] From the packet that says so."""
        peer = kernel.connect()
        peer.send(b"SUB k", publish(b"k", b"1"), b"CMSG echo/off")
        peer.send(publish(b"k", b"2"), b"CMSG echo/on", publish(b"k", b"3"))
        assert peer.read() == [publish(b"k", b"1"), publish(b"k", b"3")]

    def test_others_still_hear(self, kernel: FakeKernel) -> None:
        """[ECHO-2] It concerns the publisher alone."""
        peer, other = kernel.connect(), kernel.connect()
        peer.send(b"SUB k", b"CMSG echo/off")
        other.send(b"SUB k")
        peer.send(publish(b"k", b"mine"))
        other.send(publish(b"k", b"yours"))
        assert peer.read() == [publish(b"k", b"yours")]
        assert len(other.read()) == 2


# =============================================================================
# 7. Connections, on a fake kernel
# =============================================================================


class TestLoop:
    def test_old_bytes_of_the_buffer(self) -> None:
        """[PUB-4] [LIMIT-4] They are no part of a shorter packet."""
        kernel = FakeKernel(sbus.Limits(max_key=40_000))
        peer, other = kernel.connect(), kernel.connect()
        peer.send(b"SUB k/", publish(b"k/" + b"x" * 30_000, b"secret"))
        other.send(b"SUB k/" + b"x" * 18_000)
        other.send(publish(b"k/" + b"x" * 18_000, b"y"))
        assert [len(packet) for packet in peer.read()] == [30_013, 18_008]
        assert [len(packet) for packet in other.read()] == [18_008]

    def test_parting_takes_no_memory(
        self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CONN-12] What a pattern became is kept from its subscription on."""
        peer = kernel.connect()
        peer.send(b"SUB a/*/b/", b"SUB !/cred////x", b"SUB a*b", b"SUB k")
        for name in ("split_pattern", "resolve"):
            monkeypatch.setattr(sbus, name, no_room)
        peer.close()
        assert peer.wire.closed and not kernel.bus.clients

    def test_send_buffer_is_raised(self, kernel: FakeKernel) -> None:
        """[CONN-4] Twice the option, less 32, is the largest packet."""
        wire = kernel.connect().wire
        assert wire.options[socket.SO_SNDBUF] * 2 - 32 >= 409_600

    def test_turns_are_short(self, kernel: FakeKernel) -> None:
        """[CONN-5] Others come after at most 64 packets."""
        flooder, polite = kernel.connect(), kernel.connect()
        flooder.wire.incoming.extend(publications(1000))
        polite.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) >= 1000 - 64
        assert len(polite.wire.taken) == 1

    def test_turns_begin_anew(self, kernel: FakeKernel) -> None:
        """[CONN-5] What was done in earlier turns does not count."""
        peer = kernel.connect()
        peer.send(b"SUB k", *publications(5000))
        peer.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert not peer.wire.incoming

    def test_turns_end_by_the_clock(self, kernel: FakeKernel) -> None:
        """[CONN-5] After a millisecond, if packets take so long."""
        peer = kernel.connect()
        slow_down(kernel, 0.0003)
        peer.wire.incoming.extend(publish(b"%d" % n) for n in range(64))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 64 - 4

    def test_turns_with_large_packets_end_by_the_clock(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] Although their key is known."""
        peer = kernel.connect()
        slow_down(kernel, 0.0006)
        peer.wire.incoming.extend([publish(b"k", bytes(20_000))] * 64)
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 64 - 2

    def test_sends_that_take_long(self, kernel: FakeKernel) -> None:
        """[CONN-20] The other clients of that user wait for their turns."""
        slow = [kernel.connect(uid=1) for _ in range(5)]
        quick, sender = kernel.connect(uid=2), kernel.connect(uid=3)
        for peer in [*slow, quick]:
            peer.send(b"SUB k")
        for peer in slow:
            spend_ticks(kernel, peer)
        sender.wire.incoming.extend(publications(9))
        kernel.server.round(0)
        assert [len(peer.wire.taken) for peer in slow] == [1, 0, 0, 0, 0]
        assert quick.wire.taken == deque(publications(9))
        kernel.run()
        for peer in slow:
            assert peer.read_all() == publications(9)

    def test_reading_that_takes_long(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-20] A turn ends although its keys are known."""
        peer = kernel.connect()
        peer.send(publish(b"k"))
        recv_into = peer.wire.recv_into

        def slow(*arguments: Any) -> int:
            kernel.server.ticks.append(1)
            kernel.now += 0.005
            return recv_into(*arguments)

        peer.wire.recv_into = slow  # type: ignore[method-assign]
        peer.wire.incoming.extend(publications(9))
        kernel.server.round(0)
        assert len(peer.wire.incoming) == 8

    def test_single_packets_are_read_one_a_turn(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] For a while; then runs of them are read again."""
        peer, reads = kernel.connect(), 0
        recv_into = peer.wire.recv_into

        def count_reads(*arguments: Any) -> int:
            nonlocal reads
            reads += 1
            return recv_into(*arguments)

        peer.wire.recv_into = count_reads  # type: ignore[method-assign]
        for _ in range(1 + sbus.SINGLE_TURNS):
            peer.send(WHOAMI)
        assert reads == 2 + sbus.SINGLE_TURNS
        peer.wire.incoming.extend([WHOAMI] * 50)
        kernel.server.round(0)
        assert not peer.wire.incoming

    def test_turns_with_many_deliveries_are_shorter(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] A turn has a bound on what it sends as well."""
        for _ in range(400):
            kernel.connect().send(b"SUB k")
        flooder = kernel.connect()
        flooder.wire.incoming.extend(publications(64))
        kernel.server.round(0)
        assert len(flooder.wire.incoming) > 64 - 20
        assert not kernel.bus.touched

    def test_turns_with_wide_deliveries_are_shorter(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-5] The more so, the larger the packets are."""
        for _ in range(100):
            kernel.connect().send(b"SUB k")
        flooder = kernel.connect()
        flooder.wire.incoming.extend([publish(b"k", bytes(16_000))] * 64)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) == 64 - 6

    def test_users_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-19] However many busy clients one of them has."""
        flooders = [kernel.connect(uid=1) for _ in range(20)]
        other = kernel.connect(uid=2)
        slow_down(kernel, 0.0006)
        for flooder in flooders:
            flooder.wire.incoming.extend(new_keys(64))
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(other.wire.taken) == 1
        left = [len(flooder.wire.incoming) for flooder in flooders]
        assert left == [62, 62] + [64] * 18

    def test_clients_of_a_user_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever was put off is served before those who were not.

        And is not served once it has gone, or the server stops.
        """
        stuck = kernel.connect(uid=2)
        stuck.wire.room = 0
        stuck.send(b"SUB x", publish(b"x"))
        flooders = [kernel.connect(uid=1) for _ in range(6)]
        slow_down(kernel, 0.0006)
        for flooder in flooders:
            flooder.wire.incoming.extend(new_keys(64))
        for _ in range(2):
            kernel.server.round(0)
        kernel.server.disconnect(flooders[5].client, "test")
        for _ in range(2):
            kernel.server.round(0)
        left = [len(flooder.wire.incoming) for flooder in flooders]
        assert left == [60, 60, 62, 62, 62, 64]
        kernel.server.stop()
        stuck.wire.room = None
        kernel.server.run()
        assert [len(flooder.wire.incoming) for flooder in flooders] == left

    def test_one_turn_in_a_round(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-19] Also for whom was put off in the one before."""
        flooder, late = (kernel.connect(uid=1) for _ in "12")
        handle = slow_down(kernel, 0.002)
        flooder.wire.incoming.extend(new_keys(1))
        late.wire.incoming.extend(publications(200, b"x"))
        kernel.server.round(0)
        assert len(late.wire.incoming) == 200
        kernel.bus.handle = handle  # type: ignore[method-assign]
        kernel.server.round(0)
        assert len(late.wire.incoming) == 200 - 64

    def test_time_is_made_up_for(self, kernel: FakeKernel) -> None:
        """[CONN-19] Whoever took longer than a share has fewer turns."""
        greedy, other = kernel.connect(uid=1), kernel.connect(uid=2)
        handle = slow_down(kernel, 0.0105)  # five shares of 2 ms, and a half
        greedy.wire.incoming.extend(new_keys(1))
        kernel.server.round(0)
        kernel.bus.handle = handle  # type: ignore[method-assign]
        greedy.wire.incoming.append(WHOAMI)
        for count in range(1, 5):
            other.wire.incoming.append(WHOAMI)
            kernel.server.round(0)
            assert len(other.wire.taken) == count and not greedy.wire.taken
        kernel.server.round(0)
        assert len(greedy.wire.taken) == 1

    def test_resumed_readers_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-5] [CONN-19] What waited for many takes time as well."""
        readers = [kernel.connect(uid=1) for _ in range(20)]
        for reader in readers:
            reader.wire.room = 0
            reader.send(b"SUB k")
        kernel.connect(uid=1).send(*publications(1000))
        for reader in readers:
            reader.wire.room = None
            spend_on_sends(kernel, reader, 0.00001)
        kernel.server.round(0)
        taken = [len(reader.wire.taken) for reader in readers]
        assert 99 <= taken[0] <= 101 and 99 <= taken[1] <= 101
        assert sum(taken[3:]) == 0

    def test_newcomers_have_turns(self, kernel: FakeKernel) -> None:
        """[CONN-3] [CONN-19] No more are let in than can be served."""
        other = kernel.connect(uid=2)
        slow_down(kernel, 0.0006)
        wires = newcomers(kernel, 20, publish(b"k"))
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(kernel.listener.waiting) == 20 - 4
        assert len(other.wire.taken) == 1
        kernel.run()
        assert not any(wire.incoming for wire in wires)

    def test_one_shot_above_the_limit(self) -> None:
        """[LIMIT-7] [LIMIT-11] [CONN-6] It never was beside the others."""
        for name in ("max_user_clients", "max_clients"):
            kernel = FakeKernel(sbus.Limits()._replace(**{name: 3}))
            reader = kernel.connect(uid=0)
            reader.send(b"SUB k")
            uid = 1 if name == "max_user_clients" else 0
            peers = [kernel.connect(uid=uid) for _ in range(2)]
            wires = newcomers(kernel, 50, *publications(50), uid=uid)
            for wire in wires:
                wire.ended = True
            kernel.run()
            assert reader.read() == [*publications(50)] * 50
            assert not any(peer.wire.closed for peer in peers)
            assert not kernel.server.disconnected

    def test_newcomer_above_the_limit_is_heard_out(self) -> None:
        """[LIMIT-11] What the kernel took from it is handled."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=1))
        reader = kernel.connect(uid=1)
        reader.send(b"SUB k")
        wires = newcomers(kernel, 2, *publications(100))
        kernel.run()
        assert sorted(reader.read()) == sorted([*publications(100)] * 2)
        assert all(wire.closed for wire in wires) and not reader.wire.closed
        assert kernel.server.disconnected == {"LIMIT-11": 2}

    def test_newcomer_beside_those_who_have_left(self) -> None:
        """[LIMIT-11] [LIMIT-18] It is not to blame that they wait."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=5))
        peers = [kernel.connect(uid=1) for _ in range(5)]
        handle = slow_down(kernel, 0.003)
        for peer in peers:
            peer.wire.incoming.extend(new_keys(1))
            peer.wire.ended = True
        wires = newcomers(kernel, 4)
        kernel.server.round(0)
        assert len(kernel.bus.clients) == 9
        kernel.bus.handle = handle  # type: ignore[method-assign]
        kernel.run()
        assert all(peer.wire.closed for peer in peers)
        assert not any(wire.closed for wire in wires)

    def test_crowd_above_the_limit(self) -> None:
        """[LIMIT-11] [LIMIT-16] [LIMIT-18] It is not heard out without end."""
        for is_held in (False, True):
            kernel = FakeKernel(sbus.Limits(max_user_clients=3))
            reader, sender = (kernel.connect(uid=1) for _ in "12")
            reader.send(b"SUB k", b"CMSG blocking/soft/block")
            reader.wire.room = 0 if is_held else None
            newcomers(kernel, 500, *publications(200))
            kernel.server.round(0)
            most = 3 + (0 if is_held else sbus.CROWD_MAX)
            assert len(kernel.bus.clients) == most
            root = kernel.connect(uid=0)
            root.send(WHOAMI)
            assert len(root.read()) == 1 and not sender.wire.closed

    def test_large_packets_wait_for_a_paused_publisher(
        self, kernel: FakeKernel
    ) -> None:
        """[BLOCK-7] A turn ends as soon as its publisher is paused."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        packets = [publish(b"k", bytes(100_000 + n)) for n in range(9)]
        sender.send(*packets)
        assert len(sender.wire.incoming) == 7
        assert reader.read_all() == packets

    @pytest.mark.parametrize("size", [1, 100_000])
    @pytest.mark.parametrize("uid", [1000, 1001])
    def test_receiver_that_is_disconnected_is_heard_out(
        self, size: int, uid: int
    ) -> None:
        """[CONN-18] Nobody else can make its messages vanish."""
        kernel = FakeKernel(sbus.Limits(max_backlog=size + 200))
        peer, sender = kernel.connect(uid=1000), kernel.connect(uid=uid)
        witness = kernel.connect()
        witness.send(b"SUB late")
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/error")
        peer.wire.incoming.extend(publications(200, b"late"))
        sender.wire.incoming.extend([publish(b"k", bytes(size))] * 2)
        kernel.run()
        assert peer.wire.closed and not sender.wire.closed
        assert witness.read() == publications(200, b"late")

    def test_receiver_that_disconnects_itself(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-18] By what it publishes to itself."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB late")
        peer.wire.room = 0
        large = publish(b"k", bytes(100_000))
        peer.send(b"SUB k", b"CMSG blocking/soft/error")
        peer.send(large, publish(b"late"), large, publish(b"late", b"2"))
        assert peer.wire.closed
        assert witness.read() == [publish(b"late"), publish(b"late", b"2")]

    def test_disconnected_receiver_holds_nobody(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-18] [BLOCK-12] Although it is paused itself."""
        peer, sender, holder = (kernel.connect() for _ in range(3))
        holder.wire.room = 1
        holder.send(b"SUB x", b"CMSG blocking/soft/block")
        peer.wire.room = 1
        peer.send(b"SUB k", b"CMSG blocking/soft/block")
        peer.send(*publications(3, b"x"), publish(b"x", b"3"))
        sender.send(*publications(3))
        assert peer.paused and sender.paused
        peer.wire.failures.append(OSError(errno.EIO, "odd"))
        peer.wire.taken.clear()
        kernel.run()
        assert not sender.paused and not peer.wire.closed
        assert len(holder.read_all()) == 4
        assert peer.wire.closed

    def test_departure_after_the_last_packet(self, kernel: FakeKernel) -> None:
        """[CONN-6] [CONN-10] All that was sent is handled."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        sender.wire.incoming.extend(publications(200))
        sender.close()
        assert sender.wire.closed
        assert reader.read() == publications(200)

    def test_reset_before_the_last_packets(self, kernel: FakeKernel) -> None:
        """[CONN-6] ECONNRESET is not the end of input."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        sender.wire.incoming.extend(publications(200))
        sender.wire.reset = True
        sender.close()
        assert reader.read() == publications(200)

    def test_backlog_of_one_that_leaves(self, kernel: FakeKernel) -> None:
        """[CONN-10] The kernel gets what it takes of it."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(10))
        reader.wire.room = 5
        reader.close()
        assert list(reader.wire.taken) == publications(5)

    def test_long_backlog_of_one_that_leaves(self, kernel: FakeKernel) -> None:
        """[CONN-10] All that the kernel takes, in several turns if need be."""
        reader, sender, other = (kernel.connect() for _ in range(3))
        reader.wire.room = 0
        reader.send(b"SUB k")
        sender.send(*publications(600))
        reader.wire.room = None
        spend_on_sends(kernel, reader, 0.00001)
        reader.wire.ended = True
        other.wire.incoming.append(WHOAMI)
        kernel.server.round(0)
        assert len(other.wire.taken) == 1 and not reader.wire.closed
        assert len(reader.wire.taken) <= 200
        kernel.run()
        assert reader.wire.closed
        assert list(reader.wire.taken) == publications(600)

    @pytest.mark.parametrize("stalled", [False, True])
    def test_client_that_no_longer_receives(
        self, kernel: FakeKernel, stalled: bool
    ) -> None:
        """[CONN-8] Its own packets are still handled, to the last."""
        deaf, other = kernel.connect(), kernel.connect()
        other.send(b"SUB k")
        deaf.send(b"SUB ", b"CMSG blocking/soft/block")
        if stalled:
            deaf.wire.room = 1
            other.send(*publications(3, b"x"))
            assert other.paused
        deaf.wire.deaf = True
        kernel.wait(5.1)  # no event tells of it
        other.send(publish(b"x"), publish(b"x"))
        assert not deaf.wire.closed and not other.paused
        lost = 4 if stalled else 2  # [BLOCK-20]
        assert kernel.bus.flood.discarded == {"deaf": lost}
        deaf.send(publish(b"k"))
        assert other.read() == [publish(b"k")]
        deaf.close()
        assert deaf.wire.closed

    @pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
    def test_kernel_without_memory(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-9] The packet waits, and is tried again soon."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        reader.wire.failures.extend([OSError(number, "none")] * 3)
        reader.wire.is_silent = True  # no event tells of room
        sender.send(*publications(3))
        for _ in range(3):
            assert reader.read() == [] and not reader.wire.closed
            kernel.wait(0.06)
        assert reader.read() == publications(3)

    def test_kernel_with_room_but_without_memory(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-9] The loop does not spin on a socket that seems ready."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        failures = [OSError(errno.ENOBUFS, "none")] * 3
        reader.wire.failures.extend(failures)
        sender.send(*publications(3))
        assert len(reader.wire.failures) == 2
        kernel.wait(0.06)
        assert len(reader.wire.failures) == 1
        reader.wire.failures[0] = OSError(errno.EIO, "odd")
        kernel.wait(0.06)
        assert reader.wire.closed and not sender.wire.closed

    def test_unheard_of_error(self, kernel: FakeKernel) -> None:
        """[CONN-12] It costs the client that it concerns."""
        reader, other = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        other.send(b"SUB k")
        reader.wire.failures.append(OSError(errno.EIO, "odd"))
        other.send(publish(b"k"))
        assert reader.wire.closed and not other.wire.closed
        assert other.read() == [publish(b"k")]

    def test_unheard_of_error_of_a_stalled_client(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] The same."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")
        sender.send(*publications(3))
        reader.wire.failures.append(OSError(errno.EIO, "odd"))
        reader.read()
        assert reader.wire.closed and not sender.wire.closed

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN])
    def test_unheard_of_error_when_reading(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-12] The same."""
        peer, other = kernel.connect(), kernel.connect()

        def recv_into(*_: object) -> int:
            raise OSError(number, "odd")

        peer.wire.recv_into = recv_into  # type: ignore[method-assign]
        peer.send(publish(b"k"))
        assert peer.wire.closed and not other.wire.closed

    def test_memory_runs_out(self, kernel: FakeKernel) -> None:
        """[CONN-12] It costs the client whose packet needed it."""
        peer, other = kernel.connect(), kernel.connect()

        def recv_into(*_: object) -> int:
            raise MemoryError

        peer.wire.recv_into = recv_into  # type: ignore[method-assign]
        peer.send(publish(b"k"))
        assert peer.wire.closed and not other.wire.closed

    @pytest.mark.parametrize(
        "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS]
    )
    def test_no_descriptor_is_left(
        self, kernel: FakeKernel, number: int
    ) -> None:
        """[CONN-3] The listener rests, then tries again; others go on."""
        peer = kernel.connect()
        kernel.listener.failures.append(OSError(number, "none"))
        late = kernel.connect()
        assert late.wire in kernel.listener.waiting
        assert kernel.listener not in kernel.selector.keys
        peer.send(WHOAMI)
        assert len(peer.read()) == 1
        kernel.wait(0.11)
        assert late.wire not in kernel.listener.waiting
        late.send(WHOAMI)
        assert len(late.read()) == 1

    def test_connection_that_is_gone_before_accept(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-3] It is nobody's fault."""
        kernel.listener.failures.append(ConnectionAbortedError())
        peer = kernel.connect()
        peer.send(WHOAMI)
        assert len(peer.read()) == 1

    def test_error_while_a_client_is_let_in(self, kernel: FakeKernel) -> None:
        """[CONN-3] [CONN-12] It costs that client alone."""
        other = kernel.connect()
        peer = FakePeer(kernel, kernel.connect().wire)

        def getsockopt(*_: object) -> bytes:
            raise OSError(errno.ENOBUFS, "none")

        wire = type(peer.wire)(99, peer.wire.credentials)
        wire.getsockopt = getsockopt  # type: ignore[method-assign]
        kernel.listener.waiting.append(wire)
        kernel.run()
        assert wire.closed and not other.wire.closed

    def test_error_while_a_client_is_watched(self, kernel: FakeKernel) -> None:
        """[CONN-3] The bus forgets a client that it cannot serve."""
        register = kernel.selector.register

        kernel.selector.register = no_room  # type: ignore
        peer = kernel.connect()
        kernel.selector.register = register  # type: ignore[method-assign]
        assert peer.wire.closed
        assert not kernel.bus.clients

    def test_error_while_a_publisher_is_resumed(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] It costs the publisher, not its reader."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k", b"CMSG blocking/soft/block")
        sender.send(*publications(3))
        register = kernel.selector.register

        def fail(fileobj: object, *arguments: Any) -> object:
            is_sender = fileobj is sender.wire
            return (no_room if is_sender else register)(fileobj, *arguments)

        kernel.selector.register = fail  # type: ignore
        assert reader.read_all() == publications(3)
        assert sender.wire.closed and not reader.wire.closed

    def test_error_while_a_client_is_watched_for_more(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] Although the selector has forgotten it by then."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 1
        reader.send(b"SUB k")

        def fail(fileobj: object, *_: object) -> object:
            kernel.selector.unregister(fileobj)
            return no_room()

        kernel.selector.modify = fail  # type: ignore
        sender.send(*publications(3))
        assert reader.wire.closed and not sender.wire.closed

    def test_error_while_the_listener_is_watched(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-3] It rests once more."""
        register = kernel.selector.register
        kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
        kernel.run()
        kernel.selector.register = no_room  # type: ignore
        kernel.wait(0.11)
        kernel.selector.register = register  # type: ignore[method-assign]
        kernel.wait(0.11)
        assert kernel.listener in kernel.selector.keys

    def test_limit_of_clients(self) -> None:
        """[LIMIT-7] There is room again when one leaves."""
        kernel = FakeKernel(sbus.Limits(max_clients=2))
        one, two, three = (kernel.connect() for _ in range(3))
        assert three.wire.closed and not two.wire.closed
        one.close()
        assert not kernel.connect().wire.closed

    def test_limit_of_the_clients_of_a_user(self) -> None:
        """[LIMIT-11] There is room again when one leaves."""
        kernel = FakeKernel(sbus.Limits(max_user_clients=2))
        one, two, three = (kernel.connect(uid=1) for _ in range(3))
        assert three.wire.closed and not two.wire.closed
        assert not kernel.connect(uid=2).wire.closed
        one.close()
        assert not kernel.connect(uid=1).wire.closed

    def test_clients_are_kept_for_the_privileged(self) -> None:
        """[LIMIT-16] A quarter of them."""
        kernel = FakeKernel(sbus.Limits(max_clients=8))
        others = [kernel.connect(uid=uid) for uid in range(1, 8)]
        assert [peer.wire.closed for peer in others] == [False] * 6 + [True]
        assert not kernel.connect(uid=0).wire.closed
        assert not kernel.connect(uid=OWNER).wire.closed
        assert kernel.connect(uid=0).wire.closed

    def test_only_allowed_users(self) -> None:
        """[CONN-2] Others are closed at once."""
        kernel = FakeKernel(allowed_uids={OWNER, 7})
        assert kernel.connect(uid=8).wire.closed
        assert kernel.connect(uid=0).wire.closed
        assert not kernel.connect(uid=7).wire.closed
        assert not kernel.connect(uid=OWNER).wire.closed

    def test_close_after_last(self) -> None:
        """[RUN-11] When the last client has gone, not before the first."""
        kernel = FakeKernel(close_after_last=True)
        kernel.wait(10)
        assert not kernel.server.stopping
        one, two = kernel.connect(), kernel.connect()
        one.close()
        assert not kernel.server.stopping
        two.close()
        assert kernel.server.stopping

    def test_client_that_is_closed_in_its_own_batch(
        self, kernel: FakeKernel
    ) -> None:
        """[CONN-12] Events of a closed client are of no effect."""
        sender, reader, witness = (kernel.connect() for _ in range(3))
        witness.send(b"SUB late")
        reader.wire.incoming.append(publish(b"late"))
        sender.wire.incoming.append(publish(b"k"))
        handle = kernel.bus.handle

        def close_reader(*arguments: Any) -> None:
            handle(*arguments)
            kernel.bus.handle = handle  # type: ignore[method-assign]
            kernel.server.disconnect(reader.client, "test")

        kernel.bus.handle = close_reader  # type: ignore
        kernel.run()
        assert reader.wire.closed
        assert witness.read() == []

    def test_idle_loop_sleeps(self, kernel: FakeKernel) -> None:
        """[CONN-3] Nothing to do means no timeout at all."""
        kernel.connect()
        kernel.server.round()
        assert kernel.selector.timeouts[-1] is None

    def test_stop_delivers_what_was_read(self, kernel: FakeKernel) -> None:
        """[RUN-12] And reads nothing more."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(4))
        reader.wire.room = None
        kernel.listener.failures.append(OSError(errno.EMFILE, "none"))
        sender.wire.incoming.append(publish(b"k", b"not read"))
        kernel.server.stop()
        kernel.server.run()
        assert list(reader.wire.taken) == publications(4)
        assert reader.wire.closed and sender.wire.closed
        assert kernel.listener.closed
        assert not kernel.selector.keys

    def test_stop_does_not_wait_for_ever(self, kernel: FakeKernel) -> None:
        """[RUN-12] For up to a second."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.wire.room = 2
        reader.send(b"SUB k")
        sender.send(*publications(4))
        select = kernel.selector.select

        def passing(timeout: float | None = None) -> object:
            assert timeout is not None and timeout <= 1
            kernel.now += 0.3
            return select(timeout)

        kernel.selector.select = passing  # type: ignore
        kernel.server.stop()
        kernel.server.run()
        assert reader.wire.closed
        assert 1 <= kernel.now < 2


class TestCauseLog:
    def test_one_line_names_client_and_rule(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Who, and which rule."""
        kernel.connect(uid=7, pid=9).send(b"HELLO\x1b[31m")
        assert caplog.messages == [
            "disconnect client=1 uid=7 pid=9 [PKT-2] unknown packet kind"
            " b'HELLO\\x1b[31m'"
        ]

    @pytest.mark.parametrize(
        ("limit", "line"),
        [
            ("max_packet", "[LIMIT-1] 70 bytes of a packet, over 60"),
            ("max_key", "[LIMIT-4] publish key over 60 bytes"),
            (
                "max_segments",
                "[LIMIT-17] 61 segments of a key or pattern, over 60",
            ),
            ("max_patterns", "[LIMIT-5] 61 patterns of a client, over 60"),
            (
                "max_pattern_bytes",
                "[LIMIT-6] 66 bytes of patterns of a client, over 60",
            ),
            (
                "max_user_patterns",
                "[LIMIT-12] 61 patterns of a user, over 60",
            ),
            (
                "max_user_pattern_bytes",
                "[LIMIT-13] 66 bytes of patterns of a user, over 60",
            ),
            (
                "max_shapes",
                "[LIMIT-10] 61 shapes of patterns of a user, over 60",
            ),
        ],
    )
    def test_limit_is_named(
        self, limit: str, line: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] What was broken, and what would have been right."""
        kernel = FakeKernel(sbus.Limits()._replace(**{limit: 60}))
        peer = kernel.connect(uid=7, pid=9)
        if line.startswith(("[LIMIT-1]", "[LIMIT-4]")):
            peer.send(publish(bytes(65).replace(b"\0", b"k")))
        else:
            peer.send(*(b"SUB " + b"/" * n for n in range(1, 62)))
        assert caplog.messages == [f"disconnect client=1 uid=7 pid=9 {line}"]

    @pytest.mark.parametrize(
        ("limit", "line"),
        [
            ("max_backlog", "over 1000 bytes of backlog"),
            (
                "max_user_backlog",
                "over 1000 bytes of backlog of the user",
            ),
            (
                "max_bus_backlog",
                "over 750 bytes of backlog of the bus",
            ),
        ],
    )
    def test_limit_of_a_backlog_is_named(
        self, limit: str, line: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] The one that was reached first."""
        kernel = FakeKernel(sbus.Limits()._replace(**{limit: 1_000}))
        peer = kernel.connect(uid=7, pid=9)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/hard/error")
        kernel.connect().send(*publications(20))
        lost = 5 if limit == "max_bus_backlog" else 7
        assert caplog.messages == [
            f"disconnect client=1 uid=7 pid=9 [BLOCK-11] {line},"
            f" backlog of {lost} packets lost"
        ]

    def test_departures_are_not_logged(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Only disconnections for cause are."""
        kernel.connect().close()
        assert not caplog.messages

    def test_lines_are_limited_by_rule_and_user(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] One a second, with a count of the others."""
        for _ in range(100):
            kernel.connect(uid=7).send(b"HELLO")
        assert len(caplog.messages) == 1
        kernel.connect(uid=8).send(b"HELLO")
        kernel.connect(uid=7).send(b"SUB !")
        assert len(caplog.messages) == 3
        kernel.wait(1.1)
        kernel.connect(uid=7).send(b"HELLO")
        assert caplog.messages[-1].endswith(" (99 more)")

    def test_lines_are_limited_by_rule(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] Ten a second, however many users there are."""
        for uid in range(1, 31):
            kernel.connect(uid=uid).send(b"HELLO")
            kernel.wait(1 / 64)
        assert len(caplog.messages) == 10
        kernel.now = 1.0  # a second after the first of them
        kernel.connect(uid=31).send(b"HELLO")
        kernel.connect(uid=32).send(b"HELLO")
        assert len(caplog.messages) == 11
        kernel.connect(uid=1).send(b"HELLO")  # a second after its own
        kernel.wait(1 / 64)
        kernel.connect(uid=1).send(b"HELLO")
        assert caplog.messages[-1].startswith("disconnect client=34 uid=1 ")
        assert caplog.messages[-1].endswith(" (1 more)")

    def test_memory_of_causes(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] It is bounded, and no count is lost."""
        count = sbus.CAUSES_MAX + 10
        for uid in range(count):
            kernel.server._causes.write("PKT-2", uid, "line")
        assert len(kernel.server._causes._causes) < count
        kernel.server._causes.close()
        told = [re.search(r"\((\d+) more\)", one) for one in caplog.messages]
        assert sum(int(match[1]) for match in told if match) == count - 10

    @pytest.mark.parametrize(
        ("error", "what"),
        [
            (OSError(errno.EIO, "odd"), "[CONN-12] [Errno 5] odd"),
            (MemoryError(), "[CONN-12] there is no memory for it"),
        ],
    )
    def test_errors_have_a_rule(
        self,
        kernel: FakeKernel,
        error: Exception,
        what: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """[CONN-12] [CONN-13] Those of the system as well."""

        def fail(*_: object) -> int:
            raise error

        reading, writing = (kernel.connect(uid=7, pid=pid) for pid in (8, 9))
        writing.send(b"SUB k")
        writing.wire.send = fail  # type: ignore[method-assign]
        kernel.connect().send(publish(b"k"))
        kernel.wait(1)
        reading.wire.recv_into = fail  # type: ignore[method-assign]
        reading.send(b"x")
        assert caplog.messages == [
            f"disconnect client=2 uid=7 pid=9 {what}",
            f"disconnect client=1 uid=7 pid=8 {what}",
        ]

    def test_long_key_of_a_large_packet(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] [LIMIT-4] It is the key that is wrong, not the packet."""
        packets = [b"MSG " + b"k" * 20_000, publish(b"k" * 20_000)]
        packets += [b"CMSG " + b"k" * 20_000, b"UNSUB " + b"k" * 20_000]
        for uid, packet in enumerate(packets):
            kernel.connect(uid=uid).send(packet)
        kinds = ("publish", "publish", "control", "unsubscribe")
        assert [line.partition("[")[2] for line in caplog.messages] == [
            f"LIMIT-4] {kind} key over 4096 bytes" for kind in kinds
        ]

    def test_lines_left_out_are_counted_at_the_end(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-13] No count is lost."""
        for _ in range(3):
            kernel.connect(uid=7).send(b"HELLO")
        kernel.server.stop()
        kernel.server.run()
        assert caplog.messages[-1] == "[PKT-2] (2 more)"

    def test_first_discarded_packet_is_logged(
        self, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[BLOCK-20] The first of each client."""
        peer = kernel.connect(uid=7, pid=9)
        peer.wire.room = 0
        peer.send(b"SUB k", b"CMSG blocking/soft/discard")
        kernel.connect().send(*publications(200))
        kernel.wait(2)
        kernel.connect().send(*publications(200))
        assert len(caplog.messages) == 1
        assert "client=1 uid=7 pid=9 [BLOCK-20]" in caplog.messages[0]

    def test_refused_users_are_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """[CONN-2] [CONN-13] With the rule."""
        FakeKernel(allowed_uids={1}).connect(uid=2, pid=3)
        assert caplog.messages == [
            "refuse uid=2 pid=3 [CONN-2] not a user of this bus"
        ]


# =============================================================================
# 1. What the limits add up to
# =============================================================================


class TestMemoryBound:
    """What Limits.memory_bytes_max says, term by term, for the worst case."""

    NOTHING = sbus.Limits(
        max_packet=1,
        max_segments=1,
        max_patterns=0,
        max_pattern_bytes=0,
        max_backlog=0,
        max_clients=0,
        max_bus_backlog=0,
    )

    def term(self, **limits: int) -> int:
        """Return what some limits add to the bound."""
        least = self.NOTHING._replace(max_clients="max_clients" in limits)
        bound = least._replace(**limits).memory_bytes_max()
        return bound - least._replace(max_clients=0).memory_bytes_max()

    def used(self, work: Callable[[], object]) -> int:
        """Return how much memory is used after some work."""
        gc.collect()
        tracemalloc.start()
        kept = work()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
        return size

    def bus(self) -> tuple[sbus.Bus, sbus.Client]:
        """Return a bus without limits, and a client."""
        huge = dict.fromkeys(sbus.LIMITS, 1 << 60)
        bus = sbus.Bus(sbus.Limits(**huge), OWNER)
        return bus, bus.open(sbus.Credentials(100, 1000, 4242), None)

    def test_clients(self) -> None:
        """[LIMIT-7] Each of a user of its own."""
        bus, _ = self.bus()

        def work() -> None:
            for uid in range(2_000, 3_000):
                bus.open(sbus.Credentials(100, uid, 100_000 + uid), None)

        assert self.used(work) <= self.term(max_clients=1_000)

    @pytest.mark.parametrize(
        "form",
        [
            "{:04}",
            "{:04}/*/",
            "!/cred////{:04}",
            "{:04}*b",
            "!/cred////" + "x" * 4_000 + "{:04}",
        ],
    )
    def test_patterns(self, form: str) -> None:
        """[LIMIT-5] [LIMIT-6] Of one shape, with their bytes."""
        bus, client = self.bus()
        texts = [form.format(number).encode() for number in range(1_000)]

        def work() -> None:
            for text in texts:
                bus.subscribe(client, bytes(bytearray(text)))

        size = sum(map(len, texts))
        limits = {"max_patterns": 1_000, "max_pattern_bytes": size}
        assert self.used(work) <= self.term(max_clients=1, **limits)

    def test_shapes(self) -> None:
        """[LIMIT-10] [LIMIT-17] Each pattern of the largest shape."""
        bus, client = self.bus()
        texts = [
            b"x" * (n % 16) + b"*/" + b"x" * (n // 16) for n in range(256)
        ]

        def work() -> None:
            for text in texts:
                bus.subscribe(client, text + b"*/" * 63)

        size = sum(map(len, texts)) + 256 * 126
        limits = {"max_patterns": 256, "max_pattern_bytes": size}
        limits |= {"max_segments": 64, "max_shapes": 256}
        assert self.used(work) <= self.term(max_clients=1, **limits)

    @pytest.mark.parametrize("size", [7, 300, 5_000])
    @pytest.mark.parametrize("orders", [["queue"], ["random", "stack"]])
    def test_backlogs(self, size: int, orders: list[str]) -> None:
        """[BLOCK-19] [LIMIT-15] Also when they were in every order."""
        backlog = sbus.Backlog()

        def work() -> None:
            for number in range(5_000):
                backlog.push(bytes(size + number % 2))
            for order in [*orders, "random", "queue"]:
                backlog.reorder(order)
                backlog.first()

        used = self.used(work)
        assert used <= self.term(max_bus_backlog=backlog.bytes)

    def test_recent_keys(self) -> None:
        """[LIMIT-4] Long ones, with many receivers."""
        bus, client = self.bus()
        for uid in range(sbus.RECENT_RECEIVERS_MAX):
            holder = bus.open(sbus.Credentials(100, uid, 1), None)
            bus.subscribe(holder, b"")

        def work() -> None:
            for number in range(sbus.RECENT_KEYS_MAX):
                key = b"%09d/" % number * 25
                bus.handle(client, b"", publish(key))
                for receiver in bus.touched:
                    receiver.outbox = []
                bus.touched.clear()

        assert self.used(work) <= self.NOTHING.memory_bytes_max()


# =============================================================================
# 7. Connections, on real sockets
# =============================================================================


class TestRealSockets:
    @pytest.fixture
    def bus(self, directory: Path) -> Iterator[RealBus]:
        with RealBus(directory, "-go") as bus:
            yield bus

    def test_messages_travel(self, bus: RealBus) -> None:
        """[CONN-1] [PUB-1] [PKT-1] One packet is one message."""
        with bus.clients(2) as (one, two):
            one.send(b"SUB a/*")
            one.fence()
            two.send(publish(b"a/b", b"1"), publish(b"a/b", b"2"))
            two.fence()
            expected = [publish(b"a/b", b"1"), publish(b"a/b", b"2")]
            assert one.fence() == expected

    def test_credentials_are_those_of_connect(self, bus: RealBus) -> None:
        """[CRED-1] [CRED-2] As the kernel says."""
        with bus.connect() as peer:
            own = f"!/cred/{os.getegid()}/{os.geteuid()}/{os.getpid()}"
            assert peer.path == own.encode()

    @pytest.mark.parametrize("unread", [False, True])
    def test_one_shot_publishers_lose_nothing(
        self, bus: RealBus, unread: bool
    ) -> None:
        """[CONN-6] 200 of 200, also when they leave input unread."""
        with bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            for packet in publications(200):
                with bus.connect() as sender:
                    if unread:
                        sender.send(b"SUB ", WHOAMI, publish(b"other"))
                    sender.send(packet)
            heard: set[bytes] = set()
            while len(heard) < 200:
                heard.add(reader.receive())
            assert heard == set(publications(200))

    def test_killed_publisher_loses_nothing(self, bus: RealBus) -> None:
        """[CONN-6] What the kernel took before a kill -9 is delivered."""
        with bus.connect() as reader:
            reader.send(b"SUB k")
            reader.fence()
            bus.process.send_signal(signal.SIGSTOP)

            def publish_and_die() -> None:
                bus.connect().send(*publications(100))
                os.kill(os.getpid(), signal.SIGKILL)

            with child_process(publish_and_die) as child:
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            bus.process.send_signal(signal.SIGCONT)
            assert [reader.receive() for _ in range(100)] == publications(100)

    def test_publishers_killed_while_they_publish(self, bus: RealBus) -> None:
        """[CONN-6] No message of theirs is missing before the last."""
        descriptors = Path(f"/proc/{bus.process.pid}/fd")
        before = len(list(descriptors.iterdir()))

        def publish_on(key: bytes) -> None:
            peer = bus.connect()
            for number in itertools.count():
                peer.send(publish(key, b"%d" % number))

        for length in range(0, 400, 20):
            key = b"k%d" % length
            with bus.connect() as reader:
                reader.send(b"SUB " + key, b"CMSG blocking/soft/block")
                reader.fence()
                with child_process(functools.partial(publish_on, key)):
                    heard = [reader.receive() for _ in range(length)]
                assert heard == publications(length, key)
                rest = reader.fence()
                assert rest == publications(length + len(rest), key)[length:]
        wait_for(lambda: len(list(descriptors.iterdir())) <= before)

    def test_full_size_packet(self, bus: RealBus) -> None:
        """[LIMIT-3] [CONN-4] Exactly 409,600 bytes pass, one more does not."""
        packet = publish(b"k", os.urandom(409_594))
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.wire.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18
            )
            sender.send(packet)
            assert reader.receive() == packet
            sender.send(packet + b"x")
            assert sender.is_disconnected()
            assert reader.fence() == []
        bus.wait_for_log("[LIMIT-1] 409601 bytes of a packet")

    @pytest.mark.parametrize("size", [1 << 12, 1 << 17, 212_960, 1 << 18])
    def test_sizes_at_which_the_kernel_behaves_otherwise(
        self, bus: RealBus, size: int
    ) -> None:
        """[PUB-4] [CONN-4] One less, and one more."""
        with bus.clients(3) as (one, two, sender):
            for reader in (one, two):
                reader.send(b"SUB k")
                reader.fence()
            sender.wire.setsockopt(*LARGE_BUFFER)
            for difference in (-1, 0, 1):
                payload = os.urandom(size + difference - 6)
                packet = publish(b"k", payload)
                sender.send(packet)
                assert one.receive() == two.receive() == packet

    def test_full_size_packet_to_a_stalled_reader(self, bus: RealBus) -> None:
        """[LIMIT-3] [BLOCK-4] A queued packet is whole as well."""
        packets = [publish(b"k", os.urandom(400_000)) for _ in range(10)]
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k")
            reader.fence()
            sender.wire.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18
            )
            sender.send(*packets)
            sender.fence()
            assert [reader.receive() for _ in packets] == packets

    def test_stopped_reader_delays_nobody(self, bus: RealBus) -> None:
        """[BLOCK-4] [BLOCK-12] Others hear all while one hears nothing."""
        with bus.clients(3) as (deaf, reader, sender):
            deaf.send(b"SUB k")
            deaf.fence()
            reader.send(b"SUB ")
            reader.fence()
            for packet in publications(5000):
                sender.send(packet)
                assert reader.receive() == packet
            assert deaf.fence() == publications(5000)

    def test_soft_block_pauses_one_publisher(self, bus: RealBus) -> None:
        """[BLOCK-7] [BLOCK-12] [PUB-6] Nothing is lost, others go on."""
        with bus.clients(3) as (slow, sender, other):
            slow.send(b"SUB k", b"CMSG blocking/soft/block")
            slow.fence()
            sent = fill(sender)
            assert other.fence() == []
            heard = [slow.receive() for _ in range(sent)]
            assert heard == publications(sent)
            assert sender.fence() == []

    def test_soft_discard_hears_again_after_one_read(
        self, bus: RealBus
    ) -> None:
        """[BLOCK-6] The kernel takes one for each that is read."""
        with bus.clients(2) as (reader, sender):
            reader.send(b"SUB k", b"CMSG blocking/soft/discard")
            reader.fence()
            for packet in publications(3000):
                sender.send(packet)
            sender.fence()
            assert reader.receive() == publish(b"k", b"0")
            sender.send(publish(b"k", b"new"))
            sender.fence()
            reader.send(WHOAMI)
            heard = list(iter(reader.receive, publish(b"k", b"new")))
            assert heard == publications(len(heard) + 1)[1:]
        bus.wait_for_log("[BLOCK-20]")

    def test_half_closed_client(self, bus: RealBus) -> None:
        """[CONN-10] The end of input is a departure."""
        with bus.connect() as peer:
            peer.send(b"SUB k", publish(b"k"))
            peer.wire.shutdown(socket.SHUT_WR)
            assert peer.receive_all() == [publish(b"k")]

    def test_deaf_client_still_speaks(self, bus: RealBus) -> None:
        """[CONN-8] Its packets are handled to the last."""
        with bus.clients(2) as (reader, deaf):
            reader.send(b"SUB k")
            reader.fence()
            deaf.send(b"SUB ")
            deaf.fence()
            deaf.wire.shutdown(socket.SHUT_RD)
            deaf.send(*publications(3))
            assert [reader.receive() for _ in range(3)] == publications(3)

    def test_empty_packet(self, bus: RealBus) -> None:
        """[PKT-4] Its sender is disconnected for cause."""
        with bus.clients(2) as (peer, witness):
            witness.send(b"SUB ")
            witness.fence()
            peer.send(publish(b"k"), b"")
            assert peer.is_disconnected()
            assert witness.fence() == [publish(b"k")]
        bus.wait_for_log("[PKT-4] empty packet")

    def test_descriptors_are_not_received(self, bus: RealBus) -> None:
        """[CONN-7] Where the kernel passes them, it closes them as well."""
        descriptors = Path(f"/proc/{bus.process.pid}/fd")
        with bus.connect() as peer, open(os.devnull) as file:
            peer.send(b"SUB k")
            peer.fence()
            before = len(list(descriptors.iterdir()))
            for _ in range(10):
                right = struct.pack("i", file.fileno())
                ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, right)
                try:
                    peer.wire.sendmsg([publish(b"k")], [ancillary])
                except PermissionError:  # since Linux 6.16
                    peer.send(publish(b"k"))
            assert peer.fence() == [publish(b"k")] * 10
            assert len(list(descriptors.iterdir())) == before

    def test_closing_clients_in_one_batch(self, bus: RealBus) -> None:
        """[CONN-12] Clients that die while a message is on its way."""
        with bus.connect() as witness:
            for _ in range(20):
                peers = [bus.connect() for _ in range(10)]
                for peer in peers:
                    peer.send(b"SUB ")
                    peer.fence()
                bus.process.send_signal(signal.SIGSTOP)
                for peer in peers:
                    peer.send(publish(b"k"))
                    peer.wire.shutdown(socket.SHUT_RD)
                    peer.wire.close()
                bus.process.send_signal(signal.SIGCONT)
            assert witness.fence() == []

    def test_polite_client_beside_flooders(self, bus: RealBus) -> None:
        """[CONN-5] [CONN-12] It is answered while others send all the time."""
        with contextlib.ExitStack() as flooders, bus.connect() as polite:
            for _ in range(3):
                flooders.enter_context(child_process(lambda: flood(bus)))
            for _ in range(50):
                assert polite.fence() == []

    def test_no_descriptor_is_left(self, directory: Path) -> None:
        """[CONN-3] No spinning; established clients go on; others later."""
        with RealBus(directory) as bus:
            few = (40, 40)  # fewer than at the start
            resource.prlimit(bus.process.pid, resource.RLIMIT_NOFILE, few)
            with bus.connect() as first:
                first.send(b"SUB k")
                peers = [bus.connect() for _ in range(80)]
                bus.wait_for_log("[CONN-3]")
                before = cpu_seconds(bus.process.pid)
                for packet in publications(200):
                    first.send(packet)
                    assert first.receive() == packet
                for peer in peers[:60]:
                    peer.wire.close()
                assert peers[-1].fence() == []
                assert cpu_seconds(bus.process.pid) - before < 1
                for peer in peers:
                    peer.wire.close()
            assert bus.log().count("[CONN-3]") < 10

    def test_ten_thousand_clients(self, directory: Path) -> None:
        """[LIMIT-7] As many as the descriptors of this machine allow."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = min(10_000, hard - 200)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            with RealBus(directory) as bus:
                peers = [bus.connect() for _ in range(count)]
                for peer in peers:
                    peer.send(b"SUB all")
                for peer in peers:
                    peer.fence()
                peers[0].send(publish(b"all", b"hello"))
                for peer in peers:
                    assert peer.receive() == publish(b"all", b"hello")
                for peer in peers:
                    peer.wire.close()
                with bus.connect() as late:
                    late.send(b"SUB all", publish(b"all"))
                    assert late.fence() == [publish(b"all")]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_limit_of_clients(self, directory: Path) -> None:
        """[LIMIT-7] [CONN-12] One too many is closed at once."""
        with (
            RealBus(directory, "--max-clients", "1") as bus,
            bus.clients(2) as (one, two),
        ):
            assert two.is_disconnected()
            assert one.fence() == []

    @needs_root
    def test_secrets_of_three_users(self, bus: RealBus) -> None:
        """[CRED-1] [CRED-4] [CRED-10] Each reads its own and no other's."""
        users = [bus.connect(uid, gid) for uid, gid in ((7, 70), (8, 80))]
        users.append(bus.connect())
        for peer in users:
            peer.send(b"SUB ", b"SUB */", b"SUB " + peer.path + b"/")
        for sender, owner in itertools.product(users, users):
            packet = publish(owner.path + b"/x", b"secret")
            sender.send(packet)
            sender.fence()
            for peer in users:
                expected = [packet] if peer is owner else []
                if peer is not sender:
                    assert peer.fence() == expected
        for peer in users[:-1]:
            peer.send(b"SUB " + users[-1].path + b"/")
        for peer in users:
            peer.wire.close()

    @needs_root
    def test_foreign_secret_disconnects(self, bus: RealBus) -> None:
        """[CRED-4] Root may not either."""
        with bus.connect(7, 7) as user, bus.connect() as root:
            secret_pattern = user.path + b"/x"
            root.send(b"SUB " + secret_pattern)
            assert root.is_disconnected()
        bus.wait_for_log("[CRED-4]")

    @needs_root
    def test_no_user_holds_up_another(self, bus: RealBus) -> None:
        """[BLOCK-13] [BLOCK-14] Soft block of a stranger is queue."""
        with bus.connect(7, 7) as slow, bus.connect(8, 8) as sender:
            slow.send(b"SUB k", b"CMSG blocking/soft/block")
            slow.fence()
            sender.send(*publications(3000))
            assert sender.fence() == []
            assert slow.fence() == publications(3000)


def no_room(*_: object) -> object:
    """Fail as a selector does that can watch no more."""
    raise OSError(errno.ENOSPC, "no room to watch")


def fill(sender: Peer) -> int:
    """Publish until the kernel refuses; return how often.

    While the server reads, it takes one after a while; once it has paused
    the sender, it takes none.
    """
    timeout = struct.pack("ll", 0, 300_000)
    sender.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    for count, packet in enumerate(publications(100_000)):
        try:
            sender.send(packet)
        except BlockingIOError:
            return count
    raise AssertionError("the sender was never paused")


def flood(bus: RealBus) -> None:
    """Publish until killed."""
    peer = bus.connect()
    while True:
        peer.send(publish(b"flood", bytes(100)))


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
