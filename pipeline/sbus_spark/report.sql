-- What a report asks of the rows of a table; `report` runs these in their
-- order.  {name} is a view above, or the rows; :name is a value.  To start a
-- query takes longer than to run it, so there are few.

-- The sums of all messages, in one row.
-- Times are in microseconds since 1970, sizes in bytes.
-- view: totals
select count(*) as messages, sum(size) as bytes,
    percentile_approx(size, 0.5) as p50, percentile_approx(size, 0.99) as p99,
    max(size) as largest, unix_micros(min(time)) as first,
    unix_micros(max(time)) as last from {rows} where is_message

-- Messages and bytes by key, by recorder, by size and by time; *kind* says so.
-- They are added up in one pass; *lost* numbers a recorder did not write.
-- view: groups, kept
with message as (
    select key, host, recorder, n, is_message, if(is_message, size, 0) as size,
        if(size = 0, 0L, shiftleft(1L, length(bin(size)) - 1)) as low,
        unix_micros(time) div :width * :width as time
    from {rows})
select key, host, low, time, count_if(is_message) as messages,
    sum(size) as bytes, max(n) - min(n) + 1 - count(*) as lost,
    case 0 when grouping(key) then 'key' when grouping(host) then 'host'
        when grouping(low) then 'size' else 'time' end as kind
from message group by grouping sets (key, (host, recorder), low, time)
having messages > 0 or kind = 'host'

-- The hosts that have messages.
-- A row is a host.
-- view: hosts
select host, sum(messages) as messages, sum(bytes) as bytes, sum(lost) as lost
from {groups} where kind = 'host' group by host having messages > 0

-- The busiest keys; the hosts that lost most, then the busiest; messages by
-- size, in steps from *low* to below twice that, and by time, in steps of the
-- width from *time* on.  *list* says what a row is of, which is JSON.
-- view: lists
(select 'keys' as list, to_json(struct(key, messages, bytes)) as row
from {groups} where kind = 'key' order by messages desc, key limit :limit)
union all (select 'hosts', to_json(struct(host, messages, bytes, lost))
from {hosts} order by lost desc, messages desc, host limit :limit)
union all (select kind || 's', to_json(struct(low, time, messages, bytes))
from {groups} where kind in ('size', 'time'))

-- How many keys and hosts there are, and what all hosts lost, in one row.
-- The lists show only some of them.
-- view: counts
select count_if(kind = 'key') as keys_total,
    count(distinct if(messages > 0, host, null)) as hosts_total,
    sum(if(kind = 'host', lost, 0)) as lost from {groups}
