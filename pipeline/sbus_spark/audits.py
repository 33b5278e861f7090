"""Audit: was every delivery expected, and every expected delivery made?

See spec/3-protocol.md to spec/9-running.md.  The idea:

- `events` sums up each block of a trace.  From a row for each part the driver
  finds where runs begin and go on (`outline`), and gives each part its place.
  So each event has a place in its run (*at*), whatever its number.
- What clients subscribed to or asked for are intervals (*spans*).  Keys that
  the same patterns select are one case.  *expected* says which clients
  receive a case, and when.
- A message is credited with a random mark of each client that it is expected
  at, and debited with those of the clients that it reached.  If the sum is not
  zero, it is one of the *suspects*.
- Only the blocks with suspects, and with clients that were sent messages out
  of order, are read again, and looked at event by event (*seen*).
"""

from __future__ import annotations

import itertools
import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

import sbus

from . import events, matching

END = 1 << 62  # after all events
# What a control message sets, by its key
MODES = ", ".join(
    f"'{key.decode()}', '{key.decode().rpartition('/')[0]}'"
    for key in sbus.CHOICES
)
# When a client is free of the order of messages
FREE = "is_mode and free.text in ('order/stack', 'order/random')"
RUNS = """
block long, part long, place long, own_file string, run long, file string,
prefix string
"""
# Run 0 is of files whose beginning is not known: only their lines count
EVENTS = """
select /*+ broadcast(runs) */ facts.*, run, own_file, file, prefix,
    shiftleft(place, 32) + row as at
from {facts} facts join {runs} runs using (block, part)
where run > 0 or ev in ('line', 'jump', 'payload')
"""
HISTORIES = {
    "spans": f"""
with own as (
    select *, min(if(ev = 'open', at, null)) over life as opened,
        min(if(ev = 'close', at, null)) over life as closed,
        min_by(text, if(ev = 'open', at, null)) over life as own,
        ev = 'ctl' as is_mode,
        if(ev = 'ctl', map({MODES})[text], text) as topic
    from {{events}} where ev in ('open', 'close', 'sub', 'unsub', 'ctl')
    window life as (partition by run, c))
select run, file, prefix, c, n, text, own, opened, closed, is_mode,
    at as since, lead(at, 1, {END}) over later as until,
    sum(if(ev = 'unsub', -1, 1)) over later as times
from own where ev in ('sub', 'unsub', 'ctl') and topic is not null
window later as (partition by run, c, is_mode, topic order by at)
""",
    # *latest* is the highest message that was sent in the usual order
    "lives": f"""
with ranked as (
    select s.*, at - row + last as end, if(free.c is null, high, null) as top,
        max(if(free.c is null, high, null)) over (partition by s.run, s.c
            order by at rows between unbounded preceding and 1 preceding)
            as before
    from {{events}} s left join {{spans}} free on s.run = free.run
        and s.c = free.c and {FREE} and since <= at and at < until
    where ev = 'client'),
heard as (
    select run, file, c, any_value(mark) as mark, min(at) as first,
        max(end) as last, min_by(n, at) as n, max(top) as latest,
        bool_or(top is not null and (falls > 0 or low <= before)) as is_mixed
    from ranked group by run, file, c),
told as (
    select run, c, count_if(ev = 'open') as opens,
        min(if(ev = 'open', at, null)) as opened,
        count_if(ev = 'close') as closes,
        min(if(ev = 'close', at, null)) as closed
    from {{events}} where ev in ('open', 'close') group by run, c)
select * from heard left join told using (run, c)
""",
    "mixed": "select run, c from {lives} where is_mixed",
    "subscriptions": f"""
select run, prefix, c, own, text, greatest(since, opened) as since,
    least(until, closed) as until
from {{spans}}
where not is_mode and times > 0 and since < coalesce(closed, {END})
    and until > opened
""",
    "keys": "select distinct run, text as key from {events} where ev = 'msg'",
}
EXPECTATIONS = {
    "cases": """
select run, key, patterns, xxhash64({seed}L, run, patterns) as case
from (
    select run, key, sort_array(collect_set(pattern)) as patterns
    from {selections} group by run, key)
""",
    # When a client holds any pattern of a case
    "expected": """
with one as (
    select run, case, explode(patterns) as pattern from (
        select run, case, any_value(patterns) as patterns
        from {cases} group by run, case)),
step as (
    select run, case, c, explode(map(since, 1, until, -1)) as (at, step)
    from one join {held} using (run, pattern)),
deep as (
    select *, sum(step) over (partition by run, case, c order by at, step desc
        rows between unbounded preceding and current row) as depth
    from step),
edge as (
    select *, lead(at) over (
        partition by run, case, c order by at, step desc) as until
    from deep where step = 1 and depth = 1 or step = -1 and depth = 0)
select run, case, c, mark, at as since, until
from edge join {lives} using (run, c) where step = 1
""",
    # When it has its echo off as well
    "echo_off": """
select e.run, e.case, e.c, mark, greatest(e.since, off.since) as since,
    least(e.until, off.until) as until
from {expected} e join {spans} off on e.run = off.run and e.c = off.c
    and is_mode and off.text = 'echo/off'
    and e.since < off.until and off.since < e.until
""",
    "suspects": """
with step as (
    select e.run, coalesce(case, m) as case, at, m, c, 0L as mark
    from {events} e left join {cases} cases
        on e.run = cases.run and text = key
    where ev = 'msg'
    union all select run, case, since, null, c, mark from {expected}
    union all select run, case, until, null, c, -mark from {expected}),
credited as (
    select *, sum(mark) over (partition by run, case order by at) as credit
    from step),
sums as (
    select e.run, m, at, null as reached, credit - coalesce(s.mark, 0) as sum
    from credited e left join {echo_off} s on e.run = s.run
        and e.case = s.case and e.c = s.c and s.since < at and at < s.until
    where m is not null
    union all
    select run, m, null, at, -mark from {events} where ev = 'reached')
select run, m from sums group by run, m
having sum(sum) <> 0 or count(at) <> 1 or min(reached) < min(at)
""",
    "blocks": """
select block, collect_set(m) as messages, collect_set(c) as clients
from (
    select block, m, null as c
    from {events} left semi join {suspects} using (run, m)
    where ev in ('msg', 'reached')
    union all
    select block, null, c from {events} left semi join {mixed} using (run, c)
    where ev = 'client')
group by block
""",
}
EXACT = {
    "seen": """
select run, file, shiftleft(place, 32) + row as at, ev, n, e.m, e.c,
    text as key, s.m is not null as is_suspect
from {exact} e join {runs} using (block, part)
left join {suspects} s using (run, m) left join {mixed} x using (run, c)
where ev in ('msg', 'send', 'drop')
    and (s.m is not null or ev = 'send' and x.c is not null)
""",
    "published": f"""
select run, file, m, count_if(ev = 'msg') as times,
    min(if(ev = 'msg', at, null)) as at,
    min(if(ev <> 'msg', at, null)) as reached,
    min_by(n, if(ev = 'msg', at, at + {END})) as n,
    min_by(c, at) filter (where ev = 'msg') as publisher,
    min_by(key, at) filter (where ev = 'msg') as key
from {{seen}} where is_suspect group by run, file, m
""",
    "deliveries": """
with expected as (
    select p.run, p.m, e.c, true as is_expected
    from {published} p join {cases} cases using (run, key)
    join {expected} e on p.run = e.run and cases.case = e.case
        and e.since < at and at < e.until
    left anti join {echo_off} s on p.run = s.run and cases.case = s.case
        and publisher = s.c and e.c = s.c and s.since < at and at < s.until
    where times = 1),
actual as (
    select run, m, c, count_if(ev = 'send') as sends,
        count_if(ev = 'drop') as drops, max_by(n, at) as last_n
    from {seen} where is_suspect and ev <> 'msg' group by run, m, c)
select run, p.file, m, c, publisher, p.key, times, is_expected is not null
    as is_expected, coalesce(sends, 0) as sends, coalesce(drops, 0) as drops,
    coalesce(last_n, p.n) as n, latest, closed
from expected full outer join actual using (run, m, c)
join {published} p using (run, m) left join {lives} using (run, c)
""",
}
# Several queries use these, or one that reads files again
KEPT = {"spans", "lives", "cases", "expected", "suspects", "blocks"}
KEPT |= {"seen", "published", "deliveries"}
ODD_LINES = """
select 'bad-trace' as breach, own_file as file, n, if(ev = 'jump', null, m)
    as m, c as publisher, if(ev = 'payload', text, null) as key, case ev
    when 'line' then 'this line is no event: ' || text
    when 'jump' then 'event ' || n || ' comes after event ' || m
    else 'the payload of a secret message' end as detail
from {events} where ev in ('line', 'jump', 'payload')
"""
ODD_CLIENTS = """
select 'bad-trace' as breach, file, n, c, null as key,
    'a client has events before its one open, or after its one close'
    as detail
from {lives}
where opens is null or opens <> 1 or first < opened or closes > 1
    or last > closed
union all
select 'bad-trace', file, n, c, text,
    'a client unsubscribes from what it does not hold'
from {spans} where times < 0 and not is_mode
"""
BAD_DROPS = """
select 'bad-drop' as breach, d.file, d.n, m, d.c, if(d.text = 'deaf',
    'dropped as for a deaf client, which heard more later',
    d.text || ', which was not asked for') as detail
from {events} d left join {lives} l on d.run = l.run and d.c = l.c
left anti join {spans} asked on d.run = asked.run and d.c = asked.c
    and is_mode and asked.text = 'blocking/' || d.text
    and asked.text like '%/discard' and since < at and at < until
where ev = 'drop' and (d.text <> 'deaf' or m < latest)
"""
ODD_MESSAGES = """
select 'bad-trace' as breach, file, n, m, if(times = 1,
    'sent or dropped before it was published',
    'published ' || times || ' times') as detail
from {published} where times <> 1 or reached < at
"""
BAD_DELIVERIES = """
select bad.col1 as breach, file, n, m, publisher, c, key, bad.col2 as detail
from (
    select *, explode(array(
        if(is_expected and sends + drops = 0 and m < latest, struct('missing',
            'expected, and neither sent nor dropped, but a later one was'),
            null),
        if(not is_expected and sends > 0, struct(
            if(key like '!/cred/%', 'secret-leak', 'unowed'),
            'sent to a client at which it was not expected'), null),
        if(sends > 1, struct('duplicate', 'sent more than once'), null),
        if(drops > 0 and (not is_expected or sends + drops > 1),
            struct('bad-drop', 'dropped, and not expected or sent as well'),
            null))) as bad
    from {deliveries} where times = 1)
where bad is not null
"""
UNDECIDED = """
select 'undecided' as breach, file, min(n) as n, min(m) as m, c,
    if(closed is null, 'the trace ended before they were sent',
        'the client closed before they were sent') as detail,
    count(*) as messages
from {deliveries}
where is_expected and sends + drops = 0 and coalesce(m >= latest, true)
group by run, file, c, closed
"""
OUT_OF_ORDER = f"""
with sent as (
    select run, file, c, m, min(at) as at, min_by(n, at) as n
    from {{seen}} e left semi join {{mixed}} using (run, c)
    left anti join {{spans}} free on e.run = free.run and e.c = free.c
        and {FREE} and since < at and at < until
    where ev = 'send' group by run, file, c, m),
known as (
    select sent.*, p.c as publisher, p.text as key
    from sent join {{events}} p on ev = 'msg' and sent.run = p.run
        and sent.m = p.m
    left anti join {{deliveries}} d on sent.run = d.run and sent.m = d.m
        and sent.c = d.c and not is_expected),
ranked as (
    select *, max(m) over (partition by run, c, publisher order by at
        rows between unbounded preceding and 1 preceding) as high
    from known)
select 'out-of-order' as breach, file, n, m, publisher, c, key,
    'sent after message ' || high as detail
from ranked where m < high
"""
ROWS = (
    "breach string, file string, n long, m long, publisher long, c long,"
    " key string, detail string, messages long"
)


