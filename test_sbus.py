"""Tests to read: what each chapter of the specification says, tried.

Every example of spec/ is run on a fake kernel, where what cannot be seen on a
real one can be, and beside them is what a chapter needs.  tests/ has the
rest.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

import sbus
from conformance.examples import Block, MatchCase, read_cases
from conformance.kit import Kit, Result, all_cases
from conformance.report import count, failure_lines
from conformance.server import ServerProcess
from fake_bus import cases_of, each_block, run_on_fake_kernel
from fake_kernel import OWNER, FakeKernel, FakePeer, count_calls
from packets import ANSWER_HEAD, WHOAMI, publications, publish
from processes import ROOT, SBUSD, SECONDS_MAX, naive

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
        """[LIMIT-19] So it does as a process of its own."""
        with ServerProcess(OURS, SECONDS_MAX) as server:
            results = Kit(server, ours=True, choices=True).run(all_cases())
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1150

    def test_on_the_server_that_is_named(self) -> None:
        """So does any other server, where the original protocol asks it."""
        command = os.environ.get("SBUS_SERVER", naive())
        with ServerProcess(command, SECONDS_MAX / 2) as server:
            kit = Kit(server, ours=False, choices=False)
            results = kit.run(all_cases())
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1000


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
        assert peer.read()[0].startswith(ANSWER_HEAD)
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
        own = b"!/cred/%d/%d/%d/x" % peer.wire.credentials
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
        path = secret(*credentials, rest="")[:-1]
        assert peer.read() == [ANSWER_HEAD + path]
        peer.send(b"SUB " + secret(*credentials))
        assert peer.wire.closed

    def test_answer_comes_after_what_was_routed_before(
        self, kernel: FakeKernel
    ) -> None:
        """[CRED-3] [PKT-5] A question fences."""
        owner = self.owner(kernel)
        owner.send(b"SUB k", publish(b"k"), WHOAMI, publish(b"k", b"2"))
        answer = ANSWER_HEAD + b"!/cred/100/1000/4242"
        expected = [publish(b"k"), answer, publish(b"k", b"2")]
        assert owner.read() == expected

    def test_prefix(self) -> None:
        """[CRED-2] [CRED-9] It stands before all secret keys."""
        prefix = b"!/cred/7/8/9"
        kernel = FakeKernel(cred_prefix=prefix)
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
        assert reader.stats["discarded"] == 3
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
