"""How fast the pipeline is, beside what else could do its work.

    make bench-pipeline [ARGS=20000000]
    make bench-pipeline ARGS='20000000 audit'   or: table

It writes traces of that many events and prints a table: the audit, a query
of DuckDB (pip install '.[bench]') that asks which messages did not reach
just whom they were owed to, and a second auditor in one pass of Python.
Then it writes captures of half as many messages, and prints how long it
takes to make Parquet of them, and to add up what a report shows, beside
DuckDB's reader of JSON and its same aggregates.  The small ones show what
Spark's start takes.
Seconds are medians of three runs, one beside the other, all on two cores.
Bytes are the most that one process held at a time.
Licence: ISC, see LICENSE.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TOP = Path(__file__).parents[1]
PATHS = [TOP, TOP / "pipeline", TOP / "tests" / "pipeline"]
RUNS = 3
PROGRAM = [str(TOP / "pipeline" / "sbus_spark")]
ORACLE = (
    "import sys, pipeline_oracle as o; print(len([*o.audit(sys.argv[1])]))"
)
WRITE = """
import sys, pipeline_paper as p
count, keys, patterns, path = sys.argv[1:]
bus = p.PaperBus(int(keys), int(patterns), 200)
with open(path, "w") as file:
    file.writelines(bus.run(int(count)))
