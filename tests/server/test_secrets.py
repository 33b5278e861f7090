"""Tests that no pattern that can be built hears another one's secrets."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import sbus
from fake_kernel import OWNER
from packets import publish
from patterns import OWN, TOKENS, WIDE_LIMITS, Listener, texts
from real_bus import Peer, RealBus, needs_root
from sizes import PROOF, SOAK, either
from spec_model import is_reserved, may_hear, may_use

STRANGERS = [  # each has all but one number in common with OWN
    sbus.Credentials(101, 1000, 4242),
    sbus.Credentials(100, 1001, 4242),
    sbus.Credentials(100, 1000, 4243),
]

PARTS_MAX = 6

OWN_SECRET = b"!/cred/100/1000/4242/"
SECRET_KEYS = [OWN_SECRET + rest for rest in (b"x", b"", b"x/x", b"cred/c/")]
SECRET_KEYS += [OWN_SECRET + b"!/cred/101/1001/4243/x"]


class Detector:
    """Subscribes clients to patterns, and finds secrets that leak."""

    def __init__(self) -> None:
        self.bus = sbus.Bus(WIDE_LIMITS, OWNER)
        self.publisher = Listener(self.bus, sbus.Credentials(7, 7, 7))
        self.owner = Listener(self.bus, OWN)
        self.listeners = [self.owner]
        self.listeners += [Listener(self.bus, own) for own in STRANGERS]
        self.leaks: list[str] = []

    def try_patterns(self, patterns: Sequence[bytes]) -> None:
        """Have all subscribe to patterns, publish secrets, unsubscribe."""
        held = [self.subscribe(one, patterns) for one in self.listeners]
        for key in SECRET_KEYS:
            self.publisher.send(publish(key))
            for listener, some in zip(self.listeners, held):
                heard = bool(listener.take())
                if heard != (
                    listener is self.owner
                    and any(may_hear(text, key, OWN) for text in some)
                ):
                    what = "heard" if heard else "did not hear"
                    self.leaks.append(f"{listener.own} {what} {key!r}")
                    self.leaks.append(f"... with one of {patterns}")
        self.bus.touched.clear()
        for listener, some in zip(self.listeners, held):
            for pattern in some:
                listener.send(b"UNSUB " + pattern)

    def subscribe(
        self, listener: Listener, patterns: Sequence[bytes]
    ) -> list[bytes]:
        """Subscribe to patterns; return those with '!' that were stored."""
        held = []
        for pattern in patterns:
            try:
                is_stored = listener.send(b"SUB " + pattern)
            except AssertionError:
                is_stored = True
            if is_stored != may_use(pattern, listener.own):
                verb = "holds" if is_stored else "may not hold"
                self.leaks.append(f"{listener.own} {verb} {pattern!r}")
            if is_stored:
                held.append(pattern)
        return held


def prefixes() -> Iterator[list[bytes]]:
    """Return all but the last part of the token patterns."""
    for length in range(PARTS_MAX):
        yield from map(list, itertools.product(TOKENS, repeat=length))


def leaks_of_tokens(stride: int) -> list[str]:
    """Return what leaks to token patterns.

    Those that differ in the last part alone are tried together; of these
    groups one in *stride* is tried.
    """
    detector = Detector()
    for parts in itertools.islice(prefixes(), 0, None, stride):
        detector.try_patterns([b"/".join([*parts, last]) for last in TOKENS])
        if len(detector.leaks) > 20:
            break
    return detector.leaks


def without_subscription_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the check when subscribing away, not the one at delivery."""
    monkeypatch.setattr(sbus, "check_secret", lambda *_: None)


