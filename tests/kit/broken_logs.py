"""Servers whose log or trace breaks a rule, as in broken_processes.py."""

# mypy: allow-untyped-defs
# A mistake has no types, as those in broken_servers.py.

from __future__ import annotations

import logging
import os
import re
import signal
import sys

from broken_servers import Broken, collect

BROKEN: list[Broken] = []
broken = collect(BROKEN)

HOARD: list[object] = []


@broken("log-of-a-healthy-server", "Server._admit")
def clients_are_logged(admit, server, wire):
    os.write(2, b"sbusd: a client\n")
    admit(server, wire)


@broken("log-of-a-healthy-server", "Server._finish")
def its_end_is_not_logged(finish, server):
    logging.disable(logging.CRITICAL)
    finish(server)


@broken("log-of-bytes-of-clients", "Bus.handle")
def payloads_are_logged(handle, bus, client, packet, start):
    os.write(2, bytes(packet).partition(b"\0")[2].replace(b"\n", b"") + b"\n")
    return handle(bus, client, packet, start)


@broken("log-of-bytes-of-clients", "Bus.handle")
def keys_are_logged_as_they_are(handle, bus, client, packet, start):
    os.write(2, bytes(packet).partition(b"\0")[0][:20] + b"\n")
    return handle(bus, client, packet, start)


@broken("log-of-bytes-of-clients", "Bus.handle")
def keys_are_logged_whole(handle, bus, client, packet, start):
    os.write(2, repr(bytes(packet).partition(b"\0")[0]).encode() + b"\n")
    return handle(bus, client, packet, start)


@broken("log-that-nobody-reads", "LogHandler.emit")
def the_log_is_waited_for(emit, handler, record):
    os.set_blocking(2, True)
    os.write(2, record.getMessage().encode() + b"\n")


@broken("log-that-is-closed", "LogHandler.emit")
def it_ends_with_its_log(emit, handler, record):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.write(2, record.getMessage().encode() + b"\n")


@broken("log-of-many-who-are-kept-out", "CauseLog.write")
def everybody_who_is_kept_out_is_logged(write, causes, rule, uid, line):
    if rule == "CONN-2":
        return logging.getLogger("sbus").warning(line)
    write(causes, rule, uid, line)


@broken("trace-is-in-order", "Journal.flush")
def events_are_written_backwards(flush, journal):
    journal._lines.reverse()
    flush(journal)


@broken("trace-is-in-order", "Journal._write")
def messages_are_traced_when_they_were_sent(write, journal, event, fields):
    write(journal, event, fields)
    if event == "send":
        journal._lines[-2:] = reversed(journal._lines[-2:])


@broken("trace-is-numbered", "Journal._write")
def control_packets_have_two_numbers(write, journal, event, fields):
    journal._events += event == "ctl"
    write(journal, event, fields)


@broken("trace-without-payloads", "Journal.__init__")
def payloads_are_always_traced(init, journal, trace, about, payloads, verbose):
    init(journal, trace, about, True, verbose)


@broken("trace-that-cannot-be-written", "Journal.flush")
def it_ends_without_its_trace(flush, journal):
    had_one = journal._trace >= 0
    flush(journal)
    if had_one and journal._trace < 0:
        os._exit(1)


@broken("trace-that-cannot-be-written", "Journal.flush")
def its_trace_is_lost_in_silence(flush, journal):
    logging.disable(logging.CRITICAL)
    flush(journal)
    logging.disable(logging.NOTSET)


@broken("log-of-many-mistakes", "CauseLog.write")
def every_mistake_is_logged(write, causes, rule, uid, line):
    logging.getLogger("sbus").warning(line)


@broken("log-of-mistakes-of-many-users", "CAUSE_LINES_MAX")
def lines_of_many_users_have_no_limit(lines):
    return sys.maxsize


@broken("log-of-many-mistakes", "CauseLog.write")
def no_mistake_is_logged(write, causes, rule, uid, line):
    pass


@broken("log-of-many-mistakes", "CauseLog.write")
def what_is_left_out_is_not_counted(write, causes, *args):
    causes._left_out.clear()
    write(causes, *args)


@broken("log-of-many-mistakes", "CauseLog.write")
def what_was_left_out_is_told_again(write, causes, rule, uid, line):
    told = causes._left_out[rule, uid]
    write(causes, rule, uid, line)
    causes._left_out[rule, uid] = max(told, causes._left_out[rule, uid])


@broken("log-of-the-first-discard", "Server._after_refusal")
def no_discard_is_logged(after_refusal, server, client):
    client.discard_logged = True
    after_refusal(server, client)


@broken("log-of-the-first-discard", "FloodControl.discard")
def every_discard_is_logged(discard, *args):
    os.write(2, b"sbusd: discard\n")
    discard(*args)


