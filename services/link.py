"""link: put a bus below another one, over any stream of bytes.

A link has two ends, each a client of its own bus:

    upper bus -- upper end === stream === lower end -- lower bus

The credentials of the upper end on the upper bus are the prefix P of the
lower bus [CRED-9].  So a key P/!/cred/G/U/PID/x is a secret of process
G/U/PID of the lower bus, and the upper end hears it like any secret of its
own.  The lower end subscribes to the upward pattern, and hears the secrets
that are for all other buses [CRED-13].  Public messages pass if a pattern of
both ends selects them.

The ends exchange frames: four bytes of length, the most significant first,
and as many bytes.  The first frame of an end is its greeting.  Then come
publish packets as on a bus, empty frames that show that an end lives, and BYE
after the last packet.  Any other frame is the reason why an end gives up.

Neither end trusts the other.  It publishes messages and nothing else: public
ones that its own patterns select, and secrets in their one direction.

P contains the process id of the upper end.  So that process outlives streams,
and serves one after the other.  Another P needs another lower server, and
what was said under an earlier one is void, as another process may have those
numbers by then: a lower end sends no key of an earlier prefix up.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import sbus_client
from sbus_client import SECRET, Client, Message, PacketError, SbusError

from . import shared, signals

PROBES = b"sbus/bridge/"  # as `sbus bridge` has them: each bus carries these
NOBODY = b"!/cred/0/0/0"  # the prefix before any link: no process is 0
PARENT = "SBUS_LINK"  # in a server's environment: the link's process

PATIENCE_SECONDS = 15.0  # after which a silent end counts as dead
ALIVE_SECONDS = PATIENCE_SECONDS / 3  # in which an end sends something
START_SECONDS = 0.5  # after which a server that starts is looked at again
PASS_SECONDS = 1.0  # in which a command passes on what a stream still has
PAUSES = [1.0, 2.0, 4.0, 8.0, 15.0, 30.0]  # seconds before dialling again


def command(text: str) -> list[str]:
    """Return the words of a command line.  Raises: ValueError."""
    import shlex  # which a small Python lacks

    return shlex.split(text)


COMMAND: Any = {"metavar": "CMD", "type": command}

# ==== Frames =================================================================

LENGTH = struct.Struct("!I")
GREETING_BYTES_MAX = 8_192  # the prefix of twelve levels has some 400
CHUNK_BYTES = 1 << 18
VERSION = b"sbus-link 1 "  # begins a greeting, and why an end gives up
BYE = b"BYE"
ENDED = "the stream has ended, without a goodbye"

RUN = rb"!/cred/[0-9]{1,10}/[0-9]{1,10}/[0-9]{1,10}"
# The role of an end, how many messages the last session brought it ("-" if
# there was none), the prefix, and the upper end's probe
GREETING = rb"%b(upper|lower) ([0-9]{1,18}|-) (%b(?:/%b)*) (\S*)"
GREETING = GREETING % (VERSION, RUN, RUN)


class Stream:
    """Frames over a connected socket."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        timeval = struct.pack("ll", int(PATIENCE_SECONDS), 0)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self.poll = select.poll()
        self.poll.register(wire, select.POLLIN)
        self.kept = bytearray()  # received, and not yet taken
        self.frame_bytes_max = GREETING_BYTES_MAX

    def send(self, content: bytes) -> None:
        """Send a frame, as long as the other end takes some of it.

        Raises: SbusError if it takes nothing; OSError.
        """
        try:
            self.wire.sendall(LENGTH.pack(len(content)) + content)
        except BlockingIOError:
            seconds = f"{PATIENCE_SECONDS:g} s"
            raise SbusError(
                f"the other end takes nothing for {seconds}"
            ) from None

    def receive(self) -> bytes:
        """Return the next frame.

        Raises: SbusError if the other end is silent, or sends no frames.
        """
        head = self.take(LENGTH.size)
        (size,) = LENGTH.unpack(head)
        if size > self.frame_bytes_max:
            raise refusal(head + self.kept[:80])
        return self.take(size)

    def take(self, size: int) -> bytes:
        """Return so many of the bytes that come."""
        while len(self.kept) < size:
            if not self.poll.poll(1000 * PATIENCE_SECONDS):
                seconds = f"{PATIENCE_SECONDS:g} s"
                reason = "it hangs, or serves another lower end"
                text = f"the other end says nothing for {seconds}: {reason}"
                raise SbusError(text)
            chunk = self.wire.recv(CHUNK_BYTES)
            if not chunk:
                raise SbusError(ENDED)
            self.kept += chunk
        taken = bytes(self.kept[:size])
        del self.kept[:size]
        return taken

    def give_up(self, reason: object) -> None:
        """Tell the other end why this one gives up, if that can be sent."""
        self.wire.settimeout(PASS_SECONDS)
        with contextlib.suppress(OSError):
            self.send(VERSION + str(reason).encode())


