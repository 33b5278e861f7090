"""whoami, stats and clients: what the server says of its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbus_client import SbusError, left_of, printable

from . import shared
from .json_lines import ERRORS, json_line

COUNTERS = ("published", "delivered", "refused", "discarded", "paused")
COLUMNS = ("clients", "patterns", *COUNTERS, "backlog_bytes")
IDS = ("uid", "pid")
CLIENT_COLUMNS = (*IDS, "patterns", "backlog_bytes", "modes", "paused_by")
Rows = Mapping[str, Mapping[str, Any]]  # by the name of each
HIDDEN = "only root and the bus owner may see"


@contextlib.contextmanager
def counts(options: shared.Options) -> Iterator[dict[str, Any]]:
    """Give what the server has counted [CTL-5].

    Raises: SbusError, also if what is done with it meets other things.
    """
    try:
        with shared.open_bus(options) as bus:
            answer = bus.stats(left_of(options.end))
        yield answer
    except SbusError:
        raise
    except ERRORS:
        raise SbusError("the server's counts are malformed") from None


def write_table(title: str, columns: Sequence[str], rows: Rows) -> None:
    """Print a table of named rows."""
    names = (name.replace("_bytes", "").replace("_", " ") for name in columns)
    lines = [[title, *map(str.upper, names)]]
    for name, row in rows.items():
        cells = (shown(column, row.get(column, "")) for column in columns)
        lines.append([shown("", name), *cells])
    first, *widths = (max(map(len, column)) for column in zip(*lines))
    for name, *texts in lines:
        ranged = (f" {text:>{width}}" for text, width in zip(texts, widths))
        shared.write(f"{name:{first}}{''.join(ranged)}\n".encode())


def shown(name: str, value: Any) -> str:
    """Return a value as it is printed."""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    is_count = isinstance(value, int) and name not in IDS
    text = f"{value:,}" if is_count else str(value)
    return printable(text.encode("utf-8", "backslashreplace"))


def metrics(users: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the counts of users as lines of OpenMetrics."""
    for name in COLUMNS:
        is_counter = name in COUNTERS
        yield f"# TYPE sbus_{name} {'counter' if is_counter else 'gauge'}\n"
        for uid, row in users.items():
            metric = f"sbus_{name}{'_total' * is_counter}"
            yield f'{metric}{{uid="{int(uid)}"}} {int(row.get(name, 0))}\n'
    yield "# EOF\n"


@shared.command("whoami", shared.timeout())
def whoami(options: shared.Options) -> None:
    """Print the credentials by which the server knows this client.

    They have the form !/cred/GID/UID/PID.  A key that begins with them and a
    '/' is private.
    """
    with shared.open_bus(options) as bus:
        shared.write_line(bus.whoami(left_of(options.end)).path)


@shared.command(
    "stats --json",
    (
        shared.flag("--json", "print the server's answer, a JSON object"),
        shared.flag("--openmetrics", "print counts of users for Prometheus"),
    ),
    shared.timeout(),
)
def stats(options: shared.Options) -> None:
    """Print what the server has counted for this client.

    Root and the bus owner also see a row for each user; it counts from when
    the first of its connected clients came.  REFUSED packets are those that
    the kernel did not take at once, because their receiver was slow.
    DISCARDED ones never reached a receiver.  PAUSED is how often a publisher
    had to wait, and BACKLOG the bytes that the server holds for receivers.
    """
    with counts(options) as answer:
        users = answer.get("users", {})
        if options.json:
            shared.write(json_line(answer))
        elif not options.openmetrics:
            rows = {f"client {answer['client']}": {**answer, "clients": ""}}
            rows.update((f"user {uid}", row) for uid, row in users.items())
            write_table("", COLUMNS, rows)
        elif users:
            shared.write("".join(metrics(users)).encode())
        else:
            raise SbusError(f"no metrics: {HIDDEN} users")


@shared.command(
    "clients",
    shared.flag("--json", "print a JSON object with one for each client"),
    shared.timeout(),
)
def clients(options: shared.Options) -> None:
    """Print a table of the clients of the bus, for root and the bus owner.

    BACKLOG is the bytes that the server holds for a client, MODES are those
    of its flood control, and PAUSED BY are the numbers of the slow clients
    for which the server does not read from this one.
    """
    with counts(options) as answer:
        if "clients" not in answer:
            raise SbusError(f"no clients: {HIDDEN} them")
        rows = answer["clients"]
        if options.json:
            shared.write(json_line(rows))
        else:
            write_table("CLIENT", CLIENT_COLUMNS, rows)
        users = answer.get("users", {}).values()
        total = sum(row.get("clients", 0) for row in users)
        if len(rows) < total:
            shared.note(f"{len(rows)} of {total:,} clients are shown")
