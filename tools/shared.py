"""What the commands share: their options, standard streams, and the bus."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import select
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import sbus_client
from sbus_client import Client, Message, SbusError, end_of, left_of

ANSWER = "for an answer"
ANSWER_SECONDS = 10.0  # in which a server is to answer


class UsageError(SbusError):
    """A command line is wrong: the exit status is 2."""


# ==== Standard streams =======================================================

remarks_are_wanted = True  # what --quiet changes


complain = functools.partial(sbus_client.note, program="sbus")


def note(text: object) -> None:
    """Print a line to standard error, unless --quiet forbids remarks."""
    if remarks_are_wanted:
        complain(text)


@contextlib.contextmanager
def errors_about(name: str) -> Iterator[None]:
    """Name a file or folder in an error of the system.  Raises: SbusError."""
    try:
        yield
    except OSError as error:
        raise SbusError(f"{name}: {error.strerror}") from None


def write(text: bytes, at_once: bool = True) -> None:
    """Write to standard output.

    Raises: BrokenPipeError if nobody reads it; SbusError.
    """
    try:
        sys.stdout.buffer.write(text)
        if at_once:
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SbusError(f"standard output: {error.strerror}") from None


def write_line(*fields: bytes) -> None:
    """Print a line, with tabs between its printable fields."""
    write("\t".join(map(sbus_client.printable, fields)).encode() + b"\n")


def given_payload(payload: str | None) -> bytes:
    """Return the payload that an argument gives, or standard input.

    Raises: SbusError if that is more than a packet may have; UsageError.
    """
    if payload not in (None, "-"):
        return os.fsencode(payload)
    if standard_input().isatty():
        note("the payload comes from the terminal; Ctrl-D ends it")
    bytes_max = packet_bytes_max()
    text: bytes = standard_input().buffer.read(bytes_max + 1)
    check_size(text, bytes_max)
    return text


def standard_input() -> Any:
    """Return the stream.  Raises: SbusError if it is closed."""
    if not sys.stdin:
        raise SbusError("standard input is closed")
    return sys.stdin


def check_size(text: bytes, bytes_max: int) -> None:
    """Raise SbusError if input is too long, all of which was not read."""
    if len(text) > bytes_max:
        raise SbusError(f"standard input: a message over {bytes_max:,} bytes")


def given_key(key: str) -> bytes:
    """Return the routing key that an argument gives; remark on a '*'."""
    if "*" in key:  # [KEY-2]
        note(f"{key}: no pattern can select a '*' alone")
    return os.fsencode(key)


# ==== Options ================================================================

Options = argparse.Namespace
Argument = Callable[[Any], object]  # adds itself to a parser
Parser = Callable[[str], float]  # of a number


class Command(NamedTuple):
    """A command: its function, and what its help says."""

    run: Callable[[Options], None]  # its docstring is help
    example: str
    arguments: Sequence[Any]  # see add_all
    has_address: bool  # one, by -a


def command(
    example: str, *arguments: Any, has_address: bool = True
) -> Callable[[Callable[[Options], None]], Command]:
    """Return a decorator that makes a command of a function."""
    return lambda run: Command(run, example, arguments, has_address)


def unmarked(word: str) -> str:
    """Return an argument as it was given, see OptionParser.parse."""
    return word.removeprefix("\0")


def argument(names: str, help: str, **options: Any) -> Argument:
    """Return an argument, or an option, with the names in a text."""
    if not names.startswith("-") and "choices" not in options:
        options = {"metavar": names.upper(), "type": unmarked, **options}
    return lambda to: to.add_argument(*names.split(), help=help, **options)


def add_all(parser: Any, arguments: Iterable[Any]) -> None:
    """Add arguments; of a tuple of them, only one can be given."""
    for add in arguments:
        if isinstance(add, tuple):
            add_all(parser.add_mutually_exclusive_group(), add)
        else:
            add(parser)


def positive(kind: Parser, form: str) -> Parser:
    """Return a parser of positive numbers for argparse."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 1e-6 <= kind(text) <= 1e9:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {form} to 1e9")

    return parse


def open_descriptor(text: str) -> int:
    """Return the number of a descriptor, for argparse."""
    is_number = text.isdecimal() and int(text) > 2  # no standard stream
    if is_number and os.path.exists(f"/proc/self/fd/{text}"):
        return int(text)
    raise argparse.ArgumentTypeError(f"descriptor {text} is not open, or 0-2")


COUNT_TYPE = positive(int, "a whole number from 1")
AMOUNT_TYPE = positive(float, "a number from 1e-6")


def flag(names: str, help: str, **options: Any) -> Argument:
    """Return an option without a value."""
    return argument(names, help, action="store_true", **options)


