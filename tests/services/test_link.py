"""Tests of link: a bus below another one, over streams of every kind."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_ends import beside
from processes import ROOT, SECONDS_MAX, run, signalled_at
from real_bus import wait_for
from sbus_client import Client, parse_request
from sizes import SOAK, either

PYTHON = shlex.quote(sys.executable)
RELAY = f"{PYTHON} {ROOT}/tests/services/relay.py"
SBUSD = f"{PYTHON} {ROOT}/sbus.py"
LINK = f"{PYTHON} {ROOT}/tools link -a"
OWN = f"!/cred/{os.getgid()}/{os.getuid()}/{{}}"
US = OWN.format(os.getpid()).encode()
LISTENS = 1 << 16  # a flag in /proc/net/unix


class Site:
    """Buses and ends of links, whose processes end with the test.

    The upper end of a link at the bus m and the socket up is started by
    upper("m", "up"), and the lower one, with a bus l, by lower("l", "up").
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sockets: list[socket.socket] = []

    def at(self, name: str) -> str:
        """Return the path of a socket or file."""
        return str(self.directory / name)

    def start(self, name: str, command: str) -> subprocess.Popen[bytes]:
        """Start a process; a file has what it says."""
        with open(self.at(f"{name}.log"), "ab") as log:
            words = shlex.split(command)
            process = subprocess.Popen(words, stdin=-3, stderr=log)
        self.processes[name] = process
        return process

    def bus(self, name: str, more: str = "") -> None:
        """Start a bus, with a trace."""
        options = f"-r -a {self.at(name)} --trace {self.at(name)}.trace"
        self.start(name, f"{SBUSD} {options} {more}")
        wait_for(lambda: self.says(f"{name}.log", "start"))

    def upper(self, bus: str, up: str, more: str = "") -> str:
        """Start an upper end; return its prefix."""
        end = f"{LINK} {self.at(bus)} --listen {self.at(up)} {more}"
        process = self.start(up, end)
        wait_for(lambda: is_listening(self.at(up)))
        return OWN.format(process.pid)

    def lower(self, bus: str, up: str, more: str = "", speed: int = 0) -> None:
        """Start a lower end, with a bus that has a trace."""
        server = f"{SBUSD} --trace {self.at(bus)}.trace"
        self.lower_by(bus, f"{RELAY} {self.at(up)} {speed}", server, more)

    def lower_by(self, bus: str, through: str, server: str, more: str) -> None:
        """Start a lower end with commands of one's own."""
        commands = "--through", through, "--server", server
        end = f"{LINK} {self.at(bus)} {shlex.join(commands)} {more}"
        self.start(f"{bus}.link", end)

    def says(self, name: str, text: str) -> bool:
        """Return whether a file has a text: a log, or a trace."""
        with contextlib.suppress(FileNotFoundError):
            return text in Path(self.at(name)).read_text("latin-1")
        return False

    def wait_for_log(self, name: str, text: str) -> None:
        """Return once a process has said a text."""
        wait_for(lambda: self.says(f"{name}.log", text))

    def linked(self, *names: str) -> None:
        """Return once ends are linked for the first time."""
        for name in names:
            self.wait_for_log(name, "linked: ")

    def client(self, bus: str, *patterns: str, **options: Any) -> Client:
        """Return a client that has subscribed."""
        client = Client(self.at(bus), timeout=SECONDS_MAX, **options)
        for pattern in patterns:
            client.subscribe(pattern)
        client.sync(SECONDS_MAX)
        return client

    def pids(self, words: str) -> list[int]:
        """Return the processes whose command line a pattern matches."""
        pids = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text("latin-1")
                if re.match(words, line.replace("\0", " ")):
                    pids.append(int(pid))
        return pids

    def end(self) -> None:
        """End all processes, those first that were started last."""
        for wire in self.sockets:
            wire.close()
        for process in reversed([*self.processes.values()]):
            process.terminate()
            process.wait(SECONDS_MAX)
        for pid in self.pids(f".*{self.at('')}"):  # whose parent was killed
            os.kill(pid, signal.SIGKILL)
        for log in self.directory.glob("*.log"):
            assert "Traceback" not in log.read_text("latin-1")


@pytest.fixture
def site(directory: Path) -> Iterator[Site]:
    place = Site(directory)
    try:
        yield place
    finally:
        place.end()