def without_delivery_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the check at delivery away, not the one when subscribing."""
    fit = sbus.fields_fit

    def check(pattern: bytes, own: sbus.Credentials, prefix: bytes) -> None:
        if not fit(pattern, own, prefix):
            raise sbus.ProtocolError("CRED-4", "not your own")

    monkeypatch.setattr(sbus, "check_secret", check)
    monkeypatch.setattr(sbus, "fields_fit", lambda *_: True)


class TestSecrets:
    """Nothing that can be subscribed to hears another one's secrets."""

    pytestmark = PROOF

    def test_all_token_patterns(self) -> None:
        """[CRED-4] [CRED-5] [CRED-10] [CRED-11] [MATCH-4] No leak.

        There are 597,870 of 1 to 6 parts; one in thirty is enough for a look.
        """
        assert leaks_of_tokens(either(1, 30)) == []

    def test_all_short_texts(self) -> None:
        """[CRED-10] [KEY-4] No leak to the texts of '!', '/', 'c' and '*'."""
        detector = Detector()
        every = list(texts(b"!/c*", 8))
        for start in range(0, len(every), either(8, 120)):
            detector.try_patterns(every[start : start + 8])
        assert detector.leaks == []

    def test_own_literal_patterns(self) -> None:
        """[CRED-10] Who subscribes to its secret hears it."""
        for key in SECRET_KEYS:
            bus = sbus.Bus(WIDE_LIMITS, OWNER)
            owner = Listener(bus, OWN)
            assert owner.send(b"SUB " + key)
            assert owner.send(publish(key))
            assert owner.take() == [publish(key)]

    def test_subscription_check_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-11] Without the other, nobody hears what is not theirs."""
        without_delivery_check(monkeypatch)
        assert leaks_of_tokens(50) == []

    def test_delivery_check_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-4] Without the other, clients hold it and hear nothing."""
        without_subscription_check(monkeypatch)
        detector = Detector()
        detector.try_patterns([OWN_SECRET + b"x"])
        detector.try_patterns([b"!/cred////x"])
        assert any(" holds " in leak for leak in detector.leaks)
        assert not any(" heard " in leak for leak in detector.leaks)
        assert leaks_of_tokens(50) != []

    def test_one_check_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-4] [CRED-11] Without both, strangers hear a secret."""
        without_delivery_check(monkeypatch)
        without_subscription_check(monkeypatch)
        detector = Detector()
        detector.try_patterns([OWN_SECRET + b"x"])
        assert any(" heard " in leak for leak in detector.leaks)

    def test_empty_fields_are_filled_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-6] With open ones, the delivery check is what is left."""

        def leave_open(pattern: bytes, *_: object) -> list[bytes]:
            return [pattern.replace(b"////", b"/*/*/*/")]

        monkeypatch.setattr(sbus, "resolve", leave_open)
        detector = Detector()
        detector.try_patterns([b"!/cred////x"])
        assert detector.leaks == []
        without_delivery_check(monkeypatch)
        detector.try_patterns([b"!/cred////x"])
        assert any(" heard " in leak for leak in detector.leaks)

    def test_table_of_its_own_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """[CRED-10] In one table, wide patterns hear their own secrets."""
        detector = Detector()
        monkeypatch.setattr(detector.bus, "_secret", detector.bus._public)
        detector.try_patterns([b"", b"*/"])
        assert detector.leaks

    ODD = ["", "0", "1", "7", "01", "+1", " 1", "1 ", "-1", "1_0", "*", "!"]
    ODD += ["65534", "4294967295", "\u0661", "\uff11", "1" * 400, "1.0", "0x1"]

    @pytest.mark.parametrize("number", [1, 7, 65534, 4294967295, 0])
    def test_odd_numbers(self, number: int) -> None:
        """[CRED-4] [CRED-5] [CRED-7] [CRED-8] Each field has one spelling."""
        for place, spelling in itertools.product(range(3), self.ODD):
            numbers = [5, 6, 8]
            numbers[place] = number
            fields = list(map(str, numbers))
            fields[place] = spelling
            text = "!/cred/{}/{}/{}/x".format(*fields).encode()
            own = sbus.Credentials(*numbers)
            assert_agreement(text, [text, b"!/cred////x"], own)

    def test_credential_grid(self) -> None:
        """[CRED-4] [CRED-6] [CRED-11] 27 clients, 64 keys and patterns."""
        fields = ["", "1", "2", "3"]
        grid = [
            "!/cred/{}/{}/{}/x".format(*some).encode()
            for some in itertools.product(fields, repeat=3)
        ]
        clients = [*itertools.product((1, 2, 3), repeat=3)]
        for numbers in clients[:: either(1, 5)]:
            for key in grid:
                assert_agreement(key, grid, sbus.Credentials(*numbers))

    @pytest.mark.parametrize("text", [b"!/cred", b"!/cred/1/1/1", b"!/cred/"])
    def test_missing_fields(self, text: bytes) -> None:
        """[CRED-5] [KEY-4] A secret that is cut short disconnects."""
        bus = sbus.Bus(WIDE_LIMITS, OWNER)
        client = Listener(bus, sbus.Credentials(1, 1, 1))
        for packet in (b"SUB " + text, b"UNSUB " + text, publish(text)):
            assert not client.send(packet)

    def test_interleavings(self) -> None:
        """[CRED-10] [SUB-2] [UNSUB-1] At each moment what is held counts."""
        patterns = [b"!/cred////x", b"!/cred/100/1000/4242/", b""]
        acts = [
            word + pattern
            for word in (b"SUB ", b"UNSUB ")
            for pattern in patterns
        ]
        key = b"!/cred/100/1000/4242/x"
        for order in itertools.product(acts, repeat=either(5, 4)):
            bus = sbus.Bus(WIDE_LIMITS, OWNER)
            owner, stranger = Listener(bus, OWN), Listener(bus, STRANGERS[0])
            held: Counter[bytes] = Counter()
            for packet in order:
                word, _, pattern = packet.partition(b" ")
                owner.send(packet)
                stranger.send(packet)
                owner.send(publish(key))
                change = 1 if word == b"SUB" else -1
                held[pattern] = max(0, held[pattern] + change)
                expected = held[patterns[0]] or held[patterns[1]]
                assert len(owner.take()) == bool(expected), order
                assert stranger.take() == [], order


