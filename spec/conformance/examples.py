"""The examples of the specification: match tables, packets, conversations."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NamedTuple, Union

from .rules import chapters, examples_of


class Part(NamedTuple):
    """A piece of a text: bytes, so many times, or a variable."""

    text: bytes
    times: int = 1
    variable: str = ""


Text = tuple[Part, ...]
SHOWN_BYTES_MAX = 200  # of a packet in a report
SHOWN_START_BYTES = 160  # of these
ESCAPE = re.compile(rb'\\(x[0-9a-f]{2}|[0n\\"])')
PIECE = re.compile(
    r'((?:\\x[0-9a-f]{2}|\\[0n\\"]|[^\\{}])+)|\{([^{}]+)\}', re.S
)
ESCAPED = {b"0": b"\0", b"n": b"\n", b"\\": b"\\", b'"': b'"'}
MEMBER = r"( [a-z_0-9.]+=([0-9]+|null|\[\]))"
FIELD = re.compile(r'((?:\w+=)?"(?:\\.|[^"\\])*"|\S+)\s*')


def parse_text(source: str) -> Text:
    """Return the parts of a text; raise ValueError if it is none."""
    if source.startswith('"') and source.endswith('"') and len(source) > 1:
        source = source[1:-1]
    if PIECE.sub("", source):
        raise ValueError(f"not a text: {source!r}")
    return tuple(parse_piece(*piece) for piece in PIECE.findall(source))


def parse_piece(plain: str, braced: str) -> Part:
    """Return one part of a text."""
    if plain:
        return Part(ESCAPE.sub(unescape, plain.encode("utf-8")))
    bulk, star, times = braced.rpartition("*")
    if star:
        return Part(bulk.encode("utf-8"), int(times))
    if not re.fullmatch(rf"any|\w+\.(gid|uid|pid)|json{MEMBER}+", braced):
        raise ValueError(f"not a variable: {braced!r}")
    return Part(b"", 1, braced)


def unescape(match: re.Match[bytes]) -> bytes:
    """Return the byte that stands for itself behind a backslash."""
    code = match[1]
    return ESCAPED.get(code) or bytes.fromhex(code[1:].decode("ascii"))


def parse_bytes(source: str) -> bytes:
    """Return the bytes of a text without variables."""
    parts = parse_text(source)
    if any(part.variable for part in parts):
        raise ValueError(f"no variable may stand in {source!r}")
    return b"".join(part.text * part.times for part in parts)


class Step(NamedTuple):
    """One line of a conversation."""

    client: str  # empty for a step of no client
    verb: str
    argument: str
    text: Text = ()  # the argument of '>', '>>' and '<'

    def __str__(self) -> str:
        return " ".join(filter(None, self[:3]))


class Conversation(NamedTuple):
    """What clients and a server say to each other."""

    name: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...]
    options: tuple[str, ...] = ()  # of the server

    def conversation(self) -> Conversation:
        """Return what shows the rules."""
        return self


class MatchCase(NamedTuple):
    """A pattern, a key, and whether the one selects the other."""

    name: str
    rules: tuple[str, ...]
    pattern: bytes
    key: bytes
    selected: bool

    def conversation(self) -> Conversation:
        """Return what shows the rules: A subscribes, and B publishes."""
        message = b"MSG " + self.key + b"\0"
        steps = [send("A", b"SUB " + self.pattern), send("B", message)]
        if self.selected:
            steps.append(hear("A", message))
        return Conversation(self.name, self.rules, tuple(steps))


PACKET_KINDS = ("subscribe", "unsubscribe", "publish", "control", "invalid")


class PacketCase(NamedTuple):
    """A packet, its kind or 'invalid', its key or pattern, its payload."""

    name: str
    rules: tuple[str, ...]
    packet: bytes
    packet_kind: str
    key: bytes
    payload: bytes

    def conversation(self) -> Conversation:
        """Return what shows the rules: A sends it, and B helps."""
        message = b"MSG " + self.key + b"\0probe"
        sent, probe = send("A", self.packet), send("B", message)
        listen = send("B", b"SUB ")
        steps = (
            [sent, probe, hear("A", message)],
            [send("A", b"SUB " + self.key), sent, probe],
            [listen, sent, hear("B", self.packet)],
            [listen, sent, Step("A", "<", "no packet")],
            [listen, sent, Step("A", "<", "end")],
        )[PACKET_KINDS.index(self.packet_kind)]
        return Conversation(self.name, self.rules, tuple(steps))


Case = Union[MatchCase, PacketCase, Conversation]


def escape(text: bytes) -> str:
    """Return bytes as they stand in a block; of many, both ends."""
    if len(text) > SHOWN_BYTES_MAX:
        shown = f"{escape(text[:SHOWN_START_BYTES])}...{escape(text[-40:])}"
        return f"{shown} ({len(text)} bytes)"
    shown = text.decode("latin-1").encode("unicode_escape").decode("ascii")
    shown = shown.replace("\\x00", "\\0")
    return shown if shown and shown == shown.strip() else f'"{shown}"'


def send(client: str, packet: bytes) -> Step:
    """Return the step in which a client sends a packet."""
    return Step(client, ">", escape(packet), (Part(packet),))


def hear(client: str, packet: bytes) -> Step:
    """Return the step in which a client receives a packet."""
    return Step(client, "<", escape(packet), (Part(packet),))


KINDS = ("match", "packet", "conversation", "client")


class Block(NamedTuple):
    """A fenced example: in a chapter, or in the file of its examples."""

    kind: str
    name: str
    rules: tuple[str, ...]
    lines: tuple[str, ...]
    place: str  # file and line


FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^(```$|\Z)", re.M | re.S)
HEAD = re.compile(r" ([a-z0-9-]+)((?: \[[A-Z]+-\d+\])+)")
CITED = re.compile(r"\[([A-Z]+-\d+)\]")


def read_blocks() -> Iterator[Block]:
    """Return all examples, each chapter's own first; or raise ValueError."""
    for chapter in chapters():
        for file in filter(Path.exists, (chapter, examples_of(chapter))):
            name = f"{file.parent.name}/{file.name}"
            yield from blocks_of(file.read_text("utf-8"), name)


