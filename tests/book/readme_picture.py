"""The picture of the README: three terminals, from a real run.

    python3 tests/book/readme_picture.py   write it anew

Numbers of users and processes are replaced, so that a run on any machine
draws the same picture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "contrib/run.svg"
TITLES = ("a server", "a subscriber", "a publisher")
SERVER = "python3 sbus.py -v 2>&1 | grep -E ' (sub|msg|send) '"
SUBSCRIBER = "python3 sbus_client.py sub 'sensors/*/temp'"
PUBLISHERS = (
    "python3 sbus_client.py pub sensors/1/temp 21.5",
    "python3 sbus_client.py pub doors/1 open",
    "python3 sbus_client.py pub sensors/2/temp 19.0",
)
WIDTH, LINE = 720, 18  # pixels
SHOWN = re.compile(r" (sub|msg|send) ")
STYLE = (
    "svg { background: #14161a; font: 12px ui-monospace, monospace }"
    " text { fill: #d6dae1; white-space: pre }"
    " .title { fill: #8b93a1; font-family: sans-serif }"
    " .typed { fill: #7fb0ff } .rule { fill: #ffc24a }"
)


def run() -> list[list[str]]:
    """Run a server, a subscriber and publishers; return what each shows."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SBUS_ADDRESS": f"{folder}/bus"}
        env["PYTHONUNBUFFERED"] = "1"
        server = start(SERVER.partition(" 2>")[0], env)
        log = [read_until(server, "start")]
        subscriber = start(SUBSCRIBER, env)
        log += [read_until(server, " sub ")]
        heard = []
        for command in PUBLISHERS:
            words = [sys.executable, *command.split()[1:]]
            subprocess.run(words, env=env, cwd=ROOT, check=True)
            log += [read_until(server, " close ")]
            if "sensors" in command:
                heard.append(str(subscriber.stdout.readline()).rstrip())  # type: ignore[union-attr]
        for process in subscriber, server:
            process.terminate()
            process.communicate()
    lines = "\n".join(log).splitlines()
    return [
        [f"$ {SERVER}", *map(plain, filter(SHOWN.search, lines))],
        [f"$ {SUBSCRIBER}", *(line.replace("\t", "  ") for line in heard)],
        [f"$ {command}" for command in PUBLISHERS],
    ]


def start(command: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program of this folder."""
    words = command.replace("'", "").split()[1:]
    return subprocess.Popen(
        [sys.executable, *words],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Return what a process writes, up to the line with a word."""
    said = ""
    for line in process.stdout or ():
        said += line
        if word in line:
            return said
    raise AssertionError(said)


def plain(line: str) -> str:
    """Return a line of the log with the numbers of any machine."""
    line = re.sub(r"uid=\d+ pid=\d+ ", "uid=1000 ", line)
    return line.replace("sbusd: ", "")


def draw(panes: list[list[str]]) -> str:
    """Return the terminals as SVG, one below the other."""
    texts, y = [], 8
    for title, lines in zip(TITLES, panes):
        y += LINE
        texts.append(f'<text class="title" x="14" y="{y}">{title}</text>')
        for line in lines:
            y += LINE
            look = ' class="typed"' if line[0] == "$" else ""
            said = re.sub(r"\[[A-Z]+-\d+\]", r"</>\g<0></>", line)
            parts = [escape(part, quote=False) for part in said.split("</>")]
            parts[1::2] = [
                f'<tspan class="rule">{p}</tspan>' for p in parts[1::2]
            ]
            texts.append(f'<text{look} x="14" y="{y}">{"".join(parts)}</text>')
        y += LINE // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
        f' width="{WIDTH}" height="{y}" role="img" aria-label="Three'
        f' terminals: a server, a subscriber, a publisher">\n<style>{STYLE}'
        f'</style>\n<rect width="{WIDTH}" height="{y}" rx="8"'
        ' fill="#14161a"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(run()), "utf-8")
