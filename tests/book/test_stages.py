"""The servers of the book's stages, and what the kit says of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import program_bus
from conformance import stages
from conformance.kit import all_cases, block_of
from conformance.rules import SPEC
from cut_stage import GROWING, LAST, MARK, program
from program_bus import FILE, ProgramKit
from sizes import either

KIT = Path(stages.__file__).parent
STAGES = range(1, LAST + 1)
FIRST = {  # what each stage asks first that can be seen on fake sockets
    1: "Read from every client",
    2: "Send a message to each client that has subscribed",
    3: "A slash at the end",
    4: "Answer the control packet",
    5: "A secret message reaches only",
    6: "Keep what the kernel refuses",
}
TO_ALL = """list(clients):
        if hears(client, key):
            send(client, packet)"""
TO_ALL_BUT_THE_NEXT = """clients:
        if hears(client, key):
            try:
                client.wire.send(packet)
            except OSError:
                close(client)"""
# In a stage: what a student writes, what instead, and what is then said
MISTAKES = [
    (1, "[listener, *clients]", "[listener]", "Read from every client"),
    (1, "__main__", "__man__", "Read from every client"),
    (1, "clients.remove(client)", "pass", "Go on when a client leaves"),
    (1, "else:\n        close", "elif 0:\n        close", "Go on when a"),
    (2, "409_600", "1024", "Send a message as it came"),
    (2, "except ConnectionResetError", "except KeyError", "After ECONNRESET"),
    (2, "in list(clients)", "in clients[:1]", "Send a message to each client"),
    (2, TO_ALL, TO_ALL_BUT_THE_NEXT, "A client that has left"),
    (2, "suppress(OSError)", "suppress(KeyError)", "A client that has left"),
    (2, "patterns = set()", "patterns = shared", "Keep the key of each SUB"),
    (2, "send(client, packet)", "send(client, key)", "Send a message to each"),
    (3, ">= len(wanted)", "> len(wanted)", "A slash at the end"),
    (3, "[: len(wanted)]", "[:]", "A client hears a key"),
    (3, "startswith(start) and", "startswith(wanted) and", "A star takes"),
    (3, 'and not rest.strip(b"*")', "", "After a star"),
    (4, "[key] += 1", "[key] = 1", "Count, so that"),
    (4, "and nul)", ")", "Disconnect a client whose packet"),
    (4, "if not space or", "if", "Disconnect a client whose packet"),
    (4, "wants_echo = key ==", "wants_echo = key !=", "After `echo/off`"),
    (5, 'kind == b"MSG" or', "True or", "Disconnect a client that subscribes"),
    (5, "is_secret(key):\n        return", "0:\n        return", "A secret"),
    (5, "fits, wanted, fields", "fits, fields, wanted", "A secret"),
    (6, "wire.setblocking(False)", "pass", "Keep what the kernel refuses"),
    (6, "options.max_backlog // 2", "0", "Go on with the publisher"),
    (6, "client.paused.add(publisher)", "pass", "Pause a publisher"),
    (6, "else:\n            close", "elif 0:\n            close", "Disc"),
]


def say(source: str, stage: int) -> str:
    """Return what the kit says of a server on fake sockets."""
    return ProgramKit(source).try_stages(stage)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_passes_its_stage_and_lacks_the_next(stage: int) -> None:
    """Also the one that stage 1 begins with."""
    assert say(program(stage), stage).startswith(f"Passed: stage {stage}, ")
    lacks = f"Missing next, for {stages.NAMES[stage]}: "
    assert say(program(stage - 1), stage).startswith(lacks + FIRST[stage])


def test_a_program_that_catches_all_is_left() -> None:
    """It waits in select again and again, and that is no mistake."""
    call = "ready, _, _ = select.select([listener, *clients], [], [])"
    source = program(1)
    assert call in source
    caught = f"try:\n            {call}\n        except:\n            continue"
    assert say(source.replace(call, caught), 1).startswith("Passed: stage 1, ")


@pytest.mark.parametrize("stage", either(STAGES, [1, LAST]))
def test_a_server_passes_on_real_sockets(stage: int, tmp_path: Path) -> None:
    """By the kit, to which an early one answers nothing."""
    file = tmp_path / FILE
    file.write_text(program(stage), "utf-8")
    assert f"Passed: stage {stage}, " in run_kit(file, stage)


def test_a_server_fails_on_real_sockets(tmp_path: Path) -> None:
    """The conversation is shown, and what is missing next."""
    file = tmp_path / FILE
    file.write_text(program(1), "utf-8")
    said = run_kit(file, 2)
    assert "A > SUB k" in said and "does not receive its own message" in said
    assert "Missing next, for stage 2" in said and FIRST[2] in said


def run_kit(file: Path, stage: int) -> str:
    """Return what the kit prints of a server."""
    server = f"{sys.executable} {file} -f -a {{address}}"
    words = [sys.executable, str(KIT), "--stage", str(stage)]
    words += ["--server", server]
    result = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    assert result.returncode == ("Passed" not in result.stdout), result
    return str(result.stdout)


@pytest.mark.parametrize(
    ("right", "loop"),
    [
        ("ready, _, _ =", "while 1:\n            0\n        "),
        ("packet = client", "[0 for _ in iter(int, 1)]\n    "),
    ],
)
def test_a_loop_without_end_is_left(
    right: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon enough."""
    monkeypatch.setattr(program_bus, "TURNS_MAX", 10_000)
    got = say(program(1).replace(right, loop + right, 1), 1)
    assert ": Read" in got and "Missing next" in got


@pytest.mark.parametrize(("stage", "right", "wrong", "said"), MISTAKES)
def test_a_mistake_is_named(
    stage: int, right: str, wrong: str, said: str
) -> None:
    """By the sentence that a student needs."""
    source = program(stage)
    assert right in source
    broken = "shared = set()\n" + source.replace(right, wrong, 1)
    got = say(broken, stage)
    assert f": {said}" in got and "Missing next" in got


def test_programs_are_the_lines_of_the_file() -> None:
    """But for the marks; each line is in one of them."""
    lines = GROWING.read_text("utf-8").splitlines(keepends=True)
    marks = {line for line in lines if MARK.fullmatch(line)}
    text = {*lines[lines.index("# -- stage 0\n") :]} - marks
    programs = [{*program(n).splitlines(keepends=True)} for n in (0, *STAGES)]
    assert set.union(*programs) == text
    assert all(later - text == set() for later in programs)


def test_what_a_stage_asks_is_there() -> None:
    """Each example and check that a stage names."""
    names = {block_of(case) for case in all_cases()}
    text = (SPEC / "stages.md").read_text("utf-8")
    assert text.count("\n- ") == len(stages.DEMANDS)
    asked = [name for _, _, text in stages.DEMANDS for name in text.split()]
    assert len(asked) == len({*asked}) > 70
    assert {name.strip("`") for name in asked} <= names
