# The adapter of sbus.sh for the conformance kit; spec/README.md has its form:
# sh adapter.sh ADDRESS
here=$(dirname "$0")
[ -e /proc/$$/fd/3 ] || exec sh "$here/sbus.sh" "$1" sh "$0"
. "$here/sbus.sh"

decode() {
    printf %s "${1#-}" | tr a-f A-F | basenc -d --base16
}

encode() {
    basenc --base16 -w 0
}

text=$directory/text
touch "$payload"
while read -r word first second; do
    name=$(decode "$first" && echo .) # which keeps newlines at the end
    decode "$second" >"$text"
    case $word in
    receive | whoami) "$word" ;;
    reply) reply <"$text" ;;
    *) "$word" "${name%.}" <"$text" ;;
    esac
    case $? in
    0)
        [ "$kind" = CMSG ] && answer=control || answer=ok
        echo "$answer $(printf %s "$key" | encode) $(encode <"$payload")"
        ;;
    1) echo closed ;;
    *) echo "error $?" ;;
    esac
done
