"""A walk of random conversations with a server: made, run, shrunk, printed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from model import CHOICES

from .conversation import Failure, Outcome, perform
from .examples import Conversation, parse_step
from .kit import Kit
from .random_writer import IDS, PIDS, Operation, Tally, Writer, write
from .server import ServerProcess

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
    {"max-key": 14, "max-segments": 3, "strict": True},
    {"max-packet": 60, "cred-prefix": b"!/cred/1/2/3"},
    {"user": 1001},
]
WEIGHTS = {
    **{"subscribe": 20, "unsubscribe": 8, "publish": 30, "secret": 14},
    **{"mode": 12, "ask": 4, "mistake": 3, "fill": 7, "read": 8, "close": 3},
    **{"shut": 2, "deaf": 2, "burst": 5, "stats": 3, "stir": 30},
}
LOT = 25  # conversations for each start of a server
LENGTHS = (4, 12, 24)
SHRINK_SECONDS = 20.0


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


class Walk:
    """Holds random conversations with a server."""

    def __init__(self, server: ServerProcess, seed: str) -> None:
        self.server = server
        self._kit = Kit(server, "daemon", math.inf)
        self.seed = seed
        self.count = 0  # of conversations
        self.once: list[str] = []  # failures that did not come again
        self.tally = Tally()

    def failures(self, seconds: float, signals: set[int]) -> Iterator[str]:
        """Yield failures as example blocks, for so long or up to a signal."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not signals:
            seed = f"{self.seed}/{self.count}"
            lot = f"{self.seed}/{self.count // LOT}"
            options = random.Random(lot).choice(OPTIONS)
            self._start(options, is_anew=self.count % LOT == 0)
            self.count += 1
            operations = Maker(seed, options).operations()
            with self.tally:
                writer = write(operations, options)
            if not self._run(writer).wrong:
                continue
            if block := self._shrink(seed, operations, options):
                yield block
            else:
                self.once.append(seed)
            self._kit.options = None

    def _start(self, options: dict[str, Any], is_anew: bool = True) -> None:
        """Have a server run; raise Failure if it does not."""
        if is_anew:
            self._kit.options = None
        why = self._kit.learn_room() or self._kit.prepare(words_of(options))
        if why:
            raise Failure(why)

    def _run(self, writer: Writer) -> Outcome:
        """Hold a conversation."""
        steps = tuple(map(parse_step, writer.lines))
        return perform(self.server, Conversation("random", (), steps))

    def _shrink(
        self, seed: str, operations: list[Operation], options: dict[str, Any]
    ) -> str:
        """Return the shortest failure, or nothing if it does not come again.

        From the last operation to the first, each is left out or made smaller
        if it still fails without that.  A server has more time at first.
        """
        end = time.monotonic() + SHRINK_SECONDS
        seconds = self.server.seconds_max
        self.server.seconds_max *= 3
        found = self._failure(seed, operations, options)
        self.server.seconds_max = seconds

        place = len(operations)
        while found and place and time.monotonic() < end:
            place -= 1
            for fewer in smaller(operations, place):
                if shorter := self._failure(seed, fewer, options):
                    found, operations = shorter, fewer
                    place = min(place + 1, len(fewer))
                    break
        return found

    def _failure(
        self, seed: str, operations: list[Operation], options: dict[str, Any]
    ) -> str:
        """Return how operations fail on a fresh server, if they do."""
        self._start(options)
        writer = write(operations, options)
        outcome = self._run(writer)
        return block(seed, writer, outcome) if outcome.wrong else ""


def smaller(
    operations: list[Operation], place: int
) -> Iterator[list[Operation]]:
    """Yield operations without one of them, or with a smaller one."""
    before, after = operations[:place], operations[place + 1 :]
    yield before + after
    kind, name, *more = operations[place]
    if kind in ("burst", "fill"):
        parts = more[0]
        for number in range(len(parts)):
            fewer = parts[:number] + parts[number + 1 :]
            yield [*before, (kind, name, fewer, *more[1:]), *after]
    elif kind == "publish" and more[1:] != [0, b""]:
        yield [*before, (kind, name, more[0], 0, b""), *after]


def words_of(options: dict[str, Any]) -> tuple[str, ...]:
    """Return options as words of a command."""
    words = []
    for name, value in options.items():
        text = value.decode() if isinstance(value, bytes) else str(value)
        words += [f"--{name}"] if value is True else [f"--{name}", text]
    return tuple(words)


def block(seed: str, writer: Writer, outcome: Outcome) -> str:
    """Return an example block, with the rules that decided its last step."""
    count = sum(not text.startswith("(") for text in outcome.said)
    rules = writer.rules[count - 1] if count <= len(writer.rules) else []
    tags = " ".join(f"[{rule}]" for rule in rules or ["PUB-1"])
    words = " ".join(words_of(writer.options))
    lines = [f"server {words}"] if words else []
    lines += [*writer.lines[:count], f"# {outcome.wrong}"]
    name = f"random-{seed.replace('/', '-')}"
    return "\n".join([f"```conversation {name} {tags}", *lines, "```"])
