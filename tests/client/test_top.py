"""Tests of top: a table of keys on a terminal."""

from __future__ import annotations

import fcntl
import re
import struct
import termios
from collections.abc import Callable

import pytest

from commands import Terminal, publish_all, wait_for_patterns
from processes import outcome, started
from real_bus import Listener, RealBus
from sbus_client import Message
from tools import top
from tools.top import Top


class TestTop:
    """top: the loudest keys."""

    def table(self, output: str) -> list[list[str]]:
        """Return the fields of the first table."""
        lines = output.split("\n\n")[0].splitlines()
        assert lines[0].split() == ["MESSAGES/S", "BYTES/S", "MESSAGES", "KEY"]
        return [line.split(maxsplit=3) for line in lines[1:]]

    @pytest.mark.parametrize(
        "options, keys",
        [
            ([], ["many", "tab\\tbed", "large"]),
            (["--bytes"], ["large", "many"]),
        ],
    )
    def test_table_in_a_pipe(
        self, bus: RealBus, options: list[str], keys: list[str]
    ) -> None:
        """The loudest key is first, and everything before it."""
        options = ["--interval=0.5", "--count=1", *options]
        with started(bus.path, "top", *options) as command:
            wait_for_patterns(bus, 1)
            publish_all(
                bus.path,
                *[("many", b"12345678")] * 30,
                *[("tab\tbed", b"")] * 2,
                ("large", bytes(1000)),
            )
            done = outcome(command)
        assert (done.status, done.errors) == (0, "")
        total, *lines = self.table(done.output)
        assert total[2:] == ["33", "(3 keys)"]
        assert [line[3] for line in lines][: len(keys)] == keys
        many = next(line for line in lines if line[3] == "many")
        assert many[2] == "30"
        rate, speed = (float(text.replace(",", "")) for text in many[:2])
        assert 0 < rate <= 60 and abs(speed - 8 * rate) < 2

    def test_intervals(self, bus: RealBus) -> None:
        """Rates are those of the interval, the last column is the total."""
        options = ["--interval=0.2", "--count=3", "k", "l"]
        with started(bus.path, "top", *options) as command:
            wait_for_patterns(bus, 2)
            publish_all(bus.path, ("k", b"v"), ("k", b"v"), ("other", b"v"))
            tables = outcome(command).output.split("\n\n")
        assert len(tables) == 4 and tables[3] == ""
        rows = [line.split() for line in tables[2].splitlines()[1:]]
        assert rows[0] == ["0.0", "0", "2", "(1", "key)"]
        assert rows[1:] == [["0.0", "0", "2", "k"]]

    def test_modes(self, listener: Listener) -> None:
        """[BLOCK-5] It looks on, and holds nobody up."""
        command = started(listener.path, "top", "--count=1", "--interval=0.1")
        with command as process, listener.accept() as server:
            assert server.receive() == b"CMSG blocking/soft/discard"
            assert server.receive() == b"SUB "
            assert outcome(process).status == 0

    def test_many_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of too many keys the quieter half is forgotten."""
        monkeypatch.setattr(top, "TOP_KEYS_MAX", 4)
        table = Top()
        for key in (b"a", b"b", b"b", b"c", b"d", b"d", b"e"):
            table.add(Message(key, b""))
        assert [*table.keys] == [b"b", b"d"]
        assert table.table(1)[1].split() == ["7.0", "0", "7", "(2", "keys)"]

    ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
    LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

    def frames(self, output: str) -> list[list[str]]:
        """Return what each frame shows, a string a row."""
        assert output.startswith(self.ENTER)
        drawn = output[len(self.ENTER) :].split("\x1b[?7h")[0]
        first, *frames = drawn.split("\x1b[H")
        assert first == ""
        if not frames[-1].endswith("\x1b[J"):
            frames.pop()  # it was being drawn when a signal came
        rows = [frame.split("\r\n") for frame in frames]
        assert all(frame[-1].endswith("\x1b[K\x1b[J") for frame in rows)
        return [
            [re.sub(r"\x1b\[[JK]", "", row) for row in frame] for frame in rows
        ]

    @pytest.mark.parametrize(
        "end, status",
        [
            (lambda terminal: terminal.press(b"\x03"), 130),
            (lambda terminal: terminal.process.terminate(), 143),
        ],
        ids=["Ctrl-C", "SIGTERM"],
    )
    def test_terminal(
        self, bus: RealBus, end: Callable[[Terminal], None], status: int
    ) -> None:
        """Frames fit the terminal; in the end it is as it was."""
        with Terminal("-a", bus.path, "top", "--interval=0.1") as terminal:
            wait_for_patterns(bus, 1)
            messages = [(f"{n}/" + "x" * 60, b"v") for n in range(10)]
            publish_all(bus.path, *messages)
            terminal.wait_for("10 keys")
            end(terminal)
            assert terminal.end() == status
            assert termios.tcgetattr(terminal.slave) == terminal.before
        output = re.sub(r"\^C", "", terminal.output)
        assert output.endswith(self.LEAVE)
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

    def test_bus_that_ends(self, bus: RealBus) -> None:
        """The line of the error stays after the screen has gone."""
        with Terminal("-a", bus.path, "top") as terminal:
            wait_for_patterns(bus, 1)
            bus.stop()
            assert terminal.end() == 1
        assert re.search(
            re.escape(f"{self.LEAVE}sbus: the server at {bus.path} closed")
            + r" the connection: [^\r\n]*\r\n\Z",
            terminal.output,
        )
