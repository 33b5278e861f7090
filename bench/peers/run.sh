#!/bin/sh
# The same load on sbus, mosquitto, Redis and NATS, in turn: sh bench/peers/run.sh [ROUNDS]
#
# It needs gcc, and the three servers from the packages of a distribution.
# Each publisher makes one write a message, as sbus has one packet a message.
# Redis and mosquitto listen at Unix sockets, NATS on the loopback.  The last
# lines have the median of all rounds: messages a second that were received,
# and for pingpong microseconds.
set -eu
here=$(dirname "$0")
folder=$(mktemp -d)
servers=
# shellcheck disable=SC2086 # there are several
trap 'kill $servers; wait; rm -r "$folder"' EXIT

for load in sbusload peerload; do
    gcc -O2 -pthread -o "$folder/$load" "$here/$load.c"
done
cat >"$folder/conf" <<END
listener 0 $folder/mqtt
allow_anonymous true
max_queued_messages 0
max_inflight_messages 0
log_type none
user $(id -un)
END

redis-server --port 0 --unixsocket "$folder/redis" --save '' \
    --client-output-buffer-limit 'pubsub 0 0 0' >/dev/null & servers="$servers $!"
mosquitto -c "$folder/conf" >/dev/null 2>&1 & servers="$servers $!"
nats-server -a 127.0.0.1 -p 14222 >/dev/null 2>&1 & servers="$servers $!"
python3 "$here/../../sbus.py" -a "$folder/sbus" 2>/dev/null & servers="$servers $!"
sleep 2

for round in $(seq "${1:-5}"); do
    for work in 'pipe 150000 64 1' 'pipe 40000 4096 1' 'fan 15000 64 16' \
        'pingpong 10000 64 1'; do
        # shellcheck disable=SC2086 # the words of the work
        for server in sbus redis mosquitto nats; do
            case $server in
            sbus) said=$("$folder/sbusload" "$folder/sbus" $work) ;;
            redis) said=$("$folder/peerload" redis "$folder/redis" $work) ;;
            mosquitto) said=$("$folder/peerload" mqtt "$folder/mqtt" $work) ;;
            nats) said=$("$folder/peerload" nats 14222 $work) ;;
            esac
            echo "$server $round $work: $said"
        done
    done
done | tee "$folder/all"

echo
sed -n 's/^\([a-z]*\) [0-9]* \([^:]*\): .*\(delivered.s\|p50_us\)=\([0-9.]*\).*/\2 \1 \4/p' "$folder/all" |
    sort -k1,5 -k6,6n | awk '
    { name = $1 " " $2 " " $3 " " $4 " " $5
      if (name != last && NR > 1) print last, values[int((n + 1) / 2)]
      if (name != last) n = 0
      last = name; values[++n] = $6 }
    END { print last, values[int((n + 1) / 2)] }'