@pytest.fixture
def pair(site: Site) -> Site:
    """A master's bus m, and a bus l below it."""
    site.bus("m")
    site.upper("m", "up")
    site.lower("l", "up")
    site.linked("up", "l.link")
    return site


def heard(bus: Client, count: int) -> list[tuple[bytes, bytes]]:
    """Return the next messages, but not those of the links themselves."""
    messages: list[tuple[bytes, bytes]] = []
    while len(messages) < count:
        key, payload = bus.receive(SECONDS_MAX)
        if not key.startswith(b"sbus/"):
            messages.append((key, payload))
    return messages


def is_listening(path: str) -> bool:
    """Return whether a program listens at a path."""
    # Names of other programs are any bytes
    sockets = Path("/proc/net/unix").read_bytes().splitlines()
    end = b" " + os.fsencode(path)
    rows = (line.split() for line in sockets if line.endswith(end))
    return any(int(flags, 16) & LISTENS for _, _, _, flags, *_ in rows)


def can_pass(site: Site) -> bool:
    """Return whether messages pass both ways."""
    with (
        contextlib.suppress(OSError),
        site.client("m", "up") as above,
        site.client("l", "down") as below,
    ):
        above.publish("down")
        below.publish("up")
        return bool(above.receive(5) and below.receive(5))
    return False


# ---- Two buses are as one to those who use them


@SOAK
def test_order(pair: Site) -> None:
    """[PUB-6] What a process publishes, even secret, arrives in order, while
    as much comes the other way, with large packets.

    A bus discards what a link has no room for [BLOCK-9], so nobody gets far
    ahead.
    """
    count = either(50_000, 3_000)
    ahead = {bus: threading.Semaphore(1_000) for bus in "ml"}
    results = []

    def talk(bus: Client, keys: list[bytes], here: str) -> None:
        for number in range(count):
            assert ahead[here].acquire(timeout=SECONDS_MAX)
            size = 400_000 if number % 500 == 7 else 100
            bus.publish(keys[number % 2], b"%d".ljust(size) % number)

    def listen(bus: Client, here: str) -> None:
        numbers = []
        for _ in range(count):
            ((_, payload),) = heard(bus, 1)
            numbers.append(int(payload))
            ahead[here].release()
        results.append(numbers)

    threads = []
    for here, there in "ml", "lm":
        bus = pair.client(here, "n")
        inbox = bus.whoami().path + b"/n"
        bus.control("blocking/soft/block")
        bus.subscribe(inbox)
        bus.sync(SECONDS_MAX)
        words = pair.client(there), [there.encode(), inbox], here
        bus.subscribe(there)
        bus.sync(SECONDS_MAX)
        threads.append(threading.Thread(target=listen, args=[bus, here]))
        threads.append(threading.Thread(target=talk, args=words))
    wait_for(lambda: can_pass(pair))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[*range(count)]] * 2


def test_tree(site: Site) -> None:
    """In a tree of three levels and two branches, each client asks each
    service, and hears each public message once.
    """
    site.bus("m")
    for up, below in "ml", "mk", "lt":
        site.upper(up, f"{up}{below}")
        site.lower(below, f"{up}{below}")
        site.linked(f"{up}{below}", f"{below}.link")
    servers = {bus: site.client(bus, f"ask/{bus}") for bus in "mlkt"}

    def serve(bus: str) -> None:
        for _ in servers:
            asked = parse_request(servers[bus].receive(SECONDS_MAX))
            assert asked
            servers[bus].reply(asked, bus.encode())

    clients = [site.client(bus, "all") for bus in servers]
    with contextlib.ExitStack() as stack:
        for bus in servers:
            stack.enter_context(beside(serve, bus))
        for client in clients:
            for bus in servers:
                answer = client.request(f"ask/{bus}", b"", SECONDS_MAX)
                assert answer == bus.encode()
            client.publish("all", client.whoami().path)
    paths = sorted(client.whoami().path for client in clients)
    assert sorted(p.count(b"!") for p in paths) == [1, 2, 2, 3]
    for client in clients:
        assert sorted(path for _, path in heard(client, 4)) == paths


