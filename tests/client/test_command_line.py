"""Tests of what all commands share: options, errors, help, completion."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import manual
import sbus_client
import traceability
from client_ends import beside
from commands import (
    IMPORTING,
    python,
    ready,
    run_here,
    sbus,
    served,
    subscribed,
    with_file,
)
from packets import publish
from processes import (
    ENVIRONMENT,
    ROOT,
    SECONDS_MAX,
    Result,
    outcome,
    run,
    started,
)
from real_bus import Listener, RealBus, seqpacket
from small_pythons import SMALL_PYTHONS
from tools import command_line, shared

PROGRAMS = {"tools": "sbus", "sbus_client.py": "sbus_client.py"}
FULL = "sbus: standard output: No space left on device\n"
CLOSED = "sbus: standard output is closed\n"
BLANKS = r"\(quote an argument that holds blanks\)"
DASHES = r"\(write -- before what begins with '-'\)"
NONE = "there is no command"
REQUIRED = "the following arguments are required"
NOT = "not allowed with argument"
ENDS = "give --listen to the upper end, or --through to the lower one"
WRONG_ENDS = ["", "--listen u --through x", "--listen u --server x"]
TIME = "is not a time above 0, such as 90, 0.5, 15m, 1h or 2d"


# ---- Exit statuses, and one clear line


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("", "the following arguments are required: COMMAND"),
        ("nothing", f"{NONE} 'nothing'"),
        ("subscibe", f"{NONE} 'subscibe' \\(did you mean sub\\?\\)"),
        ("PUB", f"{NONE} 'PUB' \\(did you mean pub\\?\\)"),
        ("help X-1", "no command or rule is 'X-1'"),
        ("whoami -- -x", f"unrecognized arguments: -x {BLANKS}"),
        ("pub k two words", f"unrecognized arguments: words {BLANKS}"),
        ("sub -x", f"unrecognized arguments: -x {DASHES}"),
        ("pub k -1e-05", f"unrecognized arguments: -1e-05 {DASHES}"),
        ("pub k -5,5", f"unrecognized arguments: -5,5 {DASHES}"),
        ("sub --ready-fd 99", ".*: descriptor 99 is not open, or 0-2"),
        ("reply k --ready-fd 1 cat", ".*: descriptor 1 is not open, .*"),
        ("-V", r"unrec.*: -V \(did you mean --version\?\)"),
        ("sub --jsn", r"unrec.*: --jsn \(did you mean --json\?\)"),
        ("reply -j0 k cat", "argument -j/--jobs: '0' is not a whole .*"),
        ("whoami -a /dev/fd/x", "descriptor x: not a number"),
        ("sub -n 0", "argument -n/--count: '0' is not a whole number .*"),
        ("sub --count=1.5", ".*: '1.5' is not a whole number .*"),
        ("top --interval=nan", f".*: 'nan' {TIME}"),
        ("sub -t x", f"argument -t/--timeout: 'x' {TIME}"),
        ("sub --json --raw", f"argument --raw: {NOT} --json"),
        ("sub --raw --time", "--time does not go with --raw or --null"),
        ("stats --json --openmetrics", f".*: {NOT} --json"),
        ("pub k v --lines", "give a PAYLOAD, or its parts on input"),
        ("pub k --json", "give a KEY, or --json, whose lines have keys"),
        ("reply k", f"{REQUIRED}: COMMAND"),
        ("completion", "name a shell: bash, zsh or fish"),
        ("load --size=7", "--size must be at least 8"),
        ("completion sh", "argument shell: invalid choice: 'sh' .*"),
        *[(f"link {words}", ENDS) for words in WRONG_ENDS],
        ("link --through '", "argument --through: .*"),
        ("sbus_client.py sub -n 1.5", "argument -n/--count: invalid .*"),
        (
            "sbus_client.py pub k -5,5",
            f"unrecognized arguments: -5,5 {DASHES}",
        ),
    ],
)
def test_wrong_usage(arguments: str, error: str) -> None:
    """A wrong command line is one line and the exit status 2."""
    file, *words = with_file(arguments)
    done = run_here(file, *words)
    assert (done.status, done.output) == (2, "")
    line = f"{PROGRAMS[file]}: {error}; --help lists the options\n"
    assert re.fullmatch(line, done.errors)


@pytest.mark.parametrize("words", ["pub a/!/b v", "sub a/!/b"])
def test_wrong_key(bus: RealBus, words: str) -> None:
    """[KEY-4] A key that no server takes is a wrong command line."""
    done = run_here("tools", *words.split(), "-a", bus.path)
    assert done.status == 2 and "reserved for secrets" in done.errors


def test_wrong_limit() -> None:
    """A limit in the environment that is no number is a wrong command line."""
    env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "1e6"}
    text = "sbus: SBUS_MAX_PACKET is '1e6', not a number"
    text += "; --help lists the options\n"
    assert sbus("/nowhere", "whoami", env=env) == (2, "", text)


@pytest.mark.parametrize("command", ["sub", "pub k v", "whoami -q"])
def test_no_bus(directory: Path, command: str) -> None:
    """No bus at the address is one line, whatever bytes it has, and 1."""
    address = f"{directory}/a\n\x1b"
    done = run_here("tools", *command.split(), "-a", address)
    error = f"sbus: no bus at {directory}/a\\n\\x1b: nothing is there;"
    assert (done.status, done.output) == (1, "")
    assert done.errors == f"{error} start the server, or give its address\n"


@pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
@pytest.mark.parametrize(
    "arguments, status",
    [
        ("whoami -a BUS", 0),
        ("whoami --address=BUS", 0),
        ("-a /nowhere whoami -aBUS", 0),
        ("-a BUS whoami", 0),
        ("whoami", 0),
        ("whoami -a /nowhere", 1),
        ("whoami -a= --timeout 1", 2),
    ],
)
def test_address(
    bus: RealBus, file: str, arguments: str, status: int, monkeypatch: Any
) -> None:
    """[ADDR-1] The address stands anywhere; SBUS_ADDRESS is the default."""
    words = arguments.replace("BUS", bus.path).split()
    monkeypatch.setenv("SBUS_ADDRESS", bus.path)
    assert run_here(file, *words).status == status


def in_a_shell(file: str, words: str) -> Result:
    """Run a program, with words and redirections for a shell.

    Python buffers standard error, as it does where nobody told it otherwise.
    """
    command = shlex.join([sys.executable, str(ROOT / file)])
    done = subprocess.run(
        ["sh", "-c", f"{command} {words}"],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_run_as_an_installed_module(directory: Path) -> None:
    """`python3 -m sbus_tools`, as setup installs the folder."""
    (directory / "sbus_tools").symlink_to(ROOT / "tools")
    (directory / "sbus_services").symlink_to(ROOT / "services")
    (directory / "sbus_client.py").symlink_to(ROOT / "sbus_client.py")
    done = python("-m", "sbus_tools", "help", cwd=directory)  # loads all
    assert done == run("tools", "help")


# ---- How what is given is taken


@pytest.mark.parametrize(
    "words, packets",
    [
        ("sub a/ -n 1 b/ -t9", [b"SUB a/", b"SUB b/"]),
        ("sub -n1 -- a/ -n", [b"SUB a/", b"SUB -n"]),
        ("pub k -t 9 v", [b"MSG k\0v"]),
        ("pub -t9 k -5", [b"MSG k\0-5"]),
        ("pub k -- -v", [b"MSG k\0-v"]),
        ("pub k -t 9 -- --", [b"MSG k\0--"]),
        ("pub -t9 -- -k -v", [b"MSG -k\0-v"]),
        ("reply -j2 k/ -j 3 cat -j 4", [b"SUB k/"]),
        ("reply k/ -q -- cat", [b"SUB k/"]),
    ],
)
def test_options_between(
    listener: Listener, words: str, packets: list[bytes]
) -> None:
    """Options stand anywhere; behind `--` there are none."""
    with served(listener, *words.split()) as (process, server):
        assert [server.receive() for _ in packets] == packets
        process.kill()


@pytest.mark.parametrize(
    "words, remark",
    [
        ("sub a*b -t0.1", "'a*b' selects nothing: '*' ends its"),
        ("sub a/# -t0.1", "'a/#' has no wildcard: '*' is one s"),
        ("pub a/* v", "a/*: no pattern can select a '*' alone"),
        ("sbus_client.py sub a*b -t0.1", "'a*b' selects nothing"),
        ("sbus_client.py sub a/# -t0.1", "'a/#' has no wildcard"),
    ],
)
def test_remarks(bus: RealBus, words: str, remark: str) -> None:
    """[KEY-2] [MATCH-6] A command does what is hardly meant, and says so in
    a line, also where Python makes errors of warnings.
    """
    file, *arguments = with_file(f"{words} -a {bus.path}")
    env = {**ENVIRONMENT, "PYTHONWARNINGS": "error"}
    done = run(file, *arguments, env=env)
    assert (done.status, done.output) == (0, "")
    assert done.errors.startswith(f"{PROGRAMS[file]}: {remark}")
    assert done.errors.count("\n") == 1
    if file == "tools":
        assert run(file, *arguments, "-q", env=env) == (0, "", "")


@pytest.mark.parametrize("module", ["argparse", "enum"])
@pytest.mark.parametrize("program", ["tools", "sbus_client"])
def test_interrupted_before_it_begins(
    directory: Path, program: str, module: str
) -> None:
    """Ctrl-C ends a command that still loads its modules without a word."""
    if module == "enum" and sys.version_info < (3, 10):
        pytest.skip("this Python has loaded it before any command")
    for name in "tools", "sbus_client.py":
        (directory / name).symlink_to(ROOT / name)
    slow = f"import os\nos.kill(os.getpid(), {signal.SIGINT:d})\n"
    (directory / f"{module}.py").write_text(slow)
    done = python("-S", "-m", program, "sub", cwd=directory)
    assert done == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
def test_interrupted_before_a_call(
    bus: RealBus, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Python warns of a call that Ctrl-C kept from a start; nobody is told."""

    def interrupted(_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(sbus_client, "run", interrupted)
    done = run_here(file, "-a", bus.path, "sub")
    assert done == (130, "", "")


def test_file_of_the_folder() -> None:
    """Python is to run the folder, and not a file in it."""
    env = {**ENVIRONMENT, "PYTHONSAFEPATH": ""}  # else it finds another file
    for file in "pub.py", "stats.py", "json_lines.py":
        errors = run(f"tools/{file}", env=env).errors
        assert errors.endswith("not a file: python3 tools COMMAND\n")
        assert errors.count("\n") == 1


# ---- What becomes of a standard stream that is closed or broken


@pytest.mark.parametrize(
    "words, error",
    [
        ("whoami >&-", CLOSED),
        ("whoami >/dev/full", FULL),
        ("sub -t 0.1 <&-", ""),
        ("sub -t 0.1 --time >&-", CLOSED),
    ],
)
def test_output(bus: RealBus, words: str, error: str) -> None:
    """Output that cannot be written is one line and no traceback.  Closed
    input is no error of a command that does not read it.
    """
    done = in_a_shell("tools", f"-a {shlex.quote(bus.path)} {words}")
    assert done == (1 if error else 0, "", error)


@pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    "words, status", [("whoami -a /nowhere", 1), ("nothing", 2)]
)
def test_errors(file: str, words: str, status: int, stream: str) -> None:
    """An error that cannot be written leaves the exit status as it is."""
    assert in_a_shell(file, f"{words} {stream}") == (status, "", "")


