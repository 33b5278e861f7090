"""Tests of the kit, against sbus.py and other servers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import broken_servers
import processes
from broken_servers import SBUS, Mistake, read_mistakes
from conformance.conversation import Failure, json_difference
from conformance.examples import Block, blocks_of, conversations, escape
from conformance.kit import CHECKS, Kit, all_cases, choose, left_out
from conformance.rules import SPEC, SPECIFICATION
from conformance.server import ServerProcess, descendants
from examples_of_spec import CASES, RULES
from fake_bus import run_on_fake_kernel
from processes import NAIVE, ROOT, naive, run, run_kit
from real_bus import needs_root, wait_for
from sizes import IS_SOAK, SOAK, either

RIGHT = f"{sys.executable} {SBUS} -f -a {{address}}"
CLIENT = f"{sys.executable} {NAIVE.parent}/client_adapter.py {{address}}"


def broken_naive(directory: Path, statement: str, start: str = "UNSUB") -> str:
    """Return a naive server that does *statement* on packets of a kind."""
    source = NAIVE.read_text("utf-8")
    place = '        head, nul, _ = packet.partition(b"\\0")\n'
    assert source.count(place) == 1
    when = (
        f'        if packet.startswith(b"{start}"):\n            {statement}\n'
    )
    path = directory / "server.py"
    path.write_text(source.replace(place, place + when), "utf-8")
    return naive(path)


# A server's beginning; what is wrong with it comes after that
USELESS = """
import socket, sys, time
from contextlib import suppress
from socket import SOCK_SEQPACKET as SEQPACKET, SOCK_STREAM as STREAM
wires = []
def listen(kind):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(sys.argv[1])
    listener.listen()
    return listener
def serve(welcome, count):
    listener = listen(SEQPACKET)
    while True:
        wires.append(listener.accept()[0])
        with suppress(OSError):
            for _ in range(count):
                welcome(wires[-1])
