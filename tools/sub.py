"""sub: that of sbus_client.py, and more ways to print a message."""

from __future__ import annotations

import sbus_client
from sbus_client import (
    Message,
    Options,
    Style,
    UsageError,
    as_payload,
    form,
)

from .json_lines import as_json


def as_null_ended(message: Message, _: int | None, __: Style) -> bytes:
    """Return a payload as it is, and a NUL byte."""
    return message.payload + b"\0"


def print_messages(options: Options) -> None:
    """Print what is published."""
    if options.time and options.form in (as_payload, as_null_ended):
        raise UsageError("--raw and --null have no place for --time")
    sbus_client.sub.run(options)


JSON = form(
    "--json",
    as_json,
    "print a JSON object a line instead: key and payload, or key_base64 and"
    " payload_base64 for what is no UTF-8; with --time, t is nanoseconds"
    " since 1970",
)
NULL = form("--null", as_null_ended, "as --raw, each with a NUL byte")

sub = sbus_client.sub._replace(
    run=print_messages, arguments=(*sbus_client.sub.arguments, JSON, NULL)
)
