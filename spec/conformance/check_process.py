"""What an observer of a process sees at its start and end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import resource
import signal
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

from .conversation import END, Failure, describe
from .server import descendants
from .trial import NotApplicable, Trial, check, hear, require, tell
from .wire import numbers_in

DESCRIPTORS = 32, 64  # soft and hard limit
NOFILE = resource.RLIMIT_NOFILE
grant_few = functools.partial(resource.setrlimit, NOFILE, DESCRIPTORS)
USERS = 120
END_SECONDS_MIN = 0.1  # in which a server with a backlog does not end
ABSTRACT = "/dev/unix/abstract"
PR_SET_CHILD_SUBREAPER = 36
IN_ATTRIB = 4
MODES = {"": 0o700, "-g": 0o770, "--others": 0o707, "-go": 0o777}
SEQPACKET, DATAGRAM = socket.SOCK_SEQPACKET, socket.SOCK_DGRAM


@check("ADDR-6", "RUN-1")
def mode_of_the_socket(trial: Trial) -> None:
    libc = ctypes.CDLL(None)
    for options, mode in MODES.items():
        path = trial.server.new_path()
        with open(libc.inotify_init1(os.O_NONBLOCK), "rb", 0) as watch:
            directory = os.fsencode(os.path.dirname(path))
            libc.inotify_add_watch(watch.fileno(), directory, IN_ATTRIB)
            trial.start(*options.split(), path=path, umask=0)
            events = watch.read(1 << 16) or b""
        actual = stat.S_IMODE(os.stat(path).st_mode)
        require(actual == mode, f"the mode of the socket is {actual:04o}")
        name = os.fsencode(os.path.basename(path)) + b"\0"
        require(name not in events, "the mode of the socket changes")


def changed(path: str) -> int:
    """Return when what is at a path was last changed."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_ctime_ns
    return 0


def refuse(
    trial: Trial, path: str, *options: str, status: int = 0, **more: Any
) -> None:
    """Expect that a server refuses to start, and says why with a status."""
    trial.say(" ".join(["another server is started at", path, *options]))
    before = changed(path)
    with trial.server.another() as rival:
        rival.launch(path, *options, stdout=-3, **more)
        ended = rival.await_status(rival.start_seconds_max)
        lines = len(rival.log_lines())
    require(changed(path) == before, "another server takes that place")
    require(ended, "another server ends with status 0")
    if status:
        require(ended == status, f"it ends with status {ended}")
        require(lines == 1, f"it says why in {lines} lines")


def bind(path: str, kind: int = SEQPACKET) -> socket.socket:
    """Return a socket that is bound to a path; closed, it is stale."""
    bound = socket.socket(socket.AF_UNIX, kind)
    bound.bind(path)
    return bound


@check("ADDR-8")
def what_is_not_stale_is_kept(trial: Trial) -> None:
    trial.start()
    client = trial.client("k")
    link = trial.server.new_path()
    os.symlink(trial.file(b""), link)
    for path in (trial.server.path, trial.file(b"precious"), link):
        refuse(trial, path, "-r")
    tell(client, b"MSG k\0")
    hear(client, b"MSG k\0")
    trial.require_service()
    for kind in (DATAGRAM, SEQPACKET):
        path = trial.server.new_path()
        with bind(path, kind):
            refuse(trial, path, "-r")
        trial.say("which is a stale socket now")
        refuse(trial, path)
    trial.start("-r", path=path)


