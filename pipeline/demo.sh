#!/bin/sh
# Show the pipeline: a bus, traffic, a recording, its audit and its report.
#
#     make demo
#
# All files go to build/demo, which is emptied first.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
demo=build/demo
rm -rf $demo
mkdir -p $demo
folder=$(mktemp -d)
trap '{ set +x; kill $recorder $server || :; rm -rf "$folder"; } 2>/dev/null' EXIT

# Print what a house might say in four seconds, as lines for `pub --json`
say() {
    awk 'BEGIN {
        split("hall kitchen bath attic", rooms)
        for (n = 0; n < 10000; n++) {
            room = rooms[int(rand() * rand() * 4) + 1]
            kind = n % 40 ? "temperature" : "camera"
            text = sprintf("%*s", n % 40 ? 4 : n / 4, 20 + n % 9 / 10)
            printf "{\"key\":\"house/%s/%s\",", room, kind
            printf "\"payload\":\"%s\"}\n", text
        }
    }'
}

set -x # from here on each command is shown
$python sbus.py -a "$folder/bus" --trace $demo/trace & server=$!
while ! [ -S "$folder/bus" ]; do sleep 0.1; done
$python tools -a "$folder/bus" record $demo/capture & recorder=$!
while ! grep -q '"ev":"sub"' $demo/trace; do sleep 0.1; done
say | $python tools -a "$folder/bus" pub --json --rate 2500
kill $recorder
wait $recorder
kill $server
wait $server

$python pipeline/sbus_spark audit $demo/trace
$python pipeline/sbus_spark ingest $demo/capture $demo/table
$python pipeline/sbus_spark report $demo/table -o $demo/report.html