def refusal(frame: bytes) -> SbusError:
    """Return the error for a frame that is not what should have come."""
    text = sbus_client.printable(frame[:400])
    if frame.startswith(VERSION):
        return SbusError(f"the other end says: {text[len(VERSION) :]}")
    problem = "the other end is no sbus link of this version"
    return SbusError(f"{problem}: it sent '{text[:80]}'")


# ==== Carrying ===============================================================


class Session:
    """A stream and a bus, and what an end carries between them.

    A thread carries each way, so neither waits for the other.  If one of them
    fails, it stops the other.

    An end leaves after a signal, or the other end's BYE, and loses nothing
    that was published before.  It asks its bus a question, whose answer comes
    behind all those messages [CRED-3], and then sends BYE.  It stops once
    both BYEs are there; until then it goes on to show that it lives, as the
    other end may have much to send.
    """

    def __init__(self, end: End, stream: Stream, bus: Client) -> None:
        self.end = end
        self.stream = stream
        self.bus = bus
        self.sent = 0  # messages to the other end
        self.received = 0  # messages from it,
        self.refused = 0  # and those of them that were not published
        self.byes: set[str] = set()  # "sent", "heard"
        self.errors: list[Exception] = []

    def subscribe(self) -> None:
        """Ask the bus for what the other end is to get."""
        self.bus.control("echo/off")
        if not self.end.options.block:
            # The other end may be hostile, or hang: lose messages then,
            # rather than pause those who publish them
            self.bus.control("blocking/hard/discard")
        for pattern in self.end.wanted:
            self.bus.subscribe(pattern)
        # By the socket, as the client would refuse the upward pattern
        self.bus.socket.send(b"SUB " + self.end.secrets)
        self.bus.sync(shared.ANSWER_SECONDS)

    def run(self) -> None:
        """Carry both ways until both ends have left, or raise what failed."""
        lanes = [
            threading.Thread(target=self.carry, args=[work])
            for work in (self.send_all, self.receive_all)
        ]
        try:
            with signals.held():
                for lane in lanes:
                    lane.start()
            for lane in lanes:
                lane.join()
        finally:
            self.stop()
        if len(self.byes) < 2:  # else the other end may have gone first
            raise self.errors[0]

    def carry(self, work: Callable[[], None]) -> None:
        """Carry one way; stop both when that ends."""
        try:
            work()
        except Exception as error:  # for the main thread to raise
            self.errors.append(error)
        self.stop()

    def stop(self) -> None:
        """End the threads, wherever they wait."""
        self.bus.close()
        with contextlib.suppress(OSError):
            self.stream.wire.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Ask for an answer, which comes behind all that came before."""
        with contextlib.suppress(SbusError, OSError):  # the bus may be gone
            self.bus.control(sbus_client.WHOAMI)

    def send_all(self) -> None:
        """Carry from the bus to the stream."""
        while len(self.byes) < 2:
            try:
                received = self.bus.receive(ALIVE_SECONDS)
            except TimeoutError:
                self.stream.send(b"")
                continue
            if type(received) is not Message:  # the answer that leave wants
                self.stream.send(BYE)
                self.byes.add("sent")
            elif self.end.may_leave(received.key):
                key, payload = received
                self.stream.send(b"MSG " + key + b"\0" + payload)
                self.sent += 1

    def receive_all(self) -> None:
        """Carry from the stream to the bus."""
        while len(self.byes) < 2:
            frame = self.stream.receive()
            head, nul, payload = frame.partition(b"\0")
            if head.startswith(b"MSG ") and nul:
                self.received += 1
                self.publish(head[4:], payload)
            elif frame == BYE:
                self.byes.add("heard")
                self.leave()
            elif frame:
                raise refusal(frame)

    def publish(self, key: bytes, payload: bytes) -> None:
        """Publish a message of the other end, if that may send it."""
        try:
            if not self.end.may_enter(key):
                raise PacketError("it is not admitted")
            self.bus.publish(key, payload)
        except PacketError as error:
            if not self.refused:
                name = sbus_client.printable(key[:80])
                shared.note(f"{name} is not published: {error}")
            self.refused += 1


# ==== Ends ===================================================================


class End:
    """An end of a link: what outlives its streams."""

    def __init__(self, options: shared.Options) -> None:
        self.options = options
        self.is_upper = bool(options.listen)
        up = [PROBES, *map(os.fsencode, options.up or [""])]
        down = [PROBES, *map(os.fsencode, options.down or [""])]
        self.wanted = down if self.is_upper else up
        self.admitted = tuple(up if self.is_upper else down)
        self.prefix = NOBODY
        self.former: set[bytes] = set()  # prefixes, with a '/' behind each
        self.probe = b""
        self.server = Server(options)
        self.session: Session | None = None  # the last one
        self.is_over = False  # a signal has come
        self.is_idle = False  # see idle

    @property
    def secrets(self) -> bytes:
        """The pattern of the secrets that the other end gets [CRED-13]."""
        return self.prefix + b"/" if self.is_upper else SECRET

    def run(self) -> None:
        """Serve streams until a signal comes."""
        for number in signals.STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self.obey)
        wires = self.listen() if self.is_upper else self.dial()
        with contextlib.closing(wires):
            for wire in wires:
                stream = Stream(wire)
                last = self.session
                try:
                    self.serve(stream)
                except PacketError:  # no bus takes a pattern that was given
                    raise
                except (SbusError, OSError) as error:
                    stream.give_up(error)
                    # What had to pass on this stream before has not
                    if self.is_over and self.session is not last:
                        raise
                    shared.complain(error)
                if self.is_over:
                    return
                shared.note("the other end has left")

    def serve(self, stream: Stream) -> None:
        """Carry between a stream and the bus until one of them ends."""
        if not self.is_upper:
            self.hear_greeting(stream)
            self.server.run_below(self.prefix)
        with shared.open_bus(self.options) as bus:
            path = bus.whoami(shared.ANSWER_SECONDS).path
            session = Session(self, stream, bus)
            if self.is_upper:
                self.prefix = path
                self.probe = PROBES + os.urandom(16).hex().encode()
                self.greet(stream)
                self.hear_greeting(stream)
                session.subscribe()
                # If another way leads to the lower bus, that end hears this
                bus.publish(self.probe)
            else:
                self.check(path)
                session.subscribe()
                self.greet(stream)

            shared.note(f"linked: the prefix is {self.prefix.decode()}")
            stream.frame_bytes_max = bus.packet_bytes_max
            self.session = session
            if self.is_over:  # since before there was this session
                session.leave()
            session.run()

    def greet(self, stream: Stream) -> None:
        """Say who we are, and how much of the last session came here."""
        received = b"%d" % self.session.received if self.session else b"-"
        role = b"upper" if self.is_upper else b"lower"
        words = role, received, self.prefix, self.probe
        stream.send(VERSION + b" ".join(words))

    def hear_greeting(self, stream: Stream) -> None:
        """Learn what the other end says; count what the last stream lost."""
        with self.idle():
            greeting = stream.receive()
        match = re.fullmatch(GREETING, greeting)
        if not match:
            raise refusal(greeting)
        role, received, prefix, probe = match.groups()
        if (role == b"upper") == self.is_upper:
            raise SbusError(f"both ends are {role.decode()}")
        if self.session and received != b"-":
            lost = self.session.sent - int(received)
            if lost > 0:
                shared.note(f"the last stream lost {lost} messages from here")
        if not self.is_upper:
            self.former.add(self.prefix + b"/")
            self.former.discard(prefix + b"/")
            self.prefix = prefix
            self.probe = probe

    def check(self, path: bytes) -> None:
        """Raise SbusError if a lower bus has not the link's prefix."""
        if not re.fullmatch(re.escape(self.prefix) + b"/" + RUN, path):
            text = f"needs --cred-prefix {self.prefix.decode()}"
            text += f", but has a client {path.decode()}"
            raise SbusError(f"the lower bus {text}")

    # ---- What may pass

    def may_leave(self, key: bytes) -> bool:
        """Return whether a message of the bus is for the other end."""
        if not self.is_upper and key == self.probe:
            text = "another way leads from the lower bus to the upper one"
            raise SbusError(f"{text}: messages would go round for ever")
        if not key.startswith(SECRET):
            return True
        if self.is_upper:  # else it is for this very process
            return key.startswith(self.secrets + SECRET)
        return not any(map(key.startswith, self.former))

    def may_enter(self, key: bytes) -> bool:
        """Return whether this end publishes what the other one sends."""
        if key.startswith(SECRET):
            is_below = key.startswith(self.prefix + b"/")
            return is_below != self.is_upper
        return selects(self.admitted, key)

    # ---- Signals

    def obey(self, *_: object) -> None:
        """Leave at a signal; end at once if idle, or at the second one."""
        if self.is_idle or self.is_over:
            raise SystemExit(0)
        self.is_over = True
        if self.session:
            self.session.leave()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Have a signal cut off a wait, and nothing else."""
        self.is_idle = True
        try:
            if self.is_over:
                raise SystemExit(0)
            yield
        finally:
            self.is_idle = False

    # ---- Streams, one after the other

    def listen(self) -> Generator[socket.socket, None, None]:
        """Yield what connects to a socket that only this user can reach."""
        path = self.options.listen
        remove_stale(path)
        os.umask(0o177)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            contextlib.ExitStack() as ending,
        ):
            with signals.held():
                try:
                    listener.bind(path)
                except OSError as error:
                    text = f"{path}: {error.strerror or error}"
                    raise SbusError(text) from None
                ending.callback(remove, path)
            listener.listen(1)  # the next stream waits for the last one
            while True:
                with self.idle():
                    wire, _ = listener.accept()
                with wire:
                    yield wire

    def dial(self) -> Generator[socket.socket, None, None]:
        """Yield what is at a command's standard streams; run it again."""
        tries = 0
        while True:
            last = self.session
            ours, theirs = socket.socketpair()
            words = self.options.through
            streams = {"stdin": theirs, "stdout": theirs}
            with ours, contextlib.ExitStack() as ending:
                with theirs, signals.starting(words, **streams) as child:
                    ending.callback(self.end_command, child, last)
                    ending.enter_context(ours)  # which is closed first
                yield ours

            self.server.run_below(self.prefix)  # also without a link
            if self.session is not last:  # it was a good one
                tries = 0
            with self.idle():
                time.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    def end_command(
        self, child: subprocess.Popen[bytes], last: Session | None
    ) -> None:
        """Let a command pass on what it has, and end it.

        If there was no session since the last one, it has little.
        """
        session = self.session
        has_left = session and session is not last and len(session.byes) == 2
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE_SECONDS if has_left else PASS_SECONDS)
        finally:  # also at another signal
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@functools.lru_cache(4_096)  # keys come again and again
def selects(patterns: tuple[bytes, ...], key: bytes) -> bool:
    """Return whether one of several patterns selects a key."""
    return any(sbus_client.matches(pattern, key) for pattern in patterns)


