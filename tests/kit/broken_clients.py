"""Clients that break one rule each, to test whether the kit finds them.

    python3 broken_clients.py NAME [ADDRESS]   run one of them

A broken client is our own with a mistake in the place of one function.  The
mistake gets that function as its first argument, before the function's own,
and so says only what is different.
"""

# mypy: allow-untyped-defs
# A mistake has no types, since what it gets is of the client's own.

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
from typing import Any, Callable, NamedTuple

import sbus_client
from client_adapter import serve
from sbus_client import AddressError, PacketTooLarge

Mistake = Callable[..., Any]


class BrokenClient(NamedTuple):
    """A mistake, the example that shows it, and where it is made."""

    name: str
    example: str
    place: str  # a function, or Client.method
    mistake: Mistake

    def spoil(self) -> None:
        """Have our client make the mistake, in this process."""
        owner, _, name = self.place.rpartition(".")
        place: Any = getattr(sbus_client, owner) if owner else sbus_client
        before = getattr(place, name)

        def call(*args: Any) -> Any:
            return self.mistake(before, *args)

        setattr(place, name, call if callable(before) else call())


BROKEN: list[BrokenClient] = []


def broken(example: str, place: str) -> Callable[[Mistake], Mistake]:
    """Have a client that makes the mistake below; the example shows it."""

    def add(mistake: Mistake) -> Mistake:
        name = mistake.__name__.replace("_", "-")
        BROKEN.append(BrokenClient(name, example, place, mistake))
        return mistake

    return add


@broken("every-kind-of-packet", "Client.unsubscribe")
def subscribes_once_more(unsubscribe, bus, pattern):
    bus.subscribe(pattern)


@broken("every-byte-is-sent-as-it-is", "Client.publish")
def sends_a_payload_up_to_nul(publish, bus, key, payload):
    publish(bus, key, payload.partition(b"\0")[0])


@broken("every-byte-is-received-as-it-is", "Client.receive")
def receives_a_payload_up_to_nul(receive, bus):
    key, payload = received = receive(bus)
    return type(received)(key, payload.partition(b"\0")[0])


@broken("server-that-does-not-read", "Client.publish")
def drops_what_cannot_be_sent_now(publish, bus, key, payload):
    with contextlib.suppress(TimeoutError):
        publish(bus, key, payload, 0)


@broken("packet-too-large-to-send", "Client.publish")
def knows_no_limit(publish, bus, key, payload):
    bus.packet_bytes_max = 1 << 20
    publish(bus, key, payload)


@broken("largest-packet-to-receive", "Client.__init__")
def has_a_small_buffer(init, bus, address):
    init(bus, address)
    bus._buffer = mmap.mmap(-1, 1 << 16)


@broken("end-of-the-connection", "Client.receive")
def takes_no_payload_for_the_end(receive, bus):
    received = receive(bus)
    if not received.payload:
        raise sbus_client.Disconnected
    return received


@broken("send-to-a-server-that-has-closed", "Client._lose")
def leaves_when_it_cannot_send(lose, bus, error):
    if isinstance(error, ConnectionError):
        bus.close()
    lose(bus, error)


@broken("messages-around-an-answer", "Client.whoami")
def drops_what_is_no_answer(whoami, bus):
    bus.control(sbus_client.WHOAMI)
    while (received := bus.receive()).key != sbus_client.WHOAMI:
        pass
    return sbus_client.credentials_of(received)


@broken("longest-path", "socket_name")
def refuses_long_paths(socket_name, address):
    if len(address) > 100:
        raise AddressError("too long")
    return socket_name(address)


@broken("abstract-name", "socket_name")
def leaves_abstract_names_short(socket_name, address):
    name = socket_name(address)
    return name if name[0] else name.rstrip(b"\0")


@broken("address-of-the-environment", "Client.__init__")
def does_not_know_the_variable(init, bus, address):
    is_known = "SBUS_ADDRESS" in os.environ
    init(bus, "/no/such/bus" if is_known else address)


@broken("default-address", "default_address")
def has_no_default(default_address):
    raise AddressError("give an address")


