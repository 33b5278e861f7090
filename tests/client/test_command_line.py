"""Tests of what all commands share: options, errors, completion."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import manual
import sbus_client
from commands import sbus, wait_for_patterns
from processes import ENVIRONMENT, ROOT, SECONDS_MAX, run, started
from real_bus import RealBus, other_user, seqpacket, wait_for
from sbus_client import Client, Disconnected
from tools import command_line
from tools.stop import Stop

FORBIDDEN = "it may not be used by this user: its server lets others in with"
FORBIDDEN += " -g or -o"


class TestUsage:
    """Exit statuses, and one clear line."""

    @pytest.mark.parametrize(
        "arguments, error",
        [
            ((), "the following arguments are required: COMMAND"),
            (("nothing",), "argument COMMAND: invalid choice: 'nothing'.*"),
            (("whoami", "x"), "unrecognized arguments: x"),
            (("sub", "-x"), "unrecognized arguments: -x"),
            (("-a",), "argument -a/--address: expected one argument"),
        ],
    )
    def test_wrong_usage(self, arguments: tuple[str, ...], error: str) -> None:
        """A wrong command line is one line and the exit status 2."""
        done = sbus("/nowhere", *arguments)
        assert (done.status, done.output) == (2, "")
        what = f"sbus: {error}; --help lists the options\n"
        assert re.fullmatch(what, done.errors)

    @pytest.mark.parametrize("command", [["sub"], ["pub", "k"], ["whoami"]])
    def test_no_bus(self, directory: Path, command: list[str]) -> None:
        """No bus at the address is one line and the exit status 1."""
        path = str(directory / "bus")
        what = f"sbus: no bus at {path}: nothing is there; start sbusd"
        what += ", or give its address with -a\n"
        assert sbus(path, *command) == (1, "", what)

    def test_forbidden_bus(
        self, directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where another address is no help the line does not name -a."""
        path = directory / "bus"
        with seqpacket() as listener:
            listener.bind(str(path))
            path.chmod(0)
            with other_user():
                assert sbus_client.main(["-a", str(path), "whoami"]) == 1
        what = f"sbus: no bus at {path}: {FORBIDDEN}\n"
        assert capsys.readouterr() == ("", what)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("pub", "-a", "{}", "k", "v"),
            ("pub", "k", "v", "-a", "{}"),
            ("pub", "--address={}", "--", "k", "v"),
            ("-a", "/nowhere", "pub", "-a{}", "k", "v"),
        ],
    )
    def test_address_after_the_command(
        self, bus: RealBus, arguments: tuple[str, ...]
    ) -> None:
        """An address may follow the command; of several the last counts."""
        command = [word.format(bus.path) for word in arguments]
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert run("sbus_client.py", *command) == (0, "", "")
            assert peer.receive() == b"MSG k\0v"

    def test_address_after_every_command(self, directory: Path) -> None:
        """sub and whoami take it too."""
        path = str(directory / "bus")
        for arguments in (["sub", "-a", path, "x"], ["whoami", "-a", path]):
            done = run("sbus_client.py", *arguments)
            assert done.status == 1
            assert done.errors.startswith(f"sbus: no bus at {path}: ")

    def test_wrong_address(self) -> None:
        """A wrong address is one line and the exit status 1."""
        done = sbus("", "whoami")
        what = "sbus: '': a path has 1 to 107 bytes, none NUL\n"
        assert done == (1, "", what)

    def test_help(self) -> None:
        """The help names every command."""
        done = run("tools", "--help")
        assert (done.status, done.errors) == (0, "")
        for command in ("sub", "pub", "whoami"):
            assert re.search(f"^    {command} ", done.output, re.M)

    @pytest.mark.parametrize(
        "arguments", [["--help"], ["sub", "--help"], ["--version"]]
    )
    def test_help_on_a_full_device(self, arguments: list[str]) -> None:
        """It is output as any other."""
        what = "sbus: standard output: No space left on device\n"
        with open("/dev/full", "w") as full:
            command = [sys.executable, str(ROOT / "sbus_client.py")]
            done = subprocess.run(
                [*command, *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            )
        assert (done.returncode, done.stderr) == (1, what)

    @pytest.mark.parametrize(
        "command, facts",
        [
            (
                "sub",
                [
                    "[PATTERN ...]",
                    "a line each: its key, a tab, its payload",
                    "no printable text are escaped as in a Python bytes",
                    "'a/*' selects a/b but not a/b/c, 'a/' selects both",
                    "none at all selects all",
                ],
            ),
            (
                "pub",
                [
                    "[-a ADDRESS]",
                    "[KEY] [PAYLOAD]",
                    "KEY the routing key that subscribers' patterns select",
                    "'-' or no PAYLOAD is standard input as it is, a final"
                    " line feed included",
                    "write -- before a PAYLOAD that begins with '-'",
                ],
            ),
            ("whoami", ["[-a ADDRESS]", "credentials"]),
        ],
    )
    def test_help_of_a_command(self, command: str, facts: list[str]) -> None:
        """The help of a command says what it takes and prints."""
        env = {**ENVIRONMENT, "COLUMNS": "80"}
        done = run("tools", command, "--help", env=env)
        assert (done.status, done.errors) == (0, "")
        assert max(map(len, done.output.splitlines())) < 80
        text = " ".join(done.output.split())
        assert [fact for fact in facts if fact not in text] == []

    def test_examples_in_the_help(self, bus: RealBus) -> None:
        """The examples are commands that work together."""
        examples = {}
        for command in ("sub", "pub"):
            text = run("tools", command, "--help").output
            _, example = text.split("\nexample:\n  sbus ")
            examples[command] = shlex.split(example)
        with started(bus.path, *examples["sub"]) as subscriber:
            wait_for_patterns(bus, 1)
            assert sbus(bus.path, *examples["pub"]) == (0, "", "")
            assert subscriber.stdout
            line = "\t".join(examples["pub"][1:]) + "\n"
            assert subscriber.stdout.readline() == line
            bus.stop()

    @pytest.mark.parametrize(
        "arguments", [["--", "k", "-v"], ["k", "--", "-v"]]
    )
    def test_payload_that_begins_with_a_dash(
        self, bus: RealBus, arguments: list[str]
    ) -> None:
        """What follows -- is no option."""
        with bus.connect() as peer:
            peer.send(b"SUB k")
            peer.fence()
            assert sbus(bus.path, "pub", *arguments) == (0, "", "")
            assert peer.receive() == b"MSG k\0-v"

    @pytest.mark.parametrize(
        "arguments, what",
        [
            (["sub", "--count=0"], "'0' is not a number from 1"),
            (["pub", "k", "--repeat=x"], "'x' is not a number from 1"),
            (["pub", "k", "--rate=0"], "'0' is not a number from 0.000001 to"),
            (["top", "--interval=nan"], "'nan' is not a number from 0.000001"),
            (["sub", "--timeout=x"], "'x' is not a number from 0.000001 to"),
            (["bridge", "/one"], "the following arguments are required"),
            (["completion", "sh"], "argument shell: invalid choice: 'sh'"),
        ],
    )
    def test_wrong_value(self, arguments: list[str], what: str) -> None:
        """A wrong value is one line and the exit status 2."""
        done = run("tools", *arguments)
        assert (done.status, done.output) == (2, "")
        assert what in done.errors and done.errors.count("\n") == 1

    def test_address_in_the_environment(self, bus: RealBus) -> None:
        """SBUS_ADDRESS stands for -a, which is stronger; empty is none."""
        for value, arguments, status in (
            (bus.path, [], 0),
            ("/nowhere", ["-a", bus.path], 0),
            (bus.path, ["-a", "/nowhere"], 1),
        ):
            env = {**ENVIRONMENT, "SBUS_ADDRESS": value}
            command = ["sbus_client.py", "whoami", *arguments]
            assert run(*command, env=env).status == status

    def test_empty_address_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is as if it were not there."""
        monkeypatch.setenv("SBUS_ADDRESS", "")
        monkeypatch.setattr(sbus_client, "default_address", lambda: "/usual")
        with pytest.raises(Disconnected, match="no bus at /usual"):
            Client()

    def test_every_command_has_an_example(self) -> None:
        """It begins with the command, and can be parsed."""
        parser, commands = sbus_client.option_parsers(
            command_line.all_commands()
        )
        for name, command in commands.items():
            assert f"    {name} " in parser.format_help()
            _, example = command.format_help().split("\nexample:\n  sbus ")
            words = shlex.split(example.split(">")[0])
            assert words[0] == name
            assert parser.parse_args(words).command == name

    @pytest.mark.parametrize(
        "words, loaded",
        [
            (["whoami"], []),
            (["reply", "a", "true"], []),
            (["ping"], ["tools.options", "tools.ping"]),
        ],
    )
    def test_what_is_loaded(
        self, directory: Path, words: list[str], loaded: list[str]
    ) -> None:
        """Nobody pays for commands that are not used."""
        script = directory / "script"
        script.write_text(
            "import sys\nfrom tools.command_line import main\n"
            f"main(['-a', '{directory}/bus', *{words}])\n"
            "print(*(m for m in sys.modules if m.startswith('tools.')))\n"
        )
        env = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        done = run(str(script), env=env)
        assert {*done.output.split()} == {"tools.command_line", *loaded}


class TestInstall:
    def test_commands_run(self, directory: Path) -> None:
        """`make install` puts both where they find what they import."""
        prefix = f"PREFIX={directory}/usr"
        make = ["make", "-C", str(ROOT), f"PYTHON={sys.executable}", prefix]
        subprocess.run([*make, "install"], check=True, capture_output=True)
        for name, command in (("sbusd", []), ("sbus", ["record", "--help"])):
            done = subprocess.run(
                [directory / "usr/bin" / name, *command, "--help"],
                capture_output=True,
                text=True,
                cwd=directory,
            )
            assert done.stdout.startswith(f"usage: {name}")
        subprocess.run([*make, "uninstall"], check=True, capture_output=True)
        left = [path for path in directory.rglob("*") if path.is_file()]
        assert left == []


class TestManual:
    """The manual pages."""

    @pytest.mark.parametrize("name", manual.PAGES)
    def test_pages_are_up_to_date(self, name: str) -> None:
        """`make manual` would write them as they are."""
        page = ROOT / "contrib/man" / name
        assert page.read_text("utf-8") == manual.PAGES[name]()

    @pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
    @pytest.mark.parametrize("name", [*manual.PAGES, "sbus.7"])
    def test_pages_are_well_formed(self, name: str) -> None:
        """man has nothing to say against them."""
        page = str(ROOT / "contrib/man" / name)
        command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", page]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "SEE ALSO" in re.sub(".\b", "", done.stdout)


class TestCompletion:
    """completion: what bash completes."""

    def completed(self, *words: str) -> list[str]:
        """Return what bash offers for the last word."""
        script = run("tools", "completion", "bash").output
        quoted = " ".join(map(shlex.quote, words))
        script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _sbus"
        script += '; printf "%s\\n" "${COMPREPLY[@]}"; complete -p sbus'
        done = subprocess.run(
            ["bash", "--norc", "-c", script], capture_output=True, text=True
        )
        *offers, rule = done.stdout.splitlines()
        assert (done.stderr, rule) == ("", "complete -o default -F _sbus sbus")
        return [offer for offer in offers if offer]

    def offered_by_zsh(self, *words: str) -> list[str]:
        """Return what zsh offers, with what it calls for that replaced."""
        script = run("tools", "completion", "zsh").output
        quoted = " ".join(map(shlex.quote, words))
        script = f"_files() {{ }}; compadd() {{ shift; print -l -- $@ }}\n\
_sbus() {{\n{script}}}\nwords=({quoted}); CURRENT={len(words)}; _sbus"
        command = ["zsh", "-f", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.split()

    def offered_by_fish(self, *words: str) -> list[str]:
        """Return what fish offers."""
        script = run("tools", "completion", "fish").output
        script += f"complete -C {shlex.quote(' '.join(words))}"
        command = ["fish", "--no-config", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    @pytest.mark.parametrize(
        "words, offers",
        [
            (["sbus", "st"], {"stats"}),
            (["sbus", "stats", "--js"], {"--json"}),
            (["sbus", "record", "--seg"], {"--segment-mib"}),
            (["sbus", "completion", "z"], {"zsh"}),
        ],
    )
    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_other_shells(
        self, shell: str, words: list[str], offers: set[str]
    ) -> None:
        """They offer the same."""
        if not shutil.which(shell):
            pytest.skip(f"{shell} is not there")
        offered = getattr(self, f"offered_by_{shell}")(*words)
        assert offers <= {*offered}

    @pytest.mark.parametrize(
        "words, offers",
        [
            (["p"], ["pub", "ping"]),
            (["st"], ["stats"]),
            (["ping", "--"], ["--help", "--address", "--count", "--timeout"]),
            (["-a", "sub", "co"], ["control", "completion"]),
            (["--address", "=", "sub", "rec"], ["record"]),
            (["--v"], ["--version"]),
            (["sub", "--ti"], ["--time", "--timeout"]),
            (["-a", "/tmp/bus", "sub", "a/*", "--r"], ["--raw", "--ready-fd"]),
            (["record", "--seg"], ["--segment-mib", "--segment-seconds"]),
            (["bridge", "--a"], []),
            (["pub", "--a"], ["--address"]),
            (["completion", "b"], ["bash"]),
            (["sub", "-a", ""], []),
            (["--address", "=", ""], []),
        ],
    )
    def test_offers(self, words: list[str], offers: list[str]) -> None:
        """Commands, then the options of the command; else files."""
        assert self.completed("sbus", *words) == offers


class TestStop:
    def test_signal_that_interrupts_nothing(self) -> None:
        """It came just before poll(2) did, or to another thread."""
        place = Path(f"/proc/self/task/{threading.get_native_id()}/wchan")

        def send() -> None:
            wait_for(lambda: "poll" in place.read_text())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        with Stop() as stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            sender = threading.Thread(target=send)
            sender.start()
            assert stop.wait({}, SECONDS_MAX)
            sender.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        assert signal.getsignal(signal.SIGTERM) == before