@pytest.mark.parametrize("words", ["pub k", "pub k --lines"])
def test_input(bus: RealBus, words: str) -> None:
    """Input that is closed, or cannot be read, is one line."""
    done = sbus(bus.path, *words.split(), preexec_fn=lambda: os.close(0))
    assert done == (1, "", "sbus: standard input is closed\n")
    with open(os.devnull, "w") as file:
        done = sbus(bus.path, *words.split(), stdin=file)
    assert done == (1, "", "sbus: [Errno 9] Bad file descriptor\n")


# ---- Help


def test_commands() -> None:
    """The help names every command; each has an example to parse."""
    parser, commands = shared.option_parsers(command_line.all_commands())
    text = run_here("tools", "help").output
    assert text == run_here("tools", "--help").output
    for name, command in commands.items():
        assert f"    {name} " in text
        _, example = command.format_help().split("\nexample:\n  sbus ")
        words = shlex.split(example.split(">")[0])
        assert words[0] == name
        assert parser.parse_args(words).command == name


def test_help_of_a_command() -> None:
    """The help says what the command takes and prints, in 80 columns."""
    env = {**ENVIRONMENT, "COLUMNS": "80"}
    done = run("tools", "sub", "--help", env=env)
    assert run("tools", "help", "sub", env=env) == done
    assert (done.status, done.errors) == (0, "")
    assert max(map(len, done.output.splitlines())) < 80
    for text in (
        r"usage: sbus sub [-h] [-a ADDRESS]",
        "message as a line: its key, a tab, its payload",
        "--count N",  # CPython 3.13 says "-n, --count N"
        "'a/*' selects a/b but not a/b/c, 'a/' selects both",
    ):
        assert text in " ".join(done.output.split())


