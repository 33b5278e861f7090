"""A walk of random conversations with a server: made, run, shrunk, printed."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from model import CHOICES

from .conversation import Outcome, perform
from .examples import Conversation, parse_step
from .kit import received
from .random_writer import IDS, PIDS, WITNESS, Decisions, Operation, write
from .server import ServerProcess, busy_time, delayed_seconds

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
    *[{"max-backlog": size} for size in (270, 540, 1100)],
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
    **{"shut": 2, "deaf": 2, "burst": 5, "stir": 30},
}
LOT = 3  # conversations with the same options
LENGTHS = (4, 12, 24)
SHRINK_SECONDS = 10.0
FAILURES_IF_SURE = 2  # on fresh servers, after the first
TRIES_MAX = 5  # for these
DELAYED_MAX = 3  # failures of which nobody knows; then the walk ends
DELAY_SECONDS_MAX = 1.0  # of a try; else a block time may have ended in it
CONVERSATIONS_MIN = 100  # fewer are too few for a verdict
RULES_MAX = 6  # that are named
MESSAGE = re.compile(r"MSG .*?\\0(\d+)")  # in a line, with its number
# Lines that may matter to a server, and do not to the model
QUIET = r"[A-Z] > CMSG n", rf"{WITNESS} .*"


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
        # Seeds of failures that came once, or again only when the kit waited
        self.once: list[str] = []
        self.delayed: list[str] = []
        self._choices = choices
        self._options: dict[str, Any] = {}  # of the server
        self._is_ready = False  # to hold a conversation

    def failures(
        self, seconds: float = math.inf, count: float = math.inf
    ) -> Iterator[Found]:
        """Yield failures of so many seconds or conversations."""
        if not self.server.room:  # not learned yet
            self.server.start()
            self.server.learn_room()
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.count < count and not received:
            if len(self.delayed) == DELAYED_MAX:
                break
            seed = f"{self.seed}/{self.count}"
            lot = self.count // LOT
            options = self._choices[lot % len(self._choices)]
            self._is_ready &= options == self._options
            self._options = options
            self.count += 1
            operations = Maker(seed, self._options).operations()
            if not self._hold(self._lines(operations)).wrong:
                continue
            is_sure = self._is_sure(self._lines(operations))
            if is_sure:
                yield self._shortest(seed, operations)
            else:
                (self.delayed if is_sure is None else self.once).append(seed)

    def _lines(self, operations: list[Operation]) -> list[str]:
        """Return the lines that operations have, as the model says."""
        return write(operations, self._options).lines

    def _hold(self, lines: list[str]) -> Outcome:
        """Hold a conversation; after a failure the server is a fresh one."""
        if not self._is_ready:
            self.server.start("", *words_of(self._options))
            with contextlib.suppress(OSError):  # other users may connect
                os.chmod(self.server.path, 0o777)
        steps = tuple(map(parse_step, lines))
        outcome = perform(self.server, Conversation("random", (), steps))
        self._is_ready = not outcome.wrong
        return outcome

    def _is_sure(self, lines: list[str]) -> bool | None:
        """Return whether a failure comes again, on fresh servers.

        They have more time.  One pass is enough for no.  If failures came
        only while the kit waited for a processor, nobody knows.
        """
        failures = 0
        for _ in range(TRIES_MAX):
            self._is_ready = False
            before = delayed_seconds()
            with self.server.patience(3):
                if not self._hold(lines).wrong:
                    return False
            failures += delayed_seconds() - before < DELAY_SECONDS_MAX
            if failures == FAILURES_IF_SURE:
                return True
        return None

    def _shortest(self, seed: str, operations: list[Operation]) -> Found:
        """Return the shortest failure that is found in some seconds."""

        def fails(fewer: list[Operation]) -> bool:
            in_time = busy_time() < end
            return in_time and bool(self._hold(self._lines(fewer)).wrong)

        end = busy_time() + SHRINK_SECONDS
        shorter: list[Operation] | None = operations
        while shorter:
            operations = shorter
            with self.server.patience(1 / 4):  # as much is waited for in vain
                shorter = next(filter(fails, smaller(operations)), None)
        lines = self._lines(operations)
        for quiet in QUIET:
            heard = [line for line in lines if not re.fullmatch(quiet, line)]
            if heard != lines and self._is_sure(heard):
                lines = heard

        outcome = self._hold(lines)
        rules = deciding_rules(operations, self._options, outcome)
        words = " ".join(words_of(self._options))
        start = [f"server {words}"] if words else []
        name = f"random-{seed.replace('/', '-')}"
        return Found(name, rules, [*start, *lines], outcome.wrong)


def words_of(options: dict[str, Any]) -> tuple[str, ...]:
    """Return options as words of a command."""
    words = []
    for name, value in options.items():
        text = value.decode() if isinstance(value, bytes) else str(value)
        words += [f"--{name}"] if value is True else [f"--{name}", text]
    return tuple(words)


def smaller(operations: list[Operation]) -> Iterator[list[Operation]]:
    """Yield operations without those of a client, some, or parts of one."""
    for name in {name for _, name, *_ in operations}:
        yield [operation for operation in operations if operation[1] != name]
    yield from without(operations)
    for place, (kind, name, *more) in enumerate(operations):
        before, after = operations[:place], operations[place + 1 :]
        if kind in ("burst", "fill"):
            for parts in without(more[0]):
                yield [*before, (kind, name, parts, *more[1:]), *after]
        elif kind == "publish" and more[1:] != [0, b""]:
            yield [*before, (kind, name, more[0], 0, b""), *after]


def without(parts: list[Any]) -> Iterator[list[Any]]:
    """Yield parts without a half of them, a quarter, and so on to one."""
    size = len(parts)
    while size := size // 2:
        for start in range(0, len(parts), size):
            yield parts[:start] + parts[start + size :]


def deciding_rules(
    operations: list[Operation], options: dict[str, Any], outcome: Outcome
) -> list[str]:
    """Return by which rules the model decides about what differs.

    That is the packet that should have come, or the one that came; or else
    the last of all.  The last decision comes first.
    """
    with Decisions() as decisions:
        writer = write(operations, options)
    steps = [text for text in outcome.said if not text.startswith("(")]
    numbers = MESSAGE.findall(f"{steps[-1]} {outcome.wrong}") or ["none"]
    form = re.compile(rf"MSG .*?\0({'|'.join(numbers)})(?!\d)".encode(), re.S)
    made = decisions.made
    about = {packet for packet, _ in made if form.match(packet)}
    about = about or {packet for packet, _ in made[-1:]}
    rules = [
        rule
        for packet, cited in reversed(made)
        for rule in cited
        if packet in about
    ]
    noted = re.findall(r"\[(.*?)\]", " ".join(reversed(writer.bus.log)))
    return [*dict.fromkeys([*rules, *noted, "PUB-1"])][:RULES_MAX]
