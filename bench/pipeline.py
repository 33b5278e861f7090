"""How fast the pipeline is, beside DuckDB and an older version.

    make bench-pipeline
    make bench-pipeline ARGS='--old DIR --only audit --count 1000000'

Each program runs in turns with those beside it, from start to exit.  The
table has its seconds, those that the processors of the machine worked
meanwhile, and the most memory that one process held.

DuckDB (pip install '.[bench]') audits a trace: it counts the messages that
did not reach just those clients that had to receive them.  It ingests a
capture by making Parquet of it.  --old names a checkout of an older version,
whose dependencies are installed as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from . import harness
from .harness import TOP, Sample, Sides

PAPER = str(TOP / "tests" / "pipeline" / "pipeline_paper.py")
FIGURES = ("seconds", "CPU seconds", "MiB")
ABOUT = {"audit": "a trace is checked", "ingest": "a capture becomes a table"}

# ==== What DuckDB does =======================================================

CONNECT = """
import duckdb, sys
base = duckdb.connect(config={"threads": 2})
"""
QUERIES = {
    "audit": r"""
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
""",
    "ingest": r"""
capture, table = sys.argv[1:]
base.execute(f'''
copy (
    select rec, n, t, key, size, from_base64(data) as data,
        make_timestamp(t // 1000)::date as day, host
    from read_json('{capture}/*.jsonl', format = 'newline_delimited',
        columns = {{rec: 'VARCHAR', n: 'BIGINT', t: 'BIGINT', host: 'VARCHAR',
            key: 'VARCHAR', size: 'BIGINT', data: 'VARCHAR'}})
) to '{table}' (format parquet, partition_by (day, host));
''')
""",
}

# ==== Programs ===============================================================


def run(name: str, top: str, *command: str) -> Sample:
    """Run a checkout's program to its end.  Raises: BenchError."""
    words = [sys.executable, *command]
    env = {**os.environ, "PYTHONPATH": top}
    start, cpu, seconds, most = time.monotonic(), busy(), 0.0, 0
    with contextlib.ExitStack() as running:
        log = running.enter_context(tempfile.TemporaryFile())
        started = harness.started(words, stderr=log, env=env, cwd=top)
        program = running.enter_context(started)
        with contextlib.suppress(ChildProcessError):  # all have ended
            while True:
                pid, code, used = os.wait4(-1, 0)
                if pid == program.pid:
                    seconds = time.monotonic() - start
                    program.returncode = os.waitstatus_to_exitcode(code)
                most = max(most, used.ru_maxrss)
        if program.returncode:
            log.seek(0)
            raise harness.failure(name, program.returncode, log.read())
    cpu = busy() - cpu
    return {"seconds": seconds, "CPU seconds": cpu, "MiB": most / 1024}


def busy() -> float:
    """Return how long the processors worked, for what has ended as well."""
    words = Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    user, nice, system, _, _, *interrupts = map(int, words)
    return (user + nice + system + sum(interrupts)) * harness.TICK_SECONDS


def measure(task: str, by: str, where: str, source: str) -> Sample:
    """Return what DuckDB takes for a task, or a checkout that is there."""
    table = f"{source}-table"
    shutil.rmtree(table, ignore_errors=True)
    words = [source, table] if task == "ingest" else [source]
    if by == "DuckDB":
        return run(by, str(TOP), "-c", CONNECT + QUERIES[task], *words)
    return run(by, where, f"{where}/pipeline/sbus_spark", task, *words)


def sides_of(folder: str, count: int, old: str | None, task: str) -> Sides:
    """Return what is compared in a task.  Raises: BenchError."""
    made = "trace" if task == "audit" else "capture"
    source = f"{folder}/{made}"
    run(made, str(TOP), PAPER, made, str(count), source)
    older = {"old": os.path.abspath(old)} if old else {}
    places = {"sbus_spark": str(TOP), **older}
    return {
        by: partial(measure, task, by, where, source)
        for by, where in {**places, "DuckDB": ""}.items()
    }


def main() -> int:
    """Print the table; return 1 if a task failed."""
    parser = harness.OptionParser("bench.pipeline", __doc__, rounds=3)
    parser.add_argument("--old", metavar="DIR")
    parser.add_number("--count", 10_000_000, least=100_000)
    options = parser.parse(ABOUT)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ["TMPDIR"] = folder  # for what an interrupted program leaves
        sides = partial(sides_of, folder, options.count, options.old)
        return harness.print_table(options, FIGURES, sides)


if __name__ == "__main__":
    harness.run(main)