# ---- Install


@pytest.mark.parametrize("kind", ["usual", "relative", "options", "blank"])
def test_installed_commands(directory: Path, kind: str) -> None:
    """`make install` puts both where they find what they import, and they run
    from anywhere.  Everybody may use them, whatever umask the installer has.
    """
    python = sys.executable
    prefix = str(directory / r"a\n b")
    if kind == "relative":
        prefix = os.path.relpath(directory / "there", ROOT)
    elif kind == "options":
        python += " -X utf8 -E"
    elif kind == "blank":
        (directory / "my tools").mkdir()
        python = str(directory / "my tools/python")
        os.symlink(sys.executable, python)
    elsewhere = directory / "1/2/3/4"
    elsewhere.mkdir(parents=True)
    make = ["make", "-C", str(ROOT), f"PYTHON={python}"]
    make += [f"PREFIX={prefix}", "DESTDIR="]
    options: Any = {"check": True, "capture_output": True, "text": True}
    subprocess.run([*make, "install"], umask=0o077, **options)
    place = Path(ROOT, prefix).resolve()
    for path in place.rglob("*"):
        needed = 0o555 if path.is_dir() else 0o444
        assert path.stat().st_mode & needed == needed, path

    for name in "sbusd", "sbus":
        page = (place / "share/man/man1" / f"{name}.1").read_text("utf-8")
        assert page == manual.roff_page(name)

    for name, command in ("sbusd", []), ("sbus", ["record"]):
        text = (place / "bin" / name).read_text()
        assert re.search('"/.*/lib/sbus"', text)
        assert kind != "usual" or text.startswith(f"#!{sys.executable}\n")
        words = [str(place / "bin" / name), *command, "--help"]
        done = subprocess.run(words, cwd=elsewhere, **options)
        assert done.stdout.startswith(f"usage: {name}")

    subprocess.run([*make, "uninstall"], **options)
    assert not [path for path in place.rglob("*") if path.is_file()]


