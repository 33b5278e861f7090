"""What an observer of a server's process sees when its clients work."""

from __future__ import annotations

import itertools
import os
import select
import socket
from pathlib import Path

from .check_process import grant_few
from .conversation import Failure, describe
from .trial import Trial, check, hear, require, tell

OVERHEAD_BYTES = 128  # [LIMIT-22] of each packet of a backlog
CROWD = 300  # clients
TURN_PACKETS = 200  # of a client, more than a turn has
GROWTH_BYTES_MAX = 2 << 20  # of a server that forgets them
REST_SECONDS = 0.2
UNREAD_BYTES_MAX = 416 << 10  # [LIMIT-21] before the kernel takes no more
UNREAD_PACKET_BYTES = 60_000


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
    length = max(runs[:-1])
    require(length <= 2 * 64, f"{length} of one client come before another's")


@check("LIMIT-21", is_plain=True)
def kernel_keeps_no_more_for_a_client(trial: Trial) -> None:
    trial.start()
    reader, publisher = trial.client("k"), trial.client()
    tell(reader, b"CMSG blocking/soft/discard")
    room = UNREAD_BYTES_MAX // UNREAD_PACKET_BYTES + 1
    trial.say(f"{2 * room} large packets come for a client that does not read")
    packet = b"MSG k\0".ljust(UNREAD_PACKET_BYTES, b".")
    tell(publisher, *[packet] * 2 * room)
    reader.settle()
    trial.say("it has read all that the kernel took, and one more comes")
    tell(publisher, b"MSG k\0last")
    taken = list(iter(reader.receive, b"MSG k\0last"))
    require({*taken} == {packet}, f"received {len(taken)} packets")
    require(len(taken) <= room, f"the kernel took {len(taken)} of them")


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


def descriptors_and_bytes(trial: Trial) -> tuple[int, int]:
    """Return what the server has open, and how much memory it uses."""
    processes = [Path(f"/proc/{number}") for number in trial.server.processes]
    count = sum(len(os.listdir(process / "fd")) for process in processes)
    pages = ((path / "statm").read_text().split()[1] for path in processes)
    return count, sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


@check("CONN-21")
def clients_without_descriptors(trial: Trial) -> None:
    trial.start(preexec_fn=grant_few)
    trial.say("more clients come than it has descriptors for, and wait")
    for _ in range(100):
        trial.client()
    trial.server.wait(REST_SECONDS)
