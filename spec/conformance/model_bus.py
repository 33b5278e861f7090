"""A bus that is the model: what it says is what a right server does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import model

from .conversation import END, Failure


class ModelConnection:
    """A client of the model; see Connection."""

    name = ""

    def __init__(self, bus: ModelBus, client: model.Client) -> None:
        self.bus = bus
        self.client = client
        self.gid, self.uid, self.pid = client.credentials
        self.is_filled = False

    def send(self, packet: bytes) -> None:
        if self.client.number not in self.bus.model.clients:
            raise Failure(f"it has left [{self.client.end}]")
        self.client.sent.append(packet)
        if not self.bus.is_frozen:
            self.settle()

    def settle(self) -> None:
        self.bus.run()

    def receive(self) -> bytes:
        packet = self.pending()
        if packet is None:
            raise Failure("received nothing")
        if packet != END:
            self.bus.model.read(self.client)
        return packet

    def await_end(self) -> None:
        self.settle()

    def pending(self) -> bytes | None:
        self.settle()
        if self.is_filled:
            self.is_filled = False
            self.client.room = None
            self.client.since = self.bus.model.now
            self.settle()
        if self.client.received:
            return self.client.received[0]
        is_gone = self.client.number not in self.bus.model.clients
        return END if is_gone else None

    def shut(self) -> None:
        self.client.has_ended = True

    def deafen(self) -> None:
        if self.client.received:
            raise Failure("nobody knows whether it reads what has come")
        model.deafen(self.bus.model, self.client)

    def close(self) -> None:
        if self.client.number in self.bus.model.clients:
            self.shut()
            model.deafen(self.bus.model, self.client)

    def set_room(self, count: int) -> None:
        self.client.room = count


class ModelBus:
    """The model as a server; see Bus."""

    def __init__(self, **options: Any) -> None:
        self.model = model.Bus(**options)
        self.connections: list[ModelConnection] = []
        self.is_frozen = False

    def run(self) -> None:
        try:
            self.model.run()
        except model.Unclear as error:
            raise Failure(f"unclear: {error}") from None

    def connect(
        self, credentials: Mapping[str, int] | None = None
    ) -> ModelConnection:
        owner = self.model.options.owner
        ids = {"uid": owner, "gid": owner, "pid": 77}
        if credentials is not None:
            number = 1000 + self.model.count
            ids = {**ids, "pid": number, **credentials}
        client = ModelConnection(self, self.model.connect(**ids))
        self.connections.append(client)
        return client

    def fill(self, client: ModelConnection) -> None:
        client.settle()
        client.client.room = len(client.client.received)
        client.is_filled = True

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False

    def wait(self, seconds: float) -> None:
        self.run()
        self.model.wait(seconds)

    def fault(self) -> str:
        return ""
