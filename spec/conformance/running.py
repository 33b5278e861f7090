"""What an observer of a process sees at its start and end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

from .conversation import END, Failure, describe
from .processes import descendants, is_stopped
from .server import ServerProcess
from .trial import NotApplicable, Trial, check, hear, require
from .wire import Wire

START_DESCRIPTORS = 32, 64  # soft and hard limit
FEWER_DESCRIPTORS = 40  # hard limit; a server may need more
RIVALS = 3
USERS = 150
END_SECONDS_MIN = 0.1  # in which a server with a backlog does not end
ABSTRACT = "/dev/unix/abstract"
PR_SET_CHILD_SUBREAPER = 36
IN_ATTRIB = 4
ORDINARY_USER = 1001
NO_PROCESS = b"4194304\n"  # a number above all of processes


# =============================================================================
# Start and end
# =============================================================================


def stop(trial: Trial, number: signal.Signals = signal.SIGTERM) -> int:
    """Have a signal end the server; return its exit status."""
    trial.say(f"the server receives {number.name}")
    trial.server.send_signal(number)
    return trial.server.await_status(trial.server.seconds_max)


def end_by(trial: Trial, number: signal.Signals) -> None:
    """Have a signal end the server as it is to."""
    status = stop(trial, number)
    require(status == 0, f"it ends with status {status}")


@check("RUN-10")
def end_by_sigterm(trial: Trial) -> None:
    client = trial.client("k")
    end_by(trial, signal.SIGTERM)
    hear(client, END)


@check("RUN-10")
def end_by_sigint(trial: Trial) -> None:
    end_by(trial, signal.SIGINT)


@check("RUN-10")
def end_by_sighup(trial: Trial) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        raise NotApplicable("the server was started with SIGHUP ignored")
    end_by(trial, signal.SIGHUP)


@check("ADDR-10")
def socket_is_removed(trial: Trial) -> None:
    path = trial.server.path
    stop(trial)
    require(not os.path.lexists(path), "its socket is still there")


@check("ADDR-10")
def what_took_its_place_is_kept(trial: Trial) -> None:
    path = trial.server.path
    trial.say("another file takes the place of the socket")
    os.rename(path, path + ".moved")
    with open(path, "wb"):
        pass
    stop(trial)
    require(os.path.lexists(path), "it has removed what is not its own")


@check("ADDR-10")
def socket_that_took_its_place_is_kept(trial: Trial) -> None:
    path = trial.server.path
    trial.say("another socket takes the place of the server's")
    os.rename(path, path + ".moved")
    leave_socket(path)
    stop(trial)
    require(os.path.lexists(path), "it has removed what is not its own")


@check("RUN-12", fills=True)
def end_does_not_wait_for_a_reader(trial: Trial) -> None:
    reader, publisher = trial.client("k"), trial.client()
    trial.server.fill(reader)
    trial.say("a message waits for one that does not read; the server ends")
    publisher.send(b"MSG k\0")
    publisher.settle()
    trial.server.send_signal(signal.SIGTERM)
    trial.server.await_status(1 + trial.server.seconds_max)


@check("RUN-12", fills=True)
def end_delivers_what_was_read(trial: Trial) -> None:
    reader, publisher = trial.client("k"), trial.client()
    trial.server.fill(reader)
    packets = [b"MSG k\0%d" % number for number in range(10)]
    trial.say("ten messages wait for a reader, and the server ends")
    for packet in packets:
        publisher.send(packet)
    publisher.settle()
    trial.server.send_signal(signal.SIGTERM)
    reader.await_end(END_SECONDS_MIN)
    for packet in packets:
        hear(reader, packet)
    hear(reader, END)


@check("RUN-8")
def standard_output_is_closed(trial: Trial) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "wb"):
            trial.server.start(stdout=writing)
        trial.say("the server listens; its standard output is a pipe")
        ready = select.select([reading], [], [], trial.server.seconds_max)
        text = os.read(reading, 1000) if ready[0] else b""
        require(ready[0], "it is still open")
        require(not text, f"it says {describe(text)}")


def mode_is(trial: Trial, mode: int) -> None:
    """Start the server, and look at the mode of its socket."""
    trial.say("the server starts, with the umask 0")
    trial.server.start(trial.options, umask=0)
    found = stat.S_IMODE(os.stat(trial.server.path).st_mode)
    require(found == mode, f"the mode of the socket is {found:04o}")


@check("ADDR-6")
def mode_of_the_socket(trial: Trial) -> None:
    mode_is(trial, 0o700)


@check("ADDR-6")
def mode_from_the_first_moment(trial: Trial) -> None:
    path = trial.server.new_path()
    libc = ctypes.CDLL(None)
    with open(libc.inotify_init1(os.O_NONBLOCK), "rb", 0) as watch:
        directory = os.fsencode(os.path.dirname(path))
        libc.inotify_add_watch(watch.fileno(), directory, IN_ATTRIB)
        trial.say("the server starts, with the umask 0")
        trial.server.start((), path, umask=0)
        changed = watch.read(1 << 16) or b""
    name = os.fsencode(os.path.basename(path)) + b"\0"
    require(name not in changed, "the mode of the socket changes")


@check("ADDR-6", options="-g")
def mode_for_the_group(trial: Trial) -> None:
    mode_is(trial, 0o770)


@check("ADDR-6", options="-o")
def mode_for_others(trial: Trial) -> None:
    mode_is(trial, 0o707)


@check("ADDR-6", options="-go")
def mode_for_all(trial: Trial) -> None:
    mode_is(trial, 0o777)


@check("ADDR-6", "RUN-1", options="--group --others")
def long_names_of_options(trial: Trial) -> None:
    mode_is(trial, 0o777)


def identity(path: str) -> tuple[int, int]:
    """Return what tells a file from another that takes its place."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        return status.st_ino, status.st_ctime_ns
    return 0, 0


