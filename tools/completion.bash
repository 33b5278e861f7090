# Completion of sbus for bash: source <(sbus completion bash)
_sbus() {
    local before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    local words=$("$1" completion words "${before[@]}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _sbus sbus
