"""How fast the pipeline is, beside DuckDB and an older version.

    make bench-pipeline
    make bench-pipeline ARGS='--old DIR audit ingest report folders'

Each program is run three times, in turns with those beside it; the table has
medians of seconds and of seconds of the processor, from start to exit, and
the most memory that one process held.  DuckDB (pip install '.[bench]') asks
which messages did not reach just those whom they were owed to, makes Parquet
of captures, and adds up what a report shows.  --old names a checkout of an
older version whose own dependencies are installed, too.
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
from typing import Any

TOP = Path(__file__).parents[1]
PATHS = [TOP, TOP / "pipeline", TOP / "tests" / "pipeline"]
RUNS = 3
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
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


FOLDERS = """
import sys, pathlib, pipeline_paper as p
count, path = sys.argv[1:]
for at in range(int(count)):
    day = pathlib.Path(path, f"2025-{at % 12 + 1:02}-{at // 12 % 28 + 1:02}")
    day.mkdir(parents=True, exist_ok=True)
    line = p.capture_line(1, rec=f"R{at}", host=f"h{at}")
    (day / f"R{at}-000001.jsonl").write_text(line)
"""
ONE_MORE = """
import pathlib, runpy, sys, time, pipeline_paper as p
capture, path = sys.argv[1:3]
del sys.argv[1:3]
name = f"R{time.time_ns()}"
file = pathlib.Path(capture, f"{name}-000001.jsonl")
file.write_text(p.capture_line(1, rec=name))
sys.argv[0] = path
runpy.run_path(path, run_name="__main__")
"""


def run(*command: str) -> tuple[float, float, int]:
    """Run a program.

    Return its seconds, those of the processor with all that it starts, and
    the bytes of its largest process.
    """
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, PATHS))}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    used: dict[int, float] = {}
    most, ended = [0], threading.Event()
    watcher = threading.Thread(
        target=watch, args=(process.pid, used, most, ended)
    )
    watcher.start()
    process.wait()
    seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    return seconds, sum(used.values()), most[0]


def watch(
    session: int, used: dict[int, float], most: list[int], ended: Any
) -> None:
    """Keep what the processes of a session and below have used so far."""
    while not ended.wait(0.1):
        ours = {session}
        for path in sorted(Path("/proc").glob("[0-9]*"), key=number_of):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                pages = int((path / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            if int(fields[1]) in ours or int(fields[3]) in ours:
                pid = number_of(path)
                ours.add(pid)
                used[pid] = (int(fields[11]) + int(fields[12])) / TICK
                most[0] = max(most[0], pages * PAGE)


def number_of(path: Path) -> int:
    return int(path.name)


def compare(name: str, programs: dict[str, list[str]]) -> None:
    """Run programs in turns, and print what each takes."""
    taken = [
        {by: run(*command) for by, command in programs.items()}
        for _ in range(RUNS)
    ]
    for by in programs:
        wall, cpu = (
            statistics.median(one[by][kind] for one in taken)
            for kind in (0, 1)
        )
        size = max(one[by][2] for one in taken) >> 20
        print(f"| {name} | {by} | {wall:.1f} | {cpu:.1f} | {size:,} |")
        sys.stdout.flush()


def programs_of(old: str | None, *arguments: str) -> dict[str, list[str]]:
    """Return our command, and the same of an older version."""
    checkouts = {"ours": str(TOP)} | ({"old": old} if old else {})
    return {
        by: [f"{checkout}/pipeline/sbus_spark", *arguments]
        for by, checkout in checkouts.items()
    }


def bench_audit(count: int, old: str | None, folder: str) -> None:
    """Compare what audits traces of many sizes."""
    path = f"{folder}/trace"
    for events in (10_000, count // 5, count):
        run("-c", WRITE, str(events), "2000", "500", path)
        programs = programs_of(old, "audit", path)
        programs["DuckDB"] = ["-c", QUERY, path]
        compare(f"audit of {events:,} events", programs)


def bench_ingest(count: int, old: str | None, folder: str) -> None:
    """Compare what makes a table of a capture."""
    capture = f"{folder}/capture"
    run("-c", CAPTURE, str(count), capture)
    again = "import runpy, shutil, sys; shutil.rmtree(sys.argv.pop(1), True)"
    again += "; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    programs = {}
    for by, (path, *words) in programs_of(old, "ingest", capture).items():
        table = f"{folder}/table-{by}"
        programs[by] = ["-c", again, table, path, *words, table]
    theirs = "import shutil, sys; shutil.rmtree(sys.argv[2], True)\n" + INGEST
    programs["DuckDB"] = ["-c", theirs, capture, f"{folder}/table-DuckDB"]
    compare(f"ingest of {count:,} messages", programs)


def bench_report(count: int, old: str | None, folder: str) -> None:
    """Compare what reports on the tables of bench_ingest."""
    programs = {}
    for by, (path, *words) in programs_of(old, "report").items():
        page = f"{folder}/report-{by}.html"
        table = f"{folder}/table-{by}"
        programs[by] = [path, *words, table, "-o", page]
    programs["DuckDB"] = ["-c", REPORT, f"{folder}/table-DuckDB"]
    compare(f"report on {count:,} messages", programs)


def bench_folders(count: int, old: str | None, folder: str) -> None:
    """Compare an ingest of one new segment over few folders and many."""
    for folders in (10, 2_000):
        capture, table = f"{folder}/{folders}", f"{folder}/table-{folders}"
        run("-c", FOLDERS, str(folders), capture)
        (path, *words) = programs_of(None, "ingest", capture, table)["ours"]
        run(path, *words)
        programs = {"ours": ["-c", ONE_MORE, capture, path, *words]}
        compare(f"one segment over {folders:,} folders", programs)


BENCHES = {
    "audit": bench_audit,
    "ingest": bench_ingest,
    "report": bench_report,
    "folders": bench_folders,
}


def main() -> None:
    """Print the tables that are asked for."""
    asked = argparse.ArgumentParser(description="How fast the pipeline is.")
    asked.add_argument("--count", type=int, default=10_000_000)
    asked.add_argument("--old", metavar="DIR")
    asked.add_argument("names", nargs="*", metavar="{" + ",".join(BENCHES))
    options = asked.parse_args()
    if options.count < 100_000 or {*options.names}.difference(BENCHES):
        asked.error(f"100,000 messages at least, and {', '.join(BENCHES)}")
    print("| what | by | seconds | of the processor | MiB |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="sbus-") as folder:
        for name in options.names or BENCHES:
            BENCHES[name](options.count, options.old, folder)


if __name__ == "__main__":
    main()