@broken("credentials-that-only-the-server-knows", "Client.whoami")
def leaves_out_the_prefix(whoami, bus):
    gid, uid, pid, _ = answer = whoami(bus)
    return answer._replace(path=b"!/cred/%d/%d/%d" % (gid, uid, pid))


@broken("reset-before-the-last-messages", "Client._read")
def takes_a_reset_for_the_end(read, bus):
    try:
        bus.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionResetError:
        bus.close()
    return read(bus)


@broken("packet-above-the-buffer", "TRUNC")
def takes_what_was_cut(trunc):
    return trunc & ~socket.MSG_TRUNC


@broken("largest-packet-to-send", "Client._write")
def does_not_raise_its_buffer(write, bus, packet):
    room = bus.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if len(packet) > room:
        raise PacketTooLarge(f"more than {room} bytes")
    write(bus, packet)


@broken("whoami-after-the-end", "Client.whoami")
def waits_for_an_answer_after_the_end(whoami, bus):
    try:
        return whoami(bus)
    except sbus_client.Disconnected:
        signal.pause()


# ---- Where the bus is


@broken("address-of-root", "default_address")
def knows_no_place_of_root(default_address):
    return default_address() if os.getuid() else "/run/user/0/sbus.socket"


@broken("address-in-a-private-directory", "default_address")
def knows_no_private_directory(default_address):
    address = default_address()
    if address.startswith("/tmp/"):
        raise AddressError("give an address")
    return address


@broken("private-directory-that-is-a-link", "checked_address")
def follows_a_link(checked_address, address):
    is_link = os.path.islink(os.path.dirname(address))
    return address if is_link else checked_address(address)


@broken("private-directory-that-is-open-to-others", "checked_address")
def uses_what_others_may_enter(checked_address, address):
    directory = os.path.dirname(address)
    is_link = os.path.islink(directory)
    return checked_address(address) if is_link else address


# ---- Requests and their answers


@broken("request-and-answer", "Client.request")
def drops_what_precedes_an_answer(request, bus, key, payload):
    answer = request(bus, key, payload)
    bus._kept.clear()
    return answer


@broken("request-and-answer", "random_part")
def uses_a_reply_key_again(random_part):
    return b"/0"


@broken("request-and-answer", "Client._write")
def does_not_subscribe_to_answers(write, bus, packet):
    if not packet.startswith(b"SUB !/cred/"):
        write(bus, packet)


@broken("request-that-fails", "Client.request")
def takes_a_failure_for_an_answer(request, bus, key, payload):
    try:
        return request(bus, key, payload)
    except sbus_client.RequestFailed as failure:
        return str(failure).encode()


@broken("answers-that-come-too-late", "Client._answer_request")
def receives_late_answers(answer_request, bus, message):
    reply_key = message.key.replace(b"/failed", b"")
    is_awaited = reply_key in bus._bus.requests
    return answer_request(bus, message) and is_awaited


@broken("answers-that-come-too-late", "Client._answer_request")
def takes_any_answer_for_its_own(answer_request, bus, message):
    if message.key.startswith(bus._bus.reply_keys):
        newest = [message.key, *bus._bus.requests][-1]
        message = message._replace(key=newest)
    return answer_request(bus, message)


@broken("request-after-the-end", "Client.request")
def requests_after_the_end(request, bus, key, payload):
    try:
        return request(bus, key, payload)
    except sbus_client.Disconnected:
        signal.pause()


@broken("reply-to-a-request", "Client.reply")
def answers_up_to_nul(reply, bus, asked, payload):
    reply(bus, asked, payload.partition(b"\0")[0])


@broken("reply-to-what-is-no-request", "owner_of")
def answers_under_any_key(owner_of, key):
    try:
        return owner_of(key)
    except sbus_client.PacketError:
        return sbus_client.Credentials(0, 0, 0, key)


@broken("reply-under-a-key-that-no-server-accepts", "checked")
def checks_no_key(checked, text, *limits):
    return text


if __name__ == "__main__":
    {client.name: client for client in BROKEN}[sys.argv[1]].spoil()
    serve(sys.stdin, *sys.argv[2:])
