"""What a server says in its log and in its trace."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import stat
import time
from typing import Any

from .conversation import END, Failure, describe
from .examples import escape
from .processes import limit
from .running import (
    ORDINARY_USER,
    daemon,
    end_by,
    end_daemon,
    many_users,
    number_in,
    stop,
)
from .trial import NotApplicable, Trial, check, hear, require

MISTAKES = 100
KEPT_OUT = 30
LINE_SECONDS = 1.1  # [CONN-13] after which a line more is due
HOUR = 3600 * 10**9  # in nanoseconds
LOGGED_BYTES_MAX = 80  # [RUN-15] of what a client sent


# =============================================================================
# The log
# =============================================================================


@check("RUN-15")
def log_of_a_healthy_server(trial: Trial) -> None:
    trial.server.start()
    reader, publisher = trial.client("k"), trial.client()
    trial.say("a client publishes, another hears it, and both leave")
    publisher.send(b"MSG k\0")
    hear(reader, b"MSG k\0")
    reader.send(b"UNSUB k")
    reader.settle()
    trial.close()
    require(not trial.server.fault(), "it serves no more")
    count = len(trial.server.log_lines())
    require(
        count == 1, f"it has logged {count} lines, and one is of its start"
    )
    stop(trial)
    count = len(trial.server.log_lines()) - 1
    require(count == 1, f"it logs {count} lines when it stops")


@check("RUN-15")
def log_of_a_daemon(trial: Trial) -> None:
    pid_file = trial.server.new_path()
    with daemon(trial, pid_file, 0) as server:
        end_daemon(trial, number_in(pid_file))
        count = len(server.log_lines())
        require(count == 2, f"in the file of its log are {count} lines")


@check("RUN-15", options="-v")
def log_of_bytes_of_clients(trial: Trial) -> None:
    trial.server.start(trial.options)
    strange = b"\x1b[31m\r\xc3\xa9\n"
    reader = trial.client("k/")
    trial.say("clients send strange and long keys and mistakes, and payloads")
    for packet in (
        b"SUB %b" % strange,
        b"MSG k/%b\0precious" % strange,
        b"MSG k/%b\0precious" % (b"x" * LOGGED_BYTES_MAX * 2),
        b"CMSG %b" % strange,
        strange,
        b"HELLO %b" % (b"x" * LOGGED_BYTES_MAX * 2),
    ):
        client = trial.client()
        client.send(packet)
        client.settle()
        client.close()
    for _ in range(2):
        require(reader.receive() != END, "a reader is disconnected")
    stop(trial)
    lines = trial.server.log_lines()
    require(len(lines) > 2, "it logs no decision")
    for line in lines:
        shown = line.rstrip(b"\n")
        is_plain = all(32 <= byte < 127 for byte in shown)
        require(is_plain, f"it logs {describe(shown)}")
        require(b"precious" not in line, "it logs a payload")
        is_short = b"x" * (LOGGED_BYTES_MAX + 1) not in line
        require(is_short, f"it logs more than {LOGGED_BYTES_MAX} bytes")


@check("CONN-13")
def log_of_many_mistakes(trial: Trial) -> None:
    trial.server.start(trial.options)
    start = time.monotonic()
    trial.say(f"{MISTAKES} clients of a user send HELLO, the last one later")
    for number in range(MISTAKES):
        if number == MISTAKES - 1:
            time.sleep(LINE_SECONDS)  # until a line more is due
        with contextlib.closing(trial.client()) as client:
            client.send(b"HELLO")
            require(client.receive() == END, "HELLO is no end")
    trial.say("all are in its log, as lines or counted; then it says no more")
    end = time.monotonic() + 2 * LINE_SECONDS
    while MISTAKES not in sums_of(trial) and time.monotonic() < end:
        time.sleep(0.005)  # no event tells of a line
    time.sleep(LINE_SECONDS)
    stop(trial)
    most = time.monotonic() - start + 2  # the first, and what is left out
    lines = len(lines_of(trial, "PKT-2"))
    require(lines, "it logs no line that names PKT-2")
    require(lines <= most, f"it logs {lines} lines, one a second wanted")
    is_said = MISTAKES in sums_of(trial)
    require(is_said, f"its lines do not add up to {MISTAKES} mistakes")


def lines_of(trial: Trial, rule: str) -> list[bytes]:
    """Return the lines of the server's log that name a rule."""
    name = re.compile(rf"\b{rule}\b".encode())
    return [line for line in trial.server.log_lines() if name.search(line)]