"""

SHOULD = ", where the server should close the connection"

# A server whose socket is there for a moment before it opens its trace
LATE = (
    "listener = open_listener(options, cleanup)",
    "listener = open_listener(options, cleanup); time.sleep(0.1)",
)

# A server that counts the lines that it left out, and names no process
COUNTED = (
    'log(f"{len(pids)} more of {user} [{rule}]: {names}")',
    'log(f"[{rule}] {user}: {names}; {len(pids)} are left out")',
)


# Options, the status, and a text that is printed; words in capital letters
# stand for options with a server or a client
CHOICES = [
    ("--list --only PUB-2,[MATCH-4] KEY-4 --only ADDR-8", 0, "[MATCH-4]\n"),
    ("--list --only PUB-2,[MATCH-4] KEY-4 --only ADDR-8", 0, "[ADDR-8]\n"),
    ("--list --only ECHO,PUB-2 --without ECHO-2,CTL", 0, "echo-by-default"),
    ("--list --only ECHO --level protocol", 0, "echo-by-default"),
    ("--list --only TRACE", 2, "of --level sbus"),
    ("--list --only 6-echoes", 0, "payload-of-a-switch [CTL-2] [ECHO-2]\n"),
    ("--list --only echoes", 0, "echo-by-default [ECHO-1]\n"),
    ("NAIVE --only TRACE --level protocol", 2, "nothing was run: it is of"),
    ("NAIVE --only UNSUB --level protocol", 0, "; UNSUB 2\n"),
    ("NAIVE --only UNSUB --level protocol", 0, "\njudged in part: UNSUB 1\n"),
    ("NAIVE --only ECHO --without ECHO-2,CTL", 0, "see --without"),
    ("NAIVE --without TRACES", 2, "no example of 'TRACES'"),
    ("NAIVE --only PUB-2 --verbose", 0, "  A > SUB "),
    (
        "NAIVE --only trace-of-payloads --jobs 1",
        1,
        "-> [Errno 2] No such file",
    ),
    ("RIGHT --random 0.2", 2, "which are too few, 0 wrong"),
    ("NAIVE CLIENT --only SUB-1 SUBB", 2, "no example of 'SUBB'; "),
    ("NAIVE CLIENT --only SUB-1", 0, "2 passed, 0 failed"),
    ("NAIVE CLIENT --only end-of-the-connection", 0, "1 passed, 0 failed"),
]
STANDS_FOR = {
    "NAIVE": ["--server", naive()],
    "RIGHT": ["--server", RIGHT],
    "CLIENT": ["--client", CLIENT],
}

TRUE = ("--server", "true {address}")
ROWS = b'{"a":{"7":{"b":1},"8":{"b":3},"9":2}}'


def test_the_report_can_be_processed() -> None:
    """It is JSON with the verdict on each rule."""
    only = ("--only", "CRED", "--level", "protocol", "--only", "LIMIT")
    done = run_kit("--server", naive(), "--json", *only)
    report = json.loads(done.output)
    assert done.status == 0 and not done.errors, done
    assert [*report["rules"]] == [*RULES]
    assert report["rules"]["CRED-4"] == "passed"
    assert report["rules"]["LIMIT-4"] == "not asked for"
    assert report["rules"]["PUB-2"] == "not run"
    assert report["rules"]["KEY-2"] == "no example"
    edition = rf"{SPECIFICATION} \([0-9a-f]{{8}}\)"
    assert re.fullmatch(edition, report["specification"])


@pytest.mark.parametrize(("words", "status", "shown"), CHOICES)
def test_what_is_chosen_is_run(words: str, status: int, shown: str) -> None:
    """What is to be shown is shown, and no example that was left out."""
    lists = (STANDS_FOR.get(word, [word]) for word in words.split())
    done = run_kit(*itertools.chain(*lists))
    assert done.status == status and shown in done.output + done.errors
    assert "echo-off" not in done.output or "echoes" in words, done


@needs_root  # with whom more can be tried
def test_a_page_prints_the_report_of_a_naive_server() -> None:
    """It keeps the whole protocol text; the figures are of today."""
    page = (ROOT / "book/implementers.md").read_text("utf-8")
    done = run_kit("--server", naive(), "--level", "protocol")
    printed = re.findall(r"^    ((?:[A-Z]+ +)?\d.* passed.*)$", page, re.M)
    assert len(printed) == 3 and done.status == 0
    assert {*printed} <= {*done.output.splitlines()}


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("os._exit(3)", "the server ended with status 3"),
        ("threading.Event().wait()", "A's !/cred/whoami is not answered"),
    ],
)
def test_a_crash_or_a_hang_is_a_finding(
    directory: Path, statement: str, reason: str
) -> None:
    """[UNSUB-1] The server is started anew, and the rest is run.

    [UNSUB-2] What a server may choose is no failure: it differs.
    """
    command = broken_naive(directory, statement)
    only = "unsubscribe-is-for-oneself,text-after-nul-in-subscribe"
    only += ",unsubscribe-what-is-not-held"
    done = run_kit("--server", command, "--only", only, "--seconds", "1")
    assert done.status == 1
    assert "FAILED [UNSUB-1] A server MUST" in done.output
    assert "  unsubscribe-is-for-oneself [UNSUB-1], step " in done.output
    assert "    A > SUB k\n" in done.output and reason in done.output
    assert "DIFFERS [UNSUB-2] A server MAY disconnect" in done.output
    assert "3 passed, 1 failed, 1 differs, 0 not" in done.output


def test_a_long_packet_in_a_report() -> None:
    """Its beginning and its end are shown."""
    shown = escape(b"MSG k\0" + bytes(100_000) + b" the end")
    assert shown.startswith(r"MSG k\0\0\0")
    assert shown.endswith(r"\0\0 the end (100014 bytes)")
    assert "..." in shown and len(shown) < 500


def test_a_server_that_knows_no_options(directory: Path) -> None:
    """Of what needs one nobody knows: that fails, if it is asked for."""
    path = directory / "server.py"
    source = NAIVE.read_text("utf-8")
    check = 'if len(sys.argv) > 2:\n    sys.exit("usage")\nlock ='
    path.write_text(source.replace("\nlock =", "\n" + check), "utf-8")
    only = ("--only", "CRED-9", "--only", "CRED-2")
    done = run_kit("--server", naive(path), *only)
    assert done.status == 1, done
    message = "with --cred-prefix !/cred/1/2/3: the server ended with"
    assert "FAILED [CRED-9] " in done.output
    assert f"-> {message} status 1: usage" in done.output
    assert ", 6 failed, " in done.output
    only = ("--only", "CRED", "--level", "protocol")
    done = run_kit("--server", naive(path), *only)
    assert done.status == 0 and " not asked for" in done.output


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (LATE, "starts-that-cannot-work"),
        pytest.param(COUNTED, "lines-of-each-user", marks=needs_root),
    ],
)
def test_a_server_that_is_otherwise_and_right(
    directory: Path, change: tuple[str, str], name: str
) -> None:
    """[RUN-1] [CONN-13] It need not do all as ours does."""
    path = directory / "server.py"
    source = SBUS.read_text("utf-8")
    path.write_text(Mistake("", (), (change,)).spoil(source), "utf-8")
    command = f"{sys.executable} {path} -f -a {{address}}"
    done = run_kit("--server", command, "--only", name)
    assert done.status == 0, done


@pytest.mark.parametrize(
    ("failures", "verdict"), [("1, 4", "flaky"), ("1, 3", "failed")]
)
def test_a_failure_that_does_not_come_again(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: str,
    verdict: str,
) -> None:
    """It is flaky, which blames nobody, if two passes come after it.

    That is so where the kit need not wait for a processor.
    """
    monkeypatch.setattr("conformance.kit.delayed_seconds", lambda: 0.0)
    note = directory / "note"
    opened = f"open({str(note)!r}, 'ab')"
    which = f"with {opened} as note: note.write(b'x')\n            "
    which += f"if os.path.getsize({str(note)!r}) in ({failures},): return"
    command = broken_naive(directory, f"{which} False")
    name = "unsubscribe-is-for-oneself"
    (case,) = (case for case in CASES if case.name == name)
    with ServerProcess(command, 2.0) as server:
        judge = Kit(server, "sbus", math.inf, tries_again=True).judge
        assert judge(case).verdict == verdict


def test_memory_of_a_server_under_a_tool(directory: Path) -> None:
    """[CONN-21] It is not judged if the time is scaled."""
    leak = "patterns-above-a-limit-are-kept"
    words = [sys.executable, broken_servers.__file__, leak, "-f", "-a"]
    server = ("--server", shlex.join([*words, "{address}"]))
    options = (*server, "--only", "ways-to-leave")
    done = run_kit(*options)
    assert done.status == 1 and "bytes more" in done.output
    done = run_kit(*options, "--timeout-scale", "1.5")
    assert done.status == 0, done


def test_what_a_server_wrote(directory: Path) -> None:
    """A failure has what the server wrote meanwhile, short enough."""
    text = "print(packet.decode(), 'x' * 99, file=sys.stderr, flush=True)"
    ignore = text + '\n            if packet[:6] == b"UNSUB ": return True'
    command = broken_naive(directory, ignore, "")
    done = run_kit("--server", command, "--only", "SUB-1,UNSUB-1")
    words = re.findall(r"\(the server wrote: (.+)\)\n", done.output)
    assert done.status == 1 and len(words) == 5 * done.output.count("->")
    assert all(first[:4] == "SUB " for first in words[::5])
    assert words[2] == "..." and max(map(len, words)) < 60


@pytest.mark.skipif(not IS_SOAK, reason="make soak runs it")
@SOAK
@pytest.mark.parametrize("server", [naive(), RIGHT])
def test_a_right_server_on_a_busy_machine(server: str) -> None:
    """It is never blamed, in twenty runs beside four busy loops."""
    level = "protocol" if "naive" in server else "daemon"
    loop = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as loops:
        for _ in range(4):
            process = loops.enter_context(subprocess.Popen(loop))
            loops.callback(process.kill)
        for _ in range(20):
            options = ("--level", level, "--total", "600")
            done = run_kit("--server", server, *options, timeout=3_600)
            assert done.status == 0, done.output


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("some text\n", "no block of an example"),
        ("conversaton x [SUB-1]\nA > SUB k\n```\n", "line 2: ```conv"),
        ("conversation x\nA > SUB k\n```\n", "is not ```KIND a-name"),
        ("conversation x [SUB-1]\nA > SUB k\n", "line 2: no line ```"),
        ("conversation x [SUB-1]\nwait a bit\n```", "not a step: 'wait"),
        ("conversation x [SUB-9]\nA close\n```\n", "no rule is SUB-9"),
        ("match x [SUB-1]\nk yes\n```", "line 2: x: not a pattern"),
        ("match x [SUB-1]\n{A.pid} k yes\n```", "no variable may"),
        ("packet x [SUB-1]\nSUBk\n```", "line 2: x: not a packet and"),
    ],
)
def test_examples_that_are_wrong(
    directory: Path, text: str, wrong: str
) -> None:
    """It is said in one line where and how, and nothing is run."""
    file = directory / "mine.md"
    file.write_text(f"\n{'```' * (' ' in text[:17])}{text}", "utf-8")
    done = run_kit("--server", naive(), "--examples", str(file))
    assert (done.status, done.output) == (2, "")
    assert wrong in done.errors and done.errors.count("\n") == 1, done


def test_an_example_of_many_steps(directory: Path) -> None:
    """All are shown, but for those between two that differ in a number."""
    file = directory / "mine.md"
    steps = "A > SUB first\nA > SUB k/{1..28}\nA > SUB {A.uid}\nA < end"
    file.write_text(f"```conversation x [SUB-1]\n{steps}\n```", "utf-8")
    done = run_kit("--server", naive(), "--examples", str(file))
    between = "... 26 more between these two"
    shown = f"    A > SUB k/1\n    {between}\n    A > SUB k/28\n"
    assert "    A > SUB first\n" in done.output and shown in done.output
    assert f"    A > SUB {os.getuid()}\n" in done.output


def test_every_option_is_explained() -> None:
    """The help is the docstring of the module, which is not generated."""
    source = (SPEC / "conformance/__main__.py").read_text("utf-8")
    said, _, code = source.partition("from __future__")
    options = {*re.findall(r'"(--[a-z-]+)"', code)}
    assert not {option for option in options if option not in said}


def test_the_walk_is_a_part_of_the_verdict(directory: Path) -> None:
    """It is run by default.  What it finds is short, and an example.

    It names a rule by which the model decided, and a right server
    passes it.
    """
    path = directory / "server.py"
    source = SBUS.read_text("utf-8")
    mistake = read_mistakes()["star-needs-a-byte"]
    path.write_text(mistake.spoil(source), "utf-8")
    server = f"{sys.executable} {path} -f -a {{address}}"
    only = ("--only", "random-conversations", "--save", str(directory))
    done = run_kit("--server", server, *only, "--seconds", "0.5")
    assert done.status == 1, done
    assert "; the model decided by [" in done.output
    file = directory / "random-conversations.md"
    (block,) = blocks_of(file.read_text("utf-8"), "it")
    assert len(block.lines) < 8 and "[MATCH-1]" in done.output, done
    examples = ("--examples", str(file))
    assert run_kit("--server", server, *examples).status == 1
    assert run_kit("--server", RIGHT, *examples).status == 0
    (check,) = [case for case in CHECKS if case.name == only[1]]
    assert not left_out(check, "sbus", set())


@SOAK
def test_a_right_server_at_random() -> None:
    """It is not blamed for what the specification leaves open."""
    walk = ("--random", either("90", "10"), "--seed", str(os.getpid()))
    done = run_kit("--server", RIGHT, *walk)
    assert ", 0 wrong, " in done.output, done.output


def test_several_servers_at_once(directory: Path) -> None:
    """The results are the same, and in the same order."""
    command = broken_naive(directory, "return True", "UNSUB")
    only = ("--only", "SUB,UNSUB,PKT", "--level", "protocol", "--json")
    reports = []
    for jobs in ("1", "5"):
        done = run_kit("--server", command, *only, "--jobs", jobs)
        results = json.loads(done.output)["results"]
        names = [(row["case"], row["verdict"]) for row in results]
        reports.append((done.status, names))
    assert reports[0] == reports[1] and reports[0][0] == 1


def test_failures_that_are_known(directory: Path) -> None:
    """They are no failures, until one of them no longer fails."""
    file = directory / "known.txt"
    only = ("--only", "ECHO", "--except", str(file))
    file.write_text("ECHO-2  # not yet\npayload-of-a-switch\n", "utf-8")
    done = run_kit("--server", naive(), *only)
    assert done.status == 0 and " known, " in done.output, done
    assert "FAILED" not in done.output
    file.write_text("ECHO-2\necho-by-default\n", "utf-8")
    done = run_kit("--server", naive(), *only)
    assert done.status == 1
    assert done.errors == "conformance: no longer fails: echo-by-default\n"


def test_failed_examples_are_kept(directory: Path) -> None:
    """Each is a file, and fails again."""
    command = broken_naive(directory, 'packet += b"x"', "MSG")
    saved = directory / "failed"
    only = ("--only", "PUB-2,four-kinds")
    done = run_kit("--server", command, *only, "--save", str(saved))
    files = [*saved.iterdir()]
    assert done.status == 1 and len(files) > 1
    for file in files:
        again = run_kit("--server", command, "--examples", str(file))
        assert again.status == 1 and " failed, " in again.output, again


@pytest.mark.parametrize(
    "name, seconds, delay, busy_share, verdict",
    [
        ("unsubscribe-is-for-oneself", 0.6, 0.0, 1, "failed"),
        ("unsubscribe-is-for-oneself", 0.6, 9.0, 1, "flaky"),
        ("unsubscribe-is-for-oneself", 0.1, 9.0, 1 / 2, "failed"),
        ("two-that-wait-for-each-other", 0.1, 9.0, 1, "failed"),
        ("two-that-wait-for-each-other", 0.1, 9.0, 1 / 2, "not run"),
    ],
)
def test_a_delay_is_no_fault_of_a_server(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    seconds: float,
    delay: float,
    busy_share: float,
    verdict: str,
) -> None:
    """Where the kit had to wait, one pass is enough, with more time.

    Where it waited for much of that too, it cannot tell how long a server
    took.
    """
    command = broken_naive(directory, "__import__('time').sleep(1)")
    cases = choose(all_cases(), {name})
    delays = iter((0.0, delay))
    for function, replacement in {
        "delayed_seconds": lambda: next(delays),
        "busy_time": lambda: time.monotonic() * busy_share,
    }.items():
        monkeypatch.setattr(f"conformance.kit.{function}", replacement)
    with ServerProcess(command, seconds) as server:
        kit = Kit(server, "daemon", 1e6, frozenset(), tries_again=True)
        assert kit.judge(*cases).verdict == verdict


def test_one_failure_hides_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a family that takes long to fail is tried once."""
    tries = directory / "tries"
    note = f"open({str(tries)!r}, 'a').write('x')"
    wait = f"{note}; threading.Event().wait()"
    command = broken_naive(directory, wait, "UNSUB")
    cases = choose(all_cases(), {"UNSUB-1"})
    counts = []
    for share in (1.0, 0.0):
        tries.write_text("")
        monkeypatch.setattr("conformance.kit.FAMILY_SHARE", share)
        with ServerProcess(command, 0.4) as server:
            kit = Kit(server, "protocol", 1e6, tries_again=True)
            results = [*map(kit.judge, cases)]
        failed = [r for r in results if r.verdict == "failed"]
        counts.append((len(failed), len(tries.read_text())))
    (failures, often), (others, once) = counts
    assert failures == others > 2 and once < often - 2


