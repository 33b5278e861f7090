-- What an audit asks of a trace; `audits` runs these in their order.
-- {name} is a view above, or one of matching; :name is a value.
-- shiftleft(1L, 62) is after all events, and -1 before them.

-- Each event has a place in its run, *at*, whatever its number.
-- Of a run that did not begin, only lines count.
-- view: events
select /*+ broadcast(runs) */ facts.*, run, own_file, file, prefix,
    shiftleft(place, 32) + row as at
from {facts} facts join {runs} runs using (block, part)
where run > 0 or ev in ('line', 'jump', 'payload')

-- What clients subscribe to or ask for, as intervals from event to event.
-- A mode lasts until another one with the same topic, a pattern until it goes:
-- *times* is how often a client holds it, below 0 if it gave up what it had not.
-- view: spans, kept
with wish as (
    select *, min(if(ev = 'open', at, null)) over life as opened,
        min(if(ev = 'close', at, null)) over life as closed,
        min_by(text, if(ev = 'open', at, null)) over life as ids,
        ev = 'ctl' as is_mode,
        if(ev = 'ctl', :modes[text], text) as topic
    from {events} where ev in ('open', 'close', 'sub', 'unsub', 'ctl')
    window life as (partition by run, c))
select run, file, prefix, c, n, t, text, ids, opened, closed, is_mode,
    at as since, lead(at, 1, shiftleft(1L, 62)) over later as until,
    sum(if(ev = 'unsub', -1, 1)) over later as times
from wish where ev in ('sub', 'unsub', 'ctl') and topic is not null
window later as (partition by run, c, is_mode, topic order by at)

-- When a client has asked for another order than that of the numbers.
-- view: free
select run, c, since, until from {spans}
where is_mode and text in ('order/stack', 'order/random')

-- When a client was opened and closed, and what was sent to it.
-- *latest* is the highest message that was sent in the usual order, and
-- *heard* where the last one of all was sent.
-- view: lives, kept
with ranked as (
    select s.*, at - row + last as end, at - row + s.heard as sent,
        if(free.c is null, high, null) as top,
        max(if(free.c is null, high, null)) over (partition by s.run, s.c
            order by at rows between unbounded preceding and 1 preceding)
            as before
    from {events} s left join {free} free on s.run = free.run
        and s.c = free.c and since <= at and at < until
    where ev = 'client'),
client as (
    select run, file, c, any_value(mark) as mark, min(at) as first,
        max(end) as last, min_by(n, at) as n, min_by(t, at) as t,
        max(top) as latest, max(sent) as heard,
        bool_or(top is not null and (falls > 0 or low <= before)) as is_mixed
    from ranked group by run, file, c),
life as (
    select run, c, count_if(ev = 'open') as opens,
        min(if(ev = 'open', at, null)) as opened,
        count_if(ev = 'close') as closes,
        min(if(ev = 'close', at, null)) as closed
    from {events} where ev in ('open', 'close') group by run, c)
select * from client left join life using (run, c)

-- Clients that were sent messages out of the usual order.
-- Only what was sent to these is looked at one by one.
-- view: mixed
select run, c from {lives} where is_mixed

-- Who holds which pattern, from when to when.
-- It begins and ends with its client at the latest, even if no open says so.
-- view: subscriptions
select run, prefix, c, ids, text, greatest(since, opened) as since,
    least(until, closed) as until
from {spans}
where not is_mode and times > 0 and since < coalesce(closed, shiftleft(1L, 62))
    and until > coalesce(opened, -1L)

-- The keys of each run.
-- What patterns select is asked once for each, not for each message.
-- view: keys
select distinct run, text as key from {events} where ev = 'msg'

-- Keys that the same patterns select are one case.
-- Its name is a hash, so that no list of patterns is passed on.
-- view: cases, kept
select run, key, patterns, xxhash64(:seed, run, patterns) as case
from (
    select run, key, sort_array(collect_set(pattern)) as patterns
    from {selections} group by run, key)

-- Which clients receive a case, and when.
-- That is while a client holds any of its patterns, however often.
-- view: expected, kept
with pattern as (
    select run, case, explode(patterns) as pattern from (
        select run, case, any_value(patterns) as patterns
        from {cases} group by run, case)),
step as (
    select run, case, c, explode(map(since, 1, until, -1)) as (at, step)
    from pattern join {held} using (run, pattern)),
nested as (
    select *, sum(step) over (partition by run, case, c order by at, step desc
        rows between unbounded preceding and current row) as depth
    from step),
