"""Events: the lines of traces (spec/9-running.md), as rows of FACTS.

- A block is the lines that begin in some bytes of a file.  One task reads
  it.  A compressed file cannot be cut, so it is one block.
- A part is what a block has of one run of a server: a `start` begins one.
- Sends are most of the events.  A block sums them up, by message and by
  client, before Spark sees them; other events are rows of their own.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import fs
from pyspark.sql import DataFrame

from .inputs import InputError, absolute
from .messages import parse_lines, schema_of

BLOCK_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20  # of lines that are parsed at once
CHUNKS = 1 + BLOCK_BYTES // CHUNK_BYTES  # that one task has in memory
SHOWN = 80  # characters of a line that is no event
COMPRESSED = (".gz", ".bz2", ".zst")  # which Arrow knows by their names
SECRET = "!/cred/"

NUMBERS = ("n", "t", "c", "m", "size", "gid", "uid", "pid")
TEXTS = ("ev", "key", "pattern", "reason", "cred_prefix", "data")
LINE = schema_of(
    ",".join([f"{x} long" for x in NUMBERS] + [f"{x} string" for x in TEXTS])
)
FIELDS = {  # that an event has beside n and t
    "send": ("c", "m"),
    "msg": ("c", "m", "size", "key"),
    "drop": ("c", "m", "reason"),
    "sub": ("c", "pattern"),
    "unsub": ("c", "pattern"),
    "ctl": ("c", "key"),
    "open": ("c", "gid", "uid", "pid"),
    "close": ("c",),
    "start": ("cred_prefix",),
    "stop": (),
}
SEND, MSG, DROP, CTL, START, STOP = 0, 1, 2, 5, 8, 9  # places in FIELDS
# A row is an event, with its *text* (of an open, its ids), or one of these:
#   line      one that is no event: its *text*
#   jump      an event whose number does not follow that before it, *m*
#   payload   a msg that tells the payload of a secret message
#   part      its first event (*n*), the *last* one, the first stop (*high*);
#             if it begins with a start, the prefix of that (*text*)
#   reached   of a message: its first send or drop, the sum of *mark*
#   client    of a client: its first event and the row of the *last* one, the
#             *low*est and *high*est message that it was sent, and how often
#             one was not higher than that before (*falls*)
# A client that changes its order has one more such row from then on.
FACTS = """
ev string, text string, block long, part long, row long, n long, t long,
c long, m long, last long, low long, high long, falls long, mark long
"""
FACT = schema_of(FACTS)


class Block(NamedTuple):
    """The lines of a file that begin in [start, end)."""

    path: str
    start: int
    end: int


def blocks_of(path: str) -> Iterator[Block]:
    """Yield the blocks of a trace, or of those in a directory by their names.

    Raises: InputError if one is not there, is empty, or is no trace.
    """
    where = absolute(path)
    system, place = fs.FileSystem.from_uri(where)
    files = {where: system.get_file_info(place)}
    if files[where].type == fs.FileType.Directory:
        inside = system.get_file_info(fs.FileSelector(place))
        some = {one.base_name: one for one in inside if one.size}
        names = [name for name in sorted(some) if name[0] not in "._"]
        files = {f"{where}/{name}": some[name] for name in names}
    if not files:
        raise InputError(f"{path}: there is no trace in it")
    for at, file in files.items():
        if not file.size:
            raise InputError(f"{at}: the file is empty or not there")
        step = file.size if at.endswith(COMPRESSED) else BLOCK_BYTES
        head = next(lines_of(Block(at, 0, file.size)), b"")
        if not len(parse(head)["ev"].drop_null()):
            what = "no line at its beginning is an event of sbus.py --trace"
            raise InputError(f"{at}: this is no trace: {what}")
        for start in range(0, file.size, step):
            yield Block(at, start, min(start + step, file.size))


def lines_of(block: Block) -> Iterator[bytes]:
    """Yield texts of the whole lines of a block, about CHUNK_BYTES each."""
    system, place = fs.FileSystem.from_uri(block.path)
    at, end = max(block.start - 1, 0), block.end
    if place.endswith(COMPRESSED):
        file, end = system.open_input_stream(place), 1 << 62
    else:
        file = system.open_input_file(place)
        file.seek(at)
    with io.BufferedReader(file) as stream:
        if block.start:  # the line that begins before is not ours
            at += len(stream.readline())
        while at < end:
            try:
                text = stream.read(min(end - at, CHUNK_BYTES))
                text += b"" if text.endswith(b"\n") else stream.readline()
            except OSError as error:  # a compressed file that is cut or broken
                raise InputError(f"{block.path}: {error}") from None
            if not text:
                return
            at += len(text)
            yield text[: text.rfind(b"\n") + 1]  # a torn last line is none


def parse(text: bytes) -> pa.Table:
    """Return lines as LINE, code and line; nulls for lines of no event.

    *code* is an event's place in FIELDS or -1, and *line* begins the text of
    what is no event.
    """
    table = pa.Table.from_batches(parse_lines(text, LINE), LINE)
    code = codes_of(table)
    line = pa.nulls(len(table), pa.string())
    if (code < 0).any():
        known = [pc.if_else(code >= 0, one, None) for one in table.columns]
        table = pa.table(known, LINE)
        lines = [one[:SHOWN] for one in text.split(b"\n")[:-1]]
        line = pa.array([one.decode("utf-8", "replace") for one in lines])
    return with_columns(table, code=code, line=line)


def codes_of(table: pa.Table) -> Any:
    """Return each event's place in FIELDS; -1 if it lacks a field."""
    has = sum(
        np.left_shift(one.is_valid().to_numpy().astype(int), at)
        for at, one in enumerate(table.columns)
    )
    kinds = pc.index_in(table["ev"], pa.array(FIELDS))
    code = pc.fill_null(kinds, -1).to_numpy().astype(int)
    wanted = [
        sum(1 << LINE.get_field_index(name) for name in ("n", "t", *names))
        for names in FIELDS.values()
    ]
    need = np.array(wanted)[code]
    is_first = pc.fill_null(table["n"], 0).to_numpy() == 1
    code[((has & need) != need) | ((code == START) & ~is_first)] = -1
    return code


