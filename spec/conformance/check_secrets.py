"""What clients hear of secrets, for many pairs of a pattern and a key."""

from __future__ import annotations

import contextlib
import itertools
import random

from .conversation import END
from .examples import escape
from .trial import Trial, check, hear, tell

with contextlib.suppress(ImportError):  # the kit says what it lacks
    import model

PREFIX = b"!/cred/1/2/3"
FIRST = 5  # keys, all public
TEXTS = 50  # secret patterns, and secret keys for each pattern
ENDS_OF_PATTERNS = b"x x* * x/ x/* */y x/y* */  a*b ! x/!/cred///".split(b" ")
ENDS_OF_KEYS = b"x xx x/ x/y x/y/z  /x y/x * !x a*b x/!/cred///".split(b" ")
# Public ones that look as if they heard, or were, secrets
WIDE = (
    b" ! !* !*/ !x !/ !/* !/cred !/cred* !/cred*/ !/cred/ !/cred/* !/c*/ * */ "
    b"*/*/*/*/*/* */cred/ */cred/*/*/*/x !*/*/*/*/*/x !!/cred/1/2/3/ a*b"
).split(b" ")
PUBLIC = b"x x/y !x !!/cred/1/2/3/x a/!x !x/cred/0/0/0/x  a*b /".split(b" ")


def secrets(
    ids: tuple[int, ...], prefix: bytes, ends: list[bytes]
) -> list[bytes]:
    """Return secret texts of a client, or nearly so."""
    start = model.start_of(prefix) + b"!/cred"
    forms = b"%d", b"%d", b"", b"", b"0%d", b"%d1"
    fields = [[form.replace(b"%d", b"%d" % n) for form in forms] for n in ids]
    return [*map(b"/".join, itertools.product([start], *fields, ends))]


def try_pairs(trial: Trial, prefix: bytes) -> None:
    """Compare what clients hear with what the model lets them hear."""
    draw, publisher = random.Random(TEXTS), trial.client()
    ids = publisher.gid, publisher.uid, publisher.pid
    patterns = secrets(ids, prefix, ENDS_OF_PATTERNS)
    secret_keys = secrets(ids, prefix, ENDS_OF_KEYS)
    for pattern in (*WIDE, *draw.sample(patterns, TEXTS)):
        trial.say(f"a client has the pattern {escape(pattern)}")
        bus = model.Bus(cred_prefix=prefix, owner=publisher.uid)
        twin, reader = bus.connect(ids[1], ids[0], ids[2]), trial.client()
        bus.send(twin, b"SUB " + pattern)
        reader.send(b"SUB " + pattern)
        if twin.end:
            hear(reader, END)
            continue
        bus.send(twin, b"SUB end")
        tell(reader, b"SUB end")
        packets = []
        for key in (*PUBLIC, *draw.sample(secret_keys, TEXTS), b"end"):
            other = bus.connect()
            bus.send(other, b"MSG %b\0" % key)
            if not other.end:  # which would not be forwarded
                packets.append(b"MSG %b\0" % key)
        for is_stalled in (False, True):
            if is_stalled:
                trial.server.fill(reader)
            tell(publisher, *packets[:FIRST])  # then some have a backlog
            tell(publisher, *packets[FIRST:])
            hear(reader, *twin.received)
        reader.close()


@check("CRED-10", "CRED-11", "CRED-4", fills=True, is_plain=True)
def secrets_and_wide_patterns(trial: Trial) -> None:
    trial.start()
    try_pairs(trial, b"")


@check("CRED-13", "CRED-9", "CRED-11", fills=True)
def secrets_behind_a_prefix(trial: Trial) -> None:
    trial.start("--cred-prefix", PREFIX.decode())
    try_pairs(trial, PREFIX)
