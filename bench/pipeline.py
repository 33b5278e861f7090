"""How fast the pipeline audits a trace, beside what else could do it.

    make bench-pipeline [ARGS=20000000]

It writes traces of that many events and prints a table: the audit, a query
of DuckDB (pip install '.[bench]') that asks which messages did not reach
just whom they were owed to, and a second auditor in one pass of Python.
Seconds are medians of three runs, one beside the other, all on two cores.
Bytes are the most that one process held at a time.
Licence: ISC, see LICENSE.
"""

from __future__ import annotations

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


def main() -> None:
    """Write the traces, and print the table."""
    count = int((sys.argv[1:] or ["20000000"])[0])
    audit = [str(TOP / "pipeline" / "sbus_spark"), "audit"]
    with tempfile.TemporaryDirectory(prefix="sbus-") as folder:
        sizes = {
            f"{count:,} events": (count, 2_000, 500),
            f"{count // 10:,} events": (count // 10, 2_000, 500),
            "10,000 events": (10_000, 2_000, 500),
            "100,000 events": (100_000, 2_000, 500),
            "the same, 10,000 keys, 1,000 patterns": (100_000, 10_000, 1_000),
        }
        print("| trace | by | seconds | MiB of the largest process |")
        print("|---|---|---|---|", flush=True)
        for name, (events, keys, patterns) in sizes.items():
            path = f"{folder}/trace"
            run("-c", WRITE, str(events), str(keys), str(patterns), path)
            programs = {"audit": [*audit, path]}
            if events == count:
                programs["DuckDB"] = ["-c", QUERY, path]
                programs["one pass"] = ["-c", ORACLE, path]
            taken = [
                {by: run(*command) for by, command in programs.items()}
                for _ in range(RUNS)
            ]
            for by in programs:
                seconds = statistics.median(one[by][0] for one in taken)
                size = max(one[by][1] for one in taken) >> 20
                row = f"| {name} | {by} | {seconds:.1f} | {size:,} |"
                print(row, flush=True)


if __name__ == "__main__":
    main()
