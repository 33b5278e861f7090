# A client of the message bus sbus in the shell, to be copied.  It needs socat
# 1.7 and GNU coreutils and findutils.
#
#     sh sbus.sh ADDRESS PROGRAM [ARGUMENT...]
#
# runs a program whose descriptor 3 is a connection: each write(2) to it sends
# a packet, each read(2) receives one.  An empty ADDRESS is the default one.
# Such a program in the shell includes this file, and has these functions:
#
#     . ./sbus.sh
#     subscribe sensors/
#     echo 21.5 | publish sensors/1
#     while receive; do echo "$key: $(cat "$payload")"; done
#
# receive sets key, kind (MSG or CMSG) and payload, a file.  A function fails
# with 1 if the bus has closed, 2 if a packet is too large, 124 if no answer
# comes in time, and 3 if a request failed.
export LC_ALL=C # all is bytes

# ---- Where the bus is [ADDR-1]

# Print a directory unless it is not this user's, or open to others.
ours() {
    find "$1" -maxdepth 0 -type d -user "$(id -u)" ! -perm "/$2" 2>/dev/null
}

default_address() {
    if [ -n "$SBUS_ADDRESS" ]; then
        echo "$SBUS_ADDRESS"
    elif [ "$(id -u)" = 0 ]; then
        echo /run/sbus.socket
    elif [ "${XDG_RUNTIME_DIR#/}" != "$XDG_RUNTIME_DIR" ] &&
        [ -n "$(ours "$XDG_RUNTIME_DIR/." 022)" ]; then
        echo "$XDG_RUNTIME_DIR/sbus.socket"
    elif [ -n "$(ours "/run/user/$(id -u)/." 022)" ]; then
        echo "/run/user/$(id -u)/sbus.socket"
    elif [ -n "$(ours "/tmp/sbus-$(id -u)" 077)" ]; then
        # Anybody could have made it, and so it must be no link
        echo "/tmp/sbus-$(id -u)/sbus.socket"
    else
        echo "sbus.sh: no directory for a bus is yours alone" >&2
        return 1
    fi
}

# ---- What is sent

# Send the packet on standard input by one call, which waits for a busy bus.
send() {
    cat >"$directory/sent"
    [ "$(wc -c <"$directory/sent")" -le 409600 ] || return 2
    dd bs=409600 count=1 if="$directory/sent" >&3 2>/dev/null
}

subscribe() {
    printf 'SUB %s' "$1" | send
}

unsubscribe() {
    printf 'UNSUB %s' "$1" | send
}

# Publish what is on standard input.
publish() {
    { printf 'MSG %s\0' "$1" && cat; } | send
}

# ---- What is received

# Receive a packet, within so many seconds if they are given.
receive_packet() {
    until timeout "${1:-0}" dd bs=409601 count=1 >"$packet" 2>"$error" <&3; do
        # A reset comes once, before the last packets
        grep -q reset "$error" || return 124
    done
    [ -s "$packet" ] || return 1
    [ "$(wc -c <"$packet")" -le 409600 ] || return 2
}

# Set kind, key and payload.  A dot keeps newlines at the end of a key.
parse_packet() {
    key=$(head -zn 1 "$packet" | tr -d '\0' && echo .)
    key=${key%.}
    tail -c "+$((${#key} + 2))" "$packet" >"$payload"
    kind=${key%% *}
    key=${key#* }
}

# Whether the packet answers a request, even one that nobody waits for.
is_answer() {
    [ -n "$reply_keys" ] && [ "${key#"$reply_keys"}" != "$key" ]
}

# Receive the next message: one that was kept, or else from the bus.
receive() {
    if [ "$kept_first" -lt "$kept_last" ]; then
        kept_first=$((kept_first + 1))
        mv "$directory/kept.$kept_first" "$packet"
        parse_packet
        return
    fi
    while receive_packet || return $?; do
        parse_packet
        is_answer || return 0 # else it comes too late
    done
}

# Receive the answer of a kind and under a key, or under KEY/failed, within so
# many seconds.  What comes before it is kept for receive.
receive_answer() {
    end=$(($(date +%s) + $3))
    while left=$((end - $(date +%s))) && [ "$left" -gt 0 ]; do
        receive_packet "$left" || return $?
        parse_packet
        [ "$kind $key" = "$1 $2" ] && return 0
        [ "$kind $key" = "$1 $2/failed" ] && return 3
        is_answer && continue
        kept_last=$((kept_last + 1))
        mv "$packet" "$directory/kept.$kept_last"
    done
    return 124
}

# Set payload to who this client is.  When the answer comes, the server has
# done all that was sent before.
whoami() {
    printf 'CMSG !/cred/whoami' | send # or the end is to be received
    receive_answer CMSG '!/cred/whoami' "${1:-60}"
}

# ---- Requests, of which the server knows nothing

# Ask the clients that have subscribed to a key what is on standard input;
# set payload to the first answer.
request() {
    cat >"$directory/question"
    if [ -z "$reply_keys" ]; then # which nobody is to guess
        whoami "${2:-5}" || return
        secret=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
        reply_keys=$(cat "$payload")/$secret/
        subscribe "$reply_keys" || return
    fi
    requests=$((requests + 1))
    reply_key=$reply_keys$requests
    { printf '%s\0' "$reply_key" && cat "$directory/question"; } |
        publish "$1" || return
    receive_answer MSG "$reply_key" "${2:-5}"
}

# Answer the message that was received last by what is on standard input.  Its
# payload is a key for the answer, NUL, and the question.  Any server accepts
# such a key, if it is short.  A segment ! elsewhere would have it disconnect
# this client [REQUEST-3].
reply() {
    run='!/cred/[0-9]+/[0-9]+/[0-9]+/'
    head -zn 1 "$payload" |
        grep -qzxE "($run){1,12}[0-9A-Za-z]+/[0-9A-Za-z]+" || return 2
    reply_key=$(head -zn 1 "$payload" | tr -d '\0')
    [ "$(wc -c <"$payload")" -gt "${#reply_key}" ] || return 2
    [ "${#reply_key}" -le 4000 ] || return 2
    publish "$reply_key"
}

# ---- The start

if [ "${0##*/}" = sbus.sh ]; then
    address=${1:-$(default_address)} || exit
    shift
    # socat copies nothing: it becomes the program.  Type 5 is SEQPACKET, and
    # the kernel doubles the buffer, so that the largest packet fits.
    exec socat "UNIX-CONNECT:$address,type=5,sndbuf=204832" \
        "EXEC:$*,nofork,fdin=3,fdout=3"
fi

directory=$(mktemp -d) || exit
trap 'rm -r "$directory"' EXIT
packet=$directory/packet payload=$directory/payload error=$directory/error
kept_first=0 kept_last=0 requests=0 reply_keys=
