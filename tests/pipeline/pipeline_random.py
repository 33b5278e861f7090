"""Traces at random, of the server itself, and breaches at random in them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import sbus
from fake_kernel import FakeKernel, FakePeer, start_journal
from packets import publish
from pipeline_paper import Event

PATTERNS = ("", "a/", "a/*", "a/*/c", "*", "a/1", "b/é", "b/", "*/1", "a*b")
SECRETS = ("!/cred////x", "!/cred/100///x", "!/cred////*")
KEYS = ("a/1", "a/2", "a/x/c", "a/", "b/é", "b/1", "c", "a/1/c/d", "\x07/1")
SECRET_KEYS = (
    "!/cred/{gid}//{pid}/x",
    "!/cred/{gid}/{uid}/{pid}/x",
    "!/cred////x",
    "!/cred/{gid}/{uid}/{pid}/y",
)


class RandomBus:
    """A server on a fake kernel, whose clients do anything."""

    def __init__(self, path: Path, chosen: random.Random) -> None:
        self.chosen = chosen
        self.prefix = chosen.choice(["", "", "!/cred/7/8/9"])
        more = {"cred_prefix": self.prefix} if self.prefix else {}
        self.kernel = FakeKernel(max_backlog=2_000, **more)
        has_payloads = chosen.random() < 0.5
        self.trace = start_journal(self.kernel, path, has_payloads)
        self.peers: list[FakePeer] = []

    def run(self, steps: int) -> None:
        """Let clients act, and end the run, or kill the server."""
        kinds = (self.publish, self.read, self.subscribe, self.unsubscribe)
        more = (self.control, self.squeeze, self.open, self.close)
        for _ in range(steps):
            self.peers = [peer for peer in self.peers if not peer.wire.closed]
            weights = (60, 20, 8, 4, 5, 3, 4, 1)
            act = self.chosen.choices((*kinds, *more), weights)[0]
            if not self.peers:
                self.open()
            else:
                act(self.chosen.choice(self.peers))
        if self.chosen.random() < 0.2:
            self.trace.flush()
            return
        self.kernel.server.stopping = True
        self.kernel.server.clock = time.monotonic  # for its last second
        for peer in self.peers:
            peer.wire.room = None
        self.kernel.server.run()
        self.trace.close(self.kernel.bus.clients)

    def text(
        self, peer: FakePeer, public: tuple[str, ...], secret: tuple[str, ...]
    ) -> bytes:
        """Return a key or a pattern, now and then a secret one."""
        if self.chosen.random() < 0.8:
            return self.chosen.choice(public).encode("latin-1")
        ids = peer.wire.credentials._asdict()
        text = self.chosen.choice(secret).format(**ids)
        # Now and then one for a bus above [CRED-13]
        is_upward = public is KEYS and self.chosen.random() < 0.3
        prefix = "" if is_upward else self.prefix
        return f"{prefix}/{text}".strip("/").encode()

    def open(self, peer: FakePeer | None = None) -> None:
        uid = self.chosen.choice([1000, 1000, 1001, 0])
        self.peers.append(self.kernel.connect(uid))
        self.subscribe(self.peers[-1])

    def close(self, peer: FakePeer) -> None:
        peer.close()

    def publish(self, peer: FakePeer) -> None:
        other = self.chosen.choice(self.peers)
        for _ in range(self.chosen.choice([1, 1, 3])):
            key = self.text(other, KEYS, SECRET_KEYS)
            peer.send(publish(key, b"x" * self.chosen.choice([0, 90])))

    def subscribe(self, peer: FakePeer) -> None:
        if self.prefix and peer.wire.credentials.uid == 0:
            peer.send(b"SUB !/cred/")
        peer.send(b"SUB " + self.text(peer, PATTERNS, SECRETS))

    def unsubscribe(self, peer: FakePeer) -> None:
        if not peer.wire.closed:
            held = list(peer.client.patterns)
            peer.send(b"UNSUB " + self.chosen.choice(held or [b"q"]))

    def control(self, peer: FakePeer) -> None:
        peer.send(b"CMSG " + self.chosen.choice([*sbus.CHOICES]))

    def squeeze(self, peer: FakePeer) -> None:
        """Let the kernel refuse what is for a client, or let it in again."""
        peer.wire.room = self.chosen.choice([None, 1, 3, 8])
        peer.wire.deaf = self.chosen.random() < 0.1

    def read(self, peer: FakePeer) -> None:
        peer.read(self.chosen.randint(0, len(peer.wire.taken)))


def random_trace(path: Path, chosen: random.Random) -> None:
    """Write a trace of some runs."""
    for _ in range(chosen.choice([1, 1, 2])):
        RandomBus(path, chosen).run(chosen.choice([30, 300]))


def spoil(path: Path, chosen: random.Random) -> None:
    """Write something into a trace that no server in order has written."""
    lines = path.read_text("latin-1").splitlines()
    events: list[Event] = list(map(json.loads, filter(None, lines)))
    for _ in range(chosen.choice([1, 1, 2, 5])):
        spoil_once(events, chosen)
    if chosen.random() < 0.6:
        n = 0
        for event in events:
            n = 1 if event["ev"] == "start" else n + 1
            event["n"] = n
    is_plain = chosen.random() < 0.7
    separators = (",", ":") if is_plain else (", ", ": ")
    lines = [json.dumps(event, separators=separators) for event in events]
    if chosen.random() < 0.2:
        at = chosen.randrange(len(lines))
        lines.insert(at, chosen.choice(["", "{", '{"n":7', "[]", "é" * 99]))
    if chosen.random() < 0.1:
        lines[chosen.randrange(len(lines))] = '{"n":7,"ev":"send"}'
    if chosen.random() < 0.1:  # a number that JSON does not have
        at = chosen.randrange(len(lines))
        lines[at] = lines[at].replace('":', '":0', chosen.choice([1, 4]))
    text = "\n".join(lines) + chosen.choice(["\n", "\n", "\n{"])
    path.write_text(text, "utf-8")


def spoil_once(events: list[Event], chosen: random.Random) -> None:
    """Change, move, remove, repeat or add an event."""
    at = chosen.randrange(len(events))
    kinds = chosen.choice([("send",), ("msg",), ("drop",), RARE, RARE, ENDS])
    candidates = [i for i, event in enumerate(events) if event["ev"] in kinds]
    if candidates:
        at = chosen.choice(candidates)
    event, other = events[at], chosen.choice(events)
    acts = ["remove", "repeat", "move", "swap", "give", "add", ""]
    act = chosen.choice([*acts, "n", "c", "m"])
    if act == "remove":
        del events[at]
    elif act == "repeat":
        events.insert(chosen.randint(0, len(events)), dict(event))
    elif act == "move":
        place = at + chosen.choice([-100, -20, -3, -1, 1, 2, 10, 100])
        events.insert(max(0, place), events.pop(at))
    elif act == "swap" and event["ev"] == "send":
        sends = [line for line in events if line["ev"] == "send"]
        same = [send for send in sends if send["c"] == event["c"]]
        other = chosen.choice(same)
        event["m"], other["m"] = other["m"], event["m"]
    elif act == "give" and event["ev"] == "msg":
        c = chosen.choice([event["c"], other.get("c", 1)])
        extra = {"n": 1, "t": 1, "ev": "send", "m": event["m"], "c": c}
        events.insert(at + chosen.choice([1, 3, 30]), extra)
    elif act == "add":
        extra = {"n": 1, "t": 1, "c": other.get("c", 1)}
        events.insert(at, extra | chosen.choice(EXTRAS))
    elif act in ("n", "c", "m"):
        if act in event:
            values = [other.get(act, 1), event[act] - 1, 0, 10**15]
            event[act] = chosen.choice(values)
    elif event["ev"] == "send":
        reason = chosen.choice(["soft/discard", "hard/discard", "deaf", "x"])
        events[at] = {**event, "ev": "drop", "reason": reason}
    elif event["ev"] == "msg":
        values = [{"size": -1}, {"key": "a/1"}, {"key": "\u1234"}]
        event.update(chosen.choice(values))
    elif event["ev"] == "drop":
        events[at] = {**event, "ev": "send"}
    else:
        event.update(chosen.choice([{"pattern": "a/"}, {"key": "echo/off"}]))


EXTRAS: tuple[Event, ...] = (
    {"ev": "ctl", "key": "echo/off"},
    {"ev": "sub", "pattern": "a/"},
    {"ev": "open", "gid": 100, "uid": 1000, "pid": 1},
    {"ev": "close"},
)
ENDS = ("start", "stop")
RARE = ("open", "close", "sub", "unsub", "ctl", *ENDS)
