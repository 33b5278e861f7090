"""Tests to read: what each chapter of the specification says, tried.

Every example of spec/ is run on a fake kernel, where what cannot be seen on a
real one can be, and on real sockets.  The tests after them follow the
chapters.  tests/ has the rest.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

import sbus
from conformance.examples import Block
from conformance.kit import Kit, Result, all_cases
from conformance.report import count, failure_lines
from conformance.server import ServerProcess
from fake_bus import cases_of, each_block, run_on_fake_kernel
from fake_kernel import OWNER, FakeKernel, FakePeer, cost
from packets import ANSWER_HEAD, WHOAMI, publications, publish
from processes import SBUSD, SECONDS_MAX, naive

OURS = shlex.join([*SBUSD, "-f", "-a", "{address}"])


def explain(results: Sequence[Result]) -> str:
    """Return the failures among some results."""
    lines: list[str] = []
    for result in results:
        if result.verdict == "failed":
            lines += ["", *failure_lines(result)]
    return "\n".join(lines)


class TestExamples:
    @each_block
    def test_on_a_fake_kernel(self, block: Block) -> None:
        """The server does what the example says."""
        results = [run_on_fake_kernel(case) for case in cases_of(block)]
        assert results and not explain(results), explain(results)

    @pytest.mark.timeout(600)  # a hundred servers, one after the other
    def test_on_real_sockets(self) -> None:
        """So it does as a process of its own."""
        with ServerProcess(OURS, SECONDS_MAX) as server:
            kit = Kit(server, "daemon", math.inf)
            results = [*map(kit.judge, all_cases())]
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1150

    def test_on_the_server_that_is_named(self) -> None:
        """So does any other server, where the original protocol asks it."""
        command = os.environ.get("SBUS_SERVER", naive())
        with ServerProcess(command, SECONDS_MAX / 2) as server:
            kit = Kit(server, "protocol", math.inf)
            results = [*map(kit.judge, all_cases())]
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1000


# ==== 2. Routing keys


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
    def test_every_byte_but_nul_is_ordinary(self, kernel: FakeKernel) -> None:
        """[KEY-1] Keys have no character set."""
        peer = kernel.connect()
        key = bytes(set(range(1, 256)) - set(b"*/!"))
        peer.send(b"SUB " + key, publish(key), publish(key[:-1]))
        assert peer.read() == [publish(key)]

    def test_agrees_with_regular_expressions(self) -> None:
        """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-6] If short."""
        texts = list(every_text(b"a/*", 4))
        for pattern in texts:
            expression = as_expression(pattern)
            for key in texts:
                expected = bool(expression.fullmatch(key))
                is_match = sbus.pattern_matches(pattern, key)
                assert is_match is expected, (pattern, key)

    def test_star_in_a_key_is_ordinary(self, kernel: FakeKernel) -> None:
        """[MATCH-1] A publisher cannot widen its audience."""
        star, exact = kernel.connect(), kernel.connect()
        star.send(b"SUB a/*")
        exact.send(b"SUB a/b")
        kernel.connect().send(publish(b"a/*"))
        assert star.read() == [publish(b"a/*")]
        assert exact.read() == []

    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB ", b"MSG "])
    @pytest.mark.parametrize(
        "key", [b"!", b"!/x", b"a/!", b"a/!/b", b"x/!/cred/1/2/3/"]
    )
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
        """[KEY-4] '!' beside another byte has no meaning."""
        peer = kernel.connect()
        peer.send(b"SUB " + key, publish(key), b"UNSUB " + key, publish(key))
        assert peer.read() == [publish(key)]


# ==== 3. Protocol


class TestSubscribe:
    def test_pattern_is_stored(self, kernel: FakeKernel) -> None:
        """[SUB-1] [PUB-1] [PUB-3] The client hears what it selected."""
        peer = kernel.connect()
        peer.send(b"SUB a/*", publish(b"a/b"), publish(b"b"))
        assert peer.read() == [publish(b"a/b")]

    def test_text_after_nul_is_ignored(self, kernel: FakeKernel) -> None:
        """[SUB-3] The pattern ends at the first NUL byte."""
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

    def test_spellings_of_a_pattern(self, kernel: FakeKernel) -> None:
        """[MATCH-2] [UNSUB-1] `**` selects as `*` does, and is another."""
        peer = kernel.connect()
        peer.send(b"SUB k*", b"SUB k**", b"UNSUB k*", publish(b"k1"))
        peer.send(b"UNSUB k*", publish(b"k2"), b"UNSUB k**", publish(b"k3"))
        assert peer.read() == [publish(b"k1"), publish(b"k2")]

    def test_pattern_that_matches_nothing(self) -> None:
        """[MATCH-6] [UNSUB-1] It is stored, and can be removed once."""
        peer = FakeKernel(strict=True).connect()
        peer.send(b"SUB a*b", publish(b"a*b"), b"UNSUB a*b", WHOAMI)
        assert peer.read()[0].startswith(ANSWER_HEAD)
        peer.send(b"UNSUB a*b")
        assert peer.wire.closed


class TestPublish:
    def test_one_copy_for_each_client(self, kernel: FakeKernel) -> None:
        """[PUB-2] However many of its patterns match."""
        peer = kernel.connect()
        peer.send(b"SUB ", b"SUB a/", b"SUB a/*", b"SUB a/b", b"SUB a/b")
        peer.send(publish(b"a/b"))
        assert peer.read() == [publish(b"a/b")]

    def test_order_of_one_publisher(self, kernel: FakeKernel) -> None:
        """[PUB-6] [PKT-5] Also over many turns, and while stalled."""
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

    def test_many_receivers(self, kernel: FakeKernel) -> None:
        """[PUB-1] Also more than the server remembers for a key."""
        many = sbus.RECENT_BYTES_MAX // 8 + 2
        peers = [kernel.connect() for _ in range(many)]
        for peer in peers:
            peer.send(b"SUB k")
        for _ in range(2):
            peers[0].send(publish(b"k"))
            assert all(peer.read() == [publish(b"k")] for peer in peers)


class TestControl:
    def test_control_packets_are_not_forwarded(
        self, kernel: FakeKernel
    ) -> None:
        """[CTL-1] [CTL-2] Unknown ones are ignored."""
        peer, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ", b"SUB news")
        peer.send(b"CMSG news\0x", b"CMSG ", b"CMSG !", b"CMSG blocking/soft")
        assert witness.read() == peer.read() == []
        assert not peer.wire.closed

    def test_answers_need_no_subscription(self, kernel: FakeKernel) -> None:
        """[CTL-3] [CRED-2] Nobody else hears them."""
        peer, witness = kernel.connect(gid=1, uid=2, pid=3), kernel.connect()
        witness.send(b"SUB ")
        peer.send(WHOAMI + b"\0please")
        assert peer.read() == [ANSWER_HEAD + b"!/cred/1/2/3"]
        assert witness.read() == []


# ==== 4. Secret messages


def secret(*fields: object, rest: str = "x") -> bytes:
    """Return a secret key."""
    return f"!/cred/{'/'.join(map(str, fields))}/{rest}".encode()


class TestSecretMessages:
    def owner(self, kernel: FakeKernel) -> FakePeer:
        """Connect the client whose secrets are tested."""
        return kernel.connect(gid=100, uid=1000, pid=4242)

    def test_own_secret_arrives(self, kernel: FakeKernel) -> None:
        """[CRED-4] [CRED-10] From anybody, at its owner alone."""
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
        """[CRED-10] Not even one's own."""
        owner, other = self.owner(kernel), kernel.connect()
        for peer in (owner, other):
            peer.send(b"SUB " + pattern)
        other.send(publish(secret(100, 1000, 4242)))
        other.send(publish(secret("", "", "")))
        assert owner.read() == other.read() == []
        assert not owner.wire.closed

    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB "])
    @pytest.mark.parametrize(
        "pattern",
        [
            secret(101, 1000, 4242),
            secret(100, 1001, 4242),
            secret(100, 1000, 4243),
            secret("", 1001, ""),
            secret("0100", 1000, 4242),
            secret("*", 1000, 4242),
            secret(100, 1000, "4*"),
            secret("+100", 1000, 4242),
            secret(100, 1000, "9" * 400),
            secret("\u0661\u0660\u0660", 1000, 4242),
            b"!/cred/",
            b"!/cred/100/1000",
            b"!/cred/100/1000/4242",
            b"!/cred///",
            b"!/cred/*",
        ],
    )
    def test_pattern_that_is_not_ones_own_disconnects(
        self, kernel: FakeKernel, pattern: bytes, word: bytes
    ) -> None:
        """[CRED-4] [CRED-7] [KEY-4] One wrong field is enough."""
        owner = self.owner(kernel)
        owner.send(word + pattern)
        assert owner.wire.closed

    def test_empty_fields_are_ones_own(self, kernel: FakeKernel) -> None:
        """[CRED-6] They match the own number and the empty field."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret("", "", ""))
        every = itertools.product((100, ""), (1000, ""), (4242, ""))
        own = [publish(secret(*fields)) for fields in every]
        others = ((101, 1000, 4242), ("", 1, ""), ("", "", 1))
        foreign = [publish(secret(*fields)) for fields in others]
        sender.send(*own, *foreign)
        assert owner.read() == own

    def test_wildcards_after_the_fields(self, kernel: FakeKernel) -> None:
        """[CRED-10] The rest is a pattern."""
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(b"SUB " + secret(100, 1000, 4242, rest="a/*"))
        key = secret(100, 1000, 4242, rest="a/b")
        sender.send(publish(key), publish(secret(100, 1000, 4243, rest="a/b")))
        assert owner.read() == [publish(key)]

    def test_the_text_that_was_subscribed(self, kernel: FakeKernel) -> None:
        """[UNSUB-1] [CRED-6] Another spelling removes another pattern."""
        owner, sender = self.owner(kernel), kernel.connect()
        key = secret(100, 1000, 4242)
        owner.send(b"SUB " + secret("", "", ""), b"UNSUB " + key)
        sender.send(publish(key))
        assert owner.read() == [publish(key)]
        owner.send(b"UNSUB " + secret("", "", ""))
        sender.send(publish(key))
        assert owner.read() == []

    @pytest.mark.parametrize("rest", ["!/cred/7/8/9/x", "a/!/cred/7/8/9/x"])
    def test_the_rest_may_hold_a_secret(
        self, kernel: FakeKernel, rest: str
    ) -> None:
        """[KEY-4] [CRED-10] Of a process behind another server, or so."""
        owner, sender = self.owner(kernel), kernel.connect()
        key = secret(100, 1000, 4242, rest=rest)
        owner.send(b"SUB " + key)
        sender.send(publish(key))
        assert owner.read() == [publish(key)]
        owner.send(b"SUB " + key + b"/!/b")
        assert owner.wire.closed

    @pytest.mark.parametrize(
        "numbers", [(100, 1000, 0), (65_534, 1, 2), (1, 65_534, 2)]
    )
    def test_nobody_in_particular_has_no_secrets(
        self, kernel: FakeKernel, numbers: tuple[int, int, int]
    ) -> None:
        """[CRED-8] But may ask who it is."""
        gid, uid, pid = numbers
        peer = kernel.connect(gid=gid, uid=uid, pid=pid)
        peer.send(WHOAMI)
        assert peer.read() == [ANSWER_HEAD + secret(*numbers, rest="")[:-1]]
        peer.send(b"SUB " + secret(*numbers))
        assert peer.wire.closed

    def test_answer_comes_after_what_was_routed_before(
        self, kernel: FakeKernel
    ) -> None:
        """[CRED-3] [PKT-5] A question fences."""
        owner = self.owner(kernel)
        owner.send(b"SUB k", publish(b"k"), WHOAMI, publish(b"k", b"2"))
        answer = ANSWER_HEAD + b"!/cred/100/1000/4242"
        assert owner.read() == [publish(b"k"), answer, publish(b"k", b"2")]

    def test_prefix(self) -> None:
        """[CRED-2] [CRED-9] It stands before all secret keys."""
        prefix = b"!/cred/7/8/9"
        kernel = FakeKernel("--cred-prefix", prefix.decode())
        owner, sender = self.owner(kernel), kernel.connect()
        owner.send(WHOAMI)
        path = prefix + b"/!/cred/100/1000/4242"
        assert owner.read() == [ANSWER_HEAD + path]
        owner.send(b"SUB " + path + b"/x")
        sender.send(publish(path + b"/x"))
        sender.send(publish(b"!/cred/100/1000/4242/x"))
        assert owner.read() == [publish(path + b"/x")]
        owner.send(b"SUB !/cred/100/1000/4242/x")
        assert owner.wire.closed


# ==== 5. Flood control


def stalled(
    kernel: FakeKernel, *modes: bytes, room: int = 2, uid: int = 1000
) -> FakePeer:
    """Connect a subscriber to `k` that has room for few packets."""
    peer = kernel.connect(uid=uid)
    peer.wire.room = room
    peer.send(b"SUB k", *[b"CMSG " + mode for mode in modes])
    return peer


class TestSoftModes:
    def test_queue(self, kernel: FakeKernel) -> None:
        """[BLOCK-1] [BLOCK-4] [PUB-6] All arrive in order; nobody waits."""
        reader, sender = stalled(kernel), kernel.connect()
        sender.send(*publications(9))
        assert not sender.paused
        assert reader.waiting == cost(7)
        assert reader.read_all() == publications(9)
        assert reader.waiting == 0

    def test_discard(self, kernel: FakeKernel) -> None:
        """[BLOCK-5] Each packet is tried: one read is enough to hear again."""
        reader = stalled(kernel, b"blocking/soft/discard", room=8)
        sender = kernel.connect()
        sender.send(*publications(9))
        assert reader.stats["discarded"] == 1
        assert reader.read(1) == publications(1)
        sender.send(publish(b"k", b"new"))
        assert reader.read()[-1] == publish(b"k", b"new")

    def test_block(self, kernel: FakeKernel) -> None:
        """[BLOCK-7] Until the backlog is empty, not merely smaller."""
        reader = stalled(kernel, b"blocking/soft/block", room=4)
        sender = kernel.connect()
        sender.send(*publications(6))
        assert sender.paused
        sender.post(*publications(8)[6:])
        assert reader.read(1) == [publish(b"k", b"0")]
        assert sender.paused
        assert reader.read_all() == publications(8)[1:]
        assert not sender.paused

    def test_block_pauses_only_the_writer(self, kernel: FakeKernel) -> None:
        """[BLOCK-12] Everybody else goes on."""
        reader = stalled(kernel, b"blocking/soft/block")
        sender, other, witness = (kernel.connect() for _ in range(3))
        witness.send(b"SUB other")
        sender.send(*publications(3))
        other.send(publish(b"other"))
        assert sender.paused
        assert not other.paused and not reader.paused
        assert witness.read() == [publish(b"other")]

    def test_error(self, kernel: FakeKernel) -> None:
        """[BLOCK-8] The stalled client is disconnected, nobody else."""
        reader = stalled(kernel, b"blocking/soft/error")
        witness, sender = kernel.connect(), kernel.connect()
        witness.send(b"SUB k")
        sender.send(*publications(2))
        assert not reader.wire.closed
        sender.send(publish(b"k"))
        assert reader.wire.closed
        assert not sender.wire.closed
        assert len(witness.read()) == 3

    @pytest.mark.parametrize("reader_uid", [0, OWNER, 1000, 1001, 65_534])
    @pytest.mark.parametrize("sender_uid", [0, OWNER, 1000, 65_534])
    def test_which_receivers_pause_a_publisher(
        self, kernel: FakeKernel, reader_uid: int, sender_uid: int
    ) -> None:
        """[BLOCK-13] Its own user's, root's and the bus owner's.

        All that the kernel cannot name share one number, and no user.
        """
        reader = stalled(kernel, b"blocking/soft/block", uid=reader_uid)
        sender = kernel.connect(uid=sender_uid)
        sender.send(*publications(5))
        is_own = reader_uid == sender_uid != 65_534
        assert sender.paused == (is_own or reader_uid in (0, OWNER))
        assert reader.read_all() == publications(5)


class TestHardModes:
    def full(self, mode: bytes, uid: int = 1000) -> tuple[FakePeer, FakePeer]:
        """Fill a subscriber's backlog; return it and its publisher."""
        kernel = FakeKernel(max_backlog=cost(4))
        reader = stalled(kernel, mode, room=1, uid=uid)
        sender = kernel.connect()
        sender.send(*publications(5))
        assert reader.waiting == cost(4)  # the limit itself is no excess
        return reader, sender

    def test_discard(self) -> None:
        """[BLOCK-9] The new packet is lost, not an old one."""
        reader, sender = self.full(b"blocking/hard/discard")
        sender.send(publish(b"k", b"x"))
        assert reader.stats["discarded"] == 1
        assert not sender.paused
        assert reader.read_all() == publications(5)

    def test_block(self) -> None:
        """[BLOCK-10] It is queued; at half the limit its sender goes on."""
        reader, sender = self.full(b"blocking/hard/block")
        assert not sender.paused
        sender.send(publish(b"k", b"5"))
        read: list[bytes] = []
        for packets in (5, 4, 3):
            assert sender.paused and reader.waiting == cost(packets)
            read += reader.read(1)
        assert not sender.paused and reader.waiting == cost(2)
        assert read + reader.read_all() == publications(6)

    def test_answers_are_not_discarded(self) -> None:
        """[BLOCK-17] They wait, and above the limit the client leaves."""
        kernel = FakeKernel()
        reader = stalled(kernel, b"blocking/soft/discard", room=1)
        kernel.connect().send(*publications(1))
        reader.send(WHOAMI)
        *messages, answer = reader.read_all()
        assert messages == publications(1) and answer.startswith(ANSWER_HEAD)
        reader, _ = self.full(b"blocking/hard/discard")
        reader.send(WHOAMI)
        assert reader.wire.closed

    @pytest.mark.parametrize(
        "mode, uid",
        [(b"blocking/hard/error", 1000), (b"blocking/hard/block", 1001)],
    )
    def test_error(self, mode: bytes, uid: int) -> None:
        """[BLOCK-11] [BLOCK-13] As is block if it would hold up another."""
        reader, sender = self.full(mode, uid)
        sender.send(publish(b"k", b"5"))
        assert reader.wire.closed
        assert not sender.wire.closed and not sender.paused

    def test_holder_that_takes_nothing(self, kernel: FakeKernel) -> None:
        """[BLOCK-16] It is disconnected, and its publishers go on."""
        reader = stalled(kernel, b"blocking/soft/block")
        sender = kernel.connect()
        sender.send(*publications(5))
        kernel.wait(4.9)
        assert sender.paused
        kernel.wait(0.2)
        assert reader.wire.closed and not sender.paused