def sums_of(trial: Trial) -> set[int]:
    """Return of how many mistakes the log may tell.

    A line that names our process is of one of them.  One of its numbers is
    of others that were left out if it has more of them than the first line.
    Any other line is of such alone.
    """
    sums, usual = {0}, 0
    for line in lines_of(trial, "PKT-2"):
        text = line.replace(b"PKT-2", b"")
        numbers = [*map(int, re.findall(rb"\b[0-9]+\b", text))]
        found = {*numbers} - {0}
        if os.getpid() in found:
            usual = usual or len(numbers)
            others = found if len(numbers) > usual else {0}
            found = {1 + number for number in others}
        sums = {one + other for one in sums for other in found}
    return sums


@check("CONN-13", "CONN-2", options="-u root -g -o")
def log_of_many_who_are_kept_out(trial: Trial) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    trial.server.start(trial.options)
    start = time.monotonic()
    trial.say(f"a user who is kept out tries it {KEPT_OUT} times")
    for _ in range(KEPT_OUT):
        client = trial.server.connect(True, {"uid": ORDINARY_USER})
        with contextlib.closing(client):
            hear(client, END)
    stop(trial)
    most = time.monotonic() - start + 2  # the first, and what is left out
    lines = len(lines_of(trial, "CONN-2"))
    require(lines, "it logs no line that names CONN-2")
    require(lines <= most, f"it logs {lines} lines, one a second wanted")


@check("CONN-13", options="-g -o")
def log_of_mistakes_of_many_users(trial: Trial) -> None:
    with many_users(trial) as crowd:
        trial.say("each sends HELLO while the server is stopped")
        trial.server.freeze()
        for client in crowd:
            client.send(b"HELLO")
        trial.server.thaw()
        start = time.monotonic()
        for client in crowd:
            hear(client, END)
        seconds = time.monotonic() - start
    lines = len(lines_of(trial, "PKT-2"))
    most = 10 * int(seconds + 2)  # in each second that it touched
    require(lines <= most, f"it logs {lines} lines in {seconds:.1f} s")


@check("CTL-5", options="--max-backlog 1", fills=True)
def log_of_the_first_discard(trial: Trial) -> None:
    trial.server.start(trial.options)
    reader, publisher = trial.client("k"), trial.client()
    reader.send(b"CMSG blocking/soft/discard")
    trial.server.fill(reader)
    before = len(trial.server.log_lines())
    trial.say("three messages are discarded for a reader")
    for _ in range(3):
        publisher.send(b"MSG k\0")
    publisher.settle()
    trial.say("and one for another reason")
    reader.send(b"CMSG blocking/soft/queue")
    reader.send(b"CMSG blocking/hard/discard")
    reader.settle()
    publisher.send(b"MSG k\0")
    publisher.settle()
    count = len(trial.server.log_lines()) - before
    require(count == 1, f"it logs {count} lines of that")


@check("CONN-13", "PKT-2")
def log_of_each_mistake(trial: Trial) -> None:
    for packet in (b"", b"MSG k", b"SUB !", b"SUB " + b"k" * 4097):
        trial.server.start()
        trial.say(f"a client sends {escape(packet) or 'an empty packet'}")
        with contextlib.closing(trial.client()) as client:
            client.send(packet)
            hear(client, END)
            uid, pid = client.uid, client.pid
        stop(trial)
        found = [
            line
            for line in trial.server.log_lines()
            if re.search(rb"\b(PKT|KEY|CRED|LIMIT)-[0-9]", line)
        ]
        require(len(found) == 1, f"it names a rule in {len(found)} lines")
        named = {int(one) for one in re.findall(rb"\b[0-9]+\b", found[0])}
        require(uid in named, "its line does not name the user id")
        require(pid in named, "its line does not name the process id")


@check("RUN-16")
def log_that_nobody_reads(trial: Trial) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "wb"):
            trial.server.start(stderr=writing)
            name = f"/proc/self/fd/{writing}"  # opened anew, to wait no more
            filler = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
        trial.say("the server's log is a pipe, which is full")
        with open(filler, "wb", 0) as pipe:
            while pipe.write(bytes(4096)):
                pass
        trial.say("a client breaks a rule, which is to be logged")
        client = trial.client()
        client.send(b"HELLO")
        hear(client, END)
        require(not trial.server.fault(), "it waits for its log")


@check("RUN-16")
def log_that_is_closed(trial: Trial) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb"):
        trial.server.start(stderr=writing)
    trial.say("the server's log is a pipe, whose reader has closed it")
    trial.say("a client breaks a rule, which is to be logged")
    client = trial.client()
    client.send(b"HELLO")
    hear(client, END)
    require(not trial.server.fault(), "it ends with its log")


# =============================================================================
# The trace
# =============================================================================


