"""Servers that break one rule each, to test whether the kit finds them.

A broken server is a fresh copy of sbus.py in which a mistake stands in the
place of one function.  The mistake gets that function as its first argument,
before the function's own, and so says only what is different.  Where it
stands in the place of a constant, it gets that and returns another.
"""

# mypy: allow-untyped-defs
# A mistake has no types, since what it gets is of a copy that has none.

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

from fake_kernel import but
from sbus import (
    BACKLOG_BYTES,
    CHOICES,
    CLIENTS,
    PATTERN_BYTES,
    PATTERNS,
    SECRET,
    WHOAMI,
    pattern_matches,
)

Mistake = Callable[..., Any]
Decorator = Callable[[Mistake], Mistake]


class Broken(NamedTuple):
    """A mistake, the rule that it breaks, and where it is made."""

    name: str
    rule: str
    place: str  # a function, Class.method or CONSTANT
    mistake: Mistake

    def spoil(self, sbus: Any) -> None:
        """Have a fresh copy of sbus make the mistake."""
        owner, _, name = self.place.rpartition(".")
        put_before(getattr(sbus, owner) if owner else sbus, name, self.mistake)


def put_before(owner: Any, name: str, mistake: Mistake) -> None:
    """Have a mistake called with what was called or used until now."""
    before = getattr(owner, name)

    def call(*args: Any) -> Any:
        return mistake(before, *args)

    setattr(owner, name, call if callable(before) else call())


def collect(ones: list[Any], kind: Any = Broken) -> Callable[..., Decorator]:
    """Return a decorator that has a list hold what makes the mistake below.

    It takes what finds the mistake, its place, and perhaps another name.
    """

    def broken(found_by: str, place: str, name: str = "") -> Decorator:
        def add(mistake: Mistake) -> Mistake:
            dashed = (name or mistake.__name__).replace("_", "-")
            ones.append(kind(dashed, found_by, place, mistake))
            return mistake

        return add

    return broken


BROKEN: list[Broken] = []
broken = collect(BROKEN)


def allow(
    name: str, rule: str, limit: str, excess: float = sys.maxsize
) -> None:
    """Have a server that allows more than it is told to."""

    @broken(rule, "Bus.__init__", name)
    def init(init, bus, limits, *options):
        most = getattr(limits, limit) + excess
        init(bus, but(limits, **{limit: most}), *options)


def confuse(name: str, rule: str, choice: bytes, other: bytes) -> None:
    """Have a server that takes one control packet for another."""

    @broken(rule, "Bus.control", name)
    def control(control, bus, client, key):
        control(bus, client, key.replace(choice, other))


def wrong_match(rule: str) -> Callable[[Mistake], Mistake]:
    """Have a server in which the function below is what matches keys."""

    def add(selects: Mistake) -> Mistake:
        @broken(rule, "Bus._route", selects.__name__)
        def route(route, bus, head, key):
            if b"!" in key:
                return route(bus, head, key)
            return [
                client
                for client in bus.clients.values()
                if any(selects(one, key) for one in client.patterns)
            ]

        return selects

    return add


@contextlib.contextmanager
def ignored(rule: str) -> Iterator[None]:
    """Go on where it was found that a rule is broken."""
    try:
        yield
    except Exception as error:
        if getattr(error, "requirement", "") != rule:
            raise


# 1. Overview


@broken("LIMIT-1", "Bus.open")
def packet_above_the_limit_is_cut(let_in, bus, own, wire):
    def receive(receive, *args):
        return min(receive(*args), bus.limits.max_packet)

    put_before(wire, "recv_into", receive)
    return let_in(bus, own, wire)


@broken("LIMIT-2", "Bus.handle")
def large_packets_are_cut(handle, bus, client, packet, start):
    return handle(bus, client, packet[:50_000], start)


