"""Random steps for the simulation, and the shortest of those that fail."""

from __future__ import annotations

import errno
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Callable

from model import SECRET
from packets import WHOAMI, publish
from simulation import SETUPS, SLOTS, Setup, Step, run_steps
from spec_model import MODES

WEIGHTS = {
    "serve": 36,
    "send": 44,
    "read": 10,
    "connect": 6,
    "leave": 0.5,
    "finish": 0.3,
    "deafen": 0.2,
    "fail": 0.7,
    "exhaust": 0.2,
    "wait": 3,
}
PATTERNS = [b"", b"a", b"a/", b"a/*", b"*", b"*/b", b"*/", b"b*", b"a*b"]
PATTERNS += [b"!x", b"b/c", b"a/b"]
KEYS = [b"a", b"b", b"a/b", b"a/", b"ab", b"b/c", b"", b"!x", b"a/b/c"]

MISTAKES = [b"", b"MSG a", b"SUB", b"SUB a/!", b"MSG !\0", b"hello"]
MISTAKES += [bytes(20_001), b"SUB !/cred/1/*/", b"SUB " + b"a" * 65]
MISTAKES += [word + b"/" * 12 + b"\0" for word in (b"SUB ", b"MSG ", b"CMSG ")]
SIZES = [0] * 30 + [300] * 4 + [3_000, 17_000]


def secrets_of(slot: int) -> list[bytes]:
    """Return secret texts that are good as keys and as patterns."""
    gid, uid, pid = SLOTS[slot]
    texts = [f"{gid}/{uid}/{pid}/x", f"/{uid}//x", "///", f"{gid}///x/y"]
    texts.append(f"///x/{SECRET.decode()}1/2/3/y")
    return [SECRET + text.encode() for text in texts]


SECRETS = [secrets_of(slot) for slot in range(len(SLOTS))]


def make_packet(
    random_: random.Random, number: int, slot: int, setup: Setup
) -> bytes:
    """Return a packet for a client to send."""
    start: bytes = setup.options.get("cred_prefix", "").encode()
    start += b"/" * bool(start)
    pick = random_.random()
    if pick < 0.62:
        is_secret = random_.random() < 0.15
        keys = random_.choice(SECRETS) if is_secret else KEYS
        key = random_.choice(keys)
        payload = b"%d " % number + bytes(random_.choice(SIZES))
        return publish(start + key if is_secret else key, payload)
    if pick < 0.88:
        most = 0.87 if setup.options.get("strict") else 0.77
        word = b"SUB " if pick < most else b"UNSUB "
        if random_.random() < 0.2:
            return word + start + random_.choice(SECRETS[slot])
        return word + random_.choice(PATTERNS)
    if pick < 0.96:
        return b"CMSG " + random_.choice(MODES).encode()
    if pick < 0.99:
        return WHOAMI
    if pick < 0.998:
        return b"SUB " + random_.choice(random_.choice(SECRETS))
    return random_.choice(MISTAKES)


def make_steps(seed: int, count: int, setup: Setup) -> list[Step]:
    """Return the steps of a run."""
    random_ = random.Random(seed)
    weights = dict(WEIGHTS)
    weights["read"] *= random_.choice([0.2, 1, 3])  # slow and fast readers
    weights["serve"] *= random_.choice([0.5, 1])
    rooms = random_.choice([[1, 2, 4], [4, 12], [1, 40]])
    names = random_.choices(list(weights), list(weights.values()), k=count)
    steps: list[Step] = [
        ("connect", slot, random_.choice(rooms)) for slot in range(5)
    ]
    choices: dict[str, list[Any]] = {
        "serve": list(range(64)),
        "read": [1, 2, 5, 100],
        "connect": rooms,
        "fail": [errno.ENOBUFS, errno.ENOMEM] * 8 + [errno.EIO],
        "exhaust": [errno.EMFILE, errno.ECONNABORTED],
        "wait": [1 / 64, 1 / 16, 1.0, 5.0],
    }
    for number, what in enumerate(names):
        slot = random_.randrange(len(SLOTS))
        how = random_.choice(choices.get(what, [None]))
        if what == "send":
            how = make_packet(random_, number, slot, setup)
        steps.append((what, slot, how))
    if random_.random() < 0.8:  # or else the server is stopped at once
        steps.append(("settle", 0, None))
    return steps


def failure_of(steps: Sequence[Step], setup: Setup) -> str:
    """Return how a run fails, nothing if it does not.

    Without a trace the server has to do the same; when it stops, in any
    order.
    """
    try:
        judged = run_steps(steps, setup).log
        silent = run_steps(steps, setup, is_traced=False).log
        stop = judged.index("stop")
        assert judged[:stop] == silent[:stop], "it depends on the trace"
        assert Counter(judged) == Counter(silent), "it depends on the trace"
    except Exception as error:  # whatever the mistake in sbus.py is
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def shrink(
    steps: list[Step], is_failing: Callable[[list[Step]], bool]
) -> list[Step]:
    """Remove steps for as long as the rest still fails."""
    end = time.monotonic() + 30
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps) and time.monotonic() < end:
            fewer = steps[:start] + steps[start + size :]
            if is_failing(fewer):
                steps = fewer
            else:
                start += size
        size //= 2
    return steps


def as_python(step: Step) -> str:
    """Return a step as Python, with the padding of packets made short."""
    what, slot, how = step
    text = repr(how)
    if isinstance(how, bytes) and len(how) > 64:
        start = how.rstrip(how[-1:])
        padding = f"{how[-1:]!r} * {len(how) - len(start)}"
        text = f"{start!r} + {padding}" if start else padding
    return f"({what!r}, {slot}, {text})"


def replay_of(steps: list[Step], setup: Setup) -> str:
    """Return the shortest failing run that is found, as Python."""
    steps = shrink(steps, lambda fewer: bool(failure_of(fewer, setup)))
    lines = "".join(f"        {as_python(step)},\n" for step in steps)
    where = f"SETUPS[{SETUPS.index(setup)}]"
    return (
        f"{failure_of(steps, setup)}\n    run_steps([\n{lines}    ], {where})"
    )
