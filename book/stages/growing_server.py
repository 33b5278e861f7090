# The servers of the six stages in one file.  A mark says in which stages the
# lines below it are: from that stage on, or only up to another one.  Stage 0
# is what a student begins with.  To write the server of stage 3:
#
#     python3 book/cut_stage.py 3 >server.py
#
# -- stage 0
"""A server of a message bus: python3 server.py -f -a ADDRESS"""

import argparse

# -- stage 4
import collections

# -- stage 2
import contextlib

# -- stage 0
import pathlib

# -- stage 5
import re

# -- stage 1
import select

# -- stage 0
import socket

# -- stage 4
import struct

# -- stage 0
PACKET_BYTES_MAX = 409_600  # that one recv takes
# -- stage 6
PACKET_COST_BYTES = 128  # of a packet that waits, beside its own bytes
# -- stage 5
RUN = re.compile(rb"(?<=/)!/cred/[0-9]*/[0-9]*/[0-9]*/")
# -- stage 0
options = argparse.Namespace()  # what the command line says
# -- stage 1
clients = []  # all that are connected


class Client:
    """What the server knows of a client."""

    def __init__(self, wire):
        self.wire = wire  # the socket
        # -- stage 2 to 3
        self.patterns = set()  # what it has subscribed to
        # -- stage 4
        self.patterns = collections.Counter()  # each, and how often
        self.wants_echo = True
        packed = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = struct.unpack("iII", packed)
        self.credentials = [b"%d" % number for number in (gid, uid, pid)]
        # -- stage 6
        wire.setblocking(False)  # the server waits for no single client
        self.backlog = collections.deque()  # packets that wait for it
        self.backlog_bytes = 0
        self.paused = set()  # publishers that are not read because of it
        # -- stage 1

    def fileno(self):
        """Return the number by which select knows the socket."""
        return self.wire.fileno()


# -- stage 0 to 0
def serve(listener):
    """Serve the first client until it leaves."""
    wire, _ = listener.accept()
    while wire.recv(PACKET_BYTES_MAX):
        pass


# -- stage 1
def serve(listener):
    """Serve each client when it connects, sends or leaves."""
    while True:
        # -- stage 1 to 5
        ready, _, _ = select.select([listener, *clients], [], [])
        # -- stage 6
        paused = set().union(*(client.paused for client in clients))
        readable = [client for client in clients if client not in paused]
        stalled = [client for client in clients if client.backlog]
        ready, roomy, _ = select.select([listener, *readable], stalled, [])
        for client in roomy:
            drain(client)
        # -- stage 1
        for source in ready:
            if source is listener:
                wire, _ = listener.accept()
                clients.append(Client(wire))
            elif source in clients:  # it may have been closed meanwhile
                read(source)


def read(client):
    """Read a packet of a client, or learn that it has left."""
    # -- stage 1 to 1
    packet = client.wire.recv(PACKET_BYTES_MAX)
    # -- stage 2
    try:
        packet = client.wire.recv(PACKET_BYTES_MAX)
    except ConnectionResetError:
        return  # it left packets unread; what it sent comes next
    # -- stage 1
    if packet:
        handle(client, packet)
    else:
        close(client)


def close(client):
    """Forget a client."""
    clients.remove(client)
    client.wire.close()


def handle(client, packet):
    """Do what a packet asks for."""
    # -- stage 2
    head, nul, _ = packet.partition(b"\0")
    kind, space, key = head.partition(b" ")
    # -- stage 4
    if not space or not is_valid(client, kind, key, nul):
        close(client)
        return

    # -- stage 2
    if kind == b"SUB":
        # -- stage 2 to 3
        client.patterns.add(key)
        # -- stage 4
        client.patterns[key] += 1
    elif kind == b"UNSUB":
        client.patterns -= collections.Counter([key])  # never below zero
    elif kind == b"CMSG":
        control(client, key)
    # -- stage 2
    elif kind == b"MSG":
        publish(client, key, packet)
    # -- stage 1


# -- stage 4
def is_valid(client, kind, key, nul):
    """Return whether a client may send such a packet."""
    # -- stage 5
    if kind != b"CMSG" and not is_permitted(client, kind, key):
        return False
    # -- stage 4
    return kind in (b"SUB", b"UNSUB", b"CMSG") or (kind == b"MSG" and nul)