allow("packet-of-the-limit-is-refused", "LIMIT-3", "max_packet", -1)
allow("long-keys", "LIMIT-4", "max_key", 1)
allow("one-segment-too-many", "LIMIT-17", "max_segments", 1)
allow("one-pattern-too-many", "LIMIT-5", "max_patterns", 1)
allow("bytes-of-patterns-are-not-counted", "LIMIT-6", "max_pattern_bytes")
allow("one-shape-too-many", "LIMIT-10", "max_shapes", 1)
allow("one-client-too-many", "LIMIT-7", "max_clients", 1)
allow("one-client-of-a-user-too-many", "LIMIT-11", "max_user_clients", 1)
allow("one-pattern-of-a-user-too-many", "LIMIT-12", "max_user_patterns", 1)
allow(
    "bytes-of-patterns-of-a-user-are-not-counted",
    "LIMIT-13",
    "max_user_pattern_bytes",
)
allow("backlog-of-a-user-has-no-limit", "LIMIT-14", "max_user_backlog")
allow("backlog-of-the-bus-has-no-limit", "LIMIT-15", "max_bus_backlog")


def unlimit(name: str, rule: str, start: bytes, *most: int) -> None:
    """Have a server that allows more in one kind of packet."""

    @broken(rule, "parse_packet", name)
    def parse(parse, packet, *limits):
        return parse(packet, *(most if packet[:4] == start else limits))


unlimit("long-keys-of-unsubscribe", "LIMIT-4", b"UNSU", sys.maxsize, 64)
unlimit("long-keys-of-control", "LIMIT-4", b"CMSG", sys.maxsize, 64)
unlimit("segments-of-control", "LIMIT-17", b"CMSG", 4096, sys.maxsize)


@broken("LIMIT-17", "parse_packet")
def first_segment_does_not_count_if_empty(parse, packet, max_key, segments):
    head = packet.partition(b"\0")[0]
    return parse(packet, max_key, segments + (b" /" in head))


@broken("LIMIT-5", "limit")
def number_with_a_leading_zero_is_octal(limit, is_whole, text):
    is_octal = text.startswith("0") and text.isdigit()
    return limit(is_whole, f"{int(text, 8)}" if is_octal else text)


@broken("LIMIT-5", "limit")
def limit_has_32_bits(limit, is_whole, text):
    low = str(int(text) % (1 << 32)) if text.isdigit() else text
    return limit(is_whole, low)


@broken("LIMIT-4", "Bus.__init__")
def unlimited_is_4096(init, bus, limits, *options):
    most = min(limits.max_key, 4096)
    init(bus, but(limits, max_key=most), *options)


@broken("LIMIT-10", "SubscriptionTable.__init__")
def secret_shapes_are_not_apart(init, table, limits):
    init(table, limits)
    table._users = vars(limits).setdefault("shapes", {})


def keep(name: str, rule: str, what: int) -> None:
    """Have a server that counts for a user what has left."""

    @broken(rule, "Server._depart", name)
    def depart(depart, server, client):
        kept = client.used[what]
        depart(server, client)
        client.user.used[what] += kept


keep("places-of-the-departed-stay-taken", "LIMIT-11", CLIENTS)
keep("patterns-of-the-departed-are-counted", "LIMIT-12", PATTERNS)
keep("pattern-bytes-of-the-departed-are-counted", "LIMIT-13", PATTERN_BYTES)
keep("backlog-of-the-departed-is-counted", "LIMIT-14", BACKLOG_BYTES)


@broken("LIMIT-15", "Server._depart")
def backlog_of_the_departed_is_counted_for_the_bus(depart, server, client):
    kept = client.used[BACKLOG_BYTES]
    depart(server, client)
    server.bus.accounts.used[BACKLOG_BYTES] += kept


@broken("LIMIT-14", "most_of")
def backlog_of_root_has_a_limit(most_of, names, limits, *more):
    own, _, total = found = most_of(names, limits, *more)
    is_backlog = names[0] == "max_backlog"
    return (own, limits.max_user_backlog, total) if is_backlog else found


@broken("LIMIT-16", "most_of")
def quarter_is_rounded_up(most_of, names, limits, is_privileged):
    own, shared, total = most_of(names, limits, is_privileged)
    whole = getattr(limits, names[2], sys.maxsize)
    return own, shared, total if is_privileged else whole * 3 // 4