@pytest.mark.parametrize("command", [["sbus-spark"], ["-m", "sbus_spark"]])
def test_pipeline_without_pyspark(directory: Path, command: list[str]) -> None:
    """The command of the pipeline says in one line what is missing."""
    missing = "import sys\nsys.modules['pyarrow'] = None\n"
    (directory / "sitecustomize.py").write_text(missing)
    starter = directory / "sbus-spark"
    starter.write_text("from sbus_spark.cli import main\nexit(main())")
    path = f"{ROOT}:{ROOT}/pipeline"
    done = python(*command, "compact", "table", cwd=directory, path=path)
    assert done.status == 2
    text = r"sbus-spark: \w+ is not installed: pip install .*\n"
    assert re.fullmatch(text, done.errors)


def test_rules_are_up_to_date() -> None:
    """If not: make requirements.  help prints one of them."""
    text = (ROOT / "tools/rules.txt").read_text("utf-8")
    assert text == traceability.sentences()
    done = run_here("tools", "help", "pub-1")
    assert done.status == 0 and done.output.startswith("PUB-1 A ")
    assert done.output in text


# ---- The manual pages


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
@pytest.mark.parametrize("name", ["sbusd.1", "sbus.1", "sbus.7"])
@pytest.mark.parametrize("columns", ["40", "80"])
def test_pages_are_well_formed(
    directory: Path, name: str, columns: str
) -> None:
    """man has nothing to say against them, however narrow it is."""
    page = str(ROOT / "contrib/man" / name)
    if name != "sbus.7":
        page = str(directory / name)
        assert run("contrib/man/manual.py", page) == (0, "", "")
    env = {**ENVIRONMENT, "MANWIDTH": columns}
    command = ["man", "--warnings", "-E", "UTF-8", "-l", page]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SEE ALSO" in re.sub(".\b", "", done.stdout)