def test_a_run_has_an_end(directory: Path) -> None:
    """What there is no time for is named, and is not a success.

    What passes takes no time.
    """
    command = broken_naive(directory, "return True", "UNSUB")
    only = ("--only", "UNSUB-1,SUB", "--total", "0.001", "--jobs", "1")
    done = run_kit("--server", command, *only)
    assert done.status == 1
    late = "^not run, [0-9]+: what failed took too long; see --total$"
    assert re.search(late, done.output, re.M), done
    done = run_kit("--server", naive(), *only)
    assert done.status == 0, done


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SIGTERM", ("--jobs", "3")),
        ("SIGINT", ("--random", "99")),
        ("SIGHUP", ("--jobs", "1")),
        ("SIGTERM", ("--stage", "6")),
    ],
)
def test_a_run_that_is_ended(
    directory: Path, name: str, options: Sequence[str]
) -> None:
    """It leaves neither its servers nor files behind."""
    words = [str(SPEC / "conformance"), "--server", RIGHT, *options]
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(directory)},
    ) as kit:
        wait_for(lambda: [*directory.glob("sbus-*/1")])  # where one listens
        servers = [*descendants(kit.pid)]
        kit.send_signal(getattr(signal, name))
        assert kit.wait(processes.SECONDS_MAX) > 128
    assert not [*directory.iterdir()]
    assert not [pid for pid in servers if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("time.sleep(99)", "No such file"),
        ("_ = listen(STREAM); time.sleep(99)", "wrong type for socket"),
        ("_ = listen(SEQPACKET); time.sleep(99)", "is not answered"),
        ("serve(lambda wire: wire.close(), 1)", "it closes every connection"),
        ("serve(print, 0)", "(for a server that grows there is --sta"),
        (
            'serve(lambda wire: wire.send(b""), 1)',
            "is not answered: received an empty pack",
        ),
        (
            'serve(lambda wire: wire.send(b"MSG k\\0"), 10**9)',
            "receives MSG k\\0 without end",
        ),
    ],
)
def test_a_server_that_does_not_serve(
    directory: Path, line: str, message: str
) -> None:
    """[CONN-1] It is said what is wrong, and nothing waits without end."""
    path = directory / "server.py"
    path.write_text(f"{USELESS}\n{line}\n", "utf-8")
    said = ""
    with ServerProcess(naive(path), 0.2) as server:
        for seconds in (0.5, 2.0, 8.0, 60.0):  # should a machine be slow
            server.start_seconds_max = seconds
            with pytest.raises(Failure) as failure:
                server.start()
            said = str(failure.value)
            if message in said:
                break
    assert message in said