@broken("LIMIT-18", "Server._admit")
def one_too_many_is_not_heard(admit, server, wire):
    if len(server.bus.clients) >= server.bus.limits.max_clients:
        return wire.close()
    admit(server, wire)


@broken("LIMIT-16", "RESERVED_PART")
def no_place_is_kept_for_root(part):
    return sys.maxsize


# 2. Routing keys


@broken("KEY-1", "parse_packet")
def line_feed_ends_a_key(parse, *args):
    kind, key, payload = parse(*args)
    return kind, key.rstrip(b"\n"), payload


@wrong_match("KEY-3")
def star_in_a_key_matches_all(pattern, key):
    return pattern_matches(pattern, key.replace(b"*", b""))


@broken("KEY-4", "check_reserved")
def lone_exclamation_marks(check, text):
    if text == b"!":
        check(text)


@broken("KEY-4", "check_secret")
def second_secret_head_is_refused(check, pattern, own, prefix):
    check(pattern if prefix or pattern.count(b"!") < 2 else b"", own, prefix)


@broken("KEY-5", "check_reserved")
def all_exclamation_marks_are_reserved(check, text):
    if not text.startswith(SECRET):
        text = text.replace(b"!", b"/!/")
    check(text)


@wrong_match("MATCH-1")
def patterns_become_lower_case(pattern, key):
    return pattern_matches(pattern.lower(), key)


@wrong_match("MATCH-1")
def highest_bits_are_ignored(pattern, key):
    return pattern_matches(
        *(bytes(b & 127 for b in t) for t in (pattern, key))
    )


@wrong_match("MATCH-2")
def star_crosses_slashes(pattern, key):
    beyond = pattern + b"/" if b"*" in pattern else pattern
    return pattern_matches(pattern, key) or pattern_matches(beyond, key)


@wrong_match("MATCH-3")
def final_slash_needs_more(pattern, key):
    return pattern_matches(pattern, key) and not (
        pattern.endswith(b"/") and pattern_matches(pattern[:-1], key[:-1])
    )


@wrong_match("MATCH-4")
def empty_pattern_selects_the_empty_key_alone(pattern, key):
    return pattern_matches(pattern, key) if pattern else not key


@wrong_match("MATCH-5")
def patterns_are_beginnings(pattern, key):
    longer = pattern + b"/"
    return pattern_matches(pattern, key) or pattern_matches(longer, key)


@wrong_match("MATCH-6")
def star_needs_a_byte(pattern, key):
    without = pattern.replace(b"*", b"")
    return pattern_matches(pattern, key) and (
        pattern == without or not pattern_matches(without, key)
    )


@wrong_match("MATCH-6")
def pattern_goes_on_after_a_star(pattern, key):
    return pattern_matches(re.sub(rb"\*[^/]*", b"*", pattern), key)


# 3. Protocol


@broken("PKT-1", "parse_packet")
def payload_without_nul_is_required(parse, packet, *most):
    if packet.count(b"\0") > 1:
        packet = packet.replace(b"\0", b"")
    return parse(packet, *most)


@broken("PKT-2", "parse_packet")
def text_without_nul_is_published(parse, packet, *most):
    return parse(packet if b"\0" in packet else packet + b"\0", *most)


@broken("PKT-3", "parse_packet")
def unknown_kinds_are_published(parse, packet, *most):
    with ignored("PKT-2"):
        return parse(packet, *most)
    return parse(b"MSG " + packet.partition(b" ")[2], *most)


@broken("PKT-4", "Server._receive")
def empty_packet_is_ignored(receive, server, client):
    with ignored("PKT-4"):
        return receive(server, client)


RECENT: dict[Any, dict[Any, None]] = {}  # what a table first found for a key


@broken("PKT-5", "SubscriptionTable.find")
def recent_keys_outlive_a_subscribe(find, table, key):
    found = find(table, key)
    recent = RECENT.setdefault((table, key), found)
    return {client: None for client in found if client in recent}


@broken("SUB-1", "Bus.subscribe")
def new_pattern_takes_the_place_of_others(subscribe, bus, client, pattern):
    for other in [one for one in client.patterns if one != pattern]:
        bus.unsubscribe(client, other)
    subscribe(bus, client, pattern)


