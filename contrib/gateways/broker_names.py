"""The names that brokers have for keys and patterns of a bus.

A key may hold any byte but NUL, and a name of a broker may not.  So a segment
that the broker cannot carry as it is becomes '%=' and its bytes in percent
encoding; all others stay as they are.  Every key has one name, and each of
these names leads back to its key.  All other names are no key's.
The page book/beyond.md has examples.

A broker keeps names that begin with '$' for itself.  No key has such a name,
so nobody gets at them through a gateway.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

import sbus_client

MARK = "%="
# What the standard of MQTT, or a broker of it, refuses in a topic: control
# characters, surrogates, and the code points that are no characters
REFUSED = "\0-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef" + "".join(
    chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF)
)


class Names(NamedTuple):
    """How a kind of broker writes names, and its wildcards."""

    separator: str
    plain: str  # the form of a segment that it carries as it is
    one: str  # selects any segment
    rest: str  # selects all that follows

    def segment(self, segment: bytes) -> str:
        """Return what stands for a segment of a key."""
        # Whatever the locale is, as another gateway has the same names
        text = segment.decode("utf-8", "surrogateescape")
        if re.fullmatch(self.plain, text) and not text.startswith(MARK):
            return text
        return MARK + quote_from_bytes(segment, safe="").replace(".", "%2E")

    def name(self, key: bytes) -> str:
        """Return the name of a key."""
        # No broker has an empty name
        return self.separator.join(map(self.segment, key.split(b"/"))) or MARK

    def key(self, name: str) -> bytes | None:
        """Return the key that has a name, or None if none has it."""
        segments = [
            unquote_to_bytes(text[len(MARK) :])
            if text.startswith(MARK)
            else text.encode("utf-8", "surrogatepass")
            for text in name.split(self.separator)
        ]
        key = b"/".join(segments)
        return key if b"\0" not in key and self.name(key) == name else None

    def filter(self, pattern: bytes) -> str:
        """Return what selects the names of at least the keys of a pattern.

        A '*' behind other text becomes a whole segment.  So a gateway
        asks first_match for each message that comes in.
        """
        segments = pattern.split(b"/")
        texts = [self.one if b"*" in x else self.segment(x) for x in segments]
        if not segments[-1]:
            texts[-1] = self.rest
        return self.separator.join(texts)


MQTT = Names("/", rf"(?!\$)[^+#{REFUSED}]*", "+", "#")
NATS = Names(".", rf"(?!\$)[^.*>\s{REFUSED}]+", "*", ">")


def first_match(patterns: Sequence[str], key: bytes) -> int | None:
    """Return the index of the first pattern that selects a key, or None."""
    for index, pattern in enumerate(patterns):
        if sbus_client.matches(pattern, key):
            return index
    return None


def is_request(payload: bytes) -> bool:
    """Return whether a payload begins with a private key.

    It would tell a broker who asks, and let strangers choose who is answered.
    """
    return payload.startswith(sbus_client.SECRET)


def parse_options(about: str) -> argparse.Namespace:
    """Return the options of a gateway; exit with status 2 if they are wrong.

    They are address, host, port, out and into.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("-a", "--address", help="the bus")
    parser.add_argument("host", help="where the broker is")
    parser.add_argument("port", type=int)
    for option, name in (("--out", "out"), ("--in", "into")):
        text = f"keys that go {'out to' if name == 'out' else 'in from'} it"
        parser.add_argument(
            option, dest=name, action="append", default=[], help=text
        )
    options = parser.parse_args()
    patterns = [*options.out, *options.into]
    if not patterns or any(p.startswith("!/cred/") for p in patterns):
        parser.error("name public keys: --out PATTERN, --in PATTERN, or both")
    return options


class Losses(Counter[str]):
    """Counts what was not carried, by the reason."""

    def add(self, reason: str) -> None:
        """Count a message; say so at the first one, the tenth, and so on."""
        self[reason] += 1
        if re.fullmatch("10*", str(self[reason])):
            print(f"{reason}: {self[reason]}", flush=True)
