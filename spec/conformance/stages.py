"""The stages of a server that grows, and what is missing next.

`spec/stages.md` says what each stage asks.  As a server answers nothing until
stage 4, the clients of earlier ones have other ways to wait for it.
"""

from __future__ import annotations

import functools
import re
import socket
from contextlib import suppress
from typing import Any

from .conversation import END, Failure
from .kit import Result, all_cases, block_of
from .rules import SPEC
from .server import ServerProcess
from .wire import UNREAD_PACKETS_MAX, Wire

# A heading, or a sentence with the names of the examples that decide it
LINE = re.compile(r"^## \d\. (.+)|^- ([^:]+):((?:\s+`[a-z0-9-]+`)+)", re.M)
NAMES = [""]  # of the stages, by their numbers, and what comes after them
DEMANDS: list[tuple[int, str, str]] = []  # a stage, a sentence, and names
for title, sentence, names in LINE.findall((SPEC / "stages.md").read_text()):
    if title:
        NAMES.append(f"stage {len(NAMES)}, {title}")
    else:
        DEMANDS.append((len(NAMES) - 1, " ".join(sentence.split()), names))
NAMES.append("--level sbus")


class GrowingServer(ServerProcess):
    """A server that may not answer yet; it serves if it can be reached."""

    def _probe(self) -> None:
        self.connect().close()


class ReadWire(Wire):
    """A client that waits until the server has read its packets."""

    def _ask(self) -> None:
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
        for _ in range(2):  # the kernel takes another when one was read
            self.send(b"SUB settled\0".ljust(4_400, b"."))


class EchoWire(Wire):
    """A client that waits for a message to itself."""

    def _ask(self) -> None:
        token = b"MSG settled/%d\0" % self.wire.fileno()
        with suppress(Failure):  # closed: the end is to be read
            self.send(b"SUB " + token[4:-1])
            self.send(token)
        why = "others come without end"
        try:
            for _ in range(UNREAD_PACKETS_MAX):
                packet = self._read()
                if not packet.startswith(b"MSG settled/"):
                    self._inbox.append(packet)
                if packet in (token, END):
                    return
        except Failure as failure:
            why = str(failure)
        raise Failure(f"{self.name} does not receive its own message: {why}")

    def receive(self) -> bytes:
        self._ask()
        return super().receive()


read_once = functools.cache(all_cases)  # a page asks again and again
WIRES = {1: ReadWire, 2: EchoWire, 3: EchoWire}


def try_stages(last: int, kit: Any) -> tuple[str, Result | None]:
    """Return what is to be said, and the first result that is wrong."""
    cases = read_once()
    for stage, sentence, names in DEMANDS:
        kit.server.wire_kind = WIRES.get(stage, Wire)
        asked = [case for case in cases if f"`{block_of(case)}`" in names]
        for result in map(kit.judge, asked if stage <= last else ()):
            if result.verdict in ("failed", "not run"):
                return f"Missing next, for {NAMES[stage]}: {sentence}.", result
    return f"Passed: {NAMES[last]}. Next is {NAMES[last + 1]}.", None