@broken("SUB-2", "Bus.subscribe")
def identical_patterns_are_one(subscribe, bus, client, pattern):
    if pattern not in client.patterns:
        subscribe(bus, client, pattern)


@broken("SUB-3", "parse_packet")
def text_after_nul_is_part_of_the_pattern(parse, packet, *most):
    if packet.startswith(b"SUB "):
        packet = packet.replace(b"\0", b"")
    return parse(packet, *most)


@broken("UNSUB-1", "Bus.unsubscribe")
def unsubscribe_removes_all(unsubscribe, bus, client, pattern):
    unsubscribe(bus, client, pattern)
    while pattern in client.patterns:
        unsubscribe(bus, client, pattern)


@broken("UNSUB-1", "SubscriptionTable.find")
def recent_keys_outlive_an_unsubscribe(find, table, key):
    found = find(table, key)
    recent = RECENT.setdefault((table, key), found)
    return {**found, **recent}


@broken("UNSUB-2", "Bus.__init__")
def unknown_pattern_disconnects(init, bus, limits, owner, prefix, strict):
    init(bus, limits, owner, prefix, True)


@broken("UNSUB-3", "parse_packet")
def text_after_nul_is_part_of_what_is_unsubscribed(parse, packet, *most):
    if packet.startswith(b"UNSUB "):
        packet = packet.replace(b"\0", b"")
    return parse(packet, *most)


@broken("PUB-1", "Bus._route")
def only_the_first_subscriber_hears(route, *args):
    return route(*args)[:1]


@broken("PUB-2", "Bus._route")
def a_copy_for_each_pattern(route, bus, head, key):
    return [
        client
        for client in route(bus, head, key)
        for pattern in client.patterns
        if pattern_matches(pattern, key)
    ]


@broken("PUB-3", "Bus._route")
def everybody_hears(route, bus, *key):
    return [*bus.clients.values()]


@broken("PUB-4", "Bus.handle")
def nul_ends_the_payload(handle, bus, client, packet, start):
    packet = b"\0".join(bytes(packet).split(b"\0")[:2])
    return handle(bus, client, packet, start)


@broken("PUB-5", "Bus.handle")
def the_publisher_always_hears(handle, bus, client, packet, start):
    result = handle(bus, client, packet, start)
    if start.startswith(b"MSG ") and client not in bus.touched and client.echo:
        bus.touched.append(client)
        client.outbox.append(packet)
    return result


@broken("PUB-6", "Server.deliver")
def newest_message_first(deliver, server, client, publisher):
    client.outbox.reverse()
    deliver(server, client, publisher)


@broken("CTL-1", "Bus.handle")
def control_packets_are_forwarded(handle, bus, client, packet, start):
    if start.startswith(b"CMSG ") and b"!" not in start:
        handle(bus, client, packet, start[1:] + b"\0")  # as if it were a MSG
    return handle(bus, client, packet, start)


@broken("CTL-2", "Bus.control")
def unknown_control_packet_disconnects(control, bus, client, key):
    if key not in (*CHOICES, b"stats", WHOAMI):
        raise OSError("unknown control packet")
    control(bus, client, key)


@broken("CTL-2", "Bus.control")
def beginning_of_a_control_key_is_enough(control, bus, client, key):
    known = (one for one in CHOICES if key.startswith(one))
    control(bus, client, next(known, key))


@broken("CTL-2", "Bus.control")
def beginning_of_a_question_is_enough(control, bus, client, key):
    known = (one for one in (b"stats", WHOAMI) if key.startswith(one))
    control(bus, client, next(known, key))


@broken("CTL-3", "Bus._answer")
def answers_need_a_subscription(answer, bus, client, key, payload):
    if key in client.patterns:
        answer(bus, client, key, payload)


@broken("CTL-4", "parse_packet")
def payload_is_part_of_a_control_key(parse, packet, *most):
    if packet.startswith(b"CMSG "):
        packet = packet.replace(b"\0", b"")
    return parse(packet, *most)


@broken("CTL-5", "Bus.control")
def stats_are_not_known(control, bus, client, key):
    if key != b"stats":
        control(bus, client, key)