def refuse(
    trial: Trial, path: str, *options: str, status: int = 0, **more: Any
) -> None:
    """Have another server refuse to start, and leave the place as it was.

    If its status is said, it is to say why in one line, too.
    """
    before = identity(path)
    with trial.server.another() as rival:
        rival.launch(options, path, **more)
        end = time.monotonic() + rival.start_seconds_max
        while rival.status() is None and identity(path) == before:
            require(time.monotonic() < end, "another server starts there")
            time.sleep(0.005)  # no event tells of a foreign server
        with contextlib.suppress(Failure):
            rival.await_status(rival.seconds_max)  # it may have listened
        is_same = identity(path) == before
        require(is_same, "another server takes that place")
        require(rival.status(), "another goes on, or ends as if all were well")
        if status:
            found = rival.status()
            require(found == status, f"it ends with status {found}")
            lines = len(rival.log_lines())
            require(lines == 1, f"it says why in {lines} lines")


@check("ADDR-8")
def second_server_at_a_path(trial: Trial) -> None:
    client = trial.client("k")
    trial.say("another server is started at the same path")
    refuse(trial, trial.server.path)
    client.send(b"MSG k\0")
    hear(client, b"MSG k\0")
    require(not trial.server.fault(), "the first is not reached any more")


@check("ADDR-8")
def file_at_the_path(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("there is a file at the path")
    with open(path, "wb") as file:
        file.write(b"precious")
    refuse(trial, path)
    with open(path, "rb") as file:
        require(file.read() == b"precious", "the file has changed")


@check("ADDR-8")
def stale_socket_at_the_path(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("there is a stale socket at the path")
    leave_socket(path)
    refuse(trial, path)


def leave_socket(path: str) -> None:
    """Leave a socket behind that nobody listens to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(path)


@check("ADDR-8", options="-r")
def live_server_is_not_replaced(trial: Trial) -> None:
    trial.say("another server is started at the same path, with -r")
    refuse(trial, trial.server.path, "-r")
    require(not trial.server.fault(), "the first is not reached any more")


@check("ADDR-8", options="-r")
def what_is_not_stale_is_kept(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with -r where a file is that is not empty")
    with open(path, "wb") as file:
        file.write(b"precious")
    refuse(trial, path, "-r")
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        path = trial.server.new_path()
        trial.say("and where a socket is that a process is bound to")
        with socket.socket(socket.AF_UNIX, kind) as bound:
            bound.bind(path)
            refuse(trial, path, "-r")
    trial.say("and where a symbolic link to an empty file is")
    path = trial.server.new_path()
    os.symlink(write_file(trial, b""), path)
    refuse(trial, path, "-r")


@check("RUN-1")
def wrong_options(trial: Trial) -> None:
    is_said = trial.server.has_word("-f", "--foreground")
    pid_file = trial.server.new_path()
    for wrong in (
        "--no-such-option",
        "--max-patterns 0",
        "--max-patterns 5x",
        "--verb",
        "--max-patterns",
        "surplus",
        "-u nobody/else",
        "--block-timeout 0",
        "--max-packet unlimited",
        "--cred-prefix !/cred/1//3",
        "--cred-prefix !/crew/1/2/3",
        "--cred-prefix !/cred/1/2",
        "--cred-prefix !/cred/1/2/3/",
        "--trace-payload",
        "-u 4294967295",
        "-u 18446744073709551617",
        f"{'' if is_said else '-f'} -p {pid_file}",
    ):
        trial.say(f"a server is started with {wrong}")
        with adopted():  # should it become a daemon
            refuse(trial, trial.server.new_path(), *wrong.split(), status=2)


@check("RUN-1")
def wrong_addresses(trial: Trial) -> None:
    path = trial.server.new_path()
    for wrong in (
        "--max-packet 99999999999",
        f"--trace {path}/none",
    ):
        trial.say(f"a server is started with {wrong}")
        refuse(trial, path, *wrong.split(), status=1)
    for wrong in (
        f"{ABSTRACT}/41",
        f"{ABSTRACT}/001",
        f"{ABSTRACT}/00xy",
        f"{ABSTRACT}/{'00' * 109}",
        "/dev/fd/",
        "/dev/fd/999",
        path.ljust(108, "x"),
    ):
        trial.say(f"a server is started at {wrong}")
        refuse(trial, wrong, status=1)


@check("RUN-1")
def inherited_socket_of_another_kind(trial: Trial) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as wrong:
            wrong.bind(trial.server.new_path())
            number = wrong.fileno()
            trial.say(f"a server is started with a socket of {kind!r}")
            refuse(trial, f"/dev/fd/{number}", status=1, pass_fds=[number])


@check("RUN-1", "ADDR-10")
def inherited_socket_that_does_not_listen(trial: Trial) -> None:
    path = trial.server.new_path()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as handed:
        handed.bind(path)
        number = handed.fileno()
        trial.say(f"a server is started with a socket, at /dev/fd/{number}")
        trial.server.launch((), f"/dev/fd/{number}", pass_fds=[number])
        trial.server.name = path
        first_client(trial).settle()
        end_by(trial, signal.SIGTERM)
    require(os.path.lexists(path), "it has removed what is not its own")


def become_ordinary() -> None:
    """Go on as an ordinary user, if that can be."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(ORDINARY_USER)
        os.setuid(ORDINARY_USER)


def be_handed(
    descriptor: int,
    directory: str,
    process: int = 0,
    count: str = "1",
    address: str = "",
) -> None:
    """Begin as a service manager has an ordinary user's server begin.

    The socket is for another process, if one is given.  The address is that
    of the environment.
    """
    os.dup2(descriptor, 3)
    os.set_inheritable(3, True)
    os.environ["LISTEN_PID"] = str(process or os.getpid())
    os.environ["LISTEN_FDS"] = count
    os.environ["XDG_RUNTIME_DIR"] = directory
    os.environ.pop("SBUS_ADDRESS", "")
    if address:
        os.environ["SBUS_ADDRESS"] = address
    become_ordinary()


def open_directory(trial: Trial) -> str:
    """Return a directory that is open to all."""
    path = trial.server.new_path()
    os.mkdir(path)
    os.chmod(path, 0o777)
    return path


@contextlib.contextmanager
def by_a_user() -> Iterator[None]:
    """Let what is not for an ordinary user be no failure of the server."""
    try:
        yield
    except Failure as failure:
        if os.geteuid() == 0 and "Permission denied" in str(failure):
            raise NotApplicable("no user can start it") from None
        raise


@check("ADDR-1")
def socket_that_is_handed_over(trial: Trial) -> None:
    if not trial.server.has_word("-a", "--address"):
        raise NotApplicable("its command has no words -a {address}")
    path, directory = trial.server.new_path(), open_directory(trial)
    server = trial.server.another("-a", "--address", "{address}")
    kind = socket.SOCK_SEQPACKET
    with server, socket.socket(socket.AF_UNIX, kind) as handed:
        handed.bind(path)
        handed.listen()
        trial.say("a server is started without an address, and has a socket")
        begin = functools.partial(be_handed, handed.fileno(), directory)
        named = f"{directory}/named"
        with by_a_user():
            first = functools.partial(begin, address=named)
            server.start((), path, first, close_fds=False)
        trial.say("two clients connect, and the last is the first to ask")
        clients = [server.connect(False, {}) for _ in range(2)]
        for client in reversed(clients):
            client.settle()
            client.close()
        trial.say("one has no socket, and SBUS_ADDRESS")
        other = functools.partial(begin, count="", address=named)
        server.start((), named, other, close_fds=False)
        path = f"{directory}/sbus.socket"
        for process, count in ((1, "1"), (0, "")):
            trial.say(f"one is told of {count or 'no'} socket for {process}")
            other = functools.partial(begin, process=process, count=count)
            server.start((), path, other, close_fds=False)
        server.stop()
        trial.say("and one is told of two")
        two = functools.partial(begin, count="2")
        server.launch((), path, two, close_fds=False)
        status = server.await_status(server.start_seconds_max)
        require(status == 1, f"it ends with status {status}")


@check("CTL-5", options="-g -o")
def owner_who_is_not_root(trial: Trial) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    path = f"{open_directory(trial)}/socket"
    trial.say("a server is started by an ordinary user")
    with by_a_user():
        trial.server.start(trial.options, path, become_ordinary)
    for uid, is_told in ((0, 1), (ORDINARY_USER, 1), (ORDINARY_USER + 1, 0)):
        trial.say(f"the user {uid} asks for numbers")
        client = trial.server.connect(True, {"uid": uid})
        with contextlib.closing(client):
            found = "users" in numbers_for(client)
            require(found == is_told, f"all users are in its answer: {found}")


def numbers_for(client: Wire) -> dict[str, Any]:
    """Return what a client is told when it asks for numbers."""
    client.send(b"CMSG stats")
    got = client.receive()
    try:
        found: dict[str, Any] = json.loads(got.partition(b"\0")[2])
    except ValueError:
        raise Failure(f"received {describe(got)}") from None
    return found


@contextlib.contextmanager
def many_users(trial: Trial) -> Iterator[list[Wire]]:
    """Start the server, and connect a client of each of many users."""
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    trial.server.start(trial.options)
    trial.say(f"{USERS} users connect")
    with contextlib.ExitStack() as cleanup:
        crowd = []
        for uid in range(ORDINARY_USER, ORDINARY_USER + USERS):
            crowd.append(trial.server.connect(True, {"uid": uid}))
            cleanup.callback(crowd[-1].close)
        yield crowd


@check("CTL-5", options="-g -o")
def numbers_of_many_users(trial: Trial) -> None:
    with many_users(trial):
        trial.say("root asks for numbers")
        count = len(numbers_for(trial.client()).get("users", ()))
    require(count == USERS + 1, f"it tells of {count} users")


@check("CTL-5", options="-g -o --max-packet 10000")
def numbers_that_fit_in_a_packet(trial: Trial) -> None:
    with many_users(trial):
        trial.say("root asks for numbers")
        client = trial.client()
        client.send(b"CMSG stats")
        size = len(client.receive())
    require(0 < size <= 10_000, f"its answer has {size} bytes")


@check("RUN-8", "ADDR-4")
def random_abstract_name(trial: Trial) -> None:
    names = [random_name(trial) for _ in range(2)]
    require(names[0] != names[1], "it chooses the same one again")


def random_name(trial: Trial) -> bytes:
    """Have a server choose an abstract name, and connect to it."""
    trial.say("a server is started at a random abstract name")
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as output:
        with open(writing, "wb"):
            trial.server.launch((), ABSTRACT, stdout=writing)
        ready = select.select([output], [], [], trial.server.seconds_max)[0]
        text = output.read(1000) if ready else b""
    form = rf"{ABSTRACT}/(00[0-9A-Fa-f]{{214}})\n"
    found = re.fullmatch(form, text.decode("latin-1"))
    if not found:
        raise Failure(f"it writes {describe(text)}")
    trial.server.name = bytes.fromhex(found[1])
    first_client(trial).settle()
    return trial.server.name


@check("ADDR-4")
def abstract_name_is_filled_up(trial: Trial) -> None:
    for count in (8, 107):
        address = f"{ABSTRACT}/00{os.urandom(count).hex()}"
        trial.say(f"a server is started at {address}")
        trial.server.launch((), address)
        trial.server.name = full_name(address)
        first_client(trial).settle()


@check("CTL-5")
def sigusr1_is_no_end(trial: Trial) -> None:
    client = trial.client("k")
    before = len(trial.server.log_lines())
    trial.say("the server receives SIGUSR1")
    trial.server.send_signal(signal.SIGUSR1)
    require(not trial.server.fault(), "it serves no more")
    trial.say("it logs a line that names the user of its client")
    end = time.monotonic() + trial.server.seconds_max
    named = rb"\b%d\b" % client.uid
    while not re.search(named, b"".join(trial.server.log_lines()[before:])):
        require(time.monotonic() < end, "there is no such line")
        time.sleep(0.005)  # no event tells of a line


@check("RUN-10")
def ignored_sighup_stays_ignored(trial: Trial) -> None:
    trial.say("the server is started with SIGHUP ignored, and receives it")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trial.server.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    trial.server.send_signal(signal.SIGHUP)
    require(not trial.server.fault(), "it serves no more")


@check("ADDR-8", options="-r")
def servers_that_start_at_once(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say(f"{RIVALS} servers start with -r where a stale socket is")
    leave_socket(path)
    with contextlib.ExitStack() as cleanup:
        rivals, outputs = [], []
        for _ in range(RIVALS):
            reading, writing = os.pipe()
            outputs.append(cleanup.enter_context(open(reading, "rb", 0)))
            rivals.append(cleanup.enter_context(trial.server.another()))
            with open(writing, "wb"):
                rivals[-1].launch(trial.options, path, stdout=writing)
        trial.say("each listens or ends, and its standard output is closed")
        end = time.monotonic() + trial.server.start_seconds_max
        for output in outputs:
            rest = max(0, end - time.monotonic())
            select.select([output], [], [], rest)
        end = time.monotonic() + trial.server.seconds_max
        left = rivals
        while len(left) > 1 and time.monotonic() < end:
            time.sleep(0.005)  # no event tells of a foreign server
            left = [one for one in rivals if one.status() is None]
        require(len(left) == 1, f"{len(left)} of them are left")
        require(not left[0].fault(), "the one that is left does not serve")


@check("ADDR-8", options="-r")
def stale_socket_is_replaced(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with -r where a stale socket is")
    leave_socket(path)
    trial.server.start(trial.options, path)


@check("RUN-10", options="-c --max-clients 2")
def end_with_the_last_client(trial: Trial) -> None:
    trial.say("the server starts, and two clients connect")
    trial.server.launch(trial.options)
    first = first_client(trial)
    second = trial.client()
    second.settle()
    trial.say("a third is one too many")
    hear(trial.client(), END)
    trial.say("one leaves")
    first.close()
    for _ in range(5):
        require(second.pending() is None, "it does not stay for the other")
        time.sleep(0.02)  # no event tells that nothing happens
    trial.say("and then the other")
    second.close()
    status = trial.server.await_status(trial.server.seconds_max)
    require(status == 0, f"it ends with status {status}")


@check("RUN-10", options="-c -u root -g -o")
def no_end_before_the_first_client(trial: Trial) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as output:
        with open(writing, "wb"):
            trial.server.launch(trial.options, stdout=writing)
        trial.say("the server listens, and is stopped and goes on")
        select.select([output], [], [], trial.server.start_seconds_max)
    trial.server.freeze()
    trial.server.thaw()
    if os.geteuid() == 0:
        trial.say("a user is kept out, who never was a client")
        client = trial.server.connect(True, {"uid": ORDINARY_USER})
        with contextlib.closing(client):
            hear(client, END)
    for _ in range(5):
        require(trial.server.status() is None, "it ends without a client")
        time.sleep(0.02)  # no event tells that nothing happens
    trial.say("a client comes and leaves")
    first_client(trial).close()
    status = trial.server.await_status(trial.server.seconds_max)
    require(status == 0, f"it ends with status {status}")


def first_client(trial: Trial) -> Wire:
    """Return the first client of a server that starts."""
    end = time.monotonic() + trial.server.start_seconds_max
    while time.monotonic() < end:
        with contextlib.suppress(Failure):
            return trial.client("k")
        require(trial.server.status() is None, "the server ends")
        time.sleep(0.005)  # no event tells of a foreign server
    raise Failure("the server does not serve")


# =============================================================================
# A daemon
# =============================================================================


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Be the parent of new daemons, and end them."""
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


@contextlib.contextmanager
def daemon(
    trial: Trial, pid_file: str, status: int, *options: str, **more: Any
) -> Iterator[ServerProcess]:
    """Have a command start a daemon; return what has started it.

    The command ends with the status.
    """
    server = trial.server.another("-f", "--foreground")
    with adopted(), server:
        trial.say(f"a daemon is started, its pid file is {pid_file}")
        server.launch(("-p", pid_file, *options), **more)
        found = server.await_status(server.start_seconds_max)
        if found == 2 and not trial.server.has_word("-f", "--foreground"):
            raise NotApplicable("its command has no word -f to leave out")
        require(found == status, f"its command ends with status {found}")
        yield server


def write_file(trial: Trial, data: bytes) -> str:
    """Return a new file."""
    path = trial.server.new_path()
    with open(path, "wb") as file:
        file.write(data)
    return path


def read_file(path: str) -> bytes:
    """Return what is in a file."""
    with open(path, "rb") as file:
        return file.read()


def end_daemon(trial: Trial, number: int) -> None:
    """Have SIGTERM end a daemon."""
    trial.say("it receives SIGTERM")
    os.kill(number, signal.SIGTERM)
    end = time.monotonic() + 1 + trial.server.seconds_max
    while not is_stopped(number):
        require(time.monotonic() < end, "it does not end")
        time.sleep(0.005)  # no event tells of another's child


def number_in(path: str) -> int:
    """Return the number in a pid file that a daemon of ours wrote."""
    text = read_file(path)
    form = re.fullmatch(rb"([0-9]{1,10})\n?", text)
    number = int(form[1]) if form else 0
    is_ours = number in descendants(os.getpid())
    require(is_ours, f"it holds {describe(text)}, which is no daemon's number")
    return number


@check("RUN-8", "ADDR-10", "ADDR-6")
def daemon_with_a_pid_file(trial: Trial) -> None:
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    for text, *options in ((b"", "-d"), (b"%d\n" % dead,), (NO_PROCESS,)):
        pid_file = write_file(trial, text)
        with daemon(trial, pid_file, 0, *options, umask=0) as server:
            trial.say("its command has returned, and all is there")
            number = number_in(pid_file)
            mode = stat.S_IMODE(os.stat(server.path).st_mode)
            require(mode == 0o700, f"the mode of its socket is {mode:04o}")
            with contextlib.closing(server.connect(False, {})) as client:
                client.settle()
            end_daemon(trial, number)
            require(not os.path.lexists(pid_file), "its pid file is left")
            require(not os.path.lexists(server.path), "its socket is left")


@check("ADDR-10")
def relative_names_of_a_daemon(trial: Trial) -> None:
    directory = f"{trial.server.new_path()}/{'d' * 200}"
    os.makedirs(directory)
    for path in ("socket", "./socket"):
        place = {"path": path, "cwd": directory}
        with daemon(trial, f"{path}.pid", 0, **place):
            found = sorted(os.listdir(directory))
            wanted = ["socket", "socket.pid"]
            require(found == wanted, f"in its directory are {found}")
            end_daemon(trial, number_in(f"{directory}/socket.pid"))
            left = os.listdir(directory)
            require(not left, f"it leaves {left}")


@check("RUN-8", "RUN-10")
def daemon_without_its_terminal(trial: Trial) -> None:
    pid_file = write_file(trial, b"")
    reading, writing = os.pipe()
    unread, typed = os.pipe()
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(open(reading, "rb"))
        keyboard = cleanup.enter_context(open(typed, "wb", 0))
        with open(writing, "wb") as log, open(unread, "rb") as keys:
            start = daemon(trial, pid_file, 0, stderr=log, stdin=keys)
            server = cleanup.enter_context(start)
            session = server.processes[0]  # which it has left
        trial.say("its standard error is a pipe, which it has closed")
        for _ in range(9):  # it may have said something before
            ready = select.select([reading], [], [], server.seconds_max)
            require(ready[0], "it has not")
            text = os.read(reading, 1000)
            if not text:
                break
        require(not text, "it has not")
        trial.say("and so is its standard input")
        with contextlib.suppress(BrokenPipeError):
            raise Failure(f"it is not: {keyboard.write(b'x')} byte fits")
        trial.say("it receives SIGHUP, and goes on")
        number = number_in(pid_file)
        is_alone = os.getsid(number) != session
        require(is_alone, "it has not left its session")
        os.kill(number, signal.SIGHUP)
        require(not server.fault(), "it serves no more")
        end_daemon(trial, number)


@check("ADDR-10")
def pid_file_that_took_its_place_is_kept(trial: Trial) -> None:
    pid_file = write_file(trial, b"")
    with daemon(trial, pid_file, 0):
        number = number_in(pid_file)
        trial.say("another file takes the place of its pid file")
        os.rename(pid_file, pid_file + ".moved")
        with open(pid_file, "wb"):
            pass
        end_daemon(trial, number)
        is_there = os.path.lexists(pid_file)
        require(is_there, "it has removed what is not its own")


@check("ADDR-10")
def what_is_no_pid_file_is_kept(trial: Trial) -> None:
    own = b"%d\n" % os.getpid()
    for text, *options in ((own,), (b"precious\n",), (own, "-r")):
        pid_file = write_file(trial, text)
        with daemon(trial, pid_file, 1, *options) as server:
            found = read_file(pid_file)
            require(found == text, f"the file now holds {describe(found)}")
            is_left = os.path.lexists(server.path)
            require(not is_left, "it does not start, and leaves its socket")
    target = write_file(trial, b"")
    os.mkdir(target + ".directory")
    for pid_file in (target + ".directory", target + ".none/pid"):
        with daemon(trial, pid_file, 1):
            pass


@check("RUN-8")
def readiness_is_told(trial: Trial) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(trial.server.new_path())
        notified.settimeout(trial.server.start_seconds_max)
        trial.say("the server is started with NOTIFY_SOCKET")
        name = notified.getsockname()
        trial.server.launch(env={**os.environ, "NOTIFY_SOCKET": name})
        try:
            told = notified.recv(1000)
        except socket.timeout:
            raise Failure("it does not tell that it is ready") from None
        is_ready = b"READY=1" in told.split(b"\n")
        require(is_ready, f"it tells {describe(told)}")
        trial.say("it is ready, and a client connects")
        trial.client().settle()


@check("LIMIT-7")
def descriptors_are_made_use_of(trial: Trial) -> None:
    soft, hard = START_DESCRIPTORS
    few_serve(trial, soft, hard)
    try:
        few_serve(trial, soft, FEWER_DESCRIPTORS)
    except Failure:
        if trial.server.status() is None:
            raise
        trial.say("it does not start with so few")


def few_serve(trial: Trial, soft: int, hard: int) -> None:
    """Have a server with few descriptors serve as many clients as it can."""
    trial.say(f"the server may have {soft} descriptors, and raise that")
    trial.say(f"to {hard}")
    kind = resource.RLIMIT_NOFILE
    trial.server.start(begin=lambda: resource.setrlimit(kind, (soft, hard)))
    limits = [resource.prlimit(one, kind) for one in trial.server.processes]
    require((hard, hard) in limits, "it has not raised its limit")
    trial.say("as many connect, and each is served or disconnected")
    for _ in range(hard):
        trial.client().settle()


@check("LIMIT-7", options="-g -o")
def half_of_the_descriptors_for_a_user(trial: Trial) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    kind, most = resource.RLIMIT_NOFILE, START_DESCRIPTORS[1]
    begin = functools.partial(resource.setrlimit, kind, (most, most))
    trial.server.start(trial.options, begin=begin)
    trial.say(f"the server may have {most} descriptors; a user asks for most")
    with contextlib.ExitStack() as crowd:
        count = 0
        for _ in range(most * 5 // 8):
            client = trial.server.connect(True, {"uid": ORDINARY_USER})
            crowd.enter_context(contextlib.closing(client))
            count += client.pending() is None
        require(count <= most // 2, f"{count} of its clients are let in")


def full_name(address: str) -> bytes:
    """Return the abstract name that an address stands for."""
    return bytes.fromhex(address.rpartition("/")[2]).ljust(108, b"\0")