"""
QUERY = r"""
import duckdb, sys
base = duckdb.connect()
base.execute("SET threads = 2")
base.execute(f'''
create table e as select n, ev, c, m, coalesce(key, pattern) as text,
    '!/cred/' || gid || '//' || pid || '/x' as own
from read_json('{sys.argv[1]}', format = 'newline_delimited', columns = {{
    n: 'BIGINT', t: 'BIGINT', ev: 'VARCHAR', c: 'BIGINT', m: 'BIGINT',
    key: 'VARCHAR', pattern: 'VARCHAR', gid: 'BIGINT', uid: 'BIGINT',
    pid: 'BIGINT'}});
create table held as
with closed as (select c, n as closed from e where ev = 'close'),
of_own as (select c, own from e where ev = 'open'),
counted as (
    select c, text, n as since, lead(n) over w as until,
        sum(if(ev = 'sub', 1, -1)) over w as times
    from e where ev in ('sub', 'unsub')
    window w as (partition by c, text order by n))
select c, if(text = '!/cred////x', own, text) as pattern, since,
    coalesce(until, closed, 1::bigint << 61) as until
from counted left join closed using (c) join of_own using (c)
where times > 0;
create table chosen as
select pattern, key from (select distinct pattern from held),
    (select distinct text as key from e where ev = 'msg')
where regexp_full_match(key, replace(pattern, '*', '[^/]*')
    || if(pattern = '' or pattern like '%/', '.*', ''));
create table island as
with ordered as (
    select key, c, since, until,
        max(until) over (partition by key, c order by since
            rows between unbounded preceding and 1 preceding) as before
    from held join chosen using (pattern)),
marked as (
    select *, sum(if(since <= before, 0, 1)) over (
        partition by key, c order by since) as place from ordered)
select key, c, min(since) as since, max(until) as until from marked
group by key, c, place;
create table step as
select key, since, sum(sum(mark)) over (
        partition by key order by since) as mark
from (
    select key, since, (hash(c) >> 20)::bigint as mark from island
    union all
    select key, until, -(hash(c) >> 20)::bigint from island)
group by key, since;
create table silent as
select c, text, n as since,
    lead(n, 1, 1::bigint << 61) over (partition by c order by n) as until
from e where ev = 'ctl' and text like 'echo/%';
create table credit as
select m, coalesce(mark, 0) as mark from
    (select n, m, text as key from e where ev = 'msg') as msg
    asof left join step on msg.key = step.key and msg.n > step.since
union all
select m, -(hash(c) >> 20)::bigint from e join silent using (c)
    join island on island.key = e.text and island.c = e.c
        and e.n > island.since and e.n < island.until
where ev = 'msg' and silent.text = 'echo/off'
    and n > silent.since and n < silent.until;
''')
print(base.execute('''
select count(*) from (
    select m from (
        select m, mark from credit
        union all
        select m, -sum((hash(c) >> 20)::bigint) from e
        where ev in ('send', 'drop') group by m)
    group by m having sum(mark) <> 0)
''').fetchone()[0])
"""
CAPTURE = """
import sys, pathlib, pipeline_paper as p
count, path = sys.argv[1:]
p.write_segments(pathlib.Path(path), int(count) // 100_000, 100_000)
"""
INGEST = r"""
import duckdb, sys
capture, table = sys.argv[1:]
base = duckdb.connect()
base.execute("SET threads = 2")
base.execute(f'''
copy (
    select rec, n, t, key, size, from_base64(data) as data,
        make_timestamp(t // 1000)::date as day, host
    from read_json('{capture}/*.jsonl', format = 'newline_delimited',
        columns = {{rec: 'VARCHAR', n: 'BIGINT', t: 'BIGINT', host: 'VARCHAR',
            key: 'VARCHAR', size: 'BIGINT', data: 'VARCHAR'}})
) to '{table}' (format parquet, partition_by (day, host));
''')
"""
REPORT = r"""
import duckdb, sys
base = duckdb.connect()
base.execute("SET threads = 2")
files = f"read_parquet('{sys.argv[1]}/day=*/host=*/*.parquet')"
base.execute(f"create view m as from {files}")
sizes = "approx_quantile(size, 0.5), approx_quantile(size, 0.99)"
numbers = f"count(*), sum(size), {sizes}, max(size), min(t), max(t)"
(first, last) = base.execute(f"select {numbers} from m").fetchone()[-2:]
width = max(1, (last - first) // 120)
for query in (
    f"select key, {numbers} from m group by key order by 2 desc limit 10000",
    f"select host, {numbers} from m group by host",
    f"select t // {width}, {numbers} from m group by 1",
    f"select key, t // {width}, count(*) from m group by 1, 2",
    "select ceil(log2(size + 1)), count(*) from m group by 1",
    "select count(distinct key) from m",
    "select host, rec, count(*), max(n) - count(distinct n) from m "
    "group by 1, 2",
):
    base.execute(query).fetchall()
"""


def run(*command: str) -> tuple[float, int]:
    """Run a program; return its seconds, and bytes of its largest process."""
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, PATHS))}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    most, ended = [0], threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, most, ended))
    watcher.start()
    process.wait()
    seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    return seconds, most[0]


def watch(session: int, most: list[int], ended: threading.Event) -> None:
    """Keep how large the largest process of a session and below has been."""
    while not ended.wait(0.2):
        ours = {session}
        for path in sorted(Path("/proc").glob("[0-9]*"), key=number_of):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                pages = int((path / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            if int(fields[1]) in ours or int(fields[3]) in ours:
                ours.add(int(path.name))
                most[0] = max(most[0], pages * os.sysconf("SC_PAGE_SIZE"))


def number_of(path: Path) -> int:
    return int(path.name)


def compare(name: str, programs: dict[str, list[str]]) -> None:
    """Run programs by turns, and print what each takes."""
    taken = [
        {by: run(*command) for by, command in programs.items()}
        for _ in range(RUNS)
    ]
    for by in programs:
        seconds = statistics.median(one[by][0] for one in taken)
        size = max(one[by][1] for one in taken) >> 20
        print(f"| {name} | {by} | {seconds:.1f} | {size:,} |", flush=True)


def bench_audit(count: int, folder: str) -> None:
    """Compare what audits a trace."""
    path = f"{folder}/trace"
    sizes = {
        f"{count:,} events": (count, 2_000, 500),
        f"{count // 10:,} events": (count // 10, 2_000, 500),
        "10,000 events": (10_000, 2_000, 500),
        "100,000 events": (100_000, 2_000, 500),
        "the same, 10,000 keys, 1,000 patterns": (100_000, 10_000, 1_000),
    }
    for name, (events, keys, patterns) in sizes.items():
        run("-c", WRITE, str(events), str(keys), str(patterns), path)
        programs = {"audit": [*PROGRAM, "audit", path]}
        if events == count:
            programs["DuckDB"] = ["-c", QUERY, path]
            programs["one pass"] = ["-c", ORACLE, path]
        compare(name, programs)
    os.unlink(path)


def bench_table(count: int, folder: str) -> None:
    """Compare what makes a table of a capture, and what reports on one."""
    for messages in (count // 2, 100_000):
        capture, table = f"{folder}/capture-{messages}", f"{folder}/table"
        run("-c", CAPTURE, str(messages), capture)
        remade = "import shutil, sys; shutil.rmtree(sys.argv[1], True); "
        ours = remade + "import sbus_spark as s; s.main(sys.argv[2:])"
        theirs = f"{remade}del sys.argv[1]\n{INGEST}"
        its = f"{table}-duckdb"
        programs = {
            "ingest": ["-c", ours, table, "ingest", capture, table],
            "DuckDB": ["-c", theirs, its, capture, its],
        }
        compare(f"{messages:,} messages to a table", programs)
        page = f"{folder}/report.html"
        programs = {
            "report": [*PROGRAM, "report", table, "-o", page],
            "DuckDB": ["-c", REPORT, its],
        }
        compare(f"a report on {messages:,} messages", programs)


BENCHES = {"audit": bench_audit, "table": bench_table}


def main() -> None:
    """Print the tables that are asked for."""
    asked = argparse.ArgumentParser(description="How fast the pipeline is.")
    asked.add_argument("count", type=int, nargs="?", default=20_000_000)
    asked.add_argument("names", nargs="*", metavar="{audit,table}")
    options = asked.parse_args()
    wrong = {*options.names}.difference(BENCHES)
    if options.count < 1 or wrong:
        asked.error("a number of events, audit or table is wanted")
    print("| what | by | seconds | MiB of the largest process |")
    print("|---|---|---|---|", flush=True)
    for name in options.names or BENCHES:
        with tempfile.TemporaryDirectory(prefix="sbus-") as folder:
            BENCHES[name](options.count, folder)


if __name__ == "__main__":
    main()