def remove(path: str) -> None:
    """Remove a socket, unless it has gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_stale(path: str) -> None:
    """Remove a socket at which nobody listens, and nothing else."""
    with contextlib.suppress(FileNotFoundError):
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            # Of another type, this one gets another error from a listener
            error = wire.connect_ex(path)
        if is_socket and error == errno.ECONNREFUSED:
            os.unlink(path)


class Server:
    """The server of the lower bus, if the link is to run it."""

    def __init__(self, options: shared.Options) -> None:
        self.options = options
        self.prefix = b""
        self.process: subprocess.Popen[bytes] | None = None

    def run_below(self, prefix: bytes) -> None:
        """See that the server runs, and has a prefix."""
        is_running = self.process and self.process.poll() is None
        if not self.options.server or (is_running and self.prefix == prefix):
            return
        self.stop()
        self.stop_orphan()

        words = [*self.options.server, "-r", "--cred-prefix", prefix.decode()]
        if "address" in self.options:
            words += ["-a", self.options.address]
        options: Any = {"stdin": subprocess.DEVNULL}
        options["env"] = {**os.environ, PARENT: str(os.getpid())}
        with signals.starting(words, **options) as process:
            self.process = process
        self.prefix = prefix
        address = getattr(self.options, "address", None)
        end = sbus_client.end_of(shared.ANSWER_SECONDS)
        with Client(address, reconnect=True) as bus:
            while self.process.poll() is None and sbus_client.left_of(end):
                with contextlib.suppress(TimeoutError):
                    bus.whoami(START_SECONDS)
                    return
        status = self.process.poll()
        text = f"the lower bus does not answer; its server's status: {status}"
        shared.complain(text)

    def stop_orphan(self) -> None:
        """End the server of a link that was killed, as nobody else would."""
        with (
            contextlib.suppress(OSError),
            shared.open_bus(self.options) as bus,
        ):
            ids = bus.socket.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, 12
            )
            pid = struct.unpack("3i", ids)[0]
            with open(f"/proc/{pid}/environ", "rb") as environ:
                match = re.search(PARENT + "=([0-9]+)", str(environ.read()))
            if match and not os.path.exists(f"/proc/{match[1]}"):
                os.kill(pid, signal.SIGTERM)
                while True:  # until it has gone
                    bus.receive(shared.ANSWER_SECONDS)

    def stop(self) -> None:
        """End the server."""
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.process = None


# ==== The command ============================================================


@shared.command(
    "link --through 'ssh HOST nc -U /run/sbus-link' --server 'sbusd -o'",
    shared.argument("--listen", "the upper end: a socket to make"),
    shared.argument("--through", "the lower end: leads there", **COMMAND),
    shared.argument("--server", "starts the lower bus", **COMMAND),
    shared.argument("--up", "public keys from below (all)", action="append"),
    shared.argument("--down", "those from above (all)", action="append"),
    shared.flag("--block", "have publishers wait, rather than lose messages"),
)
def link(options: shared.Options) -> None:
    """Put a bus below another one: messages and secrets go both ways.

    The upper end listens at a socket that only its user can reach.  The lower
    end runs a command whose standard streams lead there, and again whenever
    they end.  It starts the lower bus by another command, to which it adds
    -r, --cred-prefix and -a, and needs root or the owner of that bus.

    What the streams lose is lost, and counted; so is what waits above 16 MiB.
    With --block all publishers of a bus wait for the other one instead.
    """
    is_lower = bool(options.through)
    if bool(options.listen) == is_lower or (options.server and not is_lower):
        text = "give --listen to the upper end, or --through to the lower one"
        raise shared.UsageError(text)
    end = End(options)
    try:
        end.run()
    finally:
        end.server.stop()
