"""Reads worlds.md: small worlds, and a grammar of random ones."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import model

BLOCK = re.compile(r"^```world (\w+)\n(.*?)^```", re.M | re.S)
RULE = re.compile(r"^(\w+): ?(.*)$", re.M)
WEIGHTED = re.compile(r"(?:(\d+)\*)?(.*)")
PAGE = Path(__file__).with_suffix(".md").read_text("utf-8")
CHOICES = {
    name: [WEIGHTED.findall(text.strip())[0] for text in line.split("|")]
    for name, line in RULE.findall(PAGE)
}


def small_worlds() -> dict[str, str]:
    """Return the worlds of which all states are tried, by their names."""
    worlds = dict(BLOCK.findall(PAGE))
    modes = worlds.pop("modes")
    softs = model.CHOICES["blocking/soft"]
    hards = model.CHOICES["blocking/hard"]
    for soft, hard in itertools.product(softs, hards):
        lines = f"A > CMSG blocking/soft/{soft}\nA > CMSG blocking/hard/{hard}"
        worlds[f"modes-{soft}-{hard}"] = modes.replace("MODES", lines)
    return worlds


def random_world(draw: random.Random) -> str:
    """Return a world at random."""
    names = "ABCD"[: draw.choice([2, 2, 3, 3, 4])]
    clients = [expand(draw, "client").replace("$", name) for name in names]
    befores, _, afters = zip(*(client.partition("^") for client in clients))
    parts = [expand(draw, "start"), *befores, "---;", *afters]
    parts.append(expand(draw, "events"))
    numbers = itertools.count()
    text = re.sub("@", lambda _: str(next(numbers)), "".join(parts))
    return re.sub(" *;", "\n", text)


def expand(draw: random.Random, name: str) -> str:
    """Return what a name of the grammar may stand for."""
    weights, texts = zip(*CHOICES[name])
    text = draw.choices(texts, [int(weight or 1) for weight in weights])[0]
    return re.sub(r"<(\w+)>", lambda match: expand(draw, match[1]), text)
