"""Servers that break a rule under load, as in broken_processes.py."""

# mypy: allow-untyped-defs
# A mistake has no types, as those in broken_servers.py.

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

from broken_servers import Broken, collect
from sbus import BACKLOG_BYTES, SO_PASSRIGHTS, ProtocolError

BROKEN: list[Broken] = []
broken = collect(BROKEN)


HOARD: list[object] = []  # what is never used again
COUNT: list[int] = []


@broken("crowd-of-clients", "Bus._route")
def first_256_subscribers_hear(route, *args):
    return route(*args)[:256]


@broken("many-packets", "Bus.handle")
def packet_20001_is_lost(handle, *args):
    COUNT.append(1)
    return handle(*args) if len(COUNT) != 20_001 else False


@broken("clients-come-and-leave", "Server.disconnect")
def a_bit_of_each_client_is_kept(disconnect, server, client, cause):
    HOARD.append(bytes(300))
    disconnect(server, client, cause)


@broken("patterns-come-and-go", "Bus.unsubscribe")
def patterns_are_kept(unsubscribe, bus, client, pattern):
    HOARD.append(bytes(bytearray(pattern)))
    unsubscribe(bus, client, pattern)


@broken("messages-are-read", "Bus.handle")
def messages_are_kept(handle, bus, client, packet, start):
    HOARD.append(packet)
    return handle(bus, client, packet, start)


@broken("messages-are-traced", "Journal._write")
def lines_of_the_trace_are_kept(write, journal, *args):
    write(journal, *args)
    HOARD.append(journal._lines[-1] + "")


@broken("packets-wait-for-a-reader", "Backlog.clear")
def packets_for_those_who_left_are_kept(clear, backlog):
    HOARD.append(clear(backlog))
    return HOARD[-1]


@broken("questions-are-answered", "Bus.handle")
def questions_are_kept(handle, bus, client, packet, start):
    if bytes(packet[:4]) == b"CMSG":
        HOARD.append(bytes(100))
    return handle(bus, client, packet, start)


@broken("clients-make-mistakes", "Server._blame")
def mistakes_are_kept(blame, *args):
    HOARD.append(bytes(4_000))
    return blame(*args)


@broken("clients-come-and-leave", "Server.disconnect")
def descriptors_are_kept(disconnect, server, client, cause):
    COUNT.append(1)
    if len(COUNT) % 100 == 0:  # more would soon leave it none for clients
        HOARD.append(client.wire.dup())
    disconnect(server, client, cause)


@broken("clients-leave-with-packets-unread", "Server._receive")
def descriptors_are_kept_after_a_reset(receive, server, client):
    try:
        return receive(server, client)
    except ConnectionResetError:
        HOARD.append(client.wire.dup())
        raise


class Hoarder(socket.socket):
    """A socket that receives descriptors, and keeps them."""

    def setsockopt(self, level, option, *value):
        if option != SO_PASSRIGHTS:
            super().setsockopt(level, option, *value)

    def recv_into(self, buffer, size=0, flags=0):
        return self.recvmsg_into([buffer], 100)[0]


@broken("passed-descriptor-is-closed", "Server._admit")
def descriptors_are_received(admit, server, wire):
    with contextlib.suppress(OSError):  # the kernel is too old to refuse any
        wire.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
    admit(server, Hoarder(fileno=wire.detach()))


@broken("descriptors-are-passed", "Server._admit")
def each_descriptor_is_received(admit, server, wire):
    descriptors_are_received(admit, server, wire)


@broken("passed-descriptor-is-closed", "Bus.subscribe")
def who_subscribes_is_disconnected(subscribe, *args):
    raise ProtocolError("SUB-1", "subscribes")


@broken("turns-end", "Server._receive")
def a_turn_has_no_end(receive, server, client):
    return any(receive(server, client) for _ in range(99))