WRONG_OPTIONS = (  # one between two semicolons
    "--no-such-option; --verb; surplus; --trace-payload; --block-timeout 0;"
    "--max-patterns; --max-patterns 5x; --max-packet unlimited;"
    "-u nobody/else; -u 4294967295; -u 18446744073709551617;"
    "--cred-prefix !/cred/1//3; --cred-prefix !/crew/1/2/3;"
    "--max-patterns 0; --cred-prefix !/cred/1/2; --cred-prefix !/cred/1/2/3/"
)
WRONG_ADDRESSES = (
    *(f"{ABSTRACT}/{name}" for name in ("41", "001", "00xy", "00" * 109)),
    *("/dev/fd/", "/dev/fd/999", "/".ljust(108, "x")),
)


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Become the parent of new daemons, and end them afterwards."""
    before = set(descendants(os.getpid()))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        for process in set(descendants(os.getpid())) - before:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@check("RUN-1")
def wrong_options(trial: Trial) -> None:
    is_said = trial.server.has_word("-f", "--foreground")
    both = f"{'' if is_said else '-f'} -p {trial.server.new_path()}"
    for wrong in (*WRONG_OPTIONS.split(";"), both):
        with adopted():  # should it become a daemon
            refuse(trial, trial.server.new_path(), *wrong.split(), status=2)


@check("RUN-1")
def starts_that_cannot_work(trial: Trial) -> None:
    path = trial.server.new_path()
    refuse(trial, path, "--max-packet", "99999999999", status=1)
    refuse(trial, path, "--trace", f"{path}/none", status=1)
    for wrong in WRONG_ADDRESSES:
        refuse(trial, wrong, status=1)
    for kind in (socket.SOCK_STREAM, DATAGRAM):
        with bind(trial.server.new_path(), kind) as handed:
            number = handed.fileno()
            refuse(trial, f"/dev/fd/{number}", status=1, pass_fds=[number])


@check("ADDR-10", "RUN-1")
def only_its_own_socket_is_removed(trial: Trial) -> None:
    path = trial.server.new_path()
    with bind(path) as handed:
        number = handed.fileno()
        trial.launch(f"/dev/fd/{number}", pass_fds=[number])
        trial.server.name = path
        trial.client().settle()
        trial.stop()
    require(os.path.lexists(path), "it has removed what it was handed")
    trial.start()
    path = trial.server.path
    trial.say("another socket takes the place of its own")
    os.rename(path, path + ".moved")
    bind(path).close()
    trial.stop()
    require(os.path.lexists(path), "it has removed what is not its own")


def be_handed(
    descriptor: int, directory: str, process: int, count: str, address: str
) -> None:
    """Begin as a service manager has a user's server begin."""
    os.dup2(descriptor, 3)
    os.set_inheritable(3, True)
    os.environ["LISTEN_PID"] = str(process or os.getpid())
    os.environ["LISTEN_FDS"] = count
    os.environ["XDG_RUNTIME_DIR"] = directory
    os.environ["SBUS_ADDRESS"] = address


@check("ADDR-1")
def socket_that_is_handed_over(trial: Trial) -> None:
    if not trial.server.has_word("-a", "--address"):
        raise NotApplicable("its command has no words -a {address}")
    path, directory = trial.server.new_path(), trial.server.new_path()
    os.mkdir(directory)
    named, default = f"{directory}/named", f"{directory}/sbus.socket"
    defaults = ((1, "1", "", default), (0, "", "", default))
    server = trial.server.another("-a", "--address", "{address}")
    with server, bind(path) as handed:
        handed.listen()
        begin = functools.partial(be_handed, handed.fileno(), directory)
        for process, count, address, place in (
            (0, "1", named, path),
            (0, "", named, named),
            *(defaults if os.geteuid() != 0 else ()),  # root has another
        ):
            trial.say(f"it has {count or 'no'} socket for {process or 'it'}")
            first = functools.partial(begin, process, count, address)
            server.start(place, preexec_fn=first, close_fds=False)
            trial.say("two clients connect, and the last is the first to ask")
            clients = [server.connect() for _ in range(2)]
            for client in reversed(clients):
                client.settle()
                client.close()
        server.stop()
        trial.say("it has two sockets")
        two = functools.partial(begin, 0, "2", "")
        server.launch(path, preexec_fn=two, close_fds=False)
        status = server.await_status(server.start_seconds_max)
        require(status == 1, f"it ends with status {status}")


