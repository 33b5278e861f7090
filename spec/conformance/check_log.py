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
ERRORS = 8  # of a user, in each way
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
    users = [trial.user + number for number in range(12)]
    users = users if os.geteuid() == 0 else [os.geteuid()]
    trial.say(f"{len(users)} users err {ERRORS} times, in two ways each")
    begin, pids = time.monotonic(), defaultdict(set)
    for uid in users * ERRORS:
        for packet in MISTAKES.values():
            client = trial.client(uid=uid if len(users) > 1 else None)
            client.send(packet)
            hear(client, END)
            pids[uid].add(client.pid)
    time.sleep(LINE_SECONDS)
    trial.stop()
    most = 2 * (time.monotonic() - begin) + 2  # one, and one of those left out
    total = len(users) * ERRORS
    for rule in MISTAKES:
        lines = lines_of(trial, rule)
        numbers = [{*map(int, NUMBER.findall(line))} for line in lines]
        sums = {0}  # of one number of each line, or 1: nobody knows which
        for found in numbers:
            sums = {s + n for s in sums for n in {1, *found} if n <= total}
        require(total in sums, f"its lines of {rule} do not add up to {total}")
        for uid in users:
            own = [found for found in numbers if uid in found]
            others = set[int]().union(*pids.values()) - pids[uid]
            wrong = others & set[int]().union(*own)
            require(not wrong, f"its lines of {rule} for {uid} name {wrong}")
            require(len(own) <= most, f"{len(own)} lines of {rule} for {uid}")


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
TOLD = {  # of each event, what a client knows
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c",),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "msg": ("c", "m", "key", "size"),
    "send": ("m", "c"),
    "drop": ("m", "c", "reason"),
}
ENDS = {"version", "address", "host", "cred_prefix"}
ALSO = {"start": ENDS, "stop": ENDS, "close": {"reason"}}


def read_trace(path: str) -> list[Event]:
    """Return the events of a trace."""
    try:
        with open(path, "rb") as file:
            events = [json.loads(line.decode("ascii")) for line in file]
    except (OSError, ValueError) as error:
        raise Failure(f"the trace cannot be read: {error}") from None
    for event in events:
        is_event = isinstance(event, dict) and isinstance(event.get("t"), int)
        require(is_event, f"{event} is no event with a time")
    return events


def told(event: Event) -> str:
    """Return an event's kind, and its members that a client knows."""
    kind = event.get("ev", "")
    return words(kind, *map(event.get, TOLD.get(kind, ())))


def words(*members: Any) -> str:
    """Return an event as a text."""
    return " ".join(map(str, members))


@check("TRACE-1", "TRACE-4", "RUN-15")
def trace_of_a_conversation(trial: Trial) -> None:
    path, address = trial.server.new_path(), trial.server.new_path() + '"'
    trial.start("--trace", path, path=address)
    reader, publisher = trial.client("x"), trial.client("y")
    tell(reader, b'SUB "\xff*', b'SUB "\xff*')
    trial.say("a client publishes, sends an unknown packet, unsubscribes")
    tell(publisher, b'MSG "\xff\n\0four')
    tell(publisher, b"MSG k\0", b"CMSG unknown/\0x", b"UNSUB none")
    tell(reader, b'UNSUB "\xff*')
    reader.close()
    for _ in range(2):
        publisher.settle()
    trial.stop()
    count = len(trial.server.log_lines())
    require(count == 2, f"it logs {count} lines, and two are of its life")
    events = read_trace(path)
    require_whole(events, address)
    opened = [event.get("c") for event in events if event.get("ev") == "open"]
    is_counted = opened[1:] and opened == [*range(1, len(opened) + 1)]
    require(is_counted, f"the numbers of its clients are {opened}")
    a, b = opened[-2:]
    who = reader.gid, reader.uid, reader.pid
    wanted = [
        ("open", a, *who),
        ("sub", a, "x"),
        ("open", b, *who),
        ("sub", b, "y"),
        ("sub", a, '"\xff*'),
        ("sub", a, '"\xff*'),
        ("msg", b, 1, '"\xff\n', 4),
        ("send", 1, a),
        ("msg", b, 2, "k", 0),
        ("ctl", b, "unknown/"),
        ("unsub", a, '"\xff*'),
        ("close", a),
        ("close", b),
    ]
    about = [told(event) for event in events if event.get("c") in (a, b)]
    lines = [line for line in about if "whoami" not in line]
    for event, one in zip(lines, itertools.starmap(words, wanted)):
        require(event == one, f"it tells {event}, not {one}")
    is_all = len(wanted) - 1 <= len(lines) <= len(wanted)
    require(is_all, f"it ends with {lines[-1:]}")


def require_whole(events: list[Event], address: str) -> None:
    """Raise Failure if a trace lacks an event, or an event a member."""
    kinds = [event.get("ev", "") for event in events]
    ends = kinds[:1] + kinds[-1:]
    require(ends == ["start", "stop"], f"it begins and ends with {ends}")
    for kind, one in zip(kinds, events):
        members = {*TOLD.get(kind, ()), *ALSO.get(kind, ())}
        missing = members - {*one}
        require(not missing, f"{one} has no {missing}")
        age = time.time_ns() - one["t"]
        require(abs(age) < HOUR, f"the time of {one} is no time since 1970")
        require("data" not in one, "it has payloads")
    found = events[0]["address"]
    require(found == address, f"it starts at {found}")


@check("TRACE-1", "CTL-5", fills=True)
def log_and_trace_of_discards(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.start("--max-backlog", "1", "--trace", path)
    modes = b"blocking/soft/discard", b"blocking/hard/discard"
    reader, publisher = trial.stall(modes=modes)
    before = len(trial.server.log_lines())
    trial.say("messages of three bytes are discarded, by either mode")
    message = b"MSG k\0abc"
    tell(publisher, message, message, message)
    tell(reader, b"CMSG blocking/soft/queue")
    tell(publisher, message)
    count = len(trial.server.log_lines()) - before
    require(count == 1, f"it logs {count} lines of that")
    trial.stop()
    events = read_trace(path)
    sent = [event for event in events if event.get("key") == "k"]
    sizes = [event.get("size") for event in sent]
    require(sizes == [3] * 4, f"their sizes are {sizes}")
    readers = [one.get("c") for one in events if one.get("pattern") == "k"]
    reasons = ["soft/discard"] * 3 + ["hard/discard"]
    wanted = [
        words("drop", one.get("m"), who, why)
        for one, who, why in zip(sent, readers * 4, reasons)
    ]
    found = [told(event) for event in events if event.get("ev") == "drop"]
    require(found == wanted, f"it tells {found}, not {wanted}")


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
