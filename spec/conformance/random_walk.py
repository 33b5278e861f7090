"""A walk of random conversations with a server: made, run, shrunk, printed."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from model import CHOICES

from .conversation import Failure, Outcome, Talk, perform
from .examples import Conversation, parse_step
from .kit import received
from .model_bus import ModelBus
from .random_writer import (
    IDS,
    PIDS,
    Decisions,
    Operation,
    model_options,
    write,
)
from .server import ServerProcess, delayed_seconds

SEGMENTS = b"a b aa !a a! ab".split() + [b""]
WILD = b"* a* ** a*b *a a**".split()
MISTAKES = [b"SUB", b"MSG a", b"sub a", b"UNSUBa", b"CMSG", b" SUB a"]
MISTAKES += [b"\0", b"MSG\0a", b"MSG !\0", b"SUB a/!", b"SUB !/cred/"]
UNKNOWN = b"x !/cred/whoam echo/o blocking/soft Echo/off".split() + [b""]
MODES = [
    b"%b/%b" % (m.encode(), w.encode()) for m in CHOICES for w in CHOICES[m]
]
OPTIONS: list[dict[str, Any]] = [
    *[{}] * 6,
    *[{"max-backlog": size} for size in (270, 405, 540, 1100)] * 2,
    {"max-user-backlog": 400},
    {"max-bus-backlog": 540},
    {"max-patterns": 3, "max-shapes": 6, "max-bus-shapes": 12},
    {"max-user-patterns": 4, "max-user-clients": 2},
    {"max-pattern-bytes": 12, "max-user-pattern-bytes": 20},
    {"max-packet": 60, "max-key": 14, "max-segments": 3, "strict": True},
    {"cred-prefix": b"!/cred/1/2/3"},
    {"user": 1001},
]
WEIGHTS = {
    **{"subscribe": 20, "unsubscribe": 8, "publish": 30, "secret": 14},
    **{"mode": 12, "ask": 4, "mistake": 3, "fill": 7, "read": 8, "close": 3},
    **{"shut": 2, "deaf": 2, "burst": 5, "stats": 3, "stir": 30},
}
LOT = 10  # conversations for each start of a server
LENGTHS = (4, 12, 24)
SHRINK_SECONDS = 20.0
FAILURES_IF_SURE = 2  # on a fresh server, after the first
CONVERSATIONS_MIN = 100  # fewer are too few for a verdict
RULES_MAX = 6  # that are named
MESSAGE = re.compile(r"MSG .*?\\0(\d+)")  # in a line, with its number


class Maker:
    """Makes the operations of a conversation from its seed."""

    def __init__(self, seed: str, options: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        # Of half of the kinds there are many, or none
        self.weights = {
            k: w * choice([0, 1, 1, 4]) for k, w in WEIGHTS.items()
        }
        if "backlog" in " ".join(options):
            self.weights |= {"fill": 20, "stir": 60}
        elif choice([True, False]):
            self.weights |= {"fill": 0, "stir": 0}
        self.weights["subscribe"] += 5
        self.weights["publish"] += 8
        self.names = self.random.sample("ABCDEFI", choice([2, 3, 4, 6]))
        self.segments = self.random.sample(SEGMENTS, choice([1, 2, 3]))
        self.wild = self.random.sample(WILD, 3)
        self.sizes = choice([[0], [0, 1, 5, 40], [0, 3, 3000]])
        # What nobody holds is unsubscribed where that has one end [UNSUB-2]
        others = [b"UNSUB "] * options.get("strict", 0)
        self.words = [b"SUB "] * 9 + others
        self.prefix: bytes = options.get("cred-prefix", b"")

    def operations(self) -> list[Operation]:
        """Return the operations."""
        return [self.operation() for _ in range(self.random.choice(LENGTHS))]

    def operation(self) -> Operation:
        """Return one operation."""
        draw = self.random
        kind = draw.choices([*self.weights], [*self.weights.values()])[0]
        name, tail = draw.choice(self.names), self.tail()
        is_secret = kind == "secret"
        if is_secret:
            kind = draw.choice(["subscribe", "publish"])
        if kind in ("subscribe", "publish"):
            is_pattern = kind == "subscribe"
            text = self.text(is_pattern)
            if is_secret:
                whose = name if is_pattern else draw.choice(self.names)
                text = self.secret(whose, text)
            if is_pattern:
                return "send", name, draw.choice(self.words) + text + tail
            return self.message(name, text)
        if kind == "mode":
            return "send", name, b"CMSG " + draw.choice(MODES) + tail
        if kind == "ask":
            keys = [b"!/cred/whoami"] * 6 + UNKNOWN
            return "send", name, b"CMSG " + draw.choice(keys) + tail
        if kind == "mistake":
            return "send", name, draw.choice(MISTAKES)
        if kind in ("close", "shut"):
            return "leave", name, kind
        if kind in ("unsubscribe", "stir"):
            return kind, name, draw.random()
        if kind == "burst":
            texts = [self.text(False) for _ in range(draw.choice([1, 4, 90]))]
            end = draw.choice(["", "close", "shut"])
            messages = [self.message(name, text) for text in texts]
            return kind, name, messages, end
        if kind == "fill":  # mostly of one that hears something, in some mode
            modes = draw.sample(MODES[:-2], draw.choice([0, 1, 1, 2]))
            modes += [b"blocking/soft/block"] * draw.choice([0, 0, 1])
            hears = [b"SUB k/"] * draw.choice([0, 1, 1, 1])
            return kind, name, [*hears, *(b"CMSG " + mode for mode in modes)]
        return kind, name

    def message(self, name: str, key: bytes) -> Operation:
        """Return the operation that publishes."""
        size = self.random.choice(self.sizes)
        return "publish", name, key, size, self.tail()

    def tail(self) -> bytes:
        """Return what follows a text, behind a NUL byte or not at all."""
        return self.random.choice([b"", b"", b"", b"\0", b"\0x", b"\0x\0\0y"])

    def text(self, is_pattern: bool) -> bytes:
        """Return a key or pattern, of the kind that the witness hears."""
        pool = self.segments + (self.wild if is_pattern else [])
        count = self.random.choice([0, 1, 1, 2, 3])
        segments = [self.random.choice(pool) for _ in range(count)]
        fills = self.weights["fill"] or self.weights["stir"]  # see Wire.fill
        if is_pattern and not fills and self.random.random() < 0.2:
            return self.random.choice([b"", b"/".join([*segments, b"*"])])
        end = self.random.choice([[], [], [], [b""]])
        return b"/".join([b"k", *(segments or [b""]), *end])

    def secret(self, name: str, rest: bytes) -> bytes:
        """Return a secret key or pattern of a client, or nearly so."""
        draw, fields = self.random, []
        for number in (*IDS[name], PIDS[name]):
            text, other = b"%d" % number, b"%d" % draw.choice([1001, 10])
            ways = [text] * 6 + [b"", b"", b"0" + text, text + b"0", other]
            fields.append(draw.choice(ways))
        segments = [b"!/cred", *fields, *draw.choice([[rest]] * 9 + [[]])]
        if self.prefix and draw.random() < 0.85:
            segments.insert(0, self.prefix)
        if draw.random() < 0.1:
            segments.append(b"!/cred/1//2/x")
        return b"/".join(segments)


class Found(NamedTuple):
    """A conversation that a server holds otherwise than the model."""

    name: str
    rules: list[str]  # by which the model has decided what differs
    lines: list[str]
    wrong: str

    def block(self) -> str:
        """Return it as an example."""
        tags = " ".join(f"[{rule}]" for rule in self.rules)
        head = f"```conversation {self.name} {tags}"
        return "\n".join([head, *self.lines, f"# {self.wrong}", "```"])


class Walk:
    """Holds random conversations with a server."""

    def __init__(
        self,
        server: ServerProcess,
        seed: str,
        choices: Sequence[dict[str, Any]] = OPTIONS,
    ) -> None:
        self.server = server
        self.seed = seed
        self.count = 0  # of conversations
        self.once: list[str] = []  # failures that did not come again
        self._choices = choices
        self._options: dict[str, Any] = {}  # of the server
        self._is_ready = False  # to hold a conversation

    def failures(
        self, seconds: float = math.inf, count: float = math.inf
    ) -> Iterator[Found]:
        """Yield failures, for so long, or so often, or up to a signal."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.count < count and not received:
            seed = f"{self.seed}/{self.count}"
            if self.count % LOT == 0:
                lot = self.count // LOT
                self._options = self._choices[lot % len(self._choices)]
                self._is_ready = False
            self.count += 1
            operations = Maker(seed, self._options).operations()
            lines = write(operations, self._options).lines
            if not self._goes_wrong(lines):
                continue
            if found := self._shrink(seed, lines):
                yield found
            else:
                self.once.append(seed)

    def _hold(self, lines: list[str]) -> Outcome:
        """Hold a conversation; after a failure the server is a fresh one."""
        if not self.server.room:
            self.server.start()
            self.server.learn_room()
        if not self._is_ready:
            self.server.start("", *words_of(self._options))
            with contextlib.suppress(OSError):  # other users may connect
                os.chmod(self.server.path, 0o777)
        outcome = perform(self.server, conversation_of(lines))
        self._is_ready = not outcome.wrong
        return outcome

    def _goes_wrong(self, lines: list[str]) -> bool:
        """Return whether a conversation goes wrong."""
        return bool(self._hold(lines).wrong)

    def _hold_again(self, lines: list[str]) -> Outcome:
        """Hold a conversation with a fresh server that has more time."""
        self._is_ready = False
        with self.server.patience(3):
            return self._hold(lines)

    def _shrink(self, seed: str, lines: list[str]) -> Found | None:
        """Return the shortest failure, or nothing if it does not come again.

        Lines go while the server still fails, and the model agrees with what
        is left.
        """

        def is_found(fewer: list[str]) -> bool:
            predicted = perform(self._model(), conversation_of(fewer))
            return not predicted.wrong and self._goes_wrong(fewer)

        for _ in range(FAILURES_IF_SURE):
            outcome = self._hold_again(lines)
            if not outcome.wrong:
                return None
        end = busy_time() + SHRINK_SECONDS
        with self.server.patience(1 / 4):  # as much is waited for in vain
            shortest = fewest(lines, is_found, end)
        again = self._hold_again(shortest)
        if again.wrong:
            lines, outcome = shortest, again
        words = " ".join(words_of(self._options))
        rules = deciding_rules(self._model(), lines, outcome)
        start = [f"server {words}"] if words else []
        name = f"random-{seed.replace('/', '-')}"
        return Found(name, rules, [*start, *lines], outcome.wrong)

    def _model(self) -> ModelBus:
        """Return a model with the server's options."""
        return ModelBus(**model_options(self._options))


