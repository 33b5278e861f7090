"""Draws pictures that are written as text: boxes, arrows and stops.

    +-----+   --   |    lines and boxes; .  and '  are round corners
    | key |   ->  <-    arrows, v and ^ at the end of a line of |
    +-----+   (gone)    a stop: a state or an outcome
    [PUB-2]   ####      a link to the rule; a bar

As text it is read in any viewer.  At 46 columns it fits a telephone.
"""

from __future__ import annotations

import re
from html import escape

COLUMNS_MAX = 46
JOINTS = " ╵╷│╶└┌├╴┘┐┤─┴┬┼"  # by their ways: up 1, down 2, right 4, left 8
ROUND = str.maketrans("└┌┘┐", "╰╭╯╮")
ARROWS = {"^": "▲", "v": "▼", ">": "►", "<": "◄"}
ENDS = [*zip("^v><", "||--")]  # arrows, each with the line that it ends
STOP = re.compile(r"\((([^() ]+)[^()]*)\)")
BAR = re.compile(r"##+")


def draw(text: str, title: str) -> str:
    """Return a picture as HTML: text with the lines of a terminal.

    Raises: ValueError if it is too wide for a telephone.
    """
    rows = text.splitlines()
    columns = max(map(len, rows))
    if columns > COLUMNS_MAX:
        raise ValueError(f"picture {title!r}: {columns} columns are too many")
    padded = [row.ljust(columns + 2) for row in ["", *rows, ""]]
    lines = [
        "".join(drawn(padded, y, x) for x in range(columns))
        for y in range(1, len(rows) + 1)
    ]
    shown = escape("\n".join(lines), quote=False)
    shown = STOP.sub(stop, BAR.sub(bar, shown))
    return (
        f'<figure class="picture"><pre>{shown}</pre>'
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )


def drawn(rows: list[str], y: int, x: int) -> str:
    """Return what stands for a character, as those around it are."""
    char = rows[y][x]
    up, down = rows[y - 1][x], rows[y + 1][x]
    right, left = rows[y][x + 1], rows[y][x - 1]
    across = right in "-+>.'", left in "-+<.'"
    if char == "|":
        return JOINTS[3]
    if char == "-" and any(across):
        return JOINTS[12]
    if (char, {"^": down, "v": up, ">": left, "<": right}.get(char)) in ENDS:
        return ARROWS[char]

    ways = up in "|+^.", down in "|+v'", right in "-+", left in "-+"
    joint = JOINTS[
        sum(1 << bit for bit, is_open in enumerate(ways) if is_open)
    ]
    if char == "+":
        return joint
    is_corner = char in ".'" and joint.translate(ROUND) != joint
    return joint.translate(ROUND) if is_corner else char


def stop(match: re.Match[str]) -> str:
    """Return a stop in the colour of its first word, as wide as before."""
    return f'<b class="stop {match[2].lower()}"> {match[1]} </b>'


def bar(match: re.Match[str]) -> str:
    """Return a bar, as long as before."""
    return f'<span class="bar">{" " * len(match[0])}</span>'