Event = dict[str, Any]
ENDS = "n", "t", "version", "address", "host", "cred_prefix"
UNKNOWN = {*ENDS, "reason"}  # to a client
FIELDS: dict[Any, tuple[str, ...]] = {
    "start": ENDS,
    "stop": ENDS,
    "open": ("n", "t", "c", "gid", "uid", "pid"),
    "close": ("n", "t", "c", "reason"),
    "sub": ("n", "t", "c", "pattern"),
    "unsub": ("n", "t", "c", "pattern"),
    "ctl": ("n", "t", "c", "key"),
    "msg": ("n", "t", "c", "m", "key", "size"),
    "send": ("n", "t", "m", "c"),
}


def trace_of(trial: Trial) -> list[Event]:
    """Return the events of a server, up to its end.

    One client subscribes and unsubscribes, and another publishes.
    """
    path = trial.server.new_path()
    trial.say("a server is started with a trace, where there is a quote")
    trial.server.start(("--trace", path), trial.server.new_path() + '"')
    trial.say("one subscribes, hears a message, unsubscribes")
    reader, publisher = trial.client("k"), trial.client()
    publisher.send(b"MSG k\0")
    hear(reader, b"MSG k\0")
    reader.send(b"UNSUB k")
    reader.settle()
    trial.say("and misses a message")
    publisher.send(b"MSG k\0")
    publisher.settle()
    stop(trial)
    return read_trace(path)[1]


def read_trace(path: str) -> tuple[int, list[Event]]:
    """Return the mode of a trace, and its events."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with open(path, "rb") as file:
            events = [json.loads(line.decode("ascii")) for line in file]
    except (OSError, ValueError) as error:
        raise Failure(f"the trace cannot be read: {error}") from None
    for one in events:
        is_event = isinstance(one, dict) and isinstance(one.get("t"), int)
        require(is_event, f"{one} is no event with a time")
    return mode, events


@check("TRACE-1")
def trace_is_in_order(trial: Trial) -> None:
    events = trace_of(trial)
    found = [one.get("ev") for one in events]
    wanted = "start, ..., stop"
    require(found[:1] + found[-1:] == ["start", "stop"], f"not {wanted}")
    named = "sub", "msg", "send", "unsub"
    shown = ", ".join(one for one in map(str, found) if one in named)
    require(shown == "sub, msg, send, unsub, msg", f"the trace says {shown}")
    opened: set[Any] = set()
    for one in events:
        who = one.get("c")
        if one.get("ev") == "open":
            require(who not in opened, f"client {who} is opened twice")
            opened.add(who)
        require(who is None or who in opened, f"{who} is not open yet")


@check("TRACE-1")
def trace_of_a_conversation(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with a trace")
    trial.server.start(("--trace", path))
    reader, publisher = trial.client("x"), trial.client("y")
    for client, packet in (
        (reader, b'SUB "\xff*'),
        (reader, b'SUB "\xff*'),
        (publisher, b'MSG "\xff\n\0four'),
        (publisher, b"MSG k\0"),
        (publisher, b"CMSG unknown/\0x"),
        (publisher, b"UNSUB none"),
        (reader, b'UNSUB "\xff*'),
    ):
        trial.say(f"a client sends {escape(packet)}")
        client.send(packet)
        client.settle()
    trial.say("and its reader leaves")
    reader.close()
    for _ in range(2):
        publisher.settle()
    stop(trial)
    events = read_trace(path)[1]
    opened = [one.get("c") for one in events if one.get("ev") == "open"]
    is_counted = opened[1:] and opened == [*range(1, len(opened) + 1)]
    require(is_counted, f"the numbers of its clients are {opened}")
    a, b = opened[-2:]
    who = reader.gid, reader.uid, reader.pid
    wanted = (
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
    )
    about = [one for one in events if one.get("c") in (a, b)]
    told = [fields_told(one) for one in about if not is_question(one)]
    for found, one in zip(told, wanted):
        require(found == one, f"it tells {found}, not {one}")
    left = told[len(wanted) :]
    require(left in ([], [("close", b)]), f"then it tells {left}")
    require(len(told) >= len(wanted), f"it ends with {told[-1:]}")


def is_question(event: Event) -> bool:
    """Return whether an event is of a question of the kit."""
    return event.get("ev") == "ctl" and "whoami" in event.get("key", "")


def fields_told(event: Event) -> tuple[Any, ...]:
    """Return an event's kind, and its fields that a client knows."""
    kind = event.get("ev")
    names = [one for one in FIELDS.get(kind, ()) if one not in UNKNOWN]
    return kind, *map(event.get, names)


@check("TRACE-1")
def trace_has_its_fields(trial: Trial) -> None:
    events = trace_of(trial)
    for one in events:
        missing = {*FIELDS.get(one.get("ev"), ())} - {*one}
        require(not missing, f"{one} has no {missing}")
        age = time.time_ns() - one["t"]
        require(abs(age) < HOUR, f"the time of {one} is no time since 1970")
    found = [one["address"] for one in events if one.get("ev") == "start"]
    require(found == [trial.server.path], f"it starts at {found}")