def control(client, key):
    """Do what a control packet asks for, if its key is known."""
    if key == b"!/cred/whoami":
        owner = b"/".join(client.credentials)
        send(client, b"CMSG !/cred/whoami\0!/cred/" + owner)
    elif key in (b"echo/on", b"echo/off"):
        client.wants_echo = key == b"echo/on"


# -- stage 2
def publish(publisher, key, packet):
    """Send a message as it is to every client that hears its key."""
    for client in list(clients):
        # -- stage 4
        if client is publisher and not client.wants_echo:
            continue
        # -- stage 2
        if hears(client, key):
            # -- stage 2 to 5
            send(client, packet)
            # -- stage 6
            send(client, packet, publisher)
            # -- stage 2


def hears(client, key):
    """Return whether a client is to have the messages with a key."""
    # -- stage 2 to 2
    return key in client.patterns
    # -- stage 5
    if is_secret(key):
        return hears_secret(client, key)
    # -- stage 3
    return any(matches(pattern, key) for pattern in client.patterns)
    # -- stage 2


# -- stage 3
def matches(pattern, key):
    """Return whether a pattern selects a key, segment by segment."""
    wanted, given = pattern.split(b"/"), key.split(b"/")
    if not wanted[-1] and len(given) >= len(wanted):
        # It is empty or ends in a slash, so it does not matter what follows
        wanted.pop()
        given = given[: len(wanted)]
    return len(given) == len(wanted) and all(map(selects, wanted, given))


def selects(wanted, segment):
    """Return whether a segment of a pattern selects one of a key."""
    start, star, rest = wanted.partition(b"*")
    if not star:
        return segment == wanted
    return segment.startswith(start) and not rest.strip(b"*")


# -- stage 5
def is_secret(key):
    """Return whether a key or pattern is secret."""
    return key.startswith(b"!/cred/")


def parts_of(key):
    """Return group, user, process and the rest of a secret key."""
    return key.split(b"/", 5)[2:]


def fits(field, number):
    """Return whether a field is empty or this number."""
    return field in (b"", number)


def is_permitted(client, kind, key):
    """Return whether a client may use a key or pattern."""
    rest = RUN.sub(b"", b"/" + key) if is_secret(key) else key
    if b"!" in rest.split(b"/"):
        return False
    if kind == b"MSG" or not is_secret(key):
        return True
    return all(map(fits, parts_of(key), client.credentials))


def hears_secret(client, key):
    """Return whether a client is to have the messages with a secret key."""
    *fields, rest = parts_of(key)
    if not all(map(fits, fields, client.credentials)):
        return False
    for *wanted, pattern in map(parts_of, filter(is_secret, client.patterns)):
        if all(map(fits, wanted, fields)) and matches(pattern, rest):
            return True
    return False


# -- stage 2 to 5
def send(client, packet):
    """Send a packet to a client, unless that has gone."""
    with contextlib.suppress(OSError):
        client.wire.send(packet)


# -- stage 6
def send(client, packet, publisher=None):
    """Send a packet to a client, or add it to the client's backlog."""
    if not client.backlog and is_taken(client, packet):
        return
    client.backlog.append(packet)
    client.backlog_bytes += len(packet) + PACKET_COST_BYTES
    if client.backlog_bytes > options.max_backlog:
        if publisher and client.credentials[1] == publisher.credentials[1]:
            client.paused.add(publisher)
        else:
            close(client)


def is_taken(client, packet):
    """Return whether the kernel takes a packet for a client."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            client.wire.send(packet)
        except BlockingIOError:
            return False
    return True  # also for a client that has gone


def drain(client):
    """Send what waits for a client; let publishers go on at half."""
    while client.backlog and is_taken(client, client.backlog[0]):
        packet = client.backlog.popleft()
        client.backlog_bytes -= len(packet) + PACKET_COST_BYTES
    if client.backlog_bytes <= options.max_backlog // 2:
        client.paused.clear()


# -- stage 0
def main():
    """Listen at the address, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-a", dest="address", required=True)
    parser.add_argument("-f", action="store_true")  # it always is
    # -- stage 6
    parser.add_argument("--max-backlog", type=int, default=16_777_216)
    # -- stage 0
    parser.parse_args(namespace=options)
    path = pathlib.Path(options.address)
    if path.is_socket():
        path.unlink()  # an earlier run has left it there
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(options.address)
    listener.listen()
    serve(listener)


if __name__ == "__main__":
    main()
