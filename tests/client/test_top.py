"""Tests of top: a table of keys on a terminal."""

from __future__ import annotations

import fcntl
import re
import struct
import termios

import pytest

from commands import Terminal, publish_all, served, wait_for_patterns
from packets import publish
from processes import outcome
from real_bus import Listener, RealBus
from sbus_client import Message
from tools.top import Top


class TestTop:
    """top: the loudest keys."""

    @pytest.mark.parametrize("by_bytes", [False, True])
    def test_order(self, by_bytes: bool) -> None:
        """The loudest key is first, and everything before it; rates are those
        of the interval, the last column is the total.
        """
        table = Top(by_bytes)
        for key, size, n in (b"many", 8, 30), (b"a\t", 0, 2), (b"b", 999, 1):
            for _ in range(n):
                table.add(Message(key, bytes(size)))
        lines = table.table(0.5)
        assert lines[0][:40].endswith("KEY")  # on a small terminal
        head, total, *rows = [line.split() for line in lines]
        assert head == ["MESSAGES/S", "BYTES/S", "MESSAGES", "KEY"]
        assert total == ["66.0", "2,478", "33", "(keys:", "3)"]
        many, tab = ["60.0", "480", "30", "many"], ["4.0", "0", "2", "a\\t"]
        large = ["2.0", "1,998", "1", "b"]
        assert rows == ([large, many, tab] if by_bytes else [many, tab, large])
        assert table.table(1)[1].split() == ["0.0", "0", "33", "(keys:", "3)"]

    def test_tables_in_a_pipe(self, listener: Listener) -> None:
        """[BLOCK-5] An empty line ends each; it holds nobody up."""
        words = ("top", "--interval=0.4", "--count=2", "--bytes", "k", "l")
        with served(listener, *words) as (process, server):
            server.send(publish(b"k", b"v"))
            expected = [b"CMSG blocking/soft/discard", b"SUB k", b"SUB l"]
            assert [server.receive() for _ in expected] == expected
            done = outcome(process)
        assert (done.status, done.errors) == (0, "")
        *tables, rest = done.output.split("\n\n")
        first, second = (table.splitlines()[2].split() for table in tables)
        assert 0 < float(first[0]) <= 2.5 and first[2:] == ["1", "k"]
        assert second == ["0.0", "0", "1", "k"] and rest == ""

    def frames(self, output: str) -> list[list[str]]:
        """Return what each frame shows, a string a row."""
        first, *frames = output.split("\x1b[H\x1b[J")
        assert first == ""
        return [frame.split("\r\n") for frame in frames]

    @pytest.mark.parametrize("end", ["Ctrl-C", "no bus"])
    def test_terminal(self, bus: RealBus, end: str) -> None:
        """Frames fit the terminal, which is in the end as it was; below the
        last one is the error, if there is one.
        """
        with Terminal("-a", bus.path, "top", "--interval=0.1") as terminal:
            wait_for_patterns(bus, 1)
            messages = [(f"{n}/" + "x" * 60, b"v") for n in range(10)]
            publish_all(bus.path, *messages)
            terminal.wait_for(r"keys: 10(?s:.*)\x1b\[J")
            if end == "Ctrl-C":
                terminal.press(b"\x03")
            else:
                bus.stop()
            assert terminal.end() == (130 if end == "Ctrl-C" else 1)
            assert termios.tcgetattr(terminal.slave) == terminal.before
        rows = self.frames(terminal.output)[-1]
        frame, rest = rows[:7], "\n".join(rows[7:]).replace("^C", "")
        what = "sbus: the server at .* closed the connection: .*\n"
        assert re.fullmatch(what if end == "no bus" else "", rest)
        assert {len(row) for row in frame[2:]} == {60}
        assert len({row.split()[-1] for row in frame[2:]}) == 5  # of ten keys
        rates = [float(row.split()[0]) for row in frame[2:]]
        assert rates == sorted(rates, reverse=True)

    def test_terminal_that_changes_its_size(self, bus: RealBus) -> None:
        """The next frame fits; a terminal that has none is 80 by 24."""
        arguments = ("-a", bus.path, "top", "--interval=0.1")
        with Terminal(*arguments, columns=0, rows=0) as terminal:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, *[(f"{n}", b"v") for n in range(40)])
            terminal.wait_for(r"keys: 40(?s:.*)\x1b\[J")
            assert len(self.frames(terminal.output)[-2]) == 24
            size = struct.pack("HHHH", 3, 30, 0, 0)
            fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, size)
            terminal.output = ""
            terminal.wait_for(r"\x1b\[H\x1b\[J(.{30}\r\n){2}\x1b\[H")