def facts_of(
    table: pa.Table, block: int, part: int, seed: int, *wanted: pa.Scalar
) -> pa.Table:
    """Return parsed lines as FACTS; the first of them belong to a part.

    If some messages and clients are *wanted*, that is only their events.
    """
    code = table["code"].to_numpy()
    marks = hashes(pc.fill_null(table["c"], 0).to_numpy() ^ seed)
    table = with_columns(
        table,
        row=np.arange(len(table)),
        part=part + np.cumsum(code == START),
        mark=(marks >> np.uint64(24)).astype(int),
        prefix=pc.if_else(code == START, table["cred_prefix"], None),
        stop=pc.if_else(code == STOP, table["n"], None),
    )
    is_told = (code >= 0) & (code != SEND)
    if wanted:
        some = zip("mc", wanted, strict=True)
        is_in = [pc.is_in(table[name], one.values) for name, one in some]
        is_told = pc.and_(code >= 0, pc.or_(*is_in))
    tables = [FACT.empty_table(), with_text(table.filter(is_told))]
    if not wanted:
        for ev, rows in sums_of(table, code).items():
            tables.append(with_columns(rows, ev=[ev] * len(rows)))
    found = pa.concat_tables(tables, promote_options="default")
    at = FACT.get_field_index("block")
    return found.set_column(at, "block", pa.array([block] * len(found)))


def hashes(numbers: Any) -> Any:
    """Return a hash of each number: splitmix64."""
    found = numbers.astype(np.uint64)
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        found = (found ^ found >> np.uint64(shift)) * np.uint64(factor)
    return found ^ found >> np.uint64(31)


def sums_of(table: pa.Table, code: Any) -> dict[str, pa.Table]:
    """Return the rows of FACTS that are not events, by their *ev*."""
    bad, told = table.filter(code < 0), table.filter(code >= 0)
    payloads = table.filter((code == MSG) & table["data"].is_valid())
    payloads = payloads.filter(pc.starts_with(payloads["key"], SECRET))
    n, part = told["n"].to_numpy(), told["part"].to_numpy()
    jumps = np.flatnonzero((np.diff(n) != 1) & (np.diff(part) == 0))
    after = told.select(["part", "row", "n", "t"]).take(jumps + 1)
    return {
        "line": with_columns(bad.select(["part", "row"]), text=bad["line"]),
        "jump": with_columns(after, m=n[jumps]),
        "payload": with_text(payloads).drop_columns("ev"),
        "part": grouped(
            table,
            "part",
            row="row min",
            n="n first",
            last="n last",
            text="prefix first",
            high="stop first",
        ),
        "reached": grouped(
            table.filter((code == SEND) | (code == DROP)),
            "part",
            "m",
            row="row min",
            mark="mark sum",
        ),
        "client": clients_of(told.filter(told["c"].is_valid())),
    }