@pytest.mark.parametrize("undelayed, verdict", [(1, "not run"), (2, "failed")])
def test_a_walk_blames_nobody_for_a_delay(
    monkeypatch: pytest.MonkeyPatch, undelayed: int, verdict: str
) -> None:
    """Of five tries, two must fail while the kit need not wait."""
    ends = itertools.cycle([*[9] * (5 - undelayed), *[0] * undelayed])
    delays = itertools.chain.from_iterable(zip(itertools.repeat(0), ends))
    for name, value in {
        "random_walk.delayed_seconds": functools.partial(next, delays),
        "random_walk.SHRINK_SECONDS": 0,
    }.items():
        monkeypatch.setattr(f"conformance.{name}", value)
    mistake = "only-the-first-subscriber-hears"
    words = [sys.executable, broken_servers.__file__, mistake, "-f", "-a"]
    (case,) = choose(all_cases(), {"random-conversations"})
    with ServerProcess(shlex.join([*words, "{address}"]), 0.2) as server:
        result = Kit(server, "sbus", 1e6, tries_again=True).judge(case)
    assert result.verdict == verdict


def test_a_walk_blames_nobody_for_what_passes_on_a_fresh_server(
    directory: Path,
) -> None:
    """It names the seed; this server loses something in two processes."""
    path, note = directory / "server.py", directory / "note"
    change = ("for receiver in receivers:", "for receiver in some(receivers):")
    code = f"""def some(receivers, lost=[], note={str(note)!r}):
    if len(receivers) < 2 or lost or os.path.getsize(note) > 1:
        return receivers
    lost.append(open(note, "a").write("x"))
    return receivers[:1]
"""
    note.touch()
    mistake = Mistake("loses-twice", (), (change,), code)
    path.write_text(mistake.spoil(SBUS.read_text("utf-8")), "utf-8")
    command = f"{sys.executable} {path} -f -a {{address}}"
    done = run_kit("--server", command, "--random", "4")
    assert ", 0 wrong, " in done.output and note.read_text() == "xx"
    assert "\nnot seen again on a fresh server: 1/" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--server", "sh -c 'echo no; exit 4' {address}"), "status 4: no"),
        (("--server", "sh -c 'kill -9 $$' {address}"), "killed: Killed"),
        (("--server", "/no/such {address}"), "cannot run /no/such"),
        (("--server", "yes {address}"), "killed: File size limit exc"),
        (("--server", "true"), "{address}"),
        (("--server", "' {address}"), "quotation"),
        ((*TRUE, "--seconds", "0"), "--seconds"),
        ((*TRUE, "--except", "/no/such/file"), "/no/such/file"),
        ((*TRUE, "--stage", "1", "--json"), "--stage"),
        (("--client", "true {address}", "--stage", "1"), "--stage"),
        (("--client", "true {address}", "--random"), "--random"),
        (("--client", "/no/such/client {address}"), "/no/such/client"),
        (("--list", "--timeout-scale", "nan"), "nan"),
        ((), "--server"),
    ],
)
def test_nothing_is_run(options: Sequence[str], message: str) -> None:
    """It is said in one line why not, with the status 2."""
    done = run_kit(*options)
    assert (done.status, done.output) == (2, "")
    assert re.fullmatch("conformance: .+\n", done.errors), done
    assert message in done.errors


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("A > SUB {B.pid}", "B is not there"),
        ("A > SUB k; A > MSG k\\0; A < no packet", "received MSG k\\0"),
        ("A > SUB k; A < end", f"received nothing{SHOULD}"),
        ("A > SUB k; A > MSG k\\0; A < end", f"received MSG k\\0{SHOULD}"),
        ("A > HELLO; A < nothing", "received the end"),
        ("A > SUB k; B > MSG k\\0", "received MSG k\\0"),
        ("A > SUB k; B > MSG k\\0; A < MSG k\\0", ""),
        ("A > SUB k; B > MSG k\\0; A < MSG k", "received MSG k\\0"),
        ("A > SUB k; B > MSG k\\0-; A < MSG {any}.", "received MSG k"),
        ("A > CMSG stats; A < CMSG stats\\0{json clients=1}", "clients: "),
        ("A > SUB k; B >> MSG k\\0{1..2}; A < MSG k\\0{1..2}", ""),
        ("A > SUB k; B >> MSG k\\0{1..2}; A < MSG k\\01", "received MSG"),
    ],
)
def test_conversation_is_complete_and_exact(lines: str, wrong: str) -> None:
    """What is received and not said, or not as said, is a failure."""
    spoken = tuple(lines.split("; "))
    block = Block("conversation", "x", ("SUB-1",), spoken, "x.md")
    result = run_on_fake_kernel(*conversations(block))
    assert result.what.startswith(wrong), result
    assert bool(wrong) == (result.verdict == "failed"), result
    assert bool(wrong) != ("(the clients close)" in result.dialogue)