def audit(
    spark: SparkSession, paths: Sequence[str], is_running: bool = False
) -> DataFrame:
    """Return all that is wrong with some traces, a row for each breach.

    *paths* are files, or directories of them.  If a bus *is_running*, the
    last run of a trace need not have stopped.

    | column | type | meaning |
    |---|---|---|
    | breach | string | missing, unowed, secret-leak, duplicate, bad-drop, |
    | | | out-of-order, bad-trace; or undecided |
    | file | string | where the run began; of a line, where it stands |
    | n, m | long | the numbers of an event and a message, or null |
    | publisher, c | long | clients, or null |
    | key | string | a routing key or pattern, or null |
    | detail | string | what is wrong |
    | messages | long | how many messages the row stands for |

    A row `undecided` is no breach: it counts messages that were expected at a
    client, and of which nobody can know.
    Raises: InputError if there is no such file, or it is no trace; OSError.
    """
    blocks = [x for y in dict.fromkeys(paths) for x in events.blocks_of(y)]
    seed = secrets.randbits(62)
    tasks = events.tasks_for(blocks)
    numbers = spark.range(0, len(blocks), 1, tasks)
    facts = events.facts(numbers, blocks, seed).localCheckpoint()
    runs, told = outline(facts, blocks, is_running)
    views: dict[str, Any] = {"seed": seed, "facts": facts}
    views["runs"] = spark.createDataFrame(runs, RUNS)
    views["events"] = spark.sql(EVENTS, **views)

    def compute(queries: dict[str, str]) -> None:  # each names earlier ones
        for name, query in queries.items():
            views[name] = spark.sql(query, **views)
            if name in KEPT:
                views[name] = views[name].localCheckpoint()

    compute(HISTORIES)
    held = matching.holds(views["subscriptions"]).localCheckpoint()
    selections = matching.selections(views["keys"], held)
    views |= {"held": held, "selections": selections}
    compute(EXPECTATIONS)
    found = [ODD_LINES, ODD_CLIENTS, BAD_DROPS]
    if not views["blocks"].isEmpty():
        again = views["blocks"].repartition(tasks)
        views["exact"] = events.facts(again, blocks, seed)
        compute(EXACT)
        found += [ODD_MESSAGES, BAD_DELIVERIES, UNDECIDED]
    if not views["mixed"].isEmpty():
        found.append(OUT_OF_ORDER)
    rows = spark.createDataFrame(told, ROWS)
    for query in found:
        more = spark.sql(query, **views)
        rows = rows.unionByName(more, allowMissingColumns=True)
    return rows.fillna(1, "messages").localCheckpoint()


