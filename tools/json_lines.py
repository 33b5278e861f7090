"""Messages as lines of JSON, which sub and record write and pub reads."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from sbus_client import Message

ERRORS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def json_line(fields: Mapping[str, object]) -> bytes:
    """Return a line of JSON, in ASCII."""
    import json  # which a small Python lacks

    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def as_json(message: Message, when: int | None) -> bytes:
    """Return a message as a line of JSON."""
    fields: dict[str, object] = {} if when is None else {"t": when}
    for name, text in (("key", message.key), ("payload", message.payload)):
        try:
            fields[name] = text.decode("utf-8")
        except UnicodeDecodeError:
            fields[f"{name}_base64"] = base64.b64encode(text).decode("ascii")
    return json_line(fields)


def parse_json(line: bytes) -> Message:
    """Return the message that as_json, or a recorder, has written as a line.

    Raises: one of ERRORS if it is none.
    """
    import json

    fields = json.loads(line)
    if "rec" in fields:  # a recorder's: each byte is one code point
        key, data = fields["key"].encode("latin-1"), fields["data"]
        return Message(key, base64.b64decode(data, validate=True))
    return Message(decoded(fields, "key"), decoded(fields, "payload"))


def decoded(fields: Mapping[str, str], name: str) -> bytes:
    """Return the bytes of a field, which as_json has written."""
    if name in fields:
        return fields[name].encode("utf-8")
    return base64.b64decode(fields[f"{name}_base64"], validate=True)