def blocks_of(text: str, file: str) -> Iterator[Block]:
    """Return the examples in the text of a file.

    Raises: ValueError at a block without its end, or with a wrong head; what
    has the id of a rule in its head is to be an example.
    """
    for fence in FENCE.finditer(text):
        kind, head, body, end = fence.groups()
        if kind not in KINDS and not CITED.search(head):
            continue
        line = text.count("\n", 0, fence.start()) + 1
        place = f"{file}, line {line}"
        parts = HEAD.fullmatch(head)
        if kind not in KINDS or not parts:
            form = f"```KIND a-name [SUB-1], KIND being {', '.join(KINDS)}"
            raise ValueError(f"{place}: ```{kind}{head} is not {form}")
        if not end:
            raise ValueError(f"{place}: no line ``` ends this block")
        kept = tuple(n for n in body.splitlines() if n.strip() and n[0] != "#")
        rules = tuple(CITED.findall(parts[2]))
        yield Block(kind, parts[1], rules, kept, place)


@functools.cache
def read_cases(blocks: tuple[Block, ...] = ()) -> tuple[Case, ...]:
    """Return examples for servers; raise ValueError at a malformed one.

    They are those of the specification, if no blocks are given.
    """
    cases: list[Case] = []
    for block in blocks or read_blocks():
        if block.kind not in PARSERS:
            continue
        try:
            cases += PARSERS[block.kind](block)
        except (ValueError, KeyError, AssertionError) as error:
            message = f"{block.place}: {block.name}: {error}"
            raise ValueError(message) from error
    return tuple(cases)


def match_cases(block: Block) -> Iterator[MatchCase]:
    """Return the cases of a match block: pattern, key, yes or no."""
    for row, line in enumerate(block.lines, 1):
        for suffix, plain in each_byte(line):
            pattern, key, answer, *more = *FIELD.findall(plain), "", "", ""
            if answer not in ("yes", "no") or any(more):
                raise ValueError(f"not a pattern, a key, yes or no: {line!r}")
            yield MatchCase(
                f"{block.name}/{row}{suffix}",
                block.rules,
                parse_bytes(pattern),
                parse_bytes(key),
                answer == "yes",
            )


def each_byte(line: str) -> Iterator[tuple[str, str]]:
    """Return a line once for each byte if it asks for that, and names."""
    if "{byte}" not in line:
        yield "", line
        return
    for byte in sorted(set(range(1, 256)) - set(b"*")):
        yield f"/{byte:02x}", line.replace("{byte}", f"\\x{byte:02x}")


def packet_cases(block: Block) -> Iterator[PacketCase]:
    """Return the cases of a packet block.

    A row has a packet, its kind, and key=... and payload=..., or the rule
    that it breaks.
    """
    for row, line in enumerate(block.lines, 1):
        packet, kind, *more = *FIELD.findall(line), ""
        if kind not in PACKET_KINDS:
            kinds = ", ".join(PACKET_KINDS)
            raise ValueError(f"not a packet and its kind, {kinds}: {line!r}")
        rules = tuple(CITED.findall(" ".join(more))) or block.rules
        fields = dict(text.split("=", 1) for text in more if "=" in text)
        yield PacketCase(
            f"{block.name}/{row}",
            rules,
            parse_bytes(packet),
            kind,
            parse_bytes(fields.get("key", "")),
            parse_bytes(fields.get("payload", "")),
        )


EXPECTATIONS = ("nothing", "end", "no packet")  # or a packet
STEP = re.compile(
    r"(?:([A-Z]) (>>?|<|close|shut|deaf|process|fill|read|room)|"
    r"(server|wait))"
    r"(?: (.+))?"
)
ARGUMENTS = {  # of some verbs; others have none
    **dict.fromkeys((">", ">>", "<", "server"), ".+"),
    **dict.fromkeys(("read", "room"), r"\d+"),
    "wait": r"\d+(\.\d+)?",
    "process": r"((gid|uid|pid)=\d+ ?)*",
}


def conversations(block: Block) -> Iterator[Conversation]:
    """Return the one case of a conversation block."""
    lines = (plain for line in block.lines for plain in each_number(line))
    steps = [parse_step(line) for line in lines]
    options = " ".join(s.argument for s in steps if s.verb == "server")
    spoken = tuple(step for step in steps if step.verb != "server")
    yield Conversation(block.name, block.rules, spoken, tuple(options.split()))


def each_number(line: str) -> Iterator[str]:
    """Return a line once for each number if it asks for that."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", line)
    if not numbers:
        yield line
        return
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        yield line.replace(numbers[0], str(number))


def parse_step(line: str) -> Step:
    """Return a line's step; raise ValueError if it stands for none."""
    if match := STEP.fullmatch(line):
        client, verb, other, argument = match.groups("")
        if re.fullmatch(ARGUMENTS.get(verb or other, ""), argument):
            is_text = verb in (">", ">>", "<") and argument not in EXPECTATIONS
            text = parse_text(argument) if is_text else ()
            return Step(client, verb or other, argument, text)
    raise ValueError(f"not a step: {line!r}")


PARSERS: dict[str, Callable[[Block], Iterator[Case]]] = {
    "match": match_cases,
    "packet": packet_cases,
    "conversation": conversations,
}