@pytest.mark.parametrize(
    ("text", "members", "wrong"),
    [
        (b'{"b":{"c":2},"a":1}', "a=1 b.c=2 d=null b.d=null", ""),
        (b'{"a":1}', "a=2", "a: expected 2, received 1"),
        (b'{"a":true}', "a=1", "a: expected 1, received true"),
        (b'{"a":"1"}', "a=1", 'a: expected 1, received "1"'),
        (b'{"a":1', "a=1", 'received {"a":1, which is no JSON object'),
        (ROWS, "a.any.b=2", "a.any.b: expected 2, received 1, 3"),
        (ROWS, "a.7.b=1 a.9.b=2", "a.9.b: expected 2, received nothing"),
        (b"not JSON", "", ""),
    ],
)
def test_json_is_compared_as_such(
    text: bytes, members: str, wrong: str
) -> None:
    """The member that differs is named; order and white space are free."""
    assert json_difference(text, members) == wrong


@pytest.mark.parametrize(
    "line", ["A", "A > \\q", "A > {b.pid", "a > SUB k", "A room", "go"]
)
def test_step_that_is_none(line: str) -> None:
    """A slip in an example is not passed over."""
    block = Block("conversation", "x", ("SUB-1",), (line,), "x.md")
    with pytest.raises((ValueError, AssertionError)):
        list(conversations(block))


def test_without_the_specification(directory: Path) -> None:
    """Nothing is run, and that is not a success."""
    copy = shutil.copytree(SPEC / "conformance", directory / "conformance")
    done = run(str(copy), "--server", naive())
    assert done.status == 2 and "no examples" in done.errors, done


def test_the_folder_alone(directory: Path) -> None:
    """A copy of spec/ is all that an implementer needs."""
    copy = shutil.copytree(SPEC, directory / "spec")
    kit = copy / "conformance"
    arguments = (str(kit), "--server", naive(), "--only", "SUB-2")
    done = run(*arguments, cwd="/", env={})
    assert done.status == 0 and " passed, 0 failed" in done.output, done
