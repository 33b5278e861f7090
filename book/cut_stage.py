"""The servers of the stages, cut out of one file: see book/stages/.

python3 book/cut_stage.py 3 >server.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

GROWING = Path(__file__).with_name("stages") / "growing_server.py"
LAST = 6  # the number of the last stage
MARK = re.compile(r" *# -- stage (\d)(?: to (\d))?\n")


def program(stage: int) -> str:
    """Return the server of a stage, from 0 to LAST."""
    lines, is_in = [], False
    for line in GROWING.read_text("utf-8").splitlines(keepends=True):
        if mark := MARK.fullmatch(line):
            is_in = int(mark[1]) <= stage <= int(mark[2] or LAST)
        elif is_in:
            lines.append(line)
    text = re.sub(r"(import \w+)\n+(?=import )", r"\1\n", "".join(lines))
    return re.sub(r"\n+(?=def |class )", "\n\n\n", text)


if __name__ == "__main__":
    if sys.argv[1:] not in [[str(stage)] for stage in range(LAST + 1)]:
        sys.exit(f"cut_stage.py: say which stage, from 0 to {LAST}")
    print(program(int(sys.argv[1])), end="")