@broken("CTL-5", "Client.counts")
def clients_are_told_of_their_user(counts, client):
    every = [counts(one) for one in client.user.clients]
    return {name: sum(one[name] for one in every) for name in every[0]}


@broken("CTL-5", "User.stats")
def what_a_user_has_published_is_delivered(stats, user):
    counts = stats(user)
    return {**counts, "delivered": counts["published"]}


@broken("CTL-5", "Bus.stats")
def everybody_is_told_of_all_users(stats, bus, client):
    client, client.user = copy.copy(client), copy.copy(client.user)
    client.user.is_privileged = True
    return stats(bus, client)


# 4. Secret messages


@broken("CRED-1", "Bus.open")
def all_clients_are_the_server_itself(let_in, bus, own, wire):
    return let_in(bus, own._replace(pid=os.getpid()), wire)


@broken("CRED-2", "Bus._answer")
def uid_comes_first(answer, bus, client, key, payload):
    if key == WHOAMI:
        *start, gid, uid, pid = payload.split(b"/")
        payload = b"/".join([*start, uid, gid, pid])
    answer(bus, client, key, payload)


@broken("CRED-3", "Bus._answer")
def answers_overtake_messages(answer, bus, client, key, payload):
    answer(bus, client, key, payload)
    client.outbox.insert(0, client.outbox.pop())


@broken("CRED-4", "check_secret")
def secrets_of_others_may_be_subscribed_to(check, *args):
    with ignored("CRED-4"):
        check(*args)


@broken("CRED-5", "Bus.subscribe")
def secret_pattern_that_is_cut_short_is_not_expected(subscribe, *args):
    with ignored("CRED-5"):
        subscribe(*args)


@broken("CRED-6", "resolve")
def empty_field_is_text(resolve, pattern, own, prefix):
    return [pattern]


@broken("CRED-7", "resolve")
def empty_field_of_a_key_matches_nothing(resolve, *args):
    return [one for one in resolve(*args) if b"//" not in one]


@broken("CRED-7", "fields_fit")
def leading_zeros_are_nothing(fit, text, own, prefix):
    return fit(re.sub(rb"/0+", b"/", text), own, prefix)


@broken("CRED-8", "check_secret")
def nobody_has_secrets(check, *args):
    with ignored("CRED-8"):
        check(*args)


@broken("CRED-9", "match_fields")
def prefix_is_not_expected(match, text, prefix):
    return match(text, b"")


@broken("CRED-10", "Bus._route")
def wide_patterns_hear_secrets(route, bus, head, key):
    wide = [one for one in bus.clients.values() if b"" in one.patterns]
    return [*dict.fromkeys([*route(bus, head, key), *wide])]


@broken("CRED-11", "Bus._route")
def secrets_are_for_all_who_have_secrets(route, bus, head, key):
    if not key.startswith(SECRET):
        return route(bus, head, key)
    return [
        client
        for client in bus.clients.values()
        if any(one.startswith(SECRET) for one in client.patterns)
    ]


# 5. Flood control


def queue(refuse: Mistake, flood: Any, *args: Any) -> None:
    """Have a packet queued, however much waits."""
    flood.accounts.excess = lambda *_, **__: None
    try:
        refuse(flood, *args)
    finally:
        del flood.accounts.excess


def queue_instead(rule: str, refuse: Mistake, *args: Any) -> None:
    """Have a packet queued where a rule asks for a client's end."""
    with ignored(rule):
        refuse(*args)
        return
    queue(refuse, *args)


@broken("BLOCK-1", "Bus.open")
def soft_mode_is_discard_at_first(let_in, bus, own, wire):
    client = let_in(bus, own, wire)
    bus.control(client, b"blocking/soft/discard")
    return client


@broken("BLOCK-2", "Bus.control")
def first_mode_counts(control, bus, client, key):
    if client.soft_mode == "queue" or b"blocking" not in key:
        control(bus, client, key)


@broken("BLOCK-3", "Server.deliver")
def stack_without_a_backlog(deliver, server, client, publisher):
    if client.backlog.order == "stack":
        client.outbox.reverse()
    deliver(server, client, publisher)


