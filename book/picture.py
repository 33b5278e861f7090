"""Draws pictures that are written as text: boxes, arrows and stops.

    +-----+   --   |    lines and boxes; .  and '  are round corners
    | key |   ->  <-    arrows, v and ^ at the end of a line of |
    +-----+   (gone)    a stop: a state or an outcome
    [PUB-2]   ####      a link to the rule; a bar

As text it is read in any viewer.  At 46 columns it fits a telephone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

COLUMNS_MAX = 46
WIDE, HIGH, BEND = 8, 18, 7  # of a character, and of a corner, in pixels
ACROSS = re.compile(r"[<+.'|]?(?:--+|(?<=\+)-)(?:[+.']-+)*[>+.'|]?")
DOWN = re.compile(r"(?:[\^.'-](?=\|))?\+*\|[|+]*(?:(?<=\|)[v.'-])?")
STOP = re.compile(r"\(([^()]+)\)")
BAR = re.compile(r"##+")
WORDS = re.compile(r"\S+(?: \S+)*")


def draw(text: str, title: str) -> str:
    """Return a picture as SVG, which takes its colours from the page.

    Raises: ValueError if it is too wide for a telephone.
    """
    rows = text.splitlines()
    columns = max(map(len, rows))
    if columns > COLUMNS_MAX:
        raise ValueError(f"picture {title!r}: {columns} columns are too many")
    picture = Picture([row.ljust(columns) for row in rows])
    parts = picture.boxes(), picture.stops(), picture.lines(), picture.words()
    shapes = "".join(run for part in parts for run in part)
    return (
        f'<figure class="picture"><svg viewBox="0 0 {columns * WIDE}'
        f' {len(rows) * HIGH}" width="{columns * WIDE}" role="group"'
        f' aria-label="{escape(title)}">{shapes}</svg>'
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )


class Picture:
    """Characters in rows of the same length."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows
        self.columns = ["".join(column) for column in zip(*rows)]
        self.used: set[tuple[int, int]] = set()  # rows, columns: not words

    def boxes(self) -> Iterator[str]:
        """Draw the ground of each box, the smallest from its corner."""
        for top, row in enumerate(self.rows):
            for edge in re.finditer(r"(?=([+.](?:-+[+.])+))", row):
                left = edge.start()
                ends = [left + n for n, char in enumerate(edge[1]) if n]
                highs = [self.bottom(top, left, end) - top for end in ends]
                fits = ((e, n) for e, n in zip(ends, highs) if n > 0)
                for right, high in [*fits][:1]:
                    yield (
                        f'<rect class="box" x="{left * WIDE + 4}"'
                        f' y="{top * HIGH + 9}" height="{high * HIGH}"'
                        f' width="{(right - left) * WIDE}"'
                        f' rx="{BEND * (row[left] == ".")}"/>'
                    )

    def bottom(self, top: int, left: int, right: int) -> int:
        """Return the last row of a box, or 0 if it is none."""
        for y in range(top + 1, len(self.rows)):
            row = self.rows[y]
            corners, edge = {row[left], row[right]}, {*row[left + 1 : right]}
            if corners <= {"+", "'"} and edge <= {"-", "+"}:
                return y
            if not corners <= {"|", "+"}:
                break
        return 0

    def stops(self) -> Iterator[str]:
        """Draw stops, each in the colour of its first word, and bars."""
        for y, row in enumerate(self.rows):
            for run in [*STOP.finditer(row), *BAR.finditer(row)]:
                self.used |= {(y, x) for x in range(*run.span())}
                x, wide = run.start() * WIDE, len(run[0]) * WIDE
                rect = f'<rect x="{x}" y="{y * HIGH + 1}" width="{wide}"'
                rect += f' height="{HIGH - 2}"'
                if run[0][0] == "#":
                    yield f'{rect} class="bar"/>'
                    continue
                kind = run[1].split()[0].lower()
                yield (
                    f'<g class="stop {kind}">{rect} rx="{HIGH // 2 - 1}"/>'
                    f'<text x="{x + wide // 2}" y="{y * HIGH + 13}"'
                    f' text-anchor="middle">{escape(run[1])}</text></g>'
                )

    def lines(self) -> Iterator[str]:
        """Draw lines, with their heads and round corners."""
        path, heads = "", ""
        for y, row in enumerate(self.rows):
            for run in ACROSS.finditer(row):
                self.used |= {(y, x) for x in range(*run.span())}
                at = y * HIGH + HIGH // 2
                a, b = run.start() * WIDE + 4, run.end() * WIDE - 4
                for x, char, sign in (a, run[0][0], 1), (b, run[0][-1], -1):
                    turn = BEND if char == "." else -BEND
                    if char in ".'":
                        path += f"M{x + sign * BEND} {at}"
                        path += f"Q{x} {at} {x} {at + turn}"
                    elif char in "<>":
                        heads += f"M{x - sign * 4} {at}l{sign * 8}-4v8z"
                a += {"-": -4, ".": BEND, "'": BEND, "<": 3}.get(run[0][0], 0)
                b -= {"-": -4, ".": BEND, "'": BEND, ">": 3}.get(run[0][-1], 0)
                path += f"M{a} {at}H{b}"
        for x, column in enumerate(self.columns):
            for run in DOWN.finditer(column):
                self.used |= {(y, x) for y in range(*run.span())}
                at = x * WIDE + WIDE // 2
                a, b = run.start() * HIGH + 9, run.end() * HIGH - 9
                for y, char, sign in (a, run[0][0], 1), (b, run[0][-1], -1):
                    if char in "^v":
                        heads += f"M{at} {y - sign * 9}l-4 {sign * 8}h8z"
                a += {"|": -9, ".": BEND, "^": -2}.get(run[0][0], 0)
                b -= {"|": -9, "'": BEND, "v": -2}.get(run[0][-1], 0)
                path += f"M{at} {a}V{b}"
        yield f'<path class="line" d="{path}"/>'
        yield f'<path class="head" d="{heads}"/>'

    def words(self) -> Iterator[str]:
        """Write what is left, each group of words in its place."""
        for y, row in enumerate(self.rows):
            left = "".join(
                " " if (y, x) in self.used else char
                for x, char in enumerate(row)
            )
            for run in WORDS.finditer(left):
                yield (
                    f'<text x="{run.start() * WIDE}" y="{y * HIGH + 13}"'
                    f' textLength="{len(run[0]) * WIDE}">'
                    f"{escape(run[0])}</text>"
                )