def number(names: str, help: str, **options: Any) -> Argument:
    """Return an option with a count from 1."""
    return argument(names, help, metavar="N", type=COUNT_TYPE, **options)


def amount(names: str, metavar: str, help: str, **options: Any) -> Argument:
    """Return an option with a positive number."""
    return argument(names, help, metavar=metavar, type=AMOUNT_TYPE, **options)


def duration(names: str, help: str, **options: Any) -> Argument:
    """Return an option with a length of time: 90, 0.5, 15m, 1h or 2d."""
    parse = sbus_client.seconds
    return argument(names, help, metavar="S", type=parse, **options)


def timeout(seconds: float = ANSWER_SECONDS, use: str = ANSWER) -> Argument:
    """Return the option for how long to wait for the server."""
    help = f"wait up to S seconds {use} ({seconds:g})"
    return duration("-t --timeout", help, default=seconds)


def key(**options: Any) -> Argument:
    """Return the argument for a routing key."""
    return argument("key", "the routing key, such as a/b", **options)


PAYLOAD = argument("payload", "'-' is standard input", nargs="?")
PATTERNS = argument("pattern", "in quotes; none: all but secrets", nargs="*")
REPEATED = "as for sub; may be repeated"
PATTERN_OPTION = argument("--pattern", REPEATED, action="append", default=[])
RECONNECT = flag("--reconnect", "wait for a bus that has not started or ended")
KEEPER = argument("--keeper", "its key (keep/last)", default="keep/last")
MIB = amount("--max-mib", "M", "keep at most M MiB (64)", default=64.0)
READY = "once subscribed, write to descriptor N"
READY_FD = argument("--ready-fd", READY, metavar="N", type=open_descriptor)
COUNT = number("-n --count", "end after N messages")
DURATION = duration("-t --timeout", "end after S seconds, or 15m, 1h, 2d")
OURS = argparse.SUPPRESS  # a command's own default would undo ours
WHERE = "the bus: a path, /dev/unix/abstract/HEX or /dev/fd/N"
ADDRESS = argument("-a --address", WHERE, default=OURS)
QUIET = flag("-q --quiet", "print errors, but no remarks", default=OURS)