BASH = """{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _sbus sbus
printf '%s\n' "${{COMPREPLY[@]}}"
"""
ZSH = """_files() {{ }}; compadd() {{ shift; print -l -- $@ }}
_sbus() {{
{script}}}
words=({words}); CURRENT=$#words; _sbus"""
FISH = """{script}
complete -C {words}"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


# ---- completion: what may come next


@pytest.mark.parametrize(
    "words, offers",
    [
        (["-a", "sub", "clients", ""], {"--timeout", "--json"}),
        (["--address", "=", "sub", "record", ""], {"--segment-mib"}),
        (["-q", ""], {"record", "clients", "--version"}),
        (["sub", "-a", ""], set()),
        (["--address", "=", ""], set()),
        (["bridge", "--a"], {"--pattern"}),
        (["help", ""], {"pub", "help"}),
    ],
)
def test_words(words: list[str], offers: set[str]) -> None:
    """Completion offers commands, then the options of the command, and nothing
    for a file.
    """
    done = run_here("tools", "completion", "words", *words[:-1])
    output = {*done.output.split()}
    assert offers <= output and bool(offers) == bool(output)
    assert "--address" not in output or "bridge" not in words


@pytest.mark.parametrize(
    "words, offer",
    [
        (["sbus", "st"], "stats"),
        (["sbus", "-a", "sub", "record", "--seg"], "--segment-mib"),
        (["sbus", "completion", "z"], "zsh"),
    ],
)
@pytest.mark.parametrize("shell", SCRIPTS)
def test_shells(
    directory: Path, shell: str, words: list[str], offer: str
) -> None:
    """A shell asks the command, wherever that is, for what fits."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not there")
    starter = directory / "sbus"
    command = shlex.join([sys.executable, str(ROOT / "tools")])
    starter.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    starter.chmod(0o755)
    script = run("tools", "completion", shell).output
    text = shlex.join(words)
    if shell == "fish":
        text = shlex.quote(" ".join(words))
    homes = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    env = {**ENVIRONMENT, **dict.fromkeys(homes, str(directory))}
    env["PATH"] = f"{directory}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", SCRIPTS[shell].format(script=script, words=text)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and offer in done.stdout.split()


COMMANDS = [
    *("sub", "sub --last", "pub k v", "request k v", "reply k cat", "whoami"),
    *("stats", "clients", "top", "record DIR", "keep", "bridge BUS BUS"),
    *("load", "sbus_client.py sub", "sbus_client.py pub k v"),
    *("sbus_client.py request k", "sbus_client.py whoami"),
]
LACKING = {word for text in SMALL_PYTHONS.values() for word in text.split()}
NO_JSON = """sbus: this Python has no module json: install python3 (Debian), \
python3-json (OpenWrt, Yocto)
"""


def small_python(directory: Path) -> dict[str, str]:
    """Return the environment of a Python that lacks what small ones lack."""
    modules = sorted(name for name in LACKING if "." not in name)
    lines = ["import socket, sys"]
    lines += [f"del {name}" for name in sorted(LACKING) if "." in name]
    lines += [f"sys.modules.update(dict.fromkeys({modules}))"]
    (directory / "sitecustomize.py").write_text("\n".join(lines))
    return {**ENVIRONMENT, "PYTHONPATH": str(directory)}


