"""Fifteen stories to read first: what the bus promises, and a test of each.

They follow the chapters, on a fake kernel: a test says there how many packets
a client has room for, and what time it is.  Every example of spec/ runs as
well, in three ways.  tests/ has the rest.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence

import pytest

import sbus
from conformance.examples import Block
from conformance.kit import Kit, Result, all_cases
from conformance.report import count, failure_lines
from conformance.server import ServerProcess
from examples_of_spec import cases_of, each_block
from fake_bus import run_on_fake_kernel
from fake_kernel import OWNER, FakeKernel, cost
from packets import ANSWER, WHOAMI, publications, publish
from patterns import texts
from processes import SBUSD, SECONDS_MAX, naive

OURS = shlex.join([*SBUSD, "-f", "-a", "{address}"])


# ==== The examples of all chapters


def explain(results: Sequence[Result]) -> str:
    """Return the failures among some results."""
    lines: list[str] = []
    for result in results:
        if result.verdict == "failed":
            lines += ["", *failure_lines(result)]
    return "\n".join(lines)


def results_of_all(command: str, seconds: float, level: str) -> list[Result]:
    """Return what a server makes of each example, which it is to pass.

    It has so many seconds for an answer.
    """
    with ServerProcess(command, seconds) as server:
        kit = Kit(server, level, math.inf)
        results = [*map(kit.judge, all_cases())]
    assert not explain(results), explain(results)
    return results


class TestExamples:
    @each_block
    def test_on_a_fake_kernel(self, block: Block) -> None:
        """The server does in this process what the example says."""
        results = [run_on_fake_kernel(case) for case in cases_of(block)]
        assert results and not explain(results), explain(results)

    @pytest.mark.timeout(600)  # a hundred servers, one after the other
    def test_on_real_sockets(self) -> None:
        """The server does the same as a process of its own."""
        results = results_of_all(OURS, SECONDS_MAX, "daemon")
        assert count(results, "passed") > 1150

    def test_on_the_server_that_is_named(self) -> None:
        """Another server does it where the original protocol asks it."""
        command = os.environ.get("SBUS_SERVER", naive())
        results = results_of_all(command, SECONDS_MAX / 2, "protocol")
        assert count(results, "passed") > 1000


# ==== 2. Routing keys


def test_a_pattern_selects_keys(kernel: FakeKernel) -> None:
    """[SUB-1] [PUB-1] [MATCH-1] [MATCH-3] Only a pattern has wildcards.

    A publisher cannot widen its audience by a star in a key.
    """
    reader, publisher = kernel.connect(), kernel.connect()
    reader.send(b"SUB a/*")
    publisher.send(publish(b"a/b"), publish(b"a/b/c"), publish(b"*/b"))
    assert reader.read() == [publish(b"a/b")]


def as_expression(pattern: bytes) -> re.Pattern[bytes]:
    """Return a regular expression for a pattern: a second opinion."""
    if re.search(rb"\*[^*/]", pattern):
        return re.compile(rb"(?!)")
    escaped = re.escape(re.sub(rb"\*+", b"*", pattern))
    expression = escaped.replace(re.escape(b"*"), b"[^/]*")
    if not pattern or pattern.endswith(b"/"):
        expression += b".*"
    return re.compile(expression, re.S)


def test_patterns_agree_with_regular_expressions() -> None:
    """[MATCH-1] [MATCH-2] [MATCH-3] [MATCH-4] [MATCH-6] All short ones."""
    every_text = list(texts(b"a/*", 4))
    for pattern in every_text:
        expression = as_expression(pattern)
        for key in every_text:
            expected = bool(expression.fullmatch(key))
            is_match = sbus.pattern_matches(pattern, key)
            assert is_match is expected, (pattern, key)


# ==== 3. Protocol


def test_a_client_receives_a_message_once(kernel: FakeKernel) -> None:
    """[PUB-2] [SUB-2] [UNSUB-1] A client removes its patterns one by one."""
    client = kernel.connect()
    client.send(b"SUB ", b"SUB a/", b"SUB a/b", b"SUB a/b", publish(b"a/b"))
    assert client.read() == [publish(b"a/b")]
    client.send(b"UNSUB ", b"UNSUB a/", b"UNSUB a/b", publish(b"a/b"))
    assert client.read() == [publish(b"a/b")]
    client.send(b"UNSUB a/b", publish(b"a/b"))
    assert client.read() == []


def test_messages_stay_in_order(kernel: FakeKernel) -> None:
    """[PUB-6] [PKT-5] Those that wait for a reader do as well."""
    reader, publisher = kernel.connect(), kernel.connect()
    reader.send(b"SUB k")
    reader.wire.room = 7
    packets = publications(1000)
    publisher.send(*packets)
    assert reader.read_all() == packets


def test_an_answer_tells_that_a_subscription_is_in_force(
    kernel: FakeKernel,
) -> None:
    """[CRED-2] [CRED-3] [CTL-3] An answer comes after earlier messages."""
    client = kernel.connect(gid=100, uid=1000, pid=4242)
    early, late = publications(2)
    client.send(publish(b"k", b"too early"), b"SUB k", early, WHOAMI, late)
    assert client.read() == [early, ANSWER, late]


# ==== 4. Secret messages

SECRET = b"!/cred/100/1000/4242/x"
WIDE = [b"", b"*", b"*/", b"!*/", b"!*/*/", b"*/cred/", b"*/*/*/*/*/x"]
NOT_ONES_OWN = [
    b"!/cred/101/1000/4242/x",
    b"!/cred/100/1001/4242/x",
    b"!/cred/100/1000/4243/x",
    b"!/cred//1001//x",
    b"!/cred/0100/1000/4242/x",
    b"!/cred/*/1000/4242/x",
    b"!/cred/100/1000/4*/x",
    b"!/cred/",
    b"!/cred/100/1000/4242",
    b"!/other",
]


def test_a_secret_reaches_its_owner_alone(kernel: FakeKernel) -> None:
    """[CRED-4] [CRED-10] No pattern of others selects it, however wide."""
    owner = kernel.connect(gid=100, uid=1000, pid=4242)
    stranger = kernel.connect(gid=100, uid=1000, pid=4243)
    owner.send(b"SUB " + SECRET)
    stranger.send(*[b"SUB " + pattern for pattern in WIDE])
    stranger.send(publish(SECRET, b"psst"))
    assert owner.read() == [publish(SECRET, b"psst")]
    assert stranger.read() == [] and not stranger.wire.closed


@pytest.mark.parametrize("pattern", NOT_ONES_OWN)
def test_nobody_subscribes_to_secrets_of_others(
    kernel: FakeKernel, pattern: bytes
) -> None:
    """[CRED-4] [CRED-7] [KEY-4] The server disconnects who tries."""
    client = kernel.connect(gid=100, uid=1000, pid=4242)
    client.send(b"SUB " + pattern)
    assert client.wire.closed


# ==== 5. Flood control


def test_a_slow_reader_loses_nothing(kernel: FakeKernel) -> None:
    """[BLOCK-1] [BLOCK-4] Messages wait for it, but no publisher."""
    reader, publisher = kernel.subscriber(room=2), kernel.connect()
    publisher.send(*publications(9))
    assert not publisher.paused
    assert reader.waiting == cost(7)
    assert reader.read_all() == publications(9)


def test_a_reader_may_choose_to_lose_messages(kernel: FakeKernel) -> None:
    """[BLOCK-5] The server tries each message, and counts a lost one."""
    reader = kernel.subscriber(b"blocking/soft/discard", room=8)
    publisher = kernel.connect()
    publisher.send(*publications(9))
    assert reader.stats["discarded"] == 1
    assert reader.read(1) == publications(1)
    publisher.send(publish(b"k", b"new"))
    assert reader.read() == [*publications(8)[1:], publish(b"k", b"new")]


def test_a_reader_may_pause_its_publishers(kernel: FakeKernel) -> None:
    """[BLOCK-7] [BLOCK-12] A pause lasts until no message waits."""
    reader = kernel.subscriber(b"blocking/soft/block", room=4)
    publisher, stranger = kernel.connect(), kernel.connect()
    publisher.send(*publications(6))
    publisher.post(*publications(8)[6:])
    stranger.send(publish(b"other"))
    assert publisher.paused and not stranger.paused and not reader.paused
    assert reader.read(1) == publications(1)
    assert publisher.paused
    assert reader.read_all() == publications(8)[1:]
    assert not publisher.paused


@pytest.mark.parametrize("reader_uid", [0, OWNER, 1000, 1001, 65_534])
@pytest.mark.parametrize("publisher_uid", [0, OWNER, 1000, 65_534])
def test_a_stranger_pauses_nobody(
    kernel: FakeKernel, reader_uid: int, publisher_uid: int
) -> None:
    """[BLOCK-13] Only a reader of the same user, root or the bus owner does.

    All that the kernel cannot name share one number, and no user.
    """
    reader = kernel.subscriber(b"blocking/soft/block", room=2, uid=reader_uid)
    publisher = kernel.connect(uid=publisher_uid)
    publisher.send(*publications(5))
    is_own = reader_uid == publisher_uid != 65_534
    assert publisher.paused == (is_own or reader_uid in (0, OWNER))
    assert reader.read_all() == publications(5)


def test_a_pause_has_an_end(kernel: FakeKernel) -> None:
    """[BLOCK-16] A reader that takes nothing is disconnected in the end."""
    reader = kernel.subscriber(b"blocking/soft/block", room=2)
    publisher = kernel.connect()
    publisher.send(*publications(5))
    kernel.wait(4.9)
    assert publisher.paused
    kernel.wait(0.2)
    assert reader.wire.closed and not publisher.paused


# ==== 8. Connections


def test_a_mistake_costs_only_its_author(kernel: FakeKernel) -> None:
    """[PKT-2] [CONN-12] Messages that it sent before are delivered."""
    author, reader = kernel.connect(), kernel.connect()
    reader.send(b"SUB ")
    author.send(publish(b"1"), publish(b"2"), b"HELLO", publish(b"3"))
    assert reader.read() == [publish(b"1"), publish(b"2")]
    assert author.wire.closed and not reader.wire.closed


@pytest.mark.parametrize("left_unread", [False, True])
def test_last_words_count(kernel: FakeKernel, left_unread: bool) -> None:
    """[CONN-6] Messages of a client that has died are delivered."""
    reader, publisher = kernel.subscriber(), kernel.connect()
    publisher.post(*publications(200))
    publisher.wire.reset = left_unread  # the kernel says so first
    publisher.close()
    assert publisher.wire.closed
    assert reader.read() == publications(200)


def test_a_flood_leaves_others_their_turn(kernel: FakeKernel) -> None:
    """[CONN-5] A turn has at most 64 packets."""
    flooder, client = kernel.connect(), kernel.connect()
    flooder.post(*publications(1000))
    client.post(WHOAMI)
    kernel.server.round(0)
    assert len(flooder.wire.incoming) >= 1000 - 64
    assert len(client.wire.taken) == 1
