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
        assert total == ["66.0", "2,478", "33", "(3", "keys)"]
        many, tab = ["60.0", "480", "30", "many"], ["4.0", "0", "2", "a\\t"]
        large = ["2.0", "1,998", "1", "b"]
        assert rows == ([large, many, tab] if by_bytes else [many, tab, large])
        assert table.table(1)[1].split() == ["0.0", "0", "33", "(3", "keys)"]

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

    ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
    LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

    def frames(self, output: str) -> list[list[str]]:
        """Return what each frame shows, a string a row."""
        assert output.startswith(f"{self.ENTER}\x1b[H")
        drawn = output[len(self.ENTER) :].split("\x1b[?7h")[0]
        whole = re.findall(r"\x1b\[H(.*?)\x1b\[K\x1b\[J", drawn, re.DOTALL)
        return [frame.split("\x1b[K\r\n") for frame in whole]

    @pytest.mark.parametrize(
        "end, status", [("Ctrl-C", 130), ("SIGTERM", 143), ("no bus", 1)]
    )
    def test_terminal(self, bus: RealBus, end: str, status: int) -> None:
        """Frames fit the terminal; in the end it is as it was, and shows the
        error, if there is one.
        """
        with Terminal("-a", bus.path, "top", "--interval=0.1") as terminal:
            wait_for_patterns(bus, 1)
            messages = [(f"{n}/" + "x" * 60, b"v") for n in range(10)]
            publish_all(bus.path, *messages)
            terminal.wait_for(r"(?s)10 keys.*\x1b\[J")
            if end == "Ctrl-C":
                terminal.press(b"\x03")
            else:
                process = bus.process if end == "no bus" else terminal.process
                process.terminate()
            assert terminal.end() == status
            assert termios.tcgetattr(terminal.slave) == terminal.before
        output = terminal.output.replace("^C", "")
        _, leave, error = output.partition(self.LEAVE)
        what = "sbus: the server at .* closed the connection: .*\r\n"
        assert leave and re.fullmatch(what if status == 1 else "", error)
        frame = self.frames(output)[-1]
        assert len(frame) == 8
        assert {len(row) for row in frame[2:]} == {60}
        assert len({row.split()[-1] for row in frame[2:]}) == 6  # of ten keys
        rates = [float(row.split()[0]) for row in frame[2:]]
        assert rates == sorted(rates, reverse=True)

    def test_terminal_that_changes_its_size(self, bus: RealBus) -> None:
        """The next frame fits; a terminal that has none is 80 by 24."""
        arguments = ("-a", bus.path, "top", "--interval=0.1")
        with Terminal(*arguments, columns=0, rows=0) as terminal:
            wait_for_patterns(bus, 1)
            publish_all(bus.path, *[(f"{n}", b"v") for n in range(40)])
            terminal.wait_for(r"(?s)40 keys.*\x1b\[J")
            assert len(self.frames(terminal.output)[-1]) == 24
            size = struct.pack("HHHH", 3, 30, 0, 0)
            fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, size)
            terminal.output = ""
            row = r".{30}\x1b\[K"
            terminal.wait_for(rf"\x1b\[H({row}\r\n){{2}}{row}\x1b\[J")