class TestOrders:
    PAYLOADS = (b"1", b"333", b"22", b"44", b"")

    @pytest.mark.parametrize(
        "order, expected",
        [
            (b"queue", (b"1", b"333", b"22", b"44", b"")),
            (b"stack", (b"", b"44", b"22", b"333", b"1")),
            (b"random", (b"333", b"22", b"44", b"1", b"")),
        ],
    )
    def test_order(
        self, kernel: FakeKernel, order: bytes, expected: tuple[bytes, ...]
    ) -> None:
        """[ORDER-1] [ORDER-2] [ORDER-3] Also of what waits already."""
        reader, sender = stalled(kernel, room=1), kernel.connect()
        first, *packets = [publish(b"k", one) for one in (b"", *self.PAYLOADS)]
        sender.send(first, *packets)
        reader.send(b"CMSG order/" + order)
        heard = [publish(b"k", payload) for payload in expected]
        assert reader.read_all() == [first, *heard]


# ==== 6. Echoes


class TestEchoes:
    def test_echo_off_and_on(self, kernel: FakeKernel) -> None:
        """[ECHO-1] [ECHO-2] From the packet that says so; others hear all."""
        peer, other = kernel.connect(), kernel.connect()
        other.send(b"SUB k")
        peer.send(b"SUB k", publish(b"k", b"1"), b"CMSG echo/off")
        peer.send(publish(b"k", b"2"), b"CMSG echo/on", publish(b"k", b"3"))
        assert peer.read() == [publish(b"k", b"1"), publish(b"k", b"3")]
        assert len(other.read()) == 3