@broken("log-of-the-first-discard", "FloodControl.discard")
def first_of_each_reason_is_logged(discard, flood, receiver, packets, reason):
    if HOARD and reason not in HOARD:
        os.write(2, b"sbusd: discard\n")
    HOARD.append(reason)
    discard(flood, receiver, packets, reason)


@broken("log-of-each-mistake", "CauseLog.write")
def an_empty_packet_is_not_logged(write, causes, rule, uid, line):
    if rule != "PKT-4":
        write(causes, rule, uid, line)


@broken("log-of-each-mistake", "CauseLog.write")
def the_user_is_not_named(write, causes, rule, uid, line):
    write(causes, rule, uid, line.replace(f"{uid}", "someone"))


@broken("log-of-a-daemon", "go_to_background")
def daemon_closes_its_log(go_to_background, *args):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return go_to_background(*args)


@broken("trace-of-payloads", "open_regular")
def everybody_may_read_the_trace(open_regular, path, *flags):
    descriptor = open_regular(path, *flags)
    os.fchmod(descriptor, 0o644)
    return descriptor


@broken("trace-of-payloads", "open_regular")
def the_trace_is_emptied(open_regular, path, flags):
    return open_regular(path, flags | os.O_TRUNC)


@broken("trace-of-discards", "Journal._write")
def every_drop_is_one_for_the_deaf(write, journal, event, fields):
    write(journal, event, fields.replace("soft/discard", "deaf"))


@broken("trace-of-discards", "Journal._write")
def every_drop_is_for_one_client(write, journal, event, fields):
    number = '"c":1,' if event == "drop" else r"\g<0>"
    write(journal, event, re.sub('"c":[0-9]+,', number, fields))


def shift(fields: str, name: str, by: int) -> str:
    """Return fields of an event, one of them made larger."""
    head, name, tail = fields.partition(f'"{name}":')
    digits = re.match("[0-9]*", tail)
    if digits and digits[0]:
        tail = f"{int(digits[0]) + by}{tail[digits.end() :]}"
    return head + name + tail


@broken("trace-of-a-conversation", "Journal._write")
def size_counts_the_whole_packet(write, journal, event, fields):
    write(journal, event, shift(fields, "size", 6))


@broken("trace-of-a-conversation", "Journal._write")
def second_of_two_like_patterns_is_not_traced(write, journal, event, fields):
    if event != "sub" or HOARD[-1:] != [fields]:
        write(journal, event, fields)
    HOARD.extend([fields] * (event == "sub"))


@broken("trace-of-a-conversation", "Journal._write")
def quotes_in_keys_are_left_out(write, journal, event, fields):
    write(journal, event, fields.replace(r"\"", ""))


@broken("trace-of-a-conversation", "Journal._write")
def unknown_control_packet_is_not_traced(write, journal, event, fields):
    if event != "ctl" or "whoami" in fields:
        write(journal, event, fields)


@broken("trace-of-a-conversation", "Bus.unsubscribe")
def every_unsubscription_is_traced(unsubscribe, bus, client, pattern):
    if pattern == b"none":
        bus.journal.note("unsub", client, "none")
    unsubscribe(bus, client, pattern)


@broken("trace-of-a-conversation", "Journal._write")
def messages_are_numbered_from_0(write, journal, event, fields):
    write(journal, event, shift(fields, "m", -1))


@broken("trace-of-a-conversation", "Journal._write")
def arrivals_are_not_traced(write, journal, event, fields):
    if event != "open":
        write(journal, event, fields)


@broken("trace-of-a-conversation", "Journal._write")
def departures_are_not_traced(write, journal, event, fields):
    if event != "close":
        write(journal, event, fields)


@broken("trace-has-its-fields", "Journal._write")
def time_is_in_microseconds(write, journal, event, fields):
    write(journal, event, fields)
    shorter = re.sub(r'("t":[0-9]+)[0-9]{3},', r"\1,", journal._lines[-1])
    journal._lines[-1] = shorter


@broken("trace-of-a-daemon", "open_journal")
def daemon_has_no_trace(open_journal, options, address):
    if options.daemon:
        options.trace = None
    return open_journal(options, address)


@broken("trace-has-its-fields", "Journal._write")
def quote_in_the_address_is_not_escaped(write, journal, event, fields):
    plain = event not in ("start", "stop")
    write(journal, event, fields if plain else fields.replace('\\"', '"'))


@broken("trace-has-its-fields", "open_journal")
def address_is_not_traced(open_journal, options, address):
    return open_journal(options, "")


@broken("trace-of-one-who-is-kept-out", "Server._admit")
def who_is_kept_out_is_traced(admit, server, wire):
    server.allowed_uids, allowed = None, server.allowed_uids
    admit(server, wire)
    server.allowed_uids = allowed
    client = max(server.bus.clients.values(), key=lambda one: one.number)
    if allowed and client.user.uid not in allowed:
        server.disconnect(client, "kept out")
