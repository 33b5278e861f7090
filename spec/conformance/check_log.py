"""What a server says in its log and in its trace."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import stat
import time
from collections import defaultdict
from typing import Any

from .check_daemon import daemon, end_daemon, number_in
from .conversation import END, Failure, describe
from .examples import escape
from .server import limit
from .trial import Trial, check, hear, require, tell
from .wire import Wire

KEPT_OUT = 30
ERRORS = 30  # of a user, in each way
MISTAKES = {"PKT-2": b"HELLO", "KEY-4": b"SUB !"}
NUMBER = re.compile(rb"\b[0-9]+\b")
LINE_SECONDS = 1.1  # [CONN-13] after which a line more is due
HOUR = 3600 * 10**9  # in nanoseconds
LOGGED_BYTES_MAX = 80  # [RUN-15] of what a client sent
MANY = b"x" * LOGGED_BYTES_MAX * 2


def lines_of(trial: Trial, rule: str) -> list[bytes]:
    """Return the lines of the server's log that name a rule."""
    name = re.compile(rf"\b{rule}\b".encode())
    return [line for line in trial.server.log_lines() if name.search(line)]


def require_line(trial: Trial, rule: str) -> None:
    """Raise Failure unless the log has a line that names a rule."""
    require(lines_of(trial, rule), f"it logs no line that names {rule}")


def mistake(trial: Trial, packet: bytes = b"HELLO") -> Wire:
    """Return a client that the server disconnects for a packet."""
    client = trial.client()
    client.send(packet)
    hear(client, END)
    client.close()
    return client


@check("RUN-15")
def log_of_bytes_of_clients(trial: Trial) -> None:
    trial.start("-v")
    strange = b"\x1b[31m\r\xc3\xa9\n"
    reader = trial.client("k/")
    trial.say("clients send strange and long keys and mistakes, and payloads")
    for packet in (
        b"SUB %b" % strange,
        b"MSG k/%b\0precious" % strange,
        b"MSG k/%b\0precious" % MANY,
        b"CMSG %b" % strange,
        strange,
        b"HELLO %b" % MANY,
    ):
        tell(trial.client(), packet)
    for _ in range(2):
        require(reader.receive() != END, "a reader is disconnected")
    trial.stop()
    lines = trial.server.log_lines()
    require(len(lines) > 2, "it logs no decision")
    for line in lines:
        is_plain = all(32 <= byte < 127 for byte in line.rstrip(b"\n"))
        require(is_plain, f"it logs {describe(line)}")
        require(b"precious" not in line, "it logs a payload")
        is_short = MANY[: LOGGED_BYTES_MAX + 1] not in line
        require(is_short, f"it logs more than {LOGGED_BYTES_MAX} bytes")


@check("CONN-13", "PKT-2")
def log_of_each_mistake(trial: Trial) -> None:
    for packet in (b"", b"MSG k", b"SUB !", b"SUB " + b"k" * 4097):
        trial.start()
        trial.say(f"a client sends {escape(packet) or 'an empty packet'}")
        client = mistake(trial, packet)
        trial.stop()
        found = lines_of(trial, r"(PKT|KEY|CRED|LIMIT)-\d+")
        rule = "CONN-13" if packet else "PKT-2"  # it may pass for the end
        require(len(found) == 1, f"{len(found)} lines name a rule", rule)
        named = {*map(int, re.findall(rb"\b[0-9]+\b", found[0]))}
        require(client.uid in named, "its line does not name the user id")
        require(client.pid in named, "its line does not name the process id")


@check("CONN-13")
def lines_of_each_user(trial: Trial) -> None:
    trial.start("-g", "-o")
    users = [trial.user, trial.user + 1]
    trial.say(f"two users err {ERRORS} times each, in two ways")
    begin, pids = time.monotonic(), defaultdict(set)
    for uid in users * ERRORS:
        for packet in MISTAKES.values():
            client = trial.client(uid=uid)
            client.send(packet)
            hear(client, END)
            pids[uid].add(client.pid)
    time.sleep(LINE_SECONDS)
    trial.stop()
    most = 2 * (time.monotonic() - begin) + 2  # one, and one of those left out
    for rule, uid in itertools.product(MISTAKES, users):
        lines = lines_of(trial, rule)
        numbers = [{1, *map(int, NUMBER.findall(line))} for line in lines]
        own = [found for found in numbers if uid in found]
        sums = {0}  # of a number of each line: nobody knows which one counts
        for found in own:
            sums = {s + n for s in sums for n in found if s + n <= ERRORS}
        where = f"its lines of {rule} for user {uid}"
        require(ERRORS in sums, f"{where} do not add up to {ERRORS}")
        others = set[int]().union(*pids.values()) - pids[uid]
        wrong = others & set[int]().union(*own)
        require(not wrong, f"{where} name {wrong} of another")
        require(len(own) <= most, f"{where} are {len(own)}")