edge as (
    select *, lead(at) over (
        partition by run, case, c order by at, step desc) as until
    from nested where step = 1 and depth = 1 or step = -1 and depth = 0)
select run, case, c, mark, at as since, until
from edge join {lives} using (run, c) where step = 1

-- When an expected client has its echo off as well.
-- Then it does not receive what it publishes itself.
-- view: echo_off
select e.run, e.case, e.c, mark, greatest(e.since, off.since) as since,
    least(e.until, off.until) as until
from {expected} e join {spans} off on e.run = off.run and e.c = off.c
    and is_mode and off.text = 'echo/off'
    and e.since < off.until and off.since < e.until

-- Messages whose clients are not those at which they were expected.
-- Credited with a mark of each expected client, debited with those reached.
-- view: suspects, kept
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

-- The blocks of traces that are to be read again.
-- Each has the suspects in it, and the clients that are mixed.
-- view: blocks, kept
select block, collect_set(m) as messages, collect_set(c) as clients
from (
    select block, m, null as c
    from {events} left semi join {suspects} using (run, m)
    where ev in ('msg', 'reached')
    union all
    select block, null, c from {events} left semi join {mixed} using (run, c)
    where ev = 'client')
group by block

-- The events of suspects, and what was sent to mixed clients.
-- There are few of them, so each one is a row.
-- view: seen, kept
select run, file, shiftleft(place, 32) + row as at, ev, n, t, e.m, e.c,
    text as key, s.m is not null as is_suspect
from {exact} e join {runs} using (block, part)
left join {suspects} s using (run, m) left join {mixed} x using (run, c)
where ev in ('msg', 'send', 'drop')
    and (s.m is not null or ev = 'send' and x.c is not null)

-- When and by whom a suspect was published.
-- Also how often, and whether it was sent or dropped before.
-- view: published, kept
select run, file, m, count_if(ev = 'msg') as times,
    min(if(ev = 'msg', at, null)) as at,
    min(if(ev <> 'msg', at, null)) as reached,
    min_by(n, if(ev = 'msg', at, at + shiftleft(1L, 62))) as n,
    min_by(t, if(ev = 'msg', at, at + shiftleft(1L, 62))) as t,
    min_by(c, at) filter (where ev = 'msg') as publisher,
    min_by(key, at) filter (where ev = 'msg') as key
from {seen} where is_suspect group by run, file, m

-- For each suspect and client: what was expected, and what was done.
-- *too_late* says by when it was to be done, or null if nobody can know.
-- view: deliveries, kept
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
        count_if(ev = 'drop') as drops, max_by(n, at) as last_n,
        max_by(t, at) as last_t
    from {seen} where is_suspect and ev <> 'msg' group by run, m, c)
select run, p.file, m, c, publisher, p.key, times, is_expected is not null
    as is_expected, coalesce(sends, 0) as sends, coalesce(drops, 0) as drops,
    coalesce(last_n, p.n) as n, coalesce(last_t, p.t) as t, opened, case
    when m < latest then 'but a later message was'
    when closed is not null then 'before its client closed'
    when stop is not null then 'before the run stopped' end as too_late
from expected full outer join actual using (run, m, c)
join {published} p using (run, m) left join {lives} using (run, c)
left join (select run, min(stop) as stop from {runs} group by run) using (run)

-- A run begins with a start and ends with its stop, without gaps.
-- A row is a run, or a part whose first number does not follow.
-- view: odd_runs
with part as (
    select *, lag(last) over life as before, lead(n) over life as after,
        first(stop, true) over whole as first_stop,
        bool_or(may_go_on) over whole as is_running
    from {facts} join {runs} using (block, part)
    where ev = 'part' and n is not null
    window life as (partition by run order by place), whole as (
        partition by run order by place
        rows between unbounded preceding and unbounded following))
select 'bad-trace' as breach, bad.file, bad.n, bad.detail
from (
    select explode(array(
        if(n <> before + 1, struct(own_file as file, n as n,
            'event ' || n || ' comes after event ' || before as detail), null),
        if(before is null and run < 0, struct(own_file as file, n as n,
            'it begins neither with start nor where exactly one other file '
            || 'ends' as detail), null),
        if(after is null and first_stop is null and not is_running,
            struct(file, last as n, 'the run has no stop' as detail), null),
        if(after is null and first_stop <> last, struct(file, first_stop as n,
            'it goes on after its stop' as detail), null))) as bad
    from part)