def test_ring(site: Site) -> None:
    """A bridge of the same buses ends, or the link does if it is later,
    whatever their patterns; so no message goes round for ever.
    """
    patterns = "--up a/ --down a/"
    site.bus("m")
    site.upper("m", "up", patterns)
    site.lower("l", "up", patterns)
    site.linked("up", "l.link")
    done = run("tools", "bridge", site.at("m"), site.at("l"))
    assert done.status == 1 and "are joined already" in done.errors

    prefix = site.upper("m", "up2", patterns)
    site.bus("k", f"--cred-prefix {prefix}")
    bridge = f"{PYTHON} {ROOT}/tools bridge --pattern b/"
    site.start("bridge", f"{bridge} {site.at('m')} {site.at('k')}")
    wait_for(lambda: site.says("k.trace", '"sbus/bridge/"'))
    site.lower_by("k", f"{RELAY} {site.at('up2')}", "", patterns)
    site.wait_for_log("k.link", "another way leads from the lower bus")


# ---- How a link begins, ends, and begins anew


def test_no_network(site: Site) -> None:
    """The lower bus goes on alone, with a prefix that nobody has."""
    site.lower_by("l", "false", SBUSD, "")
    site.wait_for_log("l.link", "sbusd: start")
    with site.client("l", reconnect=True) as bus:
        path = bus.whoami(SECONDS_MAX).path
        assert path == b"!/cred/0/0/0/" + US
        bus.subscribe(path + b"/x")
        bus.publish(path + b"/x", b"v")
        assert heard(bus, 1) == [(path + b"/x", b"v")]


def test_new_prefix(pair: Site) -> None:
    """Another upper end is another prefix.  A message for processes of the
    former one does not go to others that have their numbers now.
    """
    with pair.client("l", reconnect=True) as bus:
        old = bus.whoami(SECONDS_MAX).path
        pair.processes["up"].kill()
        pair.processes["up"].wait()
        bus.sync(SECONDS_MAX)  # it goes on alone
        prefix = pair.upper("m", "up")
        pair.wait_for_log("l.link", prefix)
        wait_for(lambda: can_pass(pair))
    with pair.client("m", "end") as above, pair.client("l") as below:
        assert below.whoami().path == f"{prefix}/".encode() + US
        below.publish(old + b"/x", b"")
        below.publish("end", b"")
        heard(above, 1)
    assert pair.says("m.trace", '"end"')
    assert not pair.says("m.trace", f'"{old.decode()}/x"')


@pytest.mark.parametrize(
    ("name", "number"), [("up", signal.SIGHUP), ("l.link", signal.SIGTERM)]
)
def test_signal_loses_nothing(site: Site, name: str, number: int) -> None:
    """Messages from before a signal arrive, however slow the stream is."""
    site.bus("m")
    site.upper("m", "up")
    site.lower("l", "up", speed=300_000)
    site.linked("up", "l.link")
    with site.client("m", "up") as above, site.client("l", "down") as below:
        # The other end has more to send than the one that leaves first
        downs, ups = (1_000, 4_000) if name == "up" else (4_000, 1_000)
        for _ in range(downs):
            above.publish("down", bytes(200))
        for _ in range(ups):
            below.publish("up", bytes(200))
        above.sync(SECONDS_MAX)
        below.sync(SECONDS_MAX)
        site.processes[name].send_signal(number)
        assert len(heard(below, downs)) == downs
        assert len(heard(above, ups)) == ups
    assert site.processes[name].wait(SECONDS_MAX) == 0
    site.processes["l.link"].terminate()
    site.processes["l.link"].wait(SECONDS_MAX)
    assert not site.pids(f".*{site.at('l')}")  # nor its server, nor its stream
    assert not os.path.exists(site.at("l"))


def test_a_server_that_does_not_start(site: Site) -> None:
    """The link tells the status of its server at once, and a signal ends the
    link.
    """
    site.bus("m")
    site.upper("m", "up")
    site.lower_by("l", f"{RELAY} {site.at('up')}", "false", "")
    site.wait_for_log("l.link", "its server's status: 1")
    site.processes["l.link"].terminate()
    assert site.processes["l.link"].wait(SECONDS_MAX) == 0


