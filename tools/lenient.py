"""A client for commands: what is too large for it is left out, and said."""

from __future__ import annotations

import functools

import sbus_client
from sbus_client import Client, PacketTooLarge, Received, note


class LenientClient(Client):
    """A client that counts what is too large for it."""

    left_out = 0

    def close(self) -> None:
        if self.left_out > 1:
            note(f"{self.left_out:,} messages were too large")
        self.left_out = 0
        super().close()

    def _receive_now(self, flags: int) -> Received:
        while True:
            try:
                return super()._receive_now(flags)
            except PacketTooLarge as error:
                if not self.left_out:
                    note(f"{error}; SBUS_MAX_PACKET raises it")
                self.left_out += 1


open_bus = functools.partial(sbus_client.open_bus, kind=LenientClient)
