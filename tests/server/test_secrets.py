"""Tests that no pattern that can be built hears secrets of another client."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

import sbus
from packets import publish
from patterns import OWN, TOKENS, Listener, texts, wide_bus
from sizes import PROOF, either
from spec_model import is_reserved, may_hear, may_use

pytestmark = PROOF

STRANGERS = [  # each has all but one number in common with OWN
    sbus.Credentials(101, 1000, 4242),
    sbus.Credentials(100, 1001, 4242),
    sbus.Credentials(100, 1000, 4243),
]
PARTS_MAX = 6
OWN_SECRET = b"!/cred/100/1000/4242/"
SECRET_KEYS = [OWN_SECRET + rest for rest in (b"x", b"", b"x/x", b"cred/c/")]
SECRET_KEYS += [OWN_SECRET + b"x/!/cred/101/1001/4243/x"]


class Detector:
    """Subscribes clients to patterns, and finds secrets that leak."""

    def __init__(self) -> None:
        bus = wide_bus()
        self.publisher = Listener(bus, sbus.Credentials(7, 7, 7))
        self.owner = Listener(bus, OWN)
        self.listeners = [self.owner]
        self.listeners += [Listener(bus, own) for own in STRANGERS]
        self.leaks: list[str] = []

    def try_patterns(self, patterns: Sequence[bytes]) -> list[str]:
        """Have all subscribe to patterns, publish secrets, unsubscribe."""
        for listener, pattern in itertools.product(self.listeners, patterns):
            is_stored = listener.send(b"SUB " + pattern)
            if is_stored != may_use(pattern, listener.own):
                verb = "holds" if is_stored else "may not hold"
                self.leaks.append(f"{listener.own} {verb} {pattern!r}")

        used = [pattern for pattern in patterns if may_use(pattern, OWN)]
        for key in SECRET_KEYS:
            self.publisher.send(publish(key))
            is_owed = any(may_hear(pattern, key, OWN) for pattern in used)
            for listener in self.listeners:
                is_heard = bool(listener.take())
                if is_heard != (is_owed and listener is self.owner):
                    verb = "heard" if is_heard else "did not hear"
                    secret = f"{key!r} with one of {patterns}"
                    self.leaks.append(f"{listener.own} {verb} {secret}")

        for listener, pattern in itertools.product(self.listeners, patterns):
            listener.send(b"UNSUB " + pattern)
        return self.leaks


def leaks_of_tokens(stride: int) -> list[str]:
    """Return what leaks to patterns of tokens.

    Those that differ in the last part alone are tried together: all that
    begin as a secret key does, and of other groups one in *stride*.
    """
    detector = Detector()
    starts = itertools.chain.from_iterable(
        itertools.product(TOKENS, repeat=length) for length in range(PARTS_MAX)
    )
    for number, parts in enumerate(starts):
        if number % stride and parts[:2] != (b"!", b"cred"):
            continue
        detector.try_patterns([b"/".join([*parts, last]) for last in TOKENS])
        if len(detector.leaks) > 20:
            break
    return detector.leaks


# ---- No pattern that a client can store hears secrets of another


def test_all_token_patterns() -> None:
    """[CRED-4] [CRED-10] [CRED-11] [MATCH-4] None of 1 to 6 parts leaks.

    There are 597,870, of which a test tries one in fifty.
    """
    assert leaks_of_tokens(either(1, 300)) == []


def test_all_short_texts() -> None:
    """[CRED-10] [KEY-4] No leak to the texts of '!', '/', 'c' and '*'."""
    detector = Detector()
    patterns = list(texts(b"!/c*", 8))
    for start in range(0, len(patterns), either(8, 240)):
        detector.try_patterns(patterns[start : start + 8])
    assert detector.leaks == []


def test_subscription_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """[CRED-4] Without the other, nobody hears secrets of others."""
    monkeypatch.setattr(sbus, "may_hear", lambda *_: True)
    assert leaks_of_tokens(300) == []


def test_delivery_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """[CRED-11] Without the other, clients store any, and hear nothing."""
    monkeypatch.setattr(sbus, "check_pattern", lambda *_: None)
    detector = Detector()
    detector.try_patterns([OWN_SECRET + b"x", b"!/cred////x"])
    leaks = detector.leaks + leaks_of_tokens(300)
    assert any(" holds " in leak for leak in leaks)
    assert not any(" heard " in leak for leak in leaks)
    odd = b"!/cred/0100/1000/4242/x"  # [CRED-7]
    detector.owner.send(b"SUB " + odd)
    detector.publisher.send(publish(odd))
    assert detector.owner.take() == []


def test_one_check_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """[CRED-4] [CRED-11] Without both, strangers hear a secret."""
    monkeypatch.setattr(sbus, "may_hear", lambda *_: True)
    monkeypatch.setattr(sbus, "check_pattern", lambda *_: None)
    leaks = Detector().try_patterns([OWN_SECRET + b"x"])
    assert any(" heard " in leak for leak in leaks)


ODD = ["", "0", "1", "7", "01", "+1", " 1", "1 ", "-1", "1_0", "*", "!"]
ODD += ["65534", "4294967295", "\u0661", "\uff11", "1" * 400, "1.0", "0x1"]


@pytest.mark.parametrize("number", [1, 7, 65534, 4294967295, 0])
def test_odd_numbers(number: int) -> None:
    """[CRED-4] [CRED-7] [CRED-8] Each field has one spelling.

    The bus and the model agree on a key, and on two patterns.
    """
    for place, spelling in itertools.product(range(3), ODD):
        numbers = [5, 6, 8]
        numbers[place] = number
        fields = list(map(str, numbers))
        fields[place] = spelling
        key = "!/cred/{}/{}/{}/x".format(*fields).encode()
        ids = sbus.Credentials(*numbers)
        client = Listener(wide_bus(), ids)
        for pattern in (key, b"!/cred////x"):
            is_stored = client.send(b"SUB " + pattern)
            assert is_stored == may_use(pattern, ids), (pattern, ids)
            is_good = client.send(publish(key))
            assert is_good == (not is_reserved(key)), key
            is_heard = is_stored and is_good and may_hear(pattern, key, ids)
            assert bool(client.take()) == is_heard, (pattern, key, ids)
            client.send(b"UNSUB " + pattern)