@broken("BLOCK-4", "FloodControl.refuse")
def queue_discards(refuse, flood, receiver, packet, publisher):
    if receiver.soft_mode != "queue" or packet[:4] != b"MSG ":
        refuse(flood, receiver, packet, publisher)


confuse("discard-queues", "BLOCK-5", b"soft/discard", b"soft/queue")


@broken("BLOCK-6", "Server.deliver")
def discard_gives_up(deliver, server, client, publisher):
    if client.discarded:
        answers = [one for one in client.outbox if one[:4] == b"CMSG"]
        client.outbox[:] = answers
    deliver(server, client, publisher)


confuse("soft-block-does-not-pause", "BLOCK-7", b"soft/block", b"soft/queue")
confuse("soft-error-discards", "BLOCK-8", b"soft/error", b"soft/discard")


@broken("BLOCK-9", "FloodControl.refuse")
def hard_discard_queues(refuse, flood, receiver, *args):
    if receiver.hard_mode == "discard":
        return queue(refuse, flood, receiver, *args)
    refuse(flood, receiver, *args)


@broken("BLOCK-9", "FloodControl.refuse")
def first_packet_of_a_backlog_has_no_limit(refuse, flood, receiver, *args):
    if receiver.hard_mode == "discard" and not receiver.backlog:
        return queue(refuse, flood, receiver, *args)
    refuse(flood, receiver, *args)


@broken("BLOCK-10", "FloodControl.release")
def paused_until_all_is_read(release, flood, receiver):
    return [] if receiver.backlog else release(flood, receiver)


confuse("hard-error-discards", "BLOCK-11", b"hard/error", b"hard/discard")


@broken("BLOCK-12", "Server.turn")
def pause_is_for_all(turn, server, client):
    if not any(one.held_by for one in server.bus.clients.values()):
        turn(server, client)


@broken("BLOCK-21", "FloodControl.refuse")
def every_publisher_adds_to_a_backlog(refuse, *args):
    queue_instead("BLOCK-21", refuse, *args)


@broken("BLOCK-21", "Accounts.excess")
def backlog_of_the_user_is_not_looked_at(
    excess, accounts, client, *args, is_far=False
):
    if is_far:
        client, client.user = copy.copy(client), copy.copy(client.user)
        client.user.used = [0] * 4
    return excess(accounts, client, *args, is_far=is_far)


@broken("BLOCK-13", "FloodControl.may_pause")
def anybody_may_pause(may_pause, flood, publisher, receiver):
    return not publisher.closed


@broken("BLOCK-14", "FloodControl.refuse")
def soft_block_discards_where_it_may_not_pause(
    refuse, flood, receiver, packet, publisher
):
    is_soft = receiver.soft_mode == "block"
    if is_soft and not flood.may_pause(publisher, receiver):
        return flood.discard(receiver, [packet], "soft/discard")
    refuse(flood, receiver, packet, publisher)


@broken("BLOCK-15", "FloodControl.refuse")
def hard_block_queues_where_it_may_not_pause(refuse, *args):
    queue_instead("BLOCK-15", refuse, *args)


allow("holders-hold-for-ever", "BLOCK-16", "block_timeout")


@broken("BLOCK-17", "FloodControl.refuse")
def answers_are_discarded(refuse, flood, receiver, packet, publisher):
    if packet[:4] == b"CMSG":
        return flood.discard(receiver, [packet], "soft/discard")
    refuse(flood, receiver, packet, publisher)


@broken("BLOCK-18", "FloodControl.refuse")
def answers_have_no_limit(refuse, *args):
    queue_instead("BLOCK-18", refuse, *args)


@broken("BLOCK-18", "FloodControl.refuse")
def answers_have_no_limit_but_ones_own(refuse, flood, receiver, packet, *args):
    size = receiver.used[BACKLOG_BYTES] + len(packet) + 128
    if packet[:4] == b"CMSG" and size <= flood.bus.limits.max_backlog:
        return queue(refuse, flood, receiver, packet, *args)
    refuse(flood, receiver, packet, *args)


