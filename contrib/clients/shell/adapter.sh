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

while read -r word first second; do
    text=$(decode "$first" && echo .)
    text=${text%.}
    decode "$second" >"$directory/text"
    case $word in
    receive)
        receive && answer=message && {
            [ "$kind" = MSG ] || answer=control
            answer="$answer $(printf %s "$key" | encode) $(encode <"$payload")"
        }
        ;;
    whoami)
        whoami && answer="credentials $(encode <"$payload")"
        ;;
    request)
        request "$text" <"$directory/text" &&
            answer="answer $(encode <"$payload")"
        ;;
    publish)
        publish "$text" <"$directory/text" && answer=ok
        ;;
    reply)
        decode "$first" | reply && answer=ok
        ;;
    close)
        exec 3>&- && answer=ok
        ;;
    *)
        "$word" "$text" && answer=ok
        ;;
    esac
    case $? in
    0) echo "$answer" ;;
    1) echo closed ;;
    *) echo "error $?" ;;
    esac
done