# ==== 7. Limits


class TestLimits:
    def test_largest_packet(self, kernel: FakeKernel) -> None:
        """[LIMIT-1] [PUB-4] It arrives whole; no part of a larger one."""
        peer, sender = kernel.connect(), kernel.connect()
        packet = publish(b"k").ljust(409_600, b"x")
        peer.send(b"SUB k", packet)
        sender.send(packet + b"x")
        assert sender.wire.closed
        assert peer.read() == [packet]

    @pytest.mark.parametrize("word", [b"SUB ", b"UNSUB ", b"MSG ", b"CMSG "])
    @pytest.mark.parametrize("key", [b"k" * 4_096, b"/" * 63])
    def test_longest_key(
        self, kernel: FakeKernel, word: bytes, key: bytes
    ) -> None:
        """[LIMIT-4] In bytes and in segments, in every kind of packet."""
        peer = kernel.connect()
        peer.send(word + key + b"\0")
        assert not peer.wire.closed
        peer.send(word + key + key[:1] + b"\0")
        assert peer.wire.closed

    @pytest.mark.parametrize(
        "limits, fitting, more",
        [
            ({"max_patterns": 2}, "a b a -b c", "d"),
            ({"max_pattern_bytes": 4}, "12 34 -12 56", "7"),
            ({"max_shapes": 5}, "a b a/b a*b a/ -a/b *", "c/d"),
        ],
    )
    def test_patterns_of_a_client(
        self, limits: dict[str, int], fitting: str, more: str
    ) -> None:
        """[LIMIT-5] What is removed, or held twice, does not count."""
        peer = FakeKernel(**limits).connect()
        for text in fitting.split():
            word = "UN" * text.startswith("-") + "SUB "
            peer.send((word + text.lstrip("-")).encode())
        assert not peer.wire.closed
        peer.send(b"SUB " + more.encode())
        assert peer.wire.closed

    @pytest.mark.parametrize(
        "limits",
        [
            {"max_user_patterns": 3},
            {"max_user_pattern_bytes": 3},
            {"max_shapes": 4},
        ],
    )
    def test_patterns_of_a_user(self, limits: dict[str, int]) -> None:
        """[LIMIT-5] [LIMIT-12] All its clients share them."""
        kernel = FakeKernel(**limits)
        one, two, other = (kernel.connect(uid=uid) for uid in (1, 1, 2))
        one.send(b"SUB *", b"SUB /")
        two.send(b"SUB a", b"UNSUB a", b"SUB b")
        other.send(b"SUB *", b"SUB /", b"SUB a")
        assert not (one.wire.closed or two.wire.closed or other.wire.closed)
        two.send(b"SUB a*")
        assert two.wire.closed
        one.send(b"SUB c")  # in the place of what the other one held
        assert not one.wire.closed

    @pytest.mark.parametrize("uid", [0, OWNER])
    def test_limits_of_a_user_are_not_for_the_privileged(
        self, uid: int
    ) -> None:
        """[LIMIT-12] They are not for root and the bus owner."""
        names = ("patterns", "pattern_bytes", "clients", "backlog")
        kernel = FakeKernel(**{f"max_user_{name}": 1 for name in names})
        peers = [kernel.connect(uid=uid) for _ in range(3)]
        for peer in peers:
            peer.wire.room = 0
            peer.send(b"SUB k", b"SUB aa", publish(b"k"))
        assert not any(peer.wire.closed or peer.paused for peer in peers)

    def test_clients(self) -> None:
        """[LIMIT-7] [LIMIT-16] A quarter is kept for the privileged."""
        kernel = FakeKernel(max_clients=8)
        others = [kernel.connect(uid=uid) for uid in range(1, 8)]
        assert [peer.wire.closed for peer in others] == [False] * 6 + [True]
        others[0].close()
        assert not kernel.connect(uid=9).wire.closed
        assert not kernel.connect(uid=0).wire.closed
        assert not kernel.connect(uid=OWNER).wire.closed
        assert kernel.connect(uid=0).wire.closed