def assert_agreement(
    key: bytes, patterns: Iterable[bytes], own: sbus.Credentials
) -> None:
    """Check that the bus and the model agree on patterns and a key."""
    bus = sbus.Bus(WIDE_LIMITS, OWNER)
    client = Listener(bus, own)
    for pattern in patterns:
        is_stored = client.send(b"SUB " + pattern)
        assert is_stored == may_use(pattern, own), (pattern, own)
        is_good = client.send(publish(key))
        assert is_good == (not is_reserved(key)), key
        is_heard = is_stored and is_good and may_hear(pattern, key, own)
        assert bool(client.take()) == is_heard, (pattern, key, own)
        bus.touched.clear()
        if is_stored:
            client.send(b"UNSUB " + pattern)


class TestUsers:
    """The kernel says who a client is, whatever became of the process."""

    pytestmark = SOAK

    @needs_root
    def test_each_hears_its_own(self, directory: Path) -> None:
        """[CRED-1] [CRED-2] [CRED-4] [CRED-10] Three users, passed sockets.

        Each socket was connected by a process that has ended since.
        """
        users = [(70, 7), (80, 8), (80, 7)]
        with RealBus(directory, "-go") as bus, contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(bus.connect(uid, gid))
                for gid, uid in users
            ]
            for (gid, uid), peer in zip(users, peers):
                assert peer.path.startswith(b"!/cred/%d/%d/" % (gid, uid))
                peer.send(b"SUB ", b"SUB */", b"SUB !/cred////", b"SUB !x/")
                peer.fence()
            for owner in peers:
                packet = publish(owner.path + b"/x", b"secret")
                heard = Counter[Peer]()
                for peer in peers:
                    peer.send(packet)
                    heard[peer] += len(peer.fence())
                for peer in peers:
                    heard[peer] += len(peer.fence())
                assert +heard == {owner: len(peers)}
            paths = [peer.path for peer in peers]
            for peer, path in zip(peers, paths[1:] + paths[:1]):
                peer.send(b"SUB " + path + b"/")
                assert peer.is_disconnected()