def clients_of(events: pa.Table) -> pa.Table:
    """Return the rows `client` of the events of clients."""
    events = events.take(np.argsort(events["c"].to_numpy(), kind="stable"))
    code, c, part = (events[x].to_numpy() for x in ("code", "c", "part"))
    is_change = pc.fill_null(pc.starts_with(events["key"], "order/"), False)
    is_new = (code == CTL) & is_change.to_numpy()
    for same in (c, part):
        is_new |= np.diff(same, prepend=0) != 0
    stretch = np.cumsum(is_new)
    sends = np.flatnonzero(code == SEND)
    m = pc.if_else(code == SEND, events["m"], None)
    sent = m.drop_null().to_numpy()
    falls = np.zeros(len(events), int)
    is_same = np.diff(stretch[sends]) == 0
    falls[sends[1:]] = (np.diff(sent) <= 0) & is_same
    events = events.select(["part", "c", "n", "t", "row", "mark"])
    return grouped(
        with_columns(events, stretch=stretch, m=m, falls=falls),
        "stretch",
        part="part first",
        c="c first",
        mark="mark first",
        n="n first",
        t="t first",
        row="row first",
        last="row last",
        low="m min",
        high="m max",
        falls="falls sum",
    ).drop_columns("stretch")


def with_columns(table: pa.Table, **columns: Any) -> pa.Table:
    """Return a table with more columns."""
    for name, values in columns.items():
        if not isinstance(values, pa.ChunkedArray):
            values = pa.array(values)
        table = table.append_column(name, values)
    return table


def with_text(events: pa.Table) -> pa.Table:
    """Return events with their one text; of an open these are its ids."""
    ids = [events[name].cast(pa.string()) for name in ("gid", "uid", "pid")]
    texts = [pc.binary_join_element_wise(*ids, " ")]
    texts += [events[name] for name in ("reason", "pattern", "key")]
    rows = events.select(["part", "row", "ev", "n", "t", "c", "m"])
    return with_columns(rows, text=pc.coalesce(*texts))


def grouped(table: pa.Table, *keys: str, **sums: str) -> pa.Table:
    """Return a table grouped by keys, with columns like last="n last"."""
    groups = table.group_by([*keys], use_threads=False)
    made = groups.aggregate([tuple(one.split()) for one in sums.values()])
    return made.rename_columns([*keys, *sums])


def read(blocks: Sequence[Block], seed: int, batches: Any) -> Iterator[Any]:
    """Yield FACTS of blocks; batches have their numbers and what is wanted."""
    for batch in batches:
        for number, *wanted in zip(*batch.columns, strict=True):
            part, texts = 0, lines_of(blocks[number.as_py()])
            while some := [*itertools.islice(texts, CHUNKS)]:
                table = pa.concat_tables(map(parse, some)).combine_chunks()
                found = facts_of(table, number.as_py(), part, seed, *wanted)
                part += 1 + len(table)
                yield from found.to_batches()


def size_of(paths: Sequence[str]) -> int:
    """Return the bytes of some traces.  Raises: as blocks_of."""
    blocks = [one for path in paths for one in blocks_of(path)]
    return sum(one.end - one.start for one in blocks)


def tasks_for(blocks: Sequence[Block]) -> int:
    """Return how many tasks are to read some blocks."""
    return 1 + sum(one.end - one.start for one in blocks) // BLOCK_BYTES


def facts(rows: DataFrame, blocks: Sequence[Block], seed: int) -> DataFrame:
    """Return FACTS of blocks, by their numbers and what of them is wanted."""
    return rows.mapInArrow(functools.partial(read, blocks, seed), FACTS)