@broken("BLOCK-19", "PACKET_OVERHEAD_BYTES")
def packets_without_overhead(size):
    return 0


@broken("BLOCK-20", "FloodControl.discard")
def discarded_packets_are_not_counted(discard, *args):
    pass


confuse("queue-is-stack", "ORDER-1", b"order/queue", b"order/stack")
confuse("stack-is-queue", "ORDER-2", b"order/stack", b"order/queue")


@broken("ORDER-3", "Backlog.first")
def smallest_first(first, backlog):
    if backlog.order == "random":
        for packet in sorted(backlog.clear(), key=len):
            backlog.push(packet)
        backlog.order = "queue"
    return first(backlog)


@broken("ORDER-4", "Backlog.reorder")
def ties_are_always_oldest_first(reorder, backlog, order):
    reorder(backlog, order)
    backlog.direction = 1


@broken("ORDER-4", "Backlog.reorder")
def ties_stay_newest_first(reorder, backlog, order):
    before = backlog.direction
    reorder(backlog, order)
    backlog.direction = min(before, backlog.direction)


@broken("ORDER-5", "Backlog.reorder")
def new_order_for_new_packets_only(reorder, backlog, order):
    if not backlog:
        reorder(backlog, order)


# 6. Echoes


@broken("ECHO-1", "Bus.open")
def no_echo_at_first(let_in, bus, own, wire):
    client = let_in(bus, own, wire)
    bus.control(client, b"echo/off")
    return client


@broken("ECHO-2", "without_echo")
def echo_is_counted_as_discarded(without_echo, receivers, publisher):
    publisher.discarded += publisher in receivers
    return without_echo(receivers, publisher)


confuse("echo-off-is-ignored", "ECHO-2", b"echo/off", b"echo/on")
confuse("echo-stays-off", "ECHO-3", b"echo/on", b"echo/off")


# 7. Connections


@broken("CONN-2", "Server._admit")
def everybody_may_connect(admit, server, wire):
    server.allowed_uids = None
    admit(server, wire)


@broken("CONN-2", "Server._admit")
def last_user_who_is_named_counts(admit, server, wire):
    if server.allowed_uids:
        own = server.bus.owner_uid
        server.allowed_uids = {own, max(server.allowed_uids)}
    admit(server, wire)


@broken("CONN-2", "Server._admit")
def numbers_of_users_have_16_bits(admit, server, wire):
    if server.allowed_uids:
        server.allowed_uids = {uid & 0xFFFF for uid in server.allowed_uids}
    admit(server, wire)


@broken("CONN-6", "Server._receive")
def last_words_are_lost(receive, server, client):
    try:
        return receive(server, client)
    except ConnectionResetError:
        return True


@broken("CONN-8", "Server.deliver")
def deaf_client_is_disconnected(deliver, server, client, publisher):
    deliver(server, client, publisher)
    if client.deaf:
        server.disconnect(client, "receives no more")


@broken("CONN-8", "FloodControl.discard")
def packets_for_the_deaf_are_not_counted(discard, flood, *args):
    if args[-1] != "deaf":
        discard(flood, *args)


@broken("CONN-10", "Server._receive")
def end_of_input_loses_the_outbox(receive, server, client):
    ended = receive(server, client)
    if ended:
        server.bus.touched.clear()
    return ended


@broken("CONN-18", "FloodControl.refuse")
def who_is_expelled_holds_on(refuse, flood, receiver, packet, publisher):
    if receiver.fault and receiver.soft_mode == "block":
        return flood._pause(publisher, receiver, 0, "BLOCK-7")
    refuse(flood, receiver, packet, publisher)


@broken("CONN-18", "Server.expel")
def reader_that_failed_is_cut_off(expel, server, client, error):
    server.disconnect(client, error)


@broken("CONN-11", "Server._receive")
def mistake_loses_what_was_before(receive, server, client):
    try:
        return receive(server, client)
    except Exception:
        server.bus.touched.clear()
        raise


@broken("CONN-12", "Server.expel")
def mistake_stops_the_server(expel, server, client, error, ignored=False):
    if ignored:
        raise error
    expel(server, client, error)
