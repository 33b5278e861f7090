"""Tests of top: a table of keys on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios

import pytest

from commands import Terminal, publish_all, served, wait_for_patterns
from packets import publish
from processes import outcome
from real_bus import Listener, RealBus, wait_for
from tools.top import KEYS_MAX, Traffic

# ---- top: the loudest keys


@pytest.mark.parametrize("by_bytes", [False, True])
def test_order(by_bytes: bool) -> None:
    """The loudest key is first, and everything before it."""
    traffic = Traffic(by_bytes)
    for key, size, n in (b"a\t", 0, 2), (b"many", 8, 30), (b"b", 999, 1):
        for _ in range(n):
            traffic.add(key, size)
    lines = traffic.table(0.5)
    assert lines[0][:40].endswith("KEY")  # on a small terminal
    head, total, *rows = [line.split() for line in lines]
    assert head == ["MESSAGES/S", "BYTES/S", "KEY"]
    assert total == ["66.0", "2,478", "(all", "keys)"]
    many, tab = ["60.0", "480", "many"], ["4.0", "0", "a\\t"]
    large = ["2.0", "1,998", "b"]
    assert rows == ([large, many, tab] if by_bytes else [many, tab, large])


def test_many_keys() -> None:
    """Keys with few messages are forgotten, and count in all."""
    traffic = Traffic(by_bytes=False)
    for n in range(KEYS_MAX):
        traffic.add(b"%d" % n, 1)
        traffic.add(b"loud", 1)
    _, total, loud, *rest = traffic.table(1)
    assert total.split() == ["20,000.0", "20,000", "(all", "keys)"]
    assert loud.split()[::2] == ["10,000.0", "loud"]
    assert len(rest) < KEYS_MAX


def test_tables_in_a_pipe(listener: Listener) -> None:
    """[BLOCK-5] An empty line ends each table, and top holds nobody up."""
    words = ("top", "--interval=0.4", "--count=2", "--bytes", "k", "l")
    with served(listener, *words) as (process, server):
        server.send(publish(b"k", b"v"))
        expected = [b"CMSG blocking/soft/discard", b"SUB k", b"SUB l"]
        assert [server.receive() for _ in expected] == expected
        done = outcome(process)
    assert (done.status, done.errors) == (0, "")
    *tables, rest = done.output.split("\n\n")
    first, second = (table.splitlines()[-1].split() for table in tables)
    assert 0 < float(first[0]) <= 2.5 and first[2:] == ["k"]
    assert second == ["0.0", "0", "(all", "keys)"] and rest == ""


def frames_of(output: str) -> list[list[str]]:
    """Return what each frame shows, a string a row, and what is below."""
    first, *frames = output.split("\x1b[H\x1b[J")
    assert first == ""
    return [frame.split("\r\n") for frame in frames]


def publish_until(bus: RealBus, terminal: Terminal, rows: str) -> None:
    """Publish under forty keys until a frame has rows of a form."""
    form = rf"\x1b\[H\x1b\[J{rows}\x1b"
    messages = [(f"{n}/" + "x" * 60, b"v") for n in range(40)]

    def is_shown() -> bool:
        publish_all(bus.path, *messages)
        return terminal.read() and bool(re.search(form, terminal.output))

    wait_for_patterns(bus, 1)
    wait_for(is_shown)


@pytest.mark.parametrize("end", ["Ctrl-C", "no bus"])
def test_terminal(bus: RealBus, end: str) -> None:
    """Frames fit the terminal, which is in the end as it was; below the
    last one is the error, if there is one.
    """
    with Terminal("-a", bus.path, "top", "--interval=0.1") as terminal:
        publish_until(bus, terminal, r"(.*\r\n){7}")
        if end == "Ctrl-C":
            os.write(terminal.master, b"\x03")
        else:
            bus.stop()
        assert terminal.end() == (130 if end == "Ctrl-C" else 1)
        assert termios.tcgetattr(terminal.slave) == terminal.before
    frames = frames_of(terminal.output)
    error = r"sbus: the server at .* closed the connection: .*\r\n"
    # The terminal shows ^C where it comes, which may be inside of a frame
    form = rf".*\r\n{error}" if end == "no bus" else r"\^C"
    assert re.search(rf"{form}$", terminal.output)
    *frame, rest = max(frames[:-1], key=len)
    assert rest == "" and len(frame) == 7
    assert {len(row) for row in frame[2:]} == {60}
    assert len({row.split()[-1] for row in frame[2:]}) == 5
    rates = [float(row.split()[0]) for row in frame[2:]]
    assert rates == sorted(rates, reverse=True)


def test_terminal_that_changes_its_size(bus: RealBus) -> None:
    """The next frame fits; a terminal that has none is 80 by 24."""
    arguments = ("-a", bus.path, "top", "--interval=0.1")
    with Terminal(*arguments, columns=0, rows=0) as terminal:
        publish_until(bus, terminal, r"(.*\r\n){23}")
        size = struct.pack("HHHH", 3, 20, 0, 0)
        fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, size)
        terminal.output = ""
        publish_until(bus, terminal, r"(.{20}\r\n){2}")