where bad is not null

-- Each line is an event, each event has the next number.
-- No trace has the payload of a secret message.
-- view: odd_lines
select 'bad-trace' as breach, own_file as file, n, t, if(ev = 'jump', null, m)
    as m, c as publisher, if(ev = 'payload', text, null) as key, case ev
    when 'line' then 'this line is no event: ' || text
    when 'jump' then 'event ' || n || ' comes after event ' || m
    else 'the payload of a secret message' end as detail
from {events} where ev in ('line', 'jump', 'payload')

-- A client is opened once, closed once before a stop, and acts between.
-- It gives up only what it holds.
-- view: odd_clients
select 'bad-trace' as breach, file, n, t, c, null as key,
    if(opens = 1 and first >= opened and closes = 0,
        'a client is not closed before the stop',
        'a client has events before its one open, or after its one close')
    as detail
from {lives}
where opens is null or opens <> 1 or first < opened or last > closed
    or closes = 0 and run in (
        select run from {runs} where stop is not null)
union all
select 'bad-trace', file, n, t, c, text,
    'a client unsubscribes from what it does not hold'
from {spans} where times < 0 and not is_mode

-- A message is dropped only for a client that asked for it.
-- One that is deaf hears nothing later.
-- view: bad_drops
select 'bad-drop' as breach, d.file, d.n, d.t, m, d.c, if(d.text = 'deaf',
    'dropped as for a deaf client, which heard more later',
    d.text || ', which was not asked for') as detail
from {events} d left join {lives} l on d.run = l.run and d.c = l.c
left anti join {spans} asked on d.run = asked.run and d.c = asked.c
    and is_mode and asked.text = 'blocking/' || d.text
    and asked.text like '%/discard' and since < at and at < until
where ev = 'drop' and (d.text <> 'deaf' or m < latest or at < l.heard)

-- A message is published once.
-- It is neither sent nor dropped before.
-- view: odd_messages
select 'bad-trace' as breach, file, n, t, m, if(times = 1,
    'sent or dropped before it was published',
    'published ' || times || ' times') as detail
from {published} where times <> 1 or reached < at

-- What is expected is sent or dropped once [TRACE-7]; what is not, never.
-- Without its open, nobody knows which secrets are a client's.
-- view: bad_deliveries
select bad.col1 as breach, file, n, t, m, publisher, c, key, bad.col2 as detail
from (
    select *, explode(array(
        if(is_expected and sends + drops = 0 and too_late is not null,
            struct('missing',
            'expected, and neither sent nor dropped ' || too_late), null),
        if(not is_expected and sends > 0
            and (opened is not null or key not like '!/cred/%'), struct(
            if(key like '!/cred/%', 'secret-leak', 'unowed'),
            'sent to a client at which it was not expected'), null),
        if(sends > 1, struct('duplicate', 'sent more than once'), null),
        if(drops > 0 and (not is_expected or sends + drops > 1),
            struct('bad-drop',
            'dropped, and not expected, or sent or dropped as well'), null)
        )) as bad
    from {deliveries} where times = 1)
where bad is not null

-- What was expected, and not yet sent when the trace ended without a stop.
-- This is no breach: nobody can know.
-- view: undecided
select 'undecided' as breach, file, min(n) as n, min(t) as t, min(m) as m, c,
    'the trace ended before they were sent' as detail, count(*) as messages
from {deliveries}
where is_expected and sends + drops = 0 and too_late is null
group by run, file, c

-- Messages of one publisher are sent in the order of their numbers.
-- A client may ask for another order; that is no breach.
-- view: out_of_order
with sent as (
    select run, file, c, m, min(at) as at, min_by(n, at) as n,
        min_by(t, at) as t
    from {seen} e left semi join {mixed} using (run, c)
    left anti join {free} free on e.run = free.run and e.c = free.c
        and since < at and at < until
    where ev = 'send' group by run, file, c, m),
message as (
    select sent.*, p.c as publisher, p.text as key
    from sent join {events} p on ev = 'msg' and sent.run = p.run
        and sent.m = p.m
    left anti join {deliveries} d on sent.run = d.run and sent.m = d.m
        and sent.c = d.c and not is_expected),
ranked as (
    select *, max(m) over (partition by run, c, publisher order by at
        rows between unbounded preceding and 1 preceding) as high
    from message)
select 'out-of-order' as breach, file, n, t, m, publisher, c, key,
    'sent after message ' || high as detail
from ranked where m < high
