"""A bus that is the model, for conversations of the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import model
from conformance.conversation import END, Failure, perform
from conformance.examples import Case
from conformance.kit import Result

OWNER = 500  # the user of the server, and of most clients
UNLIMITED = 1 << 62
FLAGS = ("--strict",)
OF_THE_SOCKET = ("-g", "-o")  # its mode


def model_options(words: Sequence[str]) -> dict[str, Any]:
    """Return options of a server as the model has them."""
    options: dict[str, Any] = {"owner": OWNER}
    rest = [word for word in words if word not in OF_THE_SOCKET]
    while rest:
        word = rest.pop(0)
        name = word.lstrip("-").replace("-", "_")
        if word in FLAGS:
            options[name] = True
        elif word == "-u":
            uid = int(rest.pop(0).replace("root", "0"))
            options["users"] = (*options.get("users", ()), uid)
        elif word == "--cred-prefix":
            options[name] = rest.pop(0).encode().rstrip(b"/")
        else:
            text = rest.pop(0)
            options[name] = UNLIMITED if text == "unlimited" else float(text)
    return options


class ModelConnection:
    """A client of the model; see Connection."""

    def __init__(self, bus: ModelBus, client: model.Client) -> None:
        self.bus = bus
        self.client = client
        self.gid, self.uid, self.pid = client.credentials
        self.is_filled = False

    def send(self, packet: bytes) -> None:
        if self.client.number not in self.bus.model.clients:
            if self.bus.is_frozen:
                return  # the server has not closed it yet
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
        model.deafen(self.bus.model, self.client)

    def close(self) -> None:
        if self.client.number in self.bus.model.clients:
            self.shut()
            self.deafen()

    def set_room(self, count: int) -> None:
        self.client.room = count


class ModelBus:
    """The model as a server; see Bus."""

    def __init__(self, options: Sequence[str]) -> None:
        self.model = model.Bus(**model_options(options))
        self.is_frozen = False

    def run(self) -> None:
        try:
            self.model.run()
        except model.Unclear as error:
            raise Failure(f"unclear: {error}") from None

    def connect(
        self, credentials: Mapping[str, int] | None = None
    ) -> ModelConnection:
        ids = {"uid": OWNER, "gid": OWNER, "pid": 77}
        if credentials is not None:
            number = 1000 + self.model.count
            ids = {**ids, "pid": number, **credentials}
        return ModelConnection(self, self.model.connect(**ids))

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


def run_on_model(case: Case) -> Result:
    """Have the model predict what a case says."""
    conversation = case.conversation()
    wrong, said, *_ = perform(ModelBus(conversation.options), conversation)
    verdict = "failed" if wrong else "passed"
    return Result(case.name, case.rules, verdict, wrong, tuple(said))
