"""keep: hold the last message of each key, for readers that come later.

A program over the bus.  A question is a request under the keeper's key.  Its
payload is a private key of the asker with a final '/', NUL, and a pattern.
The keeper publishes each value that the pattern selects under that key and
its own, and then answers.  The asker subscribes before it asks, and drops a
kept value whose key it has heard meanwhile, as the kept one is older.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import sbus_client
from sbus_client import Client, Message, Reconnected, SbusError, TimedOut

from . import shared

OVERHEAD_BYTES = 256  # what Python needs for a value
ANSWER_SECONDS = 1.0  # in which a keeper answers
TRIES = 5


class Keeper:
    """The last payload of each key, up to a number of bytes."""

    def __init__(self, bytes_max: float) -> None:
        self.bytes_left = bytes_max
        self.values: dict[bytes, bytes] = {}
        self.refused = 0  # values, for want of room

    def keep(self, message: Message) -> None:
        """Keep a message instead of an older one.

        A secret is never kept, nor an empty message, nor one without room.
        """
        key, payload = message
        if key in self.values:
            before = self.values.pop(key)
            self.bytes_left += OVERHEAD_BYTES + len(key) + len(before)
        size = OVERHEAD_BYTES + len(key) + len(payload)
        if not payload or sbus_client.SECRET in key:
            return
        if size <= self.bytes_left:
            self.bytes_left -= size
            self.values[key] = payload
            return
        if not self.refused:
            shared.note("no room for more values: see --max-mib")
        self.refused += 1

    def answer(self, bus: Client, asked: sbus_client.Request) -> None:
        """Publish what a question selects, and say who has answered."""
        own, _, pattern = asked.payload.partition(b"\0")
        # What is no key of the asker, or too long for one, cannot be told
        with contextlib.suppress(sbus_client.PacketError):
            owner = sbus_client.owner_of(own + b"x")
            if owner.path == sbus_client.owner_of(asked.reply_key).path:
                for key, payload in self.values.items():
                    if sbus_client.matches(pattern, key):
                        bus.publish(own + key, payload)
        keeper = f"process {os.getpid()} of user {os.getuid()}"
        counts = f"{len(self.values)} keys, and refused {self.refused}"
        bus.reply(asked, f"{keeper} keeps {counts}".encode())


@shared.command(
    "keep 'state/'",
    *(shared.PATTERNS, shared.KEEPER, shared.MIB, shared.RECONNECT),
)
def keep(options: shared.Options) -> None:
    """Keep the last message of each key, for `sub --last`.

    A message without a payload has its key forgotten; secrets are not kept.
    Above --max-mib, a value is not kept.  A keeper that ends has forgotten
    all: `sub --last --json` and `pub --json` make a backup.  It slows
    publishers down rather than miss a message (blocking/soft/block).
    """
    with shared.open_bus(options, None, options.reconnect) as bus:
        with contextlib.suppress(TimedOut):
            other = bus.request(options.keeper, b"", ANSWER_SECONDS)
            raise SbusError(f"{other.decode()}, under {options.keeper}")
        bus.control("blocking/soft/block")
        shared.subscribe(bus, [options.keeper, *(options.pattern or [""])])
        keeper = Keeper(options.max_mib * (1 << 20))
        for message in shared.messages(bus):
            if message.key != os.fsencode(options.keeper):
                keeper.keep(message)
            elif asked := sbus_client.parse_request(message):
                keeper.answer(bus, asked)


def ask(bus: Client, keeper: str, question: bytes) -> None:
    """Ask for values, again if a keeper may have come back meanwhile."""
    for _ in range(TRIES):
        with contextlib.suppress(TimedOut):
            bus.request(keeper, question, ANSWER_SECONDS)
            return
    shared.note("no last values: nobody keeps any there, see sbus keep")


def last_values(
    bus: Client, keeper: str, patterns: Sequence[str]
) -> list[Message]:
    """Return what a keeper has, and what else has come meanwhile.

    The client has subscribed to the patterns before.
    """
    own = bus.whoami(shared.ANSWER_SECONDS).path + sbus_client.random_part()
    own += b"/"
    bus.subscribe(own)
    try:
        for pattern in patterns or [""]:
            ask(bus, keeper, own + b"\0" + os.fsencode(pattern))
        bus.publish(own)  # all of them come before this
    except sbus_client.Disconnected:
        if not bus.reconnect:
            raise
    kept: dict[bytes, bytes] = {}
    live: list[Message] = []
    while (message := bus.receive()).key != own:
        if isinstance(message, Reconnected):
            return [*live, *last_values(bus, keeper, patterns)]
        if message.key.startswith(own):
            kept[message.key[len(own) :]] = message.payload
        elif isinstance(message, Message):
            live.append(message)
    bus.unsubscribe(own)
    for key, _ in live:
        kept.pop(key, None)
    return [*(Message(*item) for item in kept.items()), *live]