class OptionParser(argparse.ArgumentParser):
    """Reports a mistake in one line, and prints help like other output."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            hint = suggestion(message.split()[2], self.long_options())
            message += hint or " (write -- before what begins with '-')"
        elif message.startswith("unrecognized arguments: "):
            message += " (quote an argument that holds blanks)"
        complain(f"{message}; --help lists the options".replace("\0", ""))
        sys.exit(2)

    def parse(self, words: list[str]) -> Options:
        """Return options and arguments, which may stand in any order.

        Behind `--`, and in a command that another one runs, they may not.
        """
        if any(action.nargs in ("...", "A...") for action in self._actions):
            return self.parse_args(words)
        cut = words.index("--") if "--" in words else len(words)
        # Marked by a byte that no word can have, none of them is an option
        marked = [f"\0{word}" for word in words[cut + 1 :]]
        return self.parse_intermixed_args([*words[:cut], *marked])

    def long_options(self) -> list[str]:
        """Return the long names of all options."""
        return [n for n in self._option_string_actions if n[:2] == "--"]

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message.encode())


def suggestion(word: str, names: Iterable[str]) -> str:
    """Return a remark with the name that a word may stand for, or nothing."""
    bare = word.lower().lstrip("-")
    plain = {name.lstrip("-"): name for name in names}
    near = [p for p in plain if p.startswith(bare) or bare.startswith(p)]
    if not near:
        with contextlib.suppress(ImportError):  # a small Python may lack it
            import difflib

            near = difflib.get_close_matches(bare, plain, 1)
    return f" (did you mean {plain[near[0]]}?)" if near and bare else ""


def option_parsers(
    commands: Mapping[str, Command], about: str = ""
) -> tuple[OptionParser, dict[str, OptionParser]]:
    """Return the parser of the command line, and those of the commands."""
    # With a width of its own it needs no shutil, which a small Python lacks
    raw = argparse.RawDescriptionHelpFormatter
    layout: Any = {"formatter_class": functools.partial(raw, width=78)}
    layout["allow_abbrev"] = False
    parser = OptionParser("sbus", **layout)
    parser.description = "Use a message bus."
    parser.epilog = about.partition("\n\n")[2]
    version = f"sbus {sbus_client.__version__}"
    parser.add_argument("--version", action="version", version=version)
    add_all(parser, [ADDRESS, QUIET])
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, command in commands.items():
        file = str(sys.modules[command.run.__module__].__file__)
        start = f"\ndef {name}("
        about = command.run.__doc__ or sbus_client.docstring(file, start)
        about = about.replace("\n    ", "\n").rstrip()
        layout["description"] = about
        first = about.partition("\n")[0]
        inner = parsers.add_parser(name, help=first, **layout)
        inner.epilog = f"example:\n  sbus {command.example}"
        inner.set_defaults(run=command.run)
        add_all(inner, [ADDRESS] * command.has_address)
        add_all(inner, [*command.arguments, QUIET])
    return parser, parsers.choices


# ==== The bus ================================================================


class LenientClient(Client):
    """A client that skips packets above its limit, and says so.

    If a bus is lost before it has answered, it asks the next one.
    """

    def receive(self, timeout: float | None = None) -> Any:
        while True:
            try:
                return super().receive(timeout)
            except sbus_client.PacketTooLarge as error:
                note(f"{error}; SBUS_MAX_PACKET raises it")

    def whoami(self, timeout: float | None = None) -> Any:
        end = end_of(timeout)
        while True:
            try:
                return super().whoami(left_of(end))
            except sbus_client.Disconnected as error:
                if error.errno or self.closed or not self.reconnect:
                    raise


def packet_bytes_max() -> int:
    """Return the largest packet that a client takes.  Raises: UsageError."""
    default = str(sbus_client.PACKET_BYTES_MAX)
    number = os.environ.get("SBUS_MAX_PACKET") or default
    if not re.fullmatch("[1-9][0-9]{0,9}", number):
        raise UsageError(f"SBUS_MAX_PACKET is {number!r}, not a number")
    return int(number)


def open_bus(options: Options, reconnect: bool = False) -> Client:
    """Return a client of the bus that -a or the environment names.

    The time that --timeout gives begins, and is over at *options.end*.
    Raises: UsageError; as Client.
    """
    seconds = getattr(options, "timeout", None)
    options.end = end_of(seconds)
    # Also where warnings are to be errors, in programs; other warnings are
    # for programmers, such as of a call that Ctrl-C kept from a start
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda text, *_: note(text)
    address = getattr(options, "address", None)
    limit = {"packet_bytes_max": packet_bytes_max()}
    bus = LenientClient(address, timeout=seconds, reconnect=reconnect, **limit)
    if bus.retry_in() is not None:
        note(f"no bus at {bus.address} yet: waiting for one")
    return bus


def tell_ready(options: Options, bus: Client) -> None:
    """Once the server has handled all so far, say so to --ready-fd."""
    if options.ready_fd:
        bus.sync(left_of(options.end))
        with errors_about(f"--ready-fd {options.ready_fd}"):
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)
        options.ready_fd = None


def subscribe(bus: Client, patterns: Sequence[str]) -> None:
    """Subscribe to patterns as the shell gave them, or to all keys."""
    for pattern in patterns or [""]:
        bus.subscribe(os.fsencode(pattern))


def messages(
    bus: Client,
    count: int | None = None,
    end: float | None = None,
    before: Callable[[], Sequence[Message]] = tuple,
) -> Iterator[Message]:
    """Yield messages: *count* of them, or those that come before an end.

    Those that *before* returns come first on each bus.

    It flushes standard output before it waits for more.  A lost bus and a
    new one are remarks.
    Raises: SbusError if the time runs out before the count is reached.
    """
    heard = 0
    is_lost = bus.retry_in() is not None
    waiting = deque(() if is_lost else before())
    while heard != count:
        if waiting:
            heard += 1
            yield waiting.popleft()
            continue
        if left_of(end) == 0:
            if count is None:
                return
            raise SbusError(f"out of time: heard {heard} of {count}")
        try:
            received = bus.receive(0)
        except TimeoutError:
            if bus.retry_in() is not None and not is_lost:
                note(f"the bus at {bus.address} has gone: waiting for another")
                is_lost = True
            wait_to_print(bus, end)
            continue
        if type(received) is Message:
            waiting.append(received)
        elif type(received) is sbus_client.Reconnected:
            note(f"connected to {bus.address}")
            is_lost = False
            waiting.extend(before())


def wait_to_print(bus: Client, end: float | None) -> None:
    """Flush output, and wait until a message may come, or the end.

    Raises: BrokenPipeError if nobody reads standard output; OSError.
    """
    write(b"")
    poll = select.poll()
    poll.register(bus, select.POLLIN)
    poll.register(sys.stdout, 0)  # tells when its reader has gone
    waits = [s for s in (left_of(end), bus.retry_in()) if s is not None]
    ready = dict(poll.poll(1000 * min(waits) if waits else None))
    if ready and bus.fileno() not in ready:
        raise BrokenPipeError
