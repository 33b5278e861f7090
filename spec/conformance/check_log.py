"""What a server says in its log and in its trace."""

from __future__ import annotations

import fcntl
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

from .conversation import END, Failure, describe
from .server import limit
from .trial import Trial, check, hear, require, tell

ERRORS = 30  # of each user, in each way
# A rule, the first of two users who break it, and by which packets in turn
WAYS = (
    ("PKT-2", Trial.user, (b"HELLO", b"")),
    ("KEY-4", Trial.user, (b"SUB !", b"MSG !\0")),
    ("CONN-2", Trial.user + 2, (None, None)),  # who are kept out
)
NUMBER = re.compile(rb"\b[0-9]+\b")
LINE_SECONDS = 1.1  # [CONN-13] after which a line more is due
LINES_MAX = 11  # of a rule in a second, with the line of all others
HOUR = 3600 * 10**9  # in nanoseconds
LOGGED_BYTES_MAX = 80  # [RUN-15] of what a client sent
# What clients send to see it in the log
TEXTS = b"\x1b[31m\r\xc3\xa9\n", b"x" * LOGGED_BYTES_MAX * 2
SAID = b"MSG k/%b\0precious", b"CMSG %b", b"%b"
F_GETPIPE_SZ = 1032  # how much a pipe has room for


def require_plain_log(trial: Trial) -> None:
    """Raise Failure unless a log has decisions, and clients' bytes escaped.

    It is to have few of them, and no payload [RUN-15].
    """
    lines = trial.server.log_lines()
    require(len(lines) > 2, "it logs no decision")
    for line in lines:
        is_plain = all(32 <= byte < 127 for byte in line.rstrip(b"\n"))
        require(is_plain, f"it logs {describe(line)}")
        require(b"precious" not in line, "it logs a payload")
        is_short = b"x" * (LOGGED_BYTES_MAX + 1) not in line
        require(is_short, f"it logs more than {LOGGED_BYTES_MAX} bytes")


def err_at_once(trial: Trial, turns: list[Any]) -> int:
    """Have clients err, and the server log all of that and stop.

    Each turn is a client and its packet, or None if it sends nothing.
    Return in how many seconds they erred, the last of which had only begun.
    """
    trial.server.freeze()
    for number, (client, packet) in enumerate(turns):
        if packet is not None:
            # Half of them send it twice: a server may take an empty packet for
            # the end only if another follows
            for _ in range(1 + number // 4 % 2):
                client.send(packet)
    begin = time.monotonic()  # before it, nobody knows how fast others err
    trial.server.thaw()
    for client, _ in turns:
        hear(client, END)
    seconds = int(time.monotonic() - begin) + 1
    time.sleep(LINE_SECONDS)
    trial.stop()
    return seconds


@check("CONN-13", "PKT-2", "CONN-2", "TRACE-1")
def lines_of_each_user(trial: Trial) -> None:
    path = trial.server.new_path()
    names = ("root", str(trial.user), str(trial.user + 1))
    users = [word for name in names for word in ("-u", name)]
    trial.start("-g", "-o", *users, "--trace", path)
    trial.say(f"two users err {ERRORS} times each, in two ways; two are out")
    pids: dict[int, set[int]] = defaultdict(set)
    turns = [
        (trial.client(uid=first + number % 2), ways[number // 2 % 2])
        for _, first, ways in WAYS
        for number in range(2 * ERRORS)
    ]
    # Those left out have a line too, and a second one where the refusal of
    # another user had begun the second
    lines_max = 2 * err_at_once(trial, turns) + 1
    for client, _ in turns:
        pids[client.uid].add(client.pid)
    lines = trial.server.log_lines()
    for (rule, first, ways), other in itertools.product(WAYS, (0, 1)):
        uid = first + other
        name = re.compile(rf"\b{rule}\b".encode())
        named = [
            {1, *map(int, NUMBER.findall(x))} for x in lines if name.search(x)
        ]
        of_user = [numbers for numbers in named if uid in numbers]
        where = f"its lines of {rule} for user {uid}"
        require(adds_up(of_user), f"{where} do not add up to {ERRORS}")
        for numbers in of_user:
            others = set[int]().union(*pids.values()) - pids[uid] - {uid}
            wrong = numbers & others
            require(not wrong, f"{where} name {wrong} of another")
            require(numbers & pids[uid], f"{where} name no process")
        is_limited = len(of_user) <= lines_max or not any(ways)
        require(is_limited, f"{where} are {len(of_user)}")
    traced = {event.get("uid") for event in read_trace(path)}
    require(trial.user + 2 not in traced, "its trace has a user who is out")


def adds_up(lines: list[set[int]]) -> bool:
    """Return whether a number of each line may be a count of errors.

    Nobody knows which of them is.
    """
    sums = {0}
    for numbers in lines:
        sums = {s + n for s in sums for n in numbers if s + n <= ERRORS}
    return ERRORS in sums


@check("CONN-13")
def lines_of_many_users(trial: Trial) -> None:
    trial.start("-g", "-o")
    users = range(trial.user, trial.user + LINES_MAX + 1)
    turns = [(trial.client(uid=user), b"HELLO") for user in users]
    trial.say(f"{len(turns)} users err at once")
    seconds = err_at_once(trial, turns)
    lines = [line for line in trial.server.log_lines() if b"PKT-2" in line]
    require(len(lines) <= seconds * LINES_MAX, f"its lines are {len(lines)}")
    named = {*map(int, NUMBER.findall(b"".join(lines)))}
    lost = {client.pid for client, _ in turns} - named
    require(not lost, f"its lines of PKT-2 leave out the processes {lost}")


@check("RUN-16")
def log_that_cannot_be_written(trial: Trial) -> None:
    for is_closed in (False, True):
        log, end = trial.pipe()
        if not is_closed:
            end.write(bytes(fcntl.fcntl(end, F_GETPIPE_SZ)))
        trial.start(stderr=end)
        trial.say("its log is a pipe that is closed or full; a client errs")
        end.close()
        if is_closed:
            log.close()
        client = trial.client()
        client.send(b"HELLO")
        hear(client, END)
        trial.require_service()


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
    for prefix in ("", "!/cred/1/2/3"):  # behind which the first is upward
        more = ("--cred-prefix", prefix) if prefix else ()
        trial.start(*options, *more, umask=0)
        client = trial.client()
        tell(client, b"MSG !/cred////k\0precious", b"MSG k\0common")
        tell(client, b"MSG !/cred/1/2/3/!/cred////k\0precious")
        trial.stop()
    mode, events = stat.S_IMODE(os.stat(path).st_mode), read_trace(path)
    is_private = mode == 0o600
    require(is_private, f"the mode of the trace is {mode:04o}", "TRACE-1")
    starts = sum(event.get("ev") == "start" for event in events)
    require(starts == 2, f"the trace has {starts} starts")
    data = [event["data"] for event in events if "data" in event]
    require(data == ["Y29tbW9u"] * 2, f"its payloads are: {data}", "TRACE-4")