@pytest.mark.parametrize(
    ("place", "word"),
    [
        ("subprocess.Popen.__init__", "echo"),
        ("subprocess.Popen.__init__", "--cred-prefix"),
        ("subprocess.Popen.wait", "echo"),
        ("socket.socket.bind", "up"),
    ],
)
def test_signals_at_any_moment(
    site: Site, monkeypatch: pytest.MonkeyPatch, place: str, word: str
) -> None:
    """The link ends what it has just started or made, or is about to end."""
    site.bus("m")
    end = f"{LINK} {site.at('m')} --listen {site.at('up')}"
    if word != "up":
        site.upper("m", "up")
        through = f"{RELAY} {site.at('up')}"
        if word == "echo":
            # The other end is no link, and its command starts a process
            wait = f"{PYTHON} -c 'import time; time.sleep(1000)'"
            script = f"echo; {wait} {site.at('l')}; echo"
            through = shlex.join(["sh", "-c", script])
        commands = "--through", through, "--server", SBUSD
        end = f"{LINK} {site.at('l')} {shlex.join(commands)}"
    path = signalled_at(site.directory, place, word)
    monkeypatch.setenv("PYTHONPATH", path)
    assert site.start("link", end).wait(SECONDS_MAX) == 0
    assert not site.pids(f".*{site.at('l')}")
    assert os.path.exists(site.at("up")) == (word != "up")


@SOAK
def test_kills(pair: Site) -> None:
    """After kill -9 of each process the buses are linked again, without a
    traceback.
    """
    victims = {
        "relay": f"{RELAY} {pair.at('up')}",
        "lower bus": f"{SBUSD} --trace {pair.at('l')}",
        "lower end": f"{LINK} {pair.at('l')}",
        "upper end": f"{LINK} {pair.at('m')}",
        "upper bus": f"{SBUSD} -r -a {pair.at('m')}",
    }
    for victim in [*victims] * either(4, 1):
        (pid,) = pair.pids(victims[victim])
        os.kill(pid, signal.SIGKILL)
        if victim == "lower end":
            pair.processes["l.link"].wait()
            pair.lower("l", "up")
        if victim == "upper end":
            pair.processes["up"].wait()
            pair.upper("m", "up")
        if victim == "upper bus":
            pair.processes["m"].wait()
            pair.bus("m")
        wait_for(lambda: can_pass(pair))


def test_hung_stream(pair: Site) -> None:
    """A link loses messages rather than pause their publishers.  It gives up a
    hung stream after 15 s, and not an idle one.
    """
    pair.upper("m", "up2")
    pair.lower("k", "up2")
    pair.linked("up2", "k.link")
    (relay,) = pair.pids(f"{RELAY} {pair.at('up')} ")
    assert os.getsid(relay) == relay  # no signal of a terminal reaches it
    os.kill(relay, signal.SIGSTOP)
    with pair.client("l", "n") as bus:
        for _ in range(60):
            bus.publish("n", bytes(400_000))
            heard(bus, 1)
        path = bus.whoami().path
        wait_for(lambda: pair.says("l.trace", '"hard/discard"'))
        pair.wait_for_log("l.link", "the other end says nothing for 15 s")
        wait_for(lambda: can_pass(pair))
        assert bus.whoami().path == path
    assert relay not in pair.pids(RELAY)  # its command was ended
    for name in "up2.log", "k.link.log":
        assert not pair.says(name, "the other end")


def test_block(site: Site) -> None:
    """With --block publishers wait for a slow stream."""
    site.bus("m")
    site.upper("m", "up", "--block")
    site.lower("l", "up", "--block", 20_000_000)
    site.linked("up", "l.link")
    with site.client("m", "n") as above, site.client("l") as below:

        def talk() -> None:
            for _ in range(70):
                below.publish("n", bytes(400_000))

        with beside(talk):
            assert len(heard(above, 70)) == 70


def test_listening(site: Site) -> None:
    """Only its user reaches the socket; nothing but a socket at which
    nobody listens is replaced.
    """
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(site.at("up"))
    site.upper("m", "up")
    assert stat.S_IMODE(os.stat(site.at("up")).st_mode) == 0o600
    Path(site.at("file")).write_text("of worth")
    for name in "up", "file":
        done = run("tools", "link", "--listen", site.at(name))
        error = f"sbus: {site.at(name)}: Address already in use\n"
        assert (done.status, done.errors) == (1, error)
    assert Path(site.at("file")).read_text() == "of worth"
    site.processes["up"].terminate()
    assert site.processes["up"].wait(SECONDS_MAX) == 0
    assert not os.path.exists(site.at("up"))


