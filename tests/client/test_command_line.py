"""Tests of what all commands share: options, errors, help, completion."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import manual
from commands import sbus, served
from processes import ENVIRONMENT, ROOT, Result, run
from real_bus import Listener, RealBus
from sbus_client import __version__
from tools import command_line, shared

FULL = "sbus: standard output: No space left on device\n"
CLOSED = "sbus: standard output is closed\n"
BLANKS = r"\(quote an argument that holds blanks\)"
DASHES = r"\(write -- before what begins with '-'\)"
NONE = "there is no command"
REQUIRED = "the following arguments are required"
NOT = "not allowed with argument"
AMOUNT = "is not a number from 1e-6 to 1e9"
TIME = "is not a time above 0, such as 90, 0.5, 15m, 1h or 2d"


class TestUsage:
    """Exit statuses, and one clear line."""

    @pytest.mark.parametrize(
        "arguments, error",
        [
            ("", "the following arguments are required: COMMAND"),
            ("nothing", "there is no command 'nothing'"),
            ("publish", f"{NONE} 'publish' \\(did you mean pub\\?\\)"),
            ("subscibe", f"{NONE} 'subscibe' \\(did you mean sub\\?\\)"),
            ("PUB", f"{NONE} 'PUB' \\(did you mean pub\\?\\)"),
            ("help X-1", "no command or rule is 'X-1'"),
            ("whoami -- -x", f"unrecognized arguments: -x {BLANKS}"),
            ("whoami x", f"unrecognized arguments: x {BLANKS}"),
            ("pub k two words", f"unrecognized arguments: words {BLANKS}"),
            ("sub -x", f"unrecognized arguments: -x {DASHES}"),
            ("sub --ready-fd 99", ".*: descriptor 99 is not open, or 0-2"),
            ("reply k --ready-fd 1 cat", ".*: descriptor 1 is not open, .*"),
            ("-V", r"unrec.*: -V \(did you mean --version\?\)"),
            ("--versoin", r"unrec.*: --versoin \(did you mean --version\?\)"),
            ("sub --jsn", r"unrec.*: --jsn \(did you mean --json\?\)"),
            ("reply -j0 k cat", "argument -j/--jobs: '0' is not a whole .*"),
            ("whoami -a /dev/fd/x", "descriptor x: not a number"),
            ("sub -n 0", "argument -n/--count: '0' is not a whole number .*"),
            ("sub --count=1.5", ".*: '1.5' is not a whole number .*"),
            ("pub k --rate=0", f".*: '0' {AMOUNT}"),
            ("top --interval=nan", f".*: 'nan' {TIME}"),
            ("sub -t x", f"argument -t/--timeout: 'x' {TIME}"),
            ("sub --json --raw", f"argument --raw: {NOT} --json"),
            ("sub --raw --time", "--time does not go with --raw or --null"),
            ("stats --json --openmetrics", f".*: {NOT} --json"),
            (
                "pub k v --lines",
                "give a PAYLOAD, or its parts on input",
            ),
            ("pub k --json", "give a KEY, or --json, whose lines have keys"),
            ("reply k", f"{REQUIRED}: COMMAND"),
            ("completion", "name a shell: bash, zsh or fish"),
            ("load --size=7", "--size must be at least 8"),
            ("completion sh", "argument shell: invalid choice: 'sh' .*"),
        ],
    )
    def test_wrong_usage(self, arguments: str, error: str) -> None:
        """A wrong command line is one line and the exit status 2."""
        done = run("tools", *arguments.split(), stdin=subprocess.DEVNULL)
        assert (done.status, done.output) == (2, "")
        what = f"sbus: {error}; --help lists the options\n"
        assert re.fullmatch(what, done.errors)

    @pytest.mark.parametrize("words", ["pub a/!/b v", "sub a/!/b"])
    def test_wrong_key(self, bus: RealBus, words: str) -> None:
        """[KEY-4] So is a key that no server takes."""
        done = sbus(bus.path, *words.split())
        assert done.status == 2 and "reserved for secrets" in done.errors

    @pytest.mark.parametrize("payload", ["-1e-05", "-inf", "-5,5", "-x"])
    def test_payload_with_a_minus(self, payload: str) -> None:
        """Both commands say how it is published."""
        for file in "tools", "sbus_client.py":
            done = run(file, "pub", "k", payload)
            assert done.status == 2
            assert "(write -- before what begins with '-')" in done.errors

    def test_wrong_limit(self) -> None:
        """So is a limit in the environment that is no number."""
        env = {**ENVIRONMENT, "SBUS_MAX_PACKET": "1e6"}
        done = sbus("/nowhere", "whoami", env=env)
        what = "sbus: SBUS_MAX_PACKET is '1e6', not a number"
        assert done == (2, "", f"{what}; --help lists the options\n")

    @pytest.mark.parametrize("command", ["sub", "pub k v", "whoami -q"])
    def test_no_bus(self, directory: Path, command: str) -> None:
        """No bus at the address is one line, whatever bytes it has, and 1."""
        done = sbus(f"{directory}/a\n\x1b", *command.split())
        what = f"sbus: no bus at {directory}/a\\n\\x1b: nothing is there;"
        assert (done.status, done.output) == (1, "")
        assert done.errors == f"{what} start the server, or give its address\n"

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
        self, bus: RealBus, file: str, arguments: str, status: int
    ) -> None:
        """[ADDR-1] It stands anywhere; SBUS_ADDRESS is for where it is not."""
        words = arguments.replace("BUS", bus.path).split()
        env = {**ENVIRONMENT, "SBUS_ADDRESS": bus.path}
        assert run(file, *words, env=env).status == status


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
    done = subprocess.run(
        [sys.executable, "-m", "sbus_tools", "help"],  # loads all commands
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (run("tools", "help").output, "")


class TestArguments:
    """How what is given is taken."""

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
        self, listener: Listener, words: str, packets: list[bytes]
    ) -> None:
        """Options stand anywhere; behind `--` there are none."""
        with served(listener, *words.split()) as (process, server):
            assert [server.receive() for _ in packets] == packets
            process.kill()

    @pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
    @pytest.mark.parametrize(
        "arguments",
        [
            "sub a/ -n 1 b/ -t 0.01",
            "pub a -t 9 b",
            "pub -- -k -v",
            "pub k -- --",
        ],
    )
    def test_both(self, bus: RealBus, file: str, arguments: str) -> None:
        """Both command lines take them."""
        done = run(file, "-a", bus.path, *arguments.split())
        status = 1 if "sub" in arguments else 0  # it heard 0 of 1
        assert done.status == status

    @pytest.mark.parametrize(
        "words, remark",
        [
            (["sub", "a*b", "-t0.1"], "'a*b' selects nothing: '*' ends its"),
            (["sub", "a/#", "-t0.1"], "'a/#' has no wildcard: '*' is one s"),
            (["pub", "a/*", "v"], "a/*: no pattern can select a '*' alone"),
        ],
    )
    def test_remarks(
        self, bus: RealBus, words: list[str], remark: str
    ) -> None:
        """[KEY-2] [MATCH-6] What can hardly be meant is done, and said."""
        done = sbus(bus.path, *words)
        assert (done.status, done.output) == (0, "")
        assert done.errors.startswith(f"sbus: {remark}")
        assert done.errors.count("\n") == 1
        assert sbus(bus.path, *words, "-q") == (0, "", "")


@pytest.mark.parametrize(
    "program, module",
    [
        ("tools", "sbus_client"),
        ("sbus_client", "argparse"),
        ("tools", "enum"),
        ("sbus_client", "enum"),
    ],
)
def test_interrupted_before_it_begins(
    directory: Path, program: str, module: str
) -> None:
    """Ctrl-C ends it without a word."""
    for name in "tools", "sbus_client.py":
        (directory / name).symlink_to(ROOT / name)
    slow = f"import os\nos.kill(os.getpid(), {signal.SIGINT:d})\n"
    (directory / f"{module}.py").unlink(missing_ok=True)
    (directory / f"{module}.py").write_text(slow)
    done = subprocess.run(
        [sys.executable, "-S", "-m", program, "sub"],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_file_of_the_folder() -> None:
    """Python is to run the folder, and not a file in it."""
    for file in "pub.py", "stats.py", "json_lines.py":
        error = run(f"tools/{file}").errors
        assert error.endswith("not a file: python3 tools COMMAND\n")
        assert error.count("\n") == 1


class TestStreams:
    """What becomes of a standard stream that is closed or broken."""

    @pytest.mark.parametrize(
        "words, error",
        [
            ("whoami >&-", CLOSED),
            ("whoami >/dev/full", FULL),
            ("sub --help >/dev/full", FULL),
            ("--version >/dev/full", FULL),
            ("sub -t 0.1 <&-", ""),
            ("sub -t 0.1 --time >&-", CLOSED),
        ],
    )
    def test_output(self, bus: RealBus, words: str, error: str) -> None:
        """What cannot be written is one line and no traceback.

        Closed input is no error of a command that does not read it.
        """
        done = in_a_shell("tools", f"-a {shlex.quote(bus.path)} {words}")
        assert done == (1 if error else 0, "", error)

    def test_small_command_line(self) -> None:
        """So it is with the help of sbus_client.py; a count is whole."""
        full = "sbus_client.py: [Errno 28] No space left on device\n"
        done = in_a_shell("sbus_client.py", "--help >/dev/full")
        assert done == (1, "", full)
        assert in_a_shell("sbus_client.py", "sub -n 1.5").status == 2

    @pytest.mark.parametrize("file", ["tools", "sbus_client.py"])
    @pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
    @pytest.mark.parametrize(
        "words, status", [("whoami -a /nowhere", 1), ("nothing", 2)]
    )
    def test_errors(
        self, file: str, words: str, status: int, where: str
    ) -> None:
        """An error that cannot be written leaves the exit status as it is."""
        assert in_a_shell(file, f"{words} {where}") == (status, "", "")

    @pytest.mark.parametrize("words", ["pub k", "pub k --lines"])
    def test_input(self, bus: RealBus, words: str) -> None:
        """Input that is closed, or cannot be read, is one line."""
        done = sbus(bus.path, *words.split(), preexec_fn=lambda: os.close(0))
        assert done == (1, "", "sbus: standard input is closed\n")
        with open(os.devnull, "w") as file:
            done = sbus(bus.path, *words.split(), stdin=file)
        assert done == (1, "", "sbus: [Errno 9] Bad file descriptor\n")


class TestHelp:
    def test_commands(self) -> None:
        """The help names every command; each has an example to parse."""
        parser, commands = shared.option_parsers(command_line.all_commands())
        text = run("tools", "help").output
        assert text == run("tools", "--help").output
        for name, command in commands.items():
            assert f"    {name} " in text
            _, example = command.format_help().split("\nexample:\n  sbus ")
            words = shlex.split(example.split(">")[0])
            assert words[0] == name
            assert parser.parse_args(words).command == name

    def test_help_of_a_command(self) -> None:
        """It says what the command takes and prints, in 80 columns."""
        env = {**ENVIRONMENT, "COLUMNS": "80"}
        done = run("tools", "sub", "--help", env=env)
        assert run("tools", "help", "sub", env=env) == done
        assert (done.status, done.errors) == (0, "")
        assert max(map(len, done.output.splitlines())) < 80
        for fact in (
            r"usage: sbus sub [-h] [-a ADDRESS]",
            "message as a line: its key, a tab, its payload",
            "--count N",  # CPython 3.13 says "-n, --count N"
            "'a/*' selects a/b but not a/b/c, 'a/' selects both",
        ):
            assert fact in " ".join(done.output.split())


class TestInstall:
    def test_commands_run(self, directory: Path) -> None:
        """`make install` puts both where they find what they import.

        Everybody may use them, whatever umask the installer has.
        """
        prefix = directory / "for everybody"
        make = ["make", "-C", str(ROOT), f"PYTHON={sys.executable}"]
        make.append(f"PREFIX={prefix}")
        subprocess.run(
            [*make, "install"], check=True, capture_output=True, umask=0o077
        )
        for path in prefix.rglob("*"):
            needed = 0o555 if path.is_dir() else 0o444
            assert path.stat().st_mode & needed == needed, path

        for name, command in (("sbusd", []), ("sbus", ["record"])):
            program = prefix / "bin" / name
            assert program.read_text().startswith(f"#!{sys.executable}\n")
            done = subprocess.run(
                [program, *command, "--help"],
                capture_output=True,
                text=True,
                cwd=directory,
            )
            assert done.stdout.startswith(f"usage: {name}")

        subprocess.run([*make, "uninstall"], check=True, capture_output=True)
        left = [path for path in directory.rglob("*") if path.is_file()]
        assert left == []

    @pytest.mark.parametrize("kind", ["relative", "options", "blank"])
    def test_unusual_names(self, directory: Path, kind: str) -> None:
        """The commands run from anywhere, whatever names they were given."""
        elsewhere = directory / "1/2/3/4"
        elsewhere.mkdir(parents=True)
        python = sys.executable
        prefix = str(directory / r"a\n b")
        if kind == "relative":
            prefix = os.path.relpath(directory / "there", ROOT)
        elif kind == "options":
            python += " -X utf8 -E"
        else:
            (directory / "my tools").mkdir()
            python = str(directory / "my tools/python")
            os.symlink(sys.executable, python)
        make = ["make", "-C", str(ROOT), f"PYTHON={python}"]
        make += [f"PREFIX={prefix}", "DESTDIR="]
        subprocess.run([*make, "install"], check=True, capture_output=True)
        for name in "sbus", "sbusd":
            program = Path(ROOT, prefix, "bin", name).resolve()
            assert re.search('"/.*/lib/sbus"', program.read_text())
            done = subprocess.run(
                [program, "--version"],
                capture_output=True,
                text=True,
                cwd=elsewhere,
            )
            assert (done.stdout, done.stderr) == (
                f"{name} {__version__}\n",
                "",
            )
        subprocess.run([*make, "uninstall"], check=True, capture_output=True)

    @pytest.mark.parametrize("command", [["sbus-spark"], ["-m", "sbus_spark"]])
    def test_pipeline_without_pyspark(
        self, directory: Path, command: list[str]
    ) -> None:
        """The command of the pipeline says in one line what is missing."""
        missing = "import sys\nsys.modules['pyarrow'] = None\n"
        (directory / "sitecustomize.py").write_text(missing)
        starter = directory / "sbus-spark"
        starter.write_text("from sbus_spark.cli import main\nexit(main())")
        done = subprocess.run(
            [sys.executable, *command, "compact", "table"],
            env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT}/pipeline:."},
            cwd=directory,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        what = r"sbus-spark: \w+ is not installed: pip install .*\n"
        assert re.fullmatch(what, done.stderr)


def test_rules_are_up_to_date() -> None:
    """`make manual` writes them anew; help prints one."""
    text = (ROOT / "tools/rules.txt").read_text("utf-8")
    assert text == manual.rules()
    done = run("tools", "help", "pub-1")
    assert done.status == 0 and done.output.startswith("PUB-1 A ")
    assert done.output in text


class TestManual:
    """The manual pages."""

    @pytest.mark.parametrize("name", manual.PAGES)
    def test_pages_are_up_to_date(self, name: str) -> None:
        """`make manual` would write them as they are."""
        page = ROOT / "contrib/man" / name
        assert page.read_text("utf-8") == manual.PAGES[name]()

    @pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
    @pytest.mark.parametrize("name", [*manual.PAGES, "sbus.7"])
    @pytest.mark.parametrize("columns", ["40", "80"])
    def test_pages_are_well_formed(self, name: str, columns: str) -> None:
        """man has nothing to say against them, however narrow it is."""
        page = str(ROOT / "contrib/man" / name)
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


class TestCompletion:
    """completion: what may come next."""

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
    def test_words(self, words: list[str], offers: set[str]) -> None:
        """Commands, then the options of the command; nothing for a file."""
        found = run("tools", "completion", "words", *words[:-1]).output.split()
        assert offers <= {*found} and bool(offers) == bool(found)
        assert "--address" not in found or "bridge" not in words

    @pytest.mark.parametrize(
        "words, offers",
        [
            (["sbus", "st"], {"stats"}),
            (["sbus", "stats", "--js"], {"--json"}),
            (["sbus", "-a", "sub", "record", "--seg"], {"--segment-mib"}),
            (["sbus", "completion", "z"], {"zsh"}),
        ],
    )
    @pytest.mark.parametrize("shell", SCRIPTS)
    def test_shells(
        self, directory: Path, shell: str, words: list[str], offers: set[str]
    ) -> None:
        """They ask the command, wherever it is, for what fits."""
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
        env = {"PATH": f"{directory}:{os.environ['PATH']}"}
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            env[name] = str(directory)  # where fish keeps a history
        done = subprocess.run(
            [shell, "-c", SCRIPTS[shell].format(script=script, words=text)],
            env={**ENVIRONMENT, **env},
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        assert offers <= {*done.stdout.split()}
