"""Examples of the specification, as its model predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.conversation import perform
from conformance.examples import Case
from conformance.kit import Result
from conformance.model_bus import ModelBus

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


def run_on_model(case: Case) -> Result:
    """Have the model predict what a case says."""
    conversation = case.conversation()
    bus = ModelBus(**model_options(conversation.options))
    wrong, said, *_ = perform(bus, conversation)
    verdict = "failed" if wrong else "passed"
    return Result(case.name, case.rules, verdict, wrong, tuple(said))