def test_ssh(site: Site) -> None:
    """The stream is a real sshd's."""
    if not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("there is no sshd")
    if os.getuid() not in [user.pw_uid for user in pwd.getpwall()]:
        pytest.skip("this user has no name, and ssh asks for one")
    for name in "host", "user":
        make = ["ssh-keygen", "-q", "-N", "", "-f", site.at(name)]
        subprocess.run(make, check=True)
    lines = [f"HostKey {site.at('host')}", "StrictModes no", "PidFile none"]
    lines.append(f"AuthorizedKeysFile {site.at('user.pub')}\n")
    Path(site.at("config")).write_text("\n".join(lines))
    options = {
        "ProxyCommand": f"/usr/sbin/sshd -i -f {site.at('config')}",
        "IdentityFile": site.at("user"),
        "UserKnownHostsFile": site.at("known"),
        "StrictHostKeyChecking": "accept-new",
        "BatchMode": "yes",
    }
    words = [f"-o {name}='{value}'" for name, value in options.items()]
    ssh = f"ssh -F none {' '.join(words)} here"
    trial = [*shlex.split(ssh), "true"]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"sshd lets nobody in: {done.stderr}")
    site.bus("m")
    site.upper("m", "up")
    site.lower_by("l", f'{ssh} "{RELAY} {site.at("up")}"', SBUSD, "")
    site.linked("up", "l.link")
    assert can_pass(site)


class Liar:
    """An end of a stream that sends what it likes."""

    def __init__(self, site: Site, wire: socket.socket) -> None:
        site.sockets.append(wire)
        self.wire = wire
        wire.settimeout(SECONDS_MAX)

    def send(self, *frames: bytes) -> None:
        """Send frames."""
        for frame in frames:
            self.wire.sendall(struct.pack("!I", len(frame)) + frame)

    def receive(self) -> bytes:
        """Return the next frame that is not empty, or nothing at the end."""
        while head := self.wire.recv(4, socket.MSG_WAITALL):
            if size := struct.unpack("!I", head)[0]:
                return self.wire.recv(size, socket.MSG_WAITALL)
        return b""


# ---- What a hostile machine can do, or a stream that leads elsewhere


def below(site: Site, is_polite: bool = True) -> Liar:
    """Be a lower end."""
    wire = socket.socket(socket.AF_UNIX)
    wait_for(lambda: not wire.connect_ex(site.at("up")))
    liar = Liar(site, wire)
    assert liar.receive().startswith(b"sbus-link 1 upper ")
    if is_polite:
        liar.send(b"sbus-link 1 lower - !/cred/0/0/0 ")
    return liar