# ==== 8. Connections


class TestConnections:
    def test_all_before_a_mistake_is_handled(self, kernel: FakeKernel) -> None:
        """[PKT-2] [CONN-12] Only what comes after it is lost."""
        sender, witness = kernel.connect(), kernel.connect()
        witness.send(b"SUB ")
        sender.send(publish(b"1"), publish(b"2"), b"HELLO", publish(b"3"))
        assert witness.read() == [publish(b"1"), publish(b"2")]
        assert sender.wire.closed and not witness.wire.closed

    @pytest.mark.parametrize("reset", [False, True])
    def test_departure_after_the_last_packet(
        self, kernel: FakeKernel, reset: bool
    ) -> None:
        """[CONN-6] All is handled, also if it left packets unread."""
        reader, sender = kernel.connect(), kernel.connect()
        reader.send(b"SUB k")
        sender.post(*publications(200))
        sender.wire.reset = reset
        sender.close()
        assert sender.wire.closed
        assert reader.read() == publications(200)

    def test_backlog_of_one_that_leaves(self, kernel: FakeKernel) -> None:
        """[CONN-10] The kernel gets what it takes of it."""
        reader, sender = stalled(kernel), kernel.connect()
        sender.send(*publications(10))
        reader.wire.room = 5
        reader.close()
        assert list(reader.wire.taken) == publications(5)

    def test_turns_are_short(self, kernel: FakeKernel) -> None:
        """[CONN-5] Others come after at most 64 packets."""
        flooder, polite = kernel.connect(), kernel.connect()
        flooder.post(*publications(1000))
        polite.post(WHOAMI)
        kernel.server.round(0)
        assert len(flooder.wire.incoming) >= 1000 - 64
        assert len(polite.wire.taken) == 1