@check("TRACE-1")
def trace_is_numbered(trial: Trial) -> None:
    numbers = [one.get("n") for one in trace_of(trial)]
    wanted = [*range(1, len(numbers) + 1)]
    require(numbers == wanted, f"its numbers are {numbers}")


@check("TRACE-4")
def trace_without_payloads(trial: Trial) -> None:
    has_data = any("data" in one for one in trace_of(trial))
    require(not has_data, "it has payloads")


@check("TRACE-1", options="--max-backlog 1", fills=True)
def trace_of_discards(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with a trace, and nearly no backlog")
    trial.server.start((*trial.options, "--trace", path))
    reader, publisher = trial.client("k"), trial.client()
    reader.send(b"CMSG blocking/soft/discard")
    trial.server.fill(reader)
    trial.say("a message of three bytes is discarded, by either mode")
    publisher.send(b"MSG k\0abc")
    publisher.settle()
    reader.send(b"CMSG blocking/soft/queue")
    reader.send(b"CMSG blocking/hard/discard")
    reader.settle()
    publisher.send(b"MSG k\0abc")
    publisher.settle()
    stop(trial)
    events = read_trace(path)[1]
    sizes = [one.get("size") for one in events if one.get("key") == "k"]
    require(sizes == [3, 3], f"their sizes are {sizes}")
    why = [one.get("reason") for one in events if one.get("ev") == "drop"]
    wanted = ["soft/discard", "hard/discard"]
    require(why == wanted, f"the reasons are {why}")
    readers = {one.get("c") for one in events if one.get("pattern") == "k"}
    messages = [one.get("m") for one in events if one.get("key") == "k"]
    found = [
        (one.get("m"), {one.get("c")})
        for one in events
        if one.get("ev") == "drop"
    ]
    is_told = found == [(message, readers) for message in messages]
    require(is_told, f"it tells of {found}, of messages {messages}")


@check("TRACE-1")
def trace_of_a_daemon(trial: Trial) -> None:
    pid_file, path = trial.server.new_path(), trial.server.new_path()
    with daemon(trial, pid_file, 0, "--trace", path):
        end_daemon(trial, number_in(pid_file))
    found = [one.get("ev") for one in read_trace(path)[1]]
    require(found == ["start", "stop"], f"its trace says {found}")


@check("TRACE-1", "CONN-2", options="-u root -g -o")
def trace_of_one_who_is_kept_out(trial: Trial) -> None:
    if os.geteuid() != 0:
        raise NotApplicable("needs to be run by root")
    path = trial.server.new_path()
    trial.say("a server has a trace, and a user is kept out")
    trial.server.start((*trial.options, "--trace", path))
    client = trial.server.connect(True, {"uid": ORDINARY_USER})
    with contextlib.closing(client):
        hear(client, END)
    stop(trial)
    users = [one.get("uid") for one in read_trace(path)[1]]
    require(ORDINARY_USER not in users, "its trace says that the user came")


@check("RUN-16")
def trace_that_cannot_be_written(trial: Trial) -> None:
    path = trial.server.new_path()
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as log:
        with open(writing, "wb"):
            trial.server.start(
                ("--trace", path), begin=ignore_large_files, stderr=writing
            )
        if select.select([log], [], [], 0)[0]:
            log.read(1 << 16)  # what it says of its start
        trial.say("the server has a trace, which must grow no more")
        for process in trial.server.processes:
            limit(process, resource.RLIMIT_FSIZE, 1)
        trial.client("k").settle()
        require(not trial.server.fault(), "it does not go on")
        ready = select.select([log], [], [], trial.server.seconds_max)[0]
        text = log.read(1000) if ready else b""
        require(text, "it says nothing of that in its log")


def ignore_large_files() -> None:
    """Have a file that is too large fail to be written, and nothing more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@check("TRACE-1", "TRACE-4")
def trace_of_payloads(trial: Trial) -> None:
    path = trial.server.new_path()
    trial.say("a server is started with a trace, and with payloads")
    options = ("--trace", path, "--trace-payload")
    trial.server.start(options, umask=0)
    client = trial.client()
    client.send(b"MSG !/cred////k\0precious")
    client.send(b"MSG k\0common")
    client.settle()
    end_by(trial, signal.SIGTERM)
    trial.say("and ends, and is started once more")
    trial.server.start(options)
    mode, events = read_trace(path)
    require(mode == 0o600, f"the mode of the trace is {mode:04o}")
    starts = sum(one.get("ev") == "start" for one in events)
    require(starts == 2, f"the trace has {starts} starts")
    data = [one["data"] for one in events if "data" in one]
    require(data == ["Y29tbW9u"], f"the payloads in it are {data}")
