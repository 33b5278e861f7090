"""Commands: what the command line can do.

Each function returns its exit status, and its docstring is its help.  Modules
that need Spark or Delta are imported where they are used, so that help comes
at once, and no command waits for what it does not use.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import sbus_client

from . import inputs
from .console import note, notify
from .inputs import InputError, Selection, key_text, printable

SHOWN_MAX = 1_000  # breaches; the function `audit` returns all


def run_ingest(options: argparse.Namespace) -> int:
    """Add new segments of a capture to a table."""
    until = until_signal() if options.follow else None
    from . import intake

    @functools.cache
    def spark() -> Any:
        """Return a session, once there is something to do."""
        from . import sessions

        return sessions.session(size=0)

    remarks: list[str] = []
    messages = lines = removed = kept = 0
    where = options.capture, options.table
    for batch in intake.rounds(spark, *where, options.clean, until):
        notify("READY=1\nWATCHDOG=1")
        for remark in batch.remarks:
            if remark not in remarks:
                note(remark)
        remarks = batch.remarks
        messages += batch.messages
        lines += batch.quarantined
        removed += batch.removed
        kept = batch.kept
        if options.follow and batch.segments:
            counts = "{:,} messages and {:,} bad lines of {:,} segments"
            print(counts.format(*batch), flush=True)
    print(f"{messages} messages ingested, {lines} lines quarantined")
    if options.clean:
        reason = "ingested now, written in the last five minutes, or named"
        print(f"{removed} segments removed, {kept} not yet: {reason}")
    is_at_fault = remarks or options.strict and lines
    return 1 if is_at_fault and not options.follow else 0


def until_signal() -> threading.Event:
    """Return what SIGINT and SIGTERM set from now on."""
    until = threading.Event()
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: until.set())
    return until


def run_status(options: argparse.Namespace) -> int:
    """Show what a table has, what it lacks, and what waits."""
    from . import states

    state = states.state(options.table, options.capture)
    if options.openmetrics:
        print(*states.metrics_of(state), sep="\n")
    else:
        print(
            json_text(state) if options.json else json.dumps(state, indent=2)
        )
    ages = states.ages_of(state, options.host)
    old = [text for text in ages if ages[text] > options.max_age]
    for text in old:
        note(f"{options.table}: {text} for {ages[text]:,.0f} s")
    is_missing = any(state.get(name) for name in ("gaps", "torn"))
    return 1 if old or is_missing else 0


def run_show(options: argparse.Namespace) -> int:
    """Show the messages of a table, in the order of their times."""
    from . import reading

    form = json_line if options.json else text_line
    for row in reading.rows_of(options.table, selection_of(options)):
        print(form(row))
    return 0


def text_line(row: dict[str, Any]) -> str:
    """Return a message as a line: time, host, key and payload."""
    time, host = inputs.utc_text(row["time"]), printable(row["host"])
    payload = sbus_client.printable(row["payload"] or b"")
    return "\t".join([time, host, key_text(row["key"]), payload])


def json_text(value: object) -> str:
    """Return JSON for programs, in a line."""
    return json.dumps(value, separators=(",", ":"))


def json_line(row: dict[str, Any]) -> str:
    """Return a message as a line of a capture."""
    line = {"rec": row["recorder"], "n": row["n"]}
    line["t"] = inputs.nanoseconds(row["time"])
    line |= {name: row[name] for name in ("host", "key", "size")}
    if row["payload"] is not None:
        line["data"] = base64.b64encode(row["payload"]).decode()
    return json_text(line)


def run_compact(options: argparse.Namespace) -> int:
    """Merge the small files of each day."""
    from . import upkeep

    counts = upkeep.compact(options.table)
    print("{} files became {}".format(*counts))
    return 0


def run_expire(options: argparse.Namespace) -> int:
    """Drop the old days of a table."""
    from . import upkeep

    messages, lines = upkeep.expire(options.table, options.keep)
    print(
        f"the days before {options.keep} are dropped: {messages} messages and"
        f" {lines} lines of the quarantine"
    )
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write a report of the traffic in a table."""
    from . import reading, report, sessions, tables

    # An error comes before Spark starts
    tables.open_table(options.table)
    output = Path(options.output).absolute()
    where = output if output.exists() else output.parent
    if not options.json and not os.access(where, os.W_OK):
        raise InputError(f"{output}: it cannot be written")

    selection = selection_of(options)
    rows = reading.read_rows(sessions.session(), options.table, selection)
    numbers = report.summarize(rows, selection.patterns)
    if options.json:
        print(json_text(numbers))
        return 0

    page = report.page(numbers, options.table)
    if output.exists() and not output.is_file():  # as a terminal
        output.write_text(page, "utf-8")
    else:  # whoever reads it sees all of it, or the one before
        hidden = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            hidden.write_text(page, "utf-8")
            hidden.replace(output)
        finally:
            hidden.unlink(missing_ok=True)
    print(f"the report is {output}")
    return 0


def run_audit(options: argparse.Namespace) -> int:
    """Check that a bus delivered what it should."""
    from . import audits, sessions, traces

    size = traces.size_of(traces.blocks_in(options.trace))
    spark = sessions.session(size=size)
    rows = audits.audit(spark, options.trace, options.running)
    rows = audits.chosen(rows, selection_of(options))
    counts = audits.summary(rows)
    undecided = counts.pop("undecided", 0)
    shown = []
    if counts:  # else the query has nothing to find
        breaches = rows.filter("breach <> 'undecided'")
        shown = breaches.orderBy("file", "n").limit(SHOWN_MAX).collect()
    if options.json:
        dicts = [row.asDict() for row in shown]
        result = {"counts": counts, "undecided": undecided, "breaches": dicts}
        print(json_text(result))
        return 1 if counts else 0

    for row in shown:
        print(printable(describe(row)))
    total = sum(counts.values())
    if total > len(shown):
        print(f"and {total - len(shown)} more")
    kinds = ", ".join(f"{name}: {counts[name]}" for name in counts)
    closing = kinds or "every delivery was owed and made"
    if undecided:
        closing += f"; undecided: {undecided} that were owed, not yet made"
    print(closing)
    return 1 if counts else 0


def describe(row: Any) -> str:
    """Return a breach as a line of text."""
    about = [
        f"{name}={row[name]}"
        for name in ("n", "m", "publisher", "c")
        if row[name] is not None
    ]
    if row["key"] is not None:
        about.append(f"key='{key_text(row['key'])}'")
    return f"{row.breach} {' '.join(about)}: {row.detail} ({row.file})"


def run_replay(options: argparse.Namespace) -> int:
    """Publish the messages of a table again."""
    from . import reading

    selection = selection_of(options)
    where = options.table, options.address
    count = reading.replay(*where, options.speed, selection)
    print(f"{count} messages published")
    return 0


def run_prepare(_: argparse.Namespace) -> int:
    """Halve what a start of Spark takes, by a file of its classes."""
    from . import audits, sessions

    # An audit needs most of them
    spark = sessions.session(size=0, archives=True)
    trace = sessions.PACKAGE / "prepare.trace"
    return len(audits.summary(audits.audit(spark, [str(trace)])))


def selection_of(options: argparse.Namespace) -> Selection:
    """Return which messages the options want."""
    keys = [os.fsencode(text).decode("latin-1") for text in options.pattern]
    return Selection(
        options.since,
        options.until,
        tuple(getattr(options, "host", ())),
        tuple(keys),
    )