@check("RUN-8", "ADDR-4")
def abstract_names(trial: Trial) -> None:
    names = set()
    for size in (8, 107, 0, 0):  # 0 is for a random name
        address = f"{ABSTRACT}/00{os.urandom(size).hex()}"
        address = address if size else ABSTRACT
        text = trial.launch(address)
        form = (
            rf"{ABSTRACT}/00([0-9A-Fa-f]{{2}}){{1,107}}\n?" if not size else ""
        )
        wanted = "an abstract address" if not size else "nothing"
        is_right = re.fullmatch(form, text)
        require(is_right, f"it writes {text!r} where {wanted} is to come")
        digits = (text.rstrip() or address).rpartition("/")[2]
        names.add(digits)
        trial.server.name = bytes.fromhex(digits).ljust(108, b"\0")
        trial.client().settle()
    require(len(names) == 4, "it chooses the same one again")


@check("RUN-8")
def readiness_is_told(trial: Trial) -> None:
    with bind(trial.server.new_path(), DATAGRAM) as notified:
        notified.setblocking(False)
        names = {**os.environ, "NOTIFY_SOCKET": notified.getsockname()}
        text = trial.launch(env=names)
        require(not text, f"it writes {text!r}")
        trial.client().settle()
        try:
            packet = notified.recv(1000)
        except BlockingIOError:
            raise Failure("it does not tell that it is ready") from None
    is_ready = b"READY=1" in packet.split(b"\n")
    require(is_ready, f"it tells {describe(packet)}")


@check("CTL-5")
def numbers_of_many_users(trial: Trial) -> None:
    for limit, count in ((409_600, USERS), (8_000, USERS // 2)):
        trial.start("-g", "-o", "--max-packet", str(limit))
        trial.say(f"{count} users connect, and root asks for numbers")
        for uid in range(trial.user, trial.user + count):
            trial.client(uid=uid)
        answer = trial.client().stats()
        require(len(answer) <= limit, f"its answer is above {limit} bytes")
        users = numbers_in(answer).get("users", ())
        is_whole = len(users) == count + 1
        require(is_whole or limit < 10_000, "it leaves out users")


@check("CTL-5")
def sigusr1_is_no_end(trial: Trial) -> None:
    trial.start()
    named = re.compile(rb"\b%d\b" % trial.client("k").uid)
    before = len(trial.server.log_lines())
    trial.send_signal(signal.SIGUSR1)
    trial.require_service()
    trial.wait_until(
        lambda: named.search(b"".join(trial.server.log_lines()[before:])),
        "it logs no line that names the user of its client",
    )


@check("RUN-10", "ADDR-10")
def end_by_a_signal(trial: Trial) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        heed = functools.partial(signal.signal, number, signal.SIG_DFL)
        trial.start(preexec_fn=heed)
        client = trial.client("k")
        trial.send_signal(number)
        trial.require_status(0)
        hear(client, END)
        is_left = os.path.lexists(trial.server.path)
        require(not is_left, "its socket is still there")
    for number in numbers:
        trial.say(f"{number.name} is ignored when another server starts,")
        trial.say("which ignores it as well")
        ignore = functools.partial(signal.signal, number, signal.SIG_IGN)
        trial.start(preexec_fn=ignore)
        trial.send_signal(number)
        trial.require_service()
        trial.send_signal(signal.SIGKILL)


@check("RUN-12", fills=True)
def end_delivers_what_was_read(trial: Trial) -> None:
    trial.start()
    packets = [b"MSG k\0%d" % number for number in range(10)]
    trial.stall()
    reader, _ = trial.stall(*packets)
    trial.send_signal(signal.SIGTERM)
    reader.await_end(END_SECONDS_MIN)
    trial.say("one reads, the other does not, and is not waited for")
    hear(reader, *packets, END)
    trial.server.await_status(1 + trial.server.seconds_max)


@check("RUN-10")
def end_with_the_last_client(trial: Trial) -> None:
    trial.launch("", "-c")
    for _ in range(5):
        require(trial.server.status() is None, "it ends without a client")
        time.sleep(0.02)  # no event tells that nothing happens
    trial.say("two clients connect, and one leaves")
    first, second = trial.client("k"), trial.client("k")
    first.close()
    for _ in range(5):
        require(second.pending() is None, "it does not stay for the other")
        time.sleep(0.02)  # no event tells that nothing happens
    second.close()
    trial.require_status(0)