@pytest.fixture
def above(site: Site) -> Iterator[socket.socket]:
    """Listen where a lower end dials, for a bus l."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(SECONDS_MAX)
        listener.bind(site.at("up"))
        listener.listen()
        site.lower("l", "up", "--up up --down down")
        yield listener


def test_lower_end(site: Site) -> None:
    """A lower end publishes what --up selects and secrets that are not its
    own.  It hears public messages and its own secrets.
    """
    site.bus("m")
    prefix = site.upper("m", "up", "--up ok/").encode()
    with site.client("m", "", (US + b"/x").decode()) as bus:
        for frame in b"SUB ", b"CMSG echo/on", b"MSG ok/x", b"\0":
            liar = below(site)
            liar.send(frame)
            while liar.receive():
                pass
        liar = below(site)
        keys = [b"bad", prefix + b"/y", prefix + b"/" + US + b"/y"]
        keys += [b"ok/!/y", b"k" * 5_000, b"!/cred/!/y", US + b"/x", b"ok/x"]
        liar.send(*(b"MSG %b\0v" % key for key in keys))
        assert heard(bus, 2) == [(US + b"/x", b"v"), (b"ok/x", b"v")]

        keys = [b"!/cred//%d//x" % os.getuid(), b"!/cred////x", US + b"/x"]
        keys += [prefix + b"/x", prefix + b"/" + US + b"/x", b"end"]
        for key in keys:
            bus.publish(key, b"")
        for key in keys[-2:]:
            assert liar.receive() == b"MSG %b\0" % key
    assert not site.says("m.trace", "/y")
    assert not site.says("m.trace", '"bad"')


@SOAK
def test_an_end_that_reads_nothing(site: Site) -> None:
    """An end that reads nothing keeps no end for longer than its patience."""
    site.bus("m")
    site.upper("m", "up")
    liar = below(site)
    site.linked("up")
    with site.client("m") as bus:
        for _ in range(100):
            bus.publish("x", bytes(100_000))
    upper = site.processes["up"]
    upper.terminate()
    while upper.poll() is None:
        with contextlib.suppress(OSError):
            liar.send(b"")
        with contextlib.suppress(subprocess.TimeoutExpired):
            upper.wait(0.5)
    assert upper.wait() == 1
    assert site.says("up.log", "the other end takes nothing for 15 s")


def test_upper_end(site: Site, above: socket.socket) -> None:
    """An upper end hears what --up selects, and secrets for other buses.  It
    publishes what --down selects, and secrets for the lower bus.
    """
    liar = Liar(site, above.accept()[0])
    liar.send(b"sbus-link 1 upper - !/cred/1/2/3 sbus/bridge/p")
    greeting = b"sbus-link 1 lower - !/cred/1/2/3 "
    assert liar.receive().startswith(greeting)
    secret = b"!/cred/1/2/3/" + US + b"/x"
    with site.client("l", "", secret.decode()) as bus:
        for key in secret, b"no", b"!/cred/7/7/7/x", b"up":
            bus.publish(key, b"")
        assert liar.receive() == b"MSG !/cred/7/7/7/x\0"
        assert liar.receive() == b"MSG up\0"
        heard(bus, 3)
        keys = b"no", b"!/cred/7/7/7/x", secret, b"down"
        liar.send(*(b"MSG %b\0v" % key for key in keys))
        assert heard(bus, 2) == [(secret, b"v"), (b"down", b"v")]
        liar.send(b"SUB ")
        site.wait_for_log("l.link", "it sent 'SUB '")

        # The next stream: the same bus, whose clients have stayed
        liar = Liar(site, above.accept()[0])
        liar.send(b"sbus-link 1 upper 1 !/cred/1/2/3 sbus/bridge/q")
        assert (
            liar.receive() == b"sbus-link 1 lower 4 !/cred/1/2/3 sbus/bridge/q"
        )
        site.wait_for_log("l.link", "lost 1 messages from here")
        bus.publish("up", b"again")
        assert liar.receive() == b"MSG up\0again"


@pytest.mark.parametrize(
    "sent, error",
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "it sent 'SSH-2.0-OpenSSH_9"),
        (b"\0\0\0\x0fsbus-link 2 low", "it sent 'sbus-link 2 low'"),
        (b"\0\0\0\x0fsbus-link 1 why", "the other end says: why"),
        (b"\xff\xff\xff\xff", "is no sbus link of this version"),
        (b"", "the other end says nothing for 15 s"),
    ],
)
def test_no_link(site: Site, sent: bytes, error: str) -> None:
    """One line says what is at the other end."""
    site.bus("m")
    site.upper("m", "up")
    liar = below(site, is_polite=False)
    liar.wire.sendall(sent)
    site.wait_for_log("up", error)
    greeting = b"sbus-link 1 the other end"
    assert liar.receive().startswith(greeting)
    assert not liar.receive()


def test_wrong_ends(site: Site) -> None:
    """Two of a kind, or a lower bus that is not below: both say so."""
    site.bus("m")
    prefix = site.upper("m", "up")
    liar = below(site, is_polite=False)
    liar.send(b"sbus-link 1 upper - !/cred/0/0/0 x")
    assert liar.receive() == b"sbus-link 1 both ends are upper"
    site.bus("l", "--cred-prefix !/cred/1/2/3")
    site.lower_by("l", f"{RELAY} {site.at('up')}", "", "")
    needs = f"the lower bus needs --cred-prefix {prefix}"
    site.wait_for_log("l.link", needs)
    site.wait_for_log("up", f"the other end says: {needs}")


def test_random_frames(site: Site) -> None:
    """Random frames end neither the upper end, nor its prefix."""
    site.bus("m")
    site.upper("m", "up")
    draw = random.Random(1)
    for number in range(either(200, 20)):
        liar = below(site, is_polite=bool(number % 4))
        with contextlib.suppress(OSError):
            for _ in range(20):
                text = draw.randbytes(draw.randrange(40))
                frames = text, b"MSG " + text, b"MSG %b\0%b" % (text, text)
                liar.send(draw.choice(frames))
            liar.wire.sendall(text)
        liar.wire.close()
    site.lower("l", "up")
    site.linked("l.link")
    assert site.processes["up"].poll() is None
