"""What all benchmarks share: options, processes, rounds, tables.

A benchmark compares sides in rounds.  Each round measures each side once, so
that what slows the machine down slows all of them.  A cell of the table is
the median of the rounds.  The number in brackets is the ratio of the first
side to this one, the median of the rounds' ratios.  Ratios of one run mean
something; figures of two runs cannot be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

TOP = Path(__file__).resolve().parents[1]
SERVER = [sys.executable, str(TOP / "sbus.py")]
TOOLS = [sys.executable, str(TOP / "tools")]
START_SECONDS = 1.5  # in which a program is ready for the next one
START_SECONDS_MAX = 10
CPU_CLOCK = 2  # of a process: CPUCLOCK_SCHED of the kernel
PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class BenchError(Exception):
    """Something cannot be measured: one line says why."""


# ==== Programs ===============================================================


def run(work: Callable[[], int]) -> NoReturn:
    """Exit with the status that work returns, or 130 after a signal."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"  # of some peers
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in STOPPING:
        signal.signal(number, interrupt)
    try:
        sys.exit(work())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        end_processes()


def interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt, but only once: nothing disturbs the end."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def end_processes() -> None:
    """Kill all processes that this one started, and all that those started.

    When a process ends, its children become those of this one.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ==== Options ================================================================


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and the exit status 2."""

    def __init__(self, name: str, about: str | None, rounds: int) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(name, None, about, __doc__, formatter_class=layout)
        self.add_argument("--only", metavar="CASE,...")
        self.add_number("--rounds", rounds)

    def parse(self, cases: dict[str, str]) -> argparse.Namespace:
        """Return the options; their *cases* are those of --only."""
        options = self.parse_args()
        names = options.only.split(",") if options.only else [*cases]
        for name in names:
            if name not in cases:
                self.error(f"no case {name!r}; there are {', '.join(cases)}")
        options.cases = {name: cases[name] for name in names}
        return options

    def add_server_options(self, seconds: float) -> None:
        """Add --beside, with another server, and --seconds of a load."""
        add = self.add_argument
        add("--beside", metavar="COMMAND", type=server_command)
        self.add_number("--seconds", seconds, least=0.01)

    def add_number(self, name: str, default: float, least: float = 1) -> None:
        """Add an option with a number, of the same type as its default."""

        def parse(text: str) -> float:
            with contextlib.suppress(ValueError):
                if least <= float(text) < math.inf:
                    return type(default)(text)
            message = f"{text!r} is not {least:,} or more"
            raise argparse.ArgumentTypeError(message)

        self.add_argument(name, metavar="N", type=parse, default=default)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def server_command(text: str) -> list[str]:
    """Return the words of the command of a server, which is tried."""
    if "{address}" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} has no {{address}}")
    try:
        with server(shlex.split(text)):
            return shlex.split(text)
    except (BenchError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


# ==== Processes ==============================================================


@contextlib.contextmanager
def started(
    command: Sequence[str], stdout: int = subprocess.DEVNULL, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and kill its process group.  Raises: BenchError."""
    options = {"stdout": stdout, "start_new_session": True, **options}
    try:
        process = subprocess.Popen(command, **options)
    except OSError as error:
        why = f"cannot run {command[0]}: {error.strerror}"
        raise BenchError(why) from None
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure(program: str, status: int, errors: bytes) -> BenchError:
    """Return the error of a program that ended, with what it said last."""
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    said = "".join(f": {line[:200]}" for line in lines[-1:])
    return BenchError(f"{program} ended with status {status}{said}")


class Running(NamedTuple):
    """Programs that run."""

    address: str  # of a bus, or the folder where they all work
    pids: list[int]

    def cpu_seconds(self) -> float:
        """Return the processor time of them and of what they started."""
        return sum(map(cpu_seconds, self.pids))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of what it started."""
    seconds = time.clock_gettime(~pid << 3 | CPU_CLOCK)
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        children = map(int, file.read_text().split())
        seconds += sum(map(cpu_seconds, children))
    return seconds


@contextlib.contextmanager
def all_started(commands: Sequence[Sequence[str]]) -> Iterator[Running]:
    """Run programs in turn, with {} for a new folder.

    Raises: BenchError if one has ended.
    """
    with contextlib.ExitStack() as running:
        folder = tempfile.TemporaryDirectory(prefix="bench-")
        where = running.enter_context(folder)
        pids = []
        for command in commands:
            words = [word.replace("{}", where) for word in command]
            program = started(words, stderr=subprocess.DEVNULL)
            process = running.enter_context(program)
            time.sleep(START_SECONDS)
            if process.poll() is not None:
                raise BenchError(f"{shlex.join(words)} has ended")
            pids.append(process.pid)
        yield Running(where, pids)


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[Running]:
    """Run a server.  Raises: BenchError if it ends, or does not listen."""
    with tempfile.TemporaryDirectory(prefix="bench-") as where:
        os.chmod(where, 0o755)
        bus, log = f"{where}/bus", Path(where, "log")
        words = [word.replace("{address}", bus) for word in command]
        with log.open("wb") as errors, started(words, stderr=errors) as peer:
            try:
                wait_until_it_listens(bus, peer)
                yield Running(bus, [peer.pid])
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = peer.wait(0.1)  # it may be about to end
                    raise failure("the server", status, log.read_bytes())


def wait_until_it_listens(address: str, peer: subprocess.Popen[bytes]) -> None:
    """Return once a server listens.  Raises: BenchError."""
    end = time.monotonic() + START_SECONDS_MAX
    while peer.poll() is None and time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            if not wire.connect_ex(address):
                return
        time.sleep(0.01)
    raise BenchError(f"it does not listen after {START_SECONDS_MAX} s")


# ==== Rounds and tables ======================================================

Sample = dict[str, float]  # what a round has measured of a side, by figure
Sides = dict[str, Callable[[], Sample]]  # what is compared, the first with all


class Peer(NamedTuple):
    """Programs that do some work, and what speaks to them."""

    commands: list[list[str]]
    client: Callable[..., Any]


def sides_of_peers(
    peers: dict[str, Peer], measure: Callable[..., Sample], *case: Any
) -> Sides:
    """Return how to measure each peer that is installed."""
    return {
        side: partial(measure, peer, *case)
        for side, peer in peers.items()
        if is_installed(peer.commands[0][0])
    }


@cache
def is_installed(program: str) -> bool:
    """Return whether a program is there; say once if it is not.

    Its package has the same name.
    """
    if shutil.which(program):
        return True
    print(f"left out: install {program}", file=sys.stderr, flush=True)
    return False


def print_table(
    options: argparse.Namespace,
    figures: Sequence[str],
    sides_of: Callable[[str], Sides],
) -> int:
    """Measure the sides of each case, and print a table.

    A case that fails is told on standard error.  Returns: 1 if any failed.
    """
    status, heads = 0, ["case", "what", "by", *figures]
    print_row(heads)
    print_row(["---"] * len(heads))
    for case, about in options.cases.items():
        try:
            samples = measure(sides_of(case), options.rounds)
        except (BenchError, OSError) as error:
            print(f"{case}: {error}", file=sys.stderr, flush=True)
            status = 1
            continue
        ours, *_ = samples.values()
        for side, timed in samples.items():
            cells = (cell(figure, timed, ours) for figure in figures)
            print_row([case, about, side, *cells])
    return status


def measure(sides: Sides, rounds: int) -> dict[str, list[Sample]]:
    """Return the samples of each side; every other round goes backwards."""
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in [*sides][:: -1 if number % 2 else 1]:
            samples[side].append(sides[side]())
    return samples


def cell(figure: str, timed: list[Sample], ours: list[Sample]) -> str:
    """Return the median of a figure, and the ratio of ours to it."""
    if figure not in timed[0]:
        return ""
    median = statistics.median(sample[figure] for sample in timed)
    text = f"{median:,.0f}" if median >= 1_000 else f"{median:.3g}"
    if timed is ours or not all(sample[figure] for sample in timed):
        return text
    pairs = zip(ours, timed)
    ratio = statistics.median(a[figure] / b[figure] for a, b in pairs)
    return f"{text} ({ratio:.2f})"


def print_row(cells: Sequence[str]) -> None:
    """Print a row of a Markdown table."""
    print("|", " | ".join(cells), "|", flush=True)
