"""What an observer of a server's process sees when its clients work."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from pathlib import Path

from .check_process import grant_few
from .conversation import END, WHOAMI, Failure, describe
from .trial import Trial, check, hear, require, tell
from .wire import FILLER_BYTES, Wire

OVERHEAD_BYTES = 128  # [LIMIT-22] of each packet of a backlog
CROWD = 300  # clients
TURN_PACKETS = 200  # of a client, more than a turn has
GROWTH_BYTES_MAX = 2 << 20  # of a server that forgets them
REST_SECONDS = 0.2
UNREAD_BYTES_MAX = 416 << 10  # [LIMIT-21] before the kernel takes no more
UNREAD_PACKET_BYTES = 60_000
SOFT_DISCARD = b"CMSG blocking/soft/discard"
SOFT_BLOCK = b"CMSG blocking/soft/block"


@check("PUB-1", is_plain=True)
def crowd_of_clients(trial: Trial) -> None:
    trial.start()
    trial.say(f"{CROWD} clients hear two messages; one stays for a third")
    crowd = [trial.client("k") for _ in range(CROWD)]
    publisher = trial.client()
    tell(publisher, b"MSG k\0001", b"MSG k\0002")
    for client in crowd:
        hear(client, b"MSG k\0001", b"MSG k\0002")
    for client in crowd[:-1]:
        client.close()
    publisher.send(b"MSG k\0003")
    hear(crowd[-1], b"MSG k\0003")


@check("CONN-5", is_plain=True)
def turns_end(trial: Trial) -> None:
    trial.start()
    senders = {b"MSG k\0%d" % number: trial.client() for number in range(6)}
    listener = trial.client("k")
    for client in (*senders.values(), listener):
        client.settle()  # so the last turn before the stop is the listener's
    trial.say(f"while the server is stopped, six send {TURN_PACKETS} each")
    trial.server.freeze()
    for packet, client in senders.items():
        for _ in range(TURN_PACKETS):
            client.send(packet)
    trial.server.thaw()
    heard = [listener.receive() for _ in range(len(senders) * TURN_PACKETS)]
    require({*heard} == {*senders}, f"received {describe(max(heard))}")
    # A turn may come last in a round, and the next one first; in the end
    # there are no others
    runs = [len([*run]) for _, run in itertools.groupby(heard)]
    most = max(runs[:-1])
    require(most <= 2 * 64, f"{most} of one client come before another's")


@check("LIMIT-21", is_plain=True)
def kernel_keeps_no_more_for_a_client(trial: Trial) -> None:
    trial.start()
    reader, publisher = trial.client("k"), trial.client()
    tell(reader, SOFT_DISCARD)
    most = UNREAD_BYTES_MAX // UNREAD_PACKET_BYTES + 1
    trial.say(f"{2 * most} large packets come for a client that does not read")
    packet = b"MSG k\0".ljust(UNREAD_PACKET_BYTES, b".")
    tell(publisher, *[packet] * 2 * most)
    reader.settle()
    trial.say("it has read all that the kernel took, and one more comes")
    tell(publisher, b"MSG k\0last")
    taken = list(iter(reader.receive, b"MSG k\0last"))
    require({*taken} == {packet}, f"received {len(taken)} packets")
    require(len(taken) <= most, f"the kernel took {len(taken)} of them")


@check("CONN-7", is_plain=True)
def passed_descriptor_is_closed(trial: Trial) -> None:
    trial.start()
    client = trial.client("k")
    output, end = trial.pipe()
    trial.say("a client passes the only writing end of a pipe")
    try:
        socket.send_fds(client.wire, [b"MSG fd\0"], [end.fileno()])
    except PermissionError:  # SO_PASSRIGHTS is off
        return
    except OSError as error:
        raise Failure(f"cannot pass one: {error.strerror}") from None
    end.close()
    client.settle()
    ready = select.select([output], [], [], trial.server.seconds_max)
    require(ready[0], "the server has kept it open")


def pause(trial: Trial, publisher: Wire, key: str, packet: bytes) -> Wire:
    """Have a packet pause a publisher; return a witness of its next one."""
    listener, witness = trial.client(key), trial.client("w")
    publisher.send(packet)
    hear(listener, packet)
    listener.settle()
    publisher.send(b"MSG w\0")
    require_paused(witness)
    return witness


def require_paused(witness: Wire) -> None:
    """Raise Failure if a witness hears from a paused publisher."""
    for _ in range(5):
        require(witness.pending() is None, "a publisher goes on too early")


@check("CRED-3", "PUB-6", "BLOCK-4", fills=True, is_plain=True)
def nothing_overtakes_a_backlog(trial: Trial) -> None:
    later = b"MSG k\0002", b"MSG k\0003"
    for mode, packets in (
        (b"queue", (WHOAMI,)),
        (b"queue", later),
        (b"discard", later),
    ):
        trial.start()
        reader, publisher = trial.stall(b"MSG k\0001")
        tell(reader, b"CMSG blocking/soft/" + mode)
        trial.say("while the server is stopped, room is made and more is sent")
        trial.server.freeze()
        reader.read_fillers(2)
        for packet in packets:
            (reader if packet == WHOAMI else publisher).send(packet)
        trial.server.thaw()
        reader.settle()  # by its helper: it does not read
        publisher.settle()
        got = reader.receive()
        require(got == b"MSG k\0001", f"received {describe(got)}", "PUB-6")
        for packet in packets if mode == b"queue" else ():
            got = reader.receive()
            rule = "CRED-3" if packet == WHOAMI else "PUB-6"
            require(got.startswith(packet), f"received {describe(got)}", rule)


@check("BLOCK-16", fills=True)
def holder_that_reads_now_and_then(trial: Trial) -> None:
    trial.start("--block-timeout", "3")
    packet = b"MSG k\0".ljust(FILLER_BYTES, b".")
    count = 4 * trial.server.room
    reader, publisher = trial.stall(*[packet] * count)
    tell(reader, SOFT_BLOCK)
    pause(trial, publisher, "k", b"MSG k\0last")
    for _ in range(2):
        time.sleep(1.8)
        trial.say("after more than half of the time it reads something")
        reader.read_fillers()
        hear(reader, packet)
    hear(reader, *[packet] * (count - 2), b"MSG k\0last")


@check("BLOCK-16", fills=True)
def holder_that_reads_what_the_kernel_kept(trial: Trial) -> None:
    trial.start("--block-timeout", "2")
    reader, publisher = trial.stall(modes=(b"blocking/soft/block",))
    trial.say("room for one packet is made, and taken by a large one")
    reader.read_fillers(1)
    large = b"MSG k\0" + bytes(400_000)
    tell(publisher, large)
    witness = pause(trial, publisher, "k", b"MSG k\0last")
    for _ in range(2):
        time.sleep(1.2)
        trial.say("after more than half of the time it reads a small one")
        reader.read_fillers(1)
    require_paused(witness)
    hear(reader, large)
    hear(witness, b"MSG w\0")
    hear(reader, b"MSG k\0last")


@check("BLOCK-16", fills=True)
def holder_that_made_room_unseen(trial: Trial) -> None:
    trial.start("--block-timeout", "0.5")
    reader, publisher = trial.stall(modes=(b"blocking/soft/block",))
    witness = pause(trial, publisher, "k", b"MSG k\0")
    trial.say("the reader makes so little room that no event tells of it")
    reader.read_fillers(2)
    hear(witness, b"MSG w\0")
    hear(reader, b"MSG k\0")


@check("CONN-10", fills=True, is_plain=True)
def departure_with_a_backlog(trial: Trial) -> None:
    trial.start()
    packets = [b"MSG k\0001", b"MSG k\0002", b"MSG k\0003"]
    reader, _ = trial.stall(*packets)
    # With so little room the kernel takes packets, and reports no room
    trial.say("while the server is stopped, it makes some room, and leaves")
    trial.server.freeze()
    reader.read_fillers(2)
    reader.shut()
    trial.server.thaw()
    reader.await_end()
    hear(reader, *packets, END)


def descriptors_and_bytes(trial: Trial) -> tuple[int, int]:
    """Return what the server has open, and how much memory it uses."""
    processes = [Path(f"/proc/{number}") for number in trial.server.processes]
    count = sum(len(os.listdir(process / "fd")) for process in processes)
    pages = ((path / "statm").read_text().split()[1] for path in processes)
    return count, sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def require_rest(trial: Trial, otherwise: str) -> None:
    """Raise Failure if the server is busy while every client waits."""
    before = trial.server.busy_seconds()
    end = time.process_time() + REST_SECONDS
    while time.process_time() < end:
        pass  # a busy server would get as much of the processor as we do
    busy = trial.server.busy_seconds() - before
    require(busy < REST_SECONDS / 2, f"it is busy though {otherwise}")


@check("CONN-21", is_plain=True)
def rest_after_departures(trial: Trial) -> None:
    trial.start()  # which has clients come and leave
    trial.client()
    require_rest(trial, "clients have left, and one waits")


@check("CONN-21", fills=True)
def clients_that_wait(trial: Trial) -> None:
    trial.start()
    _, publisher = trial.stall(modes=(b"blocking/soft/block",))
    pause(trial, publisher, "k", b"MSG k\0")
    require_rest(trial, "a publisher is paused")
    publisher.close()
    require_rest(trial, "a paused publisher has hung up")
    trial.start(preexec_fn=grant_few)
    trial.say("more clients come than it has descriptors for")
    for _ in range(100):
        trial.client()
    require_rest(trial, "it has no descriptors for more clients")
