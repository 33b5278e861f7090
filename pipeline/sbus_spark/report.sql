-- What a report asks of the messages of a table; `report` runs these in their
-- order.  {name} is a view above, or the messages; :name is a value.

-- The sums of all messages, in one row.
-- Times are in microseconds since 1970, sizes in bytes.
-- view: totals
select count(*) as messages, sum(size) as bytes,
    percentile_approx(size, 0.5) as p50, percentile_approx(size, 0.99) as p99,
    max(size) as largest, unix_micros(min(time)) as first,
    unix_micros(max(time)) as last
from {messages}

-- Messages and bytes by key, by host, by size and by time; *kind* says so.
-- They are added up in one pass.
-- view: groups, kept
with message as (
    select key, host, size,
        if(size = 0, 0L, shiftleft(1L, length(bin(size)) - 1)) as low,
        unix_micros(time) div :width * :width as time
    from {messages})
select key, host, low, time, count(*) as messages, sum(size) as bytes,
    case 0 when grouping(key) then 'key' when grouping(host) then 'host'
        when grouping(low) then 'size' else 'time' end as kind
from message group by grouping sets (key, host, low, time)

-- The numbers that the recorders of a host did not write, or that were lost.
-- A row is a host.
-- view: lost
with run as (
    select host, max(n) - min(n) + 1 - count(*) as lost
    from {numbered} group by host, recorder)
select host, sum(lost) as lost from run group by host

-- The busiest keys.
-- A row is a key.
-- view: keys
select key, messages, bytes from {groups} where kind = 'key'
order by messages desc, key limit :limit

-- The hosts that lost most, then the busiest.
-- A row is a host.
-- view: hosts
select host, messages, bytes, lost from {groups} join {lost} using (host)
where kind = 'host' order by lost desc, messages desc, host limit :limit

-- How many keys and hosts there are, and what all hosts lost, in one row.
-- The two views above show only some of them.
-- view: counts
select count_if(kind = 'key') as keys_total,
    count_if(kind = 'host') as hosts_total,
    (select sum(lost) from {lost}) as lost
from {groups}

-- Messages by size, in steps from *low* to below twice that.
-- A row is a step that has messages.
-- view: sizes
select low, messages, bytes from {groups} where kind = 'size' order by low

-- Messages by time, in steps of the width from *time* on.
-- A row is a step that has messages.
-- view: times
select time, messages, bytes from {groups} where kind = 'time' order by time
