"""Reads a conversation as what each client does by itself."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any

import model
from conformance.examples import EXPECTATIONS, Step, each_number, parse_step
from world import Act, World

CLIENTS_MAX = 3
STEPS_MAX = 6  # of a client, after the line `---`
WORLD_BYTES_MAX = 50_000  # of all that waits, which each state has a copy of
DIGITS_MAX = 12  # of a limit; times of more are not exact
OWNER = 500  # the user of the server, and of clients that do not say theirs
PIDS = 70_000_001  # the first process id, which no other number is like
NUMBER = re.compile(r"\b(gid|uid|pid)=(\d+)")
LIMIT = re.compile(r"--(max-[a-z-]+|block-timeout) (\d+)")


def read_world(world: World, text: str) -> list[str]:
    """Give a new world the programs of a conversation, and do its beginning.

    Returns: the lines of what came before the line `---`
    Raises: ValueError at what is no step, or is beyond a bound
    """
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("---") if "---" in lines else -1
    if lines.count("---") > 1:
        raise ValueError("a conversation has one line ---, and not more")
    options = [line for line in lines if line.startswith("server ")]
    vars(world.bus.options).update(owner=OWNER, **limits(options))
    before = [*options]

    for number, line in enumerate(lines):
        if not line or line[0] == "#" or line == "---" or line in options:
            continue
        try:
            for plain in each_number(line):
                step = parse_step(plain)
                if step.verb == "wait" and number < start:
                    before.append(time_passes(world, step))
                else:
                    add_step(world, step)
            if number < start:
                before += prepared(world)
        except ValueError as error:
            message = f"Line {number + 1}, \u201c{line}\u201d: {error}"
            raise ValueError(message) from None

    return before


def time_passes(world: World, step: Step) -> str:
    """Have time pass; return the line of that."""
    try:
        world.bus.wait(float(step.argument))
    except model.Unclear as reason:
        raise ValueError(f"the specification leaves open {reason}") from None
    return str(step)


def limits(lines: Iterable[str]) -> dict[str, Any]:
    """Return the limits of a server; raise ValueError at other options."""
    words = " ".join(line.partition(" ")[2] for line in lines)
    pairs = LIMIT.findall(words)
    names = {name.replace("-", "_") for name, _ in pairs}
    known = vars(model.Options()).keys()
    if LIMIT.sub("", words).strip() or not names <= known:
        raise ValueError(
            f"A search knows only limits, such as --max-backlog 270, and"
            f" not \u201cserver {words}\u201d"
        )
    if any(len(count) > DIGITS_MAX for _, count in pairs):
        raise ValueError(f"A limit here has {DIGITS_MAX} digits at most")
    return {name.replace("-", "_"): int(count) for name, count in pairs}


def add_step(world: World, step: Step) -> None:
    """Give a client one more step; raise ValueError if none can have it."""
    if step.verb == "wait":
        raise ValueError("here time passes when nobody can go on")

    name = step.client
    if name not in world.clients:
        fields = {"gid": 100, "uid": OWNER, "pid": PIDS + world.bus.count}
        if step.verb == "process":
            pairs = NUMBER.findall(step.argument)
            fields.update((key, int(number)) for key, number in pairs)
        world.clients[name] = world.bus.connect(**fields)
        world.programs[name], world.gets[name] = [], []
    if step.argument in EXPECTATIONS:
        return  # it takes nothing
    verbs = {act.verb for act in world.programs[name]}
    is_gone = bool(world.clients[name].end) and step.verb != "<"
    if "close" in verbs or is_gone:
        raise ValueError(
            f"{name} has left: a client that comes has a new name"
        )
    if "shut" in verbs and step.verb[0] == ">":
        raise ValueError(f"{name} sends nothing more after shut")
    if step.verb == ">>":
        step = step._replace(verb=">")  # the server is never busy

    packet = b"".join(
        part.text * part.times
        if not part.variable or step.verb == "<"
        else value_of(world, part.variable)
        for part in step.text
    )
    if step.verb == "room":
        packet = step.argument.encode()
    world.programs[name].append(Act(step.verb, packet, str(step)))


def value_of(world: World, variable: str) -> bytes:
    """Return what stands for a number of a client, such as B.pid."""
    name, _, field_name = variable.partition(".")
    if name not in world.clients:
        raise ValueError(f"no client {name} has come before")
    return b"%d" % getattr(world.clients[name].credentials, field_name)


def prepared(world: World) -> Iterator[str]:
    """Have all clients do all that they have to do; yield that as lines.

    Raises: ValueError if one of them cannot go on
    """
    for name, acts in world.programs.items():
        while acts:
            if not world.may_act(name):
                raise ValueError("before the line --- nobody waits")
            yield world.take("act", name)
    if world.unclear:
        raise ValueError(f"the specification leaves open {world.unclear}")


def check_bounds(world: World) -> None:
    """Raise ValueError if there are too many clients, steps or bytes."""
    if len(pickle.dumps(world)) > WORLD_BYTES_MAX:
        raise ValueError("A search handles only few and short messages")
    if len(world.clients) > CLIENTS_MAX:
        raise ValueError(
            f"A search handles at most {CLIENTS_MAX} clients; this has"
            f" {len(world.clients)}"
        )
    for name, acts in world.programs.items():
        if len(acts) > STEPS_MAX:
            raise ValueError(
                f"A search handles at most {STEPS_MAX} steps of a client;"
                f" {name} has {len(acts)}: put a line --- after the steps"
                " whose order is fixed"
            )
