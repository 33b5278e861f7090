"""What an observer sees of a server that goes on as a daemon."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .check_log import read_trace
from .check_process import adopted
from .conversation import Failure, describe
from .server import ServerProcess, descendants, is_stopped
from .trial import NotApplicable, Trial, check, require


@contextlib.contextmanager
def daemon(
    trial: Trial, pid_file: str, status: int, *options: str, **more: Any
) -> Iterator[ServerProcess]:
    """Have a command start a daemon, and end with a status; return it."""
    server = trial.server.another("-f", "--foreground")
    with adopted(), server:
        words = ["a daemon is started with", "-p", pid_file, *options]
        trial.say(" ".join(words))
        server.launch(more.pop("path", ""), *words[1:], **more)
        actual = server.await_status(server.start_seconds_max)
        if actual == 2 and not trial.server.has_word("-f", "--foreground"):
            raise NotApplicable("its command has no word -f to leave out")
        require(actual == status, f"its command ends with status {actual}")
        yield server


def number_in(path: str) -> int:
    """Return the number in a pid file that a daemon of ours wrote."""
    text = Path(path).read_bytes()
    form = re.fullmatch(rb"([0-9]{1,10})\n?", text)
    number = int(form[1]) if form else 0
    is_ours = number in descendants(os.getpid())
    require(is_ours, f"it holds {describe(text)}, which is no daemon's number")
    return number


def end_daemon(trial: Trial, number: int) -> None:
    """Have SIGTERM end a daemon."""
    trial.say("the daemon receives SIGTERM")
    os.kill(number, signal.SIGTERM)
    trial.wait_until(lambda: is_stopped(number), "it does not end")


@check("RUN-8", "ADDR-10", "ADDR-6", "RUN-15", "TRACE-1")
def daemon_with_a_pid_file(trial: Trial) -> None:
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    alive = b"%d\n" % os.getpid()  # which has not locked the file
    for text, *options in ((b"", "-d"), (b"%d\n" % dead,), (alive,)):
        pid_file, path = trial.file(text), trial.server.new_path()
        options += ["--trace", path]
        with daemon(trial, pid_file, 0, *options, umask=0) as server:
            number = number_in(pid_file)
            mode = stat.S_IMODE(os.stat(server.path).st_mode)
            require(mode == 0o700, f"the mode of its socket is {mode:04o}")
            with contextlib.closing(server.connect()) as client:
                client.settle()
            end_daemon(trial, number)
            require(not os.path.lexists(pid_file), "its pid file is left")
            require(not os.path.lexists(server.path), "its socket is left")
            count = len(server.log_lines())
            require(count == 2, f"in the file of its log are {count} lines")
        kinds = [event["ev"] for event in read_trace(path)]
        ends = kinds[0], kinds[-1]
        require(ends == ("start", "stop"), f"its trace has {kinds}")


@check("ADDR-10")
def relative_names_of_a_daemon(trial: Trial) -> None:
    directory = f"{trial.server.new_path()}/{'d' * 200}"
    os.makedirs(directory)
    for path in ("socket", "./socket"):
        place = {"path": path, "cwd": directory}
        with daemon(trial, f"{path}.pid", 0, **place):
            names = sorted(os.listdir(directory))
            wanted = ["socket", "socket.pid"]
            require(names == wanted, f"in its directory are {names}")
            end_daemon(trial, number_in(f"{directory}/socket.pid"))
            left = os.listdir(directory)
            require(not left, f"it leaves {left}")


@check("RUN-8", "RUN-10")
def daemon_without_its_terminal(trial: Trial) -> None:
    pid_file = trial.file(b"")
    (log, log_end), (keys, keyboard) = trial.pipe(), trial.pipe()
    with daemon(trial, pid_file, 0, stderr=log_end, stdin=keys) as server:
        log_end.close()
        keys.close()
        session = server.processes[0]  # which it has left
        trial.say("its standard error is a pipe, which it closes")
        while trial.read(log):
            pass  # it may have said something before
        with contextlib.suppress(BrokenPipeError):
            raise Failure(f"it does not: {keyboard.write(b'x')} byte fits")
        number = number_in(pid_file)
        is_alone = os.getsid(number) != session
        require(is_alone, "it has not left its session")
        os.kill(number, signal.SIGHUP)
        require(not server.fault(), "it serves no more")
        end_daemon(trial, number)


@check("ADDR-10")
def only_its_own_pid_file_is_removed(trial: Trial) -> None:
    for text, *options in ((b"precious\n",), (b"1\n2\n", "-r"), (b"\n",)):
        pid_file = trial.file(text)
        with daemon(trial, pid_file, 1, *options) as server:
            content = Path(pid_file).read_bytes()
            require(content == text, f"the file now holds {describe(content)}")
            is_left = os.path.lexists(server.path)
            require(not is_left, "it does not start, and leaves its socket")
    pid_file = trial.file(b"")
    for path in (os.path.dirname(pid_file), f"{pid_file}.none/pid"):
        with daemon(trial, path, 1):
            pass
    with daemon(trial, pid_file, 0):
        number = number_in(pid_file)
        trial.say("another server is to use its pid file")
        with daemon(trial, pid_file, 1):
            require(number_in(pid_file) == number, "it has changed")
        trial.say("another file takes the place of its pid file")
        os.rename(pid_file, pid_file + ".moved")
        Path(pid_file).touch()
        end_daemon(trial, number)
        is_there = os.path.lexists(pid_file)
        require(is_there, "it has removed what is not its own")
