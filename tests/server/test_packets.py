"""Tests of packets: malformed ones, large ones, a million broken ones."""

from __future__ import annotations

import random

import pytest

import sbus
from fake_kernel import OWNER, FakeKernel
from packets import publications, publish
from patterns import OWN, TOKENS, Listener, mutate
from sizes import PROOF, either
from spec_model import MODES, is_reserved, may_use, read_form


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

    @pytest.mark.parametrize("mistake", [[b"BAD"], [b"", b""], [b"", b"BAD"]])
    def test_what_follows_a_mistake_is_read_out_in_turns(
        self,
        kernel: FakeKernel,
        caplog: pytest.LogCaptureFixture,
        mistake: list[bytes],
    ) -> None:
        """[CONN-5] [CONN-11] [PKT-4] To close what is unread may take long."""
        peer, other = kernel.connect(uid=1, pid=2), kernel.connect()
        other.send(b"SUB k")
        peer.wire.incoming.extend([*mistake, *publications(200)])
        kernel.server.round(0)
        assert peer.wire.ended, "it could send more"
        left = len(peer.wire.incoming)
        while not peer.wire.closed:
            kernel.server.round(0)
            assert len(peer.wire.incoming) >= left - sbus.PACKETS_PER_TURN
            left = len(peer.wire.incoming)
        assert not left and not other.read()
        assert len(caplog.messages) == 1
        assert "disconnect client=1 uid=1 pid=2 [PKT-" in caplog.text

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


PACKETS = either(4_000_000, 100_000)
LOOP_PACKETS = either(160_000, 20_000)
BATCH = 2_000  # packets between two looks at the others

# Inputs that have crashed a server, this one or the original; once in this
# list, for ever.  Each line is what one client sends.
KEPT: list[list[bytes]] = [
    [b"SUB x", b"UNSUB x"],
    [b"SUB x", b"UNSUB x", b"SUB y"],
    [b"SUB aaaa", b"SUB bbbb", b"SUB cccc", b"UNSUB aaaa"],
    [b"SUB !/cred////"],
    [b"SUB !/cred///"],
    [b"MSG x"],
    [b""],
    [b"", b""],
    [b"SUB a\0b", b"UNSUB a"],
    [b"SUB " + b"/" * 4_096],
    [b"MSG " + b"/" * 4_096 + b"\0"],
    [b"SUB " + b"*/" * 2_048, b"MSG " + b"a/" * 2_048 + b"\0"],
]


def grammar(random_: random.Random, count: int) -> list[bytes]:
    """Return packets that are nearly right."""
    words = [
        b"SUB ",
        b"UNSUB ",
        b"MSG ",
        b"CMSG ",
        b"SUB",
        b"sub ",
        b"X ",
        b"",
    ]
    weights = [4, 4, 6, 3, 0.2, 0.2, 0.2, 0.2]
    pieces = [*TOKENS, b"a", b"b", b"**", b"!!", b"\n", b"\x1b", b"\xff"]
    keys = [mode.encode() for mode in MODES] + [b"!/cred/whoami"]
    keys += [b"!/cred/100/1000/4242/x", b"!/cred////x", b"!/cred/1/2/3/"]
    packets = []
    for word in random_.choices(words, weights, k=count):
        parts = random_.choices(pieces, k=random_.randrange(1, 6))
        is_known = random_.random() < 0.3
        key = random_.choice(keys) if is_known else b"/".join(parts)
        end = random_.choice([b"\0", b"\0", b"\0payload", b"\0\0", b""])
        packets.append(word + key + end)
    return packets


class TestBrokenPackets:
    """Whatever a client sends, the others do not notice."""

    pytestmark = PROOF

    def test_random_packets(self) -> None:
        """[PKT-2] [KEY-4] [CRED-5] [CONN-12] The bus agrees with the model."""
        random_ = random.Random(4)
        bus = sbus.Bus(sbus.Limits(), OWNER)
        calm = [Listener(bus, sbus.Credentials(5, 5, n)) for n in (1, 2)]
        calm[0].send(b"SUB calm/1")
        sent = 0
        packets = grammar(random_, 4_000)
        wild = Listener(bus, OWN)
        while sent < PACKETS:
            packet = random_.choice(packets)
            if sent % 4:
                packet = mutate(random_, packet)
            if not self.send(wild, packet):
                bus.close(wild.client, "")
                wild = Listener(bus, OWN)
            wild.client.outbox.clear()
            bus.touched.clear()
            sent += 1
            if not sent % BATCH:
                assert calm[1].send(publish(b"calm/1", b"hello"))
                assert calm[0].take()[-1] == publish(b"calm/1", b"hello")
                bus.close(wild.client, "")
                wild = Listener(bus, OWN)
                packets[: BATCH // 2] = grammar(random_, BATCH // 2)
        assert len(bus.clients) == 3

    def send(self, wild: Listener, packet: bytes) -> bool:
        """Have a packet handled; check that it is a mistake if it is one."""
        is_good = wild.send(packet)
        kind, key = read_form(packet)
        if kind in ("subscribe", "unsubscribe"):
            expected = may_use(key, OWN)
        elif kind == "publish":
            expected = not is_reserved(key)
        else:
            expected = kind != ""
        if is_good != expected:
            client = wild.client  # a limit may have been reached
            assert len(client.patterns) >= 256 and not is_good, packet
        return is_good

    def test_packets_through_the_loop(self) -> None:
        """[LIMIT-1] [PKT-4] [CONN-11] [CONN-12] The others are served."""
        random_ = random.Random(5)
        kernel = FakeKernel()
        pair = [kernel.connect(uid=5) for _ in range(2)]
        pair[0].send(b"SUB calm/1")
        packets = grammar(random_, 4_000)
        large = [409_599, 409_600, 409_601, 425_952, 3, 4, 5, 6, 7, 1, 0]
        for number in range(LOOP_PACKETS // 20):
            wild = kernel.connect()
            some = [mutate(random_, random_.choice(packets)) for _ in "0" * 20]
            if number % 10 == 0:
                size = large[number // 10 % len(large)]
                start = random_.choice([b"MSG calm/1\0", b"MSG k\0", b"SUB "])
                some.insert(0, (start + bytes(size))[:size])
            wild.send(*some)
            wild.close()
            assert wild.wire.closed
            pair[1].send(publish(b"calm/1", b"hello"))
            *others, last = pair[0].read_all()
            assert last == publish(b"calm/1", b"hello")
            assert all(packet in some for packet in others), "was changed"
            assert max(map(len, others), default=0) <= 409_600
        assert len(kernel.bus.clients) == 2

    @pytest.mark.parametrize("packets", KEPT)
    def test_kept_inputs(self, packets: list[bytes]) -> None:
        """[CONN-12] What has crashed a server does not do so again."""
        kernel = FakeKernel()
        pair = [kernel.connect(uid=5) for _ in range(2)]
        pair[0].send(b"SUB ")
        wild = kernel.connect()
        wild.send(*packets)
        wild.close()
        pair[0].read_all()
        pair[1].send(publish(b"calm"))
        assert pair[0].read_all() == [publish(b"calm")]