@broken("turns-end", "Server._receive")
def one_client_has_turns_without_end(receive, server, client):
    is_last_but_one = client.number == max(server.bus.clients) - 1
    turns = 99 if is_last_but_one else 1
    return any(receive(server, client) for _ in range(turns))


@broken("turns-end", "Server.turn")
def one_client_waits_for_all_others(turn, server, client):
    is_last_but_one = client.number == max(server.bus.clients) - 1
    every = [one.wire for one in server.bus.clients.values()]
    others = [wire for wire in every if wire is not client.wire]
    if not (is_last_but_one and select.select(others, [], [], 0)[0]):
        turn(server, client)


@broken("few-descriptors", "Server._set_alarm")
def full_listener_is_tried_without_end(set_alarm, server, call, *args):
    if call == server._listen:
        args = (*args[:-1], 0.0)
    set_alarm(server, call, *args)


@broken("few-descriptors", "Server.accept")
def full_listener_stops_the_server(accept, server):
    server._set_alarm = lambda *_: server.stop()
    accept(server)


@broken("few-descriptors", "Server.accept")
def full_listener_is_never_tried_again(accept, server):
    server._set_alarm = lambda *_: None
    accept(server)


@broken("publisher-goes-on-at-half", "FloodControl.release")
def paused_until_all_is_read(release, flood, receiver):
    return [] if receiver.backlog else release(flood, receiver)


@broken("exactly-half-is-enough", "FloodControl._pause")
def exactly_half_is_not_enough(pause, flood, publisher, receiver, level, rule):
    pause(flood, publisher, receiver, max(0, level - 1), rule)


@broken("a-bit-more-than-half-is-too-much", "FloodControl._pause")
def half_with_the_packet_itself_will_do(pause, flood, *args):
    publisher, receiver, level, rule = args
    pause(flood, publisher, receiver, level and level + 2_064, rule)


@broken("half-of-the-limit-counts", "FloodControl._pause")
def half_of_what_is_above_the_limit_will_do(pause, flood, *args):
    publisher, receiver, level, rule = args
    level = level and receiver.used[BACKLOG_BYTES] // 2
    pause(flood, publisher, receiver, level, rule)


@broken("soft-block-waits-for-all", "FloodControl._pause")
def soft_block_ends_at_half(pause, flood, publisher, receiver, level, rule):
    if rule == "BLOCK-10":
        level = receiver.used[BACKLOG_BYTES] // 2
    pause(flood, publisher, receiver, level, rule)


@broken("rest-while-one-is-paused", "Server.round")
def paused_clients_are_looked_at_without_end(go_round, server, *seconds_max):
    is_held = any(one.held_by for one in server.bus.clients.values())
    go_round(server, *([0] if is_held else seconds_max))


def hurry(client: Any, kind: bytes) -> None:
    """Offer a kind of packet before those that wait."""
    if client.backlog and bytes(client.outbox[0]).startswith(kind):
        with contextlib.suppress(BlockingIOError):
            client.wire.send(client.outbox[0])
            del client.outbox[0]


@broken("answer-does-not-overtake", "Server.deliver")
def answers_overtake_a_backlog(deliver, server, client, publisher):
    hurry(client, b"CMSG ")
    deliver(server, client, publisher)


@broken("message-does-not-overtake", "Server.deliver")
def messages_overtake_a_backlog(deliver, server, client, publisher):
    hurry(client, b"MSG k")
    deliver(server, client, publisher)


@broken("holder-that-reads-now-and-then", "Server._after_progress")
def holding_begins_once(after_progress, server, client):
    pass


@broken("holder-that-made-room-unseen", "Server._check_holder")
def room_unseen_stays_unused(check_holder, server, client):
    server._serve = lambda *_: None
    check_holder(server, client)
    del server._serve


@broken("departure-with-a-backlog", "Server._depart")
def who_leaves_is_handed_nothing(depart, server, client):
    server.disconnect(client, "end of input")
