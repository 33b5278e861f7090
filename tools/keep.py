"""keep: hold the last message of each key, for readers that come later.

A program over the bus.  A question is a request under the keeper's key, with
a pattern as its payload.  The keeper publishes each value that the pattern
selects under the key for the answer, a '/' and its own key, and then answers.
The asker subscribes before it asks, and drops a kept value whose key it has
heard meanwhile, as the kept one is older.

A key has one keeper.  Each asks a question of its own on each bus, and only
answers those that it hears after that one.  So of two keepers, the one whose
question came later is answered by the other, and ends.  A keeper waits for
such an answer before it is ready, and before it answers readers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import sbus_client
from sbus_client import Client, Message, PacketError, PacketTooLarge, SbusError

from . import shared

OVERHEAD_BYTES = 256  # what Python needs for a value
PAUSE_SECONDS = 0.5  # in which an earlier keeper is to answer
TRIES = 5
TRY_SECONDS = 1.0  # in which a keeper sends something
# Others can send values, too: no more than this is waited for, or held
LAST_SECONDS = 30.0
LAST_BYTES = 1 << 28


class Keeper:
    """The last payload of each key, up to a number of MiB."""

    def __init__(self, mib_max: float) -> None:
        self.bytes_left = mib_max * (1 << 20)
        self.values: dict[bytes, bytes] = {}
        self.refused = 0  # values, for want of room
        # When it is ready; None before it hears its own question on this bus
        self.start: float | None = None

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
            name = sbus_client.printable(key)
            shared.note(f"no room for the value of {name}: see --max-mib")
        self.refused += 1

    def may_answer(self, is_keeper: bool) -> bool:
        """Return whether to answer what another keeper, or a reader asks."""
        left = sbus_client.left_of(self.start)
        return left is not None and (is_keeper or left == 0)

    def answer(self, bus: Client, asked: sbus_client.Request) -> None:
        """Publish what a question selects, and say who has answered."""
        # A longer text is no pattern, and to look for it would take seconds
        is_pattern = len(asked.payload) <= bus.key_bytes_max
        for key, payload in self.values.items() if is_pattern else ():
            # Not for a pattern that is none, nor what does not fit
            with contextlib.suppress(PacketError, PacketTooLarge):
                if sbus_client.matches(asked.payload, key):
                    bus.publish(asked.reply_key + b"/" + key, payload)
        text = f"process {os.getpid()} of user {os.getuid()} keeps "
        text += f"{len(self.values)} keys, and refused {self.refused}"
        bus.reply(asked, text.encode())


@shared.command(
    "keep 'state/'",
    *(shared.PATTERNS, shared.KEEPER, shared.MIB),
    *(shared.RECONNECT, shared.READY_FD),
)
def keep(options: shared.Options) -> None:
    """Keep the last message of each key, for `sub --last`.

    A message without a payload has its key forgotten; secrets are not kept.
    Above --max-mib, a value is not kept.  A keeper that ends has forgotten
    all: `sub --last --json` and `pub --json` make a backup.  It slows
    publishers down rather than miss a message (blocking/soft/block).  A
    second keeper under the same key ends, and says who the first is.  A
    message within 200 bytes of the limit of a packet is not printed later, as
    its key becomes longer.
    """
    with shared.open_bus(options, options.reconnect) as bus:
        bus.control("blocking/soft/block")
        shared.subscribe(bus, [options.keeper, *(options.pattern or [""])])
        inbox = bus.whoami().path + sbus_client.random_part()
        bus.subscribe(inbox)
        keeper, name = Keeper(options.max_mib), os.fsencode(options.keeper)
        early: list[Message] = []  # questions of readers, before it is ready

        def hear(message: Message) -> None:
            if message.key == inbox:
                other = sbus_client.printable(message.payload)
                raise SbusError(f"{other} at {options.keeper}; see --keeper")
            if message.key != name:
                keeper.keep(message)
            elif asked := sbus_client.parse_request(message):
                if asked.reply_key == inbox:
                    keeper.start = sbus_client.end_of(PAUSE_SECONDS)
                elif keeper.may_answer(asked.payload == name):
                    keeper.answer(bus, asked)
                elif keeper.start is not None:
                    early.append(message)

        def begin() -> Sequence[Message]:
            keeper.start = None
            early.clear()
            bus.publish(name, inbox + b"\0" + name)  # which is never kept
            with contextlib.suppress(TimeoutError):
                while not keeper.may_answer(False):
                    message = bus.receive(sbus_client.left_of(keeper.start))
                    if type(message) is Message:
                        hear(message)
                    elif type(message) is sbus_client.Reconnected:
                        return begin()
            shared.tell_ready(options, bus)
            return early

        for message in shared.messages(bus, before=begin):
            hear(message)


class Latest:
    """Last values, and the messages that come while they are asked for."""

    def __init__(self, bus: Client, end: float | None) -> None:
        self.end = time.monotonic() + LAST_SECONDS
        if end is not None:
            self.end = min(end, self.end)
        path = bus.whoami(sbus_client.left_of(self.end)).path
        self.bus = bus
        self.inbox = path + sbus_client.random_part()
        self.earlier: list[Message] = []  # on a bus that was lost since
        self.values: dict[bytes, bytes] = {}
        self.live: list[Message] = []
        self.bytes_left = LAST_BYTES

    def ask(self, keeper: str, pattern: str) -> bool:
        """Ask for values; return whether a keeper has sent all of them."""
        reply_key = self.inbox + sbus_client.random_part()
        question = reply_key + b"\0" + os.fsencode(pattern)
        self.bus.publish(keeper, question)
        end = self.try_end()
        with contextlib.suppress(TimeoutError):
            while self.bytes_left >= 0 and (left := sbus_client.left_of(end)):
                message = self.bus.receive(left)
                self.bytes_left -= OVERHEAD_BYTES + sum(map(len, message))
                if message.key == reply_key:
                    return True
                if message.key.startswith(reply_key):
                    key = message.key[len(reply_key) + 1 :]
                    self.values[key] = message.payload
                    end = self.try_end()
                elif isinstance(message, sbus_client.Reconnected):
                    self.earlier += self.live
                    self.live = []
                elif type(message) is Message and message.payload != question:
                    self.live.append(message)
        return False

    def try_end(self) -> float:
        """Return when a try ends in which the keeper now sends nothing."""
        return min(time.monotonic() + TRY_SECONDS, self.end)

    def messages(self) -> list[Message]:
        """Return all: of a key that was heard meanwhile, not the value."""
        heard = {message.key for message in self.live}
        values = (Message(*item) for item in self.values.items())
        fresh = [value for value in values if value.key not in heard]
        return [*self.earlier, *fresh, *self.live]


def last_values(bus: Client, options: shared.Options) -> list[Message]:
    """Return what the keeper of a key has, and what else has come meanwhile.

    The client has subscribed to the patterns before.
    """
    latest, name = Latest(bus, options.end), options.keeper
    bus.subscribe(latest.inbox + b"/")
    for pattern in options.pattern or [""]:
        if not any(latest.ask(name, pattern) for _ in range(TRIES)):
            problem = f"no `sbus keep` answers at {name} in time"
            shared.note(f"last values are missing: {problem}")
            break
    bus.unsubscribe(latest.inbox + b"/")
    return latest.messages()