@contextlib.contextmanager
def answering(listener: Listener, packet: bytes) -> Iterator[None]:
    """Greet each client with a packet."""
    is_over = threading.Event()

    def serve() -> None:
        with contextlib.ExitStack() as peers:
            while not is_over.is_set():
                peer = peers.enter_context(listener.accept())
                with contextlib.suppress(OSError):  # it may have gone
                    peer.send(packet)

    with beside(serve), seqpacket() as last:
        try:
            yield
        finally:
            is_over.set()
            last.connect(listener.path)


def assert_printable(text: str) -> None:
    """Check that a terminal obeys nothing of an output."""
    assert all(line.isprintable() for line in text.splitlines()), text


@pytest.mark.parametrize("is_small", [False, True])
def test_malformed_packet(
    listener: Listener, directory: Path, is_small: bool
) -> None:
    """[CLIENT-2] A malformed packet ends each command with one line and the
    status 1, also in a Python without all that small ones lack.  A command
    that needs more says which package has it.
    """
    env = small_python(directory) if is_small else ENVIRONMENT
    env = {**env, "SBUS_ADDRESS": listener.path}
    for words in COMMANDS:
        words = words.replace("DIR", f"{directory}/capture")
        words = words.replace("BUS", listener.path)
        with answering(listener, b"\x1b[31m\xc2\x9b junk"):
            done = run(*with_file(words), env=env, stdin=subprocess.DEVNULL)
        assert (done.status, done.output) == (1, ""), words
        assert done.errors.count("\n") == 1
        assert_printable(done.errors)
        if is_small and words.startswith(("record", "stats", "clients")):
            assert done.errors == NO_JSON
        else:
            assert "the server sent a malformed packet" in done.errors


COUNTS = [
    (b"", 1),
    (b"[1]", 1),
    (b"[" * 100_000, 1),
    (b"\xff", 1),
    (b'{"client": 1, "clients": 5, "users": [7]}', 1),
    (b'{"client": 1, "clients": {"1": []}, "users": {"1": 0}}', 1),
    (
        b'{"client": "\\u001b[m", "patterns": "\\u202e\\ud800",'
        b'"clients": {"\\u009b[m": {"modes": ["\\u001b[m"], "uid": "\\n"}},'
        b'"users": {"1": {"clients": 1, "patterns": 2}}}',
        0,
    ),
]


@pytest.mark.parametrize("counts, status", COUNTS)
def test_malformed_counts(
    listener: Listener, counts: bytes, status: int
) -> None:
    """[CTL-5] One line says that the counts are malformed; what is printed is
    escaped.
    """
    with answering(listener, b"CMSG stats\0" + counts):
        for words in "stats", "stats --openmetrics", "clients":
            done = run_here("tools", *words.split(), "-a", listener.path)
            assert (done.status, bool(done.output)) == (status, not status)
            assert done.errors.count("\n") == status
            assert done.errors.count("malformed") == status
            assert_printable(done.output + done.errors)


def test_small_python(bus: RealBus, directory: Path) -> None:
    """Commands that need no JSON work, with messages of any size.  The others
    say which package has it.
    """
    env = small_python(directory)
    done = run("tools", "--help", env=env)
    assert done.status == 0
    assert all(f"    {name} " in done.output for name in command_line.COMMANDS)
    with ready(bus.path, "reply", "k", "cat", env=env) as process:
        asked = ("request", "k", "x", "-t99")
        assert sbus(bus.path, *asked, env=env) == (0, "x\n", "")
        process.terminate()
    with ready(bus.path, "sub", "-n2", "l", env=env) as process:
        text = "x" * 300_000
        for payload in text, "v":
            done = sbus(bus.path, "pub", "l", "-", input=payload, env=env)
            assert done == (0, "", "")
        assert outcome(process) == (0, f"l\t{text}\nl\tv\n", "")
    for words in "load --count 9", "top -n1 --interval 0.1":
        done = sbus(bus.path, *words.split(), env=env)
        assert (done.status, done.errors) == (0, "")
    for words in "stats", "clients", "load --count 9 --json":
        assert sbus(bus.path, *words.split(), env=env) == (1, "", NO_JSON)