def summary(rows: DataFrame) -> dict[str, int]:
    """Return the messages or breaches of each kind, by its name."""
    counts = rows.groupBy("breach").sum("messages").collect()
    return {str(name): int(count) for name, count in sorted(counts)}


def outline(
    facts: DataFrame, blocks: Sequence[events.Block], is_running: bool
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the RUNS in traces, and as ROWS what is wrong with whole runs."""
    parts: dict[str, list[Row]] = defaultdict(list)
    columns = ("block", "part", "n", "last", "text", "high")
    for part in sorted(facts.where("ev = 'part'").select(*columns).collect()):
        parts[blocks[part.block].path].append(part)
    runs: list[tuple[Any, ...]] = []
    told: list[tuple[Any, ...]] = []

    def wrong(file: str, n: int, detail: str) -> None:
        told.append(("bad-trace", file, n, *[None] * 4, detail, 1))

    count = 0
    for chain in chains(parts):
        own: list[list[tuple[str, Row]]] = [[]]  # of each run; first of none
        for file in chain:
            for part in parts[file]:
                if part.text is not None:
                    own.append([])
                own[-1].append((file, part))
        for run in filter(None, own):
            began, first = run[0]
            count += first.text is not None
            about = (count if first.text is not None else 0, began, first.text)
            for file, part in run:
                place = part.block, part.part, len(runs), file
                runs.append((*place, *about))
            some = [(file, part) for file, part in run if part.n is not None]
            if first.text is None and some:
                wrong(some[0][0], some[0][1].n, NO_START)
            for (_, one), (file, two) in itertools.pairwise(some):
                if two.n != one.last + 1:
                    what = f"event {two.n} comes after event {one.last}"
                    wrong(file, two.n, what)
            stops = [part.high for _, part in some if part.high is not None]
            if some and not stops and not (is_running and run is own[-1]):
                wrong(began, some[-1][1].last, "the run has no stop")
            elif stops and stops[0] != some[-1][1].last:
                wrong(began, stops[0], "it goes on after its stop")
    return runs, told


NO_START = "it begins neither with start nor where exactly one other file ends"


def chains(parts: dict[str, list[Row]]) -> list[list[str]]:
    """Return lists of files, in which each goes on where the last ends.

    A file that does not begin with a start needs exactly one other that ends
    there, and no third one that also goes on from there.
    """
    last, first = defaultdict(list), defaultdict(list)
    for file, own in parts.items():
        some = [part for part in own if part.n is not None]
        if some and some[0].text is None:
            first[some[0].n].append(file)
        ends = [x.high for x in some if {x.text, x.high} != {None}]
        if some and (not ends or ends[-1] is None):
            last[some[-1].last + 1].append(file)
    after = {
        last[n][0]: some[0]
        for n, some in first.items()
        if len(some) == len(last[n]) == 1 and some != last[n]
    }
    found: list[list[str]] = []
    seen: set[str] = set()
    for file in sorted(parts, key={*after.values()}.__contains__):
        found.append([])
        while file and file not in seen:
            seen.add(file)
            found[-1].append(file)
            file = after.get(file, "")
    return found
