"""Tests of the clients in contrib/clients/: the kit's examples for clients,
and a conversation of each with ours.

A client whose toolchain is not installed is skipped; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance.clients import Adapter, ClientKit, Line, all_client_cases
from conformance.server import Program
from processes import ROOT, SECONDS_MAX
from real_bus import RealBus
from sbus_client import Client, parse_request

CLIENTS = ROOT / "contrib/clients"
CREDENTIALS = b"!/cred/"


class Language(NamedTuple):
    """What a client needs, how its adapter is built, and how it is run.

    {out} is where what is built goes.
    """

    packages: str
    needs: str  # a command that fails where these are not installed
    build: str  # in a copy of the client's folder
    run: str
    fails: frozenset[str] = frozenset()  # examples, as the page says


REGISTRY = "/usr/share/cargo/registry"
LANGUAGES = {
    "c": Language(
        "gcc",
        "cc --version",
        "cc -std=gnu11 -O2 -Wall -Wextra -Werror -o {out}/adapter adapter.c",
        "{out}/adapter",
    ),
    "go": Language(
        "golang-go",
        "go version",
        "go build -o {out}/adapter ./adapter",
        "{out}/adapter",
    ),
    "rust": Language(
        "cargo and librust-socket2-dev",
        f"sh -c 'cargo --version && ls -d {REGISTRY}/socket2-*'",
        "cargo build --offline --example adapter --target-dir {out}"
        """ --config 'source.crates-io.replace-with="debian"'"""
        f""" --config 'source.debian.directory="{REGISTRY}"'""",
        "{out}/debug/examples/adapter",
    ),
    "javascript": Language(
        "nodejs, and koffi by npm install -g",
        """node -e 'require("koffi")'""",
        "node --check sbus.js",
        "env NODE_PATH={modules} node adapter.js",
    ),
    "perl": Language("perl", "perl -v", "perl -wc Sbus.pm", "perl adapter.pl"),
    "shell": Language(
        "socat",
        "socat -V",
        "sh -n sbus.sh",
        "env TMPDIR={out} sh adapter.sh",
        frozenset(["abstract-name"]),  # socat takes no NUL byte
    ),
}
# Where npm installs for all, unless that is said
MODULES = os.environ.get(
    "NODE_PATH", "/usr/lib/node_modules:/usr/local/lib/node_modules"
)


@pytest.fixture(scope="module", params=LANGUAGES)
def language(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Language, str]:
    """Build a client; return it, and the command of its adapter."""
    name: str = request.param
    language = LANGUAGES[name]
    out = tmp_path_factory.mktemp(name)
    here = out / "source"
    shutil.copytree(CLIENTS / name, here)
    caches = {"GOCACHE": f"{out}/cache", "CARGO_HOME": f"{out}/cargo"}
    environment = {**os.environ, **caches, "NODE_PATH": MODULES}

    def do(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            shlex.split(command.format(out=out)),
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )

    with contextlib.suppress(FileNotFoundError):
        if do(language.needs).returncode == 0:
            done = do(language.build)
            assert done.returncode == 0, done.stderr
            command = language.run.format(out=out, modules=MODULES)
            command = command.replace(" adapter", f" {here}/adapter")
            return language, f"{command} {{address}}"
    pytest.skip(f"{name} needs {language.packages}")


class Other:
    """A client in another language, which does as it is told."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def answer(self) -> Line:
        """Return its next answer."""
        line = self._adapter.answer(SECONDS_MAX)
        assert line, "it does not answer in time"
        return line

    def ask(self, word: str, *texts: bytes) -> Line:
        """Have it do something; return its answer."""
        self._adapter.tell(Line(word, texts))
        return self.answer()


Pair = tuple[RealBus, Client, Other]


@pytest.fixture
def pair(language: tuple[Language, str], directory: Path) -> Iterator[Pair]:
    """Give a bus, our client, and the other one on it."""
    with contextlib.ExitStack() as cleanup:
        limits = ("--max-backlog", "1000000")
        bus = cleanup.enter_context(RealBus(directory, *limits))
        client = cleanup.enter_context(Client(bus.path))
        program = Program(language[1], SECONDS_MAX)
        cleanup.enter_context(program)
        yield bus, client, Other(Adapter(program, bus.path, os.environ))


@pytest.fixture
def pool() -> Iterator[Executor]:
    """Give a thread in which the other client is asked."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def message(key: bytes, payload: bytes) -> Line:
    """Return the answer of a client that has received a message."""
    return Line("message", (key, payload))


# Keys and payloads of all bytes, of none, and the largest
ANYTHING = [
    (b"empty", b""),
    (b"two", b"\0\0x\0"),
    (b" \t\r\n\xc3\xa9\xff ", bytes(range(256))),
    (bytes({*range(1, 256)} - {*b"!"}), b"MSG a\0b\n"),
    (b"large", b"\0" * 409_585),
    (b"", b"last"),
]


def test_the_kit(language: tuple[Language, str]) -> None:
    """[ADDR-1] [CLIENT-1] [CLIENT-2] [CLIENT-3] [CLIENT-5] [CLIENT-6]
    [CLIENT-8] [CRED-12] [REQUEST-1] [REQUEST-2] [REQUEST-3] It does all that
    the examples ask for.
    """
    kit = ClientKit(language[1], SECONDS_MAX)
    results = map(kit.judge, all_client_cases())
    failed = {
        result.case: result for result in results if result.verdict == "failed"
    }
    assert failed.keys() == language[0].fails, failed


def test_messages(pair: Pair) -> None:
    """[PUB-4] [PUB-6] [CLIENT-2] Whole, and in order, both ways."""
    _, client, other = pair
    assert other.ask("subscribe", b"to/") == Line("ok")
    assert other.ask("whoami").texts[0].startswith(CREDENTIALS)
    client.subscribe("from/")
    client.sync()
    numbered = [(b"n", b"%d" % number) for number in range(100)]
    messages = [*ANYTHING, *numbered]
    for key, payload in messages:
        client.publish(b"to/" + key, payload)
    for key, payload in messages:
        assert other.ask("receive") == message(b"to/" + key, payload)

    for key, payload in messages:
        assert other.ask("publish", b"from/" + key, payload) == Line("ok")
    for key, payload in messages:
        received = client.receive(SECONDS_MAX)
        assert received == (b"from/" + key, payload)


def test_requests(pair: Pair, pool: Executor) -> None:
    """[REQUEST-1] [REQUEST-2] [REQUEST-3] Answered both ways, or failed.

    What comes between is kept.
    """
    _, client, other = pair
    for pattern in (b"news", b"service"):
        other.ask("subscribe", pattern)
    client.subscribe("ours")
    client.sync()
    for is_failure in (True, False):
        asked = pool.submit(other.ask, "request", b"ours", b"\0?")
        client.publish("news", b"0")
        question = parse_request(client.receive(SECONDS_MAX))
        assert question and question.payload == b"\0?"
        client.reply(question.failed() if is_failure else question, b"!\0")
        answer = asked.result()
        assert (
            answer.word == "error" if is_failure else answer.texts == (b"!\0",)
        )
        assert other.ask("receive") == message(b"news", b"0")

    ours = pool.submit(client.request, "service", b"\0\n\xff", SECONDS_MAX)
    assert other.ask("receive").texts[1].partition(b"\0")[2] == b"\0\n\xff"
    assert other.ask("reply", b"\n\0") == Line("ok")
    assert ours.result() == b"\n\0"
