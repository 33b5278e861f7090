"""Conversations at random, written as the model says what happens.

An operation is a tuple: its kind, the name of a client, and more.  A writer
turns operations into the steps of a conversation; what the specification
leaves open is left out.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import model
from model import CHOICES, Bus, Client, Unclear, deafen

from .examples import escape

Operation = tuple[Any, ...]
WITNESS = "L"  # it hears all messages, and so tells that one was handled
NUMBER = 10 ** len(str(os.getpid()))
ROOT, USER = (0, 0), (1001, 1001)  # gid and uid
IDS = {"A": ROOT, "B": ROOT, "C": USER, "D": (1002, 1002), "E": USER}
IDS |= {"F": (65534, 1001), "I": (1001, 65534), "L": ROOT}
if os.geteuid() != 0:
    IDS = dict.fromkeys(IDS, (os.getegid(), os.geteuid()))
IDS |= {chr(ord(name) + 13): IDS[name] for name in "ABCDEFI"}  # come later
# Nobody knows a process id before; these have as many digits as one
PIDS = {name: NUMBER - ord(name) for name in IDS}
NAMES = {b"%d" % pid: f"{{{name}.pid}}" for name, pid in PIDS.items()}
SHOWN_OTHERWISE = b"|".join([*NAMES, b"x{30,}"])
PIECE = re.compile(b"(?:(?!%b).)+|%b" % ((SHOWN_OTHERWISE,) * 2), re.S)
INBOX_BYTES_MAX = 40_000  # of which the kernel surely keeps all
LARGE_BYTES = 50_000
# In a line of the model, which does not only compare with it
CITED = re.compile(r'(?:\[|(?<!= )(?<!"", )")([A-Z]+-\d+)[\]"]')


def shown(packet: bytes) -> str:
    """Return a packet as it stands in an example."""
    text = "".join(map(shown_piece, PIECE.findall(packet)))
    return text if text and text == text.strip() else f'"{text}"'


def shown_piece(piece: bytes) -> str:
    """Return a process id, a run of x or other bytes as they stand there."""
    if piece in NAMES:
        return NAMES[piece]
    if piece.startswith(b"x" * 30):
        return f"{{x*{len(piece)}}}"
    return escape(piece).strip('"')


class Decisions:
    """By which rules the model decides, and about which packets."""

    def __init__(self) -> None:
        lines = Path(model.__file__).read_text("utf-8").splitlines()
        self._cited = [[], *map(CITED.findall, lines)]
        self.made: list[tuple[bytes, list[str]]] = []

    def rules(self) -> Counter[str]:
        """Return how often each rule has decided something."""
        return Counter(rule for _, cited in self.made for rule in cited)

    def __enter__(self) -> Decisions:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != model.__file__:
            return None
        if event == "line" and (cited := self._cited[frame.f_lineno]):
            self.made.append((packet_of(frame), cited))
        return self._trace


def packet_of(frame: FrameType | None) -> bytes:
    """Return the packet that a function of the model is about, if any."""
    packet = b""
    while frame and frame.f_code.co_filename == model.__file__:
        packet = frame.f_locals.get("packet", packet)
        frame = frame.f_back
    return packet


class Left(Unclear):
    """The rest of an operation is left out."""


class Writer:
    """Writes a conversation."""

    def __init__(self, options: dict[str, Any]) -> None:
        names = {name.replace("-", "_"): options[name] for name in options}
        names["users"] = (names.pop("user"),) if "user" in names else ()
        self.bus = Bus(owner=os.geteuid(), **names)
        self.options = options
        shared = {"max-user-backlog", "max-bus-backlog"}
        words = " ".join(options)
        self.is_sized = bool(re.search("backlog|bytes|key|packet", words))
        self.names_process = False  # whose number has some digits
        self.is_shared = not shared.isdisjoint(options)
        self.lines: list[str] = []
        self.clients: dict[str, Client] = {}
        self.over: set[str] = set()  # whose end is written
        self.filled: set[str] = set()  # the kernel takes nothing for them
        self.were_filled: set[str] = (
            set()
        )  # how far they have read is not known
        self.count = 0  # of messages
        self.send(WITNESS, b"SUB k/")

    # ---- Lines

    def add(self, name: str, words: str) -> None:
        """Write a line."""
        self.lines.append(f"{name} {words}".strip())

    def say(self, name: str, verb: str, packet: bytes) -> None:
        """Write that a client sends or receives; {any} is a lost number."""
        text = shown(packet)
        self.names_process |= ".pid}" in text
        if self.names_process and self.is_sized:
            raise Unclear("nobody knows how many digits a number has")
        for other in re.findall(r"\{(\w)\.pid\}", text):
            if other not in self.clients or other in self.over:
                text = text.replace(f"{{{other}.pid}}", "{any}")
        if verb != "<" and "{any}" in text:
            raise Unclear("nobody knows that number")
        self.add(name, f"{verb} {text}")

    def client(self, name: str) -> Client:
        """Return a client that can act; it connects at its first step."""
        if name in self.clients:
            client = self.clients[name]
            if client.end or client.has_ended:
                raise Unclear("it has left, or is about to")
            return client
        gid, uid = IDS[name]
        ids = f" gid={gid} uid={uid}" if os.geteuid() == 0 else ""
        if name != WITNESS:  # which is the kit's own process
            self.add(name, f"process{ids}")
        client = self.bus.connect(uid, gid, PIDS[name])
        self.clients[name] = client
        if client.end:
            self.bus.run()
            self.over.add(name)
            self.add(name, "< end")
            raise Left
        self.say(name, ">", b"CMSG n")  # it is let in before others go on
        return client

    def paused(self) -> set[str]:
        """Return the names of the clients that are paused."""
        clients = self.clients.items()
        return {name for name, client in clients if self.bus.paused_by(client)}

    def others_wait(self, client: Client) -> bool:
        """Return whether another client has sent what is not handled."""
        return any(
            c.sent for c in self.bus.clients.values() if c is not client
        )

    def flush(self, name: str) -> None:
        """Write all that a client has received."""
        client = self.clients[name]
        for packet in client.received:
            self.say(name, "<", packet)
        client.received.clear()

    def run(self, name: str, packet: bytes) -> None:
        """Have the model go on, and write a step and what follows it."""
        paused, witness = self.paused(), self.clients.get(WITNESS)
        before = len(witness.received) if witness else 0
        self.bus.run()
        is_told = bool(witness and len(witness.received) > before)
        client = self.clients[name]
        is_open = not (self.bus.paused_by(client) or client.is_deaf)
        if client.end and name in self.filled:
            is_open = False
        if not is_open and not is_told:
            raise Unclear("nobody tells when it is handled")
        if self.paused() - paused and not is_told:
            raise Unclear("nobody tells when it is paused")
        self.say(name, ">" if is_open else ">>", packet)
        # Packets that are read together reach one receiver after the other
        if not is_open or self.is_shared:
            self.flush(WITNESS)
        self.follow(paused)

    def follow(self, paused: set[str]) -> None:
        """Write who is disconnected, and have those speak who go on."""
        for name, client in self.clients.items():
            is_gone = client.end and client.number not in self.bus.clients
            size = sum(1000 + len(packet) for packet in client.received)
            if is_gone and name not in self.over:
                if not client.is_deaf:
                    self.flush(name)
                    self.add(name, "< end")
                self.over.add(name)
                if name in paused:  # it has its end before it is all read
                    self.add("", "wait 0.02")
                    self.flush(WITNESS)
            elif size > INBOX_BYTES_MAX and name not in self.filled:
                self.flush(name)
        for name in sorted(paused - self.paused()):
            client = self.clients[name]
            if not (client.end or client.has_ended or client.is_deaf):
                self.say(name, ">", b"CMSG n")

    # ---- Operations

    def act(self, operation: Operation) -> None:
        """Do an operation; raise Unclear where its end is not specified."""
        kind, name, *more = operation
        if name in self.over:  # another one like it
            name = chr(ord(name) + 13) if name < "L" else name
        if kind == "stir":
            stir(self, *more)
        else:
            action: Callable[..., None] = getattr(self, kind)
            action(name, *more)

    def send(self, name: str, packet: bytes) -> None:
        """Have a client send a packet."""
        client = self.client(name)
        for number in PIECE.findall(packet):
            if number in NAMES:  # its client is there by then
                self.client(NAMES[number][1])
        if name in self.filled and packet.startswith(b"CMSG "):
            self.flush(WITNESS)  # a mode might apply to what it has published
        client.sent.append(packet)
        if not self.bus.paused_by(client):
            return self.run(name, packet)
        if self.others_wait(client) or len(packet) > LARGE_BYTES:
            raise Unclear("two go on at once, or the kernel is full")
        self.say(name, ">>", packet)

    def message(self, key: bytes, size: int, tail: bytes) -> bytes:
        """Return a publish packet that is like no other."""
        self.count += 1
        return b"MSG %b\0%d%b%b" % (key, self.count, b"x" * size, tail)

    def publish(self, name: str, key: bytes, size: int, tail: bytes) -> None:
        """Have a client publish a message."""
        self.send(name, self.message(key, size, tail))

    def unsubscribe(self, name: str, share: float) -> None:
        """Have a client remove one of the patterns that it holds."""
        patterns = sorted(self.client(name).patterns)
        if patterns and not (name in self.were_filled and self.options):
            self.send(name, b"UNSUB " + patterns[int(share * len(patterns))])

    def burst(
        self, name: str, operations: Sequence[Operation], end: str
    ) -> None:
        """Have a client send packets at once, and perhaps leave."""
        client = self.client(name)
        is_busy = name in self.paused() or client.is_deaf or client.holds
        if is_busy or (end and name in self.filled):
            raise Unclear("a burst needs a client that is free")
        last = self.message(b"k/z", 0, b"")
        packets = [self.message(*operation[2:]) for operation in operations]
        for packet in (*packets, last):
            client.sent.append(packet)
            self.say(name, ">>", packet)
        if end:
            self.leave_by(name, end)
        paused = self.paused()
        self.bus.run()
        if self.paused() != paused:
            raise Unclear("nobody tells when it is paused")
        self.flush(WITNESS)
        self.follow(paused)

    def leave_by(self, name: str, end: str) -> None:
        """Have a client close, or say that it sends no more."""
        client = self.clients[name]
        if end == "shut":
            self.flush(name)
        self.add(name, end)
        client.has_ended = True
        if end == "close":
            deafen(self.bus, client)
            self.filled.discard(name)
            self.over.add(name)

    def leave(self, name: str, end: str) -> None:
        """Have a client close, or shut its side."""
        client, paused = self.client(name), self.paused()
        if end == "shut" and (name in self.filled or name in paused):
            raise Unclear("how far it was read")
        if name in paused and (client.holds or self.others_wait(client)):
            raise Unclear("who goes on first")
        self.leave_by(name, end)
        if name not in paused:
            self.bus.run()
            self.follow(paused)
        self.add("", "wait 0.02")
        self.flush(WITNESS)
        self.add(WITNESS, "< nothing")

    def deaf(self, name: str) -> None:
        """Have a client receive no more."""
        client = self.client(name)
        if name in self.filled or name in self.paused() or client.holds:
            raise Unclear("when the server learns of it")
        self.flush(name)
        self.add(name, "deaf")
        deafen(self.bus, client)

    def fill(self, name: str, packets: Sequence[bytes]) -> None:
        """Have the kernel take no more for a client, with modes set before."""
        limited = re.search("pattern|shape|packet|key", " ".join(self.options))
        if limited or name in self.filled or self.client(name).is_deaf:
            raise Unclear("it cannot be filled")
        for packet in packets:
            self.send(name, packet)
        client = self.client(name)
        if name in self.paused() or client.end:
            raise Unclear("it cannot be asked")
        if len(self.filled) > 1 and self.is_shared:
            raise Unclear("the model tries two orders of receivers")
        self.flush(name)
        self.add(name, "fill")
        client.room = 0
        self.filled.add(name)
        self.were_filled.add(name)

    def read(self, name: str) -> None:
        """Have a client read all."""
        client = self.client(name)
        if client.is_deaf:
            raise Unclear("it reads nothing more")
        if name not in self.filled:
            return self.flush(name)
        if not client.backlog and name in self.paused():
            raise Unclear("it cannot be asked")
        in_order = client.modes["order"] == "queue"
        in_order &= client.modes["soft"] in ("queue", "block")
        for number, hold in client.holds.items():
            is_hard = hold.mode == "hard" and self.bus.clients[number].sent
            if is_hard and not in_order:
                raise Unclear("its publisher goes on before all is read")
        self.flush(WITNESS)
        self.add(WITNESS, "< nothing")  # all that was sent is handled
        paused, is_empty = self.paused(), not client.backlog
        self.filled.discard(name)
        client.room = None
        self.bus.run()
        self.flush(name)
        if is_empty:
            self.add(name, "< nothing")
        self.follow(paused)

    def finish(self) -> None:
        """Have everybody read all, holders first."""
        while True:
            waiting = [
                (not client.holds, name)
                for name, client in self.clients.items()
                if name in self.filled
                and (client.backlog or name not in self.paused())
                and not (client.end or client.has_ended)
            ]
            if not waiting:
                break
            self.read(min(waiting)[1])
        for name, client in self.clients.items():
            if not client.is_deaf and name not in self.over:
                self.flush(name)


def stir(writer: Writer, share: float) -> None:
    """Do what may matter now: to holders, to those who are paused or deaf."""
    draw, bus = random.Random(share), writer.bus
    here = {n: c for n, c in writer.clients.items() if c.number in bus.clients}
    names = sorted({*here} - {WITNESS})
    holders = [name for name in names if here[name].holds]
    paused = [name for name in names if bus.paused_by(here[name])]
    deaf = [name for name in names if here[name].is_deaf]
    filled = [name for name in names if name in writer.filled]
    busy = {*holders, *paused, *deaf}
    free = [name for name in draw.sample("ACDE", 4) if name not in busy]
    family, chance = draw.choice(["soft", "hard"]), draw.randrange(8)
    ways = [way.encode() for way in CHOICES[f"blocking/{family}"]]
    start = b"CMSG blocking/%b/" % family.encode()

    def publish(name: str) -> None:
        writer.act(("publish", name, b"k/a", draw.choice([0, 9, 40]), b""))

    if not free:
        return
    if not filled and chance < 4:
        modes = [start + draw.choice(ways), b"CMSG blocking/soft/block"]
        count = draw.choice([0, 0, 1, 2])
        writer.act(("fill", free[0], [b"SUB k/", *modes[:count]]))
    elif filled and not holders and chance < 4:  # one speaks until it pauses
        uid = IDS[filled[0]][1]
        others = [n for n in free if uid in (0, IDS[n][1]) and n not in filled]
        for name in others[:1] * 4:
            if name not in writer.paused():
                publish(name)
    elif deaf and chance < 3:
        publish(free[0])
    elif holders and chance < 3:  # one change of a mode, or two under one hold
        holder = draw.choice(holders)
        for way in [*draw.choice([[], [b"block"]]), draw.choice(ways)]:
            writer.act(("send", holder, start + way))
        if paused:
            publish(draw.choice(paused))
    elif holders and chance == 3:
        kind, *more = draw.choice([("read",), ("leave", "close")])
        writer.act((kind, draw.choice(holders), *more))
    elif paused and chance < 6:
        publish(draw.choice(paused))
    elif paused and chance == 6:
        writer.act(("leave", draw.choice(paused), "close"))
    elif filled and chance == 7:
        order = draw.choice([b"stack", b"random", b"queue"])
        writer.act(("send", draw.choice(filled), b"CMSG order/" + order))
    else:
        publish(free[0])


def write(operations: Sequence[Operation], options: dict[str, Any]) -> Writer:
    """Return what writes some operations, without those that are unclear."""
    writer = Writer(options)
    before: list[bytes] = []  # each operation that is written
    for operation in operations:
        before.append(pickle.dumps(writer))
        try:
            writer.act(operation)
        except Left:
            continue
        except Unclear:
            writer = pickle.loads(before.pop())
    while True:
        try:
            writer.finish()
            return writer
        except Unclear:  # for want of what was done last
            writer = pickle.loads(before.pop())