@check("CONN-13", "CONN-2", "TRACE-1")
def log_and_trace_of_users_who_are_kept_out(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.start("-u", "root", "-g", "-o", "--trace", path)
    trial.say(f"a user who is kept out tries it {KEPT_OUT} times")
    for _ in range(KEPT_OUT):
        hear(trial.client(uid=trial.user), END)
    trial.stop()
    require_line(trial, "CONN-2")
    users = [event.get("uid") for event in read_trace(path)]
    require(trial.user not in users, "its trace says that the user came")


@check("RUN-16")
def log_that_cannot_be_written(trial: Trial) -> None:
    for is_closed in (False, True):
        log, end = trial.pipe()
        trial.start(stderr=end)
        trial.say("its log is a pipe that is closed or full; a client errs")
        if is_closed:
            log.close()
        else:  # opened anew, so that to fill it does not wait
            name = f"/proc/self/fd/{end.fileno()}"
            filler = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
            with open(filler, "wb", 0) as pipe:
                while pipe.write(bytes(4096)):
                    pass
        end.close()
        mistake(trial)
        trial.require_service()


@check("RUN-15", "TRACE-1")
def log_and_trace_of_a_daemon(trial: Trial) -> None:
    pid_file, path = trial.file(b""), trial.server.new_path()
    with daemon(trial, pid_file, 0, "--trace", path) as server:
        end_daemon(trial, number_in(pid_file))
        count = len(server.log_lines())
        require(count == 2, f"in the file of its log are {count} lines")
    found = [event.get("ev") for event in read_trace(path)]
    require(found == ["start", "stop"], f"its trace says {found}")


# ---- The trace

Event = dict[str, Any]
MEMBERS = {
    **dict.fromkeys(("start", "stop"), "version address host cred_prefix"),
    "open": "c gid uid pid",
    "close": "c reason",
    **dict.fromkeys(("sub", "unsub"), "c pattern"),
    "ctl": "c key",
    "msg": "c m key size",
    "send": "m c",
    "drop": "m c reason",
}


def read_trace(path: str) -> list[Event]:
    """Return the events of a trace."""
    try:
        with open(path, "rb") as file:
            events = [json.loads(line.decode("ascii")) for line in file]
    except (OSError, ValueError) as error:
        raise Failure(f"the trace cannot be read: {error}") from None
    for event in events:
        members = {"n", "t", "ev", *MEMBERS[event["ev"]].split()}
        other = members ^ {*event} - {"data"}
        require(not other, f"{event} lacks members, or has others: {other}")
        age = time.time_ns() - event["t"]
        require(abs(age) < HOUR, f"the time of {event} is not since 1970")
    return events


@check("CTL-5", fills=True)
def log_of_discards(trial: Trial) -> None:
    trial.start()
    reader, publisher = trial.stall(modes=(b"blocking/soft/discard",))
    before = len(trial.server.log_lines())
    trial.say("three messages are discarded")
    tell(publisher, *[b"MSG k\0abc"] * 3)
    count = len(trial.server.log_lines()) - before
    require(count == 1, f"it logs {count} lines of that")


@check("RUN-16")
def trace_that_cannot_be_written(trial: Trial) -> None:
    path, (log, end) = trial.server.new_path(), trial.pipe()

    def ignore_large_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    trial.start("--trace", path, preexec_fn=ignore_large_files, stderr=end)
    end.close()
    trial.say("the server has a trace, which must grow no more")
    for process in trial.server.processes:
        limit(process, resource.RLIMIT_FSIZE, 1)
    trial.client("k").settle()
    trial.require_service()
    trial.stop()
    text = b"".join(iter(lambda: trial.read(log), b""))
    require(text.count(b"\n") > 2, "it says nothing of that in its log")


@check("TRACE-1", "TRACE-4")
def trace_of_payloads(trial: Trial) -> None:
    path = trial.server.new_path()
    options = ("--trace", path, "--trace-payload")
    trial.start(*options, umask=0)
    tell(trial.client(), b"MSG !/cred////k\0precious", b"MSG k\0common")
    trial.stop()
    trial.start(*options)
    mode, events = stat.S_IMODE(os.stat(path).st_mode), read_trace(path)
    is_private = mode == 0o600
    require(is_private, f"the mode of the trace is {mode:04o}", "TRACE-1")
    starts = sum(event.get("ev") == "start" for event in events)
    require(starts == 2, f"the trace has {starts} starts")
    data = [event["data"] for event in events if "data" in event]
    require(data == ["Y29tbW9u"], f"its payloads are: {data}", "TRACE-4")