@pytest.mark.parametrize("words", ["sub --help", "keep --help", "--help"])
def test_help_of_an_optimized_python(words: str) -> None:
    """`python -OO`, which drops docstrings, prints the same."""
    for file in "tools", "sbus_client.py":
        done = python("-OO", file, *words.split(), cwd=ROOT)
        assert done == run(file, *words.split())


@pytest.mark.parametrize(
    "words",
    ["tools whoami", "tools pub k v", "tools request k v", "tools stats"]
    + ["sbus_client.py whoami", "sbus_client.py pub k v"]
    + ["sbus_client.py request k v"],
)
@pytest.mark.filterwarnings("default")
def test_one_time_for_all(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout is for connecting and all that follows, and not for each."""
    now, waits = [1_000.0], []

    class SlowBus:
        """Each wait for it takes two seconds."""

        address, closed = "/bus", False
        subscribe = control = retry_in = __exit__ = lambda *_, **__: None
        answers = {"stats": {"client": 1}, "request": b""}
        answers["whoami"] = sbus_client.Credentials(1, 2, 3, b"!/cred/1/2/3")

        def __init__(self, *_: object, timeout: Any = None, **__: object):
            self.wait(timeout)

        def wait(self, *given: Any) -> None:
            waits.append(given[-1])
            now[0] += 2

        def __getattr__(self, name: str) -> Any:
            def call(*given: Any) -> Any:
                self.wait(*given)
                return self.answers.get(name)

            return call

        def __enter__(self) -> Any:
            return self

    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(sbus_client, "time", clock)
    monkeypatch.setattr(sbus_client, "Client", SlowBus)
    monkeypatch.setattr(shared, "LenientClient", SlowBus)
    assert run_here(*words.split(), "-t3").status == 0
    assert len(waits) > 1 and waits == [3, 1, 0][: len(waits)]


def test_ctrl_c_between_the_forks_of_load(
    bus: RealBus, directory: Path
) -> None:
    """No process is left, whenever Ctrl-C comes."""
    (directory / "sitecustomize.py").write_text(
        "import os, signal\n"
        "fork = os.fork\n"
        "def interrupted():\n"
        "    child = fork()\n"
        "    if child:\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "    return child\n"
        "os.fork = interrupted\n"
    )
    env = {**ENVIRONMENT, "PYTHONPATH": str(directory)}
    options = {"env": env, "start_new_session": True}
    words = ("load", "--subscribers=2", "--seconds=1000")
    with started(bus.path, *words, **options) as process:
        output, errors = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, output, errors) == (130, "", "")
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_load_beside_another(bus: RealBus) -> None:
    """Messages of others under the keys of load do not count."""
    options = ("--rate=200", "--count=100", "--subscribers=2", "--json")
    with (
        subscribed(bus) as peer,
        beside(lambda: sbus(bus.path, "load", *options)) as done,
    ):
        key = peer.receive()[4:].partition(b"\0")[0]
        forged = [b"", b"short", bytes(64), b"\xff" * 64]
        packets = [publish(key, payload) for payload in forged]
        peer.send(*packets, publish(key + b"/1", bytes(64)))
        peer.wire.close()
    status, output, errors = done.result()
    assert (status, errors) == (0, "")
    assert '"sent":100,' in output and '"lost":0,' in output


SERVICES = sorted(file.stem for file in (ROOT / "services").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_light_python_is_enough_for_a_service(name: str) -> None:
    """OpenWrt's has no logging, which concurrent.futures needs."""
    program = f"import sys, services.{name}; print('logging' in sys.modules)"
    command = [sys.executable, "-c", program]
    output = subprocess.check_output(command, env=IMPORTING, text=True)
    assert output == "False\n"
