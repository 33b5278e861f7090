"""Events: the lines of traces, as rows of FACTS.

- A part is what a block has of one run of a server: a `start` begins one.
- Sends are most of the events.  A block sums them up, by message and by
  client, before Spark sees them; other events are rows of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from . import traces
from .messages import CHUNK_BYTES, schema_of
from .traces import CTL, DROP, MSG, SEND, START, STOP, Block, with_columns

CHUNKS = 1 + traces.BLOCK_BYTES // CHUNK_BYTES  # that one task has in memory
SECRET = "!/cred/"
# A row is an event, with its *text* (of an open, its ids), or one of these:
#   line      one that is no event: its *text*
#   jump      an event whose number does not follow that before it, *m*
#   payload   a msg with the payload of a secret message
#   part      its first event (*n*), the *last* one, the first stop (*high*);
#             if it begins with a start, the prefix of that (*text*)
#   reached   of a message: its first send or drop, the sum of *mark*
#   client    of a client: its first event and the row of the *last* one, the
#             *low*est and *high*est message that it was sent, how often one
#             was not higher than that before (*falls*), and the row of the
#             last of them (*heard*)
# A client that changes its order has one more such row from then on.
FACTS = """
ev string, text string, block long, part long, row long, n long, t long,
c long, m long, last long, low long, high long, falls long, heard long,
mark long
"""
FACT = schema_of(FACTS)


def facts_of(
    table: pa.Table, block: int, part: int, seed: int, *exact: pa.Scalar
) -> pa.Table:
    """Return parsed lines as FACTS; the first of them belong to a part.

    With *exact*, lists of messages and of clients, that is only their events.
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
    is_row = (code >= 0) & (code != SEND)
    if exact:
        pairs = zip("mc", exact, strict=True)
        is_in = [pc.is_in(table[name], x.values) for name, x in pairs]
        is_row = pc.and_(code >= 0, pc.or_(*is_in))
    tables = [FACT.empty_table(), with_text(table.filter(is_row))]
    if not exact:
        for ev, rows in sums_of(table, code).items():
            tables.append(with_columns(rows, ev=[ev] * len(rows)))
    facts = pa.concat_tables(tables, promote_options="default")
    column = FACT.get_field_index("block")
    return facts.set_column(column, "block", pa.array([block] * len(facts)))


def hashes(numbers: Any) -> Any:
    """Return a hash of each number, 64 bits."""
    # In a worker, where it is loaded already; the driver starts Java first
    from pandas.util import hash_array  # type: ignore[import-untyped]

    return hash_array(numbers.astype(np.uint64))


def sums_of(table: pa.Table, code: Any) -> dict[str, pa.Table]:
    """Return the rows of FACTS that are not events, by their *ev*."""
    bad = table.filter(code < 0)
    good = table.filter(code >= 0)
    payloads = table.filter((code == MSG) & table["data"].is_valid())
    payloads = payloads.filter(pc.starts_with(payloads["key"], SECRET))
    n, part = good["n"].to_numpy(), good["part"].to_numpy()
    jumps = np.flatnonzero((np.diff(n) != 1) & (np.diff(part) == 0))
    after = good.select(["part", "row", "n", "t"]).take(jumps + 1)
    return {
        "line": with_columns(bad.select(["part", "row"]), text=bad["line"]),
        "jump": with_columns(after, m=n[jumps]),
        "payload": with_text(payloads).drop_columns("ev"),
        "part": grouped(
            table,
            "part",
            "row min row, n first n, n last last, prefix first text,"
            " stop first high",
        ),
        "reached": grouped(
            table.filter((code == SEND) | (code == DROP)),
            "part m",
            "row min row, mark sum mark",
        ),
        "client": clients_of(good.filter(good["c"].is_valid())),
    }


def clients_of(events: pa.Table) -> pa.Table:
    """Return the rows `client` of the events of clients.

    A stretch is the events of a client until it changes its order.
    """
    events = events.take(np.argsort(events["c"].to_numpy(), kind="stable"))
    code, c, part = (events[x].to_numpy() for x in ("code", "c", "part"))
    is_change = pc.fill_null(pc.starts_with(events["key"], "order/"), False)
    is_new = (code == CTL) & is_change.to_numpy()
    for column in c, part:
        is_new |= np.diff(column, prepend=0) != 0
    stretch = np.cumsum(is_new)
    sends = np.flatnonzero(code == SEND)
    m = pc.if_else(code == SEND, events["m"], None)
    heard = pc.if_else(code == SEND, events["row"], None)
    sent = m.drop_null().to_numpy()
    falls = np.zeros(len(events), int)
    is_same = np.diff(stretch[sends]) == 0
    falls[sends[1:]] = (np.diff(sent) <= 0) & is_same
    events = events.select(["part", "c", "n", "t", "row", "mark"])
    return grouped(
        with_columns(events, stretch=stretch, m=m, falls=falls, heard=heard),
        "stretch",
        "part first part, c first c, mark first mark, n first n, t first t,"
        " row first row, row last last, m min low, m max high,"
        " falls sum falls, heard max heard",
    ).drop_columns("stretch")


def with_text(events: pa.Table) -> pa.Table:
    """Return events with their text; of an open, these are its ids."""
    ids = [events[name].cast(pa.string()) for name in ("gid", "uid", "pid")]
    texts = [pc.binary_join_element_wise(*ids, " ")]
    texts += [events[name] for name in ("reason", "pattern", "key")]
    rows = events.select(["part", "row", "ev", "n", "t", "c", "m"])
    return with_columns(rows, text=pc.coalesce(*texts))


def grouped(table: pa.Table, keys: str, sums: str) -> pa.Table:
    """Return a table grouped by keys.

    *sums* names the column, the function and the new column of each sum.
    """
    names = [x.split() for x in sums.split(",")]
    groups = table.group_by(keys.split(), use_threads=False)
    rows = groups.aggregate(
        [(column, function) for column, function, _ in names]
    )
    return rows.rename_columns(
        [*keys.split(), *(name for _, _, name in names)]
    )


def read(blocks: Sequence[Block], seed: int, batches: Any) -> Iterator[Any]:
    """Yield FACTS of blocks; batches have their numbers and what is exact."""
    for batch in batches:
        for number, *exact in zip(*batch.columns, strict=True):
            part, texts = 0, traces.texts_of(blocks[number.as_py()])
            while chunks := [*itertools.islice(texts, CHUNKS)]:
                parsed = pa.concat_tables(map(traces.parse, chunks))
                table = parsed.combine_chunks()
                rows = facts_of(table, number.as_py(), part, seed, *exact)
                part += 1 + len(table)
                yield from rows.to_batches()
