"""Tests of keep and of `sub --last`: the last value of each key."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from commands import (
    keeping,
    patterns_of,
    publish_all,
    sbus,
    served,
    wait_for_patterns,
)
from packets import ANSWER, WHOAMI
from processes import SECONDS_MAX, outcome, started
from real_bus import Listener, RealBus, wait_for
from sbus_client import Client


def last(bus: RealBus, count: int, *words: str) -> list[str]:
    """Return the lines that `sub --last` prints."""
    done = sbus(bus.path, "sub", "--last", f"-n{count}", "-t9", *words)
    assert (done.status, done.errors) == (0, "")
    return sorted(done.output.splitlines())


# ---- What a late reader gets


def test_last_values(bus: RealBus) -> None:
    """The last of each key that its patterns select; an empty message has
    one forgotten.  What a key or a payload is made of does not matter.
    """
    with keeping(bus, "a/", "b"):
        publish_all(
            bus.path,
            ("a/1", b"old"),
            ("a/1", b"new"),
            ("a/2", b"gone"),
            ("a/2", b""),
            (b"a/\xff", b"\0\n"),
            ("b", b"x"),
            ("c", b"not kept"),
        )
        expected = ["a/1\tnew", "a/\\xff\t\\x00\\n"]
        assert last(bus, 2, "a/") == expected
        assert last(bus, 3) == [*expected, "b\tx"]
        assert last(bus, 1, "*") == ["b\tx"]


def test_live_wins(bus: RealBus) -> None:
    """A reader never goes back in time, beside a busy writer."""
    with keeping(bus, "k/"), Client(bus.path) as writer:
        for number in range(200):
            writer.publish(f"k/{number % 50}", b"%06d" % number)
        words = ("sub", "--last", "-n", "100", "k/")
        before = patterns_of(bus)
        with started(bus.path, *words) as process:
            wait_for_patterns(bus, before + 1)
            for number in range(200, 100_000):
                writer.publish(f"k/{number % 50}", b"%06d" % number)
                if process.poll() is not None:
                    break
            lines = outcome(process).output.splitlines()
    last_lines: dict[str, str] = {}
    for line in lines:
        key = line.partition("\t")[0]
        assert line > last_lines.get(key, "")
        last_lines[key] = line
    assert len(lines) == 100


def test_limit(bus: RealBus) -> None:
    """Without room a value is not kept, nor the one before it.  A new value
    has the room of the one before it.
    """
    with keeping(bus, "--max-mib", "0.01", "k/"):
        publish_all(bus.path, *[("k/1", bytes(2_000))] * 50)
        publish_all(bus.path, ("k/1", b"x"), ("k/2", b"x"))
        publish_all(bus.path, ("k/2", bytes(20_000)))
        assert last(bus, 1, "k/") == ["k/1\tx"]
        done = sbus(bus.path, "request", "keep/last", "")
        assert "keeps 1 keys, and refused 1" in done.output


def test_second_keeper_is_not_ready(listener: Listener) -> None:
    """A keeper is not ready, and does not answer, before it knows whether
    there is a first.
    """
    with open(os.devnull, "w") as file:
        number = file.fileno()
        words = ("keep", f"--ready-fd={number}", "k")
        with served(listener, *words, pass_fds=[number]) as (process, server):
            assert WHOAMI in iter(server.receive, b"")
            server.send(ANSWER)
            inbox = server.receive().removeprefix(b"SUB ")
            question = server.receive()
            reader = b"MSG keep/last\0reader\0k"
            server.send(question, reader, b"MSG " + inbox + b"\0the first")
            assert server.is_disconnected()
            text = "sbus: the first at keep/last; see --keeper\n"
            assert outcome(process) == (1, "", text)


def test_keepers_that_start_together(directory: Path) -> None:
    """One keeper of several stays, on each bus."""
    path = str(directory / "bus")
    words = ("keep", "--reconnect", "-q", "k")
    with contextlib.ExitStack() as stack:
        keepers = [
            stack.enter_context(started(path, *words)) for _ in range(4)
        ]
        stack.enter_context(RealBus(directory))
        wait_for(lambda: sum(k.poll() is None for k in keepers) == 1)
        for keeper in keepers:
            if keeper.poll() is not None:
                assert outcome(keeper).errors.startswith("sbus: process ")
        with Client(path) as client:
            assert client.request("keep/last", b"", SECONDS_MAX)
        for keeper in keepers:
            keeper.terminate()


def test_large(bus: RealBus) -> None:
    """There may be more values than a client keeps beside an answer."""
    with keeping(bus, "--max-mib", "99", "k/"):
        messages = [(f"k/{n}", bytes(400_000)) for n in range(180)]
        publish_all(bus.path, *messages)
        done = sbus(bus.path, "sub", "--last", "-n180", "--raw", "k/")
    assert (len(done.output), done.errors) == (180 * 400_000, "")


def test_secrets(bus: RealBus) -> None:
    """[CRED-10] No secret is kept."""
    with keeping(bus, "", "!/cred////"), Client(bus.path) as client:
        publish_all(bus.path, ("k", b"v"))
        path = client.whoami(SECONDS_MAX).path
        publish_all(bus.path, (path + b"/secret", b"v"))
        answer = client.request("keep/last", b"", SECONDS_MAX)
        assert b"keeps 1 keys" in answer


def test_questions_that_cannot_be_answered(bus: RealBus) -> None:
    """[KEY-4] Malformed patterns, keys that are too long and texts above the
    limit end nothing.  Of a text above the limit, no value comes, although it
    would match.
    """
    with keeping(bus, ""), Client(bus.path) as client:
        publish_all(bus.path, ("k/" * 62, b"v"), ("l", bytes(409_590)))
        publish_all(bus.path, ("k", b"v"))
        client.subscribe(client.whoami(SECONDS_MAX).path + b"/")
        reply_key = client.whoami().path + b"/x"
        client.publish("keep/last", reply_key + b"\0a\0b")
        client.publish("keep/last", reply_key + b"/" * 58 + b"\0")
        client.publish("keep/last", reply_key + b"\0" + b"*" * 4_097)
        client.publish("keep/last", reply_key + b"\0")
        keys = [client.receive(SECONDS_MAX).key for _ in range(4)]
        assert keys == [*[reply_key] * 2, reply_key + b"/k", reply_key]


def test_reconnecting(directory: Path) -> None:
    """The values come again after a bus was lost."""
    path = str(directory / "bus")
    reader = ("sub", "--last", "--reconnect", "-n2", "k")
    with contextlib.ExitStack() as stack:
        with RealBus(directory) as bus:
            stack.enter_context(keeping(bus, "--reconnect", "k"))
            publish_all(path, ("k", b"v"))
            process = stack.enter_context(started(path, *reader))
            assert process.stdout
            assert process.stdout.readline() == "k\tv\n"
        with RealBus(directory):
            assert process.stdout.readline() == "k\tv\n"


def test_nobody(bus: RealBus) -> None:
    """A remark says that no keeper answers, and sub goes on."""
    with started(bus.path, "sub", "--last", "-n1", "k") as process:
        assert process.stderr
        assert "no `sbus keep` answers" in process.stderr.readline()
        publish_all(bus.path, ("k", b"v"))
        assert outcome(process) == (0, "k\tv\n", "")