def words_of(options: dict[str, Any]) -> tuple[str, ...]:
    """Return options as words of a command."""
    words = []
    for name, value in options.items():
        text = value.decode() if isinstance(value, bytes) else str(value)
        words += [f"--{name}"] if value is True else [f"--{name}", text]
    return tuple(words)


def conversation_of(lines: list[str]) -> Conversation:
    """Return the conversation that has some lines."""
    return Conversation("random", (), tuple(map(parse_step, lines)))


def busy_time() -> float:
    """Return the time, without that in which we had no processor."""
    return time.monotonic() - delayed_seconds()


def fewest(
    lines: list[str], is_found: Callable[[list[str]], bool], end: float
) -> list[str]:
    """Return lines of which nothing can be left out: see gaps."""
    kept = dict(enumerate(lines))
    size = 0
    while size != len(kept):
        size = len(kept)
        for gap in gaps(kept):
            fewer = {n: line for n, line in kept.items() if n not in gap}
            if busy_time() > end:
                break
            if 0 < len(fewer) < len(kept) and is_found([*fewer.values()]):
                kept = fewer
    return [*kept.values()]


def gaps(lines: dict[int, str]) -> Iterator[Container[int]]:
    """Yield the numbers of lines that may go together.

    They are those of a client, of half of the messages and so on to one, a
    single line, and a pair.
    """
    for name in {line[0] for line in lines.values()}:
        yield {n for n, line in lines.items() if line[0] == name}
    about: dict[str, set[int]] = defaultdict(set)
    for number, line in lines.items():
        for message in MESSAGE.findall(line):
            about[message].add(number)
    messages, size = [*about.values()], len(about)
    while size:
        for start in range(0, len(messages), size):
            yield set().union(*messages[start : start + size])
        size //= 2
    for count in (1, 2):
        yield from combinations(lines, count)


def deciding_rules(
    bus: ModelBus, lines: list[str], outcome: Outcome
) -> list[str]:
    """Return by which rules the model decides about what differs.

    That is the packet that should have come, or the one that came; or else
    what the client of the step sent last.  The last decision comes first.
    """
    decisions = Decisions()
    with decisions, contextlib.suppress(Failure):
        Talk(bus).hold(conversation_of(lines))
    steps = [text for text in outcome.said if not text.startswith("(")]
    name = parse_step(steps[-1]).client
    mine = [c.client.number for c in bus.connections if c.name == name]
    made = [each for each in decisions.made if each[0] in mine[-1:]]

    numbers = MESSAGE.findall(f"{steps[-1]} {outcome.wrong}") or ["none"]
    form = re.compile(rf"MSG .*?\0({'|'.join(numbers)})(?!\d)".encode(), re.S)
    about = {packet for _, packet, _ in made if form.match(packet)}
    about = about or {packet for _, packet, _ in made[-1:]}
    rules = [
        rule
        for _, packet, cited in reversed(made)
        for rule in cited
        if packet in about or not packet
    ]
    noted = re.findall(r"\[(.*?)\]", " ".join(reversed(bus.model.log)))
    return [*dict.fromkeys([*rules, *noted, "PUB-1"])][:RULES_MAX]
